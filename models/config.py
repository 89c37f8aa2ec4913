"""The configuration of a model: everything that determines its tensors and its arithmetic, and nothing else.

A model is an embedding, layers, a norm and a head. Each layer has a mixer (attention or another) and an MLP, described
by the options in their files:

    LayerSpec(mixer=diff_v1.Options(num_heads=8, num_kv_heads=2, head_dim=64), mlp=swiglu.Options(4096))

Most models repeat one layer: `ModelConfig.uniform`. Heads are counted as in the papers' formulas, not as in any file
format (models/families/ converts):

    attention    q_proj rows    k_proj rows     v_proj rows     o_proj columns
    softmax      H * d          KV * d          KV * d          H * d
    diff_v1      2 * H * d      2 * KV * d      KV * 2d         H * 2d
    diff_v2      2 * H * d      KV * d          KV * d          H * d
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Annotated, Any

from ..io import plugins
from ..io.errors import DiffbitError
from ..io.fields import OMITTED, Count, Positive, bounds, check, of_length, one_of, read
from .attention import AttentionOptions
from .layers.norm import NORMS, LayerNorm, RMSNorm
from .layers.rope import RopeScaling, scaling_from
from .lookup import options_class, options_dict, read_options
from .mixers import MixerOptions, Symmetries
from .mlp import MLPOptions

PLACES = ("before", "after", "around")  # of a layer's norms
MOST_LAYERS = 1 << 10  # this and other limits: far above any real model, but low enough to catch a damaged config.json
OF_EMBEDDINGS: Mapping[str, Any] = {"hidden_scale": 1.0, "pooling": None}  # fields that few models have, and defaults
HEADS = ("num_heads", "num_kv_heads", "head_dim")  # options that most attention variants have
NumLayers = Annotated[int, bounds(1, MOST_LAYERS)]
ATTENTION, MIXERS, MLP = (f"{__package__}.{folder}" for folder in ("attention", "mixers", "mlp"))  # io/plugins.py


def variants() -> tuple[str, ...]:
    """Return the names of the attention variants: the files of models/attention/, those added to it, and other mixers
    that can take attention's place in every layer, as their `equal_heads` says."""
    others = [name for name in plugins.names(MIXERS) if plugins.load(MIXERS, name).Options.equal_heads(1) is not None]
    return tuple(sorted([*plugins.names(ATTENTION), *others]))


def is_experimental(name: str) -> bool:
    """Return whether a variant is of a paper without a published model: apps/variants has it."""
    files = plugins.names(MIXERS) | plugins.names(ATTENTION)
    return files[name].startswith("diffbit.apps.")


def attention_options(name: str) -> Any:
    """Return the options class of an attention variant."""
    if name not in (known := variants()):
        raise DiffbitError(f"attention is {name!r}, wanted one of {', '.join(known)}")
    return options_class("attention", name, ATTENTION, MIXERS)


