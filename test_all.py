"""The tests. `make test` runs them all; they need no GPU and no network. Inputs are random; each run prints its seed.

The Triton kernels run on the GPU if there is one, otherwise in Triton's interpreter; either way they are compiled ahead of
time for every supported architecture.
"""

import bisect
import codecs
import contextlib
import copy as copy_module
import csv
import fcntl
import functools
import gc
import hashlib
import http.server
import inspect
import io
import itertools
import json
import os
import pickle
import pty
import random
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import traceback
import warnings
import weakref
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import sentencepiece
import tokenizers
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
if DEVICE.type == "cpu" and "COMPILE_FOR" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels is imported

import bench
import checkpoint
import few_rows
import few_tokens
import fp8
import fuzz
import hopper
import kernels
import launch
import mutate
import parallel
import plot
import quality
import run
import sampling
import session
import speculation
import template
import terminal
import training
from chat import Chat
from checkpoint import Checkpoint, check_memory, load, read_config, read_sampling, save_fp8, saved_shapes, tensor_shapes
from files import one_line_errors, parts_of, read_part
from fp8 import E4M3, FORMATS, Matrix
from launch import tl
from model import CHUNK, Config, KVCache, Timings, captured, generate, rope_table
from sampling import Sampler, Sampling
from speculation import Draft, Lookup, Pacer, Speculation
from template import TEMPLATES, find_template
from tokenizer import TextStream, Tokenizer, tokenizer_file

HERE = Path(__file__).parent
SEED = int(os.environ.get("TEST_SEED", random.SystemRandom().randrange(1 << 31)))
PATIENCE = 600  # seconds, even on a busy machine: what has not happened by then never will
TEXT = "Once upon a time there was a fox. It said: good day, crow! Żółw zjadł 12 jabłek. [INST] USER: tell me a tale [/INST]\n"


@pytest.fixture(autouse=True)
def seeded():
    print(f"TEST_SEED={SEED}")  # pytest shows it with a failure
    torch.manual_seed(SEED)
    random.seed(SEED)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other


@pytest.fixture(scope="session", autouse=True)
def rounds_to_bf16():
    """To the nearest, as a GPU does: Triton's interpreter truncates, with errors up to twice as large."""
    with pytest.MonkeyPatch.context() as patch:
        if launch.triton:
            from triton.runtime import interpreter

            convert = interpreter._convert_float

            def rounded(x, source, target, mode):
                if source.is_fp32() and target.is_bf16():
                    return torch.tensor(x).bfloat16().view(torch.int16).numpy().view("uint16")
                return convert(x, source, target, mode)

            patch.setattr(interpreter, "_convert_float", rounded)
        yield


GOLDENS = {  # greedy text of models/tales in fp32
    "Once upon a time": "there lived a king who had a daughter who was so beautiful that no one could have her. "
    "The king was so much",
    "The fox said": ', "I am the fox, and the fox is the fox, and the fox is the fox, and the fox',
    "[INST] Tell me a story. [/INST]": "There was once a man who had three sons, and they were both very poor. "
    "One day the eldest said to the",
}


needs_triton = pytest.mark.skipif(launch.triton is None, reason="Triton exists on Linux only")


# ---- checkpoints to load: random tiny Llamas made by transformers, which is also the oracle


SHAPES = {
    "mha": dict(num_attention_heads=4, num_key_value_heads=4),
    "gqa": dict(num_attention_heads=4, num_key_value_heads=2, rope_parameters=dict(rope_type="default", rope_theta=5e5)),
    "mqa, tied": dict(num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=True, rms_norm_eps=1e-3),
    "head_dim": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=24),
    "linear": dict(num_attention_heads=4, rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)),
    "llama3": dict(
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=1e4,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
}


FAMILIES = {  # what each adds to Llama 2, as its config.json has it, but small
    "llama 3.2": dict(
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_parameters=SHAPES["llama3"]["rope_parameters"] | dict(rope_theta=5e5),
        eos_token_id=[2, 3, 4],
    ),
    "smollm2": dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=48, tie_word_embeddings=True),
    "yi": dict(num_key_value_heads=1, rope_parameters=dict(rope_type="default", rope_theta=5e6)),
    "mistral 7b v0.1": dict(model="Mistral", num_key_value_heads=2, sliding_window=256),
    "mistral 7b v0.3": dict(model="Mistral", num_key_value_heads=2, sliding_window=None),
    "mistral nemo": dict(model="Mistral", num_key_value_heads=2, sliding_window=None, head_dim=24),
    "qwen 2.5": dict(model="Qwen2", num_key_value_heads=2),
    "qwen 2.5, tied, longer": dict(
        model="Qwen2",
        num_key_value_heads=1,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=64),
    ),
    "qwen 3": dict(model="Qwen3", num_key_value_heads=2, head_dim=24),
    "yarn as deepseek says it": dict(
        rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=32, beta_fast=16.0, beta_slow=2.0,
            mscale=0.7, mscale_all_dim=0.4,
        ),
    ),
    "yarn, its ramp not rounded": dict(
        rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=2.0, original_max_position_embeddings=128, attention_factor=1.3,
            truncate=False,
        ),
    ),
}  # fmt: skip


