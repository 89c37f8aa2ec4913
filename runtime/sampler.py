"""Samples the next token from its logits, in numpy and float64.

The order is that of Hugging Face transformers: repetition penalty, temperature, top-k, top-p, then the draw.

- Repetition penalty r (arXiv 1909.05858, section 4.1): the logit of each token seen before is divided by r if it is
  positive and multiplied by r if it is negative.
- Temperature t: p = softmax(logits / t); 0 takes the largest logit after the penalty and ignores the other options.
- Top-k: keep the k largest logits; among equal ones keep the lower ids.
- Top-p (arXiv 1904.09751): keep the smallest set of most probable tokens whose probabilities add up to at least p.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import DiffbitError
from ..files import read_json
from .artifact import Artifact

GENERATION = "generation_config.json"
T = TypeVar("T", int, float)


class Sampler:
    """A callable `sampler(logits [V], token_ids so far) -> token id`. The same seed draws the same tokens."""

    def __init__(
        self,
        temperature: float = 0.0,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
    ) -> None:
        """`temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep every token; `repetition_penalty` 1 changes nothing;
        `seed` None draws differently in each run. Raises DiffbitError for numbers out of range."""
        if not 0 <= temperature <= sys.float_info.max:  # nor an integer that no float is
            raise DiffbitError(f"temperature is {temperature}, wanted 0 (greedy) or above")
        if top_k < 0:
            raise DiffbitError(f"top_k is {top_k}, wanted 0 (no limit) or above")
        if not 0 < top_p <= 1:
            raise DiffbitError(f"top_p is {top_p}, wanted above 0 and at most 1 (no limit)")
        if not 1e-6 <= repetition_penalty <= 1e6:  # beyond, products of logits overflow
            raise DiffbitError(f"repetition_penalty is {repetition_penalty}, wanted 1e-6 to 1e6 (1 changes nothing)")
        if seed is not None and seed < 0:
            raise DiffbitError(f"seed is {seed}, wanted 0 or above")
        self.temperature = float(temperature)
        self.top_k = top_k
        self.top_p = top_p
        self.repetition_penalty = repetition_penalty
        self.seed = seed
        self._random = np.random.default_rng(seed)

    @classmethod
    def of(
        cls,
        artifact: Artifact,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
    ) -> Sampler:
        """The sampler of the model's generation_config.json, read as transformers does; arguments override its
        settings. Raises DiffbitError for settings out of range."""
        own = read_json(artifact.file(GENERATION)) if GENERATION in artifact.files else {}
        where = artifact.path / GENERATION

        def chosen(name: str, given: T | None, default: T) -> T:
            value = own.get(name)
            if given is not None or value is None:
                return default if given is None else given
            if isinstance(value, int | float) and not isinstance(value, bool):
                with suppress(ValueError, OverflowError):  # NaN, infinity, an integer that no float is
                    return type(default)(value)
            raise DiffbitError(f"{where}: {name} is {value!r}, wanted a number")

        samples = own.get("do_sample") is True
        return cls(
            chosen("temperature", temperature, 1.0) if samples or temperature is not None else 0.0,
            top_k=chosen("top_k", top_k, 50),
            top_p=chosen("top_p", top_p, 1.0),
            repetition_penalty=chosen("repetition_penalty", repetition_penalty, 1.0),
            seed=seed,
        )

    def __call__(self, logits: NDArray[np.floating], token_ids: Sequence[int] = ()) -> int:
        # The largest logit is finite unless one of them is NaN or +inf, or all are -inf.
        if not np.isfinite(logits.max()):
            raise DiffbitError(
                "the model returned logits that are not finite; if it was exported with --dtype fp16, export it as fp32"
            )
        if self.repetition_penalty != 1 and len(token_ids):
            logits, seen = logits.astype(np.float64), np.unique(np.asarray(token_ids))
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / self.repetition_penalty, values * self.repetition_penalty)
        if self.temperature == 0:
            return int(logits.argmax())
        tokens, probabilities = self.distribution(logits)
        cumulative = np.cumsum(probabilities)
        index = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
        return int(tokens[min(index, len(tokens) - 1)])

    def distribution(self, logits: NDArray[np.floating]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Candidate token ids and their probabilities (sum 1), without the penalty; needs a temperature above 0."""
        tokens = np.arange(len(logits), dtype=np.int64)
        if 0 < self.top_k < len(logits):
            tokens = _largest(logits, self.top_k)
        shifted = logits[tokens].astype(np.float64)
        shifted -= shifted.max()
        # With a tiny temperature the quotient may overflow to -inf, which is a probability of 0.
        with np.errstate(over="ignore"):
            probabilities = np.exp(shifted / self.temperature)
        probabilities /= probabilities.sum()
        if self.top_p < 1:
            kept = _nucleus(probabilities, self.top_p)
            tokens, probabilities = tokens[kept], probabilities[kept]
            probabilities /= probabilities.sum()
        return tokens, probabilities


def _largest(logits: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest logits, ascending; among equal logits the lower ids."""
    limit = np.partition(logits, -count)[-count]
    above = np.flatnonzero(logits > limit)
    equal = np.flatnonzero(logits == limit)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(probabilities: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Indices of the smallest set of largest probabilities that add up to at least `top_p`."""
    # All entries below (1 - p) / n add up to less than 1 - p, so the set lies among the others: sort only those
    candidates = np.flatnonzero(probabilities >= (1 - top_p) / len(probabilities))
    order = candidates[np.argsort(-probabilities[candidates], kind="stable")]
    mass = np.cumsum(probabilities[order])
    # A token belongs to the set while those before it add up to less than p. If rounding keeps the last sum below p,
    # all tokens belong to it.
    return order[: int(np.searchsorted(mass, top_p)) + 1]
