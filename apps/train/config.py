"""Options of a training run, checked before it starts."""

from __future__ import annotations

import fnmatch
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any

from ...formats import parse_format
from ...io.errors import DiffbitError
from ...io.fields import Count, NotNegative, Positive, bounds, check, one_of
from ...models import ModelConfig
from ...models.checkpoint import shapes
from ...quantize import Scheme

SCHEDULES = ("cosine", "two_stage")
FEWEST_STEPS = 50  # of a run whose steps follow from its text
TRAINABLE = ("all", "scales", "lora")
AtLeast0 = Annotated[int, bounds(0)]
Share = Annotated[float, bounds(0, 1, "a share, 0 to 1")]
LambdaBias = Annotated[float, bounds(-100, 100)]
Activations = Annotated[str, one_of("int8", "int4")]


@dataclass(frozen=True)
class TrainConfig:
    """Options of a training run. A step trains on batch_size * accumulate * processes rows of `length` tokens.

    Raises DiffbitError for options out of range, or for a format that does not fit the model.
    """

    model: ModelConfig
    steps: Count  # at most, if there are `passes`
    length: Annotated[int, bounds(2)]  # tokens of a row, which is the context in training
    batch_size: Annotated[int, bounds(1, 1 << 20)] = 16  # rows per forward pass and process
    accumulate: Count = 1  # forward passes per step
    passes: Positive | None = None  # over the text; they give the number of steps, FEWEST_STEPS or more; None: `steps`
    learning_rate: Positive = 3e-3  # the highest, reached after `warmup` steps; then the schedule lowers it
    warmup: AtLeast0 = 50
    weight_decay: NotNegative = 0.1  # of matrices; norms and lambda vectors have none
    optimizer: Annotated[str, one_of("adamw", "adamw8bit")] = "adamw"  # adamw8bit: 8-bit moments (bitsandbytes)
    clip: Positive = 1.0  # maximum norm of the gradient
    source: str = "stdlib"  # of the text (calib_data.load_text)
    field: str = "text"
    limit: int | None = None  # bytes of text to read from the train split; None: all
    tokenizer: str | None = None  # a tokenizer.json or its folder; None: train one with model.vocab_size ids
    init: str | None = None  # a checkpoint with the initial weights; None: random weights
    head_gain: Positive | None = None  # initial value of a learned head norm's weight (head_norm.py); None: no weight
    o_proj_init: NotNegative = 1.0  # initial size of o_proj, relative to that of initialize.py
    lambda_bias: LambdaBias | None = None  # initial bias of diff_v2's lambda; None: it has none, or init's
    qat: str | None = None  # format of the linear layers, such as "ternary"; None: float
    activations: Activations = "int8"  # of ternary layers: int8, or int4 after a Hadamard transform (BitNet v2)
    trainable: Annotated[str, one_of(*TRAINABLE)] = "all"  # scales: with qat; lora: adapters (qat.py, lora.py)
    rank: Count = 32  # of adapters
    only: str | None = None  # names of the tensors to train, with *, separated by commas; None: all
    schedule: Annotated[str, one_of(*SCHEDULES)] = "cosine"  # of the learning rate, or "two_stage"
    distill: str | None = None  # a checkpoint, float or quantized: the teacher (distill.py); None: no teacher
    distill_weight: NotNegative = 100.0  # weight of the teacher's loss (alpha in distill.py); the text's loss has 1
    needles: Share = 0.0  # of rows with needles (calib_data/needles.py)
    seed: Annotated[int, bounds(0, 2**63 - 1, "0 or more, below 2**63")] = 0  # of weights and of the order of rows
    device: Annotated[str, one_of("auto", "cpu", "cuda")] = "auto"
    compile: bool = False  # torch.compile
    precision: Annotated[str, one_of("auto", "fp32", "bf16")] = "auto"  # bf16: autocast; auto: bf16 on a GPU, else fp32
    eval_every: AtLeast0 = 0  # steps; 0: only at the end
    eval_windows: Count = 64  # windows of `length` tokens for the evaluation loss
    checkpoint_every: AtLeast0 = 500  # steps; 0: no checkpoints

    def __post_init__(self) -> None:
        check(self)
        format = None if self.qat is None else parse_format(self.qat)
        fits = self.activations == "int8" or (format is not None and self.activations in format.activations)
        self._require("activations", fits, "int8 unless qat is ternary")
        fits = self.trainable != "scales" or self.qat is not None
        self._require("trainable", fits, "all or lora without --qat: float weights have no scales to train")
        if self.adapts_floats:
            advice = "a trained model to start from (--init): adapters change a model that stays as it is"
            self._require("init", self.init is not None, advice)
            self._require("head_gain", self.head_gain is None, "none with --lora, which trains nothing but adapters")
        self._require("only", self.only is None or self.qat is None, "none with qat, which has trainable")
        fits = self.distill is not None or self.distill_weight == TrainConfig.distill_weight
        self._require("distill_weight", fits, f"{TrainConfig.distill_weight} without distill")
        for glob in self._globs():
            if not fnmatch.filter(names := list(shapes(self.model)), glob):
                layer = ", ".join(name for name in names if ".layers.0." in name)
                raise DiffbitError(f"only has {glob!r}, which no tensor is called; a layer has {layer}")
        if self.lambda_bias is not None:
            self._require("lambda_bias", self.init is None, "none with init, whose weights have their own bias or none")
        if self.head_gain is not None:
            fits = self.model.head_norm and self.qat is None and not any(layer.sub_norms for layer in self.model.layers)
            self._require("head_gain", fits, "none, or diff_v1 with its head norm, in float, without sub-norms")
        if self.scheme is not None:
            self.scheme.formats(self.model)  # raises DiffbitError for formats that do not fit
        self._require("warmup", self.warmup <= self.steps, f"at most the {self.steps} steps of the run")
        longest = self.model.max_position
        self._require("length", self.length <= longest, f"2 to {longest}, the model's max_position")

    @property
    def adapts_floats(self) -> bool:
        """Whether adapters of float weights are trained (lora.py)."""
        return self.trainable == "lora" and self.qat is None

    def scheduled(self, rows: int, batch: int) -> TrainConfig:
        """Return the run with the number of steps that `passes` over the rows take, with `batch` rows a step."""
        if self.passes is None:
            return self
        steps = min(self.steps, max(FEWEST_STEPS, math.ceil(self.passes * rows / batch)))
        return replace(self, steps=steps, warmup=min(self.warmup, max(1, steps // 10)))

    def trains(self, name: str) -> bool:
        """Whether a tensor of this name is trained."""
        return self.only is None or any(fnmatch.fnmatchcase(name, glob) for glob in self._globs())

    def _globs(self) -> list[str]:
        return [] if self.only is None else [glob.strip() for glob in self.only.split(",")]

    def _require(self, name: str, fits: bool, condition: str) -> None:
        if not fits:
            raise DiffbitError(f"{name} is {getattr(self, name)!r}, wanted {condition}")

    @property
    def scheme(self) -> Scheme | None:
        """The scheme that the model is trained for; None for a float model."""
        if self.qat is None:
            return None
        format = parse_format(self.qat)
        return Scheme(weights=format, activations=self.activations if format.integer_product else None)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain JSON."""
        return {**asdict(self), "model": self.model.to_dict()}

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Return the names of the options that change the result and differ from `other`, the `to_dict()` of another
        run."""
        ours, free = self.to_dict(), {"device", "compile", "checkpoint_every"}
        return [  # runs of earlier versions lack newer options; these had their defaults
            field.name
            for field in fields(self)
            if field.name not in free and ours[field.name] != other.get(field.name, field.default)
        ]
