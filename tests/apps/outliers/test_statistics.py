"""Statistics of a stream against numpy on all numbers at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from diffbit.apps.outliers.statistics import MEDIAN_ERROR, RANKS, Location, Statistics, Summary
from diffbit.io.errors import DiffbitError


def place(offset: int = 0) -> Callable[[int], Location]:
    return lambda index: Location(0, offset + index, 0)


def statistics(values: np.ndarray, offset: int = 0) -> Statistics:
    result = Statistics()
    result.update(torch.from_numpy(values.astype(np.float32)), place(offset))
    return result


def expected(values: np.ndarray) -> dict[str, float]:
    """numpy on everything at once, in float64."""
    values = values.astype(np.float64)
    deviation = values - values.mean()
    return {
        "median": float(np.median(np.abs(values))),
        "mean": float(values.mean()),
        "std": float(values.std()),
        "kurtosis": float((deviation**4).mean() / (deviation**2).mean() ** 2),
    }


def check(summary: Summary, values: np.ndarray) -> None:
    exact = expected(values)
    largest = np.sort(np.abs(values))[::-1]
    assert summary.count == values.size
    for rank, value in zip(RANKS, summary.top.values(), strict=True):
        assert value == (largest[rank - 1] if rank <= values.size else None)
    assert summary.median == pytest.approx(exact["median"], rel=MEDIAN_ERROR * 1.001)
    assert summary.mean == pytest.approx(exact["mean"], rel=1e-9, abs=1e-12)
    assert summary.std == pytest.approx(exact["std"], rel=1e-9)
    assert summary.kurtosis == pytest.approx(exact["kurtosis"], rel=1e-9)


def samples() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    heavy = rng.standard_t(2, 5001)
    return {
        "normal": rng.normal(size=4000),
        "heavy tails": heavy,
        "far from zero": rng.normal(1000, 0.1, 3001),
        "tiny and huge": np.exp(rng.uniform(-60, 60, 2000)) * rng.choice([-1, 1], 2000),
        "few": rng.normal(size=7),
        "even count with a gap in the middle": np.array([1.0, 2.0, 200.0, 300.0]),
        "many equal": rng.integers(-3, 4, 1000).astype(float),
    }


@pytest.mark.parametrize("name", samples())
@pytest.mark.parametrize("parts", [1, 3, 50])
def test_parts_equal_numpy_on_everything(name: str, parts: int) -> None:
    values = samples()[name].astype(np.float32)
    total = Statistics()
    for part in np.array_split(np.arange(values.size), parts):
        if part.size:
            total.update(torch.from_numpy(values[part]), place(int(part[0])))
    check(total.summary(), values)
    assert total.summary().place.position == int(np.argmax(np.abs(values)))  # the first of equals


def merged(*parts: Statistics) -> Statistics:
    result = Statistics()
    for part in parts:
        result.merge(part)
    return result


def test_merging_is_associative_and_commutative() -> None:
    rng = np.random.default_rng(1)
    parts = [rng.standard_t(3, size).astype(np.float32) for size in (1, 250, 3000, 17)]
    a, b, c, d = (statistics(part, 10_000 * index) for index, part in enumerate(parts))
    trees = [
        merged(a, b, c, d),
        merged(a, merged(b, merged(c, d))),
        merged(merged(d, b), merged(a, c)),
        merged(Statistics(), c, Statistics(), merged(d, merged(b, a))),
    ]
    for tree in trees:
        check(tree.summary(), np.concatenate(parts))
        assert torch.equal(tree.top, trees[0].top)
        assert torch.equal(tree.histogram, trees[0].histogram)
        assert tree.place == trees[0].place


def test_largest_are_kept_when_one_part_has_all() -> None:
    """The 100 largest all lie in one part of many: a top-k that keeps fewer per part loses them."""
    values = np.concatenate([np.arange(1, 2000) / 1e4, np.arange(1000, 1100)]).astype(np.float32)
    total = Statistics()
    for start in range(0, values.size, 700):
        total.update(torch.from_numpy(values[start : start + 700]), place(start))
    assert list(total.summary().top.values()) == [1099.0, 1098.0, 1097.0, 1090.0, 1000.0]


@pytest.mark.parametrize("scale", [1e-35, 1e-3, 1.0, 1e30])
def test_median_is_as_precise_as_stated(scale: float) -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        values = (rng.lognormal(0, 3, rng.integers(1, 9)) * scale).astype(np.float32)
        truth = float(np.median(values.astype(np.float64)))
        assert statistics(values).median() == pytest.approx(truth, rel=MEDIAN_ERROR * 1.001)
    assert MEDIAN_ERROR < 1e-3
    assert statistics(np.zeros(5)).median() == 0.0
    assert statistics(np.zeros(5)).summary().ratio is None


def test_known_kurtosis() -> None:
    assert statistics(np.tile([-1.0, 1.0], 500)).summary().kurtosis == pytest.approx(1.0)
    assert statistics(np.ones(10)).summary().kurtosis is None
    outlier = np.zeros(10_000)
    outlier[77] = 5.0
    assert statistics(outlier).summary().kurtosis == pytest.approx(9998, rel=1e-3)


def test_no_numbers() -> None:
    with pytest.raises(DiffbitError, match="no token"):
        Statistics().summary()
