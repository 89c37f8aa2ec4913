from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffbit.apps.train.new_tokenizer import train_tokenizer
from diffbit.calib_data import Windows, eval_windows, load_text, load_tokenizer, stream, windows
from diffbit.io.errors import DiffbitError

EOS = 99


def documents(*lengths: int) -> list[np.ndarray]:
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)]


def test_the_three_pictures_of_the_docstring() -> None:
    docs = documents(3, 4)  # eos 0 1 2 eos 3 4 5 6 eos: ten tokens
    cut = windows(docs, 4, eos_id=EOS)
    assert cut.ids.tolist() == [[99, 0, 1, 2], [99, 3, 4, 5], [6, 99, 99, 99]]
    assert cut.mask.tolist() == [[True] * 4, [True] * 4, [True, True, False, False]]
    assert cut.target.astype(int).tolist() == [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 0, 0]]
    assert (cut.tokens, cut.unused, cut.documents, cut.scored) == (10, 0, 2, 7)
    lapped = windows(docs, 4, eos_id=EOS, overlap=1)
    assert lapped.ids.tolist() == [[99, 0, 1, 2], [2, 99, 3, 4], [4, 5, 6, 99]]
    assert lapped.scored == 9
    dropped = windows(docs, 4, eos_id=EOS, keep_partial=False)
    assert len(dropped.ids) == 2 and (dropped.tokens, dropped.unused) == (8, 2)
    assert len({cut.sha256, lapped.sha256, dropped.sha256}) == 3
    assert [one.document.tolist() for one in (cut, lapped, dropped)] == [[0, 1, 1], [0, 1, 1], [0, 1]]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    length=st.integers(2, 8),
    overlap=st.integers(0, 7),
    max_windows=st.none() | st.integers(1, 5),
    keep_partial=st.booleans(),
)
def test_against_a_token_by_token_count(
    lengths: list[int], length: int, overlap: int, max_windows: int | None, keep_partial: bool
) -> None:
    """Every token is where the stream has it, counted once, and scored at most once."""
    overlap = min(overlap, length - 1)
    whole, ends = stream(documents(*lengths), EOS)
    try:
        cut = windows(
            documents(*lengths), length, eos_id=EOS, overlap=overlap, max_windows=max_windows, keep_partial=keep_partial
        )
    except DiffbitError:
        assert not keep_partial and len(whole) < length
        return
    starts = []
    start = 0
    while not starts or start + overlap < len(whole):
        starts.append(start)
        start += length - overlap
    if not keep_partial:
        starts = [start for start in starts if start + length <= len(whole)]
    if max_windows is not None and len(starts) > max_windows:
        starts = [starts[i * len(starts) // max_windows] for i in range(max_windows)]
    assert len(cut.ids) == len(starts)
    covered: set[int] = set()
    scored: set[int] = set()
    for row, start in enumerate(starts):
        for column, p in enumerate(range(start, start + length)):
            real = p < len(whole)
            assert cut.mask[row, column] == real
            assert cut.ids[row, column] == (whole[p] if real else EOS)
            assert cut.target[row, column] == (real and column > 0 and p not in scored)
            covered |= {p} if real else set()
            scored |= {p} if real and column > 0 else set()
    assert cut.scored == len(scored)
    assert (cut.tokens, cut.unused, cut.documents) == (len(covered), len(whole) - len(covered), len(ends))
    if overlap and max_windows is None and keep_partial:
        assert scored == set(range(1, len(whole)))


def test_few_windows_are_spread_over_the_text() -> None:
    cut = windows([np.arange(1000)], 10, eos_id=EOS, max_windows=4)
    assert cut.ids[:, 1].tolist() == [0, 250, 500, 750]
    assert (cut.tokens, cut.unused) == (40, 962)


def test_eval_windows_of_the_standard_library(tmp_path: Path) -> None:
    train_tokenizer(load_text("stdlib", "train", limit=200_000).documents, 300, tmp_path)
    cut = eval_windows("stdlib", tmp_path, 32, max_windows=8, limit=20_000)
    assert isinstance(cut, Windows) and cut.ids.shape == cut.mask.shape == cut.target.shape == (8, 32)
    assert cut.ids.dtype == np.int64 and cut.mask.dtype == cut.target.dtype == np.bool_
    assert cut.source == "stdlib" and cut.mask.all()
    text = load_tokenizer(tmp_path).backend.decode(cut.ids[3].tolist())
    assert any(text in document for document in load_text("stdlib", "eval").documents)
    calib = eval_windows("stdlib", tmp_path, 32, max_windows=8, limit=20_000, split="calib")
    assert calib.sha256 != cut.sha256
    assert eval_windows("stdlib", tmp_path, 32, max_windows=8, limit=20_000).sha256 == cut.sha256


def test_bad_input_is_refused() -> None:
    for arguments, sentence in {
        (1, 0, None): "length of 2 or more",
        (4, 4, None): "pass 0 to 3",
        (4, 0, 0): "max_windows is 0",
    }.items():
        length, overlap, most = arguments
        with pytest.raises(DiffbitError, match=sentence):
            windows(documents(9), length, eos_id=EOS, overlap=overlap, max_windows=most)
    with pytest.raises(DiffbitError, match="no token"):
        windows([], 4, eos_id=EOS)
    with pytest.raises(DiffbitError, match="3 tokens fill no window of 4"):
        windows(documents(1), 4, eos_id=EOS, keep_partial=False)
