"""What a user can get wrong: each ends in one sentence on stderr, exit code 2, and nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffbit.cli.app import main
from diffbit.io.errors import DiffbitError
from diffbit.io.files import new_folder, write_sealed
from diffbit.io.safetensors import write_tensors
from diffbit.io.tokenizer_files import tokenizer_files

ROOT = Path(__file__).parent.parent
Arguments = list[str | Path]


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else {**tensors, name: changed}, folder / "model.safetensors")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor[1, 2] = float("nan")
    return tensor


def odd_dtype(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header[Q]["dtype"] = []
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + data[start:])


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def index_outside(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder.parent / "stolen.safetensors")
    names = load_file(folder.parent / "stolen.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../stolen.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"

# name -> (what is done to a copy of the checkpoint, what the sentence must name)
BAD_CHECKPOINTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "config is not JSON": (lambda p: (p / "config.json").write_text("{"), ["config.json", "JSON"]),
    "no config": (lambda p: (p / "config.json").unlink(), ["config.json"]),
    "unknown model_type": (lambda p: edit_json(p / "config.json", model_type="gpt2"), ["config.json", "gpt2"]),
    "odd kv heads": (lambda p: edit_json(p / "config.json", num_key_value_heads=1), ["num_key_value_heads", "1"]),
    "negative size": (lambda p: edit_json(p / "config.json", hidden_size=-64), ["hidden_size", "-64"]),
    "missing tensor": (lambda p: edit_tensor(p, DOWN, lambda t: None), [DOWN]),
    "misshapen tensor": (lambda p: edit_tensor(p, DOWN, lambda t: t[:, :-1].contiguous()), [DOWN, "127", "128"]),
    "NaN weight": (lambda p: edit_tensor(p, Q, with_nan), [Q, "NaN"]),
    "dtype is a list": (odd_dtype, [Q, "dtype is [], wanted one of"]),
    "truncated file": (lambda p: truncate(p / "model.safetensors"), ["model.safetensors"]),
    "pickle only": (only_pickle, ["pytorch_model.bin", "safetensors"]),
    "index leads outside": (index_outside, ["../stolen.safetensors"]),
}

BAD_ARTIFACTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "flipped byte": (lambda p: flip_byte(p / "model.onnx.data"), ["model.onnx.data"]),
    "missing file": (lambda p: (p / "tokenizer.json").unlink(), ["tokenizer.json"]),
    "edited config": (lambda p: edit_json(p / "config.json", hidden_size=65), ["config.json"]),
    "edited manifest": (lambda p: edit_json(p / "diffbit.json", context_length=9999), ["diffbit.json"]),
    "truncated graph": (lambda p: truncate(p / "model.onnx"), ["model.onnx"]),
}

# name -> (arguments with {checkpoint}, {artifact} and {out} filled in, what the sentence must name)
BAD_OPTIONS: dict[str, tuple[list[str], list[str]]] = {
    "no such artifact": (["run", "{out}/nothing", "x"], ["nothing"]),
    "temperature": (["run", "{artifact}", "x", "--temperature", "-1"], ["temperature", "-1"]),
    "top_p": (["run", "{artifact}", "x", "--top-p", "0"], ["--top-p", "0"]),
    "prompt too long": (["run", "{artifact}", "self " * 200], ["context", "128"]),
    "no cuda here": (["run", "{artifact}", "x", "--device", "cuda"], ["cuda", "CUDAExecutionProvider"]),
    "unknown device": (["run", "{artifact}", "x", "--device", "tpu"], ["--device", "tpu", "cpu"]),
    "unknown option": (["run", "{artifact}", "x", "--temprature", "1"], ["--temprature", "--temperature"]),
    "unknown command": (["exprt", "{checkpoint}"], ["exprt", "export"]),
    "no output folder": (["export", "{checkpoint}"], ["--output"]),
    "unknown folder format": (["export", "{checkpoint}", "--format", "gguf", "-o", "{out}/a"], ["gguf", "bitnet"]),
    "unknown qk format": (["quantize", "{checkpoint}", "--qk", "int2", "-o", "{out}/q"], ["--qk", "int2", "int4"]),
    "no number": (["run", "{artifact}", "x", "--top-k", "many"], ["--top-k"]),
    "bench past the context": (["bench", "{artifact}", "--prompt-tokens", "100"], ["100", "128"]),
    "tokens of what": (["verify", "{artifact}", "--tokens", "5"], ["--tokens", "--checkpoint"]),
    "a text's windows": (
        ["quantize", "{checkpoint}", "--weights", "int8", "--length", "9", "-o", "{out}/q"],
        ["--calibrate"],
    ),
    "forecast of what": (["plan", "{checkpoint}", "--method", "gptq"], ["--method", "--weights", "--scheme"]),
    "plot": (
        ["allocate", "{checkpoint}", "--bits", "4", "--plot", "{out}/x.jpg", "-o", "{out}/s.toml"],
        ["x.jpg", ".svg or .png"],
    ),
    "seed of a choice": (
        ["allocate", "{checkpoint}", "--bits", "4", "--seed", str(2**64), "-o", "{out}/s.toml"],
        ["seed", "2**63"],
    ),
    "angle of a copy": (["convert", "{plain}", "--angle", "45", "-o", "{out}/d"], ["angle is 45.0", "rotated start"]),
    "text of what": (["verify", "{artifact}", "--data", "/nothing"], ["--data", "--checkpoint"]),
    "more than its context": (
        ["verify", "{artifact}", "--checkpoint", "{checkpoint}", "--length", "129"],
        ["--length is 129", "128"],
    ),
    "weights of an artifact": (["run", "nano", "x", "--quantize", "int4_g32"], ["is an artifact", "--quantize"]),
    "chats without a template": (["run", "nano", "-i", "--chat"], ["has no chat template"]),
    "unknown format": (["quantize", "{checkpoint}", "--weights", "int4_g33", "-o", "{out}/q"], ["int4_g33"]),
    "no format at all": (["quantize", "{checkpoint}", "--weights", "none", "-o", "{out}/q"], ["--weights"]),
    "two choices of formats": (
        ["quantize", "{checkpoint}", "--weights", "int8", "--bits", "4", "-o", "{out}/q"],
        ["--weights and --bits"],
    ),
    "a size that cannot be": (["quantize", "{checkpoint}", "--size", "1kB", "-o", "{out}/q"], ["0.00 MB", "artifact"]),
    "fast, and a slow method": (
        ["quantize", "{checkpoint}", "--fast", "--method", "gptq", "-o", "{out}/q"],
        ["--fast", "gptq"],
    ),
    "unknown method": (
        ["quantize", "{checkpoint}", "--weights", "int8", "--method", "gptqq", "-o", "{out}/q"],
        ["gptqq", "gptq, ", "rtn"],
    ),
    "two methods that round": (
        ["quantize", "{checkpoint}", "--weights", "int8", "--method", "rtn+gptq", "-o", "{out}/q"],
        ["rtn+gptq", "rounds twice"],
    ),
    "no text to calibrate on": (
        ["quantize", "{checkpoint}", "--weights", "int8", "--calibrate", "{out}/book.txt", "-o", "{out}/q"],
        ["book.txt"],
    ),
    "no window to calibrate on": (
        ["quantize", "{checkpoint}", "--weights=int8", "--method=gptq", "--max-windows=0", "-o", "{out}/q", "-q"],
        ["max_windows", "0"],
    ),
    "a budget too small": (
        ["allocate", "{checkpoint}", "--bits", "2", "--max-windows", "2", "-o", "{out}/s.toml", "-q"],
        ["2 bits per weight cannot be reached", "to 32.00 bits per weight"],
    ),
    "a budget without a unit": (
        ["allocate", "{checkpoint}", "--size", "40", "--max-windows", "2", "-o", "{out}/s.toml", "-q"],
        ["'40' is not a size", "40MB"],
    ),
    "two budgets": (
        ["allocate", "{checkpoint}", "--bits", "4", "--size", "1MB", "-o", "{out}/s.toml", "-q"],
        ["--bits", "--size"],
    ),
    "no budget": (["allocate", "{checkpoint}", "-o", "{out}/s.toml", "-q"], ["--bits", "--size"]),
    "a scheme of an unknown kind": (
        ["allocate", "{checkpoint}", "--bits", "4", "-o", "{out}/scheme", "-q"],
        [".toml", ".json"],
    ),
    "unknown candidate": (
        ["allocate", "{checkpoint}", "--bits", "4", "--candidates", "int4,q4", "-o", "{out}/s.toml", "-q"],
        ["'q4'"],
    ),
    "a bias without a token": (
        ["run", "{artifact}", "x", "--logit-bias", "a=1"],
        ["--logit-bias is 'a=1'", "ID=BIAS"],
    ),
    "no such checkpoint": (["quantize", "{out}/none", "--weights", "int8", "-o", "{out}/q"], ["none"]),
    "glob matches nothing": (
        ["quantize", "{checkpoint}", "--weights", "int8", "--override", "layers.9*=int8", "-o", "{out}/q"],
        ["layers.9*"],
    ),
    "override without a format": (
        ["quantize", "{checkpoint}", "--weights", "int8", "--override", "lm_head", "-o", "{out}/q"],
        ["lm_head"],
    ),
    "output holds the source": (
        ["quantize", "{checkpoint}", "--weights", "int8", "-o", "{checkpoint}/..", "--overwrite"],
        ["..", "this command reads"],
    ),
    "artifact over its checkpoint": (
        ["export", "{checkpoint}", "-o", "{checkpoint}", "--overwrite"],
        ["command reads"],
    ),
    "output under a file": (["export", "{checkpoint}", "-o", "{checkpoint}/config.json/x"], ["config.json/x"]),
    "output in the working folder": (["quantize", "{checkpoint}", "--weights", "int8", "-o", "."], [".: is or"]),
    "bytes that are no text": (["run", "{artifact}", "caf\udce9"], ["UTF-8", "3 characters"]),
    "threads": (["run", "{artifact}", "x", "--threads", "99999999999"], ["threads", "512"]),
    "seed": (["train", "--seed", "9" * 30, "-o", "{out}/t"], ["seed", "2**63"]),
    "output is taken": (["quantize", "{checkpoint}", "--weights", "int8", "-o", "{artifact}"], ["--overwrite"]),
    "differential attention as bitnet": (
        ["export", "{checkpoint}", "--format", "bitnet", "-o", "{out}/a"],
        ["diff_v1", "bitnet", "softmax"],
    ),
    "wide format": (
        ["quantize", "{checkpoint}", "--weights", "int5", "-o", "{out}/q"],
        ["int5", "8 bits", "int5_g128"],
    ),
    "dtype": (["export", "{checkpoint}", "--dtype", "int7", "-o", "{out}/a"], ["int7", "fp16"]),
    "context length": (["export", "{checkpoint}", "--context-length", "0", "-o", "{out}/a"], ["context", "0"]),
    "unknown preset": (["train", "--preset", "giant", "-o", "{out}/t"], ["giant", "tiny"]),
    "unknown attention": (["train", "--attention", "linear", "-o", "{out}/t"], ["linear", "diff_v1"]),
    "no steps": (["train", "--steps", "0", "-o", "{out}/t"], ["steps", "0"]),
    "window beyond the context": (["outliers", "{checkpoint}", "--length", "999999"], ["length", "999999", "128"]),
    "no batch": (["compare", "{checkpoint}", "--batch-size", "0"], ["batch_size", "0"]),
    "no such text": (["train", "--data", "{out}/book.txt", "-o", "{out}/t"], ["book.txt"]),
    "compare bits": (["compare", "{checkpoint}", "--bits", "16,many", "-o", "{out}/c"], ["many"]),
    "compare what": (["compare", "{checkpoint}", "--what", "weights,moods", "-o", "{out}/c"], ["moods"]),
    "retrieval": (["compare", "{checkpoint}", "--retrieval", "1:1,6", "-o", "{out}/c"], ["'6'", "6:2"]),
    "needles in small words": (
        ["compare", "{checkpoint}", "--retrieval", "1:1", "-o", "{out}/c"],
        ["a lower-case word", "larger vocabulary"],
    ),
    "training on needles": (["train", "--needles", "2", "-o", "{out}/t"], ["needles", "2", "share"]),
    "training from nothing": (["train", "--init", "{out}/none", "-o", "{out}/t"], ["none"]),
    "training from an artifact": (["train", "--init", "{artifact}", "-o", "{out}/t"], ["exported artifact"]),
    "compare with a lost artifact": (["compare", "{checkpoint}", "--artifact", "{out}/a", "-o", "{out}/c"], ["a"]),
    "layer errors of a float model": (
        ["compare", "{checkpoint}", "--quantized", "{checkpoint}", "-o", "{out}/c"],
        ["quantization_report.json"],
    ),
    "outliers without a model": (["outliers", "{out}/none"], ["none"]),
}


def one_sentence(arguments: Arguments, capfd: pytest.CaptureFixture[str], names: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    captured = capfd.readouterr()
    assert stopped.value.code == 2, captured
    assert "Traceback" not in captured.err
    message = captured.err.strip()
    assert message.startswith("error: ") and message.count("\n") == 0, message
    for name in names:
        assert name in message, message


@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
def test_bad_checkpoint(case: str, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spoil, names = BAD_CHECKPOINTS[case]
    folder = tmp_path / "in" / "model"
    shutil.copytree(checkpoint, folder)
    spoil(folder)
    one_sentence(["quantize", folder, "--weights", "int4_g32", "-o", tmp_path / "q"], capfd, names)
    assert [path.name for path in tmp_path.iterdir()] == ["in"], "something half-written was left"


@pytest.mark.parametrize("case", BAD_ARTIFACTS)
def test_bad_artifact(case: str, artifact: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spoil, names = BAD_ARTIFACTS[case]
    folder = tmp_path / "artifact"
    shutil.copytree(artifact, folder)
    spoil(folder)
    one_sentence(["verify", folder, "--json", "--quiet"], capfd, names)


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_option(
    case: str, checkpoint: Path, artifact: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, names = BAD_OPTIONS[case]
    places = {"checkpoint": checkpoint, "artifact": artifact, "out": tmp_path, "plain": ROOT / "examples/pico/softmax"}
    one_sentence([argument.format(**places) for argument in arguments], capfd, names)
    assert list(tmp_path.iterdir()) == [], "something half-written was left"


def test_a_run_that_was_interrupted(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    unfinished = tmp_path / "q.unfinished"
    unfinished.mkdir()
    write_sealed(unfinished / "run.json", {"version": 0})
    arguments: Arguments = ["quantize", checkpoint, "--weights", "int8", "-o", tmp_path / "q"]
    one_sentence(arguments, capfd, ["q.unfinished", "--resume", "--overwrite"])
    one_sentence([*arguments, "--resume"], capfd, ["q.unfinished", "version 0", "--overwrite"])
    assert [path.name for path in tmp_path.iterdir()] == ["q.unfinished"]
    (unfinished / "run.json").rename(unfinished / "thesis.txt")
    one_sentence([*arguments, "--overwrite"], capfd, ["q.unfinished", "run.json"])
    assert (unfinished / "thesis.txt").is_file()


def test_a_model_that_breaks_in_its_second_layer_keeps_the_first(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    edit_tensor(tmp_path / "model", DOWN, with_nan)
    arguments: Arguments = ["quantize", tmp_path / "model", "--weights", "int8", "--method", "gptq"]
    arguments += ["-o", tmp_path / "q"]
    one_sentence([*arguments, "--max-windows", "2", "--quiet"], capfd, [DOWN, "NaN"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "q.unfinished"]


def test_export_without_a_tokenizer(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    one_sentence(["export", tmp_path / "model", "-o", tmp_path / "a"], capfd, ["tokenizer.json", "--tokenizer"])
    assert not (tmp_path / "a").exists()


def test_export_with_a_link_for_a_template(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "tokenizer"))
    (tmp_path / "private").write_text("private")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "private")
    command = ["export", checkpoint, "-o", tmp_path / "x", "--tokenizer", folder]
    one_sentence(command, capfd, ["chat_template.jinja: is a link that leads out of the folder"])
    assert not (tmp_path / "x").exists()
    link = tmp_path / "tokenizer.json"
    link.symlink_to(checkpoint / "tokenizer.json")  # a file that is named itself may be one
    assert tokenizer_files(link) == {"tokenizer.json": (checkpoint / "tokenizer.json").read_bytes()}


def test_scheme_with_an_unknown_key(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scheme = tmp_path / "scheme.toml"
    scheme.write_text('weights = "int8"\nweihgts = "int4_g32"\n')
    one_sentence(["quantize", checkpoint, "--scheme", scheme, "-o", tmp_path / "q"], capfd, ["scheme.toml", "weihgts"])


def test_rows_without_the_field(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "text"}\n')
    one_sentence(["train", "--data", rows, "-o", tmp_path / "t"], capfd, ["rows.jsonl", "text", "body"])


def test_train_over_its_own_tokenizer(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(checkpoint, tmp_path / "t")
    (tmp_path / "t" / "log.jsonl").touch()
    before = sorted((tmp_path / "t").iterdir())
    arguments: Arguments = ["train", "--tokenizer", tmp_path / "t" / "tokenizer.json", "-o", tmp_path / "t"]
    one_sentence([*arguments, "--overwrite"], capfd, ["tokenizer.json", "this command reads"])
    assert sorted((tmp_path / "t").iterdir()) == before


def test_an_overwritten_link_stays_a_link(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "old")
    (tmp_path / "link").symlink_to("old")
    with pytest.raises(SystemExit) as stopped:
        main(["quantize", str(checkpoint), "--weights", "int8", "-o", str(tmp_path / "link"), "--overwrite", "-q"])
    assert stopped.value.code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old"]
    assert (tmp_path / "link").is_symlink() and (tmp_path / "old" / "quantization_report.json").is_file()


def test_odd_places_for_an_output(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for arguments in (["quantize", checkpoint, "--weights", "int8"], ["export", checkpoint]):
        for place in ("a", "a/x"):
            one_sentence([*arguments, "-o", tmp_path / place, "-q"], capfd, ["a", "link"])
    one_sentence(["export", checkpoint, "-o", tmp_path / ("n" * 300), "-q"], capfd, ["name too long"])
    one_sentence(["export", checkpoint, "-o", tmp_path / "/".join("d" * 3000), "-q"], capfd, ["name too long"])
    for place in ("日" * 80, "/".join("d" * 1100)):  # 240 bytes; 1100 folders
        with pytest.raises(SystemExit) as stopped:
            main(["export", str(checkpoint), "-o", str(tmp_path / place), "-q"])
        assert stopped.value.code == 0, capfd.readouterr().err
    subprocess.run(["rm", "-r", str(tmp_path / "d")], check=True)  # too deep for pytest, which tidies up by recursion


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
def test_closed_streams(artifact: Path) -> None:
    command = shlex.join([sys.executable, "-m", "diffbit", "verify", str(artifact)])
    done = subprocess.run(["sh", "-c", f"{command} >&-"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith("error: stdout is closed") and done.stderr.count("\n") == 1, done.stderr
    done = subprocess.run(["sh", "-c", f"{command} 2>&-"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "golden" not in done.stderr and "logits" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_under_stdout(artifact: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "diffbit", "verify", str(artifact), "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("stdin", [b"caf\xe9", None], ids=["Latin-1", "closed"])
def test_no_prompt_on_stdin(stdin: bytes | None, artifact: Path) -> None:
    command = [sys.executable, "-m", "diffbit", "run", str(artifact)]
    if stdin is None:
        command = ["sh", "-c", f"{shlex.join(command)} <&-"]
    done = subprocess.run(command, input=stdin, capture_output=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: ") and done.stderr.count(b"\n") == 1, done.stderr


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DiffbitError, match=r"out: cannot be written .*No such file"), new_folder(out) as new:
        write_tensors(new / "missing" / "model.safetensors", {"weight": torch.zeros(2)})
    with pytest.raises(DiffbitError, match=r"out: cannot be written .No space left"), new_folder(out) as new:
        (new / "half").touch()
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("eos", [-1, 10**6])
def test_export_with_tokens_outside_the_vocabulary(
    eos: int, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", eos_token_id=eos)
    one_sentence(["export", tmp_path / "model", "-o", tmp_path / "a"], capfd, ["eos_token_id", str(eos)])


def test_export_with_a_damaged_tokenizer(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    truncate(tmp_path / "model" / "tokenizer.json")
    one_sentence(["export", tmp_path / "model", "-o", tmp_path / "a"], capfd, ["tokenizer.json"])
    assert not (tmp_path / "a").exists()


def test_a_changed_training_record(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model" / "training.json").write_text('{"result": {}, "config": 3}')
    one_sentence(["compare", tmp_path / "model", "-o", tmp_path / "c"], capfd, ["training.json"])


def test_the_demo_removes_only_what_it_made(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    script = Path(__file__).parents[1] / "examples" / "demo.sh"
    done = subprocess.run(["bash", str(script), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and str(tmp_path) in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
