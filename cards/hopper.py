"""Kernels for Hopper in Gluon: Triton's lower level, where a kernel manages warps, layouts and
shared memory.

Attention of a prompt (sm_90); attention of a few query rows per key/value head: those of a few
tokens, or of a single token whose heads share keys and values; products of many tokens (sm_90)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from cards.sizes import ManySizes
from formats import Matrix, block_of, columns_of, row_scale
from launch import (
    INTERPRETED,
    barrier,
    begin_split,
    constexpr,
    gdc_launch_dependents,
    gdc_wait,
    is_last,
    rows_of_program,
    run_or_compile,
    segment_of,
    triton,
)

if triton:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    jit = gluon.jit
    constexpr_function = gluon.constexpr_function
else:  # nothing here is called

    def jit(function=None, **options):
        return function or jit

    constexpr_function = jit


def descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """x [rows, columns] in blocks, for TMA, Hopper's unit for copying whole tiles."""
    kind = {1: gl.int8, 2: gl.int16, 4: gl.int32}[x.itemsize]
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, kind))


@jit
def _barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """NUMBER barriers, each of which completes when COUNT have arrived."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


# ---- attention of a prompt
#
#      The ordinary kernel in attention.py reaches half of the product rate: its warps load,
#      multiply and take the softmax in turn. Here they are specialised, as in FlashAttention-3
#      (Shah et al., 2024). Of a program's three warp groups
#
#      - one loads: it copies tiles of q, k and v into shared memory (by TMA) as buffers become
#        free, and has few registers;
#      - two multiply: 64 rows of q each. The products run asynchronously: a block's q k^T is
#        started together with the p v of the block before, which is still under way while the
#        block's softmax is computed.
#
#      Barriers in shared memory connect the groups: `full` when a tile has arrived, `empty` when
#      both multiplying groups have read it. A barrier has a phase, 0 or 1, which flips each time it
#      completes; a wait names the phase it waits for. Keys are visited from the last block to the
#      first, so that the blocks on the diagonal, which need a mask, come first.
#
#      It is written for heads of dimension 128 and 16-bit caches; an 8-bit cache is decoded for it,
#      a layer at a time. With heads of dimension 64 the ordinary kernel is as fast (BENCHMARKS.md).

ROWS = constexpr(64)  # rows of q of a group
BLOCK_N = constexpr(128)  # keys in a block
HEAD_DIM = constexpr(128)
STAGES = constexpr(2)  # buffers for blocks of keys, and for blocks of values


@jit
def _part_of(prompt):
    """First row, head, and number of key blocks of this program; the place of position 0, how many
    positions are cached, and how many rows are no padding."""
    segments, T, H, G, positions_at_once = prompt
    BLOCK_M: gl.constexpr = 2 * ROWS
    pid = gl.program_id(0)
    row_blocks = gl.cdiv(T, BLOCK_M)
    first, start_pos, _, count, _ = segment_of(segments, 0, True, T)
    heads_at_once = gl.maximum(positions_at_once // (start_pos + count), 1) * G
    block, head = rows_of_program(pid, row_blocks, heads_at_once, H)
    row = block * BLOCK_M
    end = start_pos + gl.minimum(count, row + BLOCK_M)
    # With nothing but padding one block is read, to keep the groups in step
    blocks = gl.where(row < count, gl.cdiv(end, BLOCK_N), 1)
    return row, head, blocks, first, start_pos, count


@jit
def _load(q, k, v, q_tiles, q_full, keys_and_values, prompt, P, G, IN_POOL: gl.constexpr):
    """The group that loads."""
    k_tiles, k_full, k_empty, v_tiles, v_full, v_empty = keys_and_values
    row, head, blocks, first, _, _ = _part_of(prompt)
    run = head // G * P
    if IN_POOL:
        run += first
    for group in gl.static_range(2):
        mbarrier.expect(q_full.index(group), q.block_type.nbytes)
        offs_q = [row + group * ROWS, head * HEAD_DIM]
        tma.async_copy_global_to_shared(q, offs_q, q_full.index(group), q_tiles.index(group))
    for j in range(blocks):
        stage = j % STAGES
        phase = (j // STAGES) & 1
        n = run + (blocks - 1 - j) * BLOCK_N
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
        tma.async_copy_global_to_shared(k, [n, 0], k_full.index(stage), k_tiles.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
        tma.async_copy_global_to_shared(v, [n, 0], v_full.index(stage), v_tiles.index(stage))


@jit
def _softmax(scores, row_max, row_sum, last, n, qk_scale, MASK: gl.constexpr):
    """Add scores to the running softmax: returns their weights, the maximum, the sum, and the
    factor to rescale the result so far. last: the last position that each row sees."""
    if MASK:
        offs_n = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(offs_n[None, :] <= last[:, None], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    p = gl.exp2(scores * qk_scale - (new_max * qk_scale)[:, None])
    rescale = gl.exp2((row_max - new_max) * qk_scale)
    return p, new_max, row_sum * rescale + gl.sum(p, 1), rescale


@jit
def _clear_rows(tile, first):
    """Set a tile's rows to zero from `first` on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    values = tile.load(LAYOUT)
    tile.store(gl.where(rows[:, None] < first, values, gl.zeros_like(values)))
    fence_async_shared()


@jit
def _step(
    j, blocks, q, p, acc, row_max, row_sum, last, qk_scale, keys_and_values, MASK: gl.constexpr
):
    """Block j: its q k^T and the p v of the block before are started together, and its softmax
    overlaps the latter."""
    SCORES: gl.constexpr = row_max.type.layout.parent
    ACC: gl.constexpr = acc.type.layout
    k_tiles, k_full, k_empty, v_tiles, v_full, v_empty = keys_and_values
    k = j % STAGES
    v = (j - 1) % STAGES
    mbarrier.wait(k_full.index(k), (j // STAGES) & 1)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    scores = warpgroup_mma(q, k_tiles.index(k).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v), ((j - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v_tiles.index(v), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(k), count=1)
    n = (blocks - 1 - j) * BLOCK_N
    p_next, row_max, row_sum, rescale = _softmax(scores, row_max, row_sum, last, n, qk_scale, MASK)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    mbarrier.arrive(v_empty.index(v), count=1)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, ACC))[:, None]
    p_next = gl.convert_layout(p_next.to(q.dtype), gl.DotOperandLayout(0, ACC, 2))
    return p_next, acc, row_max, row_sum