def hugging_face_model(vocab_size: int = 300, model: str = "Llama", **shape):
    import transformers

    fields = dict(
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=vocab_size,
        max_position_embeddings=256,
        initializer_range=0.3,  # large enough that logits differ and attention is sharp
        bos_token_id=1,
        eos_token_id=2,
    )
    config = getattr(transformers, f"{model}Config")(**fields | shape)
    model = getattr(transformers, f"{model}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=2.0)
    return model


@torch.no_grad()
def oracle(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


def our_logits(folder: Path, ids: list[int], **options) -> torch.Tensor:
    model = load(folder, dtype="fp32", device="cpu", **options)
    with torch.inference_mode():
        return model.forward(torch.tensor(ids), KVCache(model))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert ours.shape == theirs.shape
    error = ((ours - theirs).norm() / theirs.norm()).item()
    assert error < tolerance, error


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_greedy_tokens_equal_transformers(tmp_path, shape):
    theirs = hugging_face_model(**SHAPES[shape])
    theirs.save_pretrained(tmp_path)
    prompt = torch.randint(3, 300, (40,)).tolist()
    assert_close(our_logits(tmp_path, prompt), oracle(theirs, prompt))
    assert_same_greedy_tokens(load(tmp_path, dtype="fp32", device="cpu"), theirs, prompt, 16)


def assert_same_greedy_tokens(model, theirs, prompt: list[int], n: int) -> None:
    """Up to the first position where they differ, at which the logits of the two tokens must be tied to within rounding."""
    ours = list(generate(model, prompt, n=n, sampling=Sampling(temp=0), eos=[]))
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    out = theirs.generate(torch.tensor([prompt]), max_new_tokens=n, **options)
    assert len(ours) == n
    for token, expected, logits in zip(ours, out.sequences[0, len(prompt) :].tolist(), out.logits):
        if token != expected:
            # a logit of ours is up to 2.3e-5 of their spread off
            assert logits[0, expected] - logits[0, token] < 1e-4 * logits.std(), (ours, out.sequences)
            break


EVERY_KERNEL = ("llama 3.2", "mistral nemo", "qwen 2.5", "qwen 3")  # for Triton's kernels the others equal one of these


@pytest.mark.parametrize("family, fp8, backend", [
    *((name, None, "torch") for name in FAMILIES), ("qwen 2.5", "e4m3", "torch"), ("qwen 3", "e4m3", "torch"),
    *(pytest.param(name, None, "triton", marks=needs_triton) for name in EVERY_KERNEL),
    *(pytest.param(name, "e4m3", "triton", marks=needs_triton) for name in ("qwen 2.5", "qwen 3")),
])  # fmt: skip
def test_families_equal_transformers(tmp_path, family, fp8, backend):
    """Logits of a prompt, whole and in parts, and greedy tokens; in 8 bits, against our model with decoded weights."""
    theirs = hugging_face_model(**FAMILIES[family])
    theirs.save_pretrained(tmp_path)
    T, new = (70, 12) if backend == "torch" else (15, 2)  # the interpreter is slow
    prompt = torch.randint(5, 300, (T,))
    ours = load(tmp_path, dtype="fp32", device="cpu", backend=backend, fp8=fp8)
    if fp8:
        theirs = load(tmp_path, dtype="fp32", device="cpu", fp8=fp8)
        for layer in theirs.weights.layers:
            for name in ("wqkv", "wo", "w13", "w2"):
                setattr(layer, name, decoded(getattr(layer, name)))
        theirs.weights.output = decoded(theirs.weights.output)
    with torch.inference_mode():
        expected = theirs.forward(prompt, KVCache(theirs)) if fp8 else oracle(theirs, prompt.tolist())
        assert_close(ours.forward(prompt, KVCache(ours)), expected, 1e-4)
        cache = KVCache(ours)
        pieces = torch.cat([ours.forward(part, cache) for part in prompt.split([T - 12, 1, 10, 1])])
        assert_close(pieces, expected, 0.02 if fp8 and backend == "torch" else 1e-4)  # fp16 on a CPU
    if not fp8:
        assert_same_greedy_tokens(ours, theirs, prompt[: T - 12].tolist(), new)


def to_bin(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def to_shards(folder: Path, suffix: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    names, stem = sorted(tensors), "model" if suffix == "safetensors" else "pytorch_model"
    weight_map = {}
    for shard, part in enumerate((names[::2], names[1::2])):
        file = f"{stem}-0000{shard + 1}-of-00002.{suffix}"
        held = {name: tensors[name] for name in part}
        save_file(held, folder / file) if suffix == "safetensors" else torch.save(held, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = "model.safetensors.index.json" if suffix == "safetensors" else "pytorch_model.bin.index.json"
    (folder / index).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def to_meta(folder: Path, shards: int) -> None:
    """Meta's own layout, written from its description: interleaved q and k, tensors split by column or by row."""
    raw, config = load_file(folder / "model.safetensors"), read_config(folder)
    names = {f"{x}_proj": f"w{x}" for x in "qkvo"} | {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    split_axis = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w3": 0, "w2": 1, "tok_embeddings": 1, "output": 0}
    parts: list[dict] = [{} for _ in range(shards)]
    for name, tensor in raw.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = tensor.unflatten(0, (-1, config.head_dim))
            half = config.head_dim // 2
            tensor = torch.stack((heads[:, :half], heads[:, half:]), 2).reshape(tensor.shape)
        name = name.replace("model.", "").replace("self_attn", "attention").replace("mlp", "feed_forward")
        name = name.replace("input_layernorm", "attention_norm").replace("post_attention_layernorm", "ffn_norm")
        name = name.replace("embed_tokens", "tok_embeddings").replace("lm_head", "output")
        for theirs, metas in names.items():
            name = name.replace(theirs, metas)
        axis = split_axis.get(name.split(".")[-2])
        for i, part in enumerate(parts):
            part[name] = (tensor if axis is None else tensor.chunk(shards, axis)[i]).clone()
    for i, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{i:02}.pth")
    c = config
    (folder / "params.json").write_text(
        json.dumps(
            dict(dim=c.dim, n_layers=c.n_layers, n_heads=c.n_heads, n_kv_heads=c.n_kv_heads, norm_eps=c.norm_eps)
            | dict(vocab_size=-1, multiple_of=16, ffn_dim_multiplier=0.6, rope_theta=c.rope_theta)  # hidden_dim 112
        )
    )
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()


LAYOUTS = {
    "bin": to_bin,
    "safetensors shards": lambda folder: to_shards(folder, "safetensors"),
    "bin shards": lambda folder: to_shards(folder, "bin"),
    "meta": lambda folder: to_meta(folder, 1),
    "meta, 2 shards": lambda folder: to_meta(folder, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_model(tmp_path, layout):
    theirs = hugging_face_model(**SHAPES["gqa"])
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(3, 300, (20,)).tolist()
    LAYOUTS[layout](tmp_path)
    assert_close(our_logits(tmp_path, ids), oracle(theirs, ids))


def test_mistral_runs_within_its_window(copy):
    edit(copy / "config.json", model_type="mistral", max_position_embeddings=8192)
    assert load(copy, device="cpu").ctx_size == 4096
    with pytest.raises(ValueError, match="sliding_window is 4096: a context of 5000"):
        load(copy, device="cpu", ctx_size=5000)
    edit(copy / "config.json", sliding_window=None)
    assert load(copy, device="cpu", ctx_size=5000).ctx_size == 5000


def test_older_top_level_rope_fields(tmp_path):
    theirs = hugging_face_model(**SHAPES["linear"])
    theirs.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", rope_parameters=None, rope_theta=1e4, rope_scaling={"type": "linear", "factor": 4.0})
    ids = torch.randint(3, 300, (20,)).tolist()
    assert_close(our_logits(tmp_path, ids), oracle(theirs, ids))


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_absent_fields_have_the_defaults_of_transformers(tmp_path, family):
    import transformers

    given = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=300)
    (tmp_path / "config.json").write_text(json.dumps(given | {"model_type": family.lower()}))
    ours, theirs = read_config(tmp_path), getattr(transformers, f"{family}Config")(**given)
    assert ours.norm_eps == theirs.rms_norm_eps and ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_embeddings == theirs.tie_word_embeddings and ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)


def test_hub_cache_is_resolved_without_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    repository = tmp_path / "hub" / "models--someone--tiny"
    hugging_face_model(**SHAPES["mha"]).save_pretrained(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    shutil.copy(HERE / "models/tales/tokenizer.model", repository / "snapshots" / "abc")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load("someone/tiny", device="cpu").config.dim == 64
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE is set: someone/other"):
        load("someone/other", device="cpu")
    for outside in ("/etc", "../../../x", "", "abc\n..", "a" * 2000):
        (repository / "refs" / "main").write_text(outside)
        with pytest.raises(ValueError, match="not a commit id|more than 1,000 bytes") as raised:
            load("someone/tiny", device="cpu")
        assert_one_line(raised.value)


def test_links_are_followed_within_the_hub_cache_only(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    snapshot = repository / "snapshots" / "abc"
    hugging_face_model(**SHAPES["mha"]).save_pretrained(snapshot)
    shutil.copy(HERE / "models/tales/tokenizer.model", snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (repository / "blobs").mkdir()
    config = (snapshot / "config.json").rename(repository / "blobs" / "123")
    (snapshot / "config.json").symlink_to("../../blobs/123")
    assert load("someone/tiny", device="cpu").config.dim == load(snapshot, device="cpu").config.dim == 64
    shutil.copytree(repository, tmp_path / "other", symlinks=True)
    with pytest.raises(ValueError, match="config.json is a link out of its folder"):
        load(tmp_path / "other" / "snapshots" / "abc", device="cpu")
    config.rename(tmp_path / "elsewhere")
    config.symlink_to("../../elsewhere")
    with pytest.raises(ValueError, match="config.json is a link out of its folder"):
        load("someone/tiny", device="cpu")


class Hub(http.server.BaseHTTPRequestHandler):
    """The few responses of the Hugging Face hub that a download needs. files: those of the repository someone/tiny."""

    files: dict[str, bytes]
    asked: list[str]
    token: str | None
    broken: int  # bytes after which the download of a large file breaks off, once

    def log_message(self, *_) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            return self.answer(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "accept the licence"})
        tree = [{"type": "file", "path": n, "size": len(data), "oid": "0" * 40} for n, data in self.files.items()]
        siblings = [{"rfilename": n, "size": len(data)} for n, data in self.files.items()]
        about = {"id": "someone/tiny", "sha": "a" * 40, "siblings": siblings}
        if re.fullmatch("/api/models/someone/tiny(/revision/.*)?", path):
            return self.answer(200, json.dumps(about).encode(), {"Content-Type": "application/json"})
        if path.startswith("/api/models/someone/tiny/tree/"):
            return self.answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        name = path.removeprefix(f"/someone/tiny/resolve/{'a' * 40}/")
        if name not in self.files:
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        data, start = self.files[name], int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        etag = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": "a" * 40}
        if start:
            etag["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.answer(206 if start else 200, data[start:], etag)

    def answer(self, code: int, data: bytes, headers: dict) -> None:
        self.send_response(code)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            if self.broken and len(data) > self.broken:
                data, type(self).broken = data[: self.broken], 0
            self.wfile.write(data)
            self.wfile.flush()
            self.close_connection = True


@pytest.fixture
def hub(tiny, tmp_path, monkeypatch):
    """A hub on the loopback address with the tiny checkpoint, and an empty cache."""
    kept = {f.name: f.read_bytes() for f in tiny.iterdir() if f.name != "text"}
    others = {"pytorch_model.bin": b"x" * 999, "README.md": b"x", "original/model.safetensors": b"x", "tf_model.h5": b"x"}
    Hub.files, Hub.asked, Hub.token, Hub.broken = kept | others, [], None, 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        monkeypatch.setenv(name, str(PATIENCE))
        monkeypatch.setattr(huggingface_hub.constants, name, PATIENCE)
    yield Hub
    server.shutdown()
    server.server_close()


def test_a_repository_is_downloaded_once_and_only_what_is_needed(hub, tiny, cli):
    run = lambda flag: cli(flag, "someone/tiny", "-p", "Once", "-n", 4, "--temp", 0, "--quiet")
    code, out, err = run("-hf")
    assert code == 0 and out == cli("-m", tiny, "-p", "Once", "-n", 4, "--temp", 0)[1] and err == ""
    fetched = {line.rpartition("/")[2] for line in hub.asked if line.startswith("GET /someone")}
    assert fetched == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.model"}
    before = len(hub.asked)
    assert run("-m") == (code, out, err) and len(hub.asked) == before, "the second time is without the network"


def test_a_repository_is_downloaded_by_the_program(hub):
    """In a process in which no test has imported anything."""
    process = program("-hf", "someone/tiny", "-p", "Once", "-n", 2, "--device", "cpu", "--quiet")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and out.startswith(b"Once") and err == b"", err


def test_a_download_that_broke_off_is_finished(hub, cli, tmp_path):
    run = lambda: cli("-m", "someone/tiny", "-p", "Once", "-n", 2, "-s", 1, "--quiet")
    hub.broken = 5000  # bytes of the weights, then the connection ends
    whole = run()
    assert whole[0] == 0 and not hub.broken
    next((tmp_path / "cache").rglob("snapshots/*/model.safetensors")).unlink()
    assert run() == whole, "weights that are missing from the cache are fetched"


@pytest.mark.parametrize(
    "how, expected",
    [
        (dict(token="secret"), "it is gated: accept its licence on its page, and set HF_TOKEN"),
        (dict(files={"config.json": b"{}", "tiny.Q4_0.gguf": b"x"}), "holds GGUF, quantised for another program"),
        (dict(files={"config.json": b"{}"}), "holds no weights that this program reads"),
    ],
)
def test_what_cannot_be_downloaded_is_one_line(hub, cli, monkeypatch, how, expected):
    for name, value in how.items():
        setattr(hub, name, value)
    code, out, err = cli("-m", "someone/tiny", "-p", "Once", "-n", 2)
    assert code == 1 and out == "" and expected in err and err.count("\n") == 1, err


def test_a_hub_that_is_not_there_is_one_line(hub, cli, monkeypatch):
    code, _, err = cli("-m", "someone/other", "-p", "Once", "-n", 2)
    assert code == 1 and "no such repository there (a private one needs HF_TOKEN)" in err and err.count("\n") == 1, err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, _, err = cli("-m", "someone/tiny", "-p", "Once", "-n", 2)
    assert code == 1 and "HF_HUB_OFFLINE is set" in err and not [line for line in hub.asked if "tiny" in line]
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code, _, err = cli("-m", "someone/tiny", "-p", "Once", "-n", 2)
    assert code == 1 and "and not available from http://127.0.0.1:9" in err and err.count("\n") == 1, err


def test_a_token_opens_a_gated_repository(hub, cli, monkeypatch):
    hub.token = "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert cli("-m", "someone/tiny", "-p", "Once", "-n", 2)[0] == 0


# ---- the tiny checkpoint that most tests share, with a tokenizer of its own


def edit(file: Path, **fields) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "text").write_text(TEXT * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=350,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    size = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).vocab_size()
    torch.manual_seed(0)
    hugging_face_model(size, **SHAPES["gqa"]).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(tiny, tmp_path) -> Path:
    """The tiny checkpoint, to be corrupted."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


# ---- the model


def test_cached_decoding_and_chunks_equal_one_prefill(tiny, monkeypatch):
    model = load(tiny, dtype="fp32", device="cpu")
    tokens = torch.randint(3, 300, (50,))
    with torch.inference_mode():
        whole = model.forward(tokens, KVCache(model))
        cache = KVCache(model)
        pieces = [model.forward(part, cache) for part in tokens.split([7, 1, 1, 17, 1, 23])]
        assert_close(torch.cat(pieces), whole, 1e-5)
        monkeypatch.setitem(CHUNK, "cpu", 16)
        cache = KVCache(model)
        model.prefill(tokens.tolist(), cache)
        assert_close(cache.logits, whole[-1], 1e-5)


def test_cache_truncates_and_reuses_the_common_beginning(tiny):
    model = load(tiny, dtype="fp32", device="cpu")
    cache, timings = KVCache(model), Timings()
    first = list(generate(model, [1, 5, 6, 7], cache, 4, Sampling(temp=0), [], timings=timings))
    again = list(generate(model, [1, 5, 6, 7], cache, 4, Sampling(temp=0), [], timings=timings))
    assert first == again and timings.prompt_tokens == 4 + 1
    longer = [1, 5, 6, 7, *first[:2], 9]
    assert list(generate(model, longer, cache, 4, Sampling(temp=0), [], timings=timings)) == list(
        generate(model, longer, KVCache(model), 4, Sampling(temp=0), [])
    )
    assert timings.prompt_tokens == 4 + 1 + 1


@pytest.mark.parametrize("options", [
    dict(fp8="e9"), dict(fp8=True), dict(dtype="fp64"), dict(accumulate="x"), dict(backend="cuda"), dict(ctx_size=-5),
], ids=str)  # fmt: skip
def test_wrong_arguments_are_told(tiny, tmp_path, options):
    (name, value) = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be"):
        load(tiny, device="cpu", **options)
    if name in ("fp8", "dtype"):
        with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be"):
            save_fp8(tiny, tmp_path / "new", device="cpu", **options)
        assert not [*tmp_path.iterdir()]


def test_ids_that_the_model_does_not_have(tiny):
    model, greedy = load(tiny, dtype="fp32", device="cpu"), Sampling(temp=0)
    for bad in (-1, model.config.vocab_size, 1 << 40):
        with pytest.raises(ValueError, match=f"the prompt contains the id {bad}; the model's are 0"):
            list(generate(model, [1, bad, 5], n=1))
    last = model.config.vocab_size - 1
    with torch.inference_mode():
        model.weights.output.data[last] = 100 * model.weights.output.data[5]
        plain = list(generate(model, [1, 5], n=8, sampling=greedy, eos=[]))
        assert last in plain
        assert list(generate(model, [1, 5], n=8, sampling=greedy, eos=[-1], ignore_eos=True)) == plain


def test_generation_ends_at_n_at_eos_and_at_a_full_context(tiny):
    model = load(tiny, dtype="fp32", device="cpu", ctx_size=12)
    greedy = list(generate(model, [1, 5], n=5, sampling=Sampling(temp=0), eos=[]))
    assert len(greedy) == 5
    ended = list(generate(model, [1, 5], n=5, sampling=Sampling(temp=0), eos=[greedy[2]]))
    assert ended == greedy[: greedy.index(greedy[2]) + 1]
    ignoring = list(generate(model, [1, 5], n=5, sampling=Sampling(temp=0), eos=[greedy[2]], ignore_eos=True))
    assert greedy[2] not in ignoring and len(ignoring) == 5
    every_but_7 = {*range(model.config.vocab_size)} - {7}
    assert list(generate(model, [1, 5], n=5, eos=every_but_7, ignore_eos=True)) == [7] * 5
    assert len(list(generate(model, [1, 5], sampling=Sampling(temp=0), eos=[]))) == 10
    with pytest.raises(ValueError, match="13 tokens.*12"):
        list(generate(model, [1] * 13))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_stays_near_fp32(tiny, dtype):
    ids = torch.randint(3, 300, (30,))
    logits = {}
    for name in ("fp32", dtype):
        model = load(tiny, dtype=name, device="cpu")
        with torch.inference_mode():
            cache = KVCache(model)
            logits[name] = torch.cat([model.forward(part, cache) for part in ids.split([29, 1])])
    assert_close(logits[dtype], logits["fp32"], 0.05 if dtype == "bf16" else 0.01)  # a few roundings of 2^-9, of 2^-12


def test_a_padded_prompt_is_the_prompt(monkeypatch):
    monkeypatch.setattr("model.captured", lambda run, pool: run())
    model = load(run.DEFAULT_MODEL, device="cpu", dtype="fp32")
    ids = torch.randint(3, model.config.vocab_size, (40,)).tolist()
    with torch.inference_mode():
        whole, padded = KVCache(model), KVCache(model)
        model.prefill(ids, whole)
        model.prefill(ids[:7], padded)
        padded.append(torch.tensor(ids[7:], dtype=torch.int32))
        model.weights.embedding = model.weights.embedding.clone()
        model.weights.embedding[0] = torch.nan  # what stands beyond the prompt counts for nothing, not even as 0 * NaN
        model._padded_step(33, 64, padded)
        assert padded.pos == int(padded.device_pos) == 40
        assert nmse(padded.logits, whole.logits) < 1e-10
        for cache in (whole, padded):
            model.prefill([5, 6], cache)
        assert nmse(padded.logits, whole.logits) < 1e-10


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a GPU")
def test_prompts_replayed_as_graphs():
    model = load(run.DEFAULT_MODEL, device="cuda")
    with torch.inference_mode():
        cache, plain = KVCache(model), KVCache(model)
        for T in (20, 31, 25, 2, 100, 90, 7, 97, 8, 128):  # the first of each length is captured, the others are replayed
            ids = torch.randint(3, model.config.vocab_size, (T,), device=DEVICE)
            model.prefill(ids.tolist(), cache)
            exact = model.forward(ids, plain)[-1]
            assert cache.pos == plain.pos and nmse(cache.logits, exact) < 1e-4, T


def test_rope_table_is_the_formula():
    config = read_config_like(head_dim=8, rope_theta=100.0)
    table = rope_table(config, 5)
    for position in range(5):
        for i in range(4):
            angle = torch.tensor(position * 100.0 ** (-2 * i / 8), dtype=torch.float64)
            assert torch.allclose(table[position, i].double(), torch.stack((angle.cos(), angle.sin())), atol=1e-6)


def read_config_like(**fields) -> Config:
    base = dict(dim=32, n_layers=1, n_heads=4, n_kv_heads=4, head_dim=8, hidden_dim=64, vocab_size=100, norm_eps=1e-5)
    return Config(**(base | fields))


# ---- the op tables, and each op against its reference


pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")  # padding, and values not finite on purpose
ONE_UNIT = {torch.float16: 2.0**-20, torch.bfloat16: 2.0**-14, torch.float32: 1e-10}  # NMSE of an error of one ulp each


def test_tables_have_the_same_ops_and_signatures():
    assert vars(kernels.reference).keys() == vars(kernels.fused).keys()
    for name, op in vars(kernels.fused).items():
        assert inspect.signature(op) == inspect.signature(getattr(kernels.reference, name)), name
        assert op.__name__ == name and getattr(kernels.reference, name).__name__ == f"{name}_ref"


GUARD, MARGIN = 77.0, 64


@pytest.fixture
def guarded(monkeypatch):
    """Outputs are filled with NaN before the op and placed between guard values. -> a check that the guards are intact."""
    buffers = []

    def allocate(shape, dtype, device) -> torch.Tensor:
        count = torch.Size(shape).numel()
        buffer = torch.full((count + 2 * MARGIN,), GUARD, dtype=dtype, device=device)
        buffers.append(buffer)
        return buffer[MARGIN : MARGIN + count].fill_(float("nan")).view(*shape)

    original = torch.Tensor.new_empty  # which the interpreter calls too, with a device

    def new_empty(self, *shape, **keywords) -> torch.Tensor:
        if "device" in keywords:
            return original(self, *shape, **keywords)
        return allocate(shape, keywords.get("dtype", self.dtype), self.device)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", lambda x: allocate(x.shape, x.dtype, x.device))

    def check() -> None:
        assert buffers, "the op allocates its output in a way that is not guarded"
        for buffer in buffers:
            assert (buffer[:MARGIN] == GUARD).all() and (buffer[-MARGIN:] == GUARD).all(), "written outside of the output"

    return check


def nmse(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact.double()).square().sum() / exact.double().square().sum()).item()


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(DEVICE, dtype)


def as_fp32(value):
    if isinstance(value, Matrix):
        return Matrix(value.data.float())
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def op_arguments(
    op: str, dtype: torch.dtype, heads: tuple[int, int, int], T: int, before: int, S: int | None = None
) -> tuple[tuple, tuple]:
    """Arguments of an op for `heads` (H, KH, D), and which of them it writes in place, by index."""
    H, KH, D = heads
    C, F, V, S = 8 * (2 * H + 1), 52, 201, S or before + T + 9
    pos = torch.tensor([before], dtype=torch.int32, device=DEVICE)
    table = torch.randn(S, D // 2, 2, device=DEVICE)
    x, norm = randn(T, C, dtype=dtype, scale=3000), randn(C, dtype=dtype)  # activations as large as real outliers
    cache = [randn(KH, S, D, dtype=dtype) for _ in range(2)]
    matrix = lambda rows, columns: Matrix(randn(rows, columns, dtype=dtype, scale=columns**-0.5))
    logits = torch.randn(T, V, device=DEVICE) * 5
    return {
        "embedding": lambda: (
            (torch.randint(0, V, (S,), dtype=torch.int32, device=DEVICE), pos, T, randn(V, C, dtype=dtype)),
            (),
        ),
        "rmsnorm": lambda: ((x, norm, 1e-5), ()),
        "rope": lambda: ((randn(T, H, D, dtype=dtype), table, pos), ()),
        "rmsnorm_qkv_rope": lambda: ((x, norm, matrix((H + 2 * KH) * D, C), table, *cache, pos, 1e-5), (4, 5)),
        "attention": lambda: ((randn(T, H, D, dtype=dtype), *cache, pos), ()),
        "linear_add": lambda: ((randn(T, F, dtype=dtype), matrix(C, F), randn(T, C, dtype=dtype)), (2,)),
        "rmsnorm_swiglu": lambda: ((x, norm, matrix(2 * F, C), 1e-5), ()),
        "rmsnorm_linear": lambda: ((x, norm, matrix(V, C), 1e-5, torch.full((T, V), float("nan"), device=DEVICE)), (4,)),
        "cross_entropy": lambda: ((logits, torch.randint(0, V, (T,), device=DEVICE)), ()),
    }[op]()


OPS = [name for name in vars(kernels.fused) if "sample" not in name]  # sampling is tested below, by what it chooses


@needs_triton
@pytest.mark.parametrize("T", [1, 2, 17, 64])
@pytest.mark.parametrize("before", [0, 5, 40])
@pytest.mark.parametrize("heads", [(2, 2, 16), (4, 1, 24), (6, 2, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_op_equals_its_reference(dtype, heads, before, T, guarded):
    check_guards = guarded
    for op in OPS if T < 64 else ("attention",):  # the others take row after row, or are the library's matmul
        arguments, written = op_arguments(op, dtype, heads, T, before)
        exact_arguments = [as_fp32(a).clone() if isinstance(a, torch.Tensor) else as_fp32(a) for a in arguments]
        untouched = [a.clone() for a in arguments if isinstance(a, torch.Tensor)]
        exact = getattr(kernels.reference, op)(*exact_arguments)
        ours = getattr(kernels.fused, op)(*arguments)
        limit = ONE_UNIT[dtype if op != "cross_entropy" else torch.float32]
        if op == "rmsnorm_swiglu" and T > 1:  # the norm, the library's matmul and the output are rounded: half a place each
            limit *= 1.5**2
        assert ours.shape == exact.shape and nmse(ours, exact) < limit, (op, nmse(ours, exact))
        tensors = [(i, a) for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)]
        for (i, after), was in zip(tensors, untouched):
            if i in written:
                assert nmse(after, exact_arguments[i]) < limit, (op, i)
                if op == "rmsnorm_qkv_rope":  # other positions of the cache
                    assert torch.equal(after[:, :before], was[:, :before])
                    assert torch.equal(after[:, before + T :], was[:, before + T :])
            else:
                assert torch.equal(after, was), (op, i, "changed its input")
    check_guards()


@needs_triton
@pytest.mark.parametrize("extra", ["bias", "qk_norm"])
@pytest.mark.parametrize("T, before", [(1, 0), (1, 40), (2, 5), (17, 40)])
@pytest.mark.parametrize("dtype, heads", [
    *((torch.float16, heads) for heads in ((2, 2, 16), (4, 1, 24), (6, 2, 8), (1, 1, 136))), (torch.bfloat16, (4, 1, 24))
], ids=str)  # fmt: skip
def test_qkv_with_a_bias_or_normalised_heads(dtype, heads, T, before, extra, guarded):
    arguments, written = op_arguments("rmsnorm_qkv_rope", dtype, heads, T, before)
    H, KH, D = heads
    shape = ((H + 2 * KH) * D,) if extra == "bias" else (2, D)
    vector = {extra: randn(*shape, dtype=dtype, scale=30)}
    exact = [as_fp32(a).clone() if isinstance(a, torch.Tensor) else as_fp32(a) for a in arguments]
    q = kernels.reference.rmsnorm_qkv_rope(*exact, **{extra: as_fp32(vector[extra])})
    for _ in range(2):  # the second time with what the first left in its workspace
        for i in written:
            arguments[i].fill_(7.0)
        ours = kernels.fused.rmsnorm_qkv_rope(*arguments, **vector)
        limit = ONE_UNIT[dtype] * (1 if T == 1 else 2.5**2)  # in a prompt, the norm, the matmul, its norm and q are rounded
        new = slice(before, before + T)
        for name, mine, right in (("q", ours, q), *((i, arguments[i][:, new], exact[i][:, new]) for i in written)):
            assert nmse(mine, right) < limit, (name, nmse(mine, right), limit)
        assert all((arguments[i][:, :before] == 7).all() and (arguments[i][:, before + T :] == 7).all() for i in written)
    guarded()


@needs_triton
@pytest.mark.parametrize("T", [1, 3, 17])
@pytest.mark.parametrize("op", ["rmsnorm", "rmsnorm_qkv_rope", "rmsnorm_swiglu", "rmsnorm_linear"])
def test_epsilon_is_added(op, T):
    """With inputs so small that epsilon is most of the sum."""
    for format in (None, E4M3) if op != "rmsnorm" else (None,):
        arguments, _ = op_arguments(op, torch.float16, (4, 2, 16), T, 5)
        x, norm, *rest = [a.encoded(format) if format and isinstance(a, Matrix) else a for a in arguments]
        x = (x.float() * 1e-6).half()  # of magnitude 0.003
        exact = [as_fp32(a) if not format or not isinstance(a, Matrix) else decoded(a) for a in (x, norm, *rest)]
        right = getattr(kernels.reference, op)(*exact).clone()
        ours = getattr(kernels.fused, op)(x, norm, *rest)
        assert nmse(ours, right) < 10 * ONE_UNIT[torch.float16], (format, nmse(ours, right))
        without = [0.0 if isinstance(a, float) else a for a in exact]
        assert nmse(getattr(kernels.reference, op)(*without), right) > 0.01


@needs_triton
@pytest.mark.parametrize("cut", [(2, 32, 4), (4, 16, 2), (8, 64, 4)], ids=str)
def test_products_do_not_depend_on_how_they_are_cut(cut, monkeypatch):
    monkeypatch.setattr(kernels, "LAUNCHES", {0: {1: dict.fromkeys(launch.OPS, {0: launch.Launch(*cut)})}})
    for op in launch.OPS:
        arguments, _ = op_arguments(op, torch.float16, (4, 2, 16), 1, 5)
        exact = getattr(kernels.reference, op)(*[as_fp32(a) for a in arguments])
        ours = getattr(kernels.fused, op)(*arguments)
        assert nmse(ours, exact) < ONE_UNIT[torch.float16], op


@needs_triton
@pytest.mark.parametrize("T", [2, 8, 9, 16])
@pytest.mark.parametrize("cut", [(16, 2, 2, 4, 1), (32, 4, 2, 8, 2), (64, 1, 4, 16, 3)], ids=str)
def test_products_of_few_tokens_do_not_depend_on_how_they_are_cut(cut, T, monkeypatch):
    cuts = {tokens: dict.fromkeys(launch.OPS, {0: launch.FewLaunch(*cut)}) for tokens in (8, 16)}
    monkeypatch.setattr(few_tokens, "FEW_LAUNCHES", {0: {1: cuts}})
    cases = [(op, *op_arguments(op, torch.float16, (6, 2, 8), T, 5)) for op in launch.OPS]
    half = functools.partial(randn, dtype=torch.float16)
    cases.append(("linear_add", (half(T, 1048), Matrix(half(40, 1048, scale=0.03)), half(T, 40)), ()))  # rows of several tiles
    for (op, arguments, written), format in itertools.product(cases, (None, E4M3)):
        if format:
            arguments = tuple(a.encoded(format) if isinstance(a, Matrix) else a for a in arguments)
        exact_arguments = cloned([decoded(a) if isinstance(a, Matrix) else as_fp32(a) for a in arguments])
        exact, arguments = getattr(kernels.reference, op)(*exact_arguments), cloned(arguments)
        ours = getattr(kernels.fused, op)(*arguments)
        limit = ONE_UNIT[torch.float16] * (1.5**2 if op == "rmsnorm_swiglu" else 1)  # as above
        for mine, right in [(ours, exact), *((arguments[i], exact_arguments[i]) for i in written)]:
            assert mine.shape == right.shape and nmse(mine, right) < limit, (op, nmse(mine, right))


@needs_triton
@pytest.mark.parametrize("split", [(4, 16, 4, 1, 0), (64, 16, 4, 1, 0), (1, 32, 4, 2, 64)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2, 16), (8, 1, 32), (4, 2, 136)], ids=str)
def test_attention_does_not_depend_on_how_it_is_split(heads, split, monkeypatch):
    monkeypatch.setattr(kernels, "SPLIT_LAUNCHES", {0: {1: launch.SplitLaunch(*split)}})
    for T, before in ((1, 0), (1, 200), (3, 300)):
        arguments, _ = op_arguments("attention", torch.float16, heads, T, before)
        exact = kernels.attention_ref(*[as_fp32(a) for a in arguments])
        for _ in range(2):  # the second time with what the first left in its workspace
            assert nmse(kernels.attention(*arguments), exact) < ONE_UNIT[torch.float16], (T, before)


FEW_ROWS_SPLITS = [(1, 64, 4, 1, 64), (4, 32, 2, 1, 128), (64, 64, 4, 1, 0)]  # launch sizes for a GPU


@needs_triton
@pytest.mark.parametrize("split", FEW_ROWS_SPLITS if DEVICE.type == "cuda" else FEW_ROWS_SPLITS[:1], ids=str)
@pytest.mark.parametrize("heads", [(2, 2, 128), (4, 1, 64), (2, 1, 24), (3, 1, 64), (14, 2, 64)], ids=str)
@pytest.mark.parametrize("kv_fp8", [False, True])
def test_attention_of_few_rows(kv_fp8, heads, split, monkeypatch):
    """few_rows.py on a GPU, in the interpreter the kernels that do the same."""
    if DEVICE.type == "cuda":
        monkeypatch.setattr(kernels, "FEW_ROWS", {launch.capability(DEVICE): launch.SplitLaunch(*split)})
    most = [(rows * heads[1] // heads[0], before) for rows, before in ((16, 700), (64, 500), (128, 300))]
    for T, before in [(1, 90), (2, 0), (4, 61), (3, 250), (5, 200), *most]:
        (q, *caches, pos), _ = op_arguments("attention", torch.float16, heads, T, before)
        if kv_fp8:
            caches = [E4M3.round(cache) for cache in caches]
        exact = kernels.attention_ref(q.float(), *caches, pos)
        for _ in range(2):  # the second time with what the first left in its workspace
            assert nmse(kernels.attention(q, *caches, pos), exact) < ONE_UNIT[torch.float16], (T, before)


@pytest.mark.parametrize("arch", [0, 80, 86, 89, 90, 100, 120])
def test_every_product_of_few_tokens_has_launch_sizes(arch):
    for size, tokens, op in itertools.product((1, 2), (8, 16), launch.OPS):
        sizes = launch.nearest(launch.nearest(launch.FEW_LAUNCHES, arch), size)[tokens][op]
        assert 0 in sizes
        for how in filter(None, sizes.values()):
            assert how.lanes <= 4 * how.steps and how.rows % 8 == 0 and how.ahead > 0, (arch, size, tokens, op)


def cloned(arguments: tuple) -> list:
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]


@needs_triton
@pytest.mark.parametrize("T", [1, 3])
def test_launchers_refuse_what_the_kernels_cannot_read(T):
    """Each tensor of each op in turn, with other numbers between its own: refused, or read correctly (by the library)."""
    apart = lambda t: torch.stack((t, torch.full_like(t, 77)), -1)[..., 0]
    refused = set()
    for op in OPS:
        arguments, written = op_arguments(op, torch.float16, (4, 2, 16), T, 5)
        expected = getattr(kernels.fused, op)(*cloned(arguments))
        for i, a in enumerate(arguments):
            data = a.data if isinstance(a, Matrix) else a
            if not isinstance(data, torch.Tensor) or data.numel() == 1:
                continue
            bad = Matrix(apart(data)) if isinstance(a, Matrix) else apart(data)
            assert not apart(data).is_contiguous()
            try:
                ours = getattr(kernels.fused, op)(*cloned(arguments[:i]), bad, *cloned(arguments[i + 1 :]))
            except AssertionError:
                refused.add(op)
            else:
                assert i not in written and nmse(ours, expected) < ONE_UNIT[torch.float16], (op, i)
    assert refused == set(OPS)


def test_memory_counts_both_copies_of_a_tied_embedding(monkeypatch):
    """A CPU keeps a bf16 model's matrices in fp16 or packed, so a tied embedding is stored twice."""
    told = {}
    monkeypatch.setattr("checkpoint.free_memory", lambda device: 0)
    for dtype, tied in itertools.product((torch.bfloat16, torch.float16), (False, True)):
        with pytest.raises(MemoryError) as error:
            check_memory(read_config_like(tie_embeddings=tied, vocab_size=1 << 22), dtype, torch.device("cpu"), 8)
        told[dtype, tied] = str(error.value).split(" + ")[0]
    assert told[torch.bfloat16, True] == told[torch.bfloat16, False] == told[torch.float16, False] != told[torch.float16, True]


def test_memory_counts_the_largest_matrix_decoded(monkeypatch):
    """With 8-bit weights, in addition to the weights themselves."""
    config = read_config_like(dim=512, n_layers=8, hidden_dim=4096, vocab_size=4096)

    def needed(format) -> int:
        def fits(free: int) -> bool:
            monkeypatch.setattr("checkpoint.free_memory", lambda device: free)
            with contextlib.suppress(MemoryError):
                return check_memory(config, torch.float32, torch.device("cpu"), 64, format) is None

        return bisect.bisect_left(range(1 << 30), True, key=lambda free: bool(fits(free)))

    matrices = [config.layer_matrices] * 8 + [{"output": (4096, 512)}]
    less = sum(4 * rows * columns - rows * (columns + 4) for shapes in matrices for rows, columns in shapes.values())
    assert needed(E4M3) == needed(None) - less + 4 * 2 * 4096 * 512


def test_memory_counts_the_scores_of_a_chunk(monkeypatch):
    """A chunk of a prompt times the whole context."""
    monkeypatch.setattr("checkpoint.free_memory", lambda device: 0)
    workspace = []
    for ctx_size in (1 << 21, 1 << 22):
        with pytest.raises(MemoryError) as error:
            check_memory(read_config_like(), torch.float32, torch.device("cpu"), ctx_size)
        workspace.append(float(re.search(r"workspace (\S+) GB", str(error.value))[1]))
    assert workspace[1] - workspace[0] == pytest.approx(512 * (1 << 21) / 1e9, abs=0.02)


def test_memory_counts_a_layer_of_an_8_bit_cache_decoded(monkeypatch):
    monkeypatch.setattr("checkpoint.free_memory", lambda device: 0)
    workspace, c = [], read_config_like(n_kv_heads=32, n_heads=32, head_dim=128)
    for kv_fp8 in (False, True):
        with pytest.raises(MemoryError) as error:
            check_memory(c, torch.float16, torch.device("cuda"), 1 << 16, None, kv_fp8)
        workspace.append(float(re.search(r"workspace (\S+) GB", str(error.value))[1]))
    assert workspace[1] - workspace[0] == pytest.approx(2 * 2 * 2 * c.kv_dim * 65536 / 1e9, abs=0.02)  # launched and captured


@needs_triton
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_fused_model_is_the_reference_model(tiny, dtype):
    exact, plain, fused = (
        load(tiny, dtype=d, device=DEVICE.type, backend=b) for d, b in (("fp32", "torch"), (dtype, "torch"), (dtype, "triton"))
    )
    ids = torch.randint(3, 300, (19,))
    logits = []
    for model in (exact, plain, fused):
        cache = KVCache(model)
        with torch.inference_mode():
            logits.append(torch.cat([model.forward(part.to(DEVICE), cache).cpu() for part in ids.split([17, 1, 1])]))
    assert nmse(logits[2], logits[0]) < 2 * nmse(logits[1], logits[0]) + 1e-10, "less exact than plain PyTorch in the same type"
    if dtype == "fp32":
        for sampling in (Sampling(temp=0), Sampling(seed=SEED), Sampling(seed=SEED, repeat_penalty=1.3, top_k=0)):
            ours, theirs = (list(generate(m, [1, 5, 9], n=3, sampling=sampling, eos=[])) for m in (fused, exact))
            assert ours == theirs


@needs_triton
@pytest.mark.skipif(DEVICE.type != "cuda", reason="only a GPU captures graphs")
def test_a_cache_is_freed_with_its_owner(tiny):
    model, held = load(tiny, device="cuda"), []
    for i in range(4):
        list(generate(model, [1, 5], n=3, sampling=Sampling(seed=i), eos=[]))
        held.append(torch.cuda.memory_allocated())
    cache = KVCache(model)
    list(generate(model, [1, 5], cache, n=3, eos=[]))
    gone = weakref.ref(cache)
    del cache
    assert gone() is None and held[1] == held[3]


@needs_triton
@pytest.mark.parametrize("how", ["generate", "single steps", "chunks"])
def test_no_step_sees_an_old_position(tiny, how):
    """Keys and values of every position, after thousands of steps on a GPU, equal those of torch ops, which do not overlap."""
    steps = 3000 if DEVICE.type == "cuda" else 4
    sizes = [1] * steps if how == "single steps" else [random.choice((1, 2, 17, 40)) for _ in range(steps // 20 or 2)]
    options = dict(dtype="fp32", device=DEVICE.type, ctx_size=max(steps, sum(sizes)) + 8)
    model, plain = (load(tiny, backend=backend, **options) for backend in ("triton", "torch"))
    cache, expected = KVCache(model), KVCache(plain)
    with torch.inference_mode():
        if how == "generate":
            list(generate(model, [1, 5, 9], cache, steps, Sampling(temp=1.5, seed=SEED), eos=[]))
        else:
            for part in torch.randint(3, 300, (sum(sizes),), device=DEVICE).split(sizes):
                cache.append(part)
                model.step(len(part), cache)
        assert int(cache.device_pos) == cache.pos
        plain.prefill(cache.tokens[: cache.pos].tolist(), expected)
    for ours, theirs in zip((*cache.k, *cache.v), (*expected.k, *expected.v)):
        ours, theirs = (t[:, : cache.pos] for t in (ours, theirs))
        errors = (ours - theirs).square().sum((0, 2)) / theirs.square().sum((0, 2))
        assert errors.max() < 1e-6, f"position {int(errors.argmax())} of {cache.pos}"


def test_nothing_is_collected_during_a_capture(monkeypatch):
    """Freeing a graph, such as one of a dropped Speculation that waits for the collector, would end the capture of another."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_: contextlib.nullcontext())
    seen = []
    captured(lambda: seen.append(gc.isenabled()))
    assert seen == [True, False] and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        captured(lambda: 1 / gc.isenabled())
    assert gc.isenabled()


@needs_triton
def test_other_numbers_need_no_other_graph(tiny, monkeypatch):
    """A graph is replayed as CUDA does it: the same launches with the arguments of the capture, but numbers are read anew."""
    recorded, captures = [], 0

    def record(*arguments, **constants) -> None:
        recorded.append(functools.partial(launch.launch, *arguments, **constants))
        recorded[-1]()

    def captured(run) -> SimpleNamespace:
        nonlocal captures
        captures += 1
        recorded.clear()
        run()
        launches = [*recorded]
        return SimpleNamespace(replay=lambda: [launch() for launch in launches] + [model.step(1, cache)])

    model = load(tiny, dtype="fp32", device=DEVICE, backend="torch", ctx_size=64)
    cache, first = KVCache(model), Sampling(temp=2.0, top_p=0.9, repeat_penalty=1.1, repeat_last_n=30)
    changes = [dict(), dict(seed=SEED), dict(seed=(1 << 63) - 1), dict(temp=1.3), dict(temp=1e-9), dict(top_k=7)]
    changes += [dict(top_p=0.4), dict(min_p=0.3), dict(repeat_penalty=1.9), dict(repeat_last_n=20)]
    every = [replace(first, **change) for change in changes]
    expected = [list(generate(model, [1, 5, 9], n=8, sampling=s, eos=[])) for s in every]
    assert len({*map(tuple, expected)}) > 6
    model.ops = SimpleNamespace(**vars(model.ops) | dict(sample=kernels.fused.sample))
    monkeypatch.setattr(sampling, "launch", record)
    monkeypatch.setattr("model.captured", captured)
    monkeypatch.setattr("model.PADDED", ())  # so that the prompt is not captured, too
    monkeypatch.setattr(type(model), "uses_graphs", True)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None))
    assert [list(generate(model, [1, 5, 9], cache, 8, s, eos=[])) for s in every] == expected
    assert captures == 1
    for other in (Sampling(temp=0), Sampling(top_p=1), Sampling(top_k=100), Sampling(repeat_penalty=1.1)):
        list(generate(model, [1, 5, 9], cache, 1, other, eos=[]))
    list(generate(model, [1, 5, 9], KVCache(model), 1, other, eos=[]))
    list(generate(model, [1, 5, 9], cache, 1, other, eos=[3], ignore_eos=True))
    assert captures == 7


@needs_triton
def test_sampling_on_the_device_chooses_what_the_reference_chooses():
    for _ in range(60):
        V, S = random.choice([17, 300, 3000]), 64
        settings = dict(
            temp=random.choice([0, 0.5, 0.8, 1.5]),
            top_k=random.choice([0, 1, 5, 40, 100, 5000]),
            top_p=random.choice([0.0, 0.5, 0.95, 1.0]),
            min_p=random.choice([0.0, 0.05, 0.5]),
            repeat_penalty=random.choice([1.0, 1.3]),
            repeat_last_n=random.choice([-1, 0, 7, 64]),
            seed=random.choice([0, 1, SEED, 1 << 62]),
        )
        logits, position = torch.randn(V) * 3, torch.tensor([random.choice([0, 1, 20, 50])], dtype=torch.int32)
        tokens = torch.randint(0, V, (S,), dtype=torch.int32)
        expected = choose(logits, tokens, position, **settings)
        on_device = (t.to(DEVICE) for t in (logits, tokens, position))
        assert choose(*on_device, ops=kernels.fused, **settings) == expected, settings


@needs_triton
def test_a_large_vocabulary_is_drawn_from_in_blocks():
    logits, position = torch.randn(40_000) - 30, torch.tensor([3], dtype=torch.int32)
    logits[[5, 17_000, 20_000, 39_000]] = torch.tensor([1.0, 0.5, 0.7, 0.8])
    tokens = torch.zeros(8, dtype=torch.int32)
    drawn = set()
    for seed in range(20):
        expected = choose(logits, tokens, position, **OFF, seed=seed)
        on_device = (t.to(DEVICE) for t in (logits, tokens, position))
        assert choose(*on_device, ops=kernels.fused, **OFF, seed=seed) == expected, seed
        drawn.add(expected)
    assert drawn == {5, 17_000, 20_000, 39_000}


@needs_triton
def test_sampling_on_the_device_follows_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    expected = (logits / 0.7).softmax(0)
    drawn = draw(logits.to(DEVICE), 300, ops=kernels.fused, **(OFF | dict(temp=0.7)))
    assert (drawn - expected).abs().max() < 0.14  # 5 sigma of 300 draws; the test above covers more


@needs_triton
@pytest.mark.parametrize("V", [100, 300, 3000, 5000])
def test_equals_at_the_edge_stay_together_on_every_device(V):
    every = itertools.product((5, 40, 64, 80), (0.5, 0.97, 1.0), (0.0, 0.05), (0.7, 1.5), range(9), (2.0, 4.5), (90, 2500))
    cases = [(40, 0.5, 0.0, 1.5, at, 4.5, 2500) for at in range(3)]  # those that a part left out count for top-p, too
    for top_k, top_p, min_p, temp, at, height, many in random.sample([*every], 8) + cases:
        logits, few, many = torch.full((V,), -5.0), 7, min(V - 10, many)
        places = torch.randperm(V)
        logits[places[:few]], logits[places[few : few + many]] = height + torch.rand(few), 1.0
        settings = dict(top_k=top_k, top_p=top_p, min_p=min_p, temp=temp, seed=SEED)
        tokens, position = torch.zeros(9, dtype=torch.int32), torch.tensor([at], dtype=torch.int32)
        expected = choose(logits, tokens, position, **settings)
        on_device = (t.to(DEVICE) for t in (logits, tokens, position))
        assert choose(*on_device, ops=kernels.fused, **settings) == expected, settings


@needs_triton
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("top_k", [0, 40])
def test_sampling_on_the_device_tells_of_not_finite_logits(bad, top_k):
    logits = torch.full((2500,), random.choice([0.5, 1.5]))  # so that a part keeps as many as it has room for
    logits[:900] = torch.randn(900)
    logits[2000] = float(bad)
    nowhere = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert choose(logits.to(DEVICE), nowhere, nowhere, ops=kernels.fused, top_k=top_k) == -1


# ---- the ops of training.py and their gradients


def training_cases(op: str, dtype: torch.dtype) -> list[tuple]:
    """Arguments of a training op, of odd shapes."""
    x = lambda *shape, scale=1.0: randn(*shape, dtype=dtype, scale=scale)
    targets = lambda T, V: torch.randint(0, V, (T,), device=DEVICE)
    some = targets(19, 201)
    some[[0, 7]] = kernels.IGNORE
    if op == "rope":
        angles = torch.rand(20, 12, device=DEVICE) * 6
        table = angles.cos(), angles.sin()
        return [(x(B, S, (H + 2 * KH) * 24), *table, H, KH) for B, S, H, KH in ((2, 17, 4, 2), (1, 1, 2, 2), (3, 20, 6, 1))]
    sure = x(19, 201).fill_(-30.0)
    sure[torch.arange(19), some.clamp(min=0)] = 30.0  # one-hot rows, whose softmax is one-hot, too
    return {
        "linear": [(x(2, 37, 24), x(40, 24), x(40)), (x(1, 16), x(3, 16), x(3)), (x(70, 8), x(300, 8), x(300))],
        "rmsnorm": [
            (x(*rows, C, scale=30), branch and x(*rows, C), x(C), 1e-5, dtype)
            for rows in ((3, 17), (1,))
            for C in (72, 520)
            for branch in (True, None)
        ],
        "swiglu": [(x(3, 17, 2 * 52, scale=4),), (x(1, 2 * 7),), (x(5, 2 * 600),)],
        "cross_entropy": [
            (x(19, 201, scale=5), some),
            (x(19, 201) + (1000 if dtype == torch.float16 else 10000), some),
            (sure, some),
            (x(1, 3), targets(1, 3)),
            (x(2, 16384), targets(2, 16384)),
            (x(2, 33001, scale=3), targets(2, 33001)),  # two whole blocks and a ragged one
        ],
        "linear_cross_entropy": [(x(19, 24), x(201, 24), some), (x(1, 8), x(3, 8), targets(1, 3))],
    }[op]


def differentiated(ops, op: str, arguments: tuple, dtype: torch.dtype, upstream=None) -> tuple[list, list]:
    """An op's outputs for arguments in dtype with the gradients of its matrices, and the gradients that were fed back."""
    wanted = lambda i, a: isinstance(a, torch.Tensor) and a.is_floating_point() and (op != "rope" or i == 0)
    leaves = [a.to(dtype, copy=True).requires_grad_() if wanted(i, a) else a for i, a in enumerate(arguments)]
    passed = [dtype if isinstance(a, torch.dtype) else a for a in leaves]
    passed[0] = passed[0].clone()  # not a leaf, since some of the ops overwrite it
    if op == "rope" and dtype == torch.float64:
        passed[1:3] = [a.double() for a in passed[1:3]]
    outputs = getattr(ops, op)(*passed)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if upstream is None:
        upstream = [torch.ones_like(o) if o.ndim == 0 else torch.randn_like(o) for o in outputs]
    torch.autograd.backward(outputs, [u.to(o.dtype) for u, o in zip(upstream, outputs)])
    gradients = [a.grad for a in leaves if isinstance(a, torch.Tensor) and a.requires_grad]
    return [o.detach() for o in outputs] + gradients, upstream


def distance(ours: torch.Tensor, exact: torch.Tensor, least: float = 1e-6) -> float:
    """The relative error of a whole vector; the absolute error, in units of `least`, of one smaller than that, such as the
    gradient of rows that are sure of their target."""
    return ((ours.double() - exact).norm() / exact.norm().clamp(min=least)).item()


def smallest(op: str, arguments: tuple, dtype: torch.dtype) -> float:
    """The `least` of distance. For a row that is nearly sure of its target, the loss is the logarithm of a number near 1 and
    the gradient a difference of two such numbers, so both keep errors of four roundings of 1 in fp32; behind a matmul, times
    the norm of its matrix."""
    if "entropy" not in op:
        return 1e-6
    matrix = arguments[1].double().norm().item() if op.startswith("linear") else 1.0
    return max(matrix, 1.0) * HALF_PLACE[torch.float32] / HALF_PLACE[dtype]


TRAINING_OPS = list(vars(training.fused))
HALF_PLACE = {torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9, torch.float32: 2.0**-23}  # fp32: of a sum of some rounded terms


def test_training_tables_have_the_same_ops_and_signatures():
    assert vars(training.reference).keys() == vars(training.fused).keys()
    for name, op in vars(training.fused).items():
        assert inspect.signature(op) == inspect.signature(getattr(training.reference, name)), name
        assert op.__name__ == name and getattr(training.reference, name).__name__ == f"{name}_ref"


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", TRAINING_OPS)
def test_training_op_and_its_gradients_equal_autograd(op, dtype, guarded):
    check_guards = guarded
    for arguments in training_cases(op, dtype):
        ours, upstream = differentiated(training.fused, op, arguments, dtype)
        again, _ = differentiated(training.fused, op, arguments, dtype, upstream)
        plain, _ = differentiated(training.reference, op, arguments, dtype, upstream)
        exact, _ = differentiated(training.reference, op, arguments, torch.float64, upstream)
        for i, (o, a, p, e) in enumerate(zip(ours, again, plain, exact, strict=True)):
            where = (op, [tuple(x.shape) for x in arguments if isinstance(x, torch.Tensor)], i)
            assert o.shape == e.shape and o.dtype == p.dtype and torch.equal(o, a), where
            error, plain_error = (distance(x, e, smallest(op, arguments, dtype)) for x in (o, p))
            assert error <= 2 * max(plain_error, HALF_PLACE[dtype]), (*where, error, plain_error)
    check_guards()


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ["cross_entropy", "linear_cross_entropy"])
def test_what_is_fed_back_to_a_loss_scales_its_gradients_and_rounds_them_once(op, dtype):
    arguments = training_cases(op, dtype)[0]
    once, fed = differentiated(training.fused, op, arguments, dtype)
    thrice, _ = differentiated(training.fused, op, arguments, dtype, [3 * fed[0]])
    assert torch.equal(once[0], thrice[0])
    for gradient, scaled in zip(once[1:], thrice[1:], strict=True):
        assert torch.equal(scaled, (3 * gradient.float()).to(dtype))


@needs_triton
def test_the_gradient_of_cross_entropy_is_where_the_logits_were():
    T, V = 5, 201
    buffer = torch.full((MARGIN + T * V + MARGIN,), GUARD, device=DEVICE)
    logits = buffer[MARGIN:-MARGIN].view(T, V).normal_().requires_grad_()
    targets = torch.randint(0, V, (T,), device=DEVICE)
    loss = training.cross_entropy(logits, targets)
    (gradient,) = torch.autograd.grad(loss, logits, torch.tensor(2.0, device=DEVICE), retain_graph=True)
    assert gradient.data_ptr() == logits.data_ptr()
    assert (buffer[:MARGIN] == GUARD).all() and (buffer[-MARGIN:] == GUARD).all()
    with pytest.raises(AssertionError, match="once"):
        torch.autograd.grad(loss, logits)
    kept = torch.randn(T, V, device=DEVICE)
    before = kept.clone()
    training.cross_entropy(kept, targets)
    assert torch.equal(kept, before), "no gradient is wanted, so nothing is written"


@needs_triton
def test_cross_entropy_tells_of_what_is_not_finite_and_leaves_out_what_is_ignored():
    V = 201
    for bad in (float("inf"), float("nan")):
        logits = torch.randn(4, V, device=DEVICE)
        logits[1, 50] = bad
        targets = torch.tensor([3, 7, kernels.IGNORE, 9], device=DEVICE)
        assert kernels.cross_entropy(logits, targets).isfinite().tolist() == [True, False, True, True]
        assert not training.cross_entropy(logits.clone().requires_grad_(), targets).isfinite()
        targets[1] = kernels.IGNORE
        assert training.cross_entropy(logits, targets).isfinite()
    low = torch.randn(2, V, device=DEVICE)
    low[:, 5:] = float("-inf")
    exact = kernels.cross_entropy_ref(low, torch.tensor([3, 8], device=DEVICE))
    assert torch.allclose(kernels.cross_entropy(low, torch.tensor([3, 8], device=DEVICE)), exact)
    for outside in (-1, V):
        assert kernels.cross_entropy(torch.randn(1, V, device=DEVICE), torch.tensor([outside], device=DEVICE)).isnan().all()


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_cross_entropy_does_not_depend_on_how_a_row_is_cut(dtype, monkeypatch, guarded):
    """Into blocks kept in registers, blocks that are read twice, and a tail; rows of 643 start at any alignment."""
    cut = kernels._cross_entropy_launch
    for V, kept, at_once in itertools.product((65, 640, 643), (0, 3, 99), (1, 4)):
        start, targets = randn(5, V, dtype=dtype, scale=3), torch.randint(0, V, (5,), device=DEVICE)
        exact, logits = start.double().requires_grad_(), torch.empty_like(start).copy_(start)
        losses = torch.nn.functional.cross_entropy(exact, targets, reduction="none")
        losses.mean().backward()
        sizes = dict(BLOCK=64, KEPT=kept, AT_ONCE=at_once, warps=1)
        monkeypatch.setattr(kernels, "_cross_entropy_launch", lambda *arguments, sizes=sizes: cut(*arguments) | sizes)
        alone = kernels.cross_entropy_rows(logits, targets, None)
        found = kernels.cross_entropy_rows(logits, targets, torch.tensor(5, device=DEVICE))
        where = (V, kept, at_once)
        assert distance(found, losses.detach()) < 4 * HALF_PLACE[torch.float32] and nmse(alone, found) < 1e-12, where
        assert distance(logits, exact.grad) <= 2 * HALF_PLACE[dtype], where
    guarded()


@needs_triton
def test_linear_cross_entropy_does_not_depend_on_its_chunks(monkeypatch):
    x, w = torch.randn(19, 24, device=DEVICE), torch.randn(201, 24, device=DEVICE)
    targets = torch.randint(0, 201, (19,), device=DEVICE)
    whole, upstream = differentiated(training.fused, "linear_cross_entropy", (x, w, targets), torch.float32)
    monkeypatch.setattr(training, "CHUNK", 7)
    parts, _ = differentiated(training.fused, "linear_cross_entropy", (x, w, targets), torch.float32, upstream)
    assert all(nmse(p, e) < ONE_UNIT[torch.float32] for p, e in zip(parts, whole))
    assert nmse(training.linear_cross_entropy(x, w, targets), whole[0]) < ONE_UNIT[torch.float32]  # without a gradient
    mixed = training.linear_cross_entropy(x.bfloat16().requires_grad_(), w.clone().requires_grad_(), targets)
    assert mixed.dtype == torch.float32 and nmse(mixed.detach(), whole[0]) < 1e-3


@needs_triton
def test_dropout_leaves_out_the_same_elements_in_both_directions():
    x = torch.zeros(40, 250, device=DEVICE, requires_grad=True)
    branch, weight = torch.ones(40, 250, device=DEVICE, requires_grad=True), torch.ones(250, device=DEVICE)
    masks = []
    for p in (0.3, 0.3, 0.05):
        branch.grad = None
        total, y = training.rmsnorm(x, branch, weight, 1e-5, torch.float32, p)
        (total.sum() + 0 * y.sum()).backward()
        assert torch.equal(branch.grad, total.detach()) and ((total == 0) | (total == 1 / (1 - p))).all()
        masks.append(total.detach() != 0)
        assert abs(masks[-1].double().mean().item() - (1 - p)) < 6 * (p * (1 - p) / total.numel()) ** 0.5
    kept, in_both = masks[0].sum().item(), (masks[0] & masks[1]).sum().item()
    assert abs(in_both / kept - 0.7) < 6 * (0.7 * 0.3 / kept) ** 0.5, "two calls share a mask"


@needs_triton
def test_the_model_trains_the_same_with_either_table():
    train = train_module()
    config = train.Config(vocab=300, dim=128, layers=2, kv_heads=1, hidden=192, context=16)
    tokens = torch.randint(0, 300, (2, 17), device=DEVICE)
    losses, gradients = [], []
    for ops in (training.reference, training.fused):
        torch.manual_seed(SEED)
        model = train.Llama(config, ops).to(DEVICE)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert nmse(losses[1], losses[0]) < 1e-12
    for name, exact in gradients[0].items():
        assert nmse(gradients[1][name], exact) < 1e-9, name


def train_module():
    """models/tales/train.py, which imports what is beside it."""
    if str(HERE / "models/tales") not in sys.path:
        sys.path.append(str(HERE / "models/tales"))
    import train

    return train


@needs_triton
def test_a_training_step_is_counted_and_reported(monkeypatch, capsys):
    train = train_module()
    import profile_step

    x, w = torch.randn(6, 8, device=DEVICE), torch.randn(5, 8, device=DEVICE)
    with profile_step.Counting() as counted:
        torch.mm(x, w.t())
        training.swiglu_forward(x)
        training.rope_forward(x[None], torch.ones(6, 1, device=DEVICE), torch.zeros(6, 1, device=DEVICE), 2, 1)
        kernels.cross_entropy_rows(x, torch.zeros(6, dtype=torch.int64, device=DEVICE), torch.tensor(6, device=DEVICE))
    assert counted.operations["aten::mm"] == 2 * 6 * 8 * 5 and counted.bytes["aten::mm"] == 4 * (6 * 8 + 5 * 8 + 6 * 5)
    assert counted.bytes["_swiglu_forward_kernel"] == 4 * (48 + 24)
    assert counted.bytes["_rope_forward_kernel"] == 4 * (2 * 36 + 2 * 6)  # q and k are 3 of 4 heads
    assert counted.bytes["_cross_entropy_kernel"] == 4 * 2 * 48 + 8 * 6 + 8 + 4 * 6
    monkeypatch.setattr(bench, "copy_ceiling", lambda device: 1e10)
    monkeypatch.setattr(bench, "product_ceiling", lambda device, dtype: 1e11)
    shape = dict(vocab=300, teacher_dim=64, teacher_layers=1, context=16, batch=2)
    train.profile(SimpleNamespace(**shape, seed=1, kernels="plain", device=DEVICE.type))
    out = capsys.readouterr().out
    assert re.search(r"efficiency [\d.]+%", out) and "aten::mm" in out
    assert {"embedding", "forward", "classifier", "backward", "optimiser"} <= set(re.findall(r"^\| (\w+) ", out, re.MULTILINE))


def test_joined_matrices_are_saved_and_updated_one_by_one():
    train = train_module()
    config = train.Config(vocab=30, dim=128, layers=1, kv_heads=1, hidden=192, context=16)
    state = train.Llama(config).state_dict()
    apart = train.split(state, config)
    assert apart["layers.0.self_attn.k_proj.weight"].shape == (64, 128) and "layers.0.mlp.up_proj.weight" in apart
    whole = train.join(apart, state)
    assert whole.keys() == state.keys() and all(torch.equal(whole[name], value) for name, value in state.items())
    joined = torch.nn.Parameter(torch.randn(24, 8))
    parts = [torch.nn.Parameter(part.clone()) for part in joined.detach().split((16, 8))]
    joined.grad = torch.randn(24, 8)
    for part, grad in zip(parts, joined.grad.split((16, 8))):
        part.grad = grad.clone()
    train.Muon([joined], [(16, 8)], 0.1, 0.1).step()
    train.Muon(parts, [(16,), (8,)], 0.1, 0.1).step()
    assert torch.allclose(joined, torch.cat(parts), atol=1e-6)


# ---- 8-bit floats


def value_of(code: int, exponent_bits: int) -> float:
    """What an 8-bit float stands for, from the definition: sign, exponent, mantissa, and subnormals."""
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & (2**mantissa_bits - 1)
    fraction = mantissa / 2**mantissa_bits
    return sign * (2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction))


EXPONENT_BITS = {"e4m3": 4, "e5m2": 5}


def finite_codes(form: str) -> list[int]:
    return [c for c in range(256) if c & 0x7F < (0x7F if form == "e4m3" else 0x7C)]


@pytest.mark.parametrize("form", FORMATS)
def test_all_codes_decode_and_all_halves_encode_to_the_nearest(form):
    codes = torch.tensor(finite_codes(form), dtype=torch.uint8).view(torch.int8)
    values = torch.tensor([value_of(c, EXPONENT_BITS[form]) for c in finite_codes(form)], dtype=torch.float64)
    assert torch.equal(FORMATS[form].values(codes).double(), values)
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[torch.isfinite(every)]
    written = FORMATS[form].round(every)
    got = FORMATS[form].values(written).double()
    positive = values[values >= 0].sort().values
    distance = (every.double().abs().clamp(max=FORMATS[form].largest)[:, None] - positive).abs()
    nearest = distance.min(1).values
    assert torch.equal((every.double().abs().clamp(max=FORMATS[form].largest) - got.abs()).abs(), nearest)
    ties = (distance == nearest[:, None]).sum(1) == 2
    assert ties.any() and not (written[ties] & 1).any(), "a tie did not go to the even code"
    assert torch.equal(got.sign()[got != 0], every.double().sign()[got != 0])


@pytest.mark.parametrize("form, bound", [("e4m3", 2.0**-4), ("e5m2", 2.0**-3)])
def test_encoded_rows_are_near_and_their_scale_loses_least(form, bound):
    weights = torch.randn(70, 300) * torch.logspace(-6, 6, 70)[:, None]
    weights[3] = 0
    codes, scales = FORMATS[form].encode(weights)
    near = FORMATS[form].decoded(codes, scales)
    peak = weights.abs().amax(1, keepdim=True)
    assert ((near - weights).abs() <= bound * torch.maximum(weights.abs(), peak * 2.0**-6)).all()
    simple = weights.abs().amax(1).clamp(min=1e-30) / FORMATS[form].top
    for step in (0.0, 0.25, 0.5, 0.75):
        tried = simple * 2**step
        other = FORMATS[form].decoded(FORMATS[form].round(weights / tried[:, None]), tried)
        assert ((near - weights).square().sum(1) <= (other - weights).square().sum(1)).all()
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="NaN or inf"):
            FORMATS[form].encode(torch.tensor([[1.0, bad]]))


@needs_triton
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_ops_read_8_bit_matrices(dtype, form, T):
    """Against the reference with the same weights decoded: reading them adds no error of its own. All codes occur. The
    half-precision sums of packed products leave an NMSE of 0.26 ONE_UNIT, which SwiGLU raises to 0.59 on average; but with the
    52 outputs of a draw it depends on the few largest, and exceeds one unit in a tenth of the draws. So SwiGLU's is averaged
    over many draws."""
    for op in launch.OPS:
        errors = []
        for _ in range(32 if op == "rmsnorm_swiglu" and T == 1 else 1):
            arguments, _ = op_arguments(op, dtype, (4, 2, 16), T, 5)
            arguments = [a.encoded(FORMATS[form]) if isinstance(a, Matrix) else a for a in arguments]
            dense = [decoded(a) if isinstance(a, Matrix) else as_fp32(a) for a in arguments]
            # the reference in fp32, since rounding in other types is not what is tested
            in_fp32 = [a if isinstance(a, Matrix) else as_fp32(a) for a in arguments]
            exact = getattr(kernels.reference, op)(*cloned(dense))
            outputs = getattr(kernels.fused, op)(*cloned(arguments)), getattr(kernels.reference, op)(*cloned(in_fp32))
            errors.append([nmse(output, exact) for output in outputs])
        ours, theirs = torch.tensor(errors).mean(0)
        assert ours < ONE_UNIT[dtype] and theirs < ONE_UNIT[torch.float16], (op, ours, theirs)


def decoded(m: Matrix) -> Matrix:
    return Matrix(m.dense())


@pytest.mark.parametrize("form", FORMATS)
def test_a_model_in_8_bits_is_the_model_with_its_weights_decoded(tiny, form, cli):
    ours, dense = (load(tiny, dtype="fp32", device="cpu", fp8=form) for _ in range(2))
    for layer in dense.weights.layers:
        for name in ("wqkv", "wo", "w13", "w2"):
            setattr(layer, name, decoded(getattr(layer, name)))
    dense.weights.output = decoded(dense.weights.output)
    ids, logits = torch.randint(3, 300, (30,)), []
    for model in (ours, dense):
        cache = KVCache(model)
        with torch.inference_mode():
            logits.append([model.forward(part, cache) for part in ids.split([29, 1])])
    assert_close(logits[0][0], logits[1][0], 1e-4)
    assert_close(logits[0][1], logits[1][1], 0.01)  # one token's activations are rounded to fp16 on a CPU
    code, _, err = cli("-m", tiny, "-p", "Once", "-n", 4, "--temp", 0, *(["--fp8"] if form == "e4m3" else ["--fp8", form]))
    assert code == 0 and f"with {form} matrices" in err


@needs_triton
def test_kernels_encode_as_torch_does():
    """All finite fp16 numbers, numbers between the codes and far beyond them, infinities and NaN."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    between = torch.rand(1 << 16) * 2.0 ** torch.randint(-14, 12, (1 << 16,))
    x = torch.cat(
        [every[torch.isfinite(every)], between, -between, torch.tensor([1e30, -1e30, torch.inf, -torch.inf, torch.nan])]
    ).to(DEVICE)
    codes = torch.empty(len(x), dtype=torch.int8, device=DEVICE)

    @launch.jit
    def encode(x, codes, N, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(codes + at, fp8.e4m3_encode(tl.load(x + at, mask=at < N)), mask=at < N)

    encode[(-(-len(x) // 4096),)](x, codes, len(x), BLOCK=4096)
    finite = torch.isfinite(x)
    assert torch.equal(codes[finite], E4M3.round(x[finite])) and (codes[~finite] == 0x7F).all()


@needs_triton
@pytest.mark.parametrize("T", [1, 3, 80])
@pytest.mark.parametrize("heads", [(2, 2, 16), (6, 2, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_ops_on_an_8_bit_cache(dtype, heads, T):
    """The QKV op writes the reference's codes, except where it rounds the other way; attention reads them exactly."""
    arguments, written = op_arguments("rmsnorm_qkv_rope", dtype, heads, T, 40)
    caches = [E4M3.round(torch.randn(arguments[i].shape, device=DEVICE)) for i in written]
    ours, exact = ([c.clone() for c in caches] for _ in range(2))
    kernels.fused.rmsnorm_qkv_rope(*arguments[:4], *ours, *arguments[6:])
    kernels.reference.rmsnorm_qkv_rope(*[as_fp32(a) for a in arguments[:4]], *exact, *arguments[6:])
    for mine, theirs, before in zip(ours, exact, caches):
        assert torch.equal(mine[:, :40], before[:, :40]) and torch.equal(mine[:, 40 + T :], before[:, 40 + T :])
        off, size = (kernels.cached_ref(mine) - kernels.cached_ref(theirs)).abs(), kernels.cached_ref(theirs).abs()
        rounded = 2 * torch.finfo(dtype).eps * size[:, 40 : 40 + T].max()  # before rope, where terms may cancel
        assert (off <= 2.0**-3 * size + 2.0**-9 + rounded).all(), "more than the next code"
        assert (off[:, 40 : 40 + T] > 0).double().mean() < 0.2
    q, pos = op_arguments("attention", dtype, heads, T, 40)[0][::3]
    widened = [kernels.cached_ref(c) for c in ours]
    assert nmse(kernels.fused.attention(q, *ours, pos), kernels.attention_ref(q.float(), *widened, pos)) < ONE_UNIT[dtype]
    assert torch.equal(kernels.attention_ref(q.float(), *ours, pos), kernels.attention_ref(q.float(), *widened, pos))


def test_a_model_with_an_8_bit_cache(tiny, cli, monkeypatch):
    """It equals the model with rounded keys and values, with either kind of weights."""
    ids, write = torch.randint(3, 300, (30,)), kernels.reference.rmsnorm_qkv_rope

    def write_rounded(x, norm, wqkv, rope, k_cache, v_cache, pos, *rest):
        q, new = write(x, norm, wqkv, rope, k_cache, v_cache, pos, *rest), slice(int(pos), int(pos) + len(x))
        for cache in (k_cache, v_cache):
            cache[:, new] = E4M3.values(E4M3.round(cache[:, new]))
        return q

    for form in (None, "e4m3"):
        whole, ours = (load(tiny, dtype="fp32", device="cpu", fp8=form, kv_fp8=eight) for eight in (False, True))
        assert KVCache(ours).k[0].dtype == torch.int8
        with torch.inference_mode():
            plain, caches = whole.forward(ids, KVCache(whole)), (KVCache(ours), KVCache(whole))
            mine = torch.cat([ours.forward(part, caches[0]) for part in ids.split([20, 9, 1])])
            monkeypatch.setattr(kernels.reference, "rmsnorm_qkv_rope", write_rounded)
            theirs = torch.cat([whole.forward(part, caches[1]) for part in ids.split([20, 9, 1])])
            monkeypatch.undo()
        assert_close(mine, theirs, 1e-4)
        assert nmse(mine, plain) > 1e-6
    code, _, err = cli("-m", tiny, "-p", "Once", "-n", 4, "--kv-fp8", "--fp8")
    assert code == 0 and "with e4m3 matrices, e4m3 keys and values" in err


WEIGHTS = ["embed_tokens", "norm", "lm_head", *(f"layers.0.{name}" for name in (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
))]  # fmt: skip
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("name, bad, backend", [
    *itertools.product(WEIGHTS, (NAN, INF, -INF), ["torch"]),
    *(pytest.param(f"layers.0.self_attn.{w}_proj", bad, "triton", marks=needs_triton)
      for w, bad in (("q", NAN), ("k", NAN), ("v", NAN), ("v", INF))),
])  # fmt: skip
@pytest.mark.parametrize("kv_fp8", [False, True])
def test_what_is_not_finite_is_told(copy, kv_fp8, name, bad, backend):
    """E4M3 has no infinity, and its NaN decodes to 480 by moving bits; torch takes a row of NaN scores for a masked one."""
    name = f"{name}.weight" if name == "lm_head" else f"model.{name}.weight"
    spoil_tensors(lambda t: t[name].view(-1)[5 + 3 * 64 * (t[name].dim() - 1) :][:1].fill_(bad))(copy)
    model = load(copy, dtype="fp32", device=DEVICE.type, ctx_size=16, backend=backend, kv_fp8=kv_fp8)
    for prompt in ([3], [1, 3, 6]):
        with pytest.raises(RuntimeError, match=f"not finite: {name} .*holds NaN or inf"):
            list(generate(model, prompt, n=2, sampling=Sampling(temp=0)))


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("kv_fp8", [False, True])
def test_a_cache_that_is_not_finite_is_told(tiny, kv_fp8, backend):
    model = load(tiny, dtype="fp32", device=DEVICE.type, ctx_size=16, backend=backend, kv_fp8=kv_fp8)
    for which, bad in (("k", NAN), ("v", NAN), ("v", INF)):
        cache, prompt = KVCache(model), [1, 5, 6]
        list(generate(model, prompt, cache, 0))
        getattr(cache, which)[1][:, 1, 2] = 0x7F if kv_fp8 else bad
        for later in ([*prompt, 7], [*prompt, 7, 8, 9]):
            with pytest.raises(RuntimeError, match="not finite, although every weight is"):
                list(generate(model, later, cache, 1))


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("kv_fp8", [False, True])
def test_a_context_is_used_to_its_last_slot(tiny, kv_fp8, backend):
    model = load(tiny, dtype="fp32", device=DEVICE.type, ctx_size=8, backend=backend, kv_fp8=kv_fp8)
    settings = dict(sampling=Sampling(seed=SEED), eos=[])
    whole = list(generate(model, [5, 6], n=4, **settings))
    for size in (1, 2, 3, 6):
        cache = KVCache(model, size)
        if size == 1:
            assert list(generate(model, [5], cache, **settings)) == []
        else:
            assert list(generate(model, [5, 6], cache, **settings)) == whole[: size - 2]
        assert cache.device_pos == cache.pos
        with pytest.raises(ValueError, match=f"the context holds {size}"):
            list(generate(model, [7] * (size + 1), cache, **settings))


@needs_triton
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_half_sums_saturate():
    """Attention scores far beyond 65504, and matmul results beyond it before rope and SwiGLU, stay finite; the largest wins."""
    H, D, T = 2, 32, 70
    q = torch.full((T, H, D), 200.0, dtype=torch.float16, device=DEVICE)
    k, v = torch.full((2, H, 128, D), 100.0, dtype=torch.float16, device=DEVICE)
    k[:, :5], v[:, 5:] = -100.0, 900.0
    pos = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with kernels.fp16_accumulation(True):
        y = kernels.fused.attention(q, k, v, pos)
    assert torch.isfinite(y).all() and (y[8:] > 890).all()
    table = torch.zeros(T, D // 2, 2, device=DEVICE)
    table[..., 0] = 1
    qkv = torch.tensor([torch.inf, -torch.inf, 5.0], device=DEVICE).half().repeat(T, 2 * 3 * D // 3).contiguous()
    caches = [torch.empty(H, 128, D, dtype=torch.float16, device=DEVICE) for _ in range(2)]
    with kernels.fp16_accumulation(True):
        kernels._launch_rope(qkv, None, table, *caches, torch.empty_like(q), pos, 128, H, H, D)
    for cache in caches:
        assert set(cache[:, :T].unique().tolist()) == {-65504.0, 5.0, 65504.0}
    out = torch.empty(T, 64, dtype=torch.float16, device=DEVICE)
    ab = torch.full((T, 128), torch.inf, dtype=torch.float16, device=DEVICE)
    launch.launch(kernels._swiglu_kernel, (T, 1), out.device, ab, out, 64, BLOCK=1024, FP16_SUMS=True)
    assert (out == 65504).all()


@needs_triton
def test_half_sums_do_not_hide_nan():
    x = torch.full((70, 64), float("nan"), dtype=torch.float16, device=DEVICE)
    w, residual = Matrix(torch.ones(32, 64, dtype=torch.float16, device=DEVICE)), torch.zeros_like(x[:, :32])
    out = torch.empty(70, 32, dtype=torch.float16, device=DEVICE)
    with kernels.fp16_accumulation(True):
        assert kernels.fused.linear_add(x, w, residual).isnan().all()
        launch.launch(kernels._swiglu_kernel, (70, 1), out.device, x, out, 32, BLOCK=1024, FP16_SUMS=True)
    assert out.isnan().all()


@needs_triton
@pytest.mark.skipif(DEVICE.type != "cuda", reason="the library sums up halves in half precision on a GPU only")
def test_a_prompt_beyond_65504_stays_finite_with_half_sums():
    for op in launch.OPS:
        arguments = op_arguments(op, torch.float16, (4, 2, 16), 70, 5)[0]
        # all positive: sums that pass 65504 in both directions are NaN, which is reported
        arguments = [Matrix(a.data.abs() * 1e4) if isinstance(a, Matrix) else a for a in arguments]
        arguments = [a.abs_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
        with kernels.fp16_accumulation(True):
            y = getattr(kernels.fused, op)(*arguments)
        finite = arguments[4:6] if op == "rmsnorm_qkv_rope" else [] if op == "rmsnorm_linear" else [y]
        assert all(torch.isfinite(t).all() for t in finite), op


@needs_triton
@pytest.mark.skipif(DEVICE.type != "cuda", reason="8-bit tensor cores are on a GPU only")
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_8_bit_tensor_cores_multiply_a_prompt(form, dtype, fast):
    """Activations in E4M3 have an error of at most 2^-4: a third of its square, halved since most err less."""
    x, w = randn(80, 256, dtype=dtype), Matrix(randn(512, 256, dtype=torch.float16, scale=1 / 16)).encoded(FORMATS[form])
    if not fp8.on_tensor_cores(w):
        pytest.skip("this GPU has none")
    with fp8.fast_accumulation(fast):
        y = kernels.linear_add(x, w, torch.zeros(80, 512, dtype=dtype, device=DEVICE))
    assert 0 < nmse(y, x.float() @ decoded(w).data.t()) < 2.0**-10


@needs_triton
def test_the_norm_writes_codes():
    x, norm = randn(5, 300, dtype=torch.float32), randn(300, dtype=torch.float32)
    (codes, scales), exact = fp8.empty_codes(x), kernels.rmsnorm_ref(x, norm, 1e-5)
    kernels._launch_rmsnorm(x, norm, 1e-5, codes, scales)
    assert torch.allclose(scales, exact.abs().amax(1, keepdim=True) / 448)
    nearest = E4M3.values(E4M3.round(exact / scales))
    assert nmse(E4M3.values(codes), nearest) < 1e-5  # a value half-way between two codes may go to either


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_caches_are_decoded_as_far_as_they_are_seen(dtype):
    caches = torch.arange(-128, 128, device=DEVICE).to(torch.int8).repeat(2, 2, 500, 1).view(2, 2, 4000, 32).unbind()
    pos = torch.tensor([1000], dtype=torch.int32, device=DEVICE)
    for codes, values in zip(caches, kernels.decode_caches(*caches, pos, 17, dtype)):
        exact = kernels.cached_ref(codes)[:, :1017].to(dtype)
        assert exact.isnan().any() and torch.equal(values[:, :1017].nan_to_num(7.0), exact.nan_to_num(7.0))


@needs_triton
def test_activations_as_codes():
    x = randn(5, 300, dtype=torch.float16) * torch.logspace(-3, 3, 5, device=DEVICE)[:, None].half()
    codes, scales = fp8.encode_rows(x)
    assert torch.allclose(scales, x.float().abs().amax(1, keepdim=True) / 448)
    assert torch.equal(codes, E4M3.round(x.float() / scales))


@pytest.mark.parametrize("options", [["--accumulate", "fp16"], ["--accumulate", "fp16", "--backend", "torch"]], ids=str)
def test_half_sums_are_refused_where_there_are_none(cli, tiny, options):
    code, _, err = cli("-m", tiny, "-p", "Once", "--device", "cpu", *options)
    assert code == 1 and "--accumulate fp16 needs a GPU" in err and err.count("\n") == 1


@pytest.mark.parametrize("accumulate, fast", [("auto", True), ("fp32", False)])
def test_fast_accumulation_is_a_choice(tiny, accumulate, fast, monkeypatch):
    seen, norm = set(), kernels.reference.rmsnorm_linear
    monkeypatch.setattr(kernels.reference, "rmsnorm_linear", lambda *a: seen.add(fp8._fast_sums) or norm(*a))
    model = load(tiny, device="cpu", accumulate=accumulate)
    with torch.inference_mode():
        model.prefill([1, 2, 3], KVCache(model))
    assert seen == {fast} and not fp8._fast_sums


def test_nan_is_refused_by_name_in_8_bits(cli, copy):
    spoil_tensors(lambda t: t[DOWN].view(-1)[5:6].fill_(float("nan")))(copy)
    code, _, err = cli("-m", copy, "-p", "Once", "--fp8")
    assert code == 1 and f"{DOWN} in model.safetensors" in err and "NaN or inf" in err and err.count("\n") == 1


def test_prepacked_matrices_are_the_same_matrices():
    w, x = Matrix(randn(70, 50, dtype=torch.bfloat16).cpu()), randn(9, 50, dtype=torch.bfloat16).cpu()
    packed = kernels.prepacked(w, "torch")
    assert torch.equal(packed.dense(), w.data) and packed.shape == w.shape and packed.nbytes == w.nbytes
    for rows in (x, x[:1]):
        assert nmse(kernels.linear_ref(rows, packed), rows.float() @ w.data.float().t()) < ONE_UNIT[torch.bfloat16]
    assert kernels.prepacked(w, "triton") is w


def test_prompts_of_any_length_need_few_kernels_of_onednn(monkeypatch):
    """oneDNN keeps what it compiles for each number of rows, so a chat's memory would grow with each new length."""
    sizes, w = set(), Matrix(torch.randn(8, 4, dtype=torch.bfloat16).to_mkldnn())

    def product(x, packed, *rest):
        sizes.add(len(x))
        return x[:, :1].expand(-1, 8) + 0

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", product)
    for T in range(1, CHUNK["cpu"] + 1):
        x = torch.arange(T, dtype=torch.bfloat16)[:, None].expand(T, 4)
        assert kernels.linear_ref(x, w).equal(x[:, :1].expand(T, 8))
    assert len(sizes) <= 20 and 1 in sizes and max(sizes) == CHUNK["cpu"]


def test_codes_do_not_depend_on_the_dtype(tmp_path):
    hugging_face_model(**SHAPES["mqa, tied"]).half().save_pretrained(tmp_path)
    models = [load(tmp_path, dtype=dtype, device="cpu", fp8="e4m3").weights for dtype in ("fp32", "bf16")]
    for matrices in zip(*([w.output, *(layer.wqkv for layer in w.layers)] for w in models)):
        assert torch.equal(*(m.data for m in matrices)) and torch.equal(*(m.scale for m in matrices))


@pytest.mark.parametrize("form", FORMATS)
def test_codes_and_scales_that_encode_never_writes_are_told(form):
    finite, ones = finite_codes(form), torch.ones(1)
    largest = {"e4m3": 0x7E, "e5m2": 0x3F}[form]  # of a row that encode wrote: 448 and 1.75
    for code in range(256):
        codes = torch.tensor([[0] * 8 + [largest, code]], dtype=torch.uint8).view(torch.int8)
        if code in finite and code & 0x7F <= largest:
            FORMATS[form].check(codes, ones)
        else:
            with pytest.raises(ValueError, match="codes of a format other" if code in finite else "codes of NaN"):
                FORMATS[form].check(codes, ones)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="scales"):
            FORMATS[form].check(torch.zeros(2, 9, dtype=torch.int8), torch.tensor([1.0, scale]))


def test_codes_are_told_from_those_of_the_other_format():
    weights = torch.randn(50, 40) * 2.0 ** torch.randint(-126, 100, (50, 1))
    weights[7] = 0
    weights[8] = 1e-44
    for theirs, form in itertools.product(FORMATS.values(), repeat=2):
        codes, scales = theirs.encode(weights)
        if theirs is form:
            form.check(codes, scales)
        else:
            with pytest.raises(ValueError, match=f"codes of (a format other than {form.name}|NaN)"):
                form.check(codes, scales)


# ---- every kernel compiles for every architecture, with no GPU present


ARCHITECTURES = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}  # and the kilobytes of shared memory that a program may use


def record_launches(dtype: torch.dtype, arch: int) -> list[tuple]:
    """All launches of the ops on shapes that reach every kernel: kernel, arguments, constants, warps, stages."""
    recorded = []

    def record(kernel, grid, device, *arguments, warps=4, stages=1, **constants):
        recorded.append((kernel, arguments, constants | {"PDL": arch >= 90}, warps, stages))

    for module in (launch, kernels, sampling, fp8, training, parallel, few_tokens, speculation):
        module.launch, module.capability, module.processors = record, lambda device: arch, lambda device: 128
    few = dict.fromkeys(launch.OPS, {0: launch.FewLaunch(16, 8, 4, 8, 1)})  # one tile, which compiles fast
    few_tokens.FEW_LAUNCHES = {0: {1: {8: few, 16: few}}}
    kernels.FEW_ROWS = {arch: launch.FEW_ROWS[90]}
    half = dtype == torch.float16  # bf16 is left out where only sizes differ
    for T, op in itertools.product((1, 100, 3, 16, 60) if half else (1, 100), OPS):
        getattr(kernels.fused, op)(*op_arguments(op, dtype, (8, 8, 128), T, 300, 500)[0])
    for heads, T in [((8, 1, 64), 1), ((8, 1, 64), 3), ((4, 2, 256), 1), ((4, 2, 256), 100), ((2, 2, 256), 1)] if half else []:
        kernels.fused.attention(*op_arguments("attention", dtype, heads, T, 300, 500)[0])
    forms = [("e4m3", 1), ("e5m2", 1), ("e4m3", 3)] + ([("e5m2", 3), ("e4m3", 16), ("e4m3", 60)] if half else [])
    for form, T in forms:
        for op in launch.OPS:
            arguments = op_arguments(op, dtype, (8, 8, 128), T, 300, 500)[0]
            getattr(kernels.fused, op)(*[a.encoded(FORMATS[form]) if isinstance(a, Matrix) else a for a in arguments])
    for D, T in ((128, 1), (128, 100), (64, 1)):
        arguments = op_arguments("rmsnorm_qkv_rope", dtype, (8, 2, D), T, 300, 500)[0]
        bias, qk_norm = randn(12 * D, dtype=dtype), randn(2, D, dtype=dtype)
        for matrix in (arguments[2], arguments[2].encoded(E4M3)):
            for extra in (bias, None), (None, qk_norm):
                kernels.fused.rmsnorm_qkv_rope(*arguments[:2], matrix, *arguments[3:], *extra)
    C, F, V = 1024, 5504, 600
    for form in (None, *FORMATS):
        w, output = (Matrix(torch.zeros(rows, columns, dtype=dtype)) for rows, columns in ((C, F), (V, C)))
        if form:
            w, output = (m.encoded(FORMATS[form]) for m in (w, output))
        exchange = parallel.Exchange([w, output], 0, [0, 0], torch.empty(2 * (C + V), dtype=torch.int64))
        x = torch.zeros(1, C, dtype=dtype)
        exchange.linear_add(torch.zeros(1, F, dtype=dtype), w, x)
        exchange.rmsnorm_linear(x, x[0], output, 1e-5, torch.zeros(1, 2 * V - 1))
    one = torch.zeros(1, dtype=torch.int32)
    rows = torch.zeros(3, 512, dtype=dtype)
    kernels._launch_rmsnorm(rows, rows[0], 1e-5, *fp8.encode_rows(rows))
    for T, D in ((1, 128), (100, 128 if half else 64)):
        caches = [torch.zeros(8, 500, D, dtype=torch.int8) for _ in range(2)]
        arguments = op_arguments("rmsnorm_qkv_rope", dtype, (8, 8, D), T, 300, 500)[0]
        kernels.fused.rmsnorm_qkv_rope(*arguments[:4], *caches, *arguments[6:])
        kernels.fused.attention(torch.zeros(T, 8, D, dtype=dtype), *caches, one)
    kernels.decode_caches(*caches, one, 100, dtype)
    if half:
        halves = [torch.zeros(8, 500, 128, dtype=dtype) for _ in range(2)]
        with kernels.fp16_accumulation(True):
            kernels.fused.attention(torch.zeros(100, 8, 128, dtype=dtype), *halves, one)
    for settings in (Sampling(), Sampling(temp=0), Sampling(top_k=0, repeat_penalty=1.1)):
        tokens, host_tokens = (torch.zeros(512, dtype=torch.int32) for _ in range(2))
        sampler = Sampler(torch.device("cpu"), settings)
        kernels.fused.sample(torch.zeros(32000), tokens, host_tokens, one, sampler)
        kernels.fused.sample_rows(torch.zeros(5, 32000), tokens, host_tokens, one, sampler)
    cache = SimpleNamespace(tokens=tokens, device_pos=one, host_tokens=host_tokens, size=512)
    speculation.enqueue_lookup(cache, 4, one, torch.zeros(2, 2, dtype=torch.int32))
    speculation.enqueue_accept(cache, 5, tokens, one, one, torch.zeros(2, 2, dtype=torch.int32))
    record_training(dtype)
    return recorded


def record_training(dtype: torch.dtype) -> None:
    """Launch the training ops, with shapes of real models and with odd ones; with and without optional arguments."""
    new = lambda *shape, dtype=dtype: torch.zeros(shape, dtype=dtype)
    count, targets = new(dtype=torch.int64), new(2, dtype=torch.int64)
    for V, kind in ((32000, dtype), (128256, torch.float32), (201, dtype)):
        kernels.cross_entropy_rows(new(2, V, dtype=kind), targets, count)
        kernels.cross_entropy_rows(new(2, V, dtype=kind), targets, None)
    for C, residual, seed in ((768, torch.float32, new(1, dtype=torch.int32)), (4096, dtype, None)):
        x, y, weight = new(40, C, dtype=residual), new(40, C), new(C, dtype=torch.float32)
        training.rmsnorm_forward(x, y, weight, 1e-5, dtype, seed, 0.1)
        training.rmsnorm_backward(x, weight, y, x, 1e-5, dtype, seed, 0.1)
    training.rmsnorm_forward(new(40, 72), None, new(72), 1e-5, dtype, None, 0.0)
    training.rmsnorm_backward(new(40, 72), new(72), new(40, 72), None, 1e-5)
    training.bias_backward(new(300, 2304))
    for D in (128, 24):
        cos, heads = new(8, D // 2, dtype=torch.float32), [new(2, 8, count, D) for count in (4, 2, 2)]
        training.rope_forward(new(2, 8, 8 * D), cos, cos, 4, 2)
        training.rope_backward(*heads, cos, cos)
    for F in (2112, 53):
        training.swiglu_forward(new(16, 2 * F))
        training.swiglu_backward(new(16, 2 * F), new(16, F))
    training._scale(new(16, 48), new(1, dtype=torch.float32))


def compile_kernels(arch: int) -> None:
    """Compile all that is launched to machine code for an architecture."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    types = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
    types[torch.int8] = "*i8"
    names, done = set(), set()
    for dtype in (torch.float16, torch.bfloat16):
        for kernel, arguments, constants, warps, stages in record_launches(dtype, arch):
            values = dict(zip(kernel.arg_names, arguments)) | constants
            signature, constexprs, aligned = {}, {}, {}
            for i, name in enumerate(kernel.arg_names):
                value = values[name]
                if value is None or kernel.params[i].is_constexpr:
                    signature[name], constexprs[name] = "constexpr", value
                elif isinstance(value, torch.Tensor):
                    signature[name], aligned[(i,)] = types[value.dtype], [["tt.divisibility", 16]]
                else:
                    signature[name] = "i32" if isinstance(value, int) else "fp32"
            key = (kernel.__name__, str(signature), str(constexprs), warps, stages)
            if key in done:
                continue
            done.add(key)
            options = dict(num_warps=warps, num_stages=stages, launch_pdl=arch >= 90, maxnreg=constants.get("maxnreg"))
            source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, aligned)
            compiled = launch.triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
            assert compiled.asm["cubin"]
            assert compiled.metadata.shared <= ARCHITECTURES[arch] * 1024, (key, compiled.metadata.shared)
            assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == (arch >= 90), key
            names.add(kernel.__name__)
            if constants.get("FP16_SUMS") and arch < 90:
                assert "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16" in compiled.asm["ptx"], "no sums in half precision"
    print(f"{len(done)} variants of {len(names)} kernels for sm_{arch}: {' '.join(sorted(names))}")


@needs_triton
@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("start_pos", [0, 40, 77])
@pytest.mark.parametrize("heads", [(2, 2, 64), (4, 1, 24), (4, 2, 128)], ids=str)
def test_attention_of_a_prompt_after_cached_positions(heads, start_pos, eight_bits):
    """It sees nothing after the last position of the prompt, not even NaN."""
    for T in (65, 127) if DEVICE.type == "cpu" else (65, 127, 512, 700, 2048):
        q, *caches, pos = op_arguments("attention", torch.float16, heads, T, start_pos)[0]
        if eight_bits:
            caches = [E4M3.round(c) for c in caches]
        for c in caches:
            c[:, start_pos + T :] = 0x7F if eight_bits else torch.nan
        exact = kernels.reference.attention(q.float(), *map(kernels.cached_ref, caches), pos)
        assert nmse(kernels.fused.attention(q, *caches, pos), exact) < ONE_UNIT[torch.float16], T


def compile_hopper(dtype: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    def tiles(rows: int) -> str:
        kind = getattr(hopper.gl, dtype)
        return f"tensordesc<{kind}[{rows}, 128],{hopper.gl.NVMMASharedLayout.get_default_for([rows, 128], kind)!r}>"

    signature = dict(q=tiles(64), k=tiles(128), v=tiles(128), out=tiles(64), pos="*i32", T="i32", qk_scale="fp32")
    signature |= dict.fromkeys(("S", "H", "G", "positions_at_once"), "i32")
    sizes = dict(D=128, ROWS=hopper.ROWS, BLOCK_N=hopper.BLOCK_N, STAGES=2)
    source = GluonASTSource(hopper._hopper_attention_kernel, signature | dict.fromkeys(sizes, "constexpr"), sizes)
    compiled = launch.triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))
    assert compiled.metadata.shared <= ARCHITECTURES[90] * 1024
    assert "wgmma.mma_async" in compiled.asm["ptx"] and "cp.async.bulk.tensor" in compiled.asm["ptx"]


# ---- several processes


PARALLEL = {  # cases, with checkpoints made below: a folder, and options of load
    "grouped queries": ("tiny", {}),
    "one key/value head, bias, tied": ("one head", {}),
    "norms of q and k": ("qwen 3", {}),
    "bin": ("bin", {}),
    "meta, 2 shards": ("meta", {}),
    "e4m3": ("tiny", dict(fp8="e4m3")),
    "e5m2, tied": ("one head", dict(fp8="e5m2")),
    "8-bit cache": ("tiny", dict(kv_fp8=True)),
    "saved": ("saved", {}),
    "fused": ("tiny", dict(backend="triton")),
}


def parallel_result(folder: Path, case: str, **changed) -> tuple[torch.Tensor, list[int]]:
    """Logits of a prompt and of single tokens after it, and greedy tokens, in this process or as one of several."""
    name, options = PARALLEL[case]
    model = load(folder / name, dtype="fp32", device="cpu", **options | changed)
    ids = torch.arange(5, 17) * 7
    with torch.inference_mode():
        cache = KVCache(model)
        logits = torch.cat([model.forward(part, cache) for part in ids.split([10, 1, 1])])
    return logits, list(generate(model, ids.tolist(), n=2 if "backend" in options else 8, sampling=Sampling(temp=0), eos=[]))


def parallel_cases(size: int) -> list[str]:
    return [case for case in PARALLEL if case != "fused" or size == 2 and launch.triton]


def fork_ranks(folder: Path, size: int) -> int:
    """Let `size` forks of this process, which has only done its imports, write their results. Returns how many failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    several = dict(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    forks = []
    for rank in range(size):
        forks.append(os.fork())
        if forks[-1] == 0:
            try:
                os.environ |= several | dict(RANK=str(rank), LOCAL_RANK=str(rank))
                torch.set_num_threads(1)
                torch.save({case: parallel_result(folder, case) for case in parallel_cases(size)}, folder / f"{size}.{rank}")
                parallel.group().leave(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
    return sum(os.waitpid(fork, 0)[1] != 0 for fork in forks)


@pytest.fixture(scope="session")
def parallel_folder(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    for name in ("tiny", "bin", "meta"):
        shutil.copytree(tiny, folder / name)
    torch.manual_seed(1)
    one_head = dict(model="Qwen2", num_key_value_heads=1, tie_word_embeddings=True)
    hugging_face_model(301, **one_head).save_pretrained(folder / "one head")
    hugging_face_model(301, **FAMILIES["qwen 3"]).save_pretrained(folder / "qwen 3")
    shutil.copy(tiny / "tokenizer.model", folder / "one head")
    to_bin(folder / "bin")
    to_meta(folder / "meta", 2)
    save_fp8(folder / "one head", folder / "saved", device="cpu")
    return folder


@pytest.fixture(scope="session")
def of_several(parallel_folder) -> dict[int, list[dict]]:
    """The results of each of 2 and of 4 processes. They are forks of a single one, since every start takes seconds."""
    command = [sys.executable, str(HERE / "test_all.py"), str(parallel_folder), "forks"]
    done = subprocess.run(
        command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {size: [torch.load(parallel_folder / f"{size}.{rank}") for rank in range(size)] for size in (2, 4)}


@pytest.mark.parametrize("size", [2, 4])
def test_several_processes_are_one(of_several, parallel_folder, size):
    first, *others = of_several[size]
    assert list(first) == parallel_cases(size)
    for case, (logits, tokens) in first.items():
        for other in others:
            assert torch.equal(logits, other[case][0]) and tokens == other[case][1], (case, "ranks differ")
        exact, expected = parallel_result(parallel_folder, case, backend="torch")
        assert_close(logits[:10], exact[:10], 1e-2 if case == "8-bit cache" else 1e-4)  # a code may be rounded the other way
        assert_close(logits[10:], exact[10:], 1e-4 if case not in ("e4m3", "e5m2, tied", "saved", "8-bit cache") else 1e-2)
        assert tokens == expected, case


def test_what_does_not_divide_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(parallel.group(), "size", 3)
    with pytest.raises(ValueError, match="4 query heads cannot be divided evenly among 3 processes"):
        load(tiny, device="cpu")
    with pytest.raises(ValueError, match="3 key/value heads can be neither divided nor repeated evenly among 2 processes"):
        read_config_like(n_heads=6, n_kv_heads=3).cut(2)


def test_memory_is_checked_for_each_rank(monkeypatch):
    whole, free = read_config_like(dim=512, n_layers=8, hidden_dim=4096, vocab_size=4096), 100_000_000
    monkeypatch.setattr("checkpoint.free_memory", lambda device: free)
    assert check_memory(whole.cut(4), torch.float32, torch.device("cpu"), 64) is None
    with pytest.raises(MemoryError):
        check_memory(whole, torch.float32, torch.device("cpu"), 64)
    monkeypatch.setattr(parallel.group(), "local_size", 4)  # which share the memory of this host
    with pytest.raises(MemoryError, match="cpu for rank 0 of 1 has 0.03 GB free"):
        check_memory(whole.cut(4), torch.float32, torch.device("cpu"), 64)


@needs_triton
@pytest.mark.parametrize("form", [None, *FORMATS])
def test_the_exchange_adds_and_gathers(form):
    """Three ranks in one process, each with its own memory; a vocabulary that is not evenly divided."""
    C, V, columns = 72, 101, (40, 24, 56)
    matrix = lambda n, k: (lambda m: m.encoded(FORMATS[form]) if form else m)(Matrix(randn(n, k, dtype=torch.float16)))
    sums = [[matrix(C, k) for k in columns] for _ in range(2)]
    whole = matrix(V, C)
    cuts = [parallel.share(V, rank, 3) for rank in range(3)]
    scales = [None if whole.scale is None else whole.scale[rows] for rows in cuts]
    outputs = [Matrix(whole.data[rows].contiguous(), scale, whole.format) for rows, scale in zip(cuts, scales)]
    memory = [torch.zeros(3 * (2 * C + outputs[0].rows), dtype=torch.int64, device=DEVICE) for _ in range(3)]
    addresses = [m.data_ptr() for m in memory]
    exchanges = [parallel.Exchange([sums[0][r], sums[1][r], outputs[r]], r, addresses, memory[r]) for r in range(3)]
    for _ in range(2):
        for matrices in sums:
            x = [randn(1, k, dtype=torch.float16) for k in columns]
            residual = randn(1, C, dtype=torch.float16)
            exact = residual.float() + sum(kernels.linear_ref(a.float(), decoded(m)) for a, m in zip(x, matrices))
            for exchange, a, m in zip(exchanges, x, matrices):
                exchange.send("linear_add", a, None, m, 0.0)
            for exchange, m in zip(exchanges, matrices):
                ours, entries = residual.clone(), exchange.slots[m][1]
                exchange.add_received(m, ours)
                expected = parallel.add_received_ref(entries, exchange.round_number, residual.clone())
                assert nmse(ours, exact) < ONE_UNIT[torch.float16] and nmse(ours, expected) < ONE_UNIT[torch.float16]
        x, norm = randn(1, C, dtype=torch.float16), randn(C, dtype=torch.float16)
        exact = kernels.rmsnorm_linear_ref(x.float(), norm.float(), decoded(whole), 1e-5, torch.empty(1, V, device=DEVICE))
        for exchange, m in zip(exchanges, outputs):
            exchange.send("rmsnorm_linear", x, norm, m, 1e-5)
        for exchange, m in zip(exchanges, outputs):
            ours = exchange.gather_received(m, torch.full((1, V), float("nan"), device=DEVICE))
            assert nmse(ours, exact) < ONE_UNIT[torch.float16]
            assert torch.equal(
                ours[0], parallel.gather_received_ref(exchange.slots[m][1], exchange.round_number, ours[0].clone())
            )
            exchange.round_number += 1


@pytest.mark.parametrize("size", [2, 4])
def test_several_gpus_are_one(parallel_folder, size):
    """Both ways of summing, and thousands of rounds of the exchange with late ranks: see check_gpus."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    process = torchrun(HERE / "test_all.py", parallel_folder, "gpus", size=size, env=os.environ | {"TEST_SEED": str(SEED)})
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err[-3000:]


@torch.inference_mode()
def check_gpus(folder: Path) -> None:
    """What each of several processes does, with a GPU of its own. The errors of several and of one are compared, not their
    results: with e4m3 matrices a prompt's activations are rounded with a scale for each row, and rows of a part have other
    scales than whole rows, so that several round differently from one (logits of models/tales are up to 8% apart), but no
    worse."""
    ranks, alone = parallel.group(), parallel.Group()
    alone.rank, alone.size = 0, 1
    ids = (torch.arange(5, 47) * 7 % 290).to(DEVICE.type)

    def logits(model) -> torch.Tensor:
        cache = KVCache(model)
        return torch.cat([model.forward(part, cache) for part in ids.split([40, 1, 1])])

    for name, options in (("tiny", {}), ("one head", {}), ("tiny", dict(fp8="e4m3")), ("tiny", dict(kv_fp8=True))):
        for dtype in ("fp16", "bf16"):
            parallel.group = lambda: alone
            exact = logits(load(folder / name, dtype="fp32", device=DEVICE.type, backend="torch", fp8=options.get("fp8")))
            one = logits(load(folder / name, dtype=dtype, device=DEVICE.type, **options))
            parallel.group = lambda: ranks
            model = load(folder / name, dtype=dtype, device=DEVICE.type, **options)
            for exchange in (model.exchange, None):
                model.ops = parallel.ops(model.backend, exchange)
                ours = logits(model)
                assert torch.equal(ours.cpu(), ranks.from_first(ours.cpu)), "ranks differ"
                assert nmse(ours, exact) < 2 * nmse(one, exact) + 1e-10, (name, options, dtype, exchange)
    if DEVICE.type == "cuda":
        assert model.exchange, "these GPUs do not reach each other's memory"
        stress_exchange(ranks)


SLOTS, SUMMED = 64, 4096  # of an exchange under stress: the sums of a round, and how many numbers each has


def terms_of(rank: int) -> list[Matrix]:
    """A rank's matrices for the sums of a round: they multiply by 1 on the first rank, by 2 on the second, and so on."""
    matrices = [Matrix(torch.zeros(SUMMED, 64, dtype=torch.float16, device=DEVICE.type)) for _ in range(SLOTS)]
    for m in matrices:
        m.data[:, 0] = rank + 1
    return matrices


class Stressed:
    """A rank and its rounds as graphs: chains of sums whose terms are different whole numbers in each round. In all graphs but
    the first, the rank is late at random places. `wrong` counts the sums that do not belong to their round."""

    def __init__(self, rank: int, size: int, exchange: parallel.Exchange):
        self.total, self.exchange, self.late = size * (size + 1) // 2, exchange, random.Random(SEED + rank)
        self.number, self.wrong = (torch.zeros(1, dtype=t, device=DEVICE.type) for t in (torch.float32, torch.int64))
        self.x = torch.zeros(1, 64, dtype=torch.float16, device=DEVICE.type)
        self.y = torch.zeros(1, SUMMED, device=DEVICE.type)
        self.stream, self.graphs = torch.cuda.Stream(), [torch.cuda.CUDAGraph() for _ in range(4)]
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            self.chain(True)
        for graph in self.graphs:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=self.stream):
                self.chain(graph is not self.graphs[0])

    def chain(self, is_late: bool) -> None:
        self.number.copy_((self.number + 1) % 1009)
        self.x[:, 0] = self.number[0]
        self.y.zero_()
        for m in self.exchange.slots:
            if is_late and self.late.random() < 0.1:
                torch.cuda._sleep(self.late.randrange(100_000))
            self.exchange.linear_add(self.x, m, self.y)
        self.wrong.add_((self.y != SLOTS * self.number * self.total).sum())
        self.exchange.round_number += 1

    def replay(self, with_delays: bool) -> None:
        """One more round, perhaps with a delay after it, on the card or on the host."""
        with torch.cuda.stream(self.stream):
            self.graphs[self.late.randrange(4) if with_delays else 0].replay()
            if self.late.random() < 0.05:
                torch.cuda._sleep(self.late.randrange(2_000_000))
        if self.late.random() < 0.01:
            time.sleep(self.late.random() * 0.005)


def stress(ranks: list[Stressed], rounds: int) -> None:
    for i in range(rounds):
        for rank in ranks:
            rank.replay(with_delays=i < rounds // 4)
        if i % 100 == 99:  # only about a thousand launches can be queued
            torch.cuda.synchronize()
    wrong = [rank.wrong.item() for rank in ranks]
    assert not any(wrong), f"sums of another round, by rank: {wrong}"


def stress_exchange(ranks: parallel.Group) -> None:
    matrices = terms_of(ranks.rank)
    exchange = parallel.make_exchange(matrices, "triton", matrices[0].data.device)
    stress([Stressed(ranks.rank, ranks.size, exchange)], 4000)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("size", [3, 4])
def test_ranks_on_one_card_wait_for_each_other(size):
    """More ranks than there may be cards, each with its own stream on one card and late at random: see stress_one_card."""
    command, seed = [sys.executable, str(HERE / "test_all.py"), str(size), "card"], {"TEST_SEED": str(SEED)}
    done = subprocess.run(command, env=os.environ | seed, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


@torch.inference_mode()
def stress_one_card(size: int) -> None:
    """Without programmatic dependent launch: kernels that start early would fill a shared card and keep out those they wait
    for. And the first round finds entries with its number, so that no rank waits while kernels are compiled and loaded."""
    launch.capability = lambda device: 80
    terms = [terms_of(rank) for rank in range(size)]
    memory = [torch.full((size * SLOTS * SUMMED,), 1 << 32, device=DEVICE) for _ in range(size)]
    addresses = [m.data_ptr() for m in memory]
    exchanges = [parallel.Exchange(terms[r], r, addresses, memory[r]) for r in range(size)]
    ranks = [Stressed(r, size, exchanges[r]) for r in range(size)]
    for rank in ranks:
        rank.wrong.zero_()
    stress(ranks, 1000)


def torchrun(*arguments, size: int = 2, **options) -> subprocess.Popen:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--master-port", str(port)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    return subprocess.Popen([*command, *map(str, arguments)], **pipes | options)


def ranks_of(process: subprocess.Popen) -> list[int]:
    """The processes that run our program under torchrun, by rank; a shell may stand between."""
    shown = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    found = [line.split(maxsplit=2) for line in shown.splitlines()[1:]]
    parents = {int(pid): int(parent) for pid, parent, _ in found}
    ours = [int(pid) for pid, _, command in found if re.match(r"\S*python\S* (-u )?\S*run\.py", command)]
    return sorted(pid for pid in ours if process.pid in (parents[pid], parents.get(parents[pid])))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_torchrun_writes_what_one_process_writes(tiny, cli, tmp_path):
    flags = ("-m", tiny, "-n", 6, "--temp", 0, "--dtype", "fp32", "--device", "cpu")
    process = torchrun(HERE / "run.py", "--chat", *flags, "--prompt-cache", tmp_path / "kept", stdin=subprocess.PIPE)
    out, err = process.communicate(b"One\n/clear\nTwo\n\xff\n", timeout=PATIENCE)
    assert process.returncode == 0, err
    assert out.decode() == cli("--chat", *flags, stdin=b"One\n/clear\nTwo\n")[1]
    assert err.count(b"generated 12 tokens") == 1 and err.count(b"not UTF-8") == 1
    assert b"cpu in 2 processes, sums through gloo" in err
    assert sorted(f.name for f in tmp_path.iterdir()) == ["kept.1-of-2", "kept.2-of-2"]


@pytest.mark.parametrize("how", ["killed", "interrupted", "stdout closed"])
def test_no_rank_goes_on_alone(tiny, how):
    command = f'"{sys.executable}" "{HERE}/run.py" -m "{tiny}" -p Once -c 100000 --ignore-eos --device cpu'
    if how == "interrupted":  # torchrun ends whoever is still there when the first has gone: each tells its exit code before
        command = f'trap "" TERM; {command}; code=$?; echo "exit code $code" >&2; exit $code'
    process = torchrun("--no-python", "bash", "-c", command)
    process.stdout.read(20)
    first, second = ranks_of(process)
    if how == "stdout closed":
        process.stdout.close()
        assert process.wait(PATIENCE) == 0
        return
    os.kill(*((second, signal.SIGKILL) if how == "killed" else (first, signal.SIGINT)))
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0 and not is_running(first) and not is_running(second)
    if how == "killed":
        assert len(re.findall(rb"^error: ", err, re.MULTILINE)) <= 1, err  # none where torchrun was faster
    else:
        assert err.count(b"generated") == 1 and err.count(b"exit code 130\n") == 2, err


def test_an_error_of_one_rank_is_one_line(tiny):
    folder = f"./{tiny.parent.name}/{tiny.name}"  # which the second rank looks for elsewhere
    script = f'[ $RANK = 0 ] || cd /; exec "{sys.executable}" "{HERE}/run.py" -p Once --device cpu -m {folder}'
    process = torchrun("--no-python", "bash", "-c", script, cwd=tiny.parent.parent)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0 and len(re.findall(rb"^error: no such folder", err, re.MULTILINE)) == 1
    assert len(re.findall(rb"^error: ", err, re.MULTILINE)) == 1, err


# ---- sampling


def choose(logits: torch.Tensor, tokens: torch.Tensor, position: torch.Tensor, ops=kernels.reference, **settings) -> int:
    tokens, host_tokens = tokens.clone(), tokens.clone()
    ops.sample(logits.clone(), tokens, host_tokens, position, Sampler(logits.device, Sampling(**settings)))
    at = int(position)
    assert host_tokens[at] == tokens[at] or host_tokens[at] == -1 and tokens[at] == 0
    return int(host_tokens[at])


def draw(logits: torch.Tensor, count: int = 4000, history=(), **settings) -> torch.Tensor:
    """How often each token is chosen, over many positions and thus random numbers."""
    tokens = torch.zeros(len(history) + count, dtype=torch.int32, device=logits.device)
    tokens[: len(history)] = torch.tensor(history, dtype=torch.int32, device=logits.device)
    counts = torch.zeros(len(logits))
    for i in range(len(history), len(history) + count):
        position = torch.tensor([i], dtype=torch.int32, device=logits.device)
        settings["seed"] = SEED + i
        counts[choose(logits, tokens, position, **settings)] += 1
    return counts / count


OFF = dict(temp=1.0, top_k=0, top_p=1.0, min_p=0.0)


def test_sampling_follows_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    for temp in (0.5, 1.0, 2.0):
        expected = (logits / temp).softmax(0)
        assert (draw(logits, **(OFF | dict(temp=temp))) - expected).abs().max() < 0.04  # 5 sigma of 4000 draws


def test_each_filter_keeps_what_it_should():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]).log()
    kept = lambda **s: draw(logits, 600, **(OFF | s)).gt(0).tolist()  # noqa: E731
    assert kept() == [True] * 5
    assert kept(top_k=2) == [True, True, False, False, False]
    assert kept(top_p=0.76) == [True, True, True, False, False]
    assert kept(top_p=0.0) == [True, False, False, False, False]
    assert kept(min_p=0.2) == [True, True, True, False, False]
    assert kept(temp=0.0) == [True, False, False, False, False]


def test_equals_at_the_edge_are_all_kept():
    logits = torch.tensor([1.0] * 6 + [0.0] * 2)
    kept = draw(logits, 600, **(OFF | dict(top_k=2, top_p=0.3)))
    assert kept.gt(0).tolist() == [True] * 6 + [False] * 2
    uniform = draw(torch.zeros(100), 3000, **(OFF | dict(top_k=2)))
    assert uniform.gt(0).all()


@pytest.mark.parametrize("temp", [1e-50, 1e-9, 1e9, float("inf")])
def test_temperatures_at_the_ends(temp):
    logits = torch.tensor([1.0, 1.0 + 2**-22, -3.0, 0.5])
    drawn = draw(logits, 400, **(OFF | dict(temp=temp)))
    assert drawn[1] == 1 if temp < 1 else (drawn - 0.25).abs().max() < 0.12  # 5 sigma of 400 draws
    if launch.triton is not None:
        draws = lambda ops, logits: draw(logits, 12, ops=ops, **(OFF | dict(temp=temp, top_k=3)))
        for some in (logits, torch.zeros(3000)):  # all equal: more than a part keeps
            assert draws(kernels.fused, some.to(DEVICE)).equal(draws(kernels.reference, some))


def test_filters_act_before_temperature():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert draw(logits, 600, **(OFF | dict(top_p=0.6, temp=100.0))).gt(0).tolist() == [True, True, False]


def test_repeat_penalty_looks_back_its_window():
    logits = torch.tensor([2.0, 1.9, -1.0, -1.1])
    greedy = lambda **s: int(draw(logits, 1, **(OFF | dict(temp=0.0) | s)).argmax())  # noqa: E731
    assert greedy() == 0
    assert greedy(history=[0], repeat_penalty=1.5) == 1
    assert greedy(history=[0, 3, 3], repeat_penalty=1.5, repeat_last_n=2) == 0
    assert greedy(history=[0, 3, 3], repeat_penalty=1.5, repeat_last_n=-1) == 1


@pytest.mark.parametrize("ops", [kernels.reference, pytest.param(kernels.fused, marks=needs_triton)], ids=["torch", "triton"])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 7, 8])
def test_the_window_of_the_penalty_ends_where_it_should(ops, window):
    logits, position = torch.full((20,), -20.0, device=DEVICE), torch.tensor([12], dtype=torch.int32, device=DEVICE)
    for high, back in itertools.product((2.0, -1.0), (window, window + 1)):  # token 3 that far back, token 5 elsewhere
        logits[3], logits[4], expected = high, high - 0.5, 4 if back == window else 3
        tokens = torch.full((16,), 5, dtype=torch.int32, device=DEVICE)
        tokens[12 - back] = 3
        settings = dict(repeat_penalty=2.0, repeat_last_n=window)
        assert choose(logits, tokens, position, ops, temp=0, **settings) == expected
        assert choose(logits, tokens, position, ops, top_k=0, temp=1e-9, **settings) == expected


def test_a_seed_repeats_and_not_finite_logits_are_told(tiny):
    model = load(tiny, device="cpu")
    runs = [list(generate(model, [1, 5], n=20, sampling=Sampling(seed=seed), eos=[])) for seed in (SEED, SEED, SEED + 1)]
    assert runs[0] == runs[1] != runs[2]
    nowhere = torch.zeros(1, dtype=torch.int32)
    for bad in ("nan", "inf", "-inf"):
        assert choose(torch.tensor([1.0, float(bad), 2.0]), nowhere, nowhere) == -1


# ---- tokenizer


def test_text_survives_encoding_and_streams_as_it_decodes(tiny):
    tokenizer = Tokenizer(tiny)
    for text in ("Once upon a time", " two spaces  inside ", "Żółw \U0001f422 \u4f60\u597d\n\n", "", "</s><s>", "a\tb"):
        ids = tokenizer.encode(text, bos=False)
        assert tokenizer.decode(ids) == text == tokenizer.vocabulary.sp.decode(ids)
        assert tokenizer.bos not in ids and tokenizer.eos not in ids
        stream = TextStream(tokenizer, at_start=True)
        pieces = [stream.push(i) for i in ids] + [stream.finish()]
        assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert tokenizer.encode("x")[0] == tokenizer.bos


def test_leading_space_of_a_continuation_is_kept(tiny):
    tokenizer = Tokenizer(tiny)
    ids = tokenizer.encode("time", bos=False)
    stream = TextStream(tokenizer)
    assert "".join(stream.push(i) for i in ids) + stream.finish() == " time"


def test_broken_utf8_at_the_end_is_replaced(tiny):
    tokenizer = Tokenizer(tiny)
    half = [tokenizer.vocabulary.sp.piece_to_id("<0xF0>"), tokenizer.vocabulary.sp.piece_to_id("<0x9F>")]
    assert tokenizer.decode(half) == tokenizer.vocabulary.sp.decode(half) == "\ufffd" * 2


@pytest.mark.parametrize("stops", [["fox"], ["x. It", "zzz"], ["time", "there"], [". It said"]])
def test_stop_strings_may_straddle_tokens(tiny, stops):
    tokenizer, text = Tokenizer(tiny), "Once upon a time there was a fox. It said"
    stream = TextStream(tokenizer, at_start=True, stops=stops)
    shown = ""
    for i in tokenizer.encode(text, bos=False):
        shown += stream.push(i)
        assert text.startswith(shown) and not any(stop in shown for stop in stops)
    assert stream.stopped and shown + stream.finish() == text[: min(text.find(s) for s in stops if s in text)]


def test_what_looked_like_a_stop_string_is_printed(tiny):
    tokenizer, text = Tokenizer(tiny), "Once upon a time there"
    stream = TextStream(tokenizer, at_start=True, stops=["there was"])
    assert "".join(stream.push(i) for i in tokenizer.encode(text, bos=False)) + stream.finish() == text


def conversation(*texts: str, system: str = "") -> list[dict]:
    """What the user and the assistant say in turn."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def test_llama2_template_is_metas(tiny):
    """Meta encodes bos + "[INST] question [/INST] answer " + eos for each past turn, then the last question."""
    t = Tokenizer(tiny, chat_template="llama2")
    ids = t.apply_chat_template(conversation(" hello ", "good day", "tell me a tale", system="Be kind."))
    first = t.vocabulary.sp.encode("[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\n hello [/INST] good day ")
    assert ids == [t.bos, *first, t.eos, t.bos, *t.vocabulary.sp.encode("[INST] tell me a tale [/INST]")]


def test_other_templates_place_control_tokens(copy):
    def ids(name: str, *texts: str, **control: int) -> list[int]:
        (copy / "added_tokens.json").write_text(json.dumps({f"<|{token}|>": i for token, i in control.items()}))
        return Tokenizer(copy, chat_template=name).apply_chat_template(conversation(*texts, system="S"))

    t = Tokenizer(copy)
    enc = t.vocabulary.sp.encode
    assert ids("zephyr", "U") == [
        *[t.bos, *enc("<|system|>\nS"), t.eos],
        *[*enc("\n<|user|>\nU"), t.eos, *enc("\n<|assistant|>\n")],
    ]
    assert ids("vicuna", "U", "A", "V") == [t.bos, *enc("S USER: U ASSISTANT: A"), t.eos, *enc("USER: V ASSISTANT:")]
    assert ids("plain", "U") == [t.bos, *enc("S\nU")]
    assert ids("chatml", "U", im_start=400, im_end=401) == [
        *[t.bos, 400, *enc("system\nS"), 401, *enc("\n")],
        *[400, *enc("user\nU"), 401, *enc("\n"), 400, *enc("assistant\n")],
    ]
    assert ids("chatml", "a </s> b")[1:] == enc(
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na </s> b<|im_end|>\n<|im_start|>assistant\n"
    )


def test_templates_are_found(tmp_path):
    config = {"chat_template": "from the configuration"}
    folder = tmp_path / "vicuna-7b"
    folder.mkdir()
    assert find_template(folder, {}) == (TEMPLATES["vicuna"], "vicuna (from the folder's name)")
    assert find_template(folder, config)[0] == "from the configuration"
    assert find_template(folder, {"chat_template": [{"name": "default", "template": "x"}, {"name": "tool_use"}]})[0] == "x"
    (folder / "chat_template.jinja").write_text("from the file")
    assert find_template(folder, config)[0] == "from the file"
    assert find_template(folder, config, "zephyr") == (TEMPLATES["zephyr"], "zephyr (given)")
    assert find_template(tmp_path / "models--meta-llama--Llama-2-7b-chat-hf/snapshots/abc", {})[0] == TEMPLATES["llama2"]
    assert find_template(tmp_path, {}) == (TEMPLATES["plain"], "no template found: plain text")


# ---- tokenizer.json, and chat templates as their checkpoints have them, against transformers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCT = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set messages = messages[1:] %}"
    "{%- endif %}{{- bos_token }}{%- for m in messages %}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('user and assistant must alternate') }}{%- endif %}{%- if m['role'] == 'user' %}"
    "{%- if loop.last and system is defined %}{{- '[INST]S' + system + '\n\n' + m['content'] + '[/INST]' }}"
    "{%- else %}{{- '[INST]S' + m['content'] + '[/INST]' }}{%- endif %}"
    "{%- else %}{{- 'S' + m['content'] | trim + eos_token }}{%- endif %}{%- endfor %}"
)
CHAT_FAMILIES = {  # kind of tokenizer.json, control tokens after bos and eos, template: written from what the families publish
    "llama 3": (
        "byte level",
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "{{- bos_token }}\n{%- for m in messages %}\n    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + "
        "m['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    "
        "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n",
    ),
    "mistral 7b v0.3": ("pieces", ["<s>", "</s>", "[INST]", "[/INST]"], INSTRUCT.replace("S'", " '").replace("S[", "[")),
    "mistral nemo": ("byte level", ["<s>", "</s>", "[INST]", "[/INST]"], INSTRUCT.replace("]S", "]").replace("'S'", "''")),
    "zephyr, tinyllama": (
        "pieces",
        ["<s>", "</s>"],
        "{% for m in messages %}\n{% if m['role'] == 'user' %}\n{{ '<|user|>\n' + m['content'] + eos_token }}\n"
        "{% elif m['role'] == 'system' %}\n{{ '<|system|>\n' + m['content'] + eos_token }}\n"
        "{% else %}\n{{ '<|assistant|>\n'  + m['content'] + eos_token }}\n{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
    ),
    "yi": ("spaced pieces", ["<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"], CHATML),
    "qwen 2.5, smollm2": (
        "byte level",
        ["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
        "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{%- endif %}"
        + CHATML,
    ),
    "qwen 3": (
        "byte level",
        ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>"],
        "{%- for m in messages %}{%- set text = m['content'] %}{%- if m['role'] == 'assistant' and '</think>' in text %}"
        "{%- set text = text.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{{- '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined %}{{- '<think>' }}"
        "{%- endif %}{%- endif %}",
    ),
    "deepseek distillation": (
        "byte level",
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"],
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
        "{% set ns.system = m['content'] %}{% endif %}{% endfor %}"
        "{{ bos_token }}{{ ns.system }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
        "{% elif m['role'] == 'assistant' %}"
        "{{ '<｜Assistant｜>' + m['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
    ),
}


def train_tokenizer_json(folder: Path, family: str) -> Path:
    """A folder with a tokenizer.json of that family's kind, its control tokens and its template."""
    kind, control, template = CHAT_FAMILIES[family]
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"), "isolated")
    pieces = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, byte_level]) if kind == "byte level" else pieces
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet() if kind == "byte level" else []
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    t.train_from_iterator([TEXT] * 20, trainer)
    t.decoder = tokenizers.decoders.ByteLevel()
    raw = json.loads(t.to_str())
    if kind != "byte level":
        vocab = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *raw["model"]["vocab"]]
        raw["model"] |= {"vocab": {piece: i for i, piece in enumerate(vocab)}, "byte_fallback": True, "unk_token": "<unk>"}
        decoders = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
        raw["decoder"] = {"type": "Sequence", "decoders": [*decoders, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
        raw["pre_tokenizer"]["split"] = False
    if kind == "spaced pieces":  # as converted from old tokenizers: a space before the text and after each control token
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        raw["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
        raw["pre_tokenizer"] = None
    t = tokenizers.Tokenizer.from_str(json.dumps(raw))
    for token in control:
        t.add_tokens([tokenizers.AddedToken(token, special="hink" not in token and "User" not in token, normalized=False)])
    bos, eos = control[:2]
    if "qwen" not in family:
        t.post_processor = tokenizers.processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, t.token_to_id(bos))])
    t.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def theirs_of(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def random_text(length: int) -> str:
    """Words, white space, and characters of all planes."""
    planes = [(32, 127), (32, 0x300), (0x300, 0xD800), (0xE000, 0x110000)]
    return "".join(
        random.choice(["the", " fox", "  ", "\n", "\n\n", "\t", "12", chr(random.randrange(*random.choice(planes)))])
        for _ in range(random.randrange(length))
    )


@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_tokenizer_json_equals_transformers(tmp_path, family):
    ours, theirs = Tokenizer(train_tokenizer_json(tmp_path, family)), theirs_of(tmp_path)
    for _ in range(200):
        text = random_text(30)
        assert ours.encode(text) == theirs(text)["input_ids"], (text,)
        ids = ours.encode(text, bos=False)
        stream = TextStream(ours, at_start=True)
        pieces = [stream.push(i) for i in ids] + [stream.finish()]
        assert "".join(pieces) == ours.decode(ids) == theirs.decode(ids), (text,)
        assert not any("\ufffd" in piece for piece in pieces), (text,)
        split = random.randrange(1, len(text) + 2)
        joined = ours.encode(text[:split], bos=False) + ours.encode_after(text[split:])
        whole = (
            text.removeprefix(" ") if CHAT_FAMILIES[family][0] == "pieces" else text
        )  # that kind adds a space unless there is one
        assert ours.decode(ids) == ours.decode(joined) == whole, (text, split)
    long = "a" + random_text(20_000) * 5
    assert ours.decode(ours.encode(long, bos=False)) == long
    cut = ours.encode("a\U00010348", bos=False)  # a character of four tokens
    assert all(ours.decode(cut[:n]) == theirs.decode(cut[:n]) for n in range(1, len(cut))) and len(cut) > 4


@pytest.mark.parametrize("system", ["", "Be kind."])
@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_chat_templates_equal_transformers(tmp_path, family, system):
    ours, theirs = Tokenizer(train_tokenizer_json(tmp_path, family)), theirs_of(tmp_path)
    for _ in range(10):
        texts = [random_text(12) for _ in range(random.choice([1, 3, 5]))]
        messages = conversation(*texts, system=system)
        for more in (True, False):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=more, return_dict=False)
            assert ours.apply_chat_template(messages, more) == expected, messages
    thinking = conversation("hi", "<think>\nhm\n</think>\n\nhello", "again", system=system)
    expected = theirs.apply_chat_template(thinking, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat_template(thinking) == expected


@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_typed_control_tokens_are_text_wherever_the_template_puts_them(tmp_path, family):
    """A conversation has the same control tokens as a harmless one, and no character is lost."""
    t = Tokenizer(train_tokenizer_json(tmp_path, family))
    numbers = set(t.control.values())
    names = [name for name in t.control if "think" not in name]
    parts = [
        *names,
        *(name[: random.randrange(len(name))] for name in names),
        *(name[2:] for name in names),
        " ",
        "\n",
        "x",
        "<",
    ]
    control_of = lambda *texts: [i for i in t.apply_chat_template(conversation(*texts, system="y")) if i in numbers]
    for _ in range(50):
        typed, answer = ("".join(random.choices(parts, k=random.randrange(1, 8))) for _ in range(2))
        assert control_of(typed, answer, typed) == control_of("x", "x", "x"), (typed, answer)
        assert typed.strip() in t.decode(t.apply_chat_template(conversation(typed))), (typed,)
        assert numbers.isdisjoint(t.encode(typed, bos=False)) and t.decode(t.encode("x" + typed, bos=False)) == "x" + typed


@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_answers_keep_their_tokens_and_end_where_the_template_says(tmp_path, family):
    t = Tokenizer(train_tokenizer_json(tmp_path, family))
    ids, stops = t.turn_ends()
    first, second = conversation("tell me"), conversation("tell me", "a tale", "go on")
    prompt = t.chat_prompt(first)
    answer = [i for letter in "a tale" for i in t.encode_after(letter)]  # not the tokens that the whole text would have
    again = t.chat_prompt(second, past=prompt.answered("a tale", answer))
    if not again.text.startswith(prompt.text):
        assert "deepseek" in family, "which writes <think> before an answer, but not before a past one"
        return
    assert again.ids[: len(prompt.ids) + len(answer)] == prompt.ids + answer, (again.ids, prompt.ids, answer)
    end = again.ids[len(prompt.ids) + len(answer)]
    same = lambda ids: t.decode(ids).replace(" ", "")  # but for the space that this answer lacks
    assert same(again.ids) == same(t.apply_chat_template(second)) and ids == {end} <= set(t.control.values())
    assert stops == (["<|user|>"] if "zephyr" in family else [])
    other = t.chat_prompt(second, past=prompt.answered("another", answer))
    assert other.ids == t.apply_chat_template(second), "what was said is not what the conversation holds"


HOSTILE = {
    "loops": ("{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3, "took more than"),
    "grows": ("{% for a in range(9999) %}{{ 'x' * 99999 }}{% endfor %}", "characters"),
    "is long": ("{{ 'x' * 1_100_000 }}", "characters"),
    "is long itself": ("x" * 1_100_000, "has more than 1,048,576 bytes"),
    "is large, though little of it is written": ("{{ ('x' * 2147483648)[:9] }}", "of memory"),
    "doubles": ("{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "more than"),
    "is large": ("{{ 'x' * 10 ** 12 }}", "of memory"),
    "raises": ("{{ raise_exception('only\nthe king may speak') }}", "the chat template says: only the king may speak"),
    "is wrong": ("{% if %}", "the chat template says"),
    "reaches out": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "is unsafe"),
    "includes": ("{% include '/etc/passwd' %}", "the chat template says"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_template_costs_one_line(cli, tiny, tmp_path, monkeypatch, how):
    text, expected = HOSTILE[how]
    (tmp_path / "template").write_text(text)
    monkeypatch.setattr(template, "SECONDS", 1.0 if how == "loops" else PATIENCE)
    code, out, err = cli("-m", tiny, "--chat", "--chat-template", tmp_path / "template", "--quiet", stdin=b"hello\n")
    assert code == 1 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and expected in err, err


def test_the_process_of_templates_ends_with_its_tokenizer(tiny):
    tokenizer = Tokenizer(tiny)
    tokenizer.apply_chat_template(conversation("hello"))
    process = tokenizer._renderer.process
    assert process.poll() is None
    del tokenizer
    gc.collect()
    assert process.poll() is not None and process.stdin.closed and process.stdout.closed


def test_a_template_has_its_time_on_a_busy_machine(tiny, monkeypatch):
    """Its seconds are those of the processor: waiting for one does not count."""
    monkeypatch.setattr(template, "SECONDS", 1.0)
    tokenizer = Tokenizer(tiny)
    ids = tokenizer.apply_chat_template(conversation("hello"))
    process = tokenizer._renderer.process
    process.send_signal(signal.SIGSTOP)
    threading.Timer(3, process.send_signal, [signal.SIGCONT]).start()
    assert tokenizer.apply_chat_template(conversation("hello")) == ids


def test_a_process_of_templates_that_does_not_start_is_an_error(tiny, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    with pytest.raises(RuntimeError, match="renders chat templates did not start"):
        Tokenizer(tiny).apply_chat_template(conversation("hello"))


@pytest.mark.parametrize("how, expected", [("not-there", "is not a chat template"), (".", "is not a chat template")])
def test_a_template_that_is_not_there(cli, tiny, how, expected):
    code, _, err = cli("-m", tiny, "--chat", "--chat-template", how)
    assert code == 1 and expected in err and "zephyr" in err and err.count("\n") == 1


def test_llama2s_tokenizer_as_json_is_cut_where_its_vocabulary_holds_a_control_token(tmp_path):
    """With ignore_merges, a word that is in the vocabulary is one token, whatever the merges say."""
    train_tokenizer_json(tmp_path, "llama 3")
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["model"]["ignore_merges"] = True
    raw["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    raw["model"]["vocab"] |= {token["content"]: token["id"] for token in raw["added_tokens"]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    t = Tokenizer(tmp_path)
    ids = t.encode("<|eot_id|>", bos=False)
    assert t.control["<|eot_id|>"] not in ids and t.decode(ids) == "<|eot_id|>"


SPOILED_JSON = {
    "not JSON": ("{", "is not JSON"),
    "empty": ("{}", "is not a valid tokenizer"),
    "of another kind": (lambda raw: raw["model"].update(type="Magic"), "is not a valid tokenizer"),
    "without a decoder": (lambda raw: raw.update(decoder=None), "its decoder is absent"),
    "with another decoder": (
        lambda raw: raw.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}),
        "WordPiece",
    ),
    "added tokens": (lambda raw: raw.update(added_tokens=[1, 2]), "is not a valid tokenizer"),
    "a panic": (lambda raw: raw["model"].update(continuing_subword_prefix="x" * 9), "out of range for slice"),
    "too large": (lambda raw: None, "but the model has a vocabulary of 100"),
}


@pytest.mark.parametrize("how", SPOILED_JSON)
def test_a_spoiled_tokenizer_json_is_told(tmp_path, how, capfd):
    spoil, expected = SPOILED_JSON[how]
    file = train_tokenizer_json(tmp_path, "llama 3") / "tokenizer.json"
    raw = json.loads(file.read_text())
    if callable(spoil):
        spoil(raw)
    file.write_text(json.dumps(raw) if callable(spoil) else spoil)
    with pytest.raises(ValueError, match=expected):
        Tokenizer(tmp_path, vocab_size=100)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", ["tokenizer.model", "tokenizer.json"])
def test_control_tokens_are_short_and_may_be_many(copy, tmp_path, kind):
    """Each message is searched for all of them, and for their beginnings and ends; speech models have tens of thousands."""
    if kind == "tokenizer.json":
        copy = train_tokenizer_json(tmp_path, "llama 3")
    before = (copy / kind).read_bytes()

    def add(names: list[str]) -> None:
        if kind == "tokenizer.model":
            added = {name: 1000 + i for i, name in enumerate(names)}
            (copy / "added_tokens.json").write_text(json.dumps(added))
        else:
            raw = json.loads(before)
            start = max(token["id"] for token in raw["added_tokens"]) + 1
            form = raw["added_tokens"][0]
            raw["added_tokens"] += [form | {"id": start + i, "content": name} for i, name in enumerate(names)]
            (copy / kind).write_text(json.dumps(raw))

    add([f"<sound_{i}>" for i in range(30_000)] + [f"<{'<' * n}a" for n in range(126)])
    start = time.process_time()
    t = Tokenizer(copy, chat_template="zephyr")
    for text, inner in (("<" * 100_000, True), ("<sound_77><sound_7", True), (" sound_", False), ("_3>", True)):
        ids = t.apply_chat_template(conversation(text))
        assert t.control["<sound_77>"] not in ids and t.control["<<a"] not in ids
        assert ("|" in t._marked(text, "|", "|")) == inner, text
    assert time.process_time() - start < 60
    (copy / "chat_template.jinja").write_text("<sound_77>{{ messages[0]['content'] }}<sound_777><sound_77<<<a")
    ids = Tokenizer(copy).apply_chat_template(conversation("x"))
    assert [t.control["<sound_77>"], t.control["<sound_777>"], t.control["<<<a"]] == [i for i in ids if i in t.control.values()]
    add(["<" + "x" * 127 + ">"])
    with pytest.raises(ValueError, match="has a control token of 129 characters: <xxx"):
        Tokenizer(copy)


@pytest.mark.parametrize("template, typed", [("{}/s>", "a <"), ("{}/s>", "</s> <\n"), ("</{}", "s> a"), ("</{}", " s>")])
def test_no_control_token_is_half_typed(tiny, tmp_path, template, typed):
    (tmp_path / "t").write_text(template.format("{{ messages[0]['content'].strip() }}"))
    t = Tokenizer(tiny, chat_template=str(tmp_path / "t"))
    ids = t.apply_chat_template(conversation(typed))
    assert t.eos not in ids and "</s>" in t.decode(ids)


def test_text_that_ends_a_turn_is_cut(tiny, tmp_path):
    (tmp_path / "t").write_text("{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ 'no' * 400000 }}"
                                "{% endif %}{% endfor %}")  # fmt: skip
    _, (stop,) = Tokenizer(tiny, chat_template=str(tmp_path / "t")).turn_ends()
    assert stop == "no" * 64
    (tmp_path / "t").write_text("{{ messages[-1]['content'] }}")
    assert Tokenizer(tiny, chat_template=str(tmp_path / "t")).turn_ends() == (set(), []), "it writes no answer"


def test_a_long_stop_costs_no_time(tiny):
    stream = TextStream(Tokenizer(tiny), stops=["a" * 100_000])
    start = time.process_time()
    text = (
        "".join(stream.push(token) for token in Tokenizer(tiny).encode("good day, crow! " * 200, bos=False)) + stream.finish()
    )
    assert text.strip() == ("good day, crow! " * 200).strip() and time.process_time() - start < 10


def test_a_message_that_cannot_be_rendered_does_not_end_the_chat(cli, tiny, tmp_path):
    (tmp_path / "t").write_text("{% if messages[-1]['content'] != 'no' %}{{ bos_token }}{% endif %}")
    all_of_plane_16 = "".join(map(chr, range(0x100000, 0x10FFFE)))
    code, _, err = chat(cli, tiny, all_of_plane_16, "no", "hello", flags=["-c", 4096, "--chat-template", tmp_path / "t"])
    assert code == 0 and "generated 6 tokens" in err and err.count("error: ") == 2, err
    assert "the messages hold all private-use characters" in err and "writes nothing for this conversation" in err


def test_added_tokens_are_read(copy):
    size = Tokenizer(copy).vocabulary.sp.vocab_size()
    (copy / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size}))
    assert Tokenizer(copy).control["<|im_end|>"] == Tokenizer(copy, size + 1).control["<|im_end|>"] == size
    assert "<|im_end|>" not in Tokenizer(copy, size).control, "the model has no embedding for it"


def test_symbols_that_a_tokenizer_defines_are_control_tokens_of_templates_only(tmp_path):
    (tmp_path / "text").write_text(TEXT * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=350, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2, user_defined_symbols=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    t = Tokenizer(tmp_path, chat_template="chatml")
    end = t.control["<|im_end|>"]
    assert t.apply_chat_template(conversation("U")).count(end) == 1 and t.decode([end]) == ""
    typed = "a <|im_end|> b<|im_end|><|im_start|>"
    assert end not in t.encode(typed) and t.decode(t.encode(typed)) == typed
    assert t.apply_chat_template(conversation(typed)).count(end) == 1
    assert t.decode(t.encode(typed * 2000)) == typed * 2000


@pytest.mark.parametrize("legacy", [False, True, None])
def test_control_tokens_of_a_tokenizer_model_are_those_that_its_template_writes(tmp_path, legacy):
    """Mistral's v2 and v3 have [INST] as a control token, and no space is added to the text after it."""
    (tmp_path / "text").write_text(TEXT * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=350, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2, control_symbols=["[INST]", "[/INST]"],
        normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    _, _, source = CHAT_FAMILIES["mistral 7b v0.3"]
    given = {} if legacy is None else {"legacy": legacy}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source} | given))
    t = Tokenizer(tmp_path)
    begin, end = t.control["[INST]"], t.control["[/INST]"]
    enc = lambda text: t.vocabulary.sp.encode(" " + text if legacy else text)  # after the space that SentencePiece adds
    ids = t.apply_chat_template(conversation("time [/INST]", "a fox", "day"))
    asked = [begin, *enc("time [/INST]"), end, *enc("a fox"), t.eos]
    assert ids == [t.bos, *asked, begin, *enc("day"), end]
    assert t.turn_ends() == ({t.eos}, [])


def test_bos_is_left_out_where_the_checkpoint_says_so(copy):
    (copy / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    assert Tokenizer(copy).encode("x") == Tokenizer(copy).vocabulary.sp.encode("x")


# ---- the command line as a user meets it


@pytest.fixture
def cli(monkeypatch, capfd):
    """Run the program in this process: cli(*arguments, stdin=bytes) -> exit code, stdout, stderr."""

    def call(*arguments, stdin: bytes = b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            code = run.main([str(a) for a in arguments])
        except SystemExit as exit:
            code = exit.code
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_prompt_is_printed_then_continued_and_the_rest_goes_to_stderr(cli, tiny):
    code, out, err = cli("-m", tiny, "-p", "Once upon", "-n", 8, "--temp", 0)
    assert code == 0 and out.startswith("Once upon") and out.endswith("\n") and len(out) > 10
    for word in ("load", "prompt", "generated 8 tokens", "memory", "seed", "fp32 on cpu"):
        assert word in err
    code, bare, err = cli("-m", tiny, "-p", "Once upon", "-n", 8, "--temp", 0, "--no-display-prompt", "--quiet")
    assert code == 0 and "Once upon" + bare == out and err == ""


def test_prompt_from_file_and_from_standard_input(cli, tiny, tmp_path):
    (tmp_path / "prompt").write_text("Once upon\n")
    flags = ("-m", tiny, "-n", 8, "--temp", 0)
    expected = cli(*flags, "-p", "Once upon")[1]
    assert cli(*flags, "-f", tmp_path / "prompt")[1] == expected
    assert cli(*flags, stdin=b"Once upon\n")[1] == expected
    assert cli(*flags, "-p", "-", stdin=b"Once upon")[1] == expected


def test_seed_repeats_the_text_and_empty_prompt_starts_from_bos(cli, tiny):
    flags = ("-m", tiny, "-n", 12, "--ignore-eos")
    assert cli(*flags, "--seed", 7)[1] == cli(*flags, "--seed", 7)[1] != cli(*flags, "--seed", 8)[1]
    _, out, err = cli(*flags)
    assert cli(*flags, "--seed", err.split("seed ")[1].split()[0])[1] == out, "the printed seed does not repeat a random run"


def test_the_checkpoints_sampling_is_used_where_no_flag_is_given(cli, copy):
    fields = dict(temperature=0.0, top_p=0.5, top_k=None, repetition_penalty=1.5, do_sample=True)
    (copy / "generation_config.json").write_text(json.dumps(fields))
    run = lambda *flags: cli("-m", copy, "-p", "Once", "-n", 8, "-s", 1, *flags)
    _, own, err = run()
    assert "sampling  temp 0, top-p 0.5, repeat-penalty 1.5 (the checkpoint's own" in err
    _, same, err = run("--temp", 0, "--top-p", 0.5, "--repeat-penalty", 1.5)
    assert own == same and "sampling  " not in err
    code, _, err = run("--repeat-penalty", 1, "--temp", 0)
    assert code == 0 and "sampling  top-p 0.5 (" in err
    edit(copy / "generation_config.json", top_p=2)
    code, _, err = run()
    assert code == 1 and "generation_config.json: top_p is 2; it must be a number from 0 to 1" in err


def test_every_eos_that_the_checkpoint_names_ends_the_text(cli, copy):
    run = lambda: cli("-m", copy, "-p", "Once", "-n", 12, "--temp", 0)[2].split("generated ")[1].split()[0]
    assert run() == "12"
    ids = list(generate(load(copy, device="cpu"), Tokenizer(copy).encode("Once"), n=12, sampling=Sampling(temp=0), eos=[]))
    edit(copy / "config.json", eos_token_id=ids[4])
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, ids[9]]}))
    assert int(run()) == 1 + min(ids.index(ids[4]), ids.index(ids[9]))
    edit(copy / "config.json", eos_token_id=2)
    assert int(run()) == 1 + ids.index(ids[9])


def test_full_context_is_noted(cli, tiny):
    code, out, err = cli("-m", tiny, "-p", "Once", "-c", 16, "--ignore-eos")
    assert code == 0 and "context of 16 tokens is full" in err


def test_a_context_beyond_the_trained_is_told(cli, tiny):
    trained = read_config(tiny).max_seq_len
    for size in (trained, trained + 1):
        code, _, err = cli("-m", tiny, "-p", "Once", "-n", 1, "-c", size)
        assert code == 0 and (f"(beyond the model's {trained}: expect nonsense there)" in err) == (size > trained)


def test_stop_string_ends_the_text(cli, tiny):
    flags = ("-m", tiny, "-p", "Once", "-n", 40, "--temp", 0, "--ignore-eos", "--no-display-prompt", "--quiet")
    whole = cli(*flags)[1]
    stop = whole[3:6]
    code, out, _ = cli(*flags, "--stop", stop, "--stop", "\x00")
    assert code == 0 and out == whole[: whole.find(stop)] + "\n"


def test_debug_shows_the_traceback(cli, tmp_path):
    code, out, err = cli("-m", tmp_path, "-p", "a", "--debug")
    assert code == 1 and out == "" and err.startswith("Traceback") and re.search(r"\nFileNotFoundError: .+\n$", err), err


def test_wrong_usage_exits_2_in_one_line(cli, tiny):
    wrong = [
        "--system x",
        "--chat-template plain",
        "--temp -1",
        "--top-p 2",
        "-n x",
        "--nonsense",
        "-p a -f b",
        "--chat -p a -f b",
        "--chat --no-display-prompt",
        "--chat -no-cnv",
        "--chat -sys a -sysf b",
        "--save-fp8 d -p a",
        "--save-fp8 d --temp 1",
        "--save-fp8 d -f a",
        "--save-fp8 d --chat",
        "--seed 1e99",
        "-c -1",
        "-n -3",
        "-n",
        "-st --save-fp8 d",
        "--draft 8 -p a",
        "-p a -m=",
    ]
    for arguments in wrong:
        code, out, err = cli("-m", tiny, *arguments.split())
        assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1, arguments


@pytest.mark.parametrize(
    "main, flags, said",
    [
        (run.main, "-sys x -p a", "-sys needs --chat"),
        (run.main, "--chat -no-cnv", "-no-cnv cannot be used with --chat"),
        (bench.main, "--stride 5", "--stride needs --perplexity"),
        (bench.main, "--kernels --stride 5", "--stride cannot be used with --kernels"),
        (run.main, "-c 99999999", "99999999 is out of range: at least 0 and at most 16,777,216"),
        (bench.main, "-n x", "'x' is neither a number nor several with commas"),
    ],
)
def test_wrong_usage_says_what_is_wrong(capfd, main, flags, said):
    with pytest.raises(SystemExit):
        main(flags.split())
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("main, flags", [(bench.main, ["--plot", "\x1b[0m\nx"]), (run.main, ["-\x1b\n"]), (run.main, ["x\n"])])
def test_wrong_usage_is_said_in_one_printable_line(capfd, main, flags):
    with pytest.raises(SystemExit):
        main(flags)
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and said.rstrip("\n").isprintable()


@pytest.mark.parametrize("script", ["run.py", "bench.py"])
def test_a_machine_without_torch_is_one_line(script):
    """As where the packages were not installed."""
    code = f"sys.modules['torch'] = None; sys.argv = ['{script}']; runpy.run_path('{HERE / script}', run_name='__main__')"
    command = [sys.executable, "-c", f"import runpy, sys; sys.path.insert(0, '{HERE}'); {code}"]
    shown = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert shown.returncode == 1 and shown.stdout == "" and shown.stderr.count("\n") == 1, shown.stderr
    assert shown.stderr.startswith("error: ") and "pip install -r requirements.txt" in shown.stderr


@pytest.mark.parametrize("main", [run.main, bench.main], ids=["run", "bench"])
def test_a_wrong_flag_is_named_as_it_was_typed(capfd, main):
    for arguments, named in (
        (["-hx", "y"], "unknown flag -hx"),  # to argparse, -h with the value x
        (["--mod", "x"], "unknown flag --mod"),  # an abbreviation of --model
        (["-n5"], "unknown flag -n5"),
        (["--temperatur=1"], "unknown flag --temperatur=1"),
        (["text"], "unexpected argument 'text'"),
    ):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 2 and capfd.readouterr().err == f"error: {named} (see --help)\n"


def test_spellings_of_llama_cpp(cli, tiny, tmp_path):
    flags = ("-hf", tiny, "--predict", 8, "--temperature", 0, "--repeat-last-n", 3, "-t", 1, "-dev", "none", "-s", 3)
    code, expected, _ = cli("-m", tiny, "-n", 8, "--temp", 0, "-p", "Once upon")
    assert code == 0
    code, out, err = cli(*flags, "-p", "Once upon", "-ngl", 99, "-fa", "on", "-b", 512, "--mmap", "-no-cnv")
    assert (code, out) == (0, expected) and err.startswith("note: -ngl, -fa, -b, --mmap: no effect here, ignored\n")
    (tmp_path / "system").write_text("Be kind.\n")
    talk = ("-m", tiny, "-n", 6, "--temp", 0, "--ignore-eos", "--chat-template", "llama2", "-p", "hello")
    kind = [
        cli(*talk, "-cnv", *how)[1]
        for how in (["-sys", "Be kind."], ["--system-prompt", "Be kind."], ["-sysf", tmp_path / "system"])
    ]
    assert len(set(kind)) == 1 and kind[0] != cli(*talk, "-cnv")[1]
    text = cli("-m", tiny, "-n", 8, "--temp", 0, "-p", "Once upon", "-r", expected[12:14], "--quiet")[1]
    assert text == expected[: expected.index(expected[12:14], 9)] + "\n"
    code, out, _ = cli("--version")
    assert code == 0 and out.startswith("fused-llama with Python 3") and f"torch {torch.__version__.split('+')[0]}" in out


def test_escapes_in_a_prompt(cli, tiny, tmp_path):
    flags = ("-m", tiny, "-n", 4, "--temp", 0)
    expected = cli(*flags, "-p", 'a\nb\t"ż\\ \\d')[1]
    assert cli(*flags, "-p", r"a\nb\t\"\xc5\xbc\\ \d")[1] == expected and expected.startswith('a\nb\t"ż\\ \\d')
    (tmp_path / "prompt").write_text("a\\nb")
    for how in (["-p", "a\\nb", "--no-escape"], ["-f", tmp_path / "prompt"], ["-p", "a\\\\nb", "-e"]):
        assert cli(*flags, *how)[1].startswith("a\\nb"), how
    code, _, err = cli(*flags, "-p", r"a\xff")
    assert code == 1 and "--prompt is not UTF-8" in err


@pytest.mark.parametrize("script", ["run.py", "bench.py"])
def test_help_comes_at_once(script):
    """Before anything is imported that takes long."""
    for flag, code in (("--help", 0), ("--wrong", 2)):
        command = [sys.executable, "-X", "importtime", HERE / script, flag]
        shown = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "80"})
        imported = set(re.findall(r"\| +(\S+)$", shown.stderr, re.MULTILINE))
        assert shown.returncode == code and "argparse" in imported and len(imported) < 250, shown.stderr
        assert not imported & {"torch", "triton", "numpy", "transformers", "sentencepiece", "tokenizers", "jinja2"}
        if code == 0:
            assert "\nmodel:\n" in shown.stdout and "\noutput:\n" in shown.stdout


def test_names_in_the_help_are_those_of_the_formats():
    from checkpoint import DTYPES

    assert tuple(DTYPES) == run.DTYPE_NAMES and tuple(FORMATS) == run.FORMATS_8


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_gives_the_prompt_as_it_is(tmp_path):
    shutil.copy(HERE / "Makefile", tmp_path)
    (tmp_path / "requirements.txt").touch()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "ready").touch()
    (tmp_path / ".venv" / "bin" / "python").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)
    prompt = 'He said "hi" for $5; it\'s `here`, \\n and\n--there'
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "GPUS")  # of the make that runs the tests
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    for variables, arguments in (({"PROMPT": prompt}, []), ({}, [f"PROMPT={prompt}"])):
        command = ["make", "-s", "run", "MODEL=a b", "ARGS=", *arguments]
        shown = subprocess.run(command, cwd=tmp_path, env=environment | variables, capture_output=True, text=True, check=True)
        out = shown.stdout
        assert out.split("\0")[:-1] == ["run.py", "-m", "a b", "--no-escape", f"--prompt={prompt}"]


def spoil_config(**fields):
    return lambda folder: edit(folder / "config.json", **fields)


def spoil_header(change=lambda header: None, write=json.dumps):
    """Rewrite the JSON header of model.safetensors, and leave the data as it is."""

    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        raw = file.read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + size])
        change(header)
        text = write(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])

    return spoil


