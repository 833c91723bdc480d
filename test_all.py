"""The tests of the files beside it, and what the tests in extra/, dev/ and training/ share with
them. `make test` runs them all; they need no GPU and no network. Inputs are random; each run prints
its seed.

The Triton kernels run on the GPU if there is one, otherwise in Triton's interpreter; either way
they are compiled ahead of time for every supported architecture."""

import ast
import contextlib
import copy as copy_module
import functools
import gc
import http.client
import importlib
import inspect
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gguf
import huggingface_hub
import hypothesis
import pytest
import sentencepiece
import tokenizers
import torch
import transformers
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
if not ON_GPU and "COMPILES" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels is imported

import attention
import bench
import experts
import formats
import fp8
import kernels
import launch
import products
import run
import sampling
import serve
from bits import groups, int4, others
from bits.int4 import INT4
from cards import cpu, hopper
from cards import sizes as launch_sizes
from formats import Matrix
from fp8 import E4M3, E5M2
from kernels import FORMATS, PRODUCTS
from launch import tl
from loading import checkpoint, random_model
from loading import config as config_module
from loading.checkpoint import load, read_config
from loading.names import formats_of, weight_bytes
from loading.place import DTYPES, pick_dtype
from loading.save import save
from model import BANNED, LENGTHS, PROMPT_CHUNK, Config, Llama, State, Timings, captured, generate
from ranks import exchange as exchange_module
from ranks.processes import Ranks
from sampling import Sampler, Sampling
from session import Conversation, Session
from speculation.proposals import Lookup
from talk import bench_flags
from talk import chat as chat_module
from talk import cli as cli_module
from talk.openai import UNSUPPORTED, APIError, CompletionRequest, parse_request
from tokenizer import Prompt, TextStream, Tokenizer, encode_continuation
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
    gc.freeze()  # what was imported stays; to look through it takes a quarter of a second each time
    if not ON_GPU:
        mend_interpreter()


@functools.cache  # once, though other test files have this fixture, too
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


FAMILIES = {  # what each adds to Llama 2, as its config.json has it, but small
    "mha": dict(num_attention_heads=4, num_key_value_heads=4),
    "gqa": dict(num_key_value_heads=2, rope_parameters=dict(rope_type="default", rope_theta=5e5)),
    "mqa, tied": dict(num_key_value_heads=1, tie_word_embeddings=True, rms_norm_eps=1e-3),
    "linear": dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)),
    "llama 3.2": dict(num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=RAMP, eos_token_id=[2, 3, 4]),
    "smollm2": dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=48, tie_word_embeddings=True),
    "granite code": dict(
        num_key_value_heads=2, attention_bias=True, mlp_bias=True, intermediate_size=128,
    ),
    "mistral 7b v0.1": dict(model="Mistral", num_key_value_heads=2, sliding_window=256),
    "mistral nemo": dict(model="Mistral", num_key_value_heads=2, sliding_window=None, head_dim=24),
    "qwen 2.5": dict(model="Qwen2", num_key_value_heads=2),
    "qwen 2.5, tied, longer": dict(
        model="Qwen2", num_key_value_heads=1, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=64),
    ),
    "qwen 3": dict(model="Qwen3", num_key_value_heads=2, head_dim=24),
    "qwen 3 moe": dict(
        model="Qwen3Moe", num_key_value_heads=2, head_dim=24, moe_intermediate_size=64,
        num_experts=6, num_experts_per_tok=3, norm_topk_prob=True,
    ),
    "mixtral": dict(model="Mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip

UNDIVIDED = "qwen 3 moe, shares of all experts"  # not of those that a token goes through
FAMILIES[UNDIVIDED] = FAMILIES["qwen 3 moe"] | dict(norm_topk_prob=False)


def hugging_face_model(vocab_size: int = 300, model: str = "Llama", **shape):
    transformers.utils.logging.disable_progress_bar()
    fields = dict(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
        initializer_range=0.3,  # large enough that logits differ and attention is sharp
    )  # fmt: skip
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


@torch.inference_mode()
def logits_of(model, ids, *sizes: int) -> torch.Tensor:
    """Of all tokens, evaluated so many at a time; all at once if no sizes are given."""
    state = State(model)
    ids = torch.as_tensor(ids, device=model.device)
    return torch.cat([model.forward(part, state).cpu() for part in ids.split(sizes or len(ids))])


def logits_of_prompts(model, prompts, *sizes: int) -> torch.Tensor:
    """Logits of several prompts. Errors in 16 bits are measured over these, since one prompt can
    mislead: where two keys are nearly tied, one of two equally exact models may err several times
    as much (in 4% of prompts over twice)."""
    return torch.cat([logits_of(model, ids, *sizes) for ids in prompts])


def nmse(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact.double()).square().sum() / exact.double().square().sum()).item()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert ours.shape == theirs.shape
    error = nmse(ours, theirs) ** 0.5
    assert error < tolerance, f"off by {error:.2g} of its size, of which {tolerance} is rounding"


