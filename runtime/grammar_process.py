"""Compiles grammars and says which tokens may come next, in processes of its own. `Grammars` (constraint.py) starts
this file; where the system cannot fork, it uses `Vocabulary`, `Grammar` and `Text` in its own process.

A schema or a grammar comes from a request, and llguidance can take any time, memory and stack for a few bytes of it
(`multipleOf`, a chain of a thousand references). So three generations of processes keep it from the server:

- the first reads the tokenizer, and forks for each grammar;
- the second compiles one grammar within SECONDS of processor time, MEMORY and STACK, and forks for each text;
- the third follows one text, token by token, within STEP_SECONDS a token and TEXT_MEMORY.

What exceeds a limit ends only its own process. Each process has a socket to the server. It ends when that is closed:
also a process that compiles, for a client that has left.

A message is its length and its bytes. A byte alone with a file descriptor asks for a fork, whose socket that is.
This file imports nothing from diffbit, so it starts fast and stays small.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from time import process_time
from typing import Any

SECONDS, STEP_SECONDS = 2.0, 1.0  # of processor time
MEMORY, TEXT_MEMORY = 512 << 20, 64 << 20  # bytes of address space, besides what the process had before
STACK = 64 << 20  # bytes
MOST_STATES = 50_000  # of a lexer, each of about 1 KB
MOST_MESSAGE = 256 << 20  # bytes
MOST_PROBLEMS, PROBLEM_SECONDS = 50, 0.5  # parts of a schema that are compiled to find the one that is wrong
LONGEST = 2048  # tokens of the shortest text that a schema may ask for
ENDING_SECONDS = 0.1  # for a way to the end of a text
MOST_KEYS_TRIED = 200
# Characters in the order in which they end a text: what closes a string, an object or an array; then digits, signs that
# patterns want, the letters of null, true and false; all others; and last, what opens or escapes something
CLOSING = '"}]0123456789 -.:,/@_+ntf'
OPENING = "[{\\"
CLOSERS = 3  # of CLOSING: those that close something
STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes
SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions")  # objects whose values are schemas
FORMATS = {  # texts of formats that the search for an end would not find
    "email": "a@b.co", "uri": "a:b", "hostname": "a.co", "ipv6": "::1", "duration": "P1D",
}  # fmt: skip
MOST_WITNESSES, LONGEST_WITNESS = 32, 64  # texts of patterns
TOKEN, MASK, ERROR = b"t", b"m", b"e"  # first bytes of a text's messages
ASKED = struct.Struct("<qq")  # a token, and how many more there may be; -1: no limit is near


def main() -> None:
    """Read the tokenizer from the socket that is stdin, then fork until the socket is closed."""
    sys.path[:] = json.loads(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave nothing behind
    control = socket.socket(fileno=os.dup(0))
    first = json.loads(receive(control))
    _limit("RLIMIT_CORE", 0)
    vocabulary: Vocabulary | str
    try:
        vocabulary = Vocabulary(first["tokenizer"], first["end_tokens"])
    except BaseException as error:  # a panic of Rust is one
        vocabulary = one_line(error)
    threading.stack_size(STACK)
    host = threading.Thread(target=_host, args=(control, lambda connection: _grammar(connection, vocabulary)))
    host.start()
    host.join()


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(struct.pack("<I", len(data)) + data)


def receive(connection: socket.socket) -> bytes:
    """Return a message. Raises EOFError where the other side is closed."""
    (size,) = struct.unpack("<I", _exactly(connection, 4))
    if size > MOST_MESSAGE:
        raise EOFError
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _host(control: socket.socket, child: Callable[[socket.socket], None]) -> None:
    """Fork for each socket that arrives, and let `child` serve it; end with the process on the other side."""
    while True:
        try:
            data, files, _, _ = socket.recv_fds(control, 1, 1)
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        try:
            forked = os.fork()
        except OSError:  # no more processes: the socket is closed
            forked = -1
        if not forked:
            control.close()
            with suppress(EOFError, OSError):
                child(socket.socket(fileno=files[0]))
            os._exit(0)
        for file in files:
            os.close(file)


def _grammar(connection: socket.socket, vocabulary: Vocabulary | str) -> None:
    """Compile a grammar in the second generation, then fork for each of its texts."""
    request = json.loads(receive(connection))
    if isinstance(vocabulary, str):
        send(connection, json.dumps({"error": vocabulary, "place": "tokenizer"}).encode())
        return
    before = _memory()
    _limit_memory(MEMORY)
    grammars: list[Grammar] = []

    def work() -> None:
        if sys.platform == "linux":  # others go first. Elsewhere the number of a thread may be that of another process
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            grammars.append(Grammar(vocabulary, request["kind"], request["text"], request.get("marker")))
            answer: dict[str, Any] = {"shortest": grammars[0].shortest, "bytes": max(0, _memory() - before)}
        except ValueError as error:
            answer = {"error": one_line(error)}
            send(connection, json.dumps(answer).encode())  # finding the place may take too long
            answer["place"] = place_of(vocabulary, request["text"]) if request["kind"] == "schema" else None
        except MemoryError:
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, json.dumps(answer).encode())

    threading.Thread(target=work, daemon=True).start()
    _host(connection, lambda connection: _text(connection, grammars[0]))


def _text(connection: socket.socket, grammar: Grammar) -> None:
    """Follow a text in the third generation."""
    _limit_memory(TEXT_MEMORY)
    text = Text(grammar)
    while True:
        signal.setitimer(signal.ITIMER_PROF, STEP_SECONDS)
        try:
            send(connection, MASK + text.mask())
        except ValueError as error:
            send(connection, ERROR + str(error).encode())
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        token, remaining = ASKED.unpack(receive(connection))
        signal.setitimer(signal.ITIMER_PROF, STEP_SECONDS)
        chosen = text.accept(token, None if remaining < 0 else remaining)
        if remaining >= 0:
            send(connection, TOKEN + struct.pack("<q", chosen))


def _memory() -> int:
    """Return the bytes of this process's own resident memory; 0 where the system does not say."""
    with suppress(OSError, ValueError), open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _limit_memory(more: int) -> None:
    """Limit this process's address space to `more` bytes above what it has; on Linux."""
    with suppress(OSError, ValueError), open("/proc/self/statm") as file:
        _limit("RLIMIT_AS", int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + more)


