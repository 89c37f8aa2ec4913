"""Rotary position embedding (RoFormer, arXiv 2104.09864, eq. 34), plain or with frequencies for longer contexts.

Pair j of a head's d numbers is rotated by the angle position * theta^(-2j/d). The pair is (x_j, x_{j+d/2}), the
"rotate half" order of Hugging Face; the interleaved order (x_2j, x_2j+1) of Meta's and unilm's code is the same
rotation after a permutation of the rows of q_proj and k_proj (`interleaved`). Angles, cos and sin are float32.

A RopeScaling extends the context; its names are Hugging Face's rope_type:

    linear    divides all angles by `factor`: positions are interpolated
    dynamic   increases theta for sequences beyond max_position; here sequences are never longer, so it is plain RoPE
    llama3    divides the frequencies of long wavelengths by `factor`, keeps short ones, and blends linearly between
    yarn      the same with other bounds (arXiv 2309.00071, section 3.2), and cos and sin times `attention_factor`
    longrope  rotates the first pairs of a head only, with frequencies divided by a factor each (arXiv 2402.13753)
    none      no positions at all: cos is 1 and sin 0
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from ...io.errors import DiffbitError
from ...io.fields import Count, Positive, check, get, of_length, one_of, read

Rope = tuple[Tensor, ...]  # cos and sin, and those of local_rope if layers have it: fp32 [B, S, d/2], or [S, d/2]


@dataclass(frozen=True)
class RopeScaling:
    """rope_type: its name in config.json."""

    rope_type: ClassVar[str]

    def __post_init__(self) -> None:
        check(self)

    @property
    def amplitude(self) -> float:
        """The factor of cos and sin of pairs that rotate."""
        return 1.0

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence that has these angles; None: any."""
        return None

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """Scale plain frequencies, radians per position of each pair, fp32 [d/2]."""
        return frequencies

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON; `scaling_from` is the inverse."""
        return {"rope_type": self.rope_type} | asdict(self)


@dataclass(frozen=True)
class NoPositions(RopeScaling):
    rope_type = "none"

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        return torch.zeros_like(frequencies)


@dataclass(frozen=True)
class Dynamic(RopeScaling):
    rope_type = "dynamic"
    factor: Positive


@dataclass(frozen=True)
class Linear(Dynamic):
    rope_type = "linear"

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3(RopeScaling):
    rope_type = "llama3"
    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            raise DiffbitError(
                f"rope scaling: high_freq_factor is {self.high_freq_factor}, wanted more than low_freq_factor, "
                f"which is {self.low_freq_factor}"
            )

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        wavelength = 2 * math.pi / frequencies
        turns = self.original_max_position / wavelength  # full turns within the original context
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _blend(frequencies, self.factor, share)


@dataclass(frozen=True)
class Yarn(RopeScaling):
    """Keeps the frequency of pairs that make more than beta_fast turns within the original context, and divides that of
    pairs that make less than beta_slow by `factor`. truncate: whether the bounds between are whole pair indices."""

    rope_type = "yarn"
    factor: Positive
    original_max_position: Count
    attention_factor: Positive
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True

    @property
    def amplitude(self) -> float:
        return self.attention_factor

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        pairs = len(frequencies)

        def pair(turns: float) -> float:
            """Return the pair index, a real number, that makes so many turns within the original context."""
            return pairs * math.log(self.original_max_position / (turns * 2 * math.pi)) / math.log(theta)

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        high += 0.001 if low == high else 0  # as in the paper authors' code
        slowed = (torch.arange(pairs, dtype=torch.float32, device=frequencies.device) - low) / (high - low)
        return _blend(frequencies, self.factor, 1 - slowed.clamp(0, 1))


@dataclass(frozen=True)
class LongRope(RopeScaling):
    """Pair j of the first r = len(short_factor) has the frequency theta^(-j/r) / short_factor_j, others do not rotate;
    cos and sin are times attention_factor. A head of which only a part rotates has factors of 1 and its rows in an
    order in which that part's pairs come first. original_max_position: longer sequences have another list of factors
    for all of their tokens, those of before included, which a cache cannot take back: there are none here."""

    rope_type = "longrope"
    short_factor: Annotated[tuple[Positive, ...], of_length(1, 1 << 14)]
    attention_factor: Positive = 1.0
    original_max_position: Count | None = None

    @property
    def amplitude(self) -> float:
        return self.attention_factor

    @property
    def longest(self) -> int | None:
        return self.original_max_position

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        pairs, rotated = len(frequencies), len(self.short_factor)
        if rotated > pairs:
            raise DiffbitError(f"rope scaling: short_factor has {rotated} entries, wanted {pairs} at most, one a pair")
        factors = torch.tensor(self.short_factor, dtype=torch.float32, device=frequencies.device)
        rotating = 1.0 / (factors * theta ** (torch.arange(rotated, device=frequencies.device) / rotated))
        return torch.cat((rotating, frequencies.new_zeros(pairs - rotated)))


def _blend(frequencies: Tensor, factor: float, share: Tensor) -> Tensor:
    """Blend linearly by `share`: 1 keeps a frequency; 0 and less divides it by `factor`."""
    share = share.clamp(0.0, 1.0)
    return (1 - share) * frequencies / factor + share * frequencies


SCALINGS: dict[str, type[RopeScaling]] = {
    scaling.rope_type: scaling for scaling in (NoPositions, Linear, Dynamic, Llama3, Yarn, LongRope)
}


def scaling_from(value: object, place: str) -> RopeScaling:
    """Invert `to_dict`; without a rope_type, as in earlier versions, it is llama3."""
    values = dict(read(Mapping[str, Any], value, place))
    kind = get(values, "rope_type", Annotated[str, one_of(*SCALINGS)], Llama3.rope_type, place)
    values.pop("rope_type", None)
    scaling: RopeScaling = read(SCALINGS[kind], values, place)
    return scaling


def inverse_frequencies(
    width: int, theta: float, scaling: RopeScaling | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Return radians per position of each pair of a head `width` = d wide: fp32 [d/2]."""
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    frequencies = 1.0 / theta**exponent
    return frequencies if scaling is None else scaling.scaled(frequencies, theta)


def interleaved(heads: int, head_dim: int) -> Tensor:
    """Return the row order of an interleaved projection: rotate-half's rows = on disk[rows]."""
    return torch.arange(heads * head_dim).view(heads, head_dim // 2, 2).transpose(1, 2).flatten()


def partial(heads: int, head_dim: int, rotated: int) -> Tensor:
    """Return the row order of a projection of whose heads only the first `rotated` rows rotate, as pairs
    (x_j, x_{j+rotated/2}): rotate-half's rows = on disk[rows], with the rotated pairs first."""
    halves = torch.arange(rotated).view(2, -1), torch.arange(rotated, head_dim).view(2, -1)
    return (torch.arange(heads)[:, None] * head_dim + torch.cat(halves, 1).flatten()).flatten()


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate heads x [B, S, heads, d] by cos, sin [B, S, d/2]; in float32, returned in x's dtype."""
    cos, sin = (table.unsqueeze(-2) for table in rope)  # [B, S, 1, d/2]
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
