"""Tiny checkpoints in each layout, for the fuzzer, and GGUF files as llama.cpp's converter writes
them, for the tests as well."""

import json
import shutil
import sys
from pathlib import Path

import gguf
import numpy
import sentencepiece
import tokenizers
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from loading import gguf as layout_gguf
from loading import hugging_face
from loading.checkpoint import read_config
from loading.names import model_parts
from loading.templates import TEMPLATES

VOCAB = 400
BF16 = 30  # the number of this type in GGUF


def write_gguf(file: Path, metadata: dict, tensors: dict) -> Path:
    """metadata: values, in the types that llama.cpp gives them unless they are scalars of numpy;
    tensors: torch's, or (number of a type, bytes [N, M])."""
    writer = gguf.GGUFWriter(file, metadata["general.architecture"])
    writer.data_alignment = metadata.get("general.alignment", 32)
    kinds = gguf.GGUFValueType
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, numpy.generic):
            kind = kinds[value.dtype.name.upper()]
            value = value.item()
        elif type(value) is int:
            kind = kinds.UINT32
        else:
            kind = kinds.get_type(value)
        writer.add_key_value(key, value, kind)
    for name, value in tensors.items():
        kind, raw = value if isinstance(value, tuple) else (None, value)
        if raw.dtype == torch.bfloat16:
            kind, raw = BF16, raw.view(torch.uint8)
        kind = kind and gguf.GGMLQuantizationType(kind)
        writer.add_tensor(name, raw.contiguous().numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def sentencepiece_metadata(file: Path, **more: int) -> dict:
    """A tokenizer.model as metadata of a GGUF file. more: tokens after its own, and their types."""
    sp = sentencepiece.SentencePieceProcessor(str(file))

    def type_of(i: int) -> int:
        for is_so, kind in (
            (sp.is_unknown, 2),
            (sp.is_control, 3),
            (sp.is_unused, 5),
            (sp.is_byte, 6),
        ):
            if is_so(i):
                return kind
        return 1

    ids = range(sp.vocab_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in ids] + [*more],
        "tokenizer.ggml.scores": [sp.get_score(i) for i in ids] + [-1000.0] * len(more),
        "tokenizer.ggml.token_type": [type_of(i) for i in ids] + [*more.values()],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


# ---- one random model in each layout


def make_checkpoints(home: Path) -> list[Path]:
    first = home / "safetensors"
    first.mkdir()
    text = home / "text"
    text.write_text(Path(__file__).read_text() * 3 + "Żółw, 乌龟 🐢\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(first / "tokenizer"), vocab_size=VOCAB, model_type="bpe",
        byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    config = dict(
        model_type="llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=64,
        max_position_embeddings=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, rms_norm_eps=1e-5, torch_dtype="float32", bos_token_id=1,
        eos_token_id=2, rope_scaling=dict(rope_type="linear", factor=2.0),
    )  # fmt: skip
    (first / "config.json").write_text(json.dumps(config))
    (first / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[2])))
    (first / "tokenizer_config.json").write_text(json.dumps(dict(add_bos_token=True)))
    (first / "chat_template.jinja").write_text(TEMPLATES["llama2"])
    c = read_config(first)
    parts = model_parts(c).values()
    values = [torch.randn(part.shape(c)) for part in parts]
    names = [part.name_in("model.layers", hugging_face.NAMES[part.stem]) for part in parts]
    tensors = dict(zip(names, values))
    save_file(tensors, first / "model.safetensors")

    def like(name: str, spared: str = "model.safetensors") -> Path:
        return Path(shutil.copytree(first, home / name, ignore=shutil.ignore_patterns(spared)))

    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train(str(text), VOCAB, special_tokens=["<s>", "</s>"], show_progress=False)
    bpe.save(str(like("json", "tokenizer.model") / "tokenizer.json"))
    torch.save(tensors, like("bin") / "pytorch_model.bin")
    save_torch_state_dict(tensors, like("shards"), max_shard_size="64KB")
    meta = like("meta", "*onfig.json")
    (meta / "model.safetensors").unlink()
    torch.save(dict(zip(model_parts(c), values)), meta / "consolidated.00.pth")
    params = dict(dim=32, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=-1, multiple_of=32)
    (meta / "params.json").write_text(json.dumps(params | {"ffn_dim_multiplier": 0.5}))
    save_awq(like("awq"), config, tensors)
    names = [part.name_in("blk", layout_gguf.NAMES[part.stem]) for part in parts]
    save_gguf(home / "gguf", first, dict(zip(names, values)))
    return sorted(path for path in home.iterdir() if path.is_dir())


def save_awq(folder: Path, config: dict, tensors: dict) -> None:
    about = dict(quant_method="awq", bits=4, group_size=32, version="gemm")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": about}))
    found = {}
    for name, t in tensors.items():
        if "proj" not in name:
            found[name] = t
            continue
        N, K = t.shape
        name = name.removesuffix("weight")
        for part, rows in (("qweight", K), ("qzeros", K // 32)):
            found[name + part] = torch.randint(-(1 << 31), 1 << 31, (rows, N // 8)).int()
        found[f"{name}scales"] = torch.rand(K // 32, N).half()
    save_file(found, folder / "model.safetensors")


def save_gguf(folder: Path, first: Path, tensors: dict) -> None:
    folder.mkdir()
    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.context_length": 128,
        "llama.block_count": 1,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.chat_template": TEMPLATES["llama2"],
    }
    kinds = [gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0]
    for name, t in tensors.items():
        if t.dim() == 2:
            kinds.reverse()
            tensors[name] = (
                int(kinds[0]),
                torch.from_numpy(gguf.quants.quantize(t.numpy(), kinds[0])),
            )
    metadata |= sentencepiece_metadata(first / "tokenizer.model")
    write_gguf(folder / "model.gguf", metadata, tensors)
