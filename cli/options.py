"""Options that several commands share, their completions, and functions that parse their values."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from ..io.errors import DiffbitError
from ..io.fields import FieldError
from ..io.progress import set_quiet
from .output import remark

if TYPE_CHECKING:
    from ..calib_data import Windows
    from ..models import Checkpoint

# the formats to choose from first, and when to use each (docs/accuracy.md)
FORMATS = {
    "int8_g32": "hardly any loss",
    "int8": "8 bits with one scale per row: the default of embedding and head",
    "tcq6_g32_s8": "the least loss in 6 bits; all tcq formats are for weights with a multiple of 64 rows",
    "tcq5_g32_s8": "the least loss in 5 bits",
    "tcq4_g32_s8": "the least loss in 4 bits; its products take about twice the time of int4_g32's",
    "int6_g32_s8": "6 bits that are quickly rounded; --fast uses it for all layers",
    "int5_g32_s8": "5 bits, for weights of any shape",
    "nl4_g32_s8": "4 bits, for weights of any shape",
    "int4_g32": "4 bits for programs that read GPTQ or compressed-tensors, too (diffbit export --format)",
    "tcq3_g32_s8": "the least loss in 3 bits",
    "tcq2_g32_s8": "the least loss in 2 bits; the model has to be measured",
    "ternary": "only for models that were trained with it",
    "nvfp4": "4-bit floats of other programs; a CPU multiplies them as 8-bit integers",
}

ArtifactPath = Annotated[
    Path, typer.Argument(help="Folder written by `diffbit export`, or a checkpoint (needs torch).")
]
ArtifactPaths = Annotated[
    list[Path], typer.Argument(help="Folders written by `diffbit export`, or checkpoints (needs torch).")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", callback=set_quiet, help="Print only the result: no progress bar, no remarks."),
]


def think_of(think: str | None) -> bool | None:
    """Return the value of --think."""
    return None if think is None else think == "on"


def _seed(value: int) -> int:
    if not 0 <= value < 2**63:
        raise DiffbitError(f"seed is {value}, wanted 0 or more, below 2**63")
    return value


Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output folder, which stays until the new one is complete.")
]
Think = Annotated[
    Literal["on", "off"] | None,
    typer.Option("--think", help="Whether a model that can do both thinks before it answers; default: the model's."),
]
AllowLoops = Annotated[
    bool,
    typer.Option("--allow-loops", help="Go on with a text that repeats the same words again and again; else it ends."),
]
JsonSchema = Annotated[
    Path | None,
    typer.Option("--json-schema", metavar="FILE", help="Answer with JSON of the schema in this file."),
]
Seed = Annotated[int, typer.Option("--seed", callback=_seed, help="Random seed.")]
Adapter = Annotated[
    Path | None,
    typer.Option(
        "--adapter",
        metavar="FOLDER",
        help="LoRA adapter of the model, a folder in PEFT's layout (adapter_config.json and "
        "adapter_model.safetensors). It is merged into the weights.",
    ),
]
TorchDevice = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Device for torch; auto: cuda if it is available.")
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="TEXT",
        help="Text: mix (prose, languages, dialogues, code), stdlib (the Python standard library), a file or folder as "
        "PATH[:FIELD], or a Hugging Face dataset as hf:NAME[:CONFIG][:SPLIT][:FIELD]. Several texts: each with its "
        "weight, as in a.jsonl=3,stdlib=1.",
    ),
]
Field = Annotated[
    str,
    typer.Option(
        "--field",
        help="Field of .jsonl rows, column of .parquet files: text, or conversations (lists of role and content), "
        "which are rendered with the model's chat template.",
    ),
]
MaxWindows = Annotated[int, typer.Option("--max-windows", help="Maximum number of windows of text.")]
Length = Annotated[
    int | None, typer.Option("--length", help="Tokens per window; default: the model's context, at most 512.")
]


def with_settings(
    kind: type, parameter: str, of_model: bool = False, without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a command: replaces its parameter, of a dataclass of options, by an option for each field, whose
    help is in the field's metadata (settings.py) or annotation (scheme_options.py).

    of_model: the command gets a dictionary of what was given; the model has settings for the rest. without: fields that
    keep their defaults.
    """
    fields = [field for field in dataclasses.fields(kind) if field.name not in without]
    options = {field.metadata.get("flag", field.name): field for field in fields}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)

        def run(**values: Any) -> None:
            settings = {options[name].name: _read(options[name], values.pop(name)) for name in options}
            settings = {name: value for name, value in settings.items() if value is not None}
            try:
                chosen = kind(**settings)
            except FieldError as error:  # its sentence begins with the field
                option = error.place.replace("_", "-")
                raise DiffbitError(f"--{option}{str(error).removeprefix(error.place)}") from None
            command(**values, **{parameter: settings if of_model else chosen})

        parameters: list[inspect.Parameter] = []
        for entry in signature.parameters.values():
            added = [_parameter(name, option, kind, of_model) for name, option in options.items()]
            parameters += added if entry.name == parameter else [entry]
        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {entry.name: entry.annotation for entry in parameters}
        return run

    return decorate


