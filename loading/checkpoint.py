"""How the name of a checkpoint becomes the weights of a model, step by step, as `load` does it.

      a name: "owner/name", a folder or a GGUF file
    1   |  hub.py        finds it on this machine, or downloads it
      a path
    2   |  headers.py    where tensors lie in a file: the header of a safetensors file
        |  torchfile.py  the same for a file that torch.save wrote
        |  sources.py    which layout is it: Hugging Face's, Meta's, GGUF, or --save's? And what lies
        |               where in each
      a Source
    3   |  config.py     reads config.json or params.json, and refuses what is not supported
        |  families.py   what tells Llama, Qwen3 and other families apart: a row each
        |  gguf.py       translates the header of a GGUF file into the fields of a config.json
      a Config
    4   |  names.py      the tensors of such a model, and what each layout calls their parts
      names and shapes
    5   |  reading.py    reads tensors in files, some rows of several at once
        |  quantised.py  how other programs store the matrices that they have quantised
        |  tensors.py    a tensor of a model, made of those in files
        |  layouts.py    all tensors of a model, made of a Source's. Only headers are read, and checked
      a Checkpoint: the Config and its tensors
    6   |  place.py       chooses device, type and backend, and asks whether it all fits into memory
    7   |  Loader         (here) copies them to the device. A matrix stays in floats, is encoded
        |               (fp8.py, bits/int4.py), or
        |  bits/others.py keeps what other programs have quantised, bit for bit
      Weights, in a Llama (model.py)

A tensor of the model, such as w13 of layer 3, has three descriptions. Its ModelTensor is what the
model needs: a shape, and the parts w1 and w3. Its SourceTensor says how a checkpoint stores these,
and joins them. Under it, FileTensors say where the bytes lie in files. A SourceTensor is read piece
by piece, while the next pieces are on their way from the files (reading.py), and each piece knows
which rows of the tensor it is, so that the Loader only copies it there.

What is particular to a layout stands in hub.py, config.py, names.py, sources.py and layouts.py.
files.py opens all files, since none is trusted. save.py goes the other way, and writes the weights
of a Loader to a folder."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from cards.cpu import in_cpu_layout, storage_dtype
from formats import Format, Matrix, Tensors
from kernels import FORMATS
from loading import hub
from loading.config import read_sampling
from loading.files import one_line_errors
from loading.layouts import formats_as_stored, tensors_for
from loading.names import (
    CUT,
    Formats,
    Kind,
    ModelTensor,
    formats_of,
    largest_read,
    layer_weights,
    matrix_shapes,
    model_parts,
    model_tensors,
    weight_bytes,
)
from loading.place import (
    check_accumulate,
    check_choice,
    check_groups,
    check_memory,
    pick_backend,
    pick_device,
    pick_dtype,
)
from loading.sources import small_source, source_of, weight_files
from loading.tensors import ALL, Rows, columns_in
from model import Config, LayerWeights, Llama, Weights, enumerated
from ranks.processes import Ranks, share
from sampling import Sampling

# ---- all steps


@one_line_errors()
def load(
    name: str | Path | Checkpoint,
    *,
    dtype: str = "auto",
    device: str = "auto",
    ctx_size: int | None = None,
    backend: str = "auto",
    format: str | None = None,
    kv_fp8: bool = False,
    accumulate: str = "auto",
    quiet: bool = False,
    ranks: Ranks = Ranks(),
    sampling: dict[str, float] | None = None,
) -> Llama:
    """Load a checkpoint: a folder in Hugging Face's or Meta's layout, a GGUF file or a repository of
    the hub, see find_checkpoint, or one that is open already.

    ctx_size: the context, which must fit into memory beside the weights; 0 is the model's own; None
    is that, but at most 4096. format: the one for the matrices, a name of kernels.FORMATS; what
    `save` wrote has its own. kv_fp8: keys and values in 8 bits. accumulate: how a prompt's products
    are summed, see kernels.py. quiet: no progress bar. ranks: the processes that share the model,
    if there are several. sampling: settings that replace the checkpoint's own. Raises ValueError,
    OSError or MemoryError, in one line that says what to do."""
    check_choice("format", format, (None, *FORMATS))
    if ctx_size is not None and ctx_size < 0:
        raise ValueError(
            f"ctx_size is {ctx_size}; it must be a number of tokens, or 0 for the model's own"
        )

    # Steps 1 to 5, unless they have been taken
    checkpoint = name
    if not isinstance(name, Checkpoint):
        checkpoint = Checkpoint(find_checkpoint(name))
    folder = checkpoint.folder
    config = checkpoint.config
    given = sampling or {}
    checkpoint.check_original(format, or_own=True)
    own = read_sampling(folder, given)

    # Step 6
    on = pick_device(device, ranks)
    backend = pick_backend(backend, on)
    if backend == "triton" and config.head_dim % 8:
        wrong = f"head_dim is {config.head_dim}; the kernels need a multiple of 8"
        raise ValueError(f"{folder}: {wrong}: use backend torch")
    as_dtype = pick_dtype(dtype, checkpoint.dtype, on, checkpoint.elements)
    if ctx_size is None:
        ctx_size = min(config.max_seq_len, 4096)
    ctx_size = ctx_size or config.max_seq_len
    if config.sliding_window and ctx_size > config.sliding_window:
        window = f"sliding_window is {config.sliding_window}"
        raise ValueError(f"{folder}: {window}: a ctx_size of {ctx_size} is not supported")
    check_accumulate(accumulate, backend, on, as_dtype)
    config = config.cut(ranks.size)
    matrix_dtype = storage_dtype(backend, as_dtype, on)
    formats = formats_of(config, checkpoint.format or FORMATS.get(format))
    if formats:
        matrix_dtype = checkpoint.dtype  # codes do not depend on --dtype
    else:
        # On a CPU torch has no fast product for 8-bit codes in groups, so they are decoded
        decodes = on.type == "cpu" and backend == "torch"
        formats = formats_as_stored(checkpoint.tensors, config, most_bits=4 if decodes else 8)
    check_groups(config, formats)
    ranks.join(on)
    check_memory(config, as_dtype, on, ctx_size, formats, kv_fp8, ranks, matrix_dtype)

    # Step 7
    loader = Loader(checkpoint, as_dtype, matrix_dtype, on, formats, backend, ranks, quiet)
    with torch.inference_mode():
        weights = loader.load()
    if on.type == "cuda":
        del loader
        torch.cuda.empty_cache()  # what loading needed in addition to the weights
    return Llama(
        config=config,
        weights=weights,
        backend=backend,
        device=on,
        dtype=as_dtype,
        ctx_size=ctx_size,
        checkpoint=checkpoint,
        kv_fp8=kv_fp8,
        accumulate=accumulate,
        ranks=ranks,
        sampling=Sampling(**own | given),
    )


# ---- step 1: from a name to a path


@one_line_errors()
def find_checkpoint(name: str | Path) -> Path:
    """The path of a checkpoint, a folder or a GGUF file. name: such a path, or a repository of the
    Hugging Face hub, "owner/name", or "owner/name:Q4_K_M" for one of its GGUF files. A repository
    that is not in the hub's cache is downloaded. Raises OSError or ValueError, in one line that
    says what to do, and TypeError for a name that is neither a text nor a path."""
    if not isinstance(name, str | Path):
        kinds = 'a folder, a GGUF file or "owner/name" on the hub'
        raise TypeError(f"a model is given as {kinds}, not as {type(name).__name__}")
    return hub.find_checkpoint(str(name), read_config, is_whole)


def is_whole(path: Path) -> bool:
    """Whether everything that a checkpoint refers to is there. Without an index, a missing file of
    Meta's shows only in tensors that do not fit."""
    try:
        if path.is_dir():
            weight_files(path)
        source = source_of(path)
        config = source.config()
    except OSError:
        return False
    except ValueError:  # it is not supported, and `load` will say why
        return True
    try:
        tensors_for(source, config)
        source.tokenizer()
    except (OSError, ValueError):
        return False
    return True


