"""A model with its tokenizer, its engine and its settings: text in, pieces of text out.

    session = Session("models/tales")
    for piece in session.generate("Once upon a time", n=50, temp=0.5):
        print(piece.text, end="")

The command line, the chat, the server and Python programs use these few methods. Nothing here reads
flags or knows a terminal; errors name a setting as Python does, such as ctx_size."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import ref

import torch
from tqdm import tqdm

from constraints import Constraint, Digits
from engine import Engine, Sequence
from loading.checkpoint import Checkpoint, load, open_checkpoint
from loading.place import dtype_name
from passes import Passes
from prompts import Message, Order, Writer
from ranks.processes import Ranks
from sampling import Sampling
from settings import SETTINGS, Options
from speculation.proposals import Draft, Lookup, Proposer
from texts import Generation, Logprob, Piece, Score, Timings
from tokenizer import Prompt, TextStream, Tokenizer

if TYPE_CHECKING:
    from speculation.head_file import HeadFile

# ---- what is generated


class Text:
    """A text as it is generated: what the engine gives its tokens to. It knows nothing of who reads the
    pieces: a Generation that nobody refers to any more ends the text."""

    def __init__(
        self, stream: TextStream, eos: Collection[int], constraint: Constraint | None = None
    ):
        """stream: what turns tokens into text. eos: ids that end it. constraint: ends it, too."""
        self.stream = stream
        self.eos = eos
        self.constraint = constraint
        self.pieces: deque[Piece] = deque()
        self.tokens = 0  # of the text, with an eos
        self.finished = False
        self.ended_by = ""  # "stop" or "eos", once it has ended so
        self.length = 0  # characters so far
        self._held_back: list[Logprob] = []

    def take(self, token: int, score: Score | None) -> bool:
        """Add a token. Returns whether the text ends there."""
        self.tokens += 1
        # An eos is not part of the text, although it has one where a file does not flag it special
        if token in self.eos:
            self.finish("eos")
            return True
        if score:
            begins = self.length + self.stream.held_back
            self._held_back.append(Logprob(token, score.logprob, score.best, begins))
        self._add(self.stream.push(token), [token])
        if self.stream.stopped:
            self.finish("stop")
        elif self.constraint and self.constraint.ended:
            self.finish("eos")
        return self.finished

    def finish(self, reason: str = "") -> None:
        """Add what was still held back."""
        self.finished = True
        self.ended_by = reason
        self._add(self.stream.finish(), [])
        if self.stream.stopped:
            self.ended_by = "stop"

    def begin_with(self, prompt: str, logprobs: list[Logprob]) -> None:
        """Let the text begin with the prompt."""
        self.length += len(prompt)
        self.pieces.append(Piece(prompt, [], logprobs))

    def _add(self, text: str, ids: list[int]) -> None:
        self.length += len(text)
        self.pieces.append(Piece(text, ids, self._due(), self.stream.lacks_text))

    def _due(self) -> list[Logprob]:
        """The log-probabilities of tokens that begin in the text so far, each once."""
        end = self.length
        if self.finished and not self.stream.stopped:
            end += 1  # tokens without a text may come last
        due = [score for score in self._held_back if score.begins < end]
        self._held_back = self._held_back[len(due) :]
        return due


@dataclass
class PromptScores:
    """Collects the scores of a prompt's tokens for a text that begins with it."""

    tokenizer: Tokenizer
    text: str  # the prompt as text
    prompt: list[int]
    done: Callable[[str, list[Logprob]], None]  # takes the text and what is known of all its tokens
    # Nothing comes before the first token
    scores: list[Score | None] = field(default_factory=lambda: [None], init=False)

    def add(self, scores: list[Score]) -> None:
        """Take the scores of the next tokens."""
        self.scores += scores
        if len(self.scores) == len(self.prompt):
            self.done(self.text, self._logprobs())

    def _logprobs(self) -> list[Logprob]:
        stream = TextStream(self.tokenizer, self.tokenizer.vocabulary.adds_space)
        found = []
        end = 0
        for token, score in zip(self.prompt, self.scores):
            begins = end + stream.held_back
            logprob, best = score or (None, [])
            found.append(Logprob(token, logprob, best, begins))
            end += self._length(stream, token, end)
        return found

    def _length(self, stream: TextStream, token: int, end: int) -> int:
        """How many characters of the text a token is. It may have a control token's name, and lack the
        space that some tokenizers put after one."""
        name = self.tokenizer.control_names.get(token)
        if name and self.text.startswith(name, end):
            return len(name)
        piece = stream.push(token)
        if not self.text.startswith(piece, end):
            piece = piece.removeprefix(" ")
        return len(piece)


