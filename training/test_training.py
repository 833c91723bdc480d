"""Tests of training/."""

import itertools
import json
import re
import shutil
import sys

import pytest
import torch

import bench
import launch
from model import Config
from tests.helpers import DEVICE, GREEDY, INF, NAN, SEED, TALES, nmse, randn
from training import ops as training
from training import profile_step, train

# ---- ops.py


# An error of half a unit in the last place; in fp32, that of a sum of some rounded terms
HALF_PLACE = {torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9, torch.float32: 2.0**-23}


def training_cases(op: str, dtype: torch.dtype) -> list[tuple]:
    """Arguments of a training op, of odd shapes."""
    x = lambda *shape, scale=1.0: randn(*shape, dtype=dtype, scale=scale)
    targets = lambda T, V: torch.randint(0, V, (T,), device=DEVICE)
    some = targets(19, 201)
    some[[0, 7]] = training.IGNORE
    sure = x(19, 201).fill_(-30.0)
    sure[torch.arange(19), some.clamp(min=0)] = 30.0  # one-hot rows, whose softmax is one-hot, too
    angles = torch.rand(20, 12, device=DEVICE) * 6
    norms = [((3, 17), 72, True), ((3, 7), 520, None), ((1,), 520, True), ((1,), 72, None)]
    heads = [(2, 17, 4, 2), (1, 1, 2, 2), (3, 20, 6, 1)]
    return {
        "linear": [(x(2, 37, 24), x(40, 24), x(40)), (x(1, 16), x(3, 16), x(3))],
        "rmsnorm": [
            (x(*rows, C, scale=30), branch and x(*rows, C), x(C), 1e-5, dtype)
            for rows, C, branch in norms
        ],
        "rope": [
            (x(B, S, (H + 2 * KH) * 24), angles.cos(), angles.sin(), H, KH) for B, S, H, KH in heads
        ],
        "swiglu": [(x(3, 17, 2 * 52, scale=4),), (x(1, 2 * 7),), (x(5, 2 * 600),)],
        "cross_entropy": [
            (x(19, 201, scale=5), some),
            (x(19, 201) + (1000 if dtype == torch.float16 else 10000), some),
            (sure, some),
            (x(1, 3), targets(1, 3)),
            (x(1, 16384), targets(1, 16384)),
            (x(2, 33001, scale=3), targets(2, 33001)),  # two whole blocks and a ragged one
        ],
        "linear_cross_entropy": [(x(19, 24), x(201, 24), some), (x(1, 8), x(3, 8), targets(1, 3))],
    }[op]


def differentiated(ops, op: str, arguments: tuple, dtype: torch.dtype, upstream=None) -> tuple:
    """An op's outputs for arguments in dtype with the gradients of its matrices; and the gradients
    fed back."""
    passed, leaves = [], []
    for i, a in enumerate(arguments):
        if isinstance(a, torch.dtype):
            a = dtype
        elif isinstance(a, torch.Tensor) and a.is_floating_point():
            # angles, which are in fp32 at least and have no gradient
            if op == "rope" and i in (1, 2):
                a = a.double() if dtype == torch.float64 else a
            else:
                leaves.append(a.to(dtype, copy=True).requires_grad_())
                a = leaves[-1].clone()  # not a leaf, since some of the ops overwrite it
        passed.append(a)
    outputs = getattr(ops, op)(*passed)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if upstream is None:
        # of a loss a power of two, which multiplies a gradient that was rounded once exactly
        upstream = [torch.randn_like(o) if o.ndim else torch.full_like(o, 0.5) for o in outputs]
    torch.autograd.backward(outputs, [u.to(o.dtype) for u, o in zip(upstream, outputs)])
    return [o.detach() for o in outputs] + [a.grad for a in leaves], upstream


def distance(ours: torch.Tensor, exact: torch.Tensor, least: float = 1e-6) -> float:
    """The relative error of a whole vector; of one smaller than `least`, such as the gradient of
    rows that are sure of their target, the absolute error in units of `least`."""
    return ((ours.double() - exact).norm() / exact.norm().clamp(min=least)).item()


