"""Untrusted files: only regular ones of a sane size are read. Tensors are located from headers alone, and read rather than
mapped, so that a file truncated meanwhile is an exception, not a bus error.

A .bin or .pth is a zip of raw storages and one pickle that describes them. The pickle is interpreted here, and only the opcodes
and the few names that torch.save writes for tensors are understood: no unpickler runs, so no code can.
"""

import glob
import io
import json
import math
import os
import re
import secrets
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

MESSAGE = 500  # characters in a message, at most
JSON_BYTES = 10_000_000  # once parsed, JSON takes up to 25 times as much memory
JSON_DEPTH = 32
DIMENSIONS = 8  # of a tensor in a torch file
HEADER_BYTES = 10_000_000  # of a safetensors file
PICKLE_BYTES = 2_000_000  # enough for 10,000 tensors
DIRECTORY_BYTES = 4_000_000  # of a zip
CHUNK_BYTES = 1 << 20  # read at a time: still in the CPU's cache when its checksum is computed
READERS = 4  # threads


# ---- messages


def one_line(text: str) -> str:
    """Short and printable: names and values in a message may come from a hostile file."""
    if len(text) > MESSAGE:
        text = f"{text[: MESSAGE - 155]} ... {text[-150:]}"
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Reduce the message of any exception raised inside to one short, printable line. Also a decorator."""
    try:
        yield
    except Exception as error:
        if len(error.args) == 1:
            error.args = (one_line(str(error.args[0])),)
        raise


# ---- whole files


def open_regular(file: Path) -> io.FileIO:
    """Open a file of a checkpoint for reading. Raises FileNotFoundError; ValueError for a pipe, socket or device, which could
    block for ever, and for a link that leads out of the folder (in the hub's cache, out of the repository)."""
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is not a regular file")
    folder = Path(os.path.realpath(file.parent))  # Path.resolve would raise for a link to itself
    repository = folder.parent.parent
    if folder.parent.name == "snapshots" and repository.name.startswith("models--"):  # of the hub's cache: links to ../../blobs
        folder = repository
    if not Path(os.path.realpath(file)).is_relative_to(folder):
        raise ValueError(f"{file} is a link out of its folder: copy the file itself")
    f = file.open("rb", buffering=0)
    if f.read(64).startswith(b"version https://git-lfs.github.com/spec/"):  # of a repository cloned without git-lfs
        f.close()
        raise ValueError(f"{file} is a git-lfs pointer, not the file itself: run git lfs pull")
    f.seek(0)
    return f


def read_bytes(file: Path, limit: int) -> bytes:
    """A whole regular file. Raises ValueError when it has more than limit bytes."""
    with open_regular(file) as f:
        raw = b"" if os.fstat(f.fileno()).st_size > limit else f.read(limit + 1)
        if not raw and f.seek(0, os.SEEK_END) or len(raw) > limit:
            raise ValueError(f"{file} has more than {limit:,} bytes: not a file of its kind")
    return raw


def read_json(file: Path, limit: int = JSON_BYTES) -> dict:
    """The object in a JSON file of at most `limit` bytes. Raises ValueError."""
    return _parse_json(read_bytes(file, limit), file)


def _parse_json(raw: bytes, file: Path, pairs: Callable[[list], dict] | None = None) -> dict:
    try:
        value = json.loads(raw.decode(), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    level = [value]
    for _ in range(JSON_DEPTH):
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v if isinstance(v, list) else ())]
    if level:
        raise ValueError(f"{file} is not a checkpoint's JSON: it is nested more than {JSON_DEPTH} deep")
    return value


@contextmanager
def folder_beside(target: Path) -> Iterator[Path]:
    """A new folder beside `target`. What is to become the target is written there and then renamed by the caller, so that it
    appears whole or not at all; whatever remains of the folder is deleted."""
    made = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}")  # in containers, pids are often the same
    made.mkdir()
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def left_behind(target: Path) -> list[str]:
    """A note about each such folder that a killed run has left there."""
    found = [
        (path, re.search(r"\.(\d+)-[0-9a-f]{8}$", path.name)) for path in target.parent.glob(f".{glob.escape(target.name)}.*")
    ]
    dead = [path for path, name in found if name and not _is_running(int(name[1]))]
    return [f"note: {path} was left by a run that was killed; it may be deleted" for path in dead]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


# ---- tensors


@dataclass(frozen=True)
class Part:
    """One tensor of one file; Meta's checkpoints split a tensor over several files."""

    file: Path
    name: str
    dtype: torch.dtype | None  # None: one that no model here uses
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # None: contiguous
    offset: int  # of its first byte in the file
    crc: int  # CRC-32 of its bytes; 0: unknown
    version: tuple[int, ...]  # of the file: see _version


