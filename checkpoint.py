"""Checkpoints on disk: configuration, tensors in each layout, the hub, the memory check, loading,
saving."""

import itertools
import json
import math
import os
import re
import warnings
import zipfile
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

import kernels
import launch
from extra import gguf, hub, quants
from extra.files import one_line, one_line_errors, open_regular, read_json
from extra.gguf import read_header
from extra.parallel import ALL, Ranks, share
from fp8 import Format, Matrix, Tensors
from kernels import FORMATS
from model import (
    CACHES,
    CUT,
    EMBEDDING,
    NORM,
    OUTPUT,
    Config,
    Joined,
    LayerWeights,
    Llama,
    Stored,
    Weights,
)
from sampling import Sampling
from tokenizer import tokenizer_file

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


# ---- configuration


class Fields(dict):
    """A JSON object of a checkpoint with checked access: every error names the file, the field and
    its value."""

    def __init__(self, file: Path, fields: dict | None = None):
        super().__init__(read_json(file) if fields is None else fields)
        self.file = file

    def number(
        self, name: str, low: float, high: float, default: float | None = None, kind: type = int
    ):
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self.file} lacks the field {name}")
        fits = (
            isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
        )
        if not fits or kind is int and value != int(value):
            what = "a whole number" if kind is int else "a number"
            raise ValueError(
                f"{self.file}: {name} is {value!r}; it must be {what} from {low:g} to {high:g}"
            )
        return kind(value)

    def sub(self, name: str) -> "Fields":
        value = self.get(name) or {}
        if not isinstance(value, dict):
            raise ValueError(f"{self.file}: {name} is {value!r}; it must be an object")
        return Fields(self.file, value)

    def refuse_unless(self, name: str, *allowed) -> None:
        """For a field whose other values would change the result in a way not implemented here."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            listed = ", ".join(
                "absent" if value is None else json.dumps(value) for value in allowed
            )
            raise ValueError(
                f"{self.file}: {name} is {value!r}, which is not supported (supported: {listed})"
            )


@one_line_errors()
def read_config(folder: Path) -> Config:
    """The configuration in config.json, in Meta's params.json or in a GGUF file. Raises OSError or
    ValueError."""
    if folder.is_file():
        config = _hugging_face_config(
            Fields(folder, gguf.config_json(read_header(folder))), Fields(folder, {})
        )
    elif (folder / "config.json").is_file():
        config = _hugging_face_config(Fields(folder / "config.json"), _generation(folder))
    elif (folder / "params.json").is_file():
        config = _meta_config(folder)
    else:
        raise _nothing_in(folder, "neither config.json nor params.json: not a checkpoint")
    heads, kv_heads = config.n_heads, config.n_kv_heads
    if heads % kv_heads:
        raise ValueError(
            f"{folder}: {heads} query heads cannot share {kv_heads} key/value heads evenly"
        )
    if config.head_dim % 2:
        raise ValueError(f"{folder}: head_dim is {config.head_dim}; RoPE needs an even one")
    return config


INSTEAD = "take the original model, with --fp8 or --int4 if you like, or a GGUF file"


def _nothing_in(folder: Path, usual: str) -> FileNotFoundError:
    """What a folder without a model holds instead, and what to do about it."""
    if (folder / "adapter_config.json").is_file():
        base = Fields(folder / "adapter_config.json").get("base_model_name_or_path")
        usual = f"an adapter without its base: merge it into {base or 'that'} first (peft: merge_and_unload)"
    return FileNotFoundError(f"{folder} holds {usual}")


def _hugging_face_config(f: Fields, generation: Fields) -> Config:
    f.refuse_unless("model_type", *gguf.ARCHITECTURES)
    family = f.get("model_type")
    f.refuse_unless("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias"):
        f.refuse_unless(name, False, None)
    _quantisation(f)
    f["torch_dtype"] = f.get("dtype") or f.get("torch_dtype")
    f.refuse_unless("torch_dtype", None, "float32", "float16", "bfloat16")
    f.refuse_unless("partial_rotary_factor", None, 1, 1.0)
    n_heads = f.number("num_attention_heads", 1, 1024)
    dim = f.number("hidden_size", 1, 1 << 17)
    max_seq_len = f.number("max_position_embeddings", 1, 1 << 24, 2048)
    f.refuse_unless("tie_word_embeddings", False, True, None)
    if family == "mistral":
        f.setdefault("sliding_window", 4096)  # transformers' defaults, here and below
    elif not f.get("use_sliding_window"):  # unless this is set, Llama and Qwen have no window
        f["sliding_window"] = None
    if family == "qwen3":
        f.setdefault("head_dim", 128)
    head_dim = f.number("head_dim", 2, 1024, dim // n_heads)
    theta, factors, gain = _rope(f, head_dim, max_seq_len)
    vocab_size = f.number("vocab_size", 1, 1 << 22)
    bos_ids = _ids(generation, "bos_token_id", vocab_size) + _ids(f, "bos_token_id", vocab_size)
    eos_ids = _ids(generation, "eos_token_id", vocab_size) + _ids(f, "eos_token_id", vocab_size)
    return Config(
        dim=dim,
        n_layers=f.number("num_hidden_layers", 1, 1024),
        n_heads=n_heads,
        n_kv_heads=f.number("num_key_value_heads", 1, 1024, n_heads),
        head_dim=head_dim,
        hidden_dim=f.number("intermediate_size", 1, 1 << 20),
        vocab_size=vocab_size,
        norm_eps=f.number("rms_norm_eps", 0, 1, 1e-6, float),
        rope_theta=theta,
        rope_factors=factors,
        rope_gain=gain,
        max_seq_len=max_seq_len,
        sliding_window=f.number("sliding_window", 1, 1 << 24)
        if f.get("sliding_window") is not None
        else None,
        tie_embeddings=bool(f.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        dtype=getattr(torch, f["torch_dtype"]) if f["torch_dtype"] else None,
        bos_id=bos_ids[0] if bos_ids else None,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
    )


def _quantisation(f: Fields) -> quants.Layout | None:
    """How the safetensors of a folder have matrices quantised, by the config.json. Raises
    ValueError for other ways."""
    if f.get("quantization"):
        raise ValueError(f"{f.file}: quantised for mlx: {INSTEAD}")
    q = f.sub("quantization_config")
    if not q:
        return None
    method = q.get("quant_method")
    if method == "compressed-tensors":
        method, groups = q.get("format"), q.sub("config_groups")
        for name in groups:
            q.update(groups.sub(name).sub("weights"))

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
        return quants.awq(group)
    if method == "gptq":
        only(bits=(4,), checkpoint_format=(None, "", "gptq", "gptq_v2"))
        return quants.gptq(group, q.get("checkpoint_format") == "gptq_v2")
    if method == "fp8":
        only(fmt=(None, "e4m3"), weight_block_size=(None, [128, 128]))
        in_blocks = bool(q.get("weight_block_size"))
        return quants.fp8_scaled("weight_scale_inv" if in_blocks else "weight_scale", in_blocks)
    if method == "pack-quantized":
        only(num_bits=(4,), type=("int",), strategy=("group", "channel"))
        return quants.packed(group, q.get("symmetric") is not False)
    if method == "float-quantized":
        only(num_bits=(8,), type=("float",), strategy=("tensor", "channel", "block"))
        only(block_structure=(None, [128, 128]))
        return quants.fp8_scaled("weight_scale", q.get("strategy") == "block")
    raise ValueError(f"{f.file}: quantised as {method}, which is not supported: {INSTEAD}")


def _generation(folder: Path) -> Fields:
    file = folder / "generation_config.json"
    return Fields(file) if file.is_file() else Fields(file, {})


@one_line_errors()
def read_sampling(folder: Path) -> dict[str, float]:
    """What a checkpoint's generation_config.json says about sampling, by the names of Sampling.
    Raises ValueError."""
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
        if f.get(theirs) is not None
    }


def _ids(f: Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    value = f.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for i in ids:
        if type(i) is not int or not 0 <= i < vocab_size:
            raise ValueError(
                f"{f.file}: {name} is {value!r}; it must hold ids below vocab_size {vocab_size}"
            )
    return tuple(ids)


def _rope(f: Fields, D: int, max_seq_len: int) -> tuple[float, tuple[float, ...], float]:
    """rope_theta, rope_factors and rope_gain of Config, from rope_parameters or from the older
    rope_scaling and rope_theta: linear (Chen et al., 2023), llama3 (Meta, 2024), yarn or longrope
    (Ding et al., 2024)."""
    rope, older = f.sub("rope_parameters"), f.sub("rope_scaling")
    if rope and older and rope != older:
        raise ValueError(
            f"{f.file}: rope_parameters and rope_scaling say different things: {rope} and {older}"
        )
    rope = rope or older
    theta = (rope if rope.get("rope_theta") is not None else f).number(
        "rope_theta", 2, 1e12, 10000.0, float
    )
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    rope.refuse_unless("rope_type", "default", "linear", "llama3", "yarn", "longrope")
    rope.refuse_unless("partial_rotary_factor", None, 1, 1.0)
    if kind == "default":
        return theta, (), 1.0
    if kind == "longrope":
        return theta, _longrope(rope, D), 1.0
    if kind == "yarn":
        factor, part, gain = _yarn(rope, D, theta, max_seq_len)
    else:
        factor, part, gain = (
            rope.number("factor", 1, 1e6, None, float),
            torch.ones(D // 2, dtype=torch.float64),
            1.0,
        )
    if kind == "llama3":  # low frequencies are divided, high ones kept, with a ramp between
        low, high = (
            rope.number(f"{name}_freq_factor", 1e-6, 1e6, None, float) for name in ("low", "high")
        )
        original = rope.number("original_max_position_embeddings", 1, 1 << 24)
        turns = (
            original / (2 * math.pi) * theta ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
        )
        part = 1 - ((turns - low) / (high - low)).clamp(0, 1)
    return theta, tuple((1 / (1 - part + part / factor)).tolist()), gain


def _yarn(rope: Fields, D: int, theta: float, max_seq_len: int) -> tuple[float, Tensor, float]:
    """As Peng et al., 2023: the factor, the part of each frequency that is divided by it, and the
    scale of q and k (attention_factor), which is 1 + 0.1 log(factor) by default, as in section
    3.4."""
    rope.refuse_unless("truncate", None, True)
    rope.refuse_unless("mscale_all_dim", None, 0)  # without it, mscale has no effect
    original = rope.number("original_max_position_embeddings", 1, 1 << 24, max_seq_len)
    factor = rope.number("factor", 1, 1e6, max(1, max_seq_len / original), float)
    fast, slow = (
        rope.number("beta_fast", 1e-3, 1e6, 32, float),
        rope.number("beta_slow", 1e-3, 1e6, 1, float),
    )
    low, high = (
        math.log(original / (2 * math.pi * turns), theta) * D / 2 for turns in (fast, slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), D - 1)
    part = ((torch.arange(D // 2, dtype=torch.float64) - low) / (high - low or 0.001)).clamp(0, 1)
    return (
        factor,
        part,
        rope.number("attention_factor", 1e-3, 1e3, 1 + 0.1 * math.log(factor), float),
    )


def _longrope(rope: Fields, D: int) -> tuple[float, ...]:
    """The factors that divide the frequencies. Only the same ones for short and long texts are
    supported, which is how GGUF files of Llama 3.1 are read."""
    short, long, gain = (
        rope.get(name) for name in ("short_factor", "long_factor", "attention_factor")
    )
    if short != long or gain != 1:
        what = (
            "which is supported with equal short_factor and long_factor and attention_factor 1 only"
        )
        raise ValueError(f"{rope.file}: rope_type is 'longrope', {what}")
    if not isinstance(short, list) or not all(type(x) is float and 0 < x < math.inf for x in short):
        raise ValueError(
            f"{rope.file}: the factors of RoPE are {short!r}; they must be finite and above 0"
        )
    if len(short) != D // 2:
        raise ValueError(
            f"{rope.file}: {len(short)} factors of RoPE; a head_dim of {D} needs half as many"
        )
    return tuple(short)


def _meta_config(folder: Path) -> Config:
    f = Fields(folder / "params.json")
    f.refuse_unless("use_scaled_rope", False, None)
    dim, n_heads = f.number("dim", 1, 1 << 17), f.number("n_heads", 1, 1024)
    multiple_of = f.number("multiple_of", 1, 1 << 17, 256)
    # Meta's llama/model.py: two thirds of 4 dim, times a multiplier, rounded up to a multiple
    hidden = int(f.number("ffn_dim_multiplier", 1e-3, 1e3, 1.0, float) * int(2 * 4 * dim / 3))
    vocab_size = f.number("vocab_size", -1, 1 << 22, -1)
    # "as the tokenizer says": each file holds all rows of the embedding, if not all columns
    if vocab_size < 1:
        shapes = {part.name: part.shape for part in parts_of(_tensor_files(folder)[0])}
        vocab_size = next(iter(shapes.get(EMBEDDING.meta, ())), 1)
    return Config(
        dim=dim,
        n_layers=f.number("n_layers", 1, 1024),
        n_heads=n_heads,
        n_kv_heads=f.number("n_kv_heads", 1, 1024, n_heads),
        head_dim=f.number("head_dim", 2, 1024, dim // n_heads),
        hidden_dim=multiple_of * -(-hidden // multiple_of),
        vocab_size=vocab_size,
        norm_eps=f.number("norm_eps", 0, 1, 1e-5, float),
        rope_theta=f.number("rope_theta", 2, 1e12, 10000.0, float),
    )


# ---- the tensors of a file: only headers are read before a tensor, or some of its rows and
# columns, is asked for

CHUNK_BYTES = 1 << 20  # read at a time
# threads: a single one copies from the page cache at a fraction of the memory bandwidth
READERS = 4
SAFETENSORS_TYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I8": torch.int8, "U8": torch.uint8, "I16": torch.int16, "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One tensor of one file; Meta's checkpoints split a tensor over several files."""

    file: Path
    name: str
    dtype: torch.dtype | None  # None: one that no model here uses
    shape: tuple[int, ...]
    offset: int = 0  # of its first byte in a safetensors or GGUF file
    mapped: Tensor | None = None  # the tensor itself, of a torch file
    # how it is quantised; dtype and shape are those it is decoded to
    kind: gguf.Type | quants.Layout | None = None
    # the tensors of a layout, by the last word of their names
    pieces: "dict[str, Part] | None" = None


