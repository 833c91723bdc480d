"""Llama 2 and its relatives from the command line: complete a prompt, or chat. Text goes to stdout, all else to stderr."""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":  # Ctrl-C ends the program at once, until there is something to shut down cleanly
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import functools
import json
import random
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from template import TEMPLATES
from terminal import decoded, ending_cleanly, first_speaks, note, one_line, printable, text_of, use_safe_streams

if TYPE_CHECKING:  # torch takes seconds to import: --help and command-line errors do not wait for it
    from session import Answer, Session

DEFAULT_MODEL = Path(__file__).resolve().parent / "models" / "tales"
DTYPE_NAMES, FORMATS_8 = ("fp32", "fp16", "bf16"), ("e4m3", "e5m2")
IGNORED = (  # flags of llama.cpp that mean nothing here, each with its nargs
    ("-ngl --gpu-layers --n-gpu-layers", 1), ("-fa --flash-attn", "?"), ("-b --batch-size", 1), ("-ub --ubatch-size", 1),
    ("--mmap", 0), ("--no-mmap", 0), ("--mlock", 0), ("--jinja", 0), ("--no-warmup", 0),
)  # fmt: skip


# ---- flags


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, whole flag names only, and flags that apply only in some of a program's modes."""

    def __init__(self, description: str, modes: dict[str, str]):
        """modes: the name of each mode, and what error messages call it."""
        hidden = argparse.SUPPRESS  # flags that are not given are absent from what argparse returns
        super().__init__(usage="%(prog)s [flags]", description=description, allow_abbrev=False, argument_default=hidden)
        self.modes, self.defaults, self.belongs = modes, {}, {}

    def group(self, title: str, modes: str = "") -> Callable:
        """A group of flags, as a function that adds a flag to it. modes: those in which its flags apply, if not all."""
        return functools.partial(self._flag, self.add_argument_group(title), modes)

    def _flag(self, group, modes: str, *names: str, help: str, default=None, only: str = "", **options) -> None:
        """only: the modes in which this flag applies, if fewer than its group's."""
        if options.get("action") == "store_true" and default is None:
            default = False
        shown = default if isinstance(default, str | int | float) and not isinstance(default, bool) else ""
        help += f" [{shown}]" if shown != "" else ""
        action = group.add_argument(*names, help=help.replace("%", "%%"), **options)
        self.defaults[action.dest] = default
        self.belongs[action.dest] = (only or modes).split()

    def ignored(self, *flags: tuple[str, int | str]) -> None:
        """Accept flags of llama.cpp that mean nothing here; each with its nargs."""
        for names, nargs in flags:
            self.add_argument(*names.split(), nargs=nargs, dest="ignored", action=Ignored, help=argparse.SUPPRESS)
        self.defaults["ignored"], self.belongs["ignored"] = [], []
        self.epilog = f"Accepted as in llama.cpp, and ignored: {', '.join(n.split()[0] for n, _ in flags)}."

    def parse(self, argv: list[str] | None, mode_of: Callable[[argparse.Namespace], str]) -> argparse.Namespace:
        """The flags' values, plus `mode`, and `given`: the names of the flags on the command line."""
        argv = sys.argv[1:] if argv is None else argv
        given, rest = self.parse_known_args(argv)
        if rest:
            self.error(f"unknown flag {rest[0]}" if rest[0].startswith("-") else f"unexpected argument {rest[0]!r}")
        args = argparse.Namespace(**self.defaults | vars(given))
        args.given, args.mode = set(vars(given)), mode_of(args)
        for action in self._actions:
            of = self.belongs.get(action.dest)
            if of and action.dest in args.given and args.mode not in of:
                typed = next(flag for flag in action.option_strings if any(a.split("=")[0] == flag for a in argv))
                mode, flags = self.modes[args.mode], [self.modes[mode] for mode in of if self.modes[mode].startswith("-")]
                if flags and not mode.startswith("-"):
                    self.error(f"{typed} needs {' or '.join(flags)}")
                self.error(f"{typed} cannot be used with {mode}")
        return args

    def error(self, message: str):
        self.exit(2, f"error: {one_line(ValueError(message))} (see --help)\n")

    def _get_option_tuples(self, option_string: str) -> list:
        return []  # argparse would take -ngl for -n with the value gl


