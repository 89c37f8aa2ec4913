"""Differential attention, version 2, with linear biases in place of RoPE (alibi.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....models.attention import diff_v2
from ....models.mixers import Place
from ._biased import BiasedOptions
from .alibi import LinearBias, NoRope


@dataclass(frozen=True)
class Options(BiasedOptions, diff_v2.Options):
    rope: NoRope = field(default=False, kw_only=True)

    def module(self, place: Place) -> AlibiDiffV2:
        return AlibiDiffV2(self, place)


class AlibiDiffV2(LinearBias, diff_v2.DiffV2):
    pass
