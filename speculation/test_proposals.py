"""Tests of speculation/proposals.py."""

import contextlib
import copy as copy_module
import itertools
import random
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from formats import Matrix
from loading import place
from loading.checkpoint import read_config
from model import Llama, State, generate
from sampling import Sampling
from session import Session
from speculation.proposals import Draft, Lookup, Pacer, Speculation
from talk import cli as cli_module
from tests.helpers import (
    FAMILIES,
    MOST_PROBABLE,
    ON_GPU,
    SEED,
    always,
    assert_refused,
    chat,
    decode_in_graphs,
    edit,
    exact_model,
    examples,
    fails,
    hugging_face_model,
    other_model,
)


class Planted(Speculation):
    """Proposes the text that will follow, with errors here and there."""

    def __init__(self, n: int):
        super().__init__(n)
        self.text: list[int] = []

    def propose(self, ids):
        coming = self.text[len(ids) : len(ids) + self.n]
        planted = [random.choice([token] * 4 + [7]) for token in coming]
        planted += [7] * (self.n - len(planted))
        return random.choice([planted, []])


SETTINGS = {
    "greedy": dict(sampling=MOST_PROBABLE),
    "hot, without filters": dict(sampling=Sampling(temp=2, top_k=0, top_p=1, min_p=0, seed=5)),
    "penalty": dict(sampling=Sampling(repeat_penalty=1.5, repeat_last_n=6, seed=0)),
    "penalty on all": dict(sampling=Sampling(temp=0, repeat_penalty=1.1, repeat_last_n=-1)),
    "eos": dict(sampling=MOST_PROBABLE, eos=range(3, 40)),
    "eos ignored": dict(sampling=MOST_PROBABLE, eos=range(3, 200), ignore_eos=True),
}
WAYS = {
    "lookup": lambda model, other: Lookup(3),
    "lookup of one": lambda model, other: Lookup(1),
    "draft of itself": lambda model, other: Draft(3, copy_module.copy(model)),
    "another draft": lambda model, other: Draft(4, other),
    "planted": lambda model, other: Planted(5),
    "many planted": lambda model, other: Planted(15),
}
CALL = st.tuples(
    st.lists(st.integers(3, 9) | st.integers(3, 299), min_size=1, max_size=20),  # a prompt
    st.sampled_from([0, 1, 7, 80]),  # tokens; the last fills the context
    st.sampled_from([*SETTINGS]),
    st.none() | st.integers(0, 9),  # after so many the text is interrupted
)


@examples(
    40, way=st.sampled_from([*WAYS]), in_graphs=st.booleans(), calls=st.lists(CALL, max_size=4)
)
@hypothesis.example(way="draft of itself", in_graphs=True, calls=[([5] * 9, 80, "penalty", 3)] * 2)
@hypothesis.example(way="another draft", in_graphs=False, calls=[([5, 6], 7, "eos", None)] * 3)
@hypothesis.example(
    way="draft of itself", in_graphs=False,
    calls=[([5] * length, 80, "greedy", None) for length in range(1, 9)],  # to a full context
)  # fmt: skip
def test_proposals_and_interrupted_speculation_do_not_change_the_text(exact, way, in_graphs, calls):
    """Several texts on one state with one way to propose: each is what a state of its own gives
    without proposals, and whoever stops early leaves the state with exactly what came before."""
    torch.manual_seed(0)
    state, toss = State(exact), random.Random(0)
    speculation = WAYS[way](exact, other_model(exact))
    speculation.pacer.ready = lambda: toss.random() < 0.7
    with pytest.MonkeyPatch.context() as patch:
        if in_graphs and not ON_GPU:
            decode_in_graphs(patch)
        for prompt, n, settings, taken in calls:
            options, alone = dict(n=n) | SETTINGS[settings], State(exact)
            with pytest.MonkeyPatch.context() as plainly:
                plainly.setattr(Llama, "uses_graphs", ON_GPU)
                expected = list(generate(exact, prompt, alone, **options))
            if isinstance(speculation, Planted):
                speculation.text = prompt + expected
            passes, accepted = speculation.passes, speculation.accepted
            tokens = generate(exact, prompt, state, **options, decode=speculation.decode)
            with contextlib.closing(tokens):
                got = list(itertools.islice(tokens, taken))
            assert got == expected[:taken]
            if got == expected and taken != 0:
                assert state.pos in (alone.pos, alone.pos - 1)
            elif got:
                assert state.pos == len(prompt) + taken - 1
            assert state.pos == state.device_pos
            new = speculation.passes - passes + speculation.accepted - accepted
            assert new <= max(len(expected) - 1, 0) + speculation.n  # an eos ends a pass early
    if way == "draft of itself":
        kept = "the draft keeps what was not sampled, or has lost what was"
        assert speculation.accepted == speculation.proposed, kept


