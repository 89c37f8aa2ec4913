"""Metrics against float64 formulas written out; intervals against how often they hold the truth on made-up text."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from diffbit.apps.evaluate.metrics import (
    Scores,
    frequencies,
    log_probabilities,
    mean,
    paired,
    perplexity_ratio,
    recovered,
    score,
    t_distribution,
    t_quantile,
)
from diffbit.io.errors import DiffbitError


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


def slow_ends(totals: list[float], tokens: list[int], waves: int, t: float) -> tuple[float, float]:
    """The docstring's interval, number by number."""
    count, scored = len(totals), sum(tokens)
    rate = sum(totals) / scored
    e = [y - rate * n for y, n in zip(totals, tokens, strict=True)]
    u = [
        math.sqrt(2 / waves) * sum(e[w] * math.cos(math.pi * j * (w + 0.5) / count) for w in range(count))
        for j in range(1, waves + 1)
    ]
    error = math.sqrt(sum(x * x for x in u)) / scored
    k = sum(x**3 for x in e) / count / (sum(x * x for x in e) / count) ** 1.5 / math.sqrt(count)

    def h(z: float) -> float:
        inner = 1 + k * (z - k / 6)
        return 3 / k * (math.copysign(abs(inner) ** (1 / 3), inner) - 1)

    return rate - error * h(t), rate - error * h(-t)


def test_the_interval_is_the_docstrings() -> None:
    rng = np.random.default_rng(7)
    tokens = np.array([255] * 27 + [90])
    totals = rng.gamma(1.0, 100.0, 28) + 3 * tokens
    estimate = mean(totals, tokens)
    low, high = slow_ends(list(totals), list(tokens), 3, 3.18245)  # the cube root of 28; t of 3
    assert estimate.value == pytest.approx(totals.sum() / tokens.sum())
    assert (estimate.low, estimate.high) == (pytest.approx(low, rel=1e-5), pytest.approx(high, rel=1e-5))
    assert (
        estimate.high - estimate.value > estimate.value - estimate.low
    )  # skewed to the right, and so is what may be missing
    assert mean(totals, tokens, 0.9).high < estimate.high
    three = np.array([3.1, 3.3, 3.5]) * 100  # all the waves there are, no skewness: the classic t-interval
    half = 4.30265 * np.std(three, ddof=1) / math.sqrt(3)
    assert mean(three, np.ones(3)).high == pytest.approx(np.mean(three) + half, rel=1e-5)


