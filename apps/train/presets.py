"""Presets: model sizes, each for all attention variants, of equal size, and their training options.

The variants of a preset have the same number of parameters within 2 % and differ only in their heads (d = head_dim).
With H pairs in diff_v1:

    variant   query heads      key heads    value heads    weights of q + k + v + o, in units of hidden * d
    softmax   2H of d          2H of d      2H of d        2H + 2H + 2H + 2H = 8H
    diff_v1   H pairs of d     H pairs      H of 2d        2H + 2H + 2H + 2H = 8H     (+ 4d for lambda)
    diff_v2   2H pairs of d    H of d       H of d         4H +  H +  H + 2H = 8H     (+ 2H hidden for lambda)

softmax and diff_v1 are the paper's pair: they have the same d, and diff_v1 has half as many (double) heads (arXiv
2410.05258, section 2.1), so all weights have the same names and shapes. diff_v2 has twice the query heads of softmax,
as in its authors' models, and fewer key-value heads (grouped queries, 4 query heads each). Variants that apps add have
the heads of one of these. A model that would then be more than 1 % larger or smaller than the plain one, by what its
attention has besides (dcmha, ttt) or by its MLP (kan), has a narrower or wider MLP; with CRATE's MLP, which has one
width, it has more layers, and its number of parameters is within half a layer's.

Preset yoco is YOCO (arXiv 2405.05254): the lower half of the layers has a window, the first one of the upper half keys
and values of all tokens, and those after it have only queries (`keys_of`). Its variants differ in size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...calib_data import load_tokenizer
from ...formats import parse_format
from ...io.errors import DiffbitError
from ...models import Checkpoint, ModelConfig, attention_options, is_experimental, num_parameters, variants
from ...models.attention import AttentionOptions
from .config import TrainConfig
from .folder import MASTER

TERNARY_RATE = 2.0  # learning rate of ternary weights, relative to that of float weights
# Likewise when training starts from a checkpoint: two-bit weights, scales alone and adapters must move far, weights of
# more bits hardly at all
FEW_BITS_FROM_CHECKPOINT = 0.5
FROM_CHECKPOINT = 0.025
# Fine-tuning, which is training from a checkpoint without a preset: rates relative to those of the preset that is
# nearest in size, and what a step is made of
FINE_TUNED, ADAPTED = 0.05, 1 / 3  # of all weights; of adapters
FINE_TUNING = {"steps": 300, "passes": 3.0, "batch_size": 4, "accumulate": 1, "warmup": 30}
LONGEST_ROW = 512  # tokens
DEFAULT, ATTENTION = "tiny", "diff_v1"  # preset and attention
HEAD_NORMS = ("learned", "fixed", "none")
SAME_SIZE = 0.01  # the variants of a preset have as many parameters as the plain model, within this fraction
WIDTH_STEP = 4  # of the MLP, which is made narrower or wider for it


@dataclass(frozen=True)
class Preset:
    """The sizes of a model and its training options. Hidden and intermediate sizes are multiples of 128, the largest
    group size of the weight formats."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_pairs: int  # H in the table above
    intermediate_size: int
    context: int
    steps: int
    batch_size: int
    accumulate: int
    learning_rate: float
    warmup: int
    head_gain: float  # initial weight of diff_v1's learned head norm, relative size of o_proj (research/training)
    window: int = 0  # of the lower half's attention, in a model whose upper half shares keys and values; 0: all alike


PRESETS = {
    # Small enough for git: examples/pico.
    "pico": Preset(1024, 128, 2, 2, 128, 256, 800, 8, 1, 5e-3, 60, 0.1),
    # Trains a matched pair in a few minutes on two CPU cores.
    "tiny": Preset(1024, 128, 4, 2, 256, 128, 1200, 8, 1, 5e-3, 60, 0.1),
    # The same with keys and values of one layer for the upper half.
    "yoco": Preset(1024, 128, 4, 2, 256, 128, 1200, 8, 1, 5e-3, 60, 0.1, window=32),
    # The size of the published Diff_NanoGPT: 2.5 M parameters, context 256.
    "nano": Preset(1024, 256, 3, 4, 640, 256, 3000, 32, 1, 2e-3, 100, 1.0),
    # For a GPU.
    "small": Preset(4096, 512, 8, 4, 1280, 512, 10000, 64, 1, 1.5e-3, 300, 1.0),
    "base": Preset(32768, 768, 14, 6, 2048, 1024, 20000, 32, 8, 6e-4, 1000, 1.0),
}


