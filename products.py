"""Products: y = x W^T or rmsnorm(x) W^T, of one token, a few, or a prompt.

Read in this order:

    rmsnorm         what comes before most products; for 8-bit tensor cores, x as codes
    linear_ref      the reference. cards/cpu.py has what is fast on a CPU
    epilogues       what an op multiplies is a Product; what it does with y is a function, which a
                    kernel calls with its part of y
    stacks          of several matrices in W, some are multiplied (experts)
    half precision  the arithmetic of 8-bit codes with one token; skip it at first
    one token       bound by reading W: the kernel streams W's rows once and does everything else on
                    the way. Formats with codes in groups have theirs in bits/stream.py
    a few tokens    with 2 to 16, tensor cores multiply W as it streams by
    many tokens     up to 128, or those of experts: W is decoded tile by tile
    launching       which of these kernels is chosen, and how its work is divided
    a prompt        the library's product between small fused kernels. With many tokens it is
                    compute-bound, and runs at the card's product rate (BENCHMARKS.md)

A kernel is told how W is stored, and what an op does with y: FORMAT, a formats.Format, and EPILOGUE
are objects whose functions it calls. It adds the bias [N] before the epilogue; without one, None is
passed, and the kernel is compiled without that step."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bits.stream import stream_kernel
from cards import cpu, hopper
from cards.sizes import (
    FewSizes,
    ManySizes,
    few_sizes,
    many_sizes,
    stream_sizes,
    vector_sizes,
)
from formats import (
    PLAIN,
    Experts,
    Format,
    Matrix,
    as_floats,
    block_of,
    columns_of,
    format_of,
    half2_products,
    load_vector,
    row_scale,
)
from fp8 import E4M3, E4M3_NATIVE, Float8
from launch import (
    EMULATED,
    begin_single,
    cache_key,
    capability,
    constexpr,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    launch,
    prepared,
    processors,
    rows_and_tokens,
    tl,
    triton,
)

# ---- rmsnorm: y = x / sqrt(mean(x^2) + eps) * weight  (Zhang and Sennrich, 2019)
#      x [T, C], weight [C] -> [T, C]


# For addcmul, which multiplies three factors and rounds once
ZEROS = {t: torch.zeros((), dtype=t) for t in (torch.float32, torch.float16, torch.bfloat16)}


def rmsnorm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.is_cpu and x.numel() == weight.numel():
        return _rmsnorm_row(x, weight, eps)
    return functional.rms_norm(x, weight.shape, weight, eps)


def _rmsnorm_row(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One token on a CPU, in two calls of torch, whose own function makes a dozen."""
    length = float(torch.linalg.vector_norm(x, dtype=torch.float32))
    rms = math.sqrt(length**2 / x.numel() + eps)
    return torch.addcmul(ZEROS[x.dtype], x, weight, value=1 / max(rms, 1e-30))  # eps may be 0


