"""A one-layer attention model as an artifact, in both cache modes, and the same model in numpy.

    x = embed[id] + place[position];  q = k = x and v = tanh(x), in heads of d
    logits = (x + gain * attention(q, k, v)) @ out

With `gain` 0 and one-hot embeddings the next token depends on the last one alone, which makes generations predictable.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

GROWING = """
  past_length = Sub (total, S)
  slots = Range (zero_0d, total_0d, one_0d)
  first_0d = Squeeze (past_length)
  queries = Range (first_0d, total_0d, one_0d)
  query_column = Unsqueeze (queries, one)
  future = Greater (slots, query_column)
  padding_2d = Equal (attention_mask, zero)
  padding = Unsqueeze (padding_2d, one_two)
  hidden = Or (future, padding)
  k_new = Transpose <perm = [0, 2, 1, 3]> (x_heads)
  "present.0.key" = Concat <axis = 2> ("past_key_values.0.key", k_new)
  v_new = Transpose <perm = [0, 2, 1, 3]> (v_heads)
  "present.0.value" = Concat <axis = 2> ("past_key_values.0.value", v_new)
  k_t = Transpose <perm = [0, 1, 3, 2]> ("present.0.key")
  raw = MatMul (k_new, k_t)
  scaled = Mul (raw, scale)
  scores = Where (hidden, minus, scaled)
  weights = Softmax <axis = -1> (scores)
  mixed = MatMul (weights, "present.0.value")
  mixed_t = Transpose <perm = [0, 2, 1, 3]> (mixed)
  attention = Reshape (mixed_t, x_shape)
"""
IN_PLACE = """
  counts = ReduceSum <keepdims = 0> (attention_mask, one)
  last = Sub (counts, one)
  seqlens = Cast <to = 6> (last)
  total_32 = Cast <to = 6> (total)
  attention, "present.0.key", "present.0.value" = com.microsoft.GroupQueryAttention
    <num_heads = HEADS, kv_num_heads = HEADS, scale = SCALE>
    (x, x, v, "past_key_values.0.key", "past_key_values.0.value", seqlens, total_32)