def overlap(header: dict) -> None:
    a, b = sorted(name for name in header if "gate_proj" in name)
    header[a]["data_offsets"] = header[b]["data_offsets"]


def spoil_tensors(change):
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch PICKLE_HAS_RUN",))


def plant_bomb(folder: Path) -> None:
    to_bin(folder)
    torch.save({"x": Bomb()}, folder / "pytorch_model.bin")


def plant_plain_pickle(folder: Path) -> None:
    to_bin(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))


def plant_index(name: str):
    def spoil(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))

    return spoil


def halves(folder: Path) -> None:
    """One tensor as two halves in two shards, which Meta's layout has and Hugging Face's does not."""
    to_shards(folder, "safetensors")
    for i in (0, 1):
        file = folder / f"model-0000{i + 1}-of-00002.safetensors"
        tensors = {name: t for name, t in load_file(file).items() if name != "lm_head.weight"}
        save_file(tensors | {"lm_head.weight": HALVES[i].clone()}, file)


HALVES = torch.ones(300, 64).chunk(2)
HUGE = 1 << 36


NORM = "model.layers.0.input_layernorm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"

ELSEWHERE = ["quantised for another program: take the original safetensors; --fp8 makes 8 bits of them"]


def replace_by(name: str, content: bytes):
    """Replace all files by one."""

    def spoil(folder: Path) -> None:
        [file.unlink() for file in folder.iterdir()]
        (folder / name).write_bytes(content)

    return spoil