def smallest(op: str, arguments: tuple, dtype: torch.dtype) -> float:
    """The `least` of distance. For a row that is nearly sure of its target, loss and gradient are
    found from numbers near 1, so they keep errors of four roundings of 1 in fp32; behind a matmul,
    times the norm of its matrix."""
    if "entropy" not in op:
        return 1e-6
    matrix = arguments[1].double().norm().item() if op.startswith("linear") else 1.0
    return max(matrix, 1.0) * HALF_PLACE[torch.float32] / HALF_PLACE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", vars(training.fused))
def test_training_op_equals_autograd(op, dtype, guarded, monkeypatch):
    monkeypatch.setattr(training, "CHUNK", 7)  # of linear_cross_entropy
    for arguments in training_cases(op, dtype):
        ours, upstream = differentiated(training.fused, op, arguments, dtype)
        again, _ = differentiated(training.fused, op, arguments, dtype, upstream)
        plain, _ = differentiated(training.reference, op, arguments, dtype, upstream)
        exact, _ = differentiated(training.reference, op, arguments, torch.float64, upstream)
        for i, (o, a, p, e) in enumerate(zip(ours, again, plain, exact, strict=True)):
            where = (op, [tuple(x.shape) for x in arguments if isinstance(x, torch.Tensor)], i)
            assert o.shape == e.shape and o.dtype == p.dtype and torch.equal(o, a), where
            error, plain_error = (distance(x, e, smallest(op, arguments, dtype)) for x in (o, p))
            assert error <= 2 * max(plain_error, HALF_PLACE[dtype]), (*where, error, plain_error)
    guarded()


def test_dropout_forward_and_backward():
    x = torch.zeros(40, 250, device=DEVICE, requires_grad=True)
    branch = torch.ones(40, 250, device=DEVICE, requires_grad=True)
    weight = torch.ones(250, device=DEVICE)
    masks = []
    for p in (0.3, 0.3, 0.05):
        branch.grad = None
        total, y = training.rmsnorm(x, branch, weight, 1e-5, torch.float32, p)
        (total.sum() + 0 * y.sum()).backward()
        assert torch.equal(branch.grad, total.detach())
        assert ((total == 0) | (total == 1 / (1 - p))).all()
        masks.append(total.detach() != 0)
        deviation = (p * (1 - p) / total.numel()) ** 0.5
        assert abs(masks[-1].double().mean().item() - (1 - p)) < 6 * deviation
    kept = masks[0].sum().item()
    in_both = (masks[0] & masks[1]).sum().item()
    assert abs(in_both / kept - 0.7) < 6 * (0.7 * 0.3 / kept) ** 0.5, "two calls share a mask"


