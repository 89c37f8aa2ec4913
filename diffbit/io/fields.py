"""Reads values of JSON and TOML by types: one value, or a frozen dataclass from an object.

    @dataclass(frozen=True)
    class Attention:
        num_heads: Annotated[int, bounds(1, 1 << 14)]
        norm: Annotated[str, one_of("rms", "layer")] = "rms"

        def __post_init__(self) -> None:
            check(self)  # of values that Python code gives

    read(Attention, {"num_heads": "x"}, "layers[3].mixer")
    # DiffbitError: layers[3].mixer.num_heads is 'x', wanted a whole number from 1 to 16384

A type is bool, int, float (finite), str, Any or another class, X | Y, tuple[X, ...], tuple[X, Y], Mapping[K, X], a
dataclass, or Annotated with Rules, or with a function that reads another form: (value, place) -> X. A Rule that uses
other names than its argument is defined outside of the class, whose annotations are evaluated without them.

Needs only the standard library, because the device runtime uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from itertools import islice
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from .errors import DiffbitError

LONGEST = 60  # characters of a value in a message
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", tuple: "a list"}
_WRONG = object()  # in the place of a value that is not of its type


class FieldError(DiffbitError):
    """A field, `place`, has a value that it cannot have."""

    def __init__(self, place: str, sentence: str) -> None:
        super().__init__(sentence)
        self.place = place


@dataclass(frozen=True)
class Rule:
    """What a value must be besides its type: in words, in which {} stands for those of the type, and as a test."""

    words: str
    allows: Callable[[Any], object]
    is_of_length: bool = False  # then it is tested before the entries are read: there may be millions


def bounds(low: float, high: float | None = None, words: str = "") -> Rule:
    words = words or (f"{{}} of at least {low}" if high is None else f"{{}} from {low} to {high}")
    return Rule(words, lambda value: low <= value and (high is None or value <= high))


def of_length(low: int, high: int) -> Rule:
    return Rule(f"{{}} of {low} to {high} entries", lambda value: low <= len(value) <= high, is_of_length=True)


def one_of(*choices: Any, words: str = "") -> Rule:
    return Rule(words or f"one of {', '.join(map(str, choices))}", lambda value: value in choices)


OMITTED: Mapping[str, bool] = {"omitted": True}  # metadata of a field that `to_dict` omits where it has its default
Count = Annotated[int, bounds(1, 1 << 31)]
Positive = Annotated[float, Rule("{} above 0", lambda value: value > 0)]
NotNegative = Annotated[float, bounds(0)]


def read(kind: Any, value: object, place: str, *, extra: bool = False) -> Any:
    """Return a value as the type `kind` has it: tuples for lists, dataclasses for objects, floats for whole numbers.

    place: its name, such as "layers[3].mixer"; "" for a whole file. extra: ignore a dataclass's unknown fields.
    """
    result = _fit(kind, value, place, extra)
    if result is _WRONG:
        raise FieldError(place, f"{place or 'it'} is {shown(value)}, wanted {_words(kind)}")
    return result


def get(
    values: Mapping[str, Any], name: str, kind: Any, default: Any = MISSING, place: str = "", *, extra: bool = False
) -> Any:
    """Read a field of the object at `place`. If there is a default, it stands for a field that is absent or null."""
    place = f"{place}.{name}" if place else name
    if values.get(name) is None and default is not MISSING:
        return default
    if name not in values:
        raise FieldError(place, f"{place} is missing, wanted {_words(kind)}")
    return read(kind, values[name], place, extra=extra)


def check(record: Any, place: str = "") -> None:
    """Raise FieldError for a field of a dataclass that is not of its type."""
    for name, kind in kinds(record.__class__).items():
        read(kind, getattr(record, name), f"{place}.{name}" if place else name)


def to_dict(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, which `read` takes back. A field that came later is `OMITTED` where it has its
    default, so that files of records without it stay the same."""
    omitted = {field.name: field.default for field in fields(record) if field.metadata.get("omitted")}
    return {name: value for name, value in asdict(record).items() if omitted.get(name, _WRONG) != value}


