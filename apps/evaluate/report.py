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
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from platform import machine, python_version, system
from typing import TYPE_CHECKING, Any

from ...io import files
from ...io.drawing import COLORS, SITES, Data, draw_layers, heat_map, panels, svg
from . import plots
from .metrics import established
from .words import increase, interval, nats, number, pair_verdict, percent, points, size, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Finding = tuple[str, str]  # a headline number, and the sentence that explains it
Figure = tuple[str, str]  # a plot as an image within the page, and its words
MOST_TILES = 4  # of quantized models
PACKAGES = ("diffbit", "torch", "numpy", "onnx", "onnxruntime", "tokenizers", "matplotlib")


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
    """Of Python, the system and the packages that the numbers depend on."""
    names = {"python": python_version(), "system": f"{system()} {machine()}"}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            names[package] = metadata.version(package)
    return names


def write_report(data: ReportData, path: str | Path) -> None:
    text = render(data)
    with files.write_atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def render(data: ReportData) -> str:
    """The page as text. Raises MissingDependency without matplotlib."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {write.__name__: write for write in (number, percent, increase, points, nats, size)}
    comparison = data.comparison or {"models": (), "results": (), "contrasts": (), "pairs": ()}
    names = [info["name"] for info in comparison["models"]]
    names += [*(report["model"] for report in data.outliers), *data.training]
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(dict.fromkeys(names))}
    return environment.get_template("report.html.j2").render(
        data=data,
        findings=[
            *_quantized_findings(comparison),
            *_contrast_findings(comparison),
            *_outlier_findings(data),
            *_artifact_findings(data),
        ],
        colors=colors,
        subjects=[_subject(comparison, what) for what in plots.subjects(comparison)],
        quantized=plots.quantized(comparison),
        quantized_figure=_quantized_figure(comparison),
        sites=[(site, title, _outlier_figure(data, site)) for site, title in SITES.items() if data.outliers],
        layers=list(_layer_errors(data)),
        established=established,
        verdict=verdict,
        pair_verdict=pair_verdict,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _quantized_findings(comparison: Data) -> Iterator[Finding]:
    """What each quantized model loses, those of many that lose least; and which of two loses less."""
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
    """The ratio that a low-bit scale has to span, of two models in their order."""
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


def _figure(draw: Callable[[Axes], None], words: str) -> Figure:
    with panels() as (figure, (axes,)):
        draw(axes)
        source = b64encode(svg(figure).encode()).decode()
    return f"data:image/svg+xml;base64,{source}", words


def _quantized_figure(comparison: Data) -> Figure | None:
    if len(plots.quantized(comparison)) < 2:
        return None
    return _figure(partial(plots.draw_quantized, comparison=comparison), plots.words_of_quantized(comparison))


def _subject(comparison: Data, what: str) -> dict[str, Any]:
    """Weights or a part of attention, with results by format, the 16-bit models first."""
    results = [r for r in comparison["results"] if r["what"] in (what, "none")]
    formats = ["16", *plots.order([r for r in results if r["what"] == what])]
    charts = plots.charts(comparison, what)
    return {
        "what": what,
        "title": plots.SUBJECTS[what][0],
        "figures": [_figure(partial(plots.draw, chart=chart), chart.words()) for chart in charts],
        "methods": list(dict.fromkeys(r["method"] for r in results if r["what"] == what)),
        "formats": {name: [r for r in results if r["format"] == name] for name in formats},
        "contrasts": [c for c in comparison["contrasts"] if c["what"] == what],
    }


def _outlier_figure(data: ReportData, site: str) -> Figure:
    words = []
    for report in data.outliers:
        largest = [layer["top"]["1"] for layer in report[site]["layers"]]
        ends = f"{number(largest[0])} in the first layer, {number(largest[-1])} in the last"
        words.append(f"{report['model']}: largest value {ends}, {number(max(largest))} at most")
    title = f"{SITES[site]} by layer. {'; '.join(words)}."
    return _figure(partial(draw_layers, reports=data.outliers, site=site), title)


def _layer_errors(data: ReportData) -> Iterator[dict[str, Any]]:
    """Of each quantized model its decoder layers, worst first; errors of outputs where they were measured."""
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
        alike = (row[key] for other, others in models.items() if keys[other] == key for row in others)
        draw = partial(_draw_errors, title=title, rows=rows, key=key, what=what, largest=max(alike))
        worst = sorted(rows, key=lambda row: -row[key])
        words = f"{title}, relative error of {what}: worst {worst[0]['name']} at {percent(worst[0][key])}."
        yield {"title": title, "rows": worst, "figure": _figure(draw, words)}


def _draw_errors(axes: Axes, title: str, rows: Sequence[Data], key: str, what: str, largest: float) -> None:
    percents = [{"name": row["name"], "error": 100 * row[key]} for row in rows]
    heat_map(axes, percents, "error", 100 * largest, ".1f")
    axes.set_title(title)
    axes.set_xlabel(f"layer; relative error of {what} in %")
