"""diffbit run: continue a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import DiffbitError
from ..progress import set_quiet
from .options import Device, Json, NoNative, Quiet, Threads, as_artifacts
from .output import print_json, remark

if TYPE_CHECKING:
    from ..runtime import Generation

EXAMPLES = (
    'diffbit run out/demo/diff_v1-onnx "def main(" --temperature 0.8 --seed 1',
    'diffbit run examples/pico/diff_v1 "def __init__(self"',
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
    from ..runtime import Sampler, Session, Tokenizer, generate, slowdowns

    set_quiet(quiet)
    if interactive and (prompt is not None or as_json):
        raise DiffbitError("--interactive asks for its prompts itself and prints text; leave out the prompt and --json")
    if sys.stdin is None and (interactive or prompt in (None, "-")):
        raise DiffbitError("the prompt is to come from stdin, which is closed; pass it as an argument")
    sampler = Sampler(temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty, seed=seed)
    with as_artifacts([artifact], quiet, device) as (opened,):
        session = Session(opened, device, threads, not no_native)
        tokenizer = Tokenizer(session.artifact.file("tokenizer.json"))
        for sentence in slowdowns(session.artifact, device) if not no_native else ():
            remark(sentence, quiet)

        def answer(text: str) -> None:
            result = generate(
                session, tokenizer, text, max_tokens=max_tokens, sampler=sampler, stop=stop or [],
                on_text=None if as_json else _show,
            )  # fmt: skip
            if as_json:
                print_json({"prompt": text, **vars(result)})
            else:
                print()
            remark(_speed(result), quiet)

        if not interactive:
            answer(sys.stdin.read() if prompt in (None, "-") else str(prompt))
            return
        remark(f"{session.artifact.name}: type a prompt and press return; end of input (Ctrl-D) leaves", quiet)
        while True:
            try:
                text = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return
            try:
                answer(text)
            except DiffbitError as error:  # this prompt's fault; the next may do
                remark(f"error: {error}", quiet=False)


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _speed(result: Generation) -> str:
    speed = f", {result.tokens_per_s:.1f} tokens/s" if result.tokens_per_s else ""
    return (
        f"{result.prompt_tokens} prompt tokens, first token after {1000 * result.time_to_first_token_s:.0f} ms; "
        f"{len(result.token_ids)} tokens{speed}; ended by {result.finish_reason}"
    )
