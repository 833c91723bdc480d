"""Checkpoints on disk: configuration, tensors in each layout, the memory check, loading, saving."""

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

import kernels
import launch
import parallel
from files import Part, folder_beside, one_line_errors, parts_of, read_bytes, read_json, read_part, safetensors_header
from fp8 import FORMATS, Format, Matrix
from model import CHUNK, PADDED, Config, LayerWeights, Llama, RopeScaling, Weights
from template import find_template
from tokenizer import FILE_BYTES, tokenizer_file

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


# ---- configuration


class Fields:
    """Checked access to the fields of a JSON object: every error names the file, the field and its value."""

    def __init__(self, file: Path, raw: dict | None = None):
        self.file = file
        self.raw = read_json(file) if raw is None else raw

    def number(self, name: str, low: float, high: float, default: float | None = None, kind: type = int):
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self.file} lacks the field {name}")
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
        if not fits or kind is int and value != int(value):
            raise ValueError(f"{self.file}: {name} is {value!r}; it must be {_article(kind)} from {low:g} to {high:g}")
        return kind(value)

    def sub(self, name: str) -> "Fields | None":
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ValueError(f"{self.file}: {name} is {value!r}; it must be an object")
        return Fields(self.file, value)

    def refuse_unless(self, name: str, *allowed) -> None:
        """For a field whose other values would change the result in a way not implemented here."""
        value = self.raw.get(name, allowed[0])
        if value not in allowed:
            raise ValueError(f"{self.file}: {name} is {value!r}, which is not supported (supported: {_listed(allowed)})")


def _article(kind: type) -> str:
    return "a whole number" if kind is int else "a number"


def _listed(values: tuple) -> str:
    return ", ".join("absent" if value is None else json.dumps(value) for value in values)


@one_line_errors()
def read_config(folder: Path) -> Config:
    """The configuration of a Hugging Face folder (config.json) or of Meta's own (params.json). Raises OSError, ValueError."""
    if (folder / "config.json").is_file():
        config = _hugging_face_config(folder)
    elif (folder / "params.json").is_file():
        config = _meta_config(folder)
    else:
        raise FileNotFoundError(f"{folder} holds {_instead(folder) or 'neither config.json nor params.json: not a checkpoint'}")
    if config.n_heads % config.n_kv_heads:
        raise ValueError(f"{folder}: {config.n_heads} query heads cannot share {config.n_kv_heads} key/value heads evenly")
    if config.head_dim % 2:
        raise ValueError(f"{folder}: head_dim is {config.head_dim}; RoPE needs an even one")
    return config


QUANTISED = "quantised for another program: take the original safetensors; --fp8 makes 8 bits of them"


def _instead(folder: Path) -> str | None:
    """What a folder without a model holds instead, and what to do about it."""
    if any(folder.glob("*.gguf")):
        return f"GGUF, {QUANTISED}"
    if (folder / "adapter_config.json").is_file():
        base = Fields(folder / "adapter_config.json").raw.get("base_model_name_or_path")
        return f"an adapter without its base: merge it into {base or 'that'} first (peft: merge_and_unload)"
    return None


