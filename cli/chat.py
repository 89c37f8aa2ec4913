"""diffbit chat: a conversation with a model."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..io.errors import DiffbitError
from ..io.files import write_json
from ..settings import Sampling, SessionOptions
from .options import (
    ArtifactPath,
    JsonSchema,
    Quiet,
    as_artifacts,
    constrain,
    with_settings,
)
from .output import print_error, remark, speed

if TYPE_CHECKING:
    from types import FrameType

    from ..runtime import Chat

EXAMPLES = (
    'diffbit chat out/smollm2-int8 --system "You answer in one sentence."',
    "diffbit chat out/smollm2-int8 --temperature 0.8 --seed 1 --max-tokens 100",
)
COMMANDS = {
    "/reset": "forget the conversation; the system prompt stays",
    "/system TEXT": "set the system prompt; without TEXT, use the template's own, if any",
    "/save FILE": "write the conversation as JSON",
    "/help": "show this list; to send a message that begins with /, type //",
    "/exit": "end the conversation, like Ctrl-D",
}


@with_settings(Sampling, "sampling", of_model=True)
@with_settings(SessionOptions, "settings")
def chat(
    artifact: ArtifactPath,
    system: Annotated[str | None, typer.Option(help="System prompt; default: the template's own.")] = None,
    template: Annotated[
        Path | None, typer.Option(help="Chat template (Jinja) to use instead of the model's own.", metavar="FILE")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Maximum tokens of an answer.")] = 1024,
    sampling: dict[str, Any] | None = None,
    json_schema: JsonSchema = None,
    settings: SessionOptions = SessionOptions(),  # noqa: B008 (frozen)
    as_json: Annotated[bool, typer.Option("--json", help="Print each answer as one line of JSON.")] = False,
    quiet: Quiet = False,
) -> None:
    """Talk with a model in its own chat template; the KV cache is kept between turns.

    Each line of stdin is a message. Answers go to stdout, remarks to stderr. A line that begins with / is a command;
    /help lists them. Ctrl-C ends an answer, Ctrl-D the conversation. Sampling settings come from the model's
    generation_config.json unless options override them.
    """
    from ..runtime import Artifact, Chat, ChatTemplate, Sampler, Session, slowdowns

    if sys.stdin is None:
        raise DiffbitError("there are no messages: stdin is closed")
    with as_artifacts([artifact], settings.device) as (path,):
        opened = Artifact.open(path)
        chat_template = ChatTemplate.read(opened, template)  # its process starts while the model is loaded
        session = Session(opened, settings)
        for sentence in slowdowns(opened, settings):
            remark(sentence)
        sampler = Sampler.of(opened, **sampling or {})
        conversation = Chat(session, None, chat_template, system=system, sampler=sampler, max_tokens=max_tokens)
        if json_schema is not None:
            constrain(sampler, json_schema, conversation.tokenizer, conversation.end_tokens)
        if interactive := sys.stdin.isatty():
            remark(f"{opened.name}: type a message and press return; /help lists the commands, Ctrl-D ends")
        saved: set[Path] = set()
        for line in _lines(interactive):
            try:
                if line.startswith("/") and not line.startswith("//"):
                    if not _command(line, conversation, saved):
                        return
                elif line:
                    _answer(conversation, line[line.startswith("//") :], as_json, interactive)
            except DiffbitError as error:
                if not interactive:
                    raise
                print_error(str(error))  # about this message, such as one that is too long; the next may work


def _lines(interactive: bool) -> Iterator[str]:
    """Lines of stdin, stripped."""
    if not interactive:
        yield from (line.strip() for line in sys.stdin)
        return
    with contextlib.suppress(ModuleNotFoundError):  # line editing and a history; Windows has its own
        import readline  # noqa: F401
    while True:
        if not sys.stdout.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            yield input("> " if sys.stdout.isatty() else "").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            remark("Ctrl-D or /exit ends the conversation")


def _answer(conversation: Chat, text: str, as_json: bool, interactive: bool) -> None:
    with _ctrl_c(conversation) if interactive else contextlib.nullcontext():
        reply = conversation.send(text, None if as_json else partial(print, end="", flush=True))
    if as_json:
        print(json.dumps({"message": text, **vars(reply)}, ensure_ascii=False), flush=True)
    else:
        print(flush=True)
    if reply.dropped:
        remark(
            f"the context of {conversation.session.capacity} tokens was full: the oldest {reply.dropped} messages were "
            "dropped"
        )
    if reply.finish_reason == "context":
        remark(f"the answer ends here: the context of {conversation.session.capacity} tokens is full")
    remark(speed(reply))


@contextlib.contextmanager
def _ctrl_c(conversation: Chat) -> Iterator[None]:
    """Make Ctrl-C end the answer, and a second Ctrl-C the program."""

    def end_answer(number: int, frame: FrameType | None) -> None:
        conversation.halt()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, end_answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _command(line: str, conversation: Chat, saved: set[Path]) -> bool:
    """Run a / command; return whether the conversation goes on. `saved`: the files that /save has written."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/exit":
        return False
    if name == "/reset":
        conversation.reset()
    elif name == "/system":
        conversation.system = rest or None
    elif name == "/help":
        for command, meaning in COMMANDS.items():
            remark(f"{command:14}{meaning}")
    elif name == "/save" and rest:
        path = Path(rest)
        if path.exists() and path not in saved:
            raise DiffbitError(f"{path}: already exists; choose another name")
        write_json(path, {"model": conversation.session.artifact.name, "messages": conversation.messages})
        saved.add(path)
        remark(f"{path}: {len(conversation.messages)} messages")
    elif name == "/save":
        raise DiffbitError("/save needs the name of a file to write")
    else:
        raise DiffbitError(f"{name} is not a command; /help lists them; to send a message that begins with /, type //")
    return True
