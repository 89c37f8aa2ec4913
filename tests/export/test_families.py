"""Every Hugging Face family from transformers' own folder to an artifact, float and in low bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffbit.export import export_artifact, reference_model
from diffbit.runtime import Session, verify

from ..models.helpers import LINEAR, VOCABULARY, YARN, hf_model, saved
from .helpers import relative_error, write_quantized, write_tokenizer

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR}),
    "mistral": ("mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24, "hidden_size": 40, "intermediate_size": 72}),
    "diffllama": ("diffllama", {"attention_bias": True, "rope_parameters": YARN}),
    "bitnet": ("bitnet", {"attention_bias": True, "head_dim": 4, "bos_token_id": 1, "eos_token_id": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_from_transformers_folder_to_tokens(case: str, tmp_path: Path) -> None:
    """A batch padded on the left, then a step; the float artifact against transformers, the quantized one against the
    reference, each with the native library and without."""
    kind, changes = CASES[case]
    model = hf_model(kind, num_hidden_layers=2, **changes)
    folder = saved(model, tmp_path / "float")
    write_tokenizer(folder, VOCABULARY)
    ids = torch.randint(0, VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    quantized = write_quantized(folder, "int4_g32")
    with torch.inference_mode():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        float_logits = model(ids, attention_mask=mask, position_ids=positions).logits[:, -2:]
        low_logits = reference_model(quantized)(ids, attention_mask=mask)[:, -2:]
    # of float logits their last bits, of quantized ones now and then the next int8 step of an activation
    for source, wanted, bound in ((folder, float_logits, 1e-4), (quantized, low_logits, 0.1)):
        artifact = export_artifact(source, source.with_name(f"{source.name}-onnx"))
        assert verify(artifact).passed
        for native in (False, True):
            session = Session(artifact, threads=1, native=native)
            assert session.native == native
            found = [session.prefill(ids[:, :-1].numpy(), mask[:, :-1].numpy()), session.step(ids[:, -1:].numpy())]
            assert relative_error(np.stack(found, 1), wanted).max() < bound, (source.name, native)
    assert verify(export_artifact(folder, tmp_path / "half", dtype="fp16")).passed
