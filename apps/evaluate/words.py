"""Numbers and findings in words, for the terminal and for the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Data = Mapping[str, Any]


def verdict(contrast: Data) -> str:
    """Return which model loses less, as far as the interval of the paired difference says, and what it was measured
    on."""
    model, against, repeats = contrast["model"], contrast["against"], contrast["repeats"]
    low, high = contrast["difference"]["low"], contrast["difference"]["high"]
    measured = [f"{contrast['runs']} training runs of each"] if contrast["runs"] > 1 else []
    if repeats is not None:
        measured.append("one rounding of each" if repeats == 1 else f"{repeats} roundings of each")
    less, more = (model, against) if high < 0 else (against, model)
    sure = f"{less} loses less than {more}"
    text = sure if low * high > 0 else f"not established whether {model} or {against} loses less"
    return ", ".join([text, *measured])


def pair_verdict(pair: Data, numbers: bool = True) -> str:
    """Return which of two quantized models loses less: "b loses 0.0120 [0.00800, 0.0160] nats a token less than a";
    without numbers: "b loses less than a"."""
    name, against, difference = pair["name"], pair["against"], pair["kl"]
    low, high = difference["low"], difference["high"]
    if low == high == 0:
        return f"{name} loses as much as {against}, window by window"
    if low * high <= 0:
        text = f"no difference established between {name} and {against}"
        return f"{text}: {interval(difference, nats)} nats a token" if numbers else text
    if high < 0:
        difference = {"value": -difference["value"], "low": -high, "high": -low}
    less, more = (name, against) if high < 0 else (against, name)
    return f"{less} loses {f'{interval(difference, number)} nats a token ' if numbers else ''}less than {more}"


def interval(estimate: Data, write: Callable[[float], str]) -> str:
    """Return a value with the ends of its interval: "+2.12% [1.90, 2.34%]"; without them where they are equal."""
    value, low, high = (write(estimate[end]) for end in ("value", "low", "high"))
    return value if low == high else f"{value} [{low.replace('%', '')}, {high}]"


def percent(share: float, sign: str = "") -> str:
    """0.0212 -> 2.12%; the larger, the fewer decimals."""
    digits = 2 if abs(share) < 0.1 else 1 if abs(share) < 10 else 0
    return f"{100 * share:{sign}z,.{digits}f}%".replace("-", "−")  # z: no negative zero


def increase(ratio: float) -> str:
    return percent(ratio - 1, "+")


def points(share: float) -> str:
    """Return a difference of shares in percentage points."""
    return f"{100 * share:+z.1f}".replace("-", "−", 1)


def nats(value: float) -> str:
    """Return a difference, with its sign."""
    return f"{'−' if value < 0 else '+'}{number(abs(value))}"


def plain(text: str) -> str:
    """Return a text of this module in ASCII, for a terminal."""
    return text.replace("−", "-").replace("–", "-").replace("∞", "inf")


def number(value: object) -> str:
    """Three to four digits that matter, thousands with commas; None is a dash, and words stay words."""
    if type(value) is int:
        return f"{value:,}"
    if value is None or not isinstance(value, float):
        return "–" if value is None else str(value)
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞"
    if abs(value) < 1e-4:
        return f"{value:.1e}".replace("e-0", "e-") if value else "0"
    if abs(value) < 100:
        return f"{value:#.3g}"
    return f"{value:,.1f}" if abs(value) < 10_000 else f"{value:,.0f}"


def size(count: float | None) -> str:
    """Return bytes as kB, MB, GB."""
    unit = min(3, int(math.log10(count)) // 3) if count else 0
    return f"{count / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB')[unit]}" if count else "–"
