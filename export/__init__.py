"""Exports a checkpoint to an ONNX artifact, and provides the torch model that the artifact is compared with.

export_artifact("model-int4", "model-onnx")          # a folder that `diffbit run` and other loaders read
reference_model("model-int4")                        # what its logits are compared with
export_checkpoint("model-int4", "model-gptq", "gptq")     # a checkpoint that transformers and vLLM read
"""

from .artifact_writer import HalfOverflow, export_artifact, export_demand
from .check import compare_greedy_tokens, compare_with_checkpoint
from .foreign_checkpoint import export_checkpoint
from .reference import reference_model

__all__ = [
    "HalfOverflow", "compare_greedy_tokens", "compare_with_checkpoint", "export_artifact", "export_checkpoint",
    "export_demand", "reference_model",
]  # fmt: skip
