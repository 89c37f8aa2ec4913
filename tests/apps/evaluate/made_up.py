"""Comparisons as `diffbit compare` gives them, made up, for plots and reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from types import MappingProxyType
from typing import Any

FORMATS = {"int8": (8, 8.05), "int4_g64": (4, 4.25), "int2_g64": (2, 2.25), "ternary": (1.585, 2.0)}
METHODS = {"rtn": 1.0, "gptq": 0.4, "awq": 0.7}  # of rtn's loss
LOSSES = {"int8": -0.0001, "int4_g64": 0.03, "int2_g64": 1.2, "ternary": 4.0}  # more bits may cost less than nothing


def estimate(value: float, half: float) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


def ratio(loss: float) -> dict[str, float]:
    half = 0.1 * abs(loss) + 0.0002
    return {end: math.exp(x) for end, x in (("value", loss), ("low", loss - half), ("high", loss + half))}


def cost(per_weight: float) -> dict[str, Any]:
    """Of a token: 8 million weights of so many bits."""
    return {
        "context": 128, "weight_bytes": int(1e6 * per_weight), "cache_bytes": 1e5, "ternary": 0, "integer": 8_000_000,
        "floating": 1_500_000, "other": 20_000,
    }  # fmt: skip


def comparison(
    names: tuple[str, ...] = ("diff", "plain"),
    *,
    told_apart: bool = True,
    methods: tuple[str, ...] = ("rtn",),
    needles: tuple[int, ...] = (),
    repeats: int = 5,
    runs: int = 1,
    arithmetic: str = "artifact",
    folders: Mapping[str, float] = MappingProxyType({"onnx": 1.0}),
    swept: bool = True,
) -> dict[str, Any]:
    """folders: {the end of a quantized folder's name: its loss, as a share of int4_g64's}; swept: whether the models
    are rounded to formats, too."""
    models = [
        {
            "name": name, "path": f"out/{name}", "sha256": "ab" * 32, "attention": "diff_v1", "parameters": 1234567,
            "layers": 3, "hidden_size": 64, "other_runs": {f"other/{run}": f"{run:064x}" for run in range(1, runs)},
        }
        for name in names
    ]  # fmt: skip
    results, contrasts = [], []
    for index, name in enumerate(names):
        factor = 1 + 0.5 * index

        def add(
            what: str, format: str, bits: float, per_weight: float, loss: float, method: str = "none", name: str = name,
            folder: str = "",
        ) -> None:  # fmt: skip
            share = METHODS.get(method, 1.0)
            loss = loss * share
            results.append(
                {
                    "model": name, "name": folder or name, "what": what, "format": format, "method": method,
                    "bits": bits, "bits_per_weight": per_weight,
                    "recovered": estimate(1 - share, 0.05) if share < 1 else None, "nbytes": int(1e5 * per_weight),
                    "perplexity": estimate(20 * math.exp(loss), 1.0),
                    "ratio": ratio(loss) if loss else estimate(1.0, 0.0), "kl": estimate(abs(loss), 0.1 * abs(loss)),
                    "repeats": repeats if what == "weights" else 1,
                    "agreement": estimate(math.exp(-abs(loss)), 0.001), "cache_bytes": 384.0, "cost": cost(per_weight),
                    "retrieval": [
                        {
                            "length": length, "needles": 6, "queries": 2, "accuracy": estimate(0.9 - loss / 10, 0.05),
                            "change": estimate(-loss / 10, 0.01), "by_depth": [0.9] * 5,
                        }
                        for length in needles
                    ],
                }
            )  # fmt: skip

        add("none", "16", 16.0, 16.0, 0.0)
        for format, (bits, per_weight) in FORMATS.items() if swept else ():
            for method in methods:
                add("weights", format, bits, per_weight, factor * LOSSES[format], method)
        for bits in (8, 4, 3) if swept else ():
            add("logits", f"{bits}-bit", bits, 16.0, factor * 0.5**bits)
        for folder, share in folders.items():
            what = "artifact" if folder.endswith("onnx") else "checkpoint"
            loss = share * factor * LOSSES["int4_g64"]
            add(what, "int4_g64", 4, 4.25, loss, "gptq", folder=f"{name}-{folder}")
        for bits in (8, 4, 2) if needles else ():
            add("kv", f"int{bits}", bits, 16.0, factor * 0.4**bits)
    for name in names[1:]:
        for result in results:
            if result["model"] == name and result["what"] != "none":
                contrasts.append(
                    {
                        "model": name, "against": names[0], "what": result["what"], "format": result["format"],
                        "method": result["method"], "repeats": repeats if result["what"] == "weights" else None,
                        "runs": runs,
                        "difference": estimate(0.02, 0.01 if told_apart else 0.03),
                        "retrieval": [estimate(-0.011, 0.005) for _ in needles],
                    }
                )  # fmt: skip
    given = [result for result in results if result["name"] != result["model"]]
    pairs = [
        {
            "model": one["model"], "name": one["name"], "against": against["name"], "loss": estimate(0.0, 0.01),
            "kl": estimate(one["kl"]["value"] - against["kl"]["value"], 0.002), "agreement": estimate(0.0, 0.01),
        }
        for against, one in combinations(given, 2)
        if one["model"] == against["model"]
    ]  # fmt: skip
    quantized = [
        {
            "name": result["name"], "path": f"out/{result['name']}", "sha256": "cd" * 32, "what": result["what"],
            "model": result["model"], "found_by": "hash",
        }
        for result in given
    ]  # fmt: skip
    text = {"source": "stdlib", "sha256": "cd" * 32, "windows": 16, "length": 128, "scored_tokens": 2032}
    calibration = {
        "source": "stdlib",
        "sha256": "ef" * 32,
        "windows": 128,
        "length": 128,
        "tokens": 16384,
        "samples": repeats,
    }
    return {
        "models": models, "results": results, "contrasts": contrasts, "quantized": quantized, "pairs": pairs,
        "confidence": 0.95, "text": text,
        "arithmetic": arithmetic, "calibration": calibration if len(methods) > 1 else None, "skipped": [],
        "needles": [
            {"length": length, "needles": 6, "queries": 2, "rows": 32, "source": "stdlib", "sha256": "ab" * 32}
            for length in needles
        ],
    }  # fmt: skip
