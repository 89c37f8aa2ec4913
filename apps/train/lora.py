"""Low-rank adapters of a float model (LoRA, arXiv 2106.09685, eq. 3):

    y = W x + b + B (A x)      W [N, K] stays, A [r, K] and B [N, r] are trained; B starts at 0

Every linear layer of the decoder's layers has an adapter, except those that a mixer keeps float in any scheme, such as
lambda's. Nothing else is trained. At the end W + B A replaces W, and the adapters are also written in the layout of
PEFT, with an alpha of r, so that PEFT's factor alpha / r is 1 as it is here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...io.errors import DiffbitError
from ...models import Decoder, ModelConfig
from ...quantize import HEAD_MODULE, linear_shapes
from .config import TrainConfig


class LoRALinear(nn.Linear):
    """y = W x + b + up (down x), x [..., K] -> [..., N]."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight, self.bias = linear.weight, linear.bias
        self.down = nn.Parameter(torch.empty(rank, self.in_features, device=self.weight.device))
        self.up = nn.Parameter(torch.zeros(self.out_features, rank, device=self.weight.device))
        nn.init.kaiming_uniform_(self.down, 5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.down), self.up)

    def merged(self) -> nn.Linear:
        """Return the layer without an adapter that computes the same."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=False)
        linear.weight = nn.Parameter((self.weight + self.up @ self.down).detach())
        linear.bias = self.bias
        return linear


def adapted(config: ModelConfig) -> list[str]:
    """Return the modules that get an adapter, in the model's order."""
    stay_float = {
        f"model.layers.{index}.self_attn.{name}"
        for index, layer in enumerate(config.layers)
        for name in layer.mixer.float_linears
    }
    return [name for name in linear_shapes(config) if name != HEAD_MODULE and name not in stay_float]


def add_adapters(model: Decoder, config: TrainConfig) -> dict[str, LoRALinear]:
    """Give the model's linear layers, or those that `config.only` names, adapters, in place; freeze all else. Returns
    the layers with adapters by name."""
    model.requires_grad_(False)
    layers = {}
    for name in adapted(model.config):
        if config.trains(f"{name}.weight"):
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            layers[name] = LoRALinear(linear, config.rank)
            model.set_submodule(name, layers[name])
    if not layers:
        raise DiffbitError(f"only is {config.only!r}, which names no linear layer that can have an adapter")
    return layers


def merge_adapters(model: Decoder) -> None:
    """Replace the layers with adapters by plain ones that compute the same, in place."""
    for name, part in list(model.named_modules()):
        if isinstance(part, LoRALinear):
            model.set_submodule(name, part.merged())
