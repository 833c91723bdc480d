"""How kernels are launched: with or without Triton, and with programmatic dependent launch.

Programmatic dependent launch. A decode step of 7B is about 160 kernels in one CUDA graph, each a
few to 60 microseconds long, and by default a kernel starts only when the one before it has ended.
From sm_90 on it may start earlier, once every program of the kernel before has ended or has called
`gdc_launch_dependents`. Most kernels here call that first, so that the next one is launched as soon
as SMs become free, and later `gdc_wait`, which returns when the kernel before has ended and its
writes are visible. Between the two a kernel may do whatever depends on no other kernel: compute
offsets, load its first tile of weights. The rules that keep this correct:

- every kernel launched this way waits, in at least one of its programs, so "the kernel before has
  ended" includes all the kernels before that one;
- before its wait a kernel writes nothing, and reads only what was visible when it could first
  start. If the kernel before lets it start at once, as most do, it may read only what no kernel
  launched this way writes in the same pass: weights, tables, sampling settings, places and
  positions, the keys and values of earlier passes. If the kernel before waits first, in every
  program, it may also read what all kernels before that one wrote. ranks/exchange.py explains its
  exceptions;
- this has one exception, where one token goes through experts. The product with w13 can load nothing
  without the router's logits, so it waits first. Then each of its programs chooses its expert and lets
  the next kernel start, the product with w2, which reads the experts' ids and loads its rows before it
  waits. Extra programs, which have no rows of W, write these ids. They make them visible to the whole GPU
  and then end, without which the next kernel cannot start. It reads the ids past the L1 cache, which may
  hold older ones;
- places, positions and segments are moved by torch's own operations, which are launched without
  the attribute. Each starts when all earlier kernels have ended, including those that read the old
  values, and later kernels start when it has ended. test_no_step_sees_an_old_position runs
  thousands of each;
- a kernel waits once, or a second time where the first was for the rows of W that it has to load.
  No wait is in a loop: Triton 3.7.1 may move loads above a wait inside one (triton issue 11905).
  bits/stream.py is a deliberate exception: its loads of W are meant to move above the wait,
  and whatever has to come after it stands in the same branch. The product of many tokens in
  cards/hopper.py waits in a loop as well; in its PTX the loads stay below the wait.
"""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import gc
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import ContextVar, copy_context
from functools import cache

import torch
from torch import Tensor

# ---- with Triton or without

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read by Triton when a kernel is decorated
# Both stay None if Triton is not installed or would not be used: the reference ops do without it,
# and importing it takes 0.3 s
triton = tl = None
if "TRITON_INTERPRET" in os.environ or torch.cuda.device_count():  # counted without starting CUDA
    with suppress(ImportError):
        import triton
        import triton.language as tl


def jit(function):
    """Apply triton.jit, or return the function unchanged if Triton was not imported."""
    return triton.jit(function) if triton else function


def constexpr(value):
    """A global constant for kernels: a tl.constexpr, or the plain value if Triton was not
    imported."""
    return tl.constexpr(value) if triton else value


EMULATED = constexpr(INTERPRETED)  # the same for kernels: the interpreter has no PTX


@cache
def capability(device: torch.device) -> int:
    """Compute capability of a GPU, 90 for Hopper; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def processors(device: torch.device) -> int:
    """The number of streaming multiprocessors of a GPU; 4 for the interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


# ---- launching a kernel


def launch(
    kernel, grid: tuple[int, ...], device: torch.device, *args, warps=4, stages=1, **constants
) -> None:
    """Run a kernel on the device, with programmatic dependent launch where the GPU has it. Kernels
    take contiguous tensors only, alone or in tuples."""
    for arg in args:
        for t in arg if isinstance(arg, tuple) else (arg,):
            contiguous = not isinstance(t, Tensor) or t.is_contiguous()
            assert contiguous, (kernel.__name__, "a tensor is not contiguous")
    pdl = capability(device) >= 90
    options = dict(num_warps=warps, num_stages=stages, launch_pdl=pdl)
    run_or_compile(kernel, grid, device, *args, **constants, PDL=pdl, **options)


def run_or_compile(kernel, grid: tuple[int, ...], device: torch.device, *args, **constants) -> None:
    """Run a kernel on the device or, within compile_kernels, compile it."""
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with on_device:  # Triton launches on the current device
        if _only_compile.get():
            kernel.warmup(*args, grid=grid, **constants)
        else:
            kernel[grid](*args, **constants)


