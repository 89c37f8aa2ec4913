"""Calibration tokens on their way through a float model whose layers are in memory one at a time.

At each quantized layer the true output is compared with that of the quantized layer on the same, unquantized input:
the error that this layer adds by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DiffbitError
from ..models import Block, ModelConfig, causal_mask, rope_for
from ..models.layout import EMBEDDING, HEAD
from .linear import QuantLinear
from .model import assemble, quant_linear
from .qtensor import QTensor
from .report import OutputError
from .scheme import Scheme

BATCH_TOKENS = 2048  # that pass a layer at a time


class Calibration:
    """Hidden states of the calibration tokens, carried through the float model from one piece to the next."""

    def __init__(self, config: ModelConfig, ids: Any, mask: Any) -> None:
        self.config = config
        self.ids = torch.as_tensor(ids, dtype=torch.int64)
        if self.ids.dim() != 2 or not self.ids.numel():
            raise DiffbitError(f"calibration tokens have shape {tuple(self.ids.shape)}, wanted [windows, length]")
        if self.ids.min() < 0 or self.ids.max() >= config.vocab_size:
            raise DiffbitError(
                f"calibration tokens run from {self.ids.min()} to {self.ids.max()}, but the model has "
                f"{config.vocab_size}; take the tokenizer that belongs to the model"
            )
        self.mask = torch.ones_like(self.ids, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool()
        if self.mask.shape != self.ids.shape:
            raise DiffbitError(
                f"the calibration mask has shape {tuple(self.mask.shape)}, wanted {tuple(self.ids.shape)}"
            )
        self.counted = self.mask  # of the batch at hand
        self.tokens = int(self.mask.sum())
        self.hidden = torch.empty(0)  # fp32 [n, S, E]
        self.index = -1  # of the piece that comes next: -1 the embedding, then the layers, then the head
        step = max(1, BATCH_TOKENS // self.ids.shape[1])
        self.batches = [slice(i, i + step) for i in range(0, len(self.ids), step)]

    @torch.inference_mode()
    def advance(
        self,
        tensors: dict[str, Tensor],
        quantized: dict[str, QTensor],
        scheme: Scheme,
    ) -> dict[str, float]:
        """Pass the hidden states through a piece's float tensors; the output error of each of its quantized layers."""
        errors: dict[str, OutputError] = {}
        if self.index < 0:
            self.hidden = F.embedding(self.ids, tensors[EMBEDDING]).float()
        elif self.index < self.config.num_layers:
            self._layer(tensors, quantized, scheme, errors)
        elif quantized:  # the head; without it nothing is left to measure
            self._head(tensors, quantized, scheme, errors)
        self.index += 1
        return {name: error.value for name, error in errors.items()}

    def _layer(
        self,
        tensors: dict[str, Tensor],
        quantized: dict[str, QTensor],
        scheme: Scheme,
        errors: dict[str, OutputError],
    ) -> None:
        prefix = f"model.layers.{self.index}."
        with torch.device("meta"):
            block = Block(self.config, self.index)
        state: dict[str, Tensor | QTensor] = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        assemble(block, state, Scheme(), torch.float32)
        for name, weight in quantized.items():
            layer, error = quant_linear(weight, scheme), errors.setdefault(name, OutputError())
            block.get_submodule(name.removeprefix(prefix)).register_forward_hook(self._measure(layer, error))
        length = self.ids.shape[1]
        rope = rope_for(self.config, torch.arange(length)[None])
        for batch in self.batches:
            self.counted = self.mask[batch]
            mask = causal_mask(length, attention_mask=None if self.counted.all() else self.counted)
            self.hidden[batch] = block(self.hidden[batch], rope, mask)

    def _measure(self, layer: QuantLinear, error: OutputError) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
        """A forward hook on a float linear layer."""

        def hook(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            error.add(output[self.counted], layer(inputs[0][self.counted]))

        return hook

    def _head(
        self,
        tensors: dict[str, Tensor],
        quantized: dict[str, QTensor],
        scheme: Scheme,
        errors: dict[str, OutputError],
    ) -> None:
        (name, weight), *_ = quantized.items()
        layer, error = quant_linear(weight, scheme), OutputError()
        exact = tensors[HEAD].float()
        gain = tensors["model.norm.weight"].float()
        for batch in self.batches:
            x = self.hidden[batch][self.mask[batch]]
            x = F.rms_norm(x, x.shape[-1:], gain, self.config.norm_eps)
            error.add(F.linear(x, exact), layer(x))
        errors[name] = error
