"""Tests of configurations and model families."""

import itertools
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dev.checkpoints import write_gguf
from loading.checkpoint import load, read_config
from loading.reading import CPU
from loading.test_gguf import BYTES, gguf_metadata, parts_of_gguf
from model import rope_tables
from session import Session
from tests.helpers import (
    FAMILIES,
    RAMP,
    assert_close,
    assert_equals_transformers,
    assert_refused,
    edit,
    hugging_face_model,
    logits_of,
    set_one,
    spoil_config,
    spoil_tensors,
)

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
NEWER, OLDER = YARN | {"rope_theta": 1e4}, {"type": "yarn"} | YARN
OLDER.pop("rope_type")
ROPES = [  # fields of a config.json, in all places where they have been
    dict(rope_scaling=OLDER, rope_theta=1e4),
    dict(rope_scaling=OLDER, rope_theta=1e4, rope_parameters=NEWER),
    dict(rope_parameters=NEWER, rope_scaling=OLDER | {"beta_fast": None}),
    dict(rope_parameters=NEWER, rope_theta=5e5),
    dict(rope_scaling=dict(type="yarn", factor=4.0), rope_theta=1e4,
         original_max_position_embeddings=64),
    dict(rope_scaling=OLDER | {"original_max_position_embeddings": 9}, rope_theta=1e4,
         original_max_position_embeddings=64),
    dict(rope_scaling=dict(type="linear", factor=4.0), rope_theta=1e4),
    dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)),
    dict(rope_parameters=RAMP),
    dict(rope_theta=5e5), {},
    # ramps within the frequencies (that of 2000 starts elsewhere with 31 turns as beta_fast) and
    # beyond them; scales
    *(dict(rope_parameters=NEWER | {"original_max_position_embeddings": length})
      for length in (2000, 1 << 17)),
    *(dict(rope_parameters=NEWER | more) for more in (
        dict(original_max_position_embeddings=32, factor=8.0, beta_fast=16.0, beta_slow=2.0),
        dict(factor=2.0, rope_theta=100.0, attention_factor=1.3), dict(mscale=0.7),
        dict(mscale=0.7, mscale_all_dim=0.4), dict(mscale_all_dim=0.4),
    )),
]  # fmt: skip


@pytest.mark.parametrize("fields", ROPES, ids=str)
def test_yarn_and_config_places_of_rope_equal_transformers(copy, fields):
    """And the fields of a GGUF, for what it can say."""
    edit(copy / "config.json", **dict(rope_parameters=None) | fields)
    theirs = transformers.AutoConfig.from_pretrained(copy)
    kind = theirs.rope_parameters["rope_type"]
    freqs = theirs.rope_parameters["rope_theta"] ** -(torch.arange(8.0) / 8)
    gain = 1.0
    if kind != "default":
        freqs, gain = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
    angles = torch.outer(torch.arange(50.0), freqs)
    expected = gain * torch.stack((angles.cos(), angles.sin()), -1)
    assert_close(rope_tables(read_config(copy), 50, CPU)[0], expected, 1e-5)
    if (
        kind != "llama3"
        and not {"attention_factor", "mscale", "mscale_all_dim"} & theirs.rope_parameters.keys()
    ):
        metadata = gguf_metadata(theirs) | BYTES
        file = write_gguf(copy / "a.gguf", metadata, parts_of_gguf()[1])
        assert_close(rope_tables(read_config(file), 50, CPU)[0], expected, 1e-5)


GIVEN = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    vocab_size=300, num_key_value_heads=4, max_position_embeddings=999,
)  # fmt: skip
SLIDING = dict(use_sliding_window=True, sliding_window=64)


WINDOWS = [
    SLIDING, SLIDING | dict(max_window_layers=2), SLIDING | dict(max_window_layers=1),
    SLIDING | dict(layer_types=["full_attention"] * 2, max_window_layers=0),
    SLIDING | dict(layer_types=["full_attention", "sliding_attention"]),
]  # fmt: skip
SAID = [
    {}, dict(sliding_window=8), dict(use_sliding_window=False, sliding_window=8),
    dict(rms_norm_eps=1e-3, tie_word_embeddings=True, head_dim=24, num_key_value_heads=2),
    dict(  # of older writers
        pretraining_tp=1, use_cache=True, attention_dropout=0.0, torch_dtype="bfloat16",
        rope_scaling=None, attention_bias=False, mlp_bias=False, _name_or_path="x",
    ),
]  # fmt: skip

