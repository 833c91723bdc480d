"""Benchmarks: tokens per second, kernels, a profile, perplexity; each beside the hardware's limit, measured in the same run."""

from __future__ import annotations

import argparse
import csv
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
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

from run import DEFAULT_MODEL, DTYPE_NAMES, FORMATS_8, IGNORED, Parser, device_name_of, import_torch, one_line_errors, within
from terminal import first_speaks, note, use_safe_streams

# ---- the command line: before torch is imported, which takes seconds

SHAPES = {  # of TinyLlama-1.1B, Llama-2 and Llama-3-8B
    "1.1b": dict(dim=2048, n_layers=22, n_heads=32, n_kv_heads=4, head_dim=64, hidden_dim=5632, vocab_size=32000),
    "7b": dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, head_dim=128, hidden_dim=11008, vocab_size=32000),
    "8b": dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, hidden_dim=14336, vocab_size=128256),
    "13b": dict(dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, head_dim=128, hidden_dim=13824, vocab_size=32000),
    "70b": dict(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, head_dim=128, hidden_dim=28672, vocab_size=32000),
}
PEERS = {"transformers": ("transformers",), "llama.cpp": ("llama_cpp", "gguf")}  # and the packages that each needs
PICTURES = (".png", ".svg", ".pdf")
MODES = {
    "speed": "tokens per second",
    "kernels": "--kernels",
    "profile": "--profile",
    "perplexity": "--perplexity",
    "limits": "--limits",
    "passes": "--passes",
    "tune": "--tune",
    "recorded": "--recorded",
}


