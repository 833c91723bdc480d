"""OpenAI's API: the fields of requests, and how each request is answered.

To add an endpoint, write a ModelRequest and add it to ENDPOINTS, in talk/endpoints.py."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    ValidationError,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json, to_json
from starlette.exceptions import HTTPException

from grammars import choice_grammar, is_one_rule, json_grammar, lark_grammar, regex_grammar
from loading.files import one_line
from settings import FILTERS, RANDOM, SETTINGS, Setting
from talk.cli import note_once
from talk.tools import (
    HERMES,
    Answer,
    Part,
    Router,
    Style,
    call_grammar,
    style_of,
)

if TYPE_CHECKING:
    from prompts import Writer
    from texts import Generation, Logprob
    from tokenizer import Prompt

# ---- errors


class APIError(HTTPException):
    """The error with which a request is answered."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid", param: str = ""):
        super().__init__(status, message)
        self.code = code
        self.param = param or None


# of errors, as Anthropic calls them
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
KINDS |= {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


def error_body(error: HTTPException) -> dict:
    """What clients of OpenAI's API and of Anthropic's look for."""
    kind = KINDS.get(error.status_code, "invalid_request_error")
    code = getattr(error, "code", HTTPStatus(error.status_code).name.lower())
    param = getattr(error, "param", None)
    said = dict(message=one_line(error.detail), type=kind, code=code, param=param)
    return {"error": said, "type": "error"}


# ---- what answers have in common


def usage(texts: Sequence[Generation], n: int) -> dict:
    """Of the choices of an answer, of which n have one prompt."""
    prompt_tokens = sum(text.prompt_tokens for text in texts[::n])
    cached_tokens = sum(text.cached_tokens for text in texts[::n])
    completion_tokens = sum(len(text.ids) for text in texts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def timings(texts: Sequence[Generation]) -> dict:
    """llama.cpp's, in milliseconds."""
    prompt = sum(text.timings.prompt_tokens for text in texts)
    prompt_seconds = sum(text.timings.prompt_seconds for text in texts)
    steps = sum(text.timings.steps for text in texts)
    seconds = sum(text.timings.step_seconds for text in texts)
    return {
        "cache_n": texts[0].cached_tokens,
        "prompt_n": prompt,
        "prompt_ms": 1e3 * prompt_seconds,
        "prompt_per_second": prompt / prompt_seconds if prompt_seconds else None,
        "predicted_n": sum(text.timings.new_tokens for text in texts),
        "predicted_ms": 1e3 * seconds,
        "predicted_per_second": steps / seconds if seconds else None,
    }


def as_tool_call(id: str, name: str, arguments: str | dict) -> dict:
    """A call, as it is asked for and answered."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def event(value: dict) -> bytes:
    """An event of a stream, which has the name of its type, if it has one."""
    name = b"event: %s\n" % value["type"].encode() if "type" in value else b""
    return b"%sdata: %s\n\n" % (name, to_json(value))


class Account:
    """How an API tells of texts as they are written: the events of a stream, and the whole answer. Choices
    are given by their index."""

    def __init__(self, request: TextRequest, answers: list[Answer], session: Writer, model: str):
        """model: its name."""
        self.request = request
        self.answers = answers
        self.session = session
        self.model = model

    @property
    def texts(self) -> list[Generation]:
        return [answer.text for answer in self.answers]

    def begin(self) -> bytes:
        """There is a first token."""
        return b""

    def add(self, index: int, parts: list[Part], logprobs: Sequence[Logprob]) -> bytes:
        """A token of a choice."""
        raise NotImplementedError

    def end(self, index: int) -> bytes:
        """A choice has ended."""
        raise NotImplementedError

    def finish(self) -> bytes:
        """All have ended."""
        return b""

    def whole(self) -> dict | list[dict]:
        """The answer, once all have ended."""
        raise NotImplementedError


class Choices(Account):
    """What OpenAI's API tells of texts."""

    def __init__(self, *known):
        super().__init__(*known)
        request = self.request
        self.head = {
            "id": request.id_begins + uuid.uuid4().hex,
            "object": request.chunk_object if request.stream else request.whole_object,
            "created": int(time.time()),
            "model": self.model,
        }
        self.with_usage = request.stream and request.stream_options.include_usage
        if self.with_usage:
            self.head["usage"] = None  # in all events but the one that tells it
        self.calls = [-1] * len(self.answers)  # the index of the last one of each
        self.left = len(self.answers)

    def begin(self) -> bytes:
        first = self.request.first_delta
        if not first:
            return b""
        return b"".join(self._chunk(index, first) for index in range(self.left))

    def add(self, index: int, parts: list[Part], logprobs: Sequence[Logprob]) -> bytes:
        told = [part for part in parts if part.kind != "called"]
        if logprobs and not told:
            told = [Part("text")]
        events = b""
        for part in told:
            self.calls[index] += part.kind == "call"
            events += self._chunk(index, self.request.delta(part, self.calls[index]), logprobs)
            logprobs = ()
        return events

    def end(self, index: int) -> bytes:
        self.left -= 1
        more = {} if self.left else {"timings": timings(self.texts)}
        end = {"finish_reason": self.answers[index].finish_reason}
        return self._chunk(index, self.request.delta(Part("text"), 0) | end, **more)

    def finish(self) -> bytes:
        events = b""
        if self.with_usage:
            events = event(self.head | {"choices": [], "usage": usage(self.texts, self.request.n)})
        return events + b"data: [DONE]\n\n"

    def whole(self) -> dict:
        choices = []
        for index, answer in enumerate(self.answers):
            said = self.request.whole(answer) | {"finish_reason": answer.finish_reason}
            choices.append(self._choice(index, said, answer.text.logprobs))
        numbers = {"usage": usage(self.texts, self.request.n), "timings": timings(self.texts)}
        return self.head | {"choices": choices} | numbers

    def _chunk(
        self, index: int, said: dict, logprobs: Sequence[Logprob] = (), **more: object
    ) -> bytes:
        choice = self._choice(index, {"finish_reason": None} | said, logprobs)
        return event(self.head | {"choices": [choice]} | more)

    def _choice(self, index: int, said: dict, logprobs: Sequence[Logprob]) -> dict:
        scores = self.request.scores(logprobs, self.session) if logprobs else None
        return {"index": index, "logprobs": scores, **said}


# ---- fields of requests

# Fields of OpenAI, llama.cpp and vLLM that change the text, or what is told of it, and are not
# supported, with their values that change nothing: only these are accepted. All other unknown fields
# are ignored, such as user and store, or dry_base, which has no effect without a dry_multiplier
UNSUPPORTED = dict(
    # several texts, tools, another prompt
    best_of=[1], use_beam_search=[False], functions=[[]],
    function_call=["none", "auto"], modalities=[["text"]], suffix=[""], add_special_tokens=[True],
    truncate_prompt_tokens=[-1], lora=[[]],
    # samplers
    bad_words=[[]], allowed_token_ids=[[]], typical_p=[1], top_n_sigma=[-1, 0], top_a=[0], tfs_z=[1], mirostat=[0],
    dynatemp_range=[0], smoothing_factor=[0], dry_multiplier=[0], xtc_probability=[0],
    adaptive_target=[-1], no_repeat_ngram_size=[0], min_keep=[0],
    # what an answer tells besides the text
    return_tokens=[False], post_sampling_probs=[False],
    # the end of the text
    include_stop_str_in_output=[False],
)  # fmt: skip
# of Session.generate, under the same names
OPTIONS = {"stop", "ignore_eos", "min_tokens", "stop_token_ids", "logit_bias", *SETTINGS}


# Samplers by llama.cpp's names, in the order in which they are applied, and what turns each off
SAMPLERS = {
    "penalties": dict(repeat_penalty=1, presence_penalty=0, frequency_penalty=0),
    "top_k": dict(top_k=0),
    "top_p": dict(top_p=1),
    "min_p": dict(min_p=0),
    "temperature": dict(temp=1),
}


LIMITS = "max_completion_tokens", "max_tokens", "n_predict"  # the last one is llama.cpp's
INT_END = 1 << 31
MOST_CHOICES = 16
Length = Annotated[int, Field(ge=-1, lt=INT_END)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]


def must_be(what: str) -> WrapValidator:
    """Says in words what a value must be, where pydantic would tell what it lacks as each of several
    types."""

    def check(value: object, validate: Callable[[object], object]) -> object:
        try:
            return validate(value)
        except ValidationError:
            raise PydanticCustomError("wrong", f"must be {what}") from None

    return WrapValidator(check)


def samplers_off(order: Sequence[str]) -> dict[str, float]:
    """The settings that turn off the samplers which llama.cpp's `samplers`, in names or letters, leaves
    out. Samplers that this program lacks may be named: their own settings have to be off."""
    other_names = dict(zip("ekpmt", SAMPLERS), temp="temperature", nucleus="top_p")
    names = [name.replace("-", "_") for name in order]
    names = [other_names.get(name, name) for name in names]
    on = [name for name in names if name in SAMPLERS]
    if on != [name for name in SAMPLERS if name in on]:
        raise ValueError
    off = [SAMPLERS[name] for name in SAMPLERS if name not in on]
    return {name: value for settings in off for name, value in settings.items()}


Samplers = Annotated[
    str | list[str],
    AfterValidator(samplers_off),
    must_be(f"names in the order {', '.join(SAMPLERS)}"),
]
StopStrings = Annotated[
    str | Annotated[list[str], Field(max_length=1024)],  # each is compared at each token
    must_be("a string, or a list of at most 1024 strings"),
]
MOST_PROMPTS = 128
TokenList = Annotated[list[int], Field(min_length=1)]
Prompts = Annotated[
    str
    | TokenList
    | Annotated[list[str] | list[TokenList], Field(min_length=1, max_length=MOST_PROMPTS)],
    must_be(f"a string or a list of ids, or a list of at most {MOST_PROMPTS} of these"),
]


def up_to_an_error(schema: object) -> object:
    """A schema of pydantic whose lists are read up to the first element that is wrong."""
    match schema:
        case {"type": "list", **rest}:
            return {"type": "list", "fail_fast": True} | up_to_an_error(rest)
        case dict():
            return {name: up_to_an_error(value) for name, value in schema.items()}
        case list():
            return [*map(up_to_an_error, schema)]
    return schema


def read_biases(value: object, validate: Callable[[object], object]) -> object:
    """OpenAI's object of ids, or llama.cpp's list of pairs, in which false bans an id."""
    try:
        pairs = value.items() if isinstance(value, dict) else value
        return validate({int(id): -100.0 if bias is False else bias for id, bias in pairs})
    except (TypeError, ValueError):  # ValidationError is one
        what = "must be an object of biases from -100 to 100 by token ids"
        raise PydanticCustomError("wrong", what) from None


Biases = Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], WrapValidator(read_biases)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=INT_END)]], Field(max_length=1024)]


