"""Tests of session.py."""

import ast
import inspect
import itertools
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from types import SimpleNamespace
from weakref import ref

import huggingface_hub
import pytest
import torch
from hypothesis import strategies as st

from engine import Engine, Timings, generate
from loading.checkpoint import load, open_tokenizer, save
from sampling import Sampling
from session import Conversation, Session
from speculation.proposals import Lookup
from tests.helpers import (
    HERE,
    TALES,
    conversation,
    decode_in_graphs,
    examples,
    fails,
    greedy,
    logits_of,
    one_at_a_time,
)
from tokenizer import LARGE, TextStream

# ---- session.py


@pytest.mark.parametrize("which", ["the model's", "the template's"])
def test_an_answer_ends_at_either_end(tiny, which):
    session = Session(tiny, dtype="fp32", device="cpu")
    asked = dict(message="Once", n=12, temp=0)
    ids = Conversation(session).answer(**asked).finish().ids
    end = max(set(ids), key=ids.index)  # the last to appear for the first time
    assert session.tokenizer.bytes_of(end)
    if which == "the model's":
        session.eos = {end}
    else:
        session._turn_ends = ({end}, [])
    answer = Conversation(session).answer(**asked).finish()
    before = ids[: ids.index(end)]
    assert answer.ids == before and answer.ended_by == "eos"
    assert answer.text == session.tokenizer.decode(before), "the end has a text, which is not shown"
    assert answer.timings.new_tokens == len(before) + 1


@pytest.mark.parametrize("parallel", [1, 3])
def test_texts_in_any_order(tiny, parallel):
    """Several of one session are open, read to the end or not, whoever is asked first: each is what
    engine.generate and the tokenizer make of its prompt, token by token, up to a stop string, and
    the timings are the sum of all."""
    session = Session(tiny, dtype="fp32", device="cpu", parallel=parallel)
    model, tokenizer = one_at_a_time(session.model), session.tokenizer
    call = st.tuples(
        st.sampled_from(["Once upon", "Once upon a time", "", "fox", "Żółw zjadł"]),
        st.integers(0, 9), st.integers(0, 10), st.sampled_from([None, (2, 4), (3, 3), (0, 1)]),
        st.sampled_from([None, 0, 2]), st.sampled_from([dict(temp=0), dict(temp=2, repeat_penalty=1.5)]),
    )  # fmt: skip

    def check_text(generation, pieces, call, chosen, stops) -> None:
        prompt, n, taken, _, logprobs, _ = call
        ids, got = tokenizer.encode(prompt), generation.ids
        whole = tokenizer.decode(chosen)
        assert got == [id for piece in pieces for id in piece.ids] == chosen[: len(got)]
        assert generation.text == "".join(piece.text for piece in pieces)
        assert generation.prompt_tokens == len(ids)
        found = whole.find(stops[0]) if stops and stops[0] else -1
        end = len(whole) if found < 0 else found
        if generation.ended_by == "interrupt":
            assert taken <= len(got) + 1 and whole[:end].startswith(generation.text)
        else:
            assert generation.ended_by == ("length" if found < 0 else "stop")
            assert generation.text == whole[:end]
        exact = logits_of(model, [*ids, *chosen])[len(ids) - 1 :].log_softmax(1)
        for row, score in zip(exact, generation.logprobs):
            near = lambda id, row=row: pytest.approx(float(row[id]), abs=1e-3)
            assert score.logprob == near(score.id)
            assert score.best == [(id, near(id)) for id in row.topk(logprobs).indices.tolist()]
        for i, score in enumerate(generation.logprobs):
            begun = tokenizer.decode(chosen[:i])
            assert score.begins == len(begun) or "\ufffd" in begun
        if generation.ended_by == "length":
            assert len(generation.logprobs) == (0 if logprobs is None else n)

    @examples(
        30, calls=st.lists(call, min_size=2, max_size=5), toss=st.randoms(use_true_random=False)
    )
    def check(calls, toss):
        total, texts = replace(session.timings), []
        for call in calls:
            prompt, n, _, stop, logprobs, settings = call
            options = dict(n=n, ignore_eos=True)
            sampled = dict(sampling=Sampling(**settings), eos=session.eos)
            chosen = [*generate(model, tokenizer.encode(prompt), **options, **sampled)]
            whole = tokenizer.decode(chosen)
            # and one that only begins, and is held back for a while
            stops = [whole[slice(*stop)], whole[:1] + "\0"] if stop else []
            options |= dict(stop=stops, logprobs=logprobs, strip_space=False)
            generation = session.generate(prompt, **options, **settings)
            texts.append((generation, [], call, chosen, stops))
        reading = [*texts]
        while reading:
            text = toss.choice(reading)
            generation, pieces, (_, _, taken, *_), *_ = text
            piece = next(generation, None) if len(pieces) < taken else None
            if piece:
                pieces.append(piece)
                continue
            count = len(generation.ids), generation.text
            generation.close()
            assert [*generation] == [] and (len(generation.ids), generation.text) == count
            reading.remove(text)
        for text in texts:
            check_text(*text)
            generation = text[0]
            assert generation.timings.new_tokens == len(generation.ids)
            answered = bool(generation.ids) or generation.ended_by != "interrupt"
            assert generation.answered == answered
        for text in texts:
            total.add(text[0].timings)
        assert astuple(session.timings) == pytest.approx(astuple(total))
        assert session.engine.idle

    check()


