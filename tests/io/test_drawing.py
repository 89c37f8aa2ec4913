"""Plots that several apps draw: they show the numbers they are given, in a .svg or .png file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from diffbit.io.drawing import LONG, Chart, HeatMap, Line, drawn, outliers_chart, panels
from diffbit.io.errors import DiffbitError, MissingDependency

from .. import made_up


def test_layers_show_largest_and_median() -> None:
    reports = [made_up.outliers("diff"), made_up.outliers("plain", 5.0)]
    with panels() as (_, axes):
        outliers_chart(reports, "hidden_states").draw(axes[0])
        lines = {line.get_label(): list(line.get_ydata()) for line in axes[0].lines}
    assert lines["diff, largest"] == [1.0, 2.0, 3.0] and lines["plain, largest"] == [5.0, 10.0, 15.0]
    assert lines["plain, median"] == [0.25] * 3


def test_a_line_without_points_is_neither_drawn_nor_told() -> None:
    """As a method that a model skipped."""
    lines = [Line("diff, rtn", [(0, 2.0), (1, 4.0)]), Line("diff, awq", [])]
    chart = Chart("Loss", "bits", "KL", lines)
    with panels() as (_, axes):
        chart.draw(axes[0])
        legend = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert legend == ["diff, rtn"]
    assert chart.words() == "Loss. diff, rtn: 2 at first, 4 at last, 4 at most."
    assert Chart("Loss", "bits", "KL", lines[1:]).words() == "Loss. No numbers."


def test_a_legend_shortens_the_model_and_keeps_the_rest() -> None:
    long = "m" * LONG + "-one"
    with panels() as (_, axes):
        Chart("", "", "", [Line(f"{long}, largest", [(0, 1.0)]), Line(f"{long}, median", [(0, 1.0)])]).draw(axes[0])
        names = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert [name.rpartition(", ")[2] for name in names] == ["largest", "median"]
    assert all("…" in name and len(name) < len(long) + 8 for name in names)


def test_heat_map_has_a_cell_for_each_layer_and_module() -> None:
    with panels() as (_, axes):
        errors = {row["name"]: row["output_error"] for row in made_up.weights()["weights"]}
        HeatMap("errors", "layer", errors, 0.06, ".2f").draw(axes[0])
        cells = {(t.get_position()): t.get_text() for t in axes[0].texts}
        modules = [tick.get_text() for tick in axes[0].get_yticklabels()]
    assert modules == ["q_proj", "down_proj"]
    assert cells[2.5, 0.5] == "0.06" and cells[0.5, 1.5] == "0.02"


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DiffbitError, match=r"plot\.pdf: a plot is written as"), drawn(tmp_path / "plot.pdf"):
        pass
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependency, match=r"pip install .*\[lab\]'"), drawn(tmp_path / "o.svg"):
        pass
