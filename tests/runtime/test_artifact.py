from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from diffbit.io.errors import DiffbitError
from diffbit.ops.cache import Buffer, CacheSpec
from diffbit.runtime import Artifact
from diffbit.runtime.artifact import manifest_sha256

from .toy import random_toy, seal

TOY = random_toy()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return TOY.write(tmp_path / "model")


def manifest_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "diffbit.json").read_text()))


def test_open_reads_what_was_written(folder: Path) -> None:
    artifact = Artifact.open(folder)
    assert (artifact.name, artifact.dtype, artifact.vocab_size, artifact.context_length) == ("toy", "fp32", 40, 24)
    assert artifact.cache.bytes_per_1k_tokens == 1000 * 2 * 32 * 4 and artifact.cache.fixed_bytes == 0
    assert artifact.files["model.onnx"].bytes == (folder / "model.onnx").stat().st_size
    assert artifact.nbytes == sum((folder / name).stat().st_size for name in ("model.onnx", "tokenizer.json"))
    assert artifact.golden.input_ids == (1, 2, 3)
    assert artifact.file_problems() == {}
    artifact.check_files()


def test_the_hash_is_of_the_canonical_json() -> None:
    """The rule as the format's description states it, on a manifest small enough to do by hand."""
    import hashlib

    text = '{"a":[1,2.5,null],"b":"\\u00e9"}'
    assert manifest_sha256({"b": "é", "a": [1, 2.5, None], "sha256": "x"}) == hashlib.sha256(text.encode()).hexdigest()


def test_an_edited_manifest_is_noticed(folder: Path) -> None:
    path = folder / "diffbit.json"
    path.write_text(path.read_text().replace('"context_length": 24', '"context_length": 99'))
    with pytest.raises(DiffbitError, match=r"diffbit\.json: was changed after export"):
        Artifact.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"artifact_version": 5}, "artifact_version is 5, this diffbit reads 4; upgrade"),
        ({"artifact_version": 2}, "artifact_version is 2, this diffbit reads 4; export the model again"),
        ({"artifact_version": True}, "artifact_version is True, wanted a whole number"),
        ({"name": 3}, r"diffbit\.json: name is 3, wanted text; restore the file or export the model again"),
        ({"dtype": "bf16"}, "dtype is 'bf16', wanted one of fp32, fp16"),
        ({"model": {}}, "model.vocab_size is missing, wanted a whole number"),
        ({"model": {"vocab_size": 40, "bos_token_id": 40}}, "model.bos_token_id is 40, wanted a token id from 0 to 39"),
        ({"model": {"vocab_size": 40, "bos_token_id": "x"}}, "bos_token_id is 'x', wanted a token id"),
        ({"scheme": []}, r"scheme is \[\], wanted an object"),
        ({"cache": {"layers": []}}, r"cache.layers is \[\], wanted a list of 1 to 1024 entries"),
        ({"cache": {"layers": [{"buffers": []}] * 2}}, "no layer has a buffer"),
        ({"context_length": 2}, "golden.input_ids holds 3 tokens, more than the context_length 2"),
        ({"context_length": "24"}, "context_length is '24', wanted a whole number"),
        ({"eos_token_ids": [1, 40]}, r"eos_token_ids\[1\] is 40, wanted a token id from 0 to 39"),
        ({"eos_token_ids": [1.5]}, r"eos_token_ids\[0\] is 1.5, wanted a whole number"),
        ({"files": {"\ud800": {}}}, "no character"),
        ({"files": {"../model.onnx": {}}}, "a key of files is '../model.onnx', wanted the name of a file"),
        ({"files": {"/etc/passwd": {}}}, "a key of files is '/etc/passwd', wanted the name"),
        ({"files": {}}, "lists no model.onnx"),
        ({"parts": [{"name": "scales", "bytes": -1}]}, r"parts\[0\].bytes is -1, wanted a whole number of at least 0"),
        ({"files": {"model.onnx": {"bytes": 1, "sha256": "abc"}}}, "wanted 64 hexadecimal digits"),
    ],
)
def test_bad_fields_are_named(folder: Path, change: dict[str, Any], message: str) -> None:
    seal(folder, manifest_of(folder) | change)
    with pytest.raises(DiffbitError, match=message):
        Artifact.open(folder)