def assert_refused(result: tuple[int, str, str], *said: str, code: int = 1) -> None:
    """A run (exit code, stdout, stderr) ended with nothing but an error of one line."""
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
    usual = dict(vocab_size=350, normalization_rule_name="identity", remove_extra_whitespaces=False)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2, **usual | options,
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    train_sentencepiece(folder)
    tokens = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    torch.manual_seed(0)
    hugging_face_model(tokens.vocab_size(), **FAMILIES["gqa"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny):
    """In fp32 on the CPU; not to be changed."""
    return load(tiny, dtype="fp32", device="cpu")


@pytest.fixture(scope="session")
def tiny_saved(tiny, tmp_path_factory) -> Path:
    return save(tiny, tmp_path_factory.mktemp("saved")).parent


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


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def objects(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def fails(error: BaseException):
    def fail(*_):
        raise error

    return fail


def conversation(*texts: str, system: str = "") -> list[dict]:
    """What the user and the assistant say in turn."""
    roles = itertools.cycle(("user", "assistant"))
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def spoil_tensors(change=lambda tensors: None, **metadata):
    """Change the tensors of a checkpoint in place, and the metadata of their file."""
    added = {name.replace("_", "-"): value for name, value in metadata.items()}

    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        with safe_open(file, "pt") as f:
            held = f.metadata() | added
        tensors = load_file(file)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, held)

    return spoil


def spoil_config(**fields):
    return lambda folder: edit(folder / "config.json", **fields)


def write(name: str, content: str | bytes):
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(raw)


def decode_in_graphs(monkeypatch, prompts: bool = False, ms=itertools.repeat(1.0)) -> None:
    """Without a GPU, as on one; but graphs run what they would have captured. prompts: whether they
    are graphs, as well. ms: what is measured between events, in turn."""

    def graph(run, device, reset, pool=None) -> SimpleNamespace:
        run()
        reset()
        return SimpleNamespace(replay=run, pool=lambda: None)

    event = SimpleNamespace(record=lambda _: None, synchronize=lambda: None)
    event.elapsed_time = lambda other: next(ms)
    monkeypatch.setattr(Llama, "uses_graphs", True)
    if not prompts:
        monkeypatch.setattr(Llama, "_padded_step", lambda self, T, state: self.step(T, state))
    for module in ("model", "speculation.proposals"):
        monkeypatch.setattr(f"{module}.captured", graph)
    for name, value in (("Event", event), ("synchronize", None), ("current_stream", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)


def examples(count: int, **strategies):
    """A property: a function that is called with so many draws of its arguments, the same in each
    run, since one text in a thousand has two tokens nearly as likely as each other. A draw that
    fails is made as small as it can be."""
    checks = list(hypothesis.HealthCheck)  # models take their time
    options = dict(deadline=None, database=None, derandomize=True, suppress_health_check=checks)
    settings = hypothesis.settings(max_examples=count, **options)
    return lambda check: settings(hypothesis.given(**strategies)(check))


def interrupted_at(monkeypatch, ops, call: int) -> None:
    """Ctrl-C comes while an op of a model is called for the `call`-th time, from 0 on, with what
    came before it done."""
    calls, attention_op = itertools.count(), ops.attention

    def attend(*arguments):
        if next(calls) == call:
            raise KeyboardInterrupt
        return attention_op(*arguments)

    monkeypatch.setattr(ops, "attention", attend)


# ---- kernels: compiled for every architecture, with no GPU present; first, since it takes longest


# and the kilobytes of shared memory that a program may use; 86 runs the code of 80, and has less
ARCHITECTURES = {80: 99, 89: 99, 90: 227, 120: 99}


def as_if_on(arch: int) -> None:
    """In a process where Triton compiles, compile as if for a GPU of this architecture."""
    from triton.runtime import driver

    target = launch.triton.backends.compiler.GPUTarget("cuda", arch, 32)
    current = dict(device=0, stream=0, target=target)
    functions = {f"get_current_{k}": lambda *_, value=v: value for k, v in current.items()}
    driver.set_active(SimpleNamespace(**functions))
    ours = (
        launch,
        launch_sizes,
        kernels,
        products,
        attention,
        hopper,
        sampling,
        fp8,
        int4,
        experts,
    )
    for module in (*ours, training, exchange_module):
        module.capability, module.processors = lambda device: arch, lambda device: 16
    one_tile = launch_sizes.FewSizes(16, 8, 4, 8, 1)  # which compiles fast
    products.few_sizes = lambda *key: one_tile if launch_sizes.few_sizes(*key) else None
    products.vector_sizes = lambda *_: launch_sizes.VectorSizes(2, 512, 2)
    products.stream_sizes = lambda *_: launch_sizes.StreamSizes(1, 2048, 3, 3)
    # CPUs with AMX have none with a scale for each row
    torch._scaled_mm = lambda *_, out, **options: out


def blank(N: int, K: int, format, dtype: torch.dtype) -> Matrix:
    if format is None:
        return Matrix(torch.zeros(N, K, dtype=dtype))
    return Matrix(format.empty(N, K, DEVICE), format)


def launch_ops(names, dtype, T: int, heads=(8, 8, 128), format=None, ops=kernels.fused, **extra):
    for op in names:
        arguments = op_arguments(op, dtype, heads, T, 300, 500, **extra)[0]
        getattr(ops, op)(*encoded(arguments, format))


def launch_attention(dtype: torch.dtype) -> None:
    """With one token, a few and a prompt; also of a cache in 8 bits."""
    attend = partial(launch_ops, ["attention"], dtype)
    for T, heads in ((1, (8, 8, 128)), (3, (16, 2, 128)), (512, (8, 8, 128))):
        attend(T, heads)
    if dtype == torch.float16:
        for T, heads in ((96, (8, 8, 128)), (1, (4, 2, 256)), (96, (4, 2, 256))):
            attend(T, heads)
        attend(96, ops=kernels.ops("triton", "fp16"))
    k, v = (torch.zeros(8, 500, 64, dtype=torch.int8) for _ in range(2))
    for T in (1, 96):
        x, layer, state = op_arguments("rmsnorm_qkv_rope", dtype, (8, 8, 64), T, 300, 500)[0]
        state = changed(state, k=(None, k), v=(None, v))
        q = kernels.fused.rmsnorm_qkv_rope(x, layer, state)
        kernels.fused.attention(q, layer, state)
    attention.decode_caches(k, v, state.device_pos, 96, dtype)


def launch_linear_add(dtype: torch.dtype, T: int, format, bias=None) -> None:
    w = replace(blank(48, 1024, format, dtype), bias=bias)
    x, residual = torch.zeros(T, 1024, dtype=dtype), torch.zeros(T, 48, dtype=dtype)
    kernels.fused.linear_add(x, w, residual)


def launch_exchange(dtype: torch.dtype, format) -> None:
    """What several ranks do with their parts of a product."""
    new = partial(torch.zeros, dtype=dtype)
    w, output = blank(512, 1024, format, dtype), blank(600, 512, format, dtype)
    entries = exchange_module.Shared(torch.zeros(3, 2, 16 * 512, dtype=torch.int64), [0, 0])
    terms = exchange_module.Shared(new(2, 8 * 512), [0, 0])
    flags = exchange_module.Shared(torch.zeros(8, 2, dtype=torch.int32), [0, 0])
    exchange = exchange_module.Exchange([w, output], 0, entries, terms, flags)
    for x in (new(1, 1024), new(3, 1024)):
        if exchange.sends(x, w, None):
            exchange.linear_add(x, w, new(len(x), 512))
    exchange.add_terms(w, new(8, 512), False)
    exchange.rmsnorm_linear(new(1, 512), new(512), output, 1e-5, torch.zeros(1, 2 * 600 - 1))


def launch_experts(dtype: torch.dtype, T: int, format) -> None:
    x, layer, state = expert_arguments(T, 6, 2, 512, 256, dtype)
    layer.w13, layer.w2 = blank(6 * 512, 512, format, dtype), blank(6 * 512, 256, format, dtype)
    routes = kernels.fused.route(x, layer, state)
    h = kernels.fused.rmsnorm_swiglu(x, layer, state, routes)
    kernels.fused.linear_add(h, layer.w2, x, routes)


def launch_products(dtype: torch.dtype) -> None:
    """With one token, a few and a prompt; with norms of heads, other ranks and experts."""
    for T in (1, 3, 96):
        launch_ops([op for op in OPS if op != "attention"], dtype, T)
    for T, format in itertools.product((1, 3, 60), (INT4, E4M3)):
        launch_linear_add(dtype, T, format)
    qk_norm = torch.zeros(2, 128, dtype=dtype)
    for T in (1, 96):
        launch_ops(["rmsnorm_qkv_rope"], dtype, T, (8, 2, 128), qk_norm=qk_norm)
    launch_exchange(dtype, None)
    for T, format in ((1, None), (1, INT4), (3, E4M3), (40, None)):
        launch_experts(dtype, T, format)
    for norm in (None, torch.zeros(512, dtype=dtype)):
        products.encode_rows(torch.zeros(3, 512, dtype=dtype), norm, 1e-5)


def launch_8_bit_floats() -> None:
    """What else depends on how their matrices are decoded and multiplied."""
    dtype = torch.float16
    for T, format in itertools.product((1, 3, 60), (E4M3, E5M2, others.E4M3_128)):
        launch_linear_add(dtype, T, format)
    launch_linear_add(dtype, 13, E4M3)
    launch_ops(["rmsnorm_qkv_rope", "rmsnorm_linear"], dtype, 1, format=E4M3)
    launch_exchange(dtype, E4M3)
    for T in (1, 40):
        launch_experts(dtype, T, E4M3)


def launch_formats() -> None:
    """Matrices in all other formats."""
    dtype = torch.float16
    for T, format in itertools.product((1, 3, 60), (OWN, *FILE_FORMATS)):
        launch_linear_add(dtype, T, format)
    for T, format in ((1, None), (1, INT4), (3, INT4)):  # a kernel each
        launch_linear_add(dtype, T, format, bias=torch.zeros(48, dtype=dtype))
    x, norm = torch.zeros(1, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    layer = SimpleNamespace(ffn_norm=norm, w13=blank(48, 4096, INT4, dtype))  # two blocks of a row
    kernels.fused.rmsnorm_swiglu(x, layer, SimpleNamespace(norm_eps=1e-5))
    products.recode(layer.w13, *E4M3.empty(48, 4096, DEVICE))
    launch_experts(dtype, 40, INT4)


def launch_sampling() -> None:
    ids = [torch.zeros(512, dtype=torch.int32) for _ in range(2)]
    one = torch.zeros(1, dtype=torch.int32)
    penalised = dict(temp=0, repeat_penalty=1.1)
    # rows and logits of each: parts of 4096 have fewer logits than a program has threads
    cases = [(1, 32000, more) for more in (dict(), penalised, dict(top_k=1000), dict(top_p=1))]
    cases += [(1, 4096, dict()), (5, 32000, dict(top_k=0, top_p=1))]
    for rows, V, settings in cases:
        sampler = Sampler(DEVICE, Sampling(**settings))
        kernels.fused.sample(torch.zeros(rows, V), *ids, one, sampler)


def compile_kernels(arch: int) -> None:
    """Compile every kernel for an architecture, to machine code that fits into shared memory."""
    from training.test_training import launch_training

    compiled, waits_first, with_fp16_sums = set(), set(), set()

    def start(kernel, grid, device, *arguments, **constants) -> None:
        if arch == 89 and not re.search("native|e5m2", str(constants)):
            return
        binary, name = kernel.warmup(*arguments, grid=grid, **constants), kernel.__name__
        ptx, shared, what = binary.asm["ptx"], binary.metadata.shared, (name, constants)
        compiled.add(name)
        assert binary.asm["cubin"] and shared <= ARCHITECTURES[arch] * 1024, (what, shared)
        if name == "_hopper_attention_kernel":
            assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
        else:
            assert ("griddepcontrol.wait" in ptx) == (arch >= 90), what
        # The product with w13: launch.py says why it waits before it lets the next kernel start
        if arch >= 90 and constants.get("SUMMED") == 1 and arguments[6] is not None:
            order = re.findall(r"griddepcontrol\.(\w+)", ptx)
            assert order == ["wait", "launch_dependents", "wait"], (order, what)
            waits_first.add(name)
        if constants.get("FP16_SUMS"):
            with_fp16_sums.add(name)
            fp16_sums = "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"
            assert arch >= 90 or fp16_sums in ptx, "sums in half precision are none"
        if constants.get("PENALISE"):  # through memory, from thread to thread
            accesses = re.findall(r"\b(ld\.global|st\.global|bar\.sync)", ptx)
            unordered = re.findall("st.global ld.global", " ".join(accesses))
            assert not unordered, "logits are read after they are written, without a barrier"

    # Triton's cache on disk tells kernels apart by the functions that they call
    others = replace(E4M3, values=fp8.native_values), products.STORE_ROWS._replace(prepare=None)
    for one, other in zip((E4M3, products.STORE_ROWS), others):
        assert one.cache_key != other.cache_key
    as_if_on(arch)
    launch.run_or_compile = hopper.run_or_compile = start
    launch_attention(torch.float16)
    launch_8_bit_floats()
    if arch == 89:
        assert "_vector_kernel" in compiled
        return
    launch_products(torch.float16)
    launch_sampling()
    launch_training(torch.float16, every_shape=arch == 80)
    if arch == 80:
        launch_formats()
        launch_products(torch.bfloat16)
        launch_training(torch.bfloat16, every_shape=True)
    if arch in (80, 90):
        launch_attention(torch.bfloat16)
    modules = (kernels, products, attention, experts, sampling, exchange_module, training)
    modules += (hopper,) if arch == 90 else ()
    every = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert compiled == every, "one of the functions launch_... has to launch these as well"
    assert with_fp16_sums == {"_attention_kernel"}
    assert arch < 90 or waits_first == {"_vector_kernel", "stream_kernel"}


def compile_in_processes() -> None:
    """One for each architecture, which have in common what takes long to import."""
    process_of = multiprocessing.get_context("fork").Process
    processes = [process_of(target=compile_kernels, args=(arch,)) for arch in ARCHITECTURES]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


def test_kernels_compile():
    """Each kernel that launch.json lets a card run, with its sizes where they decide how much shared
    memory there has to be.

    For sm_80: all kernels in fp16 and in bf16, and in fp16 all formats of weights. Elsewhere only
    what the architecture may refuse: for 90 and 120 all kernels, since they wait for the kernel
    before and pass through other stages of the compiler, and all that touches 8-bit floats, for
    which they have instructions; for 90 also attention in bf16, since Hopper has other instructions
    for products; for 89, which is like 80 otherwise, 8-bit floats. The formats of files decode by
    instructions that all have. 86 runs the machine code of 80, which gets by with the shared memory
    that 86 has."""
    flags = {"COMPILES": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", "import test_all; test_all.compile_in_processes()"]
    done = subprocess.run(command, cwd=HERE, env=os.environ | flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


# ---- model.py


def read_config_like(**fields) -> Config:
    heads = dict(n_heads=4, n_kv_heads=4, head_dim=8)
    base = dict(dim=32, n_layers=1, hidden_dim=64, vocab_size=100, norm_eps=1e-5, **heads)
    return Config(**base | fields)


MOST_PROBABLE = Sampling(temp=0)


def greedy(model, prompt: list[int], n: int, state=None, **options) -> list[int]:
    return list(generate(model, prompt, state, n, Sampling(temp=0), **dict(eos=[]) | options))


def text_of(model, settings: Sampling, n: int, state=None, **options) -> list[int]:
    return list(generate(model, [1, 5, 9], state, n, settings, **dict(eos=[]) | options))


def other_model(model):
    """One of the same shapes with other weights."""
    other = copy_module.deepcopy(model)
    for matrix in other.weights.matrices:
        matrix.data.add_(0.3 * matrix.data.std() * torch.randn_like(matrix.data))
    return other


@pytest.mark.parametrize("where", ["on a CPU", "in graphs"])
def test_calls_on_one_state(tiny_model, where, monkeypatch):
    """Prompts that have something in common with what came before, texts that nobody reads to the
    end, Ctrl-C within an op, a full context: each text is that of a new state, and of each prompt
    only what the state has not seen is evaluated, and its last token."""
    if where == "in graphs":
        decode_in_graphs(monkeypatch)
    monkeypatch.setitem(PROMPT_CHUNK, "cpu", 4)
    monkeypatch.setattr("model.LENGTHS", (4,))
    settings = [dict(), dict(temp=0), dict(repeat_penalty=1.5), dict(top_k=0, seed=5)]
    call = st.tuples(
        st.integers(0, 9), st.lists(st.integers(3, 9), max_size=6), st.integers(-1, 5),
        st.integers(1, 6), st.integers(0, 50), st.sampled_from(settings),
    )  # fmt: skip

    @examples(25, size=st.sampled_from([17, 40]), calls=st.lists(call, min_size=2, max_size=5))
    def check(size, calls):
        state, seen = State(tiny_model, size), [1]
        for kept, new, n, taken, stops, sampled in calls:
            prompt = [1, *seen[1 : 1 + kept], *new]
            known = sum(itertools.takewhile(bool, map(int.__eq__, seen[: state.pos], prompt)))
            if prompt != state.prompt:  # the latest one, whose logits are kept
                known = min(known, len(prompt) - 1)
            timings, got, finished = Timings(), [], False
            options = dict(n=n, sampling=Sampling(**sampled), eos=[])
            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                interrupted_at(patch, tiny_model.ops, stops)
                text = generate(tiny_model, prompt, state, timings=timings, **options)
                with contextlib.closing(text):
                    got.extend(itertools.islice(text, taken))
                finished = True
            seen = prompt + got
            alone = State(tiny_model, size)
            expected = [*generate(tiny_model, prompt, alone, **options)][:taken]
            assert got == (expected if finished else expected[: len(got)]), "not as a new state's"
            assert state.pos == int(state.device_pos) >= known
            assert state.tokens[: state.pos].tolist() == seen[: state.pos]
            assert (timings.new_tokens, timings.steps) == (len(got), max(len(got) - 1, 0))
            if finished:
                assert state.pos == len(prompt) + max(len(got) - 1, 0)
                assert timings.prompt_tokens == len(prompt) - known, "not what was new"
            evaluated = min(state.pos, alone.pos)
            for ours, theirs in zip(state.k + state.v, alone.k + alone.v):
                assert ours[:, :evaluated].allclose(theirs[:, :evaluated], atol=1e-3)

    check()


def test_an_ignored_eos_is_never_sampled(tiny_model):
    every_but_7 = {*range(tiny_model.config.vocab_size)} - {7}
    options = dict(n=5, eos=every_but_7, ignore_eos=True)
    for settings in (Sampling(temp=0), Sampling(), Sampling(temp=INF, top_k=0, top_p=1, min_p=0)):
        assert [*generate(tiny_model, [1, 5], sampling=settings, **options)] == [7] * 5
    state = State(tiny_model)
    greedy(tiny_model, [1, 5], 1, state, eos=every_but_7, ignore_eos=True)
    of_7 = dict(eos=[7], ignore_eos=True)
    alone = greedy(tiny_model, [1, 5], 5, **of_7)
    assert greedy(tiny_model, [1, 5], 5, state, **of_7) == alone, "earlier bans are lifted"
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


def test_accumulate_reaches_the_products(tiny, monkeypatch):
    seen, product = [], kernels.library_product

    def library_product(multiplied, accumulate, *others):
        seen.append(accumulate)
        return product(multiplied, accumulate, *others)

    monkeypatch.setattr(kernels, "library_product", library_product)
    for accumulate in ("auto", "fp32"):
        options = dict(dtype="fp32", device=DEVICE.type, backend="triton", accumulate=accumulate)
        logits_of(load(tiny, **options), [1, 2, 3])
        assert seen == [accumulate] * 9, "four of each of two layers, and the logits"
        seen.clear()


# roundings of 2^-12, 2^-9
@pytest.mark.parametrize("dtype, limit", [("fp32", 1e-4), ("fp16", 0.01), ("bf16", 0.05)])
def test_fused_model_is_the_reference_model(tiny, dtype, limit):
    which = (("fp32", "torch"), (dtype, "torch"), (dtype, "triton"))
    models = [load(tiny, dtype=d, device=DEVICE.type, backend=b) for d, b in which]
    prompts = torch.randint(3, 300, (1 if dtype == "fp32" else 8, 19))
    right, by_torch, ours = (logits_of_prompts(model, prompts, 17, 1, 1) for model in models)
    assert_close(by_torch, right, limit)
    assert nmse(ours, right) < 2 * nmse(by_torch, right) + 1e-10, "less exact than torch's ops"
    if dtype == "fp32":
        for settings in (Sampling(seed=SEED), Sampling(temp=0, repeat_penalty=1.3)):
            by_torch, ours = (text_of(model, settings, 2) for model in models[1:])
            assert ours == by_torch


@pytest.mark.parametrize("how", ["generate", "single steps", "chunks"])
def test_no_step_sees_an_old_position(tiny, how):
    """Keys and values after thousands of steps equal those of torch's ops, which do not overlap."""
    steps = 3000 if ON_GPU else 4
    sizes = [1] * steps
    if how == "chunks":
        sizes = random.choices((1, 2, 17, 40), k=steps // 20 or 2)
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
    """E4M3 has no infinity; torch takes a row of NaN scores for a masked one."""
    sound = load_file(copy / "model.safetensors")
    options = dict(dtype="fp32", device=DEVICE.type, ctx_size=16, backend=backend, kv_fp8=kv_fp8)
    # the last is the output matrix
    names = sorted((name for name in sound if "layers.1" not in name), reverse=True)
    spoiled = itertools.product(names, (NAN, INF, -INF))
    if backend == "triton":
        projection = "model.layers.0.self_attn.{}_proj.weight".format
        spoiled = zip(map(projection, "qkv"), (NAN, NAN, INF))
    for name, bad in spoiled:
        tensors = sound | {name: sound[name].clone()}
        tensors[name].view(-1)[5 + 3 * 64 * (sound[name].dim() - 1)] = bad
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        model = load(copy, **options)
        for prompt in ([3], [1, 3, 6]):
            with pytest.raises(RuntimeError, match=f"not finite: {name} .*holds NaN or inf"):
                greedy(model, prompt, 1)
    with pytest.raises(ValueError, match=f"{name} in model.safetensors.*NaN or inf"):
        load(copy, device="cpu", format="e4m3")


@BACKENDS
@pytest.mark.parametrize("kv_fp8", [False, True])
def test_cache_not_finite(tiny, kv_fp8, backend):
    options = dict(dtype="fp32", device=DEVICE.type, ctx_size=16, backend=backend, kv_fp8=kv_fp8)
    model = load(tiny, **options)
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


def test_padded_prompts_are_the_prompts(tiny, monkeypatch):
    """The first of each padded length is captured, the others are replayed. Where the context ends,
    what was before is evaluated again. After Ctrl-C nothing has changed."""
    model = load(tiny, device=DEVICE.type, dtype="fp32")
    # what stands beyond the prompt counts for nothing, not even as 0 * NaN
    model.weights.embedding = model.weights.embedding.clone()
    model.weights.embedding[0] = torch.nan
    if not ON_GPU:
        decode_in_graphs(monkeypatch, prompts=True)
    monkeypatch.setattr("model.LENGTHS", (1, 8, 16, 20))
    monkeypatch.setitem(PROMPT_CHUNK, DEVICE.type, 16)
    evaluate = Llama._forward

    def within_the_context(self, T, state, logits, row=None):
        assert state.pos + T <= state.size, "a kernel would write into the next head"
        return evaluate(self, T, state, logits, row)

    monkeypatch.setattr(Llama, "_forward", within_the_context)
    call = st.tuples(st.integers(0, 60), st.integers(1, 60), st.integers(0, 20))
    calls = st.lists(call, min_size=3, max_size=6)

    @examples(4 if ON_GPU else 40, size=st.sampled_from([48, 61]), calls=calls)
    def check(size, calls):
        state, plain = State(model, size), State(model, size)
        for back, T, stops in calls:
            for one in (state, plain):
                one.truncate(max(0, one.pos - back))
            before, finished = state.pos, False
            ids = torch.randint(3, 300, (min(T, size - before),), device=DEVICE)
            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                if not ON_GPU:
                    interrupted_at(patch, model.ops, stops)
                model.prefill(ids.tolist(), state)
                finished = True
            done = state.pos - before
            assert int(state.device_pos) == state.pos and (done == len(ids) or not finished)
            if done:
                exact = model.forward(ids[:done], plain)[-1]
                assert nmse(state.logits, exact) < 1e-6 or not finished
            for ours, theirs in zip(state.k + state.v, plain.k + plain.v):
                same = ours[:, : state.pos].allclose(theirs[:, : state.pos], atol=1e-3)
                assert same, f"{T} tokens at {before} of {size} have changed other positions"

    with torch.inference_mode():
        check()


@pytest.mark.parametrize("T, graphs, at", [
    (36, {16, 20}, [16, 36]), (37, {16, 8}, [16, 32, 37]), (20, {20}, [20]), (7, {8}, [7]), (1, {1}, [1]),
])  # fmt: skip
def test_long_prompts_are_graphs(tiny_model, monkeypatch, T, graphs, at):
    """Chunks of 16 tokens; what remains after them is not a chunk of its own if it is short."""
    decode_in_graphs(monkeypatch, prompts=True)
    monkeypatch.setattr("model.LENGTHS", (1, 8, 16, 20))
    monkeypatch.setitem(PROMPT_CHUNK, "cpu", 16)
    state, done = State(tiny_model, 64), []
    with torch.inference_mode():
        tiny_model.prefill([*range(3, 3 + T)], state, lambda n, total: done.append((n, total)))
    assert {length for _, length in state.graphs} == graphs
    assert done == [(n, T) for n in at]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_model_on_another_gpu(tiny):
    """Whatever the current device is: in another thread it is the first one again."""
    first, second = (load(tiny, dtype="fp32", device=f"cuda:{i}") for i in range(2))
    expected = greedy(first, [1, 5, 9], 20)
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(greedy, second, [1, 5, 9], 20).result()
    assert elsewhere == greedy(second, [1, 5, 9], 20) == expected


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
    reset = lambda: resets.append((len(seen), gc.isenabled()))
    captured(lambda: seen.append(gc.isenabled()), DEVICE, reset)
    assert seen == [True, False] and resets == [(1, True), (2, True)] and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        captured(lambda: 1 / gc.isenabled(), DEVICE)
    assert gc.isenabled()


@pytest.mark.parametrize("top_k, other_top_k", [(5, 3), (40, 30)], ids=["listed", "sorted"])
def test_other_sampling_needs_no_other_graph(top_k, other_top_k, tiny, monkeypatch):
    """A graph is replayed with the arguments of the capture, of which numbers are read anew."""
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
        replay = lambda: [launch() for launch in launches] + [model.step(1, state)]
        return SimpleNamespace(replay=replay)

    model = load(tiny, dtype="fp32", device=DEVICE, backend="torch", ctx_size=64)
    state = State(model)
    first = Sampling(temp=2.0, top_k=top_k, top_p=0.9, repeat_penalty=1.1, repeat_last_n=30)
    state.sampler.set(first)
    assert state.sampler.switches(model.config.vocab_size).sorts == (top_k == 40)
    changes = dict(
        seed=(SEED, (1 << 63) - 1), temp=(1.3, 1e-9), top_k=(other_top_k,), top_p=(0.4,),
        min_p=(0.3, 0), repeat_penalty=(1.9,), repeat_last_n=(20,),
    )  # fmt: skip
    every = [replace(first, **{name: value}) for name in changes for value in changes[name]]
    every = [first, *every]
    expected = [text_of(model, settings, 8) for settings in every]
    assert len({*map(tuple, expected)}) > 6
    model.ops = SimpleNamespace(**vars(model.ops) | dict(sample=kernels.fused.sample))
    monkeypatch.setattr(sampling, "launch", recording(launch.launch))
    monkeypatch.setattr(sampling, "_find_floors", recording(sampling._find_floors))
    decode_in_graphs(monkeypatch)
    monkeypatch.setattr("model.captured", captured)
    assert [text_of(model, settings, 8, state) for settings in every] == expected
    assert len(captures) == 1
    for change in (dict(temp=0), dict(top_p=1), dict(top_k=100), dict(repeat_penalty=1.1)):
        other = Sampling(**change)
        text_of(model, other, 1, state)
    text_of(model, other, 1, State(model))
    text_of(model, other, 1, state, eos=[3], ignore_eos=True)
    assert len(captures) == 7 and len(state.graphs) == 1, "one graph of a kind is kept"


# ---- kernels.py and attention.py: the op tables, and each op against its reference


GUARD, MARGIN = 77.0, 64


@pytest.fixture
def guarded(monkeypatch):
    """Outputs are filled with NaN, between guard values. Returns a check that these are intact."""
    buffers, original = [], torch.Tensor.new_empty  # the interpreter calls it too, with a device

    def new_empty(self, *shape, **options) -> torch.Tensor:
        if "device" in options:
            return original(self, *shape, **options)
        count = torch.Size(shape).numel()
        buffers.append(original(self, count + 2 * MARGIN, **options).fill_(GUARD))
        poison = NAN if buffers[-1].is_floating_point() else -1
        return buffers[-1][MARGIN : MARGIN + count].fill_(poison).view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: new_empty(x, *x.shape, **options))

    def check(allocates: bool = True) -> None:
        assert buffers or not allocates, "the op allocates its output in a way that is not guarded"
        for buffer in buffers:
            guards = torch.cat((buffer[:MARGIN], buffer[-MARGIN:]))
            assert (guards.double() == GUARD).all(), "written outside of the output"

    return check


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(DEVICE, dtype)


def dense(m: Matrix) -> Matrix:
    return Matrix(m.dense().float(), bias=None if m.bias is None else m.bias.float())


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


def as_fp32(arguments):
    """An op's arguments in fp32; matrices decoded."""

    def change(value):
        if isinstance(value, Matrix):
            return dense(value)
        return value.float() if torch.is_tensor(value) and value.is_floating_point() else value

    return mapped(arguments, change)


def cloned(arguments):
    return mapped(arguments, lambda a: a.clone() if torch.is_tensor(a) else a)


def encoded(arguments, format):
    encode = lambda w: Matrix(format.encode(w.data), format, bias=w.bias)
    return mapped(arguments, lambda a: encode(a) if format and isinstance(a, Matrix) else a)


def tensors_in(arguments: tuple) -> dict[str, torch.Tensor]:
    """By "place of the argument.field"; of keys and values, those of the second layer."""
    fields = lambda a: vars(a) if isinstance(a, SimpleNamespace) else {"": a}
    values = {f"{i}.{n}": v for i, a in enumerate(arguments) for n, v in fields(a).items()}
    values = {n: v[1] if isinstance(v, tuple) else v for n, v in values.items()}
    return {name: value for name, value in values.items() if torch.is_tensor(value)}


def op_arguments(
    op: str,
    dtype: torch.dtype,
    heads: tuple,
    T: int,
    before: int,
    S: int = 0,
    biased=False,
    **layer,
) -> tuple[tuple, tuple]:
    """Arguments of an op for `heads` (H, KH, D), and which of them it writes in place, as
    tensors_in names them. biased: matrices have a bias. layer: fields that not every layer has. It
    is the second of a model."""
    H, KH, D = heads
    C, F, V, S = 8 * (2 * H + 1), 52, 101, S or before + T + 9

    def matrix(rows: int, columns: int) -> Matrix:
        bias = randn(rows, dtype=dtype, scale=10) if biased else None
        return Matrix(randn(rows, columns, dtype=dtype, scale=columns**-0.5), bias=bias)

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
        return SimpleNamespace(**dict(index=1, qk_norm=None, router=None) | weights | layer)

    qkv = lambda: of_layer(attention_norm=norm, wqkv=matrix((H + 2 * KH) * D, C))
    ffn = lambda: of_layer(ffn_norm=norm, w13=matrix(2 * F, C))
    blank = lambda columns, dtype: torch.full((T, columns), NAN, dtype=dtype, device=DEVICE)
    half = functools.partial(randn, dtype=dtype)
    return {
        "embedding": lambda: ((T, half(V, C), state), ()),
        "rmsnorm": lambda: ((x, norm, 1e-5), ()),
        "rmsnorm_qkv_rope": lambda: ((x, qkv(), state), ("2.k", "2.v")),
        "attention": lambda: ((half(T, H, D), of_layer(), state), ()),
        "linear_add": lambda: ((half(T, F), matrix(C, F), half(T, C)), ("2.",)),
        "linear_store": lambda: ((half(T, F), matrix(C, F), blank(C, dtype)), ("2.",)),
        "rmsnorm_swiglu": lambda: ((x, ffn(), state), ()),
        "rmsnorm_linear": lambda: (
            (x, norm, matrix(V, C), state, blank(V, torch.float32)),
            ("4.",),
        ),
    }[op]()


# sampling and routing are tested below, by what they choose
OPS = [name for name in vars(kernels.fused) if name not in ("sample", "route")]
# for several tokens: norm, the library's matmul, output; half a place each
ROUNDED_TWICE = {"rmsnorm_swiglu": 1.5**2}
SHAPES = (2, 2, 16), (4, 1, 24), (6, 2, 8), (1, 1, 136)
DTYPE_AND_HEADS = [(torch.bfloat16, (4, 1, 24)), *((torch.float16, heads) for heads in SHAPES)]


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
        pairs = {"y": (ours, right)}
        for name in written:
            pairs[name] = (mine[name][:, new].clone(), exact[name][:, new])
            if new.stop:  # other positions
                mine[name][:, new] = before[name][:, new]
        for name, (a, b) in pairs.items():
            assert a.shape == b.shape
            errors.setdefault(name, []).append(nmse(a, b))
        for name, was in before.items():
            same = name in written and new.stop is None or torch.equal(mine[name], was)
            assert same, f"{op} changed {name} where it should not"
    for name, found in errors.items():
        assert sum(found) / len(found) < limit, (op, name, found)


def state_of_experts(k: int, norm_topk: bool = True, eps: float = 1e-5) -> SimpleNamespace:
    options = dict(norm_eps=eps, norm_topk=norm_topk, scratch=launch.Scratch(DEVICE))
    return SimpleNamespace(experts_per_token=k, **options)


def expert_arguments(
    T: int, E: int, k: int, C: int, F: int, dtype=torch.float32, format=None
) -> tuple:
    """x, a layer with experts, and a state."""
    matrix = lambda N, K: Matrix(randn(N, K, dtype=dtype, scale=K**-0.5))
    layer = SimpleNamespace(
        ffn_norm=(torch.rand(C, device=DEVICE) + 0.5).to(dtype),
        router=matrix(E, C),
        router_gain=1.0,
        w13=encoded(matrix(E * 2 * F, C), format),
        w2=encoded(matrix(E * C, F), format),
    )
    return randn(T, C, dtype=dtype), layer, state_of_experts(k)


def experts_errors(arguments: tuple, dtype: torch.dtype, accumulate: str) -> tuple[float, float]:
    """Of the fused ops rmsnorm_swiglu and linear_add, each against its reference in fp32."""
    x, layer, state = arguments
    exact, exact_layer = as_fp32((x, layer))
    fused = kernels.ops("triton", accumulate)
    routes = fused.route(x, layer, state)
    chosen = kernels.reference.route(exact, exact_layer, state)
    T, k = chosen.ids.shape
    # a prompt's logits are products of 16 bits, so that experts which nearly tie may change places
    same = (routes.ids == chosen.ids).double().mean()
    assert same == 1 if T <= experts.MAX_FEW else same > 0.95
    assert torch.allclose(
        routes.weights, chosen.weights, atol=1e-2 if T > experts.MAX_FEW else 1e-5
    )
    h = fused.rmsnorm_swiglu(x, layer, state, routes)
    right = kernels.reference.rmsnorm_swiglu(exact, exact_layer, state, routes)
    residual = randn(T, x.shape[1], dtype=dtype, scale=0.1)
    added = kernels.reference.linear_add(h.float(), exact_layer.w2, residual.float(), routes)
    y = fused.linear_add(h, layer.w2, residual, routes)
    return nmse(h, right), nmse(y, added)


def check_experts(arguments: tuple, dtype: torch.dtype, form) -> None:
    # norm, h and what a slot adds are rounded; with 4 bits also the decoded weights or, in a single
    # token, the sums
    limit = ONE_UNIT[dtype] * 1.5**2
    if form is INT4:
        limit = 5e-5 + ONE_UNIT[dtype]
    errors = experts_errors(arguments, dtype, "fp32")
    assert max(errors) < limit, (errors, form)


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
    given_output = ("linear_add", "linear_store", "rmsnorm_linear")
    guarded(allocates=op not in given_output)


@pytest.mark.parametrize("T, before", TOKENS_AND_BEFORE)
@pytest.mark.parametrize("dtype, heads", DTYPE_AND_HEADS, ids=str)
def test_op_equals_its_reference_with_bias_and_norms(dtype, heads, T, before, guarded):
    qk_norm = randn(2, heads[2], dtype=dtype, scale=30)
    # in a prompt, norm, matmul, its norm and q are rounded
    limit = ONE_UNIT[dtype] * (1 if T == 1 else 2.5**2)
    cases = [(op, dict(biased=True)) for op in PRODUCTS]
    cases += [
        ("rmsnorm_qkv_rope", dict(qk_norm=qk_norm, biased=biased)) for biased in (False, True)
    ]
    for (op, extra), format in itertools.product(cases, (None, E4M3) if T < 17 else (None,)):
        # with what the one before left in scratch. Sums in half precision, which a GPU makes of a
        # token's packed products, leave an error that differs between draws
        count = 8 if ON_GPU and T == 1 and format else 1
        draw = partial(op_arguments, op, dtype, heads, T, before, **extra)
        draws = [encoded(draw()[0], format) for _ in range(count)]
        equals_reference(op, draws, draw()[1], limit)
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
    *itertools.product((1,), ((2, 32, 4), (4, 16, 2), (8, 64, 4))),
    *itertools.product((3, 16), ((16, 2, 2, 4, 1), (32, 4, 2, 8, 2), (64, 1, 4, 16, 3))),
], ids=str)  # fmt: skip
def test_products_do_not_depend_on_launch_sizes(T, sizes, monkeypatch):
    monkeypatch.setattr(products, "vector_sizes", lambda *_: launch_sizes.VectorSizes(*sizes))
    monkeypatch.setattr(products, "few_sizes", lambda *_: launch_sizes.FewSizes(*sizes))
    cases = [(op, *op_arguments(op, torch.float16, (4, 1, 8), T, 5)) for op in PRODUCTS]
    half = functools.partial(randn, dtype=torch.float16)
    if T > 1:  # rows of several tiles
        arguments = (half(T, 1048), Matrix(half(40, 1048, scale=0.03)), half(T, 40))
        cases.append(("linear_add", arguments, ("2.",)))
    for (op, arguments, written), format in itertools.product(cases, (None, E4M3, E5M2)):
        limit = ONE_UNIT[torch.float16] * ROUNDED_TWICE.get(op, 1)
        equals_reference(op, [encoded(arguments, format)], written, limit)
    if T > 1:
        check_experts(expert_arguments(T, 5, 2, 72, 88, torch.float16), torch.float16, None)


def check_attention(
    heads: tuple, T: int, before: int, kv_fp8=False, runs=1, dtype=torch.float16
) -> None:
    """It equals its reference, whatever comes after the T tokens or was left in scratch."""
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
    ((2, 2, 16), (4, 16, 4, 1, 0)), ((8, 1, 32), (64, 16, 4, 1, 0)), ((4, 2, 136), (4, 16, 4, 1, 0)),
    ((2, 2, 16), (64, 16, 4, 1, 0)), ((8, 1, 32), (1, 32, 4, 2, 64)), ((4, 2, 136), (1, 32, 4, 2, 64)),
], ids=str)  # fmt: skip
def test_attention_does_not_depend_on_launch_sizes(heads, sizes, monkeypatch):
    monkeypatch.setattr(attention, "split_sizes", lambda *_: launch_sizes.SplitSizes(*sizes))
    for T, before in ((1, 0), (1, 200), (3, 150)):
        check_attention(heads, T, before, runs=2)


FEW_ROWS = [(1, 64, 4, 1, 64), (4, 32, 2, 1, 128), (64, 64, 4, 1, 0)]


@pytest.mark.parametrize("sizes", FEW_ROWS if ON_GPU else FEW_ROWS[:1], ids=str)
@pytest.mark.parametrize("heads", [(2, 1, 24), (3, 1, 64), (14, 2, 64), (2, 2, 128)], ids=str)
@pytest.mark.parametrize("kv_fp8", [False, True])
def test_attention_of_few_rows(kv_fp8, heads, sizes, monkeypatch):
    """hopper.py's kernel on a GPU, in the interpreter those that do the same."""
    monkeypatch.setattr(attention, "few_rows_sizes", lambda device: launch_sizes.SplitSizes(*sizes))
    rows = ((16, 700), (64, 500), (128, 300)) if ON_GPU else ((16, 300), (64, 150))
    most = [(count * heads[1] // heads[0], before) for count, before in rows]
    for T, before in [(1, 90), (2, 0), (4, 61), (3, 250), (5, 200), *most]:
        check_attention(heads, T, before, kv_fp8, runs=2 if ON_GPU else 1)


@pytest.mark.parametrize("kv_fp8", [False, True])
@pytest.mark.parametrize("start_pos", [0, 1, 62, 63, 126, 5000] if ON_GPU else [0, 62])
@pytest.mark.parametrize("heads", [(2, 2, 64), (4, 1, 24), (4, 2, 128), (2, 1, 136)], ids=str)
def test_attention_of_a_prompt(heads, start_pos, kv_fp8):
    """Of blocks of 64 or 32 keys: at 62, the first token sees all but the last key of a block."""
    for T in (65, 127, 512, 513, 640, 700, 2048) if ON_GPU else (65, 127):
        check_attention(heads, T, start_pos, kv_fp8)


@pytest.mark.parametrize("heads", [(4, 2, 16), (9, 3, 64), (8, 1, 24)], ids=str)
@pytest.mark.parametrize("before", [0, 30, 700])
def test_attention_of_one_token_in_bf16_on_a_cpu(heads, before):
    """torch's own function; numbers that are not finite stay so."""
    q, layer, state = op_arguments("attention", torch.bfloat16, heads, 1, before)[0]
    tensors = [t.cpu() for t in (q, state.k[1], state.v[1])]
    for cached in tensors[1:]:
        cached[:, before + 1 :] = torch.nan

    def attend(q, k, v):
        caches = dict(k=(None, k), v=(None, v), device_pos=state.device_pos.cpu())
        return attention.attention_ref(q, layer, changed(state, **caches))

    exact = attend(tensors[0].float(), *tensors[1:])
    assert nmse(attend(*tensors), exact) < ONE_UNIT[torch.bfloat16]
    for which, bad in ((0, NAN), (0, INF), (0, -INF), (1, NAN), (2, NAN), (2, INF)):
        spoiled = [t.clone() for t in tensors]
        spoiled[which][0, 0, 3] = bad
        assert not attend(*spoiled).isfinite().all(), (which, bad)


@pytest.mark.parametrize("limit, value, blocks", [
    ("MOST_TOKENS", 32, [(64, 62), (64, 94), (12, 100)]),
    ("MASK_BYTES", 5 * 2 * 100 * 40, [(80, 70), (60, 100)]),
])  # fmt: skip
def test_reference_attention_takes_a_prompt_in_blocks(limit, value, blocks, monkeypatch):
    """Whose masks are small however long the context is."""
    q, layer, state = op_arguments("attention", torch.float32, (4, 2, 16), 70, 30)[0]
    whole = attention.attention_ref(q, layer, state)
    masks, attend = [], torch.nn.functional.scaled_dot_product_attention

    def watched(*heads, attn_mask):
        masks.append(attn_mask.shape)
        return attend(*heads, attn_mask=attn_mask)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(attention, limit, value)
    assert nmse(attention.attention_ref(q, layer, state), whole) < 1e-10
    assert masks == blocks


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_half_sums_saturate_and_do_not_hide_nan():
    """Scores beyond 65504, and such results of a bias, RoPE and SwiGLU, stay finite."""
    H, D, T = 2, 32, 70
    full = functools.partial(torch.full, dtype=torch.float16, device=DEVICE)
    q, k, v = full((T, H, D), 200.0), full((H, 128, D), 100.0), full((H, 128, D), 100.0)
    k[:, :5], v[:, 5:] = -100.0, 900.0
    ops = kernels.ops("triton", "fp16")
    x, pos = full((T, 64), 1.0), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    rope = torch.full((T, D // 2, 2), 0.5**0.5, device=DEVICE)
    state = SimpleNamespace(k=[k], v=[v], device_pos=pos, rope=rope, norm_eps=0.0)
    state.scratch = launch.Scratch(DEVICE)
    wqkv = Matrix(full((3 * H * D, 64), 65504 / 64), bias=full((3 * H * D,), 65504.0))
    layer = SimpleNamespace(index=0, attention_norm=x[0].clone(), wqkv=wqkv)
    layer.qk_norm = None
    y = ops.attention(q, layer, state)
    assert torch.isfinite(y).all() and (y[8:] > 890).all()
    ops.rmsnorm_qkv_rope(x, layer, state)
    for cache in (k, v):
        assert torch.isfinite(cache[:, :T]).all() and cache[:, :T].max() == 65504
    sizes = dict(BLOCK=1024, FP16_SUMS=True)
    for value, expected in ((60000.0, 65504.0), (NAN, NAN)):
        ab, out = full((T, 128), value), full((T, 64), 0.0)
        launch.launch(kernels._swiglu_kernel, (T, 1), out.device, ab, out, 64, **sizes)
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
        written = (arguments[2].k[1], arguments[2].v[1]) if op == "rmsnorm_qkv_rope" else (y,)
        assert all(torch.isfinite(t).all() for t in written), op
        assert not torch.backends.cuda.matmul.allow_fp16_accumulation


# ---- sampling.py


NOTHING = torch.zeros(9, dtype=torch.int32)  # tokens before


@functools.cache
def sampler_of(ops) -> Sampler:
    """One for all choices: what kernels leave in its memory must not change the next."""
    return Sampler(DEVICE if ops == "fused" else torch.device("cpu"))


def choose(logits: torch.Tensor, tokens: torch.Tensor, position: int, ops="reference", **settings):
    """The tokens with the one that is chosen for the position or, for several rows of logits, those
    that end there."""
    sampler = sampler_of(ops)
    sampler.set(Sampling(**settings))
    device = sampler.seed.device
    tokens, pos = tokens.to(device, copy=True), torch.tensor([position]).int().to(device)
    host_tokens, rows = tokens.clone(), logits.view(-1, logits.shape[-1]).to(device, copy=True)
    getattr(kernels, ops).sample(rows, tokens, host_tokens, pos, sampler)
    assert logits.dim() > 1 or tokens[position] == host_tokens[position].clamp(min=0)
    return host_tokens.tolist()


def choose_alike(logits: torch.Tensor, tokens: torch.Tensor, position: int, **settings) -> int:
    """What the reference chooses for the position, and the kernel, too."""
    expected = choose(logits, tokens, position, **settings)
    assert choose(logits, tokens, position, ops="fused", **settings) == expected, settings
    return expected[position]


OFF = dict(temp=1.0, top_k=0, top_p=1.0, min_p=0.0)


def test_sampling_distribution_and_filters():
    def draw(logits: torch.Tensor, count: int, **settings) -> torch.Tensor:
        """How often each token is chosen, over many seeds."""
        seeds = range(SEED, SEED + count)
        drawn = [choose(logits, NOTHING, 0, **settings, seed=seed)[0] for seed in seeds]
        return torch.bincount(torch.tensor(drawn), minlength=len(logits)) / count

    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 2 + 2**-22])
    for temp in (1e-50, 1e-9, 0.5, 2.0, 1e9, INF):
        expected = ((logits.double() - logits.max()) / temp).softmax(0)
        drawn = draw(logits, 1600, **OFF | dict(temp=temp))
        assert (drawn - expected).abs().max() < 0.063, "5 sigma of so many draws"
    logits = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]).log()
    kept = lambda logits=logits, **s: draw(logits, 600, **OFF | s).gt(0).tolist()
    first = lambda n: [i < n for i in range(5)]
    assert kept() == kept(top_k=-1) == first(5)
    assert kept(top_k=2) == kept(top_p=0.6, temp=100.0) == first(2), "before the temperature"
    assert kept(top_p=0.76) == kept(min_p=0.2) == first(3)
    assert kept(top_p=0.0) == kept(temp=0.0) == first(1)
    # equals at the edge are all kept
    assert kept(torch.tensor([1.0] * 6 + [0.0] * 2), top_k=2, top_p=0.3) == [True] * 6 + [False] * 2
    assert all(kept(torch.zeros(20), top_k=2))


@pytest.mark.parametrize("name, taken, refused", [
    ("temp", (0, INF), (-1e-9, NAN)), ("top_k", (-1, 10**300), (-2,)), ("top_p", (0, 1), (-1e-9, 1.1, NAN)),
    ("min_p", (0, 1), (-1e-9, 1.1)), ("repeat_penalty", (0.01, 100), (0, 100.1)),
    ("repeat_last_n", (-1, 0, 1 << 62), (-2,)), ("seed", (0, (1 << 63) - 1), (-1, 1 << 63)),
])  # fmt: skip
def test_settings_at_their_edges(name, taken, refused):
    for value in taken:
        assert getattr(Sampling(**{name: value}), name) == value
        choose_alike(torch.randn(90), NOTHING, 5, **{name: value})
    for value in refused:
        said = f"^{name} is {value}; it must be (from .* to .*|.* or more)$"
        with pytest.raises(ValueError, match=said):
            Sampling(**{name: value})


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
        top_k=(-1, 0, 1, 5, 12, 40, 65, 80, 1099, 5000, 10**300),
        top_p=(0.0, 1e-9, 0.5, 0.97, 1.0), min_p=(0, 0.05, 0.5),
        repeat_penalty=(1.0, 1.2), repeat_last_n=(-1, 0, 7, 64),
    )  # fmt: skip
    # top-k of as many as there are parts, each as likely as the others; the equals that top-k keeps
    # count for top-p
    cases = [(V, dict(top_k=k, top_p=1.0, min_p=0, temp=1e6)) for V, k in ((1100, 5), (3000, 12))]
    cases += [(V, dict(top_k=40, top_p=0.5, min_p=0, temp=1.5)) for V in (100, 300, 3000, 5000)]
    # top-p with more equals than a chunk holds, which it takes or leaves; all are then as likely
    equals = dict(top_k=40, min_p=0, temp=1e6)
    cases += [(5000, dict(top_p=p, **equals)) for p in (0.05, 0.08, 0.11, 0.14, 0.17)]
    # from several parts: the largest; any
    cases += [(5000, OFF | dict(temp=temp)) for temp in (0, 1)]
    for _ in range(8):
        settings = {name: random.choice(values) for name, values in choices.items()}
        cases.append((random.choice((17, 300, 1100, 3000, 5000)), settings))
    for V, settings in cases:
        logits, tokens = KINDS_OF_LOGITS[kind](V), torch.randint(0, V, (64,), dtype=torch.int32)
        position, seed = random.choice((0, 1, 20, 50)), random.randrange(1 << 63)
        choose_alike(logits, tokens, position, **settings, seed=seed)


