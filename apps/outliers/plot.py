"""The plot of outliers. It takes each model's `OutlierReport.to_dict()`, so that a JSON file can be plotted again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...io.drawing import SITES, Data, draw_layers, drawn


def plot_outliers(reports: Sequence[Data], path: str | Path) -> None:
    """Plot the largest value and the median of every layer's hidden states and attention logits."""
    with drawn(path, 2) as panels:
        for axes, site in zip(panels, SITES, strict=True):
            draw_layers(axes, reports, site)
