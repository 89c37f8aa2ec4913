"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): all keys and values from one small latent.

    c_q = norm(W_qa x);          [q_h | q'_h] = W_qb c_q                    for each head h
    (c, p) = W_kva x;            c = norm(c);  p = RoPE(p)                  one for all heads
    [k_g | v_g] = W_kvb c                                                   for each kv head g = h // (H/KV)
    o_h = softmax((q_h k_g^T + RoPE(q'_h) p^T) / sqrt(d + d')) v_g

q and k are head_dim = d wide, their rotated parts rope_head_dim = d', values value_head_dim. The cache holds c, of
width latent_rank, and p. Artifacts never expand it: W_kvb's part for keys is multiplied into the query, its part for
values into the mixture of latents (_latents.py). Torch expands it, which is the same function, unless the
cache is low-bit. In a scheme p has the format of keys and c, which is keys and values, that of values.

W_kvb stays float, because both of its parts are batched products. query_rank 0: no W_qa; q_proj reads x.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor, nn

from ...io.errors import DiffbitError
from ...io.fields import OMITTED, Count, Positive, bounds
from ..graph import Heads
from ..layers import Arithmetic, RMSNorm
from ..layers.state import LayerCache
from ..mixers import Buffer, Cache, Carried, Graph, KVBuffers, Operations, Place, Rope, State, Value
from ._attention import Attention, AttentionOptions
from ._latents import latent_attention


@dataclass(frozen=True)
class Options(AttentionOptions):
    """qkv_bias: of the projections of x; query_bias: also of q_proj, if there is no W_qa. The others are in this file's
    docstring."""

    rope_head_dim: Annotated[int, bounds(2, 1 << 14)] = field(kw_only=True)
    value_head_dim: Count = field(kw_only=True)
    latent_rank: Count = field(kw_only=True)
    query_rank: Annotated[int, bounds(0, 1 << 20)] = field(kw_only=True)
    latent_norm_eps: Positive = field(default=1e-6, kw_only=True)
    query_bias: bool = field(default=True, kw_only=True, metadata=OMITTED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_head_dim % 2:
            raise DiffbitError(f"rope_head_dim is {self.rope_head_dim}, wanted an even number")
        for name in ("qk_norm_eps", "keys_of"):
            if getattr(self, name):
                raise DiffbitError(
                    f"{name} is {getattr(self, name)}, wanted none: {self.name} has no such norm or layer"
                )
        if not self.rope:
            raise DiffbitError(f"rope is false, wanted true: {self.name} rotates a part of its keys")

    def module(self, place: Place) -> LatentAttention:
        return LatentAttention(self, place)

    @staticmethod
    def equal_heads(pairs: int) -> tuple[int, int]:
        return 2 * pairs, 2 * pairs

    @staticmethod
    def equal_sizes(pairs: int, head_dim: int) -> dict[str, int]:
        """Return the other sizes of a model equal to diff_v1 with `pairs` pairs of heads, head_dim wide.

        With E = 2 pairs head_dim, weights of q_a + q_b + kv_a + kv_b + o are E times

        query_rank + 2 query_rank + (latent_rank + d) + 2 latent_rank + E = 4 E
        """
        hidden = 2 * pairs * head_dim
        query_rank = 8 * round((hidden / 2 - head_dim / 3) / 8)
        sizes = {"rope_head_dim": head_dim, "value_head_dim": head_dim}
        return sizes | {"latent_rank": hidden // 2, "query_rank": query_rank}

    @property
    def query_width(self) -> int:
        return self.head_dim + self.rope_head_dim

    @property
    def query_rows(self) -> int:
        return self.softmaxes * self.query_width

    @property
    def rows(self) -> dict[str, int]:
        queries = {"q_a_proj": self.query_rank} if self.query_rank else {"q_proj": self.query_rows}
        return queries | {"kv_a_proj": self.latent_rank + self.rope_head_dim}

    @property
    def softmaxes(self) -> int:
        return self.num_heads

    @property
    def width(self) -> int:
        return self.num_heads * self.value_head_dim

    @property
    def cache_heads(self) -> int:
        return 1

    @property
    def rope_width(self) -> int:
        return self.rope_head_dim

    @property
    def inner(self) -> tuple[str, ...]:
        return ("kv_b_proj", "q_b_proj") if self.query_rank else ("kv_b_proj",)

    @property
    def float_linears(self) -> tuple[str, ...]:
        return ("kv_b_proj",)

    @property
    def carried(self) -> tuple[tuple[int | str, ...], ...]:
        return ()

    def buffers(self, kv: KVBuffers) -> tuple[Buffer, ...]:
        """Return the buffers of a head of keys, named key, and of one of values, named latent."""
        widths = {"key": self.rope_head_dim, "value": self.latent_rank}
        return tuple(
            replace(buffer, name=buffer.name.replace("value", "latent"), in_place="never")
            for part, width in widths.items()
            for buffer in kv(1, width, "never", self.sliding_window)
            if buffer.name.startswith(part)
        )

    def operations(self, context: int, low_bit: bool) -> Operations:
        """As in artifacts. The products of W_kvb's parts with more heads than it has are counted as matrix products."""
        seen, more = self.seen(context), self.num_heads - self.num_kv_heads
        absorbed = (
            (self.softmaxes - self.num_kv_heads) * self.head_dim + more * self.value_head_dim
        ) * self.latent_rank
        logits = self.softmaxes * (self.latent_rank + self.rope_head_dim) * seen
        rotated = (self.softmaxes + 1) * self.rope_head_dim
        matrix = self.num_heads * self.latent_rank * seen + absorbed
        return Operations(logits, matrix, 2 * self.softmaxes * seen + 2 * rotated)

    def state(self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str) -> LayerCache:
        widths = self.rope_head_dim, self.latent_rank
        return LayerCache(*(torch.zeros(batch, 1, capacity, width, dtype=dtype, device=device) for width in widths))


class LatentAttention(Attention):
    q_a_proj: nn.Module
    kv_a_proj: nn.Module

    def __init__(self, options: Options, place: Place) -> None:
        rank, latent = options.query_rank, options.latent_rank
        super().__init__(options, place)
        self.options = options
        if not (rank or options.query_bias):
            self.q_proj = nn.Linear(place.hidden_size, options.query_rows, bias=False)
        if rank:
            self.q_a_layernorm = RMSNorm(rank, options.latent_norm_eps)
            self.q_b_proj = nn.Linear(rank, options.query_rows, bias=False)
        self.kv_a_layernorm = RMSNorm(latent, options.latent_norm_eps)
        kv_rows = options.num_kv_heads * (options.head_dim + options.value_head_dim)
        self.kv_b_proj = nn.Linear(latent, kv_rows, bias=False)
        self.scale = options.query_width**-0.5
        self.cached_width = latent

    def _kv_parts(self) -> tuple[Tensor, Tensor]:
        """W_kvb's parts for keys [KV, d, r] and for values [KV, r, e]."""
        if not isinstance(self.kv_b_proj, nn.Linear):
            raise DiffbitError(
                f"model.layers.{self.layer_index}.self_attn.kv_b_proj is quantized, wanted float: its parts are "
                "multiplied into queries and values; leave it out of the scheme's overrides"
            )
        weight = self.kv_b_proj.weight.unflatten(0, (self.num_kv_heads, -1))
        key, value = weight.split((self.head_dim, self.options.value_head_dim), 1)
        return key, value.transpose(1, 2)

    def heads(self, x: Tensor, rope: Rope, mask: Tensor | None, state: State | None, carried: Carried) -> Tensor:
        options = self.options
        c_q = self.q_a_layernorm(self.q_a_proj(x)) if options.query_rank else x
        query = (self.q_b_proj(c_q) if options.query_rank else self.q_proj(x)).unflatten(-1, (-1, options.query_width))
        query, turned = query.split((self.head_dim, options.rope_head_dim), -1)
        query, turned = query.transpose(1, 2), self._rotated(turned, rope)  # [B, H, S, d], [B, H, S, d']
        latent, key = self.kv_a_proj(x).split((options.latent_rank, options.rope_head_dim), -1)
        latent, key = self.kv_a_layernorm(latent)[:, None], self._rotated(key[:, :, None], rope)
        if state is not None:
            assert isinstance(state, LayerCache)
            key, latent = state.append(key, latent)  # [B, 1, T, d'], [B, 1, T, r]
        if self.explicit:
            of_keys, of_values = self._kv_parts()
            query = self._by_kv_head(query, of_keys)
            (mixed,) = self.branches(torch.cat((query, turned), -1), torch.cat((latent, key), -1), latent, mask)
            out = self._by_kv_head(mixed.to(x.dtype), of_values)
        else:
            expanded = self.kv_b_proj(latent[:, 0]).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
            expanded, value = expanded.split((self.head_dim, options.value_head_dim), -1)
            key = torch.cat((expanded, key.expand(-1, self.num_kv_heads, -1, -1)), -1)
            (out,) = self.branches(torch.cat((query, turned), -1), key, value, mask)
        return self.combined(out, x, c_q).to(x.dtype).transpose(1, 2).flatten(2)

    def _by_kv_head(self, heads: Tensor, weight: Tensor) -> Tensor:
        """Multiply heads [B, H, S, a] by their kv heads' [KV, a, b]."""
        return (heads.unflatten(1, (self.num_kv_heads, -1)) @ weight[:, None]).flatten(1, 2)

    def logits(self, arithmetic: Arithmetic, query: Tensor, key: Tensor, branch: int) -> Tensor:
        """Of absorbed queries and [c | p], which are rounded apart."""
        rank = self.options.latent_rank
        latents = arithmetic.logits(query[..., :rank], key[..., :rank], self.scale, branch, of_values=True)
        return latents + arithmetic.logits(query[..., rank:], key[..., rank:], self.scale, branch)

    def combined(self, heads: Tensor, x: Tensor, c_q: Tensor) -> Tensor:
        """Return the outputs of all heads [B, H, S, e] of those of all softmaxes."""
        return heads

    def onnx_lambda(self, g: Graph, x: Value) -> dict[str, Value]:
        """Add the nodes of lambda, fp32 [B, S, H], if there is one."""
        return {}

    def onnx_gated(self, g: Graph, out: Value, c_q: Value) -> Value:
        """Add what follows the heads' outputs [B, S, H * e]."""
        return out

    def onnx_heads(self, g: Graph, x: Value, past: Cache) -> tuple[Value, Cache]:
        options, kv_heads, c_q = self.options, self.num_kv_heads, x
        name = "q_a_proj" if options.query_rank else "q_proj"
        query, kv = g.linears(x, {name: self.get_submodule(name), "kv_a_proj": self.kv_a_proj})
        if options.query_rank:
            c_q = g.norm(query, self.q_a_layernorm, "q_a_layernorm")
            query = g.linear(c_q, self.q_b_proj, "q_b_proj")
        latent, key = g.ops("Split", [kv, g.const([options.latent_rank, options.rope_head_dim])], 2, axis=-1)
        latent = g.norm(latent, self.kv_a_layernorm, "kv_a_layernorm")

        of_keys, of_values = (part.detach().float().contiguous().numpy() for part in self._kv_parts())
        query = g.op("Reshape", [query, g.const([0, 0, kv_heads, -1, options.query_width])])
        widths = g.const([self.head_dim, options.rope_head_dim])
        query, turned = g.ops("Split", [query, widths], 2, axis=-1)  # [B, S, KV, H/KV, ...]
        query = g.op("Transpose", [query], perm=[0, 2, 3, 1, 4])
        query = g.op("Reshape", [query, g.const([0, kv_heads, -1, self.head_dim])])
        query = g.op("MatMul", [query, g.weight("kv_b_proj.key.weight", of_keys)])  # [B, KV, H/KV * S, r]
        turned = g.op("Reshape", [turned, g.const([0, 0, -1])])
        inputs = {"query": turned, "latent_query": query, "key": key, "latent": latent} | self.onnx_lambda(g, x)
        rope, window = options.rope_head_dim, self.sliding_window
        heads = Heads(self.num_heads, 1, rope, options.noise_ratio, local_rope=self.local_rope, sliding_window=window)
        sizes = options.softmaxes, options.latent_rank
        mixed, present = latent_attention(g, inputs, past, heads, *sizes, self.scale)
        mixed = g.op("Reshape", [mixed, g.const([0, kv_heads, -1, options.latent_rank])])
        out = g.op("MatMul", [mixed, g.weight("kv_b_proj.value.weight", of_values)])
        out = g.op("Reshape", [out, g.const([0, self.num_heads, -1, options.value_head_dim])])
        out = g.op("Reshape", [g.op("Transpose", [out], perm=[0, 2, 1, 3]), g.const([0, 0, -1])])
        return self.onnx_gated(g, out, c_q), present
