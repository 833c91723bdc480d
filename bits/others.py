"""Step 7 of loading (see loading/checkpoint.py): the formats that keep matrices exactly as other programs
have quantised them. loading/quantised.py reads files into formats.Quantised, which these formats
store."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fp8
from bits import codes4
from bits.groups import (
    Grouped,
    half2_of,
    half_at,
    int16_of,
    load_all_groups,
    load_codes,
    load_groups,
    load_two_groups,
    load_words,
    rotated,
    stream_load,
    sums_of,
)
from formats import (
    Format,
    Quantised,
    Shapes,
    Tensors,
    as_floats,
    half2_products,
    in_parts,
    load_elements,
    split_4,
)
from launch import EMULATED, constexpr, jit, tl

# A thread has 64 neighbouring columns of x and loads them eight at a time. If every thread of
# a warp started with its first eight, all would hit the same banks of the L1 cache. So the
# runs of eight that share a scale are stored rotated, by one more from thread to thread.


_rotated = jit(rotated)


@jit
def _rotated_4(places, K):
    """See Format.column_at; for groups of 32 or more."""
    return _rotated(places // 8, 4) * 8 + places % 8


@jit
def _rotated_2(places, K):
    """See Format.column_at; for groups of 16."""
    return _rotated(places // 8, 2) * 8 + places % 8


def spread(groups: Tensor, columns: int) -> Tensor:
    """Repeat each group's number for all of its columns: [N, G] to [N, columns]."""
    return groups.repeat_interleave(columns // groups.shape[1], 1)


def _joined(low: Tensor, high: Tensor) -> Tensor:
    """Interleave two tensors [N, G] to [N, 2 G]. Neighbours can then be viewed as one wider
    number."""
    return torch.stack((low, high), 2).flatten(1)


class Scaling:
    """A way to store the scales and minimums of groups. This class is the simplest one, for formats
    without minimums: scales as halves [N, K / group]."""

    def shapes(self, N: int, K: int, group: int) -> Shapes:
        """The type and shape of each tensor, see Format.shapes."""
        return {"scale": (torch.float16, (N, K // group))}

    def encode(self, rows: Quantised, scale: Tensor, minimum: Tensor) -> Tensors:
        """The tensors to store. scale, minimum: those of the rows, multiplied so that they fit
        halves."""
        return (scale,)

    def scales(self, tensors: Tensors, row: Tensor, middle: int) -> Tensors:
        """Scales and minimums, float32 [N, groups], times `row` [N, 1]. middle: see FileGroups."""
        (scale,) = tensors
        return scale * row, scale * row * -middle


class Minimum(Scaling):
    """Scales and minimums, halves [N, K / group]."""

    def shapes(self, N: int, K: int, group: int) -> Shapes:
        halves = torch.float16, (N, K // group)
        return {"scale": halves, "minimum": halves}

    def encode(self, rows: Quantised, scale: Tensor, minimum: Tensor) -> Tensors:
        return scale, minimum

    def scales(self, tensors: Tensors, row: Tensor, middle: int) -> Tensors:
        scale, minimum = tensors
        return scale * row, minimum * row


class Zero(Scaling):
    """int32 [N, K / group]: the scale, a half, above the zero point in sixteenths."""

    def shapes(self, N: int, K: int, group: int) -> Shapes:
        return {"scale": (torch.int32, (N, K // group))}

    def encode(self, rows: Quantised, scale: Tensor, minimum: Tensor) -> Tensors:
        sixteenths = rows.zero.to(torch.int16) * 16
        return (_joined(sixteenths.view(torch.float16), scale).view(torch.int32),)

    def scales(self, tensors: Tensors, row: Tensor, middle: int) -> Tensors:
        sixteenths, scale = tensors[0].view(torch.int16).unflatten(1, (-1, 2)).unbind(2)
        scale = scale.contiguous().view(torch.float16) * row
        return scale, scale * sixteenths / -16


class Parts(Scaling):
    """int16 [N, K / 32] holds the scale's byte and, above it, the minimum's. int32 [N, K / group]
    holds the halves by which these are multiplied, in the same order. If the minimum's half is 0,
    there is no minimum, and its byte is the scale of the last 16 columns."""

    def shapes(self, N: int, K: int, group: int) -> Shapes:
        return {"parts": (torch.int16, (N, K // 32)), "scale": (torch.int32, (N, K // group))}

    def encode(self, rows: Quantised, scale: Tensor, minimum: Tensor) -> Tensors:
        first, second = (part.to(torch.int8) for part in rows.parts)
        if rows.minimum is None:  # `first` is for each 16 columns, two in a row
            parts = first.contiguous()
        else:
            no_minimum = spread(minimum == 0, first.shape[1])
            parts = _joined(first, torch.where(no_minimum, first, second))
        return parts.view(torch.int16), _joined(scale, minimum).view(torch.int32)

    def scales(self, tensors: Tensors, row: Tensor, middle: int) -> Tensors:
        parts, halves = tensors
        scale, minimum = halves.view(torch.float16).unflatten(1, (-1, 2)).unbind(2)
        low, high = parts.view(torch.int8).unflatten(1, (-1, 2)).unbind(2)
        return in_parts(scale * row, low), in_parts(minimum * row, high)


class PartsOf16(Scaling):
    """int16 [N, K / 16] holds the scale's byte and, above it, the minimum's; int32 [N, K / group] the
    halves by which these are multiplied, in the same order."""

    def shapes(self, N: int, K: int, group: int) -> Shapes:
        return {"parts": (torch.int16, (N, K // 16)), "scale": (torch.int32, (N, K // group))}

    def encode(self, rows: Quantised, scale: Tensor, minimum: Tensor) -> Tensors:
        count = rows.codes.shape[1] // 16
        first, second = (spread(part.to(torch.int8), count) for part in rows.parts)
        return _joined(first, second).view(torch.int16), _joined(scale, minimum).view(torch.int32)

    def scales(self, tensors: Tensors, row: Tensor, middle: int) -> Tensors:
        return Parts().scales(tensors, row, middle)


@dataclass(frozen=True, eq=False)
class FileGroups(Grouped):
    """Three things are stored: the codes of a file, int8 [N, K] with the sign bit flipped, so that
    as unsigned bytes they are 128 more; what `scaling` stores for their groups; and a factor for
    each row, float32 [N, 1].

    The halves of a row are multiplied by a power of two, such that the largest is at least 2^14.
    Those that were halves in the file lose no bit. Kernels multiply them by `unit`. With codes of
    4 bits, codes4.factors_of makes them 2^24 times as large, which must still fit a half: so `unit`
    is 2^-24 or less if the scales are the halves themselves."""

    mixed = True

    scaling: Scaling = Scaling()
    unit: float = 1.0
    middle: int = 0  # the code that stands for 0 where there is no minimum

    def code_shapes(self, N: int, K: int) -> Shapes:
        return {"codes": (torch.int8, (N, K))}

    def encode_codes(self, codes: Tensor) -> Tensors:
        return (codes ^ -128,)

    def codes(self, tensors: Tensors) -> Tensor:
        return tensors[0] ^ -128

    def shapes(self, N: int, K: int) -> Shapes:
        groups = self.scaling.shapes(N, K, self.group)
        return self.code_shapes(N, K) | groups | {"row": (torch.float32, (N, 1))}

    def scales(self, tensors: Tensors) -> Tensors:
        _, *groups, row = tensors
        return self.scaling.scales(tuple(groups), row * self.unit, self.middle)

    def write(self, rows: Quantised, out: Tensors) -> None:
        minimum = rows.minimum
        if minimum is None:
            minimum = torch.zeros_like(rows.scale)
        peak = torch.maximum(rows.scale.abs(), minimum.abs()).amax(1, keepdim=True)
        peak = peak.clamp(min=1e-30)
        up = 2.0**14 / (peak.view(torch.int32) & 0x7F800000).view(torch.float32)  # a power of two
        scale = (rows.scale * up).half()
        minimum = (minimum * up).half()
        codes = rows.codes
        if self.middle:
            codes = codes + self.middle * spread(minimum == 0, codes.shape[1])
        values = (
            *self.encode_codes(self.in_runs(codes)),
            *self.scaling.encode(rows, scale, minimum),
            1 / (up * self.unit),
        )
        for place, value in zip(out, values, strict=True):
            place.copy_(value)


# ---- codes of 4 bits


@dataclass(frozen=True, eq=False)
class FileGroups4(codes4.Codes4, FileGroups):
    """FileGroups with codes of 4 bits, stored as bits/codes4.py describes: int32 [N, K / 8]."""

    def code_shapes(self, N: int, K: int) -> Shapes:
        return {"codes": (torch.int32, (N, K // 8))}

    def encode_codes(self, codes: Tensor) -> Tensors:
        return (codes4.to_words(codes),)


ROTATED = dict(column_at=_rotated_4, turns=4)  # what formats with groups of 32 or more share


# Q4_0: a scale for each 32 columns; the zero point is 8


@jit
def _q4_0_scales(tile, SHIFT: tl.constexpr):
    return tile[1].to(tl.float32) * (2.0 ** (SHIFT - 24)), 128 * 2.0**-24


Q4_0 = FileGroups4(
    "q4_0",
    bits=4,
    load=codes4.load,
    values=codes4.values_with_zero,
    scales_of=_q4_0_scales,
    stream_sums=codes4.stream_sums_with_zero,
    group=32,
    groups=(32,),
    middle=8,
    unit=2.0**-24,
    **codes4.STREAMED,
    **ROTATED,
)


# Q4_1: a scale and a minimum for each 32 columns


@jit
def _q4_1_scales(tile, SHIFT: tl.constexpr):
    scale = tile[1].to(tl.float32) * (2.0 ** (SHIFT - 24))
    return scale, tile[2].to(tl.float32) * (2.0 ** (SHIFT - 24))


Q4_1 = FileGroups4(
    "q4_1",
    bits=4,
    load=codes4.load,
    values=codes4.values_with_minimum,
    scales_of=_q4_1_scales,
    stream_sums=codes4.stream_sums_with_minimum,
    group=32,
    groups=(32, 32),
    scaling=Minimum(),
    unit=2.0**-24,
    **codes4.STREAMED,
    **ROTATED,
)


# Q4_K: Parts for each 32 columns of 256


@jit
def _scales_of_parts(parts, halves, EXPONENT: tl.constexpr):
    """Scales and minimums times 2^-EXPONENT, see Parts."""
    parts = parts.to(tl.int32)
    scale = half_at(halves, EXPONENT)
    minimum = half_at(halves >> 16, EXPONENT)
    return scale * ((parts << 24) >> 24).to(tl.float32), minimum * (parts >> 8).to(tl.float32)


@jit
def _q4_k_load(
    w, start, k, left, COLUMNS: tl.constexpr, NEIGHBOURS: tl.constexpr, FORMAT: tl.constexpr
):
    """As codes4.load, but the halves first: of the orders that were measured, this one is the
    fastest."""
    halves = load_groups(w[2], start, k, left, COLUMNS, 32, FORMAT.groups[1])
    codes = load_codes(w[0], start, k, left, COLUMNS, 8)
    return codes, load_groups(w[1], start, k, left, COLUMNS, 32, FORMAT.groups[0]), halves


@jit
def _q4_k_scales(tile, SHIFT: tl.constexpr):
    return _scales_of_parts(tile[1], tile[2], 30 - SHIFT)


Q4_K = replace(
    Q4_1,
    name="q4_k",
    load=_q4_k_load,
    scales_of=_q4_k_scales,
    group=256,
    groups=(32, 256),
    scaling=Parts(),
    unit=2.0**-30,
)


# AWQ, GPTQ, W4A16: a scale and a zero point for each 32, 64 or 128 columns


@jit
def _zero_scales(tile, SHIFT: tl.constexpr):
    return half_at(tile[1] >> 16, 24 - SHIFT), half_at(tile[1], 0)


def _with_zeros(group: int) -> FileGroups4:
    return FileGroups4(
        f"4-bit (groups of {group})",
        bits=4,
        load=codes4.load,
        values=codes4.values_with_zero,
        scales_of=_zero_scales,
        stream_sums=codes4.stream_sums_with_zero,
        group=group,
        groups=(group,),
        scaling=Zero(),
        unit=2.0**-24,
        **codes4.STREAMED,
        **ROTATED,
    )


WITH_ZEROS = {group: _with_zeros(group) for group in (32, 64, 128)}  # by columns of a group


# ---- codes of 6 bits: Q6_K, with Parts for each 16 or 32 columns of 256

SHIFTS = ((4, 8, 6, 10), (12, 0, 14, 2))  # of the upper bits, by word i and pair j


@dataclass(frozen=True, eq=False)
class FileGroups6(FileGroups):
    """FileGroups with codes of 6 bits in two tensors:

    codes  int32 [N, K / 8], the lower 4 bits: word i of the two for 16 columns has pair j, columns
           4 j + 2 i and 4 j + 2 i + 1, at bits 4 j and 16 + 4 j
    high   int32 [N, K / 16], the upper 2 bits of pair j of word i at bits SHIFTS[i][j] and 16 +
           SHIFTS[i][j]

    So one AND extracts a pair's upper bits in the place where they belong, above its lower bits,
    for j = 2 and 3 after a shift by 2, which the lower bits need by 8, and for i = 1 after the two
    bytes of each half have been swapped."""

    codes_each: int = 8

    def code_shapes(self, N: int, K: int) -> Shapes:
        return {"codes": (torch.int32, (N, K // 8)), "high": (torch.int32, (N, K // 16))}

    def encode_codes(self, codes: Tensor) -> Tensors:
        # [N, K / 16, j, i, neighbours]
        upper = (codes >> 4).to(torch.int16).unflatten(1, (-1, 4, 2, 2))
        high = 0
        for i, j in itertools.product(range(2), range(4)):
            high |= upper[:, :, j, i] << SHIFTS[i][j]
        return codes4.to_words(codes & 15, 2), high.flatten(1).view(torch.int32)

    def order(self, K: int, device: torch.device) -> Tensor:
        return codes4.word_order(super().order(K, device), 2)

    def codes(self, tensors: Tensors) -> Tensor:
        low, high, _, halves, _ = tensors
        pairs = high.view(torch.int16).unflatten(1, (-1, 1, 2, 1))
        shifts = torch.tensor(SHIFTS, dtype=torch.int16, device=high.device)[:, None]  # [i, 1, j]
        codes = codes4.from_words(low) + ((pairs >> shifts & 3) << 4).flatten(1)
        return codes - self.middle * _without_minimum(halves, codes.shape[1])

    def scales(self, tensors: Tensors) -> Tensors:
        _, _, parts, halves, row = tensors
        # The scales of both halves of each 32 columns, which are equal if there is a minimum
        last = torch.where(_without_minimum(halves, parts.shape[1]), parts >> 8, parts)
        return self.scaling.scales((_joined(parts, last), halves), row * self.unit, self.middle)


def _without_minimum(halves: Tensor, columns: int) -> Tensor:
    """Which columns belong to groups whose minimum is 0, of either sign: bool [N, columns]."""
    return spread(halves & 0x7FFF0000 == 0, columns)


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


_VALUES6_ASM = constexpr(codes4.values_asm(_extract6("$4", "$5"), 6))
_VALUES6_REGISTERS = constexpr("=&r,=&r,=&r,=&r" + 5 * ",r")
# For one token: two words of lower bits are in $1 and $2, the upper bits of both in $3 and, once
# more, in $4
_WORDS6 = ["prmt.b32 swapped, $4, 0, 0x2301; " + _extract6("$1", "$3"), _extract6("$2", "swapped")]
_SUMS6_ASM = constexpr(
    codes4.sums_asm(_WORDS6, "cvt.f32.f16 f, l; cvt.f32.f16 $0, u; add.f32 $0, $0, f;")
)
_SUMS6_REGISTERS = constexpr("=&r" + 12 * ",r")


@jit
def _for_each_16(parts, halves):
    """The scale's part and the halves for each 16 columns, from those for each 32: [R, M] to
    [R, 2 M]."""
    last = tl.where(halves & 0x7FFF0000 == 0, parts >> 8, parts)
    shape: tl.constexpr = [parts.shape[0], 2 * parts.shape[1]]
    return tl.join(parts, last).reshape(shape), tl.join(halves, halves).reshape(shape)


@jit
def _q6_k_load(
    w, start, k, left, COLUMNS: tl.constexpr, NEIGHBOURS: tl.constexpr, FORMAT: tl.constexpr
):
    """Lower bits, upper bits, parts and halves for each 16 columns."""
    low = load_codes(w[0], start, k, left, COLUMNS, 8).reshape(start.shape[0], COLUMNS // 16, 2)
    high = load_groups(w[1], start, k, left, COLUMNS, 16, 16)
    parts = load_groups(w[2], start, k, left, COLUMNS, 32, 32)
    halves = load_groups(w[3], start, k, left, COLUMNS, 32, 256)
    return (low, high) + _for_each_16(parts, halves)


@jit
def _q6_k_stream_load(w, start, k, left, COLUMNS: tl.constexpr, FORMAT: tl.constexpr):
    low = load_codes(w[0], start, k, left, COLUMNS, 8)
    low = low.reshape(low.shape[0], COLUMNS // 16, 2)
    high = load_words(w[1], start, k, left, COLUMNS, 16, 4)
    parts = load_two_groups(w[2], start, k, left, COLUMNS, 32)
    halves = load_two_groups(w[3], start, k, left, COLUMNS, 256)
    return (low, high) + _for_each_16(parts, halves)


@jit
def _q6_k_scales(tile, SHIFT: tl.constexpr):
    """Without a minimum, 32 stands for 0."""
    scale, minimum = _scales_of_parts(tile[2], tile[3], 31 - SHIFT)
    return scale, tl.where(tile[3] & 0x7FFF0000 == 0, -32 * scale, minimum)


@jit
def _q6_k_halves(low, high):
    """The int16 that lower and upper bits consist of; in the second word's upper bits the bytes are
    swapped."""
    swapped = ((high & 0x00FF00FF) << 8) | ((high >> 8) & 0x00FF00FF)
    return int16_of(low), int16_of(tl.join(high, swapped))


@jit
def _q6_k_codes(low, high):
    """In the interpreter: codes of the pairs 0 to 3 of each word."""
    code0 = (low & 15) | (high & 48)
    code1 = (low >> 4 & 15) | (high >> 4 & 48)
    code2 = (low >> 8 & 15) | (high >> 2 & 48)
    code3 = (low >> 12 & 15) | (high >> 6 & 48)
    return code0, code1, code2, code3


@jit
def _q6_k_values(tile, SCALES: tl.constexpr):
    low, high = _q6_k_halves(tile[0], tile[1])
    scale, minimum = SCALES(tile, 0)
    factors = codes4.factors_of(scale, minimum)
    if EMULATED:
        code0, code1, code2, code3 = _q6_k_codes(low, high)
        return codes4.emulated_values(code0, code1, code2, code3, factors)
    else:
        return codes4.run_values_asm((low, high), factors, _VALUES6_ASM, _VALUES6_REGISTERS)


@jit
def _q6_k_code_sums(words, high, x):
    """Sums of codes times x over 16 columns, times 2^-20: float32 [R, COLUMNS / 16]."""
    if EMULATED:
        low, high = _q6_k_halves(words, high)
        code0, code1, code2, code3 = _q6_k_codes(low, high)
        return sums_of(codes4.in_order(code0, code1, code2, code3) * x[None, :], 16) * 2.0**-20
    else:
        x_pairs = split_4(x.reshape(words.shape[1], 4, 2).permute(0, 2, 1))
        args = (words, tl.join(high, high)) + x_pairs
        sums = tl.inline_asm_elementwise(
            _SUMS6_ASM, _SUMS6_REGISTERS, args, dtype=tl.float16, is_pure=True, pack=2
        )
        return half2_of(*tl.split(sums)).to(tl.float32, bitcast=True)


@jit
def _q6_k_sums(tile, x, sum_x, SCALES: tl.constexpr):
    sums = _q6_k_code_sums(tile[0], tile[1], x)
    scale, minimum = SCALES(tile, 20)
    return sums_of(scale * sums + minimum * (sum_x * 2.0**-20)[None, :], 4)


Q6_K = FileGroups6(
    "q6_k",
    bits=6,
    load=_q6_k_load,
    values=_q6_k_values,
    scales_of=_q6_k_scales,
    gain=1.0,
    column_at=_rotated_2,
    turns=2,
    stream_load=_q6_k_stream_load,
    stream_sums=_q6_k_sums,
    weights_per_thread=64,
    x_peak=16384.0,
    group=256,
    scaling=Parts(),
    middle=32,
    unit=2.0**-31,
)


# ---- codes of 8 bits
#
#      A thread has 8 or 16 neighbours and the scale of their group. For one token it has 64
#      columns, as with 4 bits, and loads codes as words of four.


def _sums_asm(half2: tuple[str, str]) -> str:
    """PTX for 16 codes, in $1 to $4, times 16 halves: eight products at a time are added up in half
    precision, then to a float in $0. The half2 of x for the lower halves of these words are in $5
    to $8, those for the upper halves in $9 to $12. half2: see Format."""
    products = half2_products(half2, 4, 1, lambda word, half: 5 + 4 * half + word)
    total = "mov.b32 {a, b}, sums; cvt.f32.f16 f, a; cvt.f32.f16 $0, b; add.f32 $0, $0, f;"
    return f"{{ .reg .b16 a, b; .reg .b32 sums, p, q; .reg .f32 f; {products} {total} }}"


_SUMS_REGISTERS = constexpr("=&r" + 12 * ",r")


@jit
def _code_sums(words, x, VALUES: tl.constexpr, ASM: tl.constexpr):
    """Sums of codes times x over 16 columns: float32 [R, COLUMNS / 16]. VALUES decodes int8 in the
    interpreter, ASM is of _sums_asm."""
    if EMULATED:
        codes = tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24)).to(tl.int8)
        values = VALUES(codes.reshape(words.shape[0], words.shape[1] * 16)).to(tl.float32)
        return sums_of(values * x[None, :], 16)
    else:
        first, last = tl.split(x.reshape(words.shape[1], 4, 2))
        args = [words, first[None], last[None]]
        sums = tl.inline_asm_elementwise(
            ASM, _SUMS_REGISTERS, args, dtype=tl.int8, is_pure=True, pack=4
        )
        return as_floats(sums)


# PTX that puts two of four codes into p, as half2. With 0x64 above it, a byte is the half 1024 +
# byte; then 1024 + 128 are subtracted
_SIGNED_HALF2 = tuple(
    f"mov.b32 q, 0x64806480; prmt.b32 p, SOURCE, 0x64646464, {order}; sub.f16x2 p, p, q; "
    for order in ("0x4140", "0x4342")
)
_PRODUCTS = [
    f"{half.replace('SOURCE', '$2')}fma.rn.f16x2 ${i}, p, ${3 + i}, ${5 + i}; "
    for i, half in enumerate(_SIGNED_HALF2)
]
_VALUES8_ASM = constexpr(f"{{ .reg .b32 p, q; {''.join(_PRODUCTS)} }}")
_SUMS8_ASM = constexpr(_sums_asm(_SIGNED_HALF2))


@jit
def _signed(codes):
    return codes ^ -128


@jit
def _values8(tile, SCALES: tl.constexpr):
    scale, minimum = SCALES(tile, 0)
    scale = scale.to(tl.float16)[:, :, None]
    minimum = minimum.to(tl.float16)[:, :, None]
    codes = tile[0].reshape(scale.shape[0], scale.shape[1], tile[0].shape[1] // scale.shape[1])
    if EMULATED:
        y = _signed(codes).to(tl.float32) * scale.to(tl.float32) + minimum.to(tl.float32)
    else:
        args = [codes, scale, minimum]
        y = tl.inline_asm_elementwise(
            _VALUES8_ASM, "=&r,=&r,r,r,r,r,r", args, tl.float16, is_pure=True, pack=4
        )
    return y.reshape(tile[0].shape)


# What formats of 8-bit codes with groups share for one token
STREAMED8 = dict(weights_per_thread=64, **ROTATED)


# Q8_0: a scale for each 32 columns


@jit
def _load8(
    w, start, k, left, COLUMNS: tl.constexpr, NEIGHBOURS: tl.constexpr, FORMAT: tl.constexpr
):
    codes = load_elements(w, start, k, left, COLUMNS, NEIGHBOURS)
    return (codes,) + load_all_groups(w, start, k, left, COLUMNS, NEIGHBOURS, FORMAT)


@jit
def _q8_0_scales(tile, SHIFT: tl.constexpr):
    scale = tile[1].to(tl.float32) * (2.0 ** (SHIFT - 8))
    return scale, scale * 0.0


@jit
def _q8_0_sums(tile, x, sum_x, SCALES: tl.constexpr):
    scale, _ = SCALES(tile, 0)
    sums = scale * sums_of(_code_sums(tile[0], x, _signed, _SUMS8_ASM), 2)
    return sums_of(sums, 2)


Q8_0 = FileGroups(
    "q8_0",
    bits=8,
    load=_load8,
    values=_values8,
    scales_of=_q8_0_scales,
    gain=1.0,
    stream_load=stream_load,
    stream_sums=_q8_0_sums,
    group=32,
    groups=(32,),
    unit=2.0**-8,
    **STREAMED8,
)


# Q8_1, for Q5_1 and for several types side by side: a scale and a minimum for each 32 columns


@jit
def _q8_1_scales(tile, SHIFT: tl.constexpr):
    scale = tile[1].to(tl.float32) * (2.0 ** (SHIFT - 8))
    return scale, tile[2].to(tl.float32) * (2.0 ** (SHIFT - 8))


@jit
def _q8_1_sums(tile, x, sum_x, SCALES: tl.constexpr):
    scale, minimum = SCALES(tile, 0)
    sums = scale * sums_of(_code_sums(tile[0], x, _signed, _SUMS8_ASM), 2)
    sums += minimum * sums_of(sum_x[None, :], 2)
    return sums_of(sums, 2)


Q8_1 = replace(
    Q8_0,
    name="q8_1",
    scales_of=_q8_1_scales,
    stream_sums=_q8_1_sums,
    groups=(32, 32),
    scaling=Minimum(),
)

# Q8_K, for IQ4_XS, whose 16 levels are bytes: Parts for each 32 columns of 256


@jit
def _q8_k_scales(tile, SHIFT: tl.constexpr):
    return _scales_of_parts(tile[1], tile[2], 13 - SHIFT)


Q8_K = replace(
    Q8_1,
    name="q8_k",
    scales_of=_q8_k_scales,
    group=256,
    groups=(32, 256),
    scaling=Parts(),
    unit=2.0**-13,
)

# Q8_16, for Q2_K, and for the other K types beside it: bytes, with parts for each 16 columns of 256


@jit
def _q8_16_stream_load(w, start, k, left, COLUMNS: tl.constexpr, FORMAT: tl.constexpr):
    codes = load_codes(w[0], start, k, left, COLUMNS, 4)
    parts = int16_of(load_words(w[1], start, k, left, COLUMNS, 32, 2))
    halves = load_two_groups(w[2], start, k, left, COLUMNS, FORMAT.groups[1])
    return codes, parts, tl.join(halves, halves).reshape(parts.shape)


@jit
def _q8_16_sums(tile, x, sum_x, SCALES: tl.constexpr):
    scale, minimum = SCALES(tile, 0)
    sums = scale * _code_sums(tile[0], x, _signed, _SUMS8_ASM)
    return sums_of(sums + minimum * sum_x[None, :], 4)


Q8_16 = replace(
    Q8_K,
    name="q8_16",
    stream_load=_q8_16_stream_load,
    stream_sums=_q8_16_sums,
    column_at=_rotated_2,
    turns=2,
    groups=(16, 256),
    scaling=PartsOf16(),
)

EXACT = {  # the types of ggml that each format keeps exactly
    Q4_0: {"Q4_0"},
    Q4_1: {"Q4_1"},
    Q4_K: {"Q4_K"},
    Q8_0: {"Q8_0", "Q5_0", "Q4_0", "IQ4_NL"},
    Q8_1: {"Q8_0", "Q5_0", "Q4_0", "Q5_1", "Q4_1", "IQ4_NL"},
    Q6_K: {"Q6_K", "Q5_K", "Q4_K", "Q3_K"},
    Q8_K: {"IQ4_XS", "Q5_K", "Q4_K"},
    Q8_16: {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"},
}


# E4M3 with a scale for each 128 columns of a row; checkpoints have one for each 128 x 128 weights


@dataclass(frozen=True, eq=False)
class Float8Groups(Grouped):
    """int8 codes [N, K] and float32 scales [N, K / 128]."""

    def on(self, device: torch.device) -> Format:
        return E4M3_128_NATIVE if fp8.E4M3.on(device) is fp8.E4M3_NATIVE else self

    def shapes(self, N: int, K: int) -> Shapes:
        return {"codes": (torch.int8, (N, K)), "scale": (torch.float32, (N, K // 128))}

    def codes(self, tensors: Tensors) -> Tensor:
        return fp8.E4M3.halves(tensors[0]).float().mul_(256)

    def scales(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        return tensors[1], torch.zeros_like(tensors[1])

    def write(self, rows: Quantised, out: Tensors) -> None:
        codes, scales = out
        codes.copy_(self.in_runs(rows.codes))
        scales.copy_(rows.scale)


@jit
def _e4m3_128_stream_load(w, start, k, left, COLUMNS: tl.constexpr, FORMAT: tl.constexpr):
    codes = load_codes(w[0], start, k, left, COLUMNS, 4)
    return codes, load_groups(w[1], start, k, left, COLUMNS, 64, FORMAT.groups[0])


@jit
def _scaled(values, scale):
    """Values [R, COLUMNS] times the scales of their groups [R, G]: floats."""
    groups = values.to(tl.float32).reshape(
        values.shape[0], scale.shape[1], values.shape[1] // scale.shape[1]
    )
    return (groups * scale[:, :, None]).reshape(values.shape)


@jit
def _e4m3_128_values(tile, SCALES: tl.constexpr):
    return _scaled(fp8.e4m3_values(tile[0]), tile[1] * 256.0)


_E4M3_ASM = constexpr(_sums_asm(fp8.E4M3_HALF2))


@jit
def _e4m3_128_sums(tile, x, sum_x, SCALES: tl.constexpr):
    return sums_of(_code_sums(tile[0], x, fp8.e4m3_values, _E4M3_ASM), 4) * tile[1] * 256.0


E4M3_128 = Float8Groups(
    "e4m3 (groups of 128)",
    bits=8,
    load=_load8,
    values=_e4m3_128_values,
    stream_load=_e4m3_128_stream_load,
    stream_sums=_e4m3_128_sums,
    group=128,
    groups=(128,),
    **STREAMED8,
)


@jit
def _native_values(tile, SCALES: tl.constexpr):
    return _scaled(fp8.native_values(tile[0]), tile[1])


_NATIVE_ASM = constexpr(_sums_asm(fp8.NATIVE_HALF2))


@jit
def _native_sums(tile, x, sum_x, SCALES: tl.constexpr):
    return sums_of(_code_sums(tile[0], x, fp8.native_values, _NATIVE_ASM), 4) * tile[1]


E4M3_128_NATIVE = replace(E4M3_128, values=_native_values, stream_sums=_native_sums)
