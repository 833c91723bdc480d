"""The words of OpenAI's API: what a request asks for, in terms of a session, and how the text is
answered.

Fields that would change the text in ways that do not exist here are refused, unless they say
nothing (n: 1, tools: []); null means absent; unknown fields are ignored."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizer import Tokenizer, one_line

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from session import Generation, Logprob, Piece, Session

# ---- requests


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid", param: str = ""):
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = dict(message=one_line(message), type=kind, code=code, param=param or None)
        self.body = {"error": error}


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


def read_message(message: object, name: str) -> dict:
    """A message of a chat with its content as one text. Raises Refused."""
    if not isinstance(message, dict) or message.get("role") not in [*ROLES]:
        raise Refused(f"{name} must have a role: {', '.join(ROLES)}", param=name)
    if message.get("tool_calls"):
        raise Refused(f"{name} calls tools, but there are none", param=name)
    parts = message.get("content")
    if isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    is_text = lambda part: isinstance(part, dict) and part.get("type") == "text"
    texts = [part.get("text") for part in parts if is_text(part)] if isinstance(parts, list) else []
    if not texts or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise Refused(f"{name}.content must be a string or a list of text parts", param=name)
    return {"role": ROLES[message["role"]], "content": "\n".join(texts)}


def read_ask(body: bytes, is_chat: bool) -> Ask:
    """The text that a request's body asks for. Raises Refused."""
    fields = read_fields(body, CHAT if is_chat else TEXT)
    source = "messages" if is_chat else "prompt"
    if source not in fields:
        raise Refused(f"{source} is missing", param=source)
    prompt = fields[source]
    if is_chat:
        prompt = [read_message(message, f"messages[{i}]") for i, message in enumerate(prompt)]
    elif isinstance(prompt, list) and not isinstance(prompt[0], int):
        prompt = prompt[0]
    logprobs = fields.get("logprobs")
    if is_chat:
        logprobs = fields.get("top_logprobs", 0) if logprobs else None
    echo = fields.get("echo", False)
    if echo and logprobs is not None:
        raise Refused("echo must be absent if there are logprobs: a prompt has none", param="echo")
    stop = fields.get("stop", [])
    options = {SETTINGS[name]: value for name, value in fields.items() if name in SETTINGS}
    if options.get("seed", -1) < 0:
        options["seed"] = random.SystemRandom().randrange(1 << 32)
    options |= dict(stop=[stop] if isinstance(stop, str) else stop, logprobs=logprobs)
    options |= dict(ignore_eos=fields.get("ignore_eos", False))
    stream = fields.get("stream", False)
    counts = stream and bool(fields.get("stream_options", {}).get("include_usage"))
    return Ask(is_chat, prompt, options, echo, stream, counts)


def begin_text(session: Session, ask: Ask, progress: Callable) -> tuple[Generation, str]:
    """The text that is asked for, of which nothing is evaluated yet, and what comes before it.
    Raises Refused or ValueError."""
    prompt = ask.prompt
    before = ""
    if ask.is_chat:
        prompt = session.render(ask.prompt)
        for message in ask.prompt:
            if message["role"] == "system" and message["content"].strip() not in prompt.text:
                raise Refused("the chat template has no place for this system message")
        ids = prompt.ids
    else:
        ids = session.encode(prompt) if isinstance(prompt, str) else prompt
    if ask.echo:
        before = prompt if isinstance(prompt, str) else session.tokenizer.decode(ids)
    needed = len(ids)
    if ask.options.get("n") != 0:
        needed += 1
    if needed > session.state.size:
        message = f"the prompt has {len(ids)} tokens; the context holds {session.state.size}"
        raise Refused(message, code="context_length_exceeded")
    if ask.is_chat:
        return session.chat(prompt, progress=progress, **ask.options), before
    at_start = prompt == ""
    return session.generate(ids, at_start=at_start, progress=progress, **ask.options), before


# ---- answers

ENDS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


class Form:
    """How one text is answered: whole, or in the chunks of a stream."""

    def __init__(self, ask: Ask, model: str, tokenizer: Tokenizer, generation: Generation):
        self.ask = ask
        self.generation = generation
        self.tokenizer = tokenizer
        self.names = {id: name for name, id in tokenizer.control.items()}
        kind = "chat.completion" if ask.is_chat else "text_completion"
        if ask.is_chat and ask.stream:
            kind += ".chunk"
        prefix = "chatcmpl-" if ask.is_chat else "cmpl-"
        self.head = {"id": prefix + uuid.uuid4().hex, "object": kind, "created": int(time.time())}
        self.head["model"] = model

    def whole(self, before: str) -> dict:
        text = self.generation
        choice = self._choice(before + text.text, text.logprobs, text.ended_by)
        if self.ask.is_chat:
            choice["message"] = {"role": "assistant", "content": choice.pop("text")}
        return self.head | {"choices": [choice], "usage": usage(text)}

    def begin(self, before: str) -> bytes:
        """The beginning of a stream."""
        if self.ask.is_chat:
            return self._chunk({"role": "assistant", "content": ""})
        return self._chunk({}, before) if before else b""

    def part(self, piece: Piece | None) -> bytes:
        """A part of a stream; None is its end."""
        if piece is None:
            chunks = self._chunk({}, ended_by=self.generation.ended_by)
            if self.ask.counts:
                chunks += event(self.head | {"choices": [], "usage": usage(self.generation)})
            return chunks + b"data: [DONE]\n\n"
        if not piece.text and not piece.logprobs:
            return b""
        return self._chunk({"content": piece.text}, piece.text, piece.logprobs)

    def _chunk(
        self, delta: dict, text: str = "", scores: Sequence[Logprob] = (), ended_by: str = ""
    ) -> bytes:
        choice = self._choice(text, scores, ended_by)
        if self.ask.is_chat:
            del choice["text"]
            choice["delta"] = delta
        counts = {"usage": None} if self.ask.counts else {}
        return event(self.head | {"choices": [choice]} | counts)

    def _choice(self, text: str, scores: Sequence[Logprob], ended_by: str) -> dict:
        logprobs = None
        if scores and self.ask.is_chat:
            logprobs = {"content": [self._chat_score(score) for score in scores]}
        elif scores:
            logprobs = self._text_scores(scores)
        finish = ENDS.get(ended_by)
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _text(self, id: int) -> str:
        """A token as text; of a control token, its name."""
        return self.names.get(id) or self.tokenizer.bytes_of(id).decode(errors="replace")

    def _chat_score(self, score: Logprob) -> dict:
        found = [
            {"token": self._text(id), "logprob": logprob, "bytes": [*self.tokenizer.bytes_of(id)]}
            for id, logprob in [(score.id, score.logprob), *score.best]
        ]
        return found[0] | {"top_logprobs": found[1:]}

    def _text_scores(self, scores: Sequence[Logprob]) -> dict:
        best = [
            {self._text(id): logprob for id, logprob in [*score.best, (score.id, score.logprob)]}
            for score in scores
        ]
        return {
            "tokens": [self._text(score.id) for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": best if self.ask.options["logprobs"] else None,
            "text_offset": [score.begins for score in scores],
        }


def event(value: dict) -> bytes:
    """An object as a part of a stream."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def usage(generation: Generation) -> dict:
    new = len(generation.ids)
    cached = generation.prompt_tokens - generation.timings.prompt_tokens
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": new,
        "total_tokens": generation.prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
