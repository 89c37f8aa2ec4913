"""The wheels for Windows, macOS and musl, which ziglang compiles on Linux (deploy/wheel.sh).

Their kernels run on wine and with musl in test_host.py; here a program runs an artifact on wine with ONNX Runtime.
Nobody runs the libraries for macOS and for Windows on ARM: they are read, the instruction sets are those that
test_host.py runs on Linux.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffbit.runtime import Artifact, Session

from .host import ROOT, WINE_ENVIRONMENT, build, skip

pytestmark = pytest.mark.slow

WINDOWS = ROOT / "build" / "native" / "windows"  # make windows
FUNCTIONS = {"RegisterCustomOps", "diffbit_isas", "diffbit_cuda_architectures"}
PROMPT = [315, 221, 7]
# the library in the wheel, the processor in its head, and the instruction sets of its kernels
ELF, PE, MACH_O = "libdiffbit_ops.so", "diffbit_ops.dll", "libdiffbit_ops.dylib"
WHEELS = {
    "win_amd64": (PE, 0x8664, "avx512vnni avxvnni avx2"),
    "win_arm64": (PE, 0xAA64, "i8mm neon"),
    "macosx_11_0_arm64": (MACH_O, 0x100000C, "i8mm neon"),
    "macosx_11_0_x86_64": (MACH_O, 0x1000007, "avx2"),
    "musllinux_1_2_x86_64": (ELF, 62, "amx avx512vnni avxvnni avx2"),
    "musllinux_1_2_aarch64": (ELF, 183, "i8mm neon"),
}
LINKERS = {"_mh_dylib_header", "__dso_handle"}
FOLDERS = {  # those of build()
    "win_amd64": "x86_64-windows",
    "musllinux_1_2_x86_64": "x86_64-musl",
    "musllinux_1_2_aarch64": "aarch64-musl",
}


def text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def pe(data: bytes) -> tuple[int, set[str], set[str]]:
    """The processor, the exported functions and the DLLs that a DLL needs."""
    head = struct.unpack_from("<I", data, 0x3C)[0]
    assert data[head : head + 4] == b"PE\0\0"
    machine, count = struct.unpack_from("<HH", data, head + 4)
    (size,) = struct.unpack_from("<H", data, head + 20)
    sections = [struct.unpack_from("<8xIIII", data, head + 24 + size + 40 * i) for i in range(count)]

    def at(address: int) -> int:
        (place,) = [raw + address - begin for extent, begin, _, raw in sections if begin <= address < begin + extent]
        return place

    exports, _, imports, _ = struct.unpack_from("<IIII", data, head + 24 + 112)
    number, _, names = struct.unpack_from("<III", data, at(exports) + 24)
    functions = {text(data, at(name)) for name in struct.unpack_from(f"<{number}I", data, at(names))}
    needed = set()
    for place in range(at(imports), len(data), 20):
        (name,) = struct.unpack_from("<I", data, place + 12)
        if not name:
            break
        needed.add(text(data, at(name)).lower())
    return machine, functions, needed


def mach_o(data: bytes) -> tuple[int, set[str], set[str], tuple[int, int], bool]:
    """The processor, the exported functions, the libraries that one needs, the oldest macOS that loads it, and whether
    it is signed."""
    magic, processor, _, _, count = struct.unpack_from("<IIIII", data)
    assert magic == 0xFEEDFACF
    functions, needed, oldest, is_signed = set(), set(), (0, 0), False
    for command, place in commands(data, count):
        if command == 0xC:  # LC_LOAD_DYLIB
            needed.add(text(data, place + struct.unpack_from("<I", data, place + 8)[0]))
        elif command == 0x1D:  # LC_CODE_SIGNATURE
            is_signed = True
        elif command == 0x32:  # LC_BUILD_VERSION
            platform, version = struct.unpack_from("<II", data, place + 8)
            assert platform == 1, "macOS"
            oldest = version >> 16, version >> 8 & 255
        elif command == 0x2:  # LC_SYMTAB
            symbols, number, strings, _ = struct.unpack_from("<IIII", data, place + 8)
            for i in range(number):
                name, kind, section = struct.unpack_from("<IBB", data, symbols + 16 * i)
                if kind & 0xF1 == 1 and section:  # external, not private, not for debuggers, defined here
                    functions.add(text(data, strings + name).removeprefix("_"))
    # zig's linker shows the C++ library's new and delete, too, and what it names itself
    functions = {name for name in functions if not name.startswith(("_Zn", "_Zd")) and name not in LINKERS}
    return processor, functions, needed, oldest, is_signed


def commands(data: bytes, count: int) -> Iterator[tuple[int, int]]:
    place = 32
    for _ in range(count):
        command, size = struct.unpack_from("<II", data, place)
        yield command, place
        place += size


def elf(data: bytes, path: Path) -> tuple[int, set[str], set[str]]:
    path.write_bytes(data)

    def words(*arguments: str) -> list[list[str]]:
        done = subprocess.run(["readelf", "--wide", *arguments, str(path)], capture_output=True, text=True, check=True)
        return [line.split() for line in done.stdout.splitlines()]

    symbols = [row for row in words("--dyn-syms") if len(row) == 8 and row[4] == "GLOBAL" and row[6].isdigit()]
    needed = {row[-1].strip("[]") for row in words("--dynamic") if "(NEEDED)" in row}
    return struct.unpack_from("<H", data, 18)[0], {row[7] for row in symbols}, needed


@pytest.mark.parametrize("system", WHEELS)
def test_a_wheel_has_a_library_that_needs_only_its_system(system: str, tmp_path: Path) -> None:
    name, processor, instruction_sets = WHEELS[system]
    folder = build(FOLDERS[system]).folder if system in FOLDERS else ROOT / "build" / "native" / system
    command = ["bash", str(ROOT / "deploy" / "wheel.sh"), system, str(tmp_path / "dist"), sys.executable]
    done = subprocess.run(command, env=os.environ | {"DIFFBIT_BUILD": str(folder)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.endswith(f"-py3-none-{system}.whl")
    archive = zipfile.ZipFile(wheel)
    libraries = {Path(path).name for path in archive.namelist() if "diffbit_ops" in path}
    assert libraries == {name, "diffbit_ops.h"} | ({"diffbit_ops.lib"} if name == PE else set())
    data = archive.read(f"diffbit/runtime/{name}")
    if name == PE:
        machine, functions, needed = pe(data)
        assert {dll for dll in needed if not dll.startswith("api-ms-win-crt-")} <= {"kernel32.dll", "ntdll.dll"}
    elif name == MACH_O:
        machine, functions, needed, oldest, is_signed = mach_o(data)
        assert needed == {"/usr/lib/libSystem.B.dylib"} and oldest == (11, 0)
        assert is_signed or system.endswith("x86_64"), "ARM Macs load nothing without a signature"
    else:
        machine, functions, needed = elf(data, tmp_path / name)
        assert needed == {"libc.so"} and b".debug_info" not in data  # musl's alone; stripped
    assert (machine, functions) == (processor, FUNCTIONS)
    compiled = re.findall(r"X\((\w+), more\)", (folder / "isas.h").read_text().partition(")")[2])
    assert compiled == instruction_sets.split()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/cpp/run.cpp for Windows, beside the DLLs."""
    if not (WINDOWS / ".complete").exists():
        skip("needs make windows")
    library = build("x86_64-windows").library
    folder = tmp_path_factory.mktemp("windows")
    runtime = WINDOWS / "site" / "onnxruntime" / "capi" / "onnxruntime.dll"
    for dll in (runtime, library):
        (folder / dll.name).symlink_to(dll)
    # ONNX Runtime's wheel has no library for the linker
    (folder / "onnxruntime.def").write_text("LIBRARY onnxruntime.dll\nEXPORTS\nOrtGetApiBase\n")
    zig = [sys.executable, "-m", "ziglang"]
    include = [f"-I{ROOT / 'tests' / 'native' / 'stand_in'}", f"-I{ROOT / 'csrc' / 'ort'}"]
    flags = ["-target", "x86_64-windows-gnu", "-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror"]
    link = [str(folder / "onnxruntime.lib"), str(library.with_suffix(".lib"))]
    for command in (
        [*zig, "dlltool", "-m", "i386:x86-64", "-d", str(folder / "onnxruntime.def"), "-l", link[0]],
        [*zig, "c++", *flags, *include, str(ROOT / "examples/cpp/run.cpp"), *link, "-o", str(folder / "run.exe")],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder / "run.exe"


def test_a_program_on_windows_writes_the_tokens_of_linux(program: Path) -> None:
    artifact = Artifact.open("nano")
    session = Session(artifact)
    expected = [int(session.prefill([PROMPT])[0].argmax())]
    while len(expected) < 16:
        expected.append(int(session.prefill([expected[-1:]])[0].argmax()))
    command = ["wine", str(program), str(artifact.path), "16", *map(str, PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | WINE_ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert [int(line) for line in done.stdout.split()] == expected
