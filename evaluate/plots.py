"""Plots of what compare.py and outliers.py found. They take those results' `to_dict()`, so that a plot can be
drawn again from a JSON file, and write .svg or .png. One function per kind of panel; style.py has the look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DiffbitError
from ..quantize import parse_format
from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Data = Mapping[str, Any]

NOUNS = {
    "weights": "weights",
    "logits": "attention logits",
    "qk": "queries and keys",
    "kv": "KV cache",
    "keys": "cached keys",
    "values": "cached values",
}
SUBJECTS = {what: noun[0].upper() + noun[1:] for what, noun in NOUNS.items()}
AXES = {"weights": "format, scale per, bits a weight", "logits": "bits of a logit", "qk": "integers multiplied"}
METRICS = ("increase", "kl")
SITES = {"hidden_states": "Hidden states", "attention_logits": "Attention logits"}
FLOOR = {"increase": 1e-4, "kl": 1e-7}  # what lies below is drawn there, hollow: it is noise, or nothing


def plot_comparison(comparison: Data, path: str | Path) -> None:
    """A row of panels for weights and one for each part of attention, as compared; `charts` says what is in them."""
    style.check_path(path)
    rows = [charts(comparison, what) for what in subjects(comparison)]
    if not rows:
        raise DiffbitError("all models came quantized, so there is nothing to draw against bits; give a float one, too")
    columns = max(len(row) for row in rows)
    with style.panels(columns, len(rows)) as (figure, axes):
        for number, row in enumerate(rows):
            for panel, chart in zip(axes[number * columns :], row, strict=False):
                draw(panel, chart)
            for empty in axes[number * columns + len(row) : (number + 1) * columns]:
                empty.set_axis_off()
        style.save(figure, path)


def plot_outliers(reports: Sequence[Data], path: str | Path) -> None:
    """Largest value and median of every layer, of hidden states and of attention logits."""
    style.check_path(path)
    with style.panels(2) as (figure, axes):
        for panel, site in zip(axes, SITES, strict=True):
            layers(panel, reports, site)
        style.save(figure, path)


def plot_plan(plan: Data, path: str | Path) -> None:
    """Mixed precision, a `Plan.to_dict()`: what every budget would lose, and the bits that each layer got."""
    style.check_path(path)
    with style.panels(2) as (figure, axes):
        frontier(axes[0], plan)
        bits(axes[1], plan["layers"])
        style.save(figure, path)


def subjects(comparison: Data) -> list[str]:
    """What was compared."""
    return [what for what in SUBJECTS if any(result["what"] == what for result in comparison["results"])]


@dataclass(frozen=True)
class Chart:
    """A metric ("increase" of perplexity, "kl", or "found": needles) of `lines`, {label: results}, against the widths
    compared."""

    title: str
    what: str
    metric: str
    lines: dict[str, list[Data]]
    widths: dict[str, float]  # {format: bits}, widest first
    bounds: tuple[float, float]  # of the lines and bands, above the floor; charts side by side share them
    setting: int = 0  # of needles, where they are the metric: which of the settings compared


def charts(comparison: Data, what: str) -> list[Chart]:
    """What to draw of weights, or of a part of attention.

    One method: perplexity, KL and each setting of needles, a line for each model. Several: perplexity only, a chart
    for each model with a line for each method.
    """
    results = [result for result in comparison["results"] if result["what"] == what]
    names = list(dict.fromkeys(result["model"] for result in results))  # not those quantized already
    methods = list(dict.fromkeys(result["method"] for result in results))
    widths = order(results)
    place = {name: column for column, name in enumerate(widths)}

    def of(key: str, value: str, among: Sequence[Data]) -> list[Data]:
        return sorted((r for r in among if r[key] == value), key=lambda r: place[r["format"]])

    if len(methods) == 1:
        lines = {name: of("model", name, results) for name in names}
        subject = SUBJECTS[what]
        titles = {"increase": f"{subject}: increase of perplexity", "kl": f"{subject}: KL divergence"}
        drawn = [Chart(titles[m], what, m, lines, widths, _bounds(results, m)) for m in METRICS]
        whole = {r["model"]: r["retrieval"] for r in comparison["results"] if r["what"] == "none"}
        for setting, asked in enumerate(comparison["needles"]):
            title = f"{subject}: {asked['queries']} of {asked['needles']} needles"
            told = {
                f"{name}, {whole[name][setting]['accuracy']['value']:.1%} at 16 bits": own
                for name, own in lines.items()
            }
            drawn.append(Chart(title, what, "found", told, widths, _points(results, setting), setting))
        return drawn
    bounds = _bounds(results, "increase")
    own = {name: [r for r in results if r["model"] == name] for name in names}
    return [
        Chart(f"{name}: increase of perplexity", what, "increase", {m: of("method", m, own[name]) for m in methods},
              widths, bounds)
        for name in names
    ]  # fmt: skip


def draw(axes: Axes, chart: Chart) -> None:
    """A line with its band of confidence for each label of the chart."""
    if chart.metric == "found":
        _draw_found(axes, chart)
    else:
        _draw_loss(axes, chart)
    columns = range(len(chart.widths))
    axes.set_title(chart.title)
    axes.set_xticks(columns, [_tick(name, chart) for name in chart.widths])
    axes.set_xlim(-0.35, len(chart.widths) - 0.65)
    axes.set_xlabel(AXES.get(chart.what, "format of the cache"))
    axes.legend(loc="upper left" if chart.metric != "found" else "lower left", ncols=1 if len(chart.lines) < 4 else 2)


def _draw_found(axes: Axes, chart: Chart) -> None:
    """Queries answered, in points more or less than by the 16-bit model; linear."""
    columns = {name: column for column, name in enumerate(chart.widths)}
    axes.axhline(0, color=style.MUTED, linewidth=0.8, zorder=1)
    for index, own in enumerate(chart.lines.values()):
        x = [columns[r["format"]] for r in own]
        value, low, high = ([_change(r, chart.setting, end) for r in own] for end in ("value", "low", "high"))
        look = style.line(index)
        axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
        axes.plot(x, value, label=list(chart.lines)[index], zorder=3, **look)
    lowest, highest = chart.bounds
    room = highest - lowest
    axes.set_ylim(lowest - room * (0.08 + 0.09 * len(chart.lines)), highest + 0.05 * room)
    length = next(iter(chart.lines.values()))[0]["retrieval"][chart.setting]["length"]
    axes.set_ylabel(f"points to 16 bits, of {length:,} tokens")


def _draw_loss(axes: Axes, chart: Chart) -> None:
    """Logarithmic. Points at or below the axis's floor are drawn on it, hollow."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    columns = {name: column for column, name in enumerate(chart.widths)}
    floor = FLOOR[chart.metric]
    for index, (label, own) in enumerate(chart.lines.items()):
        x = [columns[r["format"]] for r in own]
        value, low, high = ([_metric(r, chart.metric, end) for r in own] for end in ("value", "low", "high"))
        seen = [max(v, floor) for v in value]
        look = style.line(index)
        bottom, top = ([max(v, floor) for v in ends] for ends in (low, high))
        axes.fill_between(x, bottom, top, color=look["color"], alpha=0.18, linewidth=0)
        axes.plot(x, seen, label=label, zorder=3, **look)
        hidden = [place for place, v in zip(x, value, strict=True) if v <= floor]
        hollow = {"color": look["color"], "marker": look["marker"], "markerfacecolor": "white", "linestyle": "none"}
        axes.plot(hidden, [floor] * len(hidden), zorder=4, **hollow)
    axes.set_yscale("log")
    lowest, highest = chart.bounds
    room = highest / lowest
    names = -(-len(chart.lines) // (1 if len(chart.lines) < 4 else 2))  # rows of the legend
    axes.set_ylim(lowest / room**0.05, highest * room ** (0.08 + 0.07 * names))
    axes.yaxis.set_minor_locator(NullLocator())
    if chart.metric == "increase":
        axes.set_ylabel("over the 16-bit model")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _percent(y, floor)))
    else:
        axes.set_ylabel("from the 16-bit model, nats per token")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}".replace("e-0", "e-")))


