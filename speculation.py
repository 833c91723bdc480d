"""Speculative decoding, more than one token per pass over the weights: several are proposed, evaluated together, and kept as
far as they are what is sampled anyway.

The text does not change, except for rounding, since sums are added in another order. Each position is sampled as always, from
its own logits with its own random number; a proposal is accepted if it equals what was sampled, and the first that does not
ends the pass. Two ways to propose:

    Lookup  what followed the latest earlier occurrence of the last few tokens, in the prompt or the answer (Saxena, 2023)
    Draft   what a smaller model of the same vocabulary samples with the same random numbers (Leviathan et al., 2023)

A pass with proposals takes longer than one of a single token. If too few are accepted to make up for that, decoding falls back
to single tokens, and proposals are tried again only now and then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from launch import gdc_launch_dependents, gdc_wait, jit, launch, tl
from model import KVCache, Llama, captured, choose_next, sample_next
from sampling import Sampler

MOST = 15  # proposals per pass
LONGEST, SHORTEST = 4, 2  # how many of the last tokens are looked up: the longest run of them that occurred before
MOST_LOST = 0.02  # as a share of the total time


@dataclass
class Pacer:
    """Decides whether the next pass may have proposals: it may if, should none be accepted, proposals will have lost no more
    than one single-token pass and MOST_LOST of the time. A pass with proposals loses what it takes longer than single
    tokens would have for the same text; what it gains makes up for earlier losses. Times are in seconds."""

    single: float = 0.0  # running mean of passes without proposals
    several: float = 0.0  # and with them
    lost: float = 0.0
    total: float = 0.0

    def ready(self) -> bool:
        """The first pass is of a single token: the baseline for proposals."""
        return self.single > 0 and self.lost + self.several - self.single <= self.single + MOST_LOST * self.total

    def tell(self, proposed: int, accepted: int, seconds: float) -> None:
        """Record a pass. The first one with proposals may have compiled something: it counts as one of a single token."""
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
    """Decoding with up to n proposals per pass, and counts over all that it decodes. Subclasses make the proposals."""

    def __init__(self, n: int):
        self.n = n
        self.pacer = Pacer()
        self.passes = self.tokens = self.proposed = self.accepted = 0
        self._on_gpu: _OnGpu | None = None

    def propose(self, cache: KVCache, count: int, sampler: Sampler, banned: Tensor | None) -> list[int]:
        """At most `count` tokens that may follow the one at cache.pos."""
        raise NotImplementedError

    def decode(self, model: Llama, cache: KVCache, n: int, sampler: Sampler, banned: Tensor | None) -> Iterator[int]:
        """Up to n tokens. Whichever is yielded last, the cache is left with what came before it, and no more."""
        if n == 0:
            return
        read, last = cache.pos, cache.pos + n - 1
        try:
            yield sample_next(model, cache, cache.logits, sampler, banned)
            passes = self._passes_on_gpu if model.uses_graphs else self._passes
            for new in passes(model, cache, last, sampler, banned):
                while read < new:
                    read += 1
                    yield int(cache.host_tokens[read])
        finally:
            cache.seek(read)

    def _passes(
        self, model: Llama, cache: KVCache, last: int, sampler: Sampler, banned: Tensor | None
    ) -> Iterator[int]:  # fmt: skip
        """Run passes until the token at `last` is sampled; after each, yield the position of the last sampled token."""
        while cache.pos < last:
            self._pass(model, cache, last - cache.pos - 1, sampler, banned)
            yield cache.pos

    def summary(self) -> str:
        """A line for the closing summary."""
        share = f"{self.accepted / self.proposed:.0%} of {self.proposed}" if self.proposed else "none of 0"
        rate = self.tokens / max(self.passes, 1)
        return f"proposals {self.passes} passes, {rate:.2f} tokens a pass; {share} proposals accepted\n"

    def _pass(self, model: Llama, cache: KVCache, room: int, sampler: Sampler, banned: Tensor | None) -> None:
        """Evaluate the token at cache.pos and at most `room` proposals. cache.pos moves to the last token that is sampled: the
        first that was not proposed."""
        start, first = time.perf_counter(), cache.pos
        proposals = self.propose(cache, min(self.n, room), sampler, banned) if room and self.pacer.ready() else []
        cache.tokens[first + 1 : first + 1 + len(proposals)] = torch.tensor(proposals, dtype=torch.int32)
        rows = model.evaluate(1 + len(proposals), cache)
        cache.truncate(first + 1)
        for row, proposal in zip(rows, [*proposals, None]):
            if sample_next(model, cache, row, sampler, banned) != proposal:
                break
            cache.advance(1)
        self._tell(len(proposals), cache.pos - first - 1, time.perf_counter() - start)

    def _tell(self, proposed: int, accepted: int, seconds: float) -> None:
        self.pacer.tell(proposed, accepted, seconds)
        self.passes += 1
        self.tokens += 1 + accepted
        self.proposed += proposed
        self.accepted += accepted

    # ---- the same with CUDA graphs

    def enqueue_proposals(self, cache: KVCache, T: int, gpu: _OnGpu, sampler: Sampler, banned: Tensor | None) -> None:
        """At the start of a graph of T tokens: have the GPU write T - 1 proposals after the token at cache.device_pos."""
        raise NotImplementedError

    def catch_up(self, cache: KVCache, read: int) -> None:
        """Called at the start, and before a pass with proposals that follows one without, while the GPU is idle."""

    def told(self, proposed: int, new: int) -> None:
        """Called after a pass. new: the position of the last sampled token."""

    def _passes_on_gpu(
        self, model: Llama, cache: KVCache, last: int, sampler: Sampler, banned: Tensor | None
    ) -> Iterator[int]:  # fmt: skip
        """One graph proposes, evaluates, samples at each position, counts what is accepted, and advances. The host is one pass
        behind: while it reads the result of one, the GPU runs the next, so it knows only the highest position that the GPU may
        have reached. With that bound it never overshoots `last`."""
        form = sampler.form(model.config.vocab_size, cache.size)
        key = (cache, form, None if banned is None else tuple(banned.tolist()), self.n)
        if self._on_gpu is None or self._on_gpu.key != key:
            self._on_gpu = _OnGpu(key, self, model, cache, sampler, banned)
        gpu, read, single = self._on_gpu, cache.pos, True
        self.catch_up(cache, read)
        gpu.start(read)
        while read < last:
            bound = read + gpu.in_flight
            while len(gpu.running) < 2 and bound < last:
                several = bound + 1 + self.n <= last and gpu.found and self.pacer.ready()
                T = 1 + self.n if several else 1
                if gpu.running and (several and single or T not in gpu.graphs):
                    break  # catching up and capturing need an idle GPU
                if several and single:
                    self.catch_up(cache, read)
                single = not several
                gpu.prepare(T, read)
                gpu.launch(T)
                bound = read + gpu.in_flight
            T, new, seconds = gpu.collect()
            self._tell(T - 1, new - read - 1, seconds)
            self.told(T - 1, new)
            read = new
            yield read


class _OnGpu:
    """What decoding by CUDA graphs keeps on the GPU, and the passes that are running there."""

    def __init__(
        self, key: tuple, speculation: Speculation, model: Llama, cache: KVCache, sampler: Sampler, banned: Tensor | None
    ):
        self.key, self.cache = key, cache
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.running: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self.found = True  # whether the last pass collected found anything to propose
        self.drawn = torch.zeros(cache.size + 1, dtype=torch.int32, device=model.device)
        self.rejected = torch.zeros(1, dtype=torch.int32, device=model.device)
        self.turn = torch.zeros(1, dtype=torch.int32, device=model.device)  # counts passes
        self.result = torch.zeros(2, 2, dtype=torch.int32, pin_memory=model.device.type == "cuda")  # by turn: position, found
        self.collected = 0

        def run(T: int) -> None:
            speculation.enqueue_proposals(cache, T, self, sampler, banned)
            rows = model.evaluate(T, cache)
            if banned is not None:
                rows.index_fill_(1, banned, -1e4)
            model.ops.sample_rows(rows, cache.tokens, self.drawn, cache.device_pos, sampler)
            enqueue_accept(cache, T, self.drawn, self.rejected, self.turn, self.result)
            cache.device_pos -= self.rejected

        self.run = run

    @property
    def in_flight(self) -> int:
        """How many tokens the running passes may add."""
        return sum(T for T, _, _ in self.running)

    def start(self, pos: int) -> None:
        """Begin at pos."""
        torch.cuda.synchronize()
        self.running.clear()
        self.cache.seek(pos)
        self.turn.zero_()
        self.collected = 0

    def prepare(self, T: int, pos: int) -> None:
        """Capture a pass of T tokens if there is none yet; not earlier, so that a text without repeats does not pay for it.
        Capturing runs the pass once, at pos and with the GPU idle; afterwards tokens, turn and position are restored."""
        if T not in self.graphs:
            tokens, turn = self.cache.tokens.clone(), self.turn.clone()
            self.graphs[T] = captured(partial(self.run, T))
            self.cache.tokens.copy_(tokens)
            self.turn.copy_(turn)
            self.cache.seek(pos)

    def launch(self, T: int) -> None:
        start, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graphs[T].replay()
        done.record()
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
def _accept_kernel(
    tokens, drawn, host_tokens, pos, rejected, turn, result, T: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Of the T - 1 proposals before pos, those that equal what was drawn are accepted, up to the first that does not. What was
    drawn up to and including that position goes to tokens and host_tokens."""
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


