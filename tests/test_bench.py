"""Tests of bench.py."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import transformers

import bench
from engine import Engine
from fp8 import E4M3
from loading import random_model
from loading.checkpoint import load, open_tokenizer
from loading.names import formats_of, weight_bytes
from loading.place import FORMATS
from talk import bench_flags
from tests.helpers import (
    NAN,
    TEXT,
    assert_refused,
    caller,
    decode_in_graphs,
    edit,
    flags_of_bench,
    logits_of,
    objects,
    oracle,
    other_model,
    read_config_like,
    rows_of,
    tiny_llama,
    train_sentencepiece,
)


def test_bench_rows_by_hand(monkeypatch, capsys):
    """A token takes 2 * 960 operations in the layers and 2 * 80 for the logits, and 2 * 4 * 8 for
    each key that it sees: 4 tokens 8480, after 5 others 9760. A step reads 1040 weights and
    2 * 2 * 4 numbers for each position: 4224 bytes with one, 4544 with six."""
    for name in ("read_ceiling", "product_ceiling"):
        monkeypatch.setattr(bench, name, lambda *_: 1e3)
    monkeypatch.setattr(bench, "open_model", lambda *_: tiny_llama(torch.float32))
    monkeypatch.setattr(bench, "prompt_speeds", lambda *_: [100.0, 300.0])
    monkeypatch.setattr(bench, "generation_speeds", lambda *_: [50.0])
    args = flags_of_bench("-p", 4, "-n", 2, "-d", "0,5")
    rows = [*bench.throughput(args, "fp32", "none")]
    found = [(r.test, r.tokens_per_s, r.std, r.percent_of_ceiling) for r in rows]
    spread = 2**0.5 * 100
    assert found == [
        ("pp4", 200, pytest.approx(spread), pytest.approx(100 * 200 * 8.48 / 4)),
        ("pp4 @ d5", 200, pytest.approx(spread), pytest.approx(100 * 200 * 9.76 / 4)),
        ("tg2", 50, None, pytest.approx(100 * 50 * 4.224)),
        ("tg2 @ d5", 50, None, pytest.approx(100 * 50 * 4.544)),
    ]
    assert {r.size_gb for r in rows} == {4160 / 1e9}
    err = capsys.readouterr().err
    # a warm-up and a run: 8.48 + 9.76 + 2 * 4.224 + 2 * 4.544 seconds each
    assert "this takes at least 72 s, at the speed of memory and arithmetic" in err
    assert "ceilings: read 0.0 GB/s, float32 product 0.00 TFLOP/s" in err
    in_8_bits = tiny_llama(torch.float16, E4M3)  # a byte a weight, and 4 for each of 60 rows
    assert bench.decode_bytes(in_8_bits, 0) == 2 * (480 + 4 * 56) + 80 + 4 * 10


def test_bench_counts_the_experts_of_a_token():
    """Of 4, the 2 that it goes through; and the router."""
    model = tiny_llama(torch.float32, n_experts=4, experts_per_token=2)
    each = 16 * 8 + 8 * 8 + 4 * 8 + 2 * (24 * 8 + 8 * 12)  # attention, router, experts
    assert bench.decode_bytes(model, 0) == 4 * (2 * each + 10 * 8)
    seen = 2 * 4 * 8 * 55  # keys of 10 tokens, in two layers
    assert bench.prefill_operations(model, 10) == 2 * (10 * 2 * each + 10 * 8) + seen
    kept = 2 * (each - 4 * 8 + 2 * (24 * 8 + 8 * 12)) + 10 * 8  # all experts, but no router
    assert sum(w.nbytes for w in model.weights.matrices) == 4 * kept


def test_bench_speeds_by_hand(tiny_model, monkeypatch):
    """By a clock: a prompt in half a second, each step in 9, but 90 while it is warmed up. Only the
    new tokens count, and no more are evaluated."""
    seen, engine, speeds = [], Engine(tiny_model), bench.prompt_speeds
    evaluate = engine.passes.evaluate_prompt
    note = lambda ids, start: seen.append((start, len(ids)))
    measured = lambda ids, start, first: note(ids, start) or evaluate(ids, start, first)
    timed = lambda run, *_: [run().sum() * 0 + 0.5, run().sum() * 0 + 0.25]
    monkeypatch.setattr(bench, "wall_times", timed)
    monkeypatch.setattr(engine.passes, "evaluate_prompt", measured)
    assert speeds(engine, bench_flags.Test("pp", 12, 48), 2) == [24.0, 48.0]
    assert seen == [(0, 48), (48, 12), (48, 12)]
    assert speeds(engine, bench_flags.Test("pp", 12, 0), 2) == [24.0, 48.0]
    assert seen[3:] == [(0, 12), (0, 12)]
    for depth in (0, 7):
        # the prompt, and five tokens
        decode_in_graphs(monkeypatch, ms=itertools.chain([90_000.0] * 6, [9000.0] * 99))
        found = bench.generation_speeds(engine, bench_flags.Test("tg", 5, depth), 3)
        assert found == [pytest.approx(1 / 9)] * 3
        assert len(engine.slots[0].tokens) == max(depth, 1) + 5


def test_bench_quality_by_hand():
    ln2 = 0.6931471805599453
    values = dict(loss=[ln2, 3 * ln2], other_loss=[ln2, ln2], kl=[0.5, 0.1], same_top=[1.0, 0.0])
    parts = [{name: torch.tensor([both[i]]) for name, both in values.items()} for i in (0, 1)]
    assert bench.quality(parts, text_bytes=4) == pytest.approx({
        "tokens": 2, "perplexity": 4, "standard_error": 4 * ln2, "bits_per_byte": 1,
        "perplexity_ratio": 2, "mean_kl": 0.3, "kl_99": 0.496, "same_top_%": 50,
    })  # fmt: skip


@pytest.mark.parametrize("stride", [24, 10, 1])
@pytest.mark.parametrize("bos", [1, -1])
def test_bench_perplexity_equals_transformers(tiny, tiny_model, stride, bos):
    """Beside another model, from which this one diverges: KL(other || this). Without a bos, a
    window starts with the token before it."""
    theirs = transformers.LlamaForCausalLM.from_pretrained(tiny)
    other = other_model(tiny_model)
    ids, ctx = torch.randint(3, 300, (70,)).tolist(), 24
    found = [*bench.perplexity(tiny_model, ids, bos, ctx, stride, against=other)]
    text = [1, *ids] if bos == 1 else ids
    values = {name: torch.cat([part[name] for part in found]).double() for name in found[0]}
    expected = {name: [] for name in values}
    for i in range(1, len(text)):  # each counts in the first window that has it
        start = next(start for start in range(0, 70, stride) if i <= start + ctx)
        window = text[start:i]
        if bos == 1:
            window[0] = 1
        rows = oracle(theirs, window), logits_of(other, window)
        q, p = (row[-1].log_softmax(-1) for row in rows)
        kl = torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)
        same = float(q.argmax() == p.argmax())
        for name, value in zip(expected, (-q[text[i]], -p[text[i]], kl, same)):
            expected[name].append(float(value))
    for name, theirs in expected.items():
        assert values[name].tolist() == pytest.approx(theirs, abs=1e-3), name
    assert values.keys() == {"loss", "other_loss", "kl", "same_top"}


@pytest.fixture
def bench_cli(capfd, monkeypatch, quick_ceilings):
    return caller(bench.main, monkeypatch, capfd)


QUICK = ["-p", "4", "-n", "2", "-r", "1", "--device", "cpu"]


def test_bench_speed_rows(bench_cli, tiny, tiny_saved):
    axes = ["-d", "0,5", "--dtype", "fp32,bf16", "--format", "none,e4m3", "--kv-fp8"]
    rows = rows_of(bench_cli("-m", tiny, *QUICK, *axes, "-o", "json"))
    tests = ("pp4", "pp4 @ d5", "tg2", "tg2 @ d5")
    expected = itertools.product(("fp32", "bf16"), ("none", "e4m3"), ("e4m3",), tests)
    assert [(r["dtype"], r["format"], r["kv"], r["test"]) for r in rows] == [*expected]
    assert all(r["tokens_per_s"] > 0 and r["percent_of_ceiling"] > 0 for r in rows)
    given = ["-m", tiny, "-m", tiny_saved, "-p", "4", "-p", "8,9", "-n", "0", *QUICK[4:]]
    code, out, err = bench_cli(*given, "-ngl", "9", "-o", "jsonl")
    expected = itertools.product((f"{tiny} none", f"{tiny_saved} e4m3"), ("pp4", "pp8", "pp9"))
    assert code == 0 and "-ngl: no effect here" in err
    assert [(f"{r['model']} {r['format']}", r["test"]) for r in objects(out)] == [*expected]


def test_bench_prints_rows_at_once(bench_cli, tiny, capfd, monkeypatch):
    shown, original = [], bench.throughput

    def rows(*args):
        for row in original(*args):
            yield row
            shown.append(capfd.readouterr().out)

    monkeypatch.setattr(bench, "throughput", rows)
    assert bench_cli("-m", tiny, *QUICK)[:2] == (0, "")
    first, second = shown
    assert "pp4" in first and "tg2" not in first and len(first.splitlines()) == 3
    assert second.count("tg2") == 1


def test_bench_shapes_as_published():
    """The small ones tie their embedding, which counts once."""
    tied = {
        "Llama-3.2-1B": 1_235_814_400, "Llama-3.2-3B": 3_212_749_824, "Qwen2.5-0.5B": 494_032_768,
        "Qwen2.5-1.5B": 1_543_714_304, "SmolLM2-135M": 134_515_008, "SmolLM2-360M": 361_821_120,
    }  # fmt: skip
    published = tied | {
        "1.1b": 1_100_048_384, "7b": 6_738_415_616, "8b": 8_030_261_248, "13b": 13_015_864_320,
        "70b": 68_976_648_192, "Qwen3-30B-A3B": 30_532_122_624, "Mixtral-8x7B": 46_702_792_704,
    }  # fmt: skip
    for name, weights in published.items():
        c = replace(random_model.random_config(f"random:{name}"), tie_embeddings=name in tied)
        assert weight_bytes(c, torch.float16, {}) == 2 * weights, name


@pytest.mark.parametrize("form", FORMATS)
def test_bench_random_matrices(form):
    format, c = FORMATS[form], read_config_like(dim=64, n_kv_heads=1, head_dim=16)
    formats = formats_of(c, format)
    weights = random_model.random_weights(c, torch.float32, torch.device("cpu"), formats, "torch")
    layer = weights.layers[0]
    assert layer.wqkv.shape == (96, 64) and layer.wqkv.nbytes == format.nbytes(96, 64)
    assert 0.018 < layer.wqkv.dense().std() < 0.022


def test_bench_perplexity_from_the_command_line(bench_cli, tiny, tiny_saved, tmp_path):
    text = TEXT * 3 + "Größe"
    (tmp_path / "text").write_text(text)
    flags = ("--device", "cpu", "--perplexity", tmp_path / "text", "-o", "json")
    (row,) = rows_of(bench_cli("-m", tiny, *flags, "--against", "bf16"))
    (same,) = rows_of(bench_cli("-m", tiny, *flags, "--dtype", "bf16", "--against", "bf16"))
    assert row["mean_kl"] > 0 and 0 < row["standard_error"] < row["perplexity"]
    bits = row["tokens"] * math.log2(row["perplexity"])
    assert row["bits_per_byte"] == pytest.approx(bits / len(text.encode()), rel=1e-3)
    about = {"model": str(tiny), "dtype": "auto", "format": "none", "kv fp8": False}
    about |= {"against": "bf16", "ctx": 512, "stride": 512}
    assert about.items() <= row.items()
    assert (same["mean_kl"], same["perplexity_ratio"], same["same_top_%"]) == (0, 1, 100)
    assert rows_of(bench_cli("-m", tiny_saved, *flags))[0]["format"] == "e4m3"
    refused = bench_cli("-m", tiny_saved, *flags, "--against", "fp32")
    assert_refused(refused, "--against needs the original")


def test_bench_perplexity_without_a_bos(bench_cli, copy, tmp_path):
    train_sentencepiece(copy, bos_id=-1)
    for name in ("config.json", "generation_config.json"):
        edit(copy / name, bos_token_id=None)
    ids = open_tokenizer(copy).encode(TEXT)
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "two").write_text(open_tokenizer(copy).decode(ids[:2]))
    flags = ("-m", copy, "--device", "cpu", "-o", "json", "--perplexity")
    (row,) = rows_of(bench_cli(*flags, tmp_path / "text"))
    logits = logits_of(load(copy, device="cpu"), ids)[:-1]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
    assert row["tokens"] == len(ids) - 1
    assert row["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-4)
    assert_refused(bench_cli(*flags, tmp_path / "two"), "has 1 tokens to predict")


def test_bench_threads(bench_cli, tiny, request):
    request.addfinalizer(lambda: torch.set_num_threads(1))
    for given, name in (([], "CPU, 1 thread"), (["-t", "2"], "CPU, 2 threads")):
        torch.set_num_threads(2)
        rows = rows_of(bench_cli("-m", tiny, *QUICK, "-o", "json", *given))
        assert {row["device"] for row in rows} == {name}


def test_bench_cells_and_percents(capsys):
    shown = {
        1.0: "1.00", 0.0: "0.00", 1.00071: "1.00071", 0.00037: "0.00037", 1.07: "1.070",
        5.4712: "5.47", 0.9998: "0.99980", 12345.6: "12,346", NAN: "nan", -0.5: "-0.50",
        1e-30: "0.000000000", 99.996: "100.00", 100.0: "100", 7: "7", None: "",
    }  # fmt: skip
    for value, text in shown.items():
        assert bench.cell(value) == text, value
    bench.note_once.cache_clear()
    assert [bench.percent(x, 2) for x in (1, 2, 3, 3)] == [50, 100, 150, 150]
    assert capsys.readouterr().err.count("more than 100% of a ceiling") == 1


def test_bench_errors_are_one_line(bench_cli, tiny, tmp_path):
    (tmp_path / "bad").write_bytes(b"ab\xff")
    (tmp_path / "one").write_text("a")
    few = "has 1 tokens to predict; a mean with its error needs 2 or more"
    for arguments, text in (
        (["-m", "random:9b"], "the shapes are 1.1b, 7b"),
        (["-m", "random:7b:0"], "'0' is not a number of layers"),
        (["-m", "nowhere"], "no file or folder nowhere here"),
        (["-m", tiny, "--perplexity", tmp_path / "bad"], "not UTF-8: byte 0xff at offset 2"),
        (["-m", tiny, "--perplexity", tmp_path / "none"], "none"),
        (["-m", tiny, "--perplexity", tmp_path / "one"], few),
        (["-m", "random:tales", "--perplexity", tmp_path / "one"], "needs a checkpoint"),
    ):
        assert_refused(bench_cli(*arguments), text)
    for flags, text in (
        ("-p x", "-p/--n-prompt: x: must be a whole number"), ("-p -1", "-1: must be"),
        ("-p 0 -n 0", "nothing to measure"), ("-r 0", "must be from 1 to 1,000"),
        ("-p 4,x", "x: must be a whole number"), ("-c 0", "must be from 1"),
        ("-t 0", "must be from 1 to 4,096"), ("--dtype fp8", "'fp8' is not one of auto, fp32"),
        ("--format ,", "'' is not one of none"), ("--perplexity x --stride 600", "skips text"),
        ("--perplexity x --stride 513", "skips text"), ("--stride 4", ""), ("--against fp32", ""),
        ("--perplexity x -p 4", ""), ("--perplexity x --dtype fp32,bf16", "takes one --dtype"),
        ("--perplexity x -m a -m b", "one -m"), ("--perplexity x --format none,e4m3", "--format"),
    ):  # fmt: skip
        assert_refused(bench_cli(*flags.split()), text, code=2)
