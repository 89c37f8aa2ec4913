"""The fixtures of tests/: run these by `python -m pytest research/tests` in the root of the repository."""

import os
import sys
from pathlib import Path

import torch

from tests.conftest import *  # noqa: F403

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
if not torch.cuda.is_available():  # Triton then runs its kernels on the CPU; it reads this when it is first imported
    os.environ["TRITON_INTERPRET"] = "1"
