"""The layout of a checkpoint family on disk: config.json, tensor names and row order.

A family is one file in models/families/, found by listing the folder, with FAMILIES, one Family per model_type. It
converts between the disk and a ModelConfig with tensors of canonical names and order (attention/__init__.py). Nothing
else uses the model_type, and which family a folder is of is never guessed from a tensor's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from ..config import ModelConfig

ROPE = frozenset((
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings",
))  # fmt: skip


@dataclass(frozen=True, eq=False)
class Stored:
    """Where a tensor of the model is stored on disk.

    names   the tensor's name on disk; several are alternatives
    rows    canonical = on disk[rows]; None: the same order
    first, of_rows   for a fused tensor of `of_rows` rows on disk: the canonical tensor begins at row `first`;
            of_rows 0: the tensor is not fused
    folded  the name on disk of a norm's weight [folded_width] before a projection, to multiply into the projection's
            columns, folded_width at a time
    plus, times   canonical = (on disk + plus) * times, in float32, where a family has such factors
    """

    names: tuple[str, ...]
    rows: Tensor | None = None
    first: int = 0
    of_rows: int = 0
    folded: str | None = None
    folded_width: int = 0
    plus: float = 0.0
    times: float = 1.0


def parts(name: str) -> tuple[str | None, str, str]:
    """Return (layer, module, parameter) of a canonical name: ("3", "mlp.up_proj", "weight"), (None, "lm_head", ...)."""
    module, _, parameter = name.rpartition(".")
    if not module.startswith("model.layers."):
        return None, module, parameter
    index, module = module.removeprefix("model.layers.").split(".", 1)
    return index, module, parameter


@dataclass(frozen=True)
class Family(ABC):
    """A layout of checkpoint folders: what one `model_type` reads and writes.

    writes: a rank. Of the families that can represent a model, the one with the lowest rank writes it (`family_for`).
    All but diffbit's generic one have 1, and no two of these can represent the same model. None: the family only reads
    folders. reads: the fields among those of _changing.py that `read` computes or refuses itself; others are refused
    before.
    """

    model_type: str
    writes: int | None = field(default=None, kw_only=True)
    reads: frozenset[str] = field(default=ROPE, kw_only=True)
    quantized: ClassVar[bool] = True  # whether folders may be quantized
    weights: ClassVar[str] = "model.safetensors"  # the file, or the file whose index is beside it

    def knows(self, values: Mapping[str, Any]) -> bool:
        """Whether this parsed config.json belongs to the family."""
        return bool(values.get("model_type") == self.model_type)

    def ignores(self, name: str) -> bool:
        """Whether a tensor on disk is not the model's."""
        return name.endswith(".rotary_emb.inv_freq")  # saved by older transformers; computed from the config

    def opened(self, values: Mapping[str, Any], names: Collection[str]) -> Family:
        """Return the family for a folder with this parsed config.json and tensors of these names; another one if `read`
        or `stored` depends on them."""
        return self

    @abstractmethod
    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        """Return the config of a parsed config.json; raises DiffbitError (without a file name) if unsupported."""

    def write(self, config: ModelConfig) -> dict[str, Any] | None:
        """Return the fields of a config.json; None if the family cannot represent this model or is read-only."""
        return None

    def stored(self, config: ModelConfig, name: str) -> Stored:
        """Return where the tensor of this canonical name is stored."""
        return Stored((name,))

    def hint(self, name: str) -> str:
        """Return a hint for the error about a tensor on disk that the model does not have."""
        return ""