def parts_of(file: Path) -> list[Part]:
    """The tensors of a file. Raises ValueError."""
    return safetensors_header(file)[1] if file.suffix == ".safetensors" else _torch_parts(file)


def safetensors_header(file: Path) -> tuple[dict[str, str], list[Part]]:
    """The metadata and the tensors of a safetensors file whose header the library finds sound. A
    tensor without dimensions is taken for one of a single number. Raises ValueError."""
    with open_regular(file) as f:
        try:
            with safe_open(file, "pt"):
                size = int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(size))
        except (SafetensorError, ValueError) as error:
            raise ValueError(
                f"{file} is cut short, or no safetensors file ({error}): download it again"
            ) from None
    metadata = header.pop("__metadata__", None) or {}
    return metadata, [
        Part(
            file,
            name,
            SAFETENSORS_TYPES.get(t["dtype"]),
            tuple(t["shape"]) or (1,),
            8 + size + t["data_offsets"][0],
        )
        for name, t in sorted(header.items())
    ]


def gguf_parts(header: gguf.GGUF) -> list[Part]:
    """The tensors of a GGUF file or of a split one. Those of one dimension are never quantised."""
    parts = []
    for info in header.tensors.values():
        kind = info.type if info.type.block > 1 and len(info.shape) == 2 else None
        dtype = torch.float32 if kind else SAFETENSORS_TYPES.get(info.type.name)
        parts.append(Part(info.file, info.name, dtype, info.shape, info.offset, kind=kind))
    return parts


