from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from diffbit.io.errors import DiffbitError
from diffbit.runtime import Artifact, Session, SessionOptions, native, providers, slowdowns
from diffbit.runtime.driver import runs

from .stand_in import compiled, install_driver
from .toy import random_toy, seal

TOY = random_toy()
PROMPT = [5, 9, 2, 33, 7, 7, 1]


def test_prefill_and_steps_equal_the_formula(artifact: Path) -> None:
    session = Session(artifact, threads=1)
    want = TOY.logits([*PROMPT, 4, 8])
    np.testing.assert_allclose(session.prefill([PROMPT])[0], want[6], atol=1e-4)
    assert session.length == 7
    np.testing.assert_allclose(session.step([[4]])[0], want[7], atol=1e-4)
    np.testing.assert_allclose(session.step([[8]])[0], want[8], atol=1e-4)
    assert (session.length, session.capacity) == (9, 24)


def test_all_positions_and_a_second_prefill(artifact: Path) -> None:
    session = Session(artifact, threads=1)
    want = TOY.logits([*PROMPT, 4, 8, 3])
    np.testing.assert_allclose(session.prefill([PROMPT], all_positions=True)[0], want[:7], atol=1e-4)
    np.testing.assert_allclose(session.prefill([[4, 8, 3]], all_positions=True)[0], want[7:], atol=1e-4)


def test_logits_stay_what_they_were(artifact: Path) -> None:
    """Logits may be views of the runtime's memory; later calls must not write into it."""
    session = Session(artifact, threads=1)
    kept = [session.prefill([PROMPT], all_positions=True), *(session.step([[i]]) for i in range(8))]
    copies = [logits.copy() for logits in kept]
    for i in range(8):
        session.step([[i]])
    del session
    for logits, copy in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(logits, copy)


