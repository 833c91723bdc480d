"""What the user sees and types: standard streams, notes, word wrap, line editing, pasting, history."""

import io
import json
import os
import shutil
import signal
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import readline
except ImportError:  # some builds of Python lack it: lines are then read without editing
    readline = None

HISTORY = 1000  # messages kept
TEXT_BYTES = 64_000_000  # of a prompt in a file: far more than a context holds
# In place of control characters other than tab and newline, for str.translate
HARMLESS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}") | {ord("\r"): " "}
YOURS, PLAIN = "\033[1;32m", "\033[0m"  # what the user types is bold green


class Lossy(io.FileIO):
    """A file that drops what it cannot write."""

    def write(self, data) -> int:
        with suppress(OSError):
            super().write(data)
        return len(data)


def use_safe_streams() -> None:
    """To be called before anything is opened. A closed standard stream is replaced by /dev/null, so that the next file opened
    does not take its place, and a full disk or a closed pipe behind stderr does not end a good run."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # open takes the lowest free descriptor
        pass
    os.close(fd)
    sys.stdin, sys.stdout = sys.stdin or open(0), sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(Lossy(2, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def first_speaks() -> Iterator[None]:
    """From here on, if there are several processes (parallel.py), only the first reads from the terminal and writes to it. The
    command line is parsed in this context: all processes fail on the same error, but only the first reports it, and the others
    wait for torchrun to end them."""
    try:
        others = rank_variables()["RANK"] > 0
    except ValueError as error:
        note(f"error: {error}")
        sys.exit(2)
    if others:
        sys.stdin, sys.stdout = open(os.devnull), open(os.devnull, "w")  # noqa: SIM115
        sys.stderr = sys.stdout
    try:
        yield
    except SystemExit as exit:
        if exit.code and others:
            time.sleep(30)
        raise


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """While this lasts, SIGTERM and SIGHUP raise SystemExit, so that nothing half-written is left behind."""
    handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def rank_variables() -> dict[str, int]:
    """What torchrun tells each of its processes: RANK and LOCAL_RANK (on its host) count from 0, below WORLD_SIZE and
    LOCAL_WORLD_SIZE. Without torchrun, one process. Raises ValueError."""

    def number(name: str, default: int) -> int:
        text = os.environ.get(name, str(default))
        if not (text.isascii() and text.isdecimal() and len(text) < 7):
            raise ValueError(f"the environment variable {name} is {text!r}: torchrun sets it to a number")
        return int(text)

    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    found = {name: number(name, default) for name, default in defaults.items()}
    rank, size = found["RANK"], found["WORLD_SIZE"]
    if size > 1:
        number("MASTER_PORT", 0)
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise ValueError(f"the environment variable WORLD_SIZE is {size}, but {name} is not set: torchrun sets both")
    if rank >= size:
        given = os.environ.get("WORLD_SIZE", "not set")
        raise ValueError(f"the environment variable RANK is {rank}, but WORLD_SIZE is {given}: torchrun sets both")
    return found


def one_line(error: Exception) -> str:
    """An error's message as one printable line; for an OSError about a file, the file and the reason, without the errno."""
    said = str(error)
    if isinstance(error, OSError) and error.strerror:
        said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError) and not said:
        said = "out of memory"
    line = " ".join(said.split())[:500] or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in line)


