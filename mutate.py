"""Mutation testing: small wrong changes to the program, one at a time, each of which the tests must notice.

    python mutate.py                   # all of them; ten minutes
    python mutate.py sampling.py       # those of one file

Each change is made in a copy of the program, where the tests whose names match the words beside it are then run.
"""

import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SECONDS = 900  # for the tests of one change, which take up to a minute

ARRIVED = "{}\n                _merge_splits(out, partial, ends, head, used, 1,"
MUTANTS = {  # file: what is replaced, by what, and what the tests that may notice have in their names
    "kernels.py": [
        ("tl.rsqrt(tl.sum(squares) / K + eps)", "tl.rsqrt(tl.sum(squares) / K)", "epsilon"),
        ("return even * cos - odd * sin, even * sin", "return even * cos + odd * sin, -even * sin", "op_equals"),
        ("[None, :] <= start_pos + offs_m", "[None, :] < start_pos + offs_m", "op_equals"),
        ("n + offs_n < end, scores, float", "n + offs_n <= end, scores, float", "op_equals"),
        ("return new_max, row_sum * rescale +", "return new_max, row_sum +", "how_it_is_split"),
        ("mask & (head >= H) & (head < H + KH)", "mask & (head >= H) & (head <= H + KH)", "op_equals"),
        ("mask_k = mask", "mask_k = mask & (t < 7)", "few_tokens"),
        (ARRIVED.format("tl.store(arrived + head, 0)"), ARRIVED.format("pass"), "how_it_is_split"),
    ],
    "few_tokens.py": [
        ("rows < N, other=0.0) * GAIN", "rows < N, other=0.0)", "few_tokens"),
        ("k + HOW.ahead * BLOCK < K", "k + HOW.ahead * BLOCK + BLOCK < K", "few_tokens"),
    ],
    "fp8.py": [
        ("for step in (0.0, 0.25, 0.5, 0.75):", "for step in (0.0, 0.25, 0.5):", "encoded_rows"),
        (".clamp(-self.largest, self.largest)", ".clamp(-self.largest, 2 * self.largest)", "encode"),
        ("if magnitudes.amax() >= self.not_finite:", "if magnitudes.amax() > self.not_finite:", "nan or finite or cache"),
    ],
    "sampling.py": [
        ("(back < window)", "(back <= window)", "window_of_the_penalty"),
        ('filler = tl.where(bad > 0, float("nan"), float("-inf"))', 'filler = float("-inf")', "not_finite"),
        ("tl.maximum(tl.sum(equal, 0) - room, 0)", "(0 * room)", "equals_at_the_edge"),
        ("total = tl.sum(p, 0) + unseen * tl.exp(edge - best)", "total = tl.sum(p, 0)", "equals_at_the_edge"),
        ("z = (index + 1).to", "z = index.to", "sampling_on_the_device"),
        ("tl.where(seen > 0, seen / penalty, seen * penalty)", "seen / penalty", "window_of_the_penalty"),
    ],
    "model.py": [
        ("min(self.pos, len(tokens) - 1)", "min(self.pos, len(tokens))", "reuses"),
        ("freqs = keep * freqs + (1 - keep) * freqs / scaling.factor", "freqs = freqs / scaling.factor", "transformers"),
    ],
    "checkpoint.py": [
        (".view(-1, 2, D // 2, *shape[1:])", ".view(-1, D // 2, 2, *shape[1:])", "transformers"),
        ("workspace += copies * size * largest_read(c)", "workspace += 0", "memory_counts"),
        ('f.number("rms_norm_eps", 0, 1, 1e-6', 'f.number("rms_norm_eps", 0, 1, 1e-5', "default"),
        ("count = 1 if len(shape) == 1 else len(parts)", "count = len(parts)", "layout"),
    ],
    "files.py": [
        ("or offset + count > storage.count", "or offset > storage.count", "torch_files"),
        ("if crc != part.crc:", "if False:", "torch_files"),
        ("if len(names := dict(pairs)) < len(pairs):", "if len(names := dict(pairs)) > len(pairs):", "spoiled_checkpoint"),
    ],
    "tokenizer.py": [
        ("self.strip_space = at_start and", "self.strip_space =", "chat or continuation"),
        ('config.get("legacy", not config)', 'config.get("legacy", True)', "control_tokens_of_a_tokenizer_model"),
        ("keep = max(sizes, default=0)", "keep = 0", "stop"),
        ("content = begin + closing +", "content = begin +", "half_typed"),
        ('self.utf8_errors = "replace" if self', 'self.utf8_errors = "replace" if not self', "tokenizer_json"),
    ],
}  # fmt: skip


def first_failure(folder: Path, words: str) -> str | None:
    """The first test to fail of those whose names contain the words. Raises RuntimeError if none can be run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "test_all.py", "-k", words]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"not finished after {SECONDS} seconds"
    if done.returncode < 0:  # what the interpreter's kernels read or write out of bounds
        return signal.strsignal(-done.returncode)
    if done.returncode > 1:
        raise RuntimeError(f"pytest -k {words!r}: {done.stdout[-300:]}{done.stderr[-300:]}")
    return re.search(r"^(?:FAILED|ERROR) test_all.py::(.*?)(?: - |$)", done.stdout, re.M)[1] if done.returncode else None


def main() -> int:
    unnoticed, files = 0, sys.argv[1:] or [*MUTANTS]
    if unknown := set(files) - set(MUTANTS):
        sys.exit(f"error: no changes to {', '.join(unknown)} are listed; there are some to {', '.join(MUTANTS)}")
    with tempfile.TemporaryDirectory() as made:
        copy = Path(shutil.copytree(HERE, Path(made) / "copy", ignore=shutil.ignore_patterns(".*", "__pycache__")))
        for file in files:
            source = (copy / file).read_text()
            every = " or ".join({words for _, _, words in MUTANTS[file]})
            if failed := first_failure(copy, every):
                print(f"{file}: {failed} fails without any change")
                return 1
            for before, after, words in MUTANTS[file]:
                (copy / file).write_text(source.replace(before, after))
                noticed = first_failure(copy, words)
                print(
                    f"{file}: {' '.join(before.split())} -> {' '.join(after.split())}: {noticed or 'NOT NOTICED'}", flush=True
                )
                unnoticed += noticed is None
            (copy / file).write_text(source)
    return unnoticed > 0


if __name__ == "__main__":
    sys.exit(main())
