"""The plot of mixed precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from diffbit.apps.allocate.plot import frontier, plot_allocation
from diffbit.io.drawing import panels


def made_up() -> dict[str, Any]:
    """An allocation of two layers, as `Allocation.to_dict()` has it."""
    sizes = {"int2_g64": 1152, "int4_g32": 2304, "none": 8192}
    layers = [
        {"name": f"model.layers.0.mlp.{kind}", "shape": [64, 64], "format": format, "sizes": sizes,
         "losses": {"int2_g64": loss, "int4_g32": loss / 25, "none": 0.0}}
        for kind, format, loss in (("up_proj", "int4_g32", 0.4), ("down_proj", "int2_g64", 0.1))
    ]  # fmt: skip
    return {
        "scheme": {"weights": "int4_g32", "overrides": {"model.layers.0.mlp.down_proj": "int2_g64"}},
        "method": "rtn",
        "layers": layers,
        "nbytes": 3456,
        "bits_per_weight": 3.375,
        "predicted": 0.116,
        "measured": 0.12,
        "curve": [(2.25, 0.5), (3.375, 0.116), (4.5, 0.02)],
        "uniform": {"int2_g64": (2.25, 0.5), "int4_g32": (4.5, 0.02), "int8_g16": (9.0, 0.0), "none": (32.0, 0.01)},
        "tokens": 4096,
    }


def test_plot_shows_losses_of_budgets_and_bits_of_layers(tmp_path: Path) -> None:
    allocation = made_up()
    with panels() as (_, axes):
        frontier(allocation).draw(axes[0])
        lines = {line.get_label(): line.get_xydata().tolist() for line in axes[0].lines}
        names = [text.get_text() for text in axes[0].texts]
        (chosen,) = (line for line in axes[0].lines if line.get_label() == "chosen, predicted")
        assert chosen.get_markerfacecolor() == "none" and chosen.get_markeredgecolor() == chosen.get_color()
    assert lines["mixed, predicted"] == [list(point) for point in allocation["curve"]]
    # neither a format that loses nothing, nor one beyond 9 bits, which would press the others against the left edge
    assert lines["all layers alike, predicted"] == [[2.25, 0.5], [4.5, 0.02]]
    assert names == ["int2_g64", "int4_g32"]
    assert lines["chosen, measured"] == [[3.375, 0.12]]
    plot_allocation(allocation, tmp_path / "mixed.svg")
    drawn = "".join(ElementTree.fromstring((tmp_path / "mixed.svg").read_text()).itertext())
    assert "int4_g32" in drawn and "4.50" in drawn and "2.25" in drawn  # bits a weight of the two layers
