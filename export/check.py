"""Compares an artifact with its checkpoint: logits and greedy tokens on the same text.

The reference is `reference_model` in torch: the same weights with the same rounding of activations, so that only the
order of sums differs. A difference in the last bit can still change the int8 code of an activation, which affects every
later token of the window. So the check uses the median over tokens; the largest error is reported, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..calib_data import Windows
from ..io.errors import DiffbitError
from ..io.progress import track
from ..models import Checkpoint, Decoder, KVCache
from .reference import reference_model

LogitsFunction = Callable[[NDArray[np.int64], NDArray[np.bool_]], NDArray[np.float32]]
"""(token ids [1, S], mask [1, S]: False for padding at the end) -> logits [1, S, V]."""

StepFunction = Callable[[list[int], bool], NDArray[np.float32]]
"""(token ids, whether they begin a new sequence or continue the current one) -> logits [V] after them."""

PROMPT_TOKENS = 16


def compare_with_checkpoint(
    logits_of: LogitsFunction,
    checkpoint: str | Path | Checkpoint,
    windows: Windows,
    *,
    tolerance: float,
    target: str = "cpu",
) -> dict[str, Any]:
    """Compare logits over `windows`. `tolerance` is that of the artifact's golden logits, and `target` its target.

    Returns
        tokens                 predictions compared
        error_median, _max     over them, of max_v |artifact - reference| / std_v(reference)
        kl                     mean KL(reference || artifact) in nats
        top1_agreement         share of equal most likely tokens
        perplexity, perplexity_reference
        tolerance, passed      error_median <= tolerance

    Raises DiffbitError for text without tokens to score, or with tokens outside the vocabulary.
    """
    if not windows.target.any():
        raise DiffbitError("the text has no token to compare at; take a longer one")
    model = _reference(checkpoint, windows, target)
    columns: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("error", "kl", "same", "artifact_loss", "reference_loss")
    }
    rows = zip(windows.ids, windows.mask, windows.target, strict=True)
    for ids, mask, scores in track(rows, "comparing", total=len(windows.ids)):
        length = int(mask.nonzero()[0].max(initial=-1)) + 1
        scored = scores[1:length].nonzero()[0]  # the logits at position i predict token i + 1
        if not len(scored):
            continue
        artifact_logits = torch.from_numpy(np.asarray(logits_of(ids[None, :length], mask[None, :length])))[
            0, scored
        ].double()
        with torch.inference_mode():
            attention_mask = torch.from_numpy(mask[None, :length]).long()
            reference_logits = model(torch.from_numpy(ids[None, :length]), attention_mask=attention_mask)[
                0, scored
            ].double()
        artifact_log, reference_log = artifact_logits.log_softmax(-1), reference_logits.log_softmax(-1)
        next_tokens = torch.from_numpy(ids[1:length][scored])[:, None]
        columns["error"].append((artifact_logits - reference_logits).abs().amax(-1) / reference_logits.std(-1))
        columns["kl"].append((reference_log.exp() * (reference_log - artifact_log)).sum(-1))
        columns["same"].append((artifact_logits.argmax(-1) == reference_logits.argmax(-1)).double())
        columns["artifact_loss"].append(-artifact_log.gather(-1, next_tokens)[:, 0])
        columns["reference_loss"].append(-reference_log.gather(-1, next_tokens)[:, 0])
    values = {name: torch.cat(parts) for name, parts in columns.items()}
    median = float(values["error"].median())
    return {
        "tokens": len(values["error"]),
        "error_median": median,
        "error_max": float(values["error"].max()),
        "kl": float(values["kl"].mean()),
        "top1_agreement": float(values["same"].mean()),
        "perplexity": float(values["artifact_loss"].mean().exp()),
        "perplexity_reference": float(values["reference_loss"].mean().exp()),
        "tolerance": tolerance,
        "passed": median <= tolerance,  # False for NaN too
    }


def compare_greedy_tokens(
    logits_after: StepFunction,
    checkpoint: str | Path | Checkpoint,
    windows: Windows,
    *,
    tokens: int,
    capacity: int,
    tolerance: float,
    target: str = "cpu",
) -> dict[str, Any]:
    """Generate greedily with both models after the first PROMPT_TOKENS of each window, until they choose different
    tokens.

    They generate up to `tokens` tokens, or as many as the `capacity` of the artifact's context holds; an eos token does
    not end them.

    Returns
        prompts, same       number of prompts, and of those with the same tokens to the end
        tokens              number of equal tokens
        differences         a row for each other prompt: prompt and token (indices), artifact and reference (ids),
                            gap (between the two ids' logits in the reference) and error (max_v |artifact -
                            reference|), both relative to std_v(reference)
        tolerance, passed   every gap <= 2 tolerance, by which the tolerance lets two logits approach each other

    Raises DiffbitError for text with tokens outside the vocabulary.
    """
    model = _reference(checkpoint, windows, target)
    differences = []
    alike = 0
    prompts = [ids[mask][:PROMPT_TOKENS] for ids, mask in zip(windows.ids, windows.mask, strict=True)]
    for index, prompt in enumerate(track(prompts, "generating")):
        count = min(tokens, capacity - len(prompt) + 1)
        cache = KVCache(model.config, 1, capacity)
        ids = prompt.tolist()
        for position in range(count):
            artifact_logits = torch.from_numpy(logits_after(ids, position == 0)).double()
            with torch.inference_mode():
                reference_logits = model(torch.tensor([ids]), cache=cache)[0, -1].double()
            token, expected = int(artifact_logits.argmax()), int(reference_logits.argmax())
            if token != expected:
                spread = float(reference_logits.std())
                differences.append(
                    {
                        "prompt": index,
                        "token": position,
                        "artifact": token,
                        "reference": expected,
                        "gap": float(reference_logits[expected] - reference_logits[token]) / spread,
                        "error": float((artifact_logits - reference_logits).abs().max()) / spread,
                    }
                )
                break
            alike += 1
            ids = [token]
    return {
        "prompts": len(prompts),
        "same": len(prompts) - len(differences),
        "tokens": alike,
        "differences": differences,
        "tolerance": tolerance,
        "passed": all(row["gap"] <= 2 * tolerance for row in differences),  # False for NaN too
    }


def _reference(checkpoint: str | Path | Checkpoint, windows: Windows, target: str) -> Decoder:
    """Return the checkpoint's reference model; raises DiffbitError if its vocabulary does not cover the text."""
    checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    largest = int(windows.ids.max())
    if largest >= checkpoint.config.vocab_size:
        raise DiffbitError(
            f"{checkpoint.path}: has a vocabulary of {checkpoint.config.vocab_size} tokens, but the text holds token "
            f"{largest}; the tokenizer belongs to another model"
        )
    return reference_model(checkpoint, target)
