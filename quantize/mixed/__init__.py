"""Mixed precision: a format for each linear layer within a budget. search.py says how; `plan` is the way in."""

from .budget import CANDIDATES
from .search import LayerPlan, Plan, Round, plan

__all__ = ["CANDIDATES", "LayerPlan", "Plan", "Round", "plan"]
