"""Step 6 of loading (see loading/checkpoint.py): what a model runs on, that is the device, the type and the
backend, and whether it fits there."""

from __future__ import annotations

import math
import os
import re
import shutil
import warnings
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

import launch
from cards import cpu
from cards.cpu import storage_dtype
from formats import Format
from fp8 import E4M3
from loading.layouts import StoredTensors
from loading.names import (
    Formats,
    ModelTensor,
    formats_of,
    largest_read,
    matrix_shapes,
    model_tensors,
    weight_bytes,
)
from loading.quantised import format_for
from model import CPU_CACHE_BYTES, Config
from passes import LENGTHS
from products import MAX_FEW
from ranks.processes import Ranks
from settings import FORMAT_ROWS, Options

if TYPE_CHECKING:
    from loading.checkpoint import Checkpoint

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FORMATS: dict[str, Format] = {  # in which a model can be encoded
    name: getattr(import_module(row.module), name.upper()) for name, row in FORMAT_ROWS.items()
}


def dtype_name(dtype: str | torch.dtype) -> str:
    """The name that load knows a dtype by, if it is known by another: "fp16" for torch.float16 and
    for "float16"."""
    for name, known in DTYPES.items():
        if dtype in (known, str(known).removeprefix("torch.")):
            return name
    return dtype


# ---- all at once


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a model runs and in what, once it is decided."""

    config: Config  # of one rank
    device: torch.device
    backend: str  # whose ops will read the matrices: "torch" or "triton", or "" if none will
    dtype: torch.dtype
    matrix_dtype: torch.dtype  # of matrices without a format, or of those that are encoded
    formats: Formats  # of the matrices
    ctx_size: int


def place(
    options: Options, config: Config, ranks: Ranks, checkpoint: Checkpoint | None = None
) -> Place:
    """Decide all that the options of a run leave open, and check that the model fits into memory.
    config: of the whole model. checkpoint: where its weights are, unless they are random. Raises
    ValueError, MemoryError."""
    if options.format not in (None, *FORMATS):
        listed = ", ".join(map(str, (None, *FORMATS)))
        raise ValueError(f"format is {options.format!r}; it must be one of {listed}")
    where = "" if checkpoint is None else f"{checkpoint.folder}: "
    device = pick_device(options.device, ranks)
    backend = pick_backend(options.backend, device)
    if backend == "triton" and config.head_dim % 8:
        wrong = f"head_dim is {config.head_dim}; the kernels need a multiple of 8"
        raise ValueError(f"{where}{wrong}: use backend torch")
    if checkpoint is None:
        dtype = pick_dtype(options.dtype, config.dtype or torch.float16, device)
    else:
        dtype = pick_dtype(options.dtype, checkpoint.dtype, device, checkpoint.elements)
    check_accumulate(options.accumulate, backend, device, dtype)
    own_context = pick_context(options.ctx_size, config, where)
    config = config.cut(ranks.size)
    matrix_dtype = storage_dtype(backend, dtype, device)
    formats = formats_of(config, FORMATS.get(options.format))
    if checkpoint and formats:
        matrix_dtype = checkpoint.dtype  # codes do not depend on --dtype
    elif checkpoint:
        # On a CPU torch has no fast product for 8-bit codes in groups, so they are decoded
        decodes = device.type == "cpu" and backend == "torch"
        formats = formats_as_stored(checkpoint.tensors, config, most_bits=4 if decodes else 8)
    check_groups(config, formats)
    ranks.join(device)
    need = memory_of(config, dtype, device, formats, options, matrix_dtype)
    ctx_size = own_context
    if options.ctx_size is None:
        most = min(own_context, MOST_CONTEXT[device.type])
        ctx_size = min(ranks.gather(lambda: context_that_fits(need, most, device, ranks)))
    check_memory(need, ctx_size, device, ranks, options.parallel)
    return Place(
        config=config,
        device=device,
        backend=backend,
        dtype=dtype,
        matrix_dtype=matrix_dtype,
        formats=formats,
        ctx_size=ctx_size,
    )


# ---- what is decided


def pick_device(name: str = "auto", ranks: Ranks = Ranks()) -> torch.device:
    """With several processes on a host, each takes the GPU of its local rank. Warns of a GPU that torch
    cannot use. Raises ValueError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and (unused := unused_gpu()):
            warnings.warn(f"{unused}; this runs on the CPU", stacklevel=1)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(name)):
        raise ValueError(f"unknown device {name!r}: cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if device.index is not None and ranks.size > 1:
        raise ValueError(
            f"device {name} was requested by {ranks.size} processes: use cuda, and each takes its own GPU"
        )
    index = device.index
    if index is None:
        index = ranks.local_rank
    count = torch.cuda.device_count()
    if index >= count:
        asked = f"device cuda:{index} was asked for"
        unused = "" if count else unused_gpu()
        raise ValueError(f"{asked}, but {unused or f'torch sees {count} CUDA devices'}")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)  # where Triton launches
    return device