# ---- steps 2 to 5: from a path to the configuration and its tensors


@one_line_errors()
def read_config(folder: Path) -> Config:
    """The configuration in config.json, in Meta's params.json or in a GGUF file. Raises OSError or
    ValueError."""
    return small_source(folder).config()


class Checkpoint:
    """An opened checkpoint: its configuration and its tensors, of which only headers have been
    read."""

    @one_line_errors()
    def __init__(self, folder: Path):
        """folder: that of the checkpoint, or a GGUF file. Raises OSError, ValueError."""
        self.folder = folder
        self.source = source_of(folder)
        config = self.source.config()
        self.format = self.source.format  # of the matrices, if --save has encoded them
        self.config, self.tensors = tensors_for(self.source, config)

    @property
    def dtype(self) -> torch.dtype:
        """The type of its floats."""
        if self.config.dtype and not self.format:
            return self.config.dtype
        return self.tensors["tok_embeddings"].dtype

    @property
    def quantised(self) -> str:
        """How others have quantised matrices, in words; empty if they are floats."""
        found = set().union(*(tensor.all_schemes for tensor in self.tensors.values()))
        return enumerated({scheme.name for scheme in found if scheme})

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
            flaw = tensor.flaw(dtype)
            if flaw:
                return flaw
        return None


