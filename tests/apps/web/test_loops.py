"""The JavaScript guard against loops beside runtime's in Python: it ends the same texts at the same token."""

from __future__ import annotations

import json
import random
import shutil
import subprocess

import pytest

from diffbit.apps.web.site import PACKAGE
from diffbit.runtime import LoopGuard

SCRIPT = f"""
import {{ readFileSync }} from "node:fs";
import {{ LoopGuard }} from {json.dumps((PACKAGE / "loops.js").as_uri())};
const [words, texts] = JSON.parse(readFileSync(0));
console.log(JSON.stringify(texts.map((ids) => {{
  const guard = new LoopGuard((ids) => ids.map((id) => words[id]).join(" "));
  const found = ids.findIndex((id) => guard.push(id));
  return found < 0 ? null : found + 1;
}})));
"""
WORDS = ["0", ",", "|", "x", "False", "one", "Two", "two", "drei", "vier", "私", "は", "é", "été"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_javascript_ends_what_python_ends() -> None:
    draw = random.Random(0)
    texts, expected = [], []
    for _ in range(60):
        unit = [draw.randrange(len(WORDS)) for _ in range(draw.choice([1, 2, 3, 5, 31, 95, 96, 97]))]
        ids = [draw.randrange(len(WORDS)) for _ in range(draw.randrange(20))]
        ids += unit * (draw.choice([100, 200, 400]) // len(unit) + 1)
        if draw.random() < 0.3:
            ids[draw.randrange(len(ids))] = 0
        texts.append(ids)
        guard = LoopGuard(lambda ids: " ".join(WORDS[id] for id in ids))
        expected.append(next((count for count, id in enumerate(ids, 1) if guard.push(id)), None))
    assert len(set(expected)) > 10 and None in expected
    command = ["node", "--input-type=module", "-e", SCRIPT]
    done = subprocess.run(command, input=json.dumps([WORDS, texts]), capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert json.loads(done.stdout) == expected
