"""Texts as they are written: what they come in, and what is known of them.

This needs no torch, and any of it may be sent to another process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class ContextFull(ValueError):
    """There are more tokens than the context holds."""


def check_prompt(prompt: list[int], vocab_size: int) -> None:
    """Raise TypeError for a prompt that is not a list of ids, ValueError if it is empty or contains an
    id that the model does not have."""
    if not isinstance(prompt, list) or not all(isinstance(i, int) for i in prompt):
        how = "tokenizer.encode(text), or ids.tolist() of a tensor"
        raise TypeError(f"a prompt is a list of ids: {how}")
    if not prompt:
        raise ValueError("the prompt is empty: it needs a token to start from, such as bos")
    if wrong := [i for i in prompt if not 0 <= i < vocab_size]:
        what = f"the prompt contains the id {wrong[0]}; the model's are 0 .. {vocab_size - 1}"
        raise ValueError(what)


def check_room(count: int, size: int, least: bool = False) -> None:
    """Raise ContextFull if a text of this many tokens does not fit into a context of this size.
    least: it may have more."""
    if count > size:
        # agents know these words, and shorten the conversation
        what = f"prompt is too long: {'at least ' if least else ''}{count} tokens > {size} maximum"
        raise ContextFull(f"{what}; it exceeds the available context size (ctx_size)")


class Score(NamedTuple):
    """The log-probability of a token, by the model's own logits: no setting changes it."""

    logprob: float
    best: list[tuple[int, float]]  # the most probable tokens here, each with its logprob


class Logprob(NamedTuple):
    """The score of a token in a text."""

    id: int
    logprob: float | None  # None for a prompt's first token, which follows nothing
    best: list[tuple[int, float]]
    begins: int  # the character of the text at which the token begins


class Piece(NamedTuple):
    """What was generated since the piece before. There is a piece for each token, and a last one
    with the text that was still held back."""

    text: str  # empty while a character is incomplete, or while this may begin a stop string
    ids: list[int]
    # if asked for: of the tokens that begin in the text so far, unless an earlier piece has them
    logprobs: list[Logprob] = []
    lacks_text: bool = False  # the ids so far go on beyond the text so far


@dataclass
class Timings:
    """Of a text, or of several added up.

    What the caller does between tokens does not count: the seconds are those between asking for a
    token and getting it or, if that is more, those that its passes took."""

    prompt_tokens: int = 0  # those evaluated, without what the cache already had
    prompt_seconds: float = 0.0
    new_tokens: int = 0
    steps: int = 0  # new tokens except the first of each text, whose time counts as the prompt's
    step_seconds: float = 0.0
    passes: int = 0  # that evaluated the text's last token, with proposals for what follows it
    proposed: int = 0  # tokens
    accepted: int = 0

    def add(self, other: Timings) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Generation:
    """The text that follows a prompt: an iterator of its pieces, which also adds them up. When it is
    closed, or nobody refers to it any more, the text ends."""

    def __init__(self, prompt_tokens: int):
        self.prompt_tokens = prompt_tokens
        self.doubles_bos = False  # the prompt has a bos of its own beside the tokenizer's
        # How many of them were evaluated for an earlier text: 0 until the first new token
        self.cached_tokens = 0
        self.ids: list[int] = []  # without an eos
        self.text = ""
        self.logprobs: list[Logprob] = []  # if asked for
        # Why the text ended: "eos", "stop" (a stop string), "length" (the limit), "context" (it is
        # full), or "interrupt", which holds until another reason is known
        self.ended_by = "interrupt"
        self.stop = ""  # the stop string before which it ended
        self.timings = Timings()
        self.thinks = False  # it begins within what is thought
        self.lacks_text = False  # ids go on beyond the text
        self.ended = False
        self._begun = False
        self._at_end: list[Callable[[Generation], None]] = []

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        if self.ended:
            raise StopIteration
        self.begin()
        try:
            piece = self._next()
        except BaseException as error:
            if isinstance(error, Exception):  # and not Ctrl-C
                self._at_end.clear()
            self.close()
            raise
        if piece is None:
            self._call_at_end()
            raise StopIteration
        self.text += piece.text
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.lacks_text = piece.lacks_text
        return piece

    def begin(self) -> None:
        """Get in line for a slot, before the first piece is asked for."""
        if not self._begun:
            self._begun = True
            self._begin()

    def finish(self) -> Generation:
        """Generate all of the text. Returns this object."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """End the text here."""
        if not self.ended:
            self._leave()
            self._call_at_end()

    def __del__(self) -> None:
        self.close()

    @property
    def answered(self) -> bool:
        """Whether there is a text: False if it was interrupted before the first token."""
        return bool(self.ids) or self.ended_by != "interrupt"

    def at_end(self, do: Callable[[Generation], None]) -> None:
        """Call `do` with this object when the text ends or is interrupted, but not after an error."""
        self._at_end.append(do)

    def _call_at_end(self) -> None:
        self.ended = True
        for do in self._at_end:
            do(self)
        self._at_end.clear()

    # What depends on who writes it

    @property
    def ready(self) -> bool:
        """Whether the next piece, or the end, is there already."""
        raise NotImplementedError

    def _begin(self) -> None:
        raise NotImplementedError

    def _next(self) -> Piece | None:
        """The next piece, or None at the end, of which the reason is then known."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Nobody wants the rest."""
        raise NotImplementedError
