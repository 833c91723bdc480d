"""8-bit floats kept in int8 tensors: encode and decode in torch; encode, decode and multiply inside a kernel.

Both formats are decoded by moving bits into a half float, so that any GPU and any CPU can do it; GPUs from sm_89 on convert
e4m3 by an instruction of their own, "e4m3 native" to kernels:

    e5m2  sign, 5 exponent bits, 2 of mantissa: the upper byte of a half float
    e4m3  sign, 4 exponent bits, 3 of mantissa: under a half's sign, these bits are the value times 2^-8, subnormals too

A matrix has one scale a row. The codes for NaN and infinity are never written: encode saturates.
"""

from __future__ import annotations  # tl.constexpr is not evaluated where there is no Triton

import torch
from torch import Tensor

from launch import INTERPRETED, jit, tl, triton

EMULATED = tl and tl.constexpr(INTERPRETED)  # the same for kernels: the interpreter knows no PTX
TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
GAIN = {"e4m3": 256.0, "e5m2": 1.0}  # what decoded halves are to be multiplied with
NOT_FINITE = {"e4m3": 0x7F, "e5m2": 0x7C}  # from here on, the bits under the sign mean NaN or infinity
TOP = {"e4m3": 448.0, "e5m2": 1.75}  # what a row's largest is scaled to, as a half 1.75 in both: products stay far from 65504


def constexpr_function(function):
    """A function of constants that a kernel calls while it is compiled."""
    return triton.constexpr_function(function) if triton else function


def round_to(x: Tensor, form: str) -> Tensor:
    """The nearest codes (ties to even) as int8; magnitudes beyond the largest become the largest."""
    return x.float().clamp(-LARGEST[form], LARGEST[form]).to(TYPES[form]).view(torch.int8)


def halves(codes: Tensor, form: str, space: Tensor | None = None) -> Tensor:
    """int8 codes to float16: the values they stand for over GAIN, exactly; in int16 space of the same shape, if given."""
    bits = codes.to(torch.int16) if space is None else space.copy_(codes)
    bits = bits.bitwise_left_shift_(8) if form == "e5m2" else bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return bits.view(torch.float16)


def encode(weights: Tensor, form: str, codes: Tensor | None = None, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[N, K] to int8 codes [N, K] and float32 scales [N], in the places given for them. Of a few scales between the smallest
    that lets a row's largest magnitude fit and its double, each row takes the one with the least squared error. Raises
    ValueError on NaN or inf."""
    codes = torch.empty(weights.shape, dtype=torch.int8, device=weights.device) if codes is None else codes
    scales = torch.empty(len(weights), dtype=torch.float32, device=weights.device) if scales is None else scales
    rows_at_once = max(1, (1 << 23) // weights.shape[1])
    for rows, code, scale in zip(*(t.split(rows_at_once) for t in (weights, codes, scales))):
        rows = rows.float()
        smallest = rows.abs().amax(1) / TOP[form]
        if not torch.isfinite(smallest).all():
            raise ValueError("NaN or inf cannot be written as an 8-bit float")
        smallest.clamp_(min=1e-30)
        least = torch.full_like(smallest, torch.inf)
        for step in (0.0, 0.25, 0.5, 0.75):
            tried = smallest * 2**step
            written = round_to(rows / tried[:, None], form)
            error = (decode(written, tried, form) - rows).square().sum(1)
            better = error < least
            least[better], scale[better], code[better] = error[better], tried[better], written[better]
    return codes, scales


def decode(codes: Tensor, scales: Tensor, form: str) -> Tensor:
    """Codes [N, K] and scales [N] to float32 [N, K]."""
    return halves(codes, form).float().mul_(GAIN[form] * scales[:, None])


def check(codes: Tensor, scales: Tensor, form: str) -> None:
    """Raise ValueError for what encode never writes: codes of NaN or infinity, scales that are not positive and finite."""
    if not ((scales > 0) & (scales < torch.inf)).all():
        raise ValueError("scales that are not positive and finite")
    if torch.stack([(rows & 0x7F).max() for rows in codes.split(512)]).max() >= NOT_FINITE[form]:
        raise ValueError("codes of NaN or infinity")


@jit
def decode_tile(tile, FORMAT: tl.constexpr):
    """A tile of weights as it is stored to floats: itself without a format, else `halves`, or the conversion that GPUs have
    from sm_89 on."""
    if FORMAT == "e4m3":
        tile = ((tile.to(tl.int16) << 7) & ~0x4000).to(tl.float16, bitcast=True)
    if FORMAT == "e4m3 native":
        tile = tile.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if FORMAT == "e5m2":
        tile = (tile.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    return tile


@jit
def encode_tile(x):
    """Floats to codes of e4m3, as `round_to` does: nearest, ties to even, magnitudes beyond 448 as 448; NaN as 0x7f."""
    a = tl.minimum(tl.abs(x), 448.0)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # the biases are 127 and 7
    subnormal = (a + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # the last place of the sum is 2^-9, their unit
    code = tl.where(a < 0.015625, subnormal, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(x == x, code | sign, 0x7F).to(tl.int8)


@jit
def rescale(y, scale, FORMAT: tl.constexpr):
    """A product with decoded tiles to the product with the weights; scale is that of its rows."""
    if FORMAT == "e4m3":
        return y * (scale * 256.0)
    return y * scale


# PTX: two codes in the lower or the upper half of register SOURCE to two halves in p. A permutation puts each code above a zero
# byte; the bits of e4m3 then move one place to the right under their sign.
_TWO_HALVES = {
    "e5m2": ("prmt.b32 p, SOURCE, 0, 0x1404;", "prmt.b32 p, SOURCE, 0, 0x3424;"),
    "e4m3": tuple(
        f"prmt.b32 p, SOURCE, 0, {order}; shr.u32 q, p, 1; and.b32 q, q, 0x3f803f80; and.b32 p, p, 0x80008000; or.b32 p, p, q;"
        for order in ("0x1404", "0x3424")
    ),
    "e4m3 native": tuple(f"mov.b32 {{a, b}}, SOURCE; cvt.rn.f16x2.e4m3x2 p, {half};" for half in "ab"),
}


@constexpr_function
def products_asm(FORMAT):
    """PTX for tl.inline_asm_elementwise: eight weights times eight halves, added in half precision: a float, and a zero."""
    weights, halves, lines = 2, 4, []  # the numbers of the first registers; 0 and 1 are the sum and the zero
    for pair in range(4):
        lines.append(_TWO_HALVES[FORMAT][pair % 2].replace("SOURCE", f"${weights + pair // 2}"))
        lines.append(f"fma.rn.f16x2 h, p, ${halves + pair}, h;" if pair else f"mul.rn.f16x2 h, p, ${halves};")
    lines.append("mov.b32 {a, b}, h; add.f16 a, a, b; cvt.f32.f16 $0, a; mov.b32 $1, 0;")
    return "{ .reg .b16 a, b; .reg .b32 h, p, q; " + " ".join(lines) + " }"


PRODUCTS_REGISTERS = tl and tl.constexpr(
    "=&r,=&r,r,r,r,r,r,r"
)  # the constraints that go with it: sum and zero, weights, halves
