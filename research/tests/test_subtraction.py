"""What research/cache/subtraction.py computes, beside drawn noise, loops and exact conversions."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from diffbit.apps.convert.write import convert
from diffbit.calib_data import eval_windows
from diffbit.models import load
from research.tests.scripts import run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def subtraction(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in ("benchmarks", "research/cache"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module("subtraction")


def test_formulas_match_drawn_noise(subtraction: ModuleType) -> None:
    lam, correlation, draws = 0.6, 0.7, 400_000
    logits, values = torch.randn(2, 1, 5, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    variance = 0.002 * torch.rand(2, 1, 5, dtype=torch.float64)
    first, rest = torch.randn(2, draws, 1, 5, dtype=torch.float64)
    second = correlation * first + math.sqrt(1 - correlation**2) * rest
    noisy = logits + torch.stack((first, second), 1) * variance.sqrt()  # [R, 2, 1, 5]
    maps, exact = noisy.softmax(-1), logits.softmax(-1)
    out = (maps[:, 0] - lam * maps[:, 1]) @ values
    error = out - (exact[0] - lam * exact[1]) @ values
    expected = subtraction.expected(logits, torch.zeros(()), variance, values, lam, correlation)
    assert float(error.var(0).sum()) == pytest.approx(float(expected.variance), rel=0.02)
    large = subtraction.expected(logits, torch.zeros(()), 50 * variance, values, lam, correlation).bias
    noisy = logits + torch.stack((first, second), 1) * (50 * variance).sqrt()
    shift = ((noisy.softmax(-1) - exact) * torch.tensor([1.0, -lam], dtype=torch.float64).view(2, 1, 1)).sum(1).mean(0)
    assert float((shift @ values).square().sum()) == pytest.approx(float(large), rel=0.25)


def test_value_error_matches_drawn_noise(subtraction: ModuleType) -> None:
    weights, values = torch.randn(2, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    distortion = 0.3 * torch.rand(6, dtype=torch.float64)
    noise = torch.randn(200_000, 6, 4, dtype=torch.float64) * values.square().mean(-1).sqrt()[:, None]
    rounded = (1 - distortion)[:, None] * values + (distortion * (1 - distortion)).sqrt()[:, None] * noise
    measured = (weights @ (rounded - values)).square().sum(-1).mean(0)
    torch.testing.assert_close(measured, subtraction.value_error(weights, values, distortion), rtol=0.02, atol=0)


def test_the_page_has_the_place_of_each_commands_tables() -> None:
    page = (ROOT / "research/cache/README.md").read_text()
    names = re.findall(r"subtraction\.py models --name (\w+) .*--markdown", page)
    assert sorted(names) == ["nano", "pico", "tiny"]
    tables = {name + table for name in names for table in ("", "_variants", "_heads")}
    for name in tables | {"amplification", "bits", "correction", "twin", "twin_variants"}:
        assert page.count(f"<!-- {name} -->\n") == page.count(f"<!-- /{name} -->") == 1, name


def test_amplification_of_equal_maps(subtraction: ModuleType) -> None:
    assert subtraction.amplification(0.5, 1.0, 0.0) == pytest.approx(5)  # (1 + 1/4) / (1 - 1/2)^2
    assert subtraction.amplification(0.5, 1.0, 1.0) == subtraction.amplification(0.5, 0.0, 0.3) == 1


def test_conversion_has_the_plain_cache_errors(
    trained: Callable[[str], Path], subtraction: ModuleType, tmp_path: Path
) -> None:
    plain, path = load(trained("softmax")).eval(), trained("softmax")
    copy = load(convert(path, tmp_path / "copy")).eval()
    windows = eval_windows("stdlib", path, 128, 2)
    cache, apart = (subtraction.LowBitCache(keys=3, window=0, first=0, own_rounding=own) for own in (False, True))
    subtraction.set_lambda(copy, 0.5, 0.25)
    variants = {"plain": (plain, cache), "copy": (copy, cache), "apart": (copy, apart)}
    kl = {title: scores.kl for title, scores in subtraction.measured(windows, plain, variants, "").items()}
    assert kl["copy"] == pytest.approx(kl["plain"], rel=1e-3)
    # (1 + 1/16) / (3/4)^2 = 1.9 times the square error
    assert 1.4 < kl["apart"].sum() / kl["plain"].sum() < 2.6


@pytest.mark.slow
def test_tables(trained: Callable[[str], Path], tmp_path: Path) -> None:
    names = ["amplification", "bits", "correction", "pico", "pico_variants", "pico_heads"]
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in names))
    done = run("subtraction.py", "simulate", "--quick", "--plot", str(tmp_path / "plot.svg"), "--markdown", str(page))
    assert done.code == 0, done.error
    kinds = {"plain": "softmax", "v1": "diff_v1", "v2": "diff_v2"}
    folders = [f"{kind}={trained(name)}" for kind, name in kinds.items()]
    done = run("subtraction.py", "models", "--quick", "--name", "pico", "--markdown", str(page), "--models", *folders)
    assert done.code == 0, done.error
    assert (tmp_path / "plot.svg").stat().st_size > 1000
    text = page.read_text()
    assert all(f"| keys {bits} |" in text for bits in (2, 3, 4)) and "nan" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["models"], "models: --models KIND=FOLDER[,FOLDER...] is missing"),
        (["twin", "--plain", "x"], "twin: wanted --plain FILE, --differential FOLDER and --text FILE"),
        (["simulate", "--windows", "1"], "--windows is 1, wanted 2 or more"),
    ],
)
def test_what_is_missing(arguments: list[str], said: str) -> None:
    done = run("subtraction.py", *arguments)
    assert done.code == 2 and said in done.error and "Traceback" not in done.error


def test_a_short_text(trained: Callable[[str], Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n")
    done = run("subtraction.py", "models", "--text", str(text), "--models", f"plain={trained('softmax')}")
    assert done.code == 2 and "Traceback" not in done.error and "256 tokens" in done.error, done.error
