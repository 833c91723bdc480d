"""Mutation testing: small wrong changes to the program, one at a time, each of which the tests must
notice.

    python dev/mutate.py                   # all of them; ten minutes
    python dev/mutate.py sampling.py       # those of one file
    python dev/mutate.py --check           # only whether the program still has the text that each one replaces

Each change is made in a copy of the program, where the tests whose names match the words beside it
are then run."""

import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 900  # for the tests of one change, which take up to a minute


class Mutant(NamedTuple):
    file: str
    old: str  # occurs once in the file
    new: str
    words: str  # of the names of tests that may notice, as pytest -k takes them


MUTANTS = [
    Mutant("kernels.py", "tl.sum(y * y) / C + eps)", "tl.sum(y * y) / C)", "op_equals"),
    Mutant("kernels.py", "packed[j][1]) * packed[j][2]", "packed[j][1])", "products_with_4_bit"),
    Mutant(
        "kernels.py",
        "return even * cos - odd * sin,",
        "return even * cos + odd * sin,",
        "op_equals",
    ),
    Mutant(
        "kernels.py",
        "mask_v = mask & (head >= SIZES.H + SIZES.KH)",
        "mask_v = mask & (head > 9)",
        "op_equals",
    ),
    Mutant(
        "kernels.py",
        "x if norm is None else rmsnorm(x, norm, eps), w",
        "x, w",
        "products_do_not_depend",
    ),
    Mutant(
        "kernels.py",
        "if k + FEW.ahead * BLOCK < K:",
        "if k + FEW.ahead * BLOCK < 0:",
        "products_do_not_depend",
    ),
    Mutant(
        "kernels.py",
        "(acc, 0)\n    if GAIN is not None:",
        "(acc, 0)\n    if False:",
        "products_do_not_depend",
    ),
    Mutant(
        "kernels.py",
        "torch.bfloat16 and multiplies_bf16() else",
        "torch.bfloat16 else",
        "without_bf16",
    ),
    Mutant(
        "kernels.py",
        "if format is INT4 and w.format is not INT4:",
        "if False:",
        "model_in_a_format",
    ),
    Mutant(
        "attention.py",
        "[None, :] <= start_pos + offs_m",
        "[None, :] < start_pos + offs_m",
        "op_equals",
    ),
    Mutant(
        "attention.py",
        "n + offs_n < end, scores, float",
        "n + offs_n <= end, scores, float",
        "op_equals",
    ),
    Mutant(
        "attention.py",
        "row_sum * rescale + tl.sum(p, 1)",
        "row_sum + tl.sum(p, 1)",
        "attention_does_not_depend",
    ),
    Mutant(
        "launch.py", "        tl.store(arrived, 0)\n", "        pass\n", "attention_does_not_depend"
    ),
    Mutant(
        "launch.py",
        "max((k for k in table if k <= key), default=min(table))",
        "min(table)",
        "nearest",
    ),
    Mutant(
        "fp8.py",
        "for step in (0.0, 0.25, 0.5, 0.75):",
        "for step in (0.0, 0.25, 0.5):",
        "encoded_rows",
    ),
    Mutant(
        "extra/int4.py",
        'return E4M3 if name == "output" else self',
        "return self",
        "model_in_a_format",
    ),
    Mutant("extra/int4.py", "for step in (-1, 0, 1):", "for step in (1,):", "4_bits_lose"),
    Mutant("extra/int4.py", "by_4 * -zero", "by_4 * zero", "products_with_4_bit"),
    Mutant("fp8.py", ".clamp(-largest, largest)", ".clamp(-largest, 2 * largest)", "encode"),
    Mutant(
        "fp8.py",
        "magnitudes.amax() >= self.not_finite",
        "magnitudes.amax() > self.not_finite",
        "finite",
    ),
    Mutant("sampling.py", "(back < window)", "(back <= window)", "penalty"),
    Mutant("sampling.py", '((l != l) | (tl.abs(l) == float("inf")))', "(l != l)", "not_finite"),
    Mutant("sampling.py", "bits ^ ((bits >> 31) & 0x7FFFFFFF)", "bits", "sampling_equals"),
    Mutant(
        "sampling.py", "(as_good >= top_k, bests", "(2 * as_good >= top_k, bests", "sampling_equals"
    ),
    Mutant("sampling.py", "64 - V.bit_length()", "32", "sampling_equals"),
    Mutant(
        "sampling.py",
        "_split(chunk, listed, count, threshold, best, UNIT)[0]",
        "0",
        "sampling_equals",
    ),
    Mutant("sampling.py", "ids.to(tl.uint64) + 1)", "ids.to(tl.uint64))", "sampling_equals"),
    Mutant(
        "sampling.py", "(bin <= (last if ON.TOP_K else first))", "(bin <= first)", "sampling_equals"
    ),
    Mutant(
        "sampling.py",
        "if count > CHUNK:\n            l =",
        "if count < 0:\n            l =",
        "sampling_equals",
    ),
    Mutant(
        "sampling.py",
        "tl.store(bins + every, tl.zeros([BINS], tl.int64))",
        "pass",
        "other_sampling",
    ),
    Mutant("sampling.py", "tl.maximum(drawn_best, better)", "better", "sampling_equals"),
    Mutant(
        "sampling.py", "if s.min_p > 0 else -math.inf", "if s.min_p > 0 else 0.0", "sampling_equals"
    ),
    Mutant(
        "sampling.py",
        "tl.where(seen > 0, seen / penalty, seen * penalty)",
        "seen / penalty",
        "penalty",
    ),
    Mutant("model.py", "min(self.pos, len(tokens) - 1)", "min(self.pos, len(tokens))", "reuses"),
    Mutant(
        "checkpoint.py", "(1 - part + part / factor)", "(0 * part + 1 / factor)", "transformers"
    ),
    Mutant(
        "checkpoint.py", "min(math.ceil(high), D - 1)", "min(math.ceil(high), D // 2 - 1)", "yarn"
    ),
    Mutant(
        "checkpoint.py",
        'rope.number("beta_fast", 1e-3, 1e6, 32',
        'rope.number("beta_fast", 1e-3, 1e6, 31',
        "yarn",
    ),
    Mutant("checkpoint.py", ' + _ids(f, "eos_token_id", vocab_size)', "", "config_eos"),
    Mutant(
        "checkpoint.py",
        "(-1, 2, self.config.head_dim // 2,",
        "(-1, self.config.head_dim // 2, 2,",
        "transformers",
    ),
    Mutant(
        "extra/quants.py",
        "[0, 4, 1, 5, 2, 6, 3, 7]",
        "[0, 2, 4, 6, 1, 3, 5, 7]",
        "safetensors_equal",
    ),
    Mutant("extra/quants.py", "elif not version_2:", "elif version_2:", "safetensors_equal"),
    Mutant(
        "extra/int4.py",
        "COLUMNS, EACH, GROUP),)\n    return",
        "COLUMNS, EACH, 32),)\n    return",
        "safetensors_formats",
    ),
    Mutant(
        "extra/quants.py", "and columns % format.group == 0", "and columns % 32 == 0", "gguf_models"
    ),
    Mutant(
        "checkpoint.py",
        "workspace += copies * size * largest_read(c)",
        "workspace += 0",
        "memory_of",
    ),
    Mutant(
        "checkpoint.py",
        'f.number("rms_norm_eps", 0, 1, 1e-6',
        'f.number("rms_norm_eps", 0, 1, 1e-5',
        "default",
    ),
    Mutant(
        "checkpoint.py",
        "count = 1 if len(shape) == 1 else len(parts)",
        "count = len(parts)",
        "layout",
    ),
    Mutant("tokenizer.py", "self.strip_space = at_start and", "self.strip_space =", "round_trip"),
    Mutant(
        "tokenizer.py",
        '"legacy", not config',
        '"legacy", True',
        "control_tokens_of_a_tokenizer_model",
    ),
    Mutant(
        "tokenizer.py",
        "if self._held.endswith(stop[:n])), default=0)",
        "if False), default=0)",
        "stop_strings",
    ),
    Mutant("tokenizer.py", "places.add(start)", "pass", "half_typed"),
    Mutant(
        "tokenizer.py",
        'utf8_errors = "replace" if',
        'utf8_errors = "replace" if not',
        "tokenizer_json",
    ),
    Mutant(
        "tokenizer.py",
        "        if ids[: len(start)] == start:\n",
        "        if start:\n",
        "continuation_takes",
    ),
    Mutant(
        "tokenizer.py",
        "isdisjoint(range(*span))",
        "isdisjoint(range(span[0] + 1, span[1]))",
        "typed_control",
    ),
    Mutant("tokenizer.py", "trim_blocks=True, ", "", "template_has"),
    Mutant("run.py", "    if token in eos:", "    if False:", "what_ends"),
    Mutant("run.py", "4 * same < 3 * n", "4 * same < 2 * n", "three_quarters"),
    Mutant("chat.py", "min(size // 4, 256)", "min(size // 2, 256)", "drops_its_oldest"),
    Mutant("chat.py", "excess + 1 :]", "excess:]", "shortens_an_answer"),
]


