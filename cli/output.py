"""Printing: results to stdout as tables or JSON, remarks and errors to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..progress import is_quiet

MOST_CHARACTERS = 2000  # of an error

if TYPE_CHECKING:
    from ..runtime import Generation, Verification


def print_error(message: str) -> None:
    """An error on stderr, also when quiet: one line of at most MOST_CHARACTERS."""
    line = " ".join(filter(None, map(str.strip, message.splitlines())))
    if len(line) > MOST_CHARACTERS:  # it quotes a file that holds a long name or number
        line = f"{line[: MOST_CHARACTERS // 2]} ... {line[-MOST_CHARACTERS // 2 :]}"
    _print(f"[red]error:[/] {escape(_plain(line))}")


def remark(message: str) -> None:
    """A line on stderr, unless quiet."""
    if not is_quiet():
        _print(escape(_plain(message)))


def _plain(text: str) -> str:
    """Text without control characters: a stranger's file, quoted in a message, could send commands to the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _print(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(text, highlight=False)


def print_json(value: Any) -> None:
    """One JSON value on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str), flush=True)


def print_table(rows: Iterable[Mapping[str, Any]], title: str | None = None) -> None:
    """Rows as a table; the first row's keys are the headings, numbers are right-aligned with 4 significant digits."""
    rows = list(rows)
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in rows[0] if rows else ():
        numeric = all(isinstance(row.get(name), int | float | None) for row in rows)
        heading = name.replace("_", " ") if name.isidentifier() else name
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    # a table written to a file is not wrapped to 80 columns
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape(str(value))


def speed(result: Generation) -> str:
    """What a generated text took, for a remark."""
    cached = f", {result.cached_tokens} of them cached" if result.cached_tokens else ""
    first = result.time_to_first_token_s
    after = f", first token after {1000 * first:.0f} ms" if first is not None else ""
    rate = f", {result.tokens_per_s:.1f} tokens/s" if result.tokens_per_s else ""
    return (
        f"{result.prompt_tokens} prompt tokens{cached}{after}; {len(result.token_ids)} tokens{rate}; stopped by "
        f"{result.finish_reason}"
    )


def attention_name(attention: Mapping[str, Any]) -> str:
    """Such as "keys int4, values int4"."""
    return ", ".join(f"{name} {attention[name]}" for name in ("keys", "values", "qk", "logits") if name in attention)


def verification_dict(artifact: Path, device: str, found: Verification) -> dict[str, Any]:
    """The checks of an artifact on a device, as `verify --json` prints them and the report shows them."""
    checks = [
        {"check": check.name, "result": "ok" if check.passed else "FAILED", "detail": check.detail}
        for check in found.checks
    ]
    return {
        "artifact": str(artifact), "device": device, "native": found.native, "passed": found.passed, "checks": checks,
    }  # fmt: skip
