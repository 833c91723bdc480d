"""What a pass of T tokens costs, relative to one of a single token: what proposals must gain to pay
off.

    python dev/passes.py -m random:7b --dtype fp16 -T 2,4,8,16 -d 500
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bench
from launch import captured
from model import Llama
from passes import Passes
from talk import bench_flags
from talk.cli import Parser, note, use_safe_streams, within


def device_time(run: Callable[[], object], model: Llama, repetitions: int = 10) -> float:
    """Median seconds of a call. Where the model uses CUDA graphs, the call is captured in one and
    its replays are timed by events, so that what the host adds does not count."""
    if not model.uses_graphs:
        return statistics.median(bench.wall_times(run, model.device))
    replay = captured(run, model.device).replay
    times = []
    for _ in range(2 + repetitions):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times[2:])


def pass_seconds(passes: Passes, T: int, depth: int) -> float:
    """How long it takes to evaluate T random tokens of a text at a depth."""
    model = passes.model
    passes.cache.tokens.random_(model.config.vocab_size)
    pass_ = passes.pass_at(depth, T)
    return device_time(lambda: model.forward(pass_, pass_.logits), model, 20)


@torch.inference_mode()
def show_passes(args: argparse.Namespace) -> None:
    depth = args.depth[0]
    lengths = [1, *(T for T in args.tokens if T > 1)]
    model = bench.open_model(args, args.dtype[0], depth + max(lengths), args.format[0])
    passes = Passes(model)
    seconds = [pass_seconds(passes, T, depth) for T in lengths]
    about = dict(model=args.model, format=bench.format_of(model), depth=depth)
    rows = []
    for T, s in zip(lengths, seconds):
        rows.append(about | dict(tokens=T, ms=1e3 * s, ratio=s / seconds[0]))
    bench.show(rows, args.output)
    on = f"{model.backend} ops on {bench.device_name(model.device, args.ranks)}"
    note(f"{on}; ratio: to the time of a single token")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__.split("\n\n")[0], {"passes": "dev/passes.py"})
    bench_flags.add_model_flags(parser)
    add = parser.group("tests")
    kind = bench_flags.several(within(int, 1, 1 << 24))
    help = "tokens of a pass, one or several numbers [2,4,8,16]"
    add("-T", "--tokens", type=kind, default=[2, 4, 8, 16], metavar="T,...", help=help)
    bench_flags.add_counts(add, "-d", "--depth", default=0, help="tokens already in the cache [0]")
    bench_flags.add_output_flags(parser)
    args = parser.parse(argv, lambda args: "passes")
    bench_flags.take_one(parser, args, "-m", "--dtype", "--format", "-d")
    bench_flags.find_models(parser, args)
    return args


def main(argv: list[str] | None = None) -> int:
    return bench.exit_code_of(show_passes, parse_args(argv))


if __name__ == "__main__":
    use_safe_streams()
    sys.exit(main())
