"""What an artifact, or the folder that a command is started in, must not be able to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from diffbit.io.errors import DiffbitError
from diffbit.runtime import Chat, ChatTemplate, Sampler, Session, Tokenizer, generate, verify
from diffbit.runtime.external import external_locations

from .toy import byte_tokenizer, follows, random_toy, seal

ROOT = Path(__file__).parents[2]


def python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in `folder`, which is not on its import path."""
    variables = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    variables |= {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, env=variables, capture_output=True, text=True)


def test_no_code_of_the_current_folder_is_run(tmp_path: Path) -> None:
    """bench and a chat template start processes; beside a model there may be modules of a stranger."""
    random_toy().write(tmp_path / "a")
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    for name in ("statistics", "json", "jinja2", "diffbit"):
        (hostile / f"{name}.py").write_text("open('owned', 'w').close()")
    code = (
        f"from diffbit.runtime import bench, ChatTemplate\nbench({str(tmp_path / 'a')!r}, 4, 2, 1, threads=1)\n"
        "assert ChatTemplate('{{ messages }}', 'T').render([]) == '[]'"
    )
    done = python(code, hostile)
    assert done.returncode == 0, done.stderr
    assert not (hostile / "owned").exists()


def test_onnxruntimes_telemetry_is_off(tmp_path: Path) -> None:
    random_toy().write(tmp_path / "a")
    home = tmp_path / "home"
    home.mkdir()
    code = f"from diffbit.runtime import Session; Session({str(tmp_path / 'a')!r}, threads=1)"
    done = python(code, tmp_path, HOME=str(home), XDG_CACHE_HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert list(home.iterdir()) == []


def test_two_threads_on_one_session(tmp_path: Path, in_place: bool) -> None:
    """The second one gets a sentence, and the first one its text."""
    session = Session(follows("abcdefgh").write(tmp_path / "a", in_place=in_place, context=60), threads=1)
    errors: list[str] = []

    def another() -> None:
        for call in (
            lambda: session.prefill([[1, 2]]),
            lambda: session.step([[1]]),
            session.reset,
            lambda: generate(session, "c", max_tokens=3).result(),
        ):
            with pytest.raises(DiffbitError) as caught:
                call()  # type: ignore[no-untyped-call]
            errors.append(str(caught.value))

    def in_a_thread(text: str) -> None:
        if text == "d":
            thread = threading.Thread(target=another)
            thread.start()
            thread.join()

    chat = Chat(session, template=ChatTemplate("{{ messages[-1].content }}", "T"), sampler=Sampler(), max_tokens=7)
    assert chat.send("a", in_a_thread).text == "bcdefgh"
    assert errors == ["another thread is using this session; open a session for each thread"] * 4
    assert generate(session, "a", max_tokens=7, temperature=0).result().text == "bcdefgh"


def outside(location: str, *more: tuple[str, str]) -> TensorProto:
    """A tensor of 4 floats in another file."""
    tensor = TensorProto(name="w", dims=[4], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), *more):
        tensor.external_data.add(key=key, value=value)
    return tensor


def changed_model(folder: Path, tensor: TensorProto, where: str) -> Path:
    """The random toy whose graph also has `tensor`; every hash is right."""
    random_toy().write(folder)
    model = onnx.load(folder / "model.onnx")
    if where == "initializer":
        model.graph.initializer.append(tensor)
    elif where == "constant":
        model.graph.node.append(helper.make_node("Constant", [], ["w"], value=tensor))
    elif where == "subgraph":
        inner = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "inner", [], [], [tensor])
        model.graph.node.append(helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner))
    elif where == "function":
        node = helper.make_node("Constant", [], ["y"], value=tensor)
        model.functions.append(helper.make_function("x", "F", [], ["y"], [node], []))
    else:
        sparse = onnx.SparseTensorProto(values=tensor, dims=[4])
        if where == "sparse":
            model.graph.sparse_initializer.append(sparse)
        else:
            node = helper.make_node("Constant", [], ["w"])
            node.attribute.append(helper.make_attribute("sparse_value", sparse))
            model.graph.node.append(node)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    manifest = json.loads((folder / "diffbit.json").read_text())
    seal(folder, {key: value for key, value in manifest.items() if key != "files"})
    return folder


@pytest.mark.parametrize(
    ("location", "where"),
    [("../secret", place) for place in ("constant", "subgraph", "function", "sparse", "sparse_attribute")]
    + [(name, "initializer") for name in ("../secret", "/etc/passwd", "unlisted", "*/_ORT_MEM_ADDR_/*", "s/../x", "")],
)
def test_tensors_in_files_that_are_not_listed(location: str, where: str, tmp_path: Path) -> None:
    folder = changed_model(tmp_path / "a", outside(location, ("length", "16")), where)
    for path in (tmp_path / "secret", folder / "unlisted"):
        path.write_bytes(bytes(16))
    message = f"model.onnx: takes tensors from {location!r}, which diffbit.json does not list"
    with pytest.raises(DiffbitError) as caught:
        Session(folder, threads=1)
    assert message in str(caught.value)
    (failure,) = verify(folder).failures
    assert failure.name == "external" and message in failure.detail


