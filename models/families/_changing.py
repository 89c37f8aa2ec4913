"""Fields of config.json that change what a model computes: a family reads one, or it has a value that changes nothing,
or the folder is refused.

A config.json also holds much that changes nothing (names, dropout, settings of training and of other programs), so not
every unknown field can be refused. `CHANGING` lists the names that change a function in some family of transformers, as
patterns, so that a newer spelling of the same thing is refused, too. `Family.reads` has those that a family computes or
refuses itself. transformers ignores some of them in some families; such a folder is refused, for the field says that
its author wanted another function.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...io.errors import DiffbitError
from ...io.fields import shown

FULL = "full_attention"
OFF = (False, 0, "", "none")
UNIT = (1,)
# (pattern of the names, values that change nothing). The first pattern that matches counts. null, [] and {}
# change nothing, except null in the place of true; a list does so if its entries do.
CHANGING = tuple(
    (re.compile(pattern), neutral)
    for pattern, neutral in (
        (r"is_causal|causal|causal_attention|use_causal_mask", (True,)),
        (r".*bidirectional.*|non_causal|prefix_lm", OFF),
        (r"layer_types|layers_block_type", (FULL, "attention", "full")),
        (r"attn_type_list|attention_layers|attention_types", ("global",)),
        (r"per_layer_config|block_configs", OFF),
        (r".*soft_?cap.*", OFF),
        (r"(?!ffn_|ffn_dim_).*_multipliers?", UNIT),
        (
            r"logits?_scal(e|ing)|scale_(emb|depth|attn.*|qk.*)|.*(embed|embedding|embeddings|residual)_scal(e|ing)",
            UNIT,
        ),
        (r"attn?(ention)?_scal(e|ing)|attention_(out_|output_|value_)scale|attention_value_scale", UNIT),
        (r"query_pre_attn_scalar", OFF),
        (r".*(attn|attention)_temperature.*|floor_scale|attn_scale|llama_4_scaling_beta", OFF),
        (r"normalize_embedding|scale_embeddings?|embedding_norm.*|normalize_attention_scores", OFF),
        (r"clip_qkv|.*clamp.*|swiglu_limit|swiglu_alpha|activation_clip", OFF),
        (r".*(qk|query_key|q_k|query|key)_?(layer)?_?norm.*", OFF),
        (r".*alibi.*", OFF),
        (r"position_embedding_type", ("rope", "rotary", "absolute", "default")),
        (r"moe|(no_rope|nope)_.*|.*_nope_.*", OFF),
        (r"(use|apply|with)_(rope|rotary.*)|rotary", (True,)),
        (r".*rotary.*|.*(^|_)rope(?!.*fus)(_.*|$)|partial_rotary_factor|original_max_position_embeddings", (*OFF, 1)),
        (r".*(use_)?parallel_(residual|attn|attention)", OFF),
        (r".*sliding_window.*|.*(attention|attn|window)_chunk.*|attention_window.*|.*local_attention.*", OFF),
        (r"(add_|use_|enable_)?attn?(ention)?_sinks?.*|attention_gate|attn_output_gate|.*gated_attention", OFF),
        (r".*experts?(_.*|$)|moe_.*|.*_moe|.*_moe_.*", (*OFF, 1)),
        (r".*altup.*|.*laurel.*|num_kv_shared_layers|.*cross_layer.*|kv_sharing.*", OFF),
        (r"use_mup|mup_.*", (*OFF, 1)),
    )
)
NESTED = re.compile(r"is_causal|.*bidirectional.*")  # also in an object of config.json, such as a text_config
APART = ("quantization_config", "quantization")  # objects of other readers


def check_fields(values: Mapping[str, Any], reads: frozenset[str]) -> None:
    """Raise DiffbitError for a field that changes the function, is not in `reads` and has no neutral value."""
    for name, value in values.items():
        if name not in reads and not (name == "sliding_window" and _is_unused(value, values)):
            _check(name, name, value)
        if name not in APART:
            for place, inner, part in _inner(name, value):
                if NESTED.fullmatch(inner):
                    _check(place, inner, part)


def _is_unused(window: Any, values: Mapping[str, Any]) -> bool:
    """Whether a sliding window is switched off, or as long as the context."""
    length = values.get("max_position_embeddings")
    is_long = isinstance(window, int) and isinstance(length, int) and window >= length
    return is_long or values.get("use_sliding_window") is False


def _check(place: str, name: str, value: Any) -> None:
    neutral = next((neutral for pattern, neutral in CHANGING if pattern.fullmatch(name)), None)
    if neutral is None or (value is None and neutral != (True,)):  # null is_causal is false to transformers
        return
    parts = value if isinstance(value, list) else [value]
    if value != {} and not all(
        (part is None and part is not value) or any(_same(part, other) for other in neutral) for part in parts
    ):
        expected = "none" if neutral[0] is False else shown(neutral[0])
        raise DiffbitError(
            f"{place} is {shown(value)}, wanted {expected}: another value changes what the model computes, and diffbit "
            "does not support it in this family"
        )


def _same(value: Any, other: Any) -> bool:
    """Whether they are equal, and both or neither are true or false."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _inner(place: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (place, name, value) of the fields of objects inside `value`."""
    waiting = [(place, value)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, Mapping):
            for name, part in value.items():
                yield f"{place}.{name}", str(name), part
                waiting.append((f"{place}.{name}", part))
