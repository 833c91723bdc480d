"""The blocks in which ggml, llama.cpp's library of tensors, stores quantised matrices: as codes and scales, as values.

Sources: ggml-common.h and ggml-quants.c. The numbers of these types, and how large a block is, are in ggml.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

import ggml

AT_ONCE = 1 << 20  # weights decoded at a time: what a CPU's caches hold takes half the time


class Blocks(NamedTuple):
    """A matrix W [N, K] as codes, in groups of neighbouring columns: W = scale * code + minimum. In float32 scales and
    products are exact (a half times 6 or 8 bits, times 4 to 8), so that W is what ggml decodes, bit for bit."""

    codes: Tensor  # [N, K]: uint8 of 0 to 15, or int8
    scale: Tensor  # float32 [N, K / group]
    minimum: Tensor | None  # the same; None: zero

    def decoded(self) -> Tensor:
        """float32 [N, K]."""
        N, groups = self.scale.shape
        values = self.codes.view(N, groups, -1) * self.scale[..., None]
        if self.minimum is not None:
            values += self.minimum[..., None]
        return values.view(N, -1)


def blocks(kind: ggml.Type, raw: Tensor) -> Blocks:
    """Rows of blocks as read, uint8 [N, bytes], on any device, to codes and scales. Raises ValueError for a scale or
    minimum that is NaN or infinite."""
    N = len(raw)
    codes, *scales = SPLIT[kind.name](raw.view(N, -1, kind.nbytes))
    scales = [None if t is None else t.reshape(N, -1) for t in scales]
    if not all(t is None or torch.isfinite(t).all() for t in scales):
        raise ValueError("a scale that is NaN or infinite")
    return Blocks(codes.reshape(N, -1), *scales)


def decoded(kind: ggml.Type, raw: Tensor) -> Tensor:
    """Rows of blocks as read to float32 [N, K]. Raises ValueError as `blocks` does."""
    K = raw.shape[1] // kind.nbytes * kind.block
    values = torch.empty(len(raw), K, device=raw.device)
    rows = max(1, AT_ONCE // K)
    for place, part in zip(values.split(rows), raw.split(rows)):
        place.copy_(blocks(kind, part).decoded())
    return values


# Each takes blocks, uint8 [N, B, bytes], to codes [N, B, ...] in the order of the columns, and to float32 scales and
# minimums [N, B, groups]. Eight codes are handled at once, as the bytes of an int64: a mask clears what a shift moved
# from one byte to the next.

ONES = 0x0101010101010101


def _words(quants: Tensor, run: int) -> Tensor:
    """Bytes [N, B, n * run] to int64 [N, B, n, 1, run / 8]."""
    pairs = quants.view(torch.int16).contiguous()  # faster than a byte at a time
    return pairs.view(torch.int64).view(*quants.shape[:2], -1, 1, run // 8)


def _nibbles(quants: Tensor, run: int) -> Tensor:
    """Bytes [N, B, n * run] to codes, int64 [N, B, n, 2, run / 8]: of each run, the low nibbles, then the high ones."""
    words = _words(quants, run)
    return torch.cat((words & 15 * ONES, words >> 4 & 15 * ONES), -2)


def _high_bits(quants: Tensor, run: int, bits: int) -> Tensor:
    """Bytes [N, B, n * run] to int64 [N, B, n, 8 / bits, run / 8]: of each run, the lowest bits of each byte first, in
    the place of bits 4 and up."""
    shifts = torch.arange(0, 8, bits, device=quants.device)[:, None]
    return (_words(quants, run) >> shifts & (2**bits - 1) * ONES) << 4


def _fifth_bits(quants: Tensor) -> Tensor:
    """32 bits [N, B, 4], one for each column from the lowest up, to int64 [N, B, 1, 2, 2]: 16 times the bit."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    table = (bits << 4).to(torch.uint8).view(torch.int64).to(quants.device)  # eight bits of each byte
    return table[quants.int(), 0].view(*quants.shape[:2], 1, 2, 2)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The half at a byte of each block, as float32 [N, B, 1]."""
    return blocks.view(torch.float16)[..., at // 2, None].float()


def _q4_0(b: Tensor):
    d = _half(b, 0)
    return _nibbles(b[..., 2:], 16).view(torch.uint8), d, -8 * d  # d (q - 8)


def _q4_1(b: Tensor):
    return _nibbles(b[..., 4:], 16).view(torch.uint8), _half(b, 0), _half(b, 2)


def _q5_0(b: Tensor):
    codes = _nibbles(b[..., 6:], 16) | _fifth_bits(b[..., 2:6])
    return codes.view(torch.int8) - 16, _half(b, 0), None


def _q5_1(b: Tensor):
    codes = _nibbles(b[..., 8:], 16) | _fifth_bits(b[..., 4:8])
    return codes.view(torch.int8), _half(b, 0), _half(b, 2)


def _q8_0(b: Tensor):
    return _words(b[..., 2:], 32).view(torch.int8), _half(b, 0), None


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums [N, B, 8] of Q4_K and Q5_K: two halves times 6 bits each, packed in 12 bytes. The first four
    of either are the low 6 bits of a byte; the others have 4 bits in the last bytes, and 2 at the top of the first."""
    low_scale, low_minimum, last = b[..., 4:16].split(4, -1)
    scale = torch.cat((low_scale & 63, last & 15 | low_scale >> 6 << 4), -1)
    minimum = torch.cat((low_minimum & 63, last >> 4 | low_minimum >> 6 << 4), -1)
    return _half(b, 0) * scale, -_half(b, 2) * minimum


def _q4_k(b: Tensor):
    return _nibbles(b[..., 16:], 32).view(torch.uint8), *_k_scales(b)


def _q5_k(b: Tensor):
    codes = _nibbles(b[..., 48:], 32).flatten(2, 3) | _high_bits(b[..., 16:48], 32, 1).flatten(2, 3)  # [N, B, 8, 4]
    return codes.view(torch.int8), *_k_scales(b)


def _q6_k(b: Tensor):
    """Each half of a block: 64 bytes of low nibbles, and 32 bytes of two high bits, those of columns i, i + 32, i + 64
    and i + 96 in byte i."""
    low = _nibbles(b[..., :128], 64).view(*b.shape[:2], 2, 4, 4)
    codes = low | _high_bits(b[..., 128:192], 32, 2)
    return codes.view(torch.int8) - 32, _half(b, 208) * b[..., 192:208].view(torch.int8), None


SPLIT = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
