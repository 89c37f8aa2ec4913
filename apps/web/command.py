"""diffbit web: a static page that runs an artifact in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...cli import AUTO, ArtifactPath, Json, Overwrite, Quantize, Quiet, as_artifacts, print_json, print_table, remark
from ...io.errors import DiffbitError
from ...io.files import check_place

EXAMPLES = {
    "web": (
        "diffbit web out/demo/diff_v1-onnx -o out/site",
        "diffbit web hf:HuggingFaceTB/SmolLM2-135M-Instruct -o out/smollm2-site",
        "python -m http.server -d out/site",
    )
}


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
    slow: Annotated[
        bool,
        typer.Option(
            "--slow",
            help="Write the page even without kernels for WebAssembly; low-bit models then take seconds per token.",
        ),
    ] = False,
    quantize: Quantize = AUTO,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a static site that runs a model in the browser. Any web server can serve it; it loads nothing else.

    The page uses WebGPU if the browser has it, else WebAssembly, whose kernels are compiled before the first page is
    written (a few minutes, once). A model that is no artifact (a GGUF file, a Hugging Face folder or hf:ORG/NAME) is
    quantized and exported first, and kept for the next time: the page has the artifact that `diffbit chat` runs. The
    page checks the files' hashes and keeps them in the browser; a download that was interrupted goes on.
    """
    from . import build
    from .site import write_site

    if not slow:
        try:
            build.check()
        except DiffbitError as error:
            raise DiffbitError(f"{error}; --slow writes a page that takes seconds per token") from None
    check_place(output, overwrite=overwrite)
    with as_artifacts([artifact], "cpu", quantize) as (path,):
        if not slow:
            build.bring_up_to_date()
        sizes = write_site(path, output, packages=packages, license=license, slow=slow, overwrite=overwrite)
    if as_json:
        print_json({"output": str(output), "files": {name: {"bytes": size} for name, size in sizes.items()}})
    else:
        print_table({"file": name, "bytes": size} for name, size in sizes.items())
    remark(f"serve it with: python -m http.server -d {output}")
