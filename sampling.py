"""How the next token is chosen: the settings, the reference in plain torch, the Triton kernels.

The order is llama.cpp's: repetition penalty over the last tokens, top-k, top-p, min-p, temperature,
draw. Each filter keeps the tokens at or above one threshold, so ties at the edge stay together. To
draw, a Gumbel variate is added to each logit divided by the temperature, and the largest sum wins,
which happens with the token's probability (Gumbel-max trick: Gumbel, 1954). The variates depend on
seed, position and token alone, so a seed gives the same text on every device, and a draft model
mostly draws what the model itself will (Daliri, Musco and Suresh, 2024).

The op `sample` reads logits float32 [T, V] of the T tokens before pos, which it may overwrite, and
writes to `drawn` (int32, -1 where they are not finite) the token chosen to follow each of them, up
to drawn[pos]. `tokens`, int32 [S], holds what comes before each position; the token of a single row
is written there, too, as 0 if it is -1. The settings come as a Sampler, whose numbers are on the
device.

To add a setting: a field of Sampling and its range; its number in _numbers, which kernels load by
its place; what it does, in _choose_ref and in _sample_draw_kernel, or in _sample_best_kernel if it
needs to see all logits first (_load_part reads what that kernel found); a switch if it can be off;
a flag of the same name in run.py; values in test_sampling_equals_the_reference; its name in
checkpoint.read_sampling if generation_config.json may set it. Banned tokens have the logit
model.BANNED, which is finite."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import math
from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor

from launch import (
    Scratch,
    constexpr,
    gdc_launch_dependents,
    gdc_wait,
    is_last,
    jit,
    launch,
    tl,
    triton,
)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. temp 0 is greedy; top_k 0, top_p 1, min_p 0 and repeat_penalty
    1 are off. Another seed gives another text. Raises ValueError for a value out of range."""

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
RANGES |= {
    "repeat_penalty": (0.01, 100),
    "repeat_last_n": (-1, math.inf),
    "seed": (0, (1 << 63) - 1),
}

# Temperatures in use: float32 could round lower ones to 0; with hotter ones, a logit of
# model.BANNED could be drawn
COLDEST, HOTTEST = 1e-30, 1e30


def _temperature(s: Sampling) -> float:
    return min(max(s.temp, COLDEST), HOTTEST)


def _numbers(s: Sampling) -> list[float]:
    """Temperature, top_k, top_p, log(min_p), penalty and its window: kernels load them by their
    places."""
    window = min(s.repeat_last_n, 1 << 30) if s.repeat_last_n >= 0 else 1 << 30
    log_min_p = math.log(s.min_p) if s.min_p > 0 else -math.inf
    return [_temperature(s), float(s.top_k), s.top_p, log_min_p, s.repeat_penalty, float(window)]


# What kernels are compiled for. COUNTED: the thresholds are searched for in bins
Switches = namedtuple("Switches", "GREEDY PENALTY TOP_K TOP_P COUNTED")


class Sampler:
    """Settings as the ops take them: `s` for the host, and the same numbers in device memory, where
    a kernel reads them. So a captured graph picks up new settings, as long as its kernels are
    compiled for the same `switches`."""

    def __init__(self, device: torch.device, s: Sampling = Sampling()):
        self.scratch = Scratch(device)
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.numbers = torch.tensor(_numbers(s), device=device)
        self.set(s)

    def set(self, s: Sampling) -> None:
        self.s = s
        self.seed.fill_(s.seed)
        self.numbers.copy_(torch.tensor(_numbers(s)))

    def switches(self, V: int) -> Switches:
        """What is on, given V logits."""
        s, cuts = self.s, 0 < self.s.top_k < V
        counted = not cuts or s.top_k > triton.cdiv(V, _block(V))
        return Switches(s.temp == 0, s.repeat_penalty != 1, cuts, s.top_p < 1, counted)


# SplitMix64's constants (Vigna, 2015), as torch's signed integers
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX = (30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64))


def gumbel(seed: int, position: int, ids: Tensor) -> Tensor:
    """Independent Gumbel variates for tokens: -log(-log(1 - u)), u from the upper bits of
    SplitMix64's output."""
    z = ((position << 32) + ids + 1) * GOLDEN + seed
    for shift, factor in MIX:
        z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * factor
    u = ((z >> 24 & (1 << 40) - 1) + 0.5) / (1 << 40)
    return -(-(-u).log1p()).log()


