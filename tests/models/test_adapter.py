"""Adapters merged into a model, against transformers with W + scale B A in place of W, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from diffbit import DiffbitError, models
from diffbit.cli.app import main
from diffbit.models import Checkpoint
from diffbit.models.checkpoint.names import EMBEDDING, HEAD

from ..adapters import write_adapter
from . import phi4flash as phi
from .helpers import hf_model, saved, tokens
from .test_gguf import TYPES, theirs
from .test_gguf import write as write_gguf

IDS = tokens(2, 11)


def linears(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(part.weight.shape)
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and name != "lm_head"
    }


def add(model: Any, added: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, delta in added.items():
            weight = model.get_parameter(name)
            weight.copy_(weight.double() + delta)


def same_logits(checkpoint: Checkpoint, original: Any) -> None:
    with torch.no_grad():
        theirs = original(input_ids=IDS).logits
        torch.testing.assert_close(models.load(checkpoint)(IDS), theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "diffllama", "granite", "gemma3_text", "olmo2", "bitnet"])
def test_every_linear_layer_of_a_family(kind: str, tmp_path: Path) -> None:
    """Also of families whose rows have another order on disk, or whose factors are folded into weights."""
    original = hf_model(kind)
    base = saved(original, tmp_path / "base")
    plain = models.load(base)(IDS)
    add(original, write_adapter(tmp_path / "adapter", linears(original)))
    checkpoint = Checkpoint(base, tmp_path / "adapter")
    same_logits(checkpoint, original)
    assert (models.load(checkpoint)(IDS) - plain).abs().max() > 0.5
    assert checkpoint.sha256() != Checkpoint(base).sha256()


def test_ranks_and_factors_of_single_modules(tmp_path: Path) -> None:
    """The patterns match from a dot on, the first counts; rslora divides by sqrt(r)."""
    original = hf_model("llama")
    base, shapes = saved(original, tmp_path / "base"), linears(original)
    ranks = {name: 2 for name in shapes if name.endswith("q_proj")} | {"model.layers.1.mlp.up_proj": 6}
    alphas = {name: 3.0 for name in shapes if name.endswith(("k_proj", "v_proj"))}
    alphas |= {name: 5.0 for name in shapes if name.startswith("model.layers.2.mlp.")}
    added = write_adapter(
        tmp_path / "adapter", shapes, ranks=ranks, alphas=alphas, use_rslora=True, dtype=torch.bfloat16,
        rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 6, "mlp.up_proj": 4},
        alpha_pattern={"(k|v)_proj": 3, r".*\.2\.mlp\..*": 5},
    )  # fmt: skip
    add(original, added)
    same_logits(Checkpoint(base, tmp_path / "adapter"), original)


def test_fused_tensors(tmp_path: Path) -> None:
    """Phi-4-mini-flash has one tensor for queries, keys and values, and one for gate and up."""
    weights = phi.weights(phi.PHI)
    fused = {name: weight for name, weight in weights.items() if name.endswith(("Wqkv.weight", "fc1.weight"))}
    shapes = {name.removesuffix(".weight"): tuple(weight.shape) for name, weight in fused.items()}
    added = write_adapter(tmp_path / "adapter", shapes)
    for folder, changes in {
        "base": {},
        "merged": {name: weights[name] + added[name].float() for name in fused},
    }.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(phi.PHI))
        tensors = {name: tensor.contiguous() for name, tensor in (weights | changes).items()}
        save_file(tensors, tmp_path / folder / "model.safetensors")
    adapted, merged = Checkpoint(tmp_path / "base", tmp_path / "adapter"), Checkpoint(tmp_path / "merged")
    changed = [name for name in merged.names if adapted.is_adapted(name)]
    assert len(changed) > len(fused)
    for name in merged.names:
        torch.testing.assert_close(adapted.read(name), merged.read(name), rtol=0, atol=1e-6)


@pytest.mark.parametrize("type", ["F32", "Q8_0"])
def test_a_gguf_file_whose_rows_are_permuted(type: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m" / "m.gguf", TYPES[type])
    original = theirs(file)
    add(original, write_adapter(tmp_path / "adapter", linears(original)))
    same_logits(Checkpoint(file, tmp_path / "adapter"), original)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("table", ["model.embed_tokens", "lm_head"])
def test_embedding_and_head(tied: bool, table: str, tmp_path: Path) -> None:
    """Of a tied model, an adapter changes one of both, as when it was trained, so they become two."""
    original = hf_model("llama", tie_word_embeddings=tied)
    base = saved(original, tmp_path / "base")
    original.lm_head.weight = nn.Parameter(original.lm_head.weight.detach().clone())
    shape = (61, 32, "embedding") if table != "lm_head" else (61, 32)
    add(original, write_adapter(tmp_path / "adapter", {table: shape}))  # type: ignore[dict-item]
    checkpoint = Checkpoint(base, tmp_path / "adapter")
    assert not checkpoint.config.tie_embeddings
    same_logits(checkpoint, original)
    if tied:
        write_adapter(tmp_path / "adapter", {table: shape}, ensure_weight_tying=True)  # type: ignore[dict-item]
        with pytest.raises(DiffbitError, match="ensure_weight_tying"):
            Checkpoint(base, tmp_path / "adapter")


@pytest.mark.parametrize("names", [(EMBEDDING, HEAD), (EMBEDDING,), (HEAD, "model.norm.weight")])
@pytest.mark.parametrize("tied", [False, True])
def test_tensors_that_are_replaced(names: tuple[str, ...], tied: bool, tmp_path: Path) -> None:
    """modules_to_save."""
    original = hf_model("llama", tie_word_embeddings=tied)
    base = saved(original, tmp_path / "base")
    original.lm_head.weight = nn.Parameter(original.lm_head.weight.detach().clone())
    replaced = {name: torch.rand(original.get_parameter(name).shape) for name in names}
    add(original, write_adapter(tmp_path / "adapter", {"model.layers.0.mlp.up_proj": (48, 32)}, replaced=replaced))
    for name, tensor in replaced.items():
        original.get_parameter(name).data = tensor
    same_logits(Checkpoint(base, tmp_path / "adapter"), original)


def test_a_tied_table_with_new_rows_stays_one(tmp_path: Path) -> None:
    """peft saves the grown table twice, as embedding and as head."""
    original = hf_model("llama", tie_word_embeddings=True)
    base = saved(original, tmp_path / "base")
    original.resize_token_embeddings(64)
    table = original.lm_head.weight.detach()
    write_adapter(tmp_path / "adapter", {}, replaced={EMBEDDING: table, HEAD: table.clone()})
    checkpoint = Checkpoint(base, tmp_path / "adapter")
    assert (checkpoint.config.vocab_size, checkpoint.config.tie_embeddings) == (64, True)
    same_logits(checkpoint, original)
    untied = saved(hf_model("llama"), tmp_path / "untied")
    write_adapter(tmp_path / "adapter", {}, replaced={EMBEDDING: table})
    with pytest.raises(DiffbitError, match=r"lm_head.weight has shape \(61, 32\), wanted \(64, 32\)"):
        Checkpoint(untied, tmp_path / "adapter")


def test_tokenizer_files_of_the_adapter_replace_the_models(tmp_path: Path) -> None:
    base = saved(hf_model("llama"), tmp_path / "base")
    adapter = tmp_path / "adapter"
    write_adapter(adapter, {"model.layers.0.mlp.up_proj": (48, 32)})
    for name in ("tokenizer.json", "chat_template.jinja"):
        (base / name).write_text(f"base {name}")
    own = Checkpoint(base).tokenizer_files
    assert own.keys() == {"tokenizer.json", "chat_template.jinja", "generation_config.json"}
    assert Checkpoint(base, adapter).tokenizer_files == own
    (adapter / "tokenizer.json").write_text("adapter")
    wanted = {"tokenizer.json": b"adapter", "generation_config.json": own["generation_config.json"]}
    assert Checkpoint(base, adapter).tokenizer_files == wanted


MODULE = {"model.layers.0.mlp.up_proj": (48, 32)}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', wanted LORA"),
        ({"bias": "all"}, "bias is 'all', wanted none"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"target_parameters": ["experts.up"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow is 1, which diffbit does not read"),
        ({"r": 8}, "has rank 8, but its tensors have rank 4"),
        ({"alpha_pattern": {"(": 2}}, "no regular expression"),
        ({"lora_alpha": "8"}, "lora_alpha is '8', wanted a number above 0"),
    ],
)
def test_unsupported_adapter_settings_are_refused(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    base = saved(hf_model("llama"), tmp_path / "base")
    write_adapter(
        tmp_path / "adapter", MODULE, ranks=dict.fromkeys(MODULE, 4), alphas=dict.fromkeys(MODULE, 8), **changes
    )
    with pytest.raises(DiffbitError, match=rf"adapter_config\.json: .*{sentence}"):
        Checkpoint(base, tmp_path / "adapter")


def test_adapters_of_other_models_and_damaged_ones(tmp_path: Path) -> None:
    base = saved(hf_model("llama"), tmp_path / "base")
    adapter, weights = tmp_path / "adapter", tmp_path / "adapter" / "adapter_model.safetensors"

    def refused(sentence: str, path: Path = adapter) -> None:
        with pytest.raises(DiffbitError, match=sentence):
            checkpoint = Checkpoint(base, path)
            checkpoint.read("model.layers.0.mlp.up_proj.weight")

    write_adapter(adapter, {"model.layers.7.mlp.up_proj": (48, 32)})
    refused("changes model.layers.7.mlp.up_proj.weight, which .*base does not have; it belongs to ORG/BASE")
    write_adapter(adapter, {"model.layers.0.mlp.up_proj": (48, 64)})
    refused(r"for a weight of shape \(48, 64\), but that of .* has shape \(48, 32\); it belongs to ORG/BASE")
    write_adapter(adapter, {}, replaced={"score.weight": torch.ones(2, 32)})
    refused("changes score.weight")
    write_adapter(adapter, MODULE, replaced={"model.norm.weight": torch.ones(32, dtype=torch.int32)})
    refused("of type int32, wanted floats")
    write_adapter(adapter, MODULE)
    tensors = load_file(weights)
    down, up = tensors
    save_file({down: tensors[down]}, weights)
    refused("holds no base_model.model.model.layers.0.mlp.up_proj.lora_B.weight")
    save_file({down: tensors[down], up: tensors[up] * float("nan")}, weights)
    refused("NaN or infinity")
    weights.rename(weights.with_suffix(".bin"))
    refused("is a pickle")
    weights.with_suffix(".bin").unlink()
    refused("holds no adapter_model.safetensors")
    refused("no such folder", tmp_path / "nowhere")
    refused("holds no adapter_config.json", base)
    of_mlx = tmp_path / "mlx"
    of_mlx.mkdir()
    (of_mlx / "adapters.safetensors").write_bytes(b"")
    (of_mlx / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora", "lora_parameters": {"rank": 8}}))
    refused("is of mlx-lm's adapter, wanted PEFT's", of_mlx)


def test_folder_with_an_adapter_is_refused(tmp_path: Path) -> None:
    base = saved(hf_model("llama"), tmp_path / "base")
    write_adapter(tmp_path / "adapter", MODULE)
    with pytest.raises(DiffbitError, match=r"is an adapter of 'ORG/BASE', not a model; .* --adapter"):
        Checkpoint(tmp_path / "adapter")
    write_adapter(base, MODULE)
    with pytest.raises(DiffbitError, match=r"holds a model and an adapter .* --adapter .*; if it is merged already"):
        Checkpoint(base)
    assert Checkpoint(base, base).is_adapted("model.layers.0.mlp.up_proj.weight")
    (base / "adapter_model.safetensors").unlink()  # a config alone changes nothing
    assert Checkpoint(base).config.vocab_size == 61


def test_adapters_of_parts_of_fused_tensors_are_written_as_one(tmp_path: Path) -> None:
    """What `save_adapter` writes for queries, keys and values adds the same as theirs."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(phi.PHI))
    save_file({name: tensor.contiguous() for name, tensor in phi.weights(phi.PHI).items()}, base / "model.safetensors")
    checkpoint = Checkpoint(base)
    generator = torch.Generator().manual_seed(3)
    adapters = {}
    for index, name in enumerate(name for name in checkpoint.names if name.endswith("_proj.weight")):
        (rows, columns), rank = checkpoint.shape(name), 1 + index % 3
        halves = (torch.randn(shape, generator=generator) for shape in ((rank, columns), (rows, rank)))
        adapters[name.removesuffix(".weight")] = tuple(halves)
    models.save_adapter(tmp_path / "adapter", checkpoint, adapters)  # type: ignore[arg-type]
    merged = Checkpoint(base, tmp_path / "adapter")
    for module, (down, up) in adapters.items():
        name = f"{module}.weight"
        torch.testing.assert_close(merged.read(name), checkpoint.read(name) + up @ down, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_quantized_as_the_merged_model_is(tmp_path: Path, trained: Callable[[str], Path]) -> None:
    """`quantize --adapter`: the mix, the calibration and the report are those of the merged model."""
    base, adapter, merged = trained("softmax"), tmp_path / "adapter", tmp_path / "merged"
    shapes = {
        name.removesuffix(".weight"): Checkpoint(base).shape(name)
        for name in Checkpoint(base).names
        if name.endswith("_proj.weight")
    }
    added = write_adapter(adapter, shapes, lora_alpha=0.5)
    decoder = models.load(base)
    add(decoder, added)
    models.save(decoder, merged, tokenizer_from=base)
    shutil.copytree(base, tmp_path / "model")
    shutil.copytree(adapter, tmp_path / "model", dirs_exist_ok=True)
    both = str(tmp_path / "model")
    quick = ["--bits", "4", "--method", "gptq", "--max-windows", "2", "--quiet"]
    for out, arguments in {"wanted": [str(merged)], "both": [both, "--adapter", both]}.items():
        with pytest.raises(SystemExit) as end:
            main(["quantize", *arguments, *quick, "-o", str(tmp_path / out)])
        assert end.value.code == 0
    one, other = (Checkpoint(tmp_path / name) for name in ("wanted", "both"))
    assert one.names == other.names and one.tokenizer_files == other.tokenizer_files
    for name in one.names:
        if name.endswith(".codes"):
            assert (one.read_raw(name) != other.read_raw(name)).float().mean() < 0.01  # sums of another order
