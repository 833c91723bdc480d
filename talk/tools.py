"""Calls of tools and thinking, as models write them: a text is split into what is thought, what is
said and what is called.

Each family writes calls in its own way, a Style, which is found from the chat template. To add one,
add a row to STYLES: the first whose pattern is in a template counts. Arguments that are not JSON need
a class like XmlArguments. If a call is required, call_grammar has a model write a JSON object
between the style's `opens` and `close`."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from grammars import json_value, literal
from tokenizer import THINK, THOUGHT

if TYPE_CHECKING:
    from texts import Generation, Logprob, Piece


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str  # a JSON object


# calls, and how many characters they take; None if that is not decided
Found = tuple[list[Call], int] | None


class Part(NamedTuple):
    """A part of a text: of what is thought, or of what is said. A call is one with its name, others with
    its arguments, and one at its end, unless the text ends before."""

    kind: str  # "thought", "text", "call", "arguments", "called"
    text: str = ""  # of a call its id
    name: str = ""  # of a call


def call_id() -> str:
    """An identifier of a call, of nine letters and digits: Mistral's templates take no other."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


# ---- JSON as models write it

Tools = Mapping[str, dict]  # the JSON schemas of their arguments, by their names

_SPACE = re.compile(r"\s*")


def _no_json(name: str) -> None:
    raise ValueError(name)  # NaN, Infinity


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_json)  # newlines may be in strings


def json_at(text: str, begin: int) -> tuple[object, int] | None:
    """The JSON that begins there, after white space, and where it ends. None if it does not."""
    try:
        return _DECODER.raw_decode(text, _SPACE.match(text, begin).end())
    except (ValueError, RecursionError):
        return None


def call_of(value: object) -> Call | None:
    """The call that a JSON object describes. None if it describes none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters")) or {}
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments, strict=False)
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (value["name"] + text).encode()  # a lone surrogate is no text
    except (ValueError, RecursionError):
        return None
    return Call(value["name"], text) if isinstance(arguments, dict) else None


def as_type(value: str, properties: object, key: str) -> object:
    """A value that a model wrote as plain text, which is a string if its schema says so, or if it is
    no JSON."""
    schema = properties.get(key) if isinstance(properties, dict) else None
    if isinstance(schema, dict) and schema.get("type") == "string":
        return value
    found = json_at(value, 0)
    return found[0] if found and found[1] == len(value.rstrip()) else value


# ---- arguments as they are written: `take` is given what is new of a text, and returns what that adds to
# the arguments, how many characters it has read, and whether the call is complete


class JsonArguments:
    """A JSON object. It ends at its brace, or where something comes that is no JSON."""

    def __init__(self, inside: int):
        """inside: in how many objects or arrays it lies, which belong to the call."""
        self._inside = self._depth = inside
        self._string = self._escaped = self._complete = False

    def take(self, text: str) -> tuple[str, int, bool]:
        written = ""
        for i, char in enumerate(text):
            if not self._string and char == "<":  # such as </tool_call>
                return written, i, True
            if not self._complete:
                # models write newlines into strings
                written += json.dumps(char)[1:-1] if self._string and char < " " else char
            self._note(char)
            if self._complete and self._depth == 0:
                return written, i + 1, True
        return written, len(text), False

    def _note(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == '"':
            self._string = not self._string
        elif self._string:
            self._escaped = char == "\\"
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self._complete = self._complete or self._depth == self._inside


_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>(?:\n(.*?)\n|(?!\n)(.*?)|\n)</parameter>"
    r"(?=\s*<parameter=|\s*</function>)",
    re.DOTALL,
)
_END = re.compile(r"\s*</function>")


class XmlArguments:
    """Parameters of Qwen3-Coder's kind, each of which comes when it is complete."""

    def __init__(self, schema: dict):
        self._properties = schema.get("properties")
        self._before = "{"  # of what comes next

    def take(self, text: str) -> tuple[str, int, bool]:
        written = self._before
        self._before = ""
        place = 0
        # a search for the end is quick, where the pattern would look at each character again
        ended = lambda: text.find("</parameter>", place) >= 0
        while ended() and (parameter := _PARAMETER.match(text, place)):
            key, lines, value = parameter.groups(default="")
            value = as_type(lines or value, self._properties, key)
            written += f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
            place = parameter.end()
            if not _END.match(text, place):
                written += ", "
        if end := _END.match(text, place):
            return written + "}", end.end(), True
        return written, place, False


