"""The structure of the code, as far as a machine can check it: levels, circles, faces, and torch where it belongs.

Each list of exceptions below gives a reason for each entry and may only become shorter: an entry that no longer
describes an offender fails, too.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A room imports only rooms of a lower level, and the files below from diffbit/ itself.
LEVEL = {
    "io": 1,
    "ops": 2,
    "calib_data": 3,
    "models": 3,
    "runtime": 3,
    "formats": 4,
    "quantize": 5,
    "export": 6,
    "cli": 7,
    "apps": 8,
}
IN_PLACE = {"io"}  # lies in diffbit/ itself: at the root it would hide Python's module of that name
LEAVES = {"devices", "settings", "version"}
MOST_FLOORS = 7
SAME_CLASSES = {"Options"}  # of one name in several files: what each variant's file has to define
SAME_FILES = {
    "awq",
    "trellis",
    "bitnet",
    "diffbit",
    "gptq",
}  # on two shelves of the core, each found by its published name
# What apps import beside the rooms' faces: that of quantize is too wide to take these in
DEEP = {
    "diffbit.quantize.sizes": {"TYPICAL_GRAPH", "overhead", "tokenizer_bytes"},
    "diffbit.quantize.forecast": {"must_spill", "quantize_demand", "quantize_seconds"},
}  # fmt: skip
# (importer, imported): the imports that close a circle
CIRCLES = {}


def python_files() -> dict[str, Path]:
    """Each module of the product, by its name in the package."""
    names = {}
    for room in LEVEL:
        root = ROOT / "diffbit" if room in IN_PLACE else ROOT
        files = sorted((root / room).rglob("*.py"))
        names |= {".".join(("diffbit", *file.relative_to(root).with_suffix("").parts)): file for file in files}
    names |= {f"diffbit.{file.stem}": file for file in sorted((ROOT / "diffbit").glob("*.py"))}
    return {name.removesuffix(".__init__"): file for name, file in names.items()}


FILES = python_files()


def room_of(module: str) -> str:
    """models of diffbit.models.config; nothing of diffbit."""
    return module.partition(".")[2].partition(".")[0]


def imports(name: str, source: str, package: bool) -> set[str]:
    """Modules of FILES that the module `name` imports: at its top, late, for type checkers, or by import_module.

    package: it is an __init__.py.
    """
    here = name.split(".") if package else name.split(".")[:-1]
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            absolute = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            absolute = [node.module or ""]
        else:
            absolute = []
        wrong = [module for module in absolute if module.split(".")[0] in {"diffbit", *LEVEL} - IN_PLACE]
        assert not wrong, f"{name} imports {wrong} absolutely: inside the library imports are relative"
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join(here[: len(here) - node.level + 1] + ([node.module] if node.module else []))
            modules |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            modules |= {module for module in FILES if module.rpartition(".")[0] == ".".join(here)}  # any of its folder
    return modules - {name}


@functools.cache
def graph() -> dict[str, set[str]]:
    return {name: imports(name, file.read_text(), file.name == "__init__.py") for name, file in FILES.items()}


@pytest.mark.parametrize("room", LEVEL)
def test_imports_lead_to_lower_levels(room: str) -> None:
    lower = {other for other in LEVEL if LEVEL[other] < LEVEL[room]}
    imported = {name: modules for name, modules in graph().items() if room_of(name) == room}
    assert imported
    for name, modules in imported.items():
        wrong = {module for module in modules if room_of(module) not in lower | LEAVES | {room}}
        assert not wrong, f"{name} imports {sorted(wrong)}"


@functools.cache
def faces() -> dict[str, set[str]]:
    """{package: the names that it offers}, of every package of the core."""
    names_of = {}
    for name, file in FILES.items():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" and room_of(name) != "apps":
                names_of[name] = set(ast.literal_eval(node.value))
    return names_of


def deep_imports(name: str, source: str, package: bool) -> list[str]:
    """What a module of an app imports that is neither its own, nor a name in a room's face, nor in io or settings."""
    offered, app = faces(), ".".join(name.split(".")[:3])
    here = name.split(".") if package else name.split(".")[:-1]
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = ".".join(here[: len(here) - node.level + 1] + ([node.module] if node.module else []))
        if base == app or base.startswith((f"{app}.", "diffbit.io")) or base.removeprefix("diffbit.") in LEAVES:
            continue  # each file of io is small, and all of it is for every room
        names = {alias.name for alias in node.names}
        allowed = LEAVES if base == "diffbit" else offered.get(base, set())
        wrong += [f"{base}.{imported}" for imported in sorted(names - allowed)]
    return wrong


def test_apps_import_only_faces() -> None:
    apps = [name for name in FILES if room_of(name) == "apps"]
    assert apps
    deep: set[str] = set()
    for name in apps:
        imported = set(deep_imports(name, FILES[name].read_text(), FILES[name].name == "__init__.py"))
        others = {module for module in imported if module.startswith("diffbit.apps.")}
        assert not others, f"{name} imports {others}: an app uses no other app"
        deep |= imported
    listed = {f"{module}.{name}" for module, names in DEEP.items() for name in names}
    assert deep == listed, f"apps use what a room's __all__ offers; the list differs by {sorted(deep ^ listed)}"


def has_command(file: Path) -> bool:
    """Whether the file is that of a command: it says the command's examples."""
    return file.parent == ROOT / "cli" and re.search(r"^EXAMPLES\b", file.read_text(), re.MULTILINE) is not None


