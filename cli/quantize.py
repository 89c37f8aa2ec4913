"""diffbit quantize: a checkpoint's weights, KV cache and attention in low bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DiffbitError, MissingDependency
from ..files import check_place, parse_size, write_json
from ..progress import set_quiet
from .options import CALIBRATION_WINDOWS, Field, Json, Length, Overwrite, Quiet, read_windows
from .output import attention_name, print_json, print_table, remark

if TYPE_CHECKING:
    from ..calib_data import Windows
    from ..quantize import AttentionScheme, Report, Scheme, WeightReport
    from ..quantize.mixed import LayerPlan, Plan

LAYER_ERRORS = "quantization_report.json"
EXAMPLES = (
    "diffbit quantize out/demo/diff_v1 --weights int4_g32 -o out/diff-int4",
    "diffbit quantize out/demo/diff_v1 --weights int3_g64 --method gptq --max-windows 64 -o out/diff-gptq",
    "diffbit quantize out/demo/diff_v1 --weights int3_g64 --override 'model.layers.0.*=int8' -o out/diff-int3",
    "diffbit quantize out/demo/diff_v1 --target-bits 3.5 --method gptq --max-windows 64 -o out/diff-mixed",
    "diffbit quantize out/demo/diff_v1 --weights int4_g32 --kv int4 --qk int8 -o out/diff-int4-kv4",
    "diffbit quantize out/demo/diff_v1 --kv int8,int4 --method relambda --max-windows 64 -o out/diff-kv84",
)


def _list_methods(wanted: bool) -> None:
    if wanted:
        from ..quantize.methods import table

        print_table(table())
        raise typer.Exit


Model = Annotated[Path, typer.Argument(help="A checkpoint folder: HF diffllama or llama, or diffbit's own.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for the quantized checkpoint.")]
Weights = Annotated[
    str | None, typer.Option(help="int8, int4_g32, int4_g128_asym, int3_g64, int2_g64, nf4, ternary, ..., or none.")
]
Override = Annotated[
    list[str] | None, typer.Option(help="GLOB=FORMAT or GLOB=none for the modules it names; may be repeated.")
]
Activations = Annotated[
    str | None, typer.Option(help="int8: activations too, a scale per token; int4: of ternary layers.")
]
KvCache = Annotated[
    str | None,
    typer.Option(help="The KV cache's numbers: fp16, int8, int4 or int2; int8,int4 for keys, values; none is float."),
]
Qk = Annotated[
    str | None,
    typer.Option(help="int8 or int4: queries too, and q k^T is a product of integers; keys get no more bits."),
]
Logits = Annotated[
    int | None,
    typer.Option(help="Bits of the attention logits, 2 to 16 (an experiment: an artifact runs them slowly)."),
]
KvWindow = Annotated[
    int | None,
    typer.Option(help="Recent tokens, at least, that an int4 or int2 cache leaves float16; default: 32."),
]
SchemeFile = Annotated[
    Path | None, typer.Option("--scheme", help="A .json or .toml file with the whole scheme instead.")
]
TargetBits = Annotated[
    float | None,
    typer.Option(
        help="Mixed precision: choose each linear layer's format so that they take this many bits a weight on "
        "average, scales included (and those that stay float, but for the head and lambda), and lose the least."
    ),
]
TargetSize = Annotated[
    str | None,
    typer.Option(help="The same for all tensors of the model in a file: 40MB, 40MiB, 1.2GB, ..."),
]
Candidates = Annotated[
    str | None,
    typer.Option(
        help="Formats to choose from, as in int3_g64,int4_g128,none (float); default: of 2 to 8 bits, and none."
    ),
]
MethodName = Annotated[
    str, typer.Option(help="How weights are rounded: methods joined by +, such as gptq or rotate+gptq.")
]
ListMethods = Annotated[
    bool, typer.Option("--list-methods", is_eager=True, callback=_list_methods, help="Show what --method takes.")
]
Calibrate = Annotated[
    str | None,
    typer.Option(
        help="Text to calibrate the method on, and to measure each layer's output error on: 'stdlib', a file, a "
        "folder, hf:NAME; default: stdlib where the method needs text, or a target is given, else none."
    ),
]
CalibrationWindows = Annotated[
    int | None,
    typer.Option("--max-windows", help="Windows of that text at most; default: 128, or 16 where they only measure."),
]
Layers = Annotated[bool, typer.Option("--layers", help="A row for each weight, not for each kind of weight.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with such a run that was interrupted, if there is one.")]


def quantize(
    model: Model,
    output: Output,
    weights: Weights = None,
    override: Override = None,
    activations: Activations = None,
    kv: KvCache = None,
    qk: Qk = None,
    logits: Logits = None,
    kv_window: KvWindow = None,
    scheme_file: SchemeFile = None,
    target_bits: TargetBits = None,
    target_size: TargetSize = None,
    candidates: Candidates = None,
    method: MethodName = "rtn",
    list_methods: ListMethods = False,
    calibrate: Calibrate = None,
    field: Field = "text",
    max_windows: CalibrationWindows = None,
    length: Length = None,
    layers: Layers = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Quantize a checkpoint's weights, layer by layer, its KV cache and attention, or all of them.

    Embeddings, head, norms and lambda stay unless overridden.
    """
    from ..quantize import parse_recipe, quantize_checkpoint

    set_quiet(quiet)
    calibrated = parse_recipe(method).calibrated
    mixed = target_bits is not None or target_size is not None
    if mixed and (weights is not None or scheme_file is not None):
        raise DiffbitError(
            "a target chooses the formats itself; leave out --weights and --scheme (--override may stay)"
        )
    if candidates is not None and not mixed:
        raise DiffbitError("--candidates are chosen from for a target; pass --target-bits or --target-size too")
    scheme = _scheme(scheme_file, weights, override, activations, kv, qk, logits, kv_window, mixed)
    if calibrate is None and (calibrated or mixed):
        calibrate = "stdlib"
        remark(
            f"{method if calibrated else 'the choice of formats'} is calibrated on {calibrate}, the text of Python's "
            "standard library; pass --calibrate with text of the kind that the model is for",
            quiet,
        )
    text = None
    if calibrate is not None:
        default = CALIBRATION_WINDOWS if calibrated or mixed else 16
        text = read_windows(model, calibrate, field, default if max_windows is None else max_windows, length, "calib")
    plan = None
    if mixed:
        assert text is not None
        check_place(output, overwrite=overwrite)  # better refused now than after the measuring
        plan = _plan(model, target_bits, target_size, scheme, candidates, method, text)
        scheme = plan.scheme
    report = quantize_checkpoint(
        model,
        output,
        scheme,
        method=method,
        calibration=None if text is None else text.ids,
        calibration_mask=None if text is None else text.mask,
        calibration_text=None if text is None else {"source": text.source, "sha256": text.sha256},
        overwrite=overwrite,
        resume=resume,
    )
    values = _write(report, plan, output, quiet)
    for warning in report.warnings:
        remark(f"warning: {warning}", quiet)
    if as_json:
        print_json({"output": str(output), **values})
    else:
        _show(report, plan, output, layers, quiet)


