"""The end of step 5 of loading (see loading/checkpoint.py): which tensors of a checkpoint's files make those of
the model, in each layout. A Source (sources.py) has the tensors of the files, model_tensors
(names.py) those of the model; here both become SourceTensors (tensors.py), and are compared.

Each layout has one function, in PARTS, which makes a part of a tensor. What --save wrote has no
parts, and saved_tensor makes a whole tensor of it."""

import math
import re
from collections.abc import Collection
from dataclasses import replace

import torch

from formats import Format
from loading import gguf, quantised
from loading.families import FAMILIES
from loading.headers import FileTensor, Wanted
from loading.names import BIASES, EMBEDDING, OUTPUT, Formats, Kind, ModelTensor, Part, model_tensors
from loading.reading import CPU, read
from loading.sources import GgufFile, HuggingFaceFolder, MetaFolder, Source
from loading.tensors import (
    Floats,
    Found,
    GgufMatrix,
    Joined,
    SafetensorsMatrix,
    SavedMatrix,
    ShardedFloats,
    SourceTensor,
    Stack,
)
from model import Config

# ---- all tensors of the model

NOT_NEEDED = re.compile(  # the end of a name
    r"(rotary_emb\.\w+|rope\.freqs|rope_freqs\.weight|\.weight_shape"  # repeated in the config
    r"|self_attn\.(masked_)?bias|(^|\.)(position_ids|attention_mask|causal_mask)"  # masks
    r"|\.(input|output|q|k|v|kv|activation)_scale(_ub)?)$"  # of activations, not rounded here
)
# Biases that a file may contain only if they are all zero
BIAS = re.compile(r"(_proj|\.w[123]|\.gate|attn_output|ffn_\w+)\.bias$")
MOST_BIASES = 1 << 20  # numbers in one of them


def tensors_for(source: Source, c: Config) -> tuple[Config, dict[str, SourceTensor]]:
    """The tensors of a model by name, and its configuration, in which tie_embeddings and the biases
    may have become False. Raises ValueError if a tensor is missing, unexpected, or of another shape
    or type than the config says."""
    found: Found = {}
    for tensor in source.file_tensors():
        if not NOT_NEEDED.search(tensor.name):
            found.setdefault(tensor.name, []).append(tensor)
    if c.tie_embeddings and not source.format:
        c = untied(source, c, found)
    c = without_absent_biases(source, c, found)
    tensors = {t.name: tensor_for(source, t, c, found) for t in model_tensors(c)}
    problems = misfits(tensors.values(), found)
    if problems:
        shown = "; ".join(problems[:4])
        if len(problems) > 4:
            shown += f"; and {len(problems) - 4} more"
        raise ValueError(f"{source.path}: the tensors do not fit the config: {shown}")
    return c, tensors


def tensor_for(source: Source, t: ModelTensor, c: Config, found: Found) -> SourceTensor:
    """A tensor of the model, which is checked later."""
    if source.format:
        return saved_tensor(source.format, t, c, found)
    parts = [PARTS[type(source)](source, part, c, found) for part in t.parts]
    if len(parts) == 1:
        return parts[0]
    return Joined(parts, t.parts[0].in_turn)


def name_of(source: Source, part: Part) -> str:
    """What the files call a part of a tensor."""
    renamed = source.renames.get(part.hugging_face, part.hugging_face)
    return replace(part, hugging_face=renamed).name_in(source.naming)


def untied(source: Source, c: Config, found: Found) -> Config:
    """Returns the configuration, with tie_embeddings False if the files hold two different
    matrices. The one matrix of a tied model may have either name, or be stored under both."""
    embedding, output = name_of(source, EMBEDDING), name_of(source, OUTPUT)
    if output not in found:
        return c
    if embedding not in found:
        found[embedding] = [replace(tensor, name=embedding) for tensor in found.pop(output)]
        return c
    one, other = (PARTS[type(source)](source, part, c, found) for part in (EMBEDDING, OUTPUT))
    if any(one.problems()) or any(other.problems()) or not equal(one, other):
        return replace(c, tie_embeddings=False)
    del found[output]
    return c


