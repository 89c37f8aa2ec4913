"""The command line: each command parses its options, calls the library and prints the result.

Results go to stdout (tables, or JSON with --json), progress and remarks to stderr. Exit codes: 0 success, 2 bad input
(or an artifact that fails `verify`), 130 interrupted, 143 terminated. A command imports the library only when it runs,
so `diffbit run` needs no torch. Commands of apps live with them (apps/NAME/command.py) and use the names below.

    app.py      the application, its commands, and `main`
    options.py  options that several commands share, and the functions that read their values
    scheme_options.py   those that say how to quantize; apps import them from there
    artifacts.py   checkpoints in the place of artifacts
    output.py   tables, JSON, remarks, errors
    quantize.py, run.py, ...  one command each, with its EXAMPLES
"""

from .artifacts import AUTO, Quantize, as_artifacts
from .options import (
    Adapter,
    AllowLoops,
    ArtifactPath,
    ArtifactPaths,
    Data,
    Field,
    Json,
    JsonSchema,
    Length,
    MaxWindows,
    Overwrite,
    Quiet,
    Seed,
    Think,
    TorchDevice,
    chat_template,
    completion,
    of_formats,
    read_windows,
    think_of,
    torch_device,
    with_settings,
)
from .output import json_of, print_error, print_json, print_table, remark

__all__ = [
    "AUTO", "Adapter", "AllowLoops", "ArtifactPath", "ArtifactPaths", "Data", "Field", "Json", "JsonSchema", "Length",
    "MaxWindows", "Overwrite", "Quantize", "Quiet", "Seed", "Think", "TorchDevice", "as_artifacts", "chat_template",
    "completion", "json_of", "of_formats", "print_error", "print_json", "print_table", "read_windows", "remark",
    "think_of", "torch_device", "with_settings",
]  # fmt: skip
