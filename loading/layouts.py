"""What all layouts on disk have in common, for steps 2 and 5 of loading (see loading/checkpoint.py). Each has a
file of its own, with its configuration, its files, its names, and how a part of a tensor of the
model is made of those in files. Here the tensors of the files are compared with those of the
model."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from formats import Format
from loading import hub
from loading.files import Fields, read_bytes
from loading.names import BIASES, EMBEDDING, OUTPUT, PARTS, ModelTensor, Part, model_tensors
from loading.quantised import FLOATS
from loading.reading import CPU, FileTensor, read, safetensors_header
from loading.tensors import Found, Stored, part_of_rows, read_rows, weights_at_once
from loading.tokenizer_files import files_in, tokenizer_file
from loading.torchfile import torch_tensors
from model import Config
from tokenizer import TokenizerFiles

# ---- what lies at a path


class WeightFiles(NamedTuple):
    """The files of a folder that hold its weights, and in which of them its index says that a
    tensor is, if it has an index."""

    files: list[Path]
    named: dict[str, Path] = {}


class Files:
    """The files at a checkpoint's path, of which each is looked into once."""

    def __init__(self, path: Path):
        """path: of a folder or of a file."""
        self.path = path
        self._headers: dict[Path, tuple[dict[str, str], list[FileTensor]]] = {}

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def fields(self, name: str) -> Fields:
        """Those of a JSON file, none if there is no such file. Raises OSError, ValueError."""
        file = self.path / name
        return Fields(file, None if file.is_file() else {})

    def header(self, file: Path) -> tuple[dict[str, str], list[FileTensor]]:
        """The metadata and the tensors of a file of weights. Raises OSError, ValueError."""
        if file not in self._headers:
            if file.suffix == ".safetensors":
                self._headers[file] = safetensors_header(file)
            else:
                self._headers[file] = {}, torch_tensors(file)
        return self._headers[file]

    def has_weights(self) -> bool:
        """Whether the weights are there, all of those that an index names. Raises ValueError."""
        try:
            return bool(self.weights.files)
        except OSError:
            return False

    @cached_property
    def picked(self) -> list[Path]:
        """The weights that transformers would take: a file, an index or Meta's shards."""
        return hub.weights_in(self.path)

    @cached_property
    def weights(self) -> WeightFiles:
        """Raises OSError, ValueError."""
        if not self.picked:
            usual = "model.safetensors or pytorch_model.bin, or an index of their shards, or Meta's consolidated.*.pth"
            raise nothing_in(self.path, f"no weights ({usual})")
        first = self.picked[0]
        if first.suffix != ".json":
            return WeightFiles(self.picked)
        named = hub.weight_map(first)
        files = sorted(set(named.values()))
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(f"{first} names {file.name}, which is missing")
        return WeightFiles(files, named)


def nothing_in(folder: Path, usual: str) -> FileNotFoundError:
    """The error for a folder without a model: what it holds instead, and what to do about it."""
    if (folder / "adapter_config.json").is_file():
        base = Fields(folder / "adapter_config.json").get("base_model_name_or_path")
        usual = f"an adapter without its base: merge it into {base or 'that'} first (peft: merge_and_unload)"
    return FileNotFoundError(f"{folder} holds {usual}")


# What is wrong with a model that generates no text
EMBEDS = (
    "holds a model for embeddings or rewards, which generates no text: take one for chats or texts"
)

# ---- a layout


