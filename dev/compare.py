"""Tokens per second of this program and of Hugging Face's transformers, in the same run. Flags and
columns are those of bench.py; after the rows of a model in a dtype come transformers'.

    python dev/compare.py -m random:7b --dtype fp16 -n 200
"""

import argparse
import dataclasses
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bench
from loading.place import DTYPES, pick_device
from loading.random_model import random_config
from talk import bench_flags
from talk.cli import Parser, note, use_safe_streams


@dataclasses.dataclass
class Row(bench.Row):
    ratio: float | None = None  # ours over another program's, in the rows of that program


CACHES = {"eager": {}, "static cache": {"cache_implementation": "static"}}


def transformers_model(args: argparse.Namespace, dtype: torch.dtype, device: torch.device):
    """The same model: the checkpoint, or random weights in the same shapes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not args.model.startswith("random:"):
        return AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype).to(device).eval()
    c = random_config(args.model)
    family = "llama"
    if c.qkv_bias:
        family = "qwen2"
    if c.qk_norm:
        family = "qwen3"
    of_experts = {}
    if c.n_experts:
        family = "qwen3_moe" if c.qk_norm else "mixtral"
        of_experts = dict(num_experts=c.n_experts, num_experts_per_tok=c.experts_per_token)
        of_experts |= dict(num_local_experts=c.n_experts, moe_intermediate_size=c.hidden_dim)
    config = AutoConfig.for_model(
        family,
        hidden_size=c.dim,
        intermediate_size=c.hidden_dim,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        max_position_embeddings=c.max_seq_len,
        **of_experts,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def transformers_rows(args: argparse.Namespace, ours: list[Row]) -> Iterator[Row]:
    """Prompts, then generation by Hugging Face's generate, eager and with its static cache."""
    device = pick_device(args.device, args.ranks)
    model = transformers_model(args, DTYPES[ours[0].dtype], device)
    for row, (kind, T, depth, texts) in zip(ours, args.tests):
        vocab_size = model.config.vocab_size
        # It needs a token in its cache
        before = torch.randint(3, vocab_size, (texts, max(depth, 1)), device=device)
        if kind == "pp":
            ids = torch.randint(3, vocab_size, (1, T), device=device)
            speeds = prompt_speeds(model, before, ids, args.repetitions)
            yield peer(row, "transformers", speeds)
            continue
        for name, options in CACHES.items():
            speed = generation_speed(model, before, T, args.repetitions, options)
            if speed is not None:
                yield peer(row, f"transformers, {name}", [speed])
            else:
                few = f"{T} tokens are too few to time on this machine; raise -n"
                note(f"note: transformers, {name}: {few}")


@torch.inference_mode()
def prompt_speeds(model, before: Tensor, ids: Tensor, repetitions: int) -> list[float]:
    """Tokens a second of a prompt, ids [1, T], after others."""
    from transformers import DynamicCache

    kv, T = DynamicCache(), ids.shape[1]

    def run() -> None:
        model(ids, past_key_values=kv, logits_to_keep=1)
        kv.crop(-T)

    model(before, past_key_values=kv, logits_to_keep=1)
    return [T / seconds for seconds in bench.wall_times(run, ids.device, repetitions)]


def generation_speed(
    model, before: Tensor, T: int, repetitions: int, options: dict
) -> float | None:
    """Tokens a second of generating T tokens after each prompt [texts, length], without the prompts:
    the difference to generating one. Returns None if that is lost in noise."""

    def seconds_of(count: int) -> float:
        fixed = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
        length = dict(max_new_tokens=count, min_new_tokens=count)
        run = lambda: model.generate(before, **length, **fixed, **options)
        return statistics.median(bench.wall_times(run, before.device, repetitions))

    with_prompt = seconds_of(T + 1)
    prompt = seconds_of(1)
    return before.shape[0] * T / (with_prompt - prompt) if with_prompt > prompt else None


def peer(row: Row, backend: str, speeds: list[float]) -> Row:
    """Another program's row beside one of ours."""
    mean, std = bench.spread(speeds)
    return dataclasses.replace(
        row,
        backend=backend,
        tokens_per_s=mean,
        std=std,
        percent_of_ceiling=row.percent_of_ceiling * mean / row.tokens_per_s,
        ratio=row.tokens_per_s / mean,
        first_ms=None,
    )


def rows_of_both(args: argparse.Namespace) -> Iterator[Row]:
    for model, dtype in itertools.product(args.models, args.dtype):
        args.model = model
        plain = []  # transformers has no format like ours
        for format in args.format:
            for ours in bench.throughput(args, dtype, format):
                row = Row(**vars(ours))
                yield row
                if row.format == "none":
                    plain.append(row)
        if plain and (model.startswith("random:") or args.folder.is_dir()):
            yield from transformers_rows(args, plain)
        else:
            needed = "it needs --format none, and a folder or random:SHAPE"
            note(f"{model}: transformers is not measured: {needed}")


def compare(args: argparse.Namespace) -> None:
    if args.ranks.size > 1:
        raise ValueError(f"transformers runs in one process, not in {args.ranks.size}")
    if importlib.util.find_spec("transformers") is None:  # said before anything is measured
        raise ValueError("a package is not installed: transformers")
    names = [f"transformers, {name}" for name in CACHES]
    bench.show_speeds(rows_of_both(args), args, names)
    note("ratio: tokens per second of this program over those of the other one")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__.split("\n\n")[0], {"speed": "dev/compare.py"})
    bench_flags.add_model_flags(parser)
    bench_flags.add_test_flags(parser)
    bench_flags.add_output_flags(parser)
    args = parser.parse(argv, lambda args: "speed")
    args.tests = bench_flags.tests_of(parser, args)
    bench_flags.find_models(parser, args)
    return args


def main(argv: list[str] | None = None) -> int:
    return bench.exit_code_of(compare, parse_args(argv))


if __name__ == "__main__":
    use_safe_streams()
    sys.exit(main())
