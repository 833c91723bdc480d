"""Step 3 of loading (see loading/checkpoint.py): the configuration of a model, from Hugging Face's
config.json and generation_config.json or from Meta's params.json. Every field is checked, and what
is not implemented is refused by name."""

import itertools
import math
import operator
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from loading.families import family_of
from loading.files import Fields, one_line_errors
from loading.quantised import scheme_of
from model import Config
from settings import SETTINGS


def generation_of(folder: Path) -> Fields:
    """The fields of a folder's generation_config.json. There are none if there is no such file."""
    file = folder / "generation_config.json"
    if file.is_file():
        return Fields(file)
    return Fields(file, {})


@one_line_errors()
def read_sampling(folder: Path, overridden: Collection[str] = ()) -> dict[str, float]:
    """What a checkpoint's generation_config.json says about sampling, by the names of Sampling,
    without those that are overridden. Raises ValueError."""
    f = generation_of(folder)
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
        said["repeat_last_n"] = -1  # transformers penalises all tokens
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


def unsupported_settings(folder: Path) -> list[str]:
    """The names of settings in a checkpoint's generation_config.json that change its text in
    transformers, but not here. Raises ValueError."""
    f = generation_of(folder)
    off = UNSUPPORTED
    if f.get("do_sample") is not False:
        off = off | UNSUPPORTED_SAMPLING
    return [name for name, value in off.items() if f.get(name) and f[name] != value]


MOST_EXPERTS = 1 << 16  # of all layers