class Layout(ABC):
    """One layout on disk, opened at a path. What it finds there is what the other steps ask for."""

    format: Format | None = None  # of the matrices, if --save has encoded them
    generation: Fields  # of a generation_config.json

    def __init__(self, files: Files):
        self.files = files
        self.path = files.path
        self.notes: list[str] = []  # what the user should know: a line each

    @staticmethod
    @abstractmethod
    def is_at(files: Files) -> bool:
        """Whether a path has this layout."""

    @abstractmethod
    def config(self) -> Config:
        """The model's configuration. Raises OSError, ValueError."""

    @abstractmethod
    def tokenizer_files(self, chat_template: str | None = None) -> TokenizerFiles:
        """What its files say about the tokenizer. chat_template: a name or a file, instead of its own.
        Raises OSError, ValueError."""

    @abstractmethod
    def small_files(self) -> dict[str, bytes]:
        """Everything but the tensors, as the files of a folder: contents by name. Raises OSError,
        ValueError."""

    @abstractmethod
    def file_tensors(self) -> list[FileTensor]:
        """All tensors of its files. Raises OSError, ValueError."""

    @abstractmethod
    def name_of(self, part: Part) -> str:
        """What its files call a part of a tensor; with {}, each expert has one, and {} is its
        number."""

    @abstractmethod
    def stored_part(self, part: Part, c: Config, found: Found) -> list[Stored]:
        """How a part is stored: one record, or one for each expert."""

    def stored(self, t: ModelTensor, c: Config, found: Found) -> list[Stored]:
        """How a tensor of the model is stored."""
        return joined(t, lambda part: self.stored_part(part, c, found))


def joined(t: ModelTensor, stored_part: Callable[[Part], list[Stored]]) -> list[Stored]:
    """How a tensor is stored whose parts lie one below the other or take turns. stored_part: how a part
    is stored, see Layout."""
    turns = t.parts[0].in_turn
    placed = []
    start = 0
    for i in range(0, len(t.parts), turns):
        for turn, part in enumerate(t.parts[i : i + turns]):
            records = stored_part(part)
            for expert, record in enumerate(records):
                where = dict(first=start + turn, step=turns, expert=expert)
                placed.append(replace(record, **where))
        start += turns * records[0].rows
    return placed


class Folder(Layout):
    """What the layouts of folders have in common."""

    model_type = "llama"  # transformers' name for such models, by which it reads some tokenizers
    tokenizer_above = False  # whether tokenizer.model may lie in the folder's parent

    def __init__(self, files: Files):
        super().__init__(files)
        self.generation = files.fields("generation_config.json")

    def small_files(self) -> dict[str, bytes]:
        files = [self.path / name for name in hub.SMALL_FILES]
        files.append(tokenizer_file(self.path, self.tokenizer_above))
        return {file.name: read_bytes(file) for file in files if file.is_file()}

    def tokenizer_files(self, chat_template: str | None = None) -> TokenizerFiles:
        return files_in(self.path, chat_template, self.model_type, self.tokenizer_above)

    def file_tensors(self) -> list[FileTensor]:
        files, named = self.files.weights
        tensors = [tensor for file in files for tensor in self.files.header(file)[1]]
        return [t for t in tensors if named.get(t.name, t.file) == t.file]


def joined_part(
    matrix: Callable[[str, tuple[int, ...]], Stored | None],
    names: dict[str, Sequence[str]],
    part: Part,
    c: Config,
    head_dim: int | None,
) -> Stored | None:
    """The rows of a part in a tensor that has several, one below the other. matrix: what the files
    have under a name, of this shape. names: of such tensors, with the stems of their parts. Returns
    None if there is no such tensor."""
    for name, stems in names.items():
        if part.bias or part.stem not in stems:
            continue
        rows = [PARTS[stem].shape(c)[-2] for stem in stems]
        *outer, own, columns = part.shape(c)
        whole = matrix(name, (*outer, sum(rows), columns))
        if whole:
            start = sum(rows[: stems.index(part.stem)])
            return part_of_rows(whole, start, own, head_dim=head_dim)
    return None


