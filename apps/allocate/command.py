"""diffbit allocate: choose each layer's format within a budget; diffbit plan: forecast memory, disk space and time."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...cli import (
    Json,
    Overwrite,
    Quiet,
    Seed,
    TorchDevice,
    print_json,
    print_table,
    remark,
    torch_device,
    with_settings,
)
from ...cli.automatic import resolve_method
from ...cli.scheme_options import MaxMemory, MethodOptions, Model, SchemeOptions, window_length
from ...devices import dtype_for
from ...io.drawing import check_plot
from ...io.errors import DiffbitError
from ...io.fields import located
from ...io.files import locked, parse_size

if TYPE_CHECKING:
    from ...calib_data import Windows
    from ...quantize import Scheme
    from ...quantize.allocation import Allocation, CacheAllocation, LayerChoice
    from .plan import Forecast

WEIGHTS_TEXT = 16, 256  # windows of text and their length, unless losses of weights are measured
CACHE_TEXT = 8, 512  # the more tokens, the more of them are in low bits

EXAMPLES = {
    "plan": (
        "diffbit plan out/demo/diff_v1 --weights int4_g32 --method gptq",
        "diffbit plan out/demo/diff_v1 --weights int4_g32 --method gptq --max-memory 2GB --json",
        "diffbit plan out/demo/diff_v1-int4",
    ),
    "allocate": (
        "diffbit allocate out/demo/diff_v1 --bits 4.5 --method gptq -o out/scheme.toml",
        "diffbit allocate out/demo/diff_v1 --kv-size 500B -o out/cache.toml",
        "diffbit allocate out/demo/diff_v1 --bits 4.5 --kv-size 500B -o out/both.toml",
        "diffbit allocate out/demo/diff_v1 --bits 4 --candidates int2_g64,int4_g32,int8 --plot mixed.svg -o four.json",
    ),
}


@with_settings(SchemeOptions, "options")
@with_settings(MethodOptions, "rounding", without=("field",))
def plan(
    model: Model,
    options: SchemeOptions,
    rounding: MethodOptions,
    max_memory: MaxMemory = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device that the artifact is for.")] = "cpu",
    dtype: Annotated[
        Literal["fp32", "fp16"] | None,
        typer.Option(help="Precision of everything in the artifact that is not quantized."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict the memory, disk and time that `quantize` and `export` need, and the artifact's size.

    Neither is run. Memory and sizes are computed from the model's shapes; the time is estimated from a matrix product
    timed on this machine. For a quantized checkpoint, only `export` is predicted.
    """
    from ...io.resources import available_memory
    from ...models import Checkpoint
    from ...quantize import plan_for, read_scheme, resolve
    from ...quantize.methods import parse_recipe
    from .plan import plan_export, plan_quantize

    checkpoint = Checkpoint(model)
    steps: dict[str, Forecast] = {}
    if options == SchemeOptions():
        if rounding != MethodOptions() or max_memory is not None:
            raise DiffbitError("options of `quantize`, such as --method, need a scheme; add --weights or --scheme")
        resolved = resolve(checkpoint.config, read_scheme(checkpoint))
    elif checkpoint.quantization is not None:
        raise DiffbitError(f"{model}: is quantized already; leave out the options of a scheme, or pass the float model")
    else:
        scheme = options.scheme()
        limit = None if max_memory is None else parse_size(max_memory)
        recipe = parse_recipe(resolve_method(checkpoint, scheme, rounding, limit))
        resolved = plan_for(checkpoint.config, scheme, recipe)
        text = _text_shape(model, checkpoint.config.max_position, rounding, recipe.calibrated)
        steps["quantize"] = plan_quantize(checkpoint, resolved, recipe, text, limit)
    steps["export"] = plan_export(checkpoint, resolved, dtype or dtype_for(device))
    free = available_memory()
    if as_json:
        values = {name: asdict(step) for name, step in steps.items()}
        print_json({"model": str(model), "steps": values, "available_memory": free})
        return
    print_table(
        {
            "step": name,
            "peak memory": f"{step.memory / 1e6:,.0f} MB",
            "disk": f"{step.disk / 1e6:,.1f} MB",
            "output": f"{step.output / 1e6:,.1f} MB",
            "time": f"about {step.seconds:,.0f} s",
        }
        for name, step in steps.items()
    )
    if any(step.hidden_states_on_disk for step in steps.values()):
        remark("the calibration tokens' hidden states are kept on disk, which takes longer")
    if free is not None:
        remark(f"{free / 1e6:,.0f} MB of memory are free")


