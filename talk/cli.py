"""What the command-line programs share: safe streams, errors of one line, exit codes, flags.

Importing it does not import torch, which takes seconds: --help and errors in the command line do
not wait for that."""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from loading.files import one_line, text_of
from loading.hub import DEFAULT_MODEL, local_checkpoint
from loading.templates import TEMPLATES
from settings import FILTERS, FORMAT_FLAGS, FORMAT_ROWS, OPTIONS, SETTINGS, Options, Sampling

if TYPE_CHECKING:  # they import torch
    from ranks.processes import Ranks
    from session import Generation, Session


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


# In place of control characters, which could move the cursor or worse, for str.translate; tab and
# newline stay
HARMLESS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")
HARMLESS[ord("\r")] = " "


def show(text: str) -> None:
    """Write text to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Write lines to stderr, without control characters, which a file's name may contain."""
    try:
        sys.stderr.write(text.translate(HARMLESS) + "\n")  # at once, where processes share it
        sys.stderr.flush()
    except OSError:  # a full disk or a closed pipe behind it does not end a good run
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


@functools.cache
def note_once(text: str) -> None:
    note(f"note: {text}")


def read_input(file: str | None) -> str:
    """The text of a file, or of standard input if file is None, without a final newline. Raises
    OSError, and ValueError if it is not UTF-8 or too large."""
    if file is None:
        source = nullcontext(sys.stdin.buffer)
        name = "standard input"
    else:
        source = open(file, "rb")  # noqa: SIM115
        name = file
    with source as f:
        text = text_of(f, name)
    return text.removesuffix("\n").removesuffix("\r")


def speed(generation: Generation) -> str:
    """How fast a text was, in a line."""
    timings = generation.timings
    text = f"{timings.new_tokens} tokens"
    if timings.steps:
        text += f", {timings.steps / timings.step_seconds:.1f} tokens/s"
    if timings.new_tokens:
        prompt = f"{timings.prompt_tokens} of {generation.prompt_tokens} tokens evaluated"
        text += f"; prompt: {prompt} in {timings.prompt_seconds:.2f} s"
    return text


# ---- how a program ends


