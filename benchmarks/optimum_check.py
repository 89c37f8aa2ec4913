"""Do optimum's ORTModelForCausalLM and diffbit's torch model agree on an artifact? In an environment of its own.

    python benchmarks/optimum_check.py --work /tmp/optimum_check      # about 3 minutes and 3 GB, once

optimum-onnx pins transformers below 4.58, which diffbit's own environment does not want, so this script makes a
virtual environment in the work folder, writes random models of every attention variant with diffbit, and lets optimum
generate greedily from their artifacts there. Prints a JSON row per artifact; exit status 1 if any differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = ("optimum-onnx[onnxruntime]", "transformers<4.58", "torch")
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
PINNED = ("torch", "numpy", "onnxruntime", "onnx")  # the same here as where diffbit runs
PROMPT, NEW_TOKENS = [5, 17, 100, 42, 7], 24

# Runs in the other environment: an artifact and a prompt in, greedy tokens out
GENERATE = """
import json, sys, torch
from importlib.metadata import version
from optimum.onnxruntime import ORTModelForCausalLM
artifact, prompt, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model = ORTModelForCausalLM.from_pretrained(artifact, use_cache=True)
ids = torch.tensor([prompt])
options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
versions = {name: version(name) for name in ("optimum-onnx", "transformers", "onnxruntime", "torch")}
print(json.dumps({"tokens": out[0, len(prompt):].tolist(), "versions": versions}))
"""


def environment(folder: Path) -> Path:
    """The Python of a virtual environment that holds optimum; made if it is not there."""
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        pins = folder / "constraints.txt"
        lines = CONSTRAINTS.read_text().splitlines() if CONSTRAINTS.exists() else []
        pins.write_text("\n".join(line for line in lines if line.split("==")[0].strip() in PINNED) + "\n")
        command = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(pins), *PACKAGES]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (folder / "ready").touch()
    return python


def write_artifact(folder: Path, attention: str, weights: str | None) -> tuple[Path, list[int]]:
    """A random model's artifact, and the greedy tokens of the torch model that it is held against."""
    import torch

    from diffbit import calib_data, models, quantize
    from diffbit.export import export_artifact, reference_model

    torch.manual_seed(0)
    name = f"{attention}-{weights or 'float'}"
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        calib_data.train_tokenizer(["def add(a, b):\n    return a + b\n"] * 4, 300, tokenizer)
    # optimum takes hidden_size / num_attention_heads for the width of a head, whatever config.json says
    heads, kv_heads = (8, 4) if attention == "softmax" else (4, 2)
    config = models.ModelConfig(
        vocab_size=300, hidden_size=128, num_layers=2, num_heads=heads, num_kv_heads=kv_heads, head_dim=16,
        intermediate_size=256, max_position=128, attention=attention, bos_token_id=1, eos_token_ids=(2,),
    )  # fmt: skip
    decoder = models.Decoder(config)
    with torch.no_grad():  # far enough from zero that the most likely token is clear
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5)
    checkpoint = folder / name
    models.save(decoder, checkpoint, tokenizer_from=tokenizer)
    if weights:
        source, checkpoint = checkpoint, folder / f"{name}-quantized"
        quantize.quantize_checkpoint(source, checkpoint, quantize.Scheme(weights=quantize.parse_format(weights)))
    artifact = export_artifact(checkpoint, folder / f"{name}-onnx")
    reference, tokens = reference_model(checkpoint), list(PROMPT)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            logits = reference(torch.tensor([tokens]))[0, -1]
            logits[list(config.eos_token_ids)] = -torch.inf  # min_new_tokens, as there
            tokens.append(int(logits.argmax()))
    return artifact, tokens[len(PROMPT) :]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="an empty or new folder")
    work = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    python = environment(work / "venv")
    models = work / "models"
    subprocess.run(["rm", "-rf", str(models)], check=True)
    models.mkdir()
    same = True
    for attention in ("diff_v1", "diff_v2", "softmax"):
        for weights in (None, "int4_g32"):
            artifact, wanted = write_artifact(models, attention, weights)
            arguments = [str(artifact), json.dumps(PROMPT), str(NEW_TOKENS)]
            run = subprocess.run([str(python), "-c", GENERATE, *arguments], capture_output=True, text=True)
            row = {"artifact": artifact.name, "equal": False}
            if run.returncode:
                row["error"] = run.stderr.strip().splitlines()[-1]
            else:
                result = json.loads(run.stdout.strip().splitlines()[-1])
                row |= {"equal": result["tokens"] == wanted, "tokens": len(wanted), **result["versions"]}
            same &= bool(row["equal"])
            print(json.dumps(row), flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