def _limit(name: str, limit: int) -> None:
    import resource

    resource_id = getattr(resource, name)
    hard = resource.getrlimit(resource_id)[1]
    if name == "RLIMIT_AS" or hard == resource.RLIM_INFINITY or hard > limit:  # a text may have less than its grammar
        resource.setrlimit(resource_id, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def one_line(message: object) -> str:
    """Return a message of llguidance as part of a sentence."""
    return " ".join(str(message).split())[:300]


class Vocabulary:
    """The tokens of a tokenizer.json, as llguidance has them. Raises ValueError for one that it cannot use."""

    def __init__(self, tokenizer: str, end_tokens: Sequence[int]) -> None:
        import llguidance

        self.known: Any = llguidance.LLTokenizer(tokenizer, eos_token=list(end_tokens))
        self.matcher: Any = llguidance.LLMatcher
        self.to_lark: Any = llguidance.grammar_from
        self.limits: Any = llguidance.LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=False)
        characters = [chr(code) for code in range(32, 127)]
        rest = [character for character in characters if character not in CLOSING + OPENING]
        singles = [(character, self.known.greedy_tokenize(character)) for character in (*CLOSING, *rest, *OPENING)]
        self.closing = [ids[0] for character, ids in singles if self.known.decode_bytes(ids[:1]) == character.encode()]
        # Tokens that may have the end of a key in them, by the number of their quotation marks; and those that may lead
        # to the next key
        self.quotes: dict[int, list[tuple[int, bytes]]] = {1: [], 2: [], 3: []}
        self.commas: list[tuple[int, bytes]] = []
        self.written: dict[bytes, list[int]] = {}
        for token in range(self.known.vocab_size):
            data = bytes(self.known.decode_bytes([token]))
            if count := min(3, data.count(b'"')):
                self.quotes[count].append((token, data))
            if b"," in data:
                self.commas.append((token, data))
            self.written.setdefault(data, []).append(token)

    def compiled(self, kind: str, text: str) -> Any:
        """Return a matcher at the beginning of a text. Raises ValueError for a grammar that is wrong."""
        if kind == "schema":
            grammar = self.matcher.grammar_from_json_schema(text, overrides=STYLE)
        else:
            grammar = self.to_lark("grammar", text)
        matcher = self.matcher(self.known, grammar, log_level=0, limits=self.limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher


class Grammar:
    """A grammar that is compiled. kind: "schema" (JSON) or "grammar" (GBNF or Lark).

    marker: what in a text comes before JSON, whose objects have no key twice; "": all of it is JSON; None: nothing is.
    `shortest` is the number of tokens of a short text, None if none is found. Raises ValueError.
    """

    def __init__(self, vocabulary: Vocabulary, kind: str, text: str, marker: str | None) -> None:
        self.vocabulary = vocabulary
        self.matcher = vocabulary.compiled(kind, text)
        self.marker = None if marker is None else marker.encode()
        self.witnesses = list(_witnesses(text)) if kind == "schema" else []
        self.matcher.deep_copy().compute_bitmask()  # so that all states of the lexer which it needs are there
        ending = Text(self).ending(LONGEST, SECONDS)
        self.shortest = None if ending is None else len(ending)


@dataclass(frozen=True)
class Keys:
    """The keys of the objects that are open after the bytes of JSON text, so that none comes twice."""

    objects: tuple[frozenset[str] | None, ...] = ()  # None: an array
    at_key: bool = False  # the next string of the object is a key
    string: bytes | None = None  # what a string has so far
    escaped: bool = False

    def after(self, data: bytes) -> Keys | None:
        """Return the keys after more bytes; None if an object would have a key twice."""
        objects, at_key, string, escaped = list(self.objects), self.at_key, self.string, self.escaped
        for byte in data:
            if string is not None:
                if escaped or byte != 34:
                    escaped = byte == 92 and not escaped
                    string += bytes((byte,))
                    continue
                keys = objects[-1] if objects else None
                if at_key and keys is not None:
                    key = _key(string)
                    if key in keys:
                        return None
                    objects[-1], at_key = keys | {key}, False
                string = None
            elif byte == 34:
                string = b""
            elif byte in b"{[":
                objects.append(frozenset() if byte == 123 else None)
                at_key = byte == 123
            elif byte in b"}]" and objects:
                objects.pop()
                at_key = False
            elif byte == 44:
                at_key = bool(objects) and objects[-1] is not None
        return Keys(tuple(objects), at_key, string, escaped)

    @property
    def used(self) -> Collection[str]:
        """Return the keys of the innermost object."""
        return (self.objects[-1] or ()) if self.objects else ()

    @property
    def in_key(self) -> bool:
        """Whether a key comes now, or is unfinished."""
        return self.at_key and bool(self.objects) and self.objects[-1] is not None


def _key(data: bytes) -> str:
    try:
        return str(json.loads(b'"' + data + b'"'))
    except ValueError:
        return repr(data)


class Text:
    """A text of a grammar, token by token."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._vocabulary = grammar, grammar.vocabulary
        self._now = grammar.matcher.deep_copy()
        self._keys = Keys() if grammar.marker == b"" else None
        self._tail = b""  # where the marker may be
        self._way: list[int] | None = None  # tokens that lead to the end, once the limit is near

    def mask(self) -> bytes:
        """Return a bit for each token: whether it may come next. Raises ValueError if the grammar is too complex for
        that."""
        mask = self._now.compute_bitmask()
        if not self._now.is_error() and self._keys is not None:
            mask = self._without_keys_twice(bytearray(mask), self._keys)
        if self._now.is_error() or not any(mask):
            raise ValueError(one_line(self._now.get_error()))
        return bytes(mask)

    def accept(self, token: int, remaining: int | None) -> int:
        """Continue with a token, or with one that leads to the end where `remaining` more leave no room; return
        which."""
        if remaining is not None:
            token = self._in_time(token, remaining)
        self._now.consume_token(token)
        self._keys = self._after(self._keys, [token])
        return token

    def ending(self, limit: int, seconds: float = ENDING_SECONDS) -> list[int] | None:
        """Return at most `limit` tokens that lead to an end of the text, None if none are found."""
        return self._ending(self._now, self._keys, limit, seconds)

    def _after(self, keys: Keys | None, tokens: Sequence[int]) -> Keys | None:
        data = bytes(self._vocabulary.known.decode_bytes(list(tokens)))
        marker = self._grammar.marker
        if keys is None and marker:  # free text so far
            before, found, data = (self._tail + data).partition(marker)
            self._tail = before[-len(marker) :]
            keys = Keys() if found else None
        return None if keys is None else keys.after(data)

    def _without_keys_twice(self, mask: bytearray, keys: Keys) -> bytearray:
        """Take the tokens away that would give an object a key twice, or lead to where only such keys are left."""
        if not keys.objects:
            return mask
        least = 2 if keys.string is None else 1 if keys.in_key else 3
        for count in range(least, 4):
            for token, data in self._vocabulary.quotes[count]:
                if mask[token >> 3] >> (token & 7) & 1 and keys.after(data) is None:
                    mask[token >> 3] &= ~(1 << (token & 7))
        if keys.used and (keys.in_key or keys.string is None):
            for token, data in self._leading_to_used(keys):
                if mask[token >> 3] >> (token & 7) & 1 and not self._leads_on(keys, token, data):
                    mask[token >> 3] &= ~(1 << (token & 7))
        return mask

    def _leading_to_used(self, keys: Keys) -> Iterator[tuple[int, bytes]]:
        """Return tokens after which an unfinished key may be the beginning of one that is there already."""
        if not keys.in_key:
            yield from self._vocabulary.commas
            return
        before = keys.string
        for key in keys.used:
            text = json.dumps(key, ensure_ascii=False).encode()
            rest = text if before is None else text[1 + len(before) :] if text[1:].startswith(before) else b""
            for end in range(1, len(rest)):
                yield from ((token, rest[:end]) for token in self._vocabulary.written.get(rest[:end], ()))

    def _leads_on(self, keys: Keys, token: int, data: bytes) -> bool:
        """Whether a token leaves a way to a key that is not there yet, where it leads to a key."""
        after = keys.after(data)
        if after is None or not after.in_key:
            return after is not None
        if after.string is not None and not any(
            json.dumps(key, ensure_ascii=False).encode()[1:].startswith(after.string) for key in after.used
        ):
            return True
        matcher = self._now.deep_copy()
        return bool(matcher.consume_token(token)) and self._has_new_key(matcher, after)

    def _has_new_key(self, matcher: Any, keys: Keys) -> bool:
        """Whether a key can be written that the object does not have. Where that takes long to find out, it can."""
        known = self._vocabulary
        open_: list[tuple[Any, Keys]] = [(matcher, keys)]
        for _ in range(MOST_KEYS_TRIED):
            if not open_:
                return False
            matcher, keys = open_.pop()
            forced = matcher.compute_ff_bytes()
            following = known.known.greedy_tokenize(forced.decode(errors="ignore"))
            if following:
                after = keys.after(known.known.decode_bytes(following))
                if after is None or not matcher.consume_tokens(following):
                    continue
                keys = after
            if not keys.in_key:
                return True
            candidates = []
            for token in known.closing:
                if matcher.validate_tokens([token]):
                    after = keys.after(known.known.decode_bytes([token]))
                    if after is not None and not after.in_key:
                        return True
                    if after is not None:
                        candidates.append((token, after))
            for token, after in reversed(candidates):
                branch = matcher.deep_copy()
                branch.consume_token(token)
                open_.append((branch, after))
        return True

    def _in_time(self, token: int, remaining: int) -> int:
        """Return the token if a text that goes on with it can end within `remaining` more tokens, else one that leads
        to the end."""
        ends = self._vocabulary.known.eos_tokens
        way = self._ending(self._now, self._keys, remaining) if self._way is None else self._way
        if token in ends or way is None:
            return token
        after = self._now.deep_copy()
        after.consume_token(token)
        self._way = self._ending(after, self._after(self._keys, [token]), remaining - 1)
        if self._way is None:  # the way found before is long enough: the search may find a longer one from here
            token, *self._way = way or ends
        return token

    def _ending(self, matcher: Any, keys: Keys | None, limit: int, seconds: float = ENDING_SECONDS) -> list[int] | None:
        matcher, known = matcher.deep_copy(), self._vocabulary.known
        tokens: list[int] = []
        used = Counter[int]()
        until = process_time() + seconds
        while not matcher.is_accepting():
            following = known.greedy_tokenize(matcher.compute_ff_bytes().decode(errors="ignore"))
            if not self._fits(matcher, keys, following):
                following = self._single(matcher, keys, used)
            if not following or len(tokens) + len(following) > limit or not matcher.consume_tokens(following):
                return None
            if process_time() > until:
                return None
            keys = None if keys is None else keys.after(known.decode_bytes(following))
            tokens += following
        return tokens if len(tokens) <= limit else None

    def _fits(self, matcher: Any, keys: Keys | None, tokens: Sequence[int]) -> bool:
        if not tokens or matcher.validate_tokens(tokens) < len(tokens):
            return False
        return keys is None or keys.after(self._vocabulary.known.decode_bytes(tokens)) is not None

    def _single(self, matcher: Any, keys: Keys | None, used: Counter[int]) -> list[int]:
        """Return what ends a text soonest: a character that closes something, the end of a text that a pattern
        requires, or another character. Characters that a pattern repeats take turns."""
        closing, known = self._vocabulary.closing, self._vocabulary.known
        ends = [known.greedy_tokenize(witness) for witness in self._grammar.witnesses]
        # a quotation mark closes a string, in which the other closers are characters like any
        for tokens in ([closing[0]], *ends, *([token] for token in closing[1:CLOSERS])):
            if self._fits(matcher, keys, tokens):
                return list(tokens)
        possible = [token for token in closing[CLOSERS:] if self._fits(matcher, keys, [token])]
        chosen = sorted(possible, key=used.__getitem__)[:1]
        used.update(chosen)
        return chosen


def _witnesses(schema: str) -> Iterator[str]:
    """Return ends of strings, with their quotation mark, that match patterns and formats of a schema; the shortest
    first."""
    texts: dict[str, None] = {}
    for part in _everywhere(json.loads(schema)):
        text = _shortest_match(part["pattern"]) if isinstance(part.get("pattern"), str) else None
        if text is None and isinstance(part.get("format"), str):
            text = FORMATS.get(part["format"])
        if text and len(text) <= LONGEST_WITNESS:
            texts[json.dumps(text)[1:]] = None
    ends = {text[begin:]: None for text in islice(texts, MOST_WITNESSES) for begin in range(len(text) - 1)}
    return iter(sorted(ends, key=len))


def _everywhere(schema: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _everywhere(part)


def _shortest_match(pattern: str) -> str | None:
    """Return a short text in which a regular expression is found; None if this is not known."""
    try:  # not public: another Python may not have it
        import re._compiler as compiler  # type: ignore[import-not-found]

        kinds = parser = compiler._parser
    except (ImportError, AttributeError):
        return None

    def text(parts: Any) -> str:
        return "".join(map(one, parts))

    def one(part: tuple[Any, Any]) -> str:
        kind, value = part
        if kind is kinds.AT:
            return ""
        if kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT):
            return text(value[2]) * min(value[0], LONGEST_WITNESS + 1)
        if kind is kinds.SUBPATTERN:
            return text(value[-1])
        if kind is kinds.BRANCH:
            return min(map(text, value[1]), key=len)
        if kind is kinds.LITERAL:
            return chr(value)
        character = compiler.compile(parser.SubPattern(parser.State(), [part]))
        return next(one for one in map(chr, (*range(48, 127), *range(32, 48))) if character.fullmatch(one))

    try:
        return text(parser.parse(pattern))
    except Exception:  # a pattern that Python does not know: the search goes on without it
        return None


def place_of(vocabulary: Vocabulary, text: str) -> list[str]:
    """Return [place, problem] of the innermost part of a schema that cannot be compiled, as far as it is found in
    time."""
    schema = json.loads(text)
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    until = process_time() + PROBLEM_SECONDS

    def problem(part: Mapping[str, Any]) -> str:
        try:
            vocabulary.compiled("schema", json.dumps({**definitions, **part}))
        except ValueError as error:
            return one_line(error)
        return ""

    def problems(part: Mapping[str, Any], place: str) -> Iterator[tuple[str, str]]:
        if process_time() < until and (sentence := problem(part)):
            yield place, sentence
            for path, inner in parts_of(part):
                yield from problems(inner, f"{place}/{path}")

    places = islice(problems(schema, "#"), MOST_PROBLEMS)
    return list(max(places, key=lambda place: place[0].count("/"), default=()))


def parts_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return (place, schema) of the schemas directly inside one."""
    for key, value in schema.items():
        if key in SUBSCHEMAS and isinstance(value, Mapping):
            named: Sequence[tuple[str, Any]] = [(f"{key}/{name}", part) for name, part in value.items()]
        elif isinstance(value, list) and key not in ("enum", "examples", "required"):
            named = [(f"{key}/{index}", part) for index, part in enumerate(value)]
        else:
            named = [] if key in ("const", "default") else [(key, value)]
        yield from ((path, part) for path, part in named if isinstance(part, Mapping))


if __name__ == "__main__":
    main()