def test_chunks_give_the_same_logits(artifact: Path) -> None:
    prompt = [int(i) for i in np.random.default_rng(1).integers(0, 40, 21)]
    want = TOY.logits([*prompt, 6])
    session = Session(artifact, threads=1)
    assert session.chunk == (512 if native.best_instruction_set() == "amx" else 256)
    session.chunk = 8
    np.testing.assert_allclose(session.prefill([prompt])[0], want[20], atol=1e-4)
    np.testing.assert_allclose(session.step([[6]])[0], want[21], atol=1e-4)
    session.reset()
    np.testing.assert_allclose(session.prefill([prompt[:16]])[0], want[15], atol=1e-4)  # a whole number of chunks
    session.reset()
    np.testing.assert_allclose(session.prefill([prompt], all_positions=True)[0], want[:21], atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_equals_its_rows(artifact: Path, side: str) -> None:
    rows = [PROMPT, PROMPT[2:5], [11]]
    ids = np.full((3, 9), -1)  # padding is never read; all three rows are shorter than the batch is wide
    mask = np.zeros((3, 9), np.int64)
    for i, row in enumerate(rows):
        where = slice(9 - len(row), 9) if side == "left" else slice(0, len(row))
        ids[i, where], mask[i, where] = row, 1
    session = Session(artifact, threads=1)
    every = session.prefill(ids, mask, all_positions=True)
    session.reset()
    last = session.prefill(ids, mask)
    steps = [session.step([[3], [4], [5]]), session.step([[6], [7], [8]])]
    for i, row in enumerate(rows):
        want = TOY.logits([*row, 3 + i, 6 + i])
        np.testing.assert_allclose(every[i][mask[i] == 1], want[: len(row)], atol=1e-4)
        assert not every[i][mask[i] == 0].any()
        np.testing.assert_allclose(last[i], want[len(row) - 1], atol=1e-4)
        np.testing.assert_allclose(steps[0][i], want[len(row)], atol=1e-4)
        np.testing.assert_allclose(steps[1][i], want[len(row) + 1], atol=1e-4)


def test_in_place_buffers_are_shared_and_survive_reset(tmp_path: Path) -> None:
    session = Session(TOY.write(tmp_path / "a", in_place=True), threads=1)
    session.prefill([PROMPT])
    pointers = [value.data_ptr() for value in session._cache.past.values()]
    assert [value.shape() for value in session._cache.past.values()] == [[1, 2, 24, 16]] * 2
    session.step([[4]])
    bound = session._cache.binding.get_outputs()[1:]
    assert [value.data_ptr() for value in bound] == pointers  # the graph's outputs are the very same memory
    # what the graph wrote is in the buffer: key row t = the token's x, and nothing past the length
    want = (TOY.embed[[*PROMPT, 4]] + TOY.place[:8]).reshape(8, 2, 16).transpose(1, 0, 2)
    keys = session._cache.past["0.key"].numpy()[0]
    np.testing.assert_allclose(keys[:, :8], want, atol=1e-6)
    assert not keys[:, 8:].any()
    session.reset()
    np.testing.assert_allclose(session.prefill([[9, 1]])[0], TOY.logits([9, 1])[1], atol=1e-4)
    assert [value.data_ptr() for value in session._cache.past.values()] == pointers


def test_growing_cache_is_fed_back_as_it_is(tmp_path: Path) -> None:
    session = Session(TOY.write(tmp_path / "a"), threads=1)
    session.prefill([PROMPT])
    assert [value.shape() for value in session._cache.past.values()] == [[1, 2, 7, 16]] * 2
    session.step([[4]])
    assert [value.shape() for value in session._cache.past.values()] == [[1, 2, 8, 16]] * 2
    session.reset()
    np.testing.assert_allclose(session.prefill([[9, 1]])[0], TOY.logits([9, 1])[1], atol=1e-4)


def test_another_batch_size_after_reset(artifact: Path) -> None:
    session = Session(artifact, threads=1)
    session.prefill([PROMPT])
    with pytest.raises(DiffbitError, match="cache holds 1; call reset"):
        session.step([[1], [2]])
    with pytest.raises(DiffbitError, match="batch of 2 cannot be prefilled onto 7 cached tokens"):
        session.prefill([PROMPT, PROMPT])
    session.reset()
    logits = session.prefill([PROMPT, PROMPT[::-1]])
    np.testing.assert_allclose(logits[1], TOY.logits(PROMPT[::-1])[-1], atol=1e-4)


def test_the_context_fills_to_its_last_slot_and_no_further(artifact: Path) -> None:
    session = Session(artifact, threads=1)
    session.prefill([[1] * 23])
    session.step([[1]])
    with pytest.raises(DiffbitError, match=r"holds 24 tokens, but 25 are wanted \(24 cached and 1 new\)"):
        session.step([[1]])
    session.reset()
    with pytest.raises(DiffbitError, match="but 25 are wanted"):
        session.prefill([[1] * 25])
    assert session.length == 0


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[1, 40]], None, "token id 40 is outside the vocabulary of 40 tokens"),
        ([[-1]], None, "token id -1 is outside"),
        ([1, 2], None, r"wanted integers \[B, S\]"),
        ([[1.5]], None, "float64"),
        ([[1], [1, 2]], None, "rows of different lengths"),
        (np.zeros((1, 0), np.int64), None, "at least one row and one token"),
        ([[1, 2]], [[1]], "attention_mask has shape"),
        ([[1, 2]], [[1, 2]], "of 0 and 1"),
        ([[1], [2]], [[1], [0]], "a 1 in every row"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, ids: object, mask: object, message: str) -> None:
    session = Session(TOY.write(tmp_path / "a"), threads=1)
    with pytest.raises(DiffbitError, match=message):
        session.prefill(ids, mask)
    assert session.length == 0


def test_graph_and_manifest_must_agree(tmp_path: Path) -> None:
    folder = TOY.write(tmp_path / "a")
    manifest = json.loads((folder / "diffbit.json").read_text())
    (layer,) = manifest["cache"]["layers"]
    key, value = layer["buffers"]
    for layers, message in (
        ([[key | {"shape": [2, "tokens", 8]}, value]], "input past_key_values.0.key is tensor"),
        ([[key | {"dtype": "float16"}, value]], r"describes tensor\(float16\)"),
        ([[key, value | {"name": "worth"}]], "has an unknown input past_key_values.0.value"),
        ([[key, value, key | {"name": "key_scale"}]], "has no input past_key_values.0.key_scale"),
        ([[key]], "has an unknown input past_key_values.0.value"),
        ([[key, value]] * 2, "has no input past_key_values.1.key"),
    ):
        seal(folder, manifest | {"cache": {"layers": [{"buffers": buffers} for buffers in layers]}})
        with pytest.raises(DiffbitError, match=message):
            Session(folder)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_context_beyond_memory_is_refused(in_place: bool, tmp_path: Path) -> None:
    folder = TOY.write(tmp_path / "a", in_place=in_place)
    seal(folder, json.loads((folder / "diffbit.json").read_text()) | {"context_length": 10**30})
    with pytest.raises(DiffbitError, match="does not fit into memory"):
        Session(folder).prefill([[1, 2]])


