"""Checkpoint folders: read (read.py), written (write.py), tensor by tensor.

names.py      names of a model's tensors, and their shapes
folder.py     a folder of safetensors files; gguf_file.py  the same of a GGUF file
adapter.py    a LoRA adapter in PEFT's layout, which is merged into the tensors as they are read
"""

from .names import EMBEDDING, HEAD, is_linear, shapes, stays_float32

__all__ = ["EMBEDDING", "HEAD", "is_linear", "shapes", "stays_float32"]
