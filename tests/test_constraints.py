"""Tests of grammars and of what else says which token may come next."""

import json
import random
import re
import resource
import time

import pytest
import torch

from constraints import MOST_DIGITS, Constraint, Digits
from grammars import (
    choice_grammar,
    closed,
    json_grammar,
    lark_grammar,
    literal,
    regex_grammar,
)
from session import Session
from tests.helpers import TALES


@pytest.fixture(scope="module")
def session():
    return Session(TALES, dtype="fp32", device="cpu")


def test_a_constraint_of_eos_and_what_comes_before(session):
    V = session.model.config.vocab_size
    may = lambda constraint, id: bool(constraint.mask()[id // 32] >> id % 32 & 1)
    constraint = Constraint(V, [2, 31, 63], min_tokens=2)
    for left in 2, 1, 0:
        assert [may(constraint, id) for id in (2, 31, 63, 3)] == [left == 0] * 3 + [True]
        assert not constraint.ended
        constraint.accept(5)
    constraint.accept(31)
    assert constraint.ended
    matcher = session.grammars.matcher(choice_grammar(["a"]))
    constraint = Constraint(V, [2], 0, matcher, "</t>", session.token_text)
    text = "x </</t>"
    for id in session.tokenizer.encode(text, bos=False):
        assert may(constraint, 300) and not may(constraint, 2)
        constraint.accept(id)
    assert [session.token_text(i) for i in range(V) if may(constraint, i)] == ["a"]


def test_grammars_of_all_kinds(session):
    def texts(grammar: str) -> set[str]:
        asks = lambda seed: session.generate("Once", grammar=grammar, n=40, seed=seed, temp=2)
        return {asks(seed).finish().text for seed in range(4)}

    strings = ["Paris", ' "x" \\ </s>\n', "<|im_end|>"]
    assert texts(choice_grammar(strings)) <= {*strings}
    assert {texts(choice_grammar([text])).pop() for text in strings} == {*strings}
    for pattern in r"[a-c]{3}/\d\.\n", r"a\/b", "(x|y)\nz", "x\\\nz":
        assert all(re.fullmatch(pattern, text) for text in texts(regex_grammar(pattern)))
    pairs = {a + b for a in "xyz" for b in "xyz"}
    assert texts(lark_grammar('start: a a\na: "x" | /[yz]/')) <= pairs
    assert texts(lark_grammar('root ::= ("yes" | "no") "!"')) <= {"yes!", "no!"}
    assert texts(lark_grammar('root ::= (("b"{2})? "c"){2}')) <= {"cc", "bbcc", "cbbc", "bbcbbc"}
    assert texts(lark_grammar(r'root ::= "caf\u00e9\u0022" "\\u0041"')) == {'café"\\u0041'}
    assert texts(lark_grammar(r"root ::= [\u00e0-\u00ff] [\U0001F600-\U0001F64F]"))
    assert texts(json_grammar({"const": "a </s> é"})) == {'"a </s> é"'}
    assert texts(json_grammar({"const": None})) == {"null"}
    assert literal('"\n') == r'"\"\n"'
    ended = session.generate("Once", grammar=choice_grammar(["Paris"]), n=40).finish()
    assert ended.ended_by == "eos" and ended.text == "Paris"
    scored = session.generate("Once", grammar=choice_grammar(["Paris"]), logprobs=2, n=40).finish()
    assert scored.text == "Paris" and len(scored.logprobs) == len(scored.ids)
    cut = session.generate("Once", schema={"type": "string"}, n=2).finish()
    assert cut.ended_by == "length"
    endless = dict(grammar="start: /[a-z .]+/", n=40, temp=1.5, ignore_eos=True)
    for seed in range(4):
        assert session.generate("Once", seed=seed, **endless).finish().ended_by == "length"
    counted = session.generate("Once", schema={"type": "boolean"}, n=9, temp=0).finish()
    assert counted.timings.new_tokens == len(counted.ids)
    free = session.generate("Once", n=9, temp=0).finish()
    assert free.ended_by == "length", "nothing is left of it"


def test_what_else_a_text_asks_for(session):
    said = lambda **options: session.generate("Once upon a time", n=40, temp=0, **options).finish()
    plain = said()
    [fox] = {*said(logit_bias={300: 50}).ids}
    assert fox == 300
    assert plain.ids[0] not in said(logit_bias={plain.ids[0]: -100}).ids
    counts = lambda text: max(text.ids.count(id) for id in text.ids)
    assert counts(said(frequency_penalty=2)) < counts(plain)
    assert len({*said(presence_penalty=2).ids}) > len({*plain.ids})
    assert said(presence_penalty=2).ids[0] == plain.ids[0], "the prompt's tokens are not penalised"
    again = said(presence_penalty=2).ids
    assert said(presence_penalty=2).ids == again, "counts begin anew"
    stop = plain.ids[3]
    stopped = said(stop_token_ids=[stop])
    assert stopped.ids == plain.ids[:3] and stopped.ended_by == "eos"
    later = said(stop_token_ids=[stop], min_tokens=6)
    assert len(later.ids) >= 6 and stop not in later.ids[:6]
    size = session.model.config.vocab_size
    for wrong in dict(logit_bias={size: 1}), dict(stop_token_ids=[size]), dict(stop_token_ids=[-1]):
        with pytest.raises(ValueError, match="there is no token"):
            said(**wrong)


# ---- JSON schemas


def any_schema(chance: random.Random, depth: int = 3) -> dict:
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const"]
    if depth:
        kinds += ["object", "array", "union", "ref"] * 2
    match chance.choice(kinds):
        case "enum":
            values = ["a", "é </s>", 3, -1.5, True, None, "<|im_end|>", "\n"]
            return {"enum": chance.sample(values, 3)}
        case "const":
            return {"const": chance.choice([{"a": [1]}, "żółw", 7])}
        case "string":
            return {"type": "string", "maxLength": chance.randrange(8)}
        case "integer" | "number" as kind if chance.random() < 0.5:
            return {"type": kind}
        case "integer":
            low = chance.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + chance.randrange(99)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 10}
        case "object":
            names = chance.sample(["name", "größe", "x y", 'a"b', "日本"], chance.randrange(4))
            return {
                "type": "object",
                "properties": {name: any_schema(chance, depth - 1) for name in names},
                "required": names[: chance.randrange(len(names) + 1)],
                "additionalProperties": False,
            }
        case "array":
            items = any_schema(chance, depth - 1)
            return {"type": "array", "items": items, "minItems": chance.randrange(2), "maxItems": 2}
        case "union":
            return {"anyOf": [any_schema(chance, depth - 1) for _ in range(2)]}
        case "ref":
            return {"$ref": "#/$defs/node"}
        case kind:
            return {"type": kind}


def test_random_schemas(session):
    jsonschema = pytest.importorskip("jsonschema")
    chance = random.Random(0)
    ended = 0
    for i in range(100):
        schema = any_schema(chance)
        schema["$defs"] = {"node": {"type": "integer", "minimum": 0, "maximum": 9}}
        text = session.generate("A fox", schema=schema, n=200, temp=1.5, seed=i).finish()
        if text.ended_by == "eos":
            jsonschema.validate(json.loads(text.text), schema)
            ended += 1
    assert ended > 80


def test_objects_have_the_properties_that_are_named(session):
    inner = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}
    listed = {"type": "array", "items": inner, "maxItems": 2}
    properties = {"properties": {"$ref": "#/$defs/i"}, "l": listed}
    schema = {"$defs": {"i": inner}, "properties": properties}
    for seed in range(5):
        asked = dict(schema=schema | {"type": "object"}, n=100, temp=2, seed=seed)
        value = json.loads(session.generate("A fox", **asked).finish().text)
        assert value.keys() <= {"properties", "l"}
        for each in [*value.get("l", []), value.get("properties", {"b": 1})]:
            assert each.keys() == {"b"}
    for as_it_is in (
        {"type": "object"}, {"properties": {}, "required": ["a"]},
        {"properties": {"a": {}}, "additionalProperties": True},
        {"properties": {}, "patternProperties": {"^a": {}}}, {"enum": [{"properties": {}}]}, {"properties": 5}, True,
    ):  # fmt: skip
        assert closed(as_it_is) == as_it_is
    more = {"properties": {"c": {"type": "boolean"}}, "required": ["c"]}
    several = {"allOf": [inner, more]}, inner | {"anyOf": [more]}, inner | {"$ref": "#/$defs/m"}
    for combined in several:
        schema = combined | {"$defs": {"m": more}}
        assert "additionalProperties" not in json_grammar(schema)
        assert session.generate("A fox", schema=schema, n=1).finish().ids


