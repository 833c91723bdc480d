"""Tests of session.py."""

import ast
import inspect
import itertools
import re
import time
from functools import partial
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from hypothesis import strategies as st

from loading.checkpoint import load
from loading.save import save
from model import State, Timings, generate
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
)
from tokenizer import TextStream, Tokenizer

# ---- session.py


def test_one_stop_string_needs_no_list(tiny_session):
    texts = partial(tiny_session.generate, "Once", n=20, temp=0)
    whole = texts().finish().text
    stop = whole[-4:-1]
    ended = texts(stop=stop).finish()
    assert ended.text == whole[: whole.index(stop)] and ended.ended_by == "stop"


def test_texts_in_any_order(tiny_session, tiny_model):
    """Of one session, read to the end or not: each is what model.generate and the tokenizer make of
    its prompt, token by token, up to a stop string; the next text ends an unfinished one, and the
    timings are the sum of all."""
    tokenizer = tiny_session.tokenizer
    call = st.tuples(
        st.sampled_from(["Once upon", "Once upon a time", "", "fox", "Żółw zjadł"]),
        st.integers(0, 9), st.integers(0, 10), st.sampled_from([None, (2, 4), (3, 3), (0, 1)]),
        st.sampled_from([None, 0, 2]), st.sampled_from([dict(temp=0), dict(temp=2, repeat_penalty=1.5)]),
    )  # fmt: skip

    @examples(40, calls=st.lists(call, min_size=2, max_size=5))
    def check(calls):
        tiny_session.end()
        before, done = tiny_session.timings, []
        for prompt, n, taken, stop, logprobs, settings in calls:
            ids = tokenizer.encode(prompt)
            options = dict(n=n, ignore_eos=True)
            sampled = dict(sampling=Sampling(**settings), eos=tiny_session.eos)
            chosen = [*generate(tiny_model, ids, **options, **sampled)]
            whole = tokenizer.decode(chosen)
            # and one that only begins, and is held back for a while
            stops = [whole[slice(*stop)], whole[:1] + "\0"] if stop else []
            options |= dict(stop=stops, logprobs=logprobs, strip_space=False)
            generation = tiny_session.generate(prompt, **options, **settings)
            assert all(list(earlier) == [] for earlier, _, _ in done), "two texts at once"
            pieces = list(itertools.islice(generation, taken))
            done.append((generation, len(generation.ids), generation.text))
            got = generation.ids
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
            exact = logits_of(tiny_model, [*ids, *chosen])[len(ids) - 1 :].log_softmax(1)
            for row, score in zip(exact, generation.logprobs):
                near = lambda id, row=row: pytest.approx(float(row[id]), abs=1e-3)
                assert score.logprob == near(score.id)
                assert score.best == [(id, near(id)) for id in row.topk(logprobs).indices.tolist()]
            for i, score in enumerate(generation.logprobs):
                begun = tokenizer.decode(chosen[:i])
                assert score.begins == len(begun) or "\ufffd" in begun
            if generation.ended_by == "length":
                assert len(generation.logprobs) == (0 if logprobs is None else n)
        tiny_session.end()
        for generation, count, text in done:
            assert (generation.timings.new_tokens, generation.text) == (count, text)
            assert generation.answered == (count > 0 or generation.ended_by != "interrupt")
        assert tiny_session.timings == sum((g.timings for g, _, _ in done), before)

    check()
    every_but_bos = {*range(tiny_model.config.vocab_size)} - {tokenizer.bos}
    options = dict(n=3, eos=every_but_bos, ignore_eos=True, logprobs=0)
    silent = tiny_session.generate("fox", **options).finish()
    assert silent.text == "" and [score.id for score in silent.logprobs] == [tokenizer.bos] * 3


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
        if re.search(r"argparse|talk\.cli|import cli", source):
            programs.append(file.name)
            continue
        nodes = list(ast.walk(ast.parse(source)))
        docstrings = [node.body[0] for node in nodes if isinstance(node, with_docstrings)]
        no_messages = {id(getattr(statement, "value", None)) for statement in docstrings}
        for node in nodes:
            if isinstance(node, ast.Constant) and id(node) not in no_messages:
                assert not flag.search(str(node.value)), (file.name, node.lineno, node.value)
    assert {"run.py", "serve.py", "cli.py"} <= {*programs} and "session.py" not in programs


def test_a_stopped_answer_goes_on_as_it_was_shown(tiny):
    """Without the tokens of what came after the stop string's beginning."""
    session = Session(tiny, dtype="fp32", device="cpu", chat_template="llama2")
    ask = partial(session.chat, conversation("hello"), n=9, temp=0, ignore_eos=True)
    answer = ask(stop=[ask().finish().text[4:6]]).finish()
    assert answer.ended_by == "stop"
    turns = conversation("hello", answer.text, "more")
    text = lambda ids: session.tokenizer.decode(ids).replace(" ", "")
    assert text(session.render(turns).ids) == text(session.tokenizer.apply_chat_template(turns))


