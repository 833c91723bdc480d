"""Tests of sampling.py."""

import functools
import itertools
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import kernels
import sampling
from sampling import BANNED, Sampler, Sampling, mask_without
from tests.helpers import DEVICE, INF, NAN, SEED, a_pass

NOTHING = torch.zeros(9, dtype=torch.int32)  # tokens before


def device_of(ops: str) -> torch.device:
    return DEVICE if ops == "fused" else torch.device("cpu")


@functools.cache
def sampler_of(ops: str, rows: int) -> Sampler:
    """One for all choices: what kernels leave in its memory must not change the next."""
    return Sampler(device_of(ops), rows)


def choose(logits: torch.Tensor, tokens: torch.Tensor, position: int, ops="reference", **settings):
    """The tokens with the one that is chosen for the position or, for several rows of logits, those
    that end there."""
    rows = logits.view(-1, logits.shape[-1]).to(device_of(ops), copy=True)
    sampler = sampler_of(ops, len(rows))
    sampler.set([Sampling(**settings)] * len(rows))
    # The first token is at place 20: a token at position 0, too, has a place before it
    pool = torch.full((20,), -1, dtype=torch.int32)
    pool = torch.cat((pool, tokens)).to(device_of(ops))
    before = torch.arange(position - len(rows), position, dtype=torch.int32, device=pool.device)
    pass_ = SimpleNamespace(tokens=pool, drawn=pool.clone(), place=before + 20, position=before)
    pass_.sampler, pass_.rows, pass_.feeds = sampler, None, len(rows) == 1
    getattr(kernels, ops).sample(rows, pass_)
    if pass_.feeds:
        assert pool[20 + position] == pass_.drawn[20 + position].clamp(min=0)
    else:
        assert pool[20:].tolist() == tokens.tolist(), "tokens changed"
    return pass_.drawn[20:].tolist()


def choose_alike(logits: torch.Tensor, tokens: torch.Tensor, position: int, **settings) -> int:
    """What the reference chooses for the position, and the kernel, too."""
    expected = choose(logits, tokens, position, **settings)
    assert choose(logits, tokens, position, ops="fused", **settings) == expected, settings
    return expected[position]


OFF = dict(temp=1.0, top_k=0, top_p=1.0, min_p=0.0)


def test_sampling_distribution_and_filters():
    def draw(logits: torch.Tensor, count: int, **settings) -> torch.Tensor:
        """How often each token is chosen, over many seeds."""
        seeds = range(SEED, SEED + count)
        drawn = [choose(logits, NOTHING, 0, **settings, seed=seed)[0] for seed in seeds]
        return torch.bincount(torch.tensor(drawn), minlength=len(logits)) / count

    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 2 + 2**-22])
    for temp in (1e-50, 1e-9, 0.5, 2.0, 1e9, INF):
        expected = ((logits.double() - logits.max()) / temp).softmax(0)
        drawn = draw(logits, 1600, **OFF | dict(temp=temp))
        assert (drawn - expected).abs().max() < 0.063, "5 sigma of so many draws"
    logits = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]).log()
    kept = lambda logits=logits, **s: draw(logits, 600, **OFF | s).gt(0).tolist()
    first = lambda n: [i < n for i in range(5)]
    assert kept() == kept(top_k=-1) == first(5)
    assert kept(top_k=2) == kept(top_p=0.6, temp=100.0) == first(2), "before the temperature"
    assert kept(top_p=0.76) == kept(min_p=0.2) == first(3)
    assert kept(top_p=0.0) == kept(temp=0.0) == first(1)
    # equals at the edge are all kept
    assert kept(torch.tensor([1.0] * 6 + [0.0] * 2), top_k=2, top_p=0.3) == [True] * 6 + [False] * 2
    assert all(kept(torch.zeros(20), top_k=2))


@pytest.mark.parametrize("name, taken, refused", [
    ("temp", (0, INF), (-1e-9, NAN)), ("top_k", (-1, 10**300), (-2,)), ("top_p", (0, 1), (-1e-9, 1.1, NAN)),
    ("min_p", (0, 1), (-1e-9, 1.1)), ("repeat_penalty", (0.01, 100), (0, 100.1)),
    ("repeat_last_n", (-1, 0, 1 << 62), (-2,)), ("seed", (0, (1 << 63) - 1), (-1, 1 << 63)),
])  # fmt: skip
def test_settings_at_their_edges(name, taken, refused):
    for value in taken:
        assert getattr(Sampling(**{name: value}), name) == value
        choose_alike(torch.randn(90), NOTHING, 5, **{name: value})
    for value in refused:
        said = f"^{name} is {value}; it must be (from .* to .*|.* or more)$"
        with pytest.raises(ValueError, match=said):
            Sampling(**{name: value})


