"""What every variant is asked: pieces with a cache, padding, gradients, and the artifact against torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diffbit.export import export_artifact, reference_model
from diffbit.formats import parse_format
from diffbit.models import Decoder, KVCache, ModelConfig, load, save
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.runtime import Session, verify

from ...export.helpers import relative_error, write_tokenizer

MASK = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1]])


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
    ids = ids_of(model.config, 2, 20)
    whole = model(ids)
    for sizes in ((20,), (1,) * 20, (7, 1, 2, 10)):
        cache, logits, at = KVCache(model.config, 2, 20), [], 0
        for size in sizes:
            logits.append(model(ids[:, at : at + size], cache=cache))
            at += size
        torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=0, atol=atol)
    cache.reset()
    torch.testing.assert_close(model(ids, cache=cache), whole, rtol=0, atol=atol)


@torch.no_grad()
def check_padding_is_as_if_it_were_not_there(model: Decoder, atol: float = 2e-5) -> None:
    """Padding in front, behind and between, in one call and in pieces; the other row of the batch has none."""
    ids = ids_of(model.config, 2, 20)
    mask = torch.cat((MASK, torch.ones_like(MASK)))
    alone = model(ids[:1, MASK[0].bool()]), model(ids[1:])
    for chunk in (20, 6, 1):
        cache, parts = KVCache(model.config, 2, 20), [slice(at, min(at + chunk, 20)) for at in range(0, 20, chunk)]
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


def check_artifact(model: Decoder, folder: Path, weights: str | None, dtype: str, bound: float) -> Path:
    """From the checkpoint, perhaps quantized, to an artifact that verifies and gives torch's logits: a prompt in
    pieces, token by token, and a batch whose shorter row is padded. Returns the artifact."""
    source = folder / "float"
    save(model, source)
    write_tokenizer(source, model.config.vocab_size)
    assert load(source).config == model.config
    if weights:
        source = folder / "quantized"
        quantize_checkpoint(folder / "float", source, Scheme(weights=parse_format(weights)))
    artifact = export_artifact(source, folder / "onnx", dtype=dtype)
    assert verify(artifact).passed
    ids = ids_of(model.config, 2, 20)
    long, short = ids[:1], ids[1:, :17]
    with torch.inference_mode():
        reference = reference_model(source)
        alone, alone_short = reference(long)[0], reference(short)[0]
    mask = np.ones((2, 18), np.int64)
    mask[1, :3] = 0
    padded = np.concatenate([long[:, :18], np.roll(ids[1:, :18], 3, axis=1)])
    for native in (False, True):
        session = Session(artifact, threads=1, native=native)
        for parts in (((0, 2), (2, 11), (11, 20)), [(at, at + 1) for at in range(20)]):
            session.reset()
            logits = [session.prefill(long.numpy()[:, a:b], all_positions=True)[0] for a, b in parts]
            assert relative_error(np.concatenate(logits), alone).max() < bound, native
        session.reset()
        steps = [session.prefill(padded, mask)]
        steps += [session.step([[long[0, 18 + i]], [short[0, 15 + i]]]) for i in (0, 1)]
        both = torch.stack([alone[-3:], alone_short[-3:]], 1)
        assert relative_error(np.stack(steps), both).max() < bound, native
    return artifact
