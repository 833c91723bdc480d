"""The user interface: standard streams and one-line errors, flags, the terminal, the conversation.
Importing it does not import torch, which takes seconds: --help and errors in the command line do
not wait for that."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import json
import os
import re
import shutil
import signal
import sys
import textwrap
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

try:
    import readline
except ImportError:  # some builds of Python lack it: lines are then read without editing
    readline = None

from extra.files import one_line, text_of
from extra.hub import local_checkpoint
from tokenizer import Prompt

DEFAULT_MODEL = Path(__file__).resolve().parent / "models" / "tales"
HISTORY = 1000  # messages that the arrow keys reach
# In place of control characters, which could move the cursor or worse, for str.translate; tab and
# newline stay
HARMLESS = dict.fromkeys(
    [*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}"
) | {ord("\r"): " "}
YOURS, PLAIN = (
    "\001\033[1;32m\002",
    "\033[0m",
)  # typed text is bold green; \001 and \002 enclose no columns


# ---- standard streams


def use_safe_streams() -> None:
    """Make the standard streams UTF-8. One that is closed becomes /dev/null; so do all of any rank
    but the first."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None or not is_rank0():
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8", errors="strict")
    sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")


def is_rank0() -> bool:
    """Whether this is the only process or, of those that torchrun started, the first."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["RANK"] == "0"


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """While this lasts, SIGTERM and SIGHUP raise SystemExit, so that nothing half-written is left
    behind."""
    handled = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in handled:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def import_torch() -> None:
    """Import torch, which takes seconds. Meanwhile, and until exit_code, Ctrl-C ends the program at
    once: a library might swallow a KeyboardInterrupt that is raised while it is imported."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        note(
            f"error: {error}: `make run` sets up .venv with all that is needed; or pip install -r requirements.txt"
        )
        sys.exit(1)


def exit_code(work: Callable[..., int], args: argparse.Namespace) -> int:
    """Do a program's work(args, parallel.Ranks) and return its exit code: 1, with one line on
    stderr (with --debug, a traceback), if it fails. If there are several processes, each exits
    here."""
    from extra.parallel import Ranks

    signal.signal(signal.SIGINT, signal.default_int_handler)
    ranks = Ranks.of_torchrun()
    try:
        if args.ignored and not vars(args).get("quiet"):
            note(f"note: {', '.join(args.ignored)}: no effect here, ignored")
        code = work(args, ranks)
        sys.stdout.flush()
        if code != 130:  # after Ctrl-C the others may wait for something else: torchrun ends them
            ranks.finish()
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        code = 0 if ranks.size == 1 else 1  # for torchrun to end the others
    except KeyboardInterrupt:
        code = 130
    except SystemExit as exit:  # see ending_cleanly
        code = exit.code
    except Exception as error:
        if error := ranks.to_report(error):
            note(traceback.format_exc().rstrip() if args.debug else f"error: {error_line(error)}")
        code = 1
    try:
        sys.stdout.flush()
    except OSError:  # Python would try again when it exits, and report it a second time
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    # Python's own way out is longer: there, libraries wait for ranks that may be dead
    if ranks.size > 1:
        os._exit(code)
    return code


def note(text: str) -> None:
    """Write lines to stderr. At a terminal they are wrapped at words, under what follows a line's
    label."""
    if sys.stderr.isatty():
        under = [re.match(r"(\S+ )+ +|", line).end() * " " for line in text.split("\n")]
        fill = functools.partial(
            textwrap.fill, width=screen_width(), break_long_words=False, break_on_hyphens=False
        )
        text = "\n".join(
            fill(line, subsequent_indent=indent) for line, indent in zip(text.split("\n"), under)
        )
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # a full disk or a closed pipe behind it does not end a good run
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def error_line(error: Exception) -> str:
    """An error's message as one printable line; of an OSError, the file, if any, and the reason,
    without the errno."""
    said = str(error)
    if isinstance(error, OSError) and error.strerror:
        said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return one_line(said) or type(error).__name__


def read_input(file: str | None) -> str:
    """The text of a file, or (None) of standard input, without a final newline."""
    with nullcontext(sys.stdin.buffer) if file is None else open(file, "rb") as f:
        return (
            text_of(f, "standard input" if file is None else file)
            .removesuffix("\n")
            .removesuffix("\r")
        )


# ---- the command line, of run.py and of bench.py

