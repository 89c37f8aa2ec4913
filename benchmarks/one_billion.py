"""Peak memory and time of `diffbit quantize` and `diffbit export` on a synthetic model of 1.1 billion parameters.

    python benchmarks/one_billion.py --work /tmp/one_billion          # about 8 minutes and 6 GB of disk

Writes a diffllama of TinyLlama's shape with random bf16 weights in one shard per layer, then runs both commands as
a user would and reads each one's peak resident memory from the operating system (the figure that /usr/bin/time -v
prints as "Maximum resident set size"). Prints a JSON row per step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, INTERMEDIATE, SUB_HEADS, KV_SUB_HEADS, HEAD_DIM, VOCAB = 2048, 22, 5632, 32, 4, 64, 32000


def write_model(folder: Path) -> int:
    """A Hugging Face diffllama folder; returns the number of parameters."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 0.02) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(torch.bfloat16)

    def layer(i: int) -> dict[str, torch.Tensor]:
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        return {
            f"{attention}.q_proj.weight": normal(SUB_HEADS * HEAD_DIM, HIDDEN),
            f"{attention}.k_proj.weight": normal(KV_SUB_HEADS * HEAD_DIM, HIDDEN),
            f"{attention}.v_proj.weight": normal(KV_SUB_HEADS * HEAD_DIM, HIDDEN),
            f"{attention}.o_proj.weight": normal(HIDDEN, HIDDEN),
            **{f"{attention}.lambda_{name}": normal(HEAD_DIM, std=0.1) for name in ("q1", "k1", "q2", "k2")},
            f"{mlp}.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
            f"{mlp}.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
            f"{mlp}.down_proj.weight": normal(HIDDEN, INTERMEDIATE),
            f"model.layers.{i}.input_layernorm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
            f"model.layers.{i}.post_attention_layernorm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        }

    ends = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": normal(VOCAB, HIDDEN),
    }
    index: dict[str, str] = {}
    parameters = 0
    for i in range(LAYERS + 1):
        shard = layer(i) if i < LAYERS else ends
        name = f"model-{i + 1:05d}-of-{LAYERS + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, name)
        parameters += sum(tensor.numel() for tensor in shard.values())
    weight_map = {"metadata": {"total_size": 2 * parameters}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    config = {
        "architectures": ["DiffLlamaForCausalLM"], "model_type": "diffllama", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": INTERMEDIATE,
        "num_attention_heads": SUB_HEADS, "num_key_value_heads": KV_SUB_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
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
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def measured(*command: str) -> dict[str, float | str]:
    """Run a diffbit command; its seconds and its peak resident memory in MiB."""
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "diffbit", *command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"diffbit {' '.join(command)} failed with {os.waitstatus_to_exitcode(status)}")
    seconds = round(time.monotonic() - start, 1)
    return {"command": command[0], "seconds": seconds, "peak_rss_mib": round(usage.ru_maxrss / 1024)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="an empty or new folder for the models")
    parser.add_argument("--weights", default="int4_g128", help="the weights' format (default: %(default)s)")
    work = (arguments := parser.parse_args()).work
    model, quantized, artifact = work / "model", work / "quantized", work / "artifact"
    if not model.exists():
        print(json.dumps({"parameters": write_model(model)}), flush=True)
        write_tokenizer(model)
    weights = ("--weights", arguments.weights)
    quantize = measured("quantize", str(model), *weights, "-o", str(quantized), "--quiet", "--overwrite")
    print(json.dumps(quantize), flush=True)
    print(json.dumps(measured("export", str(quantized), "-o", str(artifact), "--quiet", "--overwrite")), flush=True)
    size = sum(file.stat().st_size for file in artifact.iterdir())
    print(json.dumps({"artifact_mib": round(size / 2**20)}))


if __name__ == "__main__":
    main()
