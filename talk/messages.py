"""Anthropic's Messages, as a translation to and from a chat."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic_core import to_json

from talk.openai import (
    INT_END,
    Strict,
    TextPart,
    as_tool_call,
    event,
    must_be,
    read_arguments,
    text_of,
)
from talk.tools import Answer, Part
from talk.translated import Items, TranslatedRequest, as_tool, with_one_system

if TYPE_CHECKING:
    from prompts import Writer

Text = Annotated[str | list[TextPart], must_be("a string, or a list of blocks of the type text")]


class Block(Strict):
    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict = {}
    tool_use_id: str = ""
    content: Text | None = None


class Said(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        str | list[Block],
        must_be("a string, or a list of blocks of text, thinking, tool_use and tool_result"),
    ]


class Tool(Strict):
    type: str = "custom"
    name: str
    description: str = ""
    input_schema: dict = {}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Reply(Items):
    """A message as it grows, and the events that tell of it."""

    def __init__(self, *known):
        super().__init__(*known)
        self.message = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self) -> bytes:
        self.message["usage"] = usage(self.answer)
        return typed_event("message_start", message=self.message) + typed_event("ping")

    def open(self, part: Part) -> bytes:
        block = {
            "call": {"type": "tool_use", "id": part.text, "name": part.name, "input": {}},
            "text": {"type": "text", "text": ""},
            "thought": {"type": "thinking", "thinking": "", "signature": ""},
        }[part.kind]
        self.message["content"].append(block)
        return self._of_block("start", content_block=block)

    def extend(self, part: Part) -> bytes:
        if part.kind == "arguments":
            delta = {"type": "input_json_delta", "partial_json": part.text}
            return self._of_block("delta", delta=delta)
        block = self.message["content"][-1]
        block[block["type"]] += part.text
        delta = {"type": f"{block['type']}_delta", block["type"]: part.text}
        return self._of_block("delta", delta=delta)

    def done(self, kind: str, cut: bool) -> bytes:
        return self._of_block("stop")

    def end(self, index: int) -> bytes:
        text = self.answer.text
        reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
        ended = {"stop_reason": reasons[self.answer.finish_reason], "stop_sequence": None}
        if ended["stop_reason"] == "end_turn" and text.stop in self.request.stop_sequences:
            ended = {"stop_reason": "stop_sequence", "stop_sequence": text.stop}
        self.message |= ended
        self.message["usage"] = usage(self.answer)
        events = self.close()
        return events + typed_event("message_delta", delta=ended, usage=self.message["usage"])

    def finish(self) -> bytes:
        return typed_event("message_stop")

    def whole(self) -> dict:
        blocks = [each for each in self.message["content"] if each["type"] == "tool_use"]
        for block, call in zip(blocks, self.answer.calls):
            block["input"] = read_arguments(call.arguments)
        return self.message

    def _of_block(self, name: str, **fields) -> bytes:
        index = len(self.message["content"]) - 1
        return typed_event(f"content_block_{name}", index=index, **fields)


def usage(answer: Answer) -> dict:
    text = answer.text
    return {
        "input_tokens": text.prompt_tokens - text.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": text.cached_tokens,
        "output_tokens": len(text.ids),
    }


def typed_event(name: str, **fields) -> bytes:
    return event({"type": name} | fields)


class Conversation(TranslatedRequest):
    """What the two kinds of requests have in common."""

    messages: list[Said] = Field(min_length=1)
    system: Text = ""
    tools: list[Tool] = []
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: dict = {}
    output_config: dict = {}

    def chat_fields(self) -> dict:
        choices = {
            "any": "required",
            "tool": {"type": "function", "name": self.tool_choice.name},
        }
        fields = {
            "messages": self.chat_messages(),
            # what is no function runs at Anthropic's
            "tools": [
                as_tool(tool.name, tool.description, tool.input_schema)
                for tool in self.tools
                if tool.type == "custom"
            ],
            "tool_choice": choices.get(self.tool_choice.type, self.tool_choice.type),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
        }
        if self.thinking:
            fields["enable_thinking"] = self.thinking.get("type") != "disabled"
        fields["reasoning_effort"] = self.output_config.get("effort")
        fields["response_format"] = self.output_config.get("format")
        return fields

    def chat_messages(self) -> list[dict]:
        messages = []
        if system := text_of(self.system):
            messages.append({"role": "system", "content": system})
        for said in self.messages:
            blocks = said.content
            if isinstance(blocks, str):
                blocks = [Block(type="text", text=blocks)]
            results = [block for block in blocks if block.type == "tool_result"]
            for block in results:
                result = {"role": "tool", "tool_call_id": block.tool_use_id}
                messages.append(result | {"content": text_of(block.content)})
            texts = [block.text for block in blocks if block.type == "text"]
            if results and not texts:
                continue
            message = {"role": said.role, "content": "\n".join(texts)}
            if thought := "".join(block.thinking for block in blocks):
                message["reasoning_content"] = thought
            calls = [block for block in blocks if block.type == "tool_use"]
            if calls:
                message["tool_calls"] = [as_tool_call(c.id, c.name, c.input) for c in calls]
            messages.append(message)
        return with_one_system(messages)


class CountRequest(Conversation):
    """A request for the number of tokens of a chat."""

    def answer(self, session: Writer, *_) -> Iterator[bytes]:
        return iter([to_json({"input_tokens": len(self._chat.prompt(session).ids)})])


class MessagesRequest(Conversation):
    """A request for the next message of a chat."""

    account = Reply

    max_tokens: Annotated[int, Field(ge=1, lt=INT_END)]
    stop_sequences: list[str] = []

    def chat_fields(self) -> dict:
        more = {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        return super().chat_fields() | more
