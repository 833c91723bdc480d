"""Tokens per second, kernels, a profile, perplexity; each beside the hardware's limit, measured in
the same run."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import importlib.util
import itertools
import json
import math
import os
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from chat import (
    DEFAULT_MODEL,
    DTYPE_NAMES,
    FORMAT_NAMES,
    Parser,
    device_name_of,
    exit_code,
    import_torch,
    note,
    text_of,
    use_safe_streams,
    within,
)

# ---- the command line: before torch is imported, which takes seconds

# dim, layers, heads, key/value heads, head_dim, hidden_dim, vocabulary: the first fields of Config
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
}
MODES = {"speed": "tokens per second"} | {
    mode: f"--{mode}" for mode in ("kernels", "profile", "perplexity", "passes", "tune", "plot")
}


class Test(NamedTuple):
    """What a row of tokens per second measures."""

    kind: str  # "pp", a prompt, or "tg", generation
    n: int  # tokens
    depth: int  # tokens already in the cache

    def __str__(self) -> str:
        return f"{self.kind}{self.n}" + (f" @ d{self.depth}" if self.depth else "")


def several(kind: Callable[[str], object]) -> Callable[[str], list]:
    """An argparse type: one value of a type, or several with commas."""
    return lambda text: [kind(part) for part in text.split(",")]


def one_of(*allowed: str) -> Callable[[str], str]:
    def name(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(allowed)}")
        return text

    return name


def mode_of(args: argparse.Namespace) -> str:
    return next((mode for mode in MODES if getattr(args, mode, None)), "speed")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__, MODES)
    # fmt: off
    add = parser.group("what is measured, when it is not tokens per second")
    add("--kernels", action="store_true", help="each op against its ceiling and against plain PyTorch")
    add("--profile", action="store_true", help="one decode step and one prefill, kernel by kernel")
    add("--perplexity", metavar="FILE", help="perplexity of a text")
    add("--passes", type=several(within(int, 1, 1 << 24)), metavar="T,...",
        help="what a pass of T tokens costs, relative to one of a single token")
    add("--tune", action="store_true", help="find launch sizes for this card and this model's shapes: into launch.json")
    add("--plot", nargs=2, metavar=("ROWS", "PICTURE"),
        help="draw rows saved from -o jsonl: generation beside its bounds, as png, svg or pdf (matplotlib)")

    add = parser.group("model", "speed kernels profile perplexity passes tune")
    add("-m", "--model", action="append", dest="models", default=[], metavar="MODEL",
        help=f"a checkpoint [models/tales], or random:SHAPE: {', '.join(SHAPES)}, tales, SHAPE:LAYERS or a config.json;"
        " repeated, it adds rows, and so do --dtype, --format, -p, -n and -d, which also take lists with commas")
    add("-c", "--ctx-size", type=within(int, 1, 1 << 24), metavar="N", only="speed kernels profile perplexity",
        help="context; with --perplexity the window [512]")
    add("--dtype", type=several(one_of("auto", *DTYPE_NAMES)), action="extend", default=["auto"], metavar="TYPE",
        help="auto, fp32, fp16, bf16")
    add("--format", type=several(one_of("none", *FORMAT_NAMES)), action="extend", default=["none"],
        metavar="FORMAT", help=f"of the matrices: none, {', '.join(FORMAT_NAMES)}")
    add("--kv-fp8", action="store_true", help="8-bit keys and values")
    add("--accumulate", choices=["auto", "fp32", "fp16"], default="auto",
        help="sums of a prompt's products, as in run.py", only="speed profile perplexity passes")
    add("-dev", "--device", type=device_name_of, default="auto", help="cpu, cuda or cuda:N")
    add("-t", "--threads", type=within(int, 1, 4096), metavar="N", help="CPU threads [as in run.py]")
    add("--backend", choices=["auto", "torch", "triton"], default="auto", help="auto: triton on a GPU, torch on a CPU")

    add = parser.group("tests", "speed")
    numbers = several(within(int, 0, 1 << 24))
    add("-p", "--n-prompt", type=numbers, action="extend", default=[512], metavar="N", only="speed kernels profile",
        help="tokens of a prompt; 0 leaves the test out [512]")
    add("-n", "--n-gen", type=numbers, action="extend", default=[128], metavar="N",
        help="tokens to generate; 0: none [128]")
    add("-d", "--depth", type=numbers, action="extend", default=[0], metavar="N", only="speed kernels profile passes",
        help="tokens already in the cache [0]")
    add("-r", "--repetitions", type=within(int, 1, 1000), default=5, metavar="N", help="timed runs, after one warm-up")
    add("--vs", choices=["transformers"], help="measure this, too, in the same run")
    add("--stride", type=within(int, 1, 1 << 24), metavar="N", only="perplexity",
        help="step between windows [the window]")
    add("--against", choices=DTYPE_NAMES, only="perplexity", help="compare with the unquantised model in this dtype")

    add = parser.group("output")
    add("-o", "--output", choices=["md", "json", "jsonl"], default="md", only="speed kernels perplexity passes",
        help="form of the table")
    add("--debug", action="store_true", help="print errors with their traceback")
    # fmt: on

    args = parser.parse(argv, mode_of)
    if len(args.given & MODES.keys()) > 1:
        parser.error(
            f"give only one of {', '.join(flag for flag in MODES.values() if flag.startswith('--'))}"
        )
    lists = {
        "-m": args.models,
        "--dtype": args.dtype,
        "--format": args.format,
        "-p": args.n_prompt,
        "-d": args.depth,
    }
    for flag in {"speed": (), "kernels": ("-m", "--dtype", "--format")}.get(args.mode, lists):
        if len(lists[flag]) > 1:
            parser.error(f"{MODES[args.mode]} takes one {flag}")
    if args.perplexity and args.stride and args.stride > (args.ctx_size or 512):
        parser.error(f"--stride {args.stride} skips text between windows of {args.ctx_size or 512}")
    parser.find(model for model in args.models if not model.startswith("random:"))
    counts = {"pp": args.n_prompt, "tg": args.n_gen}
    args.tests = [
        Test(kind, n, depth) for kind, ns in counts.items() for depth in args.depth for n in ns if n
    ]
    if not args.tests or args.mode == "profile" and args.n_prompt == [0]:
        parser.error("-p 0 leaves nothing to measure")
    args.models = args.models or [str(DEFAULT_MODEL)]
    args.model = args.models[0]
    return args


if __name__ == "__main__":
    use_safe_streams()
    parse_args(None)  # --help and errors in the command line do not wait for torch
    import_torch()

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

import fp8
from checkpoint import (
    DTYPES,
    check_accumulate,
    check_memory,
    layer_tensors,
    load,
    pick_backend,
    pick_device,
    pick_dtype,
    read_config,
)
from extra.parallel import Ranks
from fp8 import Format, Matrix
from kernels import FORMATS, cpu_product_dtype, prepacked, storage_dtype
from launch import capability, jit, nearest, save_tables, tables, tl, triton
from model import CHUNK, Config, LayerWeights, Llama, State, Timings, Weights, captured, generate
from sampling import Sampler, Sampling
from tokenizer import TextStream, Tokenizer

# ---- models to measure


def random_config(spec: str) -> Config:
    """The configuration of random:7b, random:70b:8 (8 of its layers), random:tales or
    random:.../config.json. Raises ValueError."""
    name, _, layers = spec.removeprefix("random:").partition(":")
    if layers and not (layers.isdecimal() and int(layers) > 0):
        raise ValueError(f"{spec}: {layers!r} is not a number of layers")
    if name in SHAPES:
        bias = name.startswith("Qwen2")
        config = Config(
            *SHAPES[name], norm_eps=1e-5, max_seq_len=1 << 15, qkv_bias=bias, dtype=torch.float16
        )
    elif name == "tales" or name.endswith(".json"):
        config = read_config(DEFAULT_MODEL if name == "tales" else Path(name).parent)
    else:
        raise ValueError(f"{spec}: the shapes are {', '.join(SHAPES)}, tales or a config.json")
    return dataclasses.replace(config, n_layers=int(layers)) if layers else config


def random_weights(
    c: Config, dtype: torch.dtype, device: torch.device, format: Format | None, backend: str
) -> Weights:
    """Weights of a configuration, made on the device: norms and biases are ones; matrices are
    normally distributed, as large as those that training starts from. In a format 64 rows repeat,
    since encoding takes long on a CPU."""

    def matrix(name: str, shape: tuple[int, int]) -> Matrix:
        rows, columns = shape
        if held := format and format.at(name):
            block = held.encode(torch.randn(min(rows, 64), columns, device=device).mul_(0.02))
            w = Matrix(
                tuple(torch.cat([t] * -(-rows // len(t)))[:rows] for t in block), held, shape
            )
        else:
            stored = storage_dtype(backend, dtype, device)
            w = Matrix(torch.randn(shape, dtype=stored, device=device).mul_(0.02))
        return prepacked(w, backend, dtype, format)

    ones = lambda shape: torch.ones(shape, dtype=dtype, device=device)
    made = lambda tensor: (
        matrix(tensor.field, tensor.shape(c)) if tensor.is_matrix else ones(tensor.shape(c))
    )
    bar = tqdm(range(c.n_layers), "random weights", unit=" layers", leave=False, disable=None)
    layers = [
        LayerWeights(**{tensor.field: made(tensor) for tensor in layer_tensors(c)}) for _ in bar
    ]
    embedding = torch.randn(c.vocab_size, c.dim, dtype=dtype, device=device).mul_(0.02)
    return Weights(embedding, layers, ones(c.dim), matrix("output", (c.output_rows, c.dim)))


def open_model(args: argparse.Namespace, dtype: str, ctx_size: int, format: str) -> Llama:
    """A checkpoint, or random weights for a name like random:7b, with room for ctx_size tokens. On
    a CPU, sets how many threads torch uses for it."""
    gc.collect()  # frees a model that was measured before
    torch.cuda.empty_cache()
    opened = random_model if args.model.startswith("random:") else open_checkpoint
    model = opened(args, dtype, max(ctx_size, args.ctx_size or 0), format)
    threads = args.threads or (1 if model.suits_one_thread else args.cores)
    if model.device.type == "cpu" and threads != torch.get_num_threads():
        torch.set_num_threads(threads)
        for ceiling in (read_ceiling, copy_ceiling, product_ceiling):
            ceiling.cache_clear()
    if args.mode in ("kernels", "profile") and model.backend == "torch":
        on = device_name(model.device, args.ranks)
        note(f"note: this measures torch's ops on {on}; the Triton kernels need a GPU")
    return model


def open_checkpoint(args: argparse.Namespace, dtype: str, ctx_size: int, format: str) -> Llama:
    """The checkpoint of the command line; format "none" keeps the matrices as they are. Sets
    args.folder, which transformers reads without asking the hub."""
    flags = {
        name: getattr(args, name) for name in ("device", "backend", "kv_fp8", "accumulate", "ranks")
    }
    model = load(
        args.model,
        dtype=dtype,
        ctx_size=ctx_size,
        format=None if format == "none" else format,
        **flags,
    )
    args.folder = model.checkpoint.folder
    return model


def random_model(args: argparse.Namespace, dtype: str, ctx_size: int, format: str) -> Llama:
    config, device = random_config(args.model), pick_device(args.device, args.ranks)
    config, held = config.cut(args.ranks.size), FORMATS.get(format)
    args.ranks.join(device)
    backend, as_dtype = (
        pick_backend(args.backend, device),
        pick_dtype(dtype, config.dtype or torch.float16, device),
    )
    check_accumulate(args.accumulate, backend, device, as_dtype)
    check_memory(config, as_dtype, device, ctx_size, held, args.kv_fp8, args.ranks)
    with torch.inference_mode():
        weights = random_weights(config, as_dtype, device, held, backend)
    return Llama(
        config,
        weights,
        backend,
        device,
        as_dtype,
        ctx_size,
        None,
        args.kv_fp8,
        args.accumulate,
        args.ranks,
    )


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


def device_time(run: Callable[[], object], model: Llama, repetitions: int = 10) -> float:
    """Median seconds of a call: where the model uses CUDA graphs, of replays of one, by events, so
    without what the host adds to it."""
    if not model.uses_graphs:
        return statistics.median(wall_times(run, model.device))
    replay, times = captured(run, model.device).replay, []
    for _ in range(2 + repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times[2:])


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
        ways = [
            lambda b=b: _read_kernel[(data.numel() // b,)](data, data, BLOCK=b, num_warps=4)
            for b in (2048, 4096)
        ]
    else:
        data = torch.ones(1 << 27)
        rows, column = (
            data.view(torch.float16).view(1 << 14, -1),
            torch.ones(1 << 14, dtype=torch.float16),
        )
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
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = lambda: a @ b
    if dtype == torch.float8_e4m3fn:
        ones = torch.ones(size, 1, device=device)
        product = lambda: torch._scaled_mm(
            a, b.t(), ones, ones.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )
    return 2.0 * size**3 / statistics.median(wall_times(product, device, warmup=2))


note_once = cache(note)


def percent(part: float, whole: float) -> float:
    """How much of a ceiling is reached. Says so where that is more than all of it."""
    if part > whole:
        note_once(
            "note: more than 100% of a ceiling: the weights fit into a cache, or measuring it was disturbed"
        )
    return 100 * part / whole


def product_dtype(model: Llama, op: str = "wo", T: int = 2) -> torch.dtype:
    """The type in which an op multiplies T tokens; by default, a prompt's matmuls."""
    if model.device.type == "cpu":
        return cpu_product_dtype(model.dtype)
    products = T > 1 and op in PRODUCT_ROWS and model.backend == "triton"
    return (
        torch.float8_e4m3fn
        if products and all(map(fp8.on_tensor_cores, model.weights.matrices))
        else model.dtype
    )


