"""ORTModelForCausalLM of optimum-onnx on artifacts, with the bodies of diffbit's operators and with its library.

optimum-onnx wants an older transformers, so it is in a folder of its own that only a child process sees:

    pip install --target .venv/ortmodel --no-deps -r deploy/locks/ortmodel.txt
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.runtime import Session, generate
from diffbit.runtime.native import library

PACKAGES = Path(sys.prefix) / "ortmodel"
READY = PACKAGES.exists()
PROMPT, TOKENS = "def add(a, b):\n", 24
CHILD = """
import json, sys
import onnxruntime as ort
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import AutoTokenizer

library, prompt, count, *folders = sys.argv[1:]
for folder, kernels in zip(folders, (False, True), strict=True):
    options = ort.SessionOptions()
    if kernels:
        options.register_custom_ops_library(library)
    model = ORTModelForCausalLM.from_pretrained(folder, session_options=options, use_io_binding=False)
    given = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")
    ids = model.generate(input_ids=given["input_ids"], attention_mask=given["attention_mask"],
                         max_new_tokens=int(count), do_sample=False)
    print(json.dumps(ids[0, given["input_ids"].shape[1]:].tolist()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason=f"needs optimum-onnx in {PACKAGES}")
def test_it_writes_what_run_writes(trained: Callable[[str], Path], tmp_path: Path) -> None:
    """The bodies in float, for they multiply int4 weights by float activations; the library with int4 weights."""
    quantize_checkpoint(trained("diff_v1"), tmp_path / "int4", Scheme(weights=parse_format("int4_g32")))
    artifacts = [export_artifact(trained("diff_v1"), tmp_path / "bodies")]
    artifacts.append(export_artifact(tmp_path / "int4", tmp_path / "library", kv="fp16"))
    command = [sys.executable, "-c", CHILD, str(library()), PROMPT, str(TOKENS), *map(str, artifacts)]
    environment = os.environ | {"PYTHONPATH": str(PACKAGES)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr
    for artifact, tokens in zip(artifacts, map(json.loads, done.stdout.splitlines()[-2:]), strict=True):
        expected = list(generate(Session(artifact), PROMPT, max_tokens=TOKENS, temperature=0).result().token_ids)
        assert tokens[: len(expected)] == expected and len(expected) > 10


def test_ci_has_openvino() -> None:
    assert READY or "DIFFBIT_REQUIRE_ORTMODEL" not in os.environ
