"""Tests of dev/."""

import copy as copy_module
import functools
import json
import math
import os
import re
import signal
import time
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import bench
import launch
import products
from bits.int4 import INT4
from cards import sizes as launch_sizes
from dev import compare, constrained, fuzz, mutate, steps
from dev import kernels as op_table
from dev import passes as dev_passes
from dev import tune as tuner
from figures import plot
from fp8 import E4M3
from loading.names import formats_of, layer_tensors, model_parts, tensor_in
from loading.random_model import random_weights
from model import Llama
from passes import Passes
from tests.helpers import (
    DEVICE,
    HERE,
    PATIENCE,
    SEED,
    TALES,
    assert_close,
    assert_refused,
    caller,
    fails,
    flags_of_bench,
    in_shell,
    objects,
    picked,
    read_config_like,
    rows_of,
    tiny_llama,
)

# ---- what a developer measures


@pytest.fixture
def dev_cli(capfd, monkeypatch, quick_ceilings):
    """A script of dev/ in this process, on a CPU: run(script, *arguments)."""
    return lambda script, *given: caller(script.main, monkeypatch, capfd, "--device", "cpu")(*given)


def test_kernels_cost():
    halves, in_8_bits = tiny_llama(torch.float16), tiny_llama(torch.float16, E4M3)
    cost = op_table.cost
    # Wqkv has (4 + 2 * 2) * 2 = 16 rows of 8; x and norm have 8 elements, q, k and v 16
    assert cost("rmsnorm_qkv_rope", halves, 1) == (2 * (16 * 8 + 8 + 8 + 16), 2 * 16 * 8)
    # 3 tokens after 5: they see 6 + 7 + 8 = 21 keys; 8 cached positions of 2 heads of 2, for keys
    # and for values
    assert cost("attention", halves, 3, 5) == (2 * (3 * 8 * 2 + 2 * 8 * 4), 4 * 8 * 21)
    swiglu = cost("rmsnorm_swiglu", tiny_llama(torch.float32), 2)
    assert swiglu == (4 * (24 * 8 + 2 * 8 + 8 + 2 * 12), 2 * 2 * 24 * 8)
    assert cost("w2", in_8_bits, 1) == (8 * 12 + 4 * 8 + 2 * (12 + 8 + 8), 2 * 8 * 12)
    in_8_bits.weights.layers[1].w2 = halves.weights.layers[1].w2
    assert cost("w2", in_8_bits, 1)[0] == (8 * 12 + 4 * 8 + 2 * 8 * 12) / 2 + 2 * (12 + 8 + 8)
    assert cost("rmsnorm_linear", halves, 1)[0] == 2 * (10 * 8 + 8 + 8) + 4 * 10
    # One token goes through 2 of 4 experts; of two tokens a quarter of the experts has none
    sparse = tiny_llama(torch.float16, n_experts=4, experts_per_token=2)
    eight = tiny_llama(torch.float16, n_experts=8, experts_per_token=2)
    assert cost("route", eight, 1) == (2 * (8 * 8 + 8 + 8) + 4 * 8, 2 * 8 * 8)
    swiglu = cost("rmsnorm_swiglu", sparse, 1)
    assert swiglu == (2 * (2 * 24 * 8 + 8 + 8 + 2 * 12), 2 * 2 * 24 * 8)
    assert cost("w2", sparse, 2) == (2 * (3 * 8 * 12 + 2 * (2 * 12 + 2 * 8)), 2 * 2 * 2 * 8 * 12)


