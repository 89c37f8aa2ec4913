"""Keys beyond float16: a cache in float16 is refused, or the command line keeps it in float32 and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffbit import DiffbitError
from diffbit.cli.app import main
from diffbit.export import HalfOverflow, export_artifact
from diffbit.formats import parse_format
from diffbit.models import load
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint
from diffbit.runtime import Artifact, Session, verify

from .helpers import CONFIG, write_model


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A model whose keys reach 10^5; its queries are as much smaller."""
    source = write_model(tmp_path / "large", CONFIG)
    file = source / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        tensor *= 6e4 if "k_proj" in name else 1e-3 if "q_proj" in name else 1
    save_file(tensors, file)
    return source


def test_the_cache_stays_in_float32(large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantize_checkpoint(large, tmp_path / "q", Scheme(weights=parse_format("int8")))
    with pytest.raises(
        HalfOverflow, match=r"q: keys or values reach \d\S+ in a test prompt, more than 65504.*--kv fp32"
    ):
        export_artifact(tmp_path / "q", tmp_path / "a", kv="fp16")
    assert not (tmp_path / "a").exists()
    with pytest.raises(SystemExit, match="0"):
        main(["export", str(tmp_path / "q"), "-o", str(tmp_path / "a")])
    assert "the cache is exported in float32" in " ".join(capsys.readouterr().err.split())
    artifact = Artifact.open(tmp_path / "a")
    assert {buffer.dtype for buffer in artifact.cache.buffers.values()} == {"float32"}
    assert verify(tmp_path / "a").passed
    session = Session(tmp_path / "a", threads=1)
    session.reset()
    assert torch.tensor(session.prefill([[1, 2, 3]])).isfinite().all()


def test_formats_with_float16_in_them_are_refused(large: Path, tmp_path: Path) -> None:
    with pytest.raises(HalfOverflow, match="--dtype fp32"):
        export_artifact(large, tmp_path / "a", dtype="fp16")
    for format, fits in (("int4", False), ("int8", True)):
        scheme = Scheme(weights=None, attention=AttentionScheme(keys=format, values=format))
        quantize_checkpoint(large, tmp_path / format, scheme)
        if fits:
            export_artifact(tmp_path / format, tmp_path / "a")
            continue
        with pytest.raises(DiffbitError, match="quantize with --kv int8"):
            export_artifact(tmp_path / format, tmp_path / "a")


@pytest.mark.parametrize(("size", "kv", "warns"), [(120.0, "int8", True), (0.5, "int8", False), (120.0, "fp16", False)])
def test_a_warning_about_large_biases_of_keys(size: float, kv: str, warns: bool, tmp_path: Path) -> None:
    """As in Qwen2.5, whose first layer has keys with biases of hundreds."""
    from .helpers import config_of

    source = write_model(tmp_path / "m", config_of("softmax", qkv_bias=True))
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.bias"][3] = size
    save_file(tensors, file)
    assert load(source).model.layers[1].self_attn.k_proj.bias.max() == max(
        size, tensors["model.layers.1.self_attn.k_proj.bias"].max()
    )
    scheme = Scheme(weights=None, attention=AttentionScheme(keys=kv, values="int8"))
    warnings = quantize_checkpoint(source, tmp_path / "q", scheme).warnings
    text = "model.layers.1.self_attn.k_proj.bias has entries of up to 120, which leave few of the levels of int8 keys"
    assert any(warning.startswith(text) for warning in warnings) == warns