def test_a_closed_answer_goes_on_as_it_was_shown(tiny):
    """Without the tokens of what was held back when it was closed."""
    session = Session(tiny, dtype="fp32", device="cpu", chat_template="llama2")
    options = dict(n=9, temp=0, ignore_eos=True)
    whole = session.chat(conversation("hello"), **options).finish()
    shown, held_back = whole.text[:3], whole.text[3:6]
    answer = session.chat(conversation("hello"), stop=held_back + "@", **options)
    while len(session.tokenizer.decode(answer.ids)) < 6:
        next(answer)
    answer.close()
    assert answer.text == shown and answer.ended_by == "interrupt"
    turns = conversation("hello", answer.text, "more")
    text = lambda ids: session.tokenizer.decode(ids).replace(" ", "")
    assert text(session.render(turns).ids) == text(session.tokenizer.apply_chat_template(turns))


@pytest.mark.parametrize("bos, eos, first", [(1, 2, [1]), (-1, 2, [2]), (-1, -1, [])])
def test_an_empty_prompt_begins_with_one_token(bos, eos, first):
    tokenizer = SimpleNamespace(bos=bos, eos=eos, encode=lambda text, **_: [])
    assert Session.encode(SimpleNamespace(tokenizer=tokenizer), "") == first


def test_wrong_calls_say_what_is_wrong(tiny, tiny_session, tmp_path):
    model, generate = tiny_session.model, tiny_session.generate
    V, before = model.config.vocab_size, tiny_session.state.tokens.clone()
    loaded = partial(load, tiny, device="cpu")
    saved = partial(save, tiny, tmp_path / "new", device="cpu")
    opened = partial(Session, tiny, device="cpu")
    talk = Tokenizer(tiny).apply_chat_template
    forward = lambda prompt: model.forward(prompt, State(model))
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
        (opened, dict(threads=-1), "threads is -1; it must be 1 or more"),
        (opened, dict(lookup=2, draft=tiny), "lookup and draft both propose tokens"),
        (generate, dict(prompt="a " * 999), r"the text has \d+ tokens; the context holds 256"),
        (decode, dict(prompt=torch.tensor([1, 5])), no_list),
        (decode, dict(prompt="text"), no_list),
        (forward, dict(prompt="text"), no_list),
        (talk, dict(messages="hi"), "a conversation is a list of dicts"),
        (talk, dict(messages=[{"role": "user"}]), "a conversation is a list of dicts"),
        (talk, dict(messages=[]), "a conversation is a list of dicts"),
    ]
    for evaluate in (forward, decode, generate):
        for id in (-1, V, 1 << 40):
            said = f"the id {id}; the model's are 0 .. {V - 1}"
            wrong.append((evaluate, dict(prompt=[1, id, 5]), said))
        for prompt in (None, ["text", "more"], [[1, 5]]):
            wrong.append((evaluate, dict(prompt=prompt), no_list))
        wrong.append((evaluate, dict(prompt=[]), "is empty"))
    for call, arguments, said in wrong:
        with pytest.raises((TypeError, ValueError), match=said):
            call(**arguments)
    assert not [*tmp_path.iterdir()] and torch.equal(tiny_session.state.tokens, before)
    assert len(repr(model)) < 2000, "it prints weights"


@pytest.mark.parametrize("decode", ["on a CPU", "by lookup", "in graphs"])
def test_timings_are_not_the_callers(tiny_model, monkeypatch, decode):
    """On a GPU, which works while the caller does, steps take at least what its own clock says."""
    options = dict(n=5, eos=[], timings=Timings(), state=State(tiny_model))
    if "graphs" in decode:
        decode_in_graphs(monkeypatch, ms=itertools.repeat(9000.0))
    if "lookup" in decode:
        options["decode"] = Lookup(3).decode
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
    assert timings.steps == 8 and timings.step_seconds > before


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
    talk.session.end()
    assert talk.turns == []
    with pytest.raises(ValueError, match="there is no answer yet"):
        talk.again()


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
    tokenizer = Tokenizer(TALES)
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
    monkeypatch.setattr("logprobs.AT_ONCE", 3 * tiny_model.config.vocab_size)
    ids = tiny_session.tokenizer.encode("Once upon a time there was a fox")
    generation = tiny_session.generate(ids, n=0, logprobs=2, echo=True).finish()
    first, *scores = generation.logprobs
    assert (first.id, first.logprob) == (ids[0], None)
    assert [score.id for score in scores] == ids[1:]
    for row, score in zip(logits_of(tiny_model, ids).log_softmax(1), scores):
        assert score.logprob == pytest.approx(float(row[score.id]), abs=1e-3)
        assert [id for id, _ in score.best] == row.topk(2).indices.tolist()
