"""Our models against Hugging Face's transformers: same folder, same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diffbit import models

from .helpers import HF, LLAMA3, hf_model, saved, tokens

CLOSE = {"rtol": 0.0, "atol": 1e-5}
KINDS = sorted(HF)


def reopened(kind: str, folder: Path, dtype: torch.dtype) -> Any:
    """The folder as transformers reads it. (A `.to(bfloat16)` of a live model would round its rotary table, too.)"""
    return HF[kind][1].from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"num_key_value_heads": 8}, id="gqa1"),
        pytest.param({"num_key_value_heads": 4}, id="gqa2"),
        pytest.param({"num_key_value_heads": 2}, id="gqa4"),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"head_dim": 4, "rms_norm_eps": 1e-3}, id="narrow-heads"),
        pytest.param({"rope_parameters": LLAMA3 | {"rope_theta": 500.0}}, id="llama3-rope"),
        pytest.param({"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}, id="theta"),
        pytest.param({"hidden_act": "silu"}, id="silu"),
        pytest.param({"hidden_act": "relu2"}, id="relu2"),
    ],
)
@pytest.mark.parametrize("length", [1, 13])
def test_logits(kind: str, changes: dict[str, Any], length: int, tmp_path: Path) -> None:
    model = hf_model(kind, **changes)
    ours = models.load(saved(model, tmp_path / "m"))
    ids = tokens(2, length)
    logits = model(ids).logits
    assert logits.std() > 0.3  # a model whose logits are all alike would prove nothing
    torch.testing.assert_close(ours(ids), logits, **CLOSE)


def test_rope_scaling_changes_the_logits() -> None:
    """The llama3 case above is a test only if the scaling matters at that length."""
    plain, scaled = hf_model("llama"), hf_model("llama", rope_parameters=LLAMA3 | {"rope_theta": 10000.0})
    assert (plain(tokens(1, 13)).logits - scaled(tokens(1, 13)).logits).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [[13], [1] * 9, [5, 1, 1, 3, 1]], ids=["prefill", "steps", "chunks"])
def test_cache(kind: str, pieces: list[int], tmp_path: Path) -> None:
    model = hf_model(kind)
    ours = models.load(saved(model, tmp_path / "m"))
    ids = tokens(2, sum(pieces))
    cache = models.KVCache(ours.config, batch=2, capacity=ids.shape[1])
    past = None
    for piece in ids.split(pieces, dim=1):
        theirs = model(piece, past_key_values=past, use_cache=True)
        past = theirs.past_key_values
        torch.testing.assert_close(ours(piece, cache=cache), theirs.logits, **CLOSE)
    assert cache.length == ids.shape[1]


@pytest.mark.parametrize("kind", KINDS)
def test_left_padding(kind: str, tmp_path: Path) -> None:
    """A batch padded on the left: prefill and two steps, real positions only."""
    model = hf_model(kind)
    ours = models.load(saved(model, tmp_path / "m"))
    ids = tokens(2, 11)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = models.KVCache(ours.config, batch=2, capacity=11)
    past = None
    for start, end in ((0, 9), (9, 10), (10, 11)):
        theirs = model(
            ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=past,
            use_cache=True,
        )
        past = theirs.past_key_values
        logits = ours(ids[:, start:end], attention_mask=mask[:, :end], cache=cache)
        real = mask[:, start:end].bool()
        torch.testing.assert_close(logits[real], theirs.logits[real], **CLOSE)
        assert logits.isfinite().all()
    alone = ours(ids[1:, 4:])[0, -1]
    torch.testing.assert_close(logits[1, -1], alone, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_stored_dtypes_and_shards(kind: str, dtype: torch.dtype, shard: str, tmp_path: Path) -> None:
    """Rounded weights read as float32 give the logits of the rounded model in float32."""
    folder = saved(hf_model(kind).to(dtype), tmp_path / "m", max_shard_size=shard)
    assert (folder / "model.safetensors.index.json").exists() == (shard == "20KB")
    assert models.Checkpoint(folder).dtype == str(dtype).removeprefix("torch.")
    ids = tokens(2, 9)
    theirs = reopened(kind, folder, torch.float32)
    torch.testing.assert_close(models.load(folder)(ids), theirs(ids).logits, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_arithmetic(kind: str, tmp_path: Path) -> None:
    """In bfloat16 we are no further from float32 than transformers is (lambda and head norm stay float32 here)."""
    model = hf_model(kind)
    folder = saved(model, tmp_path / "m")
    ids = tokens(2, 13)
    exact = model(ids).logits
    theirs = (reopened(kind, folder, torch.bfloat16)(ids).logits.float() - exact).abs().mean()
    ours = models.load(folder, dtype=torch.bfloat16)
    logits = ours(ids)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - exact).abs().mean() <= 1.2 * theirs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"rope_parameters": LLAMA3}])
def test_transformers_reads_what_we_write(
    kind: str, dtype: torch.dtype, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = hf_model(kind, bos_token_id=3, eos_token_id=[4, 5], pad_token_id=6, **changes)
    ours = models.load(saved(model, tmp_path / "m"))
    models.save(ours, tmp_path / "copy", dtype=dtype)
    again, report = HF[kind][1].from_pretrained(tmp_path / "copy", dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert again.dtype == dtype
    for name in (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "hidden_act",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "rope_parameters",
        "max_position_embeddings",
    ):
        assert getattr(again.config, name) == getattr(model.config, name), name
    ids = tokens(2, 9)
    for name, parameter in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter.to(dtype)), name
    wanted = models.load(tmp_path / "copy")(ids)
    torch.testing.assert_close(reopened(kind, tmp_path / "copy", torch.float32)(ids).logits, wanted, **CLOSE)
