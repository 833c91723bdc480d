"""Log-probabilities of tokens in a text, for those who ask for them."""

from collections.abc import Callable
from typing import NamedTuple

from engine import Score
from tokenizer import TextStream, Tokenizer


class Logprob(NamedTuple):
    """A token's log-probability, by the model's own logits: no setting changes it."""

    id: int
    logprob: float | None  # None for a prompt's first token, which follows nothing
    best: list[tuple[int, float]]  # the most probable tokens at this place, and theirs
    begins: int  # the character of the text at which the token begins


class PromptScores:
    """Collects the scores of a prompt's tokens for a text that begins with it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        text: str,
        prompt: list[int],
        done: Callable[[str, list[Logprob]], None],
    ):
        """text: the prompt as text. done: called with it and with the log-probabilities of all its
        tokens."""
        self.tokenizer = tokenizer
        self.text = text
        self.prompt = prompt
        self.done = done
        self.scores: list[Score | None] = [None]  # nothing comes before the first token

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
