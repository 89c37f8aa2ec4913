"""Text to token ids and back, and back again while the ids are still coming in.

A token of a byte-level BPE may end in the middle of a UTF-8 character. Decoders show the unfinished bytes as U+FFFD,
so text is given out only up to its trailing U+FFFDs; what remains when the stream ends is given out as it is. Text is
decoded in a window that starts at the last token known to end a character, not token by token, because what a token
reads as may depend on the one before it (a leading space, a run of byte tokens).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import DiffbitError, MissingDependency

REPLACEMENT = "\ufffd"
CONTEXT = 8  # prompt tokens that a stream starts from: more than any character or leading space needs


class Tokenizer:
    """A `tokenizer.json` as the library `tokenizers` reads it."""

    def __init__(self, path: str | Path) -> None:
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise MissingDependency("tokenizers", "cpu", "reading a tokenizer.json") from None
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DiffbitError(f"{path}: cannot be read ({error})") from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises bare Exception
            raise DiffbitError(f"{path}: is no tokenizer.json that tokenizers can read ({error})") from None

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows, added ones included; a model's table may be padded beyond it."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer itself adds (often a leading bos)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # what Python makes of stray bytes in stdin and in arguments
            raise DiffbitError(f"the text to encode is not UTF-8 after {error.start} characters") from None
        return list(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of `token_ids`, without special tokens; bytes that form no character read as U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stream(self, prompt_ids: Iterable[int] = ()) -> TextStream:
        """A decoder of tokens to come after `prompt_ids`."""
        return TextStream(self, list(prompt_ids)[-CONTEXT:])


class TextStream:
    """Pieces of text for tokens that arrive one by one; joined, they are what the tokens decode to after the prompt."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._window = context  # tokens since the last settled one, which comes first
        # Characters of the window's text that are not given again; a character begun in the prompt is given whole.
        self._given = len(tokenizer.decode(context).rstrip(REPLACEMENT))
        self._settled = len(context)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished and for special tokens."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        end = len(text.rstrip(REPLACEMENT))
        piece = text[self._given : end]
        self._given = max(self._given, end)
        if piece and end == len(text):
            # A character ends here: the next window starts with this step's tokens.
            del self._window[: self._settled]
            self._given = len(self._tokenizer.decode(self._window))
            self._settled = len(self._window)
        return piece

    def finish(self) -> str:
        """The rest, when no token follows: U+FFFD for a character that was never finished."""
        text = self._tokenizer.decode(self._window)
        piece = text[self._given :]
        self._given = len(text)
        return piece