def point(name: str):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 999\n"
    return lambda folder: (folder / name).write_text(text)


SPOILED = {  # how a checkpoint is corrupted: what the one-line error must contain
    "empty folder": (lambda f: [file.unlink() for file in f.iterdir()], ["neither config.json nor params.json"]),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), ["config.json is not JSON"]),
    "config lacks a field": (spoil_config(hidden_size=None), ["config.json lacks the field hidden_size"]),
    "zero heads": (spoil_config(num_attention_heads=0), ["num_attention_heads is 0"]),
    "negative layers": (spoil_config(num_hidden_layers=-1), ["num_hidden_layers is -1"]),
    "absurd vocabulary": (spoil_config(vocab_size=10**15), ["vocab_size is 1000000000000000"]),
    "wordy number": (spoil_config(intermediate_size="many"), ["intermediate_size is 'many'"]),
    "nan eps": (spoil_config(rms_norm_eps=float("nan")), ["rms_norm_eps is nan"]),
    "uneven heads": (spoil_config(num_key_value_heads=3), ["4 query heads cannot share 3"]),
    "attention bias": (spoil_config(attention_bias=True), ["attention_bias is True"]),
    "another activation": (spoil_config(hidden_act="gelu"), ["hidden_act is 'gelu'"]),
    "another model": (spoil_config(model_type="gpt2"), ["model_type is 'gpt2'"]),
    "sliding window": (spoil_config(sliding_window=64), ["sliding_window is 64: a context of 256"]),
    "deep JSON": (lambda f: (f / "config.json").write_text("[" * 100_000), ["config.json is not JSON"]),
    "listed dtype": (spoil_config(dtype=["float32"]), ["torch_dtype is ['float32']"]),
    "wordy tie": (spoil_config(tie_word_embeddings="false"), ["tie_word_embeddings is 'false'"]),
    "two ropes": (spoil_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), ["say different things"]),
    "flat llama3 ramp": (
        spoil_config(rope_parameters=SHAPES["llama3"]["rope_parameters"] | {"high_freq_factor": 1.0}),
        ["high_freq_factor is 1; it must be above low_freq_factor 1"],
    ),
    "escape in a name": (spoil_tensors(lambda t: t.update({"\x1b]0;x\x07\ny": torch.ones(1)})), ["?]0;x? y is unexpected"]),
    "numbered tensors": (
        lambda f: [to_bin(f), torch.save({1: torch.ones(1)}, f / "pytorch_model.bin")],
        ["can be read safely"],
    ),
    "sparse tensors": (
        lambda f: [to_bin(f), torch.save({"x": torch.ones(1).to_sparse()}, f / "pytorch_model.bin")],
        ["can be read safely"],
    ),
    "wrong types beside the tokenizer": (
        lambda f: [
            (f / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"600": {"content": ["x"]}}})),
            (f / "added_tokens.json").write_text("[]"),
        ],
        ["added_tokens.json does not hold a JSON object"],
    ),
    "another rope": (spoil_config(rope_parameters={"rope_type": "longrope"}), ["rope_type is 'longrope'"]),
    "gptq": (
        spoil_config(quantization_config={"quant_method": "gptq", "bits": 4}),
        ["quantization_config is 'gptq'", *ELSEWHERE],
    ),
    "mlx": (spoil_config(quantization={"bits": 4}), ["quantization is {'bits': 4}", *ELSEWHERE]),
    "gguf": (replace_by("tiny.Q4_0.gguf", b"GGUF"), ["holds GGUF", *ELSEWHERE]),
    "gguf beside a config": (lambda f: (f / "model.safetensors").rename(f / "tiny.gguf"), ["holds GGUF", *ELSEWHERE]),
    "adapter": (
        replace_by("adapter_config.json", b'{"base_model_name_or_path": "someone/base"}'),
        ["an adapter without its base: merge it into someone/base"],
    ),
    "git-lfs weights": (point("model.safetensors"), ["model.safetensors is a git-lfs pointer", "run git lfs pull"]),
    "git-lfs tokenizer": (point("tokenizer.model"), ["tokenizer.model is a git-lfs pointer", "run git lfs pull"]),
    "eos beyond the vocabulary": (
        lambda f: edit(f / "generation_config.json", eos_token_id=[2, 99999]),
        ["generation_config.json: eos_token_id is [2, 99999]"],
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["holds no weights"]),
    "truncated": (lambda f: (f / "model.safetensors").open("r+b").truncate(5000), ["not a valid safetensors file"]),
    "a name twice": (
        spoil_header(lambda h: h.pop("__metadata__"), lambda h: f"{json.dumps(h)[:-1]}, {json.dumps(h)[1:]}"),
        ["it holds a name twice"],
    ),
    "lying header": (spoil_header(lambda h: h[NORM].update(shape=[10**9])), ["not a valid safetensors file"]),
    "overlapping offsets": (spoil_header(overlap), ["not a valid safetensors file"]),
    "missing tensor": (spoil_tensors(lambda t: t.pop(DOWN)), [f"{DOWN} is missing"]),
    "unexpected tensor": (spoil_tensors(lambda t: t.update(extra=torch.ones(1))), ["extra is unexpected"]),
    "wrong shape": (spoil_tensors(lambda t: t.update({NORM: torch.ones(3)})), [f"{NORM} is [3], expected [64]"]),
    "whole numbers": (spoil_tensors(lambda t: t.update({NORM: torch.ones(64, dtype=torch.int8)})), [NORM, "a type other than"]),
    "nan": (spoil_tensors(lambda t: t[DOWN].view(-1)[5:6].fill_(float("nan"))), [f"{DOWN} in model.safetensors", "not finite"]),
    "inf": (spoil_tensors(lambda t: t[DOWN].view(-1)[5:6].fill_(float("inf"))), [f"{DOWN} in model.safetensors", "not finite"]),
    "pickle that runs code": (plant_bomb, ["pytorch_model.bin is not a checkpoint that can be read safely"]),
    "plain pickle": (plant_plain_pickle, ["pytorch_model.bin is not in torch's zip format"]),
    "index without its shard": (plant_index("gone.safetensors"), ["names gone.safetensors, which is missing"]),
    "index that leaves the folder": (plant_index("../model.safetensors"), ["which is not a file of its own folder"]),
    "index without a map": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": []}'),
        ["model.safetensors.index.json lacks the field weight_map"],
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.model").unlink(), ["holds no tokenizer.model"]),
    "broken tokenizer": (lambda f: (f / "tokenizer.model").write_bytes(b"x" * 99), ["is not a SentencePiece model"]),
    "a tensor in two halves": (halves, ["model-00002-of-00002.safetensors: lm_head.weight is also in model-00001-of-00002"]),
    "an empty tokenizer": (lambda f: (f / "tokenizer.model").write_bytes(b""), ["is not a SentencePiece model"]),
    "a cut tokenizer": (lambda f: os.truncate(f / "tokenizer.model", 9), ["is not a SentencePiece model"]),
    "a huge tokenizer": (
        lambda f: os.truncate(f / "tokenizer.model", HUGE),
        ["tokenizer.model has more than 64,000,000 bytes"],
    ),
    "a huge config": (lambda f: os.truncate(f / "config.json", HUGE), ["config.json has more than 10,000,000 bytes"]),
    "a huge header": (
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 99_000_000) + b" " * 99),
        ["not a valid safetensors file: its header has 99,000,000 bytes"],
    ),
    "a config that is a pipe": (
        lambda f: [(f / "config.json").unlink(), os.mkfifo(f / "config.json")],
        ["neither config.json"],
    ),
    "a link out": (
        lambda f: [(f / "config.json").rename(f.parent / "c"), (f / "config.json").symlink_to("../c")],
        ["config.json is a link out of its folder"],
    ),
    "deep ropes": (
        spoil_config(rope_scaling=functools.reduce(lambda v, _: {"a": v}, range(300), {}), rope_parameters={"a": 1}),
        ["nested more than 32 deep"],
    ),
    "a long list": (spoil_config(num_attention_heads=[1] * 100_000), ["num_attention_heads is [1, 1", "from 1 to 1024"]),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_spoiled_checkpoint_is_one_line_of_error(cli, copy, how, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    spoil, expected = SPOILED[how]
    spoil(copy)
    code, out, err = cli("-m", copy, "-p", "Once", "-n", 2, "--quiet", "--no-display-prompt")
    assert code == 1 and out == "", (out, err)
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert all(text in err for text in expected), err
    assert not (tmp_path / "PICKLE_HAS_RUN").exists()


def test_the_bomb_would_have_run(tmp_path, monkeypatch):
    """The check above is meaningful only if an unsafe load does run the code."""
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Bomb()}, "bomb")
    torch.load("bomb", weights_only=False)
    assert (tmp_path / "PICKLE_HAS_RUN").exists()


