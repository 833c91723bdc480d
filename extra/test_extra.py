"""The tests of extra/, which `make test` runs with those of test_all.py; alone:

python -m pytest extra/test_extra.py"""

import codecs
import contextlib
import copy as copy_module
import hashlib
import http.server
import io
import itertools
import json
import math
import os
import pickle
import pty
import random
import re
import resource
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import warnings
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gguf
import huggingface_hub
import hypothesis
import numpy
import pytest
import tokenizers
import torch
import transformers
from huggingface_hub import save_torch_state_dict
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

# first, since it sets TRITON_INTERPRET; names that nothing here calls are fixtures
from test_all import (
    ARCHITECTURES,
    DEVICE,
    FAMILIES,
    FILE_FORMATS,
    GREEDY,
    HERE,
    INF,
    MOST_PROBABLE,
    NAN,
    NORM,
    ONE_UNIT,
    ON_GPU,
    OWN,
    PATIENCE,
    RAMP,
    SEED,
    assert_close,
    assert_refused,
    changed_json,
    check_experts,
    cli,
    conversation,
    copy,
    decode_in_graphs,
    dense,
    edit,
    encode_after,
    encoded,
    equals_reference,
    examples,
    expert_arguments,
    experts_errors,
    fails,
    free_port,
    greedy,
    grouped_folder,
    guarded,
    hugging_face_model,
    in_shell,
    int4_matrix,
    interpreter,
    interrupted_at,
    logits_of,
    needs_gpu,
    nmse,
    objects,
    op_arguments,
    oracle,
    other_model,
    program,
    randn,
    read_config_like,
    read_gguf,
    seeded,
    spoil_config,
    spoil_tensors,
    state_of_experts,
    tiny,
    tiny_model,
    tiny_saved,
    tiny_session,
    train_byte_pairs,
    write,
)

import attention
from loading import checkpoint
import fp8
import kernels
import products
import run
from loading.checkpoint import Loader, load, read_config
from dev.checkpoints import sentencepiece_metadata, write_gguf
from talk import cli as cli_module
from ranks import exchange as exchange_module
from loading import place
from loading import reading
from loading import quantised
from loading import sources
from cards import cpu
from bits import int4
from bits import others
import experts
import launch
from loading import gguf as ggml
from cards import sizes as launch_sizes
from talk.chat import Chat, Output, Printer
from talk.chat import columns as columns_of
from loading.templates import TEMPLATES, find_template
from loading.place import check_groups, check_memory
from loading.hub import local_checkpoint, pick_gguf
from bits.int4 import INT4
from loading.layouts import formats_as_stored
from loading.names import formats_of, layer_tensors, model_tensors, tensor_in
from ranks.processes import Ranks, share
from loading.reading import read
from loading.save import save
from speculation.proposals import Draft, Lookup, Pacer, Speculation
from loading.sources import tensors_of
from loading.tensors import ALL
from formats import Matrix
from fp8 import E4M3, E4M3_NATIVE, E5M2
from kernels import FORMATS, PRODUCTS
from model import PROMPT_CHUNK, Llama, State, generate, rope_table
from sampling import Sampling
from session import Conversation, Session, dropped_part
from tokenizer import Tokenizer

# padding, and values not finite on purpose
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


# ---- helpers


DOWN = "model.layers.1.mlp.down_proj.weight"
TABLES = "model.embed_tokens.weight", "lm_head.weight"


def assert_equals_transformers(folder: Path, theirs):
    """Returns our model of a folder, in fp32 on the CPU."""
    ours, ids = load(folder, dtype="fp32", device="cpu"), torch.randint(250, (100,)).tolist()
    assert_close(logits_of(ours, ids), oracle(theirs, ids))
    return ours


def both(*spoils):
    return lambda folder: [spoil(folder) for spoil in spoils]


def put(name: str, make):
    """Put a tensor in place of this one, made of it."""
    return spoil_tensors(lambda t: t.update({name: make(t[name])}))


def set_one(name: str, value: float):
    return spoil_tensors(lambda t: t[name].view(-1)[7:8].fill_(value))


@pytest.fixture
def hears_signals():
    """SIGTERM and SIGHUP as a program usually has them, even where the tests' own parent ignores
    them (nohup)."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield numbers
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)


# ---- cpu.py


@pytest.mark.parametrize("dtype, format, small", [
    (torch.float32, None, False), (torch.bfloat16, None, False), (torch.bfloat16, None, True),
    (torch.bfloat16, INT4, False),
])  # fmt: skip
def test_matrices_in_a_cpu_layout_are_the_same_matrices(dtype, format, small, monkeypatch):
    """As products on a CPU read them: fp32 column by column, bf16 in oneDNN's layout, a small
    matrix in both, one in 4 bits in torch's own."""
    monkeypatch.setattr(cpu, "SMALL", 2 * 320 * 256 if small else 0)
    w = Matrix(torch.randn(320, 256).to(dtype), bias=torch.randn(320).to(dtype))
    (w,) = encoded([w], format)
    laid_out = cpu.in_cpu_layout(w, "torch", dtype)
    assert torch.equal(laid_out.dense(), w.dense())
    assert laid_out.shape == w.shape == (320, 256) and laid_out.nbytes == w.nbytes
    assert cpu.in_cpu_layout(w, "triton", dtype) is w
    if dtype == torch.float32:
        assert laid_out.data.stride() == (1, 320)
    else:
        assert cpu.in_cpu_layout(w, "torch", torch.float32) is w
    if dtype == torch.bfloat16:
        assert bool(laid_out.cpu_layout) == bool(format or small and cpu.multiplies_bf16())
    for T in (9, 1):
        x = torch.randn(T, 256).to(dtype)
        exact = x.double() @ w.dense().double().t() + w.bias
        assert nmse(kernels.linear_ref(x, laid_out), exact) < (2 if format else 1) * ONE_UNIT[dtype]
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize("format", [None, E4M3, INT4])
def test_prompts_need_few_onednn_kernels(format, monkeypatch):
    """oneDNN keeps what it compiles for each number of rows, so a chat's memory would grow with
    each new length, whether a matrix is in its layout or decoded for each prompt."""
    sizes = set()
    (w,) = encoded([Matrix(torch.randn(8, 32, dtype=torch.bfloat16))], format)
    exact = w.dense().float().t()
    w = w if format else Matrix(w.data.to_mkldnn())

    def product(x, weights, *rest):
        sizes.add(len(x))
        weights = weights.to_dense() if weights.is_mkldnn else weights
        return (x.float() @ weights.float().t()).to(x.dtype)

    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", product)
    monkeypatch.setattr(torch.nn.functional, "linear", product)
    for T in range(1, PROMPT_CHUNK["cpu"] + 1):
        x = torch.randn(T, 32, dtype=torch.bfloat16)
        assert nmse(kernels.linear_ref(x, w), x.float() @ exact) < 2 * ONE_UNIT[torch.bfloat16]
    powers, eighths = {1, 2, 4, 8, 16, 32}, {48, 64, 80, 96, 112, 128}
    assert sizes - {1} == (powers | eighths | {*range(160, 257, 32), *range(320, 513, 64)}) - {1}


# ---- int4.py


def test_all_4_bit_codes_scales_and_zero_points():
    """Each of them is what its formula says, alone in its place."""
    scales = torch.arange(0xF0, dtype=torch.int32)
    exponent, mantissa = scales >> 4, scales & 15
    values = (1 + mantissa / 16) * 2.0 ** (exponent - 23)
    assert torch.equal(int4._scales(scales), values)
    assert torch.equal(int4._scale_codes(values), scales)
    column = torch.arange(32, dtype=torch.int32)
    for code, zero in itertools.product(range(16), range(0, 256, 15)):
        # a row for each column that has the code, the others 0
        halves = torch.zeros(32, 8, dtype=torch.int32)
        halves[column, column % 8] = code << 4 * (column // 8)
        words = halves.to(torch.int16).view(torch.int32)
        groups = torch.tensor([[0xEF << 8 | zero]]).to(torch.int16).expand(32, 1)
        decoded = INT4.decoded((words, groups, torch.full((32, 1), 2.0)))
        assert torch.equal(decoded, 2 * values[-1] * (torch.eye(32) * code - zero / 16))


@pytest.mark.parametrize("spread, bound", [
    ("normal", 5.5e-3), ("uniform", 3.5e-3), ("far from zero", 1e-3), ("close together", 4e-4),
])  # fmt: skip
def test_4_bits_lose_little(spread, bound):
    """As little as Q4_K with a search for the scale: of a normal matrix 5.2e-3 of its square."""
    w = torch.rand(64, 1024) - 0.5 if spread == "uniform" else torch.randn(64, 1024)
    w = {"far from zero": w + 3, "close together": 1 + 0.01 * w}.get(spread, w)
    w = w * torch.logspace(-20, 20, 64)[:, None]
    tensors = INT4.encode(w)
    INT4.check(tensors)
    with pytest.raises(ValueError, match="scales that are not positive and finite"):
        INT4.check((tensors[0], tensors[1] | 0xF0 << 8, tensors[2]))
    assert 8 * sum(t.nbytes for t in tensors) == (4.5 * 1024 + 32) * 64, "bits"
    lost = (INT4.decoded(tensors) - w).double().square().mean(1) / w.double().square().mean(1)
    assert lost.mean() < bound, lost.mean()
    for rows in (torch.zeros(2, 64), torch.full((2, 64), 3.0)):
        INT4.check(tensors := INT4.encode(rows))
        assert torch.allclose(INT4.decoded(tensors), rows, rtol=1e-3)


@pytest.mark.parametrize("dtype, T", [
    *itertools.product((torch.float16, torch.bfloat16), (1, 3, 16, 20)), (torch.float32, 1),
    (torch.float32, 20),
], ids=str)  # fmt: skip
def test_products_with_4_bit_matrices(dtype, T, monkeypatch):
    """Several tiles of rows for each program, the last one with fewer; rows of one block of
    columns, of several, of one that ends early, and of an odd number of groups."""
    monkeypatch.setattr(
        products, "stream_sizes", lambda *_: launch_sizes.StreamSizes(4, 2048, 1, 3)
    )
    monkeypatch.setattr(products, "processors", lambda device: 3)
    state = SimpleNamespace(norm_eps=1e-5)
    # weights are decoded to halves; a token's sums are halves, and its norm is not as large as
    # fit_norm has it
    limit = 1e-6 + ONE_UNIT[dtype] * 8
    if T == 1:
        limit = 2e-4 if dtype == torch.bfloat16 else 5e-5
    for N, K in ((48, 96), (42, 1216), (20, 4096), (26, 4160)):
        w, x = int4_matrix(N, K), randn(T, K, dtype=dtype)
        norm, out = torch.rand(K, device=DEVICE).to(dtype) + 0.5, torch.empty(T, N, device=DEVICE)
        size = dense(w).data.square().mean(1).sqrt()  # rows count alike
        kernels.rmsnorm_linear(x, norm, w, state, out, accumulate="fp32")
        normed = kernels.rmsnorm_ref(x.float(), norm.float(), 1e-5)
        assert nmse(out / size, normed @ (dense(w).data / size[:, None]).t()) < limit, (N, K)


def test_heads_of_a_4_bit_matrix(monkeypatch):
    """Several programs share a head, each with fewer rows than its vectors hold."""
    monkeypatch.setattr(
        products, "stream_sizes", lambda *_: launch_sizes.StreamSizes(2, 2048, 8, 3)
    )
    monkeypatch.setattr(products, "processors", lambda device: 3)
    N, C, D, dtype = 5 * 48, 320, 48, torch.float16

    def draw(has_norm: bool, has_bias: bool) -> tuple:
        qk_norm = randn(2, D, dtype=dtype) if has_norm else None
        bias = randn(N, dtype=dtype) if has_bias else None
        arguments = op_arguments("rmsnorm_qkv_rope", dtype, (3, 1, D), 1, 4, qk_norm=qk_norm)
        _, layer, state = arguments[0]
        layer.attention_norm = randn(C, dtype=dtype)
        (layer.wqkv,) = encoded([Matrix(torch.randn(N, C, device=DEVICE), bias=bias)], INT4)
        return randn(1, C, dtype=dtype), layer, state

    # where few of a norm's weights are large, errors vary between draws
    for extra in ((False, False), (False, True), (True, False)):
        draws = [draw(*extra) for _ in range(64 if ON_GPU else 1)]
        equals_reference("rmsnorm_qkv_rope", draws, ("2.k", "2.v"), 4 * ONE_UNIT[dtype])


# ---- experts.py


@pytest.mark.parametrize("T", [1, 5, 17])
@pytest.mark.parametrize("dtype, form", [
    (torch.float32, None), (torch.float16, None), (torch.bfloat16, None), (torch.float16, E4M3),
    (torch.float16, E5M2), (torch.float16, INT4), (torch.float32, INT4),
], ids=lambda value: getattr(value, "name", str(value)))  # fmt: skip
def test_experts_equal_their_reference(dtype, form, T, guarded):
    """One expert is chosen by every token, and one by none; tiles do not divide hidden sizes."""
    shapes = [(7, 3, 96, 64), (5, 2, 256, 320)]
    shapes += [(4, 3, 64, 1024)] if form is INT4 and T == 1 else []  # blocks of several experts
    shapes += [(6, 1, 40, 52)] if form is None else []
    for E, k, C, F in shapes:
        x, layer, state = expert_arguments(T, E, k, C, F, dtype, form)
        x[:, 0] = 3.0
        layer.router.data[1, 0] = 30.0
        layer.router.data[2, 0] = -30.0
        check_experts((x, layer, state), dtype, form)
    guarded()


@pytest.mark.parametrize(
    "sizes", [(16, 32, 16, 4, 1), (32, 64, 128, 2, 3), (128, 16, 32, 4, 2)], ids=str
)
def test_grouped_products_do_not_depend_on_launch_sizes(sizes, monkeypatch):
    monkeypatch.setattr(experts, "grouped_sizes", lambda *_: launch_sizes.GroupedSizes(*sizes))
    check_experts(expert_arguments(40, 5, 2, 72, 88, torch.float16), torch.float16, None)


@needs_gpu
@pytest.mark.parametrize("form", [E4M3, INT4], ids=lambda form: form.name)
def test_8_bit_tensor_cores_multiply_a_prompt_with_experts(form):
    """Activations, and the weights of INT4, are rounded to E4M3: see the test of dense products."""
    if E4M3.on(DEVICE) is not E4M3_NATIVE:
        pytest.skip("this GPU has none")
    arguments = expert_arguments(80, 7, 3, 256, 320, torch.float16, form)
    errors = experts_errors(arguments, torch.float16, "auto")
    assert all(2.0**-14 < error < 2.0**-8 for error in errors), errors


def test_many_slots_are_sorted():
    """More than a program takes at once."""
    T, E, k = 300, 20, 8
    x, layer, state = expert_arguments(T, E, k, 16, 16)
    routes = kernels.fused.route(x, layer, state)
    ids = routes.ids.flatten()
    assert torch.equal(routes.order, ids.sort(stable=True).indices.int())
    assert torch.equal(routes.counts, ids.bincount(minlength=E).int())


def test_norm_that_a_format_moves_and_the_router(monkeypatch):
    """What fit_norm takes out of ffn_norm for w13, the router's logits get back."""
    x, layer, state = expert_arguments(3, 5, 2, 64, 64, format=E4M3)
    before = kernels.reference.route(x, layer, state)
    layer.router_gain = products.fit_norm(layer.ffn_norm, layer.w13)
    assert layer.router_gain < 1
    for ops, rows in itertools.product((kernels.reference, kernels.fused), (3, 1)):
        after = ops.route(x[:rows].contiguous(), layer, state)
        assert torch.equal(after.ids, before.ids[:rows])
        assert torch.allclose(after.weights, before.weights[:rows], rtol=1e-3)


def exchanges_of(ranks: list[list[Matrix]]) -> list[exchange_module.Exchange]:
    """Of ranks in one process, each with its own memory for its matrices."""
    size = len(ranks)

    def shared(*shape: int, dtype: torch.dtype) -> list[exchange_module.Shared]:
        memory = [torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in ranks]
        return [exchange_module.Shared(own, [t.data_ptr() for t in memory]) for own in memory]

    entries = shared(3, size, 16 * 72, dtype=torch.int64)
    terms = shared(2, 20_000, dtype=torch.float16)
    flags = shared(2, size, dtype=torch.int32)
    of_ranks = enumerate(zip(ranks, entries, terms, flags))
    return [
        exchange_module.Exchange(matrices, rank, *memory) for rank, (matrices, *memory) in of_ranks
    ]


def test_exchange_of_experts():
    """Two ranks in one process, with a share of each expert's hidden_dim."""
    E, k, C, F, dtype = 5, 2, 72, 48, torch.float16
    ids = torch.tensor([[3, 1]], dtype=torch.int32, device=DEVICE)
    routes = experts.Routes(ids, torch.ones(1, k, device=DEVICE))
    parts = [Matrix(randn(E * C, F, dtype=dtype, scale=0.1)) for _ in range(2)]
    h = [randn(1, k, F, dtype=dtype) for _ in range(2)]
    residual = randn(1, C, dtype=dtype)
    exact = residual.float()
    for part, mine in zip(parts, h):
        kernels.linear_add_ref(mine.float(), dense(part), exact, routes)
    exchanges = exchanges_of([[part] for part in parts])
    stack = experts.slots_added(routes, residual)
    for exchange, part, mine in zip(exchanges, parts, h):
        exchange.send(products.Product("experts_linear_add", mine[0], part), stack)
    for exchange, part in zip(exchanges, parts):
        ours = exchange.add_received(part, residual.clone())
        assert nmse(ours, exact) < ONE_UNIT[dtype]
    term = torch.full((1, C), NAN, dtype=dtype, device=DEVICE)
    kernels.fused.linear_store(h[0], parts[0], term, routes)
    ours = kernels.reference.linear_store(h[0].float(), dense(parts[0]), term.float(), routes)
    assert nmse(term, ours) < ONE_UNIT[dtype]


def routes_of(logits: torch.Tensor, k: int, ops=kernels.fused, norm_topk=True):
    """What a router picks whose logits, for T tokens, are these up to a factor."""
    T, E = logits.shape
    layer = SimpleNamespace(
        ffn_norm=torch.ones(T, device=DEVICE),
        router=Matrix((logits.t() / T**0.5).contiguous().to(DEVICE)),
        router_gain=1.0,
    )
    return ops.route(torch.eye(T, device=DEVICE), layer, state_of_experts(k, norm_topk, eps=0.0))


@pytest.mark.parametrize("ops", [kernels.reference, kernels.fused], ids=["torch", "triton"])
@pytest.mark.parametrize("T", [1, 3, 20])
def test_experts_that_tie_or_are_not_finite(ops, T):
    """One of the tokens meets these logits, the others random ones."""
    cases = {
        (1, 1, 1, 1, 1): (0, 1, 2),
        (0, 2, 1, 2, 2): (1, 3, 4),
        (0, 2, 1, 2, 1): (1, 3, 2),
        (NAN,) * 5: (0, 1, 2),
    }
    if T == 1:  # 0 * NaN would be NaN for the other tokens, too
        cases[(-1, NAN, -2, NAN, -3)] = (0, 2, 4)
        cases[(NAN, NAN, NAN, 5, NAN)] = (3, 0, 1)
    for (logits, expected), norm_topk in itertools.product(cases.items(), (True, False)):
        rows = torch.randn(T, 5)
        rows[T // 2] = torch.tensor(logits)
        if all(map(math.isnan, logits)):
            rows *= NAN
        routes = routes_of(rows, 3, ops, norm_topk)
        assert tuple(routes.ids[T // 2].tolist()) == expected
        shares = rows[T // 2].nan_to_num(-INF).softmax(0)[list(expected)]
        if norm_topk:
            shares /= shares.sum()
        assert routes.weights[T // 2].cpu().allclose(shares, rtol=1e-3, equal_nan=True), logits


# ---- from headers.py to layouts.py: layouts, and what lies in files


def to_bin(folder: Path) -> None:
    """With gaps in the strides, tensors turned and a parameter, all of which torch.save keeps."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: torch.stack((t, t), -1)[..., 1] for name, t in tensors.items()}
    for name in [name for name in tensors if "layers.1." in name and "down_proj" in name]:
        tensors[name] = tensors[name].t().contiguous().t()
    tensors[NORM] = torch.nn.Parameter(tensors[NORM])
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def to_shards(folder: Path, suffix: str) -> None:
    """In two files, of which the one that comes first in the index is the last by its name."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    # or a little more, since tensors stay whole
    half = sum(t.nbytes for t in tensors.values()) * 2 // 3
    in_library = dict(max_shard_size=half, safe_serialization=suffix == "safetensors")
    save_torch_state_dict(tensors, folder, **in_library)
    with changed_json(next(folder.glob("*.index.json"))) as index:
        index["weight_map"] = dict(reversed(index["weight_map"].items()))


META_NAMES = {  # how Meta calls what is named so in Hugging Face's layout, and how it cuts it
    "q_proj": ("wq", 0), "k_proj": ("wk", 0), "v_proj": ("wv", 0), "o_proj": ("wo", 1),
    "gate_proj": ("w1", 0), "up_proj": ("w3", 0), "down_proj": ("w2", 1),
    "input_layernorm": ("attention_norm", None), "post_attention_layernorm": ("ffn_norm", None),
    "norm": ("norm", None), "embed_tokens": ("tok_embeddings", 1), "lm_head": ("output", 0),
}  # fmt: skip


def to_meta(folder: Path, shards: int) -> None:
    """By Meta's description: interleaved q and k, tensors split by column or by row."""
    config = read_config(folder)
    half = config.head_dim // 2
    parts: list[dict] = [{} for _ in range(shards)]
    for name, tensor in load_file(folder / "model.safetensors").items():
        *place, theirs, _ = name.split(".")
        if theirs in ("q_proj", "k_proj"):
            heads = tensor.unflatten(0, (-1, config.head_dim))
            tensor = torch.stack((heads[:, :half], heads[:, half:]), 2).reshape(tensor.shape)
        metas, axis = META_NAMES[theirs]
        blocks = {"model": "", "self_attn": "attention.", "mlp": "feed_forward."}
        prefix = "".join(blocks.get(word, f"{word}.") for word in place)
        for i, part in enumerate(parts):
            cut = tensor if axis is None else tensor.chunk(shards, axis)[i]
            part[f"{prefix}{metas}.weight"] = cut.clone()
    for i, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{i:02}.pth")
    fields = ("dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "rope_theta")
    params = {name: getattr(config, name) for name in fields}
    params |= dict(vocab_size=-1, multiple_of=16, ffn_dim_multiplier=0.6)  # hidden_dim 112
    (folder / "params.json").write_text(json.dumps(params))
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()


LAYOUTS = {
    "bin": to_bin,
    "safetensors shards": partial(to_shards, suffix="safetensors"),
    "bin shards": partial(to_shards, suffix="bin"),
    "meta": partial(to_meta, shards=1),
    "meta, 2 shards": partial(to_meta, shards=2),
}
SHARD = "model-00001-of-00002.safetensors"


def other_weights(folder: Path) -> None:
    """Other values under all names of shards, with an index: left over from another model."""
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t + 1 for name, t in tensors.items()}, folder / SHARD, {"format": "pt"})
    names = dict.fromkeys(tensors, SHARD)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    to_bin(Path(shutil.copytree(folder, folder / "sub")))
    (folder / "sub/pytorch_model.bin").rename(folder / "pytorch_model.bin")


def twice(folder: Path) -> None:
    """A tensor is also in the shard that the index does not name; names begin with "./"."""
    to_shards(folder, "safetensors")
    first, second = sorted(folder.glob("model-*.safetensors"))
    (name, tensor), *_ = load_file(first).items()
    save_file(load_file(second) | {name: tensor + 1}, second, {"format": "pt"})
    with changed_json(folder / INDEX) as index:
        index["weight_map"] = {name: f"./{file}" for name, file in index["weight_map"].items()}


def with_tensors(**values):
    """Beside the model's, by the ends of their names."""
    prefix = "model.layers.0.self_attn."
    more = {prefix + name.replace("__", "."): value for name, value in values.items()}
    return spoil_tensors(lambda tensors: tensors.update(more))


def as_links(folder: Path) -> None:
    """To another folder, which holds the files by other names, as the hub's cache does."""
    to_shards(folder, "bin")
    blobs = folder.with_name(f"{folder.name}-blobs")
    blobs.mkdir()
    for i, file in enumerate([*folder.glob("*.*")]):
        file.rename(blobs / str(i))
        file.symlink_to(blobs / str(i))


def config_beside_params(folder: Path) -> None:
    """The weights say which of the two is meant."""
    config = (folder / "config.json").read_bytes()
    to_meta(folder, 1)
    (folder / "config.json").write_bytes(config)


def params_beside_config(folder: Path) -> None:
    original = shutil.copy(folder / "model.safetensors", folder / "x")
    config_beside_params(folder)
    Path(original).rename(folder / "model.safetensors")


FILES = LAYOUTS | {  # what transformers reads as the same model, or Meta's programs
    "a left-over index and a .bin": other_weights,
    "an index whose shards are gone": both(other_weights, lambda f: (f / SHARD).unlink()),
    "a tensor twice": twice,
    "caches and masks": with_tensors(
        rotary_emb__cos_cached=torch.ones(9, 8), rotary_emb__inv_freq=torch.ones(8),
        bias=torch.ones(4, 4).bool(), masked_bias=torch.tensor(-1e4),
    ),
    "biases of zeros": both(
        with_tensors(o_proj__bias=torch.zeros(64)), spoil_config(mlp_bias=True)
    ),
    "links": as_links,
    "config.json beside Meta's": config_beside_params,
    "params.json beside Hugging Face's": params_beside_config,
}  # fmt: skip


@pytest.mark.parametrize("how", FILES)
def test_layouts_and_files_beside_others_equal_transformers(tmp_path, how):
    theirs = hugging_face_model(**FAMILIES["gqa"])
    theirs.save_pretrained(tmp_path)
    FILES[how](tmp_path)
    assert_equals_transformers(tmp_path, theirs)


@pytest.mark.parametrize("family, layout", [
    ("gqa", "safetensors"), ("gqa", "bin"), ("gqa", "meta, 2 shards"), ("gqa", "saved"),
    ("qwen 3 moe", "safetensors"), ("qwen 3 moe", "bin"), ("qwen 3 moe", "saved"),
])  # fmt: skip
def test_tensors_are_read_piece_by_piece(copy, monkeypatch, family, layout):
    """A few rows at a time, and several of these together, they are what they are as a whole; also
    by ranks, each of which has its share of every expert."""
    hugging_face_model(read_config(copy).vocab_size, **FAMILIES[family]).save_pretrained(copy)
    form = None
    if layout == "saved":
        form = E4M3
        copy = save(copy, copy.parent / "saved", format="e4m3", device="cpu").parent
    elif layout != "safetensors":
        LAYOUTS[layout](copy)
    opened = SimpleNamespace(checkpoint=checkpoint.Checkpoint(copy))
    opened.config = opened.checkpoint.config
    whole = loaded(opened, form)
    monkeypatch.setattr(quantised, "AT_ONCE", 900)
    monkeypatch.setattr(reading, "TOGETHER", 9000)
    pieces = loaded(opened, form)
    for t in model_tensors(opened.config):
        stored = [tensor_in(weights, t) for weights in (whole, pieces)]
        if isinstance(stored[0], Matrix):
            stored = [matrix.dense() for matrix in stored]
        assert torch.equal(*stored), t.name
    assert_two_ranks_have(opened, whole.layers[1], form)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("head", ["same", "other", "alone"])
def test_tied_embeddings_are_what_the_tensors_say(tmp_path, head, suffix):
    theirs = hugging_face_model(**FAMILIES["mqa, tied"])
    theirs.save_pretrained(tmp_path)

    def put_head(tensors: dict) -> None:
        table = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = table.flip(0) if head == "other" else table.clone()
        if head == "alone":
            del tensors["model.embed_tokens.weight"]

    spoil_tensors(put_head)(tmp_path)
    if suffix == "bin":
        to_bin(tmp_path)
    theirs = type(theirs).from_pretrained(tmp_path, dtype=torch.float32)
    ours = assert_equals_transformers(tmp_path, theirs)
    assert ours.config.tie_embeddings == (head != "other")


@pytest.mark.parametrize("layout", [None, "bin"])
@pytest.mark.parametrize("how", ["replaced", "cut"])
def test_weights_that_change_while_they_are_read(copy, layout, how):
    LAYOUTS.get(layout, lambda folder: None)(copy)
    opened = checkpoint.Checkpoint(copy)
    file = sources.weight_files(copy).files[0]
    if how == "cut":
        os.truncate(file, 9999)
    else:
        os.replace(shutil.copy(file, copy / "new"), file)
    with pytest.raises(OSError, match=f"{file.name} was (replaced|cut short) while it was being"):
        load(opened, device="cpu")


# ---- config.py and families.py: what a configuration says


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
NEWER, OLDER = YARN | {"rope_theta": 1e4}, {"type": "yarn"} | YARN
OLDER.pop("rope_type")
ROPES = [  # fields of a config.json, in all places where they have been
    dict(rope_scaling=OLDER, rope_theta=1e4),
    dict(rope_scaling=OLDER, rope_theta=1e4, rope_parameters=NEWER),
    dict(rope_parameters=NEWER, rope_scaling=OLDER | {"beta_fast": None}),
    dict(rope_parameters=NEWER, rope_theta=5e5),
    dict(rope_scaling=dict(type="yarn", factor=4.0), rope_theta=1e4,
         original_max_position_embeddings=64),
    dict(rope_scaling=OLDER | {"original_max_position_embeddings": 9}, rope_theta=1e4,
         original_max_position_embeddings=64),
    dict(rope_scaling=dict(type="linear", factor=4.0), rope_theta=1e4),
    dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)),
    dict(rope_parameters=RAMP),
    dict(rope_theta=5e5), {},
    # ramps within the frequencies (that of 2000 starts elsewhere with 31 turns as beta_fast) and
    # beyond them; scales
    *(dict(rope_parameters=NEWER | {"original_max_position_embeddings": length})
      for length in (2000, 1 << 17)),
    *(dict(rope_parameters=NEWER | more) for more in (
        dict(original_max_position_embeddings=32, factor=8.0, beta_fast=16.0, beta_slow=2.0),
        dict(factor=2.0, rope_theta=100.0, attention_factor=1.3), dict(mscale=0.7),
    )),
]  # fmt: skip


@pytest.mark.parametrize("fields", ROPES, ids=str)
def test_yarn_and_config_places_of_rope_equal_transformers(copy, small_gguf, fields):
    """And the fields of a GGUF, for what it can say."""
    edit(copy / "config.json", **dict(rope_parameters=None) | fields)
    theirs = transformers.AutoConfig.from_pretrained(copy)
    kind = theirs.rope_parameters["rope_type"]
    freqs = theirs.rope_parameters["rope_theta"] ** -(torch.arange(8.0) / 8)
    gain = 1.0
    if kind != "default":
        freqs, gain = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
    angles = torch.outer(torch.arange(50.0), freqs)
    expected = gain * torch.stack((angles.cos(), angles.sin()), -1)
    assert_close(rope_table(read_config(copy), 50), expected, 1e-5)
    if kind != "llama3" and not {"attention_factor", "mscale"} & theirs.rope_parameters.keys():
        metadata = gguf_metadata(theirs) | BYTES
        file = write_gguf(copy / "a.gguf", metadata, small_gguf[1])
        assert_close(rope_table(read_config(file), 50), expected, 1e-5)


GIVEN = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    vocab_size=300, num_key_value_heads=4, max_position_embeddings=999,
)  # fmt: skip
SLIDING = dict(use_sliding_window=True, sliding_window=64)


WINDOWS = [
    SLIDING, SLIDING | dict(max_window_layers=2), SLIDING | dict(max_window_layers=1),
    SLIDING | dict(layer_types=["full_attention"] * 2, max_window_layers=0),
    SLIDING | dict(layer_types=["full_attention", "sliding_attention"]),
]  # fmt: skip
SAID = [
    {}, dict(sliding_window=8), dict(use_sliding_window=False, sliding_window=8),
    dict(rms_norm_eps=1e-3, tie_word_embeddings=True, head_dim=24, num_key_value_heads=2),
    dict(  # of older writers
        pretraining_tp=1, use_cache=True, attention_dropout=0.0, torch_dtype="bfloat16",
        rope_scaling=None, attention_bias=False, mlp_bias=False, _name_or_path="x",
    ),
]  # fmt: skip

LEFT_OUT = dict(num_attention_heads=32, max_position_embeddings=None, num_key_value_heads=None)


@pytest.mark.parametrize("family, fields", [
    *itertools.product(("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe"), [*SAID, LEFT_OUT]),
    *itertools.product(("Qwen2", "Qwen3"), WINDOWS), ("Qwen3Moe", SLIDING),
    ("Llama", SLIDING | dict(max_window_layers=0)), ("Llama", dict(model_type=None)),
    ("Qwen3Moe", dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=48, norm_topk_prob=True)),
    ("Qwen3Moe", dict(num_local_experts=16)), ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=1)),
], ids=str)  # fmt: skip
def test_config_fields_and_defaults(tmp_path, family, fields):
    """Absent fields have transformers' defaults. A window counts where a layer has it."""
    said = {"model_type": family.lower().replace("3moe", "3_moe")} | GIVEN | fields
    given = {name: value for name, value in said.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(given))
    ours = read_config(tmp_path)
    theirs = getattr(transformers, f"{family}Config")(**given)
    windows = {"sliding_attention"} & set(getattr(theirs, "layer_types", None) or [])
    window = None if family == "Llama" else theirs.sliding_window
    if family in ("Qwen2", "Qwen3") and not windows:
        window = None
    experts = {}
    if family in ("Mixtral", "Qwen3Moe"):
        experts = dict(n_experts=theirs.num_experts, experts_per_token=theirs.num_experts_per_tok)
        experts["norm_topk"] = getattr(theirs, "norm_topk_prob", True)
    expected = experts | dict(
        dim=64, hidden_dim=getattr(theirs, "moe_intermediate_size", 96), n_layers=2,
        n_heads=theirs.num_attention_heads,
        vocab_size=300, sliding_window=window,
        n_kv_heads=theirs.num_key_value_heads, norm_eps=theirs.rms_norm_eps,
        rope_theta=theirs.rope_parameters["rope_theta"], max_seq_len=theirs.max_position_embeddings,
        tie_embeddings=theirs.tie_word_embeddings,
        head_dim=getattr(theirs, "head_dim", None) or 64 // theirs.num_attention_heads,
        qkv_bias=family == "Qwen2", qk_norm=family.startswith("Qwen3"),
    )  # fmt: skip
    assert {name: getattr(ours, name) for name in expected} == expected
    assert ours.dtype == torch.bfloat16 or "torch_dtype" not in fields


