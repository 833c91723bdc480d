"""Tests of calls and of thinking, as models write them."""

import json
import random
import time

import pytest
from hypothesis import strategies as st

from talk.tools import CODER, HERMES, LLAMA, MISTRAL, STYLES, Call, Router
from tests.helpers import examples

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
TOOLS = {"get_weather": WEATHER, "write": {"properties": {"text": {"type": ["string", "null"]}}}}


def read(style, *pieces: str, thinks: bool = False) -> tuple[str, str, list[Call]]:
    """What is thought, what is said, and the calls."""
    router = Router(style, TOOLS, thinks)
    parts = [part for piece in pieces for part in router.push(piece)] + router.finish()
    text_of = lambda kind: "".join(part.text for part in parts if part.kind == kind)
    calls = []
    for part in parts:
        if part.kind == "call":
            calls.append(Call(part.name, ""))
        elif part.kind == "arguments":
            calls[-1] = Call(calls[-1].name, calls[-1].arguments + part.text)
    return text_of("thought"), text_of("text"), calls


def call(name: str = "get_weather", **arguments) -> Call:
    return Call(name, json.dumps(arguments, ensure_ascii=False))


PARIS = call(city="Paris")
TEXTS = [  # style, text, what is thought, what is said, the calls
    # Hermes, Qwen2.5, Qwen3
    (HERMES, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
     "", "", [PARIS]),
    (HERMES, 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
     '<tool_call>\n{"name": "write", "arguments": {"text": "</tool_call> \\u00e9"}}\n</tool_call>\nDone. ',
     "", "I look.Done. ", [PARIS, Call("write", r'{"text": "</tool_call> \u00e9"}')]),
    (HERMES, '<think>\nHm, <tool_call>?\n</think>\n\n<tool_call>{"name": "get_weather", "arguments": '
     '{"city": "Paris"}}',
     "Hm, <tool_call>?", "", [PARIS]),  # never closed
    (HERMES, '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
     "", "", [PARIS]),
    (HERMES, '<tool_call>{"arguments": null, "name": "now"}</tool_call>', "", "", [call("now")]),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", "", [call("now")]),
    (HERMES, '<tool_call>{"name": "write", "arguments": {"text": "a\nb"}}</tool_call>',
     "", "", [call("write", text="a\nb")]),
    (HERMES, '<tool_call>{"arguments": {"text": "a\nb"}, "name": "write"}</tool_call>',
     "", "", [call("write", text="a\nb")]),
    # what is no call is text
    (HERMES, '<tool_call>{"name": "Anna", "arguments": {"city": "Pa', "",
     '<tool_call>{"name": "Anna", "arguments": {"city": "Pa', []),
    (HERMES, '<tool_call>{"name": 5}</tool_call> x', "", '<tool_call>{"name": 5}</tool_call> x', []),
    (HERMES, '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "",
     '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', []),
    (HERMES, "a <tool_call> is a mark, <tool_ca too <", "", "a <tool_call> is a mark, <tool_ca too <", []),
    (HERMES, '<tool_call>{oops}</tool_call><tool_call>{"name": "now"}</tool_call>', "",
     "<tool_call>{oops}</tool_call>", [call("now")]),
    (HERMES, '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "",
     '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', []),
    (HERMES, '<tool_call>{"name": "\\ud800"}</tool_call>', "", '<tool_call>{"name": "\\ud800"}</tool_call>', []),
    (HERMES, '{"name": "get_weather", "arguments": {}}', "", '{"name": "get_weather", "arguments": {}}', []),
    (HERMES, "<tool_call>" + "[" * 20_000, "", "<tool_call>" + "[" * 20_000, []),
    # what has begun as a call of a known tool is one
    (HERMES, '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa', "", "",
     [Call("get_weather", '{"city": "Pa')]),
    (HERMES, '<tool_call>{"name": "get_weather", "arguments": {oops}, "id": "x"}</tool_call> Done.', "", "Done.",
     [Call("get_weather", "{oops}")]),
    (HERMES, '<tool_call>{"name": "get_weather", "arguments": {"city": [}</tool_call> Done.', "", "Done.",
     [Call("get_weather", '{"city": [}')]),
    # Qwen3-Coder
    (CODER, "<tool_call>\n<function=get_weather>"
     "\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
     "</function>\n</tool_call>", "", "", [call(city="Paris", days=3)]),
    (CODER, "Now:\n\n<tool_call>"
     "\n<function=write>\n<parameter=text>\nif a < b:\n  <x> </parameter> </function>\n</parameter>\n"
     "</function>\n</tool_call>", "", "Now:", [call("write", text="if a < b:\n  <x> </parameter> </function>")]),
    (CODER, "<function=write>"
     "\n<parameter=text>\n12\n</parameter>\n<parameter=new>\n[1, {}]\n</parameter>\n</function>", "", "",
     [call("write", text=12, new=[1, {}])]),
    (CODER, "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", "", [call("now")]),
    (CODER, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", "", [PARIS]),
    (CODER, "<function=get_weather>\n<parameter=city>\n3 </parameter>", "", "", [Call("get_weather", "{")]),
    (CODER, "<function=f>\n<parameter=city>\n3 </parameter>", "", "<function=f>\n<parameter=city>\n3 </parameter>", []),
    # Llama 3
    (LLAMA, '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", "", [PARIS]),
    (LLAMA, '\n<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
     "", "", [PARIS]),
    (LLAMA, '{"name": "Anna", "parameters": {}}', "", '{"name": "Anna", "parameters": {}}', []),
    (LLAMA, 'An object: {"name": "get_weather", "parameters": {}}',
     "", 'An object: {"name": "get_weather", "parameters": {}}', []),
    (LLAMA, "{x} and {y}", "", "{x} and {y}", []),
    (LLAMA, '<|python_tag|>brave_search.call(query="x")', "", '<|python_tag|>brave_search.call(query="x")', []),
    # Mistral
    (MISTRAL, '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", '
     '"arguments": {}}]',
     "", "", [PARIS, call("now")]),
    (MISTRAL, '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}', "", "", [PARIS, call("now")]),
    (MISTRAL, 'Yes.[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{"city": "Paris"}', "", "Yes.", [PARIS]),
    (MISTRAL, '[TOOL_CALLS]get_weather{"city": "Paris"}', "", "", [PARIS]),
    (MISTRAL, "[TOOL_CALLS] [1]", "", "[TOOL_CALLS] [1]", []),
    (MISTRAL, "[TOOL_CALLS]get_weather[ARGS]{", "", "", [Call("get_weather", "{")]),
    (MISTRAL, "[TOOL_CALLS]f[ARGS]{", "", "[TOOL_CALLS]f[ARGS]{", []),
    # thinking
    (None, "<think>\nHm.\n</think>\n\nYes: <think> </think> are marks. ",
     "Hm.", "Yes: <think> </think> are marks. ", []),
    (None, "\n<think>Hm", "Hm", "", []),
    (None, "<thin ice", "", "<thin ice", []),
    (None, " \n", "", " \n", []),
    (None, "A <think>b</think>", "", "A <think>b</think>", []),
    (HERMES, "<think></think>Yes.\n", "", "Yes.\n", []),
]  # fmt: skip


@pytest.mark.parametrize("style, text, thought, said, calls", TEXTS)
def test_a_text_is_read_alike_however_it_comes(style, text, thought, said, calls):
    assert read(style, text) == (thought, said, calls)
    places = range(len(text)) if len(text) < 1000 else [5, 11, 12, 9000]
    for cut in places:
        assert read(style, text[:cut], text[cut:]) == (thought, said, calls), cut
    if len(text) < 1000:
        assert read(style, *text) == (thought, said, calls)


def test_arguments_come_as_they_are_written():
    text = '<tool_call>{"name": "write", "arguments": {"text": "a\nb \\" {}"}}</tool_call>'
    router = Router(HERMES, TOOLS)
    parts = [part for char in text for part in router.push(char)]
    assert [part.kind for part in parts] == ["call", *["arguments"] * 21, "called"]
    assert json.loads("".join(part.text for part in parts[1:-1])) == {"text": 'a\nb " {}'}
    text = "<function=write><parameter=text>\na\n</parameter><parameter=n>1</parameter></function>"
    router = Router(CODER, TOOLS)
    said = [part.text for char in text for part in router.push(char) if part.kind == "arguments"]
    assert "".join(said) == '{"text": "a", "n": 1}' and len(said) >= 3


def test_a_long_file_is_not_read_again_for_each_token():
    text = "<function=write><parameter=text>\n" + "    if a < b:\n        f(x)\n" * 2000
    router = Router(CODER, TOOLS)
    start = time.process_time()
    for i in range(0, len(text), 4):
        router.push(text[i : i + 4])
    assert time.process_time() - start < 3, "seconds"


def test_other_calls_come_when_they_are_complete():
    for style, text in (
        (HERMES, '<tool_call>{"name": "f"}'), (CODER, "<function=f>\n</function>"),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f"}]'), (LLAMA, '{"parameters": {}, "name": "write"}'),
    ):  # fmt: skip
        router = Router(style, TOOLS)
        kinds = [part.kind for char in text for part in router.push(char)]
        assert kinds == ["call", "arguments", "called"], "before anything follows"


def test_what_the_template_opens_is_thought():
    for text in "Hm.\n</think>\n\nYes.", "\nHm. </think>Yes.":
        assert read(None, *text, thinks=True) == ("Hm.", "Yes.", [])
    assert read(HERMES, *"Hm </thin", thinks=True) == ("Hm </thin", "", [])
    called = 'a<tool_call>{"name": "now"}</tool_call></think>b'
    assert read(HERMES, *called, thinks=True)[1:] == ("b", [])


MARKS = [
    "<tool_call>", "</tool_call>", "<function=get_weather>", "</function>", "<parameter=city>", "</parameter>",
    "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>",
    '{"name": "now", ', '"arguments": {}', "}", "[", "]",
    '"', "\\", " ", "\n", "x", "é", "{",
]  # fmt: skip


@examples(300, words=st.lists(st.sampled_from(MARKS), max_size=12), seed=st.integers())
def test_nothing_that_a_model_writes_is_lost(words, seed):
    """Or raises, in whatever pieces it comes; where there is no call, it is text."""
    text = "".join(words)
    chance = random.Random(seed)
    cuts = sorted(chance.randrange(len(text) + 1) for _ in range(5))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    for style in [*STYLES, None]:
        whole = read(style, text)
        assert read(style, *pieces) == whole
        thought, said, calls = whole
        if not thought and not calls and not text.lstrip().startswith("<think>"):
            assert said == text
