"""Meta's layout on disk (see loading/checkpoint.py): a folder with a params.json, whose tensors may be divided
among several files, consolidated.*.pth. The names of its tensors are those of names.py. The
tokenizer may be in the folder's parent."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from loading.files import Fields
from loading.layouts import Files, Folder, check_heads
from loading.names import EMBEDDING, Part
from loading.quantised import FLOATS, Wanted
from loading.reading import FileTensor
from loading.tensors import Found, Spans, Stored, misfit
from model import Config


class MetaFolder(Folder):
    tokenizer_above = True

    @staticmethod
    def is_at(files: Files) -> bool:
        of_meta = any(file.suffix == ".pth" for file in files.picked)
        return files.has("params.json") and (of_meta or not files.has("config.json"))

    def small_files(self) -> dict[str, bytes]:
        files = super().small_files()
        files.pop("config.json", None)  # whatever lies beside
        return files

    def config(self) -> Config:
        config = meta_config(Fields(self.path / "params.json"))
        if config.vocab_size >= 1:
            return config
        # Every file has all rows of the embedding
        first, *_ = self.files.weights.files
        shapes = {tensor.name: tensor.shape for tensor in self.files.header(first)[1]}
        rows, *_ = shapes.get(EMBEDDING.name) or [1]
        return replace(config, vocab_size=rows)

    def name_of(self, part: Part) -> str:
        return part.name

    def stored_part(self, part: Part, c: Config, found: Found) -> list[Stored]:
        return [sharded(part.name, part.shape(c), found)]


def meta_config(f: Fields) -> Config:
    """The configuration in a params.json. A vocab_size below 1 means that only the tokenizer knows
    it. Raises ValueError for what is not implemented."""
    f.refuse_unless("use_scaled_rope", False, None)
    f.refuse_unless("yarn", None)
    f.refuse_unless("moe", None)
    dim = f.number("dim", 1, 1 << 17)
    n_heads = f.number("n_heads", 1, 1024)
    multiple_of = f.number("multiple_of", 1, 1 << 17, 256)
    # Meta's llama/model.py: two thirds of 4 dim, times a multiplier, rounded up to a multiple
    hidden = int(f.number("ffn_dim_multiplier", 1e-3, 1e3, 1.0, float) * int(2 * 4 * dim / 3))
    hidden = multiple_of * -(-hidden // multiple_of)
    window = None
    if f.get("sliding_window") is not None:  # Mistral writes it, and hidden_dim
        window = f.number("sliding_window", 1, 1 << 24)
    n_kv_heads = f.number("n_kv_heads", 1, 1024, n_heads)
    head_dim = f.number("head_dim", 2, 1024, dim // n_heads)
    check_heads(f, n_heads, n_kv_heads, head_dim)
    return Config(
        dim=dim,
        n_layers=f.number("n_layers", 1, 1024),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        hidden_dim=f.number("hidden_dim", 1, 1 << 20, hidden),
        vocab_size=f.number("vocab_size", -1, 1 << 22, -1),
        norm_eps=f.number("norm_eps", 0, 1, 1e-5, float),
        rope_theta=f.number("rope_theta", 2, 1e12, 10000.0, float),
        sliding_window=window,
    )


# ---- tensors whose rows or columns are divided among files


def sharded(name: str, shape: tuple[int, ...], found: Found) -> Stored:
    """A tensor of floats of which each file has a part, or which each repeats."""
    shards = found.get(name, [])
    problems = ()
    axis = axis_of(shards, shape)
    if axis is None or any(shard.dtype not in FLOATS for shard in shards):
        problems = (misfit(name, shards, Wanted(FLOATS, [shape])),)

    def cut(spans: Spans) -> list[FileTensor]:
        size = shards[0].shape[axis]
        if size == shape[axis]:
            return [shards[0].cut(spans)]
        parts = []
        for i, shard in enumerate(shards):
            start = max(spans[axis].start - i * size, 0)
            stop = min(spans[axis].stop - i * size, size)
            if start < stop:
                of_shard = [*spans[:axis], range(start, stop), *spans[axis + 1 :]]
                parts.append(shard.cut(of_shard))
        return parts

    def make(tensors: list[Tensor], spans: Spans) -> Tensor:
        return torch.cat(tensors, axis)

    return Stored(
        name=name, shape=shape, files={name: shards}, cut=cut, make=make, problems=problems
    )


def axis_of(shards: list[FileTensor], shape: tuple[int, ...]) -> int | None:
    """The axis along which to join the shards; any axis if each is already the whole tensor.
    Returns None if they do not add up to the expected shape."""
    if not shards:
        return None
    first = shards[0].shape
    count = len(shards)
    if len(shape) == 1:  # every shard repeats the norms
        count = 1
    if any(tensor.shape != first for tensor in shards):
        return None
    for axis in range(len(first)):
        if shape == (*first[:axis], first[axis] * count, *first[axis + 1 :]):
            return axis
    return None