def _bounds(results: Sequence[Data], metric: str) -> tuple[float, float]:
    """The lowest value and the highest end of a band, not below the floor."""
    floor = FLOOR[metric]
    lowest = min((max(_metric(r, metric, "value"), floor) for r in results), default=1.0)
    highest = max((max(_metric(r, metric, end), floor) for r in results for end in ("value", "high")), default=1.0)
    return min(1.0, lowest), max(100 * floor, highest)


def _points(results: Sequence[Data], setting: int) -> tuple[float, float]:
    """The lowest and the highest end of a band of needles found, at least a point on either side of 0."""
    ends = [_change(r, setting, end) for r in results for end in ("low", "high")]
    return min(-1.0, *ends), max(1.0, *ends)


def _change(result: Data, setting: int, end: str) -> float:
    return 100 * float(result["retrieval"][setting]["change"][end])


def _metric(result: Data, metric: str, end: str) -> float:
    return result["ratio"][end] - 1 if metric == "increase" else result["kl"][end]


def _percent(value: float, floor: float) -> str:
    return f"{'≤ ' if value <= floor * 1.01 else ''}{100 * value:,g}%"


def frontier(axes: Axes, plan: Data) -> None:
    """Predicted divergence against bits a weight: of the best choice at each budget, and of all layers alike.

    The chosen model stands where it was measured, hollow where it was predicted.
    """
    from matplotlib.ticker import FuncFormatter, NullLocator

    floor = FLOOR["kl"]
    chosen = plan["rounds"][plan["chosen"]]
    own, alike, here = style.line(0), style.line(1) | {"linestyle": "none"}, style.line(2) | {"linestyle": "none"}
    x, y = zip(*plan["curve"], strict=True)
    axes.step(x, [max(value, floor) for value in y], where="post", label="mixed, predicted", **own | {"marker": ""})
    points = {name: point for name, point in plan["uniform"].items() if point[1] > floor}  # not float
    for name, point in points.items():
        axes.annotate(name, point, (5, 5), textcoords="offset points", fontsize=8.5, color=style.MUTED)
    sizes, losses = zip(*points.values(), strict=True) if points else ((), ())
    axes.plot(sizes, losses, label="all layers alike, predicted", **alike)
    place = [plan["bits_per_weight"]]
    hollow = here | {"markerfacecolor": "white", "markeredgecolor": here["color"]}
    axes.plot(place, [max(chosen["predicted"], floor)], **hollow)
    axes.plot(place, [max(chosen["measured"], floor)], label="chosen, measured", zorder=4, **here)
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}".replace("e-0", "e-")))
    axes.set_xlim(min(x) - 0.25, max(9.0, place[0] + 0.25))
    axes.set_title("Loss against size")
    axes.set_ylabel("KL from the float model, nats per token")
    axes.set_xlabel("bits a weight, scales included")
    axes.legend(loc="upper right")


