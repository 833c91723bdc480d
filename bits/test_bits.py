"""Tests of bits/."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import kernels
import products
from bits import int4
from bits.int4 import INT4
from cards import sizes as launch_sizes
from formats import Matrix
from tests.helpers import (
    DEVICE,
    ON_GPU,
    ONE_UNIT,
    dense,
    encoded,
    equals_reference,
    int4_matrix,
    nmse,
    op_arguments,
    randn,
)


def test_all_4_bit_codes_scales_and_zero_points():
    """Each of them is what its formula says, alone in its place."""
    scales = torch.arange(0xF0, dtype=torch.int32)
    exponent, mantissa = scales >> 4, scales & 15
    values = (1 + mantissa / 16) * 2.0 ** (exponent - 23)
    assert torch.equal(int4._scales(scales), values)
    assert torch.equal(int4._scale_codes(values), scales)
    column = torch.arange(32, dtype=torch.int32)
    for code, zero in itertools.product(range(16), range(0, 256, 15)):
        # a row for each column that has the code, the others 0
        halves = torch.zeros(32, 8, dtype=torch.int32)
        halves[column, column % 8] = code << 4 * (column // 8)
        words = halves.to(torch.int16).view(torch.int32)
        groups = torch.tensor([[0xEF << 8 | zero]]).to(torch.int16).expand(32, 1)
        decoded = INT4.decoded((words, groups, torch.full((32, 1), 2.0)))
        assert torch.equal(decoded, 2 * values[-1] * (torch.eye(32) * code - zero / 16))


@pytest.mark.parametrize("spread, bound", [
    ("normal", 5.5e-3), ("uniform", 3.5e-3), ("far from zero", 1e-3), ("close together", 4e-4),
])  # fmt: skip
def test_4_bits_lose_little(spread, bound):
    """As little as Q4_K with a search for the scale: of a normal matrix 5.2e-3 of its square."""
    w = torch.rand(64, 1024) - 0.5 if spread == "uniform" else torch.randn(64, 1024)
    w = {"far from zero": w + 3, "close together": 1 + 0.01 * w}.get(spread, w)
    w = w * torch.logspace(-20, 20, 64)[:, None]
    tensors = INT4.encode(w)
    INT4.check(tensors)
    with pytest.raises(ValueError, match="scales that are not positive and finite"):
        INT4.check((tensors[0], tensors[1] | 0xF0 << 8, tensors[2]))
    assert 8 * sum(t.nbytes for t in tensors) == (4.5 * 1024 + 32) * 64, "bits"
    lost = (INT4.decoded(tensors) - w).double().square().mean(1) / w.double().square().mean(1)
    assert lost.mean() < bound, lost.mean()
    for rows in (torch.zeros(2, 64), torch.full((2, 64), 3.0)):
        INT4.check(tensors := INT4.encode(rows))
        assert torch.allclose(INT4.decoded(tensors), rows, rtol=1e-3)


@pytest.mark.parametrize("dtype, T", [
    *itertools.product((torch.float16, torch.bfloat16), (1, 3, 16, 20)), (torch.float32, 1),
    (torch.float32, 20),
], ids=str)  # fmt: skip
def test_products_with_4_bit_matrices(dtype, T, monkeypatch):
    """Several tiles of rows for each program, the last one with fewer; rows of one block of
    columns, of several, of one that ends early, and of an odd number of groups."""
    sizes = launch_sizes.StreamSizes(4, 2048, 1, 3)
    monkeypatch.setattr(products, "stream_sizes", lambda *_: sizes)
    monkeypatch.setattr(products, "processors", lambda device: 3)
    pass_ = SimpleNamespace(norm_eps=1e-5)
    # weights are decoded to halves; a token's sums are halves, and its norm is not as large as
    # fit_norm has it
    limit = 1e-6 + ONE_UNIT[dtype] * 8
    if T == 1:
        limit = 2e-4 if dtype == torch.bfloat16 else 5e-5
    for N, K in ((48, 96), (42, 1216), (20, 4096), (26, 4160)):
        w, x = int4_matrix(N, K), randn(T, K, dtype=dtype)
        norm, out = torch.rand(K, device=DEVICE).to(dtype) + 0.5, torch.empty(T, N, device=DEVICE)
        size = dense(w).data.square().mean(1).sqrt()  # rows count alike
        kernels.rmsnorm_linear(x, norm, w, pass_, out, accumulate="fp32")
        normed = kernels.rmsnorm_ref(x.float(), norm.float(), 1e-5)
        assert nmse(out / size, normed @ (dense(w).data / size[:, None]).t()) < limit, (N, K)


def test_heads_of_a_4_bit_matrix(monkeypatch):
    """Several programs share a head, each with fewer rows than its vectors hold."""
    sizes = launch_sizes.StreamSizes(2, 2048, 8, 3)
    monkeypatch.setattr(products, "stream_sizes", lambda *_: sizes)
    monkeypatch.setattr(products, "processors", lambda device: 3)
    N, C, D, dtype = 5 * 48, 320, 48, torch.float16

    def draw(has_norm: bool, has_bias: bool) -> tuple:
        qk_norm = randn(2, D, dtype=dtype) if has_norm else None
        bias = randn(N, dtype=dtype) if has_bias else None
        arguments = op_arguments("rmsnorm_qkv_rope", dtype, (3, 1, D), 1, 4, qk_norm=qk_norm)
        _, layer, pass_ = arguments[0]
        layer.attention_norm = randn(C, dtype=dtype)
        (layer.wqkv,) = encoded([Matrix(torch.randn(N, C, device=DEVICE), bias=bias)], INT4)
        return randn(1, C, dtype=dtype), layer, pass_

    # where few of a norm's weights are large, errors vary between draws
    for extra in ((False, False), (False, True), (True, False)):
        draws = [draw(*extra) for _ in range(64 if ON_GPU else 1)]
        equals_reference("rmsnorm_qkv_rope", draws, ("2.k", "2.v"), 4 * ONE_UNIT[dtype])