def parts_of(file: Path) -> list[Part]:
    """The tensors of a file, from its header alone. Raises ValueError."""
    return safetensors_header(file)[1] if file.suffix == ".safetensors" else _torch_parts(file)


def read_part(part: Part, pinned: bool = False, index: list[range] | None = None) -> Tensor:
    """Read a tensor, or the rows and columns of it that an index spans, into pinned memory if a GPU is to copy it while the
    next one is read. A checksum is of the whole tensor, so where there is one, all of it is read. Raises ValueError if the file
    is damaged, or not the one whose header was read."""
    cut = index is not None and [len(span) for span in index] != list(part.shape)
    if cut and (part.crc or part.strides is not None):
        return read_part(part)[tuple(slice(span.start, span.stop) for span in index)]
    shape = [len(span) for span in index] if cut else part.shape
    flat = torch.empty(math.prod(shape), dtype=part.dtype, pin_memory=pinned)
    to, pieces = memoryview(flat.view(torch.uint8).numpy()), []
    for offset, size in _spans(part, index) if cut else [(0, len(to))]:
        for start in range(0, size, CHUNK_BYTES):
            count = min(CHUNK_BYTES, size - start)
            pieces.append((offset + start, to[:count]))
            to = to[count:]
    if part.crc or flat.nbytes < 1 << 24:
        crc = _read(part, pieces)
    else:  # several threads: a single one copies from the page cache at a fraction of the memory bandwidth
        crc, shares = 0, [pieces[len(pieces) * i // READERS : len(pieces) * (i + 1) // READERS] for i in range(READERS)]
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(_read, [part] * READERS, shares))
    if crc != part.crc:
        raise ValueError(f"{part.file} is damaged: {part.name} does not have its checksum")
    return flat.view(shape) if part.strides is None else flat.as_strided(part.shape, part.strides)


def _spans(part: Part, index: list[range]) -> Iterator[tuple[int, int]]:
    """Offset within the part and length of what an index spans, in bytes: row by row, or of all rows at once."""
    rows, columns, size = index[0], part.shape[1] if len(part.shape) > 1 else 1, part.dtype.itemsize
    if len(index) == 1 or len(index[1]) == columns:
        yield rows.start * columns * size, len(rows) * columns * size
    else:
        for row in rows:
            yield (row * columns + index[1].start) * size, len(index[1]) * size


def _read(part: Part, pieces: list[tuple[int, memoryview]]) -> int:
    """Fill each piece of memory with the part's bytes from its offset on; return the CRC-32, or 0 if the part has none."""
    crc = 0
    with open_regular(part.file) as f:
        if _version(f) != part.version:
            raise ValueError(f"{part.file} was changed while it was being read")
        for offset, to in pieces:
            f.seek(part.offset + offset)
            while to:
                count = f.readinto(to)
                if not count:
                    raise ValueError(f"{part.file} was truncated while it was being read")
                crc = zlib.crc32(to[:count], crc) if part.crc else 0
                to = to[count:]
    return crc


def _version(f: io.FileIO) -> tuple[int, ...]:
    stat = os.fstat(f.fileno())
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


SAFETENSORS_TYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8, "I32": torch.int32,
}  # fmt: skip


def _without_repeats(pairs: list[tuple[str, object]]) -> dict:
    if len(names := dict(pairs)) < len(pairs):
        raise ValueError("it holds a name twice")
    return names


def safetensors_header(file: Path) -> tuple[dict[str, str], list[Part]]:
    """The metadata and the tensors of a safetensors file whose header the library has found sound. Raises ValueError."""
    with open_regular(file) as f:
        version = _version(f)
        start = f.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= size <= min(HEADER_BYTES, version[2] - 8):
            raise ValueError(f"{file} is not a valid safetensors file: its header has {size:,} bytes")
        raw = f.read(size)
    try:
        with safe_open(file, "pt"):
            header = _parse_json(raw, file, _without_repeats)
    except OSError:
        raise
    except Exception as error:  # the library's SafetensorError, _parse_json's ValueError
        raise ValueError(f"{file} is not a valid safetensors file: {error}") from None
    metadata, data = header.pop("__metadata__", None) or {}, 8 + size
    return metadata, [
        Part(file, n, SAFETENSORS_TYPES.get(t["dtype"]), tuple(t["shape"]), None, data + t["data_offsets"][0], 0, version)
        for n, t in sorted(header.items())
    ]


# ---- torch.save's format


class _Storage(NamedTuple):
    key: str
    dtype: torch.dtype
    count: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int  # in elements, like strides
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Global(NamedTuple):
    name: str


STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in dict(
        Double=torch.float64, Float=torch.float32, Half=torch.float16, BFloat16=torch.bfloat16,
        Long=torch.int64, Int=torch.int32, Short=torch.int16, Char=torch.int8, Byte=torch.uint8, Bool=torch.bool,
    ).items()
}  # fmt: skip
REBUILD_TENSOR, REBUILD_PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
ORDERED_DICT = "collections.OrderedDict"
NAMES = {REBUILD_TENSOR, REBUILD_PARAMETER, ORDERED_DICT, *STORAGES}  # all that a pickle of tensors refers to


class _Pickle:
    """Interprets a pickle of tensors. Every step consumes at least a byte, constant time and little memory, and every value is
    an int, a str, a bool, None, a tuple or a dict of these, or one of the three records above."""

    INTS = {"J": "<i", "K": "<B", "M": "<H"}  # opcodes as characters; pickletools lists all of them

    def __init__(self, raw: bytes):
        self.raw, self.at = raw, 0
        self.stack: list = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    def take(self, size: int) -> bytes:
        self.at += size
        if self.at > len(self.raw):
            raise ValueError("its pickle is truncated")
        return self.raw[self.at - size : self.at]

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        return self.take(self.raw.index(b"\n", self.at, self.at + 100) + 1 - self.at)[:-1].decode()

    def since_mark(self) -> list:
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def pop(self, count: int) -> tuple:
        if count > len(self.stack) - (self.marks[-1] if self.marks else 0):
            raise ValueError("its pickle pops more than it has pushed")
        values = tuple(self.stack[-count:])
        del self.stack[-count:]
        return values

    def value(self) -> object:
        while (op := chr(self.take(1)[0])) != ".":
            self.step(op)
        return self.stack[-1]

    def step(self, op: str) -> None:
        push, memo = self.stack.append, self.memo
        if op == "q":
            memo[self.number("<B")] = self.stack[-1]
        elif op == "r":
            memo[self.number("<I")] = self.stack[-1]
        elif op == "h":
            push(memo[self.number("<B")])
        elif op == "j":
            push(memo[self.number("<I")])
        elif op in self.INTS:
            push(self.number(self.INTS[op]))
        elif op == "\x8a":  # LONG1
            push(int.from_bytes(self.take(self.number("<B")), "little", signed=True))
        elif op == "X":
            push(self.take(self.number("<I")).decode())
        elif op == "(":
            self.marks.append(len(self.stack))
        elif op == "t":
            push(tuple(self.since_mark()))
        elif op == ")":
            push(())
        elif op in "\x85\x86\x87":  # TUPLE1, TUPLE2, TUPLE3
            push(self.pop(ord(op) - 0x84))
        elif op in "N\x88\x89":
            push({"N": None, "\x88": True, "\x89": False}[op])
        elif op == "}":
            push({})
        elif op == "s":
            self.set_items(self.pop(2))
        elif op == "u":
            self.set_items(self.since_mark())
        elif op == "c":
            push(self.known(f"{self.line()}.{self.line()}"))
        elif op == "Q":
            push(self.storage(*self.pop(1)[0]))
        elif op == "R":
            push(self.call(*self.pop(2)))
        elif op == "b":  # BUILD: sets attributes, which a state_dict may have; ignored
            self.pop(1)
        elif op == "\x80":
            self.number("<B")  # the protocol
        else:
            raise ValueError(f"its pickle does what no pickle of tensors does (opcode {op!r} at {self.at - 1})")

    def known(self, name: str) -> _Global:
        if name not in NAMES:
            raise ValueError(f"its pickle names {name}: it holds something other than named, dense tensors")
        return _Global(name)

    def set_items(self, flat) -> None:
        target = self.stack[-1]
        for name, value in zip(flat[::2], flat[1::2], strict=True):
            if type(target) is not dict or type(name) is not str:
                raise ValueError("it holds something other than named, dense tensors")
            if name in target:
                raise ValueError(f"it holds {name} twice")
            target[name] = value

    def storage(self, kind, type_, key, _device, count) -> _Storage:
        if kind != "storage" or type(key) is not str or type(type_) is not _Global or type_.name not in STORAGES:
            raise ValueError("it holds storages of an unknown kind")
        return _Storage(key, STORAGES[type_.name], _natural(count))

    def call(self, function, arguments):
        name = function.name if type(function) is _Global else "a value"
        if name == ORDERED_DICT and arguments == ():
            return {}
        if name == REBUILD_PARAMETER and type(arguments[0]) is _Tensor and _without_hooks(arguments[1:]):
            return arguments[0]
        if name == REBUILD_TENSOR and type(arguments[0]) is _Storage and _without_hooks(arguments[4:]):
            storage, offset, shape, strides = arguments[:4]
            if len(shape) > DIMENSIONS or len(strides) > DIMENSIONS:
                raise ValueError("its pickle holds a tensor of more dimensions than a checkpoint's have")
            return _Tensor(storage, _natural(offset), tuple(map(_natural, shape)), tuple(map(_natural, strides)))
        raise ValueError(f"its pickle calls {name}: it holds something other than named, dense tensors")