def _hugging_face_config(folder: Path) -> Config:
    f = Fields(folder / "config.json")
    f.refuse_unless("model_type", "llama", "mistral", "qwen2", "qwen3")
    family = f.raw.get("model_type")
    f.refuse_unless("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias"):
        f.refuse_unless(name, False, None)
    refuse_quantised(f)
    f.refuse_unless("partial_rotary_factor", None, 1, 1.0)
    n_heads = f.number("num_attention_heads", 1, 1024)
    dim = f.number("hidden_size", 1, 1 << 17)
    max_seq_len = f.number("max_position_embeddings", 1, 1 << 24, 2048)
    f.refuse_unless("tie_word_embeddings", False, True, None)
    if family == "mistral":
        f.raw.setdefault("sliding_window", 4096)  # transformers' defaults, here and below
    if family in ("qwen2", "qwen3") and not f.raw.get("use_sliding_window"):
        f.raw["sliding_window"] = None
    if family == "qwen3":
        f.raw.setdefault("head_dim", 128)
    if f.raw.get("head_dim") is None and dim % n_heads:
        raise ValueError(f"{f.file}: hidden_size is {dim}, not a multiple of num_attention_heads {n_heads}")
    theta, scaling = _rope(f, max_seq_len)
    generation = _generation(folder)
    bos = generation if generation.raw.get("bos_token_id") is not None else f
    vocab_size = f.number("vocab_size", 1, 1 << 22)
    eos_ids = _ids(generation, "eos_token_id", vocab_size) + _ids(f, "eos_token_id", vocab_size)
    return Config(
        dim=dim,
        n_layers=f.number("num_hidden_layers", 1, 1024),
        n_heads=n_heads,
        n_kv_heads=f.number("num_key_value_heads", 1, 1024, n_heads),
        head_dim=f.number("head_dim", 2, 1024, dim // n_heads),
        hidden_dim=f.number("intermediate_size", 1, 1 << 20),
        vocab_size=vocab_size,
        norm_eps=f.number("rms_norm_eps", 0, 1, 1e-6, float),
        rope_theta=theta,
        rope_scaling=scaling,
        max_seq_len=max_seq_len,
        sliding_window=f.number("sliding_window", 1, 1 << 24) if f.raw.get("sliding_window") is not None else None,
        tie_embeddings=bool(f.raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        dtype=_stored_dtype(f),
        bos_id=bos.number("bos_token_id", 0, vocab_size - 1) if bos.raw.get("bos_token_id") is not None else None,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
    )


def refuse_quantised(f: Fields) -> None:
    """Raise ValueError for GPTQ, AWQ, exl2, bitsandbytes, mlx: their matrices are in other programs' formats."""
    for name in ("quantization_config", "quantization"):
        if how := f.raw.get(name):
            method = how.get("quant_method") if isinstance(how, dict) else None
            raise ValueError(f"{f.file}: {name} is {method or how!r}: {QUANTISED}")


def _generation(folder: Path) -> Fields:
    file = folder / "generation_config.json"
    return Fields(file) if file.is_file() else Fields(file, {})


@one_line_errors()
def read_sampling(folder: Path) -> dict[str, float]:
    """What a checkpoint's generation_config.json says about sampling, by the names of Sampling. Raises ValueError."""
    f = _generation(folder)
    bounds = {  # our name: their name, low, high, type
        "temp": ("temperature", 0, 1e6, float),
        "top_k": ("top_k", 0, 1 << 31, int),
        "top_p": ("top_p", 0, 1, float),
        "repeat_penalty": ("repetition_penalty", 0.01, 100, float),
    }
    return {
        ours: f.number(theirs, low, high, kind=kind)
        for ours, (theirs, low, high, kind) in bounds.items()
        if f.raw.get(theirs) is not None
    }


def _stored_dtype(f: Fields) -> torch.dtype | None:
    name = f.raw.get("dtype") or f.raw.get("torch_dtype")
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, None: None}
    if not isinstance(name, str | None) or name not in known:
        raise ValueError(f"{f.file}: torch_dtype is {name!r}, which is not supported (float32, float16, bfloat16)")
    return known[name]


def _ids(f: Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    value = f.raw.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for i in ids:
        if type(i) is not int or not 0 <= i < vocab_size:
            raise ValueError(f"{f.file}: {name} is {value!r}; it must hold ids below vocab_size {vocab_size}")
    return tuple(ids)


def _rope(f: Fields, max_seq_len: int) -> tuple[float, RopeScaling | None]:
    """theta and scaling, from rope_parameters or from the older rope_theta and rope_scaling."""
    rope, older = f.sub("rope_parameters"), f.sub("rope_scaling")
    if rope and older and rope.raw != older.raw:
        raise ValueError(f"{f.file}: rope_parameters and rope_scaling say different things: {rope.raw} and {older.raw}")
    rope = rope or older
    theta_from = rope if rope and rope.raw.get("rope_theta") is not None else f
    theta = theta_from.number("rope_theta", 1, 1e12, 10000.0, float)
    if rope is None:
        return theta, None
    if "type" in rope.raw and "rope_type" not in rope.raw:
        rope.raw["rope_type"] = rope.raw["type"]
    rope.refuse_unless("rope_type", "default", "linear", "llama3", "yarn")
    rope.refuse_unless("partial_rotary_factor", None, 1, 1.0)
    kind = rope.raw.get("rope_type", "default")
    if kind == "default":
        return theta, None
    if kind == "yarn" and theta > 1:
        return theta, _yarn(rope, max_seq_len)
    factor = rope.number("factor", 1, 1e6, None, float)
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    low, high = (rope.number(f"{name}_freq_factor", 1e-6, 1e6, None, float) for name in ("low", "high"))
    if low >= high:
        raise ValueError(f"{f.file}: high_freq_factor is {high:g}; it must be above low_freq_factor {low:g}")
    return theta, RopeScaling("llama3", factor, low, high, rope.number("original_max_position_embeddings", 1, 1 << 24, None))


def _yarn(rope: Fields, max_seq_len: int) -> RopeScaling:
    """The scale of q and k (attention_factor) defaults to 1 + 0.1 log(factor), as in section 3.4 of the paper; mscale and
    mscale_all_dim are DeepSeek's way to give it."""
    original = rope.number("original_max_position_embeddings", 1, 1 << 24, max_seq_len)
    factor = rope.number("factor", 1, 1e6, max(1, max_seq_len / original), float)
    rope.refuse_unless("truncate", True, False, None)
    mscale, over_all = (rope.number(name, 0, 100, 0, float) for name in ("mscale", "mscale_all_dim"))
    if not (mscale and over_all):
        mscale, over_all = 1, 0
    scale = (1 + 0.1 * mscale * math.log(factor)) / (1 + 0.1 * over_all * math.log(factor))
    return RopeScaling(
        "yarn",
        factor,
        original_max_seq_len=original,
        beta_fast=rope.number("beta_fast", 1e-3, 1e6, 32, float),
        beta_slow=rope.number("beta_slow", 1e-3, 1e6, 1, float),
        attention_factor=rope.number("attention_factor", 1e-3, 1e3, scale, float),
        truncate=rope.raw.get("truncate") is not False,
    )


def _meta_config(folder: Path) -> Config:
    f = Fields(folder / "params.json")
    f.refuse_unless("use_scaled_rope", False, None)
    dim, n_heads = f.number("dim", 1, 1 << 17), f.number("n_heads", 1, 1024)
    if dim % n_heads:
        raise ValueError(f"{f.file}: dim is {dim}, not a multiple of n_heads {n_heads}")
    multiple_of = f.number("multiple_of", 1, 1 << 17, 256)
    # Meta's llama/model.py: two thirds of 4 dim, times a multiplier, rounded up to a multiple
    hidden = int(f.number("ffn_dim_multiplier", 1e-3, 1e3, 1.0, float) * int(2 * 4 * dim / 3))
    vocab_size = f.number("vocab_size", -1, 1 << 22, -1)
    if vocab_size < 1:  # "as the tokenizer says": each of Meta's shards holds all rows of the embedding, and some columns
        shapes = {part.name: part.shape for part in parts_of(_tensor_files(folder, hugging_face=False)[0])}
        vocab_size = next(iter(shapes.get("tok_embeddings.weight", ())), 1)
    return Config(
        dim=dim,
        n_layers=f.number("n_layers", 1, 1024),
        n_heads=n_heads,
        n_kv_heads=f.number("n_kv_heads", 1, 1024, n_heads),
        head_dim=dim // n_heads,
        hidden_dim=multiple_of * -(-hidden // multiple_of),
        vocab_size=vocab_size,
        norm_eps=f.number("norm_eps", 0, 1, 1e-5, float),
        rope_theta=f.number("rope_theta", 1, 1e12, 10000.0, float),
    )


# ---- checkpoint: the tensors of a folder by Meta's names, each read from disk when it is asked for

HF_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def tensor_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a checkpoint, by Meta's names."""
    layer = {
        "attention_norm": (c.dim,),
        "attention.wq": (c.q_dim, c.dim),
        "attention.wk": (c.kv_dim, c.dim),
        "attention.wv": (c.kv_dim, c.dim),
        "attention.wo": (c.dim, c.q_dim),
        "ffn_norm": (c.dim,),
        "feed_forward.w1": (c.hidden_dim, c.dim),
        "feed_forward.w3": (c.hidden_dim, c.dim),
        "feed_forward.w2": (c.dim, c.hidden_dim),
    }
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (c.vocab_size, c.dim)}
    layer = {f"{name}.weight": shape for name, shape in layer.items()}
    if c.qkv_bias:
        layer |= {"attention.wq.bias": (c.q_dim,), "attention.wk.bias": (c.kv_dim,), "attention.wv.bias": (c.kv_dim,)}
    if c.qk_norm:
        layer |= {"attention.q_norm.weight": (c.head_dim,), "attention.k_norm.weight": (c.head_dim,)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(c.n_layers) for name, shape in layer.items()}
    shapes["norm.weight"] = (c.dim,)
    return shapes if c.tie_embeddings else shapes | {"output.weight": (c.vocab_size, c.dim)}


def matrix_shapes(c: Config) -> dict[str, tuple[int, int]]:
    """Shapes [N, K] of the matrices as the model holds them, by the names of Weights and LayerWeights."""
    layers = {f"layers.{i}.{name}": shape for i in range(c.n_layers) for name, shape in c.layer_matrices.items()}
    return layers | {"output": (c.output_rows, c.dim)}


def largest_read(c: Config) -> int:
    """Elements of the largest matrix that is read to be encoded; wo and w2 are cut by columns, but read in whole rows."""
    sizes = {name: math.prod(shape) * (c.ranks if name in ("wo", "w2") else 1) for name, shape in c.layer_matrices.items()}
    return max(c.output_rows * c.dim, *sizes.values())


def unquantised_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of what is never kept in 8 bits, by the names of Weights and LayerWeights."""
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (c.vocab_size, c.dim), "norm.weight": (c.dim,)}
    return shapes | {f"layers.{i}.{name}.weight": shape for i in range(c.n_layers) for name, shape in c.layer_vectors.items()}


def saved_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a model saved in 8 bits: each matrix as the model holds it, with its scale."""
    matrices = matrix_shapes(c)
    return unquantised_shapes(c) | matrices | {f"{name}.scale": shape[:1] for name, shape in matrices.items()}


class Checkpoint:
    """The tensors of a folder. Only headers are read before `read` is called: the model must never be in memory twice."""

    def __init__(self, folder: Path, config: Config):
        self.folder, self.config = folder, config
        self.format = saved_format(folder)  # of the matrices, where they are stored in 8 bits
        self.hugging_face = not self.format and (folder / "config.json").is_file()
        self.shapes = saved_shapes(config) if self.format else tensor_shapes(config)
        self.parts: dict[str, list[Part]] = {}
        for file in [folder / SAVED] if self.format else _tensor_files(folder, self.hugging_face):
            for part in parts_of(file):
                name = _meta_name(part.name) if self.hugging_face else part.name
                if not name.endswith(("rotary_emb.inv_freq", "rope.freqs")):  # derived from the config
                    self._check_type(name, part)
                    if name in self.parts and (self.format or self.hugging_face):  # only Meta's layout splits tensors
                        raise ValueError(f"{part.file}: {part.name} is also in {self.parts[name][0].file.name}")
                    self.parts.setdefault(name, []).append(part)
        if config.tie_embeddings:
            self.parts.pop("output.weight", None)
        self._check(self.shapes)

    def _check_type(self, name: str, part: Part) -> None:
        types = [*DTYPES.values()]
        if self.format and not name.endswith(".weight"):
            types = [torch.float32 if name.endswith(".scale") else torch.int8]
        if part.dtype not in types:
            listed = ", ".join(str(t).removeprefix("torch.") for t in types)
            raise ValueError(f"{part.file}: {part.name} has a type other than {listed}")

    def _check(self, expected: dict[str, tuple[int, ...]]) -> None:
        problems = [f"{self._name_in_file(name)} is missing" for name in expected if name not in self.parts]
        for name, parts in self.parts.items():
            if name not in expected:
                problems.append(f"{parts[0].name} is unexpected")
            elif self._split_axis(name, expected[name]) is None:
                shapes = " + ".join(str(list(part.shape)) for part in parts)
                problems.append(f"{parts[0].name} is {shapes}, expected {list(expected[name])}")
        if problems:
            shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
            raise ValueError(f"{self.folder}: the tensors do not fit the config: {shown}")

    def _split_axis(self, name: str, shape: tuple[int, ...]) -> int | None:
        """The axis along which the parts make up `shape`, any if each part is whole (Meta's shards repeat the norms); None if
        they do not make it up."""
        parts, first = self.parts[name], self.parts[name][0].shape
        if any(part.shape != first for part in parts) or len(first) != len(shape):
            return None
        for axis in range(len(shape)):
            count = 1 if len(shape) == 1 else len(parts)
            if (*first[:axis], first[axis] * count, *first[axis + 1 :]) == shape:
                return axis
        return None

    def _name_in_file(self, name: str) -> str:
        """A tensor's name in the checkpoint's own layout."""
        if not self.hugging_face:
            return name
        names = {meta: theirs for theirs, meta in HF_NAMES.items()}
        layer, stem, kind = re.fullmatch(r"(layers\.\d+\.)?(.+)\.(weight|bias)", name).groups()
        return f"model.{layer}{names[stem]}.{kind}" if layer else f"{names[stem]}.{kind}"

    @property
    def dtype(self) -> torch.dtype:
        stored = self.parts["tok_embeddings.weight"][0].dtype
        return stored if self.format else self.config.dtype or stored

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in tensor_shapes(self.config).values())

    def read(
        self, name: str, rows: slice = parallel.ALL, columns: slice = parallel.ALL, gpu: torch.device | None = None
    ) -> Tensor:
        """Read a tensor, or these rows and columns of it. For a GPU, it is returned in pinned memory, to be copied while the
        next one is read, or already on its way there. The rows of q and k, always whole heads, are put into Meta's RoPE
        convention, interleaved pairs."""
        parts, shape = self.parts[name], self.shapes[name]
        index = [range(size)[taken] for size, taken in zip(shape, (rows, columns))]
        if parts[0].shape == shape:
            tensor = read_part(parts[0], gpu is not None, index)
        else:
            tensor = self._read_split(parts, index, self._split_axis(name, shape))
        if self.hugging_face and name.rpartition(".")[0].endswith((".wq", ".wk", ".q_norm", ".k_norm")):
            D = self.config.head_dim  # Hugging Face pairs row i of a head with row i + D / 2
            if gpu and tensor.dim() == 2:  # a CPU would take longer to permute it than to read it
                tensor = tensor.to(gpu, non_blocking=True)
            tensor = tensor.view(-1, 2, D // 2, *shape[1:]).transpose(1, 2).reshape(tensor.shape)
        return tensor.pin_memory() if gpu and not tensor.is_cuda else tensor

    @staticmethod
    def _read_split(parts: list[Part], index: list[range], axis: int) -> Tensor:
        """Read what an index spans of a tensor that is split along an axis."""
        pieces, size = [], parts[0].shape[axis]
        for i, part in enumerate(parts):
            start, stop = max(index[axis].start - i * size, 0), min(index[axis].stop - i * size, size)
            if start < stop:
                pieces.append(read_part(part, index=[*index[:axis], range(start, stop), *index[axis + 1 :]]))
        return torch.cat(pieces, axis)

    def first_bad_tensor(self, dtype: torch.dtype) -> str | None:
        """What is wrong with the first tensor that holds NaN or inf, as stored or once converted to dtype, if there is one.
        Codes and scales are not converted, and were checked when they were read."""
        for part in (part for name, parts in self.parts.items() if name.endswith((".weight", ".bias")) for part in parts):
            tensor = read_part(part)
            if not torch.isfinite(tensor).all():
                return f"{part.name} in {part.file.name} holds NaN or inf"
            if not torch.isfinite(tensor.to(dtype)).all():
                return f"{part.name} in {part.file.name} holds values beyond the range of {dtype}; try --dtype fp32"
        return None


def _meta_name(name: str) -> str:
    layer = re.fullmatch(r"model\.(layers\.\d+\.)(.+)\.(weight|bias)", name)
    prefix, stem, kind = layer.groups() if layer else ("", name.removesuffix(".weight"), "weight")
    return f"{prefix}{HF_NAMES[stem]}.{kind}" if stem in HF_NAMES else name


def _tensor_files(folder: Path, hugging_face: bool) -> list[Path]:
    if not hugging_face:
        files = sorted(folder.glob("consolidated.*.pth"))
        if not files:
            raise FileNotFoundError(f"{folder} holds params.json but no consolidated.*.pth")
        return files
    for single in ("model.safetensors", "pytorch_model.bin"):
        if (folder / f"{single}.index.json").is_file():
            return _indexed_files(folder / f"{single}.index.json")
        if (folder / single).is_file():
            return [folder / single]
    usual = "no weights (model.safetensors or pytorch_model.bin, or an index of their shards)"
    raise FileNotFoundError(f"{folder} holds {_instead(folder) or usual}")


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} lacks the field weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith((".safetensors", ".bin")):
            raise ValueError(f"{index} names {name!r}, which is not a file of its own folder")
        if not (index.parent / name).is_file():
            raise FileNotFoundError(f"{index} names {name}, which is missing")
    return [index.parent / name for name in names]


# ---- where a checkpoint is: a folder, or a repository of the hub, downloaded on first use

SMALL_FILES = [
    "config.json", "params.json", "generation_config.json", "tokenizer.model", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
]  # fmt: skip
WEIGHTS = [  # in order of preference: a repository may have several kinds
    r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?",
    r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?",
    r"consolidated\.\d+\.pth",
]


@one_line_errors()
def find_checkpoint(name: str) -> Path:
    """The folder of a checkpoint that is given as a folder, or as a repository "owner/name" of the Hugging Face hub: in the
    hub's cache, to which it is downloaded if need be. Raises OSError or ValueError, in one line that says what to do."""
    folder = Path(os.path.expanduser(name))  # as it is if there is no such user
    if folder.is_dir():
        return folder
    if folder.exists():
        what = f"{name} is GGUF, {QUANTISED}" if folder.suffix == ".gguf" else f"{name} is a file"
        raise FileNotFoundError(f"{what} (-m takes the folder of a checkpoint)")
    home = Path(os.path.expanduser(os.environ.get("HF_HOME", "~/.cache/huggingface")))
    hub = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE", home / "hub")))
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise FileNotFoundError(f"no such folder, nor the name of a repository: {name}")
    repository = hub / f"models--{name.replace('/', '--')}"
    if (repository / "refs" / "main").is_file():
        commit = read_bytes(repository / "refs" / "main", 1000).decode(errors="replace").strip()
        if not re.fullmatch(r"[0-9A-Za-z]+", commit):
            raise ValueError(f"{repository / 'refs' / 'main'} holds {commit!r}, which is not a commit id")
        snapshot = repository / "snapshots" / commit
        if _is_complete(snapshot):
            return snapshot
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise FileNotFoundError(f"no such folder, not complete in the hub cache {hub}, and HF_HUB_OFFLINE is set: {name}")
    return _download(name, hub)


def _is_complete(folder: Path) -> bool:
    """Whether the download into a folder was completed."""
    try:
        _tensor_files(folder, hugging_face=(folder / "config.json").is_file())
        return tokenizer_file(folder).is_file()
    except OSError:
        return False


def _download(name: str, hub: Path) -> Path:
    """Download what this program reads of a repository to the hub cache. An interrupted download is resumed."""
    import huggingface_hub
    from huggingface_hub import errors, utils

    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    utils.logging.set_verbosity_error()
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    options = dict(endpoint=endpoint, token=os.environ.get("HF_TOKEN"))
    try:
        info = huggingface_hub.HfApi(**options).model_info(name, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings}
        files = [file for file in SMALL_FILES if file in sizes] + _weight_files(name, list(sizes))
        _check_disk(hub, sum(sizes[file] for file in files), name)
        return Path(huggingface_hub.snapshot_download(name, cache_dir=hub, allow_patterns=files, **options))
    except errors.GatedRepoError:
        reason = "it is gated: accept its licence on its page, and set HF_TOKEN to a token of that account"
    except errors.RepositoryNotFoundError:
        reason = "no such repository there (a private one needs HF_TOKEN)"
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.HFValidationError) as error:
        reason = str(error)
    except FileNotFoundError:
        raise
    except Exception as error:  # network errors, of whichever library huggingface_hub uses
        reason = f"{type(error).__name__}: {error}"
    raise OSError(f"no such folder, not complete in the hub cache {hub}, and not available from {endpoint}: {name}: {reason}")