@pytest.mark.parametrize("window", [1, 2, 3, 5, 7, 8, -1, 1 << 40])
def test_the_penalty_looks_back_its_window(window):
    logits, limited = torch.full((20,), -20.0), 0 < window < 9
    for high, back in itertools.product((2.0, -1.0), (window, window + 1) if limited else (1, 12)):
        logits[3], logits[4], expected = high, high - 0.5, 3 if back == window + 1 else 4
        tokens = torch.full((16,), 5, dtype=torch.int32)  # token 3 that far back, token 5 elsewhere
        tokens[12 - back] = 3
        settings = dict(repeat_penalty=2.0, repeat_last_n=window)
        assert choose_alike(logits, tokens, 12, temp=0, **settings) == expected
        assert choose_alike(logits, tokens, 12, top_k=0, temp=1e-9, **settings) == expected
        assert choose_alike(logits, tokens, 12, temp=0, repeat_last_n=window) == 3, "no penalty"
        none = settings | dict(repeat_last_n=0)
        assert choose_alike(logits, tokens, 12, temp=0, **none) == 3, "a window of no tokens"
        # more than are read at a time
        beyond = torch.cat((tokens, torch.full((1500,), 5, dtype=torch.int32)))
        assert choose_alike(logits, beyond, 1510, temp=0, **settings) == (3 if limited else 4)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_logits_not_finite(bad):
    logits = torch.randn(2500)
    logits[2000] = bad
    for settings in (dict(), dict(top_k=0), dict(top_k=200), dict(temp=0), dict(top_k=0, top_p=1)):
        assert choose_alike(logits, NOTHING, 0, **settings) == -1


def few_above_equals(V: int, height: float, many: int) -> torch.Tensor:
    logits, places = torch.full((V,), -5.0), torch.randperm(V)
    logits[places[:7]], logits[places[7 : 7 + min(V - 10, many)]] = height + torch.rand(7), 1.0
    return logits


KINDS_OF_LOGITS = {
    "normal": lambda V: 3 * torch.randn(V),
    "flat": lambda V: 0.03 * torch.randn(V),
    "equal": torch.zeros,
    "rounded": lambda V: (3 * torch.randn(V)).round(),
    "one above the others": lambda V: (3e-5 * torch.randn(V)).index_fill(0, torch.tensor(7), 2.0),
    "near zero": lambda V: 3 * torch.randn(V) * torch.rand(V) ** 20,
    "banned": lambda V: (3 * torch.randn(V)).index_fill(0, torch.arange(V // 4), BANNED),
    "few above equals": partial(few_above_equals, height=2.0, many=90),
    "few above many equals": partial(few_above_equals, height=4.5, many=2500),
}


@pytest.mark.parametrize("kind", KINDS_OF_LOGITS)
def test_sampling_equals_the_reference(kind):
    choices = dict(
        temp=(0, 1e-50, 1e-30, 1e-9, 0.7, 1.5, 1e6, INF),
        top_k=(-1, 0, 1, 5, 12, 40, 65, 80, 1099, 5000, 10**300),
        top_p=(0.0, 1e-9, 0.5, 0.97, 1.0), min_p=(0, 0.05, 0.5),
        repeat_penalty=(1.0, 1.2), repeat_last_n=(-1, 0, 7, 64),
    )  # fmt: skip
    # top-k of as many as there are parts, each as likely as the others; the equals that top-k keeps
    # count for top-p
    cases = [(V, dict(top_k=k, top_p=1.0, min_p=0, temp=1e6)) for V, k in ((1100, 5), (3000, 12))]
    cases += [(V, dict(top_k=40, top_p=0.5, min_p=0, temp=1.5)) for V in (100, 300, 3000, 5000)]
    # top-p with more equals than a chunk holds, which it takes or leaves; all are then as likely
    equals = dict(top_k=40, min_p=0, temp=1e6)
    cases += [(5000, dict(top_p=p, **equals)) for p in (0.05, 0.08, 0.11, 0.14, 0.17)]
    # from several parts: the largest; any
    cases += [(5000, OFF | dict(temp=temp)) for temp in (0, 1)]
    for _ in range(8):
        settings = {name: random.choice(values) for name, values in choices.items()}
        cases.append((random.choice((17, 300, 1100, 3000, 5000)), settings))
    for V, settings in cases:
        logits, tokens = KINDS_OF_LOGITS[kind](V), torch.randint(0, V, (64,), dtype=torch.int32)
        position, seed = random.choice((0, 1, 20, 50)), random.randrange(1 << 63)
        choose_alike(logits, tokens, position, **settings, seed=seed)


def test_drawing_where_all_scores_are_negative():
    """As they are where the noise of the best token is, whose score is nothing else."""
    logits = torch.zeros(300).index_fill(0, torch.tensor(7), 40.0)
    tokens = torch.zeros(8, dtype=torch.int32)
    for position in range(8):
        choose_alike(logits, tokens, position, **OFF, seed=3)


@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.999999, 1.0])
@pytest.mark.parametrize("top_k", [0, 129, 1099, 1100])
def test_thresholds_found_by_sorting(top_k, top_p):
    V, settings = 1100, dict(top_k=top_k, top_p=top_p, min_p=0, temp=3, seed=SEED)
    sampler = Sampler(DEVICE)
    sampler.set([Sampling(**settings)])
    sorts = sampler.switches(V).sorts
    assert sorts == (top_p < 1 or 0 < top_k < V)
    kinds = ("normal", "equal", "rounded", "few above equals")
    choose_alike(torch.stack([KINDS_OF_LOGITS[kind](V) for kind in kinds]), NOTHING, 4, **settings)