def sample_ref(
    logits: Tensor, tokens: Tensor, drawn: Tensor, pos: Tensor, sampler: Sampler
) -> None:
    for row, position in zip(logits, range(int(pos) - len(logits) + 1, int(pos) + 1)):
        drawn[position] = _choose_ref(row, tokens, position, sampler.s)
    if len(logits) == 1:
        tokens[position] = drawn[position].clamp(min=0)


def _choose_ref(logits: Tensor, tokens: Tensor, position: int, s: Sampling) -> int:
    """The token for a position, -1 where the logits are not finite."""
    if s.repeat_penalty != 1:
        first = 0 if s.repeat_last_n < 0 else max(0, position - s.repeat_last_n)
        recent = tokens[first:position].long()
        seen = logits.gather(0, recent)
        logits.scatter_(
            0, recent, torch.where(seen > 0, seen / s.repeat_penalty, seen * s.repeat_penalty)
        )
    floor, best = map(float, logits.aminmax())
    if not (math.isfinite(floor) and math.isfinite(best)):
        return -1
    if s.temp == 0:
        return int(logits.argmax())
    if 0 < s.top_k < len(logits):
        floor = float(logits.topk(s.top_k).values[-1])
    if s.top_p < 1:
        ranked = logits[logits >= floor].sort(descending=True).values
        mass = ranked.softmax(0, dtype=torch.float64).cumsum(0)
        floor = float(ranked[torch.searchsorted(mass[:-1], s.top_p)])
    if s.min_p > 0:
        floor = max(floor, best + math.log(s.min_p))
    kept = (logits >= floor).nonzero()[:, 0]
    scores = (logits[kept] - best) / _temperature(s) + gumbel(s.seed, position, kept)
    return int(kept[scores.argmax()])


# There are at most three launches. Each divides the vocabulary into parts, one a program:
#
# best    penalise; find the best and the lowest logit of each part; if greedy, choose, and that is
#         all
# count   with top-k or top-p: add up tokens and probabilities in bins, by how far a logit is below
#         the best
# draw    with top-k or top-p: running sums over the bins tell in which of them the two thresholds
#         lie; list the logits from one to the other, a few hundred unless many are equal. Draw
#         among the tokens above these, which are certainly kept. The last program to finish finds
#         the thresholds, and draws among the listed tokens, too
#
# With a top-k of at most the number of parts, counting is left out: the k-th largest of the parts'
# best logits has k logits at or above it, so that top-k's threshold is no lower. All of these are
# listed; there are seldom many more.
#
# Probabilities are integers, so that their sums do not depend on the order, in units of 1 / UNIT of
# the best token's. One atomic adds to both sums of a bin, which share 64 bits: the lowest SHIFT are
# for probabilities, the others for tokens. If V has L bits, tokens need L, so that SHIFT is 64 - L,
# and V probabilities fit if UNIT is 2^(SHIFT - L).

BINS = 2048
MIN_BLOCK, MAX_PARTS = 256, 128  # the fewest logits of a part and the most parts; powers of 2
# how far below the best logit the bins reach; the last one holds whatever is lower
DEPTH = constexpr(32.0)
# how many of the listed logits, or of the recent tokens, are read at a time
CHUNK = constexpr(1024)
LAST_ID = constexpr(0x7FFFFFFF)
INF_RANK = constexpr(0xFF800000)  # the upper bits of _best_of's number where the score is inf


