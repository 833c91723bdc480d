"""Step 2 of loading (see checkpoint.py): the layouts on disk. A Source is one of them: it knows where
configuration, tokenizer and tensors are, and steps 3 to 5 go through it. `source_of`, at the end,
says which layout a path has."""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from extra import gguf, hub, schemes
from extra.config import generation_of, hugging_face_config, meta_config
from extra.families import FAMILIES, family_of
from extra.files import Fields, read_bytes
from extra.names import (
    BIASES,
    EMBEDDING,
    OUTPUT,
    Kind,
    ModelTensor,
    Part,
    model_tensors,
)
from extra.reading import CPU, FileTensor, read
from extra.tensors import (
    TYPES,
    Floats,
    Found,
    GgufMatrix,
    Joined,
    Row,
    SafetensorsMatrix,
    SavedMatrix,
    ShardedFloats,
    SourceTensor,
    Stack,
    Wanted,
    safetensors_header,
    tensors_of,
)
from formats import Format
from kernels import FORMATS
from model import Config
from tokenizer import tokenizer_file

NOT_NEEDED = re.compile(  # the end of a name
    r"(rotary_emb\.\w+|rope\.freqs|rope_freqs\.weight|\.weight_shape"  # repeated in the config
    r"|self_attn\.(masked_)?bias|(^|\.)(position_ids|attention_mask|causal_mask)"  # masks
    r"|\.(input|output|q|k|v|kv|activation)_scale(_ub)?)$"  # of activations, not rounded here
)
# Biases that a file may contain only if they are all zero
BIAS = re.compile(r"(_proj|\.w[123]|\.gate|attn_output|ffn_\w+)\.bias$")
MOST_BIASES = 1 << 20  # numbers in one of them


# ---- what all layouts have in common


class Source(ABC):
    """One layout on disk: it knows where configuration, tokenizer and tensors are."""

    naming: str  # which of a Part's names its tensors have: see Part.name_in
    format: Format | None = None  # of the matrices, if --save has encoded them

    def __init__(self, path: Path):
        self.path = path

    def config(self) -> Config:
        """The model's configuration. Raises OSError, ValueError."""
        c = self.unchecked_config()
        if c.n_heads % c.n_kv_heads:
            raise ValueError(
                f"{self.path}: {c.n_heads} query heads cannot share {c.n_kv_heads} key/value heads evenly"
            )
        if c.head_dim % 2:
            raise ValueError(f"{self.path}: head_dim is {c.head_dim}; RoPE needs an even one")
        return c

    @abstractmethod
    def unchecked_config(self) -> Config:
        """The same, before fields are compared with one another."""

    @abstractmethod
    def tokenizer(self) -> Path:
        """The file that holds the vocabulary. Raises OSError."""

    @abstractmethod
    def small_files(self) -> dict[str, bytes]:
        """Everything but the tensors, as the files of a folder: contents by name. Raises OSError,
        ValueError."""

    @abstractmethod
    def file_tensors(self) -> list[FileTensor]:
        """All tensors of its files. Raises OSError, ValueError."""

    def name_of(self, part: Part) -> str:
        """What the files call a part of a tensor."""
        return part.name_in(self.naming)

    def part(self, c: Config, part: Part, found: Found) -> SourceTensor:
        """A part of a tensor of the model, which is checked later, made from those in the files."""
        raise NotImplementedError

    def tensor(self, c: Config, t: ModelTensor, found: Found) -> SourceTensor:
        """A tensor of the model, which is checked later."""
        parts = [self.part(c, part, found) for part in t.parts]
        if len(parts) == 1:
            return parts[0]
        return Joined(parts, t.parts[0].in_turn)

    def tensors(self, c: Config) -> tuple[Config, dict[str, SourceTensor]]:
        """Returns the configuration, in which tie_embeddings may have become False, and the tensors
        of the model by name. Raises ValueError if one is missing, unexpected, or of another shape
        or type than the config says."""
        found: Found = {}
        for tensor in self.file_tensors():
            if not NOT_NEEDED.search(tensor.name):
                found.setdefault(tensor.name, []).append(tensor)
        if c.tie_embeddings:
            c = self.untied(c, found)
        c = self.without_absent_biases(c, found)
        tensors = {t.name: self.tensor(c, t, found) for t in model_tensors(c)}
        self.check(tensors.values(), found)
        return c, tensors

    def untied(self, c: Config, found: Found) -> Config:
        """Returns the configuration, with tie_embeddings False if the files hold two different
        matrices. The one matrix of a tied model may have either name, or be stored under both."""
        embedding, output = self.name_of(EMBEDDING), self.name_of(OUTPUT)
        if output not in found:
            return c
        if embedding not in found:
            found[embedding] = [replace(tensor, name=embedding) for tensor in found.pop(output)]
            return c
        one, other = (self.part(c, part, found) for part in (EMBEDDING, OUTPUT))
        if any(one.problems()) or any(other.problems()) or not equal(one, other):
            return replace(c, tie_embeddings=False)
        del found[output]
        return c

    def without_absent_biases(self, c: Config, found: Found) -> Config:
        """The configuration without the biases that no layer has, which transformers and llama.cpp
        take for zeros."""
        present = set()
        for t in model_tensors(c):
            if t.field in BIASES:
                names = [f"{t.name}.weight", *(self.name_of(part) for part in t.parts)]
                present.update(t.field for name in names if name in found)
        return replace(c, **{bias: bias in present for bias in BIASES})

    def check(self, tensors: Collection[SourceTensor], found: Found) -> None:
        """Raise ValueError unless the files hold these tensors and no others."""
        # Once, though the one matrix of a tied model is both embedding and output
        problems = [*dict.fromkeys(problem for tensor in tensors for problem in tensor.problems())]
        expected = {name for tensor in tensors for name in tensor.wanted}
        for name in found:
            if name in expected:
                continue
            if not BIAS.search(name):
                problems.append(f"{name} is unexpected")
            elif not all(map(is_zero, found[name])):
                weight = name.removesuffix("bias") + "weight"
                problems.append(f"{weight} has a bias, and should have none")
        if not problems:
            return
        shown = "; ".join(problems[:4])
        if len(problems) > 4:
            shown += f"; and {len(problems) - 4} more"
        raise ValueError(f"{self.path}: the tensors do not fit the config: {shown}")