@jit
def _multiply(group, out, q_tiles, q_full, keys_and_values, v_clear, prompt, qk_scale):
    """One of the two groups that multiply."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    k_tiles, k_full, k_empty, v_tiles, v_full, _ = keys_and_values
    row, head, blocks, _, start_pos, count = _part_of(prompt)
    row += group * ROWS
    last = start_pos + row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    masked = blocks - (start_pos + row + 1) // BLOCK_N  # blocks that some row does not see whole
    # Finite: the first block may be beyond all rows
    row_max = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, ACC)
    q = q_tiles.index(group)
    # The first block, which has no p v before it
    mbarrier.wait(q_full.index(group), 0)
    mbarrier.wait(k_full.index(0), 0)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    scores = warpgroup_mma(q, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False)
    mbarrier.arrive(k_empty.index(0), count=1)
    n = (blocks - 1) * BLOCK_N
    p, row_max, row_sum, rescale = _softmax(scores, row_max, row_sum, last, n, qk_scale, True)
    p = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, ACC, 2))
    # Values past the end get weight 0, but 0 * NaN is NaN: the first group zeroes them, the other
    # waits for it
    if blocks * BLOCK_N > start_pos + count:
        if group == 0:
            mbarrier.wait(v_full.index(0), 0)
            _clear_rows(v_tiles.index(0), start_pos + count - n)
            mbarrier.arrive(v_clear, count=1)
        mbarrier.wait(v_clear, 0)
    # The other blocks on the diagonal
    for j in range(1, masked):
        p, acc, row_max, row_sum = _step(
            j, blocks, q, p, acc, row_max, row_sum, last, qk_scale, keys_and_values, True
        )
    # The blocks that every row sees whole
    for j in range(gl.maximum(masked, 1), blocks):
        p, acc, row_max, row_sum = _step(
            j, blocks, q, p, acc, row_max, row_sum, last, qk_scale, keys_and_values, False
        )
    # The last p v; the result is written out through q's buffer, which is free now
    v = (blocks - 1) % STAGES
    mbarrier.wait(v_full.index(v), ((blocks - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v_tiles.index(v), acc)
    acc = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, ACC))[:, None]
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
    acc = gl.where(rows[:, None] < count, acc, 0.0)
    q.store(acc.to(q.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, head * HEAD_DIM], q)
    tma.store_wait(0)


@jit(do_not_specialize=["T", "P", "H", "G", "positions_at_once"])
def _hopper_attention_kernel(
    q, k, v, out, segments, T, qk_scale, P, H, G, positions_at_once, IN_POOL: gl.constexpr
):
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, ROWS, HEAD_DIM], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, BLOCK_N, HEAD_DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, BLOCK_N, HEAD_DIM], v.layout)
    q_full = _barriers(2, 1)
    v_clear = _barriers(1, 1).index(0)
    k_full = _barriers(STAGES, 1)
    k_empty = _barriers(STAGES, 2)
    v_full = _barriers(STAGES, 1)
    v_empty = _barriers(STAGES, 2)
    keys_and_values = (k_tiles, k_full, k_empty, v_tiles, v_full, v_empty)
    prompt = (segments, T, H, G, positions_at_once)
    gl.warp_specialize(
        [
            (_multiply, (0, out, q_tiles, q_full, keys_and_values, v_clear, prompt, qk_scale)),
            (_multiply, (1, out, q_tiles, q_full, keys_and_values, v_clear, prompt, qk_scale)),
            (_load, (q, k, v, q_tiles, q_full, keys_and_values, prompt, P, G, IN_POOL)),
        ],
        [4, 1],  # warps of the second and the third group
        [240, 24],  # and their registers per thread; the first group has what is left, 240
    )


def attends_prompt(q: Tensor) -> bool:
    """Whether the kernel is meant for such heads, and the prompt is long enough to gain from it."""
    return len(q) >= 512 and q.shape[2] == HEAD_DIM and q.itemsize == 2


def prompt_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    segments: Tensor,
    qk_scale: float,
    positions_at_once: int,
    in_pool: bool,
) -> None:
    """What attention.attention computes of a single segment, for heads of dimension 128 and keys and
    values in the type of q, into out [T, H D]. They lie in the pool, [KH, P, D], or are those of the
    sequence alone, [KH, size, D]. positions_at_once: how many positions of one key/value head take
    up attention.SHARED_KEYS."""
    T, H, D = q.shape
    KH, P, _ = k_cache.shape
    queries = descriptor(q.view(T, H * D), [ROWS.value, D])
    result = descriptor(out.view(T, H * D), [ROWS.value, D])
    keys = descriptor(k_cache.view(KH * P, D), [BLOCK_N.value, D])
    values = descriptor(v_cache.view(KH * P, D), [BLOCK_N.value, D])
    grid = (triton.cdiv(T, 2 * ROWS.value) * H,)
    args = (queries, keys, values, result, segments, T, qk_scale, P, H, H // KH, positions_at_once)
    options = dict(IN_POOL=in_pool, num_warps=4)
    run_or_compile(_hopper_attention_kernel, grid, q.device, *args, **options)


# ---- attention of a few rows
#
#      16 rows are one side of the tensor core instruction (mma.m16n8k16), the positions the other.
#      Each warp takes 16 positions at a time and has a softmax of its own over them, so that
#      nothing passes between warps until the end. No key or value goes through shared memory: as in
#      products.py's product of a few tokens, a thread loads 16 bytes straight into the registers of
#      the instruction.
#
#      - Keys: neighbouring elements of one position. The instruction may add up their products with
#        q in any order, as long as q is loaded in the same order; this is what a k_width of 8, or
#        of 16 for an 8-bit cache, means in DotOperandLayout.
#      - Values: neighbouring elements of each of four positions, since here the sum is over
#        positions, four a thread. Neighbours are columns of the results of different instructions,
#        so column n of the result is not column n of the head: offs_d says which it is.
#      - Rows: one token has 8 or fewer in most models. Then only half of the instruction's result goes
#        through shared memory, where warps merge their softmaxes, and from split to split.

FEW_M = 16  # rows of a program


@jit
def _load_keys(
    k,
    n,
    low,
    end,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    WARPS: gl.constexpr,
    K_LAYOUT: gl.constexpr,
):
    """Keys of 16 positions for each warp from n on, zero before `low` and from `end` on:
    [WARPS, BLOCK_D, 16]."""
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, K_LAYOUT)))[:, None, None]
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, gl.SliceLayout(2, K_LAYOUT)))[None, :, None]
    p = (
        n
        + warp * 16
        + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, K_LAYOUT)))[None, None, :]
    )
    return gl.load(k + p * D + d, mask=(p >= low) & (p < end) & (d < D), other=0)


@jit
def _load_values(
    v, n, low, end, D: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr, E: gl.constexpr
):
    """Values of the same positions, E neighbours in dimension 1. Dimension 0 is lanes, warps and
    registers, in this order."""
    TILE: gl.constexpr = gl.BlockedLayout([1, E], [32, 1], [WARPS, 1], [1, 0])
    i = gl.arange(0, BLOCK_D // (8 * E) * 4 * WARPS * 32, gl.SliceLayout(1, TILE))[:, None]
    lane, warp, register = i % 32, i // 32 % WARPS, i // (32 * WARPS)
    p = n + warp * 16 + register // 2 % 2 * 8 + lane % 4 * 2 + register % 2
    d = register // 4 * (8 * E) + lane // 4 * E + gl.arange(0, E, gl.SliceLayout(0, TILE))[None, :]
    return gl.load(v + p * D + d, mask=(p >= low) & (p < end) & (d < D), other=0)


@jit
def _values_operand(
    tile, BLOCK_D: gl.constexpr, WARPS: gl.constexpr, E: gl.constexpr, V_LAYOUT: gl.constexpr
):
    """[WARPS, 16, BLOCK_D]: every element stays in its thread."""
    tile = gl.permute(
        gl.reshape(tile, [BLOCK_D // (8 * E), 2, 2, WARPS, 8, 4, E]), [3, 1, 5, 2, 0, 6, 4]
    )
    return gl.convert_layout(gl.reshape(tile, [WARPS, 16, BLOCK_D]), V_LAYOUT)


@jit
def _merge(
    partial, ends, first, used, mask_row, columns, BLOCK_D: gl.constexpr, AT_ONCE: gl.constexpr
):
    """Merge the softmaxes of the splits into one: sum and unnormalised result of each row. first:
    the indices of the first split's rows."""
    ROW: gl.constexpr = first.type.layout
    Y: gl.constexpr = ROW.parent
    M: gl.constexpr = first.shape[0]
    peak = gl.full([M], -1e30, gl.float32, ROW)
    total = gl.zeros([M], gl.float32, ROW)
    y = gl.zeros([M, BLOCK_D], gl.float32, Y)
    for begin in range(0, used, AT_ONCE):
        maxima = ()
        sums = ()
        parts = ()
        new_peak = peak
        for s in gl.static_range(AT_ONCE):
            index = first + (begin + s) * 16
            mask = mask_row & (begin + s < used)
            top = gl.load(ends + index * 2, mask=mask, other=-1e30, cache_modifier=".cg")
            maxima = maxima + (top,)
            sum_ = gl.load(ends + index * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
            sums = sums + (sum_,)
            place = partial + index[:, None] * BLOCK_D + columns[None, :]
            part = gl.load(place, mask=mask[:, None], other=0.0, cache_modifier=".cg")
            parts = parts + (part,)
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
def _kept(x, KEPT: gl.constexpr):
    """The first 8 of 16 rows, or all of them, in dimension 1: every element stays in its thread."""
    if KEPT == 16:
        return x
    elif len(x.shape) == 2:
        return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, 8]), [0, 2, 1]))[0]
    else:
        halves = gl.reshape(x, [x.shape[0], 2, 8, x.shape[2]])
        return gl.split(gl.permute(halves, [0, 2, 3, 1]))[0]