def unused_gpu() -> str:
    """What to do about a GPU of this machine that torch does not see. Returns "" if there is no sign of
    one, or if CUDA_VISIBLE_DEVICES hides it."""
    sign = shutil.which("nvidia-smi") or "/dev/nvidia0"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or not Path(sign).exists():
        return ""
    remedy = "is made for CPUs alone: `make clean run` installs the one for GPUs"
    if cuda := torch.version.cuda:
        remedy = f"is made for CUDA {cuda}: CUDA 13 needs a driver of version 580 or later"
        remedy += ", and nvidia-smi shows yours"
    return f"torch sees no GPU, although there is {sign}: torch {torch.__version__} {remedy}"


def pick_dtype(
    name: str, stored: torch.dtype, device: torch.device, elements: float = math.inf
) -> torch.dtype:
    """On a GPU, auto is the checkpoint's own type. On a CPU it is fp32 if the checkpoint is in
    fp32, or if it has so few elements that they fit into the caches and the CPU has no bf16
    products; otherwise bf16."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return stored
    if 4 * elements <= CPU_CACHE_BYTES and not cpu.multiplies_bf16():
        return torch.float32
    if stored == torch.float16:
        return torch.bfloat16
    return stored


def pick_backend(name: str, device: torch.device) -> str:
    """Whose ops run the model: "torch" (the reference) or "triton" (fused; the default on a GPU).
    Raises ValueError."""
    if name == "torch" or name == "auto" and device.type == "cpu":
        return "torch"
    if device.type == "cpu" and not launch.INTERPRETED:
        raise ValueError(
            "on a CPU the Triton kernels run only in Triton's interpreter: set TRITON_INTERPRET=1"
        )
    if launch.triton is None:
        raise ValueError("Triton is not installed: backend torch runs without it")
    if device.type == "cuda" and launch.capability(device) < 80:
        card = torch.cuda.get_device_name(device)
        raise ValueError(
            f"{card} is older than compute capability 8.0, which the kernels need: use backend torch"
        )
    return "triton"


def check_accumulate(
    accumulate: str, backend: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise ValueError if a prompt's products are to be accumulated in half precision but cannot
    be."""
    can_be_done = backend == "triton" and device.type == "cuda" and dtype == torch.float16
    if accumulate == "fp16" and not can_be_done:
        raise ValueError("accumulate fp16 needs a GPU, the Triton kernels and dtype fp16")


def pick_context(ctx_size: int | None, config: Config, where: str) -> int:
    """The context of a model, or the longest one if none is asked for. where: begins a message."""
    if ctx_size is None and config.sliding_window:
        return min(config.max_seq_len, config.sliding_window)
    ctx_size = ctx_size or config.max_seq_len
    if config.sliding_window and ctx_size > config.sliding_window:
        window = f"sliding_window is {config.sliding_window}"
        raise ValueError(f"{where}{window}: a ctx_size of {ctx_size} is not supported")
    return ctx_size


def check_groups(c: Config, formats: Formats) -> None:
    """Raise ValueError if a rank's columns of a matrix are not whole groups of its format."""
    shapes = matrix_shapes(c)
    for name, format in formats.items():
        _, columns = shapes[name]
        if columns % format.group:
            where = f" on each of {c.ranks} processes" if c.ranks > 1 else ""
            needs = f"{format.name} needs a multiple of {format.group}"
            raise ValueError(f"{name} has {columns} columns{where}; {needs}")


def formats_as_stored(tensors: StoredTensors, c: Config, most_bits: int) -> Formats:
    """The formats that store a rank's matrices exactly as the files have them: those of --save, or
    others, of at most `most_bits` bits, for what other programs have quantised. tensors: those of
    the model."""
    formats = {}
    for t in model_tensors(c):
        if not t.is_matrix:
            continue
        schemes = {stored.scheme for stored in tensors[t.name]}
        own = tensors[t.name][0].format
        format = own or format_for(schemes, t.shape(c)[1], most_bits)
        if format:
            formats[t.name] = format
    return formats


