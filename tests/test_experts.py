"""Tests of experts.py."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import experts
import kernels
import products
from bits import others
from bits.int4 import INT4
from cards import sizes as launch_sizes
from formats import Matrix
from fp8 import E4M3, E4M3_NATIVE, E5M2
from launch import captured
from tests.helpers import (
    DEVICE,
    INF,
    NAN,
    ON_GPU,
    ONE_UNIT,
    as_fp32,
    check_experts,
    dense,
    exchanges_of,
    expert_arguments,
    experts_errors,
    needs_gpu,
    nmse,
    pass_of_experts,
    picked,
    randn,
    random_matrix,
)


@pytest.mark.parametrize("T", [1, 5, 12, 17])
@pytest.mark.parametrize("dtype, form", [
    (torch.float32, None), (torch.float16, None), (torch.bfloat16, None), (torch.float16, E4M3),
    (torch.float16, E5M2), (torch.float16, INT4), (torch.float32, INT4),
], ids=lambda value: getattr(value, "name", str(value)))  # fmt: skip
def test_experts_equal_their_reference(dtype, form, T, guarded):
    """One expert is chosen by every token, and one by none; tiles do not divide hidden sizes."""
    shapes = [(7, 3, 96, 64), (5, 2, 256, 320), (2, 1, 256, 320)]
    shapes += [(4, 3, 64, 1024)] if form is INT4 and T == 1 else []  # blocks of several experts
    shapes += [(6, 1, 40, 52)] if form is None else []
    for E, k, C, F in shapes:
        x, layer, pass_ = expert_arguments(T, E, k, C, F, dtype, form)
        x[:, 0] = 3.0
        layer.router.data[0, 0] = 30.0
        layer.router.data[-1, 0] = -30.0
        check_experts((x, layer, pass_), dtype, form)
    guarded()


@pytest.mark.parametrize(
    "sizes", [(16, 32, 16, 4, 1, 1), (32, 64, 128, 2, 3, 1), (128, 16, 32, 4, 2, 1)], ids=str
)
def test_products_with_experts_do_not_depend_on_launch_sizes(sizes, monkeypatch):
    monkeypatch.setattr(experts, "many_sizes", lambda *_: launch_sizes.ManySizes(*sizes))
    check_experts(expert_arguments(40, 5, 2, 72, 88, torch.float16), torch.float16, None)


@pytest.mark.parametrize("form", [INT4, E4M3, others.Q4_K], ids=lambda form: form.name)
def test_numbers_of_slots(form):
    """Experts that nobody chose, and blocks of slots that are just full or one more."""
    E, C, F, dtype = 7, 256, 256, torch.float16
    counts = [0, 1, 15, 16, 17, 300 if ON_GPU else 40, 2]
    T = sum(counts)
    ids = torch.arange(E, dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    ids = ids[torch.randperm(T)].view(T, 1).to(DEVICE)
    order = ids.flatten().sort(stable=True).indices.int()
    counts = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    routes = experts.Routes(ids, torch.rand(T, 1, device=DEVICE), order, counts)
    _, layer, state = expert_arguments(1, E, 1, C, F, dtype)
    layer.w13, layer.w2 = (random_matrix(form, E * N, K) for N, K in ((2 * F, C), (C, F)))
    x, h = randn(T, C, dtype=dtype), randn(T, 1, F, dtype=dtype)
    exact, exact_layer = as_fp32((x, layer))
    y = kernels.rmsnorm_swiglu(x, layer, state, routes, accumulate="fp32")
    right = kernels.rmsnorm_swiglu_ref(exact, exact_layer, state, routes)
    assert nmse(y, right) < 2e-5
    y = kernels.linear_add(h, layer.w2, torch.zeros_like(x), routes, accumulate="fp32")
    right = kernels.linear_add_ref(h.float(), exact_layer.w2, torch.zeros_like(exact), routes)
    assert nmse(y, right) < 2e-5


@needs_gpu
@pytest.mark.parametrize("form", [E4M3, INT4], ids=lambda form: form.name)
def test_8_bit_tensor_cores_multiply_a_prompt_with_experts(form):
    """Activations, and the weights of INT4, are rounded to E4M3: see the test of dense products."""
    if E4M3.on(DEVICE) is not E4M3_NATIVE:
        pytest.skip("this GPU has none")
    arguments = expert_arguments(600, 7, 3, 256, 320, torch.float16, form)
    errors = experts_errors(arguments, torch.float16, "auto")
    assert all(2.0**-14 < error < 2.0**-8 for error in errors), errors


@pytest.mark.parametrize("T", [2, 5, 8, 9, 300])
@pytest.mark.parametrize("E, k", [(20, 8), (128, 8), (8, 2), (5, 3), (2, 1)])
def test_slots_are_sorted(T, E, k):
    """By one kernel or, with more tokens, by two."""
    x, layer, pass_ = expert_arguments(T, E, k, 16, 16)
    routes = kernels.fused.route(x, layer, pass_)
    ids = routes.ids.flatten()
    assert torch.equal(routes.order, ids.sort(stable=True).indices.int())
    assert torch.equal(routes.counts, ids.bincount(minlength=E).int())


def test_routers_equal_their_reference():
    x, layer, pass_ = expert_arguments(150, 5, 2, 64, 64)
    right = kernels.reference.route(x, layer, pass_)
    for ops, rows in itertools.product((kernels.reference, kernels.fused), (150, 20, 16, 3, 1)):
        routes = picked(ops.route(x[:rows].contiguous(), layer, pass_))
        assert torch.equal(routes.ids, right.ids[:rows])
        assert torch.allclose(routes.weights, right.weights[:rows], rtol=1e-3)


@pytest.mark.parametrize("warps", [1, 4])
def test_w2_takes_the_experts_that_w13_chose(warps, monkeypatch):
    """Of one token after the other, whose kernels overlap on a GPU: w2 reads the ids before it
    waits."""
    sizes = launch_sizes.VectorSizes(2, 512, warps)
    monkeypatch.setattr(products, "vector_sizes", lambda *_: sizes)
    count, C = (500, 512) if ON_GPU else (3, 32)
    x, layer, pass_ = expert_arguments(count, 16, 3, C, C, torch.float16)
    residual = torch.zeros_like(x)

    def run() -> None:
        for token, sum_ in zip(x.split(1), residual.split(1)):
            routes = kernels.fused.route(token, layer, pass_)
            h = kernels.fused.rmsnorm_swiglu(token, layer, pass_, routes)
            kernels.fused.linear_add(h, layer.w2, sum_, routes)

    if ON_GPU:
        graph = captured(run, DEVICE)
        graph.replay()
    else:
        run()
    ops = kernels.reference
    exact, exact_layer = as_fp32((x, layer))
    routes = ops.route(exact, exact_layer, pass_)
    h = ops.rmsnorm_swiglu(exact, exact_layer, pass_, routes)
    right = ops.linear_add(h, exact_layer.w2, torch.zeros_like(exact), routes)
    errors = (residual - right).square().mean(1) / right.square().mean()
    assert errors.max() < 1e-4, f"token {int(errors.argmax())}"


@pytest.mark.parametrize("form", [E4M3, INT4], ids=lambda form: form.name)
def test_experts_with_large_norms(form):
    """fit_norm leaves them as they are, since nothing multiplies by them in half precision."""
    for T in (1, 5, 17):
        x, layer, pass_ = expert_arguments(T, 5, 2, 256, 64, torch.float16, form)
        layer.ffn_norm *= 150
        layer.router.data.div_(150)
        form.multiply(layer.w13.tensors, 2**-7)  # so that h fits into fp16
        check_experts((x, layer, pass_), torch.float16, form)


def test_exchange_of_experts():
    """Two ranks in one process, with a share of each expert's hidden_dim."""
    E, k, C, F, dtype = 5, 2, 72, 48, torch.float16
    ids = torch.tensor([[3, 1]], dtype=torch.int32, device=DEVICE)
    residual = randn(1, C, dtype=dtype)
    exact = residual.float()
    routes = experts.SingleRoute(ids, residual, torch.ones(E, device=DEVICE), norm_topk=True)
    chosen = experts.Routes(ids, torch.ones(1, k, device=DEVICE))
    parts = [Matrix(randn(E * C, F, dtype=dtype, scale=0.1)) for _ in range(2)]
    h = [randn(1, k, F, dtype=dtype) for _ in range(2)]
    for part, mine in zip(parts, h):
        kernels.linear_add_ref(mine.float(), dense(part), exact, chosen)
    exchanges = exchanges_of([[part] for part in parts])
    stack = routes.w2_stack(C)
    for exchange, part, mine in zip(exchanges, parts, h):
        exchange.send(products.Product("experts_linear_add", mine[0], part), stack)
    for exchange, part in zip(exchanges, parts):
        ours = exchange.add_received(part, residual.clone())
        assert nmse(ours, exact) < ONE_UNIT[dtype]
    term = torch.full((1, C), NAN, dtype=dtype, device=DEVICE)
    kernels.fused.linear_store(h[0], parts[0], term, routes)
    exact = h[0].float(), dense(parts[0]), term.float(), chosen
    ours = kernels.reference.linear_store(*exact)
    assert nmse(term, ours) < ONE_UNIT[dtype]