class Ignored(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        namespace.ignored = [*getattr(namespace, "ignored", []), option_string]


def within(kind: type, low: float, high: float = float("inf")):
    """An argparse type: a number in a range."""

    def number(text: str):
        value = kind(text)
        if not low <= value <= high:
            most = "" if high == float("inf") else f" and at most {high:,}"
            raise argparse.ArgumentTypeError(f"{text} is out of range: at least {low:,}{most}")
        return value

    number.__name__ = kind.__name__
    return number


def device_name_of(text: str) -> str:
    """cpu, cuda or cuda:N; llama.cpp's spellings, none and CUDAN, are accepted too."""
    return "cpu" if text == "none" else re.sub(r"^CUDA(\d+)$", r"cuda:\1", text)


MODES = {"text": "a prompt", "bare": "no prompt", "chat": "--chat", "save": "--save-fp8"}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__, MODES)
    writes = "text bare chat"
    add = parser.group("model")
    add("-m", "--model", "-hf", "--hf-repo", metavar="MODEL",
        help="folder of a checkpoint, or owner/name of one on the hub [models/tales, beside this program]")  # fmt: skip
    add("-c", "--ctx-size", type=within(int, 0, 1 << 24), metavar="N",
        help="context in tokens; 0: as much as the model was trained for [that, at most 4096]")  # fmt: skip
    add("--dtype", choices=["auto", *DTYPE_NAMES], default="auto", help="auto: the checkpoint's; on a CPU bf16 or fp32")
    add("--fp8", nargs="?", const="e4m3", choices=FORMATS_8, help="keep matrices as 8-bit floats; without a value: e4m3")
    add("--kv-fp8", action="store_true", only=writes, help="keep keys and values as 8-bit floats: half the context's memory")
    add("--save-fp8", metavar="DIR", help="write the model with 8-bit matrices to DIR instead of generating; -m DIR runs it")

    add = parser.group("where it runs")
    add("-dev", "--device", type=device_name_of, default="auto", help="cpu, cuda or cuda:N")
    add("-t", "--threads", type=within(int, 1, 4096), metavar="N",
        help="CPU threads [one for a model of at most 32 MB, otherwise one per core]")  # fmt: skip
    add("--backend", choices=["auto", "torch", "triton"], default="auto", only=writes,
        help="auto: triton on a GPU, torch on a CPU")  # fmt: skip
    add("--accumulate", choices=["auto", "fp32", "fp16"], default="auto", only=writes,
        help="sums of a prompt's products; auto: fp16 on GeForce cards, fast for 8-bit products; fp32: neither")  # fmt: skip

    add = parser.group("text", writes)
    add("-p", "--prompt", metavar="TEXT", only="text chat",
        help="text to continue; - reads standard input; with --chat, the message")  # fmt: skip
    add("-f", "--file", only="text chat", help="read the prompt from a file, verbatim")
    add("-e", "--escape", action="store_true", default=True,
        help="\\n, \\t, \\\\, \\\" and \\xHH in --prompt, --system and --stop mean what they do in C: the default")  # fmt: skip
    add("--no-escape", action="store_false", dest="escape", default=True, help="take them literally")
    add("-n", "--n-predict", "--predict", type=within(int, -2), default=-1, metavar="N",
        help="tokens to generate; -1 and -2: until the end or a full context")  # fmt: skip
    add("-r", "--reverse-prompt", "--stop", action="append", dest="stop", default=[], metavar="TEXT",
        help="stop before this text; may be repeated")  # fmt: skip
    add("--lookup", type=within(int, 1, 15), metavar="N",
        help="propose up to N tokens, those that followed the last ones earlier, and evaluate them in one pass")  # fmt: skip
    add("--draft", "-md", "--model-draft", metavar="MODEL",
        help="the same with proposals from a smaller model of the same vocabulary")  # fmt: skip
    add("--draft-max", type=within(int, 1, 15), default=4, metavar="N", help="how many tokens it proposes")
    add("--ignore-eos", action="store_true", help="never choose the end-of-sequence token")
    add("--prompt-cache", metavar="FILE", help="save the prompt's keys and values to FILE, and reuse those it already holds")

    add = parser.group("sampling", writes)
    add("--temp", "--temperature", type=within(float, 0), metavar="X",
        help="temperature; 0 is greedy [the checkpoint's, or 0.8]")  # fmt: skip
    add("--top-k", type=within(int, 0), metavar="N", help="keep the N best tokens; 0 is off [the checkpoint's, or 40]")
    add("--top-p", type=within(float, 0, 1), metavar="X",
        help="keep the best tokens that together have this probability; 1 is off [the checkpoint's, or 0.95]")  # fmt: skip
    add("--min-p", type=within(float, 0, 1), default=0.05, metavar="X",
        help="keep tokens this probable, relative to the best; 0 is off")  # fmt: skip
    add("--repeat-penalty", type=within(float, 0.01, 100), metavar="X",
        help="divide the logits of recent tokens; 1 is off [the checkpoint's, or 1]")  # fmt: skip
    add("--repeat-last-n", type=within(int, -1), default=64, metavar="N",
        help="how many tokens are recent; -1: the whole context")  # fmt: skip
    add("-s", "--seed", type=within(int, -1, (1 << 63) - 1), default=-1, metavar="N", help="-1: random, and printed")

    add = parser.group("chat", "chat bare")
    add("-cnv", "--conversation", "--chat", action="store_true", dest="chat", only="chat save",
        help="chat; the default at a terminal if there is no prompt and the model has a chat template")  # fmt: skip
    add("-no-cnv", "--no-conversation", action="store_true", only="text bare", help="do not chat")
    add("-st", "--single-turn", action="store_true", only="chat save",
        help="one turn, then exit; implied by --chat with --prompt or --file")  # fmt: skip
    add("-sys", "--system-prompt", "--system", dest="system", default="", metavar="TEXT", help="system prompt")
    add("-sysf", "--system-prompt-file", dest="system_file", metavar="FILE", help="read the system prompt from a file")
    add("--chat-template", metavar="NAME or FILE",
        help=f"instead of the checkpoint's own: a file of Jinja, or one of {', '.join(TEMPLATES)}")  # fmt: skip

    add = parser.group("output")
    add("-o", "--output", choices=["text", "jsonl"], default="text", only=writes,
        help="jsonl: a JSON object for the text or for each turn, with why it ended, counts and seconds")  # fmt: skip
    add("--no-display-prompt", action="store_true", only="text bare", help="print only what is generated")
    add("--quiet", action="store_true", help="print only text and errors")
    add("--debug", action="store_true", help="print errors with their traceback")
    add("--version", action="store_true", help="print the versions that results depend on")
    parser.ignored(*IGNORED)

    args = parser.parse(argv, mode_of)
    if args.version:
        return args
    if args.prompt is not None and args.file is not None:
        parser.error("--prompt and --file both give a prompt; use one")
    if args.lookup and args.draft:
        parser.error("--lookup and --draft both propose tokens; use one")
    if args.draft and args.draft.isdecimal():
        parser.error(f"--draft takes a model; --draft-max {args.draft} says how many tokens it proposes")
    if args.draft is None and "draft_max" in args.given:
        parser.error("--draft-max is for --draft")
    if args.system and args.system_file is not None:
        parser.error("--system and --system-prompt-file both give a system prompt; use one")
    if args.mode == "save" and (args.chat or args.single_turn):
        parser.error("--save-fp8 generates nothing; it takes no --chat")
    if args.escape:
        args.system, args.stop = unescaped(args.system), [unescaped(stop) for stop in args.stop]
    if args.model == "":
        parser.error("-m is empty")
    args.model = args.model or str(DEFAULT_MODEL)
    if args.seed < 0:
        args.seed = random.SystemRandom().randrange(1 << 32)
    return args