def _weight_files(name: str, files: list[str]) -> list[str]:
    for pattern in WEIGHTS:
        if found := [file for file in files if re.fullmatch(pattern, file)]:
            return found
    if any(file.endswith(".gguf") for file in files):
        raise FileNotFoundError(f"{name} holds GGUF, {QUANTISED}")
    raise FileNotFoundError(f"{name} holds no weights that this program reads (model.safetensors, pytorch_model.bin)")


def _check_disk(folder: Path, need: int, name: str) -> None:
    place = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(place).free
    if need > free:
        raise FileNotFoundError(f"{name} takes {need / 1e9:.2f} GB, but {place} has {free / 1e9:.2f} GB free (see HF_HOME)")


# ---- weights: the checkpoint's tensors, brought to the place and into the form that the model wants

SOURCES = {  # the checkpoint's tensors that make up each matrix of LayerWeights
    "wqkv": ("attention.wq", "attention.wk", "attention.wv"),
    "wo": ("attention.wo",),
    "w13": ("feed_forward.w1", "feed_forward.w3"),
    "w2": ("feed_forward.w2",),
}
JOINED = {  # the same for vectors that join several, all within the checkpoint's attention
    "qkv_bias": ("wq.bias", "wk.bias", "wv.bias"),
    "qk_norm": ("q_norm.weight", "k_norm.weight"),
}


