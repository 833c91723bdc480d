"""How the next token is chosen: the settings, the reference in plain torch, the Triton kernel. A new sampler touches
this file and the command line.

The order is llama.cpp's: repetition penalty over the last tokens, top-k, top-p, min-p, temperature, draw. The draw
inverts the cumulative distribution at uniform(seed, pos), so a seed gives the same text on every device. Each filter
keeps the tokens at or above one threshold, so ties at the edge stay together.

The op `sample` reads logits float32 [V], which it may overwrite, and writes the token to tokens[pos] and
host_tokens[pos] (both int32 [S]). The host reads the latter, which is pinned memory with a GPU; where the logits are
not finite, host_tokens gets -1 and tokens 0. `sample_rows` reads logits [T, V] of the T tokens before pos, and writes
to `drawn` (int32, -1 where they are not finite) the token chosen to follow each of them, up to drawn[pos]; `tokens`
holds what comes before each position. Both take the settings as a Sampler, whose numbers are on the device.

To add a setting: a field of Sampling and its range; its number in _numbers, which _sample_kernel loads by its place;
what it does, in _choose_ref and in _choose; its flag in run.py, of the same name; its values in
test_sampling_on_the_device_chooses_what_the_reference_does. With a small top-k, _choose sees only what that may keep. A
filter that has to see the whole vocabulary needs a BLOCK as large as that, see Sampler.switches.
"""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from launch import Scratch, gdc_launch_dependents, gdc_wait, is_last, jit, launch, tl, triton


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. temp 0 is greedy; top_k 0, top_p 1, min_p 0 and repeat_penalty 1 are off. Another
    seed gives another text. Raises ValueError for a value out of range."""

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # tokens that the penalty looks back on; -1: all
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            if not low <= getattr(self, name) <= high:
                limit = f"{low} or more" if high == math.inf else f"from {low} to {high}"
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {limit}")


RANGES = {"temp": (0, math.inf), "top_k": (0, math.inf), "top_p": (0, 1), "min_p": (0, 1)}
RANGES |= {"repeat_penalty": (0.01, 100), "repeat_last_n": (-1, math.inf), "seed": (0, (1 << 63) - 1)}

COLDEST = 1e-30  # temperature: lower positive ones are raised to it, as float32 could round them to 0


def _numbers(s: Sampling) -> list[float]:
    """Temperature, top_k, top_p, log(min_p), penalty and its window: the kernel loads them by their places."""
    window = s.repeat_last_n if s.repeat_last_n >= 0 else 1 << 30
    log_min_p = math.log(max(s.min_p, 1e-30))
    return [max(s.temp, COLDEST), float(s.top_k), s.top_p, log_min_p, s.repeat_penalty, float(window)]


class Sampler:
    """Settings as the ops take them: `s` for the host, and the same numbers in device memory, where a kernel reads
    them. So a captured graph picks up new settings, as long as its kernel is compiled for the same `switches`."""

    def __init__(self, device: torch.device, s: Sampling = Sampling()):
        self.scratch = Scratch(device)
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.numbers = torch.tensor(_numbers(s), device=device)
        self.set(s)

    def set(self, s: Sampling) -> None:
        self.s = s
        self.seed.fill_(s.seed)
        self.numbers.copy_(torch.tensor(_numbers(s)))

    def switches(self, V: int, S: int) -> dict[str, int | bool]:
        """The part of the settings that the kernel is compiled for, with V logits and at most S tokens to look back
        on."""
        s, cuts = self.s, self.s.temp > 0 and 0 < self.s.top_k < V
        window = 0 if s.repeat_penalty == 1 else S if s.repeat_last_n < 0 else min(s.repeat_last_n, S)
        block = 1024 if s.temp == 0 or cuts and s.top_k <= KEEP else triton.next_power_of_2(V)
        on = dict(TOP_K=cuts, TOP_P=s.top_p < 1, MIN_P=s.min_p > 0, GREEDY=s.temp == 0, PENALTY=window > 0)
        return on | dict(WINDOW=triton.next_power_of_2(max(window, 1)), BLOCK=block)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 24 random bits, from a seed and a position: SplitMix64's output function (Vigna,
    2015)."""
    mask = (1 << 64) - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return ((z ^ (z >> 31)) >> 40) / (1 << 24)


