"""Step 1 of loading (see loading/checkpoint.py): find a checkpoint. It is a folder or a file on this
machine, or a repository of the Hugging Face hub, which is downloaded to the hub's cache when it is
first used.

It needs neither torch nor, for a checkpoint on this machine, huggingface_hub."""

import fnmatch
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection
from pathlib import Path, PurePath

from loading import gguf
from loading.files import open_regular, read_json

ROOT = Path(__file__).resolve().parents[1]  # of this program
DEFAULT_MODEL = ROOT / "models" / "tales"

CONFIGURATIONS = ["config.json", "params.json"]
SMALL_FILES = [
    *CONFIGURATIONS, "generation_config.json", "tokenizer.model", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "hf_quant_config.json",
]  # fmt: skip
WEIGHTS = (  # what a folder or a repository may hold, in the order in which transformers looks
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "consolidated.*.pth",
)  # fmt: skip


def pick_weights(names: Collection[str]) -> list[str]:
    """The weights to use if a folder or a repository has several: a file, an index of shards, or
    Meta's shards. Returns an empty list if there are none."""
    for pattern in WEIGHTS:
        found = sorted(fnmatch.filter(names, pattern))
        if found:
            return found
    return []


def weights_in(folder: Path) -> list[Path]:
    """The same for a folder. Anything else has none."""
    names = [file.name for file in folder.glob("*") if file.is_file()]
    return [folder / name for name in pick_weights(names)]


def weight_map(index: Path) -> dict[str, Path]:
    """The file that an index names for each tensor. Raises OSError, ValueError."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{index} lacks the field weight_map")
    for name in set(map(str, names.values())):
        path = PurePath(name)
        outside = path.is_absolute() or ".." in path.parts
        if outside or path.suffix not in (".safetensors", ".bin"):
            raise ValueError(f"{index} names {name!r}, which is not a file in its folder")
    return {tensor: index.parent / str(name) for tensor, name in names.items()}


# ---- on this machine


def local_checkpoint(name: str) -> Path | None:
    """A checkpoint's folder or GGUF file, in the working directory or beside this program. Returns
    None if the name may be "owner/name" on the hub; if there is a folder "owner", it is a path.
    Raises OSError, ValueError."""
    path = Path(os.path.expanduser(name))  # unchanged if there is no such user
    if path.is_dir():
        return find_gguf(path) or path
    if path.is_file():
        with open_regular(path) as f:
            if path.suffix == ".gguf" or f.read(4) == b"GGUF":
                return path
    if path.exists():
        raise FileNotFoundError(
            f"{name} is a file; a model is the folder of a checkpoint, or a GGUF file"
        )
    beside = ROOT / path  # models/tales from any folder
    if beside.is_dir():
        return find_gguf(beside) or beside
    if path.suffix == ".gguf" or not re.fullmatch(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?", name):
        on_hub = "a hub model is written owner/name, or owner/name:Q4_K_M"
        raise FileNotFoundError(f"no file or folder {name} here; {on_hub}")
    if path.parent.is_dir() or beside.parent.is_dir():
        raise FileNotFoundError(f"no folder {name} here")
    return None


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that a path means: the file itself, or the only model in a folder that has no
    other weights. Returns None if there is none. Raises ValueError if the folder has several."""
    if path.is_file():
        return path
    if weights_in(path):
        return None
    later_part = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")  # of a split model
    files = sorted(file for file in path.glob("*.gguf") if "mmproj" not in file.name)
    files = [file for file in files if not later_part.search(file.stem)] or files[:1]
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{path} holds several models: take one of {names}")
    return files[0] if files else None


# ---- on the hub


def find_checkpoint(
    name: str, read_config: Callable[[Path], object], is_whole: Callable[[Path], bool]
) -> Path:
    """The path of a checkpoint, see checkpoint.find_checkpoint, which hands over what it knows of
    checkpoints: read_config raises ValueError for a model that is not supported; is_whole says
    whether everything is there that a checkpoint refers to. Raises OSError or ValueError."""
    if path := local_checkpoint(name):
        return path
    from huggingface_hub import constants, errors, is_offline_mode

    repository, _, kind = name.partition(":")
    if kind:
        wanted = [kind]
    else:
        wanted = [None, "Q4_K_M"]
        if is_offline_mode():
            wanted.append("")
    cached = None
    for gguf_kind in wanted:
        path = _cached(repository, gguf_kind)
        # Another program may have cached only some of the files
        if path and is_whole(path):
            return path
        cached = cached or path
    if cached and is_offline_mode():
        return cached  # `load` will say what is wrong with it
    try:
        return _download(repository, kind, read_config)
    except errors.GatedRepoError:
        reason = "on the hub it is gated: accept its licence on its page, and set HF_TOKEN to a token of that account"
    except errors.RepositoryNotFoundError:
        reason = f"no such repository on {constants.ENDPOINT} (a private one needs HF_TOKEN)"
    except ValueError:
        raise
    except Exception as error:  # network errors, of whichever library huggingface_hub uses
        reason = f"the download from {constants.ENDPOINT} failed ({type(error).__name__}: {error})"
    raise OSError(f"no folder {name} here, and {reason}")


