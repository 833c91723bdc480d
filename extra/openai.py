"""The words of OpenAI's API: what a request asks for, and how its text is answered."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)
from pydantic_core import from_json, to_json
from starlette.exceptions import HTTPException

from extra.files import one_line
from extra.settings import FILTERS, RANDOM, SETTINGS, Setting

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from session import Generation, Logprob, Piece, Session

# ---- errors


class APIError(HTTPException):
    """The error with which a request is answered."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid", param: str = ""):
        super().__init__(status, message)
        self.code = code
        self.param = param or None


def error_body(error: HTTPException) -> dict:
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    code = getattr(error, "code", error.detail.lower().replace(" ", "_"))
    param = getattr(error, "param", None)
    return {"error": dict(message=one_line(error.detail), type=kind, code=code, param=param)}


# ---- requests

# Fields that are not supported, with their values that change nothing, which are accepted
UNSUPPORTED = dict(
    n=[1], best_of=[1], presence_penalty=[0], frequency_penalty=[0], logit_bias=[{}, []], tools=[[]],
    tool_choice=["none", "auto"], functions=[[]], function_call=["none", "auto"],
    response_format=[{"type": "text"}], suffix=[""], grammar=[""], json_schema=[{}],
)  # fmt: skip
OPTIONS = {"n", "stop", "ignore_eos", *SETTINGS}  # of Session.generate

