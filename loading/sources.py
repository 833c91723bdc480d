"""Step 2 of loading (see loading/checkpoint.py): the layouts on disk. A Source is one of them: it knows where
configuration, tokenizer and tensors are, so that the other steps ask it and need not know.
`source_of`, at the end, says which layout a path has.

What the tensors of its files have to do with those of the model is the end of step 5
(layouts.py)."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from formats import Format
from kernels import FORMATS
from loading import gguf, hub, quantised
from loading.config import generation_of, hugging_face_config, meta_config
from loading.families import family_of
from loading.files import Fields, read_bytes
from loading.headers import TYPES, FileTensor, safetensors_header
from loading.names import EMBEDDING
from loading.torchfile import torch_tensors
from model import Config
from tokenizer import tokenizer_file

# ---- what all layouts have in common


class Source(ABC):
    """One layout on disk: it knows where configuration, tokenizer and tensors are."""

    naming: str  # which of its names a tensor has here, see names.py
    renames: Mapping[str, str] = {}  # names of the model's family instead of these
    format: Format | None = None  # of the matrices, if --save has encoded them

    def __init__(self, path: Path):
        self.path = path

    @abstractmethod
    def config(self) -> Config:
        """The model's configuration. Raises OSError, ValueError."""

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


# ---- GGUF


class GgufFile(Source):
    """A file of llama.cpp's, or the first shard of a split one."""

    naming = "gguf"

    @cached_property
    def header(self) -> gguf.GGUF:
        return gguf.read_header(self.path)

    def config(self) -> Config:
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
                FileTensor(info.file, info.name, dtype, info.shape, info.offset, info.stamp)
            )
        return found


# ---- folders


def tensors_of(file: Path) -> list[FileTensor]:
    """The tensors of a file. Raises ValueError."""
    if file.suffix == ".safetensors":
        _, tensors = safetensors_header(file)
        return tensors
    return torch_tensors(file)


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

    @property
    def renames(self) -> Mapping[str, str]:
        return family_of(self.config_json).renames

    @cached_property
    def scheme(self) -> quantised.Scheme | None:
        """How others have quantised its matrices. Returns None if they have not."""
        return quantised.scheme_of(self.config_json)

    def config(self) -> Config:
        return hugging_face_config(self.config_json, generation_of(self.path))


class MetaFolder(Folder):
    """A folder with a params.json, whose tensors may be divided among several files. The tokenizer
    may be in its parent."""

    naming = "meta"

    def small_files(self) -> dict[str, bytes]:
        files = super().small_files()
        files.pop("config.json", None)  # whatever lies beside
        return files

    def config(self) -> Config:
        config = meta_config(Fields(self.path / "params.json"))
        if config.vocab_size >= 1:
            return config
        # Every file has all rows of the embedding
        first, *_ = weight_files(self.path).files
        shapes = {tensor.name: tensor.shape for tensor in tensors_of(first)}
        rows, *_ = shapes.get(EMBEDDING.meta) or [1]
        return replace(config, vocab_size=rows)


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

    def config(self) -> Config:
        return small_source(self.path).config()


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
