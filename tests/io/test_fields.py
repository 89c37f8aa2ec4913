"""Values by their types: what is read, what is refused, and the sentence that says so."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest

from diffbit.io.errors import DiffbitError
from diffbit.io.fields import (
    LONGEST,
    Count,
    FieldError,
    NotNegative,
    Positive,
    Rule,
    bounds,
    check,
    get,
    located,
    of_length,
    one_of,
    read,
    shown,
)

EVEN = Rule("an even number", lambda value: value % 2 == 0)


def pair(value: object, place: str) -> tuple[int, int]:
    """A pair is also read from text, such as "3x4"."""
    text = read(str, value, place)
    if text.count("x") != 1:
        raise FieldError(place, f"{place} is {shown(text)}, wanted two numbers, such as 3x4")
    left, _, right = text.partition("x")
    return int(left), int(right)


@dataclass(frozen=True)
class Head:
    width: Annotated[int, EVEN]
    gain: Positive = 1.0

    def __post_init__(self) -> None:
        check(self)
        if self.gain > self.width:
            raise DiffbitError(f"gain is {self.gain}, wanted at most the width, which is {self.width}")


@dataclass(frozen=True)
class Model:
    layers: Annotated[tuple[Head, ...], of_length(1, 3)]
    norm: Annotated[str, one_of("rms", "layer")] = "rms"
    window: Count | None = None
    tied: bool = False
    size: Annotated[tuple, pair] = (1, 1)  # type: ignore[type-arg]
    names: Mapping[str, float] = field(default_factory=dict)


HEAD: dict[str, Any] = {"width": 4}
DEEP = "[" * 400 + "]" * 400


def test_an_object_becomes_a_dataclass() -> None:
    text = '{"layers": [{"width": 4, "gain": 2}], "window": null, "tied": true, "size": "3x4", "names": {"a": 1}}'
    model = read(Model, json.loads(text), "")
    assert model == Model((Head(4, 2.0),), "rms", None, True, (3, 4), {"a": 1.0})
    assert type(model.layers[0].gain) is float and type(model.names["a"]) is float
    assert read(Model, {"layers": [Head(2)]}, "") == Model((Head(2),))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "layers is missing, wanted a list of 1 to 3 entries"),
        ({"layers": None}, "layers is None, wanted a list of 1 to 3 entries"),
        ({"layers": []}, "layers is [], wanted a list of 1 to 3 entries"),
        ({"layers": [HEAD, 5]}, "layers[1] is 5, wanted an object"),
        ({"layers": [HEAD, {}]}, "layers[1].width is missing, wanted an even number"),
        ({"layers": [{"width": 3}]}, "layers[0].width is 3, wanted an even number"),
        ({"layers": [{"width": "x"}]}, "layers[0].width is 'x', wanted an even number"),
        ({"layers": [{"width": True}]}, "layers[0].width is True, wanted an even number"),
        ({"layers": [{"width": 4, "gain": 0}]}, "layers[0].gain is 0, wanted a number above 0"),
        ({"layers": [{"width": 4, "gain": 9}]}, "layers[0]: gain is 9.0, wanted at most the width, which is 4"),
        ({"layers": [HEAD | {"depth": 1}]}, "layers[0]: unknown field 'depth', wanted one of width, gain"),
        (
            {"layers": [HEAD], "depth": 1},
            "unknown field 'depth', wanted one of layers, norm, window, tied, size, names",
        ),
        ({"layers": [HEAD], "norm": ["rms"]}, "norm is ['rms'], wanted one of rms, layer"),
        ({"layers": [HEAD], "window": 0}, "window is 0, wanted a whole number from 1 to 2147483648 or none"),
        ({"layers": [HEAD], "window": 2.0}, "window is 2.0, wanted a whole number from 1 to 2147483648 or none"),
        ({"layers": [HEAD], "tied": 1}, "tied is 1, wanted true or false"),
        ({"layers": [HEAD], "size": "3"}, "size is '3', wanted two numbers, such as 3x4"),
        ({"layers": [HEAD], "size": 3}, "size is 3, wanted text"),
        ({"layers": [HEAD], "names": {"a": "b"}}, "names['a'] is 'b', wanted a number"),
        ({"layers": [HEAD], "names": 7}, "names is 7, wanted an object"),
    ],
)
def test_error_names_place_value_and_expected_type(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FieldError) as caught:
        read(Model, values, "")
    assert str(caught.value) == sentence
    with pytest.raises(DiffbitError) as inner:
        read(tuple[Model, ...], [values], "models")
    assert str(inner.value).startswith(("models[0].", "models[0]: unknown field")), inner.value


def test_unknown_fields_are_ignored_only_on_request() -> None:
    assert read(Model, {"layers": [HEAD | {"a": 1}], "b": 2}, "", extra=True) == Model((Head(4),))


def test_python_values_are_checked_by_the_same_types() -> None:
    with pytest.raises(FieldError, match=r"^width is 3, wanted an even number$"):
        Head(3)
    with pytest.raises(FieldError, match=r"^gain is nan, wanted a number above 0$"):
        Head(4, math.nan)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int, 10**400, 10**400),
        (float, 3, 3.0),
        (NotNegative, 0, 0.0),
        (str | tuple[str, ...], ["a"], ("a",)),
        (int | str | None, None, None),
        (tuple[int, str], [1, "a"], (1, "a")),
        (Mapping[str, Any], {"a": [None]}, {"a": [None]}),
        (Annotated[float, bounds(0, 1)], 1, 1.0),
    ],
)
def test_single_values(kind: Any, value: object, expected: object) -> None:
    result = read(kind, value, "x")
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value", "sentence"),
    [
        (int, 1.0, "x is 1.0, wanted a whole number"),
        (float, True, "x is True, wanted a number"),
        (float, "1", "x is '1', wanted a number"),
        (float, math.inf, "x is inf, wanted a number"),
        (float, 10**400, f"x is 1{'0' * 56}..., wanted a number"),
        (str, None, "x is None, wanted text"),
        (str | tuple[str, ...], 4, "x is 4, wanted text or a list"),
        (str | tuple[str, ...], ["a", 4], "x[1] is 4, wanted text"),
        (tuple[int, int], [1, 2, 3], "x is [1, 2, 3], wanted a list of 2 entries"),
        (Mapping[Annotated[str, one_of("a")], int], {"b": 1}, "a key of x is 'b', wanted one of a"),
        (Annotated[float, bounds(0, 1, "a share")], 2, "x is 2, wanted a share"),
        (Annotated[Count, EVEN], 3, "x is 3, wanted an even number"),
        (Annotated[Annotated[int, EVEN], bounds(0, 4)], 5, "x is 5, wanted an even number from 0 to 4"),
        (Annotated[Annotated[int, EVEN], bounds(0, 4)], 6, "x is 6, wanted an even number from 0 to 4"),
        (Annotated[int, bounds(0)], -1, "x is -1, wanted a whole number of at least 0"),
        (int, "\ud800\n", r"x is '\ud800\n', wanted a whole number"),
        (int, json.loads(DEEP), f"x is {'[' * 57}... (1 entries), wanted a whole number"),
        (
            str,
            [0] * 100,
            "x is [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,... (100 entries), wanted text",
        ),
    ],
)
def test_values_that_are_refused(kind: Any, value: object, sentence: str) -> None:
    with pytest.raises(FieldError) as caught:
        read(kind, value, "x")
    assert str(caught.value) == sentence and caught.value.place.startswith(("x", "a key of x"))


def test_shown_is_one_short_line_for_any_value() -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    number = tomllib.loads(f"n = 0x{'f' * 9000}")["n"]  # TOML limits the digits of decimal numbers alone
    for value in (nested, number, "\n" * 1000, {"\x1b[2J": "\r\n"}):
        text = shown(value)
        assert len(text) <= LONGEST + len(" (1 entries)") and text.isprintable()
    while nested:  # ends without a recursion that is too deep
        nested = nested.pop()


def test_one_field_of_an_object() -> None:
    values = {"a": 1, "b": None, "c": "x"}
    assert get(values, "a", Count) == 1
    assert get(values, "b", Count, 7) == get(values, "d", Count, 7) == 7
    assert get(values, "b", Count, None) is None and get(values, "b", int | None) is None
    for name, default, sentence in (
        ("d", {}, "outer.d is missing, wanted a whole number from 1 to 2147483648"),
        ("b", {}, "outer.b is None, wanted a whole number"),
        ("c", {"default": 7}, "outer.c is 'x', wanted a whole number"),
    ):
        with pytest.raises(FieldError) as caught:
            get(values, name, Count, place="outer", **default)  # type: ignore[arg-type]
        assert str(caught.value).startswith(sentence) and caught.value.place == f"outer.{name}"


def test_an_error_begins_with_its_file() -> None:
    with pytest.raises(DiffbitError) as caught, located(Path("m") / "config.json", "; restore it"):
        read(Model, {"layers": [HEAD, {"width": 1}]}, "")
    assert str(caught.value) == "m/config.json: layers[1].width is 1, wanted an even number; restore it"
    with pytest.raises(KeyError), located("m"):
        raise KeyError


@pytest.mark.slow
def test_it_needs_no_package() -> None:
    code = "import sys; sys.path.insert(0, '.'); import diffbit.io.fields"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=Path(__file__).parents[2], check=True)
