"""Prepares a JSON schema for llguidance: what the standard lets a reader ignore is left out, and what llguidance would
compute inexactly is made exact, or refused.

A constrained text must fit its schema, but it need not be able to become each text that fits. So a keyword may be
replaced by a narrower one. Where nothing else is said, a keyword stays as it is.

- `format` is an annotation (JSON Schema 2020-12, section 7.2.1): one that llguidance lacks is left out.
- llguidance fails at bounds at or beyond the ends of 64 bits, so they become the last double before, or none if they
  are astronomic. It reads numbers as doubles, with at most one rounding if they have a coefficient of at most 2^53 and
  a power of ten of at most 22; others are refused.
- `propertyNames` become properties, or a pattern of them.
- `pattern`: (?=A) at its beginning is a pattern of its own. Patterns with (?!A) that Pydantic and Zod write are
  replaced by narrower ones.
- `exclusiveMinimum: true` is that of draft 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, TypeGuard

from ..io.errors import DiffbitError
from ..io.fields import shown

FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ONE = ("items", "additionalProperties", "additionalItems", "unevaluatedItems", "unevaluatedProperties", "contains",
       "not", "if", "then", "else")  # fmt: skip
SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}  # the side that is open
LENGTHS = ("maxLength", "maxItems", "maxProperties")
LEAST, MOST = -(1 << 63), (1 << 63) - 1
LARGEST = (1 << 63) - 1024  # the double below
ASTRONOMIC = 1e100  # a bound that no text reaches
EXACT, POWER = 1 << 53, 22  # of a double
LONG = 1 << 31
ANNOTATIONS = frozenset(
    ("title", "description", "$comment", "examples", "default", "deprecated", "readOnly", "writeOnly", "$id", "$schema")
)
NARROWER = {  # of patterns that Zod 4 writes
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$":
        r"^[A-Za-z0-9_+-]+@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$":
        r"^P(?:\d+W|\d+D(T\d+H)?|T\d+H(\d+M)?|T\d+M(\d+S)?|T\d+S)$",
}  # fmt: skip
# Pydantic's Decimal, of any size, and with max_digits and decimal_places
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
SIZED_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*"
    r"\(\?:\\d\{0,(\d+)\}\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)\\d\{0,\1\}\\\.\\d\{0,(\d+)\}0\*\$\)"
)


def prepared(schema: Mapping[str, Any], lenient: bool = False) -> dict[str, Any]:
    """Return a schema that allows no text which `schema` does not. lenient: leave out what cannot be enforced.

    Raises DiffbitError with the place of a keyword that cannot be enforced, or of a type that does not exist.
    """
    try:
        return _schema(schema, "#", lenient)
    except RecursionError:
        raise DiffbitError("the JSON schema is nested too deeply") from None


class _CannotEnforceError(Exception):
    """Says why a keyword cannot be enforced."""


def _schema(schema: Mapping[str, Any], place: str, lenient: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in schema.items():
        where = f"{place}/{key}"
        if key in NAMED and isinstance(value, Mapping):
            result[key] = {name: _inner(part, f"{where}/{name}", lenient) for name, part in value.items()}
        elif key in SEVERAL and isinstance(value, list):
            result[key] = [_inner(part, f"{where}/{index}", lenient) for index, part in enumerate(value)]
        else:
            result[key] = _inner(value, where, lenient) if key in ONE else value
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in TYPES:
            raise DiffbitError(f"the JSON schema cannot be used at {place}: Invalid type: {kind}")
    for change in (_annotations, _bounds, _values, _pattern, _names):
        try:
            change(result)
        except _CannotEnforceError as error:
            keyword, why = error.args
            if not lenient:
                raise DiffbitError(f"the JSON schema cannot be used at {place}/{keyword}: {why}") from None
            del result[keyword]
    return result


def _inner(part: Any, place: str, lenient: bool) -> Any:
    return _schema(part, place, lenient) if isinstance(part, Mapping) else part


def _annotations(schema: dict[str, Any]) -> None:
    if isinstance(format := schema.get("format"), str) and format not in FORMATS:
        del schema["format"]
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    for key in LENGTHS:
        if _is_number(schema.get(key)) and schema[key] >= LONG:
            del schema[key]


def _bounds(schema: dict[str, Any]) -> None:
    for key, plain in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(key), bool) and schema.pop(key) and plain in schema:
            schema[key] = schema.pop(plain)
    for key, side in BOUNDS.items():
        if not _is_number(value := schema.get(key)):
            continue
        if value <= LEAST if side < 0 else value >= MOST:
            schema[key] = side * LARGEST
            if abs(value) > ASTRONOMIC:
                del schema[key]
        else:
            schema[key] = _exact(key, value)


def _values(schema: dict[str, Any]) -> None:
    if "const" in schema:
        schema["const"] = _exact("const", schema["const"])
    if isinstance(schema.get("enum"), list):
        schema["enum"] = [_exact("enum", value) for value in schema["enum"]]


def _exact(keyword: str, value: Any) -> Any:
    """Return a JSON value whose numbers llguidance computes exactly."""
    if isinstance(value, Mapping):
        return {key: _exact(keyword, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_exact(keyword, item) for item in value]
    if not _is_number(value):
        return value
    inexact = _CannotEnforceError(keyword, f"the number {shown(value)} has more digits than llguidance computes with")
    try:
        integer = int(value)
    except (OverflowError, ValueError):  # infinite or not a number, which JSON does not have
        raise inexact from None
    if integer == value:
        if not LEAST < integer <= MOST or int(float(integer)) != integer:
            raise inexact
        return integer
    _, digits, power = Decimal(repr(value)).as_tuple()
    if int("".join(map(str, digits))) > EXACT or abs(int(power)) > POWER:
        raise inexact
    return value


def _pattern(schema: dict[str, Any]) -> None:
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or "(?" not in pattern:
        return
    patterns = _without_look_ahead(pattern)
    if any(re.search(r"\(\?(<?[=!])", part) for part in patterns):
        raise _CannotEnforceError(
            "pattern", "look-ahead and look-behind are supported as (?=...) at the beginning only"
        )
    schema["pattern"], *more = patterns
    if more:
        parts = schema.get("allOf", [])
        schema["allOf"] = [*(parts if isinstance(parts, list) else []), *({"pattern": part} for part in more)]


def _without_look_ahead(pattern: str) -> list[str]:
    """Return patterns that all match where this one does."""
    if pattern == DECIMAL:
        return [r"^[+-]?\d+(\.\d+)?$"]
    if sized := SIZED_DECIMAL.fullmatch(pattern):
        before, after = map(int, sized.groups())
        digits = rf"\d{{1,{before}}}" if before else "0"
        return [rf"^[+-]?{digits}(\.\d{{1,{after}}})?$" if after else rf"^[+-]?{digits}$"]
    if pattern in NARROWER:
        return [NARROWER[pattern]]
    patterns = []
    while pattern.startswith("^(?=") and (end := _closing(pattern, 1)):
        patterns.append(f"^(?:{pattern[4:end]})")
        pattern = f"^{pattern[end + 1 :]}"
    alternatives = "|" in re.sub(r"\\.|\[(?:\\.|[^\]])*\]|\((?:\\.|[^()])*\)", "", pattern)
    return [f"{pattern[:1]}(?:{pattern[1:]})" if patterns and alternatives else pattern, *patterns]


def _closing(pattern: str, begin: int) -> int:
    """Return where the parenthesis at `begin` is closed; 0: nowhere."""
    depth, in_class, position = 0, False, begin
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
            if not depth:
                return position
        position += 1
    return 0


def _names(schema: dict[str, Any]) -> None:
    """Replace propertyNames by properties (enum, const), or by a pattern of the other ones."""
    names = schema.get("propertyNames")
    if names is None:
        return
    rule = {key: value for key, value in names.items() if key not in ANNOTATIONS} if isinstance(names, Mapping) else {}
    if names is True or (isinstance(names, Mapping) and rule in ({}, {"type": "string"})):
        del schema["propertyNames"]
        return
    rule.pop("type", None)
    allows, pattern, listed = _allowed_names(rule)
    additional = schema.get("additionalProperties", True)
    if "patternProperties" in schema or names is False or "$ref" in schema:
        raise _CannotEnforceError("propertyNames", "they do not go together with patternProperties or a reference")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise _CannotEnforceError("properties", f"they are {shown(properties)}, wanted an object")
    properties = {name: part for name, part in properties.items() if allows(name)}
    if listed is not None:
        if additional is not False:
            properties |= {name: additional for name in listed if name not in properties}
    elif additional is not False:
        schema["patternProperties"] = {pattern: additional}
    schema |= {"properties": properties, "additionalProperties": False}
    del schema["propertyNames"]


def _allowed_names(rule: Mapping[str, Any]) -> tuple[Callable[[str], bool], str, list[str] | None]:
    """Return, for propertyNames: whether they allow a name, a pattern of them, and all of them if they are listed."""
    listed = [rule["const"]] if rule.keys() == {"const"} else rule.get("enum") if rule.keys() == {"enum"} else None
    if isinstance(listed, list):
        names = [name for name in listed if isinstance(name, str)]
        return names.__contains__, "", names
    pattern = rule.get("pattern")
    if rule.keys() == {"pattern"} and isinstance(pattern, str) and "(?" not in pattern:
        try:
            return lambda name: re.search(pattern, name) is not None, pattern, None
        except re.error:
            pass
    shortest, longest = rule.get("minLength", 0), rule.get("maxLength", LONG)
    if rule.keys() <= {"minLength", "maxLength"} and isinstance(shortest, int) and isinstance(longest, int):
        lengths = f"{{{shortest},{'' if longest >= LONG else longest}}}"
        return lambda name: shortest <= len(name) <= longest, rf"^[\s\S]{lengths}$", None
    raise _CannotEnforceError("propertyNames", "only enum, const, pattern, and minLength with maxLength are supported")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
