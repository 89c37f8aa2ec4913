"""Constrains generated text to a JSON schema or a grammar, with llguidance (https://github.com/guidance-ai/llguidance).

A constraint says for each step which tokens may come next; `Sampler` chooses among those, so every loop that takes a
sampler takes a constraint: `generate`, `Chat`, and each row of the server's batch.

A limit of tokens does not cut a constrained text: the constraint knows a short way to the end of the text and takes it
while the limit still has room for it. It finds the way greedily, from forced bytes and single characters that close
what is open. For some grammars it finds none; their text is then cut like any other.

A schema or a grammar may come from anybody, so llguidance runs in processes with limits (grammar_process.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import socket
import struct
import subprocess
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..io.errors import DiffbitError, MissingDependency
from ..io.fields import located, shown
from ..io.files import read_json
from ..io.tokenizer_files import tokenizer_errors
from . import grammar_process
from .child_process import python_script
from .grammar_process import ASKED, LONGEST, MASK, MEMORY, SECONDS, TOKEN, one_line, receive, send
from .json_schema import prepared
from .tokenizer import Tokenizer

MOST_CHARACTERS = 1 << 17  # of a schema or a grammar
CLOSE = 512  # tokens before the limit at which the way to the end is watched
PATIENCE = 20.0  # seconds on a busy machine, after which a process that should have ended itself is abandoned
ASKS_SECONDS = 0.05  # between two questions whether a grammar is still wanted
MOST_COMPILING = 2  # at a time; others wait
MOST_KEPT, MOST_KEPT_BYTES = 32, 512 << 20  # compiled grammars
MOST_BYTES = 1 << 30  # of all compiled grammars, also those in use
CAN_FORK = hasattr(os, "fork") and hasattr(socket, "recv_fds")


class Abandoned(DiffbitError):
    """Nobody waits for a grammar any more."""


class Grammars:
    """Makes constraints for the texts of one tokenizer. `end_tokens` end a text. The last grammars stay compiled.

    Several threads may use it. Raises MissingDependency without llguidance, DiffbitError for a model without an end
    token.
    """

    def __init__(self, tokenizer: Tokenizer, end_tokens: Collection[int]) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise MissingDependency("llguidance", "structured", "a JSON schema or a grammar")
        if not end_tokens:
            raise DiffbitError("the model has no token that ends a text, so a schema or a grammar cannot be used")
        self._tokenizer, self._end_tokens = tokenizer, sorted(end_tokens)
        self._lock, self._slots = threading.Lock(), threading.BoundedSemaphore(MOST_COMPILING)
        self._cache: OrderedDict[tuple[str, str, str | None], _Compiled | DiffbitError] = OrderedDict()
        self._live: weakref.WeakSet[_Compiled] = weakref.WeakSet()
        self._owner = 0
        self._control: socket.socket | None = None  # to the process that has the tokenizer
        self._vocabulary: grammar_process.Vocabulary | None = None  # where there are no processes

    @cached_property
    def vocabulary(self) -> Any:
        """Return llguidance's tokenizer, which knows the bytes of tokens."""
        import llguidance

        with tokenizer_errors(self._tokenizer.path, "cannot be used for a grammar"):
            return llguidance.LLTokenizer(self._tokenizer.as_json(), eos_token=self._end_tokens)

    def json_schema_file(self, file: Path) -> Constraint:
        """Read a schema from a file, for `json_schema`."""
        schema = read_json(file)
        with located(file):
            return self.json_schema(schema)

    def json_schema(self, schema: object, is_wanted: Callable[[], bool] = lambda: True) -> Constraint:
        """Allow texts that are JSON values of a schema: an object, or true for any value. No object has a key twice.

        is_wanted: called now and then; if it returns False, nobody waits any more, and Abandoned is raised. Raises
        DiffbitError with the place for a schema that is wrong, uses a keyword that cannot be enforced, takes more than
        SECONDS of processor time or MEMORY, or has no text of at most LONGEST tokens.
        """
        schema = {} if schema is True else schema
        if not isinstance(schema, Mapping):
            raise DiffbitError(f"the JSON schema is {shown(schema)}, wanted an object, or true for any value")
        try:
            text = json.dumps(schema)
        except (ValueError, RecursionError):
            raise DiffbitError("the JSON schema is nested too deeply") from None
        _check_length(text, "JSON schema")
        compiled = self._compiled("schema", json.dumps(prepared(schema)), "", is_wanted)
        if compiled.shortest is None:
            raise DiffbitError(
                f"no text of at most {LONGEST} tokens was found that the JSON schema allows; bound its lengths, and "
                "let references to itself be optional"
            )
        return Constraint(compiled)

    @staticmethod
    def rule(schema: object, lenient: bool = False) -> str:
        """Return a JSON schema as a part of a Lark grammar. lenient: leave out what llguidance cannot enforce.

        Raises DiffbitError for a schema that `json_schema` refuses before it is compiled.
        """
        schema = {} if schema is True else schema
        if not isinstance(schema, Mapping):
            return f"%json {json.dumps(schema)}"
        options = {"x-guidance": grammar_process.STYLE | ({"lenient": True, "coerce_one_of": True} if lenient else {})}
        return f"%json {json.dumps(options | prepared(schema, lenient))}"

    def grammar(
        self, text: str, is_wanted: Callable[[], bool] = lambda: True, *, json_after: str | None = None
    ) -> Constraint:
        """Allow the texts of a grammar: GBNF as llama.cpp reads it, or Lark as llguidance does.

        json_after: what comes before JSON, in whose objects no key comes twice; "": all of a text is JSON.
        is_wanted: as in `json_schema`.
        """
        _check_length(text, "grammar")
        return Constraint(self._compiled("grammar", text, json_after, is_wanted))

    def _compiled(self, kind: str, text: str, marker: str | None, is_wanted: Callable[[], bool]) -> _Compiled:
        key = kind, text, marker
        with self._lock:
            if self._owner != os.getpid():  # a fork of this process has the same sockets, but they are not its own
                self._cache.clear()
            compiled = self._cache.get(key)
            if compiled is not None:
                self._cache.move_to_end(key)
        if compiled is None:
            compiled = self._compile(kind, text, marker, is_wanted)
            with self._lock:
                self._cache[key] = compiled
                self._make_room()
                if isinstance(compiled, _Compiled):
                    self._live.add(compiled)
        if isinstance(compiled, DiffbitError):
            raise DiffbitError(str(compiled))
        return compiled

    def _make_room(self) -> None:
        def size() -> int:
            return sum(compiled.nbytes for compiled in self._cache.values() if isinstance(compiled, _Compiled))

        while len(self._cache) > MOST_KEPT or (len(self._cache) > 1 and size() > MOST_KEPT_BYTES):
            self._cache.popitem(last=False)

    def _compile(
        self, kind: str, text: str, marker: str | None, is_wanted: Callable[[], bool]
    ) -> _Compiled | DiffbitError:
        with self._lock:
            in_use = sum(compiled.nbytes for compiled in self._live)
        if in_use > MOST_BYTES:
            raise DiffbitError(f"the grammars in use take more than {MOST_BYTES >> 30} GiB; try again later")
        while not self._slots.acquire(timeout=ASKS_SECONDS):
            if not is_wanted():
                raise Abandoned("nobody waits for this grammar")
        try:
            if not CAN_FORK:
                return self._compile_here(kind, text, marker)
            return self._compile_there(kind, text, marker, is_wanted)
        finally:
            self._slots.release()

    def _compile_there(
        self, kind: str, text: str, marker: str | None, is_wanted: Callable[[], bool]
    ) -> _Compiled | DiffbitError:
        """Compile in a process."""
        name = "JSON schema" if kind == "schema" else "grammar"
        connection = self._forked()
        request = {"kind": kind, "text": text, "marker": marker}
        try:
            send(connection, json.dumps(request).encode())
            answer = json.loads(_wait(connection, is_wanted))
            if "error" in answer and "place" not in answer:
                try:
                    answer = json.loads(_wait(connection, is_wanted))
                except (EOFError, OSError):
                    answer["place"] = None
        except TimeoutError:  # another time the machine may be less busy: this is not kept
            raise DiffbitError(f"the {name} was not compiled within {PATIENCE:g} seconds; try again later") from None
        except (EOFError, OSError):
            connection.close()
            return DiffbitError(
                f"the {name} cannot be used: compiling it takes more than {SECONDS:g} seconds, {MEMORY >> 20} MiB of "
                "memory, or too deep a recursion; make it smaller"
            )
        if "error" not in answer:
            return _Compiled(answer["shortest"], answer["bytes"], connection)
        connection.close()
        return self._error(kind, answer["error"], answer["place"])

    def _error(self, kind: str, error: str, place: Any) -> DiffbitError:
        if place == "tokenizer":
            return DiffbitError(f"{self._tokenizer.path}: cannot be used for a grammar ({error}); restore the file")
        if kind != "schema":
            return DiffbitError(f"the grammar cannot be used: {error}")
        where, problem = place or ("#", error)
        return DiffbitError(f"the JSON schema cannot be used at {where}: {problem}")

    def _compile_here(self, kind: str, text: str, marker: str | None) -> _Compiled | DiffbitError:
        """Compile in this process, where the system cannot fork."""
        with self._lock:
            if self._vocabulary is None:
                with tokenizer_errors(self._tokenizer.path, "cannot be used for a grammar"):
                    self._vocabulary = grammar_process.Vocabulary(self._tokenizer.as_json(), self._end_tokens)
            vocabulary, self._owner = self._vocabulary, os.getpid()
        try:
            grammar = grammar_process.Grammar(vocabulary, kind, text, marker)
        except ValueError as error:
            place = grammar_process.place_of(vocabulary, text) if kind == "schema" else None
            return self._error(kind, one_line(error), place)
        return _Compiled(grammar.shortest, 0, grammar)

    def _forked(self) -> socket.socket:
        """Return a connection to a new process."""
        mine, theirs = socket.socketpair()
        with theirs, self._lock:
            for again in (False, True):
                try:
                    if self._control is None or self._owner != os.getpid() or again:
                        self._control, self._owner = self._started(), os.getpid()
                    socket.send_fds(self._control, [b"+"], [theirs.fileno()])
                    return mine
                except OSError:  # it was killed
                    continue
        raise DiffbitError("no process can be started to compile a grammar; free memory and try again")

    def _started(self) -> socket.socket:
        """Return a connection to a process that reads the tokenizer, and forks for each socket which is sent to it."""
        control, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    python_script(Path(grammar_process.__file__)), stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, start_new_session=True,  # Ctrl-C is for this process
                    env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # each arena takes 64 MiB of the address space
                )  # fmt: skip
            except OSError as error:
                raise DiffbitError(f"no process can be started to compile a grammar ({error.strerror})") from None
        weakref.finalize(self, _end, control, process, os.getpid())
        about = {"tokenizer": self._tokenizer.as_json(), "end_tokens": self._end_tokens}
        send(control, json.dumps(about).encode())
        return control


