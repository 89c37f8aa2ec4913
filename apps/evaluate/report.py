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

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Finding = tuple[str, str]  # a headline number, and the sentence that explains it
Figure = tuple[str, str]  # a plot as an image within the page, and its words
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
    comparison = data.comparison or {"models": (), "results": (), "contrasts": ()}
    names = [info["name"] for info in comparison["models"]]
    names += [*(report["model"] for report in data.outliers), *data.training]
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(dict.fromkeys(names))}
    return environment.get_template("report.html.j2").render(
        data=data,
        findings=[*_outlier_findings(data), *_contrast_findings(comparison), *_artifact_findings(data)],
        colors=colors,
        subjects=[_subject(comparison, what) for what in plots.subjects(comparison)],
        ran=[result for result in comparison["results"] if result["what"] == "artifact"],
        sites=[(site, title, _outlier_figure(data, site)) for site, title in SITES.items() if data.outliers],
        layers=list(_layer_errors(data)),
        established=established,
        verdict=verdict,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _outlier_findings(data: ReportData) -> Iterator[Finding]:
    for site, what in (("hidden_states", "hidden state"), ("attention_logits", "attention logit")):
        if len(data.outliers) == 2 and all(report[site] for report in data.outliers):
            (low, small), (high, large) = sorted(
                (report[site]["top"]["1"], report["model"]) for report in data.outliers
            )
            ratio = f"{high / low:.2g}×" if low else "∞"
            yield ratio, f"Largest {what}: {large} {number(high)}, {small} {number(low)}."


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
            less, more = sorted((by_model[c[one]] for one in ("against", "model")), key=lambda r: r["ratio"]["value"])
            headline = f"{increase(less['ratio']['value'])} vs {increase(more['ratio']['value'])}"
            yield headline, f"{where}: perplexity of {less['model']} vs {more['model']}; {verdict(c)}."
        if len(by_model) == 1:
            (result,) = by_model.values()
            yield increase(result["ratio"]["value"]), f"{where}: perplexity of {result['model']} against 16 bits."


def verdict(contrast: Data) -> str:
    """Which model loses less, as far as the interval of the paired difference says, and what it was measured on."""
    model, against, repeats = contrast["model"], contrast["against"], contrast["repeats"]
    low, high = contrast["difference"]["low"], contrast["difference"]["high"]
    measured = [f"{contrast['runs']} training runs of each"] if contrast["runs"] > 1 else []
    if repeats is not None:
        measured.append("one rounding of each" if repeats == 1 else f"{repeats} roundings of each")
    less, more = (model, against) if high < 0 else (against, model)
    sure = f"{less} loses less than {more}"
    text = sure if low * high > 0 else f"not established whether {model} or {against} loses less"
    return ", ".join([text, *measured])


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
    """Of each quantized model its decoder layers, worst first; errors of outputs where all were measured."""
    models = {
        title: rows for title, report in data.quantization.items()
        if (rows := [row for row in report["weights"] if row["name"].startswith("model.layers.")])
    }  # fmt: skip
    measured = all(row["output_error"] is not None for rows in models.values() for row in rows)
    key, what = ("output_error", "outputs") if measured else ("weight_error", "weights")
    largest = max((row[key] for rows in models.values() for row in rows), default=0.0)
    for title, rows in models.items():

        def draw(axes: Axes, title: str = title, rows: Sequence[Data] = rows) -> None:
            percents = [{"name": row["name"], "error": 100 * row[key]} for row in rows]
            heat_map(axes, percents, "error", 100 * largest, ".1f")
            axes.set_title(title)
            axes.set_xlabel("layer; relative error in %")

        worst = sorted(rows, key=lambda row: -row[key])
        words = f"{title}, relative error of {what}: worst {worst[0]['name']} at {percent(worst[0][key])}."
        yield {"title": title, "rows": worst, "figure": _figure(draw, words)}


def percent(share: float, sign: str = "") -> str:
    """0.0212 -> 2.12%; the larger, the fewer decimals."""
    digits = 2 if abs(share) < 0.1 else 1 if abs(share) < 10 else 0
    return f"{100 * share:{sign}z,.{digits}f}%".replace("-", "−")  # z: no negative zero


def increase(ratio: float) -> str:
    return percent(ratio - 1, "+")


def points(share: float) -> str:
    """A difference of shares in percentage points."""
    return f"{100 * share:+z.1f}".replace("-", "−", 1)


def nats(value: float) -> str:
    return f"{value:+.3g}".replace("-", "−", 1)


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
    """Bytes as kB, MB, GB."""
    unit = min(3, int(math.log10(count)) // 3) if count else 0
    return f"{count / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB')[unit]}" if count else "–"
