"""How other programs store the matrices that they have quantised, for step 5 of loading (see
loading/checkpoint.py). All are read as formats.Quantised, which the formats in bits/others.py keep
exactly. Here are the packings of safetensors, a function each, and a row in METHODS for each name
that one has in a config.json; the blocks of GGUF files are in loading/ggml.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import fp8
from bits import codes4, others
from formats import Format, Quantised
from loading.files import Fields

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INT32 = (torch.int32,)


class Scheme(NamedTuple):
    """What the codes of a matrix stand for that another program has quantised."""

    name: str
    formats: tuple[Format, ...]  # those that keep it exactly, the smallest first
    decoded: Callable[[Quantised], Tensor]  # its weights, float32 [N, K]


def format_for(schemes: set[Scheme | None], columns: int, most_bits: int = 8) -> Format | None:
    """The smallest format that keeps matrices of all of these schemes exactly, side by side and cut
    to `columns` columns. None stands for floats. Returns None if there is no such format."""
    if None in schemes:
        return None
    first, *_ = schemes
    for format in first.formats:
        small = format.bits <= most_bits or format.group == 1
        whole = columns % format.group == 0
        if small and whole and all(format in scheme.formats for scheme in schemes):
            return format
    return None


def checked(q: Quantised) -> Quantised:
    """Returns what it is given. Raises ValueError if a scale or a minimum is NaN or infinite."""
    if not all(t is None or torch.isfinite(t).all() for t in (q.scale, q.minimum)):
        raise ValueError("a scale that is NaN or infinite")
    return q


def of_rows(q: Quantised, change: Callable[[Tensor], Tensor]) -> Quantised:
    """The same change made to the rows of all that it consists of."""
    changed = [t if t is None or isinstance(t, tuple) else change(t) for t in q]
    made = Quantised(*changed)
    if q.parts:
        made = made._replace(parts=tuple(map(change, q.parts)))
    return made


# ---- packings of safetensors, as their documents say


class Wanted(NamedTuple):
    """The types and the shapes that a file's tensor may have."""

    types: tuple[torch.dtype, ...]
    shapes: list[tuple[int, ...]]


class Packing(NamedTuple):
    """How another program stores a quantised matrix W [N, K], where N is a multiple of 8: as
    several tensors, named like the matrix with another last word than "weight"."""

    scheme: Scheme
    # From N and K to its tensors in a file, by the last word, codes first
    wanted: Callable[[int, int], dict[str, Wanted]]
    # From these, once they are read, to the whole matrix
    read: Callable[[dict[str, Tensor]], Quantised]
    group: int  # a multiple of which its columns must be
    optional: tuple[str, ...] = ()  # tensors that may be absent, by the last word


def _scheme(name: str, format: Format) -> Scheme:
    """One for which there is one format."""

    def decoded(q: Quantised) -> Tensor:
        tensors = format.empty(*q.codes.shape, q.codes.device)
        format.write(q, tensors)
        return format.decoded(tensors)

    return Scheme(name, (format,), decoded)


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


