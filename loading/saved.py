"""The layout on disk that --save writes (see loading/checkpoint.py): a folder with the original's small files, and a
model.safetensors that holds the tensors of the model, their parts joined, with the matrices in a
format, so that later runs need not encode them. Its metadata names the format."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import save_file
from torch import Tensor

from formats import Format, Tensors
from loading.hugging_face import ORIGINAL_TYPE, SAVED_TYPE
from loading.layouts import Files, Folder
from loading.names import ModelTensor, Part, model_tensors, tensor_in
from loading.place import FORMATS
from loading.quantised import Wanted
from loading.reading import FileTensor
from loading.tensors import Found, Spans, Stored, columns_in, files_for, floats
from model import Config, Weights

SAVED = "model.safetensors"
SAVED_LAYOUT = "2"  # of such a file; any other is refused

# ---- reading


class SavedFolder(Folder):
    def __init__(self, files: Files, original: Folder):
        """original: what the small files are of."""
        super().__init__(files)
        self.original = original
        self.generation = original.generation
        self.model_type = original.model_type
        self.notes = original.notes
        metadata, _ = files.header(self.path / SAVED)
        name = metadata.get("format")
        if metadata["fused-llama"] != SAVED_LAYOUT or name not in FORMATS:
            what = f"was saved by another version of fused-llama, in the format {name!r}"
            raise ValueError(f"{self.path / SAVED} {what}: save it again from the original")
        self.format = FORMATS[name]

    @staticmethod
    def is_at(files: Files) -> bool:
        return files.has(SAVED) and "fused-llama" in files.header(files.path / SAVED)[0]

    def config(self) -> Config:
        return replace(self.original.config(), factors=())  # they have been multiplied

    def name_of(self, part: Part) -> str:
        return part.name

    def stored_part(self, part: Part, c: Config, found: Found) -> list[Stored]:
        raise NotImplementedError("its tensors are whole ones of the model")

    def stored(self, t: ModelTensor, c: Config, found: Found) -> list[Stored]:
        if t.is_matrix:
            return [saved_matrix(t, c, self.format.for_matrix(t.name), found)]
        name = f"{t.name}.weight"
        files = found.get(name, [])
        if t.field == "qk_norm":  # saved as it is in the model, with a row for q and one for k
            files = [replace(file, shape=(prod(file.shape),)) for file in files]
        return [floats(name, t.shape(c), {name: files})]


def saved_matrix(t: ModelTensor, c: Config, format: Format, found: Found) -> Stored:
    """A matrix of the model, its parts joined, or a stack, in the format in which it was written."""
    wanted = names_of(t, c, format)
    files = files_for({name: Wanted(*about) for name, about in wanted.items()}, found)
    *outer, K = shape = t.stack_shape(c)

    def cut(spans: Spans) -> list[FileTensor]:
        *some, columns = spans
        if not format.can_be_cut(K, len(columns)):
            what = f"{t.name} was saved in {format.name}, where its {K} columns"
            parts = K // len(columns)
            raise ValueError(f"{what} cannot be divided among {parts} processes: take the original")
        parts = []
        for (tensor,) in files.found.values():
            in_row = tensor.shape[1:]  # none if it is written as a vector
            taken = [range(M)[columns_in(columns, K, M)] for M in in_row]
            parts.append(replace(tensor, shape=(*outer, *in_row)).cut([*some, *taken]))
        return parts

    def make(tensors: list[Tensor], spans: Spans) -> Tensors:
        return tuple(tensors)

    return Stored(
        name=t.name,
        shape=shape,
        files=files.found,
        cut=cut,
        make=make,
        format=format,
        problems=files.problems,
    )


def names_of(t: ModelTensor, c: Config, format: Format) -> dict[str, tuple]:
    """The types and shapes of the tensors that are written for a matrix, by name. The codes bear the
    name of the matrix itself, and a tensor of a single column is written as a vector."""
    found = {}
    name = t.name  # of the first
    for key, (dtype, (rows, columns)) in format.shapes(*t.shape(c)).items():
        if found:
            name = f"{t.name}.{key}"
        shape = (rows, columns)
        if columns == 1:
            shape = (rows,)
        found[name] = (dtype,), [shape]
    return found


# ---- writing


def tensors_to_save(c: Config, weights: Weights, format: Format) -> dict[str, Tensor]:
    """The model's tensors on the CPU, by the names that SavedFolder reads."""
    tensors = {}
    for t in model_tensors(c):
        value = tensor_in(weights, t)
        if not t.is_matrix:
            tensors[f"{t.name}.weight"] = value.data.cpu()
            continue
        names = names_of(t, c, format.for_matrix(t.name)).items()
        for (name, (_, (shape,))), codes in zip(names, value.tensors, strict=True):
            tensors[name] = codes.cpu().view(shape)
    return tensors


def as_saved(small_files: dict[str, bytes]) -> dict[str, bytes]:
    """The original's small files, but config.json has a model_type of this program: other programs
    would take the original's, and fill in random weights for those whose names they do not find."""
    if "config.json" not in small_files:
        return small_files
    fields = json.loads(small_files["config.json"])
    fields[ORIGINAL_TYPE] = fields.get("model_type", "llama")
    fields["model_type"] = SAVED_TYPE
    return small_files | {"config.json": json.dumps(fields, indent=2).encode()}


def write_tensors(to: Path, c: Config, weights: Weights, format: Format) -> None:
    """Write a model's tensors into a folder that has its small files."""
    mode = next(to.iterdir()).stat().st_mode
    metadata = {"fused-llama": SAVED_LAYOUT, "format": format.name}
    save_file(tensors_to_save(c, weights, format), to / SAVED, metadata)
    (to / SAVED).chmod(mode)  # the library makes it readable for the owner alone


def is_empty(folder: Path) -> bool:
    """Whether a folder holds nothing but what ext4 puts into each new file system."""
    return all(file.name == "lost+found" for file in folder.iterdir())


@contextmanager
def filled(to: Path) -> Iterator[Path]:
    """A folder inside `to`, which is new or empty, for the files that `to` shall contain. When all
    are written they move there, the tensors last, since without them it is no checkpoint. After an
    error `to` is as before. Nothing is written beside it: it may be a mount point, or its parent
    may not be writable."""
    is_new = not to.exists()
    to.mkdir(exist_ok=True)
    names = []
    try:
        with TemporaryDirectory(prefix="partial-", dir=to) as inside:
            yield Path(inside)
            names = sorted(os.listdir(inside), key=lambda name: name == SAVED)
            for name in names:
                Path(inside, name).rename(to / name)
    except BaseException:
        for name in names:
            (to / name).unlink(missing_ok=True)
        if is_new:
            to.rmdir()
        raise