LEFT_OUT = dict(num_attention_heads=32, max_position_embeddings=None, num_key_value_heads=None)


@pytest.mark.parametrize("family, fields", [
    *itertools.product(("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe"), [*SAID, LEFT_OUT]),
    *itertools.product(("Qwen2", "Qwen3"), WINDOWS), ("Qwen3Moe", SLIDING),
    ("Llama", SLIDING | dict(max_window_layers=0)), ("Llama", dict(model_type=None)),
    ("Qwen3Moe", dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=48, norm_topk_prob=True)),
    ("Qwen3Moe", dict(num_local_experts=16)), ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=1)),
], ids=str)  # fmt: skip
def test_config_fields_and_defaults(tmp_path, family, fields):
    """Absent fields have transformers' defaults. A window counts where a layer has it."""
    said = {"model_type": family.lower().replace("3moe", "3_moe")} | GIVEN | fields
    given = {name: value for name, value in said.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(given))
    ours = read_config(tmp_path)
    theirs = getattr(transformers, f"{family}Config")(**given)
    windows = {"sliding_attention"} & set(getattr(theirs, "layer_types", None) or [])
    window = None if family == "Llama" else theirs.sliding_window
    if family in ("Qwen2", "Qwen3") and not windows:
        window = None
    experts = {}
    if family in ("Mixtral", "Qwen3Moe"):
        experts = dict(n_experts=theirs.num_experts, experts_per_token=theirs.num_experts_per_tok)
        experts["norm_topk"] = getattr(theirs, "norm_topk_prob", True)
    expected = experts | dict(
        dim=64, hidden_dim=getattr(theirs, "moe_intermediate_size", 96), n_layers=2,
        n_heads=theirs.num_attention_heads,
        vocab_size=300, sliding_window=window,
        n_kv_heads=theirs.num_key_value_heads, norm_eps=theirs.rms_norm_eps,
        rope_theta=theirs.rope_parameters["rope_theta"], max_seq_len=theirs.max_position_embeddings,
        tie_embeddings=theirs.tie_word_embeddings,
        head_dim=getattr(theirs, "head_dim", None) or 64 // theirs.num_attention_heads,
        qkv_bias=family == "Qwen2", qk_norm=family.startswith("Qwen3"),
    )  # fmt: skip
    assert {name: getattr(ours, name) for name in expected} == expected
    assert ours.dtype == torch.bfloat16 or "torch_dtype" not in fields


@pytest.mark.parametrize("fields", [
    {}, dict(no_rope_layer_interval=3), dict(no_rope_layers=[1, 0, 0, 1, 1, 0, 1, 1, 0]),
    dict(use_sliding_window=True, sliding_window=32), dict(tie_word_embeddings=False, rope_theta=1e4),
], ids=str)  # fmt: skip
def test_layers_without_rope(tmp_path, cli, fields):
    """Those of transformers, which has the same defaults. Their positions do not count."""
    given = {"model_type": "smollm3", **GIVEN, "num_hidden_layers": 9, **fields}
    given.pop("max_position_embeddings")
    (tmp_path / "config.json").write_text(json.dumps(given))
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    theirs = transformers.SmolLM3Config(**given, **ids)
    ours = read_config(tmp_path)
    kept = [layer for layer, rotated in enumerate(theirs.no_rope_layers[:9]) if not rotated]
    assert [*ours.nope_layers] == kept != []
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert (ours.max_seq_len, ours.sliding_window) == (1 << 15, theirs.sliding_window)
    tables = rope_tables(ours, 7, CPU)
    for layer, table in enumerate(tables):
        assert torch.equal(table, table[:1].expand_as(table)) == (layer in kept)
    for wrong in ([1] * 8, [1] * 8 + [2], "none", 0):
        edit(tmp_path / "config.json", no_rope_layers=wrong)
        assert_refused(cli("-m", tmp_path, "-p", "a"), "no_rope_layers is", "for each of 9 layers")


