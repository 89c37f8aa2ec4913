"""Texts under schemas and grammars, from a model of 2 bits and from random logits."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest

from diffbit.io.errors import DiffbitError
from diffbit.runtime import Abandoned, Grammars, Sampler, Tokenizer, json_schema
from diffbit.runtime import constraint as constraint_module
from diffbit.runtime.constraint import LONGEST
from diffbit.runtime.grammar_process import Keys

END = 0
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: list[Any] = [
    True,
    PERSON,
    {"type": "array", "items": PERSON, "minItems": 2},
    {"type": "string", "pattern": "^[a-z]+@[a-z]+\\.org$"},
    {"type": "string", "format": "date-time"},
    {"anyOf": [{"type": "null"}, {"type": "number", "minimum": 3, "maximum": 5}]},
    {"$ref": "#/$defs/node", "$defs": {"node": {
        "type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["next"], "additionalProperties": False}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(trained: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer(trained("diff_v1") / "tokenizer.json")


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, [END])


def text(tokenizer: Tokenizer, sampler: Sampler, limit: int, seed: int) -> tuple[str, list[int]]:
    """A text of a model that knows nothing -> it, and its tokens."""
    random = np.random.default_rng(seed)
    tokens = [5, 6]
    sampler.start(len(tokens), limit)
    while len(tokens) < 2 + limit and tokens[-1] != END:
        tokens.append(sampler(random.standard_normal(tokenizer.vocab_size + 8).astype(np.float32), tokens))
    return tokenizer.decode(tokens[2:]), tokens[2:]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_every_limit_leaves_valid_json(schema: Any, tokenizer: Tokenizer, grammars: Grammars) -> None:
    """From the shortest text on, also where a text without a limit would go on for ever."""
    constraint = grammars.json_schema(schema)
    assert constraint.shortest is not None
    for seed, limit in enumerate([*range(constraint.shortest + 1, constraint.shortest + 20), 60]):
        answer, tokens = text(tokenizer, Sampler(1.0, seed=seed, top_k=20, constraint=constraint), limit, seed)
        assert tokens[-1] == END and len(tokens) <= limit
        jsonschema.validate(json.loads(answer), schema)


def test_a_limit_that_is_far_changes_nothing(tokenizer: Tokenizer, grammars: Grammars) -> None:
    constraint = grammars.json_schema({"type": "array", "items": {"type": "integer"}, "maxItems": 3})
    texts = {text(tokenizer, Sampler(1.0, seed=1, constraint=constraint), limit, 1)[0] for limit in (100, 1000, 10_000)}
    assert len(texts) == 1


def test_a_copy_is_another_text(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """Two samplers whose steps alternate, as rows of a batch do."""
    first = grammars.json_schema({"const": "first"})
    second = first.copy()
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    samplers = [Sampler(constraint=first), Sampler(constraint=second)]
    texts: list[list[int]] = [[], []]
    for sampler in samplers:
        sampler.start(0)
    for step in range(12):
        for tokens, sampler in zip(texts, samplers, strict=True):
            if END not in tokens and (sampler is samplers[0] or step % 2):
                tokens.append(sampler(logits, tokens))
    assert tokenizer.decode(texts[0]) == '"first"' and '"first"'.startswith(tokenizer.decode(texts[1]))


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "yes" | "no" [0-9]{2}', "yes|no[0-9]{2}"),  # GBNF
        ('start: "<" WORD ">"\nWORD: /[a-z]{3,5}/', "<[a-z]{3,5}>"),  # Lark
    ],
)
def test_grammars(grammar: str, pattern: str, tokenizer: Tokenizer, grammars: Grammars) -> None:
    for seed in range(5):
        sampler = Sampler(1.0, seed=seed, constraint=grammars.grammar(grammar))
        assert re.fullmatch(pattern, text(tokenizer, sampler, 30, seed)[0])


def test_options_act_among_the_allowed_tokens(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """A bias moves the choice, and top-k counts allowed tokens only."""
    logits = np.arange(tokenizer.vocab_size, dtype=np.float32)
    item = tokenizer.encode("1")[-1]
    for options in ({}, {"temperature": 1.0, "top_k": 1, "seed": 1}):
        sampler = Sampler(**options, logit_bias={item: 1000}, constraint=grammars.json_schema({"enum": [1, 2, 3]}))
        sampler.start(0)
        assert sampler(logits, []) == item


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (5, "the JSON schema is 5, wanted an object"),
        ({"type": "foo"}, "cannot be used at #: Invalid type: foo"),
        ({"properties": {"a": {"items": {"type": "string", "pattern": "(["}}}}, "at #/properties/a/items: regex parse"),
        ({"$defs": {"x": {"type": "foo"}}, "anyOf": [{"$ref": "#/$defs/x"}]}, "at #/$defs/x: Invalid type"),
        ({"type": "string", "not": {"const": "a"}}, 'Unimplemented keys: ["not"]'),
        ({"$ref": "https://a.example/b"}, "does not fetch"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, f"at most {LONGEST} tokens"),
        ({"type": "string", "minLength": 10**8}, "bound its lengths"),
        ({"enum": ["x" * 200_000]}, "200,014 characters, wanted at most 131,072"),
    ],
)
def test_schemas_that_cannot_be_used(schema: Any, says: str, grammars: Grammars) -> None:
    with pytest.raises(DiffbitError) as error:
        grammars.json_schema(schema)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_deep_schemas(grammars: Grammars) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(900):
        schema = {"type": "array", "items": schema}
    with pytest.raises(DiffbitError, match="JSON schema"):
        grammars.json_schema(schema)


@pytest.mark.parametrize("grammar", ["start: (", "root ::= missing", "", "start: " + "(" * 1000, "x" * 200_000])
def test_grammars_that_cannot_be_used(grammar: str, grammars: Grammars) -> None:
    with pytest.raises(DiffbitError, match="the grammar"):
        grammars.grammar(grammar)


def in_object(value: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": value}, "required": ["a"], "additionalProperties": False}


def chain(size: int) -> dict[str, Any]:
    links = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(size)}
    return {"$defs": links | {f"d{size}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def nested(size: int) -> dict[str, Any]:
    links = {f"d{index}": {"properties": {"a": {"$ref": f"#/$defs/d{index + 1}"}}} for index in range(size)}
    return {"$defs": links | {f"d{size}": {"type": "null"}}, "$ref": "#/$defs/d0"}


MULTIPLES = {"allOf": [{"type": "number", "multipleOf": 1e-07}, {"type": "number", "multipleOf": 0.0003},
                       {"type": "number", "multipleOf": 99999999}]}  # fmt: skip


@pytest.mark.parametrize(
    "schema",
    [in_object({"const": -(2**63)}), in_object({"enum": [-(2**63), 0]}), chain(2503), nested(2000), MULTIPLES],
    ids=["const", "enum", "chain", "nested", "multiples"],
)
def test_a_schema_does_not_end_the_process(schema: Any, tokenizer: Tokenizer, grammars: Grammars) -> None:
    """It is refused, or its texts fit; here a stack overflow or a lack of memory would end pytest."""
    try:
        answer, _ = text(tokenizer, Sampler(1.0, seed=1, top_k=20, constraint=grammars.json_schema(schema)), 60, 1)
    except DiffbitError as error:
        assert "\n" not in str(error) and str(error).startswith("the JSON schema cannot be used")
    else:  # jsonschema itself would go too deep
        assert isinstance(json.loads(answer), object) and (answer == "null" or "properties" in schema["$defs"]["d0"])


@pytest.mark.parametrize(
    "grammar",
    [
        "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(5000)) + 'r5000: "x"',
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(2000)) + 'r2000 ::= "x"',
        "start: %json " + json.dumps(chain(2503)),
    ],
    ids=["lark", "gbnf", "json"],
)
def test_chains_of_rules_are_followed(grammar: str, tokenizer: Tokenizer, grammars: Grammars) -> None:
    answer, _ = text(tokenizer, Sampler(constraint=grammars.grammar(grammar)), 60, 1)
    assert answer in ("x", "null")


def test_limits_of_time_and_memory(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of processor time, so that others on the machine change nothing; the refusal is kept, like a grammar."""
    slow = {"type": "integer", "multipleOf": 1000003}
    begin = os.times()
    for _ in range(2):
        with pytest.raises(DiffbitError, match="takes more than 2 seconds, 512 MiB of memory, or too deep"):
            grammars.json_schema(slow)
    assert sum(os.times()[:2]) - sum(begin[:2]) < 1  # of this process
    assert grammars.json_schema(PERSON).shortest  # others go on


