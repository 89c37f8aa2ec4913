"""Phi-4-mini-flash-reasoning at its full size, of random weights: memory and time from a folder to tokens.

    python research/phi4flash/phi4flash.py --work DIR [--llama ENV] [--json FILE]  # 16 GB; ENV: llama_peer.py's
    python research/phi4flash/phi4flash.py --work DIR --whole                      # a prompt of LONG tokens, too

DIR keeps what was made for the next time. Weights are random, for neither size nor speed depends on them.

Folder     3.85 billion parameters in the published layout, bf16, a shard a layer
Steps      `diffbit quantize --weights int4_g32 --kv int8`, `diffbit export`, `diffbit run`: seconds, seconds of all
           cores together, and the largest resident memory of the process
Speed      a prompt of PROMPT tokens, then greedy ones; and greedy ones behind LONG tokens whose keys and values repeat
           the prompt's. (Zeros would be read faster: pages that nobody wrote are all the same memory.) Medians, in
           seconds and in seconds of all cores together: on a machine that others use too, one thread's are nearly
           those of a quiet one
llama.cpp  Phi-4-mini-instruct's shape, 3.8 billion parameters, Q4_0, in ROUNDS turns with ours: behind a prompt as
           long, and behind LONG tokens whose keys and values repeat the prompt's
"""

from __future__ import annotations

import argparse
import ctypes
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

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import numpy as np
from commands import diffbit_command, last_row, llama_command, once, quietly
from machine import describe
from report import say, write_json
from synthetic import write_tokenizer

LONG = 32768
PROMPT, NEW, ROUNDS = 1024, 32, 3
PEER = {
    "hidden": 3072, "layers": 32, "intermediate": 8192, "sub_heads": 24, "kv_sub_heads": 8, "head_dim": 128,
    "vocab": 200064, "tied": True,
}  # fmt: skip
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
        tensors = {f"attn.{name}": tensor for name, tensor in mixer(i).items()}
        tensors |= {"mlp.fc1.weight": normal(2 * ffn, hidden), "mlp.fc2.weight": normal(hidden, ffn)}
        tensors |= norm("input_layernorm") | norm("post_attention_layernorm")
        return {f"model.layers.{i}.{name}": tensor for name, tensor in tensors.items()}

    index: dict[str, str] = {}
    for i in range(layers + 1):
        table = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden)} if i == layers else {}
        shard = table | norm("model.final_layernorm") if i == layers else layer(i)
        name = f"model-{i + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    write_tokenizer(folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
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


def speed(artifact: str, threads: int, prompt: int = PROMPT) -> None:
    """Prints a row of JSON. Behind a prompt of LONG tokens nothing needs to be made up."""
    from diffbit.runtime import Session

    session = Session(artifact, threads=threads)

    def timed(ids: Any) -> tuple[float, float, int]:
        wall, cpu = time.perf_counter(), time.process_time()
        token = int(session.prefill(ids).argmax())
        return time.perf_counter() - wall, time.process_time() - cpu, token

    def decoded(token: int, name: str) -> dict[str, float]:
        rows = []
        for _ in range(NEW):
            *row, token = timed([[token]])
            rows.append(row)
        wall, cpu = (statistics.median(column) for column in zip(*rows[2:], strict=True))
        return {f"decode_s_{name}": wall, f"decode_cpu_s_{name}": cpu}

    wall, cpu, token = timed(np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (1, prompt)))
    row = {"prefill_s": wall, "prefill_cpu_s": cpu} | decoded(token, "behind_prompt")
    if prompt < LONG:
        repeat_cache(session, prompt)
        session._mask[:] = 1
        session._length = session._cache.lengths[0] = LONG
        row |= decoded(token, "behind_long")
    print(json.dumps(row | {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def repeat_cache(session: Any, tokens: int) -> None:
    """Fill growing buffers with copies of their first `tokens` tokens."""
    from diffbit.ops.cache import TOKENS

    for buffer, value in zip(session._cache.buffers.values(), session._cache.past.values(), strict=True):
        if buffer.grows and (shape := value.shape())[axis := 1 + buffer.shape.index(TOKENS)] >= LONG:
            dtype = np.dtype(buffer.dtype)
            memory = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(value.data_ptr())
            array = np.moveaxis(np.frombuffer(memory, dtype).reshape(shape), axis, 0)
            for start in range(tokens, len(array), tokens):
                part = array[start : start + tokens]
                part[:] = array[: len(part)]


def this_script(*arguments: str) -> dict[str, Any]:
    return last_row([sys.executable, __file__, *arguments])


def peer(python: Path, work: Path, threads: int) -> dict[str, Any]:
    shape = json.dumps(PEER)
    file = once(work / "peer.gguf", lambda out: quietly(llama_command(python, "write", "Q4_0", shape, out)))
    return last_row(llama_command(python, "measure", file, PROMPT, NEW, 1, threads, LONG))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--whole", action="store_true", help="compute a prompt of LONG tokens, too")
    parser.add_argument("--layers", type=int, default=32, help="a multiple of 4; fewer to try it out")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    model, quantized, artifact = (options.work / name for name in ("model", "quantized", "artifact"))
    result: dict[str, Any] = {"machine": describe(), "threads": options.threads, "layers": options.layers}

    def step(name: str, *arguments: str | Path) -> None:
        result[name] = measured(diffbit_command(*arguments), options.work / f"{name}.log")
        say(step=name, **result[name])

    if not model.exists():
        this_script("write", str(model), str(options.layers))
    if not quantized.exists():
        step("quantize", "quantize", model, "--weights", "int4_g32", "--kv", "int8", "-o", quantized)
    if not artifact.exists():
        step("export", "export", quantized, "--context-length", str(LONG + 2 * NEW), "-o", artifact)
    result["bytes"] = sum(file.stat().st_size for file in artifact.iterdir())
    threads = ("--threads", str(options.threads))
    step("run", "run", artifact, "Once upon a time", "--max-tokens", "16", *threads)
    rounds: dict[str, list[dict[str, Any]]] = {"speed": [], "llama.cpp": []}
    for _ in range(ROUNDS if options.llama else 1):
        rounds["speed"].append(this_script("speed", str(artifact), str(options.threads)))
        say(**rounds["speed"][-1])
        if options.llama:
            rounds["llama.cpp"].append(peer(options.llama / "bin" / "python", options.work, options.threads))
            say(**rounds["llama.cpp"][-1])
    for name, rows in rounds.items():
        if rows:
            result[name] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            say(what=name, **result[name])
    if options.whole:
        result["whole"] = this_script("speed", str(artifact), str(options.threads), str(LONG))
        say(**result["whole"])
    if options.json:
        write_json(options.json, result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write_model(Path(sys.argv[2]), CONFIG | {"num_hidden_layers": int(sys.argv[3])})
        print("{}")
    elif sys.argv[1:2] == ["speed"]:
        speed(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        main()