def hugging_face_config(f: Fields, generation: Fields) -> Config:
    """The configuration in a config.json. Raises ValueError for what is not implemented."""
    family = family_of(f)
    for name, value in family.defaults.items():
        f.setdefault(name, value)
    f.refuse_unless("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        f.refuse_unless(name, False, True, None)
    scheme_of(f)
    f["torch_dtype"] = f.get("dtype") or f.get("torch_dtype")
    f.refuse_unless("torch_dtype", None, "float32", "float16", "bfloat16")
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
    vocab_size = f.number("vocab_size", 1, 1 << 22)
    bos_ids = generation.ids("bos_token_id", vocab_size) or f.ids("bos_token_id", vocab_size)
    eos_ids = generation.ids("eos_token_id", vocab_size) or f.ids("eos_token_id", vocab_size)
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
        norm_eps=f.number("rms_norm_eps", 0, 1, 1e-6, float),
        rope_theta=rope.theta,
        rope_factors=rope.factors,
        rope_gain=rope.gain,
        max_seq_len=max_seq_len,
        sliding_window=window,
        tie_embeddings=bool(f.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        wo_bias=attention_bias and family.qkv_bias is None,
        w13_bias=mlp_bias,
        w2_bias=mlp_bias,
        qk_norm=family.qk_norm,
        **experts,
        dtype=getattr(torch, dtype) if dtype else None,
        bos_id=next(iter(bos_ids), None),
        eos_ids=tuple(dict.fromkeys(eos_ids)),
    )


def check_heads(f: Fields, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
    """Raise ValueError if the numbers do not fit one another."""
    if n_heads % n_kv_heads:
        raise ValueError(
            f"{f.file}: {n_heads} query heads cannot share {n_kv_heads} key/value heads evenly"
        )
    if head_dim % 2:
        raise ValueError(f"{f.file}: head_dim is {head_dim}; RoPE needs an even one")


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


def meta_config(f: Fields) -> Config:
    """The configuration in a params.json. A vocab_size below 1 means that only the tokenizer knows
    it. Raises ValueError for what is not implemented."""
    f.refuse_unless("use_scaled_rope", False, None)
    f.refuse_unless("yarn", None)
    f.refuse_unless("moe", None)
    dim = f.number("dim", 1, 1 << 17)
    n_heads = f.number("n_heads", 1, 1024)
    multiple_of = f.number("multiple_of", 1, 1 << 17, 256)
    # Meta's llama/model.py: two thirds of 4 dim, times a multiplier, rounded up to a multiple
    hidden = int(f.number("ffn_dim_multiplier", 1e-3, 1e3, 1.0, float) * int(2 * 4 * dim / 3))
    hidden = multiple_of * -(-hidden // multiple_of)
    window = None
    if f.get("sliding_window") is not None:  # Mistral writes it, and hidden_dim
        window = f.number("sliding_window", 1, 1 << 24)
    n_kv_heads = f.number("n_kv_heads", 1, 1024, n_heads)
    head_dim = f.number("head_dim", 2, 1024, dim // n_heads)
    check_heads(f, n_heads, n_kv_heads, head_dim)
    return Config(
        dim=dim,
        n_layers=f.number("n_layers", 1, 1024),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        hidden_dim=f.number("hidden_dim", 1, 1 << 20, hidden),
        vocab_size=f.number("vocab_size", -1, 1 << 22, -1),
        norm_eps=f.number("norm_eps", 0, 1, 1e-5, float),
        rope_theta=f.number("rope_theta", 2, 1e12, 10000.0, float),
        sliding_window=window,
    )


class Rope(NamedTuple):
    """rope_theta, rope_factors and rope_gain of Config."""

    theta: float
    factors: tuple[float, ...] = ()
    gain: float = 1.0


def rope_of(f: Fields, D: int, max_seq_len: int) -> Rope:
    """RoPE's settings in rope_parameters, or in the older rope_scaling and rope_theta. Supported
    types are linear (Chen et al., 2023), llama3 (Meta, 2024), yarn, and longrope (Ding et al.,
    2024). Raises ValueError."""
    newer = _renamed(f.sub("rope_parameters"))
    older = _renamed(f.sub("rope_scaling"))
    by_layer = [name for name, value in (newer | older).items() if isinstance(value, dict)]
    if by_layer:
        what = f"layers with RoPE of their own ({', '.join(by_layer)}), which are not supported"
        raise ValueError(f"{f.file}: {what}")
    beside = {"rope_theta": f.get("rope_theta")}
    last = {"original_max_position_embeddings": f.get("original_max_position_embeddings")}
    # A file may have both, if they agree: each overrides the other in turn, and the results must be
    # equal. A rope_theta beside them is only a default, but an original_max_position_embeddings
    # beside them overrides both
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
    """The fields that are not null."""
    return {name: value for name, value in fields.items() if value is not None}


def _renamed(fields: dict) -> dict:
    """RoPE's fields that are not null, by their newer names."""
    fields = _said(fields)
    if "type" in fields:
        fields.setdefault("rope_type", fields.pop("type"))
    return fields


def _scaled(rope: Fields, D: int, max_seq_len: int) -> Rope:
    """What one set of fields says. Whatever the type, a GGUF file may add factors that divide the
    frequencies, and a gain of q and k."""
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
    share = torch.ones(D // 2, dtype=torch.float64)
    if kind == "llama3":  # low frequencies are divided, high ones kept, with a ramp between
        low = rope.number("low_freq_factor", 1e-6, 1e6, None, float)
        high = rope.number("high_freq_factor", 1e-6, 1e6, None, float)
        original = rope.number("original_max_position_embeddings", 1, 1 << 24)
        frequencies = theta ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
        turns = original / (2 * math.pi) * frequencies
        share = 1 - ((turns - low) / (high - low)).clamp(0, 1)
    return Rope(theta, _factors(share, factor))


def _factors(share: Tensor, factor: float) -> tuple[float, ...]:
    """The divisor of each frequency if a share of it is divided by `factor` and the rest stays. share
    [D/2]: how much of each frequency is divided, from 0 to 1."""
    return tuple((1 / (1 - share + share / factor)).tolist())


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
    share = (ramp / (high - low or 0.001)).clamp(0, 1)
    gain = rope.number("attention_factor", 1e-3, 1e3, 1 + 0.1 * math.log(factor), float)
    return Rope(theta, _factors(share, factor), gain)


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
    is_factor = lambda x: type(x) in (int, float) and 0 < x < math.inf
    if not isinstance(factors, list) or not all(map(is_factor, factors)):
        raise ValueError(
            f"{rope.file}: the factors of RoPE are {factors!r}; they must be finite and above 0"
        )
    if len(factors) != D // 2:
        raise ValueError(
            f"{rope.file}: {len(factors)} factors of RoPE; a head_dim of {D} needs half as many"
        )
    return tuple(factors)
