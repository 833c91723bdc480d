"""Grammars of texts, in Lark as llguidance takes it: for a JSON schema, a regular expression, some
strings, and what llama.cpp calls a grammar; and how they are compiled for the tokens of a model.

This needs no torch, and imports llguidance when a grammar is compiled."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

from loading.files import one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from tokenizer import Tokenizer

MOST_CHARACTERS = 1 << 18  # of a grammar: larger ones take seconds to compile
MOST_STATES = 50_000  # of a grammar's automaton, 2 kB each
MOST_MULTIPLE = 100_000  # of multipleOf: the automaton for a million takes 5 s and 230 MB
CACHED = 16  # compiled grammars that are kept
# White space after commas and colons only: free white space may go on until the text is cut
JSON_STYLE = {
    "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "lenient": False,
}  # fmt: skip


def json_value(schema: dict | bool | str) -> str:
    """The value that a JSON schema describes, in Lark. Raises ValueError for what is no schema."""
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError("it must be a JSON object")
        text = json.dumps(schema)
        checked_size(text)
        schema = settled(schema)
        if not is_combined(schema):
            schema = closed(schema)
        return "%json " + json.dumps(schema | {"x-guidance": JSON_STYLE}, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the JSON schema: {error}") from None


# where a schema has others: as a value, in a list, by name
INSIDE = ("items", "additionalProperties")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions")
# what gives an object more properties than those beside it
COMBINED = {"anyOf", "oneOf", "$ref"}


def everywhere(change: Callable[[dict], dict]) -> Callable[[object], object]:
    """Make a change to a schema apply to all schemas inside it as well, the innermost first."""

    def run(schema: object) -> object:
        if not isinstance(schema, dict):
            return schema
        schema = dict(schema)
        for key, value in schema.items():
            if key in INSIDE:
                schema[key] = run(value)
            elif key in LISTED and isinstance(value, list):
                schema[key] = [*map(run, value)]
            elif key in NAMED and isinstance(value, dict):
                schema[key] = {name: run(item) for name, item in value.items()}
        return change(schema)

    return run


# Those that JSON Schema defines. By its rules others, such as "path" and "uint32", are annotations
FORMATS = (
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6",
    "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer",
    "relative-json-pointer", "regex",
)  # fmt: skip
# keywords that libraries write although they have no effect
EMPTY = {"propertyNames": {"type": "string"}, "uniqueItems": False}


@everywhere
def settled(schema: dict) -> dict:
    """A schema without keywords that have no effect."""
    schema = {k: value for k, value in schema.items() if k not in EMPTY or EMPTY[k] != value}
    if schema.get("format") not in FORMATS:
        schema.pop("format", None)
    return schema


def is_combined(schema: dict) -> bool:
    """Whether there are objects that get their properties from several schemas, none of which knows
    them all."""
    found: list[dict] = []

    @everywhere
    def collect(inner: dict) -> dict:
        found.append(inner)
        return inner

    collect(schema)
    return any(
        "allOf" in inner or "properties" in inner and inner.keys() & COMBINED for inner in found
    )


@everywhere
def closed(schema: dict) -> dict:
    """A schema whose objects have no properties but those it names, where it does not say so, as in
    llama.cpp: a small model would invent more and more of them."""
    named = schema.get("properties")
    required = schema.get("required", [])
    known = isinstance(named, dict) and isinstance(required, list)
    if known and {*map(str, required)} <= named.keys() and "patternProperties" not in schema:
        schema.setdefault("additionalProperties", False)
    return schema


def json_grammar(schema: dict | bool | str) -> str:
    return f"start: {json_value(schema)}"


def literal(text: str) -> str:
    """A string, in Lark."""
    return json.dumps(text, ensure_ascii=False)


def choice_grammar(choices: Sequence[str]) -> str:
    return f"start: {' | '.join(map(literal, choices))}"


def regex_grammar(pattern: str) -> str:
    written = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    escaped = re.sub(r"\\?\n|\\.|/", lambda m: written.get(m[0], m[0]), pattern)
    return f"start: /{escaped}/"


def lark_grammar(text: str) -> str:
    """A grammar in Lark or in llama.cpp's GBNF, in Lark. Raises ValueError."""
    if "::=" not in text:
        return text
    from llguidance import gbnf_to_lark as converter

    # Without this the converter writes "a"+? for ("a"+)?, which Lark does not take
    converter.RepetitionNode.is_atomic = lambda node: False
    checked_size(text)
    try:
        return converter.gbnf_to_lark(ESCAPE.sub(plain_character, text))
    except Exception as error:  # also IndexError and RecursionError, for what is no grammar
        raise ValueError(f"the grammar: {one_line(str(error))}") from None


