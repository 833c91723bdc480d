"""What a matrix is: N rows and K columns, stored as its Format says.

A format is one block of functions and numbers, for torch and for kernels. Nothing else knows how it
stores a matrix. To add one, subclass Format, write its functions, and enter it in
settings.FORMAT_ROWS: it can then be loaded, saved, divided among ranks, and run with one token, a
few, or a prompt.

    code         a small integer, or an 8-bit float, that stands for a weight
    group        columns of a row that share a scale, and a minimum or a zero point: bits/groups.py
    half2        two halves in one 32-bit register; one instruction computes with both
    cpu_layout   a second copy of a matrix, as a CPU's library reads it"""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from launch import EMULATED, cache_key, jit, tl

Tensors = tuple[Tensor, ...]  # what a format stores for a matrix, codes first
Shapes = dict[str, tuple[torch.dtype, tuple[int, int]]]  # type and shape of each of these, by name


# ---- formats


@dataclass(frozen=True, eq=False)
class Format:
    """A way to store a matrix W [N, K]. Kernels receive the stored tensors as a tuple w, and the
    format as a constant, FORMAT, whose functions they call. They never look at how many tensors
    there are, or of which type.

    load(w, start, k, left, COLUMNS, NEIGHBOURS, FORMAT)
        A tile as stored, COLUMNS weights of each of its rows. start [R, 1]: where these rows begin
        in W, counted in weights; k: the first column, a number or [R, 1]; left: how many columns
        there are from there on, None if enough; NEIGHBOURS: how many weights a thread should get
        side by side, if possible; FORMAT: the format.
    values(tile, SCALES)
        The weights before `gain` and the row's scale: halves or floats [R, COLUMNS].
    scales_of(tile, SHIFT)
        SCALES of `values` and `stream_sums`. Float32 scales of a tile's groups, times 2^SHIFT, and
        their minimums or zero points, whichever these expect. None if there are no groups.
    gain
        All values are multiplied by it, and by the scale of their row, an element of the last
        tensor. None if rows have no scale.
    half2
        For products in half precision with one token (products.half2_asm), two pieces of PTX. The
        first puts the two codes in the lower half of register SOURCE as a half2 into p, the second
        those in the upper half. They may use a and b, of 16 bits, and q, of 32. None if there are
        no such products.
    column_at(places, K)
        The columns whose weights are stored in these places of a row. Runs of eight columns stay
        together. None if all are in order.

    These are enough for correct results. A few tokens and prompts are fast if each thread loads
    whole words, as in bits/codes4.py. One token is fast in bits/stream.py, which needs two more:

    stream_load(w, start, k, left, COLUMNS, FORMAT)
        A tile, of which each thread gets all that the products of 64 weights need. start may also
        be a tuple (rows, width, offsets): every `width` columns of a row lie elsewhere, those of
        part p at rows + offsets[p], where `rows` is [R, 1].
    stream_sums(tile, x, sum_x, SCALES)
        The tile's products with x, added up: float32 [R, COLUMNS / 64]. x: half2 [COLUMNS / 2], or
        floats [COLUMNS] in the interpreter; sum_x: the sums of each `sum_x` of them.
    """

    mixed: ClassVar[bool] = False  # whether models mix it with formats that need other kernels

    name: str
    bits: int  # per weight: launch sizes are listed by it
    load: Callable
    values: Callable
    scales_of: Callable | None = None
    gain: float | None = None
    half2: tuple[str, str] | None = None
    column_at: Callable | None = None
    stream_load: Callable | None = None
    stream_sums: Callable | None = None
    sum_x: int = 16  # see stream_sums
    weights_per_thread: int = 8  # weights that a thread must get for products in half precision
    x_peak: float = 16.0  # the largest magnitude to which x is scaled for them
    # How many columns share a scale. Where a matrix is cut by columns, each part has a multiple of
    # that
    group: int = 1
    # Once it is stored, a matrix of at least this many columns can only be cut at multiples of it
    whole: int = 1
    # A power of two above all that `values` returns, in a format that a prompt's product may round
    # to E4M3; 0 in others
    e4m3_bound: float = 0.0
    codes_each: int = 1  # codes in an element of the first tensor
    # How many columns share an element of each tensor but the first and, where rows have scales, the
    # last. None if the first tensor is not all of the codes. cards/hopper.py multiplies many tokens where
    # these are at least 32: it takes 8-bit codes in order, and 4-bit ones as bits/codes4.py has them
    groups: tuple[int, ...] | None = None

    @property
    def cache_key(self) -> str:
        return cache_key(getattr(self, field.name) for field in fields(self))

    def for_matrix(self, name: str) -> Format:
        """The format for the model's matrix of this name. A format may keep some of them in another
        one."""
        return self

    def shapes(self, N: int, K: int) -> Shapes:
        """Type and shape [N, M] of each stored tensor. M divides K: columns a to b of W are a M / K
        to b M / K of the tensor, rounded down and up."""
        raise NotImplementedError

    def empty(self, N: int, K: int, device: torch.device) -> Tensors:
        """Space for what is stored of a matrix."""
        return tuple(
            torch.empty(shape, dtype=dtype, device=device)
            for dtype, shape in self.shapes(N, K).values()
        )

    def nbytes(self, N: int, K: int) -> int:
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.shapes(N, K).values())

    def encode(self, weights: Tensor, out: Tensors | None = None) -> Tensors:
        """What is stored for weights [N, K], in the given tensors if any. Raises ValueError for NaN
        or inf."""
        raise NotImplementedError

    def write(self, rows: Quantised, out: Tensors) -> None:
        """Store rows that others have quantised, without changing a weight."""
        raise NotImplementedError

    def stored_weights(self, tensors: Tensors) -> Tensor:
        """The matrix as float32 [N, K], its columns in the order in which they are stored."""
        raise NotImplementedError

    def order(self, K: int, device: torch.device) -> Tensor | None:
        """The order in which the columns are stored, int64 [K]. Returns None if they are stored as
        they come."""

    def ordered(self, t: Tensor) -> Tensor:
        """[..., K] with its columns in that order."""
        order = self.order(t.shape[-1], t.device)
        if order is None:
            return t
        return t.gather(-1, order.expand(t.shape))

    def decoded(self, tensors: Tensors) -> Tensor:
        """The matrix as float32 [N, K]."""
        weights = self.stored_weights(tensors)
        order = self.order(weights.shape[1], weights.device)
        if order is None:
            return weights
        return weights.index_select(1, order.argsort())

    def check(self, tensors: Tensors) -> None:
        """Raise ValueError for scales that are not positive and finite, and for codes that are not
        finite."""
        scales = tensors[-1]
        if not ((scales > 0) & (scales < torch.inf)).all():
            raise ValueError("scales that are not positive and finite")

    def multiply(self, tensors: Tensors, factor: float) -> None:
        """Multiply the matrix, in place: the last tensor holds its scales, in float32."""
        tensors[-1].mul_(factor)

    def on(self, device: torch.device) -> Format:
        """The format as kernels on this device decode it."""
        return self

    def can_be_cut(self, K: int, part: int) -> bool:
        """Whether a stored matrix of K columns can be cut into parts of `part` columns each."""
        return part == K or self.whole > K or part % self.whole == 0

    def cpu_layout(self, tensors: Tensors) -> Tensors | None:
        """A copy of the matrix in the layout of torch's own bf16 product for few tokens on a CPU.
        Returns None if torch has no such product for it."""

    def cpu_layout_linear(self, x: Tensor, cpu_layout: Tensors) -> Tensor:
        """x W^T in bf16. x [T, K] -> [T, N]."""
        raise NotImplementedError

    def vector_linear(self, row: Tensor, tensors: Tensors) -> Tensor:
        """W times a row of floats [K], of magnitudes up to 1, on a CPU: [N] in float16 or
        float32."""
        row = self.ordered(row)
        parts = zip(*(t.split(512) for t in tensors))
        return torch.cat([torch.mv(self.stored_weights(part), row) for part in parts])