@pytest.mark.parametrize("family", ["llama", "qwen 3", "qwen 3 moe"])
def test_biases_of_a_config(tmp_path, cli, family):
    """Which products have one. Those that no layer has are zeros, as in transformers."""
    shape = dict(attention_bias=True, mlp_bias=True) | FAMILIES.get(family, {})
    theirs = hugging_face_model(**shape)
    theirs.save_pretrained(tmp_path)
    ours = assert_equals_transformers(tmp_path, theirs)
    c, in_mlp = ours.config, family == "llama"
    assert (c.qkv_bias, c.wo_bias, c.w13_bias, c.w2_bias) == (True, True, in_mlp, in_mlp)
    projections = ["q", "o", *(("gate", "down") if in_mlp else ())]
    for name in (f"{projection}_proj.bias" for projection in projections):
        tensors = load_file(tmp_path / "model.safetensors")
        last = next(key for key in tensors if key.endswith(name) and ".1." in key)
        spoil_tensors(lambda t, last=last: t.pop(last))(tmp_path)
        assert_refused(cli("-m", tmp_path, "-p", "a"), f"{last} is missing")
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    without = lambda t: [
        t.pop(key) for key in [*t] if key.endswith(("o_proj.bias", "down_proj.bias"))
    ]
    spoil_tensors(without)(tmp_path)
    theirs = type(theirs).from_pretrained(tmp_path, dtype=torch.float32)
    assert not theirs.model.layers[1].self_attn.o_proj.bias.any()
    assert not assert_equals_transformers(tmp_path, theirs).config.wo_bias


@pytest.mark.parametrize("family, place", [
    ("gqa", "self_attn.q_proj"), ("gqa", "mlp.down_proj"), ("qwen 2.5", "self_attn.o_proj"),
    ("mistral nemo", "self_attn.v_proj"), ("mistral nemo", "mlp.gate_proj"), ("qwen 3", "mlp.up_proj"),
    ("qwen 3 moe", "mlp.experts.5.up_proj"), ("qwen 3 moe", "mlp.gate"),
    ("mixtral", "block_sparse_moe.experts.0.w2"),
])  # fmt: skip
def test_biases_that_a_family_does_not_have(copy, cli, family, place):
    """They are refused unless they are zeros, whatever the flags say."""
    theirs = hugging_face_model(350, **FAMILIES[family])
    theirs.save_pretrained(copy)
    if family != "gqa":
        spoil_config(mlp_bias=True, attention_bias=family != "qwen 3 moe")(copy)
    name = f"model.layers.1.{place}"
    spoil_tensors(lambda t: t.update({f"{name}.bias": torch.zeros(64)}))(copy)
    assert_equals_transformers(copy, theirs)
    set_one(f"{name}.bias", 1e-3)(copy)
    assert_refused(cli("-m", copy, "-p", "a"), f"{name}.weight has a bias, and should have none")


def test_config_eos_of_both_files(copy):
    edit(copy / "config.json", eos_token_id=[7, 2], bos_token_id=5)
    edit(copy / "generation_config.json", eos_token_id=[2, 9])
    # as in transformers, an id that only config.json names does not end a text
    assert read_config(copy).eos_ids == (2, 9) and read_config(copy).bos_id == 1
    edit(copy / "generation_config.json", bos_token_id=None, eos_token_id=0)
    assert read_config(copy).eos_ids == (0,) and read_config(copy).bos_id == 5
    edit(copy / "generation_config.json", eos_token_id=None)
    assert read_config(copy).eos_ids == (7, 2)
    edit(copy / "config.json", eos_token_id=7)
    assert Session(copy, device="cpu").eos == {7, 2}, "the tokenizer's own ends a text, too"


# ---- hub.py


HASH = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """What a download asks of the Hugging Face hub. files: those of someone/tiny."""

    files: dict[str, bytes]
    asked: list[str]
    token: str | None

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        code, data, headers = self.response(path)
        self.send_response(code)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def response(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            return 401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "accept the licence"}
        if found := re.fullmatch("/api/models/someone/tiny(/revision/.*|/tree/.*|)", path):
            said = {"id": "someone/tiny", "sha": HASH}
            said["siblings"] = [{"rfilename": name} for name in self.files]
            if found[1].startswith("/tree"):
                row = lambda n, data: dict(type="file", path=n, size=len(data), oid="0" * 40)
                said = [row(*file) for file in self.files.items()]
            return 200, json.dumps(said).encode(), {"Content-Type": "application/json"}
        data = self.files.get(path.removeprefix(f"/someone/tiny/resolve/{HASH}/"))
        if data is None:
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        digest = hashlib.sha256(data).hexdigest()
        return 200, data, {"ETag": f'"{digest}"', "X-Repo-Commit": HASH}

    @classmethod
    def fetched(cls) -> list[str]:
        """The names of the files that were downloaded, since it was last asked."""
        names = [line for line in cls.asked if line.startswith("GET /someone")]
        cls.asked.clear()
        return sorted(line.rpartition("/")[2] for line in names)


def of_hub(folder: Path) -> dict[str, bytes]:
    """A checkpoint as a repository, which has other files, too."""
    others = ("README.md", "original/model.safetensors", "tf_model.h5")
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    return files | dict.fromkeys(others, b"x")


@pytest.fixture
def hub(tiny, tmp_path, monkeypatch):
    """A hub on the loopback address with the tiny checkpoint, and an empty cache."""
    Hub.files, Hub.asked, Hub.token = of_hub(tiny) | {"pytorch_model.bin": b"x" * 999}, [], None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        serve_forever = partial(server.serve_forever, poll_interval=0.01)
        threading.Thread(target=serve_forever, daemon=True).start()
        set_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}", tmp_path / "cache")
        yield Hub
        server.shutdown()


def set_hub(monkeypatch, endpoint: str, cache: Path, offline: bool = False) -> None:
    """For this process, where the library has read its environment, and for those it starts."""
    values = dict(
        HF_ENDPOINT=endpoint, HF_HUB_CACHE=cache, HF_HUB_OFFLINE=int(offline), NO_PROXY="127.0.0.1"
    )
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    constants = dict(ENDPOINT=endpoint, HF_HUB_CACHE=str(cache), HF_HUB_OFFLINE=offline)
    constants["HUGGINGFACE_CO_URL_TEMPLATE"] = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    constants |= dict(HF_HUB_ETAG_TIMEOUT=PATIENCE, HF_HUB_DOWNLOAD_TIMEOUT=PATIENCE)
    for name, value in constants.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)


NEEDED = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.model"]


def test_hub_downloads_once_what_is_needed(hub, tiny, copy, cli, monkeypatch, tmp_path):
    """First by a process of its own, in which no test has imported or set anything."""
    flags = ("someone/tiny", "-p", "Once", "-n", 4, "--temp", 0, "--quiet")
    expected = cli("-m", tiny, *flags[1:])
    process = program("-hf", *flags)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out.decode(), err.decode()) == expected
    assert hub.fetched() == NEEDED
    again = "the second time is without the network"
    assert cli("-m", *flags) == expected and not hub.asked, again
    set_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
    next((tmp_path / "cache").rglob("snapshots/*/generation_config.json")).unlink()
    assert cli("-m", *flags) == expected, "offline, what is there has to do"


@pytest.mark.parametrize("layout, listed", [
    ("a left-over index and a .bin", True), ("safetensors shards", False), ("meta, 2 shards", False)
])  # fmt: skip
def test_hub_takes_what_a_folder_means_and_finishes_a_download(
    hub, copy, monkeypatch, tmp_path, layout, listed
):
    """One of the files is not there yet, and the disk has room for that one only. listed: whether
    the cache remembers what the repository holds; if another program made it, it does not."""
    FILES[layout](copy)
    hub.files = of_hub(copy)
    whole = load("someone/tiny", dtype="fp32", device="cpu")
    if listed:
        assert hub.fetched() == NEEDED, "nothing else that lies there"
    files = (tmp_path / "cache").rglob("snapshots/*/*")
    *_, last = sorted(path for path in files if path.stat().st_size > 9999)
    size = last.stat().st_size
    last.resolve().unlink()
    last.unlink()
    if not listed:
        shutil.rmtree(tmp_path / "cache" / "models--someone--tiny" / "trees")
    disk = SimpleNamespace(free=size - 1)
    monkeypatch.setattr("loading.hub.shutil.disk_usage", lambda _: disk)
    needs = f"takes {size / 1e9:.2f} GB, but .* has {size / 1e9:.2f} GB free \\(see HF_HOME\\)"
    with pytest.raises(ValueError, match=f"someone/tiny {needs}"):
        load("someone/tiny", device="cpu")
    disk.free = size
    hub.fetched()
    again = load("someone/tiny", dtype="fp32", device="cpu")
    assert torch.equal(whole.weights.layers[1].w2.data, again.weights.layers[1].w2.data)
    assert hub.fetched() == [last.name]


