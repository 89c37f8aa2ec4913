"""Shows the progress of long work on stderr.

A terminal shows a bar with the remaining time. A log file gets a line after 5 seconds and then every LINE_EVERY, such
as "quantizing: layers.3.mlp.up_proj, 75%, about 6 s left"; shorter work logs nothing. `set_quiet` silences both.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Self, TypeVar

T = TypeVar("T")
LINE_EVERY = 9.0  # seconds
_quiet = False


def set_quiet(quiet: bool) -> bool:
    """Turn off this process's progress bars and remarks, or turn them on again. Returns `quiet`."""
    global _quiet
    _quiet = quiet
    return quiet


def is_quiet() -> bool:
    return _quiet


class Progress:
    """`with Progress("quantizing", 1.0) as bar: bar.to(0.3, "layers.3.mlp.up_proj")`.

    total: an int counts items, shown as "3 of 12"; a float is shown as a percentage; None: unknown.
    begin: the part that an earlier, interrupted run has finished.
    """

    def __init__(self, description: str, total: float | None = None, begin: float = 0) -> None:
        from rich import progress
        from rich.console import Console

        self.description, self.total, self.begin = description, total, begin
        terminal = sys.stderr.isatty()
        self._logs = not terminal and not _quiet
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn() if isinstance(total, float) else progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(stderr=True),
            transient=True,
            disable=_quiet or not terminal,
            speed_estimate_period=float("inf"),  # an item may take longer than rich's default of 30 s
        )
        self._task = self._bar.add_task(description, total=total)
        self._bar.update(self._task, completed=begin)
        self._started = time.monotonic()
        self._logged = self._started - max(0.0, LINE_EVERY - 5)

    def __enter__(self) -> Self:
        if not self._bar.disable:  # rich 13.8 would end a bar that nobody sees with an empty line
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._bar.disable:
            self._bar.stop()

    def to(self, done: float, at: str = "") -> None:
        """Show that `done` of the total is finished; `at` names the current item."""
        self._bar.update(self._task, completed=done, description=f"{self.description} {at}".rstrip())
        if self._logs and (now := time.monotonic()) - self._logged >= LINE_EVERY:
            self._logged = now
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
    """Iterate over `items` and show progress. total: their number, if `items` has no length."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Progress(description, total) as bar:
        for done, item in enumerate(items, 1):
            yield item
            bar.to(done)
