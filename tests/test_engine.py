"""Tests of engine.py, of passes.py, and of how launch.py captures graphs."""

import contextlib
import copy as copy_module
import functools
import gc
import itertools
import random
import weakref
from dataclasses import replace
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import kernels
import launch
import sampling
from engine import CHUNK_BESIDE, Engine, generate
from launch import captured
from loading.checkpoint import load
from passes import LENGTHS, MOST_TEXTS, PROMPT_CHUNK, Passes
from sampling import Sampling, mask_without
from speculation.proposals import Draft, Lookup
from tests.helpers import (
    BACKENDS,
    DEVICE,
    INF,
    MOST_PROBABLE,
    NAN,
    ON_GPU,
    SEED,
    Planted,
    Written,
    decode_in_graphs,
    examples,
    fails,
    greedy,
    interrupted_at,
    needs_gpu,
    nmse,
    other_model,
    text_of,
    together,
)
from texts import ContextFull

# ---- several texts


SETTINGS = [
    MOST_PROBABLE,
    MOST_PROBABLE,
    Sampling(seed=1),
    Sampling(temp=2, top_k=0, top_p=1, min_p=0, seed=5),
    Sampling(repeat_penalty=1.5, repeat_last_n=6, seed=0),
    Sampling(temp=0, repeat_penalty=1.1, repeat_last_n=-1),
    Sampling(temp=0, presence_penalty=0.5, frequency_penalty=0.7),
]
SYSTEM = [1, 5, 9, 3, 7, 7, 4, 8, 6, 5, 4, 3]
WAYS = {
    "none": lambda model, other: None,
    "lookup": lambda model, other: Lookup(3),
    "much looked up": lambda model, other: Lookup(15),
    "draft of itself": lambda model, other: Draft(3, Passes(copy_module.copy(model), 5, 40), 350),
    "another draft": lambda model, other: Draft(15, Passes(other, 5, 40), 350),
    "planted": lambda model, other: Planted(5),
    "many planted": lambda model, other: Planted(15),
}
A_TEXT = st.fixed_dictionaries(dict(
    kept=st.integers(0, 12),  # tokens of SYSTEM
    new=st.lists(st.integers(3, 9) | st.integers(3, 299), min_size=1, max_size=9),
    n=st.sampled_from([0, 1, 5, 9, -1]),  # the last fills the context
    sampling=st.sampled_from(SETTINGS),
    bias=st.sampled_from([None, None, {7: 9.0, 20: -9.0}]),
    eos=st.sampled_from([[], [*range(3, 60)], [-1, 999]]),
    ignore_eos=st.booleans(),
    ends=st.none() | st.integers(1, 6),  # stops at that token
    fails=st.none() | st.integers(1, 6),  # who takes the tokens fails at that one
    taken=st.none() | st.none() | st.integers(0, 6),  # is closed after so many
    scores=st.sampled_from([None] * 5 + [0, 2]),
))  # fmt: skip


PLAIN = dict(
    kept=0, new=[5, 6], n=9, sampling=MOST_PROBABLE, bias=None, eos=[], ignore_eos=False, ends=None,
    fails=None, taken=None, scores=None,
)  # fmt: skip
OPTIONS = "n", "sampling", "bias", "eos", "ignore_eos"


@contextlib.contextmanager
def small_chunks():
    """In which prompts of a few tokens are evaluated as long ones are otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROMPT_CHUNK, DEVICE.type, 8)
        patch.setitem(CHUNK_BESIDE, DEVICE.type, 3)
        patch.setattr("passes.LENGTHS", (1, 4, 8, 12))
        yield patch


def held(cache) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.keys, cache.values


def assert_slots_hold_what_they_say(engine: Engine) -> None:
    """Keys and values of each slot's tokens are what a cache of their own has."""
    for slot in engine.slots:
        assert slot.sequence is None, "a slot is lost"
        plain = Passes(engine.model, 1, engine.size)
        count = len(slot.tokens)
        if count:
            plain.prefill(slot.tokens)
        for ours, theirs in zip(held(engine.cache), held(plain.cache)):
            ours = ours[:, :, slot.first : slot.first + count]
            assert ours.allclose(theirs[:, :, :count], atol=1e-4), "not of these tokens"


