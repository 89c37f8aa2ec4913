"""Texts under schemas and grammars, from a model of 2 bits and from random logits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from diffbit.io.errors import DiffbitError
from diffbit.runtime import Grammars, Sampler, Tokenizer
from diffbit.runtime.constraint import LONGEST

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


def text(tokenizer: Tokenizer, sampler: Sampler, most: int, seed: int) -> tuple[str, list[int]]:
    """A text of a model that knows nothing -> it, and its tokens."""
    random = np.random.default_rng(seed)
    tokens = [5, 6]
    sampler.start(len(tokens), most)
    while len(tokens) < 2 + most and tokens[-1] != END:
        tokens.append(sampler(random.standard_normal(tokenizer.vocab_size + 8).astype(np.float32), tokens))
    return tokenizer.decode(tokens[2:]), tokens[2:]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_every_limit_leaves_valid_json(schema: Any, tokenizer: Tokenizer, grammars: Grammars) -> None:
    """From the shortest text on, also where a text without a limit would go on for ever."""
    constraint = grammars.json_schema(schema)
    assert constraint.shortest is not None
    for seed, most in enumerate([*range(constraint.shortest + 1, constraint.shortest + 20), 60]):
        found, tokens = text(tokenizer, Sampler(1.0, seed=seed, top_k=20, constraint=constraint), most, seed)
        assert tokens[-1] == END and len(tokens) <= most
        jsonschema.validate(json.loads(found), schema)


def test_a_limit_that_is_far_changes_nothing(tokenizer: Tokenizer, grammars: Grammars) -> None:
    constraint = grammars.json_schema({"type": "array", "items": {"type": "integer"}, "maxItems": 3})
    texts = {text(tokenizer, Sampler(1.0, seed=1, constraint=constraint), most, 1)[0] for most in (100, 1000, 10_000)}
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
    one = tokenizer.encode("1")[-1]
    for options in ({}, {"temperature": 1.0, "top_k": 1, "seed": 1}):
        sampler = Sampler(**options, logit_bias={one: 1000}, constraint=grammars.json_schema({"enum": [1, 2, 3]}))
        sampler.start(0)
        assert sampler(logits, []) == one


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (5, "a JSON schema is an object, or true"),
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


def test_a_model_without_an_end(tokenizer: Tokenizer) -> None:
    with pytest.raises(DiffbitError, match="no token that ends a text"):
        Grammars(tokenizer, [])
