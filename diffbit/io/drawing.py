"""Draws plots in one style, drawing.mplstyle, and writes them as .svg or .png.

Colours are those of Okabe and Ito, which people with any colour blindness can distinguish; each line also has its own
marker and dash for black-and-white prints. matplotlib is imported only to draw.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
INK, MUTED, RULE = "#1b1f24", "#57606a", "#d8dee4"
HEAT = ("#f3f6f9", "#c6dbef", "#6baed6", "#2171b5")  # light to dark: small to large
WIDTH, HEIGHT = 5.0, 3.5  # inches, one panel
STYLE = Path(__file__).with_name("drawing.mplstyle")
SITES = {"hidden_states": "Hidden states", "attention_logits": "Attention logits"}  # of outliers
SHORT, LONG = 14, 32  # characters of a model's name in a legend: of two columns, and at most


def require_matplotlib() -> None:
    """Raise MissingDependency if matplotlib is not installed."""
    with needs("matplotlib", "lab", "drawing plots"):
        import matplotlib  # noqa: F401


def check_plot(path: Path) -> None:
    """Raise DiffbitError if a plot cannot be written there: before long work of which it is a picture."""
    require_matplotlib()
    if path.suffix.lower() not in (".svg", ".png"):
        raise DiffbitError(f"{path}: a plot is written as .svg or .png; choose such a name")


@contextmanager
def panels(columns: int = 1, rows: int = 1) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure with panels in this style, row by row, to draw and save in; changes no global state."""
    require_matplotlib()
    import matplotlib.figure

    with matplotlib.rc_context(fname=STYLE):
        figure = matplotlib.figure.Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
        yield figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def line(index: int) -> dict[str, Any]:
    """Colour, marker and dash of the index-th model."""
    look = {"color": COLORS, "marker": MARKERS, "linestyle": DASHES}
    return {name: values[index % len(values)] for name, values in look.items()} | {"markeredgecolor": "white"}


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
    """A logarithmic vertical axis whose values are written out."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def draw_layers(axes: Axes, reports: Sequence[Data], site: str) -> None:
    """The largest |x| of every layer and its median (thin), of all models: each an `OutlierReport.to_dict()`."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    reports = [report for report in reports if report[site] is not None]  # a model without attention has no logits
    names = [shortened(report["model"]) for report in reports]
    columns = 2 if all(len(name) <= SHORT for name in names) else 1
    for index, (name, report) in enumerate(zip(names, reports, strict=True)):
        layers, look = report[site]["layers"], line(index)
        places, medians = [layer["layer"] for layer in layers], [layer["median"] for layer in layers]
        axes.plot(places, [layer["top"]["1"] for layer in layers], label=f"{name}, largest", zorder=3, **look)
        if all(medians):
            thin = look | {"linewidth": 1.0, "markersize": 3, "alpha": 0.7}
            axes.plot(places, medians, label=f"{name}, median", **thin)
    logarithmic(axes)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** (0.12 + 0.18 / columns * len(reports)))  # room for the legend
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,), numticks=12))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.set_title(f"{SITES[site]}: largest and median |x|")
    axes.set_xlabel("layer")
    axes.set_ylabel("|x|")
    if reports:
        axes.legend(loc="upper left", ncols=columns, columnspacing=1.2)


def heat_map(axes: Axes, rows: Sequence[Data], value: str, largest: float, show: str) -> None:
    """row[value] of each linear layer by its name: decoder layers from left to right, modules from top to bottom.

    `largest` has the darkest colour, so that several maps can share a scale; show: how a number is written.
    """
    from matplotlib.colors import LinearSegmentedColormap

    parts = [(row["name"].removesuffix(".weight").split("."), row[value]) for row in rows]
    cells = {(name[-1], int(name[2])): number for name, number in parts if name[:2] == ["model", "layers"]}
    modules = list(dict.fromkeys(module for module, _ in cells))
    count = 1 + max(layer for _, layer in cells)
    table = [[cells.get((module, layer), float("nan")) for layer in range(count)] for module in modules]
    heat = LinearSegmentedColormap.from_list("heat", HEAT)
    axes.pcolormesh(table, cmap=heat, vmin=0, vmax=largest or 1.0, edgecolors="white", linewidth=1.5)
    for (module, layer), number in cells.items() if count <= 12 else ():
        color = "white" if number > 0.85 * (largest or 1.0) else INK
        place = layer + 0.5, modules.index(module) + 0.5
        axes.text(*place, format(number, show), ha="center", va="center", fontsize=8.5, color=color)
    axes.set_yticks([row + 0.5 for row in range(len(modules))], modules)
    shown = range(0, count, 1 if count <= 16 else 4)
    axes.set_xticks([layer + 0.5 for layer in shown], [str(layer) for layer in shown])
    axes.set_xlabel("layer")
    axes.invert_yaxis()
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
