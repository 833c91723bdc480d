"""How kernels are launched: Triton or none, programmatic dependent launch, and the launch sizes for each card.

Programmatic dependent launch. A decode step of 7B is about 160 kernels in one CUDA graph, each a few to 60 microseconds long,
and by default a kernel starts only when the one before it has ended. From sm_90 on it may start earlier: every kernel here
calls `gdc_launch_dependents` first, so that the next one is launched as soon as SMs become free, and later `gdc_wait`, which
returns when the kernel before has ended and its writes are visible. Between the two a kernel may do whatever depends on no
other kernel: compute offsets, load its first tile of weights. The rules that keep this correct:

- every kernel waits, so "the kernel before has ended" includes all the kernels before that one;
- before the wait a kernel reads only what no kernel launched this way writes in the same step (weights, tables, sampling
  settings, `pos`, the keys and values of earlier steps), and it writes nothing; parallel.py explains its exceptions;
- `pos` is moved by torch's own operations (KVCache.advance and seek, and those in speculation.py), which are launched without
  the attribute and release nothing early: each starts when all kernels before it have ended, including those that read the
  old value, and whatever comes after it, launched with the attribute or not, starts when it has ended. That is stream order,
  so it holds within a graph, from replay to replay, for the chunks of a prompt and for single steps;
  test_no_step_sees_an_old_position runs thousands of each;
- there is one wait, outside of any loop: Triton 3.7.1 may move loads above a wait inside one (triton issue 11905).
"""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import os
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # not installed: the reference ops run without it
    triton = tl = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read by Triton when a kernel is decorated


def jit(function):
    """triton.jit where there is Triton."""
    return triton.jit(function) if triton else function


