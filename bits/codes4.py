"""Codes of 4 bits: what INT4 (int4.py) shares with the formats of other programs (others.py).

Eight codes share an int32, a word. Word i of the four that hold 32 columns has, for j from 0 to 3,
column 8 j + 2 i at bit 4 j and column 8 j + 2 i + 1 at bit 16 + 4 j. So one AND extracts two
neighbours, one into each half of a register, and they need no conversion: as a half, a code at bit 0
is the subnormal code * 2^-24, one at bit 4 is code * 2^-20."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bits.groups import Grouped, int16_of, load_all_groups, load_codes, stream_load, sums_of
from formats import Tensors, as_floats, split_4
from launch import EMULATED, constexpr, jit, tl


@dataclass(frozen=True, eq=False)
class Codes4(Grouped):
    """A format with 4-bit codes in this order, in its first tensor."""

    codes_each: int = 8

    def order(self, K: int, device: torch.device) -> Tensor:
        return word_order(super().order(K, device), 4)

    def codes(self, tensors: Tensors) -> Tensor:
        return from_words(tensors[0])

    def cpu_layout(self, tensors: Tensors) -> Tensors | None:
        """The codes in torch's layout; a pair of bf16 numbers for each group, such that W = (code -
        8) * first + second; the order of the columns, if a group's are not neighbours."""
        if len(tensors[0]) % 16:
            return None
        scale, minimum = self.scales(tensors)
        pairs = torch.stack((scale, 8 * scale + minimum), 2).transpose(0, 1)
        codes = self.codes(tensors).int()
        K = codes.shape[1]
        order, places = self.order(K, codes.device).view(len(pairs), -1).sort(1)
        order = order.flatten()
        within = places + torch.arange(0, K, places.shape[1])[:, None]
        laid_out = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            codes.index_select(1, within.flatten()), 1
        )
        made = laid_out, pairs.to(torch.bfloat16).contiguous()
        return made if torch.equal(order, torch.arange(K)) else (*made, order)

    def cpu_layout_linear(self, x: Tensor, cpu_layout: Tensors) -> Tensor:
        codes, pairs, *order = cpu_layout
        if order:
            x = x.index_select(1, order[0])
        group = x.shape[1] // pairs.shape[0]
        # as torch.ops.aten... it would take twice as long to call
        return torch._weight_int4pack_mm_for_cpu(x, codes, group, pairs)


# ---- in torch


def nibbles(words: Tensor) -> Tensor:
    """The 4-bit integers in int32 [A, B], lowest bits first: int8 [A, 8 B]."""
    raw = words.contiguous().view(torch.uint8)
    return torch.stack((raw & 15, raw >> 4), 2).flatten(1).view(torch.int8)


def from_words(words: Tensor) -> Tensor:
    """The 4-bit integers of `nibbles`, but in float32 on a CPU, where torch's operator for
    quantised embeddings is ten times as fast. It expects each row's codes to be followed by a scale
    and an offset, both halves."""
    if not words.is_cpu:
        return nibbles(words)
    rows = functional.pad(words, (0, 1), value=0x3C00)  # scale 1.0, offset 0.0
    return torch.ops.quantized.embedding_bag_4bit_unpack(rows.view(torch.uint8))


def word_order(columns: Tensor, words: int) -> Tensor:
    """Columns [K] in the order in which `from_words` returns them. Every 8 `words` columns are
    spread over that many words, as the top of this file describes for four."""
    return columns.view(-1, 4, words, 2).permute(0, 2, 3, 1).flatten()


def to_words(codes: Tensor, words: int = 4) -> Tensor:
    """Put codes [N, K] into int32 [N, K / 8]. Every 8 `words` columns are spread over that many
    words, as the top of this file describes for four."""
    codes = codes.to(torch.int16).unflatten(1, (-1, 4, 2 * words))
    halves = codes[:, :, 0] | codes[:, :, 1] << 4 | codes[:, :, 2] << 8 | codes[:, :, 3] << 12
    return halves.flatten(1).view(torch.int32)


