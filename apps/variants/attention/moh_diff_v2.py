"""A mixture of heads (_routed.py) of differential attention, version 2."""

from __future__ import annotations

from dataclasses import dataclass

from ....models.attention import diff_v2
from ....models.mixers import Place
from ._routed import Routed, RoutedOptions


@dataclass(frozen=True)
class Options(RoutedOptions, diff_v2.Options):
    def module(self, place: Place) -> MohDiffV2:
        return MohDiffV2(self, place)


class MohDiffV2(Routed, diff_v2.DiffV2):
    pass
