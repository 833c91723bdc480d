"""4-bit integers with a scale and a zero point for each group of 32 columns, 4.5 bits a weight:

    W[n, k] = row[n] * scale[n, g] * (code[n, k] - zero[n, g] / 16)

    code    4 bits: 0 to 15
    zero    8 bits: sixteenths of a code, since a group's range need not have 0 on a code
    scale   8 bits: a float without a sign: with the upper bits e, at most 14, and the lower m, (1 +
            m / 16) 2^(e - 23)
    row     float32: scales a row so that its largest group scale is the largest that 8 bits can
            hold

Every 256 columns hold eight interleaved groups: each group takes a run of eight columns from each
quarter of them. With one token a thread needs whole groups of x, and this way neighbouring threads
still load neighbouring columns.

Eight codes share an int32. Word i of the four that hold a group has, for j from 0 to 3, its column
8 j + 2 i at bit 4 j and column 8 j + 2 i + 1 at bit 16 + 4 j. So one AND extracts two neighbours,
one into each half of a register, and they need no conversion: as a half, a code at bit 0 is the
subnormal code * 2^-24, one at bit 4 is code * 2^-20."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

import fp8
from extra import hopper
from fp8 import E4M3, Format, Grouped, Shapes, Tensors
from launch import EMULATED, capability, constexpr, jit, tl

GROUP = 32
BLOCK = 256  # columns that eight groups share
LARGEST = 0xEF  # the largest code of a scale


@dataclass(frozen=True, eq=False)
class Codes4(Grouped):
    """4-bit codes in the order above."""

    def order(self, K: int, device: torch.device) -> Tensor:
        return in_words(super().order(K, device), 4)

    def codes(self, tensors: Tensors) -> Tensor:
        return unpacked(tensors[0])

    def packed(self, tensors: Tensors) -> Tensors | None:
        """The codes in torch's layout, (code - 8) * scale + offset in bf16 for each group, and the
        order of columns."""
        if len(tensors[0]) % 16:
            return None
        scale, minimum = self.scales(tensors)
        both = (
            torch.stack((scale, 8 * scale + minimum), 2)
            .transpose(0, 1)
            .to(torch.bfloat16)
            .contiguous()
        )
        codes = self.codes(tensors).int()
        order = self.order(codes.shape[1], codes.device)
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1), both, order

    def packed_linear(self, x: Tensor, packed: Tensors) -> Tensor:
        codes, both, order = packed
        x = x.gather(1, order.expand(x.shape))
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, x.shape[1] // len(both), both)


@dataclass(frozen=True, eq=False)
class Int4(Codes4):
    """int32 codes [N, K / 8]; int16 groups [N, K / 32], the scale's code above the zero point;
    float32 row [N, 1]."""

    def tensors(self, N: int, K: int) -> Shapes:
        groups = {"codes": (torch.int32, (N, K // 8)), "groups": (torch.int16, (N, K // GROUP))}
        return groups | {"row": (torch.float32, (N, 1))}

    def runs(self, K: int, device: torch.device) -> Tensor:
        runs = torch.arange(K // 8, device=device)
        blocks, rest = runs[: K // BLOCK * 32], runs[K // BLOCK * 32 :]
        return torch.cat((blocks.view(-1, 4, 2, 4).transpose(1, 3).flatten(), rest))

    def at(self, name: str) -> Format:
        """The output matrix is kept in E4M3: that lowers the KL divergence by a third
        (BENCHMARKS.md)."""
        return E4M3 if name == "output" else self

    def encode(
        self, weights: Tensor, out: Tensors | None = None, importance: Tensor | None = None
    ) -> Tensors:
        """Scale and zero point of a group are searched for the least squared error, which
        `importance` [K] weighs, if given."""
        out = out or self.empty(*weights.shape, weights.device)
        weigh = (
            weights.new_ones(weights.shape[1])
            if importance is None
            else importance.float().clamp(min=1e-12)
        )
        in_groups = lambda t: self.in_runs(t.float()).unflatten(-1, (-1, GROUP))
        weigh = in_groups(weigh)
        for rows, *places in fp8.some_rows(weights, out):
            for place, value in zip(places, _encode(in_groups(rows), weigh)):
                place.copy_(value)
        return out

    def scales(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        _, groups, row = tensors
        scale = _scales(groups >> 8 & 0xFF) * row
        return scale, scale * (groups & 0xFF) / -16

    def tensor_core_linear(
        self,
        codes: Tensor,
        scales: Tensor,
        tensors: Tensors,
        dtype: torch.dtype,
        residual: Tensor | None,
    ) -> Tensor | None:
        if capability(codes.device) != 90 or not hopper.multiplies_int4(*codes.shape, dtype):
            return None
        out = (
            scales.new_empty(len(codes), len(tensors[0]), dtype=dtype)
            if residual is None
            else residual
        )
        return hopper.int4_linear(codes, scales, tensors, out, add=residual is not None)

    def check(self, tensors: Tensors) -> None:
        super().check(tensors)
        if ((tensors[1] >> 8 & 0xFF) > LARGEST).any():
            raise ValueError("scales that are not positive and finite")


def nibbles(words: Tensor) -> Tensor:
    """The 4-bit integers in int32 [A, B], lowest bits first: int8 [A, 8 B]."""
    raw = words.contiguous().view(torch.uint8)
    return torch.stack((raw & 15, raw >> 4), 2).flatten(1).view(torch.int8)


def unpacked(words: Tensor) -> Tensor:
    """The same, but float32 on a CPU, where torch's operator for quantised embeddings is ten times
    as fast. It expects each row's codes to be followed by a scale and an offset, both halves."""
    if not words.is_cpu:
        return nibbles(words)
    rows = functional.pad(words, (0, 1), value=0x3C00)  # scale 1.0, offset 0.0
    return torch.ops.quantized.embedding_bag_4bit_unpack(rows.view(torch.uint8))


