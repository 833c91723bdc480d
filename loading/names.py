"""Step 4 of loading (see loading/checkpoint.py): the tensors of a model, the parts that make them up, their
shapes, and how they are divided over ranks."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from formats import Format, Matrix
from model import Config, LayerWeights, Weights


class Kind(Enum):
    """What a part is to the model."""

    VECTOR = "a norm or a bias"
    TABLE = "the embedding, whose rows are looked up"
    PLAIN = "a matrix that stays in 16 or 32 bits: a router"
    MATRIX = "a matrix for which a format may be chosen"


@dataclass(frozen=True)
class Part:
    """A tensor as checkpoints store it, or the stack of all experts' matrices, one below the other.
    One or several make up a tensor of the model. The table below has a row for each."""

    # Of LayerWeights or Weights, or a bias; parts of one field are joined in the table's order
    field: str
    kind: Kind
    # Its shape, in names of Config's sizes; ranks share those in CUT. A stack has three
    dims: tuple[str, ...]
    # Our own name for it, which is Meta's; each layout has a table of what it calls this
    stem: str
    bias: bool = False  # of that matrix, not the matrix itself
    rotated: bool = False  # RoPE rotates its rows; layouts store them in different orders
    in_turn: int = 1  # how many parts take turns, row by row; with 1, one is below the other
    layer: int | None = None  # the layer it belongs to, if any

    @property
    def name(self) -> str:
        """Our name of it in a whole model, such as layers.3.attention.wq.weight."""
        return self.name_in("layers", self.stem)

    def name_in(self, layers: str, stem: str) -> str:
        """Its name where this is what the layers and the part itself are called."""
        name = f"{stem}.{'bias' if self.bias else 'weight'}"
        if self.layer is None:
            return name
        return f"{layers}.{self.layer}.{name}"

    @property
    def of_experts(self) -> bool:
        """Whether it is a stack."""
        return len(self.dims) == 3

    @property
    def row_dim(self) -> str:
        """The size that counts its rows; in a stack, those of one expert."""
        return self.dims[-2:][0]

    def shape(self, c: Config) -> tuple[int, ...]:
        return tuple(getattr(c, dim) for dim in self.dims)

    def joined_shape(self, c: Config) -> tuple[int, ...]:
        """Its shape as part of the model's tensor."""
        shape = self.shape(c)
        if self.of_experts:
            count, rows, columns = shape
            return count * rows, columns
        return shape


