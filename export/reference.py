"""The torch model that an artifact is compared with: the checkpoint's, with the operators' rounding of activations.

Operators round their inputs in a fixed way, whatever the scheme says about activations: `Format.device_rounding`. A
scheme that the operators do not support is refused here, before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from ..formats import QTensor, QuantEmbedding
from ..io.errors import DiffbitError
from ..models import Block, Checkpoint, Decoder, rope_for
from ..models.checkpoint.names import EMBEDDING, HEAD
from ..models.layers.state import Carried, FixedState, LayerCache, State
from ..quantize import Plan, Scheme, Weights, as_exported, load, load_block, read_scheme, resolve
from ..quantize.layer import assemble
from ..quantize.scheme import EMBEDDING_MODULE, HEAD_MODULE
from ..runtime.artifact import TOKENIZER
from .fixed_scales import Calibration, calibration_ids
from .grouped import has_fixed_scales

COPIES = 3


def reference_model(checkpoint: str | Path | Checkpoint, target: str = "cpu") -> Decoder:
    """Load the whole model of a checkpoint, with the arithmetic of its artifact for a target."""
    checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    config, plan = checkpoint.config, resolve(checkpoint.config, read_scheme(checkpoint))
    check_plan(checkpoint.path, plan, target)
    decoder = load(checkpoint).eval()
    as_exported(decoder, target)
    if has_fixed_scales(config, plan.scheme.attention, target):
        contents = checkpoint.tokenizer_files
        if TOKENIZER not in contents:
            raise DiffbitError(
                f"{checkpoint.path}: holds no {TOKENIZER}, with which the scales of its int8 cache are computed for "
                "target onnxruntime; put the artifact's there"
            )
        ids = calibration_ids(config, contents[TOKENIZER], checkpoint.path)
        calibration = Calibration(config, decoder.embed(ids))
        for index, block in enumerate(decoder.model.layers):
            assert isinstance(block, Block)
            calibration.pass_through(block, index)
    return decoder


class Stream:
    """The same model one layer at a time: `embedding`, then `blocks`, then `head`, while a prompt passes through.

    Each part is yielded to be written, and dropped after the hidden states have passed through it. COPIES of the prompt
    pass through, too, with relative noise of `noise` added to their hidden states before and after each layer. The
    spread of their logits shows how much the results of another machine may differ because of other roundings of sums.

    text: token ids [n, S] that pass through first, for the scales of a cache that has fixed ones.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        prompt: list[int],
        noise: float,
        target: str = "cpu",
        text: Tensor | None = None,
    ) -> None:
        self.weights, self.config = Weights(checkpoint), checkpoint.config
        self._ids = torch.tensor([prompt] * (1 + COPIES))
        self._rope = rope_for(self.config, torch.arange(len(prompt))[None])
        self._noise, self._target, self._text = noise, target, text
        self._calibration: Calibration | None = None
        self._generator = torch.Generator().manual_seed(0)
        self._x: Tensor  # [1 + COPIES, S, E], the first row without noise
        self._carried: Carried = {}
        self.largest = 0.0  # of the keys and values of the layers so far

    def embedding(self) -> Tensor | QTensor:
        """Return the embedding table [V, E], quantized or in its stored dtype."""
        table = self.weights.read(EMBEDDING)

        def rows(ids: Tensor) -> Tensor:
            return QuantEmbedding(table)(ids) if isinstance(table, QTensor) else table[ids].float()

        self._x = rows(self._ids)
        if self._text is not None:
            self._calibration = Calibration(self.config, rows(self._text))
        self._disturb()  # else the first layer's rounding would be that of the golden prompt in all copies
        return table

    def blocks(self) -> Iterator[Block]:
        for index in range(self.config.num_layers):
            block = load_block(self.weights, index).eval()
            as_exported(block, self._target)
            if self._calibration is not None:
                self._calibration.pass_through(block, index)
            yield block
            rows, length = self._ids.shape
            with torch.inference_mode():
                state = self.config.layers[index].mixer.state(rows, length, torch.float32, "cpu")
                self._x = self._through(block, state)
                self._disturb()

    def _through(self, block: Block, state: State) -> Tensor:
        """Pass the prompt through a layer. The last token goes alone if the layer rounds its state, as in `verify`,
        because it reads the state that the others left."""
        is_rounded = block.self_attn.rounded_state is not None and isinstance(state, FixedState) and state.tensors
        if not is_rounded or self._ids.shape[1] == 1:
            cache = state if isinstance(state, LayerCache) else None
            out: Tensor = block(self._x, self._rope, None, cache, self._carried)
            if cache is not None:
                self.largest = max(self.largest, *(float(part.abs().max()) for part in (cache.key, cache.value)))
            return out
        pairs: list[tuple[Tensor, Carried]] = []
        for part in (slice(-1), slice(-1, None)):
            rope, carried = tuple(table[:, part] for table in self._rope), Carried()
            pairs.append((block(self._x[:, part], rope, None, state, carried), carried))
        (begin, earlier), (last, later) = pairs
        self._carried |= {index: tuple(map(_joined, earlier[index], later[index])) for index in earlier}
        return _joined(begin, last)

    def _disturb(self) -> None:
        copies = self._x[1:]
        copies *= 1 + self._noise * torch.randn(copies.shape, generator=self._generator)

    def head(self, embeddings: bool = False) -> tuple[nn.Module, nn.Module | None, Tensor]:
        """Return the final norm, the head (tied: with the embedding's weight), the logits [1 + COPIES, V] after the
        prompt; with `embeddings` no head, and the hidden states [1 + COPIES, E]."""
        config, scheme = self.config, self.weights.scheme or Scheme()
        with torch.device("meta"):
            norm = config.new_norm()
            top = nn.ModuleDict({"norm": norm})
            if not embeddings:
                top["lm_head"] = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        names = {f"norm.{part}": f"model.norm.{part}" for part, _ in norm.named_parameters()}
        if not embeddings:
            names[HEAD] = EMBEDDING if config.tie_embeddings else HEAD
        weights = {name: self.weights.read(stored) for name, stored in names.items()}
        assemble(top, weights, scheme, torch.float32)
        as_exported(top, self._target)
        with torch.inference_mode():
            if embeddings:  # as in the model that its authors published
                for parameter in norm.parameters():
                    parameter.mul_(config.hidden_scale)
            hidden = norm(self._x[:, -1:])
            head = None if embeddings else top["lm_head"]
            return norm, head, (hidden if head is None else head(hidden))[:, 0]


