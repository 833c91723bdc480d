"""4-bit integers with a scale and a zero point for each group of 32 columns, 4.5 bits per weight:

    W[n, k] = row[n] * scale[n, g] * (code[n, k] - zero[n, g] / 16)

    code    4 bits: 0 to 15
    zero    8 bits: sixteenths of a code, since a group's range need not have 0 on a code
    scale   8 bits: a float without a sign: with the upper bits e, at most 14, and the lower m, (1 +
            m / 16) 2^(e - 23)
    row     float32: scales a row so that its largest group scale is the largest that 8 bits can
            hold

Every 256 columns hold eight interleaved groups: each group takes a run of eight columns from each
quarter of them. With one token a thread needs whole groups of x, and this way neighbouring threads
still load neighbouring columns. With rotated runs, which groups.py has for other formats, one token
of 7B is 6% slower (H100), and eight 14%.

Eight codes share an int32, as codes4.py describes."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

from dataclasses import dataclass

import torch
from torch import Tensor

from bits import codes4
from bits.groups import int16_of
from formats import Format, Shapes, Tensors, some_rows
from fp8 import E4M3
from launch import EMULATED, constexpr, jit, tl

GROUP = 32
BLOCK = 256  # columns that eight groups share
LARGEST = 0xEF  # the largest code of a scale
MOST = 5e36  # the largest weight: the number of its row, up to 40 times that, fits float32


@dataclass(frozen=True, eq=False)
class Int4(codes4.Codes4):
    """int32 codes [N, K / 8]; int16 groups [N, K / 32], the scale's code above the zero point;
    float32 row [N, 1]."""

    def shapes(self, N: int, K: int) -> Shapes:
        return {
            "codes": (torch.int32, (N, K // 8)),
            "groups": (torch.int16, (N, K // GROUP)),
            "row": (torch.float32, (N, 1)),
        }

    def runs(self, K: int, device: torch.device) -> Tensor:
        runs = torch.arange(K // 8, device=device)
        whole = K // BLOCK * BLOCK // 8  # those of whole blocks
        blocks = runs[:whole].view(-1, 4, 2, 4).transpose(1, 3).flatten()
        return torch.cat((blocks, runs[whole:]))

    def for_matrix(self, name: str) -> Format:
        """The output matrix is kept in E4M3: that lowers the KL divergence by a third
        (BENCHMARKS.md)."""
        return E4M3 if name == "output" else self

    def encode(self, weights: Tensor, out: Tensors | None = None) -> Tensors:
        """The scale and the zero point of a group are searched for the least squared error."""
        out = out or self.empty(*weights.shape, weights.device)
        for rows, *places in some_rows(weights, out, MOST):
            groups = self.in_runs(rows.float()).unflatten(-1, (-1, GROUP))
            for place, value in zip(places, _encode(groups)):
                place.copy_(value)
        return out

    def scales(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        _, groups, row = tensors
        scale = _scales(groups >> 8 & 0xFF) * row
        return scale, scale * (groups & 0xFF) / -16

    def check(self, tensors: Tensors) -> None:
        super().check(tensors)
        if ((tensors[1] >> 8 & 0xFF) > LARGEST).any():
            raise ValueError("scales that are not positive and finite")


# ---- encoding


def _scales(codes: Tensor) -> Tensor:
    """Codes of scales to float32."""
    return ((codes.int() << 19) + (127 - 23 << 23)).view(torch.float32)


def _scale_codes(scales: Tensor) -> Tensor:
    """The nearest codes, int32, of scales in the range of `_scales`."""
    return ((scales.view(torch.int32) + (1 << 18) >> 19) - (127 - 23 << 4)).clamp_(0, LARGEST)


def _encode(w: Tensor) -> Tensors:
    """Encode groups w [N, G, 32]: returns what is stored.

    _fit_groups finds the scale and the zero point that fit each group best. But both are themselves
    rounded. So the nearest code of the scale and its two neighbours are tried, each with the zero
    point that fits it best, and the one with the least squared error is stored."""
    peak = w.abs().amax((1, 2)).clamp_(min=1e-30)[:, None]
    # [32, N, G], scaled so that no square is too large
    w = (w / peak[..., None]).permute(2, 0, 1).contiguous()
    scale, zero = _fit_groups(w)
    # Never 0, even for rows of zeros
    row = (scale.amax(1, keepdim=True) / _scales(torch.tensor(LARGEST))).clamp_(min=1e-6)
    sum_w = w.sum(0)
    start = zero * scale
    nearest = _scale_codes(scale / row)
    byte = nearest.clone()
    sixteenths = torch.zeros_like(nearest)
    least = torch.full_like(scale, torch.inf)
    for step in (-1, 0, 1):
        tried = (nearest + step).clamp_(0, LARGEST)
        fit = _scales(tried) * row
        code = _codes(w, fit, (start / fit).clamp_(0, 255 / 16))
        offset = ((code.sum(0) - sum_w / fit) / GROUP * 16).round_().clamp_(0, 255)
        error = _error(w, fit, offset / 16)
        better = error < least
        for found, value in ((least, error), (byte, tried), (sixteenths, offset.int())):
            found.copy_(torch.where(better, value, found))
    code = _codes(w, _scales(byte) * row, sixteenths / 16)
    words = codes4.to_words(code.permute(1, 2, 0).contiguous().flatten(1))
    return words, (byte << 8 | sixteenths).to(torch.int16), row * peak


def _fit_groups(w: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zero points [N, G] of the least squared error, w = scale (code - zero), for
    weights [32, N, G]. For each of several ranges, weights are rounded to the nearest codes, and
    least squares give the scale and the zero point that fit these codes best; the best is kept."""
    low = w.amin(0).clamp_(max=0)
    high = w.amax(0).clamp_(min=0)
    span = ((high - low) / 15).clamp_(min=1e-30)
    middle = (high + low) / 2
    sum_w = w.sum(0)
    scale = torch.ones_like(low)
    zero = torch.zeros_like(low)
    least = torch.full_like(low, torch.inf)
    for part in torch.linspace(0.6, 1.05, 10).tolist():
        step = span * part
        code = _codes(w, step, 7.5 - middle / step)
        # The regression of w on code
        sum_c = code.sum(0)
        sum_cw = (code * w).sum(0)
        sum_cc = code.square_().sum(0)
        spread = GROUP * sum_cc - sum_c.square()
        fit = (GROUP * sum_cw - sum_c * sum_w) / spread.clamp(min=1e-30)
        # Near 0, the spread is nothing but rounding error
        fit = torch.where((fit > 0) & (spread > 1e-4 * GROUP * sum_cc), fit, step)
        offset = ((sum_c - sum_w / fit) / GROUP).clamp_(0, 255 / 16)
        error = _error(w, fit, offset)
        better = error < least
        for found, tried in ((least, error), (scale, fit), (zero, offset)):
            found.copy_(torch.where(better, tried, found))
    return scale, zero