# An escape sequence of GBNF; the groups match the code of a character
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def plain_character(escape: re.Match) -> str:
    """The character itself instead of its code, which llguidance's converter reads wrongly."""
    number = escape[1] or escape[2]
    if not number:
        return escape[0]
    code = int(number, 16)
    return f"\\x{code:02x}" if code < 128 else chr(code)


def is_one_rule(grammar: str | None) -> bool:
    """Whether it is what the functions above write, but for lark_grammar."""
    return grammar is not None and grammar.startswith("start: ") and "\n" not in grammar


def checked_size(grammar: str) -> None:
    """Raise ValueError for a grammar that is too large."""
    if len(grammar) > MOST_CHARACTERS:
        has = f"it has {len(grammar):,} characters"
        raise ValueError(f"the grammar or JSON schema is too large: {has}, of {MOST_CHARACTERS:,}")


def multiples_of(value: object) -> Iterator[Fraction]:
    """The value of every multipleOf in a JSON value."""
    parts = value if isinstance(value, list) else []
    if isinstance(value, dict):
        parts = value.values()
        multiple = value.get("multipleOf")
        if isinstance(multiple, int | float):
            yield Fraction(str(multiple))
    for part in parts:
        yield from multiples_of(part)


def checked_multiples(grammar: str) -> None:
    """Raise ValueError if the JSON schemas in a grammar ask for multiples of such large numbers that
    the automaton would take gigabytes."""
    found = set()
    for begin in re.finditer(r"%json\s*", grammar):
        with suppress(json.JSONDecodeError):  # llguidance says what is wrong
            schema, _ = json.JSONDecoder().raw_decode(grammar, begin.end())
            found |= {*multiples_of(schema)}
    if math.prod(each.numerator for each in found) > MOST_MULTIPLE:
        raise ValueError(f"the JSON schema: multipleOf may be {MOST_MULTIPLE:,} at most")


# ---- compiling them


class GrammarError(ValueError):
    """A grammar is wrong or too complex, which may turn out only while the text is being written."""


class Grammars:
    """Compiles grammars for the tokens of a model."""

    is_tokenizer_wrapper = True  # llguidance asks for this, and for the four that follow

    def __init__(self, tokenizer: Tokenizer, size: int, eos: Collection[int]):
        """size: of the model's vocabulary. eos: the ids that may end a text."""
        from llguidance import LLParserLimits, LLTokenizer

        self._tokenizer = tokenizer
        self.eos_token_id = min(eos, default=0)
        self.bos_token_id = None
        self.tokens = [tokenizer.bytes_of(id) for id in range(size)]
        self.special_token_ids = [id for id, text in enumerate(self.tokens) if not text]
        names = {id: name for name, id in tokenizer.control.items()}
        for id in self.special_token_ids:
            self.tokens[id] = names.get(id, f"<token {id}>").encode()
        self._tokens = LLTokenizer(self, n_vocab=size, eos_token=[*eos])
        self._limits = LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=False)
        self._compiled = lru_cache(CACHED)(self._compile)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.vocabulary.encode_chat(text, [], after=True)

    def matcher(self, grammar: str) -> LLMatcher:
        """A new matcher for a grammar. Another thread may run while it is compiled. Raises
        ValueError."""
        return self._compiled(grammar).deep_copy()

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        checked_size(grammar)
        checked_multiples(grammar)
        source = LLMatcher.grammar_from_lark(grammar)
        compiled = LLMatcher(self._tokens, source, log_level=0, limits=self._limits)
        check(compiled)
        # A grammar that no text matches is refused now, not in the middle of the text
        compiled.compute_bitmask()
        check(compiled)
        return compiled


def check(matcher: LLMatcher) -> None:
    """Raise GrammarError if something is wrong with its grammar."""
    if error := matcher.get_error():
        first, *others = error.splitlines()
        # The others quote the grammar, but for what is wrong with a pattern
        said = [first, *(line for line in others if line.startswith("error: "))]
        raise GrammarError(f"the grammar or JSON schema: {one_line(' '.join(said))}")
