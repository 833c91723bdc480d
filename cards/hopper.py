"""Kernels for Hopper in Gluon: Triton's lower level, where a kernel manages warps, layouts and
shared memory.

Attention of a prompt (sm_90); attention of a few query rows per key/value head: those of a few
tokens, or of a single token whose heads share keys and values; products of many tokens (sm_90)."""

from __future__ import annotations

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
    peak = gl.full([16], -1e30, gl.float32, ROW)
    total = gl.zeros([16], gl.float32, ROW)
    y = gl.zeros([16, BLOCK_D], gl.float32, Y)
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
def few_attention_kernel(
    q, k_cache, v_cache, out, partial, ends, arrived, segments, P, T, qk_scale, v_scale,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
    BLOCKS: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr, DECODE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """16 of the rows of a segment and a key/value head, G for each token, over one split of the
    positions; attention.py explains how splits are merged."""
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
        maxima = gl.convert_layout(row_max, gl.SliceLayout(2, ALL))
        peak = gl.max(maxima, 0)
        weight = gl.exp2((maxima - peak[None, :]) * qk_scale)
        total = gl.sum(gl.convert_layout(row_sum, gl.SliceLayout(2, ALL)) * weight, 0)
        total = gl.convert_layout(total, gl.SliceLayout(1, Y))
        y = gl.sum(gl.convert_layout(acc, ALL) * weight[:, :, None], 0) * v_scale
        row = top + gl.arange(0, 16, gl.SliceLayout(1, Y))
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
#      are read two at a time. As in attention of a prompt, one group of warps loads, here by cp.async:
#      codes, the numbers of groups, and x, which is put into the order of W's columns on the way.
#      The columns of a step are decoded in parts: tensor cores multiply one while the next is being
#      decoded.
#
#      A program takes steps of neighbouring tiles without a pause, so that loads stay in flight. With
#      few tiles, several programs share each; with many, all programs have equally many steps. The
#      last one of those that share a tile adds up their sums. With experts a program has whole tiles.


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


@constexpr_function
def _layout_of_x(tokens, columns, neighbour):
    """How the threads that load divide x: eight columns each, those of neighbouring threads
    `neighbour` places apart."""
    places = [neighbour, *(p for p in (32, 16, 8, 64, 128) if p != neighbour)]
    bits = [[0, p] for p in places if p < columns]
    bits += [[1 << i, 0] for i in range(tokens.bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], *bits[5:-2]]
    return gl.DistributedLinearLayout(registers, bits[:5], bits[-2:], [], [tokens, columns])


LOADERS = constexpr(4)  # warps that load
LOADER_REGISTERS = constexpr(72)  # of each of their threads


@jit
def _copy_codes(codes, w, rows, step, K: gl.constexpr, COLUMNS: gl.constexpr):
    """Start to copy the codes of the COLUMNS columns of a step, 16 bytes a thread. rows: the first
    row of the tile, and the index of the last one there is, counted from it."""
    WIDTH: gl.constexpr = codes.shape[1]
    EACH: gl.constexpr = COLUMNS // WIDTH  # columns in an element
    VEC: gl.constexpr = 128 // codes.dtype.primitive_bitwidth
    LANES: gl.constexpr = WIDTH // VEC
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // LANES, LANES], [LOADERS, 1], [1, 0])
    first, last = rows
    r = gl.arange(0, codes.shape[0], gl.SliceLayout(1, LAYOUT))
    start = (first + gl.minimum(r, last)).to(gl.int64) * (K // EACH) + step * WIDTH
    offs = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    async_copy.async_copy_global_to_shared(codes, w + (start[:, None] + offs[None, :]))


@jit
def _copy_groups(tile, w, rows, step, K: gl.constexpr, GROUP: gl.constexpr):
    """The same for a tensor with an element for each GROUP columns: copies one for every 32."""
    G: gl.constexpr = tile.shape[1]
    VEC: gl.constexpr = 32 // tile.dtype.primitive_bitwidth if GROUP > 32 else G
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, VEC], [32 * VEC // G, G // VEC], [LOADERS, 1], [1, 0]
    )
    first, last = rows
    r = gl.arange(0, tile.shape[0], gl.SliceLayout(1, LAYOUT))
    start = (first + gl.minimum(r, last)).to(gl.int64) * (K // GROUP)
    place = step * G + gl.arange(0, G, gl.SliceLayout(0, LAYOUT))
    if GROUP > 32:
        place = place // (GROUP // 32)
    async_copy.async_copy_global_to_shared(tile, w + (start[:, None] + place[None, :]))


@jit
def _copy_w(
    tiles, stage, w, rows, step, K: gl.constexpr, COLUMNS: gl.constexpr, FORMAT: gl.constexpr
):
    """Start to copy W for a step."""
    codes, _, groups = tiles
    _copy_codes(codes.index(stage), w[0], rows, step, K, COLUMNS)
    for i in gl.static_range(len(FORMAT.groups)):
        _copy_groups(groups[i].index(stage), w[1 + i], rows, step, K, FORMAT.groups[i])


@jit
def _copy_x(tile, x, rows, step, K: gl.constexpr, FORMAT: gl.constexpr):
    """Start to copy rows of x for a step, in the order of W's columns."""
    LAYOUT: gl.constexpr = rows.type.layout.parent
    offs = step * tile.shape[1] + gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    # Runs of eight stay together
    pointers = x + (rows[:, None] + columns_of(offs, K, FORMAT)[None, :])
    pointers = gl.max_contiguous(gl.multiple_of(pointers, [16, 16]), [1, 8])
    async_copy.async_copy_global_to_shared(tile, pointers)


@jit
def _tile_of(tile, work, N, TOKENS: gl.constexpr, ROWS: gl.constexpr, EXPERTS: gl.constexpr):
    """Where a tile lies: the first row of W, and how many may follow it; the same row counted within
    its matrix; the first token, or where an expert's slots begin; how many of them there are."""
    _, _, expert, begin, T = work
    if EXPERTS is None:
        blocks = gl.cdiv(T, TOKENS)
        row = tile // blocks * ROWS
        begin = tile % blocks * TOKENS
        return (row, N - 1 - row), row, begin, T - begin
    else:
        row = tile * ROWS
        return (expert.to(gl.int64) * N + row, N - 1 - row), row, begin, T


@jit
def _load_w(
    tiles, i, w, work, N, K: gl.constexpr, COLUMNS: gl.constexpr, EXPERTS: gl.constexpr,
    FORMAT: gl.constexpr,
):  # fmt: skip
    """Start to copy W for a program's step i."""
    codes, x_tiles, _ = tiles
    STEPS: gl.constexpr = K // COLUMNS
    start, _, _, _, _ = work
    unit = start + i
    rows, _, _, _ = _tile_of(unit // STEPS, work, N, x_tiles.shape[1], codes.shape[1], EXPERTS)
    _copy_w(tiles, i % codes.shape[0], w, rows, unit % STEPS, K, COLUMNS, FORMAT)


@jit
def _load_tiles(
    tiles, full, empty, x, w, work, slots, N, K: gl.constexpr, EXPERTS: gl.constexpr,
    FORMAT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The group that loads."""
    codes, x_tiles, _ = tiles
    start, end, _, _, count = work
    STAGES: gl.constexpr = x_tiles.shape[0]
    TOKENS: gl.constexpr = x_tiles.shape[1]
    COLUMNS: gl.constexpr = x_tiles.shape[2]
    STEPS: gl.constexpr = K // COLUMNS
    LAYOUT: gl.constexpr = _layout_of_x(TOKENS, COLUMNS, FORMAT.neighbour)
    for i in range(gl.minimum(STAGES, end - start)):  # before the wait
        _load_w(tiles, i, w, work, N, K, COLUMNS, EXPERTS, FORMAT)
    gdc_wait(PDL)
    offs_t = gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
    if EXPERTS is not None:
        t = gl.minimum(offs_t, count - 1)
        slot = gl.load(slots[0] + t, mask=t >= 0, other=0)
        x_rows = (slot // EXPERTS.shared).to(gl.int64) * K
    for i in range(end - start):
        stage = i % STAGES
        unit = start + i
        if i >= STAGES:
            mbarrier.wait(empty.index(stage), (i // STAGES - 1) & 1)
            _load_w(tiles, i, w, work, N, K, COLUMNS, EXPERTS, FORMAT)
        if EXPERTS is None:
            _, _, begin, T = _tile_of(unit // STEPS, work, N, TOKENS, codes.shape[1], EXPERTS)
            x_rows = (begin + gl.minimum(offs_t, T - 1)).to(gl.int64) * K
        _copy_x(x_tiles.index(stage), x, x_rows, unit % STEPS, K, FORMAT)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


PART = constexpr(64)  # columns that are decoded while those before are being multiplied


@jit
def _decode(tiles, stage, part, OPERAND: gl.constexpr, WARPS: gl.constexpr, FORMAT: gl.constexpr):
    """W of a part of a stage's columns, as wgmma's left operand."""
    codes, x_tiles, groups = tiles
    ROWS: gl.constexpr = codes.shape[1]
    WIDTH: gl.constexpr = codes.shape[2] * PART // x_tiles.shape[2]
    part_codes = codes.index(stage).slice(part * WIDTH, WIDTH, dim=1)
    if codes.dtype == gl.int32:
        WORDS: gl.constexpr = _layout_of_words(ROWS, WIDTH, WARPS)
        tile = (part_codes.load(WORDS).reshape(ROWS, WIDTH // 4, 4),)
    else:
        tile = (part_codes.load(OPERAND),)
    G: gl.constexpr = PART // 32
    for j in gl.static_range(len(FORMAT.groups)):
        tile += (groups[j].index(stage).slice(part * G, G, dim=1).load(gl.AutoLayout()),)
    values = FORMAT.values(tile if len(FORMAT.groups) > 0 else tile[0], FORMAT.scales_of)
    return gl.convert_layout(values.to(x_tiles.dtype), OPERAND)


@jit
def _multiply_tiles(
    tiles, full, empty, w, work, result, K: gl.constexpr, EXPERTS: gl.constexpr,
    FORMAT: gl.constexpr, EPILOGUE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The groups that multiply."""
    codes, x_tiles, _ = tiles
    start, end, _, _, _ = work
    STAGES: gl.constexpr = x_tiles.shape[0]
    TOKENS: gl.constexpr = x_tiles.shape[1]
    COLUMNS: gl.constexpr = x_tiles.shape[2]
    ROWS: gl.constexpr = codes.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    STEPS: gl.constexpr = K // COLUMNS
    for tile in range(start // STEPS, gl.cdiv(end, STEPS)):
        low = gl.maximum(start - tile * STEPS, 0)
        high = gl.minimum(end - tile * STEPS, STEPS)
        acc = gl.zeros([ROWS, TOKENS], gl.float32, MMA)
        for step in range(low, high):
            i = tile * STEPS + step - start
            stage = i % STAGES
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
            fence_async_shared()
            operands = ()
            for part in gl.static_range(COLUMNS // PART):
                a = _decode(tiles, stage, part, OPERAND, WARPS, FORMAT)
                x = x_tiles.index(stage).slice(part * PART, PART, dim=1)
                acc = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=True)
                operands += (a,)
            acc = warpgroup_mma_wait(0, deps=(acc,) + operands)[0]
            mbarrier.arrive(empty.index(stage), count=1)
        gdc_wait(PDL)
        whole = high - low == STEPS
        _hand_over(acc, tile, whole, w, work, result, STEPS, EXPERTS, FORMAT, EPILOGUE)


@jit
def _hand_over(
    acc, tile, whole, w, work, result, STEPS: gl.constexpr, EXPERTS: gl.constexpr,
    FORMAT: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Hand a tile's sums to the epilogue. If several programs share it, the last one to finish adds
    theirs up."""
    _, N, _, shared, _ = result
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    # Pairs of rows side by side
    BESIDE: gl.constexpr = ROWS // 64
    OTHERS: gl.constexpr = gl.num_warps() // BESIDE
    OUT: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [BESIDE, OTHERS], [0, 1])
    y = gl.convert_layout(acc, OUT)
    place = _tile_of(tile, work, N, TOKENS, ROWS, EXPERTS)
    if EXPERTS is None:
        y, whole = _add_up(y, tile, whole, place[3], shared, STEPS)
    if whole:
        _finish(y, w, place, result, EXPERTS, FORMAT, EPILOGUE)


@jit
def _add_up(y, tile, whole, T, shared, STEPS: gl.constexpr):
    """Unless y is a tile's whole sum, leave it for the last program that shares the tile. Returns
    the sum, and whether it is whole now."""
    partial, arrived, units = shared
    ROWS: gl.constexpr = y.shape[0]
    TOKENS: gl.constexpr = y.shape[1]
    OUT: gl.constexpr = y.type.layout
    if not whole:
        programs = gl.num_programs(0)
        first = ((tile * STEPS + 1) * programs - 1) // units
        last = ((tile + 1) * STEPS * programs - 1) // units
        r = gl.arange(0, ROWS, gl.SliceLayout(1, OUT))[:, None]
        t = gl.arange(0, TOKENS, gl.SliceLayout(0, OUT))[None, :]
        parts = partial + (t * ROWS + r)
        # A program can share its first tile with those before it, and its last with those after it
        own = 2 * gl.program_id(0) + (gl.program_id(0) == first).to(gl.int32)
        gl.store(parts + own * (TOKENS * ROWS), y, mask=t < T)
        whole = is_last(arrived + tile, last - first + 1)
        if whole:
            y = gl.zeros_like(y)
            for program in range(first, last + 1, 4):
                loaded = ()
                for other in gl.static_range(4):  # at once
                    p = program + other
                    part = parts + (2 * p + (p == first).to(gl.int32)) * (TOKENS * ROWS)
                    mask = (t < T) & (p <= last)
                    loaded += (gl.load(part, mask=mask, other=0.0, cache_modifier=".cg"),)
                y += (loaded[0] + loaded[1]) + (loaded[2] + loaded[3])
    return y, whole


@jit
def _finish(
    y, w, place, result, EXPERTS: gl.constexpr, FORMAT: gl.constexpr, EPILOGUE: gl.constexpr
):
    """Hand y [ROWS, TOKENS] to the epilogue."""
    w_rows, row, begin, T = place
    first, _ = w_rows
    args, N, biases, _, slots = result
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
    SIZES: gl.constexpr = EPILOGUE.sizes
    args = args + slots
    ready = EPILOGUE.prepare(args, rows, t, T, N, TOKENS, SIZES)
    EPILOGUE.store(args, y, ready, T, N, ROWS, TOKENS, SIZES)


@jit
def many_kernel(
    x, w, bias, T, args, order, counts, partial, arrived, N, K: gl.constexpr, TOKENS: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, EXPERTS: gl.constexpr,
    FORMAT: gl.constexpr, EPILOGUE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Tiles of ROWS rows of W by TOKENS of T tokens, or of the slots of an expert, COLUMNS columns a
    step. With experts a program has whole tiles; otherwise the steps of all tiles are divided evenly.

    work     the program's first step, and the end of its steps; its expert, where the slots begin,
             and how many slots there are; without experts 0, 0, and how many tokens there are
    result   what the epilogue gets, the rows of W, the bias, where programs that share a tile leave
             sums, and the slots"""
    gdc_launch_dependents(PDL)
    codes: gl.constexpr = w[0].dtype.element_ty
    WIDTH: gl.constexpr = COLUMNS // 8 if codes == gl.int32 else COLUMNS
    VEC: gl.constexpr = 128 // codes.primitive_bitwidth
    PHASES: gl.constexpr = WIDTH // VEC if WIDTH // VEC < 8 else 8
    C_SHARED: gl.constexpr = gl.SwizzledSharedLayout(VEC, 8 // PHASES, PHASES, [1, 0])
    G_SHARED: gl.constexpr = gl.SwizzledSharedLayout(COLUMNS // 32, 1, 1, [1, 0])
    X_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    code_tiles = gl.allocate_shared_memory(codes, [STAGES, ROWS, WIDTH], C_SHARED)
    x_tiles = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, TOKENS, COLUMNS], X_SHARED)
    groups = ()
    for i in gl.static_range(len(FORMAT.groups)):
        groups += (
            gl.allocate_shared_memory(
                w[1 + i].dtype.element_ty, [STAGES, ROWS, COLUMNS // 32], G_SHARED
            ),
        )
    tiles = (code_tiles, x_tiles, groups)
    full = _barriers(STAGES, 32 * LOADERS)
    empty = _barriers(STAGES, 1)
    STEPS: gl.constexpr = K // COLUMNS
    # What warp_specialize hands over may be a tensor or a tuple, but not None
    slots = ()
    shared = ()
    biases = ()
    if EXPERTS is None:
        units = gl.cdiv(T, TOKENS) * gl.cdiv(N, ROWS) * STEPS
        start = gl.program_id(0) * units // gl.num_programs(0)
        end = (gl.program_id(0) + 1) * units // gl.num_programs(0)
        work = (start, end, 0, 0, T)
        shared = (partial, arrived, units)
    else:
        gdc_wait(PDL)
        offs_e = gl.arange(0, EXPERTS.padded, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        expert, begin, T = block_of(counts, offs_e, gl.program_id(0), TOKENS, EXPERTS)
        row_tiles = gl.where(T > 0, gl.cdiv(N, ROWS), 0)
        start = gl.program_id(1) * row_tiles // gl.num_programs(1) * STEPS
        end = (gl.program_id(1) + 1) * row_tiles // gl.num_programs(1) * STEPS
        work = (start, end, expert, begin, T)
        slots = (order + begin,)
    if bias is not None:
        biases = (bias,)
    result = (args, N, biases, shared, slots)
    # Triton 3.6 does not see that what follows may overwrite what block_of's sums are read from
    barrier()
    gl.warp_specialize(
        [
            (
                _multiply_tiles,
                (tiles, full, empty, w, work, result, K, EXPERTS, FORMAT, EPILOGUE, PDL),
            ),
            (_load_tiles, (tiles, full, empty, x, w, work, slots, N, K, EXPERTS, FORMAT, PDL)),
        ],
        [LOADERS],
        [LOADER_REGISTERS],
    )  # fmt: skip


def registers(warps: int, programs: int) -> int:
    """How many registers a thread has at first, if this many programs, each with this many warps that
    multiply, are to fit on an SM."""
    return min(224, 65536 // (32 * (warps + LOADERS.value) * programs) // 8 * 8)


SHARED_MEMORY = 227 * 1024  # bytes that the programs of an SM may have
HAND_OVER = 16 * 1024 + 256  # bytes of it that a program needs to hand over its sums


def stages(w: Matrix, sizes: ManySizes, columns: int) -> int:
    """How many steps of `columns` columns fit into the shared memory that a program has, beside what it
    needs to hand over its sums; at most sizes.stages."""
    codes, *groups = w.tensors[: 1 + len(w.format.groups)]
    bytes_of_row = codes.nbytes // w.rows * columns // w.columns
    bytes_of_row += sum(t.itemsize for t in groups) * columns // 32
    step = sizes.rows * bytes_of_row + sizes.block * columns * 2
    return min(sizes.stages, (SHARED_MEMORY // sizes.programs - HAND_OVER) // step)
