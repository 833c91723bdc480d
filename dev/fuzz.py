"""Fuzzing: randomly corrupted checkpoints and templates, and options at random.

    python dev/fuzz.py --seconds 60        # fresh cases; prints what went wrong and how to repeat it
    python dev/fuzz.py --seed 7 --cases 1  # that one again

A case runs the program and passes if it ends well or with a documented error of one line. It fails
on any other exception or warning, when it runs out of time or memory, when anything is executed,
unpickled or connected to, and when a file outside its folder is read."""

import argparse
import io
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bench
import run
from dev.checkpoints import make_checkpoints

SECONDS, MEMORY = 10, 1 << 30  # limits of a case
# The last line that a program may write when it fails, with --debug
DOCUMENTED = re.compile(
    "error: .+|RuntimeError: the logits are not finite.*|"
    "(Value|FileNotFound|FileExists|IsADirectory|Permission|OS|Memory)Error: .+|"
    r"texts\.ContextFull: .+"
)

# ---- how it is corrupted

STRANGE = (
    None, True, 0, -1, 1, 3, 7, 16, 400, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"), "",
    "llama", "linear", "\ud800", "\x1b[31m\n", "../x", "/etc/passwd", "x" * 5000, [], {}, [[]],
    ["x"] * 3000, {"a": 1}, {"content": "<s>"},
)  # fmt: skip
PIECES = (  # of templates
    "{% for m in messages %}", "{% endfor %}", "{{ messages[0].content * 999 }}", "{{ x",
    "{{ 1 / 0 }}", "{{ raise_exception(x) }}", "{# \ud800 #}", "\0\x1b[", "{% generation %}",
    "{% macro f(a) %}{{ f(a) }}{% endmacro %}{{ f(1) }}", "{{ ''.__class__.__mro__ }}",
    "{% include '/etc/passwd' %}", "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ (lipsum | attr('__globals__')).os.open('/etc/passwd', 0) }}",
    "{{ messages.append(1) }}", "{{ '{0.__class__}'.format(x) }}",
)  # fmt: skip


