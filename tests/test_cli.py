"""The command line: every example in a help text runs, --json is JSON, and stdout holds results only."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from sys import modules
from typing import get_args

import pytest
from typer.main import get_command

from diffbit.cli.app import app, main
from diffbit.cli.options import FORMATS
from diffbit.formats import names, parse_format
from diffbit.models import Checkpoint
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.runtime import Session, SessionOptions

from .adapters import write_adapter

ROOT = Path(__file__).parents[1]
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
EXAMPLES = [
    line.strip()
    for command in COMMANDS.values()
    for line in (command.epilog or "").splitlines()
    if line.strip().startswith("diffbit ")
]
FEW = ["--max-windows", "2"]
LONG = ("compare", "allocate", "--scheme", "webgpu", "quantize", "train")  # examples that take seconds
SHORTER = {
    "train": ["--steps", "2", "--data", "text.txt", "--quiet"],
    "compare": FEW,
    "outliers": FEW,
    "quantize": FEW,
    "verify": FEW,
    "allocate": FEW,
}
TEXT = {"quantize": {"--calibrate", "--method"}, "verify": {"--checkpoint"}}  # where examples read text


@pytest.fixture(scope="module")
def workplace(
    checkpoint: Path,
    quantized: Path,
    artifact: Path,
    trained: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder that looks as a clone does after `make demo`, with the tests' small model for those of the demo."""
    folder = tmp_path_factory.mktemp("workplace")
    demo = folder / "out" / "demo"
    (folder / "text.txt").write_text((ROOT / "cli" / "quantize.py").read_text() * 8)
    for name in ("diff_v1", "softmax"):
        shutil.copytree(checkpoint, demo / name)
        shutil.copytree(quantized, demo / f"{name}-int4")
        shutil.copytree(artifact, demo / f"{name}-onnx")
    shutil.copytree(trained("diff_v1").parent, folder / "examples" / "pico")
    shape = Checkpoint(folder / "examples" / "pico" / "softmax").shape("model.layers.0.mlp.up_proj.weight")
    write_adapter(folder / "out" / "adapter", {"model.layers.0.mlp.up_proj": shape})
    quantize_checkpoint(checkpoint, folder / "out" / "llama-int4", Scheme(weights=parse_format("int4_g32")))
    shutil.copytree(checkpoint, folder / "out" / "smollm2-int8")  # a checkpoint will do, where torch is installed
    (folder / "out" / "smollm2-int8" / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    return folder


def test_each_command_has_an_example() -> None:
    assert {shlex.split(line)[1] for line in EXAMPLES} == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_can_be_copied_from_a_narrow_terminal(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    lines = [line.strip() for line in capfd.readouterr().out.splitlines()]
    mine = [line for line in EXAMPLES if shlex.split(line)[1] == name]
    assert mine and [line for line in lines if line.startswith("diffbit ")] == mine


def test_what_people_use_comes_first(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["quantize", "--help"])
    panels = capfd.readouterr().out.partition("\nOptions:")[2].split("More options:")
    first, more = (set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", panel, re.MULTILINE)) for panel in panels)
    long = {
        option.name: {name for name in option.opts if name.startswith("--")} for option in COMMANDS["quantize"].params
    }
    assert first == {"--help"}.union(*(long[name] for name in COMMANDS["quantize"].first))
    assert len(more) > len(first) and "--embedding" in more


@pytest.mark.parametrize("name", COMMANDS)
def test_no_name_is_cut_at_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    page, _, _ = capfd.readouterr().out.partition("Examples:")
    assert max(map(len, page.splitlines())) <= 80 and "…" not in page
    for parameter in COMMANDS[name].params:
        for option in [name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-")]:
            assert re.search(rf"(^|[\s/]){re.escape(option)}([\s,]|$)", page), f"{name} --help has no {option}"


def completions(line: str) -> list[str]:
    """What bash offers for the last word of `line`, in a process that cannot import torch."""
    words = shlex.split(line) + ([""] if line.endswith(" ") else [])
    script = "import sys; sys.modules['torch'] = None; from diffbit.cli.app import main; main()"
    environment = os.environ | {
        "_DIFFBIT_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    script = script.replace("main()", "sys.argv[0] = 'diffbit'; main()")
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("diffbit export x --format ", ["artifact", "gptq", "compressed-tensors", "bitsandbytes", "bitnet"]),
        ("diffbit run x --device open", ["openvino", "openvino:cpu", "openvino:gpu", "openvino:npu"]),
        ("diffbit train --preset t", ["tiny"]),
        ("diffbit train --attention diff", ["diff_v1", "diff_v2"]),
        ("diffbit quantize x --weights int8", ["int8_g32", "int8"]),
        ("diffbit quantize x --kv int8,int", ["int8,int8", "int8,int4", "int8,int3", "int8,int2"]),
        ("diffbit quantize x --method gp", ["gptq"]),
        ("diffbit quantize x --method rotate+gp", ["rotate+gptq"]),
        ("diffbit compare x --method rtn,gp", ["rtn,gptq"]),
    ],
)
def test_completion(line: str, expected: list[str]) -> None:
    assert completions(line) == expected


def test_the_closed_choices_are_those_of_the_library() -> None:
    from diffbit.apps.train.config import SCHEDULES
    from diffbit.apps.train.presets import PRESETS
    from diffbit.export.onnx_graph import FLOATS
    from diffbit.runtime.artifact import TARGETS

    def choices(command: str, option: str) -> set[str]:
        home = f"diffbit.cli.{command}" if f"diffbit.cli.{command}" in modules else f"diffbit.apps.{command}.command"
        annotation = inspect.get_annotations(getattr(modules[home], command), eval_str=True)[option]
        literals = [part for part in (annotation.__origin__, *get_args(annotation.__origin__)) if get_args(part)]
        return {value for part in literals for value in get_args(part) if isinstance(value, str)}

    assert choices("train", "preset") == set(PRESETS)
    assert choices("train", "schedule") == set(SCHEDULES)
    assert choices("export", "dtype") == set(FLOATS)
    assert choices("export", "target") == set(TARGETS)


@pytest.mark.parametrize("script", ["demo.sh", "smollm2.sh"])
def test_the_options_that_a_script_types_exist(script: str) -> None:
    """Those of its slow part, too, which CI does not run."""
    text = (ROOT / "examples" / script).read_text()
    used = re.findall(r"\bdiffbit ([a-z]+) ([^|;&<>\n]*)", text.replace("\\\n", " "))
    assert used
    for command, words in used:
        options = COMMANDS[command].params
        known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
        assert known >= set(re.findall(r"(?<= )--?[a-z][a-z-]*", f" {words}")), command


def test_what_the_demo_prints_can_be_copied(tmp_path: Path) -> None:
    """Each line after a $ is, for the shell, the command that ran; here a program that notes its arguments."""
    program = tmp_path / "bin" / "diffbit"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport json, sys; print('ran', json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    demo = ["bash", ROOT / "examples" / "demo.sh", tmp_path / "it's mine"]
    done = subprocess.run(demo, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    ran = [json.loads(line.removeprefix("ran ")) for line in lines if line.startswith("ran ")]
    typed = [shlex.split(line)[2:] for line in lines if line.startswith("$ ")]
    assert typed == ran and len(ran) > 8
    assert "'def __init__(self'" in done.stdout


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[pytest.mark.slow] * any(word in line for word in LONG))
        for line in EXAMPLES
        if not line.startswith(("diffbit serve", "diffbit web"))  # the one does not end, the other needs npm
        if " hf:" not in line  # which needs the network
    ],
)
def test_the_example_works(
    line: str,
    workplace: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if "webgpu" in line:
        request.getfixturevalue("webgpu")
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("XDG_CACHE_HOME", str(workplace / "cache"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("def add(a, b):\n"))
    arguments = shlex.split(line)[1:]
    shorter = SHORTER.get(arguments[0], [])
    if arguments[0] in TEXT and not set(arguments) & TEXT[arguments[0]]:
        shorter = []  # it reads no text
    with pytest.raises(SystemExit) as stopped:
        main(arguments + shorter + ["--repeats", "2"] * ("--repeats" in arguments))
    captured = capfd.readouterr()
    assert stopped.value.code == 0, captured.err
    assert captured.out.strip()
    for flag in ("-o", "--output"):
        if flag in arguments:
            assert Path(arguments[arguments.index(flag) + 1]).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["quantize", "{demo}/diff_v1", "--weights", "int8", "-o", "{out}/q"],
        ["export", "{demo}/diff_v1", "-o", "{out}/a"],
        ["run", "{demo}/diff_v1-onnx", "def", "--max-tokens", "3"],
        ["verify", "{demo}/diff_v1-onnx"],
        ["bench", "{demo}/diff_v1-onnx", "--prompt-tokens", "8", "--new-tokens", "4", "--repeats", "1"],
        ["outliers", "{demo}/diff_v1", "--max-windows", "2"],
        ["compare", "{demo}/diff_v1", "--bits", "16,4", "--max-windows", "2", "--method", "rtn,gptq", "--repeats", "2"],
        [
            *("compare", "{demo}/diff_v1", "--what", "weights", "--bits", "16", "--max-windows", "2"),
            *("--artifact", "{demo}/diff_v1-onnx", "-o", "{out}/c"),
        ],
        ["compare", "{pico}/diff_v1", "--what", "kv", "--max-windows", "2", "--retrieval", "6:2:256", "--rows", "2"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_json_is_json(arguments: list[str], workplace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    places = {"demo": workplace / "out" / "demo", "pico": workplace / "examples" / "pico", "out": tmp_path}
    with pytest.raises(SystemExit) as stopped:
        main([argument.format(**places) for argument in arguments] + ["--json", "--quiet"])
    captured = capfd.readouterr()
    assert stopped.value.code == 0, captured.err
    assert json.loads(captured.out)
    assert captured.err == ""


def test_the_same_seed_writes_the_same_text(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        arguments = ["run", str(workplace / "out/demo/diff_v1-onnx"), "def", "--temperature", "1", "--seed", seed]
        with pytest.raises(SystemExit):
            main([*arguments, "--max-tokens", "24", "--quiet"])
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_prompts_from_stdin_and_interactive(workplace: Path) -> None:
    command = [sys.executable, "-m", "diffbit", "run", str(workplace / "out/demo/diff_v1-onnx"), "--max-tokens", "4"]
    command += ["--temperature", "0"]
    piped = subprocess.run(command, input="def", capture_output=True, text=True, cwd=ROOT)
    assert piped.returncode == 0 and piped.stdout.strip(), piped.stderr
    asked = subprocess.run([*command, "--interactive"], input="def\n\nclass", capture_output=True, text=True, cwd=ROOT)
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.startswith(piped.stdout)
    assert asked.stderr.count("prompt tokens") >= 2


def test_a_checkpoint_is_exported_on_the_way(
    workplace: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    demo, outputs = workplace / "out" / "demo", []
    for model in ("diff_v1-int4", "diff_v1-onnx"):
        with pytest.raises(SystemExit) as stopped:
            main(["run", str(demo / model), "def", "--max-tokens", "8", "--temperature", "0"])
        assert stopped.value.code == 0
        outputs.append(capfd.readouterr())
    assert outputs[0].out == outputs[1].out
    assert "kept in " in outputs[0].err and "--quantize" not in outputs[0].err and "kept in" not in outputs[1].err
    size = ["--prompt-tokens", "8", "--new-tokens", "4", "--repeats", "1", "--json", "--quiet"]
    with pytest.raises(SystemExit):
        main(["bench", str(demo / "diff_v1-int4"), str(demo / "diff_v1-onnx"), *size])
    exported, artifact = json.loads(capfd.readouterr().out)
    assert exported["artifact"] == str(demo / "diff_v1-int4") and exported["model_bytes"] == artifact["model_bytes"]
    assert not list(tmp_path.glob("diffbit-*"))  # nothing is left behind


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["torch", "onnxruntime"])
def test_what_to_install(missing: str, workplace: Path) -> None:
    """Without torch the device's commands work and the others name their extra; without a runtime, what to install."""

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        script = (
            f"import sys; sys.modules[{missing!r}] = None; from diffbit.cli.app import main; main({list(arguments)!r})"
        )
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)

    demo = workplace / "out" / "demo"
    ran = command("run", str(demo / "diff_v1-onnx"), "def", "--max-tokens", "2")
    if missing == "onnxruntime":
        assert ran.returncode == 2 and "pip install onnxruntime, or" in ran.stderr
        return
    assert ran.returncode == 0, ran.stderr
    assert command("verify", str(demo / "diff_v1-onnx")).returncode == 0
    exported = command("run", str(demo / "diff_v1"), "def")
    assert exported.returncode == 2 and exported.stderr.count("\n") == 1
    assert "exporting it needs torch" in exported.stderr and "diffbit export" in exported.stderr
    for lab in (["quantize", str(demo / "diff_v1"), "--weights", "int8", "-o", "x"], ["train", "-o", "x"]):
        refused = command(*lab)
        assert refused.returncode == 2 and "[lab]'" in refused.stderr, refused.stderr


def test_an_artifact_for_a_gpu_is_fp16(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`export --target cuda` makes one; `run` and `bench` remark on another (the model itself runs here)."""
    demo, out = workplace / "out" / "demo", tmp_path / "artifact"
    with pytest.raises(SystemExit) as stopped:
        main(["export", str(demo / "diff_v1"), "-o", str(out), "--target", "cuda"])
    assert stopped.value.code == 0
    assert json.loads((out / "diffbit.json").read_text())["dtype"] == "fp16"

    def here(artifact: Path, options: SessionOptions) -> Session:
        return Session(artifact, threads=1)

    def bench_here(artifact: Path, *arguments: object, **more: object) -> dict[str, object]:
        return {"artifact": artifact.name, "nodes": {}}

    monkeypatch.setattr("diffbit.runtime.Session", here)
    monkeypatch.setattr("diffbit.runtime.bench", bench_here)
    monkeypatch.setattr("diffbit.runtime.native.cuda_architectures", lambda: ["90a"])
    for command in (["run", "PATH", "def", "--max-tokens", "1"], ["bench", "PATH"]):
        for artifact, hints in ((out, False), (demo / "diff_v1-onnx", True)):
            capfd.readouterr()
            with pytest.raises(SystemExit) as stopped:
                main([str(artifact) if word == "PATH" else word for word in command] + ["--device", "cuda"])
            captured = capfd.readouterr()
            assert stopped.value.code == 0, captured.err
            assert ("`diffbit export --target cuda` makes an fp16 one" in captured.err) is hints


def test_the_calibration_text_is_kept_as_far_as_the_manifest(workplace: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 40)
    demo = workplace / "out" / "demo"
    for arguments in (
        ["quantize", demo / "diff_v1", "--weights", "int8", "--calibrate", text, "-o", tmp_path / "q"],
        ["export", tmp_path / "q", "-o", tmp_path / "a"],
    ):
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in [*arguments, "--quiet"]])
        assert stopped.value.code == 0
    kept = json.loads((tmp_path / "a" / "diffbit.json").read_text())["calibration"]
    assert kept["source"] == str(text) and len(kept["sha256"]) == 64 and kept["tokens"] > 10
    report = json.loads((tmp_path / "q" / "quantization_report.json").read_text())
    layers = [row for row in report["weights"] if row["name"] != "model.embed_tokens"]  # it is handed no activations
    assert layers and all(row["output_error"] > 0 for row in layers)


def test_a_method_that_calibrates_takes_a_text_and_says_so(
    workplace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from diffbit.runtime import Artifact

    demo = workplace / "out" / "demo"
    arguments = ["quantize", demo / "diff_v1", "--weights", "int4_g32", "--method", "gptq", *FEW, "-o", tmp_path / "q"]
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    captured = capfd.readouterr()
    assert stopped.value.code == 0, captured.err
    assert "gptq is calibrated on mix" in captured.err and "--calibrate" in captured.err
    assert "output error" in captured.out
    assert "KL" in captured.err and "bits per weight" in captured.err
    entry = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert entry["method"] == "gptq"
    assert entry["calibration"]["source"] == "mix" and entry["calibration"]["tokens"] == 2 * 128
    report = json.loads((tmp_path / "q" / "quantization_report.json").read_text())
    layers = [row for row in report["weights"] if row["name"].startswith("model.layers.")]
    assert report["method"] == "gptq" and all(row["proxy_loss"] > 0 for row in layers)
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "q"), "-o", str(tmp_path / "a"), "--quiet"])
    assert Artifact.open(tmp_path / "a").method == "gptq"


@pytest.mark.slow
def test_a_target_chooses_formats_and_shows_the_error_of_each_layer(
    workplace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from diffbit.models import Checkpoint
    from diffbit.quantize import Scheme, read_scheme

    model, file, folder = workplace / "out" / "demo" / "diff_v1", tmp_path / "scheme.toml", tmp_path / "q"
    arguments = ["allocate", str(model), "--override", "*.o_proj=int8", "--max-windows", "2", "--method", "rtn"]
    arguments += ["-o", str(file)]
    candidates = ["--candidates", "int2_g64, int4_g32,none"]
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--bits", "4", *candidates, "--plot", str(tmp_path / "mixed.svg")])
    captured = capfd.readouterr()
    assert stopped.value.code == 0, captured.err
    table = captured.out[captured.out.index("loss of each layer") :]
    assert table.count("_proj") == 12 and "o_proj" not in table
    assert "most sensitive layers: layers." in captured.err and "nats per token" in captured.err
    assert "the choice of formats is calibrated on mix" in captured.err
    assert "int4_g32" in (tmp_path / "mixed.svg").read_text()
    with pytest.raises(SystemExit) as stopped:
        main(["quantize", str(model), "--scheme", str(file), "-o", str(folder)])
    assert stopped.value.code == 0
    capfd.readouterr()
    report = json.loads((folder / "quantization_report.json").read_text())
    scheme = Scheme.from_file(file)
    assert scheme == read_scheme(Checkpoint(folder)) == Scheme.from_dict(report["scheme"])
    assert {row["name"]: row["format"] for row in report["weights"]} == {
        module: format.name for module, format in scheme.formats(Checkpoint(folder).config).items()
    }
    size = 220_000
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--size", f"{size / 1000}kB", *candidates, "--overwrite", "--json", "--quiet"])
    assert stopped.value.code == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["model_nbytes"] <= size and plan["measured"] > 0


def test_the_methods_are_listed(capfd: pytest.CaptureFixture[str]) -> None:
    from diffbit.quantize.methods import methods

    with pytest.raises(SystemExit) as stopped:
        main(["quantize", "--list-methods"])
    assert stopped.value.code == 0
    lines = capfd.readouterr().out.splitlines()
    for name in methods():
        assert any(line.split()[1:2] == [name] for line in lines), name


def test_formats_are_listed(capfd: pytest.CaptureFixture[str]) -> None:
    for option, listed in (("--list-formats", FORMATS), ("--list-all-formats", names())):
        with pytest.raises(SystemExit) as stopped:
            main(["quantize", option])
        assert stopped.value.code == 0
        rows = capfd.readouterr().out.splitlines()
        assert set(listed) == {row.split()[1] for row in rows if row.startswith("│")} and set(FORMATS) <= set(names())


def test_a_log_names_the_layer_and_its_weights(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from diffbit.io import progress

    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    model = str(workplace / "out" / "demo" / "diff_v1")
    with pytest.raises(SystemExit):
        main(["quantize", model, "--weights", "int4_g32", "--method", "gptq", *FEW, "-o", str(tmp_path / "q")])
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("quantizing: ")]
    for layer in (0, 1):
        for weight in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            assert any(line.startswith(f"quantizing: layers.{layer}.{weight}, ") for line in lines)
    shares = [int(line.split(", ")[1].removesuffix("%")) for line in lines]
    assert shares == sorted(shares) and shares[-1] == 100 and len(set(shares)) > 15
    assert "s left" in lines[len(lines) // 2]
