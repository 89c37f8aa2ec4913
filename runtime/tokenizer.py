"""Text to token ids and back, also while the ids are still being generated.

A token of a byte-level BPE may end in the middle of a UTF-8 character. Decoders show the unfinished bytes as U+FFFD, so
a stream returns text up to its trailing U+FFFDs, and the rest when it ends. It decodes a window that starts at the last
token known to end a character, not token by token, because the text of a token may depend on the one before it (a
leading space, a run of byte tokens).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import DiffbitError, MissingDependency

REPLACEMENT = "\ufffd"
MOST_BYTES = 128 << 20  # of a file; that of a vocabulary of 256,000 tokens has 33 MB
MOST_GROWTH = 10_000  # of a text's length
CONTEXT = 8  # prompt tokens that a stream starts from: enough for any character or leading space


class Tokenizer:
    """A `tokenizer.json`, read by the library `tokenizers`. Raises DiffbitError for a file that it cannot read."""

    def __init__(self, path: str | Path) -> None:
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise MissingDependency("tokenizers", "cpu", "reading a tokenizer.json") from None
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
            text = data.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DiffbitError(f"{path}: cannot be read ({error})") from None
        if len(data) > MOST_BYTES:
            raise DiffbitError(f"{path}: is larger than {MOST_BYTES >> 20} MiB, so it is no tokenizer.json")
        with self._errors("is not a tokenizer.json that tokenizers can read"):
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(text)
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()  # a file may ask for both, but a prompt is encoded as it is
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            state = getattr(self._tokenizer, part)
            if state is not None and (growth := _growth(json.loads(state.__getstate__()))) > MOST_GROWTH:
                raise DiffbitError(f"{path}: its {part} may make a text {growth:.0e} times as long; restore the file")

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may have more rows."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def token_id(self, token: str) -> int | None:
        """The id of a token such as "<|im_end|>"; None where the vocabulary lacks it."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer adds (often a leading bos) or without."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # stray bytes in stdin or in arguments become lone surrogates
            raise DiffbitError(f"the text to encode is not UTF-8 after {error.start} characters") from None
        with self._errors("fails to encode a text"):
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of `token_ids`, without special tokens; bytes that form no character read as U+FFFD."""
        with self._errors("fails to decode tokens"):
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stream(self, prompt_ids: Iterable[int] = ()) -> TextStream:
        """Decode the tokens that follow `prompt_ids`, one by one."""
        return TextStream(self, list(prompt_ids)[-CONTEXT:])

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn what the library raises into a DiffbitError: bare Exceptions, and panics, which are BaseExceptions."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
            raise DiffbitError(f"{self.path}: {what} ({reason}); restore the file") from None


def _growth(part: object) -> float:
    """A bound on how many times as long a text becomes: steps that replace can double it, and forty of them do."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1
    if part.get("type") == "ByteLevel":
        return 2  # a byte above 127 becomes a character of two
    if part.get("type") != "Replace":
        return math.prod(map(_growth, part.values()))
    pattern, content = part["pattern"], len(part["content"])
    if "String" in pattern:
        return max(1, content / len(pattern["String"])) if pattern["String"] else 1 + content
    return 1 + content  # a regular expression may match between characters


class TextStream:
    """Text of tokens that arrive one by one. Joined, it is what the tokens decode to after the prompt."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._window = context  # the tokens that end a character (the first `_complete`), then those since
        self._complete = len(context)
        # Characters of the window's text that have been returned; one begun in the prompt is returned whole
        self._returned = len(tokenizer.decode(context).rstrip(REPLACEMENT))

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished, and for special tokens."""
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
        """The rest when no token follows: U+FFFD for an unfinished character."""
        text = self._tokenizer.decode(self._window)
        new = text[self._returned :]
        self._returned = len(text)
        return new
