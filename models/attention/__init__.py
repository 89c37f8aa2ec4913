"""Attention variants: one file each, found by listing this folder.

A variant's file has MODEL_TYPE (the model_type of its config.json) and a class Attention(nn.Module):

    __init__(config, layer_index)
    forward(x [B, S, E], rope (cos, sin: fp32 [B, S, d/2]), mask, cache) -> [B, S, E]
    q_proj, k_proj, v_proj, o_proj   linears, named as in Hugging Face's models; the name of any other ends in _proj too
    attn_sub_norm   what stands before o_proj: models/norm.py, sub_norm
    out_scale       float: the factor on o_proj's output (1 but for diff_v1)
    logits_hook     None, or a function that sees and may replace the scaled attention logits (softmax.LogitsHook)
    arithmetic      None, or what takes the place of the two matrix products (softmax.Arithmetic)
    lambda_value()  the number subtracted with (fp32 scalar), or None where it depends on the token
    branches(x, rope, mask, cache) -> (signal, noise), fp32 [B, H, S, e]; lambda_of(x), what the second is multiplied by
                    before it is subtracted; refit_lambda(x [T, E], wanted [T, H], weight [T, H]), which moves it (in
                    new parameters) close to what is wanted; norm_eps, where a norm follows: differential variants only
    hf_heads(config) -> (num_attention_heads, num_key_value_heads) of a config.json, and heads_from_hf, its inverse
    equal_heads(pairs) -> (num_heads, num_kv_heads) of a model as large as diff_v1 with that many pairs, for fair twins
    row_order(config) -> {"q_proj": order, ...}: canonical rows = rows on disk[order]; absent where they are the same
    joint_rows(config) -> {"q_proj": R, "k_proj": R, "v_proj": R}: each R neighbouring rows meet in one head, both
                    branches of a pair where they have rows of their own (quantize/methods/joint.py)
    cache_heads(config) -> heads in the KV cache, each head_dim wide
    onnx(g, step, x, past) -> (output, present)  the same as ONNX nodes (export/); past and present hold the layer's
                    cache by its buffers' names; cache_in_place: where one buffer may be bound as both while attention
                    is float, "always" or "native" (runtime/artifact.py, CacheSpec)

Its linears but o_proj read x, which is the normed residual stream, and nothing else of it reads x: methods that run
before rounding put a rotation or scales there (and refuse a layer that then computes something else). If more of its
weights may change so, the file has a function as well:

    symmetries(config) -> Symmetries    what may (models/symmetries.py); absent, and never inherited: nothing

Canonical order: sub-heads in adjacent pairs (2i signal, 2i+1 noise); a 2d-wide value of diff_v1 as two neighbouring
sub-heads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING

from ..layers.symmetries import Symmetries

if TYPE_CHECKING:
    from ..config import ModelConfig


@cache
def variants() -> tuple[str, ...]:
    """Names of the attention variants: the files of this folder."""
    return tuple(sorted(module.name for module in iter_modules(__path__)))


def variant(name: str) -> ModuleType:
    """The module of the variant `name`, one of `variants()`."""
    return import_module(f".{name}", __name__)


def symmetries(config: ModelConfig) -> Symmetries:
    """Those of a model's attention variant; none where its file does not say. A norm behind the heads lets no change
    of the values pass."""
    said = getattr(variant(config.attention), "symmetries", None)
    found = Symmetries() if said is None else said(config)
    return replace(found, value_width=0, value_scales=False) if config.sub_norms else found


def model_type(name: str, sub_norms: bool) -> str:
    """The model_type of a config.json: that of a variant, and another where the model has sub_norms, which no reader
    of the former knows. The plain Transformer's is then Hugging Face's `bitnet`."""
    plain: str = variant(name).MODEL_TYPE
    if not sub_norms:
        return plain
    return "bitnet" if plain == "llama" else f"{plain}_bitnet"


def model_types() -> dict[str, tuple[str, bool]]:
    """{model_type of a config.json: (variant, sub_norms)}."""
    return {model_type(name, norms): (name, norms) for name in variants() for norms in (False, True)}
