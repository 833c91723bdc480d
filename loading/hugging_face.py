"""Hugging Face's layout on disk (see loading/checkpoint.py): a folder with a config.json, a
generation_config.json, and model.safetensors or pytorch_model.bin, whole or in shards. GGUF files
are translated into such a configuration. Every field is checked, and what is not implemented is
refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from formats import Quantised
from loading.families import family_of
from loading.files import Fields, one_line, one_line_errors
from loading.layouts import EMBEDS, Files, Folder, check_heads, joined_part
from loading.names import Kind, Part
from loading.quantised import FLOATS, Packing, checked, of_rows, packing_of
from loading.reading import FileTensor
from loading.rope import rope_of
from loading.tensors import Found, Spans, Stored, columns_in, files_for, floats
from model import Config
from settings import SETTINGS

# What it calls what names.Part calls so, unless the model's family says otherwise
NAMES = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.gate": "mlp.gate",
    "feed_forward.experts.w1": "mlp.experts.{}.gate_proj",
    "feed_forward.experts.w3": "mlp.experts.{}.up_proj",
    "feed_forward.experts.w2": "mlp.experts.{}.down_proj",
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
}
LAYERS = "model.layers"
# Tensors that have several parts, one below the other, and these in their order. transformers 5
# keeps the matrices of all experts in one tensor
JOINED = {
    "self_attn.qkv_proj": ("attention.wq", "attention.wk", "attention.wv"),
    "mlp.gate_up_proj": ("feed_forward.w1", "feed_forward.w3"),
    "mlp.experts.gate_up_proj": ("feed_forward.experts.w1", "feed_forward.experts.w3"),
    "mlp.experts.down_proj": ("feed_forward.experts.w2",),
}
# In the config.json of a folder that --save wrote: its model_type, and where the original's is
SAVED_TYPE = "fused-llama"
ORIGINAL_TYPE = "original_model_type"
# Beside the text in models that also know images
OF_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
OF_TEXT = re.compile(r"^(model\.)?language_model\.")


class HuggingFaceFolder(Folder):
    def __init__(self, files: Files):
        super().__init__(files)
        f = Fields(self.path / "config.json")
        self.model_type = original_type(f)
        if f.get("model_type") == SAVED_TYPE:
            f["model_type"] = self.model_type
        self.config_json = text_config(f, self.notes)
        self.family = family_of(self.config_json)
        self.packing = packing_of(self.config_json)

    @staticmethod
    def is_at(files: Files) -> bool:
        return files.has("config.json")

    def config(self) -> Config:
        return config_of(self.config_json, self.generation, self.notes)

    def file_tensors(self) -> list[FileTensor]:
        found = []
        for tensor in super().file_tensors():
            if not OF_IMAGES.match(tensor.name):
                found.append(replace(tensor, name=OF_TEXT.sub(r"\1", tensor.name)))
        if not {"embed_tokens.weight", "score.weight"}.isdisjoint(t.name for t in found):
            raise ValueError(f"{self.path} {EMBEDS}")
        return found

    def name_of(self, part: Part) -> str:
        stem = self.family.renames.get(part.stem, NAMES[part.stem])
        return part.name_in(LAYERS, stem)

    def stored_part(self, part: Part, c: Config, found: Found) -> list[Stored]:
        shape = part.shape(c)[-2:]
        head_dim = c.head_dim if part.rotated else None
        own = self.name_of(part)
        for name in (own, part.name_in(LAYERS, NAMES[part.stem])):
            names = names_for(name, c)
            records = [self.matrix(each, part, shape, found, head_dim) for each in names]
            if any(records):
                break
        else:
            joined = {joined_name(part, name): stems for name, stems in JOINED.items()}
            find = lambda name, shape: self.matrix(name, part, shape, found)
            if record := joined_part(find, joined, part, c, head_dim):
                return [record]
            names = names_for(own, c)
        return [
            record or floats(name, shape, found, head_dim) for record, name in zip(records, names)
        ]

    def matrix(
        self,
        name: str,
        part: Part,
        shape: tuple[int, ...],
        found: Found,
        head_dim: int | None = None,
    ) -> Stored | None:
        """A tensor of this name, or a matrix that others have quantised under it. Returns None if
        there is none."""
        if self.packing and part.kind in (Kind.MATRIX, Kind.PLAIN):
            packed = packed_matrix(self.packing, name, shape, found, head_dim)
            if packed:
                return packed
        if name in found:
            return floats(name, shape, found, head_dim)
        return None


def original_type(f: Fields) -> str:
    """transformers' name for the models of a config.json, also of one that --save wrote."""
    return f.get(ORIGINAL_TYPE, f.get("model_type", "llama"))


