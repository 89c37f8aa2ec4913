"""Loss curves as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MissingDependency
from ..files import write_atomic


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files."""
    try:
        import matplotlib
    except ImportError:
        raise MissingDependency("matplotlib", "lab", "the loss plot") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_losses(logs: Mapping[str, list[dict[str, Any]]], path: str | Path) -> None:
    """Draw the training loss (mean of 20 steps, over the single steps), the evaluation loss and, where there were
    needles, the loss of their answers (mean of 20 steps) of each named log."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for index, (name, log) in enumerate(logs.items()):
        color = f"C{index}"
        steps = np.array([row["step"] for row in log])
        losses = np.array([row["loss"] for row in log])
        axes.plot(steps, losses, color=color, alpha=0.2, linewidth=0.8)
        axes.plot(*_smooth(steps, losses), color=color, label=f"{name}, training")
        answers = [(row["step"], row["answer_loss"]) for row in log if "answer_loss" in row]
        if answers:
            found = _smooth(*np.array(answers).T)
            axes.plot(*found, color=color, linestyle=":", label=f"{name}, needles' answers")
        scored = [(row["step"], row["eval_loss"]) for row in log if "eval_loss" in row]
        if scored:
            axes.plot(*zip(*scored, strict=True), "o", color=color, markersize=4, label=f"{name}, held out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    with write_atomic(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    plt.close(figure)


def _smooth(steps: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of 20 steps, or of all where there are fewer."""
    width = min(20, len(losses))
    return steps[width - 1 :], np.convolve(losses, np.ones(width) / width, mode="valid")
