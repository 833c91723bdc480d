"""Every op of the model. One op is one block: formula and shapes, a reference in plain torch, the Triton kernel, its launcher.

Shape letters, used everywhere: T new tokens, S cached positions, H query heads, KH key/value heads, D head_dim,
C dim, F hidden_dim, V vocabulary, L layers. One sequence at a time, so there is no batch axis.

The file ends with two facing tables. `reference` runs on any torch device: it is the CPU path, and the oracle in tests.
`fused` runs on CUDA, and on CPU tensors when TRITON_INTERPRET=1. To add an op: write its block, add it to both tables
and to the cases of test_all.py.

`pos`, wherever it appears, is an int32 tensor of one element on the device: how many positions are already in the cache.
Kernels take contiguous tensors only, and derive every stride from the shapes.

At T = 1 a product is bound by reading W: kernels stream its rows once, and do everything else on the way. At T > 1 it is
bound by arithmetic: the library's product, at up to 97% of what the card multiplies (BENCHMARKS.md), stands between small fused
kernels.
"""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

import fp8
from fp8 import EMULATED, PRODUCTS_REGISTERS, decode_tile, encode_tile, products_asm, rescale
from launch import (
    INTERPRETED,
    LAUNCHES,
    SPLIT_LAUNCHES,
    capability,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    launch,
    nearest,
    processors,
    tl,
    triton,
)
from sampling import sample, sample_ref


@dataclass(eq=False)
class Matrix:
    """A weight matrix W of N rows and K columns, applied as y = x W^T."""

    data: Tensor  # [N, K]
    scale: Tensor | None = None  # [N] float32, of 8-bit weights
    format: str = ""  # of 8-bit weights, whose data is int8: "e4m3" or "e5m2"
    half_sums: bool = False  # at T > 1, products of fp16 are summed up in half precision

    def encoded(self, form: str) -> Matrix:
        """The same in 8 bits. Raises ValueError on NaN or inf."""
        return Matrix(*fp8.encode(self.data, form), form, self.half_sums)

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.data.shape)

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def columns(self) -> int:
        return self.data.shape[1]


