"""The product of a few tokens, 2 to 16: W is streamed once, as for one token, and tensor cores multiply it.

`tl.dot` usually takes its operands through shared memory, where 8-bit weights would pass twice, before and after they are
decoded. Here a thread loads 16 bytes of a row of W straight into the registers in which the tensor cores want them. From each
of the four threads that share a row, their instruction (mma.m16n8k16) wants two neighbours, and the two that are eight further
on. But the order of K in a sum is free: what a thread has loaded is called the columns that the instruction wants of it, as
long as it loads the same columns of x. So dimension 1 of a tile is a thread's neighbours, dimension 0 everything else (lanes,
warps, registers, in this order), and reshape and permute give the elements their names without moving them. The warps of a
program share its rows and split K; a sum over them ends the product.

An instruction multiplies 16 rows of W with 8 tokens, so the tokens are padded to 8 or 16.
"""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import torch
from torch import Tensor

from fp8 import Matrix
from launch import FEW_LAUNCHES, INTERPRETED, FewLaunch, capability, gdc_wait, jit, launch, nearest, tl, triton

MOST = 16  # tokens
TYPES = (torch.float16, torch.bfloat16) if INTERPRETED else (torch.float16,)  # of x; bf16 is not timed yet on a GPU


@jit
def _load_weights(w, row, k: tl.constexpr, N, K: tl.constexpr, HOW: tl.constexpr):
    """HOW.rows rows of W from `row` on, HOW.warps * HOW.steps * 64 bytes of each from column k on. A warp loads HOW.lanes * 16
    neighbouring bytes of a row at a time; with more than 4 lanes the compiler moves registers between threads."""
    E: tl.constexpr = 128 // w.dtype.element_ty.primitive_bitwidth
    GROUPS: tl.constexpr = HOW.rows // 8
    SIDES: tl.constexpr = HOW.lanes // 4
    i, e = tl.arange(0, HOW.steps * GROUPS * HOW.warps * 32)[:, None], tl.arange(0, E)[None, :]
    lane, warp, register = i % 32, i // 32 % HOW.warps, i // (32 * HOW.warps)
    rows = row + register // SIDES % GROUPS * 8 + register % SIDES * (8 // SIDES) + lane // HOW.lanes
    cols = k + (warp * HOW.steps + register // (SIDES * GROUPS) * SIDES) * (4 * E) + lane % HOW.lanes * E + e
    pointers = w + (tl.minimum(rows, N - 1).to(tl.int64) * K + cols)
    if k + HOW.warps * HOW.steps * 4 * E <= K:
        return tl.load(pointers, eviction_policy="evict_first")
    else:
        return tl.load(pointers, mask=cols < K, other=0, eviction_policy="evict_first")


@jit
def _weights_operand(tile, HOW: tl.constexpr):
    """A tile of W as [warps, rows, columns of a warp]."""
    E: tl.constexpr = tile.shape[1]
    SIDES: tl.constexpr = HOW.lanes // 4
    tile = tile.reshape(HOW.steps // SIDES, HOW.rows // 8, SIDES, HOW.warps, 8 // SIDES, SIDES, 4, 2, 2, E // 4)
    return tile.permute(3, 1, 2, 4, 0, 5, 7, 8, 6, 9).reshape(HOW.warps, HOW.rows, HOW.steps * 4 * E)


@jit
def _load_tokens(
    x, k: tl.constexpr, T, STRIDE: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, E: tl.constexpr, HOW: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """The same columns of the T rows of x, which lie STRIDE apart: eight neighbours a thread."""
    PARTS: tl.constexpr = E // 8
    i, e = tl.arange(0, TOKENS // 8 * HOW.steps * PARTS * HOW.warps * 32)[:, None], tl.arange(0, 8)[None, :]
    lane, warp, register = i % 32, i // 32 % HOW.warps, i // (32 * HOW.warps)
    t = register // (HOW.steps * PARTS) * 8 + lane // 4
    step = warp * HOW.steps + register // PARTS % HOW.steps
    cols = k + step * (4 * E) + lane % 4 * E + register % PARTS * 8 + e
    mask = (t < T) & (cols < K) if k + HOW.warps * HOW.steps * 4 * E > K else (t < T) & (e < 8)
    return tl.load(x + t * STRIDE + cols, mask=mask, other=0.0, eviction_policy=POLICY)


@jit
def _tokens_operand(tile, TOKENS: tl.constexpr, E: tl.constexpr, HOW: tl.constexpr):
    """A tile of x as [warps, columns of a warp, tokens]."""
    tile = tile.reshape(TOKENS // 8, HOW.steps, E // 8, HOW.warps, 8, 4, 16 // E, 2, E // 4)
    return tile.permute(3, 1, 2, 6, 7, 5, 8, 0, 4).reshape(HOW.warps, HOW.steps * 4 * E, TOKENS)


@jit
def _inverse_rms(x, T, eps, K: tl.constexpr, TOKENS: tl.constexpr, E: tl.constexpr, HOW: tl.constexpr):
    """1 / rms of the token that each row of a tile of x belongs to, as a column."""
    REGISTERS: tl.constexpr = HOW.steps * (E // 8)
    squares = tl.full([TOKENS // 8 * REGISTERS * HOW.warps * 32, 8], 0.0, tl.float32)
    for k in tl.static_range(0, K, HOW.warps * HOW.steps * 4 * E):
        tile = _load_tokens(x, k, T, K, K, TOKENS, E, HOW, "").to(tl.float32)
        squares += tile * tile
    sums = tl.sum(squares, 1).reshape(TOKENS // 8, REGISTERS, HOW.warps, 8, 4)
    sums = tl.sum(tl.sum(tl.sum(sums, 1, keep_dims=True), 4, keep_dims=True), 2, keep_dims=True)
    sums = tl.broadcast_to(sums, [TOKENS // 8, REGISTERS, HOW.warps, 8, 4])
    return tl.rsqrt(sums.reshape(TOKENS // 8 * REGISTERS * HOW.warps * 32, 1) / K + eps)


@jit
def few_product(
    x, norm, w, scale, row, T, N, eps,
    K: tl.constexpr, TOKENS: tl.constexpr, HOW: tl.constexpr, DECODE: tl.constexpr, GAIN: tl.constexpr, WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """rmsnorm(x) W[row : row + HOW.rows]^T for T tokens, x W^T where norm is None: float32 [HOW.rows, TOKENS]. What is normed
    is rounded to the type of x, as the op `rmsnorm` does. x is read twice for that, the second time from the L1 cache: another
    eviction policy keeps the compiler from holding it in registers, which W needs."""
    E: tl.constexpr = 128 // w.dtype.element_ty.primitive_bitwidth
    BLOCK: tl.constexpr = HOW.warps * HOW.steps * 4 * E
    # Before the wait: the first tiles of W
    w_tiles = ()
    for k in tl.static_range(0, HOW.ahead * BLOCK, BLOCK):
        if k < K:
            w_tiles = w_tiles + (_load_weights(w, row, k, N, K, HOW),)
    gdc_wait(PDL)
    if norm is not None:
        inv_rms = _inverse_rms(x, T, eps, K, TOKENS, E, HOW)
    acc = tl.full([HOW.warps, HOW.rows, TOKENS], 0.0, tl.float32)
    for k in tl.static_range(0, K, BLOCK):
        w_tile = w_tiles[0]
        w_tiles = w_tiles[1:]
        if k + HOW.ahead * BLOCK < K:
            w_tiles = w_tiles + (_load_weights(w, row, k + HOW.ahead * BLOCK, N, K, HOW),)
        x_tile = _load_tokens(x, k, T, K, K, TOKENS, E, HOW, "evict_last")
        if norm is not None:
            norm_tile = _load_tokens(norm, k, TOKENS, 0, K, TOKENS, E, HOW, "evict_last")
            x_tile = (x_tile.to(tl.float32) * inv_rms * norm_tile.to(tl.float32)).to(x_tile.dtype)
        a = _weights_operand(w_tile if DECODE is None else DECODE(w_tile).to(x_tile.dtype), HOW)
        b = _tokens_operand(x_tile, TOKENS, E, HOW)
        if WIDEN:
            acc += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(a, b, acc)
    y = tl.sum(acc, 0)
    if scale is not None:
        rows = row + tl.arange(0, HOW.rows)[:, None]
        y *= tl.load(scale + rows, mask=rows < N, other=0.0) * GAIN
    return y


def few_launch(op: str, x: Tensor, w: Matrix) -> FewLaunch | None:
    """The launch sizes for x [T, K] times w; None where it goes another way: one token, many, other types, and what
    FEW_LAUNCHES does not list."""
    if not 1 < x.shape[0] <= MOST or x.dtype not in TYPES:
        return None
    table = nearest(nearest(FEW_LAUNCHES, capability(x.device)), w.data.element_size())
    sizes = table[padded(x.shape[0])][op]
    return sizes.get(w.columns, sizes.get(0))


def padded(T: int) -> int:
    return 8 if T <= 8 else 16


def launch_few(how: FewLaunch, kernel, x: Tensor, norm: Tensor | None, w: Matrix, eps: float, *args, **constants) -> None:
    """Launch a kernel built on `few_product`."""
    (T, K), bytes_each = x.shape, w.data.element_size()
    assert w.columns == K and x.is_contiguous(), (x.shape, w.shape)
    warps = min(how.warps, max(1, triton.next_power_of_2(K) * bytes_each // (64 * how.steps)))
    format = w.format.on(x.device) if w.format else None
    form = dict(DECODE=format.decode if format else None, GAIN=format.gain if format else 1.0)
    cut = dict(N=w.rows, K=K, TOKENS=padded(T), HOW=how._replace(warps=warps), WIDEN=INTERPRETED, warps=warps)
    args = (x, norm, w.data, w.scale, T, eps, *args)
    launch(kernel, (triton.cdiv(w.rows, how.rows),), x.device, *args, **cut, **form, **constants)