def test_compiling_stops_when_nobody_waits(grammars: Grammars) -> None:
    questions = []

    def is_wanted() -> bool:
        questions.append(1)
        return len(questions) < 3

    with pytest.raises(Abandoned):
        grammars.json_schema({"type": "integer", "multipleOf": 1000033}, is_wanted)


def test_a_schema_is_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = in_object({"const": "paid"})
    first = grammars.json_schema(schema)
    monkeypatch.setattr(grammars, "_compile", lambda *_: pytest.fail("it is compiled again"))
    assert grammars.json_schema(schema).shortest == first.shortest


def test_without_processes(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the system cannot fork: the same texts and errors."""
    monkeypatch.setattr(constraint_module, "CAN_FORK", False)
    unforked = Grammars(tokenizer, [END])
    answer, _ = text(tokenizer, Sampler(1.0, seed=3, top_k=20, constraint=unforked.json_schema(PERSON)), 40, 3)
    jsonschema.validate(json.loads(answer), PERSON)
    with pytest.raises(DiffbitError, match="at #/properties/a: Unimplemented"):
        unforked.json_schema(in_object({"not": {}}))


def test_a_text_whose_process_was_killed(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """It fails alone; the next one of the same grammar goes on."""
    constraint = grammars.json_schema(PERSON)
    constraint.allowed(tokenizer.vocab_size)
    assert constraint._text is not None and isinstance(constraint._text._place, socket.socket)
    constraint._text._place.shutdown(socket.SHUT_RDWR)
    with pytest.raises(DiffbitError, match="became too complex"):
        constraint.accept(5)
        constraint.allowed(tokenizer.vocab_size)
    assert len(constraint.copy().allowed(tokenizer.vocab_size))


@pytest.mark.parametrize(
    ("schema", "right"),
    [
        ({"type": "string", "pattern": "abc"}, '"abc"'),
        ({"type": "string", "format": "email"}, '"a@b.co"'),
        ({"type": "string", "format": "uri-reference"}, '"x"'),
        ({"propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}}, '{"a": "b"}'),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}},
         '{"a": null}'),
        ({"propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "null"}}, '{"x1": null}'),
        ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, '"-12.5"'),
        ({"type": "string",
          "pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"}, '"123.45"'),
        ({"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{4,8}$"}, '"abc1"'),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, str(2**62 + 1)),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "18"),
        ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, "6.02e23"),
        ({"const": 2**60}, str(2**60)),
        ({"enum": [1e16, "x"]}, "10000000000000000"),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "4"),  # draft 4
        ({"type": "string", "maxLength": 2**63}, '"x"'),
        ({"type": "array", "uniqueItems": False}, "[1, 1]"),
    ],
)  # fmt: skip
def test_schemas_as_programs_write_them(schema: Any, right: str, tokenizer: Tokenizer, grammars: Grammars) -> None:
    """A text that fits can be written, and what is written fits."""
    constraint = grammars.json_schema(in_object(schema)).copy()
    constraint.start()
    for token in grammars.vocabulary.greedy_tokenize(f'{{"a": {right}}}'):
        assert token in constraint.allowed(tokenizer.vocab_size), right
        constraint.accept(token)
    assert END in constraint.allowed(tokenizer.vocab_size)
    judge = in_object(schema if "exclusiveMinimum" not in schema else {"exclusiveMinimum": 3})
    for seed in range(3):
        sampler = Sampler(1.0, seed=seed, top_k=30, constraint=constraint)
        jsonschema.validate(json.loads(text(tokenizer, sampler, constraint.shortest + 30, seed)[0]), judge)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"const": 123456789012345678}, "at #/properties/a/const: the number 123456789012345678 has more digits"),
        ({"enum": [1, 2**53 + 1]}, "at #/properties/a/enum: the number 9007199254740993"),
        ({"type": "integer", "maximum": 2**53 + 1}, "at #/properties/a/maximum"),
        ({"const": 0.30000000000000004}, "more digits than llguidance computes with"),
        ({"type": "string", "pattern": "^a(?!b)"}, "look-ahead and look-behind are supported as"),
        ({"type": "object", "propertyNames": {"format": "date"}}, "at #/properties/a/propertyNames: only enum"),
        ({"const": float("inf")}, "more digits"),
    ],
)
def test_what_would_be_inexact_is_refused(schema: Any, says: str, grammars: Grammars) -> None:
    with pytest.raises(DiffbitError) as error:
        grammars.json_schema(in_object(schema))
    assert says in str(error.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 4},
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "null"},
         "required": ["a"], "minProperties": 3},
        {"type": "object", "patternProperties": {"^(a|ab|b)$": {"enum": [1]}}, "additionalProperties": False,
         "minProperties": 3},
        {"type": "object", "patternProperties": {"^x$": {"enum": [1]}}, "additionalProperties": False},
        {"type": "array", "items": {"type": "object", "patternProperties": {"^[ab]$": {"type": "null"}},
                                    "additionalProperties": False}, "minItems": 2, "maxItems": 3},
    ],
)  # fmt: skip
def test_no_key_comes_twice(schema: Any, tokenizer: Tokenizer, grammars: Grammars) -> None:
    """Also where only few keys are possible, and in the way that a limit leaves."""
    constraint = grammars.json_schema(schema)
    for seed in range(8):
        sampler = Sampler(1.0, seed=seed, top_k=20, constraint=constraint)
        answer, tokens = text(tokenizer, sampler, constraint.shortest + 1 + 10 * seed, seed)
        assert tokens[-1] == END
        pairs = json.JSONDecoder(object_pairs_hook=list).decode(answer)
        for item in [pairs] if schema["type"] == "object" else pairs:
            assert len(dict(item)) == len(item), answer
        jsonschema.validate(json.loads(answer), schema)


def test_keys_are_compared_as_json_reads_them() -> None:
    """Against Python's json, for texts in any pieces: escapes, nests, texts that look like keys."""
    twice = ['{"a": 1, "a"', '{"a": 1, "\\u0061"', '[{"a": {"a": 2}, "a"', '{"a\\"": 1, "a\\""', '{"": "", ""']
    once = ['{"a": {"a": 1}, "b": "a"', '[{"a": 1}, {"a"', '{"a": ["a", "a"]', '{"a\\\\": 1, "a"', '["a", "a"']
    for texts, repeats in ((twice, True), (once, False)):
        for line in texts:
            for cut in range(len(line)):
                keys = Keys().after(line[:cut].encode())
                assert keys is not None
                assert (keys.after(line[cut:].encode()) is None) == repeats, line


def test_a_model_without_an_end_token_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DiffbitError, match="no token that ends a text"):
        Grammars(tokenizer, [])