GEMMA = {"config.json": b'{"model_type": "gemma2"}', "model.safetensors": b"x"}
HUB_REFUSALS = {  # the hub, whether it is there, the repository: what the line says
    "gated": (dict(token="secret"), "", "tiny", "it is gated: accept its licence on its page, and set HF_TOKEN"),
    "gguf": (dict(files={"a.IQ2_M.gguf": b"x"}), "", "tiny", "holds no weights that this program reads"),
    "another family": (dict(files=GEMMA), "", "tiny", "config.json: model_type is 'gemma2', which is not supported"),
    "another kind": (dict(files={"a.Q4_0.gguf": b"x"}), "", "tiny:Q4_K_M", "holds no GGUF file of the kind Q4_K_M"),
    "unknown": ({}, "", "other", "no folder someone/other here, and no such repository on http://127.0.0.1:"),
    "offline": ({}, "offline", "tiny", "offline mode is enabled. To disable it, please unset the `HF_HUB_OFFLINE`"),
    "not there": ({}, "not there", "tiny", "and the download from http://127.0.0.1:9 failed (Conn"),
}  # fmt: skip


@pytest.mark.parametrize("how", HUB_REFUSALS)
def test_hub_refusals_are_one_line(hub, cli, monkeypatch, tmp_path, how):
    settings, state, name, expected = HUB_REFUSALS[how]
    for field, value in settings.items():
        setattr(hub, field, value)
    if state:
        set_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=state == "offline")
    assert_refused(cli("-m", f"someone/{name}", "-p", "Once", "-n", 2), expected)
    weights = [name for name in hub.fetched() if name.endswith(("safetensors", "gguf"))]
    assert not weights, "refused only after gigabytes were fetched"
    if hub.token:
        monkeypatch.setenv("HF_TOKEN", "secret")
        assert cli("-m", "someone/tiny", "-p", "Once", "-n", 2)[0] == 0


# ---- untrusted files


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def torch_file(content, save=torch.save):
    """Write pytorch_model.bin in place of the weights."""

    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with warnings.catch_warnings(action="ignore"):
            save(content() if callable(content) else content, folder / "pytorch_model.bin")

    return spoil


def compressed(content: bytes, file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", content)


def stored(content: bytes, file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content)


def replace_in_archive(old: bytes, new: bytes):
    """In the names and the contents of a pytorch_model.bin's entries."""

    def spoil(folder: Path) -> None:
        file = folder / "pytorch_model.bin"
        with zipfile.ZipFile(file) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in entries.items():
                name = name.replace(old.decode("latin1"), new.decode("latin1"))
                archive.writestr(name, content.replace(old, new))

    return spoil


def doubled_tuples(levels: int) -> bytes:
    """A pickle of a tuple that has a tuple twice, and so on."""
    steps = (bytes([0x71, i, 0x68, i, 0x86]) for i in range(levels))  # BINPUT, BINGET, TUPLE2
    return b"\x80\x02)" + b"".join(steps) + b"."


class Filler:
    """Takes a GB when it is read."""

    def __reduce__(self):
        return (bytearray, (1 << 30,))


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch PICKLE_HAS_RUN",))


UNSAFE = "pytorch_model.bin is damaged, or cannot be read safely"
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 999\n"
W13, PTH = "layers.1.w13", "consolidated.01.pth"
index_of = lambda names: both(
    remove("model.safetensors"), write(INDEX, json.dumps({"weight_map": names}))
)
ONES = [1.0] * 8
LONGROPE = dict(rope_type="longrope", short_factor=ONES, long_factor=ONES, attention_factor=1.0)


def of_family(family: str, **fields):
    """Put a model of another family there, of which config.json then says this."""
    model = lambda folder: hugging_face_model(350, **FAMILIES[family]).save_pretrained(folder)
    return both(model, spoil_config(**fields))


# how a checkpoint, or one saved in a format, is corrupted: what the one-line error must contain
SPOILED = {
    "no config": (remove("config.json"), "neither config.json nor params.json"),
    "config is not JSON": (write("config.json", "{"), "config.json is not JSON"),
    "deep JSON": (write("config.json", "[" * 100_000), "config.json is not JSON"),
    "config lacks a field": (spoil_config(hidden_size=None), "config.json lacks the field hidden_size"),
    **{f"{name} {value!r}": (spoil_config(**{name: value}), f"{name} is {value!r}") for name, value in dict(
        num_hidden_layers=-1, vocab_size=10**15, intermediate_size="many", rms_norm_eps=NAN, hidden_act="gelu",
        model_type="gpt2", tie_word_embeddings="false", partial_rotary_factor=0.5,
    ).items()},
    "uneven heads": (spoil_config(num_key_value_heads=3), "4 query heads cannot share 3"),
    "sliding window": (
        spoil_config(model_type="mistral", sliding_window=64), "sliding_window is 64: a ctx_size of 256"
    ),
    "listed dtype": (spoil_config(dtype=["float32"]), "torch_dtype is ['float32']"),
    "both directions": (spoil_config(is_causal=False), "is_causal is False"),
    "rope by layers": (
        spoil_config(rope_parameters={"full_attention": {"rope_theta": 1e6}}), "RoPE of their own (full_attention)",
    ),
    "params.json with yarn": (
        lambda f: [to_meta(f, 1), edit(f / "params.json", yarn={"factor": 4})], "params.json: yarn is {'factor': 4}",
    ),
    "another rope": (spoil_config(rope_parameters={"rope_type": "dynamic"}), "rope_type is 'dynamic'"),
    "params.json with experts": (
        lambda f: [to_meta(f, 1), edit(f / "params.json", moe={"num_experts": 8})], "params.json: moe is {",
    ),
    "fewer experts in the file": (of_family("mixtral", num_local_experts=5), "experts.4.w1.weight is missing; "),
    "more experts in the file": (of_family("mixtral", num_local_experts=3), "experts.3.w1.weight is unexpected; "),
    "more experts a token than there are": (
        of_family("mixtral", num_experts_per_tok=5), "num_experts_per_tok is 5; it must be a whole number from 1 to 4",
    ),
    "too many experts": (of_family("qwen 3 moe", num_local_experts=1 << 16), "num_local_experts is 65536; it must be"),
    **{name: (of_family("qwen 3 moe", **{name: value}), f"{name} is {value}, which is not supported") for name, value
       in dict(mlp_only_layers=[0], decoder_sparse_step=2, shared_expert_intermediate_size=8,
               routed_scaling_factor=2.5).items()},
    **{f"yarn, {name}": (spoil_config(rope_parameters={"rope_type": "yarn", name: value}), f"{name} is {value}")
       for name, value in (("truncate", False), ("mscale_all_dim", 1.0), ("partial_rotary_factor", 0.5))},
    **{f"longrope with {name}": (spoil_config(rope_parameters=LONGROPE | {name: value}), "rope_type is 'longrope'")
       for name, value in (("long_factor", [2.0] * 8), ("attention_factor", 1.5))},
    "eos beyond the vocabulary": (
        both(remove("generation_config.json"), spoil_config(eos_token_id=[2, 9999])),
        "config.json: eos_token_id is [2, 9999]",
    ),
    "eos beyond it in generation_config.json": (
        lambda f: edit(f / "generation_config.json", eos_token_id=[2, 9999]), "config.json: eos_token_id is [2, 9999]",
    ),
    "mlx": (spoil_config(quantization={"bits": 4}), "quantised for mlx: take the original"),
    "gguf beside a config": (lambda f: (f / "model.safetensors").rename(f / "x.gguf"), "x.gguf is not a GGUF file"),
    "adapter": (
        both(remove("config.json"), write("adapter_config.json", '{"base_model_name_or_path": "a/b"}')),
        "an adapter without its base: merge it into a/b",
    ),
    "a huge config": (lambda f: os.truncate(f / "config.json", 1 << 36), "config.json has more than 64,000,000 bytes"),
    "a pipe": (lambda f: [(f / "config.json").unlink(), os.mkfifo(f / "config.json")], "neither config.json"),
    "a link to a device": (
        lambda f: [(f / "generation_config.json").unlink(), (f / "config.json").unlink(),
                   (f / "config.json").symlink_to("/dev/zero")], "neither config.json",
    ),
    "git-lfs weights": (write("model.safetensors", POINTER), "model.safetensors is a git-lfs pointer", "git lfs pull"),
    "a tokenizer beside it": (  # which is where Meta's layout has it
        lambda f: (f / "tokenizer.model").rename(f.parent / "tokenizer.model"), "holds no tokenizer.model",
    ),
    "broken tokenizer": (write("tokenizer.model", b"x" * 99), "is not a SentencePiece model"),
    "empty tokenizer": (write("tokenizer.model", b""), "is not a SentencePiece model"),
    "a piece that is not UTF-8": (
        lambda f: (f / "tokenizer.model").write_bytes(
            (f / "tokenizer.model").read_bytes().replace("▁t".encode(), b"\xe2\x96tt", 1)
        ), "is not a SentencePiece model",
    ),
    "wrong types beside the tokenizer": (
        both(write("tokenizer_config.json", "{}"), write("added_tokens.json", "[]")),
        "added_tokens.json does not hold a JSON object",
    ),
    "no weights": (remove("model.safetensors"), "holds no weights"),
    "truncated": (lambda f: os.truncate(f / "model.safetensors", 5000), "is cut short, or no safetensors file"),
    "too long": (lambda f: os.truncate(f / "model.safetensors", 1 << 20), "no safetensors file"),
    "escape in a name": (spoil_tensors(lambda t: t.update({"\x1b]0;\x07\ny": torch.ones(1)})), "?]0;? y is unexpected"),
    "missing tensor": (spoil_tensors(lambda t: t.pop(DOWN)), f"{DOWN} is missing"),
    "unexpected tensor": (spoil_tensors(lambda t: t.update(extra=torch.ones(1))), "extra is unexpected"),
    "wrong shape": (put(NORM, lambda t: t[:3]), f"{NORM} is [3], expected [64]"),
    "whole numbers": (put(NORM, lambda t: t.char()), f"{NORM} is [64] in int8, expected [64] in float32 or float16"),
    "tensors in two shards": (  # as Meta's layout has them
        both(lambda f: to_shards(f, "safetensors"), lambda f: shutil.copy(f / SHARDS[0], f / SHARDS[1])),
        "the tensors do not fit the config",
    ),
    "Meta's shards differ": (
        lambda f: [to_meta(f, 2), torch.save(torch.load(f / PTH) | {"norm.weight": torch.ones(65)}, f / PTH)],
        "norm.weight is [64] + [65], expected [64]",
    ),
    "one of Meta's shards": (lambda f: [to_meta(f, 2), (f / PTH).unlink()], "expected [350, 64]"),
    "index without shard": (index_of({"": "b.safetensors"}), "b.safetensors, which is missing"),
    **{f"index that names {name}": (index_of({"a": name}), "not a file in its folder")
       for name in ("../x.bin", "/x.bin", "a/../../x.bin", "x", "config.json")},
    "index without a map": (index_of([]), f"{INDEX} lacks the field weight_map"),
    **{f"torch file, {name}": (torch_file(content), UNSAFE) for name, content in {
        "numbered": {1: torch.ones(1)}, "a list": [torch.ones(1)], "nested": {"x": {"y": torch.ones(1)}},
        "sparse": {"x": torch.ones(1).to_sparse()}, "of no device": {"x": torch.ones(1, device="meta")},
        "quantised": lambda: {"x": torch.quantize_per_tensor(torch.ones(1), 1, 0, torch.qint8)},
        "runs code": {"x": Bomb()}, "values beyond it": {"x": torch.ones(1).expand(1 << 30)},
    }.items()},
    "torch file that fills the memory": (torch_file({"x": Filler()}), "(it refers to __builtin__.bytearray)"),
    "torch file, a pickle in capitals": (
        both(torch_file({"x": Filler()}), replace_in_archive(b"data.pkl", b"DATA.PKL")), UNSAFE,
    ),
    "torch file, tuples of tuples": (torch_file(doubled_tuples(40), stored), "its pickle has a tuple twice"),
    "torch file with room for many objects": (
        torch_file(b"\x80\x02}r\xff\xff\xff\xff.", stored), "its pickle is damaged",
    ),
    "torch file that sets attributes": (
        torch_file(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x01\x00\x00\x00aNsb.", stored), UNSAFE,
    ),
    "torch file, one storage many times": (
        torch_file(lambda: dict.fromkeys(map(str, range(9)), torch.ones(1 << 16))), "(its tensors overlap)",
    ),
    "torch file, more elements than it has": (
        both(
            torch_file({"x": torch.zeros(2000)}), replace_in_archive(b"M\xd0\x07", b"M\xff\xff")
        ),
        "(x lies outside it)",
    ),
    "a header of many MB": (
        lambda f: (f / "model.safetensors").write_bytes((9 << 20).to_bytes(8, "little") + bytes(9 << 20)),
        "(a header of 9,437,184 bytes)",
    ),
    "torch file with a large entry": (torch_file(bytes(5 << 20), stored), "a pickle of more than 4,194,304 bytes"),
    "torch file without dimensions": (torch_file({NORM: torch.tensor(1.0)}), f"{NORM} is [1], expected [64]"),
    "an empty tensor of any shape": (
        both(spoil_config(tie_word_embeddings=True),
             spoil_tensors(lambda t: t.update({name: torch.empty(1 << 60, 0) for name in TABLES}))),
        f"{TABLES[0]} is [1152921504606846976, 0], expected [350, 64]",
    ),
    "plain pickle": (torch_file({"x": Bomb()}, lambda value, file: file.write_bytes(pickle.dumps(value))), UNSAFE),
    "cut torch file": (both(torch_file({}), lambda f: os.truncate(f / "pytorch_model.bin", 99)), UNSAFE),
    "compressed torch file": (torch_file(b"x" * 99, compressed), "(it is compressed)"),
    "saved, another layout": (spoil_tensors(fused_llama="1"), "saved by another version of fused-llama, in the format"),
    "saved, another format": (spoil_tensors(format="e3m4"), "of fused-llama, in the format 'e3m4': save it again"),
    "saved, second output matrix": (
        both(
            spoil_config(tie_word_embeddings=True),
            spoil_tensors(lambda t: t.update({"output.weight": t["tok_embeddings.weight"].clone()})),
        ),
        "output.weight is unexpected",
    ),
    "saved, missing scale": (spoil_tensors(lambda t: t.pop("output.scale")), "output.scale is missing"),
    "saved, short matrix": (put(W13, lambda t: t[:9]), f"{W13} is [9, 64], expected [224, 64]"),
    "saved, another config": (
        spoil_config(intermediate_size=1 << 20), "do not fit the config: layers.0.w13 is [224, 64]",
    ),
    "saved, matrix of floats": (
        put(W13, lambda t: t.half()), f"{W13} is [224, 64] in float16, expected [224, 64] in int8",
    ),
    "saved, codes of another format": (spoil_tensors(format="e5m2"), "has codes of NaN or infinity: save it again"),
    "saved, nan code": (set_one(W13, 0x7F), f"{W13} has codes of NaN or infinity: save it again"),
    "saved, zero scale": (set_one(f"{W13}.scale", 0), f"{W13} has scales that are not positive and finite"),
    "saved, nan norm": (set_one("norm.weight", NAN), "not finite", "norm.weight in model.safetensors holds NaN"),
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILED)
def test_spoiled_checkpoint_is_one_line(cli, tiny, tiny_saved, how, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    original = tiny_saved if how.startswith("saved") else tiny
    folder = Path(shutil.copytree(original, tmp_path / "folder" / "copy"))
    spoil, *expected = SPOILED[how]
    spoil(folder)
    said = cli("-m", folder, "-p", "Once", "-n", 2, "--quiet", "--no-display-prompt")
    assert_refused(said, *expected)
    assert not (tmp_path / "PICKLE_HAS_RUN").exists(), "opening a checkpoint ran its code"


def test_safetensors_cut_short_while_read(tmp_path):
    """Whole, or some rows and columns, by one thread and by several."""
    file, whole = tmp_path / "x.safetensors", torch.randint(-1000, 1000, (3001, 3003)).half()
    tensors = {"small": whole[0].clone(), "large": whole}
    save_file(tensors, file)
    found = {tensor.name: tensor for tensor in tensors_of(file)}
    assert all(map(torch.equal, read([found[name] for name in tensors]), tensors.values()))
    for rows, columns in ((slice(1, 2999), slice(0, 3003)), (slice(0, 3001), slice(5, 3000))):
        (part,) = read([found["large"].cut([range(3001)[rows], range(3003)[columns]])])
        assert part.equal(whole[rows, columns])
    os.truncate(file, 8 + 100 + min(tensor.offset for tensor in found.values()))
    for tensor in found.values():
        with pytest.raises(OSError, match="x.safetensors was cut short while it was being read"):
            read([tensor])


# ---- save.py: saved models


def test_a_model_is_named(tmp_path):
    for wrong in 5, None, torch.nn.Identity():
        for take in Session, partial(save, target=str(tmp_path / "saved")):
            with pytest.raises(TypeError, match=f"hub, not as {type(wrong).__name__}"):
                take(wrong)


@pytest.mark.parametrize("shape, layout, form", [
    ("gqa", None, "e4m3"), ("mqa, tied", None, "e5m2"), ("gqa", "meta, 2 shards", "e4m3"),
    ("mixtral", None, "e4m3"), ("granite code", None, "e4m3"), ("qwen 3", None, "e5m2"),
])  # fmt: skip
def test_saved_model_is_the_model(cli, copy, shape, layout, form):
    """Also its chat template, which the name of the original's folder says."""
    copy = copy.rename(copy.parent / "Llama-2-7b-chat")
    saved = copy.parent / "saved"
    hugging_face_model(read_config(copy).vocab_size, **FAMILIES[shape]).half().save_pretrained(copy)
    if layout:
        LAYOUTS[layout](copy)
        (copy / "tokenizer.model").rename(copy.parent / "tokenizer.model")
        (copy / "tokenizer.json").touch()  # the other comes first
    code, out, err = cli("-m", copy, "--save", saved, "--fp8", form)
    assert (code, out, err.count("\n")) == (0, "", 1) and f"{saved}: {form} matrices" in err, err
    assert find_template(copy, {})[0] == find_template(saved, {})[0] == TEMPLATES["llama2"]
    tensors = load_file(saved / "model.safetensors")
    rows = {"mixtral": 4 * 224, "granite code": 256}.get(shape, 224)
    written = {"layers.1.w13": (rows, 64), "layers.1.w13.scale": (rows,), "norm.weight": (64,)}
    if shape == "qwen 3":
        written["layers.1.qk_norm.weight"] = (2, 24)
    found = {name: tuple(tensors[name].shape) for name in written}
    assert found == written, "folders that were saved earlier stay readable"
    for dtype in ("fp32", "bf16"):
        # where it was encoded: a GPU may round an error the other way
        options = dict(dtype=dtype, device="cpu")
        models = load(copy, format=form, **options), load(saved, **options)
        for one, other in zip(*(model.weights.matrices for model in models)):
            same = all(map(torch.equal, one.tensors, other.tensors))
            assert same, "codes depend on the dtype"
        ours, theirs = (logits_of(model, torch.arange(5, 25) * 7, 19, 1) for model in models)
        assert torch.equal(ours, theirs), "a saved model says something else"
    assert_two_ranks_have(models[1], models[1].weights.layers[1], FORMATS[form])
    code, _, err = cli("-m", saved, "--fp8", form, "-p", "Once", "-n", 1)
    assert code == 0 and f"with {form} matrices" in err
    lossy = "would lose precision a second time: run it as it is, or encode"
    other = "e4m3" if form == "e5m2" else "e5m2"
    for wanted, refused in ((other, ("-p", "Once")), ("e4m3", ("--save", copy.parent / "again"))):
        why = f"its matrices are {form}, and {wanted} {lossy}"
        assert_refused(cli("-m", saved, "--fp8", wanted, *refused), why)


@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp16"])
def test_what_is_saved_is_encoded_from_the_original(tiny, cli, tmp_path, dtype):
    """Codes are those of the weights in the file, in fp32; the dtype is that of all else."""
    code, *_ = cli("-m", tiny, "--save", tmp_path / "saved", "--fp8", "--dtype", dtype)
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    codes, scale = E4M3.encode(load_file(tiny / "model.safetensors")[DOWN])
    assert code == 0 and torch.equal(tensors["layers.1.w2"], codes)
    assert torch.equal(tensors["layers.1.w2.scale"], scale.flatten())
    types = {tensors[f"{name}.weight"].dtype for name in ("norm", "tok_embeddings")}
    assert types == {place.DTYPES.get(dtype, torch.float32)}


def test_save_is_whole_or_not_at_all(cli, copy, monkeypatch, tmp_path, hears_signals):
    (tmp_path / "file").touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    before = sorted(tmp_path.rglob("*"))

    def refused(to: str, expected: str, code: int = 1) -> None:
        seen, out, err = cli("-m", copy, "--save", tmp_path / to, "--fp8")
        assert (seen, out, err.count("\n")) == (code, "", code == 1) and expected in err, err
        assert sorted(tmp_path.rglob("*")) == before, "something is left of a save that failed"

    refused("copy", "copy is not an empty folder: save to a new one")
    refused("file", "file is not an empty folder")
    refused("no/where", "No such file or directory")
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))  # a disk that becomes full
    try:
        refused("new", "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    full = lambda _: SimpleNamespace(free=0)
    ends = [  # a step, what happens in it, what is said, the exit code
        ("loading.place.free_memory", lambda _: 100_000, "try a smaller", 1),
        ("loading.save.shutil.disk_usage", full, "has 0.00 GB free: save elsewhere", 1),
        ("checkpoint.Loader.load", fails(KeyboardInterrupt()), "", 130),
    ]
    for number in hears_signals:
        killed = lambda *_, number=number: signal.raise_signal(number)
        ends.append(("loading.save.save_file", killed, "", 128 + number))
    for step, end, expected, code in ends:
        with monkeypatch.context() as patch:
            patch.setattr(step, end)
            refused("new", expected, code)
    rename = lambda file, to: os.rename(file, to) if file.name != "model.safetensors" else 1 / 0
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)  # its last step
        refused("new", "division by zero")
        refused("empty", "division by zero")


def test_save_to_a_folder_that_exists(tiny, cli, tmp_path):
    """Inside it, since it may be a mount point, and with its own mode."""
    tmp_path.chmod(0o2750)
    (tmp_path / "lost+found").mkdir()  # as in a new file system
    place = tmp_path.stat()
    assert cli("-m", tiny, "--save", tmp_path, "--fp8", "--quiet") == (0, "", "")
    assert (place.st_ino, place.st_mode) == (tmp_path.stat().st_ino, tmp_path.stat().st_mode)
    (tmp_path / "lost+found").rmdir()
    modes = {file.stat().st_mode for file in (*tmp_path.iterdir(), tiny / "config.json")}
    assert len(modes) == 1


# ---- place.py


LLAMA_7B = read_config_like(
    dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, head_dim=128, hidden_dim=11008,
    vocab_size=32000,
)  # fmt: skip
EIGHT_EXPERTS = dict(n_experts=8, experts_per_token=2)


@pytest.mark.parametrize("dtype, device, options, weights, cache, room", [
    # 32 layers of 202,375,168 weights and an output matrix of 131,072,000, as many in the
    # embedding, and 65 norms of 4096: 6,738,415,616 in all. A token's keys and values are
    # 2 * 32 * 4096 numbers. The output matrix, the largest, counts six times
    ("fp16", "cuda", {}, 13.48, 2.15, 1.57),
    ("fp32", "cpu", {}, 26.95, 4.29, 3.15),
    ("fp16", "cuda", dict(ctx_size=1), 13.48, 0.00, 1.57),
    # half the cache, and room for a layer's 2 * 4096 * 4096, decoded
    ("fp16", "cuda", dict(kv_fp8=True), 13.48, 1.07, 1.71),
    # 6,607,077,376 codes, a scale for each of 1,391,872 rows, the embedding
    ("fp16", "cuda", dict(format=E4M3), 6.88, 2.15, 1.57),
    # 9 bits for two of 6,476,005,376 codes, a scale for each of 1,359,872 rows; the output matrix
    # in 8 bits, and the embedding. A CPU keeps 5/8 of a byte more for each code, for bf16
    ("fp16", "cuda", dict(format=INT4), 4.04, 2.15, 1.57),
    ("fp32", "cpu", dict(format=INT4), 4.30, 4.29, 3.15),
    ("bf16", "cpu", dict(format=INT4), 8.09, 2.15, 1.57),
    # 8 experts: 30,299,652,096 weights more, and a router of 32,768 in each layer. Room is for one
    # expert at a time, and a CPU keeps no copy of them
    ("fp16", "cuda", dict(shape=EIGHT_EXPERTS), 74.08, 2.15, 1.57),
    ("bf16", "cpu", dict(shape=EIGHT_EXPERTS, format=INT4), 22.45, 2.15, 1.57),
    # while they are encoded from fp32, all 721,420,288 weights of a layer's w1 and w3 are in memory
    (
        "fp16", "cuda", dict(shape=EIGHT_EXPERTS, format=E4M3, encoded_from=torch.float32),
        37.20, 2.15, 2.89,
    ),
    # half of the matrices and of the cache; the output matrix has 16,000 rows
    ("fp16", "cuda", dict(ranks=Ranks(1, 2)), 6.87, 1.07, 0.79),
])  # fmt: skip
def test_memory_of_7b(monkeypatch, dtype, device, options, weights, cache, room):
    """In GB, worked out by hand: if these change, so must what users are told that they need."""
    options = dict(ctx_size=4096, shape={}, ranks=Ranks()) | options
    config, ranks = replace(LLAMA_7B, **options.pop("shape")), options["ranks"]
    asked = config.cut(ranks.size), place.DTYPES[dtype], torch.device(device)
    options["formats"] = formats_of(asked[0], options.pop("format", None))
    monkeypatch.setattr("loading.place.free_memory", lambda device: 1e6)
    with pytest.raises(MemoryError) as error:
        check_memory(*asked, **options)
    said = re.findall(r"(?:weights|tokens|workspace|=|has) ([\d.]+) GB", str(error.value))
    total = float(said.pop(3))
    assert said == [f"{weights:.2f}", f"{cache:.2f}", f"{room:.2f}", "0.00"]
    assert total == pytest.approx(weights + cache + room, abs=0.016)
    where = f"{device} for rank 1 of 2 has" if ranks.size > 1 else f"but {device} has"
    assert where in str(error.value)


def test_memory_that_is_just_enough(monkeypatch):
    asked = LLAMA_7B, torch.float16, torch.device("cpu"), 4096, {}
    need = 2 * 6_738_415_616 + 2 * 2 * 32 * 4096 * 4096 + 6 * 2 * 131_072_000
    for has, ranks in ((need, Ranks()), (4 * need, Ranks(1, 4, 1, 4))):  # which share a host's
        monkeypatch.setattr("loading.place.free_memory", lambda device, has=has: has)
        assert check_memory(*asked, ranks=ranks) is None
        monkeypatch.setattr("loading.place.free_memory", lambda device, has=has: has - 1)
        with pytest.raises(MemoryError, match=f"= {need / 1e9:.2f} GB, but cpu.* has .* free: try"):
            check_memory(*asked, ranks=ranks)


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_a_container(monkeypatch, tmp_path, version):
    """What its limit leaves, apart from files that the system can drop; without a limit, what the
    machine has."""
    limit, used = {1: ("limit_in_bytes", "usage_in_bytes"), 2: ("max", "current")}[version]
    names = (tmp_path, f"memory.{limit}", f"memory.{used}")
    monkeypatch.setattr(place, "CGROUPS", (("/nowhere", "a", "b"), tuple(map(str, names))))
    (tmp_path / names[1]).write_text("5000000\n")
    (tmp_path / names[2]).write_text("4000000\n")
    stat = "anon 9\ninactive_file 200000\nactive_file 100000\ntotal_active_file 7\n"
    (tmp_path / "memory.stat").write_text(stat)
    cpu = torch.device("cpu")
    assert place.free_memory(cpu) == 1_300_000
    (tmp_path / names[1]).write_text("max\n" if version == 2 else f"{(1 << 63) - 4096}\n")
    assert 1e8 < place.free_memory(cpu) < 1e15


def test_where_the_kernels_run(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "This card")
    monkeypatch.setattr(launch, "capability", lambda device: 80)
    assert place.pick_backend("auto", gpu) == "triton"
    monkeypatch.setattr(launch, "capability", lambda device: 79)
    with pytest.raises(ValueError, match="This card is older than compute capability 8.0"):
        place.pick_backend("auto", gpu)
    assert place.pick_backend("torch", gpu) == place.pick_backend("auto", cpu) == "torch"
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1"):
        place.pick_backend("triton", cpu)


# ---- gguf.py and others.py: files by llama.cpp's package gguf, whose decoding is the reference


QUANTS = {number: kind for number, kind in ggml.TYPES.items() if kind.block > 1}
# at the start of a block; others have one, Q6_K's is the last
HALVES = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}
ALPHABET = tokenizers.pre_tokenizers.ByteLevel.alphabet()
BYTES = {  # a vocabulary of one token a byte
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*ALPHABET, "ab", "<|im_end|>", "</s>"],
    "tokenizer.ggml.token_type": [1] * 257 + [3, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 258,
}


