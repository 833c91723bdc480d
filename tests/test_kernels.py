"""Tests of kernels.py and attention.py: the op tables, and each op against its reference."""

import functools
import inspect
import itertools
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import attention
import kernels
import launch
import products
from cards import sizes as launch_sizes
from formats import Matrix
from fp8 import E4M3, E5M2
from kernels import PRODUCTS
from tests.helpers import (
    DEVICE,
    INF,
    NAN,
    ON_GPU,
    ONE_UNIT,
    OPS,
    alone,
    as_fp32,
    changed,
    check_attention,
    check_experts,
    encoded,
    equals_reference,
    expert_arguments,
    mapped,
    needs_gpu,
    nmse,
    op_arguments,
    randn,
)

# for several tokens: norm, the library's matmul, output; half a place each
ROUNDED_TWICE = {"rmsnorm_swiglu": 1.5**2}
SHAPES = (2, 2, 16), (4, 1, 24), (6, 2, 8), (1, 1, 136)
DTYPE_AND_HEADS = [(torch.bfloat16, (4, 1, 24)), *((torch.float16, heads) for heads in SHAPES)]


def test_tables_have_the_same_ops_and_signatures():
    """Except that `accumulate`, which kernels.ops binds, has no meaning for a reference."""
    for name, (reference, op) in kernels.OPS.items():
        parameters = dict(inspect.signature(op).parameters)
        bound = parameters.pop("accumulate", None)
        assert bool(bound) == isinstance(getattr(kernels.fused, name), partial), name
        assert bound is None or bound.kind is inspect.Parameter.KEYWORD_ONLY, name
        assert parameters == dict(inspect.signature(reference).parameters), name
        assert op.__name__ == name and reference.__name__ == f"{name}_ref"
    assert kernels.OPS.keys() == vars(kernels.fused).keys() == vars(kernels.reference).keys()