def pick_gguf(names: Collection[str], kind: str) -> list[str]:
    """The files that llama.cpp would take from a repository: all parts of the model whose name says
    this kind. Without a kind, that is Q4_K_M, or else the first that can be read."""
    models = sorted(name for name in names if name.endswith(".gguf") and "mmproj" not in name)

    def of_kind(kinds: str) -> list[str]:
        pattern = re.compile(f"(?<![a-z0-9])({kinds})(_[SML])?(?![a-z0-9_])", re.IGNORECASE)
        return [name for name in models if pattern.search(name)]

    if kind:
        found = of_kind(re.escape(kind))
    else:
        readable = "|".join(t.name for t in gguf.TYPES.values())
        found = of_kind("Q4_K_M") or of_kind(readable)
    stem = lambda name: re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", name)
    return [name for name in found if stem(name) == stem(found[0])]


def _cached(name: str, gguf_kind: str | None) -> Path | None:
    """A repository's folder in the hub's cache. With gguf_kind, its GGUF file of that kind; if the
    kind is empty, of any. Returns None if it is not there."""
    from huggingface_hub import is_offline_mode, snapshot_download

    if gguf_kind is not None:
        wanted = []
    elif is_offline_mode():
        wanted = CONFIGURATIONS  # whatever is cached must do
    else:
        wanted = SMALL_FILES
    try:
        folder = Path(snapshot_download(name, allow_patterns=wanted, local_files_only=True))
    except (OSError, ValueError):
        return None
    if gguf_kind is None:
        return folder
    names = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")]
    found = pick_gguf(names, gguf_kind)
    if not found:
        return None
    return folder / found[0]


def _download(name: str, kind: str, read_config: Callable[[Path], object]) -> Path:
    """Download the files of a repository that this program reads to the hub's cache, unless they
    are there already."""
    from huggingface_hub import HfApi, snapshot_download, utils

    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    utils.logging.set_verbosity_error()
    names = [file.rfilename for file in HfApi().model_info(name).siblings]
    weights = pick_weights(names)
    from_gguf = bool(kind) or not weights
    if from_gguf:
        weights = pick_gguf(names, kind)
    if not weights:
        what = f"no GGUF file of the kind {kind}"
        if not kind:
            what = "no weights that this program reads (model.safetensors, pytorch_model.bin, GGUF)"
        raise ValueError(f"{name} holds {what}")
    files = [*weights]
    if not from_gguf:
        indices = fnmatch.filter(weights, "*.index.json")
        folder = Path(snapshot_download(name, allow_patterns=[*SMALL_FILES, *indices]))
        # A model that is not supported is refused before its weights are fetched
        if "config.json" in names:
            read_config(folder)
        files += SMALL_FILES
        for index in indices:
            shards = weight_map(folder / index).values()
            files += {str(shard.relative_to(folder)) for shard in shards}
    _check_room(name, snapshot_download(name, allow_patterns=files, dry_run=True))
    folder = Path(snapshot_download(name, allow_patterns=files))
    return folder / weights[0] if from_gguf else folder


def _check_room(name: str, planned: list) -> None:
    """Raise ValueError if the disk has no room for the files that will be downloaded."""
    from huggingface_hub import constants

    need = sum(file.file_size or 0 for file in planned if file.will_download) / 1e9
    cache = Path(constants.HF_HUB_CACHE)
    place = next(parent for parent in (cache, *cache.parents) if parent.is_dir())
    free = shutil.disk_usage(place).free / 1e9
    if need > free:
        raise ValueError(
            f"{name} takes {need:.2f} GB, but {place} has {free:.2f} GB free (see HF_HOME)"
        )