def in_words(columns: Tensor, words: int) -> Tensor:
    """Columns [K] in the order in which `unpacked` returns them: each group of 8 `words` columns is
    spread over its words as described at the top of this file (four words; two in quants.Held6)."""
    return columns.view(-1, 4, words, 2).permute(0, 2, 3, 1).flatten()


def packed(codes: Tensor, words: int = 4) -> Tensor:
    """Codes [N, K] to int32 [N, K / 8], each group of 8 `words` columns spread over its words
    likewise."""
    codes = codes.to(torch.int16).unflatten(1, (-1, 4, 2 * words))
    halves = codes[:, :, 0] | codes[:, :, 1] << 4 | codes[:, :, 2] << 8 | codes[:, :, 3] << 12
    return halves.flatten(1).view(torch.int32)


def _scales(codes: Tensor) -> Tensor:
    """Codes of scales to float32."""
    return ((codes.int() << 19) + (127 - 23 << 23)).view(torch.float32)


def _scale_codes(scales: Tensor) -> Tensor:
    """The nearest codes, int32, of scales in the range of `_scales`."""
    return ((scales.view(torch.int32) + (1 << 18) >> 19) - (127 - 23 << 4)).clamp_(0, LARGEST)


def _encode(w: Tensor, weigh: Tensor) -> Tensors:
    """Groups w [N, G, 32] and how much each column counts [G, 32] to what is stored.

    First each group by itself: for a number of ranges, codes to nearest, then the scale and the
    minimum that fit these codes best, by least squares; the best of them. Then, since the scale and
    the zero point are themselves rounded, the codes of the scale nearest to that one, each with the
    zero point that fits best."""
    peak = w.abs().amax((1, 2)).clamp_(min=1e-30)[:, None]
    # [32, N, G], so scaled that no square is too large
    w = (w / peak[..., None]).permute(2, 0, 1).contiguous()
    weigh = weigh.t()[:, None].contiguous()
    low, high = w.amin(0).clamp_(max=0), w.amax(0).clamp_(min=0)
    least = torch.full_like(low, torch.inf)
    scale, zero = torch.ones_like(low), torch.zeros_like(low)  # w = scale (code - zero)
    total, sum_w = weigh.sum(0), (w * weigh).sum(0)
    span, middle = ((high - low) / 15).clamp_(min=1e-30), (high + low) / 2
    for part in torch.linspace(0.6, 1.05, 10).tolist():
        step = span * part
        code = _codes(w, step, 7.5 - middle / step)
        counted = code * weigh
        sum_c, sum_cc, sum_cw = counted.sum(0), code.mul_(counted).sum(0), counted.mul_(w).sum(0)
        spread = total * sum_cc - sum_c.square()  # near 0, nothing but rounding error
        fit = (total * sum_cw - sum_c * sum_w) / spread.clamp(min=1e-30)
        fit = torch.where((fit > 0) & (spread > 1e-4 * total * sum_cc), fit, step)
        offset = ((sum_c - sum_w / fit) / total).clamp_(0, 255 / 16)
        error = _error(w, weigh, fit, offset)
        better = error < least
        for found, tried in ((least, error), (scale, fit), (zero, offset)):
            found.copy_(torch.where(better, tried, found))
    # for rows of zeros
    row = (scale.amax(1, keepdim=True) / _scales(torch.tensor(LARGEST))).clamp_(min=1e-6)
    nearest = _scale_codes(scale / row)
    best = torch.full_like(low, torch.inf)
    byte, sixteenths, start = nearest.clone(), torch.zeros_like(nearest), zero * scale
    for step in (-1, 0, 1):
        tried = (nearest + step).clamp_(0, LARGEST)
        fit = _scales(tried) * row
        code = _codes(w, fit, (start / fit).clamp_(0, 255 / 16))
        offset = ((code.mul_(weigh).sum(0) - sum_w / fit) / total * 16).round_().clamp_(0, 255)
        error = _error(w, weigh, fit, offset / 16)
        better = error < best
        for found, value in ((best, error), (byte, tried), (sixteenths, offset.int())):
            found.copy_(torch.where(better, value, found))
    code = _codes(w, _scales(byte) * row, sixteenths / 16)
    return (
        packed(code.permute(1, 2, 0).contiguous().flatten(1)),
        (byte << 8 | sixteenths).to(torch.int16),
        row * peak,
    )


