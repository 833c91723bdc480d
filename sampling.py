"""How the next token is chosen: the settings, the reference in plain torch, the Triton kernel. A new sampler touches
this file and the command line.

The order is llama.cpp's: repetition penalty over the last tokens, top-k, top-p, min-p, temperature, draw. The draw
inverts the cumulative distribution at uniform(seed, pos), so a seed gives the same text on every device. Each filter
keeps the tokens at or above one threshold, so ties at the edge stay together; for top-k and top-p, logits that round to
the same step (STEPS, FARTHEST) are ties.

The op `sample` reads logits float32 [V], which it may overwrite, and writes the token to tokens[pos] and
host_tokens[pos] (both int32 [S]). The host reads the latter, which is pinned memory with a GPU; where the logits are
not finite, host_tokens gets -1 and tokens 0. `sample_rows` reads logits [T, V] of the T tokens before pos, and writes
to `drawn` (int32, -1 where they are not finite) the token chosen to follow each of them, up to drawn[pos]; `tokens`
holds what comes before each position. Both take the settings as a Sampler, whose numbers are on the device.

To add a setting: a field of Sampling and its range; its number in Sampler, which _sample_kernel loads by its place;
what it does, in _choose_ref and in _choose; its flag in run.py, of the same name; its values in
test_sampling_on_the_device_chooses_what_the_reference_does. With a small top-k, _choose sees only what that may keep. A
filter that has to see the whole vocabulary needs a BLOCK as large as that, see Sampler.switches.
"""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from launch import Scratch, constexpr, gdc_launch_dependents, gdc_wait, is_last, jit, launch, tl, triton


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

# Top-k and top-p compare logits by how far below the best they are: in whole steps, so many to a unit, and up to this
# distance, where a token has e^-64 of the best one's probability
STEPS, FARTHEST = 1 << 18, 64
COLDEST = 1e-30  # temperature: lower positive ones are raised to it, as float32 could round them to 0


class Sampler:
    """Settings as the ops take them: `s` for the host, and the same numbers in device memory, where a kernel reads
    them. So a captured graph picks up new settings, as long as its kernel is compiled for the same `switches`."""

    def __init__(self, device: torch.device, s: Sampling = Sampling()):
        self.scratch = Scratch(device)
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(6, device=device)  # temperature, top_k, top_p, log(min_p), penalty, its window
        self.set(s)

    def set(self, s: Sampling) -> None:
        self.s = s
        self.seed.fill_(s.seed)
        window = s.repeat_last_n if s.repeat_last_n >= 0 else 1 << 30
        numbers = max(s.temp, COLDEST), s.top_k, s.top_p, math.log(max(s.min_p, 1e-30)), s.repeat_penalty, window
        self.numbers.copy_(torch.tensor(numbers, dtype=torch.float32))

    def switches(self, V: int, S: int) -> dict[str, int | bool]:
        """The part of the settings that the kernel is compiled for, with V logits and at most S tokens to look back
        on."""
        s, greedy = self.s, self.s.temp == 0
        window = 0 if s.repeat_penalty == 1 else S if s.repeat_last_n < 0 else min(s.repeat_last_n, S)
        filters = dict(TOP_K=0 < s.top_k < V, TOP_P=s.top_p < 1, MIN_P=s.min_p > 0)
        on = {name: is_on and not greedy for name, is_on in filters.items()}
        return on | dict(GREEDY=greedy, PENALTY=window > 0, WINDOW=triton.next_power_of_2(max(window, 1)))


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
    best = logits.max()
    steps = ((best - logits) * STEPS).clamp(max=FARTHEST * STEPS - 1).floor()
    kept = torch.full(logits.shape, True, device=logits.device)
    if 0 < s.top_k < len(logits):
        kept = steps <= steps.kthvalue(s.top_k).values
    if s.top_p < 1:
        ranked = steps[kept].sort().values
        p = (-ranked.double() / STEPS).exp()
        above = p.cumsum(0) - p  # mass of those before each
        kept = steps <= ranked[max(int((above < s.top_p * p.sum()).sum()), 1) - 1]
    if s.min_p > 0:
        kept &= logits >= best + math.log(s.min_p)
    p = torch.where(kept, (logits - best) / max(s.temp, COLDEST), -torch.inf).exp()
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


# The vocabulary is divided among programs, which pass on what they find from launch to launch in scratch memory. The
# first launch finds the best logit. Top-k and top-p each take two more, a radix select: how far below the best a token
# is makes two digits; the first launch adds up the tokens (top-k) or their probability (top-p) for each value of the
# upper digit, the second for each value of the lower one where the running sum reaches its target. These sums are
# integers, so the order in which programs add to them does not matter. The last launch sums the weights of what is kept
# in each part; its last program finds the part that the draw falls into, and there the token.

