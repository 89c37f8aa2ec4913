"""tokenizer.model as tokenizer.json: ids and texts are those of sentencepiece and of transformers."""

from __future__ import annotations

import argparse
import inspect
import io
import json
import random
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import LlamaConverter
from typer.testing import CliRunner

from diffbit import DiffbitError, runtime
from diffbit.calib_data import load_tokenizer
from diffbit.cli.app import app, main
from diffbit.io.sentencepiece import SENTENCEPIECE
from diffbit.io.tokenizer_files import TOKENIZER, tokenizer_files

SPECIAL = ("<s>", "</s>", "<unk>", "<ctrl>", "<tool>", "[INST]")
PARTS = (
    *SPECIAL, "hello", " world", " ", "  ", "\n", "\t", "   \n\n ", "\r\n", "\u00a0", "\u3000", "\x00", "\x07", "\x7f",
    "\u200b", "\ufffd", "\U0010ffff", "é", "e\u0301", "日本", "語", "🙂", "👩‍👩‍👧", "🇩🇪", "ﬁ", "Ｆｕｌｌ", "ﷺ", "𝔘",
    "नमस्ते", "ไทย", "ΑΒΓ", "пример", "0", "12345", "3.14", "...", "!!!", "'s", "I'm", "CamelCase", "_", "__init__",
    "\u2581", "<0x41>", "def f(x):\n    return x",
)  # fmt: skip
CORPUS = [
    *inspect.getsource(argparse).splitlines()[:2000],
    *["これは日本語の文章です。名前はまだ無い。", "Привет, как дела? Ça va, naïve café.  Zwei  Leerzeichen"] * 20,
]


def odd_strings() -> list[str]:
    """500 of them."""
    chosen = random.Random(0)
    strings = ["", "a", " a", "a ", "  a  ", "x" * 3000, "the quick brown fox " * 300, *PARTS]
    while len(strings) < 500:
        strings.append("".join(chosen.choices(PARTS, k=chosen.randint(1, 12))))
    return strings


STRINGS = odd_strings()
PLAIN = [text for text in STRINGS if not any(token in text for token in (*SPECIAL, "<0x41>"))]


@cache
def trained(kind: str, **options: Any) -> bytes:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type=kind,
        **{
            "vocab_size": 600, "byte_fallback": True, "normalization_rule_name": "identity", "minloglevel": 2,
            "remove_extra_whitespaces": False, "character_coverage": 0.99, "hard_vocab_limit": False,
            "control_symbols": ["<ctrl>"], "user_defined_symbols": ["<tool>", "[INST]"],
        } | options,
    )  # fmt: skip
    return model.getvalue()


def write(folder: Path, model: bytes, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / SENTENCEPIECE).write_bytes(model)
    names = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | config))
    return folder


def converted(folder: Path) -> Tokenizer:
    return Tokenizer.from_buffer(tokenizer_files(folder)[TOKENIZER])


def assert_same(texts: Iterable[str], ours: Callable[[str], object], theirs: Callable[[str], object]) -> None:
    other = [(text, ours(text), theirs(text)) for text in texts if ours(text) != theirs(text)]
    assert not other, (len(other), other[0])


@pytest.mark.parametrize(
    "config",
    [
        {"legacy": False, "add_bos_token": True},
        {"legacy": False, "add_bos_token": False, "add_eos_token": True, "add_prefix_space": True},
        {"legacy": False, "add_bos_token": True, "add_eos_token": True, "add_prefix_space": False},
        {"legacy": True, "add_bos_token": True},
    ],
    ids=["llama", "eos", "no-prefix", "legacy"],
)
def test_bpe_is_transformers_llama_tokenizer(config: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "m", trained("bpe"), **config)
    theirs, ours = AutoTokenizer.from_pretrained(folder), converted(folder)
    texts = STRINGS
    if config["legacy"]:  # transformers 5 puts no second space before one; up to 4 it did, and sentencepiece does
        starts = [token + sign for token in (*SPECIAL, "") for sign in " \u2581"]
        texts = [text for text in STRINGS if not any(start in text for start in starts[:-2])]
        texts = [text for text in texts if not text.startswith((" ", "\u2581"))]
        assert len(texts) > 350
    assert_same(texts, lambda text: ours.encode(text).ids, lambda text: theirs(text).input_ids)
    for skip in (False, True):
        options = {"skip_special_tokens": skip}
        decode = [lambda text, t=t, o=options: t.decode(ours.encode(text).ids, **o) for t in (ours, theirs)]
        assert_same(texts, *decode)


