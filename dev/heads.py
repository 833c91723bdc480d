"""Tokens per second with a trained head, whose weights are random: as many of its proposals are accepted as is
said, and all of its work is done.

    python dev/heads.py -m random:8b --dtype fp16 --format none,e4m3,int4 --accept 4:3.08,7:5.3
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bench
from dev.passes import device_time, pass_seconds
from engine import Engine, Timings, generate
from formats import Format, Matrix
from loading.place import FORMATS
from model import LayerWeights, Llama
from passes import Pass
from settings import Sampling
from speculation.head_file import HeadWeights
from speculation.heads import Chain, Head
from talk import bench_flags
from talk.cli import Parser, note, use_safe_streams

KNOWN = 32_000  # tokens of the head

LEGEND = """\
pass, verify: milliseconds of a pass that evaluates the proposals, and of one with the head's work
head %: the head's share of that, and all that is done to verify"""


def random_head(model: Llama, format: Format | None, known: int = KNOWN) -> HeadWeights:
    """A head of a layer like the model's, which knows so many tokens."""
    c = model.config
    C, V = c.dim, c.vocab_size
    known = min(known, V)

    def matrix(rows: int, columns: int, name: str = "") -> Matrix:
        values = torch.randn(rows, columns, dtype=model.dtype, device=model.device).mul_(0.02)
        if format is None:
            return Matrix(values)
        own = format.for_matrix(name)
        return Matrix(own.encode(values), own)

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=model.dtype, device=model.device)

    layer = LayerWeights(
        attention_norm=None,
        wqkv=matrix(c.q_dim + 2 * c.kv_dim, 2 * C),
        wo=matrix(C, c.q_dim),
        ffn_norm=ones(C),
        w13=matrix(2 * c.hidden_dim, C),
        w2=matrix(C, c.hidden_dim),
    )
    return HeadWeights(
        config=replace(c, n_layers=1, vocab_size=known, qk_norm=False, n_experts=0),
        embedding=model.weights.embedding,
        norms=ones(2, C),
        fc=matrix(C, 3 * C),
        layer=layer,
        norm=ones(C),
        output=matrix(known, C, "output"),
        ids=torch.arange(known, device=model.device) * (V // known),
        layers=(min(2, c.n_layers - 1), c.n_layers // 2, max(c.n_layers - 3, 0)),
    )


def plant(model: Llama, chain: Chain, accepted: float) -> None:
    """Let the model draw what was proposed to it, so often that so many proposals of a pass are accepted
    on average."""
    _, n = chain.shape
    ends = torch.tensor([int(accepted * i) for i in range(101)], device=model.device)
    counts = ends.diff()
    turn = torch.zeros(1, dtype=torch.int64, device=model.device)
    row = torch.arange(1 + n, device=model.device)
    sample = model.ops.sample

    def planted(logits: Tensor, pass_: Pass) -> None:
        sample(logits, pass_)
        if pass_ is chain.target:
            proposed = chain.found[0, 0]
            drawn = torch.where(row < counts.index_select(0, turn % 100), proposed, proposed + 1)
            pass_.drawn.index_copy_(0, chain.rest.place.long(), drawn)
            turn.add_(1)

    model.ops.sample = planted


def speed(engine: Engine, repetitions: int, n: int) -> tuple[float, float]:
    """Tokens a second of the whole loop, and tokens a pass."""
    found = []
    for _ in range(1 + repetitions):
        timings = Timings()
        list(generate(engine.model, [5] * 16, engine, n + 1, Sampling(), eos=[], timings=timings))
        found.append(timings.steps / timings.step_seconds)
    return statistics.median(found[1:]), timings.steps / timings.passes


@torch.inference_mode()
def rows_of(model: Llama, args: argparse.Namespace) -> Iterator[dict]:
    sample = model.ops.sample
    plain, _ = speed(Engine(model), args.repetitions, args.tokens)
    own = FORMATS.get(bench.format_of(model))
    formats = dict.fromkeys((own, FORMATS["e4m3"], FORMATS["int4"]))
    for format, (n, mean) in itertools.product(formats, args.accept):
        weights = random_head(model, format)
        engine = Engine(model)
        head = Head(n, engine.passes, weights)
        head.always = True
        engine.proposer = head
        chain = head.chain(1, n)
        model.ops.sample = sample
        plant(model, chain, mean - 1)
        speculative, per_pass = speed(engine, args.repetitions, args.tokens)
        alone = pass_seconds(engine.passes, 1 + n, 100)
        verify = device_time(chain.verify, model)
        matrices = (*weights.layer.matrices, weights.fc, weights.output)
        yield {
            "model": args.model,
            "format": bench.format_of(model),
            "head": format.name if format else "none",
            "proposals": n,
            "tokens a pass": per_pass,
            "plain": plain,
            "tokens_per_s": speculative,
            "pass": 1e3 * alone,
            "verify": 1e3 * verify,
            "head %": 100 * (1 - alone / verify),
            "head GB": sum(m.nbytes for m in matrices) / 1e9,
        }


def show_heads(args: argparse.Namespace) -> None:
    for format in args.format:
        model = bench.open_model(args, args.dtype[0], 32 + 2 * args.tokens, format)
        bench.show([*rows_of(model, args)], args.output)
        del model
    note(LEGEND)


def accepted(text: str) -> tuple[int, float]:
    """How many proposals a pass has, and how many tokens it then yields on average."""
    n, _, tokens = text.partition(":")
    return int(n), float(tokens)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__.split("\n\n")[0], {"heads": "dev/heads.py"})
    bench_flags.add_model_flags(parser)
    add = parser.group("tests")
    kind = bench_flags.several(accepted)
    help = "proposals of a pass, and the tokens that it then yields [4:3.08]"
    add("--accept", type=kind, default=[(4, 3.08)], metavar="N:TOKENS,...", help=help)
    add("-n", "--tokens", type=int, default=512, metavar="N", help="tokens to generate")
    add("-r", "--repetitions", type=int, default=3, metavar="N", help="timed runs")
    bench_flags.add_output_flags(parser)
    args = parser.parse(argv, lambda args: "heads")
    bench_flags.take_one(parser, args, "-m", "--dtype")
    bench_flags.find_models(parser, args)
    return args


def main(argv: list[str] | None = None) -> int:
    return bench.exit_code_of(show_heads, parse_args(argv))


if __name__ == "__main__":
    use_safe_streams()
    sys.exit(main())
