"""OpenVINO GenAI's continuous batching, for batch.py: batch_peer.py FILE CONTEXT THREADS STEPS COUNT ...

Prints JSON: tokens per second of STEPS steps with COUNT rows of CONTEXT tokens each, and the memory. A step's time is
what STEPS more tokens of every row take. Needs numpy and openvino-genai.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai


def main(file: str, context: int, threads: int, steps: int, *counts: int) -> None:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 4, False  # GiB
    scheduler.max_num_seqs = max(counts)
    pipeline = openvino_genai.ContinuousBatchingPipeline(file, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})
    random = np.random.default_rng(0)
    prompts = [openvino.Tensor(random.integers(3, 30_000, (1, context))) for _ in range(max(counts))]

    def seconds(count: int, new: int) -> float:
        options = [openvino_genai.GenerationConfig(max_new_tokens=new, ignore_eos=True)] * count
        started = time.perf_counter()
        answers = pipeline.generate(prompts[:count], options)
        passed = time.perf_counter() - started
        assert [len(answer.m_generation_ids[0]) for answer in answers] == [new] * count
        return passed

    seconds(1, 2)
    row = {str(count): count * steps / (seconds(count, steps + 1) - seconds(count, 1)) for count in counts}
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    print(json.dumps(row | {"memory": pages * os.sysconf("SC_PAGE_SIZE")}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