def cuts(c: Config, rank: int, ranks: int) -> dict[str, tuple[list[slice], slice]]:
    """The rows and columns that a rank takes of each tensor that it does not take whole, by the names of a checkpoint and by
    those of LayerWeights, where some are joined. c: the configuration of the whole model."""

    def rows_of(count: int, each: int, before: int = 0) -> slice:
        taken = parallel.share(count, rank, ranks)
        return slice(before + taken.start * each, before + taken.stop * each)

    if ranks == 1:
        return {}
    q, kv, hidden = rows_of(c.n_heads, c.head_dim), rows_of(c.n_kv_heads, c.head_dim), rows_of(c.hidden_dim, 1)
    by_rows = {"attention.wq": [q], "attention.wk": [kv], "attention.wv": [kv]}
    by_rows |= {"feed_forward.w1": [hidden], "feed_forward.w3": [hidden], "w13": [rows_of(c.hidden_dim, 2)]}
    by_rows |= dict.fromkeys(("output", "tok_embeddings"), [rows_of(c.vocab_size, 1)])
    joined = [q, *(rows_of(c.n_kv_heads, c.head_dim, before) for before in (c.q_dim, c.q_dim + c.kv_dim))]
    by_rows |= dict.fromkeys(("wqkv", "qkv_bias"), joined)
    by_columns = {"attention.wo": q, "feed_forward.w2": hidden, "wo": q, "w2": hidden}
    found = {name: (rows, parallel.ALL) for name, rows in by_rows.items()}
    return found | {name: ([parallel.ALL], columns) for name, columns in by_columns.items()}