@needs_triton
def test_a_head_dim_that_the_kernels_cannot_run_is_told(cli, copy):
    hugging_face_model(Tokenizer(copy).vocabulary.sp.vocab_size(), head_dim=20).save_pretrained(copy)
    code, _, err = cli("-m", copy, "-p", "Once", "-n", 2, "--backend", "triton", "--device", "cpu")
    assert code == 1 and "head_dim is 20; the kernels need a multiple of 8: use --backend torch" in err.splitlines()[-1]
    assert cli("-m", copy, "-p", "Once", "-n", 2, "--device", "cpu")[0] == 0


def test_half_of_a_surrogate_pair_is_refused_and_a_foreign_id_is_no_text(tiny):
    tokenizer = Tokenizer(tiny)
    for act in (
        tokenizer.encode,
        tokenizer.encode_after,
        lambda t: tokenizer.apply_chat_template([dict(role="user", content=t)]),
    ):
        with pytest.raises(ValueError, match="holds U\\+DC80 at 3: a lone surrogate"):
            act("abc\udc80d")
    assert tokenizer.decode([-1, 1 << 40, 1 << 20]) == ""


def test_each_byte_that_makes_no_character_is_one_replacement(tiny):
    """As SentencePiece decodes."""
    tokenizer = Tokenizer(tiny)
    byte = {int(tokenizer.vocabulary.sp.id_to_piece(i)[3:5], 16): i for i in range(3, 259)}
    for raw in (b"\xe2\x82a", b"\xf0\x9f\x90", b"\xff\xfe", b"\xed\xa0\x80", b"\xc3\xa9\xe2\x82"):
        ids = [byte[b] for b in raw]
        stream = TextStream(tokenizer)
        streamed = "".join(stream.push(i) for i in ids) + stream.finish()
        assert tokenizer.decode(ids) == streamed == tokenizer.vocabulary.sp.decode(ids)


