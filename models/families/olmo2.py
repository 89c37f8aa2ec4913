"""AI2's olmo2 (OLMo 2, arXiv 2501.00656): a llama with norms after attention and MLP in place of those before them, and
norms of all queries and all keys of a token; read only."""

from __future__ import annotations

from ._huggingface import HuggingFace

FAMILIES = (
    HuggingFace(
        "olmo2",
        "softmax",
        architecture="Olmo2ForCausalLM",
        norm_eps=1e-5,
        qk_norm=True,
        qk_norm_whole=True,
        norms="after",
        names={"mixer_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"},
    ),
)
