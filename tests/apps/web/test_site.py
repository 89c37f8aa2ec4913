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
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from diffbit.apps.web.site import IS_READ, PACKAGE, PACKAGES, write_site
from diffbit.cli.app import app
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.io.files import json_sha256, sha256_file
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint
from diffbit.runtime import Chat, Sampler, Session, Tokenizer, generate

from .modules import module

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
    export_artifact(trained("diff_v1"), folder / "text", kv="fp16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffbit.export.onnx_graph.FILE_BYTES", 200_000)
        export_artifact(folder / "talker", folder / "chat")
    assert (folder / "chat" / "model.onnx.data_2").exists()
    return {"text": folder / "text", "chat": folder / "chat"}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path, handler: type[Quiet] = Quiet) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def drive(
    site: Path | str, *steps: tuple[object, ...], adapter: str = "none", most: int = 24, quota: int = 0
) -> dict[str, Any]:
    """What the page in a folder, or at an address, showed after the steps (drive.mjs has their names)."""
    with served(site) if isinstance(site, Path) else contextlib.nullcontext(site) as address:
        request = json.dumps({"address": address, "adapter": adapter, "most": most, "quota": quota, "steps": steps})
        command = ["node", str(HERE / "drive.mjs"), str(MODULES / "x"), str(CHROMIUM), request]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert all(url.startswith((address, "data:", "blob:")) for url in report["asked"])  # no other network
    return report


def evaluate(site: Path, module: str, *arguments: object) -> Any:
    """What the default function of a module returns in Chromium, on the page of a folder."""
    (site / "run.js").write_text(module)
    with served(site) as address:
        command = ["node", str(HERE / "evaluate.mjs"), str(MODULES / "x"), str(CHROMIUM), address, "/run.js"]
        done = subprocess.run([*command, json.dumps(arguments)], capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


class Breaking(Quiet):
    """Sends parts of files (HTTP Range). The first answer with the model's weights breaks off after `breaks` bytes, of
    which the browser may lose any; the second waits at twice as many until the page hangs up."""

    breaks = 400_000
    begins: ClassVar[list[int]] = []  # of the parts that were asked for

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.name != "model.onnx.data":
            return super().do_GET()
        wanted, data = self.headers.get("Range"), path.read_bytes()
        begin = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        self.begins.append(begin)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(data) - begin))
        self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        self.wfile.write(data[begin : len(self.begins) * self.breaks] if len(self.begins) < 3 else data[begin:])
        if len(self.begins) == 2:
            self.wfile.flush()
            with contextlib.suppress(OSError):
                self.connection.recv(1)
        self.close_connection = True
        return None


