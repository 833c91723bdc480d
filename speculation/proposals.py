"""Speculative decoding, more than one token per pass over the weights: several are proposed,
evaluated together, and kept as far as they are what is sampled anyway.

The text does not change, except for rounding, since sums are added in another order. Each position
is sampled as always, from its own logits with its own random numbers; a proposal is accepted if it
equals what was sampled, and the first that does not ends the pass. Lookup and Draft are two ways to
propose.

A pass with proposals takes longer than one of a single token. If too few are accepted to make up
for that, decoding falls back to single tokens, and proposals are tried again only now and then."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from model import Llama, State, captured, choose_next, sample_next

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

    def record(self, proposed: int, accepted: int, seconds: float, waited: bool) -> None:
        """Record a pass. waited: the GPU was idle until the host had looked for proposals, which
        is a loss even if there were none. The first pass with proposals may have compiled
        something, so it counts as one of a single token."""
        if proposed and not self.several:
            seconds = self.single
        self.total += seconds
        if proposed:
            self.several = _mean(self.several, seconds)
        if proposed or waited:
            self.lost = max(self.lost + seconds - (1 + accepted) * self.single, -self.single)
        else:
            self.single = _mean(self.single, seconds)


def _mean(mean: float, value: float) -> float:
    return mean + 0.2 * (value - mean) if mean else value


class Moment:
    """A moment in the work of a device. On a GPU it comes when everything launched so far is
    done."""

    def __init__(self, device: torch.device):
        self.time = time.perf_counter()
        self.event = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self.event:
            self.event.synchronize()

    def since(self, start: Moment) -> float:
        """The seconds from `start` to this moment, once it has come."""
        if self.event:
            return start.event.elapsed_time(self.event) / 1e3
        return self.time - start.time


@dataclass
class Pass:
    """A pass over the weights that has been launched."""

    proposals: list[int]
    waited: bool  # whether the GPU was idle while the host looked for proposals
    start: Moment
    end: Moment


class Speculation:
    """Decoding with n proposals per pass, and counts over all that it decodes. Subclasses
    propose."""

    def __init__(self, n: int):
        assert 1 <= n <= MAX_PROPOSALS, n
        self.n = n
        self.pacer = Pacer()
        self.passes = self.proposed = self.accepted = 0
        self.held_off = 0  # passes without proposals because of the pacer
        self.capturing = 0.0  # seconds of the running pass that went into capturing graphs
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}  # those that fit the running text

    def begin(self, model: Llama, state: State, ids: list[int]) -> None:
        """Called with the prompt before the first token is sampled."""

    def propose(self, ids: list[int]) -> list[int]:
        """Returns n tokens that may follow `ids`, the prompt and the text so far, or an empty
        list."""
        raise NotImplementedError

    def decode(self, model: Llama, state: State, n: int) -> Iterator[int]:
        """Up to n tokens. Stopping after any of them leaves the state with exactly what came before
        it.

        On a GPU the next pass is launched before tokens are yielded, so that the GPU is busy while
        the caller uses them."""
        if n == 0:
            return
        read = state.pos
        end = read + n
        ids = state.tokens[:read].tolist()
        running: deque[Pass] = deque()
        self.graphs.clear()
        self.begin(model, state, ids)
        try:
            new = [sample_next(model, state, state.logits)]
            while True:
                ids += new
                more = len(ids) < end
                if more and model.uses_graphs:
                    self._launch(model, state, ids, end, running)
                for position, token in enumerate(new, len(ids) - len(new)):
                    read = position
                    yield token
                if not more:
                    return
                if not running:
                    self._launch(model, state, ids, end, running)
                new = self._read(state, ids, running.popleft())
                new = new[: end - len(ids)]
        finally:
            state.seek(read)

    def _launch(
        self, model: Llama, state: State, ids: list[int], end: int, running: deque[Pass]
    ) -> None:
        """Launch a pass that evaluates the last token of `ids` and the proposals to follow it. If
        there are none, two passes of single tokens run at once, since the second evaluates what the
        first samples, and the GPU does not wait for the host."""
        last = len(ids) - 1
        start = Moment(model.device)
        ready = self.pacer.ready()
        held_off = not ready and self.pacer.single > 0
        looks = ready and last + 1 + self.n < state.size
        proposals = self.propose(ids) if looks else []
        if proposals and running:
            return  # they have to follow the token that is being sampled
        waited = looks and not running and model.uses_graphs
        if not running:
            place(state, last, [ids[-1], *proposals])
        at_once = 2 if model.uses_graphs and not proposals else 1
        while len(running) < at_once and len(ids) + len(running) < end:
            running.append(self._pass(model, state, proposals, start, waited))
            self.held_off += held_off
            start = Moment(model.device)
            waited = False

    def _pass(
        self, model: Llama, state: State, proposals: list[int], start: Moment, waited: bool
    ) -> Pass:
        """Evaluate the token at the state's position and the proposals behind it, and sample after
        each of them, into host_tokens."""
        T = 1 + len(proposals)
        run = lambda: choose_next(model, state, model.evaluate(T, state))
        self._run(model, state, ("pass", T), run)
        return Pass(proposals, waited, start, Moment(model.device))

    def _run(self, model: Llama, state: State, name: tuple, run: Callable[[], object]) -> None:
        """Call `run`, on a GPU as a CUDA graph. It is captured the first time, with nothing else
        running, and not earlier, so that a text without repeats does not pay for it."""
        if not model.uses_graphs:
            run()
            return
        if name not in self.graphs:
            key = (*name, *state.captured_with(model))
            if key not in state.graphs:
                pos = state.pos
                start = time.perf_counter()
                state.graphs[key] = captured(run, model.device, lambda: state.seek(pos))
                self.capturing += time.perf_counter() - start
            self.graphs[name] = state.graphs[key]
        self.graphs[name].replay()

    def _read(self, state: State, ids: list[int], running: Pass) -> list[int]:
        """Wait for a pass after the text `ids`. Returns the tokens that it adds: the proposals that
        were sampled, and the first token sampled that was not proposed."""
        running.end.wait()
        seconds = running.end.since(running.start) - self.capturing
        self.capturing = 0.0
        state.busy += seconds
        proposals = running.proposals
        proposed = len(proposals)
        sampled = state.host_tokens[len(ids) : len(ids) + proposed + 1].tolist()
        accepted = agreeing(proposals, sampled)
        self.pacer.record(proposed, accepted, seconds, running.waited)
        self.passes += 1
        self.proposed += proposed
        self.accepted += accepted
        return sampled[: accepted + 1]

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


def agreeing(proposals: list[int], tokens: list[int]) -> int:
    """How many proposals agree with the tokens, up to the first that does not."""
    count = 0
    for proposal, token in zip(proposals, tokens):
        if proposal != token:
            break
        count += 1
    return count


def place(state: State, pos: int, ids: list[int]) -> None:
    """Move to `pos` and make `ids` the tokens from there on. An id of -1, which stands for logits
    that are not finite, becomes 0."""
    state.seek(pos)
    end = pos + len(ids)
    # Pinned memory, from which a GPU copies while the host goes on
    host = state.host_tokens[pos:end]
    host.numpy()[:] = [max(id, 0) for id in ids]
    state.tokens[pos:end].copy_(host, non_blocking=True)


class Lookup(Speculation):
    """Proposes what followed the latest earlier occurrence of the last few tokens, in prompt or
    answer (Saxena, 2023); if too few followed, they repeat."""

    def __init__(self, n: int):
        super().__init__(n)
        # For every run of SHORTEST to LONGEST tokens, the index behind its latest occurrence
        self.ends: dict[tuple[int, ...], int] = {}
        self.indexed = 0  # runs that end before this index are in `ends`

    def begin(self, model: Llama, state: State, ids: list[int]) -> None:
        self.ends.clear()
        self.indexed = 0
        self._index(ids)

    def _index(self, ids: list[int]) -> None:
        for end in range(self.indexed, len(ids)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self.ends[tuple(ids[end - length : end])] = end
        self.indexed = len(ids)

    def propose(self, ids: list[int]) -> list[int]:
        self._index(ids)
        for length in range(LONGEST, SHORTEST - 1, -1):
            end = self.ends.get(tuple(ids[-length:]))
            if end is not None:
                following = ids[end : end + self.n]
                return [following[i % len(following)] for i in range(self.n)]
        return []


class Draft(Speculation):
    """Proposes what a smaller model of the same vocabulary samples with the same random numbers
    (Leviathan et al., 2023), with a state of its own."""

    def __init__(self, n: int, model: Llama):
        super().__init__(n)
        self.model = model
        self.state: State | None = None
        # The last proposals, and the position of the first
        self.guesses: list[int] = []
        self.first = 0

    def begin(self, model: Llama, state: State, ids: list[int]) -> None:
        """The draft evaluates the prompt. Of the two vocabularies one may be padded further: what
        the other lacks is never sampled."""
        if self.state is None or self.state.size != state.size:
            self.state = State(self.model, state.size)
        own = self.state
        own.sampler.set(state.sampler.s)
        V = len(state.logits)
        own_V = len(own.logits)
        own.ban([*(i for i in state.never if i < own_V), *range(V, own_V)])
        state.ban([*state.never, *range(own_V, V)])
        self.guesses = []
        known = self._known(ids)
        self.model.prefill(known[own.reuse(known) :], own)

    def _known(self, ids: list[int]) -> list[int]:
        """The ids, with 0 in place of those that only the model's vocabulary has."""
        V = self.model.config.vocab_size
        return [id if id < V else 0 for id in ids]

    def propose(self, ids: list[int]) -> list[int]:
        """The draft evaluates two tokens first, the last one and the one before: if all its latest
        proposals were accepted, it has not evaluated the last of them."""
        own = self.state
        last = len(ids) - 1
        self._catch_up(ids)
        place(own, last - 1, self._known(ids[-2:]))
        self._run(self.model, own, ("proposals", self.n), self._sample_proposals)
        Moment(self.model.device).wait()
        own.pos = last + self.n  # the last proposal is not evaluated
        self.first = last + 1
        self.guesses = own.host_tokens[self.first : self.first + self.n].tolist()
        return self.guesses

    def _sample_proposals(self) -> None:
        own = self.state
        T = 2
        for _ in range(self.n):
            self.model.step(T, own)
            choose_next(self.model, own, own.logits)
            T = 1

    def _catch_up(self, ids: list[int]) -> None:
        """Evaluate what the draft has not seen of the text, except for its last two tokens."""
        own = self.state
        if self.guesses:  # those that were not sampled are forgotten
            text = ids[self.first : self.first + self.n]
            own.pos = min(own.pos, self.first + agreeing(self.guesses, text))
        unseen = ids[own.pos : -2]
        if unseen:
            own.seek(own.pos)
            self.model.prefill(unseen, own)
