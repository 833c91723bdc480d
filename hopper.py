"""Attention of a prompt on Hopper (sm_90), in Gluon: Triton's lower level, where a kernel manages warps and shared memory.

The ordinary kernel in kernels.py reaches half of the product rate: its warps load, multiply and take the softmax in turn. Here
they are specialised, as in FlashAttention-3 (Shah et al., 2024). Of a program's three warp groups

- one loads: it copies tiles of q, k and v into shared memory (by TMA, Hopper's unit for copying whole tiles) as buffers become
  free, and has few registers;
- two multiply: 64 rows of q each. The products run asynchronously: a block's q k^T is started together with the p v of the
  block before, which is still under way while the block's softmax is computed.

Barriers in shared memory connect the groups: `full` when a tile has arrived, `empty` when both multiplying groups have read it.
A barrier has a phase, 0 or 1, which flips each time it completes; a wait names the phase it waits for. Keys are visited from
the last block to the first, so that the blocks on the diagonal, which need a mask, come first.

It is written for heads of dimension 128 and 16-bit caches; an 8-bit cache is decoded for it, one layer at a time. TFLOP/s of
this kernel, the ordinary one and cuDNN on one H200, 32 heads: 443, 381, 405 at 2048 tokens; 618, 500, 585 at 8192; 618, 481,
615 at 16384; 606 and 485 for 2048 after 8192 cached. cuDNN builds a plan for each new length, which takes 37 ms, as long as a
whole prompt. With heads of dimension 64 the ordinary kernel is as fast.
"""

from __future__ import annotations

import math

from torch import Tensor

try:
    import triton
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    jit = gluon.jit
except ImportError:  # no Triton, or one without Gluon: nothing here is called
    gluon = None

    def jit(function=None, **options):
        return function or jit


ROWS, BLOCK_N, HEAD_DIM = 64, 128, 128  # rows of q of each of the two groups, keys in a block