def check_heads(f: Fields, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
    """Raise ValueError if the numbers do not fit one another."""
    if n_heads % n_kv_heads:
        raise ValueError(
            f"{f.file}: {n_heads} query heads cannot share {n_kv_heads} key/value heads evenly"
        )
    if head_dim % 2:
        raise ValueError(f"{f.file}: head_dim is {head_dim}; RoPE needs an even one")


# ---- all tensors of the model

NOT_NEEDED = re.compile(  # the end of a name
    r"(rotary_emb\.\w+|rope\.freqs|rope_freqs\.weight|\.weight_shape"  # repeated in the config
    r"|self_attn\.(masked_)?bias|(^|\.)(position_ids|attention_mask|causal_mask)"  # masks
    r"|\.(input|output|q|k|v|kv|activation)_scale(_ub)?)$"  # of activations, not rounded here
)
# Biases that a file may contain only if they are all zero
BIAS = re.compile(r"(_proj|\.w[123]|\.gate|attn_output|ffn_\w+)\.bias$")
MOST_BIASES = 1 << 20  # numbers in one of them

StoredTensors = dict[str, list[Stored]]  # of a model, by the names of its tensors


def tensors_for(layout: Layout, c: Config) -> tuple[Config, StoredTensors]:
    """The tensors of a model, and its configuration, in which tie_embeddings and the biases may
    have become False. Raises ValueError if a tensor is missing, unexpected, or of another shape or
    type than the config says."""
    found: Found = {}
    for tensor in layout.file_tensors():
        if not NOT_NEEDED.search(tensor.name):
            found.setdefault(tensor.name, []).append(tensor)
    if c.tie_embeddings and not layout.format:
        c = untied(layout, c, found)
    c = without_absent_biases(layout, c, found)
    tensors = {t.name: layout.stored(t, c, found) for t in model_tensors(c)}
    problems = misfits(tensors.values(), found)
    if problems:
        shown = "; ".join(problems[:4])
        if len(problems) > 4:
            shown += f"; and {len(problems) - 4} more"
        raise ValueError(f"{layout.path}: the tensors do not fit the config: {shown}")
    return c, tensors


def untied(layout: Layout, c: Config, found: Found) -> Config:
    """Returns the configuration, with tie_embeddings False if the files hold two different
    matrices. The one matrix of a tied model may have either name, or be stored under both."""
    embedding, output = layout.name_of(EMBEDDING), layout.name_of(OUTPUT)
    if output not in found:
        return c
    if embedding not in found:
        found[embedding] = [replace(tensor, name=embedding) for tensor in found.pop(output)]
        return c
    one, other = (layout.stored_part(part, c, found) for part in (EMBEDDING, OUTPUT))
    if one[0].problems or other[0].problems or not equal(one, other):
        return replace(c, tie_embeddings=False)
    del found[output]
    return c


def equal(one: Sequence[Stored], other: Sequence[Stored]) -> bool:
    """Whether two matrices have the same values."""
    N, K = one[0].shape
    step = max(1, weights_at_once(CPU) // K)
    for start in range(0, N, step):
        rows = [slice(start, min(start + step, N))]
        mine, its = (
            torch.cat([values.float() for _, values in read_rows(matrix, CPU, rows)])
            for matrix in (one, other)
        )
        if not torch.equal(mine, its):
            return False
    return True


def without_absent_biases(layout: Layout, c: Config, found: Found) -> Config:
    """The configuration without the biases that no layer has, which transformers and llama.cpp take
    for zeros."""
    present = set()
    for t in model_tensors(c):
        if t.field in BIASES:
            names = [f"{t.name}.weight", *(layout.name_of(part) for part in t.parts)]
            present.update(t.field for name in names if name in found)
    return replace(c, **{bias: bias in present for bias in BIASES})


def misfits(tensors: Collection[list[Stored]], found: Found) -> list[str]:
    """What is wrong, a message each, if the files do not hold these tensors and no others."""
    records = [record for tensor in tensors for record in tensor]
    # Once, though the one matrix of a tied model is both embedding and output
    problems = [*dict.fromkeys(problem for record in records for problem in record.problems)]
    expected = {name for record in records for name in record.files}
    for name in found:
        if name in expected:
            continue
        if not BIAS.search(name):
            problems.append(f"{name} is unexpected")
        elif not all(map(is_zero, found[name])):
            weight = name.removesuffix("bias") + "weight"
            problems.append(f"{weight} has a bias, and should have none")
    return problems


def is_zero(bias: FileTensor) -> bool:
    """Whether a bias makes no difference."""
    if bias.dtype not in FLOATS or math.prod(bias.shape) > MOST_BIASES:
        return False
    (values,) = read([bias])
    return not values.any()