def text_config(f: Fields, notes: list[str]) -> Fields:
    """The fields of a config.json that are about text, of a model that also knows images. Raises
    ValueError."""
    if f.get("model_type") != "mistral3":
        return f
    notes.append(f"{f.file.name}: model_type is 'mistral3': images are left out")
    # Either may say whether matrices are tied, and layouts.untied sees to it
    return Fields(f.file, f | f.sub("text_config") | {"tie_word_embeddings": True})


def joined_name(part: Part, stem: str) -> str:
    """The name of a tensor that has several parts. A stack of the experts' matrices is no layer, whose
    tensor would be its "weight"."""
    name = part.name_in(LAYERS, stem)
    return name.removesuffix(".weight") if part.of_experts else name


def names_for(name: str, c: Config) -> list[str]:
    """A tensor's name, or those of all experts' tensors."""
    if "{}" in name:
        return [name.format(expert) for expert in range(c.n_experts)]
    return [name]


def packed_matrix(
    packing: Packing, name: str, shape: tuple[int, int], found: Found, head_dim: int | None
) -> Stored | None:
    """A matrix that others have quantised. It is read as a whole, since it may be stored transposed.
    Returns None if this one is in floats."""
    stem = name.removesuffix("weight")
    by_word = packing.wanted(*shape)
    codes, *_ = by_word
    if stem + codes not in found:
        return None
    if codes == "weight" and found[stem + codes][0].dtype in FLOATS:
        return None
    absent = {word for word in packing.optional if stem + word not in found}
    words = [word for word in by_word if word not in absent]
    files = files_for({stem + word: by_word[word] for word in words}, found)
    N, K = shape
    problems = files.problems
    if N % 8 or K % packing.group:
        what = f"not a multiple of 8 rows and {packing.group} columns"
        problems = (f"{name} is {list(shape)}, {what}", *problems)

    def cut(spans: Spans) -> list[FileTensor]:
        return [file for (file,) in files.found.values()]

    def make(tensors: list[Tensor], spans: Spans) -> Quantised:
        rows, columns = spans
        try:
            matrix = checked(packing.read(dict(zip(words, tensors))))
        except ValueError as error:
            raise ValueError(f"{files.found[stem + codes][0].file}: {name} has {error}") from None

        def part(t: Tensor) -> Tensor:
            return t[rows.start : rows.stop, columns_in(columns, K, t.shape[1])].contiguous()

        return of_rows(matrix, part)

    return Stored(
        name=name,
        shape=shape,
        files=files.found,
        cut=cut,
        make=make,
        scheme=packing.scheme,
        head_dim=head_dim,
        in_pieces=False,
        problems=problems,
    )


# ---- generation_config.json


@one_line_errors()
def sampling_of(f: Fields, overridden: Collection[str] = ()) -> dict[str, float]:
    """What a generation_config.json says about sampling, by the names of Sampling, without those
    that are overridden. Raises ValueError."""
    f = Fields(f.file, f)
    if "temp" not in overridden:
        f.refuse_unless("do_sample", None, True, False)
        if f.get("do_sample") is False:
            f["temperature"] = 0
    said = {}
    for name, setting in SETTINGS.items():
        field = setting.checkpoint
        if field and f.get(field) is not None and name not in overridden:
            said[name] = f.number(field, setting.low, setting.largest, kind=setting.kind)
    if said.get("repeat_penalty", 1) != 1 and "repeat_last_n" not in overridden:
        most = SETTINGS["repeat_last_n"].largest
        said["repeat_last_n"] = f.number("repeat_last_n", -1, most, -1)  # transformers': all tokens
    return said


