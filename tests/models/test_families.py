"""Which family writes a model: what the families say, not the alphabet, also with families of installed packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diffbit import DiffbitError
from diffbit.io import plugins
from diffbit.models import LayerSpec, ModelConfig, families
from diffbit.models.families import HuggingFace, family_for

from .helpers import small_config

VARIANTS = ("diff_v1", "diff_v2", "softmax")

NEW = HuggingFace("aaa", "softmax", defaults={"rms_norm_eps": 1e-6})  # the first by the alphabet


def windowed(config: ModelConfig) -> ModelConfig:
    layers = tuple(replace(layer, mixer=replace(layer.mixer, sliding_window=5)) for layer in config.layers)
    return replace(config, layers=layers)


CONFIGS = {
    **{name: small_config(name) for name in VARIANTS},
    **{f"{name}, sub-norms": small_config(name, sub_norms=True) for name in VARIANTS},
    "all biases": small_config("softmax", qkv_bias=True, o_bias=True, mlp_bias=True),
    "biases of queries, keys and values": small_config("softmax", qkv_bias=True),
    "norms of queries and keys": small_config("softmax", qk_norm_eps=1e-5),
    "windows": windowed(small_config("softmax")),
    "relu2": small_config("softmax", mlp="relu2"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_at_most_one_family_claims_a_model_at_a_time(name: str) -> None:
    able = [family for family in families.families() if family.writes is not None and family.write(CONFIGS[name])]
    claims = {family.writes: family.model_type for family in able}
    assert len(claims) == len(able) and claims[max(claims)] == families.GENERIC, claims


def written() -> dict[str, str]:
    return {name: family_for(config).model_type for name, config in CONFIGS.items()}


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that adds families to those that are there."""
    known = families.families()

    def families_and(*more: HuggingFace) -> None:
        monkeypatch.setattr(families, "families", lambda: (*more, *known))

    return families_and


def test_a_new_family_does_not_take_over_what_is_written(add: Callable[..., None]) -> None:
    before = written()
    assert before["softmax"] == "llama" and NEW.write(CONFIGS["softmax"]) is not None
    add(NEW, replace(NEW, model_type="internlm3"))
    assert written() == before


def test_a_later_family_writes_only_what_others_cannot(add: Callable[..., None]) -> None:
    before = written()
    assert before["windows"] == "diffbit"

    class Windowed(HuggingFace):
        def layer(self, values: Mapping[str, Any], index: int) -> LayerSpec:
            layer = super().layer(values, index)
            return replace(layer, mixer=replace(layer.mixer, sliding_window=5))

    add(Windowed("aaa", "softmax", defaults=NEW.defaults, writes=2), replace(NEW, writes=2))
    assert written() == before | {"windows": "aaa"}


def test_two_families_with_one_number_are_an_error(add: Callable[..., None]) -> None:
    add(replace(NEW, writes=1))
    with pytest.raises(DiffbitError, match="families aaa and llama would both write this model"):
        family_for(CONFIGS["softmax"])
    assert family_for(CONFIGS["diff_v1"]).model_type == "diffllama"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A function that installs a package with a family in its file aaa.py, which the alphabet puts first."""
    monkeypatch.syspath_prepend(tmp_path)

    def clear() -> None:
        plugins.names.cache_clear()
        families.families.cache_clear()

    def do(family: str) -> None:
        package, metadata = tmp_path / "their_families", tmp_path / "their_families-1.0.dist-info"
        package.mkdir()
        metadata.mkdir()
        (package / "__init__.py").write_text("")
        code = f"from diffbit.models.families import HuggingFace\nFAMILIES = ({family},)\n"
        (package / "aaa.py").write_text(code)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their_families\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[diffbit.families]\nany = their_families\n")
        clear()

    yield do
    clear()
    for name in [name for name in sys.modules if name.startswith("their_families")]:
        del sys.modules[name]


@pytest.mark.parametrize("model_type", ["aaa", "internlm3"])
def test_installed_family_does_not_take_over_writing(install: Callable[[str], None], model_type: str) -> None:
    before = written()
    install(f"HuggingFace({model_type!r}, 'softmax', defaults={{'rms_norm_eps': 1e-6}})")
    assert model_type in {family.model_type for family in families.families()}
    assert written() == before
    values = families.write_config(CONFIGS["softmax"], "float32") | {"model_type": model_type}
    assert families.read_config(values) == CONFIGS["softmax"]


def test_an_installed_family_with_the_number_of_llama_is_an_error(install: Callable[[str], None]) -> None:
    install("HuggingFace('aaa', 'softmax', defaults={'rms_norm_eps': 1e-6}, writes=1)")
    with pytest.raises(DiffbitError, match="aaa and llama would both write"):
        family_for(CONFIGS["softmax"])
