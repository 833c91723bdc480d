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


def route(x: Tensor, layer: LayerView, state: StateView) -> Routes | None:
    return route_ref(x, layer, state)


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
