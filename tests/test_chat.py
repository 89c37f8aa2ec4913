"""`diffbit chat`: commands, pipes and a terminal."""

from __future__ import annotations

import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diffbit.cli.app import main

from .runtime.test_chat import write_chat_model
from .runtime.toy import follows

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It answers "é!" to all messages."""
    return write_chat_model(tmp_path_factory.mktemp("chat") / "toy", follows(":é!", end=257), context=60)


def chat(
    arguments: list[str | Path], lines: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    with pytest.raises(SystemExit) as stopped:
        main(["chat", *map(str, arguments)])
    captured = capfd.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, captured.out, captured.err


def test_lines_of_a_pipe(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "talk.json"
    lines = f"hey\n\n//x\n/save {saved}\n/system Be\n/save {saved}\n/reset\nyes\n/help\n/exit\nnot read\n"
    code, out, err = chat([model, "--system", "S"], lines, monkeypatch, capfd)
    assert (code, out) == (0, "é!\n" * 3)
    assert "8 of them cached" not in err and "of them cached, first token after" in err and "/system TEXT" in err
    assert json.loads(saved.read_text()) == {
        "model": "toy",
        "messages": [
            {"role": "system", "content": "Be"},
            {"role": "user", "content": "hey"},
            {"role": "assistant", "content": "é!"},
            {"role": "user", "content": "/x"},
            {"role": "assistant", "content": "é!"},
        ],
    }
    code, out, err = chat([model, "--json", "-q"], "a\nb", monkeypatch, capfd)
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, err, [row["message"] for row in rows]) == (0, "", ["a", "b"])
    assert rows[1]["text"] == "é!" and rows[1]["cached_tokens"] > 0 and rows[1]["finish_reason"] == "eos"
    long = "x" * 25 + "\n"
    code, out, err = chat([model], long * 3, monkeypatch, capfd)
    assert code == 0 and err.count("oldest 2 messages were dropped") == 2


@pytest.mark.parametrize(
    ("lines", "arguments", "words"),
    [
        ("/bye", [], ["/bye is not a command", "/help", "//"]),
        ("/save", [], ["/save needs the name of a file"]),
        ("/save {tmp}/taken", [], ["taken: already exists"]),
        ("/save {tmp}/none/a/x\n/save {tmp}/taken/x", [], ["taken/x: cannot be written"]),
        ("x" * 99, [], ["the context holds 60"]),
        ("x", ["--template", "{tmp}/none"], ["none: cannot be read"]),
        ("x", ["--template", "{tmp}/taken"], ["taken: cannot render this conversation (no!)"]),
        ("x", ["--top-p", "2"], ["top_p is 2"]),
        ("x", ["--max-tokens", "0"], ["max_tokens is 0"]),
    ],
)
def test_bad_input_is_refused(
    lines: str,
    arguments: list[str],
    words: list[str],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "taken").write_text("{{ raise_exception('no!') }}")
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    code, _, err = chat([model, *arguments, "-q"], lines.format(tmp=tmp_path), monkeypatch, capfd)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert all(word in err for word in words), err


def test_a_model_without_a_template_and_run_with_one(
    model: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = chat([artifact], "x", monkeypatch, capfd)
    assert code == 2 and "has no chat template" in err and "diffbit run" in err and "--template FILE" in err
    shutil.copy(model / "chat_template.jinja", tmp_path)
    code, out, _ = chat([artifact, "--template", tmp_path / "chat_template.jinja", "-n", "3"], "x", monkeypatch, capfd)
    assert code == 0 and out.strip()
    with pytest.raises(SystemExit) as stopped:
        main(["run", str(model), "--chat", "hey", "-q"])
    assert (stopped.value.code, capfd.readouterr().out) == (0, "é!\n")


@pytest.mark.skipif(sys.platform == "win32", reason="no pty")
def test_a_terminal(tmp_path: Path) -> None:
    """A prompt, Ctrl-C during an answer and at the prompt, a command that fails, Ctrl-D."""
    import pty

    model = write_chat_model(tmp_path / "toy", follows(":abcdefg"), context=60)  # it never ends by itself
    slow = (  # 0.1 s for each token: an answer of 5 s
        "import signal, sys, time; import diffbit.runtime.session as s; step = s.Session.step; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell's background ignores it
        "s.Session.step = lambda self, ids: (time.sleep(.1), step(self, ids))[1]; "
        "from diffbit.cli.app import main; main(sys.argv[1:])"
    )
    main_end, child_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", slow, "chat", str(model)], stdin=child_end, stdout=child_end, stderr=child_end,
        start_new_session=True, cwd=ROOT, env=os.environ | {"TERM": "dumb"},
    )  # fmt: skip
    os.close(child_end)
    shown = ""

    def until(text: str, after: int = 0) -> int:
        """Read until the terminal shows `text` behind its first `after` characters; where it ends."""
        nonlocal shown
        while text not in shown[after:]:
            assert select.select([main_end], [], [], 60)[0], shown
            shown += os.read(main_end, 1000).decode()
        return shown.index(text, after) + len(text)

    def interrupt() -> None:
        """Ctrl-C until something is shown: one between the prompt and the wait for a line is seen after that line."""
        os.killpg(process.pid, signal.SIGINT)
        while not select.select([main_end], [], [], 10)[0]:  # a second one may not come while the first is handled
            os.killpg(process.pid, signal.SIGINT)

    try:
        at = until("> ")
        os.write(main_end, b"hey\n")
        at = until("bc", at)
        interrupt()
        at = until("stopped by interrupted", at)
        at = until("> ", at)
        interrupt()
        at = until("Ctrl-D or /exit ends the conversation", at)
        at = until("> ", at)
        os.write(main_end, b"/nothing\n")
        at = until("error: /nothing is not a command", at)
        os.write(main_end, b"/exit\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(main_end)