def test_drawing_where_all_scores_are_negative():
    """As they are where the noise of the best token is, whose score is nothing else."""
    logits = torch.zeros(300).index_fill(0, torch.tensor(7), 40.0)
    tokens = torch.zeros(8, dtype=torch.int32)
    for position in range(8):
        choose_alike(logits, tokens, position, **OFF, seed=3)


@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.999999, 1.0])
@pytest.mark.parametrize("top_k", [0, 129, 1099, 1100])
def test_thresholds_found_by_sorting(top_k, top_p):
    V, settings = 1100, dict(top_k=top_k, top_p=top_p, min_p=0, temp=3, seed=SEED)
    sorts = Sampler(DEVICE, Sampling(**settings)).switches(V).sorts
    assert sorts == (top_p < 1 or 0 < top_k < V)
    kinds = ("normal", "equal", "rounded", "few above equals")
    choose_alike(torch.stack([KINDS_OF_LOGITS[kind](V) for kind in kinds]), NOTHING, 4, **settings)


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
    others = dict(temp=0), dict(top_k=0, **penalty), dict(top_k=0, top_p=1), penalty
    for settings in (dict(seed=3), *others):
        logits = 3 * torch.randn(5, 2000)
        logits[3, 7] = torch.nan
        choose_alike(logits, tokens, 30, **settings)
        chosen = choose(logits, tokens, 30, **settings)
        assert chosen[29] == -1
        assert chosen[28] == choose(logits[2], tokens, 28, **settings)[28]


# ---- formats.py and fp8.py: a format of one's own, the 8-bit floats, products in half precision, 8-bit caches


@launch.jit
def _own_load(w, start, k, left, COLUMNS: tl.constexpr, SIDE: tl.constexpr, GROUP: tl.constexpr):
    scales = groups.load_groups(w[1], start, k, left, COLUMNS, 1, GROUP)
    return formats.load_elements(w, start, k, left, COLUMNS, SIDE), scales


@launch.jit
def _own_values(tile, SCALES: tl.constexpr):
    return tile[0].to(tl.float32) * tile[1].to(tl.float32)


class OwnFormat(formats.Format):
    """Integers with a half as scale for each 32 columns: all that such a format takes."""

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
FILE_FORMATS = (*others.EXACT, *others.WITH_ZEROS.values(), others.E4M3_128)


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
    # "fp32": otherwise a GPU decodes a prompt's weights in 4 bits to E4M3
    ours = loaded(dtype=dtype, backend=backend, accumulate="fp32")
    exact, plain = (loaded(dtype=d, backend="torch") for d in ("fp32", dtype))
    assert ours.weights.layers[0].w2.format is FORMATS[format]
    decoded = backend == "torch" and not ON_GPU  # as a CPU reads it faster
    assert ours.weights.output.format is (OWN if format == "own" else None if decoded else E4M3)
    with_dense_weights(exact)
    with_dense_weights(plain)
    # the interpreter is slow to decode a matrix, as for a prompt, and for several tokens in fp32
    parts = (20, 1, 8) if backend == "torch" else (20, 1) if dtype == "fp32" else (8, 1)
    prompts = torch.randint(3, 300, (1 if dtype == "fp32" else 8, sum(parts)))
    models = (exact, plain, ours)
    right, by_torch, by_ours = (logits_of_prompts(model, prompts, *parts) for model in models)
    # on a CPU, a single token's activations are rounded to fp16
    rounding = 1e-7 if format == "int4" else 1e-9
    limit = 2 * nmse(by_torch, right) + rounding
    assert nmse(by_ours, right) < limit, "less exact than torch with the same weights"
    save(grouped_folder, tmp_path / "saved", format=format, device=DEVICE.type, quiet=True)
    again = load(tmp_path / "saved", dtype=dtype, device=DEVICE.type, backend=backend)
    assert again.checkpoint.format is FORMATS[format]
    for one, other in zip(ours.weights.matrices, again.weights.matrices):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors))


def test_cpu_without_bf16_products(grouped_folder, monkeypatch):
    """bf16 is then stored as fp16, and prompts are multiplied in fp32; matrices in 4 bits have
    torch's own product. A model that fits into its caches runs in fp32."""
    types, product = set(), torch.nn.functional.linear
    on = torch.device("cpu")
    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: False)
    fp16, bf16 = torch.float16, torch.bfloat16
    assert pick_dtype("auto", bf16, on, 8e6) == torch.float32
    assert pick_dtype("auto", fp16, on, 9e6) == pick_dtype("auto", bf16, on) == bf16
    typed = lambda x, w: types.add(x.dtype) or product(x, w)
    monkeypatch.setattr(torch.nn.functional, "linear", typed)
    options = dict(dtype="fp32"), dict(dtype="bf16"), dict(dtype="bf16", format="int4")
    models = [load(grouped_folder, device="cpu", **given) for given in options]
    assert {m.data.dtype for m in models[1].weights.matrices} == {fp16}
    assert all(bool(m.cpu_layout) == (m.format is INT4) for m in models[2].weights.matrices)
    prompts = torch.randint(3, 300, (8, 59))
    right, ours, _ = (logits_of_prompts(model, prompts, 57, 1, 1) for model in models)
    assert_close(ours, right, 0.05)
    assert types == {torch.float32}


def with_dense_weights(model) -> None:
    for matrix in model.weights.matrices:
        matrix.tensors, matrix.format, matrix.cpu_layout = (matrix.dense().float(),), None, None


EVERY_CODE = torch.arange(256).to(torch.uint8).view(torch.int8)
EVERY_HALF = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)


@pytest.mark.parametrize("form", FLOATS_8)
def test_8_bit_codes_decode_and_encode(form):
    """As torch converts them; what is beyond the largest is the largest, and NaN is refused."""
    format, values = FORMATS[form], EVERY_CODE.view(FORMATS[form].dtype).float()
    finite = torch.isfinite(values)
    assert format.floats(EVERY_CODE)[finite].equal(values[finite])
    assert format.floats(EVERY_CODE)[~finite].isnan().all()
    assert format.round(values[finite]).equal(EVERY_CODE[finite])
    largest = format.floats(format.round(torch.tensor([1e30, -INF])))
    assert largest.abs().tolist() == [{"e4m3": 448, "e5m2": 57344}[form]] * 2
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


@pytest.mark.parametrize("peak", [1, 30, 36, 40, 150])
def test_products_in_half_precision_with_large_norms(peak):
    """Eight products are summed in halves: all energy in eight neighbours is the worst case."""
    for K, spread in itertools.product((256, 4096, 8192), (1, 8, 256)):
        norm, x = torch.full((K,), float(peak)).half().to(DEVICE), torch.zeros(1, K)
        x[0, :spread] = 100.0
        (w,) = encoded([Matrix(torch.full((16, K), 448.0, device=DEVICE))], E4M3)
        x, plain = x.half().to(DEVICE), (norm.float(), dense(w))
        products.fit_norm(norm, w)
        assert norm.max() <= products.NORM_LIMIT
        state = SimpleNamespace(norm_eps=1e-5)
        out, exact = (torch.empty(1, 16, device=DEVICE) for _ in range(2))
        kernels.rmsnorm_linear_ref(x.float(), *plain, state, exact)
        assert nmse(kernels.rmsnorm_linear(x, norm, w, state, out), exact) < ONE_UNIT[torch.float16]


