"""Perplexity, KL divergence and top-1 agreement over windows of text, each with a confidence interval.

    perplexity   exp(mean over scored tokens of -log q(token))
    KL           mean over scored tokens of sum_v p(v) (log p(v) - log q(v)), in nats; p the 16-bit model, q the other
    agreement    share of scored tokens at which both models' most likely token is the same

Per window only sums are kept: tokens, negative log likelihood, KL, agreements. Everything else follows from them.
Intervals describe the variation of the text. Tokens of one window are far from independent, so the window is the unit.
Neighbouring windows are correlated, too (lag-1 correlation of our models' losses: 0.18 to 0.36), and so are windows of
one document. So the error is estimated from low-frequency cosine waves over the series of windows, which capture the
correlation. For sums y_w over n_w tokens in the order of the text, the estimate is r = sum y / sum n, and, with the
residuals e_w = y_w - r n_w of W windows and B cosine waves (equal-weighted cosine estimator: Lazarus, Lewis, Stock and
Watson, "HAR inference", J. Business & Economic Statistics 36, 2018),

    u_j = sqrt(2 / B) sum_w e_w cos(pi j (w + 1/2) / W),   j = 1 ... B          error^2 = sum u_j^2 / (sum n)^2

and (r - truth) / error has Student's distribution with B degrees of freedom. All waves, B = W - 1, would give the
classic t-interval of independent windows. B is the cube root of W, at most half the effective number of documents D = 1
/ sum of the squared shares of the windows (one document: no limit), and never below 2.

Losses are skewed. Hall's transformation (J. Royal Statistical Society B 54, 1992) removes the skewness: with
k = skewness(e) / sqrt(W) and t the quantile of Student's distribution, the interval is

    r - error h(t)  to  r - error h(-t),        h(z) = 3/k (cbrt(1 + k (z - k/6)) - 1)

Simulated coverage of 95 % intervals (tests/apps/evaluate/test_metrics.py), for windows with a lag-1 correlation of 0,
0.2 and 0.4: normal losses 95, 95, 92 % with 8 windows and 94 to 96 with 16 to 240; lognormal losses (sigma 1) 94, 93,
91 % with 8 windows and 94 to 96 with more. 3 to 30 documents with their own effects (30 % of the variance): 94 to 96 %;
two documents 85 to 94 %, one that makes up most of the text 85 to 88 %. Treating windows as independent would give 79
to 91 %, lognormal 71 to 85 %, with few documents 35 to 90 %.

Two models are compared on the SAME windows: y_w is then the difference of their sums in window w, so that the
difficulty of a window for both cancels ("paired"), and the interval is many times narrower than two separate ones would
suggest. Perplexities and their ratios are exponentials of such an r and of its interval's ends.

The result of rounding depends partly on chance: another calibration sample, or another order of the channels, gives
another model with about the same error but another perplexity. For K such roundings with sums [K, W], r is their mean,
and its variance, s^2 / K of the K rates, is added to the text's; Student's degrees of freedom are Satterthwaite's
(1946), rounded down. The interval of a single rounding covers only the text.

The share of plain rounding's loss that a method recovers is 1 - q with q = sum d / sum d0, where d_w and d0_w are the
paired differences of the method's and of plain rounding's windows to the 16-bit model. Its interval is Fieller's
(1954): all q for which the interval above, of d_w - q d0_w, contains zero. If plain rounding's own loss is not
significantly different from zero, the share is None.

K training runs of a model take the place of its K roundings; otherwise the intervals do not cover another training
run. They never cover text of another kind. If all windows agree exactly, the interval has zero width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from ...io.errors import DiffbitError

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value with the ends of its confidence interval."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def established(value: float, low: float, high: float) -> bool:
    """Whether the interval of a share is at most as wide as the share; if not, a table says "not established"."""
    return high - low <= abs(value)


@dataclass(frozen=True)
class Scores:
    """Sums over the scored tokens of each of W windows: int64 and float64 arrays [W], or [K, W] of K roundings or
    training runs."""

    tokens: np.ndarray  # [W]
    nll: np.ndarray  # nats
    kl: np.ndarray  # nats, from the 16-bit model to this one
    agree: np.ndarray  # tokens at which the most likely one is the 16-bit model's
    document: np.ndarray | None = None  # [W], the number of each window's document; None: a single document

    @classmethod
    def zeros(cls, windows: int, document: np.ndarray | None = None) -> Scores:
        zeros, counts = np.zeros(windows), np.zeros(windows, np.int64)
        return cls(counts, zeros, zeros.copy(), counts.copy(), document)

    @classmethod
    def of_repeats(cls, repeats: Sequence[Scores]) -> Scores:
        """Combine the scores of the same windows under K roundings, or of K training runs, each averaged over its own
        roundings; a single one keeps its shape."""
        if len(repeats) == 1:
            return repeats[0]
        nll, kl, agree = (
            np.stack([np.atleast_2d(getattr(record, name)).mean(0) for record in repeats])
            for name in ("nll", "kl", "agree")
        )
        return cls(repeats[0].tokens, nll, kl, agree, repeats[0].document)

    def mean(self, totals: np.ndarray, confidence: float = CONFIDENCE) -> Estimate:
        """Return sums over these windows, such as a paired difference, per scored token."""
        return mean(totals, self.tokens, confidence, self.document)

    def perplexity(self, confidence: float = CONFIDENCE) -> Estimate:
        """Perplexity on this text; to compare models use `perplexity_ratio`, whose interval is paired."""
        return _exp(self.mean(self.nll, confidence))

    def divergence(self, confidence: float = CONFIDENCE) -> Estimate:
        """KL per token, nats."""
        return clip(self.mean(self.kl, confidence), 0.0, math.inf)

    def agreement(self, confidence: float = CONFIDENCE) -> Estimate:
        return clip(self.mean(self.agree, confidence), 0.0, 1.0)


def perplexity_ratio(model: Scores, reference: Scores, confidence: float = CONFIDENCE) -> Estimate:
    """Return the perplexity of `model` / that of `reference` on the same windows, paired: 1.02 is 2 % worse."""
    return _exp(model.mean(paired(model, reference), confidence))


def paired(model: Scores, reference: Scores) -> np.ndarray:
    """Return the difference of negative log likelihoods per window, [W], or [K, W] if one or both have K repeats."""
    if not np.array_equal(model.tokens, reference.tokens):
        raise ValueError("the two were scored on different windows; a paired difference needs the same")
    return model.nll - reference.nll


def mean(
    totals: np.ndarray,
    tokens: np.ndarray,
    confidence: float = CONFIDENCE,
    document: np.ndarray | None = None,
    *,
    independent: bool = False,
) -> Estimate:
    """Return sum(totals) / sum(tokens) with its interval (see the module's docstring).

    totals [W], or [K, W] of repeats; tokens [W]; document [W], the number of each window's document (None: a single
    one). independent: whether windows are independent, so that all waves are used.
    """
    totals = np.atleast_2d(totals)
    windows, scored = len(tokens), float(np.sum(tokens))
    if windows < 2 or not scored:
        raise DiffbitError(
            f"{windows} window(s) with {scored:.0f} tokens to score: an interval needs at least two windows; "
            "give more text, or shorter windows"
        )
    summed = totals.mean(0)
    rate = float(summed.sum() / tokens.sum())
    residuals = summed - rate * tokens
    waves = windows - 1 if independent else frequencies(windows, document)
    sums, repeats = totals.sum(1), len(totals)
    of_roundings = (sums - sums.mean()) / math.sqrt(repeats * (repeats - 1)) if repeats > 1 else np.zeros(0)
    spreads = [_text_spread(residuals, waves), of_roundings]
    variances = [float(spread @ spread) for spread in spreads]
    error = math.sqrt(sum(variances))
    if not error:
        return Estimate(rate, rate, rate)
    skewness = float(np.mean(residuals**3)) / float(np.mean(residuals**2)) ** 1.5 if variances[0] else 0.0
    k = skewness / math.sqrt(windows) * (variances[0] / error**2) ** 1.5  # roundings: assumed symmetric
    t = _quantile(confidence, spreads)
    return Estimate(rate, rate - error * _unskewed(t, k) / scored, rate - error * _unskewed(-t, k) / scored)


def frequencies(windows: int, document: np.ndarray | None = None) -> int:
    """Return B, the number of cosine waves from which the error of a series of windows is estimated."""
    longest = max(2, int(windows ** (1 / 3) + 1e-9))
    shares = np.ones(1) if document is None else np.unique(document, return_counts=True)[1] / windows
    if len(shares) > 1:
        longest = max(2, min(longest, int(0.5 / float(shares @ shares))))
    return min(longest, windows - 1)


def _text_spread(residuals: np.ndarray, count: int) -> np.ndarray:
    """Return u [B]: numbers of mean 0 whose squares sum to the variance of a sum over windows."""
    windows = len(residuals)
    waves = np.cos(np.pi / windows * np.outer(np.arange(1, count + 1), np.arange(windows) + 0.5))
    return math.sqrt(2 / count) * (waves @ residuals)


def _quantile(confidence: float, spreads: Sequence[np.ndarray]) -> float:
    """Return Student's quantile for a variance with two parts: of the text [B], and of roundings [K] or [0]."""
    text, rounding = (float(spread @ spread) for spread in spreads)
    freedom, repeats = len(spreads[0]), len(spreads[1])
    if rounding:
        freedom = int((text + rounding) ** 2 / (text**2 / freedom + rounding**2 / (repeats - 1)) + 1e-9)
    return t_quantile((1 + confidence) / 2, max(1, freedom))


