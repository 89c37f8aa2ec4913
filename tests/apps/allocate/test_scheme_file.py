"""A written scheme is the one that is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffbit.apps.allocate.scheme_file import write_scheme
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.quantize import AttentionScheme, Scheme

FULL = Scheme(
    weights=parse_format("int4_g32"),
    activations="int8",
    attention=AttentionScheme(logits=6, keys="fp16", values="int4", window=64, states="int8"),
    embedding=parse_format("int8"),
    overrides=(("lm_head", parse_format("int8")), ('a "b" \\ é*', None), ("*.down_proj", parse_format("nf4"))),
)


LAYERS = Scheme(
    attention=AttentionScheme(keys="int4", values="int3", first=0, layers=((0, "int8", None), (12, "fp16", "int2"))),
    overrides=(("lm_head", parse_format("int8")),),
)


@pytest.mark.parametrize("scheme", [FULL, LAYERS, Scheme(), Scheme(weights=parse_format("int2_g32_asym"))])
@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_files_come_back(scheme: Scheme, suffix: str, tmp_path: Path) -> None:
    write_scheme(scheme, tmp_path / f"scheme.{suffix}")
    assert Scheme.from_file(tmp_path / f"scheme.{suffix}") == scheme


def test_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiffbitError, match=r"scheme\.yaml: wanted a \.json or a \.toml file"):
        write_scheme(FULL, tmp_path / "scheme.yaml")
    assert not list(tmp_path.iterdir())
