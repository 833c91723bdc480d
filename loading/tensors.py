"""Step 5 of loading (see loading/checkpoint.py): the SourceTensors that the loader reads, one for each tensor
of the model. These are floats in one file or in several, matrices that others have quantised,
matrices that `--save` wrote, or several of them joined. Only headers are read until rows and
columns of a tensor are asked for.

Nothing in a file is trusted: names, types and shapes are compared with what the configuration says,
and codes and scales are checked as they are read."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from formats import Format, Quantised, Tensors
from loading import quantised
from loading.files import one_line
from loading.headers import FileTensor, Wanted
from loading.reading import CPU, Piece, in_order, rows_in, split

ALL = slice(None)

Found = dict[str, list[FileTensor]]  # by name; only Meta's shards have several of one name
# Rows of a tensor, in a stack of each of its matrices: slices, one after the other
Rows = Sequence[slice]
# From a tensor and some of its rows to the pieces that make them
MadeOf = Callable[["SourceTensor", Rows], Iterable[Piece]]


class SourceTensor:
    """A tensor of the model as the loader reads it, however files store it: a vector, a matrix
    [N, K], or a stack [E, N, K] of the matrices of all experts. Several may be joined to one."""

    dtype: torch.dtype | None = torch.float32  # of the floats, or of decoded values

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        found: Found,
        head_dim: int | None = None,
        scheme: quantised.Quantisation | None = None,
        wanted: dict[str, Wanted] | None = None,
    ):
        """name: in the file. found: all tensors of the files. head_dim: for q and k, if RoPE
        rotates rows i and i + D/2 of a head in this layout, not neighbours; they are put into pairs
        as they are read. scheme: how others have quantised it, if they have. wanted: the tensors
        that the files must have for it, by name; by default, floats of its own name and shape."""
        self.name = name
        self.shape = shape
        self.head_dim = head_dim
        self.scheme = scheme
        self.wanted = wanted or {name: Wanted(quantised.FLOATS, [shape])}
        self.files = {name: found.get(name, []) for name in self.wanted}

    @property
    def rows(self) -> int:
        """Elements of a vector, or rows of a matrix; in a stack, of each."""
        return self.shape[-2:][0]

    @property
    def all_schemes(self) -> set[quantised.Quantisation | None]:
        """How others have quantised its matrices. None stands for floats."""
        return {self.scheme}

    def read(
        self, device: torch.device, rows: Rows, columns: slice = ALL
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yields a slice of the requested rows, and their floats in the requested columns, on the
        device. Rows of q and k are always those of whole heads. Raises OSError, and ValueError for
        codes or scales that are not finite."""
        return in_order(self.floats(rows, columns, weights_at_once(device)), device)

    def write(
        self, format: Format, out: Tensors, device: torch.device, rows: Rows, columns: slice
    ) -> None:
        """Write these rows and columns into `out`, the tensors of a format, without changing a
        weight."""
        pieces = self.quantised(rows, columns, weights_at_once(device))
        for place, matrix in in_order(pieces, device):
            format.write(matrix, tuple(tensor[place] for tensor in out))

    def floats(self, rows: Rows, columns: slice, most: int) -> Iterable[Piece]:
        """The pieces that make floats, of at most `most` weights if the tensor can be cut."""
        raise NotImplementedError

    def quantised(self, rows: Rows, columns: slice, most: int) -> Iterable[Piece]:
        """The pieces that make Quantised, if it is quantised."""
        raise NotImplementedError

    def split(self, rows: Rows, columns: slice, most: int) -> Iterator[tuple[slice, list[range]]]:
        """Yields where a piece lies in the result, and what it is of each dimension. Pieces are of
        whole heads, and of at most `most` elements unless a tensor has gaps between its rows."""
        if any(tensor.strides for tensor in chain.from_iterable(self.files.values())):
            most = math.prod(self.shape)
        start = 0
        for some in rows:
            taken = (*[ALL] * (len(self.shape) - 2), some, columns)
            spans = [range(size)[of_dim] for size, of_dim in zip(self.shape, taken)]
            for piece in split(spans, most, self.head_dim or 1):
                end = start + rows_in(piece)
                yield slice(start, end), piece
                start = end

    def problems(self) -> Iterator[str]:
        """What does not fit the config, a message each."""
        for name, wanted in self.wanted.items():
            files = self.files[name]
            if not files:
                yield f"{name} is missing"
            elif not self.fits(files, wanted):
                yield _misfit(files, wanted)

    def fits(self, files: list[FileTensor], wanted: Wanted) -> bool:
        (tensor, *others) = files
        return not others and tensor.dtype in wanted.types and tensor.shape in wanted.shapes

    def flaw(self, dtype: torch.dtype) -> str | None:
        """What is wrong with its floats, in the file or converted to dtype. Returns None if nothing
        is, or if it has codes, which are checked as they are read."""

    def in_pairs(self, rows: Tensor) -> Tensor:
        """The rows, of a stack below one another, in the order in which RoPE rotates neighbours."""
        if rows.dim() == 3:
            rows = rows.flatten(0, 1)
        if self.head_dim is None:
            return rows
        heads = rows.view(-1, 2, self.head_dim // 2, *rows.shape[1:])
        return heads.transpose(1, 2).reshape(rows.shape)


def weights_at_once(device: torch.device) -> int:
    """How many weights are converted at a time."""
    if device.type == "cpu":
        return quantised.AT_ONCE
    return 16 * quantised.AT_ONCE


def _misfit(files: list[FileTensor], wanted: Wanted) -> str:
    name = files[0].name
    shapes = " + ".join(str(list(tensor.shape)) for tensor in files)
    expected = list(wanted.shapes[0])
    if all(tensor.dtype in wanted.types for tensor in files):
        return f"{name} is {shapes}, expected {expected}"
    in_words = lambda dtype: str(dtype or "another type").removeprefix("torch.")
    listed = " or ".join(map(in_words, wanted.types))
    return f"{name} is {shapes} in {in_words(files[0].dtype)}, expected {expected} in {listed}"


class Several(SourceTensor):
    """A tensor that is made of several."""

    def __init__(self, tensors: list[SourceTensor]):
        self.of = tensors
        self.wanted = {name: tensor.wanted[name] for tensor in tensors for name in tensor.wanted}

    @property
    def all_schemes(self) -> set[quantised.Quantisation | None]:
        return set().union(*(tensor.all_schemes for tensor in self.of))

    def pieces(self, rows: Rows, made_of: MadeOf) -> Iterator[Piece]:
        """The pieces of all tensors, in their places. made_of: returns those of one of them."""
        raise NotImplementedError

    def floats(self, rows: Rows, columns: slice, most: int) -> Iterator[Piece]:
        return self.pieces(rows, lambda tensor, some: tensor.floats(some, columns, most))

    def quantised(self, rows: Rows, columns: slice, most: int) -> Iterator[Piece]:
        return self.pieces(rows, lambda tensor, some: tensor.quantised(some, columns, most))

    def problems(self) -> Iterator[str]:
        return chain.from_iterable(tensor.problems() for tensor in self.of)

    def flaw(self, dtype: torch.dtype) -> str | None:
        return next(filter(None, (tensor.flaw(dtype) for tensor in self.of)), None)


class Stack(Several):
    """The matrices of all experts, each of which is a tensor of its own in the files."""

    @property
    def rows(self) -> int:
        return self.of[0].rows

    def pieces(self, rows: Rows, made_of: MadeOf) -> Iterator[Piece]:
        each = sum(some.stop - some.start for some in rows)
        for i, expert in enumerate(self.of):
            for piece in made_of(expert, rows):
                yield piece.moved(i * each)


class Joined(Several):
    """Parts of a tensor, one below the other; or groups of parts whose rows take turns."""

    def __init__(self, parts: list[SourceTensor], in_turn: int):
        """in_turn: how many parts take turns; 1 if none do."""
        super().__init__(parts)
        self.in_turn = in_turn

    def pieces(self, rows: Rows, made_of: MadeOf) -> Iterator[Piece]:
        """rows: a slice for each group."""
        turns = self.in_turn
        groups = [self.of[i : i + turns] for i in range(0, len(self.of), turns)]
        start = 0  # of a group, among all rows
        at = 0  # among the requested rows
        for some, group in zip(rows, groups, strict=True):
            of_part = slice((some.start - start) // turns, (some.stop - start) // turns)
            for i, part in enumerate(group):
                for piece in made_of(part, [of_part]):
                    yield piece.moved(at + i, turns)
            start += turns * group[0].rows
            at += some.stop - some.start


class Floats(SourceTensor):
    """A tensor of floats in one file."""

    @property
    def dtype(self) -> torch.dtype:
        return self.files[self.name][0].dtype

    def floats(self, rows: Rows, columns: slice, most: int) -> Iterator[Piece]:
        (tensor,) = self.files[self.name]
        for place, spans in self.split(rows, columns, most):
            yield Piece(place, [tensor.cut(spans)], self.made)

    def made(self, tensors: list[Tensor]) -> Tensor:
        (values,) = tensors
        return self.in_pairs(values)

    def flaw(self, dtype: torch.dtype) -> str | None:
        for _, values in self.read(CPU, [ALL]):
            holds = None
            if not torch.isfinite(values).all():
                holds = "NaN or inf"
            elif not torch.isfinite(values.to(dtype)).all():
                holds = f"values beyond the range of {dtype}; try dtype fp32"
            if holds:
                return one_line(
                    f"{self.name} in {self.files[self.name][0].file.name} holds {holds}"
                )
        return None


class ShardedFloats(Floats):
    """A tensor of floats whose rows or columns are divided among Meta's shards."""

    def axis(self, files: list[FileTensor]) -> int | None:
        """The axis along which to join the shards; any axis if each is already the whole tensor.
        Returns None if they do not add up to the expected shape."""
        first = files[0].shape
        count = len(files)
        if len(self.shape) == 1:  # every shard repeats the norms
            count = 1
        if any(tensor.shape != first for tensor in files):
            return None
        for axis in range(len(first)):
            if self.shape == (*first[:axis], first[axis] * count, *first[axis + 1 :]):
                return axis
        return None

    def fits(self, files: list[FileTensor], wanted: Wanted) -> bool:
        of_types = all(tensor.dtype in wanted.types for tensor in files)
        return of_types and self.axis(files) is not None

    def floats(self, rows: Rows, columns: slice, most: int) -> Iterator[Piece]:
        files = self.files[self.name]
        axis = self.axis(files)
        size = files[0].shape[axis]
        if size == self.shape[axis]:
            files = files[:1]
        for place, spans in self.split(rows, columns, most):
            parts = []
            for i, tensor in enumerate(files):
                start = max(spans[axis].start - i * size, 0)
                stop = min(spans[axis].stop - i * size, size)
                if start < stop:
                    of_shard = [*spans[:axis], range(start, stop), *spans[axis + 1 :]]
                    parts.append(tensor.cut(of_shard))
            yield Piece(place, parts, partial(torch.cat, dim=axis))


class QuantisedMatrix(SourceTensor):
    """A matrix, or a stack of them, that others have quantised."""

    def floats(self, rows: Rows, columns: slice, most: int) -> Iterator[Piece]:
        for piece in self.quantised(rows, ALL, most):
            yield piece._replace(make=partial(self.decoded, piece.make, columns))

    def decoded(
        self, make: Callable[[list[Tensor]], Quantised], columns: slice, tensors: list[Tensor]
    ) -> Tensor:
        return quantised.decoded(self.scheme, make(tensors))[:, columns]

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            file = next(iter(self.files.values()))[0].file
            raise ValueError(f"{file}: {self.name} has {error}") from None


class GgufMatrix(QuantisedMatrix):
    """A matrix or a stack in one of ggml's types, each row of which is a row of blocks."""

    def quantised(self, rows: Rows, columns: slice, most: int) -> Iterator[Piece]:
        in_bytes = lambda k: k // self.scheme.block * self.scheme.nbytes
        *outer, K = self.shape
        (tensor,) = self.files[self.name]
        in_file = replace(tensor, dtype=torch.uint8, shape=(*outer, in_bytes(K)))
        for place, (*some, span) in self.split(rows, columns, most):
            some.append(range(in_bytes(span.start), in_bytes(span.stop)))
            yield Piece(place, [in_file.cut(some)], self.made)

    def made(self, tensors: list[Tensor]) -> Quantised:
        (raw,) = tensors
        with self.named_errors():
            return quantised.checked(quantised.from_blocks(self.scheme, self.in_pairs(raw)))


class SafetensorsMatrix(QuantisedMatrix):
    """A matrix in one of the schemes of safetensors. It is read as a whole, since it may be stored
    transposed."""

    def problems(self) -> Iterator[str]:
        N, K = self.shape
        group = max(self.scheme.group, self.scheme.format.group)
        if N % 8 or K % group:
            shape = list(self.shape)
            yield f"{self.name} is {shape}, not a multiple of 8 rows and {group} columns"
        yield from super().problems()

    def quantised(self, rows: Rows, columns: slice, most: int) -> Iterator[Piece]:
        files = [file for (file,) in self.files.values()]
        for place, spans in self.split(rows, columns, math.prod(self.shape)):
            yield Piece(place, files, partial(self.made, *spans))

    def made(self, rows: range, columns: range, tensors: list[Tensor]) -> Quantised:
        K = self.shape[1]
        taken = slice(rows.start, rows.stop)

        def cut(t: Tensor | None) -> Tensor | None:
            if t is None:
                return None
            return self.in_pairs(t[taken].contiguous())[:, columns_in(columns, K, t.shape[1])]

        words = [name.rpartition(".")[2] for name in self.files]
        with self.named_errors():
            matrix = quantised.checked(self.scheme.read(dict(zip(words, tensors))))
        return Quantised(*map(cut, matrix))


class SavedMatrix(SourceTensor):
    """A matrix of the model, its parts joined, or a stack, in the format in which `--save` wrote
    it."""

    def write(
        self, format: Format, out: Tensors, device: torch.device, rows: Rows, columns: slice
    ) -> None:
        K = self.shape[-1]
        span = range(K)[columns]
        if not format.can_be_cut(K, len(span)):
            what = f"{self.name} was saved in {format.name}, where its {K} columns"
            parts = K // len(span)
            raise ValueError(f"{what} cannot be divided among {parts} processes: take the original")
        pieces = self.stored(rows, columns, weights_at_once(device))
        for place, stored in in_order(pieces, device):
            for tensor, values in zip(out, stored, strict=True):
                to = tensor[place]
                to.copy_(values.view(to.shape), non_blocking=True)
        try:
            format.check(out)
        except ValueError as error:
            ((tensor,), *_) = self.files.values()
            raise ValueError(
                f"{tensor.file}: {self.name} has {error}: save it again from the original"
            ) from None

    def stored(self, rows: Rows, columns: slice, most: int) -> Iterator[Piece]:
        """The pieces of all that the format stores."""
        *outer, K = self.shape
        for place, (*some, span) in self.split(rows, columns, most):
            parts = []
            for (tensor,) in self.files.values():
                in_row = tensor.shape[1:]  # none if it is written as a vector
                taken = [range(M)[columns_in(span, K, M)] for M in in_row]
                parts.append(replace(tensor, shape=(*outer, *in_row)).cut([*some, *taken]))
            yield Piece(place, parts, lambda tensors: tensors)


def columns_in(columns: range | slice, K: int, M: int) -> slice:
    """Where these of a matrix's K columns are in a tensor that stores them in M columns."""
    return slice(columns.start * M // K, -(-columns.stop * M // K))
