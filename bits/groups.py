"""Codes in groups of columns: what INT4 (int4.py) and the formats of other programs (others.py) have
in common, whatever the bits of a code.

    code         a small integer that stands for a weight
    word         an int32 that holds several codes
    group        neighbouring columns of a row that share a scale, and a minimum or a zero point
    run          eight neighbouring columns

With one token a thread takes 64 columns, which are whole groups (stream.py)."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

from dataclasses import dataclass

import torch
from torch import Tensor

from formats import Format, Tensors, load_once
from launch import jit, tl

# ---- in torch


def rotated(runs, turns):
    """Which run of eight columns is stored in each of these places. Every `turns` neighbouring runs
    are rotated among themselves, by one more step in each next thread (64 columns). Used by torch
    and in kernels."""
    return runs // turns * turns + (runs + runs // 8) % turns


@dataclass(frozen=True, eq=False)
class Grouped(Format):
    """A format with a scale and a minimum for each group of columns: W = scale * code + minimum,
    times the row's scale if there is one, which is then the last tensor."""

    turns: int = 1  # runs of eight columns that are rotated among themselves, see rotated

    def runs(self, K: int, device: torch.device) -> Tensor:
        """The order in which runs of eight columns are stored, int64 [K / 8]: `column_at` for
        torch."""
        return rotated(torch.arange(K // 8, device=device), self.turns)

    def in_runs(self, t: Tensor) -> Tensor:
        """[..., K] with its runs of eight columns in that order."""
        runs = self.runs(t.shape[-1], t.device)
        return t.unflatten(-1, (-1, 8)).index_select(-2, runs).flatten(-2)

    def order(self, K: int, device: torch.device) -> Tensor:
        return self.in_runs(torch.arange(K, device=device))

    def codes(self, tensors: Tensors) -> Tensor:
        """[N, K], as they are stored."""
        raise NotImplementedError

    def scales(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Scales and minimums of the groups, times the row's scale: float32 [N, groups]."""
        raise NotImplementedError

    def stored_weights(self, tensors: Tensors) -> Tensor:
        scale, minimum = self.scales(tensors)
        groups = self.codes(tensors).float().unflatten(1, (scale.shape[1], -1))
        return groups.mul_(scale[..., None]).add_(minimum[..., None]).flatten(1)


# ---- in kernels: loading a tile. See Format.load for the arguments


@jit
def begin_of(start, k, offs_k, COLUMNS: tl.constexpr, EACH: tl.constexpr):
    """Where rows begin, for columns k + offs_k of them: `start` of Format.load, counted in elements
    of EACH weights."""
    if isinstance(start, tl.tensor):
        return start // EACH
    else:
        rows, _, offsets = start
        begin = offsets[0] // EACH + offs_k * 0
        for part in tl.static_range(1, len(offsets)):
            if part * start[1] < k + COLUMNS:
                begin = tl.where(k + offs_k >= part * start[1], offsets[part] // EACH, begin)
        return rows // EACH + begin


@jit
def load_words(w, start, k, left, COLUMNS: tl.constexpr, EACH: tl.constexpr, COUNT: tl.constexpr):
    """Load a tensor of W as int32 words, each of which belongs to EACH columns: [R, COLUMNS /
    EACH]. A thread gets COUNT neighbouring words."""
    word = tl.arange(0, COLUMNS // EACH)[None, :]
    begin = begin_of(start, k, word * EACH, COLUMNS, EACH)
    words = w.to(tl.pointer_type(tl.int32)) + begin + (k // EACH + word)
    # Either all neighbours of a thread are loaded or none, so that one instruction can load them
    offs_k = word // COUNT * (COUNT * EACH)
    return load_once(tl.max_contiguous(words, [1, COUNT]), offs_k, left)


@jit
def load_codes(w, start, k, left, COLUMNS: tl.constexpr, EACH: tl.constexpr):
    """Load words that hold EACH codes each: [R, COLUMNS / (4 EACH), 4]. A thread gets four
    neighbouring words."""
    words = load_words(w, start, k, left, COLUMNS, EACH, 4)
    return words.reshape(words.shape[0], COLUMNS // (4 * EACH), 4)


@jit
def load_groups(w, start, k, left, COLUMNS: tl.constexpr, EACH: tl.constexpr, GROUP: tl.constexpr):
    """Load from a tensor of W that stores one element for each GROUP columns. Returns, for every
    EACH columns, the element that belongs to them: [R, COLUMNS / EACH], one for each thread, as the
    codes are divided among threads. `start` must be a multiple of GROUP, k a multiple of EACH."""
    offs_k = tl.arange(0, COLUMNS // EACH)[None, :] * EACH
    begin = begin_of(start, k, offs_k, COLUMNS, GROUP)
    pointers = w + begin + tl.max_contiguous((k + offs_k) // GROUP, [1, 1])
    return load_once(pointers, offs_k, left)


@jit
def load_all_groups(
    w, start, k, left, COLUMNS: tl.constexpr, EACH: tl.constexpr, FORMAT: tl.constexpr
):
    """load_groups of each tensor but the codes, see Format.groups: a tuple."""
    tiles = ()
    for i in tl.static_range(len(FORMAT.groups)):
        tiles += (load_groups(w[1 + i], start, k, left, COLUMNS, EACH, FORMAT.groups[i]),)
    return tiles


@jit
def load_two_groups(w, start, k, left, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """load_groups for every 32 columns, where a thread has 64 of them: [R, COLUMNS / 32], two
    elements of 16 or 32 bits for each thread."""
    if GROUP > 32:  # a multiple of 64, so that both are the same
        one = load_groups(w, start, k, left, COLUMNS, 64, GROUP)
        return tl.join(one, one).reshape(one.shape[0], COLUMNS // 32)
    elif w.dtype.element_ty.primitive_bitwidth == 16:
        both = load_groups(w.to(tl.pointer_type(tl.int32)), start, k, left, COLUMNS, 64, 64)
        return int16_of(both).to(w.dtype.element_ty, bitcast=True)
    else:
        return load_words(w, start, k, left, COLUMNS, 32, 2)


@jit
def stream_load(w, start, k, left, COLUMNS: tl.constexpr, FORMAT: tl.constexpr):
    """The `stream_load` of codes of 4 bits, which are words, or of 8, which are bytes, and of their
    groups."""
    EACH: tl.constexpr = 8 if w[0].dtype.element_ty == tl.int32 else 4
    tile = (load_codes(w[0], start, k, left, COLUMNS, EACH),)
    for i in tl.static_range(len(FORMAT.groups)):
        tile += (load_two_groups(w[1 + i], start, k, left, COLUMNS, FORMAT.groups[i]),)
    return tile


# ---- in kernels: bits


@jit
def half2_of(low, high):
    """Two halves as one half2: `low` in the lower 16 bits, `high` in the upper ones."""
    return low.to(tl.uint16, bitcast=True).to(tl.uint32) | (
        high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    )


@jit
def half_at(bits, EXPONENT: tl.constexpr):
    """The half in the lower bits of int32, times 2^-EXPONENT, as a float."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * (2.0**-EXPONENT)


@jit
def int16_of(words):
    """Split each int32 into two int16, the lower one first: [..., M] to [..., 2 M]."""
    both = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
    return both.reshape(words.shape[:-1] + (2 * words.shape[-1],))


@jit
def sums_of(x, COUNT: tl.constexpr):
    """Sums of COUNT neighbours: [R, G] to [R, G / COUNT]."""
    return tl.sum(x.reshape(x.shape[0], x.shape[1] // COUNT, COUNT), 2)