def test_one_name_is_one_thing() -> None:
    """No two classes of one name, and no two files of one name in the core. A command's file bears the command's name,
    also where a file of runtime/ does what the command says."""
    classes: dict[str, int] = {}
    for file in FILES.values():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = classes.get(node.name, 0) + 1
    assert {name for name, count in classes.items() if count > 1} == SAME_CLASSES
    stems = [file.stem for name, file in FILES.items() if room_of(name) != "apps" and not has_command(file)]
    same = {stem for stem in stems if stem != "__init__" and stems.count(stem) > 1}
    assert same == SAME_FILES, same ^ SAME_FILES


def test_the_check_of_apps_sees_deep_imports() -> None:
    def check(source: str) -> list[str]:
        return deep_imports("diffbit.apps.a.b", source, False)

    assert check("from ...models.config import ModelConfig") == ["diffbit.models.config.ModelConfig"]
    assert check("from ...models import Mixer") == ["diffbit.models.Mixer"]
    assert check("from ..other import x") == ["diffbit.apps.other.x"]
    assert not check("from ...io import files\nfrom ...io.errors import DiffbitError\nfrom ...models import Checkpoint")
    assert not check("from .differential import convert\nfrom . import convert")


def test_the_check_of_imports_sees_them() -> None:
    assert imports("diffbit.models.x", "from ..quantize import rtn", False) == {"diffbit.quantize"}
    late = "def f():\n    from ...runtime.session import Session"
    assert imports("diffbit.quantize.methods.x", late, False) == {"diffbit.runtime.session"}
    assert imports("diffbit.models.x", "from ..io import files, hub", False) == {"diffbit.io.files", "diffbit.io.hub"}
    assert imports("diffbit.models.x", "from .config import x", False) == {"diffbit.models.config"}
    assert imports("diffbit.models", "from .config import x", True) == {"diffbit.models.config"}
    typed = "if TYPE_CHECKING:\n    from .config import x"
    assert imports("diffbit.models", typed, True) == {"diffbit.models.config"}
    by_name = imports("diffbit.models.attention", "import_module(f'.{x}', __name__)", True)
    assert "diffbit.models.attention.softmax" in by_name
    with pytest.raises(AssertionError):
        imports("diffbit.models.x", "import quantize.rtn", False)


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The modules of one circle, or none."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for following in sorted(edges[name]):
            if modules := search(following, [*path, name]):
                return modules
        done.add(name)
        return []

    return next((modules for name in edges if (modules := search(name, []))), [])


def test_no_circle() -> None:
    edges = graph()
    for importer, imported in CIRCLES:
        assert imported in edges.get(importer, ()), f"{importer} does not import {imported}: take it off the list"
    without = {name: {other for other in others if (name, other) not in CIRCLES} for name, others in edges.items()}
    assert not (modules := circle(without)), " -> ".join(modules)
    for importer, imported in CIRCLES:
        again = without | {importer: without[importer] | {imported}}
        assert circle(again), f"{importer} may import {imported}, there is no circle: take it off the list"


@pytest.mark.parametrize("room", LEVEL)
def test_rooms_have_few_floors(room: str) -> None:
    """A file stands a floor above all that it imports; a folder counts as one, and the room's face as none."""

    def part(module: str) -> str:
        return ".".join(module.split(".")[:3])

    above: dict[str, set[str]] = {}
    for name, modules in graph().items():
        if room_of(name) == room and name != f"diffbit.{room}":
            others = {part(module) for module in modules if room_of(module) == room and module != f"diffbit.{room}"}
            above.setdefault(part(name), set()).update(others - {part(name)})

    @functools.cache
    def floor(name: str) -> int:
        return 1 + max(map(floor, above[name]), default=0)

    assert max(map(floor, above)) <= MOST_FLOORS, {name: floor(name) for name in above}


def load_without(packages: str, modules: list[str]) -> subprocess.CompletedProcess[str]:
    script = (
        "import importlib, sys\n"
        f"for name in {packages.split()}:\n"
        "    sys.modules[name] = None\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
    )
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_a_device_needs_no_torch() -> None:
    """What runs on a device, and every file of the command line, load without the packages that make artifacts."""
    lab = "torch onnx onnx_ir safetensors transformers matplotlib onnxruntime"
    roots = {"diffbit", *(f"diffbit.{leaf}" for leaf in LEAVES)}
    device = [name for name in FILES if name in roots or room_of(name) in ("runtime", "cli")]
    done = load_without(lab, device)
    assert done.returncode == 0, done.stderr
    done = load_without("torch", [name for name in FILES if room_of(name) in ("ops", "calib_data")])
    assert done.returncode == 0, done.stderr


def test_links_and_packaging_name_every_room() -> None:
    links = {path.name: os.readlink(path) for path in (ROOT / "diffbit").iterdir() if path.is_symlink()}
    assert links == {room: f"../{room}" for room in LEVEL.keys() - IN_PLACE}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    rooms = {f"diffbit/{room}": room for room in LEVEL.keys() - IN_PLACE}
    assert build["wheel"]["packages"] == {"diffbit": "diffbit"} | rooms
    assert set(build["sdist"]["exclude"]) == {f"diffbit/{room}" for room in LEVEL.keys() - IN_PLACE}


def test_ci_installs_the_releases_of_constraints_by_hash() -> None:
    def pins(path: Path) -> dict[str, str]:
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert path.parent == ROOT or all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
        pairs = (line.split()[0].lower().replace("_", "-").split("==") for line in lines)
        return {name: version for name, version in pairs}

    pinned = pins(ROOT / "constraints.txt")
    pinned.pop("torch")  # its file depends on the index
    locked = pins(ROOT / "deploy" / "locks" / "python.txt")
    assert {name: locked.get(name) for name in pinned} == pinned, "run deploy/lock.py"
    arm64 = pins(ROOT / "deploy" / "locks" / "arm64.txt")
    assert pinned | arm64 == arm64 | pinned and "onnxruntime" in arm64
