"""How a CPU holds matrices, and multiplies by them: the products of the reference ops on a CPU."""

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from formats import Format, Matrix, Tensors


@cache
def multiplies_bf16() -> bool:
    """Whether oneDNN has bf16 products for this CPU."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def cpu_product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which a CPU multiplies a prompt whose activations are in dtype."""
    return torch.bfloat16 if dtype == torch.bfloat16 and multiplies_bf16() else torch.float32


def storage_dtype(backend: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type in which a backend stores the matrices of a model in dtype. On a CPU without bf16
    products the reference ops take fp16 even for bf16, since torch streams it twice as fast; bf16
    weights fit exactly, except magnitudes under 6e-5, which are off by at most 3e-8."""
    slow = backend == "torch" and device.type == "cpu" and not multiplies_bf16()
    return torch.float16 if slow and dtype == torch.bfloat16 else dtype


# Up to this many bytes, oneDNN's preparations for a bf16 matrix take longer than a token's product
SMALL = 2 << 20


def in_cpu_layout(
    w: Matrix,
    backend: str,
    dtype: torch.dtype,
    among: Collection[Format] = (),
    stays: bool = False,
) -> Matrix:
    """A matrix in the layout that the reference ops read fastest on a CPU, for activations in
    dtype, with the product for it; elsewhere the matrix itself. Fp32 matrices with more rows than
    columns are stored column by column, since many short sums are slow. Bf16 matrices are stored in
    oneDNN's blocked layout; small ones, and those that stay in memory anyway, also keep their
    original copy. A matrix in a format also gets the copy that torch's own product needs. among: the
    formats of the model. What one of them keeps in another (Format.for_matrix) is decoded, because a
    CPU reads 16 bits faster than it decodes 8. stays: whether the original stays in memory, as that
    of a tied embedding does."""
    if backend != "torch" or w.data.device.type != "cpu":
        return w
    if any(f is not w.format and f.for_matrix("output") is w.format for f in among):
        dense = torch.empty(w.shape, dtype=storage_dtype(backend, dtype, w.data.device))
        for part, rows in zip(w.parts(512), dense.split(512)):
            rows.copy_(part.dense())
        w = Matrix(dense, bias=w.bias)
    if w.data.dtype == torch.float32 and w.rows > w.columns:
        return Matrix(w.data.t().contiguous().t(), bias=w.bias)
    if dtype != torch.bfloat16:
        return w
    if w.format:
        copy = w.format.cpu_layout(w.tensors)
        return replace(w, cpu_product=partial(_with_copy, copy)) if copy else w
    if w.data.dtype != dtype or not multiplies_bf16():
        return w
    blocked = torch.ops.mkldnn._reorder_linear_weight(w.data)
    if stays or w.nbytes <= SMALL:
        return replace(w, cpu_product=partial(_with_blocked_copy, blocked))
    return Matrix(blocked, bias=w.bias, cpu_product=_blocked_linear)


def linear(x: Tensor, w: Matrix) -> Tensor:
    """x W^T, without the bias. x [T, K] -> [T, N]"""
    if w.cpu_product:
        return w.cpu_product(x, w)
    return _as_stored(x, w)


def _as_stored(x: Tensor, w: Matrix) -> Tensor:
    """x W^T with a matrix that has no layout for a CPU."""
    if w.data.device.type == "cpu" and (w.format or w.data.dtype == torch.float16):
        if x.shape[0] > 1:
            return _cpu_prompt_linear(x, w)
        if w.format or x.dtype != torch.float16:
            return _cpu_vector_linear(x, w)
    return functional.linear(x, w.dense().to(x.dtype))


# With more tokens, torch's own product with a format is slower than decoding the matrix first
MAX_CPU_LAYOUT = 48


def _with_copy(copy: Tensors, x: Tensor, w: Matrix) -> Tensor:
    """x W^T with a matrix in a format, of which there is a copy in Format.cpu_layout."""
    if len(x) > MAX_CPU_LAYOUT:
        return _as_stored(x, w)
    return w.format.cpu_layout_linear(x, copy)


def _with_blocked_copy(blocked: Tensor, x: Tensor, w: Matrix) -> Tensor:
    """x W^T with a bf16 matrix of which there is a copy in oneDNN's layout."""
    if len(x) > 1:
        return _onednn_linear(x, blocked)
    # OneDNN also reads a large matrix 10% more slowly
    return without_onednn(functional.linear, x, w.data)


def _blocked_linear(x: Tensor, w: Matrix) -> Tensor:
    """x W^T with a matrix in oneDNN's layout."""
    return _onednn_linear(x, w.data)


def _onednn_linear(x: Tensor, blocked: Tensor) -> Tensor:
    padded = _padded(x)
    return torch.ops.mkldnn._linear_pointwise(padded, blocked, None, "none", [], "")[: len(x)]


def _padded(x: Tensor) -> Tensor:
    """x [T, K] with rows of zeros after it, up to one of a few sizes. OneDNN, which multiplies
    bf16, compiles a kernel for each new size, which takes milliseconds and 0.7 MB per matrix shape:
    with ever new prompt lengths a chat would grow by hundreds of MB. It computes 16 rows at a time,
    so most of the padding costs nothing. Products of other types compile nothing."""
    T = len(x)
    if x.dtype != torch.bfloat16:
        return x
    size = 1 << (T - 1).bit_length()
    if T > 16:
        step = max(16, size // 8)
        size = -(-T // step) * step
    return functional.pad(x, (0, 0, 0, size - T))


def _cpu_vector_linear(x: Tensor, w: Matrix) -> Tensor:
    """On a CPU, one token with fp16 weights or a format: torch's fp16 matrix-vector product (fp32
    sums) runs at memory speed. x is scaled by a power of two to magnitudes of at most 1, so that a
    result fits fp16 if its row of |W| sums to less than 65504."""
    scale = 2.0 ** math.frexp(max(float(x.abs().max()), 1e-30))[1]
    row = x[0] / scale
    if w.format:
        y = w.format.vector_linear(row.float(), w.tensors)
    else:
        y = torch.mv(w.data, row.half())
    return y.float().mul_(scale).to(x.dtype)[None]  # fp16 to bf16 is slow directly


def _cpu_prompt_linear(x: Tensor, w: Matrix) -> Tensor:
    """On a CPU, several tokens with fp16 weights or a format: the library's product, with the
    weights converted some rows at a time."""
    wide = cpu_product_dtype(x.dtype)
    x_wide = _padded(x.to(wide))
    if w.format:
        x_wide = w.format.ordered(x_wide)
    out = x.new_empty(x.shape[0], w.rows)
    for part, columns in zip(w.parts(512), out.split(512, 1)):
        if w.format:
            weights = w.format.stored_weights(part.tensors)
        else:
            weights = part.data.float()  # fp16 to bf16 is slow directly
        columns.copy_(functional.linear(x_wide, weights.to(wide))[: len(x)])
    return out


def without_onednn(product: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """A product on a CPU by torch itself. Whatever the size, oneDNN needs 14 us before it starts,
    and three times that within a step, whose weights push its code out of the caches."""
    before = torch.backends.mkldnn.enabled  # a global switch of torch's
    torch.backends.mkldnn.enabled = False
    try:
        return product(*args)
    finally:
        torch.backends.mkldnn.enabled = before