def test_what_merges_with_a_dot_goes_on_whole(tmp_path):
    (tmp_path / "text").write_text("wait... and then... so... on.. \n" * 99)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=290, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    tokenizer = Tokenizer(tmp_path)
    assert len(tokenizer.vocabulary.sp.encode("...")) < 4, "dots do not merge"
    for text in ("...", "..x", ".", "", " on", "so.."):
        assert tokenizer.decode(tokenizer.encode("wait") + tokenizer.encode_after(text)) == "wait" + text


# ---- untrusted files


def torch_zip(file: Path, data_pkl: bytes, **storages: bytes) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x/data.pkl", data_pkl)
        archive.writestr("x/version", "3\n")
        for key, raw in storages.items():
            archive.writestr(f"x/data/{key.removeprefix('_')}", raw)


def pickled(*values) -> bytes:
    """A pickle of protocol 2 of nested tuples, dicts, numbers and texts; bytes are put in as they are."""
    return b"\x80\x02" + b"".join(map(opcodes, values)) + b"."


def opcodes(value) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, dict):
        return b"}(" + b"".join(opcodes(k) + opcodes(v) for k, v in value.items()) + b"u"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(opcodes, value)) + b"t"
    return pickle.dumps(value, 2)[2:-1]


def storage(key: str = "0", count: int = 4, kind: bytes = b"Float") -> bytes:
    return opcodes(("storage", b"ctorch\n" + kind + b"Storage\n", key, "cpu", count)) + b"Q"


def rebuilt(offset=0, shape=(4,), strides=(1,), data: bytes | None = None) -> bytes:
    arguments = (data or storage(), offset, shape, strides, False, {})
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + opcodes(arguments) + b"R"


def swapped(a: bytes, b: bytes):
    """Two byte strings of equal length change places in the file."""

    def change(file: Path) -> None:
        parts = re.split(b"(" + re.escape(a) + b"|" + re.escape(b) + b")", file.read_bytes())
        file.write_bytes(b"".join({a: b, b: a}.get(part, part) for part in parts))

    return change


def repacked(*changed: tuple[str, bytes], **options):
    """Other entries, or other ways to pack them."""

    def change(file: Path) -> None:
        with zipfile.ZipFile(file) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()} | dict(changed)
        with zipfile.ZipFile(file, "w", **options) as archive:
            for name, raw in entries.items():
                archive.writestr(name, raw)

    return change


def rename_entry(file: Path, old: bytes, new: bytes) -> None:
    file.write_bytes(file.read_bytes().replace(old, new))


def enlarge_entry(file: Path, name: bytes) -> None:
    """Have the directory say that an entry has a million bytes; the name follows 46 bytes, and the sizes are at 20."""
    raw = bytearray(file.read_bytes())
    start = raw.rindex(name) - 46
    raw[start + 20 : start + 28] = struct.pack("<2I", 1_000_000, 1_000_000)
    file.write_bytes(raw)


ONES, TWOS = struct.pack("<4f", 1, 1, 1, 1), struct.pack("<4f", 2, 2, 2, 2)
TWO = pickled({"a": rebuilt(), "b": rebuilt(data=storage("1"))})

HOSTILE_ZIPS = {  # a torch zip: data.pkl, what is done to the file, what the error must contain
    "a global with a long name": (pickled(b"c" + b"x" * 1_000_000 + b"\ny\n"), None, "read safely"),
    "a text with escapes": (pickled(b"V" + rb"\u0041" * 300_000 + b"\n"), None, "opcode 'V'"),
    "a number of many digits": (pickled(b"I" + b"9" * 1_000_000 + b"\n"), None, "opcode 'I'"),
    "a bytearray of 2 GB": (pickled(b"\x96" + struct.pack("<Q", 2 << 30)), None, "opcode '\\x96'"),
    "an object": (pickled(b"cos\nsystem\n", ("true",), b"R"), None, "names os.system"),
    "an object that is not called": (pickled({"a": rebuilt()}, b"cos\nsystem\nb"), None, "names os.system"),
    "a call of what is no function": (pickled(b"ctorch\nFloatStorage\n", (), b"R"), None, "calls torch.FloatStorage"),
    "a class": (pickled(b"(icollections\nOrderedDict\n"), None, "opcode 'i'"),
    "attributes of a tensor": (pickled({"a": rebuilt() + b"\x81"}), None, "opcode '\\x81'"),
    "too many arguments": (pickled({"a": rebuilt().replace(b"tR", b"NNtR")}), None, "calls torch._utils._rebuild_tensor_v2"),
    "no bool": (pickled({"a": rebuilt().replace(pickle.dumps(False, 2)[2:-1] + b"}", b"K\1}")}), None, "calls torch._utils"),
    "another storage": (pickled({"a": rebuilt(data=storage(kind=b"QInt8"))}), None, "names torch.QInt8Storage"),
    "too little on the stack": (pickled(b"0"), None, "opcode '0'"),
    "nothing on the stack": (pickled(b"\x87"), None, "pops more than it has pushed"),
    "a key that is a tuple": (pickled({("a",): rebuilt()}), None, "other than named, dense tensors"),
    "a list": (pickled(b"]"), None, "opcode ']'"),
    "a name twice": (pickled(b"}(" + (opcodes("a") + rebuilt()) * 2 + b"u"), None, "it holds a twice"),
    "a storage of another size": (pickled({"a": rebuilt(data=storage(count=5))}), None, "a does not fit its storage"),
    "no such storage": (pickled({"a": rebuilt(data=storage("7"))}), None, "read safely"),
    "beyond the storage": (pickled({"a": rebuilt(offset=1)}), None, "a does not fit its storage"),
    "far strides": (pickled({"a": rebuilt(shape=(2, 2), strides=(1 << 40, 1))}), None, "strides with gaps or overlaps"),
    "many dimensions": (pickled({"a": rebuilt(shape=(1,) * 9, strides=(1,) * 9)}), None, "more dimensions than a checkpoint's"),
    "expanded": (pickled({"a": rebuilt(shape=(2, 2), strides=(1, 0))}), None, "strides with gaps or overlaps"),
    "negative": (pickled({"a": rebuilt(shape=(-4,))}), None, "a size that no tensor has"),
    "fewer strides": (pickled({"a": rebuilt(shape=(2, 2), strides=(1,))}), None, "strides with gaps or overlaps"),
    "swapped data": (TWO, swapped(ONES, TWOS), "does not have its checksum"),
    "swapped names": (TWO, lambda f: swap_in_directory(f, b"x/data/0", b"x/data/1"), "where something else is"),
    "cut": (TWO, lambda f: f.open("r+b").truncate(f.stat().st_size - 9), "not in torch's zip format"),
    "zeros": (TWO, lambda f: [f.write_bytes(b""), os.truncate(f, 50 << 30)], "not in torch's zip format"),
    "compressed": (TWO, repacked(compression=zipfile.ZIP_DEFLATED), "it is compressed"),
    "big-endian": (TWO, repacked(("x/byteorder", b"big")), "its byte order is not little-endian"),
    "an old version": (TWO, repacked(("x/version", b"11\n")), "its version of torch's format is not 1 to 10"),
    "a long pickle": (TWO + b" " * 2_000_000, None, "it lacks a data.pkl of a sane size"),
    "two pickles": (TWO, repacked(("y/data.pkl", TWO)), "it lacks a data.pkl of a sane size"),
    "two entries": (TWO, lambda f: rename_entry(f, b"x/data/1", b"x/data/0"), "it holds two entries of one name"),
    "a long directory": (TWO, repacked(*((f"x/{i:060000}", b"") for i in range(70))), "its zip directory is too large"),
    "a damaged entry": (
        TWO,
        lambda f: f.write_bytes(f.read_bytes().replace(b"3\n", b"4\n")),
        "version does not have its checksum",
    ),
    "an entry beyond the end": (TWO, lambda f: enlarge_entry(f, b"x/version"), "x/version extends past its end"),
    "a pipe": (TWO, lambda f: [f.unlink(), os.mkfifo(f)], "is not a regular file"),
    "a link to itself": (TWO, lambda f: [f.unlink(), f.symlink_to("x.bin")], "Too many levels of symbolic links"),
    "a link out of the folder": (TWO, lambda f: f.rename(f.parent.parent / "a") and f.symlink_to("../a"), "out of its folder"),
}


def swap_in_directory(file: Path, a: bytes, b: bytes) -> None:
    raw = file.read_bytes()
    directory = raw.index(b"PK\x01\x02")
    file.write_bytes(raw[:directory] + raw[directory:].replace(a, b"?").replace(b, a).replace(b"?", b))


def assert_one_line(error: BaseException) -> None:
    assert len(str(error)) <= 500 and str(error).isprintable(), error


@pytest.mark.parametrize("how", HOSTILE_ZIPS)
def test_hostile_torch_files_are_refused(tmp_path, how):
    folder = tmp_path / "folder"
    folder.mkdir()
    data_pkl, change, expected = HOSTILE_ZIPS[how]
    torch_zip(folder / "x.bin", data_pkl, _0=ONES, _1=TWOS)
    if change:
        change(folder / "x.bin")
    with pytest.raises((ValueError, OSError), match=re.escape(expected)) as raised, one_line_errors():
        [read_part(part) for part in parts_of(folder / "x.bin")]
    assert_one_line(raised.value)


def test_torch_files_are_read_as_torch_reads_them(tmp_path):
    base = torch.randn(12, 8)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        whole = base.to(dtype)
        tensors = dict(whole=whole, rows=whole[3:7], turned=whole.t(), shared=whole, one=whole[5], none=torch.ones(()))
        state = torch.nn.ParameterDict({"a": whole}).state_dict() | tensors | {"p": torch.nn.Parameter(whole)}
        torch.save(state, tmp_path / "x.bin")
        theirs = torch.load(tmp_path / "x.bin", weights_only=True)
        ours = {part.name: read_part(part) for part in parts_of(tmp_path / "x.bin")}
        assert list(ours) == list(theirs)
        assert all(ours[n].dtype == t.dtype and ours[n].stride() == t.stride() and ours[n].equal(t) for n, t in theirs.items())


@pytest.mark.parametrize("change", ["cut", "changed", "gone"])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_file_that_changes_while_it_is_read_is_an_error(copy, form, change):
    LAYOUTS.get(form, lambda folder: None)(copy)
    checkpoint = Checkpoint(copy, read_config(copy))
    file = next(copy.glob("*model*." + form))
    {"cut": lambda: os.truncate(file, 20_000), "changed": lambda: os.utime(file, ns=(0, 0)), "gone": file.unlink}[change]()
    with pytest.raises((ValueError, FileNotFoundError), match="(truncated|changed) while it was being read|No such file"):
        checkpoint.read("output.weight")


def test_a_file_that_shrinks_under_the_reader_is_an_error(copy, monkeypatch):
    part = Checkpoint(copy, read_config(copy)).parts["output.weight"][0]
    monkeypatch.setattr("files._version", lambda f: part.version)
    os.truncate(part.file, part.offset + 100)
    with pytest.raises(ValueError, match="model.safetensors was truncated while it was being read"):
        read_part(part)


def test_a_large_tensor_is_read_by_several_threads(tmp_path, monkeypatch):
    whole = torch.randint(-1000, 1000, (3001, 3003)).half()
    save_file({"small": whole[0].clone(), "large": whole}, tmp_path / "x.safetensors")
    (part,) = (part for part in parts_of(tmp_path / "x.safetensors") if part.name == "large")
    assert torch.equal(read_part(part), whole)
    for rows, columns in ((slice(1, 2999), slice(0, 3003)), (slice(0, 3001), slice(5, 3000))):
        assert torch.equal(read_part(part, index=[range(3001)[rows], range(3003)[columns]]), whole[rows, columns])
    monkeypatch.setattr("files._version", lambda f: part.version)
    os.truncate(part.file, part.offset + whole.nbytes // 2)
    with pytest.raises(ValueError, match="x.safetensors was truncated while it was being read"):
        read_part(part)


def test_messages_of_the_python_api_are_one_short_line(copy):
    folder = copy.rename(copy.parent / "a\n\x1b[31mb")
    for spoil in (spoil_tensors(lambda t: t.update({"\n" * 9: torch.ones(1)})), spoil_config(hidden_act="x\ny" * 100_000)):
        spoil(folder)
        for act in (load, lambda name: save_fp8(name, folder / "new")):
            with pytest.raises(ValueError) as raised:
                act(folder)
            assert_one_line(raised.value)


def test_messages_of_a_loaded_model_are_one_short_line(copy):
    folder = copy.rename(copy.parent / "a\n\x1b[31mb")
    spoil_tensors(lambda t: t[NORM].fill_(torch.nan))(folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('a\nb\x1b[31m' * 999) }}")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": "x\ny\x1b" * 999}))
    model, tokenizer = load(folder, device="cpu"), Tokenizer(folder)
    for act in (
        lambda: list(generate(model, [1, 5])),
        lambda: tokenizer.apply_chat_template(conversation("hello")),
        lambda: read_sampling(folder),
    ):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            act()
        assert_one_line(raised.value)


def test_a_short_run_of_the_fuzzer_finds_nothing():
    flags = f"--seed {SEED} --cases 150 --seconds {PATIENCE} --limit {PATIENCE}".split()
    done = subprocess.run(
        [sys.executable, HERE / "fuzz.py", *flags], capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"}
    )
    assert done.returncode == 0 and f"150 cases from seed {SEED}" in done.stdout and "0 failed" in done.stdout, done.stdout


def test_every_mutant_is_a_change():
    for file, mutants in mutate.MUTANTS.items():
        source = (HERE / file).read_text()
        for before, after, words in mutants:
            assert source.count(before) == 1 and before != after and words, (file, before)


def wrong_read(rng, bases, place):
    fuzz.watched.folder = str(place)
    Path("/etc/hostname").read_bytes()


def wrong_run(rng, bases, place):
    fuzz.watched.folder = str(place)
    os.system("true")


def wrong_memory(rng, bases, place):
    with contextlib.suppress(MemoryError):
        bytearray(3 << 30)
        return
    raise MemoryError


WRONG = {  # a case that goes wrong: what the fuzzer says of it
    "another exception": (lambda *_: {}["x"], "KeyError"),
    "two lines": (lambda *_: fails(ValueError("a\nb"))(), "ValueError"),
    "no message": (lambda *_: fails(ValueError())(), "ValueError"),
    "a warning": (lambda *_: warnings.warn("x", stacklevel=1), "UserWarning"),
    "no end": (lambda *_: time.sleep(60), "not finished after 1 seconds"),
    "death": (lambda *_: os.kill(os.getpid(), signal.SIGKILL), "the process died"),
    "too much memory": (wrong_memory, "MemoryError"),
    "a file elsewhere": (wrong_read, "opens /etc/hostname"),
    "a program": (wrong_run, "os.system"),
}


@pytest.mark.parametrize("how", WRONG)
def test_the_fuzzer_notices(how, monkeypatch):
    kind, expected = WRONG[how]
    kind.__name__ = "kind"
    monkeypatch.setattr(fuzz, "KINDS", {kind: 1})
    outcomes, failures = fuzz.run_cases([SEED], {}, limit=1 if how == "no end" else PATIENCE)
    assert len(failures) == sum(outcomes.values()) == 1 and expected in failures[SEED]


# ---- the command line as a user meets it, continued


def test_tokenizer_of_another_size(cli, tiny, copy):
    theirs = hugging_face_model(5000, **SHAPES["gqa"])
    theirs.save_pretrained(copy)
    code, _, err = cli("-m", copy, "-p", "Once")
    assert code == 1 and "the model has a vocabulary of 5000" in err


@pytest.mark.parametrize(
    "arguments, stdin, expected",
    [
        (["-m", "nowhere"], b"", "no such folder, nor the name of a repository"),
        (["-m", "no/where"], b"", "no/where"),
        (["-f", "nofile"], b"", "nofile"),
        (["-p", "-"], b"abc\xff", "standard input is not UTF-8: byte 0xff at offset 3"),
        (["-p", "Once upon a time there was a fox", "-c", "4"], b"", "the context holds 4"),
        (["-p", "a", "--device", "tpu"], b"", "unknown device 'tpu'"),
        (["-p", "a\udcffb"], b"", "--prompt is not UTF-8: byte 0xff at offset 1"),
        (["-p", "a\0", "-c", "1"], b"", "the context holds 1"),
        (["-f", "/dev/zero"], b"", "/dev/zero has more than 64,000,000 bytes"),
        (["-p", "-", "-c", "16"], b"a" * 4097, "the prompt has 4,097 characters, too many for 16 tokens"),
        (["--chat", "-p", "a" * 4097, "-c", "16"], b"", "the message has 4,097 characters, too many for 16 tokens"),
        (["--chat", "-sys", "a" * 4097, "-c", "16"], b"", "the system prompt has 4,097 characters, too many for 16 tokens"),
        (["--chat", "-sys", "good day, crow!", "-c", "8"], b"", "the system prompt takes"),
        (["--chat", "-sys", "a\udcffb"], b"", "the system prompt is not UTF-8"),
        (["--chat", "-sysf", "/dev/zero"], b"", "/dev/zero has more than 64,000,000 bytes"),
    ],
)
def test_bad_input_is_one_line_of_error(cli, tiny, arguments, stdin, expected):
    alone = [] if "--chat" in arguments else ["--no-display-prompt"]
    code, out, err = cli("-m", tiny, "--quiet", *alone, *arguments, stdin=stdin)
    assert code == 1 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and expected in err, err


def test_a_model_that_does_not_fit_says_so_before_allocating(cli, tiny, monkeypatch):
    monkeypatch.setattr("checkpoint.free_memory", lambda device: 1_000_000)
    code, _, err = cli("-m", tiny, "-p", "a")
    assert code == 1 and "weights" in err and "cache of 256 tokens" in err and "(-c)" in err and err.count("\n") == 1
    with pytest.raises(MemoryError, match="GB"):
        check_memory(read_config_like(), torch.float32, torch.device("cpu"), 1 << 24)


def program(*arguments, **options) -> subprocess.Popen:
    command = [sys.executable, str(HERE / "run.py"), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_closed_stdout_ends_quietly(tiny):
    process = program("-m", tiny, "-p", "Once", "--ignore-eos", "--quiet", stdin=subprocess.DEVNULL)
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(PATIENCE) == 0 and process.stderr.read() == b""


def in_shell(command: str, **options) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "HERE": str(HERE)}
    return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=PATIENCE, **options)


def test_a_lost_stderr_does_not_end_a_good_run(tiny, tmp_path):
    say = "import terminal as t; t.use_safe_streams(); t.note('a note'); print('text'); print(t.sys.stderr.isatty())"
    for lost in ("2>&-", "2>/dev/full", "2> >(exit)", "<&- 2>&-"):
        done = in_shell(f'"$PYTHON" -c "{say}" {lost}', cwd=HERE)
        assert (done.returncode, done.stdout, done.stderr) == (0, "text\nFalse\n", ""), lost
    (tmp_path / "link.py").symlink_to(HERE / "run.py")  # models/tales is looked for beside the program, not beside the link
    done = in_shell('PYTHONUNBUFFERED= "$PYTHON" link.py --version >/dev/full', cwd=tmp_path)
    assert done.returncode == 1 and done.stderr == "error: No space left on device\n"
    done = in_shell('"$PYTHON" link.py -p Once -n 3 --device cpu 2>/dev/full', cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("Once"), done
    done = in_shell(f'"$PYTHON" "$HERE/run.py" -m "{tiny}" --save-fp8 saved --device cpu <&- >&- 2>&-', cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "saved" / "model.safetensors").is_file(), done


@pytest.mark.parametrize("variables, expected", [
    ("RANK=x", "RANK is 'x'"), ("RANK=-1", "RANK is '-1'"), ("WORLD_SIZE=", "WORLD_SIZE is ''"),
    ("LOCAL_RANK=x", "LOCAL_RANK is 'x'"),
    ("WORLD_SIZE=2", "WORLD_SIZE is 2, but RANK is not set"), ("RANK=1", "RANK is 1, but WORLD_SIZE is not set"),
    ("RANK=²", "RANK is '²'"),
    ("WORLD_SIZE=2 RANK=0 MASTER_ADDR=x", "WORLD_SIZE is 2, but MASTER_PORT is not set"),
    ("WORLD_SIZE=2 RANK=0 MASTER_ADDR=x MASTER_PORT=x", "MASTER_PORT is 'x'"),
])  # fmt: skip
@pytest.mark.parametrize("script", ["run.py", "bench.py"])
def test_wrong_ranks_are_told(script, variables, expected):
    done = in_shell(f'{variables} "$PYTHON" "$HERE/{script}"')
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: ") and expected in done.stderr, done
    assert done.stderr.count("\n") == 1 and "torchrun" in done.stderr


@pytest.mark.parametrize("line, flags, expected", [
    ("import argparse\n", "--bad", 130),  # the imports
    ("    sys.exit(code)\n", "-m none -p x --device cpu", 1),  # the end, when the error is reported
])  # fmt: skip
def test_ctrl_c_at_the_edges_of_a_run(tmp_path, line, flags, expected):
    """The program sends it to itself, just before a certain line."""
    indent = " " * (len(line) - len(line.lstrip()))
    script = (HERE / "run.py").read_text().replace(line, f"{indent}os.kill(os.getpid(), signal.SIGINT)\n{line}", 1)
    (tmp_path / "run.py").write_text(script)
    done = in_shell(f'PYTHONPATH="$HERE" "$PYTHON" run.py {flags}', cwd=tmp_path)
    assert done.returncode == expected and "Traceback" not in done.stderr and "kill" in script, done


def test_a_closed_pipe_ends_a_chat(tiny):
    process = program("-m", tiny, "--chat", "-n", 20, "--ignore-eos", "--quiet", stdin=subprocess.PIPE)
    process.stdin.write(b"hello\n" * 50)
    process.stdin.close()
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(PATIENCE) == 0 and process.stderr.read() == b""


def test_ctrl_c_prints_timings_and_exits_130(tiny):
    flags = ("-c", 100_000, "--ignore-eos", "--temp", 0)
    process = program("-m", tiny, "-p", "Once", *flags, stdin=subprocess.DEVNULL)
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and b"generated" in err and b"Traceback" not in err


# ---- a model saved in 8 bits


@pytest.mark.parametrize("shape", ["gqa", "mqa, tied"])
def test_the_bar_of_loading_ends_full(copy, monkeypatch, shape):
    bars, original, shown = [], checkpoint.tqdm, dict(disable=False, file=io.StringIO())
    monkeypatch.setattr(checkpoint, "tqdm", lambda **options: bars.append(original(**options | shown)) or bars[-1])
    hugging_face_model(read_config(copy).vocab_size, **SHAPES[shape]).save_pretrained(copy)
    for folder, form in ((copy, None), (copy, "e4m3"), (save_fp8(copy, copy.parent / "saved").parent, None)):
        load(folder, fp8=form)
        assert bars[-1].n == bars[-1].total > 0, (folder, form)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape, layout", [("gqa", None), ("mqa, tied", None), ("gqa", "meta, 2 shards")])
def test_a_saved_model_is_the_model_in_8_bits(cli, capfd, copy, shape, layout, form):
    config, saved = read_config(copy), copy.parent / "saved"
    hugging_face_model(config.vocab_size, **SHAPES[shape]).half().save_pretrained(copy)
    capfd.readouterr()  # transformers' progress
    if layout:
        LAYOUTS[layout](copy)
        (copy / "tokenizer.model").rename(copy.parent / "tokenizer.model")
    code, out, err = cli("-m", copy, "--save-fp8", saved, *(["--fp8", form] if form == "e5m2" else []))
    assert code == 0 and out == "" and f"{saved}: {form} matrices" in err and err.count("\n") == 1, err
    assert (
        sorted(f.name for f in copy.parent.iterdir() if f.is_dir()) == ["copy", "saved"]
        and (saved / "tokenizer.model").exists()
    )
    tensors = load_file(saved / "model.safetensors")
    shapes = saved_shapes(read_config(saved))
    assert {name: tuple(t.shape) for name, t in tensors.items()} == shapes
    sizes = {torch.int8: 1, torch.float16: 2, torch.float32: 4}
    codes = {name for name, t in tensors.items() if t.dtype == torch.int8}
    assert codes == {name.removesuffix(".scale") for name in shapes if name.endswith(".scale")}
    assert (saved / "model.safetensors").stat().st_size < sum(sizes[t.dtype] * t.numel() for t in tensors.values()) + 4096
    ids = torch.randint(3, 300, (20,), device=DEVICE)
    for dtype in ("fp32", "bf16"):
        logits = []
        for model in (load(copy, dtype=dtype, device=DEVICE, fp8=form), load(saved, dtype=dtype, device=DEVICE)):
            cache = KVCache(model)
            with torch.inference_mode():
                logits.append(torch.cat([model.forward(part, cache) for part in ids.split([19, 1])]))
        assert torch.equal(*logits), "a saved model says something else"
    flags = ("-p", "Once", "-n", 8, "--temp", 0)
    (_, expected, _), (code, text, err) = cli("-m", copy, "--fp8", form, *flags), cli("-m", saved, *flags)
    assert code == 0 and text == expected and f"with {form} matrices" in err
    assert cli("-m", saved, "--fp8", form, *flags)[1] == expected
    other = "e4m3" if form == "e5m2" else "e5m2"
    code, _, err = cli("-m", saved, "--fp8", other, *flags)
    assert code == 1 and f"holds {form} matrices: for {other} ones, load the original" in err and err.count("\n") == 1
    code, _, err = cli("-m", saved, "--save-fp8", copy.parent / "again")
    assert code == 1 and f"holds {form} matrices already: save from the original" in err and err.count("\n") == 1


@pytest.fixture(scope="session")
def tiny_saved(tiny, tmp_path_factory) -> Path:
    return save_fp8(tiny, tmp_path_factory.mktemp("saved")).parent


def spoil_saved(change=lambda tensors: None, **metadata):
    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        with safe_open(file, "pt") as f:
            held = f.metadata()
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, held | {name.replace("_", "-"): value for name, value in metadata.items()})

    return spoil


def to_type(name: str, dtype: torch.dtype):
    return spoil_saved(lambda t: t.update({name: t[name].to(dtype)}))


def set_one(name: str, value: float):
    return spoil_saved(lambda t: t[name].view(-1)[7:8].fill_(value))


W13 = "layers.1.w13"
SPOILED_8 = {  # as SPOILED
    "no metadata": (
        lambda f: save_file(load_file(f / "model.safetensors"), f / "model.safetensors"),
        ["a type other than float"],
    ),
    "another layout": (
        spoil_saved(fused_llama="2"),
        ["saved by another version of fused-llama: save it again from the original"],
    ),
    "another format": (spoil_saved(fp8="e3m4"), ["model.safetensors: fp8 is 'e3m4', which is not supported"]),
    "missing matrix": (spoil_saved(lambda t: t.pop(W13)), [f"{W13} is missing"]),
    "missing scale": (spoil_saved(lambda t: t.pop("output.scale")), ["output.scale is missing"]),
    "unexpected": (spoil_saved(lambda t: t.update({"x.weight": torch.ones(1)})), ["x.weight is unexpected"]),
    "short matrix": (spoil_saved(lambda t: t.update({W13: t[W13][:9]})), [f"{W13} is [9, 64], expected [224, 64]"]),
    "flat scale": (
        spoil_saved(lambda t: t.update({f"{W13}.scale": torch.ones(224, 1)})),
        [f"{W13}.scale is [224, 1], expected [224]"],
    ),
    "another config": (spoil_config(intermediate_size=1 << 20), ["do not fit the config: layers.0.w13 is [224, 64], expected"]),
    "matrix of floats": (to_type(W13, torch.float16), [f"{W13} has a type other than int8"]),
    "matrix of bytes": (to_type(W13, torch.uint8), [f"{W13} has a type other than int8"]),
    "scale of halves": (to_type(f"{W13}.scale", torch.float16), [f"{W13}.scale has a type other than float32"]),
    "norm of whole numbers": (
        to_type("norm.weight", torch.int8),
        ["norm.weight has a type other than float32, float16, bfloat16"],
    ),
    "codes of e4m3 as e5m2": (spoil_saved(fp8="e5m2"), ["has codes of NaN or infinity: save it again"]),
    "codes of e5m2 as e4m3": (
        spoil_saved(lambda t: [t[n].clamp_(0, 0x3F) for n in t if t[n].dtype == torch.int8]),
        ["has codes of a format other than e4m3: save it again"],
    ),
    "nan code": (set_one(W13, 0x7F), [f"{W13} has codes of NaN or infinity: save it again"]),
    "negative nan code": (set_one("output", -1), ["output has codes of NaN or infinity"]),
    "zero scale": (set_one(f"{W13}.scale", 0), [f"{W13} has scales that are not positive and finite"]),
    "nan scale": (set_one("output.scale", float("nan")), ["output has scales that are not positive and finite"]),
    "nan norm": (set_one("norm.weight", float("nan")), ["not finite", "norm.weight in model.safetensors holds NaN"]),
    "truncated": (lambda f: (f / "model.safetensors").open("r+b").truncate(5000), ["not a valid safetensors file"]),
}


@pytest.mark.parametrize("how", SPOILED_8)
def test_a_spoiled_saved_model_is_one_line_of_error(cli, tiny_saved, how, tmp_path):
    folder = Path(shutil.copytree(tiny_saved, tmp_path / "copy"))
    spoil, expected = SPOILED_8[how]
    spoil(folder)
    code, out, err = cli("-m", folder, "-p", "Once", "-n", 2, "--quiet", "--no-display-prompt")
    assert code == 1 and out == "" and err.startswith("error: ") and err.count("\n") == 1, (out, err)
    assert all(text in err for text in expected), err


