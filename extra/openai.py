"""The words of OpenAI's API: what a request asks for, and how its text is answered.

Fields that would change the text in ways that do not exist here are refused, unless they say
nothing (n: 1, tools: []); null means absent; unknown fields are ignored."""

from __future__ import annotations

import json
import random
import time
import uuid
from dataclasses import dataclass
from typing import NamedTuple

from extra.files import one_line

# ---- requests


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid", param: str = ""):
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = dict(message=one_line(message), type=kind, code=code, param=param or None)
        self.body = {"error": error}


STOP = "stop"  # in the place of an Ask: the client has gone


@dataclass
class Ask:
    """The text that a client asks for."""

    is_chat: bool
    prompt: str | list[int] | list[dict]  # messages if it is a chat
    options: dict  # of Session.generate
    echo: bool  # the prompt comes before the text
    stream: bool
    counts: bool  # at the end of a stream


# what a field may be: in words, and whether it is


def whole(low: int, high: int = (1 << 31) - 1) -> tuple:
    is_right = lambda value: type(value) is int and low <= value <= high
    return f"a whole number from {low} to {high}", is_right


def real(low: float, high: float) -> tuple:
    is_right = lambda value: type(value) in (int, float) and low <= value <= high
    return f"a number from {low} to {high}", is_right


def only(*values) -> tuple:
    """For what would change the text in a way that does not exist here, were it another value."""
    is_right = lambda value: type(value) is not bool and value in values
    return f"absent or {values[0]!r}: nothing else is supported", is_right


def is_text(value: object) -> bool:
    return isinstance(value, str)


def is_stop(stop: object) -> bool:
    stops = stop if isinstance(stop, list) else [stop]
    return len(stops) <= 32 and all(isinstance(s, str) and len(s) <= 1000 for s in stops)


def is_prompt(prompt: object) -> bool:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        return is_prompt(prompt[0])
    is_ids = isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt)
    return isinstance(prompt, str) or is_ids


FLAG = "true or false", lambda value: type(value) is bool
OBJECT = "an object", lambda value: isinstance(value, dict)
FIELDS = dict(
    model=("a string", is_text),  # there is one, whatever its name
    max_tokens=whole(-1), max_completion_tokens=whole(-1),
    temperature=real(0, 1e9), top_p=real(0, 1), top_k=whole(0), min_p=real(0, 1),
    repeat_penalty=real(0.01, 100), repeat_last_n=whole(-1), seed=whole(-1, (1 << 63) - 1),
    stop=("a string, or up to 32, of at most 1000 characters", is_stop), ignore_eos=FLAG,
    stream=FLAG, stream_options=OBJECT,
    n=only(1), best_of=only(1), presence_penalty=only(0), frequency_penalty=only(0),
    logit_bias=only({}), tools=only([]), tool_choice=only("none", "auto"), functions=only([]),
    function_call=only("none", "auto"), response_format=only({"type": "text"}),
    suffix=only(""), grammar=only(""), json_schema=only({}),
)  # fmt: skip
CHAT = FIELDS | dict(logprobs=FLAG, top_logprobs=whole(0, 20))
CHAT |= dict(messages=("a list of messages", lambda value: isinstance(value, list) and value))
TEXT = FIELDS | dict(logprobs=whole(0, 20), echo=FLAG)
TEXT |= dict(prompt=("one string, or one list of ids", is_prompt))
SETTINGS = {"temperature": "temp", "max_tokens": "n", "max_completion_tokens": "n"}
SETTINGS |= {name: name for name in "top_p top_k min_p repeat_penalty repeat_last_n seed".split()}
ROLES = dict(system="system", developer="system", user="user", assistant="assistant")


def read_fields(body: bytes, table: dict) -> dict:
    """The fields of a request's body that are in the table. Raises Refused."""
    try:
        found = json.loads(body.decode())
        json.dumps(found, ensure_ascii=False).encode()  # not possible with a lone surrogate
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(found, dict):
        raise Refused("the body must be an object of JSON")
    fields = {name: found[name] for name in table if found.get(name) is not None}
    for name, value in fields.items():
        what, is_right = table[name]
        if not is_right(value):
            raise Refused(f"{name} must be {what}", param=name)
    return fields


def is_text_part(part: object) -> bool:
    if not isinstance(part, dict) or part.get("type") != "text":
        return False
    return isinstance(part.get("text"), str)


def read_message(message: object, name: str) -> dict:
    """A message of a chat with its content as one text. Raises Refused."""
    if not isinstance(message, dict) or message.get("role") not in [*ROLES]:
        raise Refused(f"{name} must have a role: {', '.join(ROLES)}", param=name)
    if message.get("tool_calls"):
        raise Refused(f"{name} calls tools, but there are none", param=name)
    parts = message.get("content")
    if isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    texts = []
    if isinstance(parts, list):
        texts = [part.get("text") for part in parts if is_text_part(part)]
    if not texts or len(texts) < len(parts):
        raise Refused(f"{name}.content must be a string or a list of text parts", param=name)
    return {"role": ROLES[message["role"]], "content": "\n".join(texts)}