def enqueue_accept(cache: KVCache, T: int, drawn: Tensor, rejected: Tensor, turn: Tensor, result: Tensor) -> None:
    args = (cache.tokens, drawn, cache.host_tokens, cache.device_pos, rejected, turn, result)
    launch(_accept_kernel, (1,), drawn.device, *args, T=T, BLOCK=MOST + 1, warps=1)


@jit
def _lookup_kernel(
    tokens, pos, turn, result, S,
    COUNT: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Lookup.propose, COUNT tokens after pos. The length and the end of a match are compared as one number."""
    gdc_launch_dependents(PDL)
    offs, i = tl.arange(0, BLOCK), tl.arange(0, MOST)
    gdc_wait(PDL)
    last = tl.load(pos)
    best = last * 0 - 1
    for start in range(0, last, BLOCK):
        end = start + offs
        same = (end < last) & (tl.load(tokens + end, mask=end < last, other=-1) == tl.load(tokens + last))
        length = same.to(tl.int32)
        for back in tl.static_range(1, LONGEST):
            there = same & (end >= back)
            same = there & (
                tl.load(tokens + end - back, mask=there, other=-1) == tl.load(tokens + last - back, mask=last >= back, other=-2)
            )
            length += same.to(tl.int32)
        best = tl.maximum(best, tl.max(tl.where(length >= SHORTEST, length * 16777216 + end, -1), 0))
    first = best % 16777216 + 1
    following = tl.load(tokens + first + i % tl.maximum(last + 1 - first, 1), mask=(i < COUNT) & (best >= 0), other=0)
    tl.store(tokens + last + 1 + i, following, mask=(i < COUNT) & (last + 1 + i < S))
    tl.store(result + 2 * (tl.load(turn) % 2) + 1, (best >= 0).to(tl.int32))


class Lookup(Speculation):
    """Proposes what followed the latest earlier occurrence of the last tokens; if too few followed, they repeat."""

    def propose(self, cache: KVCache, count: int, sampler: Sampler, banned: Tensor | None) -> list[int]:
        seen = cache.tokens[: cache.pos + 1]
        for length in range(min(LONGEST, len(seen) - 1), SHORTEST - 1, -1):
            found = (seen.unfold(0, length, 1)[:-1] == seen[-length:]).all(1).nonzero()
            if len(found):
                following = seen[int(found[-1]) + length :].tolist()
                return [following[i % len(following)] for i in range(count)]
        return []

    def enqueue_proposals(self, cache: KVCache, T: int, gpu: _OnGpu, sampler: Sampler, banned: Tensor | None) -> None:
        """Also in a graph of one token, so that the host sees when there is something to propose."""
        enqueue_lookup(cache, T - 1, gpu.turn, gpu.result)


def enqueue_lookup(cache: KVCache, count: int, turn: Tensor, result: Tensor) -> None:
    args = (cache.tokens, cache.device_pos, turn, result, cache.size)
    cut = dict(COUNT=count, LONGEST=LONGEST, SHORTEST=SHORTEST, MOST=MOST + 1, BLOCK=4096)
    launch(_lookup_kernel, (1,), cache.tokens.device, *args, **cut, warps=8)


class Draft(Speculation):
    """Proposes what another model samples."""

    def __init__(self, n: int, model: Llama):
        super().__init__(n)
        self.model = model
        self.cache: KVCache | None = None
        self.evaluated = 0  # positions in use in its cache; graphs advance without updating cache.pos

    def _cache_for(self, cache: KVCache) -> KVCache:
        """The draft's own cache, with room for proposals beyond the end of the main model's."""
        if self.cache is None or self.cache.size != cache.size + MOST + 1:
            self.cache, self.evaluated = KVCache(self.model, cache.size + MOST + 1), 0
        return self.cache

    def propose(self, cache: KVCache, count: int, sampler: Sampler, banned: Tensor | None) -> list[int]:
        own = self._cache_for(cache)
        self.catch_up(cache, cache.pos)
        proposals = [sample_next(self.model, own, own.logits, sampler, banned)]
        while len(proposals) < count:
            self.model.step(1, own)
            proposals.append(sample_next(self.model, own, own.logits, sampler, banned))
        self.evaluated = own.pos
        return proposals

    def catch_up(self, cache: KVCache, read: int) -> None:
        """Evaluate what the draft has not seen yet, up to and including the token at `read`."""
        own, seen = self._cache_for(cache), cache.tokens[: read + 1].tolist()
        own.seek(self.evaluated)
        self.model.prefill(seen[own.reuse(seen) :], own)
        self.evaluated = own.pos

    def told(self, proposed: int, new: int) -> None:
        if proposed:
            self.evaluated = new - 1

    def enqueue_proposals(self, cache: KVCache, T: int, gpu: _OnGpu, sampler: Sampler, banned: Tensor | None) -> None:
        """Evaluates two tokens first, the last one and the one before: if all proposals of the last pass were accepted, the
        draft has not evaluated the last of them."""
        own = self._cache_for(cache)
        gpu.result[:, 1].fill_(1)
        if T == 1:
            return
        own.tokens[: cache.size].copy_(cache.tokens)
        own.device_pos.copy_(cache.device_pos)
        own.device_pos -= 1
        for i in range(T - 1):
            self.model.step(1 if i else 2, own)
            choose_next(self.model, own, own.logits, sampler, banned)
        cache.tokens.copy_(own.tokens[: cache.size])
