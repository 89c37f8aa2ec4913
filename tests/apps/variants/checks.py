"""What every variant is asked: pieces with a cache, padding, gradients, and the artifact against torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diffbit.models import Decoder, KVCache, ModelConfig
from diffbit.runtime import Session

from . import artifacts

LENGTH = 40
MASK = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1] * 2])
MASK[0, -2:] = 0


def random_decoder(config: ModelConfig, size: float = 0.15) -> Decoder:
    """Weights of a size at which every part shows."""
    torch.manual_seed(0)
    model = Decoder(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, size)
            elif "norm.weight" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.add_(torch.randn_like(parameter) * size)
    return model.eval()


def ids_of(config: ModelConfig, batch: int, length: int) -> Tensor:
    return torch.randint(0, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def check_pieces_equal_the_whole(model: Decoder, atol: float = 2e-5) -> None:
    ids = ids_of(model.config, 2, LENGTH)
    whole = model(ids)
    for sizes in ((LENGTH,), (1,) * LENGTH, (7, 1, 2, 30)):
        cache, logits, at = KVCache(model.config, 2, LENGTH), [], 0
        for size in sizes:
            logits.append(model(ids[:, at : at + size], cache=cache))
            at += size
        torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=0, atol=atol)
    cache.reset()
    torch.testing.assert_close(model(ids, cache=cache), whole, rtol=0, atol=atol)


@torch.no_grad()
def check_padding_changes_nothing(model: Decoder, atol: float = 2e-5, padding: Tensor = MASK) -> None:
    """Compare with the tokens alone: padding in front, between and at the end, in one call and in pieces; another row
    has none."""
    ids = ids_of(model.config, 2, LENGTH)
    mask = torch.cat((padding, torch.ones_like(padding)))
    alone = model(ids[:1, padding[0].bool()]), model(ids[1:])
    for chunk in (LENGTH, 6, 1):
        cache, parts = (
            KVCache(model.config, 2, LENGTH),
            [slice(at, min(at + chunk, LENGTH)) for at in range(0, LENGTH, chunk)],
        )
        pieces = [model(ids[:, part], cache=cache, attention_mask=mask[:, : part.stop]) for part in parts]
        logits = torch.cat(pieces, 1)
        assert logits.isfinite().all()
        for row, expected in enumerate(alone):
            torch.testing.assert_close(logits[row, mask[row].bool()], expected[0], rtol=0, atol=atol)


def check_gradients_reach_every_parameter(model: Decoder) -> None:
    with torch.enable_grad():
        model(ids_of(model.config, 2, 20)).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def check_artifact(model: Decoder, folder: Path, weights: str | None, dtype: str, bound: float) -> None:
    """From a checkpoint, perhaps quantized, to an artifact that verifies and gives torch's logits: of a prompt in
    pieces, of a padded batch, and token by token."""
    artifact, reference = artifacts.artifact_of(model, folder, weights=weights, dtype=dtype)
    artifacts.check_session(artifact, reference, bound)
    ids = ids_of(model.config, 2, 20)
    session = Session(artifact, threads=1)
    columns = ids.numpy()[:, :, None].transpose(1, 0, 2)
    steps = np.stack([session.prefill(columns[0]), *map(session.step, columns[1:])], 1)
    with torch.inference_mode():
        assert artifacts.relative_error(steps, reference(ids)).max() < bound
