"""Quantizes a model as well as it can without being told how: the formats, the method and the text that are not given
are chosen here, and the result is measured.

    formats   those that keep each weight, if the model was trained in one or two bits (quantize/on_grid.py). Else a mix
              of 5 bits per weight on average, a format for each layer (quantize/allocation); int4_g32 if the float
              model does not fit in memory with its gradients; int6_g32_s8 with --fast, because rounding to nearest
              loses much at 4 bits, and at 5 it takes a model of 135 million parameters its answers
    method    guided; gptq if the float model does not fit in memory; rtn for 8 bits and more, where methods differ
              little, for a model without a tokenizer, which cannot read text, and where each weight is kept
    text      mix: prose, twelve languages, dialogues and code
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..io.errors import DiffbitError
from ..io.files import parse_size, size_text
from ..io.processes import Processes, processes
from ..io.resources import available_memory
from .options import read_windows, window_length
from .output import remark
from .scheme_options import AUTO, MethodOptions, SchemeOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..calib_data import Windows
    from ..export.check import LogitsFunction
    from ..formats import Format
    from ..models import Checkpoint
    from ..quantize import Report, Scheme

__all__ = ["QuantizedModel", "quantize_model", "resolve_method", "summary", "values"]

BITS = 5.0  # per weight, of a mix
UNIFORM, FAST = "int4_g32", "int6_g32_s8"  # without a mix
TEXT = "mix"
PLAIN_BITS = 8  # from which on rounding to nearest suffices
ESTIMATE = (16, 256)  # windows of text for the choice of formats, and their length
WORTH_SAYING = 5  # seconds
HELD_OUT = (8, 256)  # the same for measuring the result


@dataclass(frozen=True)
class Quality:
    """How close a quantized model is to its float model, on text that it was not calibrated on.

    kl: KL(float || quantized) in nats per token. same_tokens: the share of positions at which both have the same most
    likely next token. tokens: the number of positions.
    """

    kl: float
    same_tokens: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"{self.same_tokens:.0%} of the most likely tokens are those of the float model, KL {self.kl:.3f} nats per "
            f"token ({self.tokens:,} tokens)"
        )


@dataclass(frozen=True, repr=False)
class QuantizedModel:
    """The report of a quantized checkpoint, how close it is to the float model (None: not measured), and the seconds
    that it took."""

    report: Report
    quality: Quality | None
    seconds: float

    def __repr__(self) -> str:
        return "\n".join(filter(None, (repr(self.report), str(self.quality or ""), f"in {_duration(self.seconds)}")))


def quantize_model(
    model: str | Path,
    output: str | Path,
    options: SchemeOptions = SchemeOptions(),  # noqa: B008 (frozen)
    rounding: MethodOptions = MethodOptions(),  # noqa: B008 (frozen)
    *,
    adapter: str | Path | None = None,
    bits: float | None = None,
    size: str | None = None,
    fast: bool = False,
    measure: bool = True,
    device: str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    max_memory: str | None = None,
) -> QuantizedModel:
    """Quantize a checkpoint into a new folder as `diffbit quantize` does: choose what the options leave open, and
    measure the result.

        quantize_model("MODEL", "out/low", bits=4.5).quality

    model: a folder or a GGUF file.
    adapter: the folder of a LoRA adapter of the model, which is merged into it.
    bits, size: the average bits per weight, or the size of the artifact, within which each layer gets its format.
    fast: round in one pass over the text. measure: compare the result with the float model on held-out text.
    """
    from ..models import Checkpoint
    from ..quantize.checkpoint import open_float, quantize_checkpoint
    from ..quantize.methods import parse_recipe
    from ..quantize.on_grid import grids as find_grids

    start = time.monotonic()
    workers = processes(device)
    # refuses before work begins
    checkpoint = open_float(Checkpoint(model, adapter), output if workers.first else None, overwrite)
    limit = None if max_memory is None else parse_size(max_memory)
    if fast:
        rounding = _fast(rounding, checkpoint)
    grids = workers.on_first(partial(find_grids, checkpoint))
    if options == SchemeOptions() and bits is None and size is None:
        if grids and rounding.method in (AUTO, "rtn"):
            options = _keeping(checkpoint, grids)
        elif fast or not can_mix(checkpoint, limit):
            options = replace(options, weights=FAST if fast else UNIFORM)
        else:
            bits = BITS
    is_mix = bits is not None or size is not None
    if is_mix and (options.weights is not None or options.scheme_file is not None):
        given = "--weights" if options.weights is not None else "--scheme"
        raise DiffbitError(
            f"{given} and {'--bits' if size is None else '--size'} both choose formats; pass one of them"
        )
    scheme = options.scheme(weights_later=is_mix)
    method = resolve_method(checkpoint, scheme, rounding, limit, is_mix, grids)
    if workers.first:
        _say_what_is_lost(checkpoint, grids, scheme, None if is_mix else method)
    recipe = parse_recipe(method)
    about = f"{_formats(scheme, bits, size)}, method {method}"
    if recipe.calibrated or rounding.calibrate is not None:
        about += f", calibrated on {rounding.calibrate or 'mix (prose, twelve languages, dialogues and code)'}"
    _announce(checkpoint, about, method, rounding, is_mix, workers)
    if is_mix:
        tables = options.embedding is None and options.head is None
        scheme = workers.on_first(partial(_allocated, checkpoint, method, rounding, scheme, bits, size, tables, device))
    text = workers.on_first(partial(rounding.text, checkpoint, method if recipe.calibrated else None))
    report = quantize_checkpoint(
        checkpoint, output, scheme, method=method, **calibration(text), overwrite=overwrite, resume=resume,
        max_memory=limit, workers=workers,
    )  # fmt: skip
    quality = _measured(output, checkpoint, limit) if measure and workers.first and report.weights else None
    return QuantizedModel(report, quality, time.monotonic() - start)


def calibration(text: Windows | None) -> dict[str, Any]:
    """Return the arguments of `quantize_checkpoint` for a text."""
    if text is None:
        return {}
    about = {"source": text.source, "sha256": text.sha256}
    return {"calibration": text.ids, "calibration_mask": text.mask, "calibration_text": about}


def resolve_method(
    checkpoint: Checkpoint,
    scheme: Scheme,
    rounding: MethodOptions,
    max_memory: int | None = None,
    is_mix: bool = False,
    grids: Mapping[str, Format] = MappingProxyType({}),
) -> str:
    """Return the method to use: that of the options, or the best for the scheme that fits in memory.

    is_mix: the formats are chosen later. grids: the weights that a format keeps (quantize/on_grid.py).
    """
    from ..formats import parse_format
    from ..quantize import resolve
    from ..quantize.forecast import quantize_demand
    from ..quantize.methods import parse_recipe

    if rounding.method != AUTO:
        return rounding.method
    if is_mix:
        scheme = replace(scheme, weights=parse_format(UNIFORM))
    plan = resolve(checkpoint.config, scheme)
    changed = (format for name, format in plan.formats.items() if grids.get(name) != format)
    if scheme.activations == "int4" or not any(format.bits < PLAIN_BITS for format in changed):
        return "rtn"
    if not checkpoint.tokenizer_files:
        remark(f"{checkpoint.path}: has no tokenizer for calibration text, so the weights are rounded to nearest")
        return "rtn"
    free = available_memory() if max_memory is None else max_memory
    shape = text_shape(checkpoint, rounding)
    for method in ("guided", "gptq"):
        if free is None or quantize_demand(checkpoint, plan, parse_recipe(method), shape, True).memory < free:
            return method
    return "rtn"


def text_shape(checkpoint: Checkpoint, rounding: MethodOptions) -> tuple[int, int]:
    """Return the number of windows that calibration text has at most, and their length."""
    length = window_length(Path(checkpoint.path), checkpoint.config.max_position, rounding.length)
    return rounding.windows(True), length


def can_mix(checkpoint: Checkpoint, max_memory: int | None) -> bool:
    """Whether formats can be chosen for each layer: the model reads text, and fits in memory with its gradients."""
    from ..quantize.allocation import allocation_demand

    free = available_memory() if max_memory is None else max_memory
    if not checkpoint.tokenizer_files:
        return False
    return free is None or allocation_demand(checkpoint.config, *_short(checkpoint, ESTIMATE)) < free


def _keeping(checkpoint: Checkpoint, grids: Mapping[str, Format]) -> SchemeOptions:
    """Return options with the format of each weight on a grid. Layers that are on none get int8, as the tables do."""
    from ..quantize.scheme import EMBEDDING_MODULE, HEAD_MODULE, TABLE_FORMAT, TABLES, float_linears, linear_shapes

    floats = float_linears(checkpoint.config)
    layers = [name for name in linear_shapes(checkpoint.config) if name not in (*TABLES, *floats)]
    formats = {name: str(grids.get(name, TABLE_FORMAT)) for name in (*layers, *(floats & grids.keys()))}
    usual = Counter(formats.values()).most_common(1)[0][0]
    return SchemeOptions(
        weights=usual,
        embedding=str(grids.get(EMBEDDING_MODULE, TABLE_FORMAT)),
        head=str(grids.get(HEAD_MODULE, TABLE_FORMAT)),
        override=[f"{name}={format}" for name, format in formats.items() if format != usual or name in floats],
    )


def _say_what_is_lost(checkpoint: Checkpoint, grids: Mapping[str, Format], scheme: Scheme, method: str | None) -> None:
    """Say that weights lie on a grid: what it keeps, or what the scheme's formats (method None: a mix of them) or the
    method change."""
    from ..quantize.on_grid import ROUNDING, loss_of
    from ..quantize.scheme import TABLES

    layers = [name for name in grids if name not in TABLES] or list(grids)
    if not layers:
        return
    grid = Counter(str(grids[name]) for name in layers).most_common(1)[0][0]
    name = next(name for name in layers if str(grids[name]) == grid)
    about = f"{checkpoint.path}: {len(layers)} weights have the values of {grid}, which rounding to nearest keeps"
    format = scheme.chosen(checkpoint.config).get(name)
    if method is None:
        remark(f"{about}; a mix of formats changes them: leave out --bits, --size and --method")
    elif format is not None and (lost := loss_of(checkpoint.read(f"{name}.weight"), format)) > ROUNDING:
        remark(f"{about}; {format} changes them by {lost:.1%}: leave out --weights and --scheme")
    elif format is not None and method != "rtn":
        remark(f"{about}; method {method} may change them: leave out --method")
    elif format is not None:
        remark(about)


def _fast(rounding: MethodOptions, checkpoint: Checkpoint) -> MethodOptions:
    if rounding.method not in (AUTO, "rtn"):
        raise DiffbitError(f"--fast rounds to nearest, and --method is {rounding.method}; leave out one of them")
    readable = rounding.calibrate is None and checkpoint.tokenizer_files
    return replace(rounding, method="rtn", calibrate=TEXT if readable else rounding.calibrate)


def _short(checkpoint: Checkpoint, shape: tuple[int, int]) -> tuple[int, int]:
    return shape[0], min(shape[1], checkpoint.config.max_position)


def _allocated(
    checkpoint: Checkpoint, method: str, rounding: MethodOptions, scheme: Scheme, bits: float | None, size: str | None,
    tables: bool, device: str,
) -> Scheme:  # fmt: skip
    """Return the scheme whose formats lose least within the budget."""
    from ..quantize.allocation import allocate
    from .options import torch_device

    windows, length = _short(checkpoint, ESTIMATE)
    shorter = replace(rounding, max_windows=windows, length=length, calibrate=rounding.calibrate or TEXT)
    text = shorter.text(checkpoint, None)
    assert text is not None
    return allocate(
        checkpoint, bits=bits, nbytes=None if size is None else parse_size(size), scheme=scheme, tables=tables,
        method=method, calibration=text.ids, calibration_mask=text.mask, device=torch_device(device),
    ).scheme  # fmt: skip


def _formats(scheme: Scheme, bits: float | None, size: str | None) -> str:
    if size is not None:
        return f"a mix of formats for an artifact of at most {size}"
    if bits is not None:
        return f"a mix of formats of {bits:g} bits per weight"
    return f"{scheme.weights or 'float'} weights"


def _announce(
    checkpoint: Checkpoint, about: str, method: str, rounding: MethodOptions, is_mix: bool, workers: Processes
) -> None:
    """Say what is about to be done, and how long it takes if that is more than a moment."""
    from ..models import num_parameters
    from ..quantize.forecast import operations_per_second, quantize_seconds
    from ..quantize.methods import parse_recipe

    if not workers.first:
        return
    recipe = parse_recipe(method)
    reads = recipe.calibrated or rounding.calibrate is not None
    seconds = quantize_seconds(checkpoint.config, recipe, text_shape(checkpoint, rounding) if reads else None)
    if is_mix:  # a pass forward and back, and gradients of weights
        tokens = ESTIMATE[0] * _short(checkpoint, ESTIMATE)[1]
        seconds += 20 * num_parameters(checkpoint.config) * tokens / operations_per_second()
    if seconds > WORTH_SAYING:
        remark(f"{checkpoint.path}: {about}; this takes about {_duration(seconds)}")


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def _measured(output: str | Path, checkpoint: Checkpoint, max_memory: int | None) -> Quality | None:
    """Compare the quantized model with the float one, if both fit in memory. Linear layers round their inputs as the
    artifact's operators do."""
    import torch

    from ..quantize import as_exported, load

    decoder = load(output).eval()
    as_exported(decoder)

    def logits(ids: NDArray[np.int64], mask: NDArray[np.bool_]) -> NDArray[np.float32]:
        with torch.inference_mode():
            values = decoder(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask).long())
        return values.numpy()

    return measure_quality(checkpoint, logits, HELD_OUT, max_memory)