def buffer(**changes: Any) -> dict[str, Any]:
    return {"name": "key", "dtype": "uint8", "shape": [2, "tokens", 16], "in_place": "native"} | changes


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        (7, r"cache.layers\[1\].buffers is 7, wanted at most 16 buffers"),
        ([3], r"buffers\[0\] is 3, wanted an object"),
        ([buffer(), buffer()], r"buffers is .*\(2 entries\), wanted at most 16 buffers of different names"),
        ([buffer(name=f"b{i}") for i in range(17)], r"\(17 entries\), wanted at most 16"),
        ([{"name": "key", "dtype": "int8"}], r"buffers\[0\].shape is missing"),
        ([buffer(name="../key")], "name is '../key', wanted lower-case letters"),
        ([buffer(name="k" * 41)], "wanted lower-case letters"),
        ([buffer(), buffer(name="v", dtype="float64")], r"buffers\[1\].dtype is 'float64', wanted one of"),
        ([buffer(shape=[])], r"shape is \[\], wanted a list of 1 to 5 entries"),
        ([buffer(shape=["tokens"] * 6)], r"shape is \[.*\], wanted a list of 1 to 5 entries"),
        ([buffer(window=-1)], "window is -1, wanted a whole number of at least 0"),
        ([buffer(in_place="often")], "in_place is 'often', wanted one of always, native, never"),
        *(
            ([buffer(shape=[2, "tokens", odd])], r"shape\[2\] is .*, wanted a number above 0, 'tokens' or")
            for odd in (
                0,
                -1,
                1 << 31,
                True,
                1.5,
                "token",
                "tokens/32",
                "tokens%",
                "tokens%0",
                "tokens%-1",
                "tokens%²",
            )
        ),
    ],
)
def test_bad_buffers_are_refused(folder: Path, buffers: Any, message: str) -> None:
    manifest = manifest_of(folder)
    seal(folder, manifest | {"cache": {"layers": [*manifest["cache"]["layers"], {"buffers": buffers}]}})
    with pytest.raises(DiffbitError, match=message):
        Artifact.open(folder)


def test_a_cache_with_scales_of_blocks_is_to_be_exported_again(folder: Path) -> None:
    manifest = manifest_of(folder)
    old = buffer(name="key_scale", dtype="float16", shape=[2, "tokens/32", 2, 32])
    seal(folder, manifest | {"cache": {"layers": [{"buffers": [buffer(), old]}]}})
    with pytest.raises(DiffbitError, match=r"shape\[1\] is 'tokens/32'.*export the model again"):
        Artifact.open(folder)


def test_bytes_of_a_low_bit_cache() -> None:
    """An int4 cache of 3 layers with 2 heads of 64, a window of 32 and 4 first tokens, by hand."""
    key = Buffer("key", "uint8", (2, "tokens", 32), window=32)
    scale = Buffer("key_scale", "float16", (2, "tokens"), window=32)
    recent = Buffer("key_recent", "float16", (2, 69, 64), window=32)
    cache = CacheSpec(((key, scale, recent),) * 3)
    assert (cache.multiple, cache.capacity(1), cache.capacity(64)) == (32, 32, 64)
    fixed, group = 3 * 2 * 69 * 64 * 2, 3 * 2 * (32 * 32 + 32 * 2)
    assert cache.fixed_bytes == fixed and cache.nbytes(33) == fixed + 2 * group
    assert cache.bytes_per_1k_tokens == group * 1000 // 32
    assert cache.longest(fixed + 2 * group) == 64 and cache.longest(fixed + 2 * group - 1) == 32
    assert cache.longest(fixed - 1) == 0


def test_bytes_of_unequal_layers() -> None:
    """A layer with a cache, one that reads the first one's, one with a state of fixed size."""
    key = Buffer("key", "float16", (2, "tokens", 64))
    state = Buffer("state", "float32", (8, 16))
    cache = CacheSpec(((key,), (), (state,)))
    assert list(cache.buffers) == ["0.key", "2.state"]
    assert (cache.multiple, cache.fixed_bytes, cache.nbytes(10)) == (1, 512, 512 + 10 * 256)
    assert CacheSpec(((state,),)).longest(10**9) is None and CacheSpec(((state,),)).nbytes(99) == 512


