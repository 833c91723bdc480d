"""The tokenizer of a GGUF file, translated into the files of a Hugging Face folder, for step 2 of loading (see
loading/checkpoint.py). The header is read in loading/gguf.py. Source: llama.cpp's llama-vocab.cpp.

This needs no torch."""

from __future__ import annotations

import struct
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizer import FIM_ENDS, TURN_MARKS

if TYPE_CHECKING:
    from loading.gguf import GGUF

INSTEAD = "take the model's folder in Hugging Face's layout"
# Types of tokens, as in SentencePiece
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# As in llama.cpp, these are control tokens whatever the file says their type is, and they end an
# answer whatever it says about eos_token_id
ENDS = (
    "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|im_end|>", "<|end|>",
    "<end_of_turn>", "<end_of_utterance>", "</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]",
    "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|return|>", "<|call|>", "<|calls|>",
    "<|flush|>", "<turn|>", "<|tool_response>", *FIM_ENDS,
)  # fmt: skip
# Tokens with a name: what a file's keys call it, and its id unless the file says otherwise
NAMED = {
    "llama": {"bos": ("bos", 1), "eos": ("eos", 2), "unk": ("unknown", 0), "pad": ("padding", -1)},
    "gpt2": {"bos": ("bos", 11), "eos": ("eos", 11), "unk": ("unknown", -1), "pad": ("padding", -1)},
}  # fmt: skip


class PreTokenizer(NamedTuple):
    """How a text is cut before byte pairs are merged. A GGUF file only names it; the patterns are
    those of the models' own tokenizer.json. Each cuts the pieces that the one before has left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is that token
    nfc: bool = False  # the text is normalised (NFC) first
    add_bos: bool = False  # unless the file says otherwise


WORD = r"[^\r\n\p{L}\p{N}]?"  # a word begins with a space or a sign
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
SIGNS = r"| ?[^\s\p{L}\p{N}]+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = ENDINGS + WORD + r"\p{L}+|\p{N}{1,3}" + SIGNS + r"[\r\n]*" + SPACES
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = f"{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*" + r"|\p{N}" + SIGNS + r"[\r\n/]*" + SPACES
PRE_TOKENIZERS = {  # by tokenizer.ggml.pre
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"),
        PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx"), PreTokenizer((LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), PreTokenizer((QWEN2,), nfc=True)),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u0800-\u9fa5\uac00-\ud7ff]+", r"\p{N}")
    ),
    "seed-coder": PreTokenizer((QWEN2.replace(SIGNS + r"[\r\n]*", SIGNS),)),
    **dict.fromkeys(
        ("smollm", "minerva-7b", "refact", "starcoder"), PreTokenizer((r"\p{N}", GPT2))
    ),
    **dict.fromkeys(("gpt-2", "mellum", "a.x-4.0", "trillion"), PreTokenizer((GPT2,))),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def tokens_of(gguf: GGUF) -> tuple[list[str], list[int]]:
    """The tokens and their types. Raises ValueError."""
    tokens = gguf.need("tokenizer.ggml.tokens", list)
    types = []
    for token, kind in zip(tokens, _for_each(tokens, gguf, "tokenizer.ggml.token_type")):
        if token in ENDS:
            types.append(CONTROL)
        else:
            types.append(int(kind) if NORMAL <= kind <= BYTE else NORMAL)
    return tokens, types


def _for_each(tokens: list[str], gguf: GGUF, key: str) -> list[float]:
    """A number for each token. Raises ValueError."""
    numbers = gguf.need(key, memoryview)
    if len(numbers) != len(tokens) or numbers.itemsize != 4:
        raise ValueError(
            f"{gguf.file}: {key} must have a number of 32 bits for each of the {len(tokens)} tokens"
        )
    return numbers.tolist()


def tokenizer_files(gguf: GGUF) -> tuple[bytes | dict[str, Any], dict[str, Any]]:
    """The tokenizer as the files of a Hugging Face folder: the bytes of a tokenizer.model or the
    object in a tokenizer.json, and the object in tokenizer_config.json. Raises ValueError."""
    kind = gguf.choice("tokenizer.ggml.model", ("llama", "gpt2"), INSTEAD)
    tokens, types = tokens_of(gguf)
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]  # as in llama.cpp
    if len(set(tokens)) < len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise ValueError(f"{gguf.file} has the token {twice!r} twice: convert the model again")
    config: dict[str, Any] = {}
    for name, (key, usual) in NAMED[kind].items():
        i = gguf.get(f"tokenizer.ggml.{key}_token_id", int, usual)
        if 0 <= i < len(tokens):
            config[f"{name}_token"] = tokens[i]
    if kind == "llama":
        file = _sentencepiece(gguf, tokens, types)
        config["add_bos_token"] = gguf.get("tokenizer.ggml.add_bos_token", bool, True)
        config["legacy"] = True  # text after a control token begins with a space, as in llama.cpp
        config["added_tokens_decoder"] = {
            str(i): dict.fromkeys(("special", "control"), token in TURN_MARKS) | {"content": token}
            for i, token in enumerate(tokens)
            if types[i] == USER_DEFINED
        }
    else:
        pre = PRE_TOKENIZERS[gguf.choice("tokenizer.ggml.pre", PRE_TOKENIZERS, INSTEAD)]
        file = _byte_pairs(gguf, tokens, types, pre)
        if gguf.get("tokenizer.ggml.add_bos_token", bool, pre.add_bos) and "bos_token" in config:
            bos = config["bos_token"]
            file["post_processor"] = _adds_first(bos, tokens.index(bos))
    if template := gguf.get("tokenizer.chat_template", str):
        config["chat_template"] = template
    return file, config


def _adds_first(token: str, i: int) -> dict[str, Any]:
    """A post-processor that puts this token before each text."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text],
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]}},
    }


