"""guygrigsby/diff-mlx (github.com/guygrigsby/diff-mlx, model.py): version 1 and a plain twin, trained from one start.

config.json has the sizes under "model" and no model_type. It is the same for both of the pair: only the differential
one has tensors named lambda. The weights are in latest.safetensors, with those of the optimizer, which are not read.

- Rotary embedding is interleaved, as in the official differential modules (unilm.py).
- Version 1 has sub-heads in adjacent pairs, and a head norm with a weight subln.scale [2d], folded into o_proj.
- The vocabulary is tiktoken's cl100k_base, and every text ends with <|endoftext|>. There is no tokenizer in the folder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...io.fields import Count, Positive, get, located
from ..config import ModelConfig
from ..layers.rope import interleaved
from ._family import Family, Stored, parts
from ._huggingface import HuggingFace, attention_of

FIELDS = {  # of config.json's "model": those that the base family reads
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads_vanilla": "num_attention_heads",
    "qk_head_dim": "head_dim",
    "mlp_intermediate": "intermediate_size",
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
CL100K, END_OF_TEXT = 100_277, 100_257  # size of the vocabulary, and a token of it
NAMES = {
    "model.embed_tokens": "tok_embed",
    "model.norm": "final_norm",
    "input_layernorm": "norm_attn",
    "post_attention_layernorm": "norm_mlp",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
PLAIN, DIFFERENTIAL = HuggingFace("diff-mlx", "softmax"), HuggingFace("diff-mlx", "diff_v1", queries=2, keys=2)


@dataclass(frozen=True)
class DiffMLX(Family):
    base: HuggingFace = PLAIN
    weights = "latest.safetensors"
    quantized = False

    def knows(self, values: Mapping[str, Any]) -> bool:
        model = values.get("model")
        return isinstance(model, dict) and "n_heads_vanilla" in model

    def ignores(self, name: str) -> bool:
        return name.startswith("opt.") or super().ignores(name)

    def opened(self, values: Mapping[str, Any], names: Collection[str]) -> DiffMLX:
        differential = any(name.endswith(".attn.lambda_q1") for name in names)
        return replace(self, base=DIFFERENTIAL if differential else PLAIN)

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        model = values["model"]
        with located("model"):
            fields: dict[str, Any] = {theirs: get(model, ours, Count) for ours, theirs in FIELDS.items()}
            fields["rms_norm_eps"] = get(model, "rms_eps", Positive, 1e-5)
            fields["rope_theta"] = get(model, "rope_base", Positive, 10000.0)
            fields["tie_word_embeddings"] = get(model, "tie_embeddings", bool, True)
            if fields["vocab_size"] == CL100K:
                fields["eos_token_id"] = END_OF_TEXT
        return self.base.read(fields)

    def stored(self, config: ModelConfig, name: str) -> Stored:
        index, module, parameter = parts(name)
        before = "model." if index is None else f"model.blocks.{index}."
        parameter = "scale" if module.endswith("norm") else parameter
        module = NAMES.get(module, module.replace("self_attn", "attn"))
        place = Stored((f"{before}{module}.{parameter}",))
        if module == "attn.o_proj" and self.base is DIFFERENTIAL:
            width = 2 * attention_of(config, name).head_dim
            return replace(place, folded=f"{before}attn.subln.scale", folded_width=width)
        if module not in ("attn.q_proj", "attn.k_proj"):
            return place
        mixer = attention_of(config, name)
        heads = mixer.softmaxes if module == "attn.q_proj" else mixer.cache_heads
        return replace(place, rows=interleaved(heads, mixer.head_dim))


FAMILIES = (DiffMLX(""),)  # no model_type
