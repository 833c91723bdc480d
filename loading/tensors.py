"""Step 5 of loading (see loading/checkpoint.py): how a tensor of the model is made of those in files. A layout
describes each that it stores as one record, Stored; several are joined to a tensor of the model.
Only headers are read until rows and columns of a tensor are asked for.

Nothing in a file is trusted: names, types and shapes are compared with what the configuration says,
and codes and scales are checked as they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from formats import Format, Quantised, Tensors
from loading.files import one_line
from loading.quantised import FLOATS, Scheme, Wanted, of_rows
from loading.reading import CPU, FileTensor, Piece, in_order, rows_in, split

ALL = slice(None)
# Weights that are converted at a time. They fit into a CPU's caches, which halves the time
AT_ONCE = 1 << 20

Found = dict[str, list[FileTensor]]  # by name; only Meta's shards have several of one name
# Rows of a tensor, in a stack of each of its matrices: slices, one after the other
Rows = Sequence[slice]
# Of each dimension of what is stored
Spans = list[range]
# Floats, codes of others, or what a format of ours stores
Made = Tensor | Quantised | Tensors


@dataclass(frozen=True, eq=False, kw_only=True)
class Stored:
    """A vector, a matrix [N, K], or a stack [E, N, K] of the matrices of all experts, as files store
    it. Its rows are some of those of a tensor of the model."""

    name: str  # what messages call it
    shape: tuple[int, ...]
    files: Found  # all that it is made of, by name
    cut: Callable[[Spans], list[FileTensor]]  # what to read for these spans
    make: Callable[[list[Tensor], Spans], Made]  # what becomes of that
    scheme: Scheme | None = None  # how its codes stand for weights; None: it is made of floats
    format: Format | None = None  # of what it is made of, if it is one of ours
    # For q and k, if RoPE rotates rows i and i + D/2 of a head in this layout, not neighbours: D.
    # They are put into pairs as they are read
    head_dim: int | None = None
    in_pieces: bool = True  # False: it is read as a whole, whatever is needed of it
    problems: tuple[str, ...] = ()  # what does not fit the config
    # Where its rows are in the model's: every `step`th from the `first` on, in the matrix of this
    # expert, or for a stack of each
    first: int = 0
    step: int = 1
    expert: int = 0

    @property
    def rows(self) -> int:
        """Elements of a vector, or rows of a matrix; in a stack, of each."""
        return self.shape[-2:][0]

    @property
    def file(self) -> FileTensor:
        """The first that it is made of."""
        return next(iter(self.files.values()))[0]

    def of_its_own(self, some: slice) -> range:
        """Which of its rows are among these of the model's."""
        start, stop = (-((self.first - row) // self.step) for row in (some.start, some.stop))
        return range(self.rows)[max(start, 0) : max(stop, 0)]

    def split(self, rows: range, columns: slice, most: int) -> Iterator[tuple[int, Spans]]:
        """Yields which of these rows a piece begins with, and what it is of each dimension. Pieces
        are of whole heads, and of at most `most` elements if it can be read in pieces."""
        scattered = any(file.is_scattered for files in self.files.values() for file in files)
        if scattered or not self.in_pieces:
            most = math.prod(self.shape)
        outer = [range(size) for size in self.shape[:-2]]
        inner = [range(size)[columns] for size in self.shape[1:][-1:]]  # none in a vector
        spans = [*outer, rows, *inner]
        start = 0
        for piece in split(spans, most, self.head_dim or 1):
            yield start, piece
            start += rows_in(piece)

    def made(self, spans: Spans, tensors: list[Tensor]) -> Made:
        """What becomes of the tensors that were read for these spans, its rows in the order in which
        RoPE rotates neighbours."""
        made = self.make(tensors, spans)
        if isinstance(made, Tensor):
            return self.in_pairs(made)
        if isinstance(made, Quantised):
            return of_rows(made, self.in_pairs)
        return made

    def floats(self, columns: slice, spans: Spans, tensors: list[Tensor]) -> Tensor:
        """Its floats in these columns, made of whole rows if it has codes."""
        made = self.made(spans, tensors)
        if self.scheme:
            return self.scheme.decoded(made)[:, columns]
        return made

    def in_pairs(self, rows: Tensor) -> Tensor:
        if rows.dim() == 3:  # a stack, whose matrices are put one below the other
            rows = rows.flatten(0, 1)
        if self.head_dim is None:
            return rows
        heads = rows.view(-1, 2, self.head_dim // 2, *rows.shape[1:])
        return heads.transpose(1, 2).reshape(rows.shape)


# ---- reading rows of a tensor of the model


def read_rows(
    tensor: Sequence[Stored], device: torch.device, rows: Rows, columns: slice = ALL
) -> Iterator[tuple[slice, Tensor]]:
    """Yields a slice of the requested rows of a tensor, and their floats in the requested columns,
    on the device. Rows of q and k are always those of whole heads. Raises OSError, and ValueError
    for codes or scales that are not finite."""

    def pieces() -> Iterator[Piece]:
        for stored in tensor:
            whole = ALL if stored.scheme else columns
            make = partial(stored.floats, columns)
            yield from pieces_of(stored, make, rows, whole, weights_at_once(device))

    return in_order(pieces(), device)


def write(
    tensor: Sequence[Stored],
    format: Format,
    out: Tensors,
    device: torch.device,
    rows: Rows,
    columns: slice,
) -> None:
    """Write these rows and columns of a tensor of codes into `out`, the tensors of a format, without
    changing a weight."""

    def pieces() -> Iterator[Piece]:
        for stored in tensor:
            yield from pieces_of(stored, stored.made, rows, columns, weights_at_once(device))

    for place, made in in_order(pieces(), device):
        some = tuple(t[place] for t in out)
        if isinstance(made, Quantised):
            format.write(made, some)
        else:
            for to, values in zip(some, made, strict=True):
                to.copy_(values.view(to.shape), non_blocking=True)
    for stored in tensor:
        if stored.format:
            try:
                format.check(out)
            except ValueError as error:
                what = f"{stored.name} has {error}: save it again from the original"
                raise ValueError(f"{stored.file.file}: {what}") from None


def pieces_of(
    stored: Stored,
    make: Callable[[Spans, list[Tensor]], Made],
    rows: Rows,
    columns: slice,
    most: int,
) -> Iterator[Piece]:
    """The pieces of one of a tensor's records, in their places among the requested rows."""
    at = stored.expert * sum(some.stop - some.start for some in rows)
    for some in rows:
        own = stored.of_its_own(some)
        first = at + stored.first + stored.step * own.start - some.start
        at += some.stop - some.start
        if not own:
            continue
        for start, spans in stored.split(own, columns, most):
            begin = first + stored.step * start
            end = begin + stored.step * rows_in(spans)
            place = slice(begin, end, stored.step)
            yield Piece(place, stored.cut(spans), partial(make, spans))


def weights_at_once(device: torch.device) -> int:
    """How many weights are converted at a time."""
    if device.type == "cpu":
        return AT_ONCE
    return 16 * AT_ONCE


def columns_in(columns: range | slice, K: int, M: int) -> slice:
    """Where these of a matrix's K columns are in a tensor that stores them in M columns."""
    return slice(columns.start * M // K, -(-columns.stop * M // K))


# ---- what all layouts need


def floats(name: str, shape: tuple[int, ...], found: Found, head_dim: int | None = None) -> Stored:
    """A tensor of floats of this name in the files."""
    files = files_for({name: Wanted(FLOATS, [shape])}, found)
    return Stored(
        name=name,
        shape=shape,
        files=files.found,
        cut=lambda spans: [files.found[name][0].cut(spans)],
        make=lambda tensors, spans: tensors[0],
        head_dim=head_dim,
        problems=files.problems,
    )


def part_of_rows(whole: Stored, start: int, count: int, **changes) -> Stored:
    """Some rows of a matrix, or of each in a stack, as a record of their own."""

    def moved(spans: Spans) -> Spans:
        *outer, rows, columns = spans
        return [*outer, range(rows.start + start, rows.stop + start), columns]

    *outer, _, columns = whole.shape
    return replace(
        whole,
        shape=(*outer, count, columns),
        cut=lambda spans: whole.cut(moved(spans)),
        make=lambda tensors, spans: whole.make(tensors, moved(spans)),
        **changes,
    )


class Checked(NamedTuple):
    """The tensors of files that one record is made of, and what is wrong with them."""

    found: Found
    problems: tuple[str, ...]


def files_for(wanted: dict[str, Wanted], found: Found) -> Checked:
    """The tensors of these names, each in one file."""
    problems = []
    for name, about in wanted.items():
        files = found.get(name, [])
        fits = [file.dtype in about.types and file.shape in about.shapes for file in files]
        if fits != [True]:
            problems.append(misfit(name, files, about))
    return Checked({name: found.get(name, []) for name in wanted}, tuple(problems))


def misfit(name: str, files: list[FileTensor], wanted: Wanted) -> str:
    """What is wrong with files that do not have what is wanted."""
    if not files:
        return f"{name} is missing"
    shapes = " + ".join(str(list(tensor.shape)) for tensor in files)
    expected = list(wanted.shapes[0])
    if all(tensor.dtype in wanted.types for tensor in files):
        return f"{name} is {shapes}, expected {expected}"
    in_words = lambda dtype: str(dtype or "another type").removeprefix("torch.")
    listed = " or ".join(map(in_words, wanted.types))
    return f"{name} is {shapes} in {in_words(files[0].dtype)}, expected {expected} in {listed}"


def flaw(tensor: Sequence[Stored], dtype: torch.dtype) -> str | None:
    """What is wrong with a tensor's floats, in the file or converted to dtype. Returns None if
    nothing is. Codes are checked as they are read."""
    for stored in tensor:
        if stored.scheme or stored.format:
            continue
        alone = replace(stored, first=0, step=1, expert=0)
        for _, values in read_rows([alone], CPU, [slice(0, stored.rows)]):
            holds = None
            if not torch.isfinite(values).all():
                holds = "NaN or inf"
            elif not torch.isfinite(values.to(dtype)).all():
                holds = f"values beyond the range of {dtype}; try dtype fp32"
            if holds:
                return one_line(f"{stored.name} in {stored.file.file.name} holds {holds}")
    return None