# ---- in kernels
#
#      For every format that has them. Its `scales_of` gives a tile's groups either scales and zero
#      points, where `values` and `stream_sums` are those ..._with_zero, or scales and minimums,
#      where they are those ..._with_minimum. The bits of a code, read as a half, are 2^-24 or 2^-20
#      times the code. Zero points are given in the same way: in sixteenths, times 2^-24.


@jit
def load(w, start, k, left, COLUMNS: tl.constexpr, NEIGHBOURS: tl.constexpr, FORMAT: tl.constexpr):
    codes = load_codes(w[0], start, k, left, COLUMNS, 8)
    return (codes,) + load_all_groups(w, start, k, left, COLUMNS, 32, FORMAT)


def values_asm(extract: str, first: int) -> str:
    """PTX that decodes eight codes to halves in $0 to $3. `extract` puts their four pairs into a,
    b, c, d. Register `first` holds the factor of the pairs in a and c, the next one that of b and
    d, whose codes are four bits higher, and the third what is added."""
    products = [
        f"fma.rn.f16x2 ${j}, {pair}, ${first + j % 2}, ${first + 2};"
        for j, pair in enumerate("abcd")
    ]
    return f"{{ .reg .b32 a, b, c, d, e, g, v; {extract} {' '.join(products)} }}"


def _extract(word: str) -> str:
    """PTX that puts the four pairs of codes in a register into a, b, c, d."""
    return (
        f"shr.u32 v, {word}, 8; and.b32 a, {word}, 0x000f000f; and.b32 b, {word}, 0x00f000f0; "
        "and.b32 c, v, 0x000f000f; and.b32 d, v, 0x00f000f0;"
    )


_VALUES_ASM = constexpr(values_asm(_extract("$4"), 5))
_VALUES_REGISTERS = constexpr("=&r,=&r,=&r,=&r" + 4 * ",r")


@jit
def _codes_of(halves):
    """Codes of the pairs 0 to 3 of each word, from the int16 that words consist of."""
    return halves & 15, halves >> 4 & 15, halves >> 8 & 15, halves >> 12 & 15


@jit
def in_order(y0, y1, y2, y3):
    """Put what belongs to the pairs 0 to 3 of each word, [R, G, M] each, into the order of columns:
    [R, 4 G M]."""
    y = tl.join(tl.join(y0, y1), tl.join(y2, y3)).permute(0, 1, 4, 3, 2)
    return y.reshape(y0.shape[0], 4 * y0.shape[1] * y0.shape[2])


@jit
def factors_of(scale, minimum):
    """What codes at bits 0 and 4 are multiplied by, and what is added, as halves."""
    by_0 = (scale * 16777216.0).to(tl.float16)  # 2^24
    by_4 = (scale * 1048576.0).to(tl.float16)  # 2^20
    return by_0, by_4, minimum.to(tl.float16)


@jit
def run_values_asm(halves, factors, ASM: tl.constexpr, REGISTERS: tl.constexpr):
    """Halves [R, COLUMNS] from a tuple of int16 [R, G, M] and the factors of the groups, by PTX of
    values_asm."""
    args = halves + (factors[0][:, :, None], factors[1][:, :, None], factors[2][:, :, None])
    types: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
    y0, y1, y2, y3 = tl.inline_asm_elementwise(
        ASM, REGISTERS, args, dtype=types, is_pure=True, pack=2
    )
    return in_order(y0, y1, y2, y3)


@jit
def emulated_values(code0, code1, code2, code3, factors):
    """What run_values_asm returns, in the interpreter: floats, from the codes of the pairs 0 to
    3."""
    by_0 = factors[0].to(tl.float32)[:, :, None] * 2.0**-24
    by_4 = factors[1].to(tl.float32)[:, :, None] * 2.0**-20
    added = factors[2].to(tl.float32)[:, :, None]
    return in_order(
        code0 * by_0 + added, code1 * by_4 + added, code2 * by_0 + added, code3 * by_4 + added
    )


