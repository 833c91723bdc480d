"""The ops that only training needs, forward and backward, modelled on llm.c's training kernels (its
pull request 378).

An op is one block: formula and shapes, a reference in plain torch that autograd differentiates, the
Triton kernels, and the `torch.autograd.Function` that launches them. The file ends with a table of
the ops in two columns: `reference` runs on any torch device, is what `torch.compile` gets, and is
the oracle in tests; `fused` runs on CUDA, and on CPU tensors when TRITON_INTERPRET=1.
train.py trains with either.

Shape letters: B sequences of S tokens, T = B S tokens in all, C dim, F hidden_dim, V vocabulary, H
query heads, KH key/value heads, D head_dim, N columns of any matrix.

All of these ops are memory-bound, so each reads its inputs once, writes its outputs once, and does
the adjacent work on the way: the residual and its gradient, dropout, the concatenation of
gradients. A thread moves 16 bytes at a time. Sums are taken in fp32 and in a fixed order, with no
atomics: the same inputs on the same card give the same gradients bit for bit."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from launch import (
    EMULATED,
    constexpr,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    launch,
    processors,
    tl,
    triton,
)


def wide(x: Tensor) -> Tensor:
    """x in the precision that the references compute in: fp64 if it is already, otherwise fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---- bias_backward: dbias = sum of dout over tokens. dout [T, N] -> [N] in fp32


