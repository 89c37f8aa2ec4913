"""Progress of long work, on stderr, and one switch that silences it.

A terminal gets a bar; a log file gets a line now and then, so that a long run shows that it lives.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
LINE_EVERY = 15.0  # seconds between lines where stderr is no terminal
_quiet = False


def set_quiet(quiet: bool) -> None:
    """Silence (or restore) every progress bar of this process."""
    global _quiet
    _quiet = quiet


class Progress:
    """`with Progress("quantizing", 1.0) as bar: bar.to(0.3, "layers.3.mlp.up_proj")`.

    total: a whole number is a count of things, shown as such; any other number is a share, shown in percent; None is
    a count that nobody knows. begin: how far the work was when this process took it up.
    """

    def __init__(self, description: str, total: float | None = None, begin: float = 0) -> None:
        self.description = description
        self.total = total
        self.begin = begin
        self._bar: Any = None

    def __enter__(self) -> Self:
        self._started = self._said = time.monotonic()
        if not _quiet and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            count = progress.TaskProgressColumn() if isinstance(self.total, float) else progress.MofNCompleteColumn()
            columns = (
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                count,
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(elapsed_when_finished=True),
            )
            self._bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.description, total=self.total, completed=self.begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def to(self, done: float, at: str = "") -> None:
        """So much is done; `at`: what is next or at hand."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=f"{self.description} {at}".rstrip())
        elif not _quiet and (now := time.monotonic()) - self._said >= LINE_EVERY:
            self._said = now
            print(self._line(done, at, now - self._started), file=sys.stderr, flush=True)

    def _line(self, done: float, at: str, seconds: float) -> str:
        line = f"{self.description}: {at}, " if at else f"{self.description}: "
        if self.total is None:
            return f"{line}{done}"
        line += f"{done / self.total:.0%}" if isinstance(self.total, float) else f"{done} of {self.total}"
        if done <= self.begin:
            return line
        return f"{line}, about {seconds * (self.total - done) / (done - self.begin):.0f} s left"


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate over `items` and show how far it is; `total` is how many there are, where `items` has no length."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Progress(description, total) as bar:
        for done, item in enumerate(items, 1):
            yield item
            bar.to(done)