# ---- styles

_OBJECT = (
    r'\s*{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    r'"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?={)'
)


class Begun(NamedTuple):
    """A call whose arguments follow."""

    name: str
    arguments: JsonArguments | XmlArguments
    end: int  # characters before them


class Style(NamedTuple):
    """How a family of models writes calls: as objects of JSON after the first of its marks or, if it has
    one, in a way of its own."""

    template: str  # a pattern of its chat templates
    marks: Sequence[str]  # what a call begins with
    close: str  # what may follow it
    opens: str  # what is written before a call that is asked for,
    key: str  # and what it calls the arguments
    first: str = ""  # another mark, where it is the first of a text
    own: str = ""  # a pattern: a call up to its arguments, with its name
    own_arguments: Callable[[dict], JsonArguments | XmlArguments] | None = None  # by their schema

    @property
    def control(self) -> list[str]:
        """What may be a control token, and is needed to read a call."""
        return [*self.marks, "[ARGS]", "[CALL_ID]", self.close]

    @property
    def before_object(self) -> str:
        """A pattern of what comes before an object."""
        return f"(?:{re.escape(self.marks[0])}){'?' if self.first else ''}"

    def begun(self, text: str, tools: Tools) -> Begun | None:
        """The call with which a text begins, if it begins as models mostly write it."""
        if self.own and (found := re.match(self.own, text)):
            schema = tools.get(found[1], {})
            return Begun(found[1], self.own_arguments(schema), found.end())
        if found := re.match(self.before_object + _OBJECT, text):
            return Begun(found[1], JsonArguments(1), found.end())
        return None

    def calls(self, text: str, tools: Tools) -> Found:
        """What is called at the beginning of a text, which begins with a mark: nothing if it is no
        call."""
        if begun := self.begun(text, tools):
            written, end, complete = begun.arguments.take(text[begun.end :])
            values = [{"name": begun.name, "arguments": written}]
            end += begun.end
        else:
            before = re.match(self.before_object, text)
            value, end = (before and json_at(text, before.end())) or (None, 0)
            complete = isinstance(value, dict | list)
            values = value if isinstance(value, list) else [value]
        if not complete:
            return None
        calls = [*map(call_of, values)]
        if self.first and text.startswith(self.first):  # no mark tells that it is a call
            calls = [call if call and call.name in tools else None for call in calls]
        return (calls, end) if all(calls) else ([], end)


# <tool_call>{"name": .., "arguments": {..}}</tool_call>
HERMES = Style("<tool_call>", ["<tool_call>"], "</tool_call>", "<tool_call>\n", "arguments")
# <tool_call><function=NAME><parameter=KEY>VALUE</parameter> .. </function></tool_call>
CODER = HERMES._replace(
    template="<function=",
    marks=["<tool_call>", "<function="],
    own=r"(?:<tool_call>\s*)?<function=([^>\n]+)>",
    own_arguments=XmlArguments,
)
# [TOOL_CALLS] [{"name": .., "arguments": {..}}, ..] or [TOOL_CALLS]name[ARGS]{..}
MISTRAL = Style(
    r"\[TOOL_CALLS\]",
    ["[TOOL_CALLS]"],
    "",
    "[TOOL_CALLS]",
    "arguments",
    own=r"\[TOOL_CALLS\]\s*([^\s\[{]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?={)",
    own_arguments=lambda schema: JsonArguments(0),
)
# {"name": .., "parameters": {..}}, also after <|python_tag|>
LLAMA = Style(r'"parameters": |python_tag', ["<|python_tag|>"], "", "", "parameters", first="{")
STYLES = [CODER, MISTRAL, HERMES, LLAMA, HERMES._replace(template=r"\btools\b")]


def style_of(template: str) -> Style | None:
    """How a model calls tools, by its chat template. None if that knows no tools."""
    if not re.search(r"\btools\b", template):
        return None
    return next(style for style in STYLES if re.search(style.template, template))


