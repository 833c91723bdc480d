"""Heads on disk, in EAGLE's layout and in that of vllm-project/speculators: which folder holds one, whether
it fits a model, and its weights. Nothing in a file is trusted: names, shapes, types and values are
checked, and what is not supported is refused by name.

A head's layer is a model's, except that its attention reads a token's embedding and a state side by
side, with a norm for each. So it is read and checked as a model's layer is: loading/layouts.py."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from cards.cpu import in_cpu_layout, storage_dtype
from formats import Matrix
from loading import hub
from loading.files import Fields, one_line_errors
from loading.hugging_face import NAMES, config_of
from loading.layouts import NOT_NEEDED, Files, joined, misfits
from loading.names import Part, layer_tensors, layer_weights
from loading.place import FORMATS, free_memory
from loading.quantised import Wanted
from loading.reading import read
from loading.tensors import Found, Stored, files_for, flaw, floats, read_rows
from model import Config, LayerWeights, Llama

# ---- a head


@dataclass
class HeadWeights:
    """A loaded head. C and V are the head's; the model's hidden states are W wide."""

    config: Config  # of its layer
    embedding: Tensor  # [the model's V, C]
    norms: Tensor  # [2, C]: of the embedding, of the state
    fc: Matrix  # [C, layers W]
    layer: LayerWeights  # wqkv [(H + 2 KH) D, 2 C]
    norm: Tensor  # [C]
    output: Matrix  # [V, C]
    ids: Tensor  # int64 [V]: the model's ids of the head's
    layers: tuple[int, ...]  # of the model: the states that enter them
    norm_before_residual: bool = False  # the residual is the normed state
    norm_output: bool = False  # so is what the head goes on from


# ---- on disk

# What a configuration may say, also in its eagle_config; see Fields.refuse_unless
MAY_SAY = {
    "speculators_model_type": (None, "eagle3"),
    "use_aux_hidden_state": (True, None),
    "norm_before_fc": (False, None),
    "fc_norm": (False, None),
    "parallel_drafting": (False, None),
    "norm_before_residual": (False, True, None),
    "norm_output": (False, True, None),
}
# What a head's Config has where models may have something else
ONLY = {
    "n_layers": 1, "n_experts": 0, "qkv_bias": False, "w13_bias": False, "sliding_window": None,
    "factors": (), "nope_layers": (),
}  # fmt: skip
# The tensors of the layer begin with this in EAGLE's layout and in speculators'
OF_LAYER = re.compile(r"^(midlayer|layers\.0)\.")
IDS = (torch.int32, torch.int64)


def is_head(folder: Path) -> bool:
    """Whether a folder holds a head, by its configuration."""
    f = Files(folder).fields("config.json")
    return "draft_vocab_size" in f or "speculators_model_type" in f


@one_line_errors()
def find_head(name: str) -> Path | None:
    """The folder of a head: a path, or a repository of the hub, which is downloaded if it is not in the
    hub's cache. Returns None for anything else. Raises OSError or ValueError."""
    if path := hub.local_checkpoint(name):
        return path if is_head(path) else None
    repository = hub.Repository(name)
    for path in repository.cached():
        if not is_head(path):
            return None
        if Files(path).has_weights():
            return path
    with repository.plain_errors():
        if "config.json" not in repository.names or not is_head(repository.download_small()):
            return None
        return repository.download()


