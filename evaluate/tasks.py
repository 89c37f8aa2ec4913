"""Tasks of lm-evaluation-harness, for a model in torch and for its artifacts.

Every variant answers the same documents, and its scores are paired with the 16-bit model's, document by document, like
windows of text in metrics.py; documents are treated as independent. A metric with a number per document (acc,
exact_match, ...) is averaged. For a metric with a sum and a weight per document, such as the perplexity of rolling
loglikelihoods, the ratio of the sums is used: the loss in nats per word or byte.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ..errors import DiffbitError, MissingDependency
from ..models import Checkpoint, Decoder
from ..models.cache import KVCache
from ..models.layers.attention import Attention
from ..quantize.attention import LowBitAttention
from ..runtime import Artifact, Tokenizer
from ..tokenizer_files import TOKENIZER
from .metrics import CONFIDENCE, Estimate, mean

if TYPE_CHECKING:
    from ..runtime.harness import DiffbitLM

CONTEXT = 2048  # tokens that a model in torch gets at most


@dataclass(frozen=True)
class Answers:
    """A metric of a task, of one model: a sum and a weight for each document."""

    task: str
    metric: str
    totals: np.ndarray  # [K, n] of K roundings, or [n]
    weights: np.ndarray  # [n]


@dataclass(frozen=True)
class TaskScore:
    task: str
    metric: str
    value: Estimate
    change: Estimate  # to the 16-bit model's, paired


@dataclass(frozen=True)
class Tasks:
    """names: as for lm_eval --tasks. folder: of tasks of your own, as YAML files. limit: documents of each."""

    names: tuple[str, ...]
    folder: Path | None = None
    limit: int | None = None

    def check(self) -> None:
        """Refuse names that the harness does not know, before the work."""
        try:
            manager = _manager(self.names, self.folder)
        except ImportError:
            raise MissingDependency("lm_eval", "tasks", "running tasks") from None
        if unknown := [name for name in self.names if not manager.match_tasks([name])]:
            raise DiffbitError(
                f"task {unknown[0]!r} is none that lm-evaluation-harness has; name one of `lm_eval ls tasks`, or pass "
                "the folder of its YAML file with --tasks-folder"
            )

    def answers(self, model: DiffbitLM) -> list[Answers]:
        from lm_eval import simple_evaluate

        manager = _manager(self.names, self.folder)
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        with redirect_stderr(StringIO()):  # a bar for each kind of request, beside ours
            found = simple_evaluate(
                model,
                tasks=list(self.names),
                task_manager=manager,
                limit=self.limit,
                bootstrap_iters=0,
                log_samples=True,
            )
        assert found is not None
        return [one for task, samples in found["samples"].items() for one in _metrics(task, samples)]


@cache
def _manager(names: tuple[str, ...], folder: Path | None) -> Any:
    """The index of the folder's tasks and, unless these are all, of the harness' thousands."""
    from lm_eval.tasks import TaskManager

    own = None if folder is None else TaskManager(include_path=str(folder), include_defaults=False)
    if own is not None and all(own.match_tasks([name]) for name in names):
        return own
    return TaskManager(include_path=None if folder is None else str(folder))


def score(answers: Answers, reference: Answers, confidence: float = CONFIDENCE) -> TaskScore:
    value = mean(answers.totals, answers.weights, confidence, independent=True)
    change = mean(answers.totals - reference.totals, answers.weights, confidence, independent=True)
    return TaskScore(answers.task, answers.metric, value, change)


def of_repeats(repeats: Sequence[Sequence[Answers]]) -> tuple[Answers, ...]:
    """The same tasks under K roundings, or of K training runs, each averaged over its own roundings, as one each."""
    if len(repeats) == 1:
        return tuple(repeats[0])
    return tuple(
        Answers(
            own[0].task, own[0].metric, np.stack([np.atleast_2d(one.totals).mean(0) for one in own]), own[0].weights
        )
        for own in zip(*repeats, strict=True)
    )


def torch_model(checkpoint: Checkpoint, decoder: Decoder, folder: Path, batch_size: int) -> DiffbitLM:
    """A decoder as the harness wants a model. folder: a place for the checkpoint's tokenizer, kept while it is used."""
    from ..runtime.harness import DiffbitLM

    schemes = [module.arithmetic.scheme for module in decoder.modules() if isinstance(module, Attention)
               and isinstance(module.arithmetic, LowBitAttention)]  # fmt: skip
    if any(scheme.has_window for scheme in schemes):
        batch_size = 1  # rows of unequal length would share blocks and the residual window of the cache

    class TorchLM(DiffbitLM):
        def __init__(self) -> None:
            (folder / TOKENIZER).write_bytes(checkpoint.tokenizer_files[TOKENIZER])
            config = decoder.config
            self._open(
                _TorchSession(decoder),
                Tokenizer(folder / TOKENIZER),
                config.bos_token_id,
                config.eos_token_ids,
                config.vocab_size,
                batch_size,
            )

    if TOKENIZER not in checkpoint.tokenizer_files:
        raise DiffbitError(f"{checkpoint.path}: holds no {TOKENIZER}, which tasks need for their texts")
    return TorchLM()


