"""A pretrained model as a mixture of heads (MoH, arXiv 2410.11842, section 4.4: how the authors go on with LLaMA 3 8B).

No weight changes. Each attention becomes its mixture in apps/variants/attention (`moh` of softmax, `moh_diff_v1`, ...)
with router "norm": some heads are shared, which are on for each token; of the others those with the longest queries are
on, and the rest is 0 (_routed.py has the formulas). The authors share the first half of the heads and route a quarter,
so that three quarters are on.

By importance: the shared heads of a layer are those with the largest mean, over the tokens of a calibration text, of

    |dL/dg_i| = |head_i(x) . dL/dhead_i(x)|,    g_i = 1 the gate of the head, L the sum of the text's losses

which tells to first order how far the loss moves if the head is off (after P. Michel, O. Levy and G. Neubig, arXiv
1905.10650, eq. 2, there for each text in place of each token).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...calib_data import Windows, eval_windows
from ...io.errors import DiffbitError
from ...io.progress import track
from ...models import Checkpoint, Decoder, LayerSpec, ModelConfig, attention_options, load, variants
from ...models.attention import AttentionOptions
from ._target import float_model

CHOICES = ("first", "importance")
HEADS = 0.75  # the share of heads that are on
SHARED = 2 / 3  # of those that are on, how many are shared
WINDOWS, LENGTH = 16, 512  # of the text that importance is measured on


@dataclass(frozen=True)
class ToMixture:
    """heads: the share of heads that are on for a token, in (0, 1]; None: 0.75. shared: the share of all heads that are
    always on; None: two thirds of `heads`. choose: which heads are shared, "first" or "importance"; None: "first".
    calibrate: the text that importance is measured on (calib_data.load_text); None: mix."""

    heads: float | None = None
    shared: float | None = None
    choose: str | None = None
    calibrate: str | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "shared"):
            if (share := getattr(self, name)) is not None and not 0 < share <= 1:
                raise DiffbitError(f"{name} is {share:g}, wanted a share of the heads, above 0 and at most 1")
        if self.choose not in (None, *CHOICES):
            raise DiffbitError(f"choose is {self.choose!r}, wanted one of {', '.join(CHOICES)}")
        if self.calibrate is not None and self.choose != "importance":
            raise DiffbitError("calibrate is a text to choose heads by importance; also choose importance")

    def config(self, source: Checkpoint) -> ModelConfig:
        float_model(source)
        layers = [self._layer(source, index, layer) for index, layer in enumerate(source.config.layers)]
        config = replace(source.config, layers=tuple(layers))
        if config == source.config:
            raise DiffbitError(f"{source.path}: no layer is attention, so there are no heads to mix")
        if self.choose != "importance":
            return config
        found = importance(source, _text(source, self.calibrate or "mix"))
        layers = [_chosen(layer, found.get(index)) for index, layer in enumerate(layers)]
        return replace(config, layers=tuple(layers))

    def layer(self, source: Checkpoint, config: ModelConfig, index: int, tensors: dict[str, Tensor]) -> None:
        """The weights stay as they are."""

    def _layer(self, source: Checkpoint, index: int, layer: LayerSpec) -> LayerSpec:
        mixer = layer.mixer
        if not isinstance(mixer, AttentionOptions):
            return layer
        place = f"{source.path}: layer {index}"
        name = "moh" if mixer.name == "softmax" else f"moh_{mixer.name}"
        if mixer.name.startswith("moh"):
            raise DiffbitError(f"{place} is a mixture of heads already ({mixer.name})")
        if name not in variants():
            raise DiffbitError(
                f"{place} has the attention {mixer.name}, of which there is no mixture of heads; wanted softmax, "
                "diff_v1 or diff_v2"
            )
        shared, routed = self._counts(mixer.num_heads, place)
        counts = {"shared_heads": shared, "top_k": routed, "router": "norm"}
        return replace(layer, mixer=attention_options(name)(**asdict(mixer) | counts))

    def _counts(self, heads: int, place: str) -> tuple[int, int]:
        """Return how many of the heads are shared, and how many of the others are on; half a head counts as one."""
        on = int((HEADS if self.heads is None else self.heads) * heads + 0.5)
        shared = max(1, int(SHARED * on + 0.5)) if self.shared is None else int(self.shared * heads + 0.5)
        if self.shared is None:
            shared = min(shared, on - 1)
        if not 0 < shared < on:
            raise DiffbitError(
                f"{place} has {heads} heads, of which {on} would be on and {max(shared, 0)} shared; wanted at least "
                "one shared head, and at least one more that is on: change heads or shared"
            )
        return shared, on - shared


def _chosen(layer: LayerSpec, found: Tensor | None) -> LayerSpec:
    """Return the layer with the most important heads as shared ones."""
    if found is None:
        return layer
    mixer: Any = layer.mixer
    shared = found.topk(mixer.shared_heads).indices.sort().values.tolist()
    return replace(layer, mixer=replace(mixer, shared=tuple(shared)))


def _text(source: Checkpoint, text: str) -> Windows:
    length = min(LENGTH, source.config.max_position)
    return eval_windows(text, source.tokenizer_path, length, WINDOWS, split="calib")


def importance(source: Checkpoint, text: Windows) -> dict[int, Tensor]:
    """Return |dL/dg| of each layer's heads, float64 [H], the mean over the tokens of a text."""
    decoder = load(source)
    decoder.eval().requires_grad_(False)
    sums = {
        index: torch.zeros(layer.mixer.num_heads, dtype=torch.float64)
        for index, layer in enumerate(source.config.layers)
        if isinstance(layer.mixer, AttentionOptions)
    }
    gates = dict[int, Tensor]()
    for index in sums:
        hook = partial(_with_gates, gates, index, len(sums[index]))
        module: Any = decoder.model.layers[index]
        module.self_attn.attn_sub_norm.register_forward_pre_hook(hook)
    rows = list(zip(text.ids, text.mask, strict=True))
    for row, mask in track(rows, "measuring heads"):
        ids = torch.from_numpy(row[mask])[None]
        with torch.enable_grad():
            _loss(decoder, ids).backward()
        for index, gate in gates.items():
            assert gate.grad is not None
            sums[index] += gate.grad[0].abs().double().sum(0)
    return {index: total / max(1, int(text.mask.sum())) for index, total in sums.items()}


def _loss(decoder: Decoder, ids: Tensor) -> Tensor:
    logits = decoder(ids)[0, :-1].float()
    return F.cross_entropy(logits, ids[0, 1:], reduction="sum")


def _with_gates(
    gates: dict[int, Tensor], index: int, heads: int, module: torch.nn.Module, inputs: tuple[Tensor]
) -> tuple[Tensor]:
    """Multiply each head's output by a gate of 1 that has a gradient."""
    by_head = inputs[0].unflatten(-1, (heads, -1))
    gates[index] = torch.ones(by_head.shape[:-1], dtype=by_head.dtype, requires_grad=True)
    return ((by_head * gates[index][..., None]).flatten(-2),)
