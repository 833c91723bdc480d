"""How the next token is chosen: the reference in plain torch, and the Triton kernels. Their
settings, a Sampling, are in settings.py.

The order is llama.cpp's: repetition penalty over the last tokens, top-k, top-p, min-p, temperature,
draw. Each filter keeps the tokens at or above one threshold, so ties at the edge stay together. To
draw, a Gumbel variate is added to each logit divided by the temperature, and the largest sum wins,
which happens with the token's probability (Gumbel-max trick: Gumbel, 1954). The variates depend on
seed, position and token alone, so a seed gives the same text on every device, and a draft model
mostly draws what the model itself will (Daliri, Musco and Suresh, 2024).

The op `sample` reads logits float32 [T, V] of the T tokens before pos, which it may overwrite. It
writes the token chosen to follow each of them to `drawn` (int32, up to drawn[pos]), or -1 where the
logits are not finite. `tokens`, int32 [S], holds what comes before each position. The token of a
single row is also written there, as 0 if it is -1. The settings come as a Sampler.

To add a setting, touch three files. Its flags, the field of requests and the reader of
generation_config.json come from its row.

1. settings.py: its row in Sampling, and in the docstring which value is off.
2. sampling.py: _choose_ref, which says what it does, or adjust_ref, for what comes first;
`numbers` and the names of its places, with which kernels load it; the kernels, of which
_sample_best_kernel changes logits, and _draw and the two that call it filter them. If it costs time
when it is off, also a field of Switches, and its value in Sampler.switches.
3. tests/: its values in test_sampling_equals_the_reference, its default in
test_flags_that_are_not_given.

Before that, the op `adjust` changes the logits as the text asks, by an Adjustment: a bias of single
tokens, penalties of those generated so far, a mask of those that may come. Banned tokens have the
logit BANNED, which is finite."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import math
from collections.abc import Mapping
from typing import NamedTuple

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
from settings import Sampling

COLDEST = 1e-30  # float32 could round lower temperatures to 0
HOTTEST = 1e30  # beyond it, a logit of BANNED could be drawn
BANNED = -1e36  # a logit that no temperature draws; finite, since others are an error
NEVER = constexpr(BANNED)
EVERY = 1 << 30  # more tokens than any context or vocabulary has


def temperature(s: Sampling) -> float:
    """What logits are divided by: temp, kept between COLDEST and HOTTEST."""
    return min(max(s.temp, COLDEST), HOTTEST)


def window(s: Sampling) -> int:
    """How many of the last tokens are penalised."""
    if s.repeat_last_n < 0:
        return EVERY
    return min(s.repeat_last_n, EVERY)


def numbers(s: Sampling) -> list[float]:
    """The numbers that kernels load, in the order of TEMP to FREQUENCY below."""
    log_min_p = math.log(s.min_p) if s.min_p > 0 else -math.inf
    top_k = min(s.top_k, EVERY)
    penalties = [s.repeat_penalty, window(s), s.presence_penalty, s.frequency_penalty]
    return [temperature(s), top_k, s.top_p, log_min_p, *penalties]


TEMP, TOP_K, TOP_P, LOG_MIN_P, PENALTY, WINDOW, PRESENCE, FREQUENCY = map(constexpr, range(8))


class Switches(NamedTuple):
    """Which parts of sampling are on. Settings with the same switches share a captured graph."""

    greedy: bool
    penalty: bool
    top_k: bool
    top_p: bool
    sorts: bool  # all logits are sorted to find the thresholds of top-k and top-p


class Sampler:
    """Settings as the ops take them: `s` for the host, and the same numbers in device memory, where
    a captured graph reads them, so that it picks up new ones."""

    def __init__(self, device: torch.device, s: Sampling = Sampling()):
        self.scratch = Scratch(device)
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(len(numbers(s)), device=device)
        self.set(s)

    def set(self, s: Sampling) -> None:
        self.s = s
        self.seed.fill_(s.seed)
        self.numbers.copy_(torch.tensor(numbers(s), dtype=torch.float32))

    def switches(self, V: int) -> Switches:
        """What is on, given V logits."""
        s = self.s
        top_k = 0 < s.top_k < V
        top_p = s.top_p < 1
        lists = top_k and s.top_k <= triton.cdiv(V, _block(V))
        sorts = (top_k or top_p) and not lists
        return Switches(s.temp == 0, s.repeat_penalty != 1, top_k, top_p, sorts)


# ---- adjust: what a text asks for, before a token is chosen
#      logits float32 [T, V] += bias - frequency * counts - presence * (counts > 0); BANNED if the
#      token's bit of the mask is 0


class Adjustment:
    """What one text asks for, in device memory, where a captured graph reads it."""

    def __init__(self, V: int, device: torch.device):
        self.bias = torch.zeros(V, device=device)  # added to the logits
        self.counts = torch.zeros(V, dtype=torch.int32, device=device)  # of generated tokens
        # a bit for each token: 1 if it may come next
        self.mask = torch.full((-(-V // 32),), -1, dtype=torch.int32, device=device)
        self.parts = (False, False, False)  # which of these three are used

    def begin(self, bias: Mapping[int, float], s: Sampling, masked: bool) -> None:
        """Begin a text with a bias of some tokens."""
        self.bias.zero_()
        if bias:
            ids = torch.tensor([*bias], device=self.bias.device)
            values = torch.tensor([*bias.values()], dtype=torch.float32)
            self.bias[ids] = values.to(self.bias.device)
        self.counts.zero_()
        counted = s.presence_penalty != 0 or s.frequency_penalty != 0
        self.parts = (bool(bias), counted, masked)

    @property
    def counted(self) -> bool:
        return self.parts[1]

    @property
    def used(self) -> list[Tensor | None]:
        """The bias, the counts and the mask; None for what is not used."""
        tensors = (self.bias, self.counts, self.mask)
        return [tensor if used else None for tensor, used in zip(tensors, self.parts)]

    def count(self, tokens: Tensor) -> None:
        """Count generated tokens, int32 [n]."""
        self.counts.index_add_(0, tokens, torch.ones_like(tokens))


def adjust_ref(logits: Tensor, adjustment: Adjustment, sampler: Sampler) -> None:
    bias, counts, mask = adjustment.used
    if bias is not None:
        logits += bias
    if counts is not None:
        logits -= sampler.s.frequency_penalty * counts
        logits -= sampler.s.presence_penalty * (counts > 0)
    if mask is not None:
        bits = mask[:, None] >> torch.arange(32, device=mask.device, dtype=torch.int32) & 1
        logits.masked_fill_(bits.flatten()[: logits.shape[1]] == 0, BANNED)


@jit
def _adjust_kernel(
    logits, bias, counts, mask, numbers, V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    gdc_launch_dependents(PDL)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < V
    logits += tl.program_id(1) * V
    presence = tl.load(numbers + PRESENCE)
    frequency = tl.load(numbers + FREQUENCY)
    gdc_wait(PDL)
    l = tl.load(logits + ids, mask=inside)
    if bias is not None:
        l += tl.load(bias + ids, mask=inside)
    if counts is not None:
        count = tl.load(counts + ids, mask=inside, other=0)
        l -= frequency * count + tl.where(count > 0, presence, 0.0)
    if mask is not None:
        word = tl.load(mask + ids // 32, mask=inside, other=0)
        l = tl.where((word >> ids % 32) & 1 != 0, l, NEVER)
    tl.store(logits + ids, l, mask=inside)


def adjust(logits: Tensor, adjustment: Adjustment, sampler: Sampler) -> None:
    rows, V = logits.shape
    grid = (triton.cdiv(V, 1024), rows)
    args = (logits, *adjustment.used, sampler.numbers)
    launch(_adjust_kernel, grid, logits.device, *args, V=V, BLOCK=1024)


# ---- sample

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
        recent = tokens[max(0, position - window(s)) : position].long()
        seen = logits.gather(0, recent)
        penalised = torch.where(seen > 0, seen / s.repeat_penalty, seen * s.repeat_penalty)
        logits.scatter_(0, recent, penalised)
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
    scores = (logits[kept] - best) / temperature(s) + gumbel(s.seed, position, kept)
    return int(kept[scores.argmax()])


# Each launch divides the vocabulary into parts, one per program. The first, `best`, penalises and
# finds the best logit of each part; a greedy choice ends there. What follows depends on how the
# thresholds of top-k and top-p are found:
#
# - neither is on: `draw`, in which each part draws among its tokens, and the best draw wins;
# - top-k is on and at most the number of parts: `candidates` lists the few logits that top-k may
#   keep, and the last program finds the thresholds among them and draws;
# - otherwise: torch sorts all logits (_find_floors), and `draw` skips those below the threshold.
#
# Top-p adds up weights: the probability of a token in units of 1 / _unit(V) of the best token's,
# rounded to a whole number. Their sums are exact, so they do not depend on the order, and ranks
# that share a model, each of which draws for itself, draw the same token.

MIN_BLOCK = 64  # the fewest logits of a part; a power of 2
MAX_PARTS = 128  # a power of 2
# How many of the listed logits, or of the recent tokens, are read at a time
CHUNK = constexpr(1024)
LAST_ID = constexpr(0x7FFFFFFF)
INF_RANK = constexpr(0xFF800000)  # the upper bits of _best_of's number where the score is inf


def _unit(V: int) -> float:
    """The weight of the best token. All V weights add up to less than 2^53: float64 is exact."""
    return 2.0 ** (53 - V.bit_length())


@jit
def _gumbel(seed, position, ids):
    z = (position.to(tl.uint64) << 32) + ids.to(tl.uint64) + 1
    z = z * 0x9E3779B97F4A7C15 + seed.to(tl.uint64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    u = ((z >> 24).to(tl.float32) + 0.5) / (1 << 40)
    series = -u * (1 + u * (1 / 2 + u * (1 / 3 + u / 4)))  # of log(1 - u)
    return -tl.log(-tl.where(u < 1 / 32, series, tl.log(1 - u)))


@jit
def _best_of(scores, ids, mask):
    """The highest score and its token, the first of equals, as one number that orders like the
    scores; its lowest 31 bits are LAST_ID minus the token. 0 where the mask is off."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0.0 as 0.0
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + (1 << 31)
    return tl.max(tl.where(mask, (rank << 31) + (LAST_ID - ids), 0), 0)


