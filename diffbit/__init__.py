"""diffbit turns a Differential Transformer checkpoint into a low-bit model for a device, and measures what the bits
cost.

The names below cover the path from a checkpoint to tokens; the packages (diffbit.models, diffbit.quantize, ...) contain
the rest. Each name is imported on first use, so `import diffbit` does not need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .io.errors import DiffbitError
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .apps.convert.write import convert
    from .apps.evaluate.compare import compare
    from .cli.automatic import quantize_model
    from .export import export_artifact
    from .formats import parse_format
    from .quantize import Scheme, load, quantize_checkpoint
    from .runtime import Chat, Sampler, Session, Tokenizer
    from .runtime.generate import generate
    from .runtime.verify import verify

__all__ = [
    "Chat", "DiffbitError", "Sampler", "Scheme", "Session", "Tokenizer", "compare", "convert", "export_artifact",
    "generate", "load", "parse_format", "quantize_checkpoint", "quantize_model", "verify",
]  # fmt: skip

_PACKAGE = {"compare": "apps.evaluate.compare", "convert": "apps.convert.write"}
_PACKAGE |= {"export_artifact": "export", "parse_format": "formats", "quantize_model": "cli.automatic"}
_PACKAGE |= dict.fromkeys(("Scheme", "load", "quantize_checkpoint"), "quantize")
_PACKAGE |= dict.fromkeys(("Chat", "Sampler", "Session", "Tokenizer", "generate", "verify"), "runtime")


def __getattr__(name: str) -> object:
    if name not in _PACKAGE:
        raise AttributeError(f"module 'diffbit' has no attribute {name!r}")
    return getattr(import_module(f".{_PACKAGE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