def storage_dtype(ops: SimpleNamespace, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type in which an op table wants the matrices of a model in dtype. `reference` on a CPU: fp16 for bf16 too, which
    torch streams twice as fast; a bf16 weight fits exactly, but for magnitudes under 6e-5, which are off by at most 3e-8."""
    return torch.float16 if ops is reference and device.type == "cpu" and dtype == torch.bfloat16 else dtype


def linear_ref(x: Tensor, w: Matrix) -> Tensor:
    """y = x W^T. x [T, K] -> [T, N]."""
    if w.data.device.type == "cpu" and (w.format or w.data.dtype == torch.float16):
        return _cpu_narrow_linear(x, w)
    return F.linear(x, fp8.decode(w.data, w.scale, w.format).to(x.dtype) if w.format else w.data)


def _cpu_narrow_linear(x: Tensor, w: Matrix) -> Tensor:
    """On a CPU, fp16 or 8-bit weights. One token: torch's fp16 matrix-vector product (fp32 sums), which runs at the speed of
    memory; x is scaled to at most 1, so that a result fits fp16 if its row of |W| sums to less than 65504. More tokens: the
    library's product in bf16 (fp32 for other activations). Weights are decoded and widened a block of rows at a time, so that
    the copies stay in the cache."""
    if x.shape[0] == 1:
        scale = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32).clamp_(min=1e-30)
        row = (x[0] / scale).half()
        if not w.format:
            return (torch.mv(w.data, row) * scale).to(x.dtype)[None]
        y, space = row.new_empty(w.rows), torch.empty(1024, w.columns, dtype=torch.int16)
        for rows, part in zip(w.data.split(1024), y.split(1024)):
            torch.mv(fp8.halves(rows, w.format, space[: len(rows)]), row, out=part)
        return (y * (w.scale * (scale * fp8.GAIN[w.format]))).to(x.dtype)[None]
    wide = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    x_wide, out = x.to(wide), x.new_empty(x.shape[0], w.rows)
    single, block = torch.empty(512, w.columns), torch.empty(512, w.columns, dtype=wide)
    for i, (rows, columns) in enumerate(zip(w.data.split(512), out.split(512, 1))):
        n = len(rows)
        if w.format:
            rows = fp8.decode(rows, w.scale[512 * i : 512 * i + n], w.format)
        block[:n] = single[:n].copy_(rows)  # torch is slow from fp16 to bf16 directly
        columns.copy_(F.linear(x_wide, block[:n]))
    return out


def interpreted(dtype: torch.dtype) -> bool:
    """Whether tiles are widened to fp32 before a tl.dot: the interpreter's own bf16 products are wrong."""
    return INTERPRETED and dtype == torch.bfloat16


@jit
def _dot(a, b, WIDEN: tl.constexpr, HALF_SUMS: tl.constexpr):
    """a b in fp32, with fp32 sums, or half-precision ones that saturate. Products of fp32 are not rounded to TF32."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    if HALF_SUMS:
        return tl.clamp(tl.dot(a, b, out_dtype=tl.float16).to(tl.float32), -65504.0, 65504.0)
    return tl.dot(a, b, input_precision="ieee")


# ---- the product at T = 1, which four ops share


@jit
def _weight_tile(w, rows, first, cols, N, K: tl.constexpr, BLOCK: tl.constexpr):
    """W[rows, first + cols], streamed: read once and not kept in the caches. A thread gets eight neighbours, as it does of
    x in 16 bits: otherwise 8-bit tiles would go through shared memory to meet it."""
    offsets = tl.max_contiguous(tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K + first + cols[None, :], [1, 8])
    pointers = w + offsets
    if K % BLOCK == 0:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=first + cols[None, :] < K, other=0, eviction_policy="evict_first")


@jit
def _vector_tile(x, first, cols, K: tl.constexpr, BLOCK: tl.constexpr):
    """x[first + cols] as a row. In fp32 in the interpreter, whose own bf16 products are wrong."""
    pointers = x + first + cols[None, :]
    tile = tl.load(pointers) if K % BLOCK == 0 else tl.load(pointers, mask=first + cols[None, :] < K, other=0.0)
    return tile.to(tl.float32) if EMULATED else tile


@jit
def _packed_products(tile, x, FORMAT: tl.constexpr):
    """Partial sums, float32 [ROWS, BLOCK / 8], of a tile of 8-bit weights [ROWS, BLOCK] times halves x [1, BLOCK]: two products
    at a time, of which eight are added in half precision before they are widened; 1.4 instructions a weight instead of 2.5."""
    if EMULATED:
        return decode_tile(tile, FORMAT).to(tl.float32) * x.to(tl.float32)
    parts = tl.inline_asm_elementwise(products_asm(FORMAT), PRODUCTS_REGISTERS, [tile, x], dtype=tl.int8, is_pure=True, pack=8)
    parts = tl.reshape(parts, [tile.shape[0], tile.shape[1] // 8, 2, 2, 2]).to(tl.uint8, bitcast=True).to(tl.uint32)
    parts, _ = tl.split(parts.permute(0, 1, 3, 4, 2))  # the first of two registers
    even, odd = tl.split(parts)  # four bytes to a float, which costs nothing: it is in one register already
    b0, b2 = tl.split(even)
    b1, b3 = tl.split(odd)
    return (b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)).to(tl.float32, bitcast=True)


@jit
def _power_of_two(x):
    """The largest power of two that is not above x > 0."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@jit
def _product(
    tile, x, norm, norm_tile, w, scale, rows, N, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, FORMAT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """rmsnorm(x) W[rows]^T in fp32 (x W[rows]^T without NORM). The first tiles of W and norm come from before the wait.
    The factor of the norm is applied after the product, with which it commutes. PACKED: x is brought by a power of two to
    where its products fit halves, and multiplied with the norm in its own type."""
    cols = tl.arange(0, BLOCK)
    x_tile = _vector_tile(x, 0, cols, K, BLOCK)
    if NORM or PACKED:
        squares, peaks = x_tile.to(tl.float32) * x_tile.to(tl.float32), tl.abs(x_tile)
    if PACKED:
        for first in tl.static_range(BLOCK, K, BLOCK):
            further = _vector_tile(x, first, cols, K, BLOCK)
            squares += further.to(tl.float32) * further.to(tl.float32)
            peaks = tl.maximum(peaks, tl.abs(further))
        if NORM:  # eight products with codes of at most 448 stay below 65504, with a norm of up to 30
            factor = tl.rsqrt(tl.sum(squares) / K + eps)
            power = _power_of_two(factor) / 64
        else:
            factor = 1.0
            power = _power_of_two(tl.minimum(16 / tl.maximum(tl.max(peaks).to(tl.float32), 1e-30), 32768.0))
    for first in tl.static_range(0, K, BLOCK):
        now = tile
        if first + BLOCK < K:
            tile = _weight_tile(w, rows, first + BLOCK, cols, N, K, BLOCK)
        if first > 0:
            x_tile = _vector_tile(x, first, cols, K, BLOCK)
            if NORM and not PACKED:
                squares += x_tile.to(tl.float32) * x_tile.to(tl.float32)
        x_tile = x_tile * power.to(x_tile.dtype) if PACKED else x_tile.to(tl.float32)
        if NORM:
            x_tile *= norm_tile.to(x_tile.dtype)
            if first + BLOCK < K:
                norm_tile = _vector_tile(norm, first + BLOCK, cols, K, BLOCK)
        if PACKED:
            parts = _packed_products(now, x_tile.to(tl.float16), FORMAT)
        else:
            parts = decode_tile(now, FORMAT).to(tl.float32) * x_tile
        if first == 0:
            sums = parts
        else:
            sums += parts
    y = tl.sum(sums, 1)
    if PACKED:
        y *= factor / power
    elif NORM:
        y *= tl.rsqrt(tl.sum(squares) / K + eps)
    if FORMAT != "":
        y = rescale(y, tl.load(scale + rows, mask=rows < N, other=0.0), FORMAT)
    return y


def product_launch(op: str, kernel, x: Tensor, norm: Tensor | None, w: Matrix, eps: float, args: tuple, **constants) -> None:
    """Launch a kernel built on _product, as LAUNCHES says for this card."""
    assert x.shape == (1, w.columns) and x.is_contiguous(), (x.shape, w.shape)
    how = nearest(nearest(nearest(LAUNCHES, capability(x.device)), w.data.element_size())[op], w.columns)
    block = min(how.block, max(256, triton.next_power_of_2(w.columns)))
    warps = min(how.warps, max(1, block // 256))
    # _packed_products wants eight neighbours in each thread, of W and of x
    packed = w.format != "" and w.columns % 8 == 0 and block >= 256 * warps and x.element_size() == 2 and x.data_ptr() % 16 == 0
    cut = dict(ROWS=how.rows, BLOCK=block, FORMAT=kernel_format(w.format, x.device), PACKED=packed, warps=warps)
    grid, norm, scale = (triton.cdiv(w.rows, how.rows),), x if norm is None else norm, x if w.scale is None else w.scale
    launch(kernel, grid, x.device, x, norm, w.data, scale, eps, *args, N=w.rows, K=w.columns, **cut, **constants)


def kernel_format(format: str, device: torch.device) -> str:
    """A format as kernels know it: with "native" where the GPU converts it by an instruction of its own."""
    return "e4m3 native" if format == "e4m3" and capability(device) >= 89 else format


@jit
def _decode_kernel(codes, scale, out, K: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr):
    """One block of a row of 8-bit weights to the type of `out`."""
    gdc_launch_dependents(PDL)
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * K + cols
    y = rescale(decode_tile(tl.load(codes + at, mask=cols < K, other=0), FORMAT).to(tl.float32), tl.load(scale + row), FORMAT)
    gdc_wait(PDL)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=cols < K)


def library_weights(w: Matrix, like: Tensor) -> Tensor:
    """W [N, K] for the library's products, for T > 1: 8-bit weights decoded to the type of `like`."""
    if not w.format:
        return w.data
    out, block = like.new_empty(w.rows, w.columns), min(4096, triton.next_power_of_2(w.columns))
    cut = dict(K=w.columns, BLOCK=block, FORMAT=kernel_format(w.format, like.device))
    launch(_decode_kernel, (w.rows, triton.cdiv(w.columns, block)), like.device, w.data, w.scale, out, **cut)
    return out


@jit
def _encode_rows_kernel(x, codes, scales, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A row as e4m3, its largest magnitude as 448."""
    gdc_launch_dependents(PDL)
    cols = tl.arange(0, BLOCK)
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    values = tl.load(x + row * K + cols, mask=cols < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-30) / 448
    tl.store(codes + row * K + cols, encode_tile(values / scale), mask=cols < K)
    tl.store(scales + row, scale)


def encode_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations [T, K] as codes of e4m3, int8 [T, K], and a scale a row, float32 [T, 1]."""
    T, K = x.shape
    codes, scales = x.new_empty(T, K, dtype=torch.int8), x.new_empty(T, 1, dtype=torch.float32)
    block = triton.next_power_of_2(K)
    launch(_encode_rows_kernel, (T,), x.device, x, codes, scales, K=K, BLOCK=block, warps=min(16, max(1, block // 512)))
    return codes, scales


def multiplies_8_bits(w: Matrix) -> bool:
    """Whether the library multiplies these weights as they are, by tensor cores for e4m3."""
    return kernel_format(w.format, w.data.device) == "e4m3 native" and w.rows % 16 == 0 and w.columns % 16 == 0


def library_linear(x: Tensor, w: Matrix) -> Tensor:
    """x W^T for T > 1. x [T, K] -> [T, N] in the type of x, or in bf16 where tensor cores multiply the 8-bit weights: x is then
    rounded to e4m3, with a scale a row."""
    if multiplies_8_bits(w):
        codes, scales = encode_rows(x)
        e4m3 = fp8.TYPES["e4m3"]
        weights = w.data.view(e4m3).t()
        return torch._scaled_mm(codes.view(e4m3), weights, scales, w.scale[None], out_dtype=torch.bfloat16)
    with half_sums(w.half_sums):
        return F.linear(x, library_weights(w, x))


@contextmanager
def half_sums(on: bool) -> Iterator[None]:
    """The library's products of halves summed up in half precision: the switch is torch's own and global, so it is put back."""
    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    torch.backends.cuda.matmul.allow_fp16_accumulation = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = before


@jit
def _saturated(x, SATURATE: tl.constexpr):
    """What overflowed in half precision becomes the largest half, which no later sum turns into NaN."""
    return tl.clamp(x, -65504.0, 65504.0) if SATURATE else x


# ---- embedding: x = table[tokens]. tokens int32 [S], of which T from pos on; table [V, C] -> [T, C]


def embedding_ref(tokens: Tensor, pos: Tensor, T: int, table: Tensor) -> Tensor:
    first = int(pos)
    return F.embedding(tokens[first : first + T], table)


@jit
def _embedding_kernel(tokens, pos, table, out, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    gdc_launch_dependents(PDL)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait(PDL)
    t = tl.program_id(0)
    token = tl.load(tokens + tl.load(pos) + t).to(tl.int64)
    tl.store(out + t * C + cols, tl.load(table + token * C + cols, mask=cols < C), mask=cols < C)


def embedding(tokens: Tensor, pos: Tensor, T: int, table: Tensor) -> Tensor:
    C = table.shape[1]
    out = table.new_empty(T, C)
    launch(_embedding_kernel, (T, triton.cdiv(C, 1024)), table.device, tokens, pos, table, out, C=C, BLOCK=1024)
    return out


# ---- rmsnorm: y = x / sqrt(mean(x^2) + eps) * weight. x [T, C], weight [C] -> [T, C]  (Zhang and Sennrich, 2019)


def rmsnorm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


@jit
def _rmsnorm_kernel(x, weight, out, eps, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    gdc_launch_dependents(PDL)
    cols = tl.arange(0, BLOCK)
    weights = tl.load(weight + cols, mask=cols < C, other=0.0).to(tl.float32)
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64) * C
    values = tl.load(x + row + cols, mask=cols < C, other=0.0).to(tl.float32)
    y = values * tl.rsqrt(tl.sum(values * values) / C + eps) * weights
    tl.store(out + row + cols, y.to(out.dtype.element_ty), mask=cols < C)


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    T, C = x.shape
    assert x.is_contiguous() and weight.shape == (C,), (x.shape, weight.shape)
    out = torch.empty_like(x)
    block = triton.next_power_of_2(C)
    launch(_rmsnorm_kernel, (T,), x.device, x, weight, out, eps, C=C, BLOCK=block, warps=min(16, max(1, block // 256)))
    return out


# ---- rope: neighbouring pairs (x[2i], x[2i+1]) turned by the angle table[position, i]. x [T, N, D] -> [T, N, D]
#      table [max_seq_len, D/2, 2] float32 holds the cosine and the sine  (Su et al., 2021)


def rope_ref(x: Tensor, table: Tensor, pos: Tensor) -> Tensor:
    first, T = int(pos), x.shape[0]
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turn = torch.view_as_complex(table[first : first + T]).unsqueeze(1)
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


@jit
def _angle(table, position, pair, mask, HALF: tl.constexpr):
    """Cosine and sine for a pair at a position; no turn where the mask is off."""
    entry = table + (position * HALF + pair) * 2
    return tl.load(entry, mask=mask, other=1.0), tl.load(entry + 1, mask=mask, other=0.0)


@jit
def _turn(even, odd, cos, sin):
    return even * cos - odd * sin, even * sin + odd * cos


@jit
def _rope_kernel(
    x, table, k_cache, v_cache, q, pos,
    S: tl.constexpr, H: tl.constexpr, KH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    SATURATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token's heads, [H + 2 KH, D]: the first H are turned into q, the next KH into the cache, the last copied there."""
    gdc_launch_dependents(PDL)
    pairs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # over all heads
    head, pair = pairs // HALF, pairs % HALF
    gdc_wait(PDL)
    t = tl.program_id(0)
    position = tl.load(pos) + t
    inside = pairs < (H + 2 * KH) * HALF
    source = x + (t * (H + 2 * KH) * HALF + pairs) * 2
    even = _saturated(tl.load(source, mask=inside, other=0.0).to(tl.float32), SATURATE)
    odd = _saturated(tl.load(source + 1, mask=inside, other=0.0).to(tl.float32), SATURATE)
    cos, sin = _angle(table, position, pair, inside & (head < H + KH), HALF)
    even, odd = _turn(even, odd, cos, sin)
    even, odd = _saturated(even, SATURATE), _saturated(odd, SATURATE)
    _store_qkv(q, k_cache, v_cache, even, odd, t, position, head, pair, inside, S, H, KH, HALF)


@jit
def _to_cache(x, cache):
    """Keys or values as a cache stores them."""
    return encode_tile(x) if cache.dtype.element_ty == tl.int8 else x.to(cache.dtype.element_ty)


@jit
def _store_qkv(
    q, k_cache, v_cache, even, odd, t, position, head, pair, inside,
    S: tl.constexpr, H: tl.constexpr, KH: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Pairs to where their head belongs: q [T, H, D], or the caches [KH, S, D] at position."""
    to = q + ((t * H + head) * HALF + pair) * 2
    tl.store(to, even.to(q.dtype.element_ty), mask=inside & (head < H))
    tl.store(to + 1, odd.to(q.dtype.element_ty), mask=inside & (head < H))
    to = k_cache + (((head - H).to(tl.int64) * S + position) * HALF + pair) * 2
    is_k = inside & (head >= H) & (head < H + KH)
    tl.store(to, _to_cache(even, k_cache), mask=is_k)
    tl.store(to + 1, _to_cache(odd, k_cache), mask=is_k)
    to = v_cache + (((head - H - KH).to(tl.int64) * S + position) * HALF + pair) * 2
    is_v = inside & (head >= H + KH)
    tl.store(to, _to_cache(even, v_cache), mask=is_v)
    tl.store(to + 1, _to_cache(odd, v_cache), mask=is_v)


def rope(x: Tensor, table: Tensor, pos: Tensor) -> Tensor:
    T, N, D = x.shape
    out = torch.empty_like(x)
    _launch_rope(x, table, out, out, out, pos, S=0, H=N, KH=0, D=D)
    return out


def _launch_rope(
    x: Tensor, table: Tensor, k: Tensor, v: Tensor, q: Tensor, pos: Tensor,
    S: int, H: int, KH: int, D: int, saturate: bool = False,
) -> None:  # fmt: skip
    assert x.is_contiguous() and D % 2 == 0, (x.shape, D)
    pairs = (H + 2 * KH) * D // 2
    block = min(1024, triton.next_power_of_2(pairs))
    grid = (x.shape[0], triton.cdiv(pairs, block))
    launch(_rope_kernel, grid, x.device, x, table, k, v, q, pos, S=S, H=H, KH=KH, HALF=D // 2, BLOCK=block, SATURATE=saturate)


# ---- rmsnorm_qkv_rope: q, k, v = split(rmsnorm(x) Wqkv^T); q and k turned by rope; k, v written into the cache at pos.
#      x [T, C], wqkv [(H + 2 KH) D, C], caches of one layer [KH, S, D] -> q [T, H, D]
#      A cache in int8 holds codes of e4m3, without a scale: magnitudes up to 448, in three bits of mantissa from 0.016 on.


def rmsnorm_qkv_rope_ref(
    x: Tensor, norm: Tensor, wqkv: Matrix, table: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor, eps: float
) -> Tensor:
    first, T = int(pos), x.shape[0]
    KH, _, D = k_cache.shape
    qkv = linear_ref(rmsnorm_ref(x, norm, eps), wqkv).view(T, -1, D)
    H = qkv.shape[1] - 2 * KH
    qk = rope_ref(qkv[:, : H + KH], table, pos)
    for kept, new in ((k_cache, qk[:, H:]), (v_cache, qkv[:, H + KH :])):
        kept[:, first : first + T] = (fp8.round_to(new, "e4m3") if kept.dtype == torch.int8 else new).transpose(0, 1)
    return qk[:, :H]


@jit
def _qkv_kernel(
    x, norm, w, scale, eps, table, k_cache, v_cache, q, pos,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, PACKED: tl.constexpr,
    S: tl.constexpr, H: tl.constexpr, KH: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents(PDL)
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    pairs = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    head, pair = pairs // HALF, pairs % HALF
    inside = pairs < N // 2
    w_tile = _weight_tile(w, rows, 0, cols, N, K, BLOCK)
    norm_tile = _vector_tile(norm, 0, cols, K, BLOCK)
    position = tl.load(pos)  # moves only between steps
    cos, sin = _angle(table, position, pair, inside & (head < H + KH), HALF)
    gdc_wait(PDL)
    y = _product(w_tile, x, norm, norm_tile, w, scale, rows, N, eps, K, ROWS, BLOCK, True, FORMAT, PACKED)
    even, odd = tl.split(tl.reshape(y, [ROWS // 2, 2]))
    even, odd = _turn(even, odd, cos, sin)
    _store_qkv(q, k_cache, v_cache, even, odd, 0, position, head, pair, inside, S, H, KH, HALF)


def rmsnorm_qkv_rope(
    x: Tensor, norm: Tensor, wqkv: Matrix, table: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor, eps: float
) -> Tensor:
    (KH, S, D), T = k_cache.shape, x.shape[0]
    H = wqkv.rows // D - 2 * KH
    q = x.new_empty(T, H, D)
    if T == 1:
        args = (table, k_cache, v_cache, q, pos)
        product_launch("rmsnorm_qkv_rope", _qkv_kernel, x, norm, wqkv, eps, args, S=S, H=H, KH=KH, HALF=D // 2)
    else:
        qkv = library_linear(rmsnorm(x, norm, eps), wqkv)
        _launch_rope(qkv, table, k_cache, v_cache, q, pos, S, H, KH, D, wqkv.half_sums)
    return q


# ---- attention: softmax(q k^T / sqrt(D)) v. Token t sees positions 0 .. pos + t; H / KH query heads share one k, v head.
#      q [T, H, D], caches of one layer [KH, S, D] -> [T, H D]
#      half_sums: at prefill, products are summed up in half precision, and saturate.


def cached_ref(kept: Tensor) -> Tensor:
    """Keys or values in fp32, from a cache in any type."""
    return fp8.halves(kept, "e4m3").float() * fp8.GAIN["e4m3"] if kept.dtype == torch.int8 else kept.float()


def attention_ref(q: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor, half_sums: bool = False) -> Tensor:
    T, H, D = q.shape
    KH, length = k_cache.shape[0], int(pos) + T
    q32 = q.float().view(T, KH, H // KH, D).permute(1, 2, 0, 3)  # [KH, H / KH, T, D]
    k, v = (cached_ref(kept[:, None, :length]) for kept in (k_cache, v_cache))
    if T == 1:  # the heads of a group stand as rows of one product, so that k and v are read once
        y = F.scaled_dot_product_attention(q32.transpose(1, 2), k, v).transpose(1, 2)
    else:
        mask = torch.ones(T, length, dtype=torch.bool, device=q.device).tril(length - T)
        k, v = k.expand(KH, H // KH, length, D), v.expand(KH, H // KH, length, D)
        y = F.scaled_dot_product_attention(q32, k, v, attn_mask=mask)
    return y.permute(2, 0, 1, 3).reshape(T, H * D).to(q.dtype)


@jit
def _attend(
    q, k, v, m, l, acc, visible, scale, FORMAT: tl.constexpr, WIDEN: tl.constexpr, HALF_SUMS: tl.constexpr
):  # fmt: skip
    """One block of keys and values [N, D], as they are cached, added to the running softmax of rows [M, D]: maximum m, sum l,
    product acc. Exponentials are of base 2, the factor log2(e) is in scale (online softmax: Milakov and Gimelshein, 2018)."""
    k, v = decode_tile(k, FORMAT).to(q.dtype), decode_tile(v, FORMAT).to(q.dtype)
    scores = _dot(q, tl.trans(k), WIDEN, HALF_SUMS)
    scores = tl.where(visible, scores * scale, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, 1))
    base = tl.where(new_m == float("-inf"), 0.0, new_m)  # a row that has seen nothing yet
    p = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(m - base)
    return new_m, l * shrink + tl.sum(p, 1), acc * shrink[:, None] + _dot(p.to(v.dtype), v, WIDEN, HALF_SUMS)


@jit
def _attention_kernel(
    q, k_cache, v_cache, out, pos, T, scale, gain,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr, WIDEN: tl.constexpr, HALF_SUMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """M tokens of one head at a time, over the keys they see: first those that all of them see, then those on the diagonal."""
    gdc_launch_dependents(PDL)
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    head = tl.program_id(1)
    rows = block * M + tl.arange(0, M)
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, N)
    k_head = k_cache + (head // G).to(tl.int64) * S * D
    v_head = v_cache + (head // G).to(tl.int64) * S * D
    gdc_wait(PDL)
    before = tl.load(pos)
    inside = (rows[:, None] < T) & (d[None, :] < D)
    place = (rows[:, None] * H + head) * D + d[None, :]
    q_tile = tl.load(q + place, mask=inside, other=0.0)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    all_see = (before + block * M + 1) // N * N
    end = before + tl.minimum(T, (block + 1) * M)
    for first in range(0, all_see, N):
        s = first + n
        at = s[:, None] * D + d[None, :]
        k = tl.load(k_head + at, mask=d[None, :] < D, other=0)
        v = tl.load(v_head + at, mask=d[None, :] < D, other=0)
        m, l, acc = _attend(q_tile, k, v, m, l, acc, (s >= 0)[None, :], scale, FORMAT, WIDEN, HALF_SUMS)
    for first in range(all_see, end, N):
        s = first + n
        at, there = s[:, None] * D + d[None, :], (d[None, :] < D) & (s[:, None] < end)
        k = tl.load(k_head + at, mask=there, other=0)
        v = tl.load(v_head + at, mask=there, other=0)
        m, l, acc = _attend(q_tile, k, v, m, l, acc, s[None, :] <= before + rows[:, None], scale, FORMAT, WIDEN, HALF_SUMS)
    tl.store(out + place, (acc * gain / l[:, None]).to(out.dtype.element_ty), mask=inside)


@jit
def _chunk(length, split, SPLITS: tl.constexpr, N: tl.constexpr, LEAST: tl.constexpr):
    """Into how many chunks `length` positions are cut, and where this one begins and ends."""
    chunk = tl.where(length <= LEAST, LEAST, tl.cdiv(tl.cdiv(length, SPLITS), N) * N)
    return tl.cdiv(length, chunk), split * chunk, tl.minimum(split * chunk + chunk, length)


@jit
def _split_attention_kernel(
    q, k_cache, v_cache, out, partial, ends, arrived, pos, T, scale, gain,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, JOIN: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, N: tl.constexpr, LEAST: tl.constexpr, BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Few tokens: the G query heads of one key/value head stand as rows, and the cache is cut into chunks that run side by
    side. Whoever comes last of a head's chunks joins them: no second launch. What earlier steps have cached is fetched
    before the wait: pos moves only between steps, when everything has been written."""
    gdc_launch_dependents(PDL)
    head, split = tl.program_id(0), tl.program_id(1)
    rows, d, n = tl.arange(0, M), tl.arange(0, BLOCK_D), tl.arange(0, N)
    t, g = rows // G, rows % G
    k_head = k_cache + head.to(tl.int64) * S * D
    v_head = v_cache + head.to(tl.int64) * S * D
    before = tl.load(pos)
    used, start, end = _chunk(before + T, split, SPLITS, N, LEAST)
    s = start + n
    at, real = s[:, None] * D + d[None, :], d[None, :] < D
    old, new = s < tl.minimum(end, before), (s >= before) & (s < end)
    k = tl.load(k_head + at, mask=real & old[:, None], other=0)
    v = tl.load(v_head + at, mask=real & old[:, None], other=0)
    gdc_wait(PDL)
    if split < used:
        inside = (rows[:, None] < T * G) & (d[None, :] < D)
        place = (t[:, None] * H + head * G + g[:, None]) * D + d[None, :]
        q_tile = tl.load(q + place, mask=inside, other=0.0)
        k += tl.load(k_head + at, mask=real & new[:, None], other=0)
        v += tl.load(v_head + at, mask=real & new[:, None], other=0)
        m = tl.full([M], float("-inf"), tl.float32)
        l = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, BLOCK_D], tl.float32)
        visible = (s[None, :] <= before + t[:, None]) & (s[None, :] < end)
        m, l, acc = _attend(q_tile, k, v, m, l, acc, visible, scale, FORMAT, WIDEN, False)
        for first in range(start + N, end, N):
            s = first + n
            at, there = s[:, None] * D + d[None, :], (d[None, :] < D) & (s[:, None] < end)
            k = tl.load(k_head + at, mask=there, other=0)
            v = tl.load(v_head + at, mask=there, other=0)
            visible = (s[None, :] <= before + t[:, None]) & (s[None, :] < end)
            m, l, acc = _attend(q_tile, k, v, m, l, acc, visible, scale, FORMAT, WIDEN, False)
        acc *= gain
        if used == 1:
            tl.store(out + place, (acc / l[:, None]).to(out.dtype.element_ty), mask=inside)
        else:
            slot = (head * SPLITS + split) * M + rows
            tl.store(ends + slot * 2, m)
            tl.store(ends + slot * 2 + 1, l)
            tl.store(partial + slot[:, None] * D + d[None, :], acc, mask=inside)
            tl.debug_barrier()
            if tl.atomic_add(arrived + head, 1, sem="acq_rel") == used - 1:
                tl.store(arrived + head, 0)
                _join_splits(out, partial, ends, head, used, T * G, H, G, D, SPLITS, JOIN, M, R, BLOCK_D)


@jit
def _single_attention_kernel(
    q, k_cache, v_cache, out, partial, ends, arrived, pos, scale, gain,
    S: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, JOIN: tl.constexpr,
    N: tl.constexpr, LEAST: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for a single token with as many key/value heads as query heads, without tl.dot, which wants 16 rows: each of the
    N positions read at a time is a running softmax of its own, and they are joined at the end."""
    gdc_launch_dependents(PDL)
    head, split = tl.program_id(0), tl.program_id(1)
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, N)
    k_head = k_cache + head.to(tl.int64) * S * D
    v_head = v_cache + head.to(tl.int64) * S * D
    before = tl.load(pos)
    used, start, end = _chunk(before + 1, split, SPLITS, N, LEAST)
    at, real = n[:, None] * D + d[None, :], d[None, :] < D
    cached = start + n[:, None] < tl.minimum(end, before)
    k = tl.load(k_head + start * D + at, mask=real & cached, other=0)
    v = tl.load(v_head + start * D + at, mask=real & cached, other=0)
    gdc_wait(PDL)
    if split < used:
        q_row = tl.load(q + head * D + d, mask=d < D, other=0.0).to(tl.float32) * scale
        fresh = start + n[:, None] == before
        k += tl.load(k_head + start * D + at, mask=real & fresh, other=0)
        v += tl.load(v_head + start * D + at, mask=real & fresh, other=0)
        m = tl.full([N], float("-inf"), tl.float32)
        l = tl.zeros([N], tl.float32)
        acc = tl.zeros([N, BLOCK_D], tl.float32)
        for first in range(start, end, N):
            k_now, v_now, following = k, v, first + N
            there = real & (following + n[:, None] < end)
            k = tl.load(k_head + following * D + at, mask=there, other=0)
            v = tl.load(v_head + following * D + at, mask=there, other=0)
            scores = tl.sum(decode_tile(k_now, FORMAT).to(tl.float32) * q_row[None, :], 1)
            scores = tl.where(first + n < end, scores, float("-inf"))
            new_m = tl.maximum(tl.maximum(m, scores), -1e30)  # finite, so that a position not there adds nothing
            p, shrink = tl.exp2(scores - new_m), tl.exp2(m - new_m)
            l = l * shrink + p
            acc = acc * shrink[:, None] + p[:, None] * decode_tile(v_now, FORMAT).to(tl.float32)
            m = new_m
        peak = tl.max(m, 0)
        weight = tl.exp2(m - peak)
        total, y = tl.sum(l * weight, 0), tl.sum(acc * weight[:, None], 0) * gain
        if used == 1:
            tl.store(out + head * D + d, (y / total).to(out.dtype.element_ty), mask=d < D)
        else:
            slot = head * SPLITS + split
            tl.store(ends + slot * 2, peak)
            tl.store(ends + slot * 2 + 1, total)
            tl.store(partial + slot * D + d, y, mask=d < D)
            tl.debug_barrier()
            if tl.atomic_add(arrived + head, 1, sem="acq_rel") == used - 1:
                tl.store(arrived + head, 0)
                _join_splits(out, partial, ends, head, used, 1, H, 1, D, SPLITS, JOIN, 1, 1, BLOCK_D)


@jit
def _join_splits(
    out, partial, ends, head, used, count, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    SPLITS: tl.constexpr, JOIN: tl.constexpr, M: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The softmax over all chunks from those of each, JOIN of them at a time, for `count` rows of at most R."""
    rows, d, splits = tl.arange(0, R), tl.arange(0, BLOCK_D), tl.arange(0, SPLITS)
    slots = (head * SPLITS + splits[:, None]) * M + rows[None, :]
    written = (splits[:, None] < used) & (rows[None, :] < count)
    peak = tl.max(tl.load(ends + slots * 2, mask=written, other=-1e30, cache_modifier=".cg"), 0)
    total = tl.zeros([R], tl.float32)
    y = tl.zeros([R, BLOCK_D], tl.float32)
    for first in tl.static_range(0, SPLITS, JOIN):
        split = first + tl.arange(0, JOIN)
        slot = (head * SPLITS + split[:, None]) * M + rows[None, :]
        there = (split[:, None] < used) & (rows[None, :] < count)
        weight = tl.exp2(tl.load(ends + slot * 2, mask=there, other=float("-inf"), cache_modifier=".cg") - peak[None, :])
        total += tl.sum(weight * tl.load(ends + slot * 2 + 1, mask=there, other=0.0, cache_modifier=".cg"), 0)
        inside = there[:, :, None] & (d < D)[None, None, :]
        part = tl.load(partial + slot[:, :, None] * D + d[None, None, :], mask=inside, other=0.0, cache_modifier=".cg")
        y += tl.sum(weight[:, :, None] * part, 0)
    place = ((rows // G)[:, None] * H + head * G + (rows % G)[:, None]) * D + d[None, :]
    y = (y / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place, y, mask=(rows[:, None] < count) & (d[None, :] < D))


SPLIT_ROWS = 64  # up to so many query rows a key/value head, attention is bound by reading the cache: split it over positions


@cache
def _split_buffers(device: torch.device, KH: int, D: int, splits: int, M: int) -> tuple[Tensor, Tensor, Tensor]:
    """Workspace of _split_attention_kernel, kept from call to call; `arrived` is left at zero by every launch."""
    f32 = dict(dtype=torch.float32, device=device)
    arrived = torch.zeros(KH, dtype=torch.int32, device=device)
    return torch.empty(KH, splits, M, D, **f32), torch.empty(KH, splits, M, 2, **f32), arrived


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor, half_sums: bool = False) -> Tensor:
    (T, H, D), (KH, S, _) = q.shape, k_cache.shape
    assert q.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous() and D % 8 == 0, (q.shape, k_cache.shape)
    out, form = q.new_empty(T, H * D), kernel_format("e4m3", q.device) if k_cache.dtype == torch.int8 else ""
    gain = fp8.GAIN["e4m3"] if form == "e4m3" else 1.0
    scale = gain * math.log2(math.e) / math.sqrt(D)
    shape = dict(S=S, H=H, G=H // KH, D=D, BLOCK_D=max(16, triton.next_power_of_2(D)), FORMAT=form, WIDEN=interpreted(q.dtype))
    if T * H // KH <= SPLIT_ROWS:
        how = nearest(nearest(SPLIT_LAUNCHES, capability(q.device)), T * H // KH)
        splits = min(32, triton.next_power_of_2(triton.cdiv(how.programs * processors(q.device), KH)))
        R = triton.next_power_of_2(T * H // KH)
        M = 1 if R == 1 else max(16, R)  # tl.dot wants 16 rows
        N = how.block if D <= 128 else max(how.block // 2, 1 if R == 1 else 16)
        args = (q, k_cache, v_cache, out, *_split_buffers(q.device, KH, D, splits, M), pos)
        cut = dict(SPLITS=splits, JOIN=min(splits, max(1, 4096 // (R * shape["BLOCK_D"]))), N=N, LEAST=max(N, how.least))
        if R == 1:
            shape = {name: shape[name] for name in ("S", "H", "D", "BLOCK_D", "FORMAT")}
            launch(_single_attention_kernel, (KH, splits), q.device, *args, scale, gain, **shape, **cut, warps=how.warps)
        else:
            cut |= dict(M=M, R=R, warps=how.warps, stages=how.stages)
            launch(_split_attention_kernel, (KH, splits), q.device, *args, T, scale, gain, **shape, **cut)
    else:
        M, N, stages = (128 if T > 64 else 64, 64, 3) if D <= 128 else (64, 32, 2)  # within 99 KB of shared memory
        args = (q, k_cache, v_cache, out, pos, T, scale, gain)
        cut = dict(M=M, N=N, HALF_SUMS=half_sums, warps=M // 16, stages=stages)
        launch(_attention_kernel, (triton.cdiv(T, M), H), q.device, *args, **shape, **cut)
    return out


# ---- linear_add: residual += x W^T, in place. x [T, K], W [C, K], residual [T, C] -> residual


def linear_add_ref(x: Tensor, w: Matrix, residual: Tensor) -> Tensor:
    return residual.add_(linear_ref(x, w))


@jit
def _linear_add_kernel(
    x, norm, w, scale, eps, residual,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents(PDL)
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    w_tile = _weight_tile(w, rows, 0, cols, N, K, BLOCK)
    gdc_wait(PDL)
    y = tl.load(residual + rows, mask=rows < N, other=0.0).to(tl.float32)
    y += _product(w_tile, x, norm, w_tile, w, scale, rows, N, eps, K, ROWS, BLOCK, False, FORMAT, PACKED)
    tl.store(residual + rows, y.to(residual.dtype.element_ty), mask=rows < N)


def linear_add(x: Tensor, w: Matrix, residual: Tensor) -> Tensor:
    assert residual.shape == (x.shape[0], w.rows) and residual.is_contiguous(), (residual.shape, w.shape)
    if x.shape[0] == 1:
        product_launch("linear_add", _linear_add_kernel, x, None, w, 0.0, (residual,))
        return residual
    if multiplies_8_bits(w):
        return residual.add_(library_linear(x, w))
    with half_sums(w.half_sums):
        residual.addmm_(x, library_weights(w, x).t())
    return residual.nan_to_num_(0.0, 65504.0, -65504.0) if w.half_sums else residual


# ---- rmsnorm_swiglu: silu(a) * b with a, b = rmsnorm(x) W1^T, rmsnorm(x) W3^T. x [T, C] -> [T, F]  (Shazeer, 2020)
#      w13 [2 F, C] holds the rows of w1 and w3 in turn, so that a and b of one output are neighbours


def rmsnorm_swiglu_ref(x: Tensor, norm: Tensor, w13: Matrix, eps: float) -> Tensor:
    a, b = linear_ref(rmsnorm_ref(x, norm, eps), w13).unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(a) * b


@jit
def _silu_mul(a, b):
    return a / (1.0 + tl.exp(-a)) * b


@jit
def _rmsnorm_swiglu_kernel(
    x, norm, w, scale, eps, out,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents(PDL)
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    w_tile = _weight_tile(w, rows, 0, cols, N, K, BLOCK)
    norm_tile = _vector_tile(norm, 0, cols, K, BLOCK)
    gdc_wait(PDL)
    y = _product(w_tile, x, norm, norm_tile, w, scale, rows, N, eps, K, ROWS, BLOCK, True, FORMAT, PACKED)
    a, b = tl.split(tl.reshape(y, [ROWS // 2, 2]))
    to = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    tl.store(out + to, _silu_mul(a, b).to(out.dtype.element_ty), mask=to < N // 2)


@jit
def _swiglu_kernel(ab, out, F, BLOCK: tl.constexpr, SATURATE: tl.constexpr, PDL: tl.constexpr):
    """silu(a) * b of neighbouring a and b. ab [T, 2 F] -> [T, F]"""
    gdc_launch_dependents(PDL)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait(PDL)
    at = tl.program_id(0).to(tl.int64) * F + cols
    pairs = tl.load(ab + at[:, None] * 2 + tl.arange(0, 2)[None, :], mask=cols[:, None] < F, other=0.0).to(tl.float32)
    a, b = tl.split(_saturated(pairs, SATURATE))
    tl.store(out + at, _saturated(_silu_mul(a, b), SATURATE).to(out.dtype.element_ty), mask=cols < F)


def rmsnorm_swiglu(x: Tensor, norm: Tensor, w13: Matrix, eps: float) -> Tensor:
    T, hidden = x.shape[0], w13.rows // 2
    out = x.new_empty(T, hidden)
    if T == 1:
        product_launch("rmsnorm_swiglu", _rmsnorm_swiglu_kernel, x, norm, w13, eps, (out,))
    else:
        ab = library_linear(rmsnorm(x, norm, eps), w13)
        grid = (T, triton.cdiv(hidden, 1024))
        launch(_swiglu_kernel, grid, x.device, ab, out, hidden, BLOCK=1024, SATURATE=w13.half_sums)
    return out


# ---- rmsnorm_linear: out = rmsnorm(x) W^T. x [T, C], W [V, C], out float32 [T, V], the logits -> out


def rmsnorm_linear_ref(x: Tensor, norm: Tensor, w: Matrix, eps: float, out: Tensor) -> Tensor:
    return out.copy_(linear_ref(rmsnorm_ref(x, norm, eps), w))


@jit
def _rmsnorm_linear_kernel(
    x, norm, w, scale, eps, out,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents(PDL)
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    w_tile = _weight_tile(w, rows, 0, cols, N, K, BLOCK)
    norm_tile = _vector_tile(norm, 0, cols, K, BLOCK)
    gdc_wait(PDL)
    y = _product(w_tile, x, norm, norm_tile, w, scale, rows, N, eps, K, ROWS, BLOCK, True, FORMAT, PACKED)
    tl.store(out + rows, y, mask=rows < N)


def rmsnorm_linear(x: Tensor, norm: Tensor, w: Matrix, eps: float, out: Tensor) -> Tensor:
    assert out.shape == (x.shape[0], w.rows) and out.is_contiguous(), (out.shape, w.shape)
    if x.shape[0] == 1:
        product_launch("rmsnorm_linear", _rmsnorm_linear_kernel, x, norm, w, eps, (out,))
        return out
    return out.copy_(library_linear(rmsnorm(x, norm, eps), w))


# ---- cross_entropy: loss of each row, log(sum(exp(logits))) - logits[target]. logits float32 [T, V], targets int [T] -> [T]


def cross_entropy_ref(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets.long(), reduction="none")


@jit
def _cross_entropy_kernel(logits, targets, out, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One reading of the row, with a running maximum and sum: no second copy of the logits."""
    gdc_launch_dependents(PDL)
    cols = tl.arange(0, BLOCK)
    gdc_wait(PDL)
    row = logits + tl.program_id(0).to(tl.int64) * V
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        l = tl.load(row + first + cols, mask=first + cols < V, other=float("-inf"), eviction_policy="evict_first")
        new = tl.maximum(tl.maximum(peaks, l), -1e30)  # finite, so that lanes without a logit add nothing
        sums = sums * tl.exp(peaks - new) + tl.exp(l - new)
        peaks = new
    peak = tl.max(peaks, 0)
    total = tl.sum(sums * tl.exp(peaks - peak), 0)
    target = tl.load(row + tl.load(targets + tl.program_id(0)))
    tl.store(out + tl.program_id(0), peak + tl.log(total) - target)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    T, V = logits.shape
    assert logits.is_contiguous() and targets.shape == (T,), (logits.shape, targets.shape)
    out = logits.new_empty(T)
    block = min(4096, triton.next_power_of_2(V))
    launch(_cross_entropy_kernel, (T,), logits.device, logits, targets, out, V, BLOCK=block, warps=max(1, block // 512))
    return out


reference = SimpleNamespace(
    embedding=embedding_ref,
    rmsnorm=rmsnorm_ref,
    rope=rope_ref,
    rmsnorm_qkv_rope=rmsnorm_qkv_rope_ref,
    attention=attention_ref,
    linear_add=linear_add_ref,
    rmsnorm_swiglu=rmsnorm_swiglu_ref,
    rmsnorm_linear=rmsnorm_linear_ref,
    cross_entropy=cross_entropy_ref,
    sample=sample_ref,
)

fused = SimpleNamespace(
    embedding=embedding,
    rmsnorm=rmsnorm,
    rope=rope,
    rmsnorm_qkv_rope=rmsnorm_qkv_rope,
    attention=attention,
    linear_add=linear_add,
    rmsnorm_swiglu=rmsnorm_swiglu,
    rmsnorm_linear=rmsnorm_linear,
    cross_entropy=cross_entropy,
    sample=sample,
)
