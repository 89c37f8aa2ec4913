"""Running an artifact on a device: numpy, onnxruntime and tokenizers, and no torch."""

from __future__ import annotations

from .artifact import Artifact, CacheSpec, FileEntry, Golden
from .session import Session

__all__ = ["Artifact", "CacheSpec", "FileEntry", "Golden", "Session"]