class Quantised(NamedTuple):
    """A matrix W [N, K] that others have quantised, as codes and, for groups of neighbouring
    columns, numbers that are halves in the file. In float32 their products are exact (a half times
    6 or 8 bits, times 4 to 8), so that W is what ggml decodes, bit for bit:

    W = scale * parts[0] * (code - zero) + minimum * parts[1]
    """

    codes: Tensor  # int8 [N, K]
    scale: Tensor  # float32 [N, groups]
    minimum: Tensor | None = None  # float32 [N, groups]; None stands for 0
    # Whole numbers that fit a byte, one for each part of a group: [N, parts]. None stands for 1
    parts: tuple[Tensor, Tensor] | None = None
    zero: Tensor | None = None  # whole numbers [N, groups]; None stands for 0

    def decoded(self) -> Tensor:
        """float32 [N, K]. Only without zero points."""
        scale = self.scale
        minimum = self.minimum
        if self.parts:
            scale = in_parts(scale, self.parts[0])
            if minimum is not None:
                minimum = in_parts(minimum, self.parts[1])
        values = self.codes.unflatten(1, (scale.shape[1], -1)) * scale[..., None]
        if minimum is not None:
            values += minimum[..., None]
        return values.flatten(1)


def in_parts(groups: Tensor, parts: Tensor) -> Tensor:
    """Each group's number times the numbers of its parts. [N, G] and [N, P] -> [N, P]."""
    return (groups[..., None] * parts.unflatten(1, (groups.shape[1], -1))).flatten(1)


