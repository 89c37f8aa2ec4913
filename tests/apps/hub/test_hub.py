"""hf: names and `diffbit push`, against a stand-in of the hub (server.py) that huggingface_hub itself talks to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffbit.apps.hub import command
from diffbit.cli.app import main
from diffbit.io import hub
from diffbit.io.errors import DiffbitError
from diffbit.io.files import folder_name, read_json, sha256_file, write_sealed
from diffbit.io.hub import HubName
from diffbit.io.model_files import is_of_a_model
from diffbit.runtime import Artifact

from .server import Hub, running

ROOT = Path(__file__).parents[3]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, and an empty cache; the token is known."""
    from huggingface_hub import constants

    with running() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # git LFS in its place, which the stand-in speaks
        monkeypatch.setenv("HF_TOKEN", Hub.TOKEN)
        yield server


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    return int(done.value.code or 0)


def test_an_artifact_goes_up_and_comes_back(
    artifact: Path, stand_in: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("push", artifact, "hf:me/diff-int4", "--private", "--license", "mit", "--base-model", "you/diff") == 0
    assert stand_in.private == {"me/diff-int4"}
    back = hub.download("hf:me/diff-int4")
    assert contents(back) == contents(artifact)
    assert "README.md" not in stand_in.downloads
    card = stand_in.find("me/diff-int4", "main")[1]["README.md"].decode()
    assert 'license: "mit"' in card and 'base_model: "you/diff"' in card and "| weights | int4_g32 |" in card
    capsys.readouterr()
    assert run("run", "hf:me/diff-int4", "def ", "--max-tokens", "4", "--temperature", "0", "-q") == 0
    there = capsys.readouterr().out
    assert run("run", artifact, "def ", "--max-tokens", "4", "--temperature", "0", "-q") == 0
    assert capsys.readouterr().out == there
    assert run("bench", "hf:me/diff-int4", "--new-tokens", "2", "--repeats", "1", "--json") == 0


@pytest.mark.slow
def test_environment_and_cache_are_huggingface_hubs(artifact: Path, tmp_path: Path) -> None:
    """A process of its own: HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE, which answers from the cache."""
    with running() as server:
        server.add("me/private", contents(artifact))
        server.private.add("me/private")
        environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        environment.pop("HF_TOKEN", None)
        command = [sys.executable, "-m", "diffbit", "verify", "hf:me/private", "--json", "-q"]

        def verify(**more: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(command, env=environment | more, capture_output=True, text=True)

        refused = verify()
        assert refused.returncode == 2 and "no such repository, or it is private" in refused.stderr
        done = verify(HF_TOKEN=Hub.TOKEN)
        assert done.returncode == 0, done.stderr
        folder = Path(json.loads(done.stdout)["artifact"])
        assert folder.is_relative_to(tmp_path) and contents(folder) == contents(artifact)
    assert verify(HF_HUB_OFFLINE="1").returncode == 0


def test_a_quantized_checkpoint_keeps_its_name(
    quantized: Path, stand_in: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("push", quantized, "hf:me/diff-int4", "-q") == 0
    assert run("export", "hf:me/diff-int4", "-o", tmp_path / "out", "-q") == 0
    assert contents(hub.download("hf:me/diff-int4")) == contents(quantized)
    assert json.loads((tmp_path / "out" / "diffbit.json").read_text())["name"] == "diff-int4"
    assert run("quantize", "hf:me/diff-int4", "-o", "hf:me/other", "--weights", "int8") == 2
    assert "wanted a place on this machine" in capsys.readouterr().err


def test_files_of_an_earlier_model_are_removed(
    artifact: Path, quantized: Path, stand_in: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """What nobody would read as part of a model stays, the new model's own files as well."""
    stays = {".gitattributes": b"*.onnx filter=lfs", "LICENSE": b"mine", "loss.png": b"", "gguf/config.json": b"{}"}
    earlier = {"model.onnx.data": b"old", "onnx/model.onnx_data": b"old", "config.json": b"old", "README.md": b"old"}
    earlier |= {"1_Pooling/config.json": b"{}"}
    stand_in.add("me/diff", stays | earlier)
    assert run("push", quantized, "hf:me/diff", "--json", "-q") == 0
    assert json.loads(capsys.readouterr().out)["removed"] == [
        "1_Pooling/config.json", "model.onnx.data", "onnx/model.onnx_data"
    ]  # fmt: skip
    there = stand_in.find("me/diff", "main")[1]
    assert there.pop("README.md").startswith(b"---")
    assert there == stays | contents(quantized)
    assert run("push", artifact, "hf:me/diff") == 0
    assert "earlier model: model.safetensors, quantization_report.json\n" in capsys.readouterr().err
    there = stand_in.find("me/diff", "main")[1]
    assert {name: data for name, data in there.items() if name != "README.md"} == stays | contents(artifact)


def test_only_what_is_read_is_downloaded(stand_in: Hub) -> None:
    never = [
        "pytorch_model.bin",
        "modeling.py",
        "a.pt",
        "x.pickle",
        "consolidated.safetensors",
        "onnx/model.onnx",
        "README.md",
    ]
    read = [
        "config.json",
        "model-00001-of-00001.safetensors",
        "tokenizer.model",
        "chat_template.jinja",
        "model.onnx_data",
    ]
    first = stand_in.add("me/all", {name: name.encode() for name in (*never, *read)})
    folder = hub.download("hf:me/all")
    assert set(contents(folder)) == set(read) == set(stand_in.downloads)
    stand_in.add("me/all", {"model.safetensors": b"new"})
    assert set(contents(hub.download("hf:me/all"))) == {"model.safetensors"}
    assert hub.download(f"hf:me/all@{first}") == folder
    files = {"onnx/model.onnx": b"graph", "onnx/model.onnx_data": b"data"}  # an artifact that transformers.js reads
    manifest = json.dumps({"files": {name: {} for name in files}}).encode()
    stand_in.add("me/js", files | {"diffbit.json": manifest, "onnx/model_q4.onnx": b"other"})
    onnx = hub.download("hf:me/js") / "onnx"
    assert contents(onnx) == {"model.onnx": b"graph", "model.onnx_data": b"data"}


def test_folders_in_a_repository(artifact: Path, stand_in: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    read = {
        f"{name}/{file}": f"{name} {file}".encode()
        for name in ("diff", "deep/plain")
        for file in ("config.json", "latest.safetensors")
    }
    never = ("config.json", "diff/model.py", "diff/deeper/model.safetensors", "diff/consolidated.safetensors")
    stand_in.add("me/pair", read | {name: b"" for name in never})
    for name in ("diff", "deep/plain"):
        folder = hub.download(f"hf:me/pair/{name}")
        assert contents(folder) == {file: f"{name} {file}".encode() for file in ("config.json", "latest.safetensors")}
    assert set(stand_in.downloads) == set(read)
    with pytest.raises(DiffbitError, match="hf:me/pair/dif: has no folder dif with a model; check its name"):
        hub.download("hf:me/pair/dif")
    stand_in.add("me/low", {f"int4/{name}": data for name, data in contents(artifact).items()})
    assert Artifact.open(hub.download("hf:me/low/int4")).file("model.onnx").read_bytes()  # a link out of the folder
    files = ("q/config.json", "r/config.json", "q/m-Q4.gguf", "r/n.gguf")
    stand_in.add("me/two", {name: name.encode() for name in files})
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        gguf = hub.download("hf:me/two/q")
        assert (folder_name(gguf), gguf.read_bytes()) == ("m-Q4.gguf", b"q/m-Q4.gguf")


def test_all_parts_of_a_gguf_model_are_downloaded(stand_in: Hub) -> None:
    parts = [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    stand_in.add("me/parts", {name: name.encode() for name in parts} | {"README.md": b""})
    stand_in.add("me/others", {name: b"" for name in (*parts, "m-00001-of-00002.gguf", "n.gguf")})
    for name in ("hf:me/parts", f"hf:me/parts/{parts[1]}"):
        path = hub.download(name)
        assert path.name in parts[:2] and sorted(file.name for file in path.parent.glob("*.gguf")) == parts
    path = hub.download(f"hf:me/others/{parts[2]}")
    assert sorted(file.name for file in path.parent.glob("*.gguf")) == parts
    with pytest.raises(DiffbitError, match="has 3 GGUF files; name one of them"):
        hub.download("hf:me/others")


def test_gguf_files(stand_in: Hub) -> None:
    stand_in.add("me/one", {"README.md": b"", "m-Q4.gguf": b"GGUF"})
    stand_in.add("me/two", {"a.gguf": b"GGUF", "deep/b.gguf": b"GGUF2"})
    stand_in.add("me/none", {"model.bin": b""})
    assert hub.download("hf:me/one").read_bytes() == b"GGUF"
    assert hub.download("hf:me/two/deep/b.gguf").read_bytes() == b"GGUF2"
    assert stand_in.downloads == ["m-Q4.gguf", "deep/b.gguf"]
    for name, problem in [("two", "name one of them"), ("two/c.gguf", "has no file c.gguf"), ("none", "has no model")]:
        with pytest.raises(DiffbitError, match=problem):
            hub.download(f"hf:me/{name}")


def test_errors_are_sentences(
    artifact: Path, stand_in: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    def error(*arguments: str | Path) -> str:
        assert run(*arguments) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1 and "Traceback" not in text
        return text

    stand_in.add("me/here", {"config.json": b"{}"})
    stand_in.gated.add("me/here")
    stand_in.add("me/odd", {"diffbit.json": b'{"files": 5}'})
    assert "diffbit.json: " in error("run", "hf:me/odd", "x")
    assert "no such repository" in error("run", "hf:me/nothing", "x")
    assert "no such revision" in error("run", "hf:me/here@v7", "x")
    assert "wanted hf:ORG/NAME" in error("run", "hf:a/b/../c", "x")
    assert "wanted a repository" in error("push", artifact, "hf:me", "-q")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "is gated" in error("run", "hf:me/here", "x")
    assert "hf:me/new" in error("push", artifact, "hf:me/new", "-q")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in error("run", "hf:me/nothing", "x")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "no connection to http://127.0.0.1:9" in error("run", "hf:me/nothing", "x")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "[hub]'" in error("run", "hf:me/here", "x")


def test_what_is_damaged_is_not_uploaded(
    artifact: Path, stand_in: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name, data in contents(artifact).items():
        (broken / name).write_bytes(data[:-1] + b"\0" if name == "model.onnx.data" else data)
    assert run("push", broken, "hf:me/broken") == 2
    assert "was changed after export" in capsys.readouterr().err and not stand_in.commits


def test_code_in_an_artifact_is_not_uploaded(
    artifact: Path, stand_in: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "stranger"
    shutil.copytree(artifact, folder)
    (folder / "index.html").write_text("<script>alert(1)</script>")
    manifest = read_json(folder / "diffbit.json")
    manifest["files"]["index.html"] = {"bytes": 25, "sha256": sha256_file(folder / "index.html")}
    write_sealed(folder / "diffbit.json", manifest)
    assert run("push", folder, "hf:me/x") == 2 and not stand_in.commits
    assert "has 'index.html', which is not uploaded: no model has such a file" in capsys.readouterr().err
    assert run("verify", folder) == 2
    assert "index.html: no model has a file of this name" in capsys.readouterr().err


def test_only_what_a_model_has_is_uploaded(
    stand_in: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the table of it is there before."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "examples/pico/diff_v1", folder)
    of_the_model = {"config.json", "model.safetensors", "tokenizer.json"} & contents(folder).keys()
    assert len(of_the_model) == 3
    for name in (".secrets.json", ".a.safetensors", "training.json", "log.jsonl", "id_rsa", "notes.json", "a.py"):
        (folder / name).write_text("{}")
    shown = []
    monkeypatch.setattr(command, "upload", lambda *arguments: shown.append(capsys.readouterr().out) or ("", []))
    assert run("push", folder, "hf:me/x") == 0
    assert all(name in shown[0] for name in of_the_model) and "README.md" in shown[0] and "training" not in shown[0]
    monkeypatch.undo()


def test_names_of_a_model() -> None:
    for name in ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "a b.gguf",
                 "model.onnx", "model.onnx.data_1", "onnx/model.onnx_data_2", "chat_template.jinja"):  # fmt: skip
        assert is_of_a_model(name), name
    for name in ("index.html", ".env.json", ".x.safetensors", "a/b.safetensors", "..safetensors", "x.js",
                 "training.json", "onnx/x.onnx", "onnx/config.json", "model.onnx.data_1.js", "model.onnx\n",
                 "README.md"):  # fmt: skip
        assert not is_of_a_model(name), name


def test_a_link_out_of_the_folder_is_not_uploaded(
    stand_in: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private, folder = tmp_path / "private.json", tmp_path / "model"
    private.write_text("{}")
    shutil.copytree(ROOT / "examples/pico/diff_v1", folder)
    (folder / "vocab.json").symlink_to(private)
    assert run("push", folder, "hf:me/x") == 2 and not stand_in.commits
    assert "vocab.json: is a link that leads out of the folder" in capsys.readouterr().err


def test_dry_run(artifact: Path, stand_in: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table of accuracy has the ends of the intervals; a file that is no comparison is refused."""
    estimate = {"value": 1.25, "low": 1.125, "high": 1.5}
    row = {"model": "m", "what": "weights", "format": "int4", "method": "rtn", "perplexity": estimate}
    row |= {"ratio": estimate, "kl": estimate, "agreement": {"value": 0.5, "low": 0.25, "high": 0.75}}
    comparison = {"confidence": 0.95, "results": [row]}
    comparison |= {"text": {"source": "stdlib", "scored_tokens": 1000, "length": 64}}
    file = tmp_path / "comparison.json"
    file.write_text(json.dumps(comparison))
    assert run("push", artifact, "hf:me/x", "--results", file, "--dry-run", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    line = "| m | int4 | rtn | 1.25 (1.125 to 1.5) | +25.00% (+12.50% to +50.00%)"
    assert line in shown["card"] and shown["files"]["diffbit.json"] and not stand_in.commits
    file.write_text('{"results": [1]}')
    assert run("push", artifact, "hf:me/x", "--results", file, "--dry-run") == 2


def test_names() -> None:
    assert HubName.parse("hf:a/b@refs/pr/1") == HubName("a/b", None, "refs/pr/1")
    assert HubName.parse("hf:gpt2") == HubName("gpt2")
    for name in ("hf:a/b/x/y.gguf@v1", "hf:a/b", "hf:a/b@v1", "hf:a/b/x/y@v1"):
        assert str(HubName.parse(name)) == name
    for name in ("hf:", "hf:/b", "hf:a/", "hf:a/b@", "hf:a/b/", "hf:a/b/../c", "hf:a/b/c//d", "hf:a/b/./x.gguf"):
        with pytest.raises(DiffbitError):
            HubName.parse(name)
    assert hub.download("some/folder") == Path("some/folder")


def test_files_of_deeper_folders_are_downloaded(stand_in: Hub) -> None:
    """Without these, an embedding model would silently make another vector, and a chat model miss its tools."""
    deeper = {"1_Pooling/config.json": b"{}", "additional_chat_templates/tool_use.jinja": b"T"}
    others = {"2_Dense/model.safetensors": b"", "additional_chat_templates/rag.jinja": b""}
    stand_in.add("me/deep", {"model.safetensors": b"w", "modules.json": b"[]"} | deeper | others)
    folder = hub.download("hf:me/deep")
    there = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert there == {"model.safetensors", "modules.json", *deeper}
