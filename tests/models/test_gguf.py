"""GGUF files: tensors, configs and tokenizers as transformers reads them, and damaged files."""

from __future__ import annotations

import json
import os
import random
import re
import struct
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from diffbit import models, quantize
from diffbit.apps.train.new_tokenizer import train_tokenizer
from diffbit.calib_data import load_tokenizer
from diffbit.cli.automatic import quantize_model
from diffbit.cli.options import chat_template
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io import gguf as io_gguf
from diffbit.io.errors import DiffbitError
from diffbit.io.tokenizer_files import WORDS, from_gguf, tokenizer_files
from diffbit.models import Checkpoint
from diffbit.models.checkpoint.gguf_file import open_gguf
from diffbit.models.families import read_config
from diffbit.models.families._gguf import NAMES
from diffbit.models.families._huggingface import common_fields
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.runtime import verify
from diffbit.settings import Sampling

HIDDEN, FFN, HEADS, KV, WIDTH, LAYERS, VOCABULARY = 256, 512, 8, 4, 32, 2, 300
TEXT = Path(__file__).read_text()
TYPES = gguf.GGMLQuantizationType


def llama_cpp_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter writes q_proj and k_proj (its `permute`)."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def blocks(shape: tuple[int, ...], type: TYPES) -> np.ndarray:
    """Random blocks of a type, with scales that are finite."""
    weights, nbytes = gguf.GGML_QUANT_SIZES[type]
    generator = np.random.default_rng(0)
    if type in (TYPES.F32, TYPES.F16, TYPES.BF16, TYPES.Q8_0, TYPES.Q4_0):
        return gguf.quants.quantize(generator.standard_normal(shape, np.float32) * 0.05, type)
    data = generator.integers(0, 256, (shape[0], shape[1] // weights, nbytes), dtype=np.uint8)
    half = np.frombuffer(np.float16(0.002).tobytes(), np.uint8)
    for at in {TYPES.Q6_K: (208,), TYPES.Q3_K: (108,), TYPES.Q2_K: (80, 82)}.get(type, (0, 2)):
        data[..., at : at + 2] = half
    return data.reshape(shape[0], -1)


def write(file: Path, type: TYPES = TYPES.F32, tied: bool = True, without: str = "", **changes: Any) -> Path:
    """A llama of random weights; changes: of the metadata behind "llama."; others: by their whole keys."""
    file.parent.mkdir(exist_ok=True)
    metadata: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500.0,
        "rope.dimension_count": WIDTH,
    }
    architecture = changes.pop("architecture", "llama")
    writer = gguf.GGUFWriter(file, architecture)
    tokenizer, others = changes.pop("tokenizer", {}), changes.pop("others", {})
    vocabulary = len(tokenizer.get("ggml.tokens", range(VOCABULARY)))
    metadata["vocab_size"] = vocabulary
    for key, value in {f"{architecture}.{key}": value for key, value in (metadata | changes).items()}.items():
        kinds = {float: gguf.GGUFValueType.FLOAT32, int: gguf.GGUFValueType.UINT32, str: gguf.GGUFValueType.STRING}
        kind = next(kinds[of] for of in kinds if isinstance(value, of))
        writer.add_key_value(key, value, kind)
    for key, value in ({f"tokenizer.{key}": value for key, value in tokenizer.items()} | others).items():
        of = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value), of)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocabulary, HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {} if tied else {"output": (vocabulary, HIDDEN)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_norm": (HIDDEN,), f"blk.{i}.ffn_norm": (HIDDEN,)}
        shapes |= {f"blk.{i}.attn_q": (HEADS * WIDTH, HIDDEN), f"blk.{i}.attn_output": (HIDDEN, HEADS * WIDTH)}
        shapes |= {f"blk.{i}.{name}": (KV * WIDTH, HIDDEN) for name in ("attn_k", "attn_v")}
        shapes |= {f"blk.{i}.{name}": (FFN, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{i}.ffn_down": (HIDDEN, FFN)}
        if architecture == "qwen2":
            rows = {"attn_q": HEADS * WIDTH, "attn_k": KV * WIDTH, "attn_v": KV * WIDTH}
            shapes |= {f"blk.{i}.{name}.bias": (count,) for name, count in rows.items()}
        elif architecture == "qwen3":
            shapes |= {f"blk.{i}.{name}_norm": (WIDTH,) for name in ("attn_q", "attn_k")}
    for name, shape in shapes.items():
        if name != without and len(shape) == 1:
            whole = name if name.endswith(".bias") else f"{name}.weight"
            writer.add_tensor(whole, np.linspace(0.5, 1.5, shape[0], dtype=np.float32))
        elif name != without:
            data = blocks(shape, type)
            writer.add_tensor(f"{name}.weight", data, raw_dtype=None if type in (TYPES.F32, TYPES.F16) else type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def theirs(file: Path) -> Any:
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    config = AutoConfig.from_pretrained(**source)
    config.head_dim = WIDTH  # transformers 5.23 does not read qwen3's
    return AutoModelForCausalLM.from_pretrained(**source, config=config, dtype=torch.float32).eval()


# ---- weights and config ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "type", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
)
def test_every_gguf_type_is_read_as_the_gguf_package_reads_it(type: str, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", TYPES[type], tied=type != "Q4_1")
    checkpoint = Checkpoint(file)
    assert checkpoint.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(type, "float32")
    tensors = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(file).tensors
    }
    assert len(tensors) == len(checkpoint.names)
    for name in checkpoint.names:
        module = name.removesuffix(".weight")
        before, layer = f"blk.{name.split('.')[2]}." if "layers" in name else "", ".".join(module.split(".")[-2:])
        there = tensors[f"{before}{NAMES.get(layer) or NAMES.get(module) or NAMES[module.split('.')[-1]]}.weight"]
        mine = checkpoint.read(name).float().numpy()
        if "q_proj" in name or "k_proj" in name:
            mine = llama_cpp_rows(mine, HEADS if "q_proj" in name else KV)
        np.testing.assert_array_equal(mine, there.reshape(mine.shape))


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A model in parts, as the package writes them."""
    monkeypatch.setattr(gguf, "GGUFWriter", partial(gguf.GGUFWriter, split_max_tensors=6))
    write(tmp_path / "parts" / "m.gguf", TYPES.Q8_0, tied=False)
    return sorted((tmp_path / "parts").iterdir())


def test_a_model_in_parts_is_that_of_one_file(parts: list[Path], tmp_path: Path) -> None:
    assert [part.name for part in parts] == [f"m-{number:05}-of-00004.gguf" for number in range(1, 5)]
    whole = tmp_path / "whole.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", gguf.GGUFWriter.func)  # type: ignore[attr-defined]
        write(whole, TYPES.Q8_0, tied=False)
    expected = Checkpoint(whole)
    for path in (parts[0], parts[2], parts[0].parent):
        checkpoint = Checkpoint(path)
        assert checkpoint.names == expected.names and checkpoint.config == expected.config
        for name in expected.names:
            assert torch.equal(checkpoint.read(name), expected.read(name))
    digest = checkpoint.sha256()
    data = bytearray(parts[3].read_bytes())
    data[-1] ^= 1
    parts[3].write_bytes(data)
    assert Checkpoint(parts[0]).sha256() != digest  # of all parts


def test_missing_and_foreign_parts_are_one_sentence(parts: list[Path], tmp_path: Path) -> None:
    first = parts[0]
    (first.parent / "m-00003-of-00004.gguf").rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(DiffbitError, match=r"is one of 4 parts of a model, and m-00003-of-00004.gguf is missing"):
        Checkpoint(first)
    with pytest.raises(DiffbitError, match=r"wanted a name such as model-00001-of-00004.gguf"):
        Checkpoint(tmp_path / "elsewhere.gguf")
    (first.parent / "m-00003-of-00004.gguf").write_bytes(parts[1].read_bytes())
    with pytest.raises(DiffbitError, match=r"m-00003-of-00004.gguf: says that it is part 2 of 4, wanted 3 of 4"):
        Checkpoint(first)


def test_codes_of_one_and_two_bits(tmp_path: Path) -> None:
    """Types that llama.cpp writes and the package does not dequantize, by the formula of ggml-quants.c."""
    generator, weights = np.random.default_rng(0), {41: 128, 42: 64}
    shape, scales = (6, 256), np.array([0, -0.0, 0.02, -1.5, 6e-8, 65504], np.float16)
    for type, count in weights.items():
        blocks = generator.integers(0, 256, (shape[0], shape[1] // count, 18), dtype=np.uint8)
        blocks[..., :2] = scales.view(np.uint8).reshape(6, 1, 2)
        data = np.ascontiguousarray(blocks).reshape(shape[0], -1)
        copy_with(write(tmp_path / "m.gguf"), tmp_path / "x.gguf", "x", data)
        file = (tmp_path / "x.gguf").read_bytes()
        at = file.index(b"\x01\0\0\0\0\0\0\0x") + 9 + 4  # its dimensions and type, of bytes
        assert struct.unpack("<2QI", file[at : at + 20]) == (data.shape[1], shape[0], TYPES.I8)
        (tmp_path / "x.gguf").write_bytes(file[:at] + struct.pack("<2QI", shape[1], shape[0], type) + file[at + 20 :])
        read = open_gguf(tmp_path / "x.gguf")[1]["x"].read().numpy()
        bits, codes = 128 // count, np.empty(shape, int)
        for row, column in np.ndindex(*shape):
            block, index = blocks[row, column // count], column % count * (128 // count)
            codes[row, column] = block[2 + index // 8] >> index % 8 & (1 << bits) - 1
        factors = 2 * codes - 1 if type == 41 else codes - 1
        expected = factors.astype(np.float32) * scales.astype(np.float32)[:, None]
        np.testing.assert_array_equal(read, expected)
        assert len(np.unique(codes)) == 1 << bits
        with pytest.raises(DiffbitError, match="holds tensor x, which a softmax model of its metadata does not have"):
            Checkpoint(tmp_path / "x.gguf")


def stored_in_bits(file: Path, type: int, block: int) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a llama whose matrices have ggml type 41, 42, TQ1_0 or TQ2_0; return it and them, by their names."""
    generator, written, expected = np.random.default_rng(type + block), {}, {}
    shapes = {"token_embd": (VOCABULARY, 512), "output": (VOCABULARY, 512)}
    for i in range(LAYERS):
        names = ("attn_q", "attn_output", "attn_k", "attn_v", "ffn_gate", "ffn_up", "ffn_down")
        rows = (512, 512, 128, 128, FFN, FFN, 512)
        shapes |= {f"blk.{i}.{name}": (count, 512) for name, count in zip(names, rows, strict=True)}
    for name, (rows, columns) in shapes.items():
        levels = (-1, 1) if type == 41 else (-1, 0, 1)
        codes = generator.integers(0, len(levels), (rows, columns // block, block))
        scales = (generator.random((rows, columns // block, 1)) * 0.05 + 0.01).astype(np.float16)
        expected[name] = (np.array(levels)[codes] * scales.astype(np.float32)).reshape(rows, columns)
        if type in (TYPES.TQ1_0, TYPES.TQ2_0):
            written[name] = gguf.quants.quantize(expected[name].astype(np.float32), TYPES(type))
            continue
        bits = 1 if type == 41 else 2
        bytes_ = (codes.reshape(rows, -1, 8 // bits) << np.arange(0, 8, bits)).sum(-1).astype(np.uint8)
        parts = [scales.view(np.uint8).reshape(rows, -1, 2), bytes_.reshape(rows, columns // block, -1)]
        written[name] = np.ascontiguousarray(np.concatenate(parts, -1).reshape(rows, -1))
    writer = gguf.GGUFWriter(file, "llama")
    sizes = {"embedding_length": 512, "feed_forward_length": FFN, "attention.head_count": 8, "vocab_size": VOCABULARY}
    sizes |= {"attention.head_count_kv": 2, "block_count": LAYERS, "context_length": 64, "rope.dimension_count": 64}
    for key, value in sizes.items():
        writer.add_key_value(f"llama.{key}", value, gguf.GGUFValueType.UINT32)
    writer.add_key_value("llama.attention.layer_norm_rms_epsilon", 1e-5, gguf.GGUFValueType.FLOAT32)
    for name in ("output_norm", *(f"blk.{i}.{name}" for i in range(LAYERS) for name in ("attn_norm", "ffn_norm"))):
        writer.add_tensor(f"{name}.weight", np.ones(512, np.float32))
    for name, data in written.items():
        writer.add_tensor(f"{name}.weight", data, raw_dtype=TYPES.I8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = file.read_bytes()
    for name, data in written.items():  # the package knows neither type 42 nor blocks of 128 of it
        key = f"{name}.weight".encode()
        at = found.index(struct.pack("<Q", len(key)) + key) + 8 + len(key) + 4
        assert struct.unpack("<2QI", found[at : at + 20]) == (data.shape[1], data.shape[0], TYPES.I8)
        found = found[:at] + struct.pack("<2QI", 512, data.shape[0], type) + found[at + 20 :]
    file.write_bytes(found)
    return file, expected


@pytest.mark.parametrize(
    ("type", "block", "format"),
    [(41, 128, "bin_g128"), (42, 64, "ternary_g64"), (42, 128, "ternary_g128"), (34, 256, "ternary_g128"),
     (35, 256, "ternary_g128")],
)  # fmt: skip
def test_a_model_of_one_or_two_bits_is_kept(type: int, block: int, format: str, tmp_path: Path) -> None:
    file, expected = stored_in_bits(tmp_path / "m.gguf", type, block)
    report = quantize_model(file, tmp_path / "low", measure=False).report
    assert {weight.format for weight in report.weights} == {format} and report.method == "rtn"
    low = quantize.load(tmp_path / "low")
    for name, there in expected.items():
        module, _, layer = name.rpartition(".")
        part = next(part for part, key in NAMES.items() if key == layer)
        found = low.get_submodule(f"model.layers.{module.split('.')[1]}.{part}" if module else part)
        mine = found.weight.dequantize().numpy()
        if layer in ("attn_q", "attn_k"):
            mine = llama_cpp_rows(mine, 8 if layer == "attn_q" else 2)
        np.testing.assert_array_equal(mine, there)
    ids = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(low(ids), models.load(file)(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("architecture, tied", [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)])
def test_logits_are_those_of_transformers(architecture: str, tied: bool, tmp_path: Path) -> None:
    more = {} if architecture == "llama" else {"attention.key_length": WIDTH, "attention.value_length": WIDTH}
    file = write(tmp_path / "m.gguf", TYPES.Q8_0, tied, architecture=architecture, **more)
    ids = torch.randint(VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(0))
    logits = theirs(file)(ids).logits
    assert logits.std() > 0.3
    torch.testing.assert_close(models.load(file)(ids), logits, rtol=0, atol=1e-4)


def test_llama3_scaling_is_found_in_the_factors(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", **{"rope.freq_base": 500000.0})
    frequencies = 500000.0 ** -(np.arange(0, WIDTH, 2) / WIDTH)
    wavelengths = 2 * np.pi / frequencies
    smooth = (8192 / wavelengths - 1) / 3  # as llama.cpp's converter writes them
    factors = np.where(wavelengths < 2048, 1, np.where(wavelengths > 8192, 32, 1 / ((1 - smooth) / 32 + smooth)))
    scaled = tmp_path / "scaled.gguf"
    for wrong in (False, True):
        copy_with(file, scaled, "rope_freqs.weight", (factors + 0.5 * wrong).astype(np.float32))
        if wrong:
            with pytest.raises(DiffbitError, match="holds factors that"):
                Checkpoint(scaled)
        else:
            scaling = Checkpoint(scaled).config.rope_scaling
            assert scaling is not None and scaling == type(scaling)(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_other_scalings(kind: str, tmp_path: Path) -> None:
    scaling = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
    config = Checkpoint(write(tmp_path / "m.gguf", **scaling)).config
    values = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 16}
    fields = common_fields(config) | {"rope_theta": 500.0, "rope_scaling": values}
    assert config.rope_scaling is not None and read_config(fields).rope_scaling == config.rope_scaling


def copy_with(source: Path, out: Path, name: str, tensor: np.ndarray) -> None:
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(out, "llama")
    for field in reader.fields.values():
        if field.name.startswith("llama."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for other in reader.tensors:
        writer.add_tensor(other.name, np.array(other.data))
    writer.add_tensor(name, tensor.view(np.int8) if tensor.dtype == np.uint8 else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_from_a_file_to_an_artifact(tmp_path: Path) -> None:
    train_tokenizer([TEXT], VOCABULARY, tmp_path / "t")
    metadata = of_byte_level(tmp_path / "t", "gpt-2", chat_template="{{ bos_token }}{{ messages[0].content }}")
    file = write(tmp_path / "m" / "m.gguf", TYPES.Q8_0, tokenizer=metadata)
    for model in (file, file.parent):  # a folder with one such file is the same
        assert chat_template(model)([{"role": "user", "content": "Hi"}]).endswith("Hi")
        report = quantize_checkpoint(model, tmp_path / "q", Scheme(weights=parse_format("int4_g32")), overwrite=True)
        assert report.weights
    assert verify(export_artifact(tmp_path / "q", tmp_path / "a")).passed
    assert (tmp_path / "a" / "tokenizer.json").is_file()
    write(tmp_path / "m" / "other.gguf")
    with pytest.raises(DiffbitError, match="holds 2 GGUF files"):
        Checkpoint(tmp_path / "m")


# ---- tokenizers -----------------------------------------------------------------------------------------------------

ODD = [
    "", "Hello world", "  two spaces", "tabs\t\tand\n\n\nnewlines\r\n", "don't I'LL we've THEY'RE", "12345 3.14 ½²Ⅷ",
    "naïve café ÀÉÎ", "日本語のテキスト", "Привет, мир!", "مرحبا بالعالم", "🙂👩\u200d👩\u200d👧 🇩🇪",
    "a\u0301 \u200b\ufeff", "<|endoftext|>x", " <|endoftext|> ", "def f(x):\n    return x**2  # ok\n", "   ",
    "\x00\x01\x7f", "‘quotes’ \u2003\u00a0", "▁▁ ▁a", "</s> <s>a",
]  # fmt: skip


def odd_strings() -> list[str]:
    choose = random.Random(0)
    letters = "abcdefghijklmnop ABC 0123456789 .,;:!?'\"-_()[]{}<>|/\\\n\t éüß中日русский🙂 \u0301½"
    strings = ["".join(choose.choices(letters, k=choose.randint(1, 40))) for _ in range(280)]
    return [
        *ODD,
        *strings,
        *(choose.choice(ODD) + choose.choice(["", " ", "\n"]) + choose.choice(ODD) for _ in range(200)),
    ]


def of_byte_level(folder: Path, pre: str, **more: Any) -> dict[str, Any]:
    """The metadata of a trained tokenizer."""
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    merges = json.loads(model.to_str())["model"]["merges"]
    tokens = [model.id_to_token(index) for index in range(model.get_vocab_size())]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": [3, *[1] * (len(tokens) - 1)],
        "ggml.merges": [" ".join(merge) for merge in merges],
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 0,
        **more,
    }


@pytest.mark.parametrize(
    "pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "dbrx", "smaug-bpe", "lfm2", "gpt-4o"]
)
def test_byte_level_tokens(pre: str, tmp_path: Path) -> None:
    """The ids of the tokenizer that the metadata were taken from, with the words of `pre`; and transformers' ids."""
    train_tokenizer([TEXT], 500, tmp_path)
    file = write(tmp_path / "m.gguf", tokenizer=of_byte_level(tmp_path, pre, **{"chat_template": "{{ x }}"}))
    expected = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    if pre == "smollm":  # as SmolLM2's own tokenizer.json has it
        expected.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    elif pre != "gpt-2":
        split = pre_tokenizers.Split(tokenizers.Regex(WORDS[pre][0][0]), "isolated")
        expected.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    (tmp_path / "tokenizer.json").rename(tmp_path / "other.json")
    files = tokenizer_files(file)
    assert files["chat_template.jinja"] == b"{{ x }}"
    mine = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    bos = [0] if WORDS[pre][2] else []
    for text in odd_strings():
        ids = mine.encode(text).ids
        assert ids == bos + expected.encode(text).ids
        assert mine.decode(ids, skip_special_tokens=False).removeprefix("<|endoftext|>" if bos else "") == text
    if pre != "smollm":  # for which transformers 5.23 takes GPT-2's words: digits stay together
        other = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
        assert [mine.encode(text, add_special_tokens=False).ids for text in odd_strings()] == [
            other(text, add_special_tokens=False).input_ids for text in odd_strings()
        ]
    assert load_tokenizer(file).eos_id == 0


def test_settings_of_sampling(tmp_path: Path) -> None:
    """What the file says of sampling, by llama.cpp's keys, is what a generation_config.json says by transformers'."""
    train_tokenizer([TEXT], 500, tmp_path)
    tokenizer = of_byte_level(tmp_path, "gpt-2")
    assert "generation_config.json" not in tokenizer_files(write(tmp_path / "plain.gguf", tokenizer=tokenizer))
    keys = {"temp": 0.5, "top_k": -1, "top_p": 0.75, "min_p": 0.25, "penalty_repeat": 1.5, "penalty_last_n": 64}
    others = {f"general.sampling.{key}": value for key, value in keys.items()}
    files = tokenizer_files(write(tmp_path / "m.gguf", tokenizer=tokenizer, others=others))
    sampling = Sampling.of_model(json.loads(files["generation_config.json"]))
    assert sampling == Sampling(0.5, top_k=0, top_p=0.75, min_p=0.25, repetition_penalty=1.5)
    wrong = write(tmp_path / "wrong.gguf", tokenizer=tokenizer, others={"general.sampling.temp": "hot"})
    with pytest.raises(DiffbitError, match=r"wrong\.gguf: general\.sampling\.temp is 'hot', wanted a number"):
        tokenizer_files(wrong)


def test_sentencepiece_tokens(tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "sp"), model_type="bpe", vocab_size=600,
        byte_fallback=True, character_coverage=0.99, normalization_rule_name="identity", minloglevel=2,
        remove_extra_whitespaces=False,
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    count = pieces.vocab_size()
    file = write(tmp_path / "m.gguf", tokenizer={
        "ggml.model": "llama",
        "ggml.tokens": [pieces.id_to_piece(index) for index in range(count)],
        "ggml.scores": [pieces.get_score(index) for index in range(count)],
        "ggml.token_type": [2, 3, 3, *(6 if pieces.is_byte(index) else 1 for index in range(3, count))],
        "ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "ggml.unknown_token_id": 0,
    })  # fmt: skip
    mine = tokenizers.Tokenizer.from_buffer(tokenizer_files(file)["tokenizer.json"])
    other = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in odd_strings():
        assert mine.encode(text).ids == other(text).input_ids
        if text[:1] not in ("", " ", "▁") and "s>" not in text:  # transformers adds no second space
            assert mine.encode(text, add_special_tokens=False).ids == pieces.encode(text)


def test_sentencepiece_tokens_of_gemma(tmp_path: Path) -> None:
    """No space is added before a text, and runs of spaces and of ends of lines are pieces of their own."""
    import sentencepiece

    (tmp_path / "text").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "sp"), model_type="bpe", vocab_size=600,
        byte_fallback=True, character_coverage=0.99, normalization_rule_name="identity", minloglevel=2,
        remove_extra_whitespaces=False, add_dummy_prefix=False, user_defined_symbols=["\n", "\n\n", "▁▁", "▁▁▁", "<b>"],
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    count = pieces.vocab_size()
    file = write(tmp_path / "m.gguf", tokenizer={
        "ggml.model": "llama", "ggml.pre": "default", "ggml.add_space_prefix": False,
        "ggml.tokens": [pieces.id_to_piece(index) for index in range(count)],
        "ggml.scores": [pieces.get_score(index) for index in range(count)],
        "ggml.token_type": [2, 3, 3, 4, 4, 4, 4, 4, *(6 if pieces.is_byte(i) else 1 for i in range(8, count))],
        "ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "ggml.unknown_token_id": 0,
    })  # fmt: skip
    mine = tokenizers.Tokenizer.from_buffer(tokenizer_files(file)["tokenizer.json"])
    for text in odd_strings():
        if "s>" not in text and "▁" not in text:
            assert mine.encode(text, add_special_tokens=False).ids == pieces.encode(text)
            assert mine.decode(mine.encode(text).ids) == pieces.decode(pieces.encode(text))


def test_the_words_of_llama3_need_no_name(tmp_path: Path) -> None:
    """BitNet's files do not say how text is cut into words, but have the vocabulary of Llama 3."""
    train_tokenizer([TEXT], 500, tmp_path)
    metadata = of_byte_level(tmp_path, "llama-bpe")
    tokens = metadata["ggml.tokens"]
    others = [f"<unused{index}>" for index in range(len(tokens), 128000)]
    metadata |= {"ggml.tokens": [*tokens, *others, "<|begin_of_text|>"], "ggml.bos_token_id": 128000}
    metadata |= {"ggml.token_type": [3, *[1] * (len(metadata["ggml.tokens"]) - 2), 3]}
    named = io_gguf.read_gguf(write(tmp_path / "named.gguf", tokenizer=metadata))
    del metadata["ggml.pre"]
    unnamed = io_gguf.read_gguf(write(tmp_path / "m.gguf", tokenizer=metadata))
    assert from_gguf(unnamed) == from_gguf(named)
    metadata["ggml.tokens"][-1] = "<s>"
    with pytest.raises(DiffbitError, match="its pre-tokenizer is None, wanted one of"):
        tokenizer_files(write(tmp_path / "m.gguf", tokenizer=metadata))


def test_the_header_of_a_large_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_gguf, "LARGE", 1)
    file = write(tmp_path / "m.gguf")
    first = io_gguf.read_gguf(file)
    assert io_gguf.read_gguf(file) is first
    write(file, context_length=32)
    os.utime(file, ns=(0, 0))
    assert io_gguf.read_gguf(file).get("llama.context_length", int) == 32


@pytest.mark.parametrize("number, pooling", [(None, None), (0, None), (1, "mean"), (3, "last"), (2, "cls")])
def test_pooling(number: int | None, pooling: str | None, tmp_path: Path) -> None:
    changes = {} if number is None else {"pooling_type": number}
    assert Checkpoint(write(tmp_path / "m.gguf", **changes)).config.pooling == pooling


def test_a_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    """As ollama stores it: under its hash, without an ending."""
    file = write(tmp_path / "m.gguf", others={"tokenizer.ggml.model": "none"})
    blob = tmp_path / "sha256-0123"
    blob.symlink_to(file)
    assert Checkpoint(blob).config == Checkpoint(file).config
    assert tokenizer_files(blob) == {}
    assert io_gguf.find_gguf(tmp_path / "missing") is None and io_gguf.find_gguf(Path(__file__)) is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes of this kind")
def test_a_pipe_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening one waits for a writer, without an end."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("it is opened"))
    assert io_gguf.find_gguf(tmp_path / "pipe") is None


def test_biases_of_queries_keys_and_values_alone(tmp_path: Path) -> None:
    """A llama of llama.cpp may have them without a bias of the output; it is a qwen2 of transformers."""
    wanted = theirs(write(tmp_path / "qwen2.gguf", architecture="qwen2"))
    state = models.load(tmp_path / "qwen2.gguf").state_dict()
    reader = gguf.GGUFReader(tmp_path / "qwen2.gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, field in reader.fields.items():
        if key.startswith("qwen2."):
            writer.add_key_value(key.replace("qwen2", "llama"), field.contents(), field.types[0])
    for tensor in reader.tensors:
        data = tensor.data.copy()
        if re.search(r"attn_[qk]\.", tensor.name):
            data = llama_cpp_rows(data, HEADS if "attn_q." in tensor.name else KV)
        writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, ids = models.load(tmp_path / "m.gguf"), torch.arange(30)[None]
    assert ours.state_dict().keys() == state.keys()
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), wanted(ids).logits, atol=1e-4, rtol=1e-4)


# ---- files that are refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architecture": "mamba"}, "architecture is 'mamba'"),
        ({"expert_count": 8}, "8 experts"),
        ({"rope.dimension_count": 16}, "rotates 16 of the"),
        ({"attention.sliding_window": 32}, "sliding window of 32"),
        ({"attention.value_length": 16}, "values of another width"),
        ({"without": "token_embd"}, "no tensor token_embd"),
        ({"without": "blk.1.attn_q"}, "blk.1.attn_q.weight of shape .* is missing"),
        ({"feed_forward_length": 640}, "ffn_gate.weight has shape"),
    ],
)
def test_models_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DiffbitError, match=message) as error:
        Checkpoint(write(tmp_path / "m.gguf", **changes))
    assert "m.gguf" in str(error.value)


TEXTS = "llama.rope.scaling.type", "tokenizer.ggml.model", "tokenizer.chat_template"
NUMBERS = (
    "split.count", "general.alignment", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eot_token_id",
    "llama.expert_count",
)  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in TEXTS for value in ([1, 2], ["a", "b"], 0.5, 3, True)),
        *((key, value) for key in NUMBERS for value in ([1, 2], ["a", "b"], 0.5, "one")),
    ],
)
def test_metadata_of_a_wrong_type_is_refused(key: str, value: object, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", others={key: value})
    with pytest.raises(DiffbitError, match=re.escape(key)) as error:
        Checkpoint(file)
        tokenizer_files(file)
    assert str(error.value).startswith(str(file)) and "wanted" in str(error.value)


def test_tensors_that_overlap_or_are_not_aligned_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf")
    data = file.read_bytes()
    name = data.index(b"output_norm.weight")
    at = name + len("output_norm.weight") + 4 + 8 + 4  # after its dimensions and type
    (offset,) = struct.unpack("<Q", data[at : at + 8])
    for begin, message in ((offset - 32, "are also those of"), (offset + 4, "wanted a multiple of 32")):
        file.write_bytes(data[:at] + struct.pack("<Q", begin) + data[at + 8 :])
        with pytest.raises(DiffbitError, match=message):
            Checkpoint(file)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.parametrize(
    ("tensors", "pairs", "body", "message"),
    [
        (0, 1 << 36, b"", "announces 68,719,476,736 metadata"),
        (1 << 36, 0, b"", "announces 68,719,476,736 tensors"),
        (0, 1, text("k") + struct.pack("<IIQ", 9, 8, 1 << 33), "announces 8,589,934,592 entries of arrays"),
        (0, 1, text("k") + struct.pack("<IIQ", 9, 4, 1 << 33), "announces 8,589,934,592 entries of arrays"),
        (0, 2, 2 * (text("k") + struct.pack("<IIQ", 9, 0, 1 << 20) + bytes(1 << 20)), "the metadata 'k' twice"),
        (0, 1, text("k") + struct.pack("<IQ", 8, 1 << 33), "has a header of more than 268,435,456 bytes"),
        (0, 1, struct.pack("<Q", 1 << 40), "has a header of more than 268,435,456 bytes"),
    ],
)
def test_absurd_counts_are_refused(tensors: int, pairs: int, body: bytes, message: str, tmp_path: Path) -> None:
    """In a file of 4 TB, all of it a hole, into which any count fits."""
    with open(tmp_path / "m.gguf", "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + body)
        file.truncate(1 << 42)
    with pytest.raises(DiffbitError, match=message):
        io_gguf.read_gguf(tmp_path / "m.gguf")


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    file, other = write(tmp_path / "m.gguf", TYPES.F16), write(tmp_path / "other" / "m.gguf", TYPES.F16, tied=False)
    checkpoint = Checkpoint(file)
    checkpoint.read("model.embed_tokens.weight")
    other.replace(file)
    with pytest.raises(DiffbitError, match=r"m\.gguf: was changed while diffbit read it; run the command again"):
        checkpoint.read("model.embed_tokens.weight")


def test_tokenizers_that_are_refused(tmp_path: Path) -> None:
    train_tokenizer([TEXT], 300, tmp_path)
    good = of_byte_level(tmp_path, "gpt-2")
    (tmp_path / "tokenizer.json").unlink()
    for changes, message in (
        ({"ggml.pre": "new-one"}, "pre-tokenizer is 'new-one'"),
        ({"ggml.model": "rwkv"}, "tokenizer is 'rwkv'"),
        ({"ggml.tokens": ["a"] * 300}, "holds the token 'a' twice"),
        ({"ggml.merges": ["zz yy"]}, "is damaged"),
        ({"ggml.bos_token_id": 1000}, "bos_token_id is 1000, wanted a whole number from 0 to 299"),
        ({"ggml.eos_token_id": -1}, "eos_token_id is -1, wanted a whole number from 0 to 299"),
        ({"ggml.tokens": [1, 2, 3]}, r"tokens is \[1, 2, 3\], wanted a list of texts"),
        ({"ggml.merges": "a b"}, "merges is 'a b', wanted a list of texts"),
        ({"ggml.token_type": ["a"]}, r"token_type is \['a'\], wanted a list of whole numbers"),
        ({"ggml.add_bos_token": 3}, "add_bos_token is 3, wanted true or false"),
        ({"ggml.pre": ["gpt-2"]}, r"pre is \['gpt-2'\], wanted text"),
        ({"ggml.model": "llama", "ggml.scores": [1.0, float("nan")]}, "scores is .*, wanted a list of finite numbers"),
        ({"ggml.model": "llama", "ggml.scores": [1.0]}, "scores has 1 entries, wanted one for each of 300 tokens"),
    ):
        with pytest.raises(DiffbitError, match=message):
            load_tokenizer(write(tmp_path / "m.gguf", tokenizer=good | changes))


def test_a_file_without_tensors(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("general.architecture") + struct.pack("<I", 8))
    file.write_bytes(file.read_bytes() + text("llama"))
    with pytest.raises(DiffbitError, match=r"m\.gguf: holds no tensor token_embd\.weight"):
        Checkpoint(file)


def test_damaged_files(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", TYPES.Q4_0)
    data = file.read_bytes()
    header = data.index(b"token_embd") + 400

    def refused(content: bytes, message: str = "") -> None:
        file.write_bytes(content)
        with pytest.raises(DiffbitError, match=message) as error:
            Checkpoint(file)
        assert str(error.value).startswith(str(file)) and "\n" not in str(error.value)

    for length in (*range(0, header, 29), len(data) // 2, len(data) - 1):
        refused(data[:length])
    refused(b"GGML" + data[4:], "is not a GGUF file")
    refused(data[:4] + struct.pack("<I", 9) + data[8:], "version 9")
    for at in (8, 16):  # the counts
        refused(data[:at] + struct.pack("<Q", 1 << 62) + data[at + 8 :], "cut short or damaged")
    name = data.index(b"token_embd.weight")
    after = name + len("token_embd.weight")
    refused(data[: name - 8] + struct.pack("<Q", 1 << 40) + data[name:], "cut short or damaged")
    refused(data[:after] + struct.pack("<I", 77) + data[after + 4 :], "77 dimensions")
    refused(data[: after + 4] + struct.pack("<Q", 1 << 60) + data[after + 12 :], "has the shape")
    refused(data[: after + 4] + struct.pack("<Q", 48) + data[after + 12 :], "not a multiple of its blocks")
    refused(data[: after + 20] + struct.pack("<I", 9) + data[after + 24 :], "Q8_1, which the package gguf does not")
    refused(data[: after + 20] + struct.pack("<I", 999) + data[after + 24 :], "unknown type 999")
    refused(data[: after + 24] + struct.pack("<Q", 1 << 40) + data[after + 32 :], "is cut short: tensor token_embd")
