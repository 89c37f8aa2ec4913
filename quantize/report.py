"""Reports on a quantized model: the error of each weight, and the model's size under a scheme."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..models import ModelConfig
from ..models.checkpoint.names import EMBEDDING, HEAD, shapes, stays_float32
from .cache import cache_spec
from .scheme import AttentionScheme, Scheme

WIDTHS = {"fp32": 4, "fp16": 2}  # bytes of an artifact's floats


@dataclass(frozen=True)
class WeightReport:
    """One quantized weight.

    weight_error    ||W - Wq|| / ||W||
    output_error    ||X W^T - act(X) Wq^T|| / ||X W^T|| for its inputs X in the float model, over calibration tokens;
                    None without calibration
    proxy_loss      the square of that for its inputs after the earlier quantized layers, which the method saw; None
                    without calibration. For a large head, both are of MEASURED_ROWS rows (layer.py)
    nbytes          bytes in a float32 artifact: codes, scales and zero points
    bits_per_weight 8 nbytes / number of weights
    """

    name: str
    format: str
    shape: tuple[int, int]
    weight_error: float
    output_error: float | None
    proxy_loss: float | None
    bits_per_weight: float
    nbytes: int


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's weights in an artifact, and their average number of bits, float ones included.

    kv_bytes_per_1k_tokens: bytes that 1000 tokens take in the KV cache of one sequence; kv_fixed_bytes: bytes that the
    cache takes whatever its length. Float buffers have the width of the artifact's floats.
    """

    nbytes: int
    parameters: int
    kv_bytes_per_1k_tokens: int
    kv_fixed_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / self.parameters


@dataclass(frozen=True)
class Report:
    """The result of `quantize_checkpoint`: a row per quantized weight, sizes before and after, and warnings."""

    scheme: Scheme
    method: str
    weights: tuple[WeightReport, ...]
    before: Sizes
    after: Sizes
    calibration_tokens: int
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        sizes = {
            when: asdict(size) | {"bits_per_weight": size.bits_per_weight}
            for when, size in (("before", self.before), ("after", self.after))
        }
        return {
            "scheme": self.scheme.to_dict(),
            "method": self.method,
            **sizes,
            "calibration_tokens": self.calibration_tokens,
            "warnings": list(self.warnings),
            "weights": [asdict(weight) for weight in self.weights],
        }


def sizes(
    config: ModelConfig, scheme: Scheme | None = None, dtype: str = "fp32", embedding: torch.dtype = torch.float32
) -> Sizes:
    """Compute the sizes of a model's artifact under a scheme, from shapes alone.

    dtype: "fp32" or "fp16", the artifact's type of everything that is not quantized. embedding: the checkpoint's dtype
    of the table, which a float32 artifact keeps if it has 16 bits and is not shared with the head.
    """
    formats = {} if scheme is None else scheme.formats(config)
    width, tensors = WIDTHS[dtype], dict(shapes(config))
    tied = config.tie_embeddings if scheme is None else scheme.keeps_tied(config)
    if not tied:
        tensors[HEAD] = (config.vocab_size, config.hidden_size)
    nbytes = parameters = 0
    for name, shape in tensors.items():
        count = math.prod(shape)
        format = formats.get(name.removesuffix(".weight"))
        if format is not None:
            nbytes += format.device_nbytes((shape[0], shape[1]), width)
        elif name == EMBEDDING and not tied:
            nbytes += count * min(width, embedding.itemsize)
        elif not stays_float32(name):
            nbytes += count * width
        elif ".lambda_" not in name:  # lambda vectors become a single number in the graph
            nbytes += count * WIDTHS["fp32"]
        parameters += count
    attention = AttentionScheme() if scheme is None else scheme.attention
    cache = cache_spec(config, attention, "float32" if dtype == "fp32" else "float16")
    return Sizes(nbytes, parameters, cache.bytes_per_1k_tokens, cache.fixed_bytes)
