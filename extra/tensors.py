"""Step 5 of loading (see checkpoint.py): the tensors in files, and the tensors of a checkpoint that
the loader reads. These are floats in one file or in several, matrices that others have quantised,
or matrices that `--save` wrote. Only headers are read until rows and columns of a tensor are asked
for.

Nothing in a file is trusted: names, types and shapes are compared with what the configuration says,
and codes and scales are checked as they are read."""

import json
import math
import os
import re
import warnings
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from extra import gguf, schemes
from extra.files import one_line, open_regular, version_of
from formats import Format, Quantised, Tensors

ALL = slice(None)

# ---- the tensors of a file

READ_BYTES = 1 << 20  # that a thread reads at a time
# Threads that read. One alone copies from the page cache at a fraction of the memory bandwidth
READERS = 4
TYPES = {  # by their names in safetensors; floats have the same names in GGUF
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I8": torch.int8, "U8": torch.uint8, "I16": torch.int16, "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


@cache
def readers(process: int) -> ThreadPoolExecutor:
    """The reading threads of a process, since a forked one has none of its parent's. They are
    started once, as models with experts have tens of thousands of tensors."""
    return ThreadPoolExecutor(READERS)


@dataclass(frozen=True, eq=False)
class FileTensor:
    """A tensor that lies in one piece in a file."""

    file: Path
    name: str
    dtype: torch.dtype | None  # None if no model here uses its type
    shape: tuple[int, ...]
    offset: int = 0  # of its first byte
    version: tuple[int, ...] = ()  # of the file whose header was read, see files.version_of

    def read(self, pinned: bool = False, spans: list[range] | None = None) -> Tensor:
        """Read all of it, or these spans of its dimensions; into pinned memory if a GPU is to copy
        it while the next tensor is read. Raises OSError."""
        if spans is None:
            spans = [range(size) for size in self.shape]
        element = self.dtype.itemsize
        row = element * math.prod(self.shape[1:])
        if len(spans) == 2 and len(spans[1]) < self.shape[1]:  # some columns of each row
            length = len(spans[1]) * element
            starts = [i * row + spans[1].start * element for i in spans[0]]
        else:
            length = len(spans[0]) * row
            starts = [spans[0].start * row]
        values = torch.empty([len(span) for span in spans], dtype=self.dtype, pin_memory=pinned)
        lines = values.view(-1).view(torch.uint8).numpy().reshape(len(starts), length)
        jobs = []
        for line, start in zip(lines, starts):
            for at in range(0, length, READ_BYTES):
                jobs.append((line[at : at + READ_BYTES], self.offset + start + at))
        with open_regular(self.file) as f:
            read = lambda some: sum(os.preadv(f.fileno(), [to], offset) for to, offset in some)
            shares = [jobs[i::READERS] for i in range(READERS)]
            count = sum(readers(os.getpid()).map(read, shares))
            version = version_of(os.fstat(f.fileno()))
        if count < values.nbytes:
            raise OSError(f"{self.file} was cut short while it was being read")
        if version != self.version:
            raise OSError(f"{self.file} was replaced while it was being read: run it again")
        return values


@dataclass(frozen=True, eq=False)
class StridedTensor(FileTensor):
    """A tensor of a torch file. Its elements may lie apart, or in another order."""

    strides: tuple[int, ...] = ()

    def read(self, pinned: bool = False, spans: list[range] | None = None) -> Tensor:
        if spans is None:
            spans = [range(size) for size in self.shape]
        first = sum(span.start * stride for span, stride in zip(spans, self.strides))
        last = sum((span.stop - 1) * stride for span, stride in zip(spans, self.strides))
        offset = self.offset + first * self.dtype.itemsize
        flat = FileTensor(
            self.file, self.name, self.dtype, (last - first + 1,), offset, self.version
        )
        return flat.read(pinned).as_strided([len(span) for span in spans], self.strides)


def tensors_of(file: Path) -> list[FileTensor]:
    """The tensors of a file. Raises ValueError."""
    if file.suffix == ".safetensors":
        _, tensors = safetensors_header(file)
        return tensors
    return torch_tensors(file)


def safetensors_header(file: Path) -> tuple[dict[str, str], list[FileTensor]]:
    """The metadata and the tensors of a safetensors file. The library checks its header. A tensor
    without dimensions counts as one with a single element. Raises ValueError."""
    with open_regular(file) as f:
        version = version_of(os.fstat(f.fileno()))
        try:
            with safe_open(file, "pt"):
                size = int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(size))
        except (SafetensorError, ValueError) as error:
            raise ValueError(
                f"{file} is cut short, or no safetensors file ({error}): download it again"
            ) from None
    metadata = header.pop("__metadata__", None) or {}
    found = []
    for name, about in sorted(header.items()):
        shape = tuple(about["shape"]) or (1,)
        offset = 8 + size + about["data_offsets"][0]
        dtype = TYPES.get(about["dtype"])
        found.append(FileTensor(file, name, dtype, shape, offset, version))
    return metadata, found


