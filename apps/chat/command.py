"""diffbit chat: a conversation with a model."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...cli import ArtifactPath, JsonSchema, Quantize, Quiet, as_artifacts, print_error, remark, with_settings
from ...io.errors import DiffbitError
from ...io.fields import Count, get, located, read
from ...io.files import read_json, write_json
from ...settings import Sampling, SessionOptions

if TYPE_CHECKING:
    from types import FrameType

    from ...runtime import Artifact, Chat

EXAMPLES = {
    "chat": (
        'diffbit chat out/smollm2-int8 --system "You answer in one sentence."',
        "diffbit chat out/smollm2-int8 --temperature 0.8 --seed 1 --max-tokens 100",
    )
}
COMMANDS = {
    "/reset": "forget the conversation; the system prompt stays",
    "/undo": "forget the last message and its answer",
    "/system TEXT": "set the system prompt; without TEXT, use the template's own, if any",
    "/set NAME VALUE": "change a setting, such as /set temperature 0.2; without VALUE, go back to the model's own; "
    "without NAME, show all",
    "/save FILE": "write the conversation as JSON",
    "/load FILE": "go on with a conversation that /save wrote",
    "/unfold": "show the last answer whole, with its thinking and its calls of tools",
    "/help": "show this list; to send a message that begins with /, type //",
    "/exit": "end the conversation, like Ctrl-D",
}
MESSAGES = 'A message of several lines can be pasted, or typed between """ and """.'
SETTINGS = [option.name for option in fields(Sampling) if option.name != "logit_bias"]
MAX_TOKENS = "max_tokens"


@dataclass
class _Talk:
    """A conversation, what /set has changed, and the files that /save has written."""

    chat: Chat
    artifact: Artifact
    changes: dict[str, Any]
    max_tokens: int  # without /set
    tags: list[str]  # of terminal.SECTIONS, those that the template knows
    inside: str | None  # the one that every prompt opens
    saved: set[Path] = field(default_factory=set)


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
    quantize: Quantize = None,
    settings: SessionOptions = SessionOptions(),  # noqa: B008 (frozen)
    stats: Annotated[
        bool, typer.Option("--stats", help="After each answer, print its tokens, its latency and its speed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each answer as one line of JSON.")] = False,
    quiet: Quiet = False,
) -> None:
    """Talk with a model in its own chat template; the KV cache is kept between turns.

    Each line of stdin is a message; at a terminal, a paste is one, and \"\"\" begins and ends one of several lines.
    Answers go to stdout, remarks to stderr. A message that begins with / is a command; /help lists them. Ctrl-C ends an
    answer, Ctrl-D the conversation. Sampling settings come from the model's generation_config.json unless options
    override them.
    """
    from ...runtime import Artifact, Chat, ChatTemplate, Grammars, Sampler, Session, slowdowns
    from .terminal import SECTIONS, hidden_keys, messages

    if sys.stdin is None:
        raise DiffbitError("there are no messages: stdin is closed")
    interactive = sys.stdin.isatty()
    keys = hidden_keys() if interactive else contextlib.nullcontext()
    with keys, as_artifacts([artifact], settings.device, quantize) as (path,):
        opened = Artifact.open(path)
        chat_template = ChatTemplate.read(opened, template)  # its process starts while the model is loaded
        session = Session(opened, settings)
        for sentence in slowdowns(opened, settings):
            remark(sentence)
        changes = dict(sampling or {})
        sampler = Sampler.of(opened, **changes)
        conversation = Chat(session, None, chat_template, system=system, sampler=sampler, max_tokens=max_tokens)
        if json_schema is not None:
            sampler.constraint = Grammars(conversation.tokenizer, conversation.end_tokens).json_schema_file(json_schema)
        talk = _Talk(conversation, opened, changes, max_tokens, [], None)
        if interactive:
            _say(f"{opened.name}: type a message and press return; /help lists the commands, Ctrl-D ends")
            talk.tags = [tag for tag in SECTIONS if tag in chat_template.source]
            prompt = chat_template.render([{"role": "user", "content": "x"}]).rstrip() if talk.tags else ""
            talk.inside = next((tag for tag in talk.tags if prompt.endswith(tag)), None)
        for text in map(str.strip, messages([name.partition(" ")[0] for name in COMMANDS])):
            try:
                if text.startswith("/") and not text.startswith("//"):
                    if not _command(text, talk):
                        return
                elif text:
                    _answer(talk, text[text.startswith("//") :], as_json, interactive, stats)
            except DiffbitError as error:
                if not interactive:
                    raise
                print_error(str(error))  # about this message, such as one that is too long; the next may work


def _say(sentence: str, title: str = "") -> None:
    """Print a remark, at a terminal with its lines broken between words. title: begins it; further lines are below."""
    from .terminal import width

    columns = width() if sys.stderr.isatty() else 10_000
    remark(textwrap.fill(sentence, columns, initial_indent=title, subsequent_indent=" " * len(title)))


def _answer(talk: _Talk, text: str, as_json: bool, interactive: bool, stats: bool) -> None:
    conversation = talk.chat
    wraps = interactive and sys.stdout.isatty() and not as_json
    show, finish = _shown(talk) if wraps else (partial(print, end="", flush=True), print)
    with _ctrl_c(conversation) if interactive else contextlib.nullcontext():
        reply = conversation.send(text, None if as_json else show)
    if as_json:
        print(json.dumps({"message": text, **vars(reply)}, ensure_ascii=False), flush=True)
    else:
        finish()
        sys.stdout.flush()
    capacity = conversation.session.capacity
    if reply.dropped:
        _say(f"the context of {capacity} tokens was full: the oldest {reply.dropped} messages were dropped")
    if reply.finish_reason == "context":
        _say(f"the answer ends here: the context of {capacity} tokens is full")
    if stats:
        _say(reply.summary())


def _shown(talk: _Talk) -> tuple[Callable[[str], None], Callable[[], None]]:
    """The functions that show an answer at a terminal, and its end: wrapped, and what it thinks folded."""
    from .terminal import Folded, Wrapped

    wrapped = Wrapped(partial(print, end="", flush=True))

    def note(text: str) -> None:
        wrapped.finish()
        print(text, end="", flush=True)

    folded = Folded(wrapped.push, note, talk.tags, talk.inside)

    def finish() -> None:
        folded.finish()
        wrapped.finish()

    return folded.push, finish


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


def _command(line: str, talk: _Talk) -> bool:
    """Run a / command; return whether the conversation goes on."""
    name, _, rest = line.partition(" ")
    rest, chat = rest.strip(), talk.chat
    from .terminal import Wrapped

    if name == "/exit":
        return False
    if name == "/reset":
        chat.reset()
    elif name == "/undo":
        chat.undo()
    elif name == "/system":
        chat.system = rest or None
    elif name == "/set":
        _set(talk, *rest.split(maxsplit=1))
    elif name == "/help":
        for command, meaning in COMMANDS.items():
            _say(meaning, f"{command:17}")
        _say(MESSAGES)
    elif name in ("/save", "/load") and not rest:
        raise DiffbitError(f"{name} needs the name of a file")
    elif name == "/save":
        path = Path(rest)
        if path.exists() and path not in talk.saved:
            raise DiffbitError(f"{path}: already exists; choose another name")
        write_json(path, {"model": talk.artifact.name, "messages": chat.messages})
        talk.saved.add(path)
        remark(f"{path}: {len(chat.messages)} messages")
    elif name == "/load":
        _load(Path(rest), chat)
        remark(f"{rest}: {len(chat.messages)} messages")
    elif name == "/unfold" and chat.turns:
        wrapped = Wrapped(partial(print, end=""))
        wrapped.push(chat.turns[-1]["content"])
        wrapped.finish()
    elif name == "/unfold":
        raise DiffbitError("there is no answer yet")
    else:
        raise DiffbitError(f"{name} is not a command; /help lists them; to send a message that begins with /, type //")
    return True


def _set(talk: _Talk, name: str | None = None, value: str | None = None) -> None:
    """Change a field of Sampling, or the maximum of tokens; show them all without a name."""
    from ...runtime import Sampler

    chat, sampler = talk.chat, talk.chat.sampler
    assert isinstance(sampler, Sampler)
    settings = {setting: getattr(sampler.sampling, setting) for setting in SETTINGS} | {MAX_TOKENS: chat.max_tokens}
    if name is None:
        for setting, current in settings.items():
            remark(f"{setting:20}{'another each time' if current is None else current}")
        return
    if name not in settings:
        raise DiffbitError(f"{name} is not a setting, wanted one of {', '.join(settings)}")
    try:
        given = None if value is None else json.loads(value)
    except (ValueError, RecursionError):
        given = value
    if name == MAX_TOKENS:
        chat.max_tokens = talk.max_tokens if given is None else read(Count, given, name)
    else:
        changes = {**talk.changes, name: given}
        chat.sampler = Sampler.of(talk.artifact, constraint=sampler.constraint, **changes)
        talk.changes = changes


def _load(path: Path, chat: Chat) -> None:
    """Replace the conversation by one that /save wrote."""
    with located(path):
        messages = get(read_json(path), "messages", tuple[Mapping[str, str], ...])
        roles = [message.get("role") for message in messages if message.keys() == {"role", "content"}]
        first = roles[:1] == ["system"]
        if len(roles) < len(messages) or roles[first:] != ["user", "assistant"] * ((len(roles) - first) // 2):
            raise DiffbitError(
                "its messages are no conversation, wanted a role and a content each: user and assistant in turns, "
                "after at most one of system"
            )
    chat.system = messages[0]["content"] if first else None
    chat.turns = [{"role": message["role"], "content": message["content"]} for message in messages[first:]]