def test_ci_has_openvino() -> None:
    assert READY or "DIFFBIT_REQUIRE_WEB" not in os.environ


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
def test_the_page_writes_what_run_writes(artifacts: dict[str, Path], tmp_path: Path) -> None:
    """Text, and a conversation of two turns; with diffbit's kernels, and with onnxruntime-web, and the threads that a
    service worker brings. An answer can be stopped, and the page fits a narrow window."""
    module()
    session = Session(artifacts["text"])
    write_site(artifacts["text"], tmp_path / "text", packages=MODULES)
    page = drive(tmp_path / "text", ("ask", "def __init__(self"), ("ask", "import é😀 "))
    expected = [
        generate(session, text, max_tokens=24, temperature=0).result() for text in ("def __init__(self", "import é😀 ")
    ]
    assert page["answers"] == [list(one.token_ids) for one in expected]
    assert page["talk"] == "import é😀 " + expected[1].text.rstrip("\n")
    threads = min(4, os.cpu_count() or 1)
    assert f"on {threads} thread{'s' if threads > 1 else ''}." in page["about"] and not page["said"]
    for fact in ("differential, version 1", "KV cachefloat16", "Licensenot stated"):
        assert fact in page["facts"]
    write_site(artifacts["chat"], tmp_path / "chat", packages=MODULES, license="apache-2.0")
    texts, narrow = ("class Stack:", "And now?"), ("view", (360, 640, "dark"))
    for module_file in (tmp_path / "chat" / "diffbit" / "wasm").glob("*.wasm"):
        module_file.unlink()
    page = drive(tmp_path / "chat", *(("ask", text) for text in texts), narrow, ("stop", "More?"), most=60)
    chat = Chat(Session(artifacts["chat"]), max_tokens=60, sampler=Sampler())
    assert page["answers"][:2] == [list(chat.send(text).token_ids) for text in texts]
    assert len(page["answers"][2]) < 600 and ": stopped." in page["state"]
    assert "onnxruntime-web" in page["about"] and "threads" in page["about"]
    assert "KV cachefloat32" in page["facts"] and "Licenseapache-2.0" in page["facts"]
    assert page["overflow"] <= 0 and not page["said"]


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
@pytest.mark.parametrize(("keys", "values"), [("int8", "int8"), ("int4", "int4"), ("int3", "int2"), ("int2", "int4")])
def test_the_page_has_every_cache(
    keys: str, values: str, trained: Callable[[str], Path], artifacts: dict[str, Path], tmp_path: Path
) -> None:
    """Prompts of more tokens than stay in float16, the second beginning as the first; diffbit's kernels, then the
    operator's body in onnxruntime-web, beside the same in Python."""
    module()
    scheme = Scheme(weights=parse_format("int4_g32"), attention=AttentionScheme(keys=keys, values=values, window=8))
    quantize_checkpoint(trained("diff_v1"), tmp_path / "low", scheme)
    artifact = export_artifact(tmp_path / "low", tmp_path / "artifact")
    texts = [f"class Stack: push = lambda self, item: self.items.append(item); {end}" for end in ("pop", "items")]
    write_site(artifact, tmp_path / "site", packages=MODULES)
    for native in (True, False):
        if not native:
            for module_file in (tmp_path / "site" / "diffbit" / "wasm").glob("*.wasm"):
                module_file.unlink()
        session = Session(artifact, native=native)
        page = drive(tmp_path / "site", *(("ask", text) for text in texts))
        wanted = [list(generate(session, text, max_tokens=24, temperature=0).result().token_ids) for text in texts]
        assert page["answers"] == wanted and not page["said"]
        assert ("onnxruntime-web" in page["about"]) != native