def routes_of(logits: torch.Tensor, k: int, ops=kernels.fused, norm_topk=True):
    """What a router picks whose logits, for T tokens, are these up to a factor."""
    T, E = logits.shape
    layer = SimpleNamespace(
        ffn_norm=torch.ones(T, device=DEVICE),
        router=Matrix((logits.t() / T**0.5).contiguous().to(DEVICE)),
    )
    pass_ = pass_of_experts(k, norm_topk, eps=0.0)
    return picked(ops.route(torch.eye(T, device=DEVICE), layer, pass_))


@pytest.mark.parametrize("ops", [kernels.reference, kernels.fused], ids=["torch", "triton"])
@pytest.mark.parametrize("T", [1, 3, 20])
def test_experts_that_tie_or_are_not_finite(ops, T):
    """One of the tokens meets these logits, the others random ones."""
    cases = {
        (1, 1, 1, 1, 1): (0, 1, 2),
        (0, 2, 1, 2, 2): (1, 3, 4),
        (0, 2, 1, 2, 1): (1, 3, 2),
        (NAN,) * 5: (0, 1, 2),
    }
    if T == 1:  # 0 * NaN would be NaN for the other tokens, too
        cases[(-1, NAN, -2, NAN, -3)] = (0, 2, 4)
        cases[(NAN, NAN, NAN, 5, NAN)] = (3, 0, 1)
    for (logits, expected), norm_topk in itertools.product(cases.items(), (True, False)):
        rows = torch.randn(T, 5)
        rows[T // 2] = torch.tensor(logits)
        if all(map(math.isnan, logits)):
            rows *= NAN
        routes = routes_of(rows, 3, ops, norm_topk)
        assert tuple(routes.ids[T // 2].tolist()) == expected
        shares = rows[T // 2].nan_to_num(-INF).softmax(0)[list(expected)]
        if norm_topk:
            shares /= shares.sum()
        assert routes.weights[T // 2].cpu().allclose(shares, rtol=1e-3, equal_nan=True), logits


@pytest.mark.parametrize("T", [1, 3, 20])
def test_eight_of_128_experts(T):
    logits = torch.stack([torch.randperm(128) for _ in range(T)]) / 8 - 8
    best = logits.topk(8)
    routes = routes_of(logits, 8)
    assert torch.equal(routes.ids.cpu().long(), best.indices)
    assert routes.weights.cpu().allclose(best.values.softmax(1), rtol=1e-3)


def single_route(logits: torch.Tensor, k: int) -> experts.SingleRoute:
    ids = torch.zeros(1, k, dtype=torch.int32, device=DEVICE)
    return experts.SingleRoute(ids, logits[None], logits, norm_topk=True)


def test_logits_that_nearly_tie():
    """Of 128, 16 bits of their mantissas count."""
    logits = torch.zeros(128, device=DEVICE)
    logits[3], logits[90] = 1, 1 + 2**-17
    assert picked(single_route(logits, 2)).ids.tolist() == [[3, 90]]
    logits[90] = 1 + 2**-16
    assert picked(single_route(logits, 2)).ids.tolist() == [[90, 3]]


def test_zeros_of_either_sign_tie():
    logits = torch.tensor([-1, -0.0, 0.0, -2, -3], device=DEVICE)
    routes = picked(single_route(logits, 2))
    assert routes.ids.tolist() == [[1, 2]] and routes.weights.tolist() == [[0.5, 0.5]]
