"""The names of the files that a model has: `push` sends no others, and `verify` refuses an artifact that lists others.

It is a list of what is allowed. Any other file is private (hidden files, logs, the options of a training run), of no
use to those who run the model, or code: a page (.html), a script or a library, that runs where such a file is opened.
"""

from __future__ import annotations

import re

# Files in deeper folders: how an embedding model makes one vector (sentence-transformers), and another chat template
POOLING, TOOL_TEMPLATE = "1_Pooling/config.json", "additional_chat_templates/tool_use.jinja"
DEEPER = (POOLING, TOOL_TEMPLATE)
NAMES = frozenset((
    *DEEPER, "modules.json", "quant_config.json",
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
    "adapter_config.json", "quantize_config.json", "quantization_config.json", "quantization_report.json",
    "diffbit.json", "genai_config.json",
))  # fmt: skip
WEIGHTS = re.compile(
    r"[^./\\][^/\\]*\.(safetensors|safetensors\.index\.json|(?i:gguf))"
    r"|model\.onnx(\.data(_\d+)?)?|onnx/model\.onnx(_data(_\d+)?)?",
    re.ASCII,
)


def is_of_a_model(name: str) -> bool:
    """Whether a model has a file of this name, relative to its folder."""
    return name in NAMES or WEIGHTS.fullmatch(name) is not None
