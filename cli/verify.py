"""diffbit verify: check an artifact on this device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..io.errors import DiffbitError
from ..settings import SessionOptions
from .options import Data, Field, Json, Length, MaxWindows, Quiet, chat_template, window_length, with_settings
from .output import print_json, print_table, verification_dict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..runtime import Session

EXAMPLES = (
    "diffbit verify out/demo/diff_v1-onnx --checkpoint out/demo/diff_v1-int4",
    "diffbit verify out/demo/diff_v1-onnx --checkpoint out/demo/diff_v1-int4 --max-windows 20 --tokens 200",
    "diffbit verify out/demo/diff_v1-onnx --device webgpu",
)


@with_settings(SessionOptions, "settings", without=["reproducible"])
def verify(
    artifact: Annotated[Path, typer.Argument(help="Folder written by `diffbit export`.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Also compare the logits on text with those of this checkpoint in torch.")
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --checkpoint: also generate this many tokens with both, greedily, from the beginning of each "
            "window, and report where they differ.",
        ),
    ] = 0,
    data: Data = "mix",
    field: Field = "text",
    max_windows: MaxWindows = 8,
    length: Length = None,
    settings: SessionOptions = SessionOptions(),  # noqa: B008 (frozen)
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check an artifact on this device: the hashes of its files, and the logits of its golden prompt.

    The exit code is 2 if a check fails.
    """
    from ..runtime import Session
    from ..runtime import verify as verify_artifact

    if checkpoint is None and (tokens, data, field, max_windows, length) != (0, "mix", "text", 8, None):
        raise DiffbitError("--tokens, --data, --field, --max-windows and --length need --checkpoint")
    result = verify_artifact(artifact, settings)
    report = verification_dict(artifact, settings.device, result)
    if checkpoint is not None and result.passed:
        session = Session(artifact, settings)
        session.artifact.check_output()
        report |= _compare(session, artifact, checkpoint, data, field, max_windows, length, tokens)
        report["passed"] = all(report[part]["passed"] for part in ("checkpoint", "greedy") if part in report)
    if as_json:
        print_json(report)
    else:
        operators = "native kernels" if result.native else "portable ONNX functions"
        print_table(report["checks"], title=f"{artifact} on {settings.device}, {operators}")
        if "checkpoint" in report:
            print_table([report["checkpoint"]], title=f"against {checkpoint}")
        if "greedy" in report:
            differences = report["greedy"].pop("differences")
            print_table([report["greedy"]], title="greedy tokens")
            if differences:
                print_table(differences, title="where they differ")
    if not report["passed"]:
        failed = [f"{check.name}: {check.detail}" for check in result.failures]
        raise DiffbitError("; ".join(failed) or f"{artifact}: its outputs differ from those of {checkpoint}; see above")


def _compare(
    session: Session, artifact: Path, checkpoint: Path, data: str, field: str, max_windows: int, length: int | None,
    tokens: int,
) -> dict[str, Any]:  # fmt: skip
    """Compare with torch: "checkpoint" compares the logits on text, "greedy" the tokens generated after it."""
    from ..calib_data import eval_windows
    from ..export import compare_greedy_tokens, compare_with_checkpoint

    def logits_of(ids: NDArray[np.int64], mask: NDArray[np.bool_]) -> NDArray[np.float32]:
        session.reset()
        return session.prefill(ids, mask, all_positions=True)

    def logits_after(ids: list[int], new: bool) -> NDArray[np.float32]:
        if new:
            session.reset()
        return session.prefill([ids])[0]

    length = window_length(artifact, session.capacity, length)
    render = chat_template(checkpoint)
    text = eval_windows(data, session.artifact.path, length, max_windows, field=field, render=render)
    golden, target = session.artifact.golden, session.artifact.target
    comparisons = {
        "checkpoint": compare_with_checkpoint(logits_of, checkpoint, text, tolerance=golden.tolerance, target=target)
    }
    if tokens:
        comparisons["greedy"] = compare_greedy_tokens(
            logits_after, checkpoint, text, tokens=tokens, capacity=session.capacity, tolerance=golden.tolerance,
            target=target,
        )  # fmt: skip
    return comparisons
