"""Tests of models on several ranks."""

import contextlib
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fp8
import kernels
import products
from bits.int4 import INT4
from engine import Engine
from formats import Matrix
from loading.checkpoint import load, save
from loading.names import formats_of
from loading.place import FORMATS, check_groups
from model import Llama
from passes import Passes
from ranks import exchange as exchange_module
from ranks.processes import Ranks, share
from tests.helpers import (
    DEVICE,
    FAMILIES,
    HERE,
    NAN,
    ONE_UNIT,
    OWN,
    PATIENCE,
    SEED,
    assert_close,
    decode_in_graphs,
    dense,
    encoded,
    exchanges_of,
    free_port,
    greedy,
    hugging_face_model,
    in_shell,
    loaded,
    logits_of,
    nmse,
    randn,
    read_config_like,
    to_bin,
    to_meta,
    together,
)

# ---- ranks


PARALLEL = {  # cases, with checkpoints made below: a folder, and options of load
    "grouped queries": ("tiny", {}),
    "one key/value head, bias, tied": ("qwen 2.5, tied, longer", {}),
    "norms of q and k": ("qwen 3", {}),
    "experts": ("qwen 3 moe", {}),
    "biases": ("granite code", {}),
    "biases, saved": ("saved biases", {}),
    "bin": ("bin", {}),
    "meta, 2 shards": ("meta", {}),
    "e4m3": ("tiny", dict(format="e4m3")),
    "e5m2, tied": ("qwen 2.5, tied, longer", dict(format="e5m2")),
    "8-bit cache": ("tiny", dict(kv_fp8=True)),
    "saved": ("saved", {}),
    "in graphs": ("tiny", {}),
    "fused": ("tiny", dict(backend="triton")),
    "biases, fused": ("granite code", dict(backend="triton")),
    "a format of one's own": ("grouped", dict(format="own")),
    "saved, in a format of one's own": ("saved groups", {}),
}


# four would cut a group
ONLY_BY_TWO = {"fused", "biases, fused", "a format of one's own", "saved, in a format of one's own"}


def parallel_result(folder: Path, case: str, **changed) -> tuple[torch.Tensor, list[list[int]]]:
    """Logits of a prompt and of single tokens after it, and greedy texts, one alone and three beside
    each other, in this process or as one of several, which pad prompts if the case is called so."""
    name, options = PARALLEL[case]
    ids = torch.arange(5, 17) * 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMATS, "own", OWN)
        if case == "in graphs" and "ranks" in changed:
            decode_in_graphs(patch)
        model = load(folder / name, dtype="fp32", device="cpu", **options | changed)
        tokens = [greedy(model, ids.tolist(), 2 if "backend" in options else 8)]
        if "backend" not in options:
            prompts = [ids[:count].tolist() for count in (3, 12, 5)]
            tokens += together(Engine(model, 2), prompts, 6)
        return logits_of(model, ids, 10, 1, 1), tokens


def run_rank(rank: int, folder: Path, size: int, port: str) -> None:
    """Write what one of several processes, forks of one that has only done its imports,
    computes."""
    os.environ |= dict(
        WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), RANK=str(rank), LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="as torchrun would",
    )  # fmt: skip
    ranks = Ranks.of_torchrun()
    cases = [case for case in PARALLEL if size == 2 or case not in ONLY_BY_TWO]
    found = {case: parallel_result(folder, case, ranks=ranks) for case in cases}
    torch.save(found, folder / f"{size}.{rank}")
    ranks.finish()


