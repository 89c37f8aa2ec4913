"""A mixture of heads (_routed.py) of differential attention, version 1."""

from __future__ import annotations

from dataclasses import dataclass

from ....models.attention import diff_v1
from ....models.mixers import Place
from ._routed import Routed, RoutedOptions


@dataclass(frozen=True)
class Options(RoutedOptions, diff_v1.Options):
    def module(self, place: Place) -> MohDiffV1:
        return MohDiffV1(self, place)


class MohDiffV1(Routed, diff_v1.DiffV1):
    pass
