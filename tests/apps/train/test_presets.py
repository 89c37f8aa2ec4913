from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from diffbit.apps.train.new_tokenizer import train_tokenizer
from diffbit.apps.train.presets import PRESETS, model_config, parameters, train_config
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint, variants


def test_variants_of_a_preset_are_of_equal_size() -> None:
    table = {(row["preset"], row["attention"]): row for row in parameters()}
    equal = [preset for preset in PRESETS if preset != "yoco"]
    assert sum(preset != "yoco" for preset, _ in table) == len(equal) * len(variants())
    for preset in equal:
        reference = table[preset, "softmax"]["parameters"]
        for attention in variants():
            row = table[preset, attention]
            # ttt's initial state has (d + 1) d numbers per head, dcmha weights of the composition
            bound = {"ttt": 0.03, "dcmha": 0.07}.get(attention, 0.01)
            assert abs(row["parameters"] - reference) <= bound * reference
            same = ("hidden_size", "num_layers", "head_dim", "vocab_size", "context")
            assert [row[key] for key in same] == [table[preset, "softmax"][key] for key in same]
    for preset, size in {"pico": 0.36e6, "nano": 2.5e6, "small": 25e6, "base": 120e6}.items():
        assert abs(table[preset, "diff_v1"]["parameters"] - size) < 0.06 * size


def test_counts_against_the_sum_written_out() -> None:
    size = PRESETS["nano"]
    hidden, layers = size.hidden_size, size.num_layers
    d = hidden // (2 * size.num_pairs)
    shared = size.vocab_size * hidden + hidden + layers * (3 * hidden * size.intermediate_size + 2 * hidden)
    attention = layers * 8 * size.num_pairs * hidden * d
    extra = {"softmax": 0, "diff_v1": layers * 4 * d, "diff_v2": layers * 2 * size.num_pairs * hidden}
    counted = {row["attention"]: row["parameters"] for row in parameters() if row["preset"] == "nano"}
    assert {name: counted[name] for name in extra} == {name: shared + attention + more for name, more in extra.items()}


@pytest.mark.slow
def test_yoco_caches_once() -> None:
    """Of 4 layers 2 have a window, 1 all keys and 1 those of that layer; a model without keys cannot."""
    for attention in ("softmax", "diff_v1", "diff_v2"):
        mixers = [layer.mixer for layer in model_config("yoco", attention).layers]
        assert [(mixer.sliding_window, mixer.keys_of) for mixer in mixers] == [(32, None)] * 2 + [(0, None), (0, 2)]
        assert {replace(mixer, sliding_window=0, keys_of=None) for mixer in mixers} == {
            layer.mixer for layer in model_config("tiny", attention).layers
        }
    for attention, sentence in {
        "retention": "which retention does not have",
        "crate": "keys_of is 2, wanted none",
    }.items():
        assert ("yoco", attention) not in {(row["preset"], row["attention"]) for row in parameters()}
        with pytest.raises(DiffbitError, match=sentence):
            model_config("yoco", attention)


def test_groups_of_every_format_come_out_even() -> None:
    for size in PRESETS.values():
        assert size.hidden_size % 128 == size.intermediate_size % 128 == 0
        assert size.hidden_size % (4 * size.num_pairs) == 0  # an even head_dim


def test_train_config_takes_changes(tmp_path: Path, trained: Callable[[str], Path], quantized: Path) -> None:
    train_tokenizer(["a tokenizer of its own, with few ids"], 260, tmp_path)
    assert train_config("tiny", "softmax", tokenizer=str(tmp_path)).model.vocab_size == 260
    config = train_config("tiny", "diff_v1", vocab_size=777, seed=3)
    assert (config.model.vocab_size, config.seed, config.length) == (777, 3, PRESETS["tiny"].context)
    assert train_config("tiny", "softmax", steps=20).warmup == 2
    grown = train_config("nano", context=512)
    assert (grown.model.max_position, grown.length, grown.model.attention) == (512, 512, "diff_v1")
    path = str(trained("diff_v2"))
    started = train_config("nano", init=path, context=300, steps=5)
    assert started.model == replace(Checkpoint(path).config, max_position=300)
    assert (started.tokenizer, started.batch_size, started.warmup) == (path, PRESETS["nano"].batch_size, 1)
    peak = PRESETS["nano"].learning_rate
    for qat, factor in {"ternary": 0.5, "int2_g64": 0.5, "int4_g128": 0.025}.items():
        taught = train_config("nano", init=path, qat=qat)
        assert (taught.learning_rate, taught.schedule, taught.model.sub_norms) == (factor * peak, "cosine", False)
        assert train_config("nano", init=path, qat=qat, learning_rate=0.5).learning_rate == 0.5
    fresh = train_config("nano", qat="ternary")
    assert (fresh.learning_rate, fresh.schedule, fresh.model.sub_norms) == (2 * peak, "two_stage", True)
    assert train_config("nano", schedule="two_stage").schedule == "two_stage"
    with pytest.raises(DiffbitError, match="its attention is diff_v2, not softmax"):
        train_config("nano", "softmax", init=path)
    with pytest.raises(DiffbitError, match="is quantized, but training starts from float weights"):
        train_config("nano", init=str(quantized))
    for arguments, sentence in {
        ("huge", "softmax"): "choose one of pico, tiny, yoco, nano",
        ("tiny", "linear"): "attention is 'linear', wanted one of .*diff_v1",
    }.items():
        with pytest.raises(DiffbitError, match=sentence):
            model_config(*arguments)


def test_fine_tuning_has_its_own_recipe(trained: Callable[[str], Path]) -> None:
    """Without a preset: rows that fit in memory, a rate by the model's size, and its context stays."""
    path = str(trained("softmax"))
    model = Checkpoint(path).config
    tuned = train_config(init=path, context=32)
    assert (tuned.model, tuned.length, tuned.batch_size * tuned.accumulate) == (model, 32, 4)
    assert tuned.learning_rate == pytest.approx(PRESETS["tiny"].learning_rate / 20)
    assert train_config(init=path, trainable="lora").learning_rate == pytest.approx(PRESETS["tiny"].learning_rate / 3)
    assert train_config(init=path, qat="int2_g64").learning_rate == PRESETS["tiny"].learning_rate / 2
    assert train_config(init=path).length == min(512, model.max_position)
    assert train_config("nano", init=path, context=32).model == model
    # three passes of 70 rows are 53 steps of 4; of 10,000 rows, more than 300; of one, fewer than 50
    assert [tuned.scheduled(rows, 4).steps for rows in (70, 10_000, 1)] == [53, 300, 50]
    assert [tuned.scheduled(rows, 4).warmup for rows in (70, 10_000, 1)] == [5, 30, 5]
    asked = train_config(init=path, steps=500)
    assert asked.scheduled(1, 8).steps == 500
    assert train_config().model == train_config("tiny", "diff_v1").model


def test_noise_ratio() -> None:
    for attention, ratio, heads in (("diff_v2", 2, (4, 2)), ("diff_v2", 4, (4, 1)), ("diff_v1", 2, (2, 1))):
        mixer = train_config("tiny", attention, noise_ratio=ratio).model.layers[0].mixer
        assert (mixer.num_heads, mixer.num_kv_heads, mixer.noise_ratio) == (*heads, ratio)
    with pytest.raises(DiffbitError, match="noise_ratio is 4, wanted a divisor of 2"):
        train_config("tiny", "diff_v1", noise_ratio=4)
    with pytest.raises(DiffbitError, match="noise_ratio is 2, wanted none with init"):
        train_config("tiny", init="anywhere", noise_ratio=2)