class HeadFile:
    """A head on disk, of which only configuration and headers have been read, and the ids that it
    knows."""

    @one_line_errors()
    def __init__(self, folder: Path, target: Path, c: Config):
        """target: the model's path; c: its configuration. Raises OSError, and ValueError for what is not
        supported, and for a head of another model."""
        self.folder = folder
        files = Files(folder)
        f = files.fields("config.json")
        f = Fields(f.file, f | f.sub("eagle_config"))
        for name, allowed in MAY_SAY.items():
            f.refuse_unless(name, *allowed)
        self.said = {name: bool(f.get(name)) for name in ("norm_before_residual", "norm_output")}
        ids = f.get("eagle_aux_hidden_state_layer_ids")
        self.layers = ids or [2, c.n_layers // 2, c.n_layers - 3]
        layer = f.sub("transformer_layer_config") or f
        own = config_of(layer, Fields(f.file, {}), [])
        for name, only in ONLY.items():
            if getattr(own, name) != only:
                what = f"{name} is {getattr(own, name)}; heads are supported where it is {only}"
                raise ValueError(f"{f.file}: {what}")
        if misfit := self.misfit(f, own, target, c):
            raise ValueError(f"the head {folder} does not fit {target}: {misfit}")
        self.config = replace(own, vocab_size=f.number("draft_vocab_size", 1, 1 << 22))
        self.find(files, c)

    def misfit(self, f: Fields, own: Config, target: Path, c: Config) -> str:
        """Why it is no head for this model; empty if it is one."""
        width = f.number("target_hidden_size", 1, 1 << 17, own.dim)
        verifier = f.sub("speculators_config").sub("verifier").get("architectures")
        family = Files(target).fields("config.json").get("architectures")
        for name, said, expected in (
            ("vocab_size", own.vocab_size, c.vocab_size),
            ("hidden_size", width, c.dim),
            ("architectures", verifier or family, family or verifier),
        ):
            if said != expected:
                return f"{name} is {said}, not {expected}"
        layers = self.layers
        if not isinstance(layers, list) or not all(i in range(c.n_layers) for i in layers):
            return f"it needs the layers {layers} of {c.n_layers}"
        return ""

    def find(self, files: Files, c: Config) -> None:
        """Note its tensors and its ids. Raises ValueError if a tensor is missing, unexpected, or of
        another shape or type."""
        own = self.config
        found: Found = {}
        for file in files.weights.files:
            for tensor in files.header(file)[1]:
                if not NOT_NEEDED.search(tensor.name) and tensor.name != "t2d":  # which repeats d2t
                    found.setdefault(OF_LAYER.sub("", tensor.name), []).append(tensor)
        side_by_side = replace(own, dim=2 * own.dim)

        def stored_part(part: Part) -> list[Stored]:
            shape = part.shape(side_by_side if part.field == "wqkv" else own)
            head_dim = own.head_dim if part.rotated else None
            return [floats(f"{NAMES[part.stem]}.weight", shape, found, head_dim)]

        self.tensors = {t.field: joined(t, stored_part) for t in layer_tensors(own)}
        others = {
            "hidden_norm": ("hidden_norm", (own.dim,)),
            "fc": ("fc", (own.dim, len(self.layers) * c.dim)),
            "norm": ("norm", (own.dim,)),
            "output": ("lm_head", (own.vocab_size, own.dim)),
        }
        if "embed_tokens.weight" in found or own.dim != c.dim:
            others["embedding"] = "embed_tokens", (c.vocab_size, own.dim)
        for field, (name, shape) in others.items():
            self.tensors[field] = [floats(f"{name}.weight", shape, found)]
        offsets = found.pop("d2t", [])
        problems = misfits(self.tensors.values(), found)
        if offsets or own.vocab_size != c.vocab_size:
            wanted = {"d2t": Wanted(IDS, [(own.vocab_size,)])}
            problems += files_for(wanted, {"d2t": offsets}).problems
        if problems:
            raise ValueError(f"the head {self.folder}: {problems[0]}")
        self.ids = torch.arange(own.vocab_size)
        for values in read(offsets):
            self.ids += values
        known = self.ids.unique()
        if len(known) < len(self.ids) or known[0] < 0 or known[-1] >= c.vocab_size:
            what = f"d2t has ids twice, or beyond {c.vocab_size - 1}"
            raise ValueError(f"the head {self.folder}: {what}")

    @one_line_errors()
    def load(self, model: Llama) -> HeadWeights:
        """Its weights for a model, matrices in the model's format. Raises OSError, ValueError, and
        MemoryError."""
        elements = sum(math.prod(p.shape) for parts in self.tensors.values() for p in parts)
        need = elements * model.dtype.itemsize
        free = free_memory(model.device)
        if need > free:
            sizes = f"{need / 1e9:.2f} GB, but {model.device} has {free / 1e9:.2f} GB free"
            raise MemoryError(f"the head {self.folder} takes {sizes}")
        storage = storage_dtype(model.backend, model.dtype, model.device)
        # Where others have quantised the model, the head stays in 16 bits
        format = FORMATS.get(getattr(model.weights.layers[0].wqkv.format, "name", ""))

        def tensor(name: str, dtype: torch.dtype = model.dtype) -> Tensor:
            parts = self.tensors[name]
            rows = sum(part.rows for part in parts)
            shape = (rows, *parts[0].shape[1:])
            made = torch.empty(shape, dtype=dtype, device=model.device)
            for place, values in read_rows(parts, model.device, [slice(0, rows)]):
                made[place] = values
            if not made.isfinite().all():
                raise ValueError(f"the head {self.folder}: {flaw(parts, dtype)}")
            return made

        def matrix(name: str) -> Matrix:
            made = Matrix(tensor(name, storage))
            if format and made.columns % format.group == 0:
                own = format.for_matrix(name)
                made = Matrix(own.encode(made.data), own)
            return in_cpu_layout(made, model.backend, model.dtype)

        layer = {
            t.field: matrix(t.field) if t.is_matrix else tensor(t.field)
            for t in layer_tensors(self.config)
        }
        norms = torch.stack((layer["attention_norm"], tensor("hidden_norm")))
        has_embedding = "embedding" in self.tensors
        return HeadWeights(
            config=self.config,
            embedding=tensor("embedding") if has_embedding else model.weights.embedding,
            norms=norms,
            fc=matrix("fc"),
            layer=layer_weights(layer | {"attention_norm": None}),
            norm=tensor("norm"),
            output=matrix("output"),
            ids=self.ids.to(model.device),
            layers=tuple(self.layers),
            **self.said,
        )