class Loader:
    """Brings one tensor after another from the files to its place on the device: matrices in the type `stored`, or encoded in
    an 8-bit format, or unchanged if the file already has them in 8 bits; all else in dtype (the norms are small, and a token
    reads only one row of the embedding). With several ranks, each loads its part of every matrix."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        stored: torch.dtype,
        device: torch.device,
        format: Format | None,
        quiet: bool,
        rank: int = 0,
        ranks: int = 1,
        backend: str = "torch",
    ):
        self.checkpoint, self.dtype, self.stored, self.device, self.format = checkpoint, dtype, stored, device, format
        self.backend = backend  # whose ops will read the matrices
        self.config = checkpoint.config.cut(ranks)
        self.shapes = matrix_shapes(self.config)
        self.cuts = cuts(checkpoint.config, rank, ranks)
        self.whole_rows = bool(format and not checkpoint.format)  # so that codes do not depend on how many ranks there are
        if self.whole_rows:  # what stays is allocated first, against fragmentation
            self.encoded = {name: self._empty_codes(*shape) for name, shape in self.shapes.items()}
            self.workspace = torch.empty(largest_read(self.config), dtype=stored, device=device)
        total = sum(self.bytes_read(name, shape) for name, shape in checkpoint.shapes.items())
        hidden = quiet or not sys.stderr.isatty()
        self.bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=hidden, leave=False)

    def cut_of(self, name: str) -> tuple[list[slice], slice]:
        """The rows and columns that this rank takes of a tensor."""
        stem = re.sub(r"^layers\.\d+\.|\.(weight|bias|scale)$", "", name)
        return self.cuts.get(stem, ([parallel.ALL], parallel.ALL))

    def bytes_read(self, name: str, shape: tuple[int, ...]) -> int:
        rows, columns = self.cut_of(name)
        if name == "tok_embeddings.weight":  # tied, it is read again to be encoded
            rows = [parallel.ALL, *(rows if self.config.tie_embeddings and self.whole_rows else [])]
        counts = [sum(len(range(shape[0])[taken]) for taken in rows), *shape[1:]]
        if len(shape) == 2 and not self.whole_rows:
            counts[1] = len(range(shape[1])[columns])
        return math.prod(counts) * self.checkpoint.parts[name][0].dtype.itemsize

    def _empty_codes(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        return torch.empty(rows, columns, dtype=torch.int8, device=self.device), torch.empty(rows, device=self.device)

    def load(self) -> Weights:
        c = self.checkpoint.config
        with self.bar:
            embedding, layers, norm = (
                self.vector("tok_embeddings"),
                [self.layer(i) for i in range(c.n_layers)],
                self.vector("norm"),
            )
            if c.tie_embeddings and not self.format:
                ((rows,), _) = self.cut_of("output")
                tied = kernels.prepacked(Matrix(embedding[rows].to(self.stored)), self.backend)
                return Weights(embedding, layers, norm, tied)
            return Weights(embedding, layers, norm, self.matrix("output", "tok_embeddings" if c.tie_embeddings else "output"))

    def layer(self, i: int) -> LayerWeights:
        at = f"layers.{i}"
        vectors = {name: self.vector(f"{at}.{name}") for name in self.config.layer_vectors}
        matrices = {name: self.matrix(f"{at}.{name}", *(f"{at}.{s}" for s in sources)) for name, sources in SOURCES.items()}
        return LayerWeights(**vectors, **matrices)

    def vector(self, name: str) -> Tensor:
        """A norm, the embedding, or a vector that joins several of the checkpoint's."""
        layer, _, stem = name.rpartition(".")
        if stem in JOINED and not self.checkpoint.format:
            parts = [f"{layer}.attention.{source}" for source in JOINED[stem]]
            tensor = torch.cat([self.read(part, rows) for part in parts for rows in self.cut_of(part)[0]])
            tensor = tensor.view(self.config.layer_vectors[stem])
        elif stem in JOINED:
            tensor = torch.cat([self.read(f"{name}.weight", rows) for rows in self.cut_of(name)[0]])
        else:
            tensor = self.read(f"{name}.weight")
        return tensor.to(self.device, self.dtype, copy=True, non_blocking=True)

    def matrix(self, name: str, *sources: str) -> Matrix:
        """A matrix made of the checkpoint's: w1 and w3 with their rows interleaved, others stacked."""
        if self.checkpoint.format:
            return self.saved(name)
        shape, columns = self.shapes[name], self.cut_of(sources[0])[1]
        read_columns = columns
        if self.whole_rows:
            shape, read_columns = (shape[0], self.checkpoint.shapes[f"{sources[0]}.weight"][1]), parallel.ALL
            data = self.workspace[: math.prod(shape)].view(shape)
        else:
            data = torch.empty(shape, dtype=self.stored, device=self.device)
        parts = [(f"{source}.weight", rows) for source in sources for rows in self.cut_of(source)[0]]
        places = [data[0::2], data[1::2]] if name.endswith("w13") else self.places(data, parts)
        for place, (source, rows) in zip(places, parts, strict=True):
            place.copy_(self.read(source, rows, read_columns), non_blocking=True)
        return self.encode(name, data, columns) if self.whole_rows else kernels.prepacked(Matrix(data), self.backend)

    def places(self, data: Tensor, parts: list[tuple[str, slice]]) -> tuple[Tensor, ...]:
        """Where each part, rows of one of the checkpoint's tensors, goes in data: stacked, in this order."""
        return data.split([len(range(self.checkpoint.shapes[name][0])[rows]) for name, rows in parts])

    def encode(self, name: str, data: Tensor, columns: slice) -> Matrix:
        codes, scales = self.encoded[name]
        try:
            if data.shape == codes.shape:
                self.format.encode(data, codes, scales)
            else:
                codes.copy_(self.format.encode(data, None, scales)[0][:, columns])
            return Matrix(codes, scales, self.format)
        except ValueError as error:
            raise ValueError(self.checkpoint.first_bad_tensor(self.stored) or str(error)) from None

    def saved(self, name: str) -> Matrix:
        cut, columns = self.cut_of(name)
        data, scale = self._empty_codes(*self.shapes[name])
        for whole, part, taken in ((data, name, (columns,)), (scale, f"{name}.scale", ())):
            for place, rows in zip(self.places(whole, [(part, rows) for rows in cut]), cut):
                place.copy_(self.read(part, rows, *taken), non_blocking=True)
        try:
            self.format.check(data, scale, whole_rows=columns == parallel.ALL)
        except ValueError as error:
            file = self.checkpoint.folder / SAVED
            raise ValueError(f"{file}: {name} has {error}: save it again from the original") from None
        return Matrix(data, scale, self.format)

    def read(self, name: str, rows: slice = parallel.ALL, columns: slice = parallel.ALL) -> Tensor:
        gpu = self.device if self.device.type == "cuda" else None
        tensor = self.checkpoint.read(name, rows, columns, gpu)
        self.bar.update(tensor.nbytes)
        if gpu:
            return tensor
        return tensor.float() if tensor.is_floating_point() else tensor  # torch is slow at converting between 16-bit types


