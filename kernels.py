"""Every op of the model. One op is one block: formula and shapes, a reference in plain torch, the Triton kernel, its launcher.

Shape letters, here and everywhere:

    T new tokens        S cached positions    V vocabulary    L layers
    C dim               F hidden_dim          N, K  rows and columns of any matrix
    H query heads       KH key/value heads    G = H / KH      D head_dim

There is one sequence at a time, so no batch axis. `pos` is a one-element int32 tensor on the device: how many positions are
cached before the T new ones. Its value is called start_pos. Kernels take contiguous tensors and derive strides from shapes.

At T = 1 a product is bound by reading W: the kernel streams W's rows once and does everything else on the way. With 2 to 16
tokens, tensor cores multiply W as it streams by (few_tokens.py), unless launch.FEW_LAUNCHES leaves it to the library.
Otherwise the library's product runs between small fused kernels: with many tokens it is compute-bound, and runs at the card's
product rate (BENCHMARKS.md).

The file ends with two matching tables. `reference` runs on any torch device: it is the CPU path, and the oracle in tests.
`fused` runs on CUDA, and on CPU tensors when TRITON_INTERPRET=1. To add an op: write its block, enter it in both tables, and
add its arguments to `op_arguments` in test_all.py.
"""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional

import few_rows
import fp8
import hopper
from few_tokens import few_launch, few_product, launch_few
from fp8 import E4M3, Matrix
from launch import (
    EMULATED,
    FEW_ROWS,
    INTERPRETED,
    LAUNCHES,
    SPLIT_LAUNCHES,
    SplitLaunch,
    capability,
    constexpr,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    launch,
    load_vector,
    load_weights,
    nearest,
    processors,
    tl,
    triton,
)
from sampling import sample, sample_ref, sample_rows, sample_rows_ref

# ---- half-precision sums. GeForce tensor cores multiply fp16 twice as fast when they accumulate in half precision. torch has a
#      switch for that, global and off by default, which the library's products obey; the kernels here obey the same one. What
#      overflows would become inf, and NaN in the next product, so they saturate: what is beyond 65504 becomes 65504.


@contextmanager
def fp16_accumulation(on: bool) -> Iterator[None]:
    """Set torch's switch, and restore it afterwards."""
    before = fp16_sums()
    torch.backends.cuda.matmul.allow_fp16_accumulation = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = before


def fp16_sums() -> bool:
    return torch.backends.cuda.matmul.allow_fp16_accumulation


@jit
def _saturated(x, FP16_SUMS: tl.constexpr):
    """x, clamped to the range of fp16 if FP16_SUMS; NaN stays NaN."""
    return tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL) if FP16_SUMS else x


# ---- the product that four ops share: y = x W^T


@cache
def multiplies_bf16() -> bool:
    """Whether oneDNN has bf16 products for this CPU."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def storage_dtype(backend: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type in which a backend stores the matrices of a model in dtype. On a CPU without bf16 products the reference ops
    take fp16 even for bf16, since torch streams it twice as fast; bf16 weights fit exactly, except magnitudes under 6e-5,
    which are off by at most 3e-8."""
    slow = backend == "torch" and device.type == "cpu" and not multiplies_bf16()
    return torch.float16 if slow and dtype == torch.bfloat16 else dtype


def prepacked(w: Matrix, backend: str) -> Matrix:
    """A matrix in the layout that the backend's ops read fastest: for the reference ops on a CPU, bf16 in oneDNN's blocked
    layout, one copy for both single tokens and prompts; any other as it is."""
    if backend != "torch" or w.data.device.type != "cpu" or w.data.dtype != torch.bfloat16 or not multiplies_bf16():
        return w
    return Matrix(torch.ops.mkldnn._reorder_linear_weight(w.data))


def linear_ref(x: Tensor, w: Matrix) -> Tensor:
    """y = x W^T. x [T, K] -> [T, N]."""
    if w.data.is_mkldnn:
        T = x.shape[0]
        x16 = functional.pad(x.bfloat16(), (0, 0, 0, _padded_rows(T) - T))
        return torch.ops.mkldnn._linear_pointwise(x16, w.data, None, "none", [], "")[:T].to(x.dtype)
    if w.data.device.type == "cpu" and (w.format or w.data.dtype == torch.float16):
        return _cpu_vector_linear(x, w) if x.shape[0] == 1 else _cpu_prompt_linear(x, w)
    return functional.linear(x, w.dense().to(x.dtype))