TOKENS_AND_BEFORE = [(1, 0), (1, 40), (2, 0), (2, 5), (17, 0), (17, 40)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T, before", TOKENS_AND_BEFORE)
@pytest.mark.parametrize("dtype, heads", DTYPE_AND_HEADS, ids=str)
def test_op_equals_its_reference(dtype, heads, T, before, op, guarded):
    arguments, written = op_arguments(op, dtype, heads, T, before)
    limit = ONE_UNIT[dtype] * (ROUNDED_TWICE.get(op, 1) if T > 1 else 1)
    equals_reference(op, [arguments], written, limit)
    given_output = any(name.endswith(".") for name in written)
    guarded(allocates=not given_output)


SEVERAL = [
    [(1, 0), (1, 5), (1, 40)],  # several texts that decode
    [(1, 40), (4, 5), (2, 0)],  # with proposals
    [(9, 5), (1, 40), (6, 0), (4, 1)],  # more than few tokens
]


def several(length: int = 60) -> list[tuple]:
    """Random segments."""
    counts = random.choices((1, 1, 2, 3, 5), k=random.randint(2, 5))
    return [(count, random.randrange(length)) for count in counts]


@pytest.mark.parametrize("op", ["embedding", "rmsnorm_qkv_rope", "attention"])
@pytest.mark.parametrize("segments", [*SEVERAL, "random"], ids=str)
@pytest.mark.parametrize("dtype, heads", DTYPE_AND_HEADS, ids=str)
def test_op_of_several_segments(dtype, heads, segments, op, guarded):
    """The others do not depend on what the rows are."""
    segments = several() if segments == "random" else segments
    arguments, written = op_arguments(op, dtype, heads, 0, 5, segments=segments)
    limit = ONE_UNIT[dtype] * (2.5**2 if op == "rmsnorm_qkv_rope" else 1)
    equals_reference(op, [arguments], written, limit)
    guarded()
    # the reference of all of them is that of each sequence alone
    *exact, pass_ = as_fp32(arguments)
    own = [alone(pass_, i) for i in range(len(segments))]
    right = getattr(kernels.reference, op)(*exact, pass_)
    for i, (first, _, begin, count) in enumerate(pass_.segments.tolist()):
        rows, run = slice(begin, begin + count), slice(first, first + pass_.size)
        if op != "embedding":
            exact[0] = as_fp32(arguments)[0][rows]
        assert nmse(getattr(kernels.reference, op)(*exact, own[i]), right[rows]) < 1e-10
        for cache, theirs in ((pass_.k, own[i].k), (pass_.v, own[i].v)):
            assert nmse(theirs[1], cache[1][:, run]) < 1e-10


@pytest.mark.parametrize("T, before", TOKENS_AND_BEFORE)
@pytest.mark.parametrize("dtype, heads", DTYPE_AND_HEADS, ids=str)
def test_op_equals_its_reference_with_bias_and_norms(dtype, heads, T, before, guarded):
    qk_norm = randn(2, heads[2], dtype=dtype, scale=30)
    # in a prompt, norm, matmul, its norm and q are rounded
    limit = ONE_UNIT[dtype] * (1 if T == 1 else 2.5**2)
    cases = [(op, dict(biased=True)) for op in PRODUCTS]
    without = dict(attention_norm=None)  # as in heads
    for more in dict(biased=False), dict(biased=True), without:
        cases.append(("rmsnorm_qkv_rope", dict(qk_norm=qk_norm) | more))
    for (op, extra), format in itertools.product(cases, (None, E4M3) if T < 17 else (None,)):
        # with what the one before left in scratch. Sums in half precision, which a GPU makes of a
        # token's packed products, leave an error that differs between draws
        count = 8 if ON_GPU and T == 1 and format else 1
        draw = partial(op_arguments, op, dtype, heads, T, before, **extra)
        draws = [encoded(draw()[0], format) for _ in range(count)]
        equals_reference(op, draws, draw()[1], limit)
    guarded()


@pytest.mark.parametrize("T", [1, 3, 17])
def test_qkv_into_caches_of_2_31_values(T):
    """Of which only a few pages are touched."""
    x, layer, pass_ = op_arguments("rmsnorm_qkv_rope", torch.float16, (1, 1, 64), T, 5, S=100)[0]
    small = [torch.zeros(1, 112, 64, dtype=torch.int8, device=DEVICE) for _ in range(2)]
    large = [torch.empty(1, 1 << 25, 64, dtype=torch.int8, device=DEVICE) for _ in range(2)]
    for k, v in (small, large):
        kernels.fused.rmsnorm_qkv_rope(x, layer, changed(pass_, k=(None, k), v=(None, v)))
    new = pass_.place.long()
    assert all(torch.equal(a[:, new], b[:, new]) for a, b in zip(small, large))


@pytest.mark.parametrize("T, sizes", [
    *itertools.product((1,), ((2, 32, 4), (4, 16, 2), (8, 64, 4))),
    *itertools.product((3, 16), ((16, 2, 2, 4, 1), (32, 4, 2, 8, 2), (64, 1, 4, 16, 3))),
], ids=str)  # fmt: skip
def test_products_do_not_depend_on_launch_sizes(T, sizes, monkeypatch):
    monkeypatch.setattr(products, "vector_sizes", lambda *_: launch_sizes.VectorSizes(*sizes))
    monkeypatch.setattr(products, "few_sizes", lambda *_: launch_sizes.FewSizes(*sizes))
    cases = [(op, *op_arguments(op, torch.float16, (4, 1, 8), T, 5)) for op in PRODUCTS]
    half = functools.partial(randn, dtype=torch.float16)
    if T > 1:  # rows of several tiles
        arguments = (half(T, 1048), Matrix(half(40, 1048, scale=0.03)), half(T, 40))
        cases.append(("linear_add", arguments, ("2.",)))
    for (op, arguments, written), format in itertools.product(cases, (None, E4M3, E5M2)):
        limit = ONE_UNIT[torch.float16] * ROUNDED_TWICE.get(op, 1)
        equals_reference(op, [encoded(arguments, format)], written, limit)
    if T > 1:
        check_experts(expert_arguments(T, 5, 2, 72, 88, torch.float16), torch.float16, None)


@pytest.mark.parametrize("heads, sizes", [
    ((2, 2, 16), (4, 16, 4, 1, 0)), ((8, 1, 32), (64, 16, 4, 1, 0)), ((4, 2, 136), (4, 16, 4, 1, 0)),
    ((2, 2, 16), (64, 16, 4, 1, 0)), ((8, 1, 32), (1, 32, 4, 2, 64)), ((4, 2, 136), (1, 32, 4, 2, 64)),
], ids=str)  # fmt: skip
def test_attention_does_not_depend_on_launch_sizes(heads, sizes, monkeypatch):
    for kind in ("single_row_sizes", "split_sizes"):
        monkeypatch.setattr(attention, kind, lambda *_: launch_sizes.SplitSizes(*sizes))
    for T, before in ((1, 0), (1, 200), (3, 150)):
        check_attention(heads, T, before, runs=2)


FEW_ROWS = [(1, 64, 4, 1, 64), (4, 32, 2, 1, 128), (64, 64, 4, 1, 0)]


@pytest.mark.parametrize("sizes", FEW_ROWS if ON_GPU else FEW_ROWS[:1], ids=str)
@pytest.mark.parametrize("heads", [(2, 1, 24), (3, 1, 64), (14, 2, 64), (2, 2, 128)], ids=str)
@pytest.mark.parametrize("kv_fp8", [False, True])
def test_attention_of_few_rows(kv_fp8, heads, sizes, monkeypatch):
    """hopper.py's kernel on a GPU, in the interpreter those that do the same."""
    monkeypatch.setattr(attention, "few_rows_sizes", lambda device: launch_sizes.SplitSizes(*sizes))
    rows = ((16, 700), (64, 500), (128, 300)) if ON_GPU else ((16, 300), (64, 150))
    most = [(count * heads[1] // heads[0], before) for count, before in rows]
    for T, before in [(1, 90), (2, 0), (4, 61), (3, 250), (5, 200), *most]:
        check_attention(heads, T, before, kv_fp8, runs=2 if ON_GPU else 1)


@pytest.mark.parametrize("kv_fp8", [False, True])
@pytest.mark.parametrize("heads", [(2, 2, 16), (4, 1, 24), (8, 1, 64), (2, 2, 128)], ids=str)
def test_attention_of_several_segments(heads, kv_fp8):
    """Short and long ones, with one block of positions, several of a split, and several splits; also
    more rows of a key/value head than a program of the ordinary kernel takes."""
    lengths = (0, 1, 15, 63, 64, 300, 700) if ON_GPU else (0, 15, 63, 130)
    cases = [
        [(1, before) for before in lengths],
        [(random.choice((1, 2, 5)), before) for before in lengths],
        [(11, 5), (1, 40), (2, 90)],
        several(300),
    ]
    for segments in cases:
        check_attention(heads, 0, 0, kv_fp8, runs=2, segments=segments)


@pytest.mark.parametrize("kv_fp8", [False, True])
@pytest.mark.parametrize("heads", [(2, 2, 64), (4, 1, 24), (4, 2, 128)], ids=str)
def test_attention_of_padding(heads, kv_fp8):
    """In a few rows, in a block of a prompt with tokens, and in blocks of its own."""
    cases = [(1, 40, 7), (5, 0, 3), (30, 90, 2), (65, 62, 63), (70, 5, 200)]
    if ON_GPU:
        cases += [(500, 0, 12), (513, 300, 127), (513, 5000, 500), (1, 130, 600), (600, 40, 40)]
    for T, before, padding in cases:
        check_attention(heads, T, before, kv_fp8, padding=padding)


@pytest.mark.parametrize("kv_fp8", [False, True])
@pytest.mark.parametrize("start_pos", [0, 1, 62, 63, 126, 5000] if ON_GPU else [0, 62])
@pytest.mark.parametrize("heads", [(2, 2, 64), (4, 1, 24), (4, 2, 128), (2, 1, 136)], ids=str)
def test_attention_of_a_prompt(heads, start_pos, kv_fp8):
    """Of blocks of 64 or 32 keys: at 62, the first token sees all but the last key of a block."""
    for T in (65, 127, 512, 513, 640, 700, 2048) if ON_GPU else (65, 127):
        check_attention(heads, T, start_pos, kv_fp8)


@pytest.mark.parametrize("heads", [(4, 2, 16), (9, 3, 64), (8, 1, 24)], ids=str)
@pytest.mark.parametrize("before", [0, 30, 700])
def test_attention_of_one_token_in_bf16_on_a_cpu(heads, before):
    """torch's own function; numbers that are not finite stay so."""
    q, layer, pass_ = op_arguments("attention", torch.bfloat16, heads, 1, before)[0]
    tensors = [t.cpu() for t in (q, pass_.k[1], pass_.v[1])]
    for cached in tensors[1:]:
        cached[:, int(pass_.place) + 1 :] = torch.nan

    def attend(q, k, v):
        return attention.attention_ref(q, layer, changed(pass_, k=(None, k), v=(None, v)))

    exact = attend(tensors[0].float(), *tensors[1:])
    assert nmse(attend(*tensors), exact) < ONE_UNIT[torch.bfloat16]
    for which, bad in ((0, NAN), (0, INF), (0, -INF), (1, NAN), (2, NAN), (2, INF)):
        spoiled = [t.clone() for t in tensors]
        first = int(pass_.segments[0, 0]) if which else 0
        spoiled[which][0, first, 3] = bad
        assert not attend(*spoiled).isfinite().all(), (which, bad)


@pytest.mark.parametrize("limit, value, blocks", [
    ("MOST_TOKENS", 32, [(64, 62), (64, 94), (12, 100)]),
    ("MASK_BYTES", 5 * 2 * 100 * 40, [(80, 70), (60, 100)]),
])  # fmt: skip
def test_reference_attention_takes_a_prompt_in_blocks(limit, value, blocks, monkeypatch):
    """Whose masks are small however long the context is."""
    q, layer, pass_ = op_arguments("attention", torch.float32, (4, 2, 16), 70, 30)[0]
    whole = attention.attention_ref(q, layer, pass_)
    masks, attend = [], torch.nn.functional.scaled_dot_product_attention

    def watched(*heads, attn_mask):
        masks.append(attn_mask.shape)
        return attend(*heads, attn_mask=attn_mask)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(attention, limit, value)
    assert nmse(attention.attention_ref(q, layer, pass_), whole) < 1e-10
    assert masks == blocks


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_half_sums_saturate_and_do_not_hide_nan():
    """Scores beyond 65504, and such results of a bias, RoPE and SwiGLU, stay finite."""
    H, D, T = 2, 32, 70
    full = functools.partial(torch.full, dtype=torch.float16, device=DEVICE)
    q, k, v = full((T, H, D), 200.0), full((H, 128, D), 100.0), full((H, 128, D), 100.0)
    k[:, :5], v[:, 5:] = -100.0, 900.0
    ops = kernels.ops("triton", "fp16")
    x = full((T, 64), 1.0)
    rope = torch.full((T, D // 2, 2), 0.5**0.5, device=DEVICE)
    pass_ = SimpleNamespace(k=[k], v=[v], rope=[rope], norm_eps=0.0, longest=T)
    pass_.segments = torch.tensor([[0, 0, 0, T]], dtype=torch.int32, device=DEVICE)
    pass_.place = pass_.position = torch.arange(T, dtype=torch.int32, device=DEVICE)
    wqkv = Matrix(full((3 * H * D, 64), 65504 / 64), bias=full((3 * H * D,), 65504.0))
    layer = SimpleNamespace(index=0, attention_norm=x[0].clone(), wqkv=wqkv)
    layer.qk_norm = None
    y = ops.attention(q, layer, pass_)
    assert torch.isfinite(y).all() and (y[8:] > 890).all()
    ops.rmsnorm_qkv_rope(x, layer, pass_)
    for cache in (k, v):
        assert torch.isfinite(cache[:, :T]).all() and cache[:, :T].max() == 65504
    sizes = dict(BLOCK=1024, FP16_SUMS=True)
    for value, expected in ((60000.0, 65504.0), (NAN, NAN)):
        ab, out = full((T, 128), value), full((T, 64), 0.0)
        launch.launch(kernels._swiglu_kernel, (T, 1), out.device, ab, out, 64, **sizes)
        assert out.allclose(full((T, 64), expected), rtol=0, atol=0, equal_nan=True)
    assert ops.linear_add(ab, Matrix(full((64, 128), 1.0)), full((T, 64), 0.0)).isnan().all()


@needs_gpu
def test_prompt_beyond_65504_with_half_sums():
    ops = kernels.ops("triton", "fp16")

    def positive(a):
        """Sums that pass 65504 in both directions are NaN, which is reported."""
        if isinstance(a, Matrix):
            return Matrix(a.data.abs() * 1e4)
        return a.abs_() if torch.is_tensor(a) and a.is_floating_point() else a

    for op in PRODUCTS:
        arguments = mapped(op_arguments(op, torch.float16, (4, 2, 16), 70, 5)[0], positive)
        y = getattr(ops, op)(*arguments)
        written = (arguments[2].k[1], arguments[2].v[1]) if op == "rmsnorm_qkv_rope" else (y,)
        assert all(torch.isfinite(t).all() for t in written), op
        assert not torch.backends.cuda.matmul.allow_fp16_accumulation
