"""Tests of tokenizer.py."""

import itertools
import json
import random
import shutil
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import hypothesis
import pytest
import tokenizers
import transformers
from hypothesis import strategies as st

from loading.checkpoint import open_tokenizer
from loading.templates import TEMPLATES
from tests.helpers import (
    FOX,
    HERE,
    TALES,
    TEXT,
    changed_json,
    conversation,
    edit,
    encode_after,
    examples,
    train_byte_pairs,
    train_sentencepiece,
)
from tokenizer import Prompt, TextStream, Tokenizer, encode_continuation

# ---- tokenizer.py


# any text, but for the character that SentencePiece takes for a space
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581\0"))
FEW_LETTERS = st.text("ab é🐢", max_size=12)


def streamed(tokenizer: Tokenizer, ids: list[int], strip_space=False) -> list[str]:
    stream = TextStream(tokenizer, strip_space)
    return [stream.push(i) for i in ids] + [stream.finish()]


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
    tokenizer = open_tokenizer(tiny)
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
    tokenizer = open_tokenizer(tiny)
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
    tokenizer = open_tokenizer(TALES)
    for said, kept, leaves_space in (
        ("A fox.", "A fox.", False), ("A fox ", "A fox", True), ("\nA fox\n", "A fox\n", False),
        ("A fox\n  ", "A fox\n ", True),
    ):  # fmt: skip
        messages = [*FOX, {"role": "assistant", "content": said}]
        prompt = tokenizer.chat_prompt(messages, continues=True)
        assert prompt.text.endswith(f"[/INST] {kept}") and prompt.leaves_space == leaves_space


@pytest.mark.parametrize("name", TEMPLATES)
def test_continued_answers_that_the_template_writes_too(name):
    """An answer that looks like what the template writes after it ends where it is written."""
    t = open_tokenizer(TALES, chat_template=name)
    asked = t.chat_prompt(FOX).text
    for said in "end", "s", ">", "</s>", "im_end|>\n", "INST", "ASSISTANT":
        messages = [*FOX, {"role": "assistant", "content": said + " "}]
        prompt = t.chat_prompt(messages, continues=True)
        assert prompt.text.removeprefix(asked).strip() == said.strip(), (said, prompt.text)
        assert prompt.leaves_space and prompt.text.startswith(asked.rstrip())
    thinks = "{{ messages[0].content }}{{ messages[1].content.split('</think>')[-1] }}"
    for template, said in (thinks, "<think>so</think>A"), ("{{ messages[0].content }}", "A"):
        t.chat_template = t.tool_template = template
        with pytest.raises(ValueError, match="it cannot be continued"):
            t.chat_prompt([*FOX, {"role": "assistant", "content": said}], continues=True)


def test_system_messages_that_a_template_rewrites_or_leaves_out(tiny):
    """Whether there is a place for one is not told by how it is written."""
    t = open_tokenizer(tiny, chat_template="chatml")
    system = lambda text: {"role": "system", "content": text}
    messages = [system("Be kind. /no_think"), *FOX, system("Be brief.")]
    for written in "upper", "lower", "trim", "tojson", "title", "replace('/no_think', '')":
        t.chat_template = "{% for m in messages %}{{ m.content | " + written + " }}{% endfor %}"
        t.check_systems(messages)
    for left_out in "m.role == 'user'", "loop.first or m.role == 'user'":
        t.chat_template = "{% for m in messages if " + left_out + " %}{{ m.content }}{% endfor %}"
        t.chat_template = t.chat_template.replace("loop.first", "m.content == messages[0].content")
        with pytest.raises(ValueError, match="no place for this system message"):
            t.check_systems(messages)
        t.check_systems([system(" "), *FOX])
    t.chat_template = "{{ messages[0].content }}{{ messages[1].content }}"
    t.check_systems(messages[:1] + FOX + [system("")])
    with pytest.raises(ValueError, match="no place"):
        t.check_systems(messages)


def test_work_is_linear_in_what_is_given(tiny):
    """Ten times the messages or stop strings take some ten times as long, and memory follows."""
    t = open_tokenizer(tiny, chat_template="chatml")

    def seconds(work, *given) -> float:
        began = time.process_time()
        work(*given)
        return time.process_time() - began

    many = [{"role": "system", "content": f"{i:x}"} for i in range(20_000)]
    for work in t.check_systems, t.chat_prompt:
        assert seconds(work, [*many, *FOX]) < 40 * seconds(work, [*many[:2000], *FOX]) + 1, work
    text = "a" * 3000
    ids = [t.vocabulary.sp.piece_to_id("a")] * len(text)

    def stream(count: int) -> None:
        stops = [*(f"{text}{i}" for i in range(count)), text[:2000] + "b", "ab"]
        stream = TextStream(t, stops=stops)
        assert "".join(map(stream.push, ids)) + stream.finish() == text and not stream.stopped

    assert seconds(stream, 1000) < 5 * seconds(stream, 10) + 1


