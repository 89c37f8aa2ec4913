"""The fixtures of tests/: run these by `python -m pytest research/tests` in the root of the repository."""

from tests.conftest import *  # noqa: F403
