"""8-bit floats kept in int8 tensors, one scale per row. A format is one block: constants, and functions for torch and kernels.

    E5M2  sign, 5 exponent bits, 2 of mantissa: the upper byte of a half-precision float
    E4M3  sign, 4 exponent bits, 3 of mantissa: under the sign of a half, these bits are the value times 2^-8, subnormals too

Either is decoded by moving bits into a half, on any GPU and any CPU. GPUs from sm_89 on have an instruction that converts
E4M3, and tensor cores that multiply it: E4M3_NATIVE. Hopper's tensor cores multiply either format by E4M3, from CUDA 12.9 on.
Codes of NaN and infinity are never written into weights: encoding saturates.

To add a format, write its block below and enter it in FORMATS; the tests walk that table.
"""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from launch import (
    EMULATED,
    capability,
    constexpr,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    launch,
    load_vector,
    load_weights,
    tl,
    triton,
)


@dataclass(frozen=True, eq=False)
class Format:
    """A way to store a matrix W [N, K] as int8 codes [N, K] and float32 scales [N]."""

    name: str
    dtype: torch.dtype  # torch's type of the same bits
    not_finite: int  # from here up, a code without its sign means NaN or infinity
    gain: float  # what decoded halves are to be multiplied by
    top: float  # what a row's largest magnitude is scaled to; 1.75 as a half in both, so that products stay far from 65504
    move_bits: Callable[[Tensor], Tensor]  # int16 codes to the bits of halves, in place
    decode: Callable  # the same for a tile in a kernel, to halves
    decode_nan: Callable  # the same where NaN codes may occur, as in a cache
    products: Callable  # of a tile of weights and of x in float32, elementwise, in a kernel
    packed_sums: Callable  # of a tile of weights and of x in halves, for packed_product
    encode_tile: Callable | None = None  # floats to codes in a kernel, as e4m3_encode does
    tensor_cores: bool = False  # whether torch itself multiplies it on tensor cores, see _cublas_scales_rows

    @property
    def largest(self) -> float:
        return torch.finfo(self.dtype).max

    def on(self, device: torch.device) -> Format:
        """The format as kernels on this device decode it."""
        return E4M3_NATIVE if self is E4M3 and capability(device) >= 89 else self

    def matrix_bytes(self, rows: int, columns: int) -> int:
        return rows * (columns + 4)

    def round(self, x: Tensor) -> Tensor:
        """The nearest codes (ties to even) as int8; magnitudes beyond the largest become the largest."""
        return x.float().clamp(-self.largest, self.largest).to(self.dtype).view(torch.int8)

    def halves(self, codes: Tensor, space: Tensor | None = None) -> Tensor:
        """int8 codes to float16, exactly their values divided by the gain; in int16 space of that shape, if given."""
        return self.move_bits(codes.to(torch.int16) if space is None else space.copy_(codes)).view(torch.float16)

    def values(self, codes: Tensor) -> Tensor:
        """Finite int8 codes to the float32 values they stand for."""
        return self.halves(codes).float().mul_(self.gain)

    def values_nan(self, codes: Tensor) -> Tensor:
        """The same where NaN codes may occur, as in a cache."""
        values, magnitudes = self.values(codes), codes & 0x7F
        if magnitudes.amax() >= self.not_finite:
            values.masked_fill_(magnitudes >= self.not_finite, torch.nan)
        return values

    def encode(self, weights: Tensor, codes: Tensor | None = None, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[N, K] to int8 codes [N, K] and float32 scales [N], in the given tensors if any. Each row takes the scale with the
        least squared error of four, from the smallest that lets its largest magnitude fit to just under twice that. Raises
        ValueError on NaN or inf."""
        codes = torch.empty(weights.shape, dtype=torch.int8, device=weights.device) if codes is None else codes
        scales = torch.empty(len(weights), dtype=torch.float32, device=weights.device) if scales is None else scales
        rows_at_once = max(1, (1 << 23) // weights.shape[1])
        for rows, code, scale in zip(*(t.split(rows_at_once) for t in (weights, codes, scales))):
            rows = rows.float()
            smallest = rows.abs().amax(1) / self.top
            if not torch.isfinite(smallest).all():
                raise ValueError("NaN or inf cannot be stored as an 8-bit float")
            smallest.clamp_(min=1e-30)
            least = torch.full_like(smallest, torch.inf)
            for step in (0.0, 0.25, 0.5, 0.75):
                tried = smallest * 2**step
                written = self.round(rows / tried[:, None])
                error = (self.decoded(written, tried) - rows).square().sum(1)
                better = (error < least) | least.isinf()  # the square of magnitudes beyond 1e19 may be, too
                least[better], scale[better], code[better] = error[better], tried[better], written[better]
        return codes, scales

    def decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Codes [N, K] and scales [N] to float32 [N, K]."""
        return self.halves(codes).float().mul_(self.gain * scales[:, None])

    def check(self, codes: Tensor, scales: Tensor, whole_rows: bool = True) -> None:
        """Raise ValueError for what encode never writes: codes of NaN or infinity, scales that are not positive and finite, and
        rows whose largest code is not in the range that encode gives it (for parts of rows: is above that range), a sign of
        codes of another format."""
        if not ((scales > 0) & (scales < torch.inf)).all():
            raise ValueError("scales that are not positive and finite")
        largest = torch.cat([(rows & 0x7F).amax(1) for rows in codes.split(512)])
        if largest.max() >= self.not_finite:
            raise ValueError("codes of NaN or infinity")
        low, high = self.round(torch.tensor([self.top / 2**0.75, self.top])).tolist()
        if not whole_rows:
            low = 0
        if not ((largest >= low) & (largest <= high) | (largest == 0) | (scales < 2e-30)).all():
            raise ValueError(f"codes of a format other than {self.name}")


@dataclass(eq=False)
class Matrix:
    """A weight matrix W of N rows and K columns, applied as y = x W^T."""

    data: Tensor  # [N, K], in 16 or 32 bits (see kernels.prepacked), or int8 codes
    scale: Tensor | None = None  # [N] float32, of codes
    format: Format | None = None  # of codes

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.data.shape)

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def columns(self) -> int:
        return self.data.shape[1]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def encoded(self, format: Format) -> Matrix:
        """The same in 8 bits. Raises ValueError on NaN or inf."""
        return Matrix(*format.encode(self.data), format)

    def dense(self) -> Tensor:
        """W as floats: float32 [N, K] for codes, the data itself otherwise, unpacked from oneDNN's layout if need be."""
        if self.format is None:
            return self.data.to_dense() if self.data.is_mkldnn else self.data
        return self.format.decoded(self.data, self.scale)


