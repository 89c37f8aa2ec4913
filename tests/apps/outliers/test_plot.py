"""The plot of outliers is a file that shows every model."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from diffbit.io.drawing import SITES, outliers_chart, write_charts

from ... import made_up


@pytest.mark.filterwarnings("error")
def test_legend_has_room_for_long_names(tmp_path: Path) -> None:
    """Matplotlib warns where a legend leaves no room for the axes."""
    names = ("SmolLM2-135M-Instruct.Q4_1.gguf", "a" * 80, "a<b & $c_d$")
    reports = [made_up.outliers(name) for name in names]
    write_charts(tmp_path / "outliers.svg", [outliers_chart(reports, site) for site in SITES])
    text = "".join(ElementTree.fromstring((tmp_path / "outliers.svg").read_text()).itertext())
    assert "Attention logits: largest and median" in text and "a<b & $c_d$, largest" in text
