"""Predicts the resources that exporting a checkpoint needs, from shapes alone, before anything is read.

Memory is that of the largest table or layer: for a float matrix its stored form, fp32 and a transposed copy for MatMul;
for a quantized one its packed form and codes. For the golden prompt, the head is multiplied some rows at a time.
"""

from __future__ import annotations

import math

import torch

from ..formats.base import LARGE
from ..models import Checkpoint, ModelConfig, num_parameters
from ..quantize import read_scheme
from ..quantize.demand import SLACK, Demand
from ..quantize.report import sizes
from ..quantize.scheme import EMBEDDING_MODULE, HEAD_MODULE, Scheme, linear_shapes, weight_shapes

GRAPH = 24 << 10, 5 << 10  # bytes of a graph and the configuration, and of each layer's part of them
GRAPH_AT_MOST = 48 << 10, 12 << 10
WRITTEN = 3e8  # bytes per second
COMPUTED = 4e8  # weights per second, for the golden prompt


def export_demand(checkpoint: Checkpoint, dtype: str = "fp32", scheme: Scheme | None = None) -> Demand:
    """Predict the demand of `export_artifact`. scheme: a scheme to be quantized with first; None: as it is."""
    config = checkpoint.config
    scheme = scheme or read_scheme(checkpoint) or Scheme()
    formats = scheme.formats(config)
    stored: torch.dtype = getattr(torch, checkpoint.dtype)
    width, tied = stored.itemsize, scheme.keeps_tied(config)
    output = sizes(config, scheme, dtype, stored).nbytes + overhead(checkpoint, config, GRAPH)

    def held(module: str, count: int) -> int:
        if module in formats:
            return 2 * count + (4 * min(count, LARGE) if module == HEAD_MODULE or tied else 0)
        if module == EMBEDDING_MODULE:
            return count * (width + (4 if tied or width > 2 else 0))
        return count * (width + (8 if tied else 12))

    weights = weight_shapes(config)
    tables = [held(module, math.prod(weights[module])) for module in (EMBEDDING_MODULE, HEAD_MODULE)]
    if tied:
        tables = tables[:1]
    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        mine = [held(module, math.prod(shape)) for module, shape in weights.items() if module.startswith(prefix)]
        layers.append(sum(mine))
    memory = max(*tables, *layers)
    return Demand(memory + min(SLACK, memory), output, output)


def export_seconds(config: ModelConfig, output: int) -> float:
    """Estimate the time of an export in seconds; output: bytes of the artifact."""
    return output / WRITTEN + num_parameters(config) / COMPUTED


def overhead(checkpoint: Checkpoint, config: ModelConfig, graph: tuple[int, int] = GRAPH_AT_MOST) -> int:
    """Return an upper bound of an artifact's bytes without its weights: tokenizer, RoPE tables, graph, padding."""
    tokenizer = sum(map(len, checkpoint.tokenizer_files.values()))
    tables = 2 * config.max_position * (config.rope_width // 2) * 4 * (1 if config.local_rope_theta is None else 2)
    padding = sum(4096 if 4 * math.prod(shape) >= 1 << 20 else 64 for shape in linear_shapes(config).values())
    return tokenizer + tables + padding + graph[0] + graph[1] * config.num_layers