LIMITS = "max_completion_tokens", "max_tokens", "n_predict"  # the last one is llama.cpp's
INT_END = 1 << 31
Length = Annotated[int, Field(ge=-1, lt=INT_END)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
StopStrings = str | Annotated[list[str], Field(max_length=1024)]  # each is compared at each token


class Strict(BaseModel):
    """Takes no value of another type, such as "1" or true for 1. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None
    tool_calls: Annotated[list, Field(max_length=0)] | None = None

    def plain(self) -> dict[str, str]:
        """The message as chat templates know it."""
        content = self.content or ""
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content}


class StreamOptions(Strict):
    include_usage: bool | None = None


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _field(setting: Setting):
    """A field of a request, and its default."""
    limits = Field(None, ge=setting.low, le=setting.largest, alias=setting.full or None)
    return setting.kind | None, limits


Filters = create_model(
    "Filters", __base__=Strict, **{name: _field(setting) for name, setting in FILTERS.items()}
)


class GenerationRequest(Filters):
    """The text that a client asks for: what both kinds of requests have in common."""

    model: str = ""  # there is one, whatever its name
    n: Length = Field(-1, validation_alias=AliasChoices(*LIMITS))
    seed: int = RANDOM
    stop: Annotated[StopStrings, AfterValidator(listed)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    def options(self) -> dict:
        """Arguments of Session.generate and Session.chat."""
        return self.model_dump(include=OPTIONS, exclude_none=True)


class ChatCompletionRequest(GenerationRequest):
    """A request for the next message of a chat, and the words of the answer."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0

    kind: ClassVar = "chat.completion"
    kind_of_chunk: ClassVar = "chat.completion.chunk"
    id_begins: ClassVar = "chatcmpl-"
    first_chunk: ClassVar = {"delta": {"role": "assistant", "content": ""}}

    def begin(self, session: Session, **options) -> Generation:
        best = self.top_logprobs if self.logprobs else None
        messages = [message.plain() for message in self.messages]
        return session.chat(messages, logprobs=best, **self.options(), **options)

    def whole(self, text: str) -> dict:
        return {"message": {"role": "assistant", "content": text}}

    def part(self, text: str) -> dict:
        return {"delta": {"content": text} if text else {}}

    def scores(self, logprobs: Sequence[Logprob], session: Session) -> dict:
        def of(id: int, value: float) -> dict:
            raw = session.tokenizer.bytes_of(id)
            return {"token": session.text_of(id), "logprob": value, "bytes": [*raw]}

        content = []
        for score in logprobs:
            best = [of(*pair) for pair in score.best]
            content.append(of(score.id, score.logprob) | {"top_logprobs": best})
        return {"content": content}


class CompletionRequest(GenerationRequest):
    """A request for the text that follows a prompt, and the words of the answer."""

    prompt: str | Annotated[list[int], Field(min_length=1)]
    logprobs: TopLogprobs | bool = False  # llama.cpp takes true for 1
    echo: bool = False  # the prompt comes before the text

    kind: ClassVar = "text_completion"
    kind_of_chunk: ClassVar = kind
    id_begins: ClassVar = "cmpl-"
    first_chunk: ClassVar = None

    def begin(self, session: Session, **options) -> Generation:
        best = None if self.logprobs is False else int(self.logprobs)
        options |= dict(logprobs=best, echo=self.echo)
        return session.generate(self.prompt, **self.options(), **options)

    def whole(self, text: str) -> dict:
        return {"text": text}

    part = whole

    def scores(self, logprobs: Sequence[Logprob], session: Session) -> dict:
        def best_of(score: Logprob) -> dict[str, float] | None:
            if score.logprob is None:
                return None
            pairs = [*score.best, (score.id, score.logprob)]
            return {session.text_of(id): value for id, value in pairs}

        return {
            "tokens": [session.text_of(score.id) for score in logprobs],
            "token_logprobs": [score.logprob for score in logprobs],
            "top_logprobs": [*map(best_of, logprobs)] if self.logprobs else None,
            "text_offset": [score.begins for score in logprobs],
        }


def parse_request(body: bytes, kind: type[GenerationRequest]) -> GenerationRequest:
    """The text that a request's body asks for; null means absent. Raises APIError."""
    try:
        fields = from_json(body)
    except ValueError as error:
        raise APIError(f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(fields, dict):
        raise APIError("the body must be an object of JSON")
    fields = {name: value for name, value in fields.items() if value is not None}
    for name, value in fields.items():
        if isinstance(value, float) and value.is_integer():  # 5.0 is 5: JSON has one kind of number
            fields[name] = int(value)
    for name, values in UNSUPPORTED.items():
        value = fields.get(name, values[0])
        if isinstance(value, bool) or value not in values:
            message = f"{name} must be absent or {values[0]!r}: nothing else is supported"
            raise APIError(message, param=name)
    match fields.get("prompt"):
        case [str() | list() as prompt]:  # a list of one prompt
            fields["prompt"] = prompt
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise first_error(error) from None
    if kind is ChatCompletionRequest and request.top_logprobs and not request.logprobs:
        raise APIError("top_logprobs needs logprobs: true", param="top_logprobs")
    if request.seed == RANDOM:
        request.seed = random.SystemRandom().randrange(1 << 32)
    request.seed %= SETTINGS["seed"].high + 1  # OpenAI's may be negative
    return request


def first_error(error: ValidationError) -> APIError:
    """What is wrong with the first field that is: each type that it may have says so."""
    errors = error.errors()
    name, *place = errors[0]["loc"]
    whats = [found["msg"] for found in errors if found["loc"][0] == name]
    if name == "messages" and place:
        name = f"messages[{place[0]}]"
        if len(place) > 1:
            name += f".{place[1]}"
    return APIError(f"{name}: {'; '.join(whats)}", param=name)


# ---- answers

# what OpenAI calls the reasons for which a text ends
ENDS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


class ResponseBody:
    """What is sent of one text: an object of JSON, or the events of a stream."""

    def __init__(self, request: GenerationRequest, model: str, session: Session):
        """model: its name."""
        self.request = request
        self.session = session
        self.head = {
            "id": request.id_begins + uuid.uuid4().hex,
            "object": request.kind_of_chunk if request.stream else request.kind,
            "created": int(time.time()),
            "model": model,
        }
        self.with_usage = request.stream_options.include_usage

    def whole(self, text: Generation) -> bytes:
        choices = [self._choice(self.request.whole(text.text), text.logprobs, text.ended_by)]
        return to_json(self.head | {"choices": choices, "usage": usage(text)})

    def begin(self) -> bytes:
        """The beginning of a stream."""
        if self.request.first_chunk:
            return self._chunk(self.request.first_chunk)
        return b""

    def pieces(self, pieces: list[Piece]) -> bytes:
        """A part of a stream."""
        part = self.request.part
        return b"".join(self._chunk(part(piece.text), piece.logprobs) for piece in pieces)

    def end(self, text: Generation) -> bytes:
        """The end of a stream."""
        end = self._chunk(self.request.part(""), ended_by=text.ended_by)
        if self.with_usage:
            end += event(self.head | {"choices": [], "usage": usage(text)})
        return end + b"data: [DONE]\n\n"

    def _chunk(self, said: dict, logprobs: Sequence[Logprob] = (), ended_by: str = "") -> bytes:
        chunk = self.head | {"choices": [self._choice(said, logprobs, ended_by)]}
        if self.with_usage:
            chunk["usage"] = None
        return event(chunk)

    def _choice(self, said: dict, logprobs: Sequence[Logprob], ended_by: str) -> dict:
        scores = self.request.scores(logprobs, self.session) if logprobs else None
        return {"index": 0, **said, "logprobs": scores, "finish_reason": ENDS.get(ended_by)}


def usage(text: Generation) -> dict:
    return {
        "prompt_tokens": text.prompt_tokens,
        "completion_tokens": len(text.ids),
        "total_tokens": text.prompt_tokens + len(text.ids),
        "prompt_tokens_details": {"cached_tokens": text.cached_tokens},
    }


def event(value: dict) -> bytes:
    """An event of a stream."""
    return b"data: " + to_json(value) + b"\n\n"