def test_draft_of_the_same_model(tiny, monkeypatch):
    """Also after Ctrl-C while it reads a prompt: what it has kept of the text before is no part of
    the new one."""
    model = exact_model(tiny, ctx_size=128)
    draft, state = always(Draft(4, copy_module.copy(model))), State(model)
    write = lambda prompt: list(generate(model, prompt, state, 61, eos=[], decode=draft.decode))
    first, second = (random.choices(range(3, 300), k=50) for _ in range(2))
    assert len(write(first)) == 61  # one, and 12 times the four of the draft and another
    said = "proposals 12 passes, 5.00 tokens a pass; 100% of 48 proposals accepted"
    assert draft.summary() == said
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(draft.model, "step", fails(KeyboardInterrupt()))
        write(second)
    write(second)
    assert draft.accepted == draft.proposed and draft.passes == 24


STEP = st.tuples(st.integers(0, 4), st.lists(st.integers(3, 9), max_size=9))


@examples(25, steps=st.lists(STEP, min_size=2, max_size=4))
def test_a_draft_keeps_no_token_that_was_not_sampled(exact, steps):
    """steps: how many of its proposals are sampled, and what follows without proposals. It then
    proposes what a new draft of the same text does."""
    ids, state = [1, 5, 9, 3], State(exact)
    draft = Draft(4, copy_module.copy(exact))
    draft.begin(exact, state, ids)
    for accepted, others in steps:
        new = Draft(4, draft.model)
        new.begin(exact, state, ids[:-1])
        proposals = draft.propose(ids)
        assert proposals == new.propose(ids)
        ids += [*proposals[:accepted], (proposals[-1] + 1) % 300, *others]


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
    list(generate(exact, [1, 5, 6], n=12, eos=[], decode=way.decode))
    assert (way.passes - counts[0], way.held_off - counts[3]) == (11, 11)


def test_draft_of_a_smaller_vocabulary(exact):
    """A prompt may have ids that only the model has; the draft reads them as its first. A text has
    none, even one in which every id is as probable as the next."""
    small, V = copy_module.copy(exact), exact.config.vocab_size
    small.config = replace(exact.config, vocab_size=V - 99)
    embedding = exact.weights.embedding[: V - 99]
    small.weights = replace(exact.weights, embedding=embedding, output=Matrix(embedding))
    flat = Sampling(temp=1e9, top_k=0, top_p=1, min_p=0, seed=SEED)
    for end in (V - 1, 7):
        prompt = [1, V - 99, 9, end]
        draft = always(Draft(3, small))
        found = list(generate(exact, prompt, None, 50, flat, eos=[], decode=draft.decode))
        assert len(found) == 50 and max(found) < V - 99 and draft.passes
        seen = draft.state.tokens.tolist()
        assert seen[:4] == [1, 0, 9, end if end == 7 else 0] and seen[4] == found[0]


def test_memory_of_a_draft_is_that_of_the_models_context(tiny, copy, monkeypatch):
    sizes = []
    edit(copy / "config.json", max_position_embeddings=128)
    monkeypatch.setattr(place, "check_memory", lambda *args: sizes.append(args[3]))
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
        assert Lookup(n).propose(seen) == proposals[:n]


@examples(200, seen=st.lists(st.integers(5, 9), min_size=20, max_size=40), n=st.integers(1, 15))
def test_lookup_of_a_text_that_grows(seen, n):
    """It proposes what it does for the whole text at once; of the text before, nothing is left."""
    growing = Lookup(n)
    growing.begin(None, None, [9, 8, 7, 6, 5])
    growing.begin(None, None, seen[:10])
    for size in range(11, len(seen) + 1):
        assert growing.propose(seen[:size]) == Lookup(n).propose(seen[:size])