class Strict(BaseModel):
    """Takes no value of another type, such as "1" or true for 1. Unknown fields are ignored, and null
    means absent. The first error ends the reading: only one is told, and a list may have millions."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: object) -> object:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type, handler: GetCoreSchemaHandler):
        return up_to_an_error(handler(source))


class TextPart(Strict):
    type: Literal["text"]
    text: str


def text_of(content: str | list | None) -> str:
    """The text of a message, which may be in several parts."""
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content or ""


def read_arguments(arguments: object) -> object:
    """The arguments of a call as the object that chat templates expect. A model may have written
    something else: what there is of an object that was cut off, or any text as the only argument."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        value = arguments.strip()
    if isinstance(value, dict):
        return value
    return {"arguments": arguments} if value else {}


class Function(Strict):
    """A function that is called."""

    name: str
    arguments: Annotated[dict, BeforeValidator(read_arguments)] = {}


class ToolCall(Strict):
    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class Message(Strict):
    """A message, whose fields are what chat templates know."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[
        str | list[TextPart] | None,
        must_be("a string, or a list of parts of the type text: only text is supported"),
        AfterValidator(text_of),
    ] = ""
    tool_calls: Annotated[
        list[ToolCall] | None,
        must_be("a list of calls of functions, each with a name and arguments"),
        AfterValidator(lambda calls: calls or None),
    ] = None
    tool_call_id: str | None = None
    name: str | None = None
    # what was thought before the answer
    reasoning_content: str | None = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )

    @model_validator(mode="after")
    def _check(self) -> Message:
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise PydanticCustomError("wrong", "content is missing")
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError("wrong", "tool_call_id is missing")
        return self


def is_tool(value: dict) -> dict:
    """A tool as chat templates know it: what the client sent."""
    match value:
        case {"type": "function", "function": {"name": str(), **function}}:
            parameters = function.get("parameters") or {}
            if isinstance(parameters, dict) and parameters.get("type", "object") == "object":
                return value
    raise PydanticCustomError(
        "wrong", "must be functions, each with its name and an object of parameters"
    )


def within(outer: str, name: str):
    """A field that chats nest in another one, and Responses do not."""
    return Field(validation_alias=AliasChoices(AliasPath(outer, name), name))


class NamedTool(Strict):
    type: Literal["function"]
    name: str = within("function", "name")


class AllowedTools(Strict):
    """Some of the tools, as if there were no others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = within("allowed_tools", "mode")
    tools: list[NamedTool] = within("allowed_tools", "tools")


