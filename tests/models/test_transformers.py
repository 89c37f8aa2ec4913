"""Our models against Hugging Face's transformers: same folder, same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diffbit import DiffbitError, models

from .helpers import DYNAMIC, HF, LINEAR, LLAMA3, LONGROPE, YARN, hf_model, saved, tokens

CLOSE = {"rtol": 0.0, "atol": 1e-5}
KINDS = sorted(HF)
WRITTEN = sorted(set(HF) - {"granite", "gemma3_text", "olmo2", "phi3", "smollm3", "lfm2"})  # the others are read only


def reopened(kind: str, folder: Path, dtype: torch.dtype) -> Any:
    """The folder as transformers reads it. (A `.to(bfloat16)` of a live model would round its rotary table, too.)"""
    return HF[kind][1].from_pretrained(folder, dtype=dtype)


FACTORS = {
    "embedding_multiplier": 3.7, "attention_multiplier": 0.21, "residual_multiplier": 0.6, "logits_scaling": 0.45,
}  # fmt: skip
GEMMA = {
    "sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 11,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 31.0},
    },
}  # fmt: skip
PHI3 = {
    "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5}, "original_max_position_embeddings": 32,
    "tie_word_embeddings": True, "sliding_window": 12,
}  # fmt: skip
PHI3_HEADS = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
SMOLLM3 = {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 5}
SHAPES = {
    "gqa1": {"num_key_value_heads": 8},
    "gqa4": {"num_key_value_heads": 2},
    "tied": {"tie_word_embeddings": True},
    "narrow-heads": {"head_dim": 4, "rms_norm_eps": 1e-3},
    "llama3-rope": {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
    "silu": {"hidden_act": "silu"},
    "relu2": {"hidden_act": "relu2"},
}
CASES = [(kind, shape, changes) for kind in ("llama", "diffllama", "bitnet") for shape, changes in SHAPES.items()]
CASES += [
    ("llama", "linear-rope", {"rope_parameters": LINEAR}),
    ("llama", "dynamic-rope", {"rope_parameters": DYNAMIC}),
    ("llama", "yarn", {"rope_parameters": YARN}),
    ("llama", "yarn-mscale", {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5, "beta_fast": 8}}),
    ("diffllama", "yarn-attention", {"rope_parameters": YARN | {"attention_factor": 1.7, "truncate": False}}),
    ("qwen2", "yarn", {"rope_parameters": YARN, "num_key_value_heads": 2}),
    ("llama", "biases", {"attention_bias": True, "mlp_bias": True}),
    ("llama", "mlp-bias", {"mlp_bias": True, "tie_word_embeddings": True}),
    ("diffllama", "biases", {"attention_bias": True}),
    ("bitnet", "biases", {"attention_bias": True}),
    ("mistral", "full", {"sliding_window": None, "num_key_value_heads": 1}),
    ("mistral", "long-window", {"sliding_window": 64, "head_dim": 6}),
    ("qwen2", "tied", {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 8}),
    ("qwen2", "no-layer-slides", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    ("mistral", "window", {"sliding_window": 5}),
    ("qwen2", "a-layer-slides", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen3", "wide-heads", {"head_dim": 16, "rms_norm_eps": 1e-3}),
    ("granite", "factors", FACTORS),
    ("granite", "tied", FACTORS | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("gemma3_text", "windows", GEMMA),
    ("gemma3_text", "untied", GEMMA | {"tie_word_embeddings": False, "num_key_value_heads": 1, "hidden_size": 48}),
    (
        "gemma3_text",
        "old-names",
        GEMMA | {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    ("olmo2", "grouped", {"num_key_value_heads": 2, "rms_norm_eps": 1e-3}),
    ("olmo2", "tied", {"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": LINEAR}),
    (
        "phi3",
        "partial",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5}},
    ),
    (
        "phi3",
        "longrope",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 32,
            "sliding_window": 5,
            "num_attention_heads": 4,
        },
    ),
    ("phi3", "both", PHI3 | PHI3_HEADS),
    ("smollm3", "intervals", {"no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True}),
    ("smollm3", "windows", SMOLLM3),
    (
        "smollm3",
        "untied",
        SMOLLM3
        | {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": YARN,
            "tie_word_embeddings": False,
        },
    ),
    ("lfm2", "attention-first", {"layer_types": None, "full_attn_idxs": [0], "conv_L_cache": 4}),
    ("lfm2", "old-names", {"block_ff_dim": 60, "block_multiple_of": 8, "tie_embedding": False}),
    ("lfm2", "as-wide-as-it-says", {"block_auto_adjust_ff_dim": False, "rope_parameters": YARN, "norm_eps": 1e-3}),
    ("qwen3", "biases", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 8}),
]


@pytest.mark.parametrize(
    ("kind", "changes"), [pytest.param(kind, changes, id=f"{kind}-{name}") for kind, name, changes in CASES]
)
def test_logits_are_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Of one token, of several, and of a batch padded on the left."""
    model = hf_model(kind, **changes)
    ours = models.load(saved(model, tmp_path / "m"))
    for ids in (tokens(2, 1), tokens(2, 13)):
        logits = model(ids).logits
        assert logits.std() > 0.3  # a model whose logits are all alike would prove nothing
        close = {"rtol": 0.0, "atol": 1e-5 * max(1.0, float(logits.std()))}
        torch.testing.assert_close(ours(ids), logits, **close)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    theirs = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    torch.testing.assert_close(ours(ids, attention_mask=mask)[mask == 1], theirs[mask == 1], **close)