@pytest.mark.parametrize("family", ["llama", "qwen 3", "qwen 3 moe"])
def test_biases_of_a_config(tmp_path, cli, family):
    """Which products have one. Those that no layer has are zeros, as in transformers."""
    shape = dict(attention_bias=True, mlp_bias=True) | FAMILIES.get(family, {})
    theirs = hugging_face_model(**shape)
    theirs.save_pretrained(tmp_path)
    ours = assert_equals_transformers(tmp_path, theirs)
    c, in_mlp = ours.config, family == "llama"
    assert (c.qkv_bias, c.wo_bias, c.w13_bias, c.w2_bias) == (True, True, in_mlp, in_mlp)
    projections = ["q", "o", *(("gate", "down") if in_mlp else ())]
    for name in (f"{projection}_proj.bias" for projection in projections):
        tensors = load_file(tmp_path / "model.safetensors")
        last = next(key for key in tensors if key.endswith(name) and ".1." in key)
        spoil_tensors(lambda t, last=last: t.pop(last))(tmp_path)
        assert_refused(cli("-m", tmp_path, "-p", "a"), f"{last} is missing")
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    left_out = ("o_proj.bias", "down_proj.bias")
    spoil_tensors(lambda t: [t.pop(key) for key in [*t] if key.endswith(left_out)])(tmp_path)
    theirs = type(theirs).from_pretrained(tmp_path, dtype=torch.float32)
    assert not theirs.model.layers[1].self_attn.o_proj.bias.any()
    assert not assert_equals_transformers(tmp_path, theirs).config.wo_bias


@pytest.mark.parametrize("family, place", [
    ("gqa", "self_attn.q_proj"), ("gqa", "mlp.down_proj"), ("qwen 2.5", "self_attn.o_proj"),
    ("mistral nemo", "self_attn.v_proj"), ("mistral nemo", "mlp.gate_proj"), ("qwen 3", "mlp.up_proj"),
    ("qwen 3 moe", "mlp.experts.5.up_proj"), ("qwen 3 moe", "mlp.gate"),
    ("mixtral", "block_sparse_moe.experts.0.w2"),
])  # fmt: skip
def test_biases_that_a_family_does_not_have(copy, cli, family, place):
    """They are refused unless they are zeros, whatever the flags say."""
    theirs = hugging_face_model(350, **FAMILIES[family])
    theirs.save_pretrained(copy)
    if family != "gqa":
        spoil_config(mlp_bias=True, attention_bias=family != "qwen 3 moe")(copy)
    name = f"model.layers.1.{place}"
    spoil_tensors(lambda t: t.update({f"{name}.bias": torch.zeros(64)}))(copy)
    assert_equals_transformers(copy, theirs)
    set_one(f"{name}.bias", 1e-3)(copy)
    assert_refused(cli("-m", copy, "-p", "a"), f"{name}.weight has a bias, and should have none")


def test_config_eos_of_both_files(copy):
    edit(copy / "config.json", eos_token_id=[7, 2], bos_token_id=5)
    edit(copy / "generation_config.json", eos_token_id=[2, 9])
    # as in transformers, an id that only config.json names does not end a text
    assert read_config(copy).eos_ids == (2, 9) and read_config(copy).bos_id == 1
    edit(copy / "generation_config.json", bos_token_id=None, eos_token_id=0)
    assert read_config(copy).eos_ids == (0,) and read_config(copy).bos_id == 5
    edit(copy / "generation_config.json", eos_token_id=None)
    assert read_config(copy).eos_ids == (7, 2)
    edit(copy / "generation_config.json", eos_token_id=[2, 9999, -1])
    assert read_config(copy).eos_ids == (2,)
    edit(copy / "generation_config.json", eos_token_id=9999)
    assert read_config(copy).eos_ids == (7, 2), "as if it were absent"
    edit(copy / "generation_config.json", eos_token_id=None)
    edit(copy / "config.json", eos_token_id=7)
    assert Session(copy, device="cpu").eos == {7, 2}, "the tokenizer's own ends a text, too"


def test_other_words_of_a_config(copy):
    """What transformers takes for the same."""
    expected = logits_of(load(copy, device="cpu", dtype="fp32"), [1, 5, 9])
    edit(copy / "config.json", hidden_act="swish", dtype="auto")
    opened = load(copy, device="cpu", dtype="fp32")
    assert torch.equal(logits_of(opened, [1, 5, 9]), expected)
    assert opened.checkpoint.dtype == torch.float32