def sample_ref(logits: Tensor, tokens: Tensor, host_tokens: Tensor, pos: Tensor, sampler: Sampler) -> None:
    position = int(pos)
    token = _choose_ref(logits, tokens, position, sampler.s) if torch.isfinite(logits.sum()) else -1
    tokens[position] = max(token, 0)
    host_tokens[position] = token


def _choose_ref(logits: Tensor, tokens: Tensor, position: int, s: Sampling) -> int:
    if s.repeat_penalty != 1:
        first = 0 if s.repeat_last_n < 0 else max(0, position - s.repeat_last_n)
        recent = tokens[first:position].long().unique()
        seen = logits[recent]
        logits[recent] = torch.where(seen > 0, seen / s.repeat_penalty, seen * s.repeat_penalty)
    if s.temp == 0:
        return int(logits.argmax())
    kept = logits
    if 0 < s.top_k < len(logits):
        kept = logits[logits >= logits.topk(s.top_k).values[-1]]
    best, floor = kept.max(), kept.min()
    if s.top_p < 1:
        ranked = kept.sort(descending=True).values
        p = (ranked - best).double().exp()
        above = p.cumsum(0) - p  # mass of those before each
        floor = ranked[max(int((above < s.top_p * p.sum()).sum()), 1) - 1]
    if s.min_p > 0:
        floor = torch.maximum(floor, best + math.log(s.min_p))
    p = torch.where(logits >= floor, (logits - best) / max(s.temp, COLDEST), -torch.inf).exp()
    cdf = p.double().cumsum(0)
    drawn = torch.searchsorted(cdf, uniform(s.seed, position) * cdf[-1], right=True)
    return min(int(drawn), int(p.nonzero()[-1]))


def sample_rows_ref(logits: Tensor, tokens: Tensor, drawn: Tensor, pos: Tensor, sampler: Sampler) -> None:
    for row, position in zip(logits, range(int(pos) - len(logits) + 1, int(pos) + 1)):
        drawn[position] = _choose_ref(row, tokens, position, sampler.s) if torch.isfinite(row.sum()) else -1


@jit
def _uniform(seed, index):
    z = (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + seed.to(tl.uint64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 40).to(tl.float32) / 16777216.0


@jit
def _threshold(l, weights, target, low, high):
    """The largest of the values l such that the weights of those at or above it reach the target. low and high are two
    of them, between which it lies: bisection, in which both ends move on to the next value that occurs."""
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)
        above = l >= middle
        reached = tl.sum(tl.where(above, weights, 0.0), 0)
        next_above = tl.min(tl.where(above, l, float("inf")), 0)
        next_below = tl.max(tl.where(above, float("-inf"), l), 0)
        high = tl.where(reached == target, next_above, tl.where(reached > target, high, next_below))
        low = tl.where(reached >= target, next_above, low)
    return low


