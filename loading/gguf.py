"""GGUF, the file format of llama.cpp, as a layout on disk (see loading/checkpoint.py): the header, what it says
about the model, translated into the fields of a config.json, and its tensors. What it says about
the tokenizer is translated in loading/gguf_tokenizer.py, and how its matrices are quantised stands
in loading/ggml.py.

A file is a header (metadata and a table of tensors, in little-endian order), followed by the bytes
of the tensors, aligned. Nothing in it is trusted: counts, sizes and offsets are compared with the
file's size before memory is allocated. Sources: ggml's docs/gguf.md; llama.cpp's llama-model.cpp for
the meaning of keys and for their defaults."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any

import torch
from torch import Tensor

from formats import Quantised
from loading.families import FAMILIES, INSTEAD
from loading.files import FILE_BYTES, Fields, open_regular, stamp_of
from loading.ggml import OTHER_TYPES, TYPES, Type
from loading.gguf_tokenizer import ENDS, tokenizer_files, tokens_of
from loading.hugging_face import config_of
from loading.layouts import EMBEDS, Files, Layout, joined_part
from loading.names import Part
from loading.quantised import Wanted, checked
from loading.reading import TYPES as FLOAT_TYPES
from loading.reading import FileTensor
from loading.tensors import Found, Spans, Stored, files_for, floats
from loading.tokenizer_files import with_template
from model import Config
from tokenizer import TokenizerFiles

# ---- the header

SCALARS = {  # types of numbers, as struct names them
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
STRING = 8
ARRAY = 9
# The most strings in an array, four times as many as the largest vocabularies have. Without a
# limit, a sparse file could fill the memory
STRINGS = 1 << 21


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorInfo(FileTensor):
    """A row of the table of tensors. A tensor in blocks has no dtype."""

    type: Type

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

    def choice(self, key: str, supported: Iterable[str], instead: str) -> str:
        """A string of the metadata. Raises ValueError if it is none of these, with what to do
        instead."""
        value = self.need(key, str)
        if value not in supported:
            listed = ", ".join(supported)
            raise ValueError(
                f"{self.file}: {key} is {value!r}, which is not supported (supported: {listed}):"
                f" {instead}"
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
            found.append(data[start:at].decode(errors="replace"))  # as browsers do
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
        dtype = FLOAT_TYPES.get(type.name)
        return TensorInfo(self.file, name, dtype, shape, offset, self.stamp, type=type)

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
            gguf.tensors[info.name] = replace(info, offset=start + info.offset)
            if start + info.offset + info.nbytes > self.size:
                raise self.damaged(f"{info.name} lies outside it, perhaps because it is cut off")
        if sum(info.nbytes for info in table) > self.size:
            raise self.damaged("its tensors overlap")
        return gguf


def _read_shard(file: Path) -> GGUF:
    """The header of one file."""
    with open_regular(file) as f:
        if f.read(4) != b"GGUF":
            raise ValueError(f"{file} is not a GGUF file")
        stamp = stamp_of(os.fstat(f.fileno()))
        size = f.seek(0, os.SEEK_END)
        f.seek(0)
        data = f.read(FILE_BYTES)
    try:
        return Header(file, data, size, stamp).read()
    except struct.error as error:
        raise ValueError(
            f"{file} is damaged, or cut off in its header ({error}): download it again"
        ) from None


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
# What a generation_config.json calls what is called so after general.sampling
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty", "penalty_last_n": "repeat_last_n",
}  # fmt: skip
NAMED_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def family_name(gguf: GGUF) -> str:
    """The model's family, a name in FAMILIES. Raises ValueError."""
    names = dict.fromkeys(family.gguf for family in FAMILIES.values())
    arch = gguf.choice("general.architecture", names, INSTEAD)
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
    if said("pooling_type"):
        raise ValueError(f"{gguf.file} {EMBEDS}")
    if "blk.0.ffn_gate.0.weight" in gguf.tensors:
        what = "has a tensor for each expert, as files had until April 2024"
        raise ValueError(f"{gguf.file} {what}: take a newer one, or convert the model again")
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
    dim, heads = said("embedding_length"), said("attention.head_count")
    if said("attention.key_length") is None and type(dim) is type(heads) is int and heads:
        head_dims.append(dim // heads)
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
        "rope_scaling": _rope_scaling(gguf, arch),
        "sliding_window": said("attention.sliding_window") or None,
        "use_sliding_window": bool(said("attention.sliding_window")),
        "max_window_layers": 0,
        "attention_bias": True,  # where there are such tensors: see layouts.py
        "mlp_bias": True,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": _dtype(gguf),
        "attention_multiplier": said("attention.scale"),
        "embedding_multiplier": said("embedding_scale"),
        "residual_multiplier": said("residual_scale"),
        "logits_scaling": said("logit_scale"),
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _eos_ids(gguf),
    }


def generation_json(gguf: GGUF) -> dict[str, Any]:
    """What the file says about sampling, as the fields of a generation_config.json, and of one of
    our own: repeat_last_n, for which transformers has no name."""
    found = {}
    for name, field in SAMPLING.items():
        value = gguf.get(f"general.sampling.{name}", int | float)
        if value is not None:
            found[field] = value
    if "repetition_penalty" in found:
        found.setdefault("repeat_last_n", 64)  # llama.cpp's default
    return found


def _dtype(gguf: GGUF) -> str:
    """The type of the model. Norms are in fp32 whatever the type of the matrices."""
    types = {info.type.name for info in gguf.tensors.values()} - {"F32"}
    if not types:
        return "float32"
    return "float16" if types == {"F16"} else "bfloat16"


