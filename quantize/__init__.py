"""Low-bit weights: number formats, methods that round to them, schemes that say what goes where, checkpoints."""

from .formats import Format, IntFormat, parse_format
from .qtensor import QTensor
from .rtn import rtn

__all__ = ["Format", "IntFormat", "QTensor", "parse_format", "rtn"]
