"""RoPE's settings in a config.json, for step 3 of loading (see loading/checkpoint.py): what the frequencies are
divided by for a longer context, in every dialect that is supported."""

import itertools
import math
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from loading.files import Fields


class Rope(NamedTuple):
    """rope_theta, rope_factors, rope_gain and q_scaling of Config."""

    theta: float
    factors: tuple[float, ...] = ()
    gain: float = 1.0
    q_scaling: tuple[float, int] | None = None


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
    # A rope_theta beside them is only a default, but an original_max_position_embeddings beside them
    # overrides both
    beside = _said({"rope_theta": f.get("rope_theta")})
    name = "original_max_position_embeddings"
    last = _said({name: f.get(name)})
    differ = [name for name in newer.keys() & older.keys() if newer[name] != older[name]]
    if not last.keys() >= {*differ}:
        raise ValueError(
            f"{f.file}: rope_parameters and rope_scaling say different things: {newer} and {older}"
        )
    return _scaled(Fields(f.file, beside | older | newer | last), D, max_seq_len)


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
    theta, factors, gain, _ = _of_type(rope, D, max_seq_len)
    if "gguf_factors" in rope:
        more = _listed_factors(rope, "gguf_factors", D)
        factors = tuple(map(operator.mul, more, factors or itertools.repeat(1.0)))
    gain *= rope.number("gguf_gain", 1e-3, 1e3, 1, float)
    q_scaling = None
    if beta := rope.number("llama_4_scaling_beta", 0, 100, 0, float):
        q_scaling = beta, rope.number("original_max_position_embeddings", 1, 1 << 24)
    return Rope(theta, factors, gain, q_scaling)


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
    original = rope.number("original_max_position_embeddings", 1, 1 << 24, max_seq_len)
    factor = rope.number("factor", 1, 1e6, max(1, max_seq_len / original), float)
    fast = rope.number("beta_fast", 1e-3, 1e6, 32, float)
    slow = rope.number("beta_slow", 1e-3, 1e6, 1, float)
    pair = lambda turns: math.log(original / (2 * math.pi * turns), theta) * D / 2
    low = max(math.floor(pair(fast)), 0)
    high = min(math.ceil(pair(slow)), D - 1)
    ramp = torch.arange(D // 2, dtype=torch.float64) - low
    share = (ramp / (high - low or 0.001)).clamp(0, 1)
    usual = 1 + 0.1 * math.log(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        mscale, of_all = (
            1 + 0.1 * rope.number(name, 1e-3, 1e3, 1, float) * math.log(factor)
            for name in ("mscale", "mscale_all_dim")
        )
        usual = mscale / of_all
    gain = rope.number("attention_factor", 1e-3, 1e3, usual, float)
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
