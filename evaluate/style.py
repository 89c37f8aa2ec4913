"""The look that all plots share: colours, type, axes. matplotlib comes in here, and only when something is drawn.

Colours are those of Okabe and Ito, told apart with every kind of colour blindness; each model also has a marker and a
dash of its own, so that a print in grey reads the same. A model keeps its place in all plots: the i-th model of a
comparison is the i-th colour everywhere, in the report's tables too.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..errors import DiffbitError, MissingDependency

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D00", "#56B4E9", "#5B5B5B")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 2, 1, 2)), "-", (0, (5, 2)), (0, (1, 1.4)))
INK, MUTED, RULE = "#1b1f24", "#57606a", "#d8dee4"
HEAT = ("#f3f6f9", "#c6dbef", "#6baed6", "#2171b5")  # light to dark: small to large
WIDTH, HEIGHT = 5.0, 3.5  # inches, one panel
FONTS = ["Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans"]
FORMATS = (".svg", ".png")

_RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelsize": 10,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "text.parse_math": False,  # a model may be called $a_b$
    "svg.fonttype": "none",  # text stays text: it can be read out, searched, and is set in the reader's font
    "svg.hashsalt": "diffbit",  # the same data gives the same bytes
}


@contextmanager
def panels(columns: int = 1, rows: int = 1) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure with panels in this style, row by row. Nothing global is touched."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency("matplotlib", "lab", "drawing plots") from None
    with matplotlib.rc_context({**_RC, "font.sans-serif": FONTS}):
        figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
        if rows * columns > 1:
            figure.get_layout_engine().set(wspace=0.06, hspace=0.08)  # type: ignore[union-attr, call-arg]
        yield figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def line(index: int) -> dict[str, Any]:
    """Colour, marker and dash of the index-th model."""
    return {
        "color": COLORS[index % len(COLORS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
        "markeredgecolor": "white",
        "markeredgewidth": 0.8,
    }


def check_path(path: str | Path) -> Path:
    """A plot is written as .svg or .png; better said before the work than after it."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise DiffbitError(f"{path}: a plot is written as {' or '.join(FORMATS)}; choose such a name")
    return path


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure to a .svg or .png file."""
    path = check_path(path)
    if path.suffix.lower() == ".svg":
        text = _svg(figure)
        with files.write_atomic(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    else:
        with files.write_atomic(path) as temporary:
            figure.savefig(temporary, format="png", dpi=200)


def inline(figure: Figure, prefix: str) -> str:
    """A figure as an <svg> element for a page; `prefix` keeps its ids apart from other figures' on the same page.

    It is hidden from screen readers, which would read out tick after tick: the page describes it in words.
    """
    text = _svg(figure)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", text)
    return re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r'<svg \1aria-hidden="true"', _order(text), count=1)


def _svg(figure: Figure) -> str:
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({**_RC, "font.sans-serif": FONTS}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "diffbit"})
    return buffer.getvalue()


def _order(text: str) -> str:
    """width and height next to each other, whatever lies between them in the <svg> tag."""
    end = text.index(">")
    tag = text[:end]
    size = {name: re.search(rf'\s{name}="([^"]*)"', tag) for name in ("width", "height")}
    for found in size.values():
        if found:
            tag = tag.replace(found[0], "")
    sizes = " ".join(f'{name}="{found[1]}"' for name, found in size.items() if found)
    return tag.replace("<svg", f"<svg {sizes}", 1) + text[end:]
