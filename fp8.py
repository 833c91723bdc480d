"""8-bit floats kept in int8 tensors: decode inside a kernel.

Both formats are decoded to a half float by moving bits, so that any GPU can do it:

    e5m2  sign, 5 exponent bits, 2 of mantissa: the upper byte of a half float
    e4m3  sign, 4 exponent bits, 3 of mantissa: its bits under a half's sign are the value times 2^-8, subnormals too
"""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

try:
    import triton
    import triton.language as tl
except ImportError:  # not on this system: the reference ops run without it
    triton = tl = None


def jit(function):
    """triton.jit where there is Triton."""
    return triton.jit(function) if triton else function


@jit
def decode_tile(tile, FORMAT: tl.constexpr):
    """A tile of weights as it is stored to floats: themselves without a format, else what they stand for over GAIN[FORMAT]."""
    if FORMAT == "e4m3":
        bits = tile.to(tl.int16)
        tile = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)
    if FORMAT == "e5m2":
        tile = (tile.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    return tile
