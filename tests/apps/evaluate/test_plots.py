"""Plots show the numbers they are given, in two file formats, the same bytes each time."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from diffbit.apps.evaluate import plots
from diffbit.apps.evaluate.plots import plot_comparison
from diffbit.io.drawing import panels

from . import made_up

FORMATS = ["int8", "int4_g64", "int2_g64", "ternary"]


def test_a_curve_shows_the_increase_from_wide_to_narrow() -> None:
    data = made_up.comparison()
    data["results"].reverse()  # whatever order they come in
    with panels() as (_, axes):
        plots.charts(data, "weights")[0].draw(axes[0])
        lines = {line.get_label(): list(line.get_ydata()) for line in axes[0].lines if line.get_linestyle() != "None"}
        ticks = [tick.get_text() for tick in axes[0].get_xticklabels()]
    assert [tick.split("\n")[0] for tick in ticks] == ["int8", "int4", "int2", "ternary"]
    assert ticks[1] == "int4\ng64\n4.25"
    for model in ("diff", "plain"):
        ratios = {r["format"]: r["ratio"]["value"] for r in data["results"] if r["model"] == model}
        assert lines[model] == pytest.approx([max(100 * (ratios[name] - 1), 0.01) for name in FORMATS])


def test_a_gain_is_drawn_hollow_on_the_floor() -> None:
    with panels() as (_, axes):
        plots.charts(made_up.comparison(("one",)), "weights")[0].draw(axes[0])
        hollow = [line for line in axes[0].lines if line.get_markerfacecolor() == "white"]
    assert [list(line.get_xdata()) for line in hollow] == [[0]]


@pytest.mark.filterwarnings("error")
def test_long_names_of_models(tmp_path: Path) -> None:
    """Matplotlib warns where a legend leaves no room for the axes."""
    names = ("SmolLM2-135M-Instruct.Q4_1.gguf", "a" * 80)
    plot_comparison(made_up.comparison(names), tmp_path / "comparison.svg")


def test_kl_with_its_band() -> None:
    data = made_up.comparison(("one",))
    with panels() as (_, axes):
        plots.charts(data, "logits")[1].draw(axes[0])
        band = axes[0].collections[0].get_paths()[0].vertices
    kl = next(r["kl"] for r in data["results"] if r["format"] == "3-bit")
    heights = sorted({round(float(y), 9) for x, y in band if x == 2})
    assert heights == pytest.approx([kl["low"], kl["high"]], rel=1e-6)


def test_several_methods_have_a_chart_for_each_model() -> None:
    data = made_up.comparison(("diff", "plain", "third"), methods=("rtn", "gptq", "awq"))
    left_out = data["results"].pop(3)
    assert (left_out["model"], left_out["format"], left_out["method"]) == ("diff", "int8", "awq")
    charts = plots.charts(data, "weights")
    assert [chart.title.split(":")[0] for chart in charts] == ["diff", "plain", "third"]
    assert len({chart.bounds for chart in charts}) == 1
    ends, colors = [], []
    for chart in charts:
        with panels() as (_, axes):
            chart.draw(axes[0])
            lines = {line.get_label(): line for line in axes[0].lines if line.get_linestyle() != "None"}
            ends.append(axes[0].get_ylim())
        assert list(lines) == ["rtn", "gptq", "awq"]
        colors.append([line.get_color() for line in lines.values()])
        for method, line in lines.items():
            row = next(
                r for r in data["results"]
                if (r["model"], r["method"], r["format"]) == (chart.title.split(":")[0], method, "int4_g64")
            )  # fmt: skip
            place = list(line.get_xdata()).index(FORMATS.index("int4_g64"))
            assert line.get_ydata()[place] == pytest.approx(100 * (row["ratio"]["value"] - 1))
    assert ends[0] == ends[1] == ends[2] and colors[0] == colors[1] == colors[2]
    assert [chart.unit for chart in plots.charts(data, "logits")] == ["%", " nats"]


@pytest.mark.slow
def test_files(tmp_path: Path) -> None:
    data = made_up.comparison(("a<b & $c_d$", "plain"))
    for name in ("one.svg", "two.svg", "three.png"):
        plot_comparison(data, tmp_path / name)
    first = (tmp_path / "one.svg").read_text()
    assert first == (tmp_path / "two.svg").read_text()
    text = "".join(ElementTree.fromstring(first).itertext())
    assert "a<b & $c_d$" in text and "Attention logits: KL divergence" in text
    assert (tmp_path / "three.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.svg", "three.png", "two.svg"]
    plot_comparison(made_up.comparison(("a", "b", "c"), methods=("rtn", "gptq")), tmp_path / "four.svg")
    text = "".join(ElementTree.fromstring((tmp_path / "four.svg").read_text()).itertext())
    assert all(f"{name}: increase of perplexity" in text for name in "abc") and "gptq" in text