def test_unigram_is_transformers_converter(tmp_path: Path) -> None:
    for legacy in (True, False):
        for prefix in (True, False):
            folder = write(tmp_path / "m", trained("unigram"), legacy=legacy, add_prefix_space=prefix)
            stand_in = SimpleNamespace(
                vocab_file=str(folder / SENTENCEPIECE), legacy=legacy, add_prefix_space=prefix,
                convert_ids_to_tokens=("<unk>", "<s>", "</s>").__getitem__,
            )  # fmt: skip
            theirs, ours = LlamaConverter(stand_in).converted(), converted(folder)
            theirs.add_special_tokens(["<unk>", "<s>", "</s>"])
            assert_same(STRINGS, lambda text: ours.encode(text).ids, lambda text: [1, *theirs.encode(text).ids])  # noqa: B023
            decode = [lambda text, t=t: t.decode(ours.encode(text).ids) for t in (ours, theirs)]  # noqa: B023
            assert_same(STRINGS, *decode)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bpe", {}),
        ("bpe", {"add_dummy_prefix": False}),
        ("bpe", {"byte_fallback": False, "normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}),
        ("unigram", {}),
        ("unigram", {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}),
        ("unigram", {"byte_fallback": False, "unk_id": 3, "pad_id": 0}),
    ],
    ids=["bpe", "bpe-no-prefix", "bpe-nfkc", "unigram", "unigram-nfkc", "unigram-ids"],
)
def test_ids_are_sentencepieces(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """By default, and of texts without special tokens, before which it puts a space and transformers none."""
    model = trained(kind, **options)
    theirs, ours = SentencePieceProcessor(model_proto=model), converted(write(tmp_path / "m", model))
    assert ours.get_vocab_size() == theirs.get_piece_size()
    assert_same(PLAIN, lambda text: ours.encode(text).ids, lambda text: [theirs.bos_id(), *theirs.encode(text)])
    if options.get("byte_fallback", True):
        decode = theirs.decode
        assert_same(PLAIN, lambda text: ours.decode(ours.encode(text).ids), lambda text: decode(theirs.encode(text)))


@pytest.mark.parametrize("words", [None, r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+"])
def test_byte_level_bpe(words: str | None, tmp_path: Path) -> None:
    """GPT-2's, and one that cuts as o200k and Qwen do; a file that truncates and pads does so to no prompt."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if words is not None:
        backend.normalizer = normalizers.NFC()
        cut = pre_tokenizers.Split(Regex(words), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "[INST]"],
    )  # fmt: skip
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", rstrip=True)])
    backend.enable_truncation(16)
    backend.enable_padding(length=16, pad_token="</s>", pad_id=1)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.save_pretrained(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), runtime.Tokenizer(tmp_path / TOKENIZER)
    assert_same(STRINGS, ours.encode, lambda text: theirs(text).input_ids)
    assert_same(
        STRINGS,
        lambda text: ours.decode(ours.encode(text)),
        lambda text: theirs.decode(theirs(text).input_ids, skip_special_tokens=True),
    )


def test_further_tokens(tmp_path: Path) -> None:
    """Of added_tokens_decoder and of added_tokens.json; ids that do not follow those of the model are refused."""
    size = SentencePieceProcessor(model_proto=trained("bpe")).get_piece_size()
    entry = {"content": "<|im_start|>", "lstrip": False, "normalized": False, "rstrip": False, "special": True}
    config = {"legacy": False, "added_tokens_decoder": {str(size): entry}, "add_bos_token": True}
    folder = write(tmp_path / "m", trained("bpe"), **config)
    ours, theirs = converted(folder), AutoTokenizer.from_pretrained(folder)
    assert_same(["a<|im_start|>user\n b"], lambda text: ours.encode(text).ids, lambda text: theirs(text).input_ids)
    assert size in ours.encode("a<|im_start|>").ids
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size + 1}))
    assert converted(folder).token_to_id("<|im_end|>") == size + 1
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size + 7}))
    with pytest.raises(
        DiffbitError, match=rf"the added token '<\|im_end\|>' has id {size + 7} in the folder, but {size + 1}"
    ):
        converted(folder)


def test_the_folder_hands_on_a_tokenizer_json(checkpoint: Path, tmp_path: Path) -> None:
    """From a checkpoint with tokenizer.model alone, by quantize, to the artifact; calibration reads it, too."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    (source / TOKENIZER).unlink()
    write(source, trained("bpe", vocab_size=360))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.5}))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    expected = converted(source).encode("hello").ids
    assert load_tokenizer(source).eos_id == 2
    run = CliRunner()
    plain = ("--method", "rtn", "--no-measure")  # without text: this tokenizer has more tokens than the model
    for arguments in (
        ["quantize", str(source), "-o", str(tmp_path / "q"), "--weights", "int4_g32", *plain],
        ["export", str(tmp_path / "q"), "-o", str(tmp_path / "onnx")],
        ["export", str(source), "-o", str(tmp_path / "float"), "--tokenizer", str(source / SENTENCEPIECE)],
    ):
        result = run.invoke(app, arguments)
        assert result.exit_code == 0, result.output
    for folder in ("q", "onnx", "float"):
        assert not (tmp_path / folder / SENTENCEPIECE).exists()
        assert runtime.Tokenizer(tmp_path / folder / TOKENIZER).encode("hello") == expected
        assert (tmp_path / folder / "chat_template.jinja").read_text() == "{{ messages }}"
        names = ("tokenizer_config.json", "generation_config.json")
        options, sampling = (json.loads((tmp_path / folder / name).read_text()) for name in names)
        assert options["tokenizer_class"] == "LlamaTokenizer" and sampling["temperature"] == 0.5


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / SENTENCEPIECE).write_bytes(b""), "is not a SentencePiece model"),
        (
            lambda folder: (folder / SENTENCEPIECE).write_bytes(random.Random(0).randbytes(5000)),
            "is not a SentencePiece",
        ),
        (lambda folder: (folder / SENTENCEPIECE).write_bytes(trained("bpe")[:-900]), "is not a SentencePiece model"),
        (lambda folder: (folder / SENTENCEPIECE).write_bytes(trained("word")), "of words or characters, wanted BPE"),
        (lambda folder: write(folder, trained("bpe"), tokenizer_class="T5Tokenizer"), "tokenizer_class is 'T5Tok"),
        (
            lambda folder: write(folder, trained("bpe"), added_tokens_decoder={"x": 3}),
            "added in tokenizer_config",
        ),
    ],
    ids=["empty", "noise", "cut", "words", "class", "tokens"],
)
def test_bad_input_is_refused(
    damage: Callable[[Path], object], words: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    (source / TOKENIZER).unlink()
    (source / "tokenizer_config.json").unlink()
    damage(source)
    with pytest.raises(SystemExit) as caught:
        main(["export", str(source), "-o", str(tmp_path / "onnx"), "--quiet"])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert words in " ".join(message.split()) and "Traceback" not in message and not (tmp_path / "onnx").exists()
