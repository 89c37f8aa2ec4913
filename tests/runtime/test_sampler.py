from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffbit.io.errors import DiffbitError
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


PROCESSED = {
    "min-p": {"min_p": 0.15},
    "min-p of a nucleus": {"min_p": 0.2, "top_p": 0.8, "top_k": 9},
    "all": {"min_p": 0.05, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.4},
}


@pytest.mark.parametrize("options", PROCESSED.values(), ids=list(PROCESSED))
@pytest.mark.parametrize("seed", range(4))
def test_candidates_equal_those_of_transformers(options: dict[str, float], seed: int) -> None:
    """transformers' own processors, in the order of its generate()."""
    import torch
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process as theirs

    rng = np.random.default_rng(seed)
    logits, seen, temperature = rng.normal(0, 3, 40), rng.integers(0, 40, 6), 0.8
    kinds = {
        "repetition_penalty": theirs.RepetitionPenaltyLogitsProcessor, "top_k": theirs.TopKLogitsWarper,
        "top_p": theirs.TopPLogitsWarper, "min_p": theirs.MinPLogitsWarper,
    }  # fmt: skip
    steps = [kinds[name](options[name]) for name in kinds if name in options]  # type: ignore[arg-type]
    steps.insert("repetition_penalty" in options, theirs.TemperatureLogitsWarper(temperature))
    ids, scores = torch.from_numpy(seen)[None], torch.from_numpy(logits)[None]
    expected = LogitsProcessorList(steps)(ids, scores).softmax(-1)[0].numpy()
    sampler = Sampler(temperature, **options)
    tokens, probabilities = sampler.distribution(sampler._changed(logits, seen))
    actual = np.zeros(40)
    actual[tokens] = probabilities
    np.testing.assert_allclose(actual, expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_penalties_and_bias_are_openais(seed: int) -> None:
    """l + bias - c frequency - (c > 0) presence, where c counts what was generated, not the prompt."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, 12)
    prompt, generated = rng.integers(0, 12, 5).tolist(), rng.integers(0, 12, 7).tolist()
    bias = {3: 1.5, 11: -4.0}
    sampler = Sampler(frequency_penalty=0.7, presence_penalty=-0.4, logit_bias=bias)
    sampler.start(len(prompt))
    expected = list(logits)
    for token in range(12):
        expected[token] += bias.get(token, 0.0)
        expected[token] -= 0.7 * generated.count(token) + (-0.4 if token in generated else 0.0)
    np.testing.assert_allclose(sampler._changed(logits, np.array(prompt + generated)), expected, atol=1e-12)
    assert sampler(logits, prompt + generated) == int(np.argmax(expected))


def test_a_bias_chooses_or_forbids_a_token() -> None:
    logits = np.array([1.0, 5.0, 2.0], np.float32)
    assert Sampler(logit_bias={1: -100})(logits) == 2 and Sampler(logit_bias={0: 100})(logits) == 0
    assert Sampler(0.7, logit_bias={0: 100}, seed=1)(logits) == 0
    with pytest.raises(DiffbitError, match="logit_bias has token 7, wanted an id of the 3 tokens"):
        Sampler(logit_bias={7: 1})(logits)


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 1.1}, {"min_p": -0.1}, {"frequency_penalty": 1e9}, {"presence_penalty": float("nan")}, {"top_k": 1.5},
        {"logit_bias": {"a": 1}}, {"logit_bias": {-1: 1}}, {"logit_bias": {1: "x"}}, {"logit_bias": {1: float("inf")}},
        {"temperature": True},
    ],
)  # fmt: skip
def test_bad_settings_name_the_option(options: dict[str, Any]) -> None:
    with pytest.raises(DiffbitError, match=next(iter(options))):
        Sampler(**options)
