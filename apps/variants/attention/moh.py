"""A mixture of heads (_routed.py) of softmax attention."""

from __future__ import annotations

from dataclasses import dataclass

from ....models.attention import softmax
from ....models.mixers import Place
from ._routed import Routed, RoutedOptions


@dataclass(frozen=True)
class Options(RoutedOptions, softmax.Options):
    def module(self, place: Place) -> Moh:
        return Moh(self, place)


class Moh(Routed, softmax.Softmax):
    pass