def test_the_lowest_logit_that_sorting_keeps():
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.07, 0.03], [0.05, 0.4, 0.4, 0.1, 0.05]]).log()
    floors = torch.empty(2)
    for top_k, top_p, places in (
        (0, 0.0, (0, 1)), (0, 0.49, (0, 1)), (0, 0.51, (1, 1)), (0, 0.79, (2, 1)), (0, 0.81, (2, 3)),
        (0, 0.98, (4, 0)), (1, 1.0, (0, 1)), (2, 1.0, (1, 1)), (3, 1.0, (2, 3)), (4, 1.0, (3, 0)),
        # the equals that top-k keeps count for top-p
        (3, 0.8, (1, 1)), (1, 0.6, (0, 1)), (4, 0.89, (2, 3)), (4, 0.93, (3, 0)),
    ):  # fmt: skip
        sampler = Sampler(torch.device("cpu"), 2)
        sampler.set([Sampling(top_k=top_k, top_p=top_p)] * 2)
        sampling._find_floors(logits, sampler.numbers, sampler.switches(5), floors)
        assert floors.tolist() == [logits[0, places[0]], logits[1, places[1]]], (top_k, top_p)


def test_rows_are_sampled_as_single_tokens_are():
    tokens, penalty = torch.randint(0, 2000, (40,), dtype=torch.int32), dict(repeat_penalty=1.3)
    others = dict(temp=0), dict(top_k=0, **penalty), dict(top_k=0, top_p=1), penalty
    for settings in (dict(seed=3), *others):
        logits = 3 * torch.randn(5, 2000)
        logits[3, 7] = torch.nan
        choose_alike(logits, tokens, 30, **settings)
        chosen = choose(logits, tokens, 30, **settings)
        assert chosen[29] == -1
        assert chosen[28] == choose(logits[2], tokens, 28, **settings)[28]


def texts_of(segments: list[tuple], V: int, settings: list[Sampling], masks: list, feeds: bool):
    """A pass of these segments whose last rows are sampled, with random logits of them, and what the
    reference chooses for each of them alone."""
    pass_ = a_pass((1, 1, 8), segments, torch.float16)
    pass_.tokens %= V
    ends = [begin + count - 1 for _, _, begin, count in pass_.segments.tolist()]
    pass_.rows, pass_.feeds = torch.tensor(ends, device=DEVICE), feeds
    logits, expected = 3 * torch.randn(len(segments), V), {}
    for row, logit, own, mask in zip(ends, logits, settings, masks):
        # the best have equals, of which a greedy row takes the first
        logit[random.sample(range(V), 5)] = logit.max()
        place, position = int(pass_.place[row]), int(pass_.position[row])
        history = pass_.tokens[place - position : place + 1].cpu()
        logit = logit.clone()
        logit[mask] = BANNED
        expected[place + 1] = sampling._choose_ref(logit, history, own)
    return pass_, logits.to(DEVICE), expected


MIXES = {
    "greedy": [dict(temp=0), dict(temp=0, repeat_penalty=1.3), dict(temp=0, top_k=0)],
    "candidates": [dict(temp=0), dict(top_k=5), dict(top_k=7, top_p=1.0, temp=3.0, min_p=0)],
    "drawn from all": [dict(temp=0), OFF, OFF | dict(temp=2.0, repeat_penalty=1.5)],
    "sorted": [
        dict(temp=0), OFF | dict(temp=50.0), dict(top_k=0, top_p=0.7), dict(top_k=3),
        OFF | dict(top_k=30, temp=50.0),
    ],
    "without top-p": [dict(top_k=0, top_p=1.0), dict(top_k=3, top_p=1.0), dict(top_k=2500, top_p=1.0)],
}  # fmt: skip


