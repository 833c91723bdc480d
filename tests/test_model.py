"""Tests of model.py."""

import contextlib
import functools
import gc
import itertools
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import kernels
import launch
import sampling
from loading.checkpoint import load
from model import LENGTHS, PROMPT_CHUNK, Llama, State, Timings, captured, generate
from sampling import Sampling
from tests.helpers import (
    BACKENDS,
    DEVICE,
    INF,
    NAN,
    ON_GPU,
    SEED,
    assert_close,
    decode_in_graphs,
    examples,
    greedy,
    interrupted_at,
    logits_of,
    logits_of_prompts,
    needs_gpu,
    nmse,
    text_of,
)


@pytest.mark.parametrize("where", ["on a CPU", "in graphs"])
def test_calls_on_one_state(tiny_model, where, monkeypatch):
    """Prompts that have something in common with what came before, texts that nobody reads to the
    end, Ctrl-C within an op, a full context: each text is that of a new state, and of each prompt
    only what the state has not seen is evaluated, and its last token."""
    if where == "in graphs":
        decode_in_graphs(monkeypatch)
    monkeypatch.setitem(PROMPT_CHUNK, "cpu", 4)
    monkeypatch.setattr("model.LENGTHS", (4,))
    settings = [dict(), dict(temp=0), dict(repeat_penalty=1.5), dict(top_k=0, seed=5)]
    call = st.tuples(
        st.integers(0, 9), st.lists(st.integers(3, 9), max_size=6), st.integers(-1, 5),
        st.integers(1, 6), st.integers(0, 50), st.sampled_from(settings),
    )  # fmt: skip

    @examples(25, size=st.sampled_from([17, 40]), calls=st.lists(call, min_size=2, max_size=5))
    def check(size, calls):
        state, seen = State(tiny_model, size), [1]
        for kept, new, n, taken, stops, sampled in calls:
            prompt = [1, *seen[1 : 1 + kept], *new]
            known = sum(itertools.takewhile(bool, map(int.__eq__, seen[: state.pos], prompt)))
            if prompt != state.prompt:  # the latest one, whose logits are kept
                known = min(known, len(prompt) - 1)
            timings, got, finished = Timings(), [], False
            options = dict(n=n, sampling=Sampling(**sampled), eos=[])
            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                interrupted_at(patch, tiny_model.ops, stops)
                text = generate(tiny_model, prompt, state, timings=timings, **options)
                with contextlib.closing(text):
                    got.extend(itertools.islice(text, taken))
                finished = True
            seen = prompt + got
            alone = State(tiny_model, size)
            expected = [*generate(tiny_model, prompt, alone, **options)][:taken]
            assert got == (expected if finished else expected[: len(got)]), "not as a new state's"
            assert state.pos == int(state.device_pos) >= known
            assert state.tokens[: state.pos].tolist() == seen[: state.pos]
            assert (timings.new_tokens, timings.steps) == (len(got), max(len(got) - 1, 0))
            if finished:
                assert state.pos == len(prompt) + max(len(got) - 1, 0)
                assert timings.prompt_tokens == len(prompt) - known, "not what was new"
            evaluated = min(state.pos, alone.pos)
            for ours, theirs in zip(state.k + state.v, alone.k + alone.v):
                assert ours[:, :evaluated].allclose(theirs[:, :evaluated], atol=1e-3)

    check()


def test_an_ignored_eos_is_never_sampled(tiny_model):
    every_but_7 = {*range(tiny_model.config.vocab_size)} - {7}
    options = dict(n=5, eos=every_but_7, ignore_eos=True)
    for settings in (Sampling(temp=0), Sampling(), Sampling(temp=INF, top_k=0, top_p=1, min_p=0)):
        assert [*generate(tiny_model, [1, 5], sampling=settings, **options)] == [7] * 5
    state = State(tiny_model)
    greedy(tiny_model, [1, 5], 1, state, eos=every_but_7, ignore_eos=True)
    of_7 = dict(eos=[7], ignore_eos=True)
    alone = greedy(tiny_model, [1, 5], 5, **of_7)
    assert greedy(tiny_model, [1, 5], 5, state, **of_7) == alone, "earlier bans are lifted"
    greedy(tiny_model, [1, 5], 1, state, eos=[-1], ignore_eos=True)
    assert not state.never, "no eos is not the last id"


@BACKENDS
@pytest.mark.parametrize("kv_fp8", [False, True])
def test_context_to_its_last_slot(tiny, kv_fp8, backend):
    model = load(tiny, dtype="fp32", device=DEVICE.type, ctx_size=8, backend=backend, kv_fp8=kv_fp8)
    whole = greedy(model, [5, 6], 2)
    for size in (1, 2, 4):
        state, prompt = State(model, size), [5, 6][:size]
        assert greedy(model, prompt, -1, state) == whole[: size - len(prompt)]
        assert state.device_pos == state.pos
        with pytest.raises(ValueError, match=f"has {size + 1} tokens; the context holds {size}"):
            greedy(model, [7] * (size + 1), -1, state)


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