def test_kernels_encode_as_torch_does():
    """All finite halves, numbers between the codes and far beyond them, infinities and NaN."""
    halves = EVERY_HALF[torch.isfinite(EVERY_HALF)].float()
    between = torch.rand(1 << 16) * 2.0 ** torch.randint(-14, 12, (1 << 16,))
    beyond = torch.tensor([1e30, -1e30, torch.inf, -torch.inf, torch.nan])
    x = torch.cat([halves, between, -between, beyond]).to(DEVICE)
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
        for elsewhere in (slice(40), slice(40 + T, None)):
            assert torch.equal(mine[:, elsewhere], before[:, elsewhere]), "other positions changed"
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
    """Activations in E4M3 err by at most 2^-4: a third of its square, halved as most err less."""
    x, w = randn(80, 256, dtype=dtype), Matrix(randn(512, 256, dtype=torch.float16, scale=1 / 16))
    (w,) = encoded([w], FORMATS[form])
    if not products.tensor_core_format(w):
        pytest.skip("this GPU has none")
    residual = randn(80, 512, dtype=dtype)
    y = kernels.linear_add(x, w, added := residual.clone(), accumulate=accumulate)
    assert y is added and 0 < nmse(y, residual.float() + x.float() @ dense(w).data.t()) < 2.0**-10


def test_activations_as_codes():
    x = randn(5, 300, dtype=torch.float16) * torch.logspace(-3, 3, 5, device=DEVICE)[:, None].half()
    codes, scales = products.encode_rows(x)
    peak = x.float().abs().amax(1, keepdim=True)
    assert torch.allclose(scales, peak / 448)
    # x / scales would round differently; half-way between two codes, the rounding of 448 / peak
    # decides
    exact = [E4M3.round(x.float() * (448 / peak) * (1 + bit)) for bit in (0, 2**-23, -(2**-23))]
    assert torch.stack([codes == nearest for nearest in exact]).any(0).all()
    x, norm = x.float(), randn(300, dtype=torch.float32)
    (codes, scales), exact = products.encode_rows(x, norm, 1e-5), kernels.rmsnorm_ref(x, norm, 1e-5)
    assert torch.allclose(scales, exact.abs().amax(1, keepdim=True) / 448)
    nearest = E4M3.floats(E4M3.round(exact / scales))
    # a value half-way between two codes may go to either
    assert nmse(E4M3.floats(codes), nearest) < 1e-5


@functools.cache
def int4_matrix(N: int, K: int) -> Matrix:
    torch.manual_seed(5)
    w = torch.randn(N, K, device=DEVICE) * torch.logspace(-4, 2, N, device=DEVICE)[:, None]
    return encoded([Matrix(w)], INT4)[0]


@pytest.mark.parametrize("K", [96, 4448])
def test_int4_recoded_as_e4m3(K):
    N = 67  # which the rows of a program do not divide
    w = int4_matrix(N, K)
    recoded = E4M3.empty(N, K, w.data.device)
    products.recode(w, *recoded)
    # three bits of mantissa: 2^-8 / 12 to 2^-6 / 12
    assert nmse(E4M3.decoded(recoded), w.dense()) < 2.0**-10


def test_bytes_of_a_copy_that_a_prompt_needs(grouped_folder, monkeypatch):
    """On a card whose tensor cores multiply E4M3: floats and E4M3 as they are stored, 4 bits in
    E4M3, or decoded for the most precise sums, as E5M2 always is. Tiles of experts are decoded one
    by one, unless enough tokens share them."""
    model = load(grouped_folder, device="cpu", dtype="fp32", format="int4")
    largest = 2 * 128 * 64  # w1 and w3
    assert model._prompt_memory(0) == 4 * largest
    N, K = 96, 256
    w = Matrix(torch.zeros(N, K, dtype=torch.float16, device=DEVICE))
    in_fp16, in_e4m3 = 2 * N * K, N * K + 4 * N
    (m,) = encoded([w], INT4)
    assert products.as_e4m3(m).nbytes == in_e4m3 and products.dense_for(m, w.data).nbytes == in_fp16
    monkeypatch.setattr(fp8, "capability", lambda device: 89)
    monkeypatch.setattr(products, "_cublas_scales_rows", lambda device: False)
    for format, auto, fp32 in (
        (None, 0, 0), (E4M3, 0, 0), (E5M2, in_fp16, in_fp16), (INT4, in_e4m3, in_fp16),
    ):  # fmt: skip
        (m,) = encoded([w], format)
        for accumulate, size in (("auto", auto), ("fp32", fp32)):
            assert products.copy_bytes(m, torch.float16, accumulate) == size, (format, accumulate)
        of_experts = [experts.copy_bytes(m, "auto", each) for each in (15, 16)]
        assert of_experts == [0, in_e4m3 if format is INT4 else 0], format
        assert experts.copy_bytes(m, "fp32", 16) == 0
    assert model._prompt_memory(0) == largest + 4 * 2 * 128


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_decoded_caches(dtype):
    codes = torch.arange(-128, 128, device=DEVICE).to(torch.int8)
    caches = codes.repeat(2, 2, 500, 1).view(2, 2, 4000, 32).unbind()
    pos = torch.tensor([1000], dtype=torch.int32, device=DEVICE)
    for codes, values in zip(caches, attention.decode_caches(*caches, pos, 17, dtype)):
        exact, values = attention.cached_ref(codes)[:, :1017].to(dtype), values[:, :1017]
        assert exact.isnan().any() and values.nan_to_num(7.0).equal(exact.nan_to_num(7.0))


# ---- run.py: the command line


GREEDY = ("--temp", 0, "--ignore-eos")


def test_stdout_has_only_the_text(cli, tiny):
    flags = ("-m", tiny, "-p", "Once upon", "-n", 8, "--device", "auto")
    code, out, err = cli(*flags, "--temp", 0)
    assert code == 0 and out.startswith("Once upon") and out.endswith("\n") and len(out) > 10
    for word in ("load", "prompt", "generated 8 tokens", "memory", f"fp32 on {DEVICE}"):
        assert word in err
    assert "seed" not in err, "with --temp 0 it means nothing"
    alone = cli(*flags, "--temp", 0, "--no-display-prompt", "--quiet")
    assert alone == (0, out[len("Once upon") :], "")
    code, out, err = cli(*flags[:4], "-n", 0)
    assert (code, out) == (0, "Once upon\n")
    assert "generated 0 tokens\n" in err and "tokens/s" not in err
    _, out, err = cli(*flags)
    seed = int(err.split("seed ")[1].split()[0])
    assert cli(*flags, "--seed", seed)[1] == out != cli(*flags, "--seed", seed + 1)[1]


def test_what_is_said_of_a_run(tiny_session, tiny, monkeypatch):
    """Its numbers, which others compare. A layer has 33,920 weights, a token 64 in two matrices."""
    tokens = tiny_session.model.config.vocab_size
    assert tiny_session.model.checkpoint.elements == 2 * 33_920 + 64 + 2 * 64 * tokens
    args = run.parse_args(["-m", str(tiny), "-s", "7", "-p", ""])
    model, running = run.summary(args, tiny_session).splitlines()
    shape = "0.1M parameters, 2 layers, dim 64, 4 heads (2 of keys and values)"
    assert model == f"model     {tiny}: {shape}"
    assert running == "running   fp32 on cpu, torch ops, context 256, seed 7"
    options = dict(dtype="fp32", format="e4m3", kv_fp8=True, accumulate="fp32")
    types = "fp32 with e4m3 matrices, e4m3 keys and values, fp32 sums for prompts"
    assert Session(tiny, device="cpu", **options).types() == types
    usage = SimpleNamespace(ru_maxrss=1_500_000)
    monkeypatch.setattr(run.resource, "getrusage", lambda who: usage)
    timings = Timings(100, 0.5, new_tokens=21, steps=20, step_seconds=4.0)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2_500_000_000)
    proposals = SimpleNamespace(summary=lambda: "proposals 3 passes")
    session = SimpleNamespace(
        timings=timings, load_seconds=1.254, speculation=proposals, types=lambda: "fp32",
        model=SimpleNamespace(device=torch.device("cuda")),
    )  # fmt: skip
    assert run.closing(session).splitlines() == [
        "load      1.25 s",
        "prompt    100 tokens in 500.0 ms, 200.0 tokens/s",
        "generated 21 tokens, 200.00 ms per token, 5.0 tokens/s",
        "proposals 3 passes",
        "memory    peak 1.54 GB, 2.50 GB on the GPU; fp32",
    ]
    generation = SimpleNamespace(text="a", ended_by="eos", prompt_tokens=120, timings=timings)
    assert chat_module.record(generation) == dict(
        text="a", ended_by="eos", prompt_tokens=120, evaluated_tokens=100, new_tokens=21,
        prompt_seconds=0.5, generation_seconds=4.0, tokens_per_s=5.0,
    )  # fmt: skip
    speed = "21 tokens, 5.0 tokens/s; prompt: 100 of 120 tokens evaluated in 0.50 s"
    assert chat_module.speed(generation) == speed
    assert timings + timings == Timings(200, 1.0, 42, 40, 8.0)
    session.timings = generation.timings = Timings(100, 0.5, new_tokens=1)  # the prompt's own
    prompt, generated = run.closing(session).splitlines()[1:3]
    assert prompt == "prompt    100 tokens in 500.0 ms, 200.0 tokens/s"
    assert generated == "generated 1 tokens"
    seconds = ("prompt_seconds", "tokens_per_s")
    assert [chat_module.record(generation)[name] for name in seconds] == [0.5, None]


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
    for text, kept in (("a\n\n", "a\n"), (" a\r\n", " a"), ("\ta ", "\ta ")):
        file.write_text(text, newline="")
        assert run.read_prompt(SimpleNamespace(prompt=None, file=file)) == kept, "one newline goes"
    assert cli(*flags, "-p", " a ")[1].startswith(" a ")
    out = cli(*flags, "-p", "", stdin=b"hello")[1]
    assert not out.startswith("hello"), "an empty prompt is one"


def test_sampling_of_the_checkpoint(cli, copy):
    """It is used where no flag is given."""
    file = copy / "generation_config.json"
    fields = dict(temperature=0.0, top_p=0.5, top_k=None, repetition_penalty=1.5, do_sample=True)
    file.write_text(json.dumps(fields))
    run = lambda *flags: cli("-m", copy, "-p", "Once", "-n", 8, "-s", 1, *flags)
    _, own, err = run()
    said = "sampling  temp 0, top-p 0.5, repeat-penalty 1.5, repeat-last-n -1 (from the checkpoint"
    assert said in err
    same_flags = ("--temp", 0, "--top-p", 0.5, "--repeat-penalty", 1.5, "--repeat-last-n", -1)
    _, same, err = run(*same_flags)
    assert own == same and "sampling  " not in err
    assert "sampling  top-p 0.5 (" in run("--repeat-penalty", 1, "--temp", 0)[2]
    edit(file, min_p=0.3, top_k=7)
    said = "temp 0, top-k 7, top-p 0.5, min-p 0.3, repeat-penalty 1.5, repeat-last-n -1"
    assert f"sampling  {said} (from the checkpoint" in run()[2]
    assert "min-p" not in run("--min-p", 0)[2].partition("sampling")[2]
    edit(file, top_p=2)
    assert_refused(run(), "generation_config.json: top_p is 2; it must be a number from 0 to 1")
    assert run("--top-p", 0.5)[0] == 0, "what a flag overrides is not judged"
    edit(file, temperature=0.6, top_p=0.9, top_k=-1, min_p=0.2)
    expected = dict(temp=0.6, top_k=-1, top_p=0.9, min_p=0.2, repeat_penalty=1.5, repeat_last_n=-1)
    assert config_module.read_sampling(copy) == expected
    edit(file, do_sample=False)
    assert config_module.read_sampling(copy)["temp"] == 0, "as transformers generates"


def test_penalty_of_the_checkpoint_equals_transformers(tmp_path):
    """It looks back on all tokens, the prompt's too."""
    theirs = hugging_face_model(350)
    theirs.lm_head.weight.data[2] = 0.0  # so that the text does not end
    theirs.save_pretrained(tmp_path)
    train_sentencepiece(tmp_path)
    said = dict(do_sample=False, eos_token_id=2, repetition_penalty=1.4)
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    prompt = [random.randrange(3, 300) for _ in range(90)]
    ours = Session(tmp_path, device="cpu", dtype="fp32", quiet=True).generate(prompt, n=60).finish()
    theirs.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path)
    (ids,) = theirs.generate(torch.tensor([prompt]), max_new_tokens=60, pad_token_id=0).tolist()
    assert ours.ids == ids[90:] and len(ids) == 150


def test_settings_that_are_not_supported(cli, copy):
    """One line says so, where they would have an effect."""
    file = copy / "generation_config.json"
    run = lambda *flags: cli("-m", copy, "-p", "Once", "-n", 1, "--temp", 0, *flags)[2]
    off = dict(num_beams=1, typical_p=1.0, no_repeat_ngram_size=0, bad_words_ids=None, min_length=0)
    file.write_text(json.dumps(off))
    assert "note" not in run()
    edit(file, num_beams=4, typical_p=0.9, no_repeat_ngram_size=3)
    expected = "note: generation_config.json: num_beams, no_repeat_ngram_size, typical_p: not supported, ignored\n"
    assert run().count(expected) == 1 and run("--quiet") == ""
    edit(file, do_sample=False, num_beams=1)
    assert "note: generation_config.json: no_repeat_ngram_size: not supported, ignored\n" in run()


@pytest.mark.parametrize("fields, size, context", [
    ({}, None, "256,"), ({}, 0, "256,"), ({}, 16, "16,"),
    ({}, 257, "257 (beyond the model's 256: expect nonsense there),"),
    (dict(max_position_embeddings=5000), None, "4096,"), (dict(max_position_embeddings=5000), 0, "5000,"),
    (dict(model_type="mistral", max_position_embeddings=8192), None, "4096,"),
    (dict(model_type="mistral", sliding_window=99), 99, "99,"),
    (dict(model_type="mistral", sliding_window=None), 5000, "5000 (beyond the model's 256: "),
])  # fmt: skip
def test_size_of_the_context(cli, copy, fields, size, context):
    """If none is given, the model's own, but at most 4096; of 0, the model's own, however large."""
    edit(copy / "config.json", **fields)
    flags = [] if size is None else ["-c", size]
    code, _, err = cli("-m", copy, "-p", "Once", "-n", 1, *flags)
    assert code == 0 and f", context {context}" in err


def test_jsonl_says_why_a_text_ended(cli, tiny):
    flags = ("-m", tiny, "-p", "Once", *GREEDY, "--quiet", "-o", "jsonl")
    text_of = lambda *more: objects(cli(*flags, *more)[1])[0]
    code, out, err = cli(*flags, "-n", 12)
    (whole,) = objects(out)
    length = len(Tokenizer(tiny).encode("Once"))
    assert code == 0 and err == "" and whole["ended_by"] == "length" and whole["new_tokens"] == 12
    assert whole["prompt"] == "Once"
    assert whole["prompt_tokens"] == whole["evaluated_tokens"] == length
    assert whole["tokens_per_s"] == 11 / whole["generation_seconds"]
    assert whole["text"] + "\n" == cli(*flags, "-n", 12, "-o", "text", "--no-display-prompt")[1]
    stops = ("--stop", whole["text"][4:7], "--stop", "\0")
    assert text_of("-n", 12, *stops)["ended_by"] == "stop"
    full = text_of("-n", -2, "-c", 16)
    assert full["ended_by"] == "context" and full["prompt_tokens"] + full["new_tokens"] == 16
    none = text_of("-n", 0)
    assert none["text"] == "" and none["ended_by"] == "length"
    assert none["tokens_per_s"] is none["prompt_seconds"] is None
    noted = cli(*flags, "-n", -1, "-c", 16, "-o", "text")[2] + cli("-m", tiny, *GREEDY, "-c", 16)[2]
    full = noted.count("note: the context of 16 tokens is full (see -c)\n")
    assert full == 1, "--quiet says nothing"


def test_what_ends_a_text(cli, copy):
    """An eos that the tokenizer does not flag as special has a text, which is not shown."""
    tokenizer = Tokenizer(copy)
    ids = greedy(load(copy, device="cpu"), tokenizer.encode("Once"), 12)
    end = max(set(ids), key=ids.index)  # the last to appear for the first time
    edit(copy / "generation_config.json", eos_token_id=[2, end])
    assert tokenizer.bytes_of(end) and ids.index(end) > 0
    flags = ("-p", "Once", "-n", 12, "--temp", 0, "-o", "jsonl", "--quiet")
    (text,) = objects(cli("-m", copy, *flags)[1])
    before = b"".join(map(tokenizer.bytes_of, ids[: ids.index(end)]))
    assert text["text"] == before.decode(errors="replace")
    assert text["ended_by"] == "eos" and text["new_tokens"] == ids.index(end) + 1


def test_prompt_asked_again(tiny_model, monkeypatch):
    """Its logits are kept: evaluated by itself, the last token would be rounded otherwise."""
    state, prompt = State(tiny_model), [1, 5, 9, 7]
    texts = [list(generate(tiny_model, prompt, state, n=n, eos=[])) for n in (6, 3)]
    assert texts[1] == texts[0][:3]
    evaluated = []
    with monkeypatch.context() as patch:
        patch.setattr(tiny_model, "prefill", lambda tokens, *_: evaluated.extend(tokens))
        list(generate(tiny_model, prompt, state, n=1, eos=[]))
    assert not evaluated and state.pos == len(prompt)
    list(generate(tiny_model, prompt, state, n=5, eos=[]))
    prompt += texts[0][:2]  # a list that the caller goes on using
    new = list(generate(tiny_model, prompt, n=3, eos=[]))
    assert list(generate(tiny_model, prompt, state, n=3, eos=[])) == new
    other = [1, 5, 9, 8]
    new = list(generate(tiny_model, other, n=3, eos=[]))
    assert list(generate(tiny_model, other, state, n=3, eos=[])) == new
    assert state.reuse([1, 5, 9]) == 2, "logits behind three tokens are not known"


def test_progress_of_a_long_prompt(cli, tiny, monkeypatch):
    shown, original, ends = io.StringIO(), tqdm, []
    at_once = dict(delay=0, disable=False, mininterval=0, file=shown)
    monkeypatch.setattr("talk.chat.tqdm", lambda **options: original(**options | at_once))
    monkeypatch.setattr("talk.chat.show", lambda text: ends.append(shown.getvalue()[-1]))
    monkeypatch.setitem(PROMPT_CHUNK, "cpu", 16)
    assert cli("-m", tiny, "-p", "fox " * 40, "-n", 1, "-c", 300)[0] == 0
    length = len(Tokenizer(tiny).encode("fox " * 40))
    bars = [int(done) for done in re.findall(rf"\rprompt: .*?(\d+)/{length} \[", shown.getvalue())]
    assert [*dict.fromkeys(bars)] == [*range(16, length, 16)] and bars[-1] + 16 >= length > 64
    assert {*ends} == {"\r"}, "a bar is cleared before text comes"


def test_flags_of_llama_cpp(cli, tiny, tmp_path):
    flags = "--predict 8 --temperature 0 --repeat-last-n 3 -t 1 -dev none -s 3".split()
    flags = ("-hf", tiny, *flags, "-p", "Once upon")
    expected = cli("-m", tiny, "-n", 8, "--temp", 0, "-p", "Once upon")[1]
    code, out, err = cli(*flags, *"-ngl 99 -fa on -b 512 --mmap -no-cnv".split())
    assert (code, out) == (0, expected)
    assert err.startswith("note: -ngl, -fa, -b, --mmap: no effect here, ignored\n")
    stop = expected[12:14]
    assert cli(*flags, "-r", stop)[1] == expected[: expected.index(stop, 9)] + "\n"
    (tmp_path / "system").write_text("Be kind.\n")
    talk = ("-m", tiny, "-n", 6, *GREEDY, "--chat-template", "llama2", "-p", "hello", "-cnv")
    systems = ("-sys", "Be kind."), ("--system-prompt", "Be kind."), ("-sysf", tmp_path / "system")
    answers = {cli(*talk, *system)[1] for system in systems}
    assert len(answers) == 1 and answers != {cli(*talk)[1]}
    code, out, _ = cli("--version")
    torch_version = torch.__version__.split("+")[0]
    assert code == 0 and re.match(rf"fused-llama with Python 3.*torch {torch_version}", out)


def test_a_model_without_a_template_completes(cli, copy, monkeypatch):
    """Bare `run.py` at a terminal chats with a model that has one."""
    monkeypatch.setattr(run, "mode_of", lambda args: "bare")
    flags = ("-m", copy, "-n", 4, "--temp", 0)
    code, out, err = cli(*flags, stdin=b"hello")
    assert code == 0 and out.startswith("hello") and "chatting" not in err
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (copy / "tokenizer_config.json").write_text(json.dumps(dict(chat_template=template)))
    code, out, err = cli(*flags, stdin=b"hello\n")
    assert code == 0 and not out.startswith("hello") and "chatting, since there is no prompt" in err


# usage and errors


FLAGS_AT_THEIR_EDGES = {  # its name in the program, the values that it takes, those that it refuses
    "-c": ("ctx_size", [0, 1, 1 << 24], [-1, (1 << 24) + 1, "", 1.5]),
    "-n": ("n_predict", [-2, -1, 0, 1 << 62], [-3, "", "x"]),
    "--temp": ("temp", [0, 1e300], [-1, "", "nan"]),
    "--top-k": ("top_k", [-1, 1 << 62], [-2, "", 0.5]),
    "--top-p": ("top_p", [0, 1], [-0.01, 1.01, "", "nan"]),
    "--min-p": ("min_p", [0, 1], [-0.01, 1.01, ""]),
    "--repeat-penalty": ("repeat_penalty", [0.01, 100], [0, -1, 100.1, ""]),
    "--repeat-last-n": ("repeat_last_n", [-1, 0, 1 << 62], [-2, ""]),
    "-s": ("seed", [0, (1 << 63) - 1], [-2, 1 << 63, ""]),
    "-t": ("threads", [1, 4096], [0, -1, 4097, ""]),
    "--lookup": ("lookup", [1, 15], [0, -1, 16, ""]),
    "--draft-max": ("draft_max", [1, 15], [0, -1, 16, ""]),
    "-p": ("prompt", ["", "-", "a\tb\r\\ \\d"], []),
    "-sys": ("system", ["", "a\nb"], []),
    "--stop": ("stop", ["", "\n", '"'], []),
    "--dtype": ("dtype", ["auto", "fp32", "fp16", "bf16"], ["", "fp64"]),
    "--fp8": ("format", ["e4m3", "e5m2"], ["", "e3m4"]),
    "--device": ("device", ["cpu", "cuda:1"], []),
}  # fmt: skip