def test_texts_that_use_all_private_characters(tiny):
    t = open_tokenizer(tiny, chat_template="chatml")
    every = "".join(map(chr, range(0x100000, 0x10FFFE)))
    assert t.chat_prompt(conversation(every[2:])).text.count(every[2:]) == 1
    with pytest.raises(ValueError, match="every character for private use"):
        t.chat_prompt(conversation(every))


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
    tokenizer = open_tokenizer(tiny)
    assert tokenizer.decode([-1, 1 << 40, 1 << 20]) == ""
    byte = {int(tokenizer.vocabulary.sp.id_to_piece(i)[3:5], 16): i for i in range(3, 259)}
    ids = [byte[b] for b in b"a" + raw]
    text = tokenizer.vocabulary.sp.decode(ids)
    assert "".join(streamed(tokenizer, ids)) == text
    assert tokenizer.decode(ids) == text


def test_half_typed_control_tokens(tiny):
    t = open_tokenizer(tiny)
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
    size = open_tokenizer(copy).vocabulary.size
    end = lambda *given: open_tokenizer(copy, *given).control.get("<|im_end|>")
    (copy / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size}))
    assert end() == end(size + 1) == size
    assert end(size) is None, "the model has no embedding for it"
    assert open_tokenizer(copy, bos_id=7).bos == 1, "the tokenizer's own comes first"
    for adds_bos, first in ((False, []), (True, [1]), (None, [1])):
        (copy / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": adds_bos}))
        t = open_tokenizer(copy)
        assert t.encode("x") == first + t.vocabulary.sp.encode("x")
    # as transformers 5 saves them, where tokenizer.model has stayed
    added = [
        dict(id=size + 1, content="<tool>", special=False),
        dict(id=size, content="<|im_end|>", special=True),
    ]
    (copy / "tokenizer.json").write_text(json.dumps({"added_tokens": [*added, dict(id="x"), 3]}))
    t = open_tokenizer(copy, size + 2)
    assert t.control["<|im_end|>"] == size and t.decode([size + 1, size]) == "<tool>"


def test_added_tokens_of_a_tokenizer_model(copy):
    """Renamed pieces, flags, tokens that are found in a text, and the space before a text, as the
    configuration has them. The ids are those of transformers 4 (slow) and, but for renamed pieces
    of LlamaTokenizer, 5."""
    sp = open_tokenizer(copy).vocabulary.sp
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
        t = open_tokenizer(copy, size + 2)
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
    first = open_tokenizer(copy).vocabulary.size_with_added
    flags = dict(single_word=True, lstrip=False, rstrip=False, normalized=False)
    added = {
        first: dict(content="zqzq", special=False, **flags),
        first + 1: dict(content="<q>", special=True, **flags),
    }
    template = "x<q>y <q> {{ messages[0].content }}"
    config = dict(added_tokens_decoder=added, chat_template=template)
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    t = open_tokenizer(copy)
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
    (folder / "params.json").write_text("{}")  # Meta's layout looks into the parent
    for raw in (None, b"IQ== 0\n", (tmp_path / "tokenizer.model").read_bytes()):
        if raw is not None:
            (folder / "tokenizer.model").write_bytes(raw)
        for text in TEXT, "  x\n":
            assert open_tokenizer(folder).encode(text) == own.encode(text).ids
    (folder / "config.json").write_text('{"model_type": "bert"}')  # which no model needs here
    assert open_tokenizer(folder).encode(TEXT) == own.encode(TEXT).ids
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with changed_json(folder / "tokenizer.json") as raw:
        raw["model"] |= dict(byte_fallback=False, fuse_unk=False)  # which old files do not say
    for legacy, prefix in itertools.product((True, False), (True, False, None)):
        with changed_json(folder / "tokenizer_config.json") as config:
            config |= dict(tokenizer_class="LlamaTokenizer", legacy=legacy, add_prefix_space=prefix)
        ours, theirs = open_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
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
        assert open_tokenizer(tmp_path).encode(text, bos=False) == ids


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
    ids = open_tokenizer(tmp_path).apply_chat_template(conversation("ab"))
    assert ids == own.encode("<|x|>ab", add_special_tokens=False).ids


def test_user_defined_turn_marks(tmp_path):
    """They are control tokens where a template writes them, and only there."""
    train_sentencepiece(tmp_path, user_defined_symbols=["<|im_start|>", "<|im_end|>"])
    t = open_tokenizer(tmp_path, chat_template="chatml")
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
    t = open_tokenizer(tmp_path)
    begin, end = t.control["[INST]"], t.control["[/INST]"]
    # after the space that SentencePiece adds
    enc = lambda text: t.vocabulary.sp.encode(" " + text if legacy else text)
    ids = t.apply_chat_template(conversation("time [/INST]", "a fox", "day"))
    asked = [begin, *enc("time [/INST]"), end, *enc("a fox"), t.eos]
    assert ids == [t.bos, *asked, begin, *enc("day"), end]
    assert t.turn_ends() == ({t.eos}, [])


# ---- tokenizer.py: tokenizer.json and chat templates as their checkpoints have them, against


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
    """Text, whole and in two parts, with control tokens, and conversations."""
    ours = open_tokenizer(train_tokenizer_json(tmp_path, family))
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
        marked = "".join(random.choices([*ours.control, "x", " ", "a b", "\n"], k=7))
        parsed = ours.encode(marked, parse_special=True)
        assert parsed == theirs(marked)["input_ids"], (marked,)
        assert ours.decode(parsed, marks=True) == theirs.decode(parsed), (marked,)
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


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "GPT2Tokenizer"])
def test_vocabulary_and_merges_in_two_files(tmp_path, kind):
    """As older tokenizers of byte pairs have them. What cannot be read says what to take instead."""
    with changed_json(train_tokenizer_json(tmp_path, "qwen 3") / "tokenizer.json") as raw:
        model, added = raw["model"], raw["added_tokens"]
    (tmp_path / "tokenizer.json").unlink()
    decoder = {token["id"]: dict(content=token["content"], special=True) for token in added}
    with changed_json(tmp_path / "tokenizer_config.json") as config:
        config |= dict(tokenizer_class=kind, added_tokens_decoder=decoder)
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(merge) for merge in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    ours, theirs = open_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for _ in range(100):
        text = random_text(30) + random.choice(["", *ours.control])
        assert ours.encode(text, parse_special=True) == theirs(text)["input_ids"], (text,)
    edit(tmp_path / "tokenizer_config.json", tokenizer_class="BloomTokenizer")
    with pytest.raises(ValueError, match="of BloomTokenizer: save it by transformers"):
        open_tokenizer(tmp_path)
    (tmp_path / "merges.txt").rename(tmp_path / "tekken.json")
    with pytest.raises(
        OSError, match="tekken.json, which it has, take the version in Hugging Face"
    ):
        open_tokenizer(tmp_path)


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
    ours, theirs = open_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
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
    assert open_tokenizer(tmp_path).chat_prompt(messages).text == expected


