"""Prefixes on disk: read after a restart they give the logits that the prompt gives alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from diffbit.apps.serve.batch import Rows
from diffbit.apps.serve.prefixes import PrefixFiles
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint
from diffbit.runtime import Session

SYSTEM = np.random.default_rng(0).integers(3, 1000, 100).tolist()
QUESTIONS = [np.random.default_rng(seed).integers(3, 1000, 20).tolist() for seed in (1, 2, 3)]
MOST = 1 << 30


@pytest.fixture(scope="module", params=["float", "int8", "int4"])
def artifact(
    request: pytest.FixtureRequest, trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("prefixes")
    cache = {} if request.param == "float" else {"keys": request.param, "values": request.param}
    scheme = Scheme(weights=parse_format("int4_g32"), attention=AttentionScheme(**cache))
    quantize_checkpoint(trained("diff_v2"), folder / "low", scheme)
    return export_artifact(folder / "low", folder / "artifact")


def serve(
    artifact: Path, folder: Path, *questions: list[int], limit: int = MOST, rows: int = 2
) -> list[tuple[int, np.ndarray]]:
    """What a new server computes: (cached tokens, logits after the prompt and an answer) of each question."""
    session = Session(artifact)
    batch = Rows.of(session, rows, PrefixFiles(folder, session.artifact, limit))
    results = []
    for question in questions:
        row, cached, logits = batch.begin(SYSTEM + question, lambda: True)
        assert logits is not None
        for token in range(3, 43):  # a window of 32 tokens moves on
            logits = batch.step({row: token})[row]
        batch.end(row)
        results.append((cached, logits))
    return results


def alone(artifact: Path, question: list[int]) -> np.ndarray:
    session = Session(artifact)
    logits = session.prefill([SYSTEM + question])
    for token in range(3, 43):
        logits = session.step([[token]])
    return np.asarray(logits[0])


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_prefix_is_there_after_a_restart(artifact: Path, tmp_path: Path, rows: int) -> None:
    first = serve(artifact, tmp_path, *QUESTIONS[:1], rows=rows)
    assert first[0][0] == 0 and not files(tmp_path)  # no other prompt has its beginning
    assert serve(artifact, tmp_path, *QUESTIONS[:2], rows=rows)[0][0] == 0
    (file,) = files(tmp_path)
    ((cached, logits),) = serve(artifact, tmp_path, QUESTIONS[2], rows=rows)
    assert cached == len(SYSTEM) and files(tmp_path) == [file]
    np.testing.assert_allclose(logits, alone(artifact, QUESTIONS[2]), rtol=0, atol=5e-2)


def test_a_conversation_writes_nothing(artifact: Path, tmp_path: Path) -> None:
    answer = list(range(3, 43))
    serve(artifact, tmp_path, QUESTIONS[0], QUESTIONS[0] + answer + [7], QUESTIONS[0] + answer + [7] + answer + [8])
    assert not files(tmp_path)


@pytest.mark.parametrize("damage", ["a number", "half of it", "another type", "no safetensors"])
def test_a_damaged_file_is_deleted(artifact: Path, tmp_path: Path, damage: str) -> None:
    serve(artifact, tmp_path, *QUESTIONS[:2])
    (file,) = files(tmp_path)
    data = bytearray(file.read_bytes())
    if damage == "a number":
        data[-5] ^= 1
    elif damage == "half of it":
        del data[len(data) // 2 :]
    elif damage == "another type":
        data = data.replace(b'"F16"', b'"I16"').replace(b'"F32"', b'"I32"')
    else:
        data[:] = b"nothing"
    file.write_bytes(data)
    ((cached, logits),) = serve(artifact, tmp_path, QUESTIONS[2])
    assert cached == 0 and not files(tmp_path)
    np.testing.assert_array_equal(logits, alone(artifact, QUESTIONS[2]))


def test_what_is_no_prefix_is_left_out(artifact: Path, tmp_path: Path) -> None:
    opened = Session(artifact).artifact
    folder = PrefixFiles(tmp_path, opened, MOST).folder
    save_file({"ids": np.array(5)}, folder / "a number.safetensors")
    save_file({"ids": np.zeros(3, np.float32)}, folder / "floats.safetensors")
    save_file({"other": np.zeros(3, np.int64)}, folder / "no ids.safetensors")
    (folder / "folder.safetensors").mkdir()
    assert PrefixFiles(tmp_path, opened, MOST).longest(np.zeros(9, np.int64)) == (0, None)
    assert [path.name for path in folder.iterdir()] == ["folder.safetensors"]


def test_the_folder_stays_small(artifact: Path, tmp_path: Path) -> None:
    serve(artifact, tmp_path, *QUESTIONS[:2])
    (file,) = files(tmp_path)
    serve(artifact, tmp_path, *QUESTIONS[:2], limit=file.stat().st_size - 1)
    assert files(tmp_path) == [file]  # it was read, and nothing was written
    file.unlink()
    serve(artifact, tmp_path, *QUESTIONS[:2], limit=100)
    assert not files(tmp_path)


def test_another_artifact_has_other_files(artifact: Path, trained: Callable[[str], Path], tmp_path: Path) -> None:
    serve(artifact, tmp_path / "files", *QUESTIONS[:2])
    other = export_artifact(trained("softmax"), tmp_path / "other")
    assert serve(other, tmp_path / "files", QUESTIONS[2])[0][0] == 0


def test_what_cannot_be(artifact: Path, trained: Callable[[str], Path], tmp_path: Path) -> None:
    session = Session(artifact, native=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(DiffbitError, match="cannot write to this folder"):
        PrefixFiles(tmp_path / "file", session.artifact, MOST)
    with pytest.raises(DiffbitError, match="omit --cache-dir"):
        Rows.of(session, 2, PrefixFiles(tmp_path / "files", session.artifact, MOST))


def test_two_servers_share_a_folder(artifact: Path, tmp_path: Path) -> None:
    """What one deletes is computed by the other, and the folder stays as small as it should be."""
    ids = [np.arange(100) + seed for seed in (3, 4, 5)]
    arrays = {"0.key": np.arange(6000, dtype=np.float32)}
    one, other = (PrefixFiles(tmp_path, Session(artifact).artifact, 60_000) for _ in range(2))
    one.save(ids[0], arrays)
    assert other.longest(ids[0]) == (0, None)
    third = PrefixFiles(tmp_path, Session(artifact).artifact, 60_000)
    count, file = third.longest(ids[0])
    assert count == 100 and file is not None and third.load(file, arrays) is not None
    other.save(ids[1], arrays)
    other.save(ids[2], arrays)  # the folder has room for two
    assert not file.exists() and sum(path.stat().st_size for path in third.folder.iterdir()) <= 60_000
    assert third.load(file, arrays) is None and third.longest(ids[0]) == (0, None)
