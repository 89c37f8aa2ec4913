"""Renders the results as one page: report.html, a single file without scripts or network access.

It takes plain dictionaries, as the commands print them with --json, and shows those that are given:

    training       {model: {"tokens", "loss", ...}}                     any names; `diffbit train`
    outliers       OutlierReport.to_dict() of each model                `diffbit outliers`
    comparison     Comparison.to_dict()                                 `diffbit compare`
    quantization   {title: Report.to_dict()}                            `diffbit quantize`
    artifacts      {"name", "format", "bytes", "source_bytes", "parts"} sizes; source_bytes: at 16 bits

The page is report.html.j2, with autoescape on: everything that comes from a file is escaped. Plots are images within
the page, each with its numbers in words for readers who cannot see it. Colours follow the models' order in
`comparison`, else in `outliers`.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from platform import machine, python_version, system
from typing import TYPE_CHECKING, Any

from ...io import files
from ...io.drawing import COLORS, Data, heat_map, panels, svg
from . import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Finding = tuple[str, str]  # a headline number, and the sentence that explains it
Figure = tuple[str, str]  # a plot as an image within the page, and its words
PUBLISHED = {  # Table 5 of arXiv 2410.05258: top-1, 2, 3, 10, 100, median
    "attention_logits": {
        "Transformer 3B, published": (318.0, 308.2, 304.9, 284.7, 251.5, 5.4),
        "DIFF 3B, published": (38.8, 38.8, 37.3, 32.0, 27.4, 3.3),
    },
    "hidden_states": {
        "Transformer 3B, published": (3608.6, 3607.4, 3603.6, 3552.1, 2448.2, 0.6),
        "DIFF 3B, published": (1688.2, 1672.5, 1672.1, 1624.3, 740.9, 1.2),
    },
}
PACKAGES = ("diffbit", "torch", "numpy", "onnx", "onnxruntime", "tokenizers", "matplotlib")


@dataclass(frozen=True)
class ReportData:
    """The contents of a report; see the module's docstring. Empty parts are omitted."""

    title: str = "Low-bit comparison"
    comparison: Data | None = None
    outliers: Sequence[Data] = ()
    training: Mapping[str, Data] = field(default_factory=dict)
    quantization: Mapping[str, Data] = field(default_factory=dict)
    artifacts: Sequence[Data] = ()
    commands: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def versions() -> dict[str, str]:
    """Of Python, the system and the packages that the numbers depend on."""
    found = {"python": python_version(), "system": f"{system()} {machine()}"}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_report(data: ReportData, path: str | Path) -> Path:
    """Write the page; returns its path."""
    path, text = Path(path), render(data)
    with files.write_atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def render(data: ReportData) -> str:
    """The page as text. Raises MissingDependency without matplotlib."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    filters = (number, percent, increase, points, nats, size, integer, cell)
    environment.filters |= {write.__name__: write for write in filters}
    comparison = data.comparison
    names = [info["name"] for info in comparison["models"]] if comparison else []
    names += [*(report["model"] for report in data.outliers), *data.training]
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(dict.fromkeys(names))}
    return environment.get_template("report.html.j2").render(
        data=data,
        findings=[*_outlier_findings(data), *_contrast_findings(comparison), *_artifact_findings(data)],
        colors=colors,
        subjects=[] if comparison is None else [_subject(comparison, what) for what in plots.subjects(comparison)],
        ran=[] if comparison is None else [r for r in comparison["results"] if r["what"] == "artifact"],
        sites=[(site, title, _outlier_figure(data, site)) for site, title in plots.SITES.items() if data.outliers],
        layers=list(_layer_errors(data)),
        published=PUBLISHED,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _outlier_findings(data: ReportData) -> Iterator[Finding]:
    if len(data.outliers) != 2:
        return
    for site, what in (("hidden_states", "hidden state"), ("attention_logits", "attention logit")):
        pairs = ((report[site]["top"]["1"], report["model"]) for report in data.outliers)
        (low, small), (high, large) = sorted(pairs)
        ratio = f"{high / low:.2g}×" if low else "∞"
        yield ratio, f"Largest {what}: {large} {number(high)}, {small} {number(low)}."


def _contrast_findings(comparison: Data | None) -> Iterator[Finding]:
    """At the width nearest to 4 bits, by the method that loses least there: which model loses more, and is it sure?"""
    for what in plots.subjects(comparison) if comparison else ():
        assert comparison
        results = [r for r in comparison["results"] if r["what"] == what]
        width = min(results, key=lambda r: (abs(r["bits"] - 4), r["bits_per_weight"]))["format"]
        results = [r for r in results if r["format"] == width]
        methods = dict.fromkeys(r["method"] for r in results)
        best = min(methods, key=lambda m: sum(math.log(r["ratio"]["value"]) for r in results if r["method"] == m))
        own = {r["model"]: r for r in results if r["method"] == best}
        where = f"{plots.SUBJECTS[what][0]} at {width}"
        if len(methods) > 1:
            where += f" by {best}, the best of {len(methods)} methods"
        key = what, width, best
        for c in (c for c in comparison["contrasts"] if (c["what"], c["format"], c["method"]) == key):
            less, more = sorted((own[c["against"]], own[c["model"]]), key=lambda r: r["ratio"]["value"])
            headline = f"{increase(less['ratio']['value'])} vs {increase(more['ratio']['value'])}"
            sure = c["difference"]["low"] * c["difference"]["high"] > 0
            verdict = (
                f"{less['model']} loses less; the paired interval excludes zero." if sure
                else "The paired interval includes zero: the difference is not significant on this text."
            )  # fmt: skip
            if c["repeats"] == c["runs"] == 1 and sure:
                verdict = f"{less['model']} loses less in this one rounding of each; another may reverse it."
            yield headline, f"{where}: perplexity of {less['model']} vs {more['model']}. {verdict}"
        if len(own) == 1:
            (result,) = own.values()
            yield increase(result["ratio"]["value"]), f"{where}: perplexity of {result['model']} against 16 bits."


def _artifact_findings(data: ReportData) -> Iterator[Finding]:
    known = [entry for entry in data.artifacts if entry.get("source_bytes")]
    if known:
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
    title = f"{plots.SITES[site]} by layer. {'; '.join(words)}."
    return _figure(partial(plots.layers, reports=data.outliers, site=site), title)


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


def number(value: float | None) -> str:
    """Three to four digits that matter, thousands with commas."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.1e}".replace("e-0", "e-")
    if abs(value) < 100:
        return f"{value:#.3g}"
    return f"{value:,.1f}" if abs(value) < 10_000 else f"{value:,.0f}"


def integer(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def cell(value: object) -> str:
    """A value of unknown type."""
    if isinstance(value, float):
        return number(value)
    return integer(value) if value is None or type(value) is int else str(value)


def size(count: float | None) -> str:
    """Bytes as kB, MB, GB."""
    if not count:
        return "–"
    unit = min(3, int(math.log10(count)) // 3)
    return f"{count / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB')[unit]}"