def mode_of(args: argparse.Namespace) -> str:
    """Whether to write text, to chat, to save, or ("bare") to do what the model is made for: chat if it has a template."""
    if args.save_fp8 is not None:
        return "save"
    if args.chat or args.single_turn:
        return "chat"
    at_terminal = sys.stdin and sys.stdin.isatty() and sys.stdout and sys.stdout.isatty()
    bare = at_terminal and args.prompt is None and args.file is None and not args.no_conversation
    return "bare" if bare else "text"


def version() -> str:
    found = [f"Python {sys.version.split()[0]}"]
    for package in ("torch", "triton"):
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return f"fused-llama with {', '.join(found)}"


# ---- text input


ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


def unescaped(text: str) -> str:
    """Replace llama.cpp's escapes (common.cpp, string_process_escapes) by what they stand for; other backslashes stay."""

    def character(match: re.Match) -> bytes:
        code = match.group(1)
        return bytes([int(code[1:], 16)]) if len(code) > 1 else ESCAPES[code]

    return os.fsdecode(re.sub(rb"\\([nrt'\"\\]|x[0-9a-fA-F]{2})", character, os.fsencode(text)))


def read_prompt(args: argparse.Namespace) -> str | None:
    """The text of --prompt, of --file, or of standard input (for "--prompt -", or if it is not a terminal); the latter two
    without a final newline. None if there is no prompt."""
    if args.prompt not in (None, "-"):
        return decoded(os.fsencode(unescaped(args.prompt) if args.escape else args.prompt), "--prompt")
    if args.file is not None:
        return read_text(args.file)
    if args.prompt == "-" or not sys.stdin.isatty():
        return without_newline(text_of(sys.stdin.buffer, "standard input"))
    return None


def read_text(file: str) -> str:
    with open(file, "rb") as f:
        return without_newline(text_of(f, file))


def without_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


# ---- what the program does


