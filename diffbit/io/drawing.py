"""Draws charts in one style, drawing.mplstyle, and writes them as .svg or .png.

An app says what to draw, a `Chart` of lines or a `HeatMap`; `write_charts` and `image` draw it. Colours are those of
Okabe and Ito, which people with any colour blindness can distinguish; each line also has its own marker and dash for
black-and-white prints. matplotlib is imported only to draw.
"""

from __future__ import annotations

import io
import math
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DiffbitError, needs
from .files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Data = Mapping[str, Any]

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D00", "#56B4E9", "#5B5B5B")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 2, 1, 2)), "-", (0, (5, 2)), (0, (1, 1.4)))
INK, MUTED = "#1b1f24", "#57606a"
HEAT = ("#f3f6f9", "#c6dbef", "#6baed6", "#2171b5")  # light to dark: small to large
POINTS = {"linestyle": "none"}
WIDTH, HEIGHT = 5.0, 3.5  # inches, one panel
STYLE = Path(__file__).with_name("drawing.mplstyle")
SITES = {"hidden_states": "Hidden states", "attention_logits": "Attention logits"}  # of outliers
LONG = 32  # characters of a name in a legend, at most


def style(index: int) -> dict[str, Any]:
    """Return the colour, marker and dash of the index-th model."""
    looks = {"color": COLORS, "marker": MARKERS, "linestyle": DASHES}
    return {name: values[index % len(values)] for name, values in looks.items()} | {"markeredgecolor": "white"}


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    label: str  # in the legend; empty: the line is not in it
    points: Sequence[Sequence[float]]  # x, y, and the ends of an interval around y: a band, or a bar around one point
    names: Sequence[str] = ()  # of the points, for `words`; written beside them if the chart has no ticks
    look: dict[str, Any] = field(default_factory=dict)  # matplotlib's properties, beside those of `style`

    def words(self, unit: str, x_label: str) -> str:
        """Return y by name, and x if it has a label; without names the first, the last and the largest y."""
        y = [point[1] for point in self.points]
        told = [f"{name} {short(value)}{unit}" for name, value in zip(self.names, y, strict=bool(self.names))]
        if x_label:
            told = [f"{text} at {short(point[0])} {x_label}" for text, point in zip(told, self.points, strict=False)]
        told = told or [f"{short(y[0])} at first, {short(y[-1])} at last, {short(max(y))} at most"]
        return (f"{self.label}: " if self.label else "") + ", ".join(told)


