"""The tests; those of training are beside it. `make test` runs them all; they need no GPU and no
network. Inputs are random; each run prints its seed.

The Triton kernels run on the GPU if there is one, otherwise in Triton's interpreter; either way
they are compiled ahead of time for every supported architecture."""

import asyncio
import codecs
import contextlib
import copy as copy_module
import functools
import gc
import hashlib
import http.client
import http.server
import importlib
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
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import time
import traceback
import warnings
import weakref
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gguf
import huggingface_hub
import numpy
import pytest
import sentencepiece
import tokenizers
import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
if not ON_GPU and "COMPILES" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels is imported

import attention
import bench
import checkpoint
import formats
import fp8
import kernels
import launch
import run
import sampling
import serve
from chat import Printer
from chat import columns as columns_of
from checkpoint import (
    Loader,
    check_groups,
    check_memory,
    load,
    pick_dtype,
    read_config,
)
from dev import compare, fuzz, mutate, steps
from dev import kernels as op_table
from dev import passes as dev_passes
from dev import tune as tuner
from dev.checkpoints import sentencepiece_metadata, write_gguf
from extra import cli as cli_module
from extra import gguf as ggml
from extra import hopper, int4, layouts, parallel, quants
from extra.hub import local_checkpoint, pick_gguf
from extra.int4 import INT4
from extra.parallel import Ranks
from extra.save import save
from extra.speculation import Draft, Lookup, Pacer, Speculation
from extra.tensors import tensors_of
from figures import plot
from formats import Matrix
from fp8 import E4M3, E5M2
from kernels import FORMATS, PRODUCTS
from launch import tl
from model import (
    BANNED,
    LENGTHS,
    PROMPT_CHUNK,
    Config,
    Llama,
    State,
    Timings,
    captured,
    generate,
    rope_table,
)
from sampling import Sampler, Sampling
from session import Conversation, Session
from tokenizer import (
    TEMPLATES,
    Prompt,
    TextStream,
    Tokenizer,
    encode_continuation,
    find_template,
)
from training import ops as training

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
HERE = Path(__file__).parent
SEED = int(os.environ.get("TEST_SEED", random.SystemRandom().randrange(1 << 31)))
PATIENCE = 600  # seconds, even on a busy machine: what has not happened by then never will
TEXT = "Once upon a time there was a fox. It said: good day, crow! Żółw zjadł 12 jabłek. "
TEXT += "[INST] USER: tell me a tale [/INST]\n"


@pytest.fixture(autouse=True)
def seeded():
    print(f"TEST_SEED={SEED}")  # pytest shows it with a failure
    torch.manual_seed(SEED)
    random.seed(SEED)


@pytest.fixture(scope="session", autouse=True)
def interpreter():
    if not ON_GPU:
        mend_interpreter()


@functools.cache  # once, though training/test_training.py has this fixture, too
def mend_interpreter() -> None:
    """Rounds to bf16 to the nearest, as a GPU does: Triton's truncates, with errors up to twice as
    large. And it takes a third of the time: it prepares Triton's language once, not at each call of
    a function, looks a type up once, and does not compute whether integers overflow, which Triton's
    interpreter does and then ignores."""
    from triton.runtime import interpreter

    convert, type_of = interpreter._convert_float, functools.cache(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder

    def rounded(x, source, target, mode):
        if source.is_fp32() and target.is_bf16():
            return torch.tensor(x).bfloat16().view(torch.int16).numpy().view("uint16")
        return convert(x, source, target, mode)

    interpreter._convert_float = rounded
    interpreter._get_np_dtype = lambda t: type_of(tl.uint64 if t.scalar.is_ptr() else t.scalar)
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang(SimpleNamespace(__globals__=dict(tl=tl, core=tl.core)))
    interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)


# NMSE of an error of one ulp each
ONE_UNIT = {torch.float16: 2.0**-20, torch.bfloat16: 2.0**-14, torch.float32: 1e-10}
NAN, INF = float("nan"), float("inf")
FLOATS_8 = {"e4m3": E4M3, "e5m2": E5M2}
# padding, and values not finite on purpose
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="only a GPU has graphs and tensor cores")
BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])


# ---- helpers: random tiny Llamas made by transformers, which is also the oracle; the program in
# this process


RAMP = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
NORM = "model.layers.0.input_layernorm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


FAMILIES = {  # what each adds to Llama 2, as its config.json has it, but small
    "mha": dict(num_attention_heads=4, num_key_value_heads=4),
    "gqa": dict(num_key_value_heads=2, rope_parameters=dict(rope_type="default", rope_theta=5e5)),
    "mqa, tied": dict(num_key_value_heads=1, tie_word_embeddings=True, rms_norm_eps=1e-3),
    "linear": dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)),
    "llama 3.2": dict(num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=RAMP, eos_token_id=[2, 3, 4]),
    "smollm2": dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=48, tie_word_embeddings=True),
    "mistral 7b v0.1": dict(model="Mistral", num_key_value_heads=2, sliding_window=256),
    "mistral nemo": dict(model="Mistral", num_key_value_heads=2, sliding_window=None, head_dim=24),
    "qwen 2.5": dict(model="Qwen2", num_key_value_heads=2),
    "qwen 2.5, tied, longer": dict(
        model="Qwen2", num_key_value_heads=1, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=64),
    ),
    "qwen 3": dict(model="Qwen3", num_key_value_heads=2, head_dim=24),
}  # fmt: skip


def hugging_face_classes(model: str, like: str = "") -> tuple[type, type]:
    """The configuration and the model of a family. like: one in transformers that computes the
    same, if the family itself is not there; config.json then has the family's own name."""
    config = getattr(transformers, f"{like or model}Config")
    made = getattr(transformers, f"{like or model}ForCausalLM")
    if like:
        config = type(f"{model}Config", (config,), {"model_type": model.lower()})
        made = type(f"{model}ForCausalLM", (made,), {"config_class": config})
    return config, made


def hugging_face_model(vocab_size: int = 300, model: str = "Llama", like: str = "", **shape):
    transformers.utils.logging.disable_progress_bar()
    fields = dict(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
        initializer_range=0.3,  # large enough that logits differ and attention is sharp
    )  # fmt: skip
    make_config, make_model = hugging_face_classes(model, like)
    model = make_model(make_config(**fields | shape)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=2.0)
    return model


def test_a_family_that_transformers_lacks(tmp_path):
    hugging_face_model(model="Tales", like="Qwen2").save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert (said["model_type"], said["architectures"]) == ("tales", ["TalesForCausalLM"])


@torch.no_grad()
def oracle(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


@torch.inference_mode()
def logits_of(model, ids, *sizes: int, cache: State | None = None) -> torch.Tensor:
    """Of all tokens, evaluated so many at a time; all at once if no sizes are given."""
    cache, ids = (
        State(model) if cache is None else cache,
        torch.as_tensor(ids, device=model.device),
    )
    return torch.cat([model.forward(part, cache).cpu() for part in ids.split(sizes or len(ids))])


def logits_of_prompts(model, prompts, *sizes: int) -> torch.Tensor:
    """Logits of several prompts. Errors in 16 bits are measured over these, since one prompt can
    mislead: where two keys are nearly tied, one of two equally exact models may err several times
    as much (in 4% of prompts over twice)."""
    return torch.cat([logits_of(model, ids, *sizes) for ids in prompts])


def nmse(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact.double()).square().sum() / exact.double().square().sum()).item()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert ours.shape == theirs.shape and nmse(ours, theirs) < tolerance**2, (
        nmse(ours, theirs) ** 0.5
    )


def assert_equals_transformers(folder: Path, theirs):
    """-> our model of a folder, in fp32 on the CPU, whose logits are those of transformers'
    model."""
    ours, ids = load(folder, dtype="fp32", device="cpu"), torch.randint(250, (100,)).tolist()
    assert_close(logits_of(ours, ids), oracle(theirs, ids))
    return ours


def assert_refused(result: tuple[int, str, str], *said: str, code: int = 1) -> None:
    """A run (exit code, stdout, stderr) that ended with nothing but an error of one line, which
    says this."""
    seen, out, err = result
    assert seen == code and out == "" and err.startswith("error: ") and err.count("\n") == 1, result
    assert all(text in err for text in said), err


@contextlib.contextmanager
def changed_json(file: Path):
    """The object in a JSON file, to be changed in place."""
    value = json.loads(file.read_text())
    yield value
    file.write_text(json.dumps(value))


def edit(file: Path, **fields) -> None:
    with changed_json(file) as value:
        value.update(fields)


