"""Schemes: what is quantized by default, overrides, files, and refusals that name what is wrong."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import ModelConfig
from diffbit.quantize import AttentionScheme, Scheme, format_name, linear_shapes, resolve, sizes
from diffbit.quantize.scheme import parse_override

INT4, INT8 = parse_format("int4_g32"), parse_format("int8")
CONFIG = ModelConfig.uniform(
    vocab_size=96, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=128,
    attention="diff_v2",
)  # fmt: skip
FULL = Scheme(
    weights=INT4,
    activations="int8",
    attention=AttentionScheme(logits=6),
    embedding=INT8,
    overrides=(("lm_head", INT8), ("model.layers.0.*", None), ("*.down_proj", parse_format("nf4"))),
)


def test_defaults_keep_the_head_and_lambda():
    formats = Scheme(weights=INT4).formats(CONFIG)
    kept = set(linear_shapes(CONFIG)) - set(formats)
    assert kept == {"lm_head", "model.layers.0.self_attn.lambda_proj", "model.layers.1.self_attn.lambda_proj"}
    assert set(formats.values()) == {INT4}
    assert len(formats) == 2 * 7


def test_the_last_matching_override_decides():
    formats = FULL.formats(CONFIG)
    assert formats["lm_head"] == INT8
    assert formats["model.layers.1.self_attn.q_proj"] == INT4
    assert "model.layers.0.self_attn.q_proj" not in formats
    assert formats["model.layers.0.mlp.down_proj"].name == "nf4"  # the last match wins
    # a glob reaches the head and lambda only where it names them
    assert "lm_head" not in Scheme(overrides=(("*", INT8),)).formats(CONFIG)
    named = Scheme(overrides=(("*.lambda_proj", INT8),)).formats(CONFIG)
    assert set(named) == {f"model.layers.{i}.self_attn.lambda_proj" for i in (0, 1)}


def test_an_override_given_twice_is_refused():
    """A file keeps one value a glob, in the first one's place: read back, another override would win."""
    with pytest.raises(DiffbitError, match=r"'\*q_proj' is given twice"):
        Scheme(INT8, overrides=(("*q_proj", INT8), ("*", None), ("*q_proj", None)))


@pytest.mark.parametrize("glob", ["layers.9*", "model.embed*", "model.norm", "lm_heat", "model.layers.2.*"])
def test_an_override_that_matches_nothing_is_named(glob):
    with pytest.raises(DiffbitError, match="matches no linear layer") as error:
        Scheme(weights=INT4, overrides=((glob, INT8),)).formats(CONFIG)
    assert repr(glob) in str(error.value)


def test_a_format_that_does_not_fit_names_the_layer():
    config = ModelConfig.uniform(
        vocab_size=96, hidden_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=6, intermediate_size=128,
        attention="diff_v1",
    )  # fmt: skip
    with pytest.raises(DiffbitError, match=r"self_attn\.q_proj: .*\(48, 48\).*multiple of 64"):
        Scheme(weights=parse_format("nf4")).formats(config)