def some_rows(
    weights: Tensor, out: Tensors, most: float = torch.finfo(torch.float32).max
) -> Iterator[Tensors]:
    """Some rows of the weights at a time, with the rows of `out` that they are encoded into; on a
    CPU as many as fit into its caches. Raises ValueError for NaN or a magnitude beyond `most`: this
    check is the only place where encoding waits for the GPU, which encodes one matrix while the
    next is read."""
    extremes = torch.stack(weights.aminmax()).float().abs()  # in fp16, `most` would be infinite
    if not (extremes <= most).all():
        worst = "NaN or inf" if not extremes.isfinite().all() else f"a weight beyond {most:g}"
        raise ValueError(f"{worst} cannot be stored in this format")
    elements = 1 << 16 if weights.is_cpu else 1 << 24
    rows = max(1, elements // weights.shape[1])
    yield from zip(*(t.split(rows) for t in (weights, *out)))


# ---- matrices


@dataclass(eq=False)
class Matrix:
    """A weight matrix W of N rows and K columns, applied as y = x W^T, or x W^T + bias."""

    # What the format says. Without a format, a single tensor [N, K] in 16 or 32 bits, which on a
    # CPU may be stored column by column or in oneDNN's layout (cards/cpu.py)
    tensors: Tensors
    format: Format | None = None
    # (x, W) -> x W^T, where a CPU has a product of its own for the layout in which it holds W
    cpu_product: Callable[[Tensor, Matrix], Tensor] | None = field(default=None, kw_only=True)
    bias: Tensor | None = field(default=None, kw_only=True)  # [N], if products have one

    def __post_init__(self) -> None:
        if isinstance(self.tensors, Tensor):
            self.tensors = (self.tensors,)

    @property
    def data(self) -> Tensor:
        """The codes, or the weights themselves if there is no format."""
        return self.tensors[0]

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def columns(self) -> int:
        codes_each = self.format.codes_each if self.format else 1
        return self.data.shape[1] * codes_each

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.rows, self.columns

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def bits(self) -> int:
        """Bits per weight, by which launch sizes are listed."""
        return self.format.bits if self.format else 8 * self.data.element_size()

    def dense(self) -> Tensor:
        """W as floats [N, K]: in float32 for a format, otherwise in the type of the data."""
        if self.format:
            return self.format.decoded(self.tensors)
        return self.data.to_dense() if self.data.is_mkldnn else self.data

    def part(self, rows: slice) -> Matrix:
        """Some of its rows, with their biases."""
        bias = None if self.bias is None else self.bias[rows]
        return Matrix(tuple(t[rows] for t in self.tensors), self.format, bias=bias)

    def parts(self, rows: int) -> list[Matrix]:
        """The matrix in parts of `rows` rows."""
        return [self.part(slice(i, i + rows)) for i in range(0, self.rows, rows)]


def format_of(w: Matrix) -> Format:
    """The format of a matrix as kernels on its device read it."""
    return w.format.on(w.data.device) if w.format else PLAIN


# ---- in kernels: loading a tile. See Format.load for the arguments


@jit
def load_once(pointers, offs_k, left):
    """Load what is read once and need not stay in the caches. Columns from `left` on are zero; if
    `left` is None, there are enough of them."""
    if left is None:
        return tl.load(pointers, eviction_policy="evict_first")
    else:
        return tl.load(pointers, mask=offs_k < left, other=0.0, eviction_policy="evict_first")


@jit
def load_elements(
    w, start, k, left, COLUMNS: tl.constexpr, NEIGHBOURS: tl.constexpr, FORMAT: tl.constexpr = None
):
    """The `load` of a format without groups, which stores one element for each weight."""
    offs_k = tl.arange(0, COLUMNS)[None, :]
    pointers = w[0] + tl.max_contiguous(start + k + offs_k, [1, NEIGHBOURS])
    return load_once(pointers, offs_k, left)


@jit
def plain_values(tile, SCALES: tl.constexpr = None):
    """The `values` of a matrix that has no format."""
    return tile


PLAIN = Format("none", 16, load_elements, plain_values)


# ---- in kernels: rows of W, and what belongs to its columns


class Experts(NamedTuple):
    """What kernels need to know of a stack of experts' matrices."""

    count: int
    padded: int  # the next power of two
    shared: int  # how many slots have the same row of x


@jit
def _any_of_three(a, b, c, same_a, same_b, same_c):
    """Combine equal triples: either will do."""
    return a, b, c


@jit
def block_of(counts, offs_e, block, SIZE: tl.constexpr, EXPERTS: tl.constexpr):
    """Among blocks of at most SIZE slots that chose the same expert, the one with this index: its
    expert, where its slots begin among the sorted ones, and how many they are; 0 or less beyond the
    last block. offs_e: 0 to EXPERTS.padded - 1 in every row, [rows, EXPERTS.padded]. With a row for
    each warp, and up to 128 experts, warps exchange nothing but the final result."""
    count = tl.load(counts + offs_e, mask=offs_e < EXPERTS.count, other=0)
    blocks = (count + SIZE - 1) // SIZE
    ends = tl.cumsum(blocks, 1)
    before = ends <= block
    expert = tl.sum(before.to(tl.int32), 1)
    first = (block - tl.sum(tl.where(before, blocks, 0), 1)) * SIZE
    begin = tl.sum(tl.where(before, count, 0), 1) + first
    here = (ends > block) & (ends - blocks <= block)
    left = tl.sum(tl.where(here, count, 0), 1) - first
    return tl.reduce((expert, begin, tl.minimum(left, SIZE)), 0, _any_of_three)


@jit
def row_scale(w, rows, mask, GAIN: tl.constexpr):
    """The factors of sums over rows of W: the rows' scales times GAIN, see Format.gain."""
    return tl.load(w[-1] + rows, mask=mask, other=0.0) * GAIN


@jit
def columns_of(places, K: tl.constexpr, FORMAT: tl.constexpr):
    """See Format.column_at. Unless eight neighbours have a dimension of their own, loads are not
    vectorised: the compiler does not see through the arithmetic."""
    if FORMAT.column_at is None:
        return places
    else:
        return FORMAT.column_at(places, K)


@jit
def load_vector(
    x, k, offs_k, K: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    PARTS: tl.constexpr = 1,
):  # fmt: skip
    """Load x for the weights that are stored in places k + offs_k of PARTS matrices of K columns side
    by side, each in its own column order. The interpreter gets fp32, since its own bf16 products are
    wrong."""
    places = k + offs_k
    if PARTS == 1:
        pointers = x + columns_of(places, K, FORMAT)
    else:
        pointers = x + (places // K * K + columns_of(places % K, K, FORMAT))
    if PARTS * K % BLOCK == 0:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=offs_k < PARTS * K - k, other=0.0)
    return tile.to(tl.float32) if EMULATED else tile


# ---- in kernels: bits


@jit
def split_4(x):
    """Split [A, B, 4] into four tensors [A, B]."""
    even, odd = tl.split(x.reshape(x.shape[0], x.shape[1], 2, 2))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@jit
def as_floats(bytes_):
    """Join the four bytes in which PTX returns a float: int8 [A, B, 4] to float32 [A, B]. That
    costs nothing, since they are in one register. The interpreter has no PTX; there they are floats
    already."""
    if EMULATED:
        return bytes_
    else:
        b0, b1, b2, b3 = split_4(bytes_.to(tl.uint8, bitcast=True).to(tl.uint32))
        return (b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)).to(tl.float32, bitcast=True)


def half2_products(
    half2: tuple[str, str], words: int, codes: int, x: Callable[[int, int], int]
) -> str:
    """PTX that adds up the products of codes and x in the half2 register `sums`. half2: see Format.
    words: how many registers hold codes; the first of them is register `codes`. x: a function from
    the index of a word, and of its half (0 or 1), to the register that holds the two elements of x
    for it."""
    lines = []
    for word in range(words):
        for half in (0, 1):
            lines.append(half2[half].replace("SOURCE", f"${codes + word}"))
            factors = f"p, ${x(word, half)}"
            if word == half == 0:
                lines.append(f"mul.rn.f16x2 sums, {factors};")
            else:
                lines.append(f"fma.rn.f16x2 sums, {factors}, sums;")
    return " ".join(lines)
