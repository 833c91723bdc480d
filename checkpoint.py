"""Checkpoints on disk: the configuration, the tensors of each layout, and the loader that makes a
model of them.

A source is one layout on disk: a folder of Hugging Face's or of Meta's, a GGUF file, a folder that
`--save` wrote. It says where the configuration and the tokenizer are, and gives the tensors under
names of our own, whatever quantised them. A Checkpoint is an opened source. The loader reads its
tensors without knowing the layout."""

import itertools
import json
import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import kernels
import launch
from extra import gguf, hub, layouts
from extra.files import one_line_errors, read_bytes, read_json
from extra.parallel import ALL, Ranks, share
from extra.tensors import (
    TYPES,
    FileTensor,
    Floats,
    Found,
    GgufMatrix,
    LayoutMatrix,
    SavedMatrix,
    ShardedFloats,
    SourceTensor,
    Wanted,
    columns_in,
    safetensors_header,
    tensors_of,
)
from formats import Format, Matrix, Tensors
from kernels import FORMATS
from model import CACHES, Config, LayerWeights, Llama, Weights
from sampling import Sampling
from tokenizer import tokenizer_file

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


# ---- configuration


class Fields(dict):
    """A JSON object of a checkpoint with checked access: every error names the file, the field and
    its value."""

    def __init__(self, file: Path, fields: dict | None = None):
        if fields is None:
            fields = read_json(file)
        super().__init__(fields)
        self.file = file

    def number(
        self, name: str, low: float, high: float, default: float | None = None, kind: type = int
    ):
        """A number from low to high. Raises ValueError for anything else, and where there is
        neither a value nor a default."""
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self.file} lacks the field {name}")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = is_number and low <= value <= high
        if kind is int:
            fits = fits and value == int(value)
        if not fits:
            whole = "whole " if kind is int else ""
            raise ValueError(
                f"{self.file}: {name} is {value!r}; it must be a {whole}number from {low:g} to {high:g}"
            )
        return kind(value)

    def sub(self, name: str) -> "Fields":
        """The object in a field, which is empty if there is none. Raises ValueError."""
        value = self.get(name) or {}
        if not isinstance(value, dict):
            raise ValueError(f"{self.file}: {name} is {value!r}; it must be an object")
        return Fields(self.file, value)

    def refuse_unless(self, name: str, *allowed) -> None:
        """For a field whose other values would change the result in a way not implemented here."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            names = ("absent" if value is None else json.dumps(value) for value in allowed)
            raise ValueError(
                f"{self.file}: {name} is {value!r}, which is not supported"
                f" (supported: {', '.join(names)})"
            )

    def ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """The ids of tokens in a field: one, a list of them, or none. Raises ValueError."""
        value = self.get(name)
        if value is None:
            return ()
        ids = tuple(value) if isinstance(value, list) else (value,)
        for i in ids:
            if type(i) is not int or not 0 <= i < vocab_size:
                what = f"it must hold ids below vocab_size {vocab_size}"
                raise ValueError(f"{self.file}: {name} is {value!r}; {what}")
        return ids


def generation_of(folder: Path) -> Fields:
    """The fields of a folder's generation_config.json; none if there is no such file."""
    file = folder / "generation_config.json"
    if file.is_file():
        return Fields(file)
    return Fields(file, {})


SAMPLING = {  # our name: its name in generation_config.json, low, high, type
    "temp": ("temperature", 0, 1e6, float),
    "top_k": ("top_k", -1, 1 << 31, int),
    "top_p": ("top_p", 0, 1, float),
    "min_p": ("min_p", 0, 1, float),
    "repeat_penalty": ("repetition_penalty", 0.01, 100, float),
}


@one_line_errors()
def read_sampling(folder: Path, overridden: Collection[str] = ()) -> dict[str, float]:
    """What a checkpoint's generation_config.json says about sampling, by the names of Sampling,
    without those that are overridden. Raises ValueError."""
    f = generation_of(folder)
    said = {}
    if "temp" not in overridden:
        f.refuse_unless("do_sample", None, True, False)
        if f.get("do_sample") is False:
            f["temperature"] = 0
    for ours, (name, low, high, kind) in SAMPLING.items():
        if f.get(name) is not None and ours not in overridden:
            said[ours] = f.number(name, low, high, kind=kind)
    if said.get("top_k") == -1:  # as vLLM and llama.cpp say that it is off
        said["top_k"] = 0
    return said


