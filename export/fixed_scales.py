"""The int8 KV cache of ONNX Runtime's own GroupQueryAttention, whose scales are fixed when a model is exported.

diffbit's own low-bit cache (ops/kv_cache.py) computes a scale for each row on the device. GroupQueryAttention has one
for each channel of a head, a constant of the graph, which must suit every text:

    y = H x - offset        code = clip(round-half-to-even(y / scale), -128, 127)        y ~ code * scale

H is the Hadamard transform of ops/kv_cache.py, after RoPE: it spreads outlier channels over the head (QuaRot, arXiv
2404.00456). Queries are rotated like keys, and the output is rotated back. The offset costs no exactness: a softmax
does not depend on q . offset, which all keys have in common, and its weights add up to 1, so the offset of the values
is added to the output. It is the row of the first token, which nearly all heads read most (attention sinks, arXiv
2309.17453), and which differs little between texts: its codes are then near 0, and its error is small.

Offsets and scales come from the text `mix` (calib_data), which passes through the model while that is exported, with
keys and values in float. A number takes 8 bits, and a row has no scale. There is no int4: with fixed scales it loses
19 times as much as rows with their own (research/cache/README.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..calib_data import TextTokenizer, load_text, windows
from ..io.errors import DiffbitError
from ..io.tokenizer_files import open_tokenizer
from ..models import Block, ModelConfig, rope_for
from ..models.attention import Attention
from ..models.layers import Arithmetic, Carried
from ..ops.kv_cache import rotate

TEXT = "mix"
WINDOWS, LENGTH = 8, 512  # of the text, and the tokens of each
LOW, TOP = -128, 127


@dataclass(frozen=True)
class Channels:
    """The offset and the scale of each channel, float32 [Hk, d], of rotated keys or values."""

    offset: Tensor
    scale: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> Channels:
        """Return those of the keys or the values of n windows of a text, [n, Hk, T, d]."""
        rotated = rotate(rows.float())
        offset = rotated[:, :, 0].median(0).values
        largest = (rotated - offset[:, None]).abs().amax((0, 2))
        return cls(offset, torch.where(largest == 0, 1, largest / TOP))

    def branch(self, index: int, branches: int) -> Channels:
        """Return those of one of the keys of each kv head, which lie side by side."""
        return Channels(self.offset[index::branches], self.scale[index::branches])

    def rounded(self, x: Tensor) -> Tensor:
        """Round x [B, G, T, w * d], heads of w rows side by side, as the cache does."""
        width = self.scale.shape[1]
        offset, scale = (part.unflatten(0, (x.shape[1], 1, -1)) for part in (self.offset, self.scale))  # [G, 1, w, d]
        y = rotate(x.float().unflatten(-1, (-1, width))) - offset
        return rotate((y / scale).round().clamp(LOW, TOP) * scale + offset).flatten(-2)


class FixedScales(Arithmetic):
    """Attention over such a cache: the reference for the graph."""

    def __init__(self, keys: Channels, values: Channels) -> None:
        self.keys, self.values = keys, values

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int, of_values: bool = False) -> Tensor:
        branches = len(self.keys.scale) // key.shape[1]
        keys = self.keys.branch(branch % branches, branches)
        return super().logits(query, keys.rounded(key), scale, branch)

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        return super().mix(probabilities, self.values.rounded(value), head_dim)


class Calibration:
    """A text that passes through a model's blocks, one after another, with keys and values in float."""

    def __init__(self, config: ModelConfig, hidden: Tensor) -> None:
        """hidden: the embeddings of windows of a text, [n, S, E]."""
        self._config, self._rope = config, rope_for(config, torch.arange(hidden.shape[1])[None])
        self._windows: list[tuple[Tensor, Carried]] = [(window[None], {}) for window in hidden]

    def pass_through(self, block: Block, index: int) -> None:
        """Pass the text through a block, one window at a time; its attention gets the scales of its keys and values."""
        mixer, caches = block.self_attn, []
        if isinstance(mixer, Attention):
            mixer.arithmetic = None
        for place, (x, carried) in enumerate(self._windows):
            state = self._config.layers[index].mixer.state(1, x.shape[1], torch.float32, "cpu")
            with torch.inference_mode():
                self._windows[place] = block(x, self._rope, None, state, carried), carried
            caches.append(state)
        if isinstance(mixer, Attention):
            keys, values = ([getattr(cache, part) for cache in caches] for part in ("key", "value"))
            mixer.arithmetic = FixedScales(Channels.of(torch.cat(keys)), Channels.of(torch.cat(values)))


def calibration_ids(config: ModelConfig, tokenizer: bytes, path: Path) -> Tensor:
    """Return windows of the text, int64 [n, S], encoded by a tokenizer.json. path: where it is from, for messages."""
    ends = config.eos_token_ids or (config.bos_token_id or 0,)
    encoder = TextTokenizer(open_tokenizer(tokenizer, path), ends[0], "", path)
    documents = encoder.encode(load_text(TEXT, "calib").documents)
    ids = windows(documents, min(LENGTH, config.max_position), eos_id=encoder.eos_id, max_windows=WINDOWS).ids
    if (largest := int(ids.max())) >= config.vocab_size:
        raise DiffbitError(
            f"{path}: makes token {largest} of a text, but the model has a vocabulary of {config.vocab_size} tokens; "
            "the tokenizer belongs to another model"
        )
    return torch.from_numpy(ids)


def turning(width: int) -> Tensor:
    """Return H [width, width], which is its own inverse."""
    return rotate(torch.eye(width))
