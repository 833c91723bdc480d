"""A conversation at the terminal: what it shows, what a user types, the commands."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from prompts import replace_settings
from session import Conversation, Generation, Session
from settings import SETTINGS
from talk.cli import (
    HARMLESS,
    NUMBERS,
    ending_cleanly,
    error_line,
    note,
    read_input,
    show,
    speed,
)
from talk.tools import Part, Router

try:
    import readline
except ImportError:  # some builds of Python lack it: lines are then read without editing
    readline = None

HISTORY = 1000  # messages that the arrow keys reach
# Typed text is bold green; \001 and \002 enclose what takes up no columns
YOURS = "\001\033[1;32m\002"
DIM = "\033[2m"
PLAIN = "\033[0m"


# ---- what a terminal shows


def has_colours() -> bool:
    """Whether stdout is a terminal that obeys control sequences, and may be sent them."""
    # A dumb terminal shows control sequences instead of obeying them
    dumb = os.environ.get("TERM", "dumb") in ("", "dumb")
    return sys.stdout.isatty() and not dumb and not os.environ.get("NO_COLOR")  # no-color.org


class Printer:
    """Writes a text to stdout as it arrives. On a terminal, control characters are replaced."""

    def __init__(self, first: str = ""):
        """first: what is written before the text, as soon as that begins."""
        self.first = first
        self.at_terminal = sys.stdout.isatty()
        self._dim = False

    def write_parts(self, parts: list[Part]) -> None:
        """Write parts of an answer, dimmed what is thought."""
        for part in parts:
            dim = part.kind == "thought"
            if dim and not self._dim:
                show(DIM)
            if self._dim and not dim:
                self.write("\n\n")
                show(PLAIN)
            self._dim = dim
            self.write(part.text)

    def write(self, text: str) -> None:
        text = self.first + text
        self.first = ""
        if self.at_terminal:
            text = text.translate(HARMLESS)
        show(text)

    def end(self) -> None:
        """End the line."""
        show("\n" + PLAIN * self._dim)
        self._dim = False


class Output:
    """Shows what a session generates: as text while it arrives, or as a JSON object when it has
    ended. Notes go to stderr."""

    def __init__(self, session: Session, jsonl: bool = False, quiet: bool = False):
        self.session = session
        self.jsonl = jsonl
        self.quiet = quiet
        self._bar: tqdm | None = None

    def note(self, text: str) -> None:
        if not self.quiet:
            note(text)

    def progress(self, done: int, total: int) -> None:
        """Show how much of a long prompt is evaluated: an argument of Session.generate."""
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()

    def write(self, generation: Generation, prompt: str, first: str = "") -> None:
        """Generate a text and show it. first: what is written before it; prompt: what the JSON object
        has as its prompt. Ctrl-C ends the text early, and its ended_by says so."""
        printer = Printer(first)
        hidden = self.quiet or None  # None: if stderr is no terminal
        self._bar = tqdm(desc="prompt", unit=" tokens", delay=2, leave=False, disable=hidden)
        router = Router(thinks=generation.thinks) if has_colours() else None
        with self._bar, suppress(KeyboardInterrupt), closing(generation):
            for piece in generation:
                if self.jsonl:
                    continue
                if router:
                    printer.write_parts(router.push(piece.text))
                else:
                    printer.write(piece.text)
        if router and not self.jsonl:
            printer.write_parts(router.finish())
        if self.jsonl:
            show(json.dumps({"prompt": prompt} | record(generation)) + "\n")
        else:
            printer.end()
        if generation.ended_by == "context":
            size = self.session.ctx_size
            self.note(f"note: the context of {size} tokens is full (see -c)")


def record(generation: Generation) -> dict:
    """The fields of a text's JSON object, except for its prompt."""
    timings = generation.timings
    prompt_seconds = tokens_per_s = None
    if timings.new_tokens:
        prompt_seconds = timings.prompt_seconds
    if timings.steps:
        tokens_per_s = timings.steps / timings.step_seconds
    return {
        "text": generation.text,
        "ended_by": generation.ended_by,
        "prompt_tokens": generation.prompt_tokens,
        "evaluated_tokens": timings.prompt_tokens,  # of the prompt; the rest were cached
        "new_tokens": timings.new_tokens,
        "prompt_seconds": prompt_seconds,
        "generation_seconds": timings.step_seconds,
        "tokens_per_s": tokens_per_s,
        "passes": timings.passes,
        "proposed_tokens": timings.proposed,
        "accepted_tokens": timings.accepted,
    }


# ---- what a user types


