"""Mixed precision: a format for each linear layer, the embedding and the head, so that a model loses least within a
budget of bits or bytes.

allocation = allocate("model", nbytes=40_000_000, method="guided", calibration=token_ids)
quantize_checkpoint("model", "model-mixed", allocation.scheme, method="guided", calibration=token_ids)

mixed        the candidates and their bytes, the greedy choice by loss a byte, the check of the chosen model
mixed_cache  formats for the KV cache of each layer
sensitivity  losses as they are estimated, from one forward and one backward pass
losses       losses as they are measured, and the divergence of two models
"""

from .mixed import Allocation, LayerChoice, allocate, allocation_demand
from .mixed_cache import CacheAllocation, allocate_cache

__all__ = ["Allocation", "CacheAllocation", "LayerChoice", "allocate", "allocate_cache", "allocation_demand"]
