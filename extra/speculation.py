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

from launch import gdc_launch_dependents, gdc_wait, jit, launch, tl
from model import Llama, State, captured, choose_next, sample_next

MAX_PROPOSALS = 15  # per pass
# how many of the last tokens are looked up: the longest run of them that occurred before
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
        """The first pass is of a single token: the baseline for proposals."""
        return (
            self.single > 0
            and self.lost + self.several - self.single <= self.single + MAX_LOST * self.total
        )

    def record(self, proposed: int, accepted: int, seconds: float) -> None:
        """Record a pass. The first with proposals may have compiled something: it counts as one of
        a single token."""
        if proposed and not self.several:
            seconds = self.single
        self.total += seconds
        if proposed:
            self.several = _mean(self.several, seconds)
            self.lost = max(self.lost + seconds - (1 + accepted) * self.single, -self.single)
        else:
            self.single = _mean(self.single, seconds)


def _mean(mean: float, value: float) -> float:
    return mean + 0.2 * (value - mean) if mean else value


class Speculation:
    """Decoding with up to n proposals per pass, and counts over all that it decodes. Subclasses
    propose."""

    def __init__(self, n: int):
        self.n = n
        self.pacer = Pacer()
        self.passes = self.proposed = self.accepted = 0
        self._on_gpu: _OnGpu | None = None

    def propose(self, cache: State, count: int) -> list[int]:
        """At most `count` tokens that may follow the one at cache.pos."""
        raise NotImplementedError

    def enqueue_proposals(self, gpu: _OnGpu, T: int) -> None:
        """At the start of a graph of T tokens: have the GPU write T - 1 proposals after the token
        at device_pos, and to gpu.result whether there are any; if nothing is written there, there
        always are."""
        raise NotImplementedError

    def catch_up(self, cache: State, read: int) -> None:
        """Called with the GPU idle, before the first of a series of passes with proposals. `read`
        is the position of the last token."""

    def decode(self, model: Llama, cache: State, n: int) -> Iterator[int]:
        """Up to n tokens. Stopping after any of them leaves the cache with exactly what came before
        it."""
        if n == 0:
            return
        read, last = cache.pos, cache.pos + n - 1
        passes = self._graphs if model.uses_graphs else self._passes
        try:
            yield sample_next(model, cache, cache.logits)
            for proposed, new, seconds in passes(model, cache, last):
                accepted = new - read - 1
                self.pacer.record(proposed, accepted, seconds)
                self.passes += 1
                self.proposed += proposed
                self.accepted += accepted
                while read < new:
                    read += 1
                    yield int(cache.host_tokens[read])
        finally:
            cache.seek(read)

    def summary(self) -> str:
        share = (
            f"{self.accepted / self.proposed:.0%} of {self.proposed}"
            if self.proposed
            else "none of 0"
        )
        rate = 1 + self.accepted / self.passes if self.passes else 0
        return f"proposals {self.passes} passes, {rate:.2f} tokens a pass; {share} proposals accepted\n"

    def _passes(self, model: Llama, cache: State, last: int) -> Iterator[tuple[int, int, float]]:
        """Until the token at `last` is sampled: evaluate the token at cache.pos and some proposals,
        move cache.pos to the last token that is sampled, the first that was not proposed. Yields
        the number of proposals, that position, and the seconds."""
        while cache.pos < last:
            start, first, room = time.perf_counter(), cache.pos, last - cache.pos - 1
            proposals = (
                self.propose(cache, min(self.n, room)) if room and self.pacer.ready() else []
            )
            cache.tokens[first + 1 : first + 1 + len(proposals)] = torch.tensor(
                proposals, dtype=torch.int32
            )
            rows = model.evaluate(1 + len(proposals), cache)
            cache.truncate(first + 1)
            for row, proposal in zip(rows, [*proposals, None]):
                if sample_next(model, cache, row) != proposal:
                    break
                cache.advance(1)
            yield len(proposals), cache.pos, time.perf_counter() - start

    def _graphs(self, model: Llama, cache: State, last: int) -> Iterator[tuple[int, int, float]]:
        """The same with a CUDA graph per pass, which proposes, evaluates, samples at each position,
        counts what is accepted, and advances. The host is one pass behind: while it reads the
        result of one, the GPU runs the next, so it knows only the highest position that the GPU may
        have reached. With that bound it never overshoots `last`."""
        key = (cache, *cache.captured_with(model), self.n)
        if self._on_gpu is None or self._on_gpu.key != key:
            self._on_gpu = _OnGpu(key, self.enqueue_proposals, model, cache)
        gpu, read, caught_up = self._on_gpu, cache.pos, False
        torch.cuda.synchronize(model.device)  # an earlier text may have left passes running
        gpu.running.clear()
        gpu.collected = 0
        gpu.turn.zero_()
        cache.seek(read)
        while read < last:
            while (
                len(gpu.running) < 2 and (bound := read + sum(T for T, _, _ in gpu.running)) < last
            ):
                several = bound + 1 + self.n <= last and gpu.found and self.pacer.ready()
                T = 1 + self.n if several else 1
                if gpu.running and (several and not caught_up or T not in gpu.graphs):
                    break  # catching up and capturing need an idle GPU
                if several and not caught_up:
                    self.catch_up(cache, read)
                caught_up = several
                gpu.launch(T, read)
            T, read, seconds = gpu.collect()
            yield T - 1, read, seconds