def import_torch() -> None:
    """Import torch, which takes seconds. Meanwhile, and until exit_code, Ctrl-C ends the program at
    once: a library might swallow a KeyboardInterrupt that is raised while it is imported."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        remedy = "`make run` sets up .venv with all that is needed"
        note(f"error: {error}: {remedy}; or pip install -r requirements.txt")
        sys.exit(1)


def exit_code(work: Callable[..., int], args: argparse.Namespace) -> int:
    """Do a program's work(args, ranks) and return its exit code: 1, with one line on
    stderr (with --debug, a traceback), if it fails. If there are several processes, each exits
    here."""
    from ranks.processes import Ranks

    signal.signal(signal.SIGINT, signal.default_int_handler)
    # of whatever library, in one line like ours
    warnings.showwarning = lambda message, *_: note(f"note: {one_line(str(message))}")
    ranks = Ranks.of_torchrun()
    try:
        if args.ignored and not vars(args).get("quiet"):
            note(f"note: {', '.join(args.ignored)}: no effect here, ignored")
        code = work(args, ranks)
        sys.stdout.flush()
        if code != 130:  # after Ctrl-C the others may wait for something else: torchrun ends them
            ranks.finish()
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        code = 0 if ranks.size == 1 else 1  # 1 for torchrun to end the others
    except KeyboardInterrupt:
        code = 130
    except SystemExit as exit:  # see ending_cleanly
        code = exit.code
    except Exception as error:
        code = 1
        if error := ranks.to_report(error):
            report(error, args.debug)
    try:
        sys.stdout.flush()
    except OSError:  # Python would try again when it exits, and report it a second time
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    # Python's own way out is longer: there, libraries wait for ranks that may be dead
    if ranks.size > 1:
        os._exit(code)
    return code


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """While this lasts, SIGTERM and SIGHUP raise SystemExit, so that nothing half-written is left
    behind."""

    def end(number: int, frame) -> None:
        sys.exit(128 + number)

    signals = (signal.SIGTERM, signal.SIGHUP)
    handled = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def report(error: Exception, debug: bool) -> None:
    """Write the error that is being handled to stderr as one line or, with --debug, its
    traceback."""
    if debug:
        note(traceback.format_exc().rstrip())
    else:
        note(f"error: {error_line(error)}")


def error_line(error: Exception) -> str:
    """An error's message as one printable line. For an OSError it is the file, if any, and the
    reason, without the errno."""
    message = str(error)
    if isinstance(error, OSError) and error.strerror:
        message = error.strerror
        if error.filename:
            message = f"{error.filename}: {message}"
    return one_line(message) or type(error).__name__


# ---- flags

IGNORED = (  # flags of llama.cpp that mean nothing here
    "-ngl --gpu-layers --n-gpu-layers -fa --flash-attn -b --batch-size -ub --ubatch-size --mmap "
    "--no-mmap --mlock --jinja --no-warmup -co --color --log-disable --simple-io -tb "
    "--threads-batch --context-shift --no-context-shift --keep --numa --perf "
    "--no-perf --repack --no-repack --verbose-prompt -mli --multiline-input -e --escape "
    "-cb --cont-batching -kvu --kv-unified --cache-reuse --slots"
).split()

INSTEAD = {  # patterns of llama.cpp's flags that do not exist here, and what to use
    "-ct[kv]|--cache-type-[kv]": "--kv-fp8 keeps keys and values in 8 bits",
    "-hff|--hf-file": "write -m OWNER/NAME:KIND, such as owner/name:Q4_K_M",
}


class ShowVersion(argparse.Action):
    """Print the versions that results depend on, and exit."""

    def __call__(self, parser: Parser, *_) -> None:
        try:
            show(f"{version()}\n")
        except OSError as error:
            parser.exit(1, f"error: {error_line(error)}\n")
        parser.exit()


def version() -> str:
    found = [f"Python {sys.version.split()[0]}"]
    for package in ("torch", "triton"):
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return f"fused-llama with {', '.join(found)}"


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, whole flag names only, and flags that apply only in some of a
    program's modes."""

    def __init__(self, description: str, modes: dict[str, str]):
        """modes: the name of each mode, and what error messages call it."""
        # Flags that are not given are absent from what argparse returns
        super().__init__(
            usage="%(prog)s [flags]",
            description=description,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        self.epilog = f"Accepted as in llama.cpp, and ignored: {', '.join(IGNORED)}."
        self.add_argument(*IGNORED, nargs="?", dest="ignored", help=argparse.SUPPRESS)
        about = "print the versions that results depend on"
        self.add_argument("--version", action=ShowVersion, nargs=0, help=about)
        self.modes = modes
        self.defaults: dict[str, object] = {}
        self.modes_of: dict[str, list[str]] = {}  # the modes in which a flag applies, if not all

    def group(self, title: str, modes: str = "") -> Callable:
        """A group of flags, as a function that adds a flag to it. modes: those in which its flags
        apply, if not all."""
        return functools.partial(self._flag, self.add_argument_group(title), modes)

    def stored_as(self, flag: str) -> str:
        """The attribute that holds a flag's value."""
        return self._option_string_actions[flag].dest

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
        if argv is None:
            argv = sys.argv[1:]
        given, rest = self.parse_known_args(argv)
        if rest:
            self.error(self._unknown(rest[0]))
        args = argparse.Namespace(**self.defaults | vars(given))
        args.given = set(vars(given))
        args.mode = mode_of(args)
        flags = [word.split("=")[0] for word in argv]
        args.ignored = [flag for flag in flags if flag in IGNORED]
        for flag in flags:
            modes = self.modes_of.get(flag, [args.mode])
            if args.mode not in modes:
                self.error(self._misplaced(flag, modes, args.mode))
        return args

    def _misplaced(self, flag: str, modes: list[str], mode: str) -> str:
        """What is wrong with a flag that applies only in these modes."""
        needed = [self.modes[name] for name in modes if self.modes[name].startswith("-")]
        if needed and not self.modes[mode].startswith("-"):
            return f"{flag} needs {' or '.join(needed)}"
        return f"{flag} cannot be used with {self.modes[mode]}"

    def _unknown(self, word: str) -> str:
        """What is wrong with a word that argparse does not know."""
        flags = self._option_string_actions.keys() - {*IGNORED}
        if not word.startswith("-"):
            flag = "-p" if "--prompt" in flags and not os.path.exists(word) else "-m"
            return f"unexpected argument {word!r}: write {flag} {word!r}"
        message = f"unknown flag {word}"
        for pattern, remedy in INSTEAD.items():
            if re.match(pattern, word):
                return f"{message}: {remedy}"
        name = word.split("=")[0].replace("_", "-")
        similar = [flag for flag in flags if re.fullmatch(rf"{flag}\d+", name)]  # -n5
        if not similar and len(name) > 3:  # shorter ones all resemble each other
            long = [flag for flag in flags if flag.startswith("--")]
            similar = difflib.get_close_matches(f"--{name.lstrip('-')}", long, 1, 0.8)
        return f"{message}: did you mean {similar[0]}?" if similar else message

    def find(self, models: Iterable[str | None], files: Iterable[str | None] = ()) -> None:
        """Exit with 1 and one line if a model or a file is missing. Only rank 0 looks: others may
        lack what only it reads."""
        if not is_rank0():
            return
        try:
            for model in filter(None, models):
                find_model(model)
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


def find_model(name: str) -> None:
    """Raise OSError or ValueError if there is no such model here, and it cannot be on the hub."""
    try:
        local_checkpoint(name)
    except FileNotFoundError as error:
        blob = ollama_blob(name)
        if not blob:
            raise
        raise FileNotFoundError(f"{error}. Ollama has {name}: write -m {blob}") from None


def ollama_blob(name: str) -> Path | None:
    """The GGUF file of a model that ollama has under this name, if it has one."""
    folder = Path(os.environ.get("OLLAMA_MODELS") or "~/.ollama/models").expanduser()
    if not re.fullmatch(r"([\w.-]+/)?[\w.-]+(:[\w.-]+)?", name):
        return None
    model, _, tag = name.partition(":")
    owner, _, model = model.rpartition("/")
    file = folder.joinpath(
        "manifests/registry.ollama.ai", owner or "library", model, tag or "latest"
    )
    with suppress(OSError, ValueError, KeyError, TypeError):
        for layer in json.loads(file.read_text())["layers"]:
            if layer["mediaType"] == "application/vnd.ollama.image.model":
                return folder / "blobs" / layer["digest"].replace(":", "-")
    return None


# What a value of each type is called
NUMBERS = {int: "a whole number", float: "a number"}


def within(kind: type, low: float, high: float = float("inf")) -> Callable[[str], float]:
    """An argparse type: a number in a range."""
    limit = f"from {low:,} to {high:,}"
    if high == float("inf"):
        limit = f"{low:,} or more"

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: must be {NUMBERS[kind]}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}: must be {limit}")
        return value

    return number