def model_config(
    preset: str,
    attention: str,
    *,
    vocab_size: int | None = None,
    noise_ratio: int | None = None,
    **options: Any,
) -> ModelConfig:
    """Return the model of a preset with an attention variant; `vocab_size` None: the preset's. With shared noise heads
    (noise_ratio) it has fewer query rows, and at most one kv head for each of them. options: of ModelConfig.uniform.
    Raises DiffbitError for an unknown name."""
    size = _preset(preset)
    head_dim = size.hidden_size // (2 * size.num_pairs)

    def sized(attention: str, width: int, layers: int, noise_ratio: int | None = None, **options: Any) -> ModelConfig:
        kind = attention_options(attention)
        heads, kv_heads = kind.equal_heads(size.num_pairs)
        return ModelConfig.uniform(
            vocab_size=vocab_size or size.vocab_size, hidden_size=size.hidden_size, num_layers=layers,
            num_heads=heads, num_kv_heads=max(1, min(kv_heads, heads // (noise_ratio or 1))), head_dim=head_dim,
            intermediate_size=width, max_position=size.context, attention=attention, tie_embeddings=True,
            noise_ratio=noise_ratio, **kind.equal_sizes(size.num_pairs, head_dim), **options,
        )  # fmt: skip

    width, layers = size.intermediate_size, size.num_layers
    target = num_parameters(sized("softmax", width, layers))

    def count(width: int, layers: int) -> int:
        return num_parameters(sized(attention, width, layers, **options))

    # Shared noise heads may save parameters; with one for each signal head, a variant has as many as the plain model
    if abs(surplus := count(width, layers) - target) > SAME_SIZE * target:
        if per_step := count(width + WIDTH_STEP, layers) - count(width, layers):
            width -= WIDTH_STEP * round(surplus / per_step)
        else:  # an MLP of one width, as ista
            layers -= round(surplus / (count(width, layers + 1) - count(width, layers)))
    model = sized(attention, width, layers, noise_ratio, **options)
    return _caches_once(model, size.window) if size.window else model


def _caches_once(model: ModelConfig, window: int) -> ModelConfig:
    """Return a model of equal layers as YOCO's."""
    layer, half = model.layers[0], model.num_layers // 2
    if not isinstance(layer.mixer, AttentionOptions):
        raise DiffbitError(f"preset yoco shares keys and values, which {layer.mixer.name} does not have")
    lower = replace(layer, mixer=replace(layer.mixer, sliding_window=window))
    upper = replace(layer, mixer=replace(layer.mixer, keys_of=half))
    return replace(model, layers=(lower,) * half + (layer,) + (upper,) * (model.num_layers - half - 1))


def train_config(
    preset: str | None = None,
    attention: str | None = None,
    *,
    vocab_size: int | None = None,
    context: int | None = None,
    init: str | None = None,
    mlp: str | None = None,
    sub_norms: bool | None = None,
    head_norm: str | None = None,
    noise_ratio: int | None = None,
    **changes: Any,
) -> TrainConfig:
    """Return the training run of a preset; `changes` replace fields of TrainConfig.

    preset: None: "tiny"; with `init`, a run to fine-tune that model: three passes over the text, in 50 to 300 steps of
    4 rows of at most 512 tokens, in bf16 on processors that are faster in it.
    vocab_size: default: that of `changes["tokenizer"]` if given, else the preset's.
    context: of the rows, and of the model, unless that of `init` is longer; default: that of `init`, else the preset's.
    init: a checkpoint to start from. The run uses its model and tokenizer; `attention` must agree with it.
    mlp, sub_norms: of the model (models/config.py); default: those of `init`, else swiglu, and sub-norms only with
    ternary `qat`. Sub-norms can be added to the model of `init`.
    head_norm: of diff_v1: "learned" (with a weight that is folded into o_proj when the model is saved, head_norm.py),
    "fixed" (without a weight) or "none"; default: as in `init`, else "learned", but "fixed" with `qat` or sub-norms.
    noise_ratio: signal heads per noise head, of diff_v1 and diff_v2; default: 1, or that of `init`.

    A ternary run without `init` follows BitNet b1.58: its learning rate is TERNARY_RATE times as high, in two stages. A
    quantization-aware run from `init` has a lower learning rate than the preset: half at two bits and where scales or
    adapters are trained, a fortieth otherwise.
    Raises DiffbitError for unknown names, and for a checkpoint that does not fit.
    """
    qat = changes.get("qat")
    format = None if qat is None else parse_format(qat)
    ternary = format is not None and format.trained
    schedule = "cosine"
    fine_tunes = preset is None and init is not None
    if preset is None:
        preset = DEFAULT if init is None else _nearest(num_parameters(Checkpoint(init).config))
    size = _preset(preset)
    rate = size.learning_rate
    if head_norm not in (None, *HEAD_NORMS):
        raise DiffbitError(f"head_norm {head_norm!r} is unknown; choose one of {', '.join(HEAD_NORMS)}")
    if init is not None:
        if noise_ratio is not None:
            raise DiffbitError(f"noise_ratio is {noise_ratio}, wanted none with init, whose heads are what they are")
        model = _model_of(init, attention, mlp, sub_norms, changes.get("trainable") == "scales")
        changes = {"tokenizer": init, **changes}
        if fine_tunes and format is None:
            rate *= ADAPTED if changes.get("trainable") == "lora" else FINE_TUNED
        elif format is not None:
            far = format.bits == 2 or changes.get("trainable", "all") != "all"
            rate *= FEW_BITS_FROM_CHECKPOINT if far else FROM_CHECKPOINT
    else:
        if vocab_size is None and changes.get("tokenizer") is not None:
            vocab_size = load_tokenizer(changes["tokenizer"]).vocab_size
        norms = ternary if sub_norms is None else sub_norms
        model = model_config(
            preset, attention or ATTENTION, vocab_size=vocab_size, mlp=mlp or "swiglu", sub_norms=norms,
            head_norm=head_norm != "none", lambda_bias=None if changes.get("lambda_bias") is None else True,
            noise_ratio=noise_ratio,
        )  # fmt: skip
        if head_norm is None and model.head_norm and qat is None and not norms:
            head_norm = "learned"
        if ternary:
            rate, schedule = TERNARY_RATE * rate, "two_stage"
    if head_norm is not None and model.head_norm != (head_norm != "none"):
        raise DiffbitError(
            f"head_norm is {head_norm}, but the heads of this model ({model.attention}) have "
            f"{'a norm' if model.head_norm else 'no norm'}; omit --head-norm"
        )
    if context is None:
        context = min(model.max_position, LONGEST_ROW) if fine_tunes else model.max_position
    model = replace(model, max_position=context if init is None else max(context, model.max_position))
    options: dict[str, Any] = {
        "steps": size.steps, "length": context, "batch_size": size.batch_size, "accumulate": size.accumulate,
        "learning_rate": rate, "schedule": schedule, "warmup": size.warmup,
    }  # fmt: skip
    if fine_tunes:
        options |= FINE_TUNING | ({"passes": None} if "steps" in changes else {})
        if changes.get("precision", "auto") == "auto" and torch.cpu._is_avx512_bf16_supported():
            changes = {**changes, "precision": "bf16"}
    steps = changes.get("steps", options["steps"])
    options["warmup"] = min(options["warmup"], max(1, steps // 10))  # at most a tenth of a short run
    if head_norm == "learned":
        of_new_model = {"head_gain": size.head_gain, "o_proj_init": size.head_gain}
        options |= of_new_model if init is None else {"head_gain": 1.0}
    return TrainConfig(model=model, init=init, **options | changes)


def _nearest(parameters: int) -> str:
    """Return the preset whose plain model is nearest in size."""
    counts = {name: num_parameters(model_config(name, "softmax")) for name in PRESETS if name != "yoco"}
    return min(counts, key=lambda name: abs(math.log(counts[name] / parameters)))


def _preset(name: str) -> Preset:
    if name not in PRESETS:
        raise DiffbitError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def _model_of(
    checkpoint: str, attention: str | None, mlp: str | None, sub_norms: bool | None, quantized: bool
) -> ModelConfig:
    """Return the model of a checkpoint, which may be `quantized`. Raises DiffbitError if training cannot start from
    it."""
    start = Checkpoint(checkpoint)
    if start.quantization is not None and not quantized:
        master = Path(checkpoint) / MASTER
        source = f"start from {master}" if master.is_dir() else "start from the checkpoint it was made from"
        raise DiffbitError(f"{checkpoint}: is quantized, but training starts from float weights; {source}")
    if attention not in (None, start.config.attention):
        raise DiffbitError(
            f"{checkpoint}: its attention is {start.config.attention}, not {attention}; omit --attention, or "
            "start from another checkpoint"
        )
    if mlp not in (None, start.config.mlp):
        raise DiffbitError(
            f"{checkpoint}: its MLP is {start.config.mlp}, not {mlp}; omit --mlp, or start from another checkpoint"
        )
    if sub_norms is False and start.config.sub_norms:
        raise DiffbitError(f"{checkpoint}: has sub-norms, which training cannot remove; omit --no-sub-norms")
    layers = tuple(replace(layer, sub_norms=bool(sub_norms) or layer.sub_norms) for layer in start.config.layers)
    return replace(start.config, layers=layers)


def parameters() -> list[dict[str, Any]]:
    """Return a row for each preset and each of its variants, the experimental ones last, with sizes and parameters (a
    tied embedding counts once)."""
    rows = []
    for preset in PRESETS:
        for attention in sorted(variants(), key=is_experimental):
            try:
                config = model_config(preset, attention)
            except DiffbitError:  # yoco has only variants that can read another layer's keys
                continue
            mixer = config.layers[0].mixer
            label = "yes" if is_experimental(attention) else "no"
            row: dict[str, Any] = {"preset": preset, "attention": attention, "experimental": label}
            row |= {"parameters": num_parameters(config)}
            row |= {"hidden_size": config.hidden_size, "num_layers": config.num_layers}
            row |= {name: getattr(mixer, name, None) for name in ("num_heads", "num_kv_heads", "head_dim")}
            rows.append(row | {"vocab_size": config.vocab_size, "context": config.max_position})
    return rows
