"""Text sources for calibration, training and evaluation, their splits and hashes.

A source is a string:

    mix                                       prose, languages, dialogues and code (mix.py), for calibration
    stdlib                                    the standard library of the running Python
    path/to/file[:field]                      .jsonl .parquet, .json with a list of objects: a document per row;
                                              any other file that is UTF-8, whatever its ending: one document
    path/to/folder[:field]                    its .txt .md .py .jsonl .parquet; without these, each file that is UTF-8
    hf:NAME[:config][:split][:field]          a Hugging Face dataset: a hub name, or a local folder (also one
                                              written by `save_to_disk`); parts may be empty, as in hf:NAME:::body
    SOURCE=WEIGHT,SOURCE=WEIGHT,...           several of these; their bytes are in proportion to the weights

`load_text` returns one of three disjoint splits, train (90 %), calib (5 %) and eval (5 %). The split of a document
depends on the document alone, so it is the same on every machine and in every order:

- 200 documents or more: the SHA-256 of the document's key, modulo 20, decides (0: eval, 1: calib, else train). The key
  is the text, so two copies of a text are in the same split. For `stdlib` it is the relative path, so a new Python
  release moves no file to another split.
- Fewer than 200 documents: every document is cut into its first 90 % of characters (train), the next 5 % (calib) and
  the last 5 % (eval), each cut moved to the end of its line.
- Fewer than 200 conversations: none is cut, for the end of an answer is what a model must learn. In the order of their
  hashes the first 5 % are eval, the next 5 % calib (at least one each), the others train. One or two are cut as texts.
- A Hugging Face dataset with a "test" or "validation" split, if the source names no split: all of that split is eval,
  and the same two rules divide its "train" split into train (18 of 19) and calib.
- Several sources: each is divided by itself. Of a text that is longer than its share, the end is left out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import sysconfig
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, get_args

from ..io.errors import DiffbitError, needs
from ..io.fields import read
from ..io.files import parse_json
from .mix import Render, mix, plain

Split = Literal["train", "calib", "eval"]
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")  # of files that a folder is read from
WEIGHTS = (".safetensors", ".gguf", ".onnx")
BY_HASH_FROM = 200  # documents; with fewer, a share of 5 % by hash may be empty
ROLES: tuple[str, ...] = ("eval", "calib") + ("train",) * 18  # the split of each twentieth of a source
ORDER = ("train", "calib", "eval")  # of the splits within a document that is cut by position

# Parts of the standard library that are not read: tests and their data, parts that distributions package separately or
# releases remove (the splits would differ between machines), and generated tables, which teach a model nothing.
# fmt: off
STDLIB_SKIPPED = frozenset((
    "test", "tests", "idlelib", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__",
    "lib-dynload", "ensurepip", "distutils", "tkinter", "turtledemo", "encodings", "pydoc_data",
))
# fmt: on
STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize", "config-")

SHAREGPT = {"human": "user", "gpt": "assistant"}  # {sender: role}

Keyed = tuple[str, str]  # (key that decides the split, text)


class Conversation(str):
    """The text of a conversation, which is not cut, and its messages."""

    messages: list[Any]  # each a dictionary with "role" and "content"

    def __new__(cls, text: str, messages: list[Any]) -> Conversation:
        conversation = super().__new__(cls, text)
        conversation.messages = messages
        return conversation


@dataclass(frozen=True)
class Corpus:
    """The documents of one split of a source, in a fixed order."""

    documents: tuple[str, ...]
    sha256: str  # over the documents: length in bytes (8 bytes, little-endian), then the UTF-8 bytes
    source: str
    split: str
    counts: dict[str, int]  # documents, characters, bytes; empty: documents omitted because they have no text


def load_text(
    source: str, split: Split, *, field: str = "text", limit: int | None = None, render: Render | None = None
) -> Corpus:
    """Read one split of a source (see the module's docstring for sources and splits).

    `field` is the key of a .jsonl or .json row or the column of a .parquet file or dataset; a field in the source takes
    precedence; a value may be a conversation, a list of {"role", "content"} or of ShareGPT's {"from", "value"}. `limit`
    stops after that many UTF-8 bytes of the split and truncates the last document there. `render` converts
    conversations to text, such as with the model's chat template; default: mix.plain. Raises DiffbitError if the source
    cannot be read or decoded, has no such field, or leaves the split empty.
    """
    if split not in get_args(Split):
        raise DiffbitError(f"split {split!r} is unknown; choose one of {', '.join(get_args(Split))}")
    if limit is not None and limit < 1:
        raise DiffbitError(f"a limit of {limit} bytes leaves no text of {source}; pass 1 or more")
    weights = shares_of(source)
    if len(weights) == 1:
        documents, empty = _within(_texts(source, split, field, render, streaming=limit is not None), limit, source)
        if not documents:
            raise DiffbitError(f"{source}: no text in the {split} split ({empty} empty documents); give more text")
        return _corpus(documents, source, split, empty)

    limits = [None if limit is None else max(1, int(limit * weight)) for weight in weights.values()]
    corpora = [
        load_text(name, split, field=field, limit=n, render=render) for name, n in zip(weights, limits, strict=True)
    ]
    unit = min(corpus.counts["bytes"] / weights[corpus.source] for corpus in corpora)  # bytes of all of them together
    shares = [
        _within(corpus.documents, max(1, int(unit * weights[corpus.source] + 1e-6)), source)[0] for corpus in corpora
    ]
    return _corpus(chain(*shares), source, split, sum(corpus.counts["empty"] for corpus in corpora))


def shares_of(source: str) -> dict[str, float]:
    """Return the sources that a source consists of, and their weights, which add up to 1; of one source: {source: 1.0}.

    Raises DiffbitError for a weight of 0, for weights whose sum overflows, and for a source given twice.
    """
    parts = [part.rpartition("=") for part in source.split(",")]
    weighted = len(parts) > 1 and all(name and re.fullmatch(r"\d*\.?\d+", weight) for name, _, weight in parts)
    if not weighted or os.path.exists(source):
        return {source: 1.0}
    weights = {name: float(weight) for name, _, weight in parts}
    total = sum(weights.values())
    if len(weights) < len(parts) or not all(weights.values()) or math.isinf(total):
        raise DiffbitError(f"{source}: wanted each text once, with a weight above 0, such as a.jsonl=3,stdlib=1")
    return {name: weight / total for name, weight in weights.items()}


def _texts(source: str, split: Split, field: str, render: Render | None, streaming: bool) -> Iterable[str]:
    """Return the documents of a split of one source, empty ones, too."""
    if (source, split) == ("mix", "train"):
        raise DiffbitError("mix is a text for calibration and evaluation; train on another source, such as stdlib")
    roles, keyed = ROLES, _stdlib()
    if source.startswith("hf:"):
        keyed, roles = _hugging_face(source, split, field, render or plain, streaming=streaming)
    elif source not in ("stdlib", "mix"):
        path, _, own_field = source.rpartition(":")
        path, field = (path, own_field) if path and not os.path.exists(source) else (source, field)
        keyed = ((text, text) for text in _path(Path(path), field, render or plain))
    texts = _of_split(keyed, split, roles)
    return mix(split, texts, render) if source == "mix" else texts


def _within(texts: Iterable[str], limit: int | None, source: str) -> tuple[list[str], int]:
    """Return the documents with text in the first `limit` bytes, the last of them cut there; and how many had no
    text."""
    documents: list[str] = []
    left, empty = math.inf if limit is None else limit, 0
    for text in texts:
        if not text.strip():
            empty += 1
            continue
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate, such as \\ud800 in JSON
            raise DiffbitError(f"{source}: a document contains a lone surrogate, no valid text; repair it") from None
        if len(data) > left:  # keep the characters that fit as a whole
            text = data[: int(left)].decode("utf-8", errors="ignore")
        documents += [text] if text else []
        left -= len(data)
        if left <= 0:
            break
    return documents, empty


def _corpus(texts: Iterable[str], source: str, split: str, empty: int) -> Corpus:
    documents, digest = tuple(texts), hashlib.sha256()
    sizes = [len(text.encode()) for text in documents]
    for size, text in zip(sizes, documents, strict=True):
        digest.update(size.to_bytes(8, "little") + text.encode())
    characters = sum(map(len, documents))
    counts = {"documents": len(documents), "characters": characters, "bytes": sum(sizes), "empty": empty}
    return Corpus(documents, digest.hexdigest(), source, split, counts)


def _of_split(keyed: Iterable[Keyed], split: str, roles: tuple[str, ...]) -> Iterator[str]:
    """Return the documents of one split, or their parts. `roles` names the split of each equal part of the source."""
    iterator = iter(keyed)
    first = list(islice(iterator, BY_HASH_FROM))
    if len(first) == BY_HASH_FROM:
        for key, text in chain(first, iterator):
            if roles[_hash(key) % len(roles)] == split:
                yield text
        return
    held_out = [role for role in dict.fromkeys(roles) if role != "train"] if "train" in roles else []
    if len(first) > len(held_out) and all(isinstance(text, Conversation) or not text for _, text in first):
        order = sorted(range(len(first)), key=lambda index: (_hash(first[index][0]), index))
        places = {}
        for role in held_out:
            count = max(1, len(first) * roles.count(role) // len(roles))
            places[role], order = order[:count], order[count:]
        chosen = set(places.get(split, order))
        yield from (text for index, (_, text) in enumerate(first) if index in chosen)
        return
    begin = sum(ORDER.index(role) < ORDER.index(split) for role in roles)
    end = begin + roles.count(split)
    for _, text in first:
        yield text[_line_end(text, begin, len(roles)) : _line_end(text, end, len(roles))]


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", errors="surrogatepass")).digest()[:8], "big")


def _line_end(text: str, numerator: int, denominator: int) -> int:
    """Position after the first line break at or after numerator/denominator of the text; there if none follows."""
    position = len(text) * numerator // denominator
    if position in (0, len(text)):
        return position
    newline = text.find("\n", position - 1)
    return newline + 1 if 0 <= newline < len(text) - 1 else position


def _stdlib() -> Iterator[Keyed]:
    root = Path(sysconfig.get_path("stdlib"))
    skip = (*STDLIB_SKIPPED_PREFIXES, ".")
    for path in _walk(root, (".py",), lambda name: name in STDLIB_SKIPPED or name.startswith(skip)):
        yield path.relative_to(root).as_posix(), _decode(path)


def _path(path: Path, field: str, render: Render) -> Iterator[str]:
    if path.is_dir():
        files = list(_walk(path, SUFFIXES, _is_hidden))
        if not files:
            everything = list(_walk(path, ("",), _is_hidden))
            if weights := [file for file in everything if file.suffix.lower() in WEIGHTS]:
                raise DiffbitError(f"{path}: is the folder of a model ({weights[0].name}), and text was wanted")
            files = list(filter(_is_text, everything))
        if not files:
            raise DiffbitError(f"{path}: holds no file that can be read as text")
    elif path.is_file():
        files = [path]
    else:
        raise DiffbitError(
            f"{path}: no such file or folder; a source is 'mix', 'stdlib', a file, a folder, or hf:NAME for a dataset"
        )
    readers = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
    for file in files:
        read = readers.get(file.suffix.lower())
        yield from (_decode(file),) if read is None else read(file, field, render)


def _is_hidden(name: str) -> bool:
    return name == "__pycache__" or name.startswith(".")


def _is_text(path: Path) -> bool:
    try:
        return bool(_decode(path))
    except DiffbitError:
        return False


def _walk(root: Path, suffixes: tuple[str, ...], skipped: Callable[[str], bool]) -> Iterator[Path]:
    """Files below `root` with one of the suffixes, sorted by relative POSIX path. Does not follow links to folders."""
    paths: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not skipped(name)]
        paths += [Path(folder, name) for name in files if name.lower().endswith(suffixes) and not skipped(name)]
    yield from sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def _decode(path: Path) -> str:
    """Return the text of a file. Raises DiffbitError if it is not UTF-8, and for a model's weights."""
    try:
        with open(path, "rb") as file:
            head = file.read(16)
            if kind := _kind_of_weights(head, path.stat().st_size):
                raise DiffbitError(f"{path}: holds the weights of a model ({kind}), and text was wanted")
            data = head + file.read()
    except OSError as error:
        raise DiffbitError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if data[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else "LATIN1"
        raise DiffbitError(
            f"{path}: is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02X}); if it is text, convert it, "
            f"e.g. with iconv -f {encoding} -t UTF-8"
        ) from None


def _kind_of_weights(head: bytes, size: int) -> str | None:
    """Return the format of a file with a model's weights; None for another file."""
    if head.startswith(b"GGUF"):
        return "GGUF"
    is_safetensors = head[8:9] == b"{" and int.from_bytes(head[:8], "little") + 8 <= size  # the length of a JSON header
    return "safetensors" if is_safetensors else None


def _json(path: Path, field: str, render: Render) -> Iterator[str]:
    """Return the rows of a list of objects; another JSON is text like any other."""
    text = _decode(path)
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        rows = None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        yield text
        return
    for number, row in enumerate(rows):
        place = f"{path}: row {number}"
        if field not in row:
            raise _no_field(place, field, row)
        yield _text(row[field], f"{place}: {field}", render)


def _jsonl(path: Path, field: str, render: Render) -> Iterator[str]:
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                place = f"{path}: line {number}"
                row = parse_json(line.removeprefix(BOM_UTF8) if number == 1 else line, place)
                if field not in row:
                    raise _no_field(place, field, row)
                yield _text(row[field], f"{place}: {field}", render)
    except OSError as error:
        raise DiffbitError(f"{path}: cannot be read ({error.strerror})") from None


def _parquet(path: Path, column: str, render: Render) -> Iterator[str]:
    with needs("pyarrow", "lab", f"reading {path.name}"):
        import pyarrow
        import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise _no_field(str(path), column, file.schema_arrow.names)
            batches = file.iter_batches(columns=[column], batch_size=1024)
            for row, value in enumerate(value for batch in batches for value in batch.column(0)):
                yield _text(value.as_py(), f"{path}: row {row}: {column}", render)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DiffbitError(f"{path}: is not a readable parquet file ({_first_line(error)})") from None


def _text(value: object, place: str, render: Render) -> str:
    if isinstance(value, list):
        value = [_message(message) for message in value]
        for index, message in enumerate(value):
            for key in ("role", "content"):
                read(str, message.get(key) if isinstance(message, dict) else message, f"{place}[{index}].{key}")
        return Conversation(render(value), value) if value else ""
    return read(str | None, value, place) or ""  # null is counted as an empty document


def _message(message: object) -> object:
    """Return a message of {"role", "content"}; ShareGPT's are {"from": "human" or "gpt", "value"}."""
    if not isinstance(message, dict) or "from" not in message or "role" in message:
        return message
    sender = message["from"]
    role = SHAREGPT.get(sender, sender) if isinstance(sender, str) else sender
    return {"role": role, "content": message.get("value")}


def _no_field(where: str, field: str, fields: Iterable[str]) -> DiffbitError:
    return DiffbitError(f"{where}: has no field {field!r}; the fields are {', '.join(sorted(fields)) or 'none'}")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"


def _hugging_face(
    source: str, split: str, field: str, render: Render, *, streaming: bool
) -> tuple[Iterator[Keyed], tuple[str, ...]]:
    """Return the rows of the dataset's split that contains `split`, and the split of each of its equal parts."""
    with needs("datasets", "lab", f"reading {source}"):
        import datasets
    fields = source.removeprefix("hf:").split(":")
    if not fields[0] or len(fields) > 4:
        raise DiffbitError(f"{source}: wanted hf:NAME[:config][:split][:field]")
    name, config, own_split, own_field = fields + [""] * (4 - len(fields))
    log = logging.getLogger("huggingface_hub")  # it logs each of five retries; one error at the end is enough
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        if any(Path(name, marker).is_file() for marker in ("dataset_dict.json", "state.json")):
            data: Any = datasets.load_from_disk(name)
        else:
            data = datasets.load_dataset(name, config or None, streaming=streaming)
    except Exception as error:  # from any of requests, httpx, fsspec, huggingface_hub, datasets, ...
        raise DiffbitError(
            f"{source}: the dataset cannot be loaded ({_first_line(error)}); check its name and config, or without a "
            "network use a file, a folder or 'stdlib'"
        ) from None
    finally:
        log.setLevel(level)
    splits: dict[str, Any] = dict(data) if isinstance(data, dict) else {"train": data}

    roles = ROLES
    chosen = own_split or "train"
    held_out = [name for name in ("test", "validation") if name in splits]
    if held_out and not own_split:
        chosen, roles = (held_out[0], ("eval",)) if split == "eval" else ("train", ROLES[1:])
    if chosen not in splits:
        raise DiffbitError(f"{source}: has no split {chosen!r}; choose one of {', '.join(splits)}")
    columns = splits[chosen].column_names  # None if a stream's columns are unknown before it is read
    field = own_field or field
    if columns is not None and field not in columns:
        raise _no_field(source, field, columns)
    return _rows(splits[chosen], field, source, render), roles


def _rows(dataset: Any, field: str, source: str, render: Render) -> Iterator[Keyed]:
    try:
        for number, row in enumerate(dataset.select_columns([field])):
            text = _text(row[field], f"{source}: row {number}: {field}", render)
            yield text, text
    except DiffbitError:
        raise
    except Exception as error:  # a stream that ends early, from any of the same packages
        raise DiffbitError(f"{source}: reading the dataset failed ({_first_line(error)})") from None
