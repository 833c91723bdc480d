"""What the tests of all rooms share: small checkpoints, the program in this process, fixtures. Kernels
run on the GPU if there is one, otherwise in Triton's interpreter. Inputs are random; each run prints
its seed."""

import contextlib
import copy as copy_module
import functools
import gc
import hashlib
import http.client
import http.server
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import hypothesis
import pytest
import sentencepiece
import tokenizers
import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
if not ON_GPU and "COMPILES" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels is imported

import attention
import bench
import experts
import formats
import kernels
import launch
import run
from bits import groups, others
from bits.int4 import INT4
from engine import Engine, Sequence, generate
from formats import Matrix
from fp8 import E4M3
from launch import tl
from loading import random_model, reading, tensors
from loading.checkpoint import load, open_tokenizer, read_config, save
from loading.loader import Loader
from loading.names import formats_of, model_tensors, tensor_in
from loading.place import Place, formats_as_stored
from model import Config, Llama
from passes import Passes
from ranks import exchange as exchange_module
from ranks.processes import Ranks
from sampling import Sampling
from session import Session
from speculation.proposals import Proposer
from talk.cli import error_line
from tokenizer import Tokenizer

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
HERE = Path(__file__).resolve().parents[1]
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
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="only a GPU has graphs and tensor cores")
BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])


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
    "phi 4": dict(model="Phi3", num_key_value_heads=2, pad_token_id=None),
    "granite 3": dict(
        model="Granite", num_key_value_heads=2, tie_word_embeddings=True, embedding_multiplier=3.0, logits_scaling=2.0,
        residual_multiplier=0.7, attention_multiplier=0.2, rms_norm_eps=1e-3,
    ),
    "seed-oss": dict(model="SeedOss", num_key_value_heads=2, head_dim=24),
    "smollm 3": dict(
        model="SmolLM3", num_key_value_heads=2, num_hidden_layers=5, pad_token_id=None, rope_parameters=dict(
            rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=64,
        ),
    ),
    "ministral 3": dict(
        model="Ministral3", num_key_value_heads=2, head_dim=24, rope_parameters=dict(
            rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=24, mscale=1.0,
            mscale_all_dim=0.5, llama_4_scaling_beta=0.1, beta_fast=32.0, beta_slow=1.0,
        ),
    ),
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
    passes = Passes(model)
    found = []
    done = 0
    for part in torch.as_tensor(ids).split(sizes or len(ids)):
        found.append(passes.forward(part.tolist(), done).cpu())
        done += len(part)
    return torch.cat(found)


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


def assert_refused_alike(cli, path: Path, *said: str) -> None:
    """Whoever opens a checkpoint by its parts, or a session, gets the line that the program says."""

    def by_parts() -> None:
        model = load(path, device="cpu")
        tokenizer = open_tokenizer(path, model.config.vocab_size, model.config.bos_id)
        greedy(model, tokenizer.encode("Once"), 2)

    result = cli("-m", path, "-p", "Once", "-n", 2, "--quiet", "--no-display-prompt")
    assert_refused(result, *said)
    for door in by_parts, lambda: Session(path, device="cpu").generate("Once", n=2).finish():
        with pytest.raises((OSError, RuntimeError, ValueError)) as raised:
            door()
        assert result[2] == f"error: {error_line(raised.value)}\n"


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


def decode_in_graphs(monkeypatch, ms=itertools.repeat(1.0)) -> None:
    """Without a GPU, as on one; but graphs run what they would have captured. ms: what is measured
    between events, in turn."""

    def graph(run, device, reset, pool=None) -> SimpleNamespace:
        run()
        reset()
        return SimpleNamespace(replay=run, pool=lambda: None)

    monkeypatch.setattr(Llama, "uses_graphs", True)
    monkeypatch.setattr("passes.captured", graph)
    monkeypatch.setattr("passes.Moment.since", lambda self, start: next(ms) / 1e3)


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