def awq(group: int) -> Packing:
    """AutoAWQ's "gemm": W^T, with eight neighbouring columns in each word, in the order 0, 2, 4, 6,
    1, 3, 5, 7."""
    format = _format_for_groups(group)

    def in_order(words: Tensor) -> Tensor:
        eights = codes4.nibbles(words).unflatten(1, (-1, 8))
        return eights[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1).t()

    def read(t: dict[str, Tensor]) -> Quantised:
        return _with_zeros(format, in_order(t["qweight"]), t["scales"].t(), in_order(t["qzeros"]))

    wanted = lambda N, K: _gemm(group, N, K, (K, N // 8))
    return Packing(_scheme("AWQ", format), wanted, read, max(group, format.group))


def gptq(group: int, version_2: bool, bits: int = 4) -> Packing:
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

    return Packing(_scheme("GPTQ", format), wanted, read, max(group, format.group), ("g_idx",))


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


def w4a16(group: int, symmetric: bool) -> Packing:
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

    group = max(group, format.group)
    return Packing(_scheme("W4A16", format), wanted, read, group, ("weight_g_idx",))


def fp8_scaled(scale: str, in_blocks: bool) -> Packing:
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

    format = others.E4M3_128 if in_blocks else fp8.E4M3
    return Packing(_scheme("FP8", format), wanted, read, format.group)


# ---- which packing it is

INSTEAD = "take the original model, in fp8 or int4 if you like, or a GGUF file"


class About(Fields):
    """What a folder says of its quantisation."""

    method: str

    def refused(self, how: str) -> ValueError:
        return ValueError(f"{self.file}: quantised as {self.method} {how}: {INSTEAD}")

    def only(self, name: str, *allowed) -> None:
        """Raise ValueError for a field with another value than these."""
        if self.get(name) not in allowed:
            raise self.refused(f"with {name} {self.get(name)!r}")

    @property
    def group(self) -> int:
        """How many columns share a scale; -1 if all do. Raises ValueError."""
        group = self.number("group_size", -1, 1 << 20, -1)
        if group == 0 or group > 0 and group % 32:
            raise ValueError(
                f"{self.file}: group_size is {group}; it must be -1 or a multiple of 32: {INSTEAD}"
            )
        return group


def _awq(q: About) -> Packing:
    q.only("bits", 4)
    q.only("version", None, "gemm", "GEMM")
    q.only("zero_point", None, True)
    return awq(q.group)


def _gptq(q: About) -> Packing:
    q.only("bits", 4, 8)
    q.only("checkpoint_format", None, "", "gptq", "gptq_v2")
    return gptq(q.group, q.get("checkpoint_format") == "gptq_v2", q.number("bits", 4, 8))


def _auto_round(q: About) -> Packing:
    """AutoRound, which packs as AWQ or as GPTQ."""
    said = str(q.get("packing_format") or q.get("backend"))
    q.only("data_type", None, "int")
    layers = q.sub("extra_config")
    usual = (None, q.get("bits"), 16, 32)
    if any(layers.sub(name).get("bits") not in usual for name in layers):
        raise q.refused("with layers of several kinds")
    if "awq" in said:
        return _awq(q)
    if "auto_gptq" not in said:  # others differ from it in zero points
        q.only("sym", True)
    return _gptq(q)


def _modelopt(q: About) -> Packing:
    q.only("quant_algo", "FP8", "FP8_PER_CHANNEL_PER_TOKEN")
    return fp8_scaled("weight_scale", in_blocks=False)


def _fbgemm_fp8(q: About) -> Packing:
    return fp8_scaled("weight_scale", in_blocks=False)


def _fp8(q: About) -> Packing:
    q.only("fmt", None, "e4m3")
    q.only("weight_block_size", None, [128, 128])
    if q.get("weight_block_size"):
        return fp8_scaled("weight_scale_inv", in_blocks=True)
    return fp8_scaled("weight_scale", in_blocks=False)


def _pack_quantized(q: About) -> Packing:
    q.only("num_bits", 4)
    q.only("type", "int")
    q.only("strategy", "group", "channel")
    return w4a16(q.group, q.get("symmetric") is not False)


def _float_quantized(q: About) -> Packing:
    q.only("num_bits", 8)
    q.only("type", "float")
    q.only("strategy", "tensor", "channel", "block")
    q.only("block_structure", None, [128, 128])
    return fp8_scaled("weight_scale", q.get("strategy") == "block")


METHODS = {  # by quant_method; for compressed-tensors, by its format
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "modelopt": _modelopt,
    "fbgemm_fp8": _fbgemm_fp8,
    "fp8": _fp8,
    "pack-quantized": _pack_quantized,
    "float-quantized": _float_quantized,
}


def packing_of(f: Fields) -> Packing | None:
    """How others have quantised the matrices of a folder, by the fields of its config.json. Returns
    None if they are floats. Raises ValueError for what is not supported."""
    if f.get("quantization"):
        raise ValueError(f"{f.file}: quantised for mlx: {INSTEAD}")
    q = _about(f)
    if not q:
        return None
    if q.sub("transform_config"):
        raise q.refused("with transforms")
    # A pattern that begins with "-:" names tensors that are not quantised
    if any(not pattern.startswith("-:") for pattern in q.sub("dynamic")):
        raise q.refused("with dynamic settings")
    if q.method not in [*METHODS]:  # which may be anything
        raise ValueError(f"{f.file}: quantised as {q.method}, which is not supported: {INSTEAD}")
    return METHODS[q.method](q)


# Files beside a config.json that says nothing, as their writers had them first: what a method is
# called that the file does not name, and names of fields that are others today
ALONE = {
    "hf_quant_config.json": ("modelopt", {}),
    "quantize_config.json": ("gptq", {}),
    "quant_config.json": ("awq", {"w_bit": "bits", "q_group_size": "group_size"}),
}


def _about(f: Fields) -> About:
    q = About(f.file, f.sub("quantization_config"))
    for name, (method, renamed) in ALONE.items():
        file = f.file.with_name(name)
        if not q and file.is_file():
            said = Fields(file)
            said = said.sub("quantization") or said
            fields = {renamed.get(field, field): value for field, value in said.items()}
            q = About(file, {"quant_method": method} | fields)
    q.method = q.get("quant_method")
    if q.method != "compressed-tensors":
        return q
    groups = q.sub("config_groups")
    weights = [groups.sub(name).sub("weights") for name in groups]
    if any(of_group != weights[0] for of_group in weights):
        raise ValueError(f"{f.file}: quantised with several kinds of config_groups: {INSTEAD}")
    # What a group says of its weights counts, beside what is said of all
    both = About(q.file, q | (weights[0] if weights else {}))
    both.method = q.get("format")
    return both
