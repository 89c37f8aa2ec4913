"""Float models under a method that runs before rounding, in memory, for its tests."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from diffbit.models import Decoder, ModelConfig
from diffbit.models.checkpoint.names import EMBEDDING, HEAD
from diffbit.quantize import Scheme, resolve
from diffbit.quantize.calibration import Passes, Tokens
from diffbit.quantize.layer import Layer

VOCABULARY = 61


def config_of(attention: str, **changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "intermediate_size": 96, "max_position": 64,
    }  # fmt: skip
    return ModelConfig.uniform(attention=attention, **(values | changes))


def random_decoder(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    """Every part of it shows in the logits: large weights, norms far from 1."""
    torch.manual_seed(seed)
    decoder = Decoder(config).to(dtype)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "lambda_q" in name or "lambda_k" in name:
                parameter.normal_(0, 0.4)
            else:
                parameter.normal_(0, 0.15)
    return decoder.eval()


def random_ids(batch: int = 4, length: int = 24, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def layers(decoder: Decoder, scheme: Scheme | None = None) -> Iterator[Layer]:
    """Each Layer of a model, an untied head with it."""
    return (passes.layer for passes in passes_of(decoder, scheme))


def passes_of(decoder: Decoder, scheme: Scheme | None = None, ids: Tensor | None = None) -> Iterator[Passes]:
    """The passes of each layer of a model; the tokens advance behind a layer once its turn is over."""
    config = decoder.config
    scheme = scheme or Scheme()
    state = {name: tensor.detach() for name, tensor in decoder.state_dict().items()}
    state.setdefault(HEAD, state[EMBEDDING])
    tokens = None if ids is None else Tokens(config, ids)
    for index in range(-1, config.num_layers + 1):
        names = [name for name in state if name.startswith(f"model.layers.{index}.")]
        last = [name for name in state if name.startswith("model.norm.")]
        names = {-1: [EMBEDDING], config.num_layers: [*last, HEAD]}.get(index, names)
        of_layer = {module: format for module, format in scheme.formats(config).items() if f"{module}.weight" in names}
        passes = Passes(Layer(resolve(config, scheme), index, of_layer, {name: state[name] for name in names}), tokens)
        yield passes
        passes.advance({})


def transformed(
    decoder: Decoder, method: ModuleType, scheme: Scheme | None = None, ids: Tensor | None = None
) -> Decoder:
    """The float model that a method makes; its weights in the dtype they have."""
    untie = hasattr(method, "config")
    config = method.config(decoder.config) if untie else decoder.config
    tensors: dict[str, Tensor] = {}
    for passes in passes_of(decoder, scheme, ids):
        method.transform(passes.layer, passes)
        tensors |= passes.layer.tensors
    if config.tie_embeddings:
        del tensors[HEAD]
    with torch.device("meta"):
        model = Decoder(config)
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.eval()


@torch.inference_mode()
def logits64(decoder: Decoder, ids: Tensor) -> Tensor:
    """Logits of a float64 model: norms, rotary embedding and softmax ask for float32 by .float(), here float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        logits: Tensor = decoder(ids)
    return logits
