"""Options of a training run, checked before it starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from ...formats import parse_format
from ...io.errors import DiffbitError
from ...models import ModelConfig
from ...quantize import Scheme

SCHEDULES = ("cosine", "two_stage")
OPTIMIZERS = ("adamw", "adamw8bit")


@dataclass(frozen=True)
class TrainConfig:
    """Options of a training run. A step trains on batch_size * accumulate * processes rows of `length` tokens.

    Raises DiffbitError for options out of range, or for a format that does not fit the model.
    """

    model: ModelConfig
    steps: int
    length: int  # tokens of a row, which is the context in training
    batch_size: int = 16  # rows per forward pass and process
    accumulate: int = 1  # forward passes per step
    learning_rate: float = 3e-3  # the highest, reached after `warmup` steps; then the schedule lowers it
    warmup: int = 50
    weight_decay: float = 0.1  # of matrices; norms and lambda vectors have none
    optimizer: str = "adamw"  # or "adamw8bit": 8-bit moments, from bitsandbytes
    clip: float = 1.0  # maximum norm of the gradient
    source: str = "stdlib"  # of the text (calib_data.load_text)
    field: str = "text"
    limit: int | None = None  # bytes of text to read from the train split; None: all
    tokenizer: str | None = None  # a tokenizer.json or its folder; None: train one with model.vocab_size ids
    init: str | None = None  # a checkpoint with the initial weights; None: random weights
    head_gain: float | None = None  # initial value of a learned head norm's weight (head_norm.py); None: no weight
    o_proj_init: float = 1.0  # initial size of o_proj, relative to that of initialize.py
    lambda_bias: float | None = None  # initial value of the bias of diff_v2's lambda; None: it has none, or init's
    qat: str | None = None  # format of the linear layers, such as "ternary"; None: float
    activations: str = "int8"  # of ternary layers: int8, or int4 after a Hadamard transform (BitNet v2)
    schedule: str = "cosine"  # of the learning rate, or "two_stage"
    distill: str | None = None  # a checkpoint, float or quantized: the teacher (distill.py); None: no teacher
    distill_weight: float = 100.0  # weight of the teacher's loss (alpha in distill.py); the text's loss has 1
    needles: float = 0.0  # share of rows with needles (calib_data/needles.py)
    seed: int = 0  # of weights and of the order of rows
    device: str = "auto"  # auto | cpu | cuda
    compile: bool = False  # torch.compile
    precision: str = "auto"  # of the forward pass: fp32, bf16 (autocast), or auto: bf16 on a GPU, fp32 on a CPU
    eval_every: int = 0  # steps; 0: only at the end
    eval_windows: int = 64  # windows of `length` tokens for the evaluation loss
    checkpoint_every: int = 500  # steps; 0: no checkpoints

    def __post_init__(self) -> None:
        format = None if self.qat is None else parse_format(self.qat)
        for name in ("steps", "batch_size", "accumulate", "eval_windows"):
            self._want(name, getattr(self, name) >= 1, "1 or more")
        for name in ("o_proj_init", "warmup", "weight_decay", "eval_every", "checkpoint_every"):
            self._want(name, getattr(self, name) >= 0, "0 or more")
        for name in ("learning_rate", "clip"):
            self._want(name, 0 < getattr(self, name) < float("inf"), "a positive number")
        self._want("batch_size", self.batch_size <= 1 << 20, "at most 1,048,576")
        self._want("needles", 0 <= self.needles <= 1, "a share, 0 to 1")
        self._want("distill_weight", 0 <= self.distill_weight < float("inf"), "0 or more")
        self._want("seed", 0 <= self.seed < 2**63, "0 or more, below 2**63")
        self._want("device", self.device in ("auto", "cpu", "cuda"), "auto, cpu or cuda")
        self._want("precision", self.precision in ("auto", "fp32", "bf16"), "auto, fp32 or bf16")
        self._want("optimizer", self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}")
        self._want("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        self._want("activations", self.activations in ("int8", "int4"), "int8 or int4")
        fits = self.activations == "int8" or (format is not None and self.activations in format.activations)
        self._want("activations", fits, "int8 unless qat is ternary")
        if self.lambda_bias is not None:
            self._want("lambda_bias", -100 <= self.lambda_bias <= 100, "a number from -100 to 100")
            self._want("lambda_bias", self.init is None, "none with init, whose weights have their own bias or none")
        if self.head_gain is not None:
            self._want("head_gain", 0 < self.head_gain < float("inf"), "a positive number")
            fits = self.model.head_norm and self.qat is None and not any(layer.sub_norms for layer in self.model.layers)
            self._want("head_gain", fits, "none, or diff_v1 with its head norm, in float, without sub-norms")
        if self.scheme is not None:
            self.scheme.formats(self.model)  # raises DiffbitError for formats that do not fit
        self._want("warmup", self.warmup <= self.steps, f"at most the {self.steps} steps of the run")
        longest = self.model.max_position
        self._want("length", 2 <= self.length <= longest, f"2 to {longest}, the model's max_position")

    def _want(self, name: str, met: bool, wanted: str) -> None:
        if not met:
            raise DiffbitError(f"training option {name} is {getattr(self, name)!r}; wanted {wanted}")

    @property
    def scheme(self) -> Scheme | None:
        """The scheme that the model is trained for; None for a float model."""
        if self.qat is None:
            return None
        format = parse_format(self.qat)
        return Scheme(weights=format, activations=self.activations if format.integer_product else None)

    def to_dict(self) -> dict[str, Any]:
        """The options as plain JSON."""
        return {**asdict(self), "model": self.model.to_dict()}

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Names of the options that change the result and differ from `other`, the `to_dict()` of another run."""
        ours = self.to_dict()
        free = {"device", "compile", "checkpoint_every"}
        return [  # runs of earlier versions lack newer options; these had their defaults
            field.name
            for field in fields(self)
            if field.name not in free and ours[field.name] != other.get(field.name, field.default)
        ]