def constexpr(value):
    """A global constant that kernels may read, where there is Triton."""
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
    """Streaming multiprocessors of a GPU; a few for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def launch(kernel, grid: tuple[int, ...], device: torch.device, *args, warps: int = 4, stages: int = 1, **constants) -> None:
    """Run a kernel, with programmatic dependent launch where the GPU has it. Kernels take contiguous tensors only."""
    assert all(a.is_contiguous() for a in args if isinstance(a, torch.Tensor)), (kernel.__name__, "a tensor is not contiguous")
    pdl = capability(device) >= 90
    kernel[grid](*args, **constants, PDL=pdl, num_warps=warps, num_stages=stages, launch_pdl=pdl)


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


# ---- the loads of a product, which stream a matrix past a vector


@jit
def load_weights(w, rows, k, offs_k, N, K: tl.constexpr, BLOCK: tl.constexpr):
    """W[rows, k + offs_k], streamed: read once and not kept in the caches. max_contiguous gives a thread eight neighbours, as
    many as it has of a 16-bit x: otherwise 8-bit tiles would go through shared memory to meet x."""
    offs = tl.max_contiguous(tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K + k + offs_k[None, :], [1, 8])
    if K % BLOCK == 0:
        return tl.load(w + offs, eviction_policy="evict_first")
    return tl.load(w + offs, mask=k + offs_k[None, :] < K, other=0, eviction_policy="evict_first")


@jit
def load_vector(x, k, offs_k, K: tl.constexpr, BLOCK: tl.constexpr):
    """x[k + offs_k] as a row. In fp32 in the interpreter, whose own bf16 products are wrong."""
    pointers = x + k + offs_k[None, :]
    tile = tl.load(pointers) if K % BLOCK == 0 else tl.load(pointers, mask=k + offs_k[None, :] < K, other=0.0)
    return tile.to(tl.float32) if EMULATED else tile


# ---- launch sizes


def nearest(table: dict, key: int):
    """The entry with the largest key that is not above this one."""
    return table[max(k for k in table if k <= key)]


@dataclass(frozen=True)
class Launch:
    """How a product is cut up at T = 1: each program takes `rows` rows of W, `block` columns at a time."""

    rows: int
    block: int
    warps: int


@dataclass(frozen=True)
class SplitLaunch:
    """How the cache is cut up: into at most `programs` chunks per SM, read in tiles of `block` positions."""

    programs: int
    block: int
    warps: int
    stages: int
    least: int  # up to this many positions there is one chunk


# By compute capability, bytes per weight, op and columns of W; where a number is not listed, the nearest below it is taken.
# To tune for another card: `python bench.py --tune` times the candidates for the shapes of a model and prints such a table.
OPS = ("rmsnorm_qkv_rope", "linear_add", "rmsnorm_swiglu", "rmsnorm_linear")
LAUNCHES = {
    0: {1: dict.fromkeys(OPS, {0: Launch(64, 1024, 4)})},  # the interpreter: as few programs as possible
    80: {1: dict.fromkeys(OPS, {0: Launch(4, 2048, 4)}), 2: dict.fromkeys(OPS, {0: Launch(2, 2048, 4)})},
    90: {
        1: {
            "rmsnorm_qkv_rope": {
                0: Launch(2, 1024, 4),
                4096: Launch(4, 2048, 2),
                5120: Launch(4, 8192, 4),
                8192: Launch(4, 4096, 4),
            },
            "linear_add": {
                0: Launch(4, 1024, 4),
                2048: Launch(4, 1024, 2),
                2560: Launch(4, 2048, 2),
                4096: Launch(4, 2048, 4),
                5120: Launch(8, 2048, 2),
                5504: Launch(4, 2048, 2),
                5632: Launch(2, 4096, 2),
                6912: Launch(4, 4096, 4),
                8192: Launch(4, 4096, 8),
                11008: Launch(8, 1024, 4),
                13824: Launch(2, 8192, 8),
                14336: Launch(16, 2048, 4),
                28672: Launch(8, 4096, 4),
            },
            "rmsnorm_swiglu": {
                0: Launch(16, 1024, 2),
                4096: Launch(8, 2048, 4),
                5120: Launch(4, 2048, 4),
                8192: Launch(4, 4096, 4),
            },
            "rmsnorm_linear": {0: Launch(8, 1024, 2), 4096: Launch(4, 2048, 4), 5120: Launch(4, 8192, 4)},
        },
        2: {
            "rmsnorm_qkv_rope": {
                0: Launch(4, 2048, 2),
                4096: Launch(4, 4096, 4),
                5120: Launch(2, 8192, 4),
                8192: Launch(4, 8192, 8),
            },
            "linear_add": {
                0: Launch(4, 1024, 4),
                2048: Launch(2, 1024, 4),
                2560: Launch(4, 2048, 4),
                2752: Launch(8, 1024, 4),
                4096: Launch(4, 2048, 8),
                5120: Launch(4, 4096, 8),
                5632: Launch(2, 2048, 4),
                6912: Launch(4, 4096, 16),
                8192: Launch(2, 1024, 2),
                11008: Launch(4, 4096, 8),
                13824: Launch(2, 2048, 4),
                14336: Launch(2, 1024, 4),
            },
            "rmsnorm_swiglu": {
                0: Launch(4, 1024, 4),
                4096: Launch(4, 2048, 8),
                5120: Launch(2, 4096, 8),
                8192: Launch(4, 4096, 16),
            },
            "rmsnorm_linear": {
                0: Launch(4, 1024, 4),
                4096: Launch(4, 4096, 4),
                5120: Launch(4, 4096, 8),
                8192: Launch(4, 8192, 8),
            },
        },
    },
}


class FewLaunch(NamedTuple):
    """How a product of a few tokens is cut up: each program takes `rows` rows of W, each warp `steps` times 64 bytes of a row
    at a time, with `ahead` such tiles in flight. `lanes` threads load neighbouring bytes of a row."""

    rows: int
    warps: int
    steps: int
    lanes: int
    ahead: int


# By compute capability and bytes per weight as above, then tokens (padded to 8 or 16), op, and the exact number of columns; 0
# stands for all that are not listed. None is the library: where it was faster, and for 16-bit weights on cards that were not
# measured. Not for 8-bit weights: where the library needs them decoded, it moves five times the bytes; where it multiplies e4m3
# as it is, it was slower on the H200, except for 70B's matrices with 9 to 16 tokens.
FEW_8_BIT = {
    8: dict.fromkeys(OPS, {0: FewLaunch(16, 4, 2, 8, 4)}),
    16: dict.fromkeys(OPS, {0: FewLaunch(16, 4, 4, 8, 1)}),
}
LIBRARY = {tokens: dict.fromkeys(OPS, {0: None}) for tokens in (8, 16)}
FEW_LAUNCHES = {
    0: {1: {tokens: dict.fromkeys(OPS, {0: FewLaunch(64, 2, 4, 8, 1)}) for tokens in (8, 16)}},
    80: {1: FEW_8_BIT, 2: LIBRARY},
    90: {
        1: {
            8: {
                "rmsnorm_qkv_rope": {0: FewLaunch(16, 4, 2, 8, 4), 4096: FewLaunch(16, 4, 2, 8, 2)},
                "linear_add": {
                    0: FewLaunch(16, 4, 2, 8, 4),
                    5632: FewLaunch(16, 8, 4, 8, 1),
                    11008: FewLaunch(16, 8, 4, 8, 2),
                    14336: FewLaunch(16, 8, 4, 8, 2),
                    28672: FewLaunch(16, 8, 2, 8, 2),
                },
                "rmsnorm_swiglu": {
                    0: FewLaunch(16, 4, 2, 8, 4),
                    4096: FewLaunch(16, 4, 2, 8, 2),
                    8192: FewLaunch(16, 4, 4, 8, 1),
                },
                "rmsnorm_linear": {0: FewLaunch(16, 4, 4, 8, 2)},
            },
            16: {
                "rmsnorm_qkv_rope": {0: FewLaunch(32, 4, 2, 8, 2), 8192: None},
                "linear_add": {
                    0: FewLaunch(16, 8, 4, 8, 1),
                    2048: FewLaunch(32, 4, 4, 8, 1),
                    4096: FewLaunch(32, 8, 4, 8, 1),
                    5120: FewLaunch(32, 4, 4, 8, 1),
                    5632: FewLaunch(16, 8, 4, 8, 2),
                    8192: None,
                    13824: FewLaunch(16, 4, 4, 4, 2),
                    28672: None,
                },
                "rmsnorm_swiglu": {0: FewLaunch(32, 4, 2, 8, 2), 8192: None},
                "rmsnorm_linear": {0: FewLaunch(32, 4, 2, 8, 1), 8192: None},
            },
        },
        2: {
            8: {
                "rmsnorm_qkv_rope": {0: FewLaunch(16, 4, 4, 8, 2)},
                "linear_add": {
                    0: FewLaunch(16, 4, 4, 8, 2),
                    5632: FewLaunch(16, 8, 4, 8, 2),
                    11008: FewLaunch(16, 8, 4, 8, 2),
                    14336: FewLaunch(16, 8, 4, 8, 2),
                    28672: FewLaunch(16, 8, 2, 8, 2),
                },
                "rmsnorm_swiglu": {0: FewLaunch(16, 4, 4, 8, 2)},
                "rmsnorm_linear": {0: FewLaunch(16, 4, 4, 8, 2)},
            },
            16: {
                "rmsnorm_qkv_rope": {0: None, 4096: FewLaunch(32, 4, 2, 8, 2)},
                "linear_add": {
                    0: None,
                    4096: FewLaunch(16, 8, 4, 8, 2),
                    11008: FewLaunch(16, 8, 4, 8, 2),
                    14336: FewLaunch(16, 8, 4, 8, 2),
                },
                "rmsnorm_swiglu": {0: None, 4096: FewLaunch(32, 4, 2, 8, 2)},
                "rmsnorm_linear": {0: None, 4096: FewLaunch(32, 4, 2, 8, 2)},
            },
        },
    },
    100: {1: FEW_8_BIT, 2: LIBRARY},
}

# By compute capability and query rows per key/value head. On Hopper, several rows are few_rows.py's, except in fp32 and for
# heads of more than 128.
SPLIT_LAUNCHES = {
    0: {1: SplitLaunch(4, 32, 4, 1, 0)},
    80: {1: SplitLaunch(4, 8, 1, 1, 0), 2: SplitLaunch(2, 64, 4, 2, 0)},
    90: {1: SplitLaunch(4, 8, 1, 1, 0), 2: SplitLaunch(1, 64, 4, 2, 256), 5: SplitLaunch(1, 128, 8, 1, 256)},
}

# The same for few_rows.py, whose tiles are 16 positions per warp.
FEW_ROWS = {90: SplitLaunch(1, 64, 4, 1, 128)}
