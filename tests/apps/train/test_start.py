"""What a run takes over from the model that it starts from, and what a run that is refused leaves: nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diffbit.apps.train.folder import read_log
from diffbit.apps.train.new_tokenizer import train_tokenizer
from diffbit.apps.train.presets import train_config
from diffbit.apps.train.trainer import train
from diffbit.cli.app import main
from diffbit.io.errors import DiffbitError
from diffbit.io.tokenizer_files import tokenizer_files
from diffbit.models import Checkpoint

from ...models.test_gguf import TEXT, TYPES, VOCABULARY, of_byte_level
from ...models.test_gguf import write as write_gguf
from .toy import model, options


def test_a_gguf_file_keeps_its_tokenizer_template_and_end_tokens(text: str, tmp_path: Path) -> None:
    train_tokenizer([TEXT], VOCABULARY, tmp_path / "t")
    ids = {"ggml.bos_token_id": 3, "ggml.eos_token_id": 0, "ggml.eot_token_id": 4}
    metadata = of_byte_level(tmp_path / "t", "gpt-2", chat_template="{{ messages[0].content }}", **ids)
    file = write_gguf(tmp_path / "m.gguf", TYPES.Q8_0, tokenizer=metadata)
    config = train_config(init=str(file), context=32, steps=1, batch_size=1, accumulate=1, source=text)
    path = train(config, tmp_path / "out").path
    after = Checkpoint(path)
    assert (after.config.bos_token_id, after.config.eos_token_ids) == (3, (0, 4))
    assert after.config == Checkpoint(file).config
    assert after.tokenizer_files == tokenizer_files(file)
    assert (path / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


def test_another_tokenizer_brings_its_own_tokens(text: str, tmp_path: Path, trained: Any) -> None:
    """Of two models, the tokens of the one whose tokenizer is used."""
    start, tokenizer = (shutil.copytree(trained("softmax"), tmp_path / name) for name in ("start", "tokenizer"))
    for folder, ids in ((start, 5), (tokenizer, 6)):
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | {"bos_token_id": ids}))
    (tokenizer / "chat_template.jinja").write_text("{{ messages[0].content }}")
    short: dict[str, Any] = {"context": 32, "steps": 1, "batch_size": 1, "accumulate": 1, "source": text}
    kept = Checkpoint(train(train_config(init=str(start), **short), tmp_path / "kept").path)
    changed = train_config(init=str(start), tokenizer=str(tokenizer), **short)
    other = Checkpoint(train(changed, tmp_path / "other").path)
    assert (kept.config.bos_token_id, other.config.bos_token_id) == (5, 0)
    assert "chat_template.jinja" in other.tokenizer_files and "chat_template.jinja" not in kept.tokenizer_files


def test_a_refused_run_leaves_no_folder_and_keeps_the_one_before(
    text: str, tmp_path: Path, trained: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    start, short = str(trained("softmax")), tmp_path / "short.txt"
    short.write_text("too little text\n" * 30)
    out = tmp_path / "a" / "b" / "out"
    for arguments, sentence in (
        (["--data", str(short), "--init", start], "need"),  # fewer tokens than a row
        (["--data", str(short)], "too little text for a vocabulary"),
        (["--data", str(tmp_path / "absent.txt"), "--init", start], "no such file"),
        (["--data", text, "--field", "messages", "--init", str(tmp_path / "nowhere")], "no such"),
        (["--data", text, "--init", start, "--distill", str(trained("diff_v1")), "--context", "300"],
         "context is 256 tokens"),
        (["--data", text, "--init", start, "--qat", "int4_g32_asym"], "zero points"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            main(["train", *arguments, "--quiet", "-o", str(out)])
        error = capfd.readouterr().err
        assert end.value.code == 2 and sentence in error, error
        assert error.count("\n") == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["short.txt"], arguments
    first = train(options(text, steps=2), out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(DiffbitError, match="more than the model's vocabulary of 280"):
        train(options(text, model=model(vocab_size=280), tokenizer=str(trained("softmax"))), out, overwrite=True)
    with pytest.raises(DiffbitError, match="zero points"):
        train(replace(options(text), qat="int4_g32_asym"), out, overwrite=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert len(read_log(first.path)) == 2
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]
