"""How good is a model, and what do low bits cost it? Metrics with intervals, comparison, plots, one-page report."""

from .compare import Comparison, compare
from .metrics import Estimate, Scores

__all__ = ["Comparison", "Estimate", "Scores", "compare"]
