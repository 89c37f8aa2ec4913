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
from diffbit.runtime.loops import PLAIN_TOKENS

from .runtime.test_chat import SWITCHED, write_chat_model
from .runtime.toy import follows

ROOT = Path(__file__).parents[1]
PATIENCE = 300  # seconds to wait for what a busy machine shows


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
    code, out, err = chat([model, "--system", "S", "--stats"], lines, monkeypatch, capfd)
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
    assert code == 0 and err.count("oldest 2 messages were dropped") == 2 and "tokens/s" not in err


def test_commands_change_the_conversation_and_its_settings(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    lines = f"one\n/save {first}\ntwo\n/undo\n/undo\n/undo\n/load {first}\nthree\n/save {second}\n"
    code, out, _ = chat([model, "--system", "S"], lines, monkeypatch, capfd)
    assert (code, out) == (0, "é!\n" * 3)
    texts = [[message["content"] for message in json.loads(file.read_text())["messages"]] for file in (first, second)]
    assert texts == [["S", "one", "é!"], ["S", "one", "é!", "three", "é!"]]
    lines = "/set temperature 0.2\n/set max_tokens 1\n/set\nx\n/set temperature\n/set max_tokens\n/set\nx\n/unfold\n"
    code, out, err = chat([model, "--top-k", "7"], lines, monkeypatch, capfd)
    assert code == 0
    shown = [line.split() for line in err.splitlines()]
    values = [[row[-1] for row in shown if row[0] == name] for name in ("temperature", "max_tokens", "top_k")]
    assert values == [["0.2", "0.0"], ["1", "512"], ["7", "7"]]
    assert "temperature: 0.2\nmax_tokens: 1\n" in err and "temperature: 0.0\nmax_tokens: 512\n" in err
    assert "the answer ends here: it has 1 tokens" in err and "/set max_tokens" in err
    assert out.splitlines()[1:] == ["é!", "é!"]


def test_commands_answer_with_a_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = "/undo\na\nb\n/undo\n/reset\n/system Be brief\n/reset\n/system\n/set top_k 3\n/set think off\n"
    code, out, err = chat([model], lines, monkeypatch, capfd)
    assert (code, out) == (0, "é!\n" * 2)
    words = ("no message to forget", "1 message left", "is forgotten", "system prompt: Be brief", "prompt stays",
             "template's own", "top_k: 3", "think: off")  # fmt: skip
    assert [any(word in line for word in [word]) for word, line in zip(words, err.splitlines(), strict=True)] == [
        True
    ] * 8


def test_a_line_that_is_no_text_costs_that_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ncaf\xe9\n\nthr\xc3\xa9e\n"), "utf-8"))
    with pytest.raises(SystemExit) as stopped:
        main(["chat", str(model), "--json"])
    out, err = capfd.readouterr()
    assert stopped.value.code == 0 and [json.loads(row)["message"] for row in out.splitlines()] == ["one", "thrée"]
    assert err.count("\n") == 1 and "message 2 is not UTF-8" in err


def test_an_answer_in_a_loop_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    looping = write_chat_model(tmp_path / "toy", follows(":bcdefgh", places=900), context=900)
    code, out, err = chat([looping], "x\n", monkeypatch, capfd)
    assert code == 0 and len(out) == PLAIN_TOKENS + 1 and "the answer ends here: it repeats itself" in err
    code, out, err = chat([looping, "--allow-loops", "-q"], "x\n", monkeypatch, capfd)
    assert (code, len(out), err) == (0, 513, "")


@pytest.mark.parametrize(
    ("lines", "arguments", "words"),
    [
        ("/bye", [], ["/bye is not a command", "/help", "//"]),
        ("/save", [], ["/save needs the name of a file"]),
        ("/save {tmp}/taken", [], ["taken: already exists"]),
        ("/load", [], ["/load needs the name of a file"]),
        ("/load {tmp}/none", [], ["none: no such file"]),
        ("/load {tmp}/roles", [], ["roles: its messages are no conversation"]),
        ("/load {tmp}/content", [], ["content: messages[0]['content'] is 1, wanted text"]),
        ("/set none 1", [], ["none is not a setting", "temperature", "max_tokens"]),
        ("/set temperature hot", [], ["temperature is 'hot', wanted 0 (greedy)"]),
        ("/set max_tokens 0", [], ["max_tokens is 0"]),
        ("/unfold", [], ["there is no answer yet"]),
        ("/save {tmp}/none/a/x\n/save {tmp}/taken/x", [], ["taken/x: cannot be written"]),
        ("x" * 99, [], ["the context holds 60"]),
        ("x", ["--template", "{tmp}/none"], ["none: cannot be read"]),
        ("x", ["--template", "{tmp}/taken"], ["taken: cannot render this conversation (no!)"]),
        ("x", ["--top-p", "2"], ["--top-p is 2"]),
        ("x", ["--think", "on"], ["no switch for thinking", "does not think"]),
        ("x", ["--think", "maybe"], ["--think", "maybe", "on", "off"]),
        ("/set think on", [], ["no switch for thinking"]),
        ("/set think maybe", [], ["think is 'maybe', wanted one of on, off"]),
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
    (tmp_path / "roles").write_text('{"messages": [{"role": "assistant", "content": "x"}]}')
    (tmp_path / "content").write_text('{"messages": [{"role": "user", "content": 1}]}')
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
    with pytest.raises(SystemExit) as stopped:
        main(["run", str(model), "hey", "--think", "off"])
    assert stopped.value.code == 2 and "--chat" in capfd.readouterr().err


def test_thinking_is_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The template of the model ends the prompt in empty thinking, which adds 15 tokens."""
    thinking = write_chat_model(tmp_path / "toy", follows(":>é!", end=257), SWITCHED, context=90)
    lines = "x\n/set think off\n/reset\nx\n/set think\n/reset\nx\n"
    _, out, err = chat([thinking, "--json"], lines, monkeypatch, capfd)
    on, off, again = (json.loads(line)["prompt_tokens"] for line in out.splitlines())
    assert on == again == off - 15 and "think: as the template says" in err
    _, out, _ = chat([thinking, "--json", "--think", "off"], "x\n", monkeypatch, capfd)
    assert json.loads(out)["prompt_tokens"] == off
    with pytest.raises(SystemExit):
        main(["run", str(thinking), "x", "--chat", "--think", "off", "--json"])
    assert json.loads(capfd.readouterr().out)["prompt_tokens"] == off


class Terminal:
    """`diffbit chat` in a pseudo-terminal. code: Python to run before it."""

    def __init__(self, *arguments: str | Path, code: str = "", columns: int = 80, term: str = "xterm") -> None:
        import fcntl
        import pty
        import struct
        import termios

        program = (
            "import signal, sys; "
            "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell's background ignores it
            f"{code}from diffbit.cli.app import main; main(sys.argv[1:])"
        )
        self.end, child_end = pty.openpty()
        fcntl.ioctl(child_end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "chat", *map(str, arguments)],
            stdin=child_end, stdout=child_end, stderr=child_end, start_new_session=True, cwd=ROOT,
            env=environment | {"TERM": term, "PROMPT_TOOLKIT_NO_CPR": "1"},
        )  # fmt: skip
        os.close(child_end)
        self.shown = ""
        self.at = 0  # characters that `until` has passed

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)

    def until(self, text: str) -> str:
        """Read until the terminal shows `text`, from where the last call ended; what comes before."""
        while text not in self.shown[self.at :]:
            assert select.select([self.end], [], [], PATIENCE)[0], self.shown
            self.shown += os.read(self.end, 1000).decode()
        before, _, _ = self.shown[self.at :].partition(text)
        self.at += len(before) + len(text)
        return before

    def type(self, keys: str) -> None:
        os.write(self.end, keys.encode())

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def interrupt_prompt(self) -> None:
        """Ctrl-C until something is shown: one between the prompt and the wait for keys may be lost."""
        self.interrupt()
        while not select.select([self.end], [], [], 10)[0]:
            self.interrupt()


PROMPT = "\x1b[?2004h"  # which turns bracketed paste on; a terminal that is not dumb may draw "> " in other ways
SLOW = (  # 0.2 s for each token
    "import time; import diffbit.runtime.session as s; step = s.Session.step; "
    "s.Session.step = lambda self, ids: (time.sleep(.2), step(self, ids))[1]; "
)


@pytest.mark.skipif(sys.platform == "win32", reason="no pty")
def test_a_terminal(tmp_path: Path) -> None:
    """A prompt, Ctrl-C during an answer and at the prompt, a command that fails, /exit."""
    model = write_chat_model(tmp_path / "toy", follows(":ab cdefg"), context=60)  # it never ends by itself
    with Terminal(model, "--stats", code=SLOW, term="dumb") as terminal:
        terminal.until("> ")
        terminal.type("hey\r")
        terminal.until("cdefg")
        terminal.interrupt()
        terminal.until("interrupted")
        terminal.until("> ")
        terminal.interrupt_prompt()
        terminal.until("Ctrl-D ends")
        terminal.until("> ")
        terminal.type("/nothing\r")
        terminal.until("error: /nothing is not a command")
        terminal.type("/exit\r")
        assert terminal.process.wait(PATIENCE) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="no pty")
def test_messages_of_several_lines(tmp_path: Path) -> None:
    """A paste, a block between quotes, and what is typed during an answer, which the answer does not show."""
    model = write_chat_model(tmp_path / "toy", follows(":abc defg", end=257), context=60)
    saved = tmp_path / "talk.json"
    with Terminal(model, code=SLOW, columns=200) as terminal:
        terminal.until(PROMPT)
        terminal.type("\x1b[200~two\n\n  lines\n\x1b[201~")
        terminal.until("lines")
        terminal.type("\r")
        terminal.until("abc")
        terminal.type('"""b\n/of"""\n')
        assert "/of" not in terminal.until("defg")
        terminal.until("defg")
        terminal.until(PROMPT)
        terminal.type("\x1b[200~/save \x1b[201~" + f"{saved}\r")
        terminal.until("4 messages")
        terminal.type("\x04")
        assert terminal.process.wait(PATIENCE) == 0
    texts = [message["content"] for message in json.loads(saved.read_text())["messages"]]
    assert texts == ["two\n\n  lines", "abc defg", "b\n/of", "abc defg"]


@pytest.mark.skipif(sys.platform == "win32", reason="no pty")
def test_a_narrow_terminal_breaks_lines_between_words(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "toy", follows(":abc defghi\tjklm"), context=60)
    with Terminal(model, "-n", "45", columns=20) as terminal:
        terminal.until("/help lists")
        terminal.until(PROMPT)
        terminal.type("x\r")
        terminal.until("\n")
        terminal.until("abc")
        lines = ("abc" + terminal.until("\x1b")).replace("\r", "").splitlines()
    answer, _, remark = " ".join(lines).partition("the answer ends")
    words = answer.split()
    assert "45 tokens" in remark and len(words) > 6 and max(map(len, lines)) <= 20
    assert set(words[:-1]) <= {"abc", "defghi", "jklm:abc"}
    assert any(len(line) > 11 for line in lines)