# proposed, accepted, seconds, whether the GPU waited; then: seconds of a single token, of several,
# lost, in total; whether the next pass may propose
PACES = [
    ((0, 0, 1.0, False), 1.0, 0.0, 0.0, 1.0, True),
    ((3, 0, 9.0, False), 1.0, 1.0, 0.0, 2.0, True),  # which compiled: it counts as a single token
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


def test_capturing_is_no_part_of_a_pass(tiny, monkeypatch):
    """By a clock that moves 9 seconds when a graph is captured and 1 when it is replayed. A GPU has a
    clock of its own."""
    decode_in_graphs(monkeypatch)
    exact = exact_model(tiny, 64)
    now, charged = [0.0], []

    def work(seconds: float, run) -> None:
        run()
        now[0] += seconds

    def captured_slowly(run, device, reset):
        now[0] += 9
        return SimpleNamespace(replay=partial(work, 1.0, run))

    monkeypatch.setattr("speculation.proposals.captured", captured_slowly)
    monkeypatch.setattr("speculation.proposals.time.perf_counter", lambda: now[0])
    lookup, state = Lookup(3), State(exact)
    record = lookup.pacer.record
    lookup.pacer.record = lambda *args: charged.append(args[2]) or record(*args)
    list(generate(exact, [5, 6, 5, 6, 7], state, 9, MOST_PROBABLE, eos=[], decode=lookup.decode))
    assert charged == [pytest.approx(1.0)] * lookup.passes, "the pacer takes a graph for a pass"
    assert state.busy == pytest.approx(lookup.passes)


@pytest.mark.parametrize("in_graphs", [False, True])
@pytest.mark.parametrize("proposing", [False, True])
def test_speculation_where_logits_are_not_finite(tiny, monkeypatch, in_graphs, proposing):
    model, prompt, options = exact_model(tiny, 64), [1, 5, 6], dict(n=20, eos=[])
    options["sampling"] = Sampling(seed=SEED)
    text = list(generate(model, prompt, **options))
    sample = model.ops.sample

    def spoiled(logits, tokens, drawn, pos, sampler) -> None:
        logits[max(14 - (int(pos) - len(logits) + 1), 0) :] = torch.nan
        sample(logits, tokens, drawn, pos, sampler)

    model.ops = SimpleNamespace(**vars(model.ops) | dict(sample=spoiled))
    if in_graphs:
        decode_in_graphs(monkeypatch)
    planted, got = Planted(4), []
    planted.text = prompt + text
    planted.pacer.ready = lambda: proposing
    with pytest.raises(RuntimeError, match="not finite"):
        got.extend(generate(model, prompt, **options, decode=planted.decode))
    assert got == text[:11]


def test_single_tokens_run_ahead(exact, monkeypatch):
    """Without proposals, two passes are on their way, also while the host looks for some; with
    them, one: tokens are needed first."""
    decode_in_graphs(monkeypatch)
    ahead = [2, 3, 4, 5, 5, 5]
    never = [299] * 3  # no token of the text
    cases = ((False, never, ahead), (True, [], ahead), (True, never, [1, 2, 3, 4, 5, 5]))
    for proposing, found, launched in cases:
        lookup, counts = Lookup(3), []
        one_pass = lookup._pass
        lookup._pass = lambda *args, f=one_pass, c=counts: c.append(1) or f(*args)
        lookup.propose = lambda ids, found=found: found
        lookup.pacer.ready = lambda p=proposing: p
        settings = dict(n=6, eos=[], sampling=Sampling(seed=SEED))
        text = generate(exact, [1, 5, 6], **settings, decode=lookup.decode)
        assert [len(counts) for _ in text] == launched


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
    edges = ("--lookup", 0), ("--lookup", 16), ("--draft", tiny, "--draft-max", 0)
    for wrong in (*edges, ("--lookup", 3, "--draft", tiny), ("--draft-max", 3)):
        assert_refused(said(*wrong), code=2)
    assert_refused(said("--draft", cli_module.DEFAULT_MODEL), "different vocabulary")