# what llama.cpp's convert_hf_to_gguf.py writes for a model of transformers, and its fields there
GGUF_KEYS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.key_length": "head_dim",
    "attention.head_count_kv": "num_key_value_heads", "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
SCALING_KEYS = {
    "type": "rope_type", "factor": "factor", "yarn_beta_fast": "beta_fast",
    "original_context_length": "original_max_position_embeddings", "yarn_beta_slow": "beta_slow",
}  # fmt: skip


def gguf_metadata(config) -> dict:
    said = {key: getattr(config, name, None) for key, name in GGUF_KEYS.items()}
    rope = config.rope_parameters
    said["rope.freq_base"] = rope["rope_theta"]
    if rope["rope_type"] in ("linear", "yarn"):
        said |= {f"rope.scaling.{key}": rope.get(name) for key, name in SCALING_KEYS.items()}
    arch = gguf_arch(config)
    found = {f"{arch}.{key}": value for key, value in said.items() if value is not None}
    return {"general.architecture": arch} | found


def random_blocks(number: int, N: int, K: int, std: float = 0.1) -> torch.Tensor:
    """Rows of blocks of random bits, but for scales that give the values this deviation."""
    kind, count = ggml.TYPES[number], HALVES.get(ggml.TYPES[number].name, 1)
    blocks = torch.randint(256, (N, K // kind.block, kind.nbytes), dtype=torch.uint8)
    start, scales = 208 if kind.name == "Q6_K" else 0, torch.randn(N, K // kind.block, count)
    for size in (1, None):
        size = size or std / numpy.std(dequantised(number, blocks.view(N, -1)).numpy())
        blocks[..., start : start + 2 * count] = (size * scales).half().view(torch.uint8)
    blocks[0, 0, start + 2 : start + 2 * count] = 0  # no minimum
    return blocks.view(N, -1)


def dequantised(number: int, raw: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(number)))


def expert_by_expert(model) -> dict:
    """The parameters of a model of transformers by name; w1 and w3 of experts are two of them, as
    in files."""
    found = {}
    for name, value in model.state_dict().items():
        if name.endswith("gate_up_proj"):
            for part, of_part in zip(("gate", "up"), value.chunk(2, 1)):
                found[name.replace("gate_up", part) + ".weight"] = of_part
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = value
        else:
            found[name] = value
    return found


def gguf_arch(config) -> str:
    return {"mixtral": "llama", "qwen3_moe": "qwen3moe"}.get(config.model_type, config.model_type)


def gguf_tensors(model, kinds=()) -> dict:
    """A file's tensors: those of a model, but random blocks of the types with these numbers for
    matrices, in turn."""
    c, found, kinds = model.config, {}, itertools.cycle(kinds)
    numbers = {arch: number for number, arch in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[gguf_arch(c)], 99)
    for name, value in expert_by_expert(model).items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        stored = value
        if value.dim() > 1 and not name.endswith("mlp.gate.weight"):
            number = next(kinds, None)
            if number is not None:
                raw = random_blocks(number, value.shape[:-1].numel(), value.shape[-1])
                stored = number, raw.view(*value.shape[:-1], -1)
        found[names.get_name(name, (".weight", ".bias"))] = stored
    # the plain frequencies over those of transformers
    if c.rope_parameters["rope_type"] == "llama3":
        scaled = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](c, "cpu")[0]
        plain = c.rope_parameters["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
        found["rope_freqs.weight"] = plain / scaled
    return found


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory) -> tuple[dict, dict]:
    """Metadata and tensors of a llama of which most tests change something."""
    model = hugging_face_model(259, **FAMILIES["gqa"], eos_token_id=258, bos_token_id=None)
    return gguf_metadata(model.config) | BYTES, gguf_tensors(model.half())


@pytest.mark.parametrize("number", QUANTS, ids=lambda number: QUANTS[number].name)
def test_gguf_types_are_decoded(number):
    """Every bit. Scales that are not finite are refused."""
    kind, raw = QUANTS[number], random_blocks(number, 5, 768, std=1.0)
    assert kind.name == gguf.GGMLQuantizationType(number).name
    assert torch.equal(quantised.from_blocks(kind, raw).decoded(), dequantised(number, raw))
    if kind.name.endswith("K"):
        raw[1, 4:16] = raw[1, 192:208] = 255  # scales of groups
    start = 208 if kind.name == "Q6_K" else 0
    for bad, half in itertools.product((NAN, INF), range(HALVES.get(kind.name, 1))):
        spoiled, at = raw.clone(), start + 2 * half
        spoiled[1, at : at + 2] = torch.tensor([bad]).half().view(torch.uint8)
        with pytest.raises(ValueError, match="a scale that is NaN or infinite"):
            quantised.checked(quantised.from_blocks(kind, spoiled))


def test_other_gguf_types_are_named():
    kinds = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert {n: name for n, name in kinds.items() if n not in ggml.TYPES} == ggml.OTHER_TYPES


def stored_in(format, N: int, K: int):
    """Blocks of each kind that a format keeps exactly, and what they stand for."""
    if format in others.EXACT:
        for number in (n for n, kind in QUANTS.items() if kind.name in others.EXACT[format]):
            raw = random_blocks(number, N, K)
            exact = dequantised(number, raw).to(DEVICE)
            yield quantised.from_blocks(QUANTS[number], raw.to(DEVICE)), exact
        return
    if format is others.E4M3_128:
        codes, zero = E4M3.round(torch.randn(N, K) * 100), None
        scale = torch.rand(N, K // 128) + 0.1
        values = (E4M3.floats(codes).unflatten(1, (-1, 128)) * scale[..., None]).flatten(1)
    else:
        codes, scale, zero, values = codes_of(N, K, format.group)
    found = (codes.to(torch.int8), scale.float(), zero)
    codes, scale, zero = (None if t is None else t.to(DEVICE) for t in found)
    yield others.Quantised(codes, scale, zero=zero), values.to(DEVICE)


@pytest.mark.parametrize("format", FILE_FORMATS, ids=lambda format: format.name)
def test_products_with_gguf_and_safetensors_formats(format):
    """Matrices bit for bit; the kernels' products with one token, a few and a prompt, and torch's
    own on a CPU."""
    N, K, errors = 48, 768, {}
    # a GPU adds up a token's products in half precision, whose error varies
    drawn = [kind for _ in range(8 if ON_GPU else 1) for kind in enumerate(stored_in(format, N, K))]
    halves, bf16 = torch.float16, torch.bfloat16
    for kind, (blocks, exact) in drawn:
        w = Matrix(format.empty(N, K, DEVICE), format)
        format.write(blocks, w.tensors)
        assert torch.equal(w.dense(), exact)
        for T, dtype in ((1, halves), (1, bf16), (3, halves), (20, halves)):
            x = randn(T, K, dtype=dtype)
            y = kernels.linear_add(x, w, torch.zeros(T, N, dtype=dtype, device=DEVICE))
            errors.setdefault((kind, T, dtype), []).append(nmse(y, x.float() @ exact.t()))
    for (kind, T, dtype), found in errors.items():
        assert sum(found) / len(found) < 2 * ONE_UNIT[dtype], (kind, T, found)
    if laid_out := format.cpu_layout(tuple(t.cpu() for t in w.tensors)):
        x = torch.randn(1, K).bfloat16()
        y = format.cpu_layout_linear(x, laid_out)
        assert nmse(y, x.float() @ exact.cpu().t()) < 2 * ONE_UNIT[torch.bfloat16]


@pytest.mark.parametrize("kinds, columns, most_bits, name", [
    ("Q4_K", 512, 8, "q4_k"), ("Q5_K", 512, 8, "q6_k"), ("Q4_K Q6_K", 512, 8, "q6_k"),
    ("Q4_0 Q5_0", 96, 8, "q8_0"),
    ("Q4_0 Q4_1", 96, 8, "q8_1"), ("Q4_0 Q6_K", 512, 8, None), ("Q6_K F16", 512, 8, None),
    ("Q6_K", 384, 8, None), ("IQ4_NL", 96, 8, "q8_0"), ("IQ4_XS Q5_K", 512, 8, "q8_k"),
    ("Q4_K", 512, 4, "q4_k"), ("Q6_K", 512, 4, None),
])  # fmt: skip
def test_format_of_joined_matrices(kinds, columns, most_bits, name):
    """None: they are decoded, as those of more bits are on a CPU, and those cut in the middle of a
    block."""
    types = {kind.name: kind for kind in QUANTS.values()}
    found = quantised.format_for({types.get(kind) for kind in kinds.split()}, columns, most_bits)
    assert (found and found.name) == name


def loader_of(model, format="held", ranks: Ranks = Ranks()) -> Loader:
    """Of a model's checkpoint, in a format; "held": as the file holds it."""
    c = model.config.cut(ranks.size)
    if format == "held":
        formats = formats_as_stored(model.checkpoint.tensors, c, 8)
    else:
        formats = formats_of(c, format)
    types = (torch.float32, torch.float32, torch.device("cpu"))
    return Loader(model.checkpoint, *types, formats, "torch", ranks, quiet=True)


def loaded(model, format="held", ranks: Ranks = Ranks()):
    """A rank's weights."""
    return loader_of(model, format, ranks).load()


def assert_two_ranks_have(model, layer, format="held") -> None:
    """Each its share of every expert."""
    parts = [loaded(model, format, Ranks(rank, 2)).layers[1] for rank in (0, 1)]
    experts = max(1, model.config.n_experts)
    for name, count, axis in (("w2", experts, 2), ("w13", experts, 1), ("wo", 1, 2)):
        dense = [getattr(part, name).dense().unflatten(0, (count, -1)) for part in (*parts, layer)]
        assert torch.equal(torch.cat(dense[:2], axis), dense[2]), name


OF_BYTES = dict(eos_token_id=258, bos_token_id=None)
WIDE = dict(hidden_size=256, intermediate_size=512, moe_intermediate_size=512, head_dim=64)


def give_blocks(theirs, tensors: dict) -> None:
    """Give a model of transformers, which reads no files with experts, what a file's tensors stand
    for. In files of the llamas the rows of q and k are in another order: neighbours are a pair."""
    for stored, parameters in zip(tensors.values(), expert_by_expert(theirs).values(), strict=True):
        if isinstance(stored, tuple):
            parameters.copy_(dequantised(*stored).view(parameters.shape))
    if gguf_arch(theirs.config) != "llama":
        return
    for layer in theirs.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            heads = linear.weight.data.unflatten(0, (-1, 32, 2))
            linear.weight.data = heads.transpose(1, 2).flatten(0, 2)


@pytest.mark.parametrize("family", [
    "llama 3.2", "granite code", "qwen 2.5, tied, longer", "qwen 3", "mixtral", "qwen 3 moe",
])  # fmt: skip
def test_gguf_models_equal_transformers(tmp_path, cli, family, monkeypatch):
    """Of all types, mixed also among wq, wk and wv; whole and by ranks, a few rows at a time."""
    monkeypatch.setattr(quantised, "AT_ONCE", 50 * 256)
    theirs = hugging_face_model(259, **FAMILIES[family] | WIDE | OF_BYTES)
    kinds = random.sample([number for number in QUANTS if number != 12], len(QUANTS) - 1)
    # Q4_K, of the second layer's wo: of each of its blocks of 256, a rank would have a half
    kinds.insert(1, 12)
    metadata, tensors = gguf_metadata(theirs.config) | BYTES, gguf_tensors(theirs, kinds)
    file = write_gguf(tmp_path / "a.gguf", metadata, tensors)
    has_experts = FAMILIES[family].get("num_experts_per_tok")
    if has_experts:
        give_blocks(theirs, tensors)
    else:
        read_gguf(theirs, file)
    ours = assert_equals_transformers(file, theirs)
    every_type = "IQ4_NL, IQ4_XS, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K and Q8_0"
    assert ours.checkpoint.quantised == every_type
    assert (ours.config.dtype, ours.config.eos_ids) == (torch.bfloat16, (258, 257))
    whole, decoded = loaded(ours), loaded(ours, None)
    for one, other in zip(whole.matrices, decoded.matrices, strict=True):
        assert torch.equal(one.dense(), other.dense()) and not other.format, one.format
    assert all(layer.wo.format and layer.w2.format for layer in whole.layers)
    if ours.config.n_kv_heads > 1:
        assert_two_ranks_have(ours, whole.layers[1])
    if has_experts:
        name = "blk.1.ffn_down_exps.weight"
        count, (number, raw) = ours.config.n_experts, tensors[name]
        monkeypatch.setattr(quantised, "AT_ONCE", 3 * 256 * 512)
        loader = loader_of(ours)
        for t in layer_tensors(ours.config)[-2:]:
            tensor = loader.checkpoint.tensors[t.name]
            pieces = list(tensor.quantised(loader.rows(t), ALL, quantised.AT_ONCE))
            at_once = -(-count // 3)
            assert len(pieces) == len(t.parts) * at_once, "three experts are converted at once"
        for one, other in zip(loaded(ours).matrices, whole.matrices, strict=True):
            assert torch.equal(one.dense(), other.dense())
        write_gguf(file, metadata, tensors | {name: (number, raw[:-1])})
        few = f"{name} is [{count - 1}, 256, 512], expected [{count}, 256, 512]"
        assert_refused(cli("-m", file, "-p", "a"), few)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gguf_of_floats_is_as_any_checkpoint(tmp_path, cli, dtype):
    """It may be encoded, and saved so, with its tokenizer and its scaling of RoPE."""
    theirs = hugging_face_model(259, num_key_value_heads=2, rope_parameters=RAMP, **OF_BYTES)
    for parameter in theirs.parameters():
        parameter.data = parameter.to(dtype).float()
    # norms and factors are in fp32
    tensors = {n: t.to(dtype) if t.dim() == 2 else t for n, t in gguf_tensors(theirs).items()}
    template = {"tokenizer.chat_template": "{{ messages[0].content }}</s>"}
    metadata = gguf_metadata(theirs.config) | BYTES | template
    file = write_gguf(tmp_path / "a.gguf", metadata, tensors)
    read_gguf(theirs, file)
    theirs.save_pretrained(tmp_path / "original")
    plain, options = assert_equals_transformers(file, theirs), dict(dtype="fp32", device="cpu")
    assert plain.checkpoint.dtype == dtype and plain.checkpoint.quantised == ""
    encoded, original = (
        load(name, format="e4m3", **options) for name in (file, tmp_path / "original")
    )
    codes, same = (model.weights.layers[1].wqkv.tensors[0] for model in (encoded, original))
    assert torch.equal(codes, same)
    assert cli("-m", file, "--fp8", "--save", tmp_path / "saved", "--quiet")[:2] == (0, "")
    saved = load(tmp_path / "saved", **options)
    assert saved.config.rope_factors and saved.config.eos_ids == (258, 257)
    assert_close(logits_of(saved, range(40)), logits_of(encoded, range(40)), 1e-6)
    for chat in (conversation("Größe 🙂"), conversation("ab</s>")):
        ids = [Tokenizer(path).apply_chat_template(chat) for path in (tmp_path / "saved", file)]
        assert ids[0] == ids[1]


def test_gguf_from_the_command_line(tmp_path, cli):
    """The same text from a file, its folder, links and parts; a second loss is refused."""
    model = hugging_face_model(259, intermediate_size=128, **OF_BYTES)
    metadata, tensors = gguf_metadata(model.config) | BYTES, gguf_tensors(model, (2, 8))
    one = tmp_path / "one"
    one.mkdir()
    file = write_gguf(one / "a.gguf", metadata, tensors)
    (one / "mmproj-a.gguf").touch()  # of a model that sees, and no model of its own
    (tmp_path / "parts").mkdir()
    parts = [tmp_path / f"parts/t-0000{i}-of-00002.gguf" for i in (1, 2)]
    split = {"split.count": numpy.uint16(2), "split.tensors.count": len(tensors)}
    for i, about in enumerate((metadata, {"general.architecture": "llama"})):
        about = about | split | {"split.no": numpy.uint16(i)}
        write_gguf(parts[i], about, dict([*tensors.items()][i::2]))
    run_it = lambda name: cli("-m", name, "-p", "ab", "-n", 9, "-s", 1, "--dtype", "fp32")
    expected = run_it(file)[1]
    said = "fp32 with q4_0 matrices (Q4_0 and Q8_0 in the file; others as floats)"
    for name in (file, one, tmp_path / "parts", parts[1]):
        code, out, err = run_it(name)
        assert (code, out) == (0, expected), err
        assert f"running   {said} on cpu" in err and err.endswith(f"GB; {said}\n"), err
    lossy = "would lose precision a second time"
    for more in ["-p", "a", "--fp8"], ["-p", "a", "--int4"], ["--int4", "--save", tmp_path / "new"]:
        its = "a.gguf: its matrices are Q4_0 and Q8_0, and"
        assert_refused(cli("-m", file, *more), its, lossy)
    assert not (tmp_path / "new").exists()
    shutil.copy(file, one / "other.gguf")
    assert_refused(run_it(one), "holds several models: take one of a.gguf, other.gguf")
    (one / "other.gguf").unlink()
    (tmp_path / "link.gguf").symlink_to(file)
    file.rename(tmp_path / "sha256-00")  # as Ollama names it
    file.symlink_to("../sha256-00")
    for name in ("link.gguf", "sha256-00", "one/a.gguf", "one"):
        assert run_it(tmp_path / name)[:2] == (0, expected)
    # a template may be chosen by it
    assert local_checkpoint(str(tmp_path / "link.gguf")).name == "link.gguf"
    for missing, asked in itertools.permutations(parts):
        kept = missing.rename(tmp_path / "x.gguf")
        assert_refused(run_it(asked), "No such file", missing.name)
        kept.rename(missing)
    named = "is one of 2 shards: its name must end in -00001-of-00002.gguf"
    assert_refused(run_it(parts[1].rename(tmp_path / "second.gguf")), named)


def test_a_gguf_folder_beside_the_program(tmp_path, monkeypatch):
    file = tmp_path / "beside/models/x/a.gguf"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.setattr("loading.hub.ROOT", tmp_path / "beside")
    monkeypatch.chdir(tmp_path)
    assert local_checkpoint("models/x") == file


def test_gguf_of_the_hub(hub, tmp_path, monkeypatch, small_gguf):
    """As llama.cpp picks it, and nothing else is downloaded."""
    raw = write_gguf(tmp_path / "a.gguf", *small_gguf).read_bytes()
    names = "a-IQ4_K_M.gguf a-Q2_K.gguf a.Q8_0.gguf q/a-q4_k_m.gguf a-mmproj-Q4_K_M.gguf"
    names += " config.json"
    # the library knows a file by its hash
    hub.files = {name: raw + bytes(i) for i, name in enumerate(names.split())}
    place = lambda kind: load(f"someone/tiny{kind}", device="cpu").checkpoint.folder
    kinds = {"": "q/a-q4_k_m.gguf", ":q8_0": "a.Q8_0.gguf", ":Q2_K": "a-Q2_K.gguf"}
    for kind, wanted in kinds.items():
        hub.asked.clear()
        file = place(kind)
        assert str(file).endswith(wanted) and Tokenizer(file).encode("ab")[-1] == 256
        assert hub.fetched() == [Path(wanted).name]
        assert place(kind) == file and not hub.asked
    # another program has cached it, too
    (file.parent / "config.json").write_text('{"model_type": "llama"}')
    set_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
    assert place(":Q8_0").name == "a.Q8_0.gguf" and place("").name == "a-q4_k_m.gguf"
    next((tmp_path / "cache").rglob("a-q4_k_m.gguf")).unlink()
    assert place("").name == "a.Q8_0.gguf", "what there is"
    assert pick_gguf(["b.Q8_0.gguf", "a.IQ2_M.gguf", "b.F16.gguf"], "") == ["b.F16.gguf"]
    parts = [f"m-Q6_K-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert pick_gguf(["n-Q6_K.gguf", *parts], "Q6_K") == parts


def test_gguf_header_holds_every_type_of_value(tmp_path):
    types = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    metadata = {name: numpy.dtype(name).type(7) for name in types}
    metadata |= {
        "general.architecture": "llama", "general.alignment": 4096, "a": numpy.float32(1e-5),
        "b": numpy.float32(1 / 3), "float64": numpy.float64(0.1), "yes": True,
        "text": "Größe 🙂\0", "": "empty", "strings": ["", "a\0b", "ü" * 300, ""],
        "ints": [-1, 2], "floats": [0.5, 2.5], "flags": [True, False],
    }  # fmt: skip
    tensors = {f"t{i}": torch.ones(i + 1) for i in range(3)}
    header = ggml.read_header(write_gguf(tmp_path / "a.gguf", metadata, tensors))
    for key, value in metadata.items():
        got = header.metadata[key]
        assert (got.tolist() if isinstance(got, memoryview) else got) == value, key
    sizes = [(info.offset % 4096, info.nbytes) for info in header.tensors.values()]
    assert sizes == [(0, 4), (0, 8), (0, 12)]


def by_hand(tensors=(), metadata=(), version=3, counts=None, data=b"\0" * 4096) -> bytes:
    """A file. metadata: (key, type, bytes); tensors: (name, dims, type, offset)."""
    header = b"GGUF" + struct.pack("<IQQ", version, *counts or (len(tensors), len(metadata)))
    for key, kind, value in metadata:
        header += string(key) + struct.pack("<I", kind) + value
    for name, dims, kind, offset in tensors:
        header += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return header + b"\0" * (-len(header) % 32) + data


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


HUGE = 1 << 62


# a file, or what is put into the metadata or among the tensors, None to leave it out: what the line
# says
BAD_GGUF = {
    "empty": (b"", "is not a GGUF file"),
    "a pointer of git-lfs": (POINTER.encode(), "is a git-lfs pointer"),
    "version 1": (by_hand(version=1), "has GGUF's version 1, which is not supported"),
    "count of values": (by_hand(counts=(0, HUGE), data=b""), "cut off"),
    "count of tensors": (by_hand(counts=(HUGE, 0), data=b""), "cut off"),
    "string beyond the file": (by_hand(metadata=[(b"a", 8, struct.pack("<Q", 5000))]), "a string lies outside its"),
    "count of an array": (by_hand(metadata=[(b"a", 9, struct.pack("<IQ", 0, HUGE))]), "an array lies outside its"),
    "count of strings": (by_hand(metadata=[(b"a", 9, struct.pack("<IQ", 8, HUGE))]), "cut off"),
    "array of arrays": (by_hand(metadata=[(b"a", 9, struct.pack("<IQ", 9, 1))]), "values of the unknown type 9"),
    "unknown value": (by_hand(metadata=[(b"a", 13, b"")]), "values of the unknown type 13"),
    "not UTF-8": (by_hand(metadata=[(b"a", 8, string(b"\xff\xfe"))]), "can't decode"),
    "no dimensions": (by_hand([(b"a", (), 0, 0)]), "a has 0 dimensions"),
    "5 dimensions": (by_hand([(b"a", (1,) * 5, 0, 0)]), "a has 5 dimensions"),
    "a dimension of 0": (by_hand([(b"a", (32, 0), 0, 0)]), "has the shape"),
    "part of a block": (by_hand([(b"a", (48,), 8, 0)]), "has the shape [48], of type Q8_0"),
    "dimensions that overflow": (by_hand([(b"a", (1 << 32, 1 << 32), 0, 0)]), "a lies outside it"),
    "beyond the end": (by_hand([(b"a", (1025,), 0, 0)]), "a lies outside it"),
    "overlap": (by_hand([(b"a", (1024,), 0, 0), (b"b", (1024,), 0, 0)]), "its tensors overlap"),
    "control characters": (
        by_hand([(b"a\n\x1b[31m", (8,), 99, 0)]), "a ?[31m is unknown type 99, which is not supported"
    ),
    "another type": (by_hand([(b"w", (256,), 39, 0)]), "w is MXFP4, which is not supported: take a file of F32"),
    "another architecture": ({"general.architecture": "gemma3"}, "architecture is 'gemma3', which is not supported"),
    "experts without their number a token": ({"llama.expert_count": 8}, "lacks the field num_experts_per_tok"),
    "no experts": (
        {"llama.expert_count": 8, "llama.expert_used_count": 2}, "config: blk.0.ffn_gate_inp.weight is missing",
    ),
    "experts of others": ({"general.architecture": "mistral", "mistral.expert_count": 8}, "experts of 'mistral' are"),
    "both directions": ({"llama.attention.causal": False}, "is_causal is False, which is not supported"),
    "no block_count": ({"llama.block_count": None}, "lacks the field num_hidden_layers"),
    "size in words": ({"llama.block_count": "two"}, "num_hidden_layers is 'two'; it must be a whole number"),
    "sizes": ({"llama.feed_forward_length": [9, 9]}, "; it must be a whole number"),
    "part of RoPE": ({"llama.rope.dimension_count": 8}, "rope.dimension_count differ: [16, 16, 8]"),
    "scaling": ({"llama.rope.scaling.type": "longrope"}, "rope_type is 'longrope', which is supported with"),
    "types of others": ({"tokenizer.ggml.token_type": [1, 2]}, "must have a number of 32 bits for each of the 259"),
    "tokens of numbers": ({"tokenizer.ggml.tokens": [1, 2]}, "tokens is an array, a value of the wrong type"),
    "a token twice": ({"tokenizer.ggml.tokens": ["a"] * 259}, "has the token 'a' twice"),
    "no pre-tokenizer": ({"tokenizer.ggml.pre": None}, "lacks tokenizer.ggml.pre"),
    "another pre-tokenizer": ({"tokenizer.ggml.pre": "viking"}, "pre is 'viking', which is not supported"),
    "another tokenizer": ({"tokenizer.ggml.model": "bert"}, "model is 'bert', which is not supported"),
    "an id beyond the tokens": ({"tokenizer.ggml.eos_token_id": 259}, "eos_token_id is [259, 257, 258]; it must"),
    "no merges": ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges"),
    "no embedding": ({"token_embd.weight": None}, "lacks the tensor token_embd.weight"),
    "quantised norm": ({"output_norm.weight": (8, torch.zeros(68, dtype=torch.uint8))}, "is [64] in another type"),
    "NaN": ({"output.weight": (8, torch.full((259, 68), 255, dtype=torch.uint8))}, "output.weight has a scale"),
    "many factors": ({"rope_freqs.weight": torch.ones(513)}, "rope_freqs.weight has more than 512 factors"),
    "more tokens than rows": ({"tokenizer.ggml.tokens": ["a"] * 260}, "has 260 tokens, but the model has a vocabulary"),
    "a key twice": (by_hand(metadata=[(b"a", 0, b"1")] * 2), "damaged: it has 'a' twice"),
    "a tensor twice": (by_hand([(b"a", (8,), 0, 0), (b"a", (8,), 0, 32)]), "damaged: it has a twice"),
    "a header of zeros": (by_hand(counts=(0, 1 << 30), metadata=[(b"a", 0, b"1")]), "has '' twice"),
    "7 factors": ({"rope_freqs.weight": torch.ones(7)}, "7 factors of RoPE; a head_dim of 16 needs half as many"),
    "halves as factors": ({"rope_freqs.weight": torch.ones(8).half()}, "rope_freqs.weight is F16; it must be F32"),
    **{f"factors of {x}": ({"rope_freqs.weight": torch.tensor([1.0] * 7 + [x])}, "must be finite and above 0")
       for x in (0.0, -1.0, NAN, INF)},
}  # fmt: skip


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_gguf_tokens_that_end_an_answer(tmp_path, small_gguf, kind):
    """Control tokens by their text, whatever their type, as measured in llama.cpp's server."""
    ends = ["<|end|>", "<end_of_turn>", "<eos>", "[EOS]", "[EOT]", "<|fim_pad|>", "<|file_sep|>"]
    others = ["<|EOT|>", "<|end_of_turn|>", "<file_sep>"]
    metadata, tensors = small_gguf
    tokens = ["a", "b", "ab", *ends, *others, *map(str, range(246))]
    about = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 3 + [kind] * 10 + [1] * 246,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.fim_rep_token_id": 1,
    }
    file = write_gguf(tmp_path / "a.gguf", metadata | about, tensors)
    config = read_config(file)
    assert config.eos_ids == (0, 1, *range(3, 10))
    tokenizer = Tokenizer(file, config.vocab_size)
    assert {*ends} <= tokenizer.control.keys() and tokenizer.decode([*range(3, 10)]) == ""


@pytest.mark.parametrize("how", BAD_GGUF)
def test_bad_gguf_is_one_line(cli, tmp_path, small_gguf, how):
    file, (bad, message) = tmp_path / "a.gguf", BAD_GGUF[how]
    if isinstance(bad, bytes):
        file.write_bytes(bad)
    else:
        parts = [dict(part) for part in small_gguf]
        for key, value in bad.items():
            part = parts[key.endswith(".weight")]
            part[key] = value
            if value is None:
                del part[key]
        write_gguf(file, *parts)
    said = cli("-m", file, "-p", "a", "-n", 1, "--quiet", "--no-display-prompt")
    assert_refused(said, "a.gguf", message)


ROPE, LINEAR8 = "rope.scaling.", (8.0,) * 8
YARN_GGUF = {f"{ROPE}type": "yarn", f"{ROPE}factor": 8.0, f"{ROPE}original_context_length": 64}
DIVISORS = torch.linspace(1, 8, 8)
IDS = "tokenizer.ggml."
# what llama.cpp's converter writes beside the sizes (the names of the first block follow that of
# the family; None: it was left out), and what of our Config follows from it
GGUF_FIELDS = [
    ({}, dict(rope_theta=5e5, rope_factors=(), rope_gain=1, norm_eps=1e-6, head_dim=16,
              max_seq_len=256, sliding_window=None, eos_ids=(258, 257), bos_id=None)),
    ({"rope.freq_base": None}, dict(rope_theta=1e4)),
    ({"rope.freq_base": 1e6}, dict(rope_theta=1e6)),
    ({"attention.layer_norm_rms_epsilon": 1e-5}, dict(norm_eps=1e-5)),
    ({"attention.head_count_kv": None}, dict(n_kv_heads=4)),
    ({"attention.sliding_window": 64}, dict(sliding_window=64)),
    ({"attention.sliding_window": 0}, dict(sliding_window=None)),
    ({"rope.dimension_count": 16, "vocab_size": 259}, dict(head_dim=16, vocab_size=259)),
    ({f"{ROPE}factor": 8.0}, dict(rope_factors=LINEAR8, rope_gain=1)),
    ({"rope.scale_linear": 8.0}, dict(rope_factors=LINEAR8, rope_gain=1)),
    ({f"{ROPE}type": "linear", f"{ROPE}factor": 1.0}, dict(rope_factors=())),
    ({f"{ROPE}type": "none", f"{ROPE}factor": 8.0}, dict(rope_factors=())),
    ({f"{ROPE}attn_factor": 0.5}, dict(rope_factors=(), rope_gain=0.5)),
    (YARN_GGUF, dict(rope_gain=1 + 0.1 * 2.0794415416798357)),
    (YARN_GGUF | {f"{ROPE}attn_factor": 0.5}, dict(rope_gain=0.5 + 0.05 * 2.0794415416798357)),
    ({f"{IDS}bos_token_id": 3, f"{IDS}eot_token_id": 0}, dict(bos_id=3, eos_ids=(258, 0, 257))),
    ({f"{IDS}eos_token_id": None, f"{IDS}eom_token_id": 5}, dict(eos_ids=(5, 257, 258))),
    ({f"{IDS}add_bos_token": True, "general.file_type": 1, "general.quantization_version": 2,
      "general.name": "x", f"{IDS}padding_token_id": 4}, dict(bos_id=None, eos_ids=(258, 257))),
]  # fmt: skip


@pytest.mark.parametrize("said, expected", GGUF_FIELDS, ids=lambda value: str(value)[:60])
def test_gguf_fields_of_llama_cpps_writer(tmp_path, small_gguf, said, expected):
    metadata, tensors = small_gguf
    full = lambda key: key if key.startswith(("tokenizer", "general")) else f"llama.{key}"
    about = metadata | {full(key): value for key, value in said.items()}
    about = {key: value for key, value in about.items() if value is not None}
    config = read_config(write_gguf(tmp_path / "a.gguf", about, tensors))
    for name, value in expected.items():
        value = value if isinstance(value, tuple) else pytest.approx(value)
        assert getattr(config, name) == value, f"llama.cpp takes {name} for something else"
    with_factors = tensors | {"rope_freqs.weight": DIVISORS}
    both = read_config(write_gguf(tmp_path / "b.gguf", about, with_factors)).rope_factors
    plain = torch.tensor(config.rope_factors or (1.0,) * 8)
    assert torch.tensor(both).equal(plain * DIVISORS), "as llama.cpp multiplies"


GGUF_TEXTS = [
    "Once upon a time", "", " ", "  two  spaces ", "\n\n\tdef f(x):\n        return x+1\r\n",
    "I'll can't WE'VE don'T",
    "once upon", "upon us", "up on", "3.14159 and 1234567 ½ ²³ ٣٤",
    "Größe, naïve café: ÀÉ 日本語テキスト 한국어 العربية हिन्दी",
    "🙂👩‍👩‍👧 ok", "a+b=c <x> ~^|`", "CamelCaseWords HTTPServer x_1", "e\u0301 \u1e9b\u0323",
    "</s><|im_end|>[INST]",
    "\u00a0\u3000 ", "…—‘quoted’",
]  # fmt: skip


def test_gguf_sentencepiece(tmp_path):
    """The same as the tokenizer.model. Fine-tuned models have control tokens and text beyond it,
    unknown ones to fill it up, and bos not added."""
    folder = HERE / "models/tales"
    original = Tokenizer(folder)
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]

    def tokenizer(size: int, about: dict, **more) -> Tokenizer:
        known = {"general.architecture": "llama", "tokenizer.chat_template": template}
        known |= sentencepiece_metadata(folder / "tokenizer.model", **more)
        return Tokenizer(write_gguf(tmp_path / "a.gguf", known | about, {}), size)

    ours = tokenizer(4096, {})
    for text in GGUF_TEXTS:
        assert ours.encode(text) == original.encode(text)
        assert encode_after(ours, text) == encode_after(original, text)
        assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))
    assert (ours.bos, ours.eos, ours.control) == (1, 2, original.control)
    chat = conversation("Hello </s>", "Hello </s>", "Hello </s>", system="Hello </s>")
    assert ours.apply_chat_template(chat) == original.apply_chat_template(chat)
    more = {"<|im_start|>": 3, "<|im_end|>": 3, "<think>": 4, "[PAD4099]": 2, "[PAD4100]": 2, "": 5}
    about = {f"{IDS}add_bos_token": False, f"{IDS}add_space_prefix": False}
    ours = tokenizer(4102, about | {f"{IDS}eos_token_id": 4097}, **more)
    assert (ours.bos, ours.eos) == (1, 4097)
    assert ours.control.keys() == {"<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"}
    assert ours.control["<|im_start|>"] == 4096
    assert 4098 in ours.encode("so <think> hm") and 4097 not in ours.encode("<|im_end|>")
    assert ours.decode([4097, *ours.encode("a b")]) == "a b" and not ours.vocabulary.adds_space


