"""Tests of speculation/proposals.py."""

import copy as copy_module
import itertools
import random
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import strategies as st

from engine import Engine, Sequence, Timings, generate
from formats import Matrix
from loading import place
from loading.checkpoint import read_config
from passes import Passes, Wish
from sampling import Sampling
from session import Session
from speculation.proposals import Draft, Lookup, Pacer
from talk import cli as cli_module
from tests.helpers import (
    FAMILIES,
    MOST_PROBABLE,
    ON_GPU,
    SEED,
    Planted,
    Written,
    assert_refused,
    chat,
    decode_in_graphs,
    edit,
    exact_model,
    examples,
    hugging_face_model,
    together,
)


def always(proposer: Draft) -> Draft:
    proposer.pacer.ready = lambda: True
    return proposer


def engine_with(model, proposer, parallel: int = 1) -> Engine:
    engine = Engine(model, parallel)
    engine.proposer = proposer
    return engine


def drafted(n: int, model, vocab_size: int = 0) -> Draft:
    """By a model; vocab_size: of the one that it is a draft for, if another."""
    return Draft(n, Passes(model), vocab_size or model.config.vocab_size)


def test_draft_of_the_same_model(tiny, monkeypatch):
    """Also after Ctrl-C while it reads a prompt: what it has kept of the text before is no part of
    the new one."""
    model = exact_model(tiny, ctx_size=128)
    draft = always(drafted(4, copy_module.copy(model)))
    engine = engine_with(model, draft)
    write = lambda prompt: list(generate(model, prompt, engine, 61, eos=[]))
    first, second = (random.choices(range(3, 300), k=50) for _ in range(2))
    assert len(write(first)) == 61  # one, and 12 times the four of the draft and another
    said = "proposals 12 passes, 5.00 tokens a pass; 100% of 48 proposals accepted"
    assert draft.summary() == said
    forward = draft.own_passes.model.forward

    def reads_and_is_interrupted(*arguments):
        forward(*arguments)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(draft.own_passes.model, "forward", reads_and_is_interrupted)
        write(second)
    plain = write(first)
    assert draft.accepted == draft.proposed and draft.passes == 24
    banned = dict(eos=[*{*plain}][:9], ignore_eos=True)
    text = list(generate(model, first, engine, 61, **banned))
    assert not {*text} & {*banned["eos"]}
    assert draft.accepted == draft.proposed and draft.passes == 36, "it proposes what is banned"


STEP = st.tuples(st.integers(0, 4), st.lists(st.integers(3, 9), max_size=9))


@examples(25, steps=st.lists(STEP, min_size=2, max_size=4))
def test_a_draft_keeps_no_token_that_was_not_sampled(exact, steps):
    """steps: how many of its proposals are sampled, and what follows without proposals. It then
    proposes what a new draft of the same text does."""
    ids = [1, 5, 9, 3]
    text = SimpleNamespace(ids=ids, slot=SimpleNamespace(first=0), wish=Wish(Sampling()))
    draft = drafted(4, copy_module.copy(exact))
    for accepted, others in steps:
        proposals = draft.propose(text, 4)
        assert proposals == drafted(4, copy_module.copy(exact)).propose(text, 4)
        seen = [*ids]
        ids += [*proposals[:accepted], (proposals[-1] + 1) % 300, *others]
    text.ids = seen[:-1]  # all of which it has evaluated
    assert draft.propose(text, 4) == drafted(4, copy_module.copy(exact)).propose(text, 4)


@pytest.mark.parametrize("in_graphs", [False, True])
def test_a_draft_of_several_texts(exact, monkeypatch, in_graphs):
    """Each has a run of its own in the draft's cache, of which nothing is written beyond the end, and
    proposes as many tokens as a pass has room for. The texts fill their contexts."""
    texts = [[1, 5, 9 + i] for i in range(3)]
    draft = always(Draft(15, Passes(copy_module.copy(exact), 3), exact.config.vocab_size))
    expected = together(Engine(exact, 3), texts, -1)
    if in_graphs and not ON_GPU:
        decode_in_graphs(monkeypatch)
    assert all(len(text) == 61 for text in expected)
    assert together(engine_with(exact, draft, 3), texts, -1) == expected
    assert draft.proposed and draft.accepted == draft.proposed, "they are in each other's way"


