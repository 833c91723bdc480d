"""Tokens per second, each beside the hardware's limit, measured in the same run; and perplexity."""

from __future__ import annotations

import signal

if __name__ == "__main__":  # the imports take time, and Ctrl-C needs no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import dataclasses
import gc
import itertools
import json
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from extra.cli import (
    DEFAULT_MODEL,
    DTYPE_NAMES,
    FORMAT_NAMES,
    Parser,
    add_device_flags,
    exit_code,
    import_torch,
    note,
    text_of,
    use_safe_streams,
    within,
)

# ---- the command line: before torch is imported, which takes seconds

# The first fields of Config: dim, layers, heads, key/value heads, head_dim, hidden_dim, vocabulary
SHAPES = {
    "1.1b": (2048, 22, 32, 4, 64, 5632, 32000),  # TinyLlama
    "7b": (4096, 32, 32, 32, 128, 11008, 32000),  # Llama 2, as are 13b and 70b
    "8b": (4096, 32, 32, 8, 128, 14336, 128256),  # Llama 3
    "13b": (5120, 40, 40, 40, 128, 13824, 32000),
    "70b": (8192, 80, 64, 8, 128, 28672, 32000),
    "Llama-3.2-1B": (2048, 16, 32, 8, 64, 8192, 128256),
    "Llama-3.2-3B": (3072, 28, 24, 8, 128, 8192, 128256),
    "Qwen2.5-0.5B": (896, 24, 14, 2, 64, 4864, 151936),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 128, 8960, 151936),
    "SmolLM2-135M": (576, 30, 9, 3, 64, 1536, 49152),
    "SmolLM2-360M": (960, 32, 15, 5, 64, 2560, 49152),
    "Qwen3-30B-A3B": (2048, 48, 32, 4, 128, 768, 151936),
    "Mixtral-8x7B": (4096, 32, 32, 8, 128, 14336, 32000),
}
EXPERTS = {"Qwen3-30B-A3B": (128, 8), "Mixtral-8x7B": (8, 2)}  # and how many a token goes through


class Test(NamedTuple):
    """What a row of tokens per second measures."""

    kind: str  # "pp", a prompt, or "tg", generation
    n: int  # tokens
    depth: int  # tokens already in the cache

    def __str__(self) -> str:
        if self.depth:
            return f"{self.kind}{self.n} @ d{self.depth}"
        return f"{self.kind}{self.n}"


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
        help=f"a checkpoint [models/tales], or random:SHAPE: {', '.join(SHAPES)}, tales,"
        " SHAPE:LAYERS or a config.json; may be repeated, as may --dtype, --format, -p, -n and -d,"
        " which also take lists with commas")
    add("-c", "--ctx-size", type=within(int, 1, 1 << 24), metavar="N",
        help="context size; with --perplexity [512]")
    add("--dtype", type=several(one_of("auto", *DTYPE_NAMES)), action="extend", default=["auto"],
        metavar="TYPE", help=f"auto, {', '.join(DTYPE_NAMES)}")
    add("--format", type=several(one_of("none", *FORMAT_NAMES)), action="extend", default=["none"],
        metavar="FORMAT", help=f"of the matrices: none, {', '.join(FORMAT_NAMES)}")
    add("--kv-fp8", action="store_true", help="8-bit keys and values")
    # fmt: on
    add_device_flags(parser)


def counts_of(text: str) -> list[int]:
    """An argparse type: counts of tokens with commas, of which LOW-HIGH:COUNT stands for that many
    of the range, in order. They are drawn at random, but always the same, so that runs can be
    compared and ranks agree."""
    count = within(int, 0, 1 << 24)
    counts = []
    for part in text.split(","):
        drawn = re.fullmatch(r"(\d+)-(\d+):(\d+)", part)
        if not drawn:
            counts.append(count(part))
            continue
        low, high, many = map(count, drawn.groups())
        if many > high + 1 - low:
            raise argparse.ArgumentTypeError(f"{part}: so many counts are not in the range")
        counts += sorted(random.Random(part).sample(range(low, high + 1), many))
    return counts