@pytest.mark.parametrize("family, own", [("Qwen2", "qkv_bias"), ("Qwen3", "qk_norm")])
def test_kernels_of_a_family(dev_cli, tmp_path, family, own):
    """Of a config.json: it has the tensors of its family, every op runs, and transformers gets the
    same shapes."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=70)
    config = getattr(transformers, f"{family}Config")(**sizes, num_key_value_heads=2, head_dim=8)
    config.save_pretrained(tmp_path)
    args = flags_of_bench("-t", 1, "-m", f"random:{tmp_path}/config.json:2")
    model = bench.open_model(args, "fp32", 16, "none")
    assert len(model.weights.layers) == 2
    layer = model.weights.layers[0]
    assert all(tensor_in(model.weights, t) is not None for t in layer_tensors(model.config))
    has = {"qkv_bias": layer.wqkv.bias is not None, "qk_norm": layer.qk_norm is not None}
    assert [name for name in has if has[name]] == [own]
    theirs = compare.transformers_model(args, torch.float32, torch.device("cpu"))
    assert theirs.config.model_type == family.lower() and theirs.config.num_hidden_layers == 2
    flags = "-p 4 -d 7 -o jsonl -t 1".split()
    code, out, err = dev_cli(op_table, "-m", args.model, *flags)
    prompt = "rmsnorm rmsnorm_qkv_rope attention wo w2 rmsnorm_swiglu".split()
    expected = [(op, 1, 100) for op in (*prompt, "rmsnorm_linear", "sample")]
    expected += [(op, 4, 7) for op in prompt]
    found = [(row["op"], row["tokens"], row["depth"]) for row in objects(out)]
    assert code == 0 and found == expected and "bound by: " in err, err


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_random_experts_of_transformers(tmp_path, family):
    """As many weights as ours, and as many experts of a token."""
    sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    sizes |= dict(intermediate_size=48, moe_intermediate_size=48, vocab_size=70)
    config = getattr(transformers, f"{family}Config")(**sizes, num_experts_per_tok=2)
    config.save_pretrained(tmp_path)
    args = flags_of_bench("-t", 1, "-m", f"random:{tmp_path}/config.json:2")
    ours = bench.open_model(args, "fp32", 16, "none")
    theirs = compare.transformers_model(args, torch.float32, torch.device("cpu"))
    assert theirs.num_parameters() == sum(
        math.prod(part.shape(ours.config)) for part in model_parts(ours.config).values()
    )
    assert theirs.config.num_experts_per_tok == ours.config.experts_per_token == 2


@pytest.mark.parametrize("experts", [dict(), dict(n_experts=4, experts_per_token=2)])
def test_kernels_equal_plain_pytorch(experts):
    """What is timed beside each other computes the same; but for SwiGLU, whose rows it mixes up."""
    model = tiny_llama(torch.float32, **experts)
    for T, start_pos in ((1, 9), (5, 0), (5, 9)):
        pass_ = Passes(model).pass_at(start_pos, T)
        inputs = op_table.random_inputs(model, T)
        ours = op_table.ops_of(model, pass_, inputs)
        plain = op_table.plain_ops(model, pass_, inputs, start_pos)
        same = ["rmsnorm", "rmsnorm_qkv_rope", "attention", "wo"]
        if experts:
            assert picked(ours["route"](1)).ids.tolist() == plain["route"](1).indices.tolist()
        if T == 1 or not experts:  # several tokens have nothing beside their experts
            same.append("w2")
        assert T > 1 or ours["rmsnorm_swiglu"](1).shape[-1] == plain["rmsnorm_swiglu"](1).shape[-1]
        for op in same:
            expected = plain[op](1)  # first, since ours may overwrite the residual
            if op == "attention":  # PyTorch's has heads before tokens
                expected = expected[0].transpose(0, 1)
            assert_close(ours[op](1).reshape(expected.shape), expected)
    ours = op_table.ops_of(model, pass_, op_table.random_inputs(model, 1))
    assert ours["rmsnorm_linear"](0).isfinite().all()


def test_kernels_of_experts(dev_cli, tmp_path):
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=70)
    experts = dict(num_local_experts=4, num_experts_per_tok=2)
    transformers.MixtralConfig(**sizes, num_key_value_heads=2, **experts).save_pretrained(tmp_path)
    name = f"random:{tmp_path}/config.json:2"
    code, out, err = dev_cli(op_table, "-m", name, *"-p 4 -d 0 -o jsonl -t 1".split())
    beside = {(row["op"], row["tokens"]): row["x PyTorch"] for row in objects(out)}
    assert code == 0 and beside["route", 1] and beside["route", 4] and beside["w2", 1], err
    assert beside["w2", 4] is beside["rmsnorm_swiglu", 4] is None


def test_compare_with_transformers(dev_cli, tiny, tiny_saved, monkeypatch):
    """Beside each of our rows, in the same dtype, theirs. A prompt takes a second, each of our
    steps a quarter of one, and what transformers generates a second for each token there is."""

    def wall_times(run, *_) -> list[float]:
        ids = run()
        return [float(ids.shape[1]) if torch.is_tensor(ids) and ids.dim() == 2 else 1.0]

    monkeypatch.setattr(bench, "wall_times", wall_times)
    monkeypatch.setattr(bench, "generation_speeds", lambda *_: [4.0])
    monkeypatch.setattr(bench, "first_token_ms", lambda *_: 7.0)
    flags = "-p 4 -n 2 -r 1 -d 9 -o json".split()
    models = ("-m", f"random:{tiny / 'config.json'}", "-m", tiny)
    rows = rows_of(dev_cli(compare, *models, *flags, "--format", "none,e4m3"))
    assert [row["first_ms"] for row in rows] == 2 * [None, 7.0, None, 7.0, None, None, None]
    keys = ("format", "test", "backend", "tokens_per_s", "ratio")
    assert [tuple(row[key] for key in keys) for row in rows] == 2 * [
        ("none", "pp4 @ d9", "torch", 4.0, None),
        ("none", "tg2 @ d9", "torch", 4.0, None),
        ("e4m3", "pp4 @ d9", "torch", 4.0, None),
        ("e4m3", "tg2 @ d9", "torch", 4.0, None),
        ("none", "pp4 @ d9", "transformers", 4.0, 1.0),
        ("none", "tg2 @ d9", "transformers, eager", 1.0, 4.0),
        ("none", "tg2 @ d9", "transformers, static cache", 1.0, 4.0),
    ]
    result = dev_cli(compare, "-m", tiny_saved, *flags)
    assert "transformers is not measured: it needs --format none" in result[2]
    assert [row["backend"] for row in rows_of(result)] == ["torch"] * 2


def test_steps_rows(dev_cli, tiny, tiny_model, monkeypatch):
    """Each kernel starts a second before the one before it ends, but for the last, which starts a
    second later."""
    code, out, err = dev_cli(steps, "-m", tiny, "-p", 4)
    assert "the Triton kernels need a GPU" in err and "| rmsnorm_swiglu: " in out
    assert code == 0 and out.count("overall efficiency") == 2 and "gaps between kernels" in out
    monkeypatch.setattr(bench, "read_ceiling", lambda _: 1e9)
    layer = ["_vector_kernel", "_attention_kernel", *["_vector_kernel"] * 3]
    step = ["_embedding_kernel", *layer * 2, "_vector_kernel", "_sample_best_kernel"]
    events = [steps.Event(name, 2.0 * i, 2.0 * i + 3) for i, name in enumerate(step[:-1])]
    events.append(steps.Event(step[-1], events[-1].end + 1, events[-1].end + 2))
    rows, ms, gaps, _ = steps.profile_rows(events, tiny_model, 1, 100)
    products = {f"{op}: _vector_kernel": 1 + (op != "rmsnorm_linear") for op in op_table.PRODUCTS}
    others = {"_embedding_kernel": 1, "_attention_kernel": 2, "_sample_best_kernel": 1}
    assert {row["kernel"]: row["count"] for row in rows} == products | others
    assert gaps == 1e3 and ms == pytest.approx(sum(r["ms"] for r in rows) + 1e3)
    w2 = next(row for row in rows if row["kernel"].startswith("w2"))
    moved = 2 * op_table.cost("w2", tiny_model, 1)[0]
    assert w2["% of read"] == pytest.approx(100 * moved / 1e9 / (1e-3 * w2["ms"]))
    layer[3:3] = ["_few_logits_kernel"]
    step = [*layer * 2, "_vector_kernel"]
    events = [steps.Event(name, 2.0 * i, 2.0 * i + 1) for i, name in enumerate(step)]
    sparse = tiny_llama(torch.float32, n_experts=4, experts_per_token=2)
    rows, *_ = steps.profile_rows(events, sparse, 1, 100)
    read = {row["kernel"]: 1e9 * row["GB/s"] * row["ms"] * 1e-3 for row in rows}
    assert read["_few_logits_kernel"] == pytest.approx(2 * op_table.cost("route", sparse, 1)[0])
    assert read["w2: _vector_kernel"] == pytest.approx(2 * op_table.cost("w2", sparse, 1)[0])


@pytest.mark.parametrize("format", [None, INT4])
@pytest.mark.parametrize("experts", [dict(), dict(n_experts=4, experts_per_token=2)])
def test_tuner_writes_the_sizes_that_products_take(experts, format, monkeypatch, tmp_path):
    """By a clock that each product slows down, unless it takes the best of two sizes."""
    sizes = dict(dim=256, n_layers=1, n_heads=4, n_kv_heads=4, head_dim=64, hidden_dim=256)
    c = read_config_like(**sizes, vocab_size=64, **experts)
    weights = random_weights(c, torch.float16, DEVICE, formats_of(c, format), "triton")
    model = Llama(c, weights, "triton", DEVICE, torch.float16, 128)
    tables, slow = copy_module.deepcopy(launch_sizes.tables()), {}
    candidates = dict(
        vector=[[64, 1024, 4], [16, 1024, 4]],
        stream=[[64, 2048, 3, 3], [32, 2048, 3, 3]],
        few=[None, [32, 2, 4, 8, 1]],
    )

    def take(kind, sizes_of, device, bits, op, *others):
        found = sizes_of(device, bits, op, *others)
        slow[op] = found is None or list(found) != candidates[kind][1]
        return found

    def seconds(passes, T, depth):
        slow.clear()
        pass_ = passes.pass_at(depth, T)
        model.forward(pass_, pass_.logits)
        return 1.0 + sum(slow.values())

    for kind, tried in candidates.items():
        monkeypatch.setattr(tuner, f"{kind}_candidates", lambda *_, tried=tried: tried)
        taken = functools.partial(take, kind, getattr(launch_sizes, f"{kind}_sizes"))
        monkeypatch.setattr(products, f"{kind}_sizes", taken)
    for module in (launch_sizes, tuner):
        monkeypatch.setattr(module, "tables", lambda: tables)
    exact = lambda table, key: table[key if key in table else min(table)]
    monkeypatch.setattr(launch_sizes, "nearest", exact)
    monkeypatch.setattr(launch_sizes, "TABLES_FILE", tmp_path / "launch.json")
    # no kernel need run for this
    monkeypatch.setattr(launch, "run_or_compile", lambda *_, **__: None)
    monkeypatch.setattr(tuner, "pass_seconds", seconds)
    monkeypatch.setattr(Llama, "uses_graphs", True)
    monkeypatch.setattr(bench, "open_model", lambda *_: model)
    tuner.tune(SimpleNamespace(dtype=["fp16"], format=[None]))
    ours = {"experts_swiglu", "experts_linear_add"} if experts else {"rmsnorm_swiglu"}
    ours |= {"rmsnorm_qkv_rope", "linear_add", "rmsnorm_linear"}
    kept_in_8_bits = {"rmsnorm_linear"} if format else set()
    for T in (1, 8, 16):
        seconds(Passes(model), T, tuner.DEPTH)
        assert slow.keys() == ours and {op for op in ours if slow[op]} == kept_in_8_bits, slow
    written = json.loads((tmp_path / "launch.json").read_text())
    assert written == json.loads(json.dumps(tables))


def test_passes_rows(dev_cli, tiny):
    flags = ("-T", "2,5", "--dtype", "fp32", "-d", 7, "-o", "json")
    rows = rows_of(dev_cli(dev_passes, "-m", tiny, *flags))
    assert [row["tokens"] for row in rows] == [1, 2, 5] and rows[0]["ratio"] == 1


def test_constrained_rows(dev_cli):
    flags = ("-n", 6, "-r", 2, "--dtype", "fp32", "-o", "json")
    free, schema = rows_of(dev_cli(constrained, "-m", "random:tales", "--tokenizer", TALES, *flags))
    assert (free["text"], schema["text"]) == ("free", "schema") and free["ratio"] == 1
    assert schema["ratio"] == schema["tokens_per_s"] / free["tokens_per_s"]
    assert 0 < schema["first_ms"] < 1e3 * PATIENCE


def test_picture_of_the_readme(capfd, monkeypatch, tmp_path):
    draw = caller(plot.main, monkeypatch, capfd)
    record = HERE / "figures/h200.jsonl"
    assert draw(record, tmp_path / "h200.svg") == (0, "", "")
    drawn, kept = ((folder / "h200.svg").read_text() for folder in (tmp_path, HERE / "figures"))
    texts = [re.findall(r">([^<>\n]+)</text>", picture) for picture in (drawn, kept)]
    assert texts[0] == texts[1], "the README's picture is not that of its record: draw it again"
    assert draw(record, tmp_path / "x.xyz")[2].count("Format 'xyz' is not supported") == 1
    for text, said in (("{", "not a row printed by bench.py"), ("", "there is nothing to draw")):
        (tmp_path / "record").write_text(text)
        assert_refused(draw(tmp_path / "record", tmp_path / "y.svg"), said)


def test_dev_errors_are_one_line(dev_cli, monkeypatch):
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    assert_refused(dev_cli(compare, "-m", TALES), "a package is not installed: transformers")
    assert_refused(dev_cli(tuner, "-m", TALES), "on a GPU")
    for script, *wrong in (
        (op_table, "--format none,e4m3", "-n 4", "-r 4", "-m a -m b"),
        (steps, "-p 0", "-p 4,5", "-o json"), (tuner, "-p 4"), (dev_passes, "-T 0", "-d 4,5"),
        (compare, "-p 0 -n 0", "--perplexity x"),
    ):  # fmt: skip
        for flags in wrong:
            assert_refused(dev_cli(script, *flags.split()), code=2)


# ---- fuzzing and mutants


def test_fuzz_finds_nothing():
    flags = f"--seed {SEED} --cases 100 --seconds {PATIENCE} --limit {PATIENCE}"
    done = in_shell(f"TRITON_INTERPRET=0 $PYTHON $HERE/dev/fuzz.py {flags}")
    said = done.stdout + done.stderr
    assert done.returncode == 0 and f"100 cases from seed {SEED}" in done.stdout, said


WRONG = {  # a case that goes wrong: what the fuzzer says of it
    "another exception": (lambda: {}["x"], "KeyError"),
    "two lines": (fails(ValueError("a\nb")), "ValueError"),
    "no message": (fails(ValueError()), "ValueError"),
    "a warning": (lambda: warnings.warn("x", stacklevel=1), "UserWarning"),
    "no end": (lambda: time.sleep(60), "not finished after 1 seconds"),
    "death": (lambda: os.kill(os.getpid(), signal.SIGKILL), "the process died"),
    "too much memory": (lambda: bytearray(3 << 30), "MemoryError"),
    "a file elsewhere": (lambda: Path("/etc/hostname").read_bytes(), "opens /etc/hostname"),
    "a program": (lambda: os.system("true"), "os.system"),
}


@pytest.mark.parametrize("how", WRONG)
def test_fuzz_notices(how, monkeypatch):
    act, expected = WRONG[how]

    def main() -> int:  # as that of run.py with --debug
        try:
            act()
        except Exception:
            traceback.print_exc()
            return 1
        return 0

    def kind(rng, bases, place) -> bool:
        fuzz.watched.folder = str(place)
        return fuzz.ends_well(main)

    monkeypatch.setattr(fuzz, "KINDS", {kind: 1})
    outcomes, failures = fuzz.run_cases([SEED], {}, limit=1 if how == "no end" else PATIENCE)
    assert len(failures) == sum(outcomes.values()) == 1 and expected in failures[SEED]


def test_mutants_fit_the_program():
    assert list(mutate.stale(mutate.MUTANTS)) == []
    assert all(mutant.old != mutant.new and mutant.words for mutant in mutate.MUTANTS)