class LocalGeneration(Generation):
    """A text that this process's engine writes."""

    def __init__(self, engine: Engine, sequence: Sequence, text: Text):
        super().__init__(len(sequence.prompt))
        self.timings = sequence.timings
        self._engine = engine
        self._sequence = sequence
        self._text = text

    @property
    def ready(self) -> bool:
        return not self.ended and (bool(self._text.pieces) or self.finished)

    def _begin(self) -> None:
        self._engine.add(self._sequence)

    def _next(self) -> Piece | None:
        sequence, text = self._sequence, self._text
        seconds = self._engine.wait_for(sequence, lambda: bool(text.pieces))
        if not text.pieces:
            if text.finished:
                self._note_end()
                return None
            text.finish()
        piece = text.pieces.popleft()
        new = len(piece.ids)
        if text.finished and not text.pieces:  # with an eos, if one has ended it
            new = text.tokens - len(self.ids)
        sequence.note_time(seconds, new)
        if sequence.slot:
            self.cached_tokens = self.prompt_tokens - self.timings.prompt_tokens
        return piece

    @property
    def finished(self) -> bool:
        """Whether no more of it will be written."""
        return self._sequence.finished

    def _leave(self) -> None:
        self._engine.leave(self._sequence)

    def _note_end(self) -> None:
        self.stop = self._text.stream.stop
        self.ended_by = self._text.ended_by
        if not self.ended_by:
            full = self._text.tokens != self._sequence.n
            self.ended_by = "context" if full else "length"


# ---- a session


