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
    return _killed(_signalled(step, action, signal.SIGKILL), signal.SIGKILL)


def interrupted_at(step: int, action: Callable[[], object]) -> bool:
    """The same with Ctrl-C, after which a command exits with code 130."""
    code = _signalled(step, action, signal.SIGINT)
    assert code in (0, 130), code
    return code == 130


def _signalled(step: int, action: Callable[[], object], number: signal.Signals) -> int:
    """Run it in a child that gets the signal before this one of its steps; the child's exit code."""

    def run() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
        left = step

        def counted(call: Any) -> Any:
            def before(*arguments: Any, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left == -1:
                    os.kill(os.getpid(), number)
                return call(*arguments, **options)

            return before

        for module, name in STEPS:
            setattr(module, name, counted(getattr(module, name)))
        action()

    return forks.ended(forks.fork(run))


def killed_after(seconds: float, action: Callable[[], object]) -> bool:
    """Run the action in a child, kill it after so many seconds, and return whether it was still running."""

    def run() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        action()

    return _killed(forks.ended(forks.fork(run)), signal.SIGALRM)


def _killed(code: int, number: signal.Signals) -> bool:
    assert code in (0, -number), code
    return code == -number