@jit
def _column_sum_kernel(
    x, out, T, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """A block of columns, summed over every num_programs(1)-th tile of rows, two tiles in flight at
    once. x [T, N], out [programs along the rows, N] fp32."""
    gdc_launch_dependents(PDL)
    pid_n = tl.program_id(0)
    pid_t = tl.program_id(1)
    step = tl.num_programs(1) * ROWS
    offs_n = pid_n * BLOCK + tl.arange(0, BLOCK)
    mask_n = offs_n < N
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    gdc_wait(PDL)
    for first in range(pid_t * ROWS, T, 2 * step):
        rows = first + tl.arange(0, ROWS)
        offsets = rows.to(tl.int64)[:, None] * N + offs_n[None, :]
        mask = (rows < T)[:, None] & mask_n[None, :]
        mask_next = (rows < T - step)[:, None] & mask_n[None, :]
        tile = tl.load(x + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
        next_tile = tl.load(
            x + offsets + step * N, mask=mask_next, other=0.0, eviction_policy="evict_first"
        )
        acc += tile.to(tl.float32)
        acc += next_tile.to(tl.float32)
    tl.store(out + pid_t * N + offs_n, tl.sum(acc, 0), mask=mask_n)


def _sum_partials(partial: Tensor) -> Tensor:
    """Column sums [N] of a few rows [P, N] in fp32: blocks of 32 bytes, so that many programs share
    the work."""
    P, N = partial.shape
    out = partial.new_empty(1, N)
    rows = min(512, triton.next_power_of_2(triton.cdiv(P, 2)))
    grid = (triton.cdiv(N, 8), 1)
    launch(
        _column_sum_kernel, grid, partial.device, partial, out, P, N=N, ROWS=rows, BLOCK=8, warps=8
    )
    return out[0]


def bias_backward(dout: Tensor) -> Tensor:
    T, N = dout.shape
    assert dout.is_contiguous(), dout.shape
    rows = 8
    block = 512
    columns = triton.cdiv(N, block)
    tiles = triton.cdiv(T, rows)
    # Each program sums the same number of tiles
    length = triton.cdiv(tiles, max(1, 8 * processors(dout.device) // columns))
    slabs = triton.cdiv(tiles, length)
    partial = dout.new_empty(slabs, N, dtype=torch.float32)
    sizes = dict(N=N, ROWS=rows, BLOCK=block)
    launch(_column_sum_kernel, (columns, slabs), dout.device, dout, partial, T, **sizes)
    return partial[0] if slabs == 1 else _sum_partials(partial)


# ---- linear: y = x W^T + b. x [..., C], weight [N, C], bias [N] -> [..., N]. The library's
# products, our bias_backward


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


# ---- rmsnorm (Zhang and Sennrich, 2019):
#      total = x + dropout(branch), y = total / sqrt(mean(total^2) + eps) * weight
#      x, branch [..., C], weight [C] -> total in the type of x, y in dtype. x is the residual;
#      branch may be None.
#      backward, with n = total / sqrt(...) and g = dy weight:
#      dtotal += (g - n mean(g n)) / sqrt(...), dweight = sum of dy n


def rmsnorm_ref(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    total = x
    if branch is not None:
        total = x + functional.dropout(branch, dropout)
    normed = wide(total) * torch.rsqrt(wide(total).square().mean(-1, keepdim=True) + eps)
    return total, (normed * weight).to(dtype)


@jit
def _dropout_factor(index, seed, p):
    """1 / (1 - p) for what is kept and 0 for what is dropped: a hash (MurmurHash3's finaliser) of
    the element's index and the seed decides, so that backward finds the same mask without storing
    it."""
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
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    offsets = rows.to(tl.int64)[:, None] * C + cols[None, :]
    mask = (rows < T)[:, None] & (cols < C)[None, :]
    gdc_wait(PDL)
    values = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if branch is not None:
        added = tl.load(branch + offsets, mask=mask, other=0.0).to(tl.float32)
        if seed is not None:
            added *= _dropout_factor(offsets, tl.load(seed), p)
        # Normalise the rounded sum, as backward will see it
        values = (values + added).to(total.dtype.element_ty)
        tl.store(total + offsets, values, mask=mask)
        values = values.to(tl.float32)
    weights = tl.load(weight + cols, mask=cols < C, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, 1) / C + eps)[:, None]
    tl.store(y + offsets, (normed * weights[None, :]).to(y.dtype.element_ty), mask=mask)


@jit
def _rmsnorm_backward_kernel(
    total, weight, dy, dtotal, seed, dx, dbranch, dweight, T, eps, p,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Every num_programs(0)-th tile of rows, the next ones loaded ahead. dweight [programs, C] fp32
    gets this program's part of the sum."""
    gdc_launch_dependents(PDL)
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    gdc_wait(PDL)
    weights = tl.load(weight + cols, mask=cols < C, other=0.0).to(tl.float32)
    for first in tl.range(pid * ROWS, T, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        offsets = rows.to(tl.int64)[:, None] * C + cols[None, :]
        mask = (rows < T)[:, None] & (cols < C)[None, :]
        values = tl.load(total + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(
            tl.float32
        )
        dys = tl.load(dy + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(
            tl.float32
        )
        if dtotal is not None:  # the gradient that reaches the residual bypassing the norm
            direct = tl.load(
                dtotal + offsets, mask=mask, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
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
    """A tile of whole rows: its shape, and the warps, at least `least`, for about `elements`
    elements per thread."""
    block = triton.next_power_of_2(C)
    warps = min(16, max(least, block // (32 * elements)))
    return dict(ROWS=max(1, elements * 32 * warps // block), BLOCK=block, warps=warps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype,
        p: float,
    ) -> tuple[Tensor, Tensor]:
        C = x.shape[-1]
        T = x.numel() // C
        cut = _row_tile(C, 32, least=2)
        assert x.is_contiguous() and weight.shape == (C,) and x.numel() < 1 << 32, (
            x.shape,
            weight.shape,
        )
        assert branch is None or branch.is_contiguous() and branch.shape == x.shape, (
            x.shape,
            branch.shape,
        )
        # The kernels derive from the seed what dropout drops
        seed = None
        if p and branch is not None:
            seed = torch.randint(1 << 31, (1,), dtype=torch.int32, device=x.device)
        total = x if branch is None else torch.empty_like(x)
        y = x.new_empty(*x.shape, dtype=dtype)
        grid = (triton.cdiv(T, cut["ROWS"]),)
        args = (x, branch, weight, seed, total, y, T, eps, p)
        launch(_rmsnorm_forward_kernel, grid, x.device, *args, C=C, **cut)
        ctx.save_for_backward(total, weight, seed)
        ctx.set_materialize_grads(False)
        ctx.eps = eps
        ctx.p = p
        ctx.branch = None if branch is None else branch.dtype
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal: Tensor | None, dy: Tensor) -> tuple:
        total, weight, seed = ctx.saved_tensors
        C = total.shape[-1]
        branch = ctx.branch
        dy = torch.zeros_like(total) if dy is None else dy.contiguous()
        dtotal = None if dtotal is None else dtotal.contiguous()
        elements, stages = 16, 3
        if C > 2048:
            elements = 8
        elif dtotal is not None and total.element_size() == 4:
            stages = 2
        T = total.numel() // C
        cut = _row_tile(C, elements, least=4)
        programs = min(
            triton.cdiv(T, cut["ROWS"]),
            max(1, 256 // elements // cut["warps"]) * processors(total.device),
        )
        dx = torch.empty_like(total)
        partial = total.new_empty(programs, C, dtype=torch.float32)
        # Otherwise its gradient is that of x
        own = branch is not None and (branch != total.dtype or seed is not None)
        dbranch = None
        if own:
            dbranch = total.new_empty(*total.shape, dtype=branch)
        args = (total, weight, dy, dtotal, seed, dx, dbranch, partial, T, ctx.eps, ctx.p)
        launch(
            _rmsnorm_backward_kernel, (programs,), total.device, *args, C=C, STAGES=stages, **cut
        )
        if branch is not None and not own:
            dbranch = dx
        dweight = _sum_partials(partial).to(weight.dtype)
        return dx, dbranch, dweight, None, None, None


def rmsnorm(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    return _RMSNorm.apply(x, branch, weight, eps, dtype, dropout)


# ---- rope: q, k, v from one joint product, q and k rotated: components i and i + D/2 by the angle
# of [position, i]
#      (Su et al., 2021). qkv [B, S, (H + 2 KH) D], cos, sin fp32 [S or more, D/2] ->
#      q [B, S, H, D], k, v [B, S, KH, D]. Pairs are placed as in Hugging Face's checkpoints. The
#      fused op rotates in place: qkv holds q and k afterwards.


def rope_ref(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    B, S, N = qkv.shape
    qk, v = qkv.view(B, S, -1, N // (heads + 2 * kv_heads)).split((heads + kv_heads, kv_heads), 2)
    a, b = wide(qk).chunk(2, -1)
    cos = cos[:S, None]
    sin = sin[:S, None]
    q, k = (
        torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        .to(qkv.dtype)
        .split((heads, kv_heads), 2)
    )
    return q, k, v


@jit
def _rope_forward_kernel(
    qkv, cos, sin, T, S,
    HEADS: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rotate ROWS of the first TURNED heads of all tokens, in place. qkv [T, HEADS, 2 HALF]"""
    gdc_launch_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    token = rows // TURNED
    head = rows % TURNED
    offsets = (token.to(tl.int64) * HEADS + head)[:, None] * (2 * HALF) + cols[None, :]
    angles = (token % S)[:, None] * HALF + cols[None, :]
    mask = (token < T)[:, None] & (cols < HALF)[None, :]
    gdc_wait(PDL)
    a = tl.load(qkv + offsets, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(qkv + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + angles, mask=mask, other=0.0)
    s = tl.load(sin + angles, mask=mask, other=0.0)
    tl.store(qkv + offsets, (a * c - b * s).to(qkv.dtype.element_ty), mask=mask)
    tl.store(qkv + offsets + HALF, (b * c + a * s).to(qkv.dtype.element_ty), mask=mask)


@jit
def _load_halves(x, token, head, cols, mask, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Both halves of heads of x [T, HEADS, 2 HALF] in fp32; 0 where there is no such head."""
    offsets = (token.to(tl.int64) * HEADS + head)[:, None] * (2 * HALF) + cols[None, :]
    mask = mask & ((head >= 0) & (head < HEADS))[:, None]
    a = tl.load(x + offsets, mask=mask, other=0.0)
    b = tl.load(x + offsets + HALF, mask=mask, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@jit
def _rope_backward_kernel(
    dq, dk, dv, cos, sin, dqkv, T, S,
    H: tl.constexpr, KH: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS heads of all tokens: those of q and k rotated back, all gathered into dqkv [T, H + 2 KH,
    2 HALF]."""
    gdc_launch_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    token = rows // (H + 2 * KH)
    head = rows % (H + 2 * KH)
    offsets = rows.to(tl.int64)[:, None] * (2 * HALF) + cols[None, :]
    angles = (token % S)[:, None] * HALF + cols[None, :]
    mask = (token < T)[:, None] & (cols < HALF)[None, :]
    turned = mask & (head < H + KH)[:, None]
    gdc_wait(PDL)
    qa, qb = _load_halves(dq, token, head, cols, mask, H, HALF)
    ka, kb = _load_halves(dk, token, head - H, cols, mask, KH, HALF)
    va, vb = _load_halves(dv, token, head - H - KH, cols, mask, KH, HALF)
    a = qa + ka + va  # two of the three are 0
    b = qb + kb + vb
    c = tl.load(cos + angles, mask=turned, other=1.0)
    s = tl.load(sin + angles, mask=turned, other=0.0)
    tl.store(dqkv + offsets, (a * c + b * s).to(dqkv.dtype.element_ty), mask=mask)
    tl.store(dqkv + offsets + HALF, (b * c - a * s).to(dqkv.dtype.element_ty), mask=mask)


def _rope_tile(rows: int, D: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid for this many rows, each a head of a token, and the tile of about 1024 pairs that a
    program takes."""
    block = triton.next_power_of_2(D // 2)
    cut = dict(HALF=D // 2, ROWS=max(1, 1024 // block), BLOCK=block)
    return (triton.cdiv(rows, cut["ROWS"]),), cut


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple:
        qkv = qkv.detach()
        B, S, N = qkv.shape
        D = N // (heads + 2 * kv_heads)
        turned = heads + kv_heads
        assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous(), qkv.shape
        assert cos.shape == sin.shape and cos.shape[0] >= S and 2 * cos.shape[1] == D, (
            cos.shape,
            qkv.shape,
        )
        grid, cut = _rope_tile(B * S * turned, D)
        cut |= dict(HEADS=turned + kv_heads, TURNED=turned)
        launch(_rope_forward_kernel, grid, qkv.device, qkv, cos, sin, B * S, S, **cut)
        ctx.save_for_backward(cos, sin)
        return qkv.unflatten(-1, (-1, D)).split((heads, kv_heads, kv_heads), 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple:
        B, S, H, D = dq.shape
        KH = dk.shape[2]
        cos, sin = ctx.saved_tensors
        dqkv = dq.new_empty(B, S, (H + 2 * KH) * D)
        grid, cut = _rope_tile(B * S * (H + 2 * KH), D)
        args = (dq.contiguous(), dk.contiguous(), dv.contiguous(), cos, sin, dqkv, B * S, S)
        launch(_rope_backward_kernel, grid, dq.device, *args, H=H, KH=KH, **cut)
        return dqkv, None, None, None, None


def rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _Rope.apply(qkv, cos, sin, heads, kv_heads)


# ---- swiglu: silu(a) * b with a, b the halves of one joint product (Shazeer, 2020).
#      ab [..., 2 F] -> [..., F]
#      backward: da = dout b s (1 + a (1 - s)), db = dout a s, with s = sigmoid(a)


def swiglu_ref(ab: Tensor) -> Tensor:
    a, b = ab.chunk(2, -1)
    return functional.silu(a) * b


@jit
def _swiglu_offsets(F: tl.constexpr, BLOCK: tl.constexpr):
    """Where a program's elements are in out [T, F], and their a in ab [T, 2 F]; int64, for 2^31
    elements and more."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return offsets, offsets // F * (2 * F) + offsets % F


@jit
def _swiglu_forward_kernel(ab, out, count, F: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    gdc_launch_dependents(PDL)
    offsets, place = _swiglu_offsets(F, BLOCK)
    mask = offsets < count
    gdc_wait(PDL)
    a = tl.load(ab + place, mask=mask).to(tl.float32)
    b = tl.load(ab + place + F, mask=mask).to(tl.float32)
    tl.store(out + offsets, (a / (1.0 + tl.exp(-a)) * b).to(out.dtype.element_ty), mask=mask)


@jit
def _swiglu_backward_kernel(
    ab, dout, dab, count, F: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    gdc_launch_dependents(PDL)
    offsets, place = _swiglu_offsets(F, BLOCK)
    mask = offsets < count
    gdc_wait(PDL)
    a = tl.load(ab + place, mask=mask).to(tl.float32)
    b = tl.load(ab + place + F, mask=mask).to(tl.float32)
    d = tl.load(dout + offsets, mask=mask).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-a))
    tl.store(dab + place, (d * b * s * (1.0 + a * (1.0 - s))).to(dab.dtype.element_ty), mask=mask)
    tl.store(dab + place + F, (d * a * s).to(dab.dtype.element_ty), mask=mask)


ELEMENTS = 1024  # per program


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ab: Tensor) -> Tensor:
        assert ab.is_contiguous() and ab.shape[-1] % 2 == 0, ab.shape
        out = ab.new_empty(*ab.shape[:-1], ab.shape[-1] // 2)
        grid = (triton.cdiv(out.numel(), ELEMENTS),)
        sizes = dict(F=out.shape[-1], BLOCK=ELEMENTS)
        launch(_swiglu_forward_kernel, grid, ab.device, ab, out, out.numel(), **sizes)
        ctx.save_for_backward(ab)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor) -> Tensor:
        (ab,) = ctx.saved_tensors
        dout = dout.contiguous()
        dab = torch.empty_like(ab)
        grid = (triton.cdiv(dout.numel(), ELEMENTS),)
        sizes = dict(F=dout.shape[-1], BLOCK=ELEMENTS)
        launch(_swiglu_backward_kernel, grid, ab.device, ab, dout, dab, dout.numel(), **sizes)
        return dab


def swiglu(ab: Tensor) -> Tensor:
    return _SwiGLU.apply(ab)


# ---- cross_entropy: mean of log(sum(exp(logits))) - logits[target] over the targets that count
#      logits [T, V], targets int64 [T], of which those equal to IGNORE do not count -> scalar in
#      fp32. Where a gradient is wanted, the fused op computes it with the loss, (softmax(logits) -
#      onehot(target)) / count, and writes it over the logits, so that there is no second matrix of
#      their size: do not use them afterwards.

IGNORE = -100  # as in torch
LOG2E = constexpr(1.4426950408889634)


def cross_entropy_ref(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(wide(logits), targets)


@jit
def _exponent(logits, shift):
    """logits log2(e) - shift, rounded once."""
    if EMULATED:  # numpy has no fused multiply-add
        return (logits.to(tl.float64) * LOG2E - shift).to(tl.float32)
    return tl.fma(logits, LOG2E, -shift)


@jit
def _add_powers(tile, lane_max, lane_shift, lane_sum):
    """Fold a tile [lanes, WIDTH] of logits into each lane's maximum, that maximum as an exponent of
    two (rounded down), and its sum of powers."""
    lane_max = tl.maximum(lane_max, tl.max(tile, 1))
    # Finite, so that a lane of -inf adds 0, not NaN
    shift = tl.maximum(tl.floor(lane_max * LOG2E), -3e38)
    return (
        lane_max,
        shift,
        lane_sum * tl.exp2(lane_shift - shift)
        + tl.sum(tl.exp2(_exponent(tile, shift[:, None])), 1),
    )


@jit
def _load_blocks(start, offs, COUNT: tl.constexpr, BLOCK: tl.constexpr, EVICTION: tl.constexpr):
    """Load COUNT blocks into registers, all of them in flight at once."""
    blocks = ()
    for i in tl.static_range(COUNT):
        blocks = blocks + (tl.load(start + i * BLOCK + offs, eviction_policy=EVICTION),)
    return blocks


@jit
def _still_narrow(block):
    """The same block, though the compiler cannot know that: otherwise it would keep the fp32 values
    that the 16-bit ones were converted to, in twice as many registers."""
    if EMULATED:
        return block
    PACK: tl.constexpr = 32 // block.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [block], dtype=block.dtype, is_pure=False, pack=PACK
    )


@jit
def _prefetch(start, BYTES: tl.constexpr, AT_ONCE: tl.constexpr):
    """Prefetch memory into the L2, AT_ONCE lines of 128 bytes at a time: one per thread."""
    ASM: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    if not EMULATED:
        for first in tl.static_range(0, BYTES, 128 * AT_ONCE):
            pointers = start.to(tl.int64) + tl.minimum(
                first + 128 * tl.arange(0, AT_ONCE), BYTES - 1
            )
            tl.inline_asm_elementwise(
                ASM, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
            )


@jit
def _softmax(block, shift, factor):
    return (tl.exp2(_exponent(block.to(tl.float32), shift)) * factor).to(block.dtype)


@jit
def _cross_entropy_kernel(
    logits, targets, count, losses, T, ahead,
    V: tl.constexpr, IGNORE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
    AT_ONCE: tl.constexpr, PREFETCHED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The loss of a row and, where there is a count, the gradient over the logits: (softmax -
    onehot) / count.

    A row consists of whole blocks and a ragged end, which alone has a mask. The end and about KEPT
    blocks before it stay in registers until the gradient is written over them. The other blocks are
    loaded AT_ONCE at a time, and again for the gradient, the last ones first, before anything else
    can evict them from the caches. Where V is not a multiple of WIDTH, rows start anywhere: the
    whole blocks then start at the first aligned 16 bytes, and what lies before them is part of the
    end.

    Rows in registers leave room for only a few programs, and while these compute, memory is idle.
    So each program prefetches into the L2 a row that will be needed soon, `ahead` by as many as run
    at once, or the first PREFETCHED bytes of it. The number of instructions matters as well: a maximum
    is kept for every WIDTH neighbours, the 16 bytes that a thread loads at once, since one for each
    logit would double the exponentials; and these are powers of two, with the maximum rounded down
    to a whole power, so that a logit costs one multiply-add before its power, rounded once at any
    magnitude."""
    gdc_launch_dependents(PDL)
    WHOLE: tl.constexpr = (V - 1) // BLOCK
    # Blocks that are loaded twice
    TWICE: tl.constexpr = min(WHOLE, max(0, WHOLE - KEPT) + AT_ONCE - 1) // AT_ONCE * AT_ONCE
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
    # The sum of the powers
    zeros = tl.zeros([LANES], tl.float32)
    lane_max = zeros - float("inf")
    lane_shift = zeros - 3e38
    lane_sum = zeros
    for v in range(0, TWICE * BLOCK, AT_ONCE * BLOCK):
        some = _load_blocks(blocks + v, offs, AT_ONCE, BLOCK, "")
        for i in tl.static_range(AT_ONCE):
            lane_max, lane_shift, lane_sum = _add_powers(
                some[i].to(tl.float32), lane_max, lane_shift, lane_sum
            )
    for i in tl.static_range(WHOLE - TWICE):
        lane_max, lane_shift, lane_sum = _add_powers(
            kept[i].to(tl.float32), lane_max, lane_shift, lane_sum
        )
    lane_max, lane_shift, lane_sum = _add_powers(end.to(tl.float32), lane_max, lane_shift, lane_sum)
    row_max = tl.max(lane_max, 0)
    shift = tl.maximum(tl.floor(row_max * LOG2E), -3e38)
    total = tl.sum(lane_sum * tl.exp2(lane_shift - shift), 0)
    loss = tl.log(total / tl.exp2(_exponent(row_max, shift))) + (row_max - true_logit)
    tl.store(losses + pid, tl.where(target == IGNORE, 0.0, loss))
    # The gradient
    if count is not None:
        factor = tl.where(target == IGNORE, 0.0, 1.0 / counted) / total
        for back in range(AT_ONCE * BLOCK, TWICE * BLOCK + 1, AT_ONCE * BLOCK):
            start = blocks + TWICE * BLOCK - back
            some = _load_blocks(start, offs, AT_ONCE, BLOCK, "evict_first")
            for i in tl.static_range(AT_ONCE):
                tl.store(
                    start + i * BLOCK + offs,
                    _softmax(some[i], shift, factor),
                    eviction_policy="evict_first",
                )
        if TWICE > 0:
            _prefetch(next_row, PREFETCHED, LANES)
        for i in tl.static_range(WHOLE - TWICE):
            pointers = blocks + (TWICE + i) * BLOCK + offs
            tl.store(
                pointers,
                _softmax(_still_narrow(kept[i]), shift, factor),
                eviction_policy="evict_first",
            )
        tl.store(
            row + end_offs,
            _softmax(_still_narrow(end), shift, factor),
            mask=mask,
            eviction_policy="evict_first",
        )
        tl.debug_barrier()  # the target's own gradient is written after that of its neighbours
        # 0 where this logit is all of the total
        gradient = (tl.exp2(_exponent(true_logit, shift)) - total) * factor
        tl.store(row + target, gradient.to(logits.dtype.element_ty), mask=exists)


def _cross_entropy_launch(
    V: int, size: int, gradient: bool, device: torch.device
) -> dict[str, int]:
    """How rows of V logits of `size` bytes each are cut up, from sweeps on an H200."""
    width = 16 // size
    row = V * size
    if not gradient:
        cut = dict(KEPT=0, AT_ONCE=8, PREFETCHED=0, warps=8, maxnreg=64)
    elif row <= 1 << 14:
        cut = dict(KEPT=16, AT_ONCE=4, PREFETCHED=row, warps=4, maxnreg=64)
    elif row <= 1 << 16 or size == 2 and row <= 1 << 17:
        # Two programs per SM, each with up to 64 KB of a row in its registers
        cut = dict(KEPT=16, AT_ONCE=4, PREFETCHED=min(row, 1 << 16), warps=8, maxnreg=128)
    elif size == 4:
        # One program per SM, with up to 128 KB
        prefetched = row if row <= 1 << 17 else 0
        cut = dict(KEPT=16, AT_ONCE=8, PREFETCHED=prefetched, warps=16, maxnreg=128)
    else:
        # One program per SM, so that what is read twice stays in the L2
        cut = dict(KEPT=4, AT_ONCE=4, PREFETCHED=0, warps=32, maxnreg=64)
    warps = min(cut["warps"], triton.cdiv(triton.next_power_of_2(V), 32 * width))
    # As many rows as run at once, or more if they are short
    ahead = processors(device) * max(16 // warps, (1 << 17) // row, 1)
    blocks = dict(V=V, IGNORE=IGNORE, WIDTH=width, BLOCK=32 * width * warps)
    return cut | blocks | dict(ahead=ahead, warps=warps)


def cross_entropy_rows(logits: Tensor, targets: Tensor, count: Tensor | None = None) -> Tensor:
    """The loss of each row, fp32 [T], 0 where the target is IGNORE. Given `count`, one number on
    the device, the gradient of the sum of the losses divided by it is written over the logits."""
    T, V = logits.shape
    assert logits.is_contiguous() and targets.shape == (T,), (logits.shape, targets.shape)
    losses = logits.new_empty(T, dtype=torch.float32)
    cut = _cross_entropy_launch(V, logits.element_size(), count is not None, logits.device)
    launch(_cross_entropy_kernel, (T,), logits.device, logits, targets, count, losses, T, **cut)
    return losses


@jit
def _scale_kernel(x, factor, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """x *= factor, which costs nothing where the factor is 1."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:
        for first in range(
            tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK
        ):
            offsets = first + tl.arange(0, BLOCK)
            values = tl.load(x + offsets, mask=offsets < count).to(tl.float32) * f
            tl.store(x + offsets, values.to(x.dtype.element_ty), mask=offsets < count)


def _scale(x: Tensor, factor: Tensor) -> Tensor:
    """x *= factor, a number on the device."""
    assert x.is_contiguous(), x.shape
    grid = (min(triton.cdiv(x.numel(), 4096), 4 * processors(x.device)),)
    launch(_scale_kernel, grid, x.device, x, factor, x.numel(), BLOCK=4096, warps=8)
    return x


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, differentiated: bool) -> Tensor:
        logits = logits.detach()
        count = (targets != IGNORE).sum()
        ctx.gradient = logits if differentiated else None
        return cross_entropy_rows(logits, targets, count if differentiated else None).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss: Tensor) -> tuple:
        gradient = ctx.gradient
        ctx.gradient = None
        assert gradient is not None, (
            "the gradient of cross_entropy is available once: it overwrites the logits"
        )
        return _scale(gradient, dloss), None, None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return _CrossEntropy.apply(logits, targets, _differentiated(logits))


def _differentiated(*inputs: Tensor) -> bool:
    """Whether a gradient is wanted. Not ctx.needs_input_grad, which is also true under no_grad."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


# ---- linear_cross_entropy: cross_entropy of logits x W^T. x [T, C], weight [V, C], targets int64
# [T] -> scalar in fp32
#      The fused op takes a chunk of tokens at a time, forward and backward at once, so that the
#      full logits never exist (as Liger Kernel does; Hsu et al., 2024). Chunks are large, since
#      each adds to dweight in memory.

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
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, differentiated: bool) -> Tensor:
        narrow = weight.to(x.dtype)
        count = (targets != IGNORE).sum()
        losses = []
        dx = dweight = None
        if differentiated:
            dx = torch.empty_like(x)
            dweight = torch.zeros_like(weight)
        for first in range(0, len(x), CHUNK):
            rows = slice(first, first + CHUNK)
            logits = x[rows] @ narrow.t()
            divisor = count if differentiated else None
            losses.append(cross_entropy_rows(logits, targets[rows], divisor))
            if differentiated:  # the logits are their gradient now
                torch.mm(logits, narrow, out=dx[rows])
                _accumulate(dweight, logits.t(), x[rows])
            del logits  # before the next chunk is allocated
        ctx.gradients = (dx, dweight)
        return torch.cat(losses).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss: Tensor) -> tuple:
        gradients = ctx.gradients
        ctx.gradients = None
        assert gradients is not None, "the gradients of linear_cross_entropy are available once"
        return *(_scale(gradient, dloss) for gradient in gradients), None, None


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    assert x.is_contiguous() and x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    return _LinearCrossEntropy.apply(x, weight, targets, _differentiated(x, weight))


# ---- the table of ops

OPS = {
    "linear": (linear_ref, linear),
    "rmsnorm": (rmsnorm_ref, rmsnorm),
    "rope": (rope_ref, rope),
    "swiglu": (swiglu_ref, swiglu),
    "cross_entropy": (cross_entropy_ref, cross_entropy),
    "linear_cross_entropy": (linear_cross_entropy_ref, linear_cross_entropy),
}
reference = SimpleNamespace(**{name: ref for name, (ref, _) in OPS.items()})
fused = SimpleNamespace(**{name: op for name, (_, op) in OPS.items()})
