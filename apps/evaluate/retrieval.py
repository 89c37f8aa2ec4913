"""Needles: how many queries of calib_data/needles.py a model answers, and how low bits change that.

A query is answered if every token of its value is the most likely one, given all tokens before it. There are W rows of
R queries each. The row is the unit of the intervals, as a window of text is in metrics.py, because the queries of a row
share its haystack. Rows have different needles and are treated as independent. Changes are paired: the same rows, with
and without low bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...calib_data import VALUE, NeedleWindows
from ...io.errors import DiffbitError
from ...models import Decoder
from .metrics import CONFIDENCE, Estimate, clip, mean

DEPTHS = 5  # equal parts of the haystack, with an accuracy each


@dataclass(frozen=True)
class Retrieval:
    """How many needles of one set a model finds."""

    length: int  # tokens of a row
    needles: int  # N in a row
    queries: int  # R of them asked for
    accuracy: Estimate  # share of queries answered
    change: Estimate  # of that share, to the 16-bit model's, paired
    by_depth: tuple[float | None, ...]  # accuracy in each fifth of the haystack, from its beginning; None: no needle


def parse_setting(text: str, context: int) -> tuple[int, int, int]:
    """ "N:R" or "N:R:LENGTH" -> (N, R, length); the length is the context where none is given."""
    parts = text.strip().split(":")
    if len(parts) not in (2, 3) or not all(part.isdecimal() for part in parts):
        raise DiffbitError(
            f"needles {text!r}: wanted NEEDLES:QUERIES or NEEDLES:QUERIES:LENGTH, such as 6:2 or 6:2:512"
        )
    needles, queries, length = (*map(int, parts), context)[:3]
    return needles, queries, length


def answered(model: Decoder, needles: NeedleWindows, batch_size: int) -> np.ndarray:
    """Which queries the model answers: bool [n, R]."""
    device = next(model.parameters()).device
    found = []
    for begin in range(0, len(needles.starts), batch_size):
        ids = torch.from_numpy(needles.windows.ids[begin : begin + batch_size]).to(device)
        starts = torch.from_numpy(needles.starts[begin : begin + batch_size]).to(device)
        with torch.inference_mode():
            likeliest = model(ids).argmax(-1)  # [B, T]: of the token after each
        places = [starts + offset for offset in range(VALUE)]
        right = [likeliest.gather(1, place - 1) == ids.gather(1, place) for place in places]
        found.append(torch.stack(right).all(0).cpu().numpy())
    return np.concatenate(found)


def retrieval(
    needles: NeedleWindows, found: np.ndarray, reference: np.ndarray, confidence: float = CONFIDENCE
) -> Retrieval:
    """found, reference: bool [K, n, R], which queries this model, in K roundings, and the 16-bit model answer."""
    rows, queries = found.shape[-2:]
    asked = np.full(rows, queries)
    part = np.minimum((needles.depths * DEPTHS).astype(int), DEPTHS - 1)
    by_depth = [found[..., part == depth] for depth in range(DEPTHS)]
    return Retrieval(
        length=needles.windows.ids.shape[1],
        needles=needles.needles,
        queries=queries,
        accuracy=clip(mean(found.sum(-1), asked, confidence, independent=True), 0.0, 1.0),
        change=mean(lost(found, reference), asked, confidence, independent=True),
        by_depth=tuple(float(own.mean()) if own.size else None for own in by_depth),
    )


def lost(found: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """In each row, queries answered minus those that the 16-bit model answers: int64 [K, n]."""
    return found.sum(-1) - reference.sum(-1)


def contrast(
    pair: tuple[np.ndarray, np.ndarray], against: tuple[np.ndarray, np.ndarray], confidence: float = CONFIDENCE
) -> Estimate:
    """Change of one model's share of queries answered minus that of another's; each pair is (found, reference)."""
    difference = lost(*pair) - lost(*against)
    return mean(difference, np.full(*pair[0].shape[-2:]), confidence, independent=True)


def label(setting: Retrieval) -> str:
    """A column's heading, such as "6:2 of 1024"."""
    return f"{setting.needles}:{setting.queries} of {setting.length}"


def settings(needles: Sequence[NeedleWindows]) -> list[dict[str, object]]:
    """The sets of needles, for a report."""
    return [
        {
            "length": one.windows.ids.shape[1], "needles": one.needles, "queries": one.starts.shape[1],
            "rows": len(one.starts), "source": one.windows.source, "sha256": one.windows.sha256,
        }
        for one in needles
    ]  # fmt: skip
