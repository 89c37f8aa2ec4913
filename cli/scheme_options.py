"""Options that say how to quantize, for every command that quantizes or plans to: each is declared once, here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..io import plugins
from ..io.errors import DiffbitError
from ..settings import CALIBRATION_WINDOWS
from .options import Field, Length, completion, of_formats, read_windows, window_length
from .output import remark

if TYPE_CHECKING:
    from ..calib_data import Windows
    from ..models import Checkpoint
    from ..quantize import AttentionScheme, Scheme

__all__ = ["MaxMemory", "MethodOptions", "Model", "SchemeOptions", "window_length"]

AUTO = "auto"  # the method is chosen (automatic.py)
MEASURING_WINDOWS = 16  # default for text that only measures errors
KV_FORMATS = ("fp16", "int8", "int4", "int3", "int2", "none")
# outside of the classes, whose annotations are evaluated without this file's names
COMPLETE_KV = completion(lambda: KV_FORMATS, ",")
COMPLETE_METHOD = completion(lambda: plugins.names("diffbit.quantize.methods"), "+")

Model = Annotated[
    Path, typer.Argument(help="Checkpoint: a folder (Hugging Face's or diffbit's; docs/models.md) or a GGUF file.")
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        "--max-memory",
        metavar="SIZE",
        help="Memory that the process may use, such as 4GB. Calibration states are moved to disk if necessary, and a "
        "run that cannot fit is refused. The result is bit-identical.",
    ),
]


@dataclass(frozen=True)
class SchemeOptions:
    """The format of each part of a model."""

    weights: Annotated[
        str | None,
        of_formats(
            "One format for the weights of all layers: int8_g32 (hardly a loss), int4_g32, nl3_g32_s8, ternary, ..., "
            "or none (float); see --list-formats."
        ),
    ] = None
    embedding: Annotated[
        str | None, of_formats("Format of the embedding; default: int8 if the weights are low-bit; none: float.")
    ] = None
    head: Annotated[
        str | None,
        of_formats(
            "Format of the head; default: int8 if the weights are low-bit; none: float. A tied table is stored once if "
            "both formats are the same."
        ),
    ] = None
    override: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB=FORMAT", help="Format for the modules whose names match GLOB; repeatable."),
    ] = None
    activations: Annotated[
        Literal["int8", "int4"] | None,
        typer.Option(help="Quantize activations too, with a scale per token; int4 needs ternary weights."),
    ] = None
    kv: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            autocompletion=COMPLETE_KV,
            help="KV cache format: fp16, int8, int4, int3, int2 or none (float), or one format each for keys and "
            "values: int8,int4.",
        ),
    ] = None
    qk: Annotated[
        Literal["int8", "int4", "none"] | None,
        typer.Option(
            help="Quantize queries too and multiply them with the keys as integers; keys get at most as many bits."
        ),
    ] = None
    kv_window: Annotated[
        int | None,
        typer.Option(
            help="Residual window: recent tokens that an int4, int3 or int2 cache keeps in float16; default: 32."
        ),
    ] = None
    kv_first: Annotated[
        int | None,
        typer.Option(help="First tokens that an int4, int3 or int2 cache keeps in float16, 0 to 16; default: 4."),
    ] = None
    states: Annotated[
        Literal["int8"] | None,
        typer.Option(help="Keep the states of recurrent layers (retention, Mamba, ...) in int8, a scale per row."),
    ] = None
    scheme_file: Annotated[
        Path | None, typer.Option("--scheme", help="Read the whole scheme from a .json or .toml file instead.")
    ] = None

    def scheme(self, *, weights_later: bool = False, cache_later: bool = False) -> Scheme:
        """Return the scheme of the file or of the options. weights_later, cache_later: the formats of the weights, or
        of the KV cache, are chosen afterwards.

        Raises DiffbitError if they contradict each other, or quantize nothing.
        """
        from ..formats import parse_format
        from ..quantize import Scheme, table_formats
        from ..quantize.scheme import parse_override

        if self.scheme_file is not None:
            if self != SchemeOptions(scheme_file=self.scheme_file):
                raise DiffbitError(
                    "--scheme reads the whole scheme from a file; leave out --weights, --embedding, --head, "
                    "--override, --activations, --kv, --qk, --kv-window, --kv-first and --states"
                )
            return Scheme.from_file(self.scheme_file)
        formats = (self.weights, self.embedding, self.head, self.kv, self.qk, self.states)
        is_later = weights_later or cache_later
        if all(format in (None, "none") for format in formats) and not self.override and not is_later:
            raise DiffbitError(
                "nothing to quantize: pass --weights FORMAT, --embedding, --head, --kv FORMAT, --qk FORMAT, --states "
                "FORMAT, --override or --scheme FILE"
            )
        weights = None if self.weights in (None, "none") else parse_format(self.weights)
        embedding, head = table_formats(weights_later or weights is not None, self.embedding, self.head, weights)
        return Scheme(
            weights=weights,
            embedding=embedding,
            head=head,
            activations=self.activations,
            attention=self._attention(cache_later),
            overrides=tuple(parse_override(text) for text in self.override or ()),
        ).check_offered()

    def _attention(self, cache_later: bool) -> AttentionScheme:
        from ..quantize import AttentionScheme
        from ..quantize.scheme import parse_kv

        if cache_later and self.kv is not None:
            raise DiffbitError(
                "--kv names the formats of the KV cache, and --kv-size chooses them; leave out one of them"
            )
        cache = parse_kv("none" if self.kv is None else self.kv)
        scheme = AttentionScheme(
            qk=None if self.qk == "none" else self.qk, keys=cache["keys"], values=cache["values"], states=self.states
        )
        counts = {"window": self.kv_window, "first": self.kv_first}
        changes: dict[str, Any] = {name: count for name, count in counts.items() if count is not None}
        if changes and not (scheme.has_window or cache_later):
            raise DiffbitError(
                f"--kv-{next(iter(changes))} is for an int4, int3 or int2 cache; pass --kv int4, int3 or int2, or "
                "leave it out"
            )
        return replace(scheme, **changes)


@dataclass(frozen=True)
class MethodOptions:
    """How weights are rounded, and the text that the method calibrates on."""

    method: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            autocompletion=COMPLETE_METHOD,
            help="Quantization method, or several joined by +: gptq, rotate+gptq, learned:50 (steps); see "
            "--list-methods. auto: the best that fits in memory (guided, else gptq; rtn for 8 bits and more).",
        ),
    ] = AUTO
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Calibration text, with the same values as --data of other commands; each layer's output error is "
            "also measured on it, and rtn weighs its scales with it. Default: mix if the method needs text, else none.",
        ),
    ] = None
    field: Field = "text"
    max_windows: Annotated[
        int | None,
        typer.Option(help="Maximum number of windows of text; default: 24, or 16 with a method that needs no text."),
    ] = None
    length: Length = None

    def windows(self, needed: bool) -> int:
        """Return the maximum number of windows of text; needed: it does not only measure errors."""
        return (CALIBRATION_WINDOWS if needed else MEASURING_WINDOWS) if self.max_windows is None else self.max_windows

    def text(self, model: Path | Checkpoint, needed_by: str | None) -> Windows | None:
        """Read the calibration text, if there is any; needed_by: what calibrates on it, None: nothing."""
        source = self.calibrate
        if source is None and needed_by is not None:
            source = "mix"
            if self.method != AUTO:
                remark(
                    f"{needed_by} is calibrated on mix (prose, twelve languages, dialogues and code); with "
                    "--calibrate, pass text similar to what the model will be used on"
                )
        if source is None:
            if self.max_windows is not None or self.length is not None:
                raise DiffbitError(
                    "--max-windows and --length describe calibration text, and this method reads none; pass "
                    "--calibrate TEXT, too"
                )
            return None
        count = self.windows(needed_by is not None)
        return read_windows(model, source, self.field, count, self.length, "calib")
