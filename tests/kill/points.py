"""Processes that are killed at a moment: before each step that changes what is on the disk, or at any time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from diffbit.io import durable

from .. import forks

STEPS = ((os, "fsync"), (os, "replace"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (durable, "exchange"))


def killed_at(step: int, action: Callable[[], object]) -> bool:
    """Run it in a child that is killed before this one of its steps that change the disk; whether it got there."""

    def run() -> None:
        left = step

        def counted(call: Any) -> Any:
            def before(*arguments: Any, **options: Any) -> Any:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return call(*arguments, **options)

            return before

        for module, name in STEPS:
            setattr(module, name, counted(getattr(module, name)))
        action()

    return _killed(forks.ended(forks.fork(run)), signal.SIGKILL)


def killed_after(seconds: float, action: Callable[[], object]) -> bool:
    """Run it in a child that is killed after so many seconds; whether it was."""

    def run() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        action()

    return _killed(forks.ended(forks.fork(run)), signal.SIGALRM)


def _killed(code: int, number: signal.Signals) -> bool:
    assert code in (0, -number), code
    return code == -number