@pytest.mark.skipif(DEVICE.type != "cpu", reason="takes 30 GB of GPU memory")
def test_swiglu_of_more_than_2_31_elements(tmp_path, monkeypatch):
    """Only the last program runs, on sparse files that begin with as much again: there an offset
    that wraps lands."""
    from triton.runtime.interpreter import InterpreterBuilder

    T, F, half = (1 << 18) + 1, 8192, torch.float16
    sizes = dict(F=F, BLOCK=training.ELEMENTS)
    last = (T * F // training.ELEMENTS - 1, 0, 0)
    set_idx = lambda self, *_: setattr(self, "grid_idx", last)
    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", set_idx)

    def sparse(name: str, N: int) -> torch.Tensor:
        whole = torch.from_file(str(tmp_path / name), True, 2 * T * N, dtype=half)
        return whole[T * N :].view(T, N)

    files = {"ab": 2 * F, "dout": F, "out": F, "dab": 2 * F}
    ab, dout, out, dab = itertools.starmap(sparse, files.items())
    ab[-1].normal_()
    dout[-1].normal_()
    launch.launch(training._swiglu_forward_kernel, (1,), DEVICE, ab, out, T * F, **sizes)
    backward = training._swiglu_backward_kernel
    launch.launch(backward, (1,), DEVICE, ab, dout, dab, T * F, **sizes)
    exact = ab[-1].double().requires_grad_()
    right = training.swiglu_ref(exact)
    right.backward(dout[-1].double())
    pairs = [(out[-1], right.detach()), *zip(dab[-1].view(2, F), exact.grad.view(2, F))]
    for found, expected in pairs:
        end = slice(-training.ELEMENTS, None)
        assert distance(found[end], expected[end]) < 2 * HALF_PLACE[half]


def test_cross_entropy_gradient_in_place(guarded):
    logits = torch.empty_like(torch.zeros(5, 201, device=DEVICE)).normal_().requires_grad_()
    loss = training.cross_entropy(logits, torch.randint(0, 201, (5,), device=DEVICE))
    two = torch.tensor(2.0, device=DEVICE)
    (gradient,) = torch.autograd.grad(loss, logits, two, retain_graph=True)
    assert gradient.data_ptr() == logits.data_ptr()
    guarded()
    with pytest.raises(AssertionError, match="once"):
        torch.autograd.grad(loss, logits)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_loss_without_a_gradient(mode, monkeypatch):
    never = lambda *arguments: pytest.fail("a gradient was computed")
    monkeypatch.setattr(training, "_accumulate", never)
    wanted = mode is not torch.enable_grad  # by the tensors, though not there
    logits = torch.randn(5, 201, device=DEVICE)
    targets = torch.randint(0, 201, (5,), device=DEVICE)
    x, w = (torch.randn(rows, 24, device=DEVICE, requires_grad=wanted) for rows in (5, 201))
    before = logits.clone()
    logits = logits.requires_grad_(wanted)
    with mode():
        loss = training.cross_entropy(logits, targets)
        joint = training.linear_cross_entropy(x, w, targets)
    assert torch.equal(logits, before) and not loss.requires_grad and not joint.requires_grad
    assert torch.allclose(loss, training.cross_entropy_ref(before, targets))
    assert torch.allclose(joint, training.linear_cross_entropy_ref(x, w, targets))


def test_linear_cross_entropy_of_two_types():
    x, w, targets = training_cases("linear_cross_entropy", torch.float32)[0]
    x = x.bfloat16().requires_grad_()
    w = w.requires_grad_()
    loss = training.linear_cross_entropy(x, w, targets)
    loss.backward()
    exact = training.linear_cross_entropy_ref(x.detach().float(), w, targets)
    weight = w.grad.clone()
    exact.backward()
    assert loss.dtype == torch.float32 and nmse(loss.detach(), exact.detach()) < 1e-3
    assert x.grad.dtype == torch.bfloat16 and nmse(weight, w.grad - weight) < 1e-3


def test_cross_entropy_not_finite_or_ignored():
    V, rows = 201, training.cross_entropy_rows
    ids = lambda *values: torch.tensor(values, device=DEVICE)
    for bad in (INF, NAN):
        logits = torch.randn(4, V, device=DEVICE)
        targets = ids(3, 7, training.IGNORE, 9)
        logits[1, 50] = bad
        assert rows(logits, targets).isfinite().tolist() == [True, False, True, True]
        assert not training.cross_entropy(logits.clone().requires_grad_(), targets).isfinite()
        targets[1] = training.IGNORE
        assert training.cross_entropy(logits, targets).isfinite()
    low = torch.randn(2, V, device=DEVICE)
    low[:, 5:] = -INF
    exact = torch.nn.functional.cross_entropy(low, ids(3, 8), reduction="none")
    assert torch.allclose(rows(low, ids(3, 8)), exact)
    for outside in (-1, V):
        assert rows(torch.randn(1, V, device=DEVICE), ids(outside)).isnan().all()


def test_cross_entropy_of_cut_rows(monkeypatch, guarded):
    """Into blocks kept in registers, blocks that are read twice, and a tail; rows of 643 start at
    any alignment."""
    cut, dtype = training._cross_entropy_launch, torch.bfloat16
    for V, (kept, at_once) in itertools.product((65, 640, 643), ((0, 4), (3, 1), (3, 4), (99, 1))):
        start = randn(3, V, dtype=dtype, scale=3)
        targets = torch.randint(0, V, (3,), device=DEVICE)
        exact = start.double().requires_grad_()
        logits = torch.empty_like(start).copy_(start)
        losses = torch.nn.functional.cross_entropy(exact, targets, reduction="none")
        losses.mean().backward()
        sizes = dict(BLOCK=64, KEPT=kept, AT_ONCE=at_once, warps=1)
        in_blocks = lambda *arguments, sizes=sizes: cut(*arguments) | sizes
        monkeypatch.setattr(training, "_cross_entropy_launch", in_blocks)
        alone = training.cross_entropy_rows(logits, targets)
        found = training.cross_entropy_rows(logits, targets, torch.tensor(3, device=DEVICE))
        where = (V, kept, at_once)
        assert distance(found, losses.detach()) < 4 * HALF_PLACE[torch.float32], where
        assert nmse(alone, found) < 1e-12, where
        assert distance(logits, exact.grad) <= 2 * HALF_PLACE[dtype], where
    guarded()


# ---- train.py and profile_step.py


SMALL = Config(
    dim=128,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=64,
    hidden_dim=192,
    vocab_size=300,
    norm_eps=1e-5,
    max_seq_len=16,
    tie_embeddings=True,
)


def test_training_with_either_table():
    tokens = torch.randint(0, 300, (2, 17), device=DEVICE)
    found = []
    for ops in (training.reference, training.fused):
        torch.manual_seed(SEED)
        model = train.Llama(SMALL, ops).to(DEVICE)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append(gradients | {"loss": loss.detach()})
    for name, exact in found[0].items():
        assert nmse(found[1][name], exact) < (1e-12 if name == "loss" else 1e-9), name


def test_training_profile(monkeypatch, capsys):
    x = torch.randn(6, 8, device=DEVICE)
    w = torch.randn(5, 8, device=DEVICE)
    one = torch.ones(6, 1, device=DEVICE)
    ids = lambda *values: torch.tensor(values, device=DEVICE)
    with profile_step.Counting() as counted:
        torch.mm(x, w.t())
        training.fused.swiglu(x)
        training.fused.rope(x[None], one, one, 2, 1)
        training.cross_entropy_rows(x, ids(*[0] * 6), ids(6)[0])
    assert counted.operations["aten::mm"] == 2 * 6 * 8 * 5
    expected = {
        "aten::mm": 4 * (6 * 8 + 5 * 8 + 6 * 5), "_swiglu_forward_kernel": 4 * (48 + 24),
        "_rope_forward_kernel": 4 * (2 * 36 + 2 * 6),  # q and k are 3 of 4 heads
        "_cross_entropy_kernel": 4 * 2 * 48 + 8 * 6 + 8 + 4 * 6,
    }  # fmt: skip
    assert {name: counted.bytes[name] for name in expected} == expected
    monkeypatch.setattr(bench, "copy_ceiling", lambda device: 1e10)
    monkeypatch.setattr(bench, "product_ceiling", lambda device, dtype: 1e11)
    flags = f"train.py --profile --batch 2 --window 16 --kernels plain --device {DEVICE.type}"
    monkeypatch.setattr(sys, "argv", flags.split())
    train.main()
    out = capsys.readouterr().out
    parts = re.findall(r"^\| (embedding|forward|classifier|backward|optimiser) ", out, re.MULTILINE)
    assert len(set(parts)) == 5 and re.search(r"efficiency [\d.]+%", out) and "aten::mm" in out


def test_a_trained_model_runs(tmp_path, cli, capfd, monkeypatch):
    """It has learnt its text by heart, with the names and in the rows that it was saved with."""
    like, out, book = tmp_path / "like", tmp_path / "out", tmp_path / "book.txt"
    config = json.loads((TALES / "config.json").read_text())
    config |= dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, head_dim=16)
    shutil.copytree(TALES, like, ignore=shutil.ignore_patterns("*.safetensors", "*.md"))
    (like / "config.json").write_text(json.dumps(config))
    text = "The fox met a crow in the wood, and the crow sang to him of the moon.\n"
    book.write_text(text * 20)
    flags = f"--like {like} --steps 80 --batch 8 --window 48 --lr 0.02 --dropout 0 --device cpu"
    command = ["train.py", str(book), "--out", str(out), *flags.split()]
    monkeypatch.setattr(sys, "argv", command)
    train.main()
    assert float(capfd.readouterr().out.split()[0]) < 1, "bits per byte"
    assert cli("-m", out, "-p", "The fox met", "-n", 40, *GREEDY)[1].startswith(text.strip())
    qwen = tmp_path / "qwen"
    shutil.copytree(like, qwen)
    (qwen / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    refused = {
        "out: File exists": (),
        "longer than the context of 1024": ("--window", "2000"),
        "too few for --window 1024": ("--window", "1024"),
        "qwen is no Llama": ("--like", str(qwen)),
    }
    for error, flags in refused.items():
        monkeypatch.setattr(sys, "argv", [*command, *flags])
        with pytest.raises(SystemExit, match=error):
            train.main()
