"""diffbit show: one page that shows what attention does with a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ...cli import Json, Quiet, TorchDevice, print_json, print_table, remark, torch_device
from ...io import page
from ...io.errors import DiffbitError

EXAMPLES = {
    "show": (
        'diffbit show examples/pico/diff_v1 --prompt "def add(a, b): return a +" -o out/show.html',
        'diffbit show examples/pico/diff_v1 examples/pico/softmax --prompt "The items are items" --answer items '
        "-o out/show.html",
    ),
}

# fmt: off
Models = Annotated[list[Path], typer.Argument(
    help="Checkpoints. A float one is also shown rounded to 8, 4 and 2 bits, a quantized one only as it is stored."
)]
Prompt = Annotated[str, typer.Option("--prompt", "-p", help="Text that the models read, of at most 64 tokens.")]
Answer = Annotated[str | None, typer.Option(
    help="Part of the prompt; the page shows how much attention goes to it.", metavar="TEXT"
)]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="The page, one .html file that needs no network.")]
Layers = Annotated[str | None, typer.Option(
    metavar="N,N,...",
    help="Layers to show, counted from 0; default: all, or as many, evenly spread, as keep the page below 9 MB. If one "
    "layer is too large, its first heads are shown.",
)]
# fmt: on


def show(
    models: Models,
    prompt: Prompt,
    answer: Answer = None,
    output: Output = None,
    layers: Layers = None,
    device: TorchDevice = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a page that shows attention: each head's two maps, their difference, and what rounding does to them.

    It has the maps of every layer and head for one prompt, the next token's probabilities and the largest activations,
    in float and with the weights, the KV cache or the attention logits rounded to 8, 4 and 2 bits. Weights are rounded
    to nearest. Models run in torch; an artifact has no maps, so pass the checkpoint that it was made from.
    """
    from .document import document

    if output is None and not as_json:
        raise DiffbitError("there is nothing to write to; pass a file with -o, or --json")
    shown = document(models, prompt, answer, torch_device(device), None if layers is None else _numbers(layers))
    if output is not None:
        page.write(output, page_text(shown))
        remark(f"{output}: {output.stat().st_size / 1e6:.1f} MB; open it in a browser")
    if as_json:
        print_json(shown)
    else:
        print_table(row for model in shown["models"] for row in _rows(model))


def page_text(shown: dict[str, Any]) -> str:
    """Return the page of a `document` as text."""
    title = "Attention of " + ", ".join(model["name"] for model in shown["models"])
    return page.render(Path(__file__).with_name("show.html.j2"), title, shown)


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise DiffbitError(f"--layers is {text!r}, wanted numbers separated by commas, such as 0,5,11") from None


def _rows(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for setting in model["settings"]:
        best = setting["next"][0]
        yield {
            "model": model["name"],
            "rounded": setting["what"],
            "bits": setting["bits"] or None,
            "next token": repr(best["token"]),
            "probability": best["probability"],
            "KL, nats": setting["kl"],
        }