def numbers(text: str) -> list[int]:
    """An argparse type: a number, or several with commas."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor several with commas")
    return [within(int, 0, 1 << 24)(part) for part in text.split(",")]


def one_of(*allowed: str) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        for part in text.split(","):
            if part not in allowed:
                raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(allowed)}")
        return text.split(",")

    return names


def mode_of(args: argparse.Namespace) -> str:
    return next((mode for mode in MODES if getattr(args, mode, None)), "speed")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__, MODES)
    add = parser.group("what is measured, when it is not tokens per second")
    add("--kernels", action="store_true", help="each op against its ceiling and against plain PyTorch")
    add("--profile", action="store_true", help="one decode step and one prefill, kernel by kernel")
    add("--perplexity", metavar="FILE", help="perplexity of a text")
    add("--limits", metavar="FILE", help="how near a text's activations come to the largest fp16 number, layer by layer")
    add("--passes", type=numbers, metavar="T,...", help="what evaluating T tokens at once costs, relative to a single one")
    add("--tune", action="store_true", help="find launch sizes for this card and the shapes of this model")
    add("--recorded", metavar="FILE", action="append", default=[], help="draw rows saved from -o jsonl; measures nothing")

    add = parser.group("model", "speed kernels profile perplexity limits passes tune")
    add("-m", "--model", action="append", dest="models", default=[], metavar="MODEL",
        help=f"a checkpoint [models/tales], or random:SHAPE, one of {', '.join(SHAPES)}, tales, SHAPE:LAYERS, a config.json;"
        " -m, --dtype, --fp8, -p, -n and -d repeated, or with commas, add rows")  # fmt: skip
    add("-c", "--ctx-size", type=within(int, 1, 1 << 24), metavar="N", only="speed kernels profile perplexity limits",
        help="context; with --perplexity and --limits the window [512]")  # fmt: skip
    add("--dtype", type=one_of("auto", *DTYPE_NAMES), action="extend", default=["auto"], metavar="TYPE",
        help="auto, fp32, fp16, bf16")  # fmt: skip
    add("--fp8", type=one_of("none", *FORMATS_8), action="extend", default=["none"], metavar="FORMAT",
        help="8-bit matrices: none, e4m3, e5m2")  # fmt: skip
    add("--kv-fp8", action="store_true", help="8-bit keys and values")
    add("--accumulate", choices=["auto", "fp32", "fp16"], default="auto", help="sums of a prompt's products, as in run.py")
    add("-dev", "--device", type=device_name_of, default="auto", help="cpu, cuda or cuda:N")
    add("-t", "--threads", type=within(int, 1, 4096), metavar="N", help="CPU threads [as in run.py]")
    add("--backend", choices=["auto", "torch", "triton"], default="auto", help="auto: triton on a GPU, torch on a CPU")

    add = parser.group("tests", "speed")
    add("-p", "--n-prompt", type=numbers, action="extend", default=[512], metavar="N", only="speed kernels profile",
        help="tokens of a prompt; 0 leaves the test out [512]")  # fmt: skip
    add("-n", "--n-gen", type=numbers, action="extend", default=[128], metavar="N", help="tokens to generate; 0: none [128]")
    add("-d", "--depth", type=numbers, action="extend", default=[0], metavar="N", only="speed kernels profile passes",
        help="tokens already in the cache [0]")  # fmt: skip
    add("-r", "--repetitions", type=within(int, 1, 1000), default=5, metavar="N", help="timed runs, after one warm-up")
    add("--vs", type=one_of(*PEERS), action="extend", default=[], metavar="PEER",
        help=f"{', '.join(PEERS)}: measure these, too, in the same run")  # fmt: skip
    add("--stride", type=within(int, 1, 1 << 24), metavar="N", only="perplexity", help="step between windows [the window]")
    add("--against", choices=DTYPE_NAMES, only="perplexity", help="compare with the model in this dtype, not in 8 bits")

    add = parser.group("output")
    add("-o", "--output", choices=["md", "csv", "json", "jsonl"], default="md", only="speed kernels perplexity limits passes",
        help="form of the table")  # fmt: skip
    add("--plot", metavar="FILE.png", only="speed kernels recorded",
        help=f"draw tokens per second and kernels beside their bounds, as {', '.join(PICTURES)} (matplotlib)")  # fmt: skip
    add("--debug", action="store_true", help="print errors with their traceback")
    parser.ignored(*IGNORED)

    args = parser.parse(argv, mode_of)
    if sum(bool(getattr(args, mode, None)) for mode in MODES) > 1:
        parser.error(f"give only one of {', '.join(flag for flag in MODES.values() if flag.startswith('--'))}")
    several = {"-m": "models", "--dtype": "dtype", "--fp8": "fp8"}
    several |= {"-p": "n_prompt", "-d": "depth"} if args.mode == "profile" else {"-d": "depth"} if args.passes else {}
    if args.passes and not all(args.passes):
        parser.error("--passes 0: a pass has at least one token")
    for flag, name in several.items():
        if args.mode != "speed" and len(getattr(args, name)) > 1:
            parser.error(f"{MODES[args.mode]} takes one {flag}")
    if args.perplexity and args.stride and args.stride > (args.ctx_size or 512):
        parser.error(f"--stride {args.stride} skips text between windows of {args.ctx_size or 512}")
    if args.recorded and not args.plot:
        parser.error("--recorded needs --plot")
    if args.plot and Path(args.plot).suffix not in PICTURES:
        parser.error(f"--plot writes {', '.join(PICTURES)}, not {args.plot}")
    args.n_prompt, args.n_gen = ([n for n in ns if n] for ns in (args.n_prompt, args.n_gen))  # 0 leaves the test out
    if not args.n_prompt and (args.mode == "profile" or args.mode == "speed" and not args.n_gen):
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
import parallel
from checkpoint import (
    DTYPES,
    check_memory,
    find_checkpoint,
    pick_backend,
    pick_device,
    pick_dtype,
    pick_fp16_sums,
    read_config,
    tensor_shapes,
)
from fp8 import E4M3, FORMATS, Format, Matrix
from kernels import prepacked, storage_dtype
from launch import FEW_LAUNCHES, LAUNCHES, OPS, FewLaunch, Launch, capability, jit, nearest, tl
from model import Config, KVCache, LayerWeights, Llama, Timings, Weights, captured, generate
from plot import plot, read_rows
from quality import open_checkpoint, run_limits, run_perplexity
from sampling import Sampler, Sampling
from tokenizer import TextStream, Tokenizer

# speed-ups over PyTorch: Kernl's llama-v2 on an RTX 3090
PUBLISHED_RATIOS = {"rope": 4.94, "rmsnorm": 2.3, "rmsnorm_qkv_rope": 1.52, "rmsnorm_swiglu": 1.2}


# ---- models to measure


def random_config(spec: str) -> Config:
    """The config of "7b", of "70b:8" (8 of its layers), of "tales", or of a config.json. Raises ValueError."""
    name, _, layers = spec.partition(":")
    if name.endswith(".json"):
        config = read_config(Path(name).parent)
    elif name == "tales":
        config = read_config(DEFAULT_MODEL)
    elif name in SHAPES:
        config = Config(**SHAPES[name], norm_eps=1e-5, max_seq_len=1 << 15, dtype=torch.float16)
    else:
        raise ValueError(f"random:{spec}: the shapes are {', '.join(SHAPES)}, tales or a config.json")
    if layers and not (layers.isdecimal() and int(layers) > 0):
        raise ValueError(f"random:{spec}: {layers!r} is not a number of layers")
    return dataclasses.replace(config, n_layers=int(layers)) if layers else config


def random_weights(
    c: Config, dtype: torch.dtype, stored: torch.dtype, device: torch.device, format: Format | None, backend: str
) -> Weights:
    """Normally distributed weights, as large as those that training starts from, made on the device; in 8 bits all rows share
    one scale, for which the largest magnitude is taken to be four standard deviations."""

    def matrix(rows: int, columns: int) -> Matrix:
        made = torch.randn(rows, columns, dtype=stored, device=device)
        if not format:
            return prepacked(Matrix(made.mul_(0.02)), backend)
        codes = [format.round(part.mul_(format.top / 4)) for part in made.split(1024)]
        return Matrix(torch.cat(codes), torch.full((rows,), 0.02 * 4 / format.top, device=device), format)

    def ones() -> Tensor:
        return torch.ones(c.dim, dtype=dtype, device=device)

    layers = [
        LayerWeights(
            attention_norm=ones(), ffn_norm=ones(), **{name: matrix(*shape) for name, shape in c.layer_matrices.items()}
        )
        for _ in tqdm(range(c.n_layers), "random weights", unit=" layers", leave=False, disable=not sys.stderr.isatty())
    ]
    embedding = torch.randn(c.vocab_size, c.dim, dtype=dtype, device=device).mul_(0.02)
    return Weights(embedding, layers, ones(), matrix(c.output_rows, c.dim))


def open_model(args: argparse.Namespace, dtype: str, ctx_size: int, fp8: str = "none") -> Llama:
    """A checkpoint, or random weights for a name like random:7b. On a CPU, torch is told how many threads to use for it."""
    model = _open_model(args, dtype, ctx_size, fp8)
    threads = args.threads or (1 if model.suits_one_thread else args.cores)
    if model.device.type == "cpu" and threads != torch.get_num_threads():
        torch.set_num_threads(threads)
        for ceiling in (read_ceiling, copy_ceiling, product_ceiling):
            ceiling.cache_clear()
    return model


def _open_model(args: argparse.Namespace, dtype: str, ctx_size: int, fp8: str) -> Llama:
    if not args.model.startswith("random:"):
        return open_checkpoint(args, dtype, ctx_size, fp8)
    config, device, format = random_config(args.model.removeprefix("random:")), pick_device(args.device), FORMATS.get(fp8)
    ranks = parallel.group()
    config = config.cut(ranks.size)
    ranks.join(device)
    backend, as_dtype = pick_backend(args.backend, device), pick_dtype(dtype, config.dtype or torch.float16, device)
    fp16_sums = pick_fp16_sums(args.accumulate, backend, device, as_dtype)
    check_memory(config, as_dtype, device, ctx_size, format, args.kv_fp8)
    with torch.inference_mode():
        weights = random_weights(config, as_dtype, storage_dtype(backend, as_dtype, device), device, format, backend)
    return Llama(config, weights, backend, device, as_dtype, ctx_size, None, args.kv_fp8, fp16_sums, args.accumulate != "fp32")


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- time


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_times(run: Callable[[], object], device: torch.device, repetitions: int = 5, warmup: int = 1) -> list[float]:
    """Seconds of each call, until the device has finished, without the warm-up calls."""
    times = []
    for _ in range(warmup + repetitions):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times[warmup:]


def gpu_time(calls: list[Callable[[], object]], repetitions: int = 10) -> float:
    """Median GPU seconds of one of the calls, back to back in a CUDA graph. The calls do the same on different data, in total
    several times the size of the L2, so that they measure memory and not the cache."""
    graph = captured(lambda: [call() for call in calls])
    return event_time(graph.replay, repetitions) / len(calls)


def event_time(run: Callable[[], object], repetitions: int = 10) -> float:
    """Median GPU seconds of a call, measured with events around it."""
    times = []
    for _ in range(2 + repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
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
        ways = [lambda b=b: _read_kernel[(data.numel() // b,)](data, data, BLOCK=b, num_warps=4) for b in (2048, 4096)]
    else:
        data = torch.ones(1 << 27)
        rows, column = data.view(torch.float16).view(1 << 14, -1), torch.ones(1 << 14, dtype=torch.float16)
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
    if dtype == E4M3.dtype:
        ones = torch.ones(size, 1, device=device)
        product = lambda: torch._scaled_mm(a, b.t(), ones, ones.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
    return 2.0 * size**3 / statistics.median(wall_times(product, device, warmup=2))


def prompt_dtype(model: Llama) -> torch.dtype:
    """The type in which a prompt's matmuls are computed."""
    on_tensor_cores = model.backend == "triton" and all(map(fp8.on_tensor_cores, model.weights.matrices))
    return E4M3.dtype if on_tensor_cores else model.dtype