def bits(axes: Axes, rows: Sequence[Data]) -> None:
    """Bits a weight of each layer, scales included, as a map of layers by kind of layer."""
    sized = [
        {"name": row["name"], "bits": 8 * row["sizes"][row["format"]] / (row["shape"][0] * row["shape"][1])}
        for row in rows
    ]
    heat_map(axes, sized, "Bits a weight", "bits", 8.0, "layer", lambda value: f"{value:.2f}")


def layers(axes: Axes, reports: Sequence[Data], site: str) -> None:
    """The largest |x| of every layer, and its median (thin), of all models; log axis."""
    from matplotlib.ticker import MaxNLocator

    for index, report in enumerate(reports):
        own = report[site]["layers"]
        x = list(range(len(own)))
        look = style.line(index)
        axes.plot(x, [layer["top"]["1"] for layer in own], label=f"{report['model']}, largest", zorder=3, **look)
        medians = [layer["median"] for layer in own]
        if all(medians):
            thin = {**look, "linewidth": 1.0, "markersize": 3, "alpha": 0.7}
            axes.plot(x, medians, label=f"{report['model']}, median", **thin)
    axes.set_yscale("log")
    axes.set_title(f"{SITES[site]}: largest and median |x|")
    axes.set_xlabel("layer")
    axes.set_ylabel("|x|")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.set_xlim(-0.3, max(len(report[site]["layers"]) for report in reports) - 0.7)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** (0.12 + 0.09 * len(reports)))  # room for the legend
    _plain_log_ticks(axes)
    axes.legend(loc="upper left", ncols=2, columnspacing=1.2, handlelength=2.2)


def errors(axes: Axes, weights: Sequence[Data], title: str, value: str, largest: float) -> None:
    """`value` ("output_error" or "weight_error") of each quantized layer, as a map of layers by kind of layer.

    `largest` has the darkest colour, so that several maps can share a scale.
    """
    heat_map(axes, weights, title, value, largest, "layer; relative error in %", lambda error: f"{100 * error:.1f}")


