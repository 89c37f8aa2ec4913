"""diffbit allocate: choose each layer's format within a budget, for `diffbit quantize --scheme`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...cli import (
    Field,
    Json,
    Length,
    Overwrite,
    Quiet,
    TorchDevice,
    print_json,
    print_table,
    read_windows,
    remark,
    torch_device,
)
from ...cli.quantize import (
    CALIBRATED_ON_MIX,
    Activations,
    Calibrate,
    CalibrationWindows,
    Embedding,
    Head,
    KvCache,
    KvWindow,
    MethodName,
    Model,
    Override,
    Qk,
    read_scheme,
)
from ...io.errors import DiffbitError
from ...io.files import parse_size

if TYPE_CHECKING:
    from .mixed import LayerPlan, Plan

EXAMPLES = {
    "allocate": (
        "diffbit allocate out/demo/diff_v1 --bits 3.5 --method gptq --max-windows 64 -o out/scheme.toml",
        "diffbit allocate out/demo/diff_v1 --bits 4 --candidates int2_g64,int4_g32,int8 --plot mixed.svg -o four.json",
    )
}
WINDOWS = 128  # of calibration text


def allocate(
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The .toml or .json file to write, for `diffbit quantize --scheme`.")
    ],
    bits: Annotated[
        float | None,
        typer.Option(
            help="Average number of bits per weight, scales included. Embedding, head and lambda layers do not count, "
            "unless --override names them."
        ),
    ] = None,
    size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Total size of the fp32 artifact: 40MB, 40MiB, 1.2GB, ...")
    ] = None,
    candidates: Annotated[
        str | None,
        typer.Option(
            metavar="FORMATS",
            help="Formats to choose from, such as int2_g64,int4_g128,none (none: float); default: 2, 4 and 8 bits, and "
            "none.",
        ),
    ] = None,
    override: Override = None,
    embedding: Embedding = None,
    head: Head = None,
    activations: Activations = None,
    kv: KvCache = None,
    qk: Qk = None,
    kv_window: KvWindow = None,
    method: MethodName = "rtn",
    calibrate: Calibrate = None,
    field: Field = "text",
    max_windows: CalibrationWindows = WINDOWS,
    length: Length = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot loss against size, and each layer's bits, to this .svg or .png file.")
    ] = None,
    device: TorchDevice = "auto",
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose each linear layer's format, so that the model loses least within a number of bits or bytes.

    It measures what rounding costs in every layer, the KL divergence from the float model, which must fit in memory,
    and takes the formats that lower the loss most per byte. `diffbit quantize --scheme` then quantizes the model with
    them; --method is the one that it will use.
    """
    _check(bits, size, output, overwrite)
    nbytes = None if size is None else parse_size(size)
    scheme = read_scheme(None, None, embedding, head, override, activations, kv, qk, kv_window, weights_later=True)
    if calibrate is None:
        calibrate = "mix"
        remark(CALIBRATED_ON_MIX.format("the choice of formats"))
    text = read_windows(model, calibrate, field, max_windows, length, "calib")
    from .mixed import CANDIDATES
    from .mixed import allocate as choose
    from .plot import plot_plan

    plan = choose(
        model,
        bits=bits,
        nbytes=nbytes,
        scheme=scheme,
        candidates=CANDIDATES if candidates is None else candidates.split(","),
        method=method,
        calibration=text.ids,
        calibration_mask=text.mask,
        device=torch_device(device),
    )
    if plot is not None:
        plot_plan(plan.to_dict(), plot)
    plan.scheme.to_file(output)
    if as_json:
        print_json({"output": str(output), **plan.to_dict()})
        return
    print_table(_rows(plan), title="loss of each layer")
    remark(_summary(plan, output))


def _check(bits: float | None, size: str | None, output: Path, overwrite: bool) -> None:
    if (bits is None) == (size is None):
        raise DiffbitError("pass a budget, --bits or --size, and only one of them")
    if output.suffix not in (".toml", ".json"):
        raise DiffbitError(f"--output is {output}, wanted a name that ends in .toml or .json")
    if output.exists() and not overwrite:
        raise DiffbitError(f"{output}: exists; pass --overwrite to replace it")
    if not output.parent.is_dir():
        raise DiffbitError(f"{output}: there is no folder {output.parent}; make it first")


def _rows(plan: Plan) -> list[dict[str, Any]]:
    """Return a row per layer: its format and loss, and what the next smaller and larger format would change."""

    def change(layer: LayerPlan, larger: bool) -> str:
        name = layer.beside(larger)
        if name is None:
            return "-"
        return f"{name}: {layer.sizes[name] - layer.nbytes:+,} bytes, {layer.losses[name] - layer.loss:+.2e}"

    return [
        {
            "layer": layer.name.removeprefix("model."),
            "format": layer.format,
            "bytes": layer.nbytes,
            "KL": f"{layer.loss:.2e}",
            "smaller": change(layer, False),
            "larger": change(layer, True),
        }
        for layer in plan.layers
    ]


def _summary(plan: Plan, output: Path) -> str:
    most = sorted(plan.layers, key=lambda layer: layer.loss, reverse=True)[:3]
    names = ", ".join(f"{layer.name.removeprefix('model.')} ({layer.format})" for layer in most)
    stand_in = "" if plan.stand_in is None else f"; losses measured with {plan.stand_in} in place of {plan.method}"
    return (
        f"{plan.bits_per_weight:.3f} bits per weight over the linear layers; KL from the float model "
        f"{plan.measured:.4g} nats per token on {plan.tokens:,} tokens of calibration text ({plan.predicted:.4g} "
        f"predicted{stand_in}); most sensitive layers: {names}; the artifact takes at most "
        f"{plan.model_nbytes / 1e6:,.2f} MB; the scheme is in {output}"
    )
