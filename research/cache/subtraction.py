"""Does differential attention need more or fewer bits for its KV cache than plain attention, and why?

    python research/cache/subtraction.py simulate [--json FILE] [--markdown]
    python research/cache/subtraction.py models --name NAME --models KIND=FOLDER[,FOLDER...] ... [--text FILE]
    python research/cache/subtraction.py twin --plain FILE --differential FOLDER --text FILE

simulate  the error of one head on random queries and keys in float64, beside the formulas of README.md
models    trained models: KL from the float cache, keys and values apart; several folders of a kind are its seeds, and
          the first kind is what the others are compared with. The error of their heads, beside the formulas
twin      a plain model and its differential conversion, which computes the same function at any lambda

A cache is that of ops/kv_cache.py. Intervals are over windows of text, and over seeds where there are several. --quick
shows whether it runs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import numpy as np
import torch
from machine import describe
from report import Row, add_outputs, command_line, interval, table, write_outputs
from torch import Tensor

from diffbit.apps.evaluate.metrics import Scores, log_probabilities, mean, score
from diffbit.calib_data import Windows, eval_windows
from diffbit.io.drawing import drawn, logarithmic, style
from diffbit.io.errors import DiffbitError
from diffbit.io.progress import track
from diffbit.models import Decoder, load
from diffbit.models.attention import Attention
from diffbit.models.layers.arithmetic import Arithmetic
from diffbit.ops import kv_cache
from diffbit.ops.diff_attention_reference import Cached, cached, mixed, scores

PAGE = "research/cache/README.md"
BITS = (2, 3, 4)
WINDOW, FIRST = 32, 4  # recent and first tokens in float16
DISTORTION = {2: 0.1175, 3: 0.03454, 4: 0.009497}  # of Max's quantizers for a normal distribution: |x - x'|^2 / |x|^2


# ---- formulas -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What rounding keys does to the output of a head: squares, of the last dimension's sum."""

    variance: Tensor
    bias: Tensor


def cross(a: Tensor, b: Tensor, weight: Tensor, values: Tensor) -> Tensor:
    """Return sum_t weight a b (V_t - a V) . (V_t - b V) [..., N] of maps [..., N, T] and values [..., T, e]."""
    first, second = a @ values, b @ values
    from_first, from_second = (out @ values.transpose(-1, -2) for out in (first, second))
    products = values.square().sum(-1).unsqueeze(-2) - from_first - from_second
    return (weight * a * b * (products + (first * second).sum(-1, keepdim=True))).sum(-1)


def expected(
    logits: Tensor,
    shrinkage: Tensor,
    variance: Tensor,
    values: Tensor,
    lam: Tensor | float,
    correlation: Tensor | float,
) -> Expected:
    """Return the error of (a_1 - lambda a_2) V to first order in the noise of the logits, and its mean to second.

    logits and their variance [2, ..., N, T], values [..., T, e], lambda and correlation [..., N] or numbers; shrinkage:
    by which share of themselves the logits become smaller. README.md has the formulas.
    """
    maps = logits.softmax(-1)

    def average(x: Tensor) -> Tensor:
        return (maps * x).sum(-1, keepdim=True)

    shrunk = shrinkage * logits
    curved = (variance * (1 - 2 * maps) - average(variance) + 2 * average(maps * variance)) / 2
    change = maps * (average(shrunk) - shrunk + curved)
    signal, noise = maps
    first, second = variance
    factor = lam if isinstance(lam, float) else lam[..., None]
    bias = ((change[0] - factor * change[1]) @ values).square().sum(-1)
    total = cross(signal, signal, first, values) + lam**2 * cross(noise, noise, second, values)
    shared = (first * second).sqrt()
    return Expected(total - 2 * correlation * lam * cross(signal, noise, shared, values), bias)


def value_error(weights: Tensor, values: Tensor, distortion: Tensor) -> Tensor:
    """Return the expected square error [..., N] of weights [..., N, T] times values that shrink by distortion [..., T]
    and get noise of variance distortion (1 - distortion) |V|^2 / e for each number."""
    power = distortion * (1 - distortion) * values.square().sum(-1)
    shrunk = weights @ (distortion.unsqueeze(-1) * values)
    return shrunk.square().sum(-1) + (weights.square() @ power.unsqueeze(-1)).squeeze(-1)


def amplification(lam: float, cosine: float, correlation: float) -> float:
    """Return by how much subtracting multiplies the relative square error of keys if both maps are equally long and
    values have no common part."""
    return (1 + lam**2 - 2 * correlation * lam * cosine) / (1 + lam**2 - 2 * lam * cosine)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(a, b, dim=-1)


# ---- simulation -----------------------------------------------------------------------------------------------------