def _unskewed(z: float, k: float) -> float:
    """Return h(z) of Hall's transformation."""
    return z if abs(k) < 1e-6 else 3 / k * (float(np.cbrt(1 + k * (z - k / 6))) - 1)


def recovered(method: Scores, rounded: Scores, reference: Scores, confidence: float = CONFIDENCE) -> Estimate | None:
    """Return the share of the loss of `rounded` (plain rounding) that `method` avoids: 1 - log(ratio) / log(ratio).

    1: as good as the 16-bit model; below 0: worse than plain rounding. None if plain rounding's loss is not
    significant.
    """
    ours, theirs = (np.atleast_2d(paired(scores, reference)) for scores in (method, rounded))
    if reference.mean(theirs, confidence).low <= 0:
        return None
    q = float(ours.sum(1).mean() / theirs.sum(1).mean())

    def holds(end: float) -> bool:
        difference = reference.mean(ours - end * theirs, confidence)
        return difference.low <= 0 <= difference.high

    def last(direction: float) -> float:
        """Return an end of the interval, which exists because theirs.low > 0."""
        step = direction * 1e-3
        while holds(q + step):
            step *= 2
        inside, outside = 0.0, step
        for _ in range(30):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if holds(q + middle) else (inside, middle)
        return q + inside

    return Estimate(1 - q, 1 - last(1), 1 - last(-1))


