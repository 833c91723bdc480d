"""Mixture of experts: the feed-forward layer is E small ones, and a router sends each token through
k of them (Shazeer et al., 2017; Mixtral, Qwen3-MoE).

The router, one more matrix, gives each token a logit for every expert. The token goes through the k
with the highest ones, and the results are added up, each times its expert's weight: the softmax
over all logits, divided by the sum of the k weights if the model says so (norm_topk). Equal logits:
the lower id wins. On a GPU, logits that agree in the first 23 - log2(E) bits of their mantissas count
as equal. A logit that is NaN counts as -inf, so that it beats no number; if all of them are NaN, the
weights are too, and the logits of the model say so.

The experts' matrices are a stack: they lie one after the other in one Matrix, w13 [E 2 F, C] and
w2 [E C, F], where F is the hidden_dim of one expert. A slot is one of the k places of a token.
Weights are applied to the hidden values, so that what follows is a plain sum over the slots.

Read in this order: the router; the products, by the kernels in products.py; their epilogues; last
the two ops that kernels.py asks for in a layer with experts."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import products
from cards.sizes import FewSizes, ManySizes, many_sizes
from formats import Experts, Matrix
from fp8 import E4M3, E4M3_NATIVE
from launch import (
    EMULATED,
    capability,
    constexpr,
    gdc_launch_dependents,
    gdc_wait,
    in_order,
    jit,
    launch,
    tl,
    triton,
)
from products import Choice, Epilogue, Product, Slots, Stack

if TYPE_CHECKING:
    from model import LayerWeights
    from passes import Pass

FEW_SORTED = 8  # up to this many tokens, one kernel picks the experts and sorts the slots
# Up to this many tokens, the kernel that computes the logits uses no tensor cores and also stores
# rmsnorm(x)
FEW_ROUTED = 16
MOST_ROUTED = 128  # beyond, the library computes the logits
PICKED = 4  # tokens of a program of _pick_kernel
LOWEST = constexpr(torch.finfo(torch.float32).min)
TAKEN = constexpr(-(2**31))  # below every key


class Routes(NamedTuple):
    """What the router chose for T tokens."""

    ids: Tensor  # int32 [T, k]: the experts of each token, the highest logit first
    weights: Tensor  # float32 [T, k]
    # On a GPU: the slots t k + i, sorted by expert, int32 [T k], and how many each expert has,
    # int32 [E]
    order: Tensor | None = None
    counts: Tensor | None = None
    normed: Tensor | None = None  # rmsnorm(x) [T, C], which w13 multiplies; up to FEW_ROUTED tokens


class SingleRoute(NamedTuple):
    """What the router says of one token on a GPU. The product with w13 chooses the experts: each of its
    programs finds its own from all logits, which is faster than letting the router's programs wait for
    each other."""

    ids: Tensor  # int32 [1, k]: the experts, once the product with w13 has written them
    normed: Tensor  # [1, C]: rmsnorm(x), which that product multiplies
    scores: Tensor  # float32 [E]: the logits
    norm_topk: bool  # of the model

    def w13_stack(self, rows: int) -> Stack:
        """The matrices in w13, of so many rows each."""
        sizes = RouterSizes.of(len(self.scores), self.ids.shape[1], self.norm_topk)
        return Stack(self.ids[0], rows, 1, Choice(_choose, sizes), (self.scores,))

    def w2_stack(self, rows: int) -> Stack:
        """The matrices in w2, of so many rows each, whose products are added up."""
        return Stack(self.ids[0], rows, self.ids.shape[1])


Routing = Routes | SingleRoute


class RouterSizes(NamedTuple):
    """What kernels need to know to pick a token's experts. Padded numbers are powers of two."""

    experts: int
    experts_padded: int
    slots: int
    slots_padded: int
    norm_topk: bool

    @classmethod
    def of(cls, experts: int, slots: int, norm_topk: bool) -> RouterSizes:
        padded = triton.next_power_of_2
        return cls(experts, padded(experts), slots, padded(slots), norm_topk)


# ---- the router


def route_ref(x: Tensor, layer: LayerWeights, pass_: Pass) -> Routes | None:
    """x [T, C]. Returns None for a layer without experts."""
    if layer.router is None:
        return None
    normed = functional.rms_norm(x.float(), x.shape[1:], layer.ffn_norm.float(), pass_.norm_eps)
    logits = functional.linear(normed, layer.router.dense().float())
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, : pass_.experts_per_token]
    weights = logits.softmax(1).gather(1, ids)
    if pass_.norm_topk:
        weights = weights / weights.sum(1, keepdim=True)
    return Routes(ids.int(), weights)