@pytest.mark.slow
@pytest.mark.parametrize("browser", ["firefox", "webkit"])
def test_other_browsers_write_it_too(browser: str, artifacts: dict[str, Path], tmp_path: Path) -> None:
    """With diffbit's kernels, in the build without relaxed SIMD where WebKit has none. WebKitGTK shares no memory with
    threads unless a variable says so; Safari does."""
    program = shutil.which("firefox-esr") or shutil.which("firefox")
    if browser == "webkit":
        found = sorted(Path("/usr/lib").glob("*/webkit2gtk-4.*/MiniBrowser"))
        program = str(found[0]) if found and shutil.which("WebKitWebDriver") and shutil.which("xvfb-run") else None
    if not (READY and program) and "DIFFBIT_REQUIRE_WEB" not in os.environ:
        pytest.skip(f"needs {browser}, Node.js and tests/apps/web/node_modules")
    module()
    texts = ["def __init__(self", "import é😀 "]
    write_site(artifacts["text"], tmp_path / "site", packages=MODULES)
    session = Session(artifacts["text"])
    expected = [list(generate(session, text, max_tokens=24, temperature=0).result().token_ids) for text in texts]
    several = (
        f"on {min(4, os.cpu_count() or 1)} threads." if browser == "firefox" else " threads."
    )  # WebKit says 4 or 8
    for shares in ("0", "1"):
        with served(tmp_path / "site") as address:
            request = json.dumps({"address": address, "texts": texts, "most": 24})
            command = ["node", str(HERE / "elsewhere.mjs"), str(MODULES / "x"), browser, str(program), request]
            command = ["xvfb-run", "--auto-servernum", *command] if browser == "webkit" else command
            environment = {**os.environ, "JSC_useSharedArrayBuffer": shares}
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
        assert not done.returncode, done.stderr
        page = json.loads(done.stdout)
        assert page["answers"] == expected
        one = browser == "webkit" and shares == "0"
        assert ("on 1 thread." if one else several) in page["about"] and "onnxruntime" not in page["about"]


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
def test_a_download_goes_on(artifacts: dict[str, Path], tmp_path: Path) -> None:
    """After a connection that broke, and after a pause and a new visit, which keeps what had come. A third has all."""
    write_site(artifacts["text"], tmp_path / "site", packages=MODULES)
    Breaking.begins.clear()
    with served(tmp_path / "site", Breaking) as address:
        steps = ("pause", 2 * Breaking.breaks), ("visit",), ("ask", "import "), ("visit",), ("ask", "import ")
        page = drive(address, *steps)
    first, broken, kept = Breaking.begins
    assert first == 0 <= broken <= Breaking.breaks and kept > 2 * Breaking.breaks - 100_000  # the other files have less
    assert len(page["answers"][0]) > 1 and page["answers"][0] == page["answers"][1]


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
    page = drive(tmp_path / "site", *(("ask", text) for text in texts), adapter="software")
    assert "on GPU." in page["about"]
    session, tokenizer = Session(artifact), Tokenizer(artifact / "tokenizer.json")
    assert len(tokenizer.encode(text)) > 32
    answers = [list(generate(session, text, max_tokens=24, temperature=0).result().token_ids) for text in texts]
    assert page["answers"] == answers
    page = drive(tmp_path / "site", ("ask", text))  # the same site without WebGPU
    assert "thread" in page["about"] and page["answers"] == answers[:1]


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
@pytest.mark.parametrize(
    "worker", ["throw 1", "addEventListener('install', (e) => e.waitUntil(new Promise(() => {})))"]
)
def test_the_page_starts_without_service_workers(worker: str, artifacts: dict[str, Path], tmp_path: Path) -> None:
    """One that fails at registration, and one that is never ready."""
    module()
    write_site(artifacts["text"], tmp_path / "site", packages=MODULES)
    (tmp_path / "site" / "sw.js").write_text(worker)
    page = drive(tmp_path / "site", ("ask", "import "))
    assert "on 1 thread." in page["about"] and len(page["answers"][0]) > 1


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
def test_a_changed_file_is_refused(artifacts: dict[str, Path], tmp_path: Path) -> None:
    write_site(artifacts["text"], tmp_path / "site", packages=MODULES, slow=True)
    weights = tmp_path / "site" / "model" / "model.onnx.data"
    data = bytearray(weights.read_bytes())
    data[1000] ^= 1
    weights.write_bytes(data)
    assert drive(tmp_path / "site")["state"].startswith("Error: model.onnx.data is not the file that was exported")


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
def test_page_keeps_the_model_in_memory_if_storage_is_full(artifacts: dict[str, Path], tmp_path: Path) -> None:
    """With room for no file, for the small ones, for a part of the weights, and for all."""
    write_site(artifacts["text"], tmp_path / "site", packages=MODULES, slow=True)
    session = Session(artifacts["text"])
    expected = list(generate(session, "import ", max_tokens=24, temperature=0).result().token_ids)
    weights = (artifacts["text"] / "model.onnx.data").stat().st_size
    for quota in (20_000, 200_000, weights, 20 * weights):
        page = drive(tmp_path / "site", ("ask", "import "), ("visit",), ("ask", "import "), quota=quota)
        assert page["answers"] == [expected, expected] and not page["said"], quota


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
def test_thinking_is_switched_where_the_template_can(
    artifacts: dict[str, Path], trained: Callable[[str], Path], tmp_path: Path
) -> None:
    """The checkbox begins as the template does, and is not there where the template has no switch."""
    shutil.copytree(trained("diff_v1"), tmp_path / "thinker")
    switch = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    (tmp_path / "thinker" / "chat_template.jinja").write_text(TEMPLATE + switch)
    artifact = export_artifact(tmp_path / "thinker", tmp_path / "artifact")
    write_site(artifact, tmp_path / "site", packages=MODULES, slow=True)
    steps = ("ask", "class A:"), ("press", "#forget"), ("press", "#settings summary"), ("press", "#think")
    page = drive(tmp_path / "site", *steps, ("ask", "class A:"))
    expected = [
        list(Chat(Session(artifact), max_tokens=24, sampler=Sampler(), think=think).send("class A:").token_ids)
        for think in (None, False)
    ]
    assert page["answers"] == expected and expected[0] != expected[1]
    write_site(artifacts["chat"], tmp_path / "plain", packages=MODULES, slow=True)
    report = tmp_path / "plain" / "app.js"
    report.write_text(report.read_text() + '\nconsole.log(getComputedStyle(at("thinking")).display);')
    assert drive(tmp_path / "plain")["said"] == ["none"]


def fake_modules(folder: Path) -> Path:
    for package in PACKAGES:
        for file in package.files:
            (folder / package.name / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / package.name / file).write_text(package.name)
        (folder / package.name / "package.json").write_text(json.dumps({"version": package.version}))
    return folder


