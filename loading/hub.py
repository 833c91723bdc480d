"""Step 1 of loading (see loading/checkpoint.py): find a checkpoint. It is a folder or a file on this
machine, or a repository of the Hugging Face hub, which is downloaded to the hub's cache when it is
first used.

It needs neither torch nor, for a checkpoint on this machine, huggingface_hub."""

import fnmatch
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path, PurePath

from loading.files import open_regular, read_json

ROOT = Path(__file__).resolve().parents[1]  # of this program
DEFAULT_MODEL = ROOT / "models" / "tales"

CONFIGURATIONS = ["config.json", "params.json"]
SMALL_FILES = [
    *CONFIGURATIONS, "generation_config.json", "tokenizer.model", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt",
    "hf_quant_config.json", "quantize_config.json", "quant_config.json",
]  # fmt: skip
# Those whose absence means something: another template, or other settings
MATTER = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")
WEIGHTS = (  # what a folder or a repository may hold, in the order in which transformers looks
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "consolidated.*.pth", "gptq_model-*.safetensors",
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


class Repository:
    """A repository of the hub: what of it is in the cache, and what can be downloaded."""

    def __init__(self, name: str):
        """name: owner/name, or owner/name:KIND for one of its GGUF files."""
        self.name = name
        self.repository, _, self.kind = name.partition(":")
        self.notes: list[str] = []  # what the user should know: a line each

    @property
    def is_offline(self) -> bool:
        from huggingface_hub import is_offline_mode

        return is_offline_mode()

    def cached(self) -> Iterator[Path]:
        """Candidates in the hub's cache, a folder or a GGUF file each. Another program may have
        cached only some of the files."""
        if self.kind:
            wanted = [self.kind]
        else:
            wanted = [None, "Q4_K_M"]
            if self.is_offline:
                wanted.append("")
        for kind in wanted:
            if path := self._cached(kind):
                yield path

    def _cached(self, kind: str | None) -> Path | None:
        """The folder in the cache. With a kind, its GGUF file of that kind; if it is empty, of any.
        Returns None if it is not there."""
        from huggingface_hub import snapshot_download

        if kind is not None:
            wanted = []
        elif self.is_offline:
            wanted = CONFIGURATIONS  # whatever is cached must do
        else:
            wanted = SMALL_FILES
        try:
            options = dict(allow_patterns=wanted, local_files_only=True)
            folder = Path(snapshot_download(self.repository, **options))
        except (OSError, ValueError):
            return None
        if kind is None:
            self._ask_for_small_files(folder)
            return folder
        names = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")]
        found = pick_gguf(names, kind)
        return folder / found[0] if found else None

    def _ask_for_small_files(self, folder: Path) -> None:
        """What the cache lacks may be in the repository, if another program has cached some files: ask
        for it, once."""
        from huggingface_hub import snapshot_download

        if not self._is_listed(folder) and not self.is_offline:
            options = dict(revision=folder.name, allow_patterns=SMALL_FILES)
            with suppress(Exception):  # without a network what is there must do
                snapshot_download(self.repository, **options)
        lacking = [name for name in MATTER if not (folder / name).is_file()]
        if lacking and not self._is_listed(folder):
            self.notes.append(
                f"{self.repository}: not in the cache, and it is not known whether the repository"
                f" has it: {', '.join(lacking)}"
            )

    def _is_listed(self, folder: Path) -> bool:
        """Whether the cache knows all files of a snapshot."""
        from huggingface_hub import errors, get_cached_repo_tree

        try:
            get_cached_repo_tree(self.repository, revision=folder.name)
        except errors.CachedRepoTreeNotFoundError:
            return False
        return True

    @cached_property
    def names(self) -> list[str]:
        """Those of its files on the hub."""
        from huggingface_hub import HfApi, utils

        if not sys.stderr.isatty():
            utils.disable_progress_bars()
        utils.logging.set_verbosity_error()
        return [file.rfilename for file in HfApi().model_info(self.repository).siblings]

    @cached_property
    def weights(self) -> list[str]:
        """The weights, an index or a GGUF file that will be downloaded. Raises ValueError."""
        weights = [] if self.kind else pick_weights(self.names)
        weights = weights or pick_gguf(self.names, self.kind)
        if not weights:
            what = f"no GGUF file of kind {self.kind}"
            if not self.kind:
                what = "no weights that this program reads (model.safetensors, pytorch_model.bin, GGUF)"
            raise ValueError(f"{self.repository} holds {what}")
        return weights

    @property
    def is_gguf(self) -> bool:
        return self.weights[0].endswith(".gguf")

    def download_small(self) -> Path:
        """Download everything but the weights, unless it is there already. Returns the folder."""
        from huggingface_hub import snapshot_download

        indices = fnmatch.filter(self.weights, "*.index.json")
        return Path(snapshot_download(self.repository, allow_patterns=[*SMALL_FILES, *indices]))

    def download(self) -> Path:
        """Download the files that this program reads, unless they are there already. Returns the
        folder or the GGUF file."""
        from huggingface_hub import snapshot_download

        files = [*self.weights]
        if not self.is_gguf:
            folder = self.download_small()
            files += SMALL_FILES
            for index in fnmatch.filter(self.weights, "*.index.json"):
                shards = weight_map(folder / index).values()
                files += {str(shard.relative_to(folder)) for shard in shards}
        options = dict(allow_patterns=files)
        _check_room(self.repository, snapshot_download(self.repository, **options, dry_run=True))
        folder = Path(snapshot_download(self.repository, **options))
        return folder / self.weights[0] if self.is_gguf else folder

    @contextmanager
    def plain_errors(self) -> Iterator[None]:
        """Say what is wrong with the repository or the network in one line: an OSError."""
        from huggingface_hub import constants, errors

        try:
            yield
            return
        except errors.GatedRepoError:
            reason = (
                "on the hub it is gated: accept its licence on its page, and set HF_TOKEN to a token"
                " of that account"
            )
        except json.JSONDecodeError:
            reason = (
                f"{constants.ENDPOINT} answers with a page instead of data: log in to this network,"
                " or set HF_ENDPOINT to a hub"
            )
        except errors.RepositoryNotFoundError:
            reason = f"no such repository on {constants.ENDPOINT} (a private one needs HF_TOKEN)"
        except ValueError:
            raise
        except Exception as error:  # network errors, of whichever library huggingface_hub uses
            if isinstance(error, errors.LocalEntryNotFoundError):
                error = error.__cause__ or error  # which says what failed
            reason = (
                f"the download from {constants.ENDPOINT} failed ({type(error).__name__}: {error})"
            )
        raise OSError(f"no folder {self.name} here, and {reason}")


# Kinds of matrices in the names of GGUF files, the best first where none is asked for, as patterns
PREFERRED = ("Q4_K_M", r"I?Q4_\w+", r"Q5_\w+", "Q8_0", r"\w+")
UNREADABLE = re.compile(r"IQ[123]_|TQ[12]_|MXFP4|NVFP4", re.IGNORECASE)


def pick_gguf(names: Collection[str], kind: str) -> list[str]:
    """The files that llama.cpp would take from a repository: all parts of the model whose name says
    this kind; without a kind, of the best that can be read."""
    beside = re.compile("mmproj|imatrix")
    models = sorted(name for name in names if name.endswith(".gguf") and not beside.search(name))

    def of_kind(kinds: str) -> list[str]:
        pattern = re.compile(f"(?<![a-z0-9])({kinds})(_[SML])?(?![a-z0-9_])", re.IGNORECASE)
        return [name for name in models if pattern.search(name)]

    if kind:
        found = of_kind(re.escape(kind))
    else:
        models = [name for name in models if not UNREADABLE.search(name)]
        found = next(filter(None, map(of_kind, PREFERRED)), [])
    stem = lambda name: re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", name)
    return [name for name in found if stem(name) == stem(found[0])]


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
