"""pytest -p tests.every_point tests/kill: kills commands before each step that changes the disk, not before some."""

from __future__ import annotations

from dataclasses import replace

import pytest


@pytest.fixture(autouse=True, scope="session")
def every_point() -> None:
    from .kill.test_commands import COMMANDS

    for name, command in COMMANDS.items():
        COMMANDS[name] = replace(command, every=1)
