"""diffbit bench: measure speed, memory and size of artifacts."""

from __future__ import annotations

from typing import Annotated

import typer

from ..io.files import parse_size
from ..io.progress import track
from ..settings import SessionOptions
from .artifacts import as_artifacts
from .options import ArtifactPaths, Json, Quiet, with_settings
from .output import print_json, print_table, remark

EXAMPLES = (
    "diffbit bench out/demo/diff_v1-onnx --prompt-tokens 64 --new-tokens 32 --threads 2",
    "diffbit bench out/demo/diff_v1-onnx --memory 512MB",
)


@with_settings(SessionOptions, "settings", without=["reproducible"])
def bench(
    artifacts: ArtifactPaths,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens in the prompt (prefill).")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate (decode).")] = 64,
    repeats: Annotated[int, typer.Option(help="Number of runs; the median is reported.")] = 5,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of a device, such as 4GB: also report the longest context whose KV cache fits into it with "
            "the model, whatever context the artifact was exported for.",
        ),
    ] = None,
    settings: SessionOptions = SessionOptions(),  # noqa: B008 (frozen)
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure prefill and decode speed, peak memory and size of artifacts, each in its own process."""
    from ..runtime import Artifact, slowdowns
    from ..runtime import bench as bench_artifact
    from ..runtime.providers import placement

    nbytes = None if memory is None else parse_size(memory)
    with as_artifacts(artifacts, settings.device) as opened:
        for sentence in dict.fromkeys(s for path in opened for s in slowdowns(Artifact.open(path), settings)):
            remark(sentence)
        rows = [
            bench_artifact(artifact, prompt_tokens, new_tokens, repeats, settings, memory=nbytes)
            | {"artifact": str(path)}
            for path, artifact in zip(artifacts, track(opened, "measuring"), strict=True)
        ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        row["nodes"] = placement(row["nodes"]) or None
    # one column per artifact, because there are more figures than artifacts
    columns = [(f"{path}/", row) for path, row in zip(artifacts, rows, strict=True)]
    figures = [name for name in rows[0] if name != "artifact"]
    print_table({"figure": name.replace("_", " ")} | {label: row[name] for label, row in columns} for name in figures)