def _codes(w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The codes nearest to weights [32, N, G], as floats."""
    return torch.addcmul(zero, w, scale.reciprocal()).round_().clamp_(0, 15)


def _error(w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The squared error of each group [N, G] with the nearest codes."""
    exact = torch.addcmul(zero, w, scale.reciprocal())
    return exact.sub_(exact.round().clamp_(0, 15)).square_().sum(0).mul_(scale.square())


# ---- in kernels


@jit
def _scale_and_zero(tile, SHIFT: tl.constexpr):
    """A scale's code, shifted, has the bits of a float; a zero point is a subnormal half."""
    groups = tile[1].to(tl.int32)
    scale = ((groups & 0xFF00) << 11) + ((127 - 23 + SHIFT) << 23)
    zero = (groups & 0xFF).to(tl.int16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32, bitcast=True), zero.to(tl.float32)


_FACTORS_ASM = constexpr(
    "{ .reg .b32 a, z; shr.u32 a, $3, 2; lop3.b32 $0, a, 0x3fc03fc0, 0x40004000, 0xea;"
    " sub.u32 $1, $0, 0x10001000; lop3.b32 z, $3, 0x00ff00ff, 0x80008000, 0xea;"
    " mul.rn.f16x2 $2, $1, z; }"
)


@jit
def _factors(groups):
    """What factors_of returns, of two groups at a time and without conversions: a scale's code,
    shifted, has the bits of a half that is 2^24 times as large, and a zero point those of a
    subnormal half."""
    if EMULATED:
        by_0 = groups >> 2 & 0x3FC0 | 0x4000
        by_4 = (by_0 - 0x1000).to(tl.float16, bitcast=True)
        zero = (groups & 0xFF).to(tl.float16, bitcast=True)
        return by_0.to(tl.float16, bitcast=True), by_4, by_4 * -zero
    else:
        types: tl.constexpr = (tl.float16, tl.float16, tl.float16)
        return tl.inline_asm_elementwise(
            _FACTORS_ASM, "=&r,=&r,=&r,r", (groups,), dtype=types, is_pure=True, pack=2
        )


@jit
def _values(tile, SCALES: tl.constexpr):
    return codes4.decoded_halves(int16_of(tile[0]), _factors(tile[1]))


@jit
def _columns(places, K: tl.constexpr):
    """See Format.column_at. Groups 2 i and 2 i + 1 of a block belong to the same thread: the first
    has columns 64 j + 8 i to 64 j + 8 i + 7, j from 0 to 3, the second those 32 further on. Columns
    beyond the last whole block are in order."""
    quarter = places % 32 // 8
    half = places // 32 % 2
    thread = places // 64 % 4
    columns = places // 256 * 256 + quarter * 64 + half * 32 + thread * 8 + places % 8
    if K % 256 == 0:
        return columns
    else:
        return tl.where(places < K // 256 * 256, columns, places)


INT4 = Int4(
    "int4",
    bits=4,
    load=codes4.load,
    values=_values,
    scales_of=_scale_and_zero,
    column_at=_columns,
    stream_sums=codes4.stream_sums_with_zero,
    group=GROUP,
    whole=BLOCK,
    e4m3_bound=2.0**-4,
    groups=(GROUP,),
    **codes4.STREAMED,
)
