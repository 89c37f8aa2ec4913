"""The torch model that an artifact is held against: the checkpoint's, with the activations of the runtime's operators.

An operator rounds its input as it must, whatever the scheme says about activations: `Format.device_rounding`. A scheme
that asks for what the operators cannot do is refused here, before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import DiffbitError
from ..models import Block, Checkpoint, Decoder, rope_for
from ..models.checkpoint.names import EMBEDDING, HEAD
from ..models.layers.norm import RMSNorm
from ..quantize import QTensor, QuantLinear, Scheme, load, load_block, read_scheme, read_weight
from ..quantize.model import assemble

NORM = "model.norm.weight"
COPIES = 3


def reference_model(checkpoint: str | Path | Checkpoint) -> Decoder:
    """The whole model of a checkpoint as its artifact computes it."""
    checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    check_scheme(checkpoint)
    decoder = load(checkpoint).eval()
    _as_exported(decoder)
    return decoder


class Stream:
    """The same model one layer at a time: `embedding`, then `blocks`, then `head`, with a prompt flowing through.

    Each piece is yielded to be written, and dropped after the hidden states have passed it. Beside the prompt flow
    COPIES of it whose hidden states get relative noise of `noise` after each layer: how far their logits come out tells
    how far those of another machine, whose sums end in other bits, may be off without anything being wrong.
    """

    def __init__(self, checkpoint: Checkpoint, prompt: list[int], noise: float) -> None:
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self._ids = torch.tensor([prompt] * (1 + COPIES))
        self._rope = rope_for(self.config, torch.arange(len(prompt))[None])
        self._noise = noise
        self._generator = torch.Generator().manual_seed(0)
        self._x: Tensor  # [1 + COPIES, S, E], the first row without noise

    def embedding(self) -> Tensor:
        """The embedding table [V, E], in its stored dtype."""
        table = _float(read_weight(self.checkpoint, EMBEDDING))
        self._x = table[self._ids].float()
        return table

    def blocks(self) -> Iterator[Block]:
        for index in range(self.config.num_layers):
            block = load_block(self.checkpoint, index).eval()
            _as_exported(block)
            yield block
            with torch.inference_mode():
                x = block(self._x, self._rope)
                x[1:] *= 1 + self._noise * torch.randn(x[1:].shape, generator=self._generator)
                self._x = x

    def head(self) -> tuple[RMSNorm, nn.Module | None, Tensor]:
        """The final norm, the head (None: tied to the embedding), and the logits [1 + COPIES, V] after the prompt."""
        config, names = self.config, {"norm.weight": NORM}
        with torch.device("meta"):
            top = nn.ModuleDict({"norm": RMSNorm(config.hidden_size, config.norm_eps)})
            if not config.tie_embeddings:
                top["lm_head"] = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
                names[HEAD] = HEAD
        weights = {name: read_weight(self.checkpoint, stored) for name, stored in names.items()}
        assemble(top, weights, read_scheme(self.checkpoint) or Scheme(), torch.float32)
        _as_exported(top)
        norm, head = top["norm"], top["lm_head"] if HEAD in names else None
        assert isinstance(norm, RMSNorm)
        with torch.inference_mode():
            last = norm(self._x[:, -1:])
            if head is None:
                table = _float(read_weight(self.checkpoint, EMBEDDING))
                return norm, None, (last @ table.float().T)[:, 0]
            return norm, head, head(last)[:, 0]


def check_scheme(checkpoint: Checkpoint) -> None:
    """Refuse what ONNX Runtime has no operator for."""
    scheme = read_scheme(checkpoint) or Scheme()
    if scheme.activations is not None:
        for module, format in scheme.formats(checkpoint.config).items():
            if scheme.activations not in format.activations:
                raise DiffbitError(
                    f"{checkpoint.path}: {module} has {format} weights and the scheme asks for {scheme.activations} "
                    "activations, but ONNX Runtime multiplies those in float; choose another format, or leave "
                    "activations out"
                )


def _as_exported(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, QuantLinear):
            part.rounding = part.weight.format.device_rounding(part.rounding)


def _float(weight: Tensor | QTensor) -> Tensor:
    assert isinstance(weight, Tensor)  # neither the embedding nor a norm is ever quantized
    return weight
