"""The command line: one function per command, which parses options, calls a room and prints what it returns.

Results go to stdout (a table, or with --json one JSON object), progress and remarks to stderr. Exit codes: 0 done,
2 bad input (or an artifact that does not pass `verify`), 130 interrupted. Rooms are imported inside the commands, so
that `diffbit run` starts without torch.
"""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import __version__
from .errors import DiffbitError, MissingDependency
from .files import check_place, parse_size, read_json, write_json
from .progress import set_quiet

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .calib_data import NeedleWindows, Windows
    from .quantize import AttentionScheme, Scheme, WeightReport
    from .quantize.mixed import LayerPlan, Plan
    from .quantize.outliers import OutlierReport
    from .runtime import Verification

LAYER_ERRORS = "quantization_report.json"
CALIBRATION_WINDOWS = 128  # of the model's context (at most 512 tokens), for methods that calibrate
LAB_PACKAGES = {"torch", "safetensors", "onnx", "onnx_ir", "bitsandbytes", "matplotlib", "datasets", "pyarrow"}

app = typer.Typer(
    name="diffbit",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    """From a Differential Transformer checkpoint to a low-bit model on a device, with the cost of every bit shown."""


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no remarks; results only.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing output folder, once the new one is whole.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything random.")]
NoNative = Annotated[
    bool, typer.Option("--no-native", help="Run the operators' portable bodies, not the native library's kernels.")
]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads; the default is one per physical core.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda; cuda that cannot be had is an error.")]
TorchDevice = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Data = Annotated[
    str, typer.Option("--data", help="Text: 'stdlib', a file, a folder, or hf:NAME[:config][:split][:field].")
]
Field = Annotated[str, typer.Option("--field", help="Field of .jsonl rows, column of .parquet files.")]
MaxWindows = Annotated[int, typer.Option("--max-windows", help="Windows of text to read at most.")]
Length = Annotated[int | None, typer.Option("--length", help="Tokens in a window; default: the context, at most 512.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; bad input is one sentence on stderr and exit code 2."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):  # bytes that are no text are told of where they are used
            stream.reconfigure(errors=errors)
    try:
        app(arguments)
    except DiffbitError as error:
        _fail(str(error), 2)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in LAB_PACKAGES:
            raise
        _fail(str(MissingDependency(package, "lab", "this command")), 2)
    except OSError as error:
        _fail(f"{error.filename or 'input or output'}: failed ({error.strerror or error})", 2)


def _fail(message: str, code: int) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(f"[red]error:[/] {escape(message)}", highlight=False)
    raise SystemExit(code)


def _remark(message: str, quiet: bool) -> None:
    if not quiet:
        Console(stderr=True, soft_wrap=True).print(escape(message), highlight=False)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str), flush=True)


def _print_table(rows: Iterable[Mapping[str, Any]], title: str | None = None) -> None:
    """Rows as a table: numbers to the right in four significant digits, the first row's keys as headings."""
    rows = list(rows)
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in rows[0] if rows else ():
        numeric = all(isinstance(row.get(name), int | float | None) for row in rows)
        heading = name.replace("_", " ") if name.isidentifier() else name
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    # piped into a file, a table keeps its columns whole
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape(str(value))


def _windows(
    model: Path, data: str, field: str, max_windows: int, length: int | None, split: Literal["eval", "calib"] = "eval"
) -> Windows:
    """Windows of held-out text under a model's own tokenizer, no longer than its context."""
    from .calib_data import eval_windows
    from .models import Checkpoint

    context = Checkpoint(model).config.max_position
    if length is None:
        length = min(context, 512)
    elif length > context:
        raise DiffbitError(f"a length of {length} tokens exceeds the context of {context} that {model} has")
    return eval_windows(data, model, length, max_windows, split=split, field=field)


def _needles(
    models: Sequence[Path], entries: str | None, data: str, field: str, rows: int, seed: int
) -> list[NeedleWindows]:
    """Rows of needles for every NEEDLES:QUERIES[:LENGTH], no longer than the shortest context among the models."""
    from .calib_data import needle_windows
    from .evaluate.retrieval import parse_setting
    from .models import Checkpoint

    context = min(Checkpoint(model).config.max_position for model in models)
    asked = [parse_setting(entry, context) for entry in entries.split(",")] if entries else []
    return [
        needle_windows(data, models[0], length, needles, queries, rows, field=field, seed=seed)
        for needles, queries, length in asked
    ]


@contextmanager
def _as_artifacts(paths: Sequence[Path], quiet: bool) -> Iterator[list[Path]]:
    """Artifacts as they are; a checkpoint among them is exported into a folder that lives as long as the command."""
    from .runtime.artifact import MANIFEST

    with TemporaryDirectory(prefix="diffbit-") as folder:
        found = []
        for index, path in enumerate(paths):
            if (path / MANIFEST).is_file() or not any(path.glob("*.safetensors")):
                found.append(path)  # what is neither is told when it is opened
                continue
            try:
                from .export import export_artifact
            except ModuleNotFoundError as error:
                raise DiffbitError(
                    f"{path}: is a checkpoint, and exporting it needs {error.name}, which is not installed: run "
                    f"`diffbit export {path} -o ARTIFACT` where it is (pip install 'diffbit[lab]') and take ARTIFACT"
                ) from None
            target = Path(folder) / str(index) / path.resolve().name
            export_artifact(path, target)
            _remark(f"{path}: a checkpoint, exported for now; once and for all: diffbit export {path} -o FOLDER", quiet)
            found.append(target)
        yield found


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


