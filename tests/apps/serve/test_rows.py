"""Rows of their own length: each row's logits are, to the bit, those of a session that computes its text alone."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffbit.apps.serve import pages, rows
from diffbit.apps.serve.batch import Rows
from diffbit.apps.serve.rows import REST, RowCaches
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import Decoder, ModelConfig, save
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint
from diffbit.runtime import Session, memory

SIZES = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "max_position": 512}


def low(keys: str, values: str, window: int = 8, **more: Any) -> dict[str, Any]:
    return {"keys": keys, "values": values, "window": window, **more}


# name: (attention, options of the mixer, of each layer; the cache)
MODELS: Mapping[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "float": ("softmax", [{}, {}], {}),
    "fp16, diff_v1": ("diff_v1", [{}, {}], low("fp16", "fp16")),
    "int8, a window": ("diff_v2", [{"sliding_window": 40}, {}], low("int8", "int8")),
    "int4, diff_v1": ("diff_v1", [{}, {}], low("int4", "int4")),
    "int2 and int4, diff_v2": ("diff_v2", [{}, {}], low("int2", "int4", 0, first=16)),
    "int3 and int4, diff_v1": ("diff_v1", [{}, {}], low("int3", "int4", first=0)),
    "int4, a window": ("softmax", [{"sliding_window": 33}, {}], low("int4", "int4")),
    "int8 and int2, int8 products": ("softmax", [{}, {}], low("int8", "int2", 64, qk="int8")),
    "int4, keys of another layer": ("diff_v2", [{}, {"keys_of": 0}], low("int4", "int4")),
}


@pytest.fixture(scope="module")
def export(trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def one(name: str) -> Path:
        if name not in made:
            attention, changes, cache = MODELS[name]
            folder = tmp_path_factory.mktemp("rows")
            config = ModelConfig.uniform(attention=attention, num_heads=2, num_kv_heads=2, head_dim=32, **SIZES)
            layers = [
                replace(layer, mixer=replace(layer.mixer, **change))
                for layer, change in zip(config.layers, changes, strict=True)
            ]
            torch.manual_seed(0)
            model = Decoder(replace(config, layers=tuple(layers)))
            with torch.no_grad():  # large logits: an answer tells which tokens were seen
                for parameter in model.parameters():
                    parameter.mul_(2)
            save(model, folder / "model", tokenizer_from=trained("softmax"))
            # float products of several rows would be summed in another order
            scheme = Scheme(weights=parse_format("int4_g32"), attention=AttentionScheme(**cache))
            quantize_checkpoint(folder / "model", folder / "low", scheme)
            made[name] = export_artifact(folder / "low", folder / "artifact")
        return made[name]

    return one


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_those_of_texts_alone(export: Callable[[str], Path], name: str, threads: int) -> None:
    """Prompts from one token to beyond two chunks of keys; a row rests now and then, and keeps its tokens."""
    random = np.random.default_rng(1)
    session = Session(export(name), threads=threads)
    assert RowCaches.fit(session)
    caches, alone = RowCaches(session, 4), [Session(export(name), threads=1) for _ in range(4)]
    lengths = np.array([1, 37, 300, 70])
    for row, length in enumerate(lengths):
        prompt = random.integers(3, 1000, (1, length))
        wanted = None
        for start in range(0, length, session.chunk):
            part = prompt[:, start : start + session.chunk]
            got = caches.run(slice(row, row + 1), part, np.array([start]))
            wanted = alone[row].prefill(part)
        np.testing.assert_array_equal(got, wanted)
    for step in range(70):
        rest = random.random(4) < 0.2 if step % 10 else np.arange(4) != step // 10 % 4
        rest[random.integers(4)] = False
        ids = random.integers(3, 1000, (4, 1))
        got = caches.run(slice(0, 4), ids, np.where(rest, REST, lengths))
        for row in np.flatnonzero(~rest):
            np.testing.assert_array_equal(got[row], alone[row].step(ids[row][None])[0], f"row {row}, step {step}")
        lengths += ~rest


@pytest.mark.parametrize("name", ["float", "int4, diff_v1", "int8, a window"])
def test_rows_take_a_few_tokens_at_once(export: Callable[[str], Path], name: str) -> None:
    """Also where blocks of a cache become whole between them."""
    random = np.random.default_rng(4)
    session, alone = Session(export(name)), [Session(export(name)) for _ in range(2)]
    caches, lengths = RowCaches(session, 2), np.array([39, 70])
    for row, length in enumerate(lengths):
        prompt = random.integers(3, 1000, (1, length))
        caches.run(slice(row, row + 1), prompt, np.array([0]))
        alone[row].prefill(prompt)
    for _ in range(12):
        ids = random.integers(3, 1000, (2, 3))
        got = caches.run(slice(0, 2), ids, lengths)
        for row in range(2):
            np.testing.assert_array_equal(got[row], alone[row].prefill(ids[row : row + 1])[0])
        lengths += 3


def test_a_row_is_copied_and_cut(export: Callable[[str], Path]) -> None:
    random = np.random.default_rng(2)
    session, alone = (Session(export("int4, diff_v1")) for _ in range(2))
    caches, prompt = RowCaches(session, 3), random.integers(3, 1000, (1, 150))
    caches.run(slice(2, 3), prompt[:, :100], np.array([0]))
    recent = caches.recent(2)
    caches.run(slice(2, 3), prompt[:, 100:], np.array([100]))  # its blocks quantize tokens that were recent
    caches.put(0, 100, caches.first(2, 100))
    caches.put(0, 100, recent)
    other = random.integers(3, 1000, (1, 40))
    got = caches.run(slice(0, 1), other, np.array([100]))
    alone.prefill(prompt[:, :100])
    np.testing.assert_array_equal(got, alone.prefill(other))


class Interrupted(Exception):
    pass


def test_a_run_that_fails_is_forgotten(export: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph has written tokens that no text has: what the row held before is not reused with them."""

    random = np.random.default_rng(7)
    session, alone = (Session(export("int4, diff_v1"), threads=1) for _ in range(2))
    batch, base = Rows.of(session, 2), random.integers(3, 1000, 60).tolist()
    row, _, _ = batch.begin(base, lambda: True)
    for token in random.integers(3, 1000, 3).tolist():
        batch.step({row: token})
    batch.end(row)
    run = session.run

    def fail(*arguments: Any, **options: Any) -> None:
        run(*arguments, **options)
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(session, "run", fail)
        with pytest.raises(Interrupted):
            batch.begin(base + random.integers(3, 1000, 120).tolist(), lambda: True)
    again = base + random.integers(3, 1000, 8).tolist()
    np.testing.assert_array_equal(batch.begin(again, lambda: True)[2], alone.prefill([again])[0])