@pytest.mark.parametrize("counts, said", [
    ((0, 0, 0, 0), "0 passes, 0.00 tokens a pass; none of 0 proposals accepted"),
    ((4, 12, 6, 0), "4 passes, 2.50 tokens a pass; 50% of 12 proposals accepted"),
    ((8, 3, 0, 7), "8 passes, 1.00 tokens a pass; 0% of 3 proposals accepted; 7 passes had none,"
                   " since they cost more time than they save"),
])  # fmt: skip
def test_proposals_are_counted(exact, counts, said):
    way = Lookup(3)
    way.passes, way.proposed, way.accepted, way.held_off = counts
    assert way.summary() == f"proposals {said}"
    way.pacer = SimpleNamespace(ready=lambda: False, single=1.0, record=lambda *_: None)
    list(generate(exact, [1, 5, 6], engine_with(exact, way), n=12, eos=[]))
    assert (way.passes - counts[0], way.held_off - counts[3]) == (11, 11)


def with_vocabulary(model, size: int):
    """The model with fewer ids, or more, which have random logits."""
    other = copy_module.copy(model)
    rows = torch.randint(model.config.vocab_size, (size,))
    rows[: model.config.vocab_size] = torch.arange(size)[: model.config.vocab_size]
    embedding = model.weights.embedding[rows.to(model.device)]
    other.config = replace(model.config, vocab_size=size)
    other.weights = replace(model.weights, embedding=embedding, output=Matrix(embedding))
    return other


@pytest.mark.parametrize("more", [-99, 50])
def test_draft_of_another_vocabulary(exact, more):
    """A prompt may have ids that only the model has; the draft reads them as its first. What the
    other lacks is not proposed, not even where every id is as probable as the next, and the text is
    what it is without a draft."""
    V = exact.config.vocab_size
    flat = Sampling(temp=1e9, top_k=0, top_p=1, min_p=0, seed=SEED)
    for end in (V - 1, 7):
        prompt = [1, V - 99, 9, end]
        draft, proposals = always(drafted(3, with_vocabulary(exact, V + more), V)), []
        propose = draft.propose
        draft.propose = lambda text, n, p=propose, all=proposals: all.extend(p(text, n)) or all[-n:]
        options = dict(n=50, sampling=flat, eos=[])
        found = list(generate(exact, prompt, engine_with(exact, draft), **options))
        assert found == list(generate(exact, prompt, **options))
        assert len(proposals) > 30 and max(proposals) < min(V, V + more)
        seen = draft.own_passes.cache.tokens.tolist()
        only_the_model_has = more < 0
        assert seen[:3] == [1, 0 if only_the_model_has else V - 99, 9]
        assert seen[3] == (0 if only_the_model_has and end != 7 else end)


def test_memory_of_a_draft_is_that_of_the_models_context(tiny, copy, monkeypatch):
    sizes = []
    edit(copy / "config.json", max_position_embeddings=128)
    monkeypatch.setattr(place, "check_memory", lambda *args: sizes.append(args[1]))
    Session(tiny, draft=copy, device="cpu")
    assert sizes == [256, 256]


