"""Reading tensors from files, in step 5 of loading (see loading/checkpoint.py). Several are read together, by
threads, into one buffer, which a GPU copies at once; and while they are converted, the next ones
are being read (in_order)."""

import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from loading.files import open_regular, stamp_of
from loading.headers import ALIGNED, FileTensor

CPU = torch.device("cpu")
READ_BYTES = 1 << 20  # that a thread reads at a time
# Threads that read. One alone copies from the page cache at a fraction of the memory bandwidth
READERS = 4
# Bytes that are read together, unless a single piece has more. For up to 32 MB, a CPU's allocator
# keeps the memory, which is faster than to ask the system for new pages
TOGETHER = 1 << 24

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

    def moved(self, first: int, step: int = 1) -> "Piece":
        """The same piece of a larger tensor, where it is every `step`th row from the `first` on."""
        start, stop = (first + step * row for row in (self.place.start, self.place.stop))
        return self._replace(place=slice(start, stop, step))


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