def fails(error: BaseException):
    def fail(*_):
        raise error

    return fail


def test_saving_copies_nothing_from_outside_the_folder(cli, copy, tmp_path):
    (tmp_path / "secret").write_text('{"secret": 1}')
    (copy / "special_tokens_map.json").unlink(missing_ok=True)
    (copy / "special_tokens_map.json").symlink_to("../secret")
    code, _, err = cli("-m", copy, "--save-fp8", tmp_path / "saved")
    assert code == 1 and "special_tokens_map.json is a link out of its folder" in err and err.count("\n") == 1
    assert not (tmp_path / "saved").exists()


def test_the_parents_tokenizer_is_for_metas_layout(copy):
    (copy.parent / "tokenizer.model").write_bytes((copy / "tokenizer.model").read_bytes())
    (copy / "tokenizer.model").rename(copy / "tokenizer.json")
    assert tokenizer_file(copy) == copy / "tokenizer.json"
    (copy / "config.json").rename(copy / "params.json")
    assert tokenizer_file(copy) == copy.parent / "tokenizer.model"


def test_a_model_is_saved_whole_or_not_at_all(cli, copy, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))

    def refused(to: str, expected: str, code: int = 1) -> None:
        seen, out, err = cli("-m", copy, "--save-fp8", tmp_path / to)
        assert seen == code and out == "" and expected in err and err.count("\n") == (code == 1), err
        assert sorted(tmp_path.rglob("*")) == before

    refused("copy", "copy is not an empty folder: save to a new one")
    refused("file", "file is not an empty folder")
    refused("no/where", "no does not exist: create that folder first")
    with monkeypatch.context() as patch:
        patch.setattr("checkpoint.free_memory", lambda device: 100_000)
        refused("new", "try a smaller")
    with monkeypatch.context() as patch:
        patch.setattr("checkpoint.shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 0))
        refused("new", "has 0.00 GB free: save elsewhere")
    for error, expected, code in ((OSError("No space left"), "No space left", 1), (KeyboardInterrupt(), "", 130)):
        for step in ("Loader.load", "save_file"):
            with monkeypatch.context() as patch:
                patch.setattr(f"checkpoint.{step}", fails(error))
                refused("new", expected, code)
    assert cli("-m", copy, "--save-fp8", tmp_path / "empty", "--quiet") == (0, "", "")
    assert (tmp_path / "empty" / "model.safetensors").stat().st_mode & 0o777 == (copy / "config.json").stat().st_mode & 0o777


def test_a_run_that_is_ended_while_it_saves(cli, tiny, tmp_path, monkeypatch):
    """Ended by a signal, it leaves nothing behind; what a killed run left behind is named by the next one."""
    with monkeypatch.context() as patch:
        for number in (signal.SIGTERM, signal.SIGHUP):
            patch.setattr("checkpoint.save_file", lambda *_, number=number: signal.raise_signal(number))
            assert cli("-m", tiny, "--save-fp8", tmp_path / "saved")[0] == 128 + number and not [*tmp_path.iterdir()]
    for name in (".saved.99999999-0123abcd", f".saved.{os.getpid()}-0123abcd", ".saved.swp"):
        (tmp_path / name).mkdir()
    code, _, err = cli("-m", tiny, "--save-fp8", tmp_path / "saved")
    assert err.count("note: ") == 1
    assert (
        code == 0
        and f"note: {tmp_path}/.saved.99999999-0123abcd was left by a run" in err
        and (tmp_path / "saved" / "model.safetensors").is_file()
    )


def test_a_full_disk_leaves_nothing(tiny, tmp_path):
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    process = program("-m", tiny, "--save-fp8", tmp_path / "new", preexec_fn=limit)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1 and err.startswith(b"error: ") and err.count(b"\n") == 1 and not [*tmp_path.iterdir()], err


def test_a_saved_model_keeps_the_template_that_its_path_told(copy, tmp_path):
    source = copy.rename(tmp_path / "Llama-2-7b-chat")
    saved = save_fp8(source, tmp_path / "new").parent
    assert find_template(source, {})[0] == find_template(saved, {})[0] == TEMPLATES["llama2"]


# ---- chat


def chat(cli, folder, *lines: str, flags=()):
    text = "".join(line + "\n" for line in lines).encode()
    return cli("-m", folder, "--chat", "-n", 6, "--ignore-eos", "--temp", 0, *flags, stdin=text)


def test_chat_answers_each_line_and_ends_with_the_input(cli, tiny):
    code, out, err = chat(cli, tiny, "hello", "", "/help", "again")
    assert code == 0 and len(out.splitlines()) >= 2 and "generated 12 tokens" in err
    assert "no template found: plain text" in err and "/clear        forget" in err
    assert chat(cli, tiny, "hello", "/exit", "again")[2].count("generated 6 tokens") == 1


def test_chat_forgets_on_clear(cli, tiny):
    once = chat(cli, tiny, "hello")[1]
    assert chat(cli, tiny, "hello", "/clear", "hello")[1] == once * 2
    assert chat(cli, tiny, "good day", "hello")[1] != chat(cli, tiny, "good day")[1] + once
    kind = chat(cli, tiny, "/system Be kind.", "hello")[1]
    assert kind == chat(cli, tiny, "hello", flags=["--system", "Be kind."])[1] != once


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_evaluates_only_what_is_new(cli, tiny, template):
    flags = ["--chat-template", template, "-c", 256]
    one, two = (chat(cli, tiny, *["tell me a tale"] * n, flags=flags)[2] for n in (1, 2))
    first, both = (int(err.split("prompt    ")[1].split()[0]) for err in (one, two))
    assert both - first < first + 6 + 8, "the second turn evaluated the first again"
    assert f"template: {template} (given)" in one


def test_chat_drops_its_oldest_turns_and_keeps_the_system_prompt(cli, tiny, monkeypatch):
    seen = []
    original = Chat.fit
    monkeypatch.setattr(Chat, "fit", lambda self, message: seen.append(original(self, message)) or seen[-1])
    flags = ["--system", "Be kind.", "--chat-template", "llama2", "-c", 128]
    code, _, err = chat(cli, tiny, *["tell me a tale"] * 8, flags=flags)
    assert code == 0 and "dropped the oldest" in err and "error" not in err
    assert all(len(prompt.ids) <= 128 and prompt.text.startswith("<s>[INST] <<SYS>>\nBe kind.") for prompt in seen)


def test_a_message_longer_than_the_context_does_not_end_the_chat(cli, tiny):
    code, out, err = chat(cli, tiny, "hello", "tell me a tale " * 60, "hello", flags=["-c", 64])
    assert code == 0 and "the context holds 64" in err and "generated 12 tokens" in err and "dropped" not in err


def test_a_line_that_is_not_utf8_does_not_end_the_chat(cli, tiny):
    code, _, err = cli("-m", tiny, "--chat", "-n", 4, "--ignore-eos", stdin=b"hello\n\xff\nhello\n")
    assert code == 0 and "not UTF-8" in err and "generated 8 tokens" in err


def test_a_system_prompt_that_cannot_be_used_changes_nothing(cli, tiny):
    lines = b"hello\n/system \xff\n/system " + b"a" * 50_000 + b"\n/system " + b"tell me a tale " * 60 + b"\n/regen\n"
    code, _, err = cli("-m", tiny, "--chat", "-n", 4, "--ignore-eos", "-c", 128, stdin=lines)
    assert code == 0 and "generated 8 tokens" in err, "the conversation is still there"
    told = [line for line in err.splitlines() if line.startswith("error: ")]
    assert [line.split("prompt ")[1].split()[0] for line in told] == ["is", "has", "takes"], told


def objects(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def test_one_turn_of_a_chat_for_a_script(cli, tiny, tmp_path):
    flags = ("-m", tiny, "--chat-template", "llama2", "-n", 6, "--ignore-eos", "--temp", 0, "--quiet")
    expected = chat(cli, tiny, "hello", flags=["--chat-template", "llama2", "--quiet"])[1]
    (tmp_path / "message").write_text("hello\n")
    for how in (["--chat", "-p", "hello"], ["-st", "-p", "hello"], ["-cnv", "-f", tmp_path / "message"]):
        assert cli(*flags, *how) == (0, expected, ""), how
    assert cli(*flags, "-st", stdin=b"hello\n") == (0, expected, "")
    whole = cli(*flags, "--chat", "-p", "hello\\nyou", "-o", "jsonl")[1]
    assert (
        objects(whole) == objects(cli(*flags, "-st", "-o", "jsonl", stdin=b"hello\nyou")[1])
        or objects(whole)[0]["prompt"] == "hello\nyou"
    )
    code, out, err = cli(*flags, "--chat", "-p", "tell me a tale " * 60, "-c", 64)
    assert code == 1 and out == "" and "the context holds 64" in err and err.count("\n") == 1


def test_jsonl_says_why_each_text_ended(cli, copy):
    flags = ("-m", copy, "-p", "Once", "--temp", 0, "-o", "jsonl", "--quiet")
    code, out, err = cli(*flags, "-n", 12, "--ignore-eos")
    (whole,) = objects(out)
    assert code == 0 and err == "" and whole["ended_by"] == "length" and whole["new_tokens"] == 12
    assert whole["prompt"] == "Once" and whole["prompt_tokens"] == whole["evaluated_tokens"] > 1
    assert whole["prompt_seconds"] > 0 and whole["generation_seconds"] > 0 and whole["tokens_per_s"] > 0
    text = cli(*flags[:6], "-n", 12, "--ignore-eos", "--quiet", "--no-display-prompt")[1]
    assert whole["text"] + "\n" == text
    (stopped,) = objects(cli(*flags, "-n", 12, "--ignore-eos", "--stop", whole["text"][4:7])[1])
    assert stopped["ended_by"] == "stop" and stopped["text"] == whole["text"][: whole["text"].find(whole["text"][4:7])]
    (full,) = objects(cli(*flags, "-n", -2, "-c", 16, "--ignore-eos")[1])
    assert full["ended_by"] == "context" and full["prompt_tokens"] + full["new_tokens"] == 16
    (none,) = objects(cli(*flags, "-n", 0)[1])
    assert none["text"] == "" and none["ended_by"] == "length" and none["tokens_per_s"] is none["prompt_seconds"] is None
    ids = list(
        generate(
            load(copy, dtype="fp32", device="cpu"), Tokenizer(copy).encode("Once"), n=12, sampling=Sampling(temp=0), eos=[]
        )
    )
    (copy / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": ids[5]}))
    (ended,) = objects(cli(*flags, "-n", 12)[1])
    assert ended["ended_by"] == "eos" and ended["new_tokens"] == ids.index(ids[5]) + 1


def test_jsonl_has_an_object_for_each_turn(cli, tiny):
    code, out, err = chat(
        cli,
        tiny,
        "hello",
        "/clear",
        "tell me a tale " * 60,
        "/read nowhere",
        "again",
        flags=["-o", "jsonl", "-c", 64, "--quiet"],
    )
    hello, long, read, again = objects(out)
    assert code == 0 and hello["prompt"] == "hello" and hello["ended_by"] == "length" and again["new_tokens"] == 6
    assert "the context holds 64" in long["error"] and read["error"] == "nowhere: No such file or directory"
    assert err.splitlines() == [f"error: {long['error']}", f"error: {read['error']}"]


def test_no_tokens_have_no_rate(cli, tiny):
    code, out, err = cli("-m", tiny, "-p", "Once", "-n", 0)
    assert code == 0 and out == "Once\n" and "generated 0 tokens\n" in err and "tokens/s" not in err


def test_quiet_is_quiet(cli, tiny):
    assert (
        chat(cli, tiny, "hello", "/clear", "/system x", "hello", *["tell me a tale"] * 12, flags=["--quiet", "-c", 64])[2] == ""
    )
    assert cli("-m", tiny, "-p", "Once", "-c", 16, "--ignore-eos", "--quiet", "-ngl", 99)[2] == ""


def test_a_message_may_begin_with_a_slash_and_go_on(cli, tiny):
    out = chat(cli, tiny, "/usr/bin/python says", "one \\", "two", "/bye", "no", flags=["-o", "jsonl"])[1]
    assert [turn["prompt"] for turn in objects(out)] == ["/usr/bin/python says", "one \ntwo"]
    assert objects(chat(cli, tiny, "one\\", flags=["-o", "jsonl"])[1])[0]["prompt"] == "one", "the input ended"


def test_commands_confirm_and_regen_answers_again(cli, tiny):
    code, out, err = chat(
        cli, tiny, "/regen", "hello", "/regen", "/clear", "/system Be kind.", "/system", flags=["-o", "jsonl"]
    )
    error, first, second = objects(out)
    assert error["error"] == "there is no answer yet" and first["text"] == second["text"] and "always the same" in err
    for text in ("conversation cleared", "with this system prompt", "without a system prompt"):
        assert text in err
    warm = ("-m", tiny, "--chat", "-n", 12, "--ignore-eos", "--temp", 5, "-o", "jsonl")
    first, second, third = objects(cli(*warm, stdin=b"hello\n/regen\nagain\n")[1])
    assert first["prompt"] == second["prompt"] == "hello" and first["text"] != second["text"]
    assert second["evaluated_tokens"] == 1 and third["prompt_tokens"] < 2 * second["prompt_tokens"] + 12 + 12


def test_a_file_is_read_before_the_next_message(cli, tiny, tmp_path):
    (tmp_path / "notes").write_text("good day, crow!\n")
    (tmp_path / "bad").write_bytes(b"ab\xff")
    (tmp_path / "long").write_text("x" * 100_000)
    (tmp_path / "dense").write_text("x" * 20_000)
    lines = [
        f"/read {tmp_path / 'notes'}",
        "what?",
        *(f"/read {tmp_path / name}" for name in ("bad", "long", "dense", "none", "")),
        "/read /dev/zero",
        "/read",
        "/read ~nobody-of-this-name/notes",
    ]
    code, out, err = chat(cli, tiny, *lines, flags=["-o", "jsonl"])
    assert code == 0 and objects(out)[0]["prompt"] == "good day, crow!\n\nwhat?" and "16 characters" in err
    for error, text in zip(
        objects(out)[1:],
        (
            "not UTF-8: byte 0xff at offset 2", "too many for 256 tokens (see -c)", f"{tmp_path / 'dense'} takes 2",
            "No such file",
            "is not a file", "is not a file", "/read needs the name of a file", "No such file",
        ),
        strict=True,
    ):  # fmt: skip
        assert text in error["error"] and "Errno" not in error["error"]


def test_line_endings_of_a_file_that_is_read(cli, tiny, tmp_path):
    (tmp_path / "notes").write_bytes(b"good\r\nday,\rcrow!\n")
    code, out, _ = chat(cli, tiny, f"/read {tmp_path / 'notes'}", "what?", flags=["-o", "jsonl"])
    assert code == 0 and objects(out)[0]["prompt"] == "good\nday,\ncrow!\n\nwhat?"


def test_what_was_read_waits_for_a_message_that_is_answered(cli, tiny, tmp_path):
    (tmp_path / "notes").write_text("good day, crow!")
    read = f"/read {tmp_path / 'notes'}"
    lines = ["what?", read, "/regen", "fox " * 2000, "and?", read, "/clear", "why?", read, "/system Be kind.", "who?"]
    code, out, _ = chat(cli, tiny, *lines, flags=["-o", "jsonl"])
    assert code == 0
    assert [turn["prompt"][:21] for turn in objects(out)] == [
        "what?",
        "what?",
        "fox " * 5 + "f",
        "good day, crow!\n\nand?",
        "why?",
        "good day, crow!\n\nwho?",
    ]


def test_a_full_context_keeps_the_end_of_the_last_answer(cli, monkeypatch):
    seen = []
    original = Chat.fit
    monkeypatch.setattr(Chat, "fit", lambda self, message: seen.append(original(self, message)) or seen[-1])
    flags = ["--system", "Be kind.", "-c", 100, "-n", -2, "-o", "jsonl", "--dtype", "fp32"]
    code, out, err = chat(cli, run.DEFAULT_MODEL, "Tell me a tale", *["go on"] * 2, flags=flags)
    turns = objects(out)
    assert code == 0 and err.count("dropped the oldest") == 2 and all(turn["ended_by"] == "context" for turn in turns)
    form = r"(?s)<s>\[INST\] <<SYS>>\nBe kind.\n<</SYS>>\n\n[^[]* \[/INST\] (.*) </s><s>\[INST\] go on \[/INST\]"
    for before, prompt in zip(turns, seen[1:]):
        kept = re.fullmatch(form, prompt.text).group(1).strip()
        assert len(kept) > 20 and before["text"].strip().endswith(kept) and len(prompt.ids) <= 50


# ---- the prompt cache


def test_a_prompt_costs_once(cli, tiny, tmp_path):
    file, prompt = tmp_path / "cache", "Once upon a time there was a fox. It said: good day, crow!"
    flags = ("-m", tiny, "--temp", 0, "-n", 12, "--ignore-eos", "-o", "jsonl", "--dtype", "fp32")
    (plain,), (first,), (second,) = (
        objects(cli(*flags, "-p", prompt, *cache)[1]) for cache in ([], ["--prompt-cache", file], ["--prompt-cache", file])
    )
    assert plain["text"] == first["text"] == second["text"]
    assert first["evaluated_tokens"] == plain["prompt_tokens"] and second["evaluated_tokens"] == 1
    assert file.stat().st_mode & 0o077 == 0, "a prompt is private"
    written = file.read_bytes()
    (longer,) = objects(cli(*flags, "-p", prompt + " And", "--prompt-cache", file)[1])
    assert (
        longer["evaluated_tokens"] < plain["prompt_tokens"] / 3
        and longer["text"] == objects(cli(*flags, "-p", prompt + " And")[1])[0]["text"]
    )
    (short,) = objects(cli(*flags, "-p", "Once upon", "-c", 16, "--prompt-cache", file)[1])
    assert short["text"] == objects(cli(*flags, "-p", "Once upon", "-c", 16)[1])[0]["text"] and file.read_bytes() == written
    (other,) = objects(cli(*flags, "-p", "Żółw zjadł 12 jabłek", "--prompt-cache", file)[1])
    assert other["text"] == objects(cli(*flags, "-p", "Żółw zjadł 12 jabłek")[1])[0]["text"] and file.read_bytes() != written
    assert sorted(tmp_path.iterdir()) == [file]


def test_a_chat_keeps_its_first_prompt(cli, tiny, tmp_path):
    flags = ["--prompt-cache", tmp_path / "cache", "-o", "jsonl", "--system", "Be kind. " * 5, "--chat-template", "llama2"]
    first, second = (objects(chat(cli, tiny, "hello", "hello", flags=flags)[1]) for _ in range(2))
    assert [turn["text"] for turn in first] == [turn["text"] for turn in second]
    assert second[0]["evaluated_tokens"] == 1 and first[1]["evaluated_tokens"] == second[1]["evaluated_tokens"]
    (other,) = objects(chat(cli, tiny, "good day", flags=flags)[1])
    assert other["evaluated_tokens"] < other["prompt_tokens"] / 2


@pytest.mark.parametrize("flags", [["--kv-fp8"], ["--dtype", "bf16"], ["--fp8"]], ids=str)
def test_keys_and_values_of_another_type_are_refused(cli, tiny, tmp_path, flags):
    base = ("-m", tiny, "-p", "Once upon a time", "-n", 4, "--temp", 0, "--prompt-cache", tmp_path / "cache")
    assert cli(*base, *flags)[0] == 0 and cli(*base, *flags)[0] == 0
    code, out, err = cli(*base)
    assert code == 1 and "another model or other types" in err.splitlines()[-1] and out == ""


def spoil_cache(change=lambda tensors: tensors, **metadata):
    def spoil(file: Path) -> None:
        with safe_open(file, "pt") as f:
            meta = f.metadata() | metadata
        save_file({name: t.contiguous() for name, t in change(load_file(file)).items()}, file, meta)

    return spoil


SPOILED_CACHES = {
    "another model": (spoil_cache(model="0"), "another model or other types"),
    "another kind": (spoil_cache(**{"fused-llama": "1"}), "is not a prompt cache"),
    "no cache": (lambda file: shutil.copyfile(run.DEFAULT_MODEL / "model.safetensors", file), "is not a prompt cache"),
    "text": (lambda file: file.write_text("hello"), "not a valid safetensors file"),
    "empty": (lambda file: file.write_bytes(b""), "not a valid safetensors file"),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-9]), "not a valid safetensors file"),
    "huge header": (lambda file: file.write_bytes(struct.pack("<Q", 1 << 60) + b"{}"), "not a valid safetensors file"),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), "is not a file"),
    "a pipe": (lambda file: (file.unlink(), os.mkfifo(file)), "is not a file"),
    "no values": (spoil_cache(lambda t: {"tokens": t["tokens"], "k": t["k"]}), "does not hold the keys and values"),
    "more": (spoil_cache(lambda t: t | {"x": t["k"].clone()}), "does not hold the keys and values"),
    "fewer tokens": (spoil_cache(lambda t: t | {"tokens": t["tokens"][:-1]}), "does not hold the keys and values"),
    "long tokens": (spoil_cache(lambda t: t | {"tokens": t["tokens"].long()}), "does not hold the keys and values"),
    "a matrix of tokens": (spoil_cache(lambda t: t | {"tokens": t["tokens"][:, None]}), "does not hold the keys and values"),
    "one token": (spoil_cache(lambda t: t | {"tokens": t["tokens"][0].clone()}), "does not hold the keys and values"),
    "another shape": (spoil_cache(lambda t: t | {"k": t["k"][..., 1:]}), "does not hold the keys and values"),
    "another type": (spoil_cache(lambda t: t | {"v": t["v"].half()}), "does not hold the keys and values"),
    "NaN": (spoil_cache(lambda t: t | {"v": t["v"] * float("nan")}), "not finite"),
    "no metadata": (lambda file: file.write_bytes(struct.pack("<Q", 21) + b'{"__metadata__":null}'), "is not a prompt cache"),
}


@pytest.mark.parametrize("how", SPOILED_CACHES)
def test_a_spoiled_prompt_cache_is_one_line_of_error(cli, tiny, tmp_path, how):
    file, (spoil, text) = tmp_path / "cache", SPOILED_CACHES[how]
    flags = ("-m", tiny, "-p", "Once upon a time", "-n", 4, "--dtype", "fp32", "--quiet", "--prompt-cache", file)
    assert cli(*flags)[0] == 0
    spoil(file)
    before = file.read_bytes() if file.is_file() else None
    code, out, err = cli(*flags)
    assert code == 1 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and text in err, err
    assert (file.read_bytes() if file.is_file() else None) == before, "it is left as it was"


def test_a_prompt_cache_is_written_whole_or_not_at_all(cli, tiny, tmp_path, monkeypatch):
    flags = ("-m", tiny, "-p", "Once", "-n", 4, "--quiet", "--prompt-cache")
    code, out, err = cli(*flags, tmp_path / "none" / "cache")
    assert code == 1 and out == "" and "create that folder first" in err and err.count("\n") == 1

    def broken_off(end, *arguments):
        return lambda tensors, file, metadata: [Path(file).write_bytes(b"half"), Path(f"{file}.tmp").touch(), end(*arguments)]

    monkeypatch.setattr(session, "save_file", broken_off(fails(OSError(28, "No space left on device"))))
    code, out, err = cli(*flags, tmp_path / "cache")
    assert code == 1 and out == "" and "cannot be written" in err and err.count("\n") == 1 and not list(tmp_path.iterdir())
    for number in (signal.SIGTERM, signal.SIGHUP):
        before = signal.getsignal(number)
        monkeypatch.setattr(session, "save_file", broken_off(signal.raise_signal, number))
        assert cli(*flags, tmp_path / "cache")[0] == 128 + number and not list(tmp_path.iterdir())
        assert signal.getsignal(number) == before
    monkeypatch.undo()
    (tmp_path / ".cache.99999999-0123abcd").mkdir()
    assert cli(*flags, tmp_path / "cache")[2] == "" and (tmp_path / "cache").is_file()
    code, _, err = cli(*(flag for flag in flags if flag != "--quiet"), tmp_path / "cache")
    assert code == 0 and f"note: {tmp_path}/.cache.99999999-0123abcd was left by a run that was killed" in err


def test_a_prompt_cache_that_shrinks_while_it_is_read(cli, tiny, tmp_path, monkeypatch):
    flags = ("-m", tiny, "-p", "Once upon a time", "-n", 4, "--quiet", "--prompt-cache", tmp_path / "cache")
    assert cli(*flags)[0] == 0
    whole = session.read_part
    shrink = lambda part, index: [os.truncate(part.file, part.offset + 8), whole(part, index=index)][1]
    monkeypatch.setattr(session, "read_part", shrink)
    code, out, err = cli(*flags)
    assert code == 1 and out == "" and "was changed while it was being read" in err and err.count("\n") == 1


# ---- a person at a terminal