@dataclass(frozen=True)
class LayerSpec:
    """x = x + mixer(norm(x)); x = x + mlp(norm(x)). sub_norms: adds RMSNorms before o_proj and down_proj (BitNet).

    norms: where the mixer and the MLP have a norm: "before" them, as above; "after" them, x + norm(mixer(x)) (OLMo 2);
    or "around" them, x + norm(mixer(norm(x))) (Gemma 3).
    """

    mixer: Annotated[MixerOptions, partial(read_options, (ATTENTION, MIXERS))]
    mlp: Annotated[MLPOptions, partial(read_options, (MLP,))]
    sub_norms: bool = False
    norms: Annotated[str, one_of(*PLACES)] = "before"

    def __post_init__(self) -> None:
        check(self)

    def symmetries(self) -> Symmetries:
        """Return the mixer's symmetries, without those that norms break: a norm after the heads those of the values, a
        norm of queries and keys theirs, because its weight differs between the two rows of a pair."""
        symmetries = self.mixer.symmetries()
        if isinstance(self.mixer, AttentionOptions) and self.mixer.qk_norm_eps:
            symmetries = replace(symmetries, key_of=())
        return replace(symmetries, value_width=0, value_scales=False) if self.sub_norms else symmetries

    def to_dict(self) -> dict[str, Any]:
        parts = {"mixer": options_dict(self.mixer), "mlp": options_dict(self.mlp)}
        return parts | {"sub_norms": self.sub_norms, "norms": self.norms}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of such layers, whose norms are "rms" or "layer". local_rope_theta: of layers with `local_rope`, whose
    angles have no rope_scaling; None: there are none.

    Of embeddings: hidden_scale: the model's hidden states after the final norm are those of the decoder times this,
    where a factor of a tied head is folded into the norm. pooling: how its authors make one vector of those of all
    tokens, such as "mean" or "last"; None: they do not say.
    """

    vocab_size: Annotated[int, bounds(1, 1 << 24)]
    hidden_size: Annotated[int, bounds(1, 1 << 20)]
    layers: Annotated[tuple[LayerSpec, ...], of_length(1, MOST_LAYERS)]
    max_position: Count = 2048
    rope_theta: Positive = 10000.0
    rope_scaling: Annotated[RopeScaling | None, scaling_from] = None
    local_rope_theta: Positive | None = None
    norm: Annotated[str, one_of(*NORMS)] = "rms"
    norm_eps: Positive = 1e-5
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    hidden_scale: Positive = field(default=1.0, metadata=OMITTED)
    pooling: str | None = field(default=None, metadata=OMITTED)

    def __post_init__(self) -> None:
        check(self)
        if self.local_rope_theta is None and any(layer.mixer.uses_local_rope for layer in self.layers):
            raise DiffbitError("layers have local_rope, but local_rope_theta is missing")
        for index, layer in enumerate(self.layers):
            self._check_reader(index, layer.mixer)
        widths = {layer.mixer.rope_width for layer in self.layers} - {0}
        if len(widths) > 1:
            raise DiffbitError(
                f"layers have heads of widths {', '.join(map(str, sorted(widths)))} with rotary embedding, wanted one "
                "width: all share a table of angles"
            )

    @classmethod
    def uniform(
        cls,
        *,
        num_layers: int,
        intermediate_size: int,
        attention: str = "softmax",
        mlp: str = "swiglu",
        mlp_bias: bool = False,
        sub_norms: bool = False,
        head_norm: bool = True,
        **others: Any,
    ) -> ModelConfig:
        """Return a model of equal layers with an attention variant and an MLP, given by name.

        others: fields of the model, and options of the attention variant; None: the variant's default. Counts of heads
        may be given to a variant that has none. norm_eps: of all norms, also of diff_v1's heads; head_norm: False
        removes those.
        """
        read(NumLayers, num_layers, "num_layers")
        kind = attention_options(attention)
        names, model_fields = ({field.name for field in fields(record)} for record in (kind, cls))
        options = {name: value for name, value in others.items() if name not in model_fields and value is not None}
        if without := [name for name in options if name not in names and name not in HEADS]:
            raise DiffbitError(f"{without[0]} is {options[without[0]]}, but {attention} has no such option; omit it")
        others = {name: value for name, value in others.items() if name in model_fields}
        if "norm_eps" in names:
            options["norm_eps"] = others.get("norm_eps", cls.norm_eps) if head_norm else 0.0
        mixer = kind(**{name: value for name, value in options.items() if name in names})
        gated = options_class("mlp", mlp, MLP).of_size(others["hidden_size"], intermediate_size, mlp_bias)
        return cls(layers=(LayerSpec(mixer, gated, sub_norms),) * num_layers, **others)

    def _check_reader(self, index: int, mixer: MixerOptions) -> None:
        if mixer.reads is None:
            return
        if not 0 <= mixer.reads < index:
            raise DiffbitError(f"layer {index} reads from layer {mixer.reads}, wanted an earlier layer")
        giver = self.layers[mixer.reads].mixer
        if giver.reads is not None or giver.carried != mixer.carried:
            provided = giver.carried if giver.reads is None else "nothing of its own"
            raise DiffbitError(
                f"layer {index} ({mixer.name}) reads {mixer.carried} from layer {mixer.reads} ({giver.name}), "
                f"which provides {provided}"
            )

    @property
    def last_readers(self) -> dict[int, int]:
        """Return {layer whose values others read: the last layer that reads them}."""
        pairs = ((layer.mixer.reads, index) for index, layer in enumerate(self.layers))
        return {giver: index for giver, index in pairs if giver is not None}

    def symmetries(self, index: int) -> Symmetries:
        """Return the layer's symmetries, without those of keys and values if it shares these with other layers."""
        mixer = self.layers[index].mixer
        shared = isinstance(mixer, AttentionOptions) and (mixer.keys_of is not None or index in self.last_readers)
        return Symmetries() if shared else self.layers[index].symmetries()

    def new_norm(self) -> RMSNorm | LayerNorm:
        """Return a new norm of hidden states, of the model's kind."""
        return NORMS[self.norm](self.hidden_size, self.norm_eps)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> str:
        """The mixers' names for display: "diff_v1", or "diff_v1, recurrence" if there are several."""
        return ", ".join(dict.fromkeys(layer.mixer.name for layer in self.layers))

    @property
    def mlp(self) -> str:
        """The MLPs' names for display."""
        return ", ".join(dict.fromkeys(layer.mlp.name for layer in self.layers))

    @property
    def sub_norms(self) -> bool:
        """Whether every layer has sub-norms."""
        return all(layer.sub_norms for layer in self.layers)

    @property
    def head_norm(self) -> bool:
        """Whether the heads of every layer are normed."""
        return all(layer.mixer.head_norm for layer in self.layers)

    @property
    def rope_width(self) -> int:
        """Width of the heads that RoPE rotates; 0: there is no RoPE."""
        return max(layer.mixer.rope_width for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `from_dict` is the inverse."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {
            name: value for name, value in values.items() if name not in OF_EMBEDDINGS or value != OF_EMBEDDINGS[name]
        }
        scaling = None if self.rope_scaling is None else self.rope_scaling.to_dict()
        layers = [layer.to_dict() for layer in self.layers]
        return values | {"layers": layers, "rope_scaling": scaling, "eos_token_ids": list(self.eos_token_ids)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Invert `to_dict`; raises DiffbitError for an unknown or missing field."""
        config: ModelConfig = read(cls, values, "")
        return config