def torch_tensors(file: Path) -> list[FileTensor]:
    """The tensors of a file that torch.save wrote. torch's own unpickler reads its pickle, without
    running code (weights_only); with the device "meta" it reads no values, but says where they are.
    It accepts more than named, dense tensors; the rest is refused here. Raises ValueError."""
    with open_regular(file) as f:
        version = version_of(os.fstat(f.fileno()))
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise ValueError("it is compressed")  # a few bytes could become any number
                if entry.filename.endswith("/byteorder") and archive.read(entry) != b"little":
                    raise ValueError("it is in big-endian order")
        with warnings.catch_warnings(action="ignore"):  # about types that are refused below
            tensors = torch.load(file, "meta", weights_only=True)
        if not isinstance(tensors, dict) or not all(_is_dense(*item) for item in tensors.items()):
            raise ValueError("it holds something other than named, dense tensors")
    except Exception as error:  # whatever zipfile and torch raise for a damaged file
        # The reason alone, without torch's advice to trust the file
        reason = re.split(r"\n|\. ", str(error))[0] or type(error).__name__
        raise ValueError(
            f"{file} is damaged, or cannot be read safely ({reason}): take the model's safetensors, or save nothing but"
            " tensors by name, with torch 1.6 or later"
        ) from None
    found = []
    for name, t in tensors.items():
        offset = t.untyped_storage()._checkpoint_offset + t.storage_offset() * t.itemsize
        shape = tuple(t.shape)
        found.append(StridedTensor(file, name, t.dtype, shape, offset, version, t.stride()))
    return found


def _is_dense(name: object, value: object) -> bool:
    if type(name) is not str or type(value) not in (Tensor, torch.nn.Parameter):
        return False
    if value.is_quantized or value.is_nested:
        return False
    # One that was saved without values is nowhere in the file
    if value.layout != torch.strided:
        return False
    return value.untyped_storage()._checkpoint_offset is not None


# ---- the tensors of a checkpoint


class Wanted(NamedTuple):
    """The types and the shapes that a file's tensor may have."""

    types: tuple[torch.dtype, ...]
    shapes: list[tuple[int, ...]]


Found = dict[str, list[FileTensor]]  # by name; only Meta's shards have several of one name


