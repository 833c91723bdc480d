"""Step 3 of loading (see loading/checkpoint.py): what tells families of models apart, a row each.

This needs no torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loading.files import Fields

# ---- whether any layer sees only a window of positions, by the fields of a config.json


def always(f: Fields) -> bool:
    return True


def never(f: Fields) -> bool:
    return False


def if_used(f: Fields) -> bool:
    return bool(f.get("use_sliding_window"))


def in_some_layers(f: Fields) -> bool:
    """layer_types says which layers have a window, or else max_window_layers how many have none."""
    if not if_used(f):
        return False
    types = f.get("layer_types")
    if isinstance(types, list):
        return any(kind != "full_attention" for kind in types)
    return f.number("max_window_layers", 0, 1 << 24, 28) < f.number("num_hidden_layers", 1, 1024)


# ---- the table


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is different in a family; the defaults are what most families have."""

    gguf: str  # its general.architecture in a GGUF file, which families may share
    # For fields that a config.json leaves out: transformers' defaults, if they are not Llama's
    defaults: dict[str, Any] = field(default_factory=dict)
    # What its folders call tensors differently, by the stems of names.Part
    renames: dict[str, str] = field(default_factory=dict)
    has_window: Callable[[Fields], bool] = in_some_layers
    qkv_bias: bool | None = None  # None: as attention_bias says, for wo as well
    mlp_bias: bool = False  # whether a config.json's field of this name counts
    qk_norm: bool = False
    hidden_dim: str = "intermediate_size"  # the field that says it
    experts: bool = False
    norm_topk: bool | None = None  # None: as norm_topk_prob says
    in_pairs: bool = False  # rows of q and k that RoPE rotates together are neighbours in GGUF
    gguf_renames: dict[str, str] = field(default_factory=dict)  # the same as renames, in GGUF
    joined: bool = False  # q, k and v are one tensor in files, and so are w1 and w3
    factors: bool = False  # a config.json scales embedding, attention, residual and logits
    nope: bool = False  # some layers are without RoPE


# By model_type in a config.json
FAMILIES = {
    "llama": Family(gguf="llama", has_window=never, mlp_bias=True, in_pairs=True),
    "mistral": Family(
        gguf="mistral",  # rarely: most files say llama
        defaults={
            "max_position_embeddings": 1 << 17,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        has_window=always,
        qkv_bias=False,
    ),
    "mixtral": Family(
        gguf="llama",
        defaults={
            "max_position_embeddings": 1 << 17,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        renames={
            "feed_forward.gate": "block_sparse_moe.gate",
            "feed_forward.experts.w1": "block_sparse_moe.experts.{}.w1",
            "feed_forward.experts.w3": "block_sparse_moe.experts.{}.w3",
            "feed_forward.experts.w2": "block_sparse_moe.experts.{}.w2",
        },
        has_window=always,
        qkv_bias=False,
        experts=True,
        norm_topk=True,
        in_pairs=True,
    ),
    "phi3": Family(
        gguf="phi3",
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        has_window=always,
        qkv_bias=False,
        joined=True,
    ),
    "granite": Family(gguf="granite", has_window=never, mlp_bias=True, in_pairs=True, factors=True),
    "seed_oss": Family(
        gguf="seed_oss",
        defaults={
            "attention_bias": True,
            "max_position_embeddings": 1 << 19,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        has_window=never,
        mlp_bias=True,
        gguf_renames={"ffn_norm": "post_attention_norm"},
    ),
    "smollm3": Family(
        gguf="smollm3",
        defaults={
            "max_position_embeddings": 1 << 15,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        has_window=if_used,
        mlp_bias=True,
        in_pairs=True,
        nope=True,
    ),
    # Of Mistral Small 3 and its relatives, whose text_config says mistral, or this
    "ministral3": Family(
        gguf="mistral3",
        defaults={
            "max_position_embeddings": 1 << 18,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
        },
        has_window=always,
        qkv_bias=False,
        in_pairs=True,
    ),
    "qwen2": Family(
        gguf="qwen2",
        defaults={"max_position_embeddings": 1 << 15, "num_key_value_heads": 32},
        qkv_bias=True,
    ),
    "qwen3": Family(
        gguf="qwen3",
        defaults={
            "max_position_embeddings": 1 << 15,
            "num_key_value_heads": 32,
            "head_dim": 128,
        },
        qk_norm=True,
    ),
    "qwen3_moe": Family(
        gguf="qwen3moe",
        defaults={
            "max_position_embeddings": 1 << 15,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        has_window=if_used,
        qk_norm=True,
        hidden_dim="moe_intermediate_size",
        experts=True,
    ),
}


INSTEAD = "take a model of one of these, or run it in transformers or llama.cpp"


def family_of(f: Fields) -> Family:
    """The family that a config.json names, or Llama. Raises ValueError."""
    name = f.get("model_type", "llama")
    if name not in [*FAMILIES]:  # which may be anything
        listed = ", ".join(FAMILIES)
        what = f"model_type is {name!r}, which is not supported (supported: {listed})"
        raise ValueError(f"{f.file}: {what}: {INSTEAD}")
    return FAMILIES[name]
