"""Tests of the house itself: how its rooms import each other, its pages, and the models that come with it."""

import ast
import functools
import importlib
import re
import shlex
import textwrap

import gguf
import pytest
import torch
import transformers

import bench
import run
import serve
from engine import generate
from loading import ggml
from loading.checkpoint import load, open_tokenizer
from loading.names import formats_of, matrix_shapes
from loading.place import FORMATS, check_memory, memory_of
from loading.random_model import random_config
from model import Config
from ranks.processes import Ranks
from sampling import Sampling
from settings import FILTERS, Options
from talk import cli as cli_module
from talk.endpoints import ENDPOINTS
from tests.helpers import (
    HERE,
    MOST_PROBABLE,
    assert_close,
    conversation,
    logits_of,
    oracle,
    randn,
    read_gguf,
)

# ---- the house


class RunTime(ast.NodeTransformer):
    """Drops what only a type checker reads."""

    def visit_If(self, node: ast.If) -> ast.If | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def imports_of(folder: str, *names: str) -> set[str]:
    """What the scripts of a folder import when they run, as "file: module"."""
    found = set()
    for file in (HERE / folder).glob("*.py"):
        if file.name.startswith("test_") or (names and file.stem not in names):
            continue
        for node in ast.walk(RunTime().visit(ast.parse(file.read_text()))):
            if isinstance(node, ast.ImportFrom):
                found |= {f"{file.name}: {node.module}.{name.name}" for name in node.names}
            if isinstance(node, ast.Import):
                found |= {f"{file.name}: {name.name}" for name in node.names}
    return found


HEART = (
    "engine", "model", "kernels", "attention", "products", "experts", "sampling", "settings", "formats", "fp8",
    "launch",
)  # fmt: skip
FOLDERS = ("bits", "cards", "ranks")
PARTS_OF_SESSION = ("passes", "texts", "prompts", "constraints", "grammars")


def test_rooms_import_downwards():
    """Nothing below session.py imports talk/, nothing below model.py imports loading/."""
    below_model = imports_of(".", *HEART).union(*map(imports_of, FOLDERS))
    below_session = below_model.union(*map(imports_of, ("loading", "speculation")))
    below_session |= imports_of(".", "session", "tokenizer", *PARTS_OF_SESSION)
    upwards = [found for found in below_session if ": talk" in found]
    upwards += [found for found in below_model if ": loading" in found]
    assert below_model and upwards == []


# ---- README.md and MANUAL.md


README = (HERE / "README.md").read_text()
MANUAL = (HERE / "MANUAL.md").read_text()
PAGES = {"README.md": README, "MANUAL.md": MANUAL}
PAGES["BENCHMARKS.md"] = (HERE / "BENCHMARKS.md").read_text()


def rows_below(page: str, head: str) -> list[list[str]]:
    """The cells of a table, whose first row begins with this one."""
    table = page[page.index(head) :].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


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


def test_manual_op_does_what_its_reference_does(tmp_path, monkeypatch, guarded):
    block = textwrap.dedent(re.search(r"(    # ---- relu.*?return y\n)", MANUAL, re.DOTALL)[1])
    (tmp_path / "manual_op.py").write_text(f"from kernels import *\n{block}\n")
    monkeypatch.syspath_prepend(tmp_path)
    op = importlib.import_module("manual_op")
    x = randn(17, 100, dtype=torch.float16)
    assert torch.equal(op.relu(x), op.relu_ref(x))
    guarded()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(((?!https?:)[^)]+)\)", PAGES[page])
    for link in links:
        file, _, heading = link.partition("#")
        assert (HERE / (file or page)).exists(), link
        titles = re.findall(r"^#+ (.+)$", PAGES.get(file or page, ""), re.MULTILINE)
        assert not heading or heading in [re.sub(r"\W+", "-", t.lower()) for t in titles], link
    assert links or page == "BENCHMARKS.md"


def flags_of(main, capsys) -> set[str]:
    """All flags of a program, in its own help."""
    with pytest.raises(SystemExit):
        main(["--help"])
    return {*re.findall(r"(?<![\w-])--?[a-z][\w-]*", capsys.readouterr().out)}


def test_commands_of_the_pages_are_understood(capsys):
    """Each is a target of the Makefile, or a script with flags that it has."""
    targets = re.findall(r"^([a-z]+):", (HERE / "Makefile").read_text(), re.MULTILINE)
    scripts = {"run.py": run.main, "serve.py": serve.main, "bench.py": bench.main}
    flags = {name: flags_of(main, capsys) for name, main in scripts.items()}
    flags["torchrun.py"] = flags["run.py"] | {"--nnodes", "--nproc-per-node"}
    flags["torchrun.py"] |= {"--rdzv-backend", "--rdzv-endpoint"}
    seen = set()
    for page in PAGES.values():
        for target in re.findall(r"^    make ([a-z]+)|`make ([a-z]+)", page, re.MULTILINE):
            assert "".join(target) in targets, target
        for name, rest in re.findall(r"\.venv/bin/python (?:ranks/)?(\w+\.py)([^`\n]*)", page):
            seen.add(name)
            words = shlex.split(rest, comments=True)
            assert {word for word in words if word.startswith("-")} <= flags[name], rest
        for rest in re.findall(r"make bench .*ARGS=\"([^\"]*)\"", page):
            words = rest.split()
            assert {word for word in words if word.startswith("-")} <= flags["bench.py"], rest
    assert seen == flags.keys()


