"""Peak memory and time of reading and exporting a Hugging Face bitnet folder of microsoft/bitnet-b1.58-2B-4T's shape.

    python benchmarks/bitnet_folder.py --work /tmp/bitnet               # 30 layers: 6 GB of disk
    python benchmarks/bitnet_folder.py --work /tmp/bitnet2 --layers 2   # nearly the same peak: the embedding's

Writes the folder with random ternary weights, packed, a shard per layer, norms and the shared embedding in bf16; then
exports it as an artifact in fp32 and in fp16 and back as a bitnet folder. Prints a JSON row per step, the peak resident
memory as the operating system counts it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from pathlib import Path

import torch
from one_billion import measured
from safetensors.torch import save_file
from synthetic import write_tokenizer

CONFIG = {
    "architectures": ["BitNetForCausalLM"], "model_type": "bitnet", "vocab_size": 128256, "hidden_size": 2560,
    "intermediate_size": 6912, "num_hidden_layers": 30, "num_attention_heads": 20, "num_key_value_heads": 5,
    "hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001,
    "quantization_config": {
        "quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline",
    },
}  # fmt: skip
SMALL = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def write_folder(folder: Path, config: dict[str, object]) -> None:
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    sizes = {name: value for name, value in config.items() if isinstance(value, int)}
    hidden, middle, layers = (sizes[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    key = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    linears = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (key, hidden), "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (middle, hidden), "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }  # fmt: skip
    norms = {
        "input_layernorm": hidden, "post_attention_layernorm": hidden, "self_attn.attn_sub_norm": hidden,
        "mlp.ffn_sub_norm": middle,
    }  # fmt: skip

    def packed(rows: int, columns: int) -> torch.Tensor:
        quarters = torch.randint(0, 3, (4, rows // 4, columns), generator=generator, dtype=torch.uint8)
        return quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6

    def layer(i: int) -> dict[str, torch.Tensor]:
        made = {f"model.layers.{i}.{name}.weight": torch.ones(size).bfloat16() for name, size in norms.items()}
        for name, (rows, columns) in linears.items():
            made[f"model.layers.{i}.{name}.weight"] = packed(rows, columns)
            made[f"model.layers.{i}.{name}.weight_scale"] = torch.tensor([1.2 * columns**-0.5]).bfloat16()
        return made

    table = torch.randn(sizes["vocab_size"], hidden, generator=generator).mul(0.02).bfloat16()
    weight_map: dict[str, str] = {}
    for i in range(layers + 1):
        ends = {"model.embed_tokens.weight": table, "model.norm.weight": torch.ones(hidden).bfloat16()}
        shard, name = layer(i) if i < layers else ends, f"model-{i + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="an empty or new folder for the models")
    parser.add_argument("--layers", type=int, default=30, help="of the model (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that everything runs")
    work = (arguments := parser.parse_args()).work
    model = work / "model"
    if not model.exists():
        config = CONFIG | (SMALL if arguments.quick else {"num_hidden_layers": arguments.layers})
        # in a process of its own: a child's peak counts from what its parent had at most
        writer = multiprocessing.get_context("spawn").Process(target=write_folder, args=(model, config))
        writer.start()
        writer.join()
    for name, options in (("fp32", ()), ("fp16", ("--dtype", "fp16")), ("again", ("--format", "hf-bitnet"))):
        measured("export", str(model), "-o", str(work / name), *options)
        size = sum(file.stat().st_size for file in (work / name).iterdir())
        print(json.dumps({"folder": name, "mib": round(size / 2**20)}), flush=True)


if __name__ == "__main__":
    main()