def _scheme(
    file: Path | None,
    weights: str | None,
    override: list[str] | None,
    activations: str | None,
    kv: str | None,
    qk: str | None,
    logits: int | None,
    kv_window: int | None,
    mixed: bool,
) -> Scheme:
    """The scheme of the options, or of the file; one with a target may leave the weights' formats open."""
    from ..quantize import Scheme, parse_format, parse_override

    options = (weights, override, activations, kv, qk, logits, kv_window)
    if file is not None:
        if any(option is not None for option in options):
            raise DiffbitError(
                "--scheme holds the whole scheme; leave out --weights, --override, --activations, --kv, --qk, "
                "--logits and --kv-window"
            )
        return Scheme.from_file(file)
    if all(option in (None, "none") for option in (weights, kv, qk, logits)) and not override and not mixed:
        raise DiffbitError(
            "nothing to quantize: pass --weights FORMAT, --kv FORMAT, --qk FORMAT, --logits BITS, --override or "
            "--scheme FILE"
        )
    return Scheme(
        weights=None if weights in (None, "none") else parse_format(weights),
        activations=activations,
        attention=_attention(kv, qk, logits, kv_window),
        overrides=tuple(parse_override(text) for text in override or ()),
    )


def _attention(kv: str | None, qk: str | None, logits: int | None, window: int | None) -> AttentionScheme:
    from ..quantize import AttentionScheme, parse_kv

    chosen: dict[str, Any] = {"logits": logits, "qk": None if qk == "none" else qk}
    chosen |= {} if kv is None else parse_kv(kv)
    chosen |= {} if window is None else {"window": window}
    found = AttentionScheme(**chosen)
    if window is not None and not found.has_window:
        raise DiffbitError(
            "--kv-window leaves tokens of an int4 or int2 cache float16; pass --kv int4, or leave it out"
        )
    return found


