"""Checkpoints on disk: round trips, streaming, sharding, row order of quantized parts, memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from diffbit import DiffbitError, models
from diffbit.io.safetensors import read_header
from diffbit.models.checkpoint.names import linear_of, reorder
from diffbit.models.layers.rope import Llama3

from .helpers import LLAMA3, hf_model, saved, small_config, tokens

VARIANTS = ("diff_v1", "diff_v2", "softmax")


def fresh(attention: str, **changes: object) -> models.Decoder:
    torch.manual_seed(3)
    return models.Decoder(small_config(attention, **changes)).eval()


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"sub_norms": True, "mlp": "relu2"}])
def test_round_trip_is_bit_equal(attention: str, changes: dict[str, object], tmp_path: Path) -> None:
    scaling = Llama3(8.0, 1.0, 4.0, 32)
    model = fresh(attention, rope_scaling=scaling, rope_theta=555.0, eos_token_ids=(4, 5), **changes)
    models.save(model, tmp_path / "m")
    again = models.load(tmp_path / "m")
    assert again.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert models.Checkpoint(tmp_path / "m").names == [name for name, _ in model.named_parameters()]
    assert torch.equal(again(tokens(1, 5)), model(tokens(1, 5)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_round_trip(dtype: torch.dtype, tmp_path: Path) -> None:
    model = fresh("diff_v1")
    models.save(model, tmp_path / "m", dtype=dtype)
    again = models.load(tmp_path / "m", dtype=dtype)
    for name, tensor in model.state_dict().items():
        stored = tensor if "lambda" in name else tensor.to(dtype)
        assert torch.equal(again.state_dict()[name], stored), name
        assert again.state_dict()[name].dtype == stored.dtype
    assert all(parameter.requires_grad for parameter in again.parameters())


def test_rows_on_disk_are_those_of_diffllama(tmp_path: Path) -> None:
    """The row order against the definition: on disk all signal heads, then all noise heads."""
    model = hf_model("diffllama")  # 8 query and 4 key sub-heads of width 8: 4 and 2 pairs
    checkpoint = models.Checkpoint(saved(model, tmp_path / "m"))
    for name, pairs in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2)):
        disk = model.state_dict()[f"model.layers.1.self_attn.{name}.weight"].view(2, pairs, 8, 32)
        ours = checkpoint.read(f"model.layers.1.self_attn.{name}.weight").view(pairs, 2, 8, 32)
        for pair in range(pairs):
            assert torch.equal(ours[pair, 0], disk[0, pair]) and torch.equal(ours[pair, 1], disk[1, pair])
    raw = checkpoint.read_raw("model.layers.1.self_attn.q_proj.weight")
    assert torch.equal(raw, model.state_dict()["model.layers.1.self_attn.q_proj.weight"])
    o_proj = checkpoint.read("model.layers.1.self_attn.o_proj.weight")
    assert torch.equal(o_proj, model.state_dict()["model.layers.1.self_attn.o_proj.weight"])


@pytest.mark.parametrize("attention", VARIANTS)
def test_streaming_writer_and_blocks(attention: str, tmp_path: Path) -> None:
    model = fresh(attention, num_layers=3)
    with models.CheckpointWriter(tmp_path / "m", model.config, shard_layers=True) as writer:
        for name, parameter in model.named_parameters():
            writer.add(name, parameter)
        assert not (tmp_path / "m").exists()
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]  # embedding, 3 layers, norm and head
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in model.parameters())
    checkpoint = models.Checkpoint(tmp_path / "m")
    for i in range(3):
        block = models.load_block(checkpoint, i)
        assert len(checkpoint.block_names(i)) == len(list(block.named_parameters()))
        for name, tensor in block.state_dict().items():
            assert torch.equal(tensor, model.model.layers[i].state_dict()[name]), name
        if attention == "diff_v1":
            assert block.self_attn.lambda_init == model.model.layers[i].self_attn.lambda_init
    assert torch.equal(models.load(checkpoint)(tokens(1, 4)), model(tokens(1, 4)))


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    model = fresh("softmax")
    models.save(model, tmp_path / "m")
    before = models.Checkpoint(tmp_path / "m").sha256()

    def write(problem: Exception | None) -> None:
        with models.CheckpointWriter(tmp_path / "m", model.config, overwrite=True) as writer:
            writer.add("model.norm.weight", torch.ones(32))
            if problem is not None:
                raise problem

    with pytest.raises(RuntimeError, match="the disk is full"):
        write(RuntimeError("the disk is full"))
    with pytest.raises(DiffbitError, match="is missing from the weights"):
        write(None)
    with pytest.raises(DiffbitError, match="already exists"):
        models.save(model, tmp_path / "m")
    assert models.Checkpoint(tmp_path / "m").sha256() == before
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


def test_sha256_follows_every_byte_of_the_model(tmp_path: Path) -> None:
    model = fresh("softmax")
    for name in ("a", "b", "c"):
        models.save(model, tmp_path / name)
    model.model.norm.weight[0] += 1e-6
    models.save(model, tmp_path / "c", overwrite=True)
    config = tmp_path / "b" / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    assert len({models.Checkpoint(tmp_path / name).sha256() for name in ("a", "b", "c")}) == 3
    models.save(fresh("softmax"), tmp_path / "d")
    assert models.Checkpoint(tmp_path / "d").sha256() == models.Checkpoint(tmp_path / "a").sha256()


def test_tokenizer_files_travel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"):
        (source / name).write_text(f'{{"from": "{name}"}}')
    models.save(fresh("softmax"), tmp_path / "m", tokenizer_from=source)
    checkpoint = models.Checkpoint(tmp_path / "m")
    names = set(checkpoint.tokenizer_files)
    assert names == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert not (tmp_path / "m" / "README.md").exists()
    models.save(fresh("softmax"), tmp_path / "n", tokenizer_from=source / "tokenizer.json")
    assert (tmp_path / "n" / "tokenizer.json").read_text() == '{"from": "tokenizer.json"}'


def test_tokens_of_generation_config_win(tmp_path: Path) -> None:
    """transformers ends a text by them: a chat model's end of turn often stands nowhere else."""
    models.save(fresh("softmax", bos_token_id=1, eos_token_ids=(4,), pad_token_id=6), tmp_path / "m")
    generation = tmp_path / "m" / "generation_config.json"
    generation.write_text('{"bos_token_id": null, "eos_token_id": [4, 5], "temperature": 0.6}')
    config = models.Checkpoint(tmp_path / "m").config
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (4, 5), 6)
    generation.write_text('{"bos_token_id": 2, "pad_token_id": 0}')
    config = models.Checkpoint(tmp_path / "m").config
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (2, (4,), 0)
    generation.write_text('{"eos_token_id": "the end"}')
    with pytest.raises(DiffbitError, match=r"generation_config\.json: eos_token_id is 'the end'"):
        models.Checkpoint(tmp_path / "m")