@pytest.mark.parametrize("seen, proposals", [
    ([5, 6, 7, 9, 7], []),  # one token is not enough
    ([1, 5, 6, 7, 2, 5, 6, 8, 3, 1, 5, 6], [7, 2, 5, 6]),  # the longest run, then the latest
    ([5, 6, 7, 2, 5, 6, 8, 3, 5, 6], [8, 3, 5, 6]),
    ([1, 2, 3, 4, 9, 2, 3, 4, 8, 7, 1, 2, 3, 4], [9, 2, 3, 4]),
    ([0, 1, 2, 3, 4, 9, 7, 1, 2, 3, 4, 8, 7, 0, 1, 2, 3, 4], [8, 7, 0, 1]),  # of four at most
    ([9, 5, 6, 5, 6], [5, 6, 5, 6]),  # too few followed: they repeat
    ([7, 7, 7], [7, 7, 7, 7]),
])  # fmt: skip
def test_lookup_proposals(seen, proposals):
    for n in (1, 3, 4):
        text = Sequence(seen, None)
        assert Lookup(15).propose(text, n) == proposals[:n]


@examples(200, seen=st.lists(st.integers(5, 9), min_size=20, max_size=40), n=st.integers(1, 15))
def test_lookup_of_a_text_that_grows(seen, n):
    """It proposes what it does for the whole text at once, whatever other texts there are; of those
    that have ended nothing is left."""
    growing, whole = Lookup(n), Lookup(n)
    other, text = Sequence([9, 8, 7, 6, 5], None), Sequence(seen[:10], None)
    growing.propose(other, n)
    for token in seen[10:]:
        text.ids.append(token)
        assert growing.propose(text, n) == whole.propose(Sequence(text.ids, None), n)
    assert len(growing.indices) == 2
    del other
    assert len(growing.indices) == 1


# proposed, accepted, seconds, whether the GPU waited; then: seconds of a single token, of several,
# lost, in total; whether the next pass may propose
PACES = [
    ((0, 0, 1.0, False), 1.0, 0.0, 0.0, 1.0, True),
    ((3, 0, 1.0, False), 1.0, 1.0, 0.0, 2.0, True),
    ((3, 0, 2.0, False), 1.0, 1.2, 1.0, 4.0, False),  # 1 + 0.2 > 1 + 0.02 * 4
    ((0, 0, 6.0, False), 2.0, 1.2, 1.0, 10.0, True),
    ((0, 0, 3.0, True), 2.0, 1.2, 2.0, 13.0, True),  # a pass that waited for nothing
    ((3, 3, 1.2, False), 2.0, 1.2, -2.0, 14.2, True),  # it gains at most a single token
]


def test_pacer_by_hand():
    pacer = Pacer()
    assert not pacer.ready(), "the first pass is the baseline"
    for passed, *expected, may in PACES:
        pacer.record(*passed)
        found = [pacer.single, pacer.several, pacer.lost, pacer.total]
        assert found == pytest.approx(expected) and pacer.ready() == may, passed


@pytest.mark.parametrize("cost, found", [
    (1.02, True), (1.15, True), (1.5, True), (3.0, True), (1.15, False),
])  # fmt: skip
def test_looking_for_proposals_costs_3_percent(cost, found):
    """found: whether there were some to fail. A GPU is idle while the host looks for them."""
    pacer = Pacer()

    def spend(accepted: int) -> float:
        ready = pacer.ready()
        seconds = cost if ready else 1.0
        pacer.record(int(ready and found), accepted, seconds, waited=ready and not found)
        return seconds

    for length in (400, 4000):
        assert sum(spend(0) for _ in range(length)) <= 1.03 * length
    if found:
        for _ in range(200):  # the text begins to repeat
            spend(4)
        assert all(spend(4) > 1 for _ in range(20))


def test_a_pass_costs_what_the_device_says(exact, monkeypatch):
    """On a GPU, what the host does meanwhile is no part of a pass. Where the device waited for a graph to
    be captured, its time counts for nothing."""
    if not ON_GPU:
        decode_in_graphs(monkeypatch, ms=itertools.repeat(1000.0))
    monkeypatch.setattr("passes.Moment.since", lambda self, start: 1.0)
    lookup, charged, captured = Lookup(3), [], []
    pace, record = lookup.pacer.record, lookup.record
    lookup.pacer.record = lambda *args: charged.append(args[2]) or pace(*args)
    lookup.record = lambda *args: captured.append(args[-1]) or record(*args)
    timings = Timings()
    options = dict(sampling=MOST_PROBABLE, eos=[], timings=timings)
    list(generate(exact, [5, 6, 5, 6, 7], engine_with(exact, lookup), 30, **options))
    assert captured[0] and len(captured) == lookup.passes
    assert charged == [1.0] * captured.count(False), "the pacer takes a graph for a pass"
    assert timings.step_seconds == pytest.approx(lookup.passes)