@pytest.mark.parametrize("width", [8, 20, 80])
def test_words_are_not_cut_at_the_edge_of_the_screen(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    words = [
        "fox",
        "Żółw",
        "good",
        "\U0001f422",
        "e\u0301e\u0301",
        "\u4f60\u597d" * 9,
        "a" * (width // 2),
        "x" * 2 * width,
        "\n",
        "\n\n",
        "\x1b[2J",
        "\t",
    ]
    text = " ".join(random.choices(words, k=200))
    printer = terminal.Printer()
    printer.wraps = True
    for start in range(0, len(text), 3):
        printer.write(text[start : start + 3])
    printer.end()
    shown = capsys.readouterr().out
    assert all(sum(map(terminal.columns, line)) < width for line in shown.split("\n"))
    visible = text.replace("\x1b", "\ufffd")
    assert "".join(shown.split()) == "".join(visible.split()), "nothing is lost"
    assert all(word in shown.split() for word in visible.split() if word.isascii() and len(word) < width)


class Person:
    """Types into a program at a pseudo-terminal and reads what it shows."""

    def __init__(self, *arguments, script: Path = HERE / "run.py", columns: int = 80, **environment):
        variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        variables |= {
            "TERM": "xterm-256color",
            "OMP_NUM_THREADS": "1",
            "XDG_STATE_HOME": "/none",
            "INPUTRC": "/dev/null",
        } | environment
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            os.execve(sys.executable, [sys.executable, str(script), *map(str, arguments)], variables)
        self.unread, self._decoder = "", codecs.getincrementaldecoder("utf-8")("replace")

    def types(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def interrupts(self, pattern: str) -> str:
        """Types Ctrl-C and returns what sees(pattern) does. A signal that comes while readline draws is handled with the next
        one: SIGWINCH, which does nothing else."""
        self.types(CTRL_C)
        return self.sees(pattern, lambda: os.kill(self.pid, signal.SIGWINCH))

    def sees(self, pattern: str, wake=lambda: None) -> str:
        """What the program shows up to a match of the pattern. wake is called while it shows nothing."""
        deadline = time.monotonic() + PATIENCE
        while not (match := re.search(pattern, self.unread)):
            if select.select([self.terminal], [], [], 1)[0]:
                assert self._reads(), f"no {pattern!r} in {self.unread!r}"
            else:
                assert time.monotonic() < deadline, f"no {pattern!r} in {self.unread!r}"
                wake()
        seen, self.unread = self.unread[: match.end()], self.unread[match.end() :]
        return seen

    def leaves(self) -> tuple[int, str]:
        """The exit code, and what is shown until then."""
        while self._reads():
            pass
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self.unread

    def _reads(self) -> bool:
        try:
            new = os.read(self.terminal, 1 << 16)
        except OSError:  # the end of output, on Linux
            return False
        self.unread += self._decoder.decode(new)
        return bool(new)


def test_control_characters_do_not_reach_the_terminal(tiny):
    person = Person("-m", tiny, "-p", "a\x1b[2Jb\x9bc\rd\te", "-n", 2, "--quiet")
    code, shown = person.leaves()
    assert code == 0 and shown.startswith("a\ufffd[2Jb\ufffdc d\te") and "\x1b" not in shown, shown


PASTED = "\x1b[200~{}\x1b[201~"
UP, CTRL_C, CTRL_D = "\x1b[A", "\x03", "\x04"


def test_a_chat_loses_nothing_that_is_typed(tiny, tmp_path):
    flags = ("-m", tiny, "--chat", "-n", 6, "--ignore-eos", "--temp", 0)
    person = Person(*flags, XDG_STATE_HOME=str(tmp_path))
    begin = person.sees("> ")
    assert "loading" in begin and "\x1b[?2004h\x1b[1;32m> " in begin, "bracketed paste, and what is typed in colour"
    person.types("hello\r")
    turn = person.sees("> ")
    assert re.fullmatch(r"(?s)hello\r\n(\x1b\[\?2004l\r)?\x1b\[0m\r\n[^\x1b]+\r\n\r\n\x1b\[\?2004h\x1b\[1;32m> ", turn), repr(
        turn
    )
    person.types(PASTED.format("good\rday"))
    person.sees("day")
    person.types("\r")
    person.sees("> ")
    person.types("two \\\r")
    person.sees("  ")
    person.types("lines\r")
    person.sees("> ")
    person.types(UP + UP)
    assert "good\r\n" in person.sees("day"), "a pasted message comes back whole"
    person.interrupts(r"to leave: Ctrl-C again, Ctrl-D or /exit\)[^>]*> ")
    person.types("abc")
    person.sees("abc")
    person.interrupts("> ")
    person.types("/clear\r")
    person.sees("conversation cleared[^>]*> ")
    person.interrupts("> ")
    rest = person.interrupts("memory ")
    code, _ = person.leaves()
    assert code == 130 and "generated 18 tokens" in rest and "Traceback" not in rest and rest.startswith("\x1b[?2004l\r\x1b[0m")
    history = (tmp_path / "fused-llama" / "history").read_text().splitlines()
    assert [json.loads(line) for line in history] == ["hello", "good\nday", "two \nlines", "/clear"]
    assert (tmp_path / "fused-llama" / "history").stat().st_mode & 0o077 == 0

    person = Person(*flags[:3], "--ignore-eos", "-c", 5000, XDG_STATE_HOME=str(tmp_path), NO_COLOR="1", columns=20)
    assert "\x1b[1" not in person.sees("> ")
    person.types(UP + UP + UP)
    assert "good\r\n" in person.sees("day"), "from the history of another run"
    person.types("\r")
    answer = person.sees(r"\x1b\S+([^\n]*\n){6}")  # after the sequence that ends bracketed paste
    answer += person.interrupts(r"\x1b\[\?2004h> ")  # the text may hold "> ", but no escape
    overwritten = re.compile(r".*\r(?!$)")  # the progress bar of a prompt that takes more than two seconds
    lines = [overwritten.sub("", line).strip("\r").replace("^C", "") for line in answer.split("\n")[1:-1]]
    assert all(sum(map(terminal.columns, line)) < 20 for line in lines if "\x1b" not in line), lines
    person.types(CTRL_D)
    code, rest = person.leaves()
    assert code == 0 and "generated" in rest


def test_bare_run_at_a_terminal_is_a_chat(tmp_path):
    (tmp_path / "llama").symlink_to(HERE / "run.py")
    person = Person("-n", 4, script=tmp_path / "llama", TERM="dumb")
    assert "since there is no prompt" in person.sees("> ")
    person.types("Tell me a tale\r")
    person.sees("> ")
    person.types("/exit\r")
    code, rest = person.leaves()
    assert code == 0 and "\x1b" not in rest and "Traceback" not in rest


def test_what_a_run_without_a_prompt_does(monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for flags, mode in (
        ("", "bare"),
        ("-no-cnv", "text"),
        ("-p x", "text"),
        ("-f x", "text"),
        ("--chat", "chat"),
        ("-st", "chat"),
        ("-sys x", "bare"),
    ):
        assert run.parse_args(flags.split()).mode == mode, flags
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert run.parse_args([]).mode == "text"


def test_a_long_prompt_shows_how_far_it_is(cli, tiny, monkeypatch):
    bars, original = [], session.tqdm

    def shown(**options):
        assert options["delay"] == 2 and options["disable"] and not options["leave"]
        bars.append(original(**options | {"delay": 0, "disable": False, "file": io.StringIO(), "mininterval": 0}))
        return bars[-1]

    monkeypatch.setattr(session, "tqdm", shown)
    monkeypatch.setitem(CHUNK, "cpu", 16)
    assert cli("-m", tiny, "-p", "fox " * 40, "-n", 1, "-c", 300)[0] == 0
    (bar,) = bars
    assert "prompt" in bar.fp.getvalue() and bar.fp.getvalue().count("\r") > 3 and bar.n == bar.total > 64


# ---- speculation


class Planted(Speculation):
    """Proposes the text that will follow, with errors here and there."""

    def __init__(self, n: int, text: list[int]):
        super().__init__(n)
        self.text = text

    def propose(self, cache, count, sampler, banned):
        coming = self.text[cache.pos + 1 : cache.pos + 1 + random.randint(0, count)]
        return [random.choice([token] * 4 + [7]) for token in coming]


def always(speculation: Speculation) -> Speculation:
    speculation.pacer.ready = lambda: True
    return speculation


def evaluates_one_by_one(model) -> None:
    """Have model.evaluate take its tokens one at a time: the sums are then in the same order, and the logits equal to the last
    bit. Otherwise two tokens whose logits are tied to within rounding may change places."""
    single = model.evaluate
    model.evaluate = lambda T, cache: torch.cat([single(1, cache) for _ in range(T)])


SETTINGS = {
    "greedy": dict(sampling=Sampling(temp=0)),
    "default": dict(sampling=Sampling()),
    "hot, without filters": dict(sampling=Sampling(temp=2, top_k=0, top_p=1, min_p=0)),
    "penalty": dict(sampling=Sampling(repeat_penalty=1.5, repeat_last_n=6)),
    "penalty on all": dict(sampling=Sampling(temp=0, repeat_penalty=1.1, repeat_last_n=-1)),
    "n": dict(n=7),
    "one": dict(n=1),
    "none": dict(n=0),
    "eos": dict(eos=range(3, 40)),
    "eos ignored": dict(sampling=Sampling(temp=0), eos=range(3, 200), ignore_eos=True),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_proposals_do_not_change_the_text(tiny, settings):
    model = load(tiny, dtype="fp32", device="cpu", ctx_size=64)  # which many texts fill
    other = other_model(model)
    evaluates_one_by_one(model)
    for seed in range(2):
        options = dict(SETTINGS[settings])
        options["sampling"] = replace(options.get("sampling", Sampling()), seed=seed)
        prompt = random.choices(range(3, 300), k=random.choice([1, 9])) * random.choice([1, 3])
        expected_cache = KVCache(model)
        expected = list(generate(model, prompt, expected_cache, **options))
        ways = [
            Lookup(3),
            Draft(3, model),
            Draft(4, other),
            Planted(5, prompt + expected),
            Planted(15, prompt + expected),
        ]
        for way in map(always, ways):
            cache = KVCache(model)
            assert list(generate(model, prompt, cache, **options, decode=way.decode)) == expected
            assert cache.pos == cache.device_pos == expected_cache.pos
            assert way.tokens <= max(len(expected) - 1, 0) + way.n  # an eos ends a pass early
            assert way.tokens == way.passes + way.accepted


def other_model(model):
    """One of the same shapes with other weights."""
    other = copy_module.deepcopy(model)
    for matrix in other.weights.matrices:
        matrix.data += 0.3 * matrix.data.std() * torch.randn_like(matrix.data)
    return other


def test_a_draft_that_is_the_model_is_always_accepted(tiny):
    model = load(tiny, dtype="fp32", device="cpu", ctx_size=128)
    evaluates_one_by_one(model)
    speculation = always(Draft(4, model))
    tokens = list(generate(model, [1, 5, 6], n=61, eos=[], decode=speculation.decode))
    assert len(tokens) == 61 and speculation.accepted == speculation.proposed and speculation.passes == 12


def test_a_pass_may_end_in_the_middle_and_the_conversation_goes_on(tiny):
    model = load(tiny, dtype="fp32", device="cpu", ctx_size=128)
    evaluates_one_by_one(model)
    prompt = [1, 5, 6]
    for taken in range(1, 9):
        cache, draft = KVCache(model), always(Draft(4, model))
        with closing(generate(model, prompt, cache, 40, eos=[], decode=draft.decode)) as tokens:
            first = list(islice(tokens, taken))
        assert cache.pos == cache.device_pos == len(prompt) + taken - 1
        turn = [*prompt, *first, 9, 10]
        timings = Timings()
        second = list(generate(model, turn, cache, 12, eos=[], timings=timings, decode=draft.decode))
        assert timings.prompt_tokens == 3
        assert second == list(generate(model, turn, KVCache(model), 12, eos=[]))


def test_lookup_proposes_what_followed_the_latest_and_longest_occurrence(tiny):
    cache = KVCache(load(tiny, dtype="fp32", device="cpu", ctx_size=32))

    def proposed(*tokens: int, count: int = 4) -> list[int]:
        cache.tokens[: len(tokens)] = torch.tensor(tokens)
        cache.pos = len(tokens) - 1
        return Lookup(4).propose(cache, count, cache.sampler, None)

    assert proposed(5) == proposed(5, 6, 7) == proposed(5, 6, 7, 9, 7) == []  # one token is not enough
    assert proposed(5, 6, 7, 8, 9, 5, 6) == [7, 8, 9, 5]
    assert proposed(1, 5, 6, 7, 2, 5, 6, 8, 3, 1, 5, 6) == [7, 2, 5, 6]  # the longest
    assert proposed(5, 6, 7, 2, 5, 6, 8, 3, 5, 6, count=1) == [8]  # the latest
    assert proposed(9, 5, 6, 5, 6) == [5, 6, 5, 6]
    assert proposed(8, 8, 8) == [8, 8, 8, 8]


@pytest.mark.parametrize("cost", [1.02, 1.15, 1.5, 3.0])
def test_proposals_that_fail_cost_at_most_3_percent(cost):
    pacer = Pacer()

    def spend(accepted: int) -> float:
        seconds = cost if pacer.ready() else 1.0
        pacer.tell(int(seconds > 1), accepted, seconds)
        return seconds

    for length in (400, 4000):
        assert sum(spend(0) for _ in range(length)) <= 1.03 * length
    for _ in range(200):  # the text begins to repeat
        spend(4)
    assert all(spend(4) > 1 for _ in range(20))


@needs_triton
def test_lookup_on_the_device_proposes_what_the_reference_proposes(tiny):
    cache = KVCache(load(tiny, dtype="fp32", device=DEVICE, ctx_size=64))
    turn, result = torch.ones(1, dtype=torch.int32, device=DEVICE), torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    for _ in range(20):
        length = random.randint(1, 50)
        cache.tokens[:length] = torch.tensor(random.choices(range(random.choice([2, 3, 9])), k=length))
        cache.seek(length - 1)
        expected = Lookup(6).propose(cache, 6, cache.sampler, None)
        cache.tokens[length:] = -7
        speculation.enqueue_lookup(cache, 6, turn, result)
        assert bool(result[1, 1]) == bool(expected)
        assert cache.tokens[length : length + 6].tolist() == (expected or [0] * 6)
        assert (cache.tokens[length + 6 :] == -7).all()


@needs_triton
def test_what_is_accepted_on_the_device():
    for T in (1, 2, 5, 16):
        for accepted in range(T):
            tokens, drawn, host_tokens = (torch.full((40,), -9, dtype=torch.int32, device=DEVICE) for _ in range(3))
            drawn[8 : 8 + T] = tokens[8 : 8 + T] = torch.arange(50, 50 + T, dtype=torch.int32)
            tokens[8 + accepted] = 3
            pos, turn = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (7 + T, 5))
            rejected, result = (torch.zeros(shape, dtype=torch.int32, device=DEVICE) for shape in (1, (2, 2)))
            cache = SimpleNamespace(tokens=tokens, host_tokens=host_tokens, device_pos=pos)
            speculation.enqueue_accept(cache, T, drawn, rejected, turn, result)
            assert rejected == T - 1 - accepted and turn == 6 and result[1, 0] == 8 + accepted
            assert host_tokens[7 : 9 + accepted].tolist() == [-9, *range(50, 51 + accepted)]
            assert host_tokens[9 + accepted] == -9 and tokens[8 + accepted] == 50 + accepted


@needs_triton
def test_rows_are_sampled_as_single_tokens_are():
    tokens = torch.randint(0, 2000, (40,), dtype=torch.int32, device=DEVICE)
    for settings in (Sampling(seed=3), Sampling(temp=0), Sampling(top_k=0, repeat_penalty=1.3), Sampling(repeat_penalty=1.3)):
        logits = 3 * torch.randn(5, 2000, device=DEVICE)
        logits[3, 7] = torch.nan
        drawn, expected = (torch.full((40,), -5, dtype=torch.int32, device=DEVICE) for _ in range(2))
        pos, sampler = torch.tensor([30], dtype=torch.int32, device=DEVICE), Sampler(DEVICE, settings)
        kernels.fused.sample_rows(logits.clone(), tokens, drawn, pos, sampler)
        kernels.reference.sample_rows(logits, tokens, expected, pos, sampler)
        assert drawn.tolist() == expected.tolist() and drawn[29] == -1


@needs_triton
def test_passes_of_graphs_do_not_change_the_text(tiny, monkeypatch):
    """Without a GPU, what the graphs do is run directly, with the reference ops; capture and replay are not covered."""
    event = SimpleNamespace(synchronize=lambda: None, elapsed_time=lambda other: 1.0)

    def start(self, pos: int) -> None:
        self.running.clear()
        self.cache.seek(pos)
        self.turn.zero_()
        self.collected = 0

    def launch(self, T: int) -> None:
        self.run(T)
        self.running.append((T, event, event))

    model = load(tiny, dtype="fp32", device=DEVICE.type, ctx_size=40)
    prompt, other = [1, 5, 6, 7, 5, 6], other_model(model)
    settings = dict(sampling=Sampling(temp=0.7, seed=3, repeat_penalty=1.2), eos=[])
    cache, plain = KVCache(model), list(generate(model, prompt, **settings))
    longer = [*prompt, *plain[:5], 9]
    plain_longer = list(generate(model, longer, n=9, **settings))
    if DEVICE.type == "cpu":
        evaluates_one_by_one(model)
        monkeypatch.setattr(type(model), "uses_graphs", True)
        monkeypatch.setattr("model.PADDED", ())
        monkeypatch.setattr(speculation._OnGpu, "start", start)
        monkeypatch.setattr(speculation, "captured", lambda run: run())
        monkeypatch.setattr(speculation._OnGpu, "launch", launch)
    for way in (Lookup(3), Draft(3, model), Draft(2, other)):
        toss = random.Random(SEED)
        way.pacer.ready = lambda toss=toss: toss.random() < 0.7
        assert list(generate(model, prompt, cache, **settings, decode=way.decode)) == plain
        assert cache.pos == cache.device_pos == 39
        assert list(generate(model, longer, cache, 9, **settings, decode=way.decode)) == plain_longer
        assert way.tokens == way.passes + way.accepted
        if isinstance(way, Draft) and way.n == 3:
            assert way.accepted == way.proposed > 0


def test_speculation_from_the_command_line(cli, tiny, copy):
    flags = ("-m", tiny, "-p", "a fox a fox a fox", "-n", 40, "-s", 5, "--dtype", "fp32", "--stop", "zz")
    _, expected, _ = cli(*flags)
    for way in (("--lookup", 3), ("--draft", tiny), ("--draft", tiny, "--draft-max", 2)):
        code, out, err = cli(*flags, *way)
        assert code == 0 and out == expected
        assert re.search(r"proposals \d+ passes, \d\.\d\d tokens a pass; .* proposals accepted", err)
    lines = ("the fox", "the crow", "the fox")
    assert chat(cli, tiny, *lines, flags=("--lookup", 4))[1] == chat(cli, tiny, *lines)[1]
    assert cli(*flags, "--lookup", 3, "--draft", tiny)[0] == 2
    assert cli(*flags, "--lookup", 0)[0] == 2
    edit(copy / "config.json", vocab_size=read_config(copy).vocab_size + 8)
    code, _, err = cli(*flags, "--draft", copy)
    assert code == 1 and "different vocabulary" in err and err.count("\n") == 1


# ---- measuring


def test_costs_are_those_counted_by_hand():
    c = read_config_like(dim=8, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=2, hidden_dim=12, vocab_size=10)
    # 16-bit: Wqkv has (4 + 2 * 2) * 2 = 16 rows of 8; x and norm have 8 elements, q, k and v 16
    assert bench.cost("rmsnorm_qkv_rope", c, 1) == (2 * (16 * 8 + 8 + 8 + 16), 2 * 16 * 8)
    # 3 tokens after 5: they see 6 + 7 + 8 = 21 keys; 8 cached positions of 2 heads of 2, for keys and for values
    assert bench.cost("attention", c, 3, 5) == (2 * (3 * 8 * 2 + 2 * 8 * 4), 4 * 8 * 21)
    assert bench.cost("w2", c, 1) == (2 * (8 * 12 + 12 + 8 + 8), 2 * 8 * 12)
    assert bench.cost("rmsnorm_swiglu", c, 2, size=4) == (4 * (24 * 8 + 2 * 8 + 8 + 2 * 12), 2 * 2 * 24 * 8)
    assert bench.cost("rmsnorm", c, 3, size=4) == (4 * (3 * 8 * 2 + 8), 4 * 3 * 8)
    assert bench.cost("cross_entropy", c, 3)[0] == 4 * 3 * 10 + 3 * 12
    assert bench.cost("w2", c, 1, format=E4M3)[0] == 8 * 12 + 4 * 8 + 2 * (12 + 8 + 8)
    layer = 2 * 16 * 8 + 4 * 8 * 1 + 2 * 8 * 8 + 2 * 24 * 8 + 2 * 8 * 12
    assert bench.prefill_operations(c, 1) == 2 * layer + 2 * 10 * 8


def test_bytes_of_a_decode_step_are_the_matrices_and_the_cache(tiny):
    model = load(tiny, dtype="fp32", device="cpu")
    matrices = {name: shape for name, shape in tensor_shapes(model.config).items() if len(shape) == 2 and "tok" not in name}
    expected = 4 * sum(rows * columns for rows, columns in matrices.values())
    assert bench.decode_bytes(model, 0) == expected
    assert bench.decode_bytes(model, 10) - expected == 4 * 2 * 2 * 10 * 2 * 16  # k and v, layers, positions, heads, head_dim


def test_windows_count_every_token_once():
    for count, ctx, stride in ((100, 16, 16), (100, 16, 5), (7, 16, 16), (33, 16, 1)):
        counted = []
        for start, end, first in quality.windows(count, ctx, stride):
            assert start <= first <= end <= start + ctx
            counted += range(first, end)
        assert counted == list(range(count))


@pytest.mark.parametrize("stride", [24, 10])
def test_perplexity_equals_transformers(tiny, stride):
    from transformers import LlamaForCausalLM

    model, theirs = load(tiny, dtype="fp32", device="cpu"), LlamaForCausalLM.from_pretrained(tiny)
    ids, ctx, losses = torch.randint(3, 300, (70,)).tolist(), 24, []
    *_, measured = quality.perplexity(model, ids, 1, ctx, stride, against=model)
    for start, end, first in quality.windows(len(ids), ctx, stride):
        log_p = oracle(theirs, [1, *ids[start : end - 1]]).log_softmax(-1)
        losses += [-log_p[i - start, ids[i]].item() for i in range(first, end)]
    report = measured.report(text_bytes=200)
    assert report["tokens"] == 70
    assert abs(report["perplexity"] / torch.tensor(losses).double().mean().exp().item() - 1) < 1e-4
    assert abs(report["bits_per_byte"] - sum(losses) / 0.6931471805599453 / 200) < 1e-4
    assert report["mean_kl"] < 1e-9 and report["same_top_%"] == 100 and abs(report["perplexity_ratio"] - 1) < 1e-9


@pytest.fixture
def bench_cli(capfd, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    for name in ("read_ceiling", "copy_ceiling", "product_ceiling"):
        monkeypatch.setattr(bench, name, functools.cache(lambda *_: 1e10))  # the real ones take seconds

    def call(*arguments):
        try:
            code = bench.main([str(a) for a in arguments])
        except SystemExit as exit:
            code = exit.code
        return (code, *capfd.readouterr())

    return call


QUICK = ["-p", "4", "-n", "2", "-r", "1", "--device", "cpu"]


def test_bench_prints_each_form(bench_cli, tiny):
    _, out, _ = bench_cli("-m", tiny, *QUICK, "-o", "json", "--fp8", "none,e4m3")
    assert [(r["fp8"], r["test"]) for r in json.loads(out)] == [(f, t) for f in ("none", "e4m3") for t in ("pp4", "tg2")]
    code, out, err = bench_cli("-m", tiny, *QUICK, "-o", "json", "-d", "0,5", "--dtype", "fp32,bf16")
    rows = json.loads(out)
    assert code == 0 and [(r["dtype"], r["test"]) for r in rows] == [
        (dtype, test) for dtype in ("fp32", "bf16") for test in ("pp4", "pp4 @ d5", "tg2", "tg2 @ d5")
    ]
    assert all(r["tokens_per_s"] > 0 and r["share_of_ceiling"] > 0 for r in rows) and "load" in err and "first token" in err
    _, out, _ = bench_cli("-m", tiny, *QUICK, "-o", "jsonl")
    assert [json.loads(line)["test"] for line in out.splitlines()] == ["pp4", "tg2"]
    _, out, _ = bench_cli("-m", tiny, *QUICK, "-o", "csv")
    assert [row["test"] for row in csv.DictReader(io.StringIO(out))] == ["pp4", "tg2"]
    _, out, _ = bench_cli("-m", tiny, *QUICK)
    lines = out.splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1 and "pp4" in lines[2]


def test_bench_makes_random_models_and_compares_with_transformers(bench_cli, tiny, monkeypatch):
    seconds = (0.9**i for i in itertools.count())  # each measurement is shorter than the one before, whatever the machine does

    def wall_times(run, *_) -> list[float]:
        run()
        return [next(seconds)]

    monkeypatch.setattr(bench, "wall_times", wall_times)
    axes = ["-d", "0,9", "--dtype", "fp32,bf16", "--fp8", "none,e4m3", "-o", "json", "--vs", "transformers"]
    code, out, _ = bench_cli("-m", f"random:{tiny / 'config.json'}", *QUICK, *axes)
    rows = json.loads(out)
    ours, theirs = ([r for r in rows if ("transformers" in r["backend"]) == peer] for peer in (False, True))
    assert code == 0 and len(ours) == 2 * 2 * 4
    names = {"pp4": ["transformers"], "tg2": ["transformers, eager", "transformers, static cache"]}
    expected = [(r["dtype"], r["test"], name) for r in ours if r["fp8"] == "none" for name in names[r["test"][:3]]]
    assert [(r["dtype"], r["test"], r["backend"]) for r in theirs] == expected, "a peer stands beside what it did not run"
    assert all(r["ratio"] > 0 and r["fp8"] == "none" for r in theirs)
    assert bench.random_config("70b:3").n_layers == 3 and bench.random_config("7b").n_kv_heads == 32


def test_bench_kernels_and_profile_name_what_they_measured(bench_cli, tiny, tmp_path):
    picture = tmp_path / "roofline.png"
    code, out, err = bench_cli("-m", tiny, "-p", 4, "--device", "cpu", "--kernels", "-o", "jsonl", "--plot", picture)
    assert "the Triton kernels need a GPU" in err and picture.read_bytes().startswith(b"\x89PNG")
    assert code == 0 and {"rmsnorm", "rope", "attention", "wo", "w2", "cross_entropy", "sample"} <= {
        json.loads(line)["op"] for line in out.splitlines()
    }
    code, out, err = bench_cli("-m", tiny, "-p", 4, "--device", "cpu", "--profile")
    assert "the Triton kernels need a GPU" in err and "| product" in out
    assert code == 0 and out.count("overall efficiency") == 2 and "gaps between kernels" in out


def test_a_profile_knows_the_kernels():
    """The kernels that its table charges with a cost exist, and all attention kernels are charged."""
    everywhere = {name for module in (kernels, hopper, few_rows, sampling) for name in vars(module) if name.endswith("_kernel")}
    assert bench.KERNEL_OPS.keys() <= everywhere
    assert {name for name in everywhere if "attention" in name} <= bench.KERNEL_OPS.keys()
    kinds = {"_few_swiglu_kernel": "product", "_qkv_norm_kernel": "product", "_swiglu_kernel": "elementwise"}
    kinds |= {"_rmsnorm_kernel": "norm", "_add_received_kernel": "other", "aten::addmm": "product"}
    assert {name: bench.kind_of(name) for name in kinds} == kinds


def test_a_gguf_file_has_the_tensors_of_the_model(tmp_path):
    import gguf

    c = read_config_like(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=96, vocab_size=70)
    bench.write_gguf(tmp_path / "model.gguf", c, "bf16")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    layer = ["attn_k", "attn_norm", "attn_output", "attn_q", "attn_v", "ffn_down", "ffn_gate", "ffn_norm", "ffn_up"]
    names = [f"blk.{i}.{name}" for i in range(2) for name in layer] + ["output", "output_norm", "token_embd"]
    assert sorted(found) == sorted(f"{name}.weight" for name in names)
    assert found["blk.1.attn_k.weight"].shape.tolist() == [64, 32] and found["blk.1.attn_k.weight"].tensor_type.name == "BF16"


def test_bench_perplexity_from_the_command_line(bench_cli, tiny, tmp_path):
    (tmp_path / "text").write_text(TEXT * 3)
    code, out, _ = bench_cli(
        "-m", tiny, "--device", "cpu", "--perplexity", tmp_path / "text", "--against", "bf16", "-o", "json"
    )
    (row,) = json.loads(out)
    assert code == 0 and row["perplexity"] > 1 and row["mean_kl"] > 0 and 0 < row["standard_error"] < row["perplexity"]


def test_bench_says_that_a_saved_model_is_in_8_bits(bench_cli, tiny_saved, tmp_path):
    _, out, _ = bench_cli("-m", tiny_saved, *QUICK, "-o", "json", "--vs", "transformers")
    assert [(r["fp8"], r["backend"]) for r in json.loads(out)] == [("e4m3", "torch")] * 2
    (tmp_path / "text").write_text(TEXT)
    flags = ("-m", tiny_saved, "--device", "cpu", "--perplexity", tmp_path / "text", "-o", "json")
    assert json.loads(bench_cli(*flags)[1])[0]["fp8"] == "e4m3"
    code, _, err = bench_cli(*flags, "--against", "fp32")
    assert code == 1 and "--against needs the original" in err and err.count("\n") == 1


def test_bench_tells_the_limits_layer_by_layer(bench_cli, tiny, tmp_path):
    (tmp_path / "text").write_text("Once upon a time there was a cat.")
    code, out, err = bench_cli("-m", tiny, "--limits", tmp_path / "text", "--dtype", "fp32", "-c", 16, "-o", "json")
    rows, model = json.loads(out), load(tiny, dtype="fp32", device="cpu")
    ids = Tokenizer(tiny).encode("Once upon a time there was a cat.", bos=False)
    assert code == 0, err
    assert [row["layer"] for row in rows] == list(range(model.config.n_layers))
    inputs = [i for start in range(0, len(ids), 16) for i in [1, *ids[start : start + 15]]][: len(ids)]
    with torch.inference_mode():
        cache = KVCache(model)
        model.forward(torch.tensor(inputs[:16]), cache)
    assert rows[0]["x"] >= model.weights.embedding[inputs].abs().max().item()
    assert all(rows[i]["k"] >= cache.k[i][:, :16].abs().max().item() - 1e-5 for i in range(len(rows)))
    assert all(
        row["% of 65504"] == pytest.approx(100 * max(row[n] for n in ("x", "q", "k", "v", "q k", "h")) / 65504) for row in rows
    )


def test_bench_with_an_8_bit_cache(bench_cli, tiny):
    code, out, err = bench_cli("-m", tiny, *QUICK, "-o", "json", "--kv-fp8", "--fp8", "none,e4m3")
    assert (
        code == 0 and [(row["fp8"], row["kv"]) for row in json.loads(out)] == [("none", "e4m3")] * 2 + [("e4m3", "e4m3")] * 2
    ), err


def test_bench_uses_the_threads_that_suit_a_model(bench_cli, tiny):
    flags = ["-m", tiny, "-p", "4", "-n", "0", "-r", "1", "--device", "cpu", "-o", "json"]
    try:
        for given, name in (([], "CPU, 1 thread"), (["-t", "2"], "CPU, 2 threads")):
            torch.set_num_threads(2)
            assert [row["device"] for row in json.loads(bench_cli(*flags, *given)[1])] == [name]
    finally:
        torch.set_num_threads(1)


def test_bench_adds_what_is_given_again(bench_cli, tiny, tiny_saved):
    flags = ["-n", "0", "-r", "1", "--device", "cpu", "-o", "json", "-ngl", "9"]
    code, out, err = bench_cli("-m", tiny, "-m", tiny_saved, "-p", "4", "-p", "8,9", *flags)
    assert code == 0 and "-ngl: no effect here" in err
    tests = [(str(model), f"pp{n}") for model in (tiny, tiny_saved) for n in (4, 8, 9)]
    assert [(row["model"], row["test"]) for row in json.loads(out)] == tests


def test_bench_prints_each_row_when_it_is_done(bench_cli, tiny, capfd, monkeypatch):
    shown, original = [], bench.throughput

    def rows(args):
        for row in original(args):
            yield row
            shown.append(capfd.readouterr())

    monkeypatch.setattr(bench, "throughput", rows)
    monkeypatch.setattr(bench, "read_ceiling", lambda device: 1e5)  # a slow machine
    code, rest, err = bench_cli("-m", tiny, *QUICK)
    assert code == 0 and "pp4" in shown[0].out and "tg2" not in shown[0].out and shown[1].out.count("tg2") == 1 and rest == ""
    assert re.search(r"tiny\S*: this takes at least \d+ (s|minutes)", shown[0].err), shown


def test_digits_that_differ_are_shown():
    shown = {1.0: "1.00", 0.0: "0.00", 1.00071: "1.00071", 0.00037: "0.00037", 1.07: "1.070", 5.4712: "5.47", 0.9998: "0.99980"}
    shown |= {12345.6: "12,346", float("nan"): "nan", -0.5: "-0.50", 1e-30: "0.000000000", 7: "7", None: ""}
    for value, text in shown.items():
        assert bench.cell(value) == text, value


KERNEL_ROWS = [
    {"op": "wo", "shape": "T 1", "us": 10.0, "MB": 20.0, "GFLOP": 1.0, "% of ceiling": 50.0, "bound by": "memory"},
    {"op": "rmsnorm", "shape": "T 1", "us": 10.0, "MB": 10.0, "GFLOP": 1.0, "% of ceiling": 50.0, "bound by": "memory"},
    {"op": "wo", "shape": "T 9", "us": 100.0, "MB": 20.0, "GFLOP": 10.0, "% of ceiling": 50.0, "bound by": "arithmetic"},
    {"op": "w2", "shape": "T 9", "us": 50.0, "MB": 20.0, "GFLOP": 10.0, "% of ceiling": 50.0, "bound by": "arithmetic"},
]


def test_ceilings_follow_from_the_shares_of_kernels():
    reads, products = plot.ceilings(KERNEL_ROWS)
    assert reads == [pytest.approx(4e12)] and products == [pytest.approx(2e14), pytest.approx(4e14)]


def test_bench_draws_what_it_measured_and_what_was_recorded(bench_cli, tiny, tmp_path):
    code, out, err = bench_cli("-m", tiny, *QUICK, "-o", "jsonl", "--plot", tmp_path / "speed.svg")
    picture = (tmp_path / "speed.svg").read_text()
    assert (
        code == 0 and "tokens/s of generation, CPU" in picture and "tokens/s of prompts" in picture and "pp4, fp32" in picture
    )
    record, kernels = tmp_path / "record", "\n".join(map(json.dumps, KERNEL_ROWS))
    record.write_text(out + kernels)
    draw = ("--recorded", record, "--plot", tmp_path / "all.svg")
    assert bench_cli(*draw) == (0, "", "")
    whole = (tmp_path / "all.svg").read_bytes()
    assert bench_cli(*draw)[0] == 0 and (tmp_path / "all.svg").read_bytes() == whole, "a record gives one picture"
    assert b"operations per byte" in whole and b"rmsnorm" in whole and b"tg2, fp32" in whole
    broken = [out.replace("tokens_per_s", "x"), kernels.replace('"us": ', '"us": -')]
    for text in ("{", "[]", "null", '{"test": "tg2"}', "[" * 10**5, *broken):
        record.write_text(text)
        code, _, err = bench_cli(*draw)
        assert code == 1 and "not a row printed by bench.py -o jsonl" in err and err.count("\n") == 1, text[:100]
    record.write_text("")
    assert "there is nothing to draw" in bench_cli(*draw)[2]


def test_bench_refuses_flags_of_another_mode_and_looks_for_packages_first(bench_cli, tiny, monkeypatch):
    for wrong in (
        "--vs transformers --perplexity x",
        "--plot x.png --perplexity x",
        "--plot x.gif",
        "--stride 4",
        "--against fp32",
        "--against fp32 --limits x",
        "--perplexity x --dtype fp32,bf16",
        "--limits x --dtype fp32 --dtype bf16",
        "--kernels --fp8 none,e4m3",
        "--kernels -n 4",
        "--kernels -r 4",
        "--profile -p 4,5",
        "--profile -o json",
        "--kernels --profile",
        "--tune -p 4",
        "-m a -m b --kernels",
        "--recorded x",
        "--recorded x --plot x.png -m a",
    ):
        code, out, err = bench_cli(*wrong.split())
        assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1, (wrong, err)
    monkeypatch.setattr(bench, "throughput", fails(AssertionError("measured")))
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    for flags, text in ((["--vs", "transformers"], "--vs transformers needs a package"), (["--plot", "x.png"], "matplotlib")):
        code, out, err = bench_cli("-m", tiny, *QUICK, *flags)
        assert code == 1 and out == "" and text in err and err.count("\n") == 1, err


def test_bench_passes_of_several_tokens(bench_cli, tiny):
    code, out, _ = bench_cli("-m", tiny, "--passes", "2,5", "--dtype", "fp32", "-d", 7, "--output", "csv", "--device", "cpu")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and [row["tokens"] for row in rows] == ["1", "2", "5"] and float(rows[0]["ratio"]) == 1
    assert bench_cli("-m", tiny, "--passes", "0")[0] == 2


def test_bench_errors_are_one_line(bench_cli, tiny, tmp_path):
    (tmp_path / "bad").write_bytes(b"ab\xff")
    for arguments, code, text in (
        (["-m", "random:9b"], 1, "the shapes are 1.1b, 7b"),
        (["-m", "nowhere"], 1, "no such folder"),
        (["-p", "x"], 2, "argument -p"),
        (["-p", "0", "-n", "0"], 2, "nothing to measure"),
        (["-p", "0", "--profile"], 2, "nothing to measure"),
        (["-m", tiny, "--perplexity", tmp_path / "bad"], 1, "not UTF-8: byte 0xff at offset 2"),
        (["-m", tiny, "--perplexity", tmp_path / "none"], 1, "none"),
        (["-m", "random:tales", "--perplexity", tmp_path / "bad"], 1, "not UTF-8"),
        (["--perplexity", "x", "--stride", "600"], 2, "skips text"),
        (["-m", tiny, "--tune", "--device", "cpu"], 1, "on a GPU"),
    ):
        seen, out, err = bench_cli(*arguments)
        assert seen == code and out == "" and err.startswith("error: ") and err.count("\n") == 1 and text in err, err


# ---- the embedded model


def test_embedded_model_says_what_it_said():
    """Greedy text in fp32. A change here means that the weights or the arithmetic have changed."""
    model, tokenizer = load(run.DEFAULT_MODEL, dtype="fp32", device="cpu"), Tokenizer(run.DEFAULT_MODEL)
    for prompt, text in GOLDENS.items():
        ids = tokenizer.encode(prompt)
        assert tokenizer.decode(generate(model, ids, n=24, sampling=Sampling(temp=0))) == text, prompt


def test_train_makes_a_model_that_runs(tmp_path, cli):
    tale = "Once upon a time there was a fox who lived in a wood. He met a crow, and the crow sang.\n" * 6
    for part in ("train", "held_out"):
        (tmp_path / part).mkdir()
        text = f"The Fox and the Crow\n{tale}The King of the Wood\n{tale.replace('fox', 'king')}"
        (tmp_path / part / "book.txt").write_text(text)
    small = "--vocab 320 --dim 128 --layers 1 --context 64 --batch 2 --epochs 2"
    teacher = "--teachers 1 --teacher-dim 64 --teacher-layers 1 --teacher-epochs 1"
    command = [sys.executable, "models/tales/train.py", "--corpus", tmp_path, "--out", tmp_path / "out", "--device", "cpu"]
    trained = subprocess.run(
        [*map(str, command), *small.split(), *teacher.split()],
        cwd=HERE, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert trained.returncode == 0 and "bits per byte" in trained.stdout, trained.stderr
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json"
    ]  # fmt: skip
    code, out, _ = cli("-m", tmp_path / "out", "--prompt", "Once", "-n", 8, "--dtype", "fp32", "--ignore-eos")
    assert code == 0 and out.startswith("Once") and len(out) > 8


# ---- compilation in the background: these tests are last, so that it uses processors that the others leave idle


@pytest.fixture(scope="session", autouse=True)
def compiled(request):
    """-> the finished process of a call of compile_kernels or compile_hopper. The calls that tests will ask for are started at
    once and run beside the other tests; with several pytest processes, each starts a call when a test asks for it."""
    begun, children = {}, []
    pool = ThreadPoolExecutor(max((os.cpu_count() or 1) - 1, 1))

    def compile(call: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"COMPILE_FOR": "90", "CUDA_VISIBLE_DEVICES": ""}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-c", f"import os, test_all; os.nice(5); test_all.{call}"]
        children.append(subprocess.Popen(command, cwd=HERE, env=environment, stdout=-1, stderr=-1, text=True))
        out, err = children[-1].communicate()
        return subprocess.CompletedProcess(command, children[-1].returncode, out, err)

    def result(call: str) -> subprocess.CompletedProcess:
        return begin(call).result()

    def begin(call: str) -> Future:
        begun[call] = begun.get(call) or pool.submit(compile, call)
        return begun[call]

    if "PYTEST_XDIST_WORKER" not in os.environ:
        for item in request.session.items:
            if "call" in getattr(item, "callspec", SimpleNamespace(params=())).params:
                begin(item.callspec.params["call"])
    yield result
    pool.shutdown(wait=False, cancel_futures=True)
    for child in children:
        child.kill()


@needs_triton
@pytest.mark.parametrize("call", [f"compile_hopper({dtype!r})" for dtype in ("float16", "bfloat16")])
def test_the_kernel_for_hopper_compiles_ahead_of_time(compiled, call):
    done = compiled(call)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
@pytest.mark.parametrize("call", [f"compile_kernels({arch})" for arch in ARCHITECTURES])
def test_kernels_compile_ahead_of_time(compiled, call):
    done = compiled(call)
    assert done.returncode == 0, done.stderr[-3000:]
    files = ("kernels.py", "few_rows.py", "sampling.py", "fp8.py", "training.py", "parallel.py", "speculation.py")
    source = "".join((HERE / file).read_text() for file in files)
    every = set(re.findall(r"^def (_\w+_kernel)\(", source, re.MULTILINE))
    assert every == set(done.stdout.split(": ")[1].split()), "a kernel was not compiled"


if __name__ == "__main__":  # started by the tests of several ranks: "forks", "gpus" or "card"
    argument, mode = sys.argv[1:]
    if mode == "gpus":
        check_gpus(Path(argument))
        parallel.group().leave(0)
    if mode == "card":
        stress_one_card(int(argument))
    if mode == "forks":
        sys.exit(fork_ranks(Path(argument), 2) + fork_ranks(Path(argument), 4))