def _padded_rows(T: int) -> int:
    """How many rows oneDNN is given for T: one of a few sizes. oneDNN compiles a kernel for each new size, which takes
    milliseconds and 0.7 MB per matrix shape: with ever new prompt lengths a chat would grow by hundreds of MB. It computes 16
    rows at a time, so most of the padding costs nothing."""
    power = 1 << (T - 1).bit_length()
    step = max(16, power // 8)
    return power if T <= 16 else -(-T // step) * step


def _cpu_vector_linear(x: Tensor, w: Matrix) -> Tensor:
    """On a CPU, one token with fp16 or 8-bit weights: torch's fp16 matrix-vector product (fp32 sums) runs at memory
    speed. x is scaled to magnitudes of at most 1, so that a result fits fp16 if its row of |W| sums to less than 65504. Codes
    are decoded a block of rows at a time, so that the halves stay in the cache."""
    scale = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32).clamp_(min=1e-30)
    row = (x[0] / scale).half()
    if w.format is None:
        return (torch.mv(w.data, row) * scale).to(x.dtype)[None]
    y, space = row.new_empty(w.rows), torch.empty(1024, w.columns, dtype=torch.int16)
    for codes, part in zip(w.data.split(1024), y.split(1024)):
        torch.mv(w.format.halves(codes, space[: len(codes)]), row, out=part)
    return (y * (w.scale * (scale * w.format.gain))).to(x.dtype)[None]


def _cpu_prompt_linear(x: Tensor, w: Matrix) -> Tensor:
    """On a CPU, several tokens with fp16 or 8-bit weights: the library's product in bf16 (fp32 for other activations), the
    weights widened a block of rows at a time."""
    wide = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    x_wide, out = x.to(wide), x.new_empty(x.shape[0], w.rows)
    single, block = torch.empty(512, w.columns), torch.empty(512, w.columns, dtype=wide)
    for i, (rows, columns) in enumerate(zip(w.data.split(512), out.split(512, 1))):
        n = len(rows)
        if w.format:
            rows = w.format.decoded(rows, w.scale[512 * i : 512 * i + n])
        block[:n] = single[:n].copy_(rows)  # torch is slow from fp16 to bf16 directly
        columns.copy_(functional.linear(x_wide, block[:n]))
    return out


@jit
def _pairs(y):
    """The even and the odd rows of y [N, T], each [N / 2, T]."""
    return tl.split(y.reshape(y.shape[0] // 2, 2, y.shape[1]).permute(0, 2, 1))


@jit
def _products(w_tile, x_tile):
    return w_tile.to(tl.float32) * x_tile


@jit
def product(
    x, norm, w, scale, residual, rows, N, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, PARTIAL_SUMS: tl.constexpr, GAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: rmsnorm(x) W[rows]^T in fp32, or x W[rows]^T where norm is None; plus residual[rows] where that is not None.
    The norm's factor 1 / rms(x) is one number for all of x, so it is applied to the sums. PARTIAL_SUMS multiplies a tile of
    weights, as stored, by a tile of x; codes come with one scale per row."""
    offs_k = tl.arange(0, BLOCK)
    # Before the wait: fetch the first tiles of what no kernel writes
    w_tile = load_weights(w, rows, 0, offs_k, N, K, BLOCK)
    if norm is not None:
        norm_tile = load_vector(norm, 0, offs_k, K, BLOCK)
    gdc_wait(PDL)
    if residual is not None:
        residual_tile = tl.load(residual + rows, mask=rows < N, other=0.0).to(tl.float32)
    x_tile = load_vector(x, 0, offs_k, K, BLOCK)
    if norm is not None:
        squares = x_tile.to(tl.float32) * x_tile.to(tl.float32)
    for k in tl.static_range(0, K, BLOCK):
        # The next tile of W is in flight while this one is multiplied
        w_now = w_tile
        if k + BLOCK < K:
            w_tile = load_weights(w, rows, k + BLOCK, offs_k, N, K, BLOCK)
        if k > 0:
            x_tile = load_vector(x, k, offs_k, K, BLOCK)
            if norm is not None:
                squares += x_tile.to(tl.float32) * x_tile.to(tl.float32)
        x_tile = x_tile.to(tl.float32)
        if norm is not None:
            x_tile *= norm_tile.to(tl.float32)
            if k + BLOCK < K:
                norm_tile = load_vector(norm, k + BLOCK, offs_k, K, BLOCK)
        sums = PARTIAL_SUMS(w_now, x_tile)
        if k == 0:
            acc = sums
        else:
            acc += sums
    y = tl.sum(acc, 1)
    if norm is not None:
        y *= tl.rsqrt(tl.sum(squares) / K + eps)
    if scale is not None:
        y *= tl.load(scale + rows, mask=rows < N, other=0.0) * GAIN
    return y if residual is None else residual_tile + y


def launch_product(
    op: str, kernel, x: Tensor, norm: Tensor | None, w: Matrix, eps: float, *args, within: int = 0, **constants
) -> None:
    """Launch a kernel built on `product`, with this card's sizes from LAUNCHES. `within`: no program's rows cross a multiple of
    this."""
    assert x.shape == (1, w.columns) and x.is_contiguous(), (x.shape, w.shape)
    how = nearest(nearest(nearest(LAUNCHES, capability(x.device)), w.data.element_size())[op], w.columns)
    block = min(how.block, max(256, triton.next_power_of_2(w.columns)))
    warps = min(how.warps, max(1, block // 256))
    form = dict(PRODUCT=product, PARTIAL_SUMS=_products, GAIN=1.0)
    if w.format is not None:
        format = w.format.on(x.device)
        form = dict(PRODUCT=product, PARTIAL_SUMS=format.products, GAIN=format.gain)
        # packed products need eight neighbours of W and of x in each thread
        if w.columns % 8 == 0 and block >= 256 * warps and x.element_size() == 2 and x.data_ptr() % 16 == 0:
            form |= dict(PRODUCT=fp8.packed_product, PARTIAL_SUMS=format.packed_sums)
    rows = math.gcd(how.rows, within)
    cut = dict(N=w.rows, K=w.columns, ROWS=rows, BLOCK=block, warps=warps)
    grid = (triton.cdiv(w.rows, rows),)
    launch(kernel, grid, x.device, x, norm, w.data, w.scale, eps, *args, **cut, **form, **constants)


def library_weights(w: Matrix, x: Tensor) -> Tensor:
    """W [N, K] in the type of x, for the library's products."""
    return w.data if w.format is None else fp8.decode_for(w, x)


# ---- embedding: x = table[tokens[pos : pos + T]]. tokens int32 [S], table [V, C] -> [T, C]


def embedding_ref(tokens: Tensor, pos: Tensor, T: int, table: Tensor) -> Tensor:
    start_pos = int(pos)
    return functional.embedding(tokens[start_pos : start_pos + T], table)


@jit
def _embedding_kernel(tokens, pos, table, out, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    gdc_launch_dependents(PDL)
    offs_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait(PDL)
    t = tl.program_id(0)
    token = tl.load(tokens + tl.load(pos) + t).to(tl.int64)
    tl.store(out + t * C + offs_c, tl.load(table + token * C + offs_c, mask=offs_c < C), mask=offs_c < C)


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
def _rmsnorm_kernel(
    x, weight, out, scales, eps, C: tl.constexpr, BLOCK: tl.constexpr, ENCODE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    gdc_launch_dependents(PDL)
    offs_c = tl.arange(0, BLOCK)
    weights = tl.load(weight + offs_c, mask=offs_c < C, other=0.0).to(tl.float32)
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    values = tl.load(x + row * C + offs_c, mask=offs_c < C, other=0.0).to(tl.float32)
    y = values * tl.rsqrt(tl.sum(values * values) / C + eps) * weights
    if scales is None:
        tl.store(out + row * C + offs_c, y.to(out.dtype.element_ty), mask=offs_c < C)
    else:
        fp8.store_codes(y, out, scales, row, offs_c, C, ENCODE)


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    _launch_rmsnorm(x, weight, eps, out, None)
    return out


def _launch_rmsnorm(x: Tensor, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None) -> None:
    """Write to out in the type of x, or to out and scales as codes."""
    T, C = x.shape
    assert x.is_contiguous() and weight.shape == (C,), (x.shape, weight.shape)
    block = triton.next_power_of_2(C)
    cut = dict(C=C, BLOCK=block, ENCODE=E4M3.on(x.device).encode_tile, warps=min(16, max(1, block // 512)))
    launch(_rmsnorm_kernel, (T,), x.device, x, weight, out, scales, eps, **cut)


def normed_linear(x: Tensor, norm: Tensor, w: Matrix, eps: float) -> Tensor:
    """rmsnorm(x) W^T by the library, for T > 1."""
    if not fp8.on_tensor_cores(w):
        return functional.linear(rmsnorm(x, norm, eps), library_weights(w, x))
    codes, scales = fp8.empty_codes(x)
    _launch_rmsnorm(x, norm, eps, codes, scales)
    return fp8.tensor_core_linear(codes, scales, w, x.dtype)


# ---- rope: neighbouring pairs (x[2i], x[2i+1]) rotated by the angle table[position, i]. x [T, H, D] -> [T, H, D]
#      table [max_seq_len, D/2, 2] float32 holds the cosine and the sine  (Su et al., 2021)


def rope_ref(x: Tensor, table: Tensor, pos: Tensor) -> Tensor:
    start_pos, T = int(pos), x.shape[0]
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    angles = torch.view_as_complex(table[start_pos : start_pos + T]).unsqueeze(1)
    return torch.view_as_real(pairs * angles).flatten(-2).to(x.dtype)


@jit
def _load_angle(table, position, pair, mask, HALF_D: tl.constexpr):
    """Cosine and sine for a pair at a position; no rotation where the mask is off."""
    offs = (position * HALF_D + pair) * 2
    return tl.load(table + offs, mask=mask, other=1.0), tl.load(table + offs + 1, mask=mask, other=0.0)


@jit
def _rotate(even, odd, cos, sin):
    return even * cos - odd * sin, even * sin + odd * cos


@jit
def _to_cache(x, cache):
    """Keys or values as a cache stores them."""
    return fp8.e4m3_encode(x) if cache.dtype.element_ty == tl.int8 else x.to(cache.dtype.element_ty)


@jit
def _store_qkv(
    q, k_cache, v_cache, even, odd, t, position, head, pair, mask,
    S: tl.constexpr, H: tl.constexpr, KH: tl.constexpr, HALF_D: tl.constexpr,
):  # fmt: skip
    """Store pairs where their head belongs: in q [T, H, D], or in the caches [KH, S, D] at position."""
    offs_q = ((t * H + head) * HALF_D + pair) * 2
    mask_q = mask & (head < H)
    tl.store(q + offs_q, even.to(q.dtype.element_ty), mask=mask_q)
    tl.store(q + offs_q + 1, odd.to(q.dtype.element_ty), mask=mask_q)
    offs_k = (((head - H).to(tl.int64) * S + position) * HALF_D + pair) * 2
    mask_k = mask & (head >= H) & (head < H + KH)
    tl.store(k_cache + offs_k, _to_cache(even, k_cache), mask=mask_k)
    tl.store(k_cache + offs_k + 1, _to_cache(odd, k_cache), mask=mask_k)
    offs_v = (((head - H - KH).to(tl.int64) * S + position) * HALF_D + pair) * 2
    mask_v = mask & (head >= H + KH)
    tl.store(v_cache + offs_v, _to_cache(even, v_cache), mask=mask_v)
    tl.store(v_cache + offs_v + 1, _to_cache(odd, v_cache), mask=mask_v)


@jit
def _rope_kernel(
    x, bias, table, k_cache, v_cache, q, pos,
    S: tl.constexpr, H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
    ENCODE: tl.constexpr, FP16_SUMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS of one token's heads, x [T, H + 2 KH, D]: the first H are rotated into q, the next KH into the cache of keys; the
    last KH are copied into the cache of values. Heads are read and written whole, 16 bytes per thread; pairs are split in
    registers."""
    gdc_launch_dependents(PDL)
    t = tl.program_id(0)
    heads, offs_d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK_D)
    # Before the wait: the interleaved cosines and sines at pos, which moves only between steps
    position = tl.load(pos) + t
    angles = tl.load(table + position * D + offs_d[None, :], mask=offs_d[None, :] < D, other=0.0)
    cos, sin = tl.split(tl.reshape(tl.broadcast_to(angles, [HEADS, BLOCK_D]), [HEADS, BLOCK_D // 2, 2]))
    gdc_wait(PDL)
    mask = (heads[:, None] < H + 2 * KH) & (offs_d[None, :] < D)
    offs = (t * (H + 2 * KH) + heads[:, None]).to(tl.int64) * D + offs_d[None, :]
    values = tl.load(x + offs, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        values += tl.load(bias + heads[:, None] * D + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    values = _saturated(values, FP16_SUMS)
    even, odd = tl.split(tl.reshape(values, [HEADS, BLOCK_D // 2, 2]))
    even, odd = _rotate(even, odd, cos, sin)
    turned = _saturated(tl.reshape(tl.join(even, odd), [HEADS, BLOCK_D]), FP16_SUMS)
    offs_q = (t * H + heads[:, None]).to(tl.int64) * D + offs_d[None, :]
    tl.store(q + offs_q, turned.to(q.dtype.element_ty), mask=mask & (heads[:, None] < H))
    if KH > 0:
        kv_head = (heads - H).to(tl.int64)[:, None]
        kept = tl.where(kv_head < KH, turned, values)
        kept = kept.to(k_cache.dtype.element_ty) if ENCODE is None else ENCODE(kept)
        offs_kv = (kv_head * S + position) * D + offs_d[None, :]
        tl.store(k_cache + offs_kv, kept, mask=mask & (kv_head >= 0) & (kv_head < KH))
        tl.store(v_cache + offs_kv - KH * S * D, kept, mask=mask & (kv_head >= KH))


def rope(x: Tensor, table: Tensor, pos: Tensor) -> Tensor:
    H, D = x.shape[1:]
    out = torch.empty_like(x)
    _launch_rope(x, None, table, None, None, out, pos, S=0, H=H, KH=0, D=D)
    return out


def _launch_rope(
    x: Tensor, bias: Tensor | None, table: Tensor, k_cache: Tensor | None, v_cache: Tensor | None, q: Tensor, pos: Tensor,
    S: int, H: int, KH: int, D: int,
) -> None:  # fmt: skip
    assert x.is_contiguous() and D % 2 == 0, (x.shape, D)
    block_d, args = triton.next_power_of_2(D), (x, bias, table, k_cache, v_cache, q, pos)
    heads = max(1, min(triton.next_power_of_2(H + 2 * KH), 2048 // block_d))
    encode = E4M3.on(x.device).encode_tile if k_cache is not None and k_cache.dtype == torch.int8 else None
    constants = dict(S=S, H=H, KH=KH, D=D, HEADS=heads, BLOCK_D=block_d, ENCODE=encode, FP16_SUMS=fp16_sums())
    grid, warps = (x.shape[0], triton.cdiv(H + 2 * KH, heads)), max(1, heads * block_d // 256)
    launch(_rope_kernel, grid, x.device, *args, **constants, warps=warps)


# ---- rmsnorm_qkv_rope: q, k, v = split(rmsnorm(x) Wqkv^T + bias); q and k rotated by rope; k, v written into the cache at pos.
#      x [T, C], wqkv [(H + 2 KH) D, C], caches of one layer [KH, S, D] -> q [T, H, D]
#      bias [(H + 2 KH) D], for Qwen2, or None. qk_norm [2, D], for Qwen3, or None: before rope, rmsnorm with the first row as
#      its weight is applied to each head of q, with the second row to each head of k.
#      An int8 cache holds E4M3 codes without a scale: magnitudes up to 448, three mantissa bits from 0.016 up.


def to_cache_ref(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as a cache of that type stores them; in E4M3 what is not finite becomes NaN, so that it is noticed."""
    return E4M3.round(torch.where(torch.isfinite(x), x, torch.nan)) if dtype == torch.int8 else x


def rmsnorm_qkv_rope_ref(
    x: Tensor, norm: Tensor, wqkv: Matrix, table: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor, eps: float,
    bias: Tensor | None = None, qk_norm: Tensor | None = None,
) -> Tensor:  # fmt: skip
    start_pos, T = int(pos), x.shape[0]
    KH, _, D = k_cache.shape
    qkv = linear_ref(rmsnorm_ref(x, norm, eps), wqkv)
    qkv = (qkv if bias is None else qkv + bias).view(T, -1, D)
    H = qkv.shape[1] - 2 * KH
    qk = qkv[:, : H + KH]
    if qk_norm is not None:
        qk = torch.cat([rmsnorm_ref(heads, weight, eps) for heads, weight in zip(qk.split([H, KH], 1), qk_norm)], 1)
    qk = rope_ref(qk, table, pos)
    for cache_, new in ((k_cache, qk[:, H:]), (v_cache, qkv[:, H + KH :])):
        cache_[:, start_pos : start_pos + T] = to_cache_ref(new, cache_.dtype).transpose(0, 1)
    return qk[:, :H]


@jit
def _qkv_kernel(
    x, norm, w, scale, eps, bias, table, k_cache, v_cache, q, pos,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PRODUCT: tl.constexpr, PARTIAL_SUMS: tl.constexpr, GAIN: tl.constexpr,
    S: tl.constexpr, H: tl.constexpr, KH: tl.constexpr, HALF_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents(PDL)
    pid = tl.program_id(0)
    pairs = pid * (ROWS // 2) + tl.arange(0, ROWS // 2)
    head, pair, mask = pairs // HALF_D, pairs % HALF_D, pairs < N // 2
    position = tl.load(pos)  # before the wait: it moves only between steps
    cos, sin = _load_angle(table, position, pair, mask & (head < H + KH), HALF_D)
    rows = pid * ROWS + tl.arange(0, ROWS)
    y = PRODUCT(x, norm, w, scale, bias, rows, N, eps, K, BLOCK, PARTIAL_SUMS, GAIN, PDL)
    even, odd = tl.split(tl.reshape(y, [ROWS // 2, 2]))
    even, odd = _rotate(even, odd, cos, sin)
    _store_qkv(q, k_cache, v_cache, even, odd, 0, position, head, pair, mask, S, H, KH, HALF_D)


@jit
def _qkv_norm_kernel(
    x, norm, w, scale, eps, qk_norm, table, k_cache, v_cache, q, pos, qkv, arrived,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PRODUCT: tl.constexpr, PARTIAL_SUMS: tl.constexpr, GAIN: tl.constexpr,
    S: tl.constexpr, H: tl.constexpr, KH: tl.constexpr, HALF_D: tl.constexpr, BLOCK_PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same where q and k are normalised. A head's norm needs all its rows, which several programs compute: each leaves its
    own in qkv, and the last one to finish does the rest of the head."""
    gdc_launch_dependents(PDL)
    pid = tl.program_id(0)
    head = pid * ROWS // (2 * HALF_D)
    position = tl.load(pos)
    rows = pid * ROWS + tl.arange(0, ROWS)
    y = PRODUCT(x, norm, w, scale, None, rows, N, eps, K, BLOCK, PARTIAL_SUMS, GAIN, PDL)
    tl.store(qkv + rows, y, mask=rows < N)
    tl.debug_barrier()
    if tl.atomic_add(arrived + head, 1, sem="acq_rel") == 2 * HALF_D // ROWS - 1:
        tl.store(arrived + head, 0)
        pair = tl.arange(0, BLOCK_PAIRS)
        mask, offs = pair < HALF_D, (head * HALF_D + pair) * 2
        even = tl.load(qkv + offs, mask=mask, other=0.0, cache_modifier=".cg")
        odd = tl.load(qkv + offs + 1, mask=mask, other=0.0, cache_modifier=".cg")
        if head < H + KH:
            factor = tl.rsqrt((tl.sum(even * even) + tl.sum(odd * odd)) / (2 * HALF_D) + eps)
            weight = qk_norm + tl.where(head < H, 0, 2 * HALF_D) + pair * 2
            even *= factor * tl.load(weight, mask=mask, other=0.0).to(tl.float32)
            odd *= factor * tl.load(weight + 1, mask=mask, other=0.0).to(tl.float32)
        cos, sin = _load_angle(table, position, pair, mask & (head < H + KH), HALF_D)
        even, odd = _rotate(even, odd, cos, sin)
        _store_qkv(q, k_cache, v_cache, even, odd, 0, position, head, pair, mask, S, H, KH, HALF_D)


@jit
def _head_norm_kernel(qkv, qk_norm, eps, H, heads, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Normalise one head of q or k of one prompt token in place. qkv [T, heads, D]"""
    gdc_launch_dependents(PDL)
    t, head, offs_d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    mask = offs_d < D
    weight = tl.load(qk_norm + tl.where(head < H, 0, D) + offs_d, mask=mask, other=0.0).to(tl.float32)
    gdc_wait(PDL)
    row = qkv + (t * heads + head) * D
    values = tl.load(row + offs_d, mask=mask, other=0.0).to(tl.float32)
    y = values * tl.rsqrt(tl.sum(values * values) / D + eps) * weight
    tl.store(row + offs_d, y.to(qkv.dtype.element_ty), mask=mask)


@cache
def _head_buffers(device: torch.device, heads: int, D: int) -> tuple[Tensor, Tensor]:
    """Workspace of _qkv_norm_kernel, kept from call to call: rows, and counters, which every launch leaves at 0."""
    return torch.empty(heads * D, device=device), torch.zeros(heads, dtype=torch.int32, device=device)


@jit
def _few_qkv_kernel(
    x, w, scale, T, table, k_cache, v_cache, q, pos,
    N: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, HOW: tl.constexpr,
    DECODE: tl.constexpr, GAIN: tl.constexpr, WIDEN: tl.constexpr,
    S: tl.constexpr, H: tl.constexpr, KH: tl.constexpr, HALF_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents(PDL)
    row = tl.program_id(0) * HOW.rows
    pairs, t = row // 2 + tl.arange(0, HOW.rows // 2)[:, None], tl.arange(0, TOKENS)[None, :]
    head, pair, mask = pairs // HALF_D, pairs % HALF_D, (pairs < N // 2) & (t < T)
    position = tl.load(pos) + t
    cos, sin = _load_angle(table, position, pair, mask & (head < H + KH), HALF_D)
    even, odd = _pairs(few_product(x, w, scale, row, T, N, K, TOKENS, HOW, DECODE, GAIN, WIDEN, PDL))
    even, odd = _rotate(even, odd, cos, sin)
    _store_qkv(q, k_cache, v_cache, even, odd, t, position, head, pair, mask, S, H, KH, HALF_D)


def rmsnorm_qkv_rope(
    x: Tensor, norm: Tensor, wqkv: Matrix, table: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor, eps: float,
    bias: Tensor | None = None, qk_norm: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (KH, S, D), T = k_cache.shape, x.shape[0]
    H = wqkv.rows // D - 2 * KH
    assert bias is None or qk_norm is None, "no model has both"
    q = x.new_empty(T, H, D)
    args, heads = (table, k_cache, v_cache, q, pos), dict(S=S, H=H, KH=KH)
    how = few_launch("rmsnorm_qkv_rope", x, wqkv)
    if how and bias is None and qk_norm is None:
        launch_few(how, _few_qkv_kernel, rmsnorm(x, norm, eps), wqkv, *args, **heads, HALF_D=D // 2)
    elif T > 1:
        if how:
            qkv = x.new_empty(T, wqkv.rows)
            launch_few(how, _few_linear_kernel, rmsnorm(x, norm, eps), wqkv, qkv)
        else:
            qkv = normed_linear(x, norm, wqkv, eps)
        if qk_norm is not None:
            grid, block = (T, H + KH), triton.next_power_of_2(D)
            launch(_head_norm_kernel, grid, x.device, qkv, qk_norm, eps, H, H + 2 * KH, D=D, BLOCK=block, warps=1)
        _launch_rope(qkv, bias, *args, **heads, D=D)
    elif qk_norm is None:
        launch_product("rmsnorm_qkv_rope", _qkv_kernel, x, norm, wqkv, eps, bias, *args, **heads, HALF_D=D // 2)
    else:
        args = qk_norm, *args, *_head_buffers(x.device, H + 2 * KH, D)
        heads |= dict(HALF_D=D // 2, BLOCK_PAIRS=triton.next_power_of_2(D // 2))
        launch_product("rmsnorm_qkv_rope", _qkv_norm_kernel, x, norm, wqkv, eps, *args, **heads, within=D)
    return q


# ---- attention: softmax(q k^T / sqrt(D)) v. Token t sees positions 0 .. pos + t; G = H / KH query heads share one k, v head.
#      q [T, H, D], caches of one layer [KH, S, D] -> [T, H D]
#      Three kernels: for one query row per key/value head, for a few (up to SPLIT_ROWS), and for a prompt. On Hopper,
#      few_rows.py has one for a few, up to 64 tokens and 128 rows, and hopper.py one for long prompts. All keep a running
#      softmax in base 2, with the factor log2(e) folded into qk_scale (online softmax: Milakov and Gimelshein, 2018).


def cached_ref(cache: Tensor) -> Tensor:
    """Keys or values in fp32, from a cache in any type."""
    return E4M3.values_nan(cache) if cache.dtype == torch.int8 else cache.float()


def attention_ref(q: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor) -> Tensor:
    (T, H, D), KH = q.shape, k_cache.shape[0]
    G, length = H // KH, int(pos) + T
    # The heads of a group are rows of one product, so k and v are read once and are not expanded: with expanded keys and a
    # mask, torch's result is wrong for some lengths on a GPU (compare pytorch issue 191937)
    q32 = q.float().view(T, KH, G, D).permute(1, 2, 0, 3).reshape(KH, 1, G * T, D)
    k, v = (cached_ref(cache_[:, None, :length]) for cache_ in (k_cache, v_cache))
    mask = None if T == 1 else torch.ones(T, length, dtype=torch.bool, device=q.device).tril(length - T).repeat(G, 1)
    y = functional.scaled_dot_product_attention(q32, k, v, attn_mask=mask)
    # torch mistakes a row of scores that are all NaN for a masked one, and returns 0
    own_scores = (q32.view(KH, G, T, D) * k[:, :, length - T :]).sum(-1, keepdim=True)
    y = y.view(KH, G, T, D) + 0 * own_scores
    return y.permute(2, 0, 1, 3).reshape(T, H * D).to(q.dtype)


@jit
def _load_cached(cache, offs_n, offs_d, mask_n, D: tl.constexpr):
    """Keys or values [BLOCK_N, BLOCK_D] of a head, as cached; zero where mask_n is off (None: on everywhere)."""
    offs = offs_n[:, None] * D + offs_d[None, :]
    if mask_n is None and offs_d.shape[0] == D:
        return tl.load(cache + offs)
    mask = offs_d[None, :] < D if mask_n is None else mask_n[:, None] & (offs_d[None, :] < D)
    return tl.load(cache + offs, mask=mask, other=0)


@jit
def _decoded(tile, DECODE: tl.constexpr):
    return tile if DECODE is None else DECODE(tile)


@jit
def _dot(a, b, WIDEN: tl.constexpr, FP16_SUMS: tl.constexpr):
    """a b in fp32; fp32 operands are not rounded to TF32."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    if FP16_SUMS:
        return _saturated(tl.dot(a, b, out_dtype=tl.float16).to(tl.float32), True)
    return tl.dot(a, b, input_precision="ieee")


@jit
def _attend(
    q, k, v, row_max, row_sum, acc, mask, qk_scale, DECODE: tl.constexpr, WIDEN: tl.constexpr, FP16_SUMS: tl.constexpr
):  # fmt: skip
    """Add one block of keys and values, as cached, to the running softmax of the rows of q. row_max is the maximum of q k^T
    before scaling, so that scaling a score and subtracting the maximum are one instruction. mask: None where every row sees
    the whole block."""
    k, v = _decoded(k, DECODE).to(q.dtype), _decoded(v, DECODE).to(q.dtype)
    scores = _dot(q, tl.trans(k), WIDEN, FP16_SUMS)
    if mask is not None:
        scores = tl.where(mask, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max) * qk_scale  # 0 for a row that has seen nothing yet
    p = tl.exp2(scores * qk_scale - base[:, None])
    rescale = tl.exp2(row_max * qk_scale - base)
    return new_max, row_sum * rescale + tl.sum(p, 1), acc * rescale[:, None] + _dot(p.to(v.dtype), v, WIDEN, FP16_SUMS)


SHARED_KEYS = 16 << 20  # bytes of keys and values shared by the programs that run at the same time, well within a GPU's L2


@jit
def _rows_of_program(pid, blocks, heads_at_once, H: tl.constexpr):
    """The block of rows and the head of a program. Programs start in the order of pid: a few heads at a time, whose keys and
    values stay in the L2, and among these the last rows of all heads first, since they see the most keys and take longest."""
    first = pid // (blocks * heads_at_once) * heads_at_once
    heads = tl.minimum(heads_at_once, H - first)
    rest = pid - first * blocks
    return blocks - 1 - rest // heads, first + rest % heads


@jit
def _attention_kernel(
    q, k_cache, v_cache, out, pos, T, qk_scale, v_scale,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, POSITIONS_AT_ONCE: tl.constexpr,
    DECODE: tl.constexpr, WIDEN: tl.constexpr, FP16_SUMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A prompt: BLOCK_M tokens of one head, over the keys they see."""
    gdc_launch_dependents(PDL)
    start_pos = tl.load(pos)
    heads_at_once = tl.maximum(POSITIONS_AT_ONCE // (start_pos + T), 1) * G
    pid_m, head = _rows_of_program(tl.program_id(0), tl.cdiv(T, BLOCK_M), heads_at_once, H)
    offs_m, offs_d, offs_n = pid_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    k_head = k_cache + (head // G).to(tl.int64) * S * D
    v_head = v_cache + (head // G).to(tl.int64) * S * D
    gdc_wait(PDL)
    mask_q = (offs_m[:, None] < T) & (offs_d[None, :] < D)
    offs_q = (offs_m[:, None] * H + head) * D + offs_d[None, :]
    q_tile = tl.load(q + offs_q, mask=mask_q, other=0.0)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Whole blocks of keys that every row sees
    diagonal = (start_pos + pid_m * BLOCK_M + 1) // BLOCK_N * BLOCK_N
    end = start_pos + tl.minimum(T, (pid_m + 1) * BLOCK_M)
    for n in range(0, diagonal, BLOCK_N):
        k = _load_cached(k_head, n + offs_n, offs_d, None, D)
        v = _load_cached(v_head, n + offs_n, offs_d, None, D)
        row_max, row_sum, acc = _attend(q_tile, k, v, row_max, row_sum, acc, None, qk_scale, DECODE, WIDEN, FP16_SUMS)
    # Those on the diagonal
    for n in range(diagonal, end, BLOCK_N):
        k = _load_cached(k_head, n + offs_n, offs_d, n + offs_n < end, D)
        v = _load_cached(v_head, n + offs_n, offs_d, n + offs_n < end, D)
        mask = (n + offs_n)[None, :] <= start_pos + offs_m[:, None]
        row_max, row_sum, acc = _attend(q_tile, k, v, row_max, row_sum, acc, mask, qk_scale, DECODE, WIDEN, FP16_SUMS)
    tl.store(out + offs_q, (acc * (v_scale / row_sum)[:, None]).to(out.dtype.element_ty), mask=mask_q)


@jit
def _split(length, split, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr):
    """How many splits `length` positions make, and where this one begins and ends."""
    size = tl.where(length <= LEAST, LEAST, tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N)
    return tl.cdiv(length, size), split * size, tl.minimum(split * size + size, length)


# The last program merges. Few rows make for few programs, too few to read the cache at full speed, so its positions are split
# among programs, each of which ends with a softmax over its own part: maximum, sum and unnormalised result of each row.
# Merging them in another launch would cost a microsecond of a layer's 60 to 100 (7B). Instead each program writes its part to
# memory and then adds one to the counter of its rows. The atomic is "acq_rel": a program that sees the count also sees what was
# written before it was raised (by every thread, thanks to the barrier). The program that finds all the others counted is the
# last, so it merges, and resets the counter to zero for the next launch. It reads the parts past the L1 cache (".cg"), which
# may hold stale lines.


@jit
def _merge_splits(
    out, partial, ends, head, used, count, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    SPLITS: tl.constexpr, MERGE: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge the softmaxes of the splits into one, MERGE of them at a time, for `count` rows of at most ROWS."""
    rows, offs_d, splits = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, SPLITS)
    slots = (head * SPLITS + splits[:, None]) * BLOCK_M + rows[None, :]
    mask = (splits[:, None] < used) & (rows[None, :] < count)
    row_max = tl.max(tl.load(ends + slots * 2, mask=mask, other=-1e30, cache_modifier=".cg"), 0)
    row_sum = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in tl.static_range(0, SPLITS, MERGE):
        split = first + tl.arange(0, MERGE)
        slot = (head * SPLITS + split[:, None]) * BLOCK_M + rows[None, :]
        mask = (split[:, None] < used) & (rows[None, :] < count)
        weight = tl.exp2(tl.load(ends + slot * 2, mask=mask, other=float("-inf"), cache_modifier=".cg") - row_max[None, :])
        row_sum += tl.sum(weight * tl.load(ends + slot * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg"), 0)
        mask_part = mask[:, :, None] & (offs_d < D)[None, None, :]
        offs_part = slot[:, :, None] * D + offs_d[None, None, :]
        part = tl.load(partial + offs_part, mask=mask_part, other=0.0, cache_modifier=".cg")
        y += tl.sum(weight[:, :, None] * part, 0)
    offs = ((rows // G)[:, None] * H + head * G + (rows % G)[:, None]) * D + offs_d[None, :]
    y = (y / row_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + offs, y, mask=(rows[:, None] < count) & (offs_d[None, :] < D))


@jit
def _split_attention_kernel(
    q, k_cache, v_cache, out, partial, ends, arrived, pos, T, qk_scale, v_scale,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, MERGE: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr, BLOCK_D: tl.constexpr,
    DECODE: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A few tokens: the G query heads of one key/value head are rows, T G of them, and the positions are split."""
    gdc_launch_dependents(PDL)
    head, split = tl.program_id(0), tl.program_id(1)
    rows, offs_d, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    t, g = rows // G, rows % G
    k_head = k_cache + head.to(tl.int64) * S * D
    v_head = v_cache + head.to(tl.int64) * S * D
    # Before the wait: the part of the first block that earlier steps have cached
    start_pos = tl.load(pos)
    used, start, end = _split(start_pos + T, split, SPLITS, BLOCK_N, LEAST)
    offs_s = start + offs_n
    mask_old, mask_new = offs_s < tl.minimum(end, start_pos), (offs_s >= start_pos) & (offs_s < end)
    k = _load_cached(k_head, offs_s, offs_d, mask_old, D)
    v = _load_cached(v_head, offs_s, offs_d, mask_old, D)
    gdc_wait(PDL)
    if split < used:
        mask_q = (rows[:, None] < T * G) & (offs_d[None, :] < D)
        offs_q = (t[:, None] * H + head * G + g[:, None]) * D + offs_d[None, :]
        q_tile = tl.load(q + offs_q, mask=mask_q, other=0.0)
        k += _load_cached(k_head, offs_s, offs_d, mask_new, D)
        v += _load_cached(v_head, offs_s, offs_d, mask_new, D)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        mask = (offs_s[None, :] <= start_pos + t[:, None]) & (offs_s[None, :] < end)
        row_max, row_sum, acc = _attend(q_tile, k, v, row_max, row_sum, acc, mask, qk_scale, DECODE, WIDEN, False)
        # The other blocks of this split
        for n in range(start + BLOCK_N, end, BLOCK_N):
            offs_s = n + offs_n
            k = _load_cached(k_head, offs_s, offs_d, offs_s < end, D)
            v = _load_cached(v_head, offs_s, offs_d, offs_s < end, D)
            mask = (offs_s[None, :] <= start_pos + t[:, None]) & (offs_s[None, :] < end)
            row_max, row_sum, acc = _attend(q_tile, k, v, row_max, row_sum, acc, mask, qk_scale, DECODE, WIDEN, False)
        acc *= v_scale
        if used == 1:
            tl.store(out + offs_q, (acc / row_sum[:, None]).to(out.dtype.element_ty), mask=mask_q)
        else:
            slot = (head * SPLITS + split) * BLOCK_M + rows
            tl.store(ends + slot * 2, row_max * qk_scale)
            tl.store(ends + slot * 2 + 1, row_sum)
            tl.store(partial + slot[:, None] * D + offs_d[None, :], acc, mask=mask_q)
            tl.debug_barrier()
            if tl.atomic_add(arrived + head, 1, sem="acq_rel") == used - 1:
                tl.store(arrived + head, 0)
                _merge_splits(out, partial, ends, head, used, T * G, H, G, D, SPLITS, MERGE, BLOCK_M, ROWS, BLOCK_D)


@jit
def _single_attention_kernel(
    q, k_cache, v_cache, out, partial, ends, arrived, pos, qk_scale, v_scale,
    S: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, MERGE: tl.constexpr,
    BLOCK_N: tl.constexpr, LEAST: tl.constexpr, BLOCK_D: tl.constexpr, DECODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token with as many key/value heads as query heads, without tl.dot, which needs 16 rows: each of the BLOCK_N positions
    read at a time has a running softmax of its own, and these are merged at the end."""
    gdc_launch_dependents(PDL)
    head, split = tl.program_id(0), tl.program_id(1)
    offs_d, offs_n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    k_head = k_cache + head.to(tl.int64) * S * D
    v_head = v_cache + head.to(tl.int64) * S * D
    # Before the wait: the part of the first block that earlier steps have cached
    start_pos = tl.load(pos)
    used, start, end = _split(start_pos + 1, split, SPLITS, BLOCK_N, LEAST)
    mask_old, mask_new = start + offs_n < tl.minimum(end, start_pos), start + offs_n == start_pos
    k = _load_cached(k_head + start * D, offs_n, offs_d, mask_old, D)
    v = _load_cached(v_head + start * D, offs_n, offs_d, mask_old, D)
    gdc_wait(PDL)
    if split < used:
        q_row = tl.load(q + head * D + offs_d, mask=offs_d < D, other=0.0).to(tl.float32) * qk_scale
        k += _load_cached(k_head + start * D, offs_n, offs_d, mask_new, D)
        v += _load_cached(v_head + start * D, offs_n, offs_d, mask_new, D)
        row_max = tl.full([BLOCK_N], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_N], tl.float32)
        acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for n in range(start, end, BLOCK_N):
            # The next block is in flight while this one is used
            k_now, v_now, n_next = k, v, n + BLOCK_N
            k = _load_cached(k_head + n_next * D, offs_n, offs_d, n_next + offs_n < end, D)
            v = _load_cached(v_head + n_next * D, offs_n, offs_d, n_next + offs_n < end, D)
            scores = tl.sum(_decoded(k_now, DECODE).to(tl.float32) * q_row[None, :], 1)
            scores = tl.where(n + offs_n < end, scores, float("-inf"))
            new_max = tl.maximum(tl.maximum(row_max, scores), -1e30)  # finite, so that an absent position adds nothing
            p, rescale = tl.exp2(scores - new_max), tl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + p
            acc = acc * rescale[:, None] + p[:, None] * _decoded(v_now, DECODE).to(tl.float32)
            row_max = new_max
        # Merge the BLOCK_N softmaxes
        peak = tl.max(row_max, 0)
        weight = tl.exp2(row_max - peak)
        total, y = tl.sum(row_sum * weight, 0), tl.sum(acc * weight[:, None], 0) * v_scale
        if used == 1:
            tl.store(out + head * D + offs_d, (y / total).to(out.dtype.element_ty), mask=offs_d < D)
        else:
            slot = head * SPLITS + split
            tl.store(ends + slot * 2, peak)
            tl.store(ends + slot * 2 + 1, total)
            tl.store(partial + slot * D + offs_d, y, mask=offs_d < D)
            tl.debug_barrier()
            if tl.atomic_add(arrived + head, 1, sem="acq_rel") == used - 1:
                tl.store(arrived + head, 0)
                _merge_splits(out, partial, ends, head, used, 1, H, 1, D, SPLITS, MERGE, 1, 1, BLOCK_D)


SPLIT_ROWS = 64  # up to this many query rows per key/value head, attention is bound by reading the cache: split by position


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor) -> Tensor:
    (T, H, D), KH = q.shape, k_cache.shape[0]
    assert q.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous() and D % 8 == 0, (q.shape, k_cache.shape)
    out, rows = q.new_empty(T, H * D), T * H // KH
    if rows == 1:
        launcher = _launch_single_attention
    elif few_rows.attends(q, rows) and capability(q.device) in FEW_ROWS:
        launcher = _launch_few_rows
    else:
        launcher = _launch_split_attention if rows <= SPLIT_ROWS else _launch_attention
    launcher(q, k_cache, v_cache, out, pos)
    return out


def _cache_constants(q: Tensor, k_cache: Tensor) -> tuple[tuple[float, float], dict]:
    """The scales and the constants that every attention kernel takes."""
    (_, H, D), S = q.shape, k_cache.shape[1]
    format = E4M3.on(q.device) if k_cache.dtype == torch.int8 else None
    gain = format.gain if format else 1.0  # of decoded keys, and of decoded values
    block_d = max(16, triton.next_power_of_2(D))
    constants = dict(S=S, H=H, D=D, BLOCK_D=block_d, DECODE=format.decode_nan if format else None)
    return (gain * math.log2(math.e) / math.sqrt(D), gain), constants


def _widen(q: Tensor) -> bool:
    """Whether tiles are widened to fp32 before a tl.dot: the interpreter's own bf16 products are wrong."""
    return INTERPRETED and q.dtype == torch.bfloat16


def _splits(how: SplitLaunch, device: torch.device, groups: int) -> int:
    """Into how many chunks the cache is cut for each group of rows."""
    return min(32, triton.next_power_of_2(triton.cdiv(how.programs * processors(device), groups)))


@cache
def _split_buffers(device: torch.device, groups: int, D: int, splits: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Workspace of split attention, kept from call to call: results, maxima and sums, counters, which every launch leaves at
    0."""
    f32 = dict(dtype=torch.float32, device=device)
    arrived = torch.zeros(groups, dtype=torch.int32, device=device)
    return torch.empty(groups, splits, rows, D, **f32), torch.empty(groups, splits, rows, 2, **f32), arrived


def _launch_single_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, pos: Tensor) -> None:
    (KH, _, D), (scales, constants) = k_cache.shape, _cache_constants(q, k_cache)
    how = nearest(nearest(SPLIT_LAUNCHES, capability(q.device)), 1)
    splits = _splits(how, q.device, KH)
    block = how.block if D <= 128 else max(how.block // 2, 1)
    cut = dict(
        SPLITS=splits, MERGE=min(splits, max(1, 4096 // constants["BLOCK_D"])), BLOCK_N=block, LEAST=max(block, how.least)
    )
    args = (q, k_cache, v_cache, out, *_split_buffers(q.device, KH, D, splits, 1), pos)
    launch(_single_attention_kernel, (KH, splits), q.device, *args, *scales, **constants, **cut, warps=how.warps)


def _launch_split_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, pos: Tensor) -> None:
    (T, H, _), (KH, _, D), (scales, constants) = q.shape, k_cache.shape, _cache_constants(q, k_cache)
    rows = T * H // KH
    how = nearest(nearest(SPLIT_LAUNCHES, capability(q.device)), rows)
    splits = _splits(how, q.device, KH)
    rows = triton.next_power_of_2(rows)
    block_m = max(16, rows)  # tl.dot needs 16 rows
    block_n = how.block if D <= 128 else max(how.block // 2, 16)
    cut = dict(SPLITS=splits, MERGE=min(splits, max(1, 4096 // (rows * constants["BLOCK_D"]))), LEAST=max(block_n, how.least))
    cut |= dict(G=H // KH, BLOCK_M=block_m, ROWS=rows, BLOCK_N=block_n, WIDEN=_widen(q), warps=how.warps, stages=how.stages)
    args = (q, k_cache, v_cache, out, *_split_buffers(q.device, KH, D, splits, block_m), pos, T)
    launch(_split_attention_kernel, (KH, splits), q.device, *args, *scales, **constants, **cut)


def _launch_few_rows(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, pos: Tensor) -> None:
    (T, H, _), KH, (scales, constants) = q.shape, len(k_cache), _cache_constants(q, k_cache)
    how = FEW_ROWS[capability(q.device)]
    groups = KH * triton.cdiv(T * H // KH, few_rows.BLOCK_M)
    splits, block_d = _splits(how, q.device, groups), max(64, constants["BLOCK_D"])
    args = (q, k_cache, v_cache, out, *_split_buffers(q.device, groups, block_d, splits, few_rows.BLOCK_M), pos, T)
    cut = constants | dict(
        G=H // KH, BLOCK_D=block_d, W=how.warps, SPLITS=splits, LEAST=max(16 * how.warps, how.least), SPLIT=_split
    )
    launch(few_rows._few_attention_kernel, (groups, splits), q.device, *args, *scales, **cut, warps=how.warps)


def _launch_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, pos: Tensor) -> None:
    (T, H, D), KH, (scales, constants) = q.shape, k_cache.shape[0], _cache_constants(q, k_cache)
    on_hopper = capability(q.device) == 90 and hopper.attends(q) and not fp16_sums()
    if on_hopper and k_cache.dtype == torch.int8:
        k_cache, v_cache = decode_caches(k_cache, v_cache, pos, T, q.dtype)
    positions_at_once = SHARED_KEYS // (2 * D * k_cache.element_size())
    if on_hopper:
        return hopper.attention(q, k_cache, v_cache, out, pos, positions_at_once)
    block_m, block_n, stages = (128 if T > 64 else 64, 64, 3) if D <= 128 else (64, 32, 2)  # within 99 KB of shared memory
    cut = dict(G=H // KH, BLOCK_M=block_m, BLOCK_N=block_n, WIDEN=_widen(q), FP16_SUMS=fp16_sums())
    cut |= dict(POSITIONS_AT_ONCE=positions_at_once)
    grid = (triton.cdiv(T, block_m) * H,)
    args = (q, k_cache, v_cache, out, pos, T)
    launch(_attention_kernel, grid, q.device, *args, *scales, **constants, **cut, warps=block_m // 16, stages=stages)


@jit
def _decode_caches_kernel(
    k_cache, v_cache, k, v, pos, T, S, D, BLOCK: tl.constexpr, DECODE: tl.constexpr, GAIN: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Decode one head's keys and values of the positions that T tokens at pos see."""
    gdc_launch_dependents(PDL)
    head = tl.program_id(0).to(tl.int64) * S * D
    gdc_wait(PDL)
    end = (tl.load(pos) + T) * D
    for start in range(tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        offs = tl.max_contiguous(start + tl.arange(0, BLOCK), 8)  # eight per thread, in the loads as in the stores
        keys = DECODE(tl.load(k_cache + head + offs, mask=offs < end, other=0)).to(tl.float32) * GAIN
        values = DECODE(tl.load(v_cache + head + offs, mask=offs < end, other=0)).to(tl.float32) * GAIN
        tl.store(k + head + offs, keys.to(k.dtype.element_ty), mask=offs < end)
        tl.store(v + head + offs, values.to(v.dtype.element_ty), mask=offs < end)


def decode_caches(k_cache: Tensor, v_cache: Tensor, pos: Tensor, T: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Caches of codes [KH, S, D] decoded to a 16-bit type, as far as T tokens at pos see them; the rest is not written."""
    (KH, S, D), format = k_cache.shape, E4M3.on(k_cache.device)
    k, v = (torch.empty_like(cache, dtype=dtype) for cache in (k_cache, v_cache))
    grid, cut = (KH, triton.cdiv(16 * processors(pos.device), KH)), dict(BLOCK=4096, DECODE=format.decode_nan, GAIN=format.gain)
    launch(_decode_caches_kernel, grid, pos.device, k_cache, v_cache, k, v, pos, T, S, D, **cut)
    return k, v


# ---- linear_add: residual += x W^T, in place. x [T, K], W [C, K], residual [T, C] -> residual


def linear_add_ref(x: Tensor, w: Matrix, residual: Tensor) -> Tensor:
    return residual.add_(linear_ref(x, w))


@jit
def _linear_add_kernel(
    x, norm, w, scale, eps, residual,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PRODUCT: tl.constexpr, PARTIAL_SUMS: tl.constexpr, GAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    y = PRODUCT(x, norm, w, scale, residual, rows, N, eps, K, BLOCK, PARTIAL_SUMS, GAIN, PDL)
    tl.store(residual + rows, y.to(residual.dtype.element_ty), mask=rows < N)


@jit
def _few_linear_add_kernel(
    x, w, scale, T, residual,
    N: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, HOW: tl.constexpr,
    DECODE: tl.constexpr, GAIN: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents(PDL)
    row = tl.program_id(0) * HOW.rows
    rows, t = row + tl.arange(0, HOW.rows)[:, None], tl.arange(0, TOKENS)[None, :]
    offs, mask = t * N + rows, (rows < N) & (t < T)
    y = few_product(x, w, scale, row, T, N, K, TOKENS, HOW, DECODE, GAIN, WIDEN, PDL)
    y += tl.load(residual + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual + offs, y.to(residual.dtype.element_ty), mask=mask)


def linear_add(x: Tensor, w: Matrix, residual: Tensor) -> Tensor:
    assert residual.shape == (x.shape[0], w.rows) and residual.is_contiguous(), (residual.shape, w.shape)
    if x.shape[0] == 1:
        launch_product("linear_add", _linear_add_kernel, x, None, w, 0.0, residual)
        return residual
    if how := few_launch("linear_add", x, w):
        launch_few(how, _few_linear_add_kernel, x, w, residual)
        return residual
    if fp8.on_tensor_cores(w):
        return residual.add_(fp8.tensor_core_linear(*fp8.encode_rows(x), w, x.dtype))
    residual.addmm_(x, library_weights(w, x).t())
    return residual.clamp_(-65504.0, 65504.0) if fp16_sums() else residual


# ---- rmsnorm_swiglu: silu(a) * b with a, b = rmsnorm(x) W1^T, rmsnorm(x) W3^T. x [T, C] -> [T, F]  (Shazeer, 2020)
#      w13 [2 F, C] interleaves the rows of w1 and w3, so that a and b of one output are neighbours


def rmsnorm_swiglu_ref(x: Tensor, norm: Tensor, w13: Matrix, eps: float) -> Tensor:
    a, b = linear_ref(rmsnorm_ref(x, norm, eps), w13).unflatten(-1, (-1, 2)).unbind(-1)
    return functional.silu(a) * b


@jit
def _silu_mul(a, b):
    return a / (1.0 + tl.exp(-a)) * b


@jit
def _rmsnorm_swiglu_kernel(
    x, norm, w, scale, eps, out,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PRODUCT: tl.constexpr, PARTIAL_SUMS: tl.constexpr, GAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents(PDL)
    pid = tl.program_id(0)
    rows = pid * ROWS + tl.arange(0, ROWS)
    y = PRODUCT(x, norm, w, scale, None, rows, N, eps, K, BLOCK, PARTIAL_SUMS, GAIN, PDL)
    a, b = tl.split(tl.reshape(y, [ROWS // 2, 2]))
    offs = pid * (ROWS // 2) + tl.arange(0, ROWS // 2)
    tl.store(out + offs, _silu_mul(a, b).to(out.dtype.element_ty), mask=offs < N // 2)


@jit
def _few_swiglu_kernel(
    x, w, scale, T, out,
    N: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, HOW: tl.constexpr,
    DECODE: tl.constexpr, GAIN: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents(PDL)
    row = tl.program_id(0) * HOW.rows
    offs_f, t = row // 2 + tl.arange(0, HOW.rows // 2)[:, None], tl.arange(0, TOKENS)[None, :]
    a, b = _pairs(few_product(x, w, scale, row, T, N, K, TOKENS, HOW, DECODE, GAIN, WIDEN, PDL))
    tl.store(out + t * (N // 2) + offs_f, _silu_mul(a, b).to(out.dtype.element_ty), mask=(offs_f < N // 2) & (t < T))


@jit
def _swiglu_kernel(ab, out, F, BLOCK: tl.constexpr, FP16_SUMS: tl.constexpr, PDL: tl.constexpr):
    """silu(a) * b of neighbouring a and b. ab [T, 2 F] -> [T, F]"""
    gdc_launch_dependents(PDL)
    offs_f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait(PDL)
    offs = tl.program_id(0).to(tl.int64) * F + offs_f
    pairs = tl.load(ab + offs[:, None] * 2 + tl.arange(0, 2)[None, :], mask=offs_f[:, None] < F, other=0.0).to(tl.float32)
    a, b = tl.split(_saturated(pairs, FP16_SUMS))
    tl.store(out + offs, _saturated(_silu_mul(a, b), FP16_SUMS).to(out.dtype.element_ty), mask=offs_f < F)


def rmsnorm_swiglu(x: Tensor, norm: Tensor, w13: Matrix, eps: float) -> Tensor:
    T, F = x.shape[0], w13.rows // 2
    out = x.new_empty(T, F)
    if T == 1:
        launch_product("rmsnorm_swiglu", _rmsnorm_swiglu_kernel, x, norm, w13, eps, out)
    elif how := few_launch("rmsnorm_swiglu", x, w13):
        launch_few(how, _few_swiglu_kernel, rmsnorm(x, norm, eps), w13, out)
    else:
        ab, grid = normed_linear(x, norm, w13, eps), (T, triton.cdiv(F, 1024))
        launch(_swiglu_kernel, grid, x.device, ab, out, F, BLOCK=1024, FP16_SUMS=fp16_sums())
    return out


# ---- rmsnorm_linear: out = rmsnorm(x) W^T. x [T, C], W [V, C], out float32 [T, V], the logits -> out


def rmsnorm_linear_ref(x: Tensor, norm: Tensor, w: Matrix, eps: float, out: Tensor) -> Tensor:
    return out.copy_(linear_ref(rmsnorm_ref(x, norm, eps), w))


@jit
def _rmsnorm_linear_kernel(
    x, norm, w, scale, eps, out,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PRODUCT: tl.constexpr, PARTIAL_SUMS: tl.constexpr, GAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    y = PRODUCT(x, norm, w, scale, None, rows, N, eps, K, BLOCK, PARTIAL_SUMS, GAIN, PDL)
    tl.store(out + rows, y, mask=rows < N)


@jit
def _few_linear_kernel(
    x, w, scale, T, out,
    N: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, HOW: tl.constexpr,
    DECODE: tl.constexpr, GAIN: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents(PDL)
    row = tl.program_id(0) * HOW.rows
    rows, t = row + tl.arange(0, HOW.rows)[:, None], tl.arange(0, TOKENS)[None, :]
    y = few_product(x, w, scale, row, T, N, K, TOKENS, HOW, DECODE, GAIN, WIDEN, PDL)
    tl.store(out + t * N + rows, y, mask=(rows < N) & (t < T))


def rmsnorm_linear(x: Tensor, norm: Tensor, w: Matrix, eps: float, out: Tensor) -> Tensor:
    assert out.shape == (x.shape[0], w.rows) and out.is_contiguous(), (out.shape, w.shape)
    if x.shape[0] == 1:
        launch_product("rmsnorm_linear", _rmsnorm_linear_kernel, x, norm, w, eps, out)
        return out
    if how := few_launch("rmsnorm_linear", x, w):
        launch_few(how, _few_linear_kernel, rmsnorm(x, norm, eps), w, out)
        return out
    return out.copy_(normed_linear(x, norm, w, eps))


# ---- cross_entropy: loss of each row, log(sum(exp(logits))) - logits[target]. logits [T, V], targets int [T] -> fp32 [T]
#      Where the target is IGNORE, the loss is 0. training.py has the same kernel write the gradient over the logits.

IGNORE = -100  # as in torch
LOG2E = constexpr(1.4426950408889634)


def cross_entropy_ref(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), targets.long(), reduction="none")


@jit
def _exponent(logits, shift):
    """logits log2(e) - shift, rounded once."""
    if EMULATED:  # numpy has no fused multiply-add
        return (logits.to(tl.float64) * LOG2E - shift).to(tl.float32)
    return tl.fma(logits, LOG2E, -shift)


@jit
def _add_powers(tile, lane_max, lane_shift, lane_sum):
    """Fold a tile [lanes, WIDTH] of logits into each lane's maximum, that maximum as an exponent of two (rounded down), and
    its sum of powers."""
    lane_max = tl.maximum(lane_max, tl.max(tile, 1))
    shift = tl.maximum(tl.floor(lane_max * LOG2E), -3e38)  # finite, so that a lane of -inf adds 0, not NaN
    return lane_max, shift, lane_sum * tl.exp2(lane_shift - shift) + tl.sum(tl.exp2(_exponent(tile, shift[:, None])), 1)


@jit
def _load_blocks(start, offs, COUNT: tl.constexpr, BLOCK: tl.constexpr, EVICTION: tl.constexpr):
    """Load COUNT blocks into registers, all of them in flight at once."""
    blocks = ()
    for i in tl.static_range(COUNT):
        blocks = blocks + (tl.load(start + i * BLOCK + offs, eviction_policy=EVICTION),)
    return blocks


@jit
def _still_packed(block):
    """The same block, though the compiler cannot know that: otherwise it would keep the fp32 values that the 16-bit ones were
    converted to, in twice as many registers."""
    if EMULATED:
        return block
    PACK: tl.constexpr = 32 // block.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [block], dtype=block.dtype, is_pure=False, pack=PACK)


@jit
def _prefetch(start, BYTES: tl.constexpr, AT_ONCE: tl.constexpr):
    """Prefetch memory into the L2, AT_ONCE lines of 128 bytes at a time: one per thread."""
    ASM: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    if not EMULATED:
        for first in tl.static_range(0, BYTES, 128 * AT_ONCE):
            pointers = start.to(tl.int64) + tl.minimum(first + 128 * tl.arange(0, AT_ONCE), BYTES - 1)
            tl.inline_asm_elementwise(ASM, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)


@jit
def _softmax(block, shift, factor):
    return (tl.exp2(_exponent(block.to(tl.float32), shift)) * factor).to(block.dtype)


@jit
def _cross_entropy_kernel(
    logits, targets, count, losses, T, ahead,
    V: tl.constexpr, IGNORE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, AT_ONCE: tl.constexpr,
    PREFETCHED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The loss of a row and, where there is a count, the gradient over the logits: (softmax - onehot) / count.

    A row consists of whole blocks and a ragged end, which alone has a mask. The end and about KEPT blocks before it stay in
    registers until the gradient is written over them. The other blocks are loaded AT_ONCE at a time, and again for the
    gradient, the last ones first, before anything else can evict them from the caches. Where V is not a multiple of WIDTH, rows
    start anywhere: the whole blocks then start at the first aligned 16 bytes, and what lies before them is part of the end.

    Rows in registers leave room for only a few programs, and while these compute, memory is idle. So each program prefetches
    into the L2 a row that will be needed soon, `ahead` by as many as run at once, or the first PREFETCHED bytes of it. The
    number of instructions matters, too: a maximum is kept for every WIDTH neighbours, the 16 bytes that a thread loads at once,
    since one for each logit would double the exponentials; and these are powers of two, with the maximum rounded down to a
    whole power, so that a logit costs one multiply-add before its power, rounded once at any magnitude.
    """
    gdc_launch_dependents(PDL)
    WHOLE: tl.constexpr = (V - 1) // BLOCK
    TWICE: tl.constexpr = min(WHOLE, max(0, WHOLE - KEPT) + AT_ONCE - 1) // AT_ONCE * AT_ONCE  # blocks that are loaded twice
    LANES: tl.constexpr = BLOCK // WIDTH
    offs = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    end_offs = WHOLE * BLOCK + offs
    mask = end_offs < V
    gdc_wait(PDL)
    pid = tl.program_id(0)
    first = pid.to(tl.int64) * V
    row = logits + first
    blocks = row
    if V % WIDTH and V % BLOCK >= WIDTH:
        aligned = tl.cdiv(first, WIDTH) * WIDTH
        blocks = logits + aligned
        end_offs += (aligned - first).to(tl.int32)
        end_offs -= tl.where(end_offs < V, 0, V)
    target = tl.load(targets + pid)
    if count is not None:
        counted = tl.load(count).to(tl.float32)
    end = tl.load(row + end_offs, mask=mask, other=float("-inf"), eviction_policy="evict_first")
    kept = _load_blocks(blocks + TWICE * BLOCK, offs, WHOLE - TWICE, BLOCK, "evict_first")
    exists = (target >= 0) & (target < V)
    true_logit = tl.load(row + target, mask=exists, other=float("nan")).to(tl.float32)
    next_row = logits + tl.minimum(pid + ahead, T - 1).to(tl.int64) * V
    if TWICE == 0:
        _prefetch(next_row, PREFETCHED, LANES)
    # the sum of the powers
    zeros = tl.zeros([LANES], tl.float32)
    lane_max, lane_shift, lane_sum = zeros - float("inf"), zeros - 3e38, zeros
    for v in range(0, TWICE * BLOCK, AT_ONCE * BLOCK):
        some = _load_blocks(blocks + v, offs, AT_ONCE, BLOCK, "")
        for i in tl.static_range(AT_ONCE):
            lane_max, lane_shift, lane_sum = _add_powers(some[i].to(tl.float32), lane_max, lane_shift, lane_sum)
    for i in tl.static_range(WHOLE - TWICE):
        lane_max, lane_shift, lane_sum = _add_powers(kept[i].to(tl.float32), lane_max, lane_shift, lane_sum)
    lane_max, lane_shift, lane_sum = _add_powers(end.to(tl.float32), lane_max, lane_shift, lane_sum)
    row_max = tl.max(lane_max, 0)
    shift = tl.maximum(tl.floor(row_max * LOG2E), -3e38)
    total = tl.sum(lane_sum * tl.exp2(lane_shift - shift), 0)
    loss = tl.log(total / tl.exp2(_exponent(row_max, shift))) + (row_max - true_logit)
    tl.store(losses + pid, tl.where(target == IGNORE, 0.0, loss))
    # the gradient
    if count is not None:
        factor = tl.where(target == IGNORE, 0.0, 1.0 / counted) / total
        for back in range(AT_ONCE * BLOCK, TWICE * BLOCK + 1, AT_ONCE * BLOCK):
            start = blocks + TWICE * BLOCK - back
            some = _load_blocks(start, offs, AT_ONCE, BLOCK, "evict_first")
            for i in tl.static_range(AT_ONCE):
                tl.store(start + i * BLOCK + offs, _softmax(some[i], shift, factor), eviction_policy="evict_first")
        if TWICE > 0:
            _prefetch(next_row, PREFETCHED, LANES)
        for i in tl.static_range(WHOLE - TWICE):
            pointers = blocks + (TWICE + i) * BLOCK + offs
            tl.store(pointers, _softmax(_still_packed(kept[i]), shift, factor), eviction_policy="evict_first")
        tl.store(row + end_offs, _softmax(_still_packed(end), shift, factor), mask=mask, eviction_policy="evict_first")
        tl.debug_barrier()  # the target's own gradient is written after that of its neighbours
        gradient = (tl.exp2(_exponent(true_logit, shift)) - total) * factor  # 0 where this logit is all of the total
        tl.store(row + target, gradient.to(logits.dtype.element_ty), mask=exists)


def _cross_entropy_launch(V: int, size: int, gradient: bool, device: torch.device) -> dict[str, int]:
    """How rows of V logits of `size` bytes each are cut up, from sweeps on an H200."""
    width, row = 16 // size, V * size
    if not gradient:
        warps, registers, kept, at_once, prefetched = 8, 64, 0, 8, 0
    elif row <= 1 << 14:
        warps, registers, kept, at_once, prefetched = 4, 64, 16, 4, row
    elif row <= 1 << (17 if size == 2 else 16):  # two programs per SM, each with up to 64 KB of a row in its registers
        warps, registers, kept, at_once, prefetched = 8, 128, 16, 4, min(row, 1 << 16)
    elif size == 4:  # one program per SM, with up to 128 KB
        warps, registers, kept, at_once, prefetched = 16, 128, 16, 8, row if row <= 1 << 17 else 0
    else:  # one program per SM, so that what is read twice stays in the L2
        warps, registers, kept, at_once, prefetched = 32, 64, 4, 4, 0
    warps = min(warps, triton.cdiv(triton.next_power_of_2(V), 32 * width))
    cut = dict(BLOCK=32 * width * warps, KEPT=kept, AT_ONCE=at_once, PREFETCHED=prefetched, warps=warps, maxnreg=registers)
    ahead = processors(device) * max(16 // warps, (1 << 17) // row, 1)  # as many rows as run at once, or more if they are short
    return dict(ahead=ahead, V=V, IGNORE=IGNORE, WIDTH=width) | cut


def cross_entropy_rows(logits: Tensor, targets: Tensor, count: Tensor | None) -> Tensor:
    """The loss of each row, fp32 [T]. Given `count`, one number on the device, the gradient of the sum of the losses divided by
    it is written over the logits."""
    T, V = logits.shape
    assert logits.is_contiguous() and targets.shape == (T,), (logits.shape, targets.shape)
    losses = logits.new_empty(T, dtype=torch.float32)
    cut = _cross_entropy_launch(V, logits.element_size(), count is not None, logits.device)
    launch(_cross_entropy_kernel, (T,), logits.device, logits, targets, count, losses, T, **cut)
    return losses


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy_rows(logits, targets, None)


# ---- the two tables, and their names for --backend


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
    sample_rows=sample_rows_ref,
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
    sample_rows=sample_rows,
)

BACKENDS = {"torch": reference, "triton": fused}
