"""Progress of long work, on stderr, and one switch that silences it.

A terminal gets a bar; a log file gets a line now and then, so that a long run shows that it lives.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")
LINE_EVERY = 15.0  # seconds between lines where stderr is no terminal
_quiet = False


def set_quiet(quiet: bool) -> None:
    """Silence (or restore) every progress bar of this process."""
    global _quiet
    _quiet = quiet


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate over `items` and show how far it is; `total` is how many there are, where `items` has no length."""
    if _quiet:
        yield from items
        return
    if total is None and isinstance(items, Sized):
        total = len(items)
    if not sys.stderr.isatty():
        yield from _lines(items, description, total)
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield from bar.track(items, total=total, description=description)


def _lines(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    started = said = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - said >= LINE_EVERY:
            said = now
            left = "" if total is None else f" of {total}, about {(now - started) * (total - done) / done:.0f} s left"
            print(f"{description}: {done}{left}", file=sys.stderr, flush=True)