class Reader:
    """Reads messages from standard input; at a terminal with line editing, whole pastes, and a
    persistent history."""

    def __init__(self):
        # One bad byte costs its message, not the conversation
        sys.stdin.reconfigure(errors="surrogateescape")
        self.interactive = sys.stdin.isatty()
        self.edits = self.interactive and sys.stdout.isatty() and readline is not None
        self.colour = self.plain = ""
        if self.edits:
            self._set_up_editing()

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
            self._remember(message)
        return message

    def has_text(self) -> bool:
        """Whether the line that Ctrl-C interrupted had text."""
        return self.edits and readline.get_line_buffer() != ""

    def _line(self, prompt: str) -> str:
        shown = ""
        if self.edits:
            shown = self.colour + prompt
        elif self.interactive:
            print(prompt, end="", file=sys.stderr, flush=True)
        try:
            with ending_cleanly():  # so that readline restores the terminal
                return input(shown)
        finally:
            with suppress(OSError):  # the terminal may be closed
                show(self.plain)

    def _set_up_editing(self) -> None:
        dumb = os.environ.get("TERM", "dumb") in ("", "dumb")
        if has_colours():
            self.colour = YOURS
            self.plain = PLAIN
        # Bracketed paste is off by default in CPython
        readline.parse_and_bind(f"set enable-bracketed-paste {'off' if dumb else 'on'}")
        readline.set_auto_history(False)
        # The history has a line for each message, a string of JSON, since a message may have
        # several lines
        folder = os.path.expanduser(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
        self.history = Path(folder, "fused-llama", "history")
        with suppress(OSError, ValueError):
            self.history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for line in self.history.read_text().splitlines()[-HISTORY:]:
                # what is not a string of JSON, such as half a line, where the disk was full
                with suppress(ValueError, TypeError, RecursionError):
                    readline.add_history(json.loads(line))

    def _remember(self, message: str) -> None:
        readline.add_history(message)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with suppress(OSError), open(os.open(self.history, flags, 0o600), "a") as file:
            file.write(json.dumps(message) + "\n")


# ---- the conversation


class Chat:
    """Reads messages and commands, and shows answers. With several ranks, rank 0 reads the input;
    the others receive it."""

    def __init__(self, conversation: Conversation, output: Output, **options):
        """options: of Session.generate, for every answer."""
        self.conversation = conversation
        self.output = output
        self.options = options
        self.ranks = conversation.session.ranks
        self.reader = Reader()
        self.to_read = ""  # text from /read, which goes before the next message
        self.stats = False  # whether each answer's speed is shown
        self.leaving = False
        self.survives_ctrl_c = False  # then it only ends an answer

    def run(self) -> int:
        """Answer one message after another until the input ends. Returns the exit code."""
        # With several processes, torchrun ends them all
        self.survives_ctrl_c = self.reader.interactive and self.ranks.size == 1
        warned = False
        while not self.leaving:
            try:
                self.turn(self.ranks.broadcast(self.reader.read))
                warned = False
            except EOFError:
                self.blank_line()
                self.leaving = True
            except KeyboardInterrupt:
                has_text = self.reader.has_text()
                if not self.survives_ctrl_c or warned and not has_text:
                    return 130
                note("")
                if not has_text:
                    self.output.note("(to leave: Ctrl-C again, Ctrl-D or /exit)")
                warned = not has_text
        return 0

    def run_once(self, message: str | None) -> None:
        """Answer a single message, by default the first of the input."""
        with suppress(EOFError):
            if message is None:
                message = self.ranks.broadcast(self.reader.read)
            self.answer(message)

    def turn(self, message: str) -> None:
        """Carry out a command or answer a message. The errors that end only the turn are those that
        all ranks raise."""
        if not message:
            return
        name = message.split(maxsplit=1)[0]
        argument = message[len(name) :].strip()
        name = name.lower()
        name = ALIASES.get(name, name)
        try:
            if command := COMMANDS.get(name):
                if command.argument == "FILE" and not argument:
                    raise ValueError(f"{name} needs the name of a file")
                command.run(self, argument)
            elif self.looks_like_a_command(name):
                similar = difflib.get_close_matches(name, COMMANDS, 1)
                meant = f"did you mean {similar[0]}? " if similar else ""
                raise ValueError(f"no command {name}: {meant}/help lists them")
            elif self.answer(self.to_read + message):
                self.to_read = ""
        except BrokenPipeError:
            raise
        # Such as a message longer than the context, or a file that cannot be read
        except (ValueError, OSError) as error:
            note(f"error: {error_line(error)}")
            if self.output.jsonl:
                show(json.dumps({"prompt": message, "error": error_line(error)}) + "\n")

    def looks_like_a_command(self, name: str) -> bool:
        """Whether a message's first word is no path and no comment."""
        is_path = lambda: os.path.exists(name)
        return bool(re.fullmatch("/[a-z]+", name)) and not self.ranks.broadcast(is_path)

    def answer(self, message: str) -> bool:
        """Show the answer to a message. Returns whether there is one."""
        return self._show(message, self.conversation.answer(message, **self._options()))

    def blank_line(self) -> None:
        """Separate the user's text from the model's, if both are on the screen."""
        if self.reader.edits and not self.output.jsonl:
            show("\n")

    # Commands; each is given what follows its name

    def leave(self, _: str) -> None:
        self.leaving = True

    def help(self, _: str) -> None:
        for name, command in COMMANDS.items():
            note(f"{name} {command.argument}".ljust(14) + command.help)
        note(
            "A line that ends in \\ continues on the next one; pasted text is one message. Ctrl-C"
            " ends an answer or clears the line."
        )

    def clear(self, _: str) -> None:
        self.conversation.clear()
        self.to_read = ""
        self.output.note("conversation cleared")

    def begin(self, system: str) -> None:
        """Begin a new conversation with a system prompt, which may be empty."""
        self.conversation.begin(system)
        article = "with this" if system else "without a"
        self.output.note(f"a new conversation, {article} system prompt")

    def answer_again(self, _: str) -> None:
        generation = self.conversation.again(**self._options())
        if self.conversation.sampling.temp == 0:
            self.output.note("note: with --temp 0 the answer is always the same")
        message, _ = self.conversation.turns[-2:]
        self._show(message["content"], generation)

    def switch_stats(self, _: str) -> None:
        self.stats = not self.stats
        self.output.note("speeds are shown" if self.stats else "speeds are not shown")

    def set(self, argument: str) -> None:
        """Change a setting, or show all. Raises ValueError."""
        sampling = self.conversation.sampling
        words = argument.split()
        if words:
            name = words[0].replace("-", "_")
            name = SETTING_NAMES.get(name, name)
            if name not in SETTINGS or len(words) != 2:
                raise ValueError(f"/set needs one of {', '.join(SETTINGS)}, and a number")
            try:
                value = SETTINGS[name].kind(words[1])
            except ValueError:
                needed = NUMBERS[SETTINGS[name].kind]
                raise ValueError(f"{words[1]}: {name} needs {needed}") from None
            self.conversation.sampling = replace_settings(sampling, {name: value})
        values = vars(self.conversation.sampling).items()
        note(", ".join(f"{name} {value}" for name, value in values))

    def save(self, name: str) -> None:
        """Write the conversation as JSON. Raises OSError."""
        text = json.dumps(self.conversation.messages, indent=1)
        self.ranks.broadcast(lambda: Path(os.path.expanduser(name)).write_text(text))
        self.output.note(f"saved to {name}")

    def load(self, name: str) -> None:
        """Go on from a conversation that `save` wrote. Raises ValueError or OSError."""
        text = self.ranks.broadcast(lambda: read_input(os.path.expanduser(name)))
        messages = None
        with suppress(ValueError, RecursionError):
            messages = json.loads(text)
        try:
            self.conversation.go_on_from(messages)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        self.output.note(f"{name}: {len(self.conversation.turns) // 2} turns")

    def read(self, name: str) -> None:
        """Put a file's text before the next message. Raises ValueError or OSError."""
        text = self.ranks.broadcast(lambda: read_input(os.path.expanduser(name)))
        text = text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")
        to_read = f"{self.to_read}{text}\n\n"
        self.conversation.check_first(to_read, self.conversation.system, name)
        self.to_read = to_read
        self.output.note(f"{name}, {len(text):,} characters, goes before your next message")

    # Answers

    def _options(self) -> dict:
        return self.options | {"progress": self.output.progress}

    def _show(self, message: str, generation: Generation) -> bool:
        """Show an answer as it is generated; Ctrl-C cuts it short. Returns whether there is one."""
        if self.conversation.dropped:
            size = self.conversation.session.ctx_size
            dropped = f"dropped the oldest part of the conversation, {self.conversation.dropped}"
            self.output.note(f"note: the context of {size} tokens is full: {dropped}")
        self.blank_line()
        self.output.write(generation, message)
        if generation.ended_by == "interrupt" and not self.survives_ctrl_c:
            raise KeyboardInterrupt
        if generation.ended_by == "length":
            self.output.note(f"note: cut after {generation.timings.new_tokens} tokens (see -n)")
        if self.stats:
            note(speed(generation))
        self.blank_line()
        return generation.answered


class Command(NamedTuple):
    argument: str  # what follows its name, as /help shows it
    help: str
    run: Callable[[Chat, str], None]


# other names of settings, such as temperature for temp
SETTING_NAMES = {
    other: name
    for name, setting in SETTINGS.items()
    for other in (setting.full, setting.checkpoint)
}
COMMANDS = {
    "/clear": Command("", "forget the conversation and any file read", Chat.clear),
    "/system": Command("TEXT", "set the system prompt, and forget the conversation", Chat.begin),
    "/regen": Command("", "answer the last message again", Chat.answer_again),
    "/read": Command("FILE", "put a text file before the next message", Chat.read),
    "/set": Command(
        "NAME X", "change a setting, such as temp 0.5; /set alone shows them", Chat.set
    ),
    "/stats": Command("", "turn the speed of answers on or off", Chat.switch_stats),
    "/save": Command("FILE", "write the conversation to a file", Chat.save),
    "/load": Command("FILE", "go on from a conversation in a file", Chat.load),
    "/help": Command("", "this list", Chat.help),
    "/exit": Command("", "leave; so do Ctrl-D and, at an empty line, Ctrl-C twice", Chat.leave),
}
ALIASES = {"/quit": "/exit", "/bye": "/exit", "/?": "/help"}