BINS = 4096  # values of a digit: two make a distance
_BINS, _STEPS, _FARTHEST = constexpr(BINS), constexpr(STEPS), constexpr(FARTHEST)


@jit
def _load(logits, maxima, part, V: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """A part's ids and logits, the best of all logits, and how many steps below it each lies."""
    ids = part * BLOCK + tl.arange(0, BLOCK)
    l = tl.load(logits + ids, mask=ids < V, other=float("-inf"))
    best = tl.max(_load_parts(maxima, PARTS, float("-inf")), 0)
    below = best - l
    return ids, l, best, tl.where(below < _FARTHEST, below * _STEPS, _FARTHEST * _STEPS - 1).to(tl.int32)


@jit
def _load_parts(values, PARTS: tl.constexpr, other):
    """What each part has left, past the L1 cache, as the last program to finish needs it."""
    parts = tl.arange(0, triton.next_power_of_2(PARTS))
    return tl.load(values + parts, mask=parts < PARTS, other=other, cache_modifier=".cg")


@jit
def _reach(bins, target):
    """The first bin at which the running sum reaches the target, and what the bins before it leave of the target."""
    sums = tl.cumsum(tl.load(bins + tl.arange(0, _BINS)), 0)
    return tl.sum((sums < target).to(tl.int32), 0), target - tl.max(tl.where(sums < target, sums, 0), 0)


@jit
def _target(bins, numbers, TOP_P: tl.constexpr):
    """What a filter keeps at least: as many tokens, or as much probability."""
    if TOP_P:
        total = tl.sum(tl.load(bins + tl.arange(0, _BINS)), 0)
        return tl.maximum((tl.load(numbers + 2).to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
    return tl.load(numbers + 1).to(tl.int64)


@jit
def _farthest(bins, numbers, TOP_K: tl.constexpr, TOP_P: tl.constexpr):
    """How many steps below the best the filters that are on keep tokens; top-p includes top-k."""
    if TOP_K or TOP_P:
        bins += 2 * _BINS if TOP_P else 0
        upper, left = _reach(bins, _target(bins, numbers, TOP_P))
        lower, _ = _reach(bins + _BINS, left)
        return upper * _BINS + lower
    return _BINS * _BINS


@jit
def _sample_best_kernel(
    logits, tokens, pos, maxima, bins, numbers,
    PENALTY: tl.constexpr, WINDOW: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Penalise recent tokens, find the best logit of each part (inf if one is not finite), and empty the bins."""
    gdc_launch_dependents(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    logits += row * V
    bins += row * 4 * _BINS
    ids = part * BLOCK + tl.arange(0, BLOCK)
    penalty, window = tl.load(numbers + 4), tl.load(numbers + 5)
    gdc_wait(PDL)
    if PENALTY:
        position = tl.load(pos) - tl.num_programs(1) + 1 + row
        back = tl.arange(0, WINDOW)
        recent = tl.load(tokens + position - 1 - back, mask=(back < window) & (back < position), other=-1)
        mask_recent = (recent >= part * BLOCK) & (recent < (part + 1) * BLOCK)
        seen = tl.load(logits + recent, mask=mask_recent, other=0.0)
        tl.debug_barrier()  # a token seen twice is penalised once: all are read before any is written
        tl.store(logits + recent, tl.where(seen > 0, seen / penalty, seen * penalty), mask=mask_recent)
        tl.debug_barrier()
    l = tl.load(logits + ids, mask=ids < V, other=float("-inf"))
    bad = (ids < V) & ((l != l) | (tl.abs(l) == float("inf")))
    tl.store(maxima + row * PARTS + part, tl.max(tl.where(bad, float("inf"), l), 0))
    for first in range(part * BLOCK, 4 * _BINS, PARTS * BLOCK):
        tl.store(bins + first + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.int64))


@jit
def _sample_count_kernel(
    logits, maxima, bins, numbers,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, LOWER: tl.constexpr,
    V: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add up one digit's values: for top-p if it is on here, of what top-k kept, otherwise for top-k."""
    gdc_launch_dependents(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    bins += row * 4 * _BINS
    gdc_wait(PDL)
    ids, _, _, steps = _load(logits + row * V, maxima + row * PARTS, part, V, BLOCK, PARTS)
    mask, digit, weight = ids < V, steps // _BINS, 1
    if TOP_P and not LOWER:
        mask &= steps <= _farthest(bins, numbers, TOP_K, False)
    if TOP_P:
        bins += 2 * _BINS
        weight = (tl.exp(steps.to(tl.float32) / -_STEPS) * 2.0**42).to(tl.int64)  # the sum of 2^20 such fits
    if LOWER:
        upper, _ = _reach(bins, _target(bins, numbers, TOP_P))
        mask &= digit == upper
        digit = _BINS + steps % _BINS
    tl.atomic_add(bins + digit, weight, mask=mask, sem="relaxed")


@jit
def _weights(l, best, steps, farthest, numbers, MIN_P: tl.constexpr, GREEDY: tl.constexpr):
    """Of the tokens that are kept, what each is drawn by."""
    if GREEDY:
        return (l == best).to(tl.float64)
    mask = (steps <= farthest) & (l > float("-inf"))
    if MIN_P:
        mask &= l >= best + tl.load(numbers + 3)
    return tl.where(mask, tl.exp((l - best) / tl.load(numbers)), 0.0).to(tl.float64)


@jit
def _first_beyond(target, sums, weights, ids):
    """The first of the ids whose running sum is beyond the target, but none without a weight."""
    last = tl.max(tl.where(weights > 0, ids, 0), 0)
    return tl.min(tl.where((sums > target) & (weights > 0), ids, last), 0)


@jit
def _sample_draw_kernel(
    logits, maxima, masses, arrived, chosen_tokens, drawn, pos, bins, seed, numbers,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, GREEDY: tl.constexpr,
    V: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum the weights of each part, and draw."""
    gdc_launch_dependents(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    logits += row * V
    maxima += row * PARTS
    masses += row * PARTS
    seed = tl.load(seed)
    gdc_wait(PDL)
    farthest = _farthest(bins + row * 4 * _BINS, numbers, TOP_K, TOP_P)
    _, l, best, steps = _load(logits, maxima, part, V, BLOCK, PARTS)
    tl.store(masses + part, tl.sum(_weights(l, best, steps, farthest, numbers, MIN_P, GREEDY), 0))
    if is_last(arrived + row, PARTS):
        position = tl.load(pos) - tl.num_programs(1) + 1 + row
        parts, mass = tl.arange(0, triton.next_power_of_2(PARTS)), _load_parts(masses, PARTS, 0.0)
        sums = tl.cumsum(mass, 0)
        target = 0.0 if GREEDY else _uniform(seed, position) * tl.max(sums, 0)
        part = _first_beyond(target, sums, mass, parts)
        ids, l, best, steps = _load(logits, maxima, part, V, BLOCK, PARTS)
        weights = _weights(l, best, steps, farthest, numbers, MIN_P, GREEDY)
        before = tl.sum(tl.where(parts == part, sums - mass, 0.0), 0)
        token = _first_beyond(target, before + tl.cumsum(weights, 0), weights, ids)
        bad = best == float("inf")
        if chosen_tokens is not None:
            tl.store(chosen_tokens + position, tl.where(bad, 0, token).to(tl.int32))
        tl.store(drawn + position, tl.where(bad, -1, token).to(tl.int32))


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
    on, zeros, numbers = sampler.switches(V, len(tokens)), sampler.scratch.zeros, sampler.numbers
    sizes = dict(V=V, BLOCK=1024, PARTS=triton.cdiv(V, 1024), warps=8)
    maxima = zeros("best of each part", rows, sizes["PARTS"])
    masses = zeros("mass of each part", rows, sizes["PARTS"], dtype=torch.float64)
    arrived = zeros("parts done", rows, dtype=torch.int32)
    bins = zeros("digits", rows, 4, BINS, dtype=torch.int64)
    penalty = {name: on.pop(name) for name in ("PENALTY", "WINDOW")}

    def run(kernel, *args, **constants) -> None:
        launch(kernel, (sizes["PARTS"], rows), logits.device, *args, **sizes, **constants)

    run(_sample_best_kernel, logits, tokens, pos, maxima, bins, numbers, **penalty)
    for top_p in (False, True):
        for lower in (False, True):
            if on["TOP_P" if top_p else "TOP_K"]:
                filters = dict(TOP_K=on["TOP_K"], TOP_P=top_p, LOWER=lower)
                run(_sample_count_kernel, logits, maxima, bins, numbers, **filters)
    drawn_to = chosen_tokens, drawn, pos
    run(_sample_draw_kernel, logits, maxima, masses, arrived, *drawn_to, bins, sampler.seed, numbers, **on)
