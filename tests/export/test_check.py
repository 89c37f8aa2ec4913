"""compare_with_checkpoint: finds nothing in the right artifact and something in a wrong one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from diffbit import DiffbitError, runtime
from diffbit.export import compare_greedy_tokens, compare_with_checkpoint, reference_model

from .conftest import Maker
from .helpers import write_artifact


def windows() -> SimpleNamespace:
    ids = np.random.default_rng(0).integers(0, 61, (5, 12))
    mask = np.ones((5, 12), bool)
    mask[4, 7:] = False
    target = mask.copy()
    target[:, :3] = False
    return SimpleNamespace(ids=ids, mask=mask, target=target)


def test_an_artifact_against_its_checkpoint(checkpoint_of: Maker) -> None:
    checkpoint, text = checkpoint_of("diff_v1", "int4_g32"), windows()
    session = runtime.Session(write_artifact(checkpoint), threads=1)

    def logits_of(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        session.reset()
        return session.prefill(ids, mask, all_positions=True)

    result = compare_with_checkpoint(logits_of, checkpoint, text, tolerance=0.1)
    assert result["passed"] and result["error_median"] < 1e-3 and result["kl"] < 1e-3
    assert result["tokens"] == text.target.sum()
    # the perplexity again, from the definition
    model, losses = reference_model(checkpoint), []
    with torch.inference_mode():
        for ids, target in zip(text.ids, text.target, strict=True):
            shares = model(torch.from_numpy(ids[None])).log_softmax(-1)[0]
            losses += [-float(shares[i - 1, ids[i]]) for i in range(1, 12) if target[i]]
    assert result["perplexity_reference"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert result["perplexity"] == pytest.approx(result["perplexity_reference"], rel=1e-2)

    wrong = compare_with_checkpoint(logits_of, checkpoint_of("diff_v1", "int2_g64"), text, tolerance=0.1)
    assert not wrong["passed"] and wrong["kl"] > 0.01 and wrong["top1_agreement"] < 1


def test_greedy_tokens_of_an_artifact_and_of_a_checkpoint(checkpoint_of: Maker) -> None:
    checkpoint, text = checkpoint_of("diff_v2"), windows()
    session = runtime.Session(write_artifact(checkpoint), threads=1)

    def logits_after(ids: list[int], new: bool) -> np.ndarray:
        if new:
            session.reset()
        return session.prefill([ids])[0]

    def compare(other: Path, tokens: int) -> dict[str, Any]:
        capacity = session.capacity
        return compare_greedy_tokens(logits_after, other, text, tokens=tokens, capacity=capacity, tolerance=1e-3)

    result = compare(checkpoint, 6)
    assert (result["prompts"], result["same"], result["tokens"], result["differences"]) == (5, 5, 5 * 6, [])
    assert result["passed"]
    # as far as the context goes: the last token of it still predicts one
    assert compare(checkpoint, 1000)["tokens"] == sum(session.capacity - count + 1 for count in text.mask.sum(1))

    result = compare(checkpoint_of("diff_v2", "int2_g64"), 6)
    first = result["differences"][0]
    assert not result["passed"] and result["same"] + len(result["differences"]) == 5
    model, prompt = reference_model(checkpoint_of("diff_v2", "int2_g64")), text.ids[first["prompt"]].tolist()
    with torch.inference_mode():  # torch alone, without a cache, and the artifact alone
        for _ in range(first["token"]):
            prompt.append(int(model(torch.tensor([prompt]))[0, -1].argmax()))
        there = model(torch.tensor([prompt]))[0, -1]
    assert int(there.argmax()) == first["reference"] != first["artifact"] == int(logits_after(prompt, True).argmax())
    gap = float(there[first["reference"]] - there[first["artifact"]]) / float(there.std())
    assert first["gap"] == pytest.approx(gap, rel=1e-3)


def test_a_text_that_does_not_fit(checkpoint_of: Maker) -> None:
    text = windows()
    text.ids[0, 0] = 61
    with pytest.raises(DiffbitError, match="61 tokens, but the text holds token 61"):
        compare_with_checkpoint(lambda ids, mask: ids, checkpoint_of("softmax"), text, tolerance=0.1)
    text.target[:] = False
    with pytest.raises(DiffbitError, match="no token to compare"):
        compare_with_checkpoint(lambda ids, mask: ids, checkpoint_of("softmax"), text, tolerance=0.1)
