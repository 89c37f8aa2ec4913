"""Phi-4-mini-flash-reasoning at its full size, of random weights: memory and time from a folder to tokens.

    python benchmarks/phi4flash.py --work DIR [--llama ENV] [--json FILE]      # DIR needs 16 GB; ENV: llama_peer.py's

DIR keeps what was made for the next time. Weights are random, for neither size nor speed depends on them.

Folder     3.85 billion parameters in the published layout, bf16, a shard a layer
Steps      `diffbit quantize --weights int4_g32 --kv int8`, `diffbit export`, `diffbit run`: seconds, and the largest
           resident memory of the process
Speed      a prompt of 1024 tokens, then greedy ones; and greedy ones behind LONG tokens whose keys, values and states
           are all zero, for the numbers in a cache cost no time. Medians
llama.cpp  Phi-4-mini-instruct's shape, 3.8 billion parameters, Q4_0: decoding behind the same prompt. Behind LONG
           tokens: of its time the part of a layer's cache is measured on a model of PEER_LAYERS layers, and added for
           all 32, because reading such a prompt through all of them takes an hour
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe
from report import say, write_json
from synthetic import write_tokenizer

LONG = 32768
PROMPT, NEW, REPEATS = 1024, 32, 3
PEER = {
    "hidden": 3072, "layers": 32, "intermediate": 8192, "sub_heads": 24, "kv_sub_heads": 8, "head_dim": 128,
    "vocab": 200064,
}  # fmt: skip
PEER_LAYERS = 2
CONFIG = {
    "architectures": ["Phi4FlashForCausalLM"], "model_type": "phi4flash", "hidden_size": 2560, "num_hidden_layers": 32,
    "num_attention_heads": 40, "num_key_value_heads": 20, "intermediate_size": 10240, "hidden_act": "silu",
    "layer_norm_eps": 1e-5, "max_position_embeddings": 262144, "mb_per_layer": 2, "sliding_window": 512,
    "vocab_size": 200064, "tie_word_embeddings": True, "mlp_bias": False, "lm_head_bias": False,
    "bos_token_id": 199999, "eos_token_id": 199999, "pad_token_id": 199999, "torch_dtype": "bfloat16",
}  # fmt: skip
TEMPLATE = (  # the published one, without tools
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """A folder in the published layout; A_log and the lambda vectors are float32 there."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    hidden, ffn, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    inner, rank, states, d = 2 * hidden, math.ceil(hidden / 16), 16, hidden // config["num_attention_heads"]
    keys = config["num_key_value_heads"] * d

    def normal(*size: int, std: float = 0.02, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype).normal_(0, std, generator=generator)

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16), f"{name}.bias": normal(hidden)}

    def mixer(i: int) -> dict[str, torch.Tensor]:
        if i % 2:
            rows = hidden + 2 * keys if i <= layers // 2 + 1 else hidden
            lambdas = {f"lambda_{name}": normal(d, std=0.1, dtype=torch.float32) for name in ("q1", "k1", "q2", "k2")}
            inside = lambdas | {"subln.weight": torch.ones(2 * d, dtype=torch.bfloat16)}
            return {
                "Wqkv.weight": normal(rows, hidden),
                "Wqkv.bias": normal(rows),
                "out_proj.weight": normal(hidden, hidden),
                "out_proj.bias": normal(hidden),
                **{f"inner_cross_attn.{name}": tensor for name, tensor in inside.items()},
            }
        if i > layers // 2:
            return {"in_proj.weight": normal(inner, hidden), "out_proj.weight": normal(hidden, inner)}
        return {
            "in_proj.weight": normal(2 * inner, hidden),
            "conv1d.weight": normal(inner, 1, 4, std=0.3),
            "conv1d.bias": normal(inner),
            "x_proj.weight": normal(rank + 2 * states, inner),
            "dt_proj.weight": normal(inner, rank),
            "dt_proj.bias": normal(inner, std=0.5) - 4,
            "A_log": torch.arange(1.0, states + 1).log().repeat(inner, 1),
            "D": torch.ones(inner, dtype=torch.bfloat16),
            "out_proj.weight": normal(hidden, inner),
        }

    def layer(i: int) -> dict[str, torch.Tensor]:
        found = {f"attn.{name}": tensor for name, tensor in mixer(i).items()}
        found |= {"mlp.fc1.weight": normal(2 * ffn, hidden), "mlp.fc2.weight": normal(hidden, ffn)}
        found |= norm("input_layernorm") | norm("post_attention_layernorm")
        return {f"model.layers.{i}.{name}": tensor for name, tensor in found.items()}

    index: dict[str, str] = {}
    for i in range(layers + 1):
        table = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden)} if i == layers else {}
        shard = table | norm("model.final_layernorm") if i == layers else layer(i)
        name = f"model-{i + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    write_tokenizer(folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def measured(command: list[str], log: Path) -> dict[str, Any]:
    """Seconds, those of all its threads together, and the largest resident memory of the process, in bytes. A fresh
    interpreter starts small: the largest number survives exec, and this one's is small too."""
    started = time.perf_counter()
    with log.open("w") as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-2000:]}")
    seconds = {"seconds": time.perf_counter() - started, "cpu_seconds": usage.ru_utime + usage.ru_stime}
    return {name: round(value, 1) for name, value in seconds.items()} | {"peak_bytes": usage.ru_maxrss * 1024}