@cache
def kinds(record: Any) -> dict[str, Any]:
    """Return {field: type} of a dataclass."""
    hints = get_type_hints(record, include_extras=True)
    return {field.name: hints[field.name] for field in fields(record)}


@contextmanager
def located(place: object, advice: str = "") -> Iterator[None]:
    """Begin the sentence of a DiffbitError with a place, such as a file, and end it with advice."""
    try:
        yield
    except DiffbitError as error:
        raise DiffbitError(f"{place}: {error}{advice}") from None


def shown(value: object) -> str:
    """Return a value as messages quote it: its beginning, if it is long."""
    try:
        text = repr(_beginning(value))
    except (ValueError, RecursionError):  # an integer of thousands of digits; lists in lists in lists
        text = f"a large {type(value).__name__}"
    size = f" ({len(value)} entries)" if isinstance(value, list | tuple) else ""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}...{size}"


def _beginning(value: Any) -> Any:
    """As much of a value as `shown` can show: without it, its text might have gigabytes."""
    if isinstance(value, str | bytes):
        return value[:LONGEST]
    if type(value) in (list, tuple):
        return type(value)(map(_beginning, value[:LONGEST]))
    if type(value) is dict:
        return {_beginning(key): _beginning(item) for key, item in islice(value.items(), LONGEST)}
    return value


def _fit(kind: Any, value: Any, place: str, extra: bool) -> Any:
    """Return the value as `read` does, or _WRONG. Raises FieldError for a part of it that is wrong."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated and callable(inner[1]):
        return value if isinstance(value, inner[0]) else inner[1](value, place)
    if origin is Annotated:
        lengths = inner[1:] if isinstance(value, list | tuple | Mapping) else ()
        if not all(rule.allows(value) for rule in lengths if rule.is_of_length):
            return _WRONG
        result = _fit(inner[0], value, place, extra)
        return result if result is not _WRONG and all(rule.allows(result) for rule in inner[1:]) else _WRONG
    if origin in (Union, UnionType):
        results = (_fit(option, value, place, extra) for option in inner)
        return next((result for result in results if result is not _WRONG), _WRONG)
    if origin is tuple and isinstance(value, list | tuple) and (inner[-1] is ... or len(inner) == len(value)):
        items = zip(inner[:1] * len(value) if inner[-1] is ... else inner, value, strict=True)
        return tuple(read(of_item, item, f"{place}[{i}]", extra=extra) for i, (of_item, item) in enumerate(items))
    if origin is Mapping and isinstance(value, Mapping):
        keys = {key: read(inner[0], key, f"a key of {place}") for key in value}
        return {keys[key]: read(inner[1], item, f"{place}[{shown(key)}]", extra=extra) for key, item in value.items()}
    if origin is not None or (kind in (int, float) and isinstance(value, bool)):
        return _WRONG
    if kind is float:
        return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else _WRONG
    if is_dataclass(kind) and isinstance(value, Mapping):
        return _record(kind, value, place, extra)
    return value if kind is Any or isinstance(value, kind) else _WRONG


def _record(record: Any, values: Mapping[str, Any], place: str, extra: bool) -> Any:
    start, known = f"{place}: " if place else "", kinds(record)
    if not extra and (unknown := sorted(values.keys() - known.keys())):
        raise FieldError(place, f"{start}unknown field {shown(unknown[0])}, wanted one of {', '.join(known)}")
    needed = {field.name for field in fields(record) if field.default is field.default_factory is MISSING}
    names = [name for name in known if name in values or name in needed]
    result = {name: get(values, name, known[name], place=place, extra=extra) for name in names}
    try:
        return record(**result)
    except DiffbitError as error:  # fields that do not go together
        raise FieldError(place, f"{start}{error}") from None


def _words(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        words = _words(inner[0])
        for rule in () if callable(inner[1]) else inner[1:]:
            words = rule.words.replace("{}", words)
        return words
    if origin in (Union, UnionType):
        return " or ".join(map(_words, inner))
    if origin is tuple and inner[-1] is not ...:
        return f"a list of {len(inner)} entries"
    return "none" if kind is NoneType else _WORDS.get(origin or kind, "an object")