def measure_quality(
    checkpoint: Checkpoint, logits_of: LogitsFunction, shape: tuple[int, int], max_memory: int | None = None
) -> Quality | None:
    """Compare a model's logits with those of its float checkpoint on held-out text; None without a tokenizer, or if
    the float model does not fit in memory.

    shape: windows of text, and their length.
    """
    from ..export import compare_with_checkpoint
    from ..models import num_parameters

    windows, length = _short(checkpoint, shape)
    needed, free = 5 * num_parameters(checkpoint.config), available_memory() if max_memory is None else max_memory
    if not checkpoint.tokenizer_files:
        return None
    if free is not None and needed > free:
        remark(
            f"the quality was not measured: the float model takes {size_text(needed)} of memory, {size_text(free)} are "
            "free"
        )
        return None
    text = read_windows(checkpoint, TEXT, "text", windows, length)
    result = compare_with_checkpoint(logits_of, checkpoint, text, tolerance=1)
    return Quality(result["kl"], result["top1_agreement"], result["tokens"])


def summary(done: QuantizedModel, output: Path) -> str:
    """Say in a sentence what a model takes now, and how close it is to the float model."""
    before, after = done.report.before, done.report.after
    size = (
        f"{output}: {after.nbytes / 1e6:,.2f} MB of weights on the device ({before.nbytes / 1e6:,.2f} MB in float32), "
        f"{after.bits_per_weight:.2f} bits per weight, in {_duration(done.seconds)}"
    )
    return size if done.quality is None else f"{size}; {done.quality}"


def values(done: QuantizedModel) -> Mapping[str, Any]:
    """Return the result as plain JSON."""
    quality = None if done.quality is None else vars(done.quality)
    return {**done.report.to_dict(), "quality": quality, "seconds": round(done.seconds, 1)}
