"""Tests of chat templates."""

import re

import pytest

from loading.checkpoint import open_tokenizer
from loading.templates import TEMPLATES, find_template
from tests.helpers import assert_refused, conversation

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
    t = open_tokenizer(tiny, chat_template=name)
    prompt = t.chat_prompt(conversation("U", "A", "V", system="S"))
    assert prompt.text == "<s>" + TEXTS[name]
    # control tokens, and between them what SentencePiece makes of the text
    ids = [t.bos]
    for part in re.split("(</?s>)", TEXTS[name]):
        ids += [t.control[part]] if part in t.control else t.vocabulary.sp.encode(part)
    assert prompt.ids == ids
    for wrong in ([], "hi", ["U"], [{"role": "user"}]):
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
    named = [{"name": "rag", "template": "y"}, {"name": "chat", "template": "x"}]
    assert find_template(folder, {"chat_template": named})[0] == "y", "without a default the first"
    assert find_template(folder, {"chat_template": {}})[0] == TEMPLATES["vicuna"]
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
    "writes half a character": (
        r"{{ '\ud800' }}",
        "the conversation as the chat template writes it is not UTF-8: it holds U+D800 at 0",
    ),
    "writes nothing": ("{% if 0 %}x{% endif %}", "writes nothing for this conversation"),
}


@pytest.mark.parametrize("text, expected", REFUSED.values(), ids=REFUSED)
def test_template_errors(cli, tiny, tmp_path, text, expected):
    (tmp_path / "template").write_text(text)
    flags = ("--chat-template", tmp_path / "template", "--quiet", "-p", "hello")
    assert_refused(cli("-m", tiny, "--chat", *flags), expected)
