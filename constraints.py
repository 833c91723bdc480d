"""What the next tokens of a text may be: by a grammar, of which llguidance is asked, and by the
fewest tokens of the text. llguidance is imported when a text is constrained."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grammars import checked_size
from loading.files import one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from tokenizer import Tokenizer

MOST_STATES = 50_000  # of a grammar's automaton, 2 kB each
CACHED = 16  # compiled grammars that are kept

# ---- grammars


class Grammars:
    """Compiles grammars for the tokens of a model."""

    is_tokenizer_wrapper = True  # llguidance asks for this, and for the four that follow

    def __init__(self, tokenizer: Tokenizer, size: int, eos: Collection[int]):
        """size: of the model's vocabulary. eos: the ids that may end a text."""
        from llguidance import LLParserLimits, LLTokenizer

        self._tokenizer = tokenizer
        self.eos_token_id = min(eos, default=0)
        self.bos_token_id = None
        self.tokens = [tokenizer.bytes_of(id) for id in range(size)]
        self.special_token_ids = [id for id, text in enumerate(self.tokens) if not text]
        names = {id: name for name, id in tokenizer.control.items()}
        for id in self.special_token_ids:
            self.tokens[id] = names.get(id, f"<token {id}>").encode()
        self._tokens = LLTokenizer(self, n_vocab=size, eos_token=[*eos])
        self._limits = LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=False)
        self._compiled: dict[str, LLMatcher] = {}

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.vocabulary.encode_chat(text, [], after=True)

    def matcher(self, grammar: str) -> LLMatcher:
        """A new matcher for a grammar. Raises ValueError."""
        from llguidance import LLMatcher

        checked_size(grammar)
        compiled = self._compiled.pop(grammar, None)
        if not compiled:
            source = LLMatcher.grammar_from_lark(grammar)
            compiled = LLMatcher(self._tokens, source, log_level=0, limits=self._limits)
            check(compiled)
            # A grammar that no text matches is refused now, not in the middle of the text
            compiled.compute_bitmask()
            check(compiled)
        self._compiled[grammar] = compiled
        if len(self._compiled) > CACHED:
            del self._compiled[next(iter(self._compiled))]
        return compiled.deep_copy()


def check(matcher: LLMatcher) -> None:
    """Raise ValueError if something is wrong with its grammar."""
    if error := matcher.get_error():
        first, *_ = error.splitlines()  # the others quote the grammar
        raise ValueError(f"the grammar or JSON schema: {one_line(first)}")


# ---- the next token


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
    ):
        """size: of the vocabulary. eos: the ids that end the text, which do not come before there
        are min_tokens. matcher: of the grammar of the text or, if `after` is not empty, of what
        comes after that. text_of: the text of a token."""
        self.ended = False  # no more tokens can come
        self._eos = [*eos]
        self._left = min_tokens
        self._matcher = matcher
        self._after = after
        self._text_of = text_of
        self._end = ""  # of the text, while `after` has not come
        self._row = torch.full((-(-size // 32),), -1, dtype=torch.int32)

    def mask(self) -> Tensor:
        """A bit for each token, which is 1 if that may come next: int32 [ceil(V/32)], the same
        tensor each time, in the CPU's memory. Raises ValueError if the grammar has become too
        complex."""
        row = self._row
        if self._matcher and not self._after:
            self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.nbytes)
            check(self._matcher)
        else:
            row.fill_(-1)
        if self._left > 0 or self._after:
            for id in self._eos:
                row[id // 32] &= ~(1 << id % 32) if id % 32 < 31 else 0x7FFFFFFF
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
