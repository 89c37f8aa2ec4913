"""Calibration: tokens that pass through a model layer by layer, and what methods learn from them.

passes   what a method sees of a layer's calibration: statistics, stages, progress
tokens   the calibration text, in the float model and in the quantized one
states   hidden states of token windows between layers          spill   the same on disk
stats    Gram matrices and magnitudes of the inputs of linear layers
scales   the scales of least error for given statistics
"""

from .passes import Passes
from .scales import search
from .states import Batch
from .stats import CalibStats, proxy_loss
from .tokens import Tokens

__all__ = ["Batch", "CalibStats", "Passes", "Tokens", "proxy_loss", "search"]