@pytest.mark.parametrize("bits", [8, 4])
def test_a_ring_is_cut_only_where_it_still_has_the_window(bits: int) -> None:
    """Against a list of what lies in each slot."""
    window, residual, rows = 40, 7, 64 if bits == 4 else 40
    layer = [Buffer("key", "uint8", (2, f"tokens%{rows}", 32), window=residual if bits == 4 else None)]
    if bits == 4:
        layer += [
            Buffer("key_scale", "float16", (2, f"tokens%{rows}"), window=residual),
            Buffer("key_recent", "float16", (2, 1 + residual + 32, 64), window=residual),
        ]
    cache = CacheSpec((tuple(layer),))
    assert cache.multiple == (32 if bits == 4 else 1) and cache.nbytes(0) == cache.nbytes(10**6) == cache.fixed_bytes
    contents: list[list[int | None]] = [[None] * rows]  # after so many tokens: which token lies in a slot
    low = [max(0, n - residual) // 32 * 32 if bits == 4 else n for n in range(200)]
    for n in range(1, 200):
        slots = contents[-1].copy()
        for t in range(low[n - 1], low[n]):
            slots[t % rows] = t
        contents.append(slots)
    for length in range(200):
        for length_after in range(1, length + 1):
            visible = range(max(0, length_after + 1 - window), low[length_after])
            same_blocks = low[length_after] == low[length] or bits == 8
            assert cache.holds(length_after, length) == (
                same_blocks and all(contents[length][t % rows] == t for t in visible)
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": [1.0]}, "8 token_ids and 1 logits"),
        ({"logits": [float("nan")] * 8}, r"golden\.logits\[0\] is nan, wanted a number"),
        ({"spread": 0}, r"golden\.spread is 0, wanted a number above 0"),
        ({"input_ids": []}, "golden: has 0 input_ids"),
    ],
)
def test_bad_golden_values_are_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    manifest = manifest_of(folder)
    seal(folder, manifest | {"golden": manifest["golden"] | change})
    with pytest.raises(DiffbitError, match=message):
        Artifact.open(folder)


def test_a_missing_folder_and_a_bad_manifest_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DiffbitError, match="no such artifact folder"):
        Artifact.open(tmp_path / "nothing")
    with pytest.raises(DiffbitError, match=r"holds no diffbit\.json"):
        Artifact.open(tmp_path)
    (tmp_path / "diffbit.json").write_text("{")
    with pytest.raises(DiffbitError, match="not valid JSON"):
        Artifact.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {f"f{index}": 0 for index in range(300_000)}}, "an object of 0 to 4096 entries"),
        (
            {"cache": {"layers": [0] * 300_000}},
            "cache.layers is .*300000 entries.*, wanted a list of 1 to 1024 entries",
        ),
        ({"eos_token_ids": ["x"] * 300_000}, "eos_token_ids is .*, wanted a list of 0 to 65536 entries"),
        ({"parts": [0] * 300_000}, "parts is .*, wanted a list of 0 to 4096 entries"),
        ({"dtype": "x" * 300_000}, r"dtype is 'x+\.\.\., wanted one of fp32, fp16"),
        ({"name": ["x" * 20_000_000]}, r"diffbit\.json: is larger than 16\.8 MB"),
    ],
    ids=["files", "layers", "ids", "parts", "a long text", "a large file"],
)
def test_manifests_beyond_all_measure_are_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    """By the number of entries, before any of them is read: the first is wrong, too. No message repeats them."""
    seal(folder, manifest_of(folder) | change)
    with pytest.raises(DiffbitError, match=message) as error:
        Artifact.open(folder)
    assert len(str(error.value)) < 500


def test_files_missing_truncated_and_flipped_are_named(folder: Path) -> None:
    model, tokenizer = folder / "model.onnx", folder / "tokenizer.json"
    content = model.read_bytes()
    model.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    tokenizer.unlink()
    artifact = Artifact.open(folder)
    assert artifact.file_problems(hashes=False).keys() == {"tokenizer.json"}
    problems = artifact.file_problems()
    assert "missing" in problems["tokenizer.json"]
    assert "was changed after export" in problems["model.onnx"]
    with pytest.raises(DiffbitError, match=r"(?s)model\.onnx.*tokenizer\.json"):
        artifact.check_files()
    model.write_bytes(content[:-3])
    assert f"has {len(content) - 3} bytes" in Artifact.open(folder).file_problems(hashes=False)["model.onnx"]


def test_only_listed_files_inside_the_folder_are_opened(folder: Path, tmp_path: Path) -> None:
    (folder / "extra.txt").write_text("x")
    with pytest.raises(DiffbitError, match=r"lists no extra\.txt"):
        Artifact.open(folder).file("extra.txt")
    model, outside = folder / "model.onnx", tmp_path / "outside.onnx"
    os.rename(model, outside)
    model.symlink_to(outside)
    with pytest.raises(DiffbitError, match="link that leads out of the folder"):
        Artifact.open(folder).file("model.onnx")
    assert "leads out" in Artifact.open(folder).file_problems(hashes=False)["model.onnx"]
    model.unlink()
    os.rename(outside, folder / "weights.bin")
    model.symlink_to("weights.bin")  # a link that stays inside is fine
    Artifact.open(folder).check_files()
    linked = tmp_path / "by-link"  # and so is a link to the folder itself
    linked.symlink_to(folder)
    Artifact.open(linked).check_files()
    os.rename(folder / "diffbit.json", tmp_path / "diffbit.json")
    (folder / "diffbit.json").symlink_to(tmp_path / "diffbit.json")
    with pytest.raises(DiffbitError, match="leads out"):
        Artifact.open(folder)
