"""Tests of requests and answers with a model that says what a test wants it to say."""

import json
import re

import httpx2 as httpx
import pytest

import prompts as prompts_module
import talk.openai as openai_module
from grammars import choice_grammar, json_grammar, lark_grammar, regex_grammar
from session import Session
from talk.endpoints import ENDPOINTS
from talk.openai import UNSUPPORTED, APIError, ChatCompletionRequest, error_body, parse_request

# Qwen's: tools in the system message, calls in tags, thinking in others
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking %}{{ '<think>\\n' }}{% endif %}{% endif %}"""
CHATS, TEXTS = "/chat/completions", "/completions"
RESPONSES, MESSAGES = "/responses", "/messages"
USER = {"role": "user", "content": "Weather?"}
ASKED = {"messages": [USER]}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Łódź"}}\n</tool_call>'


class Scripted:
    """A server without a network, whose model says what it is told to."""

    def __init__(self, folder, template: str = TEMPLATE):
        file = folder / "template.jinja"
        file.write_text(template)
        options = dict(dtype="fp32", device="cpu", ctx_size=1024)
        self.session = Session(folder, chat_template=str(file), **options)
        self.sample = self.session.model.ops.sample
        self.prompts: list[str] = []

    def say(self, *texts: str) -> None:
        """Say these texts next, one for each request; then what the model says."""
        left = [*texts]
        tokenizer = self.session.tokenizer
        prompt: list[int] = []
        ids: list[int] = []

        def next_token(history: list[int]) -> int | None:
            nonlocal prompt, ids
            said = len(history) - len(prompt)
            if not (0 < said < len(ids) and history == prompt + ids[:said]):
                if not left:
                    return None
                self.prompts.append(tokenizer.decode(history))
                prompt, said = history, 0
                ids = tokenizer.encode(left.pop(0), bos=False) + [tokenizer.eos]
            return ids[said]

        def sample(logits, pass_) -> None:
            for place, position in zip(pass_.place.tolist(), pass_.position.tolist()):
                token = next_token(pass_.tokens[place - position : place + 1].tolist())
                if token is None:
                    self.sample(logits, pass_)
                    return
                pass_.tokens[place + 1] = pass_.drawn[place + 1] = token

        self.session.model.ops.sample = sample

    def ask(self, path: str, body: dict) -> bytes:
        """Raises APIError."""
        request = parse_request(json.dumps(body).encode(), ENDPOINTS[path])
        try:
            return b"".join(request.answer(self.session, "tiny"))
        except ValueError as error:
            raise APIError(str(error)) from None
        finally:
            for text in request.texts:
                text.close()

    def object(self, path: str, **body) -> dict:
        return json.loads(self.ask(path, body))

    def events(self, path: str, **body) -> list[dict]:
        answer = self.ask(path, body | {"stream": True}).decode()
        lines = [line for line in answer.splitlines() if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def client(self) -> httpx.Client:
        """What clients' packages ask instead of a network."""

        def answer(request: httpx.Request) -> httpx.Response:
            path = request.url.path.removeprefix("/v1")
            body = json.loads(request.content)
            try:
                content = self.ask(path, body)
            except APIError as error:
                return httpx.Response(error.status_code, json=error_body(error))
            kind = "text/event-stream" if body.get("stream") else "application/json"
            return httpx.Response(200, content=content, headers={"content-type": kind})

        return httpx.Client(transport=httpx.MockTransport(answer))


