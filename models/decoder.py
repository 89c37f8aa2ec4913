"""The decoder every variant shares: embedding, pre-RMSNorm blocks of attention and gated MLP, RMSNorm, head.

    x = x + attention(norm(x));   x = x + down(act(gate(norm(x))) * up(norm(x)));   logits = norm(x) W_head^T

Parameter names are those of Hugging Face's llama, so a state_dict differs from a checkpoint in the order of rows only.
A model can be run whole (`Decoder.forward`) or piece by piece (`embed`, each `Block`, `head`, with `rope_for` and
`causal_mask`), which is how one layer at a time is streamed through memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import variant
from .cache import KVCache, LayerCache
from .config import ModelConfig
from .layers.masks import causal_mask, default_positions
from .layers.norm import RMSNorm, sub_norm
from .layers.rope import Rope, rope_for

INIT_STD = 0.02


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (arXiv 2109.08668), of BitNet b1.58 2B4T (2504.12285, section 2)."""
    return F.relu(x).square()


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) (arXiv 2002.05202, eq. 6), with a norm before down where the model has sub_norms."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.ffn_sub_norm = sub_norm(config, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = F.silu if config.mlp == "swiglu" else squared_relu

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.ffn_sub_norm(self.act(self.gate_proj(x)) * self.up_proj(x)))


class Block(nn.Module):
    """One layer. forward(x [B, S, E], rope, mask, cache) -> [B, S, E]."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = variant(config.attention).Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Everything below the head; it exists for the prefix "model." of the parameters' names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        empty = torch.empty(config.vocab_size, config.hidden_size)  # Decoder fills it
        self.embed_tokens = nn.Embedding.from_pretrained(empty, freeze=False)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class Decoder(nn.Module):
    """A language model. Fresh weights are N(0, 0.02), fresh lambda vectors N(0, 0.1), from torch's global generator."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for module in self.modules():
            # On the meta device only shapes matter, and the first normal_() there imports torch's compiler: a second.
            if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
                nn.init.normal_(module.weight, 0.0, INIT_STD)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids [B, S] -> hidden states [B, S, E]."""
        return self.model.embed_tokens(input_ids)

    def head(self, x: Tensor) -> Tensor:
        """Hidden states [B, S, E] -> logits [B, S, V], the final norm included."""
        x = self.model.norm(x)
        return F.linear(x, self.model.embed_tokens.weight) if self.lm_head is None else self.lm_head(x)

    def forward(
        self,
        input_ids: Tensor,
        *,
        cache: KVCache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """input_ids [B, S] -> logits [B, S, V].

        attention_mask [B, T], T = cached + S: 1 = real token, 0 = padding, in any arrangement. position_ids [B, S]:
        by default real tokens are counted from 0. Tokens are appended to `cache` where one is given.
        """
        batch, length = input_ids.shape
        past = 0 if cache is None else cache.length
        if position_ids is None:
            position_ids = default_positions(batch, length, past, attention_mask, input_ids.device)
        rope = rope_for(self.config, position_ids)
        mask = causal_mask(length, past, attention_mask, input_ids.device)
        x = self.embed(input_ids)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, rope, mask, None if cache is None else cache.layers[index])
        return self.head(x)


def num_parameters(config: ModelConfig) -> int:
    """Parameters of a model of this shape, tied ones counted once; nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(config).parameters())
