"""The tables of a comparison's `to_dict()`, for the terminal and the report. A row is {column: text or number}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .metrics import established
from .variants import CACHED, FLOAT, NO_METHOD, RTN, UNCHANGED, WHAT
from .words import increase, interval, nats, number, pair_verdict, percent, points, size, verdict

Data = Mapping[str, Any]
Row = dict[str, Any]


def result_rows(comparison: Data, results: Sequence[Data]) -> list[Row]:
    """Return a row per result: KL in nats per token, intervals in brackets; None where there is nothing to tell."""
    compared = {result["what"] for result in results}
    sweeps = bool(compared & set(WHAT))  # else all is measured as it is given
    methods = {result["method"] for result in results} - {NO_METHOD}
    tried = {result["method"] for result in results if result["what"] == "weights"}
    recovers = len(tried) > 1 or bool(tried - {RTN})
    rows = []
    for result in results:
        is_float = result["what"] == UNCHANGED and result["format"] == FLOAT
        lost = not is_float and result["what"] != UNCHANGED  # else it is quantized, and has no float model
        row = {"model": result["name"], "what": None if result["what"] == UNCHANGED else result["what"]}
        if not sweeps and len(comparison["models"]) > 1 and comparison["quantized"]:
            row["made of"] = None if result["what"] == UNCHANGED else result["model"]
        row["format"] = "float" if is_float and not sweeps else result["format"]
        if methods - {RTN} or (methods and not sweeps):
            row["method"] = None if result["method"] == NO_METHOD else result["method"]
        if "weights" in compared:
            row["bits/weight"] = round(result["bits_per_weight"], 2)
        if "weights" in compared or not sweeps:
            row["MB"] = result["nbytes"] / 1e6
        if compared & set(CACHED):
            row["KV bytes/token"] = round(result["cache_bytes"], 1)
        row["KL"] = interval(result["kl"], number) if lost else None
        row["same top token"] = interval(result["agreement"], percent) if lost else None
        row["perplexity"] = interval(result["perplexity"], number)
        row["increase"] = interval(result["ratio"], increase) if lost else None
        if recovers:
            row["of rtn's loss recovered"] = _recovered(result["recovered"])
        for setting in result["retrieval"]:
            name = "found, {needles}:{queries} of {length}".format(**setting)
            row[name] = f"{setting['accuracy']['value']:.1%}"
            row[f"{name}, points"] = interval(setting["change"], points) if lost else None
        rows.append(row)
    return rows


def contrast_rows(comparison: Data, contrasts: Sequence[Data]) -> list[Row]:
    """Return which model loses less, a row per contrast."""
    several = len({contrast["method"] for contrast in contrasts}) > 1
    return [
        {"format": c["format"]}
        | ({"method": c["method"]} if several else {})
        | {
            "models": f"{c['model']} − {c['against']}",
            "difference of loss, nats per token": interval(c["difference"], nats),
        }
        | {"which loses less?": verdict(c)}
        | {
            "found, {needles}:{queries} of {length}, points".format(**setting): interval(change, points)
            for setting, change in zip(comparison["needles"], c["retrieval"], strict=True)
        }
        for c in contrasts
    ]


def pair_rows(pairs: Sequence[Data]) -> list[Row]:
    """Return which of two quantized models loses less, a row per pair."""
    return [
        {"models": f"{pair['name']} − {pair['against']}", "which loses less?": pair_verdict(pair, numbers=False)}
        | {
            f"difference of {name}, nats per token": interval(pair[key], nats)
            for key, name in (("kl", "KL"), ("loss", "loss"))
        }
        | {"same top token, points": interval(pair["agreement"], points)}
        for pair in pairs
    ]


def cost_rows(results: Sequence[Data]) -> list[Row]:
    """Return what a decoded token costs: bytes, and millions of operations; a row per model and format."""
    names = {"ternary": "ternary additions", "integer": "integer multiply-adds", "floating": "float multiply-adds",
             "other": "element by element"}  # fmt: skip
    costs = {(r["model"], r["format"]): r["cost"] for r in results}
    return [
        {"model": model, "format": format}
        | {"weights read": size(cost["weight_bytes"]), "cache read, written": size(cost["cache_bytes"])}
        | {f"{name}, millions": cost[key] / 1e6 or None for key, name in names.items()}
        for (model, format), cost in costs.items()
    ]


def _recovered(estimate: Data | None) -> str | None:
    if estimate is None or not established(**estimate):
        return None if estimate is None else "not established"
    return f"{estimate['value']:.0%} ({estimate['low']:.0%} to {estimate['high']:.0%})"
