"""Step 5 of loading (see loading/checkpoint.py): how other programs store the matrices that they have
quantised. GGUF files hold blocks of ggml, llama.cpp's library of tensors; safetensors follow one of
several schemes. Both are read as formats.Quantised, which the formats in bits/others.py keep
exactly.

ggml's types, and how large their blocks are, stand in loading/gguf.py. Sources: ggml-common.h and
ggml-quants.c."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import fp8
from bits import codes4, others
from formats import Format, Quantised, Tensors
from loading import gguf
from loading.files import Fields
from loading.headers import Wanted

# ---- blocks of ggml

# Weights that are decoded at a time. They fit into a CPU's caches, which halves the time
AT_ONCE = 1 << 20


def from_blocks(type: gguf.Type, raw: Tensor) -> Quantised:
    """Codes and scales of rows of blocks, uint8 [N, bytes] as they are in the file, on any
    device."""
    N = len(raw)
    codes, scale, minimum, *parts = SPLIT[type.name](raw.view(N, -1, type.nbytes))
    flat = lambda t: t.reshape(N, -1)
    if minimum is not None:
        minimum = flat(minimum)
    return Quantised(flat(codes), flat(scale), minimum, tuple(map(flat, parts)) or None)


def checked(q: Quantised) -> Quantised:
    """Returns what it is given. Raises ValueError if a scale or a minimum is NaN or infinite."""
    if not all(t is None or torch.isfinite(t).all() for t in (q.scale, q.minimum)):
        raise ValueError("a scale that is NaN or infinite")
    return q


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


SPLIT = {
    "Q4_0": lambda b: (_nibbles(b[..., 2:], 16).view(torch.int8) - 8, _half(b, 0), None),
    "Q4_1": lambda b: (_nibbles(b[..., 4:], 16).view(torch.int8), _half(b, 0), _half(b, 2)),
    "Q5_0": lambda b: (_five_bits(b[..., 2:]) - 16, _half(b, 0), None),
    "Q5_1": lambda b: (_five_bits(b[..., 4:]), _half(b, 0), _half(b, 2)),
    "Q8_0": lambda b: (_eights(b[..., 2:], 32).view(torch.int8), _half(b, 0), None),
    "Q4_K": lambda b: (_nibbles(b[..., 16:], 32).view(torch.int8), *_k_scales(b)),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": lambda b: (_levels(b[..., 2:]), _half(b, 0), None),
    "IQ4_XS": _iq4_xs,
}


# ---- schemes of safetensors, as their documents say


class Scheme(NamedTuple):
    """How another program stores a quantised matrix W [N, K], where N is a multiple of 8: as
    several tensors, named like the matrix with another last word than "weight"."""

    name: str
    format: Format  # the one that keeps it exactly
    # From N and K to its tensors in a file, by the last word, codes first
    wanted: Callable[[int, int], dict[str, Wanted]]
    # From these, once they are read, to the whole matrix
    read: Callable[[dict[str, Tensor]], Quantised]
    group: int = -1  # columns that share a scale; -1 if all do
    optional: tuple[str, ...] = ()  # tensors that may be absent, by the last word


# How others have quantised a matrix
Quantisation = gguf.Type | Scheme


def decoded(scheme: Quantisation, q: Quantised) -> Tensor:
    """float32 [N, K]."""
    if isinstance(scheme, gguf.Type):
        return q.decoded()
    tensors = scheme.format.empty(*q.codes.shape, q.codes.device)
    scheme.format.write(q, tensors)
    return scheme.format.decoded(tensors)


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INT32 = (torch.int32,)


def _format_for_groups(group: int) -> Format:
    """The format for groups of `group` columns, a multiple of 32, or of a whole row if it is -1.
    One group may become several in the format."""
    sizes = [size for size in (128, 64, 32) if group == -1 or group % size == 0]
    return others.WITH_ZEROS[sizes[0]]


def _with_zeros(format: Format, codes: Tensor, scale: Tensor, zero: Tensor) -> Quantised:
    """Rows with the format's groups, for which scales and zero points [N, G] are repeated."""
    groups = codes.shape[1] // format.group
    return Quantised(codes, others.spread(scale.float(), groups), zero=others.spread(zero, groups))