@dataclass(frozen=True)
class Chart:
    """Lines over a horizontal axis."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    ticks: Sequence[str] = ()  # labels of x = 0, 1, ...; empty: x are numbers
    floor: float | None = None  # of a logarithmic axis: smaller values are drawn hollow on it. None: a linear axis
    unit: str = ""  # of y
    bounds: tuple[float, float] | None = None  # of y, the same for charts side by side; None: those of the lines

    def words(self) -> str:
        """Return the chart as a sentence, for readers who cannot see it."""
        lines = [line.words(self.unit, "" if self.ticks else self.x_label) for line in self.lines if line.points]
        return f"{self.title}. {'; '.join(lines) or 'No numbers'}."

    def draw(self, axes: Axes) -> None:
        """Draw the lines, with room for the legend above them, or below if the axis is linear."""
        floor = -math.inf if self.floor is None else self.floor
        for index, line in enumerate(self.lines):
            if not line.points:
                continue
            look = style(index) | line.look
            x, *heights = zip(*line.points, strict=True)
            y, *ends = ([max(value, floor) for value in values] for values in heights)
            if ends and len(x) == 1:
                bar = [[y[0] - ends[0][0]], [ends[1][0] - y[0]]]
                axes.errorbar(x, y, bar, capsize=3, color=look["color"], elinewidth=1.2)
            elif ends:
                axes.fill_between(x, ends[0], ends[1], color=look["color"], alpha=0.18, linewidth=0)
            name, comma, what = line.label.rpartition(", ")  # of a model, whose names differ at their ends
            label = f"{shortened(name)}{comma}{what}" if comma else shortened(line.label)
            axes.plot(x, y, label=label or None, **{"zorder": 3} | look)
            if hidden := [place for place, value in zip(x, y, strict=True) if value == floor]:
                hollow = look | POINTS | {"markerfacecolor": "white", "markeredgecolor": look["color"]}
                axes.plot(hidden, [floor] * len(hidden), **hollow, zorder=4)
            for name, *point in zip(line.names, x, y, strict=True) if line.names and not self.ticks else ():
                axes.annotate(
                    shortened(name), tuple(point), (6, 4), textcoords="offset points", fontsize=8.5, color=MUTED
                )
        axes.set_title(self.title)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        if self.ticks:
            axes.set_xticks(range(len(self.ticks)), list(self.ticks))
            axes.set_xlim(-0.35, len(self.ticks) - 0.65)
        elif all(isinstance(point[0], int) for line in self.lines for point in line.points):
            axes.locator_params(axis="x", integer=True)
        elif any(line.names for line in self.lines):
            axes.margins(x=0.25)  # room for the names
        self._scale(axes, sum(bool(line.label and line.points) for line in self.lines))

    def _scale(self, axes: Axes, labels: int) -> None:
        """Set the vertical axis, and the legend with this number of labels."""
        if self.floor is not None:
            logarithmic(axes)
        bottom, top = self.bounds or axes.get_ylim()
        legend = 0.08 + 0.07 * labels if labels else 0.05  # its share of the height
        if self.floor is not None:
            axes.set_ylim(bottom / (top / bottom) ** 0.05, top * (top / bottom) ** legend)
        elif self.bounds:
            axes.axhline(0, color=MUTED, linewidth=0.8, zorder=1)
            axes.set_ylim(bottom - legend * (top - bottom), top + 0.05 * (top - bottom))
        unit, below = "%" if self.unit == "%" else "", {self.floor: "≤ "}
        axes.yaxis.set_major_formatter(lambda y, _: f"{below.get(y, '')}{short(y)}{unit}")
        if labels:
            axes.legend(loc="best" if self.bounds is None else "lower left" if self.floor is None else "upper left")


@dataclass(frozen=True)
class HeatMap:
    """A number of each linear layer: decoder layers from left to right, modules from top to bottom."""

    title: str
    x_label: str
    numbers: Mapping[str, float]  # by the layer's name, such as model.layers.0.mlp.up_proj
    largest: float  # has the darkest colour, so that several maps can share a scale
    show: str  # how a number is written
    unit: str = ""

    def words(self) -> str:
        """Return the map as a sentence, for readers who cannot see it."""
        worst = max(self.numbers, key=self.numbers.__getitem__)
        return f"{self.title}, {self.x_label}: at most {self.numbers[worst]:.2f}{self.unit}, of {worst}."

    def draw(self, axes: Axes) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        parts = [(name.removesuffix(".weight").split("."), number) for name, number in self.numbers.items()]
        cells = {(name[-1], int(name[2])): number for name, number in parts if name[:2] == ["model", "layers"]}
        modules = list(dict.fromkeys(module for module, _ in cells))
        count, largest = 1 + max(layer for _, layer in cells), self.largest or 1.0
        table = [[cells.get((module, layer), math.nan) for layer in range(count)] for module in modules]
        heat = LinearSegmentedColormap.from_list("heat", HEAT)
        axes.pcolormesh(table, cmap=heat, vmin=0, vmax=largest, edgecolors="white", linewidth=1.5)
        for (module, layer), number in cells.items() if count <= 12 else ():
            color = "white" if number > 0.85 * largest else INK
            place = layer + 0.5, modules.index(module) + 0.5
            axes.text(*place, format(number, self.show), ha="center", va="center", fontsize=8.5, color=color)
        axes.set_yticks([row + 0.5 for row in range(len(modules))], modules)
        shown = range(0, count, 1 if count <= 16 else 4)
        axes.set_xticks([layer + 0.5 for layer in shown], [str(layer) for layer in shown])
        axes.set_title(self.title)
        axes.set_xlabel(self.x_label)
        axes.invert_yaxis()
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)


def outliers_chart(reports: Sequence[Data], site: str) -> Chart:
    """Return the chart of each layer's largest |x| and median of some models: each an `OutlierReport.to_dict()`."""
    lines = []
    for index, report in enumerate(reports):
        if report[site] is not None:  # a model without attention has no logits
            layers, thin = report[site]["layers"], {"linewidth": 1.0, "markersize": 3, "alpha": 0.7}
            largest = [(layer["layer"], layer["top"]["1"]) for layer in layers]
            medians = [(layer["layer"], layer["median"]) for layer in layers]
            lines.append(Line(f"{report['model']}, largest", largest, look=style(index)))
            if all(layer["median"] for layer in layers):
                lines.append(Line(f"{report['model']}, median", medians, look=style(index) | thin))
    return Chart(f"{SITES[site]}: largest and median |x|", "layer", "|x|", lines, floor=0.0)