@examples(
    60, parallel=st.integers(1, 5), way=st.sampled_from(["none", *WAYS]), in_graphs=st.booleans(),
    texts=st.lists(A_TEXT, min_size=2, max_size=7), toss=st.randoms(use_true_random=False),
    stops=st.integers(0, 300), stops_reading=st.integers(0, 100),
)  # fmt: skip
@hypothesis.example(  # Ctrl-C while the host reads what a pass has drawn
    parallel=1, way="none", in_graphs=True, texts=[dict(PLAIN), dict(PLAIN)], toss=random.Random(0), stops=300,
    stops_reading=2,
)  # fmt: skip
def test_a_text_is_the_same_in_any_company(
    exact, parallel, way, in_graphs, texts, toss, stops, stops_reading
):
    """Whatever the others do, and whoever is asked first. Each ends as it does alone, by an eos, a
    stop, its limit or a full context; errors and Ctrl-C are those of one text; and afterwards the
    slots are free, and hold what they say."""
    size = 40
    torch.manual_seed(0)
    with small_chunks() as patch:
        expected = []
        for text in texts:
            text["prompt"] = SYSTEM[: text["kept"]] + text["new"]
            options = {name: text[name] for name in OPTIONS}
            whole = [*Written(Engine(exact, 1, size), text["prompt"], **options)]
            expected.append(whole[: text["ends"]])
            text["whole"] = text["prompt"] + whole
            logits = Passes(exact, 1, size).forward((text["prompt"] + whole)[:size])
            text["logprobs"] = logits[len(text["prompt"]) - 1 :].log_softmax(-1)
        if in_graphs and not ON_GPU:
            decode_in_graphs(patch)
        engine = Engine(exact, parallel, size)
        engine.proposer = WAYS[way](exact, other_model(exact))
        if engine.proposer:
            engine.proposer.pacer.ready = lambda: toss.random() < 0.7
        if "planted" in way:
            engine.proposer.texts = [text["whole"] + [7] * 15 for text in texts]
        interrupted_at(patch, exact.ops, stops)
        waits = itertools.count()

        def wait(moment) -> None:
            if next(waits) == stops_reading:
                raise KeyboardInterrupt

        patch.setattr("passes.Moment.wait", wait)
        check_company(engine, texts, expected, toss)
        engine.proposer = None
        patch.undo()
        assert engine.idle
        for slot in engine.slots:
            kept = [text["whole"][: len(slot.tokens)] for text in texts]
            assert slot.tokens in [[], *kept], "a proposal that was not sampled is kept"
        assert_slots_hold_what_they_say(engine)


def check_company(engine: Engine, texts: list[dict], expected: list[list[int]], toss) -> None:
    open_ones = []
    for text, whole in zip(texts, expected):
        # alone, it is told here where it ends
        counted = itertools.count(1)

        def ends(token: int, text=text, counted=counted) -> bool:
            count = next(counted)
            if count == text["fails"]:
                raise ZeroDivisionError
            return count == text["ends"]

        options = {name: text[name] for name in (*OPTIONS, "scores")}
        open_ones.append((text, whole, Written(engine, text["prompt"], ends, **options)))
    interrupts = 0
    while open_ones:
        text, whole, written = toss.choice(open_ones)
        closes = text["taken"] is not None and written.asked >= text["taken"]
        error = None
        if not closes:
            try:
                if next(written, None) is not None:
                    assert written.tokens[: written.asked] == whole[: written.asked]
                    continue
            except (ZeroDivisionError, KeyboardInterrupt) as raised:
                error = raised
        interrupts += isinstance(error, KeyboardInterrupt)
        written.close()
        open_ones = [one for one in open_ones if one[2] is not written]
        got = written.tokens
        assert got == whole[: len(got)]
        if isinstance(error, ZeroDivisionError):
            assert len(got) == text["fails"] and written.asked == len(got)
        elif not (error or closes):
            assert got == whole and not (text["fails"] and text["fails"] <= len(whole))
        for token, score, logprobs in zip(got, written.scores, text["logprobs"]):
            if text["scores"] is None:
                assert score is None
                continue
            best = logprobs.topk(text["scores"])
            assert score.logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
            values = [value for _, value in score.best]
            assert values == pytest.approx(best.values.tolist(), abs=1e-4)
    assert interrupts <= 2
    for _ in range(3 - interrupts):  # reads what was launched ahead, unless Ctrl-C comes here
        with contextlib.suppress(KeyboardInterrupt):
            engine.step()


@pytest.mark.parametrize("where", ["on a CPU", "in graphs"])
@pytest.mark.parametrize("kv_fp8", [False, True])
@BACKENDS
def test_keys_of_one_text_never_reach_another(tiny, monkeypatch, backend, kv_fp8, where):
    """Whether a cache was full of NaN or of other texts, and whether texts come alone or together,
    they are the same; and only where their tokens lie is anything written."""
    options = dict(dtype="fp32", device=DEVICE.type, backend=backend, kv_fp8=kv_fp8, ctx_size=16)
    model = load(tiny, **options)
    if where == "in graphs" and not ON_GPU:
        decode_in_graphs(monkeypatch)
    monkeypatch.setattr("passes.LENGTHS", (1, 8, 16))
    prompts = [[1, 5, 6], [1, 7], [9, 3, 4, 5], [8]]
    n = 3 if backend == "triton" and not ON_GPU else 9
    expected = [greedy(model, prompt, n, Engine(model)) for prompt in prompts]
    engine = Engine(model, len(prompts))
    cached = held(engine.cache)
    for cache in cached:
        cache.fill_(0x7F if kv_fp8 else NAN)
    assert together(engine, prompts, n) == expected
    spoiled = [c == 0x7F if kv_fp8 else c.isnan() for c in cached]
    for slot in engine.slots:
        count, end = len(slot.tokens), slot.first + engine.cache.run
        for bad in spoiled:
            assert not bad[:, :, slot.first : slot.first + count].any()
            assert bad[:, :, slot.first + count : end].all(), "written beyond its text"
    if backend == "triton" and not ON_GPU:
        return
    other = [[i, 4, 4, i, 6, i, 8] * 2 for i in range(10, 14)]
    together(engine, other, 2)
    assert together(engine, prompts[::-1], n) == expected[::-1], "not as in an empty cache"


