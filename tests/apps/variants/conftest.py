from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    """Tests of gradients turn them on themselves."""
    with torch.no_grad():
        yield