def decoded(raw: bytes, source: str) -> str:
    """UTF-8 as text. Raises ValueError that names its source."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}") from None


def text_of(file: BinaryIO, source: str, limit: int = TEXT_BYTES) -> str:
    """The whole of an open text file. Raises ValueError if it is not UTF-8 or has more than `limit` bytes."""
    raw = file.read(limit + 1)
    if len(raw) > limit:
        raise ValueError(f"{source} has more than {limit:,} bytes")
    return decoded(raw, source)


def printable(text: str) -> str:
    """Text for a terminal: without control characters, which could move the cursor or worse."""
    return text.translate(HARMLESS)


def is_dumb() -> bool:
    """Whether the terminal shows control sequences instead of obeying them."""
    return os.environ.get("TERM", "dumb") in ("", "dumb")


def has_colours(stream) -> bool:
    """Whether a stream is a terminal with colours, and they are wanted (https://no-color.org)."""
    return stream.isatty() and not is_dumb() and not os.environ.get("NO_COLOR")


def columns(char: str) -> int:
    """How many columns of a terminal a character takes."""
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


class Printer:
    """Writes text to stdout as it arrives. On a terminal, each word is held back until it ends and moves to the next line if it
    does not fit, and control characters, which could move the cursor, are replaced."""

    def __init__(self):
        self.wraps = sys.stdout.isatty()
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        if text:
            sys.stdout.write("".join(map(self._wrapped, text)) if self.wraps else text)
            sys.stdout.flush()

    def end(self) -> None:
        """Write what is held back, and end the line."""
        sys.stdout.write(self._release() + "\n")
        sys.stdout.flush()
        self._column = 0

    def _wrapped(self, char: str) -> str:
        """What can be written now that this character has arrived."""
        if char == "\n":
            out = self._release() + char
            self._column = 0
            return out
        if char.isspace():
            out = self._release()
            if self._column + 1 > self._width():  # the next word begins a line and needs no space before it
                return out
            self._column += 1
            return out + " "
        char = printable(char)
        breakable = columns(char) == 2  # a line may break on either side of a wide character
        out = self._release() if breakable or self._length() + columns(char) > self._width() else ""
        self._word += char
        return out + self._release() if breakable else out

    def _release(self) -> str:
        """The word held back, on the next line if it does not fit on this one."""
        word, length = self._word, self._length()
        self._word = ""
        if not word:
            return ""
        fits = self._column + length <= self._width() or self._column == 0
        self._column = self._column + length if fits else length
        return word if fits else "\n" + word

    def _length(self) -> int:
        return sum(map(columns, self._word))

    @staticmethod
    def _width() -> int:
        return max(shutil.get_terminal_size().columns - 1, 2)  # some terminals wrap as soon as the last column is written


class Reader:
    """Reads messages from standard input; at a terminal with line editing, pastes as one message, and a persistent history."""

    def __init__(self):
        sys.stdin.reconfigure(errors="surrogateescape")  # one bad byte costs its message, not the conversation
        self.interactive = sys.stdin.isatty()
        self.edits = self.interactive and sys.stdout.isatty() and readline is not None
        if self.edits:
            readline.parse_and_bind(f"set enable-bracketed-paste {'off' if is_dumb() else 'on'}")  # CPython turns it off
            readline.set_auto_history(False)
            self._history = history_file()
            for message in recalled(self._history):
                readline.add_history(message)

    def read(self) -> str:
        """A message: one line, or several if they are pasted or continued by a backslash. Raises EOFError at the end."""
        lines = [self._line("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            with suppress(EOFError):
                lines.append(self._line("  "))
        message = "\n".join(lines).strip()
        if self.edits and message and "\0" not in message:
            readline.add_history(message)
            remember(self._history, message)
        return message

    def has_text(self) -> bool:
        """Whether the line that Ctrl-C interrupted had text."""
        return self.edits and readline.get_line_buffer() != ""

    def _line(self, prompt: str) -> str:
        if not self.edits:
            if self.interactive:
                print(prompt, end="", file=sys.stderr, flush=True)
            return input()
        if not has_colours(sys.stdout):
            return input(prompt)
        try:
            return input(f"\001{YOURS}\002{prompt}")  # \001 and \002 tell readline that nothing between them takes a column
        finally:
            sys.stdout.write(PLAIN)
            sys.stdout.flush()


def history_file() -> Path | None:
    """Where messages are kept between runs: in the user's state folder; None if that is missing or cannot be used."""
    state = Path(os.path.expanduser(os.environ.get("XDG_STATE_HOME") or "~/.local/state"))
    if not state.is_dir():
        return None
    try:
        (state / "fused-llama").mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return state / "fused-llama" / "history"


def recalled(file: Path | None) -> Iterator[str]:
    """The latest messages of a history file, which has one JSON string per line, so that a message may have several lines."""
    with suppress(OSError, UnicodeDecodeError):
        lines = file.read_text(encoding="ascii").splitlines() if file else []
        if len(lines) > 2 * HISTORY:
            file.write_text("".join(f"{line}\n" for line in lines[-HISTORY:]))
        for line in lines[-HISTORY:]:
            with suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, str) and "\0" not in message:
                    yield message


def remember(file: Path | None, message: str) -> None:
    with suppress(OSError):
        if file:
            with open(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as lines:
                lines.write(json.dumps(message) + "\n")
