"""What fuzzing found, and what was mended: {what it is: (target, how its example is damaged)}."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from sentencepiece import sentencepiece_model_pb2

Damage = Callable[[Path], object]


def edited(name: str, **changes: Any) -> Damage:
    """Other fields in a JSON file."""
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


def written(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def charsmap(folder: Path) -> None:
    file = folder / "tokenizer.model"
    proto = sentencepiece_model_pb2.ModelProto.FromString(file.read_bytes())  # type: ignore[attr-defined]
    proto.normalizer_spec.precompiled_charsmap = b"\x04\0\0\0abcd"
    file.write_bytes(proto.SerializeToString())


def without_an_output(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    model.graph.node[-1].output[0] = "nothing"
    (folder / "model.onnx").write_bytes(model.SerializeToString())


STRIP = {"type": "Strip", "content": "a", "start": 10**6, "stop": 10**6}
DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
REGRESSIONS: dict[str, tuple[str, Damage]] = {
    "a list in the place of an activation's name": ("checkpoint", edited("config.json", hidden_act=["silu"])),
    "a whole number that no float holds": ("checkpoint", edited("config.json", rms_norm_eps=10**400)),
    "an error that quotes thousands of values": ("checkpoint", edited("config.json", attention_bias=[False] * 1000)),
    "TOML that is deep": ("scheme", written("scheme.toml", "weights = " + "[" * 100_000)),
    "a number of many digits in TOML": ("scheme", written("scheme.toml", f"weights = {'9' * 5000}")),
    "commands to a terminal in a name": ("scheme", written("scheme.json", json.dumps({"\x1b[2J\r\n": 1}))),
    "a table of characters that is none": ("bpe", charsmap),
    "an error of ONNX Runtime in two lines": ("graph", without_an_output),
    "a decoder that panics": ("tokenizer", edited("tokenizer.json", decoder=STRIP)),
    "a normalizer that makes texts long": (
        "tokenizer",
        edited("tokenizer.json", normalizer={"type": "Sequence", "normalizers": [DOUBLING] * 40}),
    ),
}
