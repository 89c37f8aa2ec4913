"""The plot of mixed precision. It takes a `Plan.to_dict()`, so that a JSON file can be plotted again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...io.drawing import MUTED, Data, drawn, heat_map, line, logarithmic

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_plan(plan: Data, path: str | Path) -> None:
    """Plot mixed precision, a `Plan.to_dict()`: loss against size, and the bits of each layer."""
    rows = [
        {"name": row["name"], "bits": 8 * row["sizes"][row["format"]] / (row["shape"][0] * row["shape"][1])}
        for row in plan["layers"]
    ]
    with drawn(path, 2) as axes:
        frontier(axes[0], plan)
        heat_map(axes[1], rows, "bits", 8.0, ".2f")
        axes[1].set_title("Bits per weight")


def frontier(axes: Axes, plan: Data) -> None:
    """Draw predicted KL divergence against bits per weight: the best choice for each budget, and all layers alike.

    A filled marker shows the chosen model as measured, a hollow one as predicted.
    """
    floor, size = 1e-7, plan["bits_per_weight"]
    alike = {name: point for name, point in plan["uniform"].items() if point[1] > floor}  # not the float model
    sizes, losses = zip(*plan["curve"], strict=True)
    own, others, here = line(0) | {"marker": ""}, line(1) | {"linestyle": "none"}, line(2) | {"linestyle": "none"}
    axes.step(sizes, [max(loss, floor) for loss in losses], where="post", label="mixed, predicted", **own)
    axes.plot(*zip(*alike.values(), strict=True), label="all layers alike, predicted", **others)
    for name, point in alike.items():
        axes.annotate(name, point, (5, 5), textcoords="offset points", fontsize=8.5, color=MUTED)
    hollow = here | {"markerfacecolor": "white", "markeredgecolor": here["color"]}
    axes.plot([size], [max(plan["predicted"], floor)], **hollow)
    axes.plot([size], [max(plan["measured"], floor)], label="chosen, measured", zorder=4, **here)
    logarithmic(axes)
    axes.set_xlim(min(sizes) - 0.25, max(9.0, size + 0.25))
    axes.set_title("Loss against size")
    axes.set_ylabel("KL from the float model, nats per token")
    axes.set_xlabel("bits per weight, scales included")
    axes.legend(loc="upper right")
