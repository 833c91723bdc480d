"""Step 3 of loading a GGUF file (see loading/checkpoint.py), the file format of llama.cpp: the header, and
what it says about model and tokenizer, translated into the files of a Hugging Face folder.

A file is a header (metadata and a table of tensors, in little-endian order), followed by the bytes
of the tensors, aligned. Nothing in it is trusted: counts, sizes and offsets are compared with the
file's size before memory is allocated. Sources: ggml's docs/gguf.md; llama.cpp's llama-vocab.cpp
and llama-model.cpp for the meaning of keys and for their defaults.

This needs no torch. It lies in a folder, where its name does not hide the package `gguf`, which
transformers imports."""

import math
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

from loading.families import FAMILIES
from loading.files import FILE_BYTES, open_regular, stamp_of

# ---- types of tensors


class Type(NamedTuple):
    """How a tensor's values are stored."""

    name: str
    block: int  # values in a block; more than 1 if they are quantised
    nbytes: int  # of a block


# By their numbers in files. llama.cpp takes Q5_0 instead of Q4_K for rows that are no multiple of
# 256.
TYPES = {
    0: Type("F32", 1, 4), 1: Type("F16", 1, 2), 30: Type("BF16", 1, 2),
    2: Type("Q4_0", 32, 18), 3: Type("Q4_1", 32, 20), 6: Type("Q5_0", 32, 22),
    7: Type("Q5_1", 32, 24),
    8: Type("Q8_0", 32, 34), 12: Type("Q4_K", 256, 144), 13: Type("Q5_K", 256, 176),
    14: Type("Q6_K", 256, 210), 20: Type("IQ4_NL", 32, 18), 23: Type("IQ4_XS", 256, 136),
}  # fmt: skip
OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


# ---- the header

