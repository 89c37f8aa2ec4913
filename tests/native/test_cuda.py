"""The library's part for NVIDIA GPUs, as far as it can be seen without one: what it exports, needs and holds."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffbit.ops import schema
from diffbit.runtime import native

from .broken import broken
from .host import build
from .nodes import Node, bfloat16_nodes, nodes
from .test_host import differences

pytestmark = pytest.mark.slow

MAGIC = struct.pack("<I", 0xBA55ED50)  # of a fat binary


@pytest.fixture(scope="module")
def library() -> Path:
    """The library, where it is an ELF file."""
    path = native.library()
    if path is None or sys.platform != "linux" or not shutil.which("readelf"):
        pytest.skip("needs the native library, Linux and binutils")
    return path


def readelf(*arguments: str | Path) -> str:
    return subprocess.run(["readelf", "--wide", *arguments], capture_output=True, text=True, check=True).stdout


def test_exports_nothing_else(library: Path) -> None:
    defined = [line.split() for line in readelf("--dyn-syms", library).splitlines() if " DEFAULT " in line]
    names = {words[7] for words in defined if words[6] != "UND"}
    expected = {"RegisterCustomOps", "diffbit_isas", "diffbit_cuda_architectures"}
    if native.cuda_architectures():
        expected |= {f"diffbit_cuda_{op.call.function}{end}" for op in schema.OPS for end in ("", "_workspace")}
    assert names == expected


def test_needs_neither_cuda_nor_torch_nor_onnx_runtime(library: Path) -> None:
    """So it loads on machines without a GPU; CUDA's runtime is in it, and finds the driver when it is first asked."""
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\.so", readelf("--dynamic", library))
    assert "libc" in needed and not {name for name in needed if re.search("cuda|torch|onnx|nvidia", name)}, needed


def fat_binaries(data: bytes) -> Iterator[tuple[str, int]]:
    """Kind and architecture of each piece of code that nvcc put into a library: ("ptx", 80), ("elf", 90), ..."""
    at = data.find(MAGIC)
    while at >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        at += header
        end = at + size
        while at < end:
            kind, _, header, size, _, _, _, architecture = struct.unpack_from("<HHIQIIII", data, at)
            yield {1: "ptx", 2: "elf"}[kind], architecture
            at += header + size
        at = data.find(MAGIC, at)


def test_holds_code_for_the_architectures_that_it_names(library: Path) -> None:
    names = native.cuda_architectures()
    if not names:
        pytest.skip("the library was built without CUDA")
    binaries = list(fat_binaries(library.read_bytes()))
    assert {number for kind, number in binaries if kind == "elf"} == {int(name.rstrip("a")) for name in names}
    for_newer = {int(names[0])} if names[0].isdigit() else set()
    assert {number for kind, number in binaries if kind == "ptx"} == for_newer


def kind(node: Node) -> tuple[object, ...]:
    """What a node's way to its kernel depends on: its op, what it has of inputs and outputs, and their types."""
    chosen = ("branches", "wide_value", "key_bits", "value_bits", "query_bits", "activation_bits")
    inputs = tuple(None if array is None else array.dtype for array in node.inputs.values())
    outputs = tuple(None if output is None else (output.dtype, output.shared) for output in node.outputs)
    return node.op, *(node.attributes.get(name) for name in chosen), inputs, outputs


def test_ops_as_onnx_runtime_calls_them() -> None:
    """A case of each kind from its node to its kernel on the emulated GPU; tests/ops computes every case."""
    table = list({kind(node): node for node in nodes()}.values())
    assert len(table) > 60
    results = build("emulated").run_cuda(table)
    wrong = [text for node in table if (text := differences(results[node.name], node))]
    assert not wrong, "\n".join(wrong)


def test_bfloat16_as_onnx_runtime_calls_it() -> None:
    """Every op has an entry for it on a GPU, and none on a CPU."""
    table = list(bfloat16_nodes())
    assert {node.op for node in table} == {op.name for op in schema.OPS}
    library = build("emulated")
    results, there = library.run_cuda(table), library.run(table, "scalar", 1)
    wrong = [text for node in table if (text := differences(results[node.name], node))]
    assert not wrong, "\n".join(wrong)
    assert set(there.values()) == {"no entry of the op has these types"}


def test_wrong_nodes_end_in_a_sentence() -> None:
    """The same ones as on the CPU, but where only the device could read what is wrong."""
    on_the_device = ("positions_beyond", "positions_negative", "no_tables", "zeros_of_9", "ids_beyond")
    on_the_device += ("rows_of_half", "levels_of_9")
    table = [case for case in broken() if not case.node.name.endswith(on_the_device)]
    results = build("emulated").run_cuda(case.node for case in table)
    for case in table:
        text = results[case.node.name]
        assert isinstance(text, str), f"{case.node.name} computed something"
        assert re.search(case.sentence or "no entry of the op", text), f"{case.node.name}: {text}"
