"""Formats of matrices, and the 8-bit floats: int8 codes with one scale per row. A format is one
block of functions and numbers, for torch and for kernels; nothing else knows how it stores a
matrix.

    E5M2  sign, 5 exponent bits, 2 of mantissa: the upper byte of a half-precision float
    E4M3  sign, 4 exponent bits, 3 of mantissa: under the sign of a half, these bits are the value
          times 2^-8, subnormals too

Either is decoded by moving bits into a half, on any GPU and any CPU. GPUs from sm_89 on have an
instruction that converts E4M3, and tensor cores that multiply it: E4M3_NATIVE. Hopper's tensor
cores multiply either format by E4M3, from CUDA 12.9 on. Codes of NaN and infinity are never written
into weights: encoding saturates.

To add a format, subclass Format, write its functions, and enter it in kernels.FORMATS: it can then
be loaded, saved, divided among ranks, and run with one token, a few, or a prompt."""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from launch import (
    EMULATED,
    capability,
    constexpr,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    launch,
    tl,
    triton,
)

Tensors = tuple[Tensor, ...]  # what a format stores for a matrix, codes first
Shapes = dict[str, tuple[torch.dtype, tuple[int, int]]]  # of these, by name


@jit
def stream(pointers, mask):
    """Load what is read once and need not stay in the caches; zero where the mask is off (None: on
    everywhere)."""
    return tl.load(
        pointers, mask=mask, other=None if mask is None else 0, eviction_policy="evict_first"
    )


@jit
def load_elements(
    w, start, k, left, COLUMNS: tl.constexpr, NEIGHBOURS: tl.constexpr, GROUP: tl.constexpr = 1
):
    """The `load` of a format whose first tensor has an element for each weight."""
    offs_k = tl.arange(0, COLUMNS)[None, :]
    mask = None if left is None else offs_k < left
    return stream(w[0] + tl.max_contiguous(start + k + offs_k, [1, NEIGHBOURS]), mask)