@jit
def _rmsnorm_kernel(
    x, weight, out, scales, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, ENCODE: tl.constexpr, FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Normalise a row, if there is a weight, and store it in the type of `out`; if there are
    scales, as E4M3 codes with one scale for the row, by which its largest magnitude becomes 448. The
    columns are stored in the order of FORMAT."""
    gdc_launch_dependents(PDL)
    offs_c = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    columns = columns_of(offs_c, C, FORMAT)
    if weight is not None:
        weights = tl.load(weight + columns, mask=offs_c < C, other=0.0).to(tl.float32)
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(x + row * C + columns, mask=offs_c < C, other=0.0).to(tl.float32)
    if weight is not None:
        y = y * tl.rsqrt(tl.sum(y * y) / C + eps) * weights
    if scales is None:
        tl.store(out + row * C + offs_c, y.to(out.dtype.element_ty), mask=offs_c < C)
    else:
        peak = tl.maximum(tl.max(tl.abs(y)), 1e-30)
        tl.store(out + row * C + offs_c, ENCODE(y * (448 / peak)), mask=offs_c < C)
        tl.store(scales + row, peak / 448)


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ordered_rows(x, PLAIN, weight, eps)


def ordered_rows(
    x: Tensor, format: Format, weight: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """x [T, C], normalised where there is a weight, with its columns in the order in which the format
    stores them."""
    out = torch.empty_like(x)
    _launch_rmsnorm(x, weight, eps, out, None, format)
    return out


def encode_rows(x: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """x [T, C], normalised where there is a weight, as E4M3 codes, int8 [T, C], and scales, float32
    [T, 1]."""
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = x.new_empty(len(x), 1, dtype=torch.float32)
    _launch_rmsnorm(x, weight, eps, codes, scales)
    return codes, scales


def _launch_rmsnorm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    out: Tensor,
    scales: Tensor | None,
    format: Format = PLAIN,
) -> None:
    T, C = x.shape
    assert x.is_contiguous() and (weight is None or weight.shape == (C,)), x.shape
    block = max(8, triton.next_power_of_2(C))
    warps = min(16, max(1, block // 512))
    constants = dict(ENCODE=E4M3.on(x.device).encode_tile, FORMAT=format)
    sizes = dict(C=C, BLOCK=block, warps=warps)
    launch(_rmsnorm_kernel, (T,), x.device, x, weight, out, scales, eps, **sizes, **constants)


# ---- the reference


def linear_ref(x: Tensor, w: Matrix) -> Tensor:
    """y = x W^T + bias. x [T, K] -> [T, N]."""
    y = cpu.linear(x, w)
    return y if w.bias is None else y.add_(w.bias)


# ---- epilogues


class Product(NamedTuple):
    """What an op multiplies: y = rmsnorm(x) W^T, or x W^T without a norm."""

    op: str  # the name of its launch sizes
    x: Tensor
    w: Matrix
    norm: Tensor | None = None
    eps: float = 0.0

    def normed(self, in_order: bool = False) -> Tensor:
        """x, normalised where there is a norm. in_order: its columns lie as those of W are stored."""
        format = format_of(self.w) if in_order else PLAIN
        if self.norm is None and format.column_at is None:
            return self.x
        return ordered_rows(self.x, format, self.norm, self.eps)


class Epilogue(NamedTuple):
    """What an op does with a product. A kernel gets it as a constant, EPILOGUE, and calls its two
    functions with tensors of the op's own, args. STORE_ROWS below is the simplest one."""

    # (args, rows, t, T, N, TOKENS, SIZES) -> ready: what need not wait for the product with these
    # rows, or pairs of rows. rows and t, the indices of tokens, broadcast to y's shape. Rows from N
    # on are not to be stored; N is at most how many the matrix has
    prepare: object
    # (args, y, ready, T, N, ROWS, TOKENS, SIZES), with y [ROWS, TOKENS], or [ROWS] with one token
    store: object
    sizes: tuple = ()  # a NamedTuple of ints: SIZES
    pairs: bool = False  # whether neighbouring rows belong together
    added: int | None = None  # which of args is added to y: [N] with one token, [T, N] with a few

    @property
    def cache_key(self) -> str:
        return cache_key(self)


@jit
def even_and_odd(y, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """The even and the odd rows of y."""
    if TOKENS == 1:
        return tl.split(y.reshape(ROWS // 2, 2))
    else:
        return tl.split(y.reshape(ROWS // 2, 2, TOKENS).permute(0, 2, 1))


@jit
def silu_mul(a, b):
    return a / (1.0 + tl.exp(-a)) * b


@jit
def prepare_rows(args, rows, t, T, N, TOKENS: tl.constexpr, SIZES: tl.constexpr):
    """The indices that store_rows needs. Were they computed after the product, ptxas would load
    W later, which costs 1% with several tokens."""
    return rows, t


@jit
def store_rows(args, y, ready, T, N, ROWS: tl.constexpr, TOKENS: tl.constexpr, SIZES: tl.constexpr):
    """Store y in args[0] [T, N]."""
    rows, t = ready
    tl.store(args[0] + t * N + rows, y.to(args[0].dtype.element_ty), mask=(rows < N) & (t < T))


STORE_ROWS = Epilogue(prepare_rows, store_rows)


# ---- stacks: matrices of equal shape in one Matrix, one after the other, as experts have them


class Choice(NamedTuple):
    """How the programs of a kernel choose a matrix of a stack. They get this as a constant, CHOICE."""

    # (args, WARPS, SIZES) -> the matrix for this program's slot, which is program_id(1), and the weight
    # of its product
    choose: object
    sizes: tuple  # a NamedTuple: SIZES

    @property
    def cache_key(self) -> str:
        return cache_key(self)


class Stack(NamedTuple):
    """Which matrices of a stack one token takes."""

    ids: Tensor | None  # int32 [k]; None if there is a single matrix
    rows: int  # of each matrix
    # How many parts x has, [summed, K], one for each matrix; their products are added up
    summed: int
    # How the kernel chooses the matrices, each of which multiplies x [1, K], and what from. It writes the
    # ids. The epilogue finds the matrix's slot in program_id(1), and its weight as the last of its args
    choice: Choice | None = None
    chosen_from: tuple[Tensor, ...] = ()

    @property
    def products(self) -> int:
        """How many products there are; those that are added up count as one."""
        return len(self.ids) if self.choice else 1


class Slots(NamedTuple):
    """Which matrices several tokens take. A token has k slots, each of which has chosen an
    expert."""

    order: Tensor | None = None  # int32 [T k]: the slots, sorted by expert
    counts: Tensor | None = None  # int32 [E]: how many slots each expert has
    experts: Experts | None = None  # None: there are none, and a token takes the whole matrix


# ---- half precision: the arithmetic of 8-bit codes with one token
#
#      At 8 bits per weight the arithmetic matters: an H200 reads 4.6e12 weights a second and
#      executes 33e12 fp32 operations, about 7 per weight. Decoding a code, widening it and
#      multiplying it takes 11 instructions. With half2 it takes 3 to 4: PTX converts two codes at a
#      time to a half2, multiplies it by a half2 of x in one instruction (fma.rn.f16x2), and adds up
#      eight products in half precision before the sum is widened to fp32.
#
#      This is sound only if the range is right. A half ends at 65504 and loses precision below
#      6e-5. So x is multiplied by a power of two, which is exact. It is chosen so that eight
#      products with codes of at most 448 stay below 65504, and those that matter lie far above
#      6e-5. _vector_kernel scales all of x alike, stream_kernel each 64 columns by themselves.
#      Eight neighbours of a row must be in one thread.

NORM_LIMIT = 30.0  # the largest norm weight; stream_kernel needs less than 32


def fit_norm(norm: Tensor, w: Matrix) -> None:
    """Move a power of two from norm weights into the matrix, which is exact, so that the largest
    weight is between half the limit and the limit: products in half precision then neither overflow
    nor lose small numbers. Does nothing if the matrix has no such products."""
    if not w.format or not (w.format.half2 or w.format.stream_sums):
        return
    peak = norm.abs().max().item()
    if not 0.0 < peak < math.inf:
        return
    factor = 2.0 ** math.ceil(math.log2(peak / NORM_LIMIT))
    norm.div_(factor)
    w.format.multiply(w.tensors, factor)


@cache
def half2_asm(half2: tuple[str, str]) -> str:
    """PTX that multiplies eight codes, in $2 and $3, by eight halves, in $4 to $7, and adds up the
    products in half precision. It puts the sum into $0, as a float, and zero into $1. half2: see
    formats.Format."""
    products = half2_products(half2, 2, 2, lambda word, half: 4 + 2 * word + half)
    total = "mov.b32 {a, b}, sums; add.f16 a, a, b; cvt.f32.f16 $0, a; mov.b32 $1, 0;"
    return f"{{ .reg .b16 a, b; .reg .b32 sums, p, q; {products} {total} }}"


_HALF2_REGISTERS = constexpr("=&r,=&r" + 6 * ",r")


@jit
def _half2_sums(w_tile, x_tile, FORMAT: tl.constexpr, HALF2_ASM: tl.constexpr):
    """Multiply codes [ROWS, BLOCK] by halves [1, BLOCK] and add up every eight neighbours: float32
    [ROWS, BLOCK / 8]. The interpreter returns all products, [ROWS, BLOCK]."""
    if EMULATED:
        return FORMAT.values(w_tile, FORMAT.scales_of).to(tl.float32) * x_tile.to(tl.float32)
    else:
        sums = tl.inline_asm_elementwise(
            HALF2_ASM, _HALF2_REGISTERS, [w_tile, x_tile], dtype=tl.int8, is_pure=True, pack=8
        )
        # The first four bytes of eight are the sum
        sums = sums.reshape(sums.shape[0], sums.shape[1] // 8, 2, 4)
        sums, _ = tl.split(sums.permute(0, 1, 3, 2))
        return as_floats(sums)


@jit
def _power_of_two(x):
    """The largest power of two that is not above x > 0."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@jit
def _range_of(
    x, x_tile, norm, eps, offs_k, K: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Returns the power of two by which x is multiplied for products in half precision, and 1 /
    rms(x), or 1 without a norm. With a norm the power follows from the root mean square,
    otherwise from the largest magnitude. x_tile: the first tile of x."""
    squares = x_tile.to(tl.float32) * x_tile.to(tl.float32)
    peaks = tl.abs(x_tile)
    for k in tl.static_range(BLOCK, K, BLOCK):
        x_next = load_vector(x, k, offs_k, K, BLOCK, FORMAT)
        squares += x_next.to(tl.float32) * x_next.to(tl.float32)
        peaks = tl.maximum(peaks, tl.abs(x_next))
    if norm is not None:
        # How far eight neighbours of rmsnorm(x), times the norm's weights, may exceed the root mean
        # square of 1, in the mean of their magnitudes. At worst the eight have all of x's energy.
        # Then each is sqrt(K / 8), and times NORM_LIMIT that is 960 for K = 8192, 1,920 for 32768
        CREST: tl.constexpr = 1024.0 if K <= 8192 else 2048.0
        inv_rms = tl.rsqrt(tl.sum(squares) / K + eps)
        power = _power_of_two(inv_rms) * (FORMAT.x_peak / CREST)
    else:
        inv_rms = tl.full([], 1.0, tl.float32)
        peak = tl.maximum(tl.max(peaks).to(tl.float32), 1e-30)
        power = _power_of_two(tl.minimum(FORMAT.x_peak / peak, 32768.0))
    return power, inv_rms


# ---- one token
#
#      Where W is a stack, some of its matrices are multiplied, of N rows and K columns each. With
#      CHOICE (w13), they are chosen on the way, and each multiplies the same x, in its own row of the
#      grid; otherwise (w2) `ids` says which they are. x has a part for each of SUMMED matrices, and
#      the products are added up. Without a stack, SUMMED is 1. launch.py says why the first waits
#      before it chooses, and the second reads the ids without a wait.


@jit
def _vector_kernel(
    x, norm, w, bias, eps, args, ids, chosen_from,
    N: tl.constexpr, K: tl.constexpr, SUMMED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WARPS: tl.constexpr, HALF2_ASM: tl.constexpr, CHOICE: tl.constexpr, FORMAT: tl.constexpr,
    EPILOGUE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: rmsnorm(x) W^T, or x W^T where norm is None, for ROWS rows of W, read BLOCK
    columns at a time. The norm's factor 1 / rms(x) is one number for all of x, so it is applied to
    the sums. For products in half precision, x is read twice, first for its range. args are
    those of the epilogue, which loads before the wait what it will store with."""
    row = tl.program_id(0) * ROWS
    first, weights = begin_single(ids, chosen_from, row, N, SUMMED, WARPS, CHOICE, PDL)
    if CHOICE is not None:
        args = args + weights
        if row >= N:
            return
    SIZES: tl.constexpr = EPILOGUE.sizes
    ready = prepared(args, row, 0, 1, N, ROWS, 1, EPILOGUE)
    rows = row + tl.arange(0, ROWS)
    start, scales = (), ()
    for slot in tl.static_range(SUMMED):
        start += ((tl.minimum(rows, N - 1).to(tl.int64) + first[slot])[:, None] * K,)
        if FORMAT.gain is not None and SUMMED > 1:
            scales += (row_scale(w, first[slot] + rows, rows < N, FORMAT.gain),)
    # Before the wait: fetch the first tiles of what no kernel writes. A thread gets eight
    # neighbours of W, as many as of a 16-bit x: otherwise 8-bit tiles would go through shared
    # memory to meet x
    w_tile = FORMAT.load(w, start[0], 0, None if K % BLOCK == 0 else K, BLOCK, 8, FORMAT)
    offs_k = tl.arange(0, BLOCK)[None, :]
    if norm is not None:
        norm_tile = load_vector(norm, 0, offs_k, K, BLOCK, FORMAT)
    if bias is not None:
        biases = tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    gdc_wait(PDL)
    if EPILOGUE.added is not None:
        added = tl.load(args[EPILOGUE.added] + rows, mask=rows < N, other=0.0).to(tl.float32)
    x_tile = load_vector(x, 0, offs_k, K, BLOCK, FORMAT)
    if HALF2_ASM is not None:
        x_all = x_tile if SUMMED == 1 else load_vector(x, 0, offs_k, SUMMED * K, BLOCK, FORMAT)
        power, inv_rms = _range_of(x, x_all, norm, eps, offs_k, SUMMED * K, BLOCK, FORMAT)
    elif norm is not None:
        squares = x_tile.to(tl.float32) * x_tile.to(tl.float32)
    for slot in tl.static_range(SUMMED):
        for k in tl.static_range(0, K, BLOCK):
            # The next tile of W is in flight while this one is multiplied
            w_now = w_tile
            if k + BLOCK < K:
                left = None if K % BLOCK == 0 else K - k - BLOCK
                w_tile = FORMAT.load(w, start[slot], k + BLOCK, left, BLOCK, 8, FORMAT)
            elif slot + 1 < SUMMED:
                left = None if K % BLOCK == 0 else K
                w_tile = FORMAT.load(w, start[slot + 1], 0, left, BLOCK, 8, FORMAT)
            x_now = x_tile
            if slot + k > 0:
                x_now = load_vector(x + slot * K, k, offs_k, K, BLOCK, FORMAT)
            if k > 0 and HALF2_ASM is None and norm is not None:
                squares += x_now.to(tl.float32) * x_now.to(tl.float32)
            x_now = x_now.to(tl.float32) if HALF2_ASM is None else x_now * power.to(x_now.dtype)
            if norm is not None:
                x_now *= norm_tile.to(x_now.dtype)
                if k + BLOCK < K:
                    norm_tile = load_vector(norm, k + BLOCK, offs_k, K, BLOCK, FORMAT)
            if HALF2_ASM is None:
                sums = FORMAT.values(w_now, FORMAT.scales_of).to(tl.float32) * x_now
            else:
                sums = _half2_sums(w_now, x_now.to(tl.float16), FORMAT, HALF2_ASM)
            if FORMAT.gain is not None and SUMMED > 1:
                sums *= scales[slot][:, None]
            if slot + k == 0:
                acc = sums
            else:
                acc += sums
    y = tl.sum(acc, 1)
    if HALF2_ASM is not None:
        y *= inv_rms / power
    elif norm is not None:
        y *= tl.rsqrt(tl.sum(squares) / K + eps)
    if FORMAT.gain is not None and SUMMED == 1:
        y *= row_scale(w, first[0] + rows, rows < N, FORMAT.gain)
    if bias is not None:
        y += biases
    if EPILOGUE.added is not None:
        y = added + y
    EPILOGUE.store(args, y, ready, 1, N, ROWS, 1, SIZES)


# ---- a few tokens
#
#      The instruction of the tensor cores (mma.m16n8k16) multiplies 16 rows of W by 8 tokens, 16
#      columns at a time. `tl.dot` usually takes its operands through shared memory, which 8-bit
#      weights would pass through twice, before and after decoding. Here each thread loads 16 bytes
#      of a row of W straight into the registers where the instruction expects them.
#
#      Four threads share a row. Of its 16 columns, the instruction expects from each of them:
#
#          thread     0             1              2              3
#          columns    0, 1, 8, 9    2, 3, 10, 11   4, 5, 12, 13   6, 7, 14, 15
#
#      But what a thread has loaded are neighbours: with 16-bit weights, thread 0 has columns 0 to
#      7, thread 1 has 8 to 15, and so on. That does not matter. Columns may be added up in any
#      order, as long as x has the same order. So the first instruction takes the first four columns
#      of each thread for those in the table, and the second instruction the next four.
#
#      The compiler is told this by relabelling, in which no element moves. A tile is loaded as a
#      matrix. Its columns are the neighbours that a thread has. Its rows count everything else:
#      lanes fastest, then warps, then registers. reshape splits both, and permute puts together
#      what makes up the rows of W, and what makes up its columns.
#
#      The warps of a program share its rows and split the columns; a sum over the warps completes
#      the product. Tokens are padded to 8 or 16. The norm, where there is one, is a separate kernel
#      that runs first: while it runs, the first tiles of W are already in flight. With experts, which
#      tiles these are depends on the router, which has already normalised x.

MAX_FEW = 16  # tokens


@jit
def _load_few_weights(
    w, first, row, k: tl.constexpr, N, K: tl.constexpr, EACH: tl.constexpr, TILE: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Load TILE.rows rows of the matrix whose N rows begin at row `first` of W, from its `row` on,
    and of each of them TILE.warps * TILE.steps * 64 bytes from column k on. A thread gets EACH
    weights of a row. A warp loads TILE.lanes * 16 neighbouring bytes of a row at a time: with 8
    lanes, two times four threads are side by side in a row, and the compiler moves values between
    them."""
    GROUPS: tl.constexpr = TILE.rows // 8
    SIDES: tl.constexpr = TILE.lanes // 4
    i = tl.arange(0, TILE.steps * GROUPS * TILE.warps * 32)[:, None]
    lane, warp, register = i % 32, i // 32 % TILE.warps, i // (32 * TILE.warps)
    side = register % SIDES
    rows = row + register // SIDES % GROUPS * 8 + side * (8 // SIDES) + lane // TILE.lanes
    step = warp * TILE.steps + register // (SIDES * GROUPS) * SIDES
    col = k + step * (4 * EACH) + lane % TILE.lanes * EACH
    start = (tl.minimum(rows, N - 1).to(tl.int64) + first) * K
    left = None if k + TILE.warps * TILE.steps * 4 * EACH <= K else K - col
    return FORMAT.load(w, start, col, left, EACH, EACH, FORMAT)


@jit
def _weights_operand(tile, TILE: tl.constexpr):
    """A tile of W as [warps, rows, columns of a warp]."""
    EACH: tl.constexpr = tile.shape[1]
    SIDES: tl.constexpr = TILE.lanes // 4
    # Steps, groups of 8 rows, sides, warps, rows, sides, lanes; then of a thread's neighbours: runs
    # of 8, instructions, halves of an instruction's columns, pairs
    tile = tile.reshape(
        TILE.steps // SIDES, TILE.rows // 8, SIDES, TILE.warps, 8 // SIDES, SIDES, 4, EACH // 8, 2, 2, 2
    )  # fmt: skip
    if EACH == 8:
        tile = tile.permute(3, 1, 2, 4, 0, 5, 7, 8, 9, 6, 10)
    else:
        # Below 16 bits per weight, Triton's layout puts the lower halves of two instructions side by
        # side
        tile = tile.permute(3, 1, 2, 4, 0, 5, 7, 9, 6, 8, 10)
    return tile.reshape(TILE.warps, TILE.rows, TILE.steps * 4 * EACH)


@jit
def _tokens_operand(
    x, k: tl.constexpr, T, slots, K: tl.constexpr, TOKENS: tl.constexpr, EACH: tl.constexpr,
    TILE: tl.constexpr, FORMAT: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The columns of x that belong to such a tile, as [warps, columns of a warp, tokens], loaded
    with eight neighbours per thread. Where there are fewer tokens than TOKENS, the last one is
    repeated. With experts, `slots` points to the T slots whose rows of x these are."""
    PARTS: tl.constexpr = EACH // 8
    i = tl.arange(0, TOKENS // 8 * TILE.steps * PARTS * TILE.warps * 32)[:, None]
    e = tl.arange(0, 8)[None, :]
    lane, warp, register = i % 32, i // 32 % TILE.warps, i // (32 * TILE.warps)
    t = register // (TILE.steps * PARTS) * 8 + lane // 4
    step = warp * TILE.steps + register // PARTS % TILE.steps
    stored = k + step * (4 * EACH) + lane % 4 * EACH + register % PARTS * 8 + e
    cols = columns_of(stored, K, FORMAT)
    t = tl.minimum(t, T - 1)
    if EXPERTS is not None:
        t = tl.load(slots + t) // EXPERTS.shared
    pointers = x + t * K + cols
    if k + TILE.warps * TILE.steps * 4 * EACH <= K:
        tile = tl.load(pointers, eviction_policy="evict_last")
    else:
        tile = tl.load(pointers, mask=stored < K, other=0.0, eviction_policy="evict_last")
    tile = tile.reshape(TOKENS // 8, TILE.steps, EACH // 8, TILE.warps, 8, 4, 2, 2, 2)
    if EACH == 8:
        tile = tile.permute(3, 1, 2, 6, 7, 5, 8, 0, 4)
    else:
        tile = tile.permute(3, 1, 2, 7, 5, 6, 8, 0, 4)
    return tile.reshape(TILE.warps, TILE.steps * 4 * EACH, TOKENS)


@jit
def _few_kernel(
    x, w, bias, T, args, order, counts, N: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr,
    EACH: tl.constexpr, TILE: tl.constexpr, EXPERTS: tl.constexpr, FORMAT: tl.constexpr,
    EPILOGUE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """T tokens: x W^T for TILE.rows rows of W. See _vector_kernel for the epilogue.

    With experts, W is a stack of matrices of N rows. The programs of each row of the grid take one
    of those that were chosen, and the slots that chose it instead of T tokens. A router writes
    which these are, so they wait for it at once."""
    gdc_launch_dependents(PDL)
    row = tl.program_id(0) * TILE.rows
    first = 0
    slots = order
    if EXPERTS is not None:
        gdc_wait(PDL)
        offs_e = tl.full([TILE.warps, 1], 0, tl.int32) + tl.arange(0, EXPERTS.padded)[None, :]
        expert, begin, T = block_of(counts, offs_e, tl.program_id(1), TOKENS, EXPERTS)
        if T <= 0:
            return
        first = expert.to(tl.int64) * N
        slots += begin
        args = args + (slots,)
    SIZES: tl.constexpr = EPILOGUE.sizes
    ready = prepared(args, row, 0, T, N, TILE.rows, TOKENS, EPILOGUE)
    BLOCK: tl.constexpr = TILE.warps * TILE.steps * 4 * EACH
    # Without experts before the wait: the first tiles of W, the scales and the bias
    w_tiles = ()
    for k in tl.static_range(0, TILE.ahead * BLOCK, BLOCK):
        if k < K:
            w_tiles = w_tiles + (_load_few_weights(w, first, row, k, N, K, EACH, TILE, FORMAT),)
    if FORMAT.gain is not None:
        rows = row + tl.arange(0, TILE.rows)[:, None]
        scales = row_scale(w, first + rows, rows < N, FORMAT.gain)
    if bias is not None:
        offs_n = row + tl.arange(0, TILE.rows)[:, None]
        biases = tl.load(bias + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    if EXPERTS is None:
        gdc_wait(PDL)
    acc = tl.full([TILE.warps, TILE.rows, TOKENS], 0.0, tl.float32)
    for k in tl.static_range(0, K, BLOCK):
        w_tile = w_tiles[0]
        w_tiles = w_tiles[1:]
        if k + TILE.ahead * BLOCK < K:
            w_tiles = w_tiles + (
                _load_few_weights(w, first, row, k + TILE.ahead * BLOCK, N, K, EACH, TILE, FORMAT),
            )
        b = _tokens_operand(x, k, T, slots, K, TOKENS, EACH, TILE, FORMAT, EXPERTS)
        a = _weights_operand(FORMAT.values(w_tile, FORMAT.scales_of).to(b.dtype), TILE)
        if EMULATED:  # the interpreter's own bf16 products are wrong
            acc += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(a, b, acc)
    y = tl.sum(acc, 0)
    if FORMAT.gain is not None:
        y *= scales
    if bias is not None:
        y += biases
    if EPILOGUE.added is not None:
        rows, t = rows_and_tokens(row, TILE.rows, TOKENS)
        added = tl.load(args[EPILOGUE.added] + t * N + rows, mask=(rows < N) & (t < T), other=0.0)
        y += added.to(tl.float32)
    EPILOGUE.store(args, y, ready, T, N, TILE.rows, TOKENS, SIZES)


# ---- many tokens
#
#      Up to 64 or 128 tokens, or with experts, a matrix of fewer than 16 bits is decoded tile by tile:
#      on Hopper by cards/hopper.py, elsewhere, and in formats that it does not decode, by the kernel
#      here. launch.json says from how many tokens on the library is faster, which multiplies a
#      rewritten copy.
#
#      With experts, the slots are sorted by expert. The programs of a tile take a block of slots that
#      chose the same expert. Which expert and which slots these are follows from how many each expert
#      has. So the grid depends on numbers of tokens only, and can be captured: the programs beyond
#      the last block exit at once.


@jit
def _tile_of_x(x, rows, k, K: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr):
    """Rows of x in columns k to k + BLOCK_K as W has them: [ROWS, BLOCK_K]."""
    if FORMAT.column_at is None:
        offs_k = k + tl.arange(0, BLOCK_K)
        pointers = x + rows[:, None] * K + offs_k[None, :]
        if K % BLOCK_K == 0:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=offs_k[None, :] < K, other=0.0)
    else:
        runs = tl.arange(0, BLOCK_K // 8)[:, None] * 8
        stored = k + runs + tl.arange(0, 8)[None, :]
        columns = columns_of(stored, K, FORMAT)
        pointers = x + rows[:, None, None] * K + columns[None, :, :]
        tile = tl.load(pointers, mask=(stored < K)[None, :, :], other=0.0)
        return tile.reshape(rows.shape[0], BLOCK_K)


@jit
def _many_kernel(
    x, x_scales, w, bias, T, args, order, counts, N: tl.constexpr, K: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, FORMAT: tl.constexpr, EPILOGUE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to TOKENS of T tokens, or slots of an expert, times ROWS rows of W. With x_scales, the
    scales of its rows, x and W are 8-bit floats."""
    gdc_launch_dependents(PDL)
    row = tl.program_id(0) * ROWS
    rows = row + tl.arange(0, ROWS)
    offs_t = tl.arange(0, TOKENS)
    gdc_wait(PDL)
    if EXPERTS is None:
        begin = tl.program_id(1) * TOKENS
        x_rows = tl.minimum(begin + offs_t, T - 1).to(tl.int64)
        w_rows = tl.minimum(rows, N - 1).to(tl.int64)
    else:
        offs_e = tl.arange(0, EXPERTS.padded)[None, :]
        expert, first, T = block_of(counts, offs_e, tl.program_id(1), TOKENS, EXPERTS)
        if T <= 0:
            return
        begin = 0
        slots = order + first
        args = args + (slots,)
        x_rows = (tl.load(slots + tl.minimum(offs_t, T - 1)) // EXPERTS.shared).to(tl.int64)
        w_rows = expert.to(tl.int64) * N + tl.minimum(rows, N - 1)
    start = w_rows[:, None] * K
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for k in tl.range(0, K, BLOCK, num_stages=STAGES):
        w_tile = FORMAT.load(w, start, k, None if K % BLOCK == 0 else K - k, BLOCK, 8, FORMAT)
        x_tile = _tile_of_x(x, x_rows, k, K, BLOCK, FORMAT)
        if EMULATED:  # the interpreter's own bf16 products are wrong
            x_tile = x_tile.to(tl.float32)
        if x_scales is None:
            w_tile = FORMAT.values(w_tile, FORMAT.scales_of).to(x_tile.dtype)
        acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee")
    if x_scales is not None:
        acc *= tl.load(x_scales + x_rows)[None, :]
    if FORMAT.gain is not None:
        acc *= row_scale(w, w_rows, rows < N, FORMAT.gain)[:, None]
    if bias is not None:
        acc += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    if EPILOGUE.added is not None:
        offs_n, t = rows_and_tokens(row, ROWS, TOKENS)
        t += begin
        added = tl.load(
            args[EPILOGUE.added] + t * N + offs_n, mask=(offs_n < N) & (t < T), other=0.0
        )
        acc += added.to(tl.float32)
    SIZES: tl.constexpr = EPILOGUE.sizes
    ready = prepared(args, row, begin, T, N, ROWS, TOKENS, EPILOGUE)
    EPILOGUE.store(args, acc, ready, T, N, ROWS, TOKENS, SIZES)


# ---- launching


def is_fused(product: Product) -> bool:
    """Whether launch_product has a kernel for it. Otherwise the product is the library's: with
    several tokens in fp32, with more than MAX_FEW in 16 bits, and where launch.json says so."""
    T = len(product.x)
    return T == 1 or kernel_sizes(product, T) is not None


def launch_product(product: Product, epilogue: Epilogue, args: tuple) -> None:
    """A product handed to an epilogue, where is_fused says so. args: of the epilogue."""
    T = len(product.x)
    if T == 1:
        launch_single(product, epilogue, args)
        return
    sizes = kernel_sizes(product, T)
    if isinstance(sizes, FewSizes):
        launch_few(product, epilogue, args, sizes, T)
    else:
        launch_many(product, epilogue, args, sizes)


def launch_single(
    product: Product, epilogue: Epilogue, args: tuple, stack: Stack | None = None
) -> None:
    """launch_product of one token; with a stack, of some of its matrices."""
    op, x, w, norm, eps = product
    assert stack is None or w.bias is None, "matrices of a stack have no bias"
    stack = stack or Stack(None, w.rows, 1)
    format = format_of(w)
    aligned = x.element_size() == 2 and x.data_ptr() % 16 == 0
    in_half2 = aligned and w.columns % format.weights_per_thread == 0
    if in_half2 and format.stream_load:
        kernel, grid, constants = _stream_plan(op, w, stack)
    else:
        kernel, grid, constants = _vector_plan(op, w, format, stack, in_half2)
    if stack.choice:  # one more program for each slot, which has no rows, and writes the id
        grid = (grid[0] + 1, grid[1])
    args = (x, norm, w.tensors, w.bias, eps, args, stack.ids, stack.chosen_from)
    constants |= dict(SUMMED=stack.summed, CHOICE=stack.choice)
    _launch(kernel, grid, args, w, stack.rows, epilogue, **constants)


def _vector_plan(op: str, w: Matrix, format: Format, stack: Stack, in_half2: bool) -> tuple:
    """The kernel, its grid and its constants. in_half2: whether x allows products in half precision."""
    K = w.columns
    sizes = vector_sizes(w.data.device, w.bits, op, K)
    least = 32 * format.weights_per_thread  # columns that a warp takes at once
    block = min(sizes.block, max(least, triton.next_power_of_2(K)))
    warps = min(sizes.warps, max(1, block // least))
    asm = None
    if in_half2 and format.half2 and block >= least * warps:
        asm = half2_asm(format.half2)
    constants = dict(WARPS=warps, ROWS=sizes.rows, BLOCK=block, HALF2_ASM=asm, warps=warps)
    grid = (triton.cdiv(stack.rows, sizes.rows), stack.products)
    return _vector_kernel, grid, constants


def _stream_plan(op: str, w: Matrix, stack: Stack) -> tuple:
    device, K = w.data.device, w.columns * stack.summed
    sizes = stream_sizes(device, w.bits, op, K)
    block = stream_block(sizes.block, K)
    programs = processors(device) * sizes.programs
    tiles = min(32, triton.cdiv(stack.rows * stack.products, sizes.rows * programs))
    constants = dict(
        ROWS=sizes.rows,
        TILES=tiles,
        BLOCK=block,
        STAGES=sizes.stages,
        warps=block // 2048,
    )
    grid = (triton.cdiv(stack.rows, sizes.rows * tiles), stack.products)
    return stream_kernel, grid, constants


def stream_block(block: int, columns: int) -> int:
    """How many columns a program takes at a time: no more than there are, but at least a third of
    them, since x stays in registers."""
    block = min(block, max(2048, triton.next_power_of_2(columns)))
    return max(block, triton.next_power_of_2(triton.cdiv(columns, 3)))


def kernel_sizes(product: Product, tokens: int) -> FewSizes | ManySizes | None:
    """How _few_kernel or a kernel of many divides the product of so many tokens, of which each may have
    several rows of x, one for each of its experts. Returns None for another way to compute it.

    many_kernel multiplies even a few tokens where it is faster: launch.json has sizes for it. It turns
    nearly all of the L1 into shared memory, also for the kernels between its launches, and _few_kernel
    needs the L1: beside many_kernel it may take 1.6 times as long. So where a model mixes formats,
    _few_kernel multiplies all of them."""
    op, x, w, *_ = product
    many = many_sizes_of(product, tokens)
    if tokens > MAX_FEW or x.element_size() != 2 or many and not format_of(w).mixed:
        return many
    return few_sizes(x.device, w.bits, op, w.shape, _padded(tokens)) or many


def _padded(tokens: int) -> int:
    """How many tokens tensor cores multiply."""
    return 8 if tokens <= 8 else MAX_FEW


def launch_few(
    product: Product,
    epilogue: Epilogue,
    args: tuple,
    sizes: FewSizes,
    tokens: int,
    slots: Slots = Slots(),
) -> None:
    """launch_product of a few tokens; with slots, of theirs with the matrices of their experts."""
    w, K = product.w, product.w.columns
    order, counts, experts = slots
    rows, count, blocks = w.rows, tokens, 1
    if experts:
        assert w.bias is None, "matrices of experts have no bias"
        rows, count = w.rows // experts.count, len(order)
        blocks = min(count, experts.count)
    each = triton.next_power_of_2(16 * 8 // w.bits)  # weights that a thread loads at once
    warps = min(sizes.warps, max(1, triton.next_power_of_2(K) // (4 * each * sizes.steps)))
    constants = dict(
        TOKENS=_padded(tokens),
        EACH=each,
        TILE=sizes._replace(warps=warps),
        EXPERTS=experts,
        warps=warps,
    )
    grid = (triton.cdiv(rows, sizes.rows), blocks)
    args = (product.normed(), w.tensors, w.bias, count, args, order, counts)
    _launch(_few_kernel, grid, args, w, rows, epilogue, **constants)


# Up to so many rows of x without a norm are put into W's order as they are copied. With more, bank
# conflicts cost more than a kernel that reorders x first
ORDERED_IN_COPY = 32


@cache
def _arrived(device: torch.device, tiles: int) -> Tensor:
    """Counters of the programs that share a tile of many_kernel. A device runs one product at a
    time."""
    return torch.zeros(tiles, dtype=torch.int32, device=device)


def many_sizes_of(product: Product, tokens: int) -> ManySizes | None:
    """How a product of so many tokens is divided. Returns None where another way is faster."""
    x, w = product.x, product.w
    if not w.format or x.element_size() != 2:
        return None
    sizes = many_sizes(x.device, w.bits, "dense", tokens)
    # Hopper's sizes are for its own kernel, which does not take every matrix
    if sizes and capability(x.device) == 90 and not _columns_on_hopper(x, w, sizes):
        return None
    return sizes


def launch_many(
    product: Product,
    epilogue: Epilogue,
    args: tuple,
    sizes: ManySizes,
    slots: Slots = Slots(),
    x_scales: Tensor | None = None,
) -> None:
    """launch_product of many tokens; with slots, of theirs with the matrices of their experts. With
    x_scales, x and W are E4M3 codes."""
    w = product.w
    order, counts, experts = slots
    rows, count = w.rows, len(product.x)
    blocks = triton.cdiv(count, sizes.block)
    if experts:
        assert w.bias is None, "matrices of experts have no bias"
        rows, count = w.rows // experts.count, len(order)
        blocks = min(count, triton.cdiv(count, sizes.block) + experts.count - 1)
    row_tiles = triton.cdiv(rows, sizes.rows)
    constants = dict(TOKENS=sizes.block, ROWS=sizes.rows, EXPERTS=experts, warps=sizes.warps)
    last = (w.bias, count, args, order, counts)
    columns = _columns_on_hopper(product.x, w, sizes)
    if columns:
        ordered = product.norm is not None or sizes.block > ORDERED_IN_COPY
        x = product.normed(in_order=True) if ordered else product.x
        constants |= dict(X_FORMAT=PLAIN if ordered else format_of(w))
        programs = processors(x.device) * sizes.programs
        shared = (None, None)
        if not experts:
            tiles = blocks * row_tiles
            if tiles < programs:  # equal parts of each
                programs = tiles * min(programs // tiles, w.columns // columns)
            sums = x.new_empty(programs, sizes.block * sizes.rows, dtype=torch.float32)
            shared = (sums, _arrived(x.device, tiles))
        constants |= dict(COLUMNS=columns, STAGES=hopper.stages(w, sizes, columns))
        constants |= dict(maxnreg=hopper.registers(sizes.warps, sizes.programs))
        codes = hopper.codes_descriptor(w, sizes, columns)
        args = (x, codes, w.tensors, *last, *shared)
        _launch(hopper.many_kernel, (programs,), args, w, rows, epilogue, **constants)
    else:
        x = product.normed()
        block = max(64, min(sizes.columns, 128) * 2 // x.element_size())
        constants |= dict(BLOCK=block, STAGES=min(4, sizes.stages))
        args = (x, x_scales, w.tensors, *last)
        _launch(_many_kernel, (row_tiles, blocks), args, w, rows, epilogue, **constants)


def _columns_on_hopper(x: Tensor, w: Matrix, sizes: ManySizes) -> int:
    """How many columns cards/hopper.py takes at a time. Returns 0 where it does not decode W."""
    groups = format_of(w).groups
    decodes = groups is not None and min(groups, default=32) >= 32
    if capability(x.device) != 90 or not decodes or x.element_size() != 2:
        return 0
    columns = math.gcd(w.columns, sizes.columns)
    return columns if columns >= min(sizes.columns, 128) else 0


def _launch(
    kernel, grid: tuple, args: tuple, w: Matrix, rows: int, epilogue: Epilogue, **constants
) -> None:
    """grid: programs that share the rows of a matrix, then matrices or blocks of tokens or slots; in
    cards/hopper.py all programs. args: of the kernel, x first. rows: of W, or of each matrix in it."""
    x = args[0]
    assert x.shape[-1] == w.columns and x.is_contiguous(), (x.shape, w.shape)
    launch(
        kernel,
        grid,
        x.device,
        *args,
        N=rows,
        K=w.columns,
        **constants,
        FORMAT=format_of(w),
        EPILOGUE=epilogue,
    )


# ---- a prompt


@jit
def _recode_kernel(
    w, out, scales, N, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    ENCODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Decode BLOCK columns of ROWS rows to the type of `out` or, where there are scales, to E4M3
    codes and the rows' scales."""
    gdc_launch_dependents(PDL)
    rows = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), N - 1).to(tl.int64)
    k = tl.program_id(1) * BLOCK
    tile = FORMAT.load(w, rows[:, None] * K, k, K - k, BLOCK, 8, FORMAT)
    y = FORMAT.values(tile, FORMAT.scales_of).to(tl.float32).reshape(ROWS, BLOCK // 8, 8)
    offs_k = k + tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    mask = (offs_k < K)[None, :, :]
    pointers = out + rows[:, None, None] * K + columns_of(offs_k, K, FORMAT)[None, :, :]
    scale = tl.full([ROWS], 1.0, tl.float32)
    if FORMAT.gain is not None:
        scale = row_scale(w, rows, rows >= 0, FORMAT.gain)
    gdc_wait(PDL)  # only now, since no kernel writes weights
    if scales is None:
        tl.store(pointers, (y * scale[:, None, None]).to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(pointers, ENCODE(y * (256.0 / FORMAT.e4m3_bound)), mask=mask)
        tl.store(scales + rows, scale * (FORMAT.e4m3_bound / 256.0))


def recode(w: Matrix, out: Tensor, scales: Tensor | None) -> None:
    N, K = w.shape
    block = min(4096, triton.next_power_of_2(K))
    rows = 4096 // block
    launch(
        _recode_kernel,
        (triton.cdiv(N, rows), triton.cdiv(K, block)),
        out.device,
        w.tensors,
        out,
        scales,
        N,
        K=K,
        ROWS=rows,
        BLOCK=block,
        FORMAT=format_of(w),
        ENCODE=E4M3.on(out.device).encode_tile,
        warps=4,
    )


def as_e4m3(w: Matrix) -> Matrix:
    """W with weights rounded to E4M3, if they are not stored in that format."""
    if w.format is E4M3:
        return w
    tensors = E4M3.empty(*w.shape, w.data.device)
    recode(w, *tensors)
    return Matrix(tensors, E4M3)


def dense_for(w: Matrix, x: Tensor) -> Tensor:
    """W [N, K] in the type of x, decoded on a GPU if it has a format."""
    if not w.format:
        return w.data
    out = x.new_empty(w.rows, w.columns)
    recode(w, out, None)
    return out


@cache
def _cublas_scales_rows(device: torch.device) -> bool:
    """Whether cuBLAS multiplies 8-bit floats with one scale per row, as it does on Hopper from CUDA
    12.9 on: E4M3 by either format, into any type. Elsewhere torch has its own kernel, for E4M3,
    whose result is bfloat16."""
    version = tuple(map(int, (torch.version.cuda or "0").split(".")))
    return device.type == "cuda" and capability(device) // 10 == 9 and version >= (12, 9)


def tensor_core_format(w: Matrix, accumulate: str = "auto") -> Float8 | None:
    """The 8-bit floats in which tensor cores multiply a prompt by W: its own or, for formats that
    allow it unless `accumulate` asks for the most precise sums, E4M3. None if the prompt is
    multiplied in its own type."""
    if not w.format or w.rows % 16 or w.columns % 16:
        return None
    if isinstance(w.format, Float8):
        multiplied = w.format
    elif w.format.e4m3_bound > 0 and accumulate != "fp32":
        multiplied = E4M3
    else:
        return None
    device = w.data.device
    if multiplied.on(device) is E4M3_NATIVE or _cublas_scales_rows(device):
        return multiplied
    return None


def copy_bytes(w: Matrix, dtype: torch.dtype, accumulate: str) -> int:
    """What library_product allocates to multiply by W: a copy in 8-bit floats, or one decoded to
    dtype, the type of x. 0 if W is multiplied as it is stored."""
    multiplied = tensor_core_format(w, accumulate)
    if multiplied is w.format:
        return 0
    if multiplied is None:
        return w.rows * w.columns * dtype.itemsize
    return multiplied.nbytes(*w.shape)


def tensor_core_linear(
    codes: Tensor,
    scales: Tensor,
    w: Matrix,
    dtype: torch.dtype,
    accumulate: str,
    out: Tensor | None = None,
) -> Tensor:
    """x W^T on 8-bit tensor cores, x given as codes and scales: [T, K] -> [T, N], in dtype where
    the library supports that; stored in `out`, if it is given and of that type.

    Hopper's tensor cores accumulate products of 8-bit floats with about 14 bits, unless the sums
    are moved to fp32 registers every few products (accumulate "fp32"), which costs a tenth of the
    speed. The error, a mean square of 2e-6 to 6e-6 of the result's, is a hundredth of that from
    rounding the activations."""
    if not isinstance(w.format, Float8):
        w = as_e4m3(w)
    if not _cublas_scales_rows(w.data.device):
        dtype = torch.bfloat16
    if out is None or out.dtype != dtype:
        out = torch.empty(len(codes), w.rows, dtype=dtype, device=codes.device)
    return torch._scaled_mm(
        codes.view(E4M3.dtype),
        w.data.view(w.format.dtype).t(),
        scales,
        w.tensors[1].t(),
        out_dtype=dtype,
        use_fast_accum=accumulate != "fp32",
        out=out,
    )


def library_product(
    product: Product, accumulate: str, out: Tensor | None = None, added: bool = False
) -> Tensor:
    """A product by the library, for T > 1; stored in `out` or added to it, if it is given.
    accumulate="fp16" sums in half precision, which is twice as fast on GeForce tensor cores; a sum
    that overflows is inf in the library, and 65504 here. Products of 8-bit floats on tensor cores
    are never summed so."""
    _, x, w, norm, eps = product
    if tensor_core_format(w, accumulate):
        codes, scales = encode_rows(x, norm, eps)
        stored = None if added else out
        y = tensor_core_linear(codes, scales, w, x.dtype, accumulate, stored)
        if added:
            y = out.add_(y)
        elif out is not None:
            y = out.copy_(y)  # nothing to do if it was stored there
        return y if w.bias is None else y.add_(w.bias)
    x = product.normed()
    dense = dense_for(w, x)
    if accumulate != "fp16":
        return _dense_product(x, dense, w.bias, out, added)
    matmul = torch.backends.cuda.matmul  # whose switches are global
    before = matmul.allow_fp16_accumulation
    matmul.allow_fp16_accumulation = True
    try:
        return _dense_product(x, dense, w.bias, out, added).clamp_(-65504.0, 65504.0)
    finally:
        matmul.allow_fp16_accumulation = before


def _dense_product(
    x: Tensor, dense: Tensor, bias: Tensor | None, out: Tensor | None, added: bool
) -> Tensor:
    if out is None:
        return functional.linear(x, dense, bias)
    out.addmm_(x, dense.t(), beta=int(added))
    return out if bias is None else out.add_(bias)
