"""The tables and the plot of frontier.py.

Intervals are 95 % of a bootstrap over the windows of each text and over calibration samples: each of DRAWS draws takes
n - 1 of n windows, and K - 1 of K samples, with replacement, which makes the variance unbiased (Rao and Wu, "Resampling
inference with complex survey data", JASA 83, 1988). Windows lie far apart, so they are independent. With one sample,
the interval covers the text alone. Two files are compared on the same windows and samples.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from report import interval, table

import diffbit
from diffbit.apps.evaluate.metrics import Estimate
from diffbit.io.drawing import drawn, logarithmic, style

DRAWS = 4000
PLAIN = ", no matrix"  # in the name of a file that was made without an importance matrix
SIZES = range(50, 111, 5)  # MB


@dataclass(frozen=True)
class Result:
    """A file's scores: of K samples and W windows, [K, W] of each."""

    tool: str
    name: str
    nbytes: float  # mean over samples
    types: str
    samples: tuple[int, ...]  # empty: needs no calibration text
    text: np.ndarray  # [W], the number of each window's text
    tokens: np.ndarray  # [W]
    kl: np.ndarray
    more: np.ndarray  # negative log likelihood less the float model's
    agree: np.ndarray
    day: str
    wrong: str = ""

    @classmethod
    def read(cls, folder: Path, text: np.ndarray, samples: int) -> list[Result]:
        """All that has been measured, by size; last what could not be made."""
        rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for file in sorted(folder.glob("*.json")):
            row = json.loads(file.read_text())
            row["date"] = str(date.fromtimestamp(file.stat().st_mtime))
            if row["sample"] < samples:
                rows[row["tool"], row["name"]].append(row)
        return sorted((cls.of(made, text) for made in rows.values()), key=lambda result: result.nbytes)

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]], text: np.ndarray) -> Result:
        first, day = rows[0], max(row["date"] for row in rows)
        if "wrong" in first:
            nothing = np.zeros((0, len(text)))
            return cls(first["tool"], first["name"], np.inf, "", (), text, text, *3 * (nothing,), day, first["wrong"])
        kl, nll, floats, agree = (
            np.array([row[name] for row in rows]) for name in ("kl", "nll", "float_nll", "agree")
        )  # fmt: skip
        samples = tuple(row["sample"] for row in rows) if first["calibrated"] else ()
        nbytes = float(np.mean([row["bytes"] for row in rows]))
        tokens = np.array(first["tokens"])
        more = nll - floats
        return cls(first["tool"], first["name"], nbytes, first["types"], samples, text, tokens, kl, more, agree, day)

    @property
    def label(self) -> str:
        return f"{self.tool} {self.name}"

    def divergence(self) -> Estimate:
        return self.estimate(draws_of(self, self.kl))

    def estimate(self, draws: np.ndarray) -> Estimate:
        """The first of the draws is the value itself."""
        low, high = np.quantile(draws[1:], (0.025, 0.975))
        return Estimate(float(draws[0]), float(low), float(high))

    def of_samples(self, samples: Sequence[int]) -> np.ndarray:
        """KL [K, W]; the same for every sample if none was needed."""
        if not self.samples:
            return np.broadcast_to(self.kl, (max(1, len(samples)), self.kl.shape[1]))
        return self.kl[[self.samples.index(sample) for sample in samples]]

    def to_dict(self) -> dict[str, Any]:
        about = {"tool": self.tool, "name": self.name, "types": self.types, "samples": list(self.samples)}
        if self.wrong:
            return about | {"wrong": self.wrong}
        return about | {"bytes": self.nbytes, "kl": self.divergence().to_dict(), "windows": self.kl.tolist()}


def draws_of(result: Result, totals: np.ndarray) -> np.ndarray:
    """Sums [K, W] over windows, per token: of all, then of DRAWS draws."""
    generator = np.random.default_rng(0)  # the same draws for every file with as many samples
    repeats, text = len(totals), result.text
    places = [np.flatnonzero(text == number) for number in np.unique(text)]
    windows = np.concatenate([generator.choice(some, (DRAWS, max(1, len(some) - 1))) for some in places], axis=1)
    chosen = generator.integers(repeats, size=(DRAWS, max(1, repeats - 1)))
    drawn_sums = totals[chosen[:, :, None], windows[:, None, :]].mean(1).sum(1)
    whole = totals.mean(0).sum() / result.tokens.sum()
    return np.concatenate([[whole], drawn_sums / result.tokens[windows].sum(1)])