# ---- what must be read and computed


def cost(
    op: str, c: Config, T: int, start_pos: int = 0, size: int = 2, format: Format | None = None, kv_size: int = 2
) -> tuple[float, float]:
    """Bytes that one launch of an op must move and operations that it must do, for T tokens after start_pos others: every input
    is read once, every output written once, and a multiply-add counts as two operations. size: bytes an element; kv_size: bytes
    an element of the cache; format: of 8-bit matrices."""
    C, F, V, q, kv = c.dim, c.hidden_dim, c.output_rows, c.q_dim, c.kv_dim

    def matrix(rows: int, columns: int) -> float:
        return float(format.matrix_bytes(rows, columns) if format else size * rows * columns)

    def product(rows: int, columns: int, extra: float) -> tuple[float, float]:
        return matrix(rows, columns) + size * (T * columns + extra), 2.0 * T * rows * columns

    seen = T * start_pos + T * (T + 1) / 2  # keys seen by all tokens together
    return {
        "embedding": (size * 2.0 * T * C, 0.0),
        "rmsnorm": (size * (2.0 * T * C + C), 4.0 * T * C),
        "rope": (size * 2.0 * T * q + 4.0 * T * c.head_dim, 3.0 * T * q),
        "rmsnorm_qkv_rope": product(q + 2 * kv, C, C + T * (q + 2 * kv)),
        "attention": (size * 2.0 * T * q + kv_size * 2.0 * (start_pos + T) * kv, 4.0 * q * seen),
        "wo": product(C, q, 2 * T * C),
        "rmsnorm_swiglu": product(2 * F, C, C + T * F),
        "w2": product(C, F, 2 * T * C),
        "rmsnorm_linear": (matrix(V, C) + size * (C + T * C) + 4.0 * T * V, 2.0 * T * V * C),
        "cross_entropy": (4.0 * T * V + 12.0 * T, 4.0 * T * V),
        "sample": (4.0 * V, 2.0 * V),
    }[op]


def matrix_bytes(weights: Weights) -> int:
    """Bytes of the matrices that every token reads."""
    return sum(matrix.nbytes for matrix in weights.matrices)


def decode_bytes(model: Llama, length: float) -> float:
    """Bytes read for one token when `length` positions are cached: every matrix once, and the keys and values."""
    c = model.config
    return matrix_bytes(model.weights) + 2.0 * c.n_layers * c.kv_dim * length * model.kv_dtype.itemsize


def prefill_operations(c: Config, T: int, start_pos: int = 0) -> float:
    """Operations for T tokens after start_pos others, with the logits of the last one only."""
    layer = sum(cost(op, c, T, start_pos)[1] for op in ("rmsnorm_qkv_rope", "attention", "wo", "rmsnorm_swiglu", "w2"))
    return c.n_layers * layer + cost("rmsnorm_linear", c, 1)[1]


# ---- tokens per second


@dataclasses.dataclass
class Row:
    """One line of the table."""

    model: str
    size_gb: float
    backend: str
    device: str
    dtype: str
    fp8: str  # of the matrices
    kv: str  # type of keys and values
    test: str
    tokens_per_s: float
    std: float
    share_of_ceiling: float | None  # of the read ceiling for generation, of the product ceiling for a prompt
    ratio: float | None = None  # ours over a peer's


def fp8_of(model: Llama) -> str:
    """What --fp8 calls the format of the matrices."""
    format = model.weights.output.format
    return format.name if format else "none"


def device_name(device: torch.device) -> str:
    threads = torch.get_num_threads()
    on_cpu = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else on_cpu
    return name if parallel.group().size == 1 else f"{parallel.group().size} x {name}"


