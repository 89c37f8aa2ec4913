"""The numbers of a page: outliers, answers, what is left out, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from diffbit.apps.outliers.activations import measure
from diffbit.apps.show import document as module
from diffbit.apps.show.document import document
from diffbit.calib_data import Windows, load_tokenizer
from diffbit.cli.app import main
from diffbit.models import Decoder, ModelConfig, save
from diffbit.quantize import load

from .pages import PROMPT, data_of, maps_of

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("name", ["diff_v1", "softmax"])
def test_outliers_are_those_of_the_command(name: str, trained: Callable[[str], Path]) -> None:
    ids = np.array([load_tokenizer(trained(name)).backend.encode(PROMPT).ids])
    mask = np.ones_like(ids, dtype=bool)
    report = measure(load(trained(name)), Windows(ids, mask, mask, "", "", ids.size, 0, 1))
    (model,) = document([trained(name)], PROMPT, None, "cpu")["models"]
    branches = model["layers"][0]["branches"]
    for layer, one in enumerate(model["outliers"]):
        hidden, logits = report.hidden_states.layers[layer], report.attention_logits.layers[layer]
        assert one["hidden"]["largest"] == pytest.approx(hidden.max, rel=1e-5)
        assert one["hidden"]["median"] == pytest.approx(hidden.median, rel=2e-3)
        assert one["hidden"]["kurtosis"] == pytest.approx(hidden.kurtosis, rel=1e-4)
        assert (one["hidden"]["token"], one["hidden"]["channel"]) == (hidden.place.position, hidden.place.unit)
        assert one["logits"]["largest"] == pytest.approx(logits.max, rel=1e-5)
        softmax = one["logits"]["head"] * branches + one["logits"]["branch"]
        place = (softmax, one["logits"]["query"], one["logits"]["key"])
        assert place == (logits.place.unit, logits.place.position, logits.place.key)


def test_the_answer_is_every_occurrence(trained: Callable[[str], Path]) -> None:
    (model,) = document([trained("diff_v2")], PROMPT, "items", "cpu")["models"]
    assert "".join(model["tokens"]) == PROMPT
    assert "".join(model["tokens"][index] for index in model["answer"]) == "itemsitems"
    weights, lambdas = maps_of(model, model["settings"][0])[1]
    assert lambdas is not None
    for head, numbers in enumerate(model["settings"][0]["heads"][1]):
        last = weights[head, :, -1]
        rows = [*last, last[0] - lambdas[head, -1] * last[1]]
        shares = [np.abs(row[model["answer"]]).sum() / np.abs(row).sum() for row in rows]
        assert numbers["answer"] == pytest.approx(shares, abs=0.01)  # the page has 8 bits


def test_json_and_page_agree(trained: Callable[[str], Path], tmp_path: Path, capfd: Capture) -> None:
    page = tmp_path / "new" / "page.html"
    models = [str(trained(name)) for name in ("diff_v1", "softmax")]
    for _ in range(2):  # the second replaces the first
        with pytest.raises(SystemExit) as stopped:
            main(["show", *models, "--prompt", PROMPT, "--answer", "item", "-o", str(page), "--json", "--quiet"])
        captured = capfd.readouterr()
        assert stopped.value.code == 0 and captured.err == ""
        assert json.loads(captured.out) == data_of(page.read_text())
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_a_quantized_checkpoint_is_shown_as_it_is(quantized: Path) -> None:
    (model,) = document([quantized], "def add(a, b):", None, "cpu")["models"]
    assert model["stored"] == "int4_g32"
    assert [one["what"] for one in model["settings"]] == ["nothing"]


def save_model(folder: Path, checkpoint: Path, **changes: object) -> Path:
    shape = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 32}
    vocab = load_tokenizer(checkpoint).vocab_size
    config = ModelConfig.uniform(**{"vocab_size": vocab, "hidden_size": 64, "attention": "diff_v2"} | shape | changes)  # type: ignore[arg-type]
    save(Decoder(config), folder, tokenizer_from=checkpoint)
    return folder


def test_what_the_widths_do_not_allow_is_left_out(checkpoint: Path, tmp_path: Path, capfd: Capture) -> None:
    (model,) = document([save_model(tmp_path / "narrow", checkpoint)], "def add(a, b):", None, "cpu")["models"]
    kept = [one["bits"] for one in model["settings"] if one["what"] == "kv"]
    assert kept == [8]
    assert "narrow: kv at 4 bits are left out: keys cannot be int4" in capfd.readouterr().err


@pytest.mark.slow
def test_a_large_model_shows_some_layers(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "deep", checkpoint, num_layers=5)
    prompt = "def add(a, b):"

    def layers(**options: object) -> list[tuple[int, int]]:
        (model,) = document([folder], prompt, None, "cpu", **options)["models"]  # type: ignore[arg-type]
        maps_of(model, model["settings"][0])
        assert len(model["outliers"]) == 5
        return [(one["layer"], one["heads"]) for one in model["layers"]]

    assert layers() == [(layer, 4) for layer in range(5)]
    assert layers(layers=[4, 1]) == [(1, 4), (4, 4)]
    length = len(load_tokenizer(folder).backend.encode(prompt).ids)
    head = length * (length + 1) * len(module.SETTINGS)
    monkeypatch.setattr(module, "MOST_BYTES", 3 * 4 * head)
    assert layers() == [(0, 4), (2, 4), (4, 4)]
    monkeypatch.setattr(module, "MOST_BYTES", 2 * head)
    assert layers() == [(0, 2)]


REFUSED = {
    "no token": (["{model}", "--prompt", ""], "the prompt has 0 tokens, wanted 1 to 64"),
    "many tokens": (["{model}", "--prompt", "a b c " * 30], "tokens, wanted 1 to 64"),
    "an answer elsewhere": (["{model}", "--prompt", "def", "--answer", "x"], "--answer is 'x', wanted a part of"),
    "an empty answer": (["{model}", "--prompt", "def", "--answer", ""], "--answer is '', wanted a part of"),
    "an artifact": (["{artifact}", "--prompt", "def"], "wanted the checkpoint that it was made from"),
    "nothing there": (["{model}/none", "--prompt", "def"], "none"),
    "no prompt": (["{model}"], "--prompt"),
    "no layer": (["{model}", "--prompt", "def", "--layers", "0,7"], "layer 7 has no attention; layers with attention"),
    "words for layers": (["{model}", "--prompt", "def", "--layers", "all"], "--layers is 'all', wanted numbers"),
    "stray bytes": (["{model}", "--prompt", "a\udce9"], "the prompt is not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_sentence(
    case: str, trained: Callable[[str], Path], artifact: Path, tmp_path: Path, capfd: Capture
) -> None:
    arguments, sentence = REFUSED[case]
    places = {"model": trained("diff_v1"), "artifact": artifact}
    with pytest.raises(SystemExit) as stopped:
        main(["show", *(one.format(**places) for one in arguments), "-o", str(tmp_path / "page.html")])
    message = capfd.readouterr().err.strip()
    assert stopped.value.code == 2
    assert message.startswith("error: ") and message.count("\n") == 0 and sentence in message
    assert not list(tmp_path.iterdir())


def test_a_page_or_json_is_wanted(trained: Callable[[str], Path], capfd: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["show", str(trained("diff_v1")), "--prompt", "def"])
    assert stopped.value.code == 2 and "pass a file with -o, or --json" in capfd.readouterr().err


def test_damaged_weights_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "large", checkpoint)
    decoder = load(folder)
    with torch.no_grad():
        decoder.model.norm.weight.fill_(3e38)
    save(decoder, tmp_path / "damaged", tokenizer_from=checkpoint)
    with pytest.raises(module.DiffbitError, match="damaged: the next token's logits are infinite or NaN"):
        document([tmp_path / "damaged"], "def", None, "cpu")