def stale(mutants: list[Mutant]) -> Iterator[str]:
    """What no longer fits the program or its tests: a line for each."""
    tests = " ".join(
        re.findall(r"^def (test_\w+)", (ROOT / "test_all.py").read_text(), re.MULTILINE)
    )
    for mutant in mutants:
        if not re.search(mutant.words.replace(" or ", "|"), tests):
            yield f"no test of test_all.py is named {mutant.words!r}: mend this mutant"
        file = ROOT / mutant.file
        count = file.read_text().count(mutant.old) if file.is_file() else 0
        if count != 1:
            yield f"{mutant.file} has {mutant.old!r} {count} times, not once: mend this mutant"


def first_failure(folder: Path, words: str) -> str | None:
    """The first test to fail of those whose names contain the words. Raises RuntimeError if none
    can be run."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "test_all.py",
        "-k",
        words,
    ]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"not finished after {SECONDS} seconds"
    if done.returncode < 0:  # what the interpreter's kernels read or write out of bounds
        return signal.strsignal(-done.returncode)
    if done.returncode > 1:
        raise RuntimeError(f"pytest -k {words!r}: {done.stdout[-300:]}{done.stderr[-300:]}")
    failed = re.search(r"^(?:FAILED|ERROR) test_all.py::(.*?)(?: - |$)", done.stdout, re.M)
    return failed[1] if done.returncode else None


def main() -> int:
    names = [word for word in sys.argv[1:] if word != "--check"]
    mutants = [mutant for mutant in MUTANTS if not names or mutant.file in names]
    if not mutants:
        sys.exit(
            f"error: no mutants of {', '.join(names)}; there are some of {', '.join({m.file for m in MUTANTS})}"
        )
    if lines := list(stale(mutants)):
        sys.exit("\n".join(lines))
    if "--check" in sys.argv:
        return 0
    unnoticed = 0
    with tempfile.TemporaryDirectory() as made:
        copy = Path(
            shutil.copytree(
                ROOT, Path(made) / "copy", ignore=shutil.ignore_patterns(".*", "__pycache__")
            )
        )
        if failed := first_failure(copy, " or ".join({mutant.words for mutant in mutants})):
            sys.exit(f"{failed} fails without any change")
        for file, old, new, words in mutants:
            source = (copy / file).read_text()
            (copy / file).write_text(source.replace(old, new))
            noticed = first_failure(copy, words)
            print(
                f"{file}: {' '.join(old.split())} -> {' '.join(new.split())}: {noticed or 'NOT NOTICED'}",
                flush=True,
            )
            (copy / file).write_text(source)
            unnoticed += noticed is None
    return unnoticed > 0


if __name__ == "__main__":
    sys.exit(main())