@pytest.mark.parametrize("rope", [LLAMA3, LINEAR, YARN], ids=["llama3", "linear", "yarn"])
def test_rope_scaling_changes_the_logits(rope: dict[str, Any]) -> None:
    """The cases above are tests only if the scaling matters at that length."""
    plain, scaled = hf_model("llama"), hf_model("llama", rope_parameters=rope | {"rope_theta": 10000.0})
    assert (plain(tokens(1, 13)).logits - scaled(tokens(1, 13)).logits).abs().max() > 1e-2


def test_longrope_beyond_its_original_context_is_refused(tmp_path: Path) -> None:
    """Where transformers takes the other list of factors."""
    ours = models.load(saved(hf_model("phi3", **PHI3, **PHI3_HEADS), tmp_path / "m"))
    assert ours.config.max_position == 32
    assert ours(tokens(1, 32)).isfinite().all()
    with pytest.raises(DiffbitError, match="33 tokens are more than 32"):
        ours(tokens(1, 33))


@pytest.mark.parametrize("kind", KINDS)
def test_cached_logits_are_transformers(kind: str, tmp_path: Path) -> None:
    """All at once, token by token, in chunks."""
    model = hf_model(kind)
    ours = models.load(saved(model, tmp_path / "m"))
    for pieces in ([13], [1] * 9, [5, 1, 1, 3, 1]):
        ids = tokens(2, sum(pieces))
        cache = models.KVCache(ours.config, batch=2, capacity=ids.shape[1])
        past = None
        for piece in ids.split(pieces, dim=1):
            theirs = model(piece, past_key_values=past, use_cache=True)
            past = theirs.past_key_values
            torch.testing.assert_close(ours(piece, cache=cache), theirs.logits, **CLOSE)
        assert cache.length == ids.shape[1]


@pytest.mark.parametrize("kind", KINDS)
def test_left_padded_batches_are_transformers(kind: str, tmp_path: Path) -> None:
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
@pytest.mark.parametrize(
    ("dtype", "shard"), [(torch.float32, "20KB"), (torch.bfloat16, "1GB"), (torch.float16, "20KB")]
)
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


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.float32, {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}}),
        (torch.float32, {"rope_parameters": DYNAMIC}),
        (torch.bfloat16, {"rope_parameters": YARN, "tie_word_embeddings": True}),
    ],
    ids=["llama3", "dynamic", "yarn-tied-bfloat16"],
)
def test_transformers_reads_what_we_write(
    kind: str, dtype: torch.dtype, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = hf_model(kind, bos_token_id=3, eos_token_id=[4, 5], pad_token_id=6, **changes)
    ours = models.load(saved(model, tmp_path / "m"))
    models.save(ours, tmp_path / "copy", dtype=dtype)
    written = "llama" if kind == "mistral" else kind
    again, report = HF[written][1].from_pretrained(tmp_path / "copy", dtype="auto", output_loading_info=True)
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
        "max_position_embeddings",
    ):
        assert getattr(again.config, name, None) == getattr(model.config, name, None), name
    rope = again.config.rope_parameters
    assert {name: rope[name] for name in model.config.rope_parameters} == model.config.rope_parameters
    ids = tokens(2, 9)
    for name, parameter in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter.to(dtype)), name
    expected = models.load(tmp_path / "copy")(ids)
    torch.testing.assert_close(reopened(written, tmp_path / "copy", torch.float32)(ids).logits, expected, **CLOSE)