def _joined(before: Tensor, last: Tensor) -> Tensor:
    return torch.cat((before, last), 1)


def check_plan(path: Path, plan: Plan, target: str = "cpu") -> None:
    """Raise DiffbitError for a checkpoint whose plan ONNX Runtime has no operator for."""
    scheme = plan.scheme
    for part in ("logits", "probabilities"):
        if (bits := getattr(scheme.attention, part)) is not None:
            raise DiffbitError(
                f"{path}: its scheme rounds attention {part} to {bits} bits, which no artifact does; `diffbit "
                f"compare` shows what that costs; quantize again with {part} in float"
            )
    if target == "webgpu":
        return _check_blocks(path, plan)
    if scheme.activations is not None:
        for module, format in plan.formats.items():
            # an integer head always uses int8 activations, whatever the layers use; the embedding has none
            activations = "int8" if module == HEAD_MODULE else scheme.activations
            if module != EMBEDDING_MODULE and activations not in format.activations:
                raise DiffbitError(
                    f"{path}: {module} has {format} weights and the scheme asks for {scheme.activations} "
                    "activations, but ONNX Runtime multiplies those in float; choose another format, or leave "
                    "activations out"
                )


def _check_blocks(path: Path, plan: Plan) -> None:
    """Refuse int4 activations and formats that no operator for WebGPU has. These operators take float inputs, which
    approximate int8 activations only; a model for int4 needs the clipping."""
    if plan.scheme.activations == "int4":
        raise DiffbitError(
            f"{path}: the scheme asks for int4 activations, which no operator for WebGPU computes; export "
            "for another target"
        )
    for module, format in plan.formats.items():
        if not format.in_blocks:
            raise DiffbitError(
                f"{path}: {module} has {format} weights, which no operator for WebGPU multiplies by; choose "
                "int2 to int8, mxfp4 or ternary, or export for another target"
            )