def spoil_value(rng: random.Random, value: object) -> object:
    """A JSON value with one thing in it changed."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        changed = rng.choice(STRANGE)
        for _ in range(rng.choice((0, 0, 0, 0, 1, 300))):
            changed = [changed]
        return changed
    changed = value.copy()
    key = rng.choice([*value]) if isinstance(value, dict) else rng.randrange(len(value))
    if rng.random() < 0.2:
        del changed[key]
    else:
        changed[key] = spoil_value(rng, value[key])
    return changed


def spoil_json(rng: random.Random, raw: bytes) -> bytes:
    try:
        return json.dumps(spoil_value(rng, json.loads(raw))).encode()
    except (ValueError, RecursionError):  # already corrupted
        return spoil_bytes(rng, raw)


def spoil_bytes(rng: random.Random, raw: bytes) -> bytes:
    at = rng.randrange(len(raw) + 1)
    before, piece = raw[:at], raw[at:][: rng.choice((1, 4, 8, 100))]
    after = raw[at + len(piece) :]
    number = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**40, 2**63)))
    choices = (b"", piece * 2, rng.randbytes(len(piece)), b"\xff" * len(piece), number, b"[" * 5000)
    return rng.choice((before, after, before + rng.choice(choices) + after))


def spoil_safetensors(rng: random.Random, raw: bytes) -> bytes:
    size = int.from_bytes(raw[:8], "little")
    if size > len(raw):  # already corrupted
        return spoil_bytes(rng, raw)
    header = spoil_json(rng, raw[8 : 8 + size])
    return struct.pack("<Q", len(header)) + header + raw[8 + size :]


def spoil_gguf(rng: random.Random, raw: bytes) -> bytes:
    end = rng.choice((100, 1000, len(raw)))  # the keys, the tokens, the tensors
    return spoil_bytes(rng, raw[:end]) + raw[end:]


def spoil_template(rng: random.Random, raw: bytes) -> bytes:
    at = rng.choice([i for i, byte in enumerate(raw) if byte == ord("{")] or [0])
    return raw[:at] + rng.choice(PIECES).encode(errors="surrogatepass") + raw[at:]


SPOILERS = {
    ".json": spoil_json, ".safetensors": spoil_safetensors, ".gguf": spoil_gguf,
    ".jinja": spoil_template,
}  # fmt: skip


def spoil(rng: random.Random, file: Path) -> None:
    """Change a file, or rarely what kind of file it is."""
    if not file.is_file() or file.stat().st_size > 1 << 20:
        return  # already another kind
    if rng.random() < 0.9:
        spoiler = SPOILERS.get(file.suffix, spoil_bytes) if rng.random() < 0.8 else spoil_bytes
        file.write_bytes(spoiler(rng, file.read_bytes()))
        return
    file.unlink()
    match rng.randrange(4):
        case 0:
            os.mkfifo(file)
        case 1:
            file.mkdir()
        case 2:
            file.touch()
            os.truncate(file, 1 << 38)


# ---- the kinds of cases


def ends_well(program: Callable[[], object]) -> bool:
    """Whether a program succeeds, not with a documented error. Raises AssertionError if it ends
    with any other, or with one of several lines."""
    said = io.StringIO()
    with redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")), redirect_stderr(said):
        try:
            code = program()
        except SystemExit as exit:
            code = exit.code
    last = said.getvalue().removesuffix("\n").rpartition("\n")[2]
    fails = code in (1, 2)
    assert not fails or DOCUMENTED.fullmatch(last) and last.isprintable(), said.getvalue()
    return not fails


def words_for(folder: Path) -> list[str]:
    return ["-m", str(folder), *"-p hello -n 2 -c 64 --device cpu --quiet --debug".split()]


def spoiled_checkpoint(rng: random.Random, bases: list[Path], place: Path) -> bool:
    folder = Path(shutil.copytree(rng.choice(bases), place / "model"))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        spoil(rng, rng.choice(sorted(folder.iterdir()) or [folder]))
    flag = rng.choice(("--chat", "--chat", "--ignore-eos", "--fp8", "--int4"))
    watched.folder = str(folder)
    return ends_well(lambda: run.main([*words_for(folder), flag]))


VALUES = (
    "", "0", "-1", "1", "1e99", "nan", "-inf", "x", "\udc80", "x" * 5000, "\x1b[0m\n", "1" * 5000,
    "cpu", "e4m3",
)  # fmt: skip


def any_options(rng: random.Random, bases: list[Path], place: Path) -> bool:
    program = rng.choice((run, bench))
    with redirect_stdout(io.StringIO()) as shown, suppress(SystemExit):
        program.parse_args(["--help"])
    flags = re.findall(r"(?<![\w-])--?[a-z][\w-]*", shown.getvalue())
    words = [rng.choice((rng.choice(flags), rng.choice(VALUES))) for _ in range(rng.randrange(6))]
    return ends_well(lambda: program.parse_args(words))


KINDS: dict[Callable, int] = {spoiled_checkpoint: 20, any_options: 1}  # how often each is chosen


# ---- cases in processes of their own

# While there is a folder: what was done that must not be done
watched = SimpleNamespace(folder="", seen=[])
FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect",
    "pickle.find_class", "ctypes.dlopen",
)  # fmt: skip
READABLE = [os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, ROOT)]


def watch(event: str, arguments: tuple) -> None:
    """An audit hook that records what a case must not do: open files outside its folder, run
    programs or connect."""
    if not watched.folder:
        return
    if event in FORBIDDEN:
        watched.seen.append(f"{event}{arguments}"[:300])
    if event == "open" and isinstance(arguments[0], str | os.PathLike):
        path = os.path.realpath(arguments[0])
        roots = (os.path.realpath(watched.folder), "/proc", "/sys", "/dev/null", *READABLE)
        if not any(f"{path}/".startswith(f"{root}/") for root in roots):
            watched.seen.append(f"opens {path}")


def work(seed: int, bases: list[Path], place: Path) -> None:
    """Do a case and write its outcome: its kind, then ok, refused, or what went wrong."""
    warnings.simplefilter("error")
    sys.addaudithook(watch)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    rng = random.Random(seed)
    kind = rng.choices([*KINDS], KINDS.values())[0]
    try:
        outcome = "ok" if kind(rng, bases, place) else "refused"
    except BaseException:
        outcome = f"FAILED: {traceback.format_exc()[-4000:]}"
    watched.folder = ""
    if watched.seen:
        outcome = f"FAILED: {watched.seen}"
    (place / "outcome").write_text(f"{kind.__name__}: {outcome}", errors="replace")


def one_case(seed: int, bases: list[Path], limit: float) -> str:
    """The outcome of a case, in a process of its own, which may die or hang."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        arguments = (seed, bases, Path(place))
        child = multiprocessing.get_context("fork").Process(target=work, args=arguments)
        child.start()
        child.join(limit)
        if child.is_alive():
            child.kill()
            child.join()
            return f"FAILED: not finished after {limit:g} seconds"
        if child.exitcode != 0:
            return "FAILED: the process died"
        return Path(place, "outcome").read_text()


def run_cases(
    seeds: Iterable[int], bases: list[Path], until: float = float("inf"), limit: float = SECONDS
) -> tuple[Counter, dict[int, str]]:
    """Counts of the outcomes, and the failures by seed."""
    outcomes: Counter = Counter()
    failures = {}
    for seed in seeds:
        if time.monotonic() > until:
            break
        outcome = one_case(seed, bases, limit)
        kind, failed, _ = outcome.partition("FAILED")
        outcomes[kind + failed] += 1
        if failed:
            failures[seed] = outcome
    return outcomes, failures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    fresh = random.SystemRandom().randrange(1 << 32)
    parser.add_argument("--seed", type=int, default=fresh, help="seed of the first case")
    parser.add_argument("--cases", type=int, default=1_000_000, help="maximum number of cases")
    parser.add_argument("--seconds", type=float, default=60, help="maximum seconds to run")
    parser.add_argument("--limit", type=float, default=SECONDS, help="maximum seconds for a case")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        bases = make_checkpoints(Path(home))
        for base in bases:  # imports what cases would import
            assert ends_well(lambda base=base: run.main(words_for(base))), base
        start = time.monotonic()
        seeds = range(args.seed, args.seed + args.cases)
        outcomes, failures = run_cases(seeds, bases, start + args.seconds, args.limit)
        seconds = time.monotonic() - start
    for seed, outcome in failures.items():
        print(f"\n--seed {seed} --cases 1\n{outcome}")
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:8} {outcome}")
    cases = f"{sum(outcomes.values())} cases from seed {args.seed} in {seconds:.0f} s"
    print(f"{cases}, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
