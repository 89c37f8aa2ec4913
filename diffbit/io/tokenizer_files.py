"""Reads the files of a model's tokenizer from a folder (converting a SentencePiece model: sentencepiece.py), or
makes them from the metadata of a GGUF file.

llama.cpp stores a tokenizer as tokens, their types, merges or scores, and the name of the regular expression that cuts
text into words (src/llama-vocab.cpp). `tokenizers` builds a tokenizer.json from them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .errors import DiffbitError, needs
from .fields import bounds, located, shown
from .files import check_within, parse_json
from .gguf import GGUF, find_gguf, read_gguf
from .model_files import TOOL_TEMPLATE
from .sentencepiece import CONTROL, SENTENCEPIECE, USER_DEFINED, bpe, from_sentencepiece, merges, put_around, spaces

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
TOKENIZER_FILES = (TOKENIZER, CONFIG, "special_tokens_map.json", "generation_config.json", TEMPLATE)

ADDED, LAST = "added_tokens.json", 1 << 62
MOST_BYTES = 128 << 20  # of a tokenizer.json; with a vocabulary of 256,000 tokens it has 33 MB
MOST_GROWTH = 10_000  # maximum factor by which a tokenizer may lengthen a text

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CAPITALIZED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TEKKEN = CAPITALIZED + "|" + UPPER + r"|\p{N}" + SIGNS
O200K = CAPITALIZED + SHORT + "|" + UPPER + SHORT + r"|\p{N}{1,3}" + SIGNS
LLAMA3_BOS = 128000, "<|begin_of_text|>"  # (id, text) of the first token that Llama 3 adds to its vocabulary
# tokenizer.ggml.pre: (regular expressions, in order; whether a word that is a token skips merges; whether bos is added)
WORDS: dict[str, tuple[tuple[str, ...], bool, bool]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais"), ((GPT2,), False, False)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "minerva-7b"), ((r"\p{N}", GPT2), False, False)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), ((LLAMA3,), True, True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), ((LLAMA3,), False, False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), ((LLAMA3.replace("{1,3}", ""),), False, False)),
    "tekken": ((TEKKEN,), True, True),
    "gpt-4o": ((O200K,), False, False),
}


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """Return the content of tokenizer.json and the files beside it, by file name; empty if there are none.

    path: a folder, a tokenizer.json or tokenizer.model in one, or a GGUF file. Raises DiffbitError for a file that
    cannot be read, or a GGUF file with a tokenizer that diffbit does not support.
    """
    gguf = None if (path / TOKENIZER).is_file() else find_gguf(path)
    if gguf is not None:
        return from_gguf(read_gguf(gguf))
    if not path.exists():
        raise DiffbitError(f"{path}: no such file or folder")
    folder = path if path.is_dir() else path.parent
    paths = {name: folder / name for name in TOKENIZER_FILES}
    if path.is_file() and path.name not in (TOKENIZER, SENTENCEPIECE):
        paths = {TOKENIZER: path}
    pieces = path if path.name == SENTENCEPIECE else folder / SENTENCEPIECE
    convert = pieces.is_file() and (path == pieces or not paths[TOKENIZER].is_file())
    for file in {pieces, *paths.values()} - {path}:  # path itself was asked for, wherever it leads
        check_within(folder, file)
    try:
        contents = {name: file.read_bytes() for name, file in paths.items() if file.is_file()}
    except OSError as error:
        raise DiffbitError(f"{path}: its tokenizer cannot be read ({error.strerror})") from None
    tools = folder / TOOL_TEMPLATE
    if tools.is_file() and TEMPLATE in contents:  # named templates, in the one file that an artifact can hold
        check_within(folder, tools)
        config = parse_json(contents.get(CONFIG, b"{}"), folder / CONFIG)
        texts = {"default": contents.pop(TEMPLATE), "tool_use": tools.read_bytes()}
        named = [{"name": name, "template": text.decode(errors="replace")} for name, text in texts.items()]
        contents[CONFIG] = json.dumps(config | {"chat_template": named}, indent=2, ensure_ascii=False).encode()
    if convert:
        return contents | {TOKENIZER: from_sentencepiece(pieces)}
    further = _further_tokens(folder, contents)
    if not further or TOKENIZER not in contents:
        return contents
    return contents | {TOKENIZER: _with_tokens(contents[TOKENIZER], further, paths[TOKENIZER])}


def _further_tokens(folder: Path, contents: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    """Return the tokens {text: {"id", "special", ...}} that other files than tokenizer.json name and it does not add:
    those of added_tokens_decoder in tokenizer_config.json, or else of added_tokens.json, and additional_special_tokens
    of tokenizer_config.json and special_tokens_map.json; as transformers does."""

    def parsed(name: str) -> dict[str, Any]:
        return parse_json(contents[name], folder / name) if name in contents else {}

    config, named = parsed(CONFIG), parsed("special_tokens_map.json")
    decoder = config.get("added_tokens_decoder")
    tokens: dict[str, dict[str, Any]] = {}
    if isinstance(decoder, dict) and decoder:
        entries = ({"id": id, **entry} for id, entry in decoder.items() if isinstance(entry, dict))
        tokens = {str(entry.get("content")): entry for entry in entries}
    elif (added := folder / ADDED).is_file():
        check_within(folder, added)
        tokens = {text: {"id": id} for text, id in parse_json(added.read_bytes(), added).items()}
    special = [config.get("additional_special_tokens"), named.get("additional_special_tokens")]
    for token in (token for listed in special if isinstance(listed, list) for token in listed):
        entry = token if isinstance(token, dict) else {"content": token, "normalized": False}
        if isinstance(entry.get("content"), str):
            tokens.setdefault(entry["content"], entry)
            tokens[entry["content"]]["special"] = True
    known = contents.get(TOKENIZER, b"")
    # most files have all of them, and looking for their texts is faster than parsing 30 MB of JSON
    return {
        text: entry
        for text, entry in tokens.items()
        if not any(f'"content":{space}{json.dumps(text, ensure_ascii=False)}'.encode() in known for space in ("", " "))
    }


def _with_tokens(data: bytes, tokens: dict[str, dict[str, Any]], path: Path) -> bytes:
    """Return a tokenizer.json with further added tokens. Raises DiffbitError if they would not have their ids."""
    from tokenizers import AddedToken

    backend = open_tokenizer(data, path, keep=True)
    for text, entry in tokens.items():
        if "id" in entry and not re.fullmatch("[0-9]{1,10}", str(entry["id"])):
            raise DiffbitError(
                f"{path.parent}: the added token {shown(text)} has the id {shown(entry['id'])}, wanted a number"
            )
    for text, entry in sorted(tokens.items(), key=lambda item: int(item[1].get("id", LAST))):
        flags = {name: bool(entry[name]) for name in ("lstrip", "rstrip", "single_word", "normalized") if name in entry}
        backend.add_tokens([AddedToken(text, special=bool(entry.get("special", False)), **flags)])
        id = backend.token_to_id(text)
        if "id" in entry and id != int(entry["id"]):
            raise DiffbitError(
                f"{path}: the added token {text!r} has id {entry['id']} in the files beside it, but {id} after the "
                "tokens of this file; the files do not belong together"
            )
    return backend.to_str().encode()


def open_tokenizer(data: bytes, path: Path, *, keep: bool = False) -> Tokenizer:
    """Return the tokenizer in `data`, the bytes of a tokenizer.json, without the padding and truncation that it may
    set.

    path: for messages. keep: keep these. Raises DiffbitError if it is not a tokenizer, is too large, or may make a text
    too long.
    """
    with needs("tokenizers", "cpu", "reading a tokenizer.json"):
        import tokenizers
    if len(data) > MOST_BYTES:
        raise DiffbitError(f"{path}: is larger than {MOST_BYTES >> 20} MiB, too large for a tokenizer.json")
    with tokenizer_errors(path, "is not a tokenizer.json that tokenizers can read"):
        backend = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        if not keep:
            backend.no_padding()
            backend.no_truncation()
        parts = {part: getattr(backend, part) for part in ("normalizer", "pre_tokenizer", "decoder")}
        growth = {part: _growth(json.loads(state.__getstate__())) for part, state in parts.items() if state is not None}
    for part, times in growth.items():
        if times > MOST_GROWTH:
            raise DiffbitError(f"{path}: its {part} may make a text {times:.0e} times as long; restore the file")
    return backend


@contextmanager
def tokenizer_errors(path: Path, what: str) -> Iterator[None]:
    """Turn errors of `tokenizers` (bare Exceptions, and panics, which are BaseExceptions) into a DiffbitError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise DiffbitError(f"{path}: {what} ({reason}); restore the file") from None


