"""Differential attention, version 1, with linear biases in place of RoPE (alibi.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....models.attention import diff_v1
from ....models.mixers import Place
from ._biased import BiasedOptions
from .alibi import LinearBias, NoRope


@dataclass(frozen=True)
class Options(BiasedOptions, diff_v1.Options):
    rope: NoRope = field(default=False, kw_only=True)

    def module(self, place: Place) -> AlibiDiffV1:
        return AlibiDiffV1(self, place)


class AlibiDiffV1(LinearBias, diff_v1.DiffV1):
    pass
