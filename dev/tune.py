"""Find launch sizes for this card and this model's products, and write them into launch.json.

Those of one token and of a few, also with experts; others are chosen by hand.

python dev/tune.py -m random:7b --dtype fp16        # ten minutes; again for each --format
"""

import argparse
import copy
import itertools
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bench
from cards.sizes import ManySizes, nearest, save_tables, tables
from dev.passes import pass_seconds
from formats import Matrix
from launch import capability, triton
from model import Llama
from passes import Passes
from products import Product, kernel_sizes
from talk import bench_flags
from talk.cli import Parser, use_safe_streams

DEPTH = 64  # tokens already in the cache


def vector_candidates(op: str, bits: int, columns: int) -> Iterator[list[int]]:
    """sizes.VectorSizes worth trying: at least eight neighbours per thread, and enough weights per
    thread to hide the latency of memory, but not too many."""
    sizes = ((2, 4, 8, 16), (512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16))
    for rows, block, warps in itertools.product(*sizes):
        weights = rows * block // (32 * warps)  # per thread
        fits = 256 * warps <= block < max(2 * columns, 2048)
        if fits and 16 <= weights <= 2048 // bits and rows <= 128 // bits:
            yield [rows, block, warps]


def stream_candidates(op: str, bits: int, columns: int) -> Iterator[list[int]]:
    """sizes.StreamSizes worth trying. Only linear_add, also of experts, does without pairs of
    rows."""
    rows_of_tile = (2, 4, 8)
    if op.endswith("linear_add"):
        rows_of_tile = (1, *rows_of_tile)
    sizes = (rows_of_tile, (2048, 4096, 8192, 16384), (6, 8, 12, 16), (3, 4, 6))
    for rows, block, warps, stages in itertools.product(*sizes):
        if columns <= 3 * block and block < max(2 * columns, 4096):
            yield [rows, block, max(1, warps // (block // 2048)), stages]


def few_candidates(op: str, bits: int, columns: int) -> Iterator[list[int] | None]:
    """sizes.FewSizes worth trying: up to 64 registers a thread for the tiles of W in flight. None
    is what multiplies a prompt."""
    yield None
    sizes = ((16, 32), (4, 8), (1, 2, 4), (4, 8), (1, 2, 4))
    for rows, warps, steps, lanes, ahead in itertools.product(*sizes):
        if rows * steps * ahead <= 128 and lanes <= 4 * steps:
            yield [rows, warps, steps, lanes, ahead]


def own_table(model: Llama, kind: str) -> dict:
    """The launch sizes of exactly this card and these bits per weight: at first a copy of those
    used instead."""
    table = tables()[kind]
    for key in (capability(model.device), model.weights.layers[0].wqkv.bits):
        table = table.setdefault(key, copy.deepcopy(nearest(table, key)))
    return table


def products_of(model: Llama) -> list[tuple[str, Matrix]]:
    """The ops of a forward pass that multiply by a matrix, by the names of their launch sizes. Only
    those in the format of the first matrix, so that only the tables of one format are changed."""
    layer = model.weights.layers[0]
    ffn = ("rmsnorm_swiglu", "linear_add")
    if model.config.n_experts:
        ffn = ("experts_swiglu", "experts_linear_add")
    ops = ("rmsnorm_qkv_rope", "linear_add", *ffn, "rmsnorm_linear")
    products = zip(ops, (*layer.matrices, model.weights.output))
    return [(op, w) for op, w in products if w.format is layer.wqkv.format]


@torch.inference_mode()
def tune(args: argparse.Namespace) -> None:
    """Time whole steps with one launch size after the other, op by op: what is best for a kernel
    alone need not be best between others, which overlap with its beginning and end."""
    model = bench.open_model(args, args.dtype[0], 256, args.format[0])
    if not model.uses_graphs:
        raise ValueError("tuning times the Triton kernels on a GPU")
    passes = Passes(model)

    def seconds_of(T: int) -> float:
        return pass_seconds(passes, T, DEPTH)

    for _ in range(20):
        seconds_of(1)  # a GPU that was idle is slower at first
    format = model.weights.layers[0].wqkv.format
    summed = 1  # matrices of experts that are side by side for bits/stream.py
    if format and format.stream_load:
        single = (1, own_table(model, "stream"), stream_candidates)
        summed = max(1, model.config.experts_per_token)
    else:
        single = (1, own_table(model, "vector"), vector_candidates)
    few = own_table(model, "few")
    rounds = [single, (8, few[8], few_candidates), (16, few[16], few_candidates)]
    for T, table, candidates in rounds:
        print(f"T = {T}, as it is: {1e6 * seconds_of(T):.1f} us")
        for op, w in products_of(model):
            if T > 1:
                x = torch.empty(T, w.columns, dtype=model.dtype, device=model.device)
                if isinstance(kernel_sizes(Product(op, x, w), T), ManySizes):
                    continue
            columns = w.columns
            if T == 1 and op == "experts_linear_add":
                columns *= summed
            key = columns if T == 1 else f"{w.rows}x{columns}"
            sizes = table.setdefault(op, dict(table["default"]))
            found = []
            for candidate in candidates(op, w.bits, columns):
                sizes[key] = candidate
                with suppress(triton.OutOfResources):  # more shared memory than the card has
                    found.append((seconds_of(T), candidate))
            seconds, best = min(found, key=lambda pair: pair[0])
            sizes[key] = best
            said = f"{1e6 * seconds:.1f} us with {best or 'what multiplies a prompt'}"
            print(f"{op:18s} {key:>12}: {said}", flush=True)
        save_tables()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__.splitlines()[0], {"tune": "dev/tune.py"})
    bench_flags.add_model_flags(parser)
    add = parser.group("output")
    add("--debug", action="store_true", help="print errors with their traceback")
    args = parser.parse(argv, lambda args: "tune")
    bench_flags.take_one(parser, args, "-m", "--dtype", "--format")
    bench_flags.find_models(parser, args)
    return args


def main(argv: list[str] | None = None) -> int:
    return bench.exit_code_of(tune, parse_args(argv))


if __name__ == "__main__":
    use_safe_streams()
    sys.exit(main())