# fmt: off
VECTOR, TABLE, PLAIN, MATRIX = Kind
LAYER = (
    Part("attention_norm", VECTOR, ("dim",), "attention_norm"),
    Part("wqkv", MATRIX, ("q_dim", "dim"), "attention.wq", rotated=True),
    Part("wqkv", MATRIX, ("kv_dim", "dim"), "attention.wk", rotated=True),
    Part("wqkv", MATRIX, ("kv_dim", "dim"), "attention.wv"),
    Part("qkv_bias", VECTOR, ("q_dim",), "attention.wq", bias=True, rotated=True),
    Part("qkv_bias", VECTOR, ("kv_dim",), "attention.wk", bias=True, rotated=True),
    Part("qkv_bias", VECTOR, ("kv_dim",), "attention.wv", bias=True),
    Part("qk_norm", VECTOR, ("head_dim",), "attention.q_norm", rotated=True),
    Part("qk_norm", VECTOR, ("head_dim",), "attention.k_norm", rotated=True),
    Part("wo", MATRIX, ("dim", "q_dim"), "attention.wo"),
    Part("wo_bias", VECTOR, ("dim",), "attention.wo", bias=True),
    Part("ffn_norm", VECTOR, ("dim",), "ffn_norm"),
)
FEED_FORWARD = (
    Part("w13", MATRIX, ("hidden_dim", "dim"), "feed_forward.w1", in_turn=2),
    Part("w13", MATRIX, ("hidden_dim", "dim"), "feed_forward.w3", in_turn=2),
    Part("w13_bias", VECTOR, ("hidden_dim",), "feed_forward.w1", bias=True, in_turn=2),
    Part("w13_bias", VECTOR, ("hidden_dim",), "feed_forward.w3", bias=True, in_turn=2),
    Part("w2", MATRIX, ("dim", "hidden_dim"), "feed_forward.w2"),
    Part("w2_bias", VECTOR, ("dim",), "feed_forward.w2", bias=True),
)
# Instead of it, in a model with experts. Meta has none, so these names are only our own
EXPERTS = (
    Part("router", PLAIN, ("n_experts", "dim"), "feed_forward.gate"),
    Part("w13", MATRIX, ("n_experts", "hidden_dim", "dim"), "feed_forward.experts.w1", in_turn=2),
    Part("w13", MATRIX, ("n_experts", "hidden_dim", "dim"), "feed_forward.experts.w3", in_turn=2),
    Part("w2", MATRIX, ("n_experts", "dim", "hidden_dim"), "feed_forward.experts.w2"),
)
EMBEDDING = Part("embedding", TABLE, ("vocab_size", "dim"), "tok_embeddings")
NORM = Part("norm", VECTOR, ("dim",), "norm")
OUTPUT = Part("output", MATRIX, ("output_rows", "dim"), "output")
# fmt: on
PARTS = {part.stem: part for part in (*LAYER, *FEED_FORWARD, *EXPERTS) if not part.bias}
# Biases, and the matrices they belong to: Matrix.bias. A flag of Config has the same name
BIASES = {"qkv_bias": "wqkv", "wo_bias": "wo", "w13_bias": "w13", "w2_bias": "w2"}
TIED_OUTPUT = replace(EMBEDDING, field="output", kind=MATRIX, dims=OUTPUT.dims)
CUT = {  # sizes of which each rank has a share, and what is divided among the ranks
    "q_dim": "n_heads",
    "kv_dim": "n_kv_heads",
    "hidden_dim": "hidden_dim",
    "output_rows": "vocab_size",
}


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of the model: a part, or several joined. Either one is below the other, or their
    rows take turns, as those of w1 and w3 do, in stacks within each expert."""

    name: str  # as --save writes it, such as layers.3.wqkv
    parts: tuple[Part, ...]

    @property
    def field(self) -> str:
        return self.parts[0].field

    @property
    def kind(self) -> Kind:
        return self.parts[0].kind

    @property
    def layer(self) -> int | None:
        return self.parts[0].layer

    @property
    def is_matrix(self) -> bool:
        """Whether a format may be chosen for it."""
        return self.kind is Kind.MATRIX

    @property
    def of_experts(self) -> bool:
        """Whether its parts are stacks."""
        return self.parts[0].of_experts

    def shape(self, c: Config) -> tuple[int, ...]:
        rows = sum(part.joined_shape(c)[0] for part in self.parts)
        return rows, *self.parts[0].joined_shape(c)[1:]

    def stack_shape(self, c: Config) -> tuple[int, ...]:
        """The shape of a matrix, or of the stack that it is."""
        rows, columns = self.shape(c)
        if self.of_experts:
            return c.n_experts, rows // c.n_experts, columns
        return rows, columns

    def rows(self, c: Config, share: Callable[[str], slice]) -> list[slice]:
        """The rows that a rank keeps: a slice for each part, or for each group of parts that take
        turns; in a stack, of each matrix. share: this rank's share of one of the sizes of c, the
        whole model."""
        turns = self.parts[0].in_turn
        found = []
        start = 0
        for part in self.parts[::turns]:
            taken = share(part.row_dim)
            found.append(slice(start + turns * taken.start, start + turns * taken.stop))
            start += turns * getattr(c, part.row_dim)
        return found


def layer_tensors(c: Config, layer: int = 0) -> list[ModelTensor]:
    """The tensors of a layer. Of those that only some models have, such as qkv_bias, a flag of that
    name in the config says whether they are there."""
    rows = [*LAYER, *FEED_FORWARD]
    if c.n_experts:
        rows = [*LAYER, *EXPERTS]
    rows = [replace(row, layer=layer) for row in rows if getattr(c, row.field, True)]
    fields = itertools.groupby(rows, lambda row: row.field)
    return [ModelTensor(f"layers.{layer}.{field}", tuple(parts)) for field, parts in fields]


def model_tensors(c: Config) -> tuple[ModelTensor, ...]:
    """The tensors of a model, always in the same order."""
    layers = [tensor for layer in range(c.n_layers) for tensor in layer_tensors(c, layer)]
    output = TIED_OUTPUT if c.tie_embeddings else OUTPUT
    embedding = ModelTensor("tok_embeddings", (EMBEDDING,))
    return embedding, *layers, ModelTensor("norm", (NORM,)), ModelTensor("output", (output,))


def layer_weights(made: dict[str, Tensor | Matrix]) -> LayerWeights:
    """The weights of a layer, from its tensors by their fields."""
    for bias, matrix in BIASES.items():
        if bias in made:
            made[matrix].bias = made.pop(bias)
    if "qk_norm" in made:
        made["qk_norm"] = made["qk_norm"].view(2, -1)  # of q, and of k
    return LayerWeights(**made)


def tensor_in(weights: Weights, t: ModelTensor) -> Tensor | Matrix:
    """What a model has for one of its tensors."""
    if t.layer is None:
        return getattr(weights, t.field)
    layer = weights.layers[t.layer]
    if t.field in BIASES:
        return getattr(layer, BIASES[t.field]).bias
    return getattr(layer, t.field)


def model_parts(c: Config) -> dict[str, Part]:
    """The parts of a model by our names. The embedding of a tied model appears once."""
    return {part.name: part for tensor in model_tensors(c) for part in tensor.parts}


def matrix_shapes(c: Config) -> dict[str, tuple[int, int]]:
    """The shapes [N, K] of the matrices for which a format may be chosen."""
    return {t.name: t.shape(c) for t in model_tensors(c) if t.is_matrix}


# The formats of a model's matrices by their names
Formats = dict[str, Format]


def formats_of(c: Config, format: Format | None) -> Formats:
    """The formats of a model's matrices if `format` is chosen for it. That may take another format
    for some."""
    if format is None:
        return {}
    return {name: format.for_matrix(name) for name in matrix_shapes(c)}


def weight_bytes(c: Config, dtype: torch.dtype, formats: Formats) -> int:
    """Bytes of a model's weights. A tied output matrix without a format is the embedding itself,
    and takes none."""
    total = 0
    for t in model_tensors(c):
        if t.name in formats:
            total += formats[t.name].nbytes(*t.shape(c))
        elif t.name != "output" or not c.tie_embeddings:
            total += dtype.itemsize * math.prod(t.shape(c))
    return total


def largest_read(c: Config) -> int:
    """Elements of the largest matrix that is read to be encoded. Whole rows are read, even if a
    rank keeps only some of their columns."""
    sizes = []
    for t in model_tensors(c):
        if t.is_matrix:
            *_, columns = t.parts[0].dims
            sizes.append(math.prod(t.shape(c)))
            if columns in CUT:
                sizes[-1] *= c.ranks
    return max(sizes)