@with_settings(SchemeOptions, "options", without=("weights", "scheme_file"))
@with_settings(MethodOptions, "rounding")
def allocate(
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The .toml or .json file to write, for `diffbit quantize --scheme`.")
    ],
    bits: Annotated[
        float | None,
        typer.Option(
            help="Average number of bits per weight, scales included, over the linear layers, the embedding and the "
            "head. Lambda layers count only if --override names them; so do embedding and head with --embedding, "
            "--head or --measure."
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            "--target-size",
            metavar="SIZE",
            help="Total size of the fp32 artifact: 40MB, 40MiB, 1.2GB, ...",
        ),
    ] = None,
    kv_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Size of the KV cache of a token, all layers together, such as 4.7KB: choose a format for the keys "
            "and one for the values of each layer, out of fp16, int8, int4, int3 and int2. Alone, or with --bits or "
            "--size.",
        ),
    ] = None,
    candidates: Annotated[
        str | None,
        typer.Option(
            metavar="FORMATS",
            help="Formats to choose from, such as int2_g64,int4_g128,none (none: float); default: of each width of 2 "
            "to 8 bits the format that loses least, and none.",
        ),
    ] = None,
    options: SchemeOptions = SchemeOptions(),  # noqa: B008 (frozen)
    rounding: MethodOptions = MethodOptions(),  # noqa: B008 (frozen)
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure losses: round each layer and run the model, instead of estimating them. It takes many times "
            "as long, and chooses no format for embedding and head: they are int8, or as --embedding and --head say.",
        ),
    ] = False,
    seed: Seed = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Plot loss against size, and each layer's bits, to this .svg or .png file.")
    ] = None,
    device: TorchDevice = "auto",
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose formats so that the model loses least within a number of bits or bytes: for the weights of each linear
    layer, the embedding and the head, and for the keys and values of each layer in the KV cache.

    The loss of a format in a layer is the KL divergence from the float model. It is estimated from gradients on a few
    windows of text; the float model must fit in memory. The formats that lower the loss most per byte are taken. The
    result is a scheme for `diffbit quantize --scheme`; use it with the same --method.
    """
    for_weights = bits is not None or size is not None
    _check(bits, size, kv_size, output, plot, overwrite)
    if not for_weights and (candidates is not None or measure or plot is not None):
        raise DiffbitError(
            "--candidates, --measure and --plot are for the formats of weights; pass --bits or --size, too"
        )
    with locked(output):  # from the start: minutes of work come before the file
        _check(bits, size, kv_size, output, plot, overwrite)  # again: another process may have written it since
        nbytes = None if size is None else parse_size(size)
        with located("--kv-size"):
            kv_nbytes = None if kv_size is None else parse_size(kv_size)
        scheme = options.scheme(weights_later=for_weights, cache_later=kv_nbytes is not None)
        from ...models import Checkpoint
        from ...quantize.allocation import allocate as choose
        from ...quantize.allocation import allocate_cache

        allocation = cache = None
        if kv_nbytes is not None:
            text = _text(model, rounding, *CACHE_TEXT)
            cache = allocate_cache(
                model,
                kv_nbytes,
                attention=scheme.attention,
                calibration=text.ids,
                calibration_mask=text.mask,
                seed=seed,
                device=torch_device(device),
            )
        if for_weights:
            method = resolve_method(Checkpoint(model), scheme, rounding, is_mix=True)
            text = _text(model, rounding, *((None, None) if measure else WEIGHTS_TEXT))
            allocation = choose(
                model,
                bits=bits,
                nbytes=nbytes,
                scheme=scheme,
                candidates=None if candidates is None else candidates.split(","),
                tables=not measure and options.embedding is None and options.head is None,
                method=method,
                calibration=text.ids,
                calibration_mask=text.mask,
                measuring=measure,
                seed=seed,
                device=torch_device(device),
            )
            scheme = allocation.scheme
        if cache is not None:
            scheme = replace(scheme, attention=cache.attention)
            allocation = None if allocation is None else replace(allocation, scheme=scheme)
        _report(scheme, allocation, cache, output, plot, as_json)


def _report(
    scheme: Scheme,
    allocation: Allocation | None,
    cache: CacheAllocation | None,
    output: Path,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Write the scheme and the plot, and print the losses."""
    from .plot import plot_allocation
    from .scheme_file import write_scheme

    write_scheme(scheme, output)
    if plot is not None and allocation is not None:
        plot_allocation(allocation.to_dict(), plot)
    if as_json:
        of_weights = {} if allocation is None else allocation.to_dict()
        of_cache = {} if cache is None else {"cache": cache.to_dict()}
        print_json({"output": str(output), **of_weights, **of_cache})
        return
    if allocation is not None:
        print_table(_rows(allocation), title="loss of each layer")
        remark(_summary(allocation))
    if cache is not None:
        print_table(_cache_rows(cache), title="loss of the KV cache of each layer")
        remark(_cache_summary(cache))
    remark(f"the scheme is in {output}")