def read_logprobs(fields: dict, is_chat: bool) -> int | None:
    """How many of the most probable tokens are to be told at each place. None if nothing is."""
    if not is_chat:
        return fields.get("logprobs")
    best = fields.get("top_logprobs", 0)
    if fields.get("logprobs"):
        return best
    if best:
        raise Refused("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


def read_prompt(fields: dict, is_chat: bool) -> str | list[int] | list[dict]:
    source = "messages" if is_chat else "prompt"
    if source not in fields:
        raise Refused(f"{source} is missing", param=source)
    prompt = fields[source]
    if is_chat:
        return [read_message(message, f"messages[{i}]") for i, message in enumerate(prompt)]
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        return prompt[0]  # a list of one prompt
    return prompt


def read_ask(body: bytes, is_chat: bool) -> Ask:
    """The text that a request's body asks for. Raises Refused."""
    fields = read_fields(body, CHAT if is_chat else TEXT)
    prompt = read_prompt(fields, is_chat)
    options = {SETTINGS[name]: value for name, value in fields.items() if name in SETTINGS}
    if options.get("seed", -1) < 0:
        options["seed"] = random.SystemRandom().randrange(1 << 32)
    stop = fields.get("stop", [])
    if isinstance(stop, str):
        stop = [stop]
    logprobs = read_logprobs(fields, is_chat)
    options |= dict(stop=stop, logprobs=logprobs, ignore_eos=fields.get("ignore_eos", False))
    echo = fields.get("echo", False)
    if echo and logprobs is not None:
        raise Refused("echo must be absent if there are logprobs: a prompt has none", param="echo")
    stream = fields.get("stream", False)
    counts = stream and bool(fields.get("stream_options", {}).get("include_usage"))
    return Ask(is_chat, prompt, options, echo, stream, counts)


# ---- answers


class Token(NamedTuple):
    text: str  # of a control token, its name
    bytes: bytes
    logprob: float


class Score(NamedTuple):
    """What a token's log-probability was."""

    token: Token
    best: list[Token]  # the most probable tokens at its place
    begins: int  # the character of the text at which it begins


class Part(NamedTuple):
    """What was written since the part before."""

    text: str
    scores: list[Score]


class End(NamedTuple):
    """The end of a text."""

    reason: str  # "stop" or "length"
    prompt_tokens: int
    cached_tokens: int  # those of the prompt that were evaluated before
    new_tokens: int

    def usage(self) -> dict:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Form:
    """How one text is answered: whole, or in the chunks of a stream."""

    def __init__(self, ask: Ask, model: str):
        self.ask = ask
        kind = "chat.completion" if ask.is_chat else "text_completion"
        if ask.is_chat and ask.stream:
            kind += ".chunk"
        prefix = "chatcmpl-" if ask.is_chat else "cmpl-"
        self.head = {"id": prefix + uuid.uuid4().hex, "object": kind, "created": int(time.time())}
        self.head["model"] = model

    def whole(self, parts: list[Part], end: End) -> dict:
        text = "".join(part.text for part in parts)
        scores = [score for part in parts for score in part.scores]
        choice = self._choice(Part(text, scores), end.reason)
        if self.ask.is_chat:
            choice["message"] = {"role": "assistant", "content": choice.pop("text")}
        return self.head | {"choices": [choice], "usage": end.usage()}

    def begin(self) -> bytes:
        """The beginning of a stream."""
        if self.ask.is_chat:
            return self._chunk({"role": "assistant", "content": ""}, Part("", []))
        return b""

    def chunks(self, event: Part | End | Refused) -> bytes:
        """A part of a stream, or its end."""
        if isinstance(event, Refused):
            return in_stream(event.body)
        if isinstance(event, Part):
            if not event.text and not event.scores:
                return b""
            return self._chunk({"content": event.text}, event)
        end = self._chunk({}, Part("", []), event.reason)
        if self.ask.counts:
            end += in_stream(self.head | {"choices": [], "usage": event.usage()})
        return end + b"data: [DONE]\n\n"

    def _chunk(self, delta: dict, part: Part, reason: str | None = None) -> bytes:
        choice = self._choice(part, reason)
        if self.ask.is_chat:
            del choice["text"]
            choice["delta"] = delta
        chunk = self.head | {"choices": [choice]}
        if self.ask.counts:
            chunk["usage"] = None
        return in_stream(chunk)

    def _choice(self, part: Part, reason: str | None) -> dict:
        logprobs = None
        if part.scores and self.ask.is_chat:
            logprobs = {"content": [chat_score(score) for score in part.scores]}
        elif part.scores:
            logprobs = text_scores(part.scores)
        return {"index": 0, "text": part.text, "logprobs": logprobs, "finish_reason": reason}


def chat_score(score: Score) -> dict:
    def of(token: Token) -> dict:
        return {"token": token.text, "logprob": token.logprob, "bytes": [*token.bytes]}

    return of(score.token) | {"top_logprobs": [of(token) for token in score.best]}


def text_scores(scores: list[Score]) -> dict:
    best = [{token.text: token.logprob for token in [*score.best, score.token]} for score in scores]
    return {
        "tokens": [score.token.text for score in scores],
        "token_logprobs": [score.token.logprob for score in scores],
        "top_logprobs": best if any(score.best for score in scores) else None,
        "text_offset": [score.begins for score in scores],
    }


def in_stream(value: dict) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