# ---- step 7: the loader


@dataclass
class Loader:
    """Loads the tensors one by one, so that the model is never in memory twice. A matrix is in
    matrix_dtype or in a format; unless the file has it in that format, it is encoded here. All else
    is in dtype: norms are small, and a token reads only one row of the embedding. With several
    ranks, each loads its share of every matrix."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    matrix_dtype: torch.dtype
    device: torch.device
    formats: Formats
    backend: str = ""  # whose ops will read the matrices, if any will
    ranks: Ranks = Ranks()
    quiet: bool = False

    def __post_init__(self) -> None:
        self.whole = self.checkpoint.config
        self.config = self.whole.cut(self.ranks.size)
        self.shapes = matrix_shapes(self.config)
        self.encoded: dict[str, Tensors] = {}
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

    def load(self) -> Weights:
        with self.bar:
            embedding, *of_layers, norm, output = model_tensors(self.whole)
            table = self.vector(embedding)
            if self.config.tie_embeddings and "output" not in self.formats:
                tied = table[self.share("output_rows")].to(self.matrix_dtype)
                stays = tied.data_ptr() == table.data_ptr()
                last = in_cpu_layout(Matrix(tied), self.backend, self.dtype, stays=stays)
            else:
                last = self.matrix(output)
            layers = itertools.groupby(of_layers, lambda t: t.layer)
            return Weights(
                table, [self.layer(tensors) for _, tensors in layers], self.vector(norm), last
            )

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
        for place, values in tensor.read(self.device, self.rows(t), columns):
            if values.is_cpu and values.dtype != data.dtype:
                values = values.float()  # torch is slow at converting between 16-bit types
            data[place].copy_(values, non_blocking=True)

    def vector(self, t: ModelTensor) -> Tensor:
        """A norm, a bias, a router or the embedding."""
        made = torch.empty(t.shape(self.config), dtype=self.dtype, device=self.device)
        self.fill(made, t)
        self.bar.update(made.nbytes)
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
            tensor.write(format, tensors, self.device, self.rows(t), columns)
            made = Matrix(tensors, format)
        self.bar.update(made.nbytes)
        if t.of_experts:
            return made  # products take some of its rows
        return in_cpu_layout(made, self.backend, self.dtype, self.formats.values())

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
            flaw = self.checkpoint.tensors[t.name].flaw(self.matrix_dtype)
            raise ValueError(flaw or str(error)) from None
