"""Tests of GGUF files by llama.cpp's package gguf, whose decoding is the reference."""

import functools
import itertools
import json
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy
import pytest
import tokenizers
import torch
import transformers

import kernels
from bits import others
from dev.checkpoints import sentencepiece_metadata, write_gguf
from formats import Matrix
from fp8 import E4M3
from loading import checkpoint, quantised
from loading import gguf as ggml
from loading import tensors as tensors_module
from loading.checkpoint import load, open_tokenizer, read_config, save
from loading.hub import local_checkpoint, pick_gguf
from loading.names import layer_tensors
from loading.tensors import ALL, pieces_of
from sampling import Sampling
from tests.helpers import (
    DEVICE,
    FAMILIES,
    FILE_FORMATS,
    HERE,
    INF,
    NAN,
    ON_GPU,
    ONE_UNIT,
    POINTER,
    RAMP,
    assert_close,
    assert_equals_transformers,
    assert_reads_alike,
    assert_refused,
    codes_of,
    conversation,
    encode_after,
    hugging_face_model,
    loaded,
    loader_of,
    logits_of,
    nmse,
    randn,
    read_gguf,
    set_hub,
    train_byte_pairs,
)
from tokenizer import Tokenizer

QUANTS = {number: kind for number, kind in ggml.TYPES.items() if kind.split}
# in a block: how many, if not one, and where they begin, if not at its start
HALVES = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2, "Q2_K": 2}
HALVES_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}
ALPHABET = tokenizers.pre_tokenizers.ByteLevel.alphabet()
BYTES = {  # a vocabulary of one token a byte
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*ALPHABET, "ab", "<|im_end|>", "</s>"],
    "tokenizer.ggml.token_type": [1] * 257 + [3, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 258,
}

# what llama.cpp's convert_hf_to_gguf.py writes for a model of transformers, and its fields there
GGUF_KEYS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.key_length": "head_dim",
    "attention.head_count_kv": "num_key_value_heads", "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size", "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}  # fmt: skip
SCALING_KEYS = {
    "type": "rope_type", "factor": "factor", "yarn_beta_fast": "beta_fast",
    "original_context_length": "original_max_position_embeddings", "yarn_beta_slow": "beta_slow",
    "yarn_log_multiplier": "mscale_all_dim",
}  # fmt: skip


def gguf_metadata(config) -> dict:
    said = {key: getattr(config, name, None) for key, name in GGUF_KEYS.items()}
    rope = config.rope_parameters
    said["rope.freq_base"] = rope["rope_theta"]
    if rope["rope_type"] in ("linear", "yarn"):
        said |= {f"rope.scaling.{key}": rope.get(name) for key, name in SCALING_KEYS.items()}
        said["attention.temperature_scale"] = rope.get("llama_4_scaling_beta")
    arch = gguf_arch(config)
    found = {f"{arch}.{key}": value for key, value in said.items() if value is not None}
    return {"general.architecture": arch} | found