SCALARS = {  # types of numbers, as struct names them
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
STRING = 8
ARRAY = 9
# The most strings in an array, four times as many as the largest vocabularies have. Without a
# limit, a sparse file could fill the memory
STRINGS = 1 << 21


@dataclass(frozen=True)
class TensorInfo:
    """A row of the table of tensors: where a tensor is."""

    name: str
    type: Type
    shape: tuple[int, ...]  # of its values, rows first, as in torch
    file: Path
    offset: int  # of its first byte in the file
    stamp: tuple[int, ...] = ()  # of the file, see files.stamp_of

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.block * self.type.nbytes


@dataclass(frozen=True)
class GGUF:
    """The header of a file, or of all shards of a split one."""

    file: Path  # of the metadata
    metadata: dict[str, Any]  # arrays are lists of strings, or memoryviews of numbers
    tensors: dict[str, TensorInfo]

    def get(self, key: str, kind: type | UnionType, default: Any = None) -> Any:
        """A value of the metadata, or the default if there is none. Raises ValueError if it is of
        another type than `kind`."""
        value = self.metadata.get(key)
        if value is None:
            return default
        if not isinstance(value, kind):
            said = "an array" if isinstance(value, (list, memoryview)) else repr(value)
            raise ValueError(f"{self.file}: {key} is {said}, a value of the wrong type")
        return value

    def need(self, key: str, kind: type) -> Any:
        """A value of the metadata. Raises ValueError if there is none, or of another type."""
        value = self.get(key, kind)
        if value is None:
            raise ValueError(
                f"{self.file} lacks {key}: convert the model again with a newer llama.cpp"
            )
        return value

    def choice(self, key: str, supported: Iterable[str]) -> str:
        """A string of the metadata. Raises ValueError if it is none of these."""
        value = self.need(key, str)
        if value not in supported:
            listed = ", ".join(supported)
            raise ValueError(
                f"{self.file}: {key} is {value!r}, which is not supported (supported: {listed})"
            )
        return value


class Header:
    """Reads a header from the first bytes of a file. Raises ValueError, or struct.error if they end
    too early."""

    def __init__(self, file: Path, data: bytes, size: int, stamp: tuple[int, ...]):
        """data: the first bytes of the file, at most FILE_BYTES."""
        self.file = file
        self.data = data
        self.size = size  # of the whole file
        self.stamp = stamp
        self.at = 4  # after "GGUF"

    def damaged(self, what: str) -> ValueError:
        return ValueError(f"{self.file} is damaged: {what}: download it again")

    def scalar(self, code: str) -> int | float | bool:
        """A number of a type that is named as in struct."""
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def strings(self, count: int) -> list[str]:
        """Strings, each preceded by its length. The loop does as little as it can: vocabularies
        have hundreds of thousands of strings."""
        data = self.data
        size = len(data)
        if count > min(STRINGS, (size - self.at) // 8):
            raise self.damaged(f"it is cut off, or its {count} strings are no vocabulary")
        length = struct.Struct("<Q").unpack_from
        at = self.at
        found = []
        for _ in range(count):
            start = at + 8
            at = start + length(data, at)[0]
            if at > size:
                raise self.damaged("a string lies outside its header")
            found.append(data[start:at].decode())
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        """A value of the metadata."""
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.strings(1)[0]
        if kind != ARRAY:
            raise self.damaged(f"its metadata has values of the unknown type {kind}")
        inner = self.scalar("I")
        count = self.scalar("Q")
        if inner == STRING:
            return self.strings(count)
        if inner not in SCALARS:
            raise self.damaged(f"its metadata has values of the unknown type {inner}")
        start = self.at
        self.at += count * struct.calcsize(SCALARS[inner])
        if self.at > len(self.data):
            raise self.damaged("an array lies outside its header")
        return memoryview(self.data[start : self.at]).cast(SCALARS[inner])

    def tensor(self) -> TensorInfo:
        """A row of the table of tensors. Its offset counts from the first tensor."""
        (name,) = self.strings(1)
        rank = self.scalar("I")
        if not 1 <= rank <= 4:
            raise self.damaged(f"{name} has {rank} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(rank))[::-1]
        kind = self.scalar("I")
        offset = self.scalar("Q")
        if kind not in TYPES:
            known = ", ".join(type.name for type in TYPES.values())
            what = OTHER_TYPES.get(kind, f"unknown type {kind}")
            raise ValueError(
                f"{self.file}: {name} is {what}, which is not supported: take a file of {known}"
            )
        type = TYPES[kind]
        if 0 in shape or shape[-1] % type.block:
            raise self.damaged(f"{name} has the shape {list(shape)}, of type {type.name}")
        return TensorInfo(name, type, shape, self.file, offset)

    def read(self) -> GGUF:
        version = self.scalar("I")
        count = self.scalar("Q")
        values = self.scalar("Q")
        if version not in (2, 3):
            what = f"has GGUF's version {version}, which is not supported"
            raise ValueError(f"{self.file} {what}: convert it again")
        gguf = GGUF(self.file, {}, {})
        for _ in range(values):
            (key,) = self.strings(1)
            if key in gguf.metadata:
                raise self.damaged(f"it has {key!r} twice")
            gguf.metadata[key] = self.value(self.scalar("I"))
        table = [self.tensor() for _ in range(count)]
        alignment = gguf.get("general.alignment", int) or 32
        start = -(-self.at // alignment) * alignment
        for info in table:
            if info.name in gguf.tensors:
                raise self.damaged(f"it has {info.name} twice")
            gguf.tensors[info.name] = replace(info, offset=start + info.offset, stamp=self.stamp)
            if start + info.offset + info.nbytes > self.size:
                raise self.damaged(f"{info.name} lies outside it, perhaps because it is cut off")
        if sum(info.nbytes for info in table) > self.size:
            raise self.damaged("its tensors overlap")
        return gguf


@lru_cache(maxsize=64)  # of the shards of a file; configuration, tokenizer and tensors need them
def _read_stamped(file: Path, stamp: tuple[int, ...]) -> GGUF:
    """The header of one file, which is read again once the file has another stamp."""
    with open_regular(file) as f:
        if f.read(4) != b"GGUF":
            raise ValueError(f"{file} is not a GGUF file")
        size = f.seek(0, os.SEEK_END)
        f.seek(0)
        data = f.read(FILE_BYTES)
    try:
        return Header(file, data, size, stamp).read()
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file} is damaged, or cut off in its header ({error}): download it again"
        ) from None


def _read_shard(file: Path) -> GGUF:
    return _read_stamped(file, stamp_of(file.stat()))


def read_header(file: Path) -> GGUF:
    """A file's header. If it is one shard of a split file (A-00001-of-00003.gguf), that of all shards
    together. Raises OSError, ValueError."""
    found = _read_shard(file)
    count = found.get("split.count", int, 1)
    if count <= 1:
        return found
    name = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", file.name)
    if not name:
        raise ValueError(
            f"{file} is one of {count} shards: its name must end in -00001-of-{count:05}.gguf"
        )
    shards = [_read_shard(file.with_name(f"{name[1]}{i + 1:05}{name[2]}")) for i in range(count)]
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for key, info in shard.tensors.items():
            if tensors.setdefault(key, info) is not info:
                raise ValueError(f"{shard.file} has {key} a second time: download it again")
    return GGUF(shards[0].file, shards[0].metadata, tensors)


# ---- the model

ROPE_FACTORS = "rope_freqs.weight"
MOST_FACTORS = 512  # half of the largest head_dim
# As in llama.cpp, these are control tokens whatever the file says their type is, and they end an
# answer whatever it says about eos_token_id
ENDS = (
    "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|im_end|>", "<|end|>",
    "<end_of_turn>", "<end_of_utterance>", "</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]",
    "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|return|>", "<|call|>", "<|calls|>",
    "<|flush|>", "<turn|>", "<|tool_response>",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",  # of models that fill in the middle
    "<|fim_repo|>", "<fim-repo>", "<|repo_name|>", "<REPO>", "<reponame>", "<|file_sep|>",
)  # fmt: skip
NAMED_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def family_name(gguf: GGUF) -> str:
    """The model's family, a name in FAMILIES. Raises ValueError."""
    names = dict.fromkeys(family.gguf for family in FAMILIES.values())
    arch = gguf.choice("general.architecture", names)
    of_arch = {name: family for name, family in FAMILIES.items() if family.gguf == arch}
    dense = [name for name, family in of_arch.items() if not family.experts]
    with_experts = [name for name, family in of_arch.items() if family.experts]
    if dense and not gguf.metadata.get(f"{arch}.expert_count"):
        return dense[0]
    if not with_experts:
        raise ValueError(f"{gguf.file}: experts of {arch!r} are not supported")
    return with_experts[0]


def config_json(gguf: GGUF) -> dict[str, Any]:
    """The model's configuration as the fields of a config.json, whose reader checks the values.
    Raises ValueError for what a config.json cannot say."""
    family = family_name(gguf)
    arch = FAMILIES[family].gguf

    def said(name: str) -> Any:
        value = gguf.metadata.get(f"{arch}.{name}")
        return "an array" if isinstance(value, list | memoryview) else value

    if family == "llama" and said("attention.sliding_window"):
        family = "mistral"  # which llama.cpp counts among the llamas
    if "token_embd.weight" not in gguf.tensors:
        raise ValueError(f"{gguf.file} lacks the tensor token_embd.weight: it holds no model")
    rows = gguf.tensors["token_embd.weight"].shape[0]
    count = len(gguf.need("tokenizer.ggml.tokens", list))
    if count > rows:  # before anything is made of each
        raise ValueError(
            f"{gguf.file} has {count} tokens, but the model has a vocabulary of {rows}"
        )
    names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    head_dims = [said(name) for name in names if said(name) is not None]
    if any(size != head_dims[0] for size in head_dims):
        raise ValueError(
            f"{gguf.file}: {', '.join(names)} differ: {head_dims}, which is not supported"
        )
    return {
        "model_type": family,
        "hidden_act": "silu",
        "is_causal": said("attention.causal"),
        "hidden_size": said("embedding_length"),
        "num_hidden_layers": said("block_count"),
        "num_attention_heads": said("attention.head_count"),
        "num_key_value_heads": said("attention.head_count_kv"),
        "head_dim": next(iter(head_dims), None),
        "intermediate_size": said("feed_forward_length"),
        "moe_intermediate_size": said("expert_feed_forward_length"),
        "num_local_experts": said("expert_count"),
        "num_experts_per_tok": said("expert_used_count"),
        "norm_topk_prob": True,  # llama.cpp always does it for Qwen3
        "routed_scaling_factor": said("expert_weights_scale") or None,
        "vocab_size": rows,
        "rms_norm_eps": said("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": said("context_length"),
        "rope_theta": said("rope.freq_base"),
        "rope_scaling": _rope_scaling(gguf, f"{arch}.rope"),
        "sliding_window": said("attention.sliding_window") or None,
        "use_sliding_window": bool(said("attention.sliding_window")),
        "max_window_layers": 0,
        "attention_bias": True,  # where there are such tensors: see layouts.py
        "mlp_bias": True,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": _dtype(gguf),
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _eos_ids(gguf),
    }


def _dtype(gguf: GGUF) -> str:
    """The type of the model. Norms are in fp32 whatever the type of the matrices."""
    types = {info.type.name for info in gguf.tensors.values()} - {"F32"}
    if not types:
        return "float32"
    return "float16" if types == {"F16"} else "bfloat16"


def _rope_scaling(gguf: GGUF, key: str) -> dict[str, Any] | None:
    """Hugging Face's rope_scaling, with two fields of our own: gguf_factors, what each frequency is
    divided by, which Llama 3.1 stores in a tensor; and gguf_gain, by which q and k are
    multiplied."""
    scaling: dict[str, Any] = {}
    if info := gguf.tensors.get(ROPE_FACTORS):
        if info.type.name != "F32":
            raise ValueError(f"{gguf.file}: {info.name} is {info.type.name}; it must be F32")
        if info.nbytes > 4 * MOST_FACTORS:
            raise ValueError(
                f"{gguf.file}: {info.name} has more than {MOST_FACTORS} factors of RoPE"
            )
        with open_regular(info.file) as f:
            f.seek(info.offset)
            scaling["gguf_factors"] = memoryview(f.read(info.nbytes)).cast("f").tolist()
    gain = gguf.get(f"{key}.scaling.attn_factor", int | float, 1)
    if gain != 1:
        scaling["gguf_gain"] = gain
    factor = gguf.get(f"{key}.scaling.factor", int | float)
    factor = factor or gguf.get(f"{key}.scale_linear", int | float) or 1
    kind = gguf.metadata.get(f"{key}.scaling.type", "linear")
    if kind == "none" or kind == "linear" and factor == 1:
        return scaling or None
    scaling |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = gguf.metadata.get(
            f"{key}.scaling.original_context_length"
        )
        for name in ("beta_fast", "beta_slow"):
            scaling[name] = gguf.metadata.get(f"{key}.scaling.yarn_{name}")
    return scaling


def _eos_ids(gguf: GGUF) -> list[int]:
    """The ids of the tokens that end an answer: those that the file names, then those in ENDS."""
    named = [gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in NAMED_ENDS]
    tokens, _ = _tokens(gguf)
    ends = [i for i, token in enumerate(tokens) if token in ENDS]
    return [i for i in named if i is not None] + ends


# ---- the tokenizer

# Types of tokens, as in SentencePiece
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# Chat templates use these as control tokens, even if a vocabulary has them as text
TURN_MARKS = ("<|im_start|>", "<|im_end|>")
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


def _tokens(gguf: GGUF) -> tuple[list[str], list[int]]:
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
    kind = gguf.choice("tokenizer.ggml.model", ("llama", "gpt2"))
    tokens, types = _tokens(gguf)
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
        pre = PRE_TOKENIZERS[gguf.choice("tokenizer.ggml.pre", PRE_TOKENIZERS)]
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
