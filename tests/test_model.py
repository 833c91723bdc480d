"""Tests of model.py."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels
from engine import Engine
from loading.checkpoint import load
from sampling import Sampling
from tests.helpers import (
    BACKENDS,
    DEVICE,
    INF,
    NAN,
    SEED,
    assert_close,
    greedy,
    logits_of,
    logits_of_prompts,
    nmse,
    text_of,
)


def test_accumulate_reaches_the_products(tiny, monkeypatch):
    seen, product = [], kernels.library_product

    def library_product(multiplied, accumulate, *others):
        seen.append(accumulate)
        return product(multiplied, accumulate, *others)

    monkeypatch.setattr(kernels, "library_product", library_product)
    for accumulate in ("auto", "fp32"):
        options = dict(dtype="fp32", device=DEVICE.type, backend="triton", accumulate=accumulate)
        logits_of(load(tiny, **options), [1, 2, 3])
        assert seen == [accumulate] * 9, "four of each of two layers, and the logits"
        seen.clear()


# roundings of 2^-12, 2^-9
@pytest.mark.parametrize("dtype, limit", [("fp32", 1e-4), ("fp16", 0.01), ("bf16", 0.05)])
def test_fused_model_is_the_reference_model(tiny, dtype, limit):
    which = (("fp32", "torch"), (dtype, "torch"), (dtype, "triton"))
    models = [load(tiny, dtype=d, device=DEVICE.type, backend=b) for d, b in which]
    prompts = torch.randint(3, 300, (1 if dtype == "fp32" else 8, 19))
    right, by_torch, ours = (logits_of_prompts(model, prompts, 17, 1, 1) for model in models)
    assert_close(by_torch, right, limit)
    assert nmse(ours, right) < 2 * nmse(by_torch, right) + 1e-10, "less exact than torch's ops"
    if dtype == "fp32":
        for settings in (Sampling(seed=SEED), Sampling(temp=0, repeat_penalty=1.3)):
            by_torch, ours = (text_of(model, settings, 2) for model in models[1:])
            assert ours == by_torch


@BACKENDS
@pytest.mark.parametrize("kv_fp8", [False, True])
def test_weights_not_finite(copy, kv_fp8, backend):
    """E4M3 has no infinity; torch takes a row of NaN scores for a masked one."""
    sound = load_file(copy / "model.safetensors")
    options = dict(dtype="fp32", device=DEVICE.type, ctx_size=16, backend=backend, kv_fp8=kv_fp8)
    # the last is the output matrix
    names = sorted((name for name in sound if "layers.1" not in name), reverse=True)
    spoiled = itertools.product(names, (NAN, INF, -INF))
    if backend == "triton":
        projection = "model.layers.0.self_attn.{}_proj.weight".format
        spoiled = zip(map(projection, "qkv"), (NAN, NAN, INF))
    for name, bad in spoiled:
        tensors = sound | {name: sound[name].clone()}
        tensors[name].view(-1)[5 + 3 * 64 * (sound[name].dim() - 1)] = bad
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        model = load(copy, **options)
        for prompt in ([3], [1, 3, 6]):
            with pytest.raises(RuntimeError, match=f"not finite: {name} .*holds NaN or inf"):
                greedy(model, prompt, 1)
    with pytest.raises(ValueError, match=f"{name} in model.safetensors.*NaN or inf"):
        load(copy, device="cpu", format="e4m3")


@BACKENDS
@pytest.mark.parametrize("kv_fp8", [False, True])
def test_cache_not_finite(tiny, kv_fp8, backend):
    options = dict(dtype="fp32", device=DEVICE.type, ctx_size=16, backend=backend, kv_fp8=kv_fp8)
    model = load(tiny, **options)
    engine, prompt = Engine(model), [1, 5, 6]
    spoiled = ("keys", NAN), ("values", INF)
    for (which, bad), new in itertools.product(spoiled, ([7], [7, 8, 9])):
        greedy(model, prompt, 0, engine)
        number = getattr(engine.cache, which)[1, :, 1, 2]
        before = number.clone()
        number.fill_(0x7F if kv_fp8 else bad)
        with pytest.raises(RuntimeError, match="not finite, although every weight is"):
            greedy(model, [*prompt, *new], 1, engine)
        number.copy_(before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_model_on_another_gpu(tiny):
    """Whatever the current device is: in another thread it is the first one again."""
    first, second = (load(tiny, dtype="fp32", device=f"cuda:{i}") for i in range(2))
    expected = greedy(first, [1, 5, 9], 20)
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(greedy, second, [1, 5, 9], 20).result()
    assert elsewhere == greedy(second, [1, 5, 9], 20) == expected