def test_repeated_locations_links_and_listed_files(tmp_path: Path) -> None:
    folder = changed_model(tmp_path / "a", outside("data", ("location", "../x")), "initializer")
    assert external_locations(folder / "model.onnx") == {"data", "../x"}  # ONNX Runtime takes one of them
    folder = changed_model(tmp_path / "b", outside("model.onnx.data"), "initializer")
    (folder / "model.onnx.data").write_bytes(bytes(16))
    manifest = json.loads((folder / "diffbit.json").read_text())
    seal(folder, {key: value for key, value in manifest.items() if key != "files"})
    assert verify(folder).passed
    (folder / "model.onnx.data").unlink()
    (folder / "model.onnx.data").symlink_to(tmp_path / "b" / ".." / "secret")
    (tmp_path / "secret").write_bytes(bytes(16))
    with pytest.raises(DiffbitError, match="leads out of the folder"):
        Session(folder, threads=1)


def test_every_value_of_a_repeated_field_is_read(tmp_path: Path) -> None:
    """Protocol Buffers keep the last value of a field, whatever a reader stops at."""
    good, evil = b"\x0a\x08location", b"\x12\x04../x"
    entry = good + b"\x12\x04data" + evil
    tensor = b"\x6a" + bytes([len(entry)]) + entry + b"\x70\x01"
    graph = b"\x2a" + bytes([len(tensor)]) + tensor
    (tmp_path / "m").write_bytes(b"\x3a" + bytes([len(graph)]) + graph)
    assert external_locations(tmp_path / "m") == {"data", "../x"}
    assert (
        onnx.load_model(tmp_path / "m", load_external_data=False).graph.initializer[0].external_data[0].value == "../x"
    )


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x3a", b"\x3a\x7f", b"\x3b\x00", b"\xff" * 20, b"ORTM" * 9])
def test_files_that_are_not_models_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(data + b"location")
    if data == b"\x00":  # field 0 is passed over here and refused by ONNX Runtime
        data += b"\x00"
    with pytest.raises(DiffbitError, match="is not an ONNX model that can be read") as caught:
        external_locations(tmp_path / "m")
    assert "\n" not in str(caught.value)


def test_graphs_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    tensor = outside("data").SerializeToString()
    data = b"\x2a" + bytes([len(tensor)]) + tensor
    for _ in range(200):  # a graph in an attribute in a node in a graph
        for field in (6, 5, 1):
            data = bytes([field << 3 | 2]) + _size(len(data)) + data
    (tmp_path / "m").write_bytes(b"\x3a" + _size(len(data)) + data)
    with pytest.raises(DiffbitError, match="more than 64 deep"):
        external_locations(tmp_path / "m")


def _size(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _size(number >> 7)


def tokenizer_with(**parts: object) -> dict[str, object]:
    return json.loads(byte_tokenizer().to_str()) | parts


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
HOSTILE = {  # name: (tokenizer.json, what the error says when it is loaded or a text is encoded and decoded)
    "a panic in a regular expression": (
        tokenizer_with(pre_tokenizer=SPLIT | {"pattern": {"Regex": "(a|aa)+$c|(a*)*b"}}),
        "fails to encode a text .*retry-limit",
    ),
    "a panic in a decoder": (
        tokenizer_with(decoder={"type": "Strip", "content": "a", "start": 10**6, "stop": 10**6}),
        "fails to decode tokens .*out of bounds",
    ),
    "a panic at load": (
        tokenizer_with(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "is not a tokenizer.json",
    ),
    "no unknown token": (
        tokenizer_with(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}),
        "fails to encode a text .*Missing",
    ),
    "texts that grow": (
        tokenizer_with(normalizer={"type": "Sequence", "normalizers": [DOUBLING] * 40}),
        "its normalizer may make a text 1e[+]12 times as long",
    ),
    "bytes of bytes": (
        tokenizer_with(normalizer={"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 30}),
        "its normalizer may make a text 1e[+]09 times as long",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_tokenizers(case: str, tmp_path: Path) -> None:
    values, message = HOSTILE[case]
    folder = random_toy().write(tmp_path / "a")
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(DiffbitError, match=message) as caught:  # the library's panics are BaseExceptions
        tokenizer = Tokenizer(folder / "tokenizer.json")
        tokenizer.decode(tokenizer.encode("a" * 200))
    assert "\n" not in str(caught.value)
    manifest = json.loads((folder / "diffbit.json").read_text())
    seal(folder, {key: value for key, value in manifest.items() if key != "files"})
    (failure,) = verify(folder, threads=1).failures
    assert failure.name == "tokenizer" and "tokenizer.json" in failure.detail


def test_verify_survives_a_tokenizer_that_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffbit.runtime import verify as module

    folder = random_toy().write(tmp_path / "a")
    monkeypatch.setattr(
        sys.modules[module.__module__], "python", lambda *_: [sys.executable, "-c", "import os; os.abort()"]
    )
    (failure,) = verify(folder, threads=1).failures
    assert failure.name == "tokenizer" and "crashed the process that tried it" in failure.detail


def test_a_large_tokenizer(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(200 << 20)
    with pytest.raises(DiffbitError, match="larger than 128 MiB"):
        Tokenizer(tmp_path / "tokenizer.json")
