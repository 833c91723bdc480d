"""Heads on disk, in EAGLE's layout and in that of vllm-project/speculators: which folder holds one, whether
it fits a model, and its weights. Nothing in a file is trusted: names, shapes, types and values are
checked, and what is not supported is refused by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from cards.cpu import in_cpu_layout, storage_dtype
from formats import Matrix
from kernels import FORMATS
from loading import hub
from loading.files import Fields, one_line_errors
from loading.hugging_face import config_of
from loading.layouts import Files
from loading.place import free_memory
from loading.reading import FileTensor, read
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

EAGLE, SPECULATORS = "midlayer.", "layers.0."  # what the names of the layer's tensors begin with
FLOATS, IDS = (torch.float16, torch.bfloat16, torch.float32), (torch.int32, torch.int64)
NOT_NEEDED = ("t2d", "rotary_emb.inv_freq")  # they repeat d2t, and the configuration


def is_head(folder: Path) -> bool:
    """Whether a folder holds a head, by its configuration."""
    file = folder / "config.json"
    if not file.is_file():
        return False
    f = Fields(file)
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
        if hub.weights_in(path):
            return path
    with repository.plain_errors():
        if "config.json" not in repository.names or not is_head(repository.download_small()):
            return None
        return repository.download()


class HeadFile:
    """A head on disk, of which only configuration and headers have been read."""

    @one_line_errors()
    def __init__(self, folder: Path, target: Path, c: Config):
        """target: the model's path; c: its configuration. Raises OSError, and ValueError for what is not
        supported, and for a head of another model."""
        self.folder = folder
        files = Files(folder)
        f = files.fields("config.json")
        eagle = f.sub("eagle_config")
        for fields in (f, eagle):
            fields.refuse_unless("speculators_model_type", None, "eagle3")
            fields.refuse_unless("use_aux_hidden_state", True, None)
            for name in ("norm_before_fc", "fc_norm", "parallel_drafting"):
                fields.refuse_unless(name, False, None)
        self.norm_before_residual = bool(f.get("norm_before_residual"))
        self.norm_output = bool(f.get("norm_output"))
        self.vocab_size = f.number("draft_vocab_size", 1, 1 << 22)
        layer = f
        if "speculators_model_type" in f:
            layer = f.sub("transformer_layer_config")
        self.config = config_of(layer, Fields(f.file, {}), [])
        for name, least in (("n_layers", 1), ("n_experts", 0), ("qkv_bias", 0), ("w13_bias", 0)):
            if getattr(self.config, name) > least:
                what = f"a head of one Llama layer has {name} {least}"
                raise ValueError(f"{f.file}: {name} is {getattr(self.config, name)}; {what}")
        ids = f.get("eagle_aux_hidden_state_layer_ids")
        ids = ids or eagle.get("eagle_aux_hidden_state_layer_ids")
        self.layers = ids or [2, c.n_layers // 2, c.n_layers - 3]
        self.check(target, c, f)
        self.tensors = self.find(c, files)

    def check(self, target: Path, c: Config, f: Fields) -> None:
        """Raise ValueError for a head of another model."""
        width = f.number("target_hidden_size", 1, 1 << 17, self.config.dim)
        verifier = f.sub("speculators_config").sub("verifier").get("architectures")
        own = target / "config.json"
        family = Fields(own).get("architectures") if own.is_file() else None
        own_size = self.config.vocab_size
        layers = self.layers
        whole = isinstance(layers, list) and all(type(i) is int for i in layers)
        misfit = ""
        if own_size != c.vocab_size:
            misfit = f"vocab_size is {own_size}, not {c.vocab_size}"
        elif width != c.dim:
            misfit = f"hidden_size is {width}, not {c.dim}"
        elif verifier and family and verifier != family:
            misfit = f"it is for {verifier}, not {family}"
        elif not whole or not all(0 <= i < c.n_layers for i in layers):
            misfit = f"it needs the layers {layers} of {c.n_layers}"
        if misfit:
            raise ValueError(f"the head {self.folder} does not fit {target}: {misfit}")

    def shapes(self, c: Config) -> dict[str, tuple[int, ...]]:
        """The names of the tensors of its layer and their shapes, then of the others."""
        own = self.config
        C, F, D = own.dim, own.hidden_dim, own.head_dim
        shapes = {
            "self_attn.q_proj": (own.q_dim, 2 * C),
            "self_attn.k_proj": (own.kv_dim, 2 * C),
            "self_attn.v_proj": (own.kv_dim, 2 * C),
            "self_attn.o_proj": (C, own.q_dim),
            "mlp.gate_proj": (F, C),
            "mlp.up_proj": (F, C),
            "mlp.down_proj": (C, F),
            "input_layernorm": (C,),
            "hidden_norm": (C,),
            "post_attention_layernorm": (C,),
            "fc": (C, len(self.layers) * c.dim),
            "norm": (C,),
            "lm_head": (self.vocab_size, C),
        }
        if own.qk_norm:
            shapes |= {"self_attn.q_norm": (D,), "self_attn.k_norm": (D,)}
        return shapes

    def find(self, c: Config, files: Files) -> dict[str, FileTensor]:
        """Its tensors in files, by their names without `midlayer.` and `.weight`. Raises ValueError if one
        is missing, unexpected, or of another shape or type."""
        found = {}
        for tensor in chain.from_iterable(files.header(file)[1] for file in files.weights.files):
            name = tensor.name.removesuffix(".weight")
            found[name.removeprefix(EAGLE).removeprefix(SPECULATORS)] = tensor
        shapes = self.shapes(c)
        if "embed_tokens" in found or self.config.dim != c.dim:
            shapes["embed_tokens"] = (c.vocab_size, self.config.dim)
        if "d2t" in found or self.vocab_size != c.vocab_size:
            shapes["d2t"] = (self.vocab_size,)
        problems = [f"{name} is missing" for name in shapes if name not in found]
        for name, tensor in found.items():
            types = IDS if name == "d2t" else FLOATS
            if name in NOT_NEEDED:
                continue
            if name not in shapes:
                problems.append(f"{tensor.name} is not supported")
            elif tensor.shape != shapes[name] or tensor.dtype not in types:
                shape = f"{[*tensor.shape]} in {tensor.dtype}, not {[*shapes[name]]}"
                problems.append(f"{tensor.name} is {shape}")
        if problems:
            raise ValueError(f"the head {self.folder}: {problems[0]}")
        return {name: found[name] for name in shapes}

    @one_line_errors()
    def load(self, model: Llama) -> HeadWeights:
        """Its weights for a model, matrices in the model's format. Raises OSError, ValueError, and
        MemoryError."""
        need = sum(math.prod(t.shape) for t in self.tensors.values()) * model.dtype.itemsize
        free = free_memory(model.device)
        if need > free:
            sizes = f"{need / 1e9:.2f} GB, but {model.device} has {free / 1e9:.2f} GB free"
            raise MemoryError(f"the head {self.folder} takes {sizes}")
        storage = storage_dtype(model.backend, model.dtype, model.device)
        own = self.config
        # Where others have quantised the model, the head stays in 16 bits
        format = FORMATS.get(getattr(model.weights.layers[0].wqkv.format, "name", ""))

        def tensor(name: str, dtype: torch.dtype = model.dtype) -> Tensor:
            (values,) = read([self.tensors[name]])
            values = values.to(model.device, dtype)
            if not values.isfinite().all():
                raise ValueError(f"the head {self.folder}: {name} has NaN or inf")
            return values

        def matrix(*names: str, together: bool = False) -> Matrix:
            """together: their rows alternate."""
            parts = [tensor(name, storage) for name in names]
            rows = torch.stack(parts, 1).flatten(0, 1) if together else torch.cat(parts)
            return stored(rows)

        def stored(rows: Tensor, name: str = "") -> Matrix:
            if format and rows.shape[1] % format.group == 0:
                own_format = format.for_matrix(name)
                return Matrix(own_format.encode(rows), own_format)
            return in_cpu_layout(Matrix(rows), model.backend, model.dtype)

        def in_pairs(rows: Tensor) -> Tensor:
            """RoPE rotates neighbours, see kernels.py."""
            return rows.unflatten(0, (-1, 2, own.head_dim // 2)).transpose(1, 2).flatten(0, 2)

        q, k, v = (tensor(f"self_attn.{part}_proj", storage) for part in "qkv")
        norms = None
        if own.qk_norm:
            norms = torch.stack([in_pairs(tensor(f"self_attn.{part}_norm")) for part in "qk"])
        layer = LayerWeights(
            attention_norm=None,
            wqkv=stored(torch.cat((in_pairs(q), in_pairs(k), v))),
            wo=matrix("self_attn.o_proj"),
            ffn_norm=tensor("post_attention_layernorm"),
            w13=matrix("mlp.gate_proj", "mlp.up_proj", together=True),
            w2=matrix("mlp.down_proj"),
            qk_norm=norms,
        )
        ids = torch.arange(self.vocab_size)
        if "d2t" in self.tensors:
            (offsets,) = read([self.tensors["d2t"]])
            ids += offsets
        V = model.config.vocab_size
        if not ((ids >= 0) & (ids < V)).all() or len(ids.unique()) < len(ids):
            raise ValueError(f"the head {self.folder}: d2t has ids twice, or beyond {V - 1}")
        embedding = model.weights.embedding
        if "embed_tokens" in self.tensors:
            embedding = tensor("embed_tokens")
        return HeadWeights(
            config=replace(own, vocab_size=self.vocab_size),
            embedding=embedding,
            norms=torch.stack((tensor("input_layernorm"), tensor("hidden_norm"))),
            fc=matrix("fc"),
            layer=layer,
            norm=tensor("norm"),
            output=stored(tensor("lm_head", storage), "output"),
            ids=ids.to(model.device),
            layers=tuple(self.layers),
            norm_before_residual=self.norm_before_residual,
            norm_output=self.norm_output,
        )