# ---- packed products: a token's product with 8-bit weights, in half precision.
#
#      At 8 bits per weight the arithmetic matters: an H200 reads 4.6e12 weights per second and executes 33e12 fp32 operations,
#      about 7 per weight. Decoding a code, widening it and multiplying it takes 11 instructions. Packed, it takes 3 to 4: PTX
#      converts two codes at a time to a pair of halves, multiplies the pair by a pair of x in one instruction (fma.rn.f16x2),
#      and adds up eight products in half precision before the sum is widened to fp32. For this to be sound, the range must be
#      right: a half ends at 65504 and loses precision below 6e-5, so x is scaled by a power of two, which is exact, such that
#      eight products with codes of at most 448 stay below 65504 and those that matter lie far above 6e-5. Eight neighbours of
#      a row must be in one thread.


@jit
def _power_of_two(x):
    """The largest power of two that is not above x > 0."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@jit
def packed_product(
    x, norm, w, scale, residual, rows, N, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, PARTIAL_SUMS: tl.constexpr, GAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """kernels.product with packed products. x is read twice, first for its range, and multiplied by the norm in its own
    type."""
    offs_k = tl.arange(0, BLOCK)
    w_tile = load_weights(w, rows, 0, offs_k, N, K, BLOCK)
    if norm is not None:
        norm_tile = load_vector(norm, 0, offs_k, K, BLOCK)
    gdc_wait(PDL)
    if residual is not None:
        residual_tile = tl.load(residual + rows, mask=rows < N, other=0.0).to(tl.float32)
    x_tile = load_vector(x, 0, offs_k, K, BLOCK)
    # The range of x: with a norm its root mean square, otherwise its largest magnitude
    squares, peaks = x_tile.to(tl.float32) * x_tile.to(tl.float32), tl.abs(x_tile)
    for k in tl.static_range(BLOCK, K, BLOCK):
        x_next = load_vector(x, k, offs_k, K, BLOCK)
        squares += x_next.to(tl.float32) * x_next.to(tl.float32)
        peaks = tl.maximum(peaks, tl.abs(x_next))
    if norm is not None:  # good for norm weights of up to 30
        inv_rms = tl.rsqrt(tl.sum(squares) / K + eps)
        power = _power_of_two(inv_rms) / 64
    else:
        inv_rms = 1.0
        power = _power_of_two(tl.minimum(16 / tl.maximum(tl.max(peaks).to(tl.float32), 1e-30), 32768.0))
    # The product, with the next tile of W in flight while this one is multiplied
    for k in tl.static_range(0, K, BLOCK):
        w_now = w_tile
        if k + BLOCK < K:
            w_tile = load_weights(w, rows, k + BLOCK, offs_k, N, K, BLOCK)
        if k > 0:
            x_tile = load_vector(x, k, offs_k, K, BLOCK)
        x_tile = x_tile * power.to(x_tile.dtype)
        if norm is not None:
            x_tile *= norm_tile.to(x_tile.dtype)
            if k + BLOCK < K:
                norm_tile = load_vector(norm, k + BLOCK, offs_k, K, BLOCK)
        sums = PARTIAL_SUMS(w_now, x_tile.to(tl.float16))
        if k == 0:
            acc = sums
        else:
            acc += sums
    y = tl.sum(acc, 1) * (inv_rms / power) * (tl.load(scale + rows, mask=rows < N, other=0.0) * GAIN)
    return y if residual is None else residual_tile + y


def packed_asm(*two_halves: str) -> str:
    """PTX for eight codes times eight halves, added up in half precision: a float in $0, and zero in $1. two_halves: what
    turns the two codes in the lower half of register SOURCE, and in the upper half, into the pair of halves p."""
    weights, x, lines = 2, 4, []  # the number of the first register of each
    for pair in range(4):
        lines.append(two_halves[pair % 2].replace("SOURCE", f"${weights + pair // 2}"))
        lines.append(f"fma.rn.f16x2 sums, p, ${x + pair}, sums;" if pair else f"mul.rn.f16x2 sums, p, ${x};")
    lines.append("mov.b32 {a, b}, sums; add.f16 a, a, b; cvt.f32.f16 $0, a; mov.b32 $1, 0;")
    return "{ .reg .b16 a, b; .reg .b32 sums, p, q; " + " ".join(lines) + " }"


ASM_REGISTERS = constexpr("=&r,=&r,r,r,r,r,r,r")  # the sum and the zero; two registers of codes, four of halves


@jit
def packed_sums(w_tile, x_tile, DECODE: tl.constexpr, ASM: tl.constexpr):
    """Codes [ROWS, BLOCK] times halves [1, BLOCK], eight neighbours added up: float32 [ROWS, BLOCK / 8]."""
    if EMULATED:
        return DECODE(w_tile).to(tl.float32) * x_tile.to(tl.float32)
    sums = tl.inline_asm_elementwise(ASM, ASM_REGISTERS, [w_tile, x_tile], dtype=tl.int8, is_pure=True, pack=8)
    # Eight int8 come back for eight codes: the bytes of the float, then those of the zero
    sums = tl.reshape(sums, [w_tile.shape[0], w_tile.shape[1] // 8, 2, 2, 2]).to(tl.uint8, bitcast=True).to(tl.uint32)
    sums, _ = tl.split(sums.permute(0, 1, 3, 4, 2))
    even, odd = tl.split(sums)  # joining four bytes into a float costs nothing: they are in one register already
    b0, b2 = tl.split(even)
    b1, b3 = tl.split(odd)
    return (b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)).to(tl.float32, bitcast=True)


# ---- E5M2


def _e5m2_bits(codes: Tensor) -> Tensor:
    return codes.bitwise_left_shift_(8)


@jit
def _e5m2_decode(codes):
    if EMULATED:  # the interpreter decodes some codes wrongly
        return (codes.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    return codes.to(tl.float8e5, bitcast=True).to(tl.float16)


@jit
def _e5m2_products(w_tile, x_tile):
    return _e5m2_decode(w_tile).to(tl.float32) * x_tile


# a permutation of bytes puts each code above a zero byte
_E5M2_ASM = constexpr(packed_asm("prmt.b32 p, SOURCE, 0, 0x1404;", "prmt.b32 p, SOURCE, 0, 0x3424;"))


@jit
def _e5m2_packed_sums(w_tile, x_tile):
    return packed_sums(w_tile, x_tile, _e5m2_decode, _E5M2_ASM)


E5M2 = Format(
    "e5m2", torch.float8_e5m2, not_finite=0x7C, gain=1.0, top=1.75,
    move_bits=_e5m2_bits, decode=_e5m2_decode, decode_nan=_e5m2_decode, products=_e5m2_products, packed_sums=_e5m2_packed_sums,
)  # fmt: skip


# ---- E4M3


def _e4m3_bits(codes: Tensor) -> Tensor:
    return codes.bitwise_left_shift_(7).bitwise_and_(~0x4000)


@jit
def _e4m3_decode(codes):
    return ((codes.to(tl.int16) << 7) & ~0x4000).to(tl.float16, bitcast=True)


@jit
def _e4m3_decode_nan(codes):
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), _e4m3_decode(codes)).to(tl.float16)


@jit
def _e4m3_products(w_tile, x_tile):
    return _e4m3_decode(w_tile).to(tl.float32) * x_tile


# as for E5M2, then the bits under the sign move one place to the right
_UNDER_SIGN = "shr.u32 q, p, 1; and.b32 q, q, 0x3f803f80; and.b32 p, p, 0x80008000; or.b32 p, p, q;"
_E4M3_ASM = constexpr(packed_asm(*(f"prmt.b32 p, SOURCE, 0, {order}; {_UNDER_SIGN}" for order in ("0x1404", "0x3424"))))


@jit
def _e4m3_packed_sums(w_tile, x_tile):
    return packed_sums(w_tile, x_tile, _e4m3_decode, _E4M3_ASM)


@jit
def e4m3_encode(x):
    """Floats to codes in a kernel, as Format.round does: nearest, ties to even, magnitudes beyond 448 as 448; but NaN
    and infinity (which E4M3 lacks) both as 0x7f, its NaN, so that they are noticed."""
    a = tl.minimum(tl.abs(x), 448.0)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # the biases are 127 and 7
    subnormal = (a + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # the sum's last bit is 2^-9, the unit of subnormals
    code = tl.where(a < 0.015625, subnormal, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(tl.abs(x) < float("inf"), code | sign, 0x7F).to(tl.int8)


E4M3 = Format(
    "e4m3", torch.float8_e4m3fn, not_finite=0x7F, gain=256.0, top=448.0,
    move_bits=_e4m3_bits, decode=_e4m3_decode, decode_nan=_e4m3_decode_nan,
    products=_e4m3_products, packed_sums=_e4m3_packed_sums,
    encode_tile=e4m3_encode,
)  # fmt: skip


# ---- E4M3 as GPUs from sm_89 on support it: one instruction converts two codes


@jit
def _native_decode(codes):
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@jit
def _native_encode(x):
    x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))  # infinity would become 448
    return x.to(tl.float8e4nv).to(tl.int8, bitcast=True)


@jit
def _native_products(w_tile, x_tile):
    return _native_decode(w_tile).to(tl.float32) * x_tile


_NATIVE_ASM = constexpr(packed_asm(*(f"mov.b32 {{a, b}}, SOURCE; cvt.rn.f16x2.e4m3x2 p, {half};" for half in "ab")))


@jit
def _native_packed_sums(w_tile, x_tile):
    return packed_sums(w_tile, x_tile, _native_decode, _NATIVE_ASM)


E4M3_NATIVE = replace(
    E4M3,
    gain=1.0,
    decode=_native_decode,
    decode_nan=_native_decode,
    products=_native_products,
    packed_sums=_native_packed_sums,
    encode_tile=_native_encode,
    tensor_cores=True,
)

FORMATS = {format.name: format for format in (E4M3, E5M2)}


# ---- the product of a prompt


@jit
def _decode_kernel(
    codes, scale, out, K: tl.constexpr, BLOCK: tl.constexpr, DECODE: tl.constexpr, GAIN: tl.constexpr, PDL: tl.constexpr
):
    """Decode one block of a row of codes to the type of `out`."""
    gdc_launch_dependents(PDL)
    row = tl.program_id(0)
    offs_k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs, mask = row.to(tl.int64) * K + offs_k, offs_k < K
    y = DECODE(tl.load(codes + offs, mask=mask, other=0)).to(tl.float32) * (tl.load(scale + row) * GAIN)
    gdc_wait(PDL)
    tl.store(out + offs, y.to(out.dtype.element_ty), mask=mask)


def decode_for(w: Matrix, x: Tensor) -> Tensor:
    """Codes W [N, K] decoded to the type of x, on a GPU."""
    out, block, format = x.new_empty(w.rows, w.columns), min(4096, triton.next_power_of_2(w.columns)), w.format.on(x.device)
    cut = dict(K=w.columns, BLOCK=block, DECODE=format.decode, GAIN=format.gain)
    launch(_decode_kernel, (w.rows, triton.cdiv(w.columns, block)), x.device, w.data, w.scale, out, **cut)
    return out


@jit
def store_codes(y, codes, scales, row, offs_k, K: tl.constexpr, ENCODE: tl.constexpr):
    """Write a row of floats to codes [T, K], its largest magnitude as 448, and its scale to scales [T]."""
    scale = tl.maximum(tl.max(tl.abs(y), 0), 1e-30) / 448
    tl.store(codes + row * K + offs_k, ENCODE(y / scale), mask=offs_k < K)
    tl.store(scales + row, scale)


@jit
def _encode_rows_kernel(x, codes, scales, K: tl.constexpr, BLOCK: tl.constexpr, ENCODE: tl.constexpr, PDL: tl.constexpr):
    gdc_launch_dependents(PDL)
    offs_k = tl.arange(0, BLOCK)
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    values = tl.load(x + row * K + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)
    store_codes(values, codes, scales, row, offs_k, K, ENCODE)


def empty_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Space for activations [T, K] as E4M3 codes, int8 [T, K], and one scale per row, float32 [T, 1]."""
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(len(x), 1, dtype=torch.float32)