def schemas(tools: list[dict]) -> dict[str, dict]:
    """The JSON schemas of the arguments of tools, by their names."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


Tool = Annotated[dict, AfterValidator(is_tool)]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools,
    must_be("none, auto, required, one of the functions, or allowed_tools"),
]


def schema_of(format: object) -> dict | bool | None:
    """The JSON schema of a response_format."""
    match format:
        case {"type": "text"}:
            return None
        case {"type": "json_object", **more} if isinstance(more.get("schema") or {}, dict):
            return {"type": "object"} | (more.get("schema") or {})  # llama.cpp's
        case {"type": "json_schema", "json_schema": {"schema": dict() | bool() as schema}}:
            return schema
        case {"type": "json_schema", "schema": dict() | bool() as schema}:  # of Responses
            return schema
        case {"type": "json_schema", "json_schema": dict() as named} if named.get("schema") is None:
            return {}
    what = "must be of the type text, json_object, or json_schema with a json_schema"
    raise PydanticCustomError("wrong", what)


ResponseFormat = Annotated[dict | bool | None, BeforeValidator(schema_of)]


class StructuredOutputs(Strict):
    """vLLM's."""

    json_value: dict | str | None = Field(None, alias="json")
    regex: str = ""
    choice: Annotated[list[str], Field(min_length=1)] = []
    grammar: str = ""
    json_object: bool = False