def equal(one: SourceTensor, other: SourceTensor) -> bool:
    """Whether two matrices have the same values."""
    N, K = one.shape
    step = max(1, quantised.AT_ONCE // K)
    for start in range(0, N, step):
        rows = [slice(start, start + step)]
        mine, its = (
            torch.cat([values.float() for _, values in tensor.read(CPU, rows)])
            for tensor in (one, other)
        )
        if not torch.equal(mine, its):
            return False
    return True


def without_absent_biases(source: Source, c: Config, found: Found) -> Config:
    """The configuration without the biases that no layer has, which transformers and llama.cpp take
    for zeros."""
    present = set()
    for t in model_tensors(c):
        if t.field in BIASES:
            names = [f"{t.name}.weight", *(name_of(source, part) for part in t.parts)]
            present.update(t.field for name in names if name in found)
    return replace(c, **{bias: bias in present for bias in BIASES})


def misfits(tensors: Collection[SourceTensor], found: Found) -> list[str]:
    """What is wrong, a message each, if the files do not hold these tensors and no others."""
    # Once, though the one matrix of a tied model is both embedding and output
    problems = [*dict.fromkeys(problem for tensor in tensors for problem in tensor.problems())]
    expected = {name for tensor in tensors for name in tensor.wanted}
    for name in found:
        if name in expected:
            continue
        if not BIAS.search(name):
            problems.append(f"{name} is unexpected")
        elif not all(map(is_zero, found[name])):
            weight = name.removesuffix("bias") + "weight"
            problems.append(f"{weight} has a bias, and should have none")
    return problems


def is_zero(bias: FileTensor) -> bool:
    """Whether a bias makes no difference."""
    if bias.dtype not in quantised.FLOATS or math.prod(bias.shape) > MOST_BIASES:
        return False
    (values,) = read([bias])
    return not values.any()


# ---- a part of a tensor, in each layout


def gguf_part(source: GgufFile, part: Part, c: Config, found: Found) -> SourceTensor:
    name = name_of(source, part)
    in_pairs = FAMILIES[gguf.family_name(source.header)].in_pairs
    head_dim = c.head_dim if part.rotated and not in_pairs else None
    info = source.header.tensors.get(name)
    arguments = (name, part.shape(c), found, head_dim)
    if info and source.scheme(info):
        return GgufMatrix(*arguments, source.scheme(info))
    return Floats(*arguments)


def hugging_face_part(
    source: HuggingFaceFolder, part: Part, c: Config, found: Found
) -> SourceTensor:
    name = name_of(source, part)
    head_dim = c.head_dim if part.rotated else None

    def tensor(in_file: str) -> SourceTensor:
        """The part, or an expert's matrix in one."""
        shape = part.shape(c)[-2:]
        wanted = {}
        if source.scheme and part.kind in (Kind.MATRIX, Kind.PLAIN):
            wanted = scheme_tensors(source.scheme, in_file, shape, found)
        if wanted:
            return SafetensorsMatrix(in_file, shape, found, head_dim, source.scheme, wanted)
        return Floats(in_file, shape, found, head_dim)

    if part.of_experts:
        return Stack([tensor(name.format(expert)) for expert in range(c.n_experts)])
    return tensor(name)


def scheme_tensors(
    scheme: quantised.Scheme, name: str, shape: tuple[int, int], found: Found
) -> dict[str, Wanted]:
    """What a scheme stores for a matrix, by name. Empty if this one is not quantised."""
    stem = name.removesuffix("weight")
    by_word = scheme.wanted(*shape)
    codes, *_ = by_word
    if stem + codes not in found:
        return {}
    if codes == "weight" and found[f"{stem}weight"][0].dtype in quantised.FLOATS:
        return {}
    absent = {word for word in scheme.optional if stem + word not in found}
    return {stem + word: wanted for word, wanted in by_word.items() if word not in absent}


def meta_part(source: MetaFolder, part: Part, c: Config, found: Found) -> SourceTensor:
    return ShardedFloats(name_of(source, part), part.shape(c), found)


PARTS = {GgufFile: gguf_part, HuggingFaceFolder: hugging_face_part, MetaFolder: meta_part}


# ---- what --save wrote


def saved_tensor(format: Format, t: ModelTensor, c: Config, found: Found) -> SourceTensor:
    shape = t.shape(c)
    if not t.is_matrix:
        name = f"{t.name}.weight"
        files = found.get(name, [])
        if t.field == "qk_norm":  # saved as it is in the model, with a row for q and one for k
            files = [replace(file, shape=(math.prod(file.shape),)) for file in files]
        return Floats(name, shape, {name: files})
    wanted = saved_matrix(t, c, format)
    if t.of_experts:
        rows, columns = shape
        shape = (c.n_experts, rows // c.n_experts, columns)
    return SavedMatrix(t.name, shape, found, wanted=wanted)


def saved_matrix(t: ModelTensor, c: Config, format: Format) -> dict[str, Wanted]:
    """The tensors that --save writes for a matrix, by name. The codes bear the name of the matrix
    itself, and a tensor of a single column is written as a vector."""
    wanted = {}
    name = t.name  # of the first
    for key, (dtype, (rows, columns)) in format.for_matrix(t.name).shapes(*t.shape(c)).items():
        if wanted:
            name = f"{t.name}.{key}"
        shape = (rows, columns)
        if columns == 1:
            shape = (rows,)
        wanted[name] = Wanted((dtype,), [shape])
    return wanted


# ---- the formats that keep them


def formats_as_stored(tensors: dict[str, SourceTensor], c: Config, most_bits: int) -> Formats:
    """The formats, of at most `most_bits` bits, that store a rank's matrices exactly as others have
    quantised them. tensors: those of the model."""
    formats = {}
    for t in model_tensors(c):
        if t.is_matrix:
            in_files = tensors[t.name].all_schemes
            format = quantised.format_for(in_files, t.shape(c)[1], most_bits)
            if format:
                formats[t.name] = format
    return formats
