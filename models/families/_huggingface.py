"""Common parts of Hugging Face's config.json files, as transformers reads and writes them (4.49 and later, and 5).

transformers 4 describes rotary embedding by `rope_theta` and `rope_scaling` at the top level, transformers 5 by a
dictionary `rope_parameters`. Both are read; `rope_theta` and `rope_scaling` are written, which both versions accept.
Unsupported settings (other activations, other rotary types) are refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from ...io.errors import DiffbitError
from ...io.fields import Count, Positive, get, located, one_of, read, shown
from ..attention import AttentionOptions
from ..config import MLP, OF_EMBEDDINGS, LayerSpec, ModelConfig, NumLayers, attention_options
from ..layers.rope import Dynamic, Linear, Llama3, RopeScaling, Yarn
from ..lookup import options_class
from ._family import Family, Stored, parts

WINDOW = 4096  # default sliding window in tokens
SLIDING, FULL = "sliding_attention", "full_attention"  # of layer_types
ACTS = {
    "silu": "swiglu",
    "relu2": "relu2",
    "poly_norm": "polynorm",
    "gelu_pytorch_tanh": "geglu",
}  # {hidden_act: name of the MLP}
ORIGINAL = {"original_max_position": "original_max_position_embeddings"}  # {field of RopeScalings: its name there}
# of rope_parameters and rope_scaling; those that a rope_type does not have change nothing, as in transformers
ROPE_FIELDS = frozenset((
    "rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "truncate", "finetuned", "short_factor", "long_factor",
))  # fmt: skip


# Of config.json's fields, where neither it nor the family sets them; null in one of them is the same as none
DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "head_dim": None,  # hidden_size / num_attention_heads
}


@dataclass(frozen=True)
class HuggingFace(Family):
    """A family with Hugging Face's names of fields and tensors. One whose layers differ from a llama's, or from each
    other, has its own `layer`.

    queries, keys: how many sub-heads num_attention_heads counts per head, and num_key_value_heads per kv head.
    architecture: the class in transformers. defaults: of config.json's fields. biases: the fields that enable biases.
    qk_norm: whether each query and key head is normed. names: {module of a layer: its name on disk}, where they differ.
    """

    attention: str
    queries: int = 1
    keys: int = 1
    architecture: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[str, ...] = ("attention_bias",)
    sub_norms: bool = False
    qk_norm: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    def knows(self, values: Mapping[str, Any]) -> bool:
        return values.get("model_type") == self.model_type and not values.get("rope_interleaved")

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        known = {**DEFAULTS, **self.defaults}
        absent = [x for x in known if x not in values or (values[x] is None and x in DEFAULTS)]
        values = {**values, **{name: known[name] for name in absent}}
        num_layers = get(values, "num_hidden_layers", NumLayers)
        max_position = get(values, "max_position_embeddings", Count)
        theta, scaling = _rope(values, max_position)
        return ModelConfig(
            layers=tuple(self.layer(values, index) for index in range(num_layers)),
            norm_eps=get(values, "rms_norm_eps", Positive),
            vocab_size=get(values, "vocab_size", Count),
            hidden_size=get(values, "hidden_size", Count),
            max_position=max_position,
            rope_theta=theta,
            rope_scaling=scaling,
            local_rope_theta=get(values, "rope_local_base_freq", Positive, None),
            tie_embeddings=get(values, "tie_word_embeddings", bool, False),
            hidden_scale=get(values, "hidden_scale", Positive, 1.0),
            pooling=get(values, "pooling", str, None),
            **special_tokens(values),
        )

    def layer(self, values: Mapping[str, Any], index: int) -> LayerSpec:
        """Return a layer of a parsed config.json, in which the defaults are."""
        act = get(values, "hidden_act", Annotated[str, one_of(*ACTS)])
        query_heads, hidden_size = get(values, "num_attention_heads", Count), get(values, "hidden_size", Count)
        kv_heads = get(values, "num_key_value_heads", Count, query_heads)
        if values["head_dim"] is None and hidden_size % query_heads:
            raise DiffbitError(
                f"hidden_size is {hidden_size} and not divisible by num_attention_heads, which is {query_heads}; if "
                "that is intended, set head_dim"
            )
        self._check_heads(query_heads, kv_heads)
        biases = {name: get(values, name, bool, False) for name in ("attention_bias", "mlp_bias")}
        for name, bias in biases.items():
            if bias and name not in self.biases:
                raise DiffbitError(f"{name} is true, wanted false: no {self.model_type} has these biases")
        kind, eps = attention_options(self.attention), get(values, "rms_norm_eps", Positive)
        mixer = kind(
            num_heads=query_heads // self.queries,
            num_kv_heads=kv_heads // self.keys,
            head_dim=get(values, "head_dim", Count, hidden_size // query_heads),
            qkv_bias=biases["attention_bias"],
            o_bias=biases["attention_bias"],
            qk_norm_eps=eps if self.qk_norm else 0.0,
            **({"norm_eps": eps} if hasattr(kind, "norm_eps") else {}),
        )
        mlp = options_class("mlp", ACTS[act], MLP)
        sizes = hidden_size, get(values, "intermediate_size", Count), biases["mlp_bias"]
        return LayerSpec(mixer, mlp.of_size(*sizes), self.sub_norms)

    def write(self, config: ModelConfig) -> dict[str, Any] | None:
        mixer = config.layers[0].mixer
        if mixer.name != self.attention:
            return None
        assert isinstance(mixer, AttentionOptions)
        known = {} if self.architecture is None else {"architectures": [self.architecture]}
        values = {
            **known,
            **common_fields(config),
            "model_type": self.model_type,
            "num_attention_heads": self.queries * mixer.num_heads,
            "num_key_value_heads": self.keys * mixer.num_kv_heads,
        }
        try:
            return values if self.read(values) == config else None
        except DiffbitError:  # such as another activation
            return None

    def stored(self, config: ModelConfig, name: str) -> Stored:
        *path, module, kind = name.split(".")
        return Stored((".".join((*path, self.names.get(module, module), kind)),))

    def hint(self, name: str) -> str:
        if self.queries > 1 and name.rpartition(".self_attn.")[2] in ("subln.weight", "out_proj.weight"):
            return '; for a folder in the layout of the official modules, add "rope_interleaved": true to config.json'
        return ""

    def _check_heads(self, query_heads: int, kv_heads: int) -> None:
        counts = (("num_attention_heads", query_heads, self.queries), ("num_key_value_heads", kv_heads, self.keys))
        for name, count, multiple in counts:
            if count % multiple:
                raise DiffbitError(
                    f"{name} is {count}, wanted an even number: differential attention has pairs of heads"
                )
        if (query_heads // self.queries) % (kv_heads // self.keys):
            twice = "twice " if self.queries > self.keys else ""
            raise DiffbitError(
                f"num_attention_heads is {query_heads}, wanted a multiple of {twice}num_key_value_heads, which is "
                f"{kv_heads}" + (": both heads of a pair read one key-value head" if twice else "")
            )


def changed(layer: LayerSpec, **options: Any) -> LayerSpec:
    """Return the layer with other options of its mixer."""
    return replace(layer, mixer=replace(layer.mixer, **options))


def windowed(layer: LayerSpec, values: Mapping[str, Any], window: Any) -> LayerSpec:
    """Return the layer with a sliding window, if there is one and it is shorter than the context."""
    if window is None or read(Count, window, "sliding_window") >= values["max_position_embeddings"]:
        return layer
    return changed(layer, sliding_window=window)


def layer_types(values: Mapping[str, Any], default: tuple[str, ...]) -> tuple[str, ...]:
    """Return each layer's kind, SLIDING or FULL, from `layer_types`."""
    kinds = tuple[Annotated[str, one_of(SLIDING, FULL)], ...]
    types: tuple[str, ...] = get(values, "layer_types", kinds, default)
    if len(types) != len(default):
        raise DiffbitError(f"layer_types is {shown(list(types))}, wanted {len(default)} of {SLIDING} and {FULL}")
    return types