def encode_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations as codes and scales."""
    (codes, scales), (T, K) = empty_codes(x), x.shape
    block = triton.next_power_of_2(K)
    cut = dict(K=K, BLOCK=block, ENCODE=E4M3.on(x.device).encode_tile, warps=min(16, max(1, block // 512)))
    launch(_encode_rows_kernel, (T,), x.device, x, codes, scales, **cut)
    return codes, scales


@cache
def _cublas_scales_rows(device: torch.device) -> bool:
    """Whether cuBLAS multiplies 8-bit floats with one scale per row, as it does on Hopper from CUDA 12.9 on: E4M3 by either
    format, into any type. Elsewhere torch has its own kernel, for E4M3, whose result is bfloat16."""
    version = tuple(map(int, (torch.version.cuda or "0").split(".")))
    return device.type == "cuda" and capability(device) // 10 == 9 and version >= (12, 9)


def on_tensor_cores(w: Matrix) -> bool:
    """Whether tensor cores multiply the codes as they are."""
    if w.format is None or w.rows % 16 or w.columns % 16:
        return False
    return w.format.on(w.data.device).tensor_cores or _cublas_scales_rows(w.data.device)


def tensor_core_linear(codes: Tensor, scales: Tensor, w: Matrix, dtype: torch.dtype) -> Tensor:
    """x W^T on 8-bit tensor cores, x given as codes and scales. [T, K] -> [T, N], in dtype where the library supports that."""
    to = dtype if _cublas_scales_rows(w.data.device) else torch.bfloat16
    x8, w8 = codes.view(E4M3.dtype), w.data.view(w.format.dtype)
    return torch._scaled_mm(x8, w8.t(), scales, w.scale[None], out_dtype=to, use_fast_accum=_fast_sums)


# Fast accumulation: Hopper's tensor cores accumulate products of 8-bit floats with about 14 bits, unless the sums are moved to
# fp32 registers every few products, which costs a tenth of the speed. The error (a mean square of 2e-6 to 6e-6 of the result's)
# is a hundredth of the error from rounding the activations.

_fast_sums = False


@contextmanager
def fast_accumulation(on: bool) -> Iterator[None]:
    """Set whether tensor_core_linear accumulates fast, and restore it afterwards."""
    global _fast_sums
    before, _fast_sums = _fast_sums, on
    try:
        yield
    finally:
        _fast_sums = before
