"""Measures models and the cost of low bits: metrics with intervals, comparison, outliers, plots, a report.

comparison = compare(["diff", "softmax"], windows, bits=["16", "8", "4", "nf4"])
comparison.rows(); comparison.to_dict()                        # a table; plain JSON
plot_comparison(comparison.to_dict(), "curves.svg")
write_report(ReportData(comparison=comparison.to_dict(), versions=versions()), "report.html")
"""

from .compare import Comparison, compare
from .metrics import Estimate, Scores
from .plots import plot_comparison, plot_outliers, plot_plan
from .report import ReportData, versions, write_report

__all__ = [
    "Comparison",
    "Estimate",
    "ReportData",
    "Scores",
    "compare",
    "plot_comparison",
    "plot_outliers",
    "plot_plan",
    "versions",
    "write_report",
]
