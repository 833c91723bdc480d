"""How ggml, llama.cpp's library of tensors, stores matrices that it has quantised, for step 5 of loading (see
loading/checkpoint.py): as blocks, each of the codes and scales of neighbouring columns. A row of
TYPES says how one type is read as formats.Quantised; bits/others.py has the formats that keep it.
Sources: ggml-common.h and ggml-quants.c."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bits.others import EXACT
from formats import Quantised, Tensors
from loading.quantised import Scheme

# Each of the following functions splits blocks, uint8 [N, B, bytes], into the fields of Quantised:
# codes [N, B, ...] in the order of the columns, the other fields [N, B, groups]. Eight codes are
# handled at once, as the bytes of an int64: a mask clears the bits that a shift has moved from one
# byte to the next.

ONES = 0x0101010101010101


def _eights(raw: Tensor, run: int) -> Tensor:
    """Eight bytes in each int64: [N, B, n * run] to [N, B, n, 1, run / 8]."""
    # Copying two bytes at a time is faster than one
    pairs = raw.view(torch.int16).clone(memory_format=torch.contiguous_format)
    return pairs.view(torch.int64).view(*raw.shape[:2], -1, 1, run // 8)


def _nibbles(raw: Tensor, run: int) -> Tensor:
    """Bytes [N, B, n * run] to codes, int64 [N, B, n, 2, run / 8]: the low nibbles of each run,
    then its high ones."""
    words = _eights(raw, run)
    return torch.cat((words & 15 * ONES, words >> 4 & 15 * ONES), -2)


def _high_bits(raw: Tensor, run: int, bits: int) -> Tensor:
    """Bytes [N, B, n * run] to int64 [N, B, n, 8 / bits, run / 8]: from each run the lowest bits of
    all bytes, then the next ones, moved to bit 4 and up."""
    shifts = torch.arange(0, 8, bits, device=raw.device)[:, None]
    return (_eights(raw, run) >> shifts & (2**bits - 1) * ONES) << 4


def _five_bits(raw: Tensor) -> Tensor:
    """int8 codes of 32 columns, from 4 bytes with the fifth bits, the lowest first, and 16 bytes of
    nibbles."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    # The eight bits of each byte, as bytes
    table = (bits << 4).to(torch.uint8).view(torch.int64).to(raw.device)
    high = table[raw[..., :4].int(), 0].view(*raw.shape[:2], 1, 2, 2)
    return (_nibbles(raw[..., 4:], 16) | high).view(torch.int8)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The half at a byte of each block, as float32 [N, B, 1]."""
    return blocks.view(torch.float16)[..., at // 2, None].float()


def _k_scales(b: Tensor) -> Tensors:
    """Scale, minimum, and their parts [N, B, 8], in Q4_K and Q5_K. The parts have 6 bits each, in
    12 bytes. The first four parts of the scale, and of the minimum, are the low 6 bits of a byte
    each. The last four have their low 4 bits in the last bytes, and their 2 high bits at the top of
    the first bytes."""
    low_scale, low_minimum, last = b[..., 4:16].split(4, -1)
    scale = torch.cat((low_scale & 63, last & 15 | low_scale >> 6 << 4), -1)
    minimum = torch.cat((low_minimum & 63, last >> 4 | low_minimum >> 6 << 4), -1)
    return _half(b, 0), -_half(b, 2), scale, minimum


def _q5_k(b: Tensor):
    # [N, B, 8, 4]
    codes = _nibbles(b[..., 48:], 32).flatten(2, 3) | _high_bits(b[..., 16:48], 32, 1).flatten(2, 3)
    return codes.view(torch.int8), *_k_scales(b)


def _q6_k(b: Tensor):
    """Each half of a block has 64 bytes of low nibbles, and 32 bytes of high bits, two a code: byte
    i has those of columns i, i + 32, i + 64 and i + 96."""
    low = _nibbles(b[..., :128], 64).view(*b.shape[:2], 2, 4, 4)
    codes = low | _high_bits(b[..., 128:192], 32, 2)
    parts = b[..., 192:208].view(torch.int8)
    return codes.view(torch.int8) - 32, _half(b, 208), None, parts, torch.zeros_like(parts)


def _q2_k(b: Tensor):
    """Each half of a block has 32 bytes of codes of two bits: byte i has those of columns i, i + 32,
    i + 64 and i + 96. The first 16 bytes have a part of the scale and of the minimum each, for 16
    columns."""
    codes = (_high_bits(b[..., 16:80], 32, 2) >> 4).view(torch.int8)
    parts = b[..., :16]
    return codes, _half(b, 80), -_half(b, 82), parts & 15, parts >> 4


def _q3_k(b: Tensor):
    """Two bits of each code as in Q2_K; the third is a bit of the first 32 bytes. For each 16 columns
    the scale has a part of 6 bits: the low 4 are a nibble of bytes 96 to 103, the high 2 are in bytes
    104 to 107."""
    low = _high_bits(b[..., 32:96], 32, 2) >> 4
    high = _high_bits(b[..., :32], 32, 1).view(low.shape) >> 2
    low_part = torch.cat((b[..., 96:104] & 15, b[..., 96:104] >> 4), -1)
    high_part = torch.cat([b[..., 104:108] >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    parts = (low_part | high_part << 4).view(torch.int8) - 32
    codes = (low | high).view(torch.int8) - 4
    return codes, _half(b, 108), None, parts, torch.zeros_like(parts)


# The values that the codes of IQ4_NL and IQ4_XS stand for
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _levels(raw: Tensor) -> Tensor:
    """int8 of 32 columns, from each 16 bytes of nibbles."""
    table = torch.tensor(LEVELS, dtype=torch.int8, device=raw.device)
    return table[_nibbles(raw, 16).view(torch.uint8).int()]


def _iq4_xs(b: Tensor):
    """For each 32 columns the scale has a part of 6 bits: the low 4 are a nibble of bytes 4 to 7,
    the high 2 are in bytes 2 and 3."""
    groups = torch.arange(8, device=b.device)
    low = b[..., 4:8].repeat_interleave(2, -1) >> groups % 2 * 4 & 15
    high = b.view(torch.int16)[..., 1, None] >> 2 * groups & 3
    parts = (low + 16 * high - 32).to(torch.int8)
    parts = parts.repeat_interleave(2, -1)  # for each 16 columns, see Parts
    return _levels(b[..., 8:]), _half(b, 0), None, parts, torch.zeros_like(parts)


# ---- the types


class Type(NamedTuple):
    """How a tensor's values are stored."""

    name: str
    block: int  # values in a block; more than 1 if they are quantised
    nbytes: int  # of a block
    split: Callable[[Tensor], tuple] | None = None  # one of the functions above

    @property
    def scheme(self) -> Scheme | None:
        """How its codes stand for weights. Returns None for floats."""
        if not self.split:
            return None
        kept_by = tuple(format for format, kept in EXACT.items() if self.name in kept)
        return Scheme(self.name, kept_by, Quantised.decoded)

    def read(self, raw: Tensor) -> Quantised:
        """Codes and scales of rows of blocks, uint8 [N, bytes] as they are in the file, on any
        device."""
        N = len(raw)
        codes, scale, minimum, *parts = self.split(raw.view(N, -1, self.nbytes))
        flat = lambda t: t.reshape(N, -1)
        if minimum is not None:
            minimum = flat(minimum)
        return Quantised(flat(codes), flat(scale), minimum, tuple(map(flat, parts)) or None)