class StreamOptions(Strict):
    include_usage: bool | None = None


SEEDS_APART = 0x9E3779B97F4A7C15  # between the seeds of two choices


def own_seed(seed: int) -> int:
    """A random seed instead of RANDOM."""
    return random.SystemRandom().randrange(1 << 32) if seed == RANDOM else seed


def _field(name: str, setting: Setting):
    """A field of a request, under each of its names, and its default."""
    names = AliasChoices(*filter(None, (setting.full, name, setting.checkpoint)))
    limits = Field(None, ge=setting.low, le=setting.largest, validation_alias=names)
    return setting.kind | None, limits


def in_turns(answers: list[Answer]) -> Iterator[tuple[int, tuple | None]]:
    """What each of several answers says next, by its number: of those that have something, so that
    none waits for another. None is its end."""
    left = {index: iter(answer) for index, answer in enumerate(answers)}
    while left:
        ready = [i for i in left if answers[i].text.ready or answers[i].text.ended]
        for index in ready or [min(left)]:
            said = next(left[index], None)
            if said is None:
                del left[index]
            yield index, said


# ---- requests, each with its answer


class ModelRequest(Strict):
    """What a client asks of the model, in the fields of a body."""

    is_stream: ClassVar[bool] = False  # the parts of the answer are sent as they come

    # What `answer` asks the session for. It takes pieces only of those that are ready, so that no request
    # waits for another
    _texts: list[Generation] = PrivateAttr(default_factory=list)

    @property
    def texts(self) -> list[Generation]:
        return self._texts

    @property
    def ready(self) -> bool:
        """Whether the next part of the answer can be written."""
        return any(text.ready for text in self.texts) or all(text.ended for text in self.texts)

    def answer(self, session: Writer, model: str) -> Iterator[bytes]:
        """The parts of the answer, which may be empty: one for each piece of a text. model: its name.
        Raises ValueError for what is the client's fault; what the iterator raises is not."""
        raise NotImplementedError


