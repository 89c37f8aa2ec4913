"""Schemas and grammars that a generator makes: a random text under each must fit, or one sentence refuses it.

python -m tests.fuzz.schemas [CASES [FIRST]]     # prints the cases that failed, and what they did

What fits is said by `jsonschema` (with its own reading of formats), and by Python's `json`, which sees keys that come
twice. Schemas are those that Pydantic, Zod, OpenAPI generators and people write, with numbers at the ends of 53 and 64
bits; grammars are chains, nests, alternatives and repetitions of a chosen size. No case may end this process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np

from diffbit.io.errors import DiffbitError
from diffbit.runtime import Grammars, Sampler, Tokenizer

TOKENIZER = Path(__file__).parents[2] / "examples/pico/diff_v1/tokenizer.json"
END = 0
MOST_TOKENS = 120
MOST_CHARACTERS = 400  # of a sentence
NAMES = ("id", "name", "größe", "a b", 'q"', "a\\b", "x_1", "x_2", "tags", "")
NUMBERS = (
    0, 1, -1, 7, 100, 2**31, 2**53 - 1, 2**53, 2**53 + 1, 2**60, 2**63 - 1, 2**63, 2**64, -(2**53) - 1, -(2**63),
    123456789012345678, -(2**63) - 1, 0.5, -0.0, 1.0, 1e-7, 3.25, 0.1, 1e16, 1e22, 1e300, 3.141592653589793,
    0.30000000000000004,
)  # fmt: skip
BOUNDS = tuple(number for number in NUMBERS if abs(number) < 1e100)  # those beyond are taken for none
FORMATS = (
    "date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "uri", "hostname", "duration", "uri-reference",
    "int64", "binary", "password", "made-up",
)  # fmt: skip
PATTERNS = (
    "^[A-Z]{2}-[0-9]+$", "^(ab|cd)+e$", "abc", "^a", "z$", "[0-9]{3}", "^#[0-9a-f]{6}$", r"^\d{2}:\d{2}$", r"\w+@\w+",
    "^$", "a|b", "^(a|b)$", "^a|b$", r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^(?=.*[0-9])[a-z0-9]{4,8}$", "(?<=a)b",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)", r"^[^\"\\]{1,3}$", "ä+", "[",
)  # fmt: skip
ANNOTATIONS: tuple[dict[str, Any], ...] = (
    {"title": "T"}, {"description": "d" * 50}, {"examples": [1, "a"]}, {"default": None}, {"readOnly": True},
    {"deprecated": True}, {"$comment": "c"}, {"contentEncoding": "base64"}, {"x-order": 3}, {"nullable": False},
)  # fmt: skip


def any_schema(random: Random, depth: int = 0, definitions: int = 0) -> Any:
    """A schema. definitions: how many `#/$defs/dN` it may refer to."""
    kinds = ["string", "pattern", "format", "integer", "number", "boolean", "null", "enum", "const"]
    if depth < 3:
        kinds += ["object"] * 4 + ["record"] * 2 + ["array", "tuple", "anyOf", "oneOf", "allOf", "true"]
    kinds += ["ref"] * bool(definitions)
    kind = random.choice(kinds)
    if kind == "true":
        return True

    def inner() -> Any:
        return any_schema(random, depth + 1, definitions)

    made: dict[str, Any] = {"type": kind}
    if kind == "string":
        made |= some(random, {"minLength": random.randint(0, 3), "maxLength": random.choice((3, 9, 2**40, 2**63))})
    elif kind == "pattern":
        made = {"type": "string", "pattern": random.choice(PATTERNS)}
    elif kind == "format":
        made = {"type": "string", "format": random.choice(FORMATS)}
    elif kind in ("integer", "number"):
        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        made |= {name: random.choice(BOUNDS) for name in names if random.random() < 0.3}
        made |= some(random, {"multipleOf": random.choice((1, 2, 5, 0.25, 0.01, 1000003))}, 0.1)
    elif kind == "enum":
        made = {"enum": random.sample([*NUMBERS, "one", 'a"\\', None, True, [1], {"k": "v"}, ""], random.randint(1, 4))}
    elif kind == "const":
        made = {"const": random.choice((*NUMBERS, "x", None, False, {"a": [1, 2**54]}, [2**53 + 1]))}
    elif kind == "object":
        names = random.sample(NAMES, random.randint(0, 4))
        made["properties"] = {name: inner() for name in names}
        made |= some(random, {"required": [name for name in names if random.random() < 0.7]}, 0.8)
        made |= some(random, {"additionalProperties": random.choice([False, True, inner()])}, 0.8)
        made |= some(random, {"minProperties": random.randint(0, 4)}, 0.2)
    elif kind == "record":
        made = {"type": "object", "additionalProperties": inner()}
        rules = ({"type": "string"}, True, {"enum": ["a", "ab", "b"]}, {"pattern": "^x"}, {"const": "only"},
                 {"pattern": "^(a|ab|b)$"}, {"format": "date"}, {"minLength": 2, "maxLength": 3})  # fmt: skip
        made |= some(random, {"propertyNames": random.choice(rules)}, 0.7)
        made |= some(random, {"minProperties": random.randint(0, 4), "properties": {"ab": {"type": "null"}}}, 0.4)
        if random.random() < 0.3:
            made |= {"patternProperties": {random.choice(("^x", "^(a|b)$", "^a?b$")): inner()}}
            made |= {"additionalProperties": False}
    elif kind == "array":
        least = random.randint(0, 2)
        made |= {"items": inner(), "minItems": least, "maxItems": random.choice((least + 2, 2**40))}
        made |= some(random, {"uniqueItems": random.random() < 0.2}, 0.2)
    elif kind == "tuple":
        made = {"type": "array", "prefixItems": [inner() for _ in range(random.randint(1, 3))], "items": False}
        made["minItems"] = len(made["prefixItems"])
    elif kind in ("anyOf", "oneOf"):
        made = {kind: [inner() for _ in range(random.randint(1, 3))]}
    elif kind == "allOf":
        made = {"allOf": [{"type": "integer"}, {"minimum": random.choice(BOUNDS)}]}
    elif kind == "ref":
        made = {"$ref": f"#/$defs/d{random.randrange(definitions)}"}
    made |= some(random, random.choice(ANNOTATIONS), 0.2)
    return made | some(random, {random.choice(("not", "if", "unevaluatedProperties")): {"type": "null"}}, 0.02)


def some(random: Random, keywords: dict[str, Any], chance: float = 0.5) -> dict[str, Any]:
    return {key: value for key, value in keywords.items() if random.random() < chance}


def schema_of(number: int) -> Any:
    random = Random(f"schema {number}")
    count = random.choice((0, 0, 0, 1, 2))
    schema = any_schema(random, 0, count)
    if count and isinstance(schema, dict):
        schema["$defs"] = {f"d{index}": any_schema(random, 2, count) for index in range(count)}
    return schema


def grammar_of(number: int) -> str:
    """A grammar of a size from 1 to 10,000."""
    random = Random(f"grammar {number}")
    size = int(10 ** (4 * random.random()))
    kind = random.choice(("chain", "nest", "wide", "repeated", "regex", "schema", "left", "right", "gbnf", "ambiguous"))
    return {
        "chain": lambda: "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(size)) + f'r{size}: "x"',
        "nest": lambda: f'start: {"(" * size}"x"{")" * size}',
        "wide": lambda: "start: " + " | ".join(f'"{i}"' for i in range(size)),
        "repeated": lambda: f'start: "a"{{{size},{2 * size}}} /b{{0,{size}}}/',
        "regex": lambda: f"start: /(a|b)*a(a|b){{{size}}}/",
        "schema": lambda: "start: %json " + json.dumps({"$ref": "#/$defs/d0", "$defs": {
            **{f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(size)}, f"d{size}": {"type": "null"}}}),
        "left": lambda: 'start: start "a" | ' + "".join(f'"{i % 7}" ' for i in range(size)),
        "right": lambda: "start: r0\n" + "".join(f'r{i}: "a" r{(i * 7 + 3) % size} | "b"\n' for i in range(size)),
        "gbnf": lambda: "root ::= r0\n" + "".join(f'r{i} ::= "x" r{i + 1}?\n' for i in range(size)) + f'r{size} ::= ""',
        "ambiguous": lambda: 'start: a*\na: ("x"? "x"?)*' + ' | ("x" "x")' * min(size, 300),
    }[kind]()  # fmt: skip


class Place:
    """Grammars of a tokenizer, and how cases ended."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer(TOKENIZER)
        self.grammars = Grammars(self.tokenizer, [END])
        self.outcomes: Counter[str] = Counter()

    def text(self, constraint: Any, number: int) -> tuple[str, bool]:
        """A text of a model that knows nothing -> it, and whether it has its end."""
        random = np.random.default_rng(number)
        most = max(MOST_TOKENS, (constraint.shortest or 0) + 1)
        sampler = Sampler(1.0, seed=number, top_k=int(random.choice([0, 5, 50])), constraint=constraint)
        sampler.start(0, most)
        tokens: list[int] = []
        while len(tokens) < most and (not tokens or tokens[-1] != END):
            tokens.append(sampler(random.standard_normal(self.tokenizer.vocab_size).astype(np.float32), tokens))
        return self.tokenizer.decode(tokens), tokens[-1] == END

    def problem_of_schema(self, schema: Any, number: int = 0) -> str | None:
        """What was wrong with a text under a schema; None: nothing, or the schema was refused."""
        try:
            constraint = self.grammars.json_schema(schema)
            text, ended = self.text(constraint, number)
        except DiffbitError as error:
            self.outcomes["schemas refused"] += 1
            return sentence_problem(str(error))
        self.outcomes["schemas held"] += 1
        if not ended:
            return f"no end: {text[-300:]}"
        try:
            value = json.loads(text, object_pairs_hook=without_twice)
            jsonschema.Draft202012Validator(schema).validate(value)
        except RecursionError:  # of jsonschema, where a schema refers to itself without a value between
            self.outcomes["schemas not judged"] += 1
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{text[:300]}: {str(error).splitlines()[0][:300]}"
        return None

    def problem_of_grammar(self, grammar: str, number: int = 0) -> str | None:
        try:
            self.text(self.grammars.grammar(grammar), number)
        except DiffbitError as error:
            self.outcomes["grammars refused"] += 1
            return sentence_problem(str(error))
        self.outcomes["grammars held"] += 1
        return None