def log_probabilities(logits: Tensor, target: Tensor) -> Tensor:
    """Return log softmax at the positions that predict a scored token: logits [S, V], target bool [S] -> fp32 [n, V].

    The logits at t - 1 predict token t; target[0] cannot be predicted and is ignored.
    """
    return F.log_softmax(logits[:-1][target[1:]].float(), dim=-1)


def score(scores: Scores, window: int, ids: Tensor, target: Tensor, log_q: Tensor, log_p: Tensor | None = None) -> None:
    """Add one window to `scores`: ids [S], target bool [S], log_q [n, V] of the model, log_p of the 16-bit model.

    Without log_p the model is the 16-bit model itself: no divergence, full agreement. Raises DiffbitError for NaN.
    """
    tokens = ids[1:][target[1:]]
    nll = -log_q.gather(-1, tokens[:, None]).double().sum().item()
    if not math.isfinite(nll):
        raise DiffbitError("the model's logits hold NaN or infinity")
    scores.tokens[window] = len(tokens)
    scores.nll[window] = nll
    if log_p is None:
        scores.agree[window] = len(tokens)
        return
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)  # below 0 by rounding only
    scores.kl[window] = divergence.double().sum().item()
    scores.agree[window] = int((log_p.argmax(-1) == log_q.argmax(-1)).sum())


@functools.cache
def t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t, 0.5 <= probability < 1, by bisection of its closed-form distribution."""
    low, high = 0.0, 1.0
    while t_distribution(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_distribution(middle, freedom) < probability else (low, middle)
    return high


def t_distribution(t: float, freedom: int) -> float:
    """P(T <= t) of Student's t with whole degrees of freedom (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, cosine) if freedom % 2 else (1.0, 1.0)
    for k in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if freedom % 2 == 0:
        return 0.5 + sine * total / 2
    return 0.5 + (angle + (sine * total if freedom > 1 else 0.0)) / math.pi


def _exp(estimate: Estimate) -> Estimate:
    """Exponentiate an estimate, limited to e^700 to avoid overflow."""
    return Estimate(*(math.exp(min(x, 700.0)) for x in (estimate.value, estimate.low, estimate.high)))


def clip(estimate: Estimate, low: float, high: float) -> Estimate:
    """Limit the interval's ends to the possible range."""
    return Estimate(estimate.value, max(estimate.low, low), min(estimate.high, high))
