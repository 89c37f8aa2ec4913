"""Calibration: tokens that pass through a model layer by layer, and what methods learn from them.

rounds   a layer's weights, one after the other
passes   what a method sees of a layer's calibration: statistics, stages, progress
tokens   the calibration text, in the float model and in the quantized one
states   hidden states of token windows between layers          spill   the same on disk
stats    Gram matrices and magnitudes of the inputs of linear layers
scales   the scales of least error for given statistics
"""

from .passes import Passes
from .rounds import round_all
from .scales import least, search
from .spill import DiskTensor
from .states import ALONE, Batch, States
from .stats import CalibStats, proxy_loss
from .tokens import Tokens

__all__ = [
    "ALONE", "Batch", "CalibStats", "DiskTensor", "Passes", "States", "Tokens", "least", "proxy_loss",
    "round_all", "search",
]  # fmt: skip