def _torch_parts(file: Path) -> list[Part]:
    """The tensors of a file that torch.save wrote, mapped into memory. Its pickle is read by
    torch's own unpickler, which runs no code (weights_only); what that accepts besides named, dense
    tensors is refused here."""
    open_regular(file).close()
    try:
        with zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed")  # a few bytes could unpack to any size
        with warnings.catch_warnings(action="ignore"):  # about types that are refused below
            tensors = torch.load(file, "cpu", weights_only=True, mmap=True)
        if not isinstance(tensors, dict) or not all(
            _is_dense(name, t) for name, t in tensors.items()
        ):
            raise ValueError("it holds something other than named, dense tensors")
    except Exception as error:  # whatever a damaged file makes of zipfile and of torch
        # without torch's advice to trust it
        reason = re.split(r"\n|\. ", str(error))[0] or type(error).__name__
        raise ValueError(
            f"{file} is damaged, or cannot be read safely ({reason}): take the model's safetensors, or save nothing but"
            " tensors by name, with torch 1.6 or later"
        ) from None
    return [
        Part(file, name, t.dtype, tuple(t.shape), mapped=t.detach()) for name, t in tensors.items()
    ]


def _is_dense(name: object, value: object) -> bool:
    if type(name) is not str or type(value) not in (Tensor, torch.nn.Parameter):
        return False
    return (
        value.layout == torch.strided
        and value.device.type == "cpu"
        and not (value.is_quantized or value.is_nested)
    )


def read_part(part: Part, pinned: bool = False, index: list[range] | None = None) -> Tensor:
    """Read a tensor, or the rows and columns of it that an index spans, into pinned memory if a GPU
    is to copy it while the next one is read. A torch file's is a view, read when it is copied.
    Raises OSError."""
    index = [range(size) for size in part.shape] if index is None else index
    if part.mapped is not None:
        return part.mapped[tuple(slice(span.start, span.stop) for span in index)]
    size, row = part.dtype.itemsize, part.dtype.itemsize * math.prod(part.shape[1:])
    if len(index) == 2 and len(index[1]) < part.shape[1]:
        length, starts = len(index[1]) * size, [i * row + index[1].start * size for i in index[0]]
    else:  # all of some rows
        length, starts = len(index[0]) * row, [index[0].start * row]
    flat = torch.empty(math.prod(map(len, index)), dtype=part.dtype, pin_memory=pinned)
    lines = flat.view(torch.uint8).numpy().reshape(len(starts), length)
    chunks = range(0, length, CHUNK_BYTES)
    pieces = [
        (to[k : k + CHUNK_BYTES], part.offset + at + k)
        for to, at in zip(lines, starts)
        for k in chunks
    ]
    with open_regular(part.file) as f, ThreadPoolExecutor(READERS) as pool:
        read = lambda share: sum(os.preadv(f.fileno(), [piece], offset) for piece, offset in share)
        count = sum(pool.map(read, [pieces[i::READERS] for i in range(READERS)]))
        if count < flat.nbytes:
            raise OSError(f"{part.file} was cut short while it was being read")
    return flat.view([len(span) for span in index])