def test_logprobs_of_tokens_without_a_text(tiny_session, tiny_model):
    tokenizer = tiny_session.tokenizer
    every_but_bos = {*range(tiny_model.config.vocab_size)} - {tokenizer.bos}
    options = dict(n=3, eos=every_but_bos, ignore_eos=True, logprobs=0)
    silent = tiny_session.generate("fox", **options).finish()
    assert silent.text == "" and [score.id for score in silent.logprobs] == [tokenizer.bos] * 3


def test_texts_of_several_threads(tiny):
    session = Session(tiny, dtype="fp32", device="cpu", parallel=2)
    write = lambda _: session.generate("Once upon", n=9, ignore_eos=True, seed=3).finish().ids
    with ThreadPoolExecutor(5) as threads:
        texts = [*threads.map(write, range(5))]
    assert texts == [texts[0]] * 5 and session.engine.idle
    forbidden = session.generate("Once", n=3, temp=0, logit_bias={texts[0][0]: -math.inf}).finish()
    assert texts[0][0] not in forbidden.ids


@pytest.mark.parametrize("parallel", [1, 3])
def test_a_batch(tiny, capfd, parallel):
    """Texts in the order of their prompts, however many are written at once; none is left behind if
    one fails."""
    session = Session(tiny, dtype="fp32", device="cpu", parallel=parallel)
    one_at_a_time(session.model)
    prompts = ["Once upon", [1, 5, 9], "fox", "Once upon a time", "Once upon", "a", "b"]
    options = dict(n=7, ignore_eos=True, temp=1.5, seed=3, stop="x")
    expected = [session.generate(prompt, **options).finish() for prompt in prompts]
    found = session.batch(prompts, **options)
    assert [text.ids for text in found] == [text.ids for text in expected]
    assert [text.text for text in found] == [text.text for text in expected]
    assert len({text.text for text in found}) == 6 and capfd.readouterr().err == ""
    assert {text.ended_by for text in found} <= {"length", "stop"}
    session.batch(iter(prompts), progress=True, n=1)
    assert "7/7" in capfd.readouterr().err and session.batch([]) == []
    with pytest.raises(ValueError, match="> 255 maximum; it exceeds the available context size"):
        session.batch(["fox", "fox " * 300])
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session.model.ops, "sample", fails(error()))
            with pytest.raises(error):
                session.batch(prompts, n=3)
        assert session.engine.idle, "texts are left behind"
    assert session.batch(prompts[:1], **options)[0].text == expected[0].text


def test_errors_are_those_of_one_text(tiny):
    """Of its own iterator, however it comes to light; the others go on, and its slot is free."""
    session = Session(tiny, dtype="fp32", device="cpu", parallel=2)
    texts = dict(n=6, temp=0, ignore_eos=True)
    expected = [session.generate(prompt, **texts).finish().ids for prompt in ("Once", "fox")]
    ended = []
    failing = session.generate("a crow", progress=fails(OSError("a progress bar")), **texts)
    failing.at_end(ended.append)
    failing.begin()
    sound = [session.generate(prompt, **texts) for prompt in ("Once", "fox")]
    assert [text.finish().ids for text in sound] == expected
    with pytest.raises(OSError, match="a progress bar"):
        next(failing)
    assert [*failing] == [] and not ended and not failing.answered and session.engine.idle


