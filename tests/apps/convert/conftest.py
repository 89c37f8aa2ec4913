"""Lists what the null test found on a model of one's own."""

from __future__ import annotations

import os
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not (model := os.environ.get("DIFFBIT_NULL_MODEL")):
        return
    terminalreporter.section(f"differences between {model} and its conversion, relative to the logits' spread")
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            differences = [str(value) for name, value in getattr(report, "user_properties", ()) if name == "difference"]
            if differences and report.when == "call":
                name = report.nodeid.rpartition("::test_")[2].replace("[given", " [").replace("[-", "[")
                terminalreporter.write_line(f"{name:50} {'; '.join(dict.fromkeys(differences))}")
