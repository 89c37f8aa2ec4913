"""Checkpoint folders: read (read.py), written (write.py), tensor by tensor.

names.py             names of a model's tensors, and their shapes
safetensors_file.py  files of tensors; gguf_file.py  the same of a GGUF file
folder.py            a folder of them
"""

from ...io.safetensors import read_header
from .names import is_linear, shapes

__all__ = ["is_linear", "read_header", "shapes"]
