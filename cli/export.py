"""diffbit export: write an artifact for ONNX Runtime, or a checkpoint for other libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..devices import dtype_for
from ..io.errors import DiffbitError
from ..io.files import read_json
from .artifacts import export_fitting
from .options import Json, Overwrite, Quiet, completion
from .output import print_json, print_table, remark

FORMATS = ("artifact", "gptq", "compressed-tensors", "bitsandbytes", "bitnet")
EXAMPLES = (
    "diffbit export out/demo/diff_v1-int4 -o out/diff-onnx",
    "diffbit export examples/pico/softmax_ternary -o out/bitnet-hf --format bitnet",
    "diffbit export out/llama-int4 -o out/llama-gptq --format gptq",
)


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint: a folder, float or quantized, or a GGUF file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Output folder.")],
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            autocompletion=completion(lambda: FORMATS),
            help="artifact: for ONNX Runtime; gptq, compressed-tensors, bitsandbytes or bitnet: the quantized "
            "checkpoint as transformers, vLLM and peft read it (docs/checkpoints.md).",
        ),
    ] = "artifact",
    target: Annotated[
        Literal["cpu", "cuda", "webgpu", "onnxruntime"],
        typer.Option(
            help="Device that the graph's operators are chosen for. webgpu is for browsers and for GPUs of any vendor; "
            "onnxruntime is for CPUs in programs without diffbit's library, such as onnxruntime-genai; its int8 KV "
            "cache is ONNX Runtime's own. The artifact also runs on the other devices."
        ),
    ] = "cpu",
    dtype: Annotated[
        Literal["fp32", "fp16"] | None,
        typer.Option(help="Precision of everything that is not quantized; default: fp32, or fp16 for --target cuda."),
    ] = None,
    kv: Annotated[
        Literal["fp32", "fp16"] | None,
        typer.Option(
            help="Precision of a KV cache that is not quantized; default: fp16 in a quantized model for CPUs."
        ),
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(help="Tokens that the KV cache can hold; default: the model's context.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json or tokenizer.model to include, if the checkpoint has none.")
    ] = None,
    library: Annotated[
        bool,
        typer.Option(
            "--library",
            help="Put this machine's native library into the folder: onnxruntime-genai then runs diffbit's kernels.",
        ),
    ] = False,
    layout: Annotated[
        Literal["plain", "transformers.js"],
        typer.Option(help="transformers.js: the graph lies in a folder onnx/, where transformers.js looks for it."),
    ] = "plain",
    embeddings: Annotated[
        bool,
        typer.Option(
            "--embeddings",
            help="Export a model that gives hidden states instead of logits, for /v1/embeddings of `diffbit serve`.",
        ),
    ] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Export a checkpoint to an ONNX artifact that `diffbit run`, onnxruntime-genai and optimum load.

    onnxruntime-genai and optimum pass only keys and values, so they need a float KV cache; for onnxruntime-genai it can
    be int8 with --target onnxruntime.
    With another --format, the output is a checkpoint for transformers and vLLM, with the same codes and scales.
    """
    from ..export import export_checkpoint

    if format != "artifact":
        if any((target != "cpu", dtype, kv, context_length, library, layout != "plain", embeddings)):
            raise DiffbitError(f"only --tokenizer and --overwrite apply to --format {format}; leave out the others")
        export_checkpoint(checkpoint, output, format, tokenizer=tokenizer, overwrite=overwrite)
        return _print_files(output, as_json)
    export_fitting(
        checkpoint, output, dtype=dtype or dtype_for(target), target=target, context_length=context_length,
        kv=kv, tokenizer=tokenizer,
        library=library, layout=layout, embeddings=embeddings, overwrite=overwrite,
    )  # fmt: skip
    manifest = read_json(output / "diffbit.json")
    if not (embeddings or (output / "genai_config.json").exists()):
        remark(f"{output}: {_readers(manifest)}")
    if as_json:
        print_json({"output": str(output), **manifest})
        return
    print_table({"file": name, "bytes": entry["bytes"]} for name, entry in manifest["files"].items())
    print_table(_part_rows(manifest["parts"]), title="parts of the model")


def _readers(manifest: Mapping[str, Any]) -> str:
    """Say what cannot run an artifact whose cache is more than keys and values."""
    attention = (manifest["scheme"] or {}).get("attention", {})
    formats = "/".join(dict.fromkeys(attention[part] for part in ("keys", "values") if part in attention))
    target = manifest.get("target", "cpu")
    if formats and target == "webgpu":
        return (
            f"WebGPU has no kernels for a KV cache of {formats}, so devices refuse it; quantize without --kv, or leave "
            "out --target"
        )
    if formats and target == "onnxruntime":
        return (
            f"ONNX Runtime has no operator for a KV cache of {formats} in this model, so many small ones compute it, "
            "and onnxruntime-genai cannot run it; it has one for --kv int8 without --qk, in layers without sliding "
            "windows"
        )
    advice = "; with --target onnxruntime, onnxruntime-genai can" if formats == "int8" else ""
    return f"onnxruntime-genai and optimum cannot run it: they know only keys and values that grow{advice}"


def _print_files(folder: Path, as_json: bool) -> None:
    sizes = {file.name: {"bytes": file.stat().st_size} for file in sorted(folder.iterdir())}
    if as_json:
        print_json({"output": str(folder), "files": sizes})
    else:
        print_table({"file": name, **entry} for name, entry in sizes.items())


def _part_rows(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per part of the model, and one for their sum."""
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