@jit
def load_groups(w, start, k, left, COLUMNS: tl.constexpr, EACH: tl.constexpr, GROUP: tl.constexpr):
    """For each EACH columns the element of w that belongs to them, where w has one for each GROUP
    of columns: [R, COLUMNS / EACH], one to a thread, like the codes. `start` is a multiple of
    GROUP, k of EACH."""
    offs_k = tl.arange(0, COLUMNS // EACH)[None, :] * EACH
    mask = None if left is None else offs_k < left
    return stream(w + start // GROUP + tl.max_contiguous((k + offs_k) // GROUP, [1, 1]), mask)


@jit
def columns_of(places, K: tl.constexpr, COLUMNS: tl.constexpr):
    """See Format.columns. Unless eight neighbours have a dimension of their own, loads are not
    vectorised: the compiler does not see through the arithmetic."""
    return places if COLUMNS is None else COLUMNS(places, K)


@jit
def pairs(low, high):
    """Halves as the lower and upper halves of words."""
    return low.to(tl.uint16, bitcast=True).to(tl.uint32) | (
        high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    )


@jit
def half_at(bits, EXPONENT: tl.constexpr):
    """The half in the lower bits of int32, times 2^-EXPONENT, as a float."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * (2.0**-EXPONENT)


@jit
def scale_and_minimum(groups, EXPONENT: tl.constexpr, PRODUCT: tl.constexpr):
    """Scales and minimums, times 2^-EXPONENT, from one or two tensors: halves, where a single one
    is the scale and the minimum is 0; or an int16 and an int32, two bytes and two halves to be
    multiplied, the scale's below the minimum's, times 2^-PRODUCT, too."""
    if len(groups) == 1:
        scale = groups[0].to(tl.float32) * (2.0**-EXPONENT)
        return scale, scale * 0.0
    elif groups[0].dtype == tl.float16:
        return groups[0].to(tl.float32) * (2.0**-EXPONENT), groups[1].to(tl.float32) * (
            2.0**-EXPONENT
        )
    else:
        parts, halves = groups[0].to(tl.int32), groups[1]
        scale, minimum = (
            half_at(halves, EXPONENT + PRODUCT),
            half_at(halves >> 16, EXPONENT + PRODUCT),
        )
        return scale * ((parts << 24) >> 24).to(tl.float32), minimum * (parts >> 8).to(tl.float32)


@jit
def row_scale(w, rows, mask, GAIN: tl.constexpr):
    """What sums over rows of W are multiplied by, see Format.gain."""
    return tl.load(w[len(w) - 1] + rows, mask=mask, other=0.0) * GAIN


@jit
def plain_values(tile):
    """The `values` of a matrix in 16 or 32 bits."""
    return tile


@dataclass(frozen=True, eq=False)
class Format:
    """A way to store a matrix W [N, K]. Kernels receive the stored tensors as a tuple w, and these
    functions:

    load(w, start, k, left, COLUMNS, NEIGHBOURS, GROUP)
                               a tile as stored, COLUMNS weights of each of its rows. start [R, 1]:
                               where these begin in W, as if that were stored row by row; k: the
                               first column, a number or [R, 1]; left: how many columns there are
                               from there on, None if enough; NEIGHBOURS: how many a thread should
                               have, if possible; GROUP: `group` below
    values(tile)               what it stands for, before `gain` and the row's scale: halves or
                               floats [R, COLUMNS]
    gain                       what all values are multiplied by, beside the scale of their row, an
                               element of the last tensor; None: rows have no scale
    packed_asm                 PTX for products with halves x, eight neighbours added up, see
                               packed_sums below; None: there is none

    columns(places, K)         the columns whose weights are stored in these places of a row; runs
                               of eight columns stay together. None: all are in order

    With these, one token runs in kernels._stream_kernel:

    packed_load(w, start, k, left, COLUMNS, GROUP)
                               like load: int32 tensors [1, M], of which a thread has what 64
                               weights need
    packed_sums(tile, x, sums) float32 [1, COLUMNS / 64]: x as words of two halves [COLUMNS / 2], or
    floats [COLUMNS] in
                               the interpreter; the sums of each sum_x of them [COLUMNS / sum_x]
    """

    name: str
    bits: int  # per weight: launch sizes are listed by it
    load: Callable
    values: Callable
    gain: float | None = None
    packed_asm: str | None = None
    columns: Callable | None = None
    packed_load: Callable | None = None
    packed_sums: Callable | None = None
    sum_x: int = 16  # see packed_sums
    neighbours: int = 8  # weights that one thread must have for packed products
    peak: float = 16.0  # the largest magnitude to which x is scaled for them
    # columns that share a scale: where a matrix is cut by columns, a part has a multiple of these
    group: int = 1
    # a matrix of this many columns or more can only be cut at multiples of it, once it is stored
    whole: int = 1
    # a power of two above all that `values` returns, if a prompt's product may round it to E4M3
    bound: float = 0.0

    def at(self, name: str) -> Format:
        """The format of a model's matrix of this name, where some are to be kept in another."""
        return self

    def tensors(self, N: int, K: int) -> Shapes:
        """Type and shape [N, M] of each stored tensor. M divides K, so that columns a to b of W are
        a M / K to b M / K of it, rounded down and up."""
        raise NotImplementedError

    def empty(self, N: int, K: int, device: torch.device) -> Tensors:
        """Space for what is stored of a matrix."""
        return tuple(
            torch.empty(shape, dtype=dtype, device=device)
            for dtype, shape in self.tensors(N, K).values()
        )

    def encode(self, weights: Tensor, out: Tensors | None = None) -> Tensors:
        """[N, K] to what is stored, in the given tensors if any. Raises ValueError for NaN or
        inf."""
        raise NotImplementedError

    def write(self, b: Any, out: Tensors) -> None:
        """Store what a checkpoint has quantised, quants.Blocks, as it is."""
        raise NotImplementedError

    def weights(self, tensors: Tensors) -> Tensor:
        """The matrix as float32 [N, K], its columns in the order in which they are stored."""
        raise NotImplementedError

    def order(self, K: int, device: torch.device) -> Tensor | None:
        """The order in which the columns are stored, int64 [K]; None if they are stored as they
        come."""

    def ordered(self, t: Tensor) -> Tensor:
        """[..., K] with its columns in that order."""
        order = self.order(t.shape[-1], t.device)
        return t if order is None else t.gather(-1, order.expand(t.shape))

    def decoded(self, tensors: Tensors) -> Tensor:
        """What is stored to float32 [N, K]."""
        stored = self.weights(tensors)
        order = self.order(stored.shape[1], stored.device)
        return stored if order is None else stored.index_select(1, order.argsort())

    def check(self, tensors: Tensors) -> None:
        """Raise ValueError for scales that are not positive and finite, and for codes that are not
        finite."""
        if not ((tensors[-1] > 0) & (tensors[-1] < torch.inf)).all():
            raise ValueError("scales that are not positive and finite")

    def multiply(self, tensors: Tensors, factor: float) -> None:
        """Multiply the matrix by a power of two, in place: by means of the last tensor, its
        scales."""
        tensors[-1].mul_(factor)

    def on(self, device: torch.device) -> Format:
        """The format as kernels on this device decode it."""
        return self

    def functions(self) -> dict[str, Any]:
        """What every kernel that reads a matrix is compiled for."""
        return dict(
            LOAD=self.load,
            GROUP=self.group,
            COLUMNS=self.columns,
            VALUES=self.values,
            GAIN=self.gain,
        )

    def can_be_cut(self, K: int, part: int) -> bool:
        """Whether what is stored of K columns can be cut into parts of so many."""
        return part == K or self.whole > K or part % self.whole == 0

    def nbytes(self, N: int, K: int) -> int:
        return sum(
            dtype.itemsize * math.prod(shape) for dtype, shape in self.tensors(N, K).values()
        )

    def packed(self, tensors: Tensors) -> Tensors | None:
        """What packed_linear reads beside what is stored, if torch has a product in bf16 on a CPU
        for few tokens."""

    def packed_linear(self, x: Tensor, packed: Tensors) -> Tensor:
        """x W^T in bf16. x [T, K] -> [T, N]."""
        raise NotImplementedError

    def tensor_core_linear(
        self,
        codes: Tensor,
        scales: Tensor,
        tensors: Tensors,
        dtype: torch.dtype,
        residual: Tensor | None,
    ) -> Tensor | None:
        """x W^T on 8-bit tensor cores, x [T, K] in E4M3, by a kernel of the format's own, added in
        place to the residual if there is one; None if the format has no kernel for such shapes,
        this type or this GPU."""

    def vector_linear(self, row: Tensor, tensors: Tensors) -> Tensor:
        """W times a row of floats [K], of magnitudes up to 1, on a CPU: [N] in float16 or
        float32."""
        row, parts = self.ordered(row), zip(*(t.split(512) for t in tensors))
        return torch.cat([torch.mv(self.weights(part), row) for part in parts])


def rotated(runs, turns):
    """Which run of eight columns is stored in the place of each: every `turns` runs are rotated, by
    one more from one thread (64 columns) to the next. Used in torch and in kernels."""
    return runs // turns * turns + (runs + runs // 8) % turns


@dataclass(frozen=True, eq=False)
class Grouped(Format):
    """A format with a scale and a minimum for each group of columns: W = scale * code + minimum,
    times the row's scale if there is one, which is then the last tensor."""

    turns: int = 1  # runs of eight columns that are rotated among themselves, see rotated

    def runs(self, K: int, device: torch.device) -> Tensor:
        """What `columns` is in kernels: the order in which runs of eight columns are stored, int64
        [K / 8]."""
        return rotated(torch.arange(K // 8, device=device), self.turns)

    def in_runs(self, t: Tensor) -> Tensor:
        """[..., K] with its runs of eight columns in that order."""
        return (
            t.unflatten(-1, (-1, 8)).index_select(-2, self.runs(t.shape[-1], t.device)).flatten(-2)
        )

    def order(self, K: int, device: torch.device) -> Tensor:
        return self.in_runs(torch.arange(K, device=device))

    def codes(self, tensors: Tensors) -> Tensor:
        """[N, K], as they are stored."""
        raise NotImplementedError

    def scales(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Scales and minimums of the groups, times the row's scale: float32 [N, groups]."""
        raise NotImplementedError

    def weights(self, tensors: Tensors) -> Tensor:
        scale, minimum = self.scales(tensors)
        groups = self.codes(tensors).float().unflatten(1, (scale.shape[1], -1))
        return groups.mul_(scale[..., None]).add_(minimum[..., None]).flatten(1)


def some_rows(weights: Tensor, out: Tensors) -> Iterator[Tensors]:
    """Some rows of the weights at a time, with the rows of `out` that they are encoded into; on a
    CPU as many as fit into its caches. Raises ValueError for NaN or inf: this check is the only
    place where encoding waits for the GPU, which encodes one matrix while the next is read."""
    if not torch.isfinite(torch.stack(weights.aminmax())).all():
        raise ValueError("NaN or inf cannot be stored in 8 or 4 bits")
    at_once = max(1, (1 << (16 if weights.is_cpu else 24)) // weights.shape[1])
    yield from zip(*(t.split(at_once) for t in (weights, *out)))


@dataclass(eq=False)
class Matrix:
    """A weight matrix W of N rows and K columns, applied as y = x W^T."""

    # as the format says, or one tensor [N, K] in 16 or 32 bits (see kernels.prepacked)
    tensors: Tensors
    format: Format | None = None
    shape: tuple[int, int] | None = None  # [N, K]
    packed: Tensors | None = None  # see Format.packed and kernels.prepacked

    def __post_init__(self) -> None:
        if isinstance(self.tensors, Tensor):
            self.tensors = (self.tensors,)
        self.shape = self.shape or tuple(self.data.shape)

    @property
    def data(self) -> Tensor:
        return self.tensors[0]

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def bits(self) -> int:
        return self.format.bits if self.format else 8 * self.data.element_size()

    def dense(self) -> Tensor:
        """W as floats: float32 [N, K] for a format, otherwise the data itself, unpacked from
        oneDNN's layout if need be."""
        if self.format is None:
            return self.data.to_dense() if self.data.is_mkldnn else self.data
        return self.format.decoded(self.tensors)

    def parts(self, rows: int) -> list[Matrix]:
        """The matrix, so many rows at a time."""
        split = zip(*(t.split(rows) for t in self.tensors))
        return [Matrix(part, self.format, (len(part[0]), self.columns)) for part in split]


# ---- 8-bit floats


@dataclass(frozen=True, eq=False)
class Float8(Format):
    """int8 codes [N, K] and float32 scales [N, 1]."""

    dtype: torch.dtype = torch.float8_e4m3fn  # torch's type of the same bits
    not_finite: int = 0x7F  # from here up, a code without its sign means NaN or infinity
    # a row's largest magnitude after scaling; its bits as those of a half are 1.75 in both formats
    top: float = 448.0
    shift: int = 7  # by which a code's bits below its sign move up to be a half's
    # as `values`, where NaN codes may occur: in a cache, which is E4M3
    values_nan: Callable | None = None
    encode_tile: Callable | None = None  # floats to codes in a kernel, as e4m3_encode does

    def on(self, device: torch.device) -> Float8:
        return E4M3_NATIVE if self is E4M3 and capability(device) >= 89 else self

    def tensors(self, N: int, K: int) -> Shapes:
        return {"codes": (torch.int8, (N, K)), "scale": (torch.float32, (N, 1))}

    def round(self, x: Tensor) -> Tensor:
        """The nearest codes (ties to even) as int8; magnitudes beyond the largest become the
        largest."""
        largest = torch.finfo(self.dtype).max
        return x.float().clamp(-largest, largest).to(self.dtype).view(torch.int8)

    def halves(self, codes: Tensor, space: Tensor | None = None) -> Tensor:
        """int8 codes to float16, exactly their values divided by the gain; in int16 space of that
        shape, if given."""
        bits = codes.to(torch.int16) if space is None else space.copy_(codes)
        bits.bitwise_left_shift_(self.shift)
        if self.shift == 7:
            bits.bitwise_and_(~0x4000)  # a copy of the sign
        return bits.view(torch.float16)

    def floats(self, codes: Tensor) -> Tensor:
        """int8 codes to the float32 values they stand for; codes of NaN and infinity, as in a
        cache, are NaN."""
        values, magnitudes = self.halves(codes).float().mul_(self.gain), codes & 0x7F
        if magnitudes.amax() >= self.not_finite:
            values.masked_fill_(magnitudes >= self.not_finite, torch.nan)
        return values

    def encode(self, weights: Tensor, out: Tensors | None = None) -> Tensors:
        """Each row takes the scale with the least squared error of four, from the smallest that
        lets its largest magnitude fit to just under twice that."""
        out = out or self.empty(*weights.shape, weights.device)
        for rows, code, scale in some_rows(weights, out):
            rows = rows.float()
            smallest = (rows.abs().amax(1, keepdim=True) / self.top).clamp_(min=1e-30)
            least = torch.full_like(smallest, torch.inf)
            for step in (0.0, 0.25, 0.5, 0.75):
                tried = smallest * 2**step
                written = self.round(rows / tried)
                error = (self.decoded((written, tried)) - rows).square().sum(1, keepdim=True)
                # the square of magnitudes beyond 1e19 may be, too
                better = (error < least) | least.isinf()
                for found, value in ((least, error), (scale, tried), (code, written)):
                    found.copy_(torch.where(better, value, found))
        return out

    def weights(self, tensors: Tensors) -> Tensor:
        codes, scales = tensors
        return self.halves(codes).float().mul_(self.gain * scales)

    def write(self, b: Any, out: Tensors) -> None:
        out[0].copy_(b.codes)
        out[1].copy_(b.scale)

    def check(self, tensors: Tensors) -> None:
        super().check(tensors)
        if any((rows & 0x7F).max() >= self.not_finite for rows in tensors[0].split(512)):
            raise ValueError("codes of NaN or infinity")

    def vector_linear(self, row: Tensor, tensors: Tensors) -> Tensor:
        """Codes are decoded a block of rows at a time, so that the halves stay in the CPU's
        cache."""
        (codes, scales), row = tensors, row.half()
        y, space = row.new_empty(len(codes)), torch.empty(1024, len(row), dtype=torch.int16)
        for block, part in zip(codes.split(1024), y.split(1024)):
            torch.mv(self.halves(block, space[: len(block)]), row, out=part)
        return y * (self.gain * scales[:, 0])


# ---- packed products: a token's product with 8-bit weights, in half precision.
#
#      At 8 bits per weight the arithmetic matters: an H200 reads 4.6e12 weights a second and
#      executes 33e12 fp32 operations, about 7 per weight. Decoding a code, widening it and
#      multiplying it takes 11 instructions. Packed, it takes 3 to 4: PTX converts two codes at a
#      time to a pair of halves, multiplies the pair by a pair of x in one instruction
#      (fma.rn.f16x2), and adds up eight products in half precision before the sum is widened to
#      fp32. For this to be sound the range must be right: a half ends at 65504 and loses precision
#      below 6e-5, so x is scaled by a power of two, which is exact, such that eight products with
#      codes of at most 448 stay below 65504 and those that matter lie far above 6e-5: all of x
#      alike in kernels._vector_kernel, each 64 columns in _stream_kernel. Eight neighbours of a row
#      must be in one thread.

# Up to this norm weight, eight packed products of rmsnorm(x) stay below 65504 for K of up to 8192
# in _vector_kernel; _stream_kernel needs less than 32
NORM_LIMIT = 30.0


def fit_norm(norm: Tensor, w: Matrix) -> None:
    """Move a power of two from norm weights into the matrix, which is exact, so that the largest
    weight is between half the limit and the limit: packed products neither overflow nor lose small
    numbers."""
    peak = (
        norm.abs().max().item()
        if w.format and (w.format.packed_asm or w.format.packed_sums)
        else 0.0
    )
    if 0.0 < peak < math.inf:
        factor = 2.0 ** math.ceil(math.log2(peak / NORM_LIMIT))
        norm.div_(factor)
        w.format.multiply(w.tensors, factor)


def _fma_asm(
    two_halves: tuple[str, ...], words: int, code: int, x: Callable[[int, int], int]
) -> str:
    """PTX that adds up products of codes and halves in `sums`, two at a time. two_halves: what
    turns the two codes in the lower half of register SOURCE, and in the upper half, into the pair
    of halves p; code, x: the numbers of registers."""
    lines = []
    for word, half in itertools.product(range(words), range(2)):
        lines.append(two_halves[half].replace("SOURCE", f"${code + word}"))
        first = word == half == 0
        lines.append(
            f"{'mul' if first else 'fma'}.rn.f16x2 sums, p, ${x(word, half)}{'' if first else ', sums'};"
        )
    return " ".join(lines)


def packed_asm(*two_halves: str) -> str:
    """PTX for eight codes times eight halves, added up in half precision: a float in $0, and zero
    in $1."""
    products = _fma_asm(two_halves, 2, 2, lambda word, half: 4 + 2 * word + half)
    total = "mov.b32 {a, b}, sums; add.f16 a, a, b; cvt.f32.f16 $0, a; mov.b32 $1, 0;"
    return f"{{ .reg .b16 a, b; .reg .b32 sums, p, q; {products} {total} }}"


def words_asm(*two_halves: str) -> str:
    """PTX for 16 codes times 16 halves, eight products at a time added up in half precision: a
    float in $0. The halves for the lower and for the upper half of each word of codes come in
    separate registers."""
    products = _fma_asm(two_halves, 4, 1, lambda word, half: 5 + 4 * half + word)
    total = "mov.b32 {a, b}, sums; cvt.f32.f16 f, a; cvt.f32.f16 $0, b; add.f32 $0, $0, f;"
    return f"{{ .reg .b16 a, b; .reg .b32 sums, p, q; .reg .f32 f; {products} {total} }}"


# the sum; four registers of codes, then twice four of halves
WORDS_REGISTERS = constexpr("=&r" + 12 * ",r")
# the sum and the zero; two registers of codes, four of halves
ASM_REGISTERS = constexpr("=&r,=&r" + 6 * ",r")


@jit
def packed_sums(w_tile, x_tile, VALUES: tl.constexpr, ASM: tl.constexpr):
    """Codes [ROWS, BLOCK] times halves [1, BLOCK], eight neighbours added up: float32 [ROWS, BLOCK
    / 8]."""
    if EMULATED:
        return VALUES(w_tile).to(tl.float32) * x_tile.to(tl.float32)
    sums = tl.inline_asm_elementwise(
        ASM, ASM_REGISTERS, [w_tile, x_tile], dtype=tl.int8, is_pure=True, pack=8
    )
    # The first four bytes of eight are the sum
    sums, _ = tl.split(sums.reshape(sums.shape[0], sums.shape[1] // 8, 2, 4).permute(0, 1, 3, 2))
    return as_floats(sums)


@jit
def split_4(x):
    """[A, B, 4] to four times [A, B]."""
    even, odd = tl.split(x.reshape(x.shape[0], x.shape[1], 2, 2))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@jit
def as_floats(bytes_):
    """Four int8 [A, B, 4], the bytes of a float: [A, B]. Joining them costs nothing: they are in
    one register."""
    b0, b1, b2, b3 = split_4(bytes_.to(tl.uint8, bitcast=True).to(tl.uint32))
    return (b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)).to(tl.float32, bitcast=True)


# ---- E5M2


@jit
def _e5m2_values(codes):
    if EMULATED:  # the interpreter decodes some codes wrongly
        return (codes.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    return codes.to(tl.float8e5, bitcast=True).to(tl.float16)


# a permutation of bytes puts each code above a zero byte
_E5M2_HALVES = [f"prmt.b32 p, SOURCE, 0, {order};" for order in ("0x1404", "0x3424")]
E5M2 = Float8(
    "e5m2", 8, load_elements, _e5m2_values, gain=1.0, packed_asm=packed_asm(*_E5M2_HALVES),
    dtype=torch.float8_e5m2, not_finite=0x7C, top=1.75, shift=8,
)  # fmt: skip


# ---- E4M3


@jit
def e4m3_values(codes):
    return ((codes.to(tl.int16) << 7) & ~0x4000).to(tl.float16, bitcast=True)


@jit
def _e4m3_values_nan(codes):
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), e4m3_values(codes)).to(tl.float16)


# as for E5M2, then the bits under the sign move one place to the right
_UNDER_SIGN = "shr.u32 q, p, 1; and.b32 q, q, 0x3f803f80; and.b32 p, p, 0x80008000; or.b32 p, p, q;"
E4M3_HALVES = [f"prmt.b32 p, SOURCE, 0, {order}; {_UNDER_SIGN}" for order in ("0x1404", "0x3424")]


@jit
def e4m3_encode(x):
    """Floats to codes in a kernel, as Float8.round does: nearest, ties to even, magnitudes beyond
    448 as 448; but NaN and infinity (which E4M3 lacks) both as 0x7f, its NaN, so that they are
    noticed."""
    a = tl.minimum(tl.abs(x), 448.0)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # the biases are 127 and 7
    # the sum's last bit is 2^-9, a subnormal's unit
    subnormal = (a + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(a < 0.015625, subnormal, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(tl.abs(x) < float("inf"), code | sign, 0x7F).to(tl.int8)


E4M3 = Float8(
    "e4m3", 8, load_elements, e4m3_values, gain=256.0, packed_asm=packed_asm(*E4M3_HALVES),
    values_nan=_e4m3_values_nan, encode_tile=e4m3_encode,
)  # fmt: skip


# ---- E4M3 as GPUs from sm_89 on support it: one instruction converts two codes


@jit
def native_values(codes):
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@jit
def _native_encode(x):
    x = tl.fma(x, 0.0, x)  # infinity, which would become 448, to NaN
    return x.to(tl.float8e4nv).to(tl.int8, bitcast=True)


NATIVE_HALVES = [f"mov.b32 {{a, b}}, SOURCE; cvt.rn.f16x2.e4m3x2 p, {half};" for half in "ab"]
E4M3_NATIVE = replace(
    E4M3, gain=1.0, values=native_values, values_nan=native_values,
    packed_asm=packed_asm(*NATIVE_HALVES),
    encode_tile=_native_encode,
)  # fmt: skip

PLAIN = Format("none", 16, load_elements, plain_values)


def format_of(w: Matrix) -> Format:
    """The format of a matrix as kernels on its device read it."""
    return w.format.on(w.data.device) if w.format else PLAIN


# ---- the product of a prompt


@jit
def _recode_kernel(
    w, out, scales, K: tl.constexpr, BLOCK: tl.constexpr, LOAD: tl.constexpr, GROUP: tl.constexpr,
    VALUES: tl.constexpr, COLUMNS: tl.constexpr, GAIN: tl.constexpr, ENCODE: tl.constexpr,
    BOUND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Decode a block of a row to the type of `out` or, where there are scales, to E4M3 codes and
    the row's scale."""
    gdc_launch_dependents(PDL)
    row, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    y = VALUES(LOAD(w, row * K + tl.arange(0, 1)[:, None], k, K - k, BLOCK, 8, GROUP)).to(
        tl.float32
    )
    y = y.reshape(BLOCK // 8, 8)
    offs_k = columns_of(
        k + tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :], K, COLUMNS
    )
    scale = 1.0
    if GAIN is not None:
        scale = row_scale(w, row, row >= 0, GAIN)
    gdc_wait(PDL)  # only now, since no kernel writes weights
    if scales is None:
        tl.store(out + row * K + offs_k, (y * scale).to(out.dtype.element_ty), mask=offs_k < K)
    else:
        tl.store(out + row * K + offs_k, ENCODE(y * (256.0 / BOUND)), mask=offs_k < K)
        tl.store(scales + row, scale * (BOUND / 256.0))


def _recode(w: Matrix, out: Tensor, scales: Tensor | None) -> None:
    (N, K), device, format = w.shape, out.device, format_of(w)
    block = min(4096, triton.next_power_of_2(K))
    functions = format.functions() | dict(ENCODE=E4M3.on(device).encode_tile, BOUND=format.bound)
    grid, warps = (N, triton.cdiv(K, block)), max(1, block // 1024)
    launch(
        _recode_kernel,
        grid,
        device,
        w.tensors,
        out,
        scales,
        K=K,
        BLOCK=block,
        **functions,
        warps=warps,
    )


def dense_for(w: Matrix, x: Tensor) -> Tensor:
    """W [N, K] in the type of x, on a GPU."""
    if not w.format:
        return w.data
    out = x.new_empty(w.rows, w.columns)
    _recode(w, out, None)
    return out


@cache
def _cublas_scales_rows(device: torch.device) -> bool:
    """Whether cuBLAS multiplies 8-bit floats with one scale per row, as it does on Hopper from CUDA
    12.9 on: E4M3 by either format, into any type. Elsewhere torch has its own kernel, for E4M3,
    whose result is bfloat16."""
    version = tuple(map(int, (torch.version.cuda or "0").split(".")))
    return device.type == "cuda" and capability(device) // 10 == 9 and version >= (12, 9)


def on_tensor_cores(w: Matrix, accumulate: str = "auto") -> bool:
    """Whether 8-bit tensor cores multiply a prompt: 8-bit floats as they are; formats that allow it
    recoded as E4M3, unless `accumulate` asks for the most precise sums."""
    if not w.format or w.rows % 16 or w.columns % 16:
        return False
    device, own = w.data.device, isinstance(w.format, Float8)
    if not own and (w.format.bound == 0 or accumulate == "fp32"):
        return False
    return (w.format if own else E4M3).on(device) is E4M3_NATIVE or _cublas_scales_rows(device)


def tensor_core_linear(
    codes: Tensor,
    scales: Tensor,
    w: Matrix,
    dtype: torch.dtype,
    accumulate: str,
    residual: Tensor | None = None,
) -> Tensor:
    """x W^T on 8-bit tensor cores, x given as codes and scales: [T, K] -> [T, N], in dtype where
    the library supports that. With a residual, the product is added to it in place.

    Hopper's tensor cores accumulate products of 8-bit floats with about 14 bits, unless the sums
    are moved to fp32 registers every few products (accumulate "fp32"), which costs a tenth of the
    speed. The error, a mean square of 2e-6 to 6e-6 of the result's, is a hundredth of that from
    rounding the activations."""
    if not isinstance(w.format, Float8):
        y = w.format.tensor_core_linear(codes, scales, w.tensors, dtype, residual)
        if y is not None:
            return y
        as_e4m3 = E4M3.empty(*w.shape, w.data.device)
        _recode(w, *as_e4m3)
        w = Matrix(as_e4m3, E4M3)
    to = dtype if _cublas_scales_rows(w.data.device) else torch.bfloat16
    x8, w8, w_scales = codes.view(E4M3.dtype), w.data.view(w.format.dtype), w.tensors[1].t()
    y = torch._scaled_mm(
        x8, w8.t(), scales, w_scales, out_dtype=to, use_fast_accum=accumulate != "fp32"
    )
    return y if residual is None else residual.add_(y)
