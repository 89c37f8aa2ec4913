"""Plots of a comparison. They take its `to_dict()`, so that a JSON file can be plotted again. The i-th model has the
i-th colour in every plot and in the report's tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...formats import parse_format
from ...io.drawing import MUTED, Data, drawn, line, logarithmic, short, shortened
from ...io.errors import DiffbitError
from .variants import FOLDERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUBJECTS = {  # what can be compared: a heading, and the label of the horizontal axis
    "weights": ("Weights", "format, scale per, bits per weight"),
    "logits": ("Attention logits", "bits per logit"),
    "qk": ("Queries and keys", "integers multiplied"),
    "kv": ("KV cache", "format of the cache"),
    "kv:0": ("KV cache, all tokens", "format of the cache"),
    "keys": ("Cached keys", "format of the cache"),
    "values": ("Cached values", "format of the cache"),
}
ENDS = ("value", "low", "high")
KL_FLOOR = 1e-7  # below it is noise


def plot_comparison(comparison: Data, path: str | Path) -> None:
    """Plot a row of panels for weights and for each part of attention that was compared; see `charts`. Without these,
    plot the quantized models that were given."""
    rows = [charts(comparison, what) for what in subjects(comparison)]
    if not rows and quantized(comparison):
        with drawn(path) as (panel,):
            draw_quantized(panel, comparison)
        return
    if not rows:
        raise DiffbitError("all models are already quantized, so there is nothing to plot; add a float one")
    columns = max(map(len, rows))
    with drawn(path, columns, len(rows)) as axes:
        for number, row in enumerate(rows):
            for index, panel in enumerate(axes[number * columns : (number + 1) * columns]):
                draw(panel, row[index]) if index < len(row) else panel.set_axis_off()


def subjects(comparison: Data) -> list[str]:
    """Return what was compared, in the order of SUBJECTS."""
    return [what for what in SUBJECTS if any(result["what"] == what for result in comparison["results"])]


def quantized(comparison: Data) -> list[Data]:
    """Return the results of the quantized checkpoints and artifacts that were given."""
    return [result for result in comparison["results"] if result["what"] in FOLDERS]


def draw_quantized(axes: Axes, comparison: Data) -> None:
    """Plot the loss of each quantized model that was given, with its interval, against its size."""
    models = [model["name"] for model in comparison["models"]]
    floor = max(KL_FLOOR, min(result["kl"]["value"] for result in quantized(comparison)) / 3)  # of a bar that ends at 0
    for result in quantized(comparison):
        look = line(models.index(result["model"])) | {"linestyle": "none"}
        place, (value, low, high) = result["nbytes"] / 1e6, (max(result["kl"][end], floor) for end in ENDS)
        axes.errorbar([place], [value], yerr=[[value - low], [high - value]], capsize=3, **look)
        axes.annotate(shortened(result["name"]), (place, value), xytext=(7, 4), textcoords="offset points", fontsize=8)
    logarithmic(axes)
    axes.margins(x=0.25, y=0.2)
    axes.set_title("Loss and size")
    axes.set_xlabel("MB")
    axes.set_ylabel("KL from the float model, nats per token")


def words_of_quantized(comparison: Data) -> str:
    """Return that plot as a sentence."""
    points = (
        f"{r['name']} {short(r['kl']['value'])} nats at {short(r['nbytes'] / 1e6)} MB" for r in quantized(comparison)
    )
    return f"KL against size: {', '.join(points)}."


def order(results: Sequence[Data]) -> dict[str, float]:
    """Return {format: bits per weight, or bits} of results, most bits first."""
    size = {r["format"]: r["bits_per_weight"] if r["what"] == "weights" else r["bits"] for r in results}
    rank = {r["format"]: (r["bits"], size[r["format"]]) for r in results}
    return {name: size[name] for name in sorted(size, key=lambda name: rank[name], reverse=True)}


@dataclass(frozen=True)
class Metric:
    """What a chart shows of a result."""

    name: str
    label: str  # of the vertical axis
    unit: str
    value: Callable[[Data, str], float]  # of a result, at one of ENDS
    floor: float | None = None  # logarithmic; below it is noise, or nothing, drawn hollow on the floor. None: linear


@dataclass(frozen=True)
class Chart:
    """A metric of several models or methods against bit-width."""

    title: str
    label: str  # of the horizontal axis
    ticks: dict[str, str]  # {format: label}, most bits first
    metric: Metric
    lines: dict[str, list[Data]]  # {label: results, in the order of ticks}
    bounds: tuple[float, float]  # of values and intervals; charts side by side share them

    def words(self) -> str:
        """The chart as a sentence, for readers who cannot see it."""
        lines = []
        for label, results in self.lines.items():
            values = (f"{r['format']} {short(self.metric.value(r, 'value'))}{self.metric.unit}" for r in results)
            lines.append(f"{label}: {', '.join(values)}")
        return f"{self.title}. {'; '.join(lines)}."


INCREASE = Metric(
    "increase of perplexity", "over the 16-bit model", "%", lambda r, end: 100 * (float(r["ratio"][end]) - 1), 0.01
)
KL = Metric(
    "KL divergence", "from the 16-bit model, nats per token", " nats", lambda r, end: float(r["kl"][end]), KL_FLOOR
)


def _needles(setting: Data, index: int) -> Metric:
    """The change of the share of queries answered, of the index-th set of needles."""

    def change(result: Data, end: str) -> float:
        return 100 * float(result["retrieval"][index]["change"][end])

    name, label = "{queries} of {needles} needles", "points to 16 bits, of {length:,} tokens"
    return Metric(name.format(**setting), label.format(**setting), " points", change)


def charts(comparison: Data, what: str) -> list[Chart]:
    """Return the charts of weights, or of a part of attention.

    With one method: perplexity, KL and each set of needles, a line per model. With several: perplexity, a chart per
    model with a line per method.
    """
    results = [result for result in comparison["results"] if result["what"] == what]
    models, methods = (list(dict.fromkeys(r[key] for r in results)) for key in ("model", "method"))
    widths = order(results)
    results.sort(key=lambda result: list(widths).index(result["format"]))
    subject, label = SUBJECTS[what]

    def chart(about: str, metric: Metric, lines: dict[str, list[Data]]) -> Chart:
        ends, floor = [metric.value(result, end) for result in results for end in ENDS], metric.floor
        bounds = (max(min(ends), floor), max(*ends, 100 * floor)) if floor else (min(-1.0, *ends), max(1.0, *ends))
        ticks = {name: _tick(name, what, width) for name, width in widths.items()}
        return Chart(f"{about}: {metric.name}", label, ticks, metric, lines, bounds)

    if len(methods) > 1:
        return [
            chart(name, INCREASE, {m: [r for r in results if (r["model"], r["method"]) == (name, m)] for m in methods})
            for name in models
        ]
    by_model = {model: [r for r in results if r["model"] == model] for model in models}
    shown = [chart(subject, metric, by_model) for metric in (INCREASE, KL)]
    whole = {r["model"]: r["retrieval"] for r in comparison["results"] if r["what"] == "none"}
    for index, setting in enumerate(comparison["needles"]):
        at_16 = {f"{m}, {whole[m][index]['accuracy']['value']:.1%} at 16 bits": r for m, r in by_model.items()}
        shown.append(chart(subject, _needles(setting, index), at_16))
    return shown


def draw(axes: Axes, chart: Chart) -> None:
    """A line with its band of confidence for each label of the chart."""
    from matplotlib.ticker import FuncFormatter

    columns = {name: column for column, name in enumerate(chart.ticks)}
    metric, floor = chart.metric, chart.metric.floor
    for index, (label, results) in enumerate(chart.lines.items()):
        x, look = [columns[result["format"]] for result in results], line(index)
        value, low, high = ([max(metric.value(r, end), floor or -math.inf) for r in results] for end in ENDS)
        axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
        axes.plot(x, value, label=shortened(label), zorder=3, **look)
        if floor and (hidden := [place for place, height in zip(x, value, strict=True) if height == floor]):
            hollow = look | {"markerfacecolor": "white", "markeredgecolor": look["color"], "linestyle": "none"}
            axes.plot(hidden, [floor] * len(hidden), zorder=4, **hollow)
    (bottom, top), legend = chart.bounds, 0.08 + 0.07 * len(chart.lines)  # of the height
    if floor:
        logarithmic(axes)
        axes.set_ylim(bottom / (top / bottom) ** 0.05, top * (top / bottom) ** legend)
    else:
        axes.axhline(0, color=MUTED, linewidth=0.8, zorder=1)
        axes.set_ylim(bottom - legend * (top - bottom), top + 0.05 * (top - bottom))
    unit, below = "%" if metric.unit == "%" else "", {floor: "≤ "}
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{below.get(y, '')}{short(y)}{unit}"))
    axes.set_title(chart.title)
    axes.set_xticks(range(len(columns)), list(chart.ticks.values()))
    axes.set_xlim(-0.35, len(columns) - 0.65)
    axes.set_xlabel(chart.label)
    axes.set_ylabel(metric.label)
    axes.legend(loc="upper left" if floor else "lower left")


def _tick(name: str, what: str, width: float) -> str:
    """Return a format's tick label; for weights with the group that shares a scale and the bits per weight."""
    if what != "weights":
        return name.removesuffix("-bit")
    number, _, group = name.partition("_")
    if not group:  # the name does not say what shares a scale; the format does
        rows, groups = parse_format(name).scale_shape((2, 256))
        group = "tensor" if rows == 1 else "row" if groups == 1 else f"g{256 // groups}"
    return f"{number}\n{group.replace('_', ' ')}\n{width:.2f}"
