"""Models: config, decoder with interchangeable attention, KV cache, and checkpoints on disk.

decoder = models.load("folder")                      # a llama, diffllama or diff_llama_v2 folder
logits = decoder(input_ids)                          # [B, S, V]
models.save(decoder, "copy", dtype=torch.bfloat16)   # transformers reads it

checkpoint = models.Checkpoint("folder")             # layer by layer, for models larger than memory
block = models.load_block(checkpoint, 0)
"""

from .attention import variant, variants
from .cache import KVCache, LayerCache
from .checkpoint.read import Checkpoint, load, load_block
from .checkpoint.write import CheckpointWriter, save
from .config import ModelConfig, RopeScaling
from .decoder import Block, Decoder, num_parameters
from .layers.masks import causal_mask
from .layers.rope import rope_for, rope_tables

__all__ = [
    "Block",
    "Checkpoint",
    "CheckpointWriter",
    "Decoder",
    "KVCache",
    "LayerCache",
    "ModelConfig",
    "RopeScaling",
    "causal_mask",
    "load",
    "load_block",
    "num_parameters",
    "rope_for",
    "rope_tables",
    "save",
    "variant",
    "variants",
]
