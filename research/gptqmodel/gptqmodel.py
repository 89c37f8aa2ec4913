"""Checks folders in GPTQ's layout against GPTQModel: it reads what diffbit writes, and diffbit what it writes.

    python -m venv ENV && ENV/bin/pip install gptqmodel==7.7.0      # wants torch 2.14; checked with 2.13.0
    python research/gptqmodel/gptqmodel.py --peer ENV

The model is examples/pico's Transformer. Each row compares the logits of diffbit in float32 with those of GPTQModel's
torch kernel, which computes in float16 only: what remains is float16's. Exits with 1 if a KL is over MOST.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import numpy as np
import torch
from report import table

import diffbit
from diffbit.io.progress import track

SOURCE = Path(__file__).parents[2] / "examples" / "pico" / "softmax"
OURS = ("int2_g64", "int3_g64", "int4_g32", "int4_g64_asym", "int8", "int8_g32_asym")
THEIRS: dict[str, dict[str, object]] = {
    "4 bits": {"bits": 4, "group_size": 32, "sym": True},
    "4 bits, zero points": {"bits": 4, "group_size": 64, "sym": False},
    "4 bits, zero points, gptq_v2": {"bits": 4, "group_size": 64, "sym": False, "format": "gptq_v2"},
    "3 bits": {"bits": 3, "group_size": 64, "sym": True},
    "2 bits, zero points": {"bits": 2, "group_size": 32, "sym": False},
}
MOST = 1e-4
CHILD = """
import json, sys
import numpy as np, torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

source, folder, rows, out, options = sys.argv[1:]
ids, options = torch.tensor(np.load(rows)), json.loads(options)
if options:
    model = GPTQModel.load(source, QuantizeConfig(device="cpu", desc_act=False, **options))
    text = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in ids]
    model.quantize(text, batch_size=1)
    model.save(folder)
model = GPTQModel.load(folder, device="cpu", dtype=torch.float16, backend=BACKEND.TORCH)
with torch.no_grad():
    np.save(out, model.model(input_ids=ids).logits.float().numpy())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, metavar="ENV", help="an environment with GPTQModel")
    python = parser.parse_args().peer.absolute() / "bin" / "python"
    lines = []
    with TemporaryDirectory() as name:
        work = Path(name)
        ids = torch.randint(5, 500, (16, 128), generator=torch.Generator().manual_seed(0))
        np.save(work / "ids.npy", ids.numpy())
        cases: list[tuple[str, str, dict[str, object]]] = [("diffbit", format, {}) for format in OURS]
        cases += [("GPTQModel", *case) for case in THEIRS.items()]
        for number, (writer, format, options) in enumerate(track(cases, "checking")):
            folder, out = work / f"model-{number}", work / f"{number}.npy"
            if not options:
                run("quantize", SOURCE, "-o", work / format, "--weights", format, "--embedding=none", "--head=none")
                run("export", work / format, "-o", folder, "--format", "gptq")
            child = [python, "-c", CHILD, *map(str, (SOURCE, folder, work / "ids.npy", out, json.dumps(options)))]
            subprocess.run(
                child, check=True, cwd=work, capture_output=True, env=os.environ | {"GPTQMODEL_CPU_WORKERS": "2"}
            )
            with torch.no_grad():
                ours = diffbit.load(folder).eval()(ids)
            lines.append([writer, format, f"{divergence(ours, torch.from_numpy(np.load(out))):.1e}"])
    print(table(["written by", "weights", "KL, nats a token"], lines))
    sys.exit(any(float(line[2]) > MOST for line in lines))


def run(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "diffbit", *map(str, arguments)], check=True, capture_output=True)


def divergence(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    first, second = (logits.double().log_softmax(-1) for logits in (ours, theirs))
    return float((first.exp() * (first - second)).sum(-1).mean())


if __name__ == "__main__":
    main()
