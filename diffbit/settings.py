"""Settings as values: how a session runs, and how tokens are sampled. Each is a field of a frozen dataclass, and
everything that takes it (the command line, the server, generation_config.json, Python) reads the field: its default,
its range and its help.

It imports nothing heavy, because every command's --help reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from .devices import ANY, DEVICES, DeviceName
from .io.fields import Rule, bounds, check

CALIBRATION_WINDOWS = 24  # of text, by default, for methods that need it
MAX_THREADS = 512  # ONNX Runtime does not limit the number, and hangs with too many


@dataclass(frozen=True)
class SessionOptions:
    """How an artifact runs (runtime/session.py). `Session`, `verify` and `bench` take one, or its fields by name."""

    threads: Annotated[int, bounds(1, MAX_THREADS)] | None = field(
        default=None, metadata={"help": "CPU threads; default: one per physical core that the system allows."}
    )
    device: DeviceName = field(
        default="cpu",
        metadata={
            "help": "Device to run on: cpu, cuda, webgpu (any GPU), openvino[:cpu|gpu|npu] (Intel), or provider:NAME, "
            "an execution provider of ONNX Runtime. It fails where the device is not available.",
            "complete": (*DEVICES, ANY),
        },
    )
    native: bool = field(
        default=True,
        metadata={
            "help": "Run portable ONNX functions instead of the native library's operators.",
            "flag": "no_native",
        },
    )
    bfloat16: bool = field(
        default=False,
        metadata={"help": "Compute prompts in bfloat16 on a CPU with AMX: up to twice as fast, slightly less exact."},
    )
    reproducible: bool = field(
        default=False,
        metadata={
            "help": "Give the same answer whether or not tokens of the prompt were cached: reuse only whole blocks of "
            "earlier prompts, and no generated tokens (docs/serve.md says what this costs)."
        },
    )

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def of(cls, options: SessionOptions | None, changes: Mapping[str, Any]) -> SessionOptions:
        """Return `options`, or the defaults, with these changes of fields."""
        return replace(options or cls(), **changes)


def _number(default: Any, help: str, model: Any = None) -> Any:
    """A field that a model can set. model: the default there, as transformers has it; None: the same."""
    return field(default=default, metadata={"help": help, "model": default if model is None else model})


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from its logits (runtime/sampler.py has the formulas and their order).

    Raises DiffbitError for a value out of range, with the field's name.
    """

    temperature: Annotated[float, bounds(0, 1e6, "0 (greedy) to 1e6")] = _number(
        0.0, "Sampling temperature; 0: always choose the most likely token.", model=1.0
    )
    top_k: Annotated[int, bounds(0, 1 << 31, "0 (no limit) or above")] = _number(
        0, "Sample from the k most likely tokens; 0: from all.", model=50
    )
    top_p: Annotated[float, Rule("above 0 and at most 1 (no limit)", lambda value: 0 < value <= 1)] = _number(
        1.0, "Sample from the most likely tokens whose probabilities add up to this."
    )
    min_p: Annotated[float, bounds(0, 1, "0 (no limit) to 1")] = _number(
        0.0, "Sample from the tokens that are at least this share as likely as the most likely one."
    )
    repetition_penalty: Annotated[float, bounds(1e-6, 1e6, "1e-6 to 1e6 (1 changes nothing)")] = _number(
        1.0, "Above 1: tokens that have already occurred, in the prompt too, become less likely."
    )
    frequency_penalty: Annotated[float, bounds(-100, 100)] = _number(
        0.0, "Subtracted from a token's logit for each time that it has been generated."
    )
    presence_penalty: Annotated[float, bounds(-100, 100)] = _number(
        0.0, "Subtracted from a token's logit if it has been generated."
    )
    logit_bias: Mapping[Annotated[int, bounds(0)], Annotated[float, bounds(-1000, 1000)]] = field(
        default_factory=dict, metadata={"help": "Add BIAS to the logit of token ID; repeatable."}
    )
    seed: Annotated[int, bounds(0)] | None = field(
        default=None, metadata={"help": "Random seed; default: a new one each time."}
    )

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def of_model(cls, settings: Mapping[str, Any], **changes: Any) -> Sampling:
        """Return the settings of a model's generation_config.json, except `changes` that are not None.

        What the file leaves out has transformers' defaults. "do_sample": false means greedy. A file that does not say
        do_sample, such as one with token ids only, samples, with UNSAID for what it leaves out.
        """
        values = {name: settings[name] for name in OF_MODEL if settings.get(name) is not None}
        samples = values.pop("do_sample", None)
        defaults = {option.name: option.metadata["model"] for option in fields(cls) if "model" in option.metadata}
        unsaid = dict(UNSAID) if samples is None else {}
        greedy = {} if samples in (None, True) else {"temperature": 0.0}
        chosen = {name: value for name, value in changes.items() if value is not None}
        return cls(**defaults | unsaid | values | greedy | chosen)


UNSAID: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.9}
"""How a model samples whose files do not say it. Greedy texts of small models end in loops."""


OF_MODEL = ("do_sample", *(option.name for option in fields(Sampling) if "model" in option.metadata))
"""The fields of a generation_config.json that say how its model samples."""