def attention_of(config: ModelConfig, name: str) -> AttentionOptions:
    """Return the attention options of the layer that a tensor of this canonical name belongs to."""
    mixer = config.layers[int(parts(name)[0] or 0)].mixer
    assert isinstance(mixer, AttentionOptions)
    return mixer


def common_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that Hugging Face's config.json has for any model; heads and model_type are llama's."""
    mixers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, AttentionOptions)]
    mlp = config.layers[0].mlp
    eos = config.eos_token_ids
    scaling = config.rope_scaling
    return {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": max((mixer.softmaxes for mixer in mixers), default=0),
        "num_key_value_heads": max((mixer.cache_heads for mixer in mixers), default=0),
        "head_dim": max((mixer.head_dim for mixer in mixers), default=0),
        "hidden_act": next((act for act, name in ACTS.items() if name == mlp.name), mlp.name),
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else {ORIGINAL.get(k, k): v for k, v in scaling.to_dict().items()},
        "attention_bias": any(mixer.o_bias for mixer in mixers),
        "mlp_bias": mlp.bias,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "pad_token_id": config.pad_token_id,
        **{name: value for name, value in config.to_dict().items() if name in OF_EMBEDDINGS},  # diffbit's own
    }


def rope_settings(values: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return (its name, the object) that describes rotary embedding: `rope_scaling`, or else `rope_parameters`, as in
    transformers. Raises DiffbitError for fields of it that diffbit does not know."""
    names = ("rope_scaling", "rope_parameters")
    ropes = {name: rope for name in names if (rope := get(values, name, Mapping[str, Any], {}))}
    place, rope = next(iter(ropes.items()), ("rope_scaling", dict[str, Any]()))
    if kinds := [name for name, value in rope.items() if isinstance(value, dict)]:
        raise DiffbitError(f"rotary embedding differs by layer ({', '.join(kinds)}), wanted the same in all")
    for name, value in rope.items():
        if name not in ROPE_FIELDS and value is not None:
            raise DiffbitError(f"{place}.{name} is {shown(value)}, wanted none: diffbit does not know what it does")
    return place, rope