def _plan(
    model: Path,
    bits: float | None,
    size: str | None,
    scheme: Scheme,
    candidates: str | None,
    method: str,
    text: Windows,
) -> Plan:
    from ..quantize.mixed import CANDIDATES, plan

    if bits is not None and size is not None:
        raise DiffbitError("--target-bits and --target-size are two targets; pass one of them")
    return plan(
        model,
        bits=bits,
        nbytes=None if size is None else parse_size(size),
        scheme=scheme,
        candidates=CANDIDATES if candidates is None else candidates.split(","),
        method=method,
        calibration=text.ids,
        calibration_mask=text.mask,
    )


def _write(report: Report, plan: Plan | None, output: Path, quiet: bool) -> dict[str, Any]:
    """Put the report, and with a target its plan, into the checkpoint's folder; return what was written."""
    values = report.to_dict()
    if plan is not None:
        values |= {"mixed": plan.to_dict()}
        _draw_plan(values["mixed"], output / "mixed.svg", quiet)
        plan.scheme.to_file(output / "scheme.toml")
    write_json(output / LAYER_ERRORS, values)
    return values


def _draw_plan(plan: Mapping[str, Any], path: Path, quiet: bool) -> None:
    from ..evaluate import plot_plan

    try:
        plot_plan(plan, path)
    except MissingDependency as error:
        remark(f"no plot: {error}", quiet)


def _show(report: Report, plan: Plan | None, output: Path, each: bool, quiet: bool) -> None:
    """Tables of the weights, the plan and the KV cache, and what the whole model takes."""
    if report.weights:
        print_table(_weight_rows(report.weights, each))
    if plan is not None:
        print_table(_plan_rows(plan), title="what each layer pays")
        remark(_plan_words(plan, output), quiet)
    before, after = report.before, report.after
    if attention := report.scheme.attention.to_dict():
        print_table(
            {
                "KV cache": name,
                "bytes for 1000 tokens": size.kv_bytes_per_1k_tokens,
                "and for recent ones": size.kv_fixed_bytes,
            }
            for name, size in (("before", before), (attention_name(attention), after))
        )
    remark(
        f"{output}: {after.nbytes / 1e6:,.2f} MB, {after.bits_per_weight:.2f} bits a weight over the whole model "
        f"(before: {before.nbytes / 1e6:,.2f} MB, {before.bits_per_weight:.2f})",
        quiet,
    )


def _weight_rows(weights: Iterable[WeightReport], each: bool) -> list[dict[str, Any]]:
    """A row per quantized weight, or per kind of weight (q_proj, down_proj, ...) with its mean and its worst layer."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.2%}"

    kinds: dict[tuple[str, str], list[WeightReport]] = {}
    for weight in weights:
        kinds.setdefault((weight.name if each else weight.name.rpartition(".")[2], weight.format), []).append(weight)
    rows = []
    for (kind, format), group in kinds.items():
        outputs = [weight.output_error for weight in group if weight.output_error is not None]
        losses = [weight.proxy_loss for weight in group if weight.proxy_loss is not None]
        worst = max(group, key=lambda weight: weight.output_error or weight.weight_error)
        row: dict[str, Any] = {
            "weight": kind,
            "format": format,
            "weight error": percent(sum(weight.weight_error for weight in group) / len(group)),
            "output error": percent(sum(outputs) / len(outputs) if outputs else None),
        }
        if losses:
            row |= {"proxy loss": sum(losses) / len(losses)}
        if not each:
            worst_error = percent(worst.weight_error if worst.output_error is None else worst.output_error)
            row |= {"worst": f"{worst_error} in {worst.name.removeprefix('model.').rpartition('.')[0]}"}
        bits = sum(weight.nbytes for weight in group) * 8 / sum(math.prod(weight.shape) for weight in group)
        rows.append(row | {"bits/weight": bits, "bytes": sum(weight.nbytes for weight in group)})
    return rows


def _plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """A row per layer: its format, what it loses by it, and what the next smaller and larger one would change."""

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


def _plan_words(plan: Plan, output: Path) -> str:
    most = sorted(plan.layers, key=lambda layer: layer.loss, reverse=True)[:3]
    names = ", ".join(f"{layer.name.removeprefix('model.')} ({layer.format})" for layer in most)
    gap = f"; a better choice could promise {plan.gap:.1e} less at most" if plan.gap else ""
    stand_in = "" if plan.stand_in is None else f"; losses by {plan.stand_in}, which stands in for {plan.method}"
    return (
        f"{plan.bits_per_weight:.3f} bits a weight over the linear layers; KL from the float model {plan.measured:.4g} "
        f"nats a token on {plan.tokens:,} tokens of calibration text ({plan.predicted:.4g} predicted{gap}{stand_in}); "
        f"the layers that pay most: {names}; the scheme, for --scheme: {output / 'scheme.toml'}"
    )
