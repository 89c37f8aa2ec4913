"""Needles: how many queries of calib_data/needles.py a model answers, and how low bits change that.

A query is answered if every token of its value is the most likely one, given all tokens before it. There are W rows of
R queries each. The row is the unit of the intervals, as a window of text is in metrics.py, because the queries of a row
share its haystack. Rows have different needles and are treated as independent. Changes are paired: the same rows, with
and without low bits.
"""

from __future__ import annotations

import re
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
    setting = re.fullmatch(r"(\d+):(\d+)(?::(\d+))?", text.strip())
    if setting is None:
        raise DiffbitError(
            f"needles {text!r}: wanted NEEDLES:QUERIES or NEEDLES:QUERIES:LENGTH, such as 6:2 or 6:2:512"
        )
    needles, queries, length = map(int, setting.groups(context))
    return needles, queries, length


def answered(model: Decoder, needles: NeedleWindows, batch_size: int) -> np.ndarray:
    """Return which queries the model answers: bool [n, R]."""
    device = next(model.parameters()).device
    batches = []
    for begin in range(0, len(needles.starts), batch_size):
        ids = torch.from_numpy(needles.windows.ids[begin : begin + batch_size]).to(device)
        starts = torch.from_numpy(needles.starts[begin : begin + batch_size]).to(device)
        with torch.inference_mode():
            likeliest = model(ids).argmax(-1)  # [B, T]: of the token after each
        places = [starts + offset for offset in range(VALUE)]
        right = [likeliest.gather(1, place - 1) == ids.gather(1, place) for place in places]
        batches.append(torch.stack(right).all(0).cpu().numpy())
    return np.concatenate(batches)


def retrieval(
    needles: NeedleWindows, answers: np.ndarray, reference: np.ndarray, confidence: float = CONFIDENCE
) -> Retrieval:
    """answers, reference: bool [K, n, R], which queries this model, in K roundings, and the 16-bit model answer."""
    queries = answers.shape[-1]
    part = np.minimum((needles.depths * DEPTHS).astype(int), DEPTHS - 1)
    by_depth = [answers[..., part == depth] for depth in range(DEPTHS)]
    return Retrieval(
        length=needles.windows.ids.shape[1],
        needles=needles.needles,
        queries=queries,
        accuracy=clip(share(answers.sum(-1), queries, confidence), 0.0, 1.0),
        change=share(gained(answers, reference), queries, confidence),
        by_depth=tuple(float(at_depth.mean()) if at_depth.size else None for at_depth in by_depth),
    )


def gained(answers: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """In each row, queries answered minus those that the 16-bit model answers: int64 [K, n]."""
    return answers.sum(-1) - reference.sum(-1)


def share(counts: np.ndarray, queries: int, confidence: float = CONFIDENCE) -> Estimate:
    """Counts [K, n] of n rows of `queries` queries each, as a share of the queries."""
    return mean(counts, np.full(counts.shape[-1], queries), confidence, independent=True)


def setting(needles: NeedleWindows) -> dict[str, object]:
    """Return a set of needles, for a report."""
    windows, (rows, queries) = needles.windows, needles.starts.shape
    return {
        "length": windows.ids.shape[1], "needles": needles.needles, "queries": queries, "rows": rows,
        "source": windows.source, "sha256": windows.sha256,
    }  # fmt: skip
