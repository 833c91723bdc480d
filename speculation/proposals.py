"""Tokens that may come next, so that a pass over the weights yields more than one: several are
proposed, evaluated together, and kept as far as they are what is sampled anyway.

The text does not change, except for rounding, since sums are added in another order. Each position
is sampled as always, from its own logits with its own random numbers; a proposal is accepted if it
equals what was sampled, and the first that does not ends the pass. Lookup, Draft and heads.Head are
the ways to propose.

A pass with proposals takes longer than one of a single token. If too few are accepted to make up
for that, texts go on by single tokens, and proposals are tried again only now and then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from ranks.processes import Ranks
from sampling import mask_without

if TYPE_CHECKING:
    from engine import Sequence
    from passes import Passes, Wish
    from speculation.heads import Chain

MAX_PROPOSALS = 15  # per pass
# The last tokens that are looked up: the longest run of them that occurred before, of these lengths
LONGEST, SHORTEST = 4, 2
MAX_LOST = 0.02  # as a share of the total time


@dataclass
class Pacer:
    """Decides whether the next pass may have proposals: only while the total loss, even if none
    were accepted, stays below one single-token pass plus MAX_LOST of the time. A pass with
    proposals loses what it takes longer than single tokens would have for the same text; what it
    gains makes up for earlier losses. Times are in seconds."""

    single: float = 0.0  # running mean of passes without proposals
    several: float = 0.0  # and with them
    lost: float = 0.0
    total: float = 0.0

    def ready(self) -> bool:
        """Whether the next pass may have proposals. The first never does: it is their baseline."""
        risk = max(self.several - self.single, 0.0)
        return self.single > 0 and self.lost + risk <= self.single + MAX_LOST * self.total

    def record(self, proposed: int, accepted: float, seconds: float, waited: bool) -> None:
        """Record a pass. waited: the GPU was idle until the host had looked for proposals, which
        is a loss even if there were none."""
        self.total += seconds
        if proposed:
            self.several = _mean(self.several, seconds)
        if proposed or waited:
            self.lost = max(self.lost + seconds - (1 + accepted) * self.single, -self.single)
        else:
            self.single = _mean(self.single, seconds)


def _mean(mean: float, value: float) -> float:
    return mean + 0.2 * (value - mean) if mean else value


def agreeing(these: list[int], those: list[int]) -> int:
    """How many tokens agree, up to the first that does not."""
    end = min(len(these), len(those))
    if these[:end] == those[:end]:
        return end
    return next(i for i in range(end) if these[i] != those[i])


class Proposer:
    """Proposes up to n tokens per pass for each text, and counts over all passes. Subclasses propose."""

    only_chains = False  # whether it proposes only in a Chain, on the device

    def __init__(self, n: int):
        assert 1 <= n <= MAX_PROPOSALS, n
        self.n = n
        self.pacer = Pacer()
        self.passes = self.proposed = self.accepted = 0
        self.held_off = 0  # passes without proposals because of the pacer
        self.always = False  # whether it pays off or not
        self.ranks = Ranks()  # that write the same text, and go by rank 0's clock

    def propose(self, sequence: Sequence, n: int) -> list[int]:
        """Returns n tokens that may follow a text, or an empty list."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether the next pass may have proposals."""
        ready = self.always or self.ranks.agree(self.pacer.ready())
        self.held_off += not ready and self.pacer.single > 0
        return ready

    def record(
        self,
        texts: int,
        proposed: int,
        accepted: int,
        seconds: float,
        waited: bool,
        captured: bool,
    ) -> None:
        """Take note of a pass: how many texts it had, how many proposals for all of them, how many of
        these were accepted, and how long it took. waited: see Pacer.record. captured: see
        Moment.has_captured."""
        self.passes += texts
        self.proposed += proposed
        self.accepted += accepted
        if not captured:
            self.pacer.record(proposed, accepted / texts, seconds, waited)

    # What only a head does, which goes on from the model's hidden states, and on the device
    # (speculation/heads.py). Texts are given by their first place in the cache

    def chain(self, texts: int, n: int) -> Chain | None:
        """How the device itself proposes n tokens for each of this many texts."""
        return None

    def reuse(self, source: int, target: int, count: int) -> int:
        """A text begins with `count` tokens of another one, or of the one before it. Returns how many of
        them need not be evaluated again."""
        return count

    def evaluated(self, first: int) -> int:
        """How many tokens of a text need not be evaluated again."""
        raise NotImplementedError

    def note(self, first: int, count: int) -> None:
        """A chain has evaluated this many tokens of a text."""

    def summary(self) -> str:
        share = "none of 0"
        if self.proposed:
            share = f"{self.accepted / self.proposed:.0%} of {self.proposed}"
        rate = 0.0
        if self.passes:
            rate = 1 + self.accepted / self.passes
        text = f"{self.passes} passes, {rate:.2f} tokens a pass; {share} proposals accepted"
        if self.held_off:
            text += f"; {self.held_off} passes had none, since they cost more time than they save"
        return f"proposals {text}"