@pytest.mark.parametrize("flag", FLAGS_AT_THEIR_EDGES)
def test_flags_at_their_edges(flag, capfd, monkeypatch):
    name, taken, refused = FLAGS_AT_THEIR_EDGES[flag]
    needed = {"--draft-max": ["--draft", str(cli_module.DEFAULT_MODEL)], "-sys": ["--chat"]}
    others = needed.get(flag, [])
    parse = lambda argv: getattr(run.parse_args([*others, *argv]), name)
    for value in taken:
        written = str(value).replace("\\", "\\\\").replace("\n", "\\n")
        written = written.replace("\t", "\\t").replace("\r", "\\r")
        expected = [value] if name == "stop" else value
        assert parse([flag, written]) == expected, f"{flag} {written!r} means something else"
    for value in refused:
        result = caller(parse, monkeypatch, capfd)(flag, value)
        assert_refused(result, flag, code=2)


def test_flags_that_are_not_given():
    args = vars(run.parse_args([]))
    expected = dict(
        n_predict=-1, stop=[], ignore_eos=False, no_escape=False, min_p=None, repeat_last_n=None,
        temp=None, top_k=None, top_p=None, repeat_penalty=None, ctx_size=None, dtype="auto",
        format=None, kv_fp8=False, device="auto", threads=None, lookup=None, draft_max=4,
        mode="text", output="text", quiet=False, model=str(cli_module.DEFAULT_MODEL),
    )  # fmt: skip
    assert {name: args[name] for name in expected} == expected
    usual = dict(temp=0.8, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1, repeat_last_n=64)
    assert vars(Sampling()) == usual | {"seed": 0}
    seeds = {run.parse_args(flags).seed for flags in ([], [], ["-s", "-1"], ["-s", "-1"])}
    assert len(seeds) == 4 and min(seeds) >= 0, "a random seed is another one each time"
    assert run.parse_args(["--fp8"]).format == "e4m3"
    assert run.parse_args(["--int4"]).format == "int4"
    zeros = "--temp 0 --top-k 0 --top-p 0 --min-p 0 --repeat-last-n 0 -s 0 -n 0 -p x".split()
    names = ("temp", "top_k", "top_p", "min_p", "repeat_last_n", "seed")
    assert run.sampling_flags(run.parse_args(zeros)) == dict.fromkeys(names, 0)
    assert run.text_options(run.parse_args(zeros)) == dict(n=0, stop=[], ignore_eos=False)
    words = r"--no-escape --chat -p \n -sys \n --stop \n".split()
    literal = run.parse_args(words)
    assert literal.prompt == literal.system == r"\n" and literal.stop == [r"\n"]


@pytest.mark.parametrize("main, flags, said", [
    (run.main, "-sys x -p a", "-sys needs --chat"),
    (run.main, "--chat -no-cnv", "-no-cnv cannot be used with --chat"),
    (bench.main, "--perplexity=", "--perplexity is empty"),
    (run.main, "--save d --fp8 --prompt=a", "--prompt cannot be used with --save"),
    (run.main, "--save d", "--save writes matrices in 8 or 4 bits: add --fp8"),
    (run.main, "--int4 --fp8", "both say"),
    (run.main, "--lookup 2 --draft x", "--lookup and --draft both propose tokens; use one"),
    (run.main, "--chat -sys a -sysf b", "both give a system prompt; use one"),
    (run.main, "-p a -f b", "--prompt and --file both give a prompt; use one"),
    (run.main, "--draft-max 8 -p a", "--draft-max is for --draft"),
    (run.main, "--seed 1e99", "-s/--seed: 1e99: must be a whole number "),
    (run.main, "-p", "-p/--prompt: expected one argument "),
    (run.main, "--tmep 0", "unknown flag --tmep: did you mean --temp?"),
    (run.main, "--top_k 4", "unknown flag --top_k: did you mean --top-k?"),
    (run.main, "-ctk q8_0", "unknown flag -ctk: --kv-fp8 keeps keys and values in 8 bits"),
    (run.main, "--fp8 --save=", "-m or --save is empty"),
    (run.main, "-m=", "-m or --save is empty"),
    (run.main, "-n5", "unknown flag -n5: did you mean -n? "),  # to argparse, -n with the value 5
    (bench.main, "text", "unexpected argument 'text' "),
    (run.main, "--mod x", "unknown flag --mod"),  # an abbreviation of --model
    (run.main, "text", "unexpected argument 'text': write -p 'text'"),
    (run.main, "-\x1b", "unknown flag -?"),
])  # fmt: skip
def test_wrong_usage_exits_2_in_one_line(monkeypatch, capfd, main, flags, said):
    result = caller(main, monkeypatch, capfd)(*flags.split())
    assert_refused(result, said, " (see --help)\n", code=2)


@pytest.mark.parametrize("arguments, stdin, expected", [
    (["-m", "nowhere"], b"", "no file or folder nowhere here; a hub model is written owner/name, or"),
    (["-m", "models/x.gguf"], b"", "no file or folder models/x.gguf here"),
    (["-f", "nofile"], b"", "nofile"),
    (["-f", ""], b"", "No such file"),
    (["-p", "-"], b"abc\xff", "standard input is not UTF-8: byte 0xff at offset 3"),
    (["-p", "Once upon a time there was a fox", "-c", "4"], b"", "the context holds 4"),
    (["-p", "a", "--device", "tpu"], b"", "unknown device 'tpu'"),
    (["-p", "a", "--accumulate", "fp16"], b"", "accumulate fp16 needs a GPU"),
    (["-p", "a", "--int4"], b"", "w2 has 112 columns; int4 needs a multiple of 32"),
    (["-p", "a\udcffb"], b"", "the text is not UTF-8: it holds U+DCFF at 1"),
    (["-f", "/dev/zero"], b"", "/dev/zero has more than 64,000,000 bytes"),
    (["--chat", "-p", "tell me a tale " * 60, "-c", "64"], b"", "the context holds 64"),
    (["--chat", "-sys", "good day, crow!", "-c", "8"], b"", "the system prompt takes"),
])  # fmt: skip
def test_bad_input_is_one_line_of_error(cli, tiny, arguments, stdin, expected):
    alone = [] if "--chat" in arguments else ["--no-display-prompt"]
    assert_refused(cli("-m", tiny, "--quiet", *alone, *arguments, stdin=stdin), expected)


def test_errors_with_and_without_their_traceback(cli, tiny, tmp_path, monkeypatch):
    code, out, err = cli("-m", tmp_path, "-p", "a", "--debug")
    assert code == 1 and out == "" and err.startswith("Traceback")
    assert re.search(r"\nFileNotFoundError: .+\n$", err)
    monkeypatch.setattr("loading.place.free_memory", lambda device: 1_000_000)
    assert_refused(cli("-m", tiny, "-p", "a"), "weights", "cache of 256 tokens", "smaller ctx_size")


@pytest.mark.parametrize("script", ["run.py", "bench.py"])
def test_help_comes_at_once(script):
    """Before anything is imported that takes long; so it has some names from elsewhere."""
    slow = {"torch", "triton", "numpy", "transformers", "sentencepiece", "tokenizers", "jinja2"}
    for flags, code in (("--help", 0), ("--wrong", 2), ("-m nowhere -p 5", 1)):
        shown = in_shell(f'"$PYTHON" -X importtime "$HERE/{script}" {flags}')
        imported = set(re.findall(r"\| +(\S+)$", shown.stderr, re.MULTILINE))
        assert shown.returncode == code and "argparse" in imported, shown.stderr
        assert len(imported) < 250 and not imported & slow, "import these where they are used"
        assert code or "\nmodel:\n" in shown.stdout and "\noutput:\n" in shown.stdout
    assert tuple(DTYPES) == cli_module.DTYPE_NAMES
    assert tuple(kernels.FORMATS) == cli_module.FORMAT_NAMES


def test_a_run_on_a_cpu_imports_no_triton(tiny):
    python = 'env -u TRITON_INTERPRET CUDA_VISIBLE_DEVICES= "$PYTHON" -X importtime'
    shown = in_shell(f'{python} "$HERE/run.py" -m "{tiny}" -p a -n 1 --device cpu')
    assert shown.returncode == 0 and "| torch\n" in shown.stderr, shown.stderr[-3000:]
    assert not re.search(r"\| +triton", shown.stderr)


