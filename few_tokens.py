"""The product of a few tokens, 2 to 16: W is streamed once, as for one token, and tensor cores multiply it.

`tl.dot` usually takes its operands through shared memory, which 8-bit weights would pass through twice, before and after
decoding. Here a thread loads 16 bytes of a row of W straight into the registers where the tensor cores expect them. From each
of the four threads that share a row, the tensor core instruction (mma.m16n8k16) expects two neighbouring columns, and the two
that are eight further on. But the order of K in a sum is free: whatever columns a thread has loaded can stand in for those that
the instruction expects from it, as long as it loads the same columns of x. So dimension 1 of a tile is a thread's neighbours,
dimension 0 everything else (lanes, warps, registers, in this order), and reshape and permute relabel the elements without
moving them. The warps of a program share its rows and split K; a sum over the warps completes the product.

An instruction multiplies 16 rows of W by 8 tokens, so the tokens are padded to 8 or 16. The norm, where there is one, is a
separate kernel that runs first: while it runs, the first tiles of W are already in flight.
"""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import torch
from torch import Tensor

from fp8 import Matrix
from launch import FEW_LAUNCHES, INTERPRETED, FewLaunch, capability, gdc_wait, jit, launch, nearest, tl, triton

MOST = 16  # tokens


@jit
def _load_weights(w, row, k: tl.constexpr, N, K: tl.constexpr, HOW: tl.constexpr):
    """HOW.rows rows of W from `row` on, HOW.warps * HOW.steps * 64 bytes of each from column k on. A warp loads HOW.lanes * 16
    neighbouring bytes of a row at a time; with more than 4 lanes the compiler moves values between threads."""
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
def _load_tokens(x, k: tl.constexpr, T, K: tl.constexpr, TOKENS: tl.constexpr, E: tl.constexpr, HOW: tl.constexpr):
    """The same columns of the T rows of x: eight neighbours per thread."""
    PARTS: tl.constexpr = E // 8
    i, e = tl.arange(0, TOKENS // 8 * HOW.steps * PARTS * HOW.warps * 32)[:, None], tl.arange(0, 8)[None, :]
    lane, warp, register = i % 32, i // 32 % HOW.warps, i // (32 * HOW.warps)
    t = register // (HOW.steps * PARTS) * 8 + lane // 4
    step = warp * HOW.steps + register // PARTS % HOW.steps
    cols = k + step * (4 * E) + lane % 4 * E + register % PARTS * 8 + e
    mask = (t < T) & (cols < K) if k + HOW.warps * HOW.steps * 4 * E > K else (t < T) & (e < 8)
    return tl.load(x + t * K + cols, mask=mask, other=0.0, eviction_policy="evict_last")


@jit
def _tokens_operand(tile, TOKENS: tl.constexpr, E: tl.constexpr, HOW: tl.constexpr):
    """A tile of x as [warps, columns of a warp, tokens]."""
    tile = tile.reshape(TOKENS // 8, HOW.steps, E // 8, HOW.warps, 8, 4, 16 // E, 2, E // 4)
    return tile.permute(3, 1, 2, 6, 7, 5, 8, 0, 4).reshape(HOW.warps, HOW.steps * 4 * E, TOKENS)


@jit
def few_product(
    x, w, scale, row, T, N,
    K: tl.constexpr, TOKENS: tl.constexpr, HOW: tl.constexpr, DECODE: tl.constexpr, GAIN: tl.constexpr, WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x W[row : row + HOW.rows]^T for T tokens: float32 [HOW.rows, TOKENS]."""
    E: tl.constexpr = 128 // w.dtype.element_ty.primitive_bitwidth
    BLOCK: tl.constexpr = HOW.warps * HOW.steps * 4 * E
    # Before the wait: the first tiles of W, and the scales
    w_tiles = ()
    for k in tl.static_range(0, HOW.ahead * BLOCK, BLOCK):
        if k < K:
            w_tiles = w_tiles + (_load_weights(w, row, k, N, K, HOW),)
    if scale is not None:
        rows = row + tl.arange(0, HOW.rows)[:, None]
        scales = tl.load(scale + rows, mask=rows < N, other=0.0) * GAIN
    gdc_wait(PDL)
    acc = tl.full([HOW.warps, HOW.rows, TOKENS], 0.0, tl.float32)
    for k in tl.static_range(0, K, BLOCK):
        w_tile = w_tiles[0]
        w_tiles = w_tiles[1:]
        if k + HOW.ahead * BLOCK < K:
            w_tiles = w_tiles + (_load_weights(w, row, k + HOW.ahead * BLOCK, N, K, HOW),)
        x_tile = _load_tokens(x, k, T, K, TOKENS, E, HOW)
        a = _weights_operand(w_tile if DECODE is None else DECODE(w_tile).to(x_tile.dtype), HOW)
        b = _tokens_operand(x_tile, TOKENS, E, HOW)
        if WIDEN:
            acc += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(a, b, acc)
    y = tl.sum(acc, 0)
    return y if scale is None else y * scales


def few_launch(op: str, x: Tensor, w: Matrix) -> FewLaunch | None:
    """The launch sizes for x [T, K] times w; None where another path is taken: one token, too many, fp32, and where
    FEW_LAUNCHES says so."""
    if not 1 < x.shape[0] <= MOST or x.dtype not in (torch.float16, torch.bfloat16):
        return None
    table = nearest(nearest(FEW_LAUNCHES, capability(x.device)), w.data.element_size())
    sizes = table[padded(x.shape[0])][op]
    return sizes.get(w.columns, sizes[0])


def padded(T: int) -> int:
    return 8 if T <= 8 else 16


def launch_few(how: FewLaunch, kernel, x: Tensor, w: Matrix, *args, **constants) -> None:
    """Launch a kernel built on `few_product`."""
    (T, K), bytes_each = x.shape, w.data.element_size()
    assert w.columns == K and x.is_contiguous(), (x.shape, w.shape)
    warps = min(how.warps, max(1, triton.next_power_of_2(K) * bytes_each // (64 * how.steps)))
    format = w.format.on(x.device) if w.format else None
    form = dict(DECODE=format.decode if format else None, GAIN=format.gain if format else 1.0)
    cut = dict(N=w.rows, K=K, TOKENS=padded(T), HOW=how._replace(warps=warps), WIDEN=INTERPRETED, warps=warps)
    grid = (triton.cdiv(w.rows, how.rows),)
    launch(kernel, grid, x.device, x, w.data, w.scale, T, *args, **cut, **form, **constants)