def sentence_problem(sentence: str) -> str | None:
    wrong = "\n" in sentence or len(sentence) > MOST_CHARACTERS
    return f"no sentence: {sentence[:2000]}" if wrong else None


def without_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"a key comes twice: {[key for key, _ in pairs]}")
    return dict(pairs)


def problems(count: int, first: int = 0, place: Place | None = None) -> list[str]:
    """Of so many cases; one in ten is a grammar."""
    place = place or Place()
    found = []
    for number in range(first, first + count):
        if number % 10:
            case = schema_of(number)
            problem = place.problem_of_schema(case, number)
        else:
            case = grammar_of(number)
            problem = place.problem_of_grammar(case, number)
        if problem:
            found.append(f"--- {number} {json.dumps(case, ensure_ascii=False)[:700]}\n{problem}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int, nargs="?", default=2000)
    parser.add_argument("first", type=int, nargs="?", default=0)
    options = parser.parse_args()
    place, failed = Place(), 0
    for begin in range(options.first, options.first + options.count, 100):
        for problem in problems(min(100, options.first + options.count - begin), begin, place):
            failed += 1
            print(problem + "\n", flush=True)
    print(", ".join(f"{name} {count}" for name, count in sorted(place.outcomes.items())))
    print(f"{options.count} cases, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