def random_blocks(number: int, N: int, K: int, std: float = 0.1) -> torch.Tensor:
    """Rows of blocks of random bits, but for scales that give the values this deviation."""
    kind, count = ggml.TYPES[number], HALVES.get(ggml.TYPES[number].name, 1)
    blocks = torch.randint(256, (N, K // kind.block, kind.nbytes), dtype=torch.uint8)
    start, scales = HALVES_AT.get(kind.name, 0), torch.randn(N, K // kind.block, count)
    for size in (1, None):
        size = size or std / numpy.std(dequantised(number, blocks.view(N, -1)).numpy())
        blocks[..., start : start + 2 * count] = (size * scales).half().view(torch.uint8)
    blocks[0, 0, start + 2 : start + 2 * count] = 0  # no minimum
    return blocks.view(N, -1)


def dequantised(number: int, raw: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(number)))


def expert_by_expert(model) -> dict:
    """The parameters of a model of transformers by name; w1 and w3 of experts are two of them, as
    in files."""
    found = {}
    for name, value in model.state_dict().items():
        if name.endswith("gate_up_proj"):
            for part, of_part in zip(("gate", "up"), value.chunk(2, 1)):
                found[name.replace("gate_up", part) + ".weight"] = of_part
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = value
        else:
            found[name] = value
    return found


def gguf_arch(config) -> str:
    archs = dict(mixtral="llama", mistral="llama", ministral3="mistral3", qwen3_moe="qwen3moe")
    return archs.get(config.model_type, config.model_type)


def gguf_tensors(model, kinds=()) -> dict:
    """A file's tensors: those of a model, but random blocks of the types with these numbers for
    matrices, in turn."""
    c, found, kinds = model.config, {}, itertools.cycle(kinds)
    numbers = {arch: number for number, arch in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[gguf_arch(c)], 99)
    for name, value in expert_by_expert(model).items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        stored = value
        if value.dim() > 1 and not name.endswith("mlp.gate.weight"):
            number = next(kinds, None)
            if number is not None:
                raw = random_blocks(number, value.shape[:-1].numel(), value.shape[-1])
                stored = number, raw.view(*value.shape[:-1], -1)
        found[names.get_name(name, (".weight", ".bias"))] = stored
    # the plain frequencies over those of transformers
    if c.rope_parameters["rope_type"] == "llama3":
        scaled = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](c, "cpu")[0]
        plain = c.rope_parameters["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
        found["rope_freqs.weight"] = plain / scaled
    return found


@functools.cache
def parts_of_gguf() -> tuple[dict, dict]:
    model = hugging_face_model(259, **FAMILIES["gqa"], eos_token_id=258, bos_token_id=None)
    return gguf_metadata(model.config) | BYTES, gguf_tensors(model.half())


@pytest.mark.parametrize("number", QUANTS, ids=lambda number: QUANTS[number].name)
def test_gguf_types_are_decoded(number):
    """Every bit. Scales that are not finite are refused."""
    kind, raw = QUANTS[number], random_blocks(number, 5, 768, std=1.0)
    assert kind.name == gguf.GGMLQuantizationType(number).name
    assert torch.equal(kind.read(raw).decoded(), dequantised(number, raw))
    if kind.name.endswith("K"):
        raw[1, 4:16] = raw[1, 192:208] = 255  # scales of groups
    start = HALVES_AT.get(kind.name, 0)
    for bad, half in itertools.product((NAN, INF), range(HALVES.get(kind.name, 1))):
        spoiled, at = raw.clone(), start + 2 * half
        spoiled[1, at : at + 2] = torch.tensor([bad]).half().view(torch.uint8)
        with pytest.raises(ValueError, match="a scale that is NaN or infinite"):
            quantised.checked(kind.read(spoiled))


def test_gguf_says_how_to_sample(tmp_path):
    """As llama.cpp's converter writes it since November 2025; flags override it, and what is saved
    says the same."""
    said = dict(temp=0.5, top_k=7, top_p=0.75, min_p=0.25, penalty_repeat=1.25, xtc_threshold=0.1)
    metadata, tensors = parts_of_gguf()
    metadata = metadata | {f"general.sampling.{name}": value for name, value in said.items()}
    file = write_gguf(tmp_path / "a.gguf", metadata, tensors)
    expected = dict(temp=0.5, top_k=7, top_p=0.75, min_p=0.25, repeat_penalty=1.25)
    saved = save(file, tmp_path / "saved", format="e4m3").parent
    for path in (file, saved):
        opened = checkpoint.Checkpoint(path)
        assert opened.sampling() == expected | dict(repeat_last_n=64)
        assert opened.sampling({"top_k", "repeat_last_n"}).keys() == expected.keys() - {"top_k"}
    model = load(file, device="cpu", sampling=dict(top_k=9))
    assert model.sampling == Sampling(**expected | dict(top_k=9, repeat_last_n=64))
    written = write_gguf(file, metadata | {"general.sampling.penalty_last_n": 9}, tensors)
    assert checkpoint.Checkpoint(written).sampling()["repeat_last_n"] == 9


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gguf_with_a_token_that_is_not_utf_8(tmp_path, tiny, kind):
    """As in llama.cpp, texts are what they were, and it may be written."""
    metadata = BYTES if kind == "gpt2" else sentencepiece_metadata(tiny / "tokenizer.model")
    tokens = [*metadata["tokenizer.ggml.tokens"]]
    tokens[-5] = "moved"
    about = {"general.architecture": "llama"} | metadata | {"tokenizer.ggml.tokens": tokens}
    file = write_gguf(tmp_path / "a.gguf", about, {})
    expected = open_tokenizer(file).encode("a sad bag")
    raw = file.read_bytes()
    assert raw.count(b"moved") == 1
    file.write_bytes(raw.replace(b"moved", b"\xffoved"))
    tokenizer = open_tokenizer(file)
    assert tokenizer.encode("a sad bag") == expected
    assert "ov" in tokenizer.decode([len(tokens) - 5])


def test_other_gguf_types_are_named():
    kinds = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert {n: name for n, name in kinds.items() if n not in ggml.TYPES} == ggml.OTHER_TYPES


def stored_in(format, N: int, K: int):
    """Blocks of each kind that a format keeps exactly, and what they stand for."""
    if format in others.EXACT:
        for number in (n for n, kind in QUANTS.items() if kind.name in others.EXACT[format]):
            raw = random_blocks(number, N, K)
            exact = dequantised(number, raw).to(DEVICE)
            yield QUANTS[number].read(raw.to(DEVICE)), exact
        return
    if format is others.E4M3_128:
        codes, zero = E4M3.round(torch.randn(N, K) * 100), None
        scale = torch.rand(N, K // 128) + 0.1
        values = (E4M3.floats(codes).unflatten(1, (-1, 128)) * scale[..., None]).flatten(1)
    else:
        codes, scale, zero, values = codes_of(N, K, format.group)
    found = (codes.to(torch.int8), scale.float(), zero)
    codes, scale, zero = (None if t is None else t.to(DEVICE) for t in found)
    yield others.Quantised(codes, scale, zero=zero), values.to(DEVICE)


@pytest.mark.parametrize("format", FILE_FORMATS, ids=lambda format: format.name)
def test_products_with_gguf_and_safetensors_formats(format):
    """Matrices bit for bit; the kernels' products with one token, a few and a prompt, and torch's
    own on a CPU."""
    N, K, errors = 48, 768, {}
    # a GPU adds up a token's products in half precision, whose error varies
    drawn = [kind for _ in range(8 if ON_GPU else 1) for kind in enumerate(stored_in(format, N, K))]
    halves, bf16 = torch.float16, torch.bfloat16
    for kind, (blocks, exact) in drawn:
        w = Matrix(format.empty(N, K, DEVICE), format)
        format.write(blocks, w.tensors)
        assert torch.equal(w.dense(), exact)
        for T, dtype in ((1, halves), (1, bf16), (3, halves), (20, halves)):
            x = randn(T, K, dtype=dtype)
            y = kernels.linear_add(x, w, torch.zeros(T, N, dtype=dtype, device=DEVICE))
            errors.setdefault((kind, T, dtype), []).append(nmse(y, x.float() @ exact.t()))
    for (kind, T, dtype), found in errors.items():
        assert sum(found) / len(found) < 2 * ONE_UNIT[dtype], (kind, T, found)
    if laid_out := format.cpu_layout(tuple(t.cpu() for t in w.tensors)):
        x = torch.randn(1, K).bfloat16()
        y = format.cpu_layout_linear(x, laid_out)
        assert nmse(y, x.float() @ exact.cpu().t()) < 2 * ONE_UNIT[torch.bfloat16]


@pytest.mark.parametrize("kinds, columns, most_bits, name", [
    ("Q4_K", 512, 8, "q4_k"), ("Q5_K", 512, 8, "q6_k"), ("Q4_K Q6_K", 512, 8, "q6_k"),
    ("Q4_0 Q5_0", 96, 8, "q8_0"),
    ("Q4_0 Q4_1", 96, 8, "q8_1"), ("Q4_0 Q6_K", 512, 8, None), ("Q6_K F16", 512, 8, None),
    ("Q6_K", 384, 8, None), ("IQ4_NL", 96, 8, "q8_0"), ("IQ4_XS Q5_K", 512, 8, "q8_k"),
    ("Q4_K", 512, 4, "q4_k"), ("Q6_K", 512, 4, None), ("Q3_K Q6_K", 512, 8, "q6_k"), ("Q2_K", 512, 8, "q8_16"),
    ("Q2_K Q3_K Q6_K", 512, 8, "q8_16"), ("Q6_K IQ4_XS", 512, 8, "q8_16"),
])  # fmt: skip
def test_format_of_joined_matrices(kinds, columns, most_bits, name):
    """None: they are decoded, as those of more bits are on a CPU, and those cut in the middle of a
    block."""
    schemes = {kind.name: kind.scheme for kind in QUANTS.values()}
    found = quantised.format_for({schemes.get(kind) for kind in kinds.split()}, columns, most_bits)
    assert (found and found.name) == name


OF_BYTES = dict(eos_token_id=258, bos_token_id=None)
WIDE = dict(hidden_size=256, intermediate_size=512, moe_intermediate_size=512, head_dim=64)


def give_blocks(theirs, tensors: dict) -> None:
    """Give a model of transformers, which reads no files with experts, what a file's tensors stand
    for. In files of the llamas the rows of q and k are in another order: neighbours are a pair."""
    for stored, parameters in zip(tensors.values(), expert_by_expert(theirs).values(), strict=True):
        if isinstance(stored, tuple):
            parameters.copy_(dequantised(*stored).view(parameters.shape))
    if gguf_arch(theirs.config) != "llama":
        return
    for layer in theirs.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            heads = linear.weight.data.unflatten(0, (-1, 32, 2))
            linear.weight.data = heads.transpose(1, 2).flatten(0, 2)


@pytest.mark.parametrize("family", [
    "llama 3.2", "granite code", "qwen 2.5, tied, longer", "qwen 3", "mixtral", "qwen 3 moe",
])  # fmt: skip
def test_gguf_models_equal_transformers(tmp_path, cli, family, monkeypatch):
    """Of all types, mixed also among wq, wk and wv; whole and by ranks, a few rows at a time."""
    monkeypatch.setattr(tensors_module, "AT_ONCE", 50 * 256)
    theirs = hugging_face_model(259, **FAMILIES[family] | WIDE | OF_BYTES)
    kinds = random.sample([number for number in QUANTS if number != 12], len(QUANTS) - 1)
    # Q4_K, of the second layer's wo: of each of its blocks of 256, a rank would have a half
    kinds.insert(1, 12)
    metadata, tensors = gguf_metadata(theirs.config) | BYTES, gguf_tensors(theirs, kinds)
    file = write_gguf(tmp_path / "a.gguf", metadata, tensors)
    has_experts = FAMILIES[family].get("num_experts_per_tok")
    if has_experts:
        give_blocks(theirs, tensors)
    else:
        read_gguf(theirs, file)
    ours = assert_equals_transformers(file, theirs)
    every_type = "IQ4_NL, IQ4_XS, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K and Q8_0"
    assert ours.checkpoint.quantised == every_type
    assert (ours.config.dtype, ours.config.eos_ids) == (torch.bfloat16, (258, 257))
    whole, decoded = loaded(ours), loaded(ours, None)
    for one, other in zip(whole.matrices, decoded.matrices, strict=True):
        assert torch.equal(one.dense(), other.dense()) and not other.format, one.format
    assert all(layer.wo.format and layer.w2.format for layer in whole.layers)
    if ours.config.n_kv_heads > 1:
        assert_reads_alike(ours, monkeypatch)
    if has_experts:
        name = "blk.1.ffn_down_exps.weight"
        count, (number, raw) = ours.config.n_experts, tensors[name]
        monkeypatch.setattr(tensors_module, "AT_ONCE", 3 * 256 * 512)
        loader = loader_of(ours)
        for t in layer_tensors(ours.config)[-2:]:
            asked = loader.rows(t), ALL, tensors_module.AT_ONCE
            stored = loader.checkpoint.tensors[t.name]
            pieces = [piece for one in stored for piece in pieces_of(one, one.made, *asked)]
            at_once = -(-count // 3)
            assert len(pieces) == len(t.parts) * at_once, "three experts are converted at once"
        for one, other in zip(loaded(ours).matrices, whole.matrices, strict=True):
            assert torch.equal(one.dense(), other.dense())
        write_gguf(file, metadata, tensors | {name: (number, raw[:-1])})
        few = f"{name} is [{count - 1}, 256, 512], expected [{count}, 256, 512]"
        assert_refused(cli("-m", file, "-p", "a"), few)


OTHERS = ["phi 4", "granite 3", "seed-oss", "smollm 3", "ministral 3", "mistral nemo"]


def write_family(file: Path, family: str, number: int | None = None):
    """Write a GGUF file as llama.cpp's converter does, with matrices in fp32 or in the type of this
    number. Returns transformers' model of the same values."""
    sizes = dict(intermediate_size=128, eos_token_id=258)
    if family not in ("phi 4", "qwen 2.5"):  # which have no other in llama.cpp
        sizes["head_dim"] = 32
    theirs = hugging_face_model(259, **FAMILIES[family] | sizes)
    arch = gguf_arch(theirs.config)
    in_pairs = {}
    if arch in ("llama", "granite", "smollm3", "mistral3"):
        in_pairs["q_proj"] = theirs.config.num_attention_heads
        in_pairs["k_proj"] = theirs.config.num_key_value_heads
    numbers = {arch: number for number, arch in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[arch], 9)
    tensors = gguf_tensors(theirs)
    for name, value in theirs.named_parameters():
        if value.dim() < 2:
            continue
        raw = value.detach().clone()
        if number:
            kind = gguf.GGMLQuantizationType(number)
            raw = torch.from_numpy(gguf.quants.quantize(raw.numpy(), kind))
            value.data.copy_(dequantised(number, raw))
        heads = in_pairs.get(name.split(".")[-2])
        if heads:
            heads = raw.unflatten(0, (heads, 2, -1))
            raw = heads.transpose(1, 2).flatten(0, 2).contiguous()
        tensors[names.get_name(name, (".weight",))] = (number, raw) if number else raw
    write_gguf(file, gguf_metadata(theirs.config) | BYTES, tensors)
    return theirs


@pytest.mark.parametrize("family", OTHERS)
def test_gguf_of_families_that_transformers_does_not_read(tmp_path, family, monkeypatch):
    """As llama.cpp's converter writes them, in blocks of eight bits; by ranks, and saved."""
    theirs = write_family(tmp_path / "a.gguf", family, int(gguf.GGMLQuantizationType.Q8_0))
    ours = assert_equals_transformers(tmp_path / "a.gguf", theirs)
    whole = assert_reads_alike(ours, monkeypatch)
    assert {layer.wqkv.format for layer in whole.layers} == {others.Q8_0}


LLAMA_CPP = """
import json, os, socket, sys
import xllamacpp

found = []
for file, prompts in json.load(sys.stdin):
    options = xllamacpp.CommonParams()
    options.model.path = file
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        options.port = free.getsockname()[1]
    options.n_ctx = 256
    options.verbosity = -1
    options.fit_params = options.warmup = False
    options.cpuparams.n_threads = 1
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(options)
    asked = dict(n_predict=1, temperature=0, n_probs=8, cache_prompt=False)
    answers = [server.handle_completions(asked | {"prompt": prompt}) for prompt in prompts]
    found.append([answer["choices"][0]["logprobs"] for answer in answers])
print("\\n" + json.dumps(found), flush=True)
os._exit(0)
"""


def test_families_equal_llama_cpp(tmp_path):
    """The eight most probable tokens after prompts of many lengths. It rounds activations."""
    pytest.importorskip("xllamacpp")
    families = ["gqa", "qwen 2.5", "qwen 3", *OTHERS]
    files = [tmp_path / f"{family}.gguf" for family in families]
    for file, family in zip(files, families):
        write_family(file, family)
    ids = torch.randint(250, (110,)).tolist()
    lengths = range(2, len(ids), 3)
    asked = json.dumps([(str(file), [ids[:length] for length in lengths]) for file in files])
    command = [sys.executable, "-c", LLAMA_CPP]
    said = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    found = json.loads(said.stdout.splitlines()[-1])
    for family, file, answers in zip(families, files, found, strict=True):
        ours = logits_of(load(file, dtype="fp32", device="cpu"), ids).log_softmax(1)
        errors = []
        for row, said in zip(ours[[length - 1 for length in lengths]], answers):
            if said:  # a token that is no text has none
                best = said["content"][0]["top_logprobs"]
                values = torch.tensor([each["logprob"] for each in best])
                same = [row[[each["id"] for each in best]], row.topk(8).values]
                errors.append(max((one - values).abs().max() for one in same))
        assert len(errors) > len(lengths) // 3
        assert torch.stack(errors).median() < 0.06, (family, errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gguf_of_floats_is_as_any_checkpoint(tmp_path, cli, dtype):
    """It may be encoded, and saved so, with its tokenizer and its scaling of RoPE."""
    theirs = hugging_face_model(259, num_key_value_heads=2, rope_parameters=RAMP, **OF_BYTES)
    for parameter in theirs.parameters():
        parameter.data = parameter.to(dtype).float()
    # norms and factors are in fp32
    tensors = {n: t.to(dtype) if t.dim() == 2 else t for n, t in gguf_tensors(theirs).items()}
    template = {"tokenizer.chat_template": "{{ messages[0].content }}</s>"}
    metadata = gguf_metadata(theirs.config) | BYTES | template
    file = write_gguf(tmp_path / "a.gguf", metadata, tensors)
    read_gguf(theirs, file)
    theirs.save_pretrained(tmp_path / "original")
    plain, options = assert_equals_transformers(file, theirs), dict(dtype="fp32", device="cpu")
    assert plain.checkpoint.dtype == dtype and plain.checkpoint.quantised == ""
    paths = file, tmp_path / "original"
    encoded, original = (load(path, format="e4m3", **options) for path in paths)
    codes, same = (model.weights.layers[1].wqkv.tensors[0] for model in (encoded, original))
    assert torch.equal(codes, same)
    assert cli("-m", file, "--fp8", "--save", tmp_path / "saved", "--quiet")[:2] == (0, "")
    saved = load(tmp_path / "saved", **options)
    assert saved.config.rope_factors and saved.config.eos_ids == (258, 257)
    assert_close(logits_of(saved, range(40)), logits_of(encoded, range(40)), 1e-6)
    for chat in (conversation("Größe 🙂"), conversation("ab</s>")):
        ids = open_tokenizer(file).apply_chat_template(chat)
        assert open_tokenizer(tmp_path / "saved").apply_chat_template(chat) == ids


def test_gguf_from_the_command_line(tmp_path, cli):
    """The same text from a file, its folder, links and parts; a second loss is refused."""
    model = hugging_face_model(259, intermediate_size=128, **OF_BYTES)
    metadata, tensors = gguf_metadata(model.config) | BYTES, gguf_tensors(model, (2, 8))
    one = tmp_path / "one"
    one.mkdir()
    file = write_gguf(one / "a.gguf", metadata, tensors)
    (one / "mmproj-a.gguf").touch()  # of a model that sees, and no model of its own
    (tmp_path / "parts").mkdir()
    parts = [tmp_path / f"parts/t-0000{i}-of-00002.gguf" for i in (1, 2)]
    split = {"split.count": numpy.uint16(2), "split.tensors.count": len(tensors)}
    for i, about in enumerate((metadata, {"general.architecture": "llama"})):
        about = about | split | {"split.no": numpy.uint16(i)}
        write_gguf(parts[i], about, dict([*tensors.items()][i::2]))
    run_it = lambda name: cli("-m", name, "-p", "ab", "-n", 9, "-s", 1, "--dtype", "fp32")
    expected = run_it(file)[1]
    said = "fp32 with q4_0 matrices (Q4_0 and Q8_0 in the file; others as floats)"
    for name in (file, one, tmp_path / "parts", parts[1]):
        code, out, err = run_it(name)
        assert (code, out) == (0, expected), err
        assert f"running   {said} on cpu" in err and err.endswith(f"GB; {said}\n"), err
    lossy = "would lose precision a second time"
    for more in ["-p", "a", "--fp8"], ["-p", "a", "--int4"], ["--int4", "--save", tmp_path / "new"]:
        its = "a.gguf: its matrices are Q4_0 and Q8_0, and"
        assert_refused(cli("-m", file, *more), its, lossy)
    assert not (tmp_path / "new").exists()
    shutil.copy(file, one / "other.gguf")
    assert_refused(run_it(one), "holds several models: take one of a.gguf, other.gguf")
    (one / "other.gguf").unlink()
    (tmp_path / "link.gguf").symlink_to(file)
    file.rename(tmp_path / "sha256-00")  # as Ollama names it
    file.symlink_to("../sha256-00")
    for name in ("link.gguf", "sha256-00", "one/a.gguf", "one"):
        assert run_it(tmp_path / name)[:2] == (0, expected)
    # a template may be chosen by it
    assert local_checkpoint(str(tmp_path / "link.gguf")).name == "link.gguf"
    for missing, asked in itertools.permutations(parts):
        kept = missing.rename(tmp_path / "x.gguf")
        assert_refused(run_it(asked), "No such file", missing.name)
        kept.rename(missing)
    named = "is one of 2 shards: its name must end in -00001-of-00002.gguf"
    assert_refused(run_it(parts[1].rename(tmp_path / "second.gguf")), named)


def test_a_gguf_folder_beside_the_program(tmp_path, monkeypatch):
    file = tmp_path / "beside/models/x/a.gguf"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.setattr("loading.hub.ROOT", tmp_path / "beside")
    monkeypatch.chdir(tmp_path)
    assert local_checkpoint("models/x") == file


def test_gguf_of_the_hub(hub, tmp_path, monkeypatch):
    """As llama.cpp picks it, and nothing else is downloaded."""
    raw = write_gguf(tmp_path / "a.gguf", *parts_of_gguf()).read_bytes()
    names = "a-IQ4_K_M.gguf a-Q2_K.gguf a.Q8_0.gguf q/a-q4_k_m.gguf a-mmproj-Q4_K_M.gguf"
    names += " config.json"
    # the library knows a file by its hash
    hub.files = {name: raw + bytes(i) for i, name in enumerate(names.split())}
    place = lambda kind: load(f"someone/tiny{kind}", device="cpu").checkpoint.folder
    kinds = {"": "q/a-q4_k_m.gguf", ":q8_0": "a.Q8_0.gguf", ":Q2_K": "a-Q2_K.gguf"}
    for kind, wanted in kinds.items():
        hub.asked.clear()
        file = place(kind)
        assert str(file).endswith(wanted) and open_tokenizer(file).encode("ab")[-1] == 256
        assert hub.fetched() == [Path(wanted).name]
        assert place(kind) == file and not hub.asked
    # another program has cached it, too
    (file.parent / "config.json").write_text('{"model_type": "llama"}')
    set_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
    assert place(":Q8_0").name == "a.Q8_0.gguf" and place("").name == "a-q4_k_m.gguf"
    next((tmp_path / "cache").rglob("a-q4_k_m.gguf")).unlink()
    assert place("").name == "a.Q8_0.gguf", "what there is"
    assert load("someone/tiny", device="cpu").checkpoint.notes == [
        "of the GGUF files in someone/tiny, a.Q8_0.gguf is taken; someone/tiny:KIND takes another"
    ]
    parts = [f"m-Q6_K-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert pick_gguf(["n-Q6_K.gguf", *parts], "Q6_K") == parts


@pytest.mark.parametrize("names, taken", [
    ("b.Q8_0 a.IQ2_M b.F16", "b.Q8_0"), ("a-BF16 b-q4_k_m c-Q4_0", "b-q4_k_m"), ("a-F16 b-Q8_0 c-IQ4_XS", "c-IQ4_XS"),
    ("a-F16 b-UD-Q4_K_XL c-Q4_K_S", "b-UD-Q4_K_XL"), ("a-F16 b-Q5_K_M c-Q8_0", "b-Q5_K_M"), ("a-Q6_K b-F16", "a-Q6_K"),
    ("model", "model"), ("a-imatrix b", "b"), ("a.MXFP4 b.TQ1_0", None),
])  # fmt: skip
def test_gguf_that_is_taken_if_no_kind_is_named(names, taken):
    found = pick_gguf([f"{name}.gguf" for name in names.split()], "")
    assert found == ([f"{taken}.gguf"] if taken else [])


def test_gguf_header_holds_every_type_of_value(tmp_path):
    types = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    metadata = {name: numpy.dtype(name).type(7) for name in types}
    metadata |= {
        "general.architecture": "llama", "general.alignment": 4096, "a": numpy.float32(1e-5),
        "b": numpy.float32(1 / 3), "float64": numpy.float64(0.1), "yes": True,
        "text": "Größe 🙂\0", "": "empty", "strings": ["", "a\0b", "ü" * 300, ""],
        "ints": [-1, 2], "floats": [0.5, 2.5], "flags": [True, False],
    }  # fmt: skip
    tensors = {f"t{i}": torch.ones(i + 1) for i in range(3)}
    header = ggml.read_header(write_gguf(tmp_path / "a.gguf", metadata, tensors))
    for key, value in metadata.items():
        got = header.metadata[key]
        assert (got.tolist() if isinstance(got, memoryview) else got) == value, key
    sizes = [(info.offset % 4096, info.nbytes) for info in header.tensors.values()]
    assert sizes == [(0, 4), (0, 8), (0, 12)]


def by_hand(tensors=(), metadata=(), version=3, counts=None, data=b"\0" * 4096) -> bytes:
    """A file. metadata: (key, type, bytes); tensors: (name, dims, type, offset)."""
    header = b"GGUF" + struct.pack("<IQQ", version, *counts or (len(tensors), len(metadata)))
    for key, kind, value in metadata:
        header += string(key) + struct.pack("<I", kind) + value
    for name, dims, kind, offset in tensors:
        header += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return header + b"\0" * (-len(header) % 32) + data


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


HUGE = 1 << 62


# for gguf_with: what the line says, beside the file's name
BAD_GGUF = {
    "empty": (b"", "is not a GGUF file"),
    "a pointer of git-lfs": (POINTER.encode(), "is a git-lfs pointer"),
    "version 1": (by_hand(version=1), "has GGUF's version 1, which is not supported"),
    "count of values": (by_hand(counts=(0, HUGE), data=b""), "cut off"),
    "count of tensors": (by_hand(counts=(HUGE, 0), data=b""), "cut off"),
    "string beyond the file": (by_hand(metadata=[(b"a", 8, struct.pack("<Q", 5000))]), "a string lies outside its"),
    "count of an array": (by_hand(metadata=[(b"a", 9, struct.pack("<IQ", 0, HUGE))]), "an array lies outside its"),
    "count of strings": (by_hand(metadata=[(b"a", 9, struct.pack("<IQ", 8, HUGE))]), "cut off"),
    "array of arrays": (by_hand(metadata=[(b"a", 9, struct.pack("<IQ", 9, 1))]), "values of the unknown type 9"),
    "unknown value": (by_hand(metadata=[(b"a", 13, b"")]), "values of the unknown type 13"),
    "no dimensions": (by_hand([(b"a", (), 0, 0)]), "a has 0 dimensions"),
    "5 dimensions": (by_hand([(b"a", (1,) * 5, 0, 0)]), "a has 5 dimensions"),
    "a dimension of 0": (by_hand([(b"a", (32, 0), 0, 0)]), "has the shape"),
    "part of a block": (by_hand([(b"a", (48,), 8, 0)]), "has the shape [48], of type Q8_0"),
    "dimensions that overflow": (by_hand([(b"a", (1 << 32, 1 << 32), 0, 0)]), "a lies outside it"),
    "beyond the end": (by_hand([(b"a", (1025,), 0, 0)]), "a lies outside it"),
    "overlap": (by_hand([(b"a", (1024,), 0, 0), (b"b", (1024,), 0, 0)]), "its tensors overlap"),
    "control characters": (
        by_hand([(b"a\n\x1b[31m", (8,), 99, 0)]), "a ?[31m is unknown type 99, which is not supported"
    ),
    "another type": (by_hand([(b"w", (256,), 39, 0)]), "w is MXFP4, which is not supported: take a file of F32"),
    "another architecture": ({"general.architecture": "gemma3"}, "qwen3moe): take a model of one of these"),
    "for embeddings": ({"llama.pooling_type": 3}, "holds a model for embeddings or rewards, which generates no text"),
    "experts as until 2024": (
        by_hand([(b"blk.0.ffn_gate.0.weight", (8,), 0, 0)], [(b"general.architecture", 8, string(b"llama"))]),
        "as files had until April 2024: take a newer one",
    ),
    "experts without their number a token": ({"llama.expert_count": 8}, "lacks the field num_experts_per_tok"),
    "no experts": (
        {"llama.expert_count": 8, "llama.expert_used_count": 2}, "config: blk.0.ffn_gate_inp.weight is missing",
    ),
    "experts of others": ({"general.architecture": "mistral", "mistral.expert_count": 8}, "experts of 'mistral' are"),
    "both directions": ({"llama.attention.causal": False}, "is_causal is False, which is not supported"),
    "no block_count": ({"llama.block_count": None}, "lacks the field num_hidden_layers"),
    "size in words": ({"llama.block_count": "two"}, "num_hidden_layers is 'two'; it must be a whole number"),
    "sizes": ({"llama.feed_forward_length": [9, 9]}, "; it must be a whole number"),
    "part of RoPE": ({"llama.rope.dimension_count": 8}, "rope.dimension_count differ: [16, 16, 8]"),
    "part of RoPE, without a key_length": (
        {"llama.rope.dimension_count": 8, "llama.attention.key_length": None, "llama.attention.value_length": None},
        "differ: [8, 16], which is not supported",
    ),
    "scaling": ({"llama.rope.scaling.type": "longrope"}, "rope_type is 'longrope', which is supported with"),
    "types of others": ({"tokenizer.ggml.token_type": [1, 2]}, "must have a number of 32 bits for each of the 259"),
    "tokens of numbers": ({"tokenizer.ggml.tokens": [1, 2]}, "tokens is an array, a value of the wrong type"),
    "a token twice": ({"tokenizer.ggml.tokens": ["a"] * 259}, "has the token 'a' twice"),
    "no pre-tokenizer": ({"tokenizer.ggml.pre": None}, "lacks tokenizer.ggml.pre"),
    "another pre-tokenizer": ({"tokenizer.ggml.pre": "viking"}, "pre is 'viking', which is not supported"),
    "another tokenizer": ({"tokenizer.ggml.model": "bert"}, "model is 'bert', which is not supported"),
    "no merges": ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges"),
    "no embedding": ({"token_embd.weight": None}, "lacks the tensor token_embd.weight"),
    "quantised norm": ({"output_norm.weight": (8, torch.zeros(68, dtype=torch.uint8))}, "is [64] in another type"),
    "NaN": ({"output.weight": (8, torch.full((259, 68), 255, dtype=torch.uint8))}, "output.weight has a scale"),
    "many factors": ({"rope_freqs.weight": torch.ones(513)}, "rope_freqs.weight has more than 512 factors"),
    "more tokens than rows": ({"tokenizer.ggml.tokens": ["a"] * 260}, "has 260 tokens, but the model has a vocabulary"),
    "a key twice": (by_hand(metadata=[(b"a", 0, b"1")] * 2), "damaged: it has 'a' twice"),
    "a tensor twice": (by_hand([(b"a", (8,), 0, 0), (b"a", (8,), 0, 32)]), "damaged: it has a twice"),
    "a header of zeros": (by_hand(counts=(0, 1 << 30), metadata=[(b"a", 0, b"1")]), "has '' twice"),
    "7 factors": ({"rope_freqs.weight": torch.ones(7)}, "7 factors of RoPE; a head_dim of 16 needs half as many"),
    "halves as factors": ({"rope_freqs.weight": torch.ones(8).half()}, "rope_freqs.weight is F16; it must be F32"),
    **{f"factors of {x}": ({"rope_freqs.weight": torch.tensor([1.0] * 7 + [x])}, "must be finite and above 0")
       for x in (0.0, -1.0, NAN, INF)},
}  # fmt: skip


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_gguf_tokens_that_end_an_answer(tmp_path, kind):
    """Control tokens by their text, whatever their type, as measured in llama.cpp's server."""
    ends = ["<|end|>", "<end_of_turn>", "<eos>", "[EOS]", "[EOT]", "<|fim_pad|>", "<|file_sep|>"]
    others = ["<|EOT|>", "<|end_of_turn|>", "<file_sep>"]
    metadata, tensors = parts_of_gguf()
    tokens = ["a", "b", "ab", *ends, *others, *map(str, range(246))]
    about = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 3 + [kind] * 10 + [1] * 246,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.fim_rep_token_id": 1,
    }
    file = write_gguf(tmp_path / "a.gguf", metadata | about, tensors)
    config = read_config(file)
    assert config.eos_ids == (0, 1, *range(3, 10))
    tokenizer = open_tokenizer(file, config.vocab_size)
    assert {*ends} <= tokenizer.control.keys() and tokenizer.decode([*range(3, 10)]) == ""


ROPE, LINEAR8 = "rope.scaling.", (8.0,) * 8
YARN_GGUF = {f"{ROPE}type": "yarn", f"{ROPE}factor": 8.0, f"{ROPE}original_context_length": 64}
DIVISORS = torch.linspace(1, 8, 8)
IDS = "tokenizer.ggml."
# what llama.cpp's converter writes beside the sizes (the names of the first block follow that of
# the family; None: it was left out), and what of our Config follows from it
GGUF_FIELDS = [
    ({}, dict(rope_theta=5e5, rope_factors=(), rope_gain=1, norm_eps=1e-6, head_dim=16,
              max_seq_len=256, sliding_window=None, eos_ids=(258, 257), bos_id=None)),
    ({"rope.freq_base": None}, dict(rope_theta=1e4)),
    ({"rope.freq_base": 1e6}, dict(rope_theta=1e6)),
    ({"attention.layer_norm_rms_epsilon": 1e-5}, dict(norm_eps=1e-5)),
    ({"attention.head_count_kv": None}, dict(n_kv_heads=4)),
    ({"attention.sliding_window": 64}, dict(sliding_window=64)),
    ({"attention.sliding_window": 0}, dict(sliding_window=None)),
    ({"rope.dimension_count": 16, "vocab_size": 259}, dict(head_dim=16, vocab_size=259)),
    ({f"{ROPE}factor": 8.0}, dict(rope_factors=LINEAR8, rope_gain=1)),
    ({"rope.scale_linear": 8.0}, dict(rope_factors=LINEAR8, rope_gain=1)),
    ({f"{ROPE}type": "linear", f"{ROPE}factor": 1.0}, dict(rope_factors=())),
    ({f"{ROPE}type": "none", f"{ROPE}factor": 8.0}, dict(rope_factors=())),
    ({f"{ROPE}attn_factor": 0.5}, dict(rope_factors=(), rope_gain=0.5)),
    (YARN_GGUF, dict(rope_gain=1 + 0.1 * 2.0794415416798357)),
    (YARN_GGUF | {f"{ROPE}attn_factor": 0.5}, dict(rope_gain=0.5 + 0.05 * 2.0794415416798357)),
    ({f"{IDS}bos_token_id": 3, f"{IDS}eot_token_id": 0}, dict(bos_id=3, eos_ids=(258, 0, 257))),
    ({f"{IDS}eos_token_id": None, f"{IDS}eom_token_id": 5}, dict(eos_ids=(5, 257, 258))),
    ({f"{IDS}add_bos_token": True, "general.file_type": 1, "general.quantization_version": 2,
      "general.name": "x", f"{IDS}padding_token_id": 4}, dict(bos_id=None, eos_ids=(258, 257))),
]  # fmt: skip


@pytest.mark.parametrize("said, expected", GGUF_FIELDS, ids=lambda value: str(value)[:60])
def test_gguf_fields_of_llama_cpps_writer(tmp_path, said, expected):
    metadata, tensors = parts_of_gguf()
    full = lambda key: key if key.startswith(("tokenizer", "general")) else f"llama.{key}"
    about = metadata | {full(key): value for key, value in said.items()}
    about = {key: value for key, value in about.items() if value is not None}
    config = read_config(write_gguf(tmp_path / "a.gguf", about, tensors))
    for name, value in expected.items():
        value = value if isinstance(value, tuple) else pytest.approx(value)
        assert getattr(config, name) == value, f"llama.cpp takes {name} for something else"
    with_factors = tensors | {"rope_freqs.weight": DIVISORS}
    both = read_config(write_gguf(tmp_path / "b.gguf", about, with_factors)).rope_factors
    plain = torch.tensor(config.rope_factors or (1.0,) * 8)
    assert torch.tensor(both).equal(plain * DIVISORS), "as llama.cpp multiplies"


GGUF_TEXTS = [
    "Once upon a time", "", " ", "  two  spaces ", "\n\n\tdef f(x):\n        return x+1\r\n",
    "I'll can't WE'VE don'T",
    "once upon", "upon us", "up on", "3.14159 and 1234567 ½ ²³ ٣٤",
    "Größe, naïve café: ÀÉ 日本語テキスト 한국어 العربية हिन्दी",
    "🙂👩‍👩‍👧 ok", "a+b=c <x> ~^|`", "CamelCaseWords HTTPServer x_1", "e\u0301 \u1e9b\u0323",
    "</s><|im_end|>[INST]",
    "\u00a0\u3000 ", "…—‘quoted’",
]  # fmt: skip


def test_gguf_sentencepiece(tmp_path):
    """The same as the tokenizer.model. Fine-tuned models have control tokens and text beyond it,
    unknown ones to fill it up, and bos not added."""
    folder = HERE / "models/tales"
    original = open_tokenizer(folder)
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]

    def tokenizer(size: int, about: dict, **more) -> Tokenizer:
        known = {"general.architecture": "llama", "tokenizer.chat_template": template}
        known |= sentencepiece_metadata(folder / "tokenizer.model", **more)
        return open_tokenizer(write_gguf(tmp_path / "a.gguf", known | about, {}), size)

    ours = tokenizer(4096, {})
    for text in GGUF_TEXTS:
        assert ours.encode(text) == original.encode(text)
        assert encode_after(ours, text) == encode_after(original, text)
        assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))
    assert (ours.bos, ours.eos, ours.control) == (1, 2, original.control)
    chat = conversation("Hello </s>", "Hello </s>", "Hello </s>", system="Hello </s>")
    assert ours.apply_chat_template(chat) == original.apply_chat_template(chat)
    more = {"<|im_start|>": 3, "<|im_end|>": 3, "<think>": 4, "[PAD4099]": 2, "[PAD4100]": 2, "": 5}
    about = {f"{IDS}add_bos_token": False, f"{IDS}add_space_prefix": False}
    ours = tokenizer(4102, about | {f"{IDS}eos_token_id": 4097}, **more)
    assert (ours.bos, ours.eos) == (1, 4097)
    assert ours.control.keys() == {"<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"}
    assert ours.control["<|im_start|>"] == 4096
    assert 4098 in ours.encode("so <think> hm") and 4097 not in ours.encode("<|im_end|>")
    assert ours.decode([4097, *ours.encode("a b")]) == "a b" and not ours.vocabulary.adds_space


WORD, REST = r"[^\r\n\p{L}\p{N}]?", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA_3 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{REST}"
WORDS = rf"{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*"
TEKKEN = rf"{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{REST}"
SPLITS = {
    "llama-bpe": [LLAMA_3], "qwen2": [LLAMA_3.replace("{1,3}", "")], "tekken": [TEKKEN],
    "smollm": None, "refact": None, "gpt-2": None, "smaug-bpe": [LLAMA_3],
    "seed-coder": [LLAMA_3.replace("{1,3}", "").replace("]+[\\r\\n]*", "]+")],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
}  # fmt: skip


@pytest.mark.parametrize("name", SPLITS)
def test_gguf_byte_pairs(name, tmp_path):
    """The same ids as a tokenizer.json trained on a little text."""
    # ignore merges, and add bos unless the file says otherwise
    always = name in ("llama-bpe", "tekken")
    pre = tokenizers.pre_tokenizers
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=SPLITS[name] is None)
    patterns = [tokenizers.Regex(pattern) for pattern in SPLITS[name] or ()]
    first = [pre.Split(pattern, "isolated") for pattern in patterns] or [pre.Digits(True)]
    splits = byte_level if name == "gpt-2" else pre.Sequence([*first, byte_level])
    raw = train_byte_pairs(splits, GGUF_TEXTS * 3, pre.ByteLevel.alphabet(), ignore_merges=always)
    merges = [pair for pair in raw["model"]["merges"] if "".join(pair) != "Ġupon"]
    raw["model"]["merges"] = merges
    own = tokenizers.Tokenizer.from_str(json.dumps(raw))
    if name == "qwen2":
        own.normalizer = tokenizers.normalizers.NFC()
    own.add_special_tokens(["<|im_end|>", "<|endoftext|>"])
    own.add_tokens(["<think>", "~x~"])
    kinds = {"<|im_end|>": 3, "<|endoftext|>": 3, "<think>": 4, "~x~": 4}
    tokens = [*map(own.id_to_token, range(own.get_vocab_size())), "[PAD9]"]
    size = len(tokens) - 1
    metadata = {"general.architecture": "llama"} | BYTES | {
        f"{IDS}pre": name,
        f"{IDS}tokens": tokens,
        f"{IDS}token_type": [kinds.get(token, 1) for token in tokens[:-1]] + [5],
        f"{IDS}merges": [" ".join(pair) for pair in merges],
        f"{IDS}bos_token_id": own.token_to_id("<|endoftext|>"),
        f"{IDS}eos_token_id": own.token_to_id("<|im_end|>"),
    }  # fmt: skip
    ours = open_tokenizer(write_gguf(tmp_path / "a.gguf", metadata, {}), size + 1)
    letters = "".join(GGUF_TEXTS)
    for text in GGUF_TEXTS + ["".join(random.choices(letters, k=100)) for _ in range(30)]:
        ids = own.encode(text, add_special_tokens=False).ids
        assert ours.vocabulary.encode_chat(text, ours._control_in(text), after=False) == ids, text
        assert "<" in text or ours.encode(text, bos=False) == ids
        assert ours.decode(ids) == own.decode(ids, skip_special_tokens=True)
    assert ours.control.keys() == {"<|im_end|>", "<|endoftext|>", "<think>"}
    assert ours.bytes_of(own.token_to_id("~x~")) == b"~x~" and ours.bytes_of(size) == b""
    assert (own.token_to_id("Ġupon") in ours.encode("Once upon")) == always
    for said in (True, False, None):
        more = {} if said is None else {f"{IDS}add_bos_token": said}
        file = write_gguf(tmp_path / "b.gguf", metadata | more, {})
        adds = always if said is None else said
        assert (open_tokenizer(file).encode("ab")[0] == ours.bos) == adds
