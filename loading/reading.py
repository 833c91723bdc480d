"""Reading tensors from files, in steps 2 and 5 of loading (see loading/checkpoint.py): where they lie, as the
headers of the files say, and the header of a safetensors file. A header is all that is read of a
file until the loader asks for rows of a tensor. Several are read together, by threads, into one
buffer, which a GPU copies at once; and while they are converted, the next ones are being read
(in_order)."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loading.files import open_regular, stamp_of

CPU = torch.device("cpu")
READ_BYTES = 1 << 20  # that a thread reads at a time
# Threads that read. One alone copies from the page cache at a fraction of the memory bandwidth
READERS = 4
# Bytes that are read together, unless a single piece has more. For up to 32 MB, a CPU's allocator
# keeps the memory, which is faster than to ask the system for new pages
TOGETHER = 1 << 24

ALIGNED = 64  # bytes at a multiple of which each tensor begins that is read
SHORT_RUN = 64  # bytes; neighbouring elements that are fewer are not read by themselves

# ---- a tensor in a file


@dataclass(frozen=True, eq=False)
class FileTensor:
    """A tensor in a file, or some spans of one: where its elements are."""

    file: Path
    name: str
    dtype: torch.dtype | None  # None if no model here uses its type
    shape: tuple[int, ...]
    offset: int = 0  # of its first byte
    stamp: tuple[int, ...] = ()  # of the file whose header was read, see files.stamp_of
    # In elements, as torch counts them; None: rows follow one another without gaps
    strides: tuple[int, ...] | None = None

    def cut(self, spans: Sequence[range]) -> FileTensor:
        """These spans of its dimensions."""
        strides = self.strides or without_gaps(self.shape)
        first = sum(span.start * stride for span, stride in zip(spans, strides))
        shape = tuple(len(span) for span in spans)
        offset = self.offset + first * self.dtype.itemsize
        return replace(self, shape=shape, offset=offset, strides=strides)

    @property
    def is_scattered(self) -> bool:
        """Whether the elements of a row are no neighbours, as in a matrix that is stored
        transposed."""
        return self.strides is not None and self.strides[-1] != 1

    @property
    def end(self) -> int:
        """Where in the file its last element ends."""
        apart = zip(self.shape, self.strides or without_gaps(self.shape))
        last = sum((size - 1) * stride for size, stride in apart)
        return self.offset + (last + 1) * self.dtype.itemsize

    def runs(self) -> tuple[int, list[int]]:
        """What to read: how many bytes a run of neighbouring elements has, and where in the file each
        run begins. If runs are short, a single one covers them all and whatever lies between."""
        apart = list(zip(self.shape, self.strides or without_gaps(self.shape)))
        length = 1
        while apart and apart[-1][1] == length:
            size, _ = apart.pop()
            length *= size
        if apart and length * self.dtype.itemsize < SHORT_RUN:
            return self.end - self.offset, [self.offset]
        starts = [0]
        for size, stride in apart:
            starts = [start + i * stride for start in starts for i in range(size)]
        of_bytes = self.dtype.itemsize
        return length * of_bytes, [self.offset + start * of_bytes for start in starts]

    def tensor(self, raw: Tensor) -> Tensor:
        """The tensor in the bytes that have been read, uint8 at a multiple of ALIGNED."""
        elements = raw.view(self.dtype)
        _, starts = self.runs()
        strides = without_gaps(self.shape)
        if self.strides and len(starts) == 1:
            strides = self.strides
        return elements.as_strided(self.shape, strides, elements.storage_offset())


def without_gaps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose rows follow one another."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


# ---- safetensors

TYPES = {  # by their names in safetensors; floats have the same names in GGUF
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I8": torch.int8, "U8": torch.uint8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
HEADER_BYTES = 1 << 23  # the most in a safetensors file; enough for 80,000 tensors


def safetensors_header(file: Path) -> tuple[dict[str, str], list[FileTensor]]:
    """The metadata and the tensors of a safetensors file. The library checks its header. A tensor
    without dimensions counts as one with a single element. Raises ValueError."""
    with open_regular(file) as f:
        stamp = stamp_of(os.fstat(f.fileno()))
        size = int.from_bytes(f.read(8), "little")
        try:
            if size > HEADER_BYTES:
                raise ValueError(f"a header of {size:,} bytes")
            # "np" maps the file read-only: it may be larger than the memory
            with safe_open(file, "np"):
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
        found.append(FileTensor(file, name, dtype, shape, offset, stamp))
    return metadata, found


# ---- tensors that are read together


@cache
def readers(process: int) -> ThreadPoolExecutor:
    """The reading threads of a process, since a forked one has none of its parent's. They are
    started once, as a model may be read in thousands of pieces."""
    return ThreadPoolExecutor(READERS)


# An open file, the memory to read into, and where these bytes begin in the file
Job = tuple[io.FileIO, numpy.ndarray, int]


def read(tensors: Sequence[FileTensor]) -> list[Tensor]:
    """Read tensors to the CPU. Raises OSError."""
    return Reading(tensors, CPU).tensors()


class Reading:
    """Tensors of any files that are being read together, so that no thread waits at the end of a
    small one, and a GPU copies all of them at once."""

    def __init__(self, of: Sequence[FileTensor], device: torch.device):
        """Raises OSError."""
        self.of = of
        self.device = device
        runs = [tensor.runs() for tensor in of]
        self.sizes = [-(-length * len(starts) // ALIGNED) * ALIGNED for length, starts in runs]
        self.raw = torch.empty(sum(self.sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.threads: list[Future] = []
        self.files: dict[Path, io.FileIO] = {}
        try:
            for tensor in of:
                if tensor.file not in self.files:
                    self.files[tensor.file] = open_regular(tensor.file)
        except BaseException:
            self.close()
            raise
        jobs: list[Job] = []
        for tensor, (length, starts), raw in zip(of, runs, self.raw.split(self.sizes)):
            memory = raw.numpy()
            for i, start in enumerate(starts):
                for at in range(0, length, READ_BYTES):
                    to = memory[i * length + at : i * length + min(at + READ_BYTES, length)]
                    jobs.append((self.files[tensor.file], to, start + at))
        pool = readers(os.getpid())
        self.threads = [pool.submit(_read, jobs[i::READERS]) for i in range(READERS)]

    def tensors(self) -> list[Tensor]:
        """Wait until all are read, and return them on the device. To a GPU they are copied while
        others are read. Raises OSError."""
        try:
            for cut_short in [thread.result() for thread in self.threads]:
                for f in cut_short:
                    raise OSError(f"{f.name} was cut short while it was being read")
            stamps = {file: stamp_of(os.fstat(f.fileno())) for file, f in self.files.items()}
        finally:
            self.close()
        for tensor in self.of:
            if tensor.stamp != stamps[tensor.file]:
                raise OSError(f"{tensor.file} was replaced while it was being read: run it again")
        on_device = self.raw.to(self.device, non_blocking=True)
        return [t.tensor(raw) for t, raw in zip(self.of, on_device.split(self.sizes))]

    def close(self) -> None:
        """Close the files, once all threads have finished."""
        wait(self.threads)
        for f in self.files.values():
            f.close()


def _read(jobs: list[Job]) -> list[io.FileIO]:
    """Read bytes of files. Returns the files that end before."""
    cut_short = []
    for file, to, at in jobs:
        while len(to):  # one call may read less than it could
            count = os.preadv(file.fileno(), [to], at)
            if not count:
                cut_short.append(file)
                break
            to = to[count:]
            at += count
    return cut_short


# ---- pieces of tensors, one after the other


class Piece(NamedTuple):
    """Some rows of a tensor that are read and converted at once."""

    place: slice  # of these among all rows that are wanted
    files: list[FileTensor]  # what is read
    make: Callable[[list[Tensor]], Any]  # what becomes of that


def in_order(pieces: Iterable[Piece], device: torch.device) -> Iterator[tuple[slice, Any]]:
    """Yields the place of a piece and what it makes, while the next ones are being read."""
    for together, reading in one_ahead(read_together(pieces), device):
        tensors = iter(reading.tensors())
        for piece in together:
            yield piece.place, piece.make([*islice(tensors, len(piece.files))])


def read_together(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yields as many pieces as are read together."""
    together = []
    total = 0
    for piece in pieces:
        size = sum(math.prod(file.shape) * file.dtype.itemsize for file in piece.files)
        if together and total + size > TOGETHER:
            yield together
            together = []
            total = 0
        together.append(piece)
        total += size
    if together:
        yield together


