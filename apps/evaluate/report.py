"""Renders results as one page, report.html.j2: a single file without scripts or network access.

It takes plain dictionaries, as the commands print them with --json, and shows those that are given:

    training       {model: {"tokens", "loss", ...}}                     any names; `diffbit train`
    outliers       of each model                                        `diffbit outliers`
    comparison     Comparison.to_dict()                                 `diffbit compare`
    quantization   {title: Report.to_dict()}                            `diffbit quantize`
    artifacts      {"name", "format", "bytes", "source_bytes", "parts"} sizes; source_bytes: at 16 bits

Everything that comes from a file is escaped. Plots are images within the page, each with its numbers in words for
readers who cannot see it. Colours follow the models' order in `comparison`, else in `outliers`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from platform import machine, python_version, system
from typing import Any

from ...io import page
from ...io.drawing import COLORS, SITES, Chart, Data, HeatMap, image, outliers_chart
from . import plots, tables
from .tables import Row
from .variants import IN_TORCH
from .words import increase, interval, nats, number, pair_verdict, percent, size, verdict

Finding = tuple[str, str]  # a headline number, and the sentence that explains it
Figure = tuple[str, str]  # a plot as an image within the page, and its words
MOST_TILES = 4  # of quantized models
PACKAGES = ("diffbit", "torch", "numpy", "onnx", "onnxruntime", "tokenizers", "matplotlib")
RANKS = ("1", "2", "3", "10", "100")
# Table 5 of arXiv 2410.05258: of RANKS, and the median
PUBLISHED = {
    "attention_logits": {
        "Transformer 3B, published": (318.0, 308.2, 304.9, 284.7, 251.5, 5.4),
        "DIFF 3B, published": (38.8, 38.8, 37.3, 32.0, 27.4, 3.3),
    },
    "hidden_states": {
        "Transformer 3B, published": (3608.6, 3607.4, 3603.6, 3552.1, 2448.2, 0.6),
        "DIFF 3B, published": (1688.2, 1672.5, 1672.1, 1624.3, 740.9, 1.2),
    },
}


@dataclass(frozen=True)
class ReportData:
    """The contents of a report; see the module's docstring. Empty parts are omitted."""

    title: str = "Accuracy against bit-width"
    comparison: Data | None = None
    outliers: Sequence[Data] = ()
    training: Mapping[str, Data] = field(default_factory=dict)
    quantization: Mapping[str, Data] = field(default_factory=dict)
    artifacts: Sequence[Data] = ()
    commands: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def versions() -> dict[str, str]:
    """Return those of Python, the system and the packages that the numbers depend on."""
    names = {"python": python_version(), "system": f"{system()} {machine()}"}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            names[package] = metadata.version(package)
    return names


def write_report(data: ReportData, path: str | Path) -> None:
    page.write(path, render(data))


def render(data: ReportData) -> str:
    """Return the page as text. Raises MissingDependency without matplotlib."""
    comparison = data.comparison or {"models": (), "results": (), "contrasts": (), "pairs": (), "needles": ()}
    names = [info["name"] for info in comparison["models"]]
    names += [*(report["model"] for report in data.outliers), *data.training]
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(dict.fromkeys(names))}
    given = plots.quantized(comparison)
    return page.render(
        Path(__file__).with_name("report.html.j2"),
        data.title,
        filters=(number, percent, is_numeric),
        report=data,
        comparison=data.comparison,
        findings=[
            *_quantized_findings(comparison),
            *_contrast_findings(comparison),
            *_outlier_findings(data),
            *_artifact_findings(data),
        ],
        colors=colors,
        models=_models(data, comparison, list(colors)),
        subjects=[_subject(comparison, what) for what in plots.subjects(comparison)],
        quantized=tables.result_rows(comparison, given),
        quantized_figure=_figure(plots.quantized_chart(comparison)) if len(given) > 1 else None,
        pairs=tables.pair_rows(comparison['pairs']),
        sites=[
            (title, _outliers(data, site), _figure(outliers_chart(data.outliers, site)))
            for site, title in SITES.items() if data.outliers
        ],
        outlier_layers=_outlier_layers(data),
        layers=list(_layer_errors(data)),
        artifacts=_artifacts(data),
        parts={entry["name"]: _parts(entry) for entry in data.artifacts if entry.get("parts")},
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )  # fmt: skip


