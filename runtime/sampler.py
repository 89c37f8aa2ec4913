"""Samples the next token from its logits, in numpy and float64.

The order is that of llama.cpp and Hugging Face transformers: bias, penalties, temperature, top-k, top-p, min-p, then
the draw. l is a token's logit. A constraint (constraint.py) chooses the tokens that temperature and filters see.

- Bias b: l + b.
- Repetition penalty r (arXiv 1909.05858, section 4.1): l of each token seen before, in the prompt too, is divided by r
  if it is positive and multiplied by r if it is negative.
- Frequency penalty f and presence penalty p, as OpenAI defines them: l - c f - (c > 0) p of a token that has been
  generated c times.
- Temperature t: probabilities softmax(l / t); 0 takes the largest l after the penalties and ignores the other options.
- Top-k: keep the k largest logits; among equal ones keep the lower ids.
- Top-p (arXiv 1904.09751): keep the smallest set of most probable tokens whose probabilities add up to at least p.
- Min-p (arXiv 2407.01082): keep the tokens that are at least p times as probable as the most probable one.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..io.errors import DiffbitError
from ..io.fields import located
from ..io.files import read_json
from ..settings import Sampling
from .artifact import Artifact
from .constraint import Constraint

GENERATION = "generation_config.json"


class Sampler:
    """A callable `sampler(logits [V], token_ids so far) -> token id`. The same seed draws the same tokens.

        Sampler(0.8, top_p=0.9, seed=1)                 # the fields of Sampling, temperature first
        Sampler(Sampling(temperature=0.8))
        Sampler(0.8, constraint=Grammars(tokenizer, end_tokens).json_schema({"type": "object"}))

    Tokens after those at the last `start` count as generated. Raises DiffbitError for settings out of range.
    """

    def __init__(
        self, temperature: float | Sampling = 0.0, *, constraint: Constraint | None = None, **options: Any
    ) -> None:
        self.sampling = temperature if isinstance(temperature, Sampling) else Sampling(temperature, **options)
        self.constraint = constraint
        self._random = np.random.default_rng(self.sampling.seed)
        bias = self.sampling.logit_bias
        self._biased = np.array(sorted(bias), np.int64)
        self._biases = np.array([bias[token] for token in sorted(bias)], np.float64)
        self._prompt = 0

    @classmethod
    def of(cls, artifact: Artifact, *, constraint: Constraint | None = None, **changes: Any) -> Sampler:
        """Return the sampler of the model's generation_config.json; `changes` that are not None override it."""
        settings = read_json(artifact.file(GENERATION)) if GENERATION in artifact.files else {}
        Sampling(**{name: value for name, value in changes.items() if value is not None})  # an error without the file
        with located(artifact.path / GENERATION):
            return cls(Sampling.of_model(settings, **changes), constraint=constraint)

    def another(self, index: int) -> Sampler:
        """Return the same sampler for another answer, whose seed is larger by `index`."""
        sampler = copy(self)
        seed = self.sampling.seed
        sampler._random = np.random.default_rng(None if seed is None else seed + index)
        sampler.constraint = None if self.constraint is None else self.constraint.copy()
        return sampler

    def start(self, prompt_tokens: int, limit: int | None = None) -> None:
        """Begin a text whose first tokens are its prompt, and that continues by at most `limit` tokens."""
        self._prompt = prompt_tokens
        if self.constraint is not None:
            self.constraint.start(limit)

    def is_ready(self) -> bool:
        """Whether a call would choose at once: the constraint has computed which tokens may come next."""
        return self.constraint is None or self.constraint.is_ready()

    def __call__(self, logits: NDArray[np.floating], token_ids: Sequence[int] = ()) -> int:
        # The largest logit is finite unless one of them is NaN or +inf, or all are -inf.
        if not np.isfinite(logits.max()):
            raise DiffbitError(
                "the model returned logits that are not finite: some of its numbers are too large; if a part of it is "
                "in float16, export it with --dtype fp32 --kv fp32"
            )
        logits = self._changed(logits, np.asarray(token_ids, np.int64))
        if self.constraint is None:
            return self._chosen(logits)
        allowed = self.constraint.allowed(len(logits))
        return self.constraint.accept(int(allowed[self._chosen(logits[allowed])]))

    def _chosen(self, logits: NDArray[np.floating]) -> int:
        """Return the index of the logit that is chosen."""
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        tokens, probabilities = self.distribution(logits)
        cumulative = np.cumsum(probabilities)
        index = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
        return int(tokens[min(index, len(tokens) - 1)])

    def _changed(self, logits: NDArray[np.floating], token_ids: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return the logits with bias and penalties."""
        sampling = self.sampling
        frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
        if not sampling.logit_bias and sampling.repetition_penalty == 1 and not frequency and not presence:
            return logits
        logits = logits.astype(np.float64)
        if len(self._biased):
            if self._biased[-1] >= len(logits):
                raise DiffbitError(f"logit_bias has token {self._biased[-1]}, wanted an id of the {len(logits)} tokens")
            logits[self._biased] += self._biases
        tokens, penalty = np.unique(token_ids), sampling.repetition_penalty
        values = logits[tokens]
        logits[tokens] = np.where(values > 0, values / penalty, values * penalty)
        generated, times = np.unique(token_ids[self._prompt :], return_counts=True)
        logits[generated] -= frequency * times + presence
        return logits

    def distribution(self, logits: NDArray[np.floating]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return candidate token ids and their probabilities (sum 1), without bias and penalties; the temperature is
        not 0."""
        tokens = np.arange(len(logits), dtype=np.int64)
        if 0 < self.sampling.top_k < len(logits):
            tokens = _largest(logits, self.sampling.top_k)
        shifted = logits[tokens].astype(np.float64)
        shifted -= shifted.max()
        # With a tiny temperature the quotient may overflow to -inf, which is a probability of 0.
        with np.errstate(over="ignore"):
            probabilities = np.exp(shifted / self.sampling.temperature)
        probabilities /= probabilities.sum()
        if self.sampling.top_p < 1:
            indices = _nucleus(probabilities, self.sampling.top_p)
            tokens, probabilities = tokens[indices], probabilities[indices]
            probabilities /= probabilities.sum()
        if self.sampling.min_p:
            indices = np.flatnonzero(probabilities >= self.sampling.min_p * probabilities.max())
            tokens, probabilities = tokens[indices], probabilities[indices] / probabilities[indices].sum()
        return tokens, probabilities


def _largest(logits: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """Return ids of the `count` largest logits, ascending; among equal logits the lower ids."""
    limit = np.partition(logits, -count)[-count]
    above = np.flatnonzero(logits > limit)
    equal = np.flatnonzero(logits == limit)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(probabilities: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Return indices of the smallest set of largest probabilities that add up to at least `top_p`."""
    # All entries below (1 - p) / n add up to less than 1 - p, so the set lies among the others: sort only those
    candidates = np.flatnonzero(probabilities >= (1 - top_p) / len(probabilities))
    order = candidates[np.argsort(-probabilities[candidates], kind="stable")]
    mass = np.cumsum(probabilities[order])
    # A token belongs to the set while those before it add up to less than p. If rounding keeps the last sum below p,
    # all tokens belong to it.
    return order[: int(np.searchsorted(mass, top_p)) + 1]