class Index:
    """Where runs of tokens occur in a text."""

    def __init__(self):
        # For every run of SHORTEST to LONGEST tokens, the index after its latest occurrence
        self.ends: dict[tuple[int, ...], int] = {}
        self.done = 0  # runs that end before this index are in `ends`

    def add(self, ids: list[int]) -> None:
        """Index what is new of a text."""
        for end in range(self.done, len(ids)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self.ends[tuple(ids[end - length : end])] = end
        self.done = len(ids)


class Lookup(Proposer):
    """Proposes what followed the latest earlier occurrence of the last few tokens, in prompt or
    answer (Saxena, 2023); if too few followed, they repeat."""

    def __init__(self, n: int):
        super().__init__(n)
        self.indices: WeakKeyDictionary[Sequence, Index] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, n: int) -> list[int]:
        ids = sequence.ids
        index = self.indices.setdefault(sequence, Index())
        index.add(ids)
        for length in range(LONGEST, SHORTEST - 1, -1):
            end = index.ends.get(tuple(ids[-length:]))
            if end is not None:
                following = ids[end : end + n]
                return [following[i % len(following)] for i in range(n)]
        return []


class Draft(Proposer):
    """Proposes what a smaller model of the same vocabulary samples with the same random numbers
    (Leviathan et al., 2023). Each text has the slot in the draft's cache that it has in the
    model's."""

    def __init__(self, n: int, passes: Passes, vocab_size: int):
        """passes: the draft's, with slots like the model's. vocab_size: the model's. Of the two
        vocabularies one may be padded further: what the other lacks is never proposed."""
        super().__init__(n)
        self.own_passes = passes
        own = passes.model.config.vocab_size
        self.mask = mask_without(range(vocab_size, own), own)
        self.known: dict[int, list[int]] = {}  # the tokens that each slot has evaluated

    def propose(self, sequence: Sequence, n: int) -> list[int]:
        """The draft evaluates what it has not seen of the text, and then what it samples itself; its
        last proposal is not evaluated."""
        V = self.own_passes.model.config.vocab_size
        ids = [id if id < V else 0 for id in sequence.ids]  # 0 for what only the model has
        first = sequence.slot.first
        known = min(agreeing(self.known.get(first, []), ids), len(ids) - 1)
        self.known[first] = ids[:known]  # should anything interrupt this
        guesses = self.own_passes.sample_on(ids, known, first, n, self.guess_like(sequence.wish))
        self.known[first] = ids + guesses[:-1]
        return guesses

    def guess_like(self, wish: Wish) -> Wish:
        """How a proposal is chosen, to be what the model chooses: among what both know."""
        mask = self.mask
        if wish.mask is not None:
            shared = min(len(mask), len(wish.mask))
            mask = torch.cat([mask[:shared] & wish.mask[:shared], mask[shared:]])
        V = self.own_passes.model.config.vocab_size
        bias = {id: value for id, value in (wish.bias or {}).items() if id < V}
        return wish._replace(mask=mask, bias=bias)