def require_matplotlib() -> None:
    """Raise MissingDependency if matplotlib is not installed."""
    with needs("matplotlib", "lab", "drawing plots"):
        import matplotlib  # noqa: F401


def check_plot(path: Path) -> None:
    """Raise DiffbitError if a plot cannot be written there: before long work of which it is a picture."""
    require_matplotlib()
    if path.suffix.lower() not in (".svg", ".png"):
        raise DiffbitError(f"{path}: a plot is written as .svg or .png; choose such a name")


def write_charts(path: str | Path, *rows: Sequence[Chart | HeatMap]) -> None:
    """Write rows of charts to a .svg or .png file."""
    columns = max(map(len, rows))
    with drawn(path, columns, len(rows)) as axes:
        for number, row in enumerate(rows):
            for index, panel in enumerate(axes[number * columns : (number + 1) * columns]):
                row[index].draw(panel) if index < len(row) else panel.set_axis_off()


def image(chart: Chart | HeatMap) -> str:
    """Return a chart as the address of an image that is in the address itself, for a page of one file."""
    with panels() as (figure, (axes,)):
        chart.draw(axes)
        return f"data:image/svg+xml;base64,{b64encode(svg(figure).encode()).decode()}"


@contextmanager
def panels(columns: int = 1, rows: int = 1) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure with panels in this style, row by row, to draw and save in; changes no global state."""
    require_matplotlib()
    import matplotlib.figure

    with matplotlib.rc_context(fname=STYLE):
        figure = matplotlib.figure.Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
        yield figure, list(figure.subplots(rows, columns, squeeze=False).flat)


@contextmanager
def drawn(path: str | Path, columns: int = 1, rows: int = 1) -> Iterator[list[Axes]]:
    """Yield panels to draw in, written to a .svg or .png file at the end; other names are refused at the start."""
    check_plot(path := Path(path))
    with panels(columns, rows) as (figure, axes):
        yield axes
        with write_atomic(path) as temporary:
            if path.suffix.lower() == ".svg":
                temporary.write_text(svg(figure), encoding="utf-8")
            else:
                figure.savefig(temporary, format="png", dpi=200)


def svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "diffbit"})
    font = "".join(re.findall("font-family:[^;]*;", buffer.getvalue())[:1])  # named once, in the style of all elements
    return buffer.getvalue().replace(font, "").replace("*{", "*{" + font, 1)


def short(value: float) -> str:
    """Format a number with three significant digits, and commas for thousands."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}".replace("e-0", "e-")


def shortened(name: str) -> str:
    """Return a model's name for a legend, without its middle if it is long."""
    return name if len(name) <= LONG else f"{name[: LONG // 2]}…{name[-LONG // 2 :]}"


def logarithmic(axes: Axes) -> None:
    """Set a logarithmic vertical axis whose values are written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
