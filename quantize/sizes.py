"""The size of a model under a scheme: a row for each tensor, from shapes alone. Every size that is told, budgeted or
compared is a sum over these rows.

    in a checkpoint   packed codes, scales and zero points; floats in the checkpoint's dtype
    on the device     what `diffbit export` writes: codes in whole blocks, floats in the artifact's type. The lambda
                      vectors of diff_v1 take nothing, because they become a single number in the graph
    per token         what decoding one token reads: each tensor once, but only a row of an embedding that is not the
                      head, too

The KV cache has a table of its own, `CacheSpec`. Graph, RoPE tables and tokenizer are in neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from ..formats import Format
from ..models import Checkpoint, ModelConfig
from ..models.checkpoint.names import EMBEDDING, layer_of, shapes, stays_float32
from ..ops.cache import CacheSpec
from .device_cache import cache_spec
from .plan import Plan
from .scheme import linear_shapes

FLOAT32 = 4  # bytes
# bytes of an artifact's graph and configuration, and of each layer's part of them: typical, and at most
TYPICAL_GRAPH, LARGEST_GRAPH = (24 << 10, 5 << 10), (48 << 10, 12 << 10)
WIDTHS = {"fp32": FLOAT32, "fp16": 2}  # bytes of an artifact's floats


@dataclass(frozen=True)
class TensorSize:
    """A tensor of a model.

    format         None: float
    stored_width   bytes of a float in the checkpoint
    device_width   bytes of a float in the artifact, or of a scale where the format does not set its width
    is_multiplied  whether a token reads all of it; an embedding that is not the head, too, is only looked up
    """

    name: str
    shape: tuple[int, ...]
    format: Format | None = None
    stored_width: int = FLOAT32
    device_width: int = FLOAT32
    is_multiplied: bool = True

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def weights(self) -> int:
        return math.prod(self.shape)

    @property
    def checkpoint_bytes(self) -> int:
        if self.format is None:
            return self.weights * self.stored_width
        return self.format.nbytes((self.shape[0], self.shape[1]))

    @property
    def device_bytes(self) -> int:
        if self.format is None:
            return self.weights * self.device_width
        return self.format.device_nbytes((self.shape[0], self.shape[1]), self.device_width)

    @property
    def token_bytes(self) -> int:
        row = self.device_bytes // self.shape[0] if self.name == EMBEDDING else 0
        return self.device_bytes * self.is_multiplied + row


@dataclass(frozen=True)
class Sizes:
    """The tensors of a model under a scheme, and its KV cache."""

    tensors: tuple[TensorSize, ...]
    cache: CacheSpec

    @property
    def nbytes(self) -> int:
        """Bytes of the weights on the device."""
        return sum(tensor.device_bytes for tensor in self.tensors)

    @property
    def checkpoint_bytes(self) -> int:
        return sum(tensor.checkpoint_bytes for tensor in self.tensors)

    @property
    def token_bytes(self) -> int:
        """Bytes of weights that decoding one token reads."""
        return sum(tensor.token_bytes for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        return sum(tensor.weights for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Return the average bits on the device, float weights included."""
        return 8 * self.nbytes / self.parameters

    @property
    def kv_bytes_per_1k_tokens(self) -> int:
        """Bytes that 1000 tokens of one sequence take in the KV cache, beside the fixed ones."""
        return self.cache.bytes_per_1k_tokens

    @property
    def kv_fixed_bytes(self) -> int:
        """Bytes that the KV cache of one sequence takes whatever its length."""
        return self.cache.fixed_bytes

    def layers(self) -> Iterator[list[TensorSize]]:
        """Yield what is in memory at a time: the tensors of each decoder layer, and each tensor outside them alone."""
        for index, group in groupby(self.tensors, lambda tensor: layer_of(tensor.name)):
            tensors = list(group)
            yield from [tensors] if index is not None else ([tensor] for tensor in tensors)

    def to_dict(self) -> dict[str, Any]:
        """Return the sums that a report tells, as plain JSON."""
        names = ("nbytes", "parameters", "kv_bytes_per_1k_tokens", "kv_fixed_bytes", "bits_per_weight")
        return {name: getattr(self, name) for name in names}


def sizes(plan: Plan, dtype: str = "fp32", stored: torch.dtype = torch.float32) -> Sizes:
    """Return the sizes of a model.

    dtype: "fp32" or "fp16", the artifact's type of everything that is not quantized, the KV cache included. stored: the
    checkpoint's dtype. A float32 artifact keeps an embedding of 16 bits that is not the head, too, as it is.
    """
    config, tensors = plan.config, []
    for name, shape in shapes(config).items():
        format = plan.formats.get(name.removesuffix(".weight"))
        is_looked_up = name == EMBEDDING and not config.tie_embeddings
        stored_width, device_width = stored.itemsize, WIDTHS[dtype]
        if stays_float32(name):
            stored_width, device_width = FLOAT32, 0 if ".lambda_" in name else FLOAT32
        elif is_looked_up and format is None:
            device_width = min(stored_width, device_width)
        tensors.append(TensorSize(name, shape, format, stored_width, device_width, not is_looked_up))
    return Sizes(tuple(tensors), cache_spec(config, plan.scheme.attention, "float32" if dtype == "fp32" else "float16"))


def overhead(checkpoint: Checkpoint, config: ModelConfig, graph: tuple[int, int] = LARGEST_GRAPH) -> int:
    """Return an upper bound of an artifact's bytes beside its weights: tokenizer, RoPE tables, graph, padding."""
    tables = 2 * config.max_position * (config.rope_width // 2) * 4 * (1 if config.local_rope_theta is None else 2)
    padding = sum(4096 if 4 * math.prod(shape) >= 1 << 20 else 64 for shape in linear_shapes(config).values())
    return tokenizer_bytes(checkpoint) + tables + padding + graph[0] + graph[1] * config.num_layers


def tokenizer_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of a checkpoint's tokenizer files."""
    return sum(map(len, checkpoint.tokenizer_files.values()))