@pytest.fixture(scope="session")
def parallel_folder(tiny, grouped_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    shutil.copytree(grouped_folder, folder / "grouped")
    for name in ("tiny", "bin", "meta"):
        shutil.copytree(tiny, folder / name)
    torch.manual_seed(1)
    for name in ("qwen 2.5, tied, longer", "qwen 3", "qwen 3 moe", "granite code"):
        hugging_face_model(301, **FAMILIES[name]).save_pretrained(folder / name)
        shutil.copy(tiny / "tokenizer.model", folder / name)
    to_bin(folder / "bin")
    to_meta(folder / "meta", 2)
    save(folder / "qwen 2.5, tied, longer", folder / "saved", device="cpu")
    save(folder / "granite code", folder / "saved biases", device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMATS, "own", OWN)
        save(grouped_folder, folder / "saved groups", format="own", device="cpu")
    return folder


def test_ranks_equal_one_process(parallel_folder):
    """2 and 4 processes, all forks of a single one, since every start takes seconds."""
    folder = shlex.quote(str(parallel_folder))
    done = in_shell(f"CUDA_VISIBLE_DEVICES= $PYTHON -m ranks.test_ranks {folder} forks", cwd=HERE)
    assert done.returncode == 0, done.stderr[-3000:]
    found = lambda size: [torch.load(parallel_folder / f"{size}.{rank}") for rank in range(size)]
    of_several = {size: found(size) for size in (2, 4)}
    assert of_several[2][0].keys() == PARALLEL.keys() == of_several[4][0].keys() | ONLY_BY_TWO
    for case, (name, options) in PARALLEL.items():
        exact, expected = parallel_result(parallel_folder, case, backend="torch")
        in_8_bits = "saved" in name or "format" in options or "kv_fp8" in options
        for size in (2,) if case in ONLY_BY_TWO else (2, 4):
            (logits, tokens), *others = (rank[case] for rank in of_several[size])
            for other in others:
                same = torch.equal(logits, other[0]) and tokens == other[1]
                assert same, (case, size, "ranks differ")
            # A code may be rounded the other way: of a cached key, or of a single token's
            # activations
            assert_close(logits[:10], exact[:10], 1e-2 if case == "8-bit cache" else 1e-4)
            assert_close(logits[10:], exact[10:], 1e-2 if in_8_bits else 1e-4)
            assert tokens == expected, (case, size)


def test_ranks_that_do_not_divide_a_model(tiny):
    uneven = "4 query heads cannot be divided evenly among 3 processes"
    with pytest.raises(ValueError, match=uneven):
        load(tiny, device="cpu", ranks=Ranks(0, 3))
    too_many = "3 key/value heads can be neither divided nor repeated evenly among 2 processes"
    with pytest.raises(ValueError, match=too_many):
        read_config_like(n_heads=6, n_kv_heads=3).cut(2)
    too_few = "layers.0.wo has 16 columns on each of 2 processes; own needs"
    with pytest.raises(ValueError, match=too_few):
        c = read_config_like().cut(2)
        check_groups(c, formats_of(c, OWN))


def test_ranks_that_divide_256_columns_of_int4(copy):
    """Each rank encodes its own columns; what was encoded as a whole cannot be divided."""
    hugging_face_model(301, **FAMILIES["gqa"] | dict(intermediate_size=320)).save_pretrained(copy)
    model = load(copy, device="cpu", dtype="fp32")
    for rank, columns in enumerate(model.weights.layers[0].w2.data.split(160, 1)):
        w2 = loaded(model, INT4, Ranks(rank, 2)).layers[0].w2
        assert torch.equal(w2.dense(), INT4.decoded(INT4.encode(columns)))
    folder = save(copy, copy.parent / "saved", format="int4", device="cpu").parent
    error = "saved in int4, where its 320 columns cannot be divided among 2 processes"
    with pytest.raises(ValueError, match=f"layers.0.w2 was {error}"):
        loaded(load(folder, device="cpu"), INT4, Ranks(0, 2))


@pytest.mark.parametrize("format, several, columns", [
    (None, 5, (40, 24, 56)), (fp8.E4M3, 13, (40, 24, 56)), (fp8.E4M3, 12, (256, 128, 512)),
], ids=["fp16", "e4m3", "e4m3, wide"])  # fmt: skip
def test_exchange_adds_and_gathers(format, several, columns):
    """Three ranks in one process, each with its own memory; one token or several; a vocabulary that
    is not evenly divided."""
    C, V, halves = 72, 101, partial(randn, dtype=torch.float16)
    biases = halves(C), None, None  # rank 0 adds it
    terms_of = lambda: [Matrix(halves(C, k), bias=bias) for k, bias in zip(columns, biases)]
    sums = [encoded(terms_of(), format) for _ in range(2)]
    (whole,) = encoded([Matrix(halves(V, C))], format)
    cuts = [share(V, rank, 3) for rank in range(3)]
    part = lambda rows: tuple(t[rows].contiguous() for t in whole.tensors)
    outputs = [Matrix(part(rows), format) for rows in cuts]
    exchanges = exchanges_of([list(of_rank) for of_rank in zip(*sums, outputs)])
    close = lambda ours, exact: nmse(ours, exact) < ONE_UNIT[torch.float16]
    for T in (1, several, 1, 2):
        for matrices in sums:
            x, residual = [halves(T, k) for k in columns], halves(T, C)
            terms = [kernels.linear_ref(a.float(), dense(m)) for a, m in zip(x, matrices)]
            exact = residual.float() + sum(terms)
            for exchange, a, m in zip(exchanges, x, matrices):
                exchange.send(products.Product("linear_add", a, m))
            for exchange, m in zip(exchanges, matrices):
                assert close(exchange.add_received(m, residual.clone()), exact)
        x, norm, logits = halves(1, C), halves(C), torch.empty(1, V, device=DEVICE)
        eps = SimpleNamespace(norm_eps=1e-5)
        exact = kernels.rmsnorm_linear_ref(x.float(), norm.float(), dense(whole), eps, logits)
        for exchange, m in zip(exchanges, outputs):
            exchange.send(products.Product("rmsnorm_linear", x, m, norm, 1e-5))
        for exchange, m in zip(exchanges, outputs):
            blank = torch.full((1, V), NAN, device=DEVICE)
            assert close(exchange.gather_received(m, blank), exact)
            exchange.end_round()


def test_exchange_adds_terms_of_several_tokens():
    """Three ranks in one process, so each finds that the others have come already. Two programs
    have two blocks each, the last of them ragged."""
    T, C = 180, 72
    matrices = [Matrix(randn(C, 32, dtype=torch.float16)) for _ in range(2)]
    exchanges = exchanges_of([matrices] * 3)
    for number, w in enumerate(2 * matrices, start=1):
        terms = [randn(T, C, dtype=torch.float16) for _ in exchanges]
        for exchange, term in zip(exchanges, terms):
            exchange.term(w, term).copy_(term)
        residual = randn(T, C, dtype=torch.float16)
        exact = sum(term.float() for term in [residual, *terms])
        found = []
        for rank, exchange in enumerate(exchanges):
            exchange.own_flags.fill_(number)
            for other in exchanges:
                other.own_flags[:, rank] = 0
            found.append(exchange.add_terms(w, residual.clone(), False))
            for other in exchanges:
                if other is not exchange:
                    assert (other.own_flags[:, rank] == number).all(), "this rank has not come"
        assert all(torch.equal(ours, found[0]) for ours in found)
        assert nmse(found[0], exact) < ONE_UNIT[torch.float16]
        first, second = (exchange.term(m, terms[0]) for m in matrices)
        assert first.data_ptr() != second.data_ptr(), "the buffers take turns"
    big = torch.empty(exchange_module.READ_AT_MOST, 1, device="meta")
    assert exchange.has_room(terms[0]) and not exchange.has_room(big)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_on_several_gpus(parallel_folder, size):
    """Both ways of summing, and thousands of rounds of the exchange with late ranks: see
    check_gpus."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    seed = os.environ | {"TEST_SEED": str(SEED)}
    command = ("-m", "ranks.test_ranks", parallel_folder, "gpus")
    process = torchrun(*command, size=size, env=seed, cwd=HERE)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err[-3000:]


@torch.inference_mode()
def check_gpus(folder: Path) -> None:
    """What each of several processes does, with a GPU of its own. Errors are compared, not results:
    with e4m3 matrices a prompt's activations are rounded with a scale for each row, of which each
    rank has only a part."""
    ranks = Ranks.of_torchrun()
    own = f"cuda:{ranks.local_rank}"
    logits = lambda model: logits_of(model, torch.arange(5, 47) * 7 % 290, 40, 1, 1)
    cases = ("grouped queries", "one key/value head, bias, tied", "experts", "e4m3", "8-bit cache")
    for case in cases:
        name, options = PARALLEL[case]
        plain = dict(dtype="fp32", device=own, backend="torch", format=options.get("format"))
        # in half precision, rounding may send a token to another expert
        for dtype in ("fp32",) if case == "experts" else ("fp16", "bf16"):
            exact = logits(load(folder / name, **plain))
            one = logits(load(folder / name, dtype=dtype, device=own, **options))
            model = load(folder / name, dtype=dtype, device="cuda", ranks=ranks, **options)
            for exchange in (model.exchange, None):
                whole = kernels.ops(model.backend)
                model.ops = exchange_module.cut_ops(ranks, whole, exchange, False)
                ours = logits(model)
                assert torch.equal(ours, ranks.broadcast(lambda ours=ours: ours)), "ranks differ"
                assert nmse(ours, exact) < 2 * nmse(one, exact) + 1e-10, (case, dtype, exchange)
                check_prompts_in_graphs(model)
    assert model.exchange, "these GPUs do not reach each other's memory"
    stress(ranks, model.device)
    ranks.finish()
    os._exit(0)


def check_prompts_in_graphs(model: Llama) -> None:
    """Captured and replayed, in turn with steps that are not."""
    passes, plain, start = Passes(model, size=300), Passes(model, size=300), 0
    for T in (40, 9, 33, 1, 16, 40, 90, 66, 1):  # the last but one at the end of the context
        ids = (torch.arange(T) * 7 % 290 + 5).tolist()
        logits = passes.prefill(ids, start).cpu()
        assert nmse(logits, plain.forward(ids, start)[-1].cpu()) < 1e-3, T
        theirs = model.ranks.broadcast(lambda logits=logits: logits)
        assert torch.equal(logits, theirs), "ranks differ"
        start += T


# of an exchange under stress: the sums of a round, and how many numbers each has
SLOTS, SUMMED = 64, 4096


def stress(ranks: Ranks, cuda: torch.device, rounds: int = 4000) -> None:
    """Rounds as graphs: chains of sums whose terms are different whole numbers in each round. In
    all graphs but the first, the rank is late at random places."""
    late, total = random.Random(SEED + ranks.rank), SLOTS * ranks.size * (ranks.size + 1) // 2
    blank = partial(torch.zeros, device=cuda)
    matrices = [Matrix(blank(SUMMED, 64, dtype=torch.float16)) for _ in range(SLOTS)]
    for m in matrices:
        m.data[:, 0] = ranks.rank + 1
    exchange = exchange_module.make_exchange(ranks, matrices, SUMMED, "triton", cuda, torch.float32)
    number, wrong = blank(1), blank(1, dtype=torch.int64)
    x, y, several = blank(8, 64, dtype=torch.float16), blank(8, SUMMED), blank(50, SUMMED)

    def chain(is_late: bool) -> None:
        number.copy_((number + 1) % 1009)
        x[:, 0] = number[0]
        y.zero_()
        for i, m in enumerate(matrices):
            if is_late and late.random() < 0.1:
                torch.cuda._sleep(late.randrange(100_000))
            T = (1, 8)[i // 2 % 2]
            exchange.linear_add(x[:T], m, y[:T])
            if i % 8 > 5:
                several.zero_()
                exchange.term(m, several).copy_(number * (ranks.rank + 1))
                exchange.add_terms(m, several, False)
                wrong.add_((several != total * number / SLOTS).sum())
        wrong.add_((y[:1] != total * number).sum() + (y[1:] != total * number / 2).sum())
        exchange.end_round()

    stream, graphs = torch.cuda.Stream(), [torch.cuda.CUDAGraph() for _ in range(4)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        chain(True)
    for graph in graphs:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            chain(graph is not graphs[0])
    for i in range(rounds):
        with torch.cuda.stream(stream):
            graphs[late.randrange(4) if i < rounds // 4 else 0].replay()
            if late.random() < 0.05:
                torch.cuda._sleep(late.randrange(2_000_000))
        if late.random() < 0.01:
            time.sleep(late.random() * 0.005)
        if i % 100 == 99:  # only about a thousand launches can be queued
            torch.cuda.synchronize()
    assert wrong.item() == 0, "sums of another round"


# ---- ranks: processes started by torchrun


def torchrun(*arguments, size: int = 2, **options) -> subprocess.Popen:
    flags = f"--nproc-per-node {size} --master-port {free_port()}"
    starter = str(HERE / "ranks" / "torchrun.py")
    command = [sys.executable, starter, *flags.split(), *map(str, arguments)]
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pipes["env"] = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, **pipes | options)


def torchrun_bash(script: str, *arguments, **options) -> subprocess.Popen:
    """Each rank runs a bash script; $RUN in it is our program with these arguments."""
    command = [sys.executable, HERE / "run.py", *arguments, "--device", "cpu"]
    script = script.replace("$RUN", shlex.join(map(str, command)))
    return torchrun("--no-python", "bash", "-c", script, **options)


def errors_in(err: bytes) -> list[str]:
    return re.findall(r"^error: .*", err.decode(), re.MULTILINE)


def test_torchrun_writes_what_one_process_writes(tiny, cli, tmp_path):
    """The template asks for the time, which is another for the second rank."""
    template = "{{ 'day' if strftime_now('%p') == 'PM' else 'good night' }} "
    template += "{{ messages[-1].content }}"
    template += "{% if messages[-1].content == 'bad' %}{{ raise_exception('too bad') }}{% endif %}"
    (tmp_path / "t").write_text(template)
    flags = ("-m", tiny, "--chat", "--chat-template", tmp_path / "t", "-n", 6, "--temp", 0)
    flags += ("--dtype", "fp32", "--ignore-eos")
    script = "[ $RANK = 0 ] || export TZ=XXX12; exec $RUN"
    process = torchrun_bash(script, *flags, stdin=subprocess.PIPE)
    lines = b"One\n/clear\nbad\nTwo\n"
    out, err = process.communicate(lines + b"\xff\n", timeout=PATIENCE)
    assert process.returncode == 0, err
    assert out.decode() == cli(*flags, stdin=lines)[1]
    assert err.count(b"generated 12 tokens") == 1 and err.count(b"not UTF-8") == 1
    assert b"cpu in 2 processes, sums through gloo" in err
    assert "too bad" in errors_in(err)[0]


def test_torchrun_interrupted_at_the_prompt(tiny):
    flags = (HERE / "run.py", "--chat", "-m", tiny, "--device", "cpu")
    process = torchrun(*flags, stdin=subprocess.PIPE)
    while not process.stderr.readline().startswith(b"chat "):
        pass
    process.send_signal(signal.SIGINT)
    err = process.stderr.read()
    assert process.wait(PATIENCE) == 130 and not errors_in(err), err
    assert b"terminate called" not in err and b"Traceback" not in err, err


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        # which is what is left of one that has ended
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    return False


@pytest.mark.parametrize("how", ["killed", "interrupted", "stdout closed"])
def test_torchrun_ends_all_ranks(tiny, how, tmp_path):
    # torchrun ends whoever is left when the first has gone, but not before it has said why
    script = 'trap "" TERM; $RUN & echo $! >$RANK; wait $!'
    flags = ("-m", tiny, "-p", "Once", "-c", 100_000, "--ignore-eos")
    process = torchrun_bash(script, *flags, cwd=tmp_path)
    process.stdout.read(20)
    first, second = (int((tmp_path / rank).read_text()) for rank in "01")
    if how == "stdout closed":
        process.stdout.close()
    elif how == "killed":
        os.kill(second, signal.SIGKILL)
    else:  # Ctrl-C reaches torchrun, which passes it on
        process.send_signal(signal.SIGINT)
    err = process.stderr.read()
    assert process.wait(PATIENCE) != 0 and not is_running(first) and not is_running(second)
    said = [] if how == "interrupted" else ["error: another process has ended"]
    assert errors_in(err) == said, err


def test_torchrun_reports_one_error(tiny):
    folder = f"./{tiny.parent.name}/{tiny.name}"  # which the second rank looks for elsewhere
    script = "[ $RANK = 0 ] || cd /; exec $RUN"
    process = torchrun_bash(script, "-p", "Once", "-m", folder, cwd=tiny.parent.parent)
    _, err = process.communicate(timeout=PATIENCE)
    (error,) = errors_in(err)
    assert process.returncode == 1 and "no file or folder" in error
    assert b"Traceback" not in err and b"FAILED" not in err, err


if __name__ == "__main__":  # started by the tests of several ranks: "forks" or "gpus"
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    if mode == "gpus":
        check_gpus(folder)
    for size in (2, 4):
        torch.multiprocessing.start_processes(
            run_rank, (folder, size, free_port()), size, start_method="fork"
        )