def _end(control: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    control.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()


def _wait(connection: socket.socket, is_wanted: Callable[[], bool]) -> bytes:
    """Return the next message. Raises EOFError if none comes, TimeoutError if it takes longer than PATIENCE, and
    Abandoned if nobody waits for it any more."""
    until = time.monotonic() + PATIENCE
    while not _arrives(connection, ASKS_SECONDS):
        if not is_wanted():
            connection.close()  # which ends the process
            raise Abandoned("nobody waits for this grammar")
        if time.monotonic() > until:
            connection.close()
            raise TimeoutError
    return receive(connection)


def _arrives(connection: socket.socket, seconds: float) -> bool:
    """Whether there is something to read, within so many seconds."""
    waiting = select.poll()  # unlike select, it takes any number of open files
    waiting.register(connection, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


class _Compiled:
    """A compiled grammar: the process that has it, or without processes the grammar itself."""

    def __init__(self, shortest: int | None, nbytes: int, place: socket.socket | grammar_process.Grammar) -> None:
        self.shortest, self.nbytes, self._place = shortest, nbytes, place
        self._lock = threading.Lock()

    def text(self) -> _Follower:
        """Return a new text."""
        if isinstance(self._place, grammar_process.Grammar):
            return _Follower(grammar_process.Text(self._place))
        mine, theirs = socket.socketpair()
        mine.settimeout(PATIENCE)
        with theirs, self._lock, _too_complex():
            socket.send_fds(self._place, [b"+"], [theirs.fileno()])
        return _Follower(mine)


class _Follower:
    """One text: the process that follows it, or without processes the text itself."""

    def __init__(self, place: socket.socket | grammar_process.Text) -> None:
        self._place = place
        self._mask: bytes | None = None

    def is_ready(self) -> bool:
        """Whether `mask` would not wait."""
        if self._mask is not None or not isinstance(self._place, socket.socket):
            return True
        return _arrives(self._place, 0)

    def mask(self) -> bytes:
        if self._mask is None:
            with _too_complex():
                self._mask = self._message(MASK) if isinstance(self._place, socket.socket) else self._place.mask()
        return self._mask

    def accept(self, token: int, remaining: int | None) -> int:
        self._mask = None
        with _too_complex():
            if not isinstance(self._place, socket.socket):
                return self._place.accept(token, remaining)
            self._place.sendall(
                struct.pack("<I", ASKED.size) + ASKED.pack(token, -1 if remaining is None else remaining)
            )
            return token if remaining is None else int(struct.unpack("<q", self._message(TOKEN))[0])

    def _message(self, kind: bytes) -> bytes:
        assert isinstance(self._place, socket.socket)
        data = receive(self._place)
        if data[:1] != kind:
            raise ValueError(data[1:].decode())
        return data[1:]


@contextmanager
def _too_complex() -> Iterator[None]:
    """Raise DiffbitError for what the process of a text does not do within its limits."""
    try:
        yield
    except (OSError, EOFError):
        raise DiffbitError(
            "the grammar became too complex for this text: a token takes too much time or memory"
        ) from None
    except ValueError as error:
        raise DiffbitError(f"the grammar became too complex for this text: {error}") from None


class Constraint:
    """Which tokens may come next in a text. `Sampler` asks `allowed` and tells `accept` what it chose.

    `shortest` is the number of tokens of a short text, None if none is known.
    """

    def __init__(self, compiled: _Compiled) -> None:
        self._compiled, self.shortest = compiled, compiled.shortest
        self.start()

    def copy(self) -> Constraint:
        """Return the same constraint, for another text."""
        return Constraint(self._compiled)

    def start(self, limit: int | None = None) -> None:
        """Begin a text of at most `limit` tokens, the end token included."""
        self._text: _Follower | None = None  # begins with the first question
        self._remaining = limit

    def _begun(self) -> _Follower:
        if self._text is None:
            self._text = self._compiled.text()
        return self._text

    def is_ready(self) -> bool:
        """Whether `allowed` would answer at once; if not, it is being computed."""
        return self._begun().is_ready()

    def allowed(self, count: int) -> NDArray[np.int64]:
        """Return the ids of the tokens that may come next, ascending, all below `count`, the number of the model's
        tokens."""
        bits = np.frombuffer(self._begun().mask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[:count])
        if not len(allowed):
            raise DiffbitError("the grammar became too complex for this text: the model has none of its tokens")
        return allowed

    def accept(self, token: int) -> int:
        """Continue with a token -> that token, or the one that leads to the end where the limit leaves no room."""
        near = self._remaining is not None and self._remaining <= CLOSE + 2 * (self.shortest or 0)
        if self._remaining is not None:
            self._remaining -= 1
        return self._begun().accept(token, self._remaining if near else None)


def _check_length(text: str, name: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise DiffbitError(f"the {name} has {len(text):,} characters, wanted at most {MOST_CHARACTERS:,}")