class TextRequest(ModelRequest):
    """A request for texts, whose answer comes whole or in a stream."""

    account: ClassVar[type[Account]]  # what is told of the texts

    stream: bool = False

    @property
    def is_stream(self) -> bool:
        return self.stream and bool(self.texts)

    def choices(self, session: Writer) -> list[Answer]:
        """The texts, and how they are read. Raises ValueError."""
        raise NotImplementedError

    def answer(self, session: Writer, model: str) -> Iterator[bytes]:
        answers = self.choices(session)
        self._texts = [answer.text for answer in answers]
        return self._parts(answers, self.account(self, answers, session, model))

    def _parts(self, answers: list[Answer], account: Account) -> Iterator[bytes]:
        begin = account.begin
        for index, new in in_turns(answers):
            events = begin()
            begin = bytes
            events += account.add(index, *new) if new else account.end(index)
            yield events if self.stream else b""
        events = account.finish()
        yield events if self.stream else to_json(account.whole())


Filters = create_model(
    "Filters", __base__=TextRequest, **{name: _field(name, row) for name, row in FILTERS.items()}
)


class GenerationRequest(Filters):
    """A request for a text: what its kinds have in common. A kind says how the session is asked for the
    text, and how answers write it in JSON."""

    account = Choices
    id_begins: ClassVar[str]
    whole_object: ClassVar[str]  # "object" of an answer
    chunk_object: ClassVar[str]  # and of the parts of a stream
    first_delta: ClassVar[dict | None] = None  # what a stream begins with

    model: str = ""  # there is one, whatever its name
    max_tokens: Length = Field(-1, validation_alias=AliasChoices(*LIMITS))
    seed: Annotated[int, AfterValidator(own_seed)] = Field(RANDOM, validate_default=True)
    stop: StopStrings = []
    ignore_eos: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=MOST_CHOICES, validation_alias=AliasChoices("n", "n_cmpl"))
    logit_bias: Biases = {}
    min_tokens: Annotated[int, Field(ge=0, lt=INT_END)] = 0
    stop_token_ids: TokenIds = []
    samplers: Samplers = {}
    # what the text has to be, by OpenAI's, vLLM's and llama.cpp's names
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs = StructuredOutputs()
    guided_json: dict | str | None = None
    guided_regex: str = ""
    guided_choice: Annotated[list[str], Field(min_length=1)] = []
    guided_grammar: str = ""
    json_schema: dict | None = None
    grammar: str = ""

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported(cls, fields: dict) -> dict:
        for name, values in UNSUPPORTED.items():
            if fields.get(name) is None:
                continue
            accepted = [to_json(value) for value in values]  # as JSON, where true is not 1
            if to_json(fields[name]) not in accepted:
                only = f"{name} must be absent or {accepted[0].decode()}"
                raise APIError(f"{only}: nothing else is supported", param=name)
        return fields

    def options(self, index: int) -> dict:
        """Arguments of Session.generate and Session.chat for one of the choices. The first has the
        request's seed, in the range of ours, which OpenAI's need not be; others have seeds of their own."""
        seed = (self.seed + index * SEEDS_APART) % (SETTINGS["seed"].high + 1)
        options = self.model_dump(include=OPTIONS, exclude_none=True)
        return options | self.samplers | {"n": self.max_tokens, "seed": seed}

    def text_grammar(self) -> str | None:
        """What the text has to be, in Lark. Returns None if it may be anything. Raises
        ValueError."""
        asked = self.structured_outputs
        given = [write(value) for value, write in (
            (self.response_format, json_grammar), (asked.json_value, json_grammar),
            (self.guided_json, json_grammar), (self.json_schema, json_grammar),
            (asked.regex, regex_grammar), (self.guided_regex, regex_grammar),
            (asked.choice, choice_grammar), (self.guided_choice, choice_grammar),
            (asked.grammar, lark_grammar), (self.guided_grammar, lark_grammar),
            (self.grammar, lark_grammar), ({"type": "object"} if asked.json_object else None, json_grammar),
        ) if value not in (None, "", [])]  # fmt: skip
        if len(given) > 1:
            raise ValueError("several fields say what the text has to be; use one")
        return given[0] if given else None

    def whole(self, answer: Answer) -> dict:
        """The whole text, in an answer."""
        raise NotImplementedError

    def delta(self, part: Part, call: int) -> dict:
        """A part of the text, in a stream, which may be empty. call: the index of the call that it
        belongs to."""
        raise NotImplementedError

    def scores(self, logprobs: Sequence[Logprob], session: Writer) -> dict:
        """Log-probabilities, in either."""
        raise NotImplementedError