@jit
def _choose(
    l, ids, u, temp, top_k, top_p, log_min_p, edges, left_out, logits,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, GREEDY: tl.constexpr,
    V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose one of the ids, which ascend, by their logits l (-inf where there is no token) and u in [0, 1). Where l is
    only what parts of the vocabulary kept, edges is each part's lowest logit and left_out how many equal to it did not
    fit."""
    best = tl.max(l, 0)
    if GREEDY:
        return tl.min(tl.where(l == best, ids, 2147483647), 0)
    floor = tl.min(tl.where(l > float("-inf"), l, best), 0)
    if TOP_K:
        floor = _threshold(l, tl.full(l.shape, 1.0, tl.float32), top_k, floor, best)
    edge, unseen = floor, 0.0
    if edges is not None:
        unseen = tl.sum(tl.where(edges == edge, left_out, 0.0), 0)
    if TOP_P:
        p = tl.where(l >= floor, tl.exp(l - best), 0.0)
        total = tl.sum(p, 0) + unseen * tl.exp(edge - best)
        floor = _threshold(l, p, tl.maximum(top_p * total, 1e-30), floor, best)
    if MIN_P:
        floor = tl.maximum(floor, best + log_min_p)
    p = tl.where(l >= floor, tl.exp((l - best) / temp), 0.0).to(tl.float64)
    if edges is None:  # a running sum over the whole vocabulary at once would take Triton long to compile
        return _draw_from_all(logits, u * tl.sum(p, 0), best, floor, temp, V, BLOCK if BLOCK < 16384 else 16384)
    cdf = tl.cumsum(p, 0)
    last = tl.max(tl.where(p > 0, ids, 0), 0)
    token = tl.min(tl.where((cdf > u * tl.max(cdf, 0)) & (p > 0), ids, last), 0)
    if (unseen > 0) & (floor == edge):
        mass = tl.sum(p, 0) + unseen * tl.exp((edge - best) / temp)
        token = _draw_from_all(logits, u * mass, best, floor, temp, V, BLOCK)
    return token


@jit
def _draw_from_all(logits, target, best, floor, temp, V: tl.constexpr, BLOCK: tl.constexpr):
    """The first id at which the running sum of the weights of logits at or above floor exceeds the target."""
    before, token, last = tl.full([], 0.0, tl.float64), 2147483647, 0
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        l = tl.load(logits + ids, mask=ids < V, other=float("-inf"), cache_modifier=".cg")
        p = tl.where(l >= floor, tl.exp((l - best) / temp), 0.0).to(tl.float64)
        cdf = before + tl.cumsum(p, 0)
        token = tl.minimum(token, tl.min(tl.where((cdf > target) & (p > 0), ids, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(p > 0, ids, 0), 0))
        before += tl.sum(p, 0)
    return tl.minimum(token, last)


@jit
def _sample_kernel(
    logits, tokens, chosen_tokens, drawn, pos, candidates, arrived, seed, numbers,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, PENALTY: tl.constexpr, GREEDY: tl.constexpr,
    V: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr, WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """If greedy or with a small top_k, each program keeps the best of its part of the vocabulary, and the last one to
    finish chooses among these; otherwise there is one part. Axis 1 of the grid is the rows of logits. candidates, for
    each row: what each part kept (logits, then ids), its edge, and how many equal to that were left out."""
    gdc_launch_dependents(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    logits += row * V
    candidates += row * (2 * PARTS * KEEP + 2 * PARTS)
    arrived += row
    ids = part * BLOCK + tl.arange(0, BLOCK)
    temp, top_k, top_p = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    log_min_p, penalty, window = tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5)
    seed = tl.load(seed)
    gdc_wait(PDL)
    position = tl.load(pos) - tl.num_programs(1) + 1 + row
    if PENALTY:
        back = tl.arange(0, WINDOW)
        recent = tl.load(tokens + position - 1 - back, mask=(back < window) & (back < position), other=-1)
        mask_recent = (recent >= part * BLOCK) & (recent < (part + 1) * BLOCK)
        seen = tl.load(logits + recent, mask=mask_recent, other=0.0)
        tl.debug_barrier()  # a token seen twice is penalised once: all are read before any is written
        tl.store(logits + recent, tl.where(seen > 0, seen / penalty, seen * penalty), mask=mask_recent)
        tl.debug_barrier()
    l = tl.load(logits + ids, mask=ids < V, other=float("-inf"))
    bad = tl.sum(tl.where((ids < V) & ((l != l) | (tl.abs(l) == float("inf"))), 1, 0), 0)
    l = tl.where(bad > 0, 0.0, l)
    u = _uniform(seed, position)
    if PARTS == 1:
        token = _choose(
            l, ids, u, temp, top_k, top_p, log_min_p, None, None, logits, TOP_K, TOP_P, MIN_P, GREEDY, V, BLOCK
        )
        if chosen_tokens is not None:
            tl.store(chosen_tokens + position, tl.where(bad > 0, 0, token).to(tl.int32))
        tl.store(drawn + position, tl.where(bad > 0, -1, token).to(tl.int32))
    else:
        # what this part keeps, in the order of ids: those above its edge, fewer than top_k, and as many equal to it as
        # fit
        best = tl.max(l, 0)
        lowest = tl.min(tl.where(ids < V, l, best), 0)
        edge = best if GREEDY else _threshold(l, tl.full(l.shape, 1.0, tl.float32), top_k, lowest, best)
        above = ((l > edge) & (ids < V)).to(tl.int32)
        equal = ((l == edge) & (ids < V)).to(tl.int32)
        room = KEEP - tl.sum(above, 0)
        chosen = (bad == 0) & ((above > 0) | ((equal > 0) & (tl.cumsum(equal, 0) <= room)))
        slot = part * KEEP + tl.cumsum(chosen.to(tl.int32), 0) - 1
        lane = tl.arange(0, KEEP)
        filler = tl.where(bad > 0, float("nan"), float("-inf"))
        kept = candidates
        kept_ids = candidates + PARTS * KEEP
        edges = candidates + 2 * PARTS * KEEP
        left_out = edges + PARTS
        tl.store(kept + slot, l, mask=chosen)
        tl.store(kept_ids + slot, ids.to(tl.float32, bitcast=True), mask=chosen)
        tl.store(
            kept + part * KEEP + lane,
            filler + tl.zeros([KEEP], tl.float32),
            mask=lane >= tl.sum(chosen.to(tl.int32), 0),
        )
        tl.store(edges + part, edge)
        tl.store(left_out + part, tl.maximum(tl.sum(equal, 0) - room, 0).to(tl.float32))
        if is_last(arrived, PARTS):
            slots, parts = tl.arange(0, PARTS * KEEP), tl.arange(0, PARTS)
            all_l = tl.load(kept + slots, cache_modifier=".cg")
            all_ids = tl.load(kept_ids + slots, cache_modifier=".cg").to(tl.int32, bitcast=True)
            any_bad = tl.sum((all_l != all_l).to(tl.int32), 0)
            token = _choose(
                tl.where(any_bad > 0, 0.0, all_l), all_ids, u, temp, top_k, top_p, log_min_p,
                tl.load(edges + parts, cache_modifier=".cg"), tl.load(left_out + parts, cache_modifier=".cg"), logits,
                TOP_K, TOP_P, MIN_P, GREEDY, V, BLOCK,
            )  # fmt: skip
            if chosen_tokens is not None:
                tl.store(chosen_tokens + position, tl.where(any_bad > 0, 0, token).to(tl.int32))
            tl.store(drawn + position, tl.where(any_bad > 0, -1, token).to(tl.int32))


KEEP = 64  # the most logits that a part keeps: top-k up to this many is chosen in parts


def sample(logits: Tensor, tokens: Tensor, host_tokens: Tensor, pos: Tensor, sampler: Sampler) -> None:
    _launch_sample(logits.view(1, -1), tokens, tokens, host_tokens, pos, sampler)


def sample_rows(logits: Tensor, tokens: Tensor, drawn: Tensor, pos: Tensor, sampler: Sampler) -> None:
    _launch_sample(logits, tokens, None, drawn, pos, sampler)


def _launch_sample(
    logits: Tensor, tokens: Tensor, chosen_tokens: Tensor | None, drawn: Tensor, pos: Tensor, sampler: Sampler
) -> None:
    """tokens: what came before; chosen_tokens: where a choice becomes a token; drawn: where it is reported, -1
    included."""
    rows, V = logits.shape
    switches = sampler.switches(V, len(tokens))
    parts = triton.next_power_of_2(triton.cdiv(V, switches["BLOCK"]))
    candidates = sampler.scratch.zeros("candidates", rows, 2 * parts * KEEP + 2 * parts)
    arrived = sampler.scratch.zeros("parts done", rows, dtype=torch.int32)
    args = (logits, tokens, chosen_tokens, drawn, pos, candidates, arrived, sampler.seed, sampler.numbers)
    warps = min(16, max(4, switches["BLOCK"] // 1024))
    launch(
        _sample_kernel, (parts, rows), logits.device, *args, **switches, V=V, PARTS=parts, KEEP=KEEP, warps=warps
    )  # fmt: skip
