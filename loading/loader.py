"""Step 7 of loading (see loading/checkpoint.py): the tensors of a checkpoint are copied to the device, each
in floats, encoded, or as others have quantised it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from cards.cpu import in_cpu_layout
from formats import Format, Matrix, Tensors
from loading.names import (
    CUT,
    Kind,
    ModelTensor,
    largest_read,
    layer_weights,
    matrix_shapes,
    model_tensors,
    weight_bytes,
)
from loading.place import Place
from loading.tensors import ALL, Rows, columns_in, flaw, read_rows, write
from model import LayerWeights, Llama, Weights
from products import fit_norm
from ranks.processes import Ranks, share
from settings import Options

if TYPE_CHECKING:
    from loading.checkpoint import Checkpoint
    from ranks.exchange import Exchange


def llama_of(weights: Weights, place: Place, options: Options, ranks: Ranks, **more) -> Llama:
    """The model of these weights, once they are prepared for its ops and its ranks. more: what it
    knows of its checkpoint."""
    return Llama(
        config=place.config,
        weights=weights,
        backend=place.backend,
        device=place.device,
        dtype=place.dtype,
        ctx_size=place.ctx_size,
        kv_fp8=options.kv_fp8,
        accumulate=options.accumulate,
        ranks=ranks,
        exchange=prepare(weights, place, ranks),
        **more,
    )


@torch.inference_mode()
def prepare(w: Weights, place: Place, ranks: Ranks) -> Exchange | None:
    """Change weights so that the ops can use them as they are. Returns what ranks exchange their sums
    through, if they have it."""
    if place.backend == "triton":
        for layer in w.layers:
            fit_norm(layer.attention_norm, layer.wqkv)
            if layer.router is None:  # experts multiply what is already normed
                fit_norm(layer.ffn_norm, layer.w13)
        fit_norm(w.norm, w.output)
    if ranks.size == 1:
        return None
    from ranks.exchange import make_exchange

    summed = [m for layer in w.layers for m in (layer.wo, layer.w2)]
    if ranks.rank > 0:  # rank 0 adds their biases, as it does the residual
        for m in summed:
            m.bias = None
    where = (place.backend, place.device, place.dtype)
    return make_exchange(ranks, [*summed, w.output], place.config.dim, *where)


def multiply(m: Matrix, factor: float) -> None:
    """Multiply a matrix in place. Without a format its weights are rounded once more."""
    if m.format:
        m.format.multiply(m.tensors, factor)
    else:
        m.data.mul_(factor)


@dataclass
class Loader:
    """Loads the tensors one by one, so that the model is never in memory twice. A matrix is in
    matrix_dtype or in a format; unless the file has it in that format, it is encoded here. All else
    is in dtype: norms are small, and a token reads only one row of the embedding. With several
    ranks, each loads its share of every matrix."""

    checkpoint: Checkpoint
    place: Place
    ranks: Ranks = Ranks()
    quiet: bool = False

    def __post_init__(self) -> None:
        self.whole = self.checkpoint.config
        self.config = self.place.config
        self.device = self.place.device
        self.dtype = self.place.dtype
        self.matrix_dtype = self.place.matrix_dtype
        self.formats = self.place.formats
        self.shapes = matrix_shapes(self.config)
        self.factors = dict(self.config.factors)
        self.encoded: dict[str, Tensors] = {}
        self.workspace: Tensor | None = None
        if self.formats and not self.checkpoint.is_encoded:
            # Allocate what stays first, to avoid fragmentation
            for name, format in self.formats.items():
                self.encoded[name] = format.empty(*self.shapes[name], self.device)
            self.workspace = torch.empty(
                largest_read(self.config), dtype=self.matrix_dtype, device=self.device
            )
        self.bar = tqdm(
            total=weight_bytes(self.config, self.dtype, self.formats),
            unit="B",
            unit_scale=True,
            desc="loading",
            disable=self.quiet or None,  # None: if there is no terminal
            leave=False,
        )

    @torch.inference_mode()
    def load(self) -> Weights:
        with self.bar:
            embedding, *of_layers, norm, output = model_tensors(self.whole)
            table = self.vector(embedding)
            if self.config.tie_embeddings and "output" not in self.formats:
                tied = table[self.share("output_rows")].to(self.matrix_dtype)
                stays = tied.data_ptr() == table.data_ptr()
                last = in_cpu_layout(Matrix(tied), self.place.backend, self.dtype, stays=stays)
            else:
                last = self.matrix(output)
            layers = itertools.groupby(of_layers, lambda t: t.layer)
            made = [self.layer(tensors) for _, tensors in layers]
            weights = Weights(table, made, self.vector(norm), last)
        if self.device.type == "cuda":  # what loading needed in addition to the weights
            self.workspace = None
            torch.cuda.empty_cache()
        return weights

    def layer(self, tensors: Iterable[ModelTensor]) -> LayerWeights:
        made = {}
        for t in tensors:
            if t.is_matrix:
                made[t.field] = self.matrix(t)
            elif t.kind is Kind.PLAIN:
                made[t.field] = Matrix(self.vector(t))
            else:
                made[t.field] = self.vector(t)
        return layer_weights(made)

    def share(self, dim: str) -> slice:
        """This rank's share of one of the sizes of the whole model."""
        size = getattr(self.whole, dim)
        if dim not in CUT:
            return slice(0, size)
        count = getattr(self.whole, CUT[dim])
        taken = share(count, self.ranks.rank, self.ranks.size)
        return slice(taken.start * size // count, taken.stop * size // count)

    def rows(self, t: ModelTensor) -> Rows:
        """This rank's rows of a tensor of the whole model."""
        return t.rows(self.whole, self.share)

    def fill(self, data: Tensor, t: ModelTensor, columns: slice = ALL) -> None:
        """Read these columns of a tensor into `data`, whose rows are this rank's."""
        tensor = self.checkpoint.tensors[t.name]
        for place, values in read_rows(tensor, self.device, self.rows(t), columns):
            if values.is_cpu and values.dtype != data.dtype:
                values = values.float()  # torch is slow at converting between 16-bit types
            data[place].copy_(values, non_blocking=True)

    def vector(self, t: ModelTensor) -> Tensor:
        """A norm, a bias, a router or the embedding."""
        made = torch.empty(t.shape(self.config), dtype=self.dtype, device=self.device)
        self.fill(made, t)
        self.bar.update(made.nbytes)
        if t.field in self.factors:
            made.mul_(self.factors[t.field])
        return made

    def matrix(self, t: ModelTensor) -> Matrix:
        shape = self.shapes[t.name]
        columns = self.share(t.parts[0].dims[-1])
        format = self.formats.get(t.name)
        if not format:
            made = Matrix(torch.empty(shape, dtype=self.matrix_dtype, device=self.device))
            self.fill(made.data, t, columns)
        elif t.name in self.encoded:
            made = Matrix(self.encode(format, t, columns), format)
        else:
            tensors = format.empty(*shape, self.device)
            tensor = self.checkpoint.tensors[t.name]
            write(tensor, format, tensors, self.device, self.rows(t), columns)
            made = Matrix(tensors, format)
        self.bar.update(made.nbytes)
        if t.field in self.factors:
            multiply(made, self.factors[t.field])
        if t.of_experts:
            return made  # products take some of its rows
        return in_cpu_layout(made, self.place.backend, self.dtype, self.formats.values())

    def encode(self, format: Format, t: ModelTensor, columns: slice) -> Tensors:
        """Encode a matrix from whole rows, so that its codes do not depend on the number of ranks;
        if the format cannot be cut, from this rank's columns."""
        N, kept = self.shapes[t.name]  # the columns of this rank
        K = t.shape(self.whole)[1]
        data = self.workspace[: N * K].view(N, K)
        self.fill(data, t)
        tensors = self.encoded[t.name]
        try:
            if kept == K or not format.can_be_cut(K, kept):
                return format.encode(data[:, columns], tensors)
            for tensor, all_columns in zip(tensors, format.encode(data)):
                tensor.copy_(all_columns[:, columns_in(columns, K, all_columns.shape[1])])
            return tensors
        except ValueError as error:
            found = flaw(self.checkpoint.tensors[t.name], self.matrix_dtype)
            raise ValueError(found or str(error)) from None
