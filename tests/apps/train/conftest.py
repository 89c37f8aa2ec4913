"""What the tests of training share."""

from __future__ import annotations

import numpy as np
import pytest

SENTENCE = "def function_{}(self, value={}):\n    return self.items[{}] + value\n"


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    draw = np.random.default_rng(0).integers(0, 1000, (400, 3))
    path.write_text("".join(SENTENCE.format(*row) for row in draw))
    return str(path)