@jit
def _place(pos, T, H, G, positions_at_once, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """First row, head, cached positions and number of key blocks of this program; programs are ordered as in
    kernels._rows_of_program."""
    pid, row_blocks = gl.program_id(0), (T + BLOCK_M - 1) // BLOCK_M
    start_pos = gl.load(pos)
    heads_at_once = gl.maximum(positions_at_once // (start_pos + T), 1) * G
    first = pid // (row_blocks * heads_at_once) * heads_at_once
    heads = gl.minimum(heads_at_once, H - first)
    rest = pid - first * row_blocks
    row = (row_blocks - 1 - rest // heads) * BLOCK_M
    end = start_pos + gl.minimum(T, row + BLOCK_M)
    return row, first + rest % heads, start_pos, (end + BLOCK_N - 1) // BLOCK_N


@jit
def _load(
    q, k, v, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, pos, T, S, H, G, positions_at_once,
    D: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The group that loads."""
    row, head, start_pos, blocks = _place(pos, T, H, G, positions_at_once, 2 * ROWS, BLOCK_N)
    for group in gl.static_range(2):
        mbarrier.expect(q_full.index(group), q.block_type.nbytes)
        tma.async_copy_global_to_shared(q, [row + group * ROWS, head * D], q_full.index(group), q_tiles.index(group))
    for j in range(blocks):
        stage, phase, n = j % STAGES, (j // STAGES) & 1, head // G * S + (blocks - 1 - j) * BLOCK_N
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
        tma.async_copy_global_to_shared(k, [n, 0], k_full.index(stage), k_tiles.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
        tma.async_copy_global_to_shared(v, [n, 0], v_full.index(stage), v_tiles.index(stage))


@jit
def _softmax(scores, row_max, row_sum, last, n, qk_scale, BLOCK_N: gl.constexpr, MASK: gl.constexpr, LAYOUT: gl.constexpr):
    """Add scores to the running softmax: returns their weights, the maximum, the sum, and the factor to rescale the result so
    far. last: the last position that each row sees."""
    if MASK:
        offs_n = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        scores = gl.where(offs_n[None, :] <= last[:, None], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    p = gl.exp2(scores * qk_scale - (new_max * qk_scale)[:, None])
    rescale = gl.exp2((row_max - new_max) * qk_scale)
    return p, new_max, row_sum * rescale + gl.sum(p, 1), rescale


@jit
def _clear_rows(tile, first, ROWS: gl.constexpr):
    """Set a tile's rows to zero from `first` on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    values = tile.load(LAYOUT)
    tile.store(gl.where(rows[:, None] < first, values, gl.zeros_like(values)))
    fence_async_shared()


@jit
def _step(
    j, blocks, q, p, acc, row_max, row_sum, last, qk_scale, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr,
    SCORES: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Block j: its q k^T and the p v of the block before are started together, and its softmax overlaps the latter."""
    k, v = j % STAGES, (j - 1) % STAGES
    mbarrier.wait(k_full.index(k), (j // STAGES) & 1)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    scores = warpgroup_mma(q, k_tiles.index(k).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v), ((j - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v_tiles.index(v), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(k), count=1)
    n = (blocks - 1 - j) * BLOCK_N
    p_next, row_max, row_sum, rescale = _softmax(scores, row_max, row_sum, last, n, qk_scale, BLOCK_N, MASK, SCORES)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    mbarrier.arrive(v_empty.index(v), count=1)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, ACC))[:, None]
    return gl.convert_layout(p_next.to(q.dtype), gl.DotOperandLayout(0, ACC, 2)), acc, row_max, row_sum


@jit
def _multiply(
    group, out, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty,
    pos, T, qk_scale, S, H, G, positions_at_once,
    D: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One of the two groups that multiply."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    row, head, start_pos, blocks = _place(pos, T, H, G, positions_at_once, 2 * ROWS, BLOCK_N)
    row += group * ROWS
    last = start_pos + row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    masked = blocks - (start_pos + row + 1) // BLOCK_N  # blocks that some row does not see whole
    row_max = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, SCORES))  # finite: the first block may be beyond all rows
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, D], gl.float32, ACC)
    q = q_tiles.index(group)
    # The first block, which has no p v before it
    mbarrier.wait(q_full.index(group), 0)
    mbarrier.wait(k_full.index(0), 0)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    scores = warpgroup_mma(q, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False)
    mbarrier.arrive(k_empty.index(0), count=1)
    n = (blocks - 1) * BLOCK_N
    p, row_max, row_sum, rescale = _softmax(scores, row_max, row_sum, last, n, qk_scale, BLOCK_N, True, SCORES)
    p = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, ACC, 2))
    # Its values beyond the length get weight 0, but 0 * NaN is NaN. Both groups clear them, so neither waits for the other
    if blocks * BLOCK_N > start_pos + T:
        mbarrier.wait(v_full.index(0), 0)
        _clear_rows(v_tiles.index(0), start_pos + T - n, BLOCK_N)
    # The other blocks on the diagonal
    for j in range(1, masked):
        p, acc, row_max, row_sum = _step(
            j, blocks, q, p, acc, row_max, row_sum, last, qk_scale, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
            ROWS, BLOCK_N, STAGES, True, SCORES, ACC,
        )  # fmt: skip
    # The blocks that every row sees whole
    for j in range(gl.maximum(masked, 1), blocks):
        p, acc, row_max, row_sum = _step(
            j, blocks, q, p, acc, row_max, row_sum, last, qk_scale, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
            ROWS, BLOCK_N, STAGES, False, SCORES, ACC,
        )  # fmt: skip
    # The last p v; the result is written out through q's buffer, which nothing reads any more
    v = (blocks - 1) % STAGES
    mbarrier.wait(v_full.index(v), ((blocks - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v_tiles.index(v), acc)
    acc = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, ACC))[:, None]
    q.store(acc.to(q.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, head * D], q)
    tma.store_wait(0)


@jit(do_not_specialize=["T", "S", "H", "G", "positions_at_once"])
def _hopper_attention_kernel(
    q, k, v, out, pos, T, qk_scale, S, H, G, positions_at_once,
    D: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, ROWS, D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, BLOCK_N, D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, BLOCK_N, D], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(2):
        mbarrier.init(q_full.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (_multiply, (0, out, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, pos, T, qk_scale,
                         S, H, G, positions_at_once, D, ROWS, BLOCK_N, STAGES)),
            (_multiply, (1, out, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, pos, T, qk_scale,
                         S, H, G, positions_at_once, D, ROWS, BLOCK_N, STAGES)),
            (_load, (q, k, v, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, pos, T,
                     S, H, G, positions_at_once, D, ROWS, BLOCK_N, STAGES)),
        ],
        [4, 1],  # warps of the second and the third group
        [240, 24],  # and their registers per thread; the first group has what is left, 240
    )  # fmt: skip


def attends(q: Tensor) -> bool:
    """Whether the kernel is meant for such heads, and the prompt is long enough to gain from it."""
    return gluon is not None and len(q) >= 512 and q.shape[2] == HEAD_DIM and q.itemsize == 2


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, pos: Tensor, positions_at_once: int) -> None:
    """As kernels.attention, for heads of dimension 128 and a cache in the type of q, into out [T, H D]. positions_at_once: how
    many positions of one key/value head take up kernels.SHARED_KEYS."""
    (T, H, D), (KH, S, _) = q.shape, k_cache.shape
    kind = getattr(gl, str(q.dtype).removeprefix("torch."))

    def tiles(x: Tensor, rows: int, columns: int, block: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([block, D], kind)
        return TensorDescriptor(x, [rows, columns], [columns, 1], [block, D], layout)

    keys, values = (tiles(cache, KH * S, D, BLOCK_N) for cache in (k_cache, v_cache))
    descriptors = (tiles(q, T, H * D, ROWS), keys, values, tiles(out, T, H * D, ROWS))
    grid, sizes = (triton.cdiv(T, 2 * ROWS) * H,), dict(D=D, ROWS=ROWS, BLOCK_N=BLOCK_N, STAGES=2)
    qk_scale = math.log2(math.e) / math.sqrt(D)
    _hopper_attention_kernel[grid](*descriptors, pos, T, qk_scale, S, H, H // KH, positions_at_once, **sizes, num_warps=4)
