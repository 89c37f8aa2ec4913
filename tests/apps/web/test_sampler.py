"""The page's sampler in JavaScript against runtime's in Python, over evenly spread draws."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffbit.apps.web.site import PAGE
from diffbit.runtime import Sampler

DRAWS = 2000
SCRIPT = """
import { sampler } from %s;
const { logits, ids, prompt, options, draws } = JSON.parse(process.argv[1]);
let at = 0;
const choose = sampler({ ...options, random: () => (at++ + 0.5) / draws }, prompt);
console.log(JSON.stringify(Array.from({ length: draws }, () => choose(logits, ids))));
"""
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {"3": 2.0}},
    "penalties": {"temperature": 1.2, "frequency_penalty": 0.8, "presence_penalty": -0.5, "repetition_penalty": 1.2},
    "min-p": {"temperature": 0.9, "min_p": 0.2},
    "nucleus": {"temperature": 1.0, "top_k": 8, "top_p": 0.7, "min_p": 0.05, "logit_bias": {"0": -3.0, "5": 1.0}},
}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
@pytest.mark.parametrize("name", OPTIONS)
def test_the_page_draws_as_python_does(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    logits, ids, options = rng.normal(0, 2, 20), rng.integers(0, 20, 9).tolist(), OPTIONS[name]
    shutil.copyfile(PAGE / "model.js", tmp_path / "model.mjs")
    request = {"logits": logits.tolist(), "ids": ids, "prompt": 4, "options": options, "draws": DRAWS}
    command = ["node", "--input-type=module", "-e", SCRIPT % json.dumps((tmp_path / "model.mjs").as_uri())]
    done = subprocess.run([*command, json.dumps(request)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    drawn = Counter(json.loads(done.stdout))
    bias = {int(token): value for token, value in options.get("logit_bias", {}).items()}
    sampler = Sampler(**options | {"logit_bias": bias})
    sampler.start(4)
    if not options.get("temperature"):
        assert set(drawn) == {sampler(logits, ids)}
        return
    tokens, probabilities = sampler.distribution(sampler._changed(logits, np.array(ids)))
    assert set(drawn) <= set(tokens.tolist())
    for token, probability in zip(tokens.tolist(), probabilities, strict=True):
        assert drawn[token] / DRAWS == pytest.approx(probability, abs=2 / DRAWS)