class ChatCompletionRequest(GenerationRequest):
    """A request for the next message of a chat."""

    id_begins = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    first_delta = {"delta": {"role": "assistant", "content": ""}}

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0
    tools: list[Tool] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    # what chat templates know of thinking
    chat_template_kwargs: dict = {}
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise APIError("top_logprobs needs logprobs: true", param="top_logprobs")
        if isinstance(self.tool_choice, AllowedTools):
            allowed = self.tool_choice
            names = {tool.name for tool in allowed.tools}
            self.tools = [tool for tool in self.tools if tool["function"]["name"] in names]
            self.tool_choice = allowed.mode
        names = [tool["function"]["name"] for tool in self.tools]
        choice = self.tool_choice
        if choice == "required" and not names:
            raise APIError("tool_choice: there are no tools", param="tool_choice")
        if isinstance(choice, NamedTool) and choice.name not in names:
            message = f"tool_choice: no tool has the name {choice.name}"
            raise APIError(message, param="tool_choice")
        return self

    def variables(self) -> dict:
        """What the chat template is given besides messages and tools."""
        given = self.model_dump(include={"reasoning_effort", "enable_thinking"}, exclude_none=True)
        if self.reasoning_effort == "none":
            given.setdefault("enable_thinking", False)
        return given | self.chat_template_kwargs

    def style(self, session: Writer) -> Style | None:
        """How the model calls tools. None if there are none, or it cannot."""
        if not self.tools or self.tool_choice == "none":
            return None
        return style_of(session.tokenizer.tool_template)

    def prompt(self, session: Writer) -> Prompt:
        """Raises ValueError."""
        tools = self.tools if self.style(session) else None
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        return session.render(messages, tools, self.variables())

    def choices(self, session: Writer) -> list[Answer]:
        prompt = self.prompt(session)
        style = self.style(session)
        forced = self.forced()
        if not style and self.tools and self.tool_choice != "none":
            note_once("the chat template knows no tools: it is not told of those of requests")
            style = HERMES if forced else None
        grammar = self.text_grammar()
        control = session.tokenizer.control
        if forced:
            grammar = call_grammar(style, forced, control)
        elif style and is_one_rule(grammar):
            grammar = call_grammar(style, schemas(self.tools), control, grammar)
        answers = []
        for index in range(self.n):
            text = session.chat(
                prompt,
                logprobs=self.top_logprobs if self.logprobs else None,
                shown=style.control if style else (),
                grammar=grammar,
                **self.options(index),
            )
            router = Router(style, schemas(self.tools), prompt.thinks, forced=bool(forced))
            answers.append(Answer(text, router, self.parallel_tool_calls))
        return answers

    def forced(self) -> dict[str, dict]:
        """The tools of which one has to be called, as Router takes them."""
        match self.tool_choice:
            case "required":
                return schemas(self.tools)
            case NamedTool(name=name):
                return {name: schemas(self.tools)[name]}
        return {}

    def whole(self, answer: Answer) -> dict:
        said = answer.said["text"]
        message = {"role": "assistant", "content": said}
        if thought := answer.said["thought"]:
            message["reasoning_content"] = thought
        if answer.calls:
            message["content"] = said or None
            message["tool_calls"] = [as_tool_call(**vars(call)) for call in answer.calls]
        return {"message": message}

    def delta(self, part: Part, call: int) -> dict:
        match part:
            case Part("call"):
                begun = {"index": call, **as_tool_call(part.text, part.name, "")}
                return {"delta": {"tool_calls": [begun]}}
            case Part("arguments"):
                more = {"index": call, "function": {"arguments": part.text}}
                return {"delta": {"tool_calls": [more]}}
            case Part("thought"):
                return {"delta": {"reasoning_content": part.text}}
        return {"delta": {"content": part.text} if part.text else {}}

    def scores(self, logprobs: Sequence[Logprob], session: Writer) -> dict:
        return {"content": token_scores(logprobs, session)}