def _rope_scaling(gguf: GGUF, arch: str) -> dict[str, Any] | None:
    """Hugging Face's rope_scaling, with two fields of our own: gguf_factors, what each frequency is
    divided by, which Llama 3.1 stores in a tensor; and gguf_gain, by which q and k are
    multiplied."""
    key = f"{arch}.rope"
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
        scaling["mscale"] = 1.0  # which counts if there is the other
        scaling["mscale_all_dim"] = gguf.metadata.get(f"{key}.scaling.yarn_log_multiplier")
        scaling["llama_4_scaling_beta"] = gguf.metadata.get(f"{arch}.attention.temperature_scale")
    return scaling


def _eos_ids(gguf: GGUF) -> list[int]:
    """The ids of the tokens that end an answer: those that the file names, then those in ENDS."""
    named = [gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in NAMED_ENDS]
    tokens, _ = tokens_of(gguf)
    ends = [i for i, token in enumerate(tokens) if token in ENDS]
    return [i for i in named if i is not None] + ends


# ---- the layout

# What it calls what names.Part calls so
NAMES = {
    "attention_norm": "attn_norm",
    "attention.wq": "attn_q",
    "attention.wk": "attn_k",
    "attention.wv": "attn_v",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.wo": "attn_output",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.experts.w1": "ffn_gate_exps",
    "feed_forward.experts.w3": "ffn_up_exps",
    "feed_forward.experts.w2": "ffn_down_exps",
    "tok_embeddings": "token_embd",
    "norm": "output_norm",
    "output": "output",
}
JOINED = {  # tensors that have several parts in some families, one below the other
    "attn_qkv": ("attention.wq", "attention.wk", "attention.wv"),
    "ffn_up": ("feed_forward.w1", "feed_forward.w3"),
}


def files_of(gguf: GGUF, chat_template: str | None = None) -> TokenizerFiles:
    """What a file says about its tokenizer, see Layout.tokenizer_files."""
    vocabulary, config = tokenizer_files(gguf)
    files = dict(file=gguf.file, vocabulary=vocabulary)
    return with_template(gguf.file, chat_template, config, **files)


class GgufFile(Layout):
    """A file of llama.cpp's, or the first shard of a split one."""

    def __init__(self, files: Files):
        super().__init__(files)
        self.header = read_header(self.path)
        self.config_json = Fields(self.path, config_json(self.header))
        self.generation = Fields(self.path, generation_json(self.header))
        self.family = FAMILIES[family_name(self.header)]

    @staticmethod
    def is_at(files: Files) -> bool:
        return files.path.is_file()

    def config(self) -> Config:
        return config_of(self.config_json, self.generation, self.notes)

    def tokenizer_files(self, chat_template: str | None = None) -> TokenizerFiles:
        return files_of(self.header, chat_template)

    def small_files(self) -> dict[str, bytes]:
        as_json = lambda value: json.dumps(value).encode()
        vocabulary, beside = tokenizer_files(self.header)
        files = {
            "config.json": as_json(config_json(self.header)),
            "generation_config.json": as_json(self.generation),
            "tokenizer_config.json": as_json(beside),
        }
        if isinstance(vocabulary, bytes):
            return files | {"tokenizer.model": vocabulary}
        return files | {"tokenizer.json": as_json(vocabulary)}

    def file_tensors(self) -> list[FileTensor]:
        return [*self.header.tensors.values()]

    def name_of(self, part: Part) -> str:
        stem = self.family.gguf_renames.get(part.stem, NAMES[part.stem])
        return part.name_in("blk", stem)

    def stored_part(self, part: Part, c: Config, found: Found) -> list[Stored]:
        name = self.name_of(part)
        head_dim = c.head_dim if part.rotated and not self.family.in_pairs else None
        record = None
        if self.family.joined:
            joined = {part.name_in("blk", stem): stems for stem, stems in JOINED.items()}
            find = lambda name, shape: self.matrix(name, shape, found)
            record = joined_part(find, joined, part, c, head_dim)
        record = record or self.matrix(name, part.shape(c), found, head_dim)
        return [record or floats(name, part.shape(c), found, head_dim)]

    def matrix(
        self, name: str, shape: tuple[int, ...], found: Found, head_dim: int | None = None
    ) -> Stored | None:
        """What the file has under a name. Returns None if there is nothing."""
        if name not in found:
            return None
        info = self.header.tensors[name]
        # A tensor of one dimension never is in blocks
        if info.type.split and len(info.shape) > 1:
            return blocks(info.type, name, shape, found, head_dim)
        return floats(name, shape, found, head_dim)


def blocks(
    type: Type, name: str, shape: tuple[int, ...], found: Found, head_dim: int | None
) -> Stored:
    """A matrix or a stack in one of ggml's types, each row of which is a row of blocks."""
    files = files_for({name: Wanted((None,), [shape])}, found)
    in_bytes = lambda k: k // type.block * type.nbytes
    *outer, K = shape

    def cut(spans: Spans) -> list[FileTensor]:
        (tensor,) = files.found[name]
        in_file = replace(tensor, dtype=torch.uint8, shape=(*outer, in_bytes(K)))
        *some, columns = spans
        return [in_file.cut([*some, range(in_bytes(columns.start), in_bytes(columns.stop))])]

    def make(tensors: list[Tensor], spans: Spans) -> Quantised:
        (raw,) = tensors
        try:
            return checked(type.read(raw.reshape(-1, raw.shape[-1])))
        except ValueError as error:
            raise ValueError(f"{files.found[name][0].file}: {name} has {error}") from None

    return Stored(
        name=name,
        shape=shape,
        files=files.found,
        cut=cut,
        make=make,
        scheme=type.scheme,
        head_dim=head_dim,
        problems=files.problems,
    )