def call_grammar(
    style: Style, tools: Tools, control: Mapping[str, int], text: str | None = None
) -> str:
    """One call of one of the tools, in Lark. control: ids of control tokens. text: a grammar of one
    rule, for what may be written instead. Raises ValueError."""
    opens = literal(style.opens) if style.opens else ""
    if style.opens in control:
        opens = f"<[{control[style.opens]}]>"
    closes = literal(f"\n{style.close}") if style.close else ""
    calls = []
    for name, schema in tools.items():
        arguments = json_value(schema) if schema else '"{}"'
        begin = f'{{"name": {literal(name)}, "{style.key}": '
        calls.append(f"{literal(begin)} {arguments} {literal('}')}")
    start = f"start: {opens} ({' | '.join(calls)}) {closes}"
    if text:
        start += f" | {text.removeprefix('start: ')}"
    return start


# ---- a text as it comes


def begun_mark(text: str, marks: Collection[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    sizes = range(1, max(map(len, marks), default=0))
    ends = (n for n in sizes if any(mark.startswith(text[-n:]) for mark in marks))
    return min(max(ends, default=0), len(text))


class Router:
    """Splits a text, as it comes, into parts. What may become a call or a mark is held back until
    that is decided; what is none is text, and nothing is lost but white space around calls and what
    is thought."""

    def __init__(
        self,
        style: Style | None = None,
        tools: Tools | None = None,
        thinks: bool = False,
        forced: bool = False,
    ):
        """style: how calls are written; None if there are none. thinks: the text begins within what is
        thought. forced: the text has to be a call, so what is left of one that was cut off is
        dropped instead of shown."""
        self.style = style
        self._forced = forced
        self.tools = tools or {}
        self._pending = ""
        self._space = ""  # held back: it may come before a call
        self._state = "thought" if thinks else "begin"
        self._bare = thinks  # white space is left out, since something begins here
        self._close = ""  # what may still end the last call
        self._arguments: JsonArguments | XmlArguments | None = None  # of a call that has begun
        self._first = True  # nothing is said or called so far
        self._tried = 0  # characters that were no whole call

    @property
    def thinks(self) -> bool:
        """Whether what comes next is thought."""
        return self._state == "thought"

    def push(self, text: str) -> list[Part]:
        self._pending += text
        return [*self._parts(last=False)]

    def finish(self) -> list[Part]:
        """What is still held back, once there is no more text."""
        if self._forced and not self.thinks:
            return []
        parts = [*self._parts(last=True)]
        if self._state == "text" and self._space and not self._bare:
            parts.append(Part("text", self._space))
        return parts

    def _parts(self, last: bool) -> Iterator[Part]:
        if self._state == "begin":
            text = self._pending.lstrip()
            if text.startswith(THINK):
                self._enter("thought", text.removeprefix(THINK))
            elif last or not THINK.startswith(text):
                self._state = "text"
        if self._state == "thought":
            thought, mark, rest = self._pending.partition(THOUGHT)
            if mark or last:
                yield from self._said(thought)
                self._enter("text", rest)
            else:
                yield from self._said_but(begun_mark(thought, [THOUGHT]))
        if self._state == "text":
            yield from self._text(last)

    def _enter(self, state: str, rest: str) -> None:
        self._state = state
        self._pending = rest
        self._space = ""
        self._bare = True

    def _text(self, last: bool) -> Iterator[Part]:
        if not self.style:
            yield from self._said_but(0)
            return
        while True:
            if self._arguments:
                yield from self._more_arguments()
                if self._arguments:
                    return
            if self._close and not self._closed(last):
                return
            mark = self._mark()
            if not mark:
                break
            begin = self._pending.index(mark)
            yield from self._said(self._pending[:begin])
            self._pending = self._pending[begin:]
            begun = self.style.begun(self._pending, self.tools)
            if begun and begun.name in self.tools:
                # its arguments come as they are written, whatever they become
                self._pending = self._pending[begun.end :]
                self._arguments = begun.arguments
                self._tried = 0
                yield Part("call", call_id(), begun.name)
                continue
            found = self._found(last)
            if not found:
                return
            calls, end = found
            if calls:
                self._called(end)
                for call in calls:
                    yield Part("call", call_id(), call.name)
                    yield from (Part("arguments", call.arguments), Part("called"))
            else:
                yield from self._said(mark)
                self._pending = self._pending[len(mark) :]
        yield from self._said_but(0 if last else begun_mark(self._pending, self.style.marks))

    def _more_arguments(self) -> Iterator[Part]:
        written, end, complete = self._arguments.take(self._pending)
        self._pending = self._pending[end:]
        if written:
            yield Part("arguments", written)
        if complete:
            self._arguments = None
            self._called(0)
            yield Part("called")

    def _called(self, end: int) -> None:
        """Go on after a call."""
        self._enter("text", self._pending[end:])
        self._first = False
        self._close = self.style.close

    def _closed(self, last: bool) -> bool:
        """Leave out what closes the last call. Returns whether it is decided if there is any."""
        text = self._pending.lstrip()
        if not last and text != self._close and self._close.startswith(text):
            return False
        if text.startswith(self._close):
            self._pending = text.removeprefix(self._close)
        self._close = ""
        return True

    def _mark(self) -> str:
        """The first mark in the text that is pending; empty if there is none."""
        first = self.style.first
        if first and self._first and self._pending.lstrip().startswith(first):
            return first
        places = [(self._pending.find(mark), mark) for mark in self.style.marks]
        return min((place for place in places if place[0] >= 0), default=(0, ""))[1]

    def _found(self, last: bool) -> Found:
        """The whole calls at the mark with which the pending text begins: None until that is
        decided."""
        new = self._pending[self._tried :]
        found = None
        if last or any(end in new for end in "}]>"):  # what a call ends in
            found = self.style.calls(self._pending, self.tools)
            self._tried = len(self._pending)
        if found or last:
            self._tried = 0
            return found or ([], 0)
        return None

    def _said_but(self, kept: int) -> Iterator[Part]:
        """All that is pending but for the last `kept` characters."""
        end = len(self._pending) - kept
        said = self._pending[:end]
        self._pending = self._pending[end:]
        yield from self._said(said)

    def _said(self, text: str) -> Iterator[Part]:
        text = self._space + text
        self._space = ""
        if self._bare:
            text = text.lstrip()
        if self.style or self._state == "thought":
            end = len(text.rstrip())
            self._space = text[end:]
            text = text[:end]
        if text:
            self._bare = False
            self._first = self._first and self._state == "thought"
            yield Part(self._state, text)


# ---- an answer


@dataclass
class AnsweredCall:
    """A call as it is answered."""

    id: str
    name: str
    arguments: str = ""  # incomplete if the text ended before


class Answer:
    """A text as it is read: an iterator of the new parts and log-probabilities after each token,
    which also collects them."""

    def __init__(self, text: Generation, router: Router | None = None, parallel: bool = True):
        """parallel: there may be several calls; otherwise the text ends after the first."""
        self.text = text
        self.calls: list[AnsweredCall] = []
        self.thought_tokens = 0
        self.said = {"text": "", "thought": ""}  # all of it
        self._router = router
        self._parallel = parallel

    def __iter__(self) -> Iterator[tuple[list[Part], list[Logprob]]]:
        for piece in self.text:
            parts = self._new(self._read(piece))
            yield parts, piece.logprobs
            if parts and parts[-1].kind == "called" and not self._parallel:
                self.text.close()
                return
        if self._router:
            yield self._new(self._router.finish()), []

    @property
    def finish_reason(self) -> str:
        """Why the text has ended, in OpenAI's words."""
        if self.text.ended_by in ("length", "context"):
            return "length"
        return "tool_calls" if self.calls else "stop"

    def _read(self, piece: Piece) -> list[Part]:
        if self._router:
            self.thought_tokens += len(piece.ids) if self._router.thinks else 0
            return self._router.push(piece.text)
        return [Part("text", piece.text)] if piece.text else []

    def _new(self, parts: list[Part]) -> list[Part]:
        """These parts or, if there may be one call, those up to its end."""
        for i, part in enumerate(parts):
            match part.kind:
                case "call":
                    self.calls.append(AnsweredCall(part.text, part.name))
                case "arguments":
                    self.calls[-1].arguments += part.text
                case "called" if not self._parallel:
                    return parts[: i + 1]
                case "text" | "thought":
                    self.said[part.kind] += part.text
        return parts