class SourceTensor:
    """A tensor of a checkpoint as the loader sees it, however files store it."""

    dtype: torch.dtype | None = torch.float32  # of the floats, or of decoded values

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        found: Found,
        head_dim: int | None = None,
        scheme: gguf.Type | schemes.Scheme | None = None,
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
        self.wanted = wanted or {name: Wanted(schemes.FLOATS, [shape])}
        self.files = {name: found.get(name, []) for name in self.wanted}

    def read(self, device: torch.device, rows: slice, columns: slice = ALL) -> Tensor:
        """Read these rows and columns. For a GPU they are returned in pinned memory, from which
        they are copied while the next ones are read, or on the GPU. For a CPU, floats are returned
        in fp32, since torch is slow at converting between 16-bit types. Rows of q and k are always
        those of whole heads."""
        raise NotImplementedError

    def write(
        self, format: Format, out: Tensors, device: torch.device, rows: slice, columns: slice
    ) -> None:
        """Write these rows and columns into the tensors of a format, without changing a weight.
        Raises ValueError for codes or scales that are not finite."""
        raise NotImplementedError

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

    def in_pairs(self, rows: Tensor) -> Tensor:
        """The rows in the order in which RoPE rotates neighbours."""
        if self.head_dim is None:
            return rows
        heads = rows.view(-1, 2, self.head_dim // 2, *rows.shape[1:])
        return heads.transpose(1, 2).reshape(rows.shape)


def _misfit(files: list[FileTensor], wanted: Wanted) -> str:
    name = files[0].name
    shapes = " + ".join(str(list(tensor.shape)) for tensor in files)
    expected = list(wanted.shapes[0])
    if all(tensor.dtype in wanted.types for tensor in files):
        return f"{name} is {shapes}, expected {expected}"
    in_words = lambda dtype: str(dtype or "another type").removeprefix("torch.")
    listed = " or ".join(map(in_words, wanted.types))
    return f"{name} is {shapes} in {in_words(files[0].dtype)}, expected {expected} in {listed}"


class Floats(SourceTensor):
    """A tensor of floats in one file."""

    @property
    def dtype(self) -> torch.dtype:
        return self.files[self.name][0].dtype

    def values(self, spans: list[range], pinned: bool) -> Tensor:
        """These spans of its dimensions, as the file has them."""
        return self.files[self.name][0].read(pinned, spans)

    def read(self, device: torch.device, rows: slice, columns: slice = ALL) -> Tensor:
        on_gpu = device.type == "cuda"
        spans = [range(size)[taken] for size, taken in zip(self.shape, (rows, columns))]
        values = self.values(spans, on_gpu)
        if not on_gpu:
            return self.in_pairs(values).float()
        if self.head_dim is None:
            return values.pin_memory()
        # A GPU permutes them, since a CPU takes longer to do that than to read them
        return self.in_pairs(values.to(device, non_blocking=True))

    def flaw(self, dtype: torch.dtype) -> str | None:
        """What is wrong with its values, in the file or converted to dtype. Returns None if nothing
        is."""
        for tensor in self.files[self.name]:
            values = tensor.read()
            holds = None
            if not torch.isfinite(values).all():
                holds = "NaN or inf"
            elif not torch.isfinite(values.to(dtype)).all():
                holds = f"values beyond the range of {dtype}; try --dtype fp32"
            if holds:
                return one_line(f"{tensor.name} in {tensor.file.name} holds {holds}")
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

    def values(self, spans: list[range], pinned: bool) -> Tensor:
        files = self.files[self.name]
        axis = self.axis(files)
        size = files[0].shape[axis]
        if size == self.shape[axis]:
            return files[0].read(pinned, spans)
        read = []
        for i, tensor in enumerate(files):
            start = max(spans[axis].start - i * size, 0)
            stop = min(spans[axis].stop - i * size, size)
            if start < stop:
                of_shard = [*spans[:axis], range(start, stop), *spans[axis + 1 :]]
                read.append(tensor.read(spans=of_shard))
        return torch.cat(read, axis) if len(read) > 1 else read[0]


class QuantisedMatrix(SourceTensor):
    """A matrix [N, K] that others have quantised, whose rows are read as Quantised."""

    def quantised(
        self, device: torch.device, rows: slice, columns: slice = ALL
    ) -> Iterator[tuple[slice, Quantised]]:
        """Yields a slice of the requested rows, and the requested columns of these rows."""
        raise NotImplementedError

    def read(self, device: torch.device, rows: slice, columns: slice = ALL) -> Tensor:
        N, K = self.shape
        values = torch.empty(len(range(N)[rows]), K, device=device)
        for some, quantised in self.quantised(device, rows):
            values[some] = schemes.decoded(self.scheme, quantised)
        return values[:, columns]

    def write(
        self, format: Format, out: Tensors, device: torch.device, rows: slice, columns: slice
    ) -> None:
        for some, quantised in self.quantised(device, rows, columns):
            format.write(quantised, tuple(tensor[some] for tensor in out))

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            file = next(iter(self.files.values()))[0].file
            raise ValueError(f"{file}: {self.name} has {error}") from None


class GgufMatrix(QuantisedMatrix):
    """A matrix in one of ggml's types, each row of which is a row of blocks."""

    def quantised(
        self, device: torch.device, rows: slice, columns: slice = ALL
    ) -> Iterator[tuple[slice, Quantised]]:
        N, K = self.shape
        on_gpu = device.type == "cuda"
        in_bytes = lambda k: k // self.scheme.block * self.scheme.nbytes
        span = range(K)[columns]
        spans = [range(N)[rows], range(in_bytes(span.start), in_bytes(span.stop))]
        (whole,) = self.files[self.name]
        in_file = replace(whole, dtype=torch.uint8, shape=(N, in_bytes(K)))
        raw = self.in_pairs(in_file.read(on_gpu, spans).to(device, non_blocking=True))
        weights = schemes.AT_ONCE
        if on_gpu:
            weights *= 16
        at_once = max(1, weights // K)
        for first in range(0, len(raw), at_once):
            some = slice(first, first + at_once)
            with self.named_errors():
                quantised = schemes.checked(schemes.from_blocks(self.scheme, raw[some]))
            yield some, quantised


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

    def quantised(
        self, device: torch.device, rows: slice, columns: slice = ALL
    ) -> Iterator[tuple[slice, Quantised]]:
        K = self.shape[1]
        span = range(K)[columns]
        on_gpu = device.type == "cuda"
        tensors = {}
        for name, (tensor,) in self.files.items():
            word = name.rpartition(".")[2]
            tensors[word] = tensor.read(on_gpu).to(device, non_blocking=True)

        def cut(t: Tensor | None) -> Tensor | None:
            if t is None:
                return None
            return self.in_pairs(t[rows].contiguous())[:, columns_in(span, K, t.shape[1])]

        with self.named_errors():
            whole = schemes.checked(self.scheme.read(tensors))
        yield ALL, Quantised(*map(cut, whole))


class SavedMatrix(SourceTensor):
    """A matrix of the model, its parts joined, in the format in which `--save` wrote it."""

    def write(
        self, format: Format, out: Tensors, device: torch.device, rows: slice, columns: slice
    ) -> None:
        K = self.shape[1]
        span = range(K)[columns]
        if not format.can_be_cut(K, len(span)):
            what = f"{self.name} was saved in {format.name}, where its {K} columns"
            parts = K // len(span)
            raise ValueError(f"{what} cannot be divided among {parts} processes: take the original")
        for place, (tensor,) in zip(out, self.files.values(), strict=True):
            spans = [range(tensor.shape[0])[rows]]
            for M in tensor.shape[1:]:
                spans.append(range(M)[columns_in(span, K, M)])
            read = tensor.read(device.type == "cuda", spans)
            place.copy_(read.view(place.shape), non_blocking=True)
        try:
            format.check(out)
        except ValueError as error:
            raise ValueError(
                f"{tensor.file}: {self.name} has {error}: save it again from the original"
            ) from None


def columns_in(columns: range | slice, K: int, M: int) -> slice:
    """Where these of a matrix's K columns are in a tensor that stores them in M columns."""
    return slice(columns.start * M // K, -(-columns.stop * M // K))