def distribution(axes: Axes, run: Data) -> None:
    """Float weights over their scales, a histogram for each kind of layer, one above the other; colours say which code
    a weight has, and numbers how many have it where there are three codes."""
    edges, thresholds = run["edges"], run["thresholds"]
    middles = [(a + b) / 2 for a, b in zip(edges[1:], edges[:-1], strict=True)]
    ternary = len(run["values"]) == 3
    colors = (style.COLORS[0], style.MUTED, style.COLORS[1]) if ternary else (style.COLORS[0], style.COLORS[5])
    zone = [sum(middle > threshold for threshold in thresholds) for middle in middles]  # the code of each bin
    kinds = list(run["kinds"])
    for row, kind in enumerate(reversed(kinds)):
        counts = run["kinds"][kind]["counts"]
        heights = [0.9 * count / max(counts) for count in counts]
        for code in sorted(set(zone)):
            first, last = zone.index(code), len(zone) - zone[::-1].index(code)
            tops, color = [row + height for height in heights[first:last]], colors[code % len(colors)]
            axes.stairs(tops, edges[first : last + 1], baseline=row, fill=True, color=color)
        if ternary:
            for x, share in zip((-2.6, 0.0, 2.6), run["kinds"][kind]["shares"], strict=True):
                axes.text(x, row + (0.4 if x else 0.12), f"{share:.0%}", ha="center", fontsize=9,
                          color="white" if not x else style.INK)  # fmt: skip
    for threshold in thresholds if ternary else ():
        axes.axvline(threshold, color=style.INK, linewidth=0.9, linestyle=(0, (3, 2)))
    axes.set_yticks([row + 0.3 for row in range(len(kinds))], list(reversed(kinds)))
    axes.set_ylim(0, len(kinds))
    axes.set_xlim(edges[0], edges[-1])
    axes.set_title(f"Float weights behind {run['format']} codes")
    axes.set_xlabel("weight / scale; dashed: where codes change" if ternary else "weight / scale")
    axes.grid(False)
    axes.spines["left"].set_visible(False)


def movement(axes: Axes, runs: Mapping[str, Data], what: str) -> None:
    """ "flips" (logarithmic) or "zeros" of each run over its steps."""
    from matplotlib.ticker import FuncFormatter

    for index, (name, run) in enumerate(runs.items()):
        look = style.line(index) | {"marker": ""}
        axes.plot(run["steps"], run[what], label=name, **look)
    if what == "flips" and any(max(run["flips"]) > 0 for run in runs.values()):
        axes.set_yscale("log", nonpositive="clip")
        _plain_log_ticks(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:,g}%"))
    titles = {"flips": "Codes that move in a step", "zeros": "Codes that are 0"}
    axes.set_title(titles[what])
    axes.set_ylabel("of the quantized weights")
    axes.set_xlabel("step")
    axes.legend(loc="best")


def heat_map(
    axes: Axes, rows: Sequence[Data], title: str, value: str, largest: float, label: str, show: Callable[[float], str]
) -> None:
    """row[value] of each linear layer by its name: decoder layers from left to right, kinds from top to bottom."""
    from matplotlib.colors import LinearSegmentedColormap

    parts = [(row["name"].removesuffix(".weight").split("."), row[value]) for row in rows]
    parts = [(name, found) for name, found in parts if name[:2] == ["model", "layers"]]
    kinds = list(dict.fromkeys(name[-1] for name, _ in parts))
    count = 1 + max(int(name[2]) for name, _ in parts)
    table = [[float("nan")] * count for _ in kinds]
    for name, found in parts:
        table[kinds.index(name[-1])][int(name[2])] = found
    largest = largest or 1.0  # nothing lost anywhere: all light
    heat = LinearSegmentedColormap.from_list("heat", style.HEAT)
    axes.pcolormesh(table, cmap=heat, vmin=0, vmax=largest, edgecolors="white", linewidth=1.5)
    if count <= 12:
        for row, column in ((r, c) for r in range(len(kinds)) for c in range(count)):
            found = table[row][column]
            if found == found:  # not NaN: this layer is there
                color = "white" if found > 0.85 * largest else style.INK
                axes.text(column + 0.5, row + 0.5, show(found), ha="center", va="center", fontsize=8.5, color=color)
    axes.set_title(title)
    axes.set_yticks([row + 0.5 for row in range(len(kinds))], kinds)
    step = 1 if count <= 16 else 4
    axes.set_xticks([column + 0.5 for column in range(0, count, step)], [str(c) for c in range(0, count, step)])
    axes.set_xlabel(label)
    axes.invert_yaxis()
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def order(results: Sequence[Data]) -> dict[str, float]:
    """{format: bits a weight, or bits} of results, widest first."""
    size = {r["format"]: r["bits_per_weight"] if r["what"] == "weights" else r["bits"] for r in results}
    rank = {r["format"]: (r["bits"], size[r["format"]]) for r in results}
    return {name: size[name] for name in sorted(size, key=lambda name: rank[name], reverse=True)}


def _tick(name: str, chart: Chart) -> str:
    if chart.what != "weights":
        return name.removesuffix("-bit")
    number, _, grain = name.partition("_")
    if not grain:  # the name does not say what shares a scale; the format does
        rows, groups = parse_format(name).scale_shape((2, 256))
        grain = "tensor" if rows == 1 else "row" if groups == 1 else f"g{256 // groups}"
    return f"{number}\n{grain.replace('_', ' ')}\n{chart.widths[name]:.2f}"


def _plain_log_ticks(axes: Axes) -> None:
    """Numbers a reader need not decode: 0.1, 1, 10, 3,000."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axes.get_ylim()
    few = high / low < 1000
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())
