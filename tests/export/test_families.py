"""Families whose layers differ from llama's: granite's factors, Gemma 3's norms and angles, OLMo 2's norms.

Artifacts are compared with transformers' model of the same folder, with kernels and with the portable bodies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import diffbit
from diffbit import models
from diffbit.export import export_artifact, reference_model
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint
from diffbit.runtime import Session, verify

from ..models.helpers import LONGROPE, VOCABULARY, hf_model, saved, tokens
from ..models.test_transformers import FACTORS, GEMMA, PHI3, SMOLLM3
from .helpers import write_tokenizer

KINDS: dict[str, dict[str, Any]] = {
    "granite": FACTORS | {"tie_word_embeddings": True},
    "gemma3_text": GEMMA,
    "olmo2": {"rms_norm_eps": 1e-3},
    "smollm3": SMOLLM3,
    "lfm2": {"block_multiple_of": 32, "conv_L_cache": 4},
    "phi3": PHI3 | {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.25}},
}
NOT_CONVERTED = {"olmo2": "norm of all queries of a token", "lfm2": "which is no attention"}
ROTATED = ("granite", "phi3", "smollm3", "lfm2")  # models whose residual stream `rotate` can rotate
SCHEMES = {
    "rtn": (Scheme(weights=parse_format("int4_g32")), "rtn"),
    "gptq": (Scheme(weights=parse_format("int4_g16")), "gptq"),
    "rotated heads": (Scheme(weights=parse_format("int4_g16")), "rotate_heads+gptq"),
    "nvfp4": (Scheme(weights=parse_format("nvfp4")), "gptq"),
    "awq": (Scheme(weights=parse_format("int8")), "awq"),
    "int4 cache": (Scheme(weights=parse_format("int8"), attention=AttentionScheme(keys="int4", values="int4")), "rtn"),
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers' that is large enough for every format; its folder has the family's name."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = hf_model(request.param, **KINDS[request.param], **sizes, **ids)
    path = saved(model, tmp_path_factory.mktemp("family") / request.param)
    write_tokenizer(path, VOCABULARY)
    return path


@pytest.mark.parametrize("native", [True, False], ids=["kernels", "bodies"])
def test_artifacts_compute_what_transformers_does(folder: Path, native: bool, tmp_path: Path) -> None:
    """A prompt longer than the windows, and steps after it."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    session = Session(export_artifact(folder, tmp_path / "a"), native=native)
    ids = tokens(1, 24)
    with torch.no_grad():
        logits = theirs(ids).logits
    spread = float(logits.std())
    pieces = [session.prefill(ids[:, :16].numpy(), all_positions=True)[0]]
    pieces += [session.step(ids[:, place : place + 1].numpy()) for place in range(16, 24)]
    ours = torch.cat([torch.from_numpy(part) for part in pieces])
    assert (ours - logits[0]).abs().max() < 3e-5 * spread


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_quantized_models_are_exported_and_verified(folder: Path, name: str, tmp_path: Path) -> None:
    scheme, method = SCHEMES[name]
    calibration = {"calibration": tokens(4, 32, seed=3)} if method not in ("rtn",) else {}
    quantize_checkpoint(folder, tmp_path / "q", scheme, method=method, **calibration)
    artifact = export_artifact(tmp_path / "q", tmp_path / "a")
    assert verify(artifact).passed
    ids = tokens(1, 12)
    expected = reference_model(tmp_path / "q")(ids)[0].detach()
    logits = torch.from_numpy(Session(artifact).prefill(ids.numpy(), all_positions=True)[0])
    assert (logits - expected).abs().mean() < 0.02 * expected.std()  # some activations round to another integer


def test_the_residual_stream_is_rotated_or_a_reason_is_given(folder: Path, tmp_path: Path) -> None:
    scheme = Scheme(weights=parse_format("int8"))
    if folder.name in ROTATED:
        quantize_checkpoint(folder, tmp_path / "q", scheme, method="rotate")
        ids = tokens(1, 12)
        exact, rotated = models.load(folder)(ids), diffbit.load(tmp_path / "q")(ids)
        assert (rotated - exact).norm() < 0.05 * exact.norm()
    else:
        with pytest.raises(DiffbitError, match="has norms after its mixer and its MLP"):
            quantize_checkpoint(folder, tmp_path / "q", scheme, method="rotate")


def test_converted_models_compute_the_same(folder: Path, tmp_path: Path) -> None:
    if folder.name in NOT_CONVERTED:
        with pytest.raises(DiffbitError, match=NOT_CONVERTED[folder.name]):
            diffbit.convert(folder, tmp_path / "d")
        return
    diffbit.convert(folder, tmp_path / "d")
    ids = tokens(2, 24)
    torch.testing.assert_close(models.load(tmp_path / "d")(ids), models.load(folder)(ids), rtol=0, atol=0)


def test_padding_changes_nothing(folder: Path, tmp_path: Path) -> None:
    session = Session(export_artifact(folder, tmp_path / "a"))
    ids = tokens(2, 14).numpy()
    mask = torch.ones(2, 14, dtype=torch.int64)
    mask[1, :6] = 0
    together = session.prefill(ids, mask.numpy())
    session.reset()
    alone = session.prefill(ids[1:, 6:])
    assert abs(together[1] - alone[0]).max() < 1e-5 * alone.std()
