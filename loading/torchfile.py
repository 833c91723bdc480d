"""The tensors in a file that torch.save wrote, for step 2 of loading (see loading/checkpoint.py): a zip archive
of a pickle, data.pkl, and of the values of each storage, data/KEY, which are not compressed.

A pickle is a program, and these files come from anywhere. torch.load with weights_only lets it call
only a few functions, but as often, and with arguments as large, as it wants. This reader accepts
only the instructions that torch.save writes for named tensors, and what they call only notes where
each tensor lies. No object grows faster than the file is read. Source: torch/serialization.py and
torch/_utils.py."""

import io
import math
import os
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from loading.files import open_regular, stamp_of
from loading.headers import FileTensor, without_gaps

MOST_BYTES = 1 << 22  # of anything in a file but values; enough for 20,000 tensors
STORAGES = {
    "torch.FloatStorage": torch.float32, "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16, "torch.DoubleStorage": torch.float64,
    "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8,
    "torch.ShortStorage": torch.int16, "torch.IntStorage": torch.int32,
    "torch.LongStorage": torch.int64, "torch.BoolStorage": torch.bool,
}  # fmt: skip
OPCODES = set(
    "PROTO GLOBAL REDUCE BUILD BINPERSID EMPTY_DICT SETITEM SETITEMS MARK EMPTY_TUPLE TUPLE TUPLE1 TUPLE2"
    " TUPLE3 BINUNICODE BININT BININT1 BININT2 LONG1 BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE"
    " NEWFALSE STOP".split()
)


def torch_tensors(file: Path) -> list[FileTensor]:
    """The tensors of a file that torch.save wrote. A tensor without dimensions counts as one with a
    single element. Raises OSError, ValueError."""
    with open_regular(file) as f:
        stat = os.fstat(f.fileno())
    try:
        return _tensors(file, stat)
    except Exception as error:  # whatever zipfile and pickle raise for a damaged file
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"{file} is damaged, or cannot be read safely ({reason}): take the model's safetensors, or"
            " save nothing but tensors by name, with torch 1.6 or later"
        ) from None


def _tensors(file: Path, stat: os.stat_result) -> list[FileTensor]:
    with ZipFile(file) as f, zipfile.ZipFile(f) as archive:
        # Everything lies in one folder, whose name is that of the file when it was written
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError("it is compressed")
        if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
            raise ValueError("it is in big-endian order")
        content = archive.read(entries["data.pkl"])
        check_pickle(content)

        def values_at(key: str) -> int:
            """Where the values of a storage begin: after the entry's own header."""
            start = entries[f"data/{key}"].header_offset
            f.seek(start + 26)
            name, extra = struct.unpack("<HH", f.read(4))
            return start + 30 + name + extra

        tensors = Unpickler(content, values_at).load()
    found = []
    for name, place in _named(tensors):
        found.append(FileTensor(file, name, stamp=stamp_of(stat), **place._asdict()))
        if found[-1].end > stat.st_size:
            raise ValueError(f"{name} lies outside it")
    # Tied matrices share their bytes, but a small file must not become a large model
    if sum(math.prod(t.shape) * t.dtype.itemsize for t in found) > 2 * stat.st_size:
        raise ValueError("its tensors overlap")
    return found


def _named(tensors: Any) -> Iterable[tuple[str, "Place"]]:
    """The items of what a pickle makes. Raises ValueError if these are not tensors by name."""
    is_named = lambda name, value: type(name) is str and type(value) is Place
    if not isinstance(tensors, dict) or not all(is_named(*item) for item in tensors.items()):
        raise ValueError("it holds something other than named, dense tensors")
    return tensors.items()


class ZipFile(io.FileIO):
    """A file for zipfile, which trusts the sizes in the file."""

    def read(self, size: int = -1) -> bytes:
        most = MOST_BYTES + 1
        content = super().read(most if size < 0 else min(size, most))
        if len(content) == most:
            raise ValueError(
                f"it has a table of contents or a pickle of more than {MOST_BYTES:,} bytes"
            )
        return content


def check_pickle(content: bytes) -> None:
    """Raise ValueError if a pickle has instructions that torch.save does not write for tensors."""
    tuples = set()
    before = ""
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name not in OPCODES:
            raise ValueError(f"its pickle has the instruction {name}")
        if name.endswith("BINPUT"):
            if argument > len(content):  # the unpickler makes room for as many objects
                raise ValueError("its pickle is damaged")
            if before.startswith("TUPLE"):
                tuples.add(argument)
        # A tuple of a tuple twice, and so on: each would be twice as large as the one before
        if name.endswith("BINGET") and argument in tuples:
            raise ValueError("its pickle has a tuple twice")
        before = name


class Place(NamedTuple):
    """Where a tensor lies, and what it is: fields of a FileTensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...] | None


class StateDict(dict):
    """Stands for the OrderedDict of a state_dict."""

    def __setstate__(self, state: Any) -> None:
        """Ignores the versions of modules, which torch adds as an attribute."""


class Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, values_at: Callable[[str], int]):
        """values_at: where in the file the values of a storage begin, by its key."""
        super().__init__(io.BytesIO(content))
        self.values_at = values_at

    def find_class(self, module: str, name: str) -> Any:
        known = {
            "collections.OrderedDict": StateDict,
            "torch._utils._rebuild_tensor_v2": self.tensor,
            "torch._utils._rebuild_parameter": self.parameter,
            **STORAGES,
        }
        name = f"{module}.{name}"
        if name not in known:
            raise ValueError(f"it refers to {name}")
        return known[name]

    def persistent_load(self, pid: tuple) -> tuple[torch.dtype, int]:
        """The type and the place of a storage."""
        _, dtype, key, *_ = pid
        return dtype, self.values_at(key)

    def tensor(
        self, storage: tuple[torch.dtype, int], first: int, shape: tuple, strides: tuple, *_
    ) -> Place:
        dtype, start = storage
        for number in (first, *shape, *strides):
            if type(number) is not int or number < 0:
                raise ValueError(f"a tensor has the size {number!r}")
        shape = shape or (1,)
        strides = strides or (1,)
        if len(shape) != len(strides):
            raise ValueError(f"a tensor has the shape {shape}, and the strides {strides}")
        if strides == without_gaps(shape):
            strides = None
        return Place(dtype, shape, start + first * dtype.itemsize, strides)

    def parameter(self, data: Place, *_) -> Place:
        return data