def test_the_files_of_a_site(artifacts: dict[str, Path], tmp_path: Path) -> None:
    modules = fake_modules(tmp_path / "node_modules")
    sizes = write_site(artifacts["text"], tmp_path / "site", packages=modules, slow=True)
    assert {"index.html", "app.js", "worker.js", "diffbit/model.js", "sw.js", "model/diffbit.json", "site.json",
            "model/model.onnx.data", "lib/ort.wasm.min.mjs", "lib/jinja.js"} <= set(sizes)  # fmt: skip
    assert (tmp_path / "site" / "model" / "model.onnx").read_bytes() == (artifacts["text"] / "model.onnx").read_bytes()
    assert "diffbit/index.js" not in sizes  # it imports packages by name
    about = json.loads((tmp_path / "site" / "site.json").read_text())
    assert about["packages"]["onnxruntime-web"]["version"] == PACKAGES[0].version
    with pytest.raises(DiffbitError, match="already exists"):
        write_site(artifacts["text"], tmp_path / "site", packages=modules, slow=True)
    assert write_site(artifacts["text"], tmp_path / "site", packages=modules, slow=True, overwrite=True) == sizes
    command = ["web", str(artifacts["text"]), "-o", str(tmp_path / "site"), "--packages", str(modules), "--slow", "-q"]
    assert CliRunner().invoke(app, [*command, "--overwrite"]).exit_code == 0


def test_a_site_has_no_file_of_an_artifact_that_the_page_does_not_read(
    artifacts: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(artifacts["text"], folder)
    for name in ("index.html", "a.js", "model.onnx.data_1.html", "onnx/x.js"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("<script>alert(1)</script>")
        entry = {"bytes": 25, "sha256": sha256_file(folder / name)}
        manifest = json.loads((folder / "diffbit.json").read_text())
        manifest["files"][name] = entry
        manifest["sha256"] = json_sha256(manifest)
        (folder / "diffbit.json").write_text(json.dumps(manifest))
    sizes = write_site(folder, tmp_path / "site", packages=fake_modules(tmp_path / "node_modules"), slow=True)
    files = {name.removeprefix("model/") for name in sizes if name.startswith("model/")}
    assert files == {"diffbit.json", "model.onnx", "model.onnx.data", "generation_config.json", "tokenizer.json",
                     "tokenizer_config.json"}  # fmt: skip


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_a_site_has_the_files_that_the_page_reads() -> None:
    read = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
            "chat_template.jinja", "model.onnx", "onnx/model.onnx", "model.onnx.data", "model.onnx.data_1",
            "onnx/model.onnx_data", "onnx/model.onnx_data_12"]  # fmt: skip
    others = ["config.json", "index.html", "model.onnx.data_", "model.onnx.data_1.js", "onnx/x.js",
              "onnx/tokenizer.json", "model_onnx", "model.onnx\n", "model.onnx_data", ".tokenizer.json",
              "model.onnx.data_\u0661"]  # fmt: skip
    script = f"""
    import {{ isRead }} from {json.dumps((PACKAGE / "files.js").as_uri())};
    console.log(JSON.stringify({json.dumps(read + others)}.filter(isRead)));
    """
    done = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == read == [name for name in read + others if IS_READ.fullmatch(name)]


def test_packages_that_are_others(artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = fake_modules(tmp_path / "node_modules")
    (modules / "onnxruntime-web" / "package.json").write_text('{"version": "9.9.9"}')
    with pytest.raises(DiffbitError, match=r"has version 9\.9\.9, wanted"):
        write_site(artifacts["text"], tmp_path / "site", packages=modules, slow=True)
    with pytest.raises(DiffbitError, match="cannot be read"):
        write_site(artifacts["text"], tmp_path / "site", packages=tmp_path, slow=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DiffbitError, match="npm is not installed"):
        write_site(artifacts["text"], tmp_path / "site", slow=True)
    npm = tmp_path / "npm"
    npm.write_text('#!/bin/sh\n/bin/echo damaged > "$4/x.tgz"\n')
    npm.chmod(0o755)
    with pytest.raises(DiffbitError, match="does not have the hash"):
        write_site(artifacts["text"], tmp_path / "site", slow=True)
    npm.write_text("#!/bin/sh\n/bin/echo no such release >&2; exit 1\n")
    with pytest.raises(DiffbitError, match="no such release"):
        write_site(artifacts["text"], tmp_path / "site", slow=True)
    assert not (tmp_path / "site").exists()