# Settings that would change the text but are not implemented, and the value that turns each off
UNSUPPORTED = {
    "num_beams": 1, "num_beam_groups": 1, "penalty_alpha": 0, "dola_layers": None,
    "guidance_scale": 1, "watermarking_config": None, "token_healing": False,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1,
    "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "sequence_bias": None, "force_words_ids": None, "constraints": None,
    "min_length": 0, "min_new_tokens": 0, "exponential_decay_length_penalty": None,
    "stop_strings": None,
}  # fmt: skip
UNSUPPORTED_SAMPLING = {"typical_p": 1, "top_h": None, "epsilon_cutoff": 0, "eta_cutoff": 0}


def unsupported_settings(f: Fields) -> list[str]:
    """The names of settings in a generation_config.json that change a text in transformers, but not
    here."""
    off = UNSUPPORTED
    if f.get("do_sample") is not False:
        off = off | UNSUPPORTED_SAMPLING
    return [name for name, value in off.items() if f.get(name) and f[name] != value]


# ---- config.json

MOST_EXPERTS = 1 << 16  # of all layers


def config_of(f: Fields, generation: Fields, notes: list[str]) -> Config:
    """The configuration in a config.json. generation: the fields of a generation_config.json. notes:
    takes a line for what is left out. Raises ValueError for what is not implemented."""
    family = family_of(f)
    for name, value in family.defaults.items():
        f.setdefault(name, value)
    f.refuse_unless("hidden_act", "silu", "swish")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        f.refuse_unless(name, False, True, None)
    f["torch_dtype"] = f.get("dtype") or f.get("torch_dtype")
    f.refuse_unless("torch_dtype", None, "auto", "float32", "float16", "bfloat16")
    f.refuse_unless("partial_rotary_factor", None, 1, 1.0)
    f.refuse_unless("is_causal", None, True)
    f.refuse_unless("tie_word_embeddings", False, True, None)
    n_heads = f.number("num_attention_heads", 1, 1024)
    dim = f.number("hidden_size", 1, 1 << 17)
    max_seq_len = f.number("max_position_embeddings", 1, 1 << 24, 2048)
    window = None
    if family.has_window(f) and f.get("sliding_window") is not None:
        window = f.number("sliding_window", 1, 1 << 24)
    n_kv_heads = f.number("num_key_value_heads", 1, 1024, n_heads)
    head_dim = f.number("head_dim", 2, 1024, dim // n_heads)
    check_heads(f, n_heads, n_kv_heads, head_dim)
    rope = rope_of(f, head_dim, max_seq_len)
    eps = f.number("rms_norm_eps", 0, 1, 1e-6, float)
    factors = {}
    if family.factors:
        factors, eps, gain = factors_of(f, eps, head_dim)
        rope = rope._replace(gain=rope.gain * gain)
    vocab_size = f.number("vocab_size", 1, 1 << 22)
    bos_ids, eos_ids = (
        ids_in(generation, name, vocab_size, notes) or ids_in(f, name, vocab_size, notes)
        for name in ("bos_token_id", "eos_token_id")
    )
    dtype = f["torch_dtype"]
    attention_bias = bool(f.get("attention_bias"))
    mlp_bias = family.mlp_bias and bool(f.get("mlp_bias"))
    experts = experts_of(f, family.norm_topk) if family.experts else {}
    return Config(
        dim=dim,
        n_layers=f.number("num_hidden_layers", 1, 1024),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        hidden_dim=f.number(family.hidden_dim, 1, 1 << 20),
        vocab_size=vocab_size,
        norm_eps=eps,
        rope_theta=rope.theta,
        rope_factors=rope.factors,
        rope_gain=rope.gain,
        q_scaling=rope.q_scaling,
        nope_layers=nope_layers_of(f) if family.nope else (),
        max_seq_len=max_seq_len,
        sliding_window=window,
        tie_embeddings=bool(f.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        wo_bias=attention_bias and family.qkv_bias is None,
        w13_bias=mlp_bias,
        w2_bias=mlp_bias,
        qk_norm=family.qk_norm,
        factors=tuple(factors.items()),
        **experts,
        dtype=getattr(torch, dtype) if dtype not in (None, "auto") else None,
        bos_id=next(iter(bos_ids), None),
        eos_ids=tuple(dict.fromkeys(eos_ids)),
    )


def nope_layers_of(f: Fields) -> tuple[int, ...]:
    """The layers without RoPE: no_rope_layers has a 0 for each; without it, which GGUF files always
    are, they are at an interval. Raises ValueError."""
    count = f.number("num_hidden_layers", 1, 1024)
    interval = f.number("no_rope_layer_interval", 1, 1024, 4)
    rotated = f.get("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % interval > 0) for layer in range(count)]
    if (
        not isinstance(rotated, list)
        or len(rotated) < count
        or any(x not in (0, 1) for x in rotated)
    ):
        wanted = f"it must be a list with 0 or 1 for each of {count} layers"
        raise ValueError(f"{f.file}: no_rope_layers is {rotated!r}; {wanted}")
    return tuple(layer for layer in range(count) if not rotated[layer])


def factors_of(f: Fields, eps: float, head_dim: int) -> tuple[dict[str, float], float, float]:
    """What Granite's multipliers come to: what tensors are multiplied by, the norms' epsilon, and the
    gain of q and k.

    The embedding stays as it is, so that x is smaller than there by a constant, as are what is added
    to it and the epsilon beside its squares."""
    number = lambda name: f.number(name, 1e-6, 1e6, 1, float)
    embedding = number("embedding_multiplier")
    added = number("residual_multiplier") / embedding
    factors = {"wo": added, "w2": added, "norm": 1 / number("logits_scaling")}
    factors |= {"wo_bias": added, "w2_bias": added}
    gain = math.sqrt(number("attention_multiplier") * math.sqrt(head_dim))
    return factors, eps / embedding**2, gain


def ids_in(f: Fields, name: str, vocab_size: int, notes: list[str]) -> list[int]:
    """The tokens' ids in a field, which may hold one, a list, or none. Those that the model does not
    have are left out, with a note. Raises ValueError for what is no id."""
    value = f.get(name)
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if any(type(i) is not int for i in ids):
        raise ValueError(f"{f.file}: {name} is {value!r}; it must hold ids")
    found = [i for i in ids if 0 <= i < vocab_size]
    if len(found) < len(ids):
        beyond = f"ids that a vocabulary of {vocab_size} does not have are ignored"
        notes.append(f"{f.file.name}: {name} is {one_line(repr(value))}; {beyond}")
    return found


def experts_of(f: Fields, norm_topk: bool | None) -> dict[str, int | bool]:
    """What a config.json says about experts, by the names of Config. norm_topk: see Family. Raises
    ValueError."""
    f.refuse_unless("mlp_only_layers", None, [])
    f.refuse_unless("decoder_sparse_step", None, 1)
    f.refuse_unless("n_shared_experts", None, 0)
    f.refuse_unless("shared_expert_intermediate_size", None, 0)
    f.refuse_unless("routed_scaling_factor", None, 1, 1.0)
    # transformers writes either for Qwen3
    name = "num_experts" if f.get("num_local_experts") is None else "num_local_experts"
    most = MOST_EXPERTS // f.number("num_hidden_layers", 1, 1024)
    count = f.number(name, 1, min(most, 1024))  # the router compares each of them with each other
    if norm_topk is None:
        f.refuse_unless("norm_topk_prob", False, True, None)
        norm_topk = bool(f.get("norm_topk_prob"))
    per_token = f.number("num_experts_per_tok", 1, count)
    return {"n_experts": count, "experts_per_token": per_token, "norm_topk": norm_topk}