def rope_theta(values: Mapping[str, Any], rope: Mapping[str, Any]) -> Any:
    """Return theta, of the object of `rope_settings` or beside it; None if neither has it."""
    return get(rope if rope.get("rope_theta") is not None else values, "rope_theta", Positive, None)


def _rope(values: Mapping[str, Any], max_position: int) -> tuple[float, RopeScaling | None]:
    """Return (theta, scaling) of a model that rotates whole heads."""
    place, rope = rope_settings(values)
    for source in (values, rope):
        share = get(source, "partial_rotary_factor", Positive, 1.0)
        if share != 1:
            raise DiffbitError(f"partial_rotary_factor is {share}, wanted 1: this family rotates whole heads")
    original = get(values, ORIGINAL["original_max_position"], Count, None)
    with located(place):
        return rope_theta(values, rope), _scaling(rope, original, max_position)


def _scaling(rope: Mapping[str, Any], original: int | None, max_position: int) -> RopeScaling | None:
    kinds = Annotated[str, one_of("default", "linear", "dynamic", "llama3", "yarn")]
    kind = get(rope, "rope_type" if "rope_type" in rope else "type", kinds, "default")
    if kind == "default":
        return None
    if kind in ("linear", "dynamic"):
        return (Linear if kind == "linear" else Dynamic)(get(rope, "factor", Positive))
    original = original or get(rope, ORIGINAL["original_max_position"], Count, max_position)
    if kind == "yarn":
        return _yarn(rope, original, max_position)
    factor, low, high = (get(rope, name, Positive) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    return Llama3(factor, low, high, original)


def _yarn(rope: Mapping[str, Any], original: int, max_position: int) -> Yarn:
    """Read yarn's parameters. The default attention_factor is 1 + 0.1 ln factor (arXiv 2309.00071, eq. 22), or the
    quotient of two such numbers, with 0.1 mscale and 0.1 mscale_all_dim."""
    factor = get(rope, "factor", Positive, max_position / original)

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    scales = [get(rope, name, Positive) for name in ("mscale", "mscale_all_dim") if rope.get(name)]
    default = grown(scales[0]) / grown(scales[1]) if len(scales) == 2 else grown(1)
    return Yarn(
        factor,
        original,
        get(rope, "attention_factor", Positive, default),
        beta_fast=get(rope, "beta_fast", Positive, 32.0),
        beta_slow=get(rope, "beta_slow", Positive, 1.0),
        truncate="truncate" not in rope or get(rope, "truncate", bool, False),  # null is false to transformers
    )


def special_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ModelConfig's special tokens from a config.json or generation_config.json."""
    eos = get(values, "eos_token_id", int | tuple[int, ...], ())
    tokens = {"eos_token_ids": eos if isinstance(eos, tuple) else (eos,)}
    tokens |= {name: get(values, name, int, None) for name in ("bos_token_id", "pad_token_id")}
    return {name: ids for name, ids in tokens.items() if ids not in (None, ())}