# ---- what it runs on, and whether it fits


def pick_device(name: str = "auto") -> torch.device:
    """With several processes on a host, each takes the GPU of its local rank. Raises ValueError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}: cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name!r}: cpu, cuda or cuda:N")
    if device.type == "cuda":
        ranks = parallel.group()
        if device.index is not None and ranks.size > 1:
            raise ValueError(f"device {name} was requested by {ranks.size} processes: use cuda, and each takes its own GPU")
        index = ranks.local_rank if device.index is None else device.index
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise ValueError(f"device cuda:{index} was asked for, but torch sees {torch.cuda.device_count()} CUDA devices")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)  # where Triton launches
    return device


def check_choice(what: str, value: object, choices: Collection) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{what} is {value!r}; it must be one of {', '.join(map(str, choices))}")


def pick_dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """auto is the checkpoint's own, except for 16-bit types on a CPU: bf16 if the CPU can multiply it, otherwise fp32."""
    check_choice("dtype", name, ("auto", *DTYPES))
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda" or stored == torch.float32:
        return stored
    return torch.bfloat16 if kernels.multiplies_bf16() else torch.float32


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where the system does not say (no GPU and no /proc/meminfo)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return 1024 * int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text()).group(1))
    except (OSError, AttributeError):
        return None


