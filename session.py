"""A model with its tokenizer, its engine and its settings: text in, pieces of text out.

    session = Session("models/tales")
    for piece in session.generate("Once upon a time", n=50, temp=0.5):
        print(piece.text, end="")

The command line, the chat, the server and Python programs use these few methods. Nothing here reads
flags or knows a terminal; errors name a setting as Python does, such as ctx_size."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from weakref import ref

import torch
from tqdm import tqdm

from constraints import Constraint, Grammars
from engine import Engine, Score, Sequence, Timings
from grammars import json_grammar
from loading.checkpoint import Checkpoint, load, open_checkpoint
from loading.place import DTYPES
from logprobs import Logprob, PromptScores
from passes import Passes
from ranks.processes import Ranks
from sampling import Sampling
from settings import SETTINGS, Options
from speculation.head_file import HeadFile, find_head
from speculation.heads import Head
from speculation.proposals import Draft, Lookup
from tokenizer import THINK, THOUGHT, Prompt, TextStream, Tokenizer

# its "role" and its "content"; beside these, what else chat templates know: "tool_calls",
# "reasoning_content"
Message = dict

# ---- what is generated


class Piece(NamedTuple):
    """What was generated since the piece before. There is a piece for each token, and a last one
    with the text that was still held back."""

    text: str  # empty while a character is incomplete, or while this may begin a stop string
    ids: list[int]
    # if asked for: of the tokens that begin in the text so far, unless an earlier piece has them
    logprobs: list[Logprob] = []


class Text:
    """A text as it is generated: what the engine gives its tokens to. It knows nothing of who reads the
    pieces: a Generation that nobody has any more ends the text."""

    def __init__(
        self, stream: TextStream, eos: Collection[int], constraint: Constraint | None = None
    ):
        """stream: what turns tokens into text. eos: ids that end it. constraint: ends it, too."""
        self.stream = stream
        self.eos = eos
        self.constraint = constraint
        self.pieces: deque[Piece] = deque()
        self.lacking: deque[bool] = deque()  # whether ids go on beyond the text after each of them
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
        self.lacking.append(False)

    def _add(self, text: str, ids: list[int]) -> None:
        self.length += len(text)
        self.pieces.append(Piece(text, ids, self._due()))
        self.lacking.append(self.stream.lacks_text)

    def _due(self) -> list[Logprob]:
        """The log-probabilities of tokens that begin in the text so far, each once."""
        end = self.length
        if self.finished and not self.stream.stopped:
            end += 1  # tokens without a text may come last
        due = [score for score in self._held_back if score.begins < end]
        self._held_back = self._held_back[len(due) :]
        return due


class Generation:
    """The text that follows a prompt: an iterator of its pieces, which also adds them up. When it is
    closed, or nobody has it any more, the text ends."""

    def __init__(self, engine: Engine, sequence: Sequence, text: Text):
        self.prompt_tokens = len(sequence.prompt)
        self.doubles_bos = False  # the prompt has a bos of its own beside the tokenizer's
        # How many of them were evaluated for an earlier text: 0 until the first new token
        self.cached_tokens = 0
        self.ids: list[int] = []  # without an eos
        self.text = ""
        self.logprobs: list[Logprob] = []  # if asked for
        # Why the text ended: "eos", "stop" (a stop string), "length" (the limit), "context" (it is
        # full), or "interrupt", which holds until another reason is known
        self.ended_by = "interrupt"
        self.timings = sequence.timings
        self.thinks = False  # it begins within what is thought
        self.lacks_text = False  # ids go on beyond the text
        self._engine = engine
        self._sequence = sequence
        self._text = text
        self._begun = False
        self.ended = False
        self._at_end: list[Callable[[Generation], None]] = []

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        if self.ended:
            raise StopIteration
        self.begin()
        sequence, text = self._sequence, self._text
        try:
            seconds = self._engine.wait_for(sequence, lambda: bool(text.pieces))
        except Exception:
            self._at_end.clear()
            self.close()
            raise
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if not text.pieces:
            if text.finished:
                self._end()
                raise StopIteration
            text.finish()
        piece = text.pieces.popleft()
        self.lacks_text = text.lacking.popleft()
        new = len(piece.ids)
        if text.ended_by == "eos" and not text.pieces:
            new += 1
        sequence.note_time(seconds, new)
        self.cached_tokens = self.prompt_tokens - self.timings.prompt_tokens
        self.text += piece.text
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        return piece

    def begin(self) -> None:
        """Get in line for a slot, before the first piece is asked for."""
        if not self._begun:
            self._begun = True
            self._engine.add(self._sequence)

    @property
    def ready(self) -> bool:
        """Whether the next piece, or the end, is there without a pass."""
        return not self.ended and (bool(self._text.pieces) or self._sequence.finished)

    def finish(self) -> Generation:
        """Generate all of the text. Returns this object."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """End the text here."""
        if not self.ended:
            self.ended = True
            self._engine.leave(self._sequence)
            self._call_at_end()

    def __del__(self) -> None:
        self.close()

    @property
    def stop(self) -> str:
        """The stop string before which the text ended; empty if it ended for another reason."""
        return self._text.stream.stop

    @property
    def answered(self) -> bool:
        """Whether there is a text: False if it was interrupted before the first token."""
        return bool(self.ids) or self.ended_by != "interrupt"

    def at_end(self, do: Callable[[Generation], None]) -> None:
        """Call `do` with this object when the text ends or is interrupted, but not after an error."""
        self._at_end.append(do)

    def _end(self) -> None:
        self.ended = True
        self.ended_by = self._text.ended_by
        if not self.ended_by:
            full = self._text.tokens != self._sequence.n
            self.ended_by = "context" if full else "length"
        self._call_at_end()

    def _call_at_end(self) -> None:
        for do in self._at_end:
            do(self)
        self._at_end.clear()


# ---- a session


def listed(stop: str | Collection[str]) -> Collection[str]:
    """Several strings, or one in a list."""
    return [stop] if isinstance(stop, str) else stop


class Session:
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
        propose so many tokens from earlier in the text. draft: a smaller model, or a head that was
        trained for this one, which proposes draft_max tokens. draft_always: also where proposals
        cost more time than they save. Raises ValueError, OSError or MemoryError with a message of
        one line."""
        start = time.perf_counter()
        if "dtype" in options:
            options["dtype"] = dtype_name(options["dtype"])
        asked = Options(**options)
        checkpoint = open_checkpoint(model)
        config = checkpoint.config
        # Opened before the weights, which may take minutes, so that its errors come at once
        files = checkpoint.tokenizer_files(chat_template)
        self.tokenizer = Tokenizer(files, config.vocab_size, config.bos_id)
        if asked.threads:
            torch.set_num_threads(asked.threads)
        if lookup and draft:
            raise ValueError("lookup and draft both propose tokens: use one of them")
        # Ranks would disagree about when proposals pay off
        if (lookup or draft) and ranks.size > 1:
            raise ValueError(f"lookup and draft run in one process, not in {ranks.size}")
        head = smaller = None
        if draft and (folder := find_head(draft)):
            head = HeadFile(folder, checkpoint.folder, config)
        elif draft:
            smaller = open_checkpoint(draft)
            check_draft(draft, smaller, self.tokenizer, config.vocab_size)
        self.ranks = ranks
        options |= dict(sampling=sampling, quiet=quiet, ranks=ranks)
        self.model = load(checkpoint, **options)
        if not asked.threads and self.model.device.type == "cpu" and self.model.suits_one_thread:
            torch.set_num_threads(1)
        self.eos: set[int] = {*config.eos_ids, self.tokenizer.eos} - {-1}
        self.engine = Engine(self.model, asked.parallel)
        self.ctx_size = self.engine.size  # positions of each text
        if lookup:
            self.engine.proposer = Lookup(lookup)
        if head:
            weights = head.load(self.model)
            self.engine.proposer = Head(draft_max, self.engine.passes, weights)
        if smaller:
            options["ctx_size"] = self.ctx_size  # as long as the model's
            passes = Passes(load(smaller, **options), asked.parallel)
            self.engine.proposer = Draft(draft_max, passes, config.vocab_size)
        if self.engine.proposer:
            self.engine.proposer.always = draft_always
        self.sampling: Sampling = self.model.sampling  # the checkpoint's own
        self.timings = Timings()  # of all that was generated
        self.load_seconds = time.perf_counter() - start
        # The latest prompts of chats, with their answers: of as many chats as may be in the cache
        self._pasts: deque[Prompt] = deque(maxlen=2 * asked.parallel)
        self._grammars: Grammars | None = None  # once one is asked for
        self._turn_ends: tuple[set[int], list[str]] | None = None

    def generate(
        self,
        prompt: str | list[int],
        *,
        n: int = -1,
        stop: str | Collection[str] = (),
        sampling: Sampling | None = None,
        ignore_eos: bool = False,
        eos: Collection[int] | None = None,
        strip_space: bool | None = None,
        logprobs: int | None = None,
        echo: bool = False,
        shown: Collection[str] = (),
        logit_bias: Mapping[int, float] | None = None,
        min_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
        schema: dict | str | None = None,
        grammar: str | None = None,
        after: str = "",
        progress: Callable[[int, int], None] | None = None,
        **settings,
    ) -> Generation:
        """Continue a prompt, in which the names of control tokens stand for these. Nothing is
        evaluated before the first piece is asked for.
        There are at most n tokens; below 0 there is no limit but the context. The text ends before
        `stop`, or the first of several such strings.

        sampling: by default the session's, in which settings, such as temp=0.5, replace single
        values. eos: the ids that end the text, by default the model's; with ignore_eos they are
        never chosen. strip_space: leave out a space at the beginning of the text; by default if the
        prompt is empty and the tokenizer puts one first. progress: called with the number of tokens
        of the prompt that are done, and the total. logprobs: note the log-probability of each
        token, and of so many of the most probable ones at its place; tokens are then decoded one by
        one. echo: the text begins with the prompt, which is the first piece; the prompt's tokens
        then have log-probabilities, too. shown: control tokens that the text does not leave out.
        logit_bias: what is added to the logits of these ids. min_tokens: the text does not end with
        an eos before. stop_token_ids: more ids that end it. schema: the text is JSON, as this JSON
        schema says. grammar: the text is what this grammar says, in Lark. after: both hold for what
        follows this, such as "</think>".

        Raises TypeError for an unknown setting, ValueError for one out of range or for a wrong
        prompt, and passes.ContextFull, which is a ValueError, for a prompt longer than the context.
        The iterator raises RuntimeError if the logits are not finite."""
        sampling = replace_settings(sampling or self.sampling, settings)
        if strip_space is None:
            strip_space = prompt == "" and self.tokenizer.vocabulary.adds_space
        text = prompt
        doubles_bos = False
        if isinstance(prompt, str):
            prompt = self.encode(prompt)
            doubles_bos = prompt[:2] == [self.tokenizer.bos] * 2
        elif echo:
            text = self.tokenizer.decode(prompt)
        eos = {*(self.eos if eos is None else eos), *stop_token_ids}
        self.model.check(prompt)
        self._check_ids([*(logit_bias or ()), *stop_token_ids])
        if schema is not None:
            grammar = json_grammar(schema)
        constraint = None
        if grammar is not None or min_tokens > 0:
            constraint = self._constraint(eos, min_tokens, grammar, after)
            strip_space = strip_space and grammar is None
        self.engine.passes.check_room(len(prompt))
        if logprobs is not None and logprobs < 0:
            raise ValueError(f"logprobs is {logprobs}; it must be 0 or more")
        stream = TextStream(self.tokenizer, strip_space, listed(stop), shown)
        written = Text(stream, eos, constraint)
        scored = None
        if echo and logprobs is None:
            written.begin_with(text, [])
        elif echo:
            scored = PromptScores(self.tokenizer, text, prompt, written.begin_with)
        sequence = Sequence(
            prompt,
            written.take,
            n=n,
            sampling=sampling,
            eos=eos,
            ignore_eos=ignore_eos,
            progress=progress,
            bias=logit_bias,
            constraint=constraint,
            scores=logprobs,
            prompt_scores=scored and scored.add,
        )
        generation = Generation(self.engine, sequence, written)
        generation.doubles_bos = doubles_bos
        generation.at_end(self._count)
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

    def _check_ids(self, ids: Collection[int]) -> None:
        V = self.model.config.vocab_size
        if wrong := [id for id in ids if not 0 <= id < V]:
            raise ValueError(f"there is no token {wrong[0]}; the model's are 0 .. {V - 1}")

    def _constraint(
        self, eos: Collection[int], min_tokens: int, grammar: str | None, after: str
    ) -> Constraint:
        """Raises ValueError."""
        V = self.model.config.vocab_size
        matcher = None
        if grammar is not None:
            if self._grammars is None:
                ends = set()
                with suppress(ValueError):  # the template fails
                    ends, _ = self.turn_ends()
                self._grammars = Grammars(self.tokenizer, V, self.eos | ends)
            matcher = self._grammars.matcher(grammar)
        ends = [id for id in eos if 0 <= id < V]
        return Constraint(V, ends, min_tokens, matcher, after, self.token_text)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, in which the names of control tokens stand for these; for an empty
        text, an id from which the model can start. Raises ValueError for a lone surrogate."""
        first = [i for i in (self.tokenizer.bos, self.tokenizer.eos) if i >= 0][:1]
        return self.tokenizer.encode(text, parse_special=True) or first

    def token_text(self, token: int) -> str:
        """The text of a single token: of a control token, its name. Bytes that are no whole
        character become U+FFFD."""
        if name := self.tokenizer.control_names.get(token):
            return name
        return self.tokenizer.bytes_of(token).decode(errors="replace")

    def chat(
        self,
        messages: list[Message] | Prompt,
        *,
        stop: str | Collection[str] = (),
        shown: Collection[str] = (),
        **options,
    ) -> Generation:
        """Answer messages, or what `render` made of them; if an answer comes last, continue it.
        options: as for `generate`, which raises the same errors. The answer also ends where the
        chat template would write something after it. What is thought is part of its text, with
        <think> and </think> around it, of which the template may have written the first; a schema
        or a grammar is for what follows."""
        prompt = messages if isinstance(messages, Prompt) else self.render(messages)
        ids, texts = self.turn_ends()
        if options.get("grammar") is not None or options.get("schema") is not None:
            texts = []  # it says itself where the text ends, and may hold what looks like an end
        options |= dict(eos=self.eos | ids, stop=[*listed(stop), *texts])
        options |= dict(shown=[THINK, THOUGHT, *shown], after=THOUGHT if prompt.thinks else "")
        strip_space = prompt.leaves_space
        if not prompt.continues:
            strip_space = self.tokenizer.vocabulary.adds_space
        options |= dict(strip_space=strip_space)
        generation = self.generate(prompt.ids, **options)
        generation.thinks = prompt.thinks
        generation.at_end(partial(self._remember, prompt))
        return generation

    def render(
        self,
        messages: list[Message],
        tools: list[dict] | None = None,
        variables: dict | None = None,
    ) -> Prompt:
        """The text and the ids that the chat template makes of messages, up to where the model
        answers, or goes on with the last answer. If they continue the last chat, so do the ids.
        tools and variables: what else the template is given, such as enable_thinking.
        With several ranks, rank 0 renders, since a template may ask for the time; the others
        receive the prompt or the error. Raises ValueError if the template refuses the messages, or
        leaves out a system message."""
        last = messages[-1] if messages else {}
        continues = last.get("role") == "assistant" and not last.get("tool_calls")
        if continues and not last["content"].strip():
            messages = messages[:-1]
            continues = False
        if not messages:
            raise ValueError("there is no message to answer, and no text of an answer to continue")
        given = dict(tools=tools, variables=variables)

        def rendered() -> Prompt:
            self.tokenizer.check_systems(messages, **given)
            return self.tokenizer.chat_prompt(
                messages, pasts=self._pasts, continues=continues, **given
            )

        return self.ranks.broadcast(rendered)

    def turn_ends(self) -> tuple[set[int], list[str]]:
        """The ids and the strings that end an answer, besides eos, according to the chat template.
        Raises ValueError if it fails."""
        if self._turn_ends is None:
            self._turn_ends = self.ranks.broadcast(self.tokenizer.turn_ends)
        return self._turn_ends

    def types(self) -> str:
        """The types in which the model computes, in words: its dtype, and what is in another
        type."""
        model = self.model
        formats = model.weights.held
        quantised = model.checkpoint.quantised
        text = next(name for name, value in DTYPES.items() if value == model.dtype)
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

    def _count(self, text: Generation) -> None:
        self.timings += text.timings

    def _remember(self, prompt: Prompt, answer: Generation) -> None:
        if answer.answered:
            ids = answer.ids
            if answer.lacks_text:
                ids = self.tokenizer.encode(answer.text, bos=False)
            self._pasts.append(replace(prompt, ids=prompt.ids + ids, answer=answer.text))


def dtype_name(dtype: str | torch.dtype) -> str:
    """The name that load knows a dtype by, if it is known by another: "fp16" for torch.float16 and
    for "float16"."""
    for name, known in DTYPES.items():
        if dtype in (known, str(known).removeprefix("torch.")):
            return name
    return dtype


def replace_settings(sampling: Sampling, settings: dict[str, float]) -> Sampling:
    """The sampling with some settings replaced. Raises TypeError for a name that is no setting,
    ValueError for a value out of range."""
    for name in settings:
        if name not in SETTINGS:
            raise TypeError(f"there is no setting {name!r}; sampling has {', '.join(SETTINGS)}")
    return replace(sampling, **settings)


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
            self.length_with("?", messages, "the system prompt")
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
        if roles[begins:] != ["user", "assistant"] * turns:
            raise ValueError("it is not a conversation: messages of a user, each with its answer")
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
        self.length_with(message, self.system, "the message")
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

    def length_with(self, message: str, system: list[Message], name: str) -> int:
        """How many tokens a first message takes after a system prompt. Raises ValueError, which
        names what is too long, if the context is smaller."""
        size = self.session.ctx_size
        length = len(self.session.render([*system, {"role": "user", "content": message}]).ids)
        if length > size:
            raise ValueError(f"{name} takes {length} tokens; the context holds {size} (ctx_size)")
        return length

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