# and the kilobytes of shared memory that a program may use; 86 runs the code of 80, and has less
ARCHITECTURES = {80: 99, 89: 99, 90: 227, 120: 99}


def read_config_like(**fields) -> Config:
    heads = dict(n_heads=4, n_kv_heads=4, head_dim=8)
    base = dict(dim=32, n_layers=1, hidden_dim=64, vocab_size=100, norm_eps=1e-5, **heads)
    return Config(**base | fields)


MOST_PROBABLE = Sampling(temp=0)


def greedy(model, prompt: list[int], n: int, engine=None, **options) -> list[int]:
    return list(generate(model, prompt, engine, n, MOST_PROBABLE, **dict(eos=[]) | options))


def text_of(model, settings: Sampling, n: int, engine=None, **options) -> list[int]:
    return list(generate(model, [1, 5, 9], engine, n, settings, **dict(eos=[]) | options))


class Written:
    """A text of an engine whose tokens come as they are asked for: an iterator that ends with the
    text. options: of Sequence."""

    def __init__(self, engine: Engine, prompt: list[int], ends=lambda token: False, **options):
        self.engine, self.ends = engine, ends
        self.tokens, self.scores, self.asked = [], [], 0
        self.sequence = Sequence(prompt, self.take, **options)
        engine.add(self.sequence)

    def take(self, token: int, score) -> bool:
        self.tokens.append(token)
        self.scores.append(score)
        return self.ends(token)

    def __iter__(self):
        return self

    def __next__(self) -> int:
        self.engine.wait_for(self.sequence, lambda: len(self.tokens) > self.asked)
        if len(self.tokens) == self.asked:
            raise StopIteration
        self.asked += 1
        return self.tokens[self.asked - 1]

    def close(self) -> None:
        self.engine.leave(self.sequence)


def together(engine: Engine, prompts: list[list[int]], n: int, **options) -> list[list[int]]:
    """The most probable texts after these prompts, which an engine writes beside each other."""
    options = dict(n=n, sampling=MOST_PROBABLE) | options
    texts = [Written(engine, prompt, **options) for prompt in prompts]
    return [list(text) for text in texts]


class Planted(Proposer):
    """Proposes the texts that will follow, with errors here and there."""

    def __init__(self, n: int):
        super().__init__(n)
        self.texts: list[list[int]] = []  # with their prompts

    def propose(self, sequence: Sequence, n: int) -> list[int]:
        ids = sequence.ids
        text = next(text for text in self.texts if text[: len(ids)] == ids)
        coming = text[len(ids) : len(ids) + n]
        planted = [random.choice([token] * 4 + [7]) for token in coming]
        planted += [7] * (n - len(planted))
        return random.choice([planted, []])


def other_model(model):
    """One of the same shapes with other weights."""
    other = copy_module.deepcopy(model)
    for matrix in other.weights.matrices:
        matrix.data.add_(0.3 * matrix.data.std() * torch.randn_like(matrix.data))
    return other


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
    """Arguments of an op with `change` made to all values, also in a layer or a pass."""
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


