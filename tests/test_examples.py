"""The trained models in examples: what they are said to be, and what a newcomer does with them first."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from runpy import run_path

import pytest

from diffbit.apps.evaluate.measure import Setup, measure
from diffbit.calib_data import eval_windows
from diffbit.cli.app import main
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.models import Checkpoint
from diffbit.quantize import AttentionScheme, Scheme, load, quantize_checkpoint
from diffbit.runtime import Session, generate

from . import forks

ROOT = Path(__file__).parents[1]
RESTORE = ROOT / "examples" / "restore.sh"
PERPLEXITY = {
    "diff_v1": 30.0,
    "softmax": 28.4,
    "diff_v2": 29.1,
    "softmax_ternary": 32.9,
}  # of the held-out text at the end

Trained = Callable[[str], Path]


USE_THE_PLUGIN = """
import sys
import torch
from diffbit.apps.train.new_tokenizer import train_tokenizer
from diffbit.cli.app import main
from diffbit.models import Decoder, ModelConfig, save

torch.manual_seed(0)
config = ModelConfig.uniform(
    attention="gated", vocab_size=300, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=128, max_position=64,
)
train_tokenizer(["a text to have a tokenizer"], 300, "tokenizer")
save(Decoder(config), "model", tokenizer_from="tokenizer")
commands = "quantize model --weights int4_g32 -o low", "export low -o artifact", "verify artifact", "run artifact a"
for command in commands:
    try:
        main([*command.split(), "--quiet"])
    except SystemExit as stopped:
        if stopped.code:
            raise
