"""Tests of the house itself: how its rooms import each other, README, and the models that come with it."""

import ast
import functools
import importlib
import re
import textwrap

import gguf
import pytest
import torch
import transformers

from loading.checkpoint import load, open_tokenizer
from model import generate
from sampling import Sampling
from talk import cli as cli_module
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


def imports_of(folder: str, *names: str) -> set[str]:
    """What the scripts of a folder import, as "file: module"."""
    found = set()
    for file in (HERE / folder).glob("*.py"):
        if file.name.startswith("test_") or (names and file.stem not in names):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                found |= {f"{file.name}: {node.module}.{name.name}" for name in node.names}
            if isinstance(node, ast.Import):
                found |= {f"{file.name}: {name.name}" for name in node.names}
    return found


HEART = (
    "model", "kernels", "attention", "products", "experts", "sampling", "settings", "formats", "fp8",
    "launch",
)  # fmt: skip
FOLDERS = ("bits", "cards", "ranks")


def test_rooms_import_downwards():
    """Nothing below session.py imports talk/, nothing below model.py imports loading/."""
    below_model = imports_of(".", *HEART).union(*map(imports_of, FOLDERS))
    below_session = below_model.union(*map(imports_of, ("loading", "speculation")))
    below_session |= imports_of(".", "session", "tokenizer")
    upwards = [found for found in below_session if ": talk" in found]
    upwards += [found for found in below_model if ": loading" in found]
    assert below_model and upwards == []


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