WORD, REST = r"[^\r\n\p{L}\p{N}]?", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA_3 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{REST}"
WORDS = rf"{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*"
TEKKEN = rf"{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{REST}"
SPLITS = {
    "llama-bpe": [LLAMA_3], "qwen2": [LLAMA_3.replace("{1,3}", "")], "tekken": [TEKKEN],
    "smollm": None, "refact": None, "gpt-2": None, "smaug-bpe": [LLAMA_3],
    "seed-coder": [LLAMA_3.replace("{1,3}", "").replace("]+[\\r\\n]*", "]+")],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
}  # fmt: skip


@pytest.mark.parametrize("name", SPLITS)
def test_gguf_byte_pairs(name, tmp_path):
    """The same ids as a tokenizer.json trained on a little text."""
    # ignore merges, and add bos unless the file says otherwise
    always = name in ("llama-bpe", "tekken")
    pre = tokenizers.pre_tokenizers
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=SPLITS[name] is None)
    patterns = [tokenizers.Regex(pattern) for pattern in SPLITS[name] or ()]
    first = [pre.Split(pattern, "isolated") for pattern in patterns] or [pre.Digits(True)]
    splits = byte_level if name == "gpt-2" else pre.Sequence([*first, byte_level])
    raw = train_byte_pairs(splits, GGUF_TEXTS * 3, pre.ByteLevel.alphabet(), ignore_merges=always)
    merges = [pair for pair in raw["model"]["merges"] if "".join(pair) != "Ġupon"]
    raw["model"]["merges"] = merges
    own = tokenizers.Tokenizer.from_str(json.dumps(raw))
    if name == "qwen2":
        own.normalizer = tokenizers.normalizers.NFC()
    own.add_special_tokens(["<|im_end|>", "<|endoftext|>"])
    own.add_tokens(["<think>", "~x~"])
    kinds = {"<|im_end|>": 3, "<|endoftext|>": 3, "<think>": 4, "~x~": 4}
    tokens = [*map(own.id_to_token, range(own.get_vocab_size())), "[PAD9]"]
    size = len(tokens) - 1
    metadata = {"general.architecture": "llama"} | BYTES | {
        f"{IDS}pre": name,
        f"{IDS}tokens": tokens,
        f"{IDS}token_type": [kinds.get(token, 1) for token in tokens[:-1]] + [5],
        f"{IDS}merges": [" ".join(pair) for pair in merges],
        f"{IDS}bos_token_id": own.token_to_id("<|endoftext|>"),
        f"{IDS}eos_token_id": own.token_to_id("<|im_end|>"),
    }  # fmt: skip
    ours = Tokenizer(write_gguf(tmp_path / "a.gguf", metadata, {}), size + 1)
    letters = "".join(GGUF_TEXTS)
    for text in GGUF_TEXTS + ["".join(random.choices(letters, k=100)) for _ in range(30)]:
        ids = own.encode(text, add_special_tokens=False).ids
        assert ours.vocabulary.encode_chat(text, ours._control_in(text), after=False) == ids, text
        assert "<" in text or ours.encode(text, bos=False) == ids
        assert ours.decode(ids) == own.decode(ids, skip_special_tokens=True)
    assert ours.control.keys() == {"<|im_end|>", "<|endoftext|>", "<think>"}
    assert ours.bytes_of(own.token_to_id("~x~")) == b"~x~" and ours.bytes_of(size) == b""
    assert (own.token_to_id("Ġupon") in ours.encode("Once upon")) == always
    for said in (True, False, None):
        more = {} if said is None else {f"{IDS}add_bos_token": said}
        file = write_gguf(tmp_path / "b.gguf", metadata | more, {})
        adds = always if said is None else said
        assert (Tokenizer(file).encode("ab")[0] == ours.bos) == adds


