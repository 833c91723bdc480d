"""OpenAI's Responses, as a translation to and from a chat: nothing is stored, so each request has
the whole conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import ConfigDict, PrivateAttr, model_validator
from pydantic_core import to_json

from talk.openai import (
    APIError,
    ChatCompletionRequest,
    ModelRequest,
    Strict,
    check_chat,
    with_one_system,
)
from talk.tools import Answer, Part

if TYPE_CHECKING:
    from prompts import Writer


class TextItemPart(Strict):
    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text"]
    text: str = ""


class Item(Strict):
    """A part of a conversation: a message, what was thought, a call, or what it returned."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: str = "assistant"
    content: str | list[TextItemPart] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[TextItemPart] = ""


def text_of(content: str | list[TextItemPart] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content or ""


class ResponsesRequest(ModelRequest):
    """A request for the next message of a chat. What it does not name is a field of chats."""

    model_config = ConfigDict(extra="allow")

    input: str | list[Item]
    instructions: str = ""
    tools: list[dict] = []
    tool_choice: str | dict = "auto"
    text: dict = {}
    reasoning: dict = {}
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    stream: bool = False
    _chat: ChatCompletionRequest = PrivateAttr()

    @model_validator(mode="after")
    def _translate(self) -> ResponsesRequest:
        if self.previous_response_id:
            message = "previous_response_id: nothing is stored here; send the whole conversation"
            raise APIError(message, param="previous_response_id")
        fields = {
            **(self.model_extra or {}),
            "messages": self.messages(),
            "tools": [chat_tool(tool) for tool in self.tools if tool.get("type") == "function"],
            "tool_choice": self.tool_choice,
            "max_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.get("effort"),
            "response_format": self.response_format(),
        }
        if isinstance(self.tool_choice, dict):
            function = {"name": self.tool_choice.get("name")}
            fields["tool_choice"] = {"type": self.tool_choice.get("type"), "function": function}
        self._chat = check_chat(fields)
        return self

    def messages(self) -> list[dict]:
        """The conversation, as messages of a chat. Calls belong to the message before them."""
        messages = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        items = self.input
        if isinstance(items, str):
            items = [Item(role="user", content=items)]
        thought = ""
        for item in items:
            match item.type:
                case "reasoning":
                    thought = text_of(item.content)
                    continue
                case "function_call_output":
                    said = {"role": "tool", "tool_call_id": item.call_id}
                    messages.append(said | {"content": text_of(item.output)})
                case "message":
                    messages.append({"role": item.role, "content": text_of(item.content)})
                case "function_call":
                    if not messages or messages[-1]["role"] != "assistant" or thought:
                        messages.append({"role": "assistant", "content": None})
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    messages[-1].setdefault("tool_calls", []).append(call)
            if thought and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = thought
            thought = ""
        return with_one_system(messages)

    def response_format(self) -> dict | None:
        match self.text.get("format"):
            case {"type": "json_schema", **format}:
                return {"type": "json_schema", "json_schema": format}
            case format:
                return format

    @property
    def is_stream(self) -> bool:
        return self.stream

    def answer(self, session: Writer, model: str) -> Iterator[bytes]:
        answer = self._chat.choice(session, 0)
        self._texts = [answer.text]
        return self._parts(answer, Response(self, model))

    def _parts(self, answer: Answer, response: Response) -> Iterator[bytes]:
        events = response.begin()
        for parts, _ in answer:
            for part in parts:
                events += response.add(part)
            yield events if self.stream and parts else b""
            if parts:
                events = b""
        events += response.end(answer)
        yield events if self.stream else to_json(response.head)


def chat_tool(tool: dict) -> dict:
    """A function as chats know it."""
    names = "name", "description", "parameters", "strict"
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


class Response:
    """A response as it grows, and the events that tell of it."""

    def __init__(self, request: ResponsesRequest, model: str):
        chat = request._chat
        self.head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions or None,
            "max_output_tokens": request.max_output_tokens,
            "model": model,
            "output": [],
            "parallel_tool_calls": chat.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": chat.reasoning_effort, "summary": None},
            "store": False,
            "temperature": chat.temp,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice,
            "tools": request.tools,
            "top_p": chat.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": {},
        }
        self._sent = 0
        self._kind = ""  # of the item that is not yet done

    def begin(self) -> bytes:
        created = self._event("response.created", response=self.head)
        return created + self._event("response.in_progress", response=self.head)

    def add(self, part: Part) -> bytes:
        """Add a part, to the last item if it is of the same kind."""
        events = b""
        if part.kind != self._kind or part.call:
            events = self._done() + self._open(part)
        if part.call:
            self._item["arguments"] = part.call.arguments
            events += self._of_item("function_call_arguments.delta", delta=part.call.arguments)
            return events + self._done()
        self._content["text"] += part.text
        more = {"logprobs": []} if part.kind == "text" else {}
        name = "output_text" if part.kind == "text" else "reasoning_text"
        return events + self._of_item(f"{name}.delta", content_index=0, delta=part.text, **more)

    def end(self, answer: Answer) -> bytes:
        events = self._done()
        text = answer.text
        reason = answer.finish_reason
        self.head["status"] = "incomplete" if reason == "length" else "completed"
        if reason == "length":
            self.head["incomplete_details"] = {"reason": "max_output_tokens"}
        self.head["usage"] = {
            "input_tokens": text.prompt_tokens,
            "input_tokens_details": {"cached_tokens": text.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": len(text.ids),
            "output_tokens_details": {"reasoning_tokens": answer.thought_tokens},
            "total_tokens": text.prompt_tokens + len(text.ids),
        }
        return events + self._event(f"response.{self.head['status']}", response=self.head)

    @property
    def _item(self) -> dict:
        return self.head["output"][-1]

    @property
    def _content(self) -> dict:
        return self._item["content"][0]

    def _open(self, part: Part) -> bytes:
        id = uuid.uuid4().hex
        self._kind = part.kind
        match part.kind:
            case "call":
                item = {"type": "function_call", "id": f"fc_{id}", "call_id": part.text}
                item |= {"name": part.call.name, "arguments": ""}
                content = None
            case "text":
                item = {"type": "message", "id": f"msg_{id}", "role": "assistant", "content": []}
                content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            case _:
                item = {"type": "reasoning", "id": f"rs_{id}", "summary": [], "content": []}
                content = {"type": "reasoning_text", "text": ""}
        item["status"] = "in_progress"
        self.head["output"].append(item)
        events = self._of_item("output_item.added", item=item)
        if content:
            events += self._of_item("content_part.added", content_index=0, part=content)
            item["content"].append(content)
        return events

    def _done(self) -> bytes:
        """The last item is complete."""
        kind = self._kind
        self._kind = ""
        if not kind:
            return b""
        item = self._item
        item["status"] = "completed"
        match kind:
            case "call":
                said = {"arguments": item["arguments"], "name": item["name"]}
                events = self._of_item("function_call_arguments.done", **said)
            case "text":
                said = {"text": self._content["text"], "logprobs": []}
                events = self._of_item("output_text.done", content_index=0, **said)
            case _:
                said = {"text": self._content["text"]}
                events = self._of_item("reasoning_text.done", content_index=0, **said)
        if kind != "call":
            events += self._of_item("content_part.done", content_index=0, part=self._content)
        return events + self._of_item("output_item.done", item=item)

    def _of_item(self, name: str, /, **fields) -> bytes:
        if not name.startswith("output_item"):
            fields["item_id"] = self._item["id"]
        index = len(self.head["output"]) - 1
        return self._event(f"response.{name}", output_index=index, **fields)

    def _event(self, name: str, /, **fields) -> bytes:
        event = {"type": name, "sequence_number": self._sent, **fields}
        self._sent += 1
        return b"event: %s\ndata: %s\n\n" % (name.encode(), to_json(event))
