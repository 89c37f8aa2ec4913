"""The trained models in examples: what they are said to be, and what a newcomer does with them first."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from diffbit.calib_data import eval_windows, needle_windows
from diffbit.cli import main
from diffbit.evaluate.measure import measure
from diffbit.evaluate.variants import variants
from diffbit.models import Checkpoint, load

PERPLEXITY = {"diff_v1": 9.10, "softmax": 8.89, "diff_v2": 10.66}  # of the held-out text at the end of training

LONG = {"diff_v1": 8.38, "softmax": 8.47}  # of the longer context

Nano = Callable[[str], Path]


@pytest.mark.parametrize("name", PERPLEXITY)
def test_a_trained_model(name: str, nano: Nano) -> None:
    path = nano(name)
    assert Checkpoint(path).config.attention == name
    assert Checkpoint(path).dtype == "float16"
    assert sum(file.stat().st_size for file in path.iterdir()) < 6e6
    (whole,), _ = measure(load(path), [], eval_windows("stdlib", path, 256, 24))
    perplexity = whole.scores.perplexity().value
    assert 0.8 * PERPLEXITY[name] < perplexity < 1.25 * PERPLEXITY[name]  # the text is that of the running Python
    about = json.loads((path / "training.json").read_text())
    assert about["command"].startswith("diffbit train --preset nano --steps 2000")
    assert math.exp(about["result"]["eval_loss"]) == pytest.approx(PERPLEXITY[name], rel=0.02)
    last = (path / "loss.csv").read_text().splitlines()[-1].split(",")
    assert last[0] == "2000" and float(last[2]) == pytest.approx(about["result"]["eval_loss"], abs=1e-4)


def test_a_newcomers_first_command(nano: Nano, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["run", str(nano("diff_v1")), "def __init__(self", "--max-tokens", "24", "--quiet"])
    captured = capfd.readouterr()
    assert stopped.value.code == 0 and captured.err == ""
    assert "self." in captured.out


@pytest.mark.parametrize("name", LONG)
def test_a_model_that_finds_needles(name: str, nano: Nano) -> None:
    path = nano(name).parents[1] / "nano_1k" / name
    config = Checkpoint(path).config
    assert (config.attention, config.max_position, Checkpoint(path).dtype) == (name, 1024, "float16")
    assert sum(file.stat().st_size for file in path.iterdir()) < 6e6
    needles = needle_windows("stdlib", path, 1024, 4, 4, 4)
    chosen = variants(["4"], ["kv"])
    (whole, low), _ = measure(load(path), chosen, eval_windows("stdlib", path, 1024, 6), needles=[needles])
    perplexity = whole.scores.perplexity().value
    assert 0.75 * LONG[name] < perplexity < 1.33 * LONG[name]  # the text is that of the running Python, and little
    assert abs(low.scores.perplexity().value / perplexity - 1) < 0.02
    assert whole.answers[0].mean() >= 0.75 and low.answers[0].mean() >= 0.75  # where guessing finds none
    about = json.loads((path / "training.json").read_text())
    assert about["command"].startswith(f"diffbit train --preset nano --init out/nano_1k/256/{name} --context 1024")
    assert about["before"]["command"].startswith(f"diffbit train --preset nano --init examples/nano/{name}")
    assert math.exp(about["result"]["eval_loss"]) == pytest.approx(LONG[name], rel=0.02)
    assert (path / "loss_before.csv").read_text().startswith("step,loss,eval_loss,answer_loss\n")