@pytest.fixture(scope="module")
def scripted(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted")
    for file in tiny.iterdir():
        (folder / file.name).symlink_to(file)
    return Scripted(folder)


def said(scripted, text: str, **body) -> tuple[dict, str]:
    """A message and why it ended, which are the same whole and streamed."""
    scripted.say(text, text)
    choice = scripted.object(CHATS, **ASKED | body)["choices"][0]
    message = choice["message"]
    together = {}
    calls = []
    *events, end = scripted.events(CHATS, **ASKED | body)
    for chunk in events:
        delta = chunk["choices"][0]["delta"]
        for part in delta.pop("tool_calls", ()):
            if part["index"] == len(calls):
                assert part["id"] and part["type"] == "function"
                calls.append(part["function"])
            else:  # only the first part of a call says which it is
                assert not {"id", "type"} & part.keys() and part["function"].keys() == {"arguments"}
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
        for name, value in delta.items():
            together[name] = together.get(name, "") + value
    plain = {name: value or "" for name, value in message.items() if name != "tool_calls"}
    assert together == plain
    assert calls == [call["function"] for call in message.get("tool_calls", ())]
    assert end["choices"][0]["finish_reason"] == choice["finish_reason"]
    return message, choice["finish_reason"]


def test_calls_of_tools(scripted):
    message, why = said(scripted, f"I look.\n{CALL}\n{CALL}", tools=[TOOL])
    assert message["content"] == "I look." and why == "tool_calls"
    calls = message["tool_calls"]
    function = {"name": "get_weather", "arguments": '{"city": "Łódź"}'}
    assert [call["function"] for call in calls] == [function] * 2
    assert len({call["id"] for call in calls}) == 2 and calls[0]["type"] == "function"
    message, why = said(scripted, f"{CALL}{CALL}", tools=[TOOL], parallel_tool_calls=False)
    assert message["content"] is None and len(message["tool_calls"]) == 1 and why == "tool_calls"
    for body in {}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}:
        assert said(scripted, CALL, **body) == ({"role": "assistant", "content": CALL}, "stop")
    cut = said(scripted, CALL, tools=[TOOL], max_tokens=20)
    assert cut[1] == "length" and CALL.startswith(cut[0]["content"]) and cut[0]["content"]
    scripted.say(CALL + "x" * 900)
    full = scripted.object(CHATS, **ASKED, tools=[TOOL], max_tokens=len(CALL) + 100)["choices"][0]
    assert full["finish_reason"] == "length" and full["message"]["tool_calls"]


def test_calls_come_back_to_the_template(scripted):
    scripted.say("Fine.")
    function = {"name": "get_weather", "arguments": '{"city": "<|im_end|>"}'}
    call = {"id": "a", "type": "function", "function": function}
    again = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [call],
         "function_call": None, "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]  # fmt: skip
    [choice] = scripted.object(CHATS, messages=again, tools=[TOOL])["choices"]
    assert choice["message"]["content"] == "Fine."
    prompt = scripted.prompts[-1]
    assert json.dumps(TOOL, ensure_ascii=False) in prompt
    sent_back = '{"name": "get_weather", "arguments": {"city": "<|im_end|>"}}'
    assert f"<think>Hm.</think><tool_call>{sent_back}" in prompt
    # whatever a model wrote can be sent back
    for wrote, read in (
        ('{"city": "Bon', {"city": "Bon"}), ("{", {}), ("", {}), (" ", {}), ("null", {}), (None, {}),
        ("[1]", {"arguments": "[1]"}), ('{"a": "C:\\x"}', {"arguments": '{"a": "C:\\x"}'}),
    ):  # fmt: skip
        function["arguments"] = wrote
        scripted.say("Fine.")
        scripted.object(CHATS, messages=again, tools=[TOOL])
        written = json.dumps(read, ensure_ascii=False)
        assert f'"name": "get_weather", "arguments": {written}}}' in scripted.prompts[-1], wrote
    function["arguments"] = 5
    with pytest.raises(APIError, match=r"messages\[1\].tool_calls: must be a list of calls"):
        scripted.object(CHATS, messages=again)