TOKENS, QUERIES, WIDTH, SPREAD = 256, 8, 64, 1.5  # SPREAD: the standard deviation of logits
COMMON = 0.0, 1.0  # deviation of the mean of values, whose own deviation is 1
LAMBDAS, LIKENESS = (0.2, 0.5, 0.8, 1.0), (0.0, 0.5, 0.9)  # the correlation of both maps' logits


def least_squares(keys: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round keys [..., d] as the cache does, without an offset. Returns them and the square error of a number that
    their scales tell [...]."""
    codes, scale = kv_cache.encode_rows(keys.float(), bits)
    rounded = kv_cache.levels_of(codes, bits).double() * scale[..., None].double()
    return rounded, rounded.square().mean(-1) * DISTORTION[bits] / (1 - DISTORTION[bits])


def min_max(keys: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round keys to 2^bits equal steps from a row's smallest number to its largest. Returns as `least_squares`."""
    low, high = keys.amin(-1, keepdim=True), keys.amax(-1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    return ((keys - low) / scale).round() * scale + low, scale[..., 0].square() / 12


@dataclass(frozen=True)
class Sample:
    """Random heads: queries [2, M, N, d], keys [2, M, T, d], values [M, T, e]; logits have the deviation SPREAD."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    own_keys: bool

    @classmethod
    def of(cls, heads: int, likeness: float, own_keys: bool, common: float, seed: int) -> Sample:
        """own_keys: each map has its own, as in version 1. common: deviation of the mean of values."""
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=random)

        def pair(first: Tensor, second: Tensor, correlation: float) -> Tensor:
            return torch.stack((first, correlation * first + math.sqrt(1 - correlation**2) * second))

        queries = pair(*normal(2, heads, QUERIES, WIDTH), 1.0 if own_keys else likeness)
        keys = pair(*normal(2, heads, TOKENS, WIDTH), likeness if own_keys else 1.0)
        queries = queries / queries.norm(dim=-1, keepdim=True) * SPREAD
        values = normal(heads, TOKENS, WIDTH) + common * normal(heads, 1, WIDTH)
        return cls(queries, keys, values, own_keys)

    def logits(self, keys: Tensor) -> Tensor:
        return self.queries @ keys.transpose(-1, -2)

    def energy(self) -> Tensor:
        return self.queries.square().sum(-1, keepdim=True)  # [2, M, N, 1]


def relative(difference: Tensor, out: Tensor) -> float:
    return float(difference.square().sum() / out.square().sum())


def simulated(sample: Sample, lam: float, bits: int, recent: int) -> Row:
    """Measure and predict the relative square error of the signal's output and of the difference's."""
    coded = torch.arange(TOKENS) < TOKENS - recent
    rounded = torch.where(coded[:, None], least_squares(sample.keys, bits)[0], sample.keys)
    logits, maps = sample.logits(sample.keys), sample.logits(sample.keys).softmax(-1)
    low = sample.logits(rounded).softmax(-1)
    power, rest = sample.keys.square().sum(-1), (sample.keys - rounded).square().sum(-1)
    distortion = rest / power  # [2, M, T]
    variance = sample.energy() * (rest * (1 - distortion)).unsqueeze(-2) / WIDTH
    correlation = 0.0 if sample.own_keys else cosine(*sample.queries)
    values = torch.where(coded[:, None], least_squares(sample.values, bits)[0], sample.values)
    lost = (sample.values - values).square().sum(-1) / sample.values.square().sum(-1)
    row: Row = {"cosine": float(cosine(*maps).mean())}
    for name, factor in (("signal", 0.0), ("difference", lam)):
        weights, low_weights = maps[0] - factor * maps[1], low[0] - factor * low[1]
        out = weights @ sample.values
        error = expected(logits, distortion.unsqueeze(-2), variance, sample.values, factor, correlation)
        power_out = float(out.square().sum())
        row[name] = {
            "keys": relative(low_weights @ sample.values - out, out),
            "keys expected": float(error.variance.sum() + error.bias.sum()) / power_out,
            "bias expected": float(error.bias.sum()) / power_out,
            "values": relative(weights @ values - out, out),
            "values expected": float(value_error(weights, sample.values, lost).sum()) / power_out,
        }
    return row


def corrected(sample: Sample, lam: float, bits: int, recent: int, quantizer: Any) -> list[float]:
    """Return the relative square error after half the variance is subtracted from logits, as they are, and added."""
    coded = torch.arange(TOKENS) < TOKENS - recent
    rounded, error = quantizer(sample.keys, bits)
    logits = torch.where(coded, sample.logits(rounded), sample.logits(sample.keys))
    half = torch.where(coded, sample.energy() * error.unsqueeze(-2), 0.0) / 2

    def out(logits: Tensor) -> Tensor:
        signal, noise = logits.softmax(-1)
        return (signal - lam * noise) @ sample.values

    exact = out(sample.logits(sample.keys))
    return [relative(out(logits + sign * half) - exact, exact) for sign in (-1, 0, 1)]


def simulate(heads: int, plot: Path | None) -> tuple[Row, dict[str, str]]:
    cases = [(common, lam, alike) for common in COMMON for lam in LAMBDAS for alike in LIKENESS]
    lines, points = [], []
    for common, lam, alike in track(cases, "lambdas"):
        cells: list[str] = []
        for own_keys in (True, False):
            row = simulated(Sample.of(heads, alike, own_keys, common, seed=1), lam, 3, 0)
            signal, difference = row["signal"], row["difference"]
            simple = amplification(lam, row["cosine"], 0.0 if own_keys else alike)
            ratios = {key: difference[key] / signal[key] for key in signal}
            cells += [f"{value:.2f}" for value in (simple, ratios["keys expected"], ratios["keys"])]
            points.append(
                {"common": common, "lambda": lam, "likeness": alike, "own_keys": own_keys, "simple": simple} | ratios
            )
        cells += [f"{ratios['values expected']:.2f}", f"{ratios['values']:.2f}"]
        lines.append([f"{common:.0f}", lam, alike, f"{row['cosine']:.2f}", *cells])
    heading = ["common", "lambda", "likeness", "cosine", *(f"{v} {w}" for v in ("v1", "v2") for w in (
        "simple", "formula", "measured")), "values: formula", "measured"]  # fmt: skip
    texts = {"amplification": table(heading, lines)}
    lines = []
    for bits in BITS:
        for recent in (0, 64):
            v1, v2 = (
                simulated(Sample.of(heads, 0.5, own_keys, 0.0, seed=2), 0.5, bits, recent) for own_keys in (True, False)
            )
            cells = []
            for part in (v2["signal"], v1["difference"], v2["difference"]):
                bias = part["bias expected"] / part["keys expected"]
                cells += [f"{part['keys expected']:.4f}", f"{part['keys']:.4f}", f"{100 * bias:.0f} %"]
            lines.append([bits, recent, *cells])
    heading = ["bits", "recent", *(f"{v}: {w}" for v in ("plain", "v1", "v2") for w in ("formula", "measured", "bias"))]
    texts["bits"] = table(heading, lines)
    lines = []
    for name, quantizer in (("min-max", min_max), ("least squares", least_squares)):
        for bits in BITS:
            cells = []
            for lam, own_keys in ((0.0, False), (0.5, True), (0.5, False)):
                sample = Sample.of(heads, 0.5, own_keys, 1.0, seed=3)
                cells += [f"{value:.4f}" for value in corrected(sample, lam, bits, 64, quantizer)]
            lines.append([name, bits, *cells])
    heading = ["keys", "bits", *(f"{v}: {w}" for v in ("plain", "v1", "v2") for w in ("−½", "0", "+½"))]
    texts["correction"] = table(heading, lines)
    if plot:
        draw(points, plot)
    return {"points": points, "texts": texts}, texts


def draw(points: Sequence[Row], path: Path) -> None:
    """Draw how subtracting multiplies the error of keys: formulas as lines, measurements as markers."""
    from matplotlib.ticker import LogLocator

    kinds = [(own_keys, alike) for own_keys in (True, False) for alike in LIKENESS]
    with drawn(path, columns=2) as panels:
        for axes, common in zip(panels, COMMON, strict=True):
            for index, (own_keys, alike) in enumerate(kinds):
                row = [p for p in points if (p["common"], p["own_keys"], p["likeness"]) == (common, own_keys, alike)]
                lambdas = [0.0, *(point["lambda"] for point in row)]
                look = style(index)
                axes.plot(lambdas, [1.0, *(point["keys expected"] for point in row)], **look | {"marker": ""})
                name = f"version {1 if own_keys else 2}, likeness {alike:g}"
                axes.plot(lambdas, [1.0, *(point["keys"] for point in row)], label=name, **look | {"linestyle": ""})
            logarithmic(axes)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.set_xlabel("lambda")
            axes.set_ylabel("error of the difference / of its signal")
            axes.set_title(f"keys at 3 bits, common part of values {common:g}")
        panels[0].legend()


# ---- trained models -------------------------------------------------------------------------------------------------


@dataclass
class LowBitCache(Arithmetic):
    """Attention with keys and values of so many bits; None: floats.

    correction: times a logit's error variance, added to it. own_rounding: the noise map reads keys that were rounded
    after another rotation, so that its errors are its own. branch: the only one whose keys are rounded.
    """

    keys: int | None = None
    values: int | None = None
    correction: float = 0.0
    own_rounding: bool = False
    branch: int | None = None
    window: int = WINDOW
    first: int = FIRST

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int, of_values: bool = False) -> Tensor:
        if self.keys is None or self.branch not in (None, branch):
            return super().logits(query, key, scale, branch, of_values)
        turn = signs(key.shape[-1], branch if self.own_rounding else 0)
        keys = stored(key.float() * turn, query.shape[2], self.keys, True, self.window, self.first)
        queries = (query.float() * turn * scale).unflatten(1, (key.shape[1], -1))  # [B, G, r, S, d]
        logits = scores(queries, keys, 0)
        if self.correction and keys.levels.shape[-2]:
            width, distortion = key.shape[-1], DISTORTION[self.keys]
            power = keys.levels.square().sum(-1) * keys.scale.float().square()  # [B, G, n]
            error = torch.nn.functional.pad(power, (0, key.shape[2] - power.shape[-1])) / width
            energy = queries.square().sum(-1, keepdim=True)
            variance = energy * error[:, :, None, None] * distortion / (1 - distortion)
            logits = logits + self.correction * variance.masked_fill(~keys.coded, 0)
        return logits.flatten(1, 2)

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        if self.values is None:
            return super().mix(probabilities, value, head_dim)
        groups = value.shape[1]
        rows = value.float().unflatten(-1, (-1, head_dim)).transpose(2, 3)  # [B, G, w, T, d]
        values = stored(rows.flatten(1, 2), probabilities.shape[2], self.values, False, self.window, self.first)
        out = mixed(probabilities.unflatten(1, (groups, -1)), values.grouped(groups, rows.shape[2]))
        return out.flatten(4).flatten(1, 2)


def signs(width: int, seed: int) -> Tensor:
    """Return ones for seed 0, else random signs [d]."""
    if not seed:
        return torch.ones(width)
    return torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1


def stored(rows: Tensor, steps: int, bits: int, is_key: bool, window: int, first: int) -> Cached:
    return cached(rows, steps, f"int{bits}", window, first, is_key)


def windows_of(text: str, model: Path, length: int, count: int) -> Windows:
    """Return windows of a text file, or of "stdlib". Raises DiffbitError if there are fewer than `heads_of` watches."""
    windows = eval_windows(text, model, length, count, split="eval" if text == "stdlib" else "train")
    if len(windows.ids) < WATCHED:
        raise DiffbitError(f"{text} has {len(windows.ids)} windows of {length} tokens, wanted {WATCHED} or more")
    return windows


def attentions(model: Decoder) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def set_arithmetic(model: Decoder, arithmetic: Arithmetic | None) -> None:
    for module in attentions(model):
        module.arithmetic = arithmetic


@torch.inference_mode()
def measured(
    windows: Windows, reference: Decoder, variants: Mapping[str, tuple[Decoder, Arithmetic | None]], title: str
) -> dict[str, Scores]:
    """Score variants, a model and its arithmetic each, against the reference with a float cache."""
    results = {name: Scores.zeros(len(windows.ids), windows.document) for name in variants}
    ids, target = torch.from_numpy(windows.ids), torch.from_numpy(windows.target)
    for window in track(range(len(ids)), title):
        row = ids[window : window + 1]
        set_arithmetic(reference, None)
        exact = log_probabilities(reference(row)[0], target[window])
        for name, (model, arithmetic) in variants.items():
            set_arithmetic(model, arithmetic)
            low = log_probabilities(model(row)[0], target[window])
            score(results[name], window, ids[window], target[window], low, exact)
    return results


ALL = ", all tokens"  # low-bit, also the first and the recent ones
CORRECTIONS = {"−½": -0.5, "+½": 0.5}  # times the variance


def shown(value: float) -> str:
    return f"{value:.5f}"


def ratio(scores: Scores, other: Scores) -> Row:
    """Return log(KL / the other's KL), linear in the differences of the windows, with its interval."""
    first, second = (np.atleast_2d(part.kl) for part in (scores, other))
    value = math.log(first.mean() / second.mean())
    parts = first / first.mean() - second / second.mean()
    rest = mean(parts * scores.tokens.mean(), scores.tokens, document=scores.document)
    return {"value": value, "low": value + rest.low, "high": value + rest.high}


def more_bits(scores: Scores, other: Scores, slope: float) -> str:
    """Return how many more bits a cache needs to have the other's KL, where a bit lowers log KL by `slope`."""
    estimate = ratio(scores, other)
    return interval({end: estimate[end] / slope for end in estimate}, lambda value: f"{value:+.2f}".replace("-", "−"))


def slope(results: Mapping[str, Scores], what: str, all_tokens: bool = False) -> float:
    """Return by how much a bit lowers log KL between 2 and 4 bits."""
    few, many = (float(results[f"{what} {bits}{ALL * all_tokens}"].kl.mean()) for bits in (2, 4))
    return math.log(few / many) / 2


def caches(kind: str) -> dict[str, LowBitCache]:
    """Return the caches that are measured of a model: plain, v1 or v2."""
    variants = {f"{what} {bits}": LowBitCache(**{what: bits}) for what in ("keys", "values") for bits in BITS}
    for title, cache in list(variants.items()):
        variants[title + ALL] = replace(cache, window=0, first=0)
    for bits in BITS:
        for name, correction in CORRECTIONS.items():
            variants[f"keys {bits}, {name} variance"] = LowBitCache(keys=bits, correction=correction)
    if kind != "plain":
        variants["keys 3, of the noise map"] = LowBitCache(keys=3, branch=1)
        variants["keys 3, of the signal map"] = LowBitCache(keys=3, branch=0)
    if kind == "v2":
        variants |= {f"keys {bits}, rounded apart": LowBitCache(keys=bits, own_rounding=True) for bits in BITS}
    return variants


def models(
    name: str, kinds: Mapping[str, Sequence[Path]], text: str, length: int, count: int
) -> tuple[Row, dict[str, str]]:
    by_kind: dict[str, dict[str, Scores]] = {}
    heads: dict[str, Row] = {}
    for kind, folders in kinds.items():
        runs, parts = [], []
        for folder in folders:
            windows = windows_of(text, folder, length, count)
            model = load(folder).eval()
            variants = {title: (model, cache) for title, cache in caches(kind).items()}
            runs.append(measured(windows, model, variants, f"{kind}: {folder.name}"))
            parts.append(heads_of(model, windows))
        by_kind[kind] = {title: Scores.of_repeats([run[title] for run in runs]) for title in runs[0]}
        heads[kind] = {key: [x for part in parts for x in part.get(key, [])] for key in parts[0]}
    first, *others = by_kind
    lines = []
    for title, plain in by_kind[first].items():
        if "," in title.removesuffix(ALL):
            continue
        cells = [interval(scores_of[title].divergence().to_dict(), shown) for scores_of in by_kind.values()]
        a_bit = slope(by_kind[first], title.split()[0], title.endswith(ALL))
        lines.append([title, *cells, *(more_bits(by_kind[other][title], plain, a_bit) for other in others)])
    about = f"{describe()}. {count} windows of {length} tokens, {max(map(len, kinds.values()))} seed(s). "
    about += f"`{command_line(__file__, sys.argv[1:])}`\n\n"
    texts = {f"{name}": about + table(["", *by_kind, *(f"{other}: more bits" for other in others)], lines)}
    lines = [[title, *cells] for title, cells in variant_lines(by_kind)]
    texts[f"{name}_variants"] = table(["", *by_kind], lines)
    texts[f"{name}_heads"] = heads_table(heads)
    numbers = {kind: {title: np.atleast_2d(s.kl).tolist() for title, s in f.items()} for kind, f in by_kind.items()}
    return {"kl": numbers, "heads": heads, "texts": texts}, texts


def variant_lines(by_kind: Mapping[str, Mapping[str, Scores]]) -> list[tuple[str, list[str]]]:
    """Return the KL of each change of the cache, in parts of the unchanged one's."""
    lines = []
    for title in dict.fromkeys(title for f in by_kind.values() for title in f):
        if "," in title.removesuffix(ALL):
            base = title.split(",")[0]
            estimates = [ratio(f[title], f[base]) if title in f else None for f in by_kind.values()]
            lines.append((title, [interval(e, lambda value: f"{math.exp(value):.2f}") for e in estimates]))
    return lines


class Watch(Arithmetic):
    """Keeps what an attention layer multiplies."""

    def __init__(self) -> None:
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values = torch.empty(0)
        self.width = 0

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int, of_values: bool = False) -> Tensor:
        self.queries.append(query.double() * scale)
        self.keys.append(key.double())
        return super().logits(query, key, scale, branch, of_values)

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        self.values, self.width = value.double(), head_dim
        return super().mix(probabilities, value, head_dim)


HEAD_BITS, DRAWS, WATCHED = 3, 8, 2  # bits, random rotations, and windows of `heads_of`


@torch.inference_mode()
def heads_of(model: Decoder, windows: Windows) -> dict[str, list[float]]:
    """Return of each head: lambda, cosine of maps and queries, and the errors of keys and values, each a list."""
    result: dict[str, list[float]] = {}
    for window in range(WATCHED):
        row, lambdas = torch.from_numpy(windows.ids[window : window + 1]), {}
        for module in attentions(model):
            module.arithmetic = Watch()
            if hasattr(module, "lambda_of"):
                module.lambda_of = watched(module, lambdas)
        model(row)
        for module in attentions(model):
            watch = module.arithmetic
            module.arithmetic = None
            if hasattr(module, "lambda_of"):
                del module.lambda_of
            assert isinstance(watch, Watch)
            for key, values in layer_errors(watch, lambdas.get(module)).items():
                result.setdefault(key, []).extend(values)
    return result


def watched(module: Attention, into: dict[Any, Tensor]) -> Any:
    original = type(module).lambda_of

    def lambda_of(x: Tensor) -> Tensor:
        into[module] = original(module, x).double()
        return original(module, x)

    return lambda_of


@dataclass(frozen=True)
class Heads:
    """A layer's heads in one window, of queries in its second half: queries [n, H, N, d] of each branch, keys
    [n, H, T, d], values [H, T, e], lambda [H, N], and what each query sees, [N, T]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    lam: Tensor
    visible: Tensor

    @classmethod
    def of(cls, watch: Watch, lam: Tensor | None) -> Heads:
        _, heads, steps, _ = watch.queries[0].shape
        late = slice(steps // 2, None)

        def by_head(rows: Tensor) -> Tensor:
            return rows[0].repeat_interleave(heads // rows.shape[1], 0)

        queries = torch.stack([query[0, :, late] for query in watch.queries])
        keys = torch.stack([by_head(key) for key in watch.keys])
        factor = torch.zeros(1, heads, steps, 1) if lam is None else lam.expand(1, heads, steps, 1)
        visible = torch.ones(steps, steps, dtype=torch.bool).tril()[late]
        return cls(queries, keys, by_head(watch.values), factor[0, :, late, 0], visible)

    def logits(self) -> Tensor:
        return self.queries @ self.keys.transpose(-1, -2)

    def lambdas(self) -> dict[str, Tensor]:
        """Return lambda of the signal's output, which is 0, and of the difference, if there is one."""
        signal = {"signal": torch.zeros_like(self.lam)}
        return signal | {"difference": self.lam} if len(self.queries) == 2 else signal

    def weights(self, logits: Tensor, lam: Tensor) -> Tensor:
        maps = logits.masked_fill(~self.visible, -math.inf).softmax(-1)
        return maps[0] - lam[..., None] * maps[1] if len(maps) == 2 else maps[0]


def rounded(watch: Watch, draw: int, late: int) -> tuple[Tensor, Cached]:
    """Return the last `late` queries' logits [n, H, N, T] with rounded keys, and rounded values, both after a random
    rotation."""
    steps, logits = watch.queries[0].shape[2], []
    turn = signs(watch.keys[0].shape[-1], draw)
    for query, key in zip(watch.queries, watch.keys, strict=True):
        keys = stored((key * turn).float(), steps, HEAD_BITS, True, WINDOW, FIRST)
        turned = (query[:, :, -late:] * turn).unflatten(1, (key.shape[1], -1))
        logits.append(scores(turned, keys._replace(coded=keys.coded[-late:]), 0)[0].flatten(0, 1))
    rows = watch.values.unflatten(-1, (-1, watch.width)).transpose(2, 3)  # [1, G, w, T, d]
    turned = (rows.flatten(1, 2) * signs(watch.width, draw)).float()
    values = stored(turned, steps, HEAD_BITS, False, WINDOW, FIRST)
    return torch.stack(logits), values._replace(coded=values.coded[-late:]).grouped(*rows.shape[1:3])


def layer_errors(watch: Watch, lam: Tensor | None) -> dict[str, list[float]]:
    """Return relative square errors at HEAD_BITS of each head of a layer, over DRAWS rotations, and what the formulas
    say."""
    heads = Heads.of(watch, lam)
    exact, groups = heads.logits(), watch.values.shape[1]
    errors: dict[str, list[Tensor]] = {}
    noise, masses = [], []
    for draw in range(1, DRAWS + 1):
        logits, values = rounded(watch, draw, heads.queries.shape[2])
        read = values.coded & heads.visible
        noise.append((logits - exact).masked_fill(~read, 0))
        before, after = (x[0].masked_fill(~read, -math.inf) for x in (exact, logits))
        masses.append(after.logsumexp(-1) - before.logsumexp(-1))
        for name, lambdas in heads.lambdas().items():
            weights = heads.weights(exact, lambdas)
            out = weights @ heads.values
            errors.setdefault(f"keys {name}", []).append(heads.weights(logits, lambdas) @ heads.values - out)
            mix = mixed(weights[None].unflatten(1, (groups, -1)), values) * signs(watch.width, draw)
            errors.setdefault(f"values {name}", []).append(mix[0].flatten(-2).flatten(0, 1) - out)
    result = {"mass": torch.stack(masses).mean((0, -1))}
    result["half variance"] = (before.softmax(-1) * noise_variance(heads, read)[0]).sum(-1).mean(-1) / 2
    common = heads.values.mean(-2, keepdim=True)
    for name, lambdas in heads.lambdas().items():
        out = heads.weights(exact, lambdas) @ heads.values
        power = out.square().sum((-1, -2))  # [H]
        along = (out * common).sum(-1) / common.norm(dim=-1)
        result[f"common {name}"] = along.square().sum(-1) / power
        for part in (f"keys {name}", f"values {name}"):
            draws = torch.stack(errors[part])  # [R, H, N, e]
            result[part] = draws.square().mean(0).sum((-1, -2)) / power
            variance = draws.var(0).sum((-1, -2)) / power
            result[f"{part} variance"] = variance
            bias = draws.mean(0).square().sum((-1, -2)) / power - variance / DRAWS
            result[f"{part} bias"] = (bias / result[part]).clamp(min=0)
    if len(heads.queries) == 2:
        result["keys ratio"] = result["keys difference variance"] / result["keys signal variance"]
        result["values ratio"] = result["values difference"] / result["values signal"]
        result |= pair_errors(heads, read, torch.stack(noise), heads.keys[0].equal(heads.keys[1]))
    return {key: value.tolist() for key, value in result.items()}


def noise_variance(heads: Heads, read: Tensor) -> Tensor:
    """Return the variance of logits' noise [n, H, N, T] at HEAD_BITS; 0 for tokens that are not read as codes."""
    turned, tokens = kv_cache.rotate(heads.keys), kv_cache.OFFSET_TOKENS
    rest = turned - turned[..., tokens.start : tokens.stop, :].mean(-2, keepdim=True)
    lost = DISTORTION[HEAD_BITS] * (1 - DISTORTION[HEAD_BITS])
    variance = heads.queries.square().sum(-1, keepdim=True) * lost * rest.square().mean(-1).unsqueeze(-2)
    return variance.masked_fill(~read, 0)


def pair_errors(heads: Heads, read: Tensor, noise: Tensor, shared: bool) -> dict[str, Tensor]:
    """Return how alike both maps [H] and the noises [R, 2, H, N, T] of their logits are, and the formulas' ratios of
    the difference's error and the signal's. read: [N, T], tokens that are read as codes. shared: keys are."""
    exact = heads.logits()
    maps = exact.masked_fill(~heads.visible, -math.inf).softmax(-1)
    noise = noise - noise.mean(0)
    both, first, second = ((noise[:, i] * noise[:, j]).sum((0, -1, -2)) for i, j in ((0, 1), (0, 0), (1, 1)))
    variance = noise_variance(heads, read)
    hidden = exact.masked_fill(~heads.visible, -1e30)
    alike = cosine(*heads.queries) if shared else torch.zeros_like(heads.lam)
    lost = DISTORTION[HEAD_BITS] * torch.ones(heads.values.shape[-2], dtype=torch.float64)
    key_errors, value_errors = [], []
    for lambdas in heads.lambdas().values():
        weights = heads.weights(exact, lambdas)
        power = (weights @ heads.values).square().sum((-1, -2))
        error = expected(hidden, torch.zeros(()), variance, heads.values, lambdas, alike).variance.sum(-1)
        key_errors.append(error / power)
        value_errors.append(value_error(weights * read, heads.values, lost).sum(-1) / power)
    return {
        "keys formula": key_errors[1] / key_errors[0],
        "values formula": value_errors[1] / value_errors[0],
        "lambda": heads.lam.mean(-1),
        "cosine": cosine(*maps).mean(-1),
        "cosine of queries": alike.mean(-1),
        "correlation of errors": both / (first * second).sqrt(),
        "norm of the noise map": (maps[1].square().sum((-1, -2)) / maps[0].square().sum((-1, -2))).sqrt(),
        "error of noise logits": (second / first).sqrt(),
    }


HEAD_ROWS = {
    "lambda": "lambda",
    "cosine": "cosine of both maps",
    "norm of the noise map": "norm of the noise map / signal map",
    "cosine of queries": "cosine of both queries (0: own keys)",
    "correlation of errors": "correlation of the logits' errors",
    "error of noise logits": "error of noise logits / signal logits",
    "mass": "log of the rounded tokens' weight, change",
    "half variance": "half of their logits' error variance",
    "common signal": "square of the signal's output along the mean of values",
    "common difference": "square of the difference along it",
    "keys signal": "keys: relative error of the signal map's output",
    "keys signal bias": "of that bias",
    "keys difference": "keys: relative error of the difference",
    "keys difference bias": "of that bias",
    "keys ratio": "keys: variance, difference / signal",
    "keys formula": "formula",
    "values signal": "values: relative error of the signal map's output",
    "values difference": "values: relative error of the difference",
    "values ratio": "values: difference / signal",
    "values formula": "formula",
}


def heads_table(heads: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    lines = []
    for key, title in HEAD_ROWS.items():
        cells = []
        for parts in heads.values():
            low, middle, high = np.nanquantile(parts[key], (0.1, 0.5, 0.9)) if key in parts else (math.nan,) * 3
            cells.append(f"{middle:.3g} [{low:.3g}, {high:.3g}]" if key in parts else "")
        lines.append([title, *cells])
    return table(["median [10th, 90th percentile] of heads", *heads], lines)


# ---- a twin of the same function ------------------------------------------------------------------------------------


def set_lambda(model: Decoder, old: float, new: float) -> None:
    """Make a copied conversion subtract another share of its noise map, and compute the same function."""
    for module in attentions(model):
        lam = torch.tensor(new)
        module.lambda_of = lambda _, lam=lam: lam  # type: ignore[attr-defined]
        module.o_proj.weight.data *= (1 - old) / (1 - new)


APART = {0.2: (3,), 0.5: (2, 3, 4), 0.8: (3,)}  # bits of the conversion whose maps read keys that were rounded apart


def twin(plain: Path, differential: Path, text: Path, count: int) -> tuple[Row, dict[str, str]]:
    """Compare a plain model with its conversion at several lambdas, with one rounding of keys and with two."""
    windows = windows_of(str(text), plain, 256, count)
    reference, model = load(plain).eval(), load(differential).eval()
    rows = {f"{what} {bits}": LowBitCache(**{what: bits}) for what in ("keys", "values") for bits in BITS}
    rows |= {
        f"keys {bits}, {name} variance": LowBitCache(keys=bits, correction=correction)
        for bits in (2, 3)
        for name, correction in CORRECTIONS.items()
    }
    by_model = {
        "plain": measured(windows, reference, {title: (reference, row) for title, row in rows.items()}, "plain")
    }
    before, a_bit = 0.5, slope(by_model["plain"], "keys")
    lines = [[title, interval(s.divergence().to_dict(), shown), ""] for title, s in by_model["plain"].items()]
    for lam, widths in APART.items():
        set_lambda(model, before, lam)
        before = lam
        variants = {title: (model, rows[title]) for title in ("keys 3", "values 3") if lam == 0.5}
        variants |= {f"keys {b}, rounded apart": (model, LowBitCache(keys=b, own_rounding=True)) for b in widths}
        name = f"conversion, lambda {lam}"
        by_model[name] = measured(windows, reference, variants, name)
        for title, scores_of in by_model[name].items():
            more = more_bits(scores_of, by_model["plain"][title.split(",")[0]], a_bit)
            lines.append([f"{name}: {title}", interval(scores_of.divergence().to_dict(), shown), more])
    about = f"{describe()}. {count} windows of 256 tokens. `{command_line(__file__, sys.argv[1:])}`\n\n"
    texts = {"twin": about + table(["", "KL", "more bits than plain"], lines)}
    lines = [[title, *cells] for title, cells in variant_lines({"plain": by_model["plain"]})]
    texts["twin_variants"] = table(["", "KL, times that without"], lines)
    numbers = {kind: {title: s.kl.tolist() for title, s in f.items()} for kind, f in by_model.items()}
    return {"kl": numbers, "texts": texts}, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("simulate", "models", "twin"))
    parser.add_argument("--heads", type=int, default=64, help="random heads (default: %(default)s)")
    parser.add_argument("--plot", type=Path, help="draw the simulation there")
    parser.add_argument("--name", default="nano", help="of the models' tables in the page (default: %(default)s)")
    parser.add_argument("--models", nargs="+", default=[], metavar="KIND=FOLDER,...", help="KIND: plain, v1 or v2")
    parser.add_argument("--text", default="stdlib", help="a file, or stdlib (default: %(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--plain", type=Path, help="a plain model")
    parser.add_argument("--differential", type=Path, help="what `diffbit convert --start copy` made of it")
    parser.add_argument("--quick", action="store_true", help="few heads and windows: does it run?")
    add_outputs(parser, PAGE)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    windows = 4 if arguments.quick else arguments.windows
    if windows < WATCHED:
        parser.error(f"--windows is {windows}, wanted {WATCHED} or more")
    try:
        if arguments.part == "simulate":
            numbers, texts = simulate(2 if arguments.quick else arguments.heads, arguments.plot)
        elif arguments.part == "models":
            if not arguments.models or not all("=" in model for model in arguments.models):
                parser.error("models: --models KIND=FOLDER[,FOLDER...] is missing")
            kinds = {kind: [Path(f) for f in folders.split(",")] for kind, _, folders in
                     (model.partition("=") for model in arguments.models)}  # fmt: skip
            numbers, texts = models(arguments.name, kinds, arguments.text, arguments.length, windows)
        else:
            if None in (arguments.plain, arguments.differential) or arguments.text == "stdlib":
                parser.error("twin: wanted --plain FILE, --differential FOLDER and --text FILE")
            numbers, texts = twin(arguments.plain, arguments.differential, Path(arguments.text), windows)
    except DiffbitError as error:
        parser.error(str(error))
    for name, text in texts.items():
        print(f"\n## {name}\n\n{text}")
    write_outputs(arguments, numbers, texts)


if __name__ == "__main__":
    main()
