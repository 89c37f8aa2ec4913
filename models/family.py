"""How checkpoints of one kind lie on disk: their config.json, their tensors' names, the order of rows.

A family is one file in models/families/, found by listing the folder, with FAMILIES, one Family for each model_type. It
translates to and from what the model has in memory: a ModelConfig, and tensors under canonical names in canonical order
(attention/__init__.py). Nothing else asks for a model_type, and a layout is never guessed from the name of a tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from .config import ModelConfig


@dataclass(frozen=True, eq=False)
class Stored:
    """Where a tensor of the model lies on disk.

    names   of the tensor there; several are alternatives
    rows    canonical = on disk[rows]; None: as they are
    first, of_rows   of a fused tensor, which has `of_rows` rows on disk: the canonical one begins at row `first`;
            of_rows 0: it is the whole of it
    folded  the name on disk of a norm's weight [folded_width] that stands before a projection: it is multiplied into
            the columns, folded_width at a time
    """

    names: tuple[str, ...]
    rows: Tensor | None = None
    first: int = 0
    of_rows: int = 0
    folded: str | None = None
    folded_width: int = 0


@dataclass(frozen=True)
class Family(ABC):
    model_type: str
    quantized: ClassVar[bool] = True  # may a folder be a quantized one?

    def knows(self, values: Mapping[str, Any]) -> bool:
        """Is this parsed config.json the family's?"""
        return bool(values.get("model_type") == self.model_type)

    @abstractmethod
    def read(self, values: Mapping[str, Any]) -> ModelConfig:
        """The config of a parsed config.json; a DiffbitError (that names no file) where diffbit cannot compute it."""

    def write(self, config: ModelConfig) -> dict[str, Any] | None:
        """The fields of a config.json; None where the family cannot hold this model, or is only read."""
        return None

    def stored(self, config: ModelConfig, name: str) -> Stored:
        """Of the tensor of this canonical name."""
        return Stored((name,))

    def hint(self, name: str) -> str:
        """What to tell the user of a tensor on disk that the model has not."""
        return ""