print(*sorted(name for name in sys.modules if name.startswith("diffbit_gated")))
"""


@pytest.mark.slow
def test_a_package_adds_an_attention(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In an environment with the package, commands take its models; elsewhere they name it, and the artifact runs."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    place = subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    packages = [path for path in sys.path if path.endswith("site-packages")]
    Path(place, "here.pth").write_text(f"import site; list(map(site.addsitedir, {packages!r}))\n")
    copied = shutil.copytree(ROOT / "examples" / "plugin", tmp_path / "plugin")  # a build writes beside the sources
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", copied]
    subprocess.run(install, check=True, capture_output=True)
    used = subprocess.run([python, "-c", USE_THE_PLUGIN], cwd=tmp_path, capture_output=True, text=True)
    assert not used.returncode and used.stdout.endswith("diffbit_gated diffbit_gated.gated\n"), used.stderr

    def exit_code(*arguments: str) -> int | str | None:
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, "--quiet"])
        return stopped.value.code

    assert exit_code("quantize", str(tmp_path / "model"), "--weights", "int8", "-o", str(tmp_path / "int8")) == 2
    assert "layers[0].mixer 'gated' is from the package diffbit-gated, which is not installed" in capfd.readouterr().err
    assert exit_code("verify", str(tmp_path / "artifact")) == 0


@pytest.mark.parametrize("name", PERPLEXITY)
def test_a_trained_model(name: str, trained: Trained) -> None:
    path = trained(name)
    checkpoint = Checkpoint(path)
    assert checkpoint.config.attention == name.removesuffix("_ternary") and checkpoint.config.max_position == 256
    assert (checkpoint.quantization is not None) == name.endswith("_ternary")
    assert sum(file.stat().st_size for file in path.iterdir()) < (4e5 if name.endswith("_ternary") else 8e5)
    (whole,), _ = measure(load(path), [], Setup(eval_windows("stdlib", path, 256, 24)))
    perplexity = whole.scores.perplexity().value
    assert 0.8 * PERPLEXITY[name] < perplexity < 1.25 * PERPLEXITY[name]  # the text is that of the running Python
    about = json.loads((path / "training.json").read_text())
    assert about["command"].startswith("diffbit train --preset pico")
    assert math.exp(about["result"]["eval_loss"]) == pytest.approx(PERPLEXITY[name], rel=0.02)
    last = (path / "loss.csv").read_text().splitlines()[-1].split(",")
    assert last[0] == "800" and float(last[2]) == pytest.approx(about["result"]["eval_loss"], abs=1e-4)


def test_a_newcomers_first_command(trained: Trained, capfd: pytest.CaptureFixture[str]) -> None:
    """It is quantized on the way, and writes Python."""
    with pytest.raises(SystemExit) as stopped:
        main(["run", str(trained("diff_v1")), "def __init__(self", "--max-tokens", "24", "--temperature", "0", "-q"])
    captured = capfd.readouterr()
    assert stopped.value.code == 0 and captured.err == ""
    assert "):\n" in captured.out  # the signature ends


@pytest.mark.slow
def test_the_whole_road(trained: Trained, tmp_path: Path) -> None:
    """examples/road.py: a page, and each of its steps leaves what the next one reads."""
    road = ROOT / "examples" / "road.py"
    assert len(road.read_text().splitlines()) <= 60

    def walk() -> None:
        sys.argv[1:] = [str(trained("diff_v1")), str(tmp_path)]
        run_path(str(road), run_name="__main__")

    done = forks.run(walk)
    assert done.code == 0, done.error
    lines = done.output.splitlines()
    assert lines[0].endswith("diff_v1, 2 layers, hidden size 128") and "verified: True" in lines
    weights = re.search(r"^([\d.]+) MB -> ([\d.]+) MB of weights$", done.output, re.MULTILINE)
    assert weights and float(weights[2]) < 0.25 * float(weights[1])
    assert sum(map(len, lines[lines.index("verified: True") + 1 : -2])) > 40  # the text
    perplexities = [float(value) for value in re.findall(r"perplexity ([\d.]+)", done.output)]
    assert len(perplexities) == 2 and 1 < perplexities[1] / perplexities[0] < 1.05


@pytest.mark.parametrize(
    ("name", "weights", "kv"),
    [
        ("softmax", None, None),
        ("diff_v1", None, None),
        ("diff_v2", None, None),
        ("softmax", "int4_g32", None),
        ("diff_v1", "int4_g32", "int4"),
        ("diff_v2", "int4_g32", "int8"),
    ],
)
def test_an_artifact_runs_in_plain_onnxruntime(
    name: str, weights: str | None, kv: str | None, trained: Trained, tmp_path: Path
) -> None:
    """examples/plain_onnxruntime.py, on the portable bodies: the tokens of `diffbit run`, and no line on stderr."""
    script, checkpoint = ROOT / "examples" / "plain_onnxruntime.py", trained(name)
    imported = re.findall(r"^(?:import|from) (\w+)", script.read_text(), re.MULTILINE)
    assert set(imported) == {"json", "sys", "pathlib", "numpy", "onnxruntime", "tokenizers"}
    if weights is not None:
        int8 = parse_format("int8")
        scheme = Scheme(parse_format(weights), int8, int8, attention=AttentionScheme(keys=kv, values=kv))
        quantize_checkpoint(checkpoint, tmp_path / "low", scheme)
        checkpoint = tmp_path / "low"
    artifact = export_artifact(checkpoint, tmp_path / "artifact")
    prompt = "def __init__(self"
    done = subprocess.run([sys.executable, script, artifact, prompt], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    session = Session(artifact, native=False)
    assert done.stdout == prompt + generate(session, prompt, max_tokens=64, temperature=0).result().text + "\n"


def restored(place: Path) -> subprocess.CompletedProcess[str]:
    """examples/restore.sh, run in the folder `place`/examples."""
    (place / "examples").mkdir(parents=True)
    script = shutil.copy(RESTORE, place / "examples")
    return subprocess.run(["bash", script], capture_output=True, text=True, cwd="/")


def git(*arguments: str | Path) -> None:
    subprocess.run(["git", *arguments], check=True, capture_output=True)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a clone has a history")
def test_the_larger_models_come_out_of_the_history(tmp_path: Path) -> None:
    """Of the history that this clone has: all of it, or else a sentence that says how to come by the rest."""
    trees = re.findall(r"^restore (\w+) (\w{40})$", RESTORE.read_text(), re.MULTILINE)
    assert {folder for folder, _ in trees} == {"nano", "nano_1k", "bitnet"}
    git("clone", "--quiet", "--no-checkout", "--shared", ROOT, tmp_path / "clone")
    known = [
        subprocess.run(["git", "-C", ROOT, "cat-file", "-e", tree], capture_output=True).returncode == 0
        for _, tree in trees
    ]
    done = restored(tmp_path / "clone")
    if not all(known):
        assert done.returncode == 2 and "git fetch --unshallow" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    models = {path.parent for path in (tmp_path / "clone" / "examples").glob("*/*/model.safetensors")}
    assert len(models) == 3 + 2 + 7 + 3
    for model in models:
        floats = model.parent.name == "bitnet" and model.name in ("softmax", "diff_v1", "diff_v2")
        folder = "nano" if floats else model.parent.name
        assert f"out/{folder}/" in json.loads((model / "training.json").read_text())["command"]
        assert Checkpoint(model).config.hidden_size == 256
    assert not list((tmp_path / "clone" / "examples").glob("*/train.sh"))  # what lies beside the models is today's


def test_a_history_without_the_models(tmp_path: Path) -> None:
    done = restored(tmp_path / "copy")
    assert done.returncode == 2 and "copy/examples is in no git repository" in done.stderr
    git("init", "--quiet", tmp_path / "other")
    done = restored(tmp_path / "other")
    assert done.returncode == 2 and "are not in the history of" in done.stderr and "train.sh" in done.stderr
    for text in ("one", "two"):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        git("-C", tmp_path / "other", *identity, "commit", "--quiet", "--allow-empty", "--message", text)
    git("clone", "--quiet", "--depth", "1", f"file://{tmp_path}/other", tmp_path / "shallow")
    done = restored(tmp_path / "shallow")
    assert done.returncode == 2 and "git fetch --unshallow" in done.stderr
    assert not list(tmp_path.glob("*/examples/*/*"))