@pytest.mark.parametrize("where", ["on a CPU", "in graphs"])
def test_a_text_that_is_not_finite_ends_alone(tiny_model, monkeypatch, where):
    """Keys of one of three texts are spoiled while they are written. Its slot is then as if empty."""
    prompts = [[1, 5, 6], [6, 7, 4, 4], [9, 3]]
    expected = [greedy(tiny_model, prompt, 12) for prompt in prompts]
    if where == "in graphs":
        decode_in_graphs(monkeypatch)
    engine = Engine(tiny_model, 3)
    options = dict(sampling=MOST_PROBABLE, n=12)
    texts = [Written(engine, prompt, **options) for prompt in prompts]
    assert [[next(text) for text in texts] for _ in range(3)] == [*map(list, zip(*expected))][:3]
    slot = texts[1].sequence.slot
    engine.cache.keys[1, :, slot.first + 1] = NAN
    assert [*texts[0]] == expected[0][3:] and [*texts[2]] == expected[2][3:]
    with pytest.raises(RuntimeError, match="not finite, although every weight is"):
        list(texts[1])
    assert 3 <= len(texts[1].tokens) <= 5 and slot.tokens == []
    again = Written(engine, prompts[1], **options)
    assert [*again] == expected[1] and again.sequence.timings.prompt_tokens == 4


# ---- slots


def test_what_prompts_have_in_common_is_evaluated_once(tiny_model):
    """In one slot as in several: from what is left of an ended text, or from one that is being
    written. A short request does not take the slot of a long talk with the same system prompt."""
    engine = Engine(tiny_model, 3)
    ask = lambda prompt, n=4: Written(engine, prompt, sampling=MOST_PROBABLE, n=n)
    evaluated = lambda text: text.sequence.timings.prompt_tokens
    place = lambda text: engine.slots.index(text.sequence.slot)
    system = [*range(20, 32)]
    talk = [*system, *range(40, 70)]
    long = ask(talk)
    answer = [*long]
    assert (evaluated(long), place(long)) == (len(talk), 0)
    short = ask([*system, 7, 7, 7])
    assert [*short] == greedy(tiny_model, [*system, 7, 7, 7], 4)
    assert (evaluated(short), place(short)) == (3, 1), "it took the talk's slot"
    goes_on = ask([*talk, *answer, 8, 8])
    assert [*goes_on] == greedy(tiny_model, [*talk, *answer, 8, 8], 4)
    assert (evaluated(goes_on), place(goes_on)) == (1 + 2, 0), "the last token was not evaluated"
    other = ask([3, 3, 3])
    list(other)
    assert (evaluated(other), place(other)) == (3, 2), "the slot that was used longest ago"
    half = ask([*system, 9])
    list(half)
    assert (evaluated(half), place(half)) == (1, 1), "less is lost there"
    new = ask([4, 4])
    list(new)
    assert (evaluated(new), place(new)) == (2, 0)
    writing = ask([*system, 9, 9], 20)  # from what is still being written
    head = [next(writing) for _ in range(5)]
    beside = ask([*system, 9, 9, *head[:3], 5], 2)
    assert [*beside] == greedy(tiny_model, [*system, 9, 9, *head[:3], 5], 2)
    assert evaluated(beside) == 1 and place(beside) != place(writing)
    assert [*head, *writing] == greedy(tiny_model, [*system, 9, 9], 20)
    assert_slots_hold_what_they_say(engine)


