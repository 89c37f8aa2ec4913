"""Broken or hostile folders: each ends in one sentence that names the file and, where there is one, the tensor."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffbit import DiffbitError, models

from .helpers import hf_model, saved

Q = "model.layers.1.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    model = hf_model("diffllama")
    return {
        "single": saved(model, folder / "single"),
        "sharded": saved(model, folder / "sharded", max_shard_size="20KB"),
        "tied": saved(hf_model("llama", tie_word_embeddings=True), folder / "tied"),
    }


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in values.items() if value != "DELETE"}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def edit_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")


def escape_by_link(folder: Path) -> None:
    shard = shard_of(folder, Q)
    outside = folder.parent / "elsewhere.safetensors"
    shard.rename(outside)
    shard.symlink_to(outside)


def link_config(folder: Path) -> None:
    outside = folder.parent / "outside.json"
    (folder / "config.json").rename(outside)
    (folder / "config.json").symlink_to(outside)


def escape_by_name(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        edit_index(folder, lambda weight_map: weight_map.update({Q: name}))

    return change


def truncate(count: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        os.truncate(file, count if count >= 0 else file.stat().st_size + count)

    return change


def poison(value: float, name: str = Q) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        edit_weights(folder, lambda weights: weights[name].view(-1)[-1:].fill_(value))

    return change


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_weights(folder, change)


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_header(folder, change)


CASES: dict[str, tuple[str, Callable[[Path], Any], list[str]]] = {
    # what: (source, damage, words of the sentence)
    "missing tensor": ("single", weights(lambda w: w.pop(Q)), [f"tensor {Q} of shape (64, 32) is missing"]),
    "missing head": ("tied", config(tie_word_embeddings=False), ["lm_head.weight", "tie_word_embeddings: true"]),
    "missing lambda": ("single", weights(lambda w: w.pop("model.layers.0.self_attn.lambda_k2")), ["lambda_k2"]),
    "extra tensor": ("single", weights(lambda w: w.update({"score.weight": torch.ones(2)})), ["tensor score.weight"]),
    "extra bias": (
        "single",
        weights(lambda w: w.update({Q.replace("weight", "bias"): torch.ones(64)})),
        ["model.safetensors: holds tensor", "q_proj.bias"],
    ),
    "extra layer": ("single", config(num_hidden_layers=2), ["holds tensor model.layers.2.", "config.json"]),
    "parts without quantization": (
        "single",
        weights(lambda w: w.update({Q.replace("weight", "scale"): torch.ones(64, 1)})),
        ["q_proj.scale"],
    ),
    "misshapen tensor": (
        "single",
        weights(lambda w: w.update({Q: torch.ones(32, 64)})),
        ["model.safetensors", Q, "has shape (32, 64), wanted (64, 32)"],
    ),
    "integer weights": ("single", weights(lambda w: w.update({Q: w[Q].int()})), [Q, "dtype int32", "bfloat16"]),
    "NaN": ("single", poison(float("nan")), ["model.safetensors", f"tensor {Q} holds NaN or infinity"]),
    "infinity": ("single", poison(float("-inf")), [f"tensor {Q} holds NaN or infinity"]),
    "NaN in a vector": ("single", poison(float("nan"), "model.norm.weight"), ["model.norm.weight holds NaN"]),
    "unknown model_type": (
        "single",
        config(model_type="mamba"),
        [
            "config.json: model_type is 'mamba', wanted one of Motif, bitnet, ",
            ", qwen2, qwen3",
        ],
    ),
    "no model_type": ("single", config(model_type="DELETE"), ["config.json: model_type is None"]),
    "list as model_type": ("single", config(model_type=["llama"]), ["config.json: model_type is ['llama']"]),
    "odd kv heads": ("single", config(num_key_value_heads=1), ["num_key_value_heads is 1, wanted an even number"]),
    "odd query heads": ("single", config(num_attention_heads=9), ["num_attention_heads is 9, wanted an even number"]),
    "indivisible heads": ("tied", config(num_key_value_heads=3), ["num_attention_heads is 8, wanted a multiple", "3"]),
    "indivisible pairs": ("single", config(num_key_value_heads=6), ["num_attention_heads is 8, wanted a multiple"]),
    "no head_dim and no quotient": (
        "single",
        config(head_dim="DELETE", hidden_size=36),
        ["hidden_size is 36 and not divisible by num_attention_heads, which is 8"],
    ),
    "missing field": (
        "single",
        config(hidden_size="DELETE"),
        ["config.json: hidden_size is missing, wanted a whole number"],
    ),
    "string for number": ("single", config(vocab_size="61"), ["config.json: vocab_size is '61'"]),
    "negative size": ("single", config(intermediate_size=-48), ["intermediate_size is -48"]),
    "absurd size": (
        "single",
        config(num_hidden_layers=10**9),
        ["num_hidden_layers is 1000000000, wanted a whole number from 1 to 1024"],
    ),
    "fraction": ("single", config(num_hidden_layers=2.5), ["num_hidden_layers is 2.5"]),
    "NaN as eps": (
        "single",
        config(rms_norm_eps=float("nan")),
        ["config.json: rms_norm_eps is nan, wanted a number above 0"],
    ),
    "more than a float holds": (
        "single",
        config(rms_norm_eps=10**400),
        ["config.json: rms_norm_eps is 1000", "above 0"],
    ),
    "true as a size": ("single", config(hidden_size=True), ["config.json: hidden_size is True, wanted a whole number"]),
    "half a surrogate pair": ("single", config(hidden_act="\ud800"), [r"config.json: has '\ud800', no character"]),
    "100,000 lists": (
        "single",
        lambda f: (f / "config.json").write_text('{"layers": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        ["config.json: is not valid JSON"],
    ),
    "300 lists": ("single", config(hidden_size=json.loads("[" * 300 + "]" * 300)), ["hidden_size is [[[", "wanted"]),
    "bad eps": ("single", config(rms_norm_eps="tiny"), ["rms_norm_eps is 'tiny'"]),
    "bad eos": ("single", config(eos_token_id=[1, "x"]), ["eos_token_id[1] is 'x', wanted a whole number"]),
    "bad window": ("tied", config(model_type="mistral", sliding_window=0), ["sliding_window is 0"]),
    "activation": ("single", config(hidden_act="gelu"), ["hidden_act is 'gelu', wanted one of silu, relu2"]),
    "attention bias": ("single", config(attention_bias=True), ["q_proj.bias of shape (64,) is missing"]),
    "mlp bias": ("single", config(mlp_bias=True), ["mlp_bias is true, wanted false: no diffllama"]),
    "rope type": (
        "single",
        config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}),
        ["config.json: rope_parameters: rope_type is 'longrope', wanted one of default, linear, dynamic, llama3, yarn"],
    ),
    "old rope type": ("single", config(rope_scaling={"type": "su", "factor": 2.0}), ["rope_scaling: type is 'su'"]),
    "rope without factor": (
        "single",
        config(rope_scaling={"rope_type": "llama3"}),
        ["config.json: rope_scaling: factor is missing, wanted a number above 0"],
    ),
    "rope as text": ("single", config(rope_scaling="llama3"), ["rope_scaling is 'llama3', wanted an object"]),
    "rope by layer": (
        "single",
        config(rope_parameters={"full_attention": {"rope_type": "default"}}, rope_scaling=None),
        ["rotary embedding differs by layer (full_attention)"],
    ),
    "partial rope": ("single", config(partial_rotary_factor=0.5), ["partial_rotary_factor is 0.5, wanted 1"]),
    "quantization as text": ("single", config(quantization_config="int4"), ["config.json", "'int4'"]),
    "invalid JSON": ("single", lambda f: (f / "config.json").write_text('{"a": '), ["config.json: is not valid JSON"]),
    "JSON list": ("single", lambda f: (f / "config.json").write_text("[]"), ["config.json", "list, wanted an object"]),
    "no config": ("single", lambda f: (f / "config.json").unlink(), ["holds no config.json"]),
    "config leads out": ("single", link_config, ["config.json: is a link that leads out of the folder"]),
    "no weights": ("single", lambda f: (f / "model.safetensors").unlink(), ["holds no weights"]),
    "other name": (
        "single",
        lambda f: (f / "model.safetensors").rename(f / "weights.safetensors"),
        ["holds weights.safetensors but neither model.safetensors nor"],
    ),
    "only a pickle": ("single", only_pickle, ["pytorch_model.bin: is a pickle", "safetensors"]),
    "an artifact": ("single", lambda f: (f / "diffbit.json").write_text("{}"), ["is an exported artifact"]),
    "index out by dots": ("sharded", escape_by_name("../single/model.safetensors"), [INDEX, "'../single/"]),
    "index out by root": ("sharded", escape_by_name("/etc/passwd"), [INDEX, "'/etc/passwd'"]),
    "index names a subfolder": ("sharded", escape_by_name("a/b.safetensors"), [INDEX, "'a/b.safetensors'"]),
    "index names the folder": ("sharded", escape_by_name(".."), [INDEX, "'..'"]),
    "index out by link": ("sharded", escape_by_link, ["is a link that leads out of the folder"]),
    "index names a missing shard": ("sharded", escape_by_name("model-9.safetensors"), [INDEX, "model-9.safetensors"]),
    "shard deleted": ("sharded", lambda f: shard_of(f, Q).unlink(), [INDEX, "which does not exist"]),
    "index misplaces a tensor": (
        "sharded",
        lambda f: edit_index(f, lambda m: m.update({Q: m["model.norm.weight"]})),
        [INDEX, f"holds tensor {Q}, but it does not"],
    ),
    "index forgets a tensor": ("sharded", lambda f: edit_index(f, lambda m: m.pop(Q)), [f"holds tensor {Q}", INDEX]),
    "index without map": (
        "sharded",
        lambda f: (f / INDEX).write_text("{}"),
        [INDEX, "weight_map is missing, wanted"],
    ),
    "index of numbers": (
        "sharded",
        lambda f: edit_index(f, lambda m: m.update({Q: 3})),
        [INDEX, f"['{Q}'] is 3"],
    ),
    "truncated data": ("single", truncate(-1), ["model.safetensors: is cut short: tensor"]),
    "truncated header": ("single", truncate(100), ["model.safetensors", "cut short (100 bytes"]),
    "empty file": ("single", truncate(0), ["model.safetensors", "not a safetensors file, or is cut short (0 bytes"]),
    "garbage": (
        "single",
        lambda f: (f / "model.safetensors").write_bytes(b"\x04" + bytes(7) + b"{{{{"),
        ["model.safetensors: its safetensors header is not valid JSON"],
    ),
    "header is a list": (
        "single",
        lambda f: (f / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]"),
        ["header is not a JSON object"],
    ),
    "unknown dtype": (
        "single",
        header(lambda h: h[Q].update(dtype="F7")),
        [f"{Q}: dtype is 'F7', wanted"],
    ),
    "offsets too short": (
        "single",
        header(lambda h: h[Q]["data_offsets"].__setitem__(1, h[Q]["data_offsets"][1] - 4)),
        [Q, "needs 8192 bytes, but its header gives it 8188"],
    ),
    "negative offset": (
        "single",
        header(lambda h: h[Q].update(data_offsets=[-8192, 0])),
        [Q, "offsets[0] is -8192"],
    ),
    "shape of text": ("single", header(lambda h: h[Q].update(shape="ab")), [Q, "shape is 'ab', wanted"]),
    "weights are a folder": (
        "single",
        lambda f: ((f / "model.safetensors").unlink(), (f / "model.safetensors").mkdir()),
        ["model.safetensors: is not a regular file"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_with_a_sentence(case: str, sources: dict[str, Path], tmp_path: Path) -> None:
    source, damage, words = CASES[case]
    folder = tmp_path / "m"
    folder.mkdir()
    for file in sources[source].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    models.load(folder)  # whole before, so that what follows is refused for the damage
    damage(folder)
    with pytest.raises(DiffbitError) as caught:
        models.load(folder)
    message = str(caught.value)
    assert str(tmp_path) in message and "\n" not in message
    for word in words:
        assert word in message


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(DiffbitError, match="nothing: no such folder"):
        models.load(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DiffbitError, match="file: is a file, wanted a folder"):
        models.load(tmp_path / "file")


def test_opening_reads_no_data(sources: dict[str, Path], tmp_path: Path) -> None:
    """NaN is found when the tensor is read, not before; other tensors stay readable."""
    folder = tmp_path / "m"
    folder.mkdir()
    for file in sources["single"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    poison(float("nan"))(folder)
    checkpoint = models.Checkpoint(folder)
    checkpoint.read("model.norm.weight")
    with pytest.raises(DiffbitError, match="holds NaN"):
        checkpoint.read(Q)


def test_a_file_cut_short_after_opening(sources: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for file in sources["single"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    checkpoint = models.Checkpoint(folder)
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size // 2)
    with pytest.raises(DiffbitError, match="was changed while diffbit read it"):
        for name in checkpoint.names:
            checkpoint.read(name)