# ---- what must be read and computed

LAYER_PRODUCTS = ("rmsnorm_qkv_rope", "wo", "rmsnorm_swiglu", "w2")
PRODUCT_ROWS = (*LAYER_PRODUCTS, "rmsnorm_linear")


def cost(op: str, model: Llama, T: int, start_pos: int = 0) -> tuple[float, float]:
    """Bytes that one launch of an op must move and operations that it must do, for T tokens after
    start_pos others: every input is read once, every output written once, and a multiply-add counts
    as two operations. Where layers have matrices in different formats, the mean of their bytes
    counts."""
    c, w, size = model.config, model.weights, model.dtype.itemsize
    C, V, q, kv = c.dim, c.output_rows, c.q_dim, c.kv_dim

    def product(name: str, extra: float) -> tuple[float, float]:
        matrices = [w.output] if name == "output" else [getattr(layer, name) for layer in w.layers]
        N, K = matrices[0].shape
        return statistics.fmean(m.nbytes for m in matrices) + size * (
            T * K + extra
        ), 2.0 * T * N * K

    seen = T * start_pos + T * (T + 1) / 2  # keys seen by all tokens together
    return {
        "embedding": (size * 2.0 * T * C, 0.0),
        "rmsnorm": (size * (2.0 * T * C + C), 4.0 * T * C),
        "rmsnorm_qkv_rope": product("wqkv", C + T * (q + 2 * kv)),
        "attention": (
            size * 2.0 * T * q + model.kv_dtype.itemsize * 2.0 * (start_pos + T) * kv,
            4.0 * q * seen,
        ),
        "wo": product("wo", 2 * T * C),
        "rmsnorm_swiglu": product("w13", C + T * c.hidden_dim),
        "w2": product("w2", 2 * T * C),
        "rmsnorm_linear": product("output", C + T * V * 4 / size),  # logits are in fp32
        "sample": (4.0 * c.vocab_size, 2.0 * c.vocab_size),
    }[op]


