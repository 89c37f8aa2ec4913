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
from diffbit.quantize import Scheme, parse_format, quantize_checkpoint
from diffbit.runtime import Session, Tokenizer, generate
from diffbit.runtime.native import library

PACKAGES = Path(sys.prefix) / "ortmodel"
READY = PACKAGES.exists()
PROMPT, TOKENS = "def add(a, b):\n", 24
CHILD = """
import json, sys
import onnxruntime as ort
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import AutoTokenizer

folder, library, prompt, count = sys.argv[1:]
options = ort.SessionOptions()
if library:
    options.register_custom_ops_library(library)
model = ORTModelForCausalLM.from_pretrained(folder, session_options=options, use_io_binding=False)
given = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")
ids = model.generate(input_ids=given["input_ids"], attention_mask=given["attention_mask"],
                     max_new_tokens=int(count), do_sample=False)
print(json.dumps(ids[0, given["input_ids"].shape[1]:].tolist()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason=f"needs optimum-onnx in {PACKAGES}")
@pytest.mark.parametrize("kernels", [False, True], ids=["bodies", "library"])
def test_it_writes_what_run_writes(trained: Callable[[str], Path], tmp_path: Path, kernels: bool) -> None:
    source = trained("diff_v1")
    if kernels:  # bodies multiply int4 weights by float activations
        quantize_checkpoint(source, tmp_path / "int4", Scheme(weights=parse_format("int4_g32")))
        source = tmp_path / "int4"
    artifact = export_artifact(source, tmp_path / "model")
    command = [sys.executable, "-c", CHILD, str(artifact), str(library()) if kernels else "", PROMPT, str(TOKENS)]
    environment = os.environ | {"PYTHONPATH": str(PACKAGES)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr
    tokenizer = Tokenizer(artifact / "tokenizer.json")
    wanted = list(generate(Session(artifact), tokenizer, PROMPT, max_tokens=TOKENS).token_ids)
    assert json.loads(done.stdout.splitlines()[-1])[: len(wanted)] == wanted and len(wanted) > 10


def test_what_this_needs_is_there_in_ci() -> None:
    assert READY or "DIFFBIT_REQUIRE_ORTMODEL" not in os.environ