def test_an_axis_name_that_is_not_text_is_refused(tmp_path: Path) -> None:
    folder = TOY.write(tmp_path / "a")
    manifest = json.loads((folder / "diffbit.json").read_text())
    del manifest["files"]
    graph = onnx.load(folder / "model.onnx")
    graph.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "an_axis"
    (folder / "model.onnx").write_bytes(graph.SerializeToString().replace(b"an_axis", b"an_\xffxis"))
    seal(folder, manifest)
    with pytest.raises(DiffbitError, match=r"model\.onnx: holds a name that is not UTF-8"):
        Session(folder)


def test_a_truncated_or_broken_model_is_refused(tmp_path: Path) -> None:
    folder = TOY.write(tmp_path / "a")
    model = folder / "model.onnx"
    whole = model.read_bytes()
    model.write_bytes(whole[:-1])
    with pytest.raises(DiffbitError, match=r"model\.onnx: has \d+ bytes, the manifest says"):
        Session(folder)
    model.write_bytes(b"\xff" * len(whole))
    with pytest.raises(DiffbitError, match=r"model\.onnx: is not an ONNX model"):
        Session(folder)
    model.write_bytes(whole.replace(b"MatMul", b"MatMud"))
    with pytest.raises(DiffbitError, match=r"model\.onnx: ONNX Runtime .* cannot load it"):
        Session(folder)


def test_threads_reach_the_session(artifact: Path) -> None:
    options = Session(artifact, threads=3)._session.get_session_options()
    assert options.intra_op_num_threads == 3
    assert options.get_session_config_entry("session.intra_op.spin_duration_us") == "20"


def test_unknown_devices_and_no_threads_are_refused(tmp_path: Path) -> None:
    folder = TOY.write(tmp_path / "a")
    with pytest.raises(DiffbitError, match=r"device is 'tpu', wanted one of cpu, cuda, webgpu, .*provider:NAME"):
        Session(folder, device="tpu")
    with pytest.raises(DiffbitError, match="threads is 0, wanted a whole number from 1 to 512"):
        Session(folder, threads=0)


def _fake_ort(
    available: list[str], active: list[str], stray: list[str], error: str | None = None, file: str = "nowhere"
) -> SimpleNamespace:
    """onnxruntime as a GPU wheel shows itself, installed at `file`; `error`: what making a session ends in."""
    nodes = [SimpleNamespace(op_type=op) for op in stray]
    session = SimpleNamespace(
        get_providers=lambda: active,
        get_provider_graph_assignment_info=lambda: [
            SimpleNamespace(ep_name="CPUExecutionProvider", get_nodes=lambda: nodes)
        ],
    )

    def make(*args: object, **options: object) -> SimpleNamespace:
        if error is not None:
            raise RuntimeError(error)
        return session

    return SimpleNamespace(
        __version__="1.0",
        __file__=file,
        SessionOptions=lambda: SimpleNamespace(add_session_config_entry=lambda key, value: None),
        InferenceSession=make,
        set_default_logger_severity=lambda level: None,
        get_available_providers=lambda: available,
        preload_dlls=lambda: print("Failed to load libcublas"),
    )


BOTH = ["CUDAExecutionProvider", "CPUExecutionProvider"]


