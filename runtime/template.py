"""Chat templates render a conversation as the text that a chat model was trained on ("<|im_start|>user\nHello...").

A template is a Jinja program in the model's folder: chat_template.jinja, or `chat_template` of tokenizer_config.json
(a string, or a list of named ones, of which "tool_use" renders conversations with tools). The rendered text equals that
of transformers' `apply_chat_template`.

A template is untrusted code. It runs in Jinja's sandbox, in a separate process with limited memory (render.py), which
is killed after SECONDS.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from ..io.errors import DiffbitError
from ..io.files import read_json
from ..io.model_files import TOOL_TEMPLATE
from .artifact import Artifact
from .child_process import python_script
from .tokenizer import Tokenizer

FILE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
RESERVED_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt", *SPECIAL_TOKENS))
"""Variables of templates that `ChatTemplate` sets."""
THINKING_SWITCHES = frozenset(("enable_thinking", "thinking"))  # variables of templates: whether the model thinks
SECONDS = 10.0  # of one rendering
MOST_BYTES = 1 << 20  # of a template


class Message(TypedDict):
    """One message of a conversation."""

    role: str  # "system", "user", "assistant" or "tool"
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]  # of an assistant: {"function": {"name": ..., "arguments": {...}}}
    tool_call_id: NotRequired[str]  # of a tool's result
    name: NotRequired[str]
    reasoning_content: NotRequired[str]  # what an assistant thought


class NoTemplate(DiffbitError):
    """The model has no chat template."""


class ChatTemplate:
    """A chat template and the special tokens that it may use.

    template = ChatTemplate.read("out/model")
    template.render([{"role": "user", "content": "Hello"}])
    """

    def __init__(
        self,
        source: str,
        name: str,
        special_tokens: dict[str, str] | None = None,
        with_tools: ChatTemplate | None = None,
    ) -> None:
        """`name`: the template's name in error messages. `special_tokens`: such as {"bos_token": "<s>"}. `with_tools`:
        the model's other template, for conversations with tools."""
        self.name = name
        self.with_tools = with_tools
        self.special_tokens = special_tokens or {}
        self.source = source
        self._lock = threading.Lock()
        self._names: frozenset[str] | None = None
        self._process: subprocess.Popen[str] | None = self._start()  # it imports Jinja while a model is loaded

    @classmethod
    def read(cls, model: Artifact | str | Path, file: str | Path | None = None) -> ChatTemplate:
        """Return the template of an artifact or a checkpoint folder, or the one in `file`, with the model's special
        tokens.

        Raises NoTemplate if the model has none, DiffbitError if it cannot be read.
        """
        config_file = _file(model, CONFIG)
        config = {} if config_file is None else read_json(config_file)
        map_file = _file(model, "special_tokens_map.json")
        tokens = _special_tokens(({} if map_file is None else read_json(map_file)) | config)
        path = _file(model, FILE) if file is None else Path(file)
        if path is not None:
            tools_path = _file(model, TOOL_TEMPLATE) if file is None else None
            with_tools = None if tools_path is None else cls(_text(tools_path), str(tools_path), tokens)
            return cls(_text(path), str(path), tokens, with_tools)
        source, with_tools = config.get("chat_template"), None
        if isinstance(source, list):  # of named templates, for tools and documents
            named = {
                entry["name"]: entry.get("template") for entry in source if isinstance(entry, dict) and "name" in entry
            }
            source, tools = named.get("default"), named.get("tool_use")
            if isinstance(source, str) and isinstance(tools, str):
                with_tools = cls(tools, f"{config_file}: chat_template tool_use", tokens)
        if source is None:
            where = model.path if isinstance(model, Artifact) else model
            raise NoTemplate(
                f"{where}: has no chat template; `diffbit chat` takes --template FILE, `diffbit run` continues a text"
            )
        if not isinstance(source, str) or len(source) > MOST_BYTES:
            raise DiffbitError(f"{config_file}: chat_template is not a text of at most {MOST_BYTES} characters")
        return cls(source, f"{config_file}: chat_template", tokens, with_tools)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation. `add_generation_prompt` appends the beginning of the model's answer.
        `tools`: functions that the model may call, as in OpenAI's interface. `variables`: more variables for the
        template, such as enable_thinking.

        Raises DiffbitError if the template refuses the conversation, fails, or takes too much time or memory.
        """
        if tools is not None and self.with_tools is not None:  # "tool_use" of named templates, as in transformers
            return self.with_tools.render(
                messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
            )
        request = {
            "messages": list(messages), "tools": None if tools is None else list(tools), "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        if taken := sorted((variables or {}).keys() & RESERVED_VARIABLES):
            raise DiffbitError(f"diffbit sets the template's variable {taken[0]}; leave it out of the variables")
        return str(self._answer({**(variables or {}), **request}, "cannot render this conversation")["text"])

    @property
    def names(self) -> frozenset[str]:
        """Return the variables that the template reads, such as messages, tools and enable_thinking."""
        if self._names is None:
            more = frozenset[str]() if self.with_tools is None else self.with_tools.names
            self._names = more | frozenset(self._answer("names", "cannot be read")["names"])
        return self._names

    @property
    def thinks(self) -> bool:
        """Whether the template knows of thinking between <think> and </think>."""
        return "think>" in self.source

    def thinking(self, on: bool | None) -> dict[str, bool]:
        """Return the variables that turn the model's thinking on or off; none for None.

        Raises DiffbitError if the template has no such variable, unless the model does not think, and is not to.
        """
        switches = THINKING_SWITCHES & self.names if on is not None else frozenset()
        if on is None or not (switches or on or self.thinks):
            return {}
        if not switches:
            always = "its model always thinks" if self.thinks else "its model does not think"
            raise DiffbitError(
                f"{self.name}: has no switch for thinking ({' or '.join(sorted(THINKING_SWITCHES))}): {always}; leave "
                "the option out"
            )
        return dict.fromkeys(sorted(switches), on)

    def end_tokens(self, artifact: Artifact, tokenizer: Tokenizer) -> set[int]:
        """Return the tokens that end an answer: the model's, and the tokenizer's eos_token."""
        eos = tokenizer.token_id(self.special_tokens.get("eos_token", ""))
        return {*artifact.eos_token_ids, *(() if eos is None else (eos,))}

    def _answer(self, request: object, failure: str) -> dict[str, Any]:
        """Return what the process answers. Raises DiffbitError, with `failure` and the reason, for an error."""
        with self._lock:
            try:
                answer = self._ask(json.dumps(request))
            except BaseException:  # also Ctrl-C: its answer would be taken for that of the next rendering
                self._end()
                raise
        if "error" in answer:
            raise DiffbitError(f"{self.name}: {failure} ({answer['error']})")
        return answer

    def _ask(self, request: str) -> dict[str, Any]:
        process = self._process if self._process is not None and self._owner == os.getpid() else self._start()
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        watch = threading.Timer(SECONDS, process.kill)
        watch.start()
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watch.cancel()
        if line.endswith("\n"):
            return dict(json.loads(line))
        self._end()
        return {"error": f"it took more than {SECONDS:.0f} seconds, or ended its process"}

    def _start(self) -> subprocess.Popen[str]:
        try:
            process = subprocess.Popen(
                python_script(Path(__file__).with_name("render.py")),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for this process
            )  # fmt: skip
            assert process.stdin is not None
            process.stdin.write(json.dumps({"template": self.source, "variables": self.special_tokens}) + "\n")
        except OSError as error:
            raise DiffbitError(f"{self.name}: no process can be started to render it ({error.strerror})") from None
        self._owner = os.getpid()  # a fork of this process has the same pipes, but the renderer is not its own
        weakref.finalize(self, _kill, process, self._owner)
        return process

    def _end(self) -> None:
        if self._process is not None:
            _kill(self._process, self._owner)
        self._process = None


def _kill(process: subprocess.Popen[str], owner: int) -> None:
    if os.getpid() != owner:
        return
    process.kill()
    process.communicate()


def _file(model: Artifact | str | Path, name: str) -> Path | None:
    """Return the path of a file that the artifact lists, or that is in the folder; None if there is none."""
    if isinstance(model, Artifact):
        return model.file(name) if name in model.files else None
    path = Path(model) / name
    return path if path.is_file() else None


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise DiffbitError(f"{path}: is larger than {MOST_BYTES >> 20} MiB, too large for a chat template")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DiffbitError(f"{path}: cannot be read ({error})") from None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens in a tokenizer_config.json, given as texts or as {"content": text}."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens
