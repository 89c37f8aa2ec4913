"""The plot of mixed precision. It takes an `Allocation.to_dict()`, so that a JSON file can be plotted again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...io.drawing import MUTED, Data, drawn, heat_map, line, logarithmic

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_allocation(allocation: Data, path: str | Path) -> None:
    """Plot mixed precision, an `Allocation.to_dict()`: loss against size, and the bits of each layer."""
    rows = [
        {"name": row["name"], "bits": 8 * row["sizes"][row["format"]] / (row["shape"][0] * row["shape"][1])}
        for row in allocation["layers"]
    ]
    with drawn(path, 2) as axes:
        frontier(axes[0], allocation)
        heat_map(axes[1], rows, "bits", 8.0, ".2f")
        axes[1].set_title("Bits per weight")


def frontier(axes: Axes, allocation: Data) -> None:
    """Draw predicted KL divergence against bits per weight: the best choice for each budget, and all layers alike.

    A filled marker shows the chosen model as measured, a hollow one as predicted.
    """
    floor, size = 1e-7, allocation["bits_per_weight"]
    alike = {name: point for name, point in allocation["uniform"].items() if point[1] > floor}  # not the float model
    sizes, losses = zip(*allocation["curve"], strict=True)
    mixed, others, here = line(0) | {"marker": ""}, line(1) | {"linestyle": "none"}, line(2) | {"linestyle": "none"}
    axes.step(sizes, [max(loss, floor) for loss in losses], where="post", label="mixed, predicted", **mixed)
    axes.plot(*zip(*alike.values(), strict=True), label="all layers alike, predicted", **others)
    for name, point in alike.items():
        axes.annotate(name, point, (5, 5), textcoords="offset points", fontsize=8.5, color=MUTED)
    hollow = here | {"markerfacecolor": "white", "markeredgecolor": here["color"]}
    axes.plot([size], [max(allocation["predicted"], floor)], **hollow)
    if allocation["measured"] is not None:
        axes.plot([size], [max(allocation["measured"], floor)], label="chosen, measured", zorder=4, **here)
    logarithmic(axes)
    axes.set_xlim(min(sizes) - 0.25, max(9.0, size + 0.25))
    axes.set_title("Loss against size")
    axes.set_ylabel("KL from the float model, nats per token")
    axes.set_xlabel("bits per weight, scales included")
    axes.legend(loc="upper right")