def _parameter(name: str, option: dataclasses.Field[Any], owner: type, of_model: bool) -> inspect.Parameter:
    """Return the parameter for a field of the dataclass `owner`."""
    if "help" not in option.metadata:
        annotation = get_type_hints(owner, include_extras=True)[option.name]
        return inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=option.default, annotation=annotation
        )
    kind: Any = type(option.default) if option.default not in (dataclasses.MISSING, None) else int
    default, metavar = option.default, None
    if "flag" in option.metadata:
        default = not option.default
    complete = completion(lambda: option.metadata["complete"]) if "complete" in option.metadata else None
    if option.name == "logit_bias":
        kind, default, metavar = list[str], None, "ID=BIAS"
    shown: Any = Annotated[
        kind | None if of_model or default is None else kind,
        typer.Option(
            f"--{name.replace('_', '-')}", help=option.metadata["help"], metavar=metavar, autocompletion=complete
        ),
    ]
    initial = None if of_model else default
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=initial, annotation=shown)


def _read(option: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value of the dataclass field that an option's value stands for."""
    if "flag" in option.metadata:
        return not value
    return _biases(value) if option.name == "logit_bias" and value is not None else value


def _biases(texts: Sequence[str]) -> dict[int, float]:
    """Read ID=BIAS, ..."""
    biases = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise DiffbitError(f"--logit-bias is {text!r}, wanted ID=BIAS, such as 42=-5") from None
    return biases


def completion(names: Callable[[], Iterable[str]], joined_by: str = " ") -> Callable[[str], list[str]]:
    """Complete one of `names()`, or the last of several joined by any of the characters in `joined_by`."""

    def complete(incomplete: str) -> list[str]:
        last = re.split(f"[{joined_by}]", incomplete)[-1]
        return [incomplete.removesuffix(last) + name for name in names() if name.startswith(last)]

    return complete


def of_formats(help: str) -> Any:
    """Return an option whose value is a number format."""
    return typer.Option(metavar="FORMAT", autocompletion=completion(lambda: (*FORMATS, "none")), help=help)


def read_windows(
    model: Path | Checkpoint,
    data: str,
    field: str,
    max_windows: int | None,
    length: int | None,
    split: Literal["eval", "calib"] = "eval",
) -> Windows:
    """Read windows of held-out text, encoded with the model's tokenizer and no longer than its context."""
    from ..calib_data import eval_windows
    from ..models import Checkpoint

    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint(model)
    length, path = window_length(checkpoint.path, checkpoint.config.max_position, length), checkpoint.tokenizer_path
    return eval_windows(data, path, length, max_windows, split=split, field=field, render=chat_template(path))


def window_length(model: Path, context: int, length: int | None) -> int:
    """Return the tokens of a window of text for a model; length: as given with --length."""
    if length is not None and length > context:
        raise DiffbitError(f"--length is {length} tokens, but the context of {model} is {context}")
    return min(context, 512) if length is None else length


def chat_template(model: Path) -> Callable[[Any], str]:
    """Return a function that renders a conversation in the model's chat template, which it reads when it is first
    called; without a template, as plain text.

    If the template cannot be read or refuses a conversation, that conversation and all later ones become plain text,
    and a remark says so.
    """
    from ..calib_data.mix import plain
    from ..io.tokenizer_files import tokenizer_files
    from ..runtime.template import ChatTemplate, NoTemplate

    @cache
    def of_model() -> Callable[[Any], str]:
        with TemporaryDirectory() as folder:  # a GGUF file holds its template, which is written here
            for name, data in tokenizer_files(model).items():
                Path(folder, name).write_bytes(data)
            try:
                return partial(ChatTemplate.read(folder).render, add_generation_prompt=False)
            except NoTemplate:
                return plain
            except DiffbitError as error:
                raise DiffbitError(str(error).replace(f"{Path(folder)}{os.sep}", "")) from None

    refused = False

    def render(messages: Any) -> str:
        nonlocal refused
        try:
            return plain(messages) if refused else of_model()(messages)
        except DiffbitError as error:
            refused = True
            remark(f"{model}: conversations are read as plain text, not in the model's chat template ({error})")
            return plain(messages)

    return render


def torch_device(name: str) -> str:
    """Resolve auto to cpu or cuda."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise DiffbitError("--device cuda: torch finds no CUDA device; use --device cpu")
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
