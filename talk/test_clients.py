"""Tests with the packages of real clients, of a model that says what a test wants it to say."""

import json

import pydantic
import pytest

from talk.test_openai import (
    ASKED,
    CALL,
    MESSAGES,
    PARAMETERS,
    RESPONSES,
    TOOL,
    USER,
    Scripted,
    scripted,  # noqa: F401
)

TEXT = "<think>Hm.</think>I look.\n" + CALL


@pytest.fixture
def openai_client(scripted: Scripted):  # noqa: F811
    openai = pytest.importorskip("openai")
    return openai.OpenAI(
        base_url="http://x/v1", api_key="any", http_client=scripted.client(), max_retries=0
    )


@pytest.fixture
def anthropic_client(scripted: Scripted):  # noqa: F811
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(
        base_url="http://x", api_key="any", http_client=scripted.client(), max_retries=0
    )


class City(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=5)


def test_openai_chats(scripted, openai_client):  # noqa: F811
    asks = dict(model="tiny", **ASKED, tools=[TOOL])
    scripted.say(TEXT, TEXT)
    whole = openai_client.chat.completions.create(**asks).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content == "I look."
    assert whole.message.reasoning_content == "Hm."
    with openai_client.chat.completions.stream(**asks) as stream:
        final = stream.get_final_completion().choices[0]
    for choice in whole, final:
        [call] = choice.message.tool_calls
        assert choice.message.content == "I look." and call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Łódź"}
    parsed = openai_client.chat.completions.parse(model="tiny", **ASKED, response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)


FLAT = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}


def test_openai_responses(scripted, openai_client):  # noqa: F811
    asks = dict(model="tiny", input="Weather?", instructions="Be brief.")
    asks |= dict(tools=[FLAT, {"type": "web_search"}])
    scripted.say(TEXT, TEXT, "Fine.")
    whole = openai_client.responses.create(**asks)
    with openai_client.responses.stream(**asks) as stream:
        events = [*stream]
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[0].response.status == "in_progress" and events[-1].type == "response.completed"
    for response in whole, final:
        thought, said, call = response.output
        assert thought.type == "reasoning" and thought.content[0].text == "Hm."
        assert response.output_text == said.content[0].text == "I look."
        assert json.loads(call.arguments) == {"city": "Łódź"} and call.id != call.call_id
        assert response.status == "completed" and response.usage.total_tokens > 9
        used = response.usage
        assert 0 < used.output_tokens_details.reasoning_tokens < used.output_tokens
    # what was put out comes back as it is
    again = [USER, *(item.to_dict() for item in whole.output)]
    again.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    assert openai_client.responses.create(**asks | {"input": again}).output_text == "Fine."
    assert "<think>Hm.</think>I look.<tool_call>" in scripted.prompts[-1]
    assert "tool\nrain" in scripted.prompts[-1] and "web_search" not in scripted.prompts[-1]
    developer = {"role": "developer", "content": "Be kind."}
    within = [developer, USER, developer | {"content": "Be short."}]
    scripted.say("Yes.")  # instructions in several places, as Codex has them
    openai_client.responses.create(**asks | {"input": within})
    for said in "system\nBe brief.\n\nBe kind.<|im_end|>", "user\nWeather?\n\nBe short.<|im_end|>":
        assert said in scripted.prompts[-1]
    parsed = openai_client.responses.parse(model="tiny", input="Where?", text_format=City)
    assert isinstance(parsed.output_parsed, City)


def test_responses_that_are_cut(scripted):  # noqa: F811
    scripted.say("a b c d", "a b c d")
    cut = dict(input="x", max_output_tokens=2)
    whole = scripted.object(RESPONSES, **cut)
    *_, last = scripted.events(RESPONSES, **cut)
    assert last["type"] == "response.incomplete"
    assert last["response"]["output"][0]["content"][0]["text"]
    for response in whole, last["response"]:
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}


CLAUDE_TOOL = {"name": "get_weather", "input_schema": PARAMETERS}


def test_anthropic_messages(scripted, anthropic_client):  # noqa: F811
    asks = dict(model="tiny", max_tokens=500, messages=[USER], tools=[CLAUDE_TOOL])
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    scripted.say(TEXT, TEXT, "Fine.")
    whole = anthropic_client.messages.create(**asks, system=system)
    with anthropic_client.messages.stream(**asks, system=system) as stream:
        final = stream.get_final_message()
    for message in whole, final:
        thought, said, call = message.content
        assert (thought.thinking, said.text) == ("Hm.", "I look.")
        assert call.name == "get_weather" and call.input == {"city": "Łódź"}
        assert message.stop_reason == "tool_use" and message.usage.output_tokens > 9
        counted = message.usage.input_tokens + message.usage.cache_read_input_tokens
        count = asks | {"system": system}
        del count["max_tokens"]
        assert anthropic_client.messages.count_tokens(**count).input_tokens == counted
    result = {"type": "tool_result", "tool_use_id": call.id}
    result |= {"content": [{"type": "text", "text": "rain"}]}
    again = [
        USER, {"role": "assistant", "content": [block.to_dict() for block in whole.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]  # fmt: skip
    said = anthropic_client.messages.create(**asks | {"messages": again})
    assert said.content[0].text == "Fine." and said.stop_reason == "end_turn"
    prompt = scripted.prompts[-1]
    assert "<think>Hm.</think>I look.<tool_call>" in prompt
    assert prompt.index("tool\nrain") < prompt.index("And now?")
    within = [USER, {"role": "system", "content": "Be kind."}]  # as Claude Code does
    scripted.say("Yes.")
    anthropic_client.messages.create(**asks | {"messages": within})
    assert "user\nWeather?\n\nBe kind.<|im_end|>" in scripted.prompts[-1]
    scripted.say("a b STOP c")
    stopped = anthropic_client.messages.create(**asks, stop_sequences=["x", "STOP"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")


def test_messages_that_are_cut(scripted):  # noqa: F811
    scripted.say("a b c d", "a b c d", TEXT + TEXT, "Hm. ")
    cut = dict(messages=[USER], max_tokens=2)
    assert scripted.object(MESSAGES, **cut)["stop_reason"] == "max_tokens"
    events = scripted.events(MESSAGES, **cut)
    assert events[0]["type"] == "message_start"
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    one = dict(type="auto", disable_parallel_tool_use=True)
    tools = [CLAUDE_TOOL, {"type": "web_search_1", "name": "w"}]
    asks = dict(messages=[USER], max_tokens=500, tools=tools)
    blocks = scripted.object(MESSAGES, **asks, tool_choice=one)["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    thinks = scripted.object(MESSAGES, **asks, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block["type"] for block in thinks["content"]] == ["thinking"]
