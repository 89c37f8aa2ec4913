"""The npm package: packed by npm, and run in node and in Chromium (test_site.py says what that needs)."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from diffbit.apps.web.site import PACKAGE, PACKAGES
from diffbit.runtime import Chat, Sampler, Session, generate

from .modules import module
from .test_site import MODULES, READY, artifacts, evaluate

__all__ = ["artifacts"]

NEEDED = ("@huggingface/jinja", "@huggingface/tokenizers", "onnxruntime-web", "onnxruntime-common")
TEXTS = ("def __init__(self", "import é😀 ")
MESSAGES = [{"role": "system", "content": "Short."}, {"role": "user", "content": "class Stack:"}]
USE = """
import { load, type Generation, type Message } from "diffbit";

const onProgress = ({ loaded }: { loaded: number }) => console.log(loaded.toFixed());
const model = await load(new URL("https://example.org/model/"), { device: "cpu", onProgress });
const messages: Message[] = [{ role: "user", content: "Hello" }];
for await (const text of model.chat(messages, { maxTokens: 8, topK: 4, signal: AbortSignal.timeout(9) })) text.trim();
if (model.canThink) model.chat(messages, { think: false });
const last: Generation | null = model.last;
// @ts-expect-error
model.generate("x", { max_tokens: 3 });
"""
RUN = """
import { load } from "diffbit";

export default async (place, texts, messages, maxTokens) => {
  const loaded = [];
  const model = await load(place, { onProgress: (progress) => loaded.push(progress.loaded / progress.total) });
  const answers = [];
  for (const text of texts) {
    let whole = "";
    for await (const more of model.generate(text, { maxTokens, temperature: 0 })) whole += more;
    answers.push([model.last.ids, whole]);
  }
  const stop = new AbortController();
  for await (const text of model.generate(texts[0], { maxTokens, signal: stop.signal })) stop.abort();
  const { reason, ids } = model.last;
  const sampled = [];
  for (const seed of [1, 1, 2]) {
    for await (const text of model.generate(texts[0], { maxTokens, temperature: 1, seed })) null;
    sampled.push(model.last.ids);
  }
  const failures = [];
  const fails = async (run) => failures.push(await run().then(() => null, (error) => error.message));
  const first = model.generate("a", { maxTokens });
  await first.next();
  await fails(() => model.generate("b").next());
  await first.return();
  await fails(() => model.chat(messages).next());
  await fails(() => model.generate(Array(1000).fill(1)).next());
  await fails(() => model.generate("a", { maxTokens: 0 }).next());
  await fails(() => load(`${place}/none`));
  await model.close();
  return { answers, stopped: [reason, ids.length], sampled, failures, loaded };
};
"""
CHAT = """
import { load } from "diffbit";

