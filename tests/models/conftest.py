from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    """Tests that train turn gradients on themselves."""
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True, scope="session")
def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