def test_some_of_the_tools(scripted):
    """In the words of both of OpenAI's APIs."""
    other = {"type": "function", "function": {"name": "other"}}
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    body = ASKED | dict(tools=[TOOL, other], tool_choice=choice)
    scripted.say(CALL)
    scripted.object(CHATS, **body)
    assert "get_weather" in scripted.prompts[-1] and '"other"' not in scripted.prompts[-1]
    choice["allowed_tools"]["mode"] = "required"
    assert ChatCompletionRequest(**body).forced().keys() == {"get_weather"}
    tools = [{"type": "function", "name": name} for name in ("get_weather", "other")]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": tools[:1]}
    scripted.say(CALL)
    scripted.object(RESPONSES, input="a", tools=tools, tool_choice=choice, top_logprobs=2)
    assert "get_weather" in scripted.prompts[-1] and '"other"' not in scripted.prompts[-1]
    choice["tools"] = [{"type": "function", "name": "another"}]
    with pytest.raises(APIError, match="there are no tools"):
        choice["mode"] = "required"
        scripted.object(RESPONSES, input="a", tools=tools, tool_choice=choice)


def test_null_means_absent(scripted):
    scripted.say("Fine.")
    tool = {"name": "a", "description": None, "input_schema": {"type": "object"}}
    choice = {"type": "auto", "disable_parallel_tool_use": None}
    body = dict(messages=ASKED["messages"], max_tokens=5, tools=[tool], tool_choice=choice)
    assert scripted.object(MESSAGES, **body)["type"] == "message"
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": None, "strict": None}}
    scripted.object(CHATS, **ASKED, response_format=format, max_tokens=2)
    with pytest.raises(APIError, match=r"tools\[0\].description: "):
        scripted.object(MESSAGES, **body | {"tools": [tool | {"description": 5}]})


def test_thinking(scripted):
    asked = {"chat_template_kwargs": {"enable_thinking": True}}
    for body in {"enable_thinking": True}, asked, asked | {"reasoning_effort": "none"}:
        message, why = said(scripted, "Hm.\n</think>\n\nYes.", **body)
        assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    message, why = said(scripted, "<think>Hm</think>" + CALL, tools=[TOOL], reasoning_effort="none")
    assert message["reasoning_content"] == "Hm"
    assert message["content"] is None and why == "tool_calls"
    asked = ChatCompletionRequest(**ASKED, reasoning_effort="none").variables()
    assert asked == {"reasoning_effort": "none", "enable_thinking": False}
    message, why = said(scripted, "Hm. Well", enable_thinking=True, max_tokens=4)
    assert not message["content"] and message["reasoning_content"] and why == "length"


def test_a_call_that_is_cut_before_its_arguments(scripted, monkeypatch):
    """Its mark is none of the text, where there has to be a call."""
    monkeypatch.setattr(openai_module, "call_grammar", lambda *_: None)
    cut = CALL[: CALL.index("weather")]
    for text, content in ((cut, ""), ("<tool", ""), (f"<think>a</think>{cut}", "")):
        message, _ = said(scripted, text, tools=[TOOL], tool_choice="required")
        assert message["content"] == content and "tool_calls" not in message
    message, _ = said(scripted, cut, tools=[TOOL])
    assert message["content"] == cut


def test_log_probabilities_of_a_call(scripted):
    """Of all its tokens, streamed as well as whole."""
    asked = ASKED | dict(tools=[TOOL], logprobs=True)
    scripted.say(CALL, CALL)
    whole = scripted.object(CHATS, **asked)["choices"][0]["logprobs"]["content"]
    streamed = []
    for event in scripted.events(CHATS, **asked):
        for choice in event["choices"]:
            streamed += (choice.get("logprobs") or {"content": []})["content"]
    assert [score["token"] for score in streamed] == [score["token"] for score in whole]


