"""The words of OpenAI's API: what a request asks for, and how its text is answered."""

from __future__ import annotations

import json
import random
import time
import uuid
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from extra.files import one_line
from extra.settings import FILTERS, RANDOM, SETTINGS, Setting

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from session import Generation, Logprob, Session

# what OpenAI calls the reasons for which a text ends
ENDS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}

# ---- requests


class Refused(HTTPException):
    """A request that is answered with an error."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid", param: str = ""):
        super().__init__(status, message)
        self.code = code
        self.param = param or None


def error_body(error: HTTPException) -> dict:
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    code = getattr(error, "code", error.detail.lower().replace(" ", "_"))
    param = getattr(error, "param", None)
    return {"error": dict(message=one_line(error.detail), type=kind, code=code, param=param)}


# Fields that would change the text in ways that do not exist here, and the values that they may
# have, since these say nothing
UNSUPPORTED = dict(
    n=[1], best_of=[1], presence_penalty=[0], frequency_penalty=[0], logit_bias=[{}], tools=[[]],
    tool_choice=["none", "auto"], functions=[[]], function_call=["none", "auto"],
    response_format=[{"type": "text"}], suffix=[""], grammar=[""], json_schema=[{}],
)  # fmt: skip
OPTIONS = {"n", "ignore_eos", "echo", *SETTINGS}  # of Session.generate

INT_END = 1 << 31
Length = Annotated[int, Field(ge=-1, lt=INT_END)]
Best = Annotated[int, Field(ge=0, le=20)]
StopString = Annotated[str, Field(max_length=1000)]


class Strict(BaseModel):
    """Takes no value of another type, such as "1" or true for 1. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    tool_calls: Annotated[list, Field(max_length=0)] | None = None

    def plain(self) -> dict[str, str]:
        """The message as chat templates know it."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content}


def _field(setting: Setting):
    """A field of a request, and its default."""
    limits = Field(None, ge=setting.low, le=setting.largest, alias=setting.full or None)
    return setting.kind | None, limits


Filters = create_model(
    "Filters", __base__=Strict, **{name: _field(setting) for name, setting in FILTERS.items()}
)


class Ask(Filters):
    """The text that a client asks for: what both kinds of requests have in common."""

    model: str = ""  # there is one, whatever its name
    n: Length = Field(-1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    seed: int = Field(RANDOM, ge=RANDOM, le=SETTINGS["seed"].high)
    stop: StopString | Annotated[list[StopString], Field(max_length=32)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict = {}

    def options(self) -> dict:
        """Arguments of Session.generate."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return self.model_dump(include=OPTIONS, exclude_none=True) | dict(stop=stop)


class ChatAsk(Ask):
    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: Best = 0

    def options(self) -> dict:
        best = self.top_logprobs if self.logprobs else None
        return super().options() | dict(logprobs=best)


class TextAsk(Ask):
    prompt: str | Annotated[list[int], Field(min_length=1)]
    logprobs: Best | None = None
    echo: bool = False  # the prompt comes before the text

    def options(self) -> dict:
        return super().options() | dict(logprobs=self.logprobs)


