"""Attention of a few query rows per key/value head, in Gluon (see hopper.py): those of a few tokens, or of a single token whose
heads share keys and values.

16 rows are one side of the tensor core instruction (mma.m16n8k16), the positions the other. Each warp takes 16 positions at a
time and has a softmax of its own over them, so that nothing passes between warps until the end. No key or value goes through
shared memory: as in few_tokens.py, a thread loads 16 bytes straight into the registers of the instruction.

- Keys: neighbouring elements of one position. The instruction may add up their products with q in any order, as long as q is
  loaded in the same order; this is what a k_width of 8, or of 16 for an 8-bit cache, means in DotOperandLayout.
- Values: neighbouring elements of each of four positions, since here the sum is over positions, four per thread. Neighbours are
  columns of the results of different instructions, so column n of the result is not column n of the head: `_head_column` says
  which it is.
"""

from __future__ import annotations

from torch import Tensor

from launch import INTERPRETED, gdc_launch_dependents, gdc_wait, tl

try:
    from triton.experimental.gluon import jit
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2
except ImportError:  # no Triton, or one without Gluon: nothing here is called
    mma_v2 = None

    def jit(function):
        return function


BLOCK_M = 16  # rows of a program


@jit
def _load_keys(k, n, low, end, D: gl.constexpr, BLOCK_D: gl.constexpr, W: gl.constexpr, KEYS: gl.constexpr):
    """Keys of 16 W positions from n on, zero before `low` and from `end` on: [W, BLOCK_D, 16]."""
    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, KEYS)))[:, None, None]
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, gl.SliceLayout(2, KEYS)))[None, :, None]
    p = n + warp * 16 + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, KEYS)))[None, None, :]
    return gl.load(k + p * D + d, mask=(p >= low) & (p < end) & (d < D), other=0)