DTYPE_NAMES, FORMATS_8 = ("fp32", "fp16", "bf16"), ("e4m3", "e5m2")
FORMAT_NAMES = (*FORMATS_8, "int4")
IGNORED = (  # flags of llama.cpp that mean nothing here
    "-ngl --gpu-layers --n-gpu-layers -fa --flash-attn -b --batch-size -ub --ubatch-size --mmap --no-mmap --mlock "
    "--jinja --no-warmup -co --color --log-disable --simple-io -tb --threads-batch --context-shift --no-context-shift "
    "--keep -np --parallel --numa --perf --no-perf --repack --no-repack --verbose-prompt -mli --multiline-input"
).split()


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, whole flag names only, and flags that apply only in some of a
    program's modes."""

    def __init__(self, description: str, modes: dict[str, str]):
        """modes: the name of each mode, and what error messages call it."""
        hidden = argparse.SUPPRESS  # flags that are not given are absent from what argparse returns
        options = dict(allow_abbrev=False, argument_default=hidden)
        super().__init__(usage="%(prog)s [flags]", description=description, **options)
        self.epilog = f"Accepted as in llama.cpp, and ignored: {', '.join(IGNORED)}."
        self.add_argument(*IGNORED, nargs="?", dest="ignored", help=hidden)
        self.modes, self.defaults = modes, {}
        self.modes_of: dict[str, list[str]] = {}  # the modes in which a flag applies, if not all

    def group(self, title: str, modes: str = "") -> Callable:
        """A group of flags, as a function that adds a flag to it. modes: those in which its flags
        apply, if not all."""
        return functools.partial(self._flag, self.add_argument_group(title), modes)

    def _flag(
        self, group, modes: str, *names: str, help: str, default=None, only: str = "", **options
    ) -> None:
        """only: the modes in which this flag applies, if fewer than its group's."""
        if options.get("action") in ("store_true", "store_false"):
            default = bool(default)
        elif isinstance(default, str | int | float) and default != "":
            help += f" [{default}]"
        action = group.add_argument(*names, help=help.replace("%", "%%"), **options)
        self.defaults[action.dest] = default
        if only or modes:
            self.modes_of |= dict.fromkeys(names, (only or modes).split())

    def parse(
        self, argv: list[str] | None, mode_of: Callable[[argparse.Namespace], str]
    ) -> argparse.Namespace:
        """The flags' values, plus `mode`, `given`: the names of those on the command line, and
        `ignored`."""
        argv = sys.argv[1:] if argv is None else argv
        given, rest = self.parse_known_args(argv)
        if rest:
            self.error(self._unknown(rest[0]))
        args = argparse.Namespace(**self.defaults | vars(given))
        args.given, args.mode = set(vars(given)), mode_of(args)
        typed = [word.split("=")[0] for word in argv]
        args.ignored = [flag for flag in typed if flag in IGNORED]
        for flag in typed:
            modes = self.modes_of.get(flag, [args.mode])
            if args.mode not in modes:
                needed = [self.modes[mode] for mode in modes if self.modes[mode].startswith("-")]
                if needed and not self.modes[args.mode].startswith("-"):
                    self.error(f"{flag} needs {' or '.join(needed)}")
                self.error(f"{flag} cannot be used with {self.modes[args.mode]}")
        return args

    def _unknown(self, word: str) -> str:
        flags = self._option_string_actions
        if not word.startswith("-"):
            return f"unexpected argument {word!r}" + (
                f": write -p {word!r}" if "--prompt" in flags else ""
            )
        if re.match("-ct[kv]|--cache-type-[kv]", word):
            return f"unknown flag {word}: --kv-fp8 keeps keys and values in 8 bits"
        near = difflib.get_close_matches(word.split("=")[0].replace("_", "-"), flags, 1, 0.8)
        return f"unknown flag {word}" + (f": did you mean {near[0]}?" if near else "")

    def find(self, models: Iterable[str | None], files: Iterable[str | None] = ()) -> None:
        """Exit with 1 and one line if a model or a file is missing. Only rank 0 looks: others may
        lack what only it reads."""
        if not is_rank0():
            return
        try:
            for model in filter(None, models):
                local_checkpoint(model)
            for file in filter(None, files):
                os.stat(file)
        except (OSError, ValueError) as error:
            self.exit(1, f"error: {error_line(error)}\n")

    def error(self, message: str):
        if not is_rank0():
            time.sleep(30)  # until rank 0 has reported the same, and torchrun ends this process
        self.exit(2, f"error: {one_line(message.removeprefix('argument '))} (see --help)\n")

    def _get_option_tuples(self, option_string: str) -> list:
        return []  # argparse would take -ngl for -n with the value gl


