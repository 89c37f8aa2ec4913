"""What the tests of training share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

SENTENCE = "def function_{}(self, value={}):\n    return self.items[{}] + value\n"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    draw = np.random.default_rng(0).integers(0, 1000, (400, 3))
    path.write_text("".join(SENTENCE.format(*row) for row in draw))
    return str(path)
