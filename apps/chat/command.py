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

from ...cli import (
    AUTO,
    AllowLoops,
    ArtifactPath,
    JsonSchema,
    Quantize,
    Quiet,
    Think,
    as_artifacts,
    print_error,
    remark,
    think_of,
    with_settings,
)
from ...io.errors import DiffbitError
from ...io.fields import Count, get, located, one_of, read
from ...io.files import read_json, write_json
from ...io.gguf import find_gguf, read_gguf
from ...settings import Sampling, SessionOptions

if TYPE_CHECKING:
    from types import FrameType

    from ...runtime import Artifact, Chat

EXAMPLES = {
    "chat": (
        "diffbit chat hf:HuggingFaceTB/SmolLM2-135M-Instruct",
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
ENDS = {  # reasons for which an answer may not be complete
    "context": "the context of {capacity} tokens is full",
    "length": "it has {most} tokens, the most that were asked for; /set max_tokens 2000 allows more",
    "loop": "it repeats itself; ask in other words, or try /set temperature 1 (--allow-loops lets it go on)",
}
MESSAGES = 'A message of several lines can be pasted, or typed between """ and """.'
SETTINGS = [option.name for option in fields(Sampling) if option.name != "logit_bias"]
MAX_TOKENS, THINK = "max_tokens", "think"


@dataclass
class _Talk:
    """A conversation, what /set has changed, and the files that /save has written."""

    chat: Chat
    artifact: Artifact
    changes: dict[str, Any]
    max_tokens: int  # without /set
    tags: list[str]  # of terminal.SECTIONS, those that the template knows
    saved: set[Path] = field(default_factory=set)


@with_settings(Sampling, "sampling", of_model=True)
@with_settings(SessionOptions, "settings")
def chat(
    artifact: ArtifactPath,
    system: Annotated[str | None, typer.Option(help="System prompt; default: the template's own.")] = None,
    template: Annotated[
        Path | None, typer.Option(help="Chat template (Jinja) to use instead of the model's own.", metavar="FILE")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Maximum tokens of an answer.")] = 512,
    sampling: dict[str, Any] | None = None,
    think: Think = None,
    allow_loops: AllowLoops = False,
    json_schema: JsonSchema = None,
    quantize: Quantize = AUTO,
    settings: SessionOptions = SessionOptions(),  # noqa: B008 (frozen)
    stats: Annotated[
        bool, typer.Option("--stats", help="After each answer, print its tokens, its latency and its speed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each answer as one line of JSON.")] = False,
    quiet: Quiet = False,
) -> None:
    """Talk with a model in its own chat template; the KV cache is kept between turns.

    A float model (a GGUF file, a Hugging Face folder or hf:ORG/NAME) is quantized first, and kept for the next time.

    Each line of stdin is a message; at a terminal, pasted text is one, and \"\"\" begins and ends a message of several
    lines. Answers go to stdout, remarks to stderr. A message that begins with / is a command; /help lists them. Ctrl-C
    ends an answer, Ctrl-D the conversation. Sampling settings come from the model's generation_config.json unless
    options override them.
    """
    from ...runtime import Artifact, Chat, ChatTemplate, Grammars, Sampler, Session, slowdowns
    from .terminal import SECTIONS, hidden_keys, messages

    if sys.stdin is None:
        raise DiffbitError("there are no messages: stdin is closed")
    if template is None:
        _check_template(artifact)
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
        conversation = Chat(
            session, None, chat_template, system=system, sampler=sampler, max_tokens=max_tokens, think=think_of(think),
            allow_loops=allow_loops,
        )  # fmt: skip
        if json_schema is not None:
            sampler.constraint = Grammars(conversation.tokenizer, conversation.end_tokens).json_schema_file(json_schema)
        talk = _Talk(conversation, opened, changes, max_tokens, [])
        if interactive:
            _say(f"{opened.name}: type a message and press return; /help lists the commands, Ctrl-D ends")
            talk.tags = [tag for tag in SECTIONS if tag in chat_template.source]
        lines = messages([name.partition(" ")[0] for name in COMMANDS])
        for number, text in enumerate(map(str.strip, lines), 1):
            if not _is_text(text):
                print_error(f"message {number} is not UTF-8, so it is left out; convert it, for example with iconv")
                continue
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


def _check_template(model: Path) -> None:
    """Raise DiffbitError if a checkpoint has no chat template, before minutes are spent on it."""
    if (gguf := find_gguf(model)) is not None:
        has_template = read_gguf(gguf).get("tokenizer.chat_template", str) is not None
    elif any(model.glob("*.safetensors")):
        config = model / "tokenizer_config.json"
        has_template = (model / "chat_template.jinja").is_file() or (
            config.is_file() and read_json(config).get("chat_template") is not None
        )
    else:
        return
    if not has_template:
        raise DiffbitError(
            f"{model}: has no chat template, so it does not answer messages; `diffbit run` continues a text, and "
            "--template FILE takes the template of another model"
        )


def _is_text(line: str) -> bool:
    """Whether a line was read from UTF-8: other bytes have become halves of surrogate pairs."""
    try:
        line.encode()
    except UnicodeEncodeError:
        return False
    return True


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
    if reply.finish_reason in ENDS:
        _say(
            f"the answer ends here: {ENDS[reply.finish_reason].format(capacity=capacity, most=conversation.max_tokens)}"
        )
    if stats:
        _say(reply.summary())


def _shown(talk: _Talk) -> tuple[Callable[[str], None], Callable[[], None]]:
    """Return the functions that show an answer at a terminal, and its end: wrapped, and what it thinks folded."""
    from .terminal import Folded, Wrapped

    wrapped = Wrapped(partial(print, end="", flush=True))

    def note(text: str) -> None:
        wrapped.finish()
        print(text, end="", flush=True)

    prompt = talk.chat.template.render([{"role": "user", "content": "x"}], variables=talk.chat.variables).rstrip()
    inside = next((tag for tag in talk.tags if prompt.endswith(tag)), None)
    folded = Folded(wrapped.push, note, talk.tags, inside)

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
        _say("the conversation is forgotten" + ("; the system prompt stays" if chat.system is not None else ""))
    elif name == "/undo" and not chat.turns:
        _say("there is no message to forget")
    elif name == "/undo":
        chat.undo()
        left = len(chat.turns) // 2
        _say(f"the last message and its answer are forgotten; {left} message{'' if left == 1 else 's'} left")
    elif name == "/system":
        chat.system = rest or None
        _say(f"system prompt: {rest}" if rest else "system prompt: the template's own, if it has one")
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
    """Change a field of Sampling, the maximum of tokens, or whether the model thinks; show them all without a name."""
    from ...runtime import Sampler

    chat, sampler = talk.chat, talk.chat.sampler
    assert isinstance(sampler, Sampler)
    if name is None:
        for setting, current in _settings(chat).items():
            remark(f"{setting:20}{current}")
        return
    settings = _settings(chat)
    if name not in settings:
        raise DiffbitError(f"{name} is not a setting, wanted one of {', '.join(settings)}")
    try:
        given = None if value is None else json.loads(value)
    except (ValueError, RecursionError):
        given = value
    if name == MAX_TOKENS:
        chat.max_tokens = talk.max_tokens if given is None else read(Count, given, name)
    elif name == THINK:
        chat.think = think_of(None if given is None else read(Annotated[str, one_of("on", "off")], given, name))
    else:
        changes = {**talk.changes, name: given}
        chat.sampler = Sampler.of(talk.artifact, constraint=sampler.constraint, **changes)
        talk.changes = changes
    remark(f"{name}: {_settings(chat)[name]}")


def _settings(chat: Chat) -> dict[str, Any]:
    """Return what /set can change, as it is."""
    from ...runtime import Sampler

    assert isinstance(chat.sampler, Sampler)
    settings = {setting: getattr(chat.sampler.sampling, setting) for setting in SETTINGS}
    if settings["seed"] is None:
        settings["seed"] = "a new one each time"
    think = {None: "as the template says", True: "on", False: "off"}[chat.think]
    return {**settings, MAX_TOKENS: chat.max_tokens, THINK: think}


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
