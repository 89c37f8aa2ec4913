"""A site of `diffbit web` in Chromium: a text is typed, and the page's greedy tokens are those of `diffbit run`.

It needs Chromium, Node.js and the npm packages of package.json (`npm ci --prefix tests/apps/web`), which CI has:
DIFFBIT_REQUIRE_WEB=1 makes what is missing a failure.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diffbit.apps.web.site import PACKAGES, write_site
from diffbit.cli.app import app
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.runtime import Chat, Session, Tokenizer, generate

HERE = Path(__file__).parent
MODULES = HERE / "node_modules"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
READY = MODULES.is_dir() and CHROMIUM is not None and shutil.which("node") is not None
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def artifacts(trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """DIFF version 1 as it is, and with a chat template and its weights in several files."""
    folder = tmp_path_factory.mktemp("web")
    shutil.copytree(trained("diff_v1"), folder / "talker")
    (folder / "talker" / "chat_template.jinja").write_text(TEMPLATE)
    export_artifact(trained("diff_v1"), folder / "text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffbit.export.onnx_graph.FILE_BYTES", 200_000)
        export_artifact(folder / "talker", folder / "chat")
    assert (folder / "chat" / "model.onnx.data_2").exists()
    return {"text": folder / "text", "chat": folder / "chat"}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def drive(site: Path, *texts: str, adapter: str = "none") -> dict[str, Any]:
    with served(site) as address:
        chromium = str(MODULES / "x"), str(CHROMIUM)
        command = ["node", str(HERE / "drive.mjs"), *chromium, address, "-", adapter, "24", *texts]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert all(url.startswith((address, "data:", "blob:")) for url in report["asked"])  # no other network
    return report


def test_what_this_needs_is_there_in_ci() -> None:
    assert READY or "DIFFBIT_REQUIRE_WEB" not in os.environ


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
def test_the_page_writes_what_run_writes(artifacts: dict[str, Path], tmp_path: Path) -> None:
    """Text, and a conversation of two turns; with the threads that a service worker brings."""
    session, tokenizer = Session(artifacts["text"]), Tokenizer(artifacts["text"] / "tokenizer.json")
    write_site(artifacts["text"], tmp_path / "text", packages=MODULES)
    page = drive(tmp_path / "text", "def __init__(self", "import é😀 ")
    expected = [generate(session, tokenizer, text, max_tokens=24) for text in ("def __init__(self", "import é😀 ")]
    assert page["answers"] == [list(one.token_ids) for one in expected]
    assert page["talk"] == "import é😀 " + expected[1].text.rstrip("\n")
    assert "sha256" in page["about"] and not page["said"]
    write_site(artifacts["chat"], tmp_path / "chat", packages=MODULES)
    page = drive(tmp_path / "chat", "class Stack:", "And now?")
    chat = Chat(Session(artifacts["chat"]), max_tokens=24)
    assert page["answers"] == [list(chat.send(text).token_ids) for text in ("class Stack:", "And now?")]


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
@pytest.mark.parametrize(("variant", "weights"), [("diff_v1", "int4_g32"), ("diff_v2", "int8")])
def test_the_page_writes_on_webgpu_what_run_writes(
    variant: str, weights: str, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    """Prompts of more tokens than a call has, and a second one that begins as the first does."""
    quantize_checkpoint(trained(variant), tmp_path / "low", Scheme(weights=parse_format(weights)))
    artifact = export_artifact(tmp_path / "low", tmp_path / "artifact", target="webgpu")
    write_site(artifact, tmp_path / "site", packages=MODULES)
    text = "class Stack: push = lambda self, item: self.items.append(item); pop = lambda self: self."
    texts = text, f"{text}items.pop()"
    page = drive(tmp_path / "site", *texts, adapter="software")
    assert ", GPU, " in page["about"]
    session, tokenizer = Session(artifact), Tokenizer(artifact / "tokenizer.json")
    assert len(tokenizer.encode(text)) > 32
    answers = [list(generate(session, tokenizer, text, max_tokens=24).token_ids) for text in texts]
    assert page["answers"] == answers
    page = drive(tmp_path / "site", text)  # the same site without WebGPU
    assert "thread" in page["about"] and page["answers"] == answers[:1]


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
@pytest.mark.parametrize(
    "worker", ["throw 1", "addEventListener('install', (e) => e.waitUntil(new Promise(() => {})))"]
)
def test_the_page_starts_without_service_workers(worker: str, artifacts: dict[str, Path], tmp_path: Path) -> None:
    """One that fails at registration, and one that is never ready."""
    write_site(artifacts["text"], tmp_path / "site", packages=MODULES)
    (tmp_path / "site" / "sw.js").write_text(worker)
    page = drive(tmp_path / "site", "import ")
    assert "1 thread," in page["about"] and len(page["answers"][0]) > 1


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
def test_a_changed_file_is_refused(artifacts: dict[str, Path], tmp_path: Path) -> None:
    write_site(artifacts["text"], tmp_path / "site", packages=MODULES)
    weights = tmp_path / "site" / "model" / "model.onnx.data"
    data = bytearray(weights.read_bytes())
    data[1000] ^= 1
    weights.write_bytes(data)
    assert drive(tmp_path / "site")["state"].startswith("Error: model.onnx.data: its hash is")


def fake_modules(folder: Path) -> Path:
    for package in PACKAGES:
        for file in package.files:
            (folder / package.name / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / package.name / file).write_text(package.name)
        (folder / package.name / "package.json").write_text(json.dumps({"version": package.version}))
    return folder


def test_the_files_of_a_site(artifacts: dict[str, Path], tmp_path: Path) -> None:
    modules = fake_modules(tmp_path / "node_modules")
    sizes = write_site(artifacts["text"], tmp_path / "site", packages=modules)
    assert {"index.html", "app.js", "worker.js", "model.js", "sw.js", "model/diffbit.json", "model/model.onnx.data",
            "lib/ort.wasm.min.mjs", "lib/jinja.js", "site.json"} <= set(sizes)  # fmt: skip
    assert (tmp_path / "site" / "model" / "model.onnx").read_bytes() == (artifacts["text"] / "model.onnx").read_bytes()
    about = json.loads((tmp_path / "site" / "site.json").read_text())
    assert about["packages"]["onnxruntime-web"]["version"] == PACKAGES[0].version
    with pytest.raises(DiffbitError, match="already exists"):
        write_site(artifacts["text"], tmp_path / "site", packages=modules)
    assert write_site(artifacts["text"], tmp_path / "site", packages=modules, overwrite=True) == sizes
    command = ["web", str(artifacts["text"]), "-o", str(tmp_path / "site"), "--packages", str(modules), "--quiet"]
    assert CliRunner().invoke(app, [*command, "--overwrite"]).exit_code == 0


def test_packages_that_are_others(artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = fake_modules(tmp_path / "node_modules")
    (modules / "onnxruntime-web" / "package.json").write_text('{"version": "9.9.9"}')
    with pytest.raises(DiffbitError, match=r"has version 9\.9\.9, wanted"):
        write_site(artifacts["text"], tmp_path / "site", packages=modules)
    with pytest.raises(DiffbitError, match="cannot be read"):
        write_site(artifacts["text"], tmp_path / "site", packages=tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DiffbitError, match="npm is not installed"):
        write_site(artifacts["text"], tmp_path / "site")
    npm = tmp_path / "npm"
    npm.write_text('#!/bin/sh\n/bin/echo damaged > "$4/x.tgz"\n')
    npm.chmod(0o755)
    with pytest.raises(DiffbitError, match="does not have the hash"):
        write_site(artifacts["text"], tmp_path / "site")
    npm.write_text("#!/bin/sh\n/bin/echo no such release >&2; exit 1\n")
    with pytest.raises(DiffbitError, match="no such release"):
        write_site(artifacts["text"], tmp_path / "site")
    assert not (tmp_path / "site").exists()
