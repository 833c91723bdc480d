"""The product of one token in formats that have a `stream_load`.

A warp covers 2048 columns of a row, and each thread 64 of them, which are whole groups. A thread
keeps its part of x in registers, as half2, for all rows that its program goes through. It loads x
in eight runs of eight neighbours. The format decides which columns these are, in an order in which
a warp's loads should hit all banks of the L1 cache (int4._columns). Tiles of W have a single row,
so that every version of Triton picks the same layout for W and for x, and no data moves between
threads."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

from bits.groups import begin_of, half2_of, half_at
from formats import as_floats, load_vector, row_scale
from launch import EMULATED, begin_single, gdc_wait, jit, prepared, tl, triton


@jit
def _load_eighths(
    x, k, K: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr
):
    """Load x for BLOCK places from k on, of SUMMED matrices of K columns, as eight tiles [BLOCK /
    64, 8]. A thread gets the same row of each."""
    offs_k = tl.arange(0, BLOCK // 64)[:, None] * 64 + tl.arange(0, 8)[None, :]
    tiles = ()
    for eighth in tl.static_range(0, 64, 8):
        tiles += (load_vector(x, k, offs_k + eighth, K, BLOCK, FORMAT, SUMMED),)
    return tiles


@jit
def _join_eighths(t):
    """Join eight tiles [P, M] to one [P, 8 M]."""
    low = tl.join(tl.join(t[0], t[1]), tl.join(t[2], t[3]))
    high = tl.join(tl.join(t[4], t[5]), tl.join(t[6], t[7]))
    return tl.join(low, high).permute(0, 4, 3, 2, 1).reshape(t[0].shape[0], 8 * t[0].shape[1])


@jit
def _as_half2(tile):
    """Join neighbouring halves [P, 8] to half2 [P, 4]. The interpreter returns floats [P, 8]."""
    if EMULATED:
        return tile.to(tl.float32)
    else:  # an instruction for two neighbours makes the compiler keep them in one register
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], tl.float16, is_pure=True, pack=2
        )
        return half2_of(*tl.split(x.reshape(x.shape[0], 4, 2)))


@jit
def _squares(half2):
    """Sums of the squares of eight halves each, the even and the odd ones in half precision: [P, 4]
    to float32 [P]."""
    if EMULATED:
        return tl.sum(half2 * half2, 1)
    else:
        ASM: tl.constexpr = (
            "{ .reg .b16 a, b; .reg .b32 s; .reg .f32 f; mul.rn.f16x2 s, $1, $1; fma.rn.f16x2 s, $2, $2, s;"
            "fma.rn.f16x2 s, $3, $3, s; fma.rn.f16x2 s, $4, $4, s;"
            "mov.b32 {a, b}, s; cvt.f32.f16 $0, a; cvt.f32.f16 f, b; add.f32 $0, $0, f; }"
        )
        sums = tl.inline_asm_elementwise(ASM, "=&r,r,r,r,r", [half2], tl.int8, is_pure=True, pack=4)
        return tl.sum(as_floats(sums.reshape(sums.shape[0], 1, 4)), 1)


@jit
def _add_half2(a, b):
    return tl.inline_asm_elementwise(
        "add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, is_pure=True, pack=1
    )


@jit
def _sums(half2, EACH: tl.constexpr):
    """Sums of EACH neighbours: half2 [P, 32], or floats [P, 64] in the interpreter, to float32 [64
    P / EACH]. Within each four, the even ones and the odd ones are added in half precision, which
    saves 4% of a step of 1.1B."""
    P: tl.constexpr = half2.shape[0]
    fours = half2.reshape(16 * P, half2.shape[1] // 16)
    if EMULATED:
        sums = tl.sum(fours, 1)
    else:
        pairs = tl.reduce(fours, 1, _add_half2, keep_dims=True)
        sums = tl.sum(half_at(pairs, 0) + half_at(pairs >> 16, 0), 1)
    return tl.sum(sums.reshape(64 * P // EACH, EACH // 4), 1)


@jit
def _stream_x(
    x, norm_tiles, k, K: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Load BLOCK places of x, times the norm's weights if there is a norm. Each 64 of them are
    scaled by a power of two of their own, so that magnitudes stay below FORMAT.x_peak, as long as no norm
    weight is above products.NORM_LIMIT.

    Returns a tuple of x as half2, its sums by FORMAT.sum_x places and the factors that undo the
    scaling; and the sums of x's squares by 64, or zeros if there is no norm."""
    tiles = _load_eighths(x, k, K, SUMMED, BLOCK, FORMAT)
    half2 = ()
    squares = tl.zeros([BLOCK // 64], tl.float32)
    peak = tl.abs(tiles[0])
    for i in tl.static_range(1, 8):
        peak = tl.maximum(peak, tl.abs(tiles[i]))
    # The bits of 2^e, the power of two at or below each peak
    exponent = tl.max(peak, 1).to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(exponent, 0x7C000000)  # 2^121: so that 1 / 2^e is a normal float
    # Peaks are scaled to less than TOP. With a norm that is at most 32, for two reasons: _squares
    # adds up four squares in half precision, and the norm's weights may be as large as 32 themselves
    PEAK: tl.constexpr = FORMAT.x_peak
    TOP: tl.constexpr = PEAK if norm_tiles is None else min(PEAK, 1024) / 32
    # The rest of the way from 1024 to PEAK is multiplied into the norm's weights
    LIFT: tl.constexpr = 1.0 if norm_tiles is None else max(PEAK / 1024, 1.0)
    power = (0x7F000000 - exponent).to(tl.float32, bitcast=True)  # 1 / 2^e
    power = tl.minimum(power, 65536 / TOP) * (TOP / 2)  # at most 2^15, which a half can hold
    inverse = (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    for i in tl.static_range(0, 8):
        tile = tiles[i] * power.to(tiles[i].dtype)[:, None]
        if norm_tiles is not None:
            squares += _squares(_as_half2(tile.to(tl.float16)))
            tile *= norm_tiles[i].to(tile.dtype) * LIFT
        half2 += (_as_half2(tile.to(tl.float16)),)
    joined = _join_eighths(half2)
    flat = joined.reshape(joined.shape[0] * joined.shape[1])
    return (flat, _sums(joined, FORMAT.sum_x), inverse[None, :] / LIFT), squares * inverse * inverse


@jit
def _no_x(WIDTH: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """Zeros in the shape of what _all_of_x returns."""
    parts = ()
    for _ in tl.static_range(0, WIDTH, BLOCK):
        half2 = tl.zeros([BLOCK], tl.float32) if EMULATED else tl.zeros([BLOCK // 2], tl.uint32)
        sum_x = tl.zeros([BLOCK // FORMAT.sum_x], tl.float32)
        parts += ((half2, sum_x, tl.zeros([1, BLOCK // 64], tl.float32)),)
    return parts, tl.zeros([BLOCK // 64], tl.float32)


@jit
def _all_of_x(
    x, norm_tiles, squares, K: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """x in parts of BLOCK columns, each as _stream_x returns it, and `squares` with the squares of x
    added to them."""
    parts = ()
    for k in tl.static_range(0, SUMMED * K, BLOCK):
        norm_tile = norm_tiles[k // BLOCK] if len(norm_tiles) > 0 else None
        part, more = _stream_x(x, norm_tile, k, K, SUMMED, BLOCK, FORMAT)
        parts += (part,)
        squares += more
    return parts, squares


@jit
def _scales_side_by_side(
    w, first, rows, k, N, K: tl.constexpr, COLUMNS: tl.constexpr, GAIN: tl.constexpr
):
    """The factors of sums over rows of several matrices side by side, for each 64 columns from k
    on: [R, COLUMNS / 64]. rows [R, 1]"""
    offs_k = tl.arange(0, COLUMNS // 64)[None, :] * 64
    scale_rows = begin_of((rows, K, first), k, offs_k, COLUMNS, 1)
    return row_scale(w, scale_rows, scale_rows >= 0, GAIN)


@jit
def stream_kernel(
    x, norm, w, bias, eps, args, ids, chosen_from,
    N: tl.constexpr, K: tl.constexpr, SUMMED: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, CHOICE: tl.constexpr, FORMAT: tl.constexpr,
    EPILOGUE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What products._vector_kernel does, for a format with stream_load and stream_sums. A program
    loops over TILES tiles of ROWS rows. Triton's pipelining turns the loads of W in this loop into
    asynchronous copies to shared memory, STAGES - 1 tiles ahead, the first of them before the
    wait."""
    WARPS: tl.constexpr = BLOCK // 2048
    WIDTH: tl.constexpr = SUMMED * K  # columns of all matrices side by side
    row = tl.program_id(0) * (ROWS * TILES)
    first, weights = begin_single(ids, chosen_from, row, N, SUMMED, WARPS, CHOICE, PDL)
    if CHOICE is not None:
        args = args + weights
        if row >= N:
            return
    end = tl.minimum(row + ROWS * TILES, N)
    COUNT: tl.constexpr = max(32, triton.next_power_of_2(ROWS * TILES))
    offs = tl.arange(0, COUNT)
    SIZES: tl.constexpr = EPILOGUE.sizes
    ready = prepared(args, row, 0, 1, end, COUNT, 1, EPILOGUE)
    offsets = ()
    for slot in tl.static_range(SUMMED):
        offsets += ((first[slot] - slot) * K,)
    if FORMAT.gain is not None and SUMMED == 1:
        scales = row_scale(w, first[0] + row + offs, row + offs < end, FORMAT.gain)
    if bias is not None:
        biases = tl.load(bias + row + offs, mask=row + offs < end, other=0.0).to(tl.float32)
    norm_tiles = ()
    if norm is not None:
        for k in tl.static_range(0, WIDTH, BLOCK):
            norm_tiles += (_load_eighths(norm, k, K, SUMMED, BLOCK, FORMAT),)
    x_parts, squares = _no_x(WIDTH, BLOCK, FORMAT)  # until the wait
    PARTS: tl.constexpr = len(x_parts)
    EACH: tl.constexpr = ROWS if EMULATED else 1  # rows that are loaded together
    added = tl.zeros([COUNT], tl.float32)
    sums = tl.zeros([WARPS, COUNT], tl.float32)
    for i in tl.range(0, TILES, num_stages=STAGES):
        w_tiles, part_scales = (), ()
        for r in tl.static_range(0, ROWS, EACH):
            rows = tl.minimum(row + i * ROWS + r + tl.arange(0, EACH), N - 1).to(tl.int64)[:, None]
            start = (rows + first[0]) * K
            for k in tl.static_range(0, WIDTH, BLOCK):
                left = None if WIDTH % BLOCK == 0 else WIDTH - k
                if SUMMED == 1:
                    w_tiles += (FORMAT.stream_load(w, start, k, left, BLOCK, FORMAT),)
                else:
                    w_tiles += (
                        FORMAT.stream_load(w, (rows * K, K, offsets), k, left, BLOCK, FORMAT),
                    )
                if FORMAT.gain is not None and SUMMED > 1:
                    part_scales += (
                        _scales_side_by_side(w, first, rows, k, N, K, BLOCK, FORMAT.gain),
                    )
        if i == 0:
            gdc_wait(PDL)
            if EPILOGUE.added is not None:
                added = tl.load(args[EPILOGUE.added] + row + offs, mask=row + offs < end, other=0.0)
                added = added.to(tl.float32)
            x_parts, squares = _all_of_x(x, norm_tiles, squares, K, SUMMED, BLOCK, FORMAT)
        for r in tl.static_range(0, ROWS, EACH):
            acc = tl.zeros([EACH, BLOCK // 64], tl.float32)
            for j in tl.static_range(0, PARTS):
                w_tile = w_tiles[r // EACH * PARTS + j]
                x_part = x_parts[j]
                sums_of_tile = (
                    FORMAT.stream_sums(w_tile, x_part[0], x_part[1], FORMAT.scales_of) * x_part[2]
                )
                if FORMAT.gain is not None and SUMMED > 1:
                    sums_of_tile *= part_scales[r // EACH * PARTS + j]
                acc += sums_of_tile
            by_warp = tl.sum(acc.reshape(EACH, WARPS, 32), 2, keep_dims=True)
            place = (i * ROWS + r + tl.arange(0, EACH))[:, None, None]
            sums += tl.sum(tl.where(offs[None, None, :] == place, by_warp, 0.0), 0)
    y = tl.sum(sums, 0)
    if norm is not None:
        y *= tl.rsqrt(tl.sum(squares) / K + eps)
    if FORMAT.gain is not None and SUMMED == 1:
        y *= scales
    if bias is not None:
        y += biases
    if EPILOGUE.added is not None:
        y += added
    EPILOGUE.store(args, y, ready, 1, end, COUNT, 1, SIZES)