def _without_hooks(arguments: tuple) -> bool:
    """Whether these can end a call that rebuilds a tensor: requires_grad, empty hooks and, optionally, empty metadata."""
    return len(arguments) in (2, 3) and type(arguments[0]) is bool and all(a in ({}, None) for a in arguments[1:])


def _natural(value) -> int:
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise ValueError("its pickle holds a size that no tensor has")
    return value


class _Zip(io.FileIO):
    """A file for zipfile, which reads the whole directory at once: one that is too large is refused."""

    def read(self, size: int = -1) -> bytes:
        if size > DIRECTORY_BYTES:
            raise ValueError("its zip directory is too large")
        return super().read(size)


def _torch_parts(file: Path) -> list[Part]:
    open_regular(file).close()
    try:
        with _Zip(file) as f, zipfile.ZipFile(f) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            if len(entries) < len(archive.infolist()):
                raise ValueError("it holds two entries of one name")
            return _described(file, f, entries)
    except OSError:
        raise
    except zipfile.BadZipFile:
        raise ValueError(f"{file} is not in torch's zip format: save it again with torch 1.6 or later") from None
    except Exception as error:  # a hostile pickle's: whatever operations on values of the wrong type raise
        raise ValueError(f"{file} is not a checkpoint that can be read safely: {str(error) or type(error).__name__}") from None


def _described(file: Path, f: _Zip, entries: dict[str, zipfile.ZipInfo]) -> list[Part]:
    """The tensors that a zip's data.pkl describes."""
    pickles = [name for name in entries if name.endswith("/data.pkl")]
    if len(pickles) != 1 or entries[pickles[0]].file_size > PICKLE_BYTES:
        raise ValueError("it lacks a data.pkl of a sane size")
    folder = pickles[0].removesuffix("data.pkl")
    if not 1 <= int(_content(f, entries[f"{folder}version"])) <= 10:
        raise ValueError("its version of torch's format is not 1 to 10")
    order = entries.get(f"{folder}byteorder")
    if order and _content(f, order) != b"little":
        raise ValueError("its byte order is not little-endian")
    tensors = _Pickle(_content(f, entries[pickles[0]])).value()
    if type(tensors) is not dict or not all(type(t) is _Tensor for t in tensors.values()):
        raise ValueError("it holds something other than named, dense tensors")
    version, parts = _version(f), []
    for name, (storage, offset, shape, strides) in tensors.items():
        entry = entries[f"{folder}data/{storage.key}"]
        size, count = storage.dtype.itemsize, math.prod(shape)
        if entry.file_size != size * storage.count or offset + count > storage.count:
            raise ValueError(f"{name} does not fit its storage of {entry.file_size:,} bytes")
        if len(strides) != len(shape) or count != 1 + sum((n - 1) * stride for n, stride in zip(shape, strides)):
            raise ValueError(f"{name} has strides with gaps or overlaps: save it again, contiguous")
        crc = entry.CRC if count == storage.count else 0
        parts.append(Part(file, name, storage.dtype, shape, strides, _data(f, entry) + offset * size, crc, version))
    return parts


def _data(f: _Zip, entry: zipfile.ZipInfo) -> int:
    """Where an entry's bytes begin. Raises ValueError unless it is stored uncompressed and complete."""
    f.seek(entry.header_offset)
    header = f.read(30)
    name, extra = struct.unpack("<HH", header[26:])
    start = entry.header_offset + 30 + name + extra
    if header[:4] != b"PK\x03\x04" or f.read(name) != entry.orig_filename.encode():
        raise ValueError(f"its zip directory has {entry.filename} where something else is")
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
        raise ValueError("it is compressed")  # torch never compresses, and a few bytes could unpack to any size
    if start + entry.file_size > os.fstat(f.fileno()).st_size:
        raise ValueError(f"it is truncated: {entry.filename} extends past its end")
    return start


def _content(f: _Zip, entry: zipfile.ZipInfo) -> bytes:
    f.seek(_data(f, entry))
    raw = f.read(entry.file_size)
    if entry.CRC not in (0, zlib.crc32(raw)):
        raise ValueError(f"{entry.filename} does not have its checksum")
    return raw
