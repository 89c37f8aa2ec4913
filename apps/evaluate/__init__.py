"""Measures what low bits cost a model: metrics with intervals, comparison, plots, a report.

comparison = compare(["diff", "softmax"], windows, bits=["16", "8", "4", "nf4"])
comparison.rows(); comparison.to_dict()                        # a table; plain JSON
plot_comparison(comparison.to_dict(), "curves.svg")
write_report(ReportData(comparison=comparison.to_dict(), versions=versions()), "report.html")
"""
