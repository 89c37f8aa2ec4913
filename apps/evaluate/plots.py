"""Plots of a comparison. They take its `to_dict()`, so that a JSON file can be plotted again. The i-th model has the
i-th colour in every plot and in the report's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...formats import parse_format
from ...io.drawing import POINTS, Chart, Data, Line, style, write_charts
from ...io.errors import DiffbitError
from .variants import FOLDERS

SUBJECTS = {  # what can be compared: a heading, and the label of the horizontal axis
    "weights": ("Weights", "format, scale per, bits per weight"),
    "logits": ("Attention logits", "bits per logit"),
    "probabilities": ("Attention probabilities", "bits per probability"),
    "qk": ("Queries and keys", "integers multiplied"),
    "kv": ("KV cache", "format of the cache"),
    "kv:0": ("KV cache, all tokens", "format of the cache"),
    "keys": ("Cached keys", "format of the cache"),
    "values": ("Cached values", "format of the cache"),
}
ENDS = ("value", "low", "high")
KL_FLOOR = 1e-7  # below it is noise


def plot_comparison(comparison: Data, path: str | Path) -> None:
    """Plot a row of panels for weights and for each part of attention that was compared; see `charts`. Without these,
    plot the quantized models that were given."""
    rows = [charts(comparison, what) for what in subjects(comparison)]
    if not rows and quantized(comparison):
        rows = [[quantized_chart(comparison)]]
    if not rows:
        raise DiffbitError("all models are already quantized, so there is nothing to plot; add a float one")
    write_charts(path, *rows)


def subjects(comparison: Data) -> list[str]:
    """Return what was compared, in the order of SUBJECTS."""
    return [what for what in SUBJECTS if any(result["what"] == what for result in comparison["results"])]


def quantized(comparison: Data) -> list[Data]:
    """Return the results of the quantized checkpoints and artifacts that were given."""
    return [result for result in comparison["results"] if result["what"] in FOLDERS]


def quantized_chart(comparison: Data) -> Chart:
    """Return the loss of each quantized model that was given, with its interval, against its size."""
    models = [model["name"] for model in comparison["models"]]
    floor = max(KL_FLOOR, min(result["kl"]["value"] for result in quantized(comparison)) / 3)  # of a bar that ends at 0
    lines = [
        Line("", [(r["nbytes"] / 1e6, *(r["kl"][end] for end in ENDS))], [r["name"]],
             style(models.index(r["model"])) | POINTS)
        for r in quantized(comparison)
    ]  # fmt: skip
    return Chart("KL against size", "MB", "KL from the float model, nats per token", lines, (), floor, " nats")


def order(results: Sequence[Data]) -> dict[str, float]:
    """Return {format: bits per weight, or bits} of results, most bits first."""
    size = {r["format"]: r["bits_per_weight"] if r["what"] == "weights" else r["bits"] for r in results}
    rank = {r["format"]: (r["bits"], size[r["format"]]) for r in results}
    return {name: size[name] for name in sorted(size, key=lambda name: rank[name], reverse=True)}


def charts(comparison: Data, what: str) -> list[Chart]:
    """Return the charts of weights, or of a part of attention.

    With one method: perplexity, KL and each set of needles, a line per model. With several: perplexity, a chart per
    model with a line per method.
    """
    results = [result for result in comparison["results"] if result["what"] == what]
    models, methods = (list(dict.fromkeys(r[key] for r in results)) for key in ("model", "method"))
    widths = order(results)
    formats = list(widths)
    results.sort(key=lambda result: formats.index(result["format"]))
    subject, label = SUBJECTS[what]
    ticks = [_tick(name, what, width) for name, width in widths.items()]

    def chart(
        title: str, y_label: str, unit: str, value: Callable[[Data, str], float], lines: dict[str, list[Data]],
        floor: float | None = None,
    ) -> Chart:  # fmt: skip
        """value: of a result, at one of ENDS."""
        ends = [value(result, end) for result in results for end in ENDS]
        least, most = min(ends), max(ends)
        bounds = (min(-1.0, least), max(1.0, most)) if floor is None else (max(least, floor), max(most, 100 * floor))
        shown = [
            Line(name, [(formats.index(r["format"]), *(value(r, end) for end in ENDS)) for r in rows],
                 [r["format"] for r in rows])
            for name, rows in lines.items()
        ]  # fmt: skip
        return Chart(title, label, y_label, shown, ticks, floor, unit, bounds)

    def increase(about: str, lines: dict[str, list[Data]]) -> Chart:
        title, y_label = f"{about}: increase of perplexity", "over the 16-bit model"
        return chart(title, y_label, "%", lambda r, end: 100 * (r["ratio"][end] - 1), lines, 0.01)

    if len(methods) > 1:
        return [
            increase(name, {m: [r for r in results if (r["model"], r["method"]) == (name, m)] for m in methods})
            for name in models
        ]
    by_model = {model: [r for r in results if r["model"] == model] for model in models}
    y_label = "from the 16-bit model, nats per token"
    kl = chart(f"{subject}: KL divergence", y_label, " nats", lambda r, end: r["kl"][end], by_model, KL_FLOOR)
    shown = [increase(subject, by_model), kl]
    at_16 = {r["model"]: r["retrieval"] for r in comparison["results"] if r["what"] == "none"}
    for index, setting in enumerate(comparison["needles"]):
        lines = {f"{m}, {at_16[m][index]['accuracy']['value']:.1%} at 16 bits": r for m, r in by_model.items()}
        title, y_label = "{queries} of {needles} needles", "points to 16 bits, of {length:,} tokens"

        def change(result: Data, end: str, index: int = index) -> float:
            return 100 * float(result["retrieval"][index]["change"][end])

        shown.append(
            chart(f"{subject}: {title.format(**setting)}", y_label.format(**setting), " points", change, lines)
        )
    return shown


def _tick(name: str, what: str, width: float) -> str:
    """Return a format's tick label; for weights with the group that shares a scale and the bits per weight."""
    if what != "weights":
        return name.removesuffix("-bit")
    number, _, group = name.partition("_")
    if not group:  # the name does not say what shares a scale; the format does
        rows, groups = parse_format(name).scale_shape((2, 256))
        group = "tensor" if rows == 1 else "row" if groups == 1 else f"g{256 // groups}"
    return f"{number}\n{group.replace('_', ' ')}\n{width:.2f}"
