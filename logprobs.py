"""Log-probabilities of tokens, for those who ask for them: of a text as it is generated, and of a
prompt."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from model import Llama, State, Timings, sample_next
from tokenizer import TextStream

AT_ONCE = 1 << 22  # logits of a prompt's tokens that are in memory together


class Logprob(NamedTuple):
    """A token's log-probability, by the model's own logits: no setting changes it."""

    id: int
    logprob: float | None  # None for a prompt's first token, which follows nothing
    best: list[tuple[int, float]]  # the most probable tokens at this place, and theirs
    begins: int  # the character of the text at which the token begins


class Scorer:
    """Decodes a text token by token, and holds its log-probabilities back until the text has
    reached their tokens."""

    def __init__(self, k: int, stream: TextStream):
        """k: how many of the most probable tokens are noted at each place. stream: what turns the
        tokens into text."""
        self.k = k
        self.stream = stream
        self._end = 0  # of the text so far
        self._last: Logprob | None = None  # of the token decoded last
        self._held_back: list[Logprob] = []

    def decode(self, model: Llama, state: State, n: int) -> Iterator[int]:
        """Up to n tokens: an argument of model.generate."""
        for i in range(n):
            logprobs = state.logits.log_softmax(0)
            best = logprobs.topk(min(self.k, len(logprobs)))
            token = sample_next(model, state, state.logits)
            if token >= 0:
                pairs = list(zip(best.indices.tolist(), best.values.tolist()))
                begins = self._end + self.stream.held_back
                self._last = Logprob(token, float(logprobs[token]), pairs, begins)
            yield token
            if i + 1 < n:
                model.step(1, state)

    def due(self, text: str, ids: list[int]) -> list[Logprob]:
        """The log-probabilities of tokens that begin in the text so far, each once. text: what is
        new of it. ids: the token decoded last; none at the end."""
        if ids:
            self._held_back.append(self._last)
        self._end += len(text)
        end = self._end
        if not ids and not self.stream.stopped:
            end += 1  # tokens without a text may come last
        due = [score for score in self._held_back if score.begins < end]
        self._held_back = self._held_back[len(due) :]
        return due

    @torch.inference_mode()
    def echo(
        self,
        text: str,
        prompt: list[int],
        model: Llama,
        state: State,
        timings: Timings,
        progress: Callable[[int, int], None] | None,
    ) -> list[Logprob]:
        """The log-probabilities of a prompt's tokens, for a text that begins with it. All but the
        last one are evaluated here, a few at a time, since a large vocabulary makes the logits of
        many too large."""
        self._end = len(text)
        start = time.perf_counter()
        state.truncate(0)
        tokenizer = self.stream.tokenizer
        stream = TextStream(tokenizer, tokenizer.vocabulary.adds_space)
        at_once = max(1, AT_ONCE // model.config.vocab_size)
        scores = [Logprob(prompt[0], None, [], 0)]

        def length(token: int) -> int:
            """How many characters of the text a token is. It may have a control token's name, and
            lack the space that some tokenizers put after one."""
            name = tokenizer.control_names.get(token)
            if name and text.startswith(name, end):
                return len(name)
            piece = stream.push(token)
            if not text.startswith(piece, end):
                piece = piece.removeprefix(" ")
            return len(piece)

        end = 0
        end += length(prompt[0])
        for first in range(0, len(prompt) - 1, at_once):
            part = prompt[first : min(first + at_once, len(prompt) - 1)]
            logprobs = model.forward(part, state).log_softmax(-1)
            best = logprobs.topk(min(self.k, logprobs.shape[1]))
            best = zip(best.indices.tolist(), best.values.tolist())
            for token, row, pairs in zip(prompt[first + 1 :], logprobs, best):
                begins = end + stream.held_back
                scores.append(Logprob(token, float(row[token]), list(zip(*pairs)), begins))
                end += length(token)
            if progress:
                progress(state.pos, len(prompt))
        timings.prompt_tokens += state.pos
        timings.prompt_seconds += time.perf_counter() - start
        return scores