def complete(session: Session, prompt: str) -> None:
    """Print the prompt, once it is evaluated, and its continuation."""
    from session import Answer

    args, tokenizer = session.args, session.tokenizer
    session.check_length(len(prompt), "the prompt")
    ids = tokenizer.encode(prompt) or [i for i in (tokenizer.bos, tokenizer.eos) if i >= 0][:1]
    if not ids:
        raise ValueError("the prompt is empty, and the tokenizer has no bos or eos to start from")
    answer, before = Answer(len(ids)), "" if args.no_display_prompt else prompt
    try:
        for piece in session.stream(ids, answer, session.eos, args.stop, at_start=not prompt):
            if args.output == "text":
                write(before + piece)
                before = ""
    except KeyboardInterrupt:
        write(last_line(args.output, prompt, answer))
        raise
    write(last_line(args.output, prompt, answer))
    session.note_end(answer)


def last_line(output: str, prompt: str, answer: Answer) -> str:
    return "\n" if output == "text" else json.dumps({"prompt": prompt} | answer.record()) + "\n"


def write(text: str) -> None:
    if text:
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def use_interpreter(args: argparse.Namespace) -> None:
    """On a CPU, Triton's kernels run in its interpreter, which must be selected before they are imported: restart with it."""
    from checkpoint import pick_device
    from launch import INTERPRETED

    if args.backend == "triton" and pick_device(args.device).type == "cpu" and not INTERPRETED:
        os.environ["TRITON_INTERPRET"] = "1"
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.argv])


def save(args: argparse.Namespace) -> int:
    from checkpoint import save_fp8
    from files import left_behind
    from parallel import group

    if group().rank > 0:  # one process does it
        return 0
    format = args.fp8 or "e4m3"
    with ending_cleanly():
        file = save_fp8(args.model, args.save_fp8, fp8=format, dtype=args.dtype, device=args.device, quiet=args.quiet)
    if not args.quiet:
        note(f"saved     {file.parent}: {format} matrices, {file.name} of {file.stat().st_size:,} bytes")
    for text in left_behind(file.parent):
        note(text)
    return 0


def generate(args: argparse.Namespace) -> int:
    """Text or a chat."""
    from chat import Chat, has_template
    from checkpoint import pick_device
    from parallel import group
    from session import Session

    use_interpreter(args)
    group().join(pick_device(args.device))
    args = group().from_first(lambda: args)  # rank 0 decides for all: only it sees the terminal, and its random seed counts
    single = args.single_turn or args.prompt is not None or args.file is not None
    prompt = None if args.mode == "chat" and not single else group().from_first(lambda: read_prompt(args))
    if args.system_file is not None:
        args.system = group().from_first(lambda: read_text(args.system_file))
    session = Session(args)
    session.note(session.summary())
    code = 0
    try:
        if args.mode == "chat" or args.mode == "bare" and has_template(session):
            code = Chat(session).run(prompt, single)
        else:
            complete(session, prompt or "")
    except KeyboardInterrupt:
        code = 130
    session.note("\n" + session.closing())
    return code


def work(args: argparse.Namespace) -> int:
    if args.version:
        print(version(), flush=True)
        return 0
    if args.ignored and not args.quiet:
        note(f"note: {', '.join(args.ignored)}: no effect here, ignored")
    if args.quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read when huggingface_hub is imported
    import_torch()
    return save(args) if args.mode == "save" else generate(args)


def one_line_errors(work: Callable[[], int], debug: bool) -> int:
    """Do a program's work and return its exit code: 1, with one line on stderr (with debug, a traceback), if it fails. If
    there are several processes, each exits here."""
    code = _exit_code(work, debug)
    if "WORLD_SIZE" in os.environ:
        from parallel import group

        group().leave(code)
    return code


def _exit_code(work: Callable[[], int], debug: bool) -> int:
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8", errors="strict")
    try:
        return work()
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        discard_output()
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if "WORLD_SIZE" in os.environ:
            from parallel import group

            if not group().tells():
                return 1
            error = group().explained(error)
        note(traceback.format_exc().rstrip() if debug else f"error: {one_line(error)}")
        try:
            sys.stdout.flush()
        except OSError:  # a full disk: Python would try again when it exits, and report it a second time
            discard_output()
        return 1


def discard_output() -> None:
    """Discard what is still in stdout's buffer, and all that is written from here on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def import_torch() -> None:
    """Import torch, which takes seconds. Meanwhile Ctrl-C ends the program at once: a library might swallow a KeyboardInterrupt
    that is raised while it is imported."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        note(f"error: {error}: `make run` sets up .venv with all that is needed; or pip install -r requirements.txt")
        sys.exit(1)

    signal.signal(signal.SIGINT, signal.default_int_handler)


def main(argv: list[str] | None = None) -> int:
    with first_speaks():
        args = parse_args(argv)
    return one_line_errors(lambda: work(args), args.debug)


if __name__ == "__main__":
    use_safe_streams()
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt, but Python takes a moment to exit
    sys.exit(code)
