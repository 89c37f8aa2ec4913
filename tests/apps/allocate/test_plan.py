"""What `diffbit plan` predicts, compared with what the commands write and refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffbit.apps.allocate.plan import plan_export, plan_quantize
from diffbit.cli.app import main
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.models import Checkpoint, Decoder, ModelConfig, save
from diffbit.quantize import Scheme, quantize_checkpoint, read_scheme, resolve
from diffbit.quantize.methods import parse_recipe


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_sizes_are_what_is_written(
    quantized: Path, artifact: Path, checkpoint: Path, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    plan = resolve(Checkpoint(checkpoint).config, Scheme(weights=parse_format("int4_g32")))
    forecast = plan_quantize(Checkpoint(checkpoint), plan, parse_recipe("rtn"), None, None)
    assert forecast.output == pytest.approx(size(quantized), rel=0.15) and forecast.disk == forecast.output
    stored = Checkpoint(quantized)
    after = plan_export(stored, resolve(stored.config, read_scheme(stored)), "fp32")
    assert after.output == pytest.approx(size(artifact), rel=0.15)
    assert plan_export(Checkpoint(checkpoint), plan, "fp32").output == after.output
    for name in ("diff_v1", "diff_v2", "softmax"):
        written = size(export_artifact(trained(name), tmp_path / name))
        source = Checkpoint(trained(name))
        assert plan_export(source, resolve(source.config), "fp32").output == pytest.approx(written, rel=0.15)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments, "--json"])
    printed = capsys.readouterr()
    assert stopped.value.code == 0, printed.err
    return dict(json.loads(printed.out))["steps"]


def test_both_steps_are_planned(checkpoint: Path, quantized: Path, capsys: pytest.CaptureFixture[str]) -> None:
    floats = ["--embedding", "none", "--head", "none"]
    both = run(capsys, str(checkpoint), "--weights", "int4_g32", *floats, "--method", "gptq")
    assert list(both) == ["quantize", "export"] and not both["quantize"]["hidden_states_on_disk"]
    assert all(step["memory"] > 10**8 and step["disk"] >= step["output"] > 10**4 for step in both.values())
    (step,) = run(capsys, str(quantized)).items()
    assert step[0] == "export" and step[1]["output"] == both["export"]["output"]


def test_rotation_unties_a_tied_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """quantize writes a table for the embedding and one for the head then, so both steps count both."""
    config = ModelConfig.uniform(
        vocab_size=4096, hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32, intermediate_size=64,
        max_position=64, attention="softmax", tie_embeddings=True,
    )  # fmt: skip
    save(Decoder(config), tmp_path / "tied")
    int4, int8 = parse_format("int4_g32"), parse_format("int8")
    plain, rotated = (
        run(capsys, str(tmp_path / "tied"), "--weights", "int4_g32", "--method", method) for method in ("rtn", "rotate")
    )
    for step in ("quantize", "export"):
        assert rotated[step]["output"] - plain[step]["output"] == pytest.approx(int8.nbytes((4096, 64)), rel=0.02)
    written = tmp_path / "rotated"
    quantize_checkpoint(tmp_path / "tied", written, Scheme(int4, embedding=int8, head=int8), method="rotate")
    assert rotated["quantize"]["output"] == pytest.approx(size(written), rel=0.05)


def test_hidden_states_go_to_disk_within_a_limit(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(checkpoint), "--weights", "int4_g32", "--calibrate", "stdlib", "--max-windows", "1000000"]
    in_memory = run(capsys, *arguments)["quantize"]
    on_disk = run(capsys, *arguments, "--max-memory", "2GB")["quantize"]
    assert not in_memory["hidden_states_on_disk"] and on_disk["hidden_states_on_disk"]
    assert on_disk["memory"] < 2 * 10**9 < in_memory["memory"] and on_disk["disk"] > in_memory["disk"]
    assert on_disk["output"] == in_memory["output"]


@pytest.mark.parametrize("odd", [["--length", "100000"], ["--length", "1"], ["--max-windows", "0"]])
def test_plan_refuses_what_quantize_refuses(checkpoint: Path, odd: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", str(checkpoint), "--weights", "int4_g32", "--method", "gptq", *odd])
    assert stopped.value.code == 2


def test_a_quantized_checkpoint_takes_no_scheme(quantized: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", str(quantized), "--kv", "int8"])
    assert stopped.value.code == 2 and "leave out the options of a scheme" in capsys.readouterr().err
