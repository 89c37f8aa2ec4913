"""Measures models and the cost of low bits: metrics with intervals, comparison, outliers, plots, a report.

comparison = compare(["diff", "softmax"], windows, bits=["16", "8", "4", "nf4"])
comparison.rows(); comparison.to_dict()                        # a table; plain JSON
plot_comparison(comparison.to_dict(), "curves.svg")
write_report(ReportData(comparison=comparison.to_dict(), versions=versions()), "report.html")
"""
