"""A part of the generators of metadata.py; `make fuzz` runs them whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from diffbit import DiffbitError, models
from diffbit.models import Checkpoint

from ..models.test_gguf import FFN, HEADS, HIDDEN, KV, LAYERS, VOCABULARY, WIDTH, write
from .metadata import ABSENT, GGUF_FORMULAS, GGUF_YARN, KINDS, ROPES, YARN, Case, check, check_gguf, outcome, sample

EQUAL = (
    Case("mistral", "layer_types", KINDS),
    Case("mistral", "layer_types", None),
    Case("qwen3", "layer_types", KINDS),
    Case("llama", "is_causal", True),
    Case("llama", "embedding_multiplier", 1),
    Case("granite", "residual_multiplier", 2.0),
    Case("gemma3_text", "rope_scaling", {"rope_type": "linear", "factor": 3.0}),
    Case("deepseek_v3", "rope_parameters", ROPES[1]),  # of type default, with what is left of yarn
    Case("deepseek_v3", "rope_parameters", YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}),
    Case("deepseek_v3", "q_lora_rank", None),
    Case("bitnet", "rope_theta", ABSENT),
    Case("phi3", "rope_scaling", {"type": "longrope", "short_factor": [1.5, 2.0, 1.0, 1.0], "long_factor": [2.0] * 4}),
    Case("phi3", "partial_rotary_factor", 0.5),
    Case("smollm3", "no_rope_layers", ABSENT),
    Case("smollm3", "layer_types", KINDS),
    Case("lfm2", "layer_types", None),
    Case("lfm2", "block_ffn_dim_multiplier", 0.5),
    Case("lfm2", "conv_bias", True),
    Case("smollm3", "num_key_value_heads", ABSENT),
)
REFUSED = (
    *(
        Case(family, "is_causal", value)
        for family in ("llama", "mistral", "qwen2", "qwen3", "olmo2")
        for value in (False, None)
    ),
    Case("llama", "text_config", {"is_causal": False}),
    Case("gemma3_text", "use_bidirectional_attention", True),
    Case("gemma3_text", "final_logit_softcapping", 30.0),
    Case("llama", "final_logit_softcapping", 30.0),
    Case("llama", "layer_types", KINDS),
    Case("llama", "sliding_window", 3),
    Case("llama", "logits_scaling", 2.0),
    Case("llama", "per_layer_config", {"0": {"sliding_window": 3}}),
    Case("qwen2", "partial_rotary_factor", 0.5),
    Case("qwen3", "rope_parameters", {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}),
    Case("gemma3_text", "rope_parameters", YARN),
    Case("gemma3_text", "rope_scaling", {"type": "linear", "factor": 3.0}),
    Case("qwen2", "rope_parameters", {"rope_type": "dynamic", "factor": 3.0, "alpha": 1000.0}),
    Case("deepseek_v2", "rope_interleave", False),
    Case("phi3", "rope_parameters", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
    Case("phi3", "partial_rotary_factor", 0.4),
    Case("smollm3", "no_rope_layers", [1, 0]),
    Case("smollm3", "use_rope", False),
    Case("lfm2", "layer_types", KINDS),
    Case("lfm2", "hidden_act", "gelu"),
)


@pytest.mark.parametrize("case", EQUAL, ids=str)
def test_a_field_is_computed_as_transformers_does(case: Case, tmp_path: Path) -> None:
    assert outcome(case, tmp_path) == "equal"


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_a_field_is_refused_by_name(case: Case) -> None:
    with pytest.raises(DiffbitError, match=f"{case.field}|rotary embedding differs by layer"):
        models.families.read_config(case.config())


def test_any_field_of_any_family() -> None:
    counts, wrong = check(sample(40))
    assert not wrong
    assert counts["equal"] > 10 and counts["refused"] > 3


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return models.load(write(tmp_path_factory.mktemp("plain") / "m.gguf")).state_dict()


@pytest.mark.parametrize("name", GGUF_FORMULAS)
def test_a_key_of_gguf_is_computed_as_llama_cpp_does(
    name: str, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    keys, rope = GGUF_FORMULAS[name]
    file = write(tmp_path / "m.gguf", others={f"llama.{key}": value for key, value in keys.items()})
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, head_dim=WIDTH,
        num_attention_heads=HEADS, num_key_value_heads=KV, max_position_embeddings=64, rms_norm_eps=1e-5,
        tie_word_embeddings=True, rope_parameters={"rope_theta": 500.0, **rope},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(weights, strict=False)
    ids = torch.arange(60)[None] * 37 % VOCABULARY
    with torch.no_grad():
        torch.testing.assert_close(models.load(file)(ids), model(ids).logits, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5}, "attn_factor is 0.5"),
        (GGUF_YARN | {"rope.scaling.yarn_ext_factor": 0.5}, "llama.rope.scaling.yarn_ext_factor is 0.5"),
        (GGUF_YARN | {"rope.scaling.yarn_log_multiplier": 1.0}, "llama.rope.scaling.yarn_log_multiplier is 1.0"),
        ({"attention.causal": False}, "llama.attention.causal is False"),
        ({"attention.scale": 0.5}, "llama.attention.scale is 0.5"),
        ({"final_logit_softcapping": 30.0}, "llama.final_logit_softcapping is 30.0"),
        ({"rope.dimension_sections": [8, 8]}, r"llama.rope.dimension_sections is \[8, 8\]"),
        ({"expert_used_count": 2}, "llama.expert_used_count is 2"),
    ],
)  # fmt: skip
def test_a_key_of_gguf_is_refused(keys: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(DiffbitError, match=word):
        Checkpoint(write(tmp_path / "m.gguf", others={f"llama.{key}": value for key, value in keys.items()}))


def test_unknown_keys_of_gguf_are_refused_by_name(tmp_path: Path) -> None:
    assert not check_gguf(25, 1, tmp_path)