def test_numbers_end(session):
    """A small model would write digits until the text is cut. What a number may be is not changed."""
    one = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    for schema in one, {"type": "integer"}, {"type": "number", "minimum": 0, "maximum": 1}:
        for seed in range(4):
            text = session.generate("A fox", schema=schema, n=120, temp=seed, seed=seed).finish()
            assert text.ended_by == "eos" and json.loads(text.text) is not None
            assert max(map(len, re.findall("[0-9]+", text.text))) <= MOST_DIGITS
    long = 10**40
    of_digits = {"type": "string", "pattern": "^[0-9]{40}$"}
    for schema in {"const": long}, of_digits, {"enum": [f"{long}"]}:
        text = session.generate("A fox", schema=schema, n=60, temp=0).finish()
        assert text.ended_by == "eos" and len(text.text) >= 40
    digits = session.generate("A fox", grammar=regex_grammar("[0-9]{30,}x"), n=60, temp=0).finish()
    assert len(digits.text) > MOST_DIGITS, "only numbers in JSON have a limit"


def test_digits_are_left_out_where_others_may_come():
    digits = Digits([b"1", b'"', b"x", b"25", b"a7"] + [b"y"] * 60)
    row = lambda *ids: torch.tensor([sum(1 << id for id in ids), 0, 0], dtype=torch.int32)
    for before, after in (((0, 2, 3, 4), (2, 4)), ((0, 3), (0, 3)), ((0, 1, 2), (0, 1, 2))):
        mask = row(*before)
        digits.leave_out(mask)
        assert torch.equal(mask, row(*after))