def within(kind: type, low: float, high: float = float("inf")):
    """An argparse type: a number in a range."""

    def number(text: str):
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text}: must be {what}") from None
        if not low <= value <= high:
            limit = f"{low:,} or more" if high == float("inf") else f"from {low:,} to {high:,}"
            raise argparse.ArgumentTypeError(f"{text}: must be {limit}")
        return value

    return number


def device_name_of(text: str) -> str:
    """cpu, cuda or cuda:N; llama.cpp's spellings, none and CUDAN, are accepted too."""
    return "cpu" if text == "none" else re.sub(r"^CUDA(\d+)$", r"cuda:\1", text)


# ---- what a terminal shows


def columns(text: str) -> int:
    """How many columns of a terminal a text takes."""
    shown = (char for char in text if unicodedata.category(char) not in ("Mn", "Me", "Cf"))
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in shown)


def screen_width() -> int:
    # some wrap as soon as the last column is written
    return max(shutil.get_terminal_size().columns - 1, 2)


class Printer:
    """Writes a text to stdout as it arrives. On a terminal, control characters are replaced, and
    each word is held back until it ends and moves to the next line if it does not fit."""

    def __init__(self, first: str = ""):
        """first: what is written before the text, as soon as that begins."""
        self.first, self.at_terminal = first, sys.stdout.isatty()
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        text, self.first = self.first + text, ""
        show("".join(map(self._wrapped, text.translate(HARMLESS))) if self.at_terminal else text)

    def end(self) -> None:
        """Write what is held back, and end the line."""
        show(self._release() + "\n")
        self._column = 0

    def _wrapped(self, char: str) -> str:
        """What can be written now that this character has arrived."""
        if char == "\n":
            out = self._release()
            self._column = 0
            return out + char
        if char.isspace():
            out = self._release()
            gap = min(8 - self._column % 8 if char == "\t" else 1, screen_width() - self._column)
            # none at the edge: the next word begins a line and needs no space before it
            self._column += gap
            return out + " " * gap
        breakable = columns(char) == 2  # a line may break on either side of a wide character
        out = self._release() if breakable or columns(self._word + char) > screen_width() else ""
        self._word += char
        return out + self._release() if breakable else out

    def _release(self) -> str:
        """The word held back, on the next line if it does not fit on this one."""
        word, self._word = self._word, ""
        fits = self._column == 0 or self._column + columns(word) <= screen_width()
        self._column = columns(word) + (self._column if fits else 0)
        return word if fits else "\n" + word


# ---- what a user types


