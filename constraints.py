"""What the next token of a text may be: by a grammar, of which llguidance is asked, and by the fewest
tokens of the text."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grammars import check

if TYPE_CHECKING:
    from llguidance import LLMatcher


MOST_DIGITS = 20  # in a row in a JSON number: a 64-bit integer has no more


class Digits:
    """Ends JSON numbers that grow too long: a small model may write digits up to the token limit."""

    def __init__(self, tokens: list[bytes]):
        """tokens: the bytes of each, among them a quotation mark by itself."""
        begins = torch.zeros(-(-len(tokens) // 32) * 32, dtype=torch.int64)
        begins[[id for id, text in enumerate(tokens) if text[:1].isdigit()]] = 1
        self._others = ~(begins.view(-1, 32) << torch.arange(32)).sum(1).int()
        self._quote = tokens.index(b'"')

    def leave_out(self, row: Tensor) -> None:
        """Leave out of a mask the tokens that begin with a digit, unless there are no others, or this
        is a string, which may end."""
        others = row & self._others
        in_string = row[self._quote // 32] >> self._quote % 32 & 1
        if not in_string and others.any():
            row.copy_(others)


class Constraint:
    """What the next token of one text may be."""

    def __init__(
        self,
        size: int,
        eos: Collection[int],
        min_tokens: int = 0,
        matcher: LLMatcher | None = None,
        after: str = "",
        text_of: Callable[[int], str] = lambda id: "",
        digits: Digits | None = None,
    ):
        """size: of the vocabulary. eos: the ids that end the text, which do not come before there
        are min_tokens. matcher: of the grammar of the text or, if `after` is not empty, of what
        comes after that. text_of: the text of a token. digits: numbers have at most MOST_DIGITS
        in a row."""
        self.ended = False  # no more tokens can come
        self._eos = [*eos]
        self._left = min_tokens
        self._matcher = matcher
        self._after = after
        self._text_of = text_of
        self._digits = digits
        self._end = ""  # of the text, while `after` has not come
        self._run = 0  # how many digits the text ends in, counted once `after` has come
        self._row = torch.full((-(-size // 32),), -1, dtype=torch.int32)

    def mask(self) -> Tensor:
        """A bit for each token, which is 1 if that may come next: int32 [ceil(V/32)], the same
        tensor each time, in the CPU's memory. Raises ValueError if the grammar has become too
        complex."""
        row = self._row
        if self._matcher and not self._after:
            self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.nbytes)
            check(self._matcher)
            if self._digits and self._run >= MOST_DIGITS:
                self._digits.leave_out(row)
        else:
            row.fill_(-1)
        if self._left > 0 or self._after:
            for id in self._eos:
                row[id // 32] &= ~(1 << id % 32)
        return row

    def accept(self, token: int) -> None:
        """Go on to what follows this token."""
        self._left -= 1
        if token in self._eos:
            self.ended = True
        elif self._after:
            self._end += self._text_of(token)
            if self._after in self._end:
                self._after = ""
            self._end = self._end[-len(self._after) :]
        elif self._matcher:
            self._matcher.consume_token(token)
            check(self._matcher)
            self.ended = self._matcher.is_stopped()
            text = self._text_of(token)
            before = text.rstrip("0123456789")
            self._run = len(text) - len(before) + (0 if before else self._run)
