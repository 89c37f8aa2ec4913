"""Checkpoints of random weights for measurements: a diffllama, llama or Motif of a given shape, and a tokenizer beside
it.

python benchmarks/synthetic.py FOLDER               # a diffllama of 1.1 billion parameters, 2.2 GB
python benchmarks/synthetic.py FOLDER motif-2.6b    # of another shape in SHAPES
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

END = "<|endoftext|>"
ARCHITECTURES = {"diffllama": "DiffLlamaForCausalLM", "llama": "LlamaForCausalLM", "Motif": "MotifForCausalLM"}


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    intermediate: int
    sub_heads: int
    kv_sub_heads: int
    head_dim: int
    vocab: int
    kind: str = "diffllama"  # or llama, Motif
    tied: bool = False
    noise_heads: int = 0  # of the sub_heads, where several signal heads share one


ONE_BILLION = Shape(2048, 22, 5632, 32, 4, 64, 32000)  # TinyLlama's, 1.1 billion parameters
MOTIF_2 = Shape(4096, 40, 16384, 40, 16, 128, 219520, "Motif", noise_heads=8)  # Motif-2-12.7B
SHAPES = {  # beside it: sizes and vocabularies of published models, whose tables are a large part of them
    "tinyllama-1.1b": ONE_BILLION,
    "diffllama-1b": Shape(2048, 16, 8192, 32, 8, 64, 102400),
    "motif-2.6b": Shape(2048, 32, 8192, 16, 16, 128, 219520, "Motif", tied=True),
    "motif-2-12.7b": MOTIF_2,
}
SMALL = Shape(256, 2, 512, 4, 4, 64, 512)  # to see that everything runs


def write_model(folder: Path, shape: Shape, positions: int = 2048) -> int:
    """A Hugging Face folder in bf16, a shard a layer and a table; returns the number of parameters."""
    kind = shape.kind
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int, std: float = 0.02) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16).normal_(0, std, generator=generator)

    lambdas = ("q1", "k1", "q2", "k2") if kind != "llama" else ()
    heads = 2 * (shape.sub_heads - shape.noise_heads) if shape.noise_heads else shape.sub_heads  # as wide as head_dim

    def motif(attention: str, mlp: str) -> dict[str, torch.Tensor]:
        return {
            f"{attention}.subln.weight": torch.ones(2 * shape.head_dim, dtype=torch.bfloat16),
            f"{mlp}.act_fn.weight": torch.full((3,), 1 / 3, dtype=torch.bfloat16),
            f"{mlp}.act_fn.bias": torch.zeros(1, dtype=torch.bfloat16),
        }

    def layer(i: int) -> dict[str, torch.Tensor]:
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        return {
            f"{attention}.q_proj.weight": normal(shape.sub_heads * shape.head_dim, shape.hidden),
            f"{attention}.k_proj.weight": normal(shape.kv_sub_heads * shape.head_dim, shape.hidden),
            f"{attention}.v_proj.weight": normal(shape.kv_sub_heads * shape.head_dim, shape.hidden),
            f"{attention}.o_proj.weight": normal(shape.hidden, heads * shape.head_dim),
            **(motif(attention, mlp) if kind == "Motif" else {}),
            **{f"{attention}.lambda_{name}": normal(shape.head_dim, std=0.1) for name in lambdas},
            f"{mlp}.gate_proj.weight": normal(shape.intermediate, shape.hidden),
            f"{mlp}.up_proj.weight": normal(shape.intermediate, shape.hidden),
            f"{mlp}.down_proj.weight": normal(shape.hidden, shape.intermediate),
            f"model.layers.{i}.input_layernorm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
            f"model.layers.{i}.post_attention_layernorm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
        }

    def table(name: str) -> dict[str, torch.Tensor]:
        norm = {"model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16)} if name != "lm_head" else {}
        return {f"{name}.weight": normal(shape.vocab, shape.hidden)} | norm

    tables = ("model.embed_tokens",) if shape.tied else ("model.embed_tokens", "lm_head")
    index: dict[str, str] = {}
    parameters, shards = 0, shape.layers + len(tables)
    for i in range(shards):
        shard = layer(i) if i < shape.layers else table(tables[i - shape.layers])
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, name)
        parameters += sum(tensor.numel() for tensor in shard.values())
    weight_map = {"metadata": {"total_size": 2 * parameters}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind, "vocab_size": shape.vocab,
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.sub_heads, "num_key_value_heads": shape.kv_sub_heads, "head_dim": shape.head_dim,
        "max_position_embeddings": positions, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
        "hidden_act": "poly_norm" if kind == "Motif" else "silu",
        **({"num_noise_heads": shape.noise_heads} if shape.noise_heads else {}),
        "tie_word_embeddings": shape.tied, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return parameters


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer, so that the folder is complete; the model's vocabulary is larger."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), SHAPES[sys.argv[2]] if len(sys.argv) > 2 else ONE_BILLION)
    write_tokenizer(Path(sys.argv[1]))
