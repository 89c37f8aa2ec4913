"""diffbit export: a checkpoint becomes an artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DiffbitError
from ..files import read_json
from ..progress import set_quiet
from .options import Json, Overwrite, Quiet, dtype_for
from .output import print_json, print_table, remark

EXAMPLES = (
    "diffbit export out/demo/diff_v1-int4 -o out/diff-onnx",
    "diffbit export examples/pico/softmax_ternary -o out/bitnet-hf --format hf-bitnet",
)


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, quantized or not.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the artifact.")],
    format: Annotated[
        str,
        typer.Option(
            help="artifact: for ONNX Runtime; hf-bitnet: a ternary Transformer as a bitnet checkpoint for transformers."
        ),
    ] = "artifact",
    device: Annotated[
        str, typer.Option(help="cpu or cuda, where the artifact is to run: the default of --dtype.")
    ] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="fp32 or fp16: of what is not quantized, a float KV cache too; default: fp32, with --device cuda fp16."
        ),
    ] = None,
    context_length: Annotated[int | None, typer.Option(help="Tokens that the artifact's cache holds.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json, if the checkpoint has none.")] = None,
    ternary_storage: Annotated[
        str, typer.Option(help="2bit, or base3: ternary weights at 1.6 bits each in the file, expanded at load.")
    ] = "2bit",
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Export a checkpoint as an ONNX artifact that `diffbit run`, onnxruntime-genai and optimum read.

    One with a low-bit KV cache has more inputs than the latter two can feed. With --format hf-bitnet, a folder that
    transformers reads.
    """
    from ..export import export_artifact, export_bitnet

    set_quiet(quiet)
    if device not in ("cpu", "cuda"):
        raise DiffbitError(f"device {device!r} is unknown; choose cpu or cuda")
    if format not in ("artifact", "hf-bitnet"):
        raise DiffbitError(f"format {format!r} is unknown; choose artifact or hf-bitnet")
    if format == "hf-bitnet":
        if (device, dtype, context_length, ternary_storage) != ("cpu", None, None, "2bit"):
            raise DiffbitError(
                "--device, --dtype, --context-length and --ternary-storage are an artifact's; a bitnet folder keeps "
                "what its checkpoint has"
            )
        export_bitnet(checkpoint, output, tokenizer=tokenizer, overwrite=overwrite)
        sizes = {file.name: {"bytes": file.stat().st_size} for file in sorted(output.iterdir())}
        if as_json:
            print_json({"output": str(output), "files": sizes})
        else:
            print_table({"file": name, **entry} for name, entry in sizes.items())
        return
    export_artifact(
        checkpoint,
        output,
        dtype=dtype or dtype_for(device),
        context_length=context_length,
        tokenizer=tokenizer,
        ternary_storage=ternary_storage,
        overwrite=overwrite,
    )
    manifest = read_json(output / "diffbit.json")
    if not (output / "genai_config.json").exists():
        remark(
            f"{output}: a low-bit KV cache, which diffbit runs, and a loader that feeds the buffers listed in "
            "diffbit.json; onnxruntime-genai and optimum feed keys and values only",
            quiet,
        )
    if as_json:
        print_json({"output": str(output), **manifest})
        return
    print_table({"file": name, "bytes": entry["bytes"]} for name, entry in manifest["files"].items())
    print_table(_part_rows(manifest["parts"]), title="what they are made of")


def _part_rows(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per part of an artifact, and their sum."""
    total = sum(part["bytes"] for part in parts)
    return [
        {
            "part": part["name"],
            "bytes": part["bytes"],
            "share": f"{part['bytes'] / total:.1%}",
            "weights": part["weights"],
            "bits/weight": 8 * part["bytes"] / part["weights"] if part["weights"] else None,
        }
        for part in (*parts, {"name": "all", "bytes": total, "weights": None})
    ]
