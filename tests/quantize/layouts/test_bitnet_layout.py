"""Hugging Face's bitnet folders against transformers' own layers: both conventions of the scale, packed and float."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.bitnet import WeightQuant, pack_weights

from diffbit.formats import QTensor, QuantLinear
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint
from diffbit.quantize import load, load_block, read_scheme, read_weight
from diffbit.quantize.layouts import bitnet

from .bitnet_folders import DIVIDING, MASTER, OLD, PACKED, VOCABULARY, edit_settings, theirs, write_folder

FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "packed": (PACKED, {}),
    "packed-tied": (PACKED, {"tie_word_embeddings": True}),
    "dividing": (DIVIDING, {}),
    "old-llama": (OLD, {"kind": "llama"}),
    "master": (MASTER, {}),
    "master-bf16": (MASTER, {"dtype": torch.bfloat16}),
    "packed-bf16-silu": (PACKED, {"dtype": torch.bfloat16, "hidden_act": "silu"}),
    "float layers": (PACKED | {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp.down_proj"]}, {}),
}
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """transformers compiles its rounding; the compiler takes a minute and, in sums, other last bits."""
    torch.compiler.set_stance("force_eager")
    with torch.no_grad():
        yield
    torch.compiler.set_stance("default")


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_and_greedy_tokens_are_transformers(name: str, tmp_path: Path) -> None:
    """Inputs are rounded as round(x * (127 / max|x|)) there and as round(x / (max|x| / 127)) here: one number in a
    million lies so close to the middle between two steps that it goes the other way, and the logits of its token and of
    later ones then move by per cents of their spread. All others agree to the last bits.
    """
    settings, changes = FOLDERS[name]
    folder = write_folder(tmp_path / "m", settings, **changes)
    model, ours, ids = theirs(folder), load(folder), tokens(8, 13)
    expected = model(ids).logits
    error = (ours(ids) - expected).abs().amax(-1) / expected.std(-1)
    assert expected.std() > 0.3
    assert error.median() < 1e-5 and error.max() < 0.1
    prompt = ids[:, :4]
    for _ in range(24):
        prompt = torch.cat((prompt, model(prompt).logits[:, -1:].argmax(-1)), 1)
    generated = ids[:, :4]
    for _ in range(24):
        generated = torch.cat((generated, ours(generated)[:, -1:].argmax(-1)), 1)
    assert torch.equal(generated, prompt)


def test_weights_are_transformers_bit_for_bit(tmp_path: Path) -> None:
    packed, master = write_folder(tmp_path / "packed", PACKED), write_folder(tmp_path / "master", MASTER)
    stored, floats = load_file(packed / "model.safetensors"), load_file(master / "model.safetensors")
    weight = read_weight(Checkpoint(packed), UP)
    assert isinstance(weight, QTensor) and weight.format.name == "ternary" and weight.scale.dtype == torch.float32
    assert torch.equal(bitnet.pack(weight.codes), stored[UP]) and torch.equal(bitnet.unpack(stored[UP]), weight.codes)
    assert torch.equal(pack_weights(weight.codes.float() - 1), stored[UP])
    assert torch.equal(weight.scale.view(1), stored[f"{UP}_scale"])
    online = read_weight(Checkpoint(master), UP)
    assert isinstance(online, QTensor) and set(online.codes.flatten().tolist()) == {0, 1, 2}
    assert torch.equal(online.dequantize(), WeightQuant.apply(floats[UP]))
    quiet = torch.full((8, 8), 1e-9)
    assert bitnet.online(quiet)[1].item() == pytest.approx(1e-5) and (bitnet.online(quiet)[0] == 1).all()


def test_layers_scheme_and_blocks(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", *FOLDERS["float layers"][:1])
    checkpoint = Checkpoint(folder)
    scheme = read_scheme(checkpoint)
    assert scheme is not None and str(scheme.weights) == "ternary"
    assert scheme.overrides == (("model.layers.1.mlp.down_proj", None),)
    model, block = load(folder), load_block(checkpoint, 1)
    assert isinstance(model.model.layers[0].mlp.down_proj, QuantLinear)
    assert type(model.model.layers[1].mlp.down_proj) is type(model.lm_head) is torch.nn.Linear
    assert torch.equal(block.mlp.up_proj.weight.codes, model.model.layers[1].mlp.up_proj.weight.codes)
    edit_settings(folder, modules_to_not_convert=["lm_head", "model.layers.1.mlp.down_proj", "layers.*nothing"])
    assert read_scheme(Checkpoint(folder)) == scheme


def test_a_head_may_be_ternary(tmp_path: Path) -> None:
    """transformers converts what modules_to_not_convert leaves out, the head included."""
    folder = write_folder(tmp_path / "m", MASTER | {"modules_to_not_convert": ["model.layers.0"]})
    scheme = read_scheme(Checkpoint(folder))
    assert scheme is not None and scheme.format_for("lm_head") is scheme.format_for("model.layers.1.mlp.up_proj")
    assert scheme.format_for("model.layers.0.mlp.up_proj") is None and str(scheme.format_for("lm_head")) == "ternary"
    assert isinstance(load(folder).lm_head, QuantLinear)


def test_numbers_that_transformers_unpacked(tmp_path: Path) -> None:
    """An autobitlinear model that transformers loaded and saved again has -1, 0, 1 as floats."""
    folder = write_folder(tmp_path / "m", PACKED)
    expected = load(folder)(tokens(2, 5))
    edit_tensors(folder, lambda stored: stored.update({UP: bitnet.unpack(stored[UP]).bfloat16() - 1}))
    assert torch.equal(load(folder)(tokens(2, 5)), expected)


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors")


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda stored: stored.update({name: change(stored[name]).contiguous()}))


def settings(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_settings(folder, **changes)


SCALE = f"{UP}_scale"
REFUSED: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "a code of 3": (tensor(UP, lambda t: t | 3), [UP, "a code of 3, wanted 0, 1 or 2"]),
    "too few rows": (tensor(UP, lambda t: t[:-1]), [UP, "is uint8 (23, 64), wanted uint8 (24, 64)"]),
    "transposed": (tensor(UP, lambda t: t.T), [UP, "(64, 24)", "(24, 64)"]),
    "not packed after all": (tensor(UP, lambda t: t.repeat(4, 1)), [UP, "is uint8 (96, 64), wanted uint8 (24, 64)"]),
    "another integer": (tensor(UP, lambda t: t.to(torch.int16)), [UP, "is int16 (24, 64), wanted uint8"]),
    "floats": (
        tensor(UP, lambda t: torch.rand(96, 64)),
        [UP, "floats other than -1, 0 and 1", '"quantization_mode": "online"'],
    ),
    "no scale": (lambda f: edit_tensors(f, lambda stored: stored.pop(SCALE)), [SCALE, "is missing"]),
    "a scale of zero": (tensor(SCALE, lambda t: t * 0), [SCALE, "is [0.0]", "wanted one positive number"]),
    "a scale below zero": (tensor(SCALE, lambda t: -t), [SCALE, "wanted one positive number"]),
    "a scale that is NaN": (tensor(SCALE, lambda t: t * float("nan")), [SCALE, "NaN"]),
    "scales of rows": (tensor(SCALE, lambda t: t.repeat(96)), [SCALE, "of shape (96,)", "wanted one positive number"]),
    "unknown linear_class": (
        settings(linear_class="bitnetlinear"),
        ["config.json", "linear_class is 'bitnetlinear', wanted one of bitlinear, autobitlinear"],
    ),
    "unknown mode": (
        settings(quantization_mode=["online"]),
        ["quantization_mode is ['online'], wanted one of"],
    ),
    "packed and online": (settings(quantization_mode="online"), ["is packed, but config.json says", "'online'"]),
    "norms in the layers": (settings(use_rms_norm=True), ["config.json", "use_rms_norm"]),
    "norms in the layers, and their weights": (
        lambda f: (
            settings(use_rms_norm=True)(f),
            edit_tensors(f, lambda stored: stored.update({UP.replace("weight", "rms_norm.weight"): torch.ones(64)})),
        ),
        ["config.json", "use_rms_norm"],
    ),
    "patterns as text": (
        settings(modules_to_not_convert="lm_head"),
        ["modules_to_not_convert is 'lm_head', wanted a list"],
    ),
    "a pattern that runs for ever": (
        settings(modules_to_not_convert=["(a+)+b"]),
        ["[0] is '(a+)+b', wanted a"],
    ),
    "another one": (settings(modules_to_not_convert=["m" + ".*a" * 9]), ["modules_to_not_convert[0] is 'm.*a"]),
    "packed where it is float": (
        settings(modules_to_not_convert=["lm_head", "up_proj"]),
        ["up_proj.weight is packed, but config.json lists it in modules_to_not_convert"],
    ),
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("bitnet") / "m", PACKED)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_sentence(case: str, packed: Path, tmp_path: Path) -> None:
    damage, words = REFUSED[case]
    folder = tmp_path / "m"
    shutil.copytree(packed, folder)
    damage(folder)
    with pytest.raises(DiffbitError) as caught:
        load(folder)
    message = str(caught.value)
    assert str(tmp_path) in message and "\n" not in message
    for word in words:
        assert word in message, message


def test_rows_that_cannot_be_packed(tmp_path: Path) -> None:
    """transformers pads such a weight's last quarter, and unpacks more rows than it has."""
    folder = write_folder(tmp_path / "m", PACKED | {"modules_to_not_convert": ["lm_head"]}, intermediate_size=94)
    with pytest.raises(DiffbitError, match=r"proj\.weight: its 94 rows cannot be packed, wanted a multiple of 4"):
        load(folder)