@jit
def _draw(l, ids, floor, best, log_min_p, temp, seed, position):
    """The token that is drawn among those at or above the floor that min-p keeps, as _best_of gives
    it. A logit of -inf stands for no token."""
    floor = tl.maximum(floor, best + log_min_p)
    scores = (l - best) / temp + _gumbel(seed, position, ids)
    return _best_of(scores, ids, (l >= floor) & (l > float("-inf")))


@jit
def _store_token(winner, finite, chosen_tokens, drawn, position):
    """Store the token of _best_of's number or, if the logits are not finite, -1, and 0 as the next
    step's input."""
    token = tl.where(finite, LAST_ID - (winner & LAST_ID), -1).to(tl.int32)
    if chosen_tokens is not None:
        tl.store(chosen_tokens + position, tl.maximum(token, 0))
    tl.store(drawn + position, token)


@jit
def _sample_best_kernel(
    logits, bests, copy, winner, arrived, tokens, chosen_tokens, drawn, pos, numbers,
    PENALISE: tl.constexpr, CHOOSE: tl.constexpr,
    V: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Penalise recent tokens; find the best logit of each part, bests [rows, PARTS], which is inf
    if one is not finite; if CHOOSE, store the best of all. copy [rows, V] is scratch memory of the
    penalty, winner int64 [rows] is zero between launches. Axis 1 of the grid is the rows of logits,
    here and below."""
    gdc_launch_dependents(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    logits += row * V
    first = part * BLOCK
    ids = first + tl.arange(0, BLOCK)
    penalty = tl.load(numbers + PENALTY)
    window = tl.load(numbers + WINDOW).to(tl.int32)
    gdc_wait(PDL)
    position = tl.load(pos) - tl.num_programs(1) + 1 + row
    l = tl.load(logits + ids, mask=ids < V, other=float("-inf"))
    if PENALISE:  # from a copy, so that a token seen twice is penalised once
        copy += row * V
        tl.store(copy + ids, l, mask=ids < V)
        tl.debug_barrier()
        for start in range(0, tl.minimum(window, position), CHUNK):
            back = start + tl.arange(0, CHUNK)
            in_window = (back < window) & (back < position)
            recent = tl.load(tokens + position - 1 - back, mask=in_window, other=-1)
            in_part = (recent >= first) & (recent < first + BLOCK)
            seen = tl.load(copy + recent, mask=in_part, other=0.0)
            penalised = tl.where(seen > 0, seen / penalty, seen * penalty)
            tl.store(logits + recent, penalised, mask=in_part)
        tl.debug_barrier()
        l = tl.load(logits + ids, mask=ids < V, other=float("-inf"))
    not_finite = (l != l) | (tl.abs(l) == float("inf"))
    l = tl.where((ids < V) & not_finite, float("inf"), l)
    if CHOOSE:
        tl.atomic_max(winner + row, _best_of(l, ids, ids < V), sem="relaxed")
        if is_last(arrived + row, PARTS):
            best = tl.atomic_xchg(winner + row, 0)
            _store_token(best, best >> 31 < INF_RANK, chosen_tokens, drawn, position)
    else:
        tl.store(bests + row * PARTS + part, tl.max(l, 0))


def _find_floors(logits: Tensor, numbers: Tensor, on: Switches, floors: Tensor) -> None:
    """Write the lowest logit that top-k and top-p keep in each row to `floors` [rows]. Runs inside
    a captured graph: the numbers are read on the device, and nothing is awaited."""
    _, top_k, top_p, *_ = numbers.split(1)  # in the order of numbers()
    ranked = logits.sort(descending=True).values
    if on.top_k:
        floor = ranked.index_select(1, top_k.long() - 1)
        ranked = ranked.masked_fill(ranked < floor, -math.inf)  # equals at the edge stay
    if on.top_p:
        weights = (ranked - ranked[:, :1]).double().exp()
        sums = (weights * _unit(logits.shape[1])).round().cumsum(1)
        target = sums[:, -1:] * top_p.double()
        place = (sums < target).sum(1, keepdim=True)  # the first that reaches it; 0 if NaN
        floor = ranked.gather(1, place)
    floors.copy_(floor[:, 0])


@jit
def _sample_draw_kernel(
    logits, bests, floors, winner, arrived, chosen_tokens, drawn, pos, seed, numbers,
    V: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draw among the tokens at or above the row's floor, or among all if there are no floors
    [rows]. winner int64 [rows] is zero between launches."""
    gdc_launch_dependents(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    temp = tl.load(numbers + TEMP)
    log_min_p = tl.load(numbers + LOG_MIN_P)
    seed = tl.load(seed)
    gdc_wait(PDL)
    position = tl.load(pos) - tl.num_programs(1) + 1 + row
    l = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))
    best = tl.max(tl.load(bests + row * PARTS + tl.arange(0, PARTS)), 0)
    floor = float("-inf")
    if floors is not None:
        floor = tl.load(floors + row)
    drawn_here = _draw(l, ids, floor, best, log_min_p, temp, seed, position)
    tl.atomic_max(winner + row, drawn_here, sem="relaxed")
    if is_last(arrived + row, PARTS):
        drawn_of_all = tl.atomic_xchg(winner + row, 0)
        _store_token(drawn_of_all, best < float("inf"), chosen_tokens, drawn, position)


