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
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)$", re.IGNORECASE)  # the name of one file of several


def part_named(name: str, number: str) -> str:
    """Return the name of a model's part, "00001" the first, or a pattern for several, by that of another; a file that
    is no part has its own name."""
    return PART.sub(rf"\g<1>-{number}-of-\g<3>\g<4>", name)


def is_of_a_model(name: str) -> bool:
    """Whether a model has a file of this name, relative to its folder."""
    return name in NAMES or WEIGHTS.fullmatch(name) is not None