def _codes(w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The codes nearest to weights [32, N, G], as floats."""
    return torch.addcmul(zero, w, scale.reciprocal()).round_().clamp_(0, 15)


def _error(w: Tensor, weigh: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Weighted squared error of each group [N, G] with the nearest codes."""
    exact = torch.addcmul(zero, w, scale.reciprocal())
    return exact.sub_(exact.round().clamp_(0, 15)).square_().mul_(weigh).sum(0).mul_(scale.square())


# ---- in kernels


@jit
def load_words(w, start, k, left, COLUMNS: tl.constexpr, EACH: tl.constexpr, COUNT: tl.constexpr):
    """What w stores, as int32 words of EACH columns: [R, COLUMNS / EACH], COUNT neighbours to a
    thread."""
    word = tl.arange(0, COLUMNS // EACH)[None, :]
    mask = None if left is None else word // COUNT * (COUNT * EACH) < left
    words = w.to(tl.pointer_type(tl.int32)) + start // EACH + (k // EACH + word)
    return fp8.stream(tl.max_contiguous(words, [1, COUNT]), mask)


@jit
def load_codes(w, start, k, left, COLUMNS: tl.constexpr):
    """Codes of 4 or 8 bits, EACH to an int32: [R, COLUMNS / (4 EACH), 4], four neighbours to a
    thread."""
    EACH: tl.constexpr = 4 if w[0].dtype.element_ty == tl.int8 else 8
    return load_words(w[0], start, k, left, COLUMNS, EACH, 4).reshape(
        start.shape[0], COLUMNS // (4 * EACH), 4
    )


@jit
def load(w, start, k, left, COLUMNS: tl.constexpr, NEIGHBOURS: tl.constexpr, GROUP: tl.constexpr):
    """Codes of 4 or 8 bits, then the tensors of their groups: all between codes and row. Of two,
    the first has an element for each 32 columns."""
    if w[0].dtype.element_ty == tl.int8:
        tile = (fp8.load_elements(w, start, k, left, COLUMNS, NEIGHBOURS),)
        EACH: tl.constexpr = NEIGHBOURS
    else:
        tile = (load_codes(w, start, k, left, COLUMNS),)
        EACH: tl.constexpr = 32
    if len(w) == 4:
        tile += (fp8.load_groups(w[1], start, k, left, COLUMNS, EACH, 32),)
        tile += (fp8.load_groups(w[2], start, k, left, COLUMNS, EACH, GROUP),)
    else:
        tile += (fp8.load_groups(w[1], start, k, left, COLUMNS, EACH, GROUP),)
    return tile


@jit
def _scale_and_zero(groups, EXPONENT: tl.constexpr):
    """The scale times 2^EXPONENT, and the zero point in sixteenths times 2^-24. INT4's groups are
    int16; those of quants.py are halves, the scale alone, or int32, the scale as a half above the
    zero point."""
    if groups.dtype == tl.float16:
        return groups.to(tl.float32) * (2.0 ** (EXPONENT - 24)), 128 * 2.0**-24
    elif groups.dtype == tl.int32:
        return fp8.half_at(groups >> 16, 24 - EXPONENT), fp8.half_at(groups, 0)
    else:
        bits = groups.to(tl.int32)
        scale = (((bits & 0xFF00) << 11) + ((127 - 23 + EXPONENT) << 23)).to(
            tl.float32, bitcast=True
        )
        return scale, (bits & 0xFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


def values_asm(extract: str, first: int) -> str:
    """PTX that decodes eight codes to halves in $0 to $3. `extract` puts their four pairs into a,
    b, c, d. Register `first` has what those in a and c are multiplied by, the next one the same for
    b and d, where codes are four bits higher, the third what is added."""
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


_VALUES_ASM, _VALUES_REGISTERS = (
    constexpr(values_asm(_extract("$4"), 5)),
    constexpr("=&r,=&r,=&r,=&r" + 4 * ",r"),
)


@jit
def halves_of(words):
    """int32 [..., M] to the int16 that they consist of [..., 2 M], the lower one first."""
    both = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
    return both.reshape(words.shape[:-1] + (2 * words.shape[-1],))


@jit
def in_order(y0, y1, y2, y3):
    """What the pairs 0 to 3 of each word stand for, [R, G, M] each, by columns: [R, 4 G M]."""
    y = tl.join(tl.join(y0, y1), tl.join(y2, y3)).permute(0, 1, 4, 3, 2)
    return y.reshape(y0.shape[0], 4 * y0.shape[1] * y0.shape[2])


@jit
def factors_of(scale, minimum):
    """What codes at bits 0 and 4 are multiplied by, and what is added, as halves."""
    # 2^24, 2^20
    return (
        (scale * 16777216.0).to(tl.float16),
        (scale * 1048576.0).to(tl.float16),
        minimum.to(tl.float16),
    )


@jit
def _int4_factors(groups):
    """The same from INT4's groups: a scale's code, shifted, has the bits of a half that is 2^24
    times as large."""
    by_0 = groups >> 2 & 0x3FC0 | 0x4000
    by_4, zero = (
        (by_0 - 0x1000).to(tl.float16, bitcast=True),
        (groups & 0xFF).to(tl.float16, bitcast=True),
    )
    return by_0.to(tl.float16, bitcast=True), by_4, by_4 * -zero


@jit
def run_values_asm(codes, factors, ASM: tl.constexpr, REGISTERS: tl.constexpr):
    """Halves [R, COLUMNS] from codes, a tuple of int16 [R, G, M], and their factors, by PTX of
    values_asm."""
    args = codes + (factors[0][:, :, None], factors[1][:, :, None], factors[2][:, :, None])
    halves: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
    y0, y1, y2, y3 = tl.inline_asm_elementwise(
        ASM, REGISTERS, args, dtype=halves, is_pure=True, pack=2
    )
    return in_order(y0, y1, y2, y3)


@jit
def emulated_values(code0, code1, code2, code3, factors):
    """The same in the interpreter, in floats, from the codes of the pairs 0 to 3 of each word."""
    by_0, by_4 = (
        factors[0].to(tl.float32)[:, :, None] * 2.0**-24,
        factors[1].to(tl.float32)[:, :, None] * 2.0**-20,
    )
    added = factors[2].to(tl.float32)[:, :, None]
    return in_order(
        code0 * by_0 + added, code1 * by_4 + added, code2 * by_0 + added, code3 * by_4 + added
    )


@jit
def values(tile):
    """Halves [R, COLUMNS]: one fma.rn.f16x2 for two weights."""
    codes = halves_of(tile[0])
    if len(tile) == 3:
        factors = factors_of(*fp8.scale_and_minimum(tile[1:], 24, 6))
    elif tile[1].dtype == tl.int16:
        factors = _int4_factors(tile[1])
    else:
        scale, zero = _scale_and_zero(tile[1], 0)
        factors = factors_of(scale, scale * zero * -1048576.0)  # 2^20
    if EMULATED:
        return emulated_values(
            codes & 15, codes >> 4 & 15, codes >> 8 & 15, codes >> 12 & 15, factors
        )
    else:
        return run_values_asm((codes,), factors, _VALUES_ASM, _VALUES_REGISTERS)


def sums_asm(extract: list[str], total: str) -> str:
    """PTX that multiplies codes by x and adds up the products. extract[i] puts the four pairs of
    word i into a, b, c and d; register 5 + j len(extract) + i has x for pair j. The sums times
    2^-20, of the pairs' first codes and of their second ones, are in l and u, from which `total`
    makes a float in $0."""
    lines = []
    for i, word in enumerate(extract):
        lines.append(word)
        for j, pair in enumerate("abcd"):
            sums, factors = ("low", "high")[j % 2], f"{pair}, ${5 + j * len(extract) + i}"
            first = i == 0 and j < 2
            lines.append(
                f"mul.rn.f16x2 {sums}, {factors};"
                if first
                else f"fma.rn.f16x2 {sums}, {factors}, {sums};"
            )
    # 16
    lines.append("mov.b32 v, 0x4c004c00; fma.rn.f16x2 high, low, v, high; mov.b32 {l, u}, high;")
    registers = ".reg .b32 a, b, c, d, e, g, swapped, v, low, high; .reg .b16 l, u; .reg .f32 f;"
    return f"{{ {registers} {' '.join(lines)} {total} }}"


_PACKED_ASM = constexpr(
    sums_asm([_extract(f"${1 + i}") for i in range(4)], "add.f16 l, l, u; cvt.f32.f16 $0, l;")
)
_PACKED_REGISTERS = constexpr("=&r" + 20 * ",r")


@jit
def packed_groups(w, start, k, left, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """For each 32 columns the element of w, 16 or 32 bits, that belongs to them, two to a thread:
    [R, COLUMNS / 32]."""
    if GROUP > 32:  # a multiple of 64, which a thread has: both are the same
        one = fp8.load_groups(w, start, k, left, COLUMNS, 64, GROUP)
        return tl.join(one, one).reshape(one.shape[0], COLUMNS // 32)
    elif w.dtype.element_ty.primitive_bitwidth == 16:
        both = fp8.load_groups(w.to(tl.pointer_type(tl.int32)), start, k, left, COLUMNS, 64, 64)
        return halves_of(both).to(w.dtype.element_ty, bitcast=True)
    else:
        return load_words(w, start, k, left, COLUMNS, 32, 2)


@jit
def packed_load(w, start, k, left, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """The same for one token."""
    tile = (load_codes(w, start, k, left, COLUMNS),)
    if len(w) == 4:
        tile += (
            packed_groups(w[1], start, k, left, COLUMNS, 32),
            packed_groups(w[2], start, k, left, COLUMNS, GROUP),
        )
    else:
        tile += (packed_groups(w[1], start, k, left, COLUMNS, GROUP),)
    return tile


@jit
def _packed_sums(tile, x, sum_x):
    """Products with x, added up by two groups: float32 [R, COLUMNS / 64]."""
    words, sum_x = tile[0], sum_x[None, :]
    R: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    if EMULATED:
        sums = tl.sum((values(tile).to(tl.float32) * x[None, :]).reshape(R, G, 32), 2)
    else:
        args = (words,) + fp8.split_4(x.reshape(G, 4, 4).permute(0, 2, 1))
        sums = tl.inline_asm_elementwise(
            _PACKED_ASM, _PACKED_REGISTERS, args, dtype=tl.int8, is_pure=True, pack=4
        )
        if len(tile) == 3:
            scale, minimum = fp8.scale_and_minimum(tile[1:], 24, 6)
            sums = scale * 1048576.0 * fp8.as_floats(sums) + minimum * sum_x
        else:
            scale, zero = _scale_and_zero(tile[1], 20)
            sums = scale * (fp8.as_floats(sums) - zero * sum_x)
    return tl.sum(sums.reshape(R, G // 2, 2), 2)


@jit
def _columns(places, K: tl.constexpr):
    """See Format.columns. Groups 2 i and 2 i + 1 of a block belong to the same thread: the first
    has columns 64 j + 8 i to 64 j + 8 i + 7, j from 0 to 3, the second those 32 further on. Columns
    beyond the last whole block are in order."""
    quarter, half, thread = places % 32 // 8, places // 32 % 2, places // 64 % 4
    columns = places // 256 * 256 + quarter * 64 + half * 32 + thread * 8 + places % 8
    return columns if K % 256 == 0 else tl.where(places < K // 256 * 256, columns, places)


# What formats of 4-bit codes share
KERNEL = dict(
    values=values,
    gain=1.0,
    packed_load=packed_load,
    packed_sums=_packed_sums,
    sum_x=32,
    neighbours=64,
    peak=16384.0,
)
INT4 = Int4("int4", 4, load, columns=_columns, group=GROUP, whole=BLOCK, bound=2.0**-4, **KERNEL)
