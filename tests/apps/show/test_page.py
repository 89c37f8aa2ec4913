"""The page is one file that loads nothing, and what models and prompts say stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffbit.apps.show.command import page_text
from diffbit.apps.show.document import document
from diffbit.io import page

from .pages import PROMPT, Elements, data_of, maps_of

HERE = Path(__file__).parent
MODULES = HERE.parent / "web" / "node_modules"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
READY = MODULES.is_dir() and CHROMIUM is not None and shutil.which("node") is not None
HOSTILE = "</script><script>document.title='in'</script><!-- <img src=x onerror=alert(1)>"
HOSTILE += "\"'`${1}\\ {{script}} &lt; \u2028\u202e é😀"


def hostile(document: Any) -> Any:
    """A document whose texts, but for the base64, are hostile."""
    if isinstance(document, dict):
        kept = ("maps", "lambdas", "what")
        return {name: value if name in kept else hostile(value) for name, value in document.items()}
    if isinstance(document, list):
        return [hostile(one) for one in document]
    return HOSTILE if isinstance(document, str) else document


@pytest.fixture(scope="module")
def shown(trained: Callable[[str], Path]) -> dict[str, Any]:
    return document([trained(name) for name in ("diff_v1", "diff_v2", "softmax")], PROMPT, "items", "cpu")


def test_hostile_texts_stay_in_the_data(shown: dict[str, Any]) -> None:
    plain, page = Elements(page_text(shown)), page_text(hostile(shown))
    assert data_of(page) == hostile(shown)
    assert Elements(page).tags == plain.tags
    assert Elements(page).attributes == plain.attributes


def test_the_policy_allows_the_script_and_the_style_alone(shown: dict[str, Any]) -> None:
    page = Elements(page_text(shown))
    (policy,) = [one["content"] for one, _ in page.all("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("default-src") == rules.pop("base-uri") == rules.pop("form-action") == "'none'"
    (script,) = [text for one, text in page.all("script") if "type" not in one]
    ((_, style),) = page.all("style")
    for name, text in (("script-src", script), ("style-src", style)):
        assert rules.pop(name) == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert not rules
    loading = {"src", "href", "srcset", "action", "style"}
    assert not [one for one in page.attributes if loading & one.keys() or any(name[:2] == "on" for name in one)]
    assert "innerHTML" not in script and "eval" not in script and "fetch" not in script


def drive(page: Path) -> dict[str, Any]:
    command = ["node", str(HERE / "drive.mjs"), str(MODULES / "x"), str(CHROMIUM), page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    assert not seen["said"] and seen["asked"] == [page.as_uri()]
    return seen


def test_ci_has_openvino() -> None:
    assert READY or "DIFFBIT_REQUIRE_WEB" not in os.environ


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
def test_the_page_in_chromium(shown: dict[str, Any], tmp_path: Path) -> None:
    """Keys move the sliders, layer and head; the texts are those of the JSON; it fits 400 and 1280 pixels."""
    page.write(tmp_path / "page.html", page_text(shown))
    seen = drive(tmp_path / "page.html")
    assert seen["begin"]["status"] == "Nothing is rounded."
    rounded = seen["rounded"]
    assert rounded["status"].startswith("Weights at 4 bits. diff_v1: ")
    assert rounded["outputs"][3:] == ["4 bits", "float", "float"]
    assert seen["cache"]["status"].startswith("KV cache at 8 bits.")
    assert seen["cache"]["outputs"][3:] == ["float", "8 bits", "float"]
    assert (seen["begin"]["layer"], seen["moved"]["layer"]) != (seen["moved"]["layer"], seen["begin"]["layer"])
    assert not [width for width, page in seen["widths"].items() if page > int(width)]

    model = shown["models"][1]
    for view, key in ((rounded, ("weights", 4)), (seen["moved"], ("kv", 8))):  # two layers
        compare(view, model, next(one for one in model["settings"] if (one["what"], one["bits"]) == key))


def compare(view: dict[str, Any], model: dict[str, Any], setting: dict[str, Any]) -> None:
    """What the page says of a model of DIFF version 2, with a lambda for each token, is what its data say."""
    assert f"KL {setting['kl']:.4f}" in view["status"]
    assert [one["token"] for one in setting["next"]] == [text.replace("␣", " ") for text in view["next"]]
    layer, head = view["layer"], view["head"]
    weights, lambdas = maps_of(model, setting)[layer]
    assert lambdas is not None
    assert view["operator"] == f"− {lambdas[head, -1]:.3f} ×"
    signal, noise = weights[head, :, -1]
    for texts, row in zip(view["weights"], (signal, noise, signal - lambdas[head, -1] * noise), strict=True):
        assert texts == pytest.approx(row.tolist(), abs=6e-5)
    assert [text / 100 for text in view["answer"]] == pytest.approx(setting["heads"][layer][head]["answer"], abs=0.01)


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
def test_hostile_texts_in_chromium(shown: dict[str, Any], tmp_path: Path) -> None:
    page.write(tmp_path / "page.html", page_text(hostile(shown)))
    seen = drive(tmp_path / "page.html")
    assert seen["scripts"] == 2 and seen["images"] == 0 and seen["title"].startswith("Attention of")