def test_what_libraries_write_into_schemas_is_no_hindrance(session):
    """Formats that JSON Schema does not know, such as pydantic's and OpenAPI's, and keywords that are
    always true; others that are not supported are refused by name."""
    names = {"type": "object", "propertyNames": {"type": "string"}}
    names["properties"] = {"é": {"const": 1}}
    path = {"type": "string", "format": "file-path", "maxLength": 3}
    word = {"type": "array", "items": path, "uniqueItems": False, "maxItems": 1}
    by_pattern = {"type": "object", "patternProperties": {"^a": path}}
    inside = {"allOf": [path]}, {"properties": {"format": path}}
    for schema in names, path, word, by_pattern, *inside:
        assert session.generate("A fox", schema=schema, n=1).finish().ids
    for schema, name in (
        ({"propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"type": "string", "format": "json-pointer"}, "json-pointer"),
        ({"type": "string", "pattern": "(?!a)b"}, "look-around"),
    ):
        with pytest.raises(ValueError, match=name):
            session.generate("A fox", schema=schema)


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def doubled(depth: int) -> dict:
    inner = doubled(depth - 1) if depth else {}
    return {"anyOf": [{"properties": {"a": inner}}, {"properties": {"b": inner}}]}


HOSTILE = {
    "impossible": {"type": "array", "items": {}, "minItems": 5, "maxItems": 2},
    "large": {"enum": [f"value {i}" for i in range(60_000)]},
    "large, of one string": {"description": "x" * (1 << 20)},
    "deep": nested(10_000),
    "half as deep": nested(150),
    "exponential": doubled(14),
    "elsewhere": {"$ref": "http://example.com/schema.json"},
    "a file": {"$ref": "file:///etc/passwd"},
    "unsupported": {"type": "array", "uniqueItems": True},
    "multiples": {"type": "integer", "multipleOf": 123456789},
    "multiples together": {"allOf": [{"multipleOf": 99991}, {"multipleOf": 99989}]},
    "lenient": {"not": {}, "x-guidance": {"lenient": True}},
    "no schema": [1],
    "no JSON": "{",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas(session, name):
    """Refused in a second, in little memory."""
    session.generate("Once", schema={}, n=1).finish()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises(ValueError) as refused:
        session.generate("Once", schema=HOSTILE[name])
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    if name == "unsupported":
        assert "uniqueItems" in str(refused.value)
    assert time.process_time() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + 300_000, "kB"
    assert session.generate("Once", schema={"const": 1}).finish().text == "1"


@pytest.mark.parametrize("kind, said", [
    (regex_grammar, "(a+)+$"), (regex_grammar, "((a{1,100}){1,100}){1,100}"),
    (regex_grammar, "(.*a.{900}b.*c.{900}){9}"), (regex_grammar, "(?!a)"), (regex_grammar, "("),
    (lark_grammar, 'root ::= "a"{1000000000}'),
])  # fmt: skip
def test_hostile_patterns(session, kind, said):
    start = time.process_time()
    try:
        text = session.generate("Once", grammar=kind(said), n=30).finish()
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert text.ended_by in ("length", "eos")
    assert time.process_time() - start < 3