@pytest.mark.parametrize(
    ("available", "active", "stray", "message"),
    [
        (BOTH[1:], BOTH[1:], [], r"the installed wheel has CPUExecutionProvider: .*onnxruntime-gpu\[cuda,cudnn\]"),
        (BOTH, BOTH[1:], [], "cannot start its CUDAExecutionProvider: .*run with device cpu"),
        (BOTH, BOTH, ["Shape", "MatMulNBits"], "on the CPU: MatMulNBits;"),
        (BOTH, BOTH, ["Shape", "Gather"], None),
    ],
)
def test_cuda_asked_for_is_cuda_or_an_error(
    available: list[str],
    active: list[str],
    stray: list[str],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(providers, "onnxruntime", lambda: _fake_ort(available, active, stray))
    if message is None:
        providers.open_session(Path("model.onnx"), "cuda", None)
    else:
        with pytest.raises(DiffbitError, match=message):
            providers.open_session(Path("model.onnx"), "cuda", None)
    assert capsys.readouterr().out == ""


@pytest.fixture
def gpu_wheel(tmp_path: Path) -> str:
    """Where a module would lie whose CUDA provider needs libgpumath.so.7, which is there, and a driver."""
    if sys.platform != "linux" or not shutil.which("c++"):
        pytest.skip("needs Linux and a C++ compiler")
    capi = tmp_path / "onnxruntime" / "capi"
    capi.parent.mkdir()
    math = capi / "libgpumath.so.7"
    compiled('extern "C" int multiply() { return 1; }', math, "-Wl,-soname,libgpumath.so.7")
    compiled('extern "C" int host() { return 1; }', capi / "libonnxruntime_providers_shared.so")
    compiled(
        'extern "C" int multiply(); extern "C" int host(); int both() { return multiply() + host(); }',
        capi / "libonnxruntime_providers_cuda.so",
        str(math),
        "-Wl,-rpath,$ORIGIN",
    )
    return str(capi.parent / "__init__.py")


def test_the_missing_library_is_named(gpu_wheel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (Path(gpu_wheel).parent / "capi" / "libgpumath.so.7").unlink()
    monkeypatch.setattr(providers, "onnxruntime", lambda: _fake_ort(BOTH, BOTH[1:], [], file=gpu_wheel))
    message = r"cannot start its CUDAExecutionProvider: libgpumath\.so\.7 is missing: pip install 'onnxruntime-gpu\["
    with pytest.raises(DiffbitError, match=message):
        providers.open_session(Path("model.onnx"), "cuda", None)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (None, r"libcuda\.so\.1 is missing, which comes with the NVIDIA driver: install the driver"),
        (100, r"the NVIDIA driver, which is for CUDA 12\.4, says: no CUDA-capable device is detected"),
    ],
)
def test_a_driver_without_a_card_is_reported(
    status: int | None, message: str, gpu_wheel: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_driver(monkeypatch, tmp_path, version=12040, status=status)
    error = (
        "CUDA failure 100: no CUDA-capable device is detected ; GPU=0 ; hostname=here ; file=cuda_execution_provider.cc"
    )
    fakes = [_fake_ort(BOTH, BOTH[1:], [], file=gpu_wheel), _fake_ort(BOTH, BOTH, [], error, gpu_wheel)]
    for ort in fakes:  # it falls back, or it refuses
        monkeypatch.setattr(providers, "onnxruntime", lambda ort=ort: ort)
        with pytest.raises(DiffbitError, match=message):
            providers.open_session(Path("model.onnx"), "cuda", None)


@pytest.mark.parametrize(
    ("version", "card", "compiled_for", "message"),
    [
        (
            12040,
            90,
            ["90a"],
            "for CUDA 12.4, and ONNX Runtime 1.0 is for CUDA 13.0: install driver 580 or newer",
        ),
        (13000, 75, ["80", "90a"], "the GPU is sm_75, and libx.so has kernels for sm_80, sm_90a: build it with"),
        (13000, 100, ["90a"], "the GPU is sm_100, and libx.so has kernels for sm_90a: build it with"),
        (13000, 90, ["90a"], None),
        (13010, 100, ["80", "90a"], None),
        (13000, 75, [], None),  # the operators' bodies run
    ],
)
def test_an_old_driver_and_a_card_without_kernels_are_refused(
    version: int,
    card: int,
    compiled_for: list[str],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    install_driver(monkeypatch, tmp_path, version=version, card=card)
    monkeypatch.setattr(providers, "cuda_architectures", lambda path: compiled_for)
    ort = _fake_ort(BOTH, BOTH, [])
    ort.cuda_version = "13.0"
    ort.SessionOptions = lambda: SimpleNamespace(
        add_session_config_entry=lambda key, value: None, register_custom_ops_library=lambda path: None
    )
    monkeypatch.setattr(providers, "onnxruntime", lambda: ort)
    library = Path("libx.so") if compiled_for else None
    if message is None:
        providers.open_session(Path("model.onnx"), "cuda", None, library)
    else:
        with pytest.raises(DiffbitError, match=message):
            providers.open_session(Path("model.onnx"), "cuda", None, library)


@pytest.mark.parametrize(
    ("card", "compiled_for", "expected"),
    [
        (80, ["80"], True),
        (89, ["86"], True),  # code of the same major version
        (86, ["89"], False),
        (86, ["89", "80"], True),
        (90, ["89", "90a"], True),
        (121, ["120a"], False),  # a letter: that card only
        (120, ["80", "90a"], True),  # the first's PTX
        (120, ["90a", "80"], False),
        (75, ["80"], False),
    ],
)
def test_a_card_runs_the_code_compiled_for_it(card: int, compiled_for: list[str], expected: bool) -> None:
    assert runs(card, compiled_for) is expected


def test_a_model_larger_than_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = (
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for requested buffer of size 4294967296"
    )
    monkeypatch.setattr(providers, "onnxruntime", lambda: _fake_ort(BOTH, BOTH, [], failure))
    with pytest.raises(DiffbitError, match=r"^model\.onnx: does not fit into the memory of device cuda$"):
        providers.open_session(Path("model.onnx"), "cuda", None)


def test_a_call_without_memory_leaves_the_session_usable(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(artifact, threads=1)

    def full(binding: object) -> None:
        raise RuntimeError("CUDA failure 2: out of memory ; GPU=0\nand more lines")

    with monkeypatch.context() as patch:
        patch.setattr(session, "_session", SimpleNamespace(run_with_iobinding=full))
        with pytest.raises(DiffbitError, match="has no memory left for a call with 3 new tokens after 0 cached ones; "):
            session.prefill([PROMPT[:3]])
    np.testing.assert_allclose(session.prefill([PROMPT])[0], TOY.logits(PROMPT)[-1], atol=1e-4)


def test_a_cache_without_memory_is_refused(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(artifact, threads=1)

    def full(*args: object) -> None:
        raise RuntimeError("CUDA failure 2: out of memory ; GPU=0")

    fake = SimpleNamespace(OrtValue=SimpleNamespace(ortvalue_from_numpy=full))
    monkeypatch.setattr("diffbit.runtime.caches.onnxruntime", lambda: fake)
    with pytest.raises(DiffbitError, match=r"a cache of .* tokens does not fit into memory"):
        session.prefill([PROMPT])


@pytest.mark.parametrize(
    ("device", "native", "architectures", "registered"),
    [
        ("cuda", True, ["90a"], True),
        ("cuda", False, ["90a"], False),
        ("cuda", True, [], False),
        ("cpu", True, [], True),
    ],
)
def test_which_device_gets_the_library(
    device: str,
    native: bool,
    architectures: list[str],
    registered: bool,
    artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels of a device that the library has none for would be refused: its operators run as bodies."""
    libraries: list[Path | None] = []

    def on_the_cpu(
        model: Path, device: str, threads: int | None, library: Path | None, bfloat16: bool, inputs: object
    ) -> object:
        libraries.append(library)
        assert not bfloat16
        return providers.open_session(model, "cpu", threads)

    monkeypatch.setattr("diffbit.runtime.session.open_session", on_the_cpu)
    monkeypatch.setattr("diffbit.runtime.native.library", lambda: Path("libdiffbit_ops.so"))
    monkeypatch.setattr("diffbit.runtime.native.cuda_architectures", lambda: architectures)
    monkeypatch.setattr("diffbit.runtime.native.instruction_sets", lambda: ["avx2", "scalar"])
    session = Session(artifact, device=device, threads=1, native=native)
    assert session.native == registered and libraries == [Path("libdiffbit_ops.so") if registered else None]


@pytest.mark.parametrize(
    ("device", "dtype", "architectures", "warning"),
    [
        (
            "cuda",
            "fp32",
            ["90a"],
            "a GPU runs an fp32 artifact .*: slower; `diffbit export --target cuda` makes an fp16 one$",
        ),
        ("cuda", "fp16", ["90a"], None),
        ("cuda", "fp32", [], "^no kernels for GPUs in this installation"),
        ("cpu", "fp32", [], None),
    ],
)
def test_slow_combinations_are_reported(
    device: str,
    dtype: str,
    architectures: list[str],
    warning: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diffbit.runtime.native.library", lambda: Path("libdiffbit_ops.so"))
    monkeypatch.setattr("diffbit.runtime.native.cuda_architectures", lambda: architectures)
    monkeypatch.setattr("diffbit.runtime.native.instruction_sets", lambda: ["avx2", "scalar"])
    sentences = slowdowns(Artifact.open(TOY.write(tmp_path / "a", dtype=dtype)), SessionOptions(device=device))
    if warning is None:
        assert sentences == []
    else:
        (sentence,) = sentences
        assert re.search(warning, sentence)


@pytest.mark.parametrize(
    ("sets", "changes", "works"),
    [
        (["amx", "avx2"], {}, True),
        (["avx2"], {}, False),
        ([], {}, False),
        (["amx"], {"native": False}, False),
        (["amx"], {"device": "cuda"}, False),
    ],
)
def test_bfloat16_that_changes_nothing_is_reported(
    sets: list[str], changes: dict[str, Any], works: bool, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffbit.runtime.native.library", lambda: Path("libdiffbit_ops.so"))
    monkeypatch.setattr("diffbit.runtime.native.instruction_sets", lambda: sets)
    sentences = slowdowns(Artifact.open(artifact), SessionOptions(bfloat16=True, **changes))
    assert bool(sentences) != works
    assert all(one.startswith("bfloat16 needs device cpu with AMX and the native library: ") for one in sentences)


def test_placement_is_read_from_a_real_session(tmp_path: Path) -> None:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    model = TOY.write(tmp_path / "a", in_place=True) / "model.onnx"
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    assert providers.node_counts(session)["CPUExecutionProvider"].keys() & providers.COMPUTE == {
        "MatMul",
        "GroupQueryAttention",
    }


def test_a_missing_onnxruntime_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(DiffbitError, match=r"pip install onnxruntime, or 'onnxruntime-gpu\[cuda,cudnn\]'"):
        providers.onnxruntime()
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace())
    with pytest.raises(DiffbitError, match="incomplete"):
        providers.onnxruntime()


def test_logits_without_memory_leave_the_session_usable(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(artifact, threads=1)

    def full(shape: tuple[int, ...]) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("diffbit.runtime.session.pages", full)
        with pytest.raises(DiffbitError, match="Cannot allocate memory"):
            session.prefill([PROMPT])
    np.testing.assert_allclose(session.prefill([PROMPT])[0], TOY.logits(PROMPT)[-1], atol=1e-4)


RUNNING_SUM = """
<ir_version: 10, opset_import: ["": 21]>
toy (int64[B, S] input_ids, int64[B, T] attention_mask, int64[B, S] position_ids, float[B, E] "past_key_values.1.state")
  => (float[B, S, 40] logits, float[B, E] "present.1.state")
  <int64 one = {1}, int64[1] one_1d = {1}, int64 last = {-1}>
{
  x = Gather (embed, input_ids)
  sums = CumSum (x, one)
  before = Unsqueeze ("past_key_values.1.state", one_1d)
  h = Add (sums, before)
  "present.1.state" = Gather <axis = 1> (h, last)
  logits = MatMul (h, out)
}
"""


@pytest.mark.parametrize("in_place", ["always", "never"])
def test_layers_may_have_a_state_of_fixed_size_or_no_cache(in_place: str, tmp_path: Path) -> None:
    """Layer 0 keeps nothing, layer 1 a running sum: calls, steps and resets against the formula."""
    folder = TOY.write(tmp_path / "a")
    width = TOY.embed.shape[1]
    model = onnx.parser.parse_model(RUNNING_SUM.replace("E]", f"{width}]").replace("40]", f"{TOY.vocab_size}]"))
    for name, values in (("embed", TOY.embed), ("out", TOY.out)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), name))
    onnx.save(model, folder / "model.onnx")
    manifest = json.loads((folder / "diffbit.json").read_text())
    state = {"name": "state", "dtype": "float32", "shape": [width], "in_place": in_place}
    changed = {"layers": [{"buffers": []}, {"buffers": [state]}]}
    seal(folder, {key: value for key, value in manifest.items() if key != "files"} | {"cache": changed})
    session = Session(folder, threads=1)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    expected = np.cumsum(TOY.embed[ids].astype(np.float64), axis=0) @ TOY.out
    for _ in range(2):  # the second time after a reset
        logits = [session.prefill([ids[:3]]), session.prefill([ids[3:5]]), *(session.step([[i]]) for i in ids[5:])]
        assert np.allclose(np.concatenate(logits), expected[[2, 4, 5, 6, 7]], atol=1e-5)
        session.reset()
    assert np.allclose(session.prefill([ids[:2], ids[1:3]])[0], expected[1], atol=1e-5)