def one_ahead(
    batches: Iterable[list[Piece]], device: torch.device
) -> Iterator[tuple[list[Piece], Reading]]:
    """Yields pieces that are being read together, when the reading of the next ones has begun."""
    begun: list[tuple[list[Piece], Reading]] = []
    try:
        for together in batches:
            files = [file for piece in together for file in piece.files]
            begun.append((together, Reading(files, device)))
            if len(begun) == 2:
                yield begun.pop(0)
        yield from begun
    finally:  # after an error some may be left
        for _, reading in begun:
            reading.close()


def split(spans: list[range], most: int, unit: int = 1) -> Iterator[list[range]]:
    """Spans of a tensor's dimensions, cut into pieces of at most `most` elements, but of whole
    columns and of whole `unit`s of rows: several matrices of a stack, or rows of one."""
    outer, *inner = spans
    each = max(1, math.prod(map(len, inner)))
    if len(inner) == 2 and each > most:
        for i in outer:
            for piece in split(inner, most, unit):
                yield [range(i, i + 1), *piece]
        return
    step = max(1, most // (each * unit)) * unit
    for i in range(0, len(outer), step):
        yield [outer[i : i + step], *inner]


def rows_in(spans: list[range]) -> int:
    """Rows of a matrix, or of all matrices of a stack; elements of a vector."""
    if len(spans) == 1:
        return len(spans[0])
    return math.prod(map(len, spans[:-1]))