@pytest.mark.parametrize("text, expected", [("lm_head=int8", ("lm_head", INT8)), ("a=b*=none", ("a=b*", None))])
def test_parse_override(text, expected):
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["lm_head", "=int8", "lm_head=", "lm_head=int9", ""])
def test_bad_overrides_are_named(text):
    with pytest.raises(DiffbitError) as error:
        parse_override(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("scheme", [FULL, Scheme(), Scheme(weights=parse_format("int2_g16_asym"))])
def test_dictionaries_come_back(scheme):
    assert Scheme.from_dict(scheme.to_dict()) == scheme


def test_the_example_in_the_docstring_reads(tmp_path):
    import tomllib

    from diffbit.quantize import scheme

    text = (scheme.__doc__ or "").split("artifacts all hold one.")[1].split("A tied table")[0]
    read = Scheme.from_dict(tomllib.loads(text))
    attention = AttentionScheme(8, "int8", "int4", "int4", 32)
    overrides = (("lm_head", INT8), ("model.layers.0.*", None))
    assert read == Scheme(INT4, INT8, INT8, "int8", attention, overrides)


def test_tables_of_low_bit_weights_are_int8_unless_said_otherwise(tmp_path):
    def read(text: str) -> Scheme:
        (tmp_path / "scheme.toml").write_text(text)
        return Scheme.from_file(tmp_path / "scheme.toml")

    assert read('weights = "int4_g32"') == Scheme(INT4, INT8, INT8)
    assert read('weights = "int4_g32"\nembedding = "none"') == Scheme(INT4, None, INT8)
    assert read('weights = "int4_g32"\nhead = "int4_g32"') == Scheme(INT4, INT8, INT4)
    assert read('attention = { keys = "int4" }') == Scheme(attention=AttentionScheme(keys="int4"))
    assert Scheme.from_dict({"weights": "int4_g32"}) == Scheme(INT4), "as checkpoints from before hold it"


def test_a_tied_table_is_quantized_once():
    tied = replace(CONFIG, tie_embeddings=True)
    once, apart = Scheme(INT4, INT8, INT8), Scheme(INT4, INT8, INT4)
    assert once.keeps_tied(tied) and Scheme(INT4).keeps_tied(tied) and not apart.keeps_tied(tied)
    assert once.formats(tied)["model.embed_tokens"] == INT8 and "lm_head" not in once.formats(tied)
    assert apart.formats(tied)["lm_head"] == INT4 == once.formats(CONFIG)["model.layers.0.mlp.up_proj"]
    table = INT8.device_nbytes((CONFIG.vocab_size, CONFIG.hidden_size), 4)
    assert sizes(resolve(CONFIG, once)).nbytes - sizes(resolve(tied, once)).nbytes == table


@pytest.mark.parametrize("name", ["nf4", "ternary", "mxfp4", "int4", "int2_g32_asym", "int4_g16"])
def test_formats_that_an_embedding_cannot_have(name):
    with pytest.raises(
        DiffbitError, match=rf"model.embed_tokens: an embedding \(\d+, \d+\) cannot be {name}, .*; wanted int8"
    ):
        Scheme(INT4, parse_format(name)).formats(CONFIG)


@pytest.mark.parametrize(
    "text, words",
    [
        ('weihgts = "int8"', ["weihgts", "weights"]),
        ('weights = "int4_g33"', ["weights", "int4_g33", "33"]),
        ("weights = 4", ["weights", "4"]),
        ('weights = "int7_g64"', ["int7_g64", "8 bits", "int8_g64"]),
        ('weights = "int4_g32"\n[overrides]\nlm_head = "int4_g16"', ["int4_g16", "groups of 16", "int4_g32"]),
        ('kv = "int8"', ["kv"]),
        ('activations = "int4"', ["activations", "int4"]),
        ('weights = "int4_g32"\nactivations = "int4"', ["int4_g32", "ternary", "int8"]),
        ('weights = "ternary"\nactivations = "int4"\n[overrides]\nlm_head = "int8"', ["override 'lm_head'", "int8"]),
        ('activations = "int3"', ["int3", "int8"]),
        ("attention = { logits = 99 }", ["99", "2", "16"]),
        ("attention = { logits = 1 }", ["logits", "1"]),
        ("attention = { logits = true }", ["True"]),
        ("attention = { kq = 'int4' }", ["kq", "logits"]),
        ("attention = { qk = 4 }", ["qk", "4", "int8, int4"]),
        ("attention = { keys = 'int5' }", ["keys", "int5", "int2"]),
        ("attention = { first = 17 }", ["first", "17", "16"]),
        ("attention = { layers = { one = 'int4' } }", ["layers", "'one'", "the number of a layer"]),
        ("attention = { layers = { 0 = 'int4,int5' } }", ["layers", "int5", "int4"]),
        ("attention = { layers = { 0 = 'int4,int4,int4' } }", ["int4,int4,int4", "keys and values"]),
        ("attention = { layers = { 0 = 4 } }", ["layers", "4", "text"]),
        ("attention = { values = ['int4'] }", ["values", "int4"]),
        ("attention = { window = -1 }", ["window", "-1"]),
        ("attention = 4", ["attention", "4"]),
        ('[overrides]\nlm_head = "int17"', ["lm_head", "int17"]),
        ("[overrides]\nlm_head = 8", ["lm_head", "8"]),
        ("weights = ", ["TOML"]),
    ],
)
def test_bad_files_are_refused(text, words, tmp_path):
    path = tmp_path / "scheme.toml"
    path.write_text(text)
    with pytest.raises(DiffbitError) as error:
        Scheme.from_file(path)
    assert all(word in str(error.value) for word in ["scheme.toml", *words])


def test_other_files_are_refused(tmp_path):
    with pytest.raises(DiffbitError, match=r"\.json or a \.toml"):
        Scheme.from_file(tmp_path / "scheme.yaml")
    with pytest.raises(DiffbitError, match="no such file"):
        Scheme.from_file(tmp_path / "scheme.toml")


def test_a_format_of_a_missing_package_is_named() -> None:
    values = Scheme(weights=parse_format("int4_g32")).to_dict() | {"weights": "theirs_g64"}
    with pytest.raises(
        DiffbitError, match="number format 'theirs_g64' is from the package their-formats, which is not"
    ):
        Scheme.from_dict(values | {"packages": {"theirs_g64": "their-formats"}})
    with pytest.raises(DiffbitError, match="is '-r evil', wanted the name of a package"):
        Scheme.from_dict(values | {"packages": {"theirs_g64": "-r evil"}})


def test_formats_of_diffbit_need_no_package() -> None:
    assert "packages" not in Scheme(weights=parse_format("mxfp4"), head=parse_format("ternary")).to_dict()


def test_layers_of_a_cache_have_their_own_formats():
    scheme = AttentionScheme(keys="int4", values="int3", layers=((1, "int8", None), (2, "fp16", "int2")))
    formats = [(own.key_format, own.value_format) for own in map(scheme.of_layer, range(4))]
    assert formats == [("int4", "int3"), ("int8", "float"), ("fp16", "int2"), ("int4", "int3")]
    assert scheme.to_dict()["layers"] == {"1": "int8,none", "2": "fp16,int2"}
    assert AttentionScheme.from_dict(scheme.to_dict()) == scheme
    assert scheme.with_float("fp16").layers == ((1, "int8", "fp16"), (2, "fp16", "int2"))
    assert scheme.describe() == "keys int4, values int3, other formats in 2 layers, window 32, first 4"
    assert not scheme.of_layer(1).has_window and scheme.has_window and scheme.of_layer(0).layers == ()
    only = AttentionScheme(layers=((1, "int4", "int4"),))
    assert only.is_low_bit and only.has_window and not only.of_layer(0).is_low_bit


def test_layers_that_have_no_cache_are_refused():
    with pytest.raises(DiffbitError, match=r"attention.layers names layer 9, which has no keys and values of its own"):
        Scheme(attention=AttentionScheme(layers=((9, "int8", "int8"),))).formats(CONFIG)
    with pytest.raises(DiffbitError, match=r"names the layers \[1, 0\], wanted each once, in order"):
        AttentionScheme(layers=((1, "int4", "int4"), (0, "int4", "int4")))
    first, *others = CONFIG.layers
    reader = replace(others[0], mixer=replace(others[0].mixer, keys_of=0))
    config = replace(CONFIG, layers=(first, reader, *others[1:]))
    scheme = AttentionScheme(layers=((0, "int8", "fp16"),))
    assert [own.key_format for own in scheme.of_model(config)[:2]] == ["int8", "int8"]  # what the layer reads
    with pytest.raises(DiffbitError, match="names layer 1, which has no keys and values of its own"):
        AttentionScheme(layers=((1, "int8", "int8"),)).check(config)


def test_a_name_tells_the_bits_of_a_mixed_cache():
    scheme = Scheme(INT4, attention=AttentionScheme(keys="int8", values="int8", layers=((0, "fp16", "int8"),)))
    assert re.fullmatch(r"int4_g32, kv mix of \d+\.\d bits", format_name(CONFIG, scheme))