class Session(Writer):
    """A loaded model with its tokenizer and the engine that writes its texts.

    Several texts may be open at once: asking any of them for its next piece runs a pass for all, at
    most `parallel` of them; the others wait until one of these has ended. What a prompt has in common
    with the beginning of an earlier text is not evaluated again, as long as that is still in the cache.
    With several ranks, each has a session, and all call the same methods in the same order."""

    def __init__(
        self,
        model: str | Path,
        *,
        sampling: dict[str, float] | None = None,
        chat_template: str | None = None,
        lookup: int | None = None,
        draft: str | None = None,
        draft_max: int = 4,
        draft_always: bool = False,
        quiet: bool = False,
        ranks: Ranks = Ranks(),
        **options,
    ):
        """model: a folder, a GGUF file, or a repository of the hub. options: how it is run, see
        settings.Options; dtype may also be torch's. sampling, quiet and ranks: see
        checkpoint.load. chat_template: a name or a file, instead of the checkpoint's own. lookup:
        propose up to this many tokens from earlier in the text. draft: a smaller model, or a head
        that was trained for this one, which proposes draft_max tokens. draft_always: also where
        proposals cost more time than they save. Raises ValueError, OSError or MemoryError with a message of
        one line."""
        start = time.perf_counter()
        if "dtype" in options:
            options["dtype"] = dtype_name(options["dtype"])
        asked = Options(**options)
        checkpoint = open_checkpoint(model)
        config = checkpoint.config
        # Opened before the weights, which may take minutes, so that its errors come at once
        files = checkpoint.tokenizer_files(chat_template)
        tokenizer = Tokenizer(files, config.vocab_size, config.bos_id)
        if asked.threads:
            torch.set_num_threads(asked.threads)
        if lookup and draft:
            raise ValueError("lookup and draft both propose tokens: use one of them")
        drafted = open_draft(draft, checkpoint, tokenizer) if draft else None
        self.ranks = ranks
        options |= dict(sampling=sampling, quiet=quiet, ranks=ranks)
        self.model = load(checkpoint, **options)
        if not asked.threads and self.model.device.type == "cpu" and self.model.suits_one_thread:
            torch.set_num_threads(1)
        self.engine = Engine(self.model, asked.parallel)
        super().__init__(
            tokenizer,
            config.vocab_size,
            config.eos_ids,
            self.model.sampling,  # the checkpoint's own
            self.engine.size,
            asked.parallel,
        )
        proposer: Proposer | None = None
        if lookup:
            proposer = Lookup(lookup)
        if drafted:
            proposer = self._proposer_of(drafted, draft_max, options)
        if proposer:
            proposer.always = draft_always
            proposer.ranks = ranks
            self.engine.proposer = proposer
        self.timings = Timings()  # of all that was generated
        self.load_seconds = time.perf_counter() - start

    def _proposer_of(self, draft: HeadFile | Checkpoint, n: int, options: dict) -> Proposer:
        """Proposes up to n tokens by what open_draft has opened. options: those that the model was
        loaded with."""
        if isinstance(draft, Checkpoint):
            options = options | dict(ctx_size=self.ctx_size)  # as long as the model's
            passes = Passes(load(draft, **options), len(self.engine.slots))
            return Draft(n, passes, self.vocab_size)
        from speculation.heads import Head

        return Head(n, self.engine.passes, draft.load(self.model))

    def write(
        self, order: Order, progress: Callable[[int, int], None] | None = None
    ) -> LocalGeneration:
        constraint = None
        if order.grammar is not None or order.min_tokens > 0 and not order.ignore_eos:
            constraint = self._constraint(order)
        stream = TextStream(self.tokenizer, order.strip_space, order.stop, order.shown)
        text = Text(stream, order.eos, constraint)
        scored = None
        if order.echo is not None and order.logprobs is None:
            text.begin_with(order.echo, [])
        elif order.echo is not None:
            scored = PromptScores(self.tokenizer, order.echo, order.prompt, text.begin_with)
        sequence = Sequence(
            order.prompt,
            text.take,
            n=order.n,
            sampling=order.sampling,
            eos=order.eos,
            ignore_eos=order.ignore_eos,
            progress=progress,
            bias=order.logit_bias,
            constraint=constraint,
            scores=order.logprobs,
            prompt_scores=scored and scored.add,
        )
        generation = LocalGeneration(self.engine, sequence, text)
        generation.at_end(lambda text: self.timings.add(text.timings))
        return generation

    def batch(
        self, prompts: Iterable[str | list[int]], *, progress: bool = False, **options
    ) -> list[Generation]:
        """Continue many prompts, `parallel` at a time. Returns their finished texts in order.
        progress: show a bar of how many are done. options: as for generate, which raises the same
        errors."""
        texts = [self.generate(prompt, **options) for prompt in prompts]
        try:
            for text in texts:
                text.begin()
            shown = tqdm(texts, unit=" texts", disable=not progress)
            return [text.finish() for text in shown]
        finally:  # one may have failed, or Ctrl-C come
            for text in texts:
                text.close()

    def same_everywhere(self, do: Callable) -> object:
        return self.ranks.broadcast(do)

    def _constraint(self, order: Order) -> Constraint:
        V = self.vocab_size
        matcher = digits = None
        if order.grammar is not None:
            matcher = self.grammars.matcher(order.grammar)
            digits = self.digits if "%json" in order.grammar else None  # a JSON schema is in it
        ends = [id for id in order.eos if 0 <= id < V]
        return Constraint(V, ends, order.min_tokens, matcher, order.after, self.token_text, digits)

    @cached_property
    def digits(self) -> Digits:
        """What ends numbers in JSON, made when it is first asked for."""
        return Digits(self.grammars.tokens)

    def types(self) -> str:
        """The types in which the model computes, in words: its dtype, and what is in another
        type."""
        model = self.model
        formats = model.weights.format_names
        quantised = model.checkpoint.quantised
        text = dtype_name(model.dtype)
        if formats:
            text += f" with {formats} matrices"
        if quantised and not formats:
            text += f" (decoded from {quantised})"
        if quantised and formats:
            complete = all(matrix.format for matrix in model.weights.matrices)
            text += f" ({quantised} in the file{'' if complete else '; others as floats'})"
        if model.kv_fp8:
            text += ", e4m3 keys and values"
        if model.accumulate == "fp16" or model.accumulate == "fp32" and formats:
            text += f", {model.accumulate} sums for prompts"
        return text


