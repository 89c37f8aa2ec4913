"""Runs cases: a target's example is copied, damaged as the case's number says, and read in a child process.

python -m tests.fuzz.fuzz [CASES [FIRST]] [--target NAME]     # prints the cases that failed, and what they did
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import pkgutil
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

os.environ["OMP_NUM_THREADS"] = "1"  # a forked child has no other threads to wait for
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import diffbit
from diffbit.cli.output import out_of_memory, print_error
from diffbit.io.errors import DiffbitError
from diffbit.io.progress import set_quiet

from .. import forks
from .targets import TARGETS, TEXT, Target, in_process, make

MEMORY = 1 << 30  # bytes that a case may take beside what its parent has
CPU_SECONDS, SECONDS = 20, 120
MOST_CHARACTERS = 3000  # of a sentence
SECRET = "secret"  # beside the folder of a case; nothing may read it


@dataclass(frozen=True)
class Case:
    target: str
    number: int

    def damage(self, folder: Path) -> None:
        random, target = Random(f"{self.target} {self.number}"), TARGETS[self.target]
        for name in random.sample(sorted(target.files), 1 if random.random() < 0.9 else min(2, len(target.files))):
            file = folder / name
            file.write_bytes(target.files[name](file.read_bytes(), random))


def cases(count: int, first: int = 0, only: str | None = None) -> Iterator[Case]:
    """So many, shared among the targets."""
    names = [name for name, target in TARGETS.items() for _ in range(target.share) if only in (None, name)]
    order = Random(0).sample(names, len(names))
    for number in range(first, first + count):
        yield Case(order[number % len(order)], number)


class Workplace:
    """`with Workplace() as place: place.problem(case)`: the examples, and a folder for each case."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()  # of CPU time

    def __enter__(self) -> Workplace:
        self._temporary = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.root = Path(self._temporary.name)
        set_quiet(True)
        self.examples = self.root / "examples"
        self.examples.mkdir()

        def prepare() -> None:
            make(self.examples)
            (self.root / "modules").write_text("\n".join(sys.modules))

        done = forks.run(prepare)  # in a child: a small parent is forked fast
        assert done.code == 0, done.error
        for name in (self.root / "modules").read_text().split():  # not to be imported again in each case
            with suppress(Exception):
                importlib.import_module(name)
        for module in pkgutil.walk_packages([str(Path(diffbit.__file__).parent)], "diffbit."):
            others = "__main__", "libdiffbit_ops", "integrations.transformers", "integrations.exporter"
            if not module.name.endswith(others):
                importlib.import_module(module.name)
        gc.collect()
        gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        set_quiet(False)
        self._temporary.cleanup()

    def problem(self, name: str, damage: object) -> str | None:
        """What was wrong with how a damaged copy of a target's example was read; None: nothing.

        damage: a function that is given the copy's folder.
        """
        target, here = TARGETS[name], self.root / "here"
        here.mkdir()
        try:
            shutil.copytree(self.examples / target.example, here / "case")
            for part in ("model", "tokenizer"):
                if target.example in ("scheme", "texts"):
                    shutil.copytree(self.examples / part, here / part)
            (here / "text.txt").write_text(TEXT)
            (self.root / SECRET).write_bytes(bytes(4096))
            (here / SECRET).write_bytes(bytes(4096))
            damage(here / "case")  # type: ignore[operator]
            before = {path.name for path in here.iterdir()}
            begin = _cpu()
            done = forks.run(lambda: act(target, here), memory=MEMORY, cpu_seconds=CPU_SECONDS, seconds=SECONDS)
            left = {path.name for path in here.iterdir()} - before
            self.outcomes[f"{name} {'right' if done.code == 0 else 'refused'}"] += 1
            self.seconds[name] += _cpu() - begin
            return verdict(done, left)
        finally:
            shutil.rmtree(here, ignore_errors=True)


def _cpu() -> float:
    return sum(os.times()[2:4])


def act(target: Target, here: Path) -> None:
    """In the child: do what the target does, and exit as the command line would."""
    sys.dont_write_bytecode = True  # of a module that only an error imports: it would be a file outside
    sys.addaudithook(watch(here))
    try:
        with in_process():
            target.act(here / "case")
    except (DiffbitError, RuntimeError, MemoryError) as error:
        message = str(error) if isinstance(error, DiffbitError) else out_of_memory(error)
        if message is None:
            raise
        print_error(message)
        sys.exit(forks.REFUSED)


def watch(here: Path) -> object:
    """Ends the process where Python opens a file that no case has business with."""
    root, mine = str(here.parent), str(here) + os.sep

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str):
            return
        path, flags = os.path.realpath(arguments[0]), arguments[2]
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        outside = path.startswith(root) and (not f"{path}/".startswith(mine) or path.endswith(os.sep + SECRET))
        if outside or path.startswith("/etc/passwd") or (writes and not path.startswith((mine, "/dev/"))):
            os.write(2, f"OUTSIDE: {path}\n".encode())
            os._exit(71)

    return hook


def verdict(done: forks.Done, left: set[str]) -> str | None:
    lines = done.error.strip().splitlines()
    # what C++ libraries say before an error is theirs; ours is the last line
    if done.code == 0:
        return None
    if done.code == forks.REFUSED:
        sentence = lines[-1] if lines else ""
        if left:
            return f"left {left} behind: {sentence}"
        errors = [line for line in lines if line.startswith("error: ")]
        if len(errors) != 1 or not sentence.startswith("error: ") or len(sentence) > MOST_CHARACTERS:
            return f"no sentence: {done.error.strip()[:2000]}"
        return None
    return f"exit {done.code}: {done.error.strip()[-2500:]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int, nargs="?", default=2000)
    parser.add_argument("first", type=int, nargs="?", default=0)
    parser.add_argument("--target", choices=TARGETS)
    options = parser.parse_args()
    if "GLIBC_TUNABLES" not in os.environ:  # with huge pages a fork takes half of the time
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, "-m", "tests.fuzz.fuzz", *sys.argv[1:]])
    failed = 0
    with Workplace() as place:
        for case in cases(options.count, options.first, options.target):
            if problem := place.problem(case.target, case.damage):
                failed += 1
                print(f"--- {case.target} {case.number}\n{problem}\n", flush=True)
        print(", ".join(f"{name} {count}" for name, count in sorted(place.outcomes.items())))
        print("CPU seconds: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in place.seconds.most_common()))
    print(f"{options.count} cases, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
