"""How fast text under a JSON schema is, and how late it begins, beside free text.

python dev/constrained.py -m random:7b --dtype fp16 --format int4 --tokenizer models/smollm2
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from pydantic_core import from_json

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bench
from constraints import Constraint
from engine import Engine, Sequence
from grammars import Grammars, json_grammar
from loading.checkpoint import open_tokenizer
from sampling import Sampling
from talk import bench_flags
from talk.cli import Parser, note, use_safe_streams

# An array of strings that is not closed before the limit
SCHEMA = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 9999}


def show_constrained(args: argparse.Namespace) -> None:
    model = bench.open_model(args, args.dtype[0], 2 * args.new[0] + 64, args.format[0])
    V = model.config.vocab_size
    tokenizer = open_tokenizer(args.tokenizer or args.folder)
    engine = Engine(model)
    start = time.perf_counter()
    grammars = Grammars(tokenizer, V, [tokenizer.eos])
    note(f"llguidance's tokenizer takes {time.perf_counter() - start:.2f} s, once")
    prompt = tokenizer.encode("A list of animals, as JSON:\n")
    found: dict[str, list[tuple[float, float]]] = {"free": [], "schema": []}
    for i in range(1 + args.repetitions):  # the first is a warm-up
        for kind, speeds in found.items():
            times: list[float] = []
            constraint = None
            start = time.perf_counter()
            if kind == "schema":
                grammar = json_grammar(SCHEMA | {"title": str(i)})  # compiled anew
                constraint = Constraint(V, [tokenizer.eos], 0, grammars.matcher(grammar))
            take = lambda *_, times=times: times.append(time.perf_counter())
            text = Sequence(prompt, take, args.new[0], Sampling(seed=i), constraint=constraint)
            engine.add(text)
            engine.wait_for(text, lambda: False)
            speeds.append((times[0] - start, (len(times) - 1) / (times[-1] - times[0])))
            if kind == "schema":
                written = tokenizer.decode(text.ids[len(prompt) :])
                items = from_json(written, allow_partial="trailing-strings")
                assert len(times) == args.new[0] and {*map(type, items)} == {str}, written
    medians = {kind: map(statistics.median, zip(*s[1:])) for kind, s in found.items()}
    rows = [dict(text=k, first_ms=1e3 * first, tokens_per_s=s) for k, (first, s) in medians.items()]
    free, _ = rows
    rows = [row | dict(ratio=row["tokens_per_s"] / free["tokens_per_s"]) for row in rows]
    bench.show(rows, args.output)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__.split("\n\n")[0], {"constrained": "dev/constrained.py"})
    bench_flags.add_model_flags(parser)
    add = parser.group("tests")
    bench_flags.add_counts(add, "-n", "--new", default=200, help="tokens of a text [200]")
    add("-r", "--repetitions", type=int, default=5, help="texts of each kind [5]")
    add(
        "--tokenizer", help="folder or file with the tokenizer, needed for random weights [MODEL's]"
    )
    bench_flags.add_output_flags(parser)
    args = parser.parse(argv, lambda args: "constrained")
    bench_flags.take_one(parser, args, "-m", "--dtype", "--format", "-n")
    bench_flags.find_models(parser, args)
    return args


def main(argv: list[str] | None = None) -> int:
    return bench.exit_code_of(show_constrained, parse_args(argv))


if __name__ == "__main__":
    use_safe_streams()
    sys.exit(main())
