"""A profile: one decode step and one prompt, kernel by kernel, beside what the hardware can do.

python dev/steps.py -m random:7b --dtype fp16 -p 2048
"""

import argparse
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bench
from dev.kernels import LAYER_PRODUCTS, arithmetic_dtype, cost, open_model
from launch import captured
from model import Llama
from passes import Passes
from talk import bench_flags
from talk.cli import Parser, note, use_safe_streams

LEGEND = """\
% of time: of the whole, gaps included
GB/s: the bytes that a kernel must move in the time it took; % of read: of the read bandwidth
% of product: the operations it must do in that time, of the rate of a large matmul"""

# The op of a kernel is the first whose pattern occurs in its name. Of the kernels that route several
# tokens only the one that reads the router counts
PATTERNS = {
    "route": "^_few_logits_kernel$|^_logits_kernel$",
    "attention": "attention",
    "sample": "sample",
    "embedding": "embedding",
    "product": "_vector_kernel|stream_kernel|_few_kernel|many_kernel|linear|gemm|nvjet|cutlass"
    "|mm|mv",
    "rmsnorm": "^_rmsnorm_kernel$",
}


class Event(NamedTuple):
    """A kernel that ran; on a CPU, an op."""

    name: str
    start: float  # seconds
    end: float


def profiled(run: Callable[[], object], device: torch.device) -> list[Event]:
    """Every kernel of a call (every op on a CPU), in order."""
    run()
    bench.synchronize(device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes to stderr
    with torch.profiler.profile() as profile:
        run()
        bench.synchronize(device)
    kind = getattr(torch.autograd.DeviceType, device.type.upper())
    events = []
    for e in profile.events():
        if e.device_type == kind and e.cpu_parent is None:
            events.append(Event(e.name, e.time_range.start * 1e-6, e.time_range.end * 1e-6))
    return sorted(events, key=lambda e: e.start)


def op_of(kernel: str) -> str | None:
    for op, pattern in PATTERNS.items():
        if re.search(pattern, kernel):
            return op
    return None


def profile_rows(
    events: list[Event], model: Llama, T: int, start_pos: int
) -> tuple[list[dict], float, float, float]:
    """A row for each kernel name, and milliseconds: of all, of gaps, of all with each kernel at its
    ceiling. Products come in the order of a forward pass; if there are more or fewer than it has,
    they stay without an op. A kernel that starts while its predecessor is running (programmatic
    dependent launch) is charged only with the time by which it outlasts it: rows and gaps add up to
    the whole."""
    ops = [op_of(event.name) for event in events]
    products = [*LAYER_PRODUCTS * model.config.n_layers, "rmsnorm_linear"]
    in_order = iter(products if ops.count("product") == len(products) else ())
    spent: dict[tuple[str, str | None], list[float]] = defaultdict(list)
    begin = clock = events[0].start
    gaps = 0.0
    for (name, start, end), op in zip(events, ops):
        if op == "product":
            op = next(in_order, None)
            if op:
                name = f"{op}: {name}"
        gaps += max(0.0, start - clock)
        spent[name, op].append(max(0.0, end - max(start, clock)))
        clock = max(clock, end)
    total = clock - begin
    read = bench.read_ceiling(model.device)
    rows, ideal = [], 0.0
    for (name, op), times in spent.items():
        tokens = 1 if op == "rmsnorm_linear" else T  # only the last token's logits are needed
        moved, operations = cost(op, model, tokens, start_pos) if op else (0.0, 0.0)
        moved *= len(times)
        operations *= len(times)
        rate = bench.product_ceiling(model.device, arithmetic_dtype(model, op, tokens))
        ideal += max(moved / read, operations / rate)
        lasted = sum(times) or math.inf  # rates are 0 where a kernel ran wholly beside others
        rows.append({
            "kernel": name[:60],
            "ms": 1e3 * sum(times),
            "% of time": 100 * sum(times) / total,
            "count": len(times),
            "GB/s": moved / lasted / 1e9,
            "% of read": bench.percent(moved / read, lasted),
            "% of product": bench.percent(operations / rate, lasted),
        })  # fmt: skip
    rows.sort(key=lambda row: -row["ms"])
    return rows, 1e3 * total, 1e3 * gaps, 1e3 * ideal


def show_profile(title: str, run: Callable, model: Llama, T: int, start_pos: int) -> None:
    events = profiled(run, model.device)
    rows, ms, gaps, ideal = profile_rows(events, model, T, start_pos)
    print(f"\n{title}\n")
    bench.show(rows)
    print(
        f"\ngaps between kernels take {gaps:.3f} ms of {ms:.3f}; every kernel at its own ceiling "
        f"would take {ideal:.3f}: overall efficiency {100 * ideal / ms:.1f}%"
    )


@torch.inference_mode()
def show_profiles(args: argparse.Namespace) -> None:
    start_pos, T = max(args.depth[0], 100), args.n_prompt[0]
    model = open_model(args, start_pos + T + 8)
    ids = bench.random_ids(model, start_pos + T)
    passes = Passes(model)
    passes.prefill(ids[:start_pos])
    pass_ = passes.pass_at(start_pos, 1)
    step = lambda: passes.advance(pass_)
    if model.uses_graphs:
        step = captured(step, model.device).replay
    prefill = lambda: passes.prefill(ids[:T])
    on = f"{model.backend} ops on {bench.device_name(model.device, args.ranks)}"
    show_profile(f"decode step, T 1, {start_pos} before, {on}", step, model, 1, start_pos)
    show_profile(f"prefill, T {T}, 0 before, {on}", prefill, model, T, 0)
    note(LEGEND)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__.splitlines()[0], {"profile": "dev/steps.py"})
    bench_flags.add_model_flags(parser)
    add = parser.group("tests")
    bench_flags.add_counts(add, "-p", "--n-prompt", default=512, help="tokens of a prompt [512]")
    help = "tokens already in the cache, at least 100 [100]"
    bench_flags.add_counts(add, "-d", "--depth", default=0, help=help)
    add = parser.group("output")
    add("--debug", action="store_true", help="print errors with their traceback")
    args = parser.parse(argv, lambda args: "profile")
    bench_flags.take_one(parser, args, "-m", "--dtype", "--format", "-p", "-d")
    if args.n_prompt == [0]:
        parser.error("-p 0 leaves nothing to measure")
    bench_flags.find_models(parser, args)
    return args


def main(argv: list[str] | None = None) -> int:
    return bench.exit_code_of(show_profiles, parse_args(argv))


if __name__ == "__main__":
    use_safe_streams()
    sys.exit(main())
