"""How the next token is chosen: the reference in plain torch, and the Triton kernels. Their
settings, a Sampling, are in settings.py.

The order is llama.cpp's: repetition penalty over the last tokens, top-k, top-p, min-p, temperature,
draw. Each filter keeps the tokens at or above one threshold, so ties at the edge stay together. To
draw, a Gumbel variate is added to each logit divided by the temperature, and the largest sum wins,
which happens with the token's probability (Gumbel-max trick: Gumbel, 1954). The variates depend on
seed, position and token alone, so a seed gives the same text on every device, and a draft model
mostly draws what the model itself will (Daliri, Musco and Suresh, 2024).

The op `sample` reads logits float32 [R, V] of rows of a pass, which it may overwrite, and writes
the token chosen to follow each of them to `drawn`, one place after the row's own, or -1 where the
logits are not finite. If the pass feeds what it samples, the token is also written to `tokens`
there, as 0 if it is -1. Each row has its own settings and seed, which the pass's Sampler holds, and
its own history: the tokens of its sequence up to the row's own.

To add a setting, touch these files. Its flags, the field of requests and the reader of
generation_config.json come from its row.

1. settings.py: its row in Sampling, and in the docstring which value is off.
2. sampling.py: _choose_ref, which says what it does, or sample_ref for what comes first; `numbers`
and the names of its places, with which kernels load it; the kernels, of which _sample_best_kernel
changes logits, and _draw and the two that call it filter them. If it costs time when it is off,
also a field of Switches, and its value in Sampler.switches.
3. tests/: its values in test_sampling_equals_the_reference, its default in
test_flags_that_are_not_given. MANUAL.md: the row of its flag."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import functools
import math
from array import array
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from launch import (
    Scratch,
    constexpr,
    gdc_launch_dependents,
    gdc_wait,
    in_order,
    is_last,
    jit,
    launch,
    tl,
    triton,
)
from settings import Sampling

if TYPE_CHECKING:
    from passes import Pass

COLDEST = 1e-30  # float32 could round lower temperatures to 0
HOTTEST = 1e30  # beyond it, a logit of BANNED could be drawn
BANNED = -1e36  # a logit that no temperature draws; finite, since others are an error
EVERY = 1 << 30  # more tokens than any context or vocabulary has
FORBIDDEN = constexpr(BANNED)  # the same in kernels
OFF = 2.0  # a top-p that is off; others are at most 1, also when they are rounded


def temperature(s: Sampling) -> float:
    """What logits are divided by: temp, kept between COLDEST and HOTTEST."""
    return min(max(s.temp, COLDEST), HOTTEST)


def window(s: Sampling) -> int:
    """How many of the last tokens are penalised."""
    if s.repeat_last_n < 0:
        return EVERY
    return min(s.repeat_last_n, EVERY)


def top_k(s: Sampling) -> int:
    """How many of the best tokens are kept, EVERY if all are. A greedy choice keeps one."""
    if s.temp == 0:
        return 1
    return min(s.top_k, EVERY) if s.top_k > 0 else EVERY


def numbers(s: Sampling) -> list[float]:
    """The numbers that kernels load, in the order of TEMP to FREQUENCY below."""
    top_p = s.top_p if s.top_p < 1 else OFF
    log_min_p = math.log(s.min_p) if s.min_p > 0 else -math.inf
    # Beside rows that draw, a greedy one draws as well, but nothing is added to its logits
    noise = 0.0 if s.temp == 0 else 1.0
    penalties = [s.repeat_penalty, window(s), s.presence_penalty, s.frequency_penalty]
    return [temperature(s), top_k(s), top_p, log_min_p, noise, *penalties]


COUNT = constexpr(9)
TEMP, TOP_K, TOP_P, LOG_MIN_P, NOISE, PENALTY, WINDOW = map(constexpr, range(7))
PRESENCE, FREQUENCY = 7, 8  # of which kernels know nothing
GREEDY = Sampling(temp=0)


def mask_without(ids: Collection[int], V: int) -> Tensor:
    """A row of Sampler.masks that forbids these tokens: int32 [ceil(V / 32)]."""
    allowed = torch.ones(-(-V // 32), 32, dtype=torch.int32)
    allowed.view(-1)[list(ids)] = 0
    return (allowed << torch.arange(32, dtype=torch.int32)).sum(1, dtype=torch.int32)


@functools.cache
def all_of(V: int) -> Tensor:
    """A row that forbids none."""
    return mask_without((), V)


class Switches(NamedTuple):
    """Which parts of sampling are on for any row. Settings with the same switches share a captured
    graph."""

    greedy: bool  # for all rows
    masked: bool
    biased: bool
    counted: bool  # penalties of tokens that the text has had
    penalty: bool
    top_k: bool
    top_p: bool
    sorts: bool  # all logits are sorted to find the thresholds of top-k and top-p


class Sampler:
    """Settings of a pass's sampled rows as the ops take them: `settings` for the host, and the same
    numbers in device memory, where a captured graph reads them, so that it picks up new ones."""

    def __init__(self, device: torch.device, rows: int = 1):
        self.scratch = Scratch(device)
        self.settings = [GREEDY] * rows
        self.numbers = torch.zeros(rows, len(numbers(GREEDY)), device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        # int32 [rows, ceil(V / 32)]: a bit for each token that may be drawn. Logits of others become
        # BANNED. None if all may
        self.masks: Tensor | None = None
        # float32 [rows, V]: added to the logits. None if nothing is
        self.biases: Tensor | None = None
        # int32 [rows]: how many tokens of each sequence are its prompt
        self.begins = torch.zeros(rows, dtype=torch.int32, device=device)
        self.set([])

    def set(
        self,
        settings: list[Sampling],
        biases: Tensor | None = None,
        begins: Sequence[int] = (),
    ) -> None:
        """Give the first rows these settings, and the rest neutral ones, without waiting for the
        device. biases and begins: for these rows, on the host. All tokens may be drawn."""
        rows = len(self.settings)
        assert len(settings) <= rows, (len(settings), rows)
        self.settings = [*settings, *[GREEDY] * (rows - len(settings))]
        send([number for s in self.settings for number in numbers(s)], self.numbers)
        send([s.seed for s in self.settings], self.seeds)
        send([*begins, *[0] * (rows - len(begins))], self.begins)
        self.biases = self._rows("biases", biases, 0)
        self.restrict(None)

    def restrict(self, masks: Tensor | None) -> None:
        """Say which tokens the first rows may draw, without waiting for the device. masks: for these
        rows, on the host."""
        self.masks = self._rows("masks", masks, -1)

    def _rows(self, name: str, given: Tensor | None, neutral: int) -> Tensor | None:
        """A tensor for all rows, with what is given for the first ones."""
        if given is None:
            return None
        rows = self.scratch.zeros(name, len(self.settings), given.shape[1], dtype=given.dtype)
        send(given, rows[: len(given)])
        rows[len(given) :] = neutral
        return rows

    def switches(self, V: int) -> Switches:
        """What is on, given V logits."""
        drawing = [s for s in self.settings if s.temp != 0]
        penalty = any(s.repeat_penalty != 1 for s in self.settings)
        uses_top_k = any(top_k(s) < V for s in drawing)
        uses_top_p = any(s.top_p < 1 for s in drawing)
        lists = uses_top_k and max(map(top_k, drawing)) <= -(-V // _block(V))
        sorts = (uses_top_k or uses_top_p) and not lists
        counted = any(s.presence_penalty != 0 or s.frequency_penalty != 0 for s in self.settings)
        asked = (self.masks is not None, self.biases is not None, counted)
        return Switches(not drawing, *asked, penalty, uses_top_k, uses_top_p, sorts)


TYPECODES = {torch.int32: "i", torch.int64: "q", torch.float32: "f"}  # of arrays


def send(values: Tensor | list, to: Tensor) -> None:
    """Copy values, at least one, from the host to a device; to a GPU while the host goes on, from pinned
    memory, which torch keeps until the copy is done."""
    if isinstance(values, list):  # torch.tensor would take three times as long to read it
        values = torch.frombuffer(array(TYPECODES[to.dtype], values), dtype=to.dtype).view(to.shape)
    if to.is_cuda:
        values = values.pin_memory()
    to.copy_(values, non_blocking=True)


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


def sample_ref(logits: Tensor, pass_: Pass) -> None:
    sampler = pass_.sampler
    rows = range(len(pass_.place)) if pass_.rows is None else pass_.rows.tolist()
    places, positions = pass_.place.tolist(), pass_.position.tolist()
    for r, (row, own) in enumerate(zip(rows, logits)):
        place = places[row] + 1  # of the token to draw
        history = pass_.tokens[place - positions[row] - 1 : place]
        if sampler.biases is not None:
            own += sampler.biases[r]
        s = sampler.settings[r]
        if s.presence_penalty != 0 or s.frequency_penalty != 0:
            counts = torch.bincount(history[sampler.begins[r] :], minlength=len(own))
            own -= s.frequency_penalty * counts + s.presence_penalty * (counts > 0)
        if sampler.masks is not None:
            own.masked_fill_(~_allowed(sampler.masks[r], len(own)), BANNED)
        pass_.drawn[place] = _choose_ref(own, history, sampler.settings[r])
        if pass_.feeds:
            pass_.tokens[place] = pass_.drawn[place].clamp(min=0)


def _allowed(mask: Tensor, V: int) -> Tensor:
    """The bits of a row of Sampler.masks: bool [V]."""
    bits = mask[:, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)
    return (bits & 1).bool().flatten()[:V]


def _choose_ref(logits: Tensor, history: Tensor, s: Sampling) -> int:
    """The token that follows a history, -1 where the logits are not finite."""
    position = len(history)
    if s.repeat_penalty != 1:
        recent = history[max(0, position - window(s)) :].long()
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


# Each launch divides the vocabulary into parts, one per program. The first, `best`, forbids and
# penalises and finds the best logit of each part; if all rows are greedy, it ends there. What
# follows depends on how the thresholds of top-k and top-p are found:
#
# - neither is on: `draw`, in which each part draws among its tokens, and the best draw wins;
# - top-k is on and at most the number of parts: `candidates` lists the few logits that top-k may
#   keep, and the last program finds the thresholds among them and draws;
# - otherwise: torch sorts all logits (_find_floors), and `draw` skips those below the threshold.
#
# All rows of a pass go the same way, which is the first in this list that serves each of them.
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
    rank = in_order(scores).to(tl.int64) + (1 << 31)
    return tl.max(tl.where(mask, (rank << 31) + (LAST_ID - ids), 0), 0)


@jit
def _row_of_pass(row, rows, place, position):
    """Where the token is written that follows a sampled row, and how many come before it there.
    rows: which row of the pass each sampled one is, or None if all are sampled."""
    if rows is not None:
        row = tl.load(rows + row)
    return tl.load(place + row) + 1, tl.load(position + row) + 1


@jit
def _draw(l, ids, floor, best, log_min_p, temp, noise, seed, position):
    """The token that is drawn among those at or above the floor that min-p keeps, as _best_of gives
    it. A logit of -inf stands for no token. noise: 0 for a greedy row; the variates, by which it
    would be multiplied, may be infinite."""
    floor = tl.maximum(floor, best + log_min_p)
    variates = tl.where(noise > 0, _gumbel(seed, position, ids), 0.0)
    scores = (l - best) / temp + variates
    return _best_of(scores, ids, (l >= floor) & (l > float("-inf")))


@jit
def _store_token(winner, finite, chosen_tokens, drawn, place):
    """Store the token of _best_of's number or, if the logits are not finite, -1, and 0 as the next
    pass's input."""
    token = tl.where(finite, LAST_ID - (winner & LAST_ID), -1).to(tl.int32)
    if chosen_tokens is not None:
        tl.store(chosen_tokens + place, tl.maximum(token, 0))
    tl.store(drawn + place, token)