def test_a_busy_machine_refuses_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"enum": ["a schema that no other test has"]}
    with monkeypatch.context() as patch:
        patch.setattr(constraint_module, "PATIENCE", -1.0)
        patch.setattr(constraint_module, "ASKS_SECONDS", 0.0)
        with pytest.raises(DiffbitError, match="try again later"):
            grammars.json_schema(schema)
    assert grammars.json_schema(schema).shortest is not None


def test_schemas_of_wrong_types_are_taken_or_refused() -> None:
    """Each keyword with values of every type: a request must not end in a traceback."""
    draw = Random(0)
    keywords = [*json_schema.ONE, *json_schema.SEVERAL, *json_schema.NAMED, *json_schema.BOUNDS, *json_schema.LENGTHS]
    keywords += ["type", "format", "pattern", "enum", "const", "propertyNames", "required", "uniqueItems", "$ref"]
    plain = [None, True, 0, -(2**63), 1.5, 1e308, float("nan"), 10**400, "", "^(?=a)b", "(?!x)", "object"]

    def value(depth: int = 0) -> Any:
        kind = draw.randrange(9) if depth < 3 else 8
        if kind < 3:
            return {draw.choice(keywords): value(depth + 1) for _ in range(draw.randrange(4))}
        return [value(depth + 1) for _ in range(draw.randrange(3))] if kind < 5 else draw.choice(plain)

    outcomes = set()
    for _ in range(5000):
        schema = {draw.choice(keywords): value() for _ in range(draw.randrange(1, 4))}
        for lenient in (False, True):
            try:
                json_schema.prepared(schema, lenient)
                outcomes.add("taken")
            except DiffbitError:
                outcomes.add("refused")
    assert outcomes == {"taken", "refused"}