def diffbit(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "diffbit", *map(str, arguments)]


def behind(artifact: str, tokens: int, new: int, threads: int) -> None:
    """Median tokens/s of greedy ones behind so many tokens that nobody read; prints them as JSON."""
    from diffbit.runtime import Session

    session = Session(artifact, threads=threads)
    session.prefill([[1]])
    session._mask[:] = 1
    session._length, session._tokens = tokens, np.full(1, tokens)
    times, token = [], 1
    for _ in range(new):
        started = time.perf_counter()
        token = int(session.step([[token]]).argmax())
        times.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"decode_tokens_per_s": 1 / statistics.median(times[2:]), "peak_host_memory_bytes": peak}))


def own(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def peer(python: Path, work: Path, threads: int) -> dict[str, Any]:
    """llama.cpp's decode tokens/s behind PROMPT tokens, and behind LONG ones as the docstring says."""
    script = str(Path(__file__).with_name("llama_peer.py"))

    def speed(layers: int, tokens: int) -> dict[str, Any]:
        file = work / f"peer-{layers}.gguf"
        if not file.exists():
            subprocess.run([python, script, "write", "Q4_0", json.dumps(PEER | {"layers": layers}), file], check=True)
        command = [python, script, "measure", file, str(tokens), str(NEW), "1", str(threads)]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    whole, near, far = speed(PEER["layers"], PROMPT), speed(PEER_LAYERS, PROMPT), speed(PEER_LAYERS, LONG)
    more = (1 / far["decode_tokens_per_s"] - 1 / near["decode_tokens_per_s"]) / PEER_LAYERS  # seconds a layer
    later = 1 / (1 / whole["decode_tokens_per_s"] + PEER["layers"] * more)
    return whole | {"decode_tokens_per_s_behind_long": later}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=32, help="a multiple of 4; fewer to try it out")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    model, quantized, artifact = (given.work / name for name in ("model", "quantized", "artifact"))
    result: dict[str, Any] = {"machine": describe(), "threads": given.threads, "layers": given.layers}

    def step(name: str, *arguments: str | Path) -> None:
        result[name] = measured(diffbit(*arguments), given.work / f"{name}.log")
        say(step=name, **result[name])

    if not model.exists():
        own("write", str(model), str(given.layers))
    if not quantized.exists():
        step("quantize", "quantize", model, "--weights", "int4_g32", "--kv", "int8", "-o", quantized)
    if not artifact.exists():
        step("export", "export", quantized, "--context-length", str(LONG + 2 * NEW), "-o", artifact)
    result["bytes"] = sum(file.stat().st_size for file in artifact.iterdir())
    threads = ("--threads", str(given.threads))
    step("run", "run", artifact, "Once upon a time", "--max-tokens", "16", *threads)
    counts = ("--prompt-tokens", PROMPT, "--new-tokens", NEW, "--repeats", REPEATS)
    command = diffbit("bench", artifact, *map(str, counts), *threads, "--json")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result["bench"] = json.loads(done.stdout)[0]
    say(**result["bench"])
    result["behind_long"] = own("behind", str(artifact), str(LONG), str(NEW), str(given.threads))
    say(**result["behind_long"])
    if given.llama:
        result["llama.cpp"] = peer(given.llama / "bin" / "python", given.work, given.threads)
        say(**result["llama.cpp"])
    if given.json:
        write_json(given.json, result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write_model(Path(sys.argv[2]), CONFIG | {"num_hidden_layers": int(sys.argv[3])})
        print("{}")
    elif sys.argv[1:2] == ["behind"]:
        behind(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        main()
