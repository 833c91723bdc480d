"""Tests of serve.py: a real server, asked as clients do."""

import asyncio
import http.client
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest

import serve
from loading.checkpoint import open_tokenizer
from model import Llama
from session import Session
from talk import cli as cli_module
from talk.openai import UNSUPPORTED, APIError, ChatCompletionRequest, CompletionRequest
from tests.helpers import (
    CHATS,
    FOX,
    PATIENCE,
    TALES,
    TEXTS_AT,
    Server,
    assert_refused,
    caller,
    conversation,
    fails,
    free_port,
)


def test_serve_writes_what_run_py_writes(server, cli):
    flags = ("-m", TALES, "-n", 12, "-s", 7, "--top-p", 0.9, "--quiet")
    sampled = dict(temperature=0.8, top_p=0.9, seed=7)
    text = server.complete(**sampled)["text"]
    plain = cli(*flags, "-p", "Once upon a time", "--temp", 0.8, "--no-display-prompt")
    assert plain == (0, text + "\n", "")
    message = server.chat(**sampled)["message"]
    said = cli(*flags, "--chat", "-p", FOX[0]["content"], "--temp", 0.8)[1]
    assert said == message["content"] + "\n" and message["role"] == "assistant"
    texts = [server.complete(temperature=1.5, seed=seed)["text"] for seed in (0, 0, None, -1, 1)]
    assert texts[0] == texts[1] and len({*texts}) == 4, "a seed, also 0, is random unless given"


