"""Printing: results to stdout as tables or JSON, remarks and errors to stderr; and what another command prints."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..io.errors import shortened
from ..io.progress import is_quiet
from ..runtime.child_process import python

if TYPE_CHECKING:
    from ..runtime import Verification


def out_of_memory(error: RuntimeError | MemoryError | OSError) -> str | None:
    """Return a sentence if torch, numpy or a mapping had too little memory, of a GPU or of the machine; torch is not
    imported here."""
    reason = (getattr(error, "strerror", None) or str(error)).partition("\n")[0]
    shown = f" ({reason})" if reason else ""  # Python's own error says nothing
    if type(error).__name__ == "OutOfMemoryError":
        return f"the GPU's memory does not suffice{shown}; use shorter windows or a smaller batch, or --device cpu"
    mapping_failed = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or mapping_failed or "can't allocate memory" in reason:
        return f"the memory does not suffice{shown}; use a shorter context, shorter windows or a smaller batch"
    return None


def print_error(message: str) -> None:
    """Print an error to stderr, also with --quiet: one line, `shortened`."""
    line = shortened(" ".join(filter(None, map(str.strip, message.splitlines()))))
    _print(f"[red]error:[/] {escape(_wrapped(_plain(line), len('error: ')))}")


def remark(message: str) -> None:
    """Print a line to stderr, unless --quiet is set."""
    if not is_quiet():
        _print(escape(_wrapped(_plain(message))))


def _wrapped(text: str, begin: int = 0) -> str:
    """Break the lines of a text between words, if they go to a terminal, so that words and paths can be copied.

    begin: columns that are taken before it.
    """
    if not sys.stderr.isatty():
        return text
    columns = max(shutil.get_terminal_size().columns, 20)
    lines = [
        textwrap.fill(line, columns, initial_indent=" " * begin, break_long_words=False, break_on_hyphens=False)
        if len(line) + begin > columns
        else " " * begin + line
        for line in text.split("\n")
    ]
    return "\n".join(lines)[begin:]


def _plain(text: str) -> str:
    """Remove control characters: a message that quotes an untrusted file could otherwise send terminal commands."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _print(text: str) -> None:
    Console(stderr=True, soft_wrap=True, emoji=False).print(text, highlight=False)


def print_json(value: Any) -> None:
    """Print one JSON value to stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str), flush=True)


def json_of(*arguments: str) -> Any:
    """Return what `diffbit ARGUMENTS --json` prints, run in a process of its own: so an app uses another's command."""
    quiet = ["--quiet"] if is_quiet() else []
    command = [*python("diffbit.cli.app", "main"), arguments[0], "--json", *quiet, *arguments[1:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8")
    if done.returncode:
        raise typer.Exit(done.returncode)  # the command has said why on stderr
    return json.loads(done.stdout)


def print_table(rows: Iterable[Mapping[str, Any]], title: str | None = None) -> None:
    """Print rows as a table: headings from the first row's keys, numbers right-aligned with 4 significant digits.

    Columns for which a terminal is too narrow follow in further tables, each with the columns that name the rows.
    """
    rows = list(rows)
    # a table written to a file is not wrapped to 80 columns
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
    unbound = console.options.update(max_width=10_000)
    names = list(rows[0]) if rows else []
    keys = _keys(rows, names)
    shown, rest = names, list[str]()
    while True:
        table = _table(rows, shown, title)
        if len(shown) > len(keys) + 1 and console.measure(table, options=unbound).maximum > console.width:
            shown, rest = shown[:-1], [shown[-1], *rest]
            continue
        console.print(table)
        if not rest:
            return
        shown, rest, title = [*(name for name in keys if name not in rest), *rest], [], None


def _keys(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Return the columns that name the rows: the first ones, up to four, that no two rows have in common, and that
    differ."""
    for count in range(1, 5):
        if len({tuple(str(row.get(name)) for name in names[:count]) for row in rows}) == len(rows):
            break
    varied = [name for name in names[:count] if len({str(row.get(name)) for row in rows}) > 1]
    return varied or list(names[:1])


def _table(rows: Sequence[Mapping[str, Any]], names: Sequence[str], title: str | None) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in names:
        heading = name.replace("_", " ") if name.isidentifier() else name
        table.add_column(heading, justify="right" if _is_numeric(rows, name) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    return table


def _is_numeric(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return all(isinstance(row.get(name), int | float | None) for row in rows)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape(str(value))


def verification_dict(artifact: Path, device: str, verification: Verification) -> dict[str, Any]:
    """Return the checks of an artifact on a device, as `verify --json` and the report show them."""
    checks = [
        {"check": check.name, "result": "ok" if check.passed else "FAILED", "detail": check.detail}
        for check in verification.checks
    ]
    return {
        "artifact": str(artifact),
        "device": device,
        "native": verification.native,
        "passed": verification.passed,
        "checks": checks,
    }