def _growth(part: object) -> float:
    """Return an upper bound on the factor by which a text grows. A replacement can double it; forty of them reach
    2^40."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1
    if part.get("type") == "ByteLevel":
        return 2  # a byte above 127 becomes a two-byte character
    if part.get("type") != "Replace":
        return math.prod(map(_growth, part.values()))
    pattern, content = part["pattern"], len(part["content"])
    if "String" in pattern:
        return max(1, content / len(pattern["String"])) if pattern["String"] else 1 + content
    return 1 + content  # a regular expression may match between characters


def from_gguf(header: GGUF) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja from a GGUF file; empty without a tokenizer."""
    with located(header.file):
        model, template = (header.get(f"tokenizer.{key}", str) for key in ("ggml.model", "chat_template"))
    if model in (None, "none", "no_vocab"):
        return {}
    with needs("tokenizers", "cpu", "reading the tokenizer of a GGUF file"), located(header.file):
        if model == "gpt2":
            backend, add_bos = _byte_level(header)
        elif model == "llama":
            backend, add_bos = _sentencepiece(header), True
        else:
            raise DiffbitError(f"its tokenizer is {model!r}, wanted 'gpt2' (BPE) or 'llama' (SentencePiece)")
        options = _special_tokens(header, backend, add_bos)
    texts = {TOKENIZER: backend.to_str(pretty=True), "tokenizer_config.json": json.dumps(options, indent=2)}
    if template:
        texts["chat_template.jinja"] = template
    if sampling := _sampling(header):
        texts["generation_config.json"] = json.dumps(sampling, indent=2)
    return {name: text.encode() for name, text in texts.items()}


