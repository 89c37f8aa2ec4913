"""Common parts of Hugging Face's config.json files, as transformers reads and writes them (4.49 and later, and 5).

transformers 4 describes rotary embedding by `rope_theta` and `rope_scaling` at the top level, transformers 5 by a
dictionary `rope_parameters`. Both are read; `rope_theta` and `rope_scaling` are written, which both versions accept.
Unsupported settings (other activations, other rotary types) are refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ...io.errors import DiffbitError
from ..attention import AttentionOptions
from ..checks import check_count, check_flag, check_positive
from ..config import ModelConfig
from ..layers.rope import Dynamic, Linear, Llama3, RopeScaling, Yarn
from ._family import Family, Stored

WINDOW = 4096  # default sliding window in tokens
ACTS = {
    "silu": "swiglu",
    "relu2": "relu2",
    "poly_norm": "polynorm",
    "gelu_pytorch_tanh": "geglu",
}  # {hidden_act: name of the MLP}
ORIGINAL = {"original_max_position": "original_max_position_embeddings"}  # {field of RopeScalings: its name there}


def _as_they_are(mixer: AttentionOptions) -> dict[str, Tensor]:
    return {}


def _no_windows(values: Mapping[str, Any]) -> Sequence[Any]:
    return [None] * values["num_hidden_layers"]


@dataclass(frozen=True)
class HuggingFace(Family):
    """A family of equal layers with Hugging Face's names of fields and tensors.

    queries, keys: how many sub-heads num_attention_heads counts per head, and num_key_value_heads per kv head.
    architecture: the class in transformers. act, norm_eps, rope_theta, max_position, head_dim (None: hidden_size /
    heads): defaults if config.json does not set them. biases: the fields that enable biases; qkv_bias: whether the
    family always has these. windows: returns each layer's sliding window from a parsed config.json; None: no window.
    rows: {"q_proj": order} of projections with another row order: canonical rows = rows on disk[order]. norms: as in
    LayerSpec; names: {module of a layer: its name on disk}, where they differ.
    """

    attention: str
    queries: int = 1
    keys: int = 1
    architecture: str | None = None
    sub_norms: bool = False
    act: str = "silu"
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position: int = 2048
    head_dim: int | None = None
    biases: tuple[str, ...] = ("attention_bias",)
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    norms: str = "before"
    names: Mapping[str, str] = field(default_factory=dict)
    windows: Callable[[Mapping[str, Any]], Sequence[Any]] = _no_windows
    rows: Callable[[AttentionOptions], dict[str, Tensor]] = _as_they_are

    def knows(self, values: Mapping[str, Any]) -> bool:
        return values.get("model_type") == self.model_type and not values.get("rope_interleaved")

    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        act = values.get("hidden_act") or self.act
        if not isinstance(act, str) or act not in ACTS:
            raise DiffbitError(f"hidden_act is {act!r}, wanted one of {', '.join(ACTS)}")
        query_heads = count(values, "num_attention_heads")
        kv_heads = count(values, "num_key_value_heads", default=query_heads)
        hidden_size = count(values, "hidden_size")
        if values.get("head_dim", self.head_dim) is None and hidden_size % query_heads:
            raise DiffbitError(
                f"hidden_size is {hidden_size} and not divisible by num_attention_heads, which is {query_heads}; if "
                "that is intended, set head_dim"
            )
        self._check_heads(query_heads, kv_heads)
        head_dim = count(values, "head_dim", default=self.head_dim or hidden_size // query_heads)
        max_position = count(values, "max_position_embeddings", default=self.max_position)
        num_layers = count(values, "num_hidden_layers")
        theta, scaling = _rope(values, max_position, self.rope_theta)
        tied = values.get("tie_word_embeddings", False)
        check_flag("tie_word_embeddings", tied)
        config = ModelConfig.uniform(
            num_layers=num_layers,
            num_heads=query_heads // self.queries,
            num_kv_heads=kv_heads // self.keys,
            head_dim=head_dim,
            intermediate_size=count(values, "intermediate_size"),
            attention=self.attention,
            mlp=ACTS[act],
            sub_norms=self.sub_norms,
            qk_norm=self.qk_norm,
            qk_norm_whole=self.qk_norm_whole,
            norms=self.norms,
            norm_eps=number(values, "rms_norm_eps", default=self.norm_eps),
            vocab_size=count(values, "vocab_size"),
            hidden_size=hidden_size,
            max_position=max_position,
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=tied,
            **self._biases(values),
            **special_tokens(values),
        )
        return self._with_windows(config, values)

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
        before, _, tensor = name.rpartition(".self_attn.")
        rows = self.rows(attention_of(config)) if before else {}
        *path, module, kind = name.split(".")
        return Stored((".".join((*path, self.names.get(module, module), kind)),), rows.get(tensor.rpartition(".")[0]))

    def hint(self, name: str) -> str:
        if self.queries > 1 and name.rpartition(".self_attn.")[2] in ("subln.weight", "out_proj.weight"):
            return '; for a folder in the layout of the official modules, add "rope_interleaved": true to config.json'
        return ""

    def _biases(self, values: Mapping[str, Any]) -> dict[str, Any]:
        for name in ("attention_bias", "mlp_bias"):
            if values.get(name) is not None:
                check_flag(name, values[name])
            if values.get(name) and name not in self.biases:
                raise DiffbitError(f"{name} is true, wanted false: no {self.model_type} has these biases")
        o_bias = bool(values.get("attention_bias"))
        return {"qkv_bias": o_bias or self.qkv_bias, "o_bias": o_bias, "mlp_bias": bool(values.get("mlp_bias"))}

    def _with_windows(self, config: ModelConfig, values: Mapping[str, Any]) -> ModelConfig:
        """Add the sliding windows that are shorter than the context."""
        layers = []
        for layer, window in zip(config.layers, self.windows(values), strict=True):
            if window is not None:
                check_count("sliding_window", window)
                if window < config.max_position:
                    layer = replace(layer, mixer=replace(attention_of(config), sliding_window=window))
            layers.append(layer)
        return replace(config, layers=tuple(layers))

    def _check_heads(self, query_heads: int, kv_heads: int) -> None:
        counts = (("num_attention_heads", query_heads, self.queries), ("num_key_value_heads", kv_heads, self.keys))
        for name, count, each in counts:
            if count % each:
                raise DiffbitError(
                    f"{name} is {count}, wanted an even number: differential attention has pairs of heads"
                )
        if (query_heads // self.queries) % (kv_heads // self.keys):
            twice = "twice " if self.queries > self.keys else ""
            raise DiffbitError(
                f"num_attention_heads is {query_heads}, wanted a multiple of {twice}num_key_value_heads, which is "
                f"{kv_heads}" + (": both heads of a pair read one key-value head" if twice else "")
            )


def attention_of(config: ModelConfig, index: int = 0) -> AttentionOptions:
    """Return the attention options of a layer; of a model with equal layers, of all."""
    mixer = config.layers[index].mixer
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
    }


def _rope(values: Mapping[str, Any], max_position: int, default: float) -> tuple[float, RopeScaling | None]:
    """Return (theta, scaling) from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    rope: Mapping[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):  # rope_scaling takes precedence, as in transformers
        entry = values.get(name)
        if entry is not None and not isinstance(entry, dict):
            raise DiffbitError(f"{name} is {entry!r}, wanted an object or null")
        rope = entry or rope
    if each := [name for name, value in rope.items() if isinstance(value, dict)]:
        raise DiffbitError(f"rotary embedding differs by layer ({', '.join(map(str, each))}), wanted the same in all")
    theta = number(rope if rope.get("rope_theta") is not None else values, "rope_theta", default=default)
    for source in (values, rope):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise DiffbitError(
                f"partial_rotary_factor is {source['partial_rotary_factor']!r}, wanted 1: diffbit rotates whole heads"
            )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise DiffbitError(
            f"the rotary embedding is of type {kind!r}, wanted 'default', 'linear', 'dynamic', 'llama3' or 'yarn'"
        )
    if kind in ("linear", "dynamic"):
        return theta, (Linear if kind == "linear" else Dynamic)(number(rope, "factor"))
    above = values if values.get("original_max_position_embeddings") is not None else rope
    original = count(above, "original_max_position_embeddings", default=max_position)
    if kind == "yarn":
        return theta, _yarn(rope, original, max_position)
    factor, low, high = (number(rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    return theta, Llama3(factor, low, high, original)


def _yarn(rope: Mapping[str, Any], original: int, max_position: int) -> Yarn:
    """Read yarn's parameters. The default attention_factor is 1 + 0.1 ln factor (arXiv 2309.00071, eq. 22), or the
    quotient of two such numbers, with 0.1 mscale and 0.1 mscale_all_dim."""
    factor = number(rope, "factor", default=max_position / original)

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    scales = [number(rope, name) for name in ("mscale", "mscale_all_dim") if rope.get(name)]
    default = grown(scales[0]) / grown(scales[1]) if len(scales) == 2 else grown(1)
    truncate = rope.get("truncate", True)
    return Yarn(
        factor,
        original,
        number(rope, "attention_factor", default=default),
        beta_fast=number(rope, "beta_fast", default=32),
        beta_slow=number(rope, "beta_slow", default=1),
        truncate=truncate,
    )


def _present(values: Mapping[str, Any], name: str, default: Any) -> Any:
    value = values.get(name)
    if value is not None:
        return value
    if default is None:
        raise DiffbitError(f"the field {name} is missing")
    return default


def count(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = _present(values, name, default)
    check_count(name, value)
    return int(value)


def number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = _present(values, name, default)
    check_positive(name, value)
    return float(value)


def special_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ModelConfig's special tokens from a config.json or generation_config.json."""
    eos = values.get("eos_token_id")
    items = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(item) is not int for item in items):
        raise DiffbitError(f"eos_token_id is {eos!r}, wanted a token id, a list of token ids or null")
    found: dict[str, Any] = {"eos_token_ids": tuple(items)} if items else {}
    for name in ("bos_token_id", "pad_token_id"):
        value = values.get(name)
        if value is not None and type(value) is not int:
            raise DiffbitError(f"{name} is {value!r}, wanted a token id or null")
        found |= {} if value is None else {name: value}
    return found