def artifact_model(artifact: Artifact, batch_size: int) -> DiffbitLM:
    from ..runtime.harness import DiffbitLM

    return DiffbitLM(str(artifact.path), batch_size)


class _TorchSession:
    """A decoder in torch with the calls of runtime.Session that the harness needs."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._device = decoder, next(decoder.parameters()).device
        self.capacity = min(decoder.config.max_position, CONTEXT)
        self.reset()

    def reset(self) -> None:
        self._cache: KVCache | None = None
        self._mask = torch.zeros(0, 0, dtype=torch.int64)

    def prefill(
        self, token_ids: ArrayLike, attention_mask: ArrayLike | None = None, *, all_positions: bool = False
    ) -> NDArray[np.float32]:
        ids = np.asarray(token_ids)
        mask = torch.from_numpy(np.ones_like(ids) if attention_mask is None else np.asarray(attention_mask))
        if all_positions:  # nothing follows
            logits = self._run(torch.from_numpy(ids), mask, None)
            return logits * mask.numpy()[..., None].astype(np.float32)
        self._cache = KVCache(self._decoder.config, len(ids), self.capacity, device=self._device)
        self._mask = mask
        last = (mask.cumsum(-1) * mask).argmax(-1)
        return self._run(torch.from_numpy(ids), mask, self._cache)[np.arange(len(ids)), last.numpy()]

    def step(self, token_ids: ArrayLike) -> NDArray[np.float32]:
        ids = torch.as_tensor(token_ids)
        self._mask = torch.cat([self._mask, torch.ones_like(ids)], -1)
        return self._run(ids, self._mask, self._cache)[:, -1]

    def _run(self, ids: torch.Tensor, mask: torch.Tensor, cache: KVCache | None) -> NDArray[np.float32]:
        seen = None if mask.all() else mask.to(self._device)
        with torch.inference_mode():
            logits = self._decoder(ids.to(self._device), cache=cache, attention_mask=seen)
        found: NDArray[np.float32] = logits.cpu().numpy()
        return found


def _metrics(task: str, samples: Sequence[dict[str, Any]]) -> Iterator[Answers]:
    """A sample's metrics are its own keys; one that is a pair is a sum and its weight."""
    filters = list(dict.fromkeys(str(sample.get("filter", "none")) for sample in samples))
    for name in filters:
        own = [sample for sample in samples if str(sample.get("filter", "none")) == name]
        for metric in own[0]["metrics"]:
            values = np.array([sample[metric] for sample in own], np.float64)
            label = metric if len(filters) == 1 else f"{metric}, {name}"
            if values.ndim == 2 and values.shape[1] == 2:
                yield Answers(task, f"{label}, nats", -values[:, 0], values[:, 1])
            elif values.ndim == 1:
                yield Answers(task, label, values, np.ones(len(values)))
