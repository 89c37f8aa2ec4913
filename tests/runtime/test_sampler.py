from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffbit.errors import DiffbitError
from diffbit.runtime import Sampler


def slow_distribution(
    logits: Sequence[float], seen: Sequence[int], temperature: float, top_k: int, top_p: float, penalty: float
) -> dict[int, float]:
    """The definition, one token at a time."""
    values = {}
    for token, logit in enumerate(logits):
        value = float(logit)
        if token in seen:
            value = value / penalty if value > 0 else value * penalty
        values[token] = value
    ranked = sorted(values, key=lambda token: (-values[token], token))
    if top_k:
        ranked = ranked[:top_k]
    top = values[ranked[0]]
    weights = {token: np.exp((values[token] - top) / temperature) for token in ranked}
    total = sum(weights.values())
    kept: dict[int, float] = {}
    for token in ranked:
        if top_p < 1 and sum(kept.values()) >= top_p:
            break
        kept[token] = weights[token] / total
    mass = sum(kept.values())
    return {token: probability / mass for token, probability in kept.items()}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 50),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 60),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    penalty=st.sampled_from([0.8, 1.0, 1.3]),
)
def test_distribution_equals_the_slow_one(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, penalty: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = (3 * rng.standard_normal(size)).astype(np.float32)
    logits[rng.integers(0, size, 5)] = logits[0]  # ties
    seen = [int(i) for i in rng.integers(0, size, 4)]
    sampler = Sampler(temperature, top_k=top_k, top_p=top_p, repetition_penalty=penalty, seed=0)
    drawn: list[dict[int, float]] = []
    original = sampler.distribution

    def spy(values: Any) -> Any:  # what __call__ draws from, the penalty included
        tokens, probabilities = original(values)
        drawn.append(dict(zip(tokens.tolist(), probabilities.tolist(), strict=True)))
        return tokens, probabilities

    sampler.distribution = spy  # type: ignore[method-assign]
    token = sampler(logits, seen)
    want = slow_distribution(logits.tolist(), seen, temperature, top_k, top_p, penalty)
    assert drawn[0].keys() == want.keys()
    assert token in want
    for key, probability in want.items():
        assert drawn[0][key] == pytest.approx(probability, rel=1e-6)


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.05, 0.3, 0.15]))
    sampler = Sampler(1.0, seed=7)
    counts = np.bincount([sampler(logits) for _ in range(5000)], minlength=4)
    expected = 5000 * np.array([0.5, 0.05, 0.3, 0.15])
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001; the seed is fixed
    nucleus = Sampler(1.0, top_p=0.75, seed=7)
    counts = np.bincount([nucleus(logits) for _ in range(5000)], minlength=4)
    assert counts[1] == counts[3] == 0
    assert counts[0] / 5000 == pytest.approx(0.5 / 0.8, abs=0.03)


def test_greedy_takes_the_first_largest_and_honours_the_penalty() -> None:
    logits = np.array([1.0, 3.0, 3.0, -1.0], np.float32)
    assert Sampler()(logits) == 1
    assert Sampler(repetition_penalty=2.0)(logits, [1]) == 2
    assert Sampler(repetition_penalty=2.0)(np.array([-1.0, -1.5]), [0]) == 1  # -1 becomes -2
    assert logits.tolist() == [1.0, 3.0, 3.0, -1.0]


def test_extremes() -> None:
    logits = np.array([1.0, 5.0, -np.inf], np.float32)
    assert Sampler(1e-300, seed=0)(logits) == 1
    assert Sampler(1.0, top_p=1e-9, seed=0)(logits) == 1
    assert Sampler(1.0, top_k=1, seed=0)(logits) == 1
    tokens, _ = Sampler(1.0, top_p=0.5).distribution(np.zeros(2))
    assert tokens.tolist() == [0]  # half the mass is enough for p = 0.5
    assert 2 not in {Sampler(100.0, seed=i)(logits) for i in range(50)}
    for bad in (np.nan, np.inf):
        with pytest.raises(DiffbitError, match="not finite"):
            Sampler()(np.array([0.0, bad]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0, wanted above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DiffbitError, match=message):
        Sampler(**options)