def equal(one: SourceTensor, other: SourceTensor) -> bool:
    """Whether two matrices have the same values."""
    N, K = one.shape
    step = max(1, schemes.AT_ONCE // K)
    for start in range(0, N, step):
        rows = [slice(start, start + step)]
        mine, its = (
            torch.cat([values.float() for _, values in tensor.read(CPU, rows)])
            for tensor in (one, other)
        )
        if not torch.equal(mine, its):
            return False
    return True


def is_zero(bias: FileTensor) -> bool:
    """Whether a bias makes no difference."""
    if bias.dtype not in schemes.FLOATS or math.prod(bias.shape) > MOST_BIASES:
        return False
    (values,) = read([bias])
    return not values.any()


# ---- GGUF


class GgufFile(Source):
    """A file of llama.cpp's, or the first part of a split one."""

    naming = "gguf"

    @cached_property
    def header(self) -> gguf.GGUF:
        return gguf.read_header(self.path)

    def unchecked_config(self) -> Config:
        said = Fields(self.path, gguf.config_json(self.header))
        return hugging_face_config(said, Fields(self.path, {}))

    def tokenizer(self) -> Path:
        return self.path

    def small_files(self) -> dict[str, bytes]:
        as_json = lambda value: json.dumps(value).encode()
        vocabulary, beside = gguf.tokenizer_files(self.header)
        files = {
            "config.json": as_json(gguf.config_json(self.header)),
            "tokenizer_config.json": as_json(beside),
        }
        if isinstance(vocabulary, bytes):
            return files | {"tokenizer.model": vocabulary}
        return files | {"tokenizer.json": as_json(vocabulary)}

    def scheme(self, info: gguf.TensorInfo) -> gguf.Type | None:
        """The ggml type in which a tensor is quantised. Returns None if it is not; those of one
        dimension never are."""
        if info.type.block > 1 and len(info.shape) > 1:
            return info.type
        return None

    def file_tensors(self) -> list[FileTensor]:
        found = []
        for info in self.header.tensors.values():
            dtype = TYPES.get(info.type.name)
            if self.scheme(info):
                dtype = torch.float32  # once it is decoded
            found.append(
                FileTensor(info.file, info.name, dtype, info.shape, info.offset, info.version)
            )
        return found

    def part(self, c: Config, part: Part, found: Found) -> SourceTensor:
        name = self.name_of(part)
        in_pairs = FAMILIES[gguf.family_name(self.header)].in_pairs
        head_dim = c.head_dim if part.rotated and not in_pairs else None
        info = self.header.tensors.get(name)
        arguments = (name, part.shape(c), found, head_dim)
        if info and self.scheme(info):
            return GgufMatrix(*arguments, self.scheme(info))
        if part.kind is Kind.ROW:
            return Row(*arguments)
        return Floats(*arguments)


# ---- folders


class WeightFiles(NamedTuple):
    """The files of a folder that hold its weights, and in which of them its index says that a
    tensor is, if it has an index."""

    files: list[Path]
    named: dict[str, Path] = {}


def weight_files(folder: Path) -> WeightFiles:
    """The files that transformers would take, if there are several. Raises OSError, ValueError."""
    picked = hub.weights_in(folder)
    if not picked:
        usual = "model.safetensors or pytorch_model.bin, or an index of their shards, or Meta's consolidated.*.pth"
        raise _nothing_in(folder, f"no weights ({usual})")
    if picked[0].suffix != ".json":
        return WeightFiles(picked)
    named = hub.weight_map(picked[0])
    files = sorted(set(named.values()))
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{picked[0]} names {file.name}, which is missing")
    return WeightFiles(files, named)


def _nothing_in(folder: Path, usual: str) -> FileNotFoundError:
    """The error for a folder without a model: what it holds instead, and what to do about it."""
    if (folder / "adapter_config.json").is_file():
        base = Fields(folder / "adapter_config.json").get("base_model_name_or_path")
        usual = f"an adapter without its base: merge it into {base or 'that'} first (peft: merge_and_unload)"
    return FileNotFoundError(f"{folder} holds {usual}")


class Folder(Source):
    """What the layouts of folders have in common."""

    def small_files(self) -> dict[str, bytes]:
        files = [*(self.path / name for name in hub.SMALL_FILES), self.tokenizer()]
        return {file.name: read_bytes(file) for file in files if file.is_file()}

    def tokenizer(self) -> Path:
        return tokenizer_file(self.path)

    def file_tensors(self) -> list[FileTensor]:
        files, named = weight_files(self.path)
        tensors = [tensor for file in files for tensor in tensors_of(file)]
        return [t for t in tensors if named.get(t.name, t.file) == t.file]


class HuggingFaceFolder(Folder):
    """A folder with a config.json."""

    naming = "hugging_face"

    @cached_property
    def config_json(self) -> Fields:
        return Fields(self.path / "config.json")

    def name_of(self, part: Part) -> str:
        renames = family_of(self.config_json).renames
        renamed = renames.get(part.hugging_face, part.hugging_face)
        return replace(part, hugging_face=renamed).name_in(self.naming)

    @cached_property
    def scheme(self) -> schemes.Scheme | None:
        return schemes.scheme_of(self.config_json)

    def unchecked_config(self) -> Config:
        return hugging_face_config(self.config_json, generation_of(self.path))

    def part(self, c: Config, part: Part, found: Found) -> SourceTensor:
        name = self.name_of(part)
        head_dim = c.head_dim if part.rotated else None

        def tensor(in_file: str) -> SourceTensor:
            """The part, or an expert's matrix in one."""
            shape = part.shape(c)[-2:]
            wanted = {}
            if self.scheme and part.kind in (Kind.MATRIX, Kind.PLAIN):
                wanted = self.scheme_tensors(in_file, shape, found)
            if wanted:
                return SafetensorsMatrix(in_file, shape, found, head_dim, self.scheme, wanted)
            return Floats(in_file, shape, found, head_dim)

        if part.of_experts:
            return Stack([tensor(name.format(expert)) for expert in range(c.n_experts)])
        if part.kind is Kind.ROW:
            return Row(name, part.shape(c), found, head_dim)
        return tensor(name)

    def scheme_tensors(self, name: str, shape: tuple[int, int], found: Found) -> dict[str, Wanted]:
        """What the scheme stores for a matrix, by name. Empty if this one is not quantised."""
        stem = name.removesuffix("weight")
        words = self.scheme.shapes(*shape)
        codes, *_ = words
        if stem + codes not in found:
            return {}
        if codes == "weight" and found[f"{stem}weight"][0].dtype in schemes.FLOATS:
            return {}
        absent = {word for word in self.scheme.optional if stem + word not in found}
        return {stem + word: Wanted(*words[word]) for word in words if word not in absent}


class MetaFolder(Folder):
    """A folder with a params.json, whose tensors may be divided among several files. The tokenizer
    may be in its parent."""

    naming = "meta"

    def small_files(self) -> dict[str, bytes]:
        files = super().small_files()
        files.pop("config.json", None)  # whatever lies beside
        return files

    def unchecked_config(self) -> Config:
        config = meta_config(Fields(self.path / "params.json"))
        if config.vocab_size >= 1:
            return config
        # Every file has all rows of the embedding
        first, *_ = weight_files(self.path).files
        shapes = {tensor.name: tensor.shape for tensor in tensors_of(first)}
        rows, *_ = shapes.get(EMBEDDING.meta) or [1]
        return replace(config, vocab_size=rows)

    def part(self, c: Config, part: Part, found: Found) -> SourceTensor:
        return ShardedFloats(part.name, part.shape(c), found)


# ---- what --save wrote

SAVED = "model.safetensors"
SAVED_LAYOUT = "2"  # of such a file; any other is refused


class SavedFolder(Folder):
    """A folder that --save wrote: the original's small files, and a model.safetensors that holds
    the tensors of the model, their parts joined. Its metadata name the format of the matrices."""

    naming = "meta"

    def __init__(self, path: Path, format: Format):
        super().__init__(path)
        self.format = format

    def unchecked_config(self) -> Config:
        return small_source(self.path).config()

    def tensor(self, c: Config, t: ModelTensor, found: Found) -> SourceTensor:
        shape = t.shape(c)
        if not t.is_matrix:
            return Floats(f"{t.name}.weight", shape, found)
        wanted = saved_matrix(t, c, self.format)
        if t.of_experts:
            rows, columns = shape
            shape = (c.n_experts, rows // c.n_experts, columns)
        return SavedMatrix(t.name, shape, found, wanted=wanted)


def saved_matrix(t: ModelTensor, c: Config, format: Format) -> dict[str, Wanted]:
    """The tensors that --save writes for a matrix, by name. The codes bear the name of the matrix
    itself, and a tensor of a single column is written as a vector."""
    wanted = {}
    name = t.name  # of the first
    for key, (dtype, (rows, columns)) in format.at(t.name).shapes(*t.shape(c)).items():
        if wanted:
            name = f"{t.name}.{key}"
        shape = (rows, columns)
        if columns == 1:
            shape = (rows,)
        wanted[name] = Wanted((dtype,), [shape])
    return wanted


def saved_format(folder: Path) -> Format | None:
    """The format of the matrices in a folder that --save wrote. Returns None for any other. Raises
    ValueError."""
    file = folder / SAVED
    if not file.is_file():
        return None
    metadata, _ = safetensors_header(file)
    if not metadata.get("fused-llama"):
        return None
    name = metadata.get("format")
    if metadata["fused-llama"] != SAVED_LAYOUT or name not in FORMATS:
        what = f"was saved by another version of fused-llama, in the format {name!r}"
        raise ValueError(f"{file} {what}: save it again from the original")
    return FORMATS[name]


# ---- which layout it is


def small_source(path: Path) -> Source:
    """The source of a path's small files. What --save wrote has those of the original, so it is
    taken for the original's layout. Raises OSError, ValueError."""
    if path.is_file():
        return GgufFile(path)
    of_meta = (path / "params.json").is_file()
    weights_are_metas = any(file.suffix == ".pth" for file in hub.weights_in(path))
    if (path / "config.json").is_file() and not (of_meta and weights_are_metas):
        return HuggingFaceFolder(path)
    if of_meta:
        return MetaFolder(path)
    raise _nothing_in(path, "neither config.json nor params.json: not a checkpoint")


def source_of(path: Path) -> Source:
    """The source of a path. Raises OSError, ValueError."""
    format = saved_format(path)
    if format:
        return SavedFolder(path, format)
    return small_source(path)