def decode_bytes(model: Llama, length: float) -> float:
    """Bytes read for one token when `length` positions are cached: every matrix once, and the keys
    and values."""
    c, matrices = model.config, sum(matrix.nbytes for matrix in model.weights.matrices)
    return matrices + 2.0 * c.n_layers * c.kv_dim * length * model.kv_dtype.itemsize


def prefill_operations(model: Llama, T: int, start_pos: int = 0) -> float:
    """Operations for T tokens after start_pos others, with the logits of the last one only."""
    layer = sum(cost(op, model, T, start_pos)[1] for op in (*LAYER_PRODUCTS, "attention"))
    return model.config.n_layers * layer + cost("rmsnorm_linear", model, 1)[1]


# ---- tables


def cell(value: object) -> str:
    """For people: floats with enough decimal places to show two digits of the value and of its
    distance from 1."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    if abs(value) >= 100 or not math.isfinite(value):
        return f"{value:,.0f}"
    distance = min(abs(value), abs(value - 1))
    return (
        f"{value:,.{2 if distance == 0 else min(max(2, 1 - math.floor(math.log10(distance))), 9)}f}"
    )


def show(rows: Iterable[dict], form: str = "md", later: dict[str, list[str]] | None = None) -> None:
    """Print rows with the same keys as md or jsonl, each as soon as it is known, or as json, which
    is one value. later: texts that a column will hold and that may be wider than its first; a list
    needs none."""
    if form != "md":
        for text in (
            map(json.dumps, rows) if form == "jsonl" else [json.dumps(list(rows), indent=1)]
        ):
            print(text, flush=True)
        return
    later = later or {name: [cell(row[name]) for row in rows] for name in rows[0]}
    line = lambda texts: print("|", " | ".join(map(str.ljust, texts, widths)), "|", flush=True)
    for i, row in enumerate(rows):
        cells = {name: cell(value) for name, value in row.items()}
        if i == 0:
            widths = [
                max(map(len, [name, text, *later.get(name, [])])) for name, text in cells.items()
            ]
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
    # of the read ceiling for generation, of the product ceiling for a prompt
    percent_of_ceiling: float | None
    ratio: float | None = None  # ours over another program's


def format_of(model: Llama) -> str:
    """What --format calls the format of the layers' matrices; a GGUF may have several."""
    return "+".join(
        sorted({w.format.name if w.format else "none" for w in model.weights.matrices[:-1]})
    )


def device_name(device: torch.device, ranks: Ranks) -> str:
    threads = torch.get_num_threads()
    on_cpu = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else on_cpu
    return name if ranks.size == 1 else f"{ranks.size} x {name}"


