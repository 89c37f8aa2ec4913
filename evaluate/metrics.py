"""Perplexity, KL divergence and top-1 agreement over windows of text, each with a confidence interval.

    perplexity   exp(mean over scored tokens of -log q(token))
    KL           mean over scored tokens of sum_v p(v) (log p(v) - log q(v)), in nats; p the 16-bit model, q the other
    agreement    share of scored tokens at which both models' most likely token is the same

Per window only sums are kept: tokens, negative log likelihood, KL, agreements. Everything else follows from them.

The intervals. What varies is the text, and tokens of one window are far from independent, so the window is the unit.
Of sums y_w over n_w tokens the estimate is r = sum y / sum n, and, with the residuals e_w = y_w - r n_w of W windows,

    r  +-  t(W - 1) * sqrt(W / (W - 1) * sum e_w^2) / sum n          (ratio estimator, delta method)

which for windows of equal length is the classic t-interval of their means. Two models are compared on the SAME
windows: y_w is then the difference of their sums in window w, so that what makes a window hard for both cancels
("paired"). That interval is many times narrower than what two separate ones would suggest. Perplexities and their
ratios are exponentials of such an r and of its interval's ends.

Why not the bootstrap: it is the same idea with a seed and resampling noise added, and its percentile intervals are
too narrow for few windows (for 8 windows they cover 89 % where 95 is promised, the t-interval 94 to 95; a test
measures it). Skew costs either of them: differences as lopsided as an exponential distribution are covered 89 % of
the time with 8 windows, 93 % with 40; use 16 windows or more.

The share of plain rounding's loss that a method recovers is 1 - q with q = sum d / sum d0, where d_w and d0_w are the
paired differences of the method's and of plain rounding's windows to the 16-bit model. Its interval is Fieller's
(1954): all q for which the sum of d_w - q d0_w cannot be told from zero by the interval above. Where plain rounding's
own loss cannot be told from zero, there is nothing to recover: the share is None.

What no interval over windows covers: another training run of the same model, text of another kind, and that
neighbouring windows of a long document resemble each other. Where every window agrees exactly the interval has no
width.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from ..errors import DiffbitError

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value with the ends of its confidence interval."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Scores:
    """Sums over the scored tokens of each of W windows: int64 and float64 arrays [W]."""

    tokens: np.ndarray
    nll: np.ndarray  # nats
    kl: np.ndarray  # nats, from the 16-bit model to this one
    agree: np.ndarray  # tokens at which the most likely one is the 16-bit model's

    @classmethod
    def zeros(cls, windows: int) -> Scores:
        return cls(np.zeros(windows, np.int64), np.zeros(windows), np.zeros(windows), np.zeros(windows, np.int64))

    def perplexity(self, confidence: float = CONFIDENCE) -> Estimate:
        """Of this model on this text; to compare models use `perplexity_ratio`, whose interval is paired."""
        return _exp(mean(self.nll, self.tokens, confidence))

    def divergence(self, confidence: float = CONFIDENCE) -> Estimate:
        """KL per token, nats."""
        return clip(mean(self.kl, self.tokens, confidence), 0.0, math.inf)

    def agreement(self, confidence: float = CONFIDENCE) -> Estimate:
        return clip(mean(self.agree, self.tokens, confidence), 0.0, 1.0)


def perplexity_ratio(model: Scores, reference: Scores, confidence: float = CONFIDENCE) -> Estimate:
    """Perplexity of `model` over that of `reference` on the same windows, paired: 1.02 is 2 % worse."""
    return _exp(mean(paired(model, reference), model.tokens, confidence))


def paired(model: Scores, reference: Scores) -> np.ndarray:
    """Difference of the log likelihoods lost, per window [W]."""
    if not np.array_equal(model.tokens, reference.tokens):
        raise ValueError("the two were scored on different windows; a paired difference needs the same")
    return model.nll - reference.nll


def mean(totals: np.ndarray, tokens: np.ndarray, confidence: float = CONFIDENCE) -> Estimate:
    """sum(totals) / sum(tokens) with its interval over windows (see the module's docstring); totals, tokens [W]."""
    windows, scored = len(tokens), float(np.sum(tokens))
    if windows < 2 or not scored:
        raise DiffbitError(
            f"{windows} window(s) with {scored:.0f} tokens to score: an interval needs at least two windows; "
            "give more text, or shorter windows"
        )
    rate = float(np.sum(totals)) / scored
    residuals = totals - rate * tokens
    error = math.sqrt(windows / (windows - 1) * float(residuals @ residuals)) / scored
    half = t_quantile((1 + confidence) / 2, windows - 1) * error
    return Estimate(rate, rate - half, rate + half)


def recovered(method: Scores, rounded: Scores, reference: Scores, confidence: float = CONFIDENCE) -> Estimate | None:
    """Share of the loss of `rounded` (plain rounding) that `method` does not have: 1 - log(ratio) / log(ratio).

    1: as good as the 16-bit model; below 0: worse than plain rounding. None where plain rounding's loss is not sure.
    """
    ours, theirs = paired(method, reference), paired(rounded, reference)
    tokens, windows = reference.tokens, len(reference.tokens)
    b, a = float(ours.sum()), float(theirs.sum())
    e, f = ours - b / tokens.sum() * tokens, theirs - a / tokens.sum() * tokens
    spread = t_quantile((1 + confidence) / 2, windows - 1) ** 2 * windows / (windows - 1)
    # (b - q a)^2 <= spread * sum (e - q f)^2 is the quadratic A q^2 - 2 B q + C <= 0
    big_a, big_b, big_c = a * a - spread * float(f @ f), a * b - spread * float(e @ f), b * b - spread * float(e @ e)
    if a <= 0 or big_a <= 0:
        return None
    half = math.sqrt(max(0.0, big_b * big_b - big_a * big_c))
    return Estimate(1 - b / a, 1 - (big_b + half) / big_a, 1 - (big_b - half) / big_a)


def log_probabilities(logits: Tensor, target: Tensor) -> Tensor:
    """log softmax at the places that predict a scored token: logits [S, V], target bool [S] -> fp32 [n, V].

    Token t is predicted by the logits at t - 1; target[0] cannot be, and is ignored.
    """
    return F.log_softmax(logits[:-1][target[1:]].float(), dim=-1)


def score(scores: Scores, window: int, ids: Tensor, target: Tensor, log_q: Tensor, log_p: Tensor | None = None) -> None:
    """Add one window to `scores`: ids [S], target bool [S], log_q [n, V] of the model, log_p of the 16-bit model.

    Without log_p the model is the 16-bit model itself: no divergence, full agreement. Raises DiffbitError for NaN.
    """
    wanted = ids[1:][target[1:]]
    nll = -log_q.gather(-1, wanted[:, None]).double().sum().item()
    if not math.isfinite(nll):
        raise DiffbitError("the model's logits hold NaN or infinity")
    scores.tokens[window] = len(wanted)
    scores.nll[window] = nll
    if log_p is None:
        scores.agree[window] = len(wanted)
        return
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)  # below 0 by rounding only
    scores.kl[window] = divergence.double().sum().item()
    scores.agree[window] = int((log_p.argmax(-1) == log_q.argmax(-1)).sum())


@functools.cache
def t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t, 0.5 <= probability < 1, by bisection of the closed form of its distribution."""
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
    """Exponentials, at most e^700: a model that is that wrong has no more precise number."""
    return Estimate(*(math.exp(min(x, 700.0)) for x in (estimate.value, estimate.low, estimate.high)))


def clip(estimate: Estimate, low: float, high: float) -> Estimate:
    """The interval's ends within what can be."""
    return Estimate(estimate.value, max(estimate.low, low), min(estimate.high, high))
