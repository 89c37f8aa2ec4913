"""Constrains generated text to a JSON schema or a grammar, with llguidance (https://github.com/guidance-ai/llguidance).

A constraint says for each step which tokens may come next; `Sampler` chooses among those, so every loop that takes a
sampler takes a constraint: `generate`, `Chat`, and each row of the server's batch.

A limit of tokens does not cut a constrained text: the constraint knows a short way to the end of the text (`_ending`)
and takes it while the limit still has room for it. It finds the way greedily, from forced bytes and single characters
that close what is open. For some grammars it finds none; their text is then cut like any other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..io.errors import DiffbitError, needs
from ..io.fields import located
from ..io.files import read_json
from ..io.tokenizer_files import tokenizer_errors
from .tokenizer import Tokenizer

MOST_CHARACTERS = 1 << 17  # of a schema or a grammar
MOST_PROBLEMS = 50  # parts of a schema that are compiled to find the one that is wrong
LONGEST = 2048  # tokens of the shortest text that a schema may ask for
CLOSE = 512  # tokens before the limit at which the way to the end is watched
# Characters in the order in which they end a text: what closes a string, an object or an array; then digits, signs that
# patterns want, the letters of null, true and false; all others; and last, what opens or escapes something
CLOSING = '"}]0123456789 -.:,/@_+ntf'
OPENING = "[{\\"
CLOSERS = 3  # of CLOSING: those that close something
STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes
SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions")  # objects whose values are schemas


class Grammars:
    """Makes constraints for the texts of one tokenizer. `end_tokens` end a text; compiled schemas are not kept.

    Raises MissingDependency without llguidance, DiffbitError for a model without end tokens.
    """

    def __init__(self, tokenizer: Tokenizer, end_tokens: Collection[int]) -> None:
        with needs("llguidance", "structured", "a JSON schema or a grammar"):
            from llguidance import LLMatcher, LLTokenizer, grammar_from
        if not end_tokens:
            raise DiffbitError("the model has no token that ends a text, so a schema or a grammar cannot be used")
        self._matcher, self._to_lark = LLMatcher, grammar_from
        with tokenizer_errors(tokenizer.path, "cannot be used for a grammar"):
            self.vocabulary = LLTokenizer(tokenizer.as_json(), eos_token=sorted(end_tokens))
        characters = [chr(code) for code in range(32, 127)]
        others = [one for one in characters if one not in CLOSING + OPENING]
        singles = [(one, self.vocabulary.greedy_tokenize(one)) for one in (*CLOSING, *others, *OPENING)]
        self.closing = [ids[0] for one, ids in singles if self.vocabulary.decode_bytes(ids[:1]) == one.encode()]

    def json_schema_file(self, file: Path) -> Constraint:
        """`json_schema` of the schema in a file."""
        schema = read_json(file)
        with located(file):
            return self.json_schema(schema)

    def json_schema(self, schema: object) -> Constraint:
        """Texts that are JSON values of a schema: an object, or true for any value.

        Raises DiffbitError with the place for a schema that is wrong, uses a keyword that llguidance lacks, or has no
        text of at most LONGEST tokens.
        """
        schema = {} if schema is True else schema
        if not isinstance(schema, Mapping):
            raise DiffbitError("a JSON schema is an object, or true for any value")
        try:
            text = json.dumps(schema)
        except (ValueError, RecursionError):
            raise DiffbitError("the JSON schema is nested too deeply") from None
        _check_length(text, "JSON schema")
        if problem := self._problem(schema):
            definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
            problems = islice(self._problems(schema, "#", definitions), MOST_PROBLEMS)
            place, problem = max(problems, key=lambda found: found[0].count("/"), default=("#", problem))
            raise DiffbitError(f"the JSON schema cannot be used at {place}: {problem}")
        constraint = Constraint(self, self._compiled(schema))
        if constraint.shortest is None:
            raise DiffbitError(
                f"no text of at most {LONGEST} tokens was found that the JSON schema allows; bound its lengths, and "
                "let references to itself be optional"
            )
        return constraint

    @staticmethod
    def rule(schema: object) -> str:
        """A JSON schema as a part of a Lark grammar."""
        return f"%json {json.dumps({'x-guidance': STYLE} | dict(schema) if isinstance(schema, Mapping) else schema)}"

    def grammar(self, text: str) -> Constraint:
        """Texts of a grammar: GBNF as llama.cpp reads it, or Lark as llguidance does."""
        _check_length(text, "grammar")
        try:
            compiled = self._to_lark("grammar", text)
        except ValueError as error:
            raise DiffbitError(f"the grammar cannot be read: {_line(error)}") from None
        matcher = self._matcher(self.vocabulary, compiled, log_level=0)
        if matcher.is_error():
            raise DiffbitError(f"the grammar cannot be used: {_line(matcher.get_error())}")
        return Constraint(self, matcher)

    def _compiled(self, schema: Mapping[str, Any]) -> Any:
        grammar = self._matcher.grammar_from_json_schema(json.dumps(schema), overrides=STYLE)
        return self._matcher(self.vocabulary, grammar, log_level=0)

    def _problem(self, schema: Mapping[str, Any]) -> str:
        """Why a schema cannot be compiled; empty if it can."""
        try:
            return _line(self._compiled(schema).get_error())
        except ValueError as error:
            return _line(error)

    def _problems(
        self, schema: Mapping[str, Any], place: str, definitions: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """(place, problem) of each part of a schema that cannot be compiled."""
        if problem := self._problem({**definitions, **schema}):
            yield place, problem
            for path, part in _parts(schema):
                yield from self._problems(part, f"{place}/{path}", definitions)


class Constraint:
    """Which tokens may come next in a text. `Sampler` asks `allowed` and tells `accept` what it chose.

    `shortest` is the number of tokens of a short text, None if none is known.
    """

    def __init__(self, grammars: Grammars, matcher: Any) -> None:
        self._grammars, self._start = grammars, matcher
        ending = self._ending(matcher, LONGEST)
        self.shortest = None if ending is None else len(ending)
        self.start()

    def copy(self) -> Constraint:
        """The same constraint, for another text."""
        other = object.__new__(Constraint)
        vars(other).update(vars(self))
        other.start()
        return other

    def start(self, most: int | None = None) -> None:
        """Begin a text of at most `most` tokens, the end token included."""
        self._now, self._left = self._start.deep_copy(), most
        self._way: list[int] | None = None  # tokens that lead to the end, once the limit is near

    def allowed(self, count: int) -> NDArray[np.int64]:
        """Ids below `count`, that of the model's tokens, of those that may come next, ascending."""
        bits = np.frombuffer(self._now.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[:count])
        if self._now.is_error() or not len(allowed):
            raise DiffbitError(f"the grammar became too complex for this text: {_line(self._now.get_error())}")
        return allowed

    def accept(self, token: int) -> int:
        """Continue with a token -> that token, or the one that leads to the end where the limit leaves no room."""
        if self._left is not None:
            if self._left <= CLOSE + 2 * (self.shortest or 0):
                token = self._in_time(token, self._left - 1)
            self._left -= 1
        self._now.consume_token(token)
        return token

    def _in_time(self, token: int, left: int) -> int:
        """The token if a text that goes on with it can end in time: `left` more tokens, the end token among them."""
        ends = self._grammars.vocabulary.eos_tokens
        way = self._ending(self._now, left) if self._way is None else self._way
        if token in ends or way is None:
            return token
        after = self._now.deep_copy()
        after.consume_token(token)
        self._way = self._ending(after, left - 1)
        if self._way is None:  # the way found before is long enough: the search may find a longer one from here
            token, *self._way = way or ends
        return token

    def _ending(self, matcher: Any, most: int) -> list[int] | None:
        """At most `most` tokens that lead to an end of the text, None if none are found."""
        matcher, vocabulary = matcher.deep_copy(), self._grammars.vocabulary
        tokens: list[int] = []
        used = Counter[int]()
        while not matcher.is_accepting():
            following = vocabulary.greedy_tokenize(matcher.compute_ff_bytes().decode(errors="ignore"))
            if not following or matcher.validate_tokens(following) < len(following):
                following = self._single(matcher, used)
            if not following or len(tokens) + len(following) > most or not matcher.consume_tokens(following):
                return None
            tokens += following
        return tokens if len(tokens) <= most else None

    def _single(self, matcher: Any, used: Counter[int]) -> list[int]:
        """The character that ends a text soonest. Of those that a pattern repeats, each has its turn."""
        closing = self._grammars.closing
        for token in closing[:CLOSERS]:
            if matcher.validate_tokens([token]):
                return [token]
        possible = [token for token in closing[CLOSERS:] if matcher.validate_tokens([token])]
        chosen = sorted(possible, key=used.__getitem__)[:1]
        used.update(chosen)
        return chosen


def _check_length(text: str, what: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise DiffbitError(f"the {what} has {len(text):,} characters, wanted at most {MOST_CHARACTERS:,}")


def _line(message: object) -> str:
    """A message of llguidance as part of a sentence."""
    return " ".join(str(message).split())[:300]


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, schema) of the schemas directly inside one."""
    for key, value in schema.items():
        if key in SUBSCHEMAS and isinstance(value, Mapping):
            named: Sequence[tuple[str, Any]] = [(f"{key}/{name}", part) for name, part in value.items()]
        elif isinstance(value, list) and key not in ("enum", "examples", "required"):
            named = [(f"{key}/{index}", part) for index, part in enumerate(value)]
        else:
            named = [] if key in ("const", "default") else [(key, value)]
        yield from ((path, part) for path, part in named if isinstance(part, Mapping))
