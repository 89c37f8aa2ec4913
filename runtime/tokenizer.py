"""Converts text to token ids and back, also while the ids are still being generated.

A token of a byte-level BPE may end in the middle of a UTF-8 character. Decoders show the unfinished bytes as U+FFFD, so
a stream returns text up to its trailing U+FFFDs, and the rest when it ends. It decodes a window that starts at the last
token known to end a character, not token by token, because the text of a token may depend on the one before it (a
leading space, a run of byte tokens).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from ..io.errors import DiffbitError
from ..io.tokenizer_files import MOST_BYTES, open_tokenizer, tokenizer_errors

REPLACEMENT = "\ufffd"
# Characters that stand for bytes in a byte-level vocabulary (GPT-2)
_SHOWN = {*range(33, 127), *range(161, 173), *range(174, 256)}
BYTES = {*map(chr, _SHOWN), *(chr(256 + index) for index in range(256 - len(_SHOWN)))}
LONG = 1 << 15  # characters of a text that is encoded without the interpreter's lock
CONTEXT = 8  # prompt tokens at the start of a stream: enough for any character or leading space


class Tokenizer:
    """A `tokenizer.json`, read by the library `tokenizers`. Raises DiffbitError for a file that it cannot read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise DiffbitError(f"{path}: cannot be read ({error})") from None
        self._tokenizer: Any = open_tokenizer(data, self.path)

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, including added ones; a model's embedding may have more rows."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def as_json(self) -> str:
        """Return the tokenizer as text, which other libraries read."""
        return str(self._tokenizer.to_str())

    def token_id(self, token: str) -> int | None:
        """Return the id of a token such as "<|im_end|>"; None if the vocabulary does not have it."""
        number = self._tokenizer.token_to_id(token)
        return None if number is None else int(number)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids of `text`, with or without the special tokens that the tokenizer adds (often a leading
        bos)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # stray bytes in stdin or in arguments become lone surrogates
            raise DiffbitError(f"the text to encode is not UTF-8 after {error.start} characters") from None
        with tokenizer_errors(self.path, "fails to encode a text"):
            if len(text) > LONG:  # `encode` keeps the interpreter's lock: seconds for a megabyte
                (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            else:
                encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return list(encoding.ids)

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has at least, without encoding it; 0 if nothing is known of this
        tokenizer."""
        unit, longest = self._longest_token
        size = len(text.encode(errors="replace")) if unit == "bytes" else len(text)
        return -(-size // longest) if longest else 0

    @cached_property
    def _longest_token(self) -> tuple[str, int]:
        return _longest_token(json.loads(self.as_json()))

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of `token_ids`, without special tokens; bytes that form no character become U+FFFD."""
        with tokenizer_errors(self.path, "fails to decode tokens"):
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stream(self, prompt_ids: Iterable[int] = ()) -> TextStream:
        """Decode the tokens that follow `prompt_ids`, one by one."""
        return TextStream(self, list(prompt_ids)[-CONTEXT:])


class TextStream:
    """The text of tokens that arrive one by one. All texts joined are what the tokens after the prompt decode to."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._window = context  # the first `_complete` tokens end with a whole character; then the tokens since
        self._complete = len(context)
        # Number of the window's characters already returned; a character that began in the prompt is returned whole
        self._returned = len(tokenizer.decode(context).rstrip(REPLACEMENT))

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes; empty while a character is unfinished, and for special tokens."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        end = len(text.rstrip(REPLACEMENT))
        new = text[self._returned : end]
        self._returned = max(self._returned, end)
        if new and end == len(text):  # a character ends here: the next window starts with the tokens since the last end
            del self._window[: self._complete]
            self._returned = len(self._tokenizer.decode(self._window))
            self._complete = len(self._window)
        return new

    def finish(self) -> str:
        """Return the remaining text after the last token: U+FFFD for an unfinished character."""
        text = self._tokenizer.decode(self._window)
        new = text[self._returned :]
        self._returned = len(text)
        return new


def _longest_token(about: Any) -> tuple[str, int]:
    """Return how much text a token of a tokenizer.json stands for at most: in bytes for a byte-level BPE, in
    characters for one that falls back to bytes; 0: any length, because it leaves something out or has a token for
    unknown words."""
    nothing = "bytes", 0
    model, added = about["model"], about["added_tokens"]
    normalizers, before = _parts(about["normalizer"], "normalizers"), _parts(about["pre_tokenizer"], "pretokenizers")
    kinds = {part["type"] for part in normalizers}
    in_bytes = any(part["type"] == "ByteLevel" for part in before)
    alphabet = BYTES if in_bytes else {f"<0x{byte:02X}>" for byte in range(256)}
    if model["type"] != "BPE" or not alphabet <= model["vocab"].keys() or not (in_bytes or model["byte_fallback"]):
        return nothing
    if kinds - {"NFC", "Replace", "Prepend"} or any(token["lstrip"] or token["rstrip"] for token in added):
        return nothing
    if any(
        part["type"] not in ("ByteLevel", "Split", "Digits") or part.get("behavior") == "Removed" for part in before
    ):
        return nothing
    replaced = [(part["pattern"].get("String"), part["content"]) for part in normalizers if part["type"] == "Replace"]
    if any(old is None or len(new) < len(old) for old, new in replaced):
        return nothing
    # a character of a byte-level vocabulary is a byte; NFC makes at most four bytes one
    longest = max(map(len, model["vocab"]))
    of_added = max((len(token["content"].encode()) for token in added), default=1)
    return "bytes" if in_bytes else "characters", max(longest, of_added) * (4 if "NFC" in kinds else 1)


def _parts(part: Any, key: str) -> list[Any]:
    """Return the steps of a normalizer or pre-tokenizer, which may be a sequence of them."""
    if part is None:
        return []
    return [step for inner in part[key] for step in _parts(inner, key)] if part["type"] == "Sequence" else [part]
