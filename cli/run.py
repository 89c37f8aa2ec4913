"""diffbit run: generate text."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Any

import typer

from ..io.errors import DiffbitError
from ..settings import Sampling, SessionOptions
from .artifacts import AUTO, Quantize, as_artifacts
from .options import AllowLoops, ArtifactPath, Json, JsonSchema, Quiet, Think, think_of, with_settings
from .output import print_error, print_json, remark

EXAMPLES = (
    'diffbit run out/demo/diff_v1-onnx "def main(" --temperature 0.8 --seed 1',
    'diffbit run examples/pico/diff_v1 "def __init__(self"',
    'diffbit run examples/pico/diff_v1 "def __init__(self" --quantize int4_g32 --temperature 0',
    'diffbit run out/demo/diff_v1-onnx "def main(" --device webgpu --max-tokens 16',
)


@with_settings(Sampling, "sampling", of_model=True)
@with_settings(SessionOptions, "settings")
def run(
    artifact: ArtifactPath,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - or nothing: read it from stdin.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Maximum number of tokens to generate.")] = 64,
    sampling: dict[str, Any] | None = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop when this text has been generated; repeatable.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a message to a chat model; for more, see `diffbit chat`.")
    ] = False,
    think: Think = None,
    allow_loops: AllowLoops = False,
    json_schema: JsonSchema = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Ask for prompts until the end of input (Ctrl-D).")
    ] = False,
    quantize: Quantize = AUTO,
    settings: SessionOptions = SessionOptions(),  # noqa: B008 (frozen)
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate text from a prompt with ONNX Runtime; an artifact needs no torch.

    The text goes to stdout, the speed to stderr. A float model is quantized first, and kept for the next time. Sampling
    settings come from the model's generation_config.json unless options override them; --temperature 0 always takes the
    most likely token.
    """
    from ..runtime import Chat, Generation, Grammars, Sampler, Session, Tokenizer, generate, slowdowns

    if interactive and (prompt is not None or as_json):
        raise DiffbitError("--interactive asks for prompts and prints plain text; leave out the prompt and --json")
    if sys.stdin is None and (interactive or prompt in (None, "-")):
        raise DiffbitError("there is no prompt and stdin is closed; pass the prompt as an argument")
    if think is not None and not chat:
        raise DiffbitError("--think needs the chat template; add --chat")
    with as_artifacts([artifact], settings.device, quantize) as (opened,):
        session = Session(opened, settings)
        tokenizer = Tokenizer(session.artifact.file("tokenizer.json"))
        sampler = Sampler.of(session.artifact, **(sampling or {}))
        limits: dict[str, Any] = dict(sampler=sampler, max_tokens=max_tokens, stop=stop or [], allow_loops=allow_loops)
        conversation = Chat(session, tokenizer, think=think_of(think), **limits) if chat else None
        if json_schema is not None:
            end_tokens = session.artifact.eos_token_ids if conversation is None else conversation.end_tokens
            sampler.constraint = Grammars(tokenizer, end_tokens).json_schema_file(json_schema)
        for sentence in slowdowns(session.artifact, settings):
            remark(sentence)

        def answer(text: str) -> None:
            on_text = None if as_json else partial(print, end="", flush=True)
            if conversation is not None:
                conversation.reset()
                result: Generation = conversation.send(text, on_text)
            else:
                pieces = generate(session, text, tokenizer=tokenizer, **limits)
                for piece in pieces:
                    if on_text is not None:
                        on_text(piece)
                result = pieces.result()
            if as_json:
                print_json({"prompt": text, **vars(result)})
            else:
                print()
            remark(result.summary())

        if not interactive:
            answer(sys.stdin.read() if prompt in (None, "-") else str(prompt))
            return
        remark(f"{session.artifact.name}: type a prompt and press return; Ctrl-D ends")
        while True:
            try:
                text = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return
            try:
                answer(text)
            except DiffbitError as error:  # about this prompt, such as one that is too long; the next may work
                print_error(str(error))