@jit
def _gumbel(seed, position, ids):
    z = ((position.to(tl.uint64) << 32) + ids.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15 + seed.to(
        tl.uint64
    )
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    u = ((z >> 24).to(tl.float32) + 0.5) / (1 << 40)
    # of -u
    log1p = tl.where(u < 1 / 32, -u * (1 + u * (1 / 2 + u * (1 / 3 + u / 4))), tl.log(1 - u))
    return -tl.log(-log1p)


@jit
def _best_of(scores, ids, mask):
    """The highest score and its token, the first of equals, as one number that orders like the
    scores; its lowest 31 bits are LAST_ID minus the token. 0 where the mask is off."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0.0 as 0.0
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + (1 << 31)
    return tl.max(tl.where(mask, (rank << 31) + (LAST_ID - ids), 0), 0)


@jit
def _draw(l, ids, mask, best, bad, temp, seed, position):
    """The token that is drawn, in the same form; of a score of inf if a logit is not finite."""
    return _best_of(
        tl.where(bad, float("inf"), (l - best) / temp + _gumbel(seed, position, ids)), ids, mask
    )


@jit
def _store_token(best, chosen_tokens, drawn, position):
    """Store the token of _best_of's number; if its score is inf, -1, and 0 as the next one's
    input."""
    token = tl.where(best >> 31 == INF_RANK, -1, LAST_ID - (best & LAST_ID)).to(tl.int32)
    if chosen_tokens is not None:
        tl.store(chosen_tokens + position, tl.maximum(token, 0))
    tl.store(drawn + position, token)


@jit
def _load_part(
    logits, extremes, part, top_k, V: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr
):
    """A part's logits, with those surely below top_k, if given, set to -inf; the best and the
    lowest of the others, of all parts; whether any logit is not finite: then all are taken to be
    0."""
    row, ids, parts = tl.program_id(1), part * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PARTS)
    logits += row * V
    extremes += row * 2 * PARTS
    l = tl.load(logits + ids, mask=ids < V)
    bests = tl.load(extremes + parts)
    best, lowest = tl.max(bests, 0), tl.min(tl.load(extremes + PARTS + parts), 0)
    if top_k is not None:
        # how many parts reach each
        as_good = tl.sum((bests[:, None] >= bests[None, :]).to(tl.int32), 0)
        lowest = tl.maximum(lowest, tl.max(tl.where(as_good >= top_k, bests, float("-inf")), 0))
    bad = best == float("inf")
    l, best, lowest = tl.where(bad, 0.0, l), tl.where(bad, 0.0, best), tl.where(bad, 0.0, lowest)
    return tl.where((ids < V) & (l >= lowest), l, float("-inf")), best, lowest, bad


@jit
def _bin(l, best, lowest, BINS: tl.constexpr):
    bin = (best - l) * (BINS / tl.minimum(tl.maximum(best - lowest, 1e-30), DEPTH))
    return tl.where(bin < BINS, bin, BINS - 1).to(tl.int32)


@jit
def _weights(l, best, UNIT: tl.constexpr):
    """What logits add to a sum: their probabilities or, where UNIT is None, 1 each; nothing if
    -inf."""
    return (
        (l > float("-inf")).to(tl.int64)
        if UNIT is None
        else (tl.exp(l - best) * UNIT + 0.5).to(tl.int64)
    )


@jit
def _sum_before(sums, index, place):
    """The running sum just before a place; 0 before the first."""
    return tl.max(tl.where(index < place, sums, 0), 0)


@jit
def _load_chunk(listed, start, count, other):
    offs = start + tl.arange(0, CHUNK)
    return tl.load(listed + offs, mask=offs < count, other=other, cache_modifier=".cg")


@jit
def _split(l, listed, count, floor, best, UNIT: tl.constexpr):
    """Of `count` listed logits, of which l is the first chunk: the sum of those at or above the
    floor, the lowest of these, and the highest of the others."""
    kept, lowest, highest = tl.full([], 0, tl.int64), float("inf"), float("-inf")
    for start in range(0, count, CHUNK):
        if count > CHUNK:
            l = _load_chunk(listed, start, count, float("-inf"))
        above = l >= floor
        kept += tl.sum(tl.where(above, _weights(l, best, UNIT), 0), 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(above, l, float("inf")), 0))
        highest = tl.maximum(highest, tl.max(tl.where(above, float("-inf"), l), 0))
    return kept, lowest, highest


@jit
def _threshold(l, listed, count, target, low, best, UNIT: tl.constexpr):
    """The largest of the listed logits such that the sum of those at or above it reaches the
    target; it is at least `low`. Bisection, in which each end moves on to a logit that is
    listed."""
    high = best
    while low < high:
        middle = low * 0.5 + high * 0.5
        middle = tl.where(middle > low, middle, high)
        kept, above, below = _split(l, listed, count, middle, best, UNIT)
        high = tl.where(kept == target, above, tl.where(kept > target, high, below))
        low = tl.where(kept >= target, above, low)
    return low


@jit
def _sample_best_kernel(
    logits, extremes, copy, winner, arrived, tokens, chosen_tokens, drawn, pos, numbers,
    ON: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Penalise recent tokens, from a copy of the logits; find each part's best logit (inf if one is
    not finite) and lowest, extremes [rows, 2, PARTS]; if greedy, choose the best of all. Axis 1 of
    the grid is the rows of logits here and below."""
    gdc_launch_dependents(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    logits += row * V
    extremes += row * 2 * PARTS
    ids = part * BLOCK + tl.arange(0, BLOCK)
    penalty, window = tl.load(numbers + 4), tl.load(numbers + 5).to(tl.int32)
    gdc_wait(PDL)
    position = tl.load(pos) - tl.num_programs(1) + 1 + row
    l = tl.load(logits + ids, mask=ids < V, other=float("-inf"))
    if ON.PENALTY:  # from a copy, so that a token seen twice is penalised once
        tl.store(copy + row * V + ids, l, mask=ids < V)
        tl.debug_barrier()
        for start in range(0, tl.minimum(window, position), CHUNK):
            back = start + tl.arange(0, CHUNK)
            recent = tl.load(
                tokens + position - 1 - back, mask=(back < window) & (back < position), other=-1
            )
            mask_recent = (recent >= part * BLOCK) & (recent < (part + 1) * BLOCK)
            seen = tl.load(copy + row * V + recent, mask=mask_recent, other=0.0)
            tl.store(
                logits + recent,
                tl.where(seen > 0, seen / penalty, seen * penalty),
                mask=mask_recent,
            )
        tl.debug_barrier()
        l = tl.load(logits + ids, mask=ids < V, other=float("-inf"))
    l = tl.where((ids < V) & ((l != l) | (tl.abs(l) == float("inf"))), float("inf"), l)
    if ON.GREEDY:
        tl.atomic_max(winner + row, _best_of(l, ids, ids < V), sem="relaxed")
        if is_last(arrived + row, PARTS):
            _store_token(tl.atomic_xchg(winner + row, 0), chosen_tokens, drawn, position)
    else:
        tl.store(extremes + part, tl.max(l, 0))
        tl.store(extremes + PARTS + part, tl.min(tl.where(ids < V, l, float("inf")), 0))


@jit
def _sample_count_kernel(
    logits, extremes, bins, SHIFT: tl.constexpr, UNIT: tl.constexpr, BINS: tl.constexpr,
    ON: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add a part's tokens, for top-k, and their probabilities, for top-p, to the bins [rows,
    BINS]."""
    gdc_launch_dependents(PDL)
    bins += tl.program_id(1) * BINS
    gdc_wait(PDL)
    l, best, lowest, _ = _load_part(logits, extremes, tl.program_id(0), None, V, BLOCK, PARTS)
    bin, weights = _bin(l, best, lowest, BINS), tl.zeros([BLOCK], tl.int64)
    if ON.TOP_K:
        weights += _weights(l, best, None) << SHIFT
    if ON.TOP_P:
        weights += _weights(l, best, UNIT)
    # atomics on one address take turns, and most tokens may be in the last bin in use: it gets
    # their sum
    last = tl.max(tl.where(weights != 0, bin, 0), 0)
    tl.atomic_add(bins + last, tl.sum(tl.where(bin == last, weights, 0), 0), sem="relaxed")
    tl.atomic_add(bins + bin, weights, mask=(weights != 0) & (bin != last), sem="relaxed")


@jit
def _sample_draw_kernel(
    logits, extremes, bins, listed, listed_ids, counts, winner, arrived, chosen_tokens, drawn, pos,
    seed, numbers,
    SHIFT: tl.constexpr, UNIT: tl.constexpr, BINS: tl.constexpr,
    ON: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draw a token, and empty the bins. listed and listed_ids [rows, V], counts [rows]: the logits
    of the bins in which the thresholds of top-k and top-p may lie, or all that _load_part leaves.
    winner [rows]: the best of what is certainly kept, see _best_of."""
    gdc_launch_dependents(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    temp, top_k, top_p = (
        tl.load(numbers),
        tl.load(numbers + 1).to(tl.int64),
        tl.load(numbers + 2).to(tl.float64),
    )
    log_min_p, seed, ids = tl.load(numbers + 3), tl.load(seed), part * BLOCK + tl.arange(0, BLOCK)
    gdc_wait(PDL)
    position = tl.load(pos) - tl.num_programs(1) + 1 + row
    enough = top_k if ON.TOP_K and not ON.COUNTED else None
    l, best, lowest, bad = _load_part(logits, extremes, part, enough, V, BLOCK, PARTS)
    kept, tokens_above, mass_above = l > float("-inf"), 0, 0
    if ON.TOP_K or ON.TOP_P:
        bins += row * BINS
        listed += row * V
        listed_ids += row * V
        counts += row
        mask, kept = kept, None
        if ON.COUNTED:
            bin, every = _bin(l, best, lowest, BINS), tl.arange(0, BINS)
            sums = tl.cumsum(tl.load(bins + every), 0)
            tokens, masses = (sums >> SHIFT) & ((1 << (64 - SHIFT)) - 1), sums & ((1 << SHIFT) - 1)
            last = tl.sum((tokens < top_k).to(tl.int32), 0) if ON.TOP_K else BINS
            first = last
            if ON.TOP_P:
                # with top-k a lower bound: it keeps some of bin `last`, too
                total = _sum_before(masses, every, last)
                first = tl.sum((masses < (top_p * total).to(tl.int64)).to(tl.int32), 0)
            kept = mask & (bin < first)
            mask = mask & (bin >= first) & (bin <= (last if ON.TOP_K else first))
            tokens_above, mass_above = (
                _sum_before(tokens, every, first),
                _sum_before(masses, every, first),
            )
        offs = tl.cumsum(mask.to(tl.int32), 0)
        offs += tl.atomic_add(counts, tl.max(offs, 0), sem="relaxed") - 1
        tl.store(listed + offs, l, mask=mask)
        tl.store(listed_ids + offs, ids, mask=mask)
    floor = best + log_min_p
    if kept is not None:
        drawn_best = _draw(l, ids, kept & (l >= floor), best, bad, temp, seed, position)
        tl.atomic_max(winner + row, drawn_best, sem="relaxed")
    if is_last(arrived + row, PARTS):
        drawn_best = tl.atomic_xchg(winner + row, 0)
        if ON.TOP_K or ON.TOP_P:
            count, threshold = tl.load(counts, cache_modifier=".cg"), lowest
            chunk, chunk_ids = (
                _load_chunk(listed, 0, count, float("-inf")),
                _load_chunk(listed_ids, 0, count, 0),
            )
            if ON.TOP_K:
                threshold = _threshold(
                    chunk, listed, count, top_k - tokens_above, lowest, best, None
                )
            if ON.TOP_P:
                if ON.TOP_K:  # now the total is known
                    total = mass_above + _split(chunk, listed, count, threshold, best, UNIT)[0]
                target = (top_p * total).to(tl.int64) - mass_above
                threshold = _threshold(chunk, listed, count, target, threshold, best, UNIT)
            floor = tl.maximum(floor, threshold)
            for start in range(0, count, CHUNK):
                if count > CHUNK:
                    chunk = _load_chunk(listed, start, count, float("-inf"))
                    chunk_ids = _load_chunk(listed_ids, start, count, 0)
                better = _draw(chunk, chunk_ids, chunk >= floor, best, bad, temp, seed, position)
                drawn_best = tl.maximum(drawn_best, better)
            tl.store(counts, 0)
            if ON.COUNTED:
                tl.store(bins + every, tl.zeros([BINS], tl.int64))
        _store_token(drawn_best, chosen_tokens, drawn, position)


def _block(V: int) -> int:
    """How many logits a part has."""
    return max(MIN_BLOCK, triton.next_power_of_2(V) // MAX_PARTS)


def sample(logits: Tensor, tokens: Tensor, drawn: Tensor, pos: Tensor, sampler: Sampler) -> None:
    rows, V = logits.shape
    chosen_tokens = tokens if rows == 1 else None
    on, zeros, numbers = sampler.switches(V), sampler.scratch.zeros, sampler.numbers
    parts = triton.next_power_of_2(triton.cdiv(V, _block(V)))
    extremes, arrived = (
        zeros("extremes", rows, 2, parts),
        zeros("parts done", rows, dtype=torch.int32),
    )

    def run(kernel, *args, **constants) -> None:
        sizes = dict(ON=on, V=V, BLOCK=_block(V), PARTS=parts)
        launch(
            kernel,
            (parts, rows),
            logits.device,
            logits,
            extremes,
            *args,
            **constants,
            **sizes,
            warps=8,
        )

    winner = zeros("winner", rows, dtype=torch.int64)
    listed = zeros("listed", rows, V)
    args = (listed, winner, arrived, tokens, chosen_tokens, drawn, pos, numbers)
    run(_sample_best_kernel, *args)
    if on.GREEDY:
        return
    lists, shift = (None,) * 4, 64 - V.bit_length()
    units = dict(SHIFT=shift, UNIT=2.0 ** (2 * shift - 64), BINS=BINS)
    if on.TOP_K or on.TOP_P:
        bins, counts = (
            zeros("bins", rows, BINS, dtype=torch.int64),
            zeros("counts", rows, dtype=torch.int32),
        )
        lists = (bins, listed, zeros("listed ids", rows, V, dtype=torch.int32), counts)
        if on.COUNTED:
            run(_sample_count_kernel, bins, **units)
    args = (*lists, winner, arrived, chosen_tokens, drawn, pos, sampler.seed, numbers)
    run(_sample_draw_kernel, *args, **units)