def add_counts(add: Callable, *names: str, default: int, help: str) -> None:
    """A flag that takes one or several counts of tokens."""
    add(*names, type=counts_of, action="extend", default=[default], metavar="N", help=help)


def add_test_flags(parser: Parser, modes: str = "") -> None:
    """The flags that say what is timed. modes: those in which they apply, if not all."""
    add = parser.group("tests", modes)
    help = "tokens of a prompt, or 17-4096:20, 20 lengths at random; 0 leaves the test out [512]"
    add_counts(add, "-p", "--n-prompt", default=512, help=help)
    add_counts(add, "-n", "--n-gen", default=128, help="tokens to generate; 0: none [128]")
    add_counts(add, "-d", "--depth", default=0, help="tokens already in the cache [0]")
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
    """Prompts, then generation, at each depth."""
    tests = []
    for kind, counts in (("pp", args.n_prompt), ("tg", args.n_gen)):
        for depth in args.depth:
            tests += [Test(kind, n, depth) for n in counts if n]
    if not tests:
        parser.error("-p 0 leaves nothing to measure")
    return tests


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__, {"speed": "tokens per second", "perplexity": "--perplexity"})
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
        return "perplexity" if args.perplexity else "speed"

    args = parser.parse(argv, mode_of)
    if args.perplexity:
        take_one(parser, args, "-m", "--dtype", "--format")
        args.ctx_size = args.ctx_size or 512
        args.stride = args.stride or args.ctx_size
        if args.stride > args.ctx_size:
            parser.error(f"--stride {args.stride} skips text between windows of {args.ctx_size}")
    args.tests = tests_of(parser, args)
    find_models(parser, args)
    return args


if __name__ == "__main__":
    use_safe_streams()
    parse_args(None)  # --help and errors in the command line do not wait for torch
    import_torch()

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from checkpoint import load, read_config
from extra.cpu import cpu_product_dtype, in_cpu_layout, storage_dtype
from extra.hardware import (
    DTYPES,
    check_accumulate,
    check_memory,
    pick_backend,
    pick_device,
    pick_dtype,
)
from extra.names import Formats, Kind, formats_of, layer_tensors, layer_weights
from extra.parallel import Ranks
from formats import Matrix
from kernels import FORMATS
from launch import jit, tl
from model import Config, Llama, State, Timings, Weights, generate
from products import tensor_core_format
from sampling import Sampling
from tokenizer import TextStream, Tokenizer

# ---- models to measure


def random_config(spec: str) -> Config:
    """The configuration of random:7b, random:70b:8 (8 of its layers), random:tales or
    random:.../config.json. Raises ValueError."""
    name, _, layers = spec.removeprefix("random:").partition(":")
    if layers and not (layers.isdecimal() and int(layers) > 0):
        raise ValueError(f"{spec}: {layers!r} is not a number of layers")
    if name in SHAPES:
        fields = dict(norm_eps=1e-5, max_seq_len=1 << 15, dtype=torch.float16)
        fields["n_experts"], fields["experts_per_token"] = EXPERTS.get(name, (0, 0))
        fields["qkv_bias"] = name.startswith("Qwen2")
        fields["qk_norm"] = name.startswith("Qwen3")
        config = Config(*SHAPES[name], **fields)
    elif name == "tales":
        config = read_config(DEFAULT_MODEL)
    elif name.endswith(".json"):
        config = read_config(Path(name).parent)
    else:
        raise ValueError(f"{spec}: the shapes are {', '.join(SHAPES)}, tales or a config.json")
    if layers:
        config = dataclasses.replace(config, n_layers=int(layers))
    return config