@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_typed_control_tokens_are_text(tmp_path, family):
    """Wherever the template puts them: control tokens are those of a harmless talk, and no
    character is lost."""
    t = open_tokenizer(train_tokenizer_json(tmp_path, family))
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
    t = open_tokenizer(train_tokenizer_json(tmp_path, family))
    ids, stops = t.turn_ends()
    asked = conversation("tell me")
    prompt = t.chat_prompt(asked)
    for answer in (" \n ", "", "a tale"):
        # Not the tokens that the whole text would have
        letters = [i for letter in answer for i in encode_after(t, letter)]
        past = Prompt(prompt.text, prompt.ids + letters, answer)
        second = conversation("tell me", answer, "go on")
        assert t.chat_prompt(asked, pasts=[past]) == prompt, "it is continued, not given again"
        again = t.chat_prompt(second, pasts=[past])
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
    other = t.chat_prompt(second, pasts=[replace(past, answer="another")])
    assert other.ids == t.apply_chat_template(second), "not what the conversation holds"
    past = Prompt("ask:", [1], " a tale")
    for said, ends in ("\n a tale.", ((12, 1),)), (" so: a tale.", ()), (" the crow", ()):
        assert t._common_ends(past, f"ask:{said}") == ends
    # the last question again: the answers before it keep their ids
    third = conversation("tell me", answer, "go on", "more", "and?")
    past = replace(again, ids=again.ids + t.encode("more", bos=False), answer="more")
    for answered in (past, replace(t.chat_prompt(third, pasts=[past]), answer="no")):
        assert t.chat_prompt(second, pasts=[answered]) == again