# Files of a container's memory, in cgroups of version 2 and of version 1: folder, limit, use
CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def free_memory(device: torch.device) -> float:
    """Bytes that can still be allocated on a GPU, or in this machine and its container. Returns
    infinity if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = math.inf
    with suppress(OSError):
        said = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
        free = 1024 * int(said[1])
    for folder, limit, used in CGROUPS:
        with suppress(OSError, ValueError):  # not in such a container, or its limit is "max"
            most = int(Path(folder, limit).read_text())
            taken = int(Path(folder, used).read_text())
            stat = Path(folder, "memory.stat").read_text()
            # Cached files, which the system drops if it needs the memory
            cached = re.findall(r"^(?:in)?active_file (\d+)", stat, re.MULTILINE)
            free = min(free, most - taken + sum(map(int, cached)))
    return free


# What a model needs on a CPU besides weights and cache, in multiples of its largest matrix in dtype:
# one copy and one workspace for a chunk, and a second copy of the output matrix if it is the
# embedding. An expert counts as a matrix of its own
MARGIN = 6
GRAPHS = 1 << 29  # bytes on a GPU for CUDA graphs and for what libraries keep


# The longest context unless another is asked for. Agents ask for 32k to 64k
MOST_CONTEXT = {"cpu": 8192, "cuda": 32768}
LEFT_FREE = 0.1  # of the memory, by a context that nobody asked for
LEAST_CONTEXT = 512  # if less fits, it is an error


class Memory(NamedTuple):
    """Bytes that a model needs."""

    weights: float
    workspace: float
    cache: float  # of a position, for all texts
    decoded: float  # further workspace of a position
    encoded: bool  # its matrices are in formats

    def at(self, ctx_size: int) -> float:
        """What a context of so many tokens needs in all."""
        return self.weights + self.workspace + (self.cache + self.decoded) * ctx_size


def memory_of(
    c: Config,
    dtype: torch.dtype,
    device: torch.device,
    formats: Formats,
    options: Options,
    encoded_from: torch.dtype | None = None,
) -> Memory:
    """What a model needs. If the config is cut, it is that of one rank. encoded_from: the type in
    which matrices are read to be encoded, by default dtype."""
    weights = weight_bytes(c, dtype, formats)
    matrices = [t for t in model_tensors(c) if t.is_matrix]
    # While they are encoded, all experts of a layer are in memory once more
    to_encode = (encoded_from or dtype).itemsize * largest_read(c) if formats else 0
    if device.type == "cpu":
        largest = max(math.prod(t.stack_shape(c)[-2:]) for t in matrices)
        running = MARGIN * largest * dtype.itemsize
    else:
        running = running_on_a_gpu(c, dtype, formats, options)
    if device.type == "cpu" and dtype == torch.bfloat16:
        for t in matrices:
            if not t.of_experts and t.name in formats and formats[t.name].bits == 4:
                weights += math.prod(t.shape(c)) * 5 // 8  # a copy for torch's own product
    layer = 2 * c.kv_dim  # keys and values of a position in one layer
    return Memory(
        weights=weights,
        workspace=max(running, to_encode),
        cache=options.parallel * c.n_layers * layer * (1 if options.kv_fp8 else dtype.itemsize),
        decoded=2 * layer * dtype.itemsize if options.kv_fp8 else 0,
        encoded=bool(formats),
    )


def running_on_a_gpu(c: Config, dtype: torch.dtype, formats: Formats, options: Options) -> int:
    """Bytes besides weights and cache. A prompt's activations and the decoded copy of a layer's matrix
    are there twice, since the first call of what a graph does is outside of the memory of graphs. So
    are the scores of a prompt, for which the output matrix is decoded, as it is for many texts."""

    def copy_of(t: ModelTensor) -> int:
        format = formats.get(t.name)
        if format is None or t.of_experts and format is E4M3:
            return 0
        return math.prod(t.shape(c)) * (1 if t.of_experts else dtype.itemsize)  # experts' in E4M3

    *of_layers, output = [copy_of(t) for t in model_tensors(c) if t.is_matrix]
    tokens = min(LENGTHS[-1], options.ctx_size or c.max_seq_len)
    prompt = tokens * c.widest * dtype.itemsize + max(of_layers)
    outside = max(prompt, output)
    in_graphs = outside if options.parallel > MAX_FEW else prompt
    return in_graphs + outside + GRAPHS


def free_for(device: torch.device, ranks: Ranks) -> float:
    """Bytes that a rank may allocate: on a CPU the ranks of a host share its memory."""
    free = free_memory(device)
    return free / ranks.local_size if device.type == "cpu" else free


def context_that_fits(need: Memory, most: int, device: torch.device, ranks: Ranks) -> int:
    """The longest context up to `most` that leaves some memory free."""
    room = (1 - LEFT_FREE) * free_for(device, ranks) - need.at(0)
    fits = room / (need.cache + need.decoded)
    return int(min(most, max(fits, LEAST_CONTEXT)))


def check_memory(
    need: Memory, ctx_size: int, device: torch.device, ranks: Ranks, parallel: int = 1
) -> None:
    """Raise MemoryError if weights, cache and workspace do not fit, before any of them is
    allocated."""
    free = free_for(device, ranks)
    if need.at(ctx_size) <= free:
        return
    where = str(device)
    if ranks.size > 1:
        where += f" for rank {ranks.rank} of {ranks.size}"
    gb = lambda size: f"{size / 1e9:.2f} GB"
    texts = f"{parallel} x " if parallel > 1 else ""
    terms = f"weights {gb(need.weights)} + cache of {texts}{ctx_size} tokens"
    terms += f" {gb(need.cache * ctx_size)}"
    terms += (
        f" + workspace {gb(need.workspace + need.decoded * ctx_size)} = {gb(need.at(ctx_size))}"
    )
    fits = int((free - need.at(0)) / (need.cache + need.decoded))
    instead = "a smaller ctx_size, "
    if fits > 0:
        instead = f"a ctx_size of at most {fits}, "
    instead += "fewer texts at once, " if parallel > 1 else ""
    instead += "a smaller dtype, "
    instead += "" if need.encoded else "matrices in fp8 or int4, "
    raise MemoryError(f"{terms}, but {where} has {gb(free)} free: try {instead}or kv_fp8")
