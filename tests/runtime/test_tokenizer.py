from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from diffbit.io.errors import DiffbitError
from diffbit.runtime import Tokenizer

from .toy import BOS, EOS, byte_tokenizer

TEXT = "naïve café — 日本語のテキスト, 👩‍👩‍👧 emoji, é combining, \ufffd itself, \n tabs\t and  spaces "


# Byte -> token id of the byte tokenizer: GPT-2's alphabet shows printable Latin-1 bytes as they are and the others, in
# order, as U+0100 and up; the ids number that alphabet by code point.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_IDS = {byte: i for i, byte in enumerate([*PRINTABLE, *sorted(set(range(256)) - set(PRINTABLE))])}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    byte_tokenizer().save(str(path))
    return Tokenizer(path)


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A trained BPE, with merges that end in the middle of characters."""
    hf = HfTokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    hf.train_from_iterator([TEXT, "日月火水木金土" * 20, "åäöåäö" * 20], trainer)
    path = tmp_path_factory.mktemp("merged") / "tokenizer.json"
    hf.save(str(path))
    return Tokenizer(path)


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A Llama-2-like tokenizer: a word's space is part of the word, unknown characters fall back to byte tokens."""
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "▁", "o", "k"]
    hf = HfTokenizer(models.BPE({p: i for i, p in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True))
    hf.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    path = tmp_path_factory.mktemp("spaced") / "tokenizer.json"
    hf.save(str(path))
    return Tokenizer(path)


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    stream = tokenizer.stream(prompt or [])
    return [*(stream.push(i) for i in ids), stream.finish()]


@pytest.mark.parametrize("name", ["tokenizer", "merged"])
def test_streamed_text_is_the_text(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(TEXT)
    assert len(ids) > 60
    assert tokenizer.decode(ids) == TEXT
    parts = streamed(tokenizer, ids)
    assert "".join(parts) == TEXT
    assert sum(map(bool, parts)) > 40


def test_a_character_comes_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é👩a")
    assert streamed(tokenizer, ids) == ["", "é", "", "", "", "👩", "a", ""]


def test_an_unfinished_character_comes_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a👩")
    assert streamed(tokenizer, ids[:-1]) == ["a", "", "", "", "\ufffd"]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.binary(max_size=40), prompt=st.text(max_size=10))
def test_any_bytes_stream_to_what_python_decodes(tokenizer: Tokenizer, data: bytes, prompt: str) -> None:
    """Broken UTF-8 as well: one token per byte, against Python's own decoder."""
    ids = [BYTE_IDS[byte] for byte in data]
    want = data.decode(errors="replace")
    assert "".join(streamed(tokenizer, ids, tokenizer.encode(prompt.rstrip("\ufffd")))) == want


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 299), max_size=40))
def test_any_tokens_stream_to_their_decoding(merged: Tokenizer, ids: list[int]) -> None:
    assert "".join(streamed(merged, ids)) == merged.decode(ids)


def test_the_space_after_the_prompt_is_kept(spaced: Tokenizer) -> None:
    hello, world = 257, 258
    assert spaced.decode([hello, world]) == "Hello world"
    assert streamed(spaced, [world, world], [hello]) == [" world", " world", ""]
    assert streamed(spaced, [hello, world]) == ["Hello", " world", ""]
    euro = [1 + byte for byte in "€".encode()]
    assert streamed(spaced, [*euro, *euro, 260], [hello]) == ["", "", "€", "", "", "€", "o", ""]


def test_special_tokens_and_unknown_ids_show_nothing(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("ab")
    assert streamed(tokenizer, [BOS, a, EOS, 263, b, EOS]) == ["", "a", "", "", "b", "", ""]
    assert tokenizer.decode([BOS, a, b, EOS]) == "ab"
    assert tokenizer.vocab_size == 258


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DiffbitError, match=r"none\.json: cannot be read"):
        Tokenizer(tmp_path / "none.json")
    bad = tmp_path / "bad.json"
    bad.write_text('{"model": 3}')
    with pytest.raises(DiffbitError, match=r"bad\.json: is not a tokenizer\.json"):
        Tokenizer(bad)


def test_least_tokens_is_a_lower_bound(tokenizer: Tokenizer, merged: Tokenizer, spaced: Tokenizer) -> None:
    """Against encoding, also of texts that are encoded without the interpreter's lock, whose tokens are the same."""
    random = Random(4)
    for one in (tokenizer, merged, spaced):
        for size in (0, 1, 7, 100, 40_000):
            text = "".join(random.choices(TEXT, k=size))
            ids = one.encode(text, add_special_tokens=False)
            assert one.least_tokens(text) <= len(ids)
            assert ids == one._tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.least_tokens("é" * 50) >= 20
    assert 1000 > merged.least_tokens("z" * 1000) > 1


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "ab"}, "content": "c"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}},
        {"added_tokens": [{"id": 0, "content": "!", "single_word": False, "lstrip": True, "rstrip": False,
                           "normalized": False, "special": True}]},
    ],
)  # fmt: skip
def test_least_tokens_where_a_token_may_be_of_any_length(
    change: dict[str, object], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(tokenizer.as_json()) | change))
    assert Tokenizer(path).least_tokens("ab " * 1000) == 0