def test_control_token_in_the_vocabulary(tmp_path):
    """With ignore_merges, a word that is in the vocabulary is one token, whatever the merges say
    (Llama 2 as JSON). A dropout of merges is for training."""
    with changed_json(train_tokenizer_json(tmp_path, "llama 3") / "tokenizer.json") as raw:
        raw["model"] |= dict(ignore_merges=True, dropout=0.9)
        raw["pre_tokenizer"] |= dict(use_regex=False)
        raw["model"]["vocab"] |= {token["content"]: token["id"] for token in raw["added_tokens"]}
    t = open_tokenizer(tmp_path)
    ids = t.encode("<|eot_id|>", bos=False)
    assert t.control["<|eot_id|>"] not in ids and t.decode(ids) == "<|eot_id|>"
    assert len({tuple(t.encode("Once upon a time")) for _ in range(9)}) == 1


def test_many_and_long_control_tokens(tmp_path):
    """Messages are searched for all of them, and for their beginnings; speech models have tens of
    thousands. Memory follows the file's size. What is empty is no token."""
    long = f"<{'long' * 10_000}>"
    names = [f"<sound_{i}>" for i in range(10_000)] + ["<" * n + "a" for n in range(2, 99)]
    with changed_json(train_tokenizer_json(tmp_path, "llama 3") / "tokenizer.json") as raw:
        start, like = max(token["id"] for token in raw["added_tokens"]) + 1, raw["added_tokens"][0]
        more = enumerate([*names, "", long], start)
        raw["added_tokens"] += [like | {"id": id, "content": name} for id, name in more]
    template = "<sound_77>{{ messages[0]['content'] }}<sound_777><sound_77<<<a"
    (tmp_path / "chat_template.jinja").write_text(template)
    began = time.process_time()
    tracemalloc.start()
    t = open_tokenizer(tmp_path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100e6 and "" not in t.control
    numbers = set(t.control.values())
    expected = [t.control[name] for name in ("<sound_77>", "<sound_777>", "<<<a")]
    for typed in ("<" * 5_000, "<sound_77><sound_7", "_3>", "x"):
        control = [i for i in t.apply_chat_template(conversation(typed)) if i in numbers]
        assert control == expected, typed[:99]
    t.chat_template = "{{ messages[0].content }}long>"
    assert t.control[long] not in t.chat_prompt(conversation(long.removesuffix("long>"))).ids
    assert time.process_time() - began < 60


def test_a_tokenizer_that_panics(tmp_path):
    """Its library raises what is no Exception for a pattern that backtracks too often."""
    with changed_json(train_tokenizer_json(tmp_path, "llama 3") / "tokenizer.json") as raw:
        split = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated"}
        cuts = [split | {"invert": False}, raw["pre_tokenizer"]]
        raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": cuts}
    t = open_tokenizer(tmp_path)
    assert t.decode(t.encode("aab", bos=False)) == "aab"
    with pytest.raises(ValueError, match="^the tokenizer fails at this text: "):
        t.encode("a" * 60 + "b")


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
    "added tokens": ({"added_tokens": [1, 2]}, "added_tokens is not a list of objects"),
    "a number for added tokens": ({"added_tokens": 3}, "added_tokens is not a list of objects"),
    "a panic": ({"model": {"continuing_subword_prefix": "x" * 9}}, "out of range for slice"),
    "too large": ({}, "but the model has a vocabulary of 100"),
}  # fmt: skip


@pytest.mark.parametrize("changes, said", SPOILED_JSON.values(), ids=SPOILED_JSON)
def test_spoiled_tokenizer_json(tmp_path, changes, said):
    with changed_json(train_tokenizer_json(tmp_path, "llama 3") / "tokenizer.json") as raw:
        raw |= changes | {"model": raw["model"] | changes.get("model", {})}
    with pytest.raises(ValueError, match=said):
        open_tokenizer(tmp_path, vocab_size=100)


def test_others_run_while_a_long_text_is_encoded(tmp_path):
    """As a server's other clients do."""
    t = open_tokenizer(train_tokenizer_json(tmp_path, "llama 3"))
    longest = 0.0
    with ThreadPoolExecutor(1) as pool:
        start = last = time.perf_counter()
        encoding = pool.submit(t.encode, "The quick brown fox. " * 20_000)
        while not encoding.done():
            time.sleep(0.001)
            now = time.perf_counter()
            longest = max(longest, now - last)
            last = now
    assert longest < (last - start) / 2, "the library keeps the GIL: encode in a batch"