@jit
def decoded_halves(halves, factors):
    """Halves [R, COLUMNS] from the int16 that words consist of: one fma.rn.f16x2 for two
    weights."""
    if EMULATED:
        code0, code1, code2, code3 = _codes_of(halves)
        return emulated_values(code0, code1, code2, code3, factors)
    else:
        return run_values_asm((halves,), factors, _VALUES_ASM, _VALUES_REGISTERS)


@jit
def values_with_zero(tile, SCALES: tl.constexpr):
    halves = int16_of(tile[0])
    scale, zero = SCALES(tile, 0)
    return decoded_halves(halves, factors_of(scale, scale * zero * -1048576.0))  # 2^20


@jit
def values_with_minimum(tile, SCALES: tl.constexpr):
    halves = int16_of(tile[0])
    scale, minimum = SCALES(tile, 0)
    return decoded_halves(halves, factors_of(scale, minimum))


# The same formats for one token


def sums_asm(extract: list[str], total: str) -> str:
    """PTX that multiplies codes by x and adds up the products. extract[i] puts the four pairs of
    word i into a, b, c and d; register 5 + j len(extract) + i holds x for pair j. The sums times
    2^-20, of the pairs' first codes and of their second ones, are in l and u, from which `total`
    makes a float in $0."""
    lines = []
    for i, word in enumerate(extract):
        lines.append(word)
        for j, pair in enumerate("abcd"):
            sums = "low" if j % 2 == 0 else "high"
            factors = f"{pair}, ${5 + j * len(extract) + i}"
            if i == 0 and j < 2:
                lines.append(f"mul.rn.f16x2 {sums}, {factors};")
            else:
                lines.append(f"fma.rn.f16x2 {sums}, {factors}, {sums};")
    # 0x4c00 is 16
    lines.append("mov.b32 v, 0x4c004c00; fma.rn.f16x2 high, low, v, high; mov.b32 {l, u}, high;")
    registers = ".reg .b32 a, b, c, d, e, g, swapped, v, low, high; .reg .b16 l, u; .reg .f32 f;"
    return f"{{ {registers} {' '.join(lines)} {total} }}"


_SUMS_ASM = constexpr(
    sums_asm([_extract(f"${1 + i}") for i in range(4)], "add.f16 l, l, u; cvt.f32.f16 $0, l;")
)
_SUMS_REGISTERS = constexpr("=&r" + 20 * ",r")


@jit
def _code_sums(words, x):
    """Sums of codes times x over 32 columns, times 2^-20, for as_floats: [R, COLUMNS / 32]."""
    if EMULATED:
        code0, code1, code2, code3 = _codes_of(int16_of(words))
        products = in_order(code0, code1, code2, code3) * x[None, :]
        return sums_of(products, 32) * 2.0**-20
    else:
        args = (words,) + split_4(x.reshape(words.shape[1], 4, 4).permute(0, 2, 1))
        return tl.inline_asm_elementwise(
            _SUMS_ASM, _SUMS_REGISTERS, args, dtype=tl.int8, is_pure=True, pack=4
        )


@jit
def stream_sums_with_zero(tile, x, sum_x, SCALES: tl.constexpr):
    sum_x = sum_x[None, :]
    sums = _code_sums(tile[0], x)
    scale, zero = SCALES(tile, 20)
    return sums_of(scale * (as_floats(sums) - zero * sum_x), 2)


@jit
def stream_sums_with_minimum(tile, x, sum_x, SCALES: tl.constexpr):
    sum_x = sum_x[None, :]
    sums = _code_sums(tile[0], x)
    scale, minimum = SCALES(tile, 0)
    # 2^20. As part of `scale`, as above, it makes one token of Q4_K 7% slower
    return sums_of(scale * 1048576.0 * as_floats(sums) + minimum * sum_x, 2)


# What all formats of 4-bit codes share for one token. A thread takes 64 columns, which are whole
# groups
STREAMED = dict(stream_load=stream_load, gain=1.0, sum_x=32, weights_per_thread=64, x_peak=16384.0)
