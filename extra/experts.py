"""Experts: a feed-forward layer of E small ones, of which each token takes k (Shazeer et al., 2017;
Mixtral, Qwen3-MoE).

A router, one more matrix, gives each token a logit for every expert. The token goes through the k
with the highest ones, and the results are added up, each times its expert's weight: the softmax
over all logits, divided by the sum of the k weights if the model says so (norm_topk). Equal logits:
the lower id wins. A logit that is NaN counts as -inf, so that it beats no number; if all of them
are NaN, the weights are too, and the logits of the model say so.

The experts' matrices lie one after the other in one Matrix: w13 [E 2 F, C], w2 [E C, F], where F is
the hidden_dim of one expert. A slot is one of the k places of a token. Weights are applied to the
hidden values, so that what follows is a plain sum over the slots."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from attention import LayerView, StateView
from formats import Matrix
from launch import gdc_launch_dependents, gdc_wait, is_last, jit, launch, tl, triton

ROUTER_ROWS = 4  # of a program


class Routes(NamedTuple):
    """What the router chose for T tokens."""

    ids: Tensor  # int32 [T, k]: the experts of each token, the highest logit first
    weights: Tensor  # float32 [T, k]


def route_ref(x: Tensor, layer: LayerView, state: StateView) -> Routes | None:
    """x [T, C]. Returns None for a layer without experts."""
    if layer.router is None:
        return None
    normed = functional.rms_norm(x.float(), x.shape[1:], layer.ffn_norm.float(), state.norm_eps)
    logits = functional.linear(normed, layer.router.dense().float()) * layer.router_gain
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, : state.experts_per_token]
    weights = logits.softmax(1).gather(1, ids)
    if state.norm_topk:
        weights = weights / weights.sum(1, keepdim=True)
    return Routes(ids.int(), weights)


# One token's logits are shared out among programs, and the last one to finish picks the experts.
# Like all kernels, this one waits for the kernel before it; but only then does it let the next one
# start, and so does the product of w1 and w3 (kernels._first_rows). So when the product of w2
# starts, what the router wrote is there, and W can be loaded before the wait.


@jit
def _pick(
    logits, ids, weights, t, E: tl.constexpr, SLOTS: tl.constexpr, NORM_TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The experts of token t, and their weights. An expert's place is the number of those that
    come before it."""
    offs = tl.arange(0, BLOCK)
    mask = offs < E
    logit = tl.load(logits + t * E + offs, mask=mask, other=float("-inf"), cache_modifier=".cg")
    logit = tl.where(logit == logit, logit, float("-inf"))  # NaN beats no number
    other = tl.expand_dims(logit, 0)
    higher = other > logit[:, None]
    earlier = (other == logit[:, None]) & (offs[None, :] < offs[:, None])
    place = tl.sum((higher | earlier).to(tl.int32), 1)
    chosen = mask & (place < SLOTS)
    share = tl.exp(logit - tl.max(logit, 0))
    total = tl.sum(tl.where(chosen if NORM_TOPK else mask, share, 0.0), 0)
    tl.store(ids + t * SLOTS + place, offs, mask=chosen)
    tl.store(weights + t * SLOTS + place, share / total, mask=chosen)


@jit
def _route_kernel(
    x, norm, w, eps, gain, logits, arrived, ids, weights,
    E: tl.constexpr, C: tl.constexpr, SLOTS: tl.constexpr, NORM_TOPK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: ROWS logits, and by the last program the choice."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_c = tl.arange(0, BLOCK)
    mask_c = offs_c < C
    offs = rows[:, None] * C + offs_c[None, :]
    tile = tl.load(w + offs, mask=(rows[:, None] < E) & mask_c[None, :], other=0.0)
    factors = tl.load(norm + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    values = tl.load(x + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    inv_rms = tl.rsqrt(tl.sum(values * values) / C + eps)
    sums = tl.sum(tile.to(tl.float32) * (values * factors)[None, :], 1)
    tl.store(logits + rows, sums * (inv_rms * gain), mask=rows < E)
    if is_last(arrived, tl.num_programs(0)):
        _pick(logits, ids, weights, 0, E, SLOTS, NORM_TOPK, BLOCK_E)


def route(x: Tensor, layer: LayerView, state: StateView) -> Routes | None:
    if layer.router is None:
        return None
    T, C = x.shape
    if T > 1:
        return route_ref(x, layer, state)
    E, k = layer.router.rows, state.experts_per_token
    ids = x.new_empty(T, k, dtype=torch.int32)
    weights = x.new_empty(T, k, dtype=torch.float32)
    logits = state.scratch.zeros("router logits", E)
    arrived = state.scratch.zeros("router arrived", 1, dtype=torch.int32)
    args = (x, layer.ffn_norm, layer.router.data, state.norm_eps, layer.router_gain)
    block = triton.next_power_of_2(C)
    launch(
        _route_kernel,
        (triton.cdiv(E, ROUTER_ROWS),),
        x.device,
        *args,
        logits,
        arrived,
        ids,
        weights,
        E=E,
        C=C,
        SLOTS=k,
        NORM_TOPK=state.norm_topk,
        ROWS=ROUTER_ROWS,
        BLOCK=block,
        BLOCK_E=triton.next_power_of_2(E),
        warps=max(1, min(8, block // 512)),
    )
    return Routes(ids, weights)


def linear_ref(
    x: Tensor, w: Matrix, N: int, routes: Routes, linear: Callable[[Tensor, Matrix], Tensor]
) -> Tensor:
    """The product of each slot with its expert's N rows of w. x [T, K], the same for all slots, or
    [T, k, K] -> [T, k, N]. linear: the product with one matrix."""
    T, k = routes.ids.shape
    each = x if x.ndim == 3 else x[:, None].expand(T, k, x.shape[1])
    y = x.new_empty(T, k, N)
    for expert in routes.ids.unique().tolist():
        chose = routes.ids == expert
        rows = slice(expert * N, expert * N + N)
        part = Matrix(tuple(t[rows] for t in w.tensors), w.format)
        y[chose] = linear(each[chose], part)
    return y
