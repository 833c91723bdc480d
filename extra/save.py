"""Saving a checkpoint with its matrices in a format, so that later runs need not encode them: a
folder whose model.safetensors says in its metadata which format it is, with the original's other
small files."""

import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint import (
    DTYPES,
    LAYOUT,
    SAVED,
    Checkpoint,
    Loader,
    check_choice,
    check_groups,
    check_memory,
    check_original,
    find_checkpoint,
    model_tensors,
    pick_device,
    saved_as,
    weight_bytes,
)
from extra import gguf
from extra.files import one_line_errors, read_bytes
from extra.gguf import read_header
from extra.hub import SMALL_FILES
from fp8 import Format
from kernels import FORMATS
from model import Config, Weights
from tokenizer import Tokenizer, find_template, tokenizer_file


@one_line_errors()
def save(
    name: str,
    target: str,
    *,
    format: str = "e4m3",
    dtype: str = "auto",
    device: str = "auto",
    quiet: bool = False,
) -> Path:
    """Write a checkpoint with its matrices in a format to the folder `target`, which must be new or
    empty: whole or not at all. Returns its model.safetensors. All other tensors are in dtype; auto
    is the checkpoint's own, on a CPU too. Raises ValueError, OSError or MemoryError, in one line that says
    what to do."""
    check_choice("format", format, FORMATS)
    check_choice("dtype", dtype, ("auto", *DTYPES))
    folder, to = find_checkpoint(name), Path(os.path.expanduser(target)).resolve()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise FileExistsError(f"{to} is not an empty folder: save to a new one")
    checkpoint = Checkpoint(folder)
    config = checkpoint.config
    check_original(checkpoint, format)
    on, as_dtype, held = pick_device(device), DTYPES.get(dtype, checkpoint.dtype), FORMATS[format]
    check_groups(config, held)
    check_memory(config, as_dtype, on, 1, held)
    need, free = weight_bytes(config, as_dtype, held) / 1e9, shutil.disk_usage(to.parent).free / 1e9
    if need > free:
        raise OSError(
            f"the model takes {need:.2f} GB, but {to.parent} has {free:.2f} GB free: save elsewhere"
        )
    with TemporaryDirectory(prefix=f"{to.name}.partial-", dir=to.parent) as beside:
        # and then renamed; the outer folder is readable for its owner alone
        made = Path(beside, "whole")
        made.mkdir()
        _copy_what_is_small(folder, made, Tokenizer(folder))
        with torch.inference_mode():
            loader = Loader(checkpoint, as_dtype, checkpoint.dtype, on, held, quiet=quiet)
            weights = loader.load()
        save_file(
            _saved(config, weights, held), made / SAVED, {"fused-llama": LAYOUT, "format": format}
        )
        # the library makes it readable for the owner alone
        (made / SAVED).chmod(made.stat().st_mode & 0o666)
        made.rename(to)
    return to / SAVED


def _copy_what_is_small(folder: Path, to: Path, tokenizer: Tokenizer) -> None:
    """Copy all that read_config and Tokenizer read, so that they find the same in `to` as in the
    folder."""
    if folder.is_file():
        header = read_header(folder)
        vocabulary, beside = gguf.tokenizer_files(header)
        files = {"config.json": gguf.config_json(header), "tokenizer_config.json": beside}
        files["tokenizer.model" if isinstance(vocabulary, bytes) else "tokenizer.json"] = vocabulary
        for name, value in files.items():
            (to / name).write_bytes(
                value if isinstance(value, bytes) else json.dumps(value).encode()
            )
    else:
        for file in (*(folder / name for name in SMALL_FILES), tokenizer_file(folder)):
            if file.is_file():
                (to / file.name).write_bytes(read_bytes(file))
    # it was recognised by the folder's path
    if tokenizer.chat_template != find_template(to, tokenizer.config)[0]:
        (to / "chat_template.jinja").write_text(tokenizer.chat_template)


def _saved(c: Config, w: Weights, format: Format) -> dict[str, Tensor]:
    """The tensors on the CPU, by the names of saved_as."""
    tensors = {}
    for t in model_tensors(c):
        held = getattr(w if t.layer is None else w.layers[t.layer], t.field)
        values = held.tensors if t.matrix else (held,)
        for (name, (_, shape)), value in zip(saved_as(t, c, format).items(), values, strict=True):
            tensors[name] = value.cpu().view(shape)
    return tensors
