"""Models: config, decoder with interchangeable mixers and MLPs, states between calls, and checkpoints on disk.

decoder = models.load("folder")                      # any family of models/families/
logits = decoder(input_ids)                          # [B, S, V]
models.save(decoder, "copy", dtype=torch.bfloat16)   # transformers reads it if it supports the model

checkpoint = models.Checkpoint("folder")             # layer by layer, for models larger than memory
block = models.load_block(checkpoint, 0)
"""

from .checkpoint.read import Checkpoint, load, load_block
from .checkpoint.write import CheckpointWriter, save, save_adapter
from .config import LayerSpec, ModelConfig, NumLayers, attention_options, is_experimental, variants
from .decoder import Block, Decoder, num_parameters, rope_for, rope_tables
from .layers.masks import causal_mask
from .layers.rope import RopeScaling
from .layers.state import LayerCache
from .torch_cache import KVCache

__all__ = [
    "Block", "Checkpoint", "CheckpointWriter", "Decoder", "KVCache", "LayerCache", "LayerSpec", "ModelConfig",
    "NumLayers", "RopeScaling", "attention_options", "causal_mask", "is_experimental", "load", "load_block",
    "num_parameters", "rope_for", "rope_tables", "save", "save_adapter", "variants",
]  # fmt: skip
