"""The decoder: embedding, layers (a mixer and an MLP, with a norm before each), final norm and head.

    x = x + mixer(norm(x));   x = x + mlp(norm(x));   logits = norm(x) W_head^T

or x = mlp(norm(x)), for an MLP whose output replaces x (MLPOptions.residual).

Parameter names are those of Hugging Face's llama. A model can be run whole (`Decoder.forward`) or a layer at a time
(`embed`, each `Block`, `head`, with `rope_for` and `causal_mask`), which is how a large one is streamed through memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..io.errors import DiffbitError
from .config import ModelConfig
from .graph import Cache, Graph
from .layers.masks import causal_mask, default_positions
from .layers.rope import Rope, RopeScaling, inverse_frequencies
from .layers.state import Carried
from .mixers import Mixer, Place
from .torch_cache import KVCache

INIT_STD = 0.02


def rope_for(config: ModelConfig, position_ids: Tensor) -> Rope:
    """Return RoPE's cos and sin at `position_ids` (any shape), scaling included: fp32 [*position_ids.shape, d/2].

    If layers have `local_rope`, two more follow: cos and sin of local_rope_theta, without scaling. Raises DiffbitError
    for a position behind the scaling's longest sequence.
    """
    longest = None if config.rope_scaling is None else config.rope_scaling.longest
    if longest is not None and (length := int(position_ids.max()) + 1) > longest:
        raise DiffbitError(
            f"{length} tokens are more than {longest}, the model's original_max_position_embeddings: behind it all "
            "angles are others (long_factor), which diffbit does not compute; shorten the text"
        )

    def table(theta: float, scaling: RopeScaling | None) -> Rope:
        frequencies = inverse_frequencies(config.rope_width, theta, scaling, position_ids.device)
        angles = position_ids[..., None].float() * frequencies
        amplitude = 1.0 if scaling is None else torch.where(frequencies > 0, scaling.amplitude, 1.0)  # of what rotates
        return angles.cos() * amplitude, angles.sin() * amplitude

    local = () if config.local_rope_theta is None else table(config.local_rope_theta, None)
    return *table(config.rope_theta, config.rope_scaling), *local


def rope_tables(config: ModelConfig, length: int) -> Rope:
    """Return RoPE's cos and sin at positions 0..length-1: fp32 [length, d/2]."""
    return rope_for(config, torch.arange(length))


class Block(nn.Module):
    """One layer. forward(x [B, S, E], rope, mask, state, carried, replay) -> [B, S, E].

    `forward` and `onnx` are the same walk. A norm that the layer does not have (LayerSpec.norms) is an nn.Identity.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        layer = config.layers[index]
        eps = config.norm_eps if layer.sub_norms else None
        place = Place(index, config.hidden_size, eps, gives=index in config.last_readers)
        before, after = layer.norms != "after", layer.norms != "before"
        self.input_layernorm = config.new_norm() if before else nn.Identity()
        self.self_attn = layer.mixer.module(place)
        self.mixer_output_norm = config.new_norm() if after else nn.Identity()
        self.post_attention_layernorm = config.new_norm() if before else nn.Identity()
        self.mlp, self.residual = layer.mlp.module(place), layer.mlp.residual
        self.mlp_output_norm = config.new_norm() if after else nn.Identity()

    def forward(self, x: Tensor, rope: Rope, *where: Any, **options: Any) -> Tensor:
        """x [B, S, E] -> [B, S, E]; the other arguments are the mixer's."""
        x = x + self.mixer_output_norm(self.self_attn(self.input_layernorm(x), rope, *where, **options))
        out = self.mlp_output_norm(self.mlp(self.post_attention_layernorm(x)))
        return x + out if self.residual else out

    def onnx(self, g: Graph, past: Cache) -> Cache:
        """Add `forward` as ONNX nodes; returns the cache with the new tokens."""
        x = g.residual(self.input_layernorm, "input_layernorm")
        with g.scope("self_attn"):
            x, present = self.self_attn.onnx(g, x, past)
        g.add_residual(g.norm(x, self.mixer_output_norm, "mixer_output_norm"))
        x = g.residual(self.post_attention_layernorm, "post_attention_layernorm")
        with g.scope("mlp"):
            x = self.mlp.onnx(g, x)
        x = g.norm(x, self.mlp_output_norm, "mlp_output_norm")
        g.add_residual(x) if self.residual else g.set_residual(x)
        return present


def check_layer(config: ModelConfig, index: int, tensors: Mapping[str, Tensor]) -> None:
    """Raise DiffbitError if a number computed from a layer's float weights, such as lambda, is infinite or NaN.

    tensors: by their names in the layer.
    """
    with torch.device("meta"):
        block = Block(config, index)
    block.load_state_dict(tensors, assign=True)
    check_derived(block)


def check_derived(module: nn.Module) -> None:
    """Raise DiffbitError, with the layer's name, if a number computed from its weights is infinite or NaN."""
    for part in module.modules():
        if isinstance(part, Mixer):
            for what, value in part.derived().items():
                if not value.isfinite().all():
                    raise DiffbitError(
                        f"model.layers.{part.layer_index}.self_attn: {what}, computed from its weights, is "
                        f"{value.flatten()[0].item()}; the checkpoint is damaged"
                    )


class Body(nn.Module):
    """Everything except the head; a module of its own for the prefix "model." in parameter names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        empty = torch.empty(config.vocab_size, config.hidden_size)  # Decoder fills it
        self.embed_tokens = nn.Embedding.from_pretrained(empty, freeze=False)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_layers))
        self.norm = config.new_norm()


class Decoder(nn.Module):
    """A language model. Initial weights are N(0, 0.02), lambda vectors N(0, 0.1), biases 0, from torch's generator."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head: nn.Module | None = (
            None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        for module in self.modules():
            # On the meta device only shapes matter, and the first normal_() there imports torch's compiler (1 s).
            if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
                nn.init.normal_(module.weight, 0.0, INIT_STD)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids [B, S] -> hidden states [B, S, E]."""
        return self.model.embed_tokens(input_ids)

    def head(self, x: Tensor) -> Tensor:
        """Hidden states [B, S, E] -> logits [B, S, V], the final norm included."""
        x = self.model.norm(x)
        return F.linear(x, self.model.embed_tokens.weight) if self.lm_head is None else self.lm_head(x)

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        """input_ids [B, S] -> logits [B, S, V]: `head` of `hidden`, whose options it takes."""
        return self.head(self.hidden(input_ids, **options))

    def hidden(
        self,
        input_ids: Tensor,
        *,
        cache: KVCache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """input_ids [B, S] -> hidden states after the last layer, before the final norm [B, S, E].

        attention_mask [B, T], T = cached + S: 1 = real token, 0 = padding, in any arrangement. position_ids [B, S]:
        by default real tokens are counted from 0. Tokens are appended to `cache`, if given.
        """
        batch, length = input_ids.shape
        past = 0 if cache is None else cache.length
        if position_ids is None:
            position_ids = default_positions(batch, length, past, attention_mask, input_ids.device)
        rope = rope_for(self.config, position_ids)
        mask = causal_mask(length, past, attention_mask, input_ids.device)
        x = self.embed(input_ids)
        carried: Carried = {}
        for index, layer in enumerate(self.model.layers):
            x = layer(x, rope, mask, None if cache is None else cache.layers[index], carried)
        if cache is not None:
            cache.length = past + length
        return x


def num_parameters(config: ModelConfig) -> int:
    """Count the parameters of a model, tied ones once, without allocating them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(config).parameters())
