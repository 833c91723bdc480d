"""The ops that only training needs, forward and backward, modelled on llm.c's training kernels (its pull request 378).

An op is one block: formula and shapes, a reference in plain torch that autograd differentiates, the Triton kernels, their
launchers, and a thin `torch.autograd.Function`. The file ends with two tables of the same names and signatures:
`reference` runs on any torch device, is what `torch.compile` gets, and is the oracle in tests; `fused` runs on CUDA, and on CPU
tensors when TRITON_INTERPRET=1. models/tales/train.py trains with either.

Shape letters: B sequences of S tokens, T = B S tokens in all, C dim, F hidden_dim, V vocabulary, H query heads, KH key/value
heads, D head_dim, N columns of any matrix.

All of these ops are memory-bound, so each reads its inputs once, writes its outputs once, and does the adjacent work on the
way: the residual and its gradient, dropout, the concatenation of gradients. A thread moves 16 bytes at a time. Sums are taken
in fp32 and in a fixed order, with no atomics: the same inputs on the same card give the same gradients bit for bit.
"""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from kernels import IGNORE, cross_entropy_rows
from launch import gdc_launch_dependents, gdc_wait, jit, launch, processors, tl, triton


def wide(x: Tensor) -> Tensor:
    """x in the precision that the references compute in: fp64 if it is already, otherwise fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---- bias_backward: dbias = sum of dout over tokens. dout [T, N] -> [N] in fp32


def bias_backward_ref(dout: Tensor) -> Tensor:
    return wide(dout).sum(0)


@jit
def _column_sum_kernel(x, out, T, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A block of columns, summed over every num_programs(1)-th tile of rows, two tiles in flight at once. x [T, N], out
    [programs along the rows, N] fp32."""
    gdc_launch_dependents(PDL)
    pid_n, pid_t = tl.program_id(0), tl.program_id(1)
    step = tl.num_programs(1) * ROWS
    offs_n = pid_n * BLOCK + tl.arange(0, BLOCK)
    mask_n = offs_n < N
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    gdc_wait(PDL)
    for first in range(pid_t * ROWS, T, 2 * step):
        rows = first + tl.arange(0, ROWS)
        offsets = rows.to(tl.int64)[:, None] * N + offs_n[None, :]
        mask, mask_next = (rows < T)[:, None] & mask_n[None, :], (rows < T - step)[:, None] & mask_n[None, :]
        tile = tl.load(x + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
        next_tile = tl.load(x + offsets + step * N, mask=mask_next, other=0.0, eviction_policy="evict_first")
        acc += tile.to(tl.float32)
        acc += next_tile.to(tl.float32)
    tl.store(out + pid_t * N + offs_n, tl.sum(acc, 0), mask=mask_n)


def _sum_partials(partial: Tensor) -> Tensor:
    """Column sums [N] of a few rows [P, N] in fp32: blocks of 32 bytes, so that many programs share the work and wait once."""
    P, N = partial.shape
    out, rows = partial.new_empty(1, N), min(512, triton.next_power_of_2(triton.cdiv(P, 2)))
    launch(_column_sum_kernel, (triton.cdiv(N, 8), 1), partial.device, partial, out, P, N=N, ROWS=rows, BLOCK=8, warps=8)
    return out[0]


def bias_backward(dout: Tensor) -> Tensor:
    T, N = dout.shape
    assert dout.is_contiguous(), dout.shape
    rows, block = 8, 512
    columns, tiles = triton.cdiv(N, block), triton.cdiv(T, rows)
    slabs = triton.cdiv(tiles, triton.cdiv(tiles, max(1, 8 * processors(dout.device) // columns)))  # all of the same length
    partial = dout.new_empty(slabs, N, dtype=torch.float32)
    launch(_column_sum_kernel, (columns, slabs), dout.device, dout, partial, T, N=N, ROWS=rows, BLOCK=block)
    return partial[0] if slabs == 1 else _sum_partials(partial)


# ---- linear: y = x W^T + b. x [..., C], weight [N, C], bias [N] -> [..., N]. The library's products, our bias_backward


def linear_ref(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        rows = dy.flatten(0, -2).contiguous()
        return dy @ weight, rows.t() @ x.flatten(0, -2), bias_backward(rows).to(weight.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    assert x.dtype == weight.dtype == bias.dtype, (x.dtype, weight.dtype, bias.dtype)
    return _Linear.apply(x, weight, bias)


# ---- rmsnorm: total = x + dropout(branch), y = total / sqrt(mean(total^2) + eps) * weight  (Zhang and Sennrich, 2019)
#      x, branch [..., C], weight [C] -> total in the type of x, y in dtype. x is the residual; there may be no branch yet.
#      backward, with n = total / sqrt(...) and g = dy weight: dtotal += (g - n mean(g n)) / sqrt(...), dweight = sum of dy n


def rmsnorm_ref(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    total = x if branch is None else x + functional.dropout(branch, dropout)
    normed = wide(total) * torch.rsqrt(wide(total).square().mean(-1, keepdim=True) + eps)
    return total, (normed * weight).to(dtype)


@jit
def _dropout_factor(index, seed, p):
    """1 / (1 - p) for what is kept and 0 for what is dropped: a hash (MurmurHash3's finaliser) of the element's index and the
    seed decides, so that backward finds the same mask without storing it."""
    h = index.to(tl.uint32) ^ seed.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    return tl.where((h >> 8).to(tl.float32) * (1.0 / (1 << 24)) >= p, 1.0 / (1.0 - p), 0.0)


@jit
def _rmsnorm_forward_kernel(
    x, branch, weight, seed, total, y, T, eps, p,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents(PDL)
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    offsets = rows.to(tl.int64)[:, None] * C + cols[None, :]
    mask = (rows < T)[:, None] & (cols < C)[None, :]
    gdc_wait(PDL)
    values = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if branch is not None:
        added = tl.load(branch + offsets, mask=mask, other=0.0).to(tl.float32)
        if seed is not None:
            added *= _dropout_factor(offsets, tl.load(seed), p)
        values = (values + added).to(total.dtype.element_ty)  # normalise the rounded sum, as backward will see it
        tl.store(total + offsets, values, mask=mask)
        values = values.to(tl.float32)
    weights = tl.load(weight + cols, mask=cols < C, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, 1) / C + eps)[:, None]
    tl.store(y + offsets, (normed * weights[None, :]).to(y.dtype.element_ty), mask=mask)


@jit
def _rmsnorm_backward_kernel(
    total, weight, dy, dtotal, seed, dx, dbranch, dweight, T, eps, p,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every num_programs(0)-th tile of rows, the next ones loaded ahead. dweight [programs, C] fp32 gets this program's part of
    the sum."""
    gdc_launch_dependents(PDL)
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    gdc_wait(PDL)
    weights = tl.load(weight + cols, mask=cols < C, other=0.0).to(tl.float32)
    for first in tl.range(pid * ROWS, T, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        offsets = rows.to(tl.int64)[:, None] * C + cols[None, :]
        mask = (rows < T)[:, None] & (cols < C)[None, :]
        values = tl.load(total + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dys = tl.load(dy + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if dtotal is not None:  # the gradient that reaches the residual bypassing the norm
            direct = tl.load(dtotal + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        g = dys * weights[None, :]
        factor = tl.rsqrt(tl.sum(values * values, 1) / C + eps)
        along = tl.sum(g * values, 1) * factor * factor / C
        grad = (g - values * along[:, None]) * factor[:, None]
        if dtotal is not None:
            grad += direct
        tl.store(dx + offsets, grad.to(dx.dtype.element_ty), mask=mask)
        if dbranch is not None:
            if seed is not None:
                grad *= _dropout_factor(offsets, tl.load(seed), p)
            tl.store(dbranch + offsets, grad.to(dbranch.dtype.element_ty), mask=mask)
        acc += dys * values * factor[:, None]
    tl.store(dweight + pid * C + cols, tl.sum(acc, 0), mask=cols < C)


def _row_tile(C: int, elements: int, least: int) -> dict[str, int]:
    """A tile of whole rows: its shape, and the warps, at least `least`, for about `elements` elements per thread."""
    block = triton.next_power_of_2(C)
    warps = min(16, max(least, block // (32 * elements)))
    return dict(ROWS=max(1, elements * 32 * warps // block), BLOCK=block, warps=warps)


def rmsnorm_forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype, seed: Tensor | None, p: float
) -> tuple[Tensor, Tensor]:
    """-> total, y. `seed`, one int32, determines what dropout drops with probability p; None: no dropout."""
    C = x.shape[-1]
    T, cut = x.numel() // C, _row_tile(C, 32, least=2)
    assert x.is_contiguous() and weight.shape == (C,) and x.numel() < 1 << 32, (x.shape, weight.shape)
    assert branch is None or branch.is_contiguous() and branch.shape == x.shape, (x.shape, branch.shape)
    total, y = x if branch is None else torch.empty_like(x), x.new_empty(*x.shape, dtype=dtype)
    grid = (triton.cdiv(T, cut["ROWS"]),)
    launch(_rmsnorm_forward_kernel, grid, x.device, x, branch, weight, seed, total, y, T, eps, p, C=C, **cut)
    return total, y


def rmsnorm_backward(
    total: Tensor, weight: Tensor, dy: Tensor, dtotal: Tensor | None, eps: float,
    branch: torch.dtype | None = None, seed: Tensor | None = None, p: float = 0.0,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """-> the gradients of x, of the branch (whose type is `branch`) and of weight. dtotal: the gradient of total, if any."""
    C = total.shape[-1]
    elements = 16 if C <= 2048 else 8
    stages = 2 if C <= 2048 and dtotal is not None and total.element_size() == 4 else 3  # of the loop, which loads rows ahead
    T, cut = total.numel() // C, _row_tile(C, elements, least=4)
    assert dy.is_contiguous() and dy.shape == total.shape, (dy.shape, total.shape)
    assert dtotal is None or dtotal.is_contiguous() and dtotal.shape == total.shape, (dtotal.shape, total.shape)
    programs = min(triton.cdiv(T, cut["ROWS"]), max(1, 256 // elements // cut["warps"]) * processors(total.device))
    dx, partial = torch.empty_like(total), total.new_empty(programs, C, dtype=torch.float32)
    own = branch is not None and (branch != total.dtype or seed is not None)  # else the branch's gradient is that of x
    dbranch = total.new_empty(*total.shape, dtype=branch) if own else None
    args = (total, weight, dy, dtotal, seed, dx, dbranch, partial, T, eps, p)
    launch(_rmsnorm_backward_kernel, (programs,), total.device, *args, C=C, STAGES=stages, **cut)
    return dx, dbranch if own else dx if branch is not None else None, _sum_partials(partial)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype, p: float) -> tuple:
        seed = torch.randint(1 << 31, (1,), dtype=torch.int32, device=x.device) if p and branch is not None else None
        total, y = rmsnorm_forward(x, branch, weight, eps, dtype, seed, p)
        ctx.save_for_backward(total, weight, seed)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.p, ctx.branch = eps, p, None if branch is None else branch.dtype
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal: Tensor | None, dy: Tensor) -> tuple:
        total, weight, seed = ctx.saved_tensors
        dy = torch.zeros_like(total) if dy is None else dy.contiguous()
        dtotal = None if dtotal is None else dtotal.contiguous()
        found = rmsnorm_backward(total, weight, dy, dtotal, ctx.eps, ctx.branch, seed, ctx.p)
        return *found[:2], found[2].to(weight.dtype), None, None, None


def rmsnorm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    return _RMSNorm.apply(x, branch, weight, eps, dtype, dropout)


# ---- rope: q, k, v from one joint product, q and k rotated: components i and i + D/2 by the angle of [position, i]
#      qkv [B, S, (H + 2 KH) D], cos, sin [at least S, D/2] fp32 -> q [B, S, H, D], k, v [B, S, KH, D]  (Su et al., 2021)
#      Pairs are placed as in Hugging Face's checkpoints. The fused op rotates q and k in place: qkv holds them afterwards.


def rope_ref(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    B, S, N = qkv.shape
    qk, v = qkv.view(B, S, -1, N // (heads + 2 * kv_heads)).split((heads + kv_heads, kv_heads), 2)
    a, b = wide(qk).chunk(2, -1)
    cos, sin = cos[:S, None], sin[:S, None]
    q, k = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(qkv.dtype).split((heads, kv_heads), 2)
    return q, k, v


@jit
def _rope_forward_kernel(
    qkv, cos, sin, T, S,
    HEADS: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate ROWS of the first TURNED heads of all tokens, in place. qkv [T, HEADS, 2 HALF]"""
    gdc_launch_dependents(PDL)
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    token, head = rows // TURNED, rows % TURNED
    offsets = (token.to(tl.int64) * HEADS + head)[:, None] * (2 * HALF) + cols[None, :]
    angles = (token % S)[:, None] * HALF + cols[None, :]
    mask = (token < T)[:, None] & (cols < HALF)[None, :]
    gdc_wait(PDL)
    a = tl.load(qkv + offsets, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(qkv + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    c, s = tl.load(cos + angles, mask=mask, other=0.0), tl.load(sin + angles, mask=mask, other=0.0)
    tl.store(qkv + offsets, (a * c - b * s).to(qkv.dtype.element_ty), mask=mask)
    tl.store(qkv + offsets + HALF, (b * c + a * s).to(qkv.dtype.element_ty), mask=mask)


@jit
def _load_halves(x, token, head, cols, mask, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Both halves of heads of x [T, HEADS, 2 HALF] in fp32; 0 where there is no such head."""
    offsets = (token.to(tl.int64) * HEADS + head)[:, None] * (2 * HALF) + cols[None, :]
    mask = mask & ((head >= 0) & (head < HEADS))[:, None]
    a, b = tl.load(x + offsets, mask=mask, other=0.0), tl.load(x + offsets + HALF, mask=mask, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@jit
def _rope_backward_kernel(
    dq, dk, dv, cos, sin, dqkv, T, S,
    H: tl.constexpr, KH: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS heads of all tokens: those of q and k rotated back, all gathered into dqkv [T, H + 2 KH, 2 HALF]."""
    gdc_launch_dependents(PDL)
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    token, head = rows // (H + 2 * KH), rows % (H + 2 * KH)
    offsets = rows.to(tl.int64)[:, None] * (2 * HALF) + cols[None, :]
    angles = (token % S)[:, None] * HALF + cols[None, :]
    mask = (token < T)[:, None] & (cols < HALF)[None, :]
    turned = mask & (head < H + KH)[:, None]
    gdc_wait(PDL)
    qa, qb = _load_halves(dq, token, head, cols, mask, H, HALF)
    ka, kb = _load_halves(dk, token, head - H, cols, mask, KH, HALF)
    va, vb = _load_halves(dv, token, head - H - KH, cols, mask, KH, HALF)
    a, b = qa + ka + va, qb + kb + vb  # two of the three are 0
    c, s = tl.load(cos + angles, mask=turned, other=1.0), tl.load(sin + angles, mask=turned, other=0.0)
    tl.store(dqkv + offsets, (a * c + b * s).to(dqkv.dtype.element_ty), mask=mask)
    tl.store(dqkv + offsets + HALF, (b * c - a * s).to(dqkv.dtype.element_ty), mask=mask)


def _rope_tile(rows: int, D: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid for this many rows, each a head of a token, and the tile of about 1024 pairs that a program takes."""
    block = triton.next_power_of_2(D // 2)
    cut = dict(HALF=D // 2, ROWS=max(1, 1024 // block), BLOCK=block)
    return (triton.cdiv(rows, cut["ROWS"]),), cut


def rope_forward(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Rotate q and k of qkv in place."""
    B, S, N = qkv.shape
    D, turned = N // (heads + 2 * kv_heads), heads + kv_heads
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous(), qkv.shape
    assert cos.shape == sin.shape and cos.shape[0] >= S and 2 * cos.shape[1] == D, (cos.shape, qkv.shape)
    grid, cut = _rope_tile(B * S * turned, D)
    launch(_rope_forward_kernel, grid, qkv.device, qkv, cos, sin, B * S, S, HEADS=turned + kv_heads, TURNED=turned, **cut)
    return qkv


def rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """-> the gradient of qkv, [B, S, (H + 2 KH) D]."""
    (B, S, H, D), KH = dq.shape, dk.shape[2]
    assert dq.is_contiguous() and dk.is_contiguous() and dv.is_contiguous(), (dq.stride(), dk.stride(), dv.stride())
    dqkv = dq.new_empty(B, S, (H + 2 * KH) * D)
    grid, cut = _rope_tile(B * S * (H + 2 * KH), D)
    launch(_rope_backward_kernel, grid, dq.device, dq, dk, dv, cos, sin, dqkv, B * S, S, H=H, KH=KH, **cut)
    return dqkv


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple:
        ctx.save_for_backward(cos, sin)
        turned = rope_forward(qkv.detach(), cos, sin, heads, kv_heads).unflatten(-1, (heads + 2 * kv_heads, -1))
        return turned.split((heads, kv_heads, kv_heads), 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple:
        return rope_backward(dq.contiguous(), dk.contiguous(), dv.contiguous(), *ctx.saved_tensors), None, None, None, None


def rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    return _Rope.apply(qkv, cos, sin, heads, kv_heads)


# ---- swiglu: silu(a) * b with a, b the halves of one joint product. ab [..., 2 F] -> [..., F]  (Shazeer, 2020)
#      backward: da = dout b s (1 + a (1 - s)), db = dout a s, with s = sigmoid(a)


def swiglu_ref(ab: Tensor) -> Tensor:
    a, b = ab.chunk(2, -1)
    return functional.silu(a) * b


@jit
def _swiglu_forward_kernel(ab, out, count, F: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    gdc_launch_dependents(PDL)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    place = ab + (offsets // F).to(tl.int64) * (2 * F) + offsets % F
    gdc_wait(PDL)
    a, b = tl.load(place, mask=mask).to(tl.float32), tl.load(place + F, mask=mask).to(tl.float32)
    tl.store(out + offsets, (a / (1.0 + tl.exp(-a)) * b).to(out.dtype.element_ty), mask=mask)


@jit
def _swiglu_backward_kernel(ab, dout, dab, count, F: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    gdc_launch_dependents(PDL)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    place = (offsets // F).to(tl.int64) * (2 * F) + offsets % F
    gdc_wait(PDL)
    a, b = tl.load(ab + place, mask=mask).to(tl.float32), tl.load(ab + place + F, mask=mask).to(tl.float32)
    d = tl.load(dout + offsets, mask=mask).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-a))
    tl.store(dab + place, (d * b * s * (1.0 + a * (1.0 - s))).to(dab.dtype.element_ty), mask=mask)
    tl.store(dab + place + F, (d * a * s).to(dab.dtype.element_ty), mask=mask)


ELEMENTS = 1024  # per program


def swiglu_forward(ab: Tensor) -> Tensor:
    assert ab.is_contiguous() and ab.shape[-1] % 2 == 0, ab.shape
    out = ab.new_empty(*ab.shape[:-1], ab.shape[-1] // 2)
    grid = (triton.cdiv(out.numel(), ELEMENTS),)
    launch(_swiglu_forward_kernel, grid, ab.device, ab, out, out.numel(), F=out.shape[-1], BLOCK=ELEMENTS)
    return out


def swiglu_backward(ab: Tensor, dout: Tensor) -> Tensor:
    """-> the gradient of ab."""
    assert ab.is_contiguous() and dout.is_contiguous() and ab.numel() == 2 * dout.numel(), (ab.shape, dout.shape)
    dab, grid = torch.empty_like(ab), (triton.cdiv(dout.numel(), ELEMENTS),)
    launch(_swiglu_backward_kernel, grid, ab.device, ab, dout, dab, dout.numel(), F=dout.shape[-1], BLOCK=ELEMENTS)
    return dab


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ab: Tensor) -> Tensor:
        ctx.save_for_backward(ab)
        return swiglu_forward(ab)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor) -> Tensor:
        return swiglu_backward(*ctx.saved_tensors, dout.contiguous())


def swiglu(ab: Tensor) -> Tensor:
    return _SwiGLU.apply(ab)


# ---- cross_entropy: mean of log(sum(exp(logits))) - logits[target] over the targets that count
#      logits [T, V], targets int64 [T], of which those equal to IGNORE do not count -> scalar in fp32
#      The fused op computes the gradient, (softmax(logits) - onehot(target)) / count, with the loss, and writes it over the
#      logits, so that there is no second matrix of their size: logits must not be used afterwards.


def cross_entropy_ref(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(wide(logits), targets)


@jit
def _scale_kernel(x, factor, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """x *= factor, which costs nothing where the factor is 1."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            values = tl.load(x + offsets, mask=offsets < count).to(tl.float32) * f
            tl.store(x + offsets, values.to(x.dtype.element_ty), mask=offsets < count)


def _scale(x: Tensor, factor: Tensor) -> Tensor:
    """x *= factor, a number on the device."""
    assert x.is_contiguous(), x.shape
    grid = (min(triton.cdiv(x.numel(), 4096), 4 * processors(x.device)),)
    launch(_scale_kernel, grid, x.device, x, factor, x.numel(), BLOCK=4096, warps=8)
    return x


def _counted(targets: Tensor) -> Tensor:
    return (targets != IGNORE).sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        count = _counted(targets)
        ctx.gradient = logits.detach() if ctx.needs_input_grad[0] else None
        return cross_entropy_rows(logits.detach(), targets, count if ctx.needs_input_grad[0] else None).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss: Tensor) -> tuple:
        gradient, ctx.gradient = ctx.gradient, None
        assert gradient is not None, "the gradient of cross_entropy is available once: it overwrites the logits"
        return _scale(gradient, dloss), None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return _CrossEntropy.apply(logits, targets)


# ---- linear_cross_entropy: cross_entropy of logits x W^T. x [T, C], weight [V, C], targets int64 [T] -> scalar in fp32
#      The fused op takes a chunk of tokens at a time, forward and backward at once, so that the full logits never exist
#      (as Liger Kernel does; Hsu et al., 2024). Chunks are large, since each adds to dweight in memory.

CHUNK = 4096  # tokens


def linear_cross_entropy_ref(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy_ref(functional.linear(x, weight.to(x.dtype)), targets)


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in the type of total, which may be wider."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        narrow, count, losses = weight.to(x.dtype), _counted(targets), []
        differentiated = any(ctx.needs_input_grad)
        dx, dweight = (torch.empty_like(x), torch.zeros_like(weight)) if differentiated else (None, None)
        for first in range(0, len(x), CHUNK):
            rows = slice(first, first + CHUNK)
            logits = x[rows] @ narrow.t()
            losses.append(cross_entropy_rows(logits, targets[rows], count if differentiated else None))
            if differentiated:
                torch.mm(logits, narrow, out=dx[rows])
                _accumulate(dweight, logits.t(), x[rows])
            del logits  # before the next chunk is allocated
        ctx.gradients = (dx, dweight)
        return torch.cat(losses).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss: Tensor) -> tuple:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the gradients of linear_cross_entropy are available once"
        return *(_scale(gradient, dloss) for gradient in gradients), None


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    assert x.is_contiguous() and x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    return _LinearCrossEntropy.apply(x, weight, targets)


reference = SimpleNamespace(
    linear=linear_ref,
    rmsnorm=rmsnorm_ref,
    rope=rope_ref,
    swiglu=swiglu_ref,
    cross_entropy=cross_entropy_ref,
    linear_cross_entropy=linear_cross_entropy_ref,
)

fused = SimpleNamespace(
    linear=linear,
    rmsnorm=rmsnorm,
    rope=rope,
    swiglu=swiglu,
    cross_entropy=cross_entropy,
    linear_cross_entropy=linear_cross_entropy,
)