def _gemm(group: int, N: int, K: int, codes: tuple[int, int], bits: int = 4) -> dict[str, Wanted]:
    """The tensors of AWQ and GPTQ."""
    G = max(1, K // group)
    return {
        "qweight": Wanted(INT32, [codes]),
        "qzeros": Wanted(INT32, [(G, N * bits // 32)]),
        "scales": Wanted(FLOATS, [(G, N)]),
    }


def awq(group: int) -> Scheme:
    """AutoAWQ's "gemm": W^T, with eight neighbouring columns in each word, in the order 0, 2, 4, 6,
    1, 3, 5, 7."""
    format = _format_for_groups(group)

    def in_order(words: Tensor) -> Tensor:
        eights = codes4.nibbles(words).unflatten(1, (-1, 8))
        return eights[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1).t()

    def read(t: dict[str, Tensor]) -> Quantised:
        return _with_zeros(format, in_order(t["qweight"]), t["scales"].t(), in_order(t["qzeros"]))

    return Scheme("AWQ", format, lambda N, K: _gemm(group, N, K, (K, N // 8)), read, group)


def gptq(group: int, version_2: bool, bits: int = 4) -> Scheme:
    """GPTQ of 4 or 8 bits without act-order: W^T, with neighbours along K in a word. Zero points
    are stored less 1, in version 2 as they are. A file whose zero points are all in the middle may
    state the wrong version."""
    format = _format_for_groups(group) if bits == 4 else others.Q8_0
    middle = 1 << bits - 1
    ones = 0x11111111 if bits == 4 else 0x01010101

    def unpacked(words: Tensor) -> Tensor:
        if bits == 4:
            return codes4.nibbles(words)
        return words.flatten().view(torch.uint8).view(len(words), -1).short()

    def wanted(N: int, K: int) -> dict[str, Wanted]:
        codes = K * bits // 32, N
        return _gemm(group, N, K, codes, bits) | {"g_idx": Wanted(INT32, [(K,)])}

    def read(t: dict[str, Tensor]) -> Quantised:
        codes = unpacked(t["qweight"].t())
        zero = unpacked(t["qzeros"]).t()
        check_order(t.get("g_idx"), codes.shape[1], zero.shape[1])
        if ((zero == middle - 1).all() | (zero == middle).all()).item():
            zero = torch.full_like(zero, middle)
        elif not version_2:
            # 1 was subtracted in whole words, so a zero point of 0 has borrowed from the next one
            zero = unpacked(t["qzeros"] + ones).t()
        if bits == 8:
            return _without_zeros(codes - others.spread(zero, codes.shape[1]), t["scales"].t())
        return _with_zeros(format, codes, t["scales"].t(), zero)

    return Scheme("GPTQ", format, wanted, read, group, ("g_idx",))


def _without_zeros(codes: Tensor, scale: Tensor) -> Quantised:
    """Rows for others.Q8_0, from codes without a zero point."""
    if codes.min() < -128 or codes.max() > 127:
        raise ValueError("zero points that 8 bits cannot hold: take a symmetric GPTQ or a GGUF")
    return Quantised(
        codes.to(torch.int8), others.spread(scale.float(), codes.shape[1] // others.Q8_0.group)
    )


def check_order(g_idx: Tensor | None, K: int, groups: int) -> None:
    """Raise ValueError unless each group has neighbouring columns."""
    if g_idx is None:
        return
    in_order = torch.arange(K) // (K // groups)
    if not torch.equal(g_idx.cpu(), in_order.int()):
        raise ValueError(
            "columns in act-order, which is not supported: "
            "take a GPTQ without desc_act, an AWQ or a GGUF"
        )


def w4a16(group: int, symmetric: bool) -> Scheme:
    """compressed-tensors' "pack-quantized": W, with eight neighbours along K in a word. Zero
    points, if there are any, are packed along N."""
    format = _format_for_groups(group)

    def wanted(N: int, K: int) -> dict[str, Wanted]:
        G = max(1, K // group)
        tensors = {
            "weight_packed": Wanted(INT32, [(N, K // 8)]),
            "weight_scale": Wanted(FLOATS, [(N, G)]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = Wanted(INT32, [(N // 8, G)])
        tensors["weight_g_idx"] = Wanted(INT32, [(K,)])
        return tensors

    def read(t: dict[str, Tensor]) -> Quantised:
        codes = codes4.nibbles(t["weight_packed"])
        scale = t["weight_scale"]
        check_order(t.get("weight_g_idx"), codes.shape[1], scale.shape[1])
        if symmetric:
            zero = torch.full_like(scale, 8)
        else:
            zero = codes4.nibbles(t["weight_zero_point"].t()).t()
        return _with_zeros(format, codes, scale, zero)

    return Scheme("W4A16", format, wanted, read, group, ("weight_g_idx",))


def fp8_scaled(scale: str, in_blocks: bool) -> Scheme:
    """E4M3 codes and the scales that they are multiplied by, even if those are called
    "weight_scale_inv": one for the matrix, one for each row, or one for each 128 x 128 weights."""

    def wanted(N: int, K: int) -> dict[str, Wanted]:
        if in_blocks:
            of_scale = [(-(-N // 128), -(-K // 128))]
        else:
            of_scale = [(N, 1), (1,), (N,), (1, 1)]
        codes = Wanted((torch.float8_e4m3fn,), [(N, K)])
        return {"weight": codes, scale: Wanted(FLOATS, of_scale)}

    def read(t: dict[str, Tensor]) -> Quantised:
        codes = t["weight"].view(torch.int8)
        factor = t[scale].float()
        if ((codes & 0x7F) == 0x7F).any():
            raise ValueError("codes of NaN")
        if in_blocks:
            return Quantised(codes, factor.repeat_interleave(128, 0)[: len(codes)])
        return Quantised(codes, factor.reshape(-1, 1).expand(len(codes), 1))

    if in_blocks:
        return Scheme("FP8", others.E4M3_128, wanted, read, 128)
    return Scheme("FP8", fp8.E4M3, wanted, read)


# ---- which scheme it is

INSTEAD = "take the original model, in fp8 or int4 if you like, or a GGUF file"


def scheme_of(f: Fields) -> Scheme | None:
    """How others have quantised the matrices of a folder, by the fields of its config.json. Returns
    None if they are floats. Raises ValueError for a scheme that is not supported."""
    if f.get("quantization"):
        raise ValueError(f"{f.file}: quantised for mlx: {INSTEAD}")
    q = f.sub("quantization_config")
    alone = f.file.with_name("hf_quant_config.json")
    if not q and f.file.suffix == ".json" and alone.is_file():  # as NVIDIA's first files have it
        q = Fields(alone).sub("quantization")
        q["quant_method"] = "modelopt"
    if not q:
        return None
    method = q.get("quant_method")
    if method == "compressed-tensors":
        method = q.get("format")
        groups = q.sub("config_groups")
        weights = [groups.sub(name).sub("weights") for name in groups]
        if any(of_group != weights[0] for of_group in weights):
            raise ValueError(f"{f.file}: quantised with several kinds of config_groups: {INSTEAD}")
        q.update(weights[0] if weights else {})
    if q.sub("transform_config"):
        raise ValueError(f"{f.file}: quantised as {method} with transforms: {INSTEAD}")
    # A pattern that begins with "-:" names tensors that are not quantised
    if any(not pattern.startswith("-:") for pattern in q.sub("dynamic")):
        raise ValueError(f"{f.file}: quantised as {method} with dynamic settings: {INSTEAD}")
    group = q.number("group_size", -1, 1 << 20, -1)
    if group == 0 or group > 0 and group % 32:
        raise ValueError(
            f"{f.file}: group_size is {group}; it must be -1 or a multiple of 32: {INSTEAD}"
        )

    def only(**fields) -> None:
        for name, allowed in fields.items():
            if q.get(name) not in allowed:
                raise ValueError(
                    f"{f.file}: quantised as {method} with {name} {q.get(name)!r}: {INSTEAD}"
                )

    if method == "awq":
        only(bits=(4,), version=(None, "gemm", "GEMM"), zero_point=(None, True))
        return awq(group)
    if method == "gptq":
        only(bits=(4, 8), checkpoint_format=(None, "", "gptq", "gptq_v2"))
        return gptq(group, q.get("checkpoint_format") == "gptq_v2", q.number("bits", 4, 8))
    if method == "modelopt":
        only(quant_algo=("FP8", "FP8_PER_CHANNEL_PER_TOKEN"))
        return fp8_scaled("weight_scale", in_blocks=False)
    if method == "fbgemm_fp8":
        return fp8_scaled("weight_scale", in_blocks=False)
    if method == "fp8":
        only(fmt=(None, "e4m3"), weight_block_size=(None, [128, 128]))
        if q.get("weight_block_size"):
            return fp8_scaled("weight_scale_inv", in_blocks=True)
        return fp8_scaled("weight_scale", in_blocks=False)
    if method == "pack-quantized":
        only(num_bits=(4,), type=("int",), strategy=("group", "channel"))
        return w4a16(group, q.get("symmetric") is not False)
    if method == "float-quantized":
        only(num_bits=(8,), type=("float",), strategy=("tensor", "channel", "block"))
        only(block_structure=(None, [128, 128]))
        return fp8_scaled("weight_scale", q.get("strategy") == "block")
    raise ValueError(f"{f.file}: quantised as {method}, which is not supported: {INSTEAD}")


# ---- the format that keeps it


def format_for(
    schemes: set[Quantisation | None], columns: int, most_bits: int = 8
) -> Format | None:
    """The smallest format that keeps matrices of all of these schemes exactly, side by side and cut
    to `columns` columns. None stands for floats. Returns None if there is no such format."""

    def fits(format: Format) -> bool:
        if columns % format.group:
            return False
        return format.bits <= most_bits or format.group == 1

    if None in schemes:
        return None
    of_safetensors = [scheme for scheme in schemes if isinstance(scheme, Scheme)]
    if of_safetensors:  # it has one format, and no other
        candidates = [scheme.format for scheme in of_safetensors if len(schemes) == 1]
    else:
        types = {type.name for type in schemes}
        candidates = [format for format, kept in others.EXACT.items() if types <= kept]
    return next(filter(fits, candidates), None)
