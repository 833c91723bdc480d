"""How the files of a checkpoint are opened and read, in every step of loading. None is trusted:
only regular files of a sane size are read, and an error that quotes them is one printable line."""

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

MESSAGE = 500  # the most characters in a message
FILE_BYTES = 64_000_000  # the most bytes of a file that is read whole
GIT_LFS = b"version https://git-lfs.github.com/spec/"  # how a pointer begins


def one_line(text: str) -> str:
    """The text, short and printable. Names and values in a message may come from a hostile file."""
    if len(text) > MESSAGE:
        text = f"{text[: MESSAGE - 155]} ... {text[-150:]}"
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Make the message of any exception raised inside one short, printable line. It also works as a
    decorator."""
    try:
        yield
    except Exception as error:
        if len(error.args) == 1:
            error.args = (one_line(str(error.args[0])),)
        raise


def open_regular(file: Path) -> io.FileIO:
    """Open a file for reading. Raises FileNotFoundError; ValueError for a pipe, a socket or a
    device, which could block forever, and for the pointer that git without git-lfs leaves."""
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is not a regular file")
    f = file.open("rb", buffering=0)
    try:
        if f.read(64).startswith(GIT_LFS):
            raise ValueError(f"{file} is a git-lfs pointer, not the file itself: run git lfs pull")
        f.seek(0)
    except BaseException:
        f.close()
        raise
    return f


def stamp_of(stat: os.stat_result) -> tuple[int, ...]:
    """What changes when a file is replaced or written: inode, size and time of last change."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def bytes_of(file: BinaryIO, source: str | Path, limit: int = FILE_BYTES) -> bytes:
    """The whole of an open file. Raises ValueError, which names its source, if it has more than
    `limit` bytes."""
    raw = file.read(limit + 1)
    if len(raw) > limit:
        raise ValueError(f"{source} has more than {limit:,} bytes")
    return raw


def text_of(file: BinaryIO, source: str | Path, limit: int = FILE_BYTES) -> str:
    """The text of an open file. Raises ValueError as bytes_of does, and if it is not UTF-8."""
    raw = bytes_of(file, source, limit)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise ValueError(
            f"{source} is not UTF-8: byte 0x{byte:02x} at offset {error.start}"
        ) from None


def read_bytes(file: Path) -> bytes:
    with open_regular(file) as f:
        return bytes_of(f, file)


def read_text(file: Path) -> str:
    with open_regular(file) as f:
        return text_of(f, file)


def read_json(file: Path) -> dict:
    """The object in a JSON file. Raises ValueError."""
    text = read_text(file)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return value


class Fields(dict):
    """A JSON object of a checkpoint whose fields are checked as they are read: every error names
    the file, the field and its value."""

    def __init__(self, file: Path, fields: dict | None = None):
        if fields is None:
            fields = read_json(file)
        super().__init__(fields)
        self.file = file

    def number(
        self, name: str, low: float, high: float, default: float | None = None, kind: type = int
    ):
        """A number from low to high. Raises ValueError for anything else, and where there is
        neither a value nor a default."""
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self.file} lacks the field {name}")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = is_number and low <= value <= high
        if kind is int:
            fits = fits and value == int(value)
        if not fits:
            whole = "whole " if kind is int else ""
            raise ValueError(
                f"{self.file}: {name} is {value!r}; it must be a {whole}number from {low:g} to {high:g}"
            )
        return kind(value)

    def sub(self, name: str) -> "Fields":
        """The object in a field, which is empty if there is none. Raises ValueError."""
        value = self.get(name) or {}
        if not isinstance(value, dict):
            raise ValueError(f"{self.file}: {name} is {value!r}; it must be an object")
        return Fields(self.file, value)

    def refuse_unless(self, name: str, *allowed) -> None:
        """Raise ValueError for a field with another value than these, which would change the result
        in a way that is not implemented. An absent field has the first."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            names = ("absent" if value is None else json.dumps(value) for value in allowed)
            raise ValueError(
                f"{self.file}: {name} is {value!r}, which is not supported"
                f" (supported: {', '.join(names)})"
            )