@jit
def _kth_largest(values, k):
    reach = tl.sum((values[:, None] >= values[None, :]).to(tl.int32), 0)  # how many reach each
    return tl.max(tl.where(reach >= k, values, float("-inf")), 0)


@jit
def _load_chunk(listed, start, count, other):
    offs = start + tl.arange(0, CHUNK)
    return tl.load(listed + offs, mask=offs < count, other=other, cache_modifier=".cg")


@jit
def _weigh(l, listed, count, floor, best, UNIT: tl.constexpr):
    """Of `count` listed logits, of which l is the first chunk: how many are at or above the floor
    or, given a unit, the sum of their weights; the lowest of these; the highest of the others."""
    total = tl.full([], 0, tl.int64)
    lowest = float("inf")
    highest = float("-inf")
    for start in range(0, count, CHUNK):
        if count > CHUNK:
            l = _load_chunk(listed, start, count, float("-inf"))
        above = l >= floor
        if UNIT is None:
            weights = above.to(tl.int64)
        else:
            weights = tl.where(above, tl.exp(l - best) * UNIT + 0.5, 0).to(tl.int64)
        total += tl.sum(weights, 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(above, l, float("inf")), 0))
        highest = tl.maximum(highest, tl.max(tl.where(above, float("-inf"), l), 0))
    return total, lowest, highest


