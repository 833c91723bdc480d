"""Matrices that other programs have quantised: how they lie in files, and the formats that hold
them as they are.

First the blocks of ggml, llama.cpp's library of tensors. The numbers of its types, and how large a
block is, are in extra/gguf.py. Sources: ggml-common.h and ggml-quants.c."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import fp8
from extra import gguf, int4
from fp8 import Format, Grouped, Shapes, Tensors
from launch import EMULATED, constexpr, jit, tl

# weights decoded at a time: as many as fit into a CPU's caches, which halves the time
AT_ONCE = 1 << 20


class Blocks(NamedTuple):
    """A matrix W [N, K] as codes and, for groups of neighbouring columns, numbers that are halves
    in the file. In float32 their products are exact (a half times 6 or 8 bits, times 4 to 8), so
    that W is what ggml decodes, bit for bit:

    W = scale * parts[0] * (code - zero) + minimum * parts[1]
    """

    codes: Tensor  # int8 [N, K]
    scale: Tensor  # float32 [N, groups]
    minimum: Tensor | None = None  # the same; None: 0
    # whole numbers of a byte [N, smaller groups]; None: 1
    parts: tuple[Tensor, Tensor] | None = None
    zero: Tensor | None = None  # whole numbers [N, groups]; None: 0

    def decoded(self) -> Tensor:
        """float32 [N, K]. For blocks of ggml, which have no zero points."""
        scale, minimum = self.scale, self.minimum
        if self.parts:
            scale = _in_parts(scale, self.parts[0])
            minimum = None if minimum is None else _in_parts(minimum, self.parts[1])
        values = self.codes.unflatten(1, (scale.shape[1], -1)) * scale[..., None]
        if minimum is not None:
            values += minimum[..., None]
        return values.flatten(1)


def _in_parts(groups: Tensor, parts: Tensor) -> Tensor:
    """What groups have times what their parts have: [N, G] and [N, P] to [N, P]."""
    return (groups[..., None] * parts.unflatten(1, (groups.shape[1], -1))).flatten(1)


def blocks(kind: gguf.Type, raw: Tensor) -> Blocks:
    """Rows of blocks as read, uint8 [N, bytes], on any device, to codes and scales."""
    N = len(raw)
    codes, scale, minimum, *parts = SPLIT[kind.name](raw.view(N, -1, kind.nbytes))
    flat = lambda t: None if t is None else t.reshape(N, -1)
    return Blocks(flat(codes), flat(scale), flat(minimum), tuple(map(flat, parts)) or None)


def checked(b: Blocks) -> Blocks:
    """Raise ValueError for scales and minimums that are NaN or infinite."""
    if not all(t is None or torch.isfinite(t).all() for t in (b.scale, b.minimum)):
        raise ValueError("a scale that is NaN or infinite")
    return b


# Each takes blocks, uint8 [N, B, bytes], to the parts of Blocks: codes [N, B, ...] in the order of
# the columns, others [N, B, groups]. Eight codes are handled at once, as the bytes of an int64: a
# mask clears what a shift moved from one byte to the next.

ONES = 0x0101010101010101


def _words(quants: Tensor, run: int) -> Tensor:
    """Bytes [N, B, n * run] to int64 [N, B, n, 1, run / 8]."""
    # faster than a byte at a time
    pairs = quants.view(torch.int16).clone(memory_format=torch.contiguous_format)
    return pairs.view(torch.int64).view(*quants.shape[:2], -1, 1, run // 8)


def _nibbles(quants: Tensor, run: int) -> Tensor:
    """Bytes [N, B, n * run] to codes, int64 [N, B, n, 2, run / 8]: of each run, the low nibbles,
    then the high ones."""
    words = _words(quants, run)
    return torch.cat((words & 15 * ONES, words >> 4 & 15 * ONES), -2)


def _high_bits(quants: Tensor, run: int, bits: int) -> Tensor:
    """Bytes [N, B, n * run] to int64 [N, B, n, 8 / bits, run / 8]: of each run, the lowest bits of
    each byte first, in the place of bits 4 and up."""
    shifts = torch.arange(0, 8, bits, device=quants.device)[:, None]
    return (_words(quants, run) >> shifts & (2**bits - 1) * ONES) << 4


def _five_bits(quants: Tensor) -> Tensor:
    """The fifth bits of 32 columns, from the lowest of 4 bytes up, then 16 bytes of nibbles, to
    codes int8."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    # eight bits of each byte
    table = (bits << 4).to(torch.uint8).view(torch.int64).to(quants.device)
    high = table[quants[..., :4].int(), 0].view(*quants.shape[:2], 1, 2, 2)
    return (_nibbles(quants[..., 4:], 16) | high).view(torch.int8)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The half at a byte of each block, as float32 [N, B, 1]."""
    return blocks.view(torch.float16)[..., at // 2, None].float()


def _k_scales(b: Tensor) -> Tensors:
    """Scale, minimum, and their parts [N, B, 8], of Q4_K and Q5_K: two halves times 6 bits each,
    packed in 12 bytes. The first four of either are the low 6 bits of a byte; the others have 4
    bits in the last bytes, and 2 at the top of the first."""
    low_scale, low_minimum, last = b[..., 4:16].split(4, -1)
    scale = torch.cat((low_scale & 63, last & 15 | low_scale >> 6 << 4), -1)
    minimum = torch.cat((low_minimum & 63, last >> 4 | low_minimum >> 6 << 4), -1)
    return _half(b, 0), -_half(b, 2), scale, minimum


def _q5_k(b: Tensor):
    # [N, B, 8, 4]
    codes = _nibbles(b[..., 48:], 32).flatten(2, 3) | _high_bits(b[..., 16:48], 32, 1).flatten(2, 3)
    return codes.view(torch.int8), *_k_scales(b)


def _q6_k(b: Tensor):
    """Each half of a block: 64 bytes of low nibbles, and 32 bytes of two high bits, those of
    columns i, i + 32, i + 64 and i + 96 in byte i."""
    low = _nibbles(b[..., :128], 64).view(*b.shape[:2], 2, 4, 4)
    codes = low | _high_bits(b[..., 128:192], 32, 2)
    parts = b[..., 192:208].view(torch.int8)
    return codes.view(torch.int8) - 32, _half(b, 208), None, parts, torch.zeros_like(parts)


SPLIT = {
    "Q4_0": lambda b: (_nibbles(b[..., 2:], 16).view(torch.int8) - 8, _half(b, 0), None),
    "Q4_1": lambda b: (_nibbles(b[..., 4:], 16).view(torch.int8), _half(b, 0), _half(b, 2)),
    "Q5_0": lambda b: (_five_bits(b[..., 2:]) - 16, _half(b, 0), None),
    "Q5_1": lambda b: (_five_bits(b[..., 4:]), _half(b, 0), _half(b, 2)),
    "Q8_0": lambda b: (_words(b[..., 2:], 32).view(torch.int8), _half(b, 0), None),
    "Q4_K": lambda b: (_nibbles(b[..., 16:], 32).view(torch.int8), *_k_scales(b)),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


# ---- formats that hold blocks as they are
#
#      A thread has 64 neighbouring columns of x and loads them eight at a time. If every thread of
#      a warp started with its first eight, all would hit the same banks of the L1 cache. So the
#      runs of eight that share a scale are stored rotated, by one more from thread to thread.


_rotated = jit(fp8.rotated)


@jit
def _rotated_4(places, K):
    """See Format.columns; for groups of 32 or more."""
    return _rotated(places // 8, 4) * 8 + places % 8


@jit
def _rotated_2(places, K):
    """The same for groups of 16."""
    return _rotated(places // 8, 2) * 8 + places % 8


@dataclass(frozen=True, eq=False)
class Held(Grouped):
    """Codes int8 [N, K] with the sign bit flipped, so that as unsigned bytes they are 128 more;
    float32 row [N, 1]; and for each group of columns, by `form`:

    scale    half [N, K / group]
    zero     int32 [N, K / group]: the scale, a half, above the zero point in sixteenths
    minimum  scale and minimum, halves [N, K / group]
    parts    int16 [N, K / 32]: the minimum's byte above the scale's; int32 [N, K / group]: their
             halves, likewise. If the minimum's half is 0, there is none, and its byte is the scale
             of the last 16 columns

    A row's halves are multiplied by a power of two so that the largest is at least 2^14: of those
    that were halves in the file, none loses a bit. Kernels multiply them by `unit`, so that decoded
    weights fit halves, too."""

    form: str = "scale"
    unit: float = 1.0
    middle: int = 0  # the code that stands for 0 where there is no minimum

    planes = {"codes": (torch.int8, 1)}  # tensors of codes: type, columns of an element

    def tensors(self, N: int, K: int) -> Shapes:
        found = {name: (dtype, (N, K // columns)) for name, (dtype, columns) in self.planes.items()}
        if self.form == "parts":
            found["parts"] = torch.int16, (N, K // 32)
        found["scale"] = (
            torch.int32 if self.form in ("zero", "parts") else torch.float16,
            (N, K // self.group),
        )
        if self.form == "minimum":
            found["minimum"] = found["scale"]
        return found | {"row": (torch.float32, (N, 1))}

    def codes(self, tensors: Tensors) -> Tensor:
        return tensors[0] ^ -128

    def stored(self, codes: Tensor) -> Tensors:
        return (codes ^ -128,)

    def scales(self, tensors: Tensors) -> Tensors:
        *_, first, last, row = tensors
        row = row * self.unit
        if self.form == "scale":
            return last * row, last * row * -self.middle
        if self.form == "minimum":
            return first * row, last * row
        low, high = last.view(torch.float16).unflatten(1, (-1, 2)).unbind(2)
        if self.form == "zero":
            return high * row, high * row * low.contiguous().view(torch.int16) / -16
        scale, minimum = first.view(torch.int8).unflatten(1, (-1, 2)).unbind(2)
        return _in_parts(low * row, scale), _in_parts(high * row, minimum)

    def write(self, b: Blocks, out: Tensors) -> None:
        minimum = torch.zeros_like(b.scale) if b.minimum is None else b.minimum
        peak = torch.maximum(b.scale.abs(), minimum.abs()).amax(1, keepdim=True).clamp(min=1e-30)
        up = 2.0**14 / (peak.view(torch.int32) & 0x7F800000).view(torch.float32)  # a power of two
        groups = [(b.scale * up).half(), (minimum * up).half()]
        no_minimum = groups[1] == 0
        if self.form == "scale":
            groups.pop()
        elif self.form == "zero":
            groups = [
                _joined((b.zero.to(torch.int16) * 16).view(torch.float16), groups[0]).view(
                    torch.int32
                )
            ]
        elif self.form == "parts":
            first, second = (part.to(torch.int8) for part in b.parts)
            if b.minimum is None:
                first, second = first[:, ::2], first[:, 1::2]
            else:
                second = torch.where(_spread(no_minimum, first.shape[1]), first, second)
            groups = [_joined(first, second).view(torch.int16), _joined(*groups).view(torch.int32)]
        codes = (
            b.codes + self.middle * _spread(no_minimum, b.codes.shape[1])
            if self.middle
            else b.codes
        )
        codes = self.stored(self.in_runs(codes))
        for place, value in zip(out, (*codes, *groups, 1 / (up * self.unit)), strict=True):
            place.copy_(value)


@dataclass(frozen=True, eq=False)
class Held4(int4.Codes4, Held):
    """The same with codes of 4 bits as int4.py has them: int32 [N, K / 8]."""

    planes = {"codes": (torch.int32, 8)}

    def stored(self, codes: Tensor) -> Tensors:
        return (int4.packed(codes),)


@dataclass(frozen=True, eq=False)
class Held6(Held):
    """The same with codes of 6 bits in two tensors:

    codes  int32 [N, K / 8], the lower 4 bits: word i of the two for 16 columns has pair j, columns
           4 j + 2 i and 4 j + 2 i + 1, at bits 4 j and 16 + 4 j
    high   int32 [N, K / 16], the upper 2 bits of pair j of word i at bits SHIFTS[i][j] and 16 +
           SHIFTS[i][j]

    So one AND extracts a pair's upper bits in the place where they belong, above its lower bits,
    for j = 2 and 3 after a shift by 2, which the lower bits need by 8, and for i = 1 after the two
    bytes of each half have been swapped."""

    planes = {"codes": (torch.int32, 8), "high": (torch.int32, 16)}

    def order(self, K: int, device: torch.device) -> Tensor:
        return int4.in_words(super().order(K, device), 2)

    def codes(self, tensors: Tensors) -> Tensor:
        low, high, *_ = tensors
        halves = high.view(torch.int16).unflatten(1, (-1, 1, 2, 1))
        shifts = torch.tensor(SHIFTS, dtype=torch.int16, device=high.device)[:, None]  # [i, 1, j]
        codes = int4.unpacked(low) + ((halves >> shifts & 3) << 4).flatten(1)
        return codes - self.middle * self.no_minimum(tensors, codes.shape[1])

    def scales(self, tensors: Tensors) -> Tensors:
        *_, parts, halves, row = tensors
        last = torch.where(self.no_minimum(tensors, parts.shape[1]), parts >> 8, parts)
        return super().scales((_joined(parts, last), halves, row))

    def no_minimum(self, tensors: Tensors, columns: int) -> Tensor:
        """Which of so many columns belong to groups whose minimum is 0, of either sign: bool [N,
        columns]."""
        return _spread(tensors[3] & 0x7FFF0000 == 0, columns)

    def stored(self, codes: Tensor) -> Tensors:
        # [N, K / 16, j, i, neighbours]
        upper, halves = (codes >> 4).to(torch.int16).unflatten(1, (-1, 4, 2, 2)), 0
        for i, j in itertools.product(range(2), range(4)):
            halves |= upper[:, :, j, i] << SHIFTS[i][j]
        return int4.packed(codes & 15, 2), halves.flatten(1).view(torch.int32)


SHIFTS = ((4, 8, 6, 10), (12, 0, 14, 2))  # by word i and pair j


def _spread(groups: Tensor, columns: int) -> Tensor:
    """Repeat what each group has for all of its columns: [N, G] to [N, columns]."""
    return groups.repeat_interleave(columns // groups.shape[1], 1)


def _joined(low: Tensor, high: Tensor) -> Tensor:
    """Neighbours [N, 2 G], to be viewed as wider numbers."""
    return torch.stack((low, high), 2).flatten(1)


@jit
def _load_parts(
    w, start, k, left, COLUMNS: tl.constexpr, NEIGHBOURS: tl.constexpr, GROUP: tl.constexpr
):
    """As int4.load, but the scales of 256 columns are loaded first: this order was measured."""
    scales = fp8.load_groups(w[2], start, k, left, COLUMNS, 32, GROUP)
    return int4.load(w[:2], start, k, left, COLUMNS, NEIGHBOURS, 32) + (scales,)


_held4 = partial(Held4, bits=4, unit=2.0**-24, columns=_rotated_4, turns=4, **int4.KERNEL)
Q4_0 = _held4("q4_0", load=int4.load, group=32, middle=8)
Q4_1 = _held4("q4_1", load=int4.load, group=32, form="minimum")
Q4_K = _held4("q4_k", load=_load_parts, group=256, form="parts", unit=2.0**-30)
WITH_ZEROS = {  # by columns in a group
    group: _held4(f"4-bit (groups of {group})", load=int4.load, group=group, form="zero")
    for group in (32, 64, 128)
}


@jit
def _by(sums, COUNT: tl.constexpr):
    """Sums of COUNT neighbours: [R, G] -> [R, G / COUNT]."""
    return tl.sum(sums.reshape(sums.shape[0], sums.shape[1] // COUNT, COUNT), 2)


# The same with codes of 6 bits, Held6.


def _extract6(low: str, high: str) -> str:
    """PTX that puts the four pairs of codes whose lower and upper bits are in two registers into a,
    b, c, d."""
    return (
        f"shr.u32 v, {low}, 8; shr.u32 g, {high}, 2; "
        f"and.b32 a, {high}, 0x00300030; and.b32 e, {low}, 0x000f000f; or.b32 a, a, e; "
        f"and.b32 b, {high}, 0x03000300; and.b32 e, {low}, 0x00f000f0; or.b32 b, b, e; "
        "and.b32 c, g, 0x00300030; and.b32 e, v, 0x000f000f; or.b32 c, c, e; "
        "and.b32 d, g, 0x03000300; and.b32 e, v, 0x00f000f0; or.b32 d, d, e;"
    )


_VALUES6_ASM = constexpr(int4.values_asm(_extract6("$4", "$5"), 6))
_VALUES6_REGISTERS = constexpr("=&r,=&r,=&r,=&r" + 5 * ",r")
# For one token: two words of lower bits are in $1 and $2, the upper bits of both in $3 and, once
# more, in $4
_WORDS6 = ["prmt.b32 swapped, $4, 0, 0x2301; " + _extract6("$1", "$3"), _extract6("$2", "swapped")]
_PACKED6_ASM = constexpr(
    int4.sums_asm(_WORDS6, "cvt.f32.f16 f, l; cvt.f32.f16 $0, u; add.f32 $0, $0, f;")
)
_PACKED6_REGISTERS = constexpr("=&r" + 12 * ",r")


@jit
def _halved(parts, halves):
    """Scale's part and halves for each 16 columns, from what is stored for each 32: [R, M] -> [R, 2
    M]."""
    last = tl.where(halves & 0x7FFF0000 == 0, parts >> 8, parts)
    shape: tl.constexpr = [parts.shape[0], 2 * parts.shape[1]]
    return tl.join(parts, last).reshape(shape), tl.join(halves, halves).reshape(shape)


@jit
def _load6(w, start, k, left, COLUMNS: tl.constexpr, NEIGHBOURS: tl.constexpr, GROUP: tl.constexpr):
    codes = int4.load_codes(w, start, k, left, COLUMNS).reshape(start.shape[0], COLUMNS // 16, 2)
    high = fp8.load_groups(w[1], start, k, left, COLUMNS, 16, 16)
    parts = fp8.load_groups(w[2], start, k, left, COLUMNS, 32, 32)
    return (codes, high) + _halved(parts, fp8.load_groups(w[3], start, k, left, COLUMNS, 32, GROUP))


@jit
def _scales6(tile, EXPONENT: tl.constexpr):
    """What a code is multiplied by, and what is added: [R, COLUMNS / 16]."""
    scale, minimum = fp8.scale_and_minimum(tile[2:], EXPONENT, 7)
    return scale, tl.where(tile[3] & 0x7FFF0000 == 0, -32 * scale, minimum)


@jit
def _values6(tile):
    """Halves [R, COLUMNS]."""
    swapped = ((tile[1] & 0x00FF00FF) << 8) | ((tile[1] >> 8) & 0x00FF00FF)
    codes, high = int4.halves_of(tile[0]), int4.halves_of(tl.join(tile[1], swapped))
    factors = int4.factors_of(*_scales6(tile, 24))
    if EMULATED:
        y0, y1 = (codes & 15) | (high & 48), (codes >> 4 & 15) | (high >> 4 & 48)
        y2, y3 = (codes >> 8 & 15) | (high >> 2 & 48), (codes >> 12 & 15) | (high >> 6 & 48)
        return int4.emulated_values(y0, y1, y2, y3, factors)
    else:
        return int4.run_values_asm((codes, high), factors, _VALUES6_ASM, _VALUES6_REGISTERS)


@jit
def _packed_load6(w, start, k, left, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    codes = int4.load_codes(w, start, k, left, COLUMNS).reshape(start.shape[0], COLUMNS // 16, 2)
    high = int4.load_words(w[1], start, k, left, COLUMNS, 16, 4)
    parts = int4.packed_groups(w[2], start, k, left, COLUMNS, 32)
    scale = int4.packed_groups(w[3], start, k, left, COLUMNS, GROUP)
    return (codes, high) + _halved(parts, scale)


@jit
def _packed_sums6(tile, x, sum_x):
    """Products with x, added up by 64 columns: float32 [R, COLUMNS / 64]."""
    words, high = tile[0], tile[1]
    if EMULATED:
        return _by(_values6(tile) * x[None, :], 64)
    else:
        args = (words, tl.join(high, high)) + fp8.split_4(
            x.reshape(words.shape[1], 4, 2).permute(0, 2, 1)
        )
        sums = tl.inline_asm_elementwise(
            _PACKED6_ASM, _PACKED6_REGISTERS, args, dtype=tl.float16, is_pure=True, pack=2
        )
        sums = fp8.pairs(*tl.split(sums)).to(tl.float32, bitcast=True)
        scale, minimum = _scales6(tile, 4)
        return _by(scale * sums + minimum * (sum_x * 2.0**-20)[None, :], 4)


Q6_K = Held6(
    "q6_k", 6, _load6, _values6, gain=1.0, packed_load=_packed_load6, packed_sums=_packed_sums6,
    columns=_rotated_2, turns=2, neighbours=64, peak=16384.0, group=256, form="parts", middle=32,
    unit=2.0**-31,
)  # fmt: skip


# The same with int8 codes. A thread has 8 or 16 neighbours and the scale of their group; for one
# token it has 64 columns, as with 4 bits, and loads codes as int32, four to a word.

# Two of four codes as halves p: with 0x64 above it, a byte stands for 1024 more; 1024 + 128 are
# subtracted
_HALVES = "mov.b32 q, 0x64806480; prmt.b32 p, SOURCE, 0x64646464, ORDER; sub.f16x2 p, p, q; "
_HALVES_OF = [_HALVES.replace("ORDER", order) for order in ("0x4140", "0x4342")]
_SUMS_ASM = constexpr(fp8.words_asm(*_HALVES_OF))
_PRODUCTS = [
    f"{half.replace('SOURCE', '$2')}fma.rn.f16x2 ${i}, p, ${3 + i}, ${5 + i}; "
    for i, half in enumerate(_HALVES_OF)
]
_VALUES_ASM = constexpr(f"{{ .reg .b32 p, q; {''.join(_PRODUCTS)} }}")


@jit
def _values8(tile):
    """Halves [R, COLUMNS]."""
    scale, minimum = fp8.scale_and_minimum(tile[1:], 8, 0)
    scale, minimum = scale.to(tl.float16)[:, :, None], minimum.to(tl.float16)[:, :, None]
    codes = tile[0].reshape(scale.shape[0], scale.shape[1], tile[0].shape[1] // scale.shape[1])
    if EMULATED:
        y = (codes ^ -128).to(tl.float32) * scale.to(tl.float32) + minimum.to(tl.float32)
    else:
        args = [codes, scale, minimum]
        y = tl.inline_asm_elementwise(
            _VALUES_ASM, "=&r,=&r,r,r,r,r,r", args, tl.float16, is_pure=True, pack=4
        )
    return y.reshape(tile[0].shape)


@jit
def _sums_of_16(words, x, VALUES: tl.constexpr, ASM: tl.constexpr):
    """Products of codes with x, added up: float32 [R, COLUMNS / 16]."""
    if EMULATED:
        codes = tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24)).to(tl.int8)
        return _by(
            VALUES(codes.reshape(words.shape[0], words.shape[1] * 16)).to(tl.float32) * x[None, :],
            16,
        )
    else:
        first, last = tl.split(x.reshape(words.shape[1], 4, 2))
        args = [words, first[None], last[None]]
        sums = tl.inline_asm_elementwise(
            ASM, fp8.WORDS_REGISTERS, args, dtype=tl.int8, is_pure=True, pack=4
        )
        return fp8.as_floats(sums)


@jit
def _signed(codes):
    return codes ^ -128


@jit
def _packed_sums8(tile, x, sum_x):
    """Products with x, added up by 64 columns: float32 [R, COLUMNS / 64]."""
    scale, minimum = fp8.scale_and_minimum(tile[1:], 8, 0)
    EACH: tl.constexpr = tile[0].shape[1] // scale.shape[1]
    sums = scale * _by(_sums_of_16(tile[0], x, _signed, _SUMS_ASM), EACH)
    if len(tile) == 3:
        sums += minimum * _by(sum_x[None, :], EACH)
    return _by(sums, 4 // EACH)


KERNEL = dict(columns=_rotated_4, turns=4, neighbours=64)
_held8 = partial(
    Held, bits=8, load=int4.load, packed_load=int4.packed_load, values=_values8, gain=1.0,
    packed_sums=_packed_sums8, group=32, unit=2.0**-8, **KERNEL,
)  # fmt: skip
Q8_0 = _held8("q8_0")
Q8_1 = _held8("q8_1", form="minimum")
HOLDS = {  # types of ggml
    Q4_0: {"Q4_0"}, Q4_1: {"Q4_1"}, Q4_K: {"Q4_K"}, Q8_0: {"Q8_0", "Q5_0", "Q4_0"},
    Q8_1: {"Q8_0", "Q5_0", "Q4_0", "Q5_1", "Q4_1"}, Q6_K: {"Q6_K", "Q5_K", "Q4_K"},
}  # fmt: skip


# E4M3 with a scale for each 128 columns of a row, as checkpoints have one for each 128 x 128
# weights


@dataclass(frozen=True, eq=False)
class Float8Groups(Grouped):
    """int8 codes [N, K] and float32 scales [N, K / 128]."""

    def on(self, device: torch.device) -> Format:
        return E4M3_128_NATIVE if fp8.E4M3.on(device) is fp8.E4M3_NATIVE else self

    def tensors(self, N: int, K: int) -> Shapes:
        return {"codes": (torch.int8, (N, K)), "scale": (torch.float32, (N, K // 128))}

    def codes(self, tensors: Tensors) -> Tensor:
        return fp8.E4M3.halves(tensors[0]).float().mul_(256)

    def scales(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        return tensors[1], torch.zeros_like(tensors[1])

    def write(self, b: Blocks, out: Tensors) -> None:
        fp8.Float8.write(self, b._replace(codes=self.in_runs(b.codes)), out)


@jit
def _scaled(values, scale):
    """Values [R, COLUMNS] times the scales of their groups [R, G]: floats."""
    groups = values.to(tl.float32).reshape(
        values.shape[0], scale.shape[1], values.shape[1] // scale.shape[1]
    )
    return (groups * scale[:, :, None]).reshape(values.shape)


@jit
def _values_e4m3(tile):
    return _scaled(fp8.e4m3_values(tile[0]), tile[1] * 256.0)


@jit
def _packed_load_e4m3(w, start, k, left, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    return int4.load_codes(w, start, k, left, COLUMNS), fp8.load_groups(
        w[1], start, k, left, COLUMNS, 64, GROUP
    )


_E4M3_ASM, _NATIVE_ASM = (
    constexpr(fp8.words_asm(*halves)) for halves in (fp8.E4M3_HALVES, fp8.NATIVE_HALVES)
)


@jit
def _sums_e4m3(tile, x, sum_x):
    return _by(_sums_of_16(tile[0], x, fp8.e4m3_values, _E4M3_ASM), 4) * tile[1] * 256.0


@jit
def _values_native(tile):
    return _scaled(fp8.native_values(tile[0]), tile[1])


@jit
def _sums_native(tile, x, sum_x):
    return _by(_sums_of_16(tile[0], x, fp8.native_values, _NATIVE_ASM), 4) * tile[1]


E4M3_128 = Float8Groups(
    "e4m3 (groups of 128)", 8, int4.load, _values_e4m3, packed_load=_packed_load_e4m3,
    packed_sums=_sums_e4m3,
    group=128, **KERNEL,
)  # fmt: skip
E4M3_128_NATIVE = replace(E4M3_128, values=_values_native, packed_sums=_sums_native)


# ---- layouts of safetensors


class Layout(NamedTuple):
    """How other programs store a matrix W [N, K], N a multiple of 8, in tensors that have its name,
    but for the last word: "weight"."""

    name: str
    format: Format  # that holds it
    tensors: Callable  # (N, K) -> by the last word, codes first, possible types and shapes
    blocks: Callable  # tensors, by the last word -> Blocks of the whole matrix
    group: int = -1  # columns that share a scale; -1: all
    optional: tuple[str, ...] = ()


def decoded(kind: gguf.Type | Layout, b: Blocks) -> Tensor:
    """float32 [N, K]."""
    if isinstance(kind, gguf.Type):
        return b.decoded()
    kind.format.write(b, tensors := kind.format.empty(*b.codes.shape, b.codes.device))
    return kind.format.decoded(tensors)


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INT32 = (torch.int32,)


def _held_in(group: int) -> Format:
    """The format for groups of so many columns, a multiple of 32, of which several may share a
    scale; -1: a row is one group."""
    return WITH_ZEROS[next(size for size in (128, 64, 32) if group == -1 or group % size == 0)]


def _blocks4(format: Format, codes: Tensor, scale: Tensor, zero: Tensor) -> Blocks:
    """Scales and zero points [N, G] are repeated for the groups that the format has."""
    each = lambda t: t.repeat_interleave(codes.shape[1] // format.group // t.shape[1], 1)
    return Blocks(codes, each(scale.float()), zero=each(zero))


def _gemm(group: int, N: int, K: int, codes: tuple[int, int]) -> dict:
    """What AWQ and GPTQ store."""
    G = max(1, K // group)
    return {
        "qweight": (INT32, [codes]),
        "qzeros": (INT32, [(G, N // 8)]),
        "scales": (FLOATS, [(G, N)]),
    }


def awq(group: int) -> Layout:
    """AutoAWQ's "gemm": columns of W^T, of each eight in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    format = _held_in(group)

    def blocks(t: dict[str, Tensor]) -> Blocks:
        in_order = lambda t: (
            int4.nibbles(t).unflatten(1, (-1, 8))[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1).t()
        )
        return _blocks4(format, in_order(t["qweight"]), t["scales"].t(), in_order(t["qzeros"]))

    return Layout("AWQ", format, lambda N, K: _gemm(group, N, K, (K, N // 8)), blocks, group)


def gptq(group: int, version_2: bool) -> Layout:
    """GPTQ without act-order: rows of W, packed along K. Zero points are stored less 1, in version
    2 as they are; files that say the wrong version are known by zero points that are all 8. Older
    files have a bias of zeros everywhere."""
    format = _held_in(group)

    def tensors(N: int, K: int) -> dict:
        return _gemm(group, N, K, (K // 8, N)) | {
            "g_idx": (INT32, [(K,)]),
            "bias": (FLOATS, [(N,)]),
        }

    def blocks(t: dict[str, Tensor]) -> Blocks:
        codes, zero = int4.nibbles(t["qweight"].t()), int4.nibbles(t["qzeros"]).t()
        check_order(t.get("g_idx"), codes.shape[1], zero.shape[1])
        if "bias" in t and t["bias"].any():
            raise ValueError("a bias, which this architecture does not have")
        if ((zero == 7).all() | (zero == 8).all()).item():
            zero = torch.full_like(zero, 8)
        # 1 was subtracted in whole words, so a zero point of 0 has borrowed from the next one
        elif not version_2:
            zero = int4.nibbles(t["qzeros"] + 0x11111111).t()
        return _blocks4(format, codes, t["scales"].t(), zero)

    return Layout("GPTQ", format, tensors, blocks, group, ("g_idx", "bias"))


def check_order(g_idx: Tensor | None, K: int, groups: int) -> None:
    """Raise ValueError if neighbouring columns are not in one group."""
    if g_idx is not None and not torch.equal(g_idx.cpu(), (torch.arange(K) // (K // groups)).int()):
        raise ValueError(
            "columns in act-order, which is not supported: take a GPTQ without desc_act, an AWQ or a GGUF"
        )


def packed(group: int, symmetric: bool) -> Layout:
    """compressed-tensors' "pack-quantized": rows of W, packed along K; zero points, if there are
    any, along N."""
    format = _held_in(group)

    def tensors(N: int, K: int) -> dict:
        G = max(1, K // group)
        found = {"weight_packed": (INT32, [(N, K // 8)]), "weight_scale": (FLOATS, [(N, G)])}
        zero = {} if symmetric else {"weight_zero_point": (INT32, [(N // 8, G)])}
        return found | zero | {"weight_g_idx": (INT32, [(K,)])}

    def blocks(t: dict[str, Tensor]) -> Blocks:
        codes, scale = int4.nibbles(t["weight_packed"]), t["weight_scale"]
        check_order(t.get("weight_g_idx"), codes.shape[1], scale.shape[1])
        zero = (
            torch.full_like(scale, 8) if symmetric else int4.nibbles(t["weight_zero_point"].t()).t()
        )
        return _blocks4(format, codes, scale, zero)

    return Layout("W4A16", format, tensors, blocks, group, ("weight_g_idx",))


def fp8_scaled(scale: str, in_blocks: bool) -> Layout:
    """E4M3 codes, to be multiplied (despite the name "weight_scale_inv") by one scale for the
    matrix, one for each row, or one for each 128 x 128 weights."""

    def tensors(N: int, K: int) -> dict:
        shapes = [(-(-N // 128), -(-K // 128))] if in_blocks else [(N, 1), (1,), (N,), (1, 1)]
        return {"weight": ((torch.float8_e4m3fn,), [(N, K)]), scale: (FLOATS, shapes)}

    def blocks(t: dict[str, Tensor]) -> Blocks:
        codes, factor = t["weight"].view(torch.int8), t[scale].float()
        if ((codes & 0x7F) == 0x7F).any():
            raise ValueError("codes of NaN")
        if in_blocks:
            return Blocks(codes, factor.repeat_interleave(128, 0)[: len(codes)])
        return Blocks(codes, factor.reshape(-1, 1).expand(len(codes), 1))

    return Layout(
        "FP8", E4M3_128 if in_blocks else fp8.E4M3, tensors, blocks, 128 if in_blocks else -1
    )


def format_for(
    kinds: set[gguf.Type | Layout | None], columns: int, most_bits: int = 8
) -> Format | None:
    """The smallest format that holds matrices of all of these types of ggml, or of this layout,
    exactly, side by side and cut to so many columns; None if there is none."""
    (kind, *others) = kinds
    fits = lambda format: (
        (format.bits <= most_bits or format.group == 1) and columns % format.group == 0
    )
    if isinstance(kind, Layout):
        return None if others or not fits(kind.format) else kind.format
    names = {kind.name if kind else "" for kind in kinds}
    return next((format for format, held in HOLDS.items() if names <= held and fits(format)), None)
