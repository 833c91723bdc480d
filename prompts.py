"""What is asked of a model, as far as that needs no model: prompts, conversations, and the checks of what
is wanted.

A Writer continues prompts. It is a Session, whose model is in this process, or the server's, whose model
is in another one. This needs no torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

from grammars import Grammars, json_grammar
from settings import SETTINGS, Sampling
from texts import Generation, check_prompt, check_room
from tokenizer import LARGE, THINK, THOUGHT, Prompt, Tokenizer

# its "role" and its "content"; beside these, what else chat templates know: "tool_calls",
# "reasoning_content"
Message = dict

MOST_BIAS = 1e9  # of either sign: enough to rule out a token, or all others


@dataclass(frozen=True, kw_only=True)
class Order:
    """A text that is wanted: plain values, which have been checked and may be sent to another process.
    Writer.generate says what they mean."""

    prompt: list[int]
    sampling: Sampling
    n: int
    stop: Collection[str]
    eos: Collection[int]
    ignore_eos: bool
    strip_space: bool
    logprobs: int | None
    echo: str | None  # the prompt as text, if the text begins with it
    shown: Collection[str]
    logit_bias: Mapping[int, float] | None
    min_tokens: int
    grammar: str | None
    after: str


class Writer:
    """Whoever continues prompts: the part of it that needs no model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos: Collection[int],
        sampling: Sampling,
        ctx_size: int,
        parallel: int,
    ):
        """vocab_size, eos: the model's. sampling: of texts that do not say. ctx_size: positions of each
        text. parallel: how many texts may be written at once."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos = {*eos, tokenizer.eos} - {-1}
        self.sampling = sampling
        self.ctx_size = ctx_size
        # The latest prompts of chats, with their answers: of as many chats as may be in the cache
        self._pasts: deque[Prompt] = deque(maxlen=2 * parallel)
        self._turn_ends: tuple[set[int], list[str]] | None = None

    # Texts

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
        """Continue a prompt, in which the names of control tokens stand for the tokens. Nothing is
        evaluated before the first piece is asked for. There are at most n tokens; below 0 there is
        no limit but the context. The text ends before `stop`, or the first of several such strings.

        sampling: by default the session's, in which settings, such as temp=0.5, replace single
        values. eos: the ids that end the text, by default the model's; with ignore_eos they are
        never chosen. strip_space: leave out a space at the beginning of the text; by default if the
        prompt is empty and the tokenizer puts one first. progress: called with the number of tokens
        of the prompt that are done, and the total. logprobs: note the log-probability of each
        token, and of that many of the most probable ones at its place; tokens are then decoded one
        by one. echo: the text begins with the prompt, which is the first piece; the prompt's tokens
        then have log-probabilities, too. shown: control tokens that the text does not leave out.
        logit_bias: what is added to the logits of these ids. min_tokens: before that many tokens,
        no eos ends the text. stop_token_ids: more ids that end it. schema: the text is JSON, as this
        JSON schema says. grammar: the text is what this grammar says, in Lark. after: schema and
        grammar hold for what follows this string, such as "</think>".

        Raises TypeError for an unknown setting, ValueError for one out of range or for a wrong
        prompt, and texts.ContextFull, which is a ValueError, for a prompt after which the context
        has no room for a token. The iterator raises RuntimeError if the logits are not finite."""
        sampling = replace_settings(sampling or self.sampling, settings)
        if strip_space is None:
            strip_space = prompt == "" and self.tokenizer.vocabulary.adds_space
        text = prompt
        doubles_bos = False
        if isinstance(prompt, str):
            if len(prompt) > LARGE:
                self._check_length(prompt, self.ctx_size - (n != 0))
            prompt = self.encode(prompt)
            doubles_bos = prompt[:2] == [self.tokenizer.bos] * 2
        elif echo:
            text = self.tokenizer.decode(prompt)
        check_prompt(prompt, self.vocab_size)
        check_room(len(prompt), self.ctx_size - (n != 0))
        self.check_ids([*(logit_bias or ()), *stop_token_ids])
        if logit_bias:
            if wrong := [bias for bias in logit_bias.values() if not bias < math.inf]:
                raise ValueError(f"logit_bias has {wrong[0]}; it must have numbers below inf")
            clamped = lambda bias: min(max(bias, -MOST_BIAS), MOST_BIAS)
            logit_bias = {id: clamped(bias) for id, bias in logit_bias.items()}
        if logprobs is not None and logprobs < 0:
            raise ValueError(f"logprobs is {logprobs}; it must be 0 or more")
        if schema is not None:
            grammar = json_grammar(schema)
        if grammar is not None:
            self.grammars.matcher(grammar)
        order = Order(
            prompt=[*prompt],  # the caller may go on using the list
            sampling=sampling,
            n=n,
            stop=listed(stop),
            eos={*(self.eos if eos is None else eos), *stop_token_ids},
            ignore_eos=ignore_eos,
            strip_space=strip_space and grammar is None,
            logprobs=logprobs,
            echo=text if echo else None,
            shown=shown,
            logit_bias=logit_bias,
            min_tokens=min_tokens,
            grammar=grammar,
            after=after,
        )
        generation = self.write(order, progress)
        generation.doubles_bos = doubles_bos
        return generation

    def write(self, order: Order, progress: Callable[[int, int], None] | None = None) -> Generation:
        """The text that is wanted. progress: as for `generate`."""
        raise NotImplementedError

    @cached_property
    def grammars(self) -> Grammars:
        """What compiles grammars. It takes up to a second to make, and is made when the first is asked
        for, unless somebody wants it earlier."""
        ends = set()
        with suppress(ValueError):  # the template fails
            ends, _ = self.tokenizer.turn_ends()
        return Grammars(self.tokenizer, self.vocab_size, self.eos | ends)

    def check_ids(self, ids: Collection[int]) -> None:
        """Raise ValueError for an id of which the model has no token."""
        V = self.vocab_size
        if wrong := [id for id in ids if not 0 <= id < V]:
            raise ValueError(f"there is no token {wrong[0]}; the model's are 0 .. {V - 1}")

    def _check_length(self, text: str, size: int) -> None:
        """Raise ContextFull for a text that has more than `size` tokens even if each is as long as the
        longest one. Encoding it would take 250 times its memory."""
        longest = max(len(self.tokenizer.bytes_of(id)) for id in range(self.vocab_size))
        check_room(len(text) // max(1, longest), size, least=True)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, in which the names of control tokens stand for the tokens; for an empty
        text, an id from which the model can start. Raises ValueError for a lone surrogate."""
        first = [i for i in (self.tokenizer.bos, self.tokenizer.eos) if i >= 0][:1]
        return self.tokenizer.encode(text, parse_special=True) or first

    def token_text(self, token: int) -> str:
        """The text of a single token: of a control token, its name. Bytes that are no whole
        character become U+FFFD."""
        if name := self.tokenizer.control_names.get(token):
            return name
        return self.tokenizer.bytes_of(token).decode(errors="replace")

    # Conversations

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
        tools and variables: what else the template is given, such as enable_thinking. Raises
        ValueError if the template refuses the messages, or leaves out a system message, and
        texts.ContextFull, which is one, if there are more messages than the context holds tokens."""
        last = messages[-1] if messages else {}
        continues = last.get("role") == "assistant" and not last.get("tool_calls")
        if continues and not last["content"].strip():
            messages = messages[:-1]
            continues = False
        if not messages:
            raise ValueError("there is no message to answer, and no text of an answer to continue")
        # Each takes a token at least: what cannot fit is not rendered, which would take seconds
        calls = sum(len(message.get("tool_calls") or ()) for message in messages)
        check_room(len(messages) + len(tools or ()) + calls, self.ctx_size, least=True)
        given = dict(tools=tools, variables=variables)
        pasts = [*self._pasts]  # an answer may end meanwhile, in another thread

        def rendered() -> Prompt:
            self.tokenizer.check_systems(messages, **given)
            return self.tokenizer.chat_prompt(messages, pasts=pasts, continues=continues, **given)

        return self.same_everywhere(rendered)

    def turn_ends(self) -> tuple[set[int], list[str]]:
        """The ids and the strings that end an answer, besides eos, according to the chat template.
        Raises ValueError if it fails."""
        if self._turn_ends is None:
            self._turn_ends = self.same_everywhere(self.tokenizer.turn_ends)
        return self._turn_ends

    def same_everywhere(self, do: Callable) -> object:
        """What `do` returns or raises: one value for all processes that share a model, although a chat
        template may ask for the time."""
        return do()

    def _remember(self, prompt: Prompt, answer: Generation) -> None:
        if answer.answered:
            ids = answer.ids
            if answer.lacks_text:
                ids = self.tokenizer.encode(answer.text, bos=False)
            self._pasts.append(replace(prompt, ids=prompt.ids + ids, answer=answer.text))


def listed(stop: str | Collection[str]) -> Collection[str]:
    """Several strings, or one in a list."""
    return [stop] if isinstance(stop, str) else stop


def replace_settings(sampling: Sampling, settings: dict[str, float]) -> Sampling:
    """The sampling with some settings replaced. Raises TypeError for a name that is no setting,
    ValueError for a value out of range."""
    for name in settings:
        if name not in SETTINGS:
            raise TypeError(f"there is no setting {name!r}; sampling has {', '.join(SETTINGS)}")
    return replace(sampling, **settings)