def spread(values: list[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


@torch.inference_mode()
def prompt_speeds(model: Llama, cache: State, test: Test, repetitions: int) -> list[float]:
    _, T, depth = test
    tokens = torch.randint(3, model.config.vocab_size, (depth + T,)).tolist()
    cache.truncate(0)
    if depth:
        model.prefill(tokens[:depth], cache)

    def run() -> None:
        cache.truncate(depth)
        model.prefill(tokens[depth:], cache)

    return [T / s for s in wall_times(run, model.device, repetitions)]


def generation_speeds(model: Llama, cache: State, test: Test, repetitions: int) -> list[float]:
    """Tokens a second of the whole loop, sampling and text included, after a prompt of at least one
    token."""
    prompt = torch.randint(3, model.config.vocab_size, (max(test.depth, 1),)).tolist()
    stream, speeds = TextStream(Tokenizer(DEFAULT_MODEL)), []
    for _ in range(1 + repetitions):
        timings = Timings()
        for token in generate(
            model, prompt, cache, test.n + 1, Sampling(), eos=[], timings=timings
        ):
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
    cache, device, as_type = State(model), model.device, product_dtype(model)
    note(f"loaded in {loaded:.2f} s on {device}{args.ranks.described(model.exchange, device)}")
    if device.type == "cpu":
        seconds = (args.repetitions + 1) * sum(test.n / bound(model, test) for test in args.tests)
        if seconds > 5:
            note(
                f"{args.model}: this takes at least {seconds:.0f} s, at the speed of memory and arithmetic"
            )
    name = next(name for name, held in DTYPES.items() if held == model.dtype)
    size, kv = model.config.ranks * decode_bytes(model, 0) / 1e9, "e4m3" if model.kv_fp8 else name
    about = (
        args.model,
        size,
        model.backend,
        device_name(device, args.ranks),
        name,
        format_of(model),
        kv,
    )
    for test in args.tests:
        measure = prompt_speeds if test.kind == "pp" else generation_speeds
        mean, std = spread(measure(model, cache, test, args.repetitions))
        yield Row(*about, str(test), mean, std, percent(mean, bound(model, test)))
    read, product = read_ceiling(device) / 1e9, product_ceiling(device, as_type) / 1e12
    note(
        f"ceilings: read {read:.1f} GB/s, {str(as_type).removeprefix('torch.')} product {product:.2f} TFLOP/s"
    )


def speed_rows(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of the default table: each model in each dtype and format, and after those of a
    dtype transformers'."""
    for model, dtype in itertools.product(args.models, args.dtype):
        args.model = model
        plain = []  # transformers has no format like ours
        for form in args.format:
            for row in throughput(args, dtype, form):
                yield row
                if row.format == "none":
                    plain.append(row)
        if args.vs and plain and (model.startswith("random:") or args.folder.is_dir()):
            yield from transformers_rows(args, plain)
        elif args.vs:
            note(
                f"{model}: transformers is not measured: --vs needs --format none, and a folder or random:SHAPE"
            )


def run_speed(args: argparse.Namespace) -> None:
    peers = ["transformers, static cache"] if args.vs else []
    later = {"model": args.models, "test": list(map(str, args.tests)), "backend": peers}
    show(map(dataclasses.asdict, speed_rows(args)), args.output, later)


# ---- transformers, on the same machine in the same run


def transformers_model(args: argparse.Namespace, dtype: torch.dtype, device: torch.device):
    """The same model: the checkpoint, or random weights in the same shapes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not args.model.startswith("random:"):
        return AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype).to(device).eval()
    c = random_config(args.model)
    family = "qwen2" if c.qkv_bias else "qwen3" if c.qk_norm else "llama"
    heads = dict(
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, head_dim=c.head_dim
    )
    sizes = dict(hidden_size=c.dim, intermediate_size=c.hidden_dim, vocab_size=c.vocab_size)
    sizes |= dict(num_hidden_layers=c.n_layers, max_position_embeddings=c.max_seq_len)
    config = AutoConfig.for_model(family, **heads, **sizes)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def transformers_rows(args: argparse.Namespace, ours: list[Row]) -> Iterator[Row]:
    """Hugging Face's generate, eager and with its static cache."""
    from transformers import DynamicCache

    device = pick_device(args.device, args.ranks)
    theirs = transformers_model(args, DTYPES[ours[0].dtype], device)
    fixed = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    some_ids = lambda count: torch.randint(3, theirs.config.vocab_size, (1, count), device=device)
    for row, (kind, T, depth) in zip(ours, args.tests):
        before = some_ids(max(depth, 1))  # it needs a token in its cache
        if kind == "pp":
            kv, ids = DynamicCache(), some_ids(T)

            def prompt(ids: Tensor = ids, kv: DynamicCache = kv) -> None:
                theirs(ids, past_key_values=kv, logits_to_keep=1)
                kv.crop(-ids.shape[1])

            with torch.inference_mode():
                theirs(before, past_key_values=kv, logits_to_keep=1)
                yield peer(
                    row,
                    "transformers",
                    [T / s for s in wall_times(prompt, device, args.repetitions)],
                )
            continue
        for name, extra in (("eager", {}), ("static cache", {"cache_implementation": "static"})):
            times = []
            for n in (T + 1, 1):  # the difference is generation without the prompt
                run = partial(
                    theirs.generate, before, max_new_tokens=n, min_new_tokens=n, **fixed, **extra
                )
                times.append(statistics.median(wall_times(run, device, args.repetitions)))
            if times[0] > times[1]:
                yield peer(row, f"transformers, {name}", [T / (times[0] - times[1])])
            else:
                note(
                    f"note: transformers, {name}: {T} tokens are too few to time on this machine; raise -n"
                )


def peer(row: Row, backend: str, speeds: list[float]) -> Row:
    mean, std = spread(speeds)
    share, ratio = row.percent_of_ceiling * mean / row.tokens_per_s, row.tokens_per_s / mean
    return dataclasses.replace(
        row, backend=backend, tokens_per_s=mean, std=std, percent_of_ceiling=share, ratio=ratio
    )


# ---- kernels, each against its ceiling and against plain PyTorch


def plain_rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def plain_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, N, D], neighbouring pairs; cos and sin [T, 1, D / 2]."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def kernel_rows(model: Llama, T: int, start_pos: int) -> Iterator[dict]:
    """The ops at T tokens after start_pos others, on the data of each layer in turn, beside plain
    PyTorch."""
    c, ops, w, device, dtype = model.config, model.ops, model.weights, model.device, model.dtype
    KV, H, KH, D, eps = State(model), c.n_heads, c.n_kv_heads, c.head_dim, c.norm_eps
    KV.advance(start_pos)
    pos, scratch, end = KV.device_pos, KV.scratch, start_pos + T
    x, residual, y, h = (
        torch.randn(T, n, device=device, dtype=dtype) for n in (c.dim, c.dim, H * D, c.hidden_dim)
    )
    q = y.view(T, H, D)
    cos, sin = (t.to(dtype)[:, None] for t in KV.rope[start_pos:end].unbind(-1))
    kv_shape = (2, c.n_layers, KH, KV.size, D)  # PyTorch has no keys and values in 8 bits
    plain_kv = torch.zeros(kv_shape, device=device, dtype=dtype) if model.kv_fp8 else (KV.k, KV.v)
    layers = list(zip(w.layers, KV.k, KV.v, *plain_kv))
    copies = [(torch.randn_like(x),) for _ in range(max(1, min(64, (256 << 20) // x.nbytes)))]

    @cache
    def dense(m: Matrix) -> Tensor:  # in the model's dtype, whatever it is stored in
        return m.dense().to(dtype)

    def plain_qkv(layer: LayerWeights, _k: Tensor, _v: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = plain_rmsnorm(x, layer.attention_norm, eps)
        parts = (
            functional.linear(n, dense(layer.wqkv), layer.qkv_bias)
            .view(T, -1, D)
            .split([H, KH, KH], 1)
        )
        turned = parts[:2]
        if layer.qk_norm is not None:
            turned = [
                plain_rmsnorm(part, weight, eps) for part, weight in zip(turned, layer.qk_norm)
            ]
        k[:, start_pos:end] = plain_rope(turned[1], cos, sin).transpose(0, 1)
        v[:, start_pos:end] = parts[2].transpose(0, 1)
        return plain_rope(turned[0], cos, sin)

    def plain_attention(
        layer: LayerWeights, _k: Tensor, _v: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        mask = (
            torch.ones(T, end, dtype=torch.bool, device=device).tril(start_pos)
            if T > 1 and start_pos
            else None
        )
        heads = (q.transpose(0, 1)[None], k[None, :, :end], v[None, :, :end], mask)
        return functional.scaled_dot_product_attention(
            *heads, is_causal=T > 1 and not start_pos, enable_gqa=True
        )

    def plain_swiglu(layer: LayerWeights, *_) -> Tensor:
        n = plain_rmsnorm(x, layer.ffn_norm, eps)
        half = dense(layer.w13).view(2, -1, c.dim)  # two matrices of the right size
        return functional.silu(functional.linear(n, half[0])) * functional.linear(n, half[1])

    case = partial(kernel_row, model, T, start_pos)
    norm = w.layers[0].ffn_norm
    yield case(
        "rmsnorm",
        copies,
        lambda a: ops.rmsnorm(a, norm, eps),
        lambda a: plain_rmsnorm(a, norm, eps),
    )
    qkv = lambda l, k, v, *_: ops.rmsnorm_qkv_rope(
        x, l.attention_norm, l.wqkv, KV.rope, k, v, pos, eps, l.qkv_bias, l.qk_norm
    )
    yield case("rmsnorm_qkv_rope", layers, qkv, plain_qkv)
    yield case(
        "attention",
        layers,
        lambda _, k, v, *__: ops.attention(q, k, v, pos, scratch),
        plain_attention,
    )
    add = lambda inner, m: ops.linear_add(inner, m, residual)
    plain_add = lambda inner, m: residual + functional.linear(inner, dense(m))
    yield case("wo", [(y, layer.wo) for layer in w.layers], add, plain_add)
    yield case("w2", [(h, layer.w2) for layer in w.layers], add, plain_add)
    swiglu = lambda l, *_: ops.rmsnorm_swiglu(x, l.ffn_norm, l.w13, eps)
    yield case("rmsnorm_swiglu", layers, swiglu, plain_swiglu)
    if T == 1:
        logits, sampler = torch.empty(T, c.vocab_size, device=device), Sampler(device)
        output = lambda: ops.rmsnorm_linear(x, w.norm, w.output, eps, logits)
        plain_output = lambda: functional.linear(
            plain_rmsnorm(x, w.norm, eps), dense(w.output)
        ).float()
        yield case("rmsnorm_linear", [()] * 4, output, plain_output)
        sample = lambda: ops.sample(logits, KV.tokens, KV.host_tokens, pos, sampler)
        yield case(
            "sample",
            [()] * 4,
            sample,
            lambda: torch.multinomial(logits[0].topk(40).values.softmax(0), 1),
        )


def kernel_row(
    model: Llama, T: int, start_pos: int, op: str, data: list, ours: Callable, plain: Callable
) -> dict:
    """Microseconds of an op on several sets of data, on the device and in plain PyTorch, and its
    share of the ceiling that binds. The sets are several times the size of the L2, so that memory
    is measured and not the cache."""
    device = model.device
    each = lambda run: device_time(lambda: [run(*some) for some in data], model) / len(data)
    seconds, plain_seconds = each(ours), each(plain)
    moved, operations = cost(op, model, T, start_pos)
    copies = op == "rmsnorm"  # writes as much as it reads
    memory = moved / (copy_ceiling(device) if copies else read_ceiling(device))
    compute = operations / product_ceiling(device, product_dtype(model, op, T))
    return {
        "op": op,
        "tokens": T,
        "depth": start_pos,
        "us": 1e6 * seconds,
        "MB": moved / 1e6,
        "GFLOP": operations / 1e9,
        "bound by": "memory" if memory > compute else "arithmetic",
        "% of ceiling": percent(max(memory, compute), seconds),
        "PyTorch us": 1e6 * plain_seconds,
        "x PyTorch": plain_seconds / seconds,
    }


@torch.inference_mode()
def run_kernels(args: argparse.Namespace) -> None:
    shapes = [(1, depth) for depth in sorted({max(d, 100) for d in args.depth})]
    shapes += [(T, d) for kind, T, d in args.tests if kind == "pp"]
    model = open_model(args, args.dtype[0], max(map(sum, shapes)), args.format[0])
    rows = (row for shape in shapes for row in kernel_rows(model, *shape))
    show(rows, args.output, later={"op": [*PRODUCT_ROWS], "bound by": ["arithmetic"]})


# ---- profile

PATTERNS = {  # the op of a kernel: the first whose pattern occurs in its name
    "attention": "attention",
    "sample": "sample",
    "embedding": "embedding",
    "product": "_vector_kernel|_stream_kernel|_few_kernel|_product_kernel|linear|gemm|nvjet|cutlass|mm|mv",
    "rmsnorm": "^_rmsnorm_kernel$",
}


def profiled(run: Callable[[], object], device: torch.device) -> list[tuple[str, float, float]]:
    """Every kernel of a call (every op on a CPU), in order: its name, its start and its end in
    seconds."""
    run()
    synchronize(device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes to stderr
    with torch.profiler.profile() as profile:
        run()
        synchronize(device)
    where = (
        torch.autograd.DeviceType.CUDA if device.type == "cuda" else torch.autograd.DeviceType.CPU
    )
    events = [e for e in profile.events() if e.device_type == where and e.cpu_parent is None]
    return sorted(
        ((e.name, e.time_range.start * 1e-6, e.time_range.end * 1e-6) for e in events),
        key=lambda e: e[1],
    )


def profile_rows(
    events: list[tuple[str, float, float]], model: Llama, T: int, start_pos: int
) -> tuple[list[dict], float, float, float]:
    """A row for each kernel name, and milliseconds: of all, of gaps, of all with each kernel at its
    ceiling. Products come in the order of a forward pass; if there are more or fewer than it has,
    they stay without an op. A kernel that starts while its predecessor is running (programmatic
    dependent launch) is charged only with the time by which it outlasts it: rows and gaps add up to
    the whole."""
    ops = [
        next((op for op, pattern in PATTERNS.items() if re.search(pattern, name)), None)
        for name, _, _ in events
    ]
    products = [*LAYER_PRODUCTS * model.config.n_layers, "rmsnorm_linear"]
    ordered = iter(products if ops.count("product") == len(products) else ())
    spent: dict[tuple, list[float]] = defaultdict(list)
    gaps, clock = 0.0, events[0][1]
    for (name, start, end), op in zip(events, ops):
        if op == "product" and (op := next(ordered, None)):
            name = f"{op}: {name}"
        gaps += max(0.0, start - clock)
        spent[name, op].append(max(0.0, end - max(start, clock)))
        clock = max(clock, end)
    total, read = clock - events[0][1], read_ceiling(model.device)
    rows, ideal = [], 0.0
    for (name, op), times in spent.items():
        tokens = 1 if op == "rmsnorm_linear" else T  # only the last token's logits are needed
        moved, operations = (
            len(times) * n for n in (cost(op, model, tokens, start_pos) if op else (0.0, 0.0))
        )
        seconds = sum(times)
        rate = product_ceiling(model.device, product_dtype(model, op, tokens))
        ideal += max(moved / read, operations / rate)
        row = {
            "kernel": name[:60],
            "ms": 1e3 * seconds,
            "% of time": 100 * seconds / total,
            "count": len(times),
        }
        lasted = seconds or math.inf  # rates are 0 where a kernel ran wholly beside others
        row |= {"GB/s": moved / lasted / 1e9, "% of read": percent(moved / read, lasted)}
        rows.append(row | {"% of product": percent(operations / rate, lasted)})
    rows.sort(key=lambda row: -row["ms"])
    return rows, 1e3 * total, 1e3 * gaps, 1e3 * ideal


@torch.inference_mode()
def run_profile(args: argparse.Namespace) -> None:
    start_pos, T = max(args.depth[0], 100), args.n_prompt[0]
    model = open_model(args, args.dtype[0], start_pos + T + 8, args.format[0])
    tokens = torch.randint(3, model.config.vocab_size, (start_pos + T,)).tolist()
    cache = State(model)
    model.prefill(tokens[:start_pos], cache)
    step = model.graph(cache).replay if model.uses_graphs else lambda: model.step(1, cache)

    def prefill() -> None:
        cache.truncate(0)
        model.prefill(tokens[:T], cache)

    on = f"{model.backend} ops on {device_name(model.device, args.ranks)}"
    for title, run, count, past in (
        ("decode step", step, 1, start_pos),
        ("prefill", prefill, T, 0),
    ):
        rows, ms, gaps, ideal = profile_rows(profiled(run, model.device), model, count, past)
        print(f"\n{title}, T {count}, {past} before, {on}\n")
        show(rows)
        print()
        print(f"gaps between kernels take {gaps:.3f} ms of {ms:.3f}; every kernel at its own ceiling would take "
              f"{ideal:.3f}: overall efficiency {100 * ideal / ms:.1f}%")  # fmt: skip


# ---- passes of several tokens


def pass_seconds(model: Llama, cache: State, T: int, depth: int) -> float:
    """How long it takes to evaluate T tokens at a depth."""

    def run() -> None:
        cache.seek(depth)
        model.evaluate(T, cache)

    return device_time(run, model, 20)


@torch.inference_mode()
def run_passes(args: argparse.Namespace) -> None:
    """The time of a pass of T tokens, and its ratio to that of a single token: what proposals must
    gain to pay off."""
    (depth,), lengths = args.depth, [1, *(T for T in args.passes if T > 1)]
    model = open_model(args, args.dtype[0], depth + max(lengths), args.format[0])
    cache = State(model)
    seconds = [pass_seconds(model, cache, T, depth) for T in lengths]
    same = dict(model=args.model, format=format_of(model), depth=depth)
    show(
        [same | dict(tokens=T, ms=1e3 * s, ratio=s / seconds[0]) for T, s in zip(lengths, seconds)],
        args.output,
    )


# ---- launch sizes


def vector_candidates(op: str, bits: int, columns: int) -> Iterator[list[int]]:
    """launch.VectorSizes worth trying: at least eight neighbours per thread, and enough weights per
    thread to hide the latency of memory, but not too many."""
    for rows, block, warps in itertools.product(
        (2, 4, 8, 16), (1024, 2048, 4096, 8192), (2, 4, 8, 16)
    ):
        weights = rows * block // (32 * warps)
        if (
            256 * warps <= block < max(2 * columns, 2048)
            and 16 <= weights <= 2048 // bits
            and rows <= 128 // bits
        ):
            yield [rows, block, warps]


def stream_candidates(op: str, bits: int, columns: int) -> Iterator[list[int]]:
    """launch.StreamSizes likewise. Only linear_add does without pairs of rows."""
    rows_of_tile = (1, 2, 4, 8) if op == "linear_add" else (2, 4, 8)
    blocks = [
        block
        for block in (2048, 4096, 8192, 16384)
        if columns <= 3 * block and block < max(2 * columns, 4096)
    ]
    for rows, block, warps, stages in itertools.product(
        rows_of_tile, blocks, (6, 8, 12, 16), (3, 4, 6)
    ):
        yield [rows, block, max(1, warps // (block // 2048)), stages]


def few_candidates(op: str, bits: int, columns: int) -> Iterator[list[int] | None]:
    """launch.FewSizes likewise: up to 64 registers a thread for the tiles of W in flight. None is
    the library."""
    yield None
    for rows, warps, steps, lanes, ahead in itertools.product(
        (16, 32), (4, 8), (1, 2, 4), (4, 8), (1, 2, 4)
    ):
        if rows * steps * ahead <= 128 and lanes <= 4 * steps:
            yield [rows, warps, steps, lanes, ahead]


@torch.inference_mode()
def run_tune(args: argparse.Namespace) -> None:
    """Time whole steps with one launch size after the other, op by op, and write the best into
    launch.json: what is best for a kernel alone need not be best between others, which overlap with
    its beginning and end."""
    model = open_model(args, args.dtype[0], 256, args.format[0])
    if not model.uses_graphs:
        raise ValueError("--tune times the Triton kernels on a GPU")
    cache, layer = State(model), model.weights.layers[0]
    products = [
        ("rmsnorm_qkv_rope", layer.wqkv),
        ("linear_add", layer.wo),
        ("rmsnorm_swiglu", layer.w13),
    ]
    products += [("linear_add", layer.w2), ("rmsnorm_linear", model.weights.output)]
    # whose tables these are
    products = [(op, w) for op, w in products if w.format is layer.wqkv.format]
    for _ in range(20):
        pass_seconds(model, cache, 1, 64)  # a GPU that was idle is slower at first
    streams = layer.wqkv.format and layer.wqkv.format.packed_load
    kind, single = ("stream", stream_candidates) if streams else ("vector", vector_candidates)
    few = own_table(model, "few")
    passes = [
        (1, own_table(model, kind), single),
        (8, few[8], few_candidates),
        (16, few[16], few_candidates),
    ]
    for T, table, candidates in passes:
        print(f"T = {T}, as it is: {1e6 * pass_seconds(model, cache, T, 64):.1f} us")
        for op, w in products:
            sizes, found = table.setdefault(op, dict(table["default"])), []
            for candidate in candidates(op, w.bits, w.columns):
                sizes[w.columns] = candidate
                with suppress(triton.OutOfResources):  # more shared memory than the card has
                    found.append((pass_seconds(model, cache, T, 64), candidate))
            seconds, best = min(found, key=lambda pair: pair[0])
            sizes[w.columns] = best
            print(
                f"{op:18s} columns {w.columns:6d}: {1e6 * seconds:.1f} us with {best or 'the library'}",
                flush=True,
            )
        save_tables()


def own_table(model: Llama, kind: str) -> dict:
    """The launch sizes of exactly this card and these bits per weight: at first a copy of those
    used instead."""
    table = tables()[kind]
    for key in (capability(model.device), model.weights.layers[0].wqkv.bits):
        table = table.setdefault(key, copy.deepcopy(nearest(table, key)))
    return table


# ---- perplexity


def quality(parts: list[dict[str, Tensor]], text_bytes: int) -> dict:
    """Perplexity with its standard error, bits per byte of a text of so many bytes, and the
    comparison."""
    all_of = {name: torch.cat([part[name] for part in parts]).double() for name in parts[0]}
    losses = all_of["loss"]
    mean, error = losses.mean().item(), losses.std().item() / math.sqrt(len(losses))
    row = {
        "tokens": len(losses),
        "perplexity": math.exp(mean),
        "standard_error": math.exp(mean) * error,
    }
    row["bits_per_byte"] = losses.sum().item() / math.log(2) / text_bytes
    if "kl" in all_of:
        row["perplexity_ratio"] = math.exp(mean - all_of["other_loss"].mean().item())
        row |= {"mean_kl": all_of["kl"].mean().item(), "kl_99": all_of["kl"].quantile(0.99).item()}
        row["same_top_%"] = 100 * all_of["same_top"].mean().item()
    return row


@torch.inference_mode()
def perplexity(
    model: Llama, ids: list[int], bos: int, ctx: int, stride: int, against: Llama | None = None
) -> Iterator[dict[str, Tensor]]:
    """Evaluate ids in windows of ctx tokens, every `stride`, each started with bos, and yield, part
    by part, each token's loss; with a second model also its loss, and how far their distributions
    differ. A window's input is bos and all its tokens but the last; each token counts in the first
    window with it."""
    caches, end = [(m, State(m, ctx)) for m in (model, against) if m], 0
    for start in range(0, len(ids), stride):
        counted, end = end, min(start + ctx, len(ids))
        window, skip = [bos, *ids[start:end]], counted - start
        for m, kv in caches:
            kv.truncate(0)
            if skip:
                m.prefill(window[:skip], kv)
        tokens = torch.tensor(window[skip:], device=model.device)
        # In parts: the logits of a whole window would be large
        for part, goal in zip(tokens[:-1].split(CHUNK["cpu"]), tokens[1:].split(CHUNK["cpu"])):
            logs = [m.forward(part, kv).log_softmax(-1) for m, kv in caches]
            loss, *other_loss = (
                functional.nll_loss(log, goal, reduction="none").cpu() for log in logs
            )
            found = {"loss": loss}
            if against:
                q, p = logs
                found |= {"other_loss": other_loss[0], "kl": (p.exp() * (p - q)).sum(-1).cpu()}
                found["same_top"] = (p.argmax(-1) == q.argmax(-1)).cpu()
            yield found
        if end == len(ids):
            return


def run_perplexity(args: argparse.Namespace) -> None:
    with open(args.perplexity, "rb") as f:
        text = text_of(f, args.perplexity, 1 << 30)
    if args.model.startswith("random:"):
        raise ValueError("a text needs a checkpoint with a tokenizer, not random weights")
    model = open_checkpoint(args, args.dtype[0], args.ctx_size or 512, args.format[0])
    tokenizer = Tokenizer(model.checkpoint.folder, model.config.vocab_size, model.config.bos_id)
    ids = tokenizer.encode(text, bos=False)
    if not ids:
        raise ValueError(f"{args.perplexity} is empty")
    if args.against and model.checkpoint.format:
        held = model.checkpoint.format.name
        raise ValueError(
            f"--against needs the original: {model.checkpoint.folder} holds {held} matrices"
        )
    plainly = argparse.Namespace(**vars(args) | {"kv_fp8": False, "accumulate": "fp32"})
    against = (
        open_checkpoint(plainly, args.against, model.ctx_size, "none") if args.against else None
    )
    stride, parts, total, done = args.stride or model.ctx_size, [], 0.0, 0
    with tqdm(total=len(ids), unit=" tokens", disable=None, leave=False) as bar:
        for part in perplexity(model, ids, tokenizer.bos, model.ctx_size, stride, against):
            parts.append(part)
            total, done = total + part["loss"].sum().item(), done + len(part["loss"])
            bar.update(len(part["loss"]))
            bar.set_postfix(perplexity=f"{math.exp(total / done):.4f}")
    row = {
        "model": args.model,
        "dtype": args.dtype[0],
        "format": format_of(model),
        "kv fp8": args.kv_fp8,
    }
    row |= {"against": args.against, "ctx": model.ctx_size, "stride": stride}
    show([row | quality(parts, len(text.encode()))], args.output)


# ---- the picture

OURS, OTHERS = "#2b6cb0", "#a0aec0"


def read_rows(file: str) -> list[Row]:
    """The rows of tokens per second in a file of JSON lines. Raises ValueError."""
    rows = []
    for number, text in enumerate(
        Path(file).read_text(encoding="utf-8", errors="replace").splitlines(), 1
    ):
        try:
            rows.append(Row(**json.loads(text)))
        except (ValueError, TypeError):
            raise ValueError(
                f"{file}, line {number}: not a row printed by bench.py -o jsonl"
            ) from None
    return rows


def plot(rows: list[Row], file: str) -> None:
    """A bar of tokens per second for each row of generation, and beside it its bound, the speed at
    the read ceiling: a line that neighbours with the same bound share."""
    import matplotlib

    matplotlib.use("agg")  # draws into files
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "fused-llama", "font.size": 9}
    from matplotlib import pyplot

    rows = [row for row in rows if row.test.startswith("tg")]
    if not rows:
        raise ValueError("there is nothing to draw: no row has generated tokens")
    figure, ax = pyplot.subplots(figsize=(9, 0.3 * len(rows) + 0.9))
    bounds = [100 * row.tokens_per_s / row.percent_of_ceiling for row in rows]
    speeds = [row.tokens_per_s for row in rows]
    longest = 1.36 * max(bounds + speeds)
    ax.barh(
        range(len(rows)),
        speeds,
        height=0.7,
        color=[OURS if row.ratio is None else OTHERS for row in rows],
    )
    for y, (row, speed) in enumerate(zip(rows, speeds)):
        inside = speed > longest / 16
        side = (
            dict(ha="right", color="white" if row.ratio is None else "black")
            if inside
            else dict(ha="left")
        )
        ax.annotate(
            f"{speed:,.0f}",
            (speed, y),
            (-4 if inside else 4, 0),
            "data",
            "offset points",
            va="center",
            **side,
        )
    first = 0
    for last, bound in enumerate(bounds):
        if last + 1 == len(rows) or abs(bounds[last + 1] / bound - 1) > 0.005:
            ax.vlines(bound, first - 0.45, last + 0.45, color="black", linewidth=1.5)
            size = rows[last].size_gb
            text = f"at most {bound:,.0f} ({f'{size:.1f} GB' if size >= 0.1 else f'{1000 * size:.0f} MB'})"
            beyond = max(bound, *speeds[first : last + 1])  # so that the text is on no bar
            ax.text(beyond + longest / 90, (first + last) / 2, text, va="center")
            first = last + 1
    ax.set_yticks(range(len(rows)), [label(row, rows) for row in rows])
    ax.set(xlim=(0, longest), ylim=(len(rows) - 0.45, -0.55))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    same = [
        one.pop()
        for one in ({row.model for row in rows}, {row.device for row in rows})
        if len(one) == 1
    ]
    title = ", ".join(text.removeprefix("random:") for text in ["tokens/s", *same])
    ax.set_title(f"{title}; line: the most that reading the weights allows", loc="left", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.endswith(".svg") else None)
    pyplot.close(figure)


def label(row: Row, rows: list[Row]) -> str:
    """Program and types, and what differs between the rows."""
    differs = lambda name: len({getattr(r, name) for r in rows}) > 1
    parts = [
        "fused-llama" if row.ratio is None else row.backend,
        row.dtype if row.format == "none" else row.format,
    ]
    if row.format != "none" and len({r.dtype for r in rows if r.format == row.format}) > 1:
        parts.append(row.dtype)
    parts += [
        getattr(row, name).removeprefix("random:") for name in ("model", "test") if differs(name)
    ]
    return ", ".join(parts) + (f", kv {row.kv}" if row.kv != row.dtype else "")


# ---- the command line again

RUNS = {
    "speed": run_speed,
    "kernels": run_kernels,
    "profile": run_profile,
    "perplexity": run_perplexity,
    "passes": run_passes,
    "tune": run_tune,
    "plot": lambda args: plot(read_rows(args.plot[0]), args.plot[1]),
}


def work(args: argparse.Namespace, ranks: Ranks) -> int:
    args.ranks = ranks
    if args.vs and ranks.size > 1:
        raise ValueError(
            f"--vs compares with a program that runs in one process, not in {ranks.size}"
        )
    for flag, given, package in (
        ("--vs", args.vs, "transformers"),
        ("--plot", args.plot, "matplotlib"),
    ):
        if given and importlib.util.find_spec(package) is None:  # said before anything is measured
            raise ValueError(f"{flag} needs a package that is not installed: {package}")
    args.cores = torch.get_num_threads()
    if args.threads:
        torch.set_num_threads(args.threads)
    RUNS[args.mode](args)
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(work, parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