class Reader:
    """Reads messages from standard input; at a terminal with line editing, whole pastes, and a
    persistent history."""

    def __init__(self):
        # one bad byte costs its message, not the conversation
        sys.stdin.reconfigure(errors="surrogateescape")
        self.interactive = sys.stdin.isatty()
        self.edits = self.interactive and sys.stdout.isatty() and readline is not None
        # it shows control sequences instead of obeying them
        dumb = os.environ.get("TERM", "dumb") in ("", "dumb")
        # https://no-color.org
        coloured = self.edits and not dumb and not os.environ.get("NO_COLOR")
        self.colour, self.plain = (YOURS, PLAIN) if coloured else ("", "")
        if self.edits:
            # CPython: off
            readline.parse_and_bind(f"set enable-bracketed-paste {'off' if dumb else 'on'}")
            readline.set_auto_history(False)
            # A JSON string for each message, which may have several lines
            state = os.path.expanduser(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
            self.history = Path(state, "fused-llama", "history")
            with suppress(OSError, ValueError):
                self.history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                for line in self.history.read_text().splitlines()[-HISTORY:]:
                    with suppress(ValueError):  # half a line, where the disk was full
                        readline.add_history(json.loads(line))

    def read(self) -> str:
        """A message: a line, or several if pasted or continued by a backslash. Raises EOFError at
        the end."""
        lines = [self._line("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            with suppress(EOFError):
                lines.append(self._line("  "))
        message = "\n".join(lines).strip()
        if self.edits and message and "\0" not in message:
            readline.add_history(message)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with suppress(OSError), open(os.open(self.history, flags, 0o600), "a") as lines:
                lines.write(json.dumps(message) + "\n")
        return message

    def has_text(self) -> bool:
        """Whether the line that Ctrl-C interrupted had text."""
        return self.edits and readline.get_line_buffer() != ""

    def _line(self, prompt: str) -> str:
        if self.interactive and not self.edits:
            print(prompt, end="", file=sys.stderr, flush=True)
        try:
            with ending_cleanly():  # so that readline restores the terminal
                return input(self.colour + prompt if self.edits else "")
        finally:
            with suppress(OSError):  # the terminal may be closed
                show(self.plain)


# ---- the conversation

HELP = """/clear        forget the conversation and any file read
/system TEXT  set the system prompt, and forget the conversation
/regen        answer the last message again
/read FILE    put a text file before the next message
/exit         leave; so do Ctrl-D and, at an empty line, Ctrl-C twice
A line that ends in \\ continues on the next one; pasted text is one message. Ctrl-C ends an answer
or clears the line."""


class Chat:
    """A conversation. The cache keeps what was evaluated, so that each turn evaluates only what is
    new. With several ranks, rank 0 reads input and renders the template, which may ask for the
    time; the others receive its results and errors."""

    def __init__(self, session: Any):  # a run.Session
        self.session, self.ranks, args = session, session.ranks, session.args
        self.jsonl = args.output == "jsonl"
        self.to_read = ""  # text from /read, which goes before the next message
        self.past: Prompt | None = None  # what the cache holds, up to the last answer
        self.begin(args.system)
        ids, stops = self.ranks.broadcast(session.tokenizer.turn_ends)
        self.eos, self.stops = session.eos | ids, [*args.stop, *stops]
        self.printer, self.reader = Printer(), Reader()
        why = (
            ""
            if args.mode == "chat"
            else "; chatting, since there is no prompt (-no-cnv: plain text)"
        )
        name = session.tokenizer.template_name
        template = (
            f"template: {name}" if name else "this model has no chat template; sending plain text"
        )
        session.note(f"chat      {template}; /help lists commands{why}")

    # turns

    def run(self, message: str | None, single: bool) -> int:
        """Answer the one message, or one after another until the input ends; return the exit
        code."""
        # Whether Ctrl-C ends the answer but not the chat; with several processes, torchrun ends
        # them all
        self.stays = self.reader.interactive and not single and self.ranks.size == 1
        if single:
            with suppress(EOFError):
                self.answer(self.ranks.broadcast(self.reader.read) if message is None else message)
            return 0
        warned = False
        while True:
            try:
                if not self.turn(self.ranks.broadcast(self.reader.read)):
                    return 0
                warned = False
            except EOFError:
                self.blank_line()
                return 0
            except KeyboardInterrupt:
                if not self.stays or warned and not self.reader.has_text():
                    return 130
                note("")
                if not (has_text := self.reader.has_text()):
                    self.session.note("(to leave: Ctrl-C again, Ctrl-D or /exit)")
                warned = not has_text

    def turn(self, message: str) -> bool:
        """Carry out a command or answer a message; return whether the chat goes on. The errors that
        end only the turn are those that all ranks raise."""
        command, _, rest = message.partition(" ")
        try:
            if command in ("/exit", "/quit", "/bye"):
                return False
            elif command == "/help":
                note(HELP)
            elif command == "/clear":
                self.turns, self.to_read = [], ""
                self.session.note("conversation cleared")
            elif command == "/system":
                self.begin(rest.strip())
                self.session.note(
                    f"a new conversation, {'with this' if rest.strip() else 'without a'} system prompt"
                )
            elif command == "/read":
                self.read(rest.strip())
            elif command == "/regen":
                self.answer_again()
            elif re.fullmatch(r"/[a-z]+", command):
                note(f"no command {command}; /help lists them")
            elif message and self.answer(self.to_read + message):
                self.to_read = ""
        except BrokenPipeError:
            raise
        # a message longer than the context, a file that cannot be read
        except (ValueError, OSError) as error:
            note(f"error: {error_line(error)}")
            if self.jsonl:
                show(json.dumps({"prompt": message, "error": error_line(error)}) + "\n")
        return True

    def answer(self, message: str) -> bool:
        """Print the answer to a message, and remember both; Ctrl-C cuts it short. Return whether
        there is one."""
        prompt = self.fit(message)
        self.blank_line()
        answer = self.session.answer(
            message, prompt.ids, self.printer, self.eos, self.stops, at_start=True
        )
        if answer.ended_by == "interrupt" and not self.stays:
            raise KeyboardInterrupt
        answered = bool(answer.ids) or answer.ended_by != "interrupt"
        if answered:
            self.turns += [
                {"role": "user", "content": message},
                {"role": "assistant", "content": answer.text},
            ]
            ids = (
                self.session.tokenizer.encode(answer.text, bos=False)
                if answer.ended_by == "stop"
                else answer.ids
            )
            self.past = Prompt(prompt.text, prompt.ids + ids, answer.text)
        self.blank_line()
        return answered

    def blank_line(self) -> None:
        """Separate the user's text from the model's, if both are on the screen."""
        if self.reader.edits and not self.jsonl:
            show("\n")

    # commands

    def begin(self, system: str) -> None:
        """Forget the conversation, and begin a new one with a system prompt, which may be empty.
        Raises ValueError if it leaves no room for a message, or the template refuses it."""
        messages = [{"role": "system", "content": system}] if system else []
        if system:
            self.length_with("?", messages, "the system prompt")
        # each turn is two messages: the user's and its answer
        self.system, self.turns = messages, []

    def answer_again(self) -> None:
        if not self.turns:
            raise ValueError("there is no answer yet")
        sampling = self.session.sampling
        if sampling.temp == 0:
            self.session.note("note: with --temp 0 the answer is always the same")
        self.session.sampling = dataclasses.replace(sampling, seed=(sampling.seed + 1) % (1 << 63))
        turn, self.turns = self.turns[-2:], self.turns[:-2]
        if not self.answer(turn[0]["content"]):
            self.turns += turn

    def read(self, name: str) -> None:
        """Put a file's text before the next message. Raises ValueError or OSError."""

        if not name:
            raise ValueError("/read needs the name of a file")
        text = self.ranks.broadcast(lambda: read_input(os.path.expanduser(name)))
        text = text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")
        to_read = f"{self.to_read}{text}\n\n"
        self.length_with(to_read, self.system, name)
        self.to_read = to_read
        self.session.note(f"{name}, {len(text):,} characters, goes before your next message")

    # the context

    def fit(self, message: str) -> Prompt:
        """The conversation with a new message. Where it leaves little room for an answer, the
        oldest turns are dropped, and then the beginning of the last answer, until half of the
        context is free; the system prompt stays."""
        size, new, turns = self.session.cache.size, {"role": "user", "content": message}, self.turns
        prompt = self.render([*self.system, *turns, new])
        if len(prompt.ids) + min(size // 4, 256) <= size:
            return prompt
        alone = self.length_with(message, self.system, "the message")
        while turns and len(prompt.ids) > max(size // 2, alone):
            turns = (
                turns[2:] if len(turns) > 2 else self.shortened(turns, len(prompt.ids) - size // 2)
            )
            prompt = self.render([*self.system, *turns, new])
        if turns is not self.turns:
            dropped = "dropped the oldest part of the conversation"
            self.session.note(f"note: the context of {size} tokens is full: {dropped}")
        self.turns = turns
        return prompt

    def shortened(self, turn: list[dict], excess: int) -> list[dict]:
        """A turn without the first `excess` tokens of its answer; empty if nothing of that is
        left."""
        message, answer = turn
        ids = self.session.tokenizer.encode(answer["content"], bos=False)
        # + 1: a space that encoding may put first
        text = self.session.tokenizer.decode(ids[excess + 1 :])
        text = text.lstrip("\N{REPLACEMENT CHARACTER}")  # of a character that was cut in two
        return (
            [message, answer | {"content": text}] if 0 < len(text) < len(answer["content"]) else []
        )

    def length_with(self, message: str, system: list[dict], name: str) -> int:
        """How many tokens a first message takes with a system prompt. Raises ValueError if the
        context is smaller."""
        length = len(self.render([*system, {"role": "user", "content": message}]).ids)
        if length > self.session.cache.size:
            raise ValueError(
                f"{name} takes {length} tokens; the context holds {self.session.cache.size} (see -c)"
            )
        return length

    def render(self, messages: list[dict]) -> Prompt:
        return self.ranks.broadcast(
            lambda: self.session.tokenizer.chat_prompt(messages, past=self.past)
        )
