"""Metrics against float64 formulas written out; intervals against how often they hold the truth on made-up text."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from diffbit.errors import DiffbitError
from diffbit.evaluate.metrics import (
    Estimate,
    Scores,
    log_probabilities,
    mean,
    paired,
    perplexity_ratio,
    recovered,
    score,
    t_distribution,
    t_quantile,
)


def slow(ids: np.ndarray, target: np.ndarray, p: np.ndarray, q: np.ndarray) -> tuple[int, float, float, int]:
    """Tokens, nll of q, KL(p || q), agreements of one window, token by token in float64 from logits [S, V]."""
    tokens, nll, kl, agree = 0, 0.0, 0.0, 0
    for t in range(1, len(ids)):
        if not target[t]:
            continue
        log_p = p[t - 1] - np.log(np.sum(np.exp(p[t - 1])))
        log_q = q[t - 1] - np.log(np.sum(np.exp(q[t - 1])))
        tokens += 1
        nll -= log_q[ids[t]]
        kl += sum(math.exp(a) * (a - b) for a, b in zip(log_p, log_q, strict=True))
        agree += int(np.argmax(p[t - 1]) == np.argmax(q[t - 1]))
    return tokens, nll, kl, agree


def test_scores_equal_the_formulas_token_by_token() -> None:
    rng = np.random.default_rng(0)
    windows, length, vocabulary = 4, 9, 23
    ids = rng.integers(0, vocabulary, (windows, length))
    target = rng.random((windows, length)) < 0.7
    target[0] = True  # the first token of a window is never predicted, marked or not
    p = rng.normal(0, 3, (windows, length, vocabulary))
    q = p + rng.normal(0, 1, p.shape)
    scores, exact = Scores.zeros(windows), Scores.zeros(windows)
    for w in range(windows):
        tensors = (torch.from_numpy(ids[w]), torch.from_numpy(target[w]))
        log_p = log_probabilities(torch.from_numpy(p[w]).float(), tensors[1])
        log_q = log_probabilities(torch.from_numpy(q[w]).float(), tensors[1])
        score(scores, w, *tensors, log_q, log_p)
        score(exact, w, *tensors, log_p)
        tokens, nll, kl, agree = slow(ids[w], target[w], p[w], q[w])
        assert scores.tokens[w] == tokens and scores.agree[w] == agree
        assert scores.nll[w] == pytest.approx(nll, rel=1e-5)
        assert scores.kl[w] == pytest.approx(kl, rel=1e-4)
        assert exact.nll[w] == pytest.approx(slow(ids[w], target[w], p[w], p[w])[1], rel=1e-5)
    assert 0 < scores.agree.sum() < scores.tokens.sum()
    assert scores.perplexity().value == pytest.approx(math.exp(scores.nll.sum() / scores.tokens.sum()))
    assert scores.divergence().value == pytest.approx(scores.kl.sum() / scores.tokens.sum())
    assert scores.agreement().value == pytest.approx(scores.agree.sum() / scores.tokens.sum())
    assert exact.agreement().value == 1.0 and exact.divergence().value == 0.0
    ratio = perplexity_ratio(scores, exact).value
    assert ratio == pytest.approx(scores.perplexity().value / exact.perplexity().value)


def test_a_model_against_itself_differs_by_nothing() -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(0, 5, (2, 30, 50))).float()
    ids = torch.from_numpy(rng.integers(0, 50, (2, 30)))
    target = torch.ones(2, 30, dtype=torch.bool)
    scores = Scores.zeros(2)
    for w in range(2):
        log_q = log_probabilities(logits[w], target[w])
        score(scores, w, ids[w], target[w], log_q, log_q)
    assert scores.divergence().value == scores.divergence().high == 0.0
    assert scores.agreement().value == scores.agreement().low == 1.0


def test_t_quantiles_are_the_tabulated_ones() -> None:
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 7: 2.3646, 8: 2.3060, 30: 2.0423, 31: 2.0395, 120: 1.9799}
    for freedom, value in table.items():
        assert t_quantile(0.975, freedom) == pytest.approx(value, abs=1e-4)
    assert t_quantile(0.995, 10) == pytest.approx(3.1693, abs=1e-4)
    assert t_quantile(0.975, 5000) == pytest.approx(1.9604, abs=1e-4)
    assert t_distribution(0.0, 4) == t_distribution(0.0, 5) == 0.5


def test_equal_windows_give_the_classic_t_interval() -> None:
    values = np.array([3.1, 2.7, 3.9, 3.3, 2.8])
    estimate = mean(values * 100, np.full(5, 100))
    half = 2.7764 * values.std(ddof=1) / math.sqrt(5)
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.high - estimate.value == pytest.approx(half, rel=1e-4)
    assert estimate.value - estimate.low == pytest.approx(half, rel=1e-4)
    assert mean(values * 100, np.full(5, 100), 0.9).high < estimate.high


def texts(rng: np.random.Generator, windows: int) -> tuple[Scores, Scores]:
    """Two models on made-up windows: hard windows are hard for both (sd 0.4); true loss 3.0 and 3.05, skewed noise."""
    tokens = np.full(windows, 255)
    tokens[-1] = 90  # the last window of a text is shorter
    hard = rng.normal(0, 0.3, windows) + rng.exponential(0.27, windows) - 0.27
    losses = [3.0 + hard, 3.05 + hard + rng.gamma(4, 0.0075, windows) - 0.03]
    zero = np.zeros(windows)
    first, second = (Scores(tokens, loss * tokens, zero, zero) for loss in losses)
    return first, second


@pytest.mark.parametrize("windows", [8, 40])
def test_intervals_hold_the_truth_as_often_as_they_say(windows: int) -> None:
    rng = np.random.default_rng(2)
    trials, single, pair, resampled = 1500, 0, 0, 0
    for _ in range(trials):
        first, second = texts(rng, windows)
        estimate = first.perplexity()
        single += estimate.low <= math.exp(3.0) <= estimate.high
        ratio = perplexity_ratio(second, first)
        pair += ratio.low <= math.exp(0.05) <= ratio.high
        draws = rng.integers(0, windows, (200, windows))
        means = first.nll[draws].sum(1) / first.tokens[draws].sum(1)
        resampled += np.quantile(means, 0.025) <= 3.0 <= np.quantile(means, 0.975)
    assert 0.93 < single / trials < 0.97
    assert 0.92 < pair / trials < 0.97
    if windows == 8:  # the reason given for not using the bootstrap
        assert resampled / trials < 0.91


def test_pairing_is_what_makes_a_small_difference_visible() -> None:
    first, second = texts(np.random.default_rng(3), 30)
    ratio = perplexity_ratio(second, first)
    assert 1 < ratio.low < math.exp(0.05) < ratio.high < 1.08
    apart = second.perplexity(), first.perplexity()
    assert apart[0].low < apart[1].high  # the separate intervals overlap widely
    width = (apart[0].high - apart[0].low) / apart[0].value
    assert ratio.high - ratio.low < width / 5
    shuffled = Scores(first.tokens, first.nll[np.random.default_rng(4).permutation(30)], first.kl, first.agree)
    unpaired = perplexity_ratio(second, shuffled)
    assert unpaired.high - unpaired.low > 5 * (ratio.high - ratio.low)


def rounded(rng: np.random.Generator, windows: int, loss: float, share: float) -> tuple[Scores, Scores, Scores]:
    """A method that recovers `share` of what rounding loses (`loss` nats a token, skewed), its own noise on top."""
    tokens = np.full(windows, 255)
    tokens[-1] = 90
    hard = 3.0 + rng.normal(0, 0.4, windows)
    lost = loss + rng.gamma(4, 0.0075, windows) - 0.03
    kept = (1 - share) * lost + rng.normal(0, 0.01, windows)
    zero = np.zeros(windows)
    method, plain, reference = (Scores(tokens, y * tokens, zero, zero) for y in (hard + kept, hard + lost, hard))
    return method, plain, reference


@pytest.mark.parametrize(("windows", "loss"), [(8, 0.05), (40, 0.05), (40, 0.008)])
def test_the_share_recovered_lies_in_its_interval_as_often_as_it_says(windows: int, loss: float) -> None:
    rng = np.random.default_rng(6)
    trials, inside, resampled, none = 1500, 0, 0, 0
    for _ in range(trials):
        method, plain, reference = rounded(rng, windows, loss, 0.6)
        share = recovered(method, plain, reference)
        if share is None:
            none += 1
            continue
        inside += share.low <= 0.6 <= share.high
        draws = rng.integers(0, windows, (200, windows))
        ratios = paired(method, reference)[draws].sum(1) / paired(plain, reference)[draws].sum(1)
        resampled += np.quantile(ratios, 0.025) <= 0.4 <= np.quantile(ratios, 0.975)
    assert none < 0.3 * trials
    assert 0.93 < inside / (trials - none) < 0.975
    assert resampled < inside  # the bootstrap is too narrow here as well


def test_the_share_recovered_against_a_slow_search() -> None:
    """Every q from -1 to 2 whose method - q * rounding has an interval that holds zero, and no other."""
    method, plain, reference = rounded(np.random.default_rng(7), 12, 0.02, 0.5)
    share = recovered(method, plain, reference)
    assert share is not None
    ours, theirs = paired(method, reference), paired(plain, reference)
    assert share.value == pytest.approx(1 - ours.sum() / theirs.sum())
    found = [q for q in np.linspace(-1, 2, 30001) if (e := mean(ours - q * theirs, plain.tokens)).low <= 0 <= e.high]
    assert share.low == pytest.approx(1 - max(found), abs=2e-4)
    assert share.high == pytest.approx(1 - min(found), abs=2e-4)
    assert recovered(plain, plain, reference) == Estimate(0.0, 0.0, 0.0)
    assert recovered(reference, plain, reference) == Estimate(1.0, 1.0, 1.0)


def test_where_rounding_loses_nothing_there_is_no_share() -> None:
    method, plain, reference = rounded(np.random.default_rng(8), 12, 0.0, 0.5)
    assert recovered(method, plain, reference) is None  # not told from zero
    method, plain, reference = rounded(np.random.default_rng(8), 12, 0.05, 0.5)
    assert recovered(method, plain, reference) is not None
    assert recovered(method, reference, plain) is None  # it gains, for sure


def test_different_windows_cannot_be_paired() -> None:
    first, _ = texts(np.random.default_rng(5), 8)
    other = Scores(first.tokens[::-1].copy(), first.nll, first.kl, first.agree)
    with pytest.raises(ValueError, match="same"):
        paired(first, other)


def test_one_window_has_no_interval() -> None:
    with pytest.raises(DiffbitError, match="at least two windows"):
        mean(np.array([3.0]), np.array([10]))
    with pytest.raises(DiffbitError, match="NaN"):
        score(Scores.zeros(1), 0, torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool), torch.full((1, 3), torch.nan))


def test_ends_stay_within_what_is_possible() -> None:
    scores = Scores(np.full(3, 10), np.array([9e3, 1.0, 1.0]), np.array([0.0, 0.0, 5.0]), np.array([10, 10, 9]))
    assert scores.divergence().low == 0.0
    assert scores.agreement().high == 1.0
    assert math.isfinite(scores.perplexity().high)
