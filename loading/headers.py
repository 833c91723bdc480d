"""Step 2 of loading (see loading/checkpoint.py): where tensors lie in files, as the headers of the files say,
and the header of a safetensors file. Those of other files are read in gguf.py and torchfile.py. A
header is all that is read of a file until the loader asks for rows of a tensor."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loading.files import open_regular, stamp_of

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

    def cut(self, spans: Sequence[range]) -> "FileTensor":
        """These spans of its dimensions."""
        strides = self.strides or without_gaps(self.shape)
        first = sum(span.start * stride for span, stride in zip(spans, strides))
        shape = tuple(len(span) for span in spans)
        offset = self.offset + first * self.dtype.itemsize
        return replace(self, shape=shape, offset=offset, strides=strides)

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


class Wanted(NamedTuple):
    """The types and the shapes that a file's tensor may have."""

    types: tuple[torch.dtype, ...]
    shapes: list[tuple[int, ...]]


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