@pytest.mark.parametrize("how", ["generate", "single steps", "chunks"])
def test_no_step_sees_an_old_position(tiny, how):
    """Keys and values after thousands of steps equal those of torch's ops, which do not overlap."""
    steps = 3000 if ON_GPU else 4
    sizes = [1] * steps
    if how == "chunks":
        sizes = random.choices((1, 2, 17, 40), k=steps // 20 or 2)
    options = dict(dtype="fp32", device=DEVICE.type, ctx_size=max(steps, sum(sizes)) + 8)
    model, plain = (load(tiny, backend=backend, **options) for backend in ("triton", "torch"))
    state, expected = State(model), State(plain)
    with torch.inference_mode():
        if how == "generate":
            list(generate(model, [1, 5, 9], state, steps, Sampling(temp=1.5, seed=SEED), eos=[]))
        else:
            for part in torch.randint(3, 300, (sum(sizes),), device=DEVICE).split(sizes):
                state.append(part)
                model.step(len(part), state)
        assert int(state.device_pos) == state.pos
        plain.prefill(state.tokens[: state.pos].tolist(), expected)
    for ours, theirs in zip((*state.k, *state.v), (*expected.k, *expected.v)):
        ours, theirs = (t[:, : state.pos] for t in (ours, theirs))
        errors = (ours - theirs).square().sum((0, 2)) / theirs.square().sum((0, 2))
        assert errors.max() < 1e-6, f"position {int(errors.argmax())} of {state.pos}"


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
    state, prompt = State(model), [1, 5, 6]
    greedy(model, prompt, 0, state)
    for (which, bad), new in itertools.product((("k", NAN), ("v", INF)), ([7], [7, 8, 9])):
        state.truncate(len(prompt))
        number = getattr(state, which)[1][:, 1, 2]
        before = number.clone()
        number.fill_(0x7F if kv_fp8 else bad)
        with pytest.raises(RuntimeError, match="not finite, although every weight is"):
            greedy(model, [*prompt, *new], 1, state)
        number.copy_(before)


def test_lengths_of_prompts():
    """From 192 tokens on, where arithmetic counts, padding adds at most a twelfth; there are few
    graphs, and any rest of a chunk is one."""
    assert list(LENGTHS) == sorted(set(LENGTHS)) and LENGTHS[0] == 1 and len(LENGTHS) < 72
    steps = [(low, high) for low, high in itertools.pairwise(LENGTHS) if high > 192]
    assert all(12 * (high - low) <= low for low, high in steps)
    assert {PROMPT_CHUNK["cuda"], 2 * PROMPT_CHUNK["cuda"]} <= {*LENGTHS}


def test_padded_prompts_are_the_prompts(tiny, monkeypatch):
    """The first of each padded length is captured, the others are replayed. Where the context ends,
    what was before is evaluated again. After Ctrl-C nothing has changed."""
    model = load(tiny, device=DEVICE.type, dtype="fp32")
    # what stands beyond the prompt counts for nothing, not even as 0 * NaN
    model.weights.embedding = model.weights.embedding.clone()
    model.weights.embedding[0] = torch.nan
    if not ON_GPU:
        decode_in_graphs(monkeypatch, prompts=True)
    monkeypatch.setattr("model.LENGTHS", (1, 8, 16, 20))
    monkeypatch.setitem(PROMPT_CHUNK, DEVICE.type, 16)
    evaluate = Llama._forward

    def within_the_context(self, T, state, logits, row=None):
        assert state.pos + T <= state.size, "a kernel would write into the next head"
        return evaluate(self, T, state, logits, row)

    monkeypatch.setattr(Llama, "_forward", within_the_context)
    call = st.tuples(st.integers(0, 60), st.integers(1, 60), st.integers(0, 20))
    calls = st.lists(call, min_size=3, max_size=6)

    @examples(4 if ON_GPU else 40, size=st.sampled_from([48, 61]), calls=calls)
    def check(size, calls):
        state, plain = State(model, size), State(model, size)
        for back, T, stops in calls:
            for one in (state, plain):
                one.truncate(max(0, one.pos - back))
            before, finished = state.pos, False
            ids = torch.randint(3, 300, (min(T, size - before),), device=DEVICE)
            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                if not ON_GPU:
                    interrupted_at(patch, model.ops, stops)
                model.prefill(ids.tolist(), state)
                finished = True
            done = state.pos - before
            assert int(state.device_pos) == state.pos and (done == len(ids) or not finished)
            if done:
                exact = model.forward(ids[:done], plain)[-1]
                assert nmse(state.logits, exact) < 1e-6 or not finished
            for ours, theirs in zip(state.k + state.v, plain.k + plain.v):
                same = ours[:, : state.pos].allclose(theirs[:, : state.pos], atol=1e-3)
                assert same, f"{T} tokens at {before} of {size} have changed other positions"

    with torch.inference_mode():
        check()


@pytest.mark.parametrize("T, graphs, at", [
    (36, {16, 20}, [16, 36]), (37, {16, 8}, [16, 32, 37]), (20, {20}, [20]), (7, {8}, [7]), (1, {1}, [1]),
])  # fmt: skip
def test_long_prompts_are_graphs(tiny_model, monkeypatch, T, graphs, at):
    """Chunks of 16 tokens; what remains after them is not a chunk of its own if it is short."""
    decode_in_graphs(monkeypatch, prompts=True)
    monkeypatch.setattr("model.LENGTHS", (1, 8, 16, 20))
    monkeypatch.setitem(PROMPT_CHUNK, "cpu", 16)
    state, done = State(tiny_model, 64), []
    with torch.inference_mode():
        tiny_model.prefill([*range(3, 3 + T)], state, lambda n, total: done.append((n, total)))
    assert {length for _, length in state.graphs} == graphs
    assert done == [(n, T) for n in at]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_model_on_another_gpu(tiny):
    """Whatever the current device is: in another thread it is the first one again."""
    first, second = (load(tiny, dtype="fp32", device=f"cuda:{i}") for i in range(2))
    expected = greedy(first, [1, 5, 9], 20)
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(greedy, second, [1, 5, 9], 20).result()
    assert elsewhere == greedy(second, [1, 5, 9], 20) == expected


@needs_gpu
def test_a_cache_is_freed_with_its_owner(tiny):
    model, held = load(tiny, device="cuda"), []
    for i in range(4):
        list(generate(model, [1, 5], n=3, sampling=Sampling(seed=i), eos=[]))
        held.append(torch.cuda.memory_allocated())
    state = State(model)
    list(generate(model, [1, 5], state, n=3, eos=[]))
    gone = weakref.ref(state)
    del state
    assert gone() is None and held[1] == held[3]


def test_nothing_is_collected_during_a_capture(monkeypatch):
    """Freeing a graph, such as a dropped Speculation's, would end the capture of another."""
    for name in ("torch.cuda.CUDAGraph", "torch.cuda.synchronize", "model._capture_stream"):
        monkeypatch.setattr(name, lambda *_: None)
    for name in ("graph", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("model.compile_kernels", lambda run, device: run())
    seen, resets = [], []
    reset = lambda: resets.append((len(seen), gc.isenabled()))
    captured(lambda: seen.append(gc.isenabled()), DEVICE, reset)
    assert seen == [True, False] and resets == [(1, True), (2, True)] and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        captured(lambda: 1 / gc.isenabled(), DEVICE)
    assert gc.isenabled()


@pytest.mark.parametrize("top_k, other_top_k", [(5, 3), (40, 30)], ids=["listed", "sorted"])
def test_other_sampling_needs_no_other_graph(top_k, other_top_k, tiny, monkeypatch):
    """A graph is replayed with the arguments of the capture, of which numbers are read anew."""
    recorded, captures = [], []

    def recording(function):
        def record(*arguments, **constants) -> None:
            recorded.append(functools.partial(function, *arguments, **constants))
            recorded[-1]()

        return record

    def captured(run, device, reset) -> SimpleNamespace:
        recorded.clear()
        run()
        reset()
        captures.append(launches := [*recorded])
        replay = lambda: [launch() for launch in launches] + [model.step(1, state)]
        return SimpleNamespace(replay=replay)

    model = load(tiny, dtype="fp32", device=DEVICE, backend="torch", ctx_size=64)
    state = State(model)
    first = Sampling(temp=2.0, top_k=top_k, top_p=0.9, repeat_penalty=1.1, repeat_last_n=30)
    state.sampler.set(first)
    assert state.sampler.switches(model.config.vocab_size).sorts == (top_k == 40)
    changes = dict(
        seed=(SEED, (1 << 63) - 1), temp=(1.3, 1e-9), top_k=(other_top_k,), top_p=(0.4,),
        min_p=(0.3, 0), repeat_penalty=(1.9,), repeat_last_n=(20,),
    )  # fmt: skip
    every = [replace(first, **{name: value}) for name in changes for value in changes[name]]
    every = [first, *every]
    expected = [text_of(model, settings, 8) for settings in every]
    assert len({*map(tuple, expected)}) > 6
    model.ops = SimpleNamespace(**vars(model.ops) | dict(sample=kernels.fused.sample))
    monkeypatch.setattr(sampling, "launch", recording(launch.launch))
    monkeypatch.setattr(sampling, "_find_floors", recording(sampling._find_floors))
    decode_in_graphs(monkeypatch)
    monkeypatch.setattr("model.captured", captured)
    assert [text_of(model, settings, 8, state) for settings in every] == expected
    assert len(captures) == 1
    for change in (dict(temp=0), dict(top_p=1), dict(top_k=100), dict(repeat_penalty=1.1)):
        other = Sampling(**change)
        text_of(model, other, 1, state)
    text_of(model, other, 1, State(model))
    text_of(model, other, 1, state, eos=[3], ignore_eos=True)
    assert len(captures) == 7 and len(state.graphs) == 1, "one graph of a kind is kept"
