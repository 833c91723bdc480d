"""The flags of bench.py, which the scripts in dev/ share. As in talk/cli.py, nothing here imports
torch."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import NamedTuple

from loading.hub import DEFAULT_MODEL
from settings import DTYPE_NAMES, FORMAT_ROWS, OPTIONS
from talk.cli import Parser, add_device_flags, add_option, first_empty, within


class Test(NamedTuple):
    """What a row of tokens per second measures."""

    kind: str  # "pp", a prompt, or "tg", generation
    n: int  # tokens
    depth: int  # tokens already in the cache
    texts: int = 1  # at once

    def __str__(self) -> str:
        name = f"{self.kind}{self.n}"
        if self.texts > 1:
            name += f" x{self.texts}"
        if self.depth:
            name += f" @ d{self.depth}"
        return name


def several(kind: Callable[[str], object]) -> Callable[[str], list]:
    """An argparse type: one value of a type, or several with commas."""
    return lambda text: [kind(part) for part in text.split(",")]


def one_of(*allowed: str) -> Callable[[str], str]:
    """An argparse type: one of these words."""

    def name(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(allowed)}")
        return text

    return name


def add_model_flags(parser: Parser) -> None:
    """The flags that choose a model, of bench.py and of the scripts in dev/."""
    add = parser.group("model")
    # fmt: off
    add("-m", "--model", action="append", dest="models", default=[], metavar="MODEL",
        help="a checkpoint [models/tales]; or random weights, of random:SHAPE, such as random:7b,"
        " random:SHAPE:LAYERS or random:CONFIG.JSON (random: alone lists the shapes); may be"
        " repeated, as may --dtype, --format, -p, -n, -d and -np, which also take lists with commas")
    add_option(add, "ctx_size", type=within(int, 1, 1 << 24),
        help="context size, or more if the tests need it; with --perplexity [512]")
    add("--dtype", type=several(one_of("auto", *DTYPE_NAMES)), action="extend", default=["auto"],
        metavar="TYPE", help=f"auto, {', '.join(DTYPE_NAMES)}")
    add("--format", type=several(one_of("none", *FORMAT_ROWS)), action="extend", default=["none"],
        metavar="FORMAT", help=f"of the matrices: none, {', '.join(FORMAT_ROWS)}")
    # fmt: on
    add_option(add, "kv_fp8", help="8-bit keys and values")
    add_device_flags(parser)


def add_counts(add: Callable, *names: str, default: int, help: str) -> None:
    """A flag that takes one or several counts of tokens."""
    count = several(within(int, 0, 1 << 24))
    add(*names, type=count, action="extend", default=[default], metavar="N", help=help)


def add_test_flags(parser: Parser, modes: str = "") -> None:
    """The flags that say what is timed. modes: those in which they apply, if not all."""
    add = parser.group("tests", modes)
    help = "tokens of a prompt; 0 leaves the test out [512]"
    add_counts(add, "-p", "--n-prompt", default=512, help=help)
    add_counts(add, "-n", "--n-gen", default=128, help="tokens to generate; 0: none [128]")
    add_counts(add, "-d", "--depth", default=0, help="tokens already in the cache [0]")
    texts = several(within(int, 1, int(OPTIONS["parallel"].high)))
    add("-np", "--parallel", action="extend", dest="texts", type=texts, default=[1], metavar="N",
        help="texts generated at once; their tokens per second are added up [1]")  # fmt: skip
    runs = within(int, 1, 1000)
    help = "timed runs, after one warm-up"
    add("-r", "--repetitions", type=runs, default=5, metavar="N", help=help)


def add_output_flags(parser: Parser) -> None:
    add = parser.group("output")
    add("-o", "--output", choices=["md", "json", "jsonl"], default="md", help="form of the table")
    add("--debug", action="store_true", help="print errors with their traceback")


def take_one(parser: Parser, args: argparse.Namespace, *flags: str) -> None:
    """Exit with an error if one of these flags was given several values."""
    for flag in flags:
        if len(getattr(args, parser.stored_as(flag))) > 1:
            parser.error(f"{parser.modes[args.mode]} takes one {flag}")


def find_models(parser: Parser, args: argparse.Namespace) -> None:
    """Set args.models and args.model, the first. Exits with an error if a checkpoint is missing."""
    parser.find(model for model in args.models if not model.startswith("random:"))
    args.models = args.models or [str(DEFAULT_MODEL)]
    args.model = args.models[0]


def tests_of(parser: Parser, args: argparse.Namespace) -> list[Test]:
    """Prompts, then generation, at each depth and with each number of texts."""
    tests = []
    for depth in args.depth:
        tests += [Test("pp", n, depth) for n in args.n_prompt if n]
    for depth, texts in itertools.product(args.depth, args.texts):
        tests += [Test("tg", n, depth, texts) for n in args.n_gen if n]
    if not tests:
        parser.error("-p 0 leaves nothing to measure")
    return tests


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The flags of bench.py."""
    what = "Tokens per second, each beside the hardware's limit in the same run; and perplexity."
    parser = Parser(what, {"speed": "tokens per second", "perplexity": "--perplexity"})
    add = parser.group("perplexity")
    add("--perplexity", metavar="FILE", help="perplexity of a text, not tokens per second")
    # fmt: off
    add("--stride", type=within(int, 1, 1 << 24), metavar="N", only="perplexity",
        help="step between windows [the window: -c]")
    add("--against", choices=DTYPE_NAMES, only="perplexity",
        help="compare with the unquantised model in this dtype")
    # fmt: on
    add_model_flags(parser)
    add_test_flags(parser, "speed")
    add_output_flags(parser)

    def mode_of(args: argparse.Namespace) -> str:
        return "speed" if args.perplexity is None else "perplexity"

    args = parser.parse(argv, mode_of)
    if empty := first_empty(args, "perplexity"):
        parser.error(empty)
    if args.perplexity:
        take_one(parser, args, "-m", "--dtype", "--format")
        args.ctx_size = args.ctx_size or 512
        args.stride = args.stride or args.ctx_size
        if args.stride > args.ctx_size:
            parser.error(f"--stride {args.stride} skips text between windows of {args.ctx_size}")
    args.tests = tests_of(parser, args)
    find_models(parser, args)
    return args
