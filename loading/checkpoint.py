"""How the name of a checkpoint becomes the weights of a model, step by step, as `load` does it.

      a name: "owner/name", a folder or a GGUF file
    1   |  hub.py          finds it on this machine, or downloads it
      a path
    2   |  LAYOUTS (here)  which layout is it? Each is one file: hugging_face.py, meta.py, gguf.py
        |                  (with ggml.py and gguf_tokenizer.py) and, for what --save wrote, saved.py.
        |                  layouts.py has what they share, tokenizer_files.py the tokenizer's files
        |  reading.py      the header of a safetensors file: where tensors lie in it
        |  torchfile.py    the same for a file that torch.save wrote
      a Layout
    3   |  families.py     what tells Llama, Qwen3 and other families apart: a row each
        |  rope.py         what a configuration says about RoPE
      a Config
    4   |  names.py        the tensors of such a model, and the parts that make them up
      names and shapes
    5   |  tensors.py      a tensor of the model, made of those in files
        |  quantised.py    how other programs store the matrices that they have quantised
        |  layouts.py      all tensors of a model. Only headers are read, and checked
      a Checkpoint: the Config, the tensors, and whatever else its files say
    6   |  place.py        chooses device, type, backend and formats, and asks whether it all fits
        |                  into memory
    7   |  loader.py       copies the tensors to the device. A matrix stays in floats, is encoded
        |                  (fp8.py, bits/int4.py), or is kept bit for bit as others have quantised it
        |                  (bits/others.py). reading.py reads them, some rows of several at once
      Weights, in a Llama (model.py)

A tensor of the model, such as w13 of layer 3, has four names on its way. Its ModelTensor is what the
model needs: a shape, and the parts w1 and w3. A list of Stored says how a checkpoint has them, and
which rows of w13 each is. Under these, FileTensors say where the bytes lie in files. They are read
piece by piece, while the next Pieces are on their way from the files, and each knows which rows of
the tensor it is, so that the loader only copies it there.

files.py opens all files, since none is trusted. `save` goes the other way, and writes the weights of
a loader to a folder."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from loading import hub
from loading.files import one_line_errors
from loading.gguf import GgufFile, files_of, read_header
from loading.hugging_face import (
    HuggingFaceFolder,
    original_type,
    sampling_of,
    unsupported_settings,
)
from loading.layouts import Files, Layout, nothing_in, tensors_for
from loading.loader import Loader, llama_of
from loading.meta import MetaFolder
from loading.names import model_parts, weight_bytes
from loading.place import FORMATS, dtype_name
from loading.place import place as place_of
from loading.saved import SAVED, SavedFolder, as_saved, filled, is_empty, write_tensors
from loading.templates import find_template
from loading.tensors import flaw
from loading.tokenizer_files import files_in, tokenizer_file
from model import Config, Llama, enumerated
from ranks.processes import Ranks
from sampling import Sampling
from settings import Options
from tokenizer import Tokenizer, TokenizerFiles

# ---- all steps


@one_line_errors()
def load(
    name: str | Path | Checkpoint,
    *,
    ranks: Ranks = Ranks(),
    sampling: dict[str, float] | None = None,
    quiet: bool = False,
    **options,
) -> Llama:
    """Load a checkpoint: a folder in Hugging Face's or Meta's layout, a GGUF file or a repository of
    the hub, see open_checkpoint, or one that is open already.

    ranks: the processes that share the model, if there are several. sampling: settings that replace
    the checkpoint's own. quiet: no progress bar. options: see settings.Options. Raises ValueError,
    OSError or MemoryError, in one line that says what to do."""
    options = Options(**options)
    checkpoint = name if isinstance(name, Checkpoint) else open_checkpoint(name)
    checkpoint.check_original(options.format, or_own=True)
    given = sampling or {}
    sampling = Sampling(**checkpoint.sampling(given) | given)
    place = place_of(options, checkpoint.config, ranks, checkpoint)
    weights = Loader(checkpoint, place, ranks, quiet).load()
    return llama_of(weights, place, options, ranks, checkpoint=checkpoint, sampling=sampling)


# ---- steps 1 to 5: from a name to the configuration and its tensors

LAYOUTS = (GgufFile, MetaFolder, HuggingFaceFolder)


@one_line_errors()
def open_checkpoint(name: str | Path) -> Checkpoint:
    """The checkpoint of a name: a folder, a GGUF file, or a repository of the Hugging Face hub,
    "owner/name", or "owner/name:Q4_K_M" for one of its GGUF files. A repository that is not in the
    hub's cache is downloaded. Raises OSError or ValueError, in one line that says what to do, and
    TypeError for a name that is neither a text nor a path."""
    if not isinstance(name, str | Path):
        kinds = 'a folder, a GGUF file or "owner/name" on the hub'
        raise TypeError(f"a model is given as {kinds}, not as {type(name).__name__}")
    if path := hub.local_checkpoint(str(name)):
        return Checkpoint(path)
    repository = hub.Repository(str(name))
    checkpoint = of_repository(repository)
    checkpoint.layout.notes += repository.notes
    if checkpoint.folder.is_file() and not repository.kind:
        taken = f"{checkpoint.folder.name} is taken; {name}:KIND takes another"
        checkpoint.layout.notes.append(f"of the GGUF files in {name}, {taken}")
    return checkpoint


def of_repository(repository: hub.Repository) -> Checkpoint:
    cached = [*repository.cached()]
    for path in cached:
        if checkpoint := whole_checkpoint(path):
            return checkpoint
    if cached and repository.is_offline:
        return Checkpoint(cached[0])  # which says what is wrong with it
    with repository.plain_errors():
        # A model that is not supported is refused before its weights are fetched
        if not repository.is_gguf and "config.json" in repository.names:
            read_config(repository.download_small())
        path = repository.download()
    return Checkpoint(path)


def whole_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint at a path if everything is there that it refers to. Without an index, a missing
    file of Meta's shows only in tensors that do not fit. Raises ValueError for a model that is not
    supported."""
    try:
        if path.is_dir() and not Files(path).has_weights():
            return None  # the small files may be of another checkpoint
        layout = layout_at(path)
        config = layout.config()
    except OSError:
        return None
    try:
        if path.is_dir():
            tokenizer_file(path)
        return Checkpoint(path, layout, config)
    except (OSError, ValueError):
        return None