"""
MODEL = """
<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
toy (int64[B, S] input_ids, int64[B, T] attention_mask, int64[B, S] position_ids,
     float[B, HEADS, C, DIM] "past_key_values.0.key", float[B, HEADS, C, DIM] "past_key_values.0.value")
  => (float[B, S, VOCAB] logits, float[B, HEADS, D, DIM] "present.0.key", float[B, HEADS, D, DIM] "present.0.value")
  <int64[1] zero = {0}, int64[1] one = {1}, int64 zero_0d = {0}, int64 one_0d = {1}, int64[2] one_two = {1, 2},
   int64[4] heads_shape = {0, 0, HEADS, DIM}, float minus = {-1e9}, float scale = {SCALE}, float gain = {GAIN}>
{
  tokens = Gather (embed, input_ids)
  places = Gather (place, position_ids)
  x = Add (tokens, places)
  x_shape = Shape (x)
  v = Tanh (x)
  x_heads = Reshape (x, heads_shape)
  v_heads = Reshape (v, heads_shape)
  S = Shape <start = 1, end = 2> (input_ids)
  total = Shape <start = 1, end = 2> (attention_mask)
  total_0d = Squeeze (total)
  ATTENTION
  gained = Mul (attention, gain)
  y = Add (x, gained)
  logits = MatMul (y, out)
}
"""


@dataclass(frozen=True)
class Toy:
    embed: np.ndarray  # [V, E]
    place: np.ndarray  # [P, E]
    out: np.ndarray  # [E, V]
    heads: int = 2
    gain: float = 1.0
    bos: int | None = None
    eos: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return len(self.embed)

    def logits(self, ids: list[int]) -> np.ndarray:
        """[S, V] of one sequence, in float64, straight from the formula."""
        x = (self.embed[ids] + self.place[: len(ids)]).astype(np.float64)
        length, width = x.shape
        head = x.reshape(length, self.heads, -1).transpose(1, 0, 2)
        scores = head @ head.transpose(0, 2, 1) / np.sqrt(width / self.heads)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return (x + self.gain * (weights @ np.tanh(head)).transpose(1, 0, 2).reshape(length, width)) @ self.out

    def greedy(self, ids: list[int], count: int) -> list[int]:
        ids = list(ids)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[-count:]

    def onnx(self, in_place: bool) -> onnx.ModelProto:
        width = self.embed.shape[1]
        text = MODEL.replace("ATTENTION", IN_PLACE if in_place else GROWING)
        numbers = {
            "HEADS": self.heads,
            "DIM": width // self.heads,
            "VOCAB": self.vocab_size,
            "SCALE": float(1 / np.sqrt(width / self.heads)),
            "GAIN": float(self.gain),
        }
        for word, number in numbers.items():
            text = text.replace(word, str(number))
        model = parser.parse_model(text)
        for name in ("embed", "place", "out"):
            model.graph.initializer.append(numpy_helper.from_array(getattr(self, name).astype(np.float32), name))
        onnx.checker.check_model(model)
        return model

    def write(self, folder: Path, *, in_place: bool = False, context: int = 24, **changes: Any) -> Path:
        """An artifact folder; `changes` replace manifest fields."""
        folder.mkdir()
        onnx.save(self.onnx(in_place), folder / "model.onnx")
        (folder / "tokenizer.json").write_text(byte_tokenizer().to_str(), encoding="utf-8")
        width = self.embed.shape[1]
        prompt = [1, 2, 3]
        golden = self.logits(prompt)[-1]
        tops = [int(i) for i in np.argsort(-golden)[:8]]
        manifest = {
            "artifact_version": 4,
            "diffbit_version": "0.1.0",
            "name": "toy",
            "model": {"vocab_size": self.vocab_size, "bos_token_id": self.bos},
            "dtype": "fp32",
            "scheme": None,
            "source": {"name": "toy", "sha256": "0" * 64},
            "calibration": None,
            "cache": {
                "layers": [
                    {
                        "buffers": [
                            {
                                "name": part,
                                "dtype": "float32",
                                "shape": [self.heads, "tokens", width // self.heads],
                                "in_place": "always" if in_place else "never",
                            }
                            for part in ("key", "value")
                        ]
                    }
                ]
            },
            "context_length": context,
            "eos_token_ids": list(self.eos),
            "golden": {
                "input_ids": prompt,
                "token_ids": tops,
                "logits": [float(golden[i]) for i in tops],
                "spread": float(golden.std()) or 1.0,
                "tolerance": 1e-4,
            },
        } | changes
        seal(folder, manifest)
        return folder


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Write diffbit.json with the hashes of the files as they are and of itself."""
    data = {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != "diffbit.json"}
    manifest = {"files": {n: {"bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()} for n, b in data.items()}} | {
        key: value for key, value in manifest.items() if key != "sha256"
    }
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    (folder / "diffbit.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def random_toy(seed: int = 0, vocab: int = 40, width: int = 32, places: int = 64) -> Toy:
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return Toy(embed=draw(vocab, width), place=draw(places, width), out=draw(width, vocab))


BOS, EOS, VOCAB = 256, 257, 264  # ids 0..255 are the bytes in the order of the byte-level alphabet


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: one token per UTF-8 byte, <bos> and <eos> special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    return tokenizer


def follows(text: str, *, bos: bool = True, end: int | None = None, places: int = 64) -> Toy:
    """A model that goes round `text` (distinct bytes): each byte predicts the next, the last one `end` or the first.
    places: tokens that a text has at most."""
    ids = byte_tokenizer().encode(text).ids
    assert len(set(ids)) == len(ids)
    out = np.zeros((VOCAB, VOCAB), np.float32)
    out[BOS, ids[0]] = 1
    for token, next_token in zip(ids, [*ids[1:], ids[0] if end is None else end], strict=True):
        out[token, next_token] = 1
    toy = Toy(np.eye(VOCAB, dtype=np.float32), np.zeros((places, VOCAB), np.float32), out, heads=3, gain=0.0)
    return replace(toy, bos=BOS if bos else None, eos=(EOS,))
