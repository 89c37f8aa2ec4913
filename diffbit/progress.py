"""Progress of long work, on stderr, and one switch that silences it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
_quiet = False


def set_quiet(quiet: bool) -> None:
    """Silence (or restore) every progress bar of this process."""
    global _quiet
    _quiet = quiet


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate over `items` behind a progress bar on stderr; no bar in quiet mode or when stderr is no terminal."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    if _quiet or not console.is_terminal:
        yield from items
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        yield from bar.track(items, total=total, description=description)