def test_only_attention_of_the_operator_has_rows(trained: Callable[[str], Path], tmp_path: Path) -> None:
    config = ModelConfig.uniform(attention="alibi", num_heads=2, num_kv_heads=2, head_dim=32, **SIZES)
    save(Decoder(config), tmp_path / "model", tokenizer_from=trained("softmax"))
    session = Session(export_artifact(tmp_path / "model", tmp_path / "artifact"))
    assert not session.takes_lengths and not RowCaches.fit(session)
    assert not RowCaches.fit(Session(trained_artifact(trained, tmp_path), native=False))


def trained_artifact(trained: Callable[[str], Path], folder: Path) -> Path:
    return export_artifact(trained("softmax"), folder / "plain")


def test_too_many_rows(export: Callable[[str], Path]) -> None:
    with pytest.raises(DiffbitError, match="use fewer rows"):
        RowCaches(Session(export("float")), 1 << 40)


@pytest.mark.parametrize("name", MODELS)
def test_shared_pages_are_as_good_as_copies(
    export: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations that begin alike and part; the rows' memory is shared, copied, and given back."""
    monkeypatch.setattr(memory, "MAPPED", 1)  # pages also for arrays as small as these

    def conversations() -> tuple[list[Any], int]:
        random = np.random.default_rng(2)
        session, logits = Session(export(name), threads=1), list[Any]()
        session.chunk = 64
        batch, texts = Rows.of(session, 3), [random.integers(3, 1000, 320).tolist()]
        cached = 0
        for _ in range(12):
            taken = {}
            for _ in range(3):
                text = texts[random.integers(len(texts))]
                prompt = [*text[: random.choice([130, 300, 300, len(text)])], *random.integers(3, 1000, 9).tolist()][
                    :400
                ]
                row, kept, got = batch.begin(prompt, lambda: True)
                taken[row], cached = prompt, cached + kept
                logits.append(got)
            for _ in range(random.integers(1, 40)):
                tokens = {row: int(random.integers(3, 1000)) for row in taken}
                logits += batch.step(tokens).values()
                for row, token in tokens.items():
                    taken[row].append(token)
            texts = [texts[0], *taken.values()]
            for row in taken:
                batch.end(row)
        return logits, cached

    shared, share = list[int](), pages.Pages.share
    monkeypatch.setattr(pages.Pages, "share", lambda *arguments: [share(*arguments), shared.append(1)][0])
    found, cached = conversations()
    assert shared or "window" in name
    monkeypatch.setattr(rows, "WORTH_SHARING", 1 << 20)
    wanted, as_many = conversations()
    assert cached == as_many and (cached > 1000 or "window" in name)  # a ring cannot be cut
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(sys.platform != "linux", reason="prefixes are copied there")
def test_a_prefix_goes_with_its_last_row(export: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAPPED", 1)
    caches = RowCaches(Session(export("float")), 2)
    caches.run(slice(0, 1), np.random.default_rng(0).integers(3, 1000, (1, 200)), np.array([0]))
    caches.share(1, 0, 190)
    (prefix, held), (same, _) = caches._prefix
    assert prefix is same is not None and held == 190
    gone = weakref.ref(prefix)
    del prefix, same
    caches.share(0, 0, 0)  # another text begins there
    assert gone() is not None and caches.nbytes({}) == caches._fixed + 190 * caches._growth
    caches.share(1, 1, 0)
    assert gone() is None and caches.nbytes({}) == 0