# ---- others.py: quantised safetensors, packed as their formats' documents say


def words(codes: torch.Tensor, bits: int = 4, order=None) -> torch.Tensor:
    """Neighbouring codes of a row to an int32, the first in its lowest bits."""
    count = 32 // bits
    together = codes.long().unflatten(1, (-1, count))
    if order:
        together = together[..., order]
    return (together << bits * torch.arange(count)).sum(-1).to(torch.int32)


def codes_of(
    N: int, K: int, group: int, zeros=range(1, 17), dtype=torch.float16, bits: int = 4
) -> tuple:
    """Random codes [N, K], scales and zero points [N, K / group], and what they stand for."""
    codes = torch.randint(1 << bits, (N, K))
    scale = ((torch.rand(N, K // group) + 0.05) * 0.32 / (1 << bits)).to(dtype)
    zero = torch.tensor(zeros)[torch.randint(len(zeros), scale.shape)]
    values = (codes.unflatten(1, (-1, group)) - zero[..., None]) * scale.float()[..., None]
    return codes, scale, zero, values.flatten(1)


def pack_awq(N: int, K: int) -> tuple[dict, torch.Tensor]:
    codes, scale, zero, values = codes_of(N, K, 64, range(16))
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    qweight, qzeros = (words(t.t(), order=order) for t in (codes, zero))
    return dict(qweight=qweight, qzeros=qzeros, scales=scale.t()), values


def pack_gptq(N: int, K: int, group: int = 32, less: int = 1, zeros=range(16), bits: int = 4):
    """less: 1 in version 1, subtracted from whole words of zero points. group: 0 for one a row and
    no indices."""
    codes, scale, zero, values = codes_of(N, K, group or K, zeros, bits=bits)
    found = dict(qweight=words(codes, bits).t(), scales=scale.t(), bias=torch.zeros(N))
    ones = sum(1 << place for place in range(0, 32, bits))
    found["qzeros"] = words(zero.t(), bits) - less * ones
    if group:
        found["g_idx"] = torch.arange(K, dtype=torch.int32) // group
    return found, values


def pack_w4a16(N: int, K: int, symmetric: bool = True) -> tuple[dict, torch.Tensor]:
    zeros, dtype = ([8], torch.float16) if symmetric else (range(16), torch.bfloat16)
    codes, scale, zero, values = codes_of(N, K, 128, zeros, dtype)
    found = dict(weight_packed=words(codes), weight_scale=scale, weight_shape=torch.tensor([N, K]))
    return found | ({} if symmetric else {"weight_zero_point": words(zero.t()).t()}), values


def pack_fp8(scale: str, rows: int, columns: int, N: int, K: int) -> tuple[dict, torch.Tensor]:
    """rows, columns: of the weights that share a scale; 0: all of them."""
    weight = (torch.randn(N, K) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    one, (rows, columns) = not rows, (rows or N, columns or K)
    factors = torch.rand(-(-N // rows), -(-K // columns)) * 0.01
    spread = factors.repeat_interleave(rows, 0)[:N].repeat_interleave(columns, 1)[:, :K]
    stored = {scale: factors[0, 0] if one else factors, "input_scale": torch.ones(1)}
    return stored | {"weight": weight}, weight.float() * spread


def compressed_tensors(form: str, **weights) -> dict:
    usual = dict(actorder=None, block_structure=None, dynamic=False, observer="minmax")
    group = dict(targets=["Linear"], input_activations=None, output_activations=None)
    group["weights"] = usual | weights
    return dict(quant_method="compressed-tensors", format=form, config_groups={"group_0": group})


GPTQ = dict(quant_method="gptq", bits=4, group_size=32, desc_act=False)
PACKED = partial(
    compressed_tensors, "pack-quantized", num_bits=4, type="int", strategy="group", group_size=128
)
FLOAT_8 = partial(compressed_tensors, "float-quantized", num_bits=8, type="float", symmetric=True)


QUANTISED = {  # quantization_config, how a matrix is packed, the format that holds it
    "AWQ": (dict(quant_method="awq", bits=4, group_size=64, version="gemm"), pack_awq, others.WITH_ZEROS[64]),
    "GPTQ": (GPTQ, pack_gptq, others.WITH_ZEROS[32]),
    "GPTQ, version 2": (GPTQ | {"checkpoint_format": "gptq_v2"}, partial(pack_gptq, less=0), others.WITH_ZEROS[32]),
    "GPTQ, not of version 1": (GPTQ, partial(pack_gptq, less=0, zeros=[8]), others.WITH_ZEROS[32]),
    "GPTQ, not of version 2": (
        GPTQ | {"checkpoint_format": "gptq_v2"}, partial(pack_gptq, zeros=[8]), others.WITH_ZEROS[32],
    ),
    "GPTQ, a group a row": (GPTQ | {"group_size": -1}, partial(pack_gptq, group=0), others.WITH_ZEROS[128]),
    "GPTQ, 8 bits": (
        GPTQ | dict(bits=8, group_size=128, dynamic={"-:.*lm_head": {}}),
        partial(pack_gptq, group=128, zeros=[128], bits=8), others.Q8_0,
    ),
    "W4A16": (PACKED(), pack_w4a16, others.WITH_ZEROS[128]),
    "W4A16 with zero points": (
        PACKED(symmetric=False), partial(pack_w4a16, symmetric=False), others.WITH_ZEROS[128],
    ),
    "FP8, a scale each": (FLOAT_8(strategy="tensor"), partial(pack_fp8, "weight_scale", 0, 0), E4M3),
    "FP8, a scale a row": (FLOAT_8(strategy="channel"), partial(pack_fp8, "weight_scale", 1, 0), E4M3),
    "FP8, modelopt": (
        dict(quant_method="modelopt", quant_algo="FP8", ignore=["lm_head"]), partial(pack_fp8, "weight_scale", 0, 0),
        E4M3,
    ),
    "FP8, fbgemm": (dict(quant_method="fbgemm_fp8"), partial(pack_fp8, "weight_scale", 1, 0), E4M3),
    "FP8, blocks": (
        dict(quant_method="fp8", weight_block_size=[128, 128]), partial(pack_fp8, "weight_scale_inv", 128, 128),
        others.E4M3_128,
    ),
}  # fmt: skip


ALSO_SAID = {  # what the writer of each method says besides, as published checkpoints have it
    "awq": dict(
        zero_point=True, backend="autoawq", do_fuse=False, exllama_config=None,
        fuse_max_seq_len=None, modules_to_fuse=None, modules_to_not_convert=None,
    ),
    "gptq": dict(
        damp_percent=0.1, sym=True, true_sequential=True, static_groups=False, lm_head=False,
        pack_dtype="int32", meta={"quantizer": ["gptqmodel:5.0.0"]}, model_name_or_path=None,
        checkpoint_format="gptq",
    ),
    "compressed-tensors": dict(
        global_compression_ratio=1.5, ignore=["lm_head"], kv_cache_scheme=None, sparsity_config={},
        quantization_status="compressed", transform_config={}, version="0.11.0",
    ),
    "fp8": dict(activation_scheme="dynamic", fmt="e4m3", modules_to_not_convert=["lm_head"]),
    "modelopt": dict(kv_cache_scheme=None, producer={"name": "modelopt", "version": "0.33"}),
    "fbgemm_fp8": dict(activation_scale_ub=1200.0, modules_to_not_convert=["lm_head"]),
}  # fmt: skip


def write_quantised(folder: Path, how: str, **more):
    """A checkpoint in place of the tiny one; returns the model of transformers with the weights
    that it stands for."""
    about, pack, _ = QUANTISED[how]
    shape = dict(num_key_value_heads=2, hidden_size=128, intermediate_size=256)
    theirs = hugging_face_model(350, **shape | more).half()
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    decoded = {name: tensor.float() for name, tensor in tensors.items()}
    for name in [name for name in tensors if re.search(r"(_proj|\.w[123])\.weight$", name)]:
        stored, decoded[name] = pack(*tensors.pop(name).shape)
        stem = name.removesuffix("weight")
        tensors = {stem + key: value.contiguous() for key, value in stored.items()} | tensors
    save_file(decoded, folder / "model.safetensors", {"format": "pt"})
    theirs = type(theirs).from_pretrained(folder, dtype=torch.float32)
    (folder / "model.safetensors").unlink()  # not overwritten, since it may be mapped
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = ALSO_SAID[about["quant_method"]] | about
    edit(folder / "config.json", quantization_config=said)
    return theirs


@pytest.mark.parametrize("family, how", [
    *((None, how) for how in QUANTISED), ("mixtral", "AWQ"), ("qwen 3 moe", "GPTQ"), ("mixtral", "W4A16"),
    ("qwen 3 moe", "FP8, blocks"), ("qwen 2.5", "GPTQ"), ("granite code", "GPTQ"),
])  # fmt: skip
def test_quantised_safetensors_equal_transformers(copy, cli, family, how):
    """Matrices bit for bit, also as ranks have them; no second loss. A router is not quantised.
    GPTQ writes biases of zero for every matrix, but for those that the family has."""
    fields = FAMILIES[family] | dict(moe_intermediate_size=256, head_dim=32) if family else {}
    theirs, format = write_quantised(copy, how, **fields), QUANTISED[how][2]
    ours, exact = assert_equals_transformers(copy, theirs), theirs.model.layers[1].mlp
    weights = loaded(ours)
    # which is slow there
    on_cpu = None if format in (others.E4M3_128, others.Q8_0) else format
    layer = weights.layers[1]
    assert {m.format for m in (layer.wqkv, layer.wo, layer.w13, layer.w2)} == {format}
    assert not weights.output.format and ours.weights.layers[1].w2.format is on_cpu
    if hasattr(exact, "experts"):
        assert layer.router.format is None and torch.equal(layer.router.data, exact.gate.weight)
        gate_up, down = exact.experts.gate_up_proj, exact.experts.down_proj
    else:
        gate_up = torch.cat((exact.gate_proj.weight, exact.up_proj.weight))[None]
        down = exact.down_proj.weight[None]
    assert torch.equal(layer.w2.dense(), down.flatten(0, 1))
    in_turn = gate_up.unflatten(1, (2, -1)).transpose(1, 2)
    assert torch.equal(layer.w13.dense(), in_turn.flatten(0, 2))
    if family or format.group <= 64:
        assert_two_ranks_have(ours, layer)
    name = how.partition(",")[0].partition(" ")[0]
    lossy = f"its matrices are {name}, and int4 would lose precision"
    assert_refused(cli("-m", copy, "--int4", "-p", "a"), lossy)
    code, _, err = cli("-m", copy, "-n", 3, "-p", "Once", "--ignore-eos", "--dtype", "fp32")
    kept = f" with {format.name} matrices ({name} in the file" if on_cpu else " (decoded from "
    assert code == 0 and f"running   fp32{kept}" in err, err


def test_fp8_of_nvidias_first_folders(copy):
    theirs = write_quantised(copy, "FP8, modelopt")
    edit(copy / "config.json", quantization_config=None)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (copy / "hf_quant_config.json").write_text(json.dumps(said))
    assert_equals_transformers(copy, theirs)


def test_a_joined_matrix_that_is_quantised_in_part(copy):
    theirs = write_quantised(copy, "AWQ")
    stem = "model.layers.0.self_attn.v_proj."
    weight = theirs.model.layers[0].self_attn.v_proj.weight.data.contiguous()
    tensors = load_file(copy / "model.safetensors")
    tensors = {name: t for name, t in tensors.items() if not name.startswith(stem)}
    save_file(tensors | {f"{stem}weight": weight}, copy / "model.safetensors")
    ours = assert_equals_transformers(copy, theirs)
    assert not ours.weights.layers[0].wqkv.format and ours.weights.layers[1].wqkv.format


def config_with(how: str, **fields) -> tuple:
    """A checkpoint of QUANTISED whose config.json says something else."""
    return how, spoil_config(quantization_config=QUANTISED[how][0] | fields)


PROJ = "model.layers.0.mlp.up_proj."
BAD_QUANTISED = {  # a checkpoint, how it is changed, what the line says
    "3 bits": (*config_with("GPTQ", bits=3), "quantised as gptq with bits 3: take"),
    "modelopt": (*config_with("FP8, modelopt", quant_algo="NVFP4"), "quantised as modelopt with quant_algo 'NVFP4'"),
    **{f"zero points of 8 bits, stored as {x:x}": (
        "GPTQ, 8 bits", put(f"{PROJ}qzeros", lambda t, x=x: t * 0 + x), "that 8 bits cannot hold: take",
    ) for x in (0, -0x01010102)},
    "dynamic": (*config_with("GPTQ", dynamic={"+:.*up_proj": {"bits": 8}}), "as gptq with dynamic settings: take"),
    "mixed groups": (
        "W4A16", spoil_config(quantization_config=PACKED() | {"config_groups": {
            "a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}}}),
        "several kinds of config_groups: take",
    ),
    "transforms": (
        "W4A16", spoil_config(quantization_config=PACKED() | {"transform_config": {"config_groups": {"R4": {}}}}),
        "as pack-quantized with transforms: take",
    ),
    "gemv": (*config_with("AWQ", version="gemv"), "awq with version 'gemv'"),
    "act-order": ("GPTQ", put(f"{PROJ}g_idx", lambda t: t.flip(0)), f"{PROJ}weight has columns in act-order"),
    "bias": ("GPTQ", set_one(f"{PROJ}bias", 1), "up_proj.weight has a bias"),
    "odd groups": (*config_with("GPTQ", group_size=48), "group_size is 48; it must be"),
    "uneven groups": (*config_with("GPTQ", group_size=512), "8 rows and 512 columns"),
    "codes of another shape": ("GPTQ", put(f"{PROJ}qweight", lambda t: t[1:]), "is [15, 256], expected"),
    "codes of another type": ("AWQ", put(f"{PROJ}qweight", lambda t: t.float()), " in float32, expected"),
    "no scales": ("W4A16", spoil_tensors(lambda t: t.pop(f"{PROJ}weight_scale")), "up_proj.weight_scale is missing"),
    **{f"{how}, a scale of {x}": (how, set_one(PROJ + key, x), "up_proj.", "has a scale that is NaN or infinite")
       for how, key in (("AWQ", "scales"), ("GPTQ", "scales"), ("W4A16", "weight_scale"))
       for x in (NAN, INF)},
    "NaN codes": (
        "FP8, blocks", put(f"{PROJ}weight", lambda t: t.view(torch.int8).fill_(127).view(t.dtype)), "has codes of NaN"
    ),
    "other blocks": (*config_with("FP8, blocks", weight_block_size=[64, 64]), "as fp8 with weight_block_size [64, 64]"),
    "8 bits": (*config_with("W4A16", **PACKED(num_bits=8)), "pack-quantized with num_bits 8"),
    "another method": (*config_with("AWQ", quant_method="exl3"), "as exl3, which is not supported"),
    "int8": (*config_with("W4A16", format="int-quantized"), "as int-quantized, which is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_QUANTISED)
def test_bad_quantised_safetensors_are_one_line(cli, copy, case):
    how, spoil, *said = BAD_QUANTISED[case]
    write_quantised(copy, how)
    spoil(copy)
    assert_refused(cli("-m", copy, "-p", "a", "-n", 1, "--quiet", "--no-display-prompt"), *said)


# ---- speculation.py


class Planted(Speculation):
    """Proposes the text that will follow, with errors here and there."""

    def __init__(self, n: int):
        super().__init__(n)
        self.text: list[int] = []

    def propose(self, ids):
        coming = self.text[len(ids) : len(ids) + self.n]
        planted = [random.choice([token] * 4 + [7]) for token in coming]
        planted += [7] * (self.n - len(planted))
        return random.choice([planted, []])


def always(speculation: Speculation) -> Speculation:
    speculation.pacer.ready = lambda: True
    return speculation


def exact_model(tiny, ctx_size: int, device="cpu"):
    """A model that on a CPU evaluates its tokens one at a time: the sums are then in the same order
    whatever is proposed, and the logits equal to the last bit. Otherwise two tokens tied to within
    rounding may change places."""
    model = load(tiny, dtype="fp32", device=device, ctx_size=ctx_size)
    single = model.evaluate
    if model.device.type == "cpu":
        model.evaluate = lambda T, cache: torch.cat([single(1, cache) for _ in range(T)])
    return model


@pytest.fixture(scope="session")
def exact(tiny):
    """Not to be changed; on a GPU, where there is one."""
    return exact_model(tiny, 64, DEVICE.type)


SETTINGS = {
    "greedy": dict(sampling=MOST_PROBABLE),
    "hot, without filters": dict(sampling=Sampling(temp=2, top_k=0, top_p=1, min_p=0, seed=5)),
    "penalty": dict(sampling=Sampling(repeat_penalty=1.5, repeat_last_n=6, seed=0)),
    "penalty on all": dict(sampling=Sampling(temp=0, repeat_penalty=1.1, repeat_last_n=-1)),
    "eos": dict(sampling=MOST_PROBABLE, eos=range(3, 40)),
    "eos ignored": dict(sampling=MOST_PROBABLE, eos=range(3, 200), ignore_eos=True),
}
WAYS = {
    "lookup": lambda model, other: Lookup(3),
    "lookup of one": lambda model, other: Lookup(1),
    "draft of itself": lambda model, other: Draft(3, copy_module.copy(model)),
    "another draft": lambda model, other: Draft(4, other),
    "planted": lambda model, other: Planted(5),
    "many planted": lambda model, other: Planted(15),
}
CALL = st.tuples(
    st.lists(st.integers(3, 9) | st.integers(3, 299), min_size=1, max_size=20),  # a prompt
    st.sampled_from([0, 1, 7, 80]),  # tokens; the last fills the context
    st.sampled_from([*SETTINGS]),
    st.none() | st.integers(0, 9),  # after so many the text is interrupted
)


@examples(
    40, way=st.sampled_from([*WAYS]), in_graphs=st.booleans(), calls=st.lists(CALL, max_size=4)
)
@hypothesis.example(way="draft of itself", in_graphs=True, calls=[([5] * 9, 80, "penalty", 3)] * 2)
@hypothesis.example(way="another draft", in_graphs=False, calls=[([5, 6], 7, "eos", None)] * 3)
@hypothesis.example(
    way="draft of itself", in_graphs=False,
    calls=[([5] * length, 80, "greedy", None) for length in range(1, 9)],  # to a full context
)  # fmt: skip
def test_proposals_and_interrupted_speculation_do_not_change_the_text(exact, way, in_graphs, calls):
    """Several texts on one state with one way to propose: each is what a state of its own gives
    without proposals, and whoever stops early leaves the state with exactly what came before."""
    torch.manual_seed(0)
    state, toss = State(exact), random.Random(0)
    speculation = WAYS[way](exact, other_model(exact))
    speculation.pacer.ready = lambda: toss.random() < 0.7
    with pytest.MonkeyPatch.context() as patch:
        if in_graphs and not ON_GPU:
            decode_in_graphs(patch)
        for prompt, n, settings, taken in calls:
            options, alone = dict(n=n) | SETTINGS[settings], State(exact)
            with pytest.MonkeyPatch.context() as plainly:
                plainly.setattr(Llama, "uses_graphs", ON_GPU)
                expected = list(generate(exact, prompt, alone, **options))
            if isinstance(speculation, Planted):
                speculation.text = prompt + expected
            passes, accepted = speculation.passes, speculation.accepted
            tokens = generate(exact, prompt, state, **options, decode=speculation.decode)
            with contextlib.closing(tokens):
                got = list(itertools.islice(tokens, taken))
            assert got == expected[:taken]
            if got == expected and taken != 0:
                assert state.pos in (alone.pos, alone.pos - 1)
            elif got:
                assert state.pos == len(prompt) + taken - 1
            assert state.pos == state.device_pos
            new = speculation.passes - passes + speculation.accepted - accepted
            assert new <= max(len(expected) - 1, 0) + speculation.n  # an eos ends a pass early
    if way == "draft of itself":
        kept = "the draft keeps what was not sampled, or has lost what was"
        assert speculation.accepted == speculation.proposed, kept


def test_draft_of_the_same_model(tiny, monkeypatch):
    """Also after Ctrl-C while it reads a prompt: what it has kept of the text before is no part of
    the new one."""
    model = exact_model(tiny, ctx_size=128)
    draft, state = always(Draft(4, copy_module.copy(model))), State(model)
    write = lambda prompt: list(generate(model, prompt, state, 61, eos=[], decode=draft.decode))
    first, second = (random.choices(range(3, 300), k=50) for _ in range(2))
    assert len(write(first)) == 61  # one, and 12 times the four of the draft and another
    said = "proposals 12 passes, 5.00 tokens a pass; 100% of 48 proposals accepted"
    assert draft.summary() == said
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(draft.model, "step", fails(KeyboardInterrupt()))
        write(second)
    write(second)
    assert draft.accepted == draft.proposed and draft.passes == 24


STEP = st.tuples(st.integers(0, 4), st.lists(st.integers(3, 9), max_size=9))


@examples(25, steps=st.lists(STEP, min_size=2, max_size=4))
def test_a_draft_keeps_no_token_that_was_not_sampled(exact, steps):
    """steps: how many of its proposals are sampled, and what follows without proposals. It then
    proposes what a new draft of the same text does."""
    ids, state = [1, 5, 9, 3], State(exact)
    draft = Draft(4, copy_module.copy(exact))
    draft.begin(exact, state, ids)
    for accepted, others in steps:
        new = Draft(4, draft.model)
        new.begin(exact, state, ids[:-1])
        proposals = draft.propose(ids)
        assert proposals == new.propose(ids)
        ids += [*proposals[:accepted], (proposals[-1] + 1) % 300, *others]


@pytest.mark.parametrize("counts, said", [
    ((0, 0, 0, 0), "0 passes, 0.00 tokens a pass; none of 0 proposals accepted"),
    ((4, 12, 6, 0), "4 passes, 2.50 tokens a pass; 50% of 12 proposals accepted"),
    ((8, 3, 0, 7), "8 passes, 1.00 tokens a pass; 0% of 3 proposals accepted; 7 passes had none,"
                   " since they cost more time than they save"),
])  # fmt: skip
def test_proposals_are_counted(exact, counts, said):
    way = Lookup(3)
    way.passes, way.proposed, way.accepted, way.held_off = counts
    assert way.summary() == f"proposals {said}"
    way.pacer = SimpleNamespace(ready=lambda: False, single=1.0, record=lambda *_: None)
    list(generate(exact, [1, 5, 6], n=12, eos=[], decode=way.decode))
    assert (way.passes - counts[0], way.held_off - counts[3]) == (11, 11)


def test_draft_of_a_smaller_vocabulary(exact):
    """A prompt may have ids that only the model has; the draft reads them as its first. A text has
    none, even one in which every id is as probable as the next."""
    small, V = copy_module.copy(exact), exact.config.vocab_size
    small.config = replace(exact.config, vocab_size=V - 99)
    embedding = exact.weights.embedding[: V - 99]
    small.weights = replace(exact.weights, embedding=embedding, output=Matrix(embedding))
    flat = Sampling(temp=1e9, top_k=0, top_p=1, min_p=0, seed=SEED)
    for end in (V - 1, 7):
        prompt = [1, V - 99, 9, end]
        draft = always(Draft(3, small))
        found = list(generate(exact, prompt, None, 50, flat, eos=[], decode=draft.decode))
        assert len(found) == 50 and max(found) < V - 99 and draft.passes
        seen = draft.state.tokens.tolist()
        assert seen[:4] == [1, 0, 9, end if end == 7 else 0] and seen[4] == found[0]


def test_memory_of_a_draft_is_that_of_the_models_context(tiny, copy, monkeypatch):
    sizes = []
    edit(copy / "config.json", max_position_embeddings=128)
    monkeypatch.setattr(checkpoint, "check_memory", lambda *args: sizes.append(args[3]))
    Session(tiny, draft=copy, device="cpu")
    assert sizes == [256, 256]


@pytest.mark.parametrize("seen, proposals", [
    ([5, 6, 7, 9, 7], []),  # one token is not enough
    ([1, 5, 6, 7, 2, 5, 6, 8, 3, 1, 5, 6], [7, 2, 5, 6]),  # the longest run, then the latest
    ([5, 6, 7, 2, 5, 6, 8, 3, 5, 6], [8, 3, 5, 6]),
    ([1, 2, 3, 4, 9, 2, 3, 4, 8, 7, 1, 2, 3, 4], [9, 2, 3, 4]),
    ([0, 1, 2, 3, 4, 9, 7, 1, 2, 3, 4, 8, 7, 0, 1, 2, 3, 4], [8, 7, 0, 1]),  # of four at most
    ([9, 5, 6, 5, 6], [5, 6, 5, 6]),  # too few followed: they repeat
    ([7, 7, 7], [7, 7, 7, 7]),
])  # fmt: skip
def test_lookup_proposals(seen, proposals):
    for n in (1, 3, 4):
        assert Lookup(n).propose(seen) == proposals[:n]


@examples(200, seen=st.lists(st.integers(5, 9), min_size=20, max_size=40), n=st.integers(1, 15))
def test_lookup_of_a_text_that_grows(seen, n):
    """It proposes what it does for the whole text at once; of the text before, nothing is left."""
    growing = Lookup(n)
    growing.begin(None, None, [9, 8, 7, 6, 5])
    growing.begin(None, None, seen[:10])
    for size in range(11, len(seen) + 1):
        assert growing.propose(seen[:size]) == Lookup(n).propose(seen[:size])


# proposed, accepted, seconds, whether the GPU waited; then: seconds of a single token, of several,
# lost, in total; whether the next pass may propose
PACES = [
    ((0, 0, 1.0, False), 1.0, 0.0, 0.0, 1.0, True),
    ((3, 0, 9.0, False), 1.0, 1.0, 0.0, 2.0, True),  # which compiled: it counts as a single token
    ((3, 0, 2.0, False), 1.0, 1.2, 1.0, 4.0, False),  # 1 + 0.2 > 1 + 0.02 * 4
    ((0, 0, 6.0, False), 2.0, 1.2, 1.0, 10.0, True),
    ((0, 0, 3.0, True), 2.0, 1.2, 2.0, 13.0, True),  # a pass that waited for nothing
    ((3, 3, 1.2, False), 2.0, 1.2, -2.0, 14.2, True),  # it gains at most a single token
]


def test_pacer_by_hand():
    pacer = Pacer()
    assert not pacer.ready(), "the first pass is the baseline"
    for passed, *expected, may in PACES:
        pacer.record(*passed)
        found = [pacer.single, pacer.several, pacer.lost, pacer.total]
        assert found == pytest.approx(expected) and pacer.ready() == may, passed


@pytest.mark.parametrize("cost, found", [
    (1.02, True), (1.15, True), (1.5, True), (3.0, True), (1.15, False),
])  # fmt: skip
def test_looking_for_proposals_costs_3_percent(cost, found):
    """found: whether there were some to fail. A GPU is idle while the host looks for them."""
    pacer = Pacer()

    def spend(accepted: int) -> float:
        ready = pacer.ready()
        seconds = cost if ready else 1.0
        pacer.record(int(ready and found), accepted, seconds, waited=ready and not found)
        return seconds

    for length in (400, 4000):
        assert sum(spend(0) for _ in range(length)) <= 1.03 * length
    if found:
        for _ in range(200):  # the text begins to repeat
            spend(4)
        assert all(spend(4) > 1 for _ in range(20))


def test_capturing_is_no_part_of_a_pass(tiny, monkeypatch):
    """By a clock that moves 9 seconds when a graph is captured and 1 when it is replayed. A GPU has a
    clock of its own."""
    decode_in_graphs(monkeypatch)
    exact = exact_model(tiny, 64)
    now, charged = [0.0], []

    def work(seconds: float, run) -> None:
        run()
        now[0] += seconds

    def captured_slowly(run, device, reset):
        now[0] += 9
        return SimpleNamespace(replay=partial(work, 1.0, run))

    monkeypatch.setattr("speculation.proposals.captured", captured_slowly)
    monkeypatch.setattr("speculation.proposals.time.perf_counter", lambda: now[0])
    lookup, state = Lookup(3), State(exact)
    record = lookup.pacer.record
    lookup.pacer.record = lambda *args: charged.append(args[2]) or record(*args)
    list(generate(exact, [5, 6, 5, 6, 7], state, 9, MOST_PROBABLE, eos=[], decode=lookup.decode))
    assert charged == [pytest.approx(1.0)] * lookup.passes, "the pacer takes a graph for a pass"
    assert state.busy == pytest.approx(lookup.passes)


@pytest.mark.parametrize("in_graphs", [False, True])
@pytest.mark.parametrize("proposing", [False, True])
def test_speculation_where_logits_are_not_finite(tiny, monkeypatch, in_graphs, proposing):
    model, prompt, options = exact_model(tiny, 64), [1, 5, 6], dict(n=20, eos=[])
    options["sampling"] = Sampling(seed=SEED)
    text = list(generate(model, prompt, **options))
    sample = model.ops.sample

    def spoiled(logits, tokens, drawn, pos, sampler) -> None:
        logits[max(14 - (int(pos) - len(logits) + 1), 0) :] = torch.nan
        sample(logits, tokens, drawn, pos, sampler)

    model.ops = SimpleNamespace(**vars(model.ops) | dict(sample=spoiled))
    if in_graphs:
        decode_in_graphs(monkeypatch)
    planted, got = Planted(4), []
    planted.text = prompt + text
    planted.pacer.ready = lambda: proposing
    with pytest.raises(RuntimeError, match="not finite"):
        got.extend(generate(model, prompt, **options, decode=planted.decode))
    assert got == text[:11]


def test_single_tokens_run_ahead(exact, monkeypatch):
    """Without proposals, two passes are on their way, also while the host looks for some; with
    them, one: tokens are needed first."""
    decode_in_graphs(monkeypatch)
    ahead = [2, 3, 4, 5, 5, 5]
    never = [299] * 3  # no token of the text
    cases = ((False, never, ahead), (True, [], ahead), (True, never, [1, 2, 3, 4, 5, 5]))
    for proposing, found, launched in cases:
        lookup, counts = Lookup(3), []
        one_pass = lookup._pass
        lookup._pass = lambda *args, f=one_pass, c=counts: c.append(1) or f(*args)
        lookup.propose = lambda ids, found=found: found
        lookup.pacer.ready = lambda p=proposing: p
        settings = dict(n=6, eos=[], sampling=Sampling(seed=SEED))
        text = generate(exact, [1, 5, 6], **settings, decode=lookup.decode)
        assert [len(counts) for _ in text] == launched


def test_speculation_from_the_command_line(cli, tiny, copy):
    flags = ("-p", "a fox a fox a fox", "-n", 40, "-s", 5, "--dtype", "fp32", "--stop", "zz")
    said = partial(cli, "-m", tiny, *flags)
    expected = said()[1]
    # some models of a family have more rows for no token than others
    hugging_face_model(read_config(copy).vocab_size + 400, **FAMILIES["gqa"]).save_pretrained(copy)
    for way in (("--lookup", 15), ("--draft", copy), ("--draft", tiny, "--draft-max", 2)):
        code, out, err = said(*way)
        assert (code, out) == (0, expected)
        counts = r"proposals \d+ passes, \d\.\d\d tokens a pass; .* proposals accepted"
        assert re.search(counts, err)
    lines = ("the fox", "the crow", "the fox")
    assert chat(cli, tiny, *lines, flags=("--lookup", 4))[1] == chat(cli, tiny, *lines)[1]
    edges = ("--lookup", 0), ("--lookup", 16), ("--draft", tiny, "--draft-max", 0)
    for wrong in (*edges, ("--lookup", 3, "--draft", tiny), ("--draft-max", 3)):
        assert_refused(said(*wrong), code=2)
    assert_refused(said("--draft", cli_module.DEFAULT_MODEL), "different vocabulary")


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


def parallel_result(folder: Path, case: str, **changed) -> tuple[torch.Tensor, list[int]]:
    """Logits of a prompt and of single tokens after it, and greedy tokens, in this process or as
    one of several, which pad prompts if the case is called so."""
    name, options = PARALLEL[case]
    ids = torch.arange(5, 17) * 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMATS, "own", OWN)
        if case == "in graphs" and "ranks" in changed:
            decode_in_graphs(patch, prompts=True)
        model = load(folder / name, dtype="fp32", device="cpu", **options | changed)
        tokens = greedy(model, ids.tolist(), 2 if "backend" in options else 8)
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
    done = in_shell(f"CUDA_VISIBLE_DEVICES= $PYTHON -m extra.test_extra {folder} forks", cwd=HERE)
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


@pytest.mark.parametrize("format, several", [(None, 5), (fp8.E4M3, 13)])
def test_exchange_adds_and_gathers(format, several):
    """Three ranks in one process, each with its own memory; one token or several; a vocabulary that
    is not evenly divided."""
    C, V, columns, halves = 72, 101, (40, 24, 56), partial(randn, dtype=torch.float16)
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
    command = ("-m", "extra.test_extra", parallel_folder, "gpus")
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
                model.ops = exchange_module.cut_ops(
                    ranks, kernels.ops(model.backend), exchange, False
                )
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
    state, plain = State(model, 300), State(model, 300)
    for T in (40, 9, 33, 1, 16, 40, 90, 66, 1):  # the last but one at the end of the context
        ids = torch.arange(T, device=model.device) * 7 % 290 + 5
        model.prefill(ids.tolist(), state)
        assert nmse(state.logits, model.forward(ids, plain)[-1]) < 1e-3, T
        theirs = model.ranks.broadcast(lambda: state.logits.cpu())
        assert torch.equal(state.logits.cpu(), theirs), "ranks differ"


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


# ---- logprobs.py: those of a text are tested with sessions


def test_scores_of_a_prompt(tiny_session, tiny_model, monkeypatch):
    """Of which three tokens are evaluated at a time."""
    monkeypatch.setattr("logprobs.AT_ONCE", 3 * tiny_model.config.vocab_size)
    ids = tiny_session.tokenizer.encode("Once upon a time there was a fox")
    generation = tiny_session.generate(ids, n=0, logprobs=2, echo=True).finish()
    first, *scores = generation.logprobs
    assert (first.id, first.logprob) == (ids[0], None)
    assert [score.id for score in scores] == ids[1:]
    for row, score in zip(logits_of(tiny_model, ids).log_softmax(1), scores):
        assert score.logprob == pytest.approx(float(row[score.id]), abs=1e-3)
        assert [id for id, _ in score.best] == row.topk(2).indices.tolist()


# ---- chat_templates.py


TEXTS = {  # what our templates write, after bos, of a talk with and one without an answer
    "llama2": "[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s><s>[INST] V [/INST]",
    "mistral": "[INST] S\n\nU [/INST] A</s>[INST] V [/INST]",
    "zephyr": "<|system|>\nS</s>\n<|user|>\nU</s>\n<|assistant|>\nA</s>\n<|user|>\nV</s>\n<|assistant|>\n",
    "vicuna": "S USER: U ASSISTANT: A</s>USER: V ASSISTANT:",
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "plain": "S\nUA\nV",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_texts(tiny, name):
    """What is no conversation is refused, as is a system prompt within one where only the first has
    a place."""
    t = Tokenizer(tiny, chat_template=name)
    prompt = t.chat_prompt(conversation("U", "A", "V", system="S"))
    assert prompt.text == "<s>" + TEXTS[name]
    # control tokens, and between them what SentencePiece makes of the text
    ids = [t.bos]
    for part in re.split("(</?s>)", TEXTS[name]):
        ids += [t.control[part]] if part in t.control else t.vocabulary.sp.encode(part)
    assert prompt.ids == ids
    for wrong in ([], ["U"], [{"role": "user"}]):
        with pytest.raises(TypeError, match="a conversation is a list of dicts"):
            t.apply_chat_template(wrong)
    if name in ("llama2", "mistral"):
        with pytest.raises(ValueError, match="chat template says: a system prompt comes first"):
            t.chat_prompt(conversation("U", "A") + conversation("V", system="S"))


def test_find_template(tmp_path):
    folder = tmp_path / "vicuna-7b"
    cached = tmp_path / "models--meta-llama--Llama-2-7b-chat-hf/snapshots/abc"
    folder.mkdir()
    own = {"chat_template": "own"}
    several = [{"name": "default", "template": "x"}, {"name": "tool"}]
    assert find_template(folder, {}) == (TEMPLATES["vicuna"], "vicuna (from the folder's name)")
    assert find_template(cached, {})[0] == TEMPLATES["llama2"]
    assert find_template(tmp_path, {}) == (TEMPLATES["plain"], "")
    assert find_template(folder, own)[0] == "own"
    assert find_template(folder, {"chat_template": several})[0] == "x"
    assert find_template(folder, {"chat_template": {"rag": "y", "default": "x"}})[0] == "x"
    (folder / "chat_template.jinja").write_text("from the file")
    assert find_template(folder, own)[0] == "from the file"
    assert find_template(folder, own, "zephyr") == (TEMPLATES["zephyr"], "zephyr (given)")
    neither = "is not a chat template: neither one of llama2, zephyr"
    for name in ("not-there", "."):
        with pytest.raises(FileNotFoundError, match=neither):
            find_template(folder, own, name)


REFUSED = {  # templates, and what is said of them
    "raises": (
        "{{ raise_exception('only\nthe king may speak') }}",
        "the chat template says: only the king may speak",
    ),
    "is wrong": ("{% if %}", "the chat template says"),
    "reaches out": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "is unsafe"),
    "changes the messages": ("{{ messages.append(1) }}", "is unsafe"),
    "includes": ("{% include '/etc/passwd' %}", "the chat template says"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "is large": ("{{ 'x' * 10 ** 15 }}", "MemoryError"),
    "writes nothing": ("{% if 0 %}x{% endif %}", "writes nothing for this conversation"),
}


@pytest.mark.parametrize("text, expected", REFUSED.values(), ids=REFUSED)
def test_template_errors(cli, tiny, tmp_path, text, expected):
    (tmp_path / "template").write_text(text)
    flags = ("--chat-template", tmp_path / "template", "--quiet", "-p", "hello")
    assert_refused(cli("-m", tiny, "--chat", *flags), expected)


# ---- talk/chat.py: conversations


def chat(cli, folder, *lines: str, flags=()):
    text = "".join(line + "\n" for line in lines).encode(errors="surrogateescape")
    return cli("-m", folder, "--chat", "-n", 6, *GREEDY, *flags, stdin=text)


def chat_objects(cli, folder, *lines: str, flags=()) -> list[dict]:
    return objects(chat(cli, folder, *lines, flags=["-o", "jsonl", *flags])[1])


def test_a_chat_in_any_order(tiny, tiny_model, tmp_path, monkeypatch, capsys):
    """Messages and commands, with Ctrl-C at any time: the prompt is what the template makes of the
    conversation so far, the answer is the model's, all of it is shown, and what is interrupted
    before its first token changes nothing."""
    session = Session(tiny, dtype="fp32", device="cpu", chat_template="llama2")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    (notes, saved), seen = (tmp_path / "notes", tmp_path / "saved"), []
    notes.write_bytes(b"a\rnote\r\n")
    commands = ["hello", "good \\day", "/regen", "/clear", "/system Be kind.", "/system"]
    commands += [f"/read {notes}", f"/save {saved}", f"/load {saved}", "/set seed 3", "/set temp 0"]
    answer = session.chat

    def recorded(prompt, **options):
        seen.append((prompt, options["sampling"], answer(prompt, **options)))
        return seen[-1][2]

    monkeypatch.setattr(session, "chat", recorded)
    line = st.tuples(st.sampled_from([*commands, "hello", "/regen"]), st.integers(0, 60))

    @examples(100, lines=st.lists(line, min_size=3, max_size=7))
    def check(lines):
        talk = Conversation(session)
        shown = Chat(talk, Output(session, quiet=True), n=4, ignore_eos=True)
        shown.survives_ctrl_c = True
        system, turns, to_read, at = [], [], "", dict(temp=0.8, seed=0)
        saved.write_text("[]")
        kept = ([], [])
        for line, stops in [("hello", 60), *lines]:
            capsys.readouterr()
            seen.clear()
            with monkeypatch.context() as patch:
                interrupted_at(patch, session.model.ops, stops)
                shown.turn(line)
            command, _, rest = line.partition(" ")
            earlier, message = turns, to_read + line
            if command == "/regen" and turns:
                earlier, message = turns[:-2], turns[-2]["content"]
                at["seed"] += 1
            if command == "/clear":
                turns, to_read = [], ""
            elif command == "/system":
                system, turns = conversation(system=rest), []
            elif command == "/read":
                to_read += "a\nnote\n\n"
            elif command == "/save":
                kept = (system, turns)
            elif command == "/load":
                system, turns = kept
            elif command == "/set":
                at[rest.split()[0]] = int(rest.split()[1])
            for prompt, settings, generation in seen:
                asked = [*system, *earlier, {"role": "user", "content": message}]
                assert prompt.text == session.tokenizer.chat_prompt(asked).text
                assert settings == Sampling(**at)
                options = dict(n=4, sampling=settings, eos=session.eos, ignore_eos=True)
                expected = [*generate(tiny_model, prompt.ids, **options)]
                got, interrupted = generation.ids, generation.ended_by == "interrupt"
                assert got == expected[: len(got)] and (interrupted or len(got) == 4)
                assert capsys.readouterr().out == generation.text + "\n"
                if got:
                    turns = [*earlier, *conversation(message, generation.text)]
                    to_read = to_read if command == "/regen" else ""
            assert talk.turns == turns and talk.system == system and shown.to_read == to_read

    check()


def test_what_fits_into_the_context(tiny):
    """Where less than a quarter is left for the answer, turns go, the oldest first, and then the
    beginning of the last answer, until half of it is free, and no more than that."""
    session = Session(tiny, device="cpu", ctx_size=64, chat_template="llama2")
    word = st.sampled_from("fox said Żółw \u4f60\u597d\u4f60\u597d".split())
    text = st.lists(word, max_size=25).map(" ".join)
    turn = st.tuples(text, text).map(lambda said: conversation(*said))

    @examples(80, system=st.sampled_from(["", "Be kind."]), turns=st.lists(turn, max_size=6))
    def check(system, turns):
        talk, turns = Conversation(session, system), [*itertools.chain(*turns)]
        asked = lambda turns: [*talk.system, *turns, {"role": "user", "content": "fox"}]
        length = lambda turns: len(session.render(asked(turns)).ids)
        prompt, kept = talk.fit("fox", turns)
        dropped = dropped_part(turns, kept)
        assert prompt.text == session.tokenizer.chat_prompt(asked(kept)).text
        if length(turns) <= 48:
            assert (kept, dropped) == (turns, "")
            return
        count = (len(turns) - len(kept)) // 2
        expected, rest = [f"{count} of {len(turns) // 2} turns"] * bool(count), turns[2 * count :]
        assert len(prompt.ids) <= max(32, length([])), "half of the context is not free"
        if kept == rest:
            assert length(turns[2 * count - 2 :]) > 32, "more than needed is dropped"
        else:
            (message, answer), (_, whole) = kept, rest
            end = answer["content"].strip()
            assert message == rest[0] and end and whole["content"].endswith(end)
            assert length(rest) > 32 and 32 - len(prompt.ids) < 8, "more than needed is cut"
            expected.append("the beginning of the last answer")
        assert dropped == " and ".join(expected)

    check()
    # by more than the space before it
    _, answer = Conversation(session).shortened(conversation("fox", "\u4f60 good day"), 1)
    assert answer["content"].strip() == "good day"


def test_lines_of_a_chat(cli, tiny):
    messages = "/usr/bin/python says", "/etc is what?", "/* a comment */", "/ or \\?"
    turns = chat_objects(cli, tiny, *messages, "", "one \\", "two", "/usr\\", "next", "/bye", "no")
    said = [*messages, "one \ntwo", "/usr\nnext"]
    assert [turn["prompt"] for turn in turns] == said and all("text" in turn for turn in turns)
    assert chat_objects(cli, tiny, "one\\")[0]["prompt"] == "one", "the input ended"
    assert "generated 12 tokens" in chat(cli, tiny, "hello", "again")[2]
    assert "0 tokens" not in chat(cli, tiny)[2], "nothing was evaluated"


def test_chat_single_turn(cli, tiny, tmp_path):
    flags = ("-m", tiny, "-n", 6, *GREEDY, "--quiet")
    expected = chat(cli, tiny, "hello", flags=["--quiet"])[1]
    (tmp_path / "message").write_text("hello\n")
    file = ("-cnv", "-f", tmp_path / "message")
    for how in (("--chat", "-p", "hello"), ("-st", "-p", "hello"), file, ("-st",)):
        assert cli(*flags, *how, stdin=b"hello\n") == (0, expected, ""), how
    for how in (("--chat", "-p", "hello\\nyou"), ("-st",)):
        (turn,) = objects(cli(*flags, *how, "-o", "jsonl", stdin=b"hello\nyou\n")[1])
        assert turn["prompt"] == "hello\nyou"


def test_what_a_chat_says(cli, tiny, tmp_path):
    """Of a line after an answer; test_a_chat_in_any_order knows what the line does."""
    notes, saved = tmp_path / "notes", tmp_path / "saved"
    notes.write_bytes(b"good\r\nday,\rcrow!\n")
    saved.write_text(json.dumps(conversation("hello", "good day")))
    said = {
        "/HELP": "/clear        forget",
        "/?": "/clear        forget",
        "/system\\\nBe kind.\\\nAnd terse.": "with this system prompt",
        "/clear": "conversation cleared",
        "/system Be kind.": "with this system prompt",
        "/system": "without a system prompt",
        "/regen": "always the same",
        f"/read {notes}": "15 characters, goes before your next message",
        "/set temp 5": "temp 5.0, top_k 40",
        f"/load {saved}": f"{saved}: 1 turns",
        f"/save {tmp_path / 'new'}": f"saved to {tmp_path / 'new'}",
    }
    _, answer, alone = chat(cli, tiny, "hello")
    assert "this model has no chat template; sending plain text" in alone
    assert alone.count("note: cut after 6 tokens (see -n)") == 1
    for line, text in said.items():
        assert text in chat(cli, tiny, "hello", line)[2] and text not in alone, line
    kind = chat(cli, tiny, "/system Be kind.", "hello")[1]
    assert kind == chat(cli, tiny, "hello", flags=["--system", "Be kind."])[1] != answer
    stats = chat(cli, tiny, "/stats", "hello", "/stats", "more")[2]
    assert stats.count(" tokens/s; prompt:") == 1, "shown until /stats is said again"
    first, again = chat_objects(cli, tiny, "hello", "/regen")
    assert again["evaluated_tokens"] == 0 < first["evaluated_tokens"]
    assert chat_objects(cli, tiny, "/regen")[0]["error"] == "there is no answer yet"
    lines = ["tell me a tale"] * 12
    dropped = "context of 64 tokens is full: dropped the oldest part of the conversation, [1-9] of "
    assert re.search(dropped, chat(cli, tiny, *lines, flags=["-c", 64])[2])
    assert chat(cli, tiny, *lines, "/clear", flags=["--quiet", "-c", 64])[2] == "", "--quiet"


def test_chat_errors_end_only_their_turn(cli, tiny, tmp_path):
    refuses = "{% if messages[-1]['content'] == 'bad' %}{{ raise_exception('too bad') }}{% endif %}"
    (tmp_path / "t").write_text(refuses + "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    bad, long, other, surrogate = (tmp_path / name for name in ("bad", "long", "other", "lone"))
    bad.write_bytes(b"ab\xff")
    long.write_text("x" * 10_000)
    other.write_text('[{"role": "user", "content": "?"}]')
    turn = [{"role": "user", "content": "\udcff"}, {"role": "assistant", "content": "."}]
    surrogate.write_text(json.dumps(turn))
    said = {
        "tell me a tale " * 60: "context holds 64",
        "\udcff": "not UTF-8",
        "bad": "too bad",
        "/system " + "tell me a tale " * 60: "prompt takes",
        "/REGNE now": "no command /regne: did you mean /regen? /help lists them",
        "/read": "/read needs the name of a file",
        "/read nowhere": "nowhere: No such file",
        "/read /dev/zero": "/dev/zero has more than 64,000,000 bytes",
        "/read .": ".: Is a directory",
        f"/read {bad}": "not UTF-8: byte 0xff at offset 2",
        f"/read {long}": f"{long} takes ",
        "/set tmp 1": "/set needs one of temp, top_k",
        "/set top-k many": "many: top_k needs a number",
        "/set top_p 2": "top_p is 2.0; it must be from 0 to 1",
        "/set seed nan": "nan: seed needs a number",
        "/save": "/save needs the name of a file",
        "/save /no/where": "/no/where: No such file",
        f"/load {other}": f"{other}: it is not a conversation",
        f"/load {surrogate}": f"{surrogate}: it is not a conversation",
        f"/load {tiny / 'config.json'}": "it is not a conversation",
        f"/load {tiny / 'tokenizer.model'}": "not UTF-8",
    }
    flags = ["-o", "jsonl", "-c", 64, "--quiet", "--chat-template", tmp_path / "t"]
    code, out, err = chat(cli, tiny, "hello", *said, "/regen", flags=flags)
    first, *refused, last = objects(out)
    assert code == 0 and last["prompt"] == first["prompt"] == "hello", "the conversation is lost"
    for turn, text in zip(refused, said.values(), strict=True):
        assert text in turn["error"], turn
    errors = [f"error: {turn['error']}" for turn in refused]
    assert err.splitlines() == errors and "Errno" not in err


@pytest.mark.parametrize("template", ["llama2", "zephyr", "plain"])
def test_chat_evaluates_only_what_is_new(cli, tiny, template):
    flags = ["--chat-template", template, "-c", 256]
    one, two = (chat(cli, tiny, *["tell me a tale"] * n, flags=flags)[2] for n in (1, 2))
    first, both = (int(err.split("prompt    ")[1].split()[0]) for err in (one, two))
    assert both - first < first + 6 + 8, "the second turn evaluated the first again"
    assert f"template: {template} (given)" in one


# ---- talk/chat.py: a person at a terminal


def test_printer_does_not_cut_words(capsys, monkeypatch):
    """However a text is cut into pieces, and whatever came before; nor shows control characters."""

    def shown(printer: Printer, pieces, cut: bool = False) -> str:
        printer.at_terminal = True
        for piece in pieces:
            printer.write(piece)
        printer.end(cut)
        return capsys.readouterr().out

    words = "fox Żółw good \U0001f422 e\u0301e\u0301 aaaa".split() + ["\u4f60\u597d" * 9, "x" * 30]
    words += ["\n", "\n\n", "\x1b[2J", "\x9bc", "\r", "\t"]
    text = st.lists(st.sampled_from(words), max_size=30).map(" ".join)
    texts = st.lists(st.tuples(text, st.sets(st.integers(0, 80)), st.booleans()), max_size=4)

    @examples(100, width=st.sampled_from([8, 20, 80]), texts=texts)
    def check(width, texts):
        monkeypatch.setenv("COLUMNS", str(width))
        printer = Printer()
        for text, cuts, cut in texts:
            ends = [0, *sorted(cuts), len(text) + 81]
            lines = shown(printer, [text[a:b] for a, b in itertools.pairwise(ends)], cut)
            assert lines == shown(Printer(), [text], cut), "a column or a word is left over"
            assert all(sum(map(columns_of, line)) < width for line in lines.split("\n"))
            if not cut:
                visible = re.sub("[\x1b\x9b]", "\ufffd", text)
                assert "".join(lines.split()) == "".join(visible.split()), "something is lost"
                short = {word for word in visible.split() if word.isascii() and len(word) < width}
                assert short <= {*lines.split()} and "\r" not in lines

    check()
    monkeypatch.setenv("COLUMNS", "80")
    assert shown(Printer("Once "), ["up"], cut=True) == "Once \n", "no half word after Ctrl-C"
    assert shown(Printer("abc\tx\tabcdefgh"), ["\ty"]) == "abc     x       abcdefgh        y\n"
    cli_module.note("model  a\x1b]0;b\x07\x9b\nc\td\r")  # a file's name may hold them
    assert capsys.readouterr().err == "model  a\ufffd]0;b\ufffd\ufffd\nc\td \n"


def test_ctrl_c_at_once(tmp_path):
    """While the program's own modules are imported."""
    (tmp_path / "dataclasses.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)")
    for program in ("run.py", "bench.py", "serve.py"):
        run = [sys.executable, HERE / program, "--help"]
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        ended = subprocess.run(run, env=environment, capture_output=True, text=True)
        assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


class Person:
    """Types into a program at a pseudo-terminal and reads what it shows."""

    def __init__(self, *arguments, script: Path = HERE / "run.py", columns: int = 80, **variables):
        own = dict(TERM="xterm-256color", OMP_NUM_THREADS="1", XDG_STATE_HOME="/none")
        environment = os.environ | own | dict(INPUTRC="/dev/null") | variables
        for name in {"COLUMNS", "LINES", "NO_COLOR"} - {*variables}:
            environment.pop(name, None)
        command = [sys.executable, str(script), "--device", "cpu", *map(str, arguments)]
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            termios.tcsetwinsize(0, (24, columns))
            os.execve(sys.executable, command, environment)
        self.unread, self._decoder = "", codecs.getincrementaldecoder("utf-8")("replace")

    def types(self, text: str, seen: str = "") -> str:
        """Types, and returns what is shown up to a match of the pattern `seen`."""
        os.write(self.terminal, text.encode())
        return self.sees(seen)

    def interrupts(self, seen: str) -> str:
        """Types Ctrl-C and returns what sees(seen) does. A signal that comes while readline draws
        is handled with the next one: SIGWINCH, which does nothing else."""
        os.write(self.terminal, b"\x03")
        return self.sees(seen, lambda: os.kill(self.pid, signal.SIGWINCH))

    def sees(self, pattern: str, wake=lambda: None) -> str:
        """What is shown up to a match of the pattern. wake is called while there is nothing."""
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


UP, CTRL_D = "\x1b[A", "\x04"
# bracketed paste, perhaps in colour; no text of the model holds an escape
READY = r"\x1b\[\?2004h(\x1b\[1;32m)?> "


def test_chat_at_a_terminal(tiny, tmp_path):
    home = tmp_path / "of a new user"
    person = Person("-m", tiny, "--chat", "-n", 6, *GREEDY, XDG_STATE_HOME=str(home))
    assert "\x1b[?2004h\x1b[1;32m> " in person.sees(READY)
    turn = person.types("hello\r", READY)
    answered = r"(?s)hello\r\n(\x1b\[\?2004l\r)?\x1b\[0m\r\n[^\x1b]+\r\n\r\n"
    assert re.fullmatch(answered + r"\x1b\[\?2004h\x1b\[1;32m> ", turn), repr(turn)
    person.types("\x1b[200~good\rday\x1b[201~", "day")  # pasted
    person.types("\r", READY)
    person.types("two \\\r", r"\x1b\[1;32m  ")
    person.types("lines\r", READY)
    assert "good\r\n" in person.types(UP + UP, "day"), "a pasted message comes back whole"
    assert "to leave" not in person.interrupts(READY), "the line had text"
    person.interrupts(r"to leave: Ctrl-C again, Ctrl-D or /exit\)[^>]*> ")
    person.types("abc", "abc")
    person.interrupts(READY)
    person.types("/clear\r", "conversation cleared[^>]*> ")
    person.interrupts(READY)
    rest = person.interrupts("memory ")
    assert person.leaves()[0] == 130
    assert rest.startswith("\x1b[?2004l\r\x1b[0m") and "Traceback" not in rest
    assert "generated 18 tokens" in rest
    history = home / "fused-llama" / "history"
    messages = [json.loads(line) for line in history.read_text().splitlines()]
    assert messages == ["hello", "good\nday", "two \nlines", "/clear"]
    assert history.parent.stat().st_mode & 0o077 == 0, "others can read it"


def test_chat_at_a_narrow_terminal(tiny, tmp_path):
    """With a long history of other runs, one line of it cut off, and no colour."""
    (tmp_path / "fused-llama").mkdir()
    history = '"older"\n' * 1000 + '"good\\nday"\n"half\n"hello"\n'
    (tmp_path / "fused-llama" / "history").write_text(history)
    flags = ("-m", tiny, "--chat", "--ignore-eos", "-c", 5000)
    person = Person(*flags, XDG_STATE_HOME=str(tmp_path), NO_COLOR="1", columns=20)
    status = person.sees(READY).rpartition("\rmodel\r\n")[2]
    assert "\x1b[1" not in status and "\r\n          /help\r\n" in status
    lines = [line for line in status.split("\r\n")[:-1] if len(line.split()) > 1]
    assert all(len(line) < 20 for line in lines), status
    assert "good\r\n" in person.types(UP + UP, "day")
    person.types("\r", r"\x1b\[\?2004l\r")
    answer = person.sees(r"([^\n]*\n){6}")
    answer += person.interrupts(READY)
    # a progress bar, of a prompt that takes more than two seconds, is overwritten
    lines = [re.sub(r".*\r(?!$)", "", line).strip("\r") for line in answer.split("\n")[:-1]]
    lines = [line.replace("^C", "") for line in lines if "\x1b" not in line]
    assert all(sum(map(columns_of, line)) < 20 for line in lines), lines
    person.types(CTRL_D)
    code, rest = person.leaves()
    assert code == 0 and "generated" in rest


def test_bare_run_at_a_terminal_is_a_chat(tmp_path):
    # models/tales is looked for beside the program
    (tmp_path / "llama").symlink_to(HERE / "run.py")
    person = Person("-n", 4, script=tmp_path / "llama", TERM="dumb")
    assert re.search(r"since\s+there\s+is\s+no\s+prompt", person.sees("> "))
    person.types("Tell me a tale\r", "> ")
    person.types("/exit\r")
    code, rest = person.leaves()
    assert code == 0 and "\x1b" not in rest and "Traceback" not in rest


def test_terminal_after_sigterm(tiny):
    person = Person("-m", tiny, "--chat")
    person.sees(READY)
    os.kill(person.pid, signal.SIGTERM)
    # see interrupts
    person.sees(r"\x1b\[\?2004l\r\x1b\[0m", lambda: os.kill(person.pid, signal.SIGWINCH))
    assert person.leaves()[0] == 128 + signal.SIGTERM


def test_mode_of_a_run(monkeypatch):
    modes = {"": "bare", "-no-cnv": "text", "-p x": "text", "-p=": "text", "-f /dev/null": "text"}
    modes |= {"-st": "chat", "-sys x": "bare", "--chat -p x": "chat", "--fp8 --save x": "save"}
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert {flags: run.parse_args(flags.split()).mode for flags in modes} == modes
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert run.parse_args([]).mode == "text"


# ---- launch.py and cards/sizes.py


def test_kernel_that_does_not_compile(monkeypatch):
    """Each is loaded, too; its error is the user's."""
    from triton.runtime._async_compile import active_mode

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def start(name: str, compiled) -> None:
        submit = lambda grid: active_mode.get().submit(name, compiled, lambda kernel: None)
        launch.run_or_compile(SimpleNamespace(warmup=submit), (1,), torch.device("cpu"))

    class Kernel:
        run = property(lambda self: loaded.append(self))

    loaded: list[Kernel] = []
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            launch.compile_kernels(lambda: start("a", lambda: 1 / 0), DEVICE)
        launch.compile_kernels(lambda: [start(name, Kernel) for name in "abb"], DEVICE)
    assert len(loaded) == 4 and active_mode.get() is None and not launch._only_compile.get()


def test_launchers_refuse_strides():
    """Strides are derived from shapes. All are launched here, but Hopper's for prompts, which
    attention guards."""
    apart = torch.zeros(4, 8, 2, device=DEVICE)[..., 0]
    for bad in (apart, (torch.zeros(4, device=DEVICE), apart)):
        with pytest.raises(AssertionError, match="a tensor is not contiguous"):
            launch.launch(kernels._swiglu_kernel, (1,), DEVICE, bad)
    q, *rest = op_arguments("attention", torch.float16, (4, 2, 16), 3, 5)[0]
    with pytest.raises(AssertionError):
        attention.attention(torch.stack((q, q), -1)[..., 0], *rest)


def test_launch_sizes_of_the_nearest_card(monkeypatch, tmp_path):
    """Those of the nearest card below. launch.json is as the tuner writes it; otherwise what was
    not tuned would change with the next tuning."""
    found = [launch_sizes.nearest({0: "a", 80: "b", 90: "c"}, key) for key in (0, 79, 80, 89, 120)]
    assert found == ["a", "a", "b", "b", "c"]
    launch_sizes.tables()  # which keeps what is in the file
    monkeypatch.setattr(launch_sizes, "TABLES_FILE", tmp_path / "launch.json")
    launch_sizes.save_tables()
    assert (tmp_path / "launch.json").read_text() == (HERE / "cards/launch.json").read_text()


@pytest.mark.parametrize("arch", [0, *ARCHITECTURES])
def test_launch_sizes_fit_the_kernels_and_the_card(monkeypatch, arch):
    """Its tiles have to fit into the shared memory. Scales take up to a fifth as much as codes."""
    monkeypatch.setattr(launch_sizes, "capability", lambda device: arch)
    ops = (*PRODUCTS, "an op of one's own")
    for bits, op, columns in itertools.product((4, 6, 8, 16, 32), ops, (64, 4096, 11008)):
        asked = DEVICE, bits, op, columns
        assert launch_sizes.vector_sizes(*asked).rows % 2 == 0
        assert op == "linear_add" or launch_sizes.stream_sizes(*asked).rows % 2 == 0, (
            "pairs of rows"
        )
        for tokens in (8, 16):
            few = launch_sizes.few_sizes(*asked, tokens)
            assert few is None or few.lanes <= 4 * few.steps and few.rows % 8 == 0 and few.ahead > 0
    for bits, op, columns in itertools.product((4, 6, 8), PRODUCTS, range(64, 30_000, 192)):
        sizes = launch_sizes.stream_sizes(DEVICE, bits, op, columns)
        block = products.stream_block(sizes.block, columns)
        held = (sizes.stages - 1) * sizes.rows * -(-columns // block) * block * 1.2 * bits / 8
        assert arch == 0 or held < ARCHITECTURES[arch] * 1024, (bits, op, columns)
