"""An artifact of `export --layout transformers.js` in transformers.js, as it is, in Chromium (test_site.py says what it
needs)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from diffbit.export import export_artifact
from diffbit.io.errors import DiffbitError
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint
from diffbit.runtime import Session, generate, verify

from .test_site import MODULES, READY, evaluate

PAGE = """<!doctype html><meta charset="utf-8"><script type="importmap">{"imports": {
  "@huggingface/transformers": "/lib/@huggingface/transformers/dist/transformers.web.js",
  "onnxruntime-web/webgpu": "/lib/onnxruntime-web/dist/ort.webgpu.bundle.min.mjs",
  "onnxruntime-common": "/lib/onnxruntime-common/dist/esm/index.js"
}}</script>"""
RUN = """
import { AutoModelForCausalLM, AutoTokenizer, env } from "@huggingface/transformers";

export default async (texts, most) => {
  Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "/", useBrowserCache: false });
  Object.assign(env.backends.onnx.wasm, { wasmPaths: "/lib/onnxruntime-web/dist/", numThreads: 1 });
  const tokenizer = await AutoTokenizer.from_pretrained("model");
  const model = await AutoModelForCausalLM.from_pretrained("model");
  const answers = [];
  for (const text of texts) {
    const inputs = await tokenizer(text);
    const found = await model.generate({ ...inputs, max_new_tokens: most, do_sample: false });
    answers.push(found.tolist()[0].slice(inputs.input_ids.dims[1]).map(Number));
  }
  return answers;
};
"""


@pytest.fixture(scope="module")
def artifact(trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float: int4 weights are multiplied by int8 activations here and by float ones in a browser. The weights are in
    several files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffbit.export.onnx_graph.FILE_BYTES", 200_000)
        return export_artifact(trained("diff_v1"), tmp_path_factory.mktemp("js") / "model", layout="transformers.js")


def test_the_folder_is_an_artifact(artifact: Path) -> None:
    names = {path.relative_to(artifact).as_posix() for path in artifact.rglob("*") if path.is_file()}
    data = {"onnx/model.onnx_data", "onnx/model.onnx_data_1", "onnx/model.onnx_data_2"}
    assert {"onnx/model.onnx", *data, "config.json", "tokenizer.json", "diffbit.json"} <= names
    assert verify(artifact).passed
    data = artifact / "onnx" / "model.onnx_data"
    kept = data.read_bytes()
    data.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    assert [check.name for check in verify(artifact).failures] == ["file:onnx/model.onnx_data"]
    data.write_bytes(kept)


def test_a_low_bit_cache_is_refused(trained: Callable[[str], Path], tmp_path: Path) -> None:
    scheme = Scheme(attention=AttentionScheme(keys="int8", values="int8"))
    quantize_checkpoint(trained("diff_v1"), tmp_path / "kv", scheme)
    with pytest.raises(DiffbitError, match=r"transformers\.js cannot run"):
        export_artifact(tmp_path / "kv", tmp_path / "model", layout="transformers.js")


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
def test_transformers_js_writes_what_run_writes(artifact: Path) -> None:
    site = artifact.parent
    (site / "index.html").write_text(PAGE)
    (site / "lib").symlink_to(MODULES)
    texts = ("def __init__(self", "import é😀 ")
    answers = evaluate(site, RUN, list(texts), 24)
    session = Session(artifact)
    expected = [list(generate(session, text, max_tokens=24, temperature=0).result().token_ids) for text in texts]
    assert answers == expected