def test_documents_limit_the_waves() -> None:
    assert [frequencies(windows) for windows in (2, 3, 8, 26, 27, 64, 240)] == [1, 2, 2, 2, 3, 4, 6]
    assert frequencies(240, np.arange(240) // 8) == 6  # 30 documents
    assert frequencies(240, np.arange(240) // 30) == 4  # 8
    assert frequencies(240, np.minimum(np.arange(240) // 10, 3)) == 2  # 4, of which one has most of the windows
    assert frequencies(240, np.zeros(240, np.int64)) == 6  # nothing is said of other documents


def texts(rng: np.random.Generator, windows: int) -> tuple[Scores, Scores]:
    """Two models on made-up windows: hard windows are hard for both (sd 0.4); true loss 3.0 and 3.05, skewed noise."""
    tokens = np.full(windows, 255)
    tokens[-1] = 90  # the last window of a text is shorter
    hard = rng.normal(0, 0.3, windows) + rng.exponential(0.27, windows) - 0.27
    losses = [3.0 + hard, 3.05 + hard + rng.gamma(4, 0.0075, windows) - 0.03]
    zero = np.zeros(windows)
    first, second = (Scores(tokens, loss * tokens, zero, zero) for loss in losses)
    return first, second


def series(rng: np.random.Generator, windows: int, rho: float, documents: int | None) -> np.ndarray:
    """Normal numbers [W] of variance 1: lag-1 correlation rho; or documents with effects of their own."""
    if documents is not None:
        effects = np.repeat(rng.standard_normal(documents), windows // documents)
        return math.sqrt(rho) * effects + math.sqrt(1 - rho) * rng.standard_normal(windows)
    z = rng.standard_normal(windows)
    for w in range(1, windows):
        z[w] = rho * z[w - 1] + math.sqrt(1 - rho * rho) * z[w]
    return z


@pytest.mark.slow
@pytest.mark.parametrize(
    ("windows", "rho", "documents", "lognormal", "least"),
    [
        *((windows, rho, None, tail, 0.93) for windows in (16, 64) for rho in (0, 0.2, 0.4) for tail in (False, True)),
        *((8, rho, None, False, 0.93) for rho in (0, 0.2)),
        *((8, rho, None, tail, 0.91) for rho, tail in ((0.4, False), (0, True))),  # as near as it comes
        (8, 0.4, None, True, 0.9),
        *((60, 0.3, documents, False, 0.93) for documents in (3, 4, 10, 20)),
        (60, 0.3, 6, True, 0.92),
    ],
)
def test_intervals_have_their_coverage(
    windows: int, rho: float, documents: int | None, lognormal: bool, least: float
) -> None:
    """93 to 97 % where 95 are promised, for two models on the same text; independent windows' interval does not."""
    rng = np.random.default_rng(2)
    trials, pair, naive = 1500, 0, 0
    tokens = np.full(windows, 255)
    tokens[-1] = 90  # the last window of a text is shorter
    zero, document = np.zeros(windows), None if documents is None else np.arange(windows) * documents // windows
    for _ in range(trials):
        lost = series(rng, windows, rho, documents)
        lost = np.exp(lost) - math.exp(0.5) if lognormal else lost
        hard = rng.exponential(1.0, windows)
        first = Scores(tokens, (3 + hard) * tokens, zero, zero, document)
        second = Scores(tokens, (3.05 + hard + 0.02 * lost) * tokens, zero, zero, document)
        ratio = perplexity_ratio(second, first)
        pair += ratio.low <= math.exp(0.05) <= ratio.high
        half = t_quantile(0.975, windows - 1) * lost.std(ddof=1) / math.sqrt(windows)
        naive += abs(lost.mean()) <= half
    assert least < pair / trials < 0.97
    if rho or lognormal:
        assert naive / trials < 0.915


@pytest.mark.parametrize(("repeats", "spread"), [(5, 0.02), (5, 0.002), (3, 0.02)])
def test_roundings_are_in_the_interval(repeats: int, spread: float) -> None:
    """Against the expected loss of all roundings; the interval of one of them misses it, rightly by its own words."""
    rng = np.random.default_rng(3)
    trials, inside, single = 1500, 0, 0
    tokens = np.full(27, 255)
    for _ in range(trials):
        losses = 0.05 + 0.02 * rng.standard_normal(27) + spread * rng.standard_normal((repeats, 1))
        totals = (losses + 0.005 * rng.standard_normal((repeats, 27))) * tokens
        estimate, one = mean(totals, tokens), mean(totals[0], tokens)
        inside += estimate.low <= 0.05 <= estimate.high
        single += one.low <= 0.05 <= one.high
    assert 0.93 < inside / trials < 0.985
    assert (single / trials < 0.7) == (spread > 0.01)


def test_a_share_recovered_by_several_roundings() -> None:
    rng = np.random.default_rng(9)
    method, plain, reference = rounded(rng, 40, 0.05, 0.6)
    alone = recovered(method, plain, reference)
    apart = [replace(method, nll=method.nll + shift * method.tokens) for shift in (-0.004, 0.0, 0.004)]
    assert Scores.of_repeats([method]) is method
    several = recovered(Scores.of_repeats(apart), plain, reference)
    assert alone is not None and several is not None and several.value == pytest.approx(alone.value)
    assert several.high - several.low > 1.5 * (alone.high - alone.low)
    again = recovered(Scores.of_repeats([method] * 3), Scores.of_repeats([plain] * 3), reference)
    assert again is not None and again.high == pytest.approx(alone.high, abs=1e-9)


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


@pytest.mark.slow
@pytest.mark.parametrize(("windows", "loss"), [(8, 0.05), (40, 0.05), (40, 0.008)])
def test_recovered_interval_has_its_coverage(windows: int, loss: float) -> None:
    rng = np.random.default_rng(6)
    trials, inside, resampled, none = 500, 0, 0, 0
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
    assert (0.93 if windows > 8 else 0.91) < inside / (trials - none) < 0.975
    assert resampled < inside  # the bootstrap is too narrow here as well


def test_the_share_recovered_against_a_slow_search() -> None:
    """Every q from -2 to 3 whose method - q * rounding has an interval that holds zero, and no other."""
    method, plain, reference = rounded(np.random.default_rng(7), 12, 0.04, 0.5)
    share = recovered(method, plain, reference)
    assert share is not None
    ours, theirs = paired(method, reference), paired(plain, reference)
    assert share.value == pytest.approx(1 - ours.sum() / theirs.sum())
    ratios = [q for q in np.linspace(-2, 3, 5001) if (e := mean(ours - q * theirs, plain.tokens)).low <= 0 <= e.high]
    assert share.low == pytest.approx(1 - max(ratios), abs=1e-3)
    assert share.high == pytest.approx(1 - min(ratios), abs=1e-3)
    for method, value in ((plain, 0.0), (reference, 1.0)):
        share = recovered(method, plain, reference)
        assert share is not None and (share.low, share.high) == pytest.approx((value, value), abs=1e-9)


def test_recovered_share_is_none_without_a_loss() -> None:
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