def test_infill(scripted, monkeypatch):
    """The marks are those of the vocabulary."""
    marks = {"<fim_prefix>": 5, "<fim_suffix>": 6, "<fim_middle>": 7}
    with monkeypatch.context() as patch:
        patch.setattr(scripted.session.tokenizer, "control", marks)
        prompts = []
        patch.setattr(prompts_module, "check_prompt", lambda ids, _: prompts.append(ids))
        scripted.say("x")
        body = dict(input_prefix="a ", input_suffix=" c", prompt="b")
        body |= dict(input_extra=[{"filename": "f", "text": "t"}])
        assert scripted.object("/infill", **body)["content"].strip() == "x"
        scripted.session.model.ops.sample = scripted.sample
        body |= dict(grammar='root ::= "yes"')
        said = scripted.object("/infill", **body, n_probs=2)
        told = said["completion_probabilities"]
        assert said["content"] == "".join(token["token"] for token in told) == "yes"
        assert [len(token["top_logprobs"]) for token in told] == [2] * len(told)
    decode = scripted.session.tokenizer.decode
    ids = prompts[0]
    before, after = ids[: ids.index(6)], ids[ids.index(6) :]
    assert decode(before[before.index(5) + 1 :]).strip() == "f\nt\n\na b"
    assert after[-1] == 7 and decode(after[1:-1]).strip() == "c"
    with pytest.raises(APIError, match="no marks"):
        scripted.object("/infill", input_prefix="a", input_suffix="b")


def test_infill_in_a_long_file(scripted, monkeypatch):
    """What is next to the gap counts; what else ends a text is not written into the file."""
    marks = {"<fim_prefix>": 5, "<fim_suffix>": 6, "<fim_middle>": 7, "<fim_pad>": 8}
    monkeypatch.setattr(scripted.session.tokenizer, "control", marks)
    prompts = []
    monkeypatch.setattr(prompts_module, "check_prompt", lambda ids, _: prompts.append(ids))
    scripted.say("x", "x")
    body = dict(input_prefix="ab " * 2000 + "yz", input_suffix="cd " * 2000, n_predict=100)
    body |= dict(samplers=["top_k", "top_p", "infill"], n_indent=4, t_max_predict_ms=250)
    said = scripted.object("/infill", **body, input_extra=[{"filename": None, "text": "t " * 999}])
    size = said["generation_settings"]["n_ctx"]
    (ids,) = prompts
    assert len(ids) == size - 100 and ids.index(7) == len(ids) - 1
    decode, at = scripted.session.tokenizer.decode, ids.index(6)
    assert decode(ids[:at]).endswith("yz") and decode(ids[at + 1 : -1]).strip().startswith("cd")
    assert 0.2 < (len(ids) - at) / len(ids) < 0.3
    body = dict(input_prefix="a", input_suffix="", logit_bias=[[8, 100]], n_predict=6)
    scripted.session.model.ops.sample = scripted.sample
    said = scripted.object("/infill", **body)
    assert said["stop_type"] != "limit" and said["tokens_predicted"] <= 1


# ---- what fields mean