# The logits of a few tokens. The kernel lets the next one start only after its own wait, since with one
# token that is the product with w13, which can load nothing without logits.


@jit
def _few_logits_kernel(
    x, norm, w, eps, logits, normed,
    E: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS logits of one token, whose first program also stores rmsnorm(x) in `normed`."""
    t = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    offs_c = tl.arange(0, BLOCK)
    mask_c = offs_c < C
    offs = rows[:, None] * C + offs_c[None, :]
    tile = tl.load(w + offs, mask=(rows[:, None] < E) & mask_c[None, :], other=0.0)
    factors = tl.load(norm + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    values = tl.load(x + t * C + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    inv_rms = tl.rsqrt(tl.sum(values * values) / C + eps)
    y = (values * inv_rms * factors).to(normed.dtype.element_ty)
    tl.store(normed + t * C + offs_c, y, mask=mask_c & (tl.program_id(1) == 0))
    sums = tl.sum(tile.to(tl.float32) * (values * factors)[None, :], 1)
    tl.store(logits + t * E + rows, sums * inv_rms, mask=rows < E)


# The logits of more tokens, on tensor cores.


@jit
def _logits_kernel(
    x, norm, w, eps, logits, T,
    E: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS logits of 16 tokens. PARTS warps share BLOCK columns at a time."""
    gdc_launch_dependents(PDL)
    t = tl.program_id(0) * 16 + tl.arange(0, 16)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    PART: tl.constexpr = BLOCK // PARTS
    offs_c = tl.arange(0, PARTS)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    w_rows = w + tl.minimum(rows, E - 1)[None, :, None] * C
    tile = tl.load(w_rows + offs_c, mask=offs_c < C, other=0.0)
    gdc_wait(PDL)
    x_rows = x + tl.minimum(t, T - 1).to(tl.int64)[None, :, None] * C
    x_tiles = ()
    squares = tl.zeros([PARTS, 16], tl.float32)
    for c in tl.static_range(0, C, BLOCK):
        x_tiles += (tl.load(x_rows + c + offs_c, mask=c + offs_c < C, other=0.0),)
        values = x_tiles[c // BLOCK].to(tl.float32)
        squares += tl.sum(values * values, 2)
    inv_rms = tl.rsqrt(tl.sum(squares, 0) / C + eps)
    acc = tl.zeros([PARTS, 16, ROWS], tl.float32)
    for c in tl.static_range(0, C, BLOCK):
        factors = tl.load(norm + c + offs_c, mask=c + offs_c < C, other=0.0).to(tl.float32)
        normed = x_tiles[c // BLOCK].to(tl.float32) * inv_rms[None, :, None] * factors
        if c > 0:
            tile = tl.load(w_rows + c + offs_c, mask=c + offs_c < C, other=0.0)
        normed = normed.to(tile.dtype)
        if EMULATED:  # the interpreter's own bf16 products are wrong
            normed, tile = normed.to(tl.float32), tile.to(tl.float32)
        acc = tl.dot(normed, tl.permute(tile, (0, 2, 1)), acc, input_precision="ieee")
    offs = t[:, None] * E + rows[None, :]
    tl.store(logits + offs, tl.sum(acc, 0), mask=(t[:, None] < T) & (rows[None, :] < E))


# The experts follow from the logits. With one token the programs of the product with w13 find them, with
# several tokens one kernel, or two, which also sort the slots.


@jit
def _best_experts(logits, own, SIZES: tl.constexpr):
    """logits: pointers [TOKENS, 1] to those of some tokens; own: which of the tokens there are. Returns
    the ids of their experts, a tensor [TOKENS] for each slot, best first; exp(logit - peak) of every
    expert, [TOKENS, BLOCK]; and what to divide that by to get weights, [TOKENS]."""
    BLOCK: tl.constexpr = SIZES.experts_padded
    SLOTS: tl.constexpr = SIZES.slots
    offs = tl.arange(0, BLOCK)[None, :]
    there = own & (offs < SIZES.experts)
    logit = tl.load(logits + offs, mask=there, other=float("-inf"))
    logit = tl.where(logit == logit, logit, float("-inf"))  # NaN beats no number
    # Integers, since one instruction finds the largest of a warp's. Their last bits are the expert's, so
    # that the maximum says which one it is, and of equal logits the first is the largest
    key = (in_order(tl.maximum(logit, LOWEST)) & -BLOCK) + (BLOCK - 1 - offs)
    key = tl.where(offs < SIZES.experts, key, TAKEN)
    experts = ()
    for _ in tl.static_range(SLOTS):
        best = tl.max(key, 1)
        key = tl.where(key == best[:, None], TAKEN, key)
        experts += (BLOCK - 1 - (best & (BLOCK - 1)),)
    shares = tl.exp(logit - tl.max(logit, 1)[:, None])
    counted = shares
    if SIZES.norm_topk:
        counted = tl.where(there & (key == TAKEN), shares, 0.0)
    return experts, shares, tl.sum(counted, 1)


@jit
def _share_of(expert, shares):
    """The shares of one expert for each token, [TOKENS]."""
    offs = tl.arange(0, shares.shape[1])[None, :]
    return tl.sum(tl.where(offs == expert[:, None], shares, 0.0), 1)


@jit
def _choose(args, WARPS: tl.constexpr, SIZES: tl.constexpr):
    """For products.Choice: the expert in this program's slot, and its weight. Each warp finds them by
    itself."""
    SLOTS: tl.constexpr = SIZES.slots
    logits = args[0] + tl.zeros([WARPS, 1], tl.int32)
    best, shares, total = _best_experts(logits, True, SIZES)
    slot = tl.program_id(1)
    expert = best[0]
    for i in tl.static_range(1, SLOTS):
        expert = tl.where(slot == i, best[i], expert)
    weight = _share_of(expert, shares) / total
    return tl.max(expert, 0), tl.max(weight, 0)


@jit
def _pick(logits, ids, weights, t, T, stores, SIZES: tl.constexpr):
    """The ids of the experts of tokens t [TOKENS], [TOKENS, BLOCK_S], E where there is no slot. If this
    program `stores` them, it does so with their weights."""
    SLOTS: tl.constexpr = SIZES.slots
    BLOCK_S: tl.constexpr = SIZES.slots_padded
    slots = tl.arange(0, BLOCK_S)[None, :]
    own = (t < T)[:, None]
    best, shares, total = _best_experts(logits + t[:, None] * SIZES.experts, own, SIZES)
    chosen = tl.full([t.shape[0], BLOCK_S], SIZES.experts, tl.int32)
    for slot in tl.static_range(SLOTS):
        chosen = tl.where(own & (slots == slot), best[slot][:, None], chosen)
    if stores:
        share = tl.full([t.shape[0], BLOCK_S], 0.0, tl.float32)
        for slot in tl.static_range(SLOTS):
            share = tl.where(slots == slot, _share_of(best[slot], shares)[:, None], share)
        places = t[:, None] * SLOTS + slots
        tl.store(ids + places, chosen, mask=own & (slots < SLOTS))
        tl.store(weights + places, share / total[:, None], mask=own & (slots < SLOTS))
    return chosen


@jit
def _pick_and_sort_kernel(
    logits, ids, weights, order, counts, T,
    TOKENS: tl.constexpr, SIZES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The experts of up to TOKENS tokens, which each program finds by itself, and the slots of one of
    these experts: see _sort_kernel."""
    gdc_launch_dependents(PDL)
    expert = tl.program_id(0)
    t = tl.arange(0, TOKENS)
    gdc_wait(PDL)
    chosen = _pick(logits, ids, weights, t, T, expert == 0, SIZES)
    BLOCK_S: tl.constexpr = SIZES.slots_padded
    slots = t[:, None] * SIZES.slots + tl.arange(0, BLOCK_S)[None, :]
    chosen, slots = chosen.reshape(TOKENS * BLOCK_S), slots.reshape(TOKENS * BLOCK_S)
    # One scan counts this expert's slots in its lower 16 bits, and those of lower experts in its upper
    # 16. Triton 3.6 gets a sum over a reshaped tensor wrong where several threads hold the same element;
    # for a scan the tensor is first converted to another layout
    mine = chosen == expert
    found = tl.cumsum(tl.where(mine, 1, tl.where(chosen < expert, 1 << 16, 0)), 0)
    total = tl.max(found, 0)
    tl.store(order + (total >> 16) + (found & 0xFFFF) - 1, slots, mask=mine)
    tl.store(counts + expert, total & 0xFFFF)


@jit
def _pick_kernel(
    logits, ids, weights, T, TOKENS: tl.constexpr, SIZES: tl.constexpr, PDL: tl.constexpr
):
    """The experts of TOKENS tokens."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    _pick(logits, ids, weights, t, T, True, SIZES)


@jit
def _sort_kernel(ids, order, counts, COUNT, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The slots of one expert, in the order of tokens, after those of lower experts."""
    gdc_launch_dependents(PDL)
    expert = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    gdc_wait(PDL)
    lower = tl.zeros([BLOCK], tl.int32)
    for i in range(0, COUNT, BLOCK):
        chosen = tl.load(ids + i + offs, mask=i + offs < COUNT, other=expert)
        lower += (chosen < expert).to(tl.int32)
    first = tl.sum(lower, 0)
    count = 0
    for i in range(0, COUNT, BLOCK):
        chosen = tl.load(ids + i + offs, mask=i + offs < COUNT, other=-1)
        mine = (chosen == expert).to(tl.int32)
        places = first + count + tl.cumsum(mine, 0) - 1
        tl.store(order + places, i + offs, mask=mine > 0)
        count += tl.sum(mine, 0)
    tl.store(counts + expert, count)


def route(x: Tensor, layer: LayerWeights, pass_: Pass) -> Routing | None:
    if layer.router is None:
        return None
    T = len(x)
    E, k = layer.router.rows, pass_.experts_per_token
    numbers = partial(x.new_empty, dtype=torch.int32)
    normed = None
    if T <= FEW_ROUTED:
        logits, normed = _few_logits(x, layer, pass_)
    elif T <= MOST_ROUTED:
        logits = _logits(x, layer, pass_)
    else:
        logits = _library_logits(x, layer, pass_)
    if T == 1:
        return SingleRoute(numbers(1, k), normed, logits[0], pass_.norm_topk)
    weights = x.new_empty(T, k, dtype=torch.float32)
    routes = Routes(numbers(T, k), weights, numbers(T * k), numbers(E), normed)
    _pick_and_sort(logits, pass_, routes)
    return routes


def _few_logits(x: Tensor, layer: LayerWeights, pass_: Pass) -> tuple[Tensor, Tensor]:
    """The logits [T, E] of up to FEW_ROUTED tokens, and rmsnorm(x)."""
    T, C = x.shape
    E = layer.router.rows
    logits = x.new_empty(T, E, dtype=torch.float32)
    normed = torch.empty_like(x)
    args = (x, layer.ffn_norm, layer.router.data, pass_.norm_eps, logits, normed)
    block = triton.next_power_of_2(C)
    rows = min(16, max(4, triton.next_power_of_2(T)))
    sizes = dict(E=E, C=C, ROWS=rows, BLOCK=block, warps=max(1, min(8, rows, block // 256)))
    launch(_few_logits_kernel, (T, triton.cdiv(E, rows)), x.device, *args, **sizes)
    return logits, normed


def _logits(x: Tensor, layer: LayerWeights, pass_: Pass) -> Tensor:
    """The logits [T, E] of up to MOST_ROUTED tokens."""
    T, C = x.shape
    E = layer.router.rows
    logits = x.new_empty(T, E, dtype=torch.float32)
    args = (x, layer.ffn_norm, layer.router.data, pass_.norm_eps, logits, T)
    # bytes of a row at a time, so that they fit into 227 kB of shared memory, or into GeForce's 99
    most = 4096 if capability(x.device) in (90, 100) else 2048
    block = max(16, min(most // layer.router.data.element_size(), triton.next_power_of_2(C)))
    warps = max(1, min(8, block // 128))
    rows = 8
    sizes = dict(E=E, C=C, ROWS=rows, PARTS=warps, BLOCK=block)
    grid = (triton.cdiv(T, 16), triton.cdiv(E, rows))
    launch(_logits_kernel, grid, x.device, *args, **sizes, warps=warps)
    return logits


def _library_logits(x: Tensor, layer: LayerWeights, pass_: Pass) -> Tensor:
    """The logits of more tokens, by the library."""
    normed = products.rmsnorm(x, layer.ffn_norm, pass_.norm_eps)
    w = layer.router.data
    if x.is_cuda:
        return torch.mm(normed, w.t(), out_dtype=torch.float32)
    return functional.linear(normed.float(), w.float())  # on a CPU, mm has no out_dtype


def _pick_and_sort(logits: Tensor, pass_: Pass, routes: Routes) -> None:
    T, E = logits.shape
    k = pass_.experts_per_token
    few = T <= FEW_SORTED
    tokens = triton.next_power_of_2(T) if few else PICKED
    sizes = RouterSizes.of(E, k, pass_.norm_topk)
    constants = dict(TOKENS=tokens, SIZES=sizes, warps=min(4, tokens))  # a warp takes whole tokens
    if few:
        args = (logits, routes.ids, routes.weights, routes.order, routes.counts, T)
        launch(_pick_and_sort_kernel, (E,), logits.device, *args, **constants)
        return
    args = (logits, routes.ids, routes.weights, T)
    launch(_pick_kernel, (triton.cdiv(T, tokens),), logits.device, *args, **constants)
    block = min(16384, triton.next_power_of_2(T * k))
    warps = min(8, max(1, block // 256))
    args = (routes.ids, routes.order, routes.counts, T * k)
    launch(_sort_kernel, (E,), logits.device, *args, BLOCK=block, warps=warps)


# ---- their products
#
#      The kernels in products.py take the matrices of the experts that were chosen: with one token,
#      the product with w13 chooses them; with several, those of all go in one launch. A long prompt is
#      multiplied as E4M3 codes where launch.json has sizes for that.


def slots_ref(x: Tensor, w: Matrix, N: int, routes: Routes) -> Tensor:
    """The product of each slot with its expert's N rows of w. x [T, K], the same for all slots, or
    [T, k, K] -> [T, k, N]."""
    T, k = routes.ids.shape
    each = x if x.ndim == 3 else x[:, None].expand(T, k, x.shape[1])
    y = x.new_empty(T, k, N)
    for expert in routes.ids.unique().tolist():
        chose = routes.ids == expert
        y[chose] = products.linear_ref(each[chose], w.part(slice(expert * N, expert * N + N)))
    return y


def _coded_sizes(w: Matrix, accumulate: str, each: int) -> ManySizes | None:
    """How 8-bit tensor cores multiply a prompt, as E4M3 codes, by experts, whose matrices are first
    rewritten if they have another format. Unlike the library's, these sums are never moved to fp32
    registers, so "fp32" leaves the tensor cores. each: how many slots an expert has on average.
    Returns None if decoded values are multiplied."""
    native = E4M3.on(w.data.device) is E4M3_NATIVE
    coded = w.format is E4M3 or w.format is not None and w.format.e4m3_bound > 0
    if accumulate == "fp32" or not native or not coded:
        return None
    return many_sizes(w.data.device, w.bits, "codes", each)


def copy_bytes(w: Matrix, accumulate: str, each: int) -> int:
    """What a prompt's product allocates to multiply by experts: a copy in E4M3. 0 if they are
    multiplied as they are stored, or decoded tile by tile. each: see _coded_sizes."""
    if w.format is E4M3 or not _coded_sizes(w, accumulate, each):
        return 0
    return E4M3.nbytes(*w.shape)


def _launch_several(
    product: Product, epilogue: Epilogue, args: tuple, routes: Routes, accumulate: str
) -> None:
    """launch_product of several tokens: of all slots with the matrices of their experts. x has a
    row for each token or each slot."""
    op, x, w, norm, eps = product
    T, k = routes.ids.shape
    E = len(routes.counts)
    each = T * k // E
    experts = Experts(E, triton.next_power_of_2(E), T * k // len(x))
    slots = Slots(routes.order, routes.counts, experts)
    coded = _coded_sizes(w, accumulate, each)
    sizes = products.kernel_sizes(product, T)
    if isinstance(sizes, FewSizes):
        products.launch_few(product, epilogue, args, sizes, T, slots)
    elif coded:
        w = products.as_e4m3(w)
        codes, x_scales = products.encode_rows(x, norm, eps)
        w = Matrix((w.data.view(E4M3.dtype), w.tensors[1]), E4M3)
        product = Product(op, codes.view(E4M3.dtype), w)
        products.launch_many(product, epilogue, args, coded, slots, x_scales)
    else:
        sizes = many_sizes(x.device, w.bits, "experts", each)
        products.launch_many(product, epilogue, args, sizes, slots)


# ---- their epilogues
#
#      With several tokens, the kernel appends to args a pointer to the T slots of its block.


@jit
def _prepare_slots(args, rows, i, T, N, TOKENS: tl.constexpr, SIZES: tl.constexpr):
    """The rows, the numbers of the slots, of which there are T, and the slots."""
    return rows, i, tl.load(args[-1] + i, mask=i < T, other=0).to(tl.int64)


@jit
def _store_slots(
    args, y, ready, T, N, ROWS: tl.constexpr, TOKENS: tl.constexpr, SIZES: tl.constexpr
):
    """Store the products in args[0] [T k, N]."""
    rows, i, slots = ready
    mask = (rows < N) & (i < T)
    tl.store(args[0] + slots * N + rows, y.to(args[0].dtype.element_ty), mask=mask)


class Hidden(NamedTuple):
    """The size that _store_hidden needs. N is no substitute: bits/stream.py passes the row at which
    a program ends."""

    F: int


@jit
def _prepare_hidden(args, offs_f, i, T, N, TOKENS: tl.constexpr, SIZES: tl.constexpr):
    """The same for h, and the slots' weights. With one token, a program has a single slot, whose
    weight comes with it."""
    if TOKENS == 1:
        return offs_f, i, tl.program_id(1), args[-1]
    else:
        _, _, slots = _prepare_slots(args, offs_f, i, T, N, TOKENS, SIZES)
        return offs_f, i, slots, tl.load(args[1] + slots)


@jit
def _store_hidden(
    args, y, ready, T, N, ROWS: tl.constexpr, TOKENS: tl.constexpr, SIZES: tl.constexpr
):
    """Store silu(a) * b of neighbouring rows a and b, times the slots' weights, in args[0]
    [T k, F]."""
    offs_f, i, slots, weights = ready
    a, b = products.even_and_odd(y, ROWS, TOKENS)
    h = (products.silu_mul(a, b) * weights).to(args[0].dtype.element_ty)
    mask = (offs_f < N // 2) & (i < T)
    tl.store(args[0] + slots * SIZES.F + offs_f, h, mask=mask)


@jit
def _add_slots_kernel(
    y, residual, N: tl.constexpr, SLOTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """residual += the sum over a token's slots. y [T, SLOTS, N], residual [T, N]"""
    gdc_launch_dependents(PDL)
    t = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.arange(0, BLOCK_S)
    gdc_wait(PDL)
    mask = (slots[:, None] < SLOTS) & (offs_n[None, :] < N)
    pointers = y + (t * SLOTS + slots[:, None]) * N + offs_n[None, :]
    terms = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    pointers = residual + t * N + offs_n
    old = tl.load(pointers, mask=offs_n < N, other=0.0).to(tl.float32)
    new = old + tl.sum(terms, 0)
    tl.store(pointers, new.to(residual.dtype.element_ty), mask=offs_n < N)


def _add_slots(y: Tensor, residual: Tensor) -> Tensor:
    """residual [T, C] += the sum over a token's slots. y [T, k, C]"""
    T, k, C = y.shape
    block = min(1024, triton.next_power_of_2(C))
    sizes = dict(N=C, SLOTS=k, BLOCK_S=triton.next_power_of_2(k), BLOCK=block)
    launch(_add_slots_kernel, (T, triton.cdiv(C, block)), y.device, y, residual, **sizes)
    return residual


# ---- the ops


def swiglu(x: Tensor, layer: LayerWeights, pass_: Pass, routes: Routing, accumulate: str) -> Tensor:
    """kernels.rmsnorm_swiglu of each slot, times its weight: [T, k, F]."""
    F = layer.w13.rows // layer.router.rows // 2
    h = x.new_empty(len(x), pass_.experts_per_token, F)
    epilogue = Epilogue(_prepare_hidden, _store_hidden, Hidden(F), pairs=True)
    if routes.normed is None:
        product = Product("experts_swiglu", x, layer.w13, layer.ffn_norm, pass_.norm_eps)
    else:
        product = Product("experts_swiglu", routes.normed, layer.w13)
    if len(x) == 1:
        products.launch_single(product, epilogue, (h,), routes.w13_stack(2 * F))
    else:
        _launch_several(product, epilogue, (h, routes.weights), routes, accumulate)
    return h


def linear_add(x: Tensor, w: Matrix, residual: Tensor, routes: Routing, accumulate: str) -> Tensor:
    """residual [T, C] += the sum over a token's slots, in place. x [T, k, K], w [E C, K]"""
    assert residual.shape[0] == len(x) and residual.is_contiguous(), (residual.shape, x.shape)
    product = Product("experts_linear_add", x.view(-1, w.columns), w)
    if len(x) == 1:
        add_rows = products.STORE_ROWS._replace(added=0)
        products.launch_single(product, add_rows, (residual,), routes.w2_stack(residual.shape[1]))
        return residual
    y = x.new_empty(*x.shape[:2], residual.shape[1])
    _launch_several(product, Epilogue(_prepare_slots, _store_slots), (y,), routes, accumulate)
    return _add_slots(y, residual)
