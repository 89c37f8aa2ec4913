"""diffbit web: a static page that runs an artifact in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...cli import ArtifactPath, Json, Overwrite, Quiet, as_artifacts, print_json, print_table, remark

EXAMPLES = {"web": ("diffbit web out/demo/diff_v1-onnx -o out/site", "python -m http.server -d out/site")}


def web(
    artifact: ArtifactPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the site.")],
    packages: Annotated[
        Path | None,
        typer.Option(help="A node_modules folder with the page's libraries; default: npm gets them.", metavar="FOLDER"),
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="License of the model, such as apache-2.0, for the page to show.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a static site that runs a model in the browser. Any web server can serve it; it loads nothing else.

    The page uses WebGPU if the browser has it, else WebAssembly. A
    checkpoint is exported for WebGPU first (`diffbit export --target webgpu`); that artifact runs on both.
    The page checks the files' hashes and keeps them in the browser; a download that was interrupted goes on.
    """
    from .build import MODULE
    from .site import write_site

    with as_artifacts([artifact], "webgpu") as (path,):
        sizes = write_site(path, output, packages=packages, license=license, overwrite=overwrite)
    if as_json:
        print_json({"output": str(output), "files": {name: {"bytes": size} for name, size in sizes.items()}})
    else:
        print_table({"file": name, "bytes": size} for name, size in sizes.items())
    if not MODULE.is_file():
        remark(
            "the page has no kernels for WebAssembly, and low-bit weights are slow there without; in a clone: make wasm"
        )
    remark(f"serve it with: python -m http.server -d {output}")