COMPLETE = {  # what is asked where; null in place of a field means that it is absent
    CHATS: ASKED, TEXTS: {"prompt": "a"}, MESSAGES: ASKED | {"max_tokens": 1},
    RESPONSES: {"input": "x", "tools": [{"type": "function", "name": "a"}]},
    "/tokenize": {"content": "a"}, "/completion": {"prompt": "a"},
    "/detokenize": {"tokens": [1]}, "/apply-template": ASKED,
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "</s>"]}}}
LARK, GBNF = 'start: "a" /b/', 'root ::= "x" | "y"'
GRAMMARS = {  # how the session is told what the text has to be, and the fields that say it
    json_grammar(SCHEMA): [
        dict(guided_json=SCHEMA), dict(guided_json=json.dumps(SCHEMA)), dict(json_schema=SCHEMA),
        dict(response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
        dict(response_format={"type": "json_object", "schema": SCHEMA}),
        dict(structured_outputs={"json": SCHEMA}),
    ],
    json_grammar({"type": "object"}): [
        dict(response_format={"type": "json_object"}),
        dict(structured_outputs={"json_object": True}),
    ],
    regex_grammar("a/"): [dict(guided_regex="a/"), dict(structured_outputs={"regex": "a/"})],
    choice_grammar(["q"]): [dict(guided_choice=["q"]), dict(structured_outputs={"choice": ["q"]})],
    lark_grammar(LARK): [dict(guided_grammar=LARK), dict(structured_outputs={"grammar": LARK})],
    lark_grammar(GBNF): [dict(grammar=GBNF)],
    None: [{}, dict(response_format={"type": "text"})],
}  # fmt: skip


@pytest.mark.parametrize("path", [CHATS, TEXTS])
def test_what_a_text_has_to_be(path):
    body = lambda fields: json.dumps(COMPLETE[path] | fields).encode()
    read = lambda fields: parse_request(body(fields), ENDPOINTS[path])
    for grammar, ways in GRAMMARS.items():
        assert [read(fields).text_grammar() for fields in ways] == [grammar] * len(ways)
    with pytest.raises(ValueError, match="several fields say what the text has to be"):
        read(dict(guided_json=SCHEMA, guided_regex="a")).text_grammar()


# ---- what is refused

WRONG_FIELDS = dict(  # of chats as of texts
    model=[5], max_tokens=["5", 1.5, True, -2, 1 << 31], max_completion_tokens=[[]],
    temperature=["hot", -1, True, {}, 1.1e9, 10**400], top_p=[1.01, -0.01, "x"],
    top_k=[-2, 0.5, 1 << 31], min_p=[1.01, -0.01], repeat_penalty=[0.009, 100.1, "x"],
    repeat_last_n=[-2, 1 << 31], seed=["x", True, 0.5],
    stop=[5, [5], {}, ["a"] * 1025, [None]], stream=[1, "yes"],
    stream_options=[5, {"include_usage": 1}],
    temp=[-1], repetition_penalty=["x"], n=[0, 17, "x", True], presence_penalty=[2.1, -2.1, "x"],
    frequency_penalty=[2.1, -2.1], min_tokens=[-1, 0.5], stop_token_ids=[5, [-1], ["x"], [1 << 31]],
    logit_bias=[5, {"x": 1}, {"1": 101}, {"1": "x"}, [1], [[1]]], guided_json=[5], guided_regex=[5],
    guided_choice=[5, [5], []], guided_grammar=[5], json_schema=[5, "x"], grammar=[5, {}],
    response_format=[5, "json", {}, {"type": "xml"}, {"type": "json_schema"}], structured_outputs=[5],
    samplers=[["temperature", "penalties", "top_k", "top_p", "min_p"], 5, {}],
    **{name: [3, "x", [{}], {"x": 1}] for name in UNSUPPORTED},
)  # fmt: skip
ONE_IS_NEUTRAL = "best_of", "typical_p"  # true is 1 in Python, but not in JSON
NO_TOOLS = [
    {}, {"type": "custom"}, TOOL | {"function": {"name": 5}},
    TOOL | {"function": {"name": "a", "parameters": 5}},
    TOOL | {"function": {"name": "a", "parameters": {"type": "string"}}},
]  # fmt: skip
NO_MESSAGES = [
    "x", {}, {"role": "user"}, {"content": "x"}, USER | {"role": 5}, USER | {"role": "tool"},
    USER | {"content": 5}, USER | {"content": {}}, USER | {"content": ["x"]},
    USER | {"content": [{"type": "text"}]}, USER | {"content": [{"type": "image_url"}]},
    USER | {"tool_calls": [1]},
]  # fmt: skip
NO_ITEMS = [{"type": "computer_call"}, USER | {"content": [{"type": "input_image"}]}]
WRONG = {  # values that are refused, by path and field
    CHATS: WRONG_FIELDS | dict(
        logprobs=[1, "x"], top_logprobs=[21, -1, True, 1], parallel_tool_calls=["no"],
        chat_template_kwargs=[[]], tool_choice=["required", "sometimes", TOOL],
        tools=[5, *([tool] for tool in NO_TOOLS)],
        messages=[None, [], "x", {}, *([USER, message] for message in NO_MESSAGES)],
    ),
    TEXTS: WRONG_FIELDS | {name: [*WRONG_FIELDS[name], True] for name in ONE_IS_NEUTRAL} | dict(
        logprobs=["x", 21, -1], echo=[1],
        prompt=[None, 5, [], ["a", 1], ["a"] * 129, [[]], [1.5], {}, [True]],
    ),
    RESPONSES: dict(
        input=[None, 5, [], *([item] for item in NO_ITEMS)],
        previous_response_id=["resp_1"], conversation=["conv_1"], prompt=[{"id": "pmpt_1"}],
        background=[True], max_output_tokens=["x"], temperature=[-1], tools=[5],
        text=[{"format": 5}, {"format": {"type": "xml"}}],
        tool_choice=[{"type": "function", "name": "x"}],
    ),
    MESSAGES: dict(
        messages=[None, [], [USER | {"content": [{"type": "image"}]}]], max_tokens=[None, 0],
        tool_choice=[{"type": "tool", "name": "x"}, {"type": "any"}], tools=[[{}]],
        stop_sequences=[5], system=[5],
    ),
    "/tokenize": dict(content=[None, 5]), "/detokenize": dict(tokens=["a", [1.5]]),
    "/completion": dict(n_probs=[-1, 21], return_tokens=[True]),
    "/apply-template": dict(messages=[None]),
}  # fmt: skip
OTHER_NAMES = {"text": "response_format"}  # as chats call it


@pytest.mark.parametrize("path", WRONG)
def test_wrong_fields(scripted, path):
    """An error is about the field, or about an element of its list."""
    for name, values in WRONG[path].items():
        name_said = OTHER_NAMES.get(name, name)
        for value in values:
            with pytest.raises(APIError) as refused:
                scripted.ask(path, COMPLETE[path] | {name: value})
            error = refused.value
            where = rf"{name_said}(\[\d+\](\.\w+)?)?"
            assert (error.status_code, error.code) == (400, "invalid"), (name, value)
            assert re.fullmatch(where, error.param) and name_said in error.detail, (name, value)
            if name == "messages" and value and value[0] == USER and len(value) > 1:
                assert error.param.startswith("messages[1]"), value


@pytest.mark.parametrize("path, fields, said", [
    (CHATS, {"messages": [USER | {"content": [{"type": "image_url"}]}]},
     "messages[0].content: must be a string, or a list of parts of the type text: only text"),
    (CHATS, {"messages": [USER | {"tool_calls": [1]}]}, "must be a list of calls of functions"),
    (TEXTS, {"prompt": ["a", 1]},
     "prompt: must be a string or a list of ids, or a list of at most 128"),
    (TEXTS, {"prompt": "a", "logprobs": 21}, "logprobs: must be from 0 to 20, or true"),
])  # fmt: skip
def test_what_a_field_must_be(path, fields, said):
    """In words, without pydantic's own."""
    with pytest.raises(APIError) as refused:
        parse_request(json.dumps(fields).encode(), ENDPOINTS[path])
    assert said in refused.value.detail and "Input should be" not in refused.value.detail


def test_reading_ends_at_the_first_error():
    """Of lists with many wrong elements, and of each kind of list in a request."""
    for path, fields in (
        (CHATS, dict(messages=[1] * 1000)),
        (CHATS, dict(messages=[USER, *[USER | {"content": 5}] * 1000])),
        ("/detokenize", dict(tokens=["x"] * 1000)),
    ):
        with pytest.raises(APIError) as raised:
            parse_request(json.dumps(fields).encode(), ENDPOINTS[path])
        assert raised.value.__context__.error_count() == 1
    for kind in ENDPOINTS.values():
        schema = json.dumps(kind.__pydantic_core_schema__, default=str)
        assert schema.count('"type": "list"') == schema.count('"fail_fast": true')