@jit
def few_attention_kernel(
    q, k_cache, v_cache, out, partial, ends, arrived, segments, P, T, qk_scale, v_scale,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
    BLOCKS: gl.constexpr, KEPT: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr,
    DECODE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """16 of the rows of a segment and a key/value head, G for each token, over one split of the
    positions; attention.py explains how splits are merged. KEPT: 8 if there are no more rows, or 16."""
    gdc_launch_dependents(PDL)
    # Elements that a thread loads at once, of a key, and of a value: fewer with small heads in 8
    # bits
    E: gl.constexpr = 128 // k_cache.dtype.element_ty.primitive_bitwidth
    EV: gl.constexpr = E if 8 * E <= BLOCK_D else BLOCK_D // 8
    BLOCK_N: gl.constexpr = 16 * WARPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, MMA, E)
    K_LAYOUT: gl.constexpr = gl.DotOperandLayout(1, MMA, E)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    V_LAYOUT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    segment, heads, positions = begin_split(
        segments, k_cache, v_cache, P, T, D, BLOCKS, 16, SPLITS, BLOCK_N, LEAST
    )
    group, begin, count, written = segment
    head, top, k_head, v_head = heads
    start_pos, used, split, start, end = positions
    # Before the wait: the part of the first block that earlier passes have cached
    if (split < used) & (top < written * G):
        k = _load_keys(
            k_head, start, start, gl.minimum(end, start_pos), D, BLOCK_D, WARPS, K_LAYOUT
        )
        v = _load_values(v_head, start, start, gl.minimum(end, start_pos), D, BLOCK_D, WARPS, EV)
        gdc_wait(PDL)
        warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, Q_LAYOUT)))[:, None, None]
        offs_m = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, Q_LAYOUT)))[None, :, None]
        row = top + offs_m + warp * 0
        d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, gl.SliceLayout(1, Q_LAYOUT)))[None, None, :]
        mask = (row < count * G) & (d < D)
        offs_q = ((begin + row // G) * H + head * G + row % G) * D + d
        q_tile = gl.load(q + offs_q, mask=mask, other=0.0)
        if start + BLOCK_N > start_pos:
            k += _load_keys(k_head, start, start_pos, end, D, BLOCK_D, WARPS, K_LAYOUT)
            v += _load_values(v_head, start, start_pos, end, D, BLOCK_D, WARPS, EV)
        warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None, None]
        own = warp * 16 + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
        offs_m = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :, None]
        last = start_pos + (top + offs_m) // G
        # Finite: a warp may see nothing
        row_max = gl.full([WARPS, 16], -1e30, gl.float32, gl.SliceLayout(2, MMA))
        row_sum = gl.zeros([WARPS, 16], gl.float32, gl.SliceLayout(2, MMA))
        acc = gl.zeros([WARPS, 16, BLOCK_D], gl.float32, MMA)
        for n in range(start, end, BLOCK_N):
            # The next block is in flight while this one is used
            k_now, v_now = k, v
            k = _load_keys(k_head, n + BLOCK_N, start, end, D, BLOCK_D, WARPS, K_LAYOUT)
            v = _load_values(v_head, n + BLOCK_N, start, end, D, BLOCK_D, WARPS, EV)
            k_tile = DECODE(k_now).to(q_tile.dtype)
            v_tile = _values_operand(DECODE(v_now).to(q_tile.dtype), BLOCK_D, WARPS, EV, V_LAYOUT)
            scores = mma_v2(q_tile, k_tile, gl.zeros([WARPS, 16, 16], gl.float32, MMA))
            scores = gl.where((n + own <= last) & (n + own < end), scores, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(scores, 2))
            p = gl.exp2((scores - new_max[:, :, None]) * qk_scale)
            rescale = gl.exp2((row_max - new_max) * qk_scale)
            row_sum = row_sum * rescale + gl.sum(p, 2)
            weights = gl.convert_layout(p.to(q_tile.dtype), P_LAYOUT)
            acc = mma_v2(weights, v_tile, acc * rescale[:, :, None])
            row_max = new_max
        # Merge the warps' softmaxes; each thread has all WARPS values of its elements
        LANES: gl.constexpr = BLOCK_D // 4 if BLOCK_D < 128 else 32
        ALL: gl.constexpr = gl.BlockedLayout(
            [WARPS, 1, 4], [1, 32 // LANES, LANES], [1, WARPS, 1], [2, 1, 0]
        )
        Y: gl.constexpr = gl.SliceLayout(0, ALL)
        maxima = gl.convert_layout(_kept(row_max, KEPT), gl.SliceLayout(2, ALL))
        peak = gl.max(maxima, 0)
        weight = gl.exp2((maxima - peak[None, :]) * qk_scale)
        sums = gl.convert_layout(_kept(row_sum, KEPT), gl.SliceLayout(2, ALL))
        total = gl.sum(sums * weight, 0)
        total = gl.convert_layout(total, gl.SliceLayout(1, Y))
        parts = gl.convert_layout(_kept(acc, KEPT), ALL)
        y = gl.sum(parts * weight[:, :, None], 0) * v_scale
        row = top + gl.arange(0, KEPT, gl.SliceLayout(1, Y))
        column = gl.arange(0, BLOCK_D, gl.SliceLayout(0, Y))
        offs_d = (column // (8 * EV) * (8 * EV) + column % 8 * EV + column // 8 % EV)[None, :]
        offs = ((begin + row // G) * H + head * G + row % G)[:, None] * D + offs_d
        mask_row = row < count * G
        mask_out = (row < written * G)[:, None] & (offs_d < D)
        if used > 1:
            in_first = group * SPLITS * 16 + row - top
            index = in_first + split * 16
            maximum = ends + index * 2
            scaled = gl.convert_layout(peak, gl.SliceLayout(1, Y)) * qk_scale
            gl.store(maximum, scaled, mask=mask_row)
            gl.store(ends + index * 2 + 1, total, mask=mask_row)
            gl.store(
                partial + index[:, None] * BLOCK_D + column[None, :], y, mask=mask_row[:, None]
            )
            if is_last(arrived + group, used):
                AT_ONCE: gl.constexpr = SPLITS if SPLITS < 8 else 8
                total, y = _merge(partial, ends, in_first, used, mask_row, column, BLOCK_D, AT_ONCE)
                result = gl.where(mask_row[:, None], y / total[:, None], 0.0)
                gl.store(out + offs, result.to(out.dtype.element_ty), mask=mask_out)
        else:
            result = gl.where(mask_row[:, None], y / total[:, None], 0.0)
            gl.store(out + offs, result.to(out.dtype.element_ty), mask=mask_out)


def attends_few(q: Tensor, longest: int, rows: int) -> bool:
    """Whether the kernel is meant for segments of up to `longest` tokens, and `rows` per key/value
    head. With more of them, the kernels for prompts are as fast."""
    fits = longest <= 64 and rows <= 128
    return not INTERPRETED and fits and q.itemsize == 2 and q.shape[2] <= 128


# ---- products of many tokens, with a matrix that is decoded on the way
#
#      wgmma takes 64 rows of W from the registers of four warps, and x from shared memory. Of every
#      16 columns of a row it expects from each of four threads
#
#          thread     0             1               2               3
#          columns    0, 1, 8, 9    2, 3, 10, 11    4, 5, 12, 13    6, 7, 14, 15
#
#      bits/codes4.py keeps just these in the four words of 32 columns. So a thread reads its word of
#      each four from shared memory, decodes it, and has its part of W in registers. Codes of 8 bits
#      are read two at a time. As in attention of a prompt, one group of warps loads: codes by TMA, the
#      numbers of groups and x by cp.async. The columns of x are already in W's order, except for a
#      few rows without a norm: if they were reordered while being copied, pieces that arrive together
#      would conflict in the banks of shared memory, whose bandwidth limits this kernel. The columns of
#      a step are decoded in parts: tensor cores multiply one while the next is being decoded.
#
#      A program takes steps of neighbouring tiles without a pause, so that loads stay in flight, and
#      all programs have equally many. Where several share a tile, the one that has its first steps
#      adds up their sums: it comes to them last, while the others begin with theirs. With experts
#      there are tiles enough to share them out whole.


@constexpr_function
def _layout_of_words(rows, width, warps):
    """How the threads of wgmma divide words of codes [rows, width]."""
    powers = lambda first, end: [first << i for i in range((end // first).bit_length() - 1)]
    registers = [
        [8, 0],
        *([0, i] for i in powers(4, width)),
        *([i, 0] for i in powers(16 * warps, rows)),
    ]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    of_warps = [[i, 0] for i in powers(16, 16 * warps)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [rows, width])


class Work(NamedTuple):
    """How the work is divided among programs, and this program's part of it."""

    start: Any  # this program's first step
    end: Any  # the step after its last one
    tiles: Any  # in a block: of one expert's slots or, without experts, all of them
    units: Any  # what is divided: the steps of all tiles or, with experts, whole tiles
    programs: Any  # how many programs have work


class Place(NamedTuple):
    """Where a tile lies."""

    first: Any  # row of W
    left: Any  # how many rows may follow it
    row: Any  # the first one, counted within its matrix
    begin: Any  # the first token, or where an expert's slots begin
    count: Any  # of tokens or slots from there on


class Sums(NamedTuple):
    """What programs that share a tile need."""

    partial: Any  # memory for the sum of each program
    arrived: Any  # a counter for each tile


class Result(NamedTuple):
    """What becomes of the sums."""

    args: Any  # of the epilogue
    N: Any
    biases: Any  # one or none
    sums: Any  # Sums, or nothing with experts


LOADERS = constexpr(4)  # warps that load
LOADER_REGISTERS = constexpr(72)  # of each of their threads


@jit
def _copy_groups(tile, w, place, step, K: gl.constexpr, GROUP: gl.constexpr):
    """Start to copy the numbers of groups for a step, of a tensor with an element for each GROUP columns:
    one for every 32."""
    G: gl.constexpr = tile.shape[1]
    VEC: gl.constexpr = 32 // tile.dtype.primitive_bitwidth if GROUP > 32 else G
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, VEC], [32 * VEC // G, G // VEC], [LOADERS, 1], [1, 0]
    )
    r = gl.arange(0, tile.shape[0], gl.SliceLayout(1, LAYOUT))
    start = (place.first + gl.minimum(r, place.left)).to(gl.int64) * (K // GROUP)
    group = step * G + gl.arange(0, G, gl.SliceLayout(0, LAYOUT))
    if GROUP > 32:
        group = group // (GROUP // 32)
    async_copy.async_copy_global_to_shared(tile, w + (start[:, None] + group[None, :]))


@jit
def _copy_w(buffers, full, stage, codes, w, place, step, K: gl.constexpr, FORMAT: gl.constexpr):
    """Start to copy W for a step."""
    code_tiles, _, group_tiles = buffers
    arrived = full.index(stage)
    offs = [place.first, step * code_tiles.shape[2]]
    mbarrier.expect(arrived, codes.block_type.nbytes)
    tma.async_copy_global_to_shared(codes, offs, arrived, code_tiles.index(stage))
    for i in gl.static_range(len(FORMAT.groups)):
        _copy_groups(group_tiles[i].index(stage), w[1 + i], place, step, K, FORMAT.groups[i])


@constexpr_function
def _layout_of_x(columns):
    """How the threads that load divide x: eight columns each."""
    lanes = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [LOADERS, 1], [1, 0])


@jit
def _copy_x(tile, x, rows, present, step, K: gl.constexpr, FORMAT: gl.constexpr):
    """Start to copy rows of x for a step, in the order of FORMAT. Those that are not present become
    zero."""
    LAYOUT: gl.constexpr = rows.type.layout.parent
    places = step * tile.shape[1] + gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    pointers = x + (rows.to(gl.int64)[:, None] * K + columns_of(places, K, FORMAT)[None, :])
    # Runs of eight columns stay together
    pointers = gl.max_contiguous(gl.multiple_of(pointers, [16, 16]), [1, 8])
    async_copy.async_copy_global_to_shared(tile, pointers, mask=present[:, None])


@constexpr_function
def _layout_of_experts(padded, warps):
    """The layout of a tensor [warps, padded] of which each warp holds one row."""
    return gl.BlockedLayout([1, min(4, padded)], [1, 32], [warps, 1], [1, 0])


@jit
def _experts_of_each_warp(EXPERTS: gl.constexpr):
    """0 to padded - 1 in a row for each warp, [WARPS, padded]: what block_of calls offs_e."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = _layout_of_experts(EXPERTS.padded, WARPS)
    offs_e = gl.arange(0, EXPERTS.padded, gl.SliceLayout(0, LAYOUT))[None, :]
    return offs_e + gl.zeros([WARPS, 1], gl.int32, LAYOUT)


@jit
def _work_of(
    T, N, slots, TOKENS: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr,
    EXPERTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Divide the work among programs. With experts, this waits for the router, since it needs to know
    how many slots each of them has."""
    tiles = gl.cdiv(N, ROWS)
    if EXPERTS is None:
        UNIT: gl.constexpr = 1  # steps of a unit
        tiles *= gl.cdiv(T, TOKENS)
        units = tiles * STEPS
    else:
        UNIT: gl.constexpr = STEPS
        gdc_wait(PDL)
        offs_e = _experts_of_each_warp(EXPERTS)
        count = gl.load(slots[1] + offs_e, mask=offs_e < EXPERTS.count, other=0)
        units = gl.max(gl.sum((count + TOKENS - 1) // TOKENS, 1), 0) * tiles
    programs = gl.minimum(gl.num_programs(0), units)
    program = gl.minimum(gl.program_id(0), programs)
    start = program * units // programs * UNIT
    end = gl.minimum(program + 1, programs) * units // programs * UNIT
    return Work(start, end, tiles, units, programs)


@jit
def _block_of(block, slots, T, TOKENS: gl.constexpr, EXPERTS: gl.constexpr):
    """A block's expert, where its slots begin, and how many they are. Without experts there is one
    block, of all tokens."""
    if EXPERTS is None:
        return 0, 0, T
    else:
        offs_e = _experts_of_each_warp(EXPERTS)
        return block_of(slots[1], offs_e, block, TOKENS, EXPERTS)


@jit
def _tile_of(tile, block, N, TOKENS: gl.constexpr, ROWS: gl.constexpr, EXPERTS: gl.constexpr):
    """Where a tile of a block lies."""
    expert, begin, T = block
    if EXPERTS is None:
        parts = gl.cdiv(T, TOKENS)
        row = tile // parts * ROWS
        begin = tile % parts * TOKENS
        return Place(row, N - 1 - row, row, begin, T - begin)
    else:
        row = tile * ROWS
        return Place(expert * N + row, N - 1 - row, row, begin, T)


@jit
def _tiles_of(block, work, STEPS: gl.constexpr):
    """The program's part of a block's tiles: the first one, and where they end."""
    before = block * work.tiles
    first = gl.maximum(work.start // STEPS - before, 0)
    return first, gl.minimum(gl.cdiv(work.end, STEPS) - before, work.tiles)


@jit
def _steps_of(tile, work, STEPS: gl.constexpr):
    """The program's part of a tile's steps: the first one, and where they end."""
    before = tile * STEPS
    return gl.maximum(work.start - before, 0), gl.minimum(work.end - before, STEPS)


@jit
def _load_tiles(
    buffers, full, empty, x, codes, w, slots, T, N, K: gl.constexpr, EXPERTS: gl.constexpr,
    FORMAT: gl.constexpr, X_FORMAT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The group that loads."""
    code_tiles, x_tiles, _ = buffers
    STAGES: gl.constexpr = x_tiles.shape[0]
    TOKENS: gl.constexpr = x_tiles.shape[1]
    COLUMNS: gl.constexpr = x_tiles.shape[2]
    ROWS: gl.constexpr = code_tiles.shape[1]
    STEPS: gl.constexpr = K // COLUMNS
    LAYOUT: gl.constexpr = _layout_of_x(COLUMNS)
    work = _work_of(T, N, slots, TOKENS, ROWS, STEPS, EXPERTS, PDL)
    start, end, tiles = work.start, work.end, work.tiles
    if EXPERTS is None:  # before the wait
        for i in range(gl.minimum(STAGES, end - start)):
            unit = start + i
            place = _tile_of(unit // STEPS, (0, 0, T), N, TOKENS, ROWS, EXPERTS)
            _copy_w(buffers, full, i, codes, w, place, unit % STEPS, K, FORMAT)
        gdc_wait(PDL)
    offs_t = gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
    for j in range(start // (tiles * STEPS), gl.cdiv(end, tiles * STEPS)):
        block = _block_of(j, slots, T, TOKENS, EXPERTS)
        first, last = _tiles_of(j, work, STEPS)
        for tile in range(first, last):
            place = _tile_of(tile, block, N, TOKENS, ROWS, EXPERTS)
            present = offs_t < place.count
            if EXPERTS is None:
                x_rows = place.begin + offs_t
            else:
                own = gl.load(slots[0] + place.begin + offs_t, mask=present, other=0)
                x_rows = own // EXPERTS.shared
            low, high = _steps_of(j * tiles + tile, work, STEPS)
            for step in range(low, high):
                i = (j * tiles + tile) * STEPS + step - start
                stage = i % STAGES
                if i >= STAGES:
                    mbarrier.wait(empty.index(stage), (i // STAGES - 1) & 1)
                if i >= STAGES or EXPERTS is not None:
                    _copy_w(buffers, full, stage, codes, w, place, step, K, FORMAT)
                _copy_x(x_tiles.index(stage), x, x_rows, present, step, K, X_FORMAT)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@jit
def _words_in_parts(words, WIDTH: gl.constexpr):
    """words [ROWS, n WIDTH], each thread of which has some of every part: n tiles [ROWS, WIDTH]."""
    ROWS: gl.constexpr = words.shape[0]
    HALF: gl.constexpr = words.shape[1] // 2
    if HALF < WIDTH:
        return (words,)
    else:
        low, high = gl.split(words.reshape(ROWS, 2, HALF).permute(0, 2, 1))
        return _words_in_parts(low, WIDTH) + _words_in_parts(high, WIDTH)


@jit
def _codes_in_parts(codes, PART: gl.constexpr, OPERAND: gl.constexpr):
    """The codes of a step, PART columns each, as FORMAT.values takes them."""
    ROWS: gl.constexpr = codes.shape[0]
    parts = ()
    if codes.dtype == gl.int32:
        WIDTH: gl.constexpr = PART // 8
        LAYOUT: gl.constexpr = _layout_of_words(ROWS, codes.shape[1], gl.num_warps())
        words = _words_in_parts(codes.load(LAYOUT), WIDTH)
        for i in gl.static_range(codes.shape[1] // WIDTH):
            parts += (words[i].reshape(ROWS, WIDTH // 4, 4),)
    else:
        for i in gl.static_range(codes.shape[1] // PART):
            parts += (codes.slice(i * PART, PART, dim=1).load(OPERAND),)
    return parts


@jit
def _decode(codes, groups, stage, part: gl.constexpr, PART: gl.constexpr, FORMAT: gl.constexpr):
    """A part of a step's weights."""
    G: gl.constexpr = PART // 32
    tile = (codes,)
    for j in gl.static_range(len(FORMAT.groups)):
        tile += (groups[j].index(stage).slice(part * G, G, dim=1).load(gl.AutoLayout()),)
    return FORMAT.values(tile if len(FORMAT.groups) > 0 else codes, FORMAT.scales_of)


@jit
def _multiply_tiles(
    buffers, full, empty, w, slots, T, result, K: gl.constexpr, EXPERTS: gl.constexpr,
    FORMAT: gl.constexpr, EPILOGUE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The groups that multiply."""
    code_tiles, x_tiles, group_tiles = buffers
    STAGES: gl.constexpr = x_tiles.shape[0]
    TOKENS: gl.constexpr = x_tiles.shape[1]
    COLUMNS: gl.constexpr = x_tiles.shape[2]
    ROWS: gl.constexpr = code_tiles.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    STEPS: gl.constexpr = K // COLUMNS
    # Columns that are decoded while those before are being multiplied; 8-bit codes lie in runs of 128
    PART: gl.constexpr = 64 if code_tiles.dtype == gl.int32 or COLUMNS == 64 else 128
    work = _work_of(T, result.N, slots, TOKENS, ROWS, STEPS, EXPERTS, PDL)
    start, end, tiles = work.start, work.end, work.tiles
    for j in range(start // (tiles * STEPS), gl.cdiv(end, tiles * STEPS)):
        block = _block_of(j, slots, T, TOKENS, EXPERTS)
        first, last = _tiles_of(j, work, STEPS)
        for tile in range(first, last):
            low, high = _steps_of(j * tiles + tile, work, STEPS)
            acc = gl.zeros([ROWS, TOKENS], gl.float32, MMA)
            for step in range(low, high):
                i = (j * tiles + tile) * STEPS + step - start
                stage = i % STAGES
                mbarrier.wait(full.index(stage), (i // STAGES) & 1)
                fence_async_shared()
                codes = _codes_in_parts(code_tiles.index(stage), PART, OPERAND)
                operands = ()
                for part in gl.static_range(COLUMNS // PART):
                    values = _decode(codes[part], group_tiles, stage, part, PART, FORMAT)
                    a = gl.convert_layout(values.to(x_tiles.dtype), OPERAND)
                    x = x_tiles.index(stage).slice(part * PART, PART, dim=1)
                    acc = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=True)
                    operands += (a,)
                acc = warpgroup_mma_wait(0, deps=(acc,) + operands)[0]
                mbarrier.arrive(empty.index(stage), count=1)
            if EXPERTS is None:  # with experts, _work_of has waited
                gdc_wait(PDL)
            place = _tile_of(tile, block, result.N, TOKENS, ROWS, EXPERTS)
            whole = high - low == STEPS
            _hand_over(
                acc, j * tiles + tile, whole, w, place, slots, work, result, STEPS, EXPERTS,
                FORMAT, EPILOGUE,
            )  # fmt: skip


@jit
def _hand_over(
    acc, tile, whole, w, place, slots, work, result, STEPS: gl.constexpr, EXPERTS: gl.constexpr,
    FORMAT: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Hand a tile's sums to the epilogue. If several programs share it, one adds theirs up. whole:
    whether all of its steps are the program's own."""
    # Pairs of rows side by side
    BESIDE: gl.constexpr = acc.shape[0] // 64
    OTHERS: gl.constexpr = gl.num_warps() // BESIDE
    OUT: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [BESIDE, OTHERS], [0, 1])
    y = gl.convert_layout(acc, OUT)
    if EXPERTS is None:
        y, whole = _add_up(y, tile, whole, place.count, work, result.sums, STEPS)
    if whole:
        _finish(y, w, place, slots, result, EXPERTS, FORMAT, EPILOGUE)


@jit
def _add_up(y, tile, whole, T, work, sums, STEPS: gl.constexpr):
    """Unless y is a tile's whole sum, it is one of several: the program with the tile's first steps
    adds them up, the others leave theirs in memory. Returns the sum, and whether it is whole now."""
    partial, arrived = sums
    units, programs = work.units, work.programs
    ROWS: gl.constexpr = y.shape[0]
    TOKENS: gl.constexpr = y.shape[1]
    OUT: gl.constexpr = y.type.layout
    if not whole:
        program = gl.program_id(0)
        first = ((tile * STEPS + 1) * programs - 1) // units
        last = ((tile + 1) * STEPS * programs - 1) // units
        r = gl.arange(0, ROWS, gl.SliceLayout(1, OUT))[:, None]
        t = gl.arange(0, TOKENS, gl.SliceLayout(0, OUT))[None, :]
        parts = partial + (t * ROWS + r)  # of a program, which leaves no more than one
        if program == first:
            while gl.atomic_add(arrived + tile, 0, sem="acquire") < last - first:
                pass
            gl.store(arrived + tile, 0)
            for other in range(first + 1, last + 1, 4):
                loaded = ()
                for i in gl.static_range(4):  # at once
                    part = parts + (other + i) * (TOKENS * ROWS)
                    mask = (t < T) & (other + i <= last)
                    loaded += (gl.load(part, mask=mask, other=0.0, cache_modifier=".cg"),)
                y += (loaded[0] + loaded[1]) + (loaded[2] + loaded[3])
            whole = True
        else:
            gl.store(parts + program * (TOKENS * ROWS), y, mask=t < T)
            barrier()
            gl.atomic_add(arrived + tile, 1, sem="release")
    return y, whole


@jit
def _finish(
    y, w, place, slots, result, EXPERTS: gl.constexpr, FORMAT: gl.constexpr, EPILOGUE: gl.constexpr
):
    """Hand y [ROWS, TOKENS] to the epilogue."""
    first, _, row, begin, T = place
    args, N, biases, _ = result
    ROWS: gl.constexpr = y.shape[0]
    TOKENS: gl.constexpr = y.shape[1]
    OUT: gl.constexpr = y.type.layout
    offs = gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    rows = (row + offs)[:, None]
    if FORMAT.gain is not None:
        y *= row_scale(w, first + offs, row + offs < N, FORMAT.gain)[:, None]
    if len(biases) > 0:
        y += gl.load(biases[0] + rows, mask=rows < N, other=0.0).to(gl.float32)
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, OUT))[None, :]
    if EXPERTS is None:
        t += begin
        T += begin
    if EPILOGUE.pairs:
        even, odd = gl.split(y.reshape(ROWS // 2, 2, TOKENS).permute(0, 2, 1))
        rows = gl.arange(0, ROWS // 2, gl.SliceLayout(1, even.type.layout))[:, None] + row // 2
        t = gl.convert_layout(t, even.type.layout)
    elif EPILOGUE.added is not None:
        added = args[EPILOGUE.added] + t * N + rows
        y += gl.load(added, mask=(rows < N) & (t < T), other=0.0).to(gl.float32)
    if EXPERTS is not None:
        args = args + (slots[0] + begin,)
    SIZES: gl.constexpr = EPILOGUE.sizes
    ready = EPILOGUE.prepare(args, rows, t, T, N, TOKENS, SIZES)
    EPILOGUE.store(args, y, ready, T, N, ROWS, TOKENS, SIZES)


@jit
def many_kernel(
    x, codes, w, bias, T, args, order, counts, partial, arrived, N, K: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    EXPERTS: gl.constexpr, FORMAT: gl.constexpr, X_FORMAT: gl.constexpr, EPILOGUE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Tiles of ROWS rows of W by TOKENS of T tokens, or of the slots of an expert, COLUMNS columns a
    step. The steps of all tiles are divided evenly; with experts the tiles are. X_FORMAT: the format
    into whose order x is put while it is copied."""
    gdc_launch_dependents(PDL)
    G_SHARED: gl.constexpr = gl.SwizzledSharedLayout(COLUMNS // 32, 1, 1, [1, 0])
    X_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    WIDTH: gl.constexpr = codes.block_shape[1]
    code_tiles = gl.allocate_shared_memory(codes.dtype, [STAGES, ROWS, WIDTH], codes.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, TOKENS, COLUMNS], X_SHARED)
    groups = ()
    for i in gl.static_range(len(FORMAT.groups)):
        groups += (
            gl.allocate_shared_memory(
                w[1 + i].dtype.element_ty, [STAGES, ROWS, COLUMNS // 32], G_SHARED
            ),
        )
    buffers = (code_tiles, x_tiles, groups)
    full = _barriers(STAGES, 1 + 32 * LOADERS)  # one for the codes, one for what each thread copies
    empty = _barriers(STAGES, 1)
    # What warp_specialize hands over may be a tensor or a tuple, but not None
    slots = ()  # with experts, all slots and how many each expert has
    sums = ()
    biases = ()
    if EXPERTS is None:
        sums = Sums(partial, arrived)
    else:
        slots = (order, counts)
    if bias is not None:
        biases = (bias,)
    result = Result(args, N, biases, sums)
    gl.warp_specialize(
        [
            (
                _multiply_tiles,
                (buffers, full, empty, w, slots, T, result, K, EXPERTS, FORMAT, EPILOGUE, PDL),
            ),
            (
                _load_tiles,
                (
                    buffers, full, empty, x, codes, w, slots, T, N, K, EXPERTS, FORMAT, X_FORMAT,
                    PDL,
                ),
            ),
        ],
        [LOADERS],
        [LOADER_REGISTERS],
    )  # fmt: skip


def registers(warps: int, programs: int) -> int:
    """How many registers a thread has at first, if this many programs, each with this many warps that
    multiply, are to fit on an SM."""
    return min(224, 65536 // (32 * (warps + LOADERS.value) * programs) // 8 * 8)


SHARED_MEMORY = 227 * 1024  # bytes that the programs of an SM may have
HAND_OVER = 16 * 1024  # bytes of it that handing over a program's sums takes at most


def codes_descriptor(w: Matrix, sizes: ManySizes, columns: int) -> TensorDescriptor:
    """The codes of W in tiles of `columns` columns."""
    return descriptor(w.data, [sizes.rows, columns // w.format.codes_each])


def stages(w: Matrix, sizes: ManySizes, columns: int) -> int:
    """How many steps of `columns` columns fit into the shared memory that a program has, beside what it
    needs to hand over its sums; at most sizes.stages."""
    codes, *groups = w.tensors[: 1 + len(w.format.groups)]
    bytes_of_row = codes.nbytes // w.rows * columns // w.columns
    bytes_of_row += sum(t.itemsize for t in groups) * columns // 32
    step = sizes.rows * bytes_of_row + sizes.block * columns * 2
    others = min(HAND_OVER, sizes.rows * sizes.block * 4) + 256  # with the barriers
    # each program takes 1 kB more than it asks for
    room = (SHARED_MEMORY + 1024) // sizes.programs - 1024
    return min(sizes.stages, (room - others) // step)