export default async (place, messages, maxTokens) => {
  const model = await load(place);
  const answers = [];
  for (const content of ["And now?", "And then?", ""]) {
    let answer = "";
    for await (const more of model.chat(messages, { maxTokens, temperature: 0 })) answer += more;
    answers.push([model.last.ids, model.last.dropped]);
    messages.push({ role: "assistant", content: answer }, { role: "user", content });
  }
  return answers;
};
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node_modules folder with the package, as npm packs it, and what it needs."""
    module()
    folder = tmp_path_factory.mktemp("npm")
    subprocess.run(["npm", "pack", "--silent", str(PACKAGE)], cwd=folder, check=True, capture_output=True)
    (archive,) = folder.glob("diffbit-*.tgz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (folder / "node_modules" / "@huggingface").mkdir(parents=True)
    (folder / "package").rename(folder / "node_modules" / "diffbit")
    for name in NEEDED:
        (folder / "node_modules" / name).symlink_to(MODULES / name)
    return folder / "node_modules"


def in_node(modules: Path, script: str, *arguments: object) -> Any:
    file = modules.parent / "run.mjs"
    file.write_text(script)
    call = f"""
    const {{ default: run }} = await import("{file.as_uri()}");
    console.log(JSON.stringify(await run(...{json.dumps(arguments)})));
    """
    command = ["node", "--input-type=module", "-e", call]
    done = subprocess.run(command, capture_output=True, text=True, cwd=modules.parent, timeout=600)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_the_package_says_what_the_site_pins() -> None:
    package = json.loads((PACKAGE / "package.json").read_text())
    pinned = {package.name: package.version for package in PACKAGES}
    assert package["dependencies"] == {name: pinned[name] for name in package["dependencies"]}
    assert package["peerDependencies"] == {"onnxruntime-web": f"^{pinned['onnxruntime-web']}"}
    assert (PACKAGE / "LICENSE").read_text() == (Path(__file__).parents[3] / "LICENSE").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Node.js and tests/apps/web/node_modules")
def test_what_is_packed(modules: Path) -> None:
    files = {file.name for file in (modules / "diffbit").iterdir()}
    assert (
        files == {file.name for file in PACKAGE.iterdir()} >= {"index.js", "index.d.ts", "README.md", "LICENSE", "wasm"}
    )
    light = [modules / name for name in ("diffbit", *NEEDED[:2])]
    assert sum(file.stat().st_size for folder in light for file in folder.resolve().rglob("*.*")) < 3_000_000


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Node.js and tests/apps/web/node_modules")
def test_node_writes_what_run_writes(artifacts: dict[str, Path], modules: Path) -> None:
    found = in_node(modules, RUN, str(artifacts["text"]), TEXTS, MESSAGES, 24)
    session = Session(artifacts["text"])
    expected = [generate(session, text, max_tokens=24, temperature=0).result() for text in TEXTS]
    assert found["answers"] == [[list(one.token_ids), one.text] for one in expected]
    assert found["stopped"] == ["interrupted", 1]
    assert found["sampled"][0] == found["sampled"][1] != found["sampled"][2]
    assert found["loaded"] == sorted(found["loaded"]) and found["loaded"][-1] == 1
    sentences = (
        "is generating another",
        "has no chat template",
        "holds 256",
        "maxTokens is 0",
        "cannot be read (ENOENT)",
    )
    assert all(sentence in message for sentence, message in zip(sentences, found["failures"], strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Node.js and tests/apps/web/node_modules")
def test_a_conversation_that_grows_too_long(artifacts: dict[str, Path], modules: Path) -> None:
    """The oldest turns are left out, as Python's Chat does, and a damaged file is refused."""
    answers = in_node(modules, CHAT, str(artifacts["chat"]), MESSAGES, 100)
    chat = Chat(Session(artifacts["chat"]), system="Short.", max_tokens=100, sampler=Sampler())
    replies = [chat.send(text) for text in ("class Stack:", "And now?", "And then?")]
    assert replies[-1].dropped and answers == [[list(reply.token_ids), reply.dropped] for reply in replies]
    broken = shutil.copytree(artifacts["chat"], modules.parent / "broken")
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(AssertionError, match=r"tokenizer\.json is not the file that was exported"):
        in_node(modules, CHAT, str(broken), MESSAGES, 1)


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
def test_chromium_writes_what_run_writes(artifacts: dict[str, Path], modules: Path, tmp_path: Path) -> None:
    names = {
        "diffbit": "diffbit/index.js",
        "@huggingface/jinja": "@huggingface/jinja/dist/index.js",
        "@huggingface/tokenizers": "@huggingface/tokenizers/dist/tokenizers.mjs",
        "onnxruntime-web/wasm": "onnxruntime-web/dist/ort.wasm.bundle.min.mjs",
    }
    imports = json.dumps({"imports": {name: f"/lib/{file}" for name, file in names.items()}})
    (tmp_path / "index.html").write_text(f'<!doctype html><script type="importmap">{imports}</script>')
    (tmp_path / "lib").symlink_to(modules)
    (tmp_path / "model").symlink_to(artifacts["text"])
    found = evaluate(tmp_path, RUN, "/model", TEXTS, MESSAGES, 24)
    session = Session(artifacts["text"])
    expected = [generate(session, text, max_tokens=24, temperature=0).result() for text in TEXTS]
    assert found["answers"] == [[list(one.token_ids), one.text] for one in expected]
    assert found["stopped"] == ["interrupted", 1] and "the server answered 404" in found["failures"][-1]


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Node.js and tests/apps/web/node_modules")
def test_types(modules: Path) -> None:
    (modules.parent / "use.ts").write_text(USE)
    (modules.parent / "package.json").write_text('{"type": "module"}')
    options = {"noEmit": True, "strict": True, "target": "es2022", "module": "nodenext", "types": []}
    (modules.parent / "tsconfig.json").write_text(json.dumps({"compilerOptions": options, "files": ["use.ts"]}))
    command = ["node", str(MODULES / "typescript" / "bin" / "tsc"), "--project", "."]
    done = subprocess.run(command, capture_output=True, text=True, cwd=modules.parent)
    assert not done.returncode, done.stdout
