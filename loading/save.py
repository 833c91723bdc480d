"""The way back from loading (see loading/checkpoint.py): save a checkpoint with its matrices in a format,
so that later runs need not encode them. The result is a folder with the original's small files and
a model.safetensors whose metadata names the format. layouts.saved_tensor reads it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

from formats import Format
from kernels import FORMATS
from loading.checkpoint import Checkpoint, Loader, find_checkpoint
from loading.files import one_line_errors
from loading.layouts import saved_matrix
from loading.names import formats_of, model_tensors, tensor_in, weight_bytes
from loading.place import DTYPES, check_choice, check_groups, check_memory, pick_device
from loading.sources import SAVED, SAVED_LAYOUT
from loading.templates import find_template
from model import Config, Weights
from tokenizer import Tokenizer


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
    empty. After an error nothing is left there. Returns its model.safetensors. All other tensors
    are in dtype; auto is the checkpoint's own, even on a CPU. Raises ValueError, OSError or
    MemoryError, in one line that says what to do."""
    check_choice("format", format, FORMATS)
    check_choice("dtype", dtype, ("auto", *DTYPES))
    folder = find_checkpoint(name)
    to = Path(os.path.expanduser(target)).resolve()
    if to.exists() and (not to.is_dir() or not is_empty(to)):
        raise FileExistsError(f"{to} is not an empty folder: save to a new one")
    checkpoint = Checkpoint(folder)
    config = checkpoint.config
    checkpoint.check_original(format)
    on = pick_device(device)
    as_dtype = DTYPES.get(dtype, checkpoint.dtype)
    formats = formats_of(config, FORMATS[format])
    check_groups(config, formats)
    check_memory(config, as_dtype, on, 1, formats, encoded_from=checkpoint.dtype)
    need = weight_bytes(config, as_dtype, formats) / 1e9
    at = to if to.exists() else to.parent
    free = shutil.disk_usage(at).free / 1e9
    if need > free:
        raise OSError(
            f"the model takes {need:.2f} GB, but {at} has {free:.2f} GB free: save elsewhere"
        )
    with filled(to) as made:
        write_small_files(checkpoint, made)
        mode = next(made.iterdir()).stat().st_mode
        loader = Loader(checkpoint, as_dtype, checkpoint.dtype, on, formats, quiet=quiet)
        with torch.inference_mode():
            weights = loader.load()
        metadata = {"fused-llama": SAVED_LAYOUT, "format": format}
        save_file(tensors_to_save(config, weights, FORMATS[format]), made / SAVED, metadata)
        (made / SAVED).chmod(mode)  # the library makes it readable for the owner alone
    return to / SAVED


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


def write_small_files(checkpoint: Checkpoint, to: Path) -> None:
    """Write everything but the tensors that Checkpoint and Tokenizer read, so that they find the
    same in `to` as in the checkpoint. Raises OSError, ValueError."""
    tokenizer = Tokenizer(checkpoint.folder)
    for name, content in checkpoint.source.small_files().items():
        (to / name).write_bytes(content)
    # The template may have been recognised by the path of the original's folder
    if tokenizer.chat_template != find_template(to, tokenizer.config)[0]:
        (to / "chat_template.jinja").write_text(tokenizer.chat_template)


def tensors_to_save(c: Config, weights: Weights, format: Format) -> dict[str, Tensor]:
    """The model's tensors on the CPU, by the names that SavedFolder reads."""
    tensors = {}
    for t in model_tensors(c):
        value = tensor_in(weights, t)
        if not t.is_matrix:
            tensors[f"{t.name}.weight"] = value.data.cpu()
            continue
        names = saved_matrix(t, c, format).items()
        for (name, wanted), codes in zip(names, value.tensors, strict=True):
            tensors[name] = codes.cpu().view(wanted.shapes[0])
    return tensors