def _torch_device(name: str) -> str:
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise DiffbitError(f"device {name!r} is unknown; choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise DiffbitError("device cuda was asked for, but torch finds no CUDA device; use --device cpu")
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _measure_outliers(models: Iterable[Path], windows: Windows, device: str) -> list[OutlierReport]:
    from .quantize import load
    from .quantize.outliers import measure

    where = _torch_device(device)
    return [measure(load(model, device=where), windows, name=model.resolve().name) for model in models]


def _example(*lines: str) -> str:
    """The end of a command's help: examples, each on a line of its own."""
    return "Example:\n\n" + "\n\n".join(f"  {escape(line)}" for line in lines)


def _list_presets(wanted: bool) -> None:
    if wanted:
        from .train import parameters

        _print_table(parameters())
        raise typer.Exit


@app.command(epilog=_example("diffbit train --preset tiny --attention diff_v1 --steps 300 -o out/diff_v1"))
def train(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the run, and of the model it ends in.")],
    preset: Annotated[str, typer.Option(help="tiny, nano, small or base; see --list-presets.")] = "tiny",
    attention: Annotated[
        str | None, typer.Option(help="A variant, such as softmax, diff_v1 or diff_v2; default: diff_v1, or --init's.")
    ] = None,
    init: Annotated[
        Path | None, typer.Option(help="A checkpoint to start from: its weights, its sizes, its tokenizer.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of a row and of the model's context; default: the preset's, or --init's."),
    ] = None,
    data: Data = "stdlib",
    field: Field = "text",
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json or a folder that holds one; default: train one on the data.")
    ] = None,
    qat: Annotated[
        str | None,
        typer.Option(
            help="Train for a format that the linear layers compute in, and end in a quantized model: ternary (BitNet "
            "b1.58), int4_g128, int2_g64, ...; its float weights lie in OUTPUT/master.",
        ),
    ] = None,
    activations: Annotated[
        str, typer.Option(help="With --qat ternary: int8, or int4 behind a Hadamard transform (BitNet v2).")
    ] = "int8",
    ramp: Annotated[int, typer.Option(help="With --qat: steps over which rounding grows to its full strength.")] = 0,
    distill: Annotated[
        Path | None,
        typer.Option(
            help="A teacher: a checkpoint, float or quantized, of the same tokenizer, whose predictions and relations "
            "between tokens are learned from beside the text (BitDistill)."
        ),
    ] = None,
    distill_weight: Annotated[
        float | None, typer.Option(help="With --distill: weight of the teacher's predictions; the text's is 1.")
    ] = None,
    relation_weight: Annotated[
        float | None, typer.Option(help="With --distill: weight of one layer's relations between tokens.")
    ] = None,
    distill_layer: Annotated[
        int | None, typer.Option(help="With --distill: the layer whose relations; default: three quarters up.")
    ] = None,
    mlp: Annotated[str | None, typer.Option(help="swiglu or relu2; default: swiglu, or --init's.")] = None,
    sub_norms: Annotated[
        bool | None,
        typer.Option(
            "--sub-norms/--no-sub-norms",
            help="Norms before o_proj and down_proj, put into --init's model if it has none; default: --init's, or "
            "with --qat ternary.",
        ),
    ] = None,
    needles: Annotated[
        float, typer.Option(help="Share of the rows that have key-value needles laid into their text and asked for.")
    ] = 0.0,
    steps: Annotated[int | None, typer.Option(help="Steps; default: the preset's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows in a step; default: the preset's.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Forward passes summed up before a step.")] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="At its highest; default: the preset's, with --qat another (doubled, or less from --init)."),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="cosine or two_stage (BitNet's); default: two_stage for --qat ternary from fresh weights."),
    ] = None,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; 0: at the end only.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints to resume from; 0: none.")] = 500,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in OUTPUT.")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Run the model through torch.compile.")] = False,
    precision: Annotated[
        str, typer.Option(help="fp32 or bf16 (autocast; weights stay fp32); auto: bf16 on a GPU, fp32 on a CPU.")
    ] = "auto",
    seed: Seed = 0,
    device: TorchDevice = "auto",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew: the run that is in OUTPUT is lost.")
    ] = False,
    list_presets: Annotated[
        bool, typer.Option("--list-presets", is_eager=True, callback=_list_presets, help="Show the presets' sizes.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model: DIFF version 1 or 2, or the plain Transformer of equal size that sees the same batches.

    Under torchrun every process takes its share of each batch:
    torchrun --nproc-per-node 8 -m diffbit train --preset base --attention diff_v1 -o out/base

    A ternary model, from training to a device: diffbit train --qat ternary -o out/b158, diffbit export out/b158 -o
    out/artifact, diffbit run out/artifact

    The same from a trained model, which is its own teacher: diffbit train --init out/float --qat ternary --distill
    out/float -o out/b158
    """
    from .train import train as run_training
    from .train import train_config

    set_quiet(quiet)
    changes: dict[str, Any] = {
        "steps": steps,
        "batch_size": batch_size,
        "accumulate": accumulate,
        "learning_rate": learning_rate,
        "schedule": schedule,
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "distill": None if distill is None else str(distill),
        "distill_weight": distill_weight,
        "relation_weight": relation_weight,
        "distill_layer": distill_layer,
    }
    config = train_config(
        preset,
        attention,
        context=context,
        init=None if init is None else str(init),
        mlp=mlp,
        sub_norms=sub_norms,
        qat=qat,
        activations=activations,
        ramp=ramp,
        needles=needles,
        source=data,
        field=field,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
        seed=seed,
        device=device,
        compile=compiled,
        precision=precision,
        **{name: value for name, value in changes.items() if value is not None},
    )
    result = run_training(config, output, resume=resume, overwrite=overwrite)
    if os.environ.get("RANK", "0") != "0":  # under torchrun one process speaks for all
        return
    row = {
        "model": str(result.path),
        "attention": config.model.attention,
        "steps": len(result.losses),
        "tokens": result.tokens,
        "train_loss": result.losses[-1],
        "eval_loss": result.eval_loss,
        "seconds": round(result.seconds, 1),
    }
    if as_json:
        _print_json(row)
    else:
        _print_table([row])


def _list_methods(wanted: bool) -> None:
    if wanted:
        from .quantize.methods import table

        _print_table(table())
        raise typer.Exit


@app.command(
    epilog=_example(
        "diffbit quantize out/demo/diff_v1 --weights int4_g32 -o out/diff-int4",
        "diffbit quantize out/demo/diff_v1 --weights int3_g64 --method gptq --max-windows 64 -o out/diff-gptq",
        "diffbit quantize out/demo/diff_v1 --weights int3_g64 --override 'model.layers.0.*=int8' -o out/diff-int3",
        "diffbit quantize out/demo/diff_v1 --target-bits 3.5 --method gptq --max-windows 64 -o out/diff-mixed",
        "diffbit quantize out/demo/diff_v1 --weights int4_g32 --kv int4 --qk int8 -o out/diff-int4-kv4",
        "diffbit quantize out/demo/diff_v1 --kv int8,int4 --method relambda --max-windows 64 -o out/diff-kv84",
    )
)
def quantize(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder: HF diffllama or llama, or diffbit's own.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the quantized checkpoint.")],
    weights: Annotated[
        str | None, typer.Option(help="int8, int4_g32, int4_g128_asym, int3_g64, int2_g64, nf4, ternary, ..., or none.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option(help="GLOB=FORMAT or GLOB=none for the modules it names; may be repeated.")
    ] = None,
    activations: Annotated[
        str | None, typer.Option(help="int8: activations too, a scale per token; int4: of ternary layers.")
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(
            help="The KV cache's numbers: fp16, int8, int4 or int2; int8,int4 for keys, values; none is float."
        ),
    ] = None,
    qk: Annotated[
        str | None,
        typer.Option(help="int8 or int4: queries too, and q k^T is a product of integers; keys get no more bits."),
    ] = None,
    logits: Annotated[
        int | None,
        typer.Option(help="Bits of the attention logits, 2 to 16 (an experiment: an artifact runs them slowly)."),
    ] = None,
    kv_window: Annotated[
        int | None,
        typer.Option(help="Recent tokens, at least, that an int4 or int2 cache leaves float16; default: 32."),
    ] = None,
    scheme_file: Annotated[
        Path | None, typer.Option("--scheme", help="A .json or .toml file with the whole scheme instead.")
    ] = None,
    target_bits: Annotated[
        float | None,
        typer.Option(
            help="Mixed precision: choose each linear layer's format so that they take this many bits a weight on "
            "average, scales included (and those that stay float, but for the head and lambda), and lose the least."
        ),
    ] = None,
    target_size: Annotated[
        str | None,
        typer.Option(help="The same for all tensors of the model in a file: 40MB, 40MiB, 1.2GB, ..."),
    ] = None,
    candidates: Annotated[
        str | None,
        typer.Option(
            help="Formats to choose from, as in int3_g64,int4_g128,none (float); default: of 2 to 8 bits, and none."
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help="How weights are rounded: methods joined by +, such as gptq or rotate+gptq.")
    ] = "rtn",
    list_methods: Annotated[
        bool, typer.Option("--list-methods", is_eager=True, callback=_list_methods, help="Show what --method takes.")
    ] = False,
    calibrate: Annotated[
        str | None,
        typer.Option(
            help="Text to calibrate the method on, and to measure each layer's output error on: 'stdlib', a file, a "
            "folder, hf:NAME; default: stdlib where the method needs text, or a target is given, else none."
        ),
    ] = None,
    field: Field = "text",
    max_windows: Annotated[
        int | None,
        typer.Option(help="Windows of that text at most; default: 128, or 16 where they only measure."),
    ] = None,
    length: Length = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="A row for each weight, not for each kind of weight.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with such a run that was interrupted, if there is one.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Quantize a checkpoint's weights, layer by layer, its KV cache and attention, or all of them.

    Embeddings, head, norms and lambda stay unless overridden.
    """
    from .quantize import Scheme, parse_format, parse_override, parse_recipe, quantize_checkpoint

    set_quiet(quiet)
    recipe = parse_recipe(method)
    options = (weights, override, activations, kv, qk, logits, kv_window)
    mixed = target_bits is not None or target_size is not None
    if mixed and (weights is not None or scheme_file is not None):
        raise DiffbitError(
            "a target chooses the formats itself; leave out --weights and --scheme (--override may stay)"
        )
    if candidates is not None and not mixed:
        raise DiffbitError("--candidates are chosen from for a target; pass --target-bits or --target-size too")
    if scheme_file is None:
        if all(option in (None, "none") for option in (weights, kv, qk, logits)) and not override and not mixed:
            raise DiffbitError(
                "nothing to quantize: pass --weights FORMAT, --kv FORMAT, --qk FORMAT, --logits BITS, --override or "
                "--scheme FILE"
            )
        scheme = Scheme(
            weights=None if weights in (None, "none") else parse_format(weights),
            activations=activations,
            attention=_attention(kv, qk, logits, kv_window),
            overrides=tuple(parse_override(text) for text in override or ()),
        )
    elif any(option is not None for option in options):
        raise DiffbitError(
            "--scheme holds the whole scheme; leave out --weights, --override, --activations, --kv, --qk, --logits and "
            "--kv-window"
        )
    else:
        scheme = Scheme.from_file(scheme_file)
    text = None
    if calibrate is None and (recipe.calibrated or mixed):
        calibrate = "stdlib"
        what = method if recipe.calibrated else "the choice of formats"
        _remark(
            f"{what} is calibrated on {calibrate}, the text of Python's standard library; pass --calibrate with text "
            "of the kind that the model is for",
            quiet,
        )
    if calibrate is not None:
        windows = (128 if recipe.calibrated or mixed else 16) if max_windows is None else max_windows
        text = _windows(model, calibrate, field, windows, length, split="calib")
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
    values = report.to_dict()
    if plan is not None:
        values |= {"mixed": plan.to_dict()}
        _draw_plan(values["mixed"], output / "mixed.svg", quiet)
        scheme.to_file(output / "scheme.toml")
    write_json(output / LAYER_ERRORS, values)
    for warning in report.warnings:
        _remark(f"warning: {warning}", quiet)
    if as_json:
        _print_json({"output": str(output), **values})
        return
    if report.weights:
        _print_table(_weight_rows(report.weights, layers))
    if plan is not None:
        _print_table(_plan_rows(plan), title="what each layer pays")
        _remark(_plan_words(plan, output), quiet)
    before, after = report.before, report.after
    if attention := scheme.attention.to_dict():
        _print_table(
            {
                "KV cache": name,
                "bytes for 1000 tokens": size.kv_bytes_per_1k_tokens,
                "and for recent ones": size.kv_fixed_bytes,
            }
            for name, size in (("before", before), (_attention_name(attention), after))
        )
    _remark(
        f"{output}: {after.nbytes / 1e6:,.2f} MB, {after.bits_per_weight:.2f} bits a weight over the whole model "
        f"(before: {before.nbytes / 1e6:,.2f} MB, {before.bits_per_weight:.2f})",
        quiet,
    )


def _attention(kv: str | None, qk: str | None, logits: int | None, window: int | None) -> AttentionScheme:
    from .quantize import AttentionScheme, parse_kv

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
    from .quantize.mixed import CANDIDATES, plan

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


def _draw_plan(plan: Mapping[str, Any], path: Path, quiet: bool) -> None:
    from .evaluate import plot_plan

    try:
        plot_plan(plan, path)
    except MissingDependency as error:
        _remark(f"no plot: {error}", quiet)


@app.command(
    epilog=_example(
        "diffbit export out/demo/diff_v1-int4 -o out/diff-onnx",
        "diffbit export examples/bitnet/softmax_ternary -o out/bitnet-hf --format hf-bitnet",
    )
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
    dtype: Annotated[str, typer.Option(help="fp32 or fp16: of what is not quantized, a float KV cache too.")] = "fp32",
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
    from .export import export_artifact, export_bitnet, readable_by_others

    set_quiet(quiet)
    if format not in ("artifact", "hf-bitnet"):
        raise DiffbitError(f"format {format!r} is unknown; choose artifact or hf-bitnet")
    if format == "hf-bitnet":
        if (dtype, context_length, ternary_storage) != ("fp32", None, "2bit"):
            raise DiffbitError(
                "--dtype, --context-length and --ternary-storage are an artifact's; a bitnet folder keeps what its "
                "checkpoint has"
            )
        export_bitnet(checkpoint, output, tokenizer=tokenizer, overwrite=overwrite)
        sizes = {file.name: {"bytes": file.stat().st_size} for file in sorted(output.iterdir())}
        if as_json:
            _print_json({"output": str(output), "files": sizes})
        else:
            _print_table({"file": name, **entry} for name, entry in sizes.items())
        return
    export_artifact(
        checkpoint,
        output,
        dtype=dtype,
        context_length=context_length,
        tokenizer=tokenizer,
        ternary_storage=ternary_storage,
        overwrite=overwrite,
    )
    manifest = read_json(output / "diffbit.json")
    if not readable_by_others(buffer["name"] for buffer in manifest["cache"]["buffers"]):
        _remark(
            f"{output}: a low-bit KV cache, which diffbit runs, and a loader that feeds the buffers listed in "
            "diffbit.json; onnxruntime-genai and optimum feed keys and values only",
            quiet,
        )
    if as_json:
        _print_json({"output": str(output), **manifest})
        return
    _print_table({"file": name, "bytes": entry["bytes"]} for name, entry in manifest["files"].items())
    _print_table(_part_rows(manifest["parts"]), title="what they are made of")


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


@app.command(
    epilog=_example(
        'diffbit run out/demo/diff_v1-onnx "def main(" --temperature 0.8 --seed 1',
        'diffbit run examples/nano/diff_v1 "def __init__(self"',
    )
)
def run(
    artifact: Annotated[Path, typer.Argument(help="Folder made by `diffbit export`, or a checkpoint (needs torch).")],
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - or nothing reads it from stdin.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token; higher is more varied.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k most likely tokens; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens that together weigh this much.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes tokens seen before less likely.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the generation; may be repeated.")] = None,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Ask for prompts until Ctrl-D.")] = False,
    threads: Threads = None,
    device: Device = "cpu",
    no_native: NoNative = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a prompt with an artifact on ONNX Runtime; needs no torch. The text goes to stdout, speed to stderr."""
    from .runtime import Sampler, Session, Tokenizer, generate

    set_quiet(quiet)
    if interactive and (prompt is not None or as_json):
        raise DiffbitError("--interactive asks for its prompts itself and prints text; leave out the prompt and --json")
    if sys.stdin is None and (interactive or prompt in (None, "-")):
        raise DiffbitError("the prompt is to come from stdin, which is closed; pass it as an argument")
    sampler = Sampler(temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty, seed=seed)
    with _as_artifacts([artifact], quiet) as (opened,):
        session = Session(opened, device, threads, not no_native)
        tokenizer = Tokenizer(session.artifact.file("tokenizer.json"))
        if not (session.native or no_native):
            what = ("native library", "a C++ compiler") if device == "cpu" else ("kernels for GPUs", "nvcc")
            _remark(f"no {what[0]} in this installation (it was made without {what[1]}): slower", quiet)

        def answer(text: str) -> None:
            def show(piece: str) -> None:
                print(piece, end="", flush=True)

            result = generate(
                session, tokenizer, text, max_tokens=max_tokens, sampler=sampler, stop=stop or [],
                on_text=None if as_json else show,
            )  # fmt: skip
            if as_json:
                _print_json({"prompt": text, **vars(result)})
            else:
                print()
            speed = f", {result.tokens_per_s:.1f} tokens/s" if result.tokens_per_s else ""
            first = 1000 * result.time_to_first_token_s
            _remark(
                f"{result.prompt_tokens} prompt tokens, first token after {first:.0f} ms; "
                f"{len(result.token_ids)} tokens{speed}; ended by {result.finish_reason}",
                quiet,
            )

        if not interactive:
            answer(sys.stdin.read() if prompt in (None, "-") else str(prompt))
            return
        _remark(f"{session.artifact.name}: type a prompt and press return; end of input (Ctrl-D) leaves", quiet)
        while True:
            try:
                text = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return
            try:
                answer(text)
            except DiffbitError as error:  # this prompt's fault; the next may do
                _remark(f"error: {error}", quiet=False)


def _check_rows(verification: Verification) -> list[dict[str, str]]:
    return [
        {"check": check.name, "result": "ok" if check.passed else "FAILED", "detail": check.detail}
        for check in verification.checks
    ]


def _verify_against(
    artifact: Path,
    checkpoint: Path,
    data: str,
    field: str,
    max_windows: int,
    length: int | None,
    device: str,
    threads: int | None,
    native: bool,
    tokens: int,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The artifact's logits over text, and the greedy tokens that follow it, against those of torch."""
    from .calib_data import eval_windows
    from .export import compare_greedy_tokens, compare_with_checkpoint
    from .runtime import Session

    session = Session(artifact, device, threads, native)

    def logits_of(ids: NDArray[np.int64], mask: NDArray[np.bool_]) -> NDArray[np.float32]:
        session.reset()
        return session.prefill(ids, mask, all_positions=True)

    if length is None:
        length = min(session.capacity, 512)

    def logits_after(ids: list[int], new: bool) -> NDArray[np.float32]:
        if new:
            session.reset()
        return session.prefill([ids])[0]

    text = eval_windows(data, artifact, length, max_windows, field=field)
    tolerance = session.artifact.golden.tolerance
    logits = compare_with_checkpoint(logits_of, checkpoint, text, tolerance=tolerance)
    if not tokens:
        return logits, None
    capacity = session.capacity
    return logits, compare_greedy_tokens(
        logits_after, checkpoint, text, tokens=tokens, capacity=capacity, tolerance=tolerance
    )


@app.command(
    epilog=_example(
        "diffbit verify out/demo/diff_v1-onnx --checkpoint out/demo/diff_v1-int4",
        "diffbit verify out/demo/diff_v1-onnx --checkpoint out/demo/diff_v1-int4 --max-windows 20 --tokens 200",
    )
)
def verify(
    artifact: Annotated[Path, typer.Argument(help="Folder made by `diffbit export`.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Also compare the logits over text with this checkpoint's, in torch.")
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --checkpoint: also generate so many tokens with both, greedily, after the beginning of each "
            "window, and tell where they part.",
        ),
    ] = 0,
    data: Data = "stdlib",
    field: Field = "text",
    max_windows: MaxWindows = 8,
    length: Length = None,
    threads: Threads = None,
    device: Device = "cpu",
    no_native: NoNative = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check an artifact on this device: its files' hashes and the golden prompt's logits. Exit code 2 if it fails."""
    from .runtime import verify as verify_artifact

    set_quiet(quiet)
    if tokens and checkpoint is None:
        raise DiffbitError("--tokens compares with a checkpoint's tokens; pass one with --checkpoint")
    result = verify_artifact(artifact, device, threads, not no_native)
    rows = _check_rows(result)
    report: dict[str, Any] = {"artifact": str(artifact), "device": device, "native": result.native}
    report |= {"passed": result.passed, "checks": rows}
    if checkpoint is not None and result.passed:
        report["checkpoint"], greedy = _verify_against(
            artifact, checkpoint, data, field, max_windows, length, device, threads, not no_native, tokens
        )
        report["passed"] = report["checkpoint"]["passed"]
        if greedy is not None:
            report["greedy"] = greedy
            report["passed"] &= greedy["passed"]
    if as_json:
        _print_json(report)
    else:
        _print_table(rows, title=f"{artifact} on {device}, {'native kernels' if result.native else 'portable bodies'}")
        if "checkpoint" in report:
            _print_table([report["checkpoint"]], title=f"against {checkpoint}")
        if "greedy" in report:
            differences = report["greedy"].pop("differences")
            _print_table([report["greedy"]], title="greedy tokens")
            if differences:
                _print_table(differences, title="where they part")
    if not report["passed"]:
        failed = [f"{check.name}: {check.detail}" for check in result.failures]
        raise DiffbitError("; ".join(failed) or f"{artifact}: does not compute what {checkpoint} does; see above")


@app.command(
    epilog=_example(
        "diffbit bench out/demo/diff_v1-onnx --prompt-tokens 64 --new-tokens 32 --threads 2",
        "diffbit bench out/demo/diff_v1-onnx --memory 512MB",
    )
)
def bench(
    artifacts: Annotated[
        list[Path], typer.Argument(help="Folders made by `diffbit export`, or checkpoints (needs torch).")
    ],
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt (prefill).")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate (decode).")] = 64,
    repeats: Annotated[int, typer.Option(help="Runs of which the median is taken.")] = 5,
    memory: Annotated[
        str | None,
        typer.Option(
            help="As in 4GB: also the longest context whose KV cache fits in that beside the model's files, whatever "
            "context the artifact was exported for."
        ),
    ] = None,
    threads: Threads = None,
    device: Device = "cpu",
    no_native: NoNative = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Prefill and decode speed, peak memory and size of artifacts, each measured in a process of its own."""
    from .progress import track
    from .runtime import bench as bench_artifact

    set_quiet(quiet)
    room = None if memory is None else parse_size(memory)
    with _as_artifacts(artifacts, quiet) as opened:
        rows = [
            bench_artifact(artifact, prompt_tokens, new_tokens, repeats, threads, device, not no_native, room)
            | {"artifact": str(path)}
            for path, artifact in zip(artifacts, track(opened, "measuring"), strict=True)
        ]
    if as_json:
        _print_json(rows)
        return
    # an artifact a column: there are more figures than artifacts
    columns = [(f"{path}/", row) for path, row in zip(artifacts, rows, strict=True)]
    figures = [name for name in rows[0] if name != "artifact"]
    _print_table({"figure": name.replace("_", " ")} | {label: row[name] for label, row in columns} for name in figures)


@app.command(epilog=_example("diffbit outliers out/demo/diff_v1 out/demo/softmax --plot out/outliers.svg"))
def outliers(
    models: Annotated[list[Path], typer.Argument(help="Checkpoints, quantized or not, shown side by side.")],
    data: Data = "stdlib",
    field: Field = "text",
    max_windows: MaxWindows = 32,
    length: Length = None,
    layers: Annotated[bool, typer.Option("--layers", help="Also a row for each layer.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a plot per layer to this .svg or .png file.")] = None,
    device: TorchDevice = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The largest attention logits and hidden states of models, as in Table 5 of arXiv 2410.05258."""
    from .quantize.outliers import rows

    set_quiet(quiet)
    reports = _measure_outliers(models, _windows(models[0], data, field, max_windows, length), device)
    if plot is not None:
        from .evaluate import plot_outliers

        plot_outliers([report.to_dict() for report in reports], plot)
    if as_json:
        _print_json([report.to_dict() for report in reports])
        return
    _print_table(rows(reports))
    if layers:
        _print_table(row for report in reports for row in report.layer_rows())


@app.command(
    epilog=_example(
        "diffbit compare out/demo/diff_v1 out/demo/softmax --bits 16,8,4,3,2 -o out/comparison",
        "diffbit compare out/demo/diff_v1 --what weights --bits 16,int4_g32,nf4 --max-windows 16",
        "diffbit compare examples/nano/diff_v1 --what weights --bits 16,4,3 --method rtn,gptq --max-windows 16",
        "diffbit compare examples/nano_1k/diff_v1 --what kv,qk --bits 16,8,4,2 --retrieval 6:2:256 --rows 16",
    )
)
def compare(
    models: Annotated[
        list[Path],
        typer.Argument(
            help="Checkpoints with the same tokenizer: float ones at all widths, quantized ones as they are."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for report.html, the plots, .json and .csv.")
    ] = None,
    bits: Annotated[str, typer.Option(help="Widths and formats, as in 16,8,6,4,3,2,ternary,int4_g32,nf4.")] = ",".join(
        ("16", "8", "6", "4", "3", "2", "ternary")
    ),
    what: Annotated[
        str, typer.Option(help="What is rounded, by commas: weights, logits, qk, kv, keys, values.")
    ] = "weights,logits",
    method: Annotated[
        str, typer.Option(help="How weights are rounded: recipes as `diffbit quantize --method` takes them, by commas.")
    ] = "rtn",
    calibrate: Annotated[
        str, typer.Option(help="Text for methods that calibrate: 'stdlib', a file, a folder, hf:NAME.")
    ] = "stdlib",
    data: Data = "stdlib",
    field: Field = "text",
    max_windows: MaxWindows = 64,
    length: Length = None,
    retrieval: Annotated[
        str | None,
        typer.Option(help="Also count needles found in text: NEEDLES:QUERIES[:LENGTH], by commas, as in 1:1,6:2:512."),
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows of needles for each entry of --retrieval.")] = 64,
    batch_size: Annotated[int, typer.Option(help="Windows in a batch.")] = 8,
    artifact: Annotated[
        list[Path] | None,
        typer.Option(help="Artifacts to size, verify, time and sample in the report; may be repeated."),
    ] = None,
    quantized: Annotated[
        list[Path] | None,
        typer.Option(
            help="Quantized checkpoints whose layer errors the report shows, and runs of train --qat, with their "
            "weights and how they moved; may be repeated."
        ),
    ] = None,
    prompt: Annotated[str, typer.Option(help="What the artifacts' samples continue.")] = "def __init__(self",
    device: TorchDevice = "auto",
    seed: Seed = 1,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Accuracy against bit-width: perplexity, KL and top-1 agreement with 95 % intervals, paired on the same text.

    Of attention: logits, at any bits; qk, products of integers, 8 or 4; kv, the cache, 8, 4 or 2 (keys, values: one of
    the two). With --retrieval, also how many key-value needles in text are found.
    """
    from .evaluate import ReportData, is_run, plot_comparison, plot_outliers, read_run, versions, write_report
    from .evaluate import compare as compare_models
    from .quantize import parse_recipe
    from .runtime import Artifact

    set_quiet(quiet)
    if output is None and (artifact or quantized):
        raise DiffbitError("--artifact and --quantized go into the report; name a folder for it with -o")
    if output is not None and output.is_file():
        raise DiffbitError(f"{output}: is a file, but a folder is to be written there; choose another name")
    for path in artifact or ():  # better refused now than after the comparison
        Artifact.open(path)
    runs = {path.resolve().name: read_run(path) for path in quantized or () if is_run(path)}
    reported = [path for path in quantized or () if not is_run(path)]
    layer_errors = {path.name: _part(path / LAYER_ERRORS, "weights", list) for path in reported}
    training = {model.resolve().name: found for model in models if (found := _training(model))}
    windows = _windows(models[0], data, field, max_windows, length)
    needles = _needles(models, retrieval, data, field, rows, seed)
    methods = method.split(",")
    calibration = None
    if "weights" in what.split(",") and any(parse_recipe(name).calibrated for name in methods):
        calibration = _windows(models[0], calibrate, field, CALIBRATION_WINDOWS, None, split="calib")
    comparison = compare_models(
        models,
        windows,
        bits.split(","),
        what.split(","),
        methods,
        calibration=calibration,
        batch_size=batch_size,
        device=_torch_device(device),
        needles=needles,
    )
    if output is not None:
        parts = [_inspect(path, prompt, seed) for path in artifact or ()]
        report = ReportData(
            title="Accuracy against bit-width",
            comparison=comparison.to_dict(),
            outliers=[report.to_dict() for report in _measure_outliers(models, windows, device)],
            training=training,
            quantization=layer_errors,
            qat=runs,
            artifacts=[part["size"] for part in parts],
            bench=[part["bench"] for part in parts],
            verification=[part["verification"] for part in parts],
            samples=[part["sample"] for part in parts],
            commands=[shlex.join(["diffbit", *sys.argv[1:]])],
            versions=versions(),
        )
        comparison.write_json(output / "comparison.json")
        comparison.write_csv(output / "comparison.csv")
        if len(comparison.results) > len(models):  # models that came quantized have no variants to draw
            plot_comparison(report.comparison or {}, output / "comparison.svg")
        plot_outliers(report.outliers, output / "outliers.svg")
        write_report(report, output / "report.html")
    if as_json:
        _print_json(comparison.to_dict())
        return
    _print_table(comparison.rows())
    for refusal in comparison.refused:
        _remark(f"left out, {refusal.model} by {refusal.method}: {refusal.reason}", quiet)
    for contrast in comparison.contrasts:
        lost = contrast.difference
        by = "" if contrast.method == "none" or len(methods) == 1 else f" by {contrast.method}"
        verdict = "less than" if lost.high < 0 else "more than" if lost.low > 0 else "as much, within error, as"
        _remark(
            f"{contrast.what} at {contrast.format}{by}: {contrast.model} loses {verdict} {contrast.against} "
            f"({lost.value:+.4f} nats a token, 95 %: {lost.low:+.4f} to {lost.high:+.4f})"
            + "".join(
                f"; {asked['queries']} of {asked['needles']} needles: {100 * found.value:+.1f} points "
                f"({100 * found.low:+.1f} to {100 * found.high:+.1f})"
                for asked, found in zip(comparison.needles, contrast.retrieval, strict=True)
            ),
            quiet,
        )
    if output is not None:
        _remark(f"the report: {output / 'report.html'}", quiet)


def _inspect(path: Path, prompt: str, seed: int) -> dict[str, Any]:
    """What the report says of an artifact: size, speed, whether it verifies, and a sample of its text."""
    from .models import ModelConfig, num_parameters
    from .runtime import Artifact, Sampler, Session, Tokenizer, generate
    from .runtime import bench as bench_artifact
    from .runtime import verify as verify_artifact

    opened = Artifact.open(path)
    checked = verify_artifact(path)
    session = Session(opened)
    tokenizer = Tokenizer(opened.file("tokenizer.json"))
    sampler = Sampler(0.7, top_p=0.9, seed=seed)
    sample = generate(session, tokenizer, prompt, max_tokens=session.capacity // 2, sampler=sampler)
    half = max(1, min(session.capacity, 256) // 2)
    float_bytes = 2 * num_parameters(ModelConfig.from_dict(dict(opened.model)))
    scheme = opened.scheme or {}
    weights = scheme.get("weights", "none")
    formats = (opened.dtype if weights == "none" else weights, _attention_name(scheme.get("attention", {})))
    return {
        "size": {
            "name": path.resolve().name,
            "format": ", ".join(name for name in formats if name),
            "bytes": opened.nbytes,
            "source_bytes": float_bytes,
            "parts": [dict(part) for part in opened.parts],
        },
        "bench": {**bench_artifact(path, half, half, 3), "artifact": path.resolve().name},
        "verification": {
            "artifact": str(path),
            "device": "cpu",
            "passed": checked.passed,
            "checks": _check_rows(checked),
        },
        "sample": {
            "model": path.resolve().name,
            "prompt": prompt,
            "text": sample.text,
            "settings": f"temperature 0.7, top-p 0.9, seed {seed}",
        },
    }


def _attention_name(attention: Mapping[str, Any]) -> str:
    """Such as "keys int4, values int4"."""
    return ", ".join(f"{name} {attention[name]}" for name in ("keys", "values", "qk", "logits") if name in attention)


def _training(model: Path) -> dict[str, Any] | None:
    """How a model was trained, if it was trained here."""
    path = model / "training.json"
    if not path.is_file():
        return None
    run = _part(path, "result", dict)
    try:
        config, result = run["config"], run["result"]
        rows = config["steps"] * config["batch_size"] * config["accumulate"] * run["processes"]
        return {"tokens": rows * config["length"], "training_s": result["seconds"], "eval_loss": result["eval_loss"]}
    except (KeyError, TypeError) as error:
        raise DiffbitError(f"{path}: was changed after training ({error}); restore or remove it") from None


def _part(path: Path, key: str, kind: type) -> dict[str, Any]:
    """The JSON object in a file that diffbit wrote, which must hold `key`."""
    values = read_json(path)
    if not isinstance(values.get(key), kind):
        raise DiffbitError(f"{path}: holds no {key}; it was changed after it was written, make it again")
    return values
