"""Runs the scripts of benchmarks/ and of the studies."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch

from tests import forks

ROOT = Path(__file__).parents[2]
FILES = {file.name: file for file in (*ROOT.glob("benchmarks/*.py"), *ROOT.glob("research/*/*.py"))}


def run(script: str, *arguments: str, gpu: bool = True) -> forks.Done:
    """In a child that has torch already. `gpu`: it may see one."""

    def script_of_its_own() -> None:
        paths = [entry or os.getcwd() for entry in sys.path]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths)} | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
        torch.cuda.is_available = torch.cuda.is_available if gpu else lambda: False
        sys.argv = [str(FILES[script]), *arguments]
        sys.path = [str(FILES[script].parent), *paths]
        runpy.run_path(sys.argv[0], run_name="__main__")

    return forks.run(script_of_its_own)
