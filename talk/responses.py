"""OpenAI's Responses, as a translation to and from a chat: nothing is stored, so each request has
the whole conversation."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Literal

from pydantic import Field

from talk.openai import APIError, Strict, as_tool_call, event, must_be, text_of
from talk.tools import Part
from talk.translated import Items, TranslatedRequest, as_tool, with_one_system


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


STORED = ("previous_response_id", "conversation", "prompt", "background")


class Response(Items):
    """A response as it grows, and the events that tell of it."""

    def __init__(self, *known):
        super().__init__(*known)
        request, chat = self.request, self.request._chat
        self.head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions or None,
            "max_output_tokens": request.max_output_tokens,
            "model": self.model,
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

    def begin(self) -> bytes:
        created = self._event("response.created", response=self.head)
        return created + self._event("response.in_progress", response=self.head)

    def end(self, index: int) -> bytes:
        text = self.answer.text
        cut = self.answer.finish_reason == "length"
        events = self.close(cut)
        self.head["status"] = "incomplete" if cut else "completed"
        if cut:
            self.head["incomplete_details"] = {"reason": "max_output_tokens"}
        self.head["usage"] = {
            "input_tokens": text.prompt_tokens,
            "input_tokens_details": {"cached_tokens": text.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": len(text.ids),
            "output_tokens_details": {"reasoning_tokens": self.answer.thought_tokens},
            "total_tokens": text.prompt_tokens + len(text.ids),
        }
        return events + self._event(f"response.{self.head['status']}", response=self.head)

    def whole(self) -> dict:
        return self.head

    @property
    def _item(self) -> dict:
        return self.head["output"][-1]

    @property
    def _content(self) -> dict:
        return self._item["content"][0]

    def open(self, part: Part) -> bytes:
        id = uuid.uuid4().hex
        match part.kind:
            case "call":
                item = {"type": "function_call", "id": f"fc_{id}", "call_id": part.text}
                item |= {"name": part.name, "arguments": ""}
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

    def extend(self, part: Part) -> bytes:
        if part.kind == "arguments":
            self._item["arguments"] += part.text
            return self._of_item("function_call_arguments.delta", delta=part.text)
        self._content["text"] += part.text
        return self._of_content("delta", delta=part.text)

    def done(self, kind: str, cut: bool) -> bytes:
        item = self._item
        item["status"] = "incomplete" if cut else "completed"
        if kind == "call":
            said = {"arguments": item["arguments"], "name": item["name"]}
            events = self._of_item("function_call_arguments.done", **said)
        else:
            events = self._of_content("done", text=self._content["text"])
            events += self._of_item("content_part.done", content_index=0, part=self._content)
        return events + self._of_item("output_item.done", item=item)

    def _of_content(self, name: str, /, **fields) -> bytes:
        if self._content["type"] == "output_text":
            fields["logprobs"] = []
        return self._of_item(f"{self._content['type']}.{name}", content_index=0, **fields)

    def _of_item(self, name: str, /, **fields) -> bytes:
        if not name.startswith("output_item"):
            fields["item_id"] = self._item["id"]
        index = len(self.head["output"]) - 1
        return self._event(f"response.{name}", output_index=index, **fields)

    def _event(self, name: str, /, **fields) -> bytes:
        self._sent += 1
        return event({"type": name, "sequence_number": self._sent - 1, **fields})


class ResponsesRequest(TranslatedRequest):
    """A request for the next message of a chat."""

    account = Response

    input: Annotated[
        str | Annotated[list[Item], Field(min_length=1)],
        must_be(
            "a string, or a list of messages of text, of reasoning, and of calls of functions with"
            " what they returned"
        ),
    ]
    instructions: str = ""
    tools: list[dict] = []
    tool_choice: str | dict = "auto"
    text: dict = {}
    reasoning: dict = {}
    max_output_tokens: int | None = None

    def chat_fields(self) -> dict:
        for name in STORED:
            if self.model_extra.get(name):
                message = f"{name}: nothing is stored here; send the whole conversation"
                raise APIError(message, param=name)
        functions = [tool for tool in self.tools if tool.get("type") == "function"]
        return {
            "messages": self.messages(),
            "tools": [
                as_tool(*map(tool.get, ("name", "description", "parameters"))) for tool in functions
            ],
            "tool_choice": self.tool_choice,
            "max_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.get("effort"),
            "response_format": self.text.get("format"),
        }

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
                    call = as_tool_call(item.call_id, item.name, item.arguments)
                    messages[-1].setdefault("tool_calls", []).append(call)
            if thought and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = thought
            thought = ""
        return with_one_system(messages)
