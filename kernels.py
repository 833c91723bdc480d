"""The ops of the model, each in plain torch and in Triton.

Read in this order:

    formats.py     what a matrix is: how its weights are stored, and how kernels load them.
                   fp8.py and bits/int4.py are the formats that this program encodes
    products.py    x W^T for one token, a few, or a prompt, and the norm before it
    attention.py   for one token, a few, or a prompt
    sampling.py    how the next token is chosen
    kernels.py     (here) what is done with the rows of each product, RoPE, the embedding, and last
                   the table of all ops, which is worth a look first

launch.py says how a kernel is launched, and what it may do before the one before it has ended.
experts.py has the products of models with experts. What only some formats, cards or machines need
is in bits/ (codes in groups), cards/ (Hopper's kernels, a CPU's products) and ranks/ (several GPUs).

Shape letters, here and everywhere:

    T new tokens        P places of the cache   V vocabulary    L layers
    N segments          S positions in use      R sampled rows
    C dim               F hidden_dim            N, K  rows and columns of any matrix
    H query heads       KH key/value heads      G = H / KH      D head_dim

Words, here and everywhere; formats.py and bits/groups.py have those for weights (code, word, group, run, half2):

    tile, block   what a program loads at once; a tile's sizes are BLOCK_..., or BLOCK columns
    epilogue      what an op does with the rows of a product, as a function that the kernel calls
    stack         the matrices of all experts, one after the other in one Matrix
    slot          one of the k places of a token for an expert
    chunk         one of the pieces in which a prompt is evaluated

A pass evaluates the new tokens of one or of several sequences, one after the other as the T rows of
x, so there is no batch axis. A sequence's rows in a pass are a segment. An op of the model takes x,
the weights that it needs (a layer, a matrix or a norm) and, if it depends on what the rows are, the
pass: most are op(x, layer, pass_). Its tensors say on the device where each row lies in the cache
(place) and how many tokens of its sequence come before it (position). Kernels take contiguous tensors
and derive strides from shapes.

One op is one block: formula and shapes, the reference, the kernel or the epilogue, the launcher.
`reference` (--backend torch) has the functions whose names end in _ref. It runs on any torch
device: it is the CPU path, and the oracle in tests. `fused` (--backend triton) runs on CUDA, and on
CPU tensors when TRITON_INTERPRET=1. MANUAL.md says what else an op needs. Products that launch.json
does not list take its default sizes."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import experts
from attention import attention, attention_ref, to_cache, to_cache_ref
from experts import Routing, route, route_ref
from formats import Matrix
from fp8 import E4M3
from launch import gdc_launch_dependents, gdc_wait, jit, launch, saturated, tl, triton
from products import (
    STORE_ROWS,
    Epilogue,
    Product,
    even_and_odd,
    is_fused,
    launch_product,
    library_product,
    linear_ref,
    prepare_rows,
    rmsnorm,
    rmsnorm_ref,
    silu_mul,
)
from sampling import sample, sample_ref

if TYPE_CHECKING:
    from model import LayerWeights
    from passes import Pass

# ---- embedding: x = table[tokens[place]]. tokens int32 [P], table [V, C] -> [T, C]


def embedding_ref(table: Tensor, pass_: Pass) -> Tensor:
    return functional.embedding(pass_.tokens.index_select(0, pass_.place), table)


@jit
def _embedding_kernel(
    tokens, place, table, out, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    gdc_launch_dependents(PDL)
    offs_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait(PDL)
    t = tl.program_id(0)
    token = tl.load(tokens + tl.load(place + t)).to(tl.int64)
    mask = offs_c < C
    pointers = out + t * C + offs_c
    tl.store(pointers, tl.load(table + token * C + offs_c, mask=mask), mask=mask)


def embedding(table: Tensor, pass_: Pass) -> Tensor:
    T, C = len(pass_.place), table.shape[1]
    out = table.new_empty(T, C)
    args = (pass_.tokens, pass_.place, table, out)
    launch(_embedding_kernel, (T, triton.cdiv(C, 1024)), out.device, *args, C=C, BLOCK=1024)
    return out


# ---- side_by_side: [rmsnorm(table[tokens[place]]), rmsnorm(state)], what a head's attention reads
#      (speculation/heads.py). table [V, C], norms [2, C], state [T, C] -> [T, 2 C]


def side_by_side_ref(table: Tensor, norms: Tensor, state: Tensor, pass_: Pass) -> Tensor:
    halves = zip((embedding_ref(table, pass_), state), norms)
    return torch.cat([rmsnorm_ref(x, norm, pass_.norm_eps) for x, norm in halves], 1)


@jit
def _side_by_side_kernel(
    tokens, place, table, norms, state, out, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents(PDL)
    t, half = tl.program_id(0), tl.program_id(1)
    offs_c = tl.arange(0, BLOCK)
    mask = offs_c < C
    weights = tl.load(norms + half * C + offs_c, mask=mask, other=0.0).to(tl.float32)
    at = tl.load(place + t)
    gdc_wait(PDL)
    if half == 0:
        token = tl.load(tokens + at).to(tl.int64)
        y = tl.load(table + token * C + offs_c, mask=mask, other=0.0).to(tl.float32)
    else:
        y = tl.load(state + t.to(tl.int64) * C + offs_c, mask=mask, other=0.0).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y) / C + eps) * weights
    pointers = out + (t.to(tl.int64) * 2 + half) * C + offs_c
    tl.store(pointers, y.to(out.dtype.element_ty), mask=mask)


def side_by_side(table: Tensor, norms: Tensor, state: Tensor, pass_: Pass) -> Tensor:
    T, C = state.shape
    assert norms.shape == (2, C) and table.shape[1] == C, (table.shape, norms.shape, state.shape)
    out = state.new_empty(T, 2 * C)
    block = triton.next_power_of_2(C)
    args = (pass_.tokens, pass_.place, table, norms, state, out, pass_.norm_eps)
    warps = min(16, max(1, block // 512))
    launch(_side_by_side_kernel, (T, 2), out.device, *args, C=C, BLOCK=block, warps=warps)
    return out


# ---- rope: pairs of neighbours (x[2i], x[2i+1]) rotated by an angle  (Su et al., 2021)
#      x [T, H, D] -> [T, H, D]. table [size, D/2, 2] float32: cosine and sine by position and pair


def rope_ref(x: Tensor, table: Tensor, position: Tensor) -> Tensor:
    pairs = x.float().view(torch.complex64)
    angles = table.index_select(0, position).view(torch.complex64)
    return (pairs * angles.mT).view(torch.float32).to(x.dtype)


@jit
def _rotate(even, odd, cos, sin):
    return even * cos - odd * sin, even * sin + odd * cos


@jit
def _rope_kernel(
    x, qk_norm, eps, table, k_cache, v_cache, q, place, position, P,
    H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ENCODE: tl.constexpr, FP16_SUMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS of one token's heads, x [T, H + 2 KH, D]. The first H are normalised, if there is
    qk_norm, and rotated into q, the next KH likewise into the keys; the last KH are copied into the
    values. Heads are read and written whole, 16 bytes per thread; pairs are split in registers."""
    gdc_launch_dependents(PDL)
    t = tl.program_id(0)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    offs_d = tl.arange(0, BLOCK_D)
    # Before the wait: the interleaved cosines and sines of the token's position
    place = tl.load(place + t)
    angles = tl.load(
        table + tl.load(position + t) * D + offs_d[None, :], mask=offs_d[None, :] < D, other=0.0
    )
    angles = tl.broadcast_to(angles, [HEADS, BLOCK_D])
    cos, sin = tl.split(tl.reshape(angles, [HEADS, BLOCK_D // 2, 2]))
    gdc_wait(PDL)
    mask = (heads[:, None] < H + 2 * KH) & (offs_d[None, :] < D)
    offs = (t * (H + 2 * KH) + heads[:, None]).to(tl.int64) * D + offs_d[None, :]
    values = tl.load(x + offs, mask=mask, other=0.0).to(tl.float32)
    turned = values
    if qk_norm is not None:
        weight = qk_norm + tl.where(heads < H, 0, D)[:, None] + offs_d[None, :]
        weights = tl.load(weight, mask=offs_d[None, :] < D, other=0.0).to(tl.float32)
        turned = values * tl.rsqrt(tl.sum(values * values, 1) / D + eps)[:, None] * weights
    even, odd = tl.split(tl.reshape(turned, [HEADS, BLOCK_D // 2, 2]))
    even, odd = _rotate(even, odd, cos, sin)
    rotated = tl.reshape(tl.join(even, odd), [HEADS, BLOCK_D])
    offs_q = (t * H + heads[:, None]).to(tl.int64) * D + offs_d[None, :]
    new_q = saturated(rotated, FP16_SUMS).to(q.dtype.element_ty)
    tl.store(q + offs_q, new_q, mask=mask & (heads[:, None] < H))
    kv_head = (heads - H).to(tl.int64)[:, None]
    kept = saturated(tl.where(kv_head < KH, rotated, values), FP16_SUMS)
    kept = kept.to(k_cache.dtype.element_ty) if ENCODE is None else ENCODE(kept)
    offs_k = (kv_head * P + place) * D + offs_d[None, :]
    offs_v = ((kv_head - KH) * P + place) * D + offs_d[None, :]
    tl.store(k_cache + offs_k, kept, mask=mask & (kv_head >= 0) & (kv_head < KH))
    tl.store(v_cache + offs_v, kept, mask=mask & (kv_head >= KH))


# ---- rmsnorm_qkv_rope: q, k, v = split(rmsnorm(x) Wqkv^T + bias); q, k = rope(q), rope(k)
#      x [T, C], wqkv [(H + 2 KH) D, C] -> q [T, H, D]; k and v go to the cache, at place
#
#      A layer without attention_norm gets an x that has been normalised.
#      Qwen3 has qk_norm [2, D]: before rope, each head of q is normalised with the first row as
#      the weight of rmsnorm, each head of k with the second.
#      Keys and values in int8 are E4M3 codes without a scale: magnitudes up to 448, with three bits
#      of mantissa from 0.016 up.


def rmsnorm_qkv_rope_ref(x: Tensor, layer: LayerWeights, pass_: Pass) -> Tensor:
    T = len(x)
    k_cache, v_cache = pass_.k[layer.index], pass_.v[layer.index]
    KH, _, D = k_cache.shape
    if layer.attention_norm is not None:
        x = rmsnorm_ref(x, layer.attention_norm, pass_.norm_eps)
    qkv = linear_ref(x, layer.wqkv).view(T, -1, D)
    H = qkv.shape[1] - 2 * KH
    qk = qkv[:, : H + KH]
    if layer.qk_norm is not None:
        heads = zip(qk.split([H, KH], 1), layer.qk_norm)
        qk = torch.cat([rmsnorm_ref(some, weight, pass_.norm_eps) for some, weight in heads], 1)
    qk = rope_ref(qk, pass_.rope[layer.index], pass_.position)
    place = pass_.place.long()
    for cache_, new in ((k_cache, qk[:, H:]), (v_cache, qkv[:, H + KH :])):
        cache_.index_copy_(1, place, to_cache_ref(new, cache_.dtype).transpose(0, 1))
    return qk[:, :H]


class Heads(NamedTuple):
    """The sizes that the kernels of rmsnorm_qkv_rope need."""

    H: int
    KH: int
    D: int
    IN_8_BITS: bool  # keys and values


@jit
def _prepare_rope(args, pairs, t, T, N, TOKENS: tl.constexpr, SIZES: tl.constexpr):
    """Token, head, pair, place, cosine and sine of each pair of rows, and which of them exist."""
    head = pairs // (SIZES.D // 2)
    pair = pairs % (SIZES.D // 2)
    mask = (pairs < N // 2) & (t < T)
    _, _, _, table, place, position, _ = args
    place = tl.load(place + t, mask=t < T, other=0)
    position = tl.load(position + t, mask=t < T, other=0)
    mask_qk = mask & (head < SIZES.H + SIZES.KH)
    angle = table + (position * (SIZES.D // 2) + pair) * 2
    cos = tl.load(angle, mask=mask_qk, other=1.0)
    sin = tl.load(angle + 1, mask=mask_qk, other=0.0)
    return t, head, pair, place, cos, sin, mask


@jit
def _store_rope(
    args, y, ready, T, N, ROWS: tl.constexpr, TOKENS: tl.constexpr, SIZES: tl.constexpr
):
    """Rotate q and k, and store pairs where their head belongs: in q [T, H, D], or in the keys or
    values [KH, P, D] at place. args: q, keys, values, table, place, position, P."""
    t, head, pair, place, cos, sin, mask = ready
    even, odd = even_and_odd(y, ROWS, TOKENS)
    even, odd = _rotate(even, odd, cos, sin)
    q, k_cache, v_cache, _, _, _, P = args
    HALF_D: tl.constexpr = SIZES.D // 2
    offs_q = ((t * SIZES.H + head) * HALF_D + pair) * 2
    mask_q = mask & (head < SIZES.H)
    tl.store(q + offs_q, even.to(q.dtype.element_ty), mask=mask_q)
    tl.store(q + offs_q + 1, odd.to(q.dtype.element_ty), mask=mask_q)
    kv_head = (head - SIZES.H).to(tl.int64)
    offs_k = ((kv_head * P + place) * HALF_D + pair) * 2
    mask_k = mask & (head >= SIZES.H) & (head < SIZES.H + SIZES.KH)
    tl.store(k_cache + offs_k, to_cache(even, k_cache, SIZES.IN_8_BITS), mask=mask_k)
    tl.store(k_cache + offs_k + 1, to_cache(odd, k_cache, SIZES.IN_8_BITS), mask=mask_k)
    offs_v = (((kv_head - SIZES.KH) * P + place) * HALF_D + pair) * 2
    mask_v = mask & (head >= SIZES.H + SIZES.KH)
    tl.store(v_cache + offs_v, to_cache(even, v_cache, SIZES.IN_8_BITS), mask=mask_v)
    tl.store(v_cache + offs_v + 1, to_cache(odd, v_cache, SIZES.IN_8_BITS), mask=mask_v)


def rmsnorm_qkv_rope(
    x: Tensor, layer: LayerWeights, pass_: Pass, *, accumulate: str = "auto"
) -> Tensor:
    k_cache, v_cache = pass_.k[layer.index], pass_.v[layer.index]
    table = pass_.rope[layer.index]
    T = len(x)
    KH, P, D = k_cache.shape
    H = layer.wqkv.rows // D - 2 * KH
    sizes = Heads(H, KH, D, k_cache.dtype == torch.int8)
    q = x.new_empty(T, H, D)
    product = Product("rmsnorm_qkv_rope", x, layer.wqkv, layer.attention_norm, pass_.norm_eps)
    if not is_fused(product):
        qkv = library_product(product, accumulate)
    elif layer.qk_norm is None:
        args = (q, k_cache, v_cache, table, pass_.place, pass_.position, P)
        launch_product(product, Epilogue(_prepare_rope, _store_rope, sizes, pairs=True), args)
        return q
    else:
        # The norm of q and k needs whole heads, of which an epilogue gets only some rows
        qkv = x.new_empty(T, layer.wqkv.rows, dtype=torch.float32)
        launch_product(product, STORE_ROWS, (qkv,))
    _launch_rope(qkv, q, layer, pass_, sizes, accumulate == "fp16")
    return q


def _launch_rope(
    qkv: Tensor, q: Tensor, layer: LayerWeights, pass_: Pass, sizes: Heads, fp16_sums: bool
) -> None:
    """From the product qkv [T, (H + 2 KH) D] to q, and to keys and values in the cache."""
    k_cache, v_cache = pass_.k[layer.index], pass_.v[layer.index]
    heads = sizes.H + 2 * sizes.KH
    block_d = triton.next_power_of_2(sizes.D)
    at_once = max(1, min(triton.next_power_of_2(heads), 2048 // block_d))
    args = (qkv, layer.qk_norm, pass_.norm_eps, pass_.rope[layer.index])
    args += (k_cache, v_cache, q, pass_.place, pass_.position, k_cache.shape[1])
    encode = None
    if sizes.IN_8_BITS:
        encode = E4M3.on(q.device).encode_tile
    launch(
        _rope_kernel,
        (len(q), triton.cdiv(heads, at_once)),
        q.device,
        *args,
        H=sizes.H,
        KH=sizes.KH,
        D=sizes.D,
        HEADS=at_once,
        BLOCK_D=block_d,
        ENCODE=encode,
        FP16_SUMS=fp16_sums,
        warps=max(1, at_once * block_d // 256),
    )


# ---- linear_add: residual += x W^T, in place. x [T, K], W [C, K], residual [T, C] -> residual
#
#      With experts: residual += the sum over a token's slots. x [T, k, K], W [E C, K]
#
#      linear_store: out = x W^T, out [T, C]. Where ranks share a model, it is the term of one of them


def linear_add_ref(x: Tensor, w: Matrix, residual: Tensor, routes: Routing | None = None) -> Tensor:
    if routes is None:
        return residual.add_(linear_ref(x, w))
    slots = experts.slots_ref(x, w, residual.shape[1], routes)
    return residual.copy_(residual.float() + slots.sum(1, dtype=torch.float32))


def linear_add(
    x: Tensor,
    w: Matrix,
    residual: Tensor,
    routes: Routing | None = None,
    *,
    accumulate: str = "auto",
) -> Tensor:
    if routes is not None:
        return experts.linear_add(x, w, residual, routes, accumulate)
    return _linear(x, w, residual, accumulate, added=True)


def linear_store_ref(x: Tensor, w: Matrix, out: Tensor, routes: Routing | None = None) -> Tensor:
    return linear_add_ref(x, w, out.zero_(), routes)


def linear_store(
    x: Tensor,
    w: Matrix,
    out: Tensor,
    routes: Routing | None = None,
    *,
    accumulate: str = "auto",
) -> Tensor:
    if routes is not None:
        return experts.linear_add(x, w, out.zero_(), routes, accumulate)
    return _linear(x, w, out, accumulate, added=False)


def _linear(x: Tensor, w: Matrix, out: Tensor, accumulate: str, added: bool) -> Tensor:
    """x W^T, stored in `out` or added to it."""
    fits = out.shape == (len(x), w.rows) and out.is_contiguous()
    assert fits, (out.shape, x.shape, w.shape)
    product = Product("linear_add", x, w)
    if not is_fused(product):
        return library_product(product, accumulate, out, added)
    launch_product(product, STORE_ROWS._replace(added=0 if added else None), (out,))
    return out


# ---- rmsnorm_swiglu: silu(a) * b with a, b = rmsnorm(x) W1^T, rmsnorm(x) W3^T  (Shazeer, 2020)
#      x [T, C], w13 [2 F, C] -> [T, F]. The rows of w1 and w3 alternate in w13, so that a and b of
#      one output are neighbours
#
#      With experts: the same for each of a token's slots, times the slot's weight. With a single token
#      it also chooses the experts, so it has to run before linear_add with the same routes.
#      w13 [E 2 F, C] -> [T, k, F]


def rmsnorm_swiglu_ref(
    x: Tensor, layer: LayerWeights, pass_: Pass, routes: Routing | None = None
) -> Tensor:
    normed = rmsnorm_ref(x, layer.ffn_norm, pass_.norm_eps)
    if routes is None:
        ab = linear_ref(normed, layer.w13)
    else:
        rows = layer.w13.rows // layer.router.rows
        ab = experts.slots_ref(normed, layer.w13, rows, routes)
    # b's silu is not needed, but torch is slow where elements are not neighbours
    h = functional.silu(ab)[..., ::2] * ab[..., 1::2]
    if routes is None:
        return h
    return (h * routes.weights[..., None]).to(h.dtype)


@jit
def _store_swiglu(
    args, y, ready, T, N, ROWS: tl.constexpr, TOKENS: tl.constexpr, SIZES: tl.constexpr
):
    """Store silu(a) * b of neighbouring rows a and b in args[0] [T, F]."""
    offs_f, t = ready
    a, b = even_and_odd(y, ROWS, TOKENS)
    y = silu_mul(a, b).to(args[0].dtype.element_ty)
    tl.store(args[0] + t * (N // 2) + offs_f, y, mask=(offs_f < N // 2) & (t < T))


@jit
def _swiglu_kernel(ab, out, F, BLOCK: tl.constexpr, FP16_SUMS: tl.constexpr, PDL: tl.constexpr):
    """silu(a) * b of neighbouring a and b. ab [T, 2 F] -> [T, F]"""
    gdc_launch_dependents(PDL)
    offs_f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait(PDL)
    offs = tl.program_id(0).to(tl.int64) * F + offs_f
    mask_pairs = offs_f[:, None] < F
    pointers = ab + offs[:, None] * 2 + tl.arange(0, 2)[None, :]
    pairs = tl.load(pointers, mask=mask_pairs, other=0.0)
    a, b = tl.split(pairs.to(tl.float32))
    mask = offs_f < F
    pointers = out + offs
    y = saturated(silu_mul(a, b), FP16_SUMS)
    tl.store(pointers, y.to(out.dtype.element_ty), mask=mask)


def rmsnorm_swiglu(
    x: Tensor,
    layer: LayerWeights,
    pass_: Pass,
    routes: Routing | None = None,
    *,
    accumulate: str = "auto",
) -> Tensor:
    if routes is not None:
        return experts.swiglu(x, layer, pass_, routes, accumulate)
    T, F = len(x), layer.w13.rows // 2
    out = x.new_empty(T, F)
    product = Product("rmsnorm_swiglu", x, layer.w13, layer.ffn_norm, pass_.norm_eps)
    if is_fused(product):
        launch_product(product, Epilogue(prepare_rows, _store_swiglu, pairs=True), (out,))
    else:
        ab = library_product(product, accumulate)
        sizes = dict(BLOCK=1024, FP16_SUMS=accumulate == "fp16")
        launch(_swiglu_kernel, (T, triton.cdiv(F, 1024)), x.device, ab, out, F, **sizes)
    return out


# ---- rmsnorm_linear: out = rmsnorm(x) W^T, the logits
#      x [T, C], W [V, C], out float32 [T, V] -> out


def rmsnorm_linear_ref(x: Tensor, norm: Tensor, w: Matrix, pass_: Pass, out: Tensor) -> Tensor:
    return out.copy_(linear_ref(rmsnorm_ref(x, norm, pass_.norm_eps), w))


def rmsnorm_linear(
    x: Tensor, norm: Tensor, w: Matrix, pass_: Pass, out: Tensor, *, accumulate: str = "auto"
) -> Tensor:
    assert out.shape == (len(x), w.rows) and out.is_contiguous(), (out.shape, x.shape, w.shape)
    product = Product("rmsnorm_linear", x, w, norm, pass_.norm_eps)
    if not is_fused(product):
        return out.copy_(library_product(product, accumulate))
    launch_product(product, STORE_ROWS, (out,))
    return out


# ---- the table of ops: the reference of each, and the fused one. model.py calls all of them but
#      sample, which follows a pass, rmsnorm and side_by_side, which heads need, and linear_store, a
#      product of heads, and a prompt's for ranks/exchange.py

OPS = {
    "embedding": (embedding_ref, embedding),
    "side_by_side": (side_by_side_ref, side_by_side),
    "rmsnorm": (rmsnorm_ref, rmsnorm),
    "rmsnorm_qkv_rope": (rmsnorm_qkv_rope_ref, rmsnorm_qkv_rope),
    "attention": (attention_ref, attention),
    "route": (route_ref, route),
    "linear_add": (linear_add_ref, linear_add),
    "linear_store": (linear_store_ref, linear_store),
    "rmsnorm_swiglu": (rmsnorm_swiglu_ref, rmsnorm_swiglu),
    "rmsnorm_linear": (rmsnorm_linear_ref, rmsnorm_linear),
    "sample": (sample_ref, sample),
}
# The ops that multiply by a matrix, by the names of their launch sizes; linear_store has those of
# linear_add
PRODUCTS = ("rmsnorm_qkv_rope", "linear_add", "rmsnorm_swiglu", "rmsnorm_linear")


def ops(backend: str, accumulate: str = "auto") -> SimpleNamespace:
    """The ops of a backend, "torch" or "triton".

    accumulate: how the Triton backend sums a prompt's products. "auto" lets 8-bit products
    accumulate fast (tensor_core_linear) and rounds INT4 to E4M3 for them, "fp32" does neither,
    "fp16" sums in half precision, in attention as well, but not with experts. The reference ops
    sum in fp32."""
    column = {"torch": 0, "triton": 1}[backend]
    table = {name: op[column] for name, op in OPS.items()}
    if backend == "triton":
        for name in ("attention", "linear_store", *PRODUCTS):
            table[name] = partial(table[name], accumulate=accumulate)
    return SimpleNamespace(**table)


reference = ops("torch")
fused = ops("triton")
