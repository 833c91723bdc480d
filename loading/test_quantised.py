"""Tests of quantised safetensors, packed as their formats' documents say."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from bits import others
from fp8 import E4M3
from session import Session
from tests.helpers import (
    FAMILIES,
    INF,
    NAN,
    assert_equals_transformers,
    assert_reads_alike,
    codes_of,
    edit,
    hugging_face_model,
    loaded,
    put,
    set_one,
    spoil_config,
    spoil_tensors,
)


def words(codes: torch.Tensor, bits: int = 4, order=None) -> torch.Tensor:
    """Neighbouring codes of a row to an int32, the first in its lowest bits."""
    count = 32 // bits
    together = codes.long().unflatten(1, (-1, count))
    if order:
        together = together[..., order]
    return (together << bits * torch.arange(count)).sum(-1).to(torch.int32)


def pack_awq(N: int, K: int) -> tuple[dict, torch.Tensor]:
    codes, scale, zero, values = codes_of(N, K, 64, range(16))
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    qweight, qzeros = (words(t.t(), order=order) for t in (codes, zero))
    return dict(qweight=qweight, qzeros=qzeros, scales=scale.t()), values


def pack_gptq(N: int, K: int, group: int = 32, less: int = 1, zeros=range(16), bits: int = 4):
    """less: 1 in version 1, subtracted from whole words of zero points. group: 0 for one a row and
    no indices."""
    codes, scale, zero, values = codes_of(N, K, group or K, zeros, bits=bits)
    found = dict(qweight=words(codes, bits).t(), scales=scale.t(), bias=torch.zeros(N))
    ones = sum(1 << place for place in range(0, 32, bits))
    found["qzeros"] = words(zero.t(), bits) - less * ones
    if group:
        found["g_idx"] = torch.arange(K, dtype=torch.int32) // group
    return found, values


def pack_w4a16(N: int, K: int, symmetric: bool = True) -> tuple[dict, torch.Tensor]:
    zeros, dtype = ([8], torch.float16) if symmetric else (range(16), torch.bfloat16)
    codes, scale, zero, values = codes_of(N, K, 128, zeros, dtype)
    found = dict(weight_packed=words(codes), weight_scale=scale, weight_shape=torch.tensor([N, K]))
    return found | ({} if symmetric else {"weight_zero_point": words(zero.t()).t()}), values


def pack_fp8(scale: str, rows: int, columns: int, N: int, K: int) -> tuple[dict, torch.Tensor]:
    """rows, columns: of the weights that share a scale; 0: all of them."""
    weight = (torch.randn(N, K) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    one, (rows, columns) = not rows, (rows or N, columns or K)
    factors = torch.rand(-(-N // rows), -(-K // columns)) * 0.01
    spread = factors.repeat_interleave(rows, 0)[:N].repeat_interleave(columns, 1)[:, :K]
    stored = {scale: factors[0, 0] if one else factors, "input_scale": torch.ones(1)}
    return stored | {"weight": weight}, weight.float() * spread


def compressed_tensors(form: str, **weights) -> dict:
    usual = dict(actorder=None, block_structure=None, dynamic=False, observer="minmax")
    group = dict(targets=["Linear"], input_activations=None, output_activations=None)
    group["weights"] = usual | weights
    return dict(quant_method="compressed-tensors", format=form, config_groups={"group_0": group})


GPTQ = dict(quant_method="gptq", bits=4, group_size=32, desc_act=False)
PACKED = partial(
    compressed_tensors, "pack-quantized", num_bits=4, type="int", strategy="group", group_size=128
)
FLOAT_8 = partial(compressed_tensors, "float-quantized", num_bits=8, type="float", symmetric=True)


QUANTISED = {  # quantization_config, how a matrix is packed, the format that holds it
    "AWQ": (dict(quant_method="awq", bits=4, group_size=64, version="gemm"), pack_awq, others.WITH_ZEROS[64]),
    "GPTQ": (GPTQ, pack_gptq, others.WITH_ZEROS[32]),
    "GPTQ, version 2": (GPTQ | {"checkpoint_format": "gptq_v2"}, partial(pack_gptq, less=0), others.WITH_ZEROS[32]),
    "GPTQ, not of version 1": (GPTQ, partial(pack_gptq, less=0, zeros=[8]), others.WITH_ZEROS[32]),
    "GPTQ, not of version 2": (
        GPTQ | {"checkpoint_format": "gptq_v2"}, partial(pack_gptq, zeros=[8]), others.WITH_ZEROS[32],
    ),
    "GPTQ, a group a row": (GPTQ | {"group_size": -1}, partial(pack_gptq, group=0), others.WITH_ZEROS[128]),
    "GPTQ, 8 bits": (
        GPTQ | dict(bits=8, group_size=128, dynamic={"-:.*lm_head": {}}),
        partial(pack_gptq, group=128, zeros=[128], bits=8), others.Q8_0,
    ),
    "AutoRound": (
        GPTQ | dict(quant_method="auto-round", packing_format="auto_round:auto_gptq"), pack_gptq, others.WITH_ZEROS[32],
    ),
    "AutoRound as AWQ": (
        dict(quant_method="auto-round", bits=4, group_size=64, packing_format="auto_round:auto_awq"), pack_awq,
        others.WITH_ZEROS[64],
    ),
    "W4A16": (PACKED(), pack_w4a16, others.WITH_ZEROS[128]),
    "W4A16 with zero points": (
        PACKED(symmetric=False), partial(pack_w4a16, symmetric=False), others.WITH_ZEROS[128],
    ),
    "FP8, a scale each": (FLOAT_8(strategy="tensor"), partial(pack_fp8, "weight_scale", 0, 0), E4M3),
    "FP8, a scale a row": (FLOAT_8(strategy="channel"), partial(pack_fp8, "weight_scale", 1, 0), E4M3),
    "FP8, modelopt": (
        dict(quant_method="modelopt", quant_algo="FP8", ignore=["lm_head"]), partial(pack_fp8, "weight_scale", 0, 0),
        E4M3,
    ),
    "FP8, fbgemm": (dict(quant_method="fbgemm_fp8"), partial(pack_fp8, "weight_scale", 1, 0), E4M3),
    "FP8, blocks": (
        dict(quant_method="fp8", weight_block_size=[128, 128]), partial(pack_fp8, "weight_scale_inv", 128, 128),
        others.E4M3_128,
    ),
}  # fmt: skip


ALSO_SAID = {  # what the writer of each method says besides, as published checkpoints have it
    "awq": dict(
        zero_point=True, backend="autoawq", do_fuse=False, exllama_config=None,
        fuse_max_seq_len=None, modules_to_fuse=None, modules_to_not_convert=None,
    ),
    "gptq": dict(
        damp_percent=0.1, sym=True, true_sequential=True, static_groups=False, lm_head=False,
        pack_dtype="int32", meta={"quantizer": ["gptqmodel:5.0.0"]}, model_name_or_path=None,
        checkpoint_format="gptq",
    ),
    "compressed-tensors": dict(
        global_compression_ratio=1.5, ignore=["lm_head"], kv_cache_scheme=None, sparsity_config={},
        quantization_status="compressed", transform_config={}, version="0.11.0",
    ),
    "auto-round": dict(
        data_type="int", iters=200, autoround_version="0.8.0", extra_config={"lm_head": {"bits": 16}},
    ),
    "fp8": dict(activation_scheme="dynamic", fmt="e4m3", modules_to_not_convert=["lm_head"]),
    "modelopt": dict(kv_cache_scheme=None, producer={"name": "modelopt", "version": "0.33"}),
    "fbgemm_fp8": dict(activation_scale_ub=1200.0, modules_to_not_convert=["lm_head"]),
}  # fmt: skip


def write_quantised(folder: Path, how: str, **more):
    """A checkpoint in place of the tiny one; returns the model of transformers with the weights
    that it stands for."""
    about, pack, _ = QUANTISED[how]
    shape = dict(num_key_value_heads=2, hidden_size=128, intermediate_size=256)
    theirs = hugging_face_model(350, **shape | more).half()
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    decoded = {name: tensor.float() for name, tensor in tensors.items()}
    for name in [name for name in tensors if re.search(r"(_proj|\.w[123])\.weight$", name)]:
        stored, decoded[name] = pack(*tensors.pop(name).shape)
        stem = name.removesuffix("weight")
        tensors = {stem + key: value.contiguous() for key, value in stored.items()} | tensors
    save_file(decoded, folder / "model.safetensors", {"format": "pt"})
    theirs = type(theirs).from_pretrained(folder, dtype=torch.float32)
    (folder / "model.safetensors").unlink()  # not overwritten, since it may be mapped
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = ALSO_SAID[about["quant_method"]] | about
    edit(folder / "config.json", quantization_config=said)
    return theirs


@pytest.mark.parametrize("family, how", [
    *((None, how) for how in QUANTISED), ("mixtral", "AWQ"), ("qwen 3 moe", "GPTQ"), ("mixtral", "W4A16"),
    ("qwen 3 moe", "FP8, blocks"), ("qwen 2.5", "GPTQ"), ("granite code", "GPTQ"), ("phi 4", "GPTQ"), ("phi 4", "AWQ"),
    ("granite 3", "GPTQ"), ("seed-oss", "FP8, a scale a row"), ("ministral 3", "W4A16"),
    ("smollm 3", "AWQ"),
])  # fmt: skip
def test_quantised_safetensors_equal_transformers(copy, family, how, monkeypatch):
    """Matrices bit for bit, also as ranks have them. A router is not quantised.
    GPTQ writes biases of zero for every matrix, but for those that the family has."""
    fields = FAMILIES[family] | dict(moe_intermediate_size=256, head_dim=32) if family else {}
    theirs, format = write_quantised(copy, how, **fields), QUANTISED[how][2]
    ours, exact = assert_equals_transformers(copy, theirs), theirs.model.layers[1].mlp
    divides = family or format.group <= 64
    weights = assert_reads_alike(ours, monkeypatch) if divides else loaded(ours)
    # which is slow there
    on_cpu = None if format in (others.E4M3_128, others.Q8_0) else format
    layer = weights.layers[1]
    assert {m.format for m in (layer.wqkv, layer.wo, layer.w13, layer.w2)} == {format}
    assert not weights.output.format and ours.weights.layers[1].w2.format is on_cpu
    if hasattr(exact, "experts"):
        assert layer.router.format is None and torch.equal(layer.router.data, exact.gate.weight)
        gate_up, down = exact.experts.gate_up_proj, exact.experts.down_proj
    elif family == "phi 4":
        gate_up, down = exact.gate_up_proj.weight[None], exact.down_proj.weight[None]
    else:
        gate_up = torch.cat((exact.gate_proj.weight, exact.up_proj.weight))[None]
        down = exact.down_proj.weight[None]
    factor = dict(ours.config.factors).get("w2", 1.0)  # in the scales of rows, where it is rounded
    error = (layer.w2.dense() - factor * down.flatten(0, 1)).abs().max()
    assert error <= (0 if factor == 1 else 1e-6)
    in_turn = gate_up.unflatten(1, (2, -1)).transpose(1, 2)
    assert torch.equal(layer.w13.dense(), in_turn.flatten(0, 2))
    method, *_ = re.split("[, ]", how)
    name = {"AutoRound": "GPTQ", "AutoRound as AWQ": "AWQ"}.get(how, method)
    kept = f"(decoded from {name})"
    if on_cpu:
        kept = f"with {format.name} matrices ({name} in the file"
    assert Session.types(SimpleNamespace(model=ours)).startswith(f"fp32 {kept}")


@pytest.mark.parametrize("how, file, said", [
    ("FP8, modelopt", "hf_quant_config.json",
     {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}),
    ("GPTQ", "quantize_config.json", dict(bits=4, group_size=32, desc_act=False, sym=True)),
    ("AWQ", "quant_config.json",
     dict(zero_point=True, q_group_size=64, w_bit=4, version="GEMM")),
])  # fmt: skip
def test_quantisation_that_stands_in_a_file_of_its_own(copy, how, file, said):
    """As in the first folders of each writer; that of GPTQ also called its weights otherwise."""
    theirs = write_quantised(copy, how)
    edit(copy / "config.json", quantization_config=None)
    (copy / file).write_text(json.dumps(said))
    if how == "GPTQ":
        (copy / "model.safetensors").rename(copy / "gptq_model-4bit-32g.safetensors")
    assert_equals_transformers(copy, theirs)


def test_a_joined_matrix_that_is_quantised_in_part(copy):
    theirs = write_quantised(copy, "AWQ")
    stem = "model.layers.0.self_attn.v_proj."
    weight = theirs.model.layers[0].self_attn.v_proj.weight.data.contiguous()
    tensors = load_file(copy / "model.safetensors")
    tensors = {name: t for name, t in tensors.items() if not name.startswith(stem)}
    save_file(tensors | {f"{stem}weight": weight}, copy / "model.safetensors")
    ours = assert_equals_transformers(copy, theirs)
    assert not ours.weights.layers[0].wqkv.format and ours.weights.layers[1].wqkv.format


def config_with(how: str, **fields) -> tuple:
    """A checkpoint of QUANTISED whose config.json says something else."""
    return how, spoil_config(quantization_config=QUANTISED[how][0] | fields)


PROJ = "model.layers.0.mlp.up_proj."
BAD_QUANTISED = {  # a checkpoint, how it is changed, what the line says
    "3 bits": (*config_with("GPTQ", bits=3), "quantised as gptq with bits 3: take"),
    "modelopt": (*config_with("FP8, modelopt", quant_algo="NVFP4"), "quantised as modelopt with quant_algo 'NVFP4'"),
    **{f"zero points of 8 bits, stored as {x:x}": (
        "GPTQ, 8 bits", put(f"{PROJ}qzeros", lambda t, x=x: t * 0 + x), "that 8 bits cannot hold: take",
    ) for x in (0, -0x01010102)},
    "dynamic": (*config_with("GPTQ", dynamic={"+:.*up_proj": {"bits": 8}}), "as gptq with dynamic settings: take"),
    "mixed groups": (
        "W4A16", spoil_config(quantization_config=PACKED() | {"config_groups": {
            "a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}}}),
        "several kinds of config_groups: take",
    ),
    "transforms": (
        "W4A16", spoil_config(quantization_config=PACKED() | {"transform_config": {"config_groups": {"R4": {}}}}),
        "as pack-quantized with transforms: take",
    ),
    "zero points of another AutoRound": (
        *config_with("AutoRound", packing_format="auto_round:gptq"), "quantised as auto-round with sym None: take",
    ),
    "layers of other bits": (
        *config_with("AutoRound", extra_config={"a": {"bits": 8}}), "as auto-round with layers of several kinds: take",
    ),
    "gemv": (*config_with("AWQ", version="gemv"), "awq with version 'gemv'"),
    "act-order": ("GPTQ", put(f"{PROJ}g_idx", lambda t: t.flip(0)), f"{PROJ}weight has columns in act-order"),
    "bias": ("GPTQ", set_one(f"{PROJ}bias", 1), "up_proj.weight has a bias"),
    "odd groups": (*config_with("GPTQ", group_size=48), "group_size is 48; it must be"),
    "uneven groups": (*config_with("GPTQ", group_size=512), "8 rows and 512 columns"),
    "codes of another shape": ("GPTQ", put(f"{PROJ}qweight", lambda t: t[1:]), "is [15, 256], expected"),
    "codes of another type": ("AWQ", put(f"{PROJ}qweight", lambda t: t.float()), " in float32, expected"),
    "no scales": ("W4A16", spoil_tensors(lambda t: t.pop(f"{PROJ}weight_scale")), "up_proj.weight_scale is missing"),
    **{f"{how}, a scale of {x}": (how, set_one(PROJ + key, x), "up_proj.", "has a scale that is NaN or infinite")
       for how, key in (("AWQ", "scales"), ("GPTQ", "scales"), ("W4A16", "weight_scale"))
       for x in (NAN, INF)},
    "NaN codes": (
        "FP8, blocks", put(f"{PROJ}weight", lambda t: t.view(torch.int8).fill_(127).view(t.dtype)), "has codes of NaN"
    ),
    "other blocks": (*config_with("FP8, blocks", weight_block_size=[64, 64]), "as fp8 with weight_block_size [64, 64]"),
    "8 bits": (*config_with("W4A16", **PACKED(num_bits=8)), "pack-quantized with num_bits 8"),
    "another method": (*config_with("AWQ", quant_method="exl3"), "as exl3, which is not supported"),
    "int8": (*config_with("W4A16", format="int-quantized"), "as int-quantized, which is not supported"),
}  # fmt: skip