def compare(ours: Result, theirs: Result) -> tuple[Estimate, Estimate]:
    """KL of ours less theirs, and KL of ours / theirs, on the same windows and samples."""
    shared = [sample for sample in ours.samples if not theirs.samples or sample in theirs.samples]
    shared = shared or list(theirs.samples)
    first, second = (draws_of(ours, one.of_samples(shared)) for one in (ours, theirs))
    return ours.estimate(first - second), ours.estimate(first / second)


def best(results: Sequence[Result], most: float) -> Result | None:
    """The file of at most so many bytes that loses least."""
    return min((one for one in results if one.nbytes <= most), key=lambda one: one.kl.mean(), default=None)


def markdown(results: Sequence[Result], name: str, shape: Sequence[int]) -> str:
    made = [result for result in results if not result.wrong]
    lines = []
    for result in made:
        ratio = np.exp(draws_of(result, result.more))
        agree = draws_of(result, result.agree)
        lines.append([
            result.label, f"{result.nbytes / 1e6:.1f}", interval(result.divergence().to_dict(), "{:.4f}".format),
            interval(result.estimate(ratio).to_dict(), lambda ratio: f"{100 * (ratio - 1):+.1f} %"),
            f"{100 * agree[0]:.1f} %", len(result.samples) or "", result.types,
        ])  # fmt: skip
    columns = ["", "MB", "KL, nats", "perplexity", "same top token", "samples", "matrices"]
    measured = max((result.day for result in results), default="")
    about = (
        f"{shape[0]} windows of {shape[1]} tokens, half of each text; diffbit {diffbit.__version__}, {measured}. "
        f'"{PLAIN.lstrip(", ")}": without an importance matrix.'
    )
    image = f"![KL divergence against the size of the file]({name}.svg)"
    parts = [about, image, at_each_size(made), table(columns, lines)]
    parts += [f"{result.label} could not be made: {result.wrong}" for result in results if result.wrong]
    return "\n\n".join(part for part in parts if part) + "\n"


def at_each_size(results: Sequence[Result]) -> str:
    """Our best file and the peers' best, of at most so many bytes, at every size at which the peers' best changes; and
    between our smallest file and theirs, beside theirs."""
    ours = [result for result in results if result.tool == "diffbit"]
    peers = [result for result in results if result.tool != "diffbit"]
    if not ours or not peers:
        return ""
    smallest = min(peers, key=lambda one: one.nbytes)
    changes = [one.nbytes for one in peers if best(peers, one.nbytes) is one and one.nbytes <= 1e6 * SIZES[-1]]
    least = min(one.nbytes for one in ours)
    sizes = sorted([1e6 * size for size in SIZES if least <= 1e6 * size < smallest.nbytes] + changes)
    lines = []
    for size in sizes:
        our, peer = best(ours, size), best(peers, size) or smallest
        if our is None:
            lines.append([f"{size / 1e6:.1f}", "none", "", peer.label, f"{peer.nbytes / 1e6:.1f}", "", ""])
            continue
        difference, ratio = compare(our, peer)
        lines.append([
            f"{size / 1e6:.1f}", our.label, f"{our.nbytes / 1e6:.1f}", peer.label, f"{peer.nbytes / 1e6:.1f}",
            interval(difference.to_dict(), "{:+.4f}".format), interval(ratio.to_dict(), "{:.2f}".format),
        ])  # fmt: skip
    columns = ["at most, MB", "diffbit", "MB", "the best of the others", "MB", "KL, ours less theirs", "ours / theirs"]
    return table(columns, lines)


def draw(results: Sequence[Result], file: Path) -> None:
    """KL against size, a line through each tool's best files."""
    from matplotlib.ticker import LogLocator  # takes long to import

    made = [result for result in results if not result.wrong and result.nbytes <= 1e6 * SIZES[-1]]
    tools = sorted({result.tool for result in made}, key=lambda tool: (tool != "diffbit", tool))
    with drawn(file) as (axes,):
        for index, tool in enumerate(tools):
            rows = [result for result in made if result.tool == tool]
            look = style(index)
            axes.plot([row.nbytes / 1e6 for row in rows], [row.divergence().value for row in rows],
                      **look | {"linestyle": "", "alpha": 0.4})  # fmt: skip
            front = [row for row in rows if best(rows, row.nbytes) is row]
            axes.plot([row.nbytes / 1e6 for row in front], [row.divergence().value for row in front],
                      label=tool, **look)  # fmt: skip
        logarithmic(axes)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.set_xlabel("MB")
        axes.set_ylabel("KL divergence, nats a token")
        axes.legend()