@jit
def _sample_best_kernel(
    logits, bests, copy, winner, arrived, masks, tokens, chosen_tokens, drawn, place, position, rows,
    numbers, PENALISE: tl.constexpr, CHOOSE: tl.constexpr,
    V: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Forbid tokens that a mask leaves out, if there are masks; penalise recent tokens; find the
    best logit of each part, bests [R, PARTS], which is inf if one is not finite; if CHOOSE, store
    the best of all. copy [R, V] is scratch memory of the penalty, winner int64 [R] is zero between
    launches. Axis 1 of the grid is the R rows of logits, here and below."""
    gdc_launch_dependents(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    logits += row * V
    first = part * BLOCK
    ids = first + tl.arange(0, BLOCK)
    penalty = tl.load(numbers + row * COUNT + PENALTY)
    window = tl.load(numbers + row * COUNT + WINDOW).to(tl.int32)
    place, position = _row_of_pass(row, rows, place, position)
    if masks is not None:
        words = tl.load(masks + row * ((V + 31) // 32) + ids // 32, mask=ids < V, other=0)
        allowed = ((words >> (ids % 32)) & 1) != 0
    gdc_wait(PDL)
    l = tl.load(logits + ids, mask=ids < V, other=float("-inf"))
    if masks is not None:
        l = tl.where(allowed | (ids >= V), l, FORBIDDEN)
        tl.store(logits + ids, l, mask=ids < V)
    if PENALISE:  # from a copy, so that a token seen twice is penalised once
        copy += row * V
        tl.store(copy + ids, l, mask=ids < V)
        tl.debug_barrier()
        for start in range(0, tl.minimum(window, position), CHUNK):
            back = start + tl.arange(0, CHUNK)
            in_window = (back < window) & (back < position)
            recent = tl.load(tokens + place - 1 - back, mask=in_window, other=-1)
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
            _store_token(best, best >> 31 < INF_RANK, chosen_tokens, drawn, place)
    else:
        tl.store(bests + row * PARTS + part, tl.max(l, 0))


def _adjust(logits: Tensor, pass_: Pass, on: Switches) -> None:
    """Add biases to logits [R, V], and take from them what penalties cost the tokens that each text
    has had. Runs inside a captured graph."""
    sampler = pass_.sampler
    if on.biased:
        logits.add_(sampler.biases)
    if not on.counted:
        return
    place, position = pass_.place, pass_.position
    if pass_.rows is not None:
        place, position = place.index_select(0, pass_.rows), position.index_select(0, pass_.rows)
    at = torch.arange(pass_.size, device=logits.device)
    own = (at >= sampler.begins[:, None]) & (at <= position[:, None])
    places = torch.where(own, (place - position)[:, None] + at, 0)
    ids = pass_.tokens[places].long()
    counts = torch.zeros_like(logits).scatter_add_(1, ids, own.float())
    presence, frequency = (sampler.numbers[:, i : i + 1] for i in (PRESENCE, FREQUENCY))
    logits.sub_(frequency * counts + presence * (counts > 0))


def _find_floors(logits: Tensor, numbers: Tensor, on: Switches, floors: Tensor) -> None:
    """Write the lowest logit that top-k and top-p keep in each row to `floors` [R]. Runs inside
    a captured graph: the numbers are read on the device, and nothing is awaited."""
    _, top_k, top_p, *_ = numbers.split(1, 1)  # in the order of numbers()
    V = logits.shape[1]
    ranked = logits.sort(descending=True).values
    floor = ranked[:, -1:]
    if on.top_k:
        floor = ranked.gather(1, top_k.long().clamp(max=V) - 1)
        ranked = ranked.masked_fill(ranked < floor, -math.inf)  # equals at the edge stay
    if on.top_p:
        weights = (ranked - ranked[:, :1]).double().exp()
        sums = (weights * _unit(V)).round().cumsum(1)
        target = sums[:, -1:] * top_p.double()
        place = (sums < target).sum(1, keepdim=True)  # the first that reaches it; 0 if NaN
        # Where top-p is off, none does
        floor = torch.where(top_p <= 1, ranked.gather(1, place.clamp(max=V - 1)), floor)
    floors.copy_(floor[:, 0])


@jit
def _sample_draw_kernel(
    logits, bests, floors, winner, arrived, chosen_tokens, drawn, place, position, rows, seeds,
    numbers, V: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draw among the tokens at or above the row's floor, or among all if there are no floors [R].
    winner int64 [R] is zero between launches."""
    gdc_launch_dependents(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    numbers += row * COUNT
    temp = tl.load(numbers + TEMP)
    log_min_p = tl.load(numbers + LOG_MIN_P)
    noise = tl.load(numbers + NOISE)
    seed = tl.load(seeds + row)
    place, position = _row_of_pass(row, rows, place, position)
    gdc_wait(PDL)
    l = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))
    best = tl.max(tl.load(bests + row * PARTS + tl.arange(0, PARTS)), 0)
    floor = float("-inf")
    if floors is not None:
        floor = tl.load(floors + row)
    drawn_here = _draw(l, ids, floor, best, log_min_p, temp, noise, seed, position)
    tl.atomic_max(winner + row, drawn_here, sem="relaxed")
    if is_last(arrived + row, PARTS):
        drawn_of_all = tl.atomic_xchg(winner + row, 0)
        _store_token(drawn_of_all, best < float("inf"), chosen_tokens, drawn, place)


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
    logits, bests, listed, listed_ids, counts, arrived, chosen_tokens, drawn, place, position, rows,
    seeds, numbers, UNIT: tl.constexpr,
    V: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draw with a top-k of at most the number of parts. The k-th largest of the parts' bests has k
    logits at or above it, so top-k's threshold is no lower. All of these are listed, seldom many
    more than k, with their tokens: listed and listed_ids [R, V]; counts [R] is zero between
    launches. Tokens that a mask forbids are never listed, even if it leaves tokens in fewer than k parts."""
    gdc_launch_dependents(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    listed += row * V
    listed_ids += row * V
    ids = part * BLOCK + tl.arange(0, BLOCK)
    numbers += row * COUNT
    temp = tl.load(numbers + TEMP)
    top_k = tl.load(numbers + TOP_K).to(tl.int64)
    top_p = tl.load(numbers + TOP_P)
    log_min_p = tl.load(numbers + LOG_MIN_P)
    noise = tl.load(numbers + NOISE)
    seed = tl.load(seeds + row)
    place, position = _row_of_pass(row, rows, place, position)
    gdc_wait(PDL)
    l = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf"))

    # List this part's candidates; none at all if a logit of the row is not finite
    part_bests = tl.load(bests + row * PARTS + tl.arange(0, PARTS))
    best = tl.max(part_bests, 0)
    finite = best < float("inf")
    allowed = tl.minimum(best, FORBIDDEN / 2)
    lowest = tl.where(finite, tl.maximum(_kth_largest(part_bests, top_k), allowed), best)
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
        if top_p <= 1:
            total, _, _ = _weigh(chunk, listed, count, threshold, best, UNIT)
            target = (top_p.to(tl.float64) * total).to(tl.int64)
            threshold = _threshold(chunk, listed, count, target, threshold, best, UNIT)

        # Draw
        winner = tl.full([], 0, tl.int64)
        for start in range(0, count, CHUNK):
            if count > CHUNK:
                chunk = _load_chunk(listed, start, count, float("-inf"))
                chunk_ids = _load_chunk(listed_ids, start, count, 0)
            args = (threshold, best, log_min_p, temp, noise, seed, position)
            winner = tl.maximum(winner, _draw(chunk, chunk_ids, *args))
        _store_token(winner, finite, chosen_tokens, drawn, place)


def _block(V: int) -> int:
    """How many logits a part has, a power of 2. Of 4,096 logits or more there are 64 to 128
    parts."""
    return max(MIN_BLOCK, (1 << (V - 1).bit_length()) // MAX_PARTS)


def sample(logits: Tensor, pass_: Pass) -> None:
    R, V = logits.shape
    sampler = pass_.sampler
    assert len(pass_.place if pass_.rows is None else pass_.rows) == R, logits.shape
    on = sampler.switches(V)
    zeros = sampler.scratch.zeros
    block = _block(V)
    parts = triton.next_power_of_2(triton.cdiv(V, block))
    bests = zeros("bests", R, parts)
    winner = zeros("winner", R, dtype=torch.int64)
    arrived = zeros("parts done", R, dtype=torch.int32)
    output = (pass_.tokens if pass_.feeds else None, pass_.drawn)
    output += (pass_.place, pass_.position, pass_.rows)
    settings = (sampler.seeds, sampler.numbers)

    def run(kernel, *args, **constants) -> None:
        grid = (parts, R)
        sizes = dict(V=V, BLOCK=block, PARTS=parts)
        launch(kernel, grid, logits.device, logits, bests, *args, **constants, **sizes, warps=8)

    if on.biased or on.counted:
        _adjust(logits, pass_, on)
    copy = zeros("copy", R, V) if on.penalty else None
    args = (copy, winner, arrived, sampler.masks, pass_.tokens, *output, sampler.numbers)
    run(_sample_best_kernel, *args, PENALISE=on.penalty, CHOOSE=on.greedy)
    if on.greedy:
        return
    if on.top_k and not on.sorts:
        listed = zeros("listed", R, V)
        listed_ids = zeros("listed ids", R, V, dtype=torch.int32)
        counts = zeros("counts", R, dtype=torch.int32)
        args = (listed, listed_ids, counts, arrived, *output, *settings)
        run(_sample_candidates_kernel, *args, UNIT=_unit(V))
        return
    floors = None
    if on.sorts:
        floors = zeros("floors", R)
        _find_floors(logits, sampler.numbers[:R], on, floors)
    run(_sample_draw_kernel, floors, winner, arrived, *output, *settings)