# ---- a checkpoint: the tensors of a folder


def model_tensors(c: Config) -> list[Joined]:
    """The tensors of a model, always in the same order."""
    layers = [
        t._replace(name=f"layers.{i}.{t.name}", layer=i)
        for i in range(c.n_layers)
        for t in c.layer_table
    ]
    output = replace(EMBEDDING, field="output", dims=OUTPUT.dims) if c.tie_embeddings else OUTPUT
    return [
        Joined("tok_embeddings", (EMBEDDING,)),
        *layers,
        Joined("norm", (NORM,)),
        Joined("output", (output,)),
    ]


def stored_tensors(c: Config, layout: str = "meta") -> dict[str, Stored]:
    """What a checkpoint stores of them, by its names in a layout."""
    return {row.name(layout, t.layer): row for t in model_tensors(c) for row in t.stored}


def matrix_shapes(c: Config) -> dict[str, tuple[int, int]]:
    """Shapes [N, K] of the matrices as the model holds them, all of which may be in a format."""
    return {t.name: t.shape(c) for t in model_tensors(c) if t.matrix}


def saved_as(
    t: Joined, c: Config, format: Format
) -> dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]]:
    """What a model saved in a format has for a tensor, by name: possible types and the shape. The
    codes of a matrix have its own name, and a single column is a vector."""
    if not t.matrix:
        return {f"{t.name}.weight": (quants.FLOATS, t.shape(c))}
    found: dict = {}
    for key, (dtype, (rows, columns)) in format.at(t.name).tensors(*t.shape(c)).items():
        found[f"{t.name}.{key}" if found else t.name] = (
            (dtype,),
            (rows, columns) if columns > 1 else (rows,),
        )
    return found


class PerMatrix(dict):
    """The formats of a model's matrices by their names, None for one in 16 or 32 bits; in place of
    a Format."""

    at = dict.__getitem__