def token_scores(logprobs: Sequence[Logprob], session: Writer) -> list[dict]:
    """Log-probabilities of each token and of the likeliest in its place."""

    def of(id: int, value: float) -> dict:
        raw = session.tokenizer.bytes_of(id)
        return {"id": id, "token": session.token_text(id), "logprob": value, "bytes": [*raw]}

    scores = []
    for score in logprobs:
        best = [of(*pair) for pair in score.best]
        scores.append(of(score.id, score.logprob) | {"top_logprobs": best})
    return scores


class CompletionRequest(GenerationRequest):
    """A request for the text that follows a prompt."""

    id_begins = "cmpl-"
    whole_object = "text_completion"
    chunk_object = whole_object

    prompt: Prompts
    logprobs: Annotated[TopLogprobs | bool, must_be("from 0 to 20, or true for 1")] = False
    echo: bool = False  # the prompt comes before the text

    def choices(self, session: Writer) -> list[Answer]:
        best = None if self.logprobs is False else int(self.logprobs)
        options = dict(logprobs=best, echo=self.echo, grammar=self.text_grammar())
        match self.prompt:
            case [str() | list(), *_]:
                prompts = self.prompt
            case _:
                prompts = [self.prompt]
        return [a for each in prompts for a in answers_to(each, self, session, **options)]

    def whole(self, answer: Answer) -> dict:
        return {"text": answer.said["text"]}

    def delta(self, part: Part, call: int) -> dict:
        return {"text": part.text}

    def scores(self, logprobs: Sequence[Logprob], session: Writer) -> dict:
        def best_of(score: Logprob) -> dict[str, float] | None:
            if score.logprob is None:
                return None
            pairs = [*score.best, (score.id, score.logprob)]
            return {session.token_text(id): value for id, value in pairs}

        return {
            "tokens": [session.token_text(score.id) for score in logprobs],
            "token_logprobs": [score.logprob for score in logprobs],
            "top_logprobs": [*map(best_of, logprobs)] if self.logprobs else None,
            "text_offset": [score.begins for score in logprobs],
        }


def answers_to(
    prompt: str | list[int], request: GenerationRequest, session: Writer, **options
) -> list[Answer]:
    """The texts that follow a prompt, as many as the request wants. options: more arguments of
    Writer.generate."""
    texts = (session.generate(prompt, **request.options(i), **options) for i in range(request.n))
    return [*map(Answer, texts)]


class TokenizeRequest(ModelRequest):
    """llama.cpp's request for the ids of a text, with_pieces: each with its own text."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False

    def answer(self, session: Writer, *_) -> Iterator[bytes]:
        tokens = session.tokenizer.encode(self.content, self.add_special, self.parse_special)
        if self.with_pieces:
            tokens = [{"id": id, "piece": piece_of(id, session)} for id in tokens]
        return iter([to_json({"tokens": tokens})])


def piece_of(id: int, session: Writer) -> str | list[int]:
    """A token's text or, if it is not whole characters, its bytes."""
    if name := session.tokenizer.control_names.get(id):
        return name
    raw = session.tokenizer.bytes_of(id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return [*raw]


class DetokenizeRequest(ModelRequest):
    """llama.cpp's request for the text of ids, with the names of control tokens."""

    tokens: list[int]

    def answer(self, session: Writer, *_) -> Iterator[bytes]:
        session.check_ids(self.tokens)
        return iter([to_json({"content": session.tokenizer.decode(self.tokens, marks=True)})])


def parse_request(body: bytes, kind: type[ModelRequest]) -> ModelRequest:
    """What a request's body asks for. Raises APIError."""
    try:
        fields = from_json(body)
    except ValueError as error:
        raise APIError(f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(fields, dict):
        raise APIError("the body must be a JSON object")
    for name, value in fields.items():
        if isinstance(value, float) and value.is_integer():  # 5.0 is 5: JSON has one kind of number
            fields[name] = int(value)
    return checked(fields, kind)


def checked(fields: dict, kind: type[ModelRequest]) -> ModelRequest:
    """Raises APIError."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise first_error(error) from None


def first_error(error: ValidationError) -> APIError:
    """What is wrong with the first field that is."""
    first, *_ = error.errors(include_url=False, include_input=False)
    name, *place = first["loc"]
    if place and isinstance(place[0], int):
        name = f"{name}[{place[0]}]"
        if len(place) > 1:
            name += f".{place[1]}"
    return APIError(f"{name}: {first['msg']}", param=name)