def test_prompt_asked_again(tiny_model, monkeypatch):
    """Its logits are kept: evaluated by itself, the last token would be rounded otherwise."""
    engine, prompt = Engine(tiny_model), [1, 5, 9, 7]
    texts = [list(generate(tiny_model, prompt, engine, n=n, eos=[])) for n in (6, 3)]
    assert texts[1] == texts[0][:3]
    evaluated = []
    with monkeypatch.context() as patch:
        patch.setattr(tiny_model, "forward", lambda *_: evaluated.append(1))
        list(generate(tiny_model, prompt, engine, n=1, eos=[]))
    (slot,) = engine.slots
    assert not evaluated and slot.tokens == prompt
    list(generate(tiny_model, prompt, engine, n=5, eos=[]))
    prompt += texts[0][:2]  # a list that the caller goes on using
    new = list(generate(tiny_model, prompt, n=3, eos=[]))
    assert list(generate(tiny_model, prompt, engine, n=3, eos=[])) == new
    other = [1, 5, 9, 8]
    new = list(generate(tiny_model, other, n=3, eos=[]))
    assert list(generate(tiny_model, other, engine, n=3, eos=[])) == new
    assert slot.common([1, 5, 9]) == 2, "logits behind three tokens are not known"


def test_texts_that_alternate_are_evaluated_once(tiny_model):
    """One has all but the end of the other, and goes on for as long again."""
    engine = Engine(tiny_model, 2)
    short = [*range(20, 40), 7]
    long = [*range(20, 40), 8, *range(40, 58)]
    evaluated = []
    for prompt in (short, long) * 2:
        text = Written(engine, prompt, sampling=MOST_PROBABLE, n=1)
        list(text)
        evaluated.append(text.sequence.timings.prompt_tokens)
    assert evaluated == [len(short), len(long) - 20, 0, 0]


@pytest.mark.parametrize("where", ["on a CPU", "in graphs"])
def test_choices_of_one_prompt_evaluate_it_once(tiny_model, monkeypatch, where):
    """With its logits, which are rounded alike for all of them."""
    if where == "in graphs":
        decode_in_graphs(monkeypatch)
    prompt = [1, *range(20, 40)]
    engine = Engine(tiny_model, 4)
    settings = [Sampling(seed=seed) for seed in (3, 3, 4, 5, 3)]
    texts = [Written(engine, prompt, sampling=s, n=6) for s in settings]
    got = [[*text] for text in texts]
    assert got[0] == got[1] == got[4] and len({*map(tuple, got)}) == 3
    assert [text.sequence.timings.prompt_tokens for text in texts] == [len(prompt), 0, 0, 0, 0]
    slots = [text.sequence.slot for text in texts]
    assert len({*slots[:4]}) == 4
    assert all(slot.prompt_logits.equal(slots[0].prompt_logits) for slot in slots)


@pytest.mark.parametrize("where", ["on a CPU", "in graphs"])
def test_texts_begin_in_order_of_arrival(tiny_model, monkeypatch, where):
    """Whoever is asked. A text that waits runs the others until a slot is free, by their end, by an
    error, or because they are closed."""
    if where == "in graphs":
        decode_in_graphs(monkeypatch)
    engine = Engine(tiny_model, 2)
    begun = []

    def text(name: int, n: int, ends=lambda: False) -> Written:
        def take(token: int) -> bool:
            begun.append(name)
            return ends()

        return Written(engine, [1, 30 + name, 5], take, sampling=MOST_PROBABLE, n=n)

    texts = [text(0, 6), text(1, 99), text(2, 3, fails(OSError())), text(3, 4), text(4, 2)]
    assert next(texts[3]) == greedy(tiny_model, [1, 33, 5], 1)[0]
    assert [*dict.fromkeys(begun)] == [0, 1, 2, 3], "not in order"
    assert texts[0].sequence.finished and len(texts[0].tokens) == 6
    assert next(texts[2]) == greedy(tiny_model, [1, 32, 5], 1)[0]
    with pytest.raises(OSError):
        next(texts[2])
    assert [len(one.tokens) for one in texts[1:]] == [len(texts[1].tokens), 1, 1, 0]
    last = text(5, 2)
    texts[4].close()  # while it waits
    texts[1].close()
    assert [*last] == greedy(tiny_model, [1, 35, 5], 2) and 4 not in begun
    assert len(list(texts[3])) == 3 and engine.idle and list(texts[4]) == []
    assert [slot.sequence for slot in engine.slots] == [None, None]


def test_a_forgotten_text_frees_its_slot(tiny_model):
    engine = Engine(tiny_model, 1)
    first = generate(tiny_model, [1, 5, 9], engine, sampling=MOST_PROBABLE, eos=[])
    head = [next(first), next(first)]
    second = generate(tiny_model, [1, 6], engine, 4, MOST_PROBABLE, eos=[])
    del first
    assert [*second] == greedy(tiny_model, [1, 6], 4) and engine.idle
    third = generate(tiny_model, [1, 5, 9], engine, 2, MOST_PROBABLE, eos=[])
    assert [*third] == head