def cache_key(parts: Iterable) -> str:
    """What makes up an object that kernels get as a constant: plain values, and the sources of
    Triton functions. Triton's cache on disk asks for it under this name; otherwise it would go by the
    names of the functions, and run an old kernel after one was edited."""
    found = []
    for part in parts:
        if isinstance(part, int | float | str | tuple | torch.dtype | None):
            found.append(part)
        elif hasattr(part, "cache_key"):
            found.append(part.cache_key)
    return str(found)


_only_compile: ContextVar[bool] = ContextVar("only compile", default=False)


def compile_kernels(run: Callable[[], object], device: torch.device) -> None:
    """Call `run` while `launch` compiles kernels instead of running them, and load what was
    compiled. All of it happens in parallel threads, since most of the work is in LLVM, ptxas and
    the C compiler, outside of Python's lock."""

    def compile_all() -> None:
        _only_compile.set(True)
        on_device = dict(initializer=torch.cuda.set_device, initargs=(device,))
        threads = ThreadPoolExecutor(os.cpu_count(), **on_device)
        with threads, triton.AsyncCompileMode(threads) as mode:
            run()
            load = lambda future: future.result().run
            list(threads.map(load, mode.future_kernels.values()))

    # AsyncCompileMode leaves itself switched on if a kernel fails to compile
    copy_context().run(compile_all)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a GPU, so that graphs can share memory. torch's own default
    belongs to the first GPU used."""
    return torch.cuda.Stream(device)


def captured(
    run: Callable[[], object],
    device: torch.device,
    reset: Callable[[], object] = lambda: None,
    pool: tuple[int, int] | None = None,
) -> torch.cuda.CUDAGraph:
    """Capture `run` as a CUDA graph, in the given memory pool of another graph if there is one.
    `reset` restores what `run` has changed.

    `run` is called once before, on the same stream: its kernels are only compiled and loaded, and
    all else runs, so that libraries allocate what they keep and ranks connect. All ranks capture
    together. Their communication library has threads of its own, whose calls must not end the
    capture."""
    collects = gc.isenabled()
    stream = _capture_stream(device)
    with torch.cuda.device(device):
        try:
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                compile_kernels(run, device)
                reset()
            graph = torch.cuda.CUDAGraph()
            gc.disable()  # freeing an old graph would end the capture
            # waits until all ranks have done what was called before
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                run()
        finally:
            if collects:
                gc.enable()
            reset()
    return graph


class Scratch:
    """Memory that kernels keep between launches, found by name, shape and type. It belongs to
    whoever runs kernels one after another on one stream."""

    def __init__(self, device: torch.device):
        self.device = device
        self._tensors: dict[tuple, Tensor] = {}

    def zeros(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a tensor of zeros the first time, and later the same tensor as kernels left
        it."""
        key = (name, shape, dtype)
        if key not in self._tensors:
            self._tensors[key] = torch.zeros(shape, dtype=dtype, device=self.device)
        return self._tensors[key]


# ---- in kernels: programmatic dependent launch


@jit
def gdc_launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start; its own wait keeps it correct."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def gdc_wait(PDL: tl.constexpr):
    """Wait until the kernel before this one, and so every kernel before that, has ended."""
    if PDL:
        tl.extra.cuda.gdc_wait()


# ---- in kernels: what several of them share


@jit
def saturated(x, FP16_SUMS: tl.constexpr):
    """Returns x. With FP16_SUMS it is clamped to the range of fp16, so that what overflowed is
    65504 and not inf; NaN stays NaN."""
    return tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL) if FP16_SUMS else x


