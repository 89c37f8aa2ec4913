"""The plot of mixed precision. It takes an `Allocation.to_dict()`, so that a JSON file can be plotted again."""

from __future__ import annotations

from pathlib import Path

from ...io.drawing import POINTS, Chart, Data, HeatMap, Line, style, write_charts

FLOOR = 1e-7  # nats; below it is noise


def plot_allocation(allocation: Data, path: str | Path) -> None:
    """Plot mixed precision, an `Allocation.to_dict()`: loss against size, and the bits of each layer."""
    bits = {
        row["name"]: 8 * row["sizes"][row["format"]] / (row["shape"][0] * row["shape"][1])
        for row in allocation["layers"]
    }
    write_charts(path, [frontier(allocation), HeatMap("Bits per weight", "layer", bits, 8.0, ".2f")])


def frontier(allocation: Data) -> Chart:
    """Return predicted KL divergence against bits per weight: the best choice for each budget, all layers alike, and
    the chosen model."""
    size, uniform = allocation["bits_per_weight"], allocation["uniform"]
    largest = max(9.0, size)  # float layers would press the others against the left edge
    alike = {name: point for name, point in uniform.items() if point[0] <= largest and point[1] > FLOOR}
    hollow = POINTS | {"markersize": 9, "markerfacecolor": "none", "markeredgecolor": style(2)["color"]}
    lines = [
        Line(
            "mixed, predicted",
            [point for point in allocation["curve"] if point[0] <= largest],
            look={"marker": "", "drawstyle": "steps-post"},
        ),
        Line("all layers alike, predicted", list(alike.values()), list(alike), POINTS),
        Line("chosen, predicted", [(size, allocation["predicted"])], look=hollow),
    ]
    if allocation["measured"] is not None:
        lines.append(Line("chosen, measured", [(size, allocation["measured"])], look=POINTS))
    labels = "bits per weight, scales included", "KL from the float model, nats per token"
    return Chart("Loss against size", *labels, lines, floor=FLOOR)
