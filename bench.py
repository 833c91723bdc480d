"""Tokens per second, each beside the hardware's limit, measured in the same run; and perplexity.

The flags are in talk/bench_flags.py, models with random weights in loading/random_model.py."""

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
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache

from loading.files import text_of
from loading.hub import DEFAULT_MODEL
from talk.bench_flags import Test, parse_args
from talk.cli import exit_code, import_torch, note, options_of, use_safe_streams

if __name__ == "__main__":  # --help and errors in the command line do not wait for torch
    use_safe_streams()
    ARGS = parse_args(None)
    import_torch()

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from cards.cpu import cpu_product_dtype
from engine import Engine, Sequence, Timings, generate
from formats import Matrix
from launch import jit, tl
from loading.checkpoint import load, open_tokenizer
from loading.place import dtype_name
from loading.random_model import random_model
from model import Llama
from passes import Passes
from products import tensor_core_format
from ranks.processes import Ranks
from settings import Options, Sampling
from tokenizer import TextStream, Tokenizer

# ---- the model to measure


def open_model(args: argparse.Namespace, dtype: str, ctx_size: int, format: str) -> Llama:
    """A checkpoint, or random weights for a name like random:7b, with room for ctx_size tokens.
    format "none" leaves the matrices as they are. On a CPU, sets how many threads torch uses."""
    args.ranks.finish()  # no rank frees a model from whose memory others may still read
    gc.collect()  # frees a model that was measured before
    torch.cuda.empty_cache()
    options = options_of(
        args,
        dtype=dtype,
        ctx_size=max(ctx_size, args.ctx_size or 0),
        parallel=max(vars(args).get("texts", [1])),
        format=None if format == "none" else format,
    )
    if args.model.startswith("random:"):
        model = random_model(args.model, Options(**options), args.ranks)
    else:
        model = open_checkpoint(args, **options)
    threads = args.threads or (1 if model.suits_one_thread else args.cores)
    if model.device.type == "cpu" and threads != torch.get_num_threads():
        torch.set_num_threads(threads)
        for ceiling in (read_ceiling, copy_ceiling, product_ceiling):
            ceiling.cache_clear()
    return model