def test_an_admission_that_is_interrupted(tiny_model, monkeypatch):
    """Ctrl-C while keys are copied is that of the text that was asked; the one that waits is not
    lost, and nothing is taken from the slot whose place it had half taken."""
    engine = Engine(tiny_model, 2)
    prompts = [1, *range(20, 30)], [1, *range(20, 29), 7], [1, *range(40, 50)]
    ask = lambda prompt: Written(engine, prompt, sampling=MOST_PROBABLE, n=4)
    list(ask(prompts[2]))  # in the first slot
    asked = ask(prompts[0])  # in the second
    next(asked)
    copy = engine.cache.copy

    def half(source: int, target: int, count: int) -> None:
        copy(source, target, count // 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, "copy", half)
        waits = ask(prompts[1])
        with pytest.raises(KeyboardInterrupt):
            list(asked)
    asked.close()
    third = ask(prompts[2])
    assert [*third] == greedy(tiny_model, prompts[2], 4)
    assert [*waits] == greedy(tiny_model, prompts[1], 4)
    assert_slots_hold_what_they_say(engine)


def test_progress_that_is_interrupted(tiny_model):
    """By Ctrl-C of another text: the prompt that was evaluated goes on from its own logits."""
    engine = Engine(tiny_model, 2)
    stops = iter([KeyboardInterrupt()])

    def progress(done: int, total: int) -> None:
        for error in stops:
            raise error

    asked = Written(engine, [1, 5, 9], sampling=MOST_PROBABLE, n=20)
    next(asked)
    beside = Written(engine, [1, 7, 7, 4], sampling=MOST_PROBABLE, n=5, progress=progress)
    with pytest.raises(KeyboardInterrupt):
        list(asked)
    asked.close()
    assert [*beside] == greedy(tiny_model, [1, 7, 7, 4], 5)


# ---- prompts


@pytest.mark.parametrize("where", ["on a CPU", "in graphs"])
def test_a_long_prompt_and_texts_take_turns(exact, where):
    """After each chunk of a prompt, every text that is being written gets a token, and the chunks are
    shorter than those of a prompt alone."""
    prompts = [[1, 5, 6], [1, 7], [*range(30, 61)]]
    expected = [greedy(exact, prompt, 20) for prompt in prompts]
    with small_chunks() as patch:
        if where == "in graphs" and not ON_GPU:
            decode_in_graphs(patch)
        engine, seen = Engine(exact, 3), []
        note = lambda name: lambda token: seen.append(name)
        options = dict(sampling=MOST_PROBABLE, n=20)
        texts = [Written(engine, prompts[i], note(i), **options) for i in (0, 1)]
        next(texts[0]), next(texts[1])
        done = lambda count, total: seen.append((count, total))
        texts.append(Written(engine, prompts[2], note(2), progress=done, **options))
        seen.clear()
        next(texts[2])
        chunks = [i for i, event in enumerate(seen) if isinstance(event, tuple)]
        assert [seen[i] for i in chunks] == [(3 * i, 31) for i in range(1, 11)] + [(31, 31)]
        between = [seen[a + 1 : b] for a, b in itertools.pairwise(chunks)]
        assert all(sorted(events) == [0, 1] for events in between), "a text waits for the prompt"
        assert [text.tokens + [*text][len(text.tokens) :] for text in texts] == expected


def test_lengths_of_prompts():
    """From 192 tokens on, where arithmetic counts, padding adds at most a twelfth, but to 256 and 480,
    since 240 and 448 take longer; there are few graphs, and any rest of a chunk is one."""
    assert list(LENGTHS) == sorted(set(LENGTHS)) and LENGTHS[0] == 1 and len(LENGTHS) < 72
    steps = {high: high - low for low, high in itertools.pairwise(LENGTHS) if high > 192}
    assert steps.pop(256) == 32 and steps.pop(480) == 64
    assert all(12 * step <= high - step for high, step in steps.items())
    assert {PROMPT_CHUNK["cuda"], 2 * PROMPT_CHUNK["cuda"]} <= {*LENGTHS}


def test_padded_prompts_are_the_prompts(tiny, monkeypatch):
    """The first of each padded length is captured, the others are replayed, and nothing is written
    elsewhere than at the prompt's places. After Ctrl-C what was before is as it was."""
    model = load(tiny, device=DEVICE.type, dtype="fp32")
    # what stands beyond the prompt counts for nothing, not even as 0 * NaN
    model.weights.embedding = model.weights.embedding.clone()
    model.weights.embedding[0] = torch.nan
    if not ON_GPU:
        decode_in_graphs(monkeypatch)
    monkeypatch.setattr("passes.LENGTHS", (1, 8, 16, 20))
    monkeypatch.setitem(PROMPT_CHUNK, DEVICE.type, 16)
    call = st.tuples(st.integers(0, 60), st.integers(1, 60), st.integers(0, 20), st.booleans())
    calls = st.lists(call, min_size=3, max_size=6)

    @examples(4 if ON_GPU else 30, size=st.sampled_from([48, 61]), calls=calls)
    def check(size, calls):
        passes, plain = Passes(model, 2, size), Passes(model, 2, size)
        known = [0, 0]  # positions of each of two sequences
        for back, T, stops, which in calls:
            start = max(0, known[which] - back)
            ids = torch.randint(3, 300, (min(T, size - start),)).tolist()
            if not ids:
                continue
            known[which] = start
            first = which * passes.cache.run
            before = passes.cache.keys.clone()
            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                if not ON_GPU:
                    interrupted_at(patch, model.ops, stops)
                ours = passes.prefill(ids, start, first)
                known[which] += len(ids)
            exact = plain.forward(ids, start, first)[-1]
            if known[which] > start:
                assert nmse(ours, exact) < 1e-6
            elsewhere = torch.ones(passes.cache.spare, dtype=torch.bool)
            elsewhere[first + start : first + start + len(ids)] = False
            at = torch.nonzero(elsewhere)[:, 0].to(DEVICE)
            assert passes.cache.keys[:, :, at].equal(before[:, :, at]), "written elsewhere"
            for i, count in enumerate(known):
                at = slice(i * passes.cache.run, i * passes.cache.run + count)
                for cache, other in zip(held(passes.cache), held(plain.cache)):
                    same = cache[:, :, at].allclose(other[:, :, at], atol=1e-3)
                    assert same, f"{T} tokens at {start} of {size} have changed other positions"

    with torch.inference_mode():
        check()


@pytest.mark.parametrize("T, graphs, at", [
    (36, {16, 20}, [16, 36]), (37, {16, 8}, [16, 32, 37]), (20, {20}, [20]), (7, {8}, [7]), (1, {1}, [1]),
])  # fmt: skip
def test_long_prompts_are_graphs(tiny_model, monkeypatch, T, graphs, at):
    """Chunks of 16 tokens; what remains after them is not a chunk of its own if it is short."""
    decode_in_graphs(monkeypatch)
    monkeypatch.setattr("passes.LENGTHS", (1, 8, 16, 20))
    monkeypatch.setitem(PROMPT_CHUNK, "cpu", 16)
    engine, done = Engine(tiny_model, 1, 64), []
    progress = lambda n, total: done.append((n, total))
    list(generate(tiny_model, [*range(3, 3 + T)], engine, 0, progress=progress))
    captured_ones = {key[0] for key, pass_ in engine.passes._passes.items() if pass_.graphs}
    assert captured_ones == graphs and done == [(n, T) for n in at]


# ---- one text after another


def test_an_ignored_eos_is_never_sampled(tiny_model):
    every_but_7 = {*range(tiny_model.config.vocab_size)} - {7}
    options = dict(n=5, eos=every_but_7, ignore_eos=True)
    for settings in (Sampling(temp=0), Sampling(), Sampling(temp=INF, top_k=0, top_p=1, min_p=0)):
        assert [*generate(tiny_model, [1, 5], sampling=settings, **options)] == [7] * 5
    engine = Engine(tiny_model)
    greedy(tiny_model, [1, 5], 1, engine, eos=every_but_7, ignore_eos=True)
    options = dict(n=5, sampling=MOST_PROBABLE, ignore_eos=True)
    no_eos = Written(engine, [1, 5], eos=[-1, 1 << 20], **options)
    assert [*no_eos] == greedy(tiny_model, [1, 5], 5), "earlier bans are lifted"
    assert no_eos.sequence.mask is None, "no eos is not the last id"


def test_bans_are_those_of_one_text(tiny_model):
    """Beside others, each of which bans something else, or nothing."""
    V = tiny_model.config.vocab_size
    prompt = [1, 5]
    plain = greedy(tiny_model, prompt, 6)
    engine = Engine(tiny_model, 4)
    options = dict(sampling=MOST_PROBABLE, n=6)
    bans = [[*range(7), *range(8, V)], [plain[0]], [], [*range(9), *range(10, V)]]
    texts = [Written(engine, prompt, eos=ban, ignore_eos=True, **options) for ban in bans]
    without = greedy(tiny_model, prompt, 6, eos=[plain[0]], ignore_eos=True)
    assert [[*text] for text in texts] == [[7] * 6, without, plain, [9] * 6]


@pytest.mark.parametrize("proposing", [False, True])
@pytest.mark.parametrize("where", ["on a CPU", "in graphs"])
def test_a_constraint_is_that_of_one_text(tiny_model, monkeypatch, where, proposing):
    """It sees all tokens before the next one, and if it fails, at whatever token, its text ends. The
    others have proposals, as they have beside a text whose scores are noted."""
    V, prompt, n = tiny_model.config.vocab_size, [1, 5], 5
    plain = greedy(tiny_model, prompt, n)
    if where == "in graphs":
        decode_in_graphs(monkeypatch)

    class Counting:
        """Only 10, then only 11 and so on, up to where it fails."""

        def __init__(self, ends: int = 99, accepts: int = 99):
            self.ends, self.accepts, self.next = ends, accepts, 10

        def mask(self) -> torch.Tensor:
            if self.next == self.ends:
                raise ValueError("too complex")
            return mask_without({*range(V)} - {self.next}, V)

        def accept(self, token: int) -> None:
            if token == self.accepts:
                raise ValueError("unknown")
            assert token == self.next
            self.next += 1

    engine = Engine(tiny_model, 3)
    if proposing:
        engine.proposer = lookup = Lookup(3)
        lookup.always = True
        monkeypatch.setattr(lookup, "propose", lambda s, n: plain[len(s.ids) - 2 :][:n])
    constraints = Counting(), None, Counting(ends=10), Counting(ends=12), Counting(accepts=11), None
    options = dict(sampling=MOST_PROBABLE, n=n)
    scored = Written(engine, prompt, scores=1, **options)
    texts = [Written(engine, prompt, constraint=each, **options) for each in constraints]
    assert [*texts[5]] == plain and [*texts[1]] == plain and [*scored] == plain
    for score in scored.scores:
        assert [score.logprob] == [value for _, value in score.best]
    assert [*texts[0]] == [10, 11, 12, 13, 14]
    for text, tokens, error in (
        (texts[2], [], "too complex"), (texts[3], [10, 11], "too complex"), (texts[4], [10], "unknown"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=error):
            list(text)
        assert text.tokens == tokens
    assert engine.idle and (not proposing or lookup.accepted >= 2 * (n - 1) - 2)


@BACKENDS
@pytest.mark.parametrize("kv_fp8", [False, True])
def test_context_to_its_last_place(tiny, kv_fp8, backend):
    """Beside a text in the next run, where nothing may be written."""
    model = load(tiny, dtype="fp32", device=DEVICE.type, ctx_size=8, backend=backend, kv_fp8=kv_fp8)
    whole = greedy(model, [5, 6], 2)
    for size in (1, 2, 4):
        engine, prompt = Engine(model, 2, size), [5, 6][:size]
        expected = whole[: size - len(prompt)]
        assert together(engine, [prompt, prompt], -1) == [expected] * 2
        with pytest.raises(ContextFull, match=f"too long: {size + 1} tokens > {size} maximum"):
            greedy(model, [7] * (size + 1), -1, engine)


@pytest.mark.parametrize("how", ["generate", "company", "single steps", "chunks"])
def test_no_step_sees_an_old_position(tiny, how):
    """Keys and values after thousands of steps equal those of torch's ops, which do not overlap."""
    steps = 3000 if ON_GPU else 4
    sizes = [1] * steps
    if how == "chunks":
        sizes = random.choices((1, 2, 17, 40), k=steps // 20 or 2)
    options = dict(dtype="fp32", device=DEVICE.type, ctx_size=max(steps, sum(sizes)) + 8)
    model, plain = (load(tiny, backend=backend, **options) for backend in ("triton", "torch"))
    if how in ("generate", "company"):
        count = 1 + 2 * (how == "company")
        engine = Engine(model, count)
        settings = dict(sampling=Sampling(temp=1.5, seed=SEED), n=steps)
        texts = [Written(engine, [1, 5, 9 + i], **settings) for i in range(count)]
        assert [len(list(text)) for text in texts] == [steps] * count
        cache, runs = engine.cache, [(slot.first, slot.tokens) for slot in engine.slots]
    else:
        passes, ids = Passes(model), torch.randint(3, 300, (sum(sizes),))
        done = 0
        for part in ids.split(sizes):
            passes.prefill(part.tolist(), done)
            done += len(part)
        cache, runs = passes.cache, [(0, ids.tolist())]
    for first, tokens in runs:
        expected = Passes(plain)
        expected.prefill(tokens)
        at = slice(first, first + len(tokens))
        for ours, theirs in zip(held(cache), held(expected.cache)):
            ours, theirs = ours[:, :, at], theirs[:, :, : len(tokens)]
            errors = (ours - theirs).square().sum((0, 1, 3)) / theirs.square().sum((0, 1, 3))
            assert errors.max() < 1e-6, f"position {int(errors.argmax())} of {len(tokens)}"


def test_as_many_texts_as_there_may_be(exact):
    """And one more, which waits."""
    prompts = [[1, 5, 3 + i] for i in range(MOST_TEXTS + 1)]
    expected = [greedy(exact, prompt, 2) for prompt in prompts]
    assert together(Engine(exact, MOST_TEXTS, 8), prompts, 2) == expected


@needs_gpu
def test_a_cache_is_freed_with_its_owner(tiny):
    model, held = load(tiny, device="cuda"), []
    for i in range(4):
        list(generate(model, [1, 5], n=3, sampling=Sampling(seed=i), eos=[]))
        held.append(torch.cuda.memory_allocated())
    engine = Engine(model)
    list(generate(model, [1, 5], engine, n=3, eos=[]))
    gone = weakref.ref(engine)
    del engine
    assert gone() is None and held[1] == held[3]


# ---- graphs


def test_nothing_is_collected_during_a_capture(monkeypatch):
    """Freeing a graph, such as a dropped engine's, would end the capture of another."""
    for name in ("torch.cuda.CUDAGraph", "torch.cuda.synchronize", "launch._capture_stream"):
        monkeypatch.setattr(name, lambda *_: None)
    for name in ("graph", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("launch.compile_kernels", lambda run, device: run())
    seen, resets = [], []
    reset = lambda: resets.append((len(seen), gc.isenabled()))
    captured(lambda: seen.append(gc.isenabled()), DEVICE, reset)
    assert seen == [True, False] and resets == [(1, True), (2, True)] and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        captured(lambda: 1 / gc.isenabled(), DEVICE)
    assert gc.isenabled()


def test_the_host_is_one_pass_ahead(exact, monkeypatch):
    """While the host reads what one pass has sampled, the next has been launched, of all texts; of a
    text whose end it has not seen there is one pass too many, and no more."""
    if not ON_GPU:
        decode_in_graphs(monkeypatch)
    engine, launched = Engine(exact, 2), []
    step, options = engine.passes.step, dict(sampling=MOST_PROBABLE)
    note = lambda pass_: launched.append(len(pass_.sequences))
    monkeypatch.setattr(engine.passes, "step", lambda pass_: note(pass_) or step(pass_))
    one = Written(engine, [1, 5, 6], n=6, **options)
    ahead = [len(launched) for _ in one]
    assert ahead == [1, 2, 3, 4, 5, 5] and {*launched} == {1}, "more than its limit"
    launched.clear()
    stopped = Written(engine, [1, 5, 7], lambda _: len(stopped.tokens) == 3, **options)
    assert len(list(stopped)) == len(launched) == 3 and not engine.idle
    beside = [Written(engine, [9, i], n=4, **options) for i in (3, 4)]
    assert [len(list(text)) for text in beside] == [4, 4] and engine.idle
    assert 2 in launched and sum(launched[3:]) == 6, "a pass for each token but the first"
    assert len(stopped.tokens) == 3, "a text that has ended is read"


def test_padding_stays_where_it_is(exact, monkeypatch):
    """While three texts move on, the fourth segment of their pass writes to a place of its own."""
    if not ON_GPU:
        decode_in_graphs(monkeypatch)
    prompts = [[1, 5], [9, 5], [8, 5]]
    engine = Engine(exact, 3)
    expected = [greedy(exact, prompt, 40) for prompt in prompts]
    assert together(engine, prompts, 40) == expected
    pass_, spare = engine.passes.get(4, 4), engine.cache.spare
    assert pass_.place.tolist()[0] > 30 and pass_.place.tolist()[3] == spare
    assert pass_.segments[3].tolist()[:2] == [spare, 0]


@pytest.mark.parametrize("top_k, other_top_k", [(5, 3), (40, 30)], ids=["listed", "sorted"])
def test_other_sampling_needs_no_other_graph(top_k, other_top_k, tiny, monkeypatch):
    """A graph is replayed with the arguments of the capture, of which numbers are read anew."""
    recorded, captures = [], []

    def recording(function):
        def record(*arguments, **constants) -> None:
            recorded.append(functools.partial(function, *arguments, **constants))
            recorded[-1]()

        return record

    def captured(run, device, reset, pool) -> SimpleNamespace:
        recorded.clear()
        run()
        reset()
        launches = [*recorded]
        if not launches:
            return SimpleNamespace(replay=run, pool=lambda: None)
        captures.append(launches)
        (pass_,) = run.args
        steps = run.func.__name__ == "advance"

        def replay() -> None:
            if steps:
                model.forward(pass_, pass_.logits)
            for launch_again in launches:
                launch_again()
            pass_.move()

        return SimpleNamespace(replay=replay, pool=lambda: None)

    model = load(tiny, dtype="fp32", device=DEVICE, backend="torch", ctx_size=64)
    engine = Engine(model)
    first = Sampling(temp=2.0, top_k=top_k, top_p=0.9, repeat_penalty=1.1, repeat_last_n=30)
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
    monkeypatch.setattr("passes.captured", captured)
    assert [text_of(model, settings, 8, engine) for settings in every] == expected
    assert len(captures) == 2, "of the first token, and of the others"
    assert engine.passes.get(1, 1).switches.sorts == (top_k == 40)
    for change in (dict(temp=0), dict(top_p=1), dict(top_k=100), dict(repeat_penalty=1.1)):
        other = Sampling(**change)
        text_of(model, other, 1, engine)
    text_of(model, other, 1, engine)
    count = 6 - (top_k == 40)  # whose first settings had the same parts
    assert len(captures) == count
    text_of(model, other, 1, Engine(model))
    text_of(model, other, 1, engine, eos=[3], ignore_eos=True)
    assert len(captures) == count + 2