def spread(values: list[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


@torch.inference_mode()
def prompt_speed(model: Llama, cache: KVCache, T: int, depth: int, repetitions: int) -> list[float]:
    """Tokens a second of a prompt of T tokens after `depth` others."""
    tokens = torch.randint(3, model.config.vocab_size, (depth + T,)).tolist()
    cache.truncate(0)
    if depth:
        model.prefill(tokens[:depth], cache)

    def run() -> None:
        cache.truncate(depth)
        model.prefill(tokens[depth:], cache)

    return [T / s for s in wall_times(run, model.device, repetitions)]


def generation_speed(model: Llama, cache: KVCache, n: int, depth: int, repetitions: int, stream: TextStream) -> list[float]:
    """Tokens a second of the whole loop, sampling and text included, after a prompt of `depth` tokens (at least one)."""
    prompt = torch.randint(3, model.config.vocab_size, (max(depth, 1),)).tolist()
    speeds = []
    for _ in range(1 + repetitions):
        timings = Timings()
        for token in generate(model, prompt, cache, n + 1, Sampling(), eos=[], timings=timings):
            stream.push(token)
        speeds.append(timings.steps / timings.step_seconds)
    return speeds[1:]


def throughput(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of the default table: prompts, then generation, at each depth, for each dtype."""
    longest = max(8, max(args.depth) + max(args.n_prompt + args.n_gen) + 1)  # 8: what time_to_first_token needs
    for dtype, form in itertools.product(args.dtype, args.fp8):
        start = time.perf_counter()
        model = open_model(args, dtype, max(longest, args.ctx_size or 0), form)
        loaded = time.perf_counter() - start
        cache, stream = KVCache(model), TextStream(Tokenizer(DEFAULT_MODEL))
        first = time_to_first_token(model, cache)
        if model.config.ranks > 1:
            note(f"running on {model.device}{parallel.described(model.exchange, model.device)}")
        note(f"load {loaded:.2f} s, first token {first[0]:.2f} s the first time, {1e3 * first[1]:.1f} ms after that")

        def row(test: str, speeds: list[float], share: Callable[[float], float], model: Llama = model) -> Row:
            mean, std = spread(speeds)
            name = {v: k for k, v in DTYPES.items()}[model.dtype]
            size = model.config.ranks * matrix_bytes(model.weights) / 1e9
            kv = "e4m3" if model.kv_fp8 else name
            where = model.backend, device_name(model.device)
            return Row(args.model, size, *where, name, fp8_of(model), kv, test, mean, std, share(mean))

        for depth, T in itertools.product(args.depth, args.n_prompt):
            operations = prefill_operations(model.config, T, depth) / T
            speeds = prompt_speed(model, cache, T, depth, args.repetitions)
            rate = product_ceiling(model.device, prompt_dtype(model))
            yield row(f"pp{T}{at(depth)}", speeds, lambda mean, o=operations, r=rate: mean * o / r)
        for depth, n in itertools.product(args.depth, args.n_gen):
            moved = decode_bytes(model, depth + n / 2)
            speeds = generation_speed(model, cache, n, depth, args.repetitions, stream)
            rate = read_ceiling(model.device)
            yield row(f"tg{n}{at(depth)}", speeds, lambda mean, b=moved, r=rate: mean * b / r)
        del model, cache
        release()


def at(depth: int) -> str:
    return f" @ d{depth}" if depth else ""


def time_to_first_token(model: Llama, cache: KVCache) -> tuple[float, float]:
    """Seconds from a prompt of 5 tokens to the first new one: with whatever has to be compiled, and without it."""
    times = []
    for _ in range(2):
        cache.truncate(0)
        start = time.perf_counter()
        with closing(generate(model, [1, 4, 5, 6, 7], cache, eos=[])) as tokens:
            next(tokens)
        times.append(time.perf_counter() - start)
    return times[0], times[1]


def cell(value: object) -> str:
    """For human readers: floats with enough decimal places to show two digits of the value and of its distance from 1."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    if abs(value) >= 100 or not math.isfinite(value):
        return f"{value:,.0f}"
    distance = min(abs(value), abs(value - 1))
    return f"{value:,.{2 if distance == 0 else min(max(2, 1 - math.floor(math.log10(distance))), 9)}f}"


def line(cells: list[str], widths: list[int]) -> str:
    return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths)) + " |"


def markdown(rows: list[dict]) -> str:
    """A markdown table of dictionaries with the same keys."""
    names, cells = list(rows[0]), [[cell(v) for v in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells)]
    return "\n".join([line(names, widths), rule(widths), *(line(row, widths) for row in cells)])


def rule(widths: list[int]) -> str:
    return "|" + "|".join("-" * (w + 2) for w in widths) + "|"


class Table:
    """Rows as md, csv, json or jsonl, each printed as soon as it is known, except in json, which is one value."""

    def __init__(self, form: str, longest: dict[str, list[str]] | None = None):
        """longest: later values of a column, where they may be wider than its name and its first value."""
        self.form, self.longest, self.rows = form, longest or {}, []

    def add(self, row: dict) -> None:
        self.rows.append(row)
        if self.form == "md":
            self._add_markdown(row)
        elif self.form == "jsonl":
            print(json.dumps(row))
        elif self.form == "csv":
            writer = csv.DictWriter(sys.stdout, list(row), lineterminator="\n")
            if len(self.rows) == 1:
                writer.writeheader()
            writer.writerow(row)
        sys.stdout.flush()

    def _add_markdown(self, row: dict) -> None:
        cells = {name: cell(value) for name, value in row.items()}
        if len(self.rows) == 1:
            self.widths = [max(map(len, [name, text, *self.longest.get(name, [])])) for name, text in cells.items()]
            print(line(list(row), self.widths) + "\n" + rule(self.widths))
        print(line(list(cells.values()), self.widths))

    def end(self) -> None:
        if self.form == "json":
            print(json.dumps(self.rows, indent=1), flush=True)


def show(rows: list[dict], form: str) -> None:
    """Print a complete list of rows; an empty list prints nothing."""
    if form == "md" and rows:
        print(markdown(rows), flush=True)
        return
    table = Table(form)
    for row in rows:
        table.add(row)
    if rows:
        table.end()


# ---- peers, on the same machine in the same run


def transformers_rows(args: argparse.Namespace, ours: list[Row]) -> Iterator[Row]:
    """Hugging Face's generate, eager and with its static cache, with a model of the same shape."""
    from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

    device, dtype = pick_device(args.device), DTYPES[ours[0].dtype]
    if args.model.startswith("random:"):
        c = random_config(args.model.removeprefix("random:"))
        config = LlamaConfig(
            hidden_size=c.dim,
            intermediate_size=c.hidden_dim,
            num_hidden_layers=c.n_layers,
            num_attention_heads=c.n_heads,
            num_key_value_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            vocab_size=c.vocab_size,
            max_position_embeddings=c.max_seq_len,
            dtype=dtype,
        )
        with torch.device(device):
            torch.set_default_dtype(dtype)
            theirs = LlamaForCausalLM(config).eval()
            torch.set_default_dtype(torch.float32)
    else:
        theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()
    vocab = theirs.config.vocab_size
    fixed = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    for row in ours:
        T, depth = lengths(row)
        ids = torch.randint(3, vocab, (1, T), device=device)
        if row.test.startswith("pp"):
            kv = DynamicCache()
            with torch.inference_mode():
                theirs(torch.randint(3, vocab, (1, depth), device=device), past_key_values=kv, logits_to_keep=1)

                def prompt(i: Tensor = ids, kv: DynamicCache = kv, depth: int = depth) -> None:
                    if kv.get_seq_length() > depth:
                        kv.crop(depth - kv.get_seq_length())
                    theirs(i, past_key_values=kv, logits_to_keep=1)

                times = wall_times(prompt, device, args.repetitions)
            yield peer(row, "transformers", [T / s for s in times])
            continue
        ids = torch.randint(3, vocab, (1, depth), device=device)
        for name, extra in (("eager", {}), ("static cache", {"cache_implementation": "static"})):
            times = []
            for n in (T + 1, 1):  # the difference is generation without the prompt
                run = lambda n=n, i=ids, e=extra: theirs.generate(i, max_new_tokens=n, min_new_tokens=n, **fixed, **e)
                times.append(statistics.median(wall_times(run, device, args.repetitions)))
            if times[0] <= times[1]:
                note(f"note: transformers, {name}: {T} tokens are too few to time on this machine; raise -n")
                continue
            yield peer(row, f"transformers, {name}", [T / (times[0] - times[1])])


def lengths(row: Row) -> tuple[int, int]:
    """Tokens of a row's test, and tokens before it (at least one, since a peer needs one in its cache)."""
    T, _, depth = row.test[2:].partition(" @ d")
    return int(T), max(int(depth or 0), 1)


def peer(row: Row, backend: str, speeds: list[float]) -> Row:
    mean, std = spread(speeds)
    share = row.share_of_ceiling and row.share_of_ceiling * mean / row.tokens_per_s
    return dataclasses.replace(
        row, backend=backend, tokens_per_s=mean, std=std, share_of_ceiling=share, ratio=row.tokens_per_s / mean
    )


def llama_cpp_rows(args: argparse.Namespace, ours: list[Row]) -> Iterator[Row]:
    """llama.cpp on the CPU, through llama-cpp-python, with random weights of the same shape written as a GGUF file."""
    from llama_cpp import Llama as LlamaCpp

    if pick_device(args.device).type != "cpu":
        raise ValueError("--vs llama.cpp compares on a CPU: add --device cpu")
    if args.model.startswith("random:"):
        config = random_config(args.model.removeprefix("random:"))
    else:
        config = read_config(find_checkpoint(args.model))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write_gguf(file, config, ours[0].dtype)
        threads = torch.get_num_threads()
        longest = max(sum(lengths(row)) for row in ours)
        theirs = LlamaCpp(str(file), n_ctx=longest + 1, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
        for row in ours:
            T, depth = lengths(row)
            before = torch.randint(3, config.vocab_size, (depth,)).tolist()
            tokens = torch.randint(3, config.vocab_size, (T,)).tolist()
            times = []
            for _ in range(1 + args.repetitions):
                theirs.reset()
                theirs.eval(before)
                start = time.perf_counter()
                for part in [tokens] if row.test.startswith("pp") else [[t] for t in tokens]:
                    theirs.eval(part)
                times.append(T / (time.perf_counter() - start))
            yield peer(row, "llama.cpp", times[1:])
        theirs.close()


def write_gguf(file: Path, c: Config, dtype: str) -> None:
    """A GGUF file of random weights."""
    import gguf

    F32 = gguf.GGMLQuantizationType.F32
    kind = {"fp32": F32, "fp16": gguf.GGMLQuantizationType.F16}.get(dtype, gguf.GGMLQuantizationType.BF16)
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(c.max_seq_len)
    writer.add_embedding_length(c.dim)
    writer.add_block_count(c.n_layers)
    writer.add_feed_forward_length(c.hidden_dim)
    writer.add_head_count(c.n_heads)
    writer.add_head_count_kv(c.n_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.n_layers)
    for name, shape in tensor_shapes(c).items():
        data, stored = (torch.ones(shape), F32) if len(shape) == 1 else (torch.randn(shape).mul_(0.02), kind)
        raw = gguf.quants.quantize(data.numpy(), stored)
        writer.add_tensor(names.get_name(name, [".weight"]), raw, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PEER_ROWS = {"transformers": transformers_rows, "llama.cpp": llama_cpp_rows}


def run_throughput(args: argparse.Namespace) -> None:
    tests = [f"{kind}{n}{at(d)}" for kind, ns in (("pp", args.n_prompt), ("tg", args.n_gen)) for d in args.depth for n in ns]
    backends = ["transformers, static cache"] if args.vs else []
    table = Table(args.output, {"model": args.models, "test": tests, "backend": backends})
    for model in args.models:
        one = argparse.Namespace(**vars(args) | {"model": model})
        tell_time(one)
        ours = []
        for row in throughput(one):
            ours.append(row)
            table.add(dataclasses.asdict(row))
            if args.output == "json":  # printed only at the end
                note(f"{row.test}: {row.tokens_per_s:.1f} tokens/s")
        for name in args.vs:
            for dtype in dict.fromkeys(row.dtype for row in ours):
                comparable = [row for row in ours if row.dtype == dtype and row.fp8 == "none"]  # peers lack these 8-bit formats
                for row in PEER_ROWS[name](one, comparable) if comparable else ():
                    table.add(dataclasses.asdict(row))
                release()
    table.end()
    device = pick_device(args.device)
    dtypes = {"e4m3" if row["fp8"] == "e4m3" and capability(device) >= 89 else row["dtype"] for row in table.rows}
    products = [
        f"{n} product {product_ceiling(device, (DTYPES | {E4M3.name: E4M3.dtype})[n]) / 1e12:.2f} TFLOP/s"
        for n in sorted(dtypes)
    ]
    note(", ".join([f"ceilings of this run: read {read_ceiling(device) / 1e9:.1f} GB/s", *products]))
    if args.plot:
        plot(table.rows, args.plot)


LAYER_OPS = ("rmsnorm_qkv_rope", "attention", "wo", "rmsnorm_swiglu", "w2")


def least_seconds(c: Config, args: argparse.Namespace, dtype: torch.dtype, form: str, device: torch.device) -> float:
    """How long the tests of one model in one dtype take at the read and product ceilings."""
    read, product = read_ceiling(device), product_ceiling(device, dtype)
    runs = args.repetitions + 1
    total = 0.0
    for depth in args.depth:
        each = dict(start_pos=depth, size=dtype.itemsize, format=FORMATS.get(form))
        moved = c.n_layers * sum(cost(op, c, 1, **each)[0] for op in LAYER_OPS) + cost("rmsnorm_linear", c, 1, **each)[0]
        total += runs * sum(args.n_gen) * moved / read
        total += runs * sum(prefill_operations(c, T, depth) for T in args.n_prompt) / product
    return total


def tell_time(args: argparse.Namespace) -> None:
    """On a CPU, before anything is loaded, say how long a model's rows will take, if that is more than a few seconds."""
    device = pick_device(args.device)
    if device.type != "cpu":
        return
    random = args.model.startswith("random:")
    c = random_config(args.model.removeprefix("random:")) if random else read_config(find_checkpoint(args.model))
    seconds = 0.0
    for dtype, form in itertools.product(args.dtype, args.fp8):
        seconds += least_seconds(c, args, pick_dtype(dtype, c.dtype or torch.float16, device), form, device)
    if seconds > 5:
        note(f"{args.model}: this takes at least {duration(seconds)}, at the speed of memory and arithmetic")


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


# ---- kernels, each against its ceiling and against plain PyTorch


@dataclasses.dataclass
class Case:
    """One op at one shape, on several sets of data: our op, and the same in plain PyTorch."""

    op: str
    regime: str
    T: int
    ours: list[Callable[[], object]]
    plain: list[Callable[[], object]]
    bytes: float
    operations: float


def plain_rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def plain_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, N, D], neighbouring pairs; cos and sin [T, 1, D / 2]."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def cases(model: Llama, T: int, start_pos: int) -> Iterator[Case]:
    """The ops of a layer of the model at T tokens after start_pos others, on the data of each layer in turn."""
    c, ops, w, device, dtype = model.config, model.ops, model.weights, model.device, model.dtype
    KV, H, KH, D, eps = KVCache(model), c.n_heads, c.n_kv_heads, c.head_dim, c.norm_eps
    KV.advance(start_pos)
    pos, size, format = KV.device_pos, dtype.itemsize, w.output.format
    end = start_pos + T
    x, y, h = (torch.randn(T, width, device=device, dtype=dtype) for width in (c.dim, H * D, c.hidden_dim))
    q = torch.randn(T, H, D, device=device, dtype=dtype)
    cos, sin = (t.to(dtype)[:, None] for t in KV.rope[start_pos:end].unbind(-1))
    logits, residual = torch.empty(T, c.vocab_size, device=device), torch.randn_like(x)
    plain_kv = KVCache(dataclasses.replace(model, kv_fp8=False)) if model.kv_fp8 else KV
    layers, plain_layers = (list(zip(w.layers, kv.k, kv.v)) for kv in (KV, plain_kv))
    copies = [torch.randn_like(x) for _ in range(max(1, min(64, (256 << 20) // (x.numel() * size))))]
    heads = [torch.randn_like(q) for _ in copies]

    @cache
    def dense(m: Matrix) -> Tensor:  # in the model's dtype, whatever it is stored in
        return m.dense().to(dtype)

    def plain_qkv(layer: LayerWeights, k: Tensor, v: Tensor) -> Tensor:
        n = plain_rmsnorm(x, layer.attention_norm, eps)
        parts = [functional.linear(n, part) for part in dense(layer.wqkv).split([H * D, KH * D, KH * D])]
        k[:, start_pos:end] = plain_rope(parts[1].view(T, KH, D), cos, sin).transpose(0, 1)
        v[:, start_pos:end] = parts[2].view(T, KH, D).transpose(0, 1)
        return plain_rope(parts[0].view(T, H, D), cos, sin)

    def plain_attention(k: Tensor, v: Tensor) -> Tensor:
        mask = None if T == 1 or start_pos == 0 else torch.ones(T, end, dtype=torch.bool, device=device).tril(start_pos)
        args = dict(attn_mask=mask, is_causal=T > 1 and start_pos == 0, enable_gqa=True)
        return functional.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None, :, :end], v[None, :, :end], **args)

    def plain_swiglu(layer: LayerWeights) -> Tensor:
        n = plain_rmsnorm(x, layer.ffn_norm, eps)
        half = dense(layer.w13).view(2, -1, c.dim)  # two matrices of the right size
        return functional.silu(functional.linear(n, half[0])) * functional.linear(n, half[1])

    regime = f"T {T}, {start_pos} before"

    def case(op: str, ours: list, plain: list, name: str = "") -> Case:
        return Case(
            name or op, regime, T, ours, plain, *cost(name or op, c, T, start_pos, size, format, model.kv_dtype.itemsize)
        )

    norm = w.layers[0].ffn_norm
    yield case(
        "rmsnorm",
        [lambda a=a: ops.rmsnorm(a, norm, eps) for a in copies],
        [lambda a=a: plain_rmsnorm(a, norm, eps) for a in copies],
    )
    yield case(
        "rope", [lambda a=a: ops.rope(a, KV.rope, pos) for a in heads], [lambda a=a: plain_rope(a, cos, sin) for a in heads]
    )
    yield case(
        "rmsnorm_qkv_rope",
        [
            lambda l=l, k=k, v=v: ops.rmsnorm_qkv_rope(x, l.attention_norm, l.wqkv, KV.rope, k, v, pos, eps)
            for l, k, v in layers
        ],
        [lambda l=l, k=k, v=v: plain_qkv(l, k, v) for l, k, v in plain_layers],
    )
    yield case(
        "attention",
        [lambda k=k, v=v: ops.attention(q, k, v, pos) for _, k, v in layers],
        [lambda k=k, v=v: plain_attention(k, v) for _, k, v in plain_layers],
    )
    for name, field, inner in (("wo", "wo", y), ("w2", "w2", h)):
        weights = [getattr(layer, field) for layer in w.layers]
        yield case(
            "linear_add",
            [lambda m=m, i=inner: ops.linear_add(i, m, residual) for m in weights],
            [lambda m=m, i=inner: residual + functional.linear(i, dense(m)) for m in weights],
            name,
        )
    yield case(
        "rmsnorm_swiglu",
        [lambda l=l: ops.rmsnorm_swiglu(x, l.ffn_norm, l.w13, eps) for l in w.layers],
        [lambda l=l: plain_swiglu(l) for l in w.layers],
    )
    if T == 1:
        yield case(
            "rmsnorm_linear",
            [lambda: ops.rmsnorm_linear(x, w.norm, w.output, eps, logits)] * 4,
            [lambda: functional.linear(plain_rmsnorm(x, w.norm, eps), dense(w.output)).float()] * 4,
        )
        tokens, host_tokens = (torch.zeros(KV.size, dtype=torch.int32, device=device) for _ in range(2))
        sampler = Sampler(device)
        yield case(
            "sample",
            [lambda: ops.sample(logits[0], tokens, host_tokens, pos, sampler)] * 4,
            [lambda: torch.multinomial(logits[0].topk(40).values.softmax(0), 1)] * 4,
        )
    else:
        targets = torch.randint(0, c.vocab_size, (T,), device=device)
        yield case(
            "cross_entropy",
            [lambda: ops.cross_entropy(logits, targets)] * 4,
            [lambda: functional.cross_entropy(logits, targets, reduction="none")] * 4,
        )


def large_rmsnorm(device: torch.device, ops) -> Case:
    """2^18 rows of 4096 floats: far more than any cache holds."""
    rows = 1 << 18 if device.type == "cuda" else 1 << 13
    x, weight = torch.randn(rows, 4096, device=device), torch.ones(4096, device=device)
    ours, plain = [lambda: ops.rmsnorm(x, weight, 1e-5)] * 2, [lambda: plain_rmsnorm(x, weight, 1e-5)] * 2
    return Case("rmsnorm", f"{rows} x 4096 fp32", rows, ours, plain, 8.0 * x.numel(), 4.0 * x.numel())


def measure(case: Case, device: torch.device, dtype: torch.dtype) -> dict:
    """Microseconds of a case on the device, by the wall clock and in plain PyTorch, and its share of the binding ceiling."""

    def device_time(calls: list) -> float:
        if device.type == "cuda":
            return gpu_time(calls)
        return statistics.median(wall_times(lambda: [call() for call in calls], device)) / len(calls)

    ours, plain = device_time(case.ours), device_time(case.plain)
    wall = statistics.median(wall_times(case.ours[0], device, 10))
    copies = case.op in ("rmsnorm", "rope")  # these write as much as they read
    memory = case.bytes / (copy_ceiling(device) if copies else read_ceiling(device))
    compute = case.operations / product_ceiling(device, dtype)
    return {
        "op": case.op,
        "shape": case.regime,
        "us": 1e6 * ours,
        "wall us": 1e6 * wall,
        "MB": case.bytes / 1e6,
        "GFLOP": case.operations / 1e9,
        "bound by": "memory" if memory > compute else "arithmetic",
        "% of ceiling": 100 * max(memory, compute) / ours,
        "PyTorch us": 1e6 * plain,
        "x PyTorch": plain / ours,
        "published x": PUBLISHED_RATIOS.get(case.op) if device.type == "cuda" else None,
    }


@torch.inference_mode()
def run_kernels(args: argparse.Namespace) -> None:
    shapes = [(1, max(d, 100)) for d in args.depth] + [(T, d) for T in args.n_prompt for d in args.depth]
    model = open_model(args, args.dtype[0], max(args.ctx_size or 0, max(T + start_pos for T, start_pos in shapes)), args.fp8[0])
    tell_reference(model)
    table = Table(args.output, {"op": list(KERNEL_OPS.values()), "shape": ["T 2048, 16384 before"], "bound by": ["arithmetic"]})
    for T, start_pos in shapes:
        for case in cases(model, T, start_pos):
            multiplied = prompt_dtype(model) if T > 1 and case.op in (*OPS, "wo", "w2") else model.dtype
            table.add(measure(case, model.device, multiplied))
    table.add(measure(large_rmsnorm(model.device, model.ops), model.device, model.dtype))
    table.end()
    if args.plot:
        plot(table.rows, args.plot)


def tell_reference(model: Llama) -> None:
    if model.backend == "torch":
        note(f"note: this measures torch's ops on {device_name(model.device)}; the Triton kernels need a GPU")


# ---- profile


def profiled(run: Callable[[], object], device: torch.device) -> list[tuple[str, float, float]]:
    """Name, start and end in seconds of every kernel of a call (of every op on a CPU), in order."""
    activity = torch.profiler.ProfilerActivity
    run()
    synchronize(device)
    kinds = [activity.CPU, activity.CUDA] if device.type == "cuda" else [activity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        run()
        synchronize(device)
    where = torch.autograd.DeviceType.CUDA if device.type == "cuda" else torch.autograd.DeviceType.CPU
    events = [e for e in profile.events() if e.device_type == where and e.cpu_parent is None]
    return sorted(((e.name, e.time_range.start * 1e-6, e.time_range.end * 1e-6) for e in events), key=lambda e: e[1])


KERNEL_OPS = {  # the op whose cost a kernel is charged with
    "_embedding_kernel": "embedding",
    "_qkv_kernel": "rmsnorm_qkv_rope",
    "_qkv_norm_kernel": "rmsnorm_qkv_rope",
    "_split_attention_kernel": "attention",
    "_single_attention_kernel": "attention",
    "_few_attention_kernel": "attention",
    "_attention_kernel": "attention",
    "_hopper_attention_kernel": "attention",
    "_rmsnorm_swiglu_kernel": "rmsnorm_swiglu",
    "_rmsnorm_linear_kernel": "rmsnorm_linear",
    "_sample_kernel": "sample",
    "_rmsnorm_kernel": "rmsnorm",
}


def profile_rows(events: list[tuple[str, float, float]], model: Llama, T: int, start_pos: int) -> tuple[list[dict], dict]:
    """A row for each kernel name, and the summary. A kernel that starts while its predecessor is running (programmatic
    dependent launch) is charged only with the time by which it outlasts it, so that rows and gaps add up to the whole."""
    c = model.config
    each = dict(size=model.dtype.itemsize, format=model.weights.output.format, kv_size=model.kv_dtype.itemsize)
    products = ("rmsnorm_qkv_rope", "wo", "rmsnorm_swiglu", "w2")
    spent: dict[str, list[float]] = {}
    gaps, clock = 0.0, events[0][1]
    for name, start, end in events:
        gaps += max(0.0, start - clock)
        spent.setdefault(name, []).append(max(0.0, end - max(start, clock)))
        clock = max(clock, end)
    total = clock - events[0][1]
    read = read_ceiling(model.device)
    rows, ideal, charged = [], 0.0, False
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1])):
        kind = KERNEL_OPS.get(name)
        if name == "_linear_add_kernel":
            need = [c.n_layers * (a + b) for a, b in zip(cost("wo", c, T, **each), cost("w2", c, T, **each))]
        elif kind:
            need = [len(times) * n for n in cost(kind, c, T, start_pos, **each)]
        elif not charged and (T > 1 or model.backend == "torch"):
            # the library's matmuls: all their work is charged to the kernel that takes the longest
            need, charged = [c.n_layers * sum(cost(op, c, T, **each)[i] for op in products) for i in (0, 1)], True
        else:
            need = [0.0, 0.0]
        rate = product_ceiling(model.device, model.dtype if kind == "attention" or T == 1 else prompt_dtype(model))
        ms, floor = 1e3 * sum(times), max(need[0] / read, need[1] / rate)
        ideal += floor
        rows.append(
            {
                "kernel": name[:60],
                "ms": ms,
                "% of time": 100e-3 * ms / total,
                "count": len(times),
                "GB/s": need[0] / sum(times) / 1e9 if sum(times) else 0.0,
                "% of read": 100 * need[0] / read / sum(times) if sum(times) else 0.0,
                "% of product": 100 * need[1] / rate / sum(times) if sum(times) else 0.0,
            }
        )
    return rows, {"ms": 1e3 * total, "gaps_ms": 1e3 * gaps, "ideal_ms": 1e3 * ideal}


KINDS = {  # for the summary: the first kind whose pattern occurs in a kernel's name
    "attention": "attention",
    "sampling": "sample",
    "product": "qkv|linear|rmsnorm_swiglu|few_swiglu|gemm|nvjet|cutlass|mm|mv",
    "norm": "norm",
    "elementwise": "elementwise|swiglu|rope",
}


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")


@torch.inference_mode()
def run_profile(args: argparse.Namespace) -> None:
    """One decode step and one prefill, kernel by kernel."""
    start_pos, T = max(args.depth[0], 100), args.n_prompt[0]
    model = open_model(args, args.dtype[0], max(args.ctx_size or 0, start_pos + T + 8), args.fp8[0])
    tell_reference(model)
    tokens = torch.randint(3, model.config.vocab_size, (start_pos + T,)).tolist()
    cache = KVCache(model)
    model.prefill(tokens[:start_pos], cache)
    if model.uses_graphs:
        step = model.graph(cache, cache.sampler, None).replay
    else:
        step = lambda: model.step(1, cache)

    def prefill() -> None:
        cache.truncate(0)
        model.prefill(tokens[:T], cache)

    for title, run, count, past in (("decode step", step, 1, start_pos), ("prefill", prefill, T, 0)):
        rows, summary = profile_rows(profiled(run, model.device), model, count, past)
        print(f"\n{title}, T {count}, {past} before, {model.backend} ops on {device_name(model.device)}\n\n{markdown(rows)}\n")
        kinds: dict[str, float] = {}
        for row in rows:
            kinds[kind_of(row["kernel"])] = kinds.get(kind_of(row["kernel"]), 0.0) + row["ms"]
        kinds["gaps between kernels"] = summary["gaps_ms"]
        print(markdown([{"type": k, "ms": v, "% of time": 100 * v / summary["ms"]} for k, v in kinds.items()]))
        print(
            f"\nevery kernel at its own ceiling would take {summary['ideal_ms']:.3f} ms of {summary['ms']:.3f}: "
            f"overall efficiency {100 * summary['ideal_ms'] / summary['ms']:.1f}%"
        )


# ---- passes of several tokens


def pass_of(model: Llama, cache: KVCache, T: int, depth: int) -> Callable[[], object]:
    """A function that evaluates T tokens at a depth: the replay of a CUDA graph where the model uses graphs."""

    def run() -> None:
        cache.seek(depth)
        model.evaluate(T, cache)

    return captured(run).replay if model.uses_graphs else run


@torch.inference_mode()
def pass_rows(args: argparse.Namespace) -> Iterator[dict]:
    """The time of a pass of T tokens, and its ratio to that of a single token: what proposals must gain to pay off."""
    (depth,), lengths = args.depth, [1, *(T for T in args.passes if T > 1)]
    model = open_model(args, args.dtype[0], depth + max(lengths), args.fp8[0])
    cache, single = KVCache(model), None
    for T in lengths:
        run = pass_of(model, cache, T, depth)
        seconds = event_time(run, 20) if model.uses_graphs else statistics.median(wall_times(run, model.device))
        single = single or seconds
        yield dict(model=args.model, fp8=fp8_of(model), depth=depth, tokens=T, ms=1e3 * seconds, ratio=seconds / single)


# ---- tuning


def candidates(size: int, columns: int) -> Iterator[Launch]:
    """Launch sizes worth trying for weights of `size` bytes: at least eight neighbours a thread, and enough weights a
    thread to hide the latency of memory, but not too many."""
    for rows, block, warps in itertools.product((2, 4, 8, 16), (1024, 2048, 4096, 8192), (2, 4, 8, 16)):
        each = rows * block // (32 * warps)
        if 256 * warps <= block < 2 * columns and 16 <= each <= 128 * (3 - size) and rows <= 8 * (3 - size):
            yield Launch(rows, block, warps)


def few_candidates() -> Iterator[FewLaunch | None]:
    """The same for a few tokens: up to 64 registers a thread for the tiles of W in flight; None is the library."""
    yield None
    for rows, warps, steps, lanes, ahead in itertools.product((16, 32), (4, 8), (2, 4), (4, 8), (1, 2, 4)):
        if rows * steps * ahead <= 128:
            yield FewLaunch(rows, warps, steps, lanes, ahead)


@torch.inference_mode()
def run_tune(args: argparse.Namespace) -> None:
    """Time whole steps with one launch size after the other, op by op, and print the best as entries for LAUNCHES and
    FEW_LAUNCHES: what is best for a kernel alone need not be best between others, which overlap with its beginning and end."""
    model = open_model(args, args.dtype[0], 256, args.fp8[0])
    if not model.uses_graphs:
        raise ValueError("--tune times the Triton kernels on a GPU")
    cache, size = KVCache(model), model.weights.layers[0].wo.data.element_size()
    table, few = (nearest(nearest(tables, capability(model.device)), size) for tables in (LAUNCHES, FEW_LAUNCHES))
    for _ in range(20):
        event_time(pass_of(model, cache, 1, 64))  # a GPU that was idle is slower at first
    place = f"[{capability(model.device)}][{size}]"
    tune_table(model, cache, 1, table, lambda columns: candidates(size, columns), f"LAUNCHES{place}")
    for tokens in (8, 16):
        tune_table(model, cache, tokens, few[tokens], lambda columns: few_candidates(), f"FEW_LAUNCHES{place}[{tokens}]")


def tune_table(model: Llama, cache: KVCache, T: int, table: dict, sizes: Callable[[int], Iterator], name: str) -> None:
    """Find the best entries for a pass of T tokens, put them into the table, and print them."""
    layer = model.weights.layers[0]
    tuned = {(op, m.columns): None for op, m in (
        ("rmsnorm_qkv_rope", layer.wqkv), ("linear_add", layer.wo), ("rmsnorm_swiglu", layer.w13), ("linear_add", layer.w2),
        ("rmsnorm_linear", model.weights.output),
    )}  # fmt: skip
    print(f"T = {T}, as it is: {1e6 * event_time(pass_of(model, cache, T, 64), 20):.1f} us")
    for op, columns in tuned:
        found = []
        others = {key: how for key, how in table[op].items() if key != columns}
        for how in sizes(columns):
            table[op] = others | {columns: how}
            found.append((event_time(pass_of(model, cache, T, 64), 20), how))
        seconds, how = min(found, key=lambda pair: pair[0])
        table[op] = others | {columns: how}
        tuned[op, columns] = how
        print(f"{op:18s} columns {columns:6d}: {1e6 * seconds:.1f} us with {how or 'the library'}", flush=True)
    entries = {op: {0: table[op][0]} | {c: how for (o, c), how in tuned.items() if o == op} for op in OPS}
    print(f"{name}: {entries}")


# ---- the command line again


def check_packages(args: argparse.Namespace) -> None:
    """Raises ValueError when a package that will be needed is missing, before anything is measured."""
    needed = {f"--vs {name}": PEERS[name] for name in args.vs} | ({"--plot": ("matplotlib",)} if args.plot else {})
    for flag, packages in needed.items():
        for package in packages:
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"{flag} needs a package that is not installed: {package}")


def run_recorded(args: argparse.Namespace) -> None:
    plot([row for file in args.recorded for row in read_rows(file)], args.plot)


def main(argv: list[str] | None = None) -> int:
    with first_speaks():
        args = parse_args(argv)

    def work() -> int:
        if args.vs and parallel.group().size > 1:
            raise ValueError(f"--vs compares with programs that run in one process, not in {parallel.group().size}")
        if args.ignored:
            note(f"note: {', '.join(args.ignored)}: no effect here, ignored")
        check_packages(args)
        args.cores = torch.get_num_threads()
        if args.threads:
            torch.set_num_threads(args.threads)
        RUNS[args.mode](args)
        return 0

    if args.vs:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers would ask the hub
    return one_line_errors(work, args.debug)


RUNS = {
    "speed": run_throughput,
    "kernels": run_kernels,
    "profile": run_profile,
    "perplexity": lambda args: show(run_perplexity(args), args.output),
    "limits": lambda args: show(run_limits(args), args.output),
    "passes": lambda args: show(list(pass_rows(args)), args.output),
    "tune": run_tune,
    "recorded": run_recorded,
}

if __name__ == "__main__":
    sys.exit(main())
