"""One model of a mixer, from a folder to an artifact, in all the ways that its tokens can come."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from diffbit.export import export_artifact, reference_model
from diffbit.formats import parse_format
from diffbit.models import Decoder, LayerSpec, ModelConfig, save
from diffbit.models.mixers import MixerOptions
from diffbit.models.mlp import swiglu
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint
from diffbit.runtime import Session, verify

from ...export.helpers import relative_error, write_tokenizer

VOCABULARY = 61


def model_of(*mixers: MixerOptions, factor: float = 6.0) -> Decoder:
    """Layers of these mixers; their random weights are large enough that every part of them shows in the logits."""
    torch.manual_seed(0)
    layers = tuple(LayerSpec(mixer, swiglu.Options(96), sub_norms=bool(i % 2)) for i, mixer in enumerate(mixers))
    decoder = Decoder(ModelConfig(vocab_size=VOCABULARY, hidden_size=64, layers=layers, max_position=64))
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return decoder.eval()


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def artifact_of(
    decoder: Decoder,
    folder: Path,
    *,
    weights: str | None = None,
    kv: str = "float",
    states: str | None = None,
    dtype: str = "fp32",
) -> tuple[Path, Decoder]:
    """Save, quantize and export; return the artifact, which `verify` passes, and its reference in torch."""
    source = folder / "float"
    save(decoder, source)
    write_tokenizer(source, VOCABULARY)
    if weights or states or kv != "float":
        format = None if weights is None else parse_format(weights)
        cached = None if kv == "float" else kv
        scheme = Scheme(weights=format, attention=AttentionScheme(keys=cached, values=cached, states=states))
        quantize_checkpoint(source, folder / "quantized", scheme)
        source = folder / "quantized"
    artifact = export_artifact(source, folder / "onnx", dtype=dtype)
    assert (told := verify(artifact)).passed, told
    return artifact, reference_model(source)


def check_session(artifact: Path, model: Decoder, bound: float, *, batch: bool = True) -> None:
    """A prompt in chunks and single tokens; then a batch whose shorter row has padding in front, and steps after it.
    Logits must be those of whole rows in torch, within `bound` of their standard deviation."""
    ids = tokens(2, 40)
    long, short = ids[:1], ids[1:, :33]
    with torch.inference_mode():
        right, right_short = model(long)[0], model(short)[0]
    mask = np.ones((2, 37), np.int64)
    mask[1, :6] = 0
    padded = np.concatenate([long[:, :37], np.roll(ids[1:, :37], 6, axis=1)])
    for native in (False, True):
        session = Session(artifact, threads=1, native=native)
        row = long.numpy()
        logits = [session.prefill(row[:, a:b], all_positions=True)[0] for a, b in ((0, 2), (2, 19), (19, 36))]
        logits += [session.step(row[:, i : i + 1]) for i in range(36, 40)]
        assert relative_error(np.concatenate(logits), right).max() < bound, native
        if not batch:
            continue
        session.reset()
        logits = [session.prefill(padded, mask)]
        logits += [session.step([[long[0, 37 + i]], [short[0, 31 + i]]]) for i in (0, 1)]
        both = torch.stack([right[36:39], right_short[30:33]], 1)
        assert relative_error(np.stack(logits), both).max() < bound, native
