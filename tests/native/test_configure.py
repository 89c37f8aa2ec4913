"""What CMake makes of a machine: with or without an NVIDIA card, with an nvcc that is old, broken or missing.

The CPU's kernels are always built. Nothing is compiled here but what CMake compiles to look around.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from .host import ROOT

pytestmark = pytest.mark.slow

NO_CARD = "exit 9"
H100 = "echo 9.0"


@dataclass(frozen=True)
class Configured:
    output: str
    commands: list[str]  # of the compiler, one for each file

    @property
    def architectures(self) -> set[str]:
        return set(re.findall(r"-gencode=arch=compute_(\w+)", " ".join(self.commands)))

    @property
    def instruction_sets(self) -> set[str]:
        return set(re.findall(r"-DDIFFBIT_ISA=(\w+)", " ".join(self.commands)))

    @property
    def has_cpu_kernels(self) -> bool:
        return any(command.endswith("cpu/ternary/scalar.cpp") for command in self.commands)


@dataclass(frozen=True)
class Machine:
    folder: Path

    def tool(self, name: str, script: str) -> Path:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def configure(self, *options: str, nvidia_smi: str, nvcc: Path | None = None) -> Configured:
        self.tool("nvidia-smi", nvidia_smi)
        environment = {**os.environ, "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        if nvcc is not None:
            environment["CUDACXX"] = str(nvcc)
        build = self.folder / "build"
        command = ["cmake", "-S", str(ROOT / "csrc"), "-B", str(build), "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *options]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        commands = [entry["command"] for entry in json.loads((build / "compile_commands.json").read_text())]
        return Configured(" ".join((done.stdout + done.stderr).split()), commands)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def real_nvcc() -> str:
    return shutil.which("nvcc") or pytest.skip("needs nvcc")


def test_cuda_is_compiled_only_where_it_is_asked_for(machine: Machine) -> None:
    for _ in range(2):  # and again in the same folder
        configured = machine.configure(nvidia_smi=NO_CARD)
        assert "no kernels for NVIDIA GPUs: ask for them with -DDIFFBIT_CUDA=ON" in configured.output
        assert configured.has_cpu_kernels and not configured.architectures


def test_a_card_gets_its_own_kernels(machine: Machine) -> None:
    real_nvcc()
    for _ in range(2):
        configured = machine.configure(nvidia_smi="echo 9.0; echo 8.6; echo 9.0")
        assert configured.architectures == {"86", "90a"} and configured.has_cpu_kernels


def test_an_old_compiler_drops_the_architecture(machine: Machine) -> None:
    """As Debian's nvcc 11.8, which knows sm_90 and not sm_90a."""
    refuse = """case "$*" in *90a*) echo "nvcc fatal : Unsupported gpu architecture 'compute_90a'" >&2; exit 1;; esac"""
    nvcc = machine.tool("nvcc", f'{refuse}\nexec {real_nvcc()} "$@"')
    options = ("-DDIFFBIT_CUDA=ON", "-DDIFFBIT_CUDA_ARCHITECTURES=80 90a")
    configured = machine.configure(*options, nvidia_smi=NO_CARD, nvcc=nvcc)
    assert re.search("no kernels for sm_90a: nvcc .* Unsupported gpu architecture 'compute_90a'", configured.output)
    assert configured.architectures == {"80"} and configured.has_cpu_kernels


@pytest.mark.parametrize(
    "script", ["echo 'error -- unsupported GNU version!' >&2; exit 1", None], ids=["broken", "missing"]
)
def test_without_a_compiler_that_works_there_are_the_cpus_kernels(machine: Machine, script: str | None) -> None:
    nvcc = machine.folder / "nowhere" if script is None else machine.tool("nvcc", script)
    for options in (["-DDIFFBIT_CUDA=ON"], []):  # asked for, and for the machine's own card
        configured = machine.configure(*options, nvidia_smi=H100, nvcc=nvcc)
        assert (
            "no kernels for NVIDIA GPUs: nvcc is missing" in configured.output
            and "or does not work" in configured.output
        )
        assert configured.has_cpu_kernels and not configured.architectures
        shutil.rmtree(machine.folder / "build")


def test_instruction_sets_are_those_of_the_list(machine: Machine) -> None:
    for option, wanted in (("avx2 neon", {"avx2", "neon"}), ("i8mm;avxvnni", {"avxvnni", "i8mm"}), ("none", set())):
        configured = machine.configure(f"-DDIFFBIT_INSTRUCTION_SETS={option}", nvidia_smi=NO_CARD)
        assert configured.has_cpu_kernels and configured.instruction_sets <= wanted
        assert len(configured.instruction_sets) == len(wanted) // 2  # the other processor's
    with pytest.raises(AssertionError, match="no instruction set avx3"):
        machine.configure("-DDIFFBIT_INSTRUCTION_SETS=avx2 avx3", nvidia_smi=NO_CARD)