class Checkpoint:
    """The tensors of a folder. They are read one at a time: the model must never be in memory
    twice."""

    def __init__(self, folder: Path):
        self.folder, self.config, self.sampling = folder, read_config(folder), read_sampling(folder)
        # of the matrices, where the folder is a model saved in one
        self.format = saved_format(folder)
        header = read_header(folder) if folder.is_file() else None
        parts = (
            gguf_parts(header)
            if header
            else [part for file in _tensor_files(folder) for part in parts_of(file)]
        )
        self.layout = "gguf" if header else "meta"
        if not header and not self.format and (folder / "config.json").is_file():
            self.layout = "hugging_face"
            if layout := _quantisation(Fields(folder / "config.json")):
                parts = self._gathered(layout, {part.name: part for part in parts})
        stored = stored_tensors(self.config, self.layout)
        # In these, RoPE rotates rows i and i + D / 2 of a head, not neighbours
        halves = (
            header.metadata["general.architecture"] != "llama"
            if header
            else self.layout == "hugging_face"
        )
        self.in_halves = {name for name, row in stored.items() if row.rotated and halves}
        expected = {name: (quants.FLOATS, row.shape(self.config)) for name, row in stored.items()}
        if self.format:
            expected = {}
            for t in model_tensors(self.config):
                expected |= saved_as(t, self.config, self.format)
        self.shapes = {name: shape for name, (_, shape) in expected.items()}
        tied = {OUTPUT.name(self.layout)} if self.config.tie_embeddings else set()
        self.parts: dict[str, list[Part]] = {}
        for part in parts:
            if part.name not in tied and not part.name.endswith(NOT_NEEDED):
                self.parts.setdefault(part.name, []).append(part)
        problems = [f"{name} is missing" for name in expected if name not in self.parts]
        for name, parts in self.parts.items():
            types, shape = expected.get(name, ((), ()))
            if name not in expected:
                problems.append(f"{name} is unexpected")
            elif self._axis(name) is None or not all(part.dtype in types for part in parts):
                problems.append(_misfit(parts, types, shape))
        self._refuse(problems)

    def _gathered(self, layout: quants.Layout, found: dict[str, Part]) -> list[Part]:
        """The tensors of each matrix that is in the layout as one part; those of others as they
        are."""
        problems, stored = [], stored_tensors(self.config, self.layout)
        for name, row in stored.items():
            shape, stem = row.shape(self.config), name.removesuffix("weight")
            wanted = layout.tensors(*shape) if row.matrix else {}
            codes = found.get(stem + next(iter(wanted), "weight"))
            if not wanted or not codes or codes.name == name and codes.dtype in quants.FLOATS:
                continue
            group = max(layout.group, layout.format.group)
            if shape[0] % 8 or shape[1] % group:
                problems.append(
                    f"{name} is {list(shape)}, not a multiple of 8 rows and {group} columns"
                )
            # not Qwen2's bias
            own = [word for word in wanted if stem + word == name or stem + word not in stored]
            pieces = {word: found.pop(stem + word) for word in own if stem + word in found}
            for word, (types, shapes) in wanted.items():
                if word not in pieces and word not in layout.optional:
                    problems.append(f"{stem}{word} is missing")
                elif word in pieces and not (
                    pieces[word].dtype in types and pieces[word].shape in shapes
                ):
                    problems.append(_misfit([pieces[word]], types, shapes[0]))
            found[name] = Part(codes.file, name, torch.float32, shape, kind=layout, pieces=pieces)
        self._refuse(problems)
        return [*found.values()]

    def _refuse(self, problems: list[str]) -> None:
        if problems:
            shown = "; ".join(problems[:4]) + (
                f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
            )
            raise ValueError(f"{self.folder}: the tensors do not fit the config: {shown}")

    def _axis(self, name: str) -> int | None:
        """The axis along which the parts make up a tensor, any if each part is whole (Meta's shards
        repeat the norms); None if they do not make it up."""
        parts, first, shape = self.parts[name], self.parts[name][0].shape, self.shapes[name]
        count = 1 if len(shape) == 1 else len(parts)
        whole = (
            (*first[:axis], first[axis] * count, *first[axis + 1 :]) for axis in range(len(first))
        )
        same = all(part.shape == first for part in parts)
        return next((axis for axis, made in enumerate(whole) if same and made == shape), None)

    @property
    def dtype(self) -> torch.dtype:
        name = EMBEDDING.name(self.layout)
        return (not self.format and self.config.dtype) or self.parts[name][0].dtype

    @property
    def quantised(self) -> str:
        """How matrices are quantised, in words; empty if they are plain floats."""
        *names, last = sorted(
            {part.kind.name for (part, *_) in self.parts.values() if part.kind}
        ) or [""]
        return " and ".join(filter(None, (", ".join(names), last)))

    @property
    def elements(self) -> int:
        return sum(
            math.prod(row.shape(self.config)) for row in stored_tensors(self.config).values()
        )

    def read(self, device: torch.device, name: str, rows: slice, columns: slice = ALL) -> Tensor:
        """Read these rows and columns of a tensor. For a GPU it is in pinned memory, to be copied
        while the next one is read, or already on its way there; for a CPU, floats are in fp32, as
        torch is slow at converting between 16-bit types. The rows of q and k, always whole heads,
        are put into Meta's RoPE convention, interleaved pairs."""
        parts, axis, gpu = self.parts[name], self._axis(name), device.type == "cuda"
        spans = [range(size)[taken] for size, taken in zip(self.shapes[name], (rows, columns))]
        if parts[0].kind:
            values = torch.empty(len(spans[0]), self.shapes[name][1], device=device)
            for at, some in self.blocks(device, name, rows):
                values[at] = quants.decoded(parts[0].kind, some)
            return values[:, columns]
        size, pieces = parts[0].shape[axis], []
        for i, part in enumerate(parts if size < self.shapes[name][axis] else parts[:1]):
            start, stop = (
                max(spans[axis].start - i * size, 0),
                min(spans[axis].stop - i * size, size),
            )
            if start < stop:
                index = [*spans[:axis], range(start, stop), *spans[axis + 1 :]]
                pieces.append(read_part(part, gpu and len(parts) == 1, index))
        tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
        # a CPU takes longer to permute it than to read it
        if gpu and tensor.dim() == 2 and name in self.in_halves:
            tensor = tensor.to(device, non_blocking=True)
        tensor = self.in_pairs(name, tensor)
        if gpu:
            return tensor if tensor.is_cuda else tensor.pin_memory()
        return tensor.float() if tensor.is_floating_point() else tensor

    def in_pairs(self, name: str, rows: Tensor) -> Tensor:
        """The rows of q and k in Meta's order, those of others as they are."""
        if name not in self.in_halves:
            return rows
        return (
            rows.view(-1, 2, self.config.head_dim // 2, *rows.shape[1:])
            .transpose(1, 2)
            .reshape(rows.shape)
        )

    def blocks(
        self, device: torch.device, name: str, rows: slice, columns: slice = ALL
    ) -> Iterator[tuple[slice, quants.Blocks]]:
        """These rows and columns of a quantised matrix, some rows at a time, and which of them; of
        a layout, which may have it transposed, all at once."""
        (part,), gpu = self.parts[name], device.type == "cuda"
        (N, K), kind = part.shape, part.kind
        columns = range(K)[columns]
        try:
            if part.pieces:
                on_device = lambda piece: read_part(piece, gpu).to(device, non_blocking=True)
                whole = quants.checked(
                    kind.blocks({word: on_device(piece) for word, piece in part.pieces.items()})
                )
                cut = lambda t: self.in_pairs(name, t[rows].contiguous())[
                    :, stored_columns(columns, K, t.shape[1])
                ]
                yield ALL, quants.Blocks(*(t if t is None else cut(t) for t in whole))
                return
            start, stop, width = (
                k // kind.block * kind.nbytes for k in (columns.start, columns.stop, K)
            )
            stored = replace(part, dtype=torch.uint8, shape=(N, width))
            raw = read_part(stored, gpu, [range(N)[rows], range(start, stop)]).to(
                device, non_blocking=True
            )
            raw, at_once = (
                self.in_pairs(name, raw),
                max(1, (16 if gpu else 1) * quants.AT_ONCE // K),
            )
            for first in range(0, len(raw), at_once):
                some = slice(first, first + at_once)
                yield some, quants.checked(quants.blocks(kind, raw[some]))
        except ValueError as error:
            raise ValueError(f"{part.file}: {name} has {error}") from None

    def held_formats(self, c: Config, most_bits: int) -> "PerMatrix | None":
        """The formats that hold a rank's matrices as they are in the file; None if none is
        quantised."""
        if not self.quantised:
            return None
        kinds_of = lambda t: {
            self.parts[row.name(self.layout, t.layer)][0].kind for row in t.stored
        }
        matrices = [t for t in model_tensors(c) if t.matrix]
        return PerMatrix(
            {t.name: quants.format_for(kinds_of(t), t.shape(c)[1], most_bits) for t in matrices}
        )

    def first_bad_tensor(self, dtype: torch.dtype) -> str | None:
        """What is wrong with the first tensor that holds NaN or inf, as stored or once converted to
        dtype, if there is one. What a format stores was checked when it was read."""
        for part in itertools.chain.from_iterable(self.parts.values()):
            if (
                part.kind
                or part.dtype not in quants.FLOATS
                or not part.name.endswith((".weight", ".bias"))
            ):
                continue
            tensor = read_part(part)
            beyond = f"values beyond the range of {dtype}; try --dtype fp32"
            for values, held in (tensor, "NaN or inf"), (tensor.to(dtype), beyond):
                if not torch.isfinite(values).all():
                    return one_line(f"{part.name} in {part.file.name} holds {held}")
        return None


NOT_NEEDED = (  # repeated in the config, or scales of activations, which are not rounded here
    "rotary_emb.inv_freq", "rope.freqs", gguf.ROPE_FACTORS, ".weight_shape",
    ".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale",
)  # fmt: skip


def _misfit(parts: list[Part], types: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> str:
    shapes = " + ".join(str(list(part.shape)) for part in parts)
    said, *listed = (
        str(dtype or "another type").removeprefix("torch.") for dtype in (parts[0].dtype, *types)
    )
    if all(part.dtype in types for part in parts):
        return f"{parts[0].name} is {shapes}, expected {list(shape)}"
    return f"{parts[0].name} is {shapes} in {said}, expected {list(shape)} in {' or '.join(listed)}"


def _tensor_files(folder: Path) -> list[Path]:
    for single in ("model.safetensors", "pytorch_model.bin"):
        if (folder / f"{single}.index.json").is_file():
            return _indexed_files(folder / f"{single}.index.json")
        if (folder / single).is_file():
            return [folder / single]
    if not (files := sorted(folder.glob("consolidated.*.pth"))):
        usual = "model.safetensors or pytorch_model.bin, or an index of their shards, or Meta's consolidated.*.pth"
        raise _nothing_in(folder, f"no weights ({usual})")
    return files


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


# ---- where a checkpoint is


@one_line_errors()
def find_checkpoint(name: str | Path) -> Path:
    """The folder of a checkpoint that is given as a folder, or as a repository "owner/name" of the
    Hugging Face hub: in the hub's cache, to which it is downloaded if need be. Of GGUF, which may
    be given as a file or as one of the kinds in a repository, "owner/name:Q4_K_M", the file. Raises
    OSError or ValueError, in one line that says what to do."""
    return hub.find_checkpoint(str(name), read_config, is_whole)


def is_whole(path: Path) -> bool:
    """Whether nothing is missing that a checkpoint refers to."""
    try:
        if path.is_dir():
            _tensor_files(path)
        try:
            read_config(path)
        except ValueError:  # it is not supported: load says why
            return True
        Checkpoint(path)
        if path.is_dir():
            tokenizer_file(path)
    except (OSError, ValueError):
        return False
    return True


# ---- weights: the checkpoint's tensors, moved to the device and converted


def weight_bytes(c: Config, dtype: torch.dtype, format: Format | None) -> int:
    """Bytes of a model's weights. A tied output matrix that is in no format is the embedding
    itself."""
    total = 0
    for t in model_tensors(c):
        if held := t.matrix and format and format.at(t.name):
            total += held.nbytes(*t.shape(c))
        elif t.name != "output" or not c.tie_embeddings:
            total += dtype.itemsize * math.prod(t.shape(c))
    return total


def largest_read(c: Config) -> int:
    """Elements of the largest matrix that is read to be encoded: in whole rows, although some are
    cut by columns."""
    matrices = [t for t in model_tensors(c) if t.matrix]
    return max(
        math.prod(t.shape(c)) * (c.ranks if t.stored[0].dims[1] in CUT else 1) for t in matrices
    )


def check_groups(c: Config, format: Format | None) -> None:
    """Raise ValueError if a rank's columns of a matrix are not whole groups of the format."""
    for name, (_, columns) in matrix_shapes(c).items():
        held = format and format.at(name)
        if held and columns % held.group:
            where = f" on each of {c.ranks} processes" if c.ranks > 1 else ""
            raise ValueError(
                f"{name} has {columns} columns{where}; {held.name} needs a multiple of {held.group}"
            )


@dataclass
class Loader:
    """Loads the tensors one by one: matrices in the type `stored`, encoded in a format, or as they
    are if the file has them in one; all else in dtype (the norms are small, and a token reads only
    one row of the embedding). With several ranks, each loads its part of every matrix."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    stored: torch.dtype
    device: torch.device
    format: Format | None
    backend: str = ""  # whose ops will read the matrices, if any will
    ranks: Ranks = Ranks()
    quiet: bool = False

    def __post_init__(self) -> None:
        self.whole, self.config = (
            self.checkpoint.config,
            self.checkpoint.config.cut(self.ranks.size),
        )
        self.shapes = matrix_shapes(self.config)
        self.encodes = bool(
            self.format and not self.checkpoint.format and not self.checkpoint.quantised
        )
        if self.encodes:  # allocate what stays first, to avoid fragmentation
            self.encoded = {
                n: self.format.at(n).empty(*shape, self.device) for n, shape in self.shapes.items()
            }
            self.workspace = torch.empty(
                largest_read(self.config), dtype=self.stored, device=self.device
            )
        # None: if no terminal
        total, hidden = weight_bytes(self.config, self.dtype, self.format), self.quiet or None
        self.bar = tqdm(
            total=total, unit="B", unit_scale=True, desc="loading", disable=hidden, leave=False
        )

    def load(self) -> Weights:
        with self.bar:
            embedding, *layers, norm, output = model_tensors(self.whole)
            layers = [list(tensors) for _, tensors in itertools.groupby(layers, lambda t: t.layer)]
            table = self.vector(embedding)
            if self.config.tie_embeddings and not (self.format and self.format.at("output")):
                tied = table[self.share("output_rows")].to(self.stored)
                last = kernels.prepacked(Matrix(tied), self.backend, self.dtype)
            else:
                last = self.matrix(output)
            return Weights(
                table, [self.layer(tensors) for tensors in layers], self.vector(norm), last
            )

    def layer(self, tensors: list[Joined]) -> LayerWeights:
        return LayerWeights(
            **{t.field: self.matrix(t) if t.matrix else self.vector(t) for t in tensors}
        )

    def share(self, dim: str) -> slice:
        """What this rank has of one of the sizes of the whole model."""
        size = getattr(self.whole, dim)
        if dim not in CUT:
            return slice(0, size)
        count = getattr(self.whole, CUT[dim])
        taken = share(count, self.ranks.rank, self.ranks.size)
        return slice(taken.start * size // count, taken.stop * size // count)

    def sources(self, t: Joined) -> list[tuple[str, slice]]:
        """The checkpoint's tensors that make up one of the model's (a saved one has joined them),
        and a rank's rows."""
        shares = [self.share(row.dims[0]) for row in t.stored]
        if not self.checkpoint.format:
            return [
                (row.name(self.checkpoint.layout, t.layer), rows)
                for row, rows in zip(t.stored, shares)
            ]
        if t.field == "qk_norm":  # [2, D]
            shares = [ALL]
        elif t.field == "w13":
            shares = [slice(2 * shares[0].start, 2 * shares[0].stop)]
        else:
            above = itertools.accumulate((row.shape(self.whole)[0] for row in t.stored), initial=0)
            shares = [
                slice(start + rows.start, start + rows.stop) for start, rows in zip(above, shares)
            ]
        return [(t.name if t.matrix else f"{t.name}.weight", rows) for rows in shares]

    def vector(self, t: Joined) -> Tensor:
        """A norm, the embedding, or a vector that joins several of the checkpoint's."""
        parts = [self.checkpoint.read(self.device, *source) for source in self.sources(t)]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.bar.update(self.dtype.itemsize * tensor.numel())
        return tensor.view(t.shape(self.config)).to(
            self.device, self.dtype, copy=True, non_blocking=True
        )

    def matrix(self, t: Joined) -> Matrix:
        """A matrix made of the checkpoint's: w1 and w3 with their rows interleaved, others one
        below the other."""
        columns, format = self.share(t.stored[0].dims[1]), self.format and self.format.at(t.name)
        if format:
            take = (
                self.saved if self.checkpoint.format else self.encode if self.encodes else self.held
            )
            made = Matrix(take(format, t, columns), format, self.shapes[t.name])
        else:
            made = Matrix(torch.empty(self.shapes[t.name], dtype=self.stored, device=self.device))
            self.fill(made.data, t, columns)
        self.bar.update(made.nbytes)
        return kernels.prepacked(made, self.backend, self.dtype, self.format)

    def fill(self, data: Tensor, t: Joined, columns: slice) -> None:
        for (place,), source in zip(self.places((data,), t), self.sources(t), strict=True):
            place.copy_(self.checkpoint.read(self.device, *source, columns), non_blocking=True)

    def places(self, tensors: tuple[Tensor, ...], t: Joined) -> list[tuple[Tensor, ...]]:
        """The rows of a matrix where each of the checkpoint's belongs."""
        if t.field == "w13":
            return [tuple(tensor[i::2] for tensor in tensors) for i in (0, 1)]
        rows = [row.shape(self.config)[0] for row in t.stored]
        return list(zip(*(tensor.split(rows) for tensor in tensors)))

    def held(self, format: Format, t: Joined, columns: slice) -> Tensors:
        """A matrix that the file has quantised, as it is."""
        tensors = format.empty(*self.shapes[t.name], self.device)
        for place, (source, rows) in zip(self.places(tensors, t), self.sources(t), strict=True):
            for at, blocks in self.checkpoint.blocks(self.device, source, rows, columns):
                format.write(blocks, tuple(tensor[at] for tensor in place))
        return tensors

    def encode(self, format: Format, t: Joined, columns: slice) -> Tensors:
        """A matrix encoded from whole rows, so that its codes do not depend on how many ranks there
        are. Where the format cannot be cut, it is encoded from this rank's columns."""
        (N, part), K, tensors = self.shapes[t.name], t.shape(self.whole)[1], self.encoded[t.name]
        data = self.workspace[: N * K].view(N, K)
        self.fill(data, t, ALL)
        try:
            if part == K or not format.can_be_cut(K, part):
                return format.encode(data[:, columns], tensors)
            for tensor, whole in zip(tensors, format.encode(data)):
                tensor.copy_(whole[:, stored_columns(columns, K, whole.shape[1])])
            return tensors
        except ValueError as error:
            raise ValueError(self.checkpoint.first_bad_tensor(self.stored) or str(error)) from None

    def saved(self, format: Format, t: Joined, columns: slice) -> Tensors:
        """A matrix that the file has in its format."""
        (N, part), K, rows = (
            self.shapes[t.name],
            t.shape(self.whole)[1],
            [taken for _, taken in self.sources(t)],
        )
        tensors = format.empty(N, part, self.device)
        if not format.can_be_cut(K, part):
            what = f"{t.name} was saved in {format.name}, where its {K} columns"
            raise ValueError(
                f"{what} cannot be divided among {self.ranks.size} processes: take the original"
            )
        for tensor, stored in zip(tensors, saved_as(t, self.config, self.format)):
            M = self.checkpoint.shapes[stored][1:]
            for place, taken in zip(
                tensor.split([taken.stop - taken.start for taken in rows]), rows
            ):
                read = self.checkpoint.read(
                    self.device, stored, taken, *(stored_columns(columns, K, m) for m in M)
                )
                place.copy_(read.view(place.shape), non_blocking=True)
        try:
            format.check(tensors)
        except ValueError as error:
            file = self.checkpoint.folder / SAVED
            raise ValueError(
                f"{file}: {t.name} has {error}: save it again from the original"
            ) from None
        return tensors


def stored_columns(columns: slice, K: int, M: int) -> slice:
    """Where these columns of a matrix of K are in a stored tensor of M columns."""
    return slice(columns.start * M // K, -(-columns.stop * M // K))


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
    index = device.index if device.index is not None else ranks.local_rank
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
    if device.type == "cpu" and 4 * elements <= CACHES and not kernels.multiplies_bf16():
        return torch.float32
    return torch.bfloat16 if device.type == "cpu" and stored == torch.float16 else stored


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
            files = re.findall(
                r"^(?:in)?active_file (\d+)", Path(folder, "memory.stat").read_text(), re.M
            )
            free = min(free, most - taken + sum(map(int, files)))
    return free


# What a model needs beside weights and cache, in multiples of its largest matrix in dtype: two
# decoded copies of it (the graphs of prompts have memory of their own) and two workspaces for the
# activations of a chunk, each at most 1.3 times as large (7B). On a CPU: one of each, and a second
# copy of the output matrix where it is the embedding.
MARGIN = 5


def check_memory(
    c: Config,
    dtype: torch.dtype,
    device: torch.device,
    ctx_size: int,
    format: Format | None = None,
    kv_fp8: bool = False,
    ranks: Ranks = Ranks(),
) -> None:
    """Raise MemoryError if weights, cache and workspace (of one rank, if the config is cut) will
    not fit, before any of them is allocated."""
    size = dtype.itemsize
    on_cpu = device.type == "cpu"
    shapes = matrix_shapes(c)
    weights = weight_bytes(c, dtype, format)
    workspace = MARGIN * size * max(map(math.prod, shapes.values()))
    layer = 2 * c.kv_dim * ctx_size  # keys and values of one layer
    cache = c.n_layers * layer * size
    if kv_fp8:
        cache = c.n_layers * layer
        workspace += 2 * size * layer  # decoded
    if on_cpu and dtype == torch.bfloat16:  # torch's product reads a copy of the codes of 4 bits
        formats = {name: format and format.at(name) for name in shapes}
        codes = [
            shape for name, shape in shapes.items() if formats[name] and formats[name].bits == 4
        ]
        weights += sum(map(math.prod, codes)) * 5 // 8
    need = weights + cache + workspace
    free = free_memory(device)
    where = str(device)
    if ranks.size > 1:
        where += f" for rank {ranks.rank} of {ranks.size}"
        free /= ranks.local_size if on_cpu else 1  # the ranks of a host share its memory
    if need > free:
        w, k, o, total, has = (f"{n / 1e9:.2f} GB" for n in (weights, cache, workspace, need, free))
        formats = "" if isinstance(format, PerMatrix) else " --fp8, --int4"
        raise MemoryError(
            f"weights {w} + cache of {ctx_size} tokens {k} + workspace {o} = {total}, but {where} has {has} free:"
            f" try a smaller context (-c), a smaller --dtype,{formats} or --kv-fp8"
        )


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
    if accumulate == "fp16" and not (
        backend == "triton" and device.type == "cuda" and dtype == torch.float16
    ):
        raise ValueError("--accumulate fp16 needs a GPU, the Triton kernels and --dtype fp16")


def check_original(checkpoint: Checkpoint, format: str | None) -> None:
    """Raise ValueError if matrices that are already quantised would be encoded again."""
    held = checkpoint.format.name if checkpoint.format else checkpoint.quantised
    if held and format:
        lossy = f"its matrices are {held}, and {format} would lose precision a second time"
        raise ValueError(f"{checkpoint.folder}: {lossy}: run it as it is, or encode the original")


@one_line_errors()
def load(
    name: "str | Path | Checkpoint",
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
) -> Llama:
    """Load a checkpoint, which may be open already, or else as find_checkpoint finds it: a folder
    in Hugging Face's or Meta's layout, a GGUF file, or a repository of the hub.

    ctx_size: the context, which must fit into memory beside the weights; 0 is the model's own; None
    is that, but at most 4096. format: in which to keep the matrices, a name of kernels.FORMATS;
    what `save` wrote has its own. kv_fp8: keys and values in 8 bits. accumulate: how a prompt's
    products are summed, see kernels.py. quiet: no progress bar. ranks: the processes that share the
    model, if several. Raises ValueError, OSError or MemoryError, in one line that says what to
    do."""
    check_choice("format", format, (None, *FORMATS))
    if ctx_size is not None and ctx_size < 0:
        raise ValueError(
            f"ctx_size is {ctx_size}; it must be a number of tokens, or 0 for the model's own"
        )
    checkpoint = name if isinstance(name, Checkpoint) else Checkpoint(find_checkpoint(name))
    folder, config, sampling = checkpoint.folder, checkpoint.config, Sampling(**checkpoint.sampling)
    if not checkpoint.format or format != checkpoint.format.name:
        check_original(checkpoint, format)
    on = pick_device(device, ranks)
    backend = pick_backend(backend, on)
    if backend == "triton" and config.head_dim % 8:
        wrong = f"head_dim is {config.head_dim}; the kernels need a multiple of 8"
        raise ValueError(f"{folder}: {wrong}: use --backend torch")
    torch_dtype = pick_dtype(dtype, checkpoint.dtype, on, checkpoint.elements)
    ctx_size = min(config.max_seq_len, 4096) if ctx_size is None else ctx_size or config.max_seq_len
    if config.sliding_window and ctx_size > config.sliding_window:
        window = f"sliding_window is {config.sliding_window}"
        raise ValueError(f"{folder}: {window}: a context of {ctx_size} is not supported (see -c)")
    check_accumulate(accumulate, backend, on, torch_dtype)
    config = config.cut(ranks.size)
    # torch has no fast product for 8-bit codes in groups on a CPU: there they are decoded
    as_stored = checkpoint.held_formats(config, 4 if on.type == "cpu" and backend == "torch" else 8)
    held = checkpoint.format or FORMATS.get(format) or as_stored
    check_groups(config, held)
    ranks.join(on)
    check_memory(config, torch_dtype, on, ctx_size, held, kv_fp8, ranks)
    # Codes do not depend on --dtype
    stored = (
        checkpoint.dtype
        if held and held is not as_stored
        else kernels.storage_dtype(backend, torch_dtype, on)
    )
    settings = (backend, on, torch_dtype, ctx_size, checkpoint, kv_fp8, accumulate, ranks, sampling)
    with torch.inference_mode():
        weights = Loader(checkpoint, torch_dtype, stored, on, held, backend, ranks, quiet).load()
    if on.type == "cuda":
        torch.cuda.empty_cache()  # what loading needed in addition to the weights
    return Llama(config, weights, *settings)


# ---- a model saved in a format: a folder whose model.safetensors says so in its metadata, with the
# other small files

SAVED = "model.safetensors"
LAYOUT = "2"  # of such a file; any other is refused


def saved_format(folder: Path) -> Format | None:
    """The format of a folder that `save` wrote, None for any other. Raises ValueError."""
    file = folder / SAVED
    metadata = safetensors_header(file)[0] if file.is_file() else {}
    version, name = metadata.get("fused-llama"), metadata.get("format", metadata.get("fp8"))
    if not version:
        return None
    if version != LAYOUT or name not in FORMATS:
        what = f"was saved by another version of fused-llama, in the format {name!r}"
        raise ValueError(f"{file} {what}: save it again from the original")
    return FORMATS[name]