def test_manual_has_all_flags_and_paths(capsys):
    ignored = {*cli_module.IGNORED, "-h", "--help"}
    rows = "".join(re.findall(r"^\| `-.*?\|", MANUAL, re.MULTILINE))
    named = {*re.findall(r"(?<![\w-])--?[a-z][\w-]*", rows)}
    described = flags_of(run.main, capsys) | flags_of(serve.main, capsys)
    assert named == described - ignored
    paths = re.findall(r"`/v1(/[\w/-]+)`", MANUAL)
    assert ENDPOINTS.keys() | {"/models"} <= {*paths}
    defaults = {row[0]: row[1] for row in rows_below(MANUAL, "| flag | default")}
    for name in FILTERS:
        row = next(row for row in defaults if f"`--{name.replace('_', '-')}`" in row)
        assert defaults[row] == f"{getattr(Sampling, name):g}", name


def test_readme_names_what_there_is():
    assert len(README.splitlines()) <= 200
    for script in HERE.glob("*.py"):
        assert script.name in README or script.name in ("conftest.py", "test_all.py"), script
    kinds = next(row[1] for row in rows_below(README, "| what | which") if row[0] == "GGUF")
    named = {*re.findall(r"\w+", kinds.split(";")[0])}
    assert named == {kind.name for kind in ggml.TYPES.values()}


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def test_readme_limits_of_cards():
    """Bandwidth over the bytes of the matrices, and what to expect of it."""
    config = random_config("random:7b")
    sizes = []
    for format in (None, "e4m3", "int4"):
        formats = formats_of(config, FORMATS.get(format))
        shapes = matrix_shapes(config).items()
        plain = lambda rows, columns: 2 * rows * columns
        sizes.append(sum((formats[n].nbytes if formats else plain)(*shape) for n, shape in shapes))
    for card, _, bandwidth, *limits in rows_below(README, "| card | memory"):
        exact = [1e9 * number(bandwidth) / size for size in sizes]
        assert [*map(number, limits)] == pytest.approx(exact, abs=1), card
        if card.startswith("RTX"):
            shares = zip(exact, (0.90, 0.82, 0.73))
            first, second, third = (f"{limit * share:.0f}" for limit, share in shares)
            assert f"{first}, {second} and {third}" in README.replace("\n", " "), card


def config_like(shape: tuple, context: int, **more) -> Config:
    return Config(*shape, norm_eps=1e-5, max_seq_len=context, dtype=torch.float16, **more)


IN_24_GB = {
    "Llama-3.1-8B": ("random:8b", 1 << 17),
    "Mistral-Nemo-12B": ((5120, 40, 32, 8, 128, 14336, 131072), 1 << 17),
    "Mistral-Small-24B": ((5120, 40, 32, 8, 128, 32768, 131072), 1 << 17),
    "Qwen3-32B": ((5120, 64, 64, 8, 128, 25600, 151936), 40960),
    "Qwen3-14B": ((5120, 40, 40, 8, 128, 17408, 151936), 40960),
    "Qwen3-30B-A3B-2507": ("random:Qwen3-30B-A3B", 1 << 18),
}


@pytest.mark.parametrize("model", IN_24_GB)
def test_readme_contexts_in_24_gb(model, monkeypatch):
    """To the last hundred, or the model's own."""
    monkeypatch.setattr("loading.place.free_memory", lambda device: 24e9)
    shape, most = IN_24_GB[model]
    config = random_config(shape) if isinstance(shape, str) else config_like(shape, most)

    def fits(size: int, format: str | None, kv_fp8: bool) -> bool:
        formats = formats_of(config, FORMATS.get(format))
        gpu = torch.device("cuda")
        need = memory_of(config, torch.float16, gpu, formats, Options(kv_fp8=kv_fp8))
        try:
            check_memory(need, size, gpu, Ranks())
        except MemoryError:
            return False
        return True

    head = "| model | fp16 | e4m3 | int4 | int4 and"
    cells = next(row[1:] for row in rows_below(README, head) if row[0] == model)
    ways = (None, False), ("e4m3", False), ("int4", False), ("int4", True)
    for cell, way in zip(cells, ways, strict=True):
        size = 0 if cell == "none" else number(cell)
        assert fits(max(size, 1), *way) == (cell != "none"), (cell, way)
        assert size == most or not fits(size + 100, *way), (cell, way)


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
    model, tokenizer = load(tales, dtype="fp32", device="cpu"), open_tokenizer(tales)
    for prompt, text in GOLDENS.items():
        ids = generate(model, tokenizer.encode(prompt), n=24, sampling=MOST_PROBABLE)
        assert tokenizer.decode([*ids]) == text, prompt


# ---- models/smollm2


SMOLLM2 = HERE / "models" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


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
    model, tokenizer = load(SMOLLM2, dtype="fp32", device="cpu"), open_tokenizer(SMOLLM2)
    for question in ("What is the capital of France?", "Größe 🙂: who wrote Faust, and why?"):
        chat = conversation(question)
        ids = tokenizer.apply_chat_template(chat)
        text = their_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ids == their_tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = [*generate(model, ids, n=16, sampling=MOST_PROBABLE)]
        theirs_of_all = oracle(theirs, ids + answer)  # and the best of each is the next
        assert theirs_of_all.argmax(-1)[len(ids) - 1 : -1].tolist() == answer, question
        assert_close(logits_of(model, ids), theirs_of_all[: len(ids)], 1e-4)