def _q4_0(b: Tensor):
    return _nibbles(b[..., 2:], 16).view(torch.int8) - 8, _half(b, 0), None


def _q4_1(b: Tensor):
    return _nibbles(b[..., 4:], 16).view(torch.int8), _half(b, 0), _half(b, 2)


def _q5_0(b: Tensor):
    return _five_bits(b[..., 2:]) - 16, _half(b, 0), None


def _q5_1(b: Tensor):
    return _five_bits(b[..., 4:]), _half(b, 0), _half(b, 2)


def _q8_0(b: Tensor):
    return _eights(b[..., 2:], 32).view(torch.int8), _half(b, 0), None


def _q4_k(b: Tensor):
    return _nibbles(b[..., 16:], 32).view(torch.int8), *_k_scales(b)


def _iq4_nl(b: Tensor):
    return _levels(b[..., 2:]), _half(b, 0), None


# By their numbers in files. llama.cpp takes Q5_0 instead of Q4_K for rows that are no multiple of
# 256
TYPES = {
    0: Type("F32", 1, 4),
    1: Type("F16", 1, 2),
    30: Type("BF16", 1, 2),
    2: Type("Q4_0", 32, 18, _q4_0),
    3: Type("Q4_1", 32, 20, _q4_1),
    6: Type("Q5_0", 32, 22, _q5_0),
    7: Type("Q5_1", 32, 24, _q5_1),
    8: Type("Q8_0", 32, 34, _q8_0),
    10: Type("Q2_K", 256, 84, _q2_k),
    11: Type("Q3_K", 256, 110, _q3_k),
    12: Type("Q4_K", 256, 144, _q4_k),
    13: Type("Q5_K", 256, 176, _q5_k),
    14: Type("Q6_K", 256, 210, _q6_k),
    20: Type("IQ4_NL", 32, 18, _iq4_nl),
    23: Type("IQ4_XS", 256, 136, _iq4_xs),
}
# Those that are not supported
OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