def is_numeric(rows: Sequence[Row], name: str) -> bool:
    """Return whether a column has numbers, which stand at its right."""
    words = name in ("model", "made of", "format")  # which may begin with a digit
    return not words and all(re.match(r"[+−–∞\d]|not established", number(row[name])) for row in rows)


def _quantized_findings(comparison: Data) -> Iterator[Finding]:
    """Return what each quantized model loses, those of many that lose least; and which of two loses less."""
    results = plots.quantized(comparison)
    for r in sorted(results, key=lambda r: r["kl"]["value"])[:MOST_TILES] if len(results) > MOST_TILES else results:
        text = f"KL of {r['name']} from {r['model']}, nats a token: {interval(r['kl'], number)}. {r['format']}, "
        text += f"{size(r['nbytes'])}; {percent(r['agreement']['value'])} of the top tokens stay the same."
        yield f"KL {number(r['kl']['value'])}", text
    if len(results) == 2:
        for pair in comparison["pairs"]:
            text = f"KL of {pair['name']} − KL of {pair['against']}, nats a token: {pair_verdict(pair)}."
            yield nats(pair["kl"]["value"]), text


def _outlier_findings(data: ReportData) -> Iterator[Finding]:
    """Yield the ratio that a low-bit scale has to span, of two models in their order."""
    for site, what in (("hidden_states", "hidden state"), ("attention_logits", "attention logit")):
        ratios = [report[site] and report[site]["ratio"] for report in data.outliers]
        if len(ratios) == 2 and all(ratios):
            names = " vs ".join(report["model"] for report in data.outliers)
            text = (
                f"Largest {what} over the median, {names}: the larger, the fewer steps a scale leaves for the others."
            )
            yield " vs ".join(f"{number(ratio)}×" for ratio in ratios), text


def _contrast_findings(comparison: Data) -> Iterator[Finding]:
    """At the width nearest to 4 bits, by the method that loses least there: which model loses less?"""
    for what in plots.subjects(comparison):
        results = [r for r in comparison["results"] if r["what"] == what]
        width = min(results, key=lambda r: (abs(r["bits"] - 4), r["bits_per_weight"]))["format"]
        results = [r for r in results if r["format"] == width]
        methods = dict.fromkeys(r["method"] for r in results)
        best = min(methods, key=lambda m: sum(math.log(r["ratio"]["value"]) for r in results if r["method"] == m))
        by_model = {r["model"]: r for r in results if r["method"] == best}
        where = f"{plots.SUBJECTS[what][0]} at {width}"
        if len(methods) > 1:
            where += f" by {best}, the best of {len(methods)} methods"
        key = what, width, best
        for c in (c for c in comparison["contrasts"] if (c["what"], c["format"], c["method"]) == key):
            headline = " vs ".join(increase(by_model[c[side]]["ratio"]["value"]) for side in ("against", "model"))
            yield headline, f"{where}: perplexity of {c['against']} vs {c['model']}; {verdict(c)}."
        if len(by_model) == 1:
            (result,) = by_model.values()
            yield increase(result["ratio"]["value"]), f"{where}: perplexity of {result['model']} against 16 bits."


def _artifact_findings(data: ReportData) -> Iterator[Finding]:
    if known := [entry for entry in data.artifacts if entry.get("source_bytes")]:
        best = min(known, key=lambda entry: entry["bytes"] / entry["source_bytes"])
        text = f"{best['name']} is {size(best['bytes'])}; at 16 bits it would be {size(best['source_bytes'])}."
        yield f"{best['source_bytes'] / best['bytes']:.1f}× smaller", text


def _figure(chart: Chart | HeatMap) -> Figure:
    return image(chart), chart.words()


def _models(data: ReportData, comparison: Data, names: Sequence[str]) -> list[Row]:
    infos = {info["name"]: info for info in comparison["models"]}
    further = dict.fromkeys(key for run in data.training.values() for key in run)
    return [
        {"model": name, "attention": (info := infos.get(name, {})).get("attention")}
        | {"parameters": info.get("parameters"), "layers": info.get("layers"), "width": info.get("hidden_size")}
        | {key.replace("_", " "): data.training.get(name, {}).get(key) for key in further}
        | {"SHA-256": " ".join(x[:12] for x in (info["sha256"], *info["other_runs"].values())) if info else None}
        for name in names
    ]


