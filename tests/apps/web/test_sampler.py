"""The JavaScript sampler against runtime's in Python: the same token for each of evenly spread draws."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from diffbit.apps.web.site import PACKAGE
from diffbit.runtime import Sampler
from diffbit.settings import Sampling

DRAWS = 500
SCRIPT = f"""
import {{ Sampler, samplingOf }} from {json.dumps((PACKAGE / "sampler.js").as_uri())};
"""
DRAW = """
const [cases, draws] = JSON.parse(process.argv[1]);
const of = ({ logits, ids, prompt, options }) => {
  let at = 0;
  const sampler = new Sampler(samplingOf({ do_sample: true, top_k: 0 }, options), prompt, () => (at++ + 0.5) / draws);
  return Array.from({ length: draws }, () => sampler.choose(logits, ids));
};
console.log(JSON.stringify(cases.map(of)));
"""
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {3: 2.0}},
    "penalties": {
        "temperature": 1.2, "frequency_penalty": 0.8, "presence_penalty": -0.5, "repetition_penalty": 1.2,
    },
    "min-p": {"temperature": 0.9, "min_p": 0.2},
    "top-k of equal logits": {"temperature": 3.0, "top_k": 7},
    "nucleus": {"temperature": 1.0, "top_k": 8, "top_p": 0.7, "min_p": 0.05, "logit_bias": {0: -3.0, 5: 1.0}},
    "nucleus of many": {"temperature": 1.5, "top_p": 0.9},
}  # fmt: skip


class Spread:
    """Evenly spread draws in the place of random ones."""

    def __init__(self) -> None:
        self.at = 0

    def random(self) -> float:
        self.at += 1
        return (self.at - 0.5) / DRAWS


def node(script: str, argument: object) -> Any:
    command = ["node", "--input-type=module", "-e", SCRIPT + script, json.dumps(argument)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def camel(options: dict[str, Any]) -> dict[str, Any]:
    def name(snake: str) -> str:
        first, *others = snake.split("_")
        return first + "".join(word.capitalize() for word in others)

    return {name(key): value for key, value in options.items()}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_javascript_draws_as_python_does() -> None:
    rng = np.random.default_rng(3)
    cases, expected = [], []
    for name, options in OPTIONS.items():
        logits = rng.normal(0, 2, 2000 if "many" in name else 20).round(0 if "equal" in name else 6)
        ids = rng.integers(0, 20, 9).tolist()
        cases.append({"logits": logits.tolist(), "ids": ids, "prompt": 4, "options": camel(options)})
        sampler = Sampler(**options)
        sampler._random = Spread()  # type: ignore[assignment]
        sampler.start(4)
        expected.append([sampler(logits, ids) for _ in range(DRAWS)])
    assert node(DRAW, [cases, DRAWS]) == expected
    assert all(len(set(tokens)) > 1 for tokens in expected[1:])


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_settings_are_read_as_python_reads_them() -> None:
    configs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "min_p": None}, {"top_p": 0.5, "seed": 3}),
        ({"do_sample": False}, {"temperature": 0.7, "frequency_penalty": 1.0, "logit_bias": {4: 1.0}}),
    ]
    script = "console.log(JSON.stringify(JSON.parse(process.argv[1]).map(([a, b]) => samplingOf(a, b))));"
    settings = node(script, [[config, camel(changes)] for config, changes in configs])
    for (config, changes), found in zip(configs, settings, strict=True):
        fields = camel({key: value for key, value in asdict(Sampling.of_model(config, **changes)).items()})
        fields["logitBias"] = {str(token): bias for token, bias in fields["logitBias"].items()}
        assert found == {key: value for key, value in fields.items() if value is not None}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_bad_settings_and_seeds() -> None:
    script = """
    const error = (run) => { try { run(); } catch (error) { return `${error.name}: ${error.message}`; } };
    const refused = (options) => error(() => samplingOf({}, options));
    const draws = (seed) => {
      const sampler = new Sampler(samplingOf({}, { temperature: 1, topK: 0, seed }));
      return Array.from({ length: 50 }, () => sampler.choose(new Float32Array(1000), []));
    };
    const infinite = error(() => new Sampler({}).choose([0, NaN, 1], []));
    const all = { refused: JSON.parse(process.argv[1]).map(refused), draws: [1, 1, 2].map(draws), infinite };
    console.log(JSON.stringify(all));
    """
    found = node(script, [{"temperature": -1}, {"topP": 0}, {"topK": 1.5}, {"seed": "x"}, {"topP": 1}])
    for message, name in zip(found["refused"], ("temperature", "topP", "topK", "seed"), strict=False):
        assert message.startswith(f"RangeError: {name} is ") and "wanted a" in message
    assert found["refused"][-1] is None
    first, again, other = found["draws"]
    assert first == again != other and len(set(first)) > 40
    assert "not finite" in found["infinite"]
