"""One artifact, with the native library and without: the same numbers, by every way in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from typer.testing import CliRunner

from diffbit import DiffbitError, runtime
from diffbit.cli.app import app
from diffbit.runtime import native

from .conftest import Maker
from .helpers import VARIANTS, write_artifact

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def needs_library() -> None:
    assert native.library() is not None, "the native library was not built: pip install . with a C++ compiler"


def tokens(session: runtime.Session, count: int = 12) -> tuple[list[int], np.ndarray]:
    logits = session.prefill([PROMPT])
    every, rows = [], [logits[0]]
    for _ in range(count):
        every.append(int(rows[-1].argmax()))
        rows.append(session.step([[every[-1]]])[0])
    return every, np.stack(rows)


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("format", [None, "ternary", "int4_g32", "int4_g32_asym"])
@pytest.mark.parametrize("attention", VARIANTS)
def test_kernels_and_bodies_say_the_same(
    checkpoint_of: Maker, attention: str, format: str | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_library()
    artifact = write_artifact(checkpoint_of(attention, format), dtype)
    session = runtime.Session(artifact, threads=1, native=False)
    assert not session.native
    want, logits = tokens(session)
    spread = float(logits.std())
    # rounding to int8 turns a last bit into a step now and then; without it only last bits differ
    tolerance = {"fp32": 2e-2, "fp16": 6e-2}[dtype] if format else {"fp32": 1e-5, "fp16": 1e-2}[dtype]
    for isa in native.instruction_sets():
        monkeypatch.setenv(native.ISA, isa)
        session = runtime.Session(artifact, threads=1)
        assert session.native
        generated, other = tokens(session)
        np.testing.assert_allclose(other[0], logits[0], atol=tolerance * spread)
        if format is None and dtype == "fp32":
            assert generated == want


def test_prompts_in_bfloat16(artifact: Path) -> None:
    """Long ones are near where the CPU has AMX, and the same elsewhere; short ones are the same."""
    needs_library()
    session, rounded = (runtime.Session(artifact, threads=1, bfloat16=on) for on in (False, True))
    ids = np.random.default_rng(0).integers(0, 40, (1, 100))
    want, got = (one.prefill(ids, all_positions=True) for one in (session, rounded))
    assert np.array_equal(want, got) == (native.best_instruction_set() != "amx")
    np.testing.assert_allclose(got, want, atol=0.1 * want.std())
    session.reset(), rounded.reset()
    np.testing.assert_array_equal(rounded.prefill(ids[:, :2]), session.prefill(ids[:, :2]))


def test_the_cache_of_version_1_grows_in_place(checkpoint_of: Maker) -> None:
    needs_library()
    artifact = write_artifact(checkpoint_of("diff_v1"))
    session = runtime.Session(artifact, threads=1)
    session.prefill([PROMPT])
    pointers = [value.data_ptr() for value in session._cache.past.values()]
    assert session._cache.past["0.key"].shape()[2] == session.capacity
    assert not any(pointer % 64 for pointer in pointers)  # whole lines of memory
    session.step([[7]])
    assert [value.data_ptr() for value in session._cache.binding.get_outputs()[1:]] == pointers
    keys = session._cache.past["0.key"].numpy()
    assert keys[:, :, : len(PROMPT) + 1].any(-1).all() and not keys[:, :, len(PROMPT) + 1 :].any()
    bodies = runtime.Session(artifact, threads=1, native=False)
    bodies.prefill([PROMPT])
    assert bodies._cache.past["0.key"].shape()[2] == len(PROMPT)


def test_no_native_is_reported_by_bench_and_verify(checkpoint_of: Maker) -> None:
    needs_library()
    artifact = write_artifact(checkpoint_of("diff_v1", "ternary"))
    for flag, used in (([], True), (["--no-native"], False)):
        for command in (["bench", "--repeats", "1", "--prompt-tokens", "4", "--new-tokens", "2"], ["verify"]):
            done = CliRunner().invoke(app, [*command, str(artifact), "--json", *flag])
            assert done.exit_code == 0, done.output
            report = json.loads(done.stdout)
            assert (report[0] if command[0] == "bench" else report)["native"] is used


def test_files_that_are_not_libraries_are_refused(
    checkpoint_of: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = write_artifact(checkpoint_of("diff_v1"))
    monkeypatch.setenv(native.OVERRIDE, str(tmp_path / "none.so"))
    with pytest.raises(DiffbitError, match=r"DIFFBIT_LIBRARY is .*none\.so, but there is no such file"):
        runtime.Session(artifact)
    broken = tmp_path / "broken.so"
    broken.write_text("not a library")
    monkeypatch.setenv(native.OVERRIDE, str(broken))
    with pytest.raises(DiffbitError, match=r"broken\.so: ONNX Runtime .* cannot use diffbit's native library"):
        runtime.Session(artifact)
    assert runtime.Session(artifact, native=False).prefill([PROMPT]).shape[0] == 1


def test_without_a_library_the_bodies_run(checkpoint_of: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = write_artifact(checkpoint_of("diff_v1", "ternary"))
    monkeypatch.delenv(native.OVERRIDE, raising=False)
    monkeypatch.setattr(native, "NAMES", ())
    assert native.library() is None and native.instruction_sets() == []
    session = runtime.Session(artifact)
    assert not session.native
    assert runtime.verify(artifact).passed
    for flag, warns in (([], True), (["--no-native"], False)):
        done = CliRunner().invoke(app, ["run", str(artifact), "a", "--max-tokens", "1", *flag])
        assert done.exit_code == 0, done.output
        assert ("no native library in this installation" in done.stderr) is warns


def test_an_instruction_set_that_is_not_there(checkpoint_of: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_library()
    artifact = write_artifact(checkpoint_of("diff_v1", "ternary"))
    monkeypatch.setenv(native.ISA, "mmx")
    with pytest.raises(DiffbitError, match="DIFFBIT_ISA is mmx, which this CPU or this build lacks; choose one of"):
        runtime.Session(artifact)


def test_an_unknown_spec_version_is_refused_by_the_kernel(checkpoint_of: Maker, tmp_path: Path) -> None:
    needs_library()
    import onnx

    artifact = write_artifact(checkpoint_of("diff_v1", "ternary"))
    model = onnx.load(artifact / "model.onnx", load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "TernaryMatMul")
    next(a for a in node.attribute if a.name == "spec_version").i = 99
    changed = artifact / "other.onnx"
    onnx.save(model, changed)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(native.library()))
    with pytest.raises(Exception, match="spec_version is 99, this library computes 2"):
        onnxruntime.InferenceSession(str(changed), options, providers=["CPUExecutionProvider"])
    changed.unlink()