def test_machine_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch')")
    command = f'PYTHONPATH="{tmp_path}:$HERE" "$PYTHON" -P "$HERE/run.py"'
    shown = in_shell(command, stdin=subprocess.DEVNULL)
    result = (shown.returncode, shown.stdout, shown.stderr)
    assert_refused(result, "pip install -r requirements.txt")


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_gives_the_prompt_as_it_is(tmp_path):
    shutil.copy(HERE / "Makefile", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    for file in (tmp_path / "requirements.txt", tmp_path / ".venv" / "ready", python):
        file.touch(0o755)
    python.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    prompt = 'He said "hi" for $5; it\'s `here`, \\n and\n--there'
    expected = ["run.py", "-m", "a b", "--no-escape", f"--prompt={prompt}", "-n", "300"]
    unset = "unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES GPUS"  # of the make that runs the tests
    for command in (f"PROMPT={shlex.quote(prompt)} make", f"make PROMPT={shlex.quote(prompt)}"):
        done = in_shell(f"{unset}; {command} -s run MODEL='a b' ARGS=", cwd=tmp_path)
        assert done.stdout.split("\0")[:-1] == expected
        assert done.stderr.startswith("next: make chat")
    for code, made in ((130, 0), (1, 2)):  # after Ctrl-C; after an error
        python.write_text(f"#!/bin/sh\nexit {code}\n")
        done = in_shell(f"{unset}; make chat", cwd=tmp_path)
        assert done.returncode == made and ("make: ***" in done.stderr) == (code == 1), done


# streams and signals


@pytest.mark.parametrize("flags", ["-p Once", "--chat -n 20"])
def test_closed_stdout_ends_quietly(tiny, flags):
    flags = ("-m", tiny, *flags.split(), "--ignore-eos", "--quiet")
    process = program(*flags, stdin=subprocess.PIPE)
    process.stdin.write(b"hello\n" * 50)
    process.stdin.close()
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(PATIENCE) == 0 and process.stderr.read() == b""


def test_lost_streams(tiny, tmp_path):
    say = "import talk.cli as c; c.use_safe_streams(); c.note('a note'); print('text'); print(c.sys.stderr.isatty())"
    for lost in ("2>&-", "2>/dev/full", "2> >(exit)", "<&- 2>&-"):
        done = in_shell(f'"$PYTHON" -c "{say}" {lost}', cwd=HERE)
        assert (done.returncode, done.stdout, done.stderr) == (0, "text\nFalse\n", ""), lost
    run = f'"$PYTHON" "$HERE/run.py" -m "{tiny}" --device cpu'
    done = in_shell(f"{run} -p Once -n 3 --quiet >/dev/full")
    assert done.returncode == 1 and done.stderr == "error: No space left on device\n"
    done = in_shell(f"{run} --save saved --fp8 <&- >&- 2>&-", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "saved" / "model.safetensors").is_file(), done


@pytest.mark.parametrize("call", [0, 1, 4])
@pytest.mark.parametrize("flags", ["-p Once", "--chat -p Once", "--chat", "-st"])
def test_ctrl_c_exits_130_after_what_it_has(cli, tiny, monkeypatch, flags, call):
    """While the prompt is evaluated, or after one or four tokens; the input is no terminal."""
    flags = ("-m", tiny, *flags.split(), "-n", 8, *GREEDY, "-o", "jsonl")
    (whole,) = objects(cli(*flags, stdin=b"Once\n")[1])
    calls, step = itertools.count(), Llama.step

    def interrupted(self, T, state) -> None:
        if next(calls) == call:
            raise KeyboardInterrupt
        step(self, T, state)

    monkeypatch.setattr(Llama, "step", interrupted)
    code, out, err = cli(*flags, stdin=b"Once\n")
    (cut,) = objects(out)
    assert code == 130, "scripts tell by it that the text is cut"
    assert (cut["ended_by"], cut["new_tokens"]) == ("interrupt", call)
    assert whole["text"].startswith(cut["text"])
    assert call == 0 or f"generated {call} tokens" in err


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


def test_one_stop_string_needs_no_list(tiny_session):
    texts = partial(tiny_session.generate, "Once", n=20, temp=0)
    whole = texts().finish().text
    stop = whole[-4:-1]
    ended = texts(stop=stop).finish()
    assert ended.text == whole[: whole.index(stop)] and ended.ended_by == "stop"


def test_texts_in_any_order(tiny_session, tiny_model):
    """Of one session, read to the end or not: each is what model.generate and the tokenizer make of
    its prompt, token by token, up to a stop string; the next text ends an unfinished one, and the
    timings are the sum of all."""
    tokenizer = tiny_session.tokenizer
    call = st.tuples(
        st.sampled_from(["Once upon", "Once upon a time", "", "fox", "Żółw zjadł"]),
        st.integers(0, 9), st.integers(0, 10), st.sampled_from([None, (2, 4), (3, 3), (0, 1)]),
        st.sampled_from([None, 0, 2]), st.sampled_from([dict(temp=0), dict(temp=2, repeat_penalty=1.5)]),
    )  # fmt: skip

    @examples(40, calls=st.lists(call, min_size=2, max_size=5))
    def check(calls):
        tiny_session.end()
        before, done = tiny_session.timings, []
        for prompt, n, taken, stop, logprobs, settings in calls:
            ids = tokenizer.encode(prompt)
            options = dict(n=n, ignore_eos=True)
            sampled = dict(sampling=Sampling(**settings), eos=tiny_session.eos)
            chosen = [*generate(tiny_model, ids, **options, **sampled)]
            whole = tokenizer.decode(chosen)
            # and one that only begins, and is held back for a while
            stops = [whole[slice(*stop)], whole[:1] + "\0"] if stop else []
            options |= dict(stop=stops, logprobs=logprobs, strip_space=False)
            generation = tiny_session.generate(prompt, **options, **settings)
            assert all(list(earlier) == [] for earlier, _, _ in done), "two texts at once"
            pieces = list(itertools.islice(generation, taken))
            done.append((generation, len(generation.ids), generation.text))
            got = generation.ids
            assert got == [id for piece in pieces for id in piece.ids] == chosen[: len(got)]
            assert generation.text == "".join(piece.text for piece in pieces)
            assert generation.prompt_tokens == len(ids)
            found = whole.find(stops[0]) if stops and stops[0] else -1
            end = len(whole) if found < 0 else found
            if generation.ended_by == "interrupt":
                assert taken <= len(got) + 1 and whole[:end].startswith(generation.text)
            else:
                assert generation.ended_by == ("length" if found < 0 else "stop")
                assert generation.text == whole[:end]
            exact = logits_of(tiny_model, [*ids, *chosen])[len(ids) - 1 :].log_softmax(1)
            for row, score in zip(exact, generation.logprobs):
                near = lambda id, row=row: pytest.approx(float(row[id]), abs=1e-3)
                assert score.logprob == near(score.id)
                assert score.best == [(id, near(id)) for id in row.topk(logprobs).indices.tolist()]
            for i, score in enumerate(generation.logprobs):
                begun = tokenizer.decode(chosen[:i])
                assert score.begins == len(begun) or "\ufffd" in begun
            if generation.ended_by == "length":
                assert len(generation.logprobs) == (0 if logprobs is None else n)
        tiny_session.end()
        for generation, count, text in done:
            assert (generation.timings.new_tokens, generation.text) == (count, text)
            assert generation.answered == (count > 0 or generation.ended_by != "interrupt")
        assert tiny_session.timings == sum((g.timings for g, _, _ in done), before)

    check()
    every_but_bos = {*range(tiny_model.config.vocab_size)} - {tokenizer.bos}
    options = dict(n=3, eos=every_but_bos, ignore_eos=True, logprobs=0)
    silent = tiny_session.generate("fox", **options).finish()
    assert silent.text == "" and [score.id for score in silent.logprobs] == [tokenizer.bos] * 3


def test_cached_tokens_of_a_prompt(tiny_session):
    """None are known to be before something is evaluated."""
    ids = tiny_session.tokenizer.encode("Once upon a time there was a fox")
    for prompt, cached in ([1, 5], None), (ids, 1), (ids, len(ids)):
        generation = tiny_session.generate(prompt, n=2)
        assert generation.cached_tokens == 0
        generation.finish()
        assert cached in (None, generation.cached_tokens)
    interrupted = tiny_session.generate([*ids[:2], 9, 9], progress=fails(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        next(interrupted)
    assert interrupted.cached_tokens == 0


def test_only_programs_name_flags():
    """Sessions are made without a command line, too, and clients of a server have none."""
    flag = re.compile(r"(?:^|[\s(])(?:--[a-z]|-[a-z]\b)")
    with_docstrings = ast.Module, ast.ClassDef, ast.FunctionDef
    programs = []
    for file in [*HERE.glob("*.py"), *HERE.glob("extra/*.py")]:
        source = file.read_text()
        if re.search(r"argparse|extra\.cli|import cli", source):
            programs.append(file.name)
            continue
        nodes = list(ast.walk(ast.parse(source)))
        docstrings = [node.body[0] for node in nodes if isinstance(node, with_docstrings)]
        no_messages = {id(getattr(statement, "value", None)) for statement in docstrings}
        for node in nodes:
            if isinstance(node, ast.Constant) and id(node) not in no_messages:
                assert not flag.search(str(node.value)), (file.name, node.lineno, node.value)
    assert {"run.py", "serve.py", "cli.py"} <= {*programs} and "session.py" not in programs


def test_a_stopped_answer_goes_on_as_it_was_shown(tiny):
    """Without the tokens of what came after the stop string's beginning."""
    session = Session(tiny, dtype="fp32", device="cpu", chat_template="llama2")
    ask = partial(session.chat, conversation("hello"), n=9, temp=0, ignore_eos=True)
    answer = ask(stop=[ask().finish().text[4:6]]).finish()
    assert answer.ended_by == "stop"
    turns = conversation("hello", answer.text, "more")
    text = lambda ids: session.tokenizer.decode(ids).replace(" ", "")
    assert text(session.render(turns).ids) == text(session.tokenizer.apply_chat_template(turns))


@pytest.mark.parametrize("bos, eos, first", [(1, 2, [1]), (-1, 2, [2]), (-1, -1, [])])
def test_an_empty_prompt_begins_with_one_token(bos, eos, first):
    tokenizer = SimpleNamespace(bos=bos, eos=eos, encode=lambda text: [])
    assert Session.encode(SimpleNamespace(tokenizer=tokenizer), "") == first


def test_wrong_calls_say_what_is_wrong(tiny, tiny_session, tmp_path):
    model, generate = tiny_session.model, tiny_session.generate
    V, before = model.config.vocab_size, tiny_session.state.tokens.clone()
    loaded = partial(load, tiny, device="cpu")
    saved = partial(save, tiny, tmp_path / "new", device="cpu")
    opened = partial(Session, tiny, device="cpu")
    talk = Tokenizer(tiny).apply_chat_template
    forward = lambda prompt: model.forward(prompt, State(model))
    decode = lambda prompt: greedy(model, prompt, 1)
    no_list = "a prompt is a list of ids: tokenizer.encode"
    wrong = [
        (loaded, dict(format="e9"), "format is 'e9'; it must be"),
        (loaded, dict(format=True), "format is True; it must be"),
        (loaded, dict(dtype="fp64"), "dtype is 'fp64'; it must be"),
        (loaded, dict(accumulate="x"), "accumulate is 'x'; it must be"),
        (loaded, dict(backend="cuda"), "backend is 'cuda'; it must be"),
        (loaded, dict(ctx_size=-1), "ctx_size is -1; it must be"),
        (saved, dict(format="e9"), "format is 'e9'; it must be"),
        (saved, dict(dtype="fp64"), "dtype is 'fp64'; it must be"),
        (generate, dict(prompt="a", tmep=0), "no setting 'tmep'; sampling has temp, top_k"),
        (generate, dict(prompt="a", top_p=2), "top_p is 2; it must be from 0 to 1"),
        (generate, dict(prompt="a", logprobs=-1), "logprobs is -1; it must be 0 or more"),
        (tiny_session.chat, dict(messages=[]), "there is no message to answer"),
        (opened, dict(threads=-1), "threads is -1; it must be 1 or more"),
        (opened, dict(lookup=2, draft=tiny), "lookup and draft both propose tokens"),
        (generate, dict(prompt="a " * 999), r"the text has \d+ tokens; the context holds 256"),
        (decode, dict(prompt=torch.tensor([1, 5])), no_list),
        (decode, dict(prompt="text"), no_list),
        (forward, dict(prompt="text"), no_list),
        (talk, dict(messages="hi"), "a conversation is a list of dicts"),
        (talk, dict(messages=[{"role": "user"}]), "a conversation is a list of dicts"),
        (talk, dict(messages=[]), "a conversation is a list of dicts"),
    ]
    for evaluate in (forward, decode, generate):
        for id in (-1, V, 1 << 40):
            said = f"the id {id}; the model's are 0 .. {V - 1}"
            wrong.append((evaluate, dict(prompt=[1, id, 5]), said))
        for prompt in (None, ["text", "more"], [[1, 5]]):
            wrong.append((evaluate, dict(prompt=prompt), no_list))
        wrong.append((evaluate, dict(prompt=[]), "is empty"))
    for call, arguments, said in wrong:
        with pytest.raises((TypeError, ValueError), match=said):
            call(**arguments)
    assert not [*tmp_path.iterdir()] and torch.equal(tiny_session.state.tokens, before)
    assert len(repr(model)) < 2000, "it prints weights"


@pytest.mark.parametrize("decode", ["on a CPU", "by lookup", "in graphs"])
def test_timings_are_not_the_callers(tiny_model, monkeypatch, decode):
    """On a GPU, which works while the caller does, steps take at least what its own clock says."""
    options = dict(n=5, eos=[], timings=Timings(), state=State(tiny_model))
    if "graphs" in decode:
        decode_in_graphs(monkeypatch, ms=itertools.repeat(9000.0))
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


@pytest.mark.parametrize("size, expected", [(32 << 20, 1), ((32 << 20) + 1, 2)])
def test_threads_of_a_session(tiny, monkeypatch, request, size, expected):
    """One for a model that fits into 32 MB of caches, unless they are given."""
    request.addfinalizer(lambda: torch.set_num_threads(1))
    monkeypatch.setattr("model.Weights.matrices", [SimpleNamespace(nbytes=size)])
    for threads, used in ((None, expected), (2, 2)):
        torch.set_num_threads(2)
        Session(tiny, dtype="fp32", device="cpu", threads=threads)
        assert torch.get_num_threads() == used


def test_conversation_with_unfinished_answers(tiny_session):
    """It has what was generated of them."""
    talk, options = Conversation(tiny_session), dict(n=6, ignore_eos=True)
    talk.answer("hello", **options).finish()
    for begin in (partial(talk.answer, "good day"), talk.again):
        generation = begin(**options)
        while not next(generation).text:
            pass
        talk.again(**options)  # which ends it, and of which nothing is generated
        said = [turn["content"] for turn in talk.turns]
        assert said[0::2] == ["hello", "good day"] and said[3] == generation.text
    next(talk.answer("more", **options))
    talk.clear()
    talk.session.end()
    assert talk.turns == []
    with pytest.raises(ValueError, match="there is no answer yet"):
        talk.again()


def test_session_names_of_dtypes_and_paths(tiny, monkeypatch, tmp_path):
    for name in "float32", torch.float32, "fp32":
        assert Session(tiny, dtype=name, device="cpu").model.dtype == torch.float32
    monkeypatch.chdir(tmp_path)
    assert Session("models/tales", device="cpu").model.checkpoint.folder == TALES
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails(AssertionError("the hub")))
    with pytest.raises(OSError, match="no folder models/talse here"):
        Session("models/talse")
    (tmp_path / "mine").mkdir()
    with pytest.raises(OSError, match="no folder mine/model here"):
        Session("mine/model")


def test_sessions_load_by_default_what_load_does():
    ours, theirs = (inspect.signature(function).parameters for function in (Session, load))
    for name in theirs.keys() - {"name"}:
        assert ours[name].default == theirs[name].default, name


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
        stream = TextStream(tokenizer, strip_space=True, stops=stops)
        seen = "".join(stream.push(id) for id in ids) + stream.finish()
        assert (seen, stream.stopped) == (expected, stopped), stops


# ---- serve.py: a real server, asked as clients do


TALES = HERE / "models" / "tales"
FOX = [{"role": "user", "content": "Tell me a tale of a fox"}]
CHATS, TEXTS_AT = "/v1/chat/completions", "/v1/completions"


class Server:
    """A server in a process of its own, which has no client but the tests."""

    def __init__(self, *flags, launcher=(sys.executable,)):
        command = [*launcher, HERE / "serve.py", *flags, "--port", 0, "--device", "cpu"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
        options = dict(stderr=subprocess.PIPE, text=True, env=environment)
        self.process = subprocess.Popen([*map(str, command)], **options)
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

    def begin(self, path: str = TEXTS_AT, body=None, method="POST", **headers):
        """A connection over which a request has been sent, and the rest is up to the caller."""
        connection = self.connect()
        body = json.dumps(body) if isinstance(body, dict) else body
        connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        return connection

    def ask(self, path: str, body=None, method="POST", **headers):
        """-> status, headers, the object that is answered (None if it is not one)."""
        answer = self.begin(path, body, method, **headers).getresponse()
        raw = answer.read()
        return answer.status, answer.headers, json.loads(raw) if raw[:1] == b"{" else None

    def text(self, path: str, **fields) -> dict:
        status, _, answer = self.ask(path, dict(max_tokens=12, temperature=0) | fields)
        assert status == 200, answer
        return answer["choices"][0] | answer

    def chat(self, messages=FOX, **fields) -> dict:
        return self.text(CHATS, messages=messages, **fields)

    def complete(self, prompt="Once upon a time", **fields) -> dict:
        return self.text(TEXTS_AT, prompt=prompt, **fields)

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
        accessed = re.compile(r'127\.0\.0\.1:\d+ - "[A-Z]+ \S+ HTTP/1\.1" \d{3}\n')
        strange = [line for line in served.lines[3:] if not accessed.fullmatch(line)]
        assert not strange, "the server's log has lines that are no request: mend what wrote them"


def test_serve_writes_what_run_py_writes(server, cli):
    flags = ("-m", TALES, "-n", 12, "-s", 7, "--top-p", 0.9, "--quiet")
    sampled = dict(temperature=0.8, top_p=0.9, seed=7)
    text = server.complete(**sampled)["text"]
    plain = cli(*flags, "-p", "Once upon a time", "--temp", 0.8, "--no-display-prompt")
    assert plain == (0, text + "\n", "")
    message = server.chat(**sampled)["message"]
    said = cli(*flags, "--chat", "-p", FOX[0]["content"], "--temp", 0.8)[1]
    assert said == message["content"] + "\n" and message["role"] == "assistant"
    texts = [server.complete(temperature=1.5, seed=seed)["text"] for seed in (0, 0, None, -1, 1)]
    assert texts[0] == texts[1] and len({*texts}) == 4, "a seed, also 0, is random unless given"


def test_serve_counts_and_reuses(server):
    """After an answer all but its last token is in the cache, and so is a prompt that was the one
    before."""
    turns, cached = [*FOX], None
    for _ in range(3):
        answer = server.chat(turns)
        usage = answer["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + 12
        assert usage["completion_tokens"] == 12 and answer["finish_reason"] == "length"
        assert cached in (None, usage["prompt_tokens_details"]["cached_tokens"])
        cached = usage["total_tokens"] - 1
        turns += [answer["message"], {"role": "user", "content": "And then?"}]
    ids = Tokenizer(TALES).encode("Once upon a time")
    assert server.complete(max_tokens=0)["text"] == ""
    usage = server.complete()["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (len(ids), len(ids) + 12)
    assert usage["prompt_tokens_details"] == {"cached_tokens": len(ids)}
    text = server.complete()["text"]
    assert server.complete(echo=True)["text"] == "Once upon a time" + text
    assert server.complete(ids, echo=True)["text"] == "Once upon a time" + text
    assert server.complete([ids])["text"] == text
    full = server.complete([1] * 1020, max_tokens=-1, ignore_eos=True)
    assert (full["usage"]["completion_tokens"], full["finish_reason"]) == (4, "length")


def test_serve_streams_the_same_text(server):
    chunks = server.stream(CHATS, messages=FOX)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    said = "".join(choice["delta"].get("content", "") for choice in choices)
    assert said == server.chat()["message"]["content"]
    heads = {(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks}
    assert heads == {(chunks[0]["id"], "chat.completion.chunk", "tales")}
    assert [choice["finish_reason"] for choice in choices] == [None] * 13 + ["length"]
    counting = dict(prompt="Once", stream_options={"include_usage": True})
    *_, end, usage = server.stream(TEXTS_AT, **counting)
    assert end["usage"] is None and usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    # what may begin a stop string is held back until the end of the text
    whole = server.complete()["text"]
    chunks = server.stream(TEXTS_AT, prompt="Once upon a time", stop=f"{whole[-4:]}@", echo=True)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Once upon a time" + whole
    word = whole.split()[3]
    for stop in word, ["@", word]:
        answer = server.complete(stop=stop)
        assert answer["text"] == whole[: whole.index(word)] and answer["finish_reason"] == "stop"
    answer = server.begin(body=dict(prompt="Once", stream=True, max_tokens=200)).getresponse()
    times = [time.monotonic() for line in answer if line.startswith(b"data")]
    late = "parts of a stream come together at its end: send each when it is written"
    assert times[100] - times[0] > 0.2 * (times[-1] - times[0]) > 0, late


def test_serve_logprobs(server):
    plain = dict(repeat_penalty=1)  # so that the most probable token is chosen
    content = server.chat(**plain, logprobs=True, top_logprobs=2)["logprobs"]["content"]
    tokens = "".join(entry["token"] for entry in content)
    assert tokens == " " + server.chat(**plain)["message"]["content"]
    for entry in content:
        first = entry["top_logprobs"][0]
        assert bytes(entry["bytes"]).decode() == entry["token"] == first["token"], "greedy"
        assert entry["logprob"] == first["logprob"] and len(entry["top_logprobs"]) == 2
    told = server.complete(**plain, logprobs=1)["logprobs"]
    text = server.complete(**plain)["text"]
    assert len(told["tokens"]) == 12 and list(map(max, told["top_logprobs"])) == told["tokens"]
    for token, offset in zip(told["tokens"], told["text_offset"]):
        assert text[offset:].startswith(token)
    streamed = server.stream(TEXTS_AT, prompt="Once upon a time", logprobs=1, **plain)
    seen = [chunk["choices"][0]["logprobs"]["token_logprobs"][0] for chunk in streamed[:-1]]
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
    for nothing in "", None, []:
        assert server.chat([*FOX, {"role": "assistant", "content": nothing}])["message"] == same
    begun = {"role": "assistant", "content": same["content"][:30]}
    rest = server.chat([*FOX, begun], max_tokens=4)["message"]["content"]
    assert (begun["content"] + rest).startswith(same["content"][:33])
    begun["content"] = same["content"][: same["content"].index(" ", 10) + 1]
    rest = server.chat([*FOX, begun], max_tokens=2)["message"]["content"]
    assert same["content"].startswith(begun["content"] + rest), "no second space"
    brief = "Be brief."
    for role in "system", "developer":
        asked = server.chat([{"role": role, "content": brief}, *FOX])["usage"]["prompt_tokens"]
        assert asked > server.chat()["usage"]["prompt_tokens"] + 3
    body = dict(messages=[*FOX, {"role": "system", "content": brief}])
    status, _, answer = server.ask(CHATS, body)
    assert status == 400 and "no place for this system message" in answer["error"]["message"]
    status, _, answer = server.ask(CHATS, dict(messages=[{"role": "assistant", "content": " "}]))
    assert status == 400 and "there is no message to answer" in answer["error"]["message"]


SAYS_NOTHING = dict(
    frequency_penalty=0.0, stop=None, max_tokens=None, stream=None, logprobs=None, model="any",
    stream_options={"include_usage": None}, user="me", unknown=[1], metadata={"a": "b"}, store=True,
    service_tier="auto", parallel_tool_calls=False, cache_prompt=True, dry_base=1.75, mirostat_tau=5,
)  # fmt: skip
AT_ITS_END = dict(  # the least and the most that a field may be, and whole numbers as floats
    max_tokens=[-1, 0, 2.0, (1 << 31) - 1], temperature=[0, 1e9], top_p=[0, 1], min_p=[0, 1],
    top_k=[-1, 0, 3.0, (1 << 31) - 1], repeat_penalty=[0.01, 100], repeat_last_n=[-1, 0, 2**31 - 1],
    seed=[-(1 << 63), -2, -1, 0, 5.0, 1 << 64], stop=["", [], ["a"] * 1024, "x" * 5000],
    ignore_eos=[True, False], logprobs=[False, True, 0, 20], n=[1.0], logit_bias=[[]],
)  # fmt: skip
WRONG_FIELDS = dict(
    model=[5], max_tokens=["5", 1.5, True, -2, 1 << 31], max_completion_tokens=[[]],
    temperature=["hot", -1, True, {}, 1.1e9, 10**400], top_p=[1.01, -0.01, "x"],
    top_k=[-2, 0.5, 1 << 31], min_p=[1.01, -0.01], repeat_penalty=[0.009, 100.1, "x"],
    repeat_last_n=[-2, 1 << 31], seed=["x", True, 0.5],
    stop=[5, [5], {}, ["a"] * 1025, [None]], stream=[1, "yes"],
    stream_options=[5, {"include_usage": 1}],
    temp=[-1], repetition_penalty=["x"],
    **{name: [3, "x", [{}], {"x": 1}] for name in UNSUPPORTED.keys() - CompletionRequest.names()},
)  # fmt: skip
WRONG_OF = {  # of one kind of request only
    CHATS: dict(logprobs=[1, "x"], top_logprobs=[21, -1, True, 1], messages=[[], "x", {}]),
    TEXTS_AT: dict(
        logprobs=["x", 21, -1], echo=[1], prompt=[5, [], ["a", "b"], [[]], [1.5], {}, [True]]
    ),
}


def test_serve_accepts_what_says_nothing_and_the_ends_of_ranges(server):
    same = server.chat()["message"]
    nothing = SAYS_NOTHING | {name: values[0] for name, values in UNSUPPORTED.items()}
    nothing |= dict(max_completion_tokens=12)
    assert server.chat(**nothing)["message"] == same
    assert server.complete(**nothing)["text"] == server.complete()["text"]
    for name, value in [(name, value) for name, values in AT_ITS_END.items() for value in values]:
        fields = dict(max_tokens=2) if name != "max_tokens" else dict(stop=[" "])
        assert server.complete(**fields | {name: value})["usage"]["completion_tokens"] < 9, name
    assert server.ask(TEXTS_AT, dict(prompt="a", n_predict=3))[2]["usage"]["completion_tokens"] == 3
    told = [server.complete(logprobs=k)["logprobs"] for k in (False, True)]
    assert told[0] is None and len(told[1]["top_logprobs"]) == 12
    sampled = [server.complete(temperature=1.5, seed=seed)["text"] for seed in (-2, -2, -3)]
    assert sampled[0] == sampled[1] != sampled[2]
    names = "repeat_penalty", "repetition_penalty"
    penalised = [server.complete(**{name: 2})["text"] for name in names]
    assert penalised[0] == penalised[1] != server.complete()["text"]


def test_a_request_refuses_no_field_that_it_has():
    """What a sampler learns need not be taken out of UNSUPPORTED."""

    class WithGrammar(CompletionRequest):
        grammar: str = ""

    body = b'{"prompt": "a", "grammar": "x"}'
    assert parse_request(body, WithGrammar).grammar == "x"
    with pytest.raises(APIError, match='grammar must be absent or ""'):
        parse_request(body, CompletionRequest)
    for name, value in ("n", b"true"), ("min_tokens", b"false"):
        body = b'{"prompt": "a", "%s": %s}' % (name.encode(), value)
        with pytest.raises(APIError, match=f"{name} must be absent or"):
            parse_request(body, CompletionRequest)


def test_serve_refuses_wrong_fields(server):
    good = dict(prompt="a", messages=FOX, max_tokens=1)
    for path, more in WRONG_OF.items():
        wrong = [(name, v) for name, values in (WRONG_FIELDS | more).items() for v in values]
        for name, value in wrong:
            status, _, answer = server.ask(path, good | {name: value})
            assert status == 400 and answer["error"]["param"] == name, (path, name, value)
            assert name in answer["error"]["message"] and answer["error"]["code"] == "invalid"
    user = FOX[0]
    for message in (
        "x", {}, {"role": "user"}, {"content": "x"}, {"role": 5, "content": "x"},
        user | {"role": "tool"}, user | {"content": 5}, user | {"content": {}},
        user | {"content": [{"type": "image_url", "image_url": {}}]}, user | {"tool_calls": [1]},
        user | {"content": [{"type": "text"}]}, user | {"content": ["x"]},
    ):  # fmt: skip
        status, _, answer = server.ask(CHATS, dict(messages=[user, message]))
        assert status == 400 and answer["error"]["param"].startswith("messages[1]")
    for path, fields, said in (
        (CHATS, {"messages": [user | {"content": [{"type": "image_url"}]}]},
         "messages[0].content: must be a string, or a list of parts of the type text: only text"),
        (CHATS, {"messages": [user | {"tool_calls": [1]}]}, "tools are not supported"),
        (TEXTS_AT, {"prompt": ["a", "b"]}, "prompt: must be one prompt: a string, or a list of ids"),
        (TEXTS_AT, {"prompt": "a", "stop": 5}, "stop: must be a string, or a list of at most 1024"),
        (TEXTS_AT, {"prompt": "a", "logprobs": 21}, "logprobs: must be from 0 to 20, or true"),
    ):  # fmt: skip
        message = server.ask(path, fields)[2]["error"]["message"]
        assert said in message and "Input should be" not in message


def test_serve_refuses_wrong_bodies(server):
    """A body may have 8 MiB, and not a byte more."""
    surrogate = b'{"prompt": "a\\ud800"}'
    deep = b'{"prompt": ' + b"[" * 200_000
    for body in b"", b"{", b"[]", b"5", b"\xff\xfe{}", b"{}", surrogate, deep, b"9" * 5000:
        status, _, answer = server.ask(TEXTS_AT, body)
        assert status == 400 and answer["error"]["message"], body[:30]
    for prompt in "tale " * 2000, [1] * 2000:
        status, _, answer = server.ask(TEXTS_AT, dict(prompt=prompt))
        error = answer["error"]
        assert status == 400 and error["code"] == "context_length_exceeded"
        assert re.search(r" 200\d tokens; the context holds 1024 \(ctx_size\)$", error["message"])
    assert server.ask(TEXTS_AT, dict(prompt=[1, 99999]))[0] == 400
    largest = b'{"prompt": "a", "max_tokens": 1}'.ljust(8 << 20)
    assert server.ask(TEXTS_AT, largest)[0] == 200
    in_chunks = (largest[i : i + 65536] for i in range(0, len(largest), 65536))
    assert server.begin(TEXTS_AT, in_chunks).getresponse().status == 200
    status, _, answer = server.ask(TEXTS_AT, largest + b" ")
    assert status == 413 and answer["error"]["code"] == "too_large"
    endless = (b" " * 65536 for _ in range(140))
    assert server.begin(TEXTS_AT, endless).getresponse().status == 413
    announced = server.connect()
    announced.putrequest("POST", TEXTS_AT)
    announced.putheader("Content-Length", 1 << 40)
    announced.endheaders()
    assert announced.getresponse().status == 413, "before it comes"


def test_serve_paths(server):
    model = {"id": "tales", "object": "model", "created": 0, "owned_by": "fused-llama"}
    model |= {"context_length": 1024, "max_model_len": 1024}
    origin = "http://localhost:3000"
    for method, path, status, expected in (
        ("GET", "/health", 200, {"status": "ok"}), ("GET", "/v1/models", 200, {"object": "list"}),
        ("GET", "/v1/health", 200, {"status": "ok"}), ("GET", "/models", 200, {"data": [model]}),
        ("GET", "/nothing", 404, {}), ("GET", "/v1/completions", 405, {}),
        ("DELETE", "/v1/models", 405, {}), ("HEAD", "/v1/models", 200, None),
        ("HEAD", "/v1/completions", 405, None), ("GET", "/v1/models/tales", 200, model),
        ("GET", "/v1/models/other", 404, {}), ("GET", "/models/a/b%7B", 404, {}),
    ):  # fmt: skip
        got, headers, answer = server.ask(path, method=method, Origin=origin)
        assert (got, headers["access-control-allow-origin"]) == (status, origin), path
        if status >= 400 and answer:
            assert answer["error"].keys() >= {"message", "type", "code"}
        elif expected:
            assert expected.items() <= answer.items()
    fields = dict(messages=FOX, prompt="a", max_tokens=2)
    for path in "/chat/completions", "/completions":
        assert server.ask(path, fields)[0] == 200, "as with /v1"
    connection = server.connect()
    connection.connect()
    socket_used = connection.sock
    for _ in range(3):
        connection.request("GET", "/v1/models")
        assert connection.getresponse().read() and connection.sock is socket_used, "kept alive"


def test_serve_tokens_of_a_text(server):
    """As llama.cpp's server tells them; nothing that is cached goes."""
    ids = Tokenizer(TALES).encode("Once upon a time")
    used = server.complete(max_tokens=0)["usage"]
    for add_special in False, True:
        fields = dict(content="Once upon a time", add_special=add_special)
        told = server.ask("/tokenize", fields)[2]["tokens"]
        assert told == (ids if add_special else ids[1:])
        for path in "/detokenize", "/v1/detokenize":
            assert server.ask(path, {"tokens": told})[2] == {"content": "Once upon a time"}
    cached = server.complete(max_tokens=0)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == used["prompt_tokens"]
    for path, wrong, name in (
        ("/tokenize", {}, "content"), ("/tokenize", {"content": 5}, "content"),
        ("/detokenize", {"tokens": "a"}, "tokens"), ("/detokenize", {"tokens": [1.5]}, "tokens"),
    ):  # fmt: skip
        status, _, answer = server.ask(path, wrong)
        assert status == 400 and answer["error"]["param"] == name


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
        status, headers, answer = server.ask(TEXTS_AT, b"{", Origin=origin)
        assert headers["access-control-allow-origin"] == (origin if is_allowed else None)
        refused = (403, "origin_not_allowed")  # and generates nothing
        expected = (400, "invalid") if is_allowed else refused
        assert (status, answer["error"]["code"]) == expected, origin
    local = dict(method="GET", Origin="http://localhost")
    with Server("-m", tiny, "--api-key", "żaba", "--queue", 0) as keyed:
        for path in "/v1/models", "/nothing":
            for wrong in {}, {"Authorization": "Bearer x"}, {"Authorization": "żaba".encode()}:
                status, headers, answer = keyed.ask(path, **local, **wrong)
                assert status == 401 and answer["error"]["code"] == "invalid_api_key"
                assert headers["access-control-allow-origin"] == local["Origin"]
                assert headers["www-authenticate"] == "Bearer"
        key = dict(Authorization="Bearer żaba".encode())
        assert keyed.ask("/v1/models", method="GET", **key)[0] == 200
        assert keyed.ask("/health", method="GET")[0] == 200
        preflight = asks | dict(Origin="http://localhost")
        assert keyed.ask("/v1/models", method="OPTIONS", **preflight)[0] == 200
        # of a queue of 0, one text is written and none waits
        busy = keyed.begin(body=LONG | dict(stream=True), **key)
        assert busy.getresponse().readline().startswith(b"data")
        assert keyed.ask(TEXTS_AT, LONG, **key)[0] == 503
        busy.close()
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
    status, headers, answer = server.ask(TEXTS_AT, LONG)
    assert (status, headers["retry-after"]) == (503, "2")
    assert answer["error"]["code"] == "queue_full"
    assert answer["error"]["message"] == "the server is busy, and its queue of 1 is full"
    assert server.ask("/health", method="GET")[0] == 200, "while a text is written"
    waiting.close()
    second = server.begin(body=dict(prompt="Once upon a time", max_tokens=12, temperature=0))

    def waits() -> bool:
        nonlocal second
        if not select.select([second.sock], [], [], 0.2)[0]:
            return True
        second = server.begin(body=dict(prompt="Once upon a time", max_tokens=12, temperature=0))
        return False

    assert eventually(waits), "the place of the client that has left"
    start = time.monotonic()
    running.close()
    assert json.loads(second.getresponse().read())["choices"][0]["text"] == said
    whole = server.begin(body=LONG)  # without a stream
    time.sleep(0.1)
    whole.close()
    truncated = server.connect()
    truncated.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
    truncated.sock.sendall(head)
    assert server.complete()["text"] == said
    assert time.monotonic() - start < 5, "and not the long texts"
    truncated.close()


def test_serve_many_at_once(server):
    """Half of them leave midway; the others get their text, or 503."""
    said = [server.complete()["text"], server.chat()["message"]]
    rss = lambda: int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096

    def one(i: int):
        if i % 2:
            client = server.begin(body=LONG | dict(stream=i % 4 == 1))
            time.sleep(random.random() / 5)
            client.close()
        else:
            fields = dict(prompt="The fox", max_tokens=5, stream=i % 4 == 0)
            assert server.ask(TEXTS_AT, fields)[0] in (200, 503)

    before = rss()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(60)))
    one_token = dict(prompt="a", max_tokens=1)
    assert eventually(lambda: server.ask(TEXTS_AT, one_token)[0] == 200), "no text after 20 s"
    assert [server.complete()["text"], server.chat()["message"]] == said
    assert rss() < before + 100e6, "100 MB more than before: what keeps requests that have ended?"


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
        assert len(served.lines) == 4


def test_serve_ends_if_nobody_can_be_answered():
    with Server("-m", TALES) as served:
        front = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text()
        os.kill(int(front), signal.SIGKILL)
        assert served.process.wait(PATIENCE) == 1
    assert served.lines[3:] == ["error: the process that answers clients has ended\n"]


def test_serve_goes_on_after_an_error(tiny, monkeypatch, capfd):
    """Whoever asked is told, and of what was evaluated until then nothing is reused."""
    session, link = Session(tiny, dtype="fp32", device="cpu"), serve.Link()
    fields = dict(prompt="Once upon a time", max_tokens=4, temperature=0, ignore_eos=True)

    def answer(debug=False, **more) -> list[serve.Part]:
        body = json.dumps(fields | more).encode()
        request = parse_request(body, CompletionRequest)
        sent = []
        link.pipe = SimpleNamespace(recv=lambda: request, send=sent.append)
        serve.write_next(session, "tiny", link, debug)
        assert [part.last for part in sent] == [False] * (len(sent) - 1) + [True]
        return sent

    [said] = answer()
    text = json.loads(said.body)["choices"][0]["text"]
    for kind in RuntimeError, ValueError, OSError:
        with monkeypatch.context() as patch:
            patch.setattr(session.model, "step", fails(kind("broken")))
            begun, error = answer(stream=True, echo=True)
            assert begun.status == 200 and b"Once upon a time" in begun.body
            assert error.body.startswith(b'data: {"error":{"message":"broken"')
            assert session.state.pos == 0
            [error] = answer()
            assert error.status == 500 and json.loads(error.body)["error"]["code"] == "failed"
            assert session.state.pos == 0
            assert capfd.readouterr().err == "error: broken\n" * 2
            answer(debug=True)
            assert re.match(
                rf"Traceback .*\n{kind.__name__}: broken\n$", capfd.readouterr().err, re.DOTALL
            )
        assert json.loads(answer()[0].body)["choices"][0]["text"] == text and len(text) > 4
    [error] = answer(prompt="tale " * 2000)
    assert error.status == 400 and session.state.pos > 0, "what is cached stays"
    assert capfd.readouterr().err == ""


def test_serve_refuses_to_start(monkeypatch, capfd, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        call = caller(serve.main, monkeypatch, capfd, "--device", "cpu")
        result = call("--port", port)
        assert_refused(result, f"cannot listen on 127.0.0.1, port {port}: Address already in use\n")
    empty = "-m, --host or --api-key is empty"
    for flags, said in (
        (["--api-key="], empty), (["--host="], empty), (["-m", ""], empty),
        (["--port", 65536], "65536: must be from 0 to 65,535"), (["--port", -1], "--port"),
        (["--queue", -1], "--queue"), (["--queue", 10_001], "must be from 0 to 10,000"),
        (["--fp8", "--int4"], "both say how"), (["--temp", -1], "--temp"), (["-n", 5], "unknown flag -n (see --help)"),
    ):  # fmt: skip
        assert_refused(call(*flags), said, code=2)
    args = serve.parse_args("--queue 10000 --port 65535 --temp 0.5".split())
    assert args.queue == 10_000 and cli_module.sampling_flags(args) == {"temp": 0.5}


def test_serve_on_several_ranks(server):
    flags = f"-m torch.distributed.run --nproc-per-node 2 --master-port {free_port()}"
    with Server("-m", TALES, "--dtype", "fp32", launcher=[sys.executable, *flags.split()]) as ranks:
        text = ranks.complete()["text"]
        leaving = ranks.begin(body=LONG | dict(stream=True))
        leaving.getresponse().readline()
        leaving.close()
        assert ranks.complete()["text"] == text, "both stopped at the same token"
        assert ranks.ask(TEXTS_AT, dict(prompt="tale " * 2000))[0] == 400
        assert ranks.chat(temperature=1)["message"]["content"]
        ranks.process.send_signal(signal.SIGINT)  # torchrun ends its ranks, where a kill would not
        ranks.process.wait(PATIENCE)


def test_serve_as_the_openai_package_asks(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any")
    asks = dict(model="tales", messages=FOX, max_tokens=12, temperature=0)
    assert [model.id for model in client.models.list()] == ["tales"]
    assert client.models.retrieve("tales").id == "tales"
    whole = client.chat.completions.create(**asks, logprobs=True, top_logprobs=2).choices[0]
    assert whole.logprobs.content[0].top_logprobs[0].token == whole.logprobs.content[0].token
    chunks = client.chat.completions.create(**asks, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.message.content
    with pytest.raises(openai.BadRequestError, match="n must be absent or 1"):
        client.chat.completions.create(**asks, n=2)


# ---- loading/checkpoint.py


@pytest.mark.parametrize("family, fp8, backend", [
    ("mixtral", "e4m3", "triton"), (UNDIVIDED, None, "triton"),
    *((name, None, "torch") for name in FAMILIES), ("qwen 2.5", "e4m3", "torch"), ("qwen 3", "e5m2", "torch"),
    # for Triton's kernels, the others are as the model of most tests
    ("qwen 2.5", None, "triton"), ("qwen 3", None, "triton"), ("qwen 3 moe", None, "triton"),
    ("mixtral", "e4m3", "torch"), ("qwen 3 moe", "int4", "torch"), ("granite code", None, "triton"),
    ("granite code", "e4m3", "torch"), ("granite code", "int4", "torch"),
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
        decoded = load(tmp_path, dtype="fp32", device="cpu", format=fp8)
        with_dense_weights(decoded)
        expected = logits_of(decoded, prompt)
        if device == "cuda":  # one at a time, since it rounds those of several tokens to 8 bits
            assert_close(logits_of(ours, prompt, *[1] * T), expected, 1e-4)
            return
        pieces = logits_of(ours, prompt, T - 12, 1, 10, 1)
        assert_close(pieces, expected, 0.02)  # with an activation in fp16 on a CPU
        assert_close(logits_of(ours, prompt), expected, 1e-4)
        return
    pieces = logits_of(ours, prompt, T - 12, 1, 10, 1)
    assert_close(pieces, oracle(theirs, prompt.tolist()), 1e-4)
    if backend == "torch":
        text = prompt.tolist() + greedy(ours, prompt.tolist(), 12)
        exact = oracle(theirs, text)
        assert_close(logits_of(ours, text), exact, 1e-4)
        logits, tokens = exact[T - 1 : -1], torch.tensor(text[T:])
        behind = logits.amax(1) - logits[range(12), tokens]
        # the best two may be tied to within rounding; ours are up to 2.3e-5 of their spread off
        assert (behind < 1e-4 * logits.std(1)).all(), behind


def test_head_dim_that_the_kernels_cannot_run(cli, copy):
    size = Tokenizer(copy).vocabulary.sp.vocab_size()
    hugging_face_model(size, head_dim=20).save_pretrained(copy)
    flags = ("-m", copy, "-p", "Once", "-n", 2, "--device")
    code, _, err = cli(*flags, DEVICE.type, "--backend", "triton")
    said = "head_dim is 20; the kernels need a multiple of 8: use backend torch"
    assert code == 1 and said in err.splitlines()[-1]
    assert cli(*flags, "cpu")[0] == 0


def test_messages_are_one_line(copy):
    folder = copy.rename(copy.parent / "a\n\x1b[31mb")
    spoil_tensors(lambda t: t[NORM].fill_(torch.nan))(folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('a\nb\x1b[31m' * 999) }}")
    model, tokenizer = load(folder, device="cpu"), Tokenizer(folder)
    sampling = write("generation_config.json", json.dumps({"temperature": "x\ny\x1b" * 999}))
    more_tensors = spoil_tensors(lambda t: t.update({"\n" * 9: torch.ones(1)}))
    for act in (
        lambda: list(generate(model, [1, 5])),
        lambda: tokenizer.apply_chat_template(conversation("hello")),
        lambda: more_tensors(folder) or load(folder),
        lambda: checkpoint.Checkpoint(folder),
        lambda: spoil_config(hidden_act="x\ny" * 100_000)(folder) or load(folder),
        lambda: save(folder, folder / "new"),
        lambda: sampling(folder) and config_module.read_sampling(folder),
    ):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            act()
        assert len(str(raised.value)) <= 500 and str(raised.value).isprintable(), raised.value


@pytest.mark.parametrize("shape", ["gqa", "mqa, tied"])
def test_loading_bar_ends_full(copy, monkeypatch, shape):
    bars, original, shown = [], checkpoint.tqdm, dict(disable=False, file=io.StringIO())
    made = lambda **options: bars.append(original(**options | shown)) or bars[-1]
    monkeypatch.setattr(checkpoint, "tqdm", made)
    hugging_face_model(read_config(copy).vocab_size, **FAMILIES[shape]).save_pretrained(copy)
    saved = save(copy, copy.parent / "saved", format="e4m3").parent
    for folder, form in ((copy, None), (copy, "e4m3"), (saved, None)):
        load(folder, format=form)
        assert bars[-1].n == bars[-1].total > 0, (folder, form)


# ---- tokenizer.py


def streamed(tokenizer: Tokenizer, ids: list[int], strip_space=False) -> list[str]:
    stream = TextStream(tokenizer, strip_space)
    return [stream.push(i) for i in ids] + [stream.finish()]


# any text, but for the character that SentencePiece takes for a space
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581\0"))
FEW_LETTERS = st.text("ab é🐢", max_size=12)


def encode_after(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of text that continues other text, as those of a chat do."""
    return tokenizer.vocabulary.encode_chat(text, [], after=True)


def in_parts(tokenizer: Tokenizer, text: str, cuts: list[int]) -> list[int]:
    """The ids of a text that was cut at these characters."""
    ends = sorted(cut % (len(text) + 1) for cut in cuts) + [len(text)]
    parts = [text[a:b] for a, b in zip([0, *ends], ends)]
    first, *others = (encode_after(tokenizer, part) for part in ["x" + parts[0], *parts[1:]])
    return [*first[1:], *itertools.chain(*others)]


@examples(200, text=ANY_TEXT, before=st.sampled_from(["so.", "a", "\n", ""]))
@hypothesis.example(text="</s><s>", before="so.")
@hypothesis.example(text=" two spaces  inside ", before="so.")
def test_tokenizer_round_trip(tiny, text, before):
    tokenizer = Tokenizer(tiny)
    ids = tokenizer.encode(text, bos=False)
    assert tokenizer.decode(ids) == text == tokenizer.vocabulary.sp.decode(ids)
    assert tokenizer.bos not in ids and tokenizer.eos not in ids
    assert tokenizer.encode(text) == [tokenizer.bos, *ids]
    pieces = streamed(tokenizer, ids, tokenizer.vocabulary.adds_space)
    assert "".join(pieces) == text, "the stream loses or adds characters"
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces), "a character was cut in two"
    if before:
        joined = tokenizer.encode(before) + encode_after(tokenizer, text)
        assert tokenizer.decode(joined) == before + text
    words = tokenizer.encode("time", bos=False)
    assert "".join(streamed(tokenizer, words)) == " time", "text goes on with its space"


@examples(
    400, text=FEW_LETTERS, cuts=st.lists(st.integers(0, 12), max_size=4),
    stops=st.lists(st.text("ab é🐢", min_size=1, max_size=4), max_size=3),
)  # fmt: skip
@hypothesis.example(text="ab", cuts=[], stops=["bc"])
@hypothesis.example(text="aab", cuts=[1, 2], stops=["ab", "aac"])
@hypothesis.example(text="xINST", cuts=[], stops=["xINS", "N"])  # a token in which both end
def test_stop_strings_across_tokens(tiny, text, cuts, stops):
    """The one that ends first counts, however the text is cut into tokens; of those that end
    together, the longest. What only begins like one is shown, at the latest at the end."""
    tokenizer = Tokenizer(tiny)
    stream, shown = TextStream(tokenizer, stops=stops), ""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    for i in in_parts(tokenizer, text, cuts):
        shown += stream.push(i)
        assert expected.startswith(shown), "what belongs to a stop string was shown"
        longest = max(map(len, stops), default=1) - 1
        assert stream.stopped or stream.held_back <= longest, "more is held back than may be one"
    assert shown + stream.finish() == expected, "characters are lost, or a stop string is shown"
    assert stream.stopped == bool(ends)


def test_continued_answers_keep_their_white_space():
    """But for a last space, which the next token brings."""
    tokenizer = Tokenizer(TALES)
    for said, kept, leaves_space in (
        ("A fox.", "A fox.", False), ("A fox ", "A fox", True), ("\nA fox\n", "A fox\n", False),
        ("A fox\n  ", "A fox\n ", True),
    ):  # fmt: skip
        messages = [*FOX, {"role": "assistant", "content": said}]
        prompt = tokenizer.chat_prompt(messages, continues=True)
        assert prompt.text.endswith(f"[/INST] {kept}") and prompt.leaves_space == leaves_space


def test_continuation_takes_what_does_not_merge():
    """The ids of a continuation are those after a character that stays a token of its own; a dot
    may merge with what follows. The "_" stands for the space that SentencePiece puts before a
    text."""
    encode = lambda text: [ord(c) for c in "_" + text.replace(".b", "X").replace("\nb", "Y")]
    assert encode_continuation("bc", encode) == [ord("b"), ord("c")]
    all_merge = lambda text: [hash(text)]
    assert encode_continuation("c", all_merge) == [hash("c")], "where all merge, as if alone"


@examples(100, raw=st.binary(max_size=8))
@hypothesis.example(raw=b"\xf0\x9f\x90")
@hypothesis.example(raw=b"\xed\xa0\x80\xc3\xa9\xe2\x82")
def test_ids_and_bytes_that_are_no_text(tiny, raw):
    """Bytes that make no character are decoded as SentencePiece does."""
    tokenizer = Tokenizer(tiny)
    assert tokenizer.decode([-1, 1 << 40, 1 << 20]) == ""
    byte = {int(tokenizer.vocabulary.sp.id_to_piece(i)[3:5], 16): i for i in range(3, 259)}
    ids = [byte[b] for b in b"a" + raw]
    text = tokenizer.vocabulary.sp.decode(ids)
    assert "".join(streamed(tokenizer, ids)) == text
    assert tokenizer.decode(ids) == text


def test_half_typed_control_tokens(tiny):
    t = Tokenizer(tiny)
    halves = (("{}/s>", "a <"), ("{}/s>", "</s> <\n"), ("</{}", "s> a"), ("</{}", " s>"))
    for template, typed in halves:
        t.chat_template = template.format("{{ messages[0]['content'].strip() }}")
        ids = t.apply_chat_template(conversation(typed))
        assert t.eos not in ids and "</s>" in t.decode(ids), (template, typed)
        assert t.turn_ends() == (set(), []), "it writes no answer, nor what ends one"
    turn = "{{ m.content }}\n### end of {{ m.role }}\n---\n"
    t.chat_template = "{% for m in messages %}" + turn + "{% endfor %}"
    assert t.turn_ends() == (set(), ["### end of assistant"]), "a stop string is one line"


def test_added_tokens_and_bos(copy):
    size = Tokenizer(copy).vocabulary.size
    end = lambda *given: Tokenizer(copy, *given).control.get("<|im_end|>")
    (copy / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size}))
    assert end() == end(size + 1) == size
    assert end(size) is None, "the model has no embedding for it"
    assert Tokenizer(copy, bos_id=7).bos == 1, "the tokenizer's own comes first"
    for adds_bos, first in ((False, []), (True, [1]), (None, [1])):
        (copy / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": adds_bos}))
        assert Tokenizer(copy).encode("x") == first + Tokenizer(copy).vocabulary.sp.encode("x")
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


@pytest.mark.parametrize("as_json", [False, True])
def test_added_tokens_that_are_whole_words(copy, as_json):
    """Beside a letter they are not found, in a text or in what the template writes."""
    if as_json:
        (copy / "tokenizer.model").unlink()
        train_tokenizer_json(copy, "llama 3")
    first = Tokenizer(copy).vocabulary.size_with_added
    flags = dict(single_word=True, lstrip=False, rstrip=False, normalized=False)
    added = {
        first: dict(content="zqzq", special=False, **flags),
        first + 1: dict(content="<q>", special=True, **flags),
    }
    template = "x<q>y <q> {{ messages[0].content }}"
    config = dict(added_tokens_decoder=added, chat_template=template)
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    t = Tokenizer(copy)
    for text, count in ("zqzq", 1), ("a zqzq, b zqzq", 2), ("azqzq zqzqs _zqzq zqzq1", 0):
        assert t.encode(text).count(first) == count, text
    ids = t.apply_chat_template(conversation("zqzq zqzqs"))
    assert ids.count(first) == 1 and ids.count(first + 1) == 1


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
    with changed_json(folder / "tokenizer.json") as raw:
        raw["model"] |= dict(byte_fallback=False, fuse_unk=False)  # which old files do not say
    for legacy, prefix in itertools.product((True, False), (True, False, None)):
        with changed_json(folder / "tokenizer_config.json") as config:
            config |= dict(tokenizer_class="LlamaTokenizer", legacy=legacy, add_prefix_space=prefix)
        ours, theirs = Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
        for text in (TEXT, "  x\n", *(random_text(20) for _ in range(50))):
            assert ours.encode(text) == theirs(text)["input_ids"], (legacy, prefix, text)
        chat = conversation("the fox", " a", "x ")
        expected = theirs.apply_chat_template(chat)["input_ids"]
        assert ours.apply_chat_template(chat, False) == expected


def test_unknown_tokens_of_unigram(tmp_path):
    """They are not mistaken for typed control tokens."""
    pieces = [("<unk>", 0.0), ("\u2581", -1.0), ("a", -2.0)]
    own = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    own.decoder = tokenizers.decoders.Metaspace()
    own.add_special_tokens(["<unk>"])
    own.save(str(tmp_path / "tokenizer.json"))
    for text in ("a\n\na", "日本語 a", "aé"):
        ids = own.encode(text, add_special_tokens=False).ids
        assert Tokenizer(tmp_path).encode(text, bos=False) == ids


@pytest.mark.parametrize("normalized", [True, False])
def test_control_tokens_in_normalised_text(tmp_path, normalized):
    """A token that is matched there has taken the space of what follows, as in the library."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", "\u2581", *"abx<>|"])}
    own = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
    n, d = tokenizers.normalizers, tokenizers.decoders
    own.normalizer = n.Sequence([n.Prepend("\u2581"), n.Replace(" ", "\u2581")])
    own.decoder = d.Replace("\u2581", " ")
    own.add_tokens([tokenizers.AddedToken("<|x|>", normalized=normalized)])
    own.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("<|x|>{{ messages[0].content }}")
    ids = Tokenizer(tmp_path).apply_chat_template(conversation("ab"))
    assert ids == own.encode("<|x|>ab", add_special_tokens=False).ids


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
    config = {"chat_template": CHAT_FAMILIES["mistral 7b v0.3"][2]}
    config |= {} if legacy is None else {"legacy": legacy}
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
    options = dict(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    t.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(**options))
    return json.loads(t.to_str())


def train_tokenizer_json(folder: Path, family: str) -> Path:
    """A folder with a tokenizer.json of that family's kind, its control tokens and its template."""
    kind, control, template = CHAT_FAMILIES[family]
    pre, normalizers = tokenizers.pre_tokenizers, tokenizers.normalizers
    if kind == "byte level":
        cut = pre.ByteLevel(add_prefix_space=False)
        raw = train_byte_pairs(cut, [TEXT] * 20, pre.ByteLevel.alphabet())
        t = tokenizers.Tokenizer.from_str(json.dumps(raw))
    else:
        pieces = train_byte_pairs(pre.Metaspace(prepend_scheme="first"), [TEXT] * 20, [])["model"]
        vocab = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *pieces["vocab"]]
        ids = {piece: i for i, piece in enumerate(vocab)}
        t = transformers.LlamaTokenizer(ids, [*map(tuple, pieces["merges"])]).backend_tokenizer
    # from old tokenizers: a space before the text and after each control token
    if kind == "spaced pieces":
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        t.normalizer, t.pre_tokenizer = normalizers.Sequence(spaces), None
    for token in control:
        flags = dict(special="hink" not in token and "User" not in token, normalized=False)
        strips = dict(lstrip=token == "<|im_end|>", rstrip=token == "<|end_header_id|>")
        t.add_tokens([tokenizers.AddedToken(token, **flags, **strips)])
    bos, eos, *_ = control
    if family != "qwen 3":
        ids = [(bos, t.token_to_id(bos))]
        t.post_processor = tokenizers.processors.TemplateProcessing(f"{bos} $A", special_tokens=ids)
    t.save(str(folder / "tokenizer.json"))
    config = dict(bos_token=bos, eos_token=eos, chat_template=template)
    config |= dict(tokenizer_class="PreTrainedTokenizerFast")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def random_text(length: int) -> str:
    """Words, white space, and characters of all planes, except U+2581, which SentencePiece takes
    for a space."""
    planes = [(32, 127), (32, 0x300), (0x300, 0xD800), (0xE000, 0x110000)]
    words = ["the", " fox", "  ", "\n", "\n\n", "\t", "12"]
    one = lambda: random.choice([*words, chr(random.randrange(*random.choice(planes)))])
    return "".join(one() for _ in range(random.randrange(length))).replace("\u2581", " ")


@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_tokenizer_json_equals_transformers(tmp_path, family):
    """Text, whole and in two parts, and conversations."""
    ours = Tokenizer(train_tokenizer_json(tmp_path, family))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for _ in range(150):
        text = random_text(30)
        assert ours.encode(text) == theirs(text)["input_ids"], (text,)
        ids = ours.encode(text, bos=False)
        pieces = streamed(ours, ids, ours.vocabulary.adds_space)
        assert "".join(pieces) == ours.decode(ids) == theirs.decode(ids), (text,)
        assert not any("\ufffd" in piece for piece in pieces), (text,)
        split = random.randrange(1, len(text) + 2)
        joined = ours.encode(text[:split], bos=False) + encode_after(ours, text[split:])
        # "pieces" begin with a space, unless the text does
        whole = text.removeprefix(" ") if CHAT_FAMILIES[family][0] == "pieces" else text
        assert ours.decode(ids) == ours.decode(joined) == whole, (text, split)
    long = "a" + random_text(20_000) * 5
    assert ours.decode(ours.encode(long, bos=False)) == long
    cut = ours.encode("a\U00010348", bos=False)  # a character of four tokens
    assert len(cut) > 4
    assert all(ours.decode(cut[:n]) == theirs.decode(cut[:n]) for n in range(1, len(cut)))
    talks = [[random_text(12) for _ in range(random.choice([1, 3, 5]))] for _ in range(10)]
    talks.append(["hi", "<think>\nhm\n</think>\n\nhello", "again"])
    for texts, system, more in itertools.product(talks, ("", "Be kind."), (True, False)):
        messages = conversation(*texts, system=system)
        asked = dict(add_generation_prompt=more, return_dict=False)
        expected = theirs.apply_chat_template(messages, **asked)
        assert ours.apply_chat_template(messages, more) == expected, messages


def in_vocabulary(raw: dict, config: dict) -> None:
    added = raw["added_tokens"]
    raw["added_tokens"] = []
    raw["model"]["vocab"] |= {token["content"]: token["id"] for token in added}
    config["additional_special_tokens"] = [token["content"] for token in added]


def named_by_a_dict(raw: dict, config: dict) -> None:
    in_vocabulary(raw, config)
    names = config.pop("additional_special_tokens")
    config["extra_special_tokens"] = dict(zip("abcde", names))


def with_gaps(raw: dict, config: dict) -> None:
    for i, token in enumerate(raw["added_tokens"]):
        token["id"] += 7 * i


def spaces_of_another_sign(raw: dict, config: dict) -> None:
    """And another letter for an "a"."""
    raw["model"] = json.loads(json.dumps(raw["model"]).replace("\\u2581", "|"))
    raw["pre_tokenizer"]["replacement"] = "|"
    first, *others = raw["decoder"]["decoders"]
    first["pattern"]["String"] = "|"
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "A"}
    raw["decoder"]["decoders"] = [replace, first, *others]


def control_tokens_first(raw: dict, config: dict) -> None:
    """From id 0 on, as SmolLM2 has them. The first is one that the configuration does not name."""
    raw["added_tokens"].reverse()
    vocab = raw["model"]["vocab"]
    names = [token["content"] for token in raw["added_tokens"]]
    pieces = [*names, *sorted(vocab, key=vocab.get)]
    raw["model"]["vocab"] = {piece: i for i, piece in enumerate(pieces)}
    for i, token in enumerate(raw["added_tokens"]):
        token["id"] = i
    raw["post_processor"] = None


UNUSUAL = {
    "control tokens first": control_tokens_first,
    "special tokens named only": in_vocabulary,
    "special tokens named by a dict": named_by_a_dict,
    "gaps between ids": with_gaps,
    "ids in another order": lambda raw, config: raw["added_tokens"].reverse(),
    "bos, says the configuration": lambda raw, config: config.update(add_bos_token=True),
    "no bos, says the configuration": lambda raw, config: config.update(add_bos_token=False),
    "special tokens are text": lambda raw, config: config.update(split_special_tokens=True),
    "spaces of another sign": spaces_of_another_sign,
}


@pytest.mark.parametrize("family, how", [
    *itertools.product(("llama 3", "qwen 3"), [*UNUSUAL][:-1]),
    ("mistral 7b v0.3", "spaces of another sign"),
])  # fmt: skip
def test_unusual_tokenizer_json_equals_transformers(tmp_path, family, how):
    folder = train_tokenizer_json(tmp_path, family)
    config = folder / "tokenizer_config.json"
    with changed_json(folder / "tokenizer.json") as raw, changed_json(config) as said:
        UNUSUAL[how](raw, said)
    ours, theirs = Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("Once upon a time", " a  b", "\u00e9  a"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    messages = conversation("hi", "hello", "again")
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat_template(messages) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_template_has_what_transformers_gives(tmp_path):
    theirs = transformers.AutoTokenizer.from_pretrained(train_tokenizer_json(tmp_path, "llama 3"))
    source = (
        "{% generation %}\n  {% for m in messages %}\n{% if loop.index > 2 %}{% break %}{% endif %}{{ m | tojson }}"
        "{% endfor %}\n  {% endgeneration %}\n{{ strftime_now('%Y') }}{{ tools is none }}{{ eos_token }}"
    )
    theirs.chat_template = source
    (tmp_path / "chat_template.jinja").write_text(source)
    messages = conversation("<a> Ż", "b", "c")
    expected = theirs.apply_chat_template(messages, tokenize=False)
    assert Tokenizer(tmp_path).chat_prompt(messages).text == expected


@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_typed_control_tokens_are_text(tmp_path, family):
    """Wherever the template puts them: control tokens are those of a harmless talk, and no
    character is lost."""
    t = Tokenizer(train_tokenizer_json(tmp_path, family))
    numbers, names = set(t.control.values()), [name for name in t.control if "think" not in name]
    halves = [name[: random.randrange(len(name))] for name in names] + [n[2:] for n in names]
    parts = [*names, *halves, " ", "\n", "x", "<"]

    def control_of(*texts: str) -> list[int]:
        ids = t.apply_chat_template(conversation(*texts, system="y"))
        return [i for i in ids if i in numbers]

    harmless = control_of("x", "x", "x")
    for _ in range(50):
        typed, answer = ("".join(random.choices(parts, k=random.randrange(1, 8))) for _ in range(2))
        assert control_of(typed, answer, typed) == harmless, (typed, answer)
        assert typed.strip() in t.decode(t.apply_chat_template(conversation(typed))), (typed,)
        assert numbers.isdisjoint(t.encode(typed, bos=False)), (typed,)
        assert t.decode(t.encode("x" + typed, bos=False)) == "x" + typed


@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_answers_keep_their_tokens(tmp_path, family):
    """A conversation goes on after the very tokens of an answer, and the template says which token
    ended it."""
    t = Tokenizer(train_tokenizer_json(tmp_path, family))
    ids, stops = t.turn_ends()
    asked = conversation("tell me")
    prompt = t.chat_prompt(asked)
    for answer in (" \n ", "", "a tale"):
        # Not the tokens that the whole text would have
        letters = [i for letter in answer for i in encode_after(t, letter)]
        past = Prompt(prompt.text, prompt.ids + letters, answer)
        second = conversation("tell me", answer, "go on")
        assert t.chat_prompt(asked, past=past) == prompt, "it is continued, not given again"
        again = t.chat_prompt(second, past=past)
        if not again.text.startswith(prompt.text):
            # which writes <think> before an answer, but not before a past one
            assert "deepseek" in family
            return
        assert again.ids[: len(past.ids)] == past.ids, (again.ids, past)
    end = again.ids[len(past.ids)]
    same = lambda ids: t.decode(ids).replace(" ", "")  # but for the space that this answer lacks
    assert same(again.ids) == same(t.apply_chat_template(second))
    assert ids == {end} <= set(t.control.values())
    assert stops == (["<|user|>"] if "zephyr" in family else [])
    other = t.chat_prompt(second, past=replace(past, answer="another"))
    assert other.ids == t.apply_chat_template(second), "not what the conversation holds"
    past = Prompt("ask:", [1], " a tale")
    found = [
        t._common_ends(past, f"ask:{t_}") for t_ in ("\n a tale.", " so: a tale.", " the crow")
    ]
    assert found == [((12, 1),), (), ()]
    # the last question again: the answers before it keep their ids
    third = conversation("tell me", answer, "go on", "more", "and?")
    past = replace(again, ids=again.ids + t.encode("more", bos=False), answer="more")
    for answered in (past, replace(t.chat_prompt(third, past=past), answer="no")):
        assert t.chat_prompt(second, past=answered) == again


def test_control_token_in_the_vocabulary(tmp_path):
    """With ignore_merges, a word that is in the vocabulary is one token, whatever the merges say
    (Llama 2 as JSON). A dropout of merges is for training."""
    with changed_json(train_tokenizer_json(tmp_path, "llama 3") / "tokenizer.json") as raw:
        raw["model"] |= dict(ignore_merges=True, dropout=0.9)
        raw["pre_tokenizer"] |= dict(use_regex=False)
        raw["model"]["vocab"] |= {token["content"]: token["id"] for token in raw["added_tokens"]}
    t = Tokenizer(tmp_path)
    ids = t.encode("<|eot_id|>", bos=False)
    assert t.control["<|eot_id|>"] not in ids and t.decode(ids) == "<|eot_id|>"
    assert len({tuple(t.encode("Once upon a time")) for _ in range(9)}) == 1


def test_many_control_tokens(tmp_path):
    """Messages are searched for all of them, and for their beginnings; speech models have tens of
    thousands."""
    names = [f"<sound_{i}>" for i in range(10_000)] + ["<" * n + "a" for n in range(2, 99)]
    with changed_json(train_tokenizer_json(tmp_path, "llama 3") / "tokenizer.json") as raw:
        start, like = max(token["id"] for token in raw["added_tokens"]) + 1, raw["added_tokens"][0]
        more = [like | {"id": start + i, "content": name} for i, name in enumerate(names)]
        raw["added_tokens"] += more
    template = "<sound_77>{{ messages[0]['content'] }}<sound_777><sound_77<<<a"
    (tmp_path / "chat_template.jinja").write_text(template)
    began, t = time.process_time(), Tokenizer(tmp_path)
    numbers = set(t.control.values())
    expected = [t.control[name] for name in ("<sound_77>", "<sound_777>", "<<<a")]
    for typed in ("<" * 5_000, "<sound_77><sound_7", "_3>", "x"):
        control = [i for i in t.apply_chat_template(conversation(typed)) if i in numbers]
        assert control == expected, typed[:99]
    assert time.process_time() - began < 60


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SPOILED_JSON = {  # what is put into a tokenizer.json or its model, and what is said of it
    "of another kind": ({"model": {"type": "Magic"}}, "is not a valid tokenizer"),
    "without a decoder": ({"decoder": None}, "its decoder is absent"),
    "a decoder that lengthens": (
        {"decoder": REPLACE}, "decoder replaces {'String': 'a'} by 'aa', which is not supported",
    ),
    "a pattern in the decoder": (
        {"decoder": REPLACE | {"pattern": {"Regex": "."}}}, "replaces {'Regex': '.'} by 'aa', which",
    ),
    "another decoder": ({"decoder": {"type": "Fuse"}}, "its decoder is Fuse"),
    "added tokens": ({"added_tokens": [1, 2]}, "is not a valid tokenizer"),
    "a panic": ({"model": {"continuing_subword_prefix": "x" * 9}}, "out of range for slice"),
    "too large": ({}, "but the model has a vocabulary of 100"),
}  # fmt: skip


@pytest.mark.parametrize("changes, said", SPOILED_JSON.values(), ids=SPOILED_JSON)
def test_spoiled_tokenizer_json(tmp_path, changes, said):
    with changed_json(train_tokenizer_json(tmp_path, "llama 3") / "tokenizer.json") as raw:
        raw |= changes | {"model": raw["model"] | changes.get("model", {})}
    with pytest.raises(ValueError, match=said):
        Tokenizer(tmp_path, vocab_size=100)


# ---- bench.py


def tiny_llama(dtype: torch.dtype, format=None, **more) -> Llama:
    """With random weights, for what is counted by hand: a layer's matrices have 16 * 8 (4 heads and
    2 * 2 of keys and values, of 2), 8 * 8, 24 * 8 and 8 * 12 weights, 480 in all; two layers."""
    sizes = dict(dim=8, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=2, hidden_dim=12)
    c = read_config_like(**sizes, vocab_size=10, **more)
    cpu = torch.device("cpu")
    weights = random_model.random_weights(c, dtype, cpu, formats_of(c, format), "torch")
    return Llama(c, weights, "torch", cpu, dtype, 16)


def flags_of_bench(*flags) -> SimpleNamespace:
    args = bench.parse_args(["--device", "cpu", "-r", "1", *map(str, flags)])
    return SimpleNamespace(**vars(args) | dict(ranks=Ranks(), cores=1))


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
    seen, prefill, speeds = [], tiny_model.prefill, bench.prompt_speeds
    measured = lambda ids, *to: seen.append(len(ids)) or prefill(ids, *to)
    monkeypatch.setattr(bench, "wall_times", lambda run, *_: [run() or 0.5, run() or 0.25])
    monkeypatch.setattr(tiny_model, "prefill", measured)
    state = State(tiny_model)
    assert speeds(tiny_model, state, bench_flags.Test("pp", 12, 48), 2) == [24.0, 48.0]
    assert seen == [48, 12, 12] and state.pos == 60
    assert speeds(tiny_model, state, bench_flags.Test("pp", 12, 0), 2) == [24.0, 48.0]
    assert seen[3:] == [12, 12] and state.pos == 12
    for depth in (0, 7):
        decode_in_graphs(monkeypatch, ms=itertools.chain([90_000.0] * 5, [9000.0] * 99))
        found = bench.generation_speeds(tiny_model, state, bench_flags.Test("tg", 5, depth), 3)
        assert found == [pytest.approx(1 / 9)] * 3 and state.pos == max(depth, 1) + 5


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
    (tmp_path / "text").write_text(TEXT * 3)
    flags = ("--device", "cpu", "--perplexity", tmp_path / "text", "-o", "json")
    (row,) = rows_of(bench_cli("-m", tiny, *flags, "--against", "bf16"))
    (same,) = rows_of(bench_cli("-m", tiny, *flags, "--dtype", "bf16", "--against", "bf16"))
    assert row["mean_kl"] > 0 and 0 < row["standard_error"] < row["perplexity"]
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
    ids = Tokenizer(copy).encode(TEXT)
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "two").write_text(Tokenizer(copy).decode(ids[:2]))
    flags = ("-m", copy, "--device", "cpu", "-o", "json", "--perplexity")
    (row,) = rows_of(bench_cli(*flags, tmp_path / "text"))
    loss = torch.nn.functional.cross_entropy(
        logits_of(load(copy, device="cpu"), ids)[:-1], torch.tensor(ids[1:])
    )
    assert row["tokens"] == len(ids) - 1 and row["perplexity"] == pytest.approx(
        float(loss.exp()), rel=1e-4
    )
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


# ---- README.md


README = (HERE / "README.md").read_text()


def test_readme_from_python_runs_as_written(monkeypatch, capsys):
    monkeypatch.chdir(HERE)
    names = {}
    exec(re.search(r"```python\n(.*?)```", README, re.DOTALL)[1], names)
    shown = capsys.readouterr().out
    session, turns = names["session"], names["talk"].turns
    text = session.generate("Once upon a time", n=50, temp=0.7).finish().text
    assert session.sampling == Sampling(repeat_penalty=1.1, repeat_last_n=-1)
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    first, second = answers
    assert shown == f"{text}\n{first} length 50\n{second} length 50\n"
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
    tales = cli_module.DEFAULT_MODEL
    model, tokenizer = load(tales, dtype="fp32", device="cpu"), Tokenizer(tales)
    for prompt, text in GOLDENS.items():
        ids = generate(model, tokenizer.encode(prompt), n=24, sampling=MOST_PROBABLE)
        assert tokenizer.decode([*ids]) == text, prompt


# ---- models/smollm2


SMOLLM2 = HERE / "models" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def read_gguf(model, file: Path) -> None:
    """Give a model of transformers the weights that it reads from a file: with another order of the
    rows of q and k."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    model.load_state_dict(read["tensors"], strict=False)  # a tied output matrix is missing


@pytest.mark.skipif(not SMOLLM2.exists(), reason="without a network, make did not fetch SmolLM2")
def test_smollm2_says_what_transformers_says(monkeypatch):
    """A published model, which others have quantised: ids of a chat, logits and greedy text."""
    for name in ("GGUFReader", "get_tensor_name_map"):  # called again and again for the same
        monkeypatch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
    file = dict(gguf_file=SMOLLM2.name)
    config = transformers.LlamaConfig(  # as published
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope_parameters=dict(rope_type="default", rope_theta=1e5), tie_word_embeddings=True,
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    read_gguf(theirs, SMOLLM2)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2.parent, **file)
    model, tokenizer = load(SMOLLM2, dtype="fp32", device="cpu"), Tokenizer(SMOLLM2)
    for question in ("What is the capital of France?", "Größe 🙂: who wrote Faust, and why?"):
        chat = conversation(question)
        ids = tokenizer.apply_chat_template(chat)
        text = their_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ids == their_tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = [*generate(model, ids, n=16, sampling=MOST_PROBABLE)]
        theirs_of_all = oracle(theirs, ids + answer)  # and the best of each is the next
        assert theirs_of_all.argmax(-1)[len(ids) - 1 : -1].tolist() == answer, question
        assert_close(logits_of(model, ids), theirs_of_all[: len(ids)], 1e-4)
