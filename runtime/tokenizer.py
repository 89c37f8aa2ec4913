"""Text to token ids and back, also while the ids are still being generated.

A token of a byte-level BPE may end in the middle of a UTF-8 character. Decoders show the unfinished bytes as U+FFFD, so
a stream returns text up to its trailing U+FFFDs, and the rest when it ends. It decodes a window that starts at the last
token known to end a character, not token by token, because the text of a token may depend on the one before it (a
leading space, a run of byte tokens).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import DiffbitError
from ..tokenizer_files import MOST_BYTES, open_tokenizer, tokenizer_errors

REPLACEMENT = "\ufffd"
CONTEXT = 8  # prompt tokens that a stream starts from: enough for any character or leading space


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
        with tokenizer_errors(self.path, "fails to encode a text"):
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of `token_ids`, without special tokens; bytes that form no character read as U+FFFD."""
        with tokenizer_errors(self.path, "fails to decode tokens"):
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stream(self, prompt_ids: Iterable[int] = ()) -> TextStream:
        """Decode the tokens that follow `prompt_ids`, one by one."""
        return TextStream(self, list(prompt_ids)[-CONTEXT:])


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