def test_parts_of_quantized_weights_keep_their_rows(tmp_path: Path) -> None:
    """codes, scales and zeros of a row move with it; a scale that all rows share stays."""
    model = fresh("diff_v1")
    quantized = {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj", "model.embed_tokens"}
    parts = {}
    for linear in quantized:
        rows = model.get_submodule(linear).weight.shape[0]
        parts[f"{linear}.codes"] = torch.arange(rows * 16).view(rows, 16).to(torch.uint8)
        parts[f"{linear}.scale"] = torch.arange(1.0, rows + 1).half().view(rows, 1)
    parts["model.layers.0.self_attn.q_proj.zero"] = torch.arange(64).view(64, 1).to(torch.uint8)
    parts["model.layers.1.self_attn.k_proj.scale"] = torch.full((1, 1), 0.5)
    setting = {"quant_method": "diffbit", "version": 1, "scheme": {"weights": "int4_g32"}}
    with models.CheckpointWriter(tmp_path / "m", model.config, quantization=setting, shard_layers=True) as writer:
        for name, parameter in model.named_parameters():
            linear = name.removesuffix(".weight")
            if linear not in quantized:
                writer.add(name, parameter)
                continue
            for part in ("codes", "scale", "zero"):
                if f"{linear}.{part}" in parts:
                    writer.add(f"{linear}.{part}", parts[f"{linear}.{part}"])
    checkpoint = models.Checkpoint(tmp_path / "m")
    assert checkpoint.quantization == setting
    assert "model.layers.0.self_attn.q_proj.weight" not in checkpoint.names
    q = checkpoint.names.index("model.layers.0.self_attn.q_proj.codes")
    assert [name.rpartition(".")[2] for name in checkpoint.names[q : q + 3]] == ["codes", "scale", "zero"]
    for name, tensor in parts.items():
        stored = checkpoint.read_raw(name)
        assert torch.equal(reorder(stored, checkpoint.row_order(f"{linear_of(name)}.weight")), tensor), name
        assert stored.dtype == tensor.dtype
    # On disk: all signal heads first. Row 8..15 in memory is the first noise head, row 32..39 on disk.
    disk = checkpoint.read_raw("model.layers.0.self_attn.q_proj.scale")[:, 0]
    assert disk[32:40].tolist() == list(range(9, 17)) and disk[8:16].tolist() == list(range(17, 25))
    for read in (lambda: models.load(checkpoint), lambda: models.load_block(checkpoint, 0)):
        with pytest.raises(DiffbitError, match=r"is quantized; .*diffbit\.load"):
            read()


def test_bitsandbytes_parts_are_accepted_raw(tmp_path: Path) -> None:
    model = hf_model("diffllama")
    folder = saved(model, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = torch.randint(0, 256, (64 * 32 // 2, 1), dtype=torch.uint8)
    weights[f"{name}.absmax"] = torch.rand(64)  # as many as rows, but of blocks: no row order may touch them
    weights[f"{name}.quant_map"] = torch.rand(16)
    weights[f"{name}.quant_state.bitsandbytes__nf4"] = torch.randint(0, 256, (80,), dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = models.Checkpoint(folder)
    for part, tensor in weights.items():
        if part.startswith(name):
            assert part in checkpoint.names
            assert torch.equal(checkpoint.read_raw(part), tensor)
    order = checkpoint.row_order(name)
    assert order is not None and sorted(order.tolist()) == list(range(64))
    plain = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(checkpoint.read(plain), weights[plain][order])


def test_harmless_extras(tmp_path: Path) -> None:
    """Rotary buffers of old transformers, and the head of a tied model, saved although it is the embedding."""
    model = hf_model("llama", tie_word_embeddings=True)
    folder = saved(model, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(4)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    assert torch.equal(models.load(folder)(tokens(1, 3)), models.load(folder)(tokens(1, 3)))
    assert "lm_head.weight" not in models.Checkpoint(folder).names
    weights["lm_head.weight"] += 0.1
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(
        DiffbitError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*set it to false"
    ):
        models.load(folder)


def test_hub_cache_links_are_followed(tmp_path: Path) -> None:
    """A snapshot of the Hugging Face cache consists of links into ../../blobs."""
    model = hf_model("llama", rope_parameters=LLAMA3)
    source = saved(model, tmp_path / "source")
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (source / name).rename(blobs / f"hash-{name}")
        (snapshot / name).symlink_to(f"../../blobs/hash-{name}")
    torch.testing.assert_close(models.load(snapshot)(tokens(1, 4)), model(tokens(1, 4)).logits, rtol=0, atol=1e-5)


def test_our_reader_agrees_with_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {
        "f64": torch.randn(3, dtype=torch.float64),
        "bf16": torch.randn(2, 3).bfloat16(),
        "f16": torch.randn(4).half(),
        "i64": torch.arange(5),
        "u8": torch.arange(7).to(torch.uint8),
        "i8": torch.arange(-3, 3).to(torch.int8),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    file = tmp_path / "x.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    header = read_header(file)
    assert set(header) == set(tensors)
    with safe_open(file, "pt") as library:
        for name, entry in header.items():
            tensor = entry.read()
            assert torch.equal(tensor, library.get_tensor(name)) and tensor.dtype == tensors[name].dtype


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_streaming_takes_the_memory_of_a_tensor_not_of_the_file(tmp_path: Path) -> None:
    """Peak memory of reading every tensor of a 66 MiB file one by one stays far below the file (a map would not)."""
    config = small_config("softmax", hidden_size=256, head_dim=32, num_layers=20, intermediate_size=896)
    models.save(models.Decoder(config), tmp_path / "m")
    size = (tmp_path / "m" / "model.safetensors").stat().st_size
    assert size > 60 << 20
    script = (
        "import re, sys\n"
        "from diffbit import models\n"
        "checkpoint = models.Checkpoint(sys.argv[1])\n"
        # not getrusage: its maximum is inherited from the process that started this one
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1]) << 10\n"
        "before = peak()\n"
        "for name in checkpoint.names: checkpoint.read(name)\n"
        "print(peak() - before)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "m")], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < size // 4


def test_weights_are_as_readable_as_any_other_file(tmp_path: Path) -> None:
    from diffbit.io.safetensors import write_tensors

    write_tensors(tmp_path / "weights.safetensors", {"a": torch.ones(2)})
    (tmp_path / "other").touch()
    assert (tmp_path / "weights.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
