"""What APIs have in common that are translated to and from OpenAI's chats: their requests are chats in
other words, and their answers are items, each of them thought, said, or a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import ConfigDict, PrivateAttr, model_validator

from talk.openai import Account, ChatCompletionRequest, TextRequest, checked
from talk.tools import Answer, Part

if TYPE_CHECKING:
    from prompts import Writer
    from texts import Logprob


class TranslatedRequest(TextRequest):
    """A request in the words of another API, as a chat. What it does not name is a field of chats."""

    model_config = ConfigDict(extra="allow")
    _chat: ChatCompletionRequest = PrivateAttr()

    @model_validator(mode="after")
    def _translate(self) -> TranslatedRequest:
        # one answer, which has no place for log-probabilities
        fixed = {"n": 1, "logprobs": None, "top_logprobs": None}
        fields = self.model_extra | self.chat_fields() | fixed
        self._chat = checked(fields, ChatCompletionRequest)
        return self

    def chat_fields(self) -> dict:
        """The fields of a chat; None means absent."""
        raise NotImplementedError

    def choices(self, session: Writer) -> list[Answer]:
        return self._chat.choices(session)


class Items(Account):
    """An answer as it grows by parts, each of which belongs to the last item or begins one."""

    def __init__(self, *known):
        super().__init__(*known)
        [self.answer] = self.answers
        self._kind = ""  # of the item that is not complete: that of its first part

    def add(self, index: int, parts: list[Part], logprobs: Sequence[Logprob]) -> bytes:
        return b"".join(map(self._add, parts))

    def _add(self, part: Part) -> bytes:
        if part.kind == "called":
            return self.close()
        events = b""
        if part.kind == "call" or part.kind not in (self._kind, "arguments"):
            events = self.close() + self.open(part)
            self._kind = part.kind
        return events if part.kind == "call" else events + self.extend(part)

    def close(self, cut: bool = False) -> bytes:
        """The last item, if there is one that is open, is complete or cut."""
        events = self.done(self._kind, cut) if self._kind else b""
        self._kind = ""
        return events

    def open(self, part: Part) -> bytes:
        """Begin an item, without the text of the part unless it is a call."""
        raise NotImplementedError

    def extend(self, part: Part) -> bytes:
        """Add what is thought or said, or arguments of a call, to the last item."""
        raise NotImplementedError

    def done(self, kind: str, cut: bool) -> bytes:
        """The last item, of this kind, has ended."""
        raise NotImplementedError


def with_one_system(messages: list[dict]) -> list[dict]:
    """Messages as all chat templates take them, where agents put instructions between others: those
    at the beginning are one system message, and later ones part of the user's message."""
    settled: list[dict] = []
    for message in messages:
        if message["role"] not in ("system", "developer"):
            settled.append(message)
            continue
        begins = all(earlier["role"] == "system" for earlier in settled)
        role = "system" if begins else "user"
        if settled and settled[-1]["role"] == role:
            text = f"{settled[-1]['content']}\n\n{message['content']}"
            settled[-1] = settled[-1] | {"content": text}
        else:
            settled.append(message | {"role": role})
    return settled


def as_tool(name: str, description: str | None, parameters: dict | None) -> dict:
    """A tool as chats know it."""
    function = {"name": name, "description": description, "parameters": parameters}
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}
