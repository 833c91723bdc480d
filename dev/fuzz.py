"""Fuzzing: randomly corrupted checkpoints, templates, texts and options. Each case has 10 seconds
and a gigabyte.

    python dev/fuzz.py --seconds 60        # fresh cases; prints what went wrong and how to repeat it
    python dev/fuzz.py --seed 7 --cases 1  # that one again, with its traceback

A case passes with the right model or text, or with a documented error of one short line. It fails
on any other exception or warning, when it runs out of time or memory, when anything is executed,
unpickled or connected to, and when a file outside its folder is read. A corrupted checkpoint that
is accepted must be the model that its libraries read from it."""

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
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gguf
import numpy
import sentencepiece
import tokenizers
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bench
import run
from checkpoint import find_checkpoint, load, model_parts, read_config
from model import State, generate
from sampling import Sampling
from tokenizer import TEMPLATES, TextStream, Tokenizer, one_line

SECONDS, MEMORY = 10, 1 << 30  # limits of a case
DOCUMENTED = (
    ValueError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    PermissionError,
    OSError,
    MemoryError,
)

# ---- what is corrupted: one tiny model in each layout

VOCAB = 400


def make_checkpoints(home: Path) -> dict[str, Path]:
    folder = home / "safetensors"
    folder.mkdir()
    (home / "text").write_text(Path(__file__).read_text() + "Żółw, 乌龟 🐢\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(home / "text"), model_prefix=str(folder / "tokenizer"), vocab_size=VOCAB,
        model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.vocab").unlink()
    config = dict(
        model_type="llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=64,
        max_position_embeddings=64,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, rms_norm_eps=1e-5,
        torch_dtype="float32",
        bos_token_id=1, eos_token_id=2, rope_scaling=dict(rope_type="linear", factor=2.0),
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps(dict(bos_token_id=1, eos_token_id=[2]))
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(dict(add_bos_token=True, added_tokens_decoder={}))
    )
    c = read_config(folder)
    tensors = {
        part.name_in("hugging_face"): torch.randn(part.shape(c)) for part in model_parts(c).values()
    }
    save_file(tensors, folder / "model.safetensors")

    def like(name: str, spared: str = "model.safetensors") -> Path:
        return Path(shutil.copytree(folder, home / name, ignore=shutil.ignore_patterns(spared)))

    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train(str(home / "text"), VOCAB, special_tokens=["<s>", "</s>"], show_progress=False)
    bpe.save(str(like("json", "tokenizer.model") / "tokenizer.json"))
    torch.save(tensors, like("bin") / "pytorch_model.bin")
    save_torch_state_dict(tensors, like("shards"), max_shard_size="64KB")
    meta = like("meta", "*onfig.json")
    (meta / "model.safetensors").unlink()
    torch.save(dict(zip(model_parts(c), tensors.values())), meta / "consolidated.00.pth")
    params = dict(
        dim=32,
        n_layers=1,
        n_heads=2,
        n_kv_heads=1,
        vocab_size=-1,
        multiple_of=32,
        ffn_dim_multiplier=0.5,
    )
    (meta / "params.json").write_text(json.dumps(params))
    output_of("-m", folder, "--save", home / "saved", "--fp8")
    words = lambda *shape: torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32)
    awq = lambda N, K: dict(
        qweight=words(K, N // 8),
        qzeros=words(K // 32, N // 8),
        scales=torch.rand(K // 32, N).half(),
    )
    fp8 = lambda N, K: {
        "weight": torch.randn(N, K).to(torch.float8_e4m3fn),
        "weight_scale": torch.rand(N, 1),
    }
    float_8 = {"weights": dict(num_bits=8, type="float", strategy="channel")}
    for name, packed, about in (
        ("awq", awq, dict(quant_method="awq", bits=4, group_size=32, version="gemm")),
        (
            "fp8",
            fp8,
            dict(
                quant_method="compressed-tensors",
                format="float-quantized",
                config_groups={"0": float_8},
            ),
        ),
    ):
        (like(name) / "config.json").write_text(json.dumps(config | {"quantization_config": about}))
        found = {key: t for key, t in tensors.items() if "proj" not in key}
        for key in tensors.keys() - found.keys():
            found |= {
                key.removesuffix("weight") + word: value
                for word, value in packed(*tensors[key].shape).items()
            }
        save_file(found, home / name / "model.safetensors")
    (home / "gguf").mkdir()
    sizes = dict(
        embedding_length=32, feed_forward_length=64, context_length=64, block_count=1,
        **{"attention.head_count": 2, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-5},
    )  # fmt: skip
    metadata = {"general.architecture": "llama"} | {
        f"llama.{key}": value for key, value in sizes.items()
    }
    metadata |= sentencepiece_metadata(folder / "tokenizer.model")
    names = [part.name_in("gguf") for part in model_parts(c).values()]
    tensors = dict(zip(names, tensors.values()))
    for i, (name, t) in enumerate(tensors.items()):
        kind = (
            (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0, None)[i % 3]
            if t.dim() == 2
            else None
        )
        tensors[name] = (
            (int(kind), torch.from_numpy(gguf.quants.quantize(t.numpy(), kind))) if kind else t
        )
    write_gguf(home / "gguf/model.gguf", metadata, tensors)
    names = ("safetensors", "json", "bin", "shards", "meta", "saved", "awq", "fp8", "gguf")
    return {name: home / name for name in names}


def write_gguf(file: Path, metadata: dict, tensors: dict) -> Path:
    """metadata: values, in the types that llama.cpp gives them unless they are scalars of numpy;
    tensors: torch's, or (number of a type, bytes [N, M])."""
    writer, kinds = gguf.GGUFWriter(file, metadata["general.architecture"]), gguf.GGUFValueType
    writer.data_alignment = metadata.get("general.alignment", 32)
    for key, value in metadata.items():
        kind = kinds.UINT32 if type(value) is int else None
        if isinstance(value, numpy.generic):
            kind, value = kinds[value.dtype.name.upper()], value.item()
        if key != "general.architecture":
            writer.add_key_value(key, value, kind or kinds.get_type(value))
    for name, value in tensors.items():
        kind, raw = value if isinstance(value, tuple) else (None, value)
        if raw.dtype == torch.bfloat16:
            kind, raw = 30, raw.view(torch.uint8)
        writer.add_tensor(
            name, raw.contiguous().numpy(), raw_dtype=kind and gguf.GGMLQuantizationType(kind)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def sentencepiece_metadata(file: Path, **more: int) -> dict:
    """A tokenizer.model as llama.cpp's converter writes it to GGUF. more: tokens after its own, and
    their types."""
    sp = sentencepiece.SentencePieceProcessor(str(file))
    tests, ids = (
        {sp.is_unknown: 2, sp.is_control: 3, sp.is_unused: 5, sp.is_byte: 6},
        range(sp.vocab_size()),
    )
    types = [next((kind for test, kind in tests.items() if test(i)), 1) for i in ids]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in ids] + [*more],
        "tokenizer.ggml.scores": [sp.get_score(i) for i in ids] + [-1000.0] * len(more),
        "tokenizer.ggml.token_type": types + [*more.values()],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


# ---- how it is corrupted

STRANGE = (
    None, True, False, 0, -1, 1, 2, 3, 7, 16, 400, 2**16, 2**31, 2**63, 10**30, 0.5, -0.0, 1e-9,
    1e308, float("nan"),
    float("inf"), "", "x", "llama", "linear", "float16", "\ud800",
    "\x1b[31m\n", "../x", "/etc/passwd", "x" * 5000,
    [], {}, [[]], [0, 1, 2], ["x"] * 3000, {"a": 1}, {"content": "<s>"},
)  # fmt: skip


def strange(rng: random.Random):
    value = rng.choice(STRANGE)
    for _ in range(rng.choice((0, 0, 0, 0, 1, 2, 300))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def spoil_value(rng: random.Random, value):
    """A JSON value with one thing in it changed."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return strange(rng)
    key = rng.choice([*value]) if isinstance(value, dict) else rng.randrange(len(value))
    changed = value.copy()
    if rng.random() < 0.2:
        del changed[key]
    elif rng.random() < 0.2 and isinstance(value, dict):
        changed[rng.choice(("x", "\n", "y" * 3000, *value))] = strange(rng)
    else:
        changed[key] = spoil_value(rng, value[key])
    return changed


def spoil_json(rng: random.Random, raw: bytes) -> bytes:
    try:
        return json.dumps(spoil_value(rng, json.loads(raw))).encode()
    except (ValueError, RecursionError):  # already corrupted
        return spoil_bytes(rng, raw)


def spoil_bytes(rng: random.Random, raw: bytes) -> bytes:
    at, size = sorted((rng.randrange(len(raw) + 1), rng.randrange(len(raw) + 1)))
    piece = raw[at:size][: rng.choice((1, 4, 8, 100, 10**9))]
    new = rng.choice((
        b"", piece * 2, piece[::-1], rng.randbytes(len(piece)), b"\xff" * len(piece),
        b"\0" * len(piece),
        struct.pack("<Q", rng.choice((0, 1, 2**31, 2**40, 2**63))),
        rng.choice((b'"', b"[" * 5000, b"\xed\xa0\x80")),
    ))  # fmt: skip
    return rng.choice(
        (raw[:at] + new + raw[at + len(piece) :], raw[:at], raw[at:], raw[:at] + piece + raw[at:])
    )


def spoil_safetensors(rng: random.Random, raw: bytes) -> bytes:
    size = int.from_bytes(raw[:8], "little")
    if size > len(raw) or rng.random() < 0.2:
        return spoil_bytes(rng, raw)
    header = spoil_json(rng, raw[8 : 8 + size])
    return struct.pack("<Q", len(header)) + header + raw[8 + size :]


def spoil_gguf(rng: random.Random, raw: bytes) -> bytes:
    end = rng.choice((100, 1000, len(raw)))  # the keys, the tokens, the tensors
    return spoil_bytes(rng, raw[:end]) + raw[end:]


def replace_by_another_kind(rng: random.Random, file: Path, elsewhere: Path) -> None:
    file.unlink()
    rng.choice((
        lambda: os.mkfifo(file),
        lambda: file.mkdir(),
        lambda: file.symlink_to("/dev/zero"),
        lambda: file.symlink_to(file.name),
        lambda: [file.touch(), os.truncate(file, rng.choice((0, 1 << 20, 1 << 38)))],
        lambda: [file.touch(), file.chmod(0)],
        lambda: None,
    ))()  # fmt: skip


def spoil(rng: random.Random, folder: Path, elsewhere: Path) -> None:
    """Change a file of a checkpoint. elsewhere: a folder that a link may point to."""
    file = rng.choice(sorted(folder.iterdir()) or [folder])
    if file.is_symlink() or not file.is_file() or file.stat().st_size > 1 << 20:
        return  # already replaced; never write through a link
    if rng.random() < 0.05:
        replace_by_another_kind(rng, file, elsewhere)
        return
    spoilers = {".json": spoil_json, ".safetensors": spoil_safetensors, ".gguf": spoil_gguf}
    spoiler = spoilers.get(file.suffix, spoil_bytes) if rng.random() < 0.9 else spoil_bytes
    file.write_bytes(spoiler(rng, file.read_bytes()))


# ---- the kinds of cases


def spoiled_copy(rng: random.Random, bases: dict[str, Path], place: Path) -> Path:
    folder = Path(shutil.copytree(bases[rng.choice([*bases])], place / "model"))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        spoil(rng, folder, bases["safetensors"])
    return folder


def spoiled_checkpoint(rng: random.Random, bases: dict[str, Path], place: Path) -> None:
    folder = spoiled_copy(rng, bases, place)
    watched.folder = str(folder)
    config = read_config(find_checkpoint(str(folder)))
    tokenizer = Tokenizer(folder, config.vocab_size, config.bos_id)
    dtype, format = rng.choice(("auto", "fp32")), rng.choice((None, None, "e4m3", "int4"))
    options = dict(dtype=dtype, device="cpu", ctx_size=VOCAB, format=format)
    model = load(folder, **options)
    watched.folder = ""
    ids = tokenizer.encode("a") or [0]
    tokenizer.decode(
        [
            *generate(
                model, ids[:4], State(model), 2, Sampling(temp=0), ignore_eos=rng.random() < 0.5
            )
        ]
    )
    written_again(folder)
    assert all_logits(model) == all_logits(load(folder, **options)), (
        "it is not what the libraries read"
    )


def written_again(folder: Path) -> None:
    """Read the tensors with the libraries that define their formats, and write them back."""
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as f:
                metadata = f.metadata()
            save_file(load_file(file), file, metadata)
        elif file.suffix in (".bin", ".pth"):
            raw = io.BytesIO()  # not the file itself, which is mapped
            torch.save(torch.load(file, "cpu", weights_only=True, mmap=True), raw)
            file.write_bytes(raw.getvalue())


@torch.inference_mode()
def all_logits(model) -> bytes:
    return model.forward(torch.arange(VOCAB), State(model)).numpy().tobytes()


def some_text(rng: random.Random, bad: bool) -> str:
    planes = (
        (32, 127),
        (0, 32),
        (128, 0x800),
        (0x800, 0xD800),
        (0xE000, 0x10000),
        (0x10000, 0x110000),
    )
    planes += ((0xD800, 0xE000),) * bad
    words = ("<s>", "▁", ".", " ", "the ", "<0x41>", "[INST]", "<|im_end|>")
    some = lambda: rng.choice((chr(rng.randrange(*rng.choice(planes))), *words))
    return "".join(some() for _ in range(rng.choice((0, 1, 5, 50, 500))))


def text_there_and_back(rng: random.Random, bases: dict[str, Path], place: Path) -> None:
    tokenizer = Tokenizer(bases[rng.choice(("safetensors", "json"))])
    ids = [
        rng.choice((rng.randrange(VOCAB), rng.randrange(1 << 22)))
        for _ in range(rng.choice((1, 10, 1000)))
    ]
    assert "\ud800" not in tokenizer.decode(ids)
    # which SentencePiece writes for a space
    text = some_text(rng, bad=rng.random() < 0.2).replace("▁", "_")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text, (text, tokenizer.decode(ids))
    stops = [some_text(rng, bad=False)[:3] for _ in range(rng.randrange(3))]
    stream = TextStream(tokenizer, at_start=True, stops=stops)
    streamed = "".join(stream.push(i) for i in ids) + stream.finish()
    ends = [text.find(stop) for stop in stops if stop and stop in text]
    assert streamed == text[: min(ends, default=len(text))], (text, stops, streamed)


PIECES = (
    "{% for m in messages %}", "{% endfor %}", "{{ m['content'] }}", "{{ messages[0].content * 999 }}", "{{ x",
    "{{ bos_token }}", "{% if x is defined %}", "{% endif %}", "{% set x = messages %}", "{{ x[-1]['role'] | upper }}",
    "{{ raise_exception(x) }}", "{% macro f(a) %}{{ f(a) }}{% endmacro %}{{ f(1) }}", "{{ ''.__class__.__mro__ }}",
    "{% include '/etc/passwd' %}", "{{ cycler.__init__.__globals__.os.system('touch RAN') }}", "{{ '%s' % x }}",
    "{{ (lipsum | attr('__globals__')).os.open('RAN', 64) }}", "{{ messages.append(1) }}", "{{ x | tojson(indent=9) }}",
    "{{ 1 / 0 }}", "{% generation %}", "{{ strftime_now('%' * 999) }}", "{{ '{0.__class__}'.format(x) }}",
    "{{ namespace(a=messages).a }}", "{# \ud800 #}", "\0\x1b[",
)  # fmt: skip


def spoiled_template(rng: random.Random, bases: dict[str, Path], place: Path) -> None:
    tokenizer, template = Tokenizer(bases["safetensors"]), rng.choice([*TEMPLATES.values()])
    for _ in range(rng.choice((0, 1, 1, 2, 6))):
        at = rng.choice([i for i, c in enumerate(template) if c == "{"] or [0])
        spoiled = spoil_bytes(rng, template.encode(errors="replace")).decode(errors="replace")
        template = rng.choice((spoiled, template[:at] + rng.choice(PIECES) + template[at:]))
    ran = place / "ran"
    tokenizer.chat_template = template.replace("RAN", str(ran))
    roles = [rng.choice(("user", "assistant", "system", "x", "")) for _ in range(rng.randint(1, 5))]
    try:
        ids = tokenizer.apply_chat_template(
            [{"role": r, "content": some_text(rng, rng.random() < 0.1)} for r in roles]
        )
        assert all(0 <= i < 400 for i in ids), ids
    finally:
        assert not ran.exists(), f"{template!r} executed code"


VALUES = (
    "", "0", "-1", "1", "1e99", "nan", "inf", "-inf", "x", "\udc80", "x" * 5000,
    "\x1b[0m\n", "1" * 5000, "cpu", "e4m3",
)  # fmt: skip


def any_options(rng: random.Random, bases: dict[str, Path], place: Path) -> None:
    program = rng.choice((run, bench))
    words = [
        rng.choice((rng.choice(flags_of(program)), rng.choice(VALUES)))
        for _ in range(rng.randrange(6))
    ]
    said = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            program.parse_args(words)
    except SystemExit as exit:
        line = said.getvalue().removesuffix("\n")
        assert exit.code == 0 or exit.code in (1, 2) and line.isprintable(), (words, line)


@cache
def flags_of(program: ModuleType) -> list[str]:
    """The flags that a program's help lists."""
    with redirect_stdout(io.StringIO()) as said, suppress(SystemExit):
        program.parse_args(["--help"])
    return sorted(set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", said.getvalue())))


def output_of(*arguments) -> bytes:
    """What run.py writes to stdout. Raises ValueError if it ends with an error of one line."""
    out, said = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with redirect_stdout(out), redirect_stderr(said):
        code = run.main([str(word) for word in [*arguments, "--device", "cpu", "--quiet"]])
    if code:
        error = re.fullmatch("error: (.*)\n", said.getvalue())
        assert code == 1 and error, (code, said.getvalue())
        raise ValueError(error[1])
    return out.buffer.getvalue()


def any_prompt(rng: random.Random, bases: dict[str, Path], place: Path) -> None:
    raw = spoil_bytes(rng, some_text(rng, bad=False).encode())
    (place / "prompt").write_bytes(raw)
    out = output_of("-m", bases["safetensors"], "-f", place / "prompt", *"-n 2 -c 64".split())
    assert out.startswith(raw.removesuffix(b"\n").removesuffix(b"\r"))


def spoiled_chat(rng: random.Random, bases: dict[str, Path], place: Path) -> None:
    output_of("-m", spoiled_copy(rng, bases, place), *"--chat -p hello -n 2 -c 64".split())


def spoiled_saving(rng: random.Random, bases: dict[str, Path], place: Path) -> None:
    expected = {"model"}
    try:
        output_of("-m", spoiled_copy(rng, bases, place), "--save", place / "saved", "--fp8")
        expected.add("saved")
        load(str(place / "saved"), device="cpu", ctx_size=8)
    finally:
        assert {path.name for path in place.iterdir()} == expected, (
            "it is saved whole or not at all"
        )


def spoiled_prompt_cache(rng: random.Random, bases: dict[str, Path], place: Path) -> None:
    file = place / "cache"
    arguments = ("-m", bases["safetensors"], *"-p hello -n 2 -c 64 --prompt-cache".split(), file)
    output_of(*arguments)
    file.write_bytes(spoil_safetensors(rng, file.read_bytes()))
    if rng.random() < 0.1:
        replace_by_another_kind(rng, file, bases["safetensors"])
    output_of(*arguments)


KINDS: dict[Callable, int] = {  # how often each is chosen
    spoiled_checkpoint: 20, spoiled_template: 3, text_there_and_back: 4, any_options: 1,
    any_prompt: 1,
    spoiled_chat: 1, spoiled_saving: 1, spoiled_prompt_cache: 1,
}  # fmt: skip


# ---- cases in processes of their own


# while there is a folder, what is done that must not be
watched = SimpleNamespace(folder="", seen=[])
FORBIDDEN = "os.system os.exec os.posix_spawn subprocess.Popen socket.connect pickle.find_class ctypes.dlopen".split()


def watch(event: str, arguments: tuple) -> None:
    """An audit hook that records what a case must not do: open files outside its folder, run
    programs or connect."""
    if watched.folder and event in FORBIDDEN:
        watched.seen.append(f"{event}{arguments}"[:300])
    if watched.folder and event == "open" and isinstance(arguments[0], str | os.PathLike):
        path = os.path.realpath(arguments[0])
        own = (
            os.path.realpath(watched.folder),
            sys.prefix,
            sys.base_prefix,
            "/proc",
            "/sys",
            "/dev/null",
            str(ROOT),
        )
        if not f"{path}/".startswith(tuple(f"{root}/" for root in own)):
            watched.seen.append(f"opens {path}")


def one_case(seed: int, bases: dict[str, Path]) -> str:
    """The outcome of a case: its kind, then ok, refused, or what went wrong."""
    rng, place = random.Random(seed), Path(tempfile.mkdtemp())
    kind = rng.choices([*KINDS], KINDS.values())[0]
    watched.seen = []
    try:
        kind(rng, bases, place)
        outcome = "ok"
    except BaseException as error:
        message = str(error)
        documented = type(error) in DOCUMENTED or message.startswith("the logits are not finite")
        refused = documented and message and message == one_line(message)
        outcome = "refused" if refused else f"FAILED: {traceback.format_exc()}"
    watched.folder = ""
    shutil.rmtree(place, ignore_errors=True)
    return (
        f"{kind.__name__}: FAILED: {watched.seen}"
        if watched.seen
        else f"{kind.__name__}: {outcome}"
    )


def worker(seeds: list[int], bases: dict[str, Path], to: Connection) -> None:
    """Run cases and report the outcome of each."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    sys.addaudithook(watch)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    for seed in seeds:
        to.send(one_case(seed, bases)[:4000].encode(errors="replace").decode())


def run_cases(
    seeds: list[int], bases: dict[str, Path], until: float = float("inf"), limit: float = SECONDS
) -> tuple[Counter, dict[int, str]]:
    """Counts of the outcomes, and the failures by seed. A process that dies or hangs costs only its
    current case."""
    outcomes, failures, left = Counter(), {}, seeds
    forked = multiprocessing.get_context("fork")
    while left and time.monotonic() < until:
        source, to = forked.Pipe(duplex=False)
        child = forked.Process(target=worker, args=(left, bases, to))
        child.start()
        to.close()
        alive = True
        while alive and left and time.monotonic() < until:
            alive, outcome = False, f"FAILED: not finished after {limit:g} seconds"
            if source.poll(limit):
                try:
                    outcome, alive = source.recv(), True
                except EOFError:
                    outcome = "FAILED: the process died"
            kind, failed, _ = outcome.partition("FAILED")
            outcomes[kind + failed] += 1
            if failed:
                failures[left[0]] = outcome
            left = left[1:]
        child.kill()
        child.join()
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
        start = time.monotonic()
        seeds = [args.seed + i for i in range(args.cases)]
        outcomes, failures = run_cases(seeds, bases, start + args.seconds, args.limit)
        seconds = time.monotonic() - start
    for seed, outcome in failures.items():
        print(f"\n--seed {seed} --cases 1\n{outcome}")
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:8} {outcome}")
    print(
        f"{sum(outcomes.values())} cases from seed {args.seed} in {seconds:.0f} s, {len(failures)} failed"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