@pytest.mark.parametrize("feeds", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_rows_of_several_texts(mix, feeds):
    """Each is sampled as it would be alone: with its own settings, seed, history and mask. Others
    behind the list of settings are greedy. The same sampler serves all mixes."""
    V = random.choice((100, 1100, 3000))
    for masked in (False, True):
        given = [Sampling(**own, seed=random.randrange(1 << 63)) for own in MIXES[mix]]
        random.shuffle(given)
        settings = [*given, Sampling(temp=0)]
        lengths = random.choices(((1, 0), (1, 5), (3, 40), (2, 90)), k=len(settings))
        masks = [random.sample(range(V), V // 2) if masked else [] for _ in given] + [[]]
        pass_, logits, expected = texts_of(lengths, V, settings, masks, feeds)
        sampler = pass_.sampler = sampler_of("fused", len(settings))
        bits = [mask_without(ids, V) for ids in masks[: len(given)]]
        sampler.set(given)
        sampler.restrict(torch.stack(bits) if masked else None)
        before = [pass_.tokens.clone(), pass_.drawn.clone()]
        kernels.fused.sample(logits.clone(), pass_)
        chosen = [dict(enumerate(t.tolist())) for t in before]
        if feeds:
            chosen[0] |= expected
        chosen[1] |= expected
        for mine, right in zip((pass_.tokens, pass_.drawn), chosen):
            assert dict(enumerate(mine.tolist())) == right
        for mine, was in zip((pass_.tokens, pass_.drawn), before):
            mine.copy_(was)
        kernels.reference.sample(logits, pass_)
        assert dict(enumerate(pass_.drawn.tolist())) == chosen[1]


def test_masks_that_leave_few_tokens():
    """Fewer than top-k: the others are not listed as candidates, which would take long."""
    V, settings = 3000, [Sampling(seed=SEED), Sampling(top_k=3, top_p=1, seed=SEED)]
    allowed = [random.sample(range(V), count) for count in (2, 1)]
    masks = [[*{*range(V)} - {*ids}] for ids in allowed]
    pass_, logits, expected = texts_of([(1, 5)] * 2, V, settings, masks, True)
    sampler = pass_.sampler = sampler_of("fused", 2)
    sampler.set(settings)
    sampler.restrict(torch.stack([mask_without(ids, V) for ids in masks]))
    listed = sampler.scratch.zeros("listed ids", 2, V, dtype=torch.int32).fill_(-1)
    kernels.fused.sample(logits, pass_)
    assert {place: int(pass_.drawn[place]) for place in expected} == expected
    for row, ids in zip(listed.tolist(), allowed):
        assert {*row} - {-1} == {*ids}


@pytest.mark.parametrize("feeds", [False, True])
def test_biases_and_penalties_of_each_text(feeds):
    """Of tokens that the text has had; those of the prompt do not count."""
    V = 90
    asked = [
        dict(presence_penalty=2.0, temp=0), dict(frequency_penalty=-1.5, temp=0), dict(),
        dict(presence_penalty=-2.0, frequency_penalty=1.5, repeat_penalty=1.2),
    ]  # fmt: skip
    settings = [Sampling(**own, seed=random.randrange(1 << 63)) for own in asked]
    begins = [0, 7, 3, 20]
    biases = torch.zeros(4, V)
    biases[2, 5], biases[2, 8] = 9.0, -100.0
    texts = [(1, 40), (2, 30), (1, 5), (1, 60)]
    for _ in range(12):  # since a penalty changes few choices
        pass_, logits, _ = texts_of(texts, V, settings, [[]] * 4, feeds)
        expected = {}
        for r, row in enumerate(pass_.rows.tolist()):
            place, position = int(pass_.place[row]), int(pass_.position[row])
            history = pass_.tokens[place - position : place + 1].cpu()
            # in the first text its first own token is passed over for having been there, in the
            # second it is chosen for that
            if r < 2:
                logits[r, history[begins[r]]] = logits[r].max() + (1 if r == 0 else -1)
            own = logits[r].cpu() + biases[r]
            for token in range(V):
                count = history[begins[r] :].tolist().count(token)
                own[token] -= settings[r].frequency_penalty * count
                own[token] -= settings[r].presence_penalty * (count > 0)
            expected[place + 1] = sampling._choose_ref(own, history, settings[r])
        for ops in (kernels.fused, kernels.reference):
            pass_.sampler = sampler_of("fused", 4)
            pass_.sampler.set(settings, biases=biases, begins=begins)
            ops.sample(logits.clone(), pass_)
            assert {place: int(pass_.drawn[place]) for place in expected} == expected
