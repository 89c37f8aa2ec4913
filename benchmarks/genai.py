"""Models by turns in onnxruntime-genai: speed of prompts and of the tokens after them.

    python benchmarks/genai.py out/ort out/builder [--prompt 512] [--new 48] [--threads 1] [--rounds 5]

out/ort        `diffbit export --target onnxruntime`
out/builder    python -m onnxruntime_genai.models.builder -i FOLDER -o out/builder -p int4 -e cpu -c CACHE
               --extra_options int4_accuracy_level=4 int4_block_size=32 hf_token=false

Each model computes a prompt of random tokens and writes more greedily, in every round; medians in tokens/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from machine import describe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="folders with a genai_config.json")
    parser.add_argument("--prompt", type=int, default=512, help="tokens (default: %(default)s)")
    parser.add_argument("--new", type=int, default=48, help="tokens after it (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    arguments = parser.parse_args()
    for folder in arguments.models:
        if not (folder / "genai_config.json").is_file():
            parser.error(f"{folder} has no genai_config.json")
    import onnxruntime_genai as genai

    threads = {"model": {"decoder": {"session_options": {"intra_op_num_threads": arguments.threads}}}}

    def opened(folder: Path) -> genai.Model:
        config = genai.Config(str(folder))
        config.overlay(json.dumps(threads))
        return genai.Model(config)

    def turn(model: genai.Model) -> tuple[float, float]:
        length = arguments.prompt + arguments.new + 1
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = genai.Generator(model, parameters)
        start = time.perf_counter()
        generator.append_tokens(prompt)
        generator.generate_next_token()
        middle = time.perf_counter()
        for _ in range(arguments.new):
            generator.generate_next_token()
        return arguments.prompt / (middle - start), arguments.new / (time.perf_counter() - middle)

    prompt = np.random.default_rng(0).integers(100, 1000, (1, arguments.prompt)).astype(np.int32)
    models = {folder: opened(folder) for folder in arguments.models}
    for model in models.values():
        turn(model)
    times = [{folder: turn(model) for folder, model in models.items()} for _ in range(arguments.rounds)]
    print(describe())
    for folder in models:
        prompts, tokens = (statistics.median(one[folder][i] for one in times) for i in (0, 1))
        print(f"{folder}: prompt {prompts:.0f}, then {tokens:.1f} tokens/s")


if __name__ == "__main__":
    main()