def check_memory(
    config: Config, dtype: torch.dtype, device: torch.device, ctx_size: int, format: Format | None = None, kv_fp8: bool = False
) -> None:
    """Raise MemoryError if weights, cache and workspace (of one rank, if the configuration is cut) will not fit, before any of
    them is allocated."""
    c, size = config, dtype.itemsize
    weights = size * sum(math.prod(shape) for name, shape in unquantised_shapes(c).items())
    twice = device.type == "cpu" and dtype == torch.bfloat16  # a tied embedding: the matrix is a copy, in fp16 or packed
    for name, (rows, columns) in matrix_shapes(c).items():
        if format:
            weights += format.matrix_bytes(rows, columns)
        elif not (name == "output" and c.tie_embeddings) or twice:
            weights += size * rows * columns
    cache = 2 * (1 if kv_fp8 else size) * c.n_layers * c.kv_dim * ctx_size
    widest = 3 * c.dim + c.q_dim + 2 * c.kv_dim + 3 * c.hidden_dim
    workspace = min(ctx_size, CHUNK[device.type]) * (size * widest + ctx_size) + 8 * c.vocab_size
    copies = 1  # of what a prompt decodes from 8 bits
    if device.type == "cuda":  # the graphs of prompts have their own memory
        workspace += min(ctx_size, PADDED[-1]) * size * widest
        copies = 2
    if format:  # the largest matrix
        workspace += copies * size * largest_read(c)
    if kv_fp8:  # keys and values of one layer
        workspace += copies * 2 * size * c.kv_dim * ctx_size
    free, where = free_memory(device), str(device)
    if c.ranks > 1:
        ranks = parallel.group()
        where += f" for rank {ranks.rank} of {ranks.size}"
        if free is not None and device.type == "cpu":  # the ranks of a host share its memory
            free //= ranks.local_size
    if free is not None and weights + cache + workspace > free:
        w, k, o, total, has = (f"{n / 1e9:.2f} GB" for n in (weights, cache, workspace, weights + cache + workspace, free))
        raise MemoryError(
            f"weights {w} + cache of {ctx_size} tokens {k} + workspace {o} = {total}, but {where} has {has} free:"
            " try a smaller context (-c), a smaller --dtype, --fp8 or --kv-fp8"
        )


def pick_backend(name: str, device: torch.device) -> str:
    """Whose ops run the model: "torch" (the reference ops) or "triton" (the fused ones), the default on a GPU.
    Raises ValueError."""
    check_choice("backend", name, ("auto", "torch", "triton"))
    if name == "torch" or name == "auto" and device.type == "cpu":
        return "torch"
    if launch.triton is None:
        raise ValueError("Triton is not installed: --backend torch runs without it")
    if device.type == "cpu" and not launch.INTERPRETED:
        raise ValueError("on a CPU the Triton kernels run only in Triton's interpreter: set TRITON_INTERPRET=1")
    if device.type == "cuda" and launch.capability(device) < 80:
        card = torch.cuda.get_device_name(device)
        raise ValueError(f"{card} is older than compute capability 8.0, which the kernels need: use --backend torch")
    return "triton"


