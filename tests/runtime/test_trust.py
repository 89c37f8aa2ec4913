"""What an artifact, or the folder that a command is started in, must not be able to do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from diffbit.errors import DiffbitError
from diffbit.runtime import Session, Tokenizer, generate

from .toy import follows, random_toy

ROOT = Path(__file__).parents[2]


def python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in `folder`, which is not on its import path."""
    kept = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    kept |= {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, env=kept, capture_output=True, text=True)


def test_no_code_of_the_current_folder_is_run(tmp_path: Path) -> None:
    """bench and a chat template start processes; beside a model there may be modules of a stranger."""
    random_toy().write(tmp_path / "a")
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    for name in ("statistics", "json", "jinja2", "diffbit"):
        (hostile / f"{name}.py").write_text("open('owned', 'w').close()")
    code = (
        f"from diffbit.runtime import bench, ChatTemplate\nbench({str(tmp_path / 'a')!r}, 4, 2, 1, threads=1)\n"
        "assert ChatTemplate('{{ messages }}', 'T').render([]) == '[]'"
    )
    done = python(code, hostile)
    assert done.returncode == 0, done.stderr
    assert not (hostile / "owned").exists()


def test_onnxruntimes_telemetry_is_off(tmp_path: Path) -> None:
    random_toy().write(tmp_path / "a")
    home = tmp_path / "home"
    home.mkdir()
    code = f"from diffbit.runtime import Session; Session({str(tmp_path / 'a')!r}, threads=1)"
    done = python(code, tmp_path, HOME=str(home), XDG_CACHE_HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert list(home.iterdir()) == []


def test_two_threads_on_one_session(tmp_path: Path, in_place: bool) -> None:
    """The second one gets a sentence, and the first one its text."""
    session = Session(follows("abcdefgh").write(tmp_path / "a", in_place=in_place, context=60), threads=1)
    tokenizer = Tokenizer(session.artifact.file("tokenizer.json"))
    errors: list[str] = []

    def another() -> None:
        for call in (
            lambda: session.prefill([[1, 2]]),
            lambda: session.step([[1]]),
            session.reset,
            lambda: generate(session, tokenizer, "c", max_tokens=3),
        ):
            with pytest.raises(DiffbitError) as caught:
                call()  # type: ignore[no-untyped-call]
            errors.append(str(caught.value))

    def on_text(text: str) -> None:
        if text == "d":
            thread = threading.Thread(target=another)
            thread.start()
            thread.join()

    assert generate(session, tokenizer, "a", max_tokens=7, on_text=on_text).text == "bcdefgh"
    assert errors == ["another thread is using this session; open a session for each thread"] * 4
    assert generate(session, tokenizer, "a", max_tokens=7).text == "bcdefgh"