def open_checkpoint(args: argparse.Namespace, **options) -> Llama:
    """Sets args.folder, which transformers reads without asking the hub."""
    model = load(args.model, ranks=args.ranks, **options)
    args.folder = model.checkpoint.folder
    return model


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
    is one value. later: values still to come, to size the columns; not needed if rows is a list."""
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
    std: float | None  # None: a single run
    # Of the read ceiling for generation, of the product ceiling for a prompt
    percent_of_ceiling: float
    # Milliseconds until a prompt of FIRST_PROMPT tokens has its first token while the other texts are
    # being written; None for a test of prompts
    first_ms: float | None = None


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


def spread(values: list[float]) -> tuple[float, float | None]:
    """Mean and standard deviation, None of a single value."""
    if len(values) == 1:
        return values[0], None
    return statistics.mean(values), statistics.stdev(values)


def random_ids(model: Llama, count: int) -> list[int]:
    return torch.randint(3, model.config.vocab_size, (count,)).tolist()


@torch.inference_mode()
def prompt_speeds(engine: Engine, test: Test, repetitions: int) -> list[float]:
    """Tokens a second of each run."""
    model = engine.model
    ids = random_ids(model, test.depth + test.n)
    engine.passes.prefill(ids[: test.depth])
    run = lambda: engine.passes.prefill(ids[test.depth :], test.depth)
    return [test.n / seconds for seconds in wall_times(run, model.device, repetitions)]


def generation_speeds(engine: Engine, test: Test, repetitions: int) -> list[float]:
    """Tokens a second of the whole loop, sampling and text included, after a prompt of at least one
    token."""
    model = engine.model
    prompt = random_ids(model, max(test.depth, 1))
    stream = TextStream(open_tokenizer(DEFAULT_MODEL))
    speeds = []
    for _ in range(1 + repetitions):
        timings = Timings()
        options = dict(sampling=Sampling(), eos=[], timings=timings)
        for token in generate(model, prompt, engine, test.n + 1, **options):
            stream.push(token)
        speeds.append(timings.steps / timings.step_seconds)
    return speeds[1:]


FIRST_PROMPT = 512


def begun(engine: Engine, prompt: list[int], n: int) -> Sequence:
    """A text that has n tokens and begins as soon as there is a slot."""
    sequence = Sequence(prompt, lambda token, score: False, n, Sampling())
    engine.add(sequence)
    return sequence


def tokens_of(texts: list[Sequence]) -> int:
    return sum(len(text.ids) for text in texts)


def run_all(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def several_speeds(engine: Engine, test: Test, repetitions: int) -> list[float]:
    """Tokens a second of all texts together, while all of them are being written."""
    prompts = [random_ids(engine.model, max(test.depth, 1)) for _ in range(test.texts)]
    for prompt in prompts:
        begun(engine, prompt, 1)
    run_all(engine)  # what is measured finds its prompt evaluated
    speeds = []
    for _ in range(1 + repetitions):
        texts = [begun(engine, prompt, test.n + test.texts) for prompt in prompts]
        while engine.waiting or any(text.starts for text in texts):
            engine.step()
        before, start = tokens_of(texts), time.perf_counter()
        while not any(text.finished for text in texts):
            engine.step()
        speeds.append((tokens_of(texts) - before) / (time.perf_counter() - start))
        run_all(engine)
    return speeds[1:]


def first_token_ms(engine: Engine, test: Test) -> float:
    """Milliseconds from the arrival of a prompt to its first token, beside texts that are being
    written in all other slots."""
    times = []
    for _ in range(4):  # the first two may capture graphs
        prompts = [random_ids(engine.model, max(test.depth, 1)) for _ in range(test.texts - 1)]
        others = [begun(engine, prompt, test.n + 1) for prompt in prompts]
        while engine.waiting or any(text.starts for text in others):
            engine.step()
        start = time.perf_counter()
        length = min(FIRST_PROMPT, engine.size - 1)
        text = begun(engine, random_ids(engine.model, length), 1)
        while not text.finished:
            engine.step()
        times.append(1e3 * (time.perf_counter() - start))
        run_all(engine)
    return min(times[2:])


def bound(model: Llama, test: Test) -> float:
    """Tokens a second at the ceiling: the product rate for a prompt, the read bandwidth for
    generation, where a pass reads the matrices once and the cache of each text."""
    if test.kind == "pp":
        rate = product_ceiling(model.device, product_dtype(model))
        return rate * test.n / prefill_operations(model, test.n, test.depth)
    moved = decode_bytes(model, test.texts * (test.depth + test.n / 2))
    return test.texts * read_ceiling(model.device) / moved


def throughput(args: argparse.Namespace, dtype: str, format: str) -> Iterator[Row]:
    """The rows of one model: prompts, then generation, at each depth."""
    start = time.perf_counter()
    model = open_model(
        args, dtype, max(test.depth + test.n + test.texts for test in args.tests), format
    )
    loaded = time.perf_counter() - start
    device = model.device
    note(
        f"loaded in {loaded:.2f} s on {device}{args.ranks.described(bool(model.exchange), device)}"
    )
    if device.type == "cpu":
        seconds = (args.repetitions + 1) * sum(test.n / bound(model, test) for test in args.tests)
        if seconds > 5:
            least = f"{seconds:.0f} s, at the speed of memory and arithmetic"
            note(f"{args.model}: this takes at least {least}")
    dtype = dtype_name(model.dtype)
    about = dict(
        model=args.model,
        size_gb=model.config.ranks * sum(w.nbytes for w in model.weights.matrices) / 1e9,
        backend=model.backend,
        device=device_name(device, args.ranks),
        dtype=dtype,
        format=format_of(model),
        kv="e4m3" if model.kv_fp8 else dtype,
    )
    for texts, tests in itertools.groupby(args.tests, key=lambda test: test.texts):
        engine = Engine(model, texts)
        for test in tests:
            first_ms = None
            if test.kind == "pp":
                speeds = prompt_speeds(engine, test, args.repetitions)
            elif texts == 1:
                speeds = generation_speeds(engine, test, args.repetitions)
            else:
                speeds = several_speeds(engine, test, args.repetitions)
            if test.kind == "tg":
                first_ms = first_token_ms(engine, test)
            mean, std = spread(speeds)
            yield Row(**about, test=str(test), tokens_per_s=mean, std=std,
                percent_of_ceiling=percent(mean, bound(model, test)), first_ms=first_ms)  # fmt: skip
    as_dtype = product_dtype(model)
    read, product = read_ceiling(device) / 1e9, product_ceiling(device, as_dtype) / 1e12
    name = str(as_dtype).removeprefix("torch.")
    note(f"ceilings: read {read:.1f} GB/s, {name} product {product:.2f} TFLOP/s")


def speed_rows(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of the table: each model in each dtype and format."""
    for model, dtype, format in itertools.product(args.models, args.dtype, args.format):
        args.model = model
        yield from throughput(args, dtype, format)


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
    passes = [Passes(m, 1, ctx) for m in models]
    end = 0
    for start in range(0, len(ids), stride):
        skip = end - start  # tokens that counted in the window before
        end = min(start + ctx, len(ids))
        window = [before[start], *ids[start:end]]
        for each in passes:
            each.prefill(window[:skip])
        for first in range(skip, len(window) - 1, AT_ONCE):
            part = window[first : min(first + AT_ONCE, len(window) - 1)]
            goal = torch.tensor(window[first + 1 :][: len(part)], device=model.device)
            logs = [each.forward(part, first).log_softmax(-1) for each in passes]
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
    (dtype,), (format,) = args.dtype, args.format
    options = options_of(args, dtype=dtype, format=None if format == "none" else format)
    model = open_checkpoint(args, **options)
    files = model.checkpoint.tokenizer_files()
    tokenizer = Tokenizer(files, model.config.vocab_size, model.config.bos_id)
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
        plain = dict(dtype=args.against, format=None, kv_fp8=False, accumulate="fp32")
        against = open_checkpoint(args, **options | plain)
    note(f"{model.backend} ops on {device_name(model.device, args.ranks)}")
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


# ---- the program


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
first_ms: milliseconds to the first token after a prompt of 512, while the other texts are written
percent_of_ceiling: the share of the speed at which memory can be read (tg) or matrices can be
multiplied (pp)"""


def run_speed(args: argparse.Namespace) -> None:
    show_speeds(speed_rows(args), args)
    note(LEGEND)


def measure(args: argparse.Namespace) -> int:
    return exit_code_of(run_perplexity if args.perplexity else run_speed, args)


def main(argv: list[str] | None = None) -> int:
    return measure(parse_args(argv))


if __name__ == "__main__":
    sys.exit(measure(ARGS))