def _sampling(header: GGUF) -> dict[str, Any]:
    """Return how the model's authors sample from it, as a generation_config.json says it; empty if the file does not
    say."""
    kinds = {"temp": float, "top_k": int, "top_p": float, "min_p": float, "penalty_repeat": float}
    names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    with located(header.file):
        values = {names.get(key, key): header.get(f"general.sampling.{key}", kind) for key, kind in kinds.items()}
    given = {name: value for name, value in values.items() if value is not None}
    if given.get("top_k", 0) < 0:  # llama.cpp's word for no limit
        given["top_k"] = 0
    return {"do_sample": True, **given} if given else {}


def _byte_level(header: GGUF) -> tuple[Tokenizer, bool]:
    """Return a byte-level BPE (bytes are written as letters, as in GPT-2), and whether bos is added by default."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

    tokens, (id, bos) = _tokens(header), LLAMA3_BOS
    default = "llama-bpe" if tokens[id : id + 1] == [bos] else None  # BitNet b1.58 2B4T's file does not say it
    pre = header.get("tokenizer.ggml.pre", str, default)
    if pre not in WORDS:
        raise DiffbitError(f"its pre-tokenizer is {pre!r}, wanted one of {', '.join(WORDS)}")
    words, whole, add_bos = WORDS[pre]
    merged = header.array("tokenizer.ggml.merges", str)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merged)]
    backend = Tokenizer(bpe(tokens, pairs, ignore_merges=whole))
    cuts = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in words]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, add_bos


def _sentencepiece(header: GGUF) -> Tokenizer:
    """SentencePiece's BPE, in which the scores order the merges."""
    from tokenizers import Tokenizer

    pieces, unknown = _tokens(header), _special(header, "unknown")
    scores = header.array("tokenizer.ggml.scores", float)
    if len(scores) != len(pieces):
        raise DiffbitError(
            f"tokenizer.ggml.scores has {len(scores)} entries, wanted one for each of {len(pieces)} tokens"
        )
    extra = {} if unknown is None else {"unk_token": unknown}
    backend = Tokenizer(bpe(pieces, merges(pieces, scores), fuse_unk=True, byte_fallback=True, **extra))
    spaces(backend, prefix=header.get("tokenizer.ggml.add_space_prefix", bool, True), legacy=False)
    return backend


def _tokens(header: GGUF) -> list[str]:
    tokens = header.array("tokenizer.ggml.tokens", str)
    if not tokens:
        raise DiffbitError("tokenizer.ggml.tokens is missing, wanted a list of texts; copy the file again")
    return tokens


def _special(header: GGUF, name: str) -> str | None:
    """Return the text of the token that the metadata name, such as "eos"."""
    tokens = _tokens(header)
    id = header.get(f"tokenizer.ggml.{name}_token_id", Annotated[int, bounds(0, len(tokens) - 1)])
    return None if id is None else tokens[id]


def _special_tokens(header: GGUF, backend: Tokenizer, add_bos: bool) -> dict[str, Any]:
    """Add the special tokens to the tokenizer. Returns the fields of tokenizer_config.json."""
    from tokenizers import AddedToken

    for token, kind in zip(_tokens(header), header.array("tokenizer.ggml.token_type", int), strict=False):
        if kind in (CONTROL, USER_DEFINED):
            backend.add_tokens([AddedToken(token, normalized=False, special=bool(kind == CONTROL))])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {name: _special(header, key) for name, key in names.items()}
    given = {name: token for name, token in special.items() if token is not None}
    options: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    options |= {f"{name}_token": token for name, token in given.items()}
    defaults = {"bos": add_bos, "eos": False}
    add = {name: header.get(f"tokenizer.ggml.add_{name}_token", bool, default) for name, default in defaults.items()}
    around = {name: given[name] for name, added in add.items() if added and name in given}
    options |= {f"add_{name}_token": name in around for name in add}
    put_around(backend, around)
    return options
