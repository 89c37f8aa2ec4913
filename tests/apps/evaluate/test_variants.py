"""What --bits, --what and --method ask for."""

from __future__ import annotations

import pytest

from diffbit.apps.evaluate.variants import WHAT, variants
from diffbit.io.errors import DiffbitError
from diffbit.quantize import AttentionScheme


def test_numbers_of_bits_and_names() -> None:
    listed = variants(["16", "8", "6", "5", "4", "3", "2", "ternary", "nf4", "int4_g32_asym", "4"])
    assert [v.format for v in listed if v.what == "weights"] == [
        "int8", "int6_g64", "int5_g64", "int4_g64", "int3_g64", "int2_g64", "ternary", "nf4", "int4_g32_asym",
    ]  # fmt: skip
    assert [v.bits for v in listed if v.what == "weights"] == [8, 6, 5, 4, 3, 2, 1.585, 4, 4]  # log2(3) of three values
    assert [v.format for v in listed if v.what == "logits"] == ["8-bit", "6-bit", "5-bit", "4-bit", "3-bit", "2-bit"]


def test_parts_of_attention_skip_widths_they_cannot_have() -> None:
    parts = ["kv", "kv:0", "logits", "probabilities", "keys", "values", "qk"]
    listed = variants(["16", "8", "6", "4", "3", "2", "int4", "int8"], parts)
    named = {what: [v.format for v in listed if v.what == what] for what in WHAT}
    assert named["logits"] == named["probabilities"] == ["8-bit", "6-bit", "4-bit", "3-bit", "2-bit"]
    assert named["qk"] == ["int8", "int4"]
    assert named["kv"] == named["kv:0"] == named["keys"] == named["values"] == ["int8", "int4", "int3", "int2"]
    schemes = {(v.what, v.format): v.scheme.attention for v in listed}
    assert schemes["kv", "int4"] == AttentionScheme(keys="int4", values="int4")
    assert schemes["kv:0", "int4"] == AttentionScheme(keys="int4", values="int4", window=0, first=0)
    assert schemes["keys", "int2"] == AttentionScheme(keys="int2")
    assert schemes["values", "int8"] == AttentionScheme(values="int8")
    assert schemes["probabilities", "4-bit"] == AttentionScheme(probabilities=4)
    assert schemes["qk", "int4"] == AttentionScheme(qk="int4")
    assert [v.bits for v in listed if v.what == "kv"] == [8, 4, 3, 2]
    with pytest.raises(DiffbitError, match="leaves nothing to compare"):
        variants(["16", "6", "5"], ["kv", "qk"])


def test_two_names_of_one_format_are_measured_once() -> None:
    assert [variant.format for variant in variants(["8", "int8"], ["weights"])] == ["int8"]
