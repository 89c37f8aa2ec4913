"""Converts text to token ids and back, also while the ids are still being generated.

A token of a byte-level BPE may end in the middle of a UTF-8 character. Decoders show the unfinished bytes as U+FFFD, so
a stream returns text up to its trailing U+FFFDs, and the rest when it ends. It decodes a window that starts at the last
token known to end a character, not token by token, because the text of a token may depend on the one before it (a
leading space, a run of byte tokens).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..io.errors import DiffbitError
from ..io.tokenizer_files import MOST_BYTES, open_tokenizer, tokenizer_errors

REPLACEMENT = "\ufffd"
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
        """Number of tokens, including added ones; a model's embedding may have more rows."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def as_json(self) -> str:
        """The tokenizer as text, which other libraries read."""
        return str(self._tokenizer.to_str())

    def token_id(self, token: str) -> int | None:
        """The id of a token such as "<|im_end|>"; None if the vocabulary does not have it."""
        number = self._tokenizer.token_to_id(token)
        return None if number is None else int(number)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with or without the special tokens that the tokenizer adds (often a leading bos)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # stray bytes in stdin or in arguments become lone surrogates
            raise DiffbitError(f"the text to encode is not UTF-8 after {error.start} characters") from None
        with tokenizer_errors(self.path, "fails to encode a text"):
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of `token_ids`, without special tokens; bytes that form no character become U+FFFD."""
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
        """The remaining text after the last token: U+FFFD for an unfinished character."""
        text = self._tokenizer.decode(self._window)
        new = text[self._returned :]
        self._returned = len(text)
        return new
