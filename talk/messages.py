"""Anthropic's Messages, as a translation to and from a chat."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import ConfigDict, Field, PrivateAttr, model_validator
from pydantic_core import to_json

from talk.openai import (
    INT_END,
    ChatCompletionRequest,
    ModelRequest,
    Strict,
    check_chat,
    must_be,
    with_one_system,
)
from talk.tools import Answer, Part

if TYPE_CHECKING:
    from prompts import Writer

KINDS = {"text": "text", "thought": "thinking", "call": "tool_use"}


class TextBlock(Strict):
    type: Literal["text"]
    text: str


Text = Annotated[str | list[TextBlock], must_be("a string, or a list of blocks of the type text")]


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


def text_of(content: Text | None) -> str:
    if isinstance(content, list):
        return "\n".join(block.text for block in content)
    return content or ""


class CountRequest(ModelRequest):
    """A request for the number of tokens of a chat. What it does not name is a field of chats."""

    model_config = ConfigDict(extra="allow")

    messages: list[Said] = Field(min_length=1)
    system: Text = ""
    tools: list[Tool] = []
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: dict = {}
    output_config: dict = {}
    _chat: ChatCompletionRequest = PrivateAttr()

    @model_validator(mode="after")
    def _translate(self) -> CountRequest:
        self._chat = check_chat({**(self.model_extra or {}), **self.chat_fields()})
        return self

    def chat_fields(self) -> dict:
        choices = {
            "any": "required",
            "tool": {"type": "function", "function": {"name": self.tool_choice.name}},
        }
        fields = {
            "messages": self.chat_messages(),
            # what is no function runs at Anthropic's
            "tools": [chat_tool(tool) for tool in self.tools if tool.type == "custom"],
            "tool_choice": choices.get(self.tool_choice.type, self.tool_choice.type),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
        }
        if self.thinking:
            fields["enable_thinking"] = self.thinking.get("type") != "disabled"
        fields["reasoning_effort"] = self.output_config.get("effort")
        if format := self.output_config.get("format"):
            fields["response_format"] = {"type": "json_schema", "json_schema": format}
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
            if calls := [chat_call(block) for block in blocks if block.type == "tool_use"]:
                message["tool_calls"] = calls
            messages.append(message)
        return with_one_system(messages)

    def answer(self, session: Writer, *_) -> Iterator[bytes]:
        return iter([to_json({"input_tokens": len(self._chat.prompt(session).ids)})])


class MessagesRequest(CountRequest):
    """A request for the next message of a chat."""

    max_tokens: Annotated[int, Field(ge=1, lt=INT_END)]
    stop_sequences: list[str] = []
    stream: bool = False

    def chat_fields(self) -> dict:
        more = {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        return super().chat_fields() | more

    @property
    def is_stream(self) -> bool:
        return self.stream

    def answer(self, session: Writer, model: str) -> Iterator[bytes]:
        answer = self._chat.choice(session, 0)
        self._texts = [answer.text]
        return self._parts(answer, Reply(model))

    def _parts(self, answer: Answer, reply: Reply) -> Iterator[bytes]:
        begun = False
        for parts, _ in answer:
            events = b""
            if not begun:  # with the first token, when it is known what was cached
                events = reply.begin(answer)
                begun = True
            for part in parts:
                events += reply.add(part)
            yield events if self.stream else b""
        events = b"" if begun else reply.begin(answer)
        events += reply.end(answer, self.stop_sequences)
        yield events if self.stream else to_json(reply.message)

    @staticmethod
    def error_event(body: dict) -> bytes:
        return event("error", **body)


def chat_tool(tool: Tool) -> dict:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def chat_call(block: Block) -> dict:
    function = {"name": block.name, "arguments": block.input}
    return {"id": block.id, "type": "function", "function": function}


class Reply:
    """A message as it grows, and the events that tell of it."""

    def __init__(self, model: str):
        self.message = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._open = ""  # the type of the block that is not complete

    def begin(self, answer: Answer) -> bytes:
        self.message["usage"] = usage(answer)
        return event("message_start", message=self.message) + event("ping")

    def add(self, part: Part) -> bytes:
        """Add a part, to the last block if it is of the same kind."""
        kind = KINDS[part.kind]
        blocks = self.message["content"]
        events = b""
        if kind != self._open or part.call:
            events = self._close()
            blank = {"type": kind, kind: ""}
            if part.call:
                blank = {"type": kind, "id": part.text, "name": part.call.name, "input": {}}
            if kind == "thinking":
                blank["signature"] = ""
            blocks.append(blank)
            events += event("content_block_start", index=len(blocks) - 1, content_block=blank)
            self._open = kind
        if part.call:
            blocks[-1]["input"] = json.loads(part.call.arguments)
            delta = {"type": "input_json_delta", "partial_json": part.call.arguments}
        else:
            blocks[-1][kind] += part.text
            delta = {"type": f"{kind}_delta", kind: part.text}
        return events + event("content_block_delta", index=len(blocks) - 1, delta=delta)

    def end(self, answer: Answer, stops: list[str]) -> bytes:
        text = answer.text
        reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
        ended = {"stop_reason": reasons[answer.finish_reason], "stop_sequence": None}
        if ended["stop_reason"] == "end_turn" and text.stop in stops:
            ended = {"stop_reason": "stop_sequence", "stop_sequence": text.stop}
        self.message |= ended
        self.message["usage"] = usage(answer)
        events = self._close()
        events += event("message_delta", delta=ended, usage=self.message["usage"])
        return events + event("message_stop")

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return event("content_block_stop", index=len(self.message["content"]) - 1)


def usage(answer: Answer) -> dict:
    text = answer.text
    return {
        "input_tokens": text.prompt_tokens - text.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": text.cached_tokens,
        "output_tokens": len(text.ids),
    }


def event(name: str, **fields) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), to_json({"type": name} | fields))