def pick_fp16_sums(accumulate: str, backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a prompt's products are accumulated in half precision. auto: on GeForce cards, whose tensor cores do that at
    twice the rate of fp32 accumulation; others gain nothing. Raises ValueError if fp16 is asked for and cannot be done."""
    check_choice("accumulate", accumulate, ("auto", "fp32", "fp16"))
    able = backend == "triton" and device.type == "cuda" and dtype == torch.float16
    if accumulate == "fp16" and not able:
        raise ValueError("--accumulate fp16 needs a GPU, the Triton kernels and --dtype fp16")
    return able and (accumulate == "fp16" or accumulate == "auto" and "GeForce" in torch.cuda.get_device_name(device))


@one_line_errors()
def load(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    ctx_size: int | None = None,
    backend: str = "auto",
    fp8: str | None = None,
    kv_fp8: bool = False,
    accumulate: str = "auto",
    quiet: bool = False,
) -> Llama:
    """Load a checkpoint: a folder in Hugging Face's or Meta's layout, or a repository of the hub, see find_checkpoint.

    ctx_size: the context, which must fit into memory beside the weights; 0 is the model's own; None is that, but
    at most 4096. fp8: "e4m3" or "e5m2" keeps the matrices in 8 bits; what save_fp8 wrote has its own format. kv_fp8: keys and
    values in 8 bits, too. accumulate: "fp32", "fp16" or "auto", see pick_fp16_sums; all but "fp32" let products of 8-bit
    floats accumulate fast. quiet: no progress bar. Raises ValueError, OSError or MemoryError, in one line that says what to
    do.
    """
    check_choice("fp8", fp8, (None, *FORMATS))
    if ctx_size is not None and ctx_size < 0:
        raise ValueError(f"ctx_size is {ctx_size}; it must be a number of tokens, or 0 for the model's own")
    folder = find_checkpoint(name)
    config = read_config(folder)
    checkpoint = Checkpoint(folder, config)
    if checkpoint.format and fp8 not in (None, checkpoint.format.name):
        raise ValueError(f"{folder} holds {checkpoint.format.name} matrices: for {fp8} ones, load the original")
    format = checkpoint.format or (FORMATS[fp8] if fp8 else None)
    on = pick_device(device)
    backend = pick_backend(backend, on)
    if backend == "triton" and config.head_dim % 8:
        raise ValueError(f"{folder}: head_dim is {config.head_dim}; the kernels need a multiple of 8: use --backend torch")
    torch_dtype = pick_dtype(dtype, checkpoint.dtype, on)
    ctx_size = min(config.max_seq_len, 4096) if ctx_size is None else ctx_size or config.max_seq_len
    if config.sliding_window and ctx_size > config.sliding_window:
        raise ValueError(
            f"{folder}: sliding_window is {config.sliding_window}: a context of {ctx_size} is not supported (see -c)"
        )
    fp16_sums = pick_fp16_sums(accumulate, backend, on, torch_dtype)
    ranks = parallel.group()
    config = config.cut(ranks.size)
    ranks.join(on)
    check_memory(config, torch_dtype, on, ctx_size, format, kv_fp8)
    stored = checkpoint.dtype if format else kernels.storage_dtype(backend, torch_dtype, on)  # codes do not depend on --dtype
    with torch.inference_mode():
        weights = Loader(checkpoint, torch_dtype, stored, on, format, quiet, ranks.rank, ranks.size, backend).load()
    if on.type == "cuda":
        torch.cuda.empty_cache()  # what loading needed in addition to the weights
    fast_sums = accumulate != "fp32"
    return Llama(config, weights, backend, on, torch_dtype, ctx_size, checkpoint, kv_fp8, fp16_sums, fast_sums)


# ---- a model saved in 8 bits: a folder whose model.safetensors says so in its metadata, with the other files of a checkpoint

SAVED = "model.safetensors"
LAYOUT = "1"  # of such a file; any other is refused


def saved_format(folder: Path) -> Format | None:
    """The 8-bit format of a folder that save_fp8 wrote, None for any other. Raises ValueError."""
    file = folder / SAVED
    if not file.is_file():
        return None
    metadata, _ = safetensors_header(file)
    version, name = metadata.get("fused-llama"), metadata.get("fp8")
    if not version:
        return None
    if version != LAYOUT:
        raise ValueError(f"{file} was saved by another version of fused-llama: save it again from the original")
    if name not in FORMATS:
        raise ValueError(f"{file}: fp8 is {name!r}, which is not supported (supported: {', '.join(FORMATS)})")
    return FORMATS[name]


@one_line_errors()
def save_fp8(
    name: str, target: str, *, fp8: str = "e4m3", dtype: str = "auto", device: str = "auto", quiet: bool = False
) -> Path:
    """Write a checkpoint with its matrices in 8 bits to the folder `target`, which must be new or empty: whole or not at all.
    Returns its model.safetensors. All other tensors are in dtype; auto is the checkpoint's own, on a CPU too.

    Raises ValueError, OSError or MemoryError, in one line that says what to do.
    """
    check_choice("fp8", fp8, FORMATS)
    check_choice("dtype", dtype, ("auto", *DTYPES))
    folder, to = find_checkpoint(name), Path(os.path.expanduser(target)).resolve()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise FileExistsError(f"{to} is not an empty folder: save to a new one")
    if not to.parent.is_dir():
        raise FileNotFoundError(f"{to.parent} does not exist: create that folder first")
    config = read_config(folder)
    checkpoint = Checkpoint(folder, config)
    if checkpoint.format:
        raise ValueError(f"{folder} holds {checkpoint.format.name} matrices already: save from the original")
    on, as_dtype, format = pick_device(device), DTYPES.get(dtype, checkpoint.dtype), FORMATS[fp8]
    check_memory(config, as_dtype, on, 1, format)
    sizes = {"weight": as_dtype.itemsize, "scale": 4}
    need = sum(math.prod(shape) * sizes.get(n.rsplit(".")[-1], 1) for n, shape in saved_shapes(config).items())
    free = shutil.disk_usage(to.parent).free
    if need > free:
        raise OSError(f"the model takes {need / 1e9:.2f} GB, but {to.parent} has {free / 1e9:.2f} GB free: save elsewhere")
    with folder_beside(to) as made:
        _copy_what_is_small(folder, made, config)
        with torch.inference_mode():
            weights = Loader(checkpoint, as_dtype, checkpoint.dtype, on, format, quiet).load()
        save_file(_saved_tensors(weights), made / SAVED, {"fused-llama": LAYOUT, "fp8": format.name})
        (made / SAVED).chmod(made.stat().st_mode & 0o666)  # the library makes it readable for the owner alone
        made.rename(to)
    return to / SAVED


def _copy_what_is_small(folder: Path, to: Path, config: Config) -> None:
    """Copy all that read_config and Tokenizer read, so that they find the same in `to` as in the folder."""
    for file in (*(folder / name for name in SMALL_FILES), tokenizer_file(folder)):
        if file.is_file():
            (to / file.name).write_bytes(read_bytes(file, FILE_BYTES))
    if not (folder / "config.json").is_file():  # params.json, whose vocab_size may be -1: see the tensors, which are not copied
        (to / "params.json").write_text(json.dumps(read_json(folder / "params.json") | {"vocab_size": config.vocab_size}))
    beside = read_json(to / "tokenizer_config.json") if (to / "tokenizer_config.json").is_file() else {}
    template, _ = find_template(folder, beside)
    if template != find_template(to, beside)[0]:  # it was recognised by the folder's path
        (to / "chat_template.jinja").write_text(template)


def _saved_tensors(w: Weights) -> dict[str, Tensor]:
    """The tensors on the CPU, by the names of saved_shapes."""
    tensors, named = {}, {"tok_embeddings": w.embedding, "norm": w.norm, "output": w.output}
    named |= {f"layers.{i}.{name}": value for i, layer in enumerate(w.layers) for name, value in vars(layer).items()}
    for name, value in named.items():
        if isinstance(value, Matrix):
            tensors |= {name: value.data.cpu(), f"{name}.scale": value.scale.cpu()}
        elif value is not None:
            tensors[f"{name}.weight"] = value.cpu()
    return tensors