def train_sentencepiece(folder: Path, text: str = TEXT * 20, **options) -> None:
    (folder / "text").write_text(text)
    options = (
        dict(vocab_size=350, normalization_rule_name="identity", remove_extra_whitespaces=False)
        | options
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    train_sentencepiece(folder)
    size = sentencepiece.SentencePieceProcessor(
        model_file=str(folder / "tokenizer.model")
    ).vocab_size()
    torch.manual_seed(0)
    hugging_face_model(size, **FAMILIES["gqa"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny):
    """In fp32 on the CPU; not to be changed."""
    return load(tiny, dtype="fp32", device="cpu")


@pytest.fixture
def copy(tiny, tmp_path) -> Path:
    """The tiny checkpoint, to be corrupted."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def caller(main, monkeypatch, capfd, *flags):
    """A program in this process: call(*arguments, stdin=bytes) -> exit code, stdout, stderr."""

    def call(*arguments, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            code = main([*flags, *map(str, arguments)])
        except SystemExit as exit:
            code = exit.code
        return (code, *capfd.readouterr())

    return call


@pytest.fixture
def cli(monkeypatch, capfd):
    return caller(run.main, monkeypatch, capfd, "--device", "cpu")  # if nothing else is asked for


def program(*arguments, **options) -> subprocess.Popen:
    """Run the program in a process of its own."""
    command = [sys.executable, str(HERE / "run.py"), "--device", "cpu", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def in_shell(command: str, **options) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "HERE": str(HERE)}
    options |= dict(env=environment, capture_output=True, text=True, timeout=PATIENCE)
    return subprocess.run(["bash", "-c", command], **options)


def objects(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def fails(error: BaseException):
    def fail(*_):
        raise error

    return fail


def conversation(*texts: str, system: str = "") -> list[dict]:
    """What the user and the assistant say in turn."""
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
    ]
    return ([{"role": "system", "content": system}] if system else []) + turns


def spoil_tensors(change=lambda tensors: None, **metadata):
    """Change the tensors of a checkpoint in place, and the metadata of their file."""

    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        with safe_open(file, "pt") as f:
            held = f.metadata() | {
                name.replace("_", "-"): value for name, value in metadata.items()
            }
        tensors = load_file(file)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, held)

    return spoil


def both(*spoils):
    return lambda folder: [spoil(folder) for spoil in spoils]


def spoil_config(**fields):
    return lambda folder: edit(folder / "config.json", **fields)


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


def without_interpreter(call: str) -> None:
    """Call a function of this file in a process of its own, where Triton compiles."""
    environment = os.environ | {
        "COMPILES": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "0",
    }
    command = [sys.executable, "-c", f"import test_all; test_all.{call}"]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def as_if_on(arch: int) -> None:
    """In such a process, compile as if for a GPU of this architecture."""
    from triton.runtime import driver

    current = dict(
        device=0, stream=0, target=launch.triton.backends.compiler.GPUTarget("cuda", arch, 32)
    )
    driver.set_active(
        SimpleNamespace(
            **{f"get_current_{k}": lambda *_, value=v: value for k, v in current.items()}
        )
    )
    for module in (
        launch,
        kernels,
        attention,
        hopper,
        sampling,
        fp8,
        int4,
        training,
        parallel,
    ):
        module.capability, module.processors = lambda device: arch, lambda device: 132


def decode_in_graphs(monkeypatch, prompts: bool = False) -> None:
    """Without a GPU, as on one; but graphs run what they would have captured. prompts: whether they
    are graphs, as well."""
    event = SimpleNamespace(
        record=lambda stream: None, synchronize=lambda: None, elapsed_time=lambda other: 1.0
    )
    monkeypatch.setattr(Llama, "uses_graphs", True)
    if not prompts:
        monkeypatch.setattr(Llama, "_padded_step", lambda self, T, state: self.step(T, state))
    graph = lambda run, device, reset, pool=None: (
        (run(), reset()) and SimpleNamespace(replay=run, pool=lambda: None)
    )
    for module in ("model", "extra.speculation"):
        monkeypatch.setattr(f"{module}.captured", graph)
    for name, value in (("Event", event), ("synchronize", None), ("current_stream", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)


# ---- kernels: compiled for every architecture, with no GPU present; first, since it takes longest


# and the kilobytes of shared memory that a program may use
ARCHITECTURES = {80: 99, 89: 99, 90: 227, 120: 99}


def launch_all(dtype: torch.dtype, arch: int) -> None:
    """Launch the ops with shapes that reach every kernel."""
    kernels.few_sizes = lambda *_: launch.FewSizes(16, 8, 4, 8, 1)  # one tile, which compiles fast
    kernels.vector_sizes = lambda *_: launch.VectorSizes(2, 512, 2)
    several = launch.StreamSizes(2, 2048, 3, 3)  # rows, and blocks of a row
    one_block = launch.StreamSizes(1, 4096, 3, 3)
    kernels.stream_sizes = lambda _, bits, op, K: (
        several if half and op == "rmsnorm_swiglu" else one_block
    )
    attention.few_rows_sizes = lambda device: launch.SplitSizes(1, 64, 4, 1, 128)
    half = dtype == torch.float16  # bf16 is left out where only sizes differ
    new = lambda *shape, dtype=dtype: torch.zeros(shape, dtype=dtype)
    one = new(1, dtype=torch.int32)
    blank = lambda N, K, format: Matrix(format.empty(N, K, DEVICE) if format else new(N, K), format)

    def run_ops(names, T: int, heads=(8, 8, 128), format=None, ops=kernels.fused, **extra) -> None:
        for op in names:
            arguments = op_arguments(op, dtype, heads, T, 300, 500, **extra)[0]
            getattr(ops, op)(*encoded(arguments, format))

    for T in (1, 100, 3) if half else (1, 100):
        run_ops(OPS, T)
    for T in (13, 60) if half else ():
        run_ops(["attention", "linear_add"], T)
    for heads, T in (
        (((8, 1, 64), 3), ((4, 2, 256), 1), ((4, 2, 256), 100), ((2, 2, 256), 1)) if half else ()
    ):
        run_ops(["attention"], T, heads)
    for T in (1, 3):
        run_ops(PRODUCTS if half else PRODUCTS[1::2], T, format=E4M3)
        run_ops(["linear_add"], T, format=E5M2)
    for T in (13, 60) if half else ():
        run_ops(["linear_add"], T, format=E4M3)
    # no other instructions
    forms = (INT4, OWN, *FILE_FORMATS) if arch in (80, 90) else (INT4, quants.E4M3_128)
    for T, form in itertools.product((1, 3, 60), forms if half else (INT4,)):
        kernels.fused.linear_add(new(T, 4096), blank(66, 4096, form), new(T, 66))
    layer = SimpleNamespace(ffn_norm=new(4096), w13=blank(66, 4096, INT4))
    kernels.fused.rmsnorm_swiglu(new(1, 4096), layer, SimpleNamespace(norm_eps=1e-5))
    kernels._recode(
        blank(66, 4096, INT4), new(66, 4096, dtype=torch.int8), new(66, 1, dtype=torch.float32)
    )
    for T, form in ((1, None), (100, None), (1, E4M3))[: 3 if half else 2]:
        for extra in (dict(qkv_bias=new(12 * 128)), dict(qk_norm=new(2, 128))):
            run_ops(["rmsnorm_qkv_rope"], T, (8, 2, 128), form, **extra)
    C, F, V = 1024, 5504, 600
    for form in (None, E4M3) if half else (None,):
        w, output = blank(C, F, form), blank(V, C, form)
        exchange = parallel.Exchange([w, output], 0, [0, 0], new(2 * (C + V), dtype=torch.int64))
        exchange.linear_add(new(1, F), w, new(1, C))
        exchange.rmsnorm_linear(
            new(1, C), new(C), output, 1e-5, new(1, 2 * V - 1, dtype=torch.float32)
        )
    for norm in (None, new(512)):
        kernels.encode_rows(new(3, 512), norm, 1e-5)
    for T, D in ((1, 128), (100, 128 if half else 64)):
        x, layer, state = op_arguments("rmsnorm_qkv_rope", dtype, (8, 8, D), T, 300, 500)[0]
        k, v = (new(8, 500, D, dtype=torch.int8) for _ in range(2))
        state = changed(state, k=(None, k), v=(None, v))
        kernels.fused.rmsnorm_qkv_rope(x, layer, state)
        kernels.fused.attention(new(T, 8, D), layer, state)
    attention.decode_caches(k, v, one, 100, dtype)
    if half:
        run_ops(["attention"], 100, ops=kernels.ops("triton", "fp16"))
    if arch == 90:  # Hopper's own kernel for prompts
        run_ops(["attention"], 512)
    ids = [new(512, dtype=torch.int32) for _ in range(2)]
    changes = (
        dict(),
        dict(temp=0, repeat_penalty=1.1),
        dict(top_k=1000),
        dict(top_p=1),
        dict(top_k=0, top_p=1),
    )
    for settings in changes:
        sampler = Sampler(DEVICE, Sampling(**settings))
        kernels.fused.sample(new(1, 32000, dtype=torch.float32), *ids, one, sampler)
    # parts with fewer logits than a program has threads
    kernels.fused.sample(new(1, 4096, dtype=torch.float32), *ids, one, Sampler(DEVICE))
    kernels.fused.sample(new(5, 32000, dtype=torch.float32), *ids, one, sampler)
    from training.test_training import launch_training

    launch_training(dtype)


def compile_kernels(arch: int) -> None:
    """Compile every kernel for an architecture, to machine code that fits into shared memory. 86
    assembles the PTX of 80, as Triton would compile for it; 89 has the same PTX, except where its
    instructions for 8-bit floats are used."""
    from triton import knobs

    compiled, with_fp16_sums = set(), set()

    def start(kernel, grid, device, *arguments, **constants) -> None:
        if arch == 89 and not re.search("native|e5m2", str(constants)):
            return
        binary, name = kernel.warmup(*arguments, grid=grid, **constants), kernel.__name__
        ptx, shared, what = binary.asm["ptx"], binary.metadata.shared, (name, constants)
        compiled.add(name)
        assert binary.asm["cubin"] and shared <= ARCHITECTURES[arch] * 1024, (what, shared)
        if arch == 80:
            assemble = [knobs.nvidia.ptxas.path, "--gpu-name=sm_86", "-o", os.devnull, "-"]
            subprocess.run(assemble, input=ptx.encode(), check=True)
        if name == "_hopper_attention_kernel":
            assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
        else:
            assert ("griddepcontrol.wait" in ptx) == (arch >= 90), what
        if constants.get("FP16_SUMS"):
            with_fp16_sums.add(name)
            assert arch >= 90 or "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16" in ptx, (
                "no fp16 sums"
            )

    as_if_on(arch)
    launch.start = hopper.start = start
    for dtype in (torch.float16, torch.bfloat16):
        launch_all(dtype, arch)
    if arch == 89:
        assert "_vector_kernel" in compiled
        return
    modules = (kernels, attention, sampling, parallel, training)
    modules += (hopper,) if arch == 90 else ()
    every = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert compiled == every | {"few_attention_kernel"}, every ^ compiled
    assert with_fp16_sums == {"_attention_kernel"}


def test_kernels_compile():
    """In as many processes as there are cores, while another worker of pytest runs other tests."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda arch: without_interpreter(f"compile_kernels({arch})"), ARCHITECTURES))


# ---- model.py


def read_config_like(**fields) -> Config:
    base = dict(
        dim=32,
        n_layers=1,
        n_heads=4,
        n_kv_heads=4,
        head_dim=8,
        hidden_dim=64,
        vocab_size=100,
        norm_eps=1e-5,
    )
    return Config(**(base | fields))


def greedy(model, prompt: list[int], n: int, state=None, **options) -> list[int]:
    return list(generate(model, prompt, state, n, Sampling(temp=0), **dict(eos=[]) | options))


def test_cache_reuses_the_common_beginning(tiny_model):
    state, timings = State(tiny_model), Timings()
    first = greedy(tiny_model, [1, 5, 6, 7], 4, state, timings=timings)
    again = greedy(tiny_model, [1, 5, 6, 7], 4, state, timings=timings)
    assert first == again and timings.prompt_tokens == 4 + 1
    longer = [1, 5, 6, 7, *first[:2], 9]
    assert greedy(tiny_model, longer, 4, state, timings=timings) == greedy(tiny_model, longer, 4)
    assert timings.prompt_tokens == 4 + 1 + 1


@pytest.mark.parametrize("name, wrong", [
    ("format", "e9"), ("format", True), ("dtype", "fp64"), ("accumulate", "x"), ("backend", "cuda"),
    ("ctx_size", -5),
])  # fmt: skip
def test_wrong_arguments_are_named(tiny, tmp_path, name, wrong):
    with pytest.raises(ValueError, match=f"{name} is {wrong!r}; it must be"):
        load(tiny, device="cpu", **{name: wrong})
    if name in ("format", "dtype"):
        with pytest.raises(ValueError, match=f"{name} is {wrong!r}; it must be"):
            save(tiny, tmp_path / "new", device="cpu", **{name: wrong})
        assert not [*tmp_path.iterdir()]


def test_wrong_prompts_are_named(tiny, tiny_model):
    V = tiny_model.config.vocab_size
    refused = [
        ([1, bad, 5], f"the prompt contains the id {bad}; the model's are 0")
        for bad in (-1, V, 1 << 40)
    ]
    refused += [
        (bad, "a prompt is a list of ids: tokenizer.encode")
        for bad in ("text", ["text", "more"], [[1, 5]])
    ]
    refused.append(([], "is empty"))
    for prompt, said in refused:
        for evaluate in (
            lambda p: greedy(tiny_model, p, 1),
            lambda p: tiny_model.forward(p, State(tiny_model)),
        ):
            with pytest.raises((TypeError, ValueError), match=said):
                evaluate(prompt)
    with pytest.raises(TypeError, match="a list of ids"):
        greedy(tiny_model, torch.tensor([1, 5]), 1)
    for wrong in ("hi", [{"role": "user"}], []):
        with pytest.raises(TypeError, match="a conversation is a list of dicts"):
            Tokenizer(tiny).apply_chat_template(wrong)
    assert len(repr(tiny_model)) < 2000, "it prints weights"


def test_an_ignored_eos_is_never_sampled(tiny_model):
    every_but_7 = {*range(tiny_model.config.vocab_size)} - {7}
    for settings in (Sampling(temp=0), Sampling(), Sampling(temp=INF, top_k=0, top_p=1, min_p=0)):
        assert (
            list(
                generate(
                    tiny_model, [1, 5], n=5, sampling=settings, eos=every_but_7, ignore_eos=True
                )
            )
            == [7] * 5
        )
    state = State(tiny_model)
    greedy(tiny_model, [1, 5], 1, state, eos=[-1], ignore_eos=True)
    assert not state.never, "no eos is not the last id"


@BACKENDS
@pytest.mark.parametrize("kv_fp8", [False, True])
def test_context_to_its_last_slot(tiny, kv_fp8, backend):
    model = load(tiny, dtype="fp32", device=DEVICE.type, ctx_size=8, backend=backend, kv_fp8=kv_fp8)
    whole = greedy(model, [5, 6], 2)
    for size in (1, 2, 4):
        state, prompt = State(model, size), [5, 6][:size]
        assert greedy(model, prompt, -1, state) == whole[: size - len(prompt)]
        assert state.device_pos == state.pos
        with pytest.raises(ValueError, match=f"has {size + 1} tokens; the context holds {size}"):
            greedy(model, [7] * (size + 1), -1, state)


def test_accumulate_reaches_the_ops(tiny, monkeypatch):
    seen, product = [], kernels.library_product

    def library_product(x, norm, w, eps, accumulate, residual=None):
        seen.append(accumulate)
        return product(x, norm, w, eps, accumulate, residual)

    monkeypatch.setattr(kernels, "library_product", library_product)
    options = dict(dtype="fp32", device=DEVICE.type, backend="triton")
    for accumulate in ("auto", "fp32"):
        model = load(tiny, accumulate=accumulate, **options)
        logits_of(model, [1, 2, 3])
        bound = [op.keywords for op in vars(model.ops).values() if isinstance(op, partial)]
        assert bound == [dict(accumulate=accumulate)] * 5
        assert seen == [accumulate] * (4 * len(model.weights.layers) + 1)
        seen.clear()


# roundings of 2^-12, 2^-9
@pytest.mark.parametrize("dtype, limit", [("fp32", 1e-4), ("fp16", 0.01), ("bf16", 0.05)])
def test_fused_model_is_the_reference_model(tiny, dtype, limit):
    exact, plain, fused = (
        load(tiny, dtype=d, device=DEVICE.type, backend=b)
        for d, b in (("fp32", "torch"), (dtype, "torch"), (dtype, "triton"))
    )
    prompts = torch.randint(3, 300, (1 if dtype == "fp32" else 8, 19))
    right, by_torch, ours = (
        logits_of_prompts(model, prompts, 17, 1, 1) for model in (exact, plain, fused)
    )
    assert_close(by_torch, right, limit)
    assert nmse(ours, right) < 2 * nmse(by_torch, right) + 1e-10, (
        "less exact than torch in the same type"
    )
    if dtype == "fp32":
        for sampling in (Sampling(seed=SEED), Sampling(temp=0, repeat_penalty=1.3)):
            ours, theirs = (
                list(generate(m, [1, 5, 9], n=2, sampling=sampling, eos=[])) for m in (fused, exact)
            )
            assert ours == theirs


@pytest.mark.parametrize("how", ["generate", "single steps", "chunks"])
def test_no_step_sees_an_old_position(tiny, how):
    """After thousands of steps on a GPU, keys and values equal those of torch ops, which do not
    overlap."""
    steps = 3000 if ON_GPU else 4
    sizes = (
        [1] * steps
        if how == "single steps"
        else [random.choice((1, 2, 17, 40)) for _ in range(steps // 20 or 2)]
    )
    options = dict(dtype="fp32", device=DEVICE.type, ctx_size=max(steps, sum(sizes)) + 8)
    model, plain = (load(tiny, backend=backend, **options) for backend in ("triton", "torch"))
    state, expected = State(model), State(plain)
    with torch.inference_mode():
        if how == "generate":
            list(generate(model, [1, 5, 9], state, steps, Sampling(temp=1.5, seed=SEED), eos=[]))
        else:
            for part in torch.randint(3, 300, (sum(sizes),), device=DEVICE).split(sizes):
                state.append(part)
                model.step(len(part), state)
        assert int(state.device_pos) == state.pos
        plain.prefill(state.tokens[: state.pos].tolist(), expected)
    for ours, theirs in zip((*state.k, *state.v), (*expected.k, *expected.v)):
        ours, theirs = (t[:, : state.pos] for t in (ours, theirs))
        errors = (ours - theirs).square().sum((0, 2)) / theirs.square().sum((0, 2))
        assert errors.max() < 1e-6, f"position {int(errors.argmax())} of {state.pos}"


@BACKENDS
@pytest.mark.parametrize("kv_fp8", [False, True])
def test_weights_not_finite(copy, kv_fp8, backend):
    """E4M3 has no infinity, and its NaN decodes to 480; torch takes a row of NaN scores for a
    masked one."""
    sound = load_file(copy / "model.safetensors")
    # the last is the output matrix
    names = sorted((name for name in sound if "layers.1" not in name), reverse=True)
    spoiled = itertools.product(names, (NAN, INF, -INF))
    if backend == "triton":
        spoiled = [
            (f"model.layers.0.self_attn.{x}_proj.weight", bad)
            for x, bad in zip("qkv", (NAN, NAN, INF))
        ]
    for name, bad in spoiled:
        tensors = sound | {name: sound[name].clone()}
        tensors[name].view(-1)[5 + 3 * 64 * (sound[name].dim() - 1)] = bad
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        model = load(
            copy, dtype="fp32", device=DEVICE.type, ctx_size=16, backend=backend, kv_fp8=kv_fp8
        )
        for prompt in ([3], [1, 3, 6]):
            with pytest.raises(RuntimeError, match=f"not finite: {name} .*holds NaN or inf"):
                greedy(model, prompt, 1)
    with pytest.raises(ValueError, match=f"{name} in model.safetensors.*NaN or inf"):
        load(copy, device="cpu", format="e4m3")


@BACKENDS
@pytest.mark.parametrize("kv_fp8", [False, True])
def test_cache_not_finite(tiny, kv_fp8, backend):
    model = load(
        tiny, dtype="fp32", device=DEVICE.type, ctx_size=16, backend=backend, kv_fp8=kv_fp8
    )
    state, prompt = State(model), [1, 5, 6]
    greedy(model, prompt, 0, state)
    for (which, bad), new in itertools.product((("k", NAN), ("v", INF)), ([7], [7, 8, 9])):
        state.truncate(len(prompt))
        number = getattr(state, which)[1][:, 1, 2]
        before = number.clone()
        number.fill_(0x7F if kv_fp8 else bad)
        with pytest.raises(RuntimeError, match="not finite, although every weight is"):
            greedy(model, [*prompt, *new], 1, state)
        number.copy_(before)


def test_lengths_of_prompts():
    """From 192 tokens on, where arithmetic counts, padding adds at most a twelfth; there are few
    graphs, and any rest of a chunk is one."""
    assert list(LENGTHS) == sorted(set(LENGTHS)) and LENGTHS[0] == 1 and len(LENGTHS) < 72
    steps = [(low, high) for low, high in itertools.pairwise(LENGTHS) if high > 192]
    assert all(12 * (high - low) <= low for low, high in steps)
    assert {PROMPT_CHUNK["cuda"], 2 * PROMPT_CHUNK["cuda"]} <= {*LENGTHS}


def test_padded_prompts_are_the_prompts(monkeypatch):
    """The first of each padded length is captured, the others are replayed. Where the context ends,
    what was before is evaluated again."""
    model = load(cli_module.DEFAULT_MODEL, device=DEVICE.type, dtype="auto" if ON_GPU else "fp32")
    model.weights.embedding = model.weights.embedding.clone()
    # what stands beyond the prompt counts for nothing, not even as 0 * NaN
    model.weights.embedding[0] = torch.nan
    if not ON_GPU:
        decode_in_graphs(monkeypatch, prompts=True)
    state, plain = State(model, 600), State(model, 600)

    def check(*lengths: int) -> list[int]:
        for T in lengths:
            ids = torch.randint(3, model.config.vocab_size, (T,), device=DEVICE)
            model.prefill(ids.tolist(), state)
            exact = model.forward(ids, plain)[-1]
            assert state.pos == int(state.device_pos) == plain.pos
            assert nmse(state.logits, exact) < (1e-4 if ON_GPU else 1e-10), T
        return [length for _, length in state.graphs]

    with torch.inference_mode():
        assert check(20, 31, 25, 2, 100, 90, 7, 97, 8, 128, 1) == [32, 8, 128, 96, 1]
        # 91 positions are left: 32 tokens fit, 66 do not
        assert check(30, 60, 1) == [32, 8, 128, 96, 1, 64]
        for keys, exact in zip(state.k + state.v, plain.k + plain.v):
            assert nmse(keys, exact) < (1e-4 if ON_GPU else 1e-10), "beyond the context"
        state.truncate(1)
        plain.truncate(1)
        assert check(599) == [32, 8, 128, 96, 1, 64, 600]


def test_long_prompts_are_graphs(tiny_model, monkeypatch):
    """Chunks of 16 tokens; what remains after them is not a chunk of its own if it is short."""
    decode_in_graphs(monkeypatch, prompts=True)
    monkeypatch.setattr("model.LENGTHS", (1, 8, 16, 20))
    monkeypatch.setitem(PROMPT_CHUNK, "cpu", 16)
    for T, graphs, at in (
        (36, {16, 20}, [16, 36]),
        (37, {16, 8}, [16, 32, 37]),
        (20, {20}, [20]),
    ):
        state, done = State(tiny_model, 64), []
        ids = torch.randint(3, 300, (T,))
        with torch.inference_mode():
            tiny_model.prefill(ids.tolist(), state, lambda n, total, done=done: done.append(n))
            exact = tiny_model.forward(ids, State(tiny_model, 64))[-1]
        assert {length for _, length in state.graphs} == graphs and done == at
        assert nmse(state.logits, exact) < 1e-10


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_model_on_another_gpu(tiny):
    """Whatever the current device is: in another thread it is the first one again."""
    first, second = (load(tiny, dtype="fp32", device=f"cuda:{i}") for i in range(2))
    expected = greedy(first, [1, 5, 9], 20)
    with ThreadPoolExecutor(1) as pool:
        assert (
            pool.submit(greedy, second, [1, 5, 9], 20).result()
            == greedy(second, [1, 5, 9], 20)
            == expected
        )


@needs_gpu
def test_a_cache_is_freed_with_its_owner(tiny):
    model, held = load(tiny, device="cuda"), []
    for i in range(4):
        list(generate(model, [1, 5], n=3, sampling=Sampling(seed=i), eos=[]))
        held.append(torch.cuda.memory_allocated())
    state = State(model)
    list(generate(model, [1, 5], state, n=3, eos=[]))
    gone = weakref.ref(state)
    del state
    assert gone() is None and held[1] == held[3]


def test_nothing_is_collected_during_a_capture(monkeypatch):
    """Freeing a graph, such as a dropped Speculation's, would end the capture of another."""
    for name in ("torch.cuda.CUDAGraph", "torch.cuda.synchronize", "model._capture_stream"):
        monkeypatch.setattr(name, lambda *_: None)
    for name in ("graph", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("model.compile_kernels", lambda run, device: run())
    seen, resets = [], []
    captured(
        lambda: seen.append(gc.isenabled()),
        DEVICE,
        lambda: resets.append((len(seen), gc.isenabled())),
    )
    assert seen == [True, False] and resets == [(1, True), (2, True)] and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        captured(lambda: 1 / gc.isenabled(), DEVICE)
    assert gc.isenabled()


@pytest.mark.parametrize("top_k, other_top_k", [(5, 3), (40, 30)], ids=["listed", "sorted"])
def test_other_sampling_needs_no_other_graph(top_k, other_top_k, tiny, monkeypatch):
    """A graph is replayed as CUDA does it: with the arguments of the capture, but numbers are read
    anew."""
    recorded, captures = [], []

    def recording(function):
        def record(*arguments, **constants) -> None:
            recorded.append(functools.partial(function, *arguments, **constants))
            recorded[-1]()

        return record

    def captured(run, device, reset) -> SimpleNamespace:
        recorded.clear()
        run()
        reset()
        captures.append(launches := [*recorded])
        return SimpleNamespace(
            replay=lambda: [launch() for launch in launches] + [model.step(1, state)]
        )

    model = load(tiny, dtype="fp32", device=DEVICE, backend="torch", ctx_size=64)
    state, first = (
        State(model),
        Sampling(temp=2.0, top_k=top_k, top_p=0.9, repeat_penalty=1.1, repeat_last_n=30),
    )
    state.sampler.set(first)
    assert state.sampler.switches(model.config.vocab_size).sorts == (top_k == 40)
    changes = [
        dict(),
        dict(seed=SEED),
        dict(seed=(1 << 63) - 1),
        dict(temp=1.3),
        dict(temp=1e-9),
        dict(top_k=other_top_k),
    ]
    changes += [
        dict(top_p=0.4),
        dict(min_p=0.3),
        dict(min_p=0),
        dict(repeat_penalty=1.9),
        dict(repeat_last_n=20),
    ]
    every = [replace(first, **change) for change in changes]
    expected = [list(generate(model, [1, 5, 9], n=8, sampling=s, eos=[])) for s in every]
    assert len({*map(tuple, expected)}) > 6
    model.ops = SimpleNamespace(**vars(model.ops) | dict(sample=kernels.fused.sample))
    monkeypatch.setattr(sampling, "launch", recording(launch.launch))
    monkeypatch.setattr(sampling, "_find_floors", recording(sampling._find_floors))
    decode_in_graphs(monkeypatch)
    monkeypatch.setattr("model.captured", captured)
    assert [list(generate(model, [1, 5, 9], state, 8, s, eos=[])) for s in every] == expected
    assert len(captures) == 1
    for other in (
        Sampling(temp=0),
        Sampling(top_p=1),
        Sampling(top_k=100),
        Sampling(repeat_penalty=1.1),
    ):
        list(generate(model, [1, 5, 9], state, 1, other, eos=[]))
    list(generate(model, [1, 5, 9], State(model), 1, other, eos=[]))
    list(generate(model, [1, 5, 9], state, 1, other, eos=[3], ignore_eos=True))
    assert len(captures) == 7


# ---- kernels.py and attention.py: the op tables, and each op against its reference


GUARD, MARGIN = 77.0, 64


@pytest.fixture
def guarded(monkeypatch):
    """Outputs are filled with NaN before the op, between guard values. -> a check that the guards
    are intact."""
    buffers, original = [], torch.Tensor.new_empty  # the interpreter calls it too, with a device

    def new_empty(self, *shape, **options) -> torch.Tensor:
        if "device" in options:
            return original(self, *shape, **options)
        count = torch.Size(shape).numel()
        buffers.append(original(self, count + 2 * MARGIN, **options).fill_(GUARD))
        return buffers[-1][MARGIN : MARGIN + count].fill_(NAN).view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", lambda x: new_empty(x, *x.shape))

    def check(allocates: bool = True) -> None:
        assert buffers or not allocates, "the op allocates its output in a way that is not guarded"
        for buffer in buffers:
            guards = torch.cat((buffer[:MARGIN], buffer[-MARGIN:]))
            assert (guards.double() == GUARD).all(), "written outside of the output"

    return check


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(DEVICE, dtype)


def dense(m: Matrix) -> Matrix:
    return Matrix(m.dense().float())


def mapped(arguments, change):
    """Arguments of an op with `change` made to all values, also in a layer or a state."""
    if isinstance(arguments, SimpleNamespace):
        return changed(arguments, **mapped(vars(arguments), change))
    if isinstance(arguments, dict):
        return {name: mapped(value, change) for name, value in arguments.items()}
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(mapped(value, change) for value in arguments)
    return change(arguments)


def changed(fields: SimpleNamespace, **changes) -> SimpleNamespace:
    """The same with other values of some fields."""
    return SimpleNamespace(**vars(fields) | changes)


def as_fp32(arguments, decode: bool = True):
    """An op's arguments in fp32; matrices decoded."""

    def change(value):
        if isinstance(value, Matrix):
            return dense(value) if decode else value
        return value.float() if torch.is_tensor(value) and value.is_floating_point() else value

    return mapped(arguments, change)


def cloned(arguments):
    return mapped(arguments, lambda a: a.clone() if torch.is_tensor(a) else a)


def encoded(arguments, format):
    encode = lambda w: Matrix(format.encode(w.data), format)
    return mapped(arguments, lambda a: encode(a) if format and isinstance(a, Matrix) else a)


def tensors_in(arguments: tuple) -> dict[str, torch.Tensor]:
    """By "place of the argument.field"; of keys and values, those of the second layer."""
    fields = lambda a: vars(a) if isinstance(a, SimpleNamespace) else {"": a}
    values = {f"{i}.{n}": v for i, a in enumerate(arguments) for n, v in fields(a).items()}
    values = {n: v[1] if isinstance(v, tuple) else v for n, v in values.items()}
    return {name: value for name, value in values.items() if torch.is_tensor(value)}


def op_arguments(
    op: str, dtype: torch.dtype, heads: tuple, T: int, before: int, S: int = 0, **layer
) -> tuple[tuple, tuple]:
    """Arguments of an op for `heads` (H, KH, D), and which of them it writes in place, as
    tensors_in names them. layer: fields that not every layer has. It is the second of a model."""
    H, KH, D = heads
    C, F, V, S = 8 * (2 * H + 1), 52, 101, S or before + T + 9
    matrix = lambda rows, columns: Matrix(randn(rows, columns, dtype=dtype, scale=columns**-0.5))
    state = SimpleNamespace(
        tokens=torch.randint(0, V, (S,), device=DEVICE).int(),
        device_pos=torch.tensor([before], dtype=torch.int32, device=DEVICE),
        k=(None, randn(KH, S, D, dtype=dtype)),
        v=(None, randn(KH, S, D, dtype=dtype)),
        rope=torch.randn(S, D // 2, 2, device=DEVICE),
        norm_eps=1e-5,
        scratch=launch.Scratch(DEVICE),
    )
    # activations as large as real outliers, or so small that epsilon is most of the sum
    x, norm = randn(T, C, dtype=dtype, scale=3000 if before else 0.003), randn(C, dtype=dtype)

    def of_layer(**weights) -> SimpleNamespace:
        return SimpleNamespace(**dict(index=1, qkv_bias=None, qk_norm=None) | weights | layer)

    qkv = lambda: of_layer(attention_norm=norm, wqkv=matrix((H + 2 * KH) * D, C))
    ffn = lambda: of_layer(ffn_norm=norm, w13=matrix(2 * F, C))
    logits = lambda: torch.full((T, V), NAN, device=DEVICE)
    half = functools.partial(randn, dtype=dtype)
    return {
        "embedding": lambda: ((T, half(V, C), state), ()),
        "rmsnorm": lambda: ((x, norm, 1e-5), ()),
        "rmsnorm_qkv_rope": lambda: ((x, qkv(), state), ("2.k", "2.v")),
        "attention": lambda: ((half(T, H, D), of_layer(), state), ()),
        "linear_add": lambda: ((half(T, F), matrix(C, F), half(T, C)), ("2.",)),
        "rmsnorm_swiglu": lambda: ((x, ffn(), state), ()),
        "rmsnorm_linear": lambda: ((x, norm, matrix(V, C), state, logits()), ("4.",)),
    }[op]()


# sampling is tested below, by what it chooses
OPS = [name for name in vars(kernels.fused) if "sample" not in name]
# for several tokens: norm, the library's matmul, output; half a place each
ROUNDED_TWICE = {"rmsnorm_swiglu": 1.5**2}
DTYPE_AND_HEADS = [
    (torch.float16, heads) for heads in ((2, 2, 16), (4, 1, 24), (6, 2, 8), (1, 1, 136))
]
DTYPE_AND_HEADS += [(torch.bfloat16, (4, 1, 24))]


def equals_reference(op: str, draws: list[tuple], written: tuple, limit: float) -> None:
    """Whether an op does what its reference does in fp32, on average over several draws of its
    arguments, writes where it should, and leaves its inputs as they are."""
    errors = {}
    for arguments in draws:
        mine, exact = cloned(arguments), cloned(as_fp32(arguments))
        right, ours = getattr(kernels.reference, op)(*exact), getattr(kernels.fused, op)(*mine)
        mine, exact, before = tensors_in(mine), tensors_in(exact), tensors_in(arguments)
        new = slice(None)
        if op == "rmsnorm_qkv_rope":
            start = int(arguments[2].device_pos)
            new = slice(start, start + len(ours))
            for name in written:  # other positions
                assert torch.equal(mine[name][:, : new.start], before[name][:, : new.start])
                assert torch.equal(mine[name][:, new.stop :], before[name][:, new.stop :])
        for name, a, b in [
            ("y", ours, right),
            *((name, mine[name][:, new], exact[name][:, new]) for name in written),
        ]:
            assert a.shape == b.shape
            errors.setdefault(name, []).append(nmse(a, b))
        for name, was in before.items():
            if name not in written:
                assert torch.equal(mine[name], was), (op, name, "changed its input")
    for name, found in errors.items():
        assert sum(found) / len(found) < limit, (op, name, found)


def test_tables_have_the_same_ops_and_signatures():
    """Except that `accumulate`, which kernels.ops binds, has no meaning for a reference."""
    for name, (reference, op) in kernels.OPS.items():
        parameters = dict(inspect.signature(op).parameters)
        bound = parameters.pop("accumulate", None)
        assert bool(bound) == isinstance(getattr(kernels.fused, name), partial), name
        assert bound is None or bound.kind is inspect.Parameter.KEYWORD_ONLY, name
        assert parameters == dict(inspect.signature(reference).parameters), name
        assert op.__name__ == name and reference.__name__ == f"{name}_ref"
    assert kernels.OPS.keys() == vars(kernels.fused).keys() == vars(kernels.reference).keys()


TOKENS_AND_BEFORE = [(1, 0), (1, 40), (2, 0), (2, 5), (17, 0), (17, 40)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T, before", TOKENS_AND_BEFORE)
@pytest.mark.parametrize("dtype, heads", DTYPE_AND_HEADS, ids=str)
def test_op_equals_its_reference(dtype, heads, T, before, op, guarded):
    arguments, written = op_arguments(op, dtype, heads, T, before)
    limit = ONE_UNIT[dtype] * (ROUNDED_TWICE.get(op, 1) if T > 1 else 1)
    equals_reference(op, [arguments], written, limit)
    guarded(allocates=op not in ("linear_add", "rmsnorm_linear"))  # these are given their output


@pytest.mark.parametrize("T, before", TOKENS_AND_BEFORE)
@pytest.mark.parametrize("dtype, heads", DTYPE_AND_HEADS, ids=str)
def test_op_equals_its_reference_with_bias_and_norms(dtype, heads, T, before, guarded):
    H, KH, D = heads
    bias, qk_norm = (
        randn(*shape, dtype=dtype, scale=30) for shape in (((H + 2 * KH) * D,), (2, D))
    )
    # in a prompt, norm, matmul, its norm and q are rounded
    limit = ONE_UNIT[dtype] * (1 if T == 1 else 2.5**2)
    extras = dict(qkv_bias=bias), dict(qk_norm=qk_norm), dict(qkv_bias=bias, qk_norm=qk_norm)
    for extra, format in itertools.product(extras, (None, E4M3) if T < 17 else (None,)):
        # with what the one before left in scratch. Sums in half precision, which a GPU makes of a
        # token's packed products, leave an error that differs between draws
        count = 8 if ON_GPU and T == 1 and format else 1
        draw = partial(op_arguments, "rmsnorm_qkv_rope", dtype, heads, T, before, **extra)
        draws = [encoded(draw()[0], format) for _ in range(count)]
        equals_reference("rmsnorm_qkv_rope", draws, draw()[1], limit)
    guarded()


@pytest.mark.parametrize("T", [1, 3, 17])
def test_qkv_into_caches_of_2_31_values(T):
    """Of which only a few pages are touched."""
    x, layer, state = op_arguments("rmsnorm_qkv_rope", torch.float16, (1, 1, 64), T, 5, S=100)[0]
    small = [torch.zeros(1, 100, 64, dtype=torch.int8, device=DEVICE) for _ in range(2)]
    large = [torch.empty(1, 1 << 25, 64, dtype=torch.int8, device=DEVICE) for _ in range(2)]
    for k, v in (small, large):
        kernels.fused.rmsnorm_qkv_rope(x, layer, changed(state, k=(None, k), v=(None, v)))
    assert all(torch.equal(a[:, 5 : 5 + T], b[:, 5 : 5 + T]) for a, b in zip(small, large))


@pytest.mark.parametrize("T, sizes", [
    *((1, sizes) for sizes in ((2, 32, 4), (4, 16, 2), (8, 64, 4))),
    *((T, sizes) for T in (2, 8, 9, 16) for sizes in ((16, 2, 2, 4, 1), (32, 4, 2, 8, 2), (64, 1, 4, 16, 3))),
], ids=str)  # fmt: skip
def test_products_do_not_depend_on_launch_sizes(T, sizes, monkeypatch):
    monkeypatch.setattr(kernels, "vector_sizes", lambda *_: launch.VectorSizes(*sizes))
    monkeypatch.setattr(kernels, "few_sizes", lambda *_: launch.FewSizes(*sizes))
    cases = [(op, *op_arguments(op, torch.float16, (4, 1, 8), T, 5)) for op in PRODUCTS]
    half = functools.partial(randn, dtype=torch.float16)
    if T > 1:  # rows of several tiles
        cases.append(
            (
                "linear_add",
                (half(T, 1048), Matrix(half(40, 1048, scale=0.03)), half(T, 40)),
                ("2.",),
            )
        )
    for (op, arguments, written), format in itertools.product(cases, (None, E4M3)):
        limit = ONE_UNIT[torch.float16] * ROUNDED_TWICE.get(op, 1)
        equals_reference(op, [encoded(arguments, format)], written, limit)


def check_attention(
    heads: tuple, T: int, before: int, kv_fp8=False, runs=1, dtype=torch.float16
) -> None:
    """It equals its reference, whatever comes after the T tokens; and again with what that left in
    scratch."""
    q, layer, state = op_arguments("attention", dtype, heads, T, before)[0]
    if kv_fp8:
        state.k = (None, E4M3.round(state.k[1]))
        state.v = (None, E4M3.round(state.v[1]))
    for cached in (state.k[1], state.v[1]):
        cached[:, before + T :] = 0x7F if kv_fp8 else torch.nan
    exact = attention.attention_ref(q.float(), layer, state)
    for _ in range(runs):
        error = nmse(attention.attention(q, layer, state), exact)
        assert error < ONE_UNIT[dtype], (T, before)


@pytest.mark.parametrize("heads, sizes", [
    ((2, 2, 16), (4, 16, 4, 1, 0)), ((8, 1, 32), (64, 16, 4, 1, 0)),
    ((4, 2, 136), (4, 16, 4, 1, 0)),
    ((2, 2, 16), (64, 16, 4, 1, 0)), ((8, 1, 32), (1, 32, 4, 2, 64)),
    ((4, 2, 136), (1, 32, 4, 2, 64)),
], ids=str)  # fmt: skip
def test_attention_does_not_depend_on_launch_sizes(heads, sizes, monkeypatch):
    monkeypatch.setattr(attention, "split_sizes", lambda *_: launch.SplitSizes(*sizes))
    for T, before in ((1, 0), (1, 200), (3, 150)):
        check_attention(heads, T, before, runs=2)


# for launches
FEW_ROWS_SIZES = [(1, 64, 4, 1, 64), (4, 32, 2, 1, 128), (64, 64, 4, 1, 0)][: 3 if ON_GPU else 1]
FEW_ROWS_HEADS = [(2, 1, 24), (3, 1, 64), (14, 2, 64), (2, 2, 128), (4, 1, 64)][
    : 5 if ON_GPU else 3
]


@pytest.mark.parametrize("sizes", FEW_ROWS_SIZES, ids=str)
@pytest.mark.parametrize("heads", FEW_ROWS_HEADS, ids=str)
@pytest.mark.parametrize("kv_fp8", [False, True])
def test_attention_of_few_rows(kv_fp8, heads, sizes, monkeypatch):
    """hopper.py's kernel on a GPU, in the interpreter those that do the same."""
    monkeypatch.setattr(attention, "few_rows_sizes", lambda device: launch.SplitSizes(*sizes))
    rows = ((16, 700), (64, 500), (128, 300)) if ON_GPU else ((16, 300), (64, 150))
    most = [(count * heads[1] // heads[0], before) for count, before in rows]
    for T, before in [(1, 90), (2, 0), (4, 61), (3, 250), (5, 200), *most]:
        check_attention(heads, T, before, kv_fp8, runs=2 if ON_GPU else 1)


@pytest.mark.parametrize("kv_fp8", [False, True])
@pytest.mark.parametrize("start_pos", [0, 1, 77, 127, 5000] if ON_GPU else [0, 77])
@pytest.mark.parametrize("heads", [(2, 2, 64), (4, 1, 24), (4, 2, 128)], ids=str)
def test_attention_of_a_prompt(heads, start_pos, kv_fp8):
    for T in (65, 127, 512, 513, 640, 700, 2048) if ON_GPU else (65, 127):
        check_attention(heads, T, start_pos, kv_fp8)


@pytest.mark.parametrize("limit", ["tokens", "bytes"])
def test_reference_attention_takes_a_prompt_in_blocks(limit, monkeypatch):
    """Whose masks are small however long the context is."""
    q, layer, state = op_arguments("attention", torch.float32, (4, 2, 16), 70, 30)[0]
    whole = attention.attention_ref(q, layer, state)
    masks, attend = [], torch.nn.functional.scaled_dot_product_attention

    def watched(*heads, attn_mask):
        masks.append(attn_mask.shape)
        return attend(*heads, attn_mask=attn_mask)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    if limit == "tokens":
        monkeypatch.setattr(attention, "MOST_TOKENS", 32)
        expected = [(64, 62), (64, 94), (12, 100)]
    else:
        monkeypatch.setattr(attention, "MASK_BYTES", 5 * 2 * 100 * 40)
        expected = [(80, 70), (60, 100)]
    assert nmse(attention.attention_ref(q, layer, state), whole) < 1e-10
    assert masks == expected


@pytest.mark.parametrize("dtype, format, small", [
    (torch.float32, None, False), (torch.bfloat16, None, False), (torch.bfloat16, None, True),
    (torch.bfloat16, INT4, False),
])  # fmt: skip
def test_matrices_in_a_cpu_layout_are_the_same_matrices(dtype, format, small, monkeypatch):
    """As products on a CPU read them: fp32 column by column, bf16 in oneDNN's layout, a small
    matrix in both, one in 4 bits in torch's own."""
    monkeypatch.setattr(kernels, "SMALL", 2 * 320 * 256 if small else 0)
    w = Matrix(torch.randn(320, 256).to(dtype))
    (w,) = encoded([w], format)
    laid_out = kernels.in_cpu_layout(w, "torch", dtype)
    assert torch.equal(laid_out.dense(), w.dense())
    assert laid_out.shape == w.shape == (320, 256) and laid_out.nbytes == w.nbytes
    assert kernels.in_cpu_layout(w, "triton", dtype) is w
    if dtype == torch.float32:
        assert laid_out.data.stride() == (1, 320)
    else:
        assert kernels.in_cpu_layout(w, "torch", torch.float32) is w
    if dtype == torch.bfloat16:
        assert bool(laid_out.cpu_layout) == bool(format or small and kernels.multiplies_bf16())
    for T in (9, 1):
        x = torch.randn(T, 256).to(dtype)
        exact = x.double() @ w.dense().double().t()
        assert nmse(kernels.linear_ref(x, laid_out), exact) < (2 if format else 1) * ONE_UNIT[dtype]
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize("format", [None, E4M3, INT4])
def test_prompts_need_few_onednn_kernels(format, monkeypatch):
    """oneDNN keeps what it compiles for each number of rows, so a chat's memory would grow with
    each new length, whether a matrix is in its layout or decoded for each prompt."""
    sizes = set()
    (w,) = encoded([Matrix(torch.randn(8, 32, dtype=torch.bfloat16))], format)
    exact = w.dense().float().t()
    if not format:
        w = Matrix(w.data.to_mkldnn())

    def product(x, weights, *rest):
        sizes.add(len(x))
        weights = weights.to_dense() if weights.is_mkldnn else weights
        return (x.float() @ weights.float().t()).to(x.dtype)

    monkeypatch.setattr(kernels, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", product)
    monkeypatch.setattr(kernels.functional, "linear", product)
    for T in range(1, PROMPT_CHUNK["cpu"] + 1):
        x = torch.randn(T, 32, dtype=torch.bfloat16)
        assert nmse(kernels.linear_ref(x, w), x.float() @ exact) < 2 * ONE_UNIT[torch.bfloat16]
    assert len(sizes) <= 20 and max(sizes) == PROMPT_CHUNK["cpu"]


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_half_sums_saturate_and_do_not_hide_nan():
    """Attention scores far beyond 65504, and results beyond it of a bias, RoPE and SwiGLU, stay
    finite."""
    H, D, T = 2, 32, 70
    full = functools.partial(torch.full, dtype=torch.float16, device=DEVICE)
    q, k, v = full((T, H, D), 200.0), full((H, 128, D), 100.0), full((H, 128, D), 100.0)
    k[:, :5], v[:, 5:] = -100.0, 900.0
    ops = kernels.ops("triton", "fp16")
    state = SimpleNamespace(
        k=[k],
        v=[v],
        device_pos=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        rope=torch.full((T, D // 2, 2), 0.5**0.5, device=DEVICE),
        norm_eps=0.0,
        scratch=launch.Scratch(DEVICE),
    )
    x = full((T, 64), 1.0)
    layer = SimpleNamespace(
        index=0,
        attention_norm=x[0].clone(),
        wqkv=Matrix(full((3 * H * D, 64), 65504 / 64)),
        qkv_bias=full((3 * H * D,), 65504.0),
        qk_norm=None,
    )
    y = ops.attention(q, layer, state)
    assert torch.isfinite(y).all() and (y[8:] > 890).all()
    ops.rmsnorm_qkv_rope(x, layer, state)
    assert all(
        torch.isfinite(cache[:, :T]).all() and cache[:, :T].max() == 65504 for cache in (k, v)
    )
    for value, expected in ((60000.0, 65504.0), (NAN, NAN)):
        ab, out = full((T, 128), value), full((T, 64), 0.0)
        launch.launch(
            kernels._swiglu_kernel, (T, 1), out.device, ab, out, 64, BLOCK=1024, FP16_SUMS=True
        )
        assert out.allclose(full((T, 64), expected), rtol=0, atol=0, equal_nan=True)
    assert ops.linear_add(ab, Matrix(full((64, 128), 1.0)), full((T, 64), 0.0)).isnan().all()


@needs_gpu
def test_prompt_beyond_65504_with_half_sums():
    ops = kernels.ops("triton", "fp16")

    def positive(a):
        """Sums that pass 65504 in both directions are NaN, which is reported."""
        if isinstance(a, Matrix):
            return Matrix(a.data.abs() * 1e4)
        return a.abs_() if torch.is_tensor(a) and a.is_floating_point() else a

    for op in PRODUCTS:
        arguments = mapped(op_arguments(op, torch.float16, (4, 2, 16), 70, 5)[0], positive)
        y = getattr(ops, op)(*arguments)
        finite = [y]
        if op == "rmsnorm_qkv_rope":
            finite = [arguments[2].k[1], arguments[2].v[1]]
        assert all(torch.isfinite(t).all() for t in finite), op
        assert not torch.backends.cuda.matmul.allow_fp16_accumulation


# ---- sampling.py


NOTHING = torch.zeros(9, dtype=torch.int32)  # tokens before


def choose(
    logits: torch.Tensor, tokens: torch.Tensor, position: int, ops=kernels.reference, **settings
) -> list[int]:
    """The tokens with the one that is chosen for the position or, for several rows of logits, those
    that end there."""
    device = DEVICE if ops is kernels.fused else torch.device("cpu")
    tokens, pos = (
        tokens.to(device, copy=True),
        torch.tensor([position], dtype=torch.int32, device=device),
    )
    host_tokens, sampler = tokens.clone(), Sampler(device, Sampling(**settings))
    ops.sample(
        logits.view(-1, logits.shape[-1]).to(device, copy=True), tokens, host_tokens, pos, sampler
    )
    assert logits.dim() > 1 or tokens[position] == host_tokens[position].clamp(min=0)
    return host_tokens.tolist()


def choose_alike(logits: torch.Tensor, tokens: torch.Tensor, position: int, **settings) -> int:
    """What the reference chooses for the position, and the kernel, too."""
    expected = choose(logits, tokens, position, **settings)
    assert choose(logits, tokens, position, ops=kernels.fused, **settings) == expected, settings
    return expected[position]


def draw(logits: torch.Tensor, count: int = 4000, **settings) -> torch.Tensor:
    """How often each token is chosen, over many seeds."""
    drawn = [choose(logits, NOTHING, 0, **settings, seed=SEED + i)[0] for i in range(count)]
    return torch.bincount(torch.tensor(drawn), minlength=len(logits)) / count


OFF = dict(temp=1.0, top_k=0, top_p=1.0, min_p=0.0)


def test_sampling_distribution_and_filters():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 2 + 2**-22])
    for temp in (1e-50, 1e-9, 0.5, 2.0, 1e9, INF):
        expected = ((logits.double() - logits.max()) / temp).softmax(0)
        # 5 sigma of 4000 draws
        assert (draw(logits, **(OFF | dict(temp=temp))) - expected).abs().max() < 0.04
    logits = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]).log()
    kept = lambda logits=logits, **s: draw(logits, 600, **(OFF | s)).gt(0).tolist()
    assert kept() == [True] * 5
    assert kept(top_k=2) == [True, True, False, False, False]
    assert kept(top_p=0.76) == kept(min_p=0.2) == [True, True, True, False, False]
    assert kept(top_p=0.0) == kept(temp=0.0) == [True, False, False, False, False]
    assert kept(top_p=0.6, temp=100.0) == [True, True, False, False, False], (
        "filters act before the temperature"
    )
    # equals at the edge are all kept
    assert kept(torch.tensor([1.0] * 6 + [0.0] * 2), top_k=2, top_p=0.3) == [True] * 6 + [False] * 2
    assert all(kept(torch.zeros(20), top_k=2))


@pytest.mark.parametrize("wrong", [
    dict(temp=-1), dict(temp=NAN), dict(top_k=-1), dict(top_p=7), dict(min_p=1.1),
    dict(repeat_penalty=0),
    dict(repeat_last_n=-2), dict(seed=-1), dict(seed=1 << 63),
], ids=str)  # fmt: skip
def test_settings_out_of_range(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(
        ValueError, match=f"^{name} is {value}; it must be (from .* to .*|.* or more)$"
    ):
        Sampling(**wrong)


@pytest.mark.parametrize("window", [1, 2, 3, 5, 7, 8, -1, 1 << 40])
def test_the_penalty_looks_back_its_window(window):
    logits, limited = torch.full((20,), -20.0), 0 < window < 9
    for high, back in itertools.product((2.0, -1.0), (window, window + 1) if limited else (1, 12)):
        logits[3], logits[4], expected = high, high - 0.5, 3 if back == window + 1 else 4
        tokens = torch.full((16,), 5, dtype=torch.int32)  # token 3 that far back, token 5 elsewhere
        tokens[12 - back] = 3
        settings = dict(repeat_penalty=2.0, repeat_last_n=window)
        assert choose_alike(logits, tokens, 12, temp=0, **settings) == expected
        assert choose_alike(logits, tokens, 12, top_k=0, temp=1e-9, **settings) == expected
        assert choose_alike(logits, tokens, 12, temp=0, repeat_last_n=window) == 3, "no penalty"
        # more than are read at a time
        beyond = torch.cat((tokens, torch.full((1500,), 5, dtype=torch.int32)))
        assert choose_alike(logits, beyond, 1510, temp=0, **settings) == (3 if limited else 4)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_logits_not_finite(bad):
    logits = torch.randn(2500)
    logits[2000] = bad
    for settings in (dict(), dict(top_k=0), dict(top_k=200), dict(temp=0), dict(top_k=0, top_p=1)):
        assert choose_alike(logits, NOTHING, 0, **settings) == -1


def few_above_equals(V: int, height: float, many: int) -> torch.Tensor:
    logits, places = torch.full((V,), -5.0), torch.randperm(V)
    logits[places[:7]], logits[places[7 : 7 + min(V - 10, many)]] = height + torch.rand(7), 1.0
    return logits


KINDS_OF_LOGITS = {
    "normal": lambda V: 3 * torch.randn(V),
    "flat": lambda V: 0.03 * torch.randn(V),
    "equal": torch.zeros,
    "rounded": lambda V: (3 * torch.randn(V)).round(),
    "one above the others": lambda V: (3e-5 * torch.randn(V)).index_fill(0, torch.tensor(7), 2.0),
    "near zero": lambda V: 3 * torch.randn(V) * torch.rand(V) ** 20,
    "banned": lambda V: (3 * torch.randn(V)).index_fill(0, torch.arange(V // 4), BANNED),
    "few above equals": partial(few_above_equals, height=2.0, many=90),
    "few above many equals": partial(few_above_equals, height=4.5, many=2500),
}


@pytest.mark.parametrize("kind", KINDS_OF_LOGITS)
def test_sampling_equals_the_reference(kind):
    choices = dict(
        temp=(0, 1e-50, 1e-30, 1e-9, 0.7, 1.5, 1e6, INF),
        top_k=(0, 1, 5, 12, 40, 65, 80, 1099, 5000, 10**300),
        top_p=(0.0, 1e-9, 0.5, 0.97, 1.0), min_p=(0, 0.05, 0.5),
        repeat_penalty=(1.0, 1.2), repeat_last_n=(-1, 0, 7, 64),
    )  # fmt: skip
    # top-k of as many as there are parts, each as likely as the others; the equals that top-k keeps
    # count for top-p
    cases = [(V, dict(top_k=k, top_p=1.0, min_p=0, temp=1e6)) for V, k in ((1100, 5), (3000, 12))]
    cases += [(V, dict(top_k=40, top_p=0.5, min_p=0, temp=1.5)) for V in (100, 300, 3000, 5000)]
    # from several parts: the largest; any
    cases += [(5000, OFF | dict(temp=temp)) for temp in (0, 0, 1)]
    for _ in range(13):
        settings = {name: random.choice(values) for name, values in choices.items()}
        cases.append((random.choice((17, 300, 1100, 3000, 5000)), settings))
    for V, settings in cases:
        logits, tokens = KINDS_OF_LOGITS[kind](V), torch.randint(0, V, (64,), dtype=torch.int32)
        choose_alike(
            logits,
            tokens,
            random.choice((0, 1, 20, 50)),
            **settings,
            seed=random.randrange(1 << 63),
        )


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.999999, 1.0])
@pytest.mark.parametrize("top_k", [0, 129, 1099, 1100])
def test_thresholds_found_by_sorting(top_k, top_p, rows):
    V, settings = 1100, dict(top_k=top_k, top_p=top_p, min_p=0, temp=3, seed=SEED)
    sorts = Sampler(DEVICE, Sampling(**settings)).switches(V).sorts
    assert sorts == (top_p < 1 or 0 < top_k < V)
    for kind in ("normal", "equal", "rounded", "few above equals"):
        logits = torch.stack([KINDS_OF_LOGITS[kind](V) for _ in range(rows)])
        choose_alike(logits if rows > 1 else logits[0], NOTHING, 4, **settings)


def test_the_lowest_logit_that_sorting_keeps():
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.07, 0.03], [0.05, 0.4, 0.4, 0.1, 0.05]]).log()
    floors = torch.empty(2)
    for top_k, top_p, places in (
        (0, 0.0, (0, 1)), (0, 0.49, (0, 1)), (0, 0.51, (1, 1)), (0, 0.79, (2, 1)), (0, 0.81, (2, 3)),
        (0, 0.98, (4, 0)), (1, 1.0, (0, 1)), (2, 1.0, (1, 1)), (3, 1.0, (2, 3)), (4, 1.0, (3, 0)),
        # the equals that top-k keeps count for top-p
        (3, 0.8, (1, 1)), (1, 0.6, (0, 1)), (4, 0.89, (2, 3)), (4, 0.93, (3, 0)),
    ):  # fmt: skip
        sampler = Sampler(torch.device("cpu"), Sampling(top_k=top_k, top_p=top_p))
        sampling._find_floors(logits, sampler.numbers, sampler.switches(5), floors)
        assert floors.tolist() == [logits[0, places[0]], logits[1, places[1]]], (top_k, top_p)


def test_rows_are_sampled_as_single_tokens_are():
    tokens, penalty = torch.randint(0, 2000, (40,), dtype=torch.int32), dict(repeat_penalty=1.3)
    for settings in (
        dict(seed=3),
        dict(temp=0),
        dict(top_k=0, **penalty),
        dict(top_k=0, top_p=1),
        penalty,
    ):
        logits = 3 * torch.randn(5, 2000)
        logits[3, 7] = torch.nan
        choose_alike(logits, tokens, 30, **settings)
        assert choose(logits, tokens, 30, **settings)[29] == -1


# ---- formats.py and fp8.py: a format of one's own, the 8-bit floats, products in half precision, 8-bit caches


@launch.jit
def _own_load(
    w, start, k, left, COLUMNS: tl.constexpr, NEIGHBOURS: tl.constexpr, GROUP: tl.constexpr
):
    scales = formats.load_groups(w[1], start, k, left, COLUMNS, 1, GROUP)
    return formats.load_elements(w, start, k, left, COLUMNS, NEIGHBOURS), scales


@launch.jit
def _own_values(tile, SCALES: tl.constexpr):
    return tile[0].to(tl.float32) * tile[1].to(tl.float32)


class OwnFormat(formats.Format):
    """Integers with a half as scale for each 32 columns: all that has to be written to add such a
    format."""

    def shapes(self, N, K):
        return {"codes": (torch.int8, (N, K)), "scale": (torch.float16, (N, K // 32))}

    def encode(self, weights, out=None):
        groups = weights.float().unflatten(1, (-1, 32))
        out = out or self.empty(*weights.shape, weights.device)
        out[1].copy_((groups.abs().amax(2) / 127).clamp(min=1e-4))
        out[0].copy_((groups / out[1][..., None].float()).round().clamp(-127, 127).flatten(1))
        return out

    def stored_weights(self, tensors):
        codes, scales = tensors
        return (codes.float().unflatten(1, (-1, 32)) * scales[..., None].float()).flatten(1)


OWN = OwnFormat("own", 8, _own_load, _own_values, group=32)


@pytest.fixture(scope="session")
def grouped_folder(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("grouped") / "model"
    torch.manual_seed(3)
    hugging_face_model(300, **FAMILIES["gqa"] | dict(intermediate_size=128)).save_pretrained(folder)
    shutil.copy(tiny / "tokenizer.model", folder)
    return folder


@pytest.mark.parametrize("format, dtype, backend", [
    ("own", "fp32", "torch"), ("own", "fp16", "torch"), ("own", "bf16", "torch"),
    ("int4", "fp32", "torch"), ("int4", "bf16", "torch"), ("own", "fp32", "triton"),
    ("int4", "bf16", "triton"),
])  # fmt: skip
def test_model_in_a_format(grouped_folder, tmp_path, format, dtype, backend, monkeypatch):
    """In a prompt, with one token and with eight; and again when it is saved and loaded."""
    monkeypatch.setitem(FORMATS, "own", OWN)
    loaded = partial(load, grouped_folder, format=format, device=DEVICE.type)
    ours = loaded(dtype=dtype, backend=backend)
    exact, plain = (loaded(dtype=d, backend="torch") for d in ("fp32", dtype))
    assert ours.weights.layers[0].w2.format is FORMATS[format]
    decoded = backend == "torch" and not ON_GPU  # as a CPU reads it faster
    assert ours.weights.output.format is (OWN if format == "own" else None if decoded else E4M3)
    ours.accumulate = "fp32"  # otherwise a GPU decodes a prompt's weights in 4 bits to E4M3
    with_dense_weights(exact)
    with_dense_weights(plain)
    # the interpreter is slow to decode a matrix, as for a prompt, and for several tokens in fp32
    parts = (20, 1, 8) if backend == "torch" else (20, 1) if dtype == "fp32" else (8, 1)
    prompts = torch.randint(3, 300, (1 if dtype == "fp32" else 8, sum(parts)))
    right, by_torch, by_ours = (
        logits_of_prompts(model, prompts, *parts) for model in (exact, plain, ours)
    )
    # on a CPU, a single token's activations are rounded to fp16
    rounding = 1e-7 if format == "int4" else 1e-9
    assert nmse(by_ours, right) < 2 * nmse(by_torch, right) + rounding, (
        "less exact than torch with the same weights"
    )
    save(grouped_folder, tmp_path / "saved", format=format, device=DEVICE.type, quiet=True)
    again = load(tmp_path / "saved", dtype=dtype, device=DEVICE.type, backend=backend)
    assert again.checkpoint.format is FORMATS[format]
    for one, other in zip(ours.weights.matrices, again.weights.matrices):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors))


def test_cpu_without_bf16_products(grouped_folder, monkeypatch):
    """bf16 is then stored as fp16, and prompts are multiplied in fp32; matrices in 4 bits have
    torch's own product. A model that fits into its caches runs in fp32."""
    types, product, cpu = set(), kernels.functional.linear, torch.device("cpu")
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda: False)
    assert pick_dtype("auto", torch.bfloat16, cpu, 8e6) == torch.float32
    assert (
        pick_dtype("auto", torch.float16, cpu, 9e6)
        == pick_dtype("auto", torch.bfloat16, cpu)
        == torch.bfloat16
    )
    monkeypatch.setattr(
        kernels.functional, "linear", lambda x, w: types.add(x.dtype) or product(x, w)
    )
    options = dict(dtype="fp32"), dict(dtype="bf16"), dict(dtype="bf16", format="int4")
    exact, plain, in_4_bits = (load(grouped_folder, device="cpu", **given) for given in options)
    assert {m.data.dtype for m in plain.weights.matrices} == {torch.float16}
    assert all(bool(m.cpu_layout) == (m.format is INT4) for m in in_4_bits.weights.matrices)
    prompts = torch.randint(3, 300, (8, 59))
    right, ours, _ = (
        logits_of_prompts(model, prompts, 57, 1, 1) for model in (exact, plain, in_4_bits)
    )
    assert_close(ours, right, 0.05)
    assert types == {torch.float32}


def with_dense_weights(model) -> None:
    for matrix in model.weights.matrices:
        matrix.tensors, matrix.format, matrix.cpu_layout = (matrix.dense().float(),), None, None


EVERY_CODE = torch.arange(256).to(torch.uint8).view(torch.int8)
EVERY_HALF = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)


@pytest.mark.parametrize("form", FLOATS_8)
def test_8_bit_codes_decode_and_encode(form):
    """As torch converts them; numbers beyond the largest become the largest, and codes of NaN are
    never written."""
    format, values = FORMATS[form], EVERY_CODE.view(FORMATS[form].dtype).float()
    finite = torch.isfinite(values)
    assert format.floats(EVERY_CODE)[finite].equal(values[finite])
    assert format.floats(EVERY_CODE)[~finite].isnan().all()
    assert format.round(values[finite]).equal(EVERY_CODE[finite])
    assert (
        format.floats(format.round(torch.tensor([1e30, -INF]))).abs().eq(values[finite].max()).all()
    )
    for code in EVERY_CODE[~finite]:
        with pytest.raises(ValueError, match="codes of NaN"):
            format.check((torch.tensor([[0, code]], dtype=torch.int8), torch.ones(1, 1)))
    format.check((EVERY_CODE[None, finite], torch.ones(1, 1)))
    weights = torch.randn(50, 40) * 2.0 ** torch.randint(-126, 100, (50, 1))
    weights[7:9] = torch.tensor([[0], [1e-44]])
    format.check(format.encode(weights))


@pytest.mark.parametrize("form, bound", [("e4m3", 2.0**-4), ("e5m2", 2.0**-3)])
def test_encoded_rows_lose_least(form, bound):
    format, weights = FORMATS[form], torch.randn(70, 300) * torch.logspace(-6, 6, 70)[:, None]
    weights[3] = 0
    near = format.decoded(format.encode(weights))
    peak = weights.abs().amax(1, keepdim=True)
    assert ((near - weights).abs() <= bound * torch.maximum(weights.abs(), peak * 2.0**-6)).all()
    for step in (0.0, 0.25, 0.5, 0.75):
        tried = peak.clamp(min=1e-30) / format.top * 2**step
        other = format.decoded((format.round(weights / tried), tried))
        assert ((near - weights).square().sum(1) <= (other - weights).square().sum(1)).all()


@pytest.mark.parametrize("form", FORMATS)
def test_encode_and_check_refuse_what_is_not_finite(form):
    """And scales that are not positive."""
    format, weights, third = FORMATS[form], torch.randn(4, 64), torch.tensor(2)
    for bad in (NAN, INF):
        with pytest.raises(ValueError, match="NaN or inf"):
            format.encode(weights.index_fill(1, third, bad))
    largest = int4.MOST if format is INT4 else 1e38
    *codes, scales = format.encode(weights.sign() * largest)
    assert scales.isfinite().all()
    if format is INT4:
        with pytest.raises(ValueError, match="a weight beyond 5e[+]36 cannot be stored"):
            format.encode(weights * 1e37)
    *codes, scales = format.encode(weights)
    for bad in (0.0, -1.0, NAN, INF):
        with pytest.raises(ValueError, match="scales that are not"):
            format.check((*codes, scales.index_fill(0, third, bad)))


@pytest.mark.parametrize("form", FLOATS_8)
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_ops_read_8_bit_matrices(dtype, form, T):
    """Against the reference with the same weights decoded: reading them adds no error of its own.
    Products in half precision leave an NMSE of 0.26 ONE_UNIT, SwiGLU's 0.59 on
    average over many draws; in a tenth of them the few largest of its outputs exceed one unit."""
    for op in PRODUCTS:
        errors = []
        for _ in range(16 if op == "rmsnorm_swiglu" and T == 1 else 1):
            arguments = encoded(op_arguments(op, dtype, (4, 2, 16), T, 5)[0], FORMATS[form])
            # the reference in fp32, since rounding in other types is not what is tested
            in_fp32 = as_fp32(arguments, decode=False)
            exact = getattr(kernels.reference, op)(*cloned(as_fp32(arguments)))
            outputs = (
                getattr(kernels.fused, op)(*cloned(arguments)),
                getattr(kernels.reference, op)(*cloned(in_fp32)),
            )
            errors.append([nmse(output, exact) for output in outputs])
        ours, theirs = torch.tensor(errors).mean(0)
        assert ours < ONE_UNIT[dtype] and theirs < ONE_UNIT[torch.float16], (op, ours, theirs)


@pytest.mark.parametrize("peak", [1, 30, 36, 40, 150])
def test_products_in_half_precision_with_large_norms(peak):
    """On a GPU, eight products are summed in half precision: all energy in eight neighbours is the
    worst case."""
    for K, spread in itertools.product((256, 4096, 8192), (1, 8, 256)):
        norm, x = torch.full((K,), float(peak)).half().to(DEVICE), torch.zeros(1, K)
        x[0, :spread] = 100.0
        (w,) = encoded([Matrix(torch.full((16, K), 448.0, device=DEVICE))], E4M3)
        x, plain = x.half().to(DEVICE), (norm.float(), dense(w))
        kernels.fit_norm(norm, w)
        assert norm.max() <= kernels.NORM_LIMIT
        state = SimpleNamespace(norm_eps=1e-5)
        out, exact = (torch.empty(1, 16, device=DEVICE) for _ in range(2))
        kernels.rmsnorm_linear_ref(x.float(), *plain, state, exact)
        assert nmse(kernels.rmsnorm_linear(x, norm, w, state, out), exact) < ONE_UNIT[torch.float16]


def test_kernels_encode_as_torch_does():
    """All finite fp16 numbers, numbers between the codes and far beyond them, infinities and
    NaN."""
    between = torch.rand(1 << 16) * 2.0 ** torch.randint(-14, 12, (1 << 16,))
    beyond = torch.tensor([1e30, -1e30, torch.inf, -torch.inf, torch.nan])
    x = torch.cat([EVERY_HALF[torch.isfinite(EVERY_HALF)].float(), between, -between, beyond]).to(
        DEVICE
    )
    codes = torch.empty(len(x), dtype=torch.int8, device=DEVICE)

    @launch.jit
    def encode(x, codes, N, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(codes + at, fp8.e4m3_encode(tl.load(x + at, mask=at < N)), mask=at < N)

    encode[(-(-len(x) // 4096),)](x, codes, len(x), BLOCK=4096)
    finite = torch.isfinite(x)
    assert torch.equal(codes[finite], E4M3.round(x[finite])) and (codes[~finite] == 0x7F).all()


@pytest.mark.parametrize("T", [1, 3, 80])
@pytest.mark.parametrize("dtype, heads", [
    (torch.float16, (2, 2, 16)), (torch.float16, (6, 2, 24)), (torch.bfloat16, (6, 2, 24)),
], ids=str)  # fmt: skip
def test_ops_on_an_8_bit_cache(dtype, heads, T):
    """The reference of the QKV op writes the nearest codes, its kernel the same, except where it
    rounds the other way; attention reads them exactly."""
    x, layer, state = op_arguments("rmsnorm_qkv_rope", dtype, heads, T, 40)[0]
    caches = [E4M3.round(state.k[1]), E4M3.round(state.v[1])]
    ours, exact = cloned(caches), cloned(caches)
    unrounded = [state.k[1].float(), state.v[1].float()]
    with_caches = lambda k, v: changed(state, k=(None, k), v=(None, v))
    kernels.fused.rmsnorm_qkv_rope(x, layer, with_caches(*ours))
    for held in (exact, unrounded):
        kernels.reference.rmsnorm_qkv_rope(as_fp32(x), as_fp32(layer), with_caches(*held))
    floats = attention.cached_ref
    for mine, theirs, nearest, before in zip(ours, exact, unrounded, caches):
        assert torch.equal(theirs, E4M3.round(nearest))
        assert torch.equal(mine[:, :40], before[:, :40]) and torch.equal(
            mine[:, 40 + T :], before[:, 40 + T :]
        )
        off, size = (floats(mine) - floats(theirs)).abs(), floats(theirs).abs()
        # before rope, where terms may cancel
        rounded = 2 * torch.finfo(dtype).eps * size[:, 40 : 40 + T].max()
        assert (off <= 2.0**-3 * size + 2.0**-9 + rounded).all(), "more than the next code"
        assert (off[:, 40 : 40 + T] > 0).double().mean() < 0.2
    check_attention(heads, T, 40, kv_fp8=True, dtype=dtype)


@needs_gpu
@pytest.mark.parametrize("accumulate", ["auto", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FLOATS_8)
def test_8_bit_tensor_cores_multiply_a_prompt(form, dtype, accumulate):
    """Activations in E4M3 have an error of at most 2^-4: a third of its square, halved since most
    err less."""
    x, w = randn(80, 256, dtype=dtype), Matrix(randn(512, 256, dtype=torch.float16, scale=1 / 16))
    (w,) = encoded([w], FORMATS[form])
    if not kernels.on_tensor_cores(w):
        pytest.skip("this GPU has none")
    residual = randn(80, 512, dtype=dtype)
    y = kernels.linear_add(x, w, added := residual.clone(), accumulate=accumulate)
    assert y is added and 0 < nmse(y, residual.float() + x.float() @ dense(w).data.t()) < 2.0**-10


def test_activations_as_codes():
    x = randn(5, 300, dtype=torch.float16) * torch.logspace(-3, 3, 5, device=DEVICE)[:, None].half()
    codes, scales = kernels.encode_rows(x)
    peak = x.float().abs().amax(1, keepdim=True)
    assert torch.allclose(scales, peak / 448)
    # x / scales would round differently; half-way between two codes, the rounding of 448 / peak
    # decides
    exact = [E4M3.round(x.float() * (448 / peak) * (1 + bit)) for bit in (0, 2**-23, -(2**-23))]
    assert torch.stack([codes == nearest for nearest in exact]).any(0).all()
    x, norm = x.float(), randn(300, dtype=torch.float32)
    (codes, scales), exact = kernels.encode_rows(x, norm, 1e-5), kernels.rmsnorm_ref(x, norm, 1e-5)
    assert torch.allclose(scales, exact.abs().amax(1, keepdim=True) / 448)
    nearest = E4M3.floats(E4M3.round(exact / scales))
    # a value half-way between two codes may go to either
    assert nmse(E4M3.floats(codes), nearest) < 1e-5


@pytest.mark.parametrize("K", [96, 4448])
def test_int4_recoded_as_e4m3(K):
    w = int4_matrix(64, K)
    recoded = E4M3.empty(64, K, w.data.device)
    kernels._recode(w, *recoded)
    # three bits of mantissa: 2^-8 / 12 to 2^-6 / 12
    assert nmse(E4M3.decoded(recoded), w.dense()) < 2.0**-10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_decoded_caches(dtype):
    caches = (
        torch.arange(-128, 128, device=DEVICE)
        .to(torch.int8)
        .repeat(2, 2, 500, 1)
        .view(2, 2, 4000, 32)
        .unbind()
    )
    pos = torch.tensor([1000], dtype=torch.int32, device=DEVICE)
    for codes, values in zip(caches, attention.decode_caches(*caches, pos, 17, dtype)):
        exact = attention.cached_ref(codes)[:, :1017].to(dtype)
        assert exact.isnan().any() and torch.equal(
            values[:, :1017].nan_to_num(7.0), exact.nan_to_num(7.0)
        )


# ---- extra/int4.py


@functools.cache
def int4_matrix(N: int, K: int) -> Matrix:
    torch.manual_seed(5)
    w = torch.randn(N, K, device=DEVICE) * torch.logspace(-4, 2, N, device=DEVICE)[:, None]
    return encoded([Matrix(w)], INT4)[0]


def test_all_4_bit_codes_scales_and_zero_points():
    """Each of them is what its formula says, alone in its place."""
    scales = torch.arange(0xF0, dtype=torch.int32)
    exponent, mantissa = scales >> 4, scales & 15
    values = (1 + mantissa / 16) * 2.0 ** (exponent - 23)
    assert torch.equal(int4._scales(scales), values) and torch.equal(
        int4._scale_codes(values), scales
    )
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
    """As little as Q4_K with a search for the scale, for a normal matrix 5.2e-3 of its mean
    square."""
    w = torch.rand(64, 1024) - 0.5 if spread == "uniform" else torch.randn(64, 1024)
    w = {"far from zero": w + 3, "close together": 1 + 0.01 * w}.get(spread, w) * torch.logspace(
        -20, 20, 64
    )[:, None]
    tensors = INT4.encode(w)
    INT4.check(tensors)
    with pytest.raises(ValueError, match="scales that are not positive and finite"):
        INT4.check((tensors[0], tensors[1] | 0xF0 << 8, tensors[2]))
    assert 8 * sum(t.nbytes for t in tensors) / w.numel() < 4.55
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
    monkeypatch.setattr(kernels, "stream_sizes", lambda *_: launch.StreamSizes(4, 2048, 1, 3))
    monkeypatch.setattr(kernels, "processors", lambda device: 3)
    for N, K in ((48, 96), (42, 1216), (20, 4096), (26, 4160)):
        w, x, norm = (
            int4_matrix(N, K),
            randn(T, K, dtype=dtype),
            torch.rand(K, device=DEVICE).to(dtype) + 0.5,
        )
        # rows count alike
        rows = dense(w).data / dense(w).data.square().mean(1, keepdim=True).sqrt()
        size = dense(w).data.square().mean(1).sqrt()
        out = (
            kernels.rmsnorm_linear(
                x,
                norm,
                w,
                SimpleNamespace(norm_eps=1e-5),
                torch.empty(T, N, device=DEVICE),
                accumulate="fp32",
            )
            / size
        )
        normed = kernels.rmsnorm_ref(x.float(), norm.float(), 1e-5)
        # weights are decoded to halves; a token's sums are halves, and its norm is not as large as
        # fit_norm has it
        limit = (
            (2e-4 if dtype == torch.bfloat16 else 5e-5) if T == 1 else 1e-6 + ONE_UNIT[dtype] * 8
        )
        assert nmse(out, normed @ rows.t()) < limit, (N, K)


def test_heads_of_a_4_bit_matrix(monkeypatch):
    """Several programs share a head, each with fewer rows than its vectors hold."""
    monkeypatch.setattr(kernels, "stream_sizes", lambda *_: launch.StreamSizes(2, 2048, 8, 3))
    monkeypatch.setattr(kernels, "processors", lambda device: 3)
    N, C, D, dtype = 5 * 48, 320, 48, torch.float16

    def draw(**shapes: tuple[int, ...]) -> tuple:
        extra = {name: randn(*shape, dtype=dtype) for name, shape in shapes.items()}
        _, layer, state = op_arguments("rmsnorm_qkv_rope", dtype, (3, 1, D), 1, 4, **extra)[0]
        layer.attention_norm = randn(C, dtype=dtype)
        (layer.wqkv,) = encoded([Matrix(torch.randn(N, C, device=DEVICE))], INT4)
        return randn(1, C, dtype=dtype), layer, state

    # where few of a norm's weights are large, errors vary between draws
    for extra in (dict(), dict(qkv_bias=(N,)), dict(qk_norm=(2, D))):
        draws = [draw(**extra) for _ in range(64 if ON_GPU else 1)]
        equals_reference("rmsnorm_qkv_rope", draws, ("2.k", "2.v"), 4 * ONE_UNIT[dtype])


# ---- run.py: the command line


def test_stdout_has_only_the_text(cli, tiny):
    flags = ("-m", tiny, "-p", "Once upon", "-n", 8, "--temp", 0, "--device", "auto")
    code, out, err = cli(*flags)
    assert code == 0 and out.startswith("Once upon") and out.endswith("\n") and len(out) > 10
    for word in ("load", "prompt", "generated 8 tokens", "memory", f"fp32 on {DEVICE}"):
        assert word in err
    assert "seed" not in err, "with --temp 0 it means nothing"
    code, bare, err = cli(*flags, "--no-display-prompt", "--quiet")
    assert code == 0 and "Once upon" + bare == out and err == ""
    code, out, err = cli(*flags[:4], "-n", 0)
    assert (
        code == 0
        and out == "Once upon\n"
        and "generated 0 tokens\n" in err
        and "tokens/s" not in err
    )


def test_prompt_from_file_stdin_and_escapes(cli, tiny, tmp_path):
    file, flags = tmp_path / "prompt", ("-m", tiny, "-n", 4, "--temp", 0)
    prompt = 'a\nb\t"ż\\ \\d'
    file.write_text(prompt + "\n")
    expected = cli(*flags, "-p", r"a\nb\t\"\xc5\xbc\\ \d")[1]
    assert expected.startswith(prompt)
    for how in (["-f", file], ["--no-escape", "-p", prompt], []):
        assert cli(*flags, *how, stdin=prompt.encode() + b"\r\n")[1] == expected, how
    assert cli(*flags, "-p", "-", stdin=prompt.encode())[1] == expected
    assert_refused(cli(*flags, "-p", r"a\xff", "--quiet"), "the text is not UTF-8")


def test_seed_repeats_the_text(cli, tiny):
    flags = ("-m", tiny, "-n", 12, "--ignore-eos")
    _, out, err = cli(*flags)
    seed = int(err.split("seed ")[1].split()[0])
    assert cli(*flags, "--seed", seed)[1] == out != cli(*flags, "--seed", seed + 1)[1]


def test_sampling_of_the_checkpoint(cli, copy):
    """It is used where no flag is given."""
    fields = dict(temperature=0.0, top_p=0.5, top_k=None, repetition_penalty=1.5, do_sample=True)
    (copy / "generation_config.json").write_text(json.dumps(fields))
    run = lambda *flags: cli("-m", copy, "-p", "Once", "-n", 8, "-s", 1, *flags)
    _, own, err = run()
    assert "sampling  temp 0, top-p 0.5, repeat-penalty 1.5 (the checkpoint's own" in err
    _, same, err = run("--temp", 0, "--top-p", 0.5, "--repeat-penalty", 1.5)
    assert own == same and "sampling  " not in err
    assert "sampling  top-p 0.5 (" in run("--repeat-penalty", 1, "--temp", 0)[2]
    edit(copy / "generation_config.json", top_p=2)
    assert_refused(run(), "generation_config.json: top_p is 2; it must be a number from 0 to 1")
    assert run("--top-p", 0.5)[0] == 0, "what a flag overrides is not judged"
    edit(copy / "generation_config.json", temperature=0.6, top_p=0.9, top_k=-1, min_p=0.2)
    assert checkpoint.read_sampling(copy) == dict(
        temp=0.6, top_k=0, top_p=0.9, min_p=0.2, repeat_penalty=1.5
    )
    edit(copy / "generation_config.json", do_sample=False)
    assert checkpoint.read_sampling(copy)["temp"] == 0, "as transformers generates"


def test_context_full_or_beyond_the_trained(cli, tiny):
    for size, n, full, beyond in (
        (16, 15, True, False),
        (256, 1, False, False),
        (257, 1, False, True),
    ):
        code, _, err = cli("-m", tiny, "-p", "Once", "-n", n, "-c", size, "--ignore-eos")
        assert code == 0 and ("context of 16 tokens is full" in err) == full
        assert ("(beyond the model's 256: expect nonsense there)" in err) == beyond


def test_jsonl_says_why_a_text_ended(cli, tiny):
    flags = ("-m", tiny, "-p", "Once", "--temp", 0, "--ignore-eos", "--quiet")
    code, out, err = cli(*flags, "-n", 12, "-o", "jsonl")
    (whole,) = objects(out)
    assert code == 0 and err == "" and whole["ended_by"] == "length" and whole["new_tokens"] == 12
    assert whole["prompt"] == "Once" and whole["prompt_tokens"] == whole["evaluated_tokens"] > 1
    assert (
        whole["prompt_seconds"] > 0
        and whole["generation_seconds"] > 0
        and whole["tokens_per_s"] > 0
    )
    assert whole["text"] + "\n" == cli(*flags, "-n", 12, "--no-display-prompt")[1]
    (stopped,) = objects(
        cli(*flags, "-n", 12, "--stop", whole["text"][4:7], "--stop", "\0", "-o", "jsonl")[1]
    )
    assert (
        stopped["ended_by"] == "stop"
        and stopped["text"] == whole["text"][: whole["text"].find(whole["text"][4:7])]
    )
    (full,) = objects(cli(*flags, "-n", -2, "-c", 16, "-o", "jsonl")[1])
    assert full["ended_by"] == "context" and full["prompt_tokens"] + full["new_tokens"] == 16
    (none,) = objects(cli(*flags, "-n", 0, "-o", "jsonl")[1])
    assert none["text"] == "" and none["ended_by"] == "length"
    assert none["tokens_per_s"] is none["prompt_seconds"] is None


def test_what_ends_a_text(cli, copy):
    """An eos that the tokenizer does not flag as special has a text, but it is neither shown nor
    remembered."""
    tokenizer = Tokenizer(copy)
    ids = greedy(load(copy, device="cpu"), tokenizer.encode("Once"), 12)
    end = max(set(ids), key=ids.index)  # the last to appear for the first time
    edit(copy / "generation_config.json", eos_token_id=[2, end])
    assert tokenizer.bytes_of(end) and ids.index(end) > 0
    (text,) = objects(
        cli("-m", copy, "-p", "Once", "-n", 12, "--temp", 0, "-o", "jsonl", "--quiet")[1]
    )
    assert text["text"] == b"".join(map(tokenizer.bytes_of, ids[: ids.index(end)])).decode(
        errors="replace"
    )
    assert text["ended_by"] == "eos" and text["new_tokens"] == ids.index(end) + 1


def test_progress_of_a_long_prompt(cli, tiny, monkeypatch):
    shown, original = io.StringIO(), tqdm
    at_once = dict(delay=0, disable=False, mininterval=0, file=shown)
    monkeypatch.setattr("chat.tqdm", lambda **options: original(**options | at_once))
    monkeypatch.setitem(PROMPT_CHUNK, "cpu", 16)
    assert cli("-m", tiny, "-p", "fox " * 40, "-n", 1, "-c", 300)[0] == 0
    done, total = map(int, re.findall(r"(\d+)/(\d+) \[", shown.getvalue())[-1])
    assert shown.getvalue().count("\rprompt") > 3 and 64 < total <= done + 16


def test_flags_of_llama_cpp(cli, tiny, tmp_path):
    flags = (
        "-hf",
        tiny,
        "--predict",
        8,
        "--temperature",
        0,
        "--repeat-last-n",
        3,
        "-t",
        1,
        "-dev",
        "none",
        "-s",
        3,
    )
    expected = cli("-m", tiny, "-n", 8, "--temp", 0, "-p", "Once upon")[1]
    code, out, err = cli(
        *flags, "-p", "Once upon", "-ngl", 99, "-fa", "on", "-b", 512, "--mmap", "-no-cnv"
    )
    assert (code, out) == (0, expected) and err.startswith(
        "note: -ngl, -fa, -b, --mmap: no effect here, ignored\n"
    )
    stop = expected[12:14]
    assert (
        cli(*flags, "-p", "Once upon", "-r", stop)[1] == expected[: expected.index(stop, 9)] + "\n"
    )
    (tmp_path / "system").write_text("Be kind.\n")
    talk = (
        "-m",
        tiny,
        "-n",
        6,
        "--temp",
        0,
        "--ignore-eos",
        "--chat-template",
        "llama2",
        "-p",
        "hello",
        "-cnv",
    )
    systems = (
        ["-sys", "Be kind."],
        ["--system-prompt", "Be kind."],
        ["-sysf", tmp_path / "system"],
    )
    answers = {cli(*talk, *system)[1] for system in systems}
    assert len(answers) == 1 and answers != {cli(*talk)[1]}
    code, out, _ = cli("--version")
    assert code == 0 and re.match(
        rf"fused-llama with Python 3.*torch {torch.__version__.split('+')[0]}", out
    )


# usage and errors


@pytest.mark.parametrize("main, flags, said", [
    (run.main, "-sys x -p a", "-sys needs --chat"),
    (run.main, "--chat -no-cnv", "-no-cnv cannot be used with --chat"),
    (run.main, "--save d --fp8 --prompt=a", "--prompt cannot be used with --save"),
    (run.main, "--save d", "--save writes matrices in 8 or 4 bits: add --fp8"),
    (run.main, "--int4 --fp8", "both say"),
    (run.main, "-p a -f b", "--prompt and --file both give a prompt; use one"),
    (run.main, "--draft-max 8 -p a", "--draft-max is for --draft"),
    (run.main, "-c 99999999", "-c/--ctx-size: 99999999: must be from 0 to 16,777,216 "),
    (run.main, "--seed 1e99", "-s/--seed: 1e99: must be a whole number "),
    (run.main, "-n -7", "--predict: -7: must be -2 or more "),
    (run.main, "-p", "-p/--prompt: expected one argument "),
    (run.main, "--tmep 0", "unknown flag --tmep: did you mean --temp?"),
    (run.main, "--top_k 4", "unknown flag --top_k: did you mean --top-k?"),
    (run.main, "-ctk q8_0", "unknown flag -ctk: --kv-fp8 keeps keys and values in 8 bits"),
    (run.main, "--presence-penalty 1", "unknown flag --presence-penalty (see"),
    (run.main, "--fp8 --save=", "-m or --save is empty"),
    (run.main, "-n5", "unknown flag -n5: did you mean -n? "),  # to argparse, -n with the value 5
    (bench.main, "text", "unexpected argument 'text' "),
    (run.main, "--mod x", "unknown flag --mod"),  # an abbreviation of --model
    (run.main, "text", "unexpected argument 'text': write -p 'text'"),
    (run.main, "-\x1b", "unknown flag -?"),
])  # fmt: skip
def test_wrong_usage_exits_2_in_one_line(monkeypatch, capfd, main, flags, said):
    assert_refused(
        caller(main, monkeypatch, capfd)(*flags.split()), said, " (see --help)\n", code=2
    )


@pytest.mark.parametrize("arguments, stdin, expected", [
    (["-m", "nowhere"], b"", "no file or folder nowhere here; a hub model is written owner/name"),
    (["-m", "./nowhere"], b"", "no file or folder ./nowhere here"),
    (["-m", "models/x.gguf"], b"", "no file or folder models/x.gguf here"),
    (["-f", "nofile"], b"", "nofile"),
    (["-p", "-"], b"abc\xff", "standard input is not UTF-8: byte 0xff at offset 3"),
    (["-p", "Once upon a time there was a fox", "-c", "4"], b"", "the context holds 4"),
    (["-p", "a", "--device", "tpu"], b"", "unknown device 'tpu'"),
    (["-p", "a", "--accumulate", "fp16"], b"", "--accumulate fp16 needs a GPU"),
    (["-p", "a", "--int4"], b"", "w2 has 112 columns; int4 needs a multiple of 32"),
    (["-p", "a\udcffb"], b"", "the text is not UTF-8: it holds U+DCFF at 1"),
    (["-f", "/dev/zero"], b"", "/dev/zero has more than 64,000,000 bytes"),
    (["--chat", "-p", "tell me a tale " * 60, "-c", "64"], b"", "the context holds 64"),
    (["--chat", "-sys", "good day, crow!", "-c", "8"], b"", "the system prompt takes"),
    (["--chat", "-sys", "a\udcffb"], b"", "the text is not UTF-8"),
    (["--chat", "-sysf", "/dev/zero"], b"", "/dev/zero has more than 64,000,000 bytes"),
])  # fmt: skip
def test_bad_input_is_one_line_of_error(cli, tiny, arguments, stdin, expected):
    alone = [] if "--chat" in arguments else ["--no-display-prompt"]
    assert_refused(cli("-m", tiny, "--quiet", *alone, *arguments, stdin=stdin), expected)


def test_debug_shows_the_traceback(cli, tmp_path):
    code, out, err = cli("-m", tmp_path, "-p", "a", "--debug")
    assert (
        code == 1
        and out == ""
        and err.startswith("Traceback")
        and re.search(r"\nFileNotFoundError: .+\n$", err)
    )


def test_memory_error_comes_before_allocating(cli, tiny, monkeypatch):
    monkeypatch.setattr("checkpoint.free_memory", lambda device: 1_000_000)
    assert_refused(cli("-m", tiny, "-p", "a"), "weights", "cache of 256 tokens", "(-c)")


@pytest.mark.parametrize("script", ["run.py", "bench.py"])
def test_help_comes_at_once(script):
    """Before anything is imported that takes long; so it has some names from elsewhere."""
    for flags, code in (("--help", 0), ("--wrong", 2), ("-m nowhere -p 5", 1)):
        shown = in_shell(f'"$PYTHON" -X importtime "$HERE/{script}" {flags}')
        imported = set(re.findall(r"\| +(\S+)$", shown.stderr, re.MULTILINE))
        assert shown.returncode == code and "argparse" in imported and len(imported) < 250, (
            shown.stderr
        )
        assert not imported & {
            "torch",
            "triton",
            "numpy",
            "transformers",
            "sentencepiece",
            "tokenizers",
            "jinja2",
        }
        assert code or "\nmodel:\n" in shown.stdout and "\noutput:\n" in shown.stdout
    assert (
        tuple(checkpoint.DTYPES) == cli_module.DTYPE_NAMES
        and tuple(kernels.FORMATS) == bench.FORMAT_NAMES
    )


def test_a_run_on_a_cpu_imports_no_triton(tiny):
    python = 'env -u TRITON_INTERPRET CUDA_VISIBLE_DEVICES= "$PYTHON" -X importtime'
    shown = in_shell(f'{python} "$HERE/run.py" -m "{tiny}" -p a -n 1 --device cpu')
    assert shown.returncode == 0 and "| torch\n" in shown.stderr, shown.stderr[-3000:]
    assert not re.search(r"\| +triton", shown.stderr)


def test_machine_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch')")
    shown = in_shell(
        f'PYTHONPATH="{tmp_path}:$HERE" "$PYTHON" -P "$HERE/run.py"', stdin=subprocess.DEVNULL
    )
    assert_refused(
        (shown.returncode, shown.stdout, shown.stderr), "pip install -r requirements.txt"
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_gives_the_prompt_as_it_is(tmp_path):
    shutil.copy(HERE / "Makefile", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    for file in (tmp_path / "requirements.txt", tmp_path / ".venv" / "ready", python):
        file.touch(0o755)
    python.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    prompt = 'He said "hi" for $5; it\'s `here`, \\n and\n--there'
    unset = "unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES GPUS"  # of the make that runs the tests
    for command in (f"PROMPT={shlex.quote(prompt)} make", f"make PROMPT={shlex.quote(prompt)}"):
        done = in_shell(f"{unset}; {command} -s run MODEL='a b' ARGS=", cwd=tmp_path)
        assert done.stdout.split("\0")[:-1] == [
            "run.py",
            "-m",
            "a b",
            "--no-escape",
            f"--prompt={prompt}",
            "-n",
            "300",
        ]
        assert done.stderr.startswith("next: make chat")
    for code, made in ((130, 0), (1, 2)):  # after Ctrl-C; after an error
        python.write_text(f"#!/bin/sh\nexit {code}\n")
        done = in_shell(f"{unset}; make chat", cwd=tmp_path)
        assert done.returncode == made and ("make: ***" in done.stderr) == (code == 1), done


# streams and signals


@pytest.mark.parametrize(
    "flags", [("-p", "Once", "--ignore-eos"), ("--chat", "-n", 20, "--ignore-eos")], ids=str
)
def test_closed_stdout_ends_quietly(tiny, flags):
    process = program("-m", tiny, *flags, "--quiet", stdin=subprocess.PIPE)
    process.stdin.write(b"hello\n" * 50)
    process.stdin.close()
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(PATIENCE) == 0 and process.stderr.read() == b""


def test_lost_streams(tiny, tmp_path):
    say = "import extra.cli as c; c.use_safe_streams(); c.note('a note'); print('text'); print(c.sys.stderr.isatty())"
    for lost in ("2>&-", "2>/dev/full", "2> >(exit)", "<&- 2>&-"):
        done = in_shell(f'"$PYTHON" -c "{say}" {lost}', cwd=HERE)
        assert (done.returncode, done.stdout, done.stderr) == (0, "text\nFalse\n", ""), lost
    done = in_shell('"$PYTHON" "$HERE/run.py" -p Once -n 3 --device cpu --quiet >/dev/full')
    assert done.returncode == 1 and done.stderr == "error: No space left on device\n"
    done = in_shell(
        f'"$PYTHON" "$HERE/run.py" -m "{tiny}" --save saved --fp8 --device cpu <&- >&- 2>&-',
        cwd=tmp_path,
    )
    assert done.returncode == 0 and (tmp_path / "saved" / "model.safetensors").is_file(), done


def test_ctrl_c_prints_timings_and_exits_130(tiny):
    process = program(
        "-m", tiny, "-p", "Once", "-c", 100_000, "--ignore-eos", stdin=subprocess.DEVNULL
    )
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and b"generated" in err and b"Traceback" not in err


@pytest.mark.parametrize("line, flags, expected", [
    ("    import torch\n", "-p x", 130),  # the imports
    ("    sys.exit(code)\n", "-m none -p x", 1),  # the end, when the error is reported
])  # fmt: skip
def test_ctrl_c_at_the_edges_of_a_run(tmp_path, line, flags, expected):
    """The program sends it to itself, just before a certain line."""
    indent = " " * (len(line) - len(line.lstrip()))
    before, after = (HERE / "run.py").read_text().rsplit(f"\n{line}", 1)
    kill = f"{indent}os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "run.py").write_text(f"{before}\n{kill}{line}{after}")
    done = in_shell(f'PYTHONPATH="$HERE" "$PYTHON" run.py {flags}', cwd=tmp_path)
    assert done.returncode == expected and "Traceback" not in done.stderr, done


# ---- session.py


@pytest.fixture(scope="session")
def tiny_session(tiny):
    """Not to be changed."""
    return Session(tiny, dtype="fp32", device="cpu")


def test_pieces_of_a_text(tiny_session):
    """They are what model.generate and the tokenizer make of a prompt, token by token."""
    tokenizer, prompt = tiny_session.tokenizer, "Once upon"
    ids = greedy(tiny_session.model, tokenizer.encode(prompt), 12)
    generation = tiny_session.generate(prompt, n=12, temp=0, ignore_eos=True)
    pieces = list(generation)
    assert [piece.ids for piece in pieces] == [*([i] for i in ids), []] and generation.ids == ids
    assert "".join(piece.text for piece in pieces) == generation.text != ""
    assert generation.prompt_tokens == len(tokenizer.encode(prompt))
    assert generation.ended_by == "length" and generation.timings.new_tokens == 12
    same = tiny_session.generate(tokenizer.encode(prompt), n=12, temp=0, ignore_eos=True)
    assert same.finish().text == generation.text and same.timings.prompt_tokens == 1
    stop = generation.text[3:6]
    stopped = tiny_session.generate(prompt, stop=[stop], temp=0, ignore_eos=True).finish()
    assert stopped.ended_by == "stop"
    assert stopped.text == generation.text[: generation.text.find(stop)]


@pytest.mark.parametrize("prompt, settings, error, said", [
    ("a", dict(tmp=0), TypeError, "no setting 'tmp'; sampling has temp, top_k"),
    ("a", dict(top_p=2), ValueError, "top_p is 2; it must be from 0 to 1"),
    ("a " * 999, dict(), ValueError, r"the prompt has \d+ tokens; the context holds 256"),
    ([], dict(), ValueError, "the prompt is empty"),
    (None, dict(), TypeError, "a prompt is a list of ids"),
])  # fmt: skip
def test_generate_is_refused_at_the_call(tiny_session, prompt, settings, error, said):
    before = tiny_session.state.tokens.clone()
    with pytest.raises(error, match=said):
        tiny_session.generate(prompt, **settings)
    assert torch.equal(tiny_session.state.tokens, before)


@pytest.mark.parametrize("decode", ["on a CPU", "by lookup", "in graphs"])
def test_timings_are_not_the_callers(tiny_model, monkeypatch, decode):
    """On a GPU, which works while the caller does, steps take at least what its own clock says."""
    options = dict(n=5, eos=[], timings=Timings(), state=State(tiny_model))
    if "graphs" in decode:
        decode_in_graphs(monkeypatch)
        event = SimpleNamespace(record=lambda _: 0, synchronize=lambda: 0)
        event.elapsed_time = lambda _: 9000.0  # ms
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    if "lookup" in decode:
        options["decode"] = Lookup(3).decode
    start = time.perf_counter()
    for _ in generate(tiny_model, [1, 5, 6], **options):
        time.sleep(0.1)
    took = time.perf_counter() - start
    timings = options["timings"]
    assert timings.new_tokens == 5 and timings.steps == 4
    if "graphs" in decode:
        assert timings.step_seconds == 4 * 9
    else:
        assert timings.step_seconds > 0
        assert timings.prompt_seconds + timings.step_seconds < took - 5 * 0.1
    before = timings.step_seconds
    list(generate(tiny_model, [1, 5, 6], **options))
    assert timings.steps == 8 and timings.step_seconds > before


def test_a_text_ends_the_one_before(tiny_session):
    options = dict(n=6, ignore_eos=True)
    alone = tiny_session.generate("fox", **options).finish()
    total = tiny_session.timings.new_tokens
    first = tiny_session.generate("Once", **options)
    next(first)
    second = tiny_session.generate("fox", **options)
    assert list(first) == [] and first.ended_by == "interrupt" and len(first.ids) == 1
    assert second.finish().text == alone.text
    assert tiny_session.timings.new_tokens == total + 1 + 6
    never = tiny_session.generate("Once", **options)
    never.close()
    assert list(never) == [] and not never.answered


def test_conversation_with_unfinished_answers(tiny_session):
    """It has what was generated of them."""
    talk, options = Conversation(tiny_session), dict(n=6, ignore_eos=True)
    for piece in talk.answer("hello", **options):
        if piece.text:
            break
    answer = talk.answer("good day", **options).finish()
    said = [turn["content"] for turn in talk.turns]
    assert said == ["hello", piece.text, "good day", answer.text]
    talk.again(**options)  # of which nothing is generated
    next(talk.again(**options))
    talk.session.end()
    assert [turn["content"] for turn in talk.turns[:3]] == said[:3]
    assert len(talk.turns) == 4 and len(talk.turns[3]["content"]) < len(answer.text)
    next(talk.answer("more", **options))
    talk.clear()
    assert talk.turns == []
    with pytest.raises(ValueError, match="there is no answer yet"):
        talk.again()


def test_chat_of_messages_evaluates_only_what_is_new(tiny):
    """Whoever sends the whole conversation each time, as clients of a server do."""
    session = Session(tiny, dtype="fp32", device="cpu", chat_template="llama2")
    first = session.chat(conversation("tell me a tale"), n=6, ignore_eos=True).finish()
    messages = conversation("tell me a tale", first.text, "go on")
    second = session.chat(messages, n=6, ignore_eos=True).finish()
    new = second.prompt_tokens - first.prompt_tokens - len(first.ids)
    assert second.timings.prompt_tokens <= new + 1


# ---- chat.py: conversations


def chat(cli, folder, *lines: str, flags=()):
    text = "".join(line + "\n" for line in lines).encode(errors="surrogateescape")
    return cli("-m", folder, "--chat", "-n", 6, "--ignore-eos", "--temp", 0, *flags, stdin=text)


def chat_objects(cli, folder, *lines: str, flags=()) -> list[dict]:
    return objects(chat(cli, folder, *lines, flags=["-o", "jsonl", *flags])[1])


@pytest.fixture
def fitted(monkeypatch) -> list:
    """The prompts of the turns of a chat, in the order in which they were made to fit the
    context."""
    seen, fit = [], Conversation.fit

    def fit_and_keep(self, message, turns):
        prompt, kept = fit(self, message, turns)
        seen.append(prompt)
        return prompt, kept

    monkeypatch.setattr(Conversation, "fit", fit_and_keep)
    return seen


def test_chat_answers_each_line(cli, tiny):
    code, out, err = chat(cli, tiny, "hello", "", "/help", "/regne now", "again")
    assert code == 0 and len(out.splitlines()) >= 2 and "generated 12 tokens" in err
    assert "no command /regne; /help lists them" in err
    assert (
        "this model has no chat template; sending plain text" in err
        and "/clear        forget" in err
    )
    turns = chat_objects(cli, tiny, "/usr/bin/python says", "one \\", "two", "/bye", "no")
    assert [turn["prompt"] for turn in turns] == ["/usr/bin/python says", "one \ntwo"]
    assert chat_objects(cli, tiny, "one\\")[0]["prompt"] == "one", "the input ended"
    assert "0 tokens" not in chat(cli, tiny)[2], "nothing was evaluated"


def test_chat_single_turn(cli, tiny, tmp_path):
    flags = ("-m", tiny, "-n", 6, "--ignore-eos", "--temp", 0, "--quiet")
    expected = chat(cli, tiny, "hello", flags=["--quiet"])[1]
    (tmp_path / "message").write_text("hello\n")
    for how in (
        ["--chat", "-p", "hello"],
        ["-st", "-p", "hello"],
        ["-cnv", "-f", tmp_path / "message"],
        ["-st"],
    ):
        assert cli(*flags, *how, stdin=b"hello\n") == (0, expected, ""), how
    for how in (["--chat", "-p", "hello\\nyou"], ["-st"]):
        (turn,) = objects(cli(*flags, *how, "-o", "jsonl", stdin=b"hello\nyou\n")[1])
        assert turn["prompt"] == "hello\nyou"


def test_chat_clear_and_system(cli, tiny):
    once = chat(cli, tiny, "hello")[1]
    code, out, err = chat(cli, tiny, "hello", "/clear", "hello")
    assert out == once * 2 and "conversation cleared" in err
    assert chat(cli, tiny, "good day", "hello")[1] != chat(cli, tiny, "good day")[1] + once
    code, kind, err = chat(cli, tiny, "/system Be kind.", "hello", "/system")
    assert kind == chat(cli, tiny, "hello", flags=["--system", "Be kind."])[1] != once
    assert "with this system prompt" in err and "without a system prompt" in err


def test_chat_regen(cli, tiny):
    _, out, err = chat(cli, tiny, "/regen", "hello", "/regen", flags=["-o", "jsonl"])
    error, first, second = objects(out)
    assert (
        error["error"] == "there is no answer yet"
        and first["text"] == second["text"]
        and "always the same" in err
    )
    first, second, third = chat_objects(
        cli, tiny, "hello", "/regen", "again", flags=["--temp", 5, "-n", 12]
    )
    assert first["prompt"] == second["prompt"] == "hello" and first["text"] != second["text"]
    assert (
        second["evaluated_tokens"] == 1
        and third["prompt_tokens"] < 2 * second["prompt_tokens"] + 12 + 12
    )


def test_chat_read_waits_for_a_message(cli, tiny, tmp_path):
    (tmp_path / "notes").write_bytes(b"good\r\nday,\rcrow!\n")
    read, notes = f"/read {tmp_path / 'notes'}", "good\nday,\ncrow!\n\n"
    lines = [
        "what?",
        read,
        "/regen",
        "fox " * 2000,
        "and?",
        read,
        "/clear",
        "why?",
        read,
        "/system Be kind.",
        "who?",
    ]
    code, out, err = chat(cli, tiny, *lines, flags=["-o", "jsonl"])
    prompts = [turn["prompt"] for turn in objects(out)]
    expected = ["what?", "what?", "fox fox", f"{notes}and?", "why?", f"{notes}who?"]
    assert code == 0 and len(prompts) == len(expected) and "15 characters" in err
    assert all(map(str.startswith, prompts, expected)), prompts


def test_chat_errors_end_only_their_turn(cli, tiny, tmp_path):
    template = (
        "{% if messages[-1]['content'] == 'bad' %}{{ raise_exception('too bad') }}{% endif %}"
    )
    (tmp_path / "t").write_text(template + "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (tmp_path / "bad").write_bytes(b"ab\xff")
    (tmp_path / "long").write_text("x" * 10_000)
    said = {
        "tell me a tale " * 60: "context holds 64",
        "\udcff": "not UTF-8",
        "bad": "too bad",
        "/system \udcff": "not UTF-8",
        "/system " + "tell me a tale " * 60: "prompt takes",
        "/read": "/read needs the name of a file",
        "/read nowhere": "nowhere: No such file",
        "/read ~nobody-of-this-name/notes": "No such file",
        "/read /dev/zero": "/dev/zero has more than 64,000,000 bytes",
        "/read .": ".: Is a directory",
        f"/read {tmp_path / 'bad'}": "not UTF-8: byte 0xff at offset 2",
        f"/read {tmp_path / 'long'}": f"{tmp_path / 'long'} takes ",
    }
    flags = ["-o", "jsonl", "-c", 64, "--quiet", "--chat-template", tmp_path / "t"]
    code, out, err = chat(cli, tiny, "hello", *said, "/regen", flags=flags)
    first, *refused, last = objects(out)
    assert code == 0 and last["prompt"] == first["prompt"] == "hello", (
        "the conversation is still there"
    )
    assert all(text in turn["error"] for turn, text in zip(refused, said.values(), strict=True)), (
        refused
    )
    assert (
        err.splitlines() == [f"error: {turn['error']}" for turn in refused] and "Errno" not in err
    )


@pytest.mark.parametrize("template", ["llama2", "zephyr", "plain"])
def test_chat_evaluates_only_what_is_new(cli, tiny, template):
    flags = ["--chat-template", template, "-c", 256]
    one, two = (chat(cli, tiny, *["tell me a tale"] * n, flags=flags)[2] for n in (1, 2))
    first, both = (int(err.split("prompt    ")[1].split()[0]) for err in (one, two))
    assert both - first < first + 6 + 8, "the second turn evaluated the first again"
    assert f"template: {template} (given)" in one


def test_chat_drops_its_oldest_turns(cli, tiny, fitted):
    flags = ["--system", "Be kind.", "--chat-template", "llama2", "-c", 128]
    code, _, err = chat(cli, tiny, *["tell me a tale"] * 8, flags=flags)
    assert code == 0 and "error" not in err
    assert re.search(r"full: dropped the oldest part of the conversation, [1-9] of \d turns", err)
    lengths = [len(prompt.ids) for prompt in fitted]
    assert 64 < max(lengths) <= 96, "a quarter is left for the answer"
    assert all(prompt.text.startswith("<s>[INST] <<SYS>>\nBe kind.") for prompt in fitted)


def test_chat_settings_stats_and_files(cli, tiny, tmp_path):
    file, other = tmp_path / "talk", tmp_path / "other"
    other.write_text('[{"role": "user", "content": "?"}]')
    (hot,) = chat_objects(cli, tiny, "hello", flags=["--temp", 5, "-s", 3])
    lines = ["/HELP", "/?", "/set temp 5", "/set seed 3", "/stats", "hello", f"/save {file}"]
    lines += ["more", f"/load {file}", "more"]
    _, out, err = chat(cli, tiny, *lines, flags=["-o", "jsonl"])
    first, second, third = (turn["text"] for turn in objects(out))
    assert first == hot["text"] and second == third and f"{file}: 1 turns" in err
    assert "temp 5.0, top_k 40" in err and err.count("/clear  ") == 2
    assert (
        err.count("note: cut after 6 tokens (see -n)") == 3 and err.count(" tokens/s; prompt:") == 3
    )
    assert json.loads(file.read_text())[0] == {"role": "user", "content": "hello"}
    said = {
        "/set tmp 1": "/set needs one of temp, top_k",
        "/set top-k many": "many: top_k needs a number",
        "/set top_p 2": "top_p is 2.0; it must be from 0 to 1",
        "/set seed nan": "nan: seed needs a number",
        "/save": "/save needs the name of a file",
        "/save /no/where": "/no/where: No such file",
        f"/load {other}": f"{other}: it is not a conversation",
        f"/load {tiny / 'config.json'}": "it is not a conversation",
        f"/load {tiny / 'tokenizer.model'}": "not UTF-8",
    }
    refused = chat_objects(cli, tiny, *said)
    assert all(text in turn["error"] for turn, text in zip(refused, said.values(), strict=True))


def test_ctrl_c_while_an_answer_is_rendered_again(tiny, monkeypatch):
    talk = Conversation(Session(tiny, device="cpu"))
    talk.answer("hello", n=4).finish()
    before = talk.turns
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(talk.session.tokenizer, "_render", fails(KeyboardInterrupt()))
        talk.again(n=4)
    assert talk.turns == before and len(before) == 2


def test_chat_keeps_the_end_of_a_long_answer(cli, fitted):
    flags = ["--system", "Be kind.", "-c", 100, "-n", -2, "-o", "jsonl", "--dtype", "fp32"]
    code, out, err = chat(
        cli, cli_module.DEFAULT_MODEL, "Tell me a tale", *["go on"] * 2, flags=flags
    )
    turns = objects(out)
    assert (
        code == 0
        and len(re.findall(r" \d+ characters of the last answer", err)) == 2
        and all(turn["ended_by"] == "context" for turn in turns)
    )
    form = r"(?s)<s>\[INST\] <<SYS>>\nBe kind.\n<</SYS>>\n\n[^[]* \[/INST\] (.*) </s><s>\[INST\] go on \[/INST\]"
    for before, prompt in zip(turns, fitted[1:]):
        kept = re.fullmatch(form, prompt.text).group(1).strip()
        assert len(kept) > 20 and before["text"].strip().endswith(kept) and len(prompt.ids) <= 50


def test_chat_shortens_an_answer(tiny):
    """By more than the space before it."""
    talk = SimpleNamespace(session=SimpleNamespace(tokenizer=Tokenizer(tiny)))
    _, answer = Conversation.shortened(talk, [{}, {"content": "\u4f60 good day"}], 1)
    assert answer["content"].strip() == "good day"


def test_quiet_is_quiet(cli, tiny):
    lines = ["hello", "/clear", "/system x", "hello", *["tell me a tale"] * 12]
    assert chat(cli, tiny, *lines, flags=["--quiet", "-c", 64])[2] == ""
    assert cli("-m", tiny, "-p", "Once", "-c", 16, "--ignore-eos", "--quiet", "-ngl", 99)[2] == ""


# ---- chat.py: a person at a terminal


@pytest.mark.parametrize("width", [8, 20, 80])
def test_printer_does_not_cut_words(width, capsys, monkeypatch):
    """And control characters do not reach the terminal."""
    monkeypatch.setenv("COLUMNS", str(width))
    words = "fox Żółw good \U0001f422 e\u0301e\u0301".split()
    words += [
        "\u4f60\u597d" * 9,
        "a" * (width // 2),
        "x" * 2 * width,
        "\n",
        "\n\n",
        "\x1b[2J",
        "\x9bc",
        "\r",
        "\t",
    ]
    text = " ".join(random.choices(words, k=200))
    printer = Printer(text[:3])
    printer.at_terminal = True
    for start in range(3, len(text), 3):
        printer.write(text[start : start + 3])
    printer.end()
    shown = capsys.readouterr().out
    assert all(sum(map(columns_of, line)) < width for line in shown.split("\n"))
    visible = re.sub("[\x1b\x9b]", "\ufffd", text)
    assert "".join(shown.split()) == "".join(visible.split()) and "\r" not in shown, (
        "nothing is lost"
    )
    assert all(
        word in shown.split() for word in visible.split() if word.isascii() and len(word) < width
    )


def test_notes_and_cut_texts_at_a_terminal(tiny, capsys, monkeypatch):
    """A file's name may hold control characters; of a text that Ctrl-C cut, no half word comes
    after it."""
    cli_module.note("model  a\x1b]0;b\x07\x9b\nc\td\r")
    assert capsys.readouterr().err == "model  a\ufffd]0;b\ufffd\ufffd\nc\td \n"
    for cut, expected in ((True, "Once \n"), (False, "Once up\n")):
        printer = Printer()
        printer.at_terminal = True
        printer.write("Once up")
        printer.end(cut)
        assert capsys.readouterr().out == expected


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

    def __init__(
        self, *arguments, script: Path = HERE / "run.py", columns: int = 80, **environment
    ):
        variables = {
            name: value
            for name, value in os.environ.items()
            if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        variables |= dict(
            TERM="xterm-256color", OMP_NUM_THREADS="1", XDG_STATE_HOME="/none", INPUTRC="/dev/null"
        )
        command = [sys.executable, str(script), "--device", "cpu", *map(str, arguments)]
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            termios.tcsetwinsize(0, (24, columns))
            os.execve(sys.executable, command, variables | environment)
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
        """What the program shows up to a match of the pattern. wake is called while it shows
        nothing."""
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
    flags = ("-m", tiny, "--chat", "-n", 6, "--ignore-eos", "--temp", 0)
    person = Person(*flags, XDG_STATE_HOME=str(tmp_path / "of a new user"))
    assert "\x1b[?2004h\x1b[1;32m> " in person.sees(READY)
    turn = person.types("hello\r", READY)
    answered = (
        r"(?s)hello\r\n(\x1b\[\?2004l\r)?\x1b\[0m\r\n[^\x1b]+\r\n\r\n\x1b\[\?2004h\x1b\[1;32m> "
    )
    assert re.fullmatch(answered, turn), repr(turn)
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
    assert (
        "generated 18 tokens" in rest
        and "Traceback" not in rest
        and rest.startswith("\x1b[?2004l\r\x1b[0m")
    )
    history = tmp_path / "of a new user" / "fused-llama" / "history"
    messages = [json.loads(line) for line in history.read_text().splitlines()]
    assert (
        messages == ["hello", "good\nday", "two \nlines", "/clear"]
        and history.parent.stat().st_mode & 0o077 == 0
    )


def test_chat_at_a_narrow_terminal(tiny, tmp_path):
    """With the history of another run, one line of it cut off, and no colour."""
    (tmp_path / "fused-llama").mkdir()
    (tmp_path / "fused-llama" / "history").write_text('"good\\nday"\n"half\n"hello"\n')
    flags = ("-m", tiny, "--chat", "--ignore-eos", "-c", 5000)
    person = Person(*flags, XDG_STATE_HOME=str(tmp_path), NO_COLOR="1", columns=20)
    status = person.sees(READY).rpartition("\rmodel\r\n")[2]
    assert "\x1b[1" not in status and "\r\n          /help\r\n" in status
    assert all(len(line) < 20 for line in status.split("\r\n")[:-1] if len(line.split()) > 1), (
        status
    )
    assert "good\r\n" in person.types(UP + UP, "day")
    person.types("\r", r"\x1b\[\?2004l\r")
    answer = person.sees(r"([^\n]*\n){6}")
    answer += person.interrupts(READY)
    # the progress bar of a prompt that takes more than two seconds
    overwritten = re.compile(r".*\r(?!$)")
    lines = [
        overwritten.sub("", line).strip("\r").replace("^C", "") for line in answer.split("\n")[:-1]
    ]
    assert all(sum(map(columns_of, line)) < 20 for line in lines if "\x1b" not in line), lines
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
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    modes = {
        "": "bare",
        "-no-cnv": "text",
        "-p x": "text",
        "-f /dev/null": "text",
        "-st": "chat",
        "-sys x": "bare",
    }
    assert {flags: run.parse_args(flags.split()).mode for flags in modes} == modes
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert run.parse_args([]).mode == "text"


# ---- serve.py: a real server, asked as clients do


TALES = HERE / "models" / "tales"
FOX = [{"role": "user", "content": "Tell me a tale of a fox"}]


class Server:
    """A server in a process of its own, which has no client but the tests."""

    def __init__(self, *flags, launcher=()):
        command = [*(launcher or [sys.executable]), str(HERE / "serve.py"), *map(str, flags)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
        command += ["--port", "0", "--device", "cpu"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines = []
        while not self.lines or not self.lines[-1].startswith("serving"):
            self.lines.append(self.process.stderr.readline())
            assert self.lines[-1], self.lines
        self.port = int(re.search(r":(\d+)/v1", self.lines[-1])[1])
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr))
        self.reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.reader.join()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def begin(self, path: str = "/v1/completions", body=None, method="POST", **headers):
        """A connection over which a request has been sent, and the rest is up to the caller."""
        if isinstance(body, dict):
            body = json.dumps(body)
        connection = self.connect()
        connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        return connection

    def ask(self, path: str, body=None, method="POST", **headers):
        """-> status, headers, the object that is answered (None if it is not one)."""
        answer = self.begin(path, body, method, **headers).getresponse()
        with contextlib.suppress(ValueError):
            return answer.status, answer.headers, json.loads(answer.read())
        return answer.status, answer.headers, None

    def chat(self, messages=FOX, **fields) -> dict:
        body = dict(messages=messages, max_tokens=12, temperature=0) | fields
        status, _, answer = self.ask("/v1/chat/completions", body)
        assert status == 200, answer
        return answer["choices"][0] | answer

    def complete(self, prompt="Once upon a time", **fields) -> dict:
        body = dict(prompt=prompt, max_tokens=12, temperature=0) | fields
        status, _, answer = self.ask("/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0] | answer

    def stream(self, path: str, **fields) -> list[dict]:
        body = dict(max_tokens=12, temperature=0, stream=True) | fields
        answer = self.begin(path, body).getresponse()
        assert answer.status == 200 and answer.headers["content-type"] == "text/event-stream"
        *events, done, rest = answer.read().decode().split("\n\n")
        assert done == "data: [DONE]" and rest == ""
        return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.fixture(scope="session")
def server():
    with Server("-m", TALES, "--queue", 1, "--cors", "https://example.org") as served:
        yield served
        accessed = re.compile(r"127\.0\.0\.1 [A-Z]+ \S+ (\d{3}|client left) \d+\.\d{3} s\n")
        strange = [line for line in served.lines[3:] if not accessed.fullmatch(line)]
        assert not strange


def test_serve_writes_what_run_py_writes(server, cli):
    flags = ("-m", TALES, "-n", 12, "-s", 7, "--top-p", 0.9, "--quiet")
    sampled = dict(temperature=0.8, top_p=0.9, seed=7)
    text = server.complete(**sampled)["text"]
    plain = cli(*flags, "-p", "Once upon a time", "--temp", 0.8, "--no-display-prompt")
    assert plain == (0, text + "\n", "")
    message = server.chat(**sampled)["message"]
    said = cli(*flags, "--chat", "-p", FOX[0]["content"], "--temp", 0.8)[1]
    assert said == message["content"] + "\n" and message["role"] == "assistant"
    texts = {server.complete(temperature=1.5, seed=seed)["text"] for seed in (None, -1, 1, 2)}
    assert len(texts) > 2, "a seed is random unless it is given"


def test_serve_counts_and_reuses(server):
    turns = [*FOX]
    for _ in range(3):
        answer = server.chat(turns)
        usage = answer["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        new = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert usage["completion_tokens"] == 12 and answer["finish_reason"] == "length"
        turns += [answer["message"], {"role": "user", "content": "And then?"}]
    assert new < 25, "only the new turn is evaluated"
    assert server.complete(max_tokens=0)["text"] == ""
    assert server.complete(echo=True)["text"].startswith("Once upon a time there")
    assert server.complete([1, 300], echo=True)["text"]
    assert server.complete([[1, 300]])["text"] == server.complete([1, 300])["text"]


def test_serve_streams_the_same_text(server):
    chunks = server.stream("/v1/chat/completions", messages=FOX)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert (
        "".join(choice["delta"].get("content", "") for choice in choices)
        == (server.chat()["message"]["content"])
    )
    assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk", "tales")
    }
    assert [choice["finish_reason"] for choice in choices] == [None] * 13 + ["length"]
    *_, end, usage = server.stream(
        "/v1/completions", prompt="Once", stream_options={"include_usage": True}
    )
    assert end["usage"] is None and usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    # what may begin a stop string is held back until the end of the text
    whole = server.complete()["text"]
    stop = f"{whole[-4:]}@"
    chunks = server.stream("/v1/completions", prompt="Once upon a time", stop=stop)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    word = whole.split()[3]
    for stop in word, ["@", word]:
        answer = server.complete(stop=stop)
        assert answer["text"] == whole[: whole.index(word)] and answer["finish_reason"] == "stop"


def test_serve_streams_while_it_writes(server):
    answer = server.begin(body=dict(prompt="Once", stream=True, max_tokens=200)).getresponse()
    times = [time.monotonic() for line in answer if line.startswith(b"data")]
    assert times[100] - times[0] > 0.2 * (times[-1] - times[0]) > 0


def test_serve_logprobs(server):
    plain = dict(repeat_penalty=1)  # so that the most probable token is chosen
    content = server.chat(**plain, logprobs=True, top_logprobs=2)["logprobs"]["content"]
    assert (
        "".join(entry["token"] for entry in content)
        == " " + server.chat(**plain)["message"]["content"]
    )
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert [entry[k] for k in ("token", "logprob")] == [
            entry["top_logprobs"][0][k] for k in ("token", "logprob")
        ], "greedy"
    told = server.complete(**plain, logprobs=1)["logprobs"]
    text = server.complete(**plain)["text"]
    assert len(told["tokens"]) == 12 and list(map(max, told["top_logprobs"])) == told["tokens"]
    for token, offset in zip(told["tokens"], told["text_offset"]):
        assert text[offset:].startswith(token)
    streamed = server.stream("/v1/completions", prompt="Once upon a time", logprobs=1, **plain)
    scores = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    seen = [score["token_logprobs"][0] for score in scores[:-1]]
    assert seen == pytest.approx(told["token_logprobs"], abs=0.1), "in bf16"
    echoed = server.complete(**plain, logprobs=1, echo=True)
    scores = echoed["logprobs"]
    assert echoed["text"] == "Once upon a time" + text and scores["tokens"][-12:] == told["tokens"]
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert scores["token_logprobs"][-12:] == pytest.approx(told["token_logprobs"], abs=0.1)
    for token, offset in list(zip(scores["tokens"], scores["text_offset"]))[2:]:
        assert echoed["text"][offset:].startswith(token)
    assert echoed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    ids = [1, 300, 400, 500]
    scored = server.complete(ids, logprobs=0, echo=True, max_tokens=0)["logprobs"]
    assert len(scored["tokens"]) == len(ids) and scored["top_logprobs"] is None
    first, *streamed = server.stream("/v1/completions", prompt=ids, logprobs=1, echo=True)
    assert first["choices"][0]["logprobs"]["token_logprobs"] == scored["token_logprobs"]
    assert len(streamed) == 13
    # as a prompt's, tokens have the scores that they had when they were generated
    again = server.complete("Once upon a time" + text, logprobs=0, echo=True, max_tokens=0)
    assert again["logprobs"]["tokens"] == scores["tokens"]
    seen = again["logprobs"]["token_logprobs"][1:]
    assert seen == pytest.approx(scores["token_logprobs"][1:], abs=0.1), "in bf16"
    told = server.complete(**plain, logprobs=0, stop=text.split()[2])["logprobs"]
    assert told["top_logprobs"] is None and len(told["tokens"]) < 5, "without the stop string's"


def test_serve_messages(server):
    parts = [{"type": "text", "text": FOX[0]["content"]}]
    same = server.chat()["message"]
    assert server.chat([{"role": "user", "content": parts}])["message"] == same
    empty = {"role": "assistant", "content": ""}
    assert server.chat([*FOX, empty])["message"] == same
    begun = {"role": "assistant", "content": same["content"][:30]}
    rest = server.chat([*FOX, begun], max_tokens=4)["message"]["content"]
    assert (begun["content"] + rest).startswith(same["content"][:33])
    for role in "system", "developer":
        with_system = server.chat([{"role": role, "content": "Be brief."}, *FOX])
        assert with_system["usage"]["prompt_tokens"] > 20, "and not 15"
    body = dict(messages=[*FOX, {"role": "system", "content": "Be brief."}])
    status, _, answer = server.ask("/v1/chat/completions", body)
    assert status == 400 and "no place for this system message" in answer["error"]["message"]


SAYS_NOTHING = dict(
    n=1, best_of=1, tools=[], functions=[], tool_choice="none", logit_bias={}, suffix="",
    presence_penalty=0, frequency_penalty=0.0, response_format={"type": "text"}, stop=None,
    temperature=None, max_tokens=None, stream=None, logprobs=None, user="me", unknown=[1], model="any",
)  # fmt: skip
WRONG_FIELDS = dict(
    model=[5], max_tokens=["5", 1.5, True, -2, 1 << 31], max_completion_tokens=[[]],
    temperature=["hot", -1, True, {}, 10**400], top_p=[2, "x"], top_k=[-1, 0.5], min_p=[2],
    repeat_penalty=[0, "x"], repeat_last_n=[-2], seed=["x", 1 << 63, 0.5], stop=[5, [5], {}, ["a"] * 33],
    stream=[1, "yes"], stream_options=[5], n=[2, True, "1"], best_of=[2], presence_penalty=[1],
    frequency_penalty=[0.5], logit_bias=[{"5": 1}], tools=[[{}], {}], tool_choice=["required"],
    functions=[[{}]], response_format=[{"type": "json_object"}], suffix=["x"], grammar=["x"],
)  # fmt: skip


def test_serve_accepts_what_says_nothing(server):
    stop = dict(max_completion_tokens=12, temperature=0)
    same = server.chat(stop=None)["message"]
    assert server.chat(**SAYS_NOTHING | stop | dict(max_tokens=None))["message"] == same


def test_serve_refuses_wrong_fields(server):
    wrong = {
        "/v1/chat/completions": WRONG_FIELDS
        | dict(
            logprobs=[1, "x"], top_logprobs=[21, True], messages=[[], "x", {}],
        ),
        "/v1/completions": WRONG_FIELDS
        | dict(logprobs=[True, 21], echo=[1], prompt=[5, [], ["a", "b"], [[]], [1.5], {}, [True]]),
    }  # fmt: skip
    good = dict(prompt="a", messages=FOX, max_tokens=1)
    for path, table in wrong.items():
        for name, values in table.items():
            for value in values:
                status, _, answer = server.ask(path, good | {name: value})
                assert status == 400 and answer["error"]["param"] == name, (path, name, value)
                assert name in answer["error"]["message"] and answer["error"]["code"] == "invalid"
    user = FOX[0]
    for message in (
        "x", {}, {"role": "user"}, {"content": "x"}, {"role": 5, "content": "x"},
        user | {"role": "tool"}, user | {"content": 5}, user | {"content": []},
        user | {"content": [{"type": "image_url", "image_url": {}}]}, user | {"tool_calls": [1]},
        user | {"content": [{"type": "text"}]}, user | {"content": ["x"]},
    ):  # fmt: skip
        status, _, answer = server.ask("/v1/chat/completions", dict(messages=[user, message]))
        assert status == 400 and answer["error"]["param"].startswith("messages[1]")


def test_serve_refuses_wrong_bodies(server):
    surrogate = b'{"prompt": "a\\ud800"}'
    deep = b'{"prompt": ' + b"[" * 200_000
    for body in b"", b"{", b"[]", b"5", b"\xff\xfe{}", b"{}", surrogate, deep, b"9" * 5000:
        status, _, answer = server.ask("/v1/completions", body)
        assert status == 400 and answer["error"]["message"], body[:30]
    for prompt in "tale " * 2000, [1] * 2000:
        status, _, answer = server.ask("/v1/completions", dict(prompt=prompt))
        error = answer["error"]
        assert status == 400 and error["code"] == "context_length_exceeded"
        assert "200" in error["message"] and "the context holds 1024" in error["message"]
    assert server.ask("/v1/completions", dict(prompt=[1, 99999]))[0] == 400
    status, _, answer = server.ask("/v1/completions", b" " * (9 << 20))
    assert status == 413 and answer["error"]["code"] == "too_large"
    announced = server.connect()
    announced.putrequest("POST", "/v1/completions")
    announced.putheader("Content-Length", 1 << 40)
    announced.endheaders()
    assert announced.getresponse().status == 413, "before it comes"
    chunks = iter([b'{"prompt": "a", ', b'"max_tokens": 1}'])
    assert server.begin("/v1/completions", chunks).getresponse().status == 200
    assert (
        server.begin("/v1/completions", (b" " * 65536 for _ in range(140))).getresponse().status
        == 413
    )


def test_serve_paths(server):
    model = {"id": "tales", "object": "model", "context_length": 1024}
    for method, path, status, expected in (
        ("GET", "/health", 200, {"status": "ok"}),
        ("GET", "/v1/models", 200, {"object": "list"}),
        ("GET", "/v1/models/tales", 200, model),
        ("GET", "/v1/models/owner/other", 404, {}),
        ("GET", "/nothing", 404, {}),
        ("GET", "/v1/completions", 405, {}),
        ("DELETE", "/v1/models", 405, {}),
        ("HEAD", "/v1/models", 200, None),
        ("HEAD", "/v1/completions", 405, None),
    ):
        got, headers, answer = server.ask(path, method=method, Origin="http://localhost:3000")
        assert got == status, path
        assert headers["access-control-allow-origin"] == "http://localhost:3000"
        if status >= 400 and answer:
            assert answer["error"].keys() >= {"message", "type", "code"}
        elif expected:
            assert expected.items() <= answer.items()
    connection = server.connect()
    connection.connect()
    socket_used = connection.sock
    for _ in range(3):
        connection.request("GET", "/v1/models")
        assert connection.getresponse().read() and connection.sock is socket_used, "kept alive"


def test_serve_origins_and_keys(server, tiny):
    asks = {"Access_Control_Request_Method": "POST"}
    asks["Access_Control_Request_Headers"] = "authorization,content-type"
    allowed = {
        "http://localhost": True, "https://127.0.0.1:5173": True, "https://example.org": True,
        "https://example.com": False, "http://localhost.evil": False, "null": False,
    }  # fmt: skip
    for origin, is_allowed in allowed.items():
        status, headers, _ = server.ask("/v1/models", method="OPTIONS", Origin=origin, **asks)
        assert (status == 200) == is_allowed
        status, headers, _ = server.ask("/v1/completions", b"{", Origin=origin)
        assert headers["access-control-allow-origin"] == (origin if is_allowed else None)
    with Server("-m", tiny, "--api-key", "żaba", "--queue", 0) as keyed:
        key = "Bearer żaba".encode()
        for path in "/v1/models", "/nothing":
            for wrong in {}, {"Authorization": "Bearer x"}, {"Authorization": "żaba".encode()}:
                status, headers, answer = keyed.ask(
                    path, method="GET", Origin="http://localhost", **wrong
                )
                assert status == 401 and answer["error"]["code"] == "invalid_api_key"
                assert headers["access-control-allow-origin"] == "http://localhost"
        assert keyed.ask("/v1/models", method="GET", Authorization=key)[0] == 200
        assert keyed.ask("/health", method="GET")[0] == 200
        asks["Origin"] = "http://localhost"
        assert keyed.ask("/v1/models", method="OPTIONS", **asks)[0] == 200
        keyed.process.send_signal(signal.SIGINT)
        assert keyed.process.wait(PATIENCE) == 130


LONG = dict(prompt="Once upon a time", max_tokens=900, ignore_eos=True, temperature=0)


def eventually(condition) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_serve_clients_that_leave_and_wait(server):
    """At most one waits; those who leave make way, also while they wait."""
    said = server.complete()["text"]
    running = server.begin(body=LONG | dict(stream=True))
    assert running.getresponse().readline().startswith(b"data")
    waiting = server.begin(body=LONG)
    time.sleep(0.2)
    status, headers, answer = server.ask("/v1/completions", LONG)
    assert status == 503 and headers["retry-after"] and answer["error"]["code"] == "queue_full"
    assert server.ask("/health", method="GET")[0] == 200, "while a text is written"
    waiting.close()
    left = lambda count: sum("client left" in line for line in server.lines) >= count
    assert eventually(lambda: left(1))
    second = server.begin(body=dict(prompt="Once upon a time", max_tokens=12, temperature=0))
    start = time.monotonic()
    running.sock and running.sock.close()
    running.close()
    assert json.loads(second.getresponse().read())["choices"][0]["text"] == said
    whole = server.begin(body=LONG)  # without a stream
    time.sleep(0.1)
    whole.close()
    truncated = server.connect()
    truncated.connect()
    truncated.sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
    )
    assert server.complete()["text"] == said
    assert time.monotonic() - start < 5, "and not the long texts"
    truncated.close()


def test_serve_many_at_once(server):
    """A third leaves midway, a third sends nonsense; the others get their text, or 503."""
    said = [server.complete()["text"], server.chat()["message"]]
    rss = lambda: int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096

    def one(i: int):
        kind = random.choice(["leaves", "asks", "raves"])
        if kind == "leaves":
            client = server.begin(body=LONG | dict(stream=i % 2 == 0))
            time.sleep(random.random() / 5)
            client.close()
        elif kind == "raves":
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 60\r\n\r\n"
                client.sendall(random.choice([b"", head]) + random.randbytes(60))
        else:
            fields = dict(prompt="The fox", max_tokens=5, stream=i % 2 == 0)
            assert server.ask("/v1/completions", fields)[0] in (200, 503)

    before = rss()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(100)))
    assert eventually(
        lambda: server.ask("/v1/completions", dict(prompt="a", max_tokens=1))[0] == 200
    )
    assert [server.complete()["text"], server.chat()["message"]] == said
    assert rss() < before + 100e6


def test_serve_ends_at_once():
    """In the middle of a text, and nobody takes what there is of it for the whole."""
    with Server("-m", TALES) as served:
        answer = served.begin(body=LONG | dict(stream=True)).getresponse()
        answer.readline()
        start = time.monotonic()
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(PATIENCE) == 130 and time.monotonic() - start < 1
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
        assert eventually(lambda: not served.reader.is_alive()), "no other process has its stderr"
        assert len(served.lines) == 3


def test_serve_ends_if_nobody_can_be_answered(monkeypatch, capfd):
    ended = threading.Event()
    monkeypatch.setattr(serve.os, "_exit", lambda code: code == 1 and ended.set())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(serve.uvicorn.Server, "run", lambda *_: 1 / 0)
        serve.start_web_thread(SimpleNamespace(app=None), listener)
        assert ended.wait(PATIENCE)
    assert (
        capfd.readouterr().err == "error: clients cannot be answered any more: division by zero\n"
    )


def test_serve_tells_an_error_in_a_stream():
    async def heard() -> list[bytes]:
        client = serve.Client(None)
        client.tell(b"first")
        parts = client.stream(await client.hear())
        await asyncio.to_thread(client.fail, serve.Refused("it failed", 500))
        return [part async for part in parts]

    first, error = asyncio.run(heard())
    assert first == b"first" and error.startswith(b'data: {"error": {"message": "it failed"')


def test_serve_refuses_to_start(monkeypatch, capfd, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        call = caller(serve.main, monkeypatch, capfd, "--device", "cpu")
        assert_refused(call("--port", port), f"cannot listen on 127.0.0.1, port {port}: ")
    for flags, said in (
        (["--api-key="], "--api-key is empty"),
        (["--port", 99999], "99999: must be from 0 to 65,535"),
        (["--fp8", "--int4"], "both say how"),
        (["--temp", 0], "unknown flag --temp"),
    ):
        assert_refused(call(*flags), said, code=2)


def test_serve_on_several_ranks(server):
    flags = f"-m torch.distributed.run --nproc-per-node 2 --master-port {free_port()}"
    with Server("-m", TALES, "--dtype", "fp32", launcher=[sys.executable, *flags.split()]) as ranks:
        text = ranks.complete()["text"]
        leaving = ranks.begin(body=LONG | dict(stream=True))
        leaving.getresponse().readline()
        leaving.close()
        assert ranks.complete()["text"] == text, "both stopped at the same token"
        assert ranks.ask("/v1/completions", dict(prompt="tale " * 2000))[0] == 400
        assert ranks.chat(temperature=1)["message"]["content"]
        ranks.process.send_signal(signal.SIGINT)
        ranks.process.wait(PATIENCE)


def test_serve_as_the_openai_package_asks(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any")
    asks = dict(model="tales", messages=FOX, max_tokens=12, temperature=0)
    assert [model.id for model in client.models.list()] == ["tales"]
    whole = client.chat.completions.create(**asks, logprobs=True, top_logprobs=2).choices[0]
    assert whole.logprobs.content[0].top_logprobs[0].token == whole.logprobs.content[0].token
    chunks = client.chat.completions.create(**asks, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.message.content
    seeded = [
        client.completions.create(model="tales", prompt="Once", seed=5, max_tokens=12, stop="@")
        for _ in range(2)
    ]
    assert seeded[0].choices[0].text == seeded[1].choices[0].text
    with pytest.raises(openai.BadRequestError, match="n must be absent or 1"):
        client.chat.completions.create(**asks, n=2)


# ---- session.py


def test_session_logprobs_are_the_models(tiny, tiny_model):
    session = Session(tiny, dtype=torch.float32, device="cpu")
    for settings in dict(temp=0), dict(temp=2, repeat_penalty=1.5, top_k=3):
        text = session.generate("Once", n=6, ignore_eos=True, logprobs=3, **settings).finish()
        prompt = session.tokenizer.encode("Once")
        rows = logits_of(tiny_model, prompt + text.ids)[len(prompt) - 1 : -1].log_softmax(-1)
        assert [score.id for score in text.logprobs] == text.ids and len(text.ids) == 6
        for row, score in zip(rows, text.logprobs):
            assert score.logprob == pytest.approx(row[score.id].item(), abs=1e-4)
            best = row.topk(3)
            assert [id for id, _ in score.best] == best.indices.tolist()
            assert [value for _, value in score.best] == pytest.approx(
                best.values.tolist(), abs=1e-4
            )
        assert [score.begins for score in text.logprobs] == sorted(
            score.begins for score in text.logprobs
        )
    plain = session.generate("Once", n=6, ignore_eos=True, temp=0).finish()
    assert (
        plain.logprobs == []
        and plain.ids
        == session.generate("Once", n=6, ignore_eos=True, temp=0, logprobs=0).finish().ids
    )


def test_session_names_of_dtypes_and_paths(tiny, monkeypatch, tmp_path):
    for name in "float32", torch.float32, "fp32":
        assert Session(tiny, dtype=name, device="cpu").model.dtype == torch.float32
    with pytest.raises(ValueError, match="dtype is 'float8'"):
        Session(tiny, dtype="float8", device="cpu")
    monkeypatch.chdir(tmp_path)
    assert Session("models/tales", device="cpu").model.checkpoint.folder == TALES
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails(AssertionError("the hub")))
    with pytest.raises(OSError, match="no folder models/talse here"):
        Session("models/talse")
    (tmp_path / "mine").mkdir()
    with pytest.raises(OSError, match="no folder mine/model here"):
        Session("mine/model")
    with pytest.raises(TypeError, match="there is no setting 'tmep'; sampling has temp, "):
        Session(tiny, device="cpu").generate("a", tmep=0)


def test_stop_strings_with_control_tokens():
    tokenizer = Tokenizer(TALES)
    end, text = tokenizer.control["</s>"], tokenizer.encode("One fox. Two", bos=False)
    fox = next(i for i in range(len(text)) if tokenizer.decode(text[: i + 1]).endswith("fox"))
    for stops, ids, expected, stopped in (
        (["</s>"], [*text, end, *text], "One fox. Two", True),
        (["fox</s>"], [*text[: fox + 1], end], "One ", True),
        (["fox</s>"], text, "One fox. Two", False),
        (["fox</s>"], [*text[: fox + 1], tokenizer.bos, *text[fox + 1 :]], "One fox. Two", False),
        (["</s><s>"], [*text, end, *text, end, tokenizer.bos], "One fox. Two One fox. Two", True),
        (["</s>."], [*text, end], "One fox. Two", False),
    ):  # fmt: skip
        stream = TextStream(tokenizer, at_start=True, stops=stops)
        seen = "".join(stream.push(id) for id in ids) + stream.finish()
        assert (seen, stream.stopped) == (expected, stopped), stops


# ---- checkpoint.py, extra/tensors.py and extra/hub.py: layouts, families, the hub


@pytest.mark.parametrize("family, fp8, backend", [
    *((name, None, "torch") for name in FAMILIES), ("qwen 2.5", "e4m3", "torch"), ("qwen 3", "e5m2", "torch"),
    # for Triton's kernels, the others are as the model of most tests
    ("qwen 2.5", None, "triton"), ("qwen 3", None, "triton"),
])  # fmt: skip
def test_families_equal_transformers(tmp_path, family, fp8, backend, monkeypatch):
    """Logits of a prompt, whole and in parts, and greedy tokens after one that is evaluated in
    chunks; in 8 bits, against our model with decoded weights."""
    monkeypatch.setitem(PROMPT_CHUNK, "cpu", 16)
    theirs = hugging_face_model(**FAMILIES[family])
    theirs.save_pretrained(tmp_path)
    T = 70 if backend == "torch" else 15  # the interpreter is slow
    prompt = torch.randint(5, 300, (T,))
    device = DEVICE.type if backend == "triton" else "cpu"
    ours = load(tmp_path, dtype="fp32", device=device, backend=backend, format=fp8)
    if fp8:
        theirs = load(tmp_path, dtype="fp32", device="cpu", format=fp8)
        with_dense_weights(theirs)
    expected = logits_of(theirs, prompt) if fp8 else oracle(theirs, prompt.tolist())
    pieces = logits_of(ours, prompt, T - 12, 1, 10, 1)
    assert_close(pieces, expected, 0.02 if fp8 else 1e-4)  # with an activation in fp16 on a CPU
    if backend == "torch":
        assert_close(logits_of(ours, prompt), expected, 1e-4)
    if backend == "torch" and not fp8:
        text = prompt.tolist() + greedy(ours, prompt.tolist(), 12)
        logits, tokens = oracle(theirs, text)[T - 1 : -1], torch.tensor(text[T:])
        # the best two may be tied to within rounding
        behind = logits.amax(1) - logits[range(12), tokens]
        # ours are up to 2.3e-5 of their spread off
        assert (behind < 1e-4 * logits.std(1)).all(), behind


def to_bin(folder: Path) -> None:
    """With gaps in the strides, a tensor turned and one that is a parameter, all of which
    torch.save keeps."""
    tensors = {
        name: torch.stack((t, t), -1)[..., 1]
        for name, t in load_file(folder / "model.safetensors").items()
    }
    tensors[DOWN] = tensors[DOWN].t().contiguous().t()
    tensors[NORM] = torch.nn.Parameter(tensors[NORM])
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def to_shards(folder: Path, suffix: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    # or a little more, since tensors stay whole
    half = sum(t.nbytes for t in tensors.values()) * 2 // 3
    save_torch_state_dict(
        tensors, folder, max_shard_size=half, safe_serialization=suffix == "safetensors"
    )


def to_meta(folder: Path, shards: int) -> None:
    """Meta's own layout, written from its description: interleaved q and k, tensors split by column
    or by row."""
    raw, config = load_file(folder / "model.safetensors"), read_config(folder)
    names = {f"{x}_proj": f"w{x}" for x in "qkvo"} | {
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    }
    names |= {
        "model.": "",
        "self_attn": "attention",
        "mlp": "feed_forward",
        "input_layernorm": "attention_norm",
    }
    names |= {
        "post_attention_layernorm": "ffn_norm",
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
    }
    split_axis = {
        "wq": 0,
        "wk": 0,
        "wv": 0,
        "wo": 1,
        "w1": 0,
        "w3": 0,
        "w2": 1,
        "tok_embeddings": 1,
        "output": 0,
    }
    parts: list[dict] = [{} for _ in range(shards)]
    for name, tensor in raw.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = tensor.unflatten(0, (-1, config.head_dim))
            half = config.head_dim // 2
            tensor = torch.stack((heads[:, :half], heads[:, half:]), 2).reshape(tensor.shape)
        for theirs, metas in names.items():
            name = name.replace(theirs, metas)
        axis = split_axis.get(name.split(".")[-2])
        for i, part in enumerate(parts):
            part[name] = (tensor if axis is None else tensor.chunk(shards, axis)[i]).clone()
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
    "safetensors shards": lambda folder: to_shards(folder, "safetensors"),
    "bin shards": lambda folder: to_shards(folder, "bin"),
    "meta": lambda folder: to_meta(folder, 1),
    "meta, 2 shards": lambda folder: to_meta(folder, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_transformers(tmp_path, layout):
    theirs = hugging_face_model(**FAMILIES["gqa"])
    theirs.save_pretrained(tmp_path)
    LAYOUTS[layout](tmp_path)
    assert_equals_transformers(tmp_path, theirs)


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
    """A tensor in both shards, with other values in the one that the index does not name; names
    that begin with "./"."""
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


FILES = {  # what transformers reads as the same model
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
}  # fmt: skip


@pytest.mark.parametrize("how", FILES)
def test_files_beside_or_within_others(tmp_path, how):
    theirs = hugging_face_model(**FAMILIES["gqa"])
    theirs.save_pretrained(tmp_path)
    FILES[how](tmp_path)
    assert_equals_transformers(tmp_path, theirs)


def test_hub_takes_what_a_folder_means(hub, copy):
    """Nothing of what else lies there is downloaded."""
    other_weights(copy)
    hub.files = of_hub_files(copy)
    load("someone/tiny", device="cpu")
    fetched = {line.rpartition("/")[2] for line in hub.asked if line.startswith("GET /someone")}
    assert "model.safetensors" in fetched and not fetched & {INDEX, SHARD, "pytorch_model.bin"}


def of_hub_files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_config_beside_params(tmp_path):
    """The weights say which of the two is meant."""
    theirs = hugging_face_model(**FAMILIES["gqa"])
    theirs.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_bytes()
    original = shutil.copy(tmp_path / "model.safetensors", tmp_path / "x")
    to_meta(tmp_path, 1)
    (tmp_path / "config.json").write_bytes(config)
    assert_equals_transformers(tmp_path, theirs)
    Path(original).rename(tmp_path / "model.safetensors")
    assert_equals_transformers(tmp_path, theirs)


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
    file = checkpoint.weight_files(copy).files[0]
    if how == "cut":
        os.truncate(file, 9999)
    else:
        os.replace(shutil.copy(file, copy / "new"), file)
    with pytest.raises(OSError, match=f"{file.name} was (replaced|cut short) while it was being"):
        load(opened, device="cpu")


YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
OLDER = dict(type="yarn", factor=4.0, original_max_position_embeddings=64)


@pytest.mark.parametrize("fields", [
    dict(rope_scaling=OLDER, rope_theta=1e4),
    dict(rope_scaling=OLDER, rope_theta=1e4, rope_parameters=YARN),
    dict(rope_parameters=YARN, rope_scaling=OLDER | {"beta_fast": None}),
    dict(rope_parameters=YARN, rope_theta=5e5),
    dict(rope_scaling=dict(type="yarn", factor=4.0), rope_theta=1e4,
         original_max_position_embeddings=64),
    dict(rope_scaling=OLDER | {"original_max_position_embeddings": 9}, rope_theta=1e4,
         original_max_position_embeddings=64),
], ids=str)  # fmt: skip
def test_config_places_of_rope_fields(copy, fields):
    """As transformers reads them."""
    edit(copy / "config.json", **{"rope_parameters": None} | fields)
    theirs = transformers.AutoConfig.from_pretrained(copy)
    freqs, gain = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    angles = torch.outer(torch.arange(50.0), freqs)
    expected = gain * torch.stack((angles.cos(), angles.sin()), -1)
    assert_close(rope_table(read_config(copy), 50), expected, 1e-5)


@pytest.mark.parametrize("fields", [
    dict(max_window_layers=2), dict(max_window_layers=1), {},
    dict(layer_types=["full_attention"] * 2, max_window_layers=0),
    dict(layer_types=["full_attention", "sliding_attention"]),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_config_windows_of_layers(copy, family, fields):
    fields = fields | dict(model_type=family, use_sliding_window=True, sliding_window=64)
    edit(copy / "config.json", **fields)
    theirs = transformers.AutoConfig.from_pretrained(copy)
    windows = "sliding_attention" in theirs.layer_types
    assert read_config(copy).sliding_window == (64 if windows else None)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_biases_of_attention(tmp_path, cli, family):
    theirs = hugging_face_model(
        model=family, num_key_value_heads=2, head_dim=16, attention_bias=True
    )
    for layer in theirs.model.layers:
        layer.self_attn.o_proj.bias.data.zero_()
    theirs.save_pretrained(tmp_path)
    assert_equals_transformers(tmp_path, theirs)
    set_one("model.layers.1.self_attn.o_proj.bias", 1e-3)(tmp_path)
    said = "self_attn.o_proj.weight has a bias, which is supported for q, k and v only"
    assert_refused(cli("-m", tmp_path, "-p", "a"), said)


def test_config_sliding_window(copy):
    edit(copy / "config.json", model_type="mistral", max_position_embeddings=8192)
    assert load(copy, device="cpu").ctx_size == 4096
    edit(copy / "config.json", sliding_window=None)
    assert load(copy, device="cpu", ctx_size=5000).ctx_size == 5000


def test_config_older_rope_fields(tiny, copy):
    edit(copy / "config.json", rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))
    newer = read_config(copy)
    edit(
        copy / "config.json",
        rope_parameters=None,
        rope_theta=1e4,
        rope_scaling={"type": "linear", "factor": 4.0},
    )
    assert read_config(copy) == newer != read_config(tiny)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_config_defaults(tmp_path, family):
    """Absent fields have transformers' defaults."""
    given = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=300,
    )
    (tmp_path / "config.json").write_text(json.dumps(given | {"model_type": family.lower()}))
    ours, theirs = read_config(tmp_path), getattr(transformers, f"{family}Config")(**given)
    assert (
        ours.norm_eps == theirs.rms_norm_eps
        and ours.rope_theta == theirs.rope_parameters["rope_theta"]
    )
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)


def test_config_eos_of_both_files(copy):
    edit(copy / "config.json", eos_token_id=[7, 2])
    edit(copy / "generation_config.json", eos_token_id=[2, 9])
    assert read_config(copy).eos_ids == (2, 9, 7)


class Hub(http.server.BaseHTTPRequestHandler):
    """The few responses of the Hugging Face hub that a download needs. files: those of the
    repository someone/tiny."""

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
        tree = [
            {"type": "file", "path": n, "size": len(data), "oid": "0" * 40}
            for n, data in self.files.items()
        ]
        about = {
            "id": "someone/tiny",
            "sha": "a" * 40,
            "siblings": [{"rfilename": name} for name in self.files],
        }
        if found := re.fullmatch("/api/models/someone/tiny(/revision/.*|/tree/.*|)", path):
            is_tree = found[1].startswith("/tree")
            return (
                200,
                json.dumps(tree if is_tree else about).encode(),
                {"Content-Type": "application/json"},
            )
        data = self.files.get(path.removeprefix(f"/someone/tiny/resolve/{'a' * 40}/"))
        if data is None:
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        return (
            200,
            data,
            {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": "a" * 40},
        )


def of_hub(folder: Path) -> dict[str, bytes]:
    """A checkpoint as a repository, which has other files, too."""
    others = ("README.md", "original/model.safetensors", "tf_model.h5")
    return {file.name: file.read_bytes() for file in folder.iterdir()} | dict.fromkeys(others, b"x")


@pytest.fixture
def hub(tiny, tmp_path, monkeypatch):
    """A hub on the loopback address with the tiny checkpoint, and an empty cache."""
    Hub.files, Hub.asked, Hub.token = of_hub(tiny) | {"pytorch_model.bin": b"x" * 999}, [], None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        set_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}", tmp_path / "cache")
        yield Hub
        server.shutdown()


def set_hub(monkeypatch, endpoint: str, cache: Path, offline: bool = False) -> None:
    """Other settings for this process, where the library has read its environment already, and for
    those it starts."""
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


def test_hub_downloads_once_what_is_needed(hub, tiny, cli, monkeypatch, tmp_path):
    """First by a process of its own, in which no test has imported or set anything."""
    flags = ("someone/tiny", "-p", "Once", "-n", 4, "--temp", 0, "--quiet")
    expected = cli("-m", tiny, *flags[1:])
    process = program("-hf", *flags)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out.decode(), err.decode()) == expected
    fetched = {line.rpartition("/")[2] for line in hub.asked if line.startswith("GET /someone")}
    assert fetched == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.model",
    }
    before = len(hub.asked)
    assert cli("-m", *flags) == expected and len(hub.asked) == before, (
        "the second time is without the network"
    )
    set_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
    next((tmp_path / "cache").rglob("snapshots/*/generation_config.json")).unlink()
    assert cli("-m", *flags) == expected, "offline, what is there has to do"


@pytest.mark.parametrize(
    "layout, listed", [(None, True), ("safetensors shards", False), ("meta, 2 shards", False)]
)
def test_hub_finishes_a_download(hub, copy, monkeypatch, tmp_path, layout, listed):
    """One of the files is not there yet, and the disk has room for that one only. listed: whether
    the cache remembers what the repository holds; if another program made it, it does not."""
    LAYOUTS.get(layout, lambda folder: None)(copy)
    hub.files = of_hub(copy)
    whole = load("someone/tiny", dtype="fp32", device="cpu")
    *_, last = sorted(
        path for path in (tmp_path / "cache").rglob("snapshots/*/*") if path.stat().st_size > 9999
    )
    size = last.stat().st_size
    last.resolve().unlink()
    last.unlink()
    if not listed:
        shutil.rmtree(tmp_path / "cache" / "models--someone--tiny" / "trees")
    disk = SimpleNamespace(free=size - 1)
    monkeypatch.setattr("extra.hub.shutil.disk_usage", lambda _: disk)
    with pytest.raises(
        ValueError, match=r"someone/tiny takes .* GB, but .* GB free \(see HF_HOME\)"
    ):
        load("someone/tiny", device="cpu")
    disk.free = size
    hub.asked.clear()
    again = load("someone/tiny", dtype="fp32", device="cpu")
    assert torch.equal(whole.weights.layers[1].w2.data, again.weights.layers[1].w2.data)
    assert [line.rpartition("/")[2] for line in hub.asked if line.startswith("GET /someone")] == [
        last.name
    ]


def test_folders_of_links(tiny, tmp_path, hub):
    """As the hub's cache has them, and elsewhere: to a folder that holds the files by other names."""
    snapshot = load("someone/tiny", device="cpu").checkpoint.folder
    assert (snapshot / "config.json").resolve().parent.name == "blobs"
    linked = tmp_path / "linked"
    linked.mkdir()
    for i, file in enumerate(tiny.iterdir()):
        (linked / file.name).symlink_to(shutil.copy(file, tmp_path / f"blob-{i}"))
    models = [load(folder, device="cpu") for folder in (tiny, snapshot, linked)]
    whole, *others = (logits_of(model, [1, 5, 9]) for model in models)
    assert all(torch.equal(whole, other) for other in others)
    assert Tokenizer(linked).encode(TEXT) == Tokenizer(tiny).encode(TEXT)
    to_bin(linked)
    (linked / "pytorch_model.bin").rename(tmp_path / "blob")
    (linked / "pytorch_model.bin").symlink_to("../blob")
    assert torch.equal(logits_of(load(linked, device="cpu"), [1, 5, 9]), whole)


HUB_REFUSALS = {  # the hub, whether it is there, the repository: what the line says
    "gated": (
        dict(token="secret"),
        "",
        "tiny",
        "it is gated: accept its licence on its page, and set HF_TOKEN",
    ),
    "gguf": (
        dict(files={"a.IQ2_M.gguf": b"x"}),
        "",
        "tiny",
        "holds no weights that this program reads",
    ),
    "another family": (
        dict(files={"config.json": b'{"model_type": "gemma2"}', "model.safetensors": b"x"}),
        "",
        "tiny",
        "config.json: model_type is 'gemma2', which is not supported",
    ),
    "another kind": (
        dict(files={"a.Q4_0.gguf": b"x"}),
        "",
        "tiny:Q4_K_M",
        "holds no GGUF file of the kind Q4_K_M",
    ),
    "unknown": (
        {},
        "",
        "other",
        "no folder someone/other here, and no such repository on http://127.0.0.1:",
    ),
    "offline": (
        {},
        "offline",
        "tiny",
        "offline mode is enabled. To disable it, please unset the `HF_HUB_OFFLINE`",
    ),
    "not there": ({}, "not there", "tiny", "and the download from http://127.0.0.1:9 failed (Conn"),
}


@pytest.mark.parametrize("settings, state, name, expected", HUB_REFUSALS.values(), ids=HUB_REFUSALS)
def test_hub_refusals_are_one_line(
    hub, cli, monkeypatch, tmp_path, settings, state, name, expected
):
    for field, value in settings.items():
        setattr(hub, field, value)
    if state:
        set_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=state == "offline")
    assert_refused(cli("-m", f"someone/{name}", "-p", "Once", "-n", 2), expected)
    assert not [
        line
        for line in hub.asked
        if line.startswith("GET") and line.endswith(("safetensors", "gguf"))
    ]
    if hub.token:
        monkeypatch.setenv("HF_TOKEN", "secret")
        assert cli("-m", "someone/tiny", "-p", "Once", "-n", 2)[0] == 0


@pytest.mark.parametrize("fields", [
    # ramps within the frequencies (that of 2000 starts elsewhere with 31 turns as beta_fast) and
    # beyond them; a scale
    *(dict(trained=trained) for trained in (64, 2000, 1 << 17)),
    dict(trained=32, factor=8.0, beta_fast=16.0, beta_slow=2.0),
    dict(trained=1000, factor=2.0, rope_theta=100.0, attention_factor=1.3),
    dict(trained=64, mscale=0.7),
], ids=str)  # fmt: skip
def test_yarn_angles_equal_transformers(tmp_path, fields):
    rope = dict(rope_type="yarn", rope_theta=1e4, factor=4.0) | fields
    trained = rope["original_max_position_embeddings"] = rope.pop("trained")
    config = dict(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=int(rope["factor"] * trained)
    )
    theirs = transformers.LlamaConfig(**config, rope_parameters=rope)
    theirs.save_pretrained(tmp_path)
    freqs, gain = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    angles = torch.outer(torch.arange(50.0), freqs)
    assert_close(
        rope_table(read_config(tmp_path), 50),
        gain * torch.stack((angles.cos(), angles.sin()), -1),
        1e-5,
    )


# ---- checkpoint.py: untrusted files


def write(name: str, content: str | bytes):
    return lambda folder: (folder / name).write_bytes(
        content.encode() if isinstance(content, str) else content
    )


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


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch PICKLE_HAS_RUN",))


UNSAFE = "pytorch_model.bin is damaged, or cannot be read safely"
INDEX, SHARDS = (
    "model.safetensors.index.json",
    [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)],
)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 999\n"
W13, PTH = "layers.1.w13", "consolidated.01.pth"
index_of = lambda names: both(
    remove("model.safetensors"), write(INDEX, json.dumps({"weight_map": names}))
)

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [1.0] * 8,
    "attention_factor": 1.0,
}

# how a checkpoint, or one saved in a format, is corrupted: what the one-line error must contain
SPOILED = {
    "no config": (remove("config.json"), "neither config.json nor params.json"),
    "config is not JSON": (write("config.json", "{"), "config.json is not JSON"),
    "deep JSON": (write("config.json", "[" * 100_000), "config.json is not JSON"),
    "config lacks a field": (spoil_config(hidden_size=None), "config.json lacks the field hidden_size"),
    **{f"{name} {value!r}": (spoil_config(**{name: value}), f"{name} is {value!r}") for name, value in dict(
        num_hidden_layers=-1, vocab_size=10**15, intermediate_size="many", rms_norm_eps=NAN, hidden_act="gelu",
        model_type="gpt2", tie_word_embeddings="false",
    ).items()},
    "uneven heads": (spoil_config(num_key_value_heads=3), "4 query heads cannot share 3"),
    "sliding window": (
        spoil_config(model_type="mistral", sliding_window=64), "sliding_window is 64: a context of 256"
    ),
    "listed dtype": (spoil_config(dtype=["float32"]), "torch_dtype is ['float32']"),
    "another rope": (spoil_config(rope_parameters={"rope_type": "dynamic"}), "rope_type is 'dynamic'"),
    **{f"yarn, {name}": (spoil_config(rope_parameters={"rope_type": "yarn", name: value}), f"{name} is {value}")
       for name, value in (("truncate", False), ("mscale_all_dim", 1.0))},
    **{f"longrope with {name}": (spoil_config(rope_parameters=LONGROPE | {name: value}), "rope_type is 'longrope'")
       for name, value in (("long_factor", [2.0] * 8), ("attention_factor", 1.5))},
    "eos beyond the vocabulary": (spoil_config(eos_token_id=[2, 9999]), "config.json: eos_token_id is [2, 9999]"),
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
    "a link to itself": (
        lambda f: [(f / "config.json").unlink(), (f / "config.json").symlink_to("config.json")], "neither config.json",
    ),
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
    **{f"index that names {name}": (index_of({"a": name}), "not a file of its own folder")
       for name in ("../x.bin", "/x.bin", "a/../../x.bin", "x", "config.json")},
    "index without a map": (index_of([]), f"{INDEX} lacks the field weight_map"),
    **{f"torch file, {name}": (torch_file(content), UNSAFE) for name, content in {
        "numbered": {1: torch.ones(1)}, "a list": [torch.ones(1)], "nested": {"x": {"y": torch.ones(1)}},
        "sparse": {"x": torch.ones(1).to_sparse()}, "of no device": {"x": torch.ones(1, device="meta")},
        "quantised": lambda: {"x": torch.quantize_per_tensor(torch.ones(1), 1, 0, torch.qint8)},
        "runs code": {"x": Bomb()},
    }.items()},
    "plain pickle": (torch_file({"x": Bomb()}, lambda value, file: file.write_bytes(pickle.dumps(value))), UNSAFE),
    "cut torch file": (both(torch_file({}), lambda f: os.truncate(f / "pytorch_model.bin", 99)), UNSAFE),
    "compressed torch file": (torch_file(b"x" * 99, compressed), "(it is compressed)"),
    "saved, another layout": (spoil_tensors(fused_llama="1"), "saved by another version of fused-llama, in the format"),
    "saved, another format": (spoil_tensors(format="e3m4"), "of fused-llama, in the format 'e3m4': save it again"),
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


@pytest.fixture(scope="session")
def tiny_saved(tiny, tmp_path_factory) -> Path:
    return save(tiny, tmp_path_factory.mktemp("saved")).parent


@pytest.mark.parametrize("how", SPOILED)
def test_spoiled_checkpoint_is_one_line(cli, tiny, tiny_saved, how, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folder = Path(
        shutil.copytree(
            tiny_saved if how.startswith("saved") else tiny, tmp_path / "folder" / "copy"
        )
    )
    spoil, *expected = SPOILED[how]
    spoil(folder)
    assert_refused(
        cli("-m", folder, "-p", "Once", "-n", 2, "--quiet", "--no-display-prompt"), *expected
    )
    assert not (tmp_path / "PICKLE_HAS_RUN").exists()


def test_head_dim_that_the_kernels_cannot_run(cli, copy):
    hugging_face_model(Tokenizer(copy).vocabulary.sp.vocab_size(), head_dim=20).save_pretrained(
        copy
    )
    code, _, err = cli(
        "-m", copy, "-p", "Once", "-n", 2, "--backend", "triton", "--device", DEVICE.type
    )
    assert (
        code == 1
        and "head_dim is 20; the kernels need a multiple of 8: use --backend torch"
        in err.splitlines()[-1]
    )
    assert cli("-m", copy, "-p", "Once", "-n", 2, "--device", "cpu")[0] == 0


def test_safetensors_cut_short_while_read(tmp_path):
    """Whole, or some rows and columns, by one thread and by several."""
    file, whole = tmp_path / "x.safetensors", torch.randint(-1000, 1000, (3001, 3003)).half()
    tensors = {"small": whole[0].clone(), "large": whole}
    save_file(tensors, file)
    found = {tensor.name: tensor for tensor in tensors_of(file)}
    assert all(found[name].read().equal(tensor) for name, tensor in tensors.items())
    for rows, columns in ((slice(1, 2999), slice(0, 3003)), (slice(0, 3001), slice(5, 3000))):
        read = found["large"].read(spans=[range(3001)[rows], range(3003)[columns]])
        assert read.equal(whole[rows, columns])
    os.truncate(file, 8 + 100 + min(tensor.offset for tensor in found.values()))
    for tensor in found.values():
        with pytest.raises(OSError, match="x.safetensors was cut short while it was being read"):
            tensor.read()


def test_messages_are_one_line(copy):
    folder = copy.rename(copy.parent / "a\n\x1b[31mb")
    spoil_tensors(lambda t: t[NORM].fill_(torch.nan))(folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('a\nb\x1b[31m' * 999) }}")
    sampling = json.dumps({"temperature": "x\ny\x1b" * 999})
    model, tokenizer = load(folder, device="cpu"), Tokenizer(folder)
    for act in (
        lambda: list(generate(model, [1, 5])),
        lambda: tokenizer.apply_chat_template(conversation("hello")),
        lambda: (
            spoil_tensors(lambda t: t.update({"\n" * 9: torch.ones(1)}))(folder) or load(folder)
        ),
        lambda: spoil_config(hidden_act="x\ny" * 100_000)(folder) or load(folder),
        lambda: save(folder, folder / "new"),
        lambda: (
            (folder / "generation_config.json").write_text(sampling)
            and checkpoint.read_sampling(folder)
        ),
    ):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            act()
        assert len(str(raised.value)) <= 500 and str(raised.value).isprintable(), raised.value


# ---- extra/save.py: saved models


def test_a_model_is_named(tiny, tmp_path):
    for wrong in 5, None, torch.nn.Identity():
        with pytest.raises(TypeError, match=f"hub, not as a {type(wrong).__name__}"):
            save(wrong, str(tmp_path / "saved"))
        with pytest.raises(TypeError, match=f"hub, not as a {type(wrong).__name__}"):
            Session(wrong)


@pytest.mark.parametrize("shape", ["gqa", "mqa, tied"])
def test_loading_bar_ends_full(copy, monkeypatch, shape):
    bars, original, shown = [], checkpoint.tqdm, dict(disable=False, file=io.StringIO())
    monkeypatch.setattr(
        checkpoint, "tqdm", lambda **options: bars.append(original(**options | shown)) or bars[-1]
    )
    hugging_face_model(read_config(copy).vocab_size, **FAMILIES[shape]).save_pretrained(copy)
    for folder, form in (
        (copy, None),
        (copy, "e4m3"),
        (save(copy, copy.parent / "saved", format="e4m3").parent, None),
    ):
        load(folder, format=form)
        assert bars[-1].n == bars[-1].total > 0, (folder, form)


@pytest.mark.parametrize("shape, layout, form", [
    ("gqa", None, "e4m3"), ("mqa, tied", None, "e5m2"), ("gqa", "meta, 2 shards", "e4m3"),
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
    assert (
        code == 0 and out == "" and f"{saved}: {form} matrices" in err and err.count("\n") == 1
    ), err
    assert sorted(f for f in copy.parent.iterdir() if f.is_dir()) == [copy, saved]
    assert find_template(copy, {})[0] == find_template(saved, {})[0] == TEMPLATES["llama2"]
    tensors = load_file(saved / "model.safetensors")
    assert tensors["norm.weight"].dtype == torch.float16
    for name, shape in {
        "layers.1.w13": (224, 64),
        "layers.1.w13.scale": (224,),
        "norm.weight": (64,),
    }.items():
        assert tensors[name].shape == shape, "folders that were saved earlier stay readable"
    for dtype in ("fp32", "bf16"):
        # where it was encoded: a GPU may round an error the other way
        options = dict(dtype=dtype, device="cpu")
        original, again = (
            load(f, format=fp8, **options) for f, fp8 in ((copy, form), (saved, None))
        )
        for one, other in zip(original.weights.matrices, again.weights.matrices):
            assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors)), (
                "codes depend on the dtype"
            )
        ours, theirs = (
            logits_of(model, torch.arange(5, 25) * 7, 19, 1) for model in (original, again)
        )
        assert torch.equal(ours, theirs), "a saved model says something else"
    flags, other = ("-p", "Once", "-n", 8, "--temp", 0), "e4m3" if form == "e5m2" else "e5m2"
    (_, text, _), (code, same, err) = (
        cli("-m", copy, "--fp8", form, *flags),
        cli("-m", saved, "--fp8", form, *flags),
    )
    assert code == 0 and same == text and f"with {form} matrices" in err
    for wanted, refused in (
        (other, ("--fp8", other, *flags)),
        ("e4m3", ("--save", copy.parent / "again", "--fp8")),
    ):
        why = f"its matrices are {form}, and {wanted} would lose precision a second time: run it as it is, or encode"
        assert_refused(cli("-m", saved, *refused), why)


def test_save_is_whole_or_not_at_all(cli, copy, monkeypatch, tmp_path, hears_signals):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (copy / "special_tokens_map.json").write_text("{")
    before = sorted(tmp_path.rglob("*"))

    def refused(to: str, expected: str, code: int = 1) -> None:
        seen, out, err = cli("-m", copy, "--save", tmp_path / to, "--fp8")
        assert seen == code and out == "" and expected in err and err.count("\n") == (code == 1), (
            err
        )
        assert sorted(tmp_path.rglob("*")) == before

    refused("new", "special_tokens_map.json is not JSON")
    before.remove(copy / "special_tokens_map.json")
    (copy / "special_tokens_map.json").unlink()
    refused("copy", "copy is not an empty folder: save to a new one")
    refused("file", "file is not an empty folder")
    refused("no/where", "No such file or directory")
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))  # a disk that becomes full
    try:
        refused("new", "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    steps = [("checkpoint.free_memory", lambda _: 100_000, "try a smaller", 1)]
    steps.append(
        (
            "extra.save.shutil.disk_usage",
            lambda _: SimpleNamespace(free=0),
            "has 0.00 GB free: save elsewhere",
            1,
        )
    )
    for step in ("checkpoint.Loader.load", "extra.save.save_file"):
        steps.append((step, fails(OSError("No space left")), "No space left", 1))
        steps.append((step, fails(KeyboardInterrupt()), "", 130))
        steps += [
            (step, lambda *_, n=n: signal.raise_signal(n), "", 128 + n) for n in hears_signals
        ]
    for step, end, expected, code in steps:
        with monkeypatch.context() as patch:
            patch.setattr(step, end)
            refused("new", expected, code)
    rename = lambda file, to: os.rename(file, to) if file.name != "model.safetensors" else 1 / 0
    empty = tmp_path / "empty"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)  # its last step
        refused("new", "division by zero")
        refused("empty", "division by zero")
    # inside the folder, which may be a mount point, with its own mode
    empty.chmod(0o2750)
    place = empty.stat()
    assert cli("-m", copy, "--save", empty, "--fp8", "--quiet") == (0, "", "")
    assert (place.st_ino, place.st_mode) == (empty.stat().st_ino, empty.stat().st_mode)
    assert all(f.is_file() for f in empty.iterdir())
    modes = {
        f.stat().st_mode & 0o777
        for f in (tmp_path / "empty" / "model.safetensors", copy / "config.json")
    }
    assert len(modes) == 1


# ---- checkpoint.py: memory


def memory_needed(
    config: Config, dtype=torch.float32, device="cpu", ctx_size: int = 64, *options
) -> list[float]:
    """GB that check_memory counts: weights, cache, workspace."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError) as error:
        patch.setattr("checkpoint.free_memory", lambda device: 0)
        check_memory(config, dtype, torch.device(device), ctx_size, *options)
    return [
        float(number)
        for number in re.findall(r"(?:weights|tokens|workspace) ([\d.]+) GB", str(error.value))
    ]


def test_memory_of_a_format():
    """In place of the matrices what the format stores. The output matrix of INT4 is in 8 bits. On a
    CPU, codes of 4 bits are stored twice for bf16."""
    bf16, fp32 = torch.bfloat16, torch.float32
    config = read_config_like(dim=4096, n_layers=8, hidden_dim=16384, vocab_size=1 << 15)
    plain, encoded, in_4_bits = (
        memory_needed(config, fp32, "cuda", 64, format)[0] for format in (None, E4M3, INT4)
    )
    *layers, output = checkpoint.matrix_shapes(config).values()
    less = sum(4 * N * K - E4M3.nbytes(N, K) for N, K in [*layers, output])
    assert plain - encoded == pytest.approx(less / 1e9, abs=0.02)
    less = sum(4 * N * K - INT4.nbytes(N, K) for N, K in layers)
    less += 4 * output[0] * output[1] - E4M3.nbytes(*output)
    assert plain - in_4_bits == pytest.approx(less / 1e9, abs=0.02)
    once, twice = (memory_needed(config, bf16, on, 64, INT4)[0] for on in ("cuda", "cpu"))
    copies = sum(N * K for N, K in layers) * 5 / 8
    assert twice - once == pytest.approx(copies / 1e9, abs=0.02)


def test_memory_of_cache_and_workspace():
    """Keys and values in 16 or 8 bits; the workspace grows with the largest matrix and, for keys and
    values in 8 bits, with a layer's, decoded."""
    c = read_config_like(n_kv_heads=32, n_heads=32, head_dim=128)
    needed = lambda kv_fp8: memory_needed(c, torch.float16, "cuda", 1 << 16, None, kv_fp8)
    (_, halves, room), (_, codes, larger) = needed(False), needed(True)
    assert codes == pytest.approx(halves / 2, abs=0.02)
    assert larger - room == pytest.approx(2 * 2 * 2 * c.kv_dim * 65536 / 1e9, abs=0.02)
    for dtype in (torch.float16, torch.float32):
        wide = memory_needed(read_config_like(hidden_dim=1 << 22), dtype)[2]
        largest = 2 * (1 << 22) * read_config_like().dim
        assert wide == pytest.approx(checkpoint.MARGIN * dtype.itemsize * largest / 1e9, abs=0.02)


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_a_container(monkeypatch, tmp_path, version):
    """What its limit leaves, apart from files that the system can drop; without a limit, what the
    machine has."""
    limit, used = {1: ("limit_in_bytes", "usage_in_bytes"), 2: ("max", "current")}[version]
    names = (tmp_path, f"memory.{limit}", f"memory.{used}")
    monkeypatch.setattr(checkpoint, "CGROUPS", (("/nowhere", "a", "b"), tuple(map(str, names))))
    (tmp_path / names[1]).write_text("5000000\n")
    (tmp_path / names[2]).write_text("4000000\n")
    stat = "anon 9\ninactive_file 200000\nactive_file 100000\ntotal_active_file 7\n"
    (tmp_path / "memory.stat").write_text(stat)
    cpu = torch.device("cpu")
    assert checkpoint.free_memory(cpu) == 1_300_000
    (tmp_path / names[1]).write_text("max\n" if version == 2 else f"{(1 << 63) - 4096}\n")
    assert 1e8 < checkpoint.free_memory(cpu) < 1e15


# ---- tokenizer.py


def streamed(tokenizer: Tokenizer, ids: list[int], **options) -> list[str]:
    stream = TextStream(tokenizer, **options)
    return [stream.push(i) for i in ids] + [stream.finish()]


def test_tokenizer_round_trip(tiny):
    tokenizer = Tokenizer(tiny)
    for text in (
        "Once upon a time",
        " two spaces  inside ",
        "Żółw \U0001f422 \u4f60\u597d\n\n",
        "",
        "</s><s>",
        "a\tb",
    ):
        ids = tokenizer.encode(text, bos=False)
        assert tokenizer.decode(ids) == text == tokenizer.vocabulary.sp.decode(ids)
        assert tokenizer.bos not in ids and tokenizer.eos not in ids
        pieces = streamed(tokenizer, ids, at_start=True)
        assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
        assert (
            tokenizer.decode(tokenizer.encode("so.") + tokenizer.vocabulary.encode_after(text))
            == f"so.{text}"
        )
    assert tokenizer.encode("x")[0] == tokenizer.bos
    assert "".join(streamed(tokenizer, tokenizer.encode("time", bos=False))) == " time", (
        "text goes on with its space"
    )


@pytest.mark.parametrize(
    "stops", [["fox"], ["x. It", "zzz"], ["time", "there"], [". It said"], ["fox. It says"]]
)
def test_stop_strings_across_tokens(tiny, stops):
    tokenizer, text = Tokenizer(tiny), "Once upon a time there was a fox. It said"
    stream = TextStream(tokenizer, at_start=True, stops=stops)
    shown = ""
    for i in tokenizer.encode(text, bos=False):
        shown += stream.push(i)
        assert text.startswith(shown) and not any(stop in shown for stop in stops)
    found = [text.find(stop) for stop in stops if stop in text]
    assert (
        stream.stopped == bool(found)
        and shown + stream.finish() == text[: min(found, default=len(text))]
    )


def test_the_stop_string_that_ends_first_counts(tiny):
    """However the text is cut into tokens; of those that end together, the longest."""
    tokenizer = Tokenizer(tiny)
    stops = ["ce upo", "upon a", "e u", "on a", "time th"]
    for chosen in itertools.combinations(stops, 3):
        text = "Once upon a time there"
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in chosen]
        whole = tokenizer.encode(text, bos=False)
        letters = [i for letter in text for i in tokenizer.vocabulary.encode_after(letter)]
        for ids in (whole, letters):
            shown = "".join(streamed(tokenizer, ids, at_start=True, stops=chosen))
            assert shown == text[: min(ends)[1]], (chosen, ids)


def test_continuation_takes_what_does_not_merge():
    """The ids of a continuation are those after a character that stays a token of its own; a dot
    may merge with what follows. The "_" stands for the space that SentencePiece puts before a
    text."""
    encode = lambda text: [ord(c) for c in "_" + text.replace(".b", "X").replace("\nb", "Y")]
    assert encode_continuation("bc", encode) == [ord("b"), ord("c")]
    assert encode_continuation("c", lambda text: [hash(text)]) == [hash("c")], (
        "where all merge, as if alone"
    )


def test_ids_and_bytes_that_are_no_text(tiny):
    """Bytes that make no character are decoded as SentencePiece does."""
    tokenizer = Tokenizer(tiny)
    assert tokenizer.decode([-1, 1 << 40, 1 << 20]) == ""
    byte = {int(tokenizer.vocabulary.sp.id_to_piece(i)[3:5], 16): i for i in range(3, 259)}
    for raw in (b"\xe2\x82a", b"\xf0\x9f\x90", b"\xff\xfe", b"\xed\xa0\x80", b"\xc3\xa9\xe2\x82"):
        ids = [byte[b] for b in raw]
        assert (
            tokenizer.decode(ids)
            == "".join(streamed(tokenizer, ids))
            == tokenizer.vocabulary.sp.decode(ids)
        )


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
    t = Tokenizer(tiny, chat_template=name)
    prompt = t.chat_prompt(conversation("U", "A", "V", system="S"))
    assert prompt.text == "<s>" + TEXTS[name]
    # control tokens, and between them what SentencePiece makes of the text
    parts = re.split("(</?s>)", TEXTS[name])
    ids = [
        [t.control[part]] if part in t.control else t.vocabulary.sp.encode(part) for part in parts
    ]
    assert prompt.ids == [t.bos, *itertools.chain.from_iterable(ids)]


def test_find_template(tmp_path):
    own, folder = {"chat_template": "from the configuration"}, tmp_path / "vicuna-7b"
    folder.mkdir()
    assert find_template(folder, {}) == (TEMPLATES["vicuna"], "vicuna (from the folder's name)")
    assert find_template(folder, own)[0] == "from the configuration"
    several = [{"name": "default", "template": "x"}, {"name": "tool_use"}]
    assert find_template(folder, {"chat_template": several})[0] == "x"
    (folder / "chat_template.jinja").write_text("from the file")
    assert find_template(folder, own)[0] == "from the file"
    assert find_template(folder, own, "zephyr") == (TEMPLATES["zephyr"], "zephyr (given)")
    cached = tmp_path / "models--meta-llama--Llama-2-7b-chat-hf/snapshots/abc"
    assert find_template(cached, {})[0] == TEMPLATES["llama2"]
    assert find_template(tmp_path, {}) == (TEMPLATES["plain"], "")
    for name in ("not-there", "."):
        with pytest.raises(
            FileNotFoundError, match="is not a chat template: neither one of llama2, zephyr"
        ):
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
    "writes nothing": (
        "{% if 0 %}x{% endif %}",
        "the chat template writes nothing for this conversation",
    ),
}


@pytest.mark.parametrize("text, expected", REFUSED.values(), ids=REFUSED)
def test_template_errors(cli, tiny, tmp_path, text, expected):
    (tmp_path / "template").write_text(text)
    flags = ("--chat-template", tmp_path / "template", "--quiet", "-p", "hello")
    assert_refused(cli("-m", tiny, "--chat", *flags), expected)


def test_half_typed_control_tokens(tiny):
    t = Tokenizer(tiny)
    for template, typed in (
        ("{}/s>", "a <"),
        ("{}/s>", "</s> <\n"),
        ("</{}", "s> a"),
        ("</{}", " s>"),
    ):
        t.chat_template = template.format("{{ messages[0]['content'].strip() }}")
        ids = t.apply_chat_template(conversation(typed))
        assert t.eos not in ids and "</s>" in t.decode(ids), (template, typed)
        assert t.turn_ends() == (set(), []), "it writes no answer, nor what ends one"


def test_added_tokens_and_bos(copy):
    size = Tokenizer(copy).vocabulary.size
    (copy / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size}))
    assert (
        Tokenizer(copy).control["<|im_end|>"]
        == Tokenizer(copy, size + 1).control["<|im_end|>"]
        == size
    )
    assert "<|im_end|>" not in Tokenizer(copy, size).control, "the model has no embedding for it"
    assert Tokenizer(copy, bos_id=7).bos == 1, "the tokenizer's own comes first"
    (copy / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    assert Tokenizer(copy).encode("x") == Tokenizer(copy).vocabulary.sp.encode("x")
    # as transformers 5 saves them, where tokenizer.model has stayed
    added = [
        dict(id=size + 1, content="<tool>", special=False),
        dict(id=size, content="<|im_end|>", special=True),
    ]
    (copy / "tokenizer.json").write_text(json.dumps({"added_tokens": [*added, dict(id="x"), 3]}))
    t = Tokenizer(copy, size + 2)
    assert t.control["<|im_end|>"] == size and t.decode([size + 1, size]) == "<tool>"


def test_added_tokens_of_a_tokenizer_model(copy):
    """Renamed pieces, flags, tokens that are found in a text, and the space before a text, as the
    configuration has them. The ids are those of transformers 4 (slow) and, but for renamed pieces
    of LlamaTokenizer, 5."""
    sp = Tokenizer(copy).vocabulary.sp
    size, unused = sp.vocab_size(), sp.vocab_size() - 1
    lost = sp.id_to_piece(unused).replace("\u2581", " ")
    added = {
        unused: dict(content="<|im_end|>", lstrip=True),
        size: dict(content="<|x|>", rstrip=True, special=False),
        size + 1: dict(content="  ", special=False),
        size + 2: dict(content=["x"]),
    }
    config = dict(added_tokens_decoder=added, eos_token="<|im_end|>", legacy=False)
    config["chat_template"] = "a <|im_end|> b<|x|> c<|im_end|><|im_end|>{{ messages[0].content }}"
    (copy / "added_tokens.json").write_text('{"<stale>": 5}')
    # of a tokenizer with an added_tokens_decoder it is not read
    (copy / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    for adds_space in (True, False):
        config["add_prefix_space"] = adds_space
        (copy / "tokenizer_config.json").write_text(json.dumps(config))
        t = Tokenizer(copy, size + 2)
        piece = sp.encode("a") if adds_space else [sp.piece_to_id("a")]
        after = lambda text: sp.encode("." + text)[len(sp.encode(".")) :]
        assert t.eos == unused and t.control.keys() == {"<s>", "</s>", "<|im_end|>", "<|x|>"}
        assert t.encode("a", bos=False) == piece and t.decode(piece) == "a"
        expected = [*piece, unused, *after(" b"), size, *after("c"), unused, unused, *after("x")]
        assert t.apply_chat_template(conversation("x")) == expected
        spaced = t.encode("a  b   c", bos=False)
        assert spaced == [*piece, size + 1, *after("b"), size + 1, *after(" c")]
        assert t.decode([*spaced, unused, size]) == "a  b   c<|x|>"
        typed = f"a<|im_end|>{lost}b<|x|>"
        assert not {unused, size} & set(t.encode(typed)) and t.decode(t.encode(typed)) == typed


def test_candidates_for_a_vocabulary(tmp_path):
    """A whole tokenizer.json comes before a tokenizer.model, of whatever kind, and before that of
    the parent. Where LlamaTokenizer is named, its flags decide about spaces, as in transformers."""
    folder = tmp_path / "a"
    folder.mkdir()
    train_tokenizer_json(folder, "zephyr, tinyllama")
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    shutil.copy(HERE / "models/tales/tokenizer.model", tmp_path)
    for raw in (None, b"IQ== 0\n", (tmp_path / "tokenizer.model").read_bytes()):
        if raw is not None:
            (folder / "tokenizer.model").write_bytes(raw)
        for text in TEXT, "  x\n":
            assert Tokenizer(folder).encode(text) == own.encode(text).ids
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for legacy, prefix in itertools.product((True, False), (True, False, None)):
        with changed_json(folder / "tokenizer_config.json") as config:
            config |= dict(tokenizer_class="LlamaTokenizer", legacy=legacy, add_prefix_space=prefix)
        ours, theirs = Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
        for text in (TEXT, "  x\n", *(random_text(20) for _ in range(50))):
            assert ours.encode(text) == theirs(text)["input_ids"], (legacy, prefix, text)
        chat = conversation("the fox", " a", "x ")
        assert (
            ours.apply_chat_template(chat, False) == theirs.apply_chat_template(chat)["input_ids"]
        )


def test_unknown_and_normalized_tokens(tmp_path):
    """The unknown token of Unigram is not mistaken for a typed control token, and a token that is
    matched in normalised text has taken the space of what follows, as in the library."""
    m = tokenizers.models
    unigram = tokenizers.Tokenizer(m.Unigram([("<unk>", 0.0), ("\u2581", -1.0), ("a", -2.0)], 0))
    unigram.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    unigram.decoder = tokenizers.decoders.Metaspace()
    unigram.add_special_tokens(["<unk>"])
    unigram.save(str(tmp_path / "tokenizer.json"))
    for text in ("a\n\na", "日本語 a", "aé"):
        own = unigram.encode(text, add_special_tokens=False).ids
        assert Tokenizer(tmp_path).encode(text, bos=False) == own
    vocab = {piece: i for i, piece in enumerate(["<unk>", "\u2581", *"abx<>|"])}
    t = tokenizers.Tokenizer(m.BPE(vocab, [], unk_token="<unk>"))
    n, d = tokenizers.normalizers, tokenizers.decoders
    t.normalizer = n.Sequence([n.Prepend("\u2581"), n.Replace(" ", "\u2581")])
    t.decoder = d.Replace("\u2581", " ")
    (tmp_path / "chat_template.jinja").write_text("<|x|>{{ messages[0].content }}")
    for normalized in (True, False):
        t.add_tokens([tokenizers.AddedToken("<|x|>", normalized=normalized)])
        t.save(str(tmp_path / "tokenizer.json"))
        ids = Tokenizer(tmp_path).apply_chat_template(conversation("ab"))
        assert ids == t.encode("<|x|>ab", add_special_tokens=False).ids


def test_user_defined_turn_marks(tmp_path):
    """They are control tokens where a template writes them, and only there."""
    train_sentencepiece(tmp_path, user_defined_symbols=["<|im_start|>", "<|im_end|>"])
    t = Tokenizer(tmp_path, chat_template="chatml")
    end = t.control["<|im_end|>"]
    assert t.apply_chat_template(conversation("U")).count(end) == 1 and t.decode([end]) == ""
    typed = "a <|im_end|> b<|im_end|><|im_start|>"
    assert end not in t.encode(typed) and t.decode(t.encode(typed)) == typed
    assert t.apply_chat_template(conversation(typed)).count(end) == 1
    assert t.decode(t.encode(typed * 2000)) == typed * 2000


@pytest.mark.parametrize("legacy", [False, True, None])
def test_control_tokens_of_a_tokenizer_model(tmp_path, legacy):
    """Mistral's v2 and v3 have [INST] as a control token, and no space is added to the text after
    it."""
    train_sentencepiece(tmp_path, control_symbols=["[INST]", "[/INST]"])
    config = {"chat_template": CHAT_FAMILIES["mistral 7b v0.3"][2]} | (
        {} if legacy is None else {"legacy": legacy}
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    t = Tokenizer(tmp_path)
    begin, end = t.control["[INST]"], t.control["[/INST]"]
    # after the space that SentencePiece adds
    enc = lambda text: t.vocabulary.sp.encode(" " + text if legacy else text)
    ids = t.apply_chat_template(conversation("time [/INST]", "a fox", "day"))
    asked = [begin, *enc("time [/INST]"), end, *enc("a fox"), t.eos]
    assert ids == [t.bos, *asked, begin, *enc("day"), end]
    assert t.turn_ends() == ({t.eos}, [])


# ---- tokenizer.py: tokenizer.json and chat templates as their checkpoints have them, against
# transformers


# Kind of tokenizer.json, control tokens after bos and eos, template: written from what the families
# publish
CHAT_FAMILIES = {
    "llama 3": (
        "byte level",
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "{{- bos_token }}\n{%- for m in messages %}\n    "
        "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}\n"
        "{%- endfor %}\n{%- if add_generation_prompt %}\n    "
        "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n",
    ),
    "mistral 7b v0.3": (
        "pieces", ["<s>", "</s>", "[INST]", "[/INST]"],
        "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
        "{%- set messages = messages[1:] %}{%- endif %}{{- bos_token }}{%- for m in messages %}"
        "{%- if m['role'] == 'user' %}"
        "{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + m['content'] + '[/INST]' }}"
        "{%- else %}{{- '[INST] ' + m['content'] + '[/INST]' }}{%- endif %}"
        "{%- else %}{{- ' ' + m['content'] | trim + eos_token }}{%- endif %}{%- endfor %}",
    ),
    "zephyr, tinyllama": (
        "spaced pieces", ["<s>", "</s>"],
        "{% for m in messages %}\n{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
    ),
    "qwen 3": (
        "byte level", ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>"],
        "{%- for m in messages %}{%- set text = m['content'] %}"
        "{%- if m['role'] == 'assistant' and '</think>' in text %}"
        "{%- set text = text.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{{- '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined %}"
        "{{- '<think>' }}{%- endif %}{%- endif %}",
    ),
    "deepseek distillation": (
        "byte level",
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"],
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
        "{% elif m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% else %}"
        "{{ '<｜Assistant｜>' + m['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
    ),
}  # fmt: skip


def train_byte_pairs(pre_tokenizer, texts: list[str], alphabet: list[str], **model) -> dict:
    """A tokenizer.json."""
    t = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
    t.pre_tokenizer, t.decoder = pre_tokenizer, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False
    )
    t.train_from_iterator(texts, trainer)
    return json.loads(t.to_str())


def train_tokenizer_json(folder: Path, family: str) -> Path:
    """A folder with a tokenizer.json of that family's kind, its control tokens and its template."""
    kind, control, template = CHAT_FAMILIES[family]
    pre, normalizers = tokenizers.pre_tokenizers, tokenizers.normalizers
    if kind == "byte level":
        raw = train_byte_pairs(
            pre.ByteLevel(add_prefix_space=False), [TEXT] * 20, pre.ByteLevel.alphabet()
        )
        t = tokenizers.Tokenizer.from_str(json.dumps(raw))
    else:
        pieces = train_byte_pairs(pre.Metaspace(prepend_scheme="first"), [TEXT] * 20, [])["model"]
        vocab = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *pieces["vocab"]]
        ids, merges = (
            {piece: i for i, piece in enumerate(vocab)},
            [tuple(pair) for pair in pieces["merges"]],
        )
        t = transformers.LlamaTokenizer(ids, merges).backend_tokenizer
    # from old tokenizers: a space before the text and after each control token
    if kind == "spaced pieces":
        t.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        t.pre_tokenizer = None
    for token in control:
        flags = dict(special="hink" not in token and "User" not in token, normalized=False)
        strips = dict(lstrip=token == "<|im_end|>", rstrip=token == "<|end_header_id|>")
        t.add_tokens([tokenizers.AddedToken(token, **flags, **strips)])
    bos, eos, *_ = control
    if family != "qwen 3":
        ids = [(bos, t.token_to_id(bos))]
        t.post_processor = tokenizers.processors.TemplateProcessing(f"{bos} $A", special_tokens=ids)
    t.save(str(folder / "tokenizer.json"))
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token=bos,
        eos_token=eos,
        chat_template=template,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def random_text(length: int) -> str:
    """Words, white space, and characters of all planes, except U+2581, which SentencePiece takes
    for a space."""
    planes = [(32, 127), (32, 0x300), (0x300, 0xD800), (0xE000, 0x110000)]
    words = lambda: [
        "the",
        " fox",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "12",
        chr(random.randrange(*random.choice(planes))),
    ]
    return "".join(random.choice(words()) for _ in range(random.randrange(length))).replace(
        "\u2581", " "
    )


@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_tokenizer_json_equals_transformers(tmp_path, family):
    """Text, whole and in two parts, and conversations."""
    ours = Tokenizer(train_tokenizer_json(tmp_path, family))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for _ in range(200):
        text = random_text(30)
        assert ours.encode(text) == theirs(text)["input_ids"], (text,)
        ids = ours.encode(text, bos=False)
        pieces = streamed(ours, ids, at_start=True)
        assert "".join(pieces) == ours.decode(ids) == theirs.decode(ids), (text,)
        assert not any("\ufffd" in piece for piece in pieces), (text,)
        split = random.randrange(1, len(text) + 2)
        joined = ours.encode(text[:split], bos=False) + ours.vocabulary.encode_after(text[split:])
        # "pieces" begin with a space, unless the text does
        whole = text.removeprefix(" ") if CHAT_FAMILIES[family][0] == "pieces" else text
        assert ours.decode(ids) == ours.decode(joined) == whole, (text, split)
    long = "a" + random_text(20_000) * 5
    assert ours.decode(ours.encode(long, bos=False)) == long
    cut = ours.encode("a\U00010348", bos=False)  # a character of four tokens
    assert (
        all(ours.decode(cut[:n]) == theirs.decode(cut[:n]) for n in range(1, len(cut)))
        and len(cut) > 4
    )
    talks = [[random_text(12) for _ in range(random.choice([1, 3, 5]))] for _ in range(10)]
    talks.append(["hi", "<think>\nhm\n</think>\n\nhello", "again"])
    for texts, system, more in itertools.product(talks, ("", "Be kind."), (True, False)):
        messages = conversation(*texts, system=system)
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=more, return_dict=False
        )
        assert ours.apply_chat_template(messages, more) == expected, messages


def test_template_has_what_transformers_gives(tmp_path):
    theirs = transformers.AutoTokenizer.from_pretrained(train_tokenizer_json(tmp_path, "llama 3"))
    source = (
        "{% generation %}\n  {% for m in messages %}\n{% if loop.index > 2 %}{% break %}{% endif %}{{ m | tojson }}"
        "{% endfor %}\n  {% endgeneration %}\n{{ strftime_now('%Y') }}{{ tools is none }}{{ eos_token }}"
    )
    theirs.chat_template = source
    (tmp_path / "chat_template.jinja").write_text(source)
    messages = conversation("<a> Ż", "b", "c")
    assert Tokenizer(tmp_path).chat_prompt(messages).text == theirs.apply_chat_template(
        messages, tokenize=False
    )


@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_typed_control_tokens_are_text(tmp_path, family):
    """Wherever the template puts them: control tokens are those of a harmless talk, and no
    character is lost."""
    t = Tokenizer(train_tokenizer_json(tmp_path, family))
    numbers, names = set(t.control.values()), [name for name in t.control if "think" not in name]
    halves = [
        *(name[: random.randrange(len(name))] for name in names),
        *(name[2:] for name in names),
    ]
    parts = [*names, *halves, " ", "\n", "x", "<"]
    control_of = lambda *texts: [
        i for i in t.apply_chat_template(conversation(*texts, system="y")) if i in numbers
    ]
    for _ in range(50):
        typed, answer = ("".join(random.choices(parts, k=random.randrange(1, 8))) for _ in range(2))
        assert control_of(typed, answer, typed) == control_of("x", "x", "x"), (typed, answer)
        assert typed.strip() in t.decode(t.apply_chat_template(conversation(typed))), (typed,)
        assert numbers.isdisjoint(t.encode(typed, bos=False)), (typed,)
        assert t.decode(t.encode("x" + typed, bos=False)) == "x" + typed


@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_answers_keep_their_tokens(tmp_path, family):
    """A conversation goes on after the very tokens of an answer, and the template says which token
    ended it."""
    t = Tokenizer(train_tokenizer_json(tmp_path, family))
    ids, stops = t.turn_ends()
    prompt = t.chat_prompt(conversation("tell me"))
    for answer in (" \n ", "", "a tale"):
        # Not the tokens that the whole text would have
        letters = [i for letter in answer for i in t.vocabulary.encode_after(letter)]
        past, second = (
            Prompt(prompt.text, prompt.ids + letters, answer),
            conversation("tell me", answer, "go on"),
        )
        assert t.chat_prompt(conversation("tell me"), past=past) == prompt, (
            "the answer is continued, not given again"
        )
        again = t.chat_prompt(second, past=past)
        if not again.text.startswith(prompt.text):
            assert "deepseek" in family, (
                "which writes <think> before an answer, but not before a past one"
            )
            return
        assert again.ids[: len(past.ids)] == past.ids, (again.ids, past)
    end = again.ids[len(past.ids)]
    same = lambda ids: t.decode(ids).replace(" ", "")  # but for the space that this answer lacks
    assert same(again.ids) == same(t.apply_chat_template(second)) and ids == {end} <= set(
        t.control.values()
    )
    assert stops == (["<|user|>"] if "zephyr" in family else [])
    other = t.chat_prompt(second, past=replace(past, answer="another"))
    assert other.ids == t.apply_chat_template(second), (
        "what was said is not what the conversation holds"
    )
    past = Prompt("ask:", [1], " a tale")
    assert [
        t._common_ends(past, "ask:" + then) for then in ("\n a tale.", " so: a tale.", " the crow")
    ] == [((12, 1),), (), ()]
    # the last question again: the answers before it keep their ids
    third = conversation("tell me", answer, "go on", "more", "and?")
    past = replace(again, ids=again.ids + t.encode("more", bos=False), answer="more")
    for answered in (past, replace(t.chat_prompt(third, past=past), answer="no")):
        assert t.chat_prompt(second, past=answered) == again


def test_control_token_in_the_vocabulary(tmp_path):
    """With ignore_merges, a word that is in the vocabulary is one token, whatever the merges say
    (Llama 2 as JSON)."""
    with changed_json(train_tokenizer_json(tmp_path, "llama 3") / "tokenizer.json") as raw:
        raw["model"]["ignore_merges"] = True
        raw["pre_tokenizer"] = dict(
            type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False
        )
        raw["model"]["vocab"] |= {token["content"]: token["id"] for token in raw["added_tokens"]}
    t = Tokenizer(tmp_path)
    ids = t.encode("<|eot_id|>", bos=False)
    assert t.control["<|eot_id|>"] not in ids and t.decode(ids) == "<|eot_id|>"


def test_many_control_tokens(tmp_path):
    """Messages are searched for all of them, and for their beginnings; speech models have tens of
    thousands."""
    names = [f"<sound_{i}>" for i in range(10_000)] + ["<" * n + "a" for n in range(2, 99)]
    with changed_json(train_tokenizer_json(tmp_path, "llama 3") / "tokenizer.json") as raw:
        start, like = max(token["id"] for token in raw["added_tokens"]) + 1, raw["added_tokens"][0]
        raw["added_tokens"] += [
            like | {"id": start + i, "content": name} for i, name in enumerate(names)
        ]
    (tmp_path / "chat_template.jinja").write_text(
        "<sound_77>{{ messages[0]['content'] }}<sound_777><sound_77<<<a"
    )
    began, t = time.process_time(), Tokenizer(tmp_path)
    numbers = set(t.control.values())
    for typed in ("<" * 5_000, "<sound_77><sound_7", "_3>", "x"):
        control = [i for i in t.apply_chat_template(conversation(typed)) if i in numbers]
        assert control == [t.control[name] for name in ("<sound_77>", "<sound_777>", "<<<a")], (
            typed[:99]
        )
    assert time.process_time() - began < 60


SPOILED_JSON = {  # a change to tokenizer.json, and what is said of it
    "of another kind": (lambda raw: raw["model"].update(type="Magic"), "is not a valid tokenizer"),
    "without a decoder": (lambda raw: raw.update(decoder=None), "its decoder is absent"),
    "with another decoder": (
        lambda raw: raw.update(decoder={"type": "Fuse"}),
        "its decoder is Fuse",
    ),
    "added tokens": (lambda raw: raw.update(added_tokens=[1, 2]), "is not a valid tokenizer"),
    "a panic": (
        lambda raw: raw["model"].update(continuing_subword_prefix="x" * 9),
        "out of range for slice",
    ),
    "too large": (lambda raw: None, "but the model has a vocabulary of 100"),
}


@pytest.mark.parametrize("spoil, expected", SPOILED_JSON.values(), ids=SPOILED_JSON)
def test_spoiled_tokenizer_json(tmp_path, spoil, expected):
    with changed_json(train_tokenizer_json(tmp_path, "llama 3") / "tokenizer.json") as raw:
        spoil(raw)
    with pytest.raises(ValueError, match=expected):
        Tokenizer(tmp_path, vocab_size=100)


# ---- extra/gguf.py and extra/quants.py: files by llama.cpp's package gguf, whose decoding is the reference


QUANTS = {number: kind for number, kind in ggml.TYPES.items() if kind.block > 1}
FILE_FORMATS = (*quants.EXACT, *quants.WITH_ZEROS.values(), quants.E4M3_128)
# at the start of a block; others have one, Q6_K's is the last
HALVES = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}
BYTES = {  # a vocabulary of one token a byte
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [
        *tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        "ab",
        "<|im_end|>",
        "</s>",
    ],
    "tokenizer.ggml.token_type": [1] * 257 + [3, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 258,
}


def gguf_metadata(config) -> dict:
    """What llama.cpp's convert_hf_to_gguf.py writes for a model of transformers."""
    rope, floats, D = config.rope_parameters, numpy.float32, getattr(config, "head_dim", None)
    said = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": floats(config.rms_norm_eps),
        "rope.freq_base": floats(rope["rope_theta"]),
    } | ({"attention.key_length": D, "attention.value_length": D} if D else {})
    if rope["rope_type"] in ("linear", "yarn"):
        said |= {
            "rope.scaling.type": rope["rope_type"],
            "rope.scaling.factor": floats(rope["factor"]),
        }
        said["rope.scaling.original_context_length"] = rope.get(
            "original_max_position_embeddings", 1
        )
    return {"general.architecture": config.model_type} | {
        f"{config.model_type}.{k}": v for k, v in said.items()
    }


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


def gguf_tensors(model, kinds=()) -> dict:
    """A file's tensors: those of a model, but random blocks of the types with these numbers for
    matrices, in turn."""
    c, found, kinds = model.config, {}, itertools.cycle(kinds)
    names = gguf.get_tensor_name_map(
        {arch: n for n, arch in gguf.MODEL_ARCH_NAMES.items()}[c.model_type], 99
    )
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        number = next(kinds, None) if value.dim() == 2 else None
        stored = value if number is None else (number, random_blocks(number, *value.shape))
        found[names.get_name(name, (".weight", ".bias"))] = stored
    # the plain frequencies over those of transformers
    if c.rope_parameters["rope_type"] == "llama3":
        scaled = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](c, "cpu")[0]
        plain = c.rope_parameters["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
        found["rope_freqs.weight"] = plain / scaled
    return found


def read_gguf(model, file: Path) -> None:
    """Give a model of transformers the weights that it reads from a file: with another order of the
    rows of q and k."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    model.load_state_dict(read["tensors"], strict=False)  # a tied output matrix is missing


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory) -> tuple[dict, dict]:
    """Metadata and tensors of a llama of which most tests change something."""
    model = hugging_face_model(259, **FAMILIES["gqa"], eos_token_id=258, bos_token_id=None)
    return gguf_metadata(model.config) | BYTES, gguf_tensors(model.half())


@pytest.mark.parametrize("number", QUANTS, ids=lambda number: QUANTS[number].name)
def test_gguf_types_are_decoded(number):
    """Every bit. Scales that are not finite are refused."""
    kind, raw = QUANTS[number], random_blocks(number, 5, 768, std=1.0)
    assert kind.name == gguf.GGMLQuantizationType(number).name and OTHER_TYPES == ggml.OTHER_TYPES
    assert torch.equal(layouts.blocks(kind, raw).decoded(), dequantised(number, raw))
    if kind.name.endswith("K"):
        raw[1, 4:16] = raw[1, 192:208] = 255  # scales of groups
    at = 208 if kind.name == "Q6_K" else 0
    for bad in (NAN, INF):
        for half in range(HALVES.get(kind.name, 1)):
            spoiled = raw.clone()
            spoiled[1, at + 2 * half : at + 2 * half + 2] = (
                torch.tensor([bad]).half().view(torch.uint8)
            )
            with pytest.raises(ValueError, match="a scale that is NaN or infinite"):
                layouts.checked(layouts.blocks(kind, spoiled))


def stored_in(format, N: int, K: int):
    """Blocks of each kind that a format keeps exactly, and what they stand for."""
    if format in quants.EXACT:
        for number in (n for n, kind in QUANTS.items() if kind.name in quants.EXACT[format]):
            raw = random_blocks(number, N, K)
            yield (
                layouts.blocks(QUANTS[number], raw.to(DEVICE)),
                dequantised(number, raw).to(DEVICE),
            )
        return
    if format is quants.E4M3_128:
        codes, scale, zero = (
            E4M3.round(torch.randn(N, K) * 100),
            torch.rand(N, K // 128) + 0.1,
            None,
        )
        values = (E4M3.floats(codes).unflatten(1, (-1, 128)) * scale[..., None]).flatten(1)
    else:
        codes, scale, zero, values = codes_of(N, K, format.group)
    codes, scale, zero = (
        None if t is None else t.to(DEVICE) for t in (codes.to(torch.int8), scale.float(), zero)
    )
    yield quants.Blocks(codes, scale, zero=zero), values.to(DEVICE)


@pytest.mark.parametrize("format", FILE_FORMATS, ids=lambda format: format.name)
def test_products_with_gguf_and_safetensors_formats(format):
    """Matrices bit for bit; the kernels' products with one token, a few and a prompt, and torch's
    own on a CPU."""
    N, K, errors = 48, 768, {}
    # a GPU adds up a token's products in half precision, whose error varies
    draws = 8 if ON_GPU else 1
    for kind, (blocks, exact) in [
        drawn for _ in range(draws) for drawn in enumerate(stored_in(format, N, K))
    ]:
        w = Matrix(format.empty(N, K, DEVICE), format)
        format.write(blocks, w.tensors)
        assert torch.equal(w.dense(), exact)
        for T, dtype in (
            (1, torch.float16),
            (1, torch.bfloat16),
            (3, torch.float16),
            (20, torch.float16),
        ):
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
    found = layouts.format_for({types.get(kind) for kind in kinds.split()}, columns, most_bits)
    assert (found and found.name) == name


def loaded(model, format="held", ranks: Ranks = Ranks()):
    """A rank's weights of a model's checkpoint, in a format; "held": as the file holds them."""
    fp32 = torch.float32
    format = (
        model.checkpoint.formats_as_stored(model.config.cut(ranks.size), 8)
        if format == "held"
        else format
    )
    return Loader(
        model.checkpoint, fp32, fp32, torch.device("cpu"), format, "torch", ranks, quiet=True
    ).load()


def assert_two_ranks_have(model, layer) -> None:
    parts = [loaded(model, ranks=Ranks(rank, 2)).layers[1] for rank in (0, 1)]
    for name, axis in (("w2", 1), ("w13", 0), ("wo", 1)):
        joined = torch.cat([getattr(part, name).dense() for part in parts], axis)
        assert torch.equal(joined, getattr(layer, name).dense()), name


@pytest.mark.parametrize("family", ["llama 3.2", "linear", "qwen 2.5, tied, longer", "qwen 3"])
def test_gguf_models_equal_transformers(tmp_path, family, monkeypatch):
    """Of all types, mixed also among wq, wk and wv; whole and by ranks, a few rows at a time."""
    monkeypatch.setattr(layouts, "AT_ONCE", 50 * 256)
    fields = dict(
        hidden_size=256, intermediate_size=512, head_dim=64, eos_token_id=258, bos_token_id=None
    )
    theirs = hugging_face_model(259, **FAMILIES[family] | fields)
    kinds = random.sample([number for number in QUANTS if number != 12], len(QUANTS) - 1)
    # Q4_K, of the second layer's wo: of each of its blocks of 256, a rank would have a half
    kinds.insert(3, 12)
    file = write_gguf(
        tmp_path / "a.gguf", gguf_metadata(theirs.config) | BYTES, gguf_tensors(theirs, kinds)
    )
    read_gguf(theirs, file)
    ours = assert_equals_transformers(file, theirs)
    names = "IQ4_NL, IQ4_XS, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K and Q8_0"
    assert ours.checkpoint.quantised == names
    assert (ours.config.dtype, ours.config.eos_ids) == (torch.bfloat16, (258, 257))
    whole, decoded = loaded(ours), loaded(ours, None)
    for name, one, other in zip(
        checkpoint.matrix_shapes(ours.config), whole.matrices, decoded.matrices
    ):
        assert torch.equal(one.dense(), other.dense()) and not other.format, (name, one.format)
    assert all(layer.wo.format and layer.w2.format for layer in whole.layers)
    if ours.config.n_kv_heads > 1:
        assert_two_ranks_have(ours, whole.layers[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gguf_of_floats_is_as_any_checkpoint(tmp_path, cli, dtype):
    """It may be encoded, and saved so, with its tokenizer and its scaling of RoPE."""
    theirs = hugging_face_model(
        259, num_key_value_heads=2, rope_parameters=RAMP, eos_token_id=258, bos_token_id=None
    )
    metadata = (
        gguf_metadata(theirs.config)
        | BYTES
        | {"tokenizer.chat_template": "{{ messages[0].content }}</s>"}
    )
    for parameter in theirs.parameters():
        parameter.data = parameter.to(dtype).float()
    tensors = gguf_tensors(theirs)
    # norms and factors are in fp32
    tensors = {n: t.to(dtype) if t.dim() == 2 else t for n, t in tensors.items()}
    file = write_gguf(tmp_path / "a.gguf", metadata, tensors)
    read_gguf(theirs, file)
    theirs.save_pretrained(tmp_path / "original")
    plain, options, ids = (
        assert_equals_transformers(file, theirs),
        dict(dtype="fp32", device="cpu"),
        [*range(40)],
    )
    assert plain.checkpoint.dtype == dtype and plain.checkpoint.quantised == ""
    encoded, original = (
        load(name, format="e4m3", **options) for name in (file, tmp_path / "original")
    )
    assert torch.equal(
        encoded.weights.layers[1].wqkv.tensors[0], original.weights.layers[1].wqkv.tensors[0]
    )
    assert cli("-m", file, "--fp8", "--save", tmp_path / "saved", "--quiet")[:2] == (0, "")
    saved = load(tmp_path / "saved", **options)
    assert saved.config.rope_factors and saved.config.eos_ids == (258, 257)
    assert_close(logits_of(saved, ids), logits_of(encoded, ids), 1e-6)
    for chat in (conversation("Größe 🙂"), conversation("ab</s>")):
        assert Tokenizer(tmp_path / "saved").apply_chat_template(chat) == Tokenizer(
            file
        ).apply_chat_template(chat)


def test_gguf_from_the_command_line(tmp_path, cli):
    """The same text as with the decoded weights, from a file, a folder and parts; a second loss is
    refused."""
    model = transformers.AutoModelForCausalLM.from_pretrained(HERE / "models/tales").float()
    metadata = gguf_metadata(model.config) | sentencepiece_metadata(
        HERE / "models/tales/tokenizer.model"
    )
    tensors = gguf_tensors(model, (2, 8))
    folder, part = (
        Path(shutil.copytree(HERE / "models/tales", tmp_path / "decoded")),
        "parts/t-0000%d-of-00002.gguf",
    )
    for name in ("one", "parts"):
        (tmp_path / name).mkdir()
    file = write_gguf(tmp_path / "one/tales.gguf", metadata, tensors)
    read_gguf(model, file)
    model.save_pretrained(folder)
    for i in range(2):
        split = {
            "split.no": numpy.uint16(i),
            "split.count": numpy.uint16(2),
            "split.tensors.count": len(tensors),
        }
        about = metadata if i == 0 else {"general.architecture": "llama"}
        write_gguf(tmp_path / (part % (i + 1)), about | split, dict([*tensors.items()][i::2]))
    flags = ("-p", "The king", "-n", 40, "--temp", 0, "--repeat-penalty", 1, "--dtype", "fp32")
    code, expected, _ = cli("-m", folder, *flags)
    assert code == 0
    for name in (file, tmp_path / "one", tmp_path / "parts", tmp_path / (part % 2)):
        code, out, err = cli("-m", name, *flags)
        said = "fp32 with q4_0 matrices (Q4_0 and Q8_0 in the file; others as floats)"
        assert (
            (code, out) == (0, expected)
            and f"running   {said} on cpu" in err
            and err.endswith(f"GB; {said}\n")
        ), err
    for more in (["--fp8"], ["--int4"], ["--int4", "--save", tmp_path / "new"]):
        result = cli("-m", file, *(() if "--save" in more else flags[:4]), *more)
        assert_refused(
            result,
            "tales.gguf: its matrices are Q4_0 and Q8_0, and",
            "would lose precision a second time",
        )
    assert not (tmp_path / "new").exists()
    shutil.copy(file, tmp_path / "one/other.gguf")
    assert_refused(
        cli("-m", tmp_path / "one", *flags),
        "holds several models: take one of other.gguf, tales.gguf",
    )
    (tmp_path / "link.gguf").symlink_to(file)
    file.rename(tmp_path / "sha256-00")  # as Ollama names it
    (tmp_path / "one/tales.gguf").symlink_to("../sha256-00")
    for name in ("link.gguf", "sha256-00", "one/tales.gguf"):
        assert cli("-m", tmp_path / name, *flags)[:2] == (0, expected)
    # a template may be chosen by it
    assert local_checkpoint(str(tmp_path / "link.gguf")).name == "link.gguf"
    (tmp_path / "one/other.gguf").unlink()
    assert cli("-m", tmp_path / "one", *flags)[:2] == (0, expected)
    first = (tmp_path / (part % 1)).rename(tmp_path / "first.gguf")
    assert_refused(cli("-m", tmp_path / "parts", *flags), "No such file", "t-00001-of-00002.gguf")
    first.rename(tmp_path / (part % 1))
    second = (tmp_path / (part % 2)).rename(tmp_path / "second.gguf")
    assert_refused(
        cli("-m", second, *flags), "is one of 2 parts: its name must end in -00001-of-00002.gguf"
    )
    assert_refused(
        cli("-m", tmp_path / (part % 1), *flags), "No such file", "t-00002-of-00002.gguf"
    )


def test_gguf_of_the_hub(hub, tmp_path, monkeypatch, small_gguf):
    """As llama.cpp picks it, and nothing else is downloaded."""
    raw = write_gguf(tmp_path / "a.gguf", *small_gguf).read_bytes()
    names = "a-IQ4_K_M.gguf a-Q2_K.gguf a.Q8_0.gguf q/a-q4_k_m.gguf a-mmproj-Q4_K_M.gguf config.json".split()
    # the library knows a file by its hash
    hub.files = {name: raw + bytes(i) for i, name in enumerate(names)}
    for kind, wanted in (
        ("", "q/a-q4_k_m.gguf"),
        (":q8_0", "a.Q8_0.gguf"),
        (":Q2_K", "a-Q2_K.gguf"),
    ):
        hub.asked.clear()
        file = load(f"someone/tiny{kind}", device="cpu").checkpoint.folder
        assert str(file).endswith(wanted) and Tokenizer(file).encode("ab")[-1] == 256
        fetched = [line for line in hub.asked if line.startswith("GET /someone")]
        assert len(fetched) == 1 and fetched[0].endswith(wanted)
        hub.asked.clear()
        assert load(f"someone/tiny{kind}", device="cpu").checkpoint.folder == file and not hub.asked
    # another program has cached it, too
    (file.parent / "config.json").write_text('{"model_type": "llama"}')
    set_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
    assert load("someone/tiny:Q8_0", device="cpu").checkpoint.folder.name == "a.Q8_0.gguf"
    assert load("someone/tiny", device="cpu").checkpoint.folder.name == "a-q4_k_m.gguf"
    next((tmp_path / "cache").rglob("a-q4_k_m.gguf")).unlink()
    assert load("someone/tiny", device="cpu").checkpoint.folder.name == "a.Q8_0.gguf", (
        "what there is"
    )
    assert pick_gguf(["b.Q8_0.gguf", "a.IQ2_M.gguf", "b.F16.gguf"], "") == ["b.F16.gguf"]
    parts = [f"m-Q6_K-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert pick_gguf(["n-Q6_K.gguf", *parts], "Q6_K") == parts


def test_gguf_header_holds_every_type_of_value(tmp_path):
    numbers = [
        numpy.dtype(f"{sign}int{bits}").type(7) for sign in ("", "u") for bits in (8, 16, 32, 64)
    ]
    metadata = {"general.architecture": "llama", "general.alignment": 4096} | {
        n.dtype.name: n for n in numbers
    }
    metadata |= {
        "a": numpy.float32(1e-5),
        "b": numpy.float32(1 / 3),
        "float64": numpy.float64(0.1),
        "yes": True,
    }
    metadata |= {
        "text": "Größe 🙂\0",
        "": "empty",
        "strings": ["", "a\0b", "ü" * 300, ""],
        "ints": [-1, 2],
    }
    metadata |= {"floats": [0.5, 2.5], "flags": [True, False]}
    header = ggml.read_header(
        write_gguf(tmp_path / "a.gguf", metadata, {f"t{i}": torch.ones(i + 1) for i in range(3)})
    )
    for key, value in metadata.items():
        got = header.metadata[key]
        assert (got.tolist() if isinstance(got, memoryview) else got) == value, key
    assert all(
        info.offset % 4096 == 0 and info.nbytes == 4 * info.shape[0]
        for info in header.tensors.values()
    )


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
OTHER_TYPES = {
    kind.value: kind.name for kind in gguf.GGMLQuantizationType if kind not in ggml.TYPES
}
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
    **{f"of type {name}": (
        by_hand([(b"w", (256,), number, 0)]), f"w is {name}, which is not supported: take a file of F32",
    ) for number, name in OTHER_TYPES.items()},
    "another architecture": ({"general.architecture": "gemma3"}, "architecture is 'gemma3', which is not supported"),
    "experts": ({"llama.expert_count": 8}, "is a mixture of experts"),
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
    "an id beyond the tokens": ({"tokenizer.ggml.eos_token_id": 259}, "eos_token_id is [259, 257]; it must hold ids"),
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


@pytest.mark.parametrize("how", BAD_GGUF)
def test_bad_gguf_is_one_line(cli, tmp_path, small_gguf, how):
    file, (bad, message) = tmp_path / "a.gguf", BAD_GGUF[how]
    if isinstance(bad, bytes):
        file.write_bytes(bad)
    else:
        metadata, tensors = (
            {
                k: v
                for k, v in (part | bad).items()
                if v is not None and k.endswith(".weight") == of_tensors
            }
            for part, of_tensors in zip(small_gguf, (False, True))
        )
        write_gguf(file, metadata, tensors)
    assert_refused(
        cli("-m", file, "-p", "a", "-n", 1, "--quiet", "--no-display-prompt"), "a.gguf", message
    )


def test_gguf_configuration(tmp_path, small_gguf):
    """What other files say, and what holds if they do not say it."""
    metadata, tensors = small_gguf
    read = lambda more: read_config(write_gguf(tmp_path / "a.gguf", metadata | more, tensors))
    scaling = "llama.rope.scaling."
    eight = {f"{scaling}factor": numpy.float32(8)}
    of_yarn = eight | {f"{scaling}type": "yarn", f"{scaling}original_context_length": 64}
    factors = {"rope_freqs.weight": torch.linspace(1, 8, 8)}
    for more in ({}, of_yarn):
        plain = read(more).rope_factors or (1,) * 8
        both = read_config(write_gguf(tmp_path / "a.gguf", metadata | more, tensors | factors))
        expected = torch.tensor(plain) * factors["rope_freqs.weight"]
        assert torch.tensor(both.rope_factors).equal(expected), "as llama.cpp multiplies"
    assert read({f"{scaling}attn_factor": numpy.float32(0.5)}).rope_gain == 0.5
    halved = read(of_yarn | {f"{scaling}attn_factor": numpy.float32(0.5)})
    assert halved.rope_gain == pytest.approx(0.5 * read(of_yarn).rope_gain)
    for old in (eight, {"llama.rope.scale_linear": numpy.float32(8)}):
        assert read(old).rope_factors == (8.0,) * 8 and read(old).rope_gain == 1
    assert read(eight | {f"{scaling}type": "none"}).rope_factors == ()
    assert (
        read({"llama.attention.sliding_window": 64}).sliding_window == 64
        and read({}).sliding_window is None
    )
    metadata = {
        k: v for k, v in metadata.items() if "head_count_kv" not in k and "freq_base" not in k
    }
    config = read({"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.bos_token_id": 3})
    assert (config.n_kv_heads, config.rope_theta, config.bos_id, config.eos_ids) == (
        4,
        1e4,
        3,
        (258, 0, 257),
    )


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
        about |= {"general.architecture": "llama", "tokenizer.chat_template": template}
        about |= sentencepiece_metadata(folder / "tokenizer.model", **more)
        return Tokenizer(write_gguf(tmp_path / "a.gguf", about, {}), size)

    ours = tokenizer(4096, {})
    for text in GGUF_TEXTS:
        assert ours.encode(text) == original.encode(text)
        assert ours.vocabulary.encode_after(text) == original.vocabulary.encode_after(text)
        assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))
    assert (ours.bos, ours.eos, ours.control) == (1, 2, original.control)
    chat = conversation("Hello </s>", "Hello </s>", "Hello </s>", system="Hello </s>")
    assert ours.apply_chat_template(chat) == original.apply_chat_template(chat)
    more = {"<|im_start|>": 3, "<|im_end|>": 3, "<think>": 4, "[PAD4099]": 2, "[PAD4100]": 2, "": 5}
    about = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}
    ours = tokenizer(4102, about, **more)
    assert (
        ours.control.keys() == {"<s>", "</s>", "<|im_start|>", "<|im_end|>"}
        and ours.control["<|im_start|>"] == 4096
    )
    assert 4098 in ours.encode("so <think> hm") and 4097 not in ours.encode("<|im_end|>")
    assert ours.decode([4097, *ours.encode("a b")]) == "a b" and not ours.vocabulary.adds_space


WORD, REST = r"[^\r\n\p{L}\p{N}]?", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA_3 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{REST}"
TEKKEN = (
    rf"{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{REST}"
)
SPLITS = {
    "llama-bpe": [LLAMA_3], "qwen2": [LLAMA_3.replace("{1,3}", "")], "tekken": [TEKKEN],
    "smollm": None, "gpt-2": None, "smaug-bpe": [LLAMA_3],
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
    first = [
        pre.Split(tokenizers.Regex(pattern), "isolated") for pattern in SPLITS[name] or ()
    ] or [pre.Digits(True)]
    splits = byte_level if name == "gpt-2" else pre.Sequence([*first, byte_level])
    raw = train_byte_pairs(splits, GGUF_TEXTS * 3, pre.ByteLevel.alphabet(), ignore_merges=always)
    merges = raw["model"]["merges"] = [
        pair for pair in raw["model"]["merges"] if "".join(pair) != "Ġupon"
    ]
    own = tokenizers.Tokenizer.from_str(json.dumps(raw))
    if name == "qwen2":
        own.normalizer = tokenizers.normalizers.NFC()
    own.add_special_tokens(["<|im_end|>", "<|endoftext|>"])
    own.add_tokens(["<think>", "~x~"])
    kinds, size = (
        {"<|im_end|>": 3, "<|endoftext|>": 3, "<think>": 4, "~x~": 4},
        own.get_vocab_size(),
    )
    metadata = {"general.architecture": "llama"} | BYTES | {
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [*map(own.id_to_token, range(size)), "[PAD]"],
        "tokenizer.ggml.token_type": [kinds.get(own.id_to_token(i), 1) for i in range(size)] + [5],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": own.token_to_id("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": own.token_to_id("<|im_end|>"),
    }  # fmt: skip
    ours = Tokenizer(write_gguf(tmp_path / "a.gguf", metadata, {}), size + 1)
    for text in GGUF_TEXTS + [
        "".join(random.choices("".join(GGUF_TEXTS), k=100)) for _ in range(30)
    ]:
        ids = own.encode(text, add_special_tokens=False).ids
        assert ours.vocabulary.encode_chat(text, ours._control_in(text), after=False) == ids, text
        assert "<" in text or ours.encode(text, bos=False) == ids
        assert ours.decode(ids) == own.decode(ids, skip_special_tokens=True)
    assert ours.control.keys() == {"<|im_end|>", "<|endoftext|>", "<think>"}
    assert ours.bytes_of(own.token_to_id("~x~")) == b"~x~" and ours.bytes_of(size) == b""
    assert (own.token_to_id("Ġupon") in ours.encode("Once upon")) == always
    assert (ours.encode("ab")[0] == ours.bos) == always
    for said in (True, False):
        file = write_gguf(
            tmp_path / "b.gguf", metadata | {"tokenizer.ggml.add_bos_token": said}, {}
        )
        assert (Tokenizer(file).encode("ab")[0] == ours.bos) == said


# ---- extra/quants.py: quantised safetensors, packed as their formats' documents say


def words(codes: torch.Tensor, order=range(8)) -> torch.Tensor:
    """Eight 4-bit codes of a row to an int32, the first in its lowest bits."""
    eight = codes.long().unflatten(1, (-1, 8))[..., list(order)]
    return (eight << 4 * torch.arange(8)).sum(-1).to(torch.int32)


def codes_of(N: int, K: int, group: int, zeros=range(1, 17), dtype=torch.float16) -> tuple:
    """Random codes [N, K], scales and zero points [N, K / group], and what they stand for."""
    codes, scale = torch.randint(16, (N, K)), (torch.rand(N, K // group) * 0.02 + 0.001).to(dtype)
    zero = torch.tensor(zeros)[torch.randint(len(zeros), scale.shape)]
    values = (codes.unflatten(1, (-1, group)) - zero[..., None]) * scale.float()[..., None]
    return codes, scale, zero, values.flatten(1)


def pack_awq(N: int, K: int) -> tuple[dict, torch.Tensor]:
    codes, scale, zero, values = codes_of(N, K, 64, range(16))
    qweight, qzeros = (words(t.t(), (0, 2, 4, 6, 1, 3, 5, 7)) for t in (codes, zero))
    return dict(qweight=qweight, qzeros=qzeros, scales=scale.t()), values


def pack_gptq(
    N: int, K: int, group: int = 32, less: int = 1, zeros=range(16)
) -> tuple[dict, torch.Tensor]:
    """less: 1 in version 1, subtracted from whole words of zero points. group: 0 for one a row and
    no indices."""
    codes, scale, zero, values = codes_of(N, K, group or K, zeros)
    found = dict(
        qweight=words(codes).t(), qzeros=words(zero.t()) - less * 0x11111111, scales=scale.t()
    )
    indices = dict(g_idx=torch.arange(K, dtype=torch.int32) // group) if group else {}
    return found | dict(bias=torch.zeros(N)) | indices, values


def pack_gptq8(N: int, K: int, zeros=(128,)) -> tuple[dict, torch.Tensor]:
    """Of 8 bits: four bytes in a word."""
    codes = torch.randint(256, (N, K))
    scale = (torch.rand(N, K // 128) * 0.002 + 0.0001).half()
    zero = torch.tensor(zeros)[torch.randint(len(zeros), scale.shape)]
    values = (codes.unflatten(1, (-1, 128)) - zero[..., None]) * scale.float()[..., None]
    in_words = lambda t: t.to(torch.uint8).flatten().view(torch.int32).view(len(t), -1)
    found = dict(qweight=in_words(codes).t(), qzeros=in_words(zero.t() - 1), scales=scale.t())
    return found, values.flatten(1)


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
    values = (
        weight.float() * factors.repeat_interleave(rows, 0)[:N].repeat_interleave(columns, 1)[:, :K]
    )
    return {
        "weight": weight,
        scale: factors[0, 0] if one else factors,
        "input_scale": torch.ones(1),
    }, values


def compressed_tensors(form: str, **weights) -> dict:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return dict(quant_method="compressed-tensors", format=form, config_groups=groups)


GPTQ = dict(quant_method="gptq", bits=4, group_size=32, desc_act=False)
PACKED = partial(
    compressed_tensors, "pack-quantized", num_bits=4, type="int", strategy="group", group_size=128
)
FLOAT_8 = partial(compressed_tensors, "float-quantized", num_bits=8, type="float", symmetric=True)
QUANTISED = {  # quantization_config, how a matrix is packed, the format that holds it
    "AWQ": (dict(quant_method="awq", bits=4, group_size=64, version="gemm"), pack_awq, quants.WITH_ZEROS[64]),
    "GPTQ": (GPTQ, pack_gptq, quants.WITH_ZEROS[32]),
    "GPTQ, version 2": (GPTQ | {"checkpoint_format": "gptq_v2"}, partial(pack_gptq, less=0), quants.WITH_ZEROS[32]),
    "GPTQ, mislabelled": (GPTQ, partial(pack_gptq, less=0, zeros=[8]), quants.WITH_ZEROS[32]),
    "GPTQ, a group a row": (GPTQ | {"group_size": -1}, partial(pack_gptq, group=0), quants.WITH_ZEROS[128]),
    "GPTQ, 8 bits": (GPTQ | dict(bits=8, group_size=128, dynamic={"-:.*lm_head": {}}), pack_gptq8, quants.Q8_0),
    "W4A16": (PACKED(), pack_w4a16, quants.WITH_ZEROS[128]),
    "W4A16 with zero points": (
        PACKED(symmetric=False), partial(pack_w4a16, symmetric=False), quants.WITH_ZEROS[128],
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
        quants.E4M3_128,
    ),
}  # fmt: skip


def write_quantised(folder: Path, how: str, **more):
    """A checkpoint in place of the tiny one; returns the model of transformers with the weights
    that it stands for."""
    about, pack, _ = QUANTISED[how]
    theirs = hugging_face_model(
        350, num_key_value_heads=2, hidden_size=128, intermediate_size=256, **more
    ).half()
    theirs.save_pretrained(folder)
    theirs = type(theirs).from_pretrained(folder, dtype=torch.float32)
    tensors, weights = load_file(folder / "model.safetensors"), theirs.state_dict()
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        stored, values = pack(*tensors.pop(name).shape)
        tensors = {
            name.removesuffix("weight") + key: value.contiguous() for key, value in stored.items()
        } | tensors
        weights[name].copy_(values)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder / "config.json", quantization_config=about)
    return theirs


@pytest.mark.parametrize("how", QUANTISED)
def test_quantised_safetensors_equal_transformers(copy, cli, how):
    """Matrices bit for bit, also as ranks have them; no second loss."""
    theirs, format = write_quantised(copy, how), QUANTISED[how][2]
    ours, exact = assert_equals_transformers(copy, theirs), theirs.model.layers[1]
    weights = loaded(ours)
    # which is slow there
    decoded = format in (quants.E4M3_128, quants.Q8_0)
    layer, on_cpu = weights.layers[1], None if decoded else format
    assert {m.format for m in (layer.wqkv, layer.wo, layer.w13, layer.w2)} == {
        format
    } and not weights.output.format
    assert ours.weights.layers[1].w2.format is on_cpu
    assert torch.equal(layer.w2.dense(), exact.mlp.down_proj.weight)
    assert torch.equal(layer.w13.dense()[1::2], exact.mlp.up_proj.weight)
    if format.group <= 64:
        assert_two_ranks_have(ours, layer)
    name = how.partition(",")[0].partition(" ")[0]
    assert_refused(
        cli("-m", copy, "--int4", "-p", "a"),
        f"its matrices are {name}, and int4 would lose precision",
    )
    code, _, err = cli("-m", copy, "-n", 3, "-p", "Once", "--ignore-eos", "--dtype", "fp32")
    kept = (
        f" with {format.name} matrices ({name} in the file" if on_cpu else f" (decoded from {name})"
    )
    assert code == 0 and f"running   fp32{kept}" in err, err


def test_gptq_of_a_model_with_biases(copy):
    """Zeros, as GPTQ writes them for every matrix, but for those of q, k and v."""
    assert_equals_transformers(copy, write_quantised(copy, "GPTQ", model="Qwen2"))


def test_hf_quant_config_alone(copy):
    """As nvidia's folders were at first."""
    theirs = write_quantised(copy, "FP8, modelopt")
    edit(copy / "config.json", quantization_config=None)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (copy / "hf_quant_config.json").write_text(json.dumps(said))
    assert_equals_transformers(copy, theirs)


def test_joined_matrix_quantised_in_part(copy):
    theirs = write_quantised(copy, "AWQ")
    stem, tensors = "model.layers.0.self_attn.v_proj.", load_file(copy / "model.safetensors")
    tensors = {name: t for name, t in tensors.items() if not name.startswith(stem)}
    weight = theirs.model.layers[0].self_attn.v_proj.weight.data
    save_file(tensors | {f"{stem}weight": weight.contiguous()}, copy / "model.safetensors")
    ours = assert_equals_transformers(copy, theirs)
    assert not ours.weights.layers[0].wqkv.format and ours.weights.layers[1].wqkv.format


def config_with(how: str, **fields) -> tuple:
    """A checkpoint of QUANTISED whose config.json says something else."""
    return how, spoil_config(quantization_config=QUANTISED[how][0] | fields)


PROJ = "model.layers.0.mlp.up_proj."
BAD_QUANTISED = {  # a checkpoint, how it is changed, what the line says
    "3 bits": (*config_with("GPTQ", bits=3), "quantised as gptq with bits 3: take"),
    "modelopt": (*config_with("FP8, modelopt", quant_algo="NVFP4"), "quantised as modelopt with quant_algo 'NVFP4'"),
    "zero points of 8 bits": ("GPTQ, 8 bits", put(f"{PROJ}qzeros", lambda t: t * 0), "that 8 bits cannot hold: take"),
    "dynamic": (*config_with("GPTQ", dynamic={"+:.*up_proj": {"bits": 8}}), "as gptq with dynamic settings: take"),
    "mixed groups": (
        "W4A16", spoil_config(quantization_config=PACKED() | {"config_groups": {
            "a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}}}),
        "several kinds of config_groups: take",
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
    **{name: (*config_with("AWQ", quant_method=name), f"as {name}, which is not supported")
       for name in ("exl2", "exl3", "bitsandbytes", "hqq")},
    "int8": (*config_with("W4A16", format="int-quantized"), "as int-quantized, which is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_QUANTISED)
def test_bad_quantised_safetensors_are_one_line(cli, copy, case):
    how, spoil, *said = BAD_QUANTISED[case]
    write_quantised(copy, how)
    spoil(copy)
    assert_refused(cli("-m", copy, "-p", "a", "-n", 1, "--quiet", "--no-display-prompt"), *said)


# ---- extra/speculation.py


class Planted(Speculation):
    """Proposes the text that will follow, with errors here and there."""

    def __init__(self, n: int, text: list[int]):
        super().__init__(n)
        self.text = text

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


def other_model(model):
    """One of the same shapes with other weights."""
    other = copy_module.deepcopy(model)
    for matrix in other.weights.matrices:
        matrix.data.add_(0.3 * matrix.data.std() * torch.randn_like(matrix.data))
    return other


SETTINGS = {
    "greedy": dict(sampling=Sampling(temp=0)),
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
    model = exact_model(tiny, ctx_size=64)  # which many texts fill
    other, options = other_model(model), dict(sampling=Sampling()) | SETTINGS[settings]
    options["sampling"] = replace(options["sampling"], seed=SEED)
    prompt = random.choices(range(3, 300), k=random.choice([1, 9])) * random.choice([1, 3])
    expected_cache = State(model)
    expected = list(generate(model, prompt, expected_cache, **options))
    planted = [Planted(n, prompt + expected) for n in (5, 15)]
    for way in map(always, [Lookup(3), Draft(3, model), Draft(4, other), *planted]):
        cache = State(model)
        assert list(generate(model, prompt, cache, **options, decode=way.decode)) == expected
        assert cache.pos == cache.device_pos == expected_cache.pos
        # an eos ends a pass early
        assert way.passes + way.accepted <= max(len(expected) - 1, 0) + way.n


def test_draft_of_the_same_model(tiny, monkeypatch):
    """Also after Ctrl-C while it reads a prompt: what it has kept of the text before is no part of
    the new one."""
    model = exact_model(tiny, ctx_size=128)
    draft, cache = always(Draft(4, copy_module.copy(model))), State(model)
    write = lambda prompt: list(generate(model, prompt, cache, 61, eos=[], decode=draft.decode))
    first, second = (random.choices(range(3, 300), k=50) for _ in range(2))
    assert len(write(first)) == 61 and draft.accepted == draft.proposed and draft.passes == 12
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(draft.model, "step", fails(KeyboardInterrupt()))
        write(second)
    write(second)
    assert draft.accepted == draft.proposed and draft.passes == 24


def test_draft_of_a_smaller_vocabulary(tiny):
    """A prompt may have ids that only the model has; the draft reads them as its first."""
    model = exact_model(tiny, ctx_size=64)
    small = copy_module.copy(model)
    V = model.config.vocab_size
    small.config = replace(model.config, vocab_size=V - 5)
    embedding = model.weights.embedding[: V - 5]
    small.weights = replace(model.weights, embedding=embedding, output=Matrix(embedding))
    for end in (V - 1, 7):
        prompt = [1, V - 5, 9, end]
        draft = always(Draft(3, small))
        found = list(generate(model, prompt, n=12, eos=[], decode=draft.decode))
        assert len(found) == 12 and max(found) < V - 5 and draft.passes
        seen = draft.state.tokens.tolist()
        assert seen[:4] == [1, 0, 9, end if end == 7 else 0] and seen[4] == found[0]


def test_memory_of_a_draft_is_that_of_the_models_context(tiny, copy, monkeypatch):
    sizes = []
    edit(copy / "config.json", max_position_embeddings=128)
    monkeypatch.setattr(checkpoint, "check_memory", lambda *args: sizes.append(args[3]))
    Session(tiny, draft=copy, device="cpu")
    assert sizes == [256, 256]


def test_a_pacer_that_gives_up_says_so(tiny):
    model = exact_model(tiny, ctx_size=64)
    lookup = Lookup(3)
    lookup.pacer = SimpleNamespace(ready=lambda: False, single=1.0, record=lambda *_: None)
    list(generate(model, [1, 5, 6], n=12, eos=[], decode=lookup.decode))
    assert "; 11 passes had none, since they cost more time" in lookup.summary()


def test_draft_forgets_what_was_not_sampled(tiny):
    """What it proposes depends on the text alone, not on what was proposed earlier."""
    model = exact_model(tiny, ctx_size=64)
    draft, other = Draft(3, other_model(model)), []
    toss, propose = random.Random(SEED), draft.propose
    draft.pacer.ready = lambda: toss.random() < 0.6
    draft.propose = lambda ids: other.append(([*ids], propose(ids))) or other[-1][1]
    prompt = random.choices(range(3, 300), k=9)
    list(generate(model, prompt, n=50, eos=[], sampling=Sampling(seed=SEED), decode=draft.decode))
    assert draft.accepted < draft.proposed
    for ids, proposals in other:
        fresh, state = Draft(3, draft.model), State(model)
        state.sampler.set(Sampling(seed=SEED))
        with torch.inference_mode():
            fresh.begin(model, state, ids[:-1])
            assert fresh.propose(ids) == proposals


@pytest.mark.parametrize("in_graphs", [False, True])
def test_speculation_ends_within_a_pass(tiny, monkeypatch, in_graphs):
    model, prompt = exact_model(tiny, ctx_size=128), [1, 5, 6]
    if in_graphs:
        decode_in_graphs(monkeypatch)
    for taken in range(1, 9):
        cache, draft = State(model), always(Draft(4, model))
        with contextlib.closing(
            generate(model, prompt, cache, 40, eos=[], decode=draft.decode)
        ) as tokens:
            turn = [*prompt, *itertools.islice(tokens, taken), 9, 10]
        assert cache.pos == cache.device_pos == len(prompt) + taken - 1
        timings = Timings()
        second = list(
            generate(model, turn, cache, 12, eos=[], timings=timings, decode=draft.decode)
        )
        assert timings.prompt_tokens == 3 and second == list(
            generate(model, turn, State(model), 12, eos=[])
        )


def looked_up(seen: list[int], count: int) -> list[int]:
    """What Lookup proposes, by comparing everything with everything."""
    for length in range(min(4, len(seen) - 1), 1, -1):
        for start in range(len(seen) - length - 1, -1, -1):
            if seen[start : start + length] == seen[-length:]:
                following = seen[start + length :]
                return [following[i % len(following)] for i in range(count)]
    return []


def test_lookup_proposals():
    """At once, and with a text that grows."""

    def proposed(*seen: int, count: int = 4) -> list[int]:
        once, growing = Lookup(count), Lookup(count)
        for size in range(1, len(seen) + 1):
            expected = looked_up([*seen[:size]], count)
            assert growing.propose([*seen[:size]]) == expected
        assert once.propose([*seen]) == expected
        once.begin(None, None, [9, 8, 7, 6, 5])
        once.begin(None, None, [*seen[:-1]])  # of the text before, nothing is left
        assert once.propose([*seen]) == expected
        return expected

    # one token is not enough
    assert proposed(5) == proposed(5, 6, 7) == proposed(5, 6, 7, 9, 7) == []
    assert proposed(5, 6, 7, 8, 9, 5, 6) == [7, 8, 9, 5]
    assert proposed(1, 5, 6, 7, 2, 5, 6, 8, 3, 1, 5, 6) == [7, 2, 5, 6]  # the longest
    assert proposed(5, 6, 7, 2, 5, 6, 8, 3, 5, 6, count=1) == [8]  # the latest
    assert proposed(9, 5, 6, 5, 6) == [5, 6, 5, 6]
    assert proposed(8, 8, 8) == [8, 8, 8, 8]
    for _ in range(20):
        proposed(*random.choices(range(random.choice([2, 3, 9])), k=random.randint(1, 50)), count=6)


@pytest.mark.parametrize("cost", [1.02, 1.15, 1.5, 3.0])
def test_failed_proposals_cost_3_percent(cost):
    pacer = Pacer()

    def spend(accepted: int) -> float:
        seconds = cost if pacer.ready() else 1.0
        pacer.record(int(seconds > 1), accepted, seconds, waited=False)
        return seconds

    for length in (400, 4000):
        assert sum(spend(0) for _ in range(length)) <= 1.03 * length
    for _ in range(200):  # the text begins to repeat
        spend(4)
    assert all(spend(4) > 1 for _ in range(20))


def test_looking_for_proposals_costs_3_percent():
    """A GPU is idle meanwhile, also where nothing is found."""
    pacer = Pacer()

    def spend() -> float:
        waited = pacer.ready()
        seconds = 1.15 if waited else 1.0
        pacer.record(0, 0, seconds, waited)
        return seconds

    for length in (400, 4000):
        assert sum(spend() for _ in range(length)) <= 1.03 * length


def test_speculation_in_graphs(tiny, monkeypatch):
    """Without a GPU, what the graphs do is run directly, with the reference ops; capture and replay
    are not covered."""
    model = exact_model(tiny, ctx_size=40, device=DEVICE.type)
    prompt, other = [1, 5, 6, 7, 5, 6], other_model(model)
    settings = dict(sampling=Sampling(temp=0.7, seed=3, repeat_penalty=1.2), eos=[])
    cache, plain = State(model), list(generate(model, prompt, **settings))
    longer = [*prompt, *plain[:5], 9]
    plain_longer = list(generate(model, longer, n=9, **settings))
    if DEVICE.type == "cpu":
        decode_in_graphs(monkeypatch)
    for way in (Lookup(3), Draft(3, model), Draft(5, other)):
        toss = random.Random(SEED)
        way.pacer.ready = lambda toss=toss: toss.random() < 0.7
        assert list(generate(model, prompt, cache, **settings, decode=way.decode)) == plain
        assert cache.pos == cache.device_pos == 39
        assert (
            list(generate(model, longer, cache, 9, **settings, decode=way.decode)) == plain_longer
        )
        if isinstance(way, Draft) and way.n == 3:
            assert way.accepted == way.proposed > 0


@pytest.mark.parametrize("in_graphs", [False, True])
@pytest.mark.parametrize("proposing", [False, True])
def test_speculation_where_logits_are_not_finite(tiny, monkeypatch, in_graphs, proposing):
    model, prompt = exact_model(tiny, ctx_size=64), [1, 5, 6]
    text = list(generate(model, prompt, n=20, eos=[], sampling=Sampling(seed=SEED)))
    sample = model.ops.sample

    def spoiled(logits, tokens, drawn, pos, sampler) -> None:
        logits[max(14 - (int(pos) - len(logits) + 1), 0) :] = torch.nan
        sample(logits, tokens, drawn, pos, sampler)

    model.ops = SimpleNamespace(**vars(model.ops) | dict(sample=spoiled))
    if in_graphs:
        decode_in_graphs(monkeypatch)
    planted, got = Planted(4, prompt + text), []
    planted.pacer.ready = lambda: proposing
    tokens = generate(
        model, prompt, n=20, eos=[], sampling=Sampling(seed=SEED), decode=planted.decode
    )
    with pytest.raises(RuntimeError, match="not finite"):
        got.extend(tokens)
    assert got == text[:11]


def test_single_tokens_run_ahead(tiny, monkeypatch):
    """Without proposals, two passes are on their way, also while the host looks for some; with
    them, one: tokens are needed first."""
    model = exact_model(tiny, ctx_size=64)
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
        text = generate(model, [1, 5, 6], **settings, decode=lookup.decode)
        assert [len(counts) for _ in text] == launched


def test_speculation_from_the_command_line(cli, tiny, copy, monkeypatch):
    flags = (
        "-m",
        tiny,
        "-p",
        "a fox a fox a fox",
        "-n",
        40,
        "-s",
        5,
        "--dtype",
        "fp32",
        "--stop",
        "zz",
    )
    _, expected, _ = cli(*flags)
    for way in (("--lookup", 3), ("--draft", tiny), ("--draft", tiny, "--draft-max", 2)):
        code, out, err = cli(*flags, *way)
        assert code == 0 and out == expected
        assert re.search(
            r"proposals \d+ passes, \d\.\d\d tokens a pass; .* proposals accepted", err
        )
    lines = ("the fox", "the crow", "the fox")
    assert chat(cli, tiny, *lines, flags=("--lookup", 4))[1] == chat(cli, tiny, *lines)[1]
    assert cli(*flags, "--lookup", 3, "--draft", tiny)[0] == cli(*flags, "--lookup", 0)[0] == 2
    assert_refused(cli(*flags, "--draft", cli_module.DEFAULT_MODEL), "different vocabulary")
    # some models of a family have more rows for no token than others
    hugging_face_model(read_config(copy).vocab_size + 400, **FAMILIES["gqa"]).save_pretrained(copy)
    assert cli(*flags, "--draft", copy)[:2] == (0, expected)
    hot, seen, original = (
        ("--temp", 9, "--top-k", 0, "--min-p", 0, "--top-p", 1, "--ignore-eos"),
        [],
        generate,
    )
    monkeypatch.setattr(
        "session.generate", lambda *a, **k: (seen.append(i) or i for i in original(*a, **k))
    )
    assert cli("-m", copy, *flags[2:], *hot, "--draft", tiny)[0] == 0
    assert len(seen) == 40 and max(seen) < read_config(tiny).vocab_size


# ---- extra/parallel.py


PARALLEL = {  # cases, with checkpoints made below: a folder, and options of load
    "grouped queries": ("tiny", {}),
    "one key/value head, bias, tied": ("qwen 2.5, tied, longer", {}),
    "norms of q and k": ("qwen 3", {}),
    "bin": ("bin", {}),
    "meta, 2 shards": ("meta", {}),
    "e4m3": ("tiny", dict(format="e4m3")),
    "e5m2, tied": ("qwen 2.5, tied, longer", dict(format="e5m2")),
    "8-bit cache": ("tiny", dict(kv_fp8=True)),
    "saved": ("saved", {}),
    "in graphs": ("tiny", {}),
    "fused": ("tiny", dict(backend="triton")),
    "a format of one's own": ("grouped", dict(format="own")),
    "saved, in a format of one's own": ("saved groups", {}),
}
# four would cut a group
ONLY_BY_TWO = {"fused", "a format of one's own", "saved, in a format of one's own"}


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


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def run_rank(rank: int, folder: Path, size: int, port: str) -> None:
    """Write what one of several processes, forks of one that has only done its imports,
    computes."""
    of_all = dict(
        WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    of_all["TORCHELASTIC_RUN_ID"] = "as torchrun would"
    os.environ |= of_all | dict(RANK=str(rank), LOCAL_RANK=str(rank))
    ranks = Ranks.of_torchrun()
    cases = [case for case in PARALLEL if size == 2 or case not in ONLY_BY_TWO]
    torch.save(
        {case: parallel_result(folder, case, ranks=ranks) for case in cases},
        folder / f"{size}.{rank}",
    )
    ranks.finish()


@pytest.fixture(scope="session")
def parallel_folder(tiny, grouped_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    shutil.copytree(grouped_folder, folder / "grouped")
    for name in ("tiny", "bin", "meta"):
        shutil.copytree(tiny, folder / name)
    torch.manual_seed(1)
    for name in ("qwen 2.5, tied, longer", "qwen 3"):
        hugging_face_model(301, **FAMILIES[name]).save_pretrained(folder / name)
        shutil.copy(tiny / "tokenizer.model", folder / name)
    to_bin(folder / "bin")
    to_meta(folder / "meta", 2)
    save(folder / "qwen 2.5, tied, longer", folder / "saved", device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMATS, "own", OWN)
        save(grouped_folder, folder / "saved groups", format="own", device="cpu")
    return folder


def test_ranks_equal_one_process(parallel_folder):
    """2 and 4 processes, all forks of a single one, since every start takes seconds."""
    done = in_shell(
        f"CUDA_VISIBLE_DEVICES= $PYTHON $HERE/test_all.py {shlex.quote(str(parallel_folder))} forks"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    of_several = {
        size: [torch.load(parallel_folder / f"{size}.{rank}") for rank in range(size)]
        for size in (2, 4)
    }
    assert of_several[2][0].keys() == PARALLEL.keys() == of_several[4][0].keys() | ONLY_BY_TWO
    for case, (name, options) in PARALLEL.items():
        exact, expected = parallel_result(parallel_folder, case, backend="torch")
        in_8_bits = "saved" in name or "format" in options or "kv_fp8" in options
        for size in (2,) if case in ONLY_BY_TWO else (2, 4):
            (logits, tokens), *others = (rank[case] for rank in of_several[size])
            for other in others:
                assert torch.equal(logits, other[0]) and tokens == other[1], (
                    case,
                    size,
                    "ranks differ",
                )
            # A code may be rounded the other way: of a cached key, or of a single token's
            # activations
            assert_close(logits[:10], exact[:10], 1e-2 if case == "8-bit cache" else 1e-4)
            assert_close(logits[10:], exact[10:], 1e-2 if in_8_bits else 1e-4)
            assert tokens == expected, (case, size)


def test_ranks_that_do_not_divide_a_model(tiny):
    with pytest.raises(
        ValueError, match="4 query heads cannot be divided evenly among 3 processes"
    ):
        load(tiny, device="cpu", ranks=Ranks(0, 3))
    too_many = "3 key/value heads can be neither divided nor repeated evenly among 2 processes"
    with pytest.raises(ValueError, match=too_many):
        read_config_like(n_heads=6, n_kv_heads=3).cut(2)
    with pytest.raises(
        ValueError, match="layers.0.wo has 16 columns on each of 2 processes; own needs"
    ):
        check_groups(read_config_like().cut(2), OWN)


def test_ranks_that_divide_256_columns_of_int4(copy):
    """Each rank encodes its own columns; what was encoded as a whole cannot be divided."""
    hugging_face_model(301, **FAMILIES["gqa"] | dict(intermediate_size=320)).save_pretrained(copy)
    model = load(copy, device="cpu", dtype="fp32")
    for rank, columns in enumerate(model.weights.layers[0].w2.data.split(160, 1)):
        w2 = loaded(model, INT4, Ranks(rank, 2)).layers[0].w2
        assert torch.equal(w2.dense(), INT4.decoded(INT4.encode(columns)))
    saved = load(
        save(copy, copy.parent / "saved", format="int4", device="cpu").parent, device="cpu"
    )
    error = (
        "layers.0.w2 was saved in int4, where its 320 columns cannot be divided among 2 processes"
    )
    with pytest.raises(ValueError, match=error):
        loaded(saved, INT4, Ranks(0, 2))


def test_memory_of_each_rank(monkeypatch):
    whole, cpu = (
        read_config_like(dim=512, n_layers=8, hidden_dim=4096, vocab_size=4096),
        torch.device("cpu"),
    )
    monkeypatch.setattr("checkpoint.free_memory", lambda device: 100_000_000)
    assert check_memory(whole.cut(4), torch.float32, cpu, 64) is None
    with pytest.raises(MemoryError):
        check_memory(whole, torch.float32, cpu, 64)
    # which share a host's memory
    with pytest.raises(MemoryError, match="cpu for rank 1 of 4 has 0.03 GB free"):
        check_memory(whole.cut(4), torch.float32, cpu, 64, ranks=Ranks(1, 4, 1, 4))


@pytest.mark.parametrize("format", [None, fp8.E4M3])
def test_exchange_adds_and_gathers(format):
    """Three ranks in one process, each with its own memory; a vocabulary that is not evenly
    divided."""
    C, V, columns, halves = 72, 101, (40, 24, 56), partial(randn, dtype=torch.float16)
    sums = [encoded([Matrix(halves(C, k)) for k in columns], format) for _ in range(2)]
    (whole,) = encoded([Matrix(halves(V, C))], format)
    cuts = [parallel.share(V, rank, 3) for rank in range(3)]
    part = lambda rows: tuple(t[rows].contiguous() for t in whole.tensors)
    outputs = [Matrix(part(rows), format) for rows in cuts]
    memory = [
        torch.zeros(3 * (2 * C + outputs[0].rows), dtype=torch.int64, device=DEVICE)
        for _ in range(3)
    ]
    addresses = [m.data_ptr() for m in memory]
    exchanges = [
        parallel.Exchange([sums[0][r], sums[1][r], outputs[r]], r, addresses, memory[r])
        for r in range(3)
    ]
    for _ in range(2):
        for matrices in sums:
            x, residual = [halves(1, k) for k in columns], halves(1, C)
            exact = residual.float() + sum(
                kernels.linear_ref(a.float(), dense(m)) for a, m in zip(x, matrices)
            )
            for exchange, a, m in zip(exchanges, x, matrices):
                exchange.send("linear_add", a, None, m, 0.0)
            for exchange, m in zip(exchanges, matrices):
                assert (
                    nmse(exchange.add_received(m, residual.clone()), exact)
                    < ONE_UNIT[torch.float16]
                )
        x, norm, logits = halves(1, C), halves(C), torch.empty(1, V, device=DEVICE)
        eps = SimpleNamespace(norm_eps=1e-5)
        exact = kernels.rmsnorm_linear_ref(x.float(), norm.float(), dense(whole), eps, logits)
        for exchange, m in zip(exchanges, outputs):
            exchange.send("rmsnorm_linear", x, norm, m, 1e-5)
        for exchange, m in zip(exchanges, outputs):
            ours = exchange.gather_received(m, torch.full((1, V), NAN, device=DEVICE))
            assert nmse(ours, exact) < ONE_UNIT[torch.float16]
            exchange.round_number += 1


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_on_several_gpus(parallel_folder, size):
    """Both ways of summing, and thousands of rounds of the exchange with late ranks: see
    check_gpus."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    seed = os.environ | {"TEST_SEED": str(SEED)}
    process = torchrun(HERE / "test_all.py", parallel_folder, "gpus", size=size, env=seed)
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
    for case in ("grouped queries", "one key/value head, bias, tied", "e4m3", "8-bit cache"):
        name, options = PARALLEL[case]
        for dtype in ("fp16", "bf16"):
            exact = logits(
                load(
                    folder / name,
                    dtype="fp32",
                    device=own,
                    backend="torch",
                    format=options.get("format"),
                )
            )
            one = logits(load(folder / name, dtype=dtype, device=own, **options))
            model = load(folder / name, dtype=dtype, device="cuda", ranks=ranks, **options)
            for exchange in (model.exchange, None):
                model.ops = ranks.cut_ops(kernels.ops(model.backend), exchange, False)
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
    matrices = [
        Matrix(torch.zeros(SUMMED, 64, dtype=torch.float16, device=cuda)) for _ in range(SLOTS)
    ]
    for m in matrices:
        m.data[:, 0] = ranks.rank + 1
    exchange = parallel.make_exchange(ranks, matrices, "triton", cuda)
    number, wrong = (
        torch.zeros(1, dtype=dtype, device=cuda) for dtype in (torch.float32, torch.int64)
    )
    x, y = torch.zeros(1, 64, dtype=torch.float16, device=cuda), torch.zeros(1, SUMMED, device=cuda)

    def chain(is_late: bool) -> None:
        number.copy_((number + 1) % 1009)
        x[:, 0] = number[0]
        y.zero_()
        for m in exchange.slots:
            if is_late and late.random() < 0.1:
                torch.cuda._sleep(late.randrange(100_000))
            exchange.linear_add(x, m, y)
        wrong.add_((y != total * number).sum())
        exchange.round_number += 1

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


# ---- extra/parallel.py: processes started by torchrun


def torchrun(*arguments, size: int = 2, **options) -> subprocess.Popen:
    flags = f"--nproc-per-node {size} --master-port {free_port()}".split()
    command = [sys.executable, str(HERE / "extra" / "torchrun.py"), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes = dict(
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    return subprocess.Popen([*command, *map(str, arguments)], **pipes | options)


def torchrun_bash(script: str, *arguments, **options) -> subprocess.Popen:
    """Each rank runs a bash script; $RUN in it is our program with these arguments."""
    words = shlex.join(
        [sys.executable, str(HERE / "run.py"), *map(str, arguments), "--device", "cpu"]
    )
    return torchrun("--no-python", "bash", "-c", script.replace("$RUN", words), **options)


def errors_in(err: bytes) -> list[str]:
    return re.findall(r"^error: .*", err.decode(), re.MULTILINE)


def test_torchrun_writes_what_one_process_writes(tiny, cli):
    flags = ("-m", tiny, "-n", 6, "--temp", 0, "--dtype", "fp32", "--device", "cpu")
    process = torchrun(
        HERE / "run.py",
        "--chat",
        *flags,
        stdin=subprocess.PIPE,
    )
    out, err = process.communicate(b"One\n/clear\nTwo\n\xff\n", timeout=PATIENCE)
    assert process.returncode == 0, err
    assert out.decode() == cli("--chat", *flags, stdin=b"One\n/clear\nTwo\n")[1]
    assert err.count(b"generated 12 tokens") == 1 and err.count(b"not UTF-8") == 1
    assert b"cpu in 2 processes, sums through gloo" in err


def test_torchrun_chat(tiny, tmp_path):
    """The template asks for the time, which is another for each rank."""
    template = "{{ 'good day ' * (strftime_now('%H') | int + 1) }}{{ messages[-1]['content'] }}"
    template += (
        "{% if messages[-1]['content'] == 'bad' %}{{ raise_exception('too bad') }}{% endif %}"
    )
    (tmp_path / "t").write_text(template)
    script = "if [ $RANK = 0 ]; then export TZ=UTC0; else export TZ=XXX12; fi; exec $RUN"
    flags = (
        "--chat",
        "--chat-template",
        tmp_path / "t",
        "-n",
        4,
        "--ignore-eos",
    )
    process = torchrun_bash(script, "-m", tiny, *flags, stdin=subprocess.PIPE)
    _, err = process.communicate(b"hello\nhello\nbad\nhello\n", timeout=PATIENCE)
    assert process.returncode == 0 and b"generated 12 tokens" in err, err
    (error,) = errors_in(err)
    assert "too bad" in error


def test_torchrun_interrupted_at_the_prompt(tiny):
    process = torchrun(
        HERE / "run.py", "--chat", "-m", tiny, "--device", "cpu", stdin=subprocess.PIPE
    )
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
    process = torchrun_bash(
        script, "-m", tiny, "-p", "Once", "-c", 100_000, "--ignore-eos", cwd=tmp_path
    )
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
    assert errors_in(err) == (
        [] if how == "interrupted" else ["error: another process has ended"]
    ), err


def test_torchrun_reports_one_error(tiny):
    folder = f"./{tiny.parent.name}/{tiny.name}"  # which the second rank looks for elsewhere
    process = torchrun_bash(
        "[ $RANK = 0 ] || cd /; exec $RUN", "-p", "Once", "-m", folder, cwd=tiny.parent.parent
    )
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, err
    assert len(errors_in(err)) == 1 and "no file or folder" in errors_in(err)[0], err
    assert b"Traceback" not in err and b"FAILED" not in err, err


# ---- launch.py


def test_kernel_that_does_not_compile(monkeypatch):
    """Each is loaded, too; its error is the user's."""
    from triton.runtime._async_compile import active_mode

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def start(name: str, compiled) -> None:
        submit = lambda grid: active_mode.get().submit(name, compiled, lambda kernel: None)
        launch.start(SimpleNamespace(warmup=submit), (1,), torch.device("cpu"))

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


def test_launch_sizes_of_the_nearest_card(monkeypatch):
    found = [launch.nearest({0: "a", 80: "b", 90: "c"}, key) for key in (0, 79, 80, 89, 120)]
    assert found == ["a", "a", "b", "b", "c"]
    products = itertools.product(
        (4, 6, 8, 16, 32), (*PRODUCTS, "an op of one's own"), (64, 4096, 11008)
    )
    for arch, (bits, op, columns) in itertools.product((0, 80, 86, 89, 90, 100, 120), products):
        monkeypatch.setattr(launch, "capability", lambda device, arch=arch: arch)
        for sizes in (launch.vector_sizes, launch.stream_sizes):
            rows = sizes(DEVICE, bits, op, columns).rows
            # others have pairs of rows
            assert rows % 2 == 0 or sizes is launch.stream_sizes and op == "linear_add"
        for tokens in (8, 16):
            few = launch.few_sizes(DEVICE, bits, op, columns, tokens)
            assert few is None or few.lanes <= 4 * few.steps and few.rows % 8 == 0 and few.ahead > 0


def test_tiles_fit_shared_memory(monkeypatch):
    """Cards take the sizes of the nearest one below. Scales take up to a fifth as much as codes."""
    for arch, kilobytes in ARCHITECTURES.items():
        monkeypatch.setattr(launch, "capability", lambda device, arch=arch: arch)
        for bits, op, columns in itertools.product((4, 6, 8), PRODUCTS, range(64, 30_000, 64)):
            sizes = launch.stream_sizes(DEVICE, bits, op, columns)
            block = kernels.stream_block(sizes.block, columns)
            held = (sizes.stages - 1) * sizes.rows * -(-columns // block) * block * 1.2 * bits / 8
            assert held < kilobytes * 1024, (arch, bits, op, columns)


# ---- bench.py


def tiny_llama(dtype: torch.dtype, format=None) -> Llama:
    """With random weights, for what is counted by hand."""
    c = read_config_like(
        dim=8, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=2, hidden_dim=12, vocab_size=10
    )
    cpu = torch.device("cpu")
    weights = bench.random_weights(c, dtype, cpu, format, "torch")
    return Llama(c, weights, "torch", cpu, dtype, 16)


def test_bench_bytes_and_operations(tiny_model):
    # Wqkv has (4 + 2 * 2) * 2 = 16 rows of 8
    layer = 2 * 16 * 8 + 4 * 8 * 1 + 2 * 8 * 8 + 2 * 24 * 8 + 2 * 8 * 12
    assert bench.prefill_operations(tiny_llama(torch.float16), 1) == 2 * layer + 2 * 10 * 8
    # a decode step reads all matrices, and keys and values of 2 layers, 2 heads of 16
    matrices = sum(matrix.nbytes for matrix in tiny_model.weights.matrices)
    assert bench.decode_bytes(tiny_model, 0) == matrices
    assert bench.decode_bytes(tiny_model, 10) == matrices + 4 * 2 * 2 * 10 * 2 * 16


@pytest.mark.parametrize("stride", [24, 10, 1])
def test_bench_perplexity_equals_transformers(tiny, tiny_model, stride):
    theirs = transformers.LlamaForCausalLM.from_pretrained(tiny)
    ids, ctx, losses = torch.randint(3, 300, (70,)).tolist(), 24, []
    report = bench.quality(
        [*bench.perplexity(tiny_model, ids, 1, ctx, stride, against=tiny_model)], text_bytes=200
    )
    for first in range(70):  # each counts in the first window that has it
        start = next(start for start in range(0, 70, stride) if first < start + ctx)
        log_p = oracle(theirs, [1, *ids[start:first]]).log_softmax(-1)
        losses.append(-log_p[-1, ids[first]].item())
    assert report["tokens"] == 70
    assert abs(report["perplexity"] / torch.tensor(losses).double().mean().exp().item() - 1) < 1e-4
    assert abs(report["bits_per_byte"] - sum(losses) / 0.6931471805599453 / 200) < 1e-4
    assert (
        report["mean_kl"] < 1e-9
        and report["same_top_%"] == 100
        and abs(report["perplexity_ratio"] - 1) < 1e-9
    )


@pytest.fixture
def quick_ceilings(monkeypatch):
    """In place of the real ones, which take seconds."""
    for name in ("read_ceiling", "copy_ceiling", "product_ceiling"):
        monkeypatch.setattr(bench, name, functools.cache(lambda *_: 1e10))


@pytest.fixture
def bench_cli(capfd, monkeypatch, quick_ceilings):
    return caller(bench.main, monkeypatch, capfd)


QUICK = ["-p", "4", "-n", "2", "-r", "1", "--device", "cpu"]


def rows_of(result) -> list[dict]:
    """What bench printed with -o json."""
    code, out, err = result
    assert code == 0, err
    return json.loads(out)


def test_bench_speed_rows(bench_cli, tiny, tiny_saved):
    axes = ["-d", "0,5", "--dtype", "fp32,bf16", "--format", "none,e4m3", "--kv-fp8"]
    rows = rows_of(bench_cli("-m", tiny, *QUICK, *axes, "-o", "json"))
    tests = ("pp4", "pp4 @ d5", "tg2", "tg2 @ d5")
    expected = [
        (dtype, form, "e4m3", t)
        for dtype in ("fp32", "bf16")
        for form in ("none", "e4m3")
        for t in tests
    ]
    assert [(r["dtype"], r["format"], r["kv"], r["test"]) for r in rows] == expected
    assert all(r["tokens_per_s"] > 0 and r["percent_of_ceiling"] > 0 for r in rows)
    given = [
        "-m",
        tiny,
        "-m",
        tiny_saved,
        "-p",
        "4",
        "-p",
        "8,9",
        "-n",
        "0",
        "-r",
        "1",
        "--device",
        "cpu",
        "-ngl",
        "9",
    ]
    code, out, err = bench_cli(*given, "-o", "jsonl")
    rows = objects(out)
    expected = [
        (str(m), form, f"pp{n}")
        for m, form in ((tiny, "none"), (tiny_saved, "e4m3"))
        for n in (4, 8, 9)
    ]
    assert code == 0 and "-ngl: no effect here" in err
    assert [(r["model"], r["format"], r["test"]) for r in rows] == expected


def test_bench_prints_rows_at_once(bench_cli, tiny, capfd, monkeypatch):
    shown, original = [], bench.throughput

    def rows(*args):
        for row in original(*args):
            yield row
            shown.append(capfd.readouterr())

    monkeypatch.setattr(bench, "throughput", rows)
    monkeypatch.setattr(bench, "read_ceiling", lambda device: 1e5)  # a slow machine
    assert bench_cli("-m", tiny, *QUICK)[:2] == (0, "")
    (first, notes), (second, _) = shown
    assert (
        "pp4" in first
        and "tg2" not in first
        and len(first.splitlines()) == 3
        and second.count("tg2") == 1
    )
    assert re.search(r"tiny\S*: this takes at least \d+ (s|minutes)", notes), notes


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_bench_random_config(qwen_config, family):
    args = bench.parse_args(["--device", "cpu", "-t", "1"])
    args.model, args.ranks = f"random:{qwen_config}:2", parallel.Ranks()
    model = bench.open_model(args, "fp32", 16, "none")
    layer = {name for name, value in vars(model.weights.layers[0]).items() if value is not None}
    assert len(model.weights.layers) == 2
    assert layer - {"index"} == {tensor.field for tensor in checkpoint.layer_tensors(model.config)}
    assert layer & {"qkv_bias", "qk_norm"} == {"qkv_bias" if family == "Qwen2" else "qk_norm"}


@pytest.fixture
def qwen_config(family, tmp_path) -> Path:
    """The config.json of a tiny model of a family."""
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=70,
    )  # fmt: skip
    getattr(transformers, f"{family}Config")(**sizes).save_pretrained(tmp_path)
    return tmp_path / "config.json"


def test_bench_shapes_as_published():
    """The small ones tie their embedding, which counts once."""
    tied = {
        "Llama-3.2-1B": 1_235_814_400, "Llama-3.2-3B": 3_212_749_824, "Qwen2.5-0.5B": 494_032_768,
        "Qwen2.5-1.5B": 1_543_714_304, "SmolLM2-135M": 134_515_008, "SmolLM2-360M": 361_821_120,
    }  # fmt: skip
    published = {
        "1.1b": 1_100_048_384,
        "7b": 6_738_415_616,
        "8b": 8_030_261_248,
        "13b": 13_015_864_320,
    } | tied
    for name, weights in (published | {"70b": 68_976_648_192}).items():
        c = replace(bench.random_config(f"random:{name}"), tie_embeddings=name in tied)
        assert checkpoint.weight_bytes(c, torch.float16, None) == 2 * weights, name


@pytest.mark.parametrize("form", FORMATS)
def test_bench_random_matrices(form):
    format, c = FORMATS[form], read_config_like(dim=64, n_kv_heads=1, head_dim=16)
    layer = bench.random_weights(c, torch.float32, torch.device("cpu"), format, "torch").layers[0]
    assert layer.wqkv.shape == (96, 64) and layer.wqkv.nbytes == format.nbytes(96, 64)
    assert 0.018 < layer.wqkv.dense().std() < 0.022


def test_bench_perplexity_from_the_command_line(bench_cli, tiny, tiny_saved, tmp_path):
    (tmp_path / "text").write_text(TEXT * 3)
    flags = ("--device", "cpu", "--perplexity", tmp_path / "text", "-o", "json")
    (row,) = rows_of(bench_cli("-m", tiny, *flags, "--against", "bf16"))
    assert (
        row["perplexity"] > 1
        and row["mean_kl"] > 0
        and 0 < row["standard_error"] < row["perplexity"]
    )
    assert rows_of(bench_cli("-m", tiny_saved, *flags))[0]["format"] == "e4m3"
    assert_refused(
        bench_cli("-m", tiny_saved, *flags, "--against", "fp32"), "--against needs the original"
    )


def test_bench_threads(bench_cli, tiny, request):
    request.addfinalizer(lambda: torch.set_num_threads(1))
    for given, name in (([], "CPU, 1 thread"), (["-t", "2"], "CPU, 2 threads")):
        torch.set_num_threads(2)
        rows = rows_of(bench_cli("-m", tiny, *QUICK, "-o", "json", *given))
        assert {row["device"] for row in rows} == {name}


def test_bench_cells_and_percents(capsys):
    shown = {
        1.0: "1.00",
        0.0: "0.00",
        1.00071: "1.00071",
        0.00037: "0.00037",
        1.07: "1.070",
        5.4712: "5.47",
    }
    shown |= {0.9998: "0.99980", 12345.6: "12,346", NAN: "nan", -0.5: "-0.50", 1e-30: "0.000000000"}
    for value, text in (shown | {7: "7", None: ""}).items():
        assert bench.cell(value) == text, value
    bench.note_once.cache_clear()
    assert [bench.percent(x, 2) for x in (1, 3, 3)] == [50, 150, 150]
    assert capsys.readouterr().err.count("more than 100% of a ceiling") == 1


def test_bench_draws_the_same_lengths():
    drawn = bench.counts_of("17-4096:20")
    assert drawn == sorted({*drawn}) == bench.counts_of("17-4096:20") and len(drawn) == 20
    assert all(17 <= count <= 4096 for count in drawn)
    assert bench.counts_of("30,5-9:5,0") == [30, 5, 6, 7, 8, 9, 0]


def test_bench_errors_are_one_line(bench_cli, tiny, tmp_path):
    (tmp_path / "bad").write_bytes(b"ab\xff")
    (tmp_path / "one").write_text("a")
    for arguments, text in (
        (["-m", "random:9b"], "the shapes are 1.1b, 7b"),
        (["-m", "random:7b:0"], "'0' is not a number of layers"),
        (["-m", "nowhere"], "no file or folder nowhere here"),
        (["-m", tiny, "--perplexity", tmp_path / "bad"], "not UTF-8: byte 0xff at offset 2"),
        (["-m", tiny, "--perplexity", tmp_path / "none"], "none"),
        (["-m", tiny, "--perplexity", tmp_path / "one"], "has 1 tokens; a mean with its error"),
    ):
        assert_refused(bench_cli(*arguments), text)
    for arguments, text in (
        ("-p x", "-p/--n-prompt: x: must be a whole number"),
        ("-p 0 -n 0", "nothing to measure"),
        ("-p 5-7:4", "5-7:4: so many counts are not in the range"),
        ("--perplexity x --stride 600", "skips text"),
    ):
        assert_refused(bench_cli(*arguments.split()), text, code=2)
    for of_the_other_mode in (
        "--stride 4", "--against fp32", "--perplexity x -p 4", "--perplexity x --dtype fp32,bf16",
        "--perplexity x -m a -m b", "--perplexity x --format none,e4m3",
    ):  # fmt: skip
        assert_refused(bench_cli(*of_the_other_mode.split()), code=2)


# ---- dev/: what a developer measures


@pytest.fixture
def dev_cli(capfd, monkeypatch, quick_ceilings):
    """A script of dev/ in this process, on a CPU: run(script, *arguments)."""

    def run(script, *arguments) -> tuple[int, str, str]:
        return caller(script.main, monkeypatch, capfd, "--device", "cpu")(*arguments)

    return run


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


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_kernels_of_a_family(dev_cli, qwen_config, family):
    """Every op runs, and transformers gets the same shapes."""
    args = SimpleNamespace(model=f"random:{qwen_config}:2")
    theirs = compare.transformers_model(args, torch.float32, torch.device("cpu"))
    assert theirs.config.model_type == family.lower() and theirs.config.num_hidden_layers == 2
    flags = "-p 4 -d 0,7 -o jsonl -t 1".split()
    code, out, err = dev_cli(op_table, "-m", args.model, *flags)
    prompt = "rmsnorm rmsnorm_qkv_rope attention wo w2 rmsnorm_swiglu".split()
    expected = [(op, 1, 100) for op in (*prompt, "rmsnorm_linear", "sample")]
    expected += [(op, 4, depth) for depth in (0, 7) for op in prompt]
    found = [(row["op"], row["tokens"], row["depth"]) for row in objects(out)]
    assert code == 0 and found == expected and "bound by: " in err, err


def test_kernels_equal_plain_pytorch(tiny_model):
    """What is timed beside each other computes the same; but for SwiGLU, whose rows it mixes up."""
    for T, start_pos in ((1, 9), (5, 0), (5, 9)):
        state = State(tiny_model)
        state.advance(start_pos)
        inputs = op_table.random_inputs(tiny_model, T)
        ours = op_table.ops_of(tiny_model, state, inputs)
        plain = op_table.plain_ops(tiny_model, state, inputs, start_pos)
        assert ours.keys() == plain.keys()
        for op in ("rmsnorm", "rmsnorm_qkv_rope", "attention", "wo", "w2"):
            expected = plain[op](1)  # first, since ours may overwrite the residual
            if op == "attention":  # PyTorch's has heads before tokens
                expected = expected[0].transpose(0, 1)
            assert_close(ours[op](1).reshape(expected.shape), expected)
    ours = op_table.ops_of(tiny_model, state, op_table.random_inputs(tiny_model, 1))
    assert ours["rmsnorm_linear"](0).isfinite().all()


def test_compare_with_transformers(dev_cli, tiny, tiny_saved, hub, monkeypatch):
    seconds = (0.9**i for i in itertools.count())  # each measurement is shorter than the one before

    def wall_times(run, *_) -> list[float]:
        run()
        return [next(seconds)]

    def rows_of_both(model, *flags) -> tuple[list[dict], str]:
        quick = ["-p", "4", "-n", "2", "-r", "1", "-o", "json"]
        result = dev_cli(compare, "-m", model, *quick, *flags)
        return rows_of(result), result[2]

    monkeypatch.setattr(bench, "wall_times", wall_times)
    axes = ["-d", "0,9", "--dtype", "fp32,bf16", "--format", "none,e4m3"]
    rows, _ = rows_of_both(f"random:{tiny / 'config.json'}", *axes)
    theirs = [row for row in rows if "transformers" in row["backend"]]
    ours = [row for row in rows if row not in theirs]
    assert len(ours) == 2 * 2 * 4 and all(r["ratio"] > 0 and r["format"] == "none" for r in theirs)
    names = {"pp4": ["transformers"], "tg2": ["transformers, eager", "transformers, static cache"]}
    expected = []
    for row in ours:
        if row["format"] == "none":
            expected += [(row["dtype"], row["test"], name) for name in names[row["test"][:3]]]
    found = [(row["dtype"], row["test"], row["backend"]) for row in theirs]
    assert found == expected, "beside what it did not run"
    rows, said = rows_of_both(tiny_saved)
    assert "transformers is not measured: it needs --format none" in said
    found = [(row["format"], row["backend"]) for row in rows]
    assert found == [("e4m3", "torch")] * 2, "it cannot read this model"
    asked = []
    for _ in range(2):
        rows, _ = rows_of_both("someone/tiny")
        asked.append(len(hub.asked))
    assert [r["backend"] for r in rows[2:]] == ["transformers", *names["tg2"]]
    assert asked[0] == asked[1] > 0, "downloaded, and then the hub is not asked again"


def test_steps(dev_cli, tiny):
    code, out, err = dev_cli(steps, "-m", tiny, "-p", 4)
    assert "the Triton kernels need a GPU" in err and "| rmsnorm_swiglu: " in out
    assert code == 0 and out.count("overall efficiency") == 2 and "gaps between kernels" in out


def test_steps_rows(tiny_model, monkeypatch):
    monkeypatch.setattr(bench, "read_ceiling", lambda _: 1e9)
    monkeypatch.setattr(bench, "product_ceiling", lambda *_: 1e12)
    layer = ["_vector_kernel", "_attention_kernel", *["_vector_kernel"] * 3]
    step = ["_embedding_kernel", *layer * 2, "_vector_kernel", "_sample_best_kernel"]
    # each starts a second before the one before it ends, but for the last, which starts a second
    # later
    events = [steps.Event(name, 2.0 * i, 2.0 * i + 3) for i, name in enumerate(step[:-1])]
    events.append(steps.Event(step[-1], events[-1].end + 1, events[-1].end + 2))
    rows, ms, gaps, _ = steps.profile_rows(events, tiny_model, 1, 100)
    counts = {row["kernel"]: row["count"] for row in rows}
    products = {f"{op}: _vector_kernel": 1 + (op != "rmsnorm_linear") for op in op_table.PRODUCTS}
    assert counts == products | {
        "_embedding_kernel": 1,
        "_attention_kernel": 2,
        "_sample_best_kernel": 1,
    }
    assert gaps == 1e3 and ms == pytest.approx(sum(r["ms"] for r in rows) + 1e3)
    w2 = next(row for row in rows if row["kernel"].startswith("w2"))
    moved = 2 * op_table.cost("w2", tiny_model, 1)[0]
    assert w2["% of read"] == pytest.approx(100 * moved / 1e9 / (1e-3 * w2["ms"]))


def test_passes(dev_cli, tiny):
    flags = ("-T", "2,5", "--dtype", "fp32", "-d", 7, "-o", "json")
    rows = rows_of(dev_cli(dev_passes, "-m", tiny, *flags))
    assert [row["tokens"] for row in rows] == [1, 2, 5] and rows[0]["ratio"] == 1


@pytest.mark.parametrize("card", [90, 120])
def test_tune(tiny, tmp_path, monkeypatch, card):
    """On a card that has entries, and on one that has used another's. A matrix in another format
    has other tables."""
    model = load(tiny, dtype="fp16", device="cpu")
    layer = model.weights.layers[0]
    (layer.w2,) = encoded([layer.w2], E4M3)
    file = Path(shutil.copy(HERE / "launch.json", tmp_path))
    monkeypatch.setattr(launch, "TABLES_FILE", file)
    monkeypatch.setattr(launch, "tables", functools.cache(launch.tables.__wrapped__))
    monkeypatch.setattr(tuner, "tables", launch.tables)
    launch.save_tables()
    assert file.read_text() == (HERE / "launch.json").read_text(), (
        "what was not changed is saved as it was"
    )
    best = {"vector": [4, 1024, 2], "few": [32, 4, 2, 8, 1]}
    nearest = lambda kind: launch.nearest(launch.nearest(launch.tables()[kind], card), 16)

    # the more ops have the best sizes, the faster
    def pass_seconds(model, cache, T, depth) -> float:
        kind, ops = ("vector", nearest("vector")) if T == 1 else ("few", nearest("few")[T])
        return 1.0 / (1 + str(ops).count(str(best[kind])))

    monkeypatch.setattr(tuner, "capability", lambda _: card)
    monkeypatch.setattr(tuner, "pass_seconds", pass_seconds)
    monkeypatch.setattr(bench, "open_model", lambda *_: model)
    monkeypatch.setattr(type(model), "uses_graphs", True)
    before = nearest("few")[8]["default"][0]
    tuner.tune(SimpleNamespace(dtype=["auto"], format=["none"]))
    launch.tables.cache_clear()  # what it wrote
    vector, few = (launch.tables()[kind][card][16] for kind in best)
    for matrix, op in (
        ("wqkv", "rmsnorm_qkv_rope"),
        ("wo", "linear_add"),
        ("w13", "rmsnorm_swiglu"),
    ):
        columns = getattr(layer, matrix).columns
        assert (
            vector[op][columns] == best["vector"]
            and few[8][op][columns] == few[16][op][columns] == best["few"]
        )
    assert layer.w2.columns not in vector["linear_add"]
    assert few[8]["default"][0] == before and 16 in launch.tables()["vector"][80], (
        "other cards keep theirs"
    )


@pytest.fixture
def draw_picture(capfd, monkeypatch):
    return caller(plot.main, monkeypatch, capfd)


def test_plot(bench_cli, draw_picture, tiny, tmp_path):
    record, picture = tmp_path / "record", tmp_path / "speed.svg"
    code, out, err = bench_cli("-m", tiny, *QUICK, "--format", "none,e4m3", "-o", "jsonl")
    assert code == 0, err
    record.write_text(out)
    rows = plot.read_rows(record)
    rows += [replace(row, dtype="bf16") for row in rows]
    labels = {plot.label(row, rows) for row in rows if row.test == "tg2"}
    assert len(labels) == 4, "bars of the same name"
    assert draw_picture(record, picture) == (0, "", "")
    whole = picture.read_bytes()
    assert b"fused-llama, fp32" in whole and b"fused-llama, e4m3" in whole
    assert draw_picture(record, picture)[0] == 0 and picture.read_bytes() == whole, (
        "a record gives one picture"
    )
    for text in ("{", "[]", "null", '{"test": "tg2"}', out.replace("tokens_per_s", "x")):
        record.write_text(text)
        assert_refused(draw_picture(record, picture), "not a row printed by bench.py -o jsonl")
    record.write_text(out)
    assert_refused(draw_picture(record, tmp_path / "none" / "x.png"), "No such file", "x.png")
    assert_refused(draw_picture(record, tmp_path / "x.xyz"), "Format 'xyz' is not supported")
    assert_refused(draw_picture(tmp_path / "none", picture), "No such file", "none")
    record.write_text("")
    assert_refused(draw_picture(record, picture), "there is nothing to draw")


def test_picture_of_the_readme(draw_picture, tmp_path):
    assert draw_picture(HERE / "figures/h200.jsonl", tmp_path / "h200.svg") == (0, "", "")
    drawn, kept = ((folder / "h200.svg").read_text() for folder in (tmp_path, HERE / "figures"))
    texts = [re.findall(r">([^<>\n]+)</text>", picture) for picture in (drawn, kept)]
    assert texts[0] == texts[1] and "fused-llama, e4m3" in texts[0]


def test_dev_errors_are_one_line(dev_cli, tiny, monkeypatch):
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    for script, text in (
        (compare, "a package is not installed: transformers"),
        (tuner, "on a GPU"),
    ):
        assert_refused(dev_cli(script, "-m", tiny), text)
    for script, flags in (
        (op_table, "--format none,e4m3"), (op_table, "-n 4"), (op_table, "-r 4"),
        (op_table, "-m a -m b"), (steps, "-p 0"), (steps, "-p 4,5"), (steps, "-o json"),
        (tuner, "-p 4"), (dev_passes, "-T 0"), (dev_passes, "-d 4,5"), (compare, "-p 0 -n 0"),
        (compare, "--perplexity x"),
    ):  # fmt: skip
        assert_refused(dev_cli(script, *flags.split()), code=2)


# ---- dev/: fuzzing and mutants


def test_fuzz_finds_nothing():
    flags = f"--seed {SEED} --cases 150 --seconds {PATIENCE} --limit {PATIENCE}"
    done = in_shell(f"TRITON_INTERPRET=0 $PYTHON $HERE/dev/fuzz.py {flags}")
    assert done.returncode == 0 and f"150 cases from seed {SEED}" in done.stdout, (
        done.stdout + done.stderr
    )


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


def reports(act) -> int:
    """What run.main does with --debug."""
    try:
        act()
    except Exception:
        traceback.print_exc()
        return 1
    return 0


@pytest.mark.parametrize("how", WRONG)
def test_fuzz_notices(how, monkeypatch):
    act, expected = WRONG[how]

    def kind(rng, bases, place) -> bool:
        fuzz.watched.folder = str(place)
        return fuzz.ends_well(lambda: reports(act))

    monkeypatch.setattr(fuzz, "KINDS", {kind: 1})
    outcomes, failures = fuzz.run_cases([SEED], {}, limit=1 if how == "no end" else PATIENCE)
    assert len(failures) == sum(outcomes.values()) == 1 and expected in failures[SEED]


def test_mutants_fit_the_program():
    assert list(mutate.stale(mutate.MUTANTS)) == []
    assert all(mutant.old != mutant.new and mutant.words for mutant in mutate.MUTANTS)


# ---- README.md


README = (HERE / "README.md").read_text()


def test_readme_from_python_runs_as_written(monkeypatch, capsys):
    monkeypatch.chdir(HERE)
    names = {}
    exec(re.search(r"```python\n(.*?)```", README, re.DOTALL)[1], names)
    shown = capsys.readouterr().out
    session, turns = names["session"], names["talk"].turns
    text = session.generate("Once upon a time", n=50, temp=0.7).finish().text
    assert session.sampling == Sampling(repeat_penalty=1.1), "the checkpoint's own"
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    first, second = answers
    assert shown == f"{text}{first} length 50\n{second} length 50\n"
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2


def test_readme_op_does_what_its_reference_does(tmp_path, monkeypatch, guarded):
    block = textwrap.dedent(re.search(r"(    # ---- relu.*?return y\n)", README, re.DOTALL)[1])
    (tmp_path / "readme_op.py").write_text(f"from kernels import *\n{block}\n")
    monkeypatch.syspath_prepend(tmp_path)
    op = importlib.import_module("readme_op")
    x = randn(17, 100, dtype=torch.float16)
    assert torch.equal(op.relu(x), op.relu_ref(x))
    guarded()


# ---- models/tales


GOLDENS = {  # greedy text of models/tales in fp32
    "Once upon a time": "there lived a king who had a daughter who was so beautiful that no one could have her. "
    "The king was so much",
    "The fox said": ', "I am the fox, and the fox is the fox, and the fox is the fox, and the fox',
    "[INST] Tell me a story. [/INST]": "There was once a man who had three sons, and they were both very poor. "
    "One day the eldest said to the",
}


def test_tales_says_what_it_said():
    """Greedy text in fp32. A change here means that the weights or the arithmetic have changed."""
    model, tokenizer = (
        load(cli_module.DEFAULT_MODEL, dtype="fp32", device="cpu"),
        Tokenizer(cli_module.DEFAULT_MODEL),
    )
    for prompt, text in GOLDENS.items():
        ids = tokenizer.encode(prompt)
        assert tokenizer.decode(generate(model, ids, n=24, sampling=Sampling(temp=0))) == text, (
            prompt
        )


# ---- models/smollm2


SMOLLM2 = HERE / "models" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.skipif(not SMOLLM2.exists(), reason="without a network, make did not fetch SmolLM2")
def test_smollm2_says_what_transformers_says():
    """A published model, which others have quantised: ids of a chat, logits and greedy text."""
    file = dict(gguf_file=SMOLLM2.name)
    config = transformers.AutoConfig.from_pretrained(SMOLLM2.parent, **file)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    read_gguf(theirs, SMOLLM2)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2.parent, **file)
    model = load(SMOLLM2, dtype="fp32", device="cpu")
    tokenizer = Tokenizer(SMOLLM2)
    for question in ("What is the capital of France?", "Größe 🙂: who wrote Faust, and why?"):
        chat = conversation(question)
        ids = tokenizer.apply_chat_template(chat)
        text = their_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ids == their_tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            expected = theirs.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0]
            assert_close(logits_of(model, ids), theirs(torch.tensor([ids])).logits[0], 1e-4)
        answer = [*generate(model, ids, n=24, sampling=Sampling(temp=0))]
        assert answer == expected[len(ids) :].tolist(), question


if __name__ == "__main__":  # started by the tests of several ranks: "forks" or "gpus"
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    if mode == "gpus":
        check_gpus(folder)
    for size in (2, 4):
        torch.multiprocessing.start_processes(
            run_rank, (folder, size, free_port()), size, start_method="fork"
        )