@jit
def _load_values(v, n, low, end, D: gl.constexpr, BLOCK_D: gl.constexpr, W: gl.constexpr, E: gl.constexpr):
    """The same for values, E neighbours in dimension 1; dimension 0 is lanes, warps and registers, in this order."""
    TILE: gl.constexpr = gl.BlockedLayout([1, E], [32, 1], [W, 1], [1, 0])
    i = gl.arange(0, BLOCK_D // (8 * E) * 4 * W * 32, gl.SliceLayout(1, TILE))[:, None]
    lane, warp, register = i % 32, i // 32 % W, i // (32 * W)
    p = n + warp * 16 + register // 2 % 2 * 8 + lane % 4 * 2 + register % 2
    d = register // 4 * (8 * E) + lane // 4 * E + gl.arange(0, E, gl.SliceLayout(0, TILE))[None, :]
    return gl.load(v + p * D + d, mask=(p >= low) & (p < end) & (d < D), other=0)


@jit
def _values_operand(tile, BLOCK_D: gl.constexpr, W: gl.constexpr, E: gl.constexpr, VALUES: gl.constexpr):
    """[W, 16, BLOCK_D]: every element stays in its thread."""
    tile = gl.permute(gl.reshape(tile, [BLOCK_D // (8 * E), 2, 2, W, 8, 4, E]), [3, 1, 5, 2, 0, 6, 4])
    return gl.convert_layout(gl.reshape(tile, [W, 16, BLOCK_D]), VALUES)


@jit
def _head_column(n, E: gl.constexpr):
    """The column of the head that is in column n of the result."""
    return n // (8 * E) * (8 * E) + n % 8 * E + n // 8 % E


@jit
def _merge(partial, ends, first, used, mask_row, columns, BLOCK_D: gl.constexpr, AT_ONCE: gl.constexpr):
    """Merge the softmaxes of the splits into one: sum and unnormalised result of each row. first: the slots of the first
    split's rows."""
    ROW: gl.constexpr = first.type.layout
    Y: gl.constexpr = ROW.parent
    peak = gl.full([16], -1e30, gl.float32, ROW)
    total = gl.zeros([16], gl.float32, ROW)
    y = gl.zeros([16, BLOCK_D], gl.float32, Y)
    for begin in range(0, used, AT_ONCE):
        maxima = ()
        sums = ()
        parts = ()
        new_peak = peak
        for s in gl.static_range(AT_ONCE):
            slot, mask = first + (begin + s) * 16, mask_row & (begin + s < used)
            maxima = maxima + (gl.load(ends + slot * 2, mask=mask, other=-1e30, cache_modifier=".cg"),)
            sums = sums + (gl.load(ends + slot * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg"),)
            part = partial + slot[:, None] * BLOCK_D + columns[None, :]
            parts = parts + (gl.load(part, mask=mask[:, None], other=0.0, cache_modifier=".cg"),)
            new_peak = gl.maximum(new_peak, maxima[s])
        rescale = gl.exp2(peak - new_peak)
        total *= rescale
        y *= rescale[:, None]
        for s in gl.static_range(AT_ONCE):
            weight = gl.exp2(maxima[s] - new_peak)
            total += weight * sums[s]
            y += weight[:, None] * parts[s]
        peak = new_peak
    return total, y


@jit
def _few_attention_kernel(
    q, k_cache, v_cache, out, partial, ends, arrived, pos, T, qk_scale, v_scale,
    S: gl.constexpr, H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, W: gl.constexpr,
    SPLITS: gl.constexpr, LEAST: gl.constexpr, SPLIT: gl.constexpr, DECODE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """16 of the T G rows of a key/value head over one split of the positions; kernels.py explains how splits are merged."""
    gdc_launch_dependents(PDL)
    E: gl.constexpr = 128 // k_cache.dtype.element_ty.primitive_bitwidth  # elements that a thread loads at once, of a key
    EV: gl.constexpr = E if 8 * E <= BLOCK_D else BLOCK_D // 8  # of a value: fewer with small heads in 8 bits
    BLOCK_N: gl.constexpr = 16 * W
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    ROWS: gl.constexpr = gl.DotOperandLayout(0, MMA, E)
    KEYS: gl.constexpr = gl.DotOperandLayout(1, MMA, E)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    VALUES: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    pid, split = gl.program_id(0), gl.program_id(1)
    blocks = gl.cdiv(T * G, 16)
    head, top = pid // blocks, pid % blocks * 16
    k_head = k_cache + head.to(gl.int64) * S * D
    v_head = v_cache + head.to(gl.int64) * S * D
    # Before the wait: the part of the first block that earlier steps have cached
    start_pos = gl.load(pos)
    used, start, end = SPLIT(start_pos + T, split, SPLITS, BLOCK_N, LEAST)
    k = _load_keys(k_head, start, start, gl.minimum(end, start_pos), D, BLOCK_D, W, KEYS)
    v = _load_values(v_head, start, start, gl.minimum(end, start_pos), D, BLOCK_D, W, EV)
    gdc_wait(PDL)
    if split < used:
        warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))[:, None, None]
        row = top + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))[None, :, None] + warp * 0
        d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, gl.SliceLayout(1, ROWS)))[None, None, :]
        q_tile = gl.load(q + (row // G * H + head * G + row % G) * D + d, mask=(row < T * G) & (d < D), other=0.0)
        if start + BLOCK_N > start_pos:
            k += _load_keys(k_head, start, start_pos, end, D, BLOCK_D, W, KEYS)
            v += _load_values(v_head, start, start_pos, end, D, BLOCK_D, W, EV)
        warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None, None]
        own = warp * 16 + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
        last = start_pos + (top + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :, None]) // G
        row_max = gl.full([W, 16], -1e30, gl.float32, gl.SliceLayout(2, MMA))  # finite: a warp may see nothing
        row_sum = gl.zeros([W, 16], gl.float32, gl.SliceLayout(2, MMA))
        acc = gl.zeros([W, 16, BLOCK_D], gl.float32, MMA)
        for n in range(start, end, BLOCK_N):
            # The next block is in flight while this one is used
            k_now, v_now = k, v
            k = _load_keys(k_head, n + BLOCK_N, start, end, D, BLOCK_D, W, KEYS)
            v = _load_values(v_head, n + BLOCK_N, start, end, D, BLOCK_D, W, EV)
            k_tile = (k_now if DECODE is None else DECODE(k_now)).to(q_tile.dtype)
            v_tile = _values_operand((v_now if DECODE is None else DECODE(v_now)).to(q_tile.dtype), BLOCK_D, W, EV, VALUES)
            scores = mma_v2(q_tile, k_tile, gl.zeros([W, 16, 16], gl.float32, MMA))
            scores = gl.where((n + own <= last) & (n + own < end), scores, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(scores, 2))
            p = gl.exp2((scores - new_max[:, :, None]) * qk_scale)
            rescale = gl.exp2((row_max - new_max) * qk_scale)
            row_sum = row_sum * rescale + gl.sum(p, 2)
            acc = mma_v2(gl.convert_layout(p.to(q_tile.dtype), WEIGHTS), v_tile, acc * rescale[:, :, None])
            row_max = new_max
        # Merge the warps' softmaxes; each thread has all W values of its elements
        LANES: gl.constexpr = BLOCK_D // 4 if BLOCK_D < 128 else 32
        ALL: gl.constexpr = gl.BlockedLayout([W, 1, 4], [1, 32 // LANES, LANES], [1, W, 1], [2, 1, 0])
        Y: gl.constexpr = gl.SliceLayout(0, ALL)
        maxima = gl.convert_layout(row_max, gl.SliceLayout(2, ALL))
        peak = gl.max(maxima, 0)
        weight = gl.exp2((maxima - peak[None, :]) * qk_scale)
        total = gl.convert_layout(gl.sum(gl.convert_layout(row_sum, gl.SliceLayout(2, ALL)) * weight, 0), gl.SliceLayout(1, Y))
        y = gl.sum(gl.convert_layout(acc, ALL) * weight[:, :, None], 0) * v_scale
        row, column = top + gl.arange(0, 16, gl.SliceLayout(1, Y)), gl.arange(0, BLOCK_D, gl.SliceLayout(0, Y))
        offs_d = _head_column(column, EV)[None, :]
        offs = (row // G * H + head * G + row % G)[:, None] * D + offs_d
        mask_row = row < T * G
        if used > 1:
            first = pid * SPLITS * 16 + row - top
            slot = first + split * 16
            gl.store(ends + slot * 2, gl.convert_layout(peak, gl.SliceLayout(1, Y)) * qk_scale, mask=mask_row)
            gl.store(ends + slot * 2 + 1, total, mask=mask_row)
            gl.store(partial + slot[:, None] * BLOCK_D + column[None, :], y, mask=mask_row[:, None])
            tl.debug_barrier()
            if gl.atomic_add(arrived + pid, 1, sem="acq_rel") == used - 1:
                gl.store(arrived + pid, 0)
                AT_ONCE: gl.constexpr = SPLITS if SPLITS < 8 else 8
                total, y = _merge(partial, ends, first, used, mask_row, column, BLOCK_D, AT_ONCE)
                gl.store(out + offs, (y / total[:, None]).to(out.dtype.element_ty), mask=mask_row[:, None] & (offs_d < D))
        else:
            gl.store(out + offs, (y / total[:, None]).to(out.dtype.element_ty), mask=mask_row[:, None] & (offs_d < D))


def attends(q: Tensor, rows: int) -> bool:
    """Whether the kernel is meant for these: with more tokens or rows, the kernels for prompts are as fast."""
    T, _, D = q.shape
    return mma_v2 is not None and not INTERPRETED and T <= 64 and rows <= 128 and q.itemsize == 2 and D <= 128