def open_draft(name: str, checkpoint: Checkpoint, tokenizer: Tokenizer) -> HeadFile | Checkpoint:
    """A head that was trained for a checkpoint, or a smaller model with the same tokens. Raises
    ValueError, OSError."""
    from speculation.head_file import HeadFile, find_head

    if folder := find_head(name):
        return HeadFile(folder, checkpoint.folder, checkpoint.config)
    smaller = open_checkpoint(name)
    check_draft(name, smaller, tokenizer, checkpoint.config.vocab_size)
    return smaller


def check_draft(name: str, draft: Checkpoint, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError if a draft has other tokens. How many unused ones pad its vocabulary does
    not matter."""
    config = draft.config
    other = Tokenizer(draft.tokenizer_files(), config.vocab_size, config.bos_id)
    ids = range(max(config.vocab_size, vocab_size))
    differs = any(other.bytes_of(i) != tokenizer.bytes_of(i) for i in ids)
    if differs or other.control != tokenizer.control:
        what = "has a different vocabulary from the model's"
        raise ValueError(f"the draft {name} {what}: it cannot propose tokens for it")


# ---- a conversation


class Conversation:
    """Messages of a user and their answers. Each answer evaluates only what is new. When the
    context is full, the oldest turns go."""

    def __init__(self, session: Session, system: str = "", sampling: Sampling | None = None):
        """system: the system prompt, if any. Raises ValueError if it leaves no room for a message,
        or the chat template refuses it."""
        self.session = session
        self.sampling = sampling or session.sampling
        self.dropped = ""  # what the last message pushed out of the context, in words
        self._answering: Callable[[], Generation | None] = lambda: None  # a weak reference
        self.begin(system)
        session.turn_ends()  # raises now what it would raise at the first message

    def begin(self, system: str = "") -> None:
        """Forget the conversation, and begin a new one with another system prompt; "" for none.
        After a ValueError, as for a new object, it is still the old one."""
        messages = []
        if system:
            messages = [{"role": "system", "content": system}]
            self.check_first("?", messages, "the system prompt")
        self.system: list[Message] = messages
        self.clear()

    @property
    def messages(self) -> list[Message]:
        """The system prompt, if any, and the turns."""
        return [*self.system, *self.turns]

    def go_on_from(self, messages: list[Message]) -> None:
        """Go on from the `messages` of an earlier conversation. Raises ValueError for anything else;
        the conversation is then still the old one."""
        try:
            roles = [message["role"] for message in messages]
            for message in messages:
                message["content"].encode()  # a lone surrogate is no text
        except (TypeError, KeyError, AttributeError, UnicodeEncodeError):
            roles = ["none"]
        begins = int(roles[:1] == ["system"])
        turns = len(roles) // 2
        if type(messages) is not list or roles[begins:] != ["user", "assistant"] * turns:
            raise ValueError(
                "it is not a conversation: messages of a user, each followed by its answer"
            )
        self.begin(messages[0]["content"] if begins else "")
        self.turns = messages[begins:]

    def clear(self) -> None:
        """Forget all but the system prompt."""
        self.end()
        self.turns: list[Message] = []  # two for each turn: the user's and its answer

    def end(self) -> None:
        """End the last answer, if it is unfinished."""
        if answer := self._answering():
            answer.close()

    def answer(self, message: str, **options) -> Generation:
        """Answer a message. Both become part of the conversation when the text ends, or if it is
        interrupted after its first token. options: as for Session.generate. Raises ValueError if
        the message does not fit into the context."""
        self.end()
        return self._answer(message, self.turns, options)

    def again(self, **options) -> Generation:
        """Answer the last message again, with the next seed; the new answer replaces the old one.
        Raises ValueError if there is none."""
        self.end()
        if not self.turns:
            raise ValueError("there is no answer yet")
        seed = (self.sampling.seed + 1) % (SETTINGS["seed"].high + 1)
        self.sampling = replace(self.sampling, seed=seed)
        *turns, message, _ = self.turns
        return self._answer(message["content"], turns, options)

    def fit(self, message: str, turns: list[Message]) -> tuple[Prompt, list[Message]]:
        """The prompt for a message after these turns, and those of them that it contains. Where it
        leaves little room for an answer, the oldest turns are dropped, and then the beginning of
        the last answer, until half of the context is free; the system prompt stays."""
        size = self.session.ctx_size
        new = {"role": "user", "content": message}
        prompt = self.session.render([*self.system, *turns, new])
        if len(prompt.ids) + min(size // 4, 256) <= size:
            return prompt, turns
        self.check_first(message, self.system, "the message")
        while turns and len(prompt.ids) > size // 2:
            if len(turns) > 2:
                turns = turns[2:]
            else:
                turns = self.shortened(turns, len(prompt.ids) - size // 2)
            prompt = self.session.render([*self.system, *turns, new])
        return prompt, turns

    def shortened(self, turn: list[Message], excess: int) -> list[Message]:
        """A turn without the first `excess` tokens of its answer. It is empty if nothing of that is
        left."""
        message, answer = turn
        ids = self.session.tokenizer.encode(answer["content"], bos=False)
        # + 1: a space that encoding may put first
        text = self.session.tokenizer.decode(ids[excess + 1 :])
        text = text.lstrip("\N{REPLACEMENT CHARACTER}")  # of a character that was cut in two
        if 0 < len(text) < len(answer["content"]):
            return [message, answer | {"content": text}]
        return []

    def check_first(self, message: str, system: list[Message], name: str) -> None:
        """Raise ValueError, naming what is too long, if a first message after this system prompt
        leaves no room for an answer."""
        size = self.session.ctx_size
        length = len(self.session.render([*system, {"role": "user", "content": message}]).ids)
        if length >= size:
            what = f"{name} takes {length} tokens"
            raise ValueError(f"{what}; the context holds {size}, including the answer (ctx_size)")

    def _answer(self, message: str, turns: list[Message], options: dict) -> Generation:
        prompt, kept = self.fit(message, turns)
        generation = self.session.chat(prompt, **{"sampling": self.sampling} | options)
        generation.at_end(partial(self._keep, kept, message))
        self._answering = ref(generation)
        self.dropped = dropped_part(turns, kept)
        return generation

    def _keep(self, turns: list[Message], message: str, answer: Generation) -> None:
        if answer.answered:
            said = {"role": "assistant", "content": answer.text}
            self.turns = [*turns, {"role": "user", "content": message}, said]


def dropped_part(turns: list[Message], kept: list[Message]) -> str:
    """What of these turns is not among those kept, in words; empty if all of it is."""
    parts = []
    if count := (len(turns) - len(kept)) // 2:
        parts.append(f"{count} of {len(turns) // 2} turns")
    if kept and kept[-1] != turns[-1]:
        parts.append("the beginning of the last answer")
    return " and ".join(parts)