@one_line_errors()
def read_config(path: Path) -> Config:
    """The configuration in config.json, in Meta's params.json or in a GGUF file. Raises OSError or
    ValueError."""
    return original_layout(Files(path)).config()


def original_layout(files: Files) -> Layout:
    """The layout of a path, or of the small files that --save has copied from the original. Raises
    OSError, ValueError."""
    for layout in LAYOUTS:
        if layout.is_at(files):
            return layout(files)
    raise nothing_in(files.path, "neither config.json nor params.json: not a checkpoint")


def layout_at(path: Path) -> Layout:
    """The layout of a path. Raises OSError, ValueError."""
    files = Files(path)
    original = original_layout(files)
    if SavedFolder.is_at(files):
        return SavedFolder(files, original)
    return original


@one_line_errors()
def open_tokenizer(
    path: str | Path,
    vocab_size: int | None = None,
    bos_id: int | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """The tokenizer of a folder or a GGUF file, whatever else is there. Raises OSError,
    ValueError."""
    path = Path(path)
    if file := hub.find_gguf(path):
        files = files_of(read_header(file), chat_template)
    else:
        there = Files(path)
        model_type = original_type(there.fields("config.json"))
        files = files_in(path, chat_template, model_type, MetaFolder.is_at(there))
    return Tokenizer(files, vocab_size, bos_id)


class Checkpoint:
    """An opened checkpoint: its configuration and its tensors, of which only headers have been
    read."""

    @one_line_errors()
    def __init__(self, path: Path, layout: Layout | None = None, config: Config | None = None):
        """path: of a folder or a GGUF file. layout, config: what has been opened of it already.
        Raises OSError, ValueError."""
        self.folder = path
        self.layout = layout or layout_at(path)
        self.format = self.layout.format  # of the matrices, if --save has encoded them
        self.config, self.tensors = tensors_for(self.layout, config or self.layout.config())

    def sampling(self, overridden: Collection[str] = ()) -> dict[str, float]:
        """What it says about sampling, by the names of Sampling, without those that are overridden.
        Raises ValueError."""
        return sampling_of(self.layout.generation, overridden)

    def tokenizer_files(self, chat_template: str | None = None) -> TokenizerFiles:
        """What a Tokenizer is made of. chat_template: a name or a file, instead of its own. Raises
        OSError, ValueError."""
        return self.layout.tokenizer_files(chat_template)

    @property
    def notes(self) -> list[str]:
        """What the user should know, a line each."""
        notes = [*self.layout.notes]
        if unsupported := unsupported_settings(self.layout.generation):
            notes.append(
                f"generation_config.json: {', '.join(unsupported)}: not supported, ignored"
            )
        return notes

    @property
    def dtype(self) -> torch.dtype:
        """The type of its floats."""
        if self.config.dtype and not self.format:
            return self.config.dtype
        return self.tensors["tok_embeddings"][0].file.dtype

    @property
    def quantised(self) -> str:
        """How others have quantised matrices, in words; empty if they are floats."""
        schemes = (stored.scheme for tensor in self.tensors.values() for stored in tensor)
        return enumerated({scheme.name for scheme in schemes if scheme})

    @property
    def is_encoded(self) -> bool:
        """Whether matrices are quantised, by others or by --save."""
        return bool(self.format or self.quantised)

    def check_original(self, format: str | None, or_own: bool = False) -> None:
        """Raise ValueError if matrices that are encoded already would be encoded again. or_own: the
        format in which --save has encoded them may be named, as they stay in it."""
        own = self.format.name if self.format else self.quantised
        stays = or_own and format == own
        if own and format and not stays:
            lossy = f"its matrices are {own}, and {format} would lose precision a second time"
            raise ValueError(f"{self.folder}: {lossy}: run it as it is, or encode the original")

    @property
    def elements(self) -> int:
        parts = model_parts(self.config).values()
        return sum(math.prod(part.shape(self.config)) for part in parts)

    def first_bad_tensor(self, dtype: torch.dtype) -> str | None:
        """What is wrong with the first tensor of floats that holds NaN or inf, in the file or once
        converted to dtype. Returns None if there is none. Codes are checked as they are read."""
        for tensor in self.tensors.values():
            wrong = flaw(tensor, dtype)
            if wrong:
                return wrong
        return None


# ---- the way back


@one_line_errors()
def save(name: str, target: str, *, quiet: bool = False, format: str = "e4m3", **options) -> Path:
    """Write a checkpoint with its matrices in a format to the folder `target`, which must be new or
    empty. After an error nothing is left there. Returns its model.safetensors. All other tensors
    are in dtype; auto is the checkpoint's own, even on a CPU. options: those of settings.Options
    that say so, and the device. Raises ValueError, OSError or MemoryError, in one line that says
    what to do."""
    options = Options(format=format, ctx_size=1, backend="torch", **options)
    checkpoint = open_checkpoint(name)
    to = Path(os.path.expanduser(target)).resolve()
    if to.exists() and (not to.is_dir() or not is_empty(to)):
        raise FileExistsError(f"{to} is not an empty folder: save to a new one")
    checkpoint.check_original(format)
    if options.dtype == "auto":
        options = replace(options, dtype=dtype_name(checkpoint.dtype))
    place = place_of(options, checkpoint.config, Ranks(), checkpoint)
    need = weight_bytes(place.config, place.dtype, place.formats) / 1e9
    at = to if to.exists() else to.parent
    free = shutil.disk_usage(at).free / 1e9
    if need > free:
        raise OSError(
            f"the model takes {need:.2f} GB, but {at} has {free:.2f} GB free: save elsewhere"
        )
    with filled(to) as made:
        write_small_files(checkpoint, made)
        as_encoded = replace(place, backend="")  # not in a layout for anyone's products
        weights = Loader(checkpoint, as_encoded, quiet=quiet).load()
        write_tensors(made, place.config, weights, FORMATS[format])
    return to / SAVED


def write_small_files(checkpoint: Checkpoint, to: Path) -> None:
    """Write everything but the tensors that Checkpoint and Tokenizer read, so that they find the
    same in `to` as in the checkpoint. Raises OSError, ValueError."""
    files = checkpoint.tokenizer_files()
    small_files = as_saved(checkpoint.layout.small_files())
    for name, content in small_files.items():
        (to / name).write_bytes(content)
    # The template may have been recognised by the path of the original's folder
    if files.template != find_template(to, files.config)[0]:
        (to / "chat_template.jinja").write_text(files.template)