@pytest.mark.parametrize("in_graphs", [False, True])
@pytest.mark.parametrize("proposing", [False, True])
def test_speculation_where_logits_are_not_finite(tiny, monkeypatch, in_graphs, proposing):
    """From a position on, of one of two texts; the other one goes on."""
    model, prompts = exact_model(tiny, 64), ([1, 5, 6], [1, 7, 6])
    options = dict(n=20, sampling=Sampling(seed=SEED))
    texts = [list(generate(model, prompt, eos=[], **options)) for prompt in prompts]
    sample = model.ops.sample

    def spoiled(logits, pass_) -> None:
        for row, (at, position) in enumerate(zip(pass_.place.tolist(), pass_.position.tolist())):
            if at < engine.cache.run and position >= 13:
                logits[row] = torch.nan
        sample(logits, pass_)

    model.ops = SimpleNamespace(**vars(model.ops) | dict(sample=spoiled))
    if in_graphs:
        decode_in_graphs(monkeypatch)
    planted = Planted(4)
    planted.texts = [prompt + text + [7] * 9 for prompt, text in zip(prompts, texts)]
    planted.pacer.ready = lambda: proposing
    engine = engine_with(model, planted, 2)
    spoilt, sound = (Written(engine, prompt, **options) for prompt in prompts)
    with pytest.raises(RuntimeError, match="not finite"):
        list(spoilt)
    assert spoilt.tokens == texts[0][:11] and [*sound] == texts[1]


def test_single_tokens_run_ahead(exact, monkeypatch):
    """Without proposals, two passes are on their way, also while the host looks for some; with
    them, one: tokens are needed first."""
    decode_in_graphs(monkeypatch)
    ahead = [1, 2, 3, 4, 5, 5]
    never = [299] * 3  # no token of the text
    cases = ((False, never, ahead), (True, [], ahead), (True, never, [1, 1, 2, 3, 4, 5]))
    for proposing, found, launched in cases:
        lookup, counts = Lookup(3), []
        lookup.propose = lambda text, n, found=found: found[:n]
        lookup.pacer.ready = lambda p=proposing: p
        engine = engine_with(exact, lookup)
        step = engine.passes.step
        engine.passes.step = lambda pass_, step=step, c=counts: c.append(1) or step(pass_)
        settings = dict(n=6, eos=[], sampling=Sampling(seed=SEED))
        assert [len(counts) for _ in generate(exact, [1, 5, 6], engine, **settings)] == launched


def test_speculation_from_the_command_line(cli, tiny, copy):
    flags = ("-p", "a fox a fox a fox", "-n", 40, "-s", 5, "--dtype", "fp32", "--stop", "zz")
    said = partial(cli, "-m", tiny, *flags)
    expected = said()[1]
    # some models of a family have more rows for no token than others
    hugging_face_model(read_config(copy).vocab_size + 400, **FAMILIES["gqa"]).save_pretrained(copy)
    for way in (("--lookup", 15), ("--draft", copy), ("--draft", tiny, "--draft-max", 2)):
        code, out, err = said(*way)
        assert (code, out) == (0, expected)
        counts = r"proposals \d+ passes, \d\.\d\d tokens a pass; .* proposals accepted"
        assert re.search(counts, err)
    lines = ("the fox", "the crow", "the fox")
    assert chat(cli, tiny, *lines, flags=("--lookup", 4))[1] == chat(cli, tiny, *lines)[1]
    assert_refused(said("--draft", cli_module.DEFAULT_MODEL), "different vocabulary")
