"""Token windows of equal length for calibration and evaluation, and the number of tokens outside of them.

The documents become one stream, `eos d1 eos d2 eos ... dn eos`: each document follows an eos token, as in training. The
stream is cut into windows of `length` tokens that begin every `length - overlap` tokens. The last window is padded with
eos.

    stream                 0 1 2 3 4 5 6 7 8 9
    length 4, overlap 0    [0 1 2 3] [4 5 6 7] [8 9 . .]
    length 4, overlap 1    [0 1 2 3] [3 4 5 6] [6 7 8 9]

`mask` is True for tokens and False for padding. `target` marks the tokens to score. Each is predicted from the tokens
before it in its window, so the first token of a window is never scored, and neither is a token that an earlier window
has scored. With overlap 0 the first token of every window is not scored; with overlap 1 every token except the stream's
first is scored once; a larger overlap gives each token more context.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..io.errors import DiffbitError
from .mix import Render
from .sources import Split, load_text
from .text_tokenizer import load_tokenizer


@dataclass(frozen=True)
class Windows:
    """Windows of one source. The stream has `tokens + unused` tokens."""

    ids: np.ndarray  # int64 [n, length]
    mask: np.ndarray  # bool [n, length]: a token of the stream, not padding
    target: np.ndarray  # bool [n, length]: a token to score; within mask, and never the first of a window
    sha256: str  # of length, ids, mask and target
    source: str
    tokens: int  # tokens of the stream that are in at least one window
    unused: int  # tokens of the stream in no window, because of max_windows or keep_partial=False
    documents: int  # number of documents in the stream
    document: np.ndarray | None = None  # int64 [n], the index of the document at the middle of each window

    @property
    def scored(self) -> int:
        """Number of tokens to score."""
        return int(self.target.sum())


def digest(ids: np.ndarray, mask: np.ndarray, target: np.ndarray) -> str:
    """SHA-256, in hexadecimal, of the length, ids, mask and target of windows [n, length]."""
    hasher = hashlib.sha256(ids.shape[1].to_bytes(8, "little"))
    for part in (ids.astype("<i8"), mask, target):
        hasher.update(np.ascontiguousarray(part).tobytes())
    return hasher.hexdigest()


def stream(documents: Iterable[np.ndarray], eos_id: int) -> tuple[np.ndarray, np.ndarray]:
    """`eos d1 eos d2 eos ... dn eos` as int64 [T], and the position at which each document ends, int64 [n]."""
    eos = np.asarray([eos_id], dtype=np.int64)
    parts = [eos]
    for document in documents:
        parts += [np.asarray(document, dtype=np.int64), eos]
    return np.concatenate(parts), np.cumsum([len(part) for part in parts])[1::2]


def windows(
    documents: Iterable[np.ndarray],
    length: int,
    *,
    eos_id: int,
    overlap: int = 0,
    max_windows: int | None = None,
    keep_partial: bool = True,
    source: str = "",
) -> Windows:
    """Cut the token ids of documents into windows (see the module's docstring).

    `max_windows` keeps at most that many windows, evenly spaced over the stream, so even a few cover many documents.
    `keep_partial=False` drops a last window that would need padding. `unused` counts the tokens that either omits.
    Raises DiffbitError for a length or overlap out of range, or if the documents give no window.
    """
    if length < 2:
        raise DiffbitError(f"a window of {length} tokens predicts nothing; pass a length of 2 or more")
    if not 0 <= overlap < length:
        raise DiffbitError(f"an overlap of {overlap} does not fit windows of {length} tokens; pass 0 to {length - 1}")
    if max_windows is not None and max_windows < 1:
        raise DiffbitError(f"max_windows is {max_windows}; pass 1 or more")
    tokens, ends = stream(documents, eos_id)
    if len(tokens) < 2:
        raise DiffbitError(f"{source or 'the documents'}: no token to cut windows from; use a source with more text")
    starts = np.arange(0, max(1, len(tokens) - overlap), length - overlap)
    if not keep_partial and starts[-1] + length > len(tokens):
        starts = starts[:-1]
        if not len(starts):
            raise DiffbitError(
                f"{source or 'the documents'}: {len(tokens)} tokens fill no window of {length}; "
                "keep the partial window, shorten the windows, or use more text"
            )
    if max_windows is not None and max_windows < len(starts):
        starts = starts[np.arange(max_windows) * len(starts) // max_windows]

    positions = starts[:, None] + np.arange(length)  # [n, length]
    mask = positions < len(tokens)
    ids = np.where(mask, tokens[np.minimum(positions, len(tokens) - 1)], eos_id)
    context = np.maximum(0, length - np.diff(starts, prepend=-length))  # tokens that the previous window also contains
    target = mask & (np.arange(length) >= np.maximum(context, 1)[:, None])

    covered = np.unique(positions[mask]).size
    middle = starts + mask.sum(1) // 2
    document = np.minimum(np.searchsorted(ends, middle, side="right"), len(ends) - 1)
    sha256 = digest(ids, mask, target)
    return Windows(ids, mask, target, sha256, source, covered, len(tokens) - covered, len(ends), document)


def samples(source: Windows, size: int, count: int) -> list[Windows]:
    """`count` samples of `size` windows each (fewer if there are fewer), from windows that do not overlap.

    The first sample is that of `max_windows=size`, evenly spaced. The others are drawn at random, with replacement if
    there are fewer than 2 * size windows.
    """
    available = len(source.ids)
    size, generator = min(size, available), np.random.default_rng(0)
    rows = [np.arange(size) * available // size]
    rows += [np.sort(generator.choice(available, size, replace=available < 2 * size)) for _ in range(count - 1)]
    return [_some(source, chosen) for chosen in rows]


def _some(source: Windows, rows: np.ndarray) -> Windows:
    ids, mask, target = source.ids[rows], source.mask[rows], source.target[rows]
    tokens = int(source.mask[np.unique(rows)].sum())
    return replace(
        source, ids=ids, mask=mask, target=target, sha256=digest(ids, mask, target), tokens=tokens,
        unused=source.tokens + source.unused - tokens,
        document=None if source.document is None else source.document[rows],
    )  # fmt: skip


def eval_windows(
    source: str,
    tokenizer_path: str | Path,
    length: int,
    max_windows: int | None = None,
    *,
    split: Split = "eval",
    overlap: int = 0,
    keep_partial: bool = True,
    field: str = "text",
    limit: int | None = None,
    render: Render | None = None,
) -> Windows:
    """Return windows of one split of a source (`load_text`), for evaluation, or for calibration with split "calib"."""
    tokenizer = load_tokenizer(tokenizer_path)
    corpus = load_text(source, split, field=field, limit=limit, render=render)
    return windows(
        tokenizer.encode(corpus.documents),
        length,
        eos_id=tokenizer.eos_id,
        overlap=overlap,
        max_windows=max_windows,
        keep_partial=keep_partial,
        source=source,
    )