def test_serve_counts_and_reuses(server):
    """After an answer all but its last token is in the cache, and so is a prompt that was the one
    before."""
    turns, cached = [*FOX], None
    for _ in range(3):
        answer = server.chat(turns)
        usage = answer["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + 12
        assert usage["completion_tokens"] == 12 and answer["finish_reason"] == "length"
        assert cached in (None, usage["prompt_tokens_details"]["cached_tokens"])
        cached = usage["total_tokens"] - 1
        turns += [answer["message"], {"role": "user", "content": "And then?"}]
    ids = open_tokenizer(TALES).encode("Once upon a time")
    assert server.complete(max_tokens=0)["text"] == ""
    usage = server.complete()["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (len(ids), len(ids) + 12)
    assert usage["prompt_tokens_details"] == {"cached_tokens": len(ids)}
    text = server.complete()["text"]
    assert server.complete(echo=True)["text"] == "Once upon a time" + text
    assert server.complete(ids, echo=True)["text"] == "Once upon a time" + text
    full = server.complete([1] * 1020, max_tokens=-1, ignore_eos=True)
    assert (full["usage"]["completion_tokens"], full["finish_reason"]) == (4, "length")


def test_serve_streams_the_same_text(server):
    chunks = server.stream(CHATS, messages=FOX)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    said = "".join(choice["delta"].get("content", "") for choice in choices)
    assert said == server.chat()["message"]["content"]
    heads = {(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks}
    assert heads == {(chunks[0]["id"], "chat.completion.chunk", "tales")}
    assert [choice["finish_reason"] for choice in choices] == [None] * 13 + ["length"]
    counting = dict(prompt="Once", stream_options={"include_usage": True})
    *_, end, usage = server.stream(TEXTS_AT, **counting)
    assert end["usage"] is None and usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    whole = server.complete()["text"]
    word = whole.split()[3]
    for stop in word, ["@", word]:
        answer = server.complete(stop=stop)
        assert answer["text"] == whole[: whole.index(word)] and answer["finish_reason"] == "stop"
    answer = server.begin(body=dict(prompt="Once", stream=True, max_tokens=200)).getresponse()
    times = [time.monotonic() for line in answer if line.startswith(b"data")]
    late = "parts of a stream come together at its end: send each when it is written"
    assert times[100] - times[0] > 0.2 * (times[-1] - times[0]) > 0, late


def test_serve_logprobs(server):
    plain = dict(repeat_penalty=1)  # so that the most probable token is chosen
    content = server.chat(**plain, logprobs=True, top_logprobs=2)["logprobs"]["content"]
    tokens = "".join(entry["token"] for entry in content)
    assert tokens == " " + server.chat(**plain)["message"]["content"]
    for entry in content:
        first = entry["top_logprobs"][0]
        assert bytes(entry["bytes"]).decode() == entry["token"] == first["token"], "greedy"
        assert entry["logprob"] == first["logprob"] and len(entry["top_logprobs"]) == 2
    told = server.complete(**plain, logprobs=1)["logprobs"]
    text = server.complete(**plain)["text"]
    assert len(told["tokens"]) == 12 and list(map(max, told["top_logprobs"])) == told["tokens"]
    for token, offset in zip(told["tokens"], told["text_offset"]):
        assert text[offset:].startswith(token)
    streamed = server.stream(TEXTS_AT, prompt="Once upon a time", logprobs=1, **plain)
    seen = [chunk["choices"][0]["logprobs"]["token_logprobs"][0] for chunk in streamed[:-1]]
    assert seen == pytest.approx(told["token_logprobs"], abs=0.1), "in bf16"
    echoed = server.complete(**plain, logprobs=1, echo=True)
    scores = echoed["logprobs"]
    assert echoed["text"] == "Once upon a time" + text and scores["tokens"][-12:] == told["tokens"]
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert scores["token_logprobs"][-12:] == pytest.approx(told["token_logprobs"], abs=0.1)
    for token, offset in list(zip(scores["tokens"], scores["text_offset"]))[2:]:
        assert echoed["text"][offset:].startswith(token)
    assert echoed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    marked = server.complete("</s>Once", logprobs=0, echo=True, max_tokens=1)
    assert marked["logprobs"]["tokens"][:2] == ["<s>", "</s>"], "a control token, as written"
    for token, offset in list(zip(*map(marked["logprobs"].get, ("tokens", "text_offset"))))[1:]:
        assert marked["text"][offset:].lstrip().startswith(token.strip())
    ids = [1, 300, 400, 500]
    scored = server.complete(ids, logprobs=0, echo=True, max_tokens=0)["logprobs"]
    assert len(scored["tokens"]) == len(ids) and scored["top_logprobs"] is None
    first, *streamed = server.stream("/v1/completions", prompt=ids, logprobs=1, echo=True)
    assert first["choices"][0]["logprobs"]["token_logprobs"] == scored["token_logprobs"]
    assert len(streamed) == 13
    told = server.complete(**plain, logprobs=0, stop=text.split()[2])["logprobs"]
    assert told["top_logprobs"] is None and len(told["tokens"]) < 5, "without the stop string's"


def test_serve_messages(server):
    parts = [{"type": "text", "text": FOX[0]["content"]}]
    same = server.chat()["message"]
    assert server.chat([{"role": "user", "content": parts}])["message"] == same
    for nothing in "", None, []:
        assert server.chat([*FOX, {"role": "assistant", "content": nothing}])["message"] == same
    begun = {"role": "assistant", "content": same["content"][:30]}
    rest = server.chat([*FOX, begun], max_tokens=4)["message"]["content"]
    assert (begun["content"] + rest).startswith(same["content"][:33])
    begun["content"] = same["content"][: same["content"].index(" ", 10) + 1]
    rest = server.chat([*FOX, begun], max_tokens=2)["message"]["content"]
    assert same["content"].startswith(begun["content"] + rest), "no second space"
    for role in "system", "developer":
        usage = server.chat([{"role": role, "content": "Be brief."}, *FOX])["usage"]
        assert usage["prompt_tokens"] > server.chat()["usage"]["prompt_tokens"] + 3


def test_serve_several_choices(server):
    """The first has the request's seed, and streams have the same texts."""
    asks = dict(temperature=1.5, seed=5)
    [one] = server.complete(**asks)["choices"]
    whole = server.complete(**asks, n=3)
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts[0] == one["text"] and len({*texts}) == 3
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 36 == whole["timings"]["predicted_n"]
    counting = dict(prompt="Once upon a time", stream_options={"include_usage": True})
    *chunks, last = server.stream(TEXTS_AT, **counting, **asks, n=3)
    together = dict.fromkeys(range(3), "")
    for chunk in chunks:
        [choice] = chunk["choices"]
        together[choice["index"]] += choice["text"]
    assert [*together.values()] == texts and last["usage"]["completion_tokens"] == 36
    prompts = ["Once upon a time", "The fox", "Once upon a time"]
    several = server.complete(prompts, **asks, n=2)
    alone = [server.complete(prompt, **asks, n=2) for prompt in prompts]
    expected = [choice["text"] for answer in alone for choice in answer["choices"]]
    assert [choice["text"] for choice in several["choices"]] == expected
    total = sum(answer["usage"]["prompt_tokens"] for answer in alone)
    assert several["usage"]["prompt_tokens"] == total
    ids = open_tokenizer(TALES).encode("Once upon a time")
    [first, second] = server.complete([ids, ids], **asks)["choices"]
    assert first["text"] == second["text"] == one["text"]
    said = server.chat(**asks, n=2)["choices"]
    assert said[0]["message"] == server.chat(**asks)["message"] != said[1]["message"]


RECEIVERS = ["</s>", "[INST]", "Łódź"]
PROPERTIES = {"to": {"enum": RECEIVERS}, "n": {"type": "integer", "minimum": 0, "maximum": 99}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["to"]}
TOOL = {"type": "function", "function": {"name": "send", "parameters": PARAMETERS}}


def test_serve_what_the_text_has_to_be(server):
    """Of a call, too; talk/test_openai.py knows all names of the fields."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, "</s>"]}}, "required": ["a"]}
    text = server.complete(guided_json=schema, temperature=2)
    said = server.chat(guided_json=schema, temperature=2)
    for answer, content in (text, text["text"]), (said, said["message"]["content"]):
        assert json.loads(content) in ({"a": 1}, {"a": "</s>"})
        assert answer["finish_reason"] == "stop"
    for fields, pattern in (
        (dict(guided_regex=r"\d/[xy]"), r"\d/[xy]"), (dict(guided_choice=["no", "yes"]), "no|yes"),
        (dict(guided_grammar='start: "a" /b{1,3}/ "c"'), "ab{1,3}c"),
        (dict(grammar='root ::= "x" | "y"'), "x|y"),
        (dict(response_format={"type": "json_object"}), r"\{.*"),
    ):  # fmt: skip
        assert re.fullmatch(pattern, server.complete(**fields)["text"], re.DOTALL), fields
    for choice in "required", {"type": "function", "function": {"name": "send"}}:
        fields = dict(tools=[TOOL], tool_choice=choice, temperature=2, max_tokens=99)
        answer = server.chat(**fields)
        [call] = answer["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["to"] in RECEIVERS
        assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
    plain = server.chat()["message"]
    for choice in "auto", "none":
        assert server.chat(tools=[TOOL], tool_choice=choice)["message"] == plain


def test_serve_as_llama_cpp_does(server):
    asks = dict(prompt="Once upon a time", n_predict=12, temperature=0)
    text = server.complete()["text"]
    status, _, whole = server.ask("/completion", asks)
    assert (whole["content"], whole["stop_type"], whole["tokens_predicted"]) == (text, "limit", 12)

    def stream() -> list[dict]:
        answer = server.begin("/completion", asks | {"stream": True}).getresponse().read().decode()
        return [json.loads(line.removeprefix("data: ")) for line in answer.split("\n\n") if line]

    events = stream()
    assert "".join(event["content"] for event in events) == text
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert not any("completion_probabilities" in event for event in [whole, *events])
    asks |= {"n_probs": 2, "repeat_penalty": 1}
    whole = server.ask("/completion", asks)[2]
    told = whole["completion_probabilities"]
    assert "".join(token["token"] for token in told) == whole["content"]
    for token in told:
        best, second = token["top_logprobs"]
        assert token["logprob"] == best["logprob"] >= second["logprob"], "greedy"
        assert bytes(token["bytes"]).decode() == token["token"]
    events = stream()
    assert "".join(event["content"] for event in events) == whole["content"]
    streamed = [token for e in events for token in e.get("completion_probabilities", ())]
    assert [token["id"] for token in streamed] == [token["id"] for token in told]
    assert server.ask("/props", method="GET")[2]["default_generation_settings"] == {"n_ctx": 1024}
    [slot] = json.loads(server.begin("/slots", method="GET").getresponse().read())
    assert slot == {"id": 0, "n_ctx": 1024, "is_processing": False}


def test_serve_comments_in_a_silent_stream(monkeypatch):
    """They keep proxies from ending it; an error after one is an event."""
    monkeypatch.setattr(serve, "SILENCE", 0.01)

    async def bodies(kind, *parts: serve.Part) -> bytes:
        client = serve.Client(kind, 9)

        async def answer() -> None:
            for part in parts:
                await asyncio.sleep(0.05)
                client.parts.put_nowait(part)

        task = asyncio.create_task(answer())
        first = await serve.next_part(client)
        said = [body async for body in serve.bodies(first, client)]
        await task
        return b"".join(said)

    said = asyncio.run(bodies(CompletionRequest, serve.Part(b"a", last=False), serve.Part(b"b")))
    assert said.count(serve.COMMENT) > 2 and said.replace(serve.COMMENT, b"") == b"ab"
    said = asyncio.run(bodies(CompletionRequest, serve.Part(b'{"error": 5}', 400)))
    assert said.replace(serve.COMMENT, b"") == b'data: {"error":5}\n\n'


SAYS_NOTHING = dict(
    frequency_penalty=0.0, stop=None, max_tokens=None, stream=None, logprobs=None, model="any",
    stream_options={"include_usage": None}, user="me", unknown=[1], metadata={"a": "b"}, store=True,
    service_tier="auto", parallel_tool_calls=False, cache_prompt=True, dry_base=1.75, mirostat_tau=5,
)  # fmt: skip
AT_ITS_END = dict(  # the least and the most that a field may be, and whole numbers as floats
    max_tokens=[-1, 0, 2.0, (1 << 31) - 1], temperature=[0, 1e9], top_p=[0, 1], min_p=[0, 1],
    top_k=[-1, 0, 3.0, (1 << 31) - 1], repeat_penalty=[0.01, 100], repeat_last_n=[-1, 0, 2**31 - 1],
    seed=[-(1 << 63), -2, -1, 0, 5.0, 1 << 64], stop=["", [], ["a"] * 1024, "x" * 5000],
    ignore_eos=[True, False], logprobs=[False, True, 0, 20], n=[1.0], logit_bias=[[]],
    presence_penalty=[-2, 0, 2], frequency_penalty=[-2, 0.5, 2], min_tokens=[0, 1], stop_token_ids=[[], [5]],
)  # fmt: skip


def test_serve_accepts_what_says_nothing_and_the_ends_of_ranges(server):
    same = server.chat()["message"]
    nothing = SAYS_NOTHING | {name: values[0] for name, values in UNSUPPORTED.items()}
    nothing |= dict(max_completion_tokens=12)
    assert server.chat(**nothing)["message"] == same
    assert server.complete(**nothing)["text"] == server.complete()["text"]
    for name, value in [(name, value) for name, values in AT_ITS_END.items() for value in values]:
        fields = dict(max_tokens=2) if name != "max_tokens" else dict(stop=[" "])
        assert server.complete(**fields | {name: value})["usage"]["completion_tokens"] < 9, name
    assert server.ask(TEXTS_AT, dict(prompt="a", n_predict=3))[2]["usage"]["completion_tokens"] == 3
    for order in (
        ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        ["penalties", "tfs_z", "top-k", "typical_p", "nucleus", "min-p", "temp"], "edskypmxt",
    ):  # fmt: skip
        assert server.complete(samplers=order)["usage"]["completion_tokens"] == 12, order
    off = dict(repeat_penalty=1, presence_penalty=0, frequency_penalty=0, min_p=0)
    said = server.complete(seed=3, temperature=1, top_k=5, **off)["text"]
    for temperature in 0, 2:  # what an order leaves out is off
        more = dict(temperature=temperature, top_k=5, samplers=["top_k", "top_p", "infill"])
        assert server.complete(seed=3, **more)["text"] == said
    told = [server.complete(logprobs=k)["logprobs"] for k in (False, True)]
    assert told[0] is None and len(told[1]["top_logprobs"]) == 12
    sampled = [server.complete(temperature=1.5, seed=seed)["text"] for seed in (-2, -2, -3)]
    assert sampled[0] == sampled[1] != sampled[2]
    names = "repeat_penalty", "repetition_penalty"
    penalised = [server.complete(**{name: 2})["text"] for name in names]
    assert penalised[0] == penalised[1] != server.complete()["text"]


def test_serve_refusals(server):
    """In one line each; of fields that are wrong, talk/test_openai.py has a table."""
    too_long = r" 200\d tokens > 1023 maximum; it exceeds the available context size \(ctx_size\)$"
    turns = conversation("a", "b") * 100_000  # are not rendered, which takes long
    no_system = [*FOX, {"role": "system", "content": "Be brief."}]
    no_message = [{"role": "assistant", "content": " "}]
    plain = server.chat()["message"]
    for path, asked, status, code, said in (
        *((path, {}, 404, "not_found", f"there is no {path} here")
          for path in ("/v1/embeddings", "/rerank")),
        *((TEXTS_AT, body, 400, "invalid", ".") for body in (
            b"", b"{", b"[]", b"5", b"\xff\xfe{}", b"{}", b'{"prompt": "a\\ud800"}', b"9" * 5000,
            b'{"prompt": ' + b"[" * 200_000, dict(prompt=[1, 99999]),
            *(dict(prompt="a", max_tokens=1) | wrong for wrong in (
                dict(guided_regex="("), dict(grammar="root ::= ["), dict(guided_grammar="start: ["),
                dict(grammar='root ::= "a"{1000000000}'), dict(guided_choice=[]),
                dict(guided_json={"type": "x"}), dict(guided_json="{"), dict(guided_json={"not": {}}),
                dict(guided_json={"$ref": "http://127.0.0.1:1/"}),
                dict(guided_json={"enum": ["x" * 300_000]}),
                dict(guided_json={}, guided_regex="a"),
                dict(logit_bias={"4096": 1}), dict(stop_token_ids=[4096]),
            )),
        )),
        *((TEXTS_AT, dict(prompt=prompt), 400, "context_length_exceeded", too_long)
          for prompt in ("tale " * 2000, [1] * 2000)),
        ("/infill", dict(input_prefix="a", input_suffix="b"), 400, "invalid", "no marks"),
        ("/detokenize", dict(tokens=[5, 99999]), 400, "invalid", "there is no token 99999"),
        (CHATS, dict(messages=turns), 400, "context_length_exceeded", "too long: at least "),
        (CHATS, dict(messages=no_system), 400, "invalid", "no place for this system message"),
        (CHATS, dict(messages=no_message), 400, "invalid", "there is no message to answer"),
    ):  # fmt: skip
        start = time.monotonic()
        got, _, answer = server.ask(path, asked)
        assert time.monotonic() - start < 5
        error = answer["error"]
        assert (got, error["code"]) == (status, code), error
        assert re.search(said, error["message"]) and "\n" not in error["message"]
    error = server.ask(TEXTS_AT, dict(prompt="a", stop=5))[2]
    said = "stop: must be a string, or a list of at most 1024 strings"
    about = dict(message=said, type="invalid_request_error", code="invalid", param="stop")
    assert error == {"error": about, "type": "error"}
    assert server.chat()["message"] == plain


def test_serve_large_bodies(server):
    """A body may have 8 MiB, and not a byte more."""
    largest = b'{"prompt": "a", "max_tokens": 1}'.ljust(8 << 20)
    assert server.ask(TEXTS_AT, largest)[0] == 200
    in_chunks = (largest[i : i + 65536] for i in range(0, len(largest), 65536))
    assert server.begin(TEXTS_AT, in_chunks).getresponse().status == 200
    status, _, answer = server.ask(TEXTS_AT, largest + b" ")
    assert status == 413 and answer["error"]["code"] == "too_large"
    endless = (b" " * 65536 for _ in range(140))
    assert server.begin(TEXTS_AT, endless).getresponse().status == 413
    announced = server.connect()
    announced.putrequest("POST", TEXTS_AT)
    announced.putheader("Content-Length", 1 << 40)
    announced.endheaders()
    assert announced.getresponse().status == 413, "before it comes"


def test_serve_paths(server):
    model = {"id": "tales", "object": "model", "created": 0, "owned_by": "fused-llama"}
    model |= {"context_length": 1024, "max_model_len": 1024}
    origin = "http://localhost:3000"
    for method, path, status, expected in (
        ("GET", "/health", 200, {"status": "ok"}), ("GET", "/v1/models", 200, {"object": "list"}),
        ("GET", "/v1/health", 200, {"status": "ok"}), ("GET", "/models", 200, {"data": [model]}),
        ("GET", "/nothing", 404, {}), ("GET", "/v1/completions", 405, {}),
        ("DELETE", "/v1/models", 405, {}), ("HEAD", "/v1/models", 200, None),
        ("HEAD", "/v1/completions", 405, None), ("GET", "/v1/models/tales", 200, model),
        ("GET", "/v1/models/other", 404, {}), ("GET", "/models/a/b%7B", 404, {}),
        ("GET", "/v1/models/", 200, {"data": [model]}), ("GET", "//v1//models/tales/", 200, model),
        ("GET", "/v1", 404, {}), ("GET", "/v1/chat/completions/", 405, {}),
    ):  # fmt: skip
        got, headers, answer = server.ask(path, method=method, Origin=origin)
        assert (got, headers["access-control-allow-origin"]) == (status, origin), path
        if status >= 400 and answer:
            assert answer["error"].keys() >= {"message", "type", "code"}
        elif expected:
            assert expected.items() <= answer.items()
    fields = dict(messages=FOX, prompt="a", max_tokens=2)
    for path in "/chat/completions", "/completions", "/v1/completions/", "//v1/completions":
        assert server.ask(path, fields)[0] == 200, "as with /v1"
    connection = server.connect()
    connection.connect()
    socket_used = connection.sock
    for _ in range(3):
        connection.request("GET", "/v1/models")
        assert connection.getresponse().read() and connection.sock is socket_used, "kept alive"


def test_serve_tokens_of_a_text(server):
    """As llama.cpp's server tells them; nothing that is cached goes."""
    ids = open_tokenizer(TALES).encode("Once upon a time")
    used = server.complete(max_tokens=0)["usage"]
    for add_special in False, True:
        fields = dict(content="Once upon a time", add_special=add_special)
        told = server.ask("/tokenize", fields)[2]["tokens"]
        assert told == (ids if add_special else ids[1:])
        for path in "/detokenize", "/v1/detokenize":
            content = "<s> Once upon a time" if add_special else "Once upon a time"
            assert server.ask(path, {"tokens": told})[2] == {"content": content}
    cached = server.complete(max_tokens=0)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == used["prompt_tokens"]
    text, tokenizer = "</s>[é🐢", open_tokenizer(TALES)
    told = lambda **more: server.ask("/tokenize", dict(content=text) | more)[2]["tokens"]
    assert told(parse_special=False) == tokenizer.encode(text, bos=False)
    ids = tokenizer.encode(text, bos=False, parse_special=True)
    assert told() == ids and ids[0] == tokenizer.eos
    assert server.ask("/detokenize", {"tokens": ids})[2] == {"content": "</s> [é🐢"}
    pieces = told(with_pieces=True)
    assert [piece["id"] for piece in pieces] == ids and pieces[0]["piece"] == "</s>"
    raw = [p.encode() if isinstance(p, str) else bytes(p) for p in (p["piece"] for p in pieces)]
    assert b"".join(raw).decode() == "</s> [é🐢" and bytes([0xF0]) in raw


def test_serve_a_chat_as_the_model_reads_it(server):
    """Its ids by /tokenize are those of the prompt that a chat's answer counts."""
    for more in {}, {"stream": True}:
        status, _, answer = server.ask("/apply-template", dict(messages=FOX) | more)
        assert status == 200 and FOX[0]["content"] in answer["prompt"]
    told = server.ask("/tokenize", dict(content=answer["prompt"]))[2]["tokens"]
    used = server.ask(CHATS, dict(messages=FOX, max_tokens=1))[2]["usage"]
    assert used["prompt_tokens"] in (len(told), 1 + len(told)), "the first may be a bos"


def test_serve_origins_and_keys(server, tiny):
    asks = {"Access_Control_Request_Method": "POST"}
    asks["Access_Control_Request_Headers"] = "authorization,content-type"
    allowed = {
        "http://localhost": True, "https://127.0.0.1:5173": True, "https://example.org": True,
        "https://example.com": False, "http://localhost.evil": False, "null": False,
    }  # fmt: skip
    for origin, is_allowed in allowed.items():
        status, headers, _ = server.ask("/v1/models", method="OPTIONS", Origin=origin, **asks)
        assert (status == 200) == is_allowed
        status, headers, answer = server.ask(TEXTS_AT, b"{", Origin=origin)
        assert headers["access-control-allow-origin"] == (origin if is_allowed else None)
        refused = (403, "origin_not_allowed")  # and generates nothing
        expected = (400, "invalid") if is_allowed else refused
        assert (status, answer["error"]["code"]) == expected, origin
    local = dict(method="GET", Origin="http://localhost")
    with Server("-m", tiny, "--api-key", "żaba", "-np", 1, "--queue", 0) as keyed:
        for path in "/v1/models", "/nothing":
            for wrong in {}, {"Authorization": "Bearer x"}, {"Authorization": "żaba".encode()}:
                status, headers, answer = keyed.ask(path, **local, **wrong)
                assert answer["type"] == "error"
                assert answer["error"]["type"] == "authentication_error"
                assert status == 401 and answer["error"]["code"] == "invalid_api_key"
                assert headers["access-control-allow-origin"] == local["Origin"]
                assert headers["www-authenticate"] == "Bearer"
        for scheme in "bearer ", "BEARER  ", "Bearer ":
            key = dict(Authorization=f"{scheme}żaba".encode())
            assert keyed.ask("/v1/models/", method="GET", **key)[0] == 200
        assert keyed.ask("/v1/models", method="GET", x_api_key="żaba".encode())[0] == 200
        assert keyed.ask("/v1/models", method="GET", x_api_key="zaba")[0] == 401
        assert keyed.ask("/health", method="GET")[0] == 200
        preflight = asks | dict(Origin="http://localhost")
        assert keyed.ask("/v1/models", method="OPTIONS", **preflight)[0] == 200
        # of a queue of 0, one text is written and none waits
        with keyed.stopped():
            writing, refused = two_clients(keyed, **key)
            assert refused.getresponse().status == 503
        assert writing.getresponse().status == 200
        keyed.process.send_signal(signal.SIGINT)
        assert keyed.process.wait(PATIENCE) == 130


LONG = dict(prompt="Once upon a time", max_tokens=900, ignore_eos=True, temperature=0)


def two_clients(served: Server, **headers) -> list[http.client.HTTPConnection]:
    """Two clients ask at once; returns the one still waiting, then the one already answered."""
    clients = [served.begin(body=LONG, **headers) for _ in range(2)]
    [answered], _, _ = select.select([client.sock for client in clients], [], [], PATIENCE)
    return sorted(clients, key=lambda client: client.sock is answered)


def eventually(condition) -> bool:
    deadline = time.monotonic() + 20
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds


def test_serve_clients_that_leave_and_wait(server):
    """At most one waits; those who leave make way, also while they wait."""
    said = server.complete()["text"]
    short = dict(prompt="Once upon a time", max_tokens=12, temperature=0)
    running = server.begin(body=LONG | dict(stream=True))
    assert running.getresponse().readline().startswith(b"data")
    with server.stopped():
        waiting, refused = two_clients(server)
        answer = refused.getresponse()
        assert (answer.status, answer.headers["retry-after"]) == (503, "2")
        error = json.load(answer)["error"]
        assert error["code"] == "queue_full"
        assert error["message"] == "the server is busy, and its queue of 1 is full"
        assert server.ask("/health", method="GET")[0] == 200, "while a text is written"
        waiting.close()
        second = server.begin(body=short)

        def waits() -> bool:
            nonlocal second
            if not select.select([second.sock], [], [], 1)[0]:
                return True
            second = server.begin(body=short)
            return False

        assert eventually(waits), "the place of the client that has left"
    start = time.monotonic()
    running.close()
    assert json.loads(second.getresponse().read())["choices"][0]["text"] == said
    whole = server.begin(body=LONG)  # without a stream
    time.sleep(0.1)
    whole.close()
    truncated = server.connect()
    truncated.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
    truncated.sock.sendall(head)
    assert server.complete()["text"] == said
    assert time.monotonic() - start < 5, "and not the long texts"
    truncated.close()


def test_serve_ends_at_once():
    """In the middle of a text, and nobody takes what there is of it for the whole."""
    with Server("-m", TALES) as served:
        answer = served.begin(body=LONG | dict(stream=True)).getresponse()
        answer.readline()
        start = time.monotonic()
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(PATIENCE) == 130 and time.monotonic() - start < 1
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
        assert eventually(lambda: not served.reader.is_alive()), "no other process has its stderr"
        assert len(served.lines) == 4 and " on cpu, context " in served.lines[1]


def test_serve_ends_if_nobody_can_be_answered():
    with Server("-m", TALES) as served:
        front = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text()
        os.kill(int(front), signal.SIGKILL)
        assert served.process.wait(PATIENCE) == 1
    assert served.lines[3:] == ["error: the process that answers clients has ended\n"]


class BothProcesses:
    """Those of a server, in this one and without a network."""

    def __init__(self, folder: Path):
        self.session = Session(folder, dtype="fp32", device="cpu")
        args = serve.parse_args(["-m", str(folder), "--quiet"])
        self.desk = serve.Desk(self.session, SimpleNamespace(send=self.take))
        self.front = serve.Frontend(args, None, **serve.known_of(self.session, args))
        self.front.session.send = self.desk.inbox.put

    def take(self, news: list[serve.News]) -> None:
        for text in filter(None, map(self.front.session.take, news)):
            self.front.go_on(text.client)

    def answer(self, kind=CompletionRequest, **fields) -> list[serve.Part]:
        client = serve.Client(kind, 9)
        client.prepare(json.dumps(fields).encode(), self.front.session, "tiny")
        client.begin()
        self.desk.work()
        while self.desk.texts:
            self.desk.work()
        sent = [client.parts.get_nowait() for _ in range(client.parts.qsize())]
        assert [part.last for part in sent] == [False] * (len(sent) - 1) + [True]
        return sent


def test_serve_goes_on_after_an_error(tiny, monkeypatch, capfd):
    """Whoever asked is told, and of what was evaluated until then nothing is reused."""
    both = BothProcesses(tiny)

    def answer(**more) -> list[serve.Part]:
        fields = dict(prompt="Once upon a time", max_tokens=4, temperature=0, ignore_eos=True)
        return both.answer(**fields | more)

    [said] = answer()
    text = json.loads(said.body)["choices"][0]["text"]
    for kind in RuntimeError, ValueError, OSError:
        with monkeypatch.context() as patch:
            patch.setattr(Llama, "forward", fails(kind("broken")))
            begun, error = answer(stream=True, echo=True, prompt="The fox")
            assert begun.status == 200 and b"The fox" in begun.body
            assert both.session.engine.slots[0].tokens == []
            [same] = answer()
            for part in error, same:
                assert (part.status, json.loads(part.body)["error"]["code"]) == (500, "failed")
                assert json.loads(part.body)["error"]["message"] == "broken"
            assert capfd.readouterr().err == "error: broken\n" * 2
            patch.setattr(both.desk, "debug", True)
            answer()
            traceback = rf"(?s)Traceback .*\n{kind.__name__}: broken\n$"
            assert re.match(traceback, capfd.readouterr().err)
        assert json.loads(answer()[0].body)["choices"][0]["text"] == text and len(text) > 4
    with pytest.raises(APIError, match="exceeds the available context size") as refused:
        answer(prompt="tale " * 2000)
    assert refused.value.status_code == 400
    assert both.session.engine.slots[0].tokens, "what is cached stays"
    assert capfd.readouterr().err == ""


def test_serve_prepares_where_there_is_no_model(tiny, monkeypatch):
    """The process with the model renders nothing, and makes no ids."""
    both = BothProcesses(tiny)
    tokenizer = both.session.tokenizer
    for name in "encode", "chat_prompt", "decode":
        monkeypatch.setattr(tokenizer, name, fails(AssertionError(name)))
    fields = dict(messages=FOX, max_tokens=4, prompt="Once", json_schema={"type": "boolean"})
    for kind in ChatCompletionRequest, CompletionRequest:
        [said] = both.answer(kind, **fields)
        assert said.status == 200 and re.search(b'"(true|false)"', said.body)
    with pytest.raises(APIError, match="Invalid type: x"):
        both.answer(CompletionRequest, prompt="a", json_schema={"type": "x"})


def test_serve_several_texts_under_load(tiny):
    """Requests of many clients, a third of which leave midway: every text is what it is alone, no slot
    is lost, and a long prompt does not stop the others."""
    session = Session(tiny, dtype="fp32", device="cpu")
    words = "Once ", "The fox ", "good day "
    prompts = [word * count for word in words for count in (1, 5, 9)]
    alone = {p: session.generate(p, n=12, temp=0, ignore_eos=True).finish().text for p in prompts}
    options = dict(max_tokens=12, temperature=0, ignore_eos=True)
    with Server("-m", tiny, "--dtype", "fp32", "-np", 3, "--queue", 200) as served:
        rss = lambda: int(Path(f"/proc/{served.process.pid}/statm").read_text().split()[1]) * 4096

        def one(i: int) -> None:
            prompt = prompts[i % len(prompts)]
            if i % 3 == 0:
                client = served.begin(body=dict(prompt=prompt, max_tokens=200, stream=i % 2 == 0))
                time.sleep(i % 7 / 50)
                client.close()
            else:
                assert served.complete(prompt, **options)["text"] == alone[prompt], prompt

        def all_at_once(count: int) -> None:
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(one, range(count)))

        all_at_once(40)
        before = rss()
        all_at_once(160)
        assert rss() < before + 50e6, "what keeps requests that have ended?"
        # three texts at once: no slot is lost
        long = dict(max_tokens=200, ignore_eos=True, stream=True)
        texts = [served.begin(body=long | dict(prompt=prompt)) for prompt in prompts[:3]]
        assert all(text.getresponse().readline().startswith(b"data") for text in texts)


def test_serve_refuses_to_start(monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        call = caller(serve.main, monkeypatch, capfd, "--device", "cpu")
        result = call("--port", port)
        assert_refused(
            result,
            f"cannot listen on 127.0.0.1, port {port}: Address already in use; "
            "choose others with --host and --port\n",
        )
    args = serve.parse_args("--queue 10000 --port 65535 --temp 0.5".split())
    assert args.queue == 10_000 and cli_module.sampling_flags(args) == {"temp": 0.5}


def test_serve_on_all_addresses():
    """:: is IPv6's name for all of them, and IPv4's are among them; ::1 is one alone."""
    for host, reached in ("::", {"::1", "127.0.0.1"}), ("::1", {"::1"}), ("0.0.0.0", {"127.0.0.1"}):
        with serve.listen(host, 0) as listener:
            port = listener.getsockname()[1]
            for address in "::1", "127.0.0.1":
                with suppress(ConnectionRefusedError), socket.create_connection((address, port)):
                    assert address in reached
                    reached.remove(address)
            assert not reached, host


def test_serve_names_of_models(tmp_path, monkeypatch):
    """A file that is named by its content goes by the name inside it."""
    assert serve.model_name("models/tales", None) == "tales"
    assert serve.model_name("owner/name:Q8_0", None) == "owner/name:Q8_0"
    assert serve.model_name("models/tales", "mine") == "mine"
    monkeypatch.chdir(tmp_path)
    writer = gguf.GGUFWriter("blob", "llama")
    writer.add_name("Llama 3.2 1B")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    hashed = "sha256-" + "0123456789abcdef" * 4
    for name, known in ("x.gguf", "x.gguf"), (hashed, "Llama 3.2 1B"):
        shutil.copy("blob", name)
        (tmp_path / "model.gguf").unlink(missing_ok=True)
        (tmp_path / "model.gguf").symlink_to(name)
        assert serve.model_name(name, None) == known
        assert serve.model_name("model.gguf", None) == "model.gguf"


def test_serve_bounds_its_queue(tiny):
    """In bytes, too."""
    front = BothProcesses(tiny).front
    of_size = lambda size: serve.Client(CompletionRequest, size)
    half = serve.QUEUE_BYTES // 2
    front.clients.add(of_size(half))

    def refuses(size: int) -> bool:
        try:
            front.check_room(of_size(size))
        except APIError as error:
            assert (error.status_code, error.code) == (503, "queue_full")
            return True
        return False

    assert not refuses(half) and refuses(half + 1)
    front.clients.clear()  # its answer is written; one alone may be of any size
    assert not refuses(serve.QUEUE_BYTES)


def test_serve_without_descriptors():
    """One line says so, once; those who leave make room."""

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    with Server("-m", TALES, preexec_fn=few) as served:
        idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(150)]
        time.sleep(2.5)
        for connection in idle:
            connection.close()
        assert eventually(lambda: served.ask("/health", method="GET")[0] == 200)
    [said] = [line for line in served.lines[3:] if "/health" not in line]
    assert said == "note: socket.accept() out of system resource: Too many open files\n"


def test_serve_on_several_ranks():
    flags = f"-m torch.distributed.run --nproc-per-node 2 --master-port {free_port()}"
    with Server("-m", TALES, "--dtype", "fp32", launcher=[sys.executable, *flags.split()]) as ranks:
        text = ranks.complete()["text"]
        leaving = ranks.begin(body=LONG | dict(stream=True))
        leaving.getresponse().readline()
        leaving.close()
        assert ranks.complete()["text"] == text, "both stopped at the same token"
        assert ranks.ask(TEXTS_AT, dict(prompt="tale " * 2000))[0] == 400
        assert ranks.chat(temperature=1)["message"]["content"]
        ranks.process.send_signal(signal.SIGINT)  # torchrun ends its ranks, where a kill would not
        ranks.process.wait(PATIENCE)


def test_serve_as_the_openai_package_asks(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any")
    asks = dict(model="tales", messages=FOX, max_tokens=12, temperature=0)
    assert [model.id for model in client.models.list()] == ["tales"]
    assert client.models.retrieve("tales").id == "tales"
    whole = client.chat.completions.create(**asks, logprobs=True, top_logprobs=2).choices[0]
    assert whole.logprobs.content[0].top_logprobs[0].token == whole.logprobs.content[0].token
    chunks = client.chat.completions.create(**asks, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.message.content
    with pytest.raises(openai.BadRequestError, match="best_of must be absent or 1"):
        client.chat.completions.create(**asks, extra_body={"best_of": 2})