def _subject(comparison: Data, what: str) -> dict[str, Any]:
    """Return the figures and tables of weights or of a part of attention, by format, the 16-bit models first."""
    results = [r for r in comparison["results"] if r["what"] in (what, "none")]
    formats = ["16", *plots.order([r for r in results if r["what"] == what])]
    results.sort(key=lambda r: formats.index(r["format"]))
    return {
        "what": what,
        "title": plots.SUBJECTS[what][0],
        "figures": [_figure(chart) for chart in plots.charts(comparison, what)],
        "methods": list(dict.fromkeys(r["method"] for r in results if r["what"] == what)),
        "results": tables.result_rows(comparison, results),
        "contrasts": tables.contrast_rows(comparison, [c for c in comparison["contrasts"] if c["what"] == what]),
        "costs": [] if what in IN_TORCH else tables.cost_rows(results),
    }


def _outliers(data: ReportData, site: str) -> list[Row]:
    """Return the largest values of each model, beside the published ones."""
    rows: list[tuple[str, list[float | None], str | None]] = []
    for report in (report for report in data.outliers if report[site] is not None):
        numbers, unit = report[site], "channel" if site == "hidden_states" else "head"
        place = f"layer {numbers['layer']}, {unit} {numbers['place']['unit']}, token {numbers['place']['position']}"
        values = [*(numbers["top"][rank] for rank in RANKS), *(numbers[key] for key in ("median", "ratio", "kurtosis"))]
        rows.append((report["model"], values, place))
    for name, published in PUBLISHED[site].items():
        rows.append((name, [*published, published[0] / published[-1], None], None))
    columns = [*(f"top-{rank}" for rank in RANKS), "median", "max / median", "kurtosis"]
    return [
        {"model": name} | dict(zip(columns, values, strict=True)) | {"largest at": place}
        for name, values, place in rows
    ]


def _outlier_layers(data: ReportData) -> list[Row]:
    rows = []
    for report in data.outliers:
        logits = {layer["layer"]: layer for layer in (report["attention_logits"] or {"layers": ()})["layers"]}
        for hidden in report["hidden_states"]["layers"]:
            row = {"model": report["model"], "layer": hidden["layer"]}
            for site, unit, layer in (("hidden", "channel", hidden), ("logits", "head", logits.get(hidden["layer"]))):
                row |= {f"{site}: {key}": layer and layer[key] for key in ("median", "kurtosis")}
                row[f"{site}: max"] = layer and layer["top"]["1"]
                row[f"{site}: {unit}"] = layer and layer["place"]["unit"]
            rows.append(row)
    return rows


def _layer_errors(data: ReportData) -> Iterator[dict[str, Any]]:
    """Yield the decoder layers of each quantized model, worst first; errors of outputs where they were measured."""
    models = {
        title: rows for title, report in data.quantization.items()
        if (rows := [row for row in report["weights"] if row["name"].startswith("model.layers.")])
    }  # fmt: skip
    keys = {
        title: "weight_error" if any(row["output_error"] is None for row in rows) else "output_error"
        for title, rows in models.items()
    }
    for title, rows in models.items():
        key, what = keys[title], "outputs" if keys[title] == "output_error" else "weights"
        alike = max(row[key] for other, others in models.items() if keys[other] == key for row in others)
        errors = {row["name"]: 100 * row[key] for row in rows}
        table = [
            {
                "layer": row["name"],
                "format": row["format"],
                "weight error": percent(row["weight_error"]),
                "output error": None if row["output_error"] is None else percent(row["output_error"]),
                "bits a weight": f"{row['bits_per_weight']:.2f}",
            }
            for row in sorted(rows, key=lambda row: -row[key])
        ]
        heat = HeatMap(title, f"layer; relative error of {what} in %", errors, 100 * alike, ".1f", "%")
        yield {"title": title, "rows": table, "figure": _figure(heat)}


def _artifacts(data: ReportData) -> list[Row]:
    rows = []
    for entry in data.artifacts:
        source = entry.get("source_bytes")
        smaller = f"{source / entry['bytes']:.2f}×" if source else None
        row = {"artifact": entry["name"], "format": entry.get("format"), "size on disk": size(entry["bytes"])}
        rows.append(row | {"at 16 bits": size(source), "smaller by": smaller})
    return rows


def _parts(entry: Data) -> list[Row]:
    rows = []
    for part in entry["parts"]:
        bits = f"{8 * part['bytes'] / part['weights']:.2f}" if part["weights"] else None
        row = {"part": part["name"], "bytes": part["bytes"], "share": percent(part["bytes"] / entry["bytes"])}
        rows.append(row | {"numbers": part["weights"], "bits each": bits})
    return rows