def read_ask(body: bytes, kind: type[Ask]) -> Ask:
    """The text that a request's body asks for; null means absent. Raises Refused."""
    try:
        fields = from_json(body)
    except ValueError as error:
        raise Refused(f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(fields, dict):
        raise Refused("the body must be an object of JSON")
    fields = {name: value for name, value in fields.items() if value is not None}
    for name, values in UNSUPPORTED.items():
        value = fields.get(name, values[0])
        if isinstance(value, bool) or value not in values:
            message = f"{name} must be absent or {values[0]!r}: nothing else is supported"
            raise Refused(message, param=name)
    match fields.get("prompt"):
        case [str() | list() as prompt]:  # a list of one prompt
            fields["prompt"] = prompt
    try:
        ask = kind.model_validate(fields)
    except ValidationError as error:
        raise refusal(error) from None
    if isinstance(ask, ChatAsk) and ask.top_logprobs and not ask.logprobs:
        raise Refused("top_logprobs needs logprobs: true", param="top_logprobs")
    if ask.seed < 0:
        ask.seed = random.SystemRandom().randrange(1 << 32)
    return ask


def refusal(error: ValidationError) -> Refused:
    """What is wrong with the first field that is: each type that it may have says so."""
    errors = error.errors()
    name, *place = errors[0]["loc"]
    whats = [found["msg"] for found in errors if found["loc"][0] == name]
    if name == "messages" and place:
        name = f"messages[{place[0]}]"
        if len(place) > 1:
            name += f".{place[1]}"
    return Refused(f"{name}: {'; '.join(whats)}", param=name)


# ---- answers


class Form:
    """How one text is answered: whole, or in the chunks of a stream."""

    def __init__(self, ask: Ask, model: str, session: Session):
        """model: its name."""
        self.session = session
        self.is_chat = isinstance(ask, ChatAsk)
        self.best = ask.options()["logprobs"]  # how many are told beside each token
        self.counts = bool(ask.stream_options.get("include_usage"))
        kind = "chat.completion" if self.is_chat else "text_completion"
        if self.is_chat and ask.stream:
            kind += ".chunk"
        prefix = "chatcmpl-" if self.is_chat else "cmpl-"
        self.head = {"id": prefix + uuid.uuid4().hex, "object": kind, "created": int(time.time())}
        self.head["model"] = model
        # of a chunk: made once, since each token takes time from the model's thread
        self.begins = "data: " + json.dumps(self.head).removesuffix("}")

    def whole(self, generation: Generation) -> bytes:
        said = {"text": generation.text}
        if self.is_chat:
            said = {"message": {"role": "assistant", "content": generation.text}}
        choice = self._choice(said, generation.logprobs, ENDS[generation.ended_by])
        answer = self.head | {"choices": [choice], "usage": usage(generation)}
        return json.dumps(answer).encode()

    def begin(self) -> bytes:
        """The beginning of a stream."""
        if self.is_chat:
            return self._chunk({"delta": {"role": "assistant", "content": ""}}, [])
        return b""

    def piece(self, text: str, logprobs: list[Logprob]) -> bytes:
        """A part of a stream."""
        said = {"delta": {"content": text}} if self.is_chat else {"text": text}
        return self._chunk(said, logprobs)

    def end(self, generation: Generation) -> bytes:
        """The end of a stream."""
        said = {"delta": {}} if self.is_chat else {"text": ""}
        end = self._chunk(said, [], ENDS[generation.ended_by])
        if self.counts:
            end += in_stream(self.head | {"choices": [], "usage": usage(generation)})
        return end + b"data: [DONE]\n\n"

    def _chunk(self, said: dict, logprobs: list[Logprob], reason: str | None = None) -> bytes:
        choices = json.dumps([self._choice(said, logprobs, reason)])
        usage = ', "usage": null' if self.counts else ""
        return f'{self.begins}, "choices": {choices}{usage}}}\n\n'.encode()

    def _choice(self, said: dict, logprobs: list[Logprob], reason: str | None) -> dict:
        scores = None
        if logprobs:
            scores = self._chat_scores(logprobs) if self.is_chat else self._text_scores(logprobs)
        return {"index": 0, **said, "logprobs": scores, "finish_reason": reason}

    def _chat_scores(self, logprobs: list[Logprob]) -> dict:
        def of(id: int, value: float) -> dict:
            raw = self.session.tokenizer.bytes_of(id)
            return {"token": self.session.text_of(id), "logprob": value, "bytes": [*raw]}

        content = []
        for score in logprobs:
            best = [of(*pair) for pair in score.best]
            content.append(of(score.id, score.logprob) | {"top_logprobs": best})
        return {"content": content}

    def _text_scores(self, logprobs: list[Logprob]) -> dict:
        text_of = self.session.text_of

        def best_of(score: Logprob) -> dict[str, float] | None:
            if score.logprob is None:
                return None
            return {text_of(id): p for id, p in [*score.best, (score.id, score.logprob)]}

        return {
            "tokens": [text_of(score.id) for score in logprobs],
            "token_logprobs": [score.logprob for score in logprobs],
            "top_logprobs": [*map(best_of, logprobs)] if self.best else None,
            "text_offset": [score.begins for score in logprobs],
        }


def usage(generation: Generation) -> dict:
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": len(generation.ids),
        "total_tokens": generation.prompt_tokens + len(generation.ids),
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


def in_stream(value: dict) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