def a_pass(
    heads: tuple, segments: list[tuple], dtype: torch.dtype, size: int = 0, padding: int = 0
) -> SimpleNamespace:
    """A pass of segments, each a number of new tokens and how many tokens of their sequence come
    before. The sequences lie in the pool in the opposite order, with other texts between. Behind the
    segments are rows of padding, at the last but one place. Keys and values are those of the second
    layer of a model."""
    H, KH, D = heads
    size = size or max(map(sum, segments)) + 9
    firsts = [3 + i * (size + 2) for i in reversed(range(len(segments)))]
    P = -(-(max(firsts) + size + 4) // 16) * 16
    numbers = partial(torch.tensor, dtype=torch.int32, device=DEVICE)
    rows, table = [], []
    for first, (count, before) in zip(firsts, segments):
        table.append((first, before, len(rows), count))
        rows += [(first + before + t, before + t) for t in range(count)]
    rows += [(P - 2, 0)] * padding
    place, position = zip(*rows)
    return SimpleNamespace(
        tokens=torch.randint(0, VOCABULARY, (P,), device=DEVICE).int(),
        drawn=torch.full((P,), -7, dtype=torch.int32, device=DEVICE),
        place=numbers(place),
        position=numbers(position),
        segments=numbers(table),
        longest=max(count for count, _ in segments) + padding,
        size=size,
        k=(None, randn(KH, P, D, dtype=dtype)),
        v=(None, randn(KH, P, D, dtype=dtype)),
        rope=(None, torch.randn(size, D // 2, 2, device=DEVICE)),
        rows=None,
        feeds=False,
        norm_eps=1e-5,
        scratch=launch.Scratch(DEVICE),
    )


def alone(pass_: SimpleNamespace, segment: int) -> SimpleNamespace:
    """The pass of one of its segments, whose sequence has a pool to itself."""
    first, start, begin, count = pass_.segments[segment].tolist()
    run = slice(first, first + pass_.size)
    position = pass_.position[begin : begin + count]
    return changed(
        pass_,
        tokens=pass_.tokens[run].clone(),
        place=position.clone(),
        position=position,
        segments=torch.tensor([[0, start, 0, count]], dtype=torch.int32, device=DEVICE),
        longest=count,
        k=(None, pass_.k[1][:, run].clone()),
        v=(None, pass_.v[1][:, run].clone()),
        scratch=launch.Scratch(DEVICE),
    )


VOCABULARY = 101


def op_arguments(
    op: str,
    dtype: torch.dtype,
    heads: tuple,
    T: int,
    before: int,
    S: int = 0,
    biased=False,
    segments: list[tuple] | None = None,
    **layer,
) -> tuple[tuple, tuple]:
    """Arguments of an op for `heads` (H, KH, D), and which of them it writes in place, as
    tensors_in names them: "2." is the third one, "2.k" a field of it. T tokens after `before` others
    or, instead, several segments (a_pass). biased: matrices have a bias. layer: fields that not every
    layer has. It is the second of a model."""
    H, KH, D = heads
    C, F, V = 8 * (2 * H + 1), 52, VOCABULARY
    segments = segments or [(T, before)]
    T = sum(count for count, _ in segments)

    def matrix(rows: int, columns: int) -> Matrix:
        bias = randn(rows, dtype=dtype, scale=10) if biased else None
        return Matrix(randn(rows, columns, dtype=dtype, scale=columns**-0.5), bias=bias)

    pass_ = a_pass(heads, segments, dtype, S)
    # activations as large as real outliers, or so small that epsilon is most of the sum
    x, norm = randn(T, C, dtype=dtype, scale=3000 if before else 0.003), randn(C, dtype=dtype)

    def of_layer(**weights) -> SimpleNamespace:
        return SimpleNamespace(**dict(index=1, qk_norm=None, router=None) | weights | layer)

    qkv = lambda: of_layer(attention_norm=norm, wqkv=matrix((H + 2 * KH) * D, C))
    ffn = lambda: of_layer(ffn_norm=norm, w13=matrix(2 * F, C))
    blank = lambda columns, dtype: torch.full((T, columns), NAN, dtype=dtype, device=DEVICE)
    half = functools.partial(randn, dtype=dtype)
    return {
        "embedding": lambda: ((half(V, C), pass_), ()),
        "side_by_side": lambda: ((half(V, C), half(2, C), x, pass_), ()),
        "rmsnorm": lambda: ((x, norm, 1e-5), ()),
        "rmsnorm_qkv_rope": lambda: ((x, qkv(), pass_), ("2.k", "2.v")),
        "attention": lambda: ((half(T, H, D), of_layer(), pass_), ()),
        "linear_add": lambda: ((half(T, F), matrix(C, F), half(T, C)), ("2.",)),
        "linear_store": lambda: ((half(T, F), matrix(C, F), blank(C, dtype)), ("2.",)),
        "rmsnorm_swiglu": lambda: ((x, ffn(), pass_), ()),
        "rmsnorm_linear": lambda: (
            (x, norm, matrix(V, C), pass_, blank(V, torch.float32)),
            ("4.",),
        ),
    }[op]()


# sampling and routing are tested below, by what they choose
OPS = [name for name in vars(kernels.fused) if name not in ("sample", "route")]


def equals_reference(op: str, draws: list[tuple], written: tuple, limit: float) -> None:
    """Whether an op does what its reference does in fp32, on average over several draws of its
    arguments, writes where it should, and leaves its inputs as they are."""
    errors = {}
    for arguments in draws:
        mine, exact = cloned(arguments), cloned(as_fp32(arguments))
        right, ours = getattr(kernels.reference, op)(*exact), getattr(kernels.fused, op)(*mine)
        mine, exact, before = tensors_in(mine), tensors_in(exact), tensors_in(arguments)
        caches = op == "rmsnorm_qkv_rope"  # are written, at some places only
        new = arguments[2].place.long() if caches else slice(None)
        pairs = {"y": (ours, right)}
        for name in written:
            pairs[name] = (mine[name][:, new].clone(), exact[name][:, new])
            if caches:
                mine[name][:, new] = before[name][:, new]
        for name, (a, b) in pairs.items():
            assert a.shape == b.shape
            errors.setdefault(name, []).append(nmse(a, b))
        for name, was in before.items():
            same = name in written and not caches or torch.equal(mine[name], was)
            assert same, f"{op} changed {name} where it should not"
    for name, found in errors.items():
        assert sum(found) / len(found) < limit, (op, name, found)


def pass_of_experts(k: int, norm_topk: bool = True, eps: float = 1e-5) -> SimpleNamespace:
    return SimpleNamespace(experts_per_token=k, norm_eps=eps, norm_topk=norm_topk)


@launch.jit
def choose_kernel(
    scores, ids, weights, WARPS: tl.constexpr, CHOICE: tl.constexpr, PDL: tl.constexpr
):
    """What the programs of the product with w13 do before they multiply."""
    launch.gdc_wait(PDL)
    SIZES: tl.constexpr = CHOICE.sizes
    expert, weight = CHOICE.choose((scores,), WARPS, SIZES)
    tl.store(ids + tl.program_id(1), expert)
    tl.store(weights + tl.program_id(1), weight)


def picked(routes: experts.Routing) -> experts.Routes:
    """What the router chose or, of one token on a GPU, what the product with w13 chooses."""
    if isinstance(routes, experts.Routes):
        return routes
    ids = torch.empty_like(routes.ids)
    weights = torch.empty(ids.shape, device=DEVICE)
    stack = routes.w13_stack(1)
    sizes = dict(WARPS=2, CHOICE=stack.choice, warps=2)
    launch.launch(choose_kernel, (1, ids.numel()), DEVICE, routes.scores, ids, weights, **sizes)
    return experts.Routes(ids, weights)


def expert_arguments(
    T: int, E: int, k: int, C: int, F: int, dtype=torch.float32, format=None
) -> tuple:
    """x, a layer with experts, and a pass."""
    matrix = lambda N, K: Matrix(randn(N, K, dtype=dtype, scale=K**-0.5))
    layer = SimpleNamespace(
        ffn_norm=(torch.rand(C, device=DEVICE) + 0.5).to(dtype),
        router=matrix(E, C),
        w13=encoded(matrix(E * 2 * F, C), format),
        w2=encoded(matrix(E * C, F), format),
    )
    return randn(T, C, dtype=dtype), layer, pass_of_experts(k)


def experts_errors(arguments: tuple, dtype: torch.dtype, accumulate: str) -> tuple[float, float]:
    """Of the fused ops rmsnorm_swiglu and linear_add, each against its reference in fp32."""
    x, layer, pass_ = arguments
    exact, exact_layer = as_fp32((x, layer))
    fused = kernels.ops("triton", accumulate)
    routes = fused.route(x, layer, pass_)
    ours = picked(routes)
    chosen = kernels.reference.route(exact, exact_layer, pass_)
    T, k = chosen.ids.shape
    # with more tokens, logits are products of 16 bits, so that experts which nearly tie may change
    # places
    same = (ours.ids == chosen.ids).double().mean()
    assert same == 1 if T <= experts.FEW_ROUTED else same > 0.95
    off = 1e-2 if T > experts.FEW_ROUTED else 1e-5
    assert torch.allclose(ours.weights, chosen.weights, atol=off)
    h = fused.rmsnorm_swiglu(x, layer, pass_, routes)
    assert torch.equal(routes.ids, ours.ids)
    right = kernels.reference.rmsnorm_swiglu(exact, exact_layer, pass_, ours)
    residual = randn(T, x.shape[1], dtype=dtype, scale=0.1)
    added = kernels.reference.linear_add(h.float(), exact_layer.w2, residual.float(), ours)
    y = fused.linear_add(h, layer.w2, residual, routes)
    return nmse(h, right), nmse(y, added)


def check_experts(arguments: tuple, dtype: torch.dtype, form) -> None:
    # norm, h and what a slot adds are rounded; with 4 bits also the decoded weights or, in a single
    # token, the sums
    limit = ONE_UNIT[dtype] * 1.5**2
    if form is INT4:
        limit = 5e-5 + ONE_UNIT[dtype]
    errors = experts_errors(arguments, dtype, "fp32")
    assert all(error < limit for error in errors), (errors, form)


def check_attention(
    heads: tuple,
    T: int,
    before: int,
    kv_fp8=False,
    runs=1,
    dtype=torch.float16,
    segments: list[tuple] | None = None,
    padding: int = 0,
) -> None:
    """It equals the reference of each sequence alone, whatever lies elsewhere in the pool or was
    left in scratch; rows of padding become 0, whatever they were."""
    H, KH, D = heads
    pass_ = a_pass(heads, segments or [(T, before)], dtype, padding=padding)
    q = randn(len(pass_.place), H, D, dtype=dtype)
    caches = [pass_.k[1], pass_.v[1]]
    if kv_fp8:
        caches = [E4M3.round(cache) for cache in caches]
    elsewhere = torch.ones(caches[0].shape[1], dtype=torch.bool, device=DEVICE)
    for first, start, _, count in pass_.segments.tolist():
        elsewhere[first : first + start + count] = False
    for cache in caches:
        cache[:, elsewhere] = 0x7F if kv_fp8 else torch.nan
    pass_.k, pass_.v = ((None, cache) for cache in caches)
    layer = SimpleNamespace(index=1)
    exact = []
    for i, (_, _, begin, count) in enumerate(pass_.segments.tolist()):
        rows = q[begin : begin + count].float()
        exact.append(attention.attention_ref(rows, layer, alone(pass_, i)))
    exact = torch.cat(exact)
    q[len(exact) :] = torch.nan
    together = attention.attention_ref(q.float(), layer, pass_)
    assert nmse(together[: len(exact)], exact) < 1e-10
    assert not together[len(exact) :].any()
    for _ in range(runs):
        y = attention.attention(q, layer, pass_)
        assert nmse(y[: len(exact)], exact) < ONE_UNIT[dtype], (T, before, segments)
        assert not y[len(exact) :].any(), "padding is not 0"


@launch.jit
def _own_load(w, start, k, left, COLUMNS: tl.constexpr, SIDE: tl.constexpr, FORMAT: tl.constexpr):
    scales = groups.load_groups(w[1], start, k, left, COLUMNS, 1, 32)
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


def with_dense_weights(model) -> None:
    for matrix in model.weights.matrices:
        matrix.tensors, matrix.format, matrix.cpu_product = (matrix.dense().float(),), None, None


@functools.cache
def random_matrix(format, N: int, K: int, bias: torch.Tensor | None = None) -> Matrix:
    """Where a format keeps what others have quantised: random codes and numbers of groups."""
    if not isinstance(format, others.FileGroups):
        weights = randn(N, K, dtype=torch.float32, scale=K**-0.5)
        if format is not others.E4M3_128:
            return Matrix(format.encode(weights), format, bias=bias)
        weights = Matrix(E4M3.encode(weights), E4M3)
        rows = formats.Quantised(weights.data.cpu(), weights.tensors[1].cpu().repeat(1, K // 128))
    else:
        shape = N, K // format.group
        least, most = {4: (0, 16), 6: (0, 32), 8: (-127, 128)}[format.bits]
        numbers = dict(scale=torch.rand(shape) + 0.5)
        if isinstance(format.scaling, others.Zero):
            numbers["zero"] = torch.randint(0, 16, shape).float()
        elif type(format.scaling) is not others.Scaling:
            numbers["minimum"] = torch.randn(shape)
        if isinstance(format.scaling, others.Parts | others.PartsOf16):
            each = 16 if isinstance(format.scaling, others.PartsOf16) else 32
            parts = torch.randint(1, 64, (2, N, K // each)).float()
            numbers["parts"] = tuple(parts)
        rows = formats.Quantised(torch.randint(least, most, (N, K), dtype=torch.int8), **numbers)
    out = format.empty(N, K, torch.device("cpu"))
    format.write(rows, out)
    out[-1].mul_(K**-0.5 / format.decoded(out).square().mean().sqrt())
    return Matrix(tuple(t.to(DEVICE) for t in out), format, bias=bias)


def int4_matrix(N: int, K: int) -> Matrix:
    torch.manual_seed(5)
    w = torch.randn(N, K, device=DEVICE) * torch.logspace(-4, 2, N, device=DEVICE)[:, None]
    return encoded([Matrix(w)], INT4)[0]


GREEDY = ("--temp", 0, "--ignore-eos")


@pytest.fixture(scope="session")
def tiny_session(tiny):
    """Not to be changed."""
    return Session(tiny, dtype="fp32", device="cpu")


TALES = HERE / "models" / "tales"
FOX = [{"role": "user", "content": "Tell me a tale of a fox"}]
CHATS, TEXTS_AT = "/v1/chat/completions", "/v1/completions"


class Server:
    """A server in a process of its own, which has no client but the tests."""

    def __init__(self, *flags, launcher=(sys.executable,), **options):
        command = [*launcher, HERE / "serve.py", *flags, "--port", 0, "--device", "cpu"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
        options |= dict(stderr=subprocess.PIPE, text=True, env=environment)
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

    @contextlib.contextmanager
    def stopped(self):
        """Stop the process with the model: no text goes on, but clients are still answered."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

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
    with Server("-m", TALES, "-np", 1, "--queue", 1, "--cors", "https://example.org") as served:
        yield served
        accessed = r'127\.0\.0\.1:\d+ - "[A-Z]+ \S+ HTTP/1\.1" \d{3}\n'
        speeds = r"\d+ tokens(, [\d.]+ tokens/s)?(; prompt: .* s)?\n"
        no_tools = "note: the chat template knows no tools: it is not told of those of requests\n"
        known = re.compile(f"{accessed}|{speeds}|{no_tools}")
        strange = [line for line in served.lines[3:] if not known.fullmatch(line)]
        assert not strange, "the server's log has lines that are no request: mend what wrote them"


def encode_after(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of text that continues other text, as those of a chat do."""
    return tokenizer.vocabulary.encode_chat(text, [], after=True)


def train_byte_pairs(pre_tokenizer, texts: list[str], alphabet: list[str], **model) -> dict:
    """A tokenizer.json."""
    t = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
    t.pre_tokenizer, t.decoder = pre_tokenizer, tokenizers.decoders.ByteLevel()
    options = dict(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    t.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(**options))
    return json.loads(t.to_str())


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


@pytest.fixture
def quick_ceilings(monkeypatch):
    """In place of the real ones, which take seconds."""
    for name in ("read_ceiling", "copy_ceiling", "product_ceiling"):
        monkeypatch.setattr(bench, name, functools.cache(lambda *_: 1e10))


def rows_of(result) -> list[dict]:
    """What bench printed with -o json."""
    code, out, err = result
    assert code == 0, err
    return json.loads(out)


def read_gguf(model, file: Path) -> None:
    """Give a model of transformers the weights that it reads from a file: with another order of the
    rows of q and k."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    model.load_state_dict(read["tensors"], strict=False)  # a tied output matrix is missing


DOWN = "model.layers.1.mlp.down_proj.weight"


def assert_equals_transformers(path: Path, theirs):
    """Returns our model of a checkpoint, in fp32 on the CPU. Its logits, of a text as a whole and in
    parts, are those of transformers, and so is its greedy text."""
    ours = load(path, dtype="fp32", device="cpu")
    prompt, n = torch.randint(250, (100,)).tolist(), 12
    text = prompt + greedy(ours, prompt, n)
    exact = oracle(theirs, text)
    assert_close(logits_of(ours, text), exact)
    # with a format, the activation of a single token is in fp16
    tolerance = 0.02 if ours.weights.format_names else 1e-4
    assert_close(logits_of(ours, text, 88, 1, 21, 2), exact, tolerance)
    logits = exact[len(prompt) - 1 : -1]
    behind = logits.amax(1) - logits[range(n), torch.tensor(text[-n:])]
    # the best two may be tied to within rounding; ours are up to 2.3e-5 of their spread off
    assert (behind < tolerance * logits.std(1)).all(), behind
    return ours


def both(*spoils):
    return lambda folder: [spoil(folder) for spoil in spoils]


def put(name: str, make):
    """Put a tensor in place of this one, made of it."""
    return spoil_tensors(lambda t: t.update({name: make(t[name])}))


def set_one(name: str, value: float):
    return spoil_tensors(lambda t: t[name].view(-1)[7:8].fill_(value))


def exchanges_of(ranks: list[list[Matrix]]) -> list[exchange_module.Exchange]:
    """Of ranks in one process, each with its own memory for its matrices."""
    size = len(ranks)

    def shared(*shape: int, dtype: torch.dtype) -> list[exchange_module.Shared]:
        memory = [torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in ranks]
        return [exchange_module.Shared(own, [t.data_ptr() for t in memory]) for own in memory]

    entries = shared(3, size, 16 * 72, dtype=torch.int64)
    terms = shared(2, 20_000, dtype=torch.float16)
    flags = shared(2, size, dtype=torch.int32)
    of_ranks = zip(ranks, range(size), entries, terms, flags)
    return [exchange_module.Exchange(*of_rank) for of_rank in of_ranks]


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


HASH = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """What a download asks of the Hugging Face hub. files: those of someone/tiny."""

    files: dict[str, bytes]
    asked: list[str]
    token: str | None
    forbidden: str | None  # a file

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
        if self.forbidden and path.endswith(self.forbidden):
            return 403, b"", {}
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
    Hub.files, Hub.asked = of_hub(tiny) | {"pytorch_model.bin": b"x" * 999}, []
    Hub.token = Hub.forbidden = None
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


INDEX = "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 999\n"


def loader_of(model, format="held", ranks: Ranks = Ranks()) -> Loader:
    """Of a model's checkpoint, in a format; "held": as the file holds it."""
    c = model.config.cut(ranks.size)
    if format == "held":
        formats = formats_as_stored(model.checkpoint.tensors, c, 8)
    else:
        formats = formats_of(c, format)
    place = Place(
        config=c, device=torch.device("cpu"), backend="torch", dtype=torch.float32,
        matrix_dtype=torch.float32, formats=formats, ctx_size=1,
    )  # fmt: skip
    return Loader(model.checkpoint, place, ranks, quiet=True)


def loaded(model, format="held", ranks: Ranks = Ranks()):
    """A rank's weights."""
    return loader_of(model, format, ranks).load()


def assert_reads_alike(model, monkeypatch, format="held"):
    """Returns its weights. A few rows at a time, and several of these together, they are what they
    are as a whole; and so are those of two ranks, each of which has its share of every expert."""
    whole = loaded(model, format)
    with monkeypatch.context() as few:
        few.setattr(tensors, "AT_ONCE", 900)
        few.setattr(reading, "TOGETHER", 9000)
        pieces = loaded(model, format)
        parts = [loaded(model, format, Ranks(rank, 2)).layers[1] for rank in (0, 1)]
    for t in model_tensors(model.config):
        stored = [tensor_in(weights, t) for weights in (whole, pieces)]
        if isinstance(stored[0], Matrix):
            stored = [matrix.dense() for matrix in stored]
        assert torch.equal(*stored), t.name
    layer = whole.layers[1]
    experts = max(1, model.config.n_experts)
    for name, count, axis in (("w2", experts, 2), ("w13", experts, 1), ("wo", 1, 2)):
        dense = [getattr(part, name).dense().unflatten(0, (count, -1)) for part in (*parts, layer)]
        assert torch.equal(torch.cat(dense[:2], axis), dense[2]), name
    return whole


def codes_of(
    N: int, K: int, group: int, zeros=range(1, 17), dtype=torch.float16, bits: int = 4
) -> tuple:
    """Random codes [N, K], scales and zero points [N, K / group], and what they stand for."""
    codes = torch.randint(1 << bits, (N, K))
    scale = ((torch.rand(N, K // group) + 0.05) * 0.32 / (1 << bits)).to(dtype)
    zero = torch.tensor(zeros)[torch.randint(len(zeros), scale.shape)]
    values = (codes.unflatten(1, (-1, group)) - zero[..., None]) * scale.float()[..., None]
    return codes, scale, zero, values.flatten(1)


class OneAtATime(Llama):
    """A model that evaluates its tokens one at a time: the sums are then in the same order whatever a
    pass has beside a token, and the logits equal to the last bit. Otherwise two tokens tied to within
    rounding may change places."""

    def forward(self, pass_, logits: torch.Tensor) -> torch.Tensor:
        wanted = [*range(len(pass_.place))] if pass_.rows is None else pass_.rows.tolist()
        for first, start, begin, count in pass_.segments.tolist():
            for i in range(count):
                row = begin + i
                alone = SimpleNamespace(**vars(pass_))
                alone.place = pass_.place[row : row + 1]
                alone.position = pass_.position[row : row + 1]
                alone.segments = torch.tensor([[first, start + i, 0, 1]], dtype=torch.int32)
                alone.longest, alone.rows = 1, None
                alone.kept = [(layer, state[row : row + 1]) for layer, state in pass_.kept]
                found = super().forward(alone, logits.new_empty(1, logits.shape[1]))
                if row in wanted:
                    logits[wanted.index(row)] = found[0]
        return logits


def one_at_a_time(model: Llama) -> Llama:
    model.__class__ = OneAtATime
    return model


def exact_model(tiny, ctx_size: int, device="cpu"):
    """On a CPU, one that evaluates its tokens one at a time."""
    model = load(tiny, dtype="fp32", device=device, ctx_size=ctx_size)
    return one_at_a_time(model) if model.device.type == "cpu" else model


@pytest.fixture(scope="session")
def exact(tiny):
    """Not to be changed; on a GPU, where there is one."""
    return exact_model(tiny, 64, DEVICE.type)


def chat(cli, folder, *lines: str, flags=()):
    text = "".join(line + "\n" for line in lines).encode(errors="surrogateescape")
    return cli("-m", folder, "--chat", "-n", 6, *GREEDY, *flags, stdin=text)
