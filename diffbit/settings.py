"""Settings as values: how a session runs, and how tokens are sampled. Each is a field of a frozen dataclass, and
everything that takes it (the command line, the server, generation_config.json, Python) reads the field: its default,
its range and its help.

It imports nothing heavy, because every command's --help reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from .devices import ANY, DEVICES
from .io.errors import DiffbitError

MOST_BIAS = 1000.0


@dataclass(frozen=True)
class SessionOptions:
    """How an artifact runs (runtime/session.py). `Session`, `verify` and `bench` take one, or its fields by name."""

    threads: int | None = field(default=None, metadata={"help": "CPU threads; default: one per physical core."})
    device: str = field(
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

    @classmethod
    def of(cls, options: SessionOptions | None, given: Mapping[str, Any]) -> SessionOptions:
        """Return `options`, or the defaults, with the fields that are `given`."""
        return replace(options or cls(), **given)


def _number(default: Any, low: float, high: float, wanted: str, help: str, model: Any = None) -> Any:
    """A field for a number. wanted: the range in words; model: the default in a model's own settings, as transformers
    has it; None: the same."""
    about = {"low": low, "high": high, "wanted": wanted, "help": help, "model": default if model is None else model}
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from its logits (runtime/sampler.py has the formulas and their order).

    Raises DiffbitError for a value out of range, with the field's name.
    """

    temperature: float = _number(
        0.0, 0, 1e6, "0 (greedy) to 1e6", "Sampling temperature; 0: always choose the most likely token.", model=1.0
    )
    top_k: int = _number(
        0, 0, 1 << 31, "0 (no limit) or above", "Sample from the k most likely tokens; 0: from all.", model=50
    )
    top_p: float = _number(
        1.0, 5e-324, 1, "above 0 and at most 1 (no limit)",
        "Sample from the most likely tokens whose probabilities add up to this.",
    )  # fmt: skip
    min_p: float = _number(
        0.0, 0, 1, "0 (no limit) to 1",
        "Sample from the tokens that are at least this share as likely as the most likely one.",
    )  # fmt: skip
    repetition_penalty: float = _number(
        1.0, 1e-6, 1e6, "1e-6 to 1e6 (1 changes nothing)",
        "Above 1: tokens that have already occurred, in the prompt too, become less likely.",
    )  # fmt: skip
    frequency_penalty: float = _number(
        0.0, -100, 100, "-100 to 100",
        "Subtracted from a token's logit for each time that it has been generated.",
    )  # fmt: skip
    presence_penalty: float = _number(
        0.0, -100, 100, "-100 to 100", "Subtracted from a token's logit if it has been generated."
    )
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, metadata={"help": "Add BIAS to the logit of token ID; repeatable.", "model": {}}
    )
    seed: int | None = field(
        default=None, metadata={"help": "Random seed; default: another one each time.", "model": None}
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            if "low" in option.metadata:
                _check(option, getattr(self, option.name))
        if self.seed is not None and not (type(self.seed) is int and self.seed >= 0):
            raise DiffbitError(f"seed is {self.seed!r}, wanted 0 or above")
        for token, bias in self.logit_bias.items():
            if type(token) is not int or token < 0:
                raise DiffbitError(f"logit_bias has token {token!r}, wanted a token id, 0 or above")
            if not isinstance(bias, int | float) or not abs(bias) <= MOST_BIAS:
                raise DiffbitError(f"logit_bias of token {token} is {bias!r}, wanted {-MOST_BIAS:g} to {MOST_BIAS:g}")

    @classmethod
    def of_model(cls, settings: Mapping[str, Any], **given: Any) -> Sampling:
        """Return the settings of a model's generation_config.json as transformers reads them, except those `given`
        that are not None. Without do_sample it is greedy."""
        values = {name: value for name, value in given.items() if value is not None}
        for option in fields(cls):
            value = settings.get(option.name, option.metadata["model"])
            if option.name in values or value is None or "low" not in option.metadata:
                continue
            if option.name == "temperature" and settings.get("do_sample") is not True:
                value = 0.0
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
                raise DiffbitError(f"{option.name} is {value!r}, wanted a number")
            values[option.name] = int(value) if isinstance(option.default, int) else float(value)
        return cls(**values)


OF_MODEL = ("do_sample", *(option.name for option in fields(Sampling) if "low" in option.metadata))
"""The fields of a generation_config.json that say how its model samples."""


def _check(option: Field[Any], value: Any) -> None:
    about = option.metadata
    kinds = (int,) if isinstance(option.default, int) else (int, float)
    if type(value) is bool or not isinstance(value, kinds) or not about["low"] <= value <= about["high"]:
        raise DiffbitError(f"{option.name} is {value!r}, wanted {about['wanted']}")