@jit
def in_order(x):
    """Floats as int32 that order like them, with -0.0 as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def barrier():
    """Wait for the other threads of the program."""
    tl.debug_barrier()


@jit
def fence():
    """Make what this thread wrote visible to the whole GPU before it goes on."""
    if not EMULATED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; // dummy $0", "=r", [], tl.int32, is_pure=False, pack=1
        )


# The last program merges. Where programs share an output, each leaves its part in scratch memory,
# and the last one to finish merges the parts: another launch would cost a microsecond. The atomic
# is "acq_rel": a program that sees the count also sees what was written before it was raised, by
# every thread, thanks to the barrier. The last one resets the counter for the next launch, and
# reads the parts past the L1 cache (".cg"), which may hold stale lines.


@jit
def is_last(arrived, programs):
    """Whether this is the last of `programs` programs to get here. They are counted in `arrived`,
    which is zero again afterwards."""
    barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(arrived, 0)
    return last


# Epilogues: products.Epilogue says what they are


@jit
def rows_and_tokens(row, COUNT: tl.constexpr, TOKENS: tl.constexpr):
    """The indices of COUNT rows from `row` on, and those of the tokens, in shapes that
    broadcast."""
    if TOKENS == 1:
        return row + tl.arange(0, COUNT), row * 0
    else:
        return row + tl.arange(0, COUNT)[:, None], tl.arange(0, TOKENS)[None, :]


@jit
def prepared(
    args, row, begin, T, N, ROWS: tl.constexpr, TOKENS: tl.constexpr, EPILOGUE: tl.constexpr
):
    """What the epilogue needs besides the product of ROWS rows, from `row` on, with TOKENS tokens,
    from `begin` on."""
    EACH: tl.constexpr = 2 if EPILOGUE.pairs else 1
    rows, t = rows_and_tokens(row // EACH, ROWS // EACH, TOKENS)
    SIZES: tl.constexpr = EPILOGUE.sizes
    return EPILOGUE.prepare(args, rows, begin + t, T, N, TOKENS, SIZES)


@jit
def begin_single(
    ids, chosen_from, row, N, SUMMED: tl.constexpr, WARPS: tl.constexpr, CHOICE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Begin a program of a product with one token, and let the next kernel start. W is a stack of
    matrices of N rows. Returns a tuple of first rows: of the SUMMED matrices whose products are added up
    or, with CHOICE, of the one that this program multiplies; and a tuple of the weight of its product,
    empty without CHOICE. A program that has no rows from `row` on writes the id of that one instead."""
    if CHOICE is not None:
        gdc_wait(PDL)
        SIZES: tl.constexpr = CHOICE.sizes
        matrix, weight = CHOICE.choose(chosen_from, WARPS, SIZES)
        if row < N:
            gdc_launch_dependents(PDL)
        else:
            tl.store(ids + tl.program_id(1), matrix)
            fence()
        return (matrix.to(tl.int64) * N,), (weight,)
    else:
        gdc_launch_dependents(PDL)
        first = ()
        for slot in tl.static_range(SUMMED):
            if ids is None:
                first += (0,)
            else:
                first += (tl.load(ids + slot, cache_modifier=".cg").to(tl.int64) * N,)
        return first, ()


# What attention.py and cards/hopper.py share


@jit
def segment_of(segments, index, last, T):
    """A segment as Pass.segments describes it: first, start, begin and count. And how many of
    its rows are written: for the last one all up to the T rows of the pass, with zeros behind
    count."""
    segment = segments + index * 4
    begin = tl.load(segment + 2)
    count = tl.load(segment + 3)
    written = tl.where(last, T - begin, count)
    return tl.load(segment), tl.load(segment + 1), begin, count, written


@jit
def split_of(length, split, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr):
    """Divide `length` positions into splits. Returns how many there are, and where this one begins
    and ends."""
    size = tl.where(length <= LEAST, LEAST, tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N)
    return tl.cdiv(length, size), split * size, tl.minimum(split * size + size, length)


@jit
def begin_split(
    segments, k_cache, v_cache, P, T, D: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """What a program works on: BLOCK_M rows of a segment and a key/value head, over one split of the
    positions. Returns the group of programs that share these rows, with begin, count and written of
    the segment; the head, the first row, and where keys and values are; start of the segment, how
    many splits there are, which this one is, where it begins and where it ends."""
    pid, split, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = segment * tl.num_programs(0) + pid
    head, top = pid // BLOCKS, pid % BLOCKS * BLOCK_M
    last = segment == tl.num_programs(2) - 1
    first, start_pos, begin, count, written = segment_of(segments, segment, last, T)
    offs_head = (head.to(tl.int64) * P + first) * D
    used, start, end = split_of(start_pos + count, split, SPLITS, BLOCK_N, LEAST)
    return (
        (group, begin, count, written),
        (head, top, k_cache + offs_head, v_cache + offs_head),
        (start_pos, used, split, start, end),
    )


@jit
def rows_of_program(pid, blocks, heads_at_once, H):
    """Returns the block of a prompt's rows and the head that a program works on. Programs start in
    the order of pid: a few heads at a time, whose keys and values stay in the L2, and among these
    the last rows of all heads first, since they see the most keys and take longest."""
    first = pid // (blocks * heads_at_once) * heads_at_once
    heads = tl.minimum(heads_at_once, H - first)
    rest = pid - first * blocks
    return blocks - 1 - rest // heads, first + rest % heads