def in_utf8(text: str) -> str:
    """An argparse type: what can be sent to other programs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be UTF-8") from None
    return text


# ---- flags of several programs


def add_option(add: Callable, name: str, writes: str = "", **changes) -> None:
    """Add the flag of a row of settings.Options. writes: the modes in which text is generated, if
    there are others. changes: what is different here."""
    option = OPTIONS[name]
    about: dict[str, object] = {"help": option.help, "default": getattr(Options, name)}
    if option.kind is bool:
        about["action"] = "store_true"
    elif option.choices:
        about["choices"] = [*option.choices]
    elif option.kind is int:
        about |= {"type": within(int, int(option.low), int(option.high)), "metavar": "N"}
    else:
        about["type"] = option.kind
    if option.generates:
        about["only"] = writes
    flags = [option.flag, f"--{name.replace('_', '-')}"]
    add(*filter(None, flags), **about | changes)


def add_model_flags(parser: Parser, writes: str = "") -> Callable:
    """Add the groups "model" and "where it runs". writes: the modes in which text is generated, if
    there are others. Returns the former group, as a function that adds a flag to it."""
    # fmt: off
    add = parser.group("model")
    add("-m", "--model", "-hf", "--hf-repo", metavar="MODEL",
        help="folder of a checkpoint, a GGUF file, or owner/name of one on the hub"
        " [models/tales, beside this program]")
    add_option(add, "ctx_size")
    # fmt: on
    add_option(add, "dtype")
    for flag in FORMAT_FLAGS:
        add_format_flag(add, flag)
    add_option(add, "kv_fp8", writes)
    add_device_flags(parser, writes)
    return add


def add_format_flag(add: Callable, flag: str) -> None:
    """Add a flag of settings.FORMAT_ROWS: what it is given goes to args.formats."""
    names = [name for name, row in FORMAT_ROWS.items() if row.flag == flag]
    about = dict(const=names[0], dest="formats", help=FORMAT_ROWS[names[0]].help)
    if len(names) > 1:
        add(flag, action="append", nargs="?", choices=names, **about)
    else:
        add(flag, action="append_const", **about)


def add_device_flags(parser: Parser, writes: str = "") -> None:
    add = parser.group("where it runs")
    for name, option in OPTIONS.items():
        if not option.placed:
            add_option(add, name, writes)


def options_of(args: argparse.Namespace, **changes) -> dict[str, object]:
    """The options of a run that flags give, as keyword arguments of Session and of checkpoint.load.
    changes: what is different here."""
    defaults = {name: getattr(Options, name) for name in OPTIONS}
    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    return defaults | given | changes


def add_proposal_flags(add: Callable) -> None:
    # fmt: off
    add("--lookup", type=within(int, 1, 15), metavar="N",
        help="propose up to N tokens, at most 15, that followed the last ones earlier in the text,"
        " and evaluate them in one pass")
    add("--draft", "-md", "--model-draft", metavar="MODEL",
        help="the same with proposals from a smaller model of the same vocabulary, or from a head"
        " that was trained for the model (EAGLE-3, in its own layout or in speculators')")
    add("--draft-max", type=within(int, 1, 15), default=4, metavar="N",
        help="how many tokens it proposes, at most 15")
    add("--draft-always", action="store_true",
        help="propose also where that costs more time than it saves")
    # fmt: on


def add_template_flag(add: Callable) -> None:
    # fmt: off
    add("--chat-template", "--chat-template-file", metavar="NAME or FILE",
        help="instead of the checkpoint's own: a file of Jinja, or one of"
        f" {', '.join(TEMPLATES)}")
    # fmt: on


def first_empty(args: argparse.Namespace, *names: str) -> str | None:
    """What is wrong if one of these flags has an empty value. Returns None if none has."""
    for name in names:
        if vars(args)[name] == "":
            return f"--{name.replace('_', '-')} is empty"
    return None


def model_contradiction(args: argparse.Namespace) -> str | None:
    """What is wrong with these flags together; None if nothing is."""
    formats = {FORMAT_ROWS[name].flag for name in args.formats or ()}
    if len(formats) > 1:
        return f"{' and '.join(sorted(formats))} both say how matrices are kept; use one"
    if args.lookup and args.draft:
        return "--lookup and --draft both propose tokens; use one"
    if args.draft is None and "draft_max" in args.given:
        return "--draft-max is for --draft"
    if args.draft_always and not (args.lookup or args.draft):
        return "--draft-always is for --lookup and --draft"
    return None


def settle_model(args: argparse.Namespace) -> None:
    """Set args.format, and args.model if it is not given."""
    args.format = args.formats[-1] if args.formats else None
    if args.model is None:
        args.model = str(DEFAULT_MODEL)


def set_environment(args: argparse.Namespace) -> None:
    """Set what libraries read from the environment when they are imported: whether Triton
    interprets kernels, which it does on a CPU, and whether huggingface_hub shows its progress."""
    import torch

    if args.quiet:
        warnings.simplefilter("ignore")
    on_cpu = args.device == "cpu"
    if args.device == "auto" and args.backend == "triton":  # only then, since torch may warn
        on_cpu = not torch.cuda.is_available()
    if args.backend == "triton" and on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"
    if args.quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def open_session(args: argparse.Namespace, ranks: Ranks) -> Session:
    """A session for the model that flags describe."""
    from session import Session

    session = Session(
        args.model,
        quiet=args.quiet,
        chat_template=args.chat_template,
        lookup=args.lookup,
        draft=args.draft,
        draft_max=args.draft_max,
        draft_always=args.draft_always,
        ranks=ranks,
        sampling=sampling_flags(args),
        **options_of(args),
    )
    if not args.quiet:
        for line in session.model.checkpoint.notes:
            note(f"note: {line}")
    return session


def add_sampling_flags(add: Callable) -> None:
    """Flags of the sampler's settings, for sampling_flags. add: of the parser's group."""
    for name, setting in FILTERS.items():
        flags = [f"--{word.replace('_', '-')}" for word in (name, setting.full) if word]
        default = getattr(Sampling, name)
        add(
            *flags,
            type=within(setting.kind, setting.low, setting.high),
            metavar="N" if setting.kind is int else "X",
            help=f"{setting.help} [the checkpoint's, or {default:g}]",
        )


def sampling_flags(args: argparse.Namespace) -> dict[str, float]:
    """The sampler's settings that flags give."""
    flags = vars(args)
    return {name: flags[name] for name in SETTINGS if flags.get(name) is not None}