@jit
def _threshold(l, listed, count, target, low, best, UNIT: tl.constexpr):
    """The largest of the listed logits such that _weigh's sum at this floor reaches the target; it
    is at least `low`. Bisection, in which each end moves on to a logit that is listed."""
    high = best
    while low < high:
        middle = low * 0.5 + high * 0.5
        middle = tl.where(middle > low, middle, high)
        total, above, below = _weigh(l, listed, count, middle, best, UNIT)
        high = tl.where(total == target, above, tl.where(total > target, high, below))
        low = tl.where(total >= target, above, low)
    return low


@jit
def _sample_candidates_kernel(
    logits, bests, listed, listed_ids, counts, arrived, chosen_tokens, drawn, pos, seed, numbers,
    UNIT: tl.constexpr, USE_TOP_P: tl.constexpr,
    V: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draw with a top-k of at most the number of parts. The k-th largest of the parts' bests has k
    logits at or above it, so top-k's threshold is no lower. All of these are listed, seldom many
    more than k, with their tokens: listed and listed_ids [rows, V]; counts [rows] is zero between
    launches."""
    gdc_launch_dependents(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    listed += row * V
    listed_ids += row * V
    ids = part * BLOCK + tl.arange(0, BLOCK)
    temp = tl.load(numbers + TEMP)
    top_k = tl.load(numbers + TOP_K).to(tl.int64)
    top_p = tl.load(numbers + TOP_P).to(tl.float64)
    log_min_p = tl.load(numbers + LOG_MIN_P)
    seed = tl.load(seed)
    gdc_wait(PDL)
    position = tl.load(pos) - tl.num_programs(1) + 1 + row
    l = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))

    # List this part's candidates; none at all if a logit of the row is not finite
    part_bests = tl.load(bests + row * PARTS + tl.arange(0, PARTS))
    best = tl.max(part_bests, 0)
    finite = best < float("inf")
    lowest = tl.where(finite, _kth_largest(part_bests, top_k), best)
    candidate = (l >= lowest) & (ids < tl.where(finite, V, 0))
    places = tl.cumsum(candidate.to(tl.int32), 0)
    places += tl.atomic_add(counts + row, tl.max(places, 0), sem="relaxed") - 1
    tl.store(listed + places, l, mask=candidate)
    tl.store(listed_ids + places, ids, mask=candidate)

    if is_last(arrived + row, PARTS):
        # Find the thresholds
        count = tl.atomic_xchg(counts + row, 0)
        chunk = _load_chunk(listed, 0, count, float("-inf"))
        chunk_ids = _load_chunk(listed_ids, 0, count, 0)
        threshold = _threshold(chunk, listed, count, top_k, lowest, best, None)
        if USE_TOP_P:
            total, _, _ = _weigh(chunk, listed, count, threshold, best, UNIT)
            target = (top_p * total).to(tl.int64)
            threshold = _threshold(chunk, listed, count, target, threshold, best, UNIT)

        # Draw
        winner = tl.full([], 0, tl.int64)
        for start in range(0, count, CHUNK):
            if count > CHUNK:
                chunk = _load_chunk(listed, start, count, float("-inf"))
                chunk_ids = _load_chunk(listed_ids, start, count, 0)
            args = (threshold, best, log_min_p, temp, seed, position)
            winner = tl.maximum(winner, _draw(chunk, chunk_ids, *args))
        _store_token(winner, finite, chosen_tokens, drawn, position)


def _block(V: int) -> int:
    """How many logits a part has. Of 4,096 logits or more there are 64 to 128 parts."""
    return max(MIN_BLOCK, triton.next_power_of_2(V) // MAX_PARTS)


def sample(logits: Tensor, tokens: Tensor, drawn: Tensor, pos: Tensor, sampler: Sampler) -> None:
    rows, V = logits.shape
    on = sampler.switches(V)
    zeros = sampler.scratch.zeros
    block = _block(V)
    parts = triton.next_power_of_2(triton.cdiv(V, block))
    bests = zeros("bests", rows, parts)
    winner = zeros("winner", rows, dtype=torch.int64)
    arrived = zeros("parts done", rows, dtype=torch.int32)
    output = (tokens if rows == 1 else None, drawn, pos)
    settings = (sampler.seed, sampler.numbers)

    def run(kernel, *args, **constants) -> None:
        grid = (parts, rows)
        sizes = dict(V=V, BLOCK=block, PARTS=parts)
        launch(kernel, grid, logits.device, logits, bests, *args, **constants, **sizes, warps=8)

    copy = zeros("copy", rows, V) if on.penalty else None
    args = (copy, winner, arrived, tokens, *output, sampler.numbers)
    run(_sample_best_kernel, *args, PENALISE=on.penalty, CHOOSE=on.greedy)
    if on.greedy:
        return
    if on.top_k and not on.sorts:
        listed = zeros("listed", rows, V)
        listed_ids = zeros("listed ids", rows, V, dtype=torch.int32)
        counts = zeros("counts", rows, dtype=torch.int32)
        args = (listed, listed_ids, counts, arrived, *output, *settings)
        run(_sample_candidates_kernel, *args, UNIT=_unit(V), USE_TOP_P=on.top_p)
        return
    floors = None
    if on.sorts:
        floors = zeros("floors", rows)
        _find_floors(logits, sampler.numbers, on, floors)
    run(_sample_draw_kernel, floors, winner, arrived, *output, *settings)