def _byte_pairs(
    gguf: GGUF, tokens: list[str], types: list[int], pre: PreTokenizer
) -> dict[str, Any]:
    """The object in a tokenizer.json, where tokens that only fill up the vocabulary are left
    out."""
    added = []
    for i, kind in enumerate(types):
        if kind in (CONTROL, USER_DEFINED, UNKNOWN):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append(flags | {"id": i, "content": tokens[i], "special": kind != USER_DEFINED})
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    splits = [split | {"pattern": {"Regex": pattern}} for pattern in pre.patterns]
    model = {
        "type": "BPE",
        "ignore_merges": pre.ignore_merges,
        "vocab": {token: i for i, token in enumerate(tokens) if types[i] != UNUSED},
        "merges": gguf.need("tokenizer.ggml.merges", list),
    }
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }


def _sentencepiece(gguf: GGUF, tokens: list[str], types: list[int]) -> bytes:
    """The bytes of a tokenizer.model: protocol buffers, as in sentencepiece_model.proto."""
    scores = _for_each(tokens, gguf, "tokenizer.ggml.scores")
    unknown = gguf.get("tokenizer.ggml.unknown_token_id", int, 0)
    pieces = []
    for i, (token, score, kind) in enumerate(zip(tokens, scores, types)):
        if i == unknown:
            kind = UNKNOWN
        elif kind in (UNKNOWN, USER_DEFINED):
            # Old files call a token UNKNOWN if it only fills up; USER_DEFINED ones are added apart
            kind = UNUSED
        piece = _field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _field(3, kind)
        pieces.append(_field(1, piece))
    trainer = _field(3, 2) + _field(35, int(BYTE in types))  # model_type: BPE; byte_fallback
    normalizer = _field(1, b"identity")
    normalizer += _field(3, int(gguf.get("tokenizer.ggml.add_space_prefix", bool, True)))
    normalizer += _field(4, int(gguf.get("tokenizer.ggml.remove_extra_whitespaces", bool, False)))
    return b"".join(pieces) + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, value: int | bytes) -> bytes:
    """A field of a protocol buffer: a number, or bytes after their length."""
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the top bit says that more follow."""
    if value < 128:
        return bytes([value])
    return bytes([value & 127 | 128]) + _varint(value >> 7)
