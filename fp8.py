"""The 8-bit floats: int8 codes with one scale per row.

    E5M2  sign, 5 exponent bits, 2 of mantissa: the upper byte of a half-precision float
    E4M3  sign, 4 exponent bits, 3 of mantissa: under the sign of a half, these bits are the value
          times 2^-8, also for subnormals

Either is decoded by moving bits into a half, on any GPU and any CPU. GPUs from sm_89 on have an
instruction that converts E4M3, and tensor cores that multiply it: E4M3_NATIVE. Hopper's tensor
cores multiply either format by E4M3, from CUDA 12.9 on. Codes of NaN and infinity are never written
into weights: encoding saturates."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from formats import Format, Quantised, Shapes, Tensors, load_elements, some_rows
from launch import EMULATED, capability, jit, tl


@dataclass(frozen=True, eq=False)
class Float8(Format):
    """int8 codes [N, K] and float32 scales [N, 1]."""

    dtype: torch.dtype = torch.float8_e4m3fn  # torch's type of the same bits
    not_finite: int = 0x7F  # from here up, a code without its sign means NaN or infinity
    # What a row's largest magnitude is scaled to. In both formats that is the half 1.75 times `unit`
    top: float = 448.0
    unit: float = 256.0  # what `halves` leaves out, as `gain` is what a kernel's `values` leave out
    shift: int = 7  # by which a code's bits below its sign move up to be a half's
    # `values` for a cache of keys and values, which is in E4M3 and may hold codes of NaN
    values_nan: Callable | None = None
    encode_tile: Callable | None = None  # floats to codes in a kernel, see e4m3_encode

    def on(self, device: torch.device) -> Float8:
        return E4M3_NATIVE if self is E4M3 and capability(device) >= 89 else self

    def shapes(self, N: int, K: int) -> Shapes:
        return {"codes": (torch.int8, (N, K)), "scale": (torch.float32, (N, 1))}

    def round(self, x: Tensor) -> Tensor:
        """The nearest codes (ties to even) as int8; magnitudes beyond the largest become the
        largest."""
        largest = torch.finfo(self.dtype).max
        return x.float().clamp(-largest, largest).to(self.dtype).view(torch.int8)

    def halves(self, codes: Tensor, space: Tensor | None = None) -> Tensor:
        """Decode int8 codes to float16, exactly, but without `unit`. space: int16 memory of the
        same shape to decode them in, if there is any."""
        if space is None:
            bits = codes.to(torch.int16)
        else:
            bits = space.copy_(codes)
        bits.bitwise_left_shift_(self.shift)
        if self.shift == 7:
            bits.bitwise_and_(~0x4000)  # a copy of the sign
        return bits.view(torch.float16)

    def floats(self, codes: Tensor) -> Tensor:
        """The values of int8 codes in float32; codes of NaN and infinity, as in a cache, are
        NaN."""
        values = self.halves(codes).float().mul_(self.unit)
        magnitudes = codes & 0x7F
        if magnitudes.amax() >= self.not_finite:
            values.masked_fill_(magnitudes >= self.not_finite, torch.nan)
        return values

    def encode(self, weights: Tensor, out: Tensors | None = None) -> Tensors:
        """Each row takes the scale with the least squared error of four, from the smallest that
        lets its largest magnitude fit to just under twice that."""
        out = out or self.empty(*weights.shape, weights.device)
        for rows, code, scale in some_rows(weights, out):
            rows = rows.float()
            smallest = (rows.abs().amax(1, keepdim=True) / self.top).clamp_(min=1e-30)
            least = torch.full_like(smallest, torch.inf)
            for step in (0.0, 0.25, 0.5, 0.75):
                tried = smallest * 2**step
                written = self.round(rows / tried)
                error = (self.decoded((written, tried)) - rows).square().sum(1, keepdim=True)
                # With magnitudes beyond 1e19 the error is infinite at every step
                better = (error < least) | least.isinf()
                for found, value in ((least, error), (scale, tried), (code, written)):
                    found.copy_(torch.where(better, value, found))
        return out

    def stored_weights(self, tensors: Tensors) -> Tensor:
        codes, scales = tensors
        return self.halves(codes).float().mul_(self.unit * scales)

    def write(self, rows: Quantised, out: Tensors) -> None:
        codes, scales = out
        codes.copy_(rows.codes)
        scales.copy_(rows.scale)

    def check(self, tensors: Tensors) -> None:
        super().check(tensors)
        if any((rows & 0x7F).max() >= self.not_finite for rows in tensors[0].split(512)):
            raise ValueError("codes of NaN or infinity")

    def vector_linear(self, row: Tensor, tensors: Tensors) -> Tensor:
        """Codes are decoded a block of rows at a time, so that the halves stay in the CPU's
        cache."""
        codes, scales = tensors
        row = row.half()
        y = row.new_empty(len(codes))
        space = torch.empty(1024, len(row), dtype=torch.int16)
        for block, part in zip(codes.split(1024), y.split(1024)):
            torch.mv(self.halves(block, space[: len(block)]), row, out=part)
        return y * (self.unit * scales[:, 0])


# ---- E5M2


@jit
def _e5m2_values(codes, SCALES: tl.constexpr = None):
    if EMULATED:  # the interpreter decodes some codes wrongly
        return (codes.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    else:
        return codes.to(tl.float8e5, bitcast=True).to(tl.float16)


E5M2 = Float8(
    "e5m2",
    bits=8,
    load=load_elements,
    values=_e5m2_values,
    gain=1.0,
    groups=(),
    # A permutation of bytes puts each code above a zero byte
    half2=("prmt.b32 p, SOURCE, 0, 0x1404;", "prmt.b32 p, SOURCE, 0, 0x3424;"),
    dtype=torch.float8_e5m2,
    not_finite=0x7C,
    top=1.75,
    unit=1.0,
    shift=8,
)


# ---- E4M3


@jit
def e4m3_values(codes, SCALES: tl.constexpr = None):
    return ((codes.to(tl.int16) << 7) & ~0x4000).to(tl.float16, bitcast=True)


@jit
def _e4m3_values_nan(codes):
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), e4m3_values(codes)).to(tl.float16)


# After the same permutation the bits under the sign move one place to the right
_UNDER_SIGN = "shr.u32 q, p, 1; and.b32 q, q, 0x3f803f80; and.b32 p, p, 0x80008000; or.b32 p, p, q;"
E4M3_HALF2 = (
    f"prmt.b32 p, SOURCE, 0, 0x1404; {_UNDER_SIGN}",
    f"prmt.b32 p, SOURCE, 0, 0x3424; {_UNDER_SIGN}",
)


@jit
def e4m3_encode(x):
    """Floats to codes in a kernel, as Float8.round does: the nearest, ties to even, magnitudes
    beyond 448 as 448. But NaN and infinity, which E4M3 lacks, both become 0x7f, its NaN, so that
    they are noticed."""
    a = tl.minimum(tl.abs(x), 448.0)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # the biases are 127 and 7
    # The last bit of this sum stands for 2^-9, the unit of E4M3's subnormals
    subnormal = (a + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(a < 0.015625, subnormal, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(tl.abs(x) < float("inf"), code | sign, 0x7F).to(tl.int8)


E4M3 = Float8(
    "e4m3",
    bits=8,
    load=load_elements,
    values=e4m3_values,
    gain=256.0,
    groups=(),
    half2=E4M3_HALF2,
    values_nan=_e4m3_values_nan,
    encode_tile=e4m3_encode,
)


# ---- E4M3 as GPUs from sm_89 on support it: one instruction converts two codes


@jit
def native_values(codes, SCALES: tl.constexpr = None):
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@jit
def _native_encode(x):
    x = tl.fma(x, 0.0, x)  # infinity, which would become 448, to NaN
    return x.to(tl.float8e4nv).to(tl.int8, bitcast=True)


NATIVE_HALF2 = (
    "mov.b32 {a, b}, SOURCE; cvt.rn.f16x2.e4m3x2 p, a;",
    "mov.b32 {a, b}, SOURCE; cvt.rn.f16x2.e4m3x2 p, b;",
)
E4M3_NATIVE = replace(
    E4M3,
    values=native_values,
    gain=1.0,
    half2=NATIVE_HALF2,
    values_nan=native_values,
    encode_tile=_native_encode,
)