def random_weights(
    c: Config, dtype: torch.dtype, device: torch.device, formats: Formats, backend: str
) -> Weights:
    """Weights of a configuration, made on the device: norms and biases are ones; matrices are
    normally distributed, as large as those that training starts from. Those whose products are
    added to the residual are smaller, as in GPT-2, and the embedding is larger, so that the tokens
    of a prompt stay different, and choose different experts. In a format 64 rows repeat, since
    encoding takes long on a CPU."""

    def normal(
        rows: int, columns: int, dtype: torch.dtype | None = None, std: float = 0.02
    ) -> Tensor:
        return torch.randn(rows, columns, dtype=dtype, device=device).mul_(std)

    def matrix(
        name: str, shape: tuple[int, int], std: float = 0.02, of_experts: bool = False
    ) -> Matrix:
        rows, columns = shape
        format = formats.get(name)
        if format is None:
            w = Matrix(normal(rows, columns, storage_dtype(backend, dtype, device), std))
        else:
            block = format.encode(normal(min(rows, 64), columns, std=std))
            repeated = [t.repeat(-(-rows // len(t)), *[1] * (t.dim() - 1))[:rows] for t in block]
            w = Matrix(tuple(repeated), format)
        if of_experts:
            return w  # products take some of its rows
        return in_cpu_layout(w, backend, dtype, formats.values())

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    layers = []
    for i in tqdm(range(c.n_layers), "random weights", unit=" layers", leave=False, disable=None):
        values = {}
        for tensor in layer_tensors(c, i):
            shape = tensor.shape(c)
            if tensor.is_matrix:
                std = 0.02
                if tensor.field in ("wo", "w2"):
                    std /= math.sqrt(2 * c.n_layers)
                values[tensor.field] = matrix(tensor.name, shape, std, tensor.of_experts)
            elif tensor.kind is Kind.PLAIN:
                values[tensor.field] = Matrix(normal(*shape, dtype))
            else:
                values[tensor.field] = ones(*shape)
        layers.append(layer_weights(values))
    embedding = normal(c.vocab_size, c.dim, dtype, std=1.0)
    return Weights(embedding, layers, ones(c.dim), matrix("output", (c.output_rows, c.dim)))


def open_model(args: argparse.Namespace, dtype: str, ctx_size: int, format: str) -> Llama:
    """A checkpoint, or random weights for a name like random:7b, with room for ctx_size tokens.
    format "none" leaves the matrices as they are. On a CPU, sets how many threads torch uses."""
    args.ranks.finish()  # no rank frees a model from whose memory others may still read
    gc.collect()  # frees a model that was measured before
    torch.cuda.empty_cache()
    ctx_size = max(ctx_size, args.ctx_size or 0)
    if args.model.startswith("random:"):
        model = random_model(args, dtype, ctx_size, format)
    else:
        model = open_checkpoint(args, dtype, ctx_size, format)
    threads = args.threads or (1 if model.suits_one_thread else args.cores)
    if model.device.type == "cpu" and threads != torch.get_num_threads():
        torch.set_num_threads(threads)
        for ceiling in (read_ceiling, copy_ceiling, product_ceiling):
            ceiling.cache_clear()
    return model


def open_checkpoint(args: argparse.Namespace, dtype: str, ctx_size: int, format: str) -> Llama:
    """Sets args.folder, which transformers reads without asking the hub."""
    names = ("device", "backend", "kv_fp8", "accumulate", "ranks")
    flags = {name: getattr(args, name) for name in names}
    flags["format"] = None if format == "none" else format
    model = load(args.model, dtype=dtype, ctx_size=ctx_size, **flags)
    args.folder = model.checkpoint.folder
    return model


def random_model(args: argparse.Namespace, dtype: str, ctx_size: int, format: str) -> Llama:
    ranks = args.ranks
    config = random_config(args.model)
    device = pick_device(args.device, ranks)
    config = config.cut(ranks.size)
    formats = formats_of(config, FORMATS.get(format))
    ranks.join(device)
    backend = pick_backend(args.backend, device)
    as_dtype = pick_dtype(dtype, config.dtype or torch.float16, device)
    check_accumulate(args.accumulate, backend, device, as_dtype)
    check_memory(config, as_dtype, device, ctx_size, formats, args.kv_fp8, ranks)
    with torch.inference_mode():
        weights = random_weights(config, as_dtype, device, formats, backend)
    more = (args.kv_fp8, args.accumulate, ranks)
    return Llama(config, weights, backend, device, as_dtype, ctx_size, None, *more)


# ---- time


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_times(
    run: Callable[[], object], device: torch.device, repetitions: int = 5, warmup: int = 1
) -> list[float]:
    """Seconds of each call, until the device has finished, without the warm-up calls."""
    times = []
    for _ in range(warmup + repetitions):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times[warmup:]


# ---- ceilings


@jit
def _read_kernel(data, out, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(data + at, eviction_policy="evict_first"))
    if total == 12345.678:  # never true: an unused load would be optimised away
        tl.store(out, total)


@cache
def read_ceiling(device: torch.device) -> float:
    """Read bandwidth: bytes per second of a kernel that only reads, the best of a few."""
    if device.type == "cuda":
        data = torch.ones(1 << 31, device=device)

        def read(block: int) -> None:
            _read_kernel[(data.numel() // block,)](data, data, BLOCK=block, num_warps=4)

        ways = [lambda: read(2048), lambda: read(4096)]
    else:
        data = torch.ones(1 << 27)
        rows = data.view(torch.float16).view(1 << 14, -1)
        column = torch.ones(1 << 14, dtype=torch.float16)
        ways = [data.sum, lambda: torch.mv(rows, column)]
    return 4.0 * data.numel() / min(statistics.median(wall_times(way, device)) for way in ways)


@cache
def copy_ceiling(device: torch.device) -> float:
    """Copy bandwidth: bytes per second, read and written together, of a large copy."""
    data = torch.ones(1 << 30 if device.type == "cuda" else 1 << 27, device=device)
    other = torch.empty_like(data)
    return 8.0 * data.numel() / statistics.median(wall_times(lambda: other.copy_(data), device))


@cache
def product_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Product rate: operations per second of a large matmul of random matrices."""
    size = 8192 if device.type == "cuda" else 2048
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    ones = torch.ones(size, 1, device=device)
    options = dict(out_dtype=torch.bfloat16, use_fast_accum=True)

    def product() -> Tensor:
        if dtype == torch.float8_e4m3fn:
            return torch._scaled_mm(a, b.t(), ones, ones.t(), **options)
        return a @ b

    return 2.0 * size**3 / statistics.median(wall_times(product, device, warmup=2))


note_once = cache(note)


def percent(part: float, whole: float) -> float:
    """How much of a ceiling is reached, in percent. Prints a note if that is more than 100."""
    if part > whole:
        note_once(
            "note: more than 100% of a ceiling: the weights fit into a cache, or measuring it was "
            "disturbed"
        )
    return 100 * part / whole


def product_dtype(model: Llama) -> torch.dtype:
    """The type in which a prompt is multiplied by the matrices."""
    if model.device.type == "cpu":
        return cpu_product_dtype(model.dtype)
    if model.backend == "triton" and all(map(tensor_core_format, model.weights.matrices)):
        return torch.float8_e4m3fn
    return model.dtype


# ---- what must be read and computed


def matrices_of_token(model: Llama) -> list[tuple[Matrix, float]]:
    """The matrices, the output last, and the part of each that one token is multiplied by: of the
    experts, those that it goes through."""
    c = model.config
    found = []
    for layer in model.weights.layers:
        part = 1.0
        if layer.router:
            part = c.experts_per_token / c.n_experts
            found.append((layer.router, 1.0))
        found += [(layer.wqkv, 1.0), (layer.wo, 1.0), (layer.w13, part), (layer.w2, part)]
    return [*found, (model.weights.output, 1.0)]


def decode_bytes(model: Llama, length: float) -> float:
    """Bytes read for one token when `length` positions are cached: every matrix that it is
    multiplied by once, and the keys and values."""
    c = model.config
    matrices = sum(w.nbytes * part for w, part in matrices_of_token(model))
    return matrices + 2.0 * c.n_layers * c.kv_dim * length * model.kv_dtype.itemsize


def prefill_operations(model: Llama, T: int, start_pos: int = 0) -> float:
    """Operations for T tokens after start_pos others, with the logits of the last one only. A
    multiply-add counts as two."""
    *of_layers, output = [math.prod(w.shape) * part for w, part in matrices_of_token(model)]
    seen = T * start_pos + T * (T + 1) / 2  # keys seen by all tokens together
    attention = model.config.n_layers * 4.0 * model.config.q_dim * seen
    return 2.0 * T * sum(of_layers) + attention + 2.0 * output


# ---- tables


def cell(value: object) -> str:
    """A value as people read it: floats have enough decimal places to show two digits of the value
    and of its distance from 1."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 100 or not math.isfinite(value):
        return f"{value:,.0f}"
    distance = min(abs(value), abs(value - 1))
    places = 2
    if distance > 0:
        places = min(max(2, 1 - math.floor(math.log10(distance))), 9)
    return f"{value:,.{places}f}"


def show(rows: Iterable[dict], form: str = "md", later: dict[str, list[str]] | None = None) -> None:
    """Print rows with the same keys as md or jsonl, each as soon as it is known, or as json, which
    is one value. later: texts that a column will show and that may be wider than its first one; not
    needed if rows is a list."""
    if form == "json":
        print(json.dumps(list(rows), indent=1), flush=True)
    elif form == "jsonl":
        for row in rows:
            print(json.dumps(row), flush=True)
    else:
        show_table(rows, later)


def show_table(rows: Iterable[dict], later: dict[str, list[str]] | None) -> None:
    if later is None:
        later = {name: [cell(row[name]) for row in rows] for name in rows[0]}
    widths = []

    def line(texts: Iterable[str]) -> None:
        print("|", " | ".join(map(str.ljust, texts, widths)), "|", flush=True)

    for row in rows:
        cells = {name: cell(value) for name, value in row.items()}
        if not widths:
            for name, text in cells.items():
                widths.append(max(map(len, [name, text, *later.get(name, [])])))
            line(cells)
            line("-" * width for width in widths)
        line(cells.values())


# ---- tokens per second


@dataclasses.dataclass
class Row:
    model: str
    size_gb: float  # of the matrices
    backend: str  # or the name of another program
    device: str
    dtype: str
    format: str  # of the matrices
    kv: str  # type of keys and values
    test: str
    tokens_per_s: float
    std: float
    # Of the read ceiling for generation, of the product ceiling for a prompt
    percent_of_ceiling: float | None
    ratio: float | None = None  # ours over another program's, in the rows of that program


def format_of(model: Llama) -> str:
    """What --format calls the format of the layers' matrices; a GGUF may have several."""
    formats = {w.format for w in model.weights.matrices[:-1]}
    return "+".join(sorted(format.name if format else "none" for format in formats))


def device_name(device: torch.device, ranks: Ranks) -> str:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        name = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    if ranks.size > 1:
        return f"{ranks.size} x {name}"
    return name


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    if len(values) == 1:
        return values[0], 0.0
    return statistics.mean(values), statistics.stdev(values)


def random_ids(model: Llama, count: int) -> list[int]:
    return torch.randint(3, model.config.vocab_size, (count,)).tolist()


@torch.inference_mode()
def prompt_speeds(model: Llama, state: State, test: Test, repetitions: int) -> list[float]:
    """Tokens a second of each run."""
    ids = random_ids(model, test.depth + test.n)
    state.truncate(0)
    if test.depth:
        model.prefill(ids[: test.depth], state)

    def run() -> None:
        state.truncate(test.depth)
        model.prefill(ids[test.depth :], state)

    return [test.n / seconds for seconds in wall_times(run, model.device, repetitions)]


def generation_speeds(model: Llama, state: State, test: Test, repetitions: int) -> list[float]:
    """Tokens a second of the whole loop, sampling and text included, after a prompt of at least one
    token."""
    prompt = random_ids(model, max(test.depth, 1))
    stream = TextStream(Tokenizer(DEFAULT_MODEL))
    speeds = []
    for _ in range(1 + repetitions):
        timings = Timings()
        options = dict(sampling=Sampling(), eos=[], timings=timings)
        for token in generate(model, prompt, state, test.n + 1, **options):
            stream.push(token)
        speeds.append(timings.steps / timings.step_seconds)
    return speeds[1:]


def bound(model: Llama, test: Test) -> float:
    """Tokens a second at the ceiling: the product rate for a prompt, the read bandwidth for
    generation."""
    if test.kind == "pp":
        rate = product_ceiling(model.device, product_dtype(model))
        return rate * test.n / prefill_operations(model, test.n, test.depth)
    return read_ceiling(model.device) / decode_bytes(model, test.depth + test.n / 2)


def throughput(args: argparse.Namespace, dtype: str, form: str) -> Iterator[Row]:
    """The rows of one model: prompts, then generation, at each depth."""
    start = time.perf_counter()
    model = open_model(args, dtype, max(test.depth + test.n for test in args.tests) + 1, form)
    loaded = time.perf_counter() - start
    state, device = State(model), model.device
    note(f"loaded in {loaded:.2f} s on {device}{args.ranks.described(model.exchange, device)}")
    if device.type == "cpu":
        seconds = (args.repetitions + 1) * sum(test.n / bound(model, test) for test in args.tests)
        if seconds > 5:
            least = f"{seconds:.0f} s, at the speed of memory and arithmetic"
            note(f"{args.model}: this takes at least {least}")
    dtype_name = next(name for name, value in DTYPES.items() if value == model.dtype)
    about = dict(
        model=args.model,
        size_gb=model.config.ranks * sum(w.nbytes for w in model.weights.matrices) / 1e9,
        backend=model.backend,
        device=device_name(device, args.ranks),
        dtype=dtype_name,
        format=format_of(model),
        kv="e4m3" if model.kv_fp8 else dtype_name,
    )
    for test in args.tests:
        measure = prompt_speeds if test.kind == "pp" else generation_speeds
        mean, std = spread(measure(model, state, test, args.repetitions))
        yield Row(**about, test=str(test), tokens_per_s=mean, std=std,
            percent_of_ceiling=percent(mean, bound(model, test)))  # fmt: skip
    as_dtype = product_dtype(model)
    read, product = read_ceiling(device) / 1e9, product_ceiling(device, as_dtype) / 1e12
    name = str(as_dtype).removeprefix("torch.")
    note(f"ceilings: read {read:.1f} GB/s, {name} product {product:.2f} TFLOP/s")


def speed_rows(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of the table: each model in each dtype and format."""
    for model, dtype, form in itertools.product(args.models, args.dtype, args.format):
        args.model = model
        yield from throughput(args, dtype, form)


def show_speeds(
    rows: Iterable[Row], args: argparse.Namespace, backends: Iterable[str] = ()
) -> None:
    """backends: wide names that may follow in that column."""
    later = {"model": args.models, "test": list(map(str, args.tests)), "backend": [*backends]}
    show(map(dataclasses.asdict, rows), args.output, later)


# ---- perplexity

AT_ONCE = 512  # tokens whose logits are in memory at the same time


def quality(parts: list[dict[str, Tensor]], text_bytes: int) -> dict:
    """Perplexity with its standard error, bits per byte of a text of so many bytes, and the
    comparison."""
    values = {name: torch.cat([part[name] for part in parts]).double() for name in parts[0]}
    losses = values["loss"]
    mean = losses.mean().item()
    error = losses.std().item() / math.sqrt(len(losses))
    row = {
        "tokens": len(losses),
        "perplexity": math.exp(mean),
        "standard_error": math.exp(mean) * error,
        "bits_per_byte": losses.sum().item() / math.log(2) / text_bytes,
    }
    if "kl" in values:
        row["perplexity_ratio"] = math.exp(mean - values["other_loss"].mean().item())
        row["mean_kl"] = values["kl"].mean().item()
        row["kl_99"] = values["kl"].quantile(0.99).item()
        row["same_top_%"] = 100 * values["same_top"].mean().item()
    return row


@torch.inference_mode()
def perplexity(
    model: Llama, ids: list[int], bos: int, ctx: int, stride: int, against: Llama | None = None
) -> Iterator[dict[str, Tensor]]:
    """Evaluate ids in windows of ctx tokens, every `stride`, each started with bos, and yield, part
    by part, each token's loss; with a second model also its loss, and how far their distributions
    differ. A window's input is bos and all its tokens but the last; each token counts in the first
    window with it. Without a bos, which a negative one says, windows hold nothing but text, as in
    llama.cpp: each starts with the token before it, and the first of all does not count."""
    before = [bos] * len(ids)
    if bos < 0:
        before, ids = ids, ids[1:]
    models = [m for m in (model, against) if m is not None]
    states = [State(m, ctx) for m in models]
    end = 0
    for start in range(0, len(ids), stride):
        skip = end - start  # tokens that counted in the window before
        end = min(start + ctx, len(ids))
        window = [before[start], *ids[start:end]]
        for m, state in zip(models, states):
            state.truncate(0)
            if skip:
                m.prefill(window[:skip], state)
        tokens = torch.tensor(window[skip:], device=model.device)
        for part, goal in zip(tokens[:-1].split(AT_ONCE), tokens[1:].split(AT_ONCE)):
            logs = [m.forward(part, state).log_softmax(-1) for m, state in zip(models, states)]
            losses = [functional.nll_loss(log, goal, reduction="none").cpu() for log in logs]
            found = {"loss": losses[0]}
            if against is not None:
                q, p = logs
                found["other_loss"] = losses[1]
                found["kl"] = (p.exp() * (p - q)).sum(-1).cpu()
                found["same_top"] = (p.argmax(-1) == q.argmax(-1)).cpu()
            yield found
        if end == len(ids):
            return


def run_perplexity(args: argparse.Namespace) -> None:
    with open(args.perplexity, "rb") as f:
        text = text_of(f, args.perplexity, 1 << 30)
    if args.model.startswith("random:"):
        raise ValueError("a text needs a checkpoint with a tokenizer, not random weights")
    model = open_checkpoint(args, args.dtype[0], args.ctx_size, args.format[0])
    tokenizer = Tokenizer(model.checkpoint.folder, model.config.vocab_size, model.config.bos_id)
    ids = tokenizer.encode(text, bos=False)
    count = len(ids)
    if tokenizer.bos < 0:
        count -= 1
    if count < 2:
        few = f"{count} tokens to predict; a mean with its error needs 2 or more"
        raise ValueError(f"{args.perplexity} has {few}")
    against = None
    if args.against:
        if model.checkpoint.format:
            name = model.checkpoint.format.name
            raise ValueError(
                f"--against needs the original: {model.checkpoint.folder} holds {name} matrices"
            )
        plain = argparse.Namespace(**vars(args) | {"kv_fp8": False, "accumulate": "fp32"})
        against = open_checkpoint(plain, args.against, args.ctx_size, "none")
    parts = []
    total, done = 0.0, 0
    with tqdm(total=count, unit=" tokens", disable=None, leave=False) as bar:
        for part in perplexity(model, ids, tokenizer.bos, args.ctx_size, args.stride, against):
            parts.append(part)
            total += part["loss"].sum().item()
            done += len(part["loss"])
            bar.update(len(part["loss"]))
            bar.set_postfix(perplexity=f"{math.exp(total / done):.4f}")
    row = {
        "model": args.model,
        "dtype": args.dtype[0],
        "format": format_of(model),
        "kv fp8": args.kv_fp8,
        "against": args.against,
        "ctx": args.ctx_size,
        "stride": args.stride,
    }
    show([row | quality(parts, len(text.encode()))], args.output)


# ---- the command line again


def exit_code_of(run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Do what a script of the bench is for, and return its exit code. Sets args.ranks, and on a CPU
    the number of threads."""

    def work(args: argparse.Namespace, ranks: Ranks) -> int:
        args.ranks = ranks
        args.cores = torch.get_num_threads()
        if args.threads:
            torch.set_num_threads(args.threads)
        run(args)
        return 0

    return exit_code(work, args)


LEGEND = """\
percent_of_ceiling: the share of the speed at which memory can be read (tg) or matrices can be
multiplied (pp)"""


def run_speed(args: argparse.Namespace) -> None:
    show_speeds(speed_rows(args), args)
    note(LEGEND)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_code_of(run_perplexity if args.perplexity else run_speed, args)


if __name__ == "__main__":
    sys.exit(main())