def test_a_forgotten_text_ends(tiny):
    """A Generation that nobody has any more makes room for one that waits."""
    session = Session(tiny, dtype="fp32", device="cpu", parallel=1)
    first = session.generate("Once", ignore_eos=True)
    next(first)
    waits = session.generate("fox", n=2, ignore_eos=True)
    gone = ref(first)
    del first
    assert gone() is None and session.engine.running == []
    assert waits.finish().ended_by == "length"
    never_begun = session.generate("fox")
    del never_begun
    assert session.engine.idle


def test_cached_tokens_of_a_prompt(tiny_session):
    """None are known to be before something is evaluated."""
    ids = tiny_session.tokenizer.encode("Once upon a time there was a fox")
    for prompt, cached in ([1, 5], None), (ids, 1), (ids, len(ids)):
        generation = tiny_session.generate(prompt, n=2)
        assert generation.cached_tokens == 0
        generation.finish()
        assert cached in (None, generation.cached_tokens)
    interrupted = tiny_session.generate([*ids[:2], 9, 9], progress=fails(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        next(interrupted)
    assert interrupted.cached_tokens == 0


def test_only_programs_name_flags():
    """Sessions are made without a command line, too, and clients of a server have none."""
    flag = re.compile(r"(?:^|[\s(])(?:--[a-z]|-[a-z]\b)")
    with_docstrings = ast.Module, ast.ClassDef, ast.FunctionDef
    programs = []
    rooms = ("", "loading", "bits", "cards", "speculation", "ranks", "talk")
    files = [file for room in rooms for file in (HERE / room).glob("*.py")]
    for file in (file for file in files if not file.name.startswith("test_")):
        source = file.read_text()
        if re.search(r"argparse|talk\.cli|import cli", source) or file.name == "settings.py":
            programs.append(file.name)
            continue
        nodes = list(ast.walk(ast.parse(source)))
        docstrings = [node.body[0] for node in nodes if isinstance(node, with_docstrings)]
        no_messages = {id(getattr(statement, "value", None)) for statement in docstrings}
        for node in nodes:
            if isinstance(node, ast.Constant) and id(node) not in no_messages:
                assert not flag.search(str(node.value)), (file.name, node.lineno, node.value)
    assert {"run.py", "serve.py", "cli.py"} <= {*programs} and "session.py" not in programs


def test_a_cut_answer_goes_on_as_it_was_shown(tiny):
    """Without the tokens of what came after a stop string's beginning, or of what was held back when it
    was closed."""
    session = Session(tiny, dtype="fp32", device="cpu", chat_template="llama2")
    ask = partial(session.chat, conversation("hello"), n=9, temp=0, ignore_eos=True)
    whole = ask().finish().text
    assert ask(stop=f"{whole[0]}@").finish().text == whole, "one stop string needs no list"
    stopped = ask(stop=[whole[4:6]]).finish()
    assert stopped.ended_by == "stop"
    closed = ask(stop=whole[3:6] + "@")
    while len(session.tokenizer.decode(closed.ids)) < 6:
        next(closed)
    closed.close()
    assert closed.text == whole[:3] and closed.ended_by == "interrupt"
    text = lambda ids: session.tokenizer.decode(ids).replace(" ", "")
    for answer in stopped, closed:
        turns = conversation("hello", answer.text, "more")
        assert text(session.render(turns).ids) == text(session.tokenizer.apply_chat_template(turns))


@pytest.mark.parametrize("bos, eos, first", [(1, 2, [1]), (-1, 2, [2]), (-1, -1, [])])
def test_an_empty_prompt_begins_with_one_token(bos, eos, first):
    tokenizer = SimpleNamespace(bos=bos, eos=eos, encode=lambda text, **_: [])
    assert Session.encode(SimpleNamespace(tokenizer=tokenizer), "") == first


def test_wrong_calls_say_what_is_wrong(tiny, tiny_session, tmp_path):
    model, generate = tiny_session.model, tiny_session.generate
    V, before = model.config.vocab_size, tiny_session.engine.cache.tokens.clone()
    loaded = partial(load, tiny, device="cpu")
    saved = partial(save, tiny, tmp_path / "new", device="cpu")
    opened = partial(Session, tiny, device="cpu")
    decode = lambda prompt: greedy(model, prompt, 1)
    no_list = "a prompt is a list of ids: tokenizer.encode"
    wrong = [
        (loaded, dict(format="e9"), "format is 'e9'; it must be"),
        (loaded, dict(format=True), "format is True; it must be"),
        (loaded, dict(dtype="fp64"), "dtype is 'fp64'; it must be"),
        (loaded, dict(accumulate="x"), "accumulate is 'x'; it must be"),
        (loaded, dict(backend="cuda"), "backend is 'cuda'; it must be"),
        (loaded, dict(ctx_size=-1), "ctx_size is -1; it must be"),
        (saved, dict(format="e9"), "format is 'e9'; it must be"),
        (saved, dict(dtype="fp64"), "dtype is 'fp64'; it must be"),
        (generate, dict(prompt="a", tmep=0), "no setting 'tmep'; sampling has temp, top_k"),
        (generate, dict(prompt="a", top_p=2), "top_p is 2; it must be from 0 to 1"),
        (generate, dict(prompt="a", logprobs=-1), "logprobs is -1; it must be 0 or more"),
        (tiny_session.chat, dict(messages=[]), "there is no message to answer"),
        (opened, dict(threads=-1), "threads is -1; it must be from 1 to 4096"),
        (opened, dict(parallel=0), "parallel is 0; it must be from 1 to 64"),
        (opened, dict(parallel=65), "parallel is 65; it must be from 1 to 64"),
        (opened, dict(lookup=2, draft=tiny), "lookup and draft both propose tokens"),
        (generate, dict(prompt="a", logit_bias={5: math.nan}), "logit_bias has nan; it must have"),
        (generate, dict(prompt=[1] * 256), "prompt is too long: 256 tokens > 255 maximum"),
        (generate, dict(prompt=[1] * 257, n=0), "prompt is too long: 257 tokens > 256 maximum"),
        (generate, dict(prompt="a " * 999), r"prompt is too long: \d+ tokens > 255 maximum"),
        (generate, dict(prompt="a " * LARGE), r"prompt is too long: at least \d+ tokens > 255"),
        (decode, dict(prompt=torch.tensor([1, 5])), no_list),
        (decode, dict(prompt="text"), no_list),
    ]
    for evaluate in (decode, generate):
        for id in (-1, V, 1 << 40):
            said = f"the id {id}; the model's are 0 .. {V - 1}"
            wrong.append((evaluate, dict(prompt=[1, id, 5]), said))
        for prompt in (None, ["text", "more"], [[1, 5]]):
            wrong.append((evaluate, dict(prompt=prompt), no_list))
        wrong.append((evaluate, dict(prompt=[]), "is empty"))
    for call, arguments, said in wrong:
        with pytest.raises((TypeError, ValueError), match=said):
            call(**arguments)
    assert not [*tmp_path.iterdir()] and torch.equal(tiny_session.engine.cache.tokens, before)
    assert len(repr(model)) < 2000, "it prints weights"


@pytest.mark.parametrize("decode", ["on a CPU", "by lookup", "in graphs"])
def test_timings_are_not_the_callers(tiny_model, monkeypatch, decode):
    """On a GPU, which works while the caller does, steps take at least what its own clock says."""
    engine = Engine(tiny_model)
    options = dict(n=5, eos=[], timings=Timings(), engine=engine)
    if "graphs" in decode:
        decode_in_graphs(monkeypatch, ms=itertools.repeat(9000.0))
    if "lookup" in decode:
        engine.proposer = Lookup(3)
    start = time.perf_counter()
    for _ in generate(tiny_model, [1, 5, 6], **options):
        time.sleep(0.1)
    took = time.perf_counter() - start
    timings = options["timings"]
    assert timings.new_tokens == 5 and timings.steps == 4
    if "graphs" in decode:
        assert timings.step_seconds == 4 * 9
    else:
        assert timings.step_seconds > 0
        assert timings.prompt_seconds + timings.step_seconds < took - 5 * 0.1
    before = timings.step_seconds
    list(generate(tiny_model, [1, 5, 6], **options))
    assert timings.new_tokens == 10 and timings.steps == 8, "of both texts"
    assert timings.step_seconds > before


@pytest.mark.parametrize("size, expected", [(32 << 20, 1), ((32 << 20) + 1, 2)])
def test_threads_of_a_session(tiny, monkeypatch, request, size, expected):
    """One for a model that fits into 32 MB of caches, unless they are given."""
    request.addfinalizer(lambda: torch.set_num_threads(1))
    monkeypatch.setattr("model.Weights.matrices", [SimpleNamespace(nbytes=size)])
    for threads, used in ((None, expected), (2, 2)):
        torch.set_num_threads(2)
        Session(tiny, dtype="fp32", device="cpu", threads=threads)
        assert torch.get_num_threads() == used


def test_conversation_with_unfinished_answers(tiny_session):
    """It has what was generated of them."""
    talk, options = Conversation(tiny_session), dict(n=6, ignore_eos=True)
    talk.answer("hello", **options).finish()
    for begin in (partial(talk.answer, "good day"), talk.again):
        generation = begin(**options)
        while not next(generation).text:
            pass
        talk.again(**options)  # which ends it, and of which nothing is generated
        said = [turn["content"] for turn in talk.turns]
        assert said[0::2] == ["hello", "good day"] and said[3] == generation.text
    next(talk.answer("more", **options))
    talk.clear()
    assert talk.turns == []
    with pytest.raises(ValueError, match="there is no answer yet"):
        talk.again()


def test_conversations_beside_each_other(tiny):
    """Each evaluates only what is new to it, and its answers are what they are alone, also those that
    are written at the same time."""
    session = Session(tiny, dtype="fp32", device="cpu", parallel=2, chat_template="llama2")
    one_at_a_time(session.model)
    said = ["hello", "tell me a tale of a fox", "good day"]
    settings = Sampling(temp=0)
    options = dict(n=6, ignore_eos=True)

    def alone(system: str) -> list[str]:
        talk = Conversation(session, system, settings)
        return [talk.answer(message, **options).finish().text for message in said]

    systems = "Be kind.", "It said: good day, crow!"
    expected = [alone(system) for system in systems]
    talks = [Conversation(session, system, settings) for system in systems]
    for i, message in enumerate(said):
        answers = [talk.answer(message, **options) for talk in talks]
        assert [answer.finish().text for answer in answers] == [texts[i] for texts in expected]
        for answer in answers:
            new = len(session.tokenizer.encode(message)) + 6 + 8
            assert i == 0 or answer.timings.prompt_tokens <= new, "a talk is evaluated again"


def test_session_names_of_dtypes_and_paths(tiny, monkeypatch, tmp_path):
    for name in "float32", torch.float32, "fp32":
        assert Session(tiny, dtype=name, device="cpu").model.dtype == torch.float32
    monkeypatch.chdir(tmp_path)
    assert Session("models/tales", device="cpu").model.checkpoint.folder == TALES
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails(AssertionError("the hub")))
    with pytest.raises(OSError, match="no folder models/talse here"):
        Session("models/talse")
    (tmp_path / "mine").mkdir()
    with pytest.raises(OSError, match="no folder mine/model here"):
        Session("mine/model")


def test_sessions_load_by_default_what_load_does():
    ours, theirs = (inspect.signature(function).parameters for function in (Session, load))
    for name in theirs.keys() - {"name"}:
        assert ours[name].default == theirs[name].default, name


def test_stop_strings_with_control_tokens():
    tokenizer = open_tokenizer(TALES)
    end, text = tokenizer.control["</s>"], tokenizer.encode("One fox. Two", bos=False)
    fox = next(i for i in range(len(text)) if tokenizer.decode(text[: i + 1]).endswith("fox"))
    for stops, ids, expected, stopped in (
        (["</s>"], [*text, end, *text], "One fox. Two", True),
        (["fox</s>"], [*text[: fox + 1], end], "One ", True),
        (["fox</s>"], text, "One fox. Two", False),
        (["fox</s>"], [*text[: fox + 1], tokenizer.bos, *text[fox + 1 :]], "One fox. Two", False),
        (["</s><s>"], [*text, end, *text, end, tokenizer.bos], "One fox. Two One fox. Two", True),
        (["</s>."], [*text, end], "One fox. Two", False),
    ):  # fmt: skip
        stream = TextStream(tokenizer, strip_space=True, stops=stops)
        seen = "".join(stream.push(id) for id in ids) + stream.finish()
        assert (seen, stream.stopped) == (expected, stopped), stops


# ---- logprobs.py: those of a text are tested with sessions


def test_scores_of_a_prompt(tiny_session, tiny_model, monkeypatch):
    """Of which three tokens are evaluated at a time."""
    monkeypatch.setattr("engine.SCORES_AT_ONCE", 3 * tiny_model.config.vocab_size)
    ids = tiny_session.tokenizer.encode("Once upon a time there was a fox")
    generation = tiny_session.generate(ids, n=0, logprobs=2, echo=True).finish()
    first, *scores = generation.logprobs
    assert (first.id, first.logprob) == (ids[0], None)
    assert [score.id for score in scores] == ids[1:]
    for row, score in zip(logits_of(tiny_model, ids).log_softmax(1), scores):
        assert score.logprob == pytest.approx(float(row[score.id]), abs=1e-3)
        assert [id for id, _ in score.best] == row.topk(2).indices.tolist()