def _text_shape(model: Path, context: int, rounding: MethodOptions, needed: bool) -> tuple[int, int] | None:
    """Return the number of windows that the text has at most, and their length, without reading it."""
    if rounding.calibrate is None and not needed:
        return None
    shape = rounding.windows(needed), window_length(model, context, rounding.length)
    if shape[0] < 1 or shape[1] < 2:
        raise DiffbitError(f"the text has {shape[0]} windows of {shape[1]} tokens, wanted 1 or more of 2 or more")
    return shape


def _text(model: Path, rounding: MethodOptions, windows: int | None, length: int | None) -> Windows:
    """Read the calibration text. windows, length: instead of the usual number and length, unless the user chose."""
    from ...models import Checkpoint

    if windows is not None and length is not None:
        length = rounding.length or min(length, Checkpoint(model).config.max_position)
        windows = windows if rounding.max_windows is None else rounding.max_windows
        rounding = replace(rounding, max_windows=windows, length=length)
    text = rounding.text(model, "the choice of formats")
    assert text is not None  # the choice needs it
    return text


def _check(
    bits: float | None, size: str | None, kv_size: str | None, output: Path, plot: Path | None, overwrite: bool
) -> None:
    if plot is not None:
        check_plot(plot)
    if bits is not None and size is not None:
        raise DiffbitError("pass a budget for the weights, --bits or --size, and only one of them")
    if bits is None and size is None and kv_size is None:
        raise DiffbitError("pass a budget: --bits or --size for the weights, --kv-size for the KV cache, or both")
    if output.suffix not in (".toml", ".json"):
        raise DiffbitError(f"--output is {output}, wanted a name that ends in .toml or .json")
    if output.exists() and not overwrite:
        raise DiffbitError(f"{output}: exists; pass --overwrite to replace it")
    if not output.parent.is_dir():
        raise DiffbitError(f"{output}: there is no folder {output.parent}; make it first")


def _rows(allocation: Allocation) -> list[dict[str, Any]]:
    """Return a row per layer: its format and loss, and what the next smaller and larger format would change."""

    def change(layer: LayerChoice, larger: bool) -> str:
        name = layer.next_size(larger)
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
        for layer in allocation.layers
    ]


def _cache_rows(cache: CacheAllocation) -> list[dict[str, Any]]:
    """Return a row per layer: the formats of its keys and values, their bytes a token, and their loss."""
    rows: dict[str, dict[str, Any]] = {}
    for part in cache.layers:
        layer, name = part.name.removeprefix("model.").split()
        row = rows.setdefault(layer, {"layer": layer, "keys": "", "values": "", "bytes a token": 0, "KL": 0.0})
        row[name] = part.format
        row["bytes a token"] += part.nbytes
        row["KL"] += part.loss
    return [row | {"KL": f"{row['KL']:.2e}"} for row in rows.values()]


def _cache_summary(cache: CacheAllocation) -> str:
    return (
        f"the KV cache takes {cache.nbytes:,.0f} bytes a token, {cache.bits:.2f} bits a number; KL from a float cache: "
        f"{cache.measured:.4g} nats per token ({cache.predicted:.4g} predicted from {cache.tokens:,} tokens of "
        "calibration text)"
    )


def _summary(allocation: Allocation) -> str:
    costly = sorted(allocation.layers, key=lambda layer: layer.loss, reverse=True)[:3]
    names = ", ".join(f"{layer.name.removeprefix('model.')} ({layer.format})" for layer in costly)
    replaced = f", with {allocation.stand_in} in place of {allocation.method}"
    predicted = f"{allocation.predicted:.4g} predicted from {allocation.tokens:,} tokens of calibration text"
    loss = "not measured" if allocation.measured is None else f"{allocation.measured:.4g} nats per token"
    return (
        f"{allocation.bits_per_weight:.3f} bits per weight over the layers chosen; KL from the float model: {loss} "
        f"({predicted}{'' if allocation.stand_in is None else replaced}); most sensitive layers: {names}; the artifact "
        f"takes at most {allocation.model_nbytes / 1e6:,.2f} MB"
    )