@jit
def _accept_kernel(
    tokens,
    drawn,
    host_tokens,
    pos,
    rejected,
    turn,
    result,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of the T - 1 proposals before pos, those that equal what was drawn are accepted, up to the
    first that does not. What was drawn up to and including that position goes to tokens and
    host_tokens."""
    gdc_launch_dependents(PDL)
    i = tl.arange(0, BLOCK)
    gdc_wait(PDL)
    first = tl.load(pos) - T + 1
    proposal = tl.load(tokens + first + i, mask=i < T - 1, other=0)
    token = tl.load(drawn + first + i, mask=i < T, other=-1)
    accepted = tl.min(tl.where((i < T - 1) & (proposal == token), BLOCK, i), 0)
    tl.debug_barrier()  # all proposals are read before any is written
    tl.store(tokens + first + i, tl.maximum(token, 0), mask=i <= accepted)
    tl.store(host_tokens + first + i, token, mask=i <= accepted)
    tl.store(rejected, T - 1 - accepted)
    slot = tl.load(turn) % 2
    tl.store(result + 2 * slot, first + accepted)
    tl.store(turn, tl.load(turn) + 1)


class _OnGpu:
    """What decoding by CUDA graphs keeps on the GPU, and the passes that are running there."""

    def __init__(
        self, key: tuple, propose: Callable[[_OnGpu, int], None], model: Llama, cache: State
    ):
        self.key, self.propose, self.model, self.cache = key, propose, model, cache
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.running: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self.collected = 0
        self.found = True  # whether the last pass collected found anything to propose
        self.drawn = torch.zeros(cache.size + 1, dtype=torch.int32, device=model.device)
        self.rejected = torch.zeros(1, dtype=torch.int32, device=model.device)
        self.turn = torch.zeros(1, dtype=torch.int32, device=model.device)  # counts passes
        # Two slots, used in turn: the position of the last sampled token, and `found`
        self.result = torch.ones(2, 2, dtype=torch.int32, pin_memory=model.device.type == "cuda")

    def run(self, T: int) -> None:
        self.propose(self, T)
        choose_next(self.model, self.cache, self.model.evaluate(T, self.cache), self.drawn)
        self.accept(T)
        self.cache.device_pos -= self.rejected

    def accept(self, T: int) -> None:
        c = self.cache
        args = (
            c.tokens,
            self.drawn,
            c.host_tokens,
            c.device_pos,
            self.rejected,
            self.turn,
            self.result,
        )
        launch(_accept_kernel, (1,), c.tokens.device, *args, T=T, BLOCK=MAX_PROPOSALS + 1, warps=1)

    def launch(self, T: int, pos: int) -> None:
        """Start a pass of T tokens. It is captured the first time and not earlier, so that a text
        without repeats does not pay for it. Capturing runs it, at pos and with the GPU idle; what
        that changes is restored."""
        if T not in self.graphs:
            tokens, turn = self.cache.tokens.clone(), self.turn.clone()

            def reset() -> None:
                self.cache.tokens.copy_(tokens)
                self.turn.copy_(turn)
                self.cache.seek(pos)

            self.graphs[T] = captured(lambda: self.run(T), self.model.device, reset)
        start, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self.model.device)
        start.record(stream)
        self.graphs[T].replay()
        done.record(stream)
        self.running.append((T, start, done))

    def collect(self) -> tuple[int, int, float]:
        """Wait for the oldest pass: its T, the position of the last sampled token, its seconds."""
        T, start, done = self.running.popleft()
        done.synchronize()
        pos, found = self.result[self.collected % 2].tolist()
        self.collected += 1
        self.found = bool(found)
        return T, pos, start.elapsed_time(done) / 1e3


@jit
def _lookup_kernel(
    tokens, pos, turn, result, S,
    COUNT: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, BLOCK_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Lookup.propose, COUNT tokens after pos. The length and the end of a match are compared as one
    number."""
    gdc_launch_dependents(PDL)
    offs, i = tl.arange(0, BLOCK), tl.arange(0, BLOCK_COUNT)
    gdc_wait(PDL)
    last = tl.load(pos)
    best = last * 0 - 1
    for start in range(0, last, BLOCK):
        end = start + offs
        same = (end < last) & (
            tl.load(tokens + end, mask=end < last, other=-1) == tl.load(tokens + last)
        )
        length = same.to(tl.int32)
        for back in tl.static_range(1, LONGEST):
            there = same & (end >= back)
            before = tl.load(tokens + end - back, mask=there, other=-1)
            same = there & (before == tl.load(tokens + last - back, mask=last >= back, other=-2))
            length += same.to(tl.int32)
        best = tl.maximum(
            best, tl.max(tl.where(length >= SHORTEST, length * 16777216 + end, -1), 0)
        )
    first = best % 16777216 + 1
    following = tl.load(
        tokens + first + i % tl.maximum(last + 1 - first, 1),
        mask=(i < COUNT) & (best >= 0),
        other=0,
    )
    tl.store(tokens + last + 1 + i, following, mask=(i < COUNT) & (last + 1 + i < S))
    tl.store(result + 2 * (tl.load(turn) % 2) + 1, (best >= 0).to(tl.int32))


class Lookup(Speculation):
    """Proposes what followed the latest earlier occurrence of the last few tokens, in prompt or
    answer (Saxena, 2023); if too few followed, they repeat."""

    def propose(self, cache: State, count: int) -> list[int]:
        seen = cache.tokens[: cache.pos + 1]
        for length in range(min(LONGEST, len(seen) - 1), SHORTEST - 1, -1):
            found = (seen.unfold(0, length, 1)[:-1] == seen[-length:]).all(1).nonzero()
            if len(found):
                following = seen[int(found[-1]) + length :].tolist()
                return [following[i % len(following)] for i in range(count)]
        return []

    def enqueue_proposals(self, gpu: _OnGpu, T: int) -> None:
        """Also in a graph of one token, so that the host sees when there is something to
        propose."""
        c = gpu.cache
        args = (c.tokens, c.device_pos, gpu.turn, gpu.result, c.size)
        sizes = dict(
            COUNT=T - 1,
            LONGEST=LONGEST,
            SHORTEST=SHORTEST,
            BLOCK_COUNT=MAX_PROPOSALS + 1,
            BLOCK=4096,
        )
        launch(_lookup_kernel, (1,), c.tokens.device, *args, **sizes, warps=8)


class Draft(Speculation):
    """Proposes what a smaller model of the same vocabulary samples with the same random numbers
    (Leviathan et al., 2023), with a cache of its own."""

    def __init__(self, n: int, model: Llama):
        super().__init__(n)
        self.model = model
        self.cache: State | None = None

    def decode(self, model: Llama, cache: State, n: int) -> Iterator[int]:
        """The draft's cache has room for proposals beyond the end of the main model's. Of the two
        vocabularies one may be padded further: what the other lacks is never sampled."""
        size = cache.size + MAX_PROPOSALS + 1
        if self.cache is None or self.cache.size != size:
            self.cache = State(self.model, size)
        V, own = len(cache.logits), len(self.cache.logits)
        self.cache.sampler = cache.sampler
        self.cache.ban([*(i for i in cache.never if i < own), *range(V, own)])
        cache.ban([*cache.never, *range(own, V)])
        yield from super().decode(model, cache, n)

    def catch_up(self, cache: State, read: int) -> None:
        """Evaluate what the draft has not seen yet, up to and including the token at `read`. How
        far it has come is what device_pos says: graphs do not move the position on the host."""
        own, seen = self.cache, cache.tokens[: read + 1].tolist()
        own.seek(int(own.device_pos))
        self.model.prefill(seen[own.reuse(seen) :], own)

    def propose(self, cache: State, count: int) -> list[int]:
        own, first = self.cache, cache.pos + 1
        self.catch_up(cache, cache.pos)
        for i in range(count):
            if i > 0:
                self.model.step(1, own)
            choose_next(self.model, own, own.logits)
        return own.tokens[first : first + count].tolist()

    def enqueue_proposals(self, gpu: _OnGpu, T: int) -> None:
        """Evaluates two tokens first, the last one and the one before: if all proposals of the last
        pass were accepted, the draft has not evaluated the last of them."""
        if T == 1:
            return
        cache, own = gpu.cache, self.cache
        own.tokens[: cache.size].copy_(cache.tokens)
        own.device_pos.copy_(cache.device_pos)
        own.device_pos -= 1
        for i in range(T - 1):
            self.model.step(1 if i else 2, own)
            choose_next(self.model, own, own.logits)
        cache.tokens.copy_(own.tokens[: cache.size])
