"""Runs an artifact without diffbit: python examples/plain_onnxruntime.py FOLDER PROMPT [TEMPERATURE]

It needs three packages: pip install numpy onnxruntime tokenizers
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

folder, prompt, temperature = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
manifest = json.loads((folder / "diffbit.json").read_text())
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
session = onnxruntime.InferenceSession(folder / "model.onnx")

# The cache is what each layer keeps of the tokens so far: an input past_key_values.LAYER.NAME, and after the new tokens
# an output present.LAYER.NAME. The size "tokens" begins with 0 and grows; "tokens%64" is a ring of 64 from the start.
cache = {}
for layer, entry in enumerate(manifest["cache"]["layers"]):
    for buffer in entry["buffers"]:
        sizes = [int(size.partition("%")[2] or 0) if isinstance(size, str) else size for size in buffer["shape"]]
        cache[f"{layer}.{buffer['name']}"] = np.zeros([1, *sizes], buffer["dtype"])

tokens = tokenizer.encode(prompt).ids
new_tokens, most = tokens, min(manifest["context_length"], len(tokens) + 64)
while len(tokens) < most:
    inputs = {f"past_key_values.{name}": past for name, past in cache.items()}
    inputs["input_ids"] = np.array([new_tokens])
    inputs["attention_mask"] = np.ones([1, len(tokens)], np.int64)  # 0 would hide a token
    inputs["position_ids"] = np.arange(len(tokens) - len(new_tokens), len(tokens))[None]
    logits, *present = session.run(["logits", *(f"present.{name}" for name in cache)], inputs)
    cache = dict(zip(cache, present, strict=True))
    scores = logits[0, -1]  # a number for each token of the vocabulary: how likely it is the next one
    if temperature:  # with this noise, the largest score is a draw from softmax(scores / temperature)
        scores = scores / temperature + np.random.default_rng().gumbel(size=len(scores))
    new_tokens = [int(scores.argmax())]
    if new_tokens[0] in manifest["eos_token_ids"]:
        break
    tokens = tokens + new_tokens
print(tokenizer.decode(tokens))