def hugging_face_config(f: Fields, generation: Fields) -> Config:
    """The configuration in a config.json. Raises ValueError for what is not implemented."""
    f.refuse_unless("model_type", *gguf.ARCHITECTURES)
    family = f.get("model_type")
    f.refuse_unless("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        f.refuse_unless(name, False, True, None)
    layout_of(f)
    f["torch_dtype"] = f.get("dtype") or f.get("torch_dtype")
    f.refuse_unless("torch_dtype", None, "float32", "float16", "bfloat16")
    f.refuse_unless("partial_rotary_factor", None, 1, 1.0)
    f.refuse_unless("tie_word_embeddings", False, True, None)
    n_heads = f.number("num_attention_heads", 1, 1024)
    dim = f.number("hidden_size", 1, 1 << 17)
    max_seq_len = f.number("max_position_embeddings", 1, 1 << 24, 2048)
    if family == "mistral":
        f.setdefault("sliding_window", 4096)  # transformers' defaults, here and below
    elif not _slides(f):
        f["sliding_window"] = None
    window = None
    if f.get("sliding_window") is not None:
        window = f.number("sliding_window", 1, 1 << 24)
    if family == "qwen3":
        f.setdefault("head_dim", 128)
    head_dim = f.number("head_dim", 2, 1024, dim // n_heads)
    rope = rope_of(f, head_dim, max_seq_len)
    vocab_size = f.number("vocab_size", 1, 1 << 22)
    bos_ids = generation.ids("bos_token_id", vocab_size) + f.ids("bos_token_id", vocab_size)
    eos_ids = generation.ids("eos_token_id", vocab_size) + f.ids("eos_token_id", vocab_size)
    dtype = f["torch_dtype"]
    return Config(
        dim=dim,
        n_layers=f.number("num_hidden_layers", 1, 1024),
        n_heads=n_heads,
        n_kv_heads=f.number("num_key_value_heads", 1, 1024, n_heads),
        head_dim=head_dim,
        hidden_dim=f.number("intermediate_size", 1, 1 << 20),
        vocab_size=vocab_size,
        norm_eps=f.number("rms_norm_eps", 0, 1, 1e-6, float),
        rope_theta=rope.theta,
        rope_factors=rope.factors,
        rope_gain=rope.gain,
        max_seq_len=max_seq_len,
        sliding_window=window,
        tie_embeddings=bool(f.get("tie_word_embeddings", False)),
        # other biases are refused unless they are 0, see Source.check
        qkv_bias=family == "qwen2" or family != "mistral" and bool(f.get("attention_bias")),
        qk_norm=family == "qwen3",
        dtype=getattr(torch, dtype) if dtype else None,
        bos_id=next(iter(bos_ids), None),
        eos_ids=tuple(dict.fromkeys(eos_ids)),
    )


def _slides(f: Fields) -> bool:
    """Whether any layer of a family other than Mistral has a window."""
    if not f.get("use_sliding_window"):
        return False
    types = f.get("layer_types")
    if isinstance(types, list):
        return any(kind != "full_attention" for kind in types)
    return f.number("max_window_layers", 0, 1 << 24, 28) < f.number("num_hidden_layers", 1, 1024)


def meta_config(f: Fields) -> Config:
    """The configuration in a params.json. A vocab_size below 1 means that only the tokenizer knows
    it. Raises ValueError for what is not implemented."""
    f.refuse_unless("use_scaled_rope", False, None)
    dim = f.number("dim", 1, 1 << 17)
    n_heads = f.number("n_heads", 1, 1024)
    multiple_of = f.number("multiple_of", 1, 1 << 17, 256)
    # Meta's llama/model.py: two thirds of 4 dim, times a multiplier, rounded up to a multiple
    hidden = int(f.number("ffn_dim_multiplier", 1e-3, 1e3, 1.0, float) * int(2 * 4 * dim / 3))
    return Config(
        dim=dim,
        n_layers=f.number("n_layers", 1, 1024),
        n_heads=n_heads,
        n_kv_heads=f.number("n_kv_heads", 1, 1024, n_heads),
        head_dim=f.number("head_dim", 2, 1024, dim // n_heads),
        hidden_dim=multiple_of * -(-hidden // multiple_of),
        vocab_size=f.number("vocab_size", -1, 1 << 22, -1),
        norm_eps=f.number("norm_eps", 0, 1, 1e-5, float),
        rope_theta=f.number("rope_theta", 2, 1e12, 10000.0, float),
    )


class Rope(NamedTuple):
    """rope_theta, rope_factors and rope_gain of Config."""

    theta: float
    factors: tuple[float, ...] = ()
    gain: float = 1.0


def rope_of(f: Fields, D: int, max_seq_len: int) -> Rope:
    """RoPE's settings in rope_parameters, or in the older rope_scaling and rope_theta. The kinds
    are linear (Chen et al., 2023), llama3 (Meta, 2024), yarn, and longrope (Ding et al., 2024).
    Raises ValueError."""
    newer = _renamed(f.sub("rope_parameters"))
    older = _renamed(f.sub("rope_scaling"))
    beside = {"rope_theta": f.get("rope_theta")}
    last = {"original_max_position_embeddings": f.get("original_max_position_embeddings")}
    # each with what only the other says; what stands beside them is the default, but for the last
    merged = []
    for fields in (older | newer, newer | older):
        fields = _said(beside) | fields | _said(last)
        merged.append(_scaled(Fields(f.file, fields), D, max_seq_len))
    if merged[0] != merged[1]:
        raise ValueError(
            f"{f.file}: rope_parameters and rope_scaling say different things: {newer} and {older}"
        )
    return merged[0]


def _said(fields: dict) -> dict:
    return {name: value for name, value in fields.items() if value is not None}


def _renamed(fields: dict) -> dict:
    """Fields of RoPE that say something, by their newer names."""
    fields = _said(fields)
    if "type" in fields:
        fields.setdefault("rope_type", fields.pop("type"))
    return fields


def _scaled(rope: Fields, D: int, max_seq_len: int) -> Rope:
    """What one set of fields says, and what GGUF says in addition for any type: factors that
    divide the frequencies, and a scale of q and k."""
    theta, factors, gain = _of_type(rope, D, max_seq_len)
    if "gguf_factors" in rope:
        more = _listed_factors(rope, "gguf_factors", D)
        factors = tuple(map(operator.mul, more, factors or itertools.repeat(1.0)))
    return Rope(theta, factors, gain * rope.number("gguf_gain", 1e-3, 1e3, 1, float))


def _of_type(rope: Fields, D: int, max_seq_len: int) -> Rope:
    theta = rope.number("rope_theta", 2, 1e12, 10000.0, float)
    kind = rope.setdefault("rope_type", "default")
    rope.refuse_unless("rope_type", "default", "linear", "llama3", "yarn", "longrope")
    rope.refuse_unless("partial_rotary_factor", None, 1, 1.0)
    if kind == "default":
        return Rope(theta)
    if kind == "longrope":
        return Rope(theta, _longrope(rope, D))
    if kind == "yarn":
        return _yarn(rope, D, theta, max_seq_len)
    factor = rope.number("factor", 1, 1e6, None, float)
    part = torch.ones(D // 2, dtype=torch.float64)
    if kind == "llama3":  # low frequencies are divided, high ones kept, with a ramp between
        low = rope.number("low_freq_factor", 1e-6, 1e6, None, float)
        high = rope.number("high_freq_factor", 1e-6, 1e6, None, float)
        original = rope.number("original_max_position_embeddings", 1, 1 << 24)
        frequencies = theta ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
        turns = original / (2 * math.pi) * frequencies
        part = 1 - ((turns - low) / (high - low)).clamp(0, 1)
    return Rope(theta, _factors(part, factor))


def _factors(part: Tensor, factor: float) -> tuple[float, ...]:
    """The divisor of each frequency if `part` of it [D/2] is divided by `factor`, and the rest
    stays."""
    return tuple((1 / (1 - part + part / factor)).tolist())


def _yarn(rope: Fields, D: int, theta: float, max_seq_len: int) -> Rope:
    """YaRN (Peng et al., 2023). The factor of q and k (attention_factor) is 1 + 0.1 log(factor) by
    default, as in section 3.4."""
    rope.refuse_unless("truncate", None, True)
    rope.refuse_unless("mscale_all_dim", None, 0)  # without it, mscale has no effect
    original = rope.number("original_max_position_embeddings", 1, 1 << 24, max_seq_len)
    factor = rope.number("factor", 1, 1e6, max(1, max_seq_len / original), float)
    fast = rope.number("beta_fast", 1e-3, 1e6, 32, float)
    slow = rope.number("beta_slow", 1e-3, 1e6, 1, float)
    pair = lambda turns: math.log(original / (2 * math.pi * turns), theta) * D / 2
    low = max(math.floor(pair(fast)), 0)
    high = min(math.ceil(pair(slow)), D - 1)
    ramp = torch.arange(D // 2, dtype=torch.float64) - low
    part = (ramp / (high - low or 0.001)).clamp(0, 1)
    gain = rope.number("attention_factor", 1e-3, 1e3, 1 + 0.1 * math.log(factor), float)
    return Rope(theta, _factors(part, factor), gain)


def _longrope(rope: Fields, D: int) -> tuple[float, ...]:
    """The factors that divide the frequencies. Only the same ones for short and long texts are
    supported. Raises ValueError."""
    if rope.get("short_factor") != rope.get("long_factor") or rope.get("attention_factor") != 1:
        what = (
            "which is supported with equal short_factor and long_factor and attention_factor 1 only"
        )
        raise ValueError(f"{rope.file}: rope_type is 'longrope', {what}")
    return _listed_factors(rope, "short_factor", D)


def _listed_factors(rope: Fields, name: str, D: int) -> tuple[float, ...]:
    factors = rope.get(name)
    is_factor = lambda x: type(x) is float and 0 < x < math.inf
    if not isinstance(factors, list) or not all(map(is_factor, factors)):
        raise ValueError(
            f"{rope.file}: the factors of RoPE are {factors!r}; they must be finite and above 0"
        )
    if len(factors) != D // 2:
        raise ValueError(
            f"{rope.file}: {len(factors)} factors of RoPE; a head_dim of {D} needs half as many"
        )
    return tuple(factors)


INSTEAD = "take the original model, with --fp8 or --int4 if you like, or a GGUF file"


def layout_of(f: Fields) -> layouts.Layout | None:
    """How others have quantised the matrices of a folder, according to its config.json. Returns
    None if they are floats. Raises ValueError for a layout that is not supported."""
    if f.get("quantization"):
        raise ValueError(f"{f.file}: quantised for mlx: {INSTEAD}")
    q = f.sub("quantization_config")
    alone = f.file.with_name("hf_quant_config.json")
    if not q and f.file.suffix == ".json" and alone.is_file():  # as nvidia wrote it at first
        q = Fields(alone).sub("quantization")
        q["quant_method"] = "modelopt"
    if not q:
        return None
    method = q.get("quant_method")
    if method == "compressed-tensors":
        method = q.get("format")
        groups = q.sub("config_groups")
        weights = [groups.sub(name).sub("weights") for name in groups]
        if any(of_group != weights[0] for of_group in weights):
            raise ValueError(f"{f.file}: quantised with several kinds of config_groups: {INSTEAD}")
        q.update(weights[0] if weights else {})
    # what "-:" names is not quantised
    if any(not pattern.startswith("-:") for pattern in q.sub("dynamic")):
        raise ValueError(f"{f.file}: quantised as {method} with dynamic settings: {INSTEAD}")

    def only(**fields) -> None:
        for name, allowed in fields.items():
            if q.get(name) not in allowed:
                raise ValueError(
                    f"{f.file}: quantised as {method} with {name} {q.get(name)!r}: {INSTEAD}"
                )

    group = q.number("group_size", -1, 1 << 20, -1)
    if group == 0 or group > 0 and group % 32:
        raise ValueError(
            f"{f.file}: group_size is {group}; it must be -1 or a multiple of 32: {INSTEAD}"
        )
    if method == "awq":
        only(bits=(4,), version=(None, "gemm", "GEMM"), zero_point=(None, True))
        return layouts.awq(group)
    if method == "gptq":
        only(bits=(4, 8), checkpoint_format=(None, "", "gptq", "gptq_v2"))
        return layouts.gptq(group, q.get("checkpoint_format") == "gptq_v2", q["bits"])
    if method == "modelopt":
        only(quant_algo=("FP8", "FP8_PER_CHANNEL_PER_TOKEN"))
        return layouts.fp8_scaled("weight_scale", in_blocks=False)
    if method == "fbgemm_fp8":
        return layouts.fp8_scaled("weight_scale", in_blocks=False)
    if method == "fp8":
        only(fmt=(None, "e4m3"), weight_block_size=(None, [128, 128]))
        if q.get("weight_block_size"):
            return layouts.fp8_scaled("weight_scale_inv", in_blocks=True)
        return layouts.fp8_scaled("weight_scale", in_blocks=False)
    if method == "pack-quantized":
        only(num_bits=(4,), type=("int",), strategy=("group", "channel"))
        return layouts.w4a16(group, q.get("symmetric") is not False)
    if method == "float-quantized":
        only(num_bits=(8,), type=("float",), strategy=("tensor", "channel", "block"))
        only(block_structure=(None, [128, 128]))
        return layouts.fp8_scaled("weight_scale", q.get("strategy") == "block")
    raise ValueError(f"{f.file}: quantised as {method}, which is not supported: {INSTEAD}")


# ---- the tensors of a model, and what each layout calls them


@dataclass(frozen=True)
class Part:
    """A tensor as checkpoints store it: a row of the table below. One or several parts make up a
    tensor of the model."""

    field: str  # of LayerWeights or Weights; parts of one field are joined in the table's order
    dims: tuple[str, ...]  # its shape, by names in Config; each rank has a share of those in CUT
    meta: str  # its name in Meta's layout
    hugging_face: str  # its name in Hugging Face's
    gguf: str  # its name in GGUF's
    rotated: bool = False  # RoPE rotates its rows, which layouts store in different orders
    layer: int | None = None  # the layer that it belongs to, if any

    @property
    def name(self) -> str:
        """Our own name for it, which is Meta's."""
        return self.name_in("meta")

    @property
    def is_matrix(self) -> bool:
        """Whether it is applied as y = x W^T, so that a format may be chosen for it."""
        return len(self.dims) == 2 and self.field != "embedding"

    def shape(self, c: Config) -> tuple[int, ...]:
        return tuple(getattr(c, dim) for dim in self.dims)

    def name_in(self, layout: str) -> str:
        """Its name in a layout: "meta", "hugging_face" or "gguf"."""
        name = getattr(self, layout)
        if self.layer is not None:
            name = f"{LAYERS[layout]}.{self.layer}.{name}"
        return name


LAYERS = {"meta": "layers", "hugging_face": "model.layers", "gguf": "blk"}
LAYER = (
    Part("attention_norm", ("dim",), "attention_norm.weight", "input_layernorm.weight", "attn_norm.weight"),
    Part("wqkv", ("q_dim", "dim"), "attention.wq.weight", "self_attn.q_proj.weight", "attn_q.weight", True),
    Part("wqkv", ("kv_dim", "dim"), "attention.wk.weight", "self_attn.k_proj.weight", "attn_k.weight", True),
    Part("wqkv", ("kv_dim", "dim"), "attention.wv.weight", "self_attn.v_proj.weight", "attn_v.weight"),
    Part("qkv_bias", ("q_dim",), "attention.wq.bias", "self_attn.q_proj.bias", "attn_q.bias", True),
    Part("qkv_bias", ("kv_dim",), "attention.wk.bias", "self_attn.k_proj.bias", "attn_k.bias", True),
    Part("qkv_bias", ("kv_dim",), "attention.wv.bias", "self_attn.v_proj.bias", "attn_v.bias"),
    Part("qk_norm", ("head_dim",), "attention.q_norm.weight", "self_attn.q_norm.weight", "attn_q_norm.weight", True),
    Part("qk_norm", ("head_dim",), "attention.k_norm.weight", "self_attn.k_norm.weight", "attn_k_norm.weight", True),
    Part("wo", ("dim", "q_dim"), "attention.wo.weight", "self_attn.o_proj.weight", "attn_output.weight"),
    Part("ffn_norm", ("dim",), "ffn_norm.weight", "post_attention_layernorm.weight", "ffn_norm.weight"),
    Part("w13", ("hidden_dim", "dim"), "feed_forward.w1.weight", "mlp.gate_proj.weight", "ffn_gate.weight"),
    Part("w13", ("hidden_dim", "dim"), "feed_forward.w3.weight", "mlp.up_proj.weight", "ffn_up.weight"),
    Part("w2", ("dim", "hidden_dim"), "feed_forward.w2.weight", "mlp.down_proj.weight", "ffn_down.weight"),
)  # fmt: skip
# fmt: off
EMBEDDING = Part("embedding", ("vocab_size", "dim"), "tok_embeddings.weight", "model.embed_tokens.weight",
                 "token_embd.weight")
NORM = Part("norm", ("dim",), "norm.weight", "model.norm.weight", "output_norm.weight")
OUTPUT = Part("output", ("output_rows", "dim"), "output.weight", "lm_head.weight", "output.weight")
# fmt: on
TIED_OUTPUT = replace(EMBEDDING, field="output", dims=OUTPUT.dims)
CUT = {  # sizes of which each rank has a share, and what is shared out
    "q_dim": "n_heads",
    "kv_dim": "n_kv_heads",
    "hidden_dim": "hidden_dim",
    "output_rows": "vocab_size",
}
NOT_NEEDED = re.compile(  # the end of a name
    r"(rotary_emb\.\w+|rope\.freqs|rope_freqs\.weight|\.weight_shape"  # repeated in the config
    r"|self_attn\.(masked_)?bias|(^|\.)(position_ids|attention_mask|causal_mask)"  # masks
    r"|\.(input|output|q|k|v|kv|activation)_scale(_ub)?)$"  # of activations, not rounded here
)
BIAS = re.compile(r"(_proj|attn_output|ffn_\w+)\.bias$")  # which may be there if it is 0
MOST_BIASES = 1 << 20  # numbers in one of them


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of the model: a part, or several joined. The rows of w1 and w3 are interleaved, the
    norms of q and k are two rows, the parts of others stand one below the other."""

    name: str  # as --save writes it, such as layers.3.wqkv
    parts: tuple[Part, ...]

    @property
    def field(self) -> str:
        return self.parts[0].field

    @property
    def layer(self) -> int | None:
        return self.parts[0].layer

    @property
    def is_matrix(self) -> bool:
        return self.parts[0].is_matrix

    def shape(self, c: Config) -> tuple[int, ...]:
        if self.field == "qk_norm":
            return 2, c.head_dim
        rows = sum(part.shape(c)[0] for part in self.parts)
        return rows, *self.parts[0].shape(c)[1:]

    def places(self, c: Config) -> list[slice]:
        """The rows of this tensor that each part takes up."""
        if self.field == "w13":
            return [slice(0, None, 2), slice(1, None, 2)]
        if self.field == "qk_norm":
            return [slice(0, 1), slice(1, 2)]
        ends = [*itertools.accumulate(part.shape(c)[0] for part in self.parts)]
        return [slice(start, end) for start, end in zip([0, *ends], ends)]

    def joined_rows(self, c: Config, shares: list[slice]) -> list[slice]:
        """The rows of this tensor, in the whole model c, that belong to a rank whose rows of each
        part are `shares`: one slice if they are contiguous, otherwise a slice for each part."""
        if self.field == "w13":
            return [slice(2 * shares[0].start, 2 * shares[0].stop)]
        if self.field == "qk_norm":
            return [ALL]
        starts = [place.start for place in self.places(c)]
        return [slice(at + rows.start, at + rows.stop) for at, rows in zip(starts, shares)]


def layer_tensors(c: Config, layer: int = 0) -> list[ModelTensor]:
    """The tensors of a layer. For those that only some models have, such as qkv_bias, the config
    has a flag of the same name."""
    rows = [replace(row, layer=layer) for row in LAYER if getattr(c, row.field, True)]
    fields = itertools.groupby(rows, lambda row: row.field)
    return [ModelTensor(f"layers.{layer}.{field}", tuple(parts)) for field, parts in fields]


def model_tensors(c: Config) -> list[ModelTensor]:
    """The tensors of a model, always in the same order."""
    layers = [tensor for layer in range(c.n_layers) for tensor in layer_tensors(c, layer)]
    output = TIED_OUTPUT if c.tie_embeddings else OUTPUT
    embedding = ModelTensor("tok_embeddings", (EMBEDDING,))
    return [embedding, *layers, ModelTensor("norm", (NORM,)), ModelTensor("output", (output,))]


def model_parts(c: Config) -> dict[str, Part]:
    """The parts of a model by our names. A tied embedding appears once."""
    return {part.name: part for tensor in model_tensors(c) for part in tensor.parts}


def matrix_shapes(c: Config) -> dict[str, tuple[int, int]]:
    """Shapes [N, K] of the model's matrices, for all of which a format may be chosen."""
    return {t.name: t.shape(c) for t in model_tensors(c) if t.is_matrix}


# ---- sources: the layouts on disk


class Source(ABC):
    """One layout on disk: where the configuration, the tokenizer and the tensors are."""

    names: str  # which of a Part's names its tensors have: see Part.name_in
    format: Format | None = None  # of the matrices, where --save encoded them

    def __init__(self, path: Path):
        self.path = path

    def config(self) -> Config:
        """The model's configuration. Raises OSError, ValueError."""
        c = self.unchecked_config()
        if c.n_heads % c.n_kv_heads:
            raise ValueError(
                f"{self.path}: {c.n_heads} query heads cannot share {c.n_kv_heads} key/value heads evenly"
            )
        if c.head_dim % 2:
            raise ValueError(f"{self.path}: head_dim is {c.head_dim}; RoPE needs an even one")
        return c

    @abstractmethod
    def unchecked_config(self) -> Config: ...

    @abstractmethod
    def tokenizer(self) -> Path:
        """The file that holds the vocabulary. Raises OSError."""

    @abstractmethod
    def small_files(self) -> dict[str, bytes]:
        """Everything but the tensors, as the files of a folder: contents by name. Raises OSError,
        ValueError."""

    @abstractmethod
    def file_tensors(self) -> list[FileTensor]:
        """All tensors of its files. Raises OSError, ValueError."""

    @abstractmethod
    def named(self, c: Config, found: Found) -> dict[str, SourceTensor]:
        """What `tensors` returns, not checked yet, made of what was found in the files."""

    def tensors(self, c: Config) -> tuple[Config, dict[str, SourceTensor]]:
        """The configuration, in which tie_embeddings may have become False, and the tensors by our
        names: those of a model's parts or, where it has joined them, of the model itself. Raises
        ValueError for those that are missing, unexpected, or of another shape or type than the
        config says."""
        found: Found = {}
        for tensor in self.file_tensors():
            if not NOT_NEEDED.search(tensor.name):
                found.setdefault(tensor.name, []).append(tensor)
        if c.tie_embeddings:
            c = self.untied(c, found)
        tensors = self.named(c, found)
        self.check(tensors.values(), found)
        return c, tensors

    def untied(self, c: Config, found: Found) -> Config:
        """The configuration as the tensors have it: a tied model may be saved under either name,
        and if both are there, they may differ."""
        embedding = EMBEDDING.name_in(self.names)
        outputs = found.pop(OUTPUT.name_in(self.names), [])
        if not outputs:
            return c
        if embedding not in found:
            found[embedding] = [replace(tensor, name=embedding) for tensor in outputs]
        elif not all(map(equal, outputs, found[embedding])):
            found[outputs[0].name] = outputs
            return replace(c, tie_embeddings=False)
        return c

    def check(self, tensors: Collection[SourceTensor], found: Found) -> None:
        problems = [problem for tensor in tensors for problem in tensor.problems()]
        expected = {name for tensor in tensors for name in tensor.wanted}
        for name in found:
            if name in expected:
                continue
            if not BIAS.search(name):
                problems.append(f"{name} is unexpected")
            elif not all(map(is_zero, found[name])):
                weight = name.removesuffix("bias") + "weight"
                problems.append(f"{weight} has a bias, which is supported for q, k and v only")
        if not problems:
            return
        shown = "; ".join(problems[:4])
        if len(problems) > 4:
            shown += f"; and {len(problems) - 4} more"
        raise ValueError(f"{self.path}: the tensors do not fit the config: {shown}")


def equal(one: FileTensor, other: FileTensor) -> bool:
    """Whether two tensors of floats have the same values."""
    if one.shape != other.shape or not {one.dtype, other.dtype} <= set(layouts.FLOATS):
        return False
    if (one.file, one.offset) == (other.file, other.offset):  # a torch file has shared ones once
        return True
    columns = [range(size) for size in one.shape[1:]]
    at_once = max(1, layouts.AT_ONCE // math.prod(one.shape[1:]))
    for first in range(0, one.shape[0], at_once):
        spans = [range(first, min(first + at_once, one.shape[0])), *columns]
        if not torch.equal(one.read(spans=spans).float(), other.read(spans=spans).float()):
            return False
    return True


def is_zero(bias: FileTensor) -> bool:
    """Whether a bias makes no difference."""
    if bias.dtype not in layouts.FLOATS or math.prod(bias.shape) > MOST_BIASES:
        return False
    return not bias.read().any()


class GgufFile(Source):
    """A file of llama.cpp's, or the first part of a split one."""

    names = "gguf"

    @property
    def header(self) -> gguf.GGUF:
        return gguf.read_header(self.path)

    def unchecked_config(self) -> Config:
        said = Fields(self.path, gguf.config_json(self.header))
        return hugging_face_config(said, Fields(self.path, {}))

    def tokenizer(self) -> Path:
        return self.path

    def small_files(self) -> dict[str, bytes]:
        as_json = lambda value: json.dumps(value).encode()
        vocabulary, beside = gguf.tokenizer_files(self.header)
        files = {
            "config.json": as_json(gguf.config_json(self.header)),
            "tokenizer_config.json": as_json(beside),
        }
        if isinstance(vocabulary, bytes):
            return files | {"tokenizer.model": vocabulary}
        return files | {"tokenizer.json": as_json(vocabulary)}

    def kind(self, info: gguf.TensorInfo) -> gguf.Type | None:
        """The ggml type in which a tensor is quantised. Returns None if it is not quantised, which
        those of one dimension never are."""
        if info.type.block > 1 and len(info.shape) == 2:
            return info.type
        return None

    def file_tensors(self) -> list[FileTensor]:
        tensors = []
        for info in self.header.tensors.values():
            dtype = torch.float32 if self.kind(info) else TYPES.get(info.type.name)
            where = info.offset, info.version
            tensors.append(FileTensor(info.file, info.name, dtype, info.shape, *where))
        return tensors

    def named(self, c: Config, found: Found) -> dict[str, SourceTensor]:
        return {name: self.tensor(part, c, found) for name, part in model_parts(c).items()}

    def tensor(self, part: Part, c: Config, found: Found) -> SourceTensor:
        name = part.name_in(self.names)
        head_dim = None
        # llama.cpp stores the rows of q and k in pairs, but only in this family
        if part.rotated and self.header.metadata["general.architecture"] != "llama":
            head_dim = c.head_dim
        info = self.header.tensors.get(name)
        if info and self.kind(info):
            return GgufMatrix(name, part.shape(c), found, head_dim, self.kind(info))
        return Floats(name, part.shape(c), found, head_dim)


class WeightFiles(NamedTuple):
    """The files of a folder that hold its weights, and which of them an index names for a
    tensor."""

    files: list[Path]
    named: dict[str, Path] = {}


def weight_files(folder: Path) -> WeightFiles:
    """Of several candidates, those that transformers would take. Raises OSError, ValueError."""
    picked = hub.weights_in(folder)
    if not picked:
        usual = "model.safetensors or pytorch_model.bin, or an index of their shards, or Meta's consolidated.*.pth"
        raise _nothing_in(folder, f"no weights ({usual})")
    if picked[0].suffix != ".json":
        return WeightFiles(picked)
    named = hub.weight_map(picked[0])
    files = sorted(set(named.values()))
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{picked[0]} names {file.name}, which is missing")
    return WeightFiles(files, named)


def _nothing_in(folder: Path, usual: str) -> FileNotFoundError:
    """What a folder without a model holds instead, and what to do about it."""
    if (folder / "adapter_config.json").is_file():
        base = Fields(folder / "adapter_config.json").get("base_model_name_or_path")
        usual = f"an adapter without its base: merge it into {base or 'that'} first (peft: merge_and_unload)"
    return FileNotFoundError(f"{folder} holds {usual}")


class Folder(Source):
    """What the layouts of folders have in common."""

    def small_files(self) -> dict[str, bytes]:
        files = [*(self.path / name for name in hub.SMALL_FILES), self.tokenizer()]
        return {file.name: read_bytes(file) for file in files if file.is_file()}

    def tokenizer(self) -> Path:
        return tokenizer_file(self.path)

    def file_tensors(self) -> list[FileTensor]:
        files, named = weight_files(self.path)
        tensors = [tensor for file in files for tensor in tensors_of(file)]
        return [t for t in tensors if named.get(t.name, t.file) == t.file]


class HuggingFaceFolder(Folder):
    """A folder with a config.json."""

    names = "hugging_face"

    def unchecked_config(self) -> Config:
        return hugging_face_config(Fields(self.path / "config.json"), generation_of(self.path))

    def named(self, c: Config, found: Found) -> dict[str, SourceTensor]:
        layout = layout_of(Fields(self.path / "config.json"))
        tensors = {}
        for name, part in model_parts(c).items():
            in_file = part.name_in(self.names)
            shape = part.shape(c)
            head_dim = c.head_dim if part.rotated else None
            wanted = self.layout_tensors(part, c, found, layout)
            if wanted:
                tensors[name] = LayoutMatrix(in_file, shape, found, head_dim, layout, wanted)
            else:
                tensors[name] = Floats(in_file, shape, found, head_dim)
        return tensors

    def layout_tensors(
        self, part: Part, c: Config, found: Found, layout: layouts.Layout | None
    ) -> dict[str, Wanted]:
        """What the layout stores for a part, by name. Empty if the part is not quantised."""
        if not layout or not part.is_matrix:
            return {}
        stem = part.name_in(self.names).removesuffix("weight")
        words = layout.shapes(*part.shape(c))
        codes = next(iter(words))
        if stem + codes not in found:
            return {}
        if codes == "weight" and found[f"{stem}weight"][0].dtype in layouts.FLOATS:
            return {}
        absent = {word for word in layout.optional if stem + word not in found}
        return {stem + word: Wanted(*words[word]) for word in words if word not in absent}


class MetaFolder(Folder):
    """A folder with a params.json, whose tensors may be divided among several files. The tokenizer
    may be in its parent."""

    names = "meta"

    def small_files(self) -> dict[str, bytes]:
        files = super().small_files()
        files.pop("config.json", None)  # whatever lies beside
        return files

    def unchecked_config(self) -> Config:
        config = meta_config(Fields(self.path / "params.json"))
        if config.vocab_size >= 1:
            return config
        # Every file has all rows of the embedding
        first, *_ = weight_files(self.path).files
        shapes = {tensor.name: tensor.shape for tensor in tensors_of(first)}
        rows, *_ = shapes.get(EMBEDDING.meta) or [1]
        return replace(config, vocab_size=rows)

    def named(self, c: Config, found: Found) -> dict[str, SourceTensor]:
        return {
            name: ShardedFloats(name, part.shape(c), found) for name, part in model_parts(c).items()
        }


SAVED = "model.safetensors"
SAVED_LAYOUT = "2"  # of such a file; any other is refused


class SavedFolder(Folder):
    """A folder that --save wrote: a model.safetensors whose metadata says the format of the
    matrices, with the original's other small files. It stores the tensors of the model, whose parts
    are joined."""

    names = "meta"

    def __init__(self, path: Path, format: Format):
        super().__init__(path)
        self.format = format

    def unchecked_config(self) -> Config:
        return small_source(self.path).config()

    def named(self, c: Config, found: Found) -> dict[str, SourceTensor]:
        tensors: dict[str, SourceTensor] = {}
        for t in model_tensors(c):
            shape = t.shape(c)
            if t.is_matrix:
                wanted = saved_matrix(t, c, self.format)
                tensors[t.name] = SavedMatrix(t.name, shape, found, wanted=wanted)
            else:
                tensors[t.name] = Floats(f"{t.name}.weight", shape, found)
        return tensors


def saved_matrix(t: ModelTensor, c: Config, format: Format) -> dict[str, Wanted]:
    """The tensors that --save writes for a matrix, by name. The codes bear the name of the matrix
    itself, and a tensor of a single column is written as a vector."""
    wanted = {}
    for key, (dtype, (rows, columns)) in format.at(t.name).shapes(*t.shape(c)).items():
        name = f"{t.name}.{key}" if wanted else t.name
        shape = (rows, columns) if columns > 1 else (rows,)
        wanted[name] = Wanted((dtype,), [shape])
    return wanted


def saved_format(folder: Path) -> Format | None:
    """The format of the matrices in a folder that --save wrote. Returns None for any other. Raises
    ValueError."""
    file = folder / SAVED
    if not file.is_file():
        return None
    metadata, _ = safetensors_header(file)
    if not metadata.get("fused-llama"):
        return None
    name = metadata.get("format", metadata.get("fp8"))
    if metadata["fused-llama"] != SAVED_LAYOUT or name not in FORMATS:
        what = f"was saved by another version of fused-llama, in the format {name!r}"
        raise ValueError(f"{file} {what}: save it again from the original")
    return FORMATS[name]


def small_source(path: Path) -> Source:
    """The source that a path stands for, by its small files: what --save wrote is taken for the
    layout of the original. Raises OSError, ValueError."""
    if path.is_file():
        return GgufFile(path)
    of_meta = (path / "params.json").is_file()
    weights_are_metas = any(file.suffix == ".pth" for file in hub.weights_in(path))
    if (path / "config.json").is_file() and not (of_meta and weights_are_metas):
        return HuggingFaceFolder(path)
    if of_meta:
        return MetaFolder(path)
    raise _nothing_in(path, "neither config.json nor params.json: not a checkpoint")


def source_of(path: Path) -> Source:
    """The source that a path stands for. Raises OSError, ValueError."""
    format = saved_format(path)
    if format:
        return SavedFolder(path, format)
    return small_source(path)


@one_line_errors()
def read_config(folder: Path) -> Config:
    """The configuration in config.json, in Meta's params.json or in a GGUF file. Raises OSError or
    ValueError."""
    return small_source(folder).config()


class PerMatrix(dict):
    """A model's formats by the names of its matrices, None for a matrix in 16 or 32 bits. It stands
    in for a Format, with which it shares `at`."""

    at = dict.__getitem__


class Checkpoint:
    """A checkpoint that was opened: its configuration, and its tensors, of which only the headers
    have been read."""

    def __init__(self, folder: Path):
        """folder: that of the checkpoint, or a GGUF file. Raises OSError, ValueError."""
        self.folder = folder
        self.source = source_of(folder)
        config = self.source.config()
        self.format = self.source.format  # of the matrices, where --save encoded them
        self.config, self.tensors = self.source.tensors(config)

    @property
    def dtype(self) -> torch.dtype:
        """The type of its floats."""
        if self.config.dtype and not self.format:
            return self.config.dtype
        embedding = next(iter(self.tensors.values()))  # it comes first in every source
        return embedding.dtype

    @property
    def quantised(self) -> str:
        """How others have quantised matrices, in words; empty if they are floats."""
        names = sorted({tensor.kind.name for tensor in self.tensors.values() if tensor.kind})
        return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))

    @property
    def is_encoded(self) -> bool:
        """Whether matrices are quantised, by others or by --save."""
        return bool(self.format or self.quantised)

    @property
    def elements(self) -> int:
        parts = model_parts(self.config).values()
        return sum(math.prod(part.shape(self.config)) for part in parts)

    def formats_as_stored(self, c: Config, most_bits: int) -> PerMatrix | None:
        """The formats, of at most `most_bits` bits, that store a rank's matrices exactly as others
        have quantised them. Returns None if no matrix is quantised."""
        if not self.quantised:
            return None
        formats = PerMatrix()
        for t in model_tensors(c):
            if t.is_matrix:
                kinds = {self.tensors[part.name].kind for part in t.parts}
                formats[t.name] = layouts.format_for(kinds, t.shape(c)[1], most_bits)
        return formats

    def first_bad_tensor(self, dtype: torch.dtype) -> str | None:
        """What is wrong with the first tensor of floats that holds NaN or inf, in the file or once
        converted to dtype. Returns None if there is none. Codes are checked as they are read."""
        floats = (tensor for tensor in self.tensors.values() if isinstance(tensor, Floats))
        return next(filter(None, (tensor.flaw(dtype) for tensor in floats)), None)


@one_line_errors()
def find_checkpoint(name: str | Path) -> Path:
    """The path of a checkpoint: a folder or a GGUF file. It is given as such a path or as a
    repository of the Hugging Face hub, "owner/name", or "owner/name:Q4_K_M" for one of its GGUF
    files. A repository is looked up in the hub's cache, and downloaded if it is not there. Raises
    OSError or ValueError, in one line that says what to do, and TypeError for what is neither a
    text nor a path."""
    if not isinstance(name, str | Path):
        kinds = 'a folder, a GGUF file or "owner/name" on the hub'
        raise TypeError(f"a model is given as {kinds}, not as a {type(name).__name__}")
    return hub.find_checkpoint(str(name), read_config, is_whole)


def is_whole(path: Path) -> bool:
    """Whether all that a checkpoint refers to is there."""
    try:
        if path.is_dir():
            weight_files(path)
        try:
            read_config(path)
        except ValueError:  # it is not supported: load says why
            return True
        Checkpoint(path).source.tokenizer()
    except (OSError, ValueError):
        return False
    return True


# ---- the loader: tensors of a source, moved to the device and converted


def weight_bytes(c: Config, dtype: torch.dtype, format: Format | PerMatrix | None) -> int:
    """Bytes of a model's weights. A tied output matrix that is in no format is the embedding
    itself."""
    total = 0
    for t in model_tensors(c):
        of_matrix = format.at(t.name) if format and t.is_matrix else None
        if of_matrix:
            total += of_matrix.nbytes(*t.shape(c))
        elif t.name != "output" or not c.tie_embeddings:
            total += dtype.itemsize * math.prod(t.shape(c))
    return total


def largest_read(c: Config) -> int:
    """How many elements the largest matrix has that is read to be encoded. Rows are read whole,
    even where a rank has only some of their columns."""
    sizes = []
    for t in model_tensors(c):
        if t.is_matrix:
            _, columns = t.parts[0].dims
            sizes.append(math.prod(t.shape(c)))
            if columns in CUT:
                sizes[-1] *= c.ranks
    return max(sizes)


def check_groups(c: Config, format: Format | PerMatrix | None) -> None:
    """Raise ValueError if a rank's columns of a matrix are not whole groups of the format."""
    if not format:
        return
    for name, (_, columns) in matrix_shapes(c).items():
        of_matrix = format.at(name)
        if of_matrix and columns % of_matrix.group:
            where = f" on each of {c.ranks} processes" if c.ranks > 1 else ""
            needs = f"{of_matrix.name} needs a multiple of {of_matrix.group}"
            raise ValueError(f"{name} has {columns} columns{where}; {needs}")


class Piece(NamedTuple):
    """Where some rows of a rank's tensor come from."""

    place: slice  # of the rank's tensor
    tensor: SourceTensor
    rows: slice  # of the source's tensor


@dataclass
class Loader:
    """Loads the tensors one by one, since the model must never be in memory twice. Matrices are in
    matrix_dtype or in a format, in which they are encoded here unless they are encoded in the file;
    all else is in dtype (the norms are small, and a token reads only one row of the embedding).
    With several ranks, each loads its share of every matrix."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    matrix_dtype: torch.dtype
    device: torch.device
    format: Format | PerMatrix | None
    backend: str = ""  # whose ops will read the matrices, if any will
    ranks: Ranks = Ranks()
    quiet: bool = False

    def __post_init__(self) -> None:
        self.whole = self.checkpoint.config
        self.config = self.whole.cut(self.ranks.size)
        self.shapes = matrix_shapes(self.config)
        self.encoded: dict[str, Tensors] = {}
        if self.format and not self.checkpoint.is_encoded:
            # Allocate what stays first, to avoid fragmentation
            for name, shape in self.shapes.items():
                self.encoded[name] = self.format.at(name).empty(*shape, self.device)
            self.workspace = torch.empty(
                largest_read(self.config), dtype=self.matrix_dtype, device=self.device
            )
        self.bar = tqdm(
            total=weight_bytes(self.config, self.dtype, self.format),
            unit="B",
            unit_scale=True,
            desc="loading",
            disable=self.quiet or None,  # None: if there is no terminal
            leave=False,
        )

    def load(self) -> Weights:
        with self.bar:
            embedding, *of_layers, norm, output = model_tensors(self.whole)
            table = self.vector(embedding)
            if self.config.tie_embeddings and not (self.format and self.format.at("output")):
                tied = table[self.share("output_rows")].to(self.matrix_dtype)
                stays = tied.data_ptr() == table.data_ptr()
                last = kernels.in_cpu_layout(Matrix(tied), self.backend, self.dtype, stays=stays)
            else:
                last = self.matrix(output)
            layers = itertools.groupby(of_layers, lambda t: t.layer)
            return Weights(
                table, [self.layer(tensors) for _, tensors in layers], self.vector(norm), last
            )

    def layer(self, tensors: Iterable[ModelTensor]) -> LayerWeights:
        made = {}
        for t in tensors:
            made[t.field] = self.matrix(t) if t.is_matrix else self.vector(t)
        return LayerWeights(**made)

    def share(self, dim: str) -> slice:
        """This rank's share of one of the sizes of the whole model."""
        size = getattr(self.whole, dim)
        if dim not in CUT:
            return slice(0, size)
        count = getattr(self.whole, CUT[dim])
        taken = share(count, self.ranks.rank, self.ranks.size)
        return slice(taken.start * size // count, taken.stop * size // count)

    def pieces(self, t: ModelTensor) -> list[Piece]:
        """Where the rows of a tensor come from: from its parts, unless the source has joined
        them."""
        tensors = self.checkpoint.tensors
        shares = [self.share(part.dims[0]) for part in t.parts]
        places = t.places(self.config)
        if t.name not in tensors:
            parts = [tensors[part.name] for part in t.parts]
            return list(map(Piece, places, parts, shares))
        rows = t.joined_rows(self.whole, shares)
        if len(rows) == 1:
            places = [ALL]
        return [Piece(place, tensors[t.name], taken) for place, taken in zip(places, rows)]

    def fill(self, data: Tensor, t: ModelTensor, columns: slice = ALL) -> None:
        """Read these columns of a tensor into `data`, whose rows are this rank's."""
        for place, tensor, rows in self.pieces(t):
            data[place].copy_(tensor.read(self.device, rows, columns), non_blocking=True)

    def vector(self, t: ModelTensor) -> Tensor:
        """A norm, a bias or the embedding."""
        made = torch.empty(t.shape(self.config), dtype=self.dtype, device=self.device)
        self.fill(made, t)
        self.bar.update(made.nbytes)
        return made

    def matrix(self, t: ModelTensor) -> Matrix:
        shape = self.shapes[t.name]
        columns = self.share(t.parts[0].dims[1])
        format = self.format.at(t.name) if self.format else None
        if not format:
            made = Matrix(torch.empty(shape, dtype=self.matrix_dtype, device=self.device))
            self.fill(made.data, t, columns)
        elif t.name in self.encoded:
            made = Matrix(self.encode(format, t, columns), format)
        else:
            tensors = format.empty(*shape, self.device)
            for place, tensor, rows in self.pieces(t):
                out = tuple(of_format[place] for of_format in tensors)
                tensor.write(format, out, self.device, rows, columns)
            made = Matrix(tensors, format)
        self.bar.update(made.nbytes)
        return kernels.in_cpu_layout(made, self.backend, self.dtype, self.format)

    def encode(self, format: Format, t: ModelTensor, columns: slice) -> Tensors:
        """A matrix encoded from whole rows, so that its codes do not depend on how many ranks there
        are. Where the format cannot be cut, it is encoded from this rank's columns."""
        N, part = self.shapes[t.name]
        K = t.shape(self.whole)[1]
        data = self.workspace[: N * K].view(N, K)
        self.fill(data, t)
        tensors = self.encoded[t.name]
        try:
            if part == K or not format.can_be_cut(K, part):
                return format.encode(data[:, columns], tensors)
            for tensor, whole in zip(tensors, format.encode(data)):
                tensor.copy_(whole[:, columns_in(columns, K, whole.shape[1])])
            return tensors
        except ValueError as error:
            flaw = self.checkpoint.first_bad_tensor(self.matrix_dtype)
            raise ValueError(flaw or str(error)) from None


# ---- what it runs on, and whether it fits


def pick_device(name: str = "auto", ranks: Ranks = Ranks()) -> torch.device:
    """With several processes on a host, each takes the GPU of its local rank. Raises ValueError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(name)):
        raise ValueError(f"unknown device {name!r}: cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if device.index is not None and ranks.size > 1:
        raise ValueError(
            f"device {name} was requested by {ranks.size} processes: use cuda, and each takes its own GPU"
        )
    index = device.index
    if index is None:
        index = ranks.local_rank
    count = torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"device cuda:{index} was asked for, but torch sees {count} CUDA devices")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)  # where Triton launches
    return device


def check_choice(what: str, value: object, choices: Collection) -> None:
    if value not in choices:
        raise ValueError(f"{what} is {value!r}; it must be one of {', '.join(map(str, choices))}")


def pick_dtype(
    name: str, stored: torch.dtype, device: torch.device, elements: float = math.inf
) -> torch.dtype:
    """auto is the checkpoint's own type on a GPU. On a CPU it is fp32 for a checkpoint in fp32, and
    for one of so few elements that it fits into the caches of a CPU without bf16 products;
    otherwise bf16."""
    check_choice("dtype", name, ("auto", *DTYPES))
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return stored
    if 4 * elements <= CACHES and not kernels.multiplies_bf16():
        return torch.float32
    if stored == torch.float16:
        return torch.bfloat16
    return stored


def pick_backend(name: str, device: torch.device) -> str:
    """Whose ops run the model: "torch" (reference) or "triton" (fused, the default on a GPU).
    Raises ValueError."""
    check_choice("backend", name, ("auto", "torch", "triton"))
    if name == "torch" or name == "auto" and device.type == "cpu":
        return "torch"
    if device.type == "cpu" and not launch.INTERPRETED:
        raise ValueError(
            "on a CPU the Triton kernels run only in Triton's interpreter: set TRITON_INTERPRET=1"
        )
    if launch.triton is None:
        raise ValueError("Triton is not installed: --backend torch runs without it")
    if device.type == "cuda" and launch.capability(device) < 80:
        card = torch.cuda.get_device_name(device)
        raise ValueError(
            f"{card} is older than compute capability 8.0, which the kernels need: use --backend torch"
        )
    return "triton"


def check_accumulate(
    accumulate: str, backend: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise ValueError if a prompt's products are to be accumulated in half precision where that
    cannot be done."""
    check_choice("accumulate", accumulate, ("auto", "fp32", "fp16"))
    can_be_done = backend == "triton" and device.type == "cuda" and dtype == torch.float16
    if accumulate == "fp16" and not can_be_done:
        raise ValueError("--accumulate fp16 needs a GPU, the Triton kernels and --dtype fp16")


def check_original(checkpoint: Checkpoint, format: str | None) -> None:
    """Raise ValueError if matrices that are encoded already would be encoded again."""
    own = checkpoint.format.name if checkpoint.format else checkpoint.quantised
    if own and format:
        lossy = f"its matrices are {own}, and {format} would lose precision a second time"
        raise ValueError(f"{checkpoint.folder}: {lossy}: run it as it is, or encode the original")


CGROUPS = (  # of a container, version 2 and version 1: the folder, its limit, what it uses
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def free_memory(device: torch.device) -> float:
    """Bytes that can still be allocated on a GPU, or in this machine and its container; infinity
    where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = math.inf
    with suppress(OSError):
        said = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
        free = 1024 * int(said[1])
    for folder, limit, used in CGROUPS:
        with suppress(OSError, ValueError):  # not in such a container, or its limit is "max"
            most = int(Path(folder, limit).read_text())
            taken = int(Path(folder, used).read_text())
            stat = Path(folder, "memory.stat").read_text()
            dropped = re.findall(r"^(?:in)?active_file (\d+)", stat, re.MULTILINE)  # if need be
            free = min(free, most - taken + sum(map(int, dropped)))
    return free


# What a model needs beside weights and cache, in multiples of its largest matrix in dtype: two
# decoded copies of it (the graphs of prompts have memory of their own) and two workspaces for the
# activations of the longest of model.LENGTHS, each 1.2 times as large (7B); the rest is for the
# graphs themselves. On a CPU: one of each for a chunk, and a second copy of the output matrix where
# it is the embedding.
MARGIN = 5


def check_memory(
    c: Config,
    dtype: torch.dtype,
    device: torch.device,
    ctx_size: int,
    format: Format | PerMatrix | None = None,
    kv_fp8: bool = False,
    ranks: Ranks = Ranks(),
) -> None:
    """Raise MemoryError if weights, cache and workspace (of one rank, if the config is cut) will
    not fit, before any of them is allocated."""
    on_cpu = device.type == "cpu"
    shapes = matrix_shapes(c)
    weights = weight_bytes(c, dtype, format)
    workspace = MARGIN * dtype.itemsize * max(map(math.prod, shapes.values()))
    layer = 2 * c.kv_dim * ctx_size  # keys and values of one layer
    cache = c.n_layers * layer
    if kv_fp8:
        workspace += 2 * layer * dtype.itemsize  # decoded
    else:
        cache *= dtype.itemsize
    if format and on_cpu and dtype == torch.bfloat16:
        for name, shape in shapes.items():
            of_matrix = format.at(name)
            if of_matrix and of_matrix.bits == 4:
                weights += math.prod(shape) * 5 // 8  # a copy of the codes for torch's product
    need = weights + cache + workspace
    free = free_memory(device)
    where = str(device)
    if ranks.size > 1:
        where += f" for rank {ranks.rank} of {ranks.size}"
    if on_cpu:
        free /= ranks.local_size  # the ranks of a host share its memory
    if need > free:
        w, k, o, total, has = (f"{n / 1e9:.2f} GB" for n in (weights, cache, workspace, need, free))
        formats = "" if isinstance(format, PerMatrix) else " --fp8, --int4"
        raise MemoryError(
            f"weights {w} + cache of {ctx_size} tokens {k} + workspace {o} = {total}, but {where} has {has} free:"
            f" try a smaller context (-c), a smaller --dtype,{formats} or --kv-fp8"
        )


# ---- loading


@one_line_errors()
def load(
    name: str | Path | Checkpoint,
    *,
    dtype: str = "auto",
    device: str = "auto",
    ctx_size: int | None = None,
    backend: str = "auto",
    format: str | None = None,
    kv_fp8: bool = False,
    accumulate: str = "auto",
    quiet: bool = False,
    ranks: Ranks = Ranks(),
    sampling: dict[str, float] | None = None,
) -> Llama:
    """Load a checkpoint, which may be open already, or else as find_checkpoint finds it: a folder
    in Hugging Face's or Meta's layout, a GGUF file, or a repository of the hub.

    ctx_size: the context, which must fit into memory beside the weights; 0 is the model's own; None
    is that, but at most 4096. format: in which to keep the matrices, a name of kernels.FORMATS;
    what `save` wrote has its own. kv_fp8: keys and values in 8 bits. accumulate: how a prompt's
    products are summed, see kernels.py. quiet: no progress bar. ranks: the processes that share the
    model, if several. sampling: settings that replace the checkpoint's own. Raises ValueError,
    OSError or MemoryError, in one line that says what to do."""
    check_choice("format", format, (None, *FORMATS))
    if ctx_size is not None and ctx_size < 0:
        raise ValueError(
            f"ctx_size is {ctx_size}; it must be a number of tokens, or 0 for the model's own"
        )
    if isinstance(name, Checkpoint):
        checkpoint = name
    else:
        checkpoint = Checkpoint(find_checkpoint(name))
    folder = checkpoint.folder
    config = checkpoint.config
    given = sampling or {}
    own = read_sampling(folder, given)
    if not checkpoint.format or format != checkpoint.format.name:
        check_original(checkpoint, format)
    on = pick_device(device, ranks)
    backend = pick_backend(backend, on)
    if backend == "triton" and config.head_dim % 8:
        wrong = f"head_dim is {config.head_dim}; the kernels need a multiple of 8"
        raise ValueError(f"{folder}: {wrong}: use --backend torch")
    as_dtype = pick_dtype(dtype, checkpoint.dtype, on, checkpoint.elements)
    if ctx_size is None:
        ctx_size = min(config.max_seq_len, 4096)
    ctx_size = ctx_size or config.max_seq_len
    if config.sliding_window and ctx_size > config.sliding_window:
        window = f"sliding_window is {config.sliding_window}"
        raise ValueError(f"{folder}: {window}: a context of {ctx_size} is not supported (see -c)")
    check_accumulate(accumulate, backend, on, as_dtype)
    config = config.cut(ranks.size)
    # On a CPU torch has no fast product for 8-bit codes in groups, so they are decoded
    decodes = on.type == "cpu" and backend == "torch"
    as_stored = checkpoint.formats_as_stored(config, most_bits=4 if decodes else 8)
    formats = checkpoint.format or FORMATS.get(format) or as_stored
    check_groups(config, formats)
    ranks.join(on)
    check_memory(config, as_dtype, on, ctx_size, formats, kv_fp8, ranks)
    matrix_dtype = kernels.storage_dtype(backend, as_dtype, on)
    if formats and not as_stored:
        matrix_dtype = checkpoint.dtype  # codes do not depend on --dtype
    loader = Loader(checkpoint, as_dtype, matrix_dtype, on, formats, backend, ranks, quiet)
    with torch.inference_mode():
        weights = loader.load()
    if on.type == "cuda":
        del loader
        torch.cuda.empty_cache()  # what loading needed in addition to the weights
    return Llama(
        config,
        weights,
        backend,
        on,
        as_dtype,
        ctx_size,
        checkpoint,
        kv_fp8,
        accumulate,
        ranks,
        Sampling(**own | given),
    )
