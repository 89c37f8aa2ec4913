"""One page that shows what was found: report.html, complete in one file, without scripts and without network.

It takes plain dictionaries, as the commands print them with --json, and shows those it is given:

    training       {model: {"tokens", "loss", ...}}                     any names; `diffbit train`
    outliers       OutlierReport.to_dict() of each model                `diffbit outliers`
    comparison     Comparison.to_dict()                                 `diffbit compare`
    quantization   {title: Report.to_dict()}                            `diffbit quantize`
    qat            {model: qat.read_run()}                              `diffbit train --qat`
    artifacts      {"name", "format", "bytes", "source_bytes", "parts"} sizes; source_bytes: at 16 bits
    bench          rows of runtime.bench                                `diffbit bench`
    verification   {"artifact", "passed", "checks", ["checkpoint"]}     `diffbit verify`
    samples        {"model", "prompt", "text", ["settings"]}            `diffbit run`

Everything that comes from outside is escaped. Colours follow the models' order in `comparison`, else in `outliers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from importlib import metadata
from pathlib import Path
from platform import machine, python_version, system
from typing import Any

from .. import files
from ..progress import track
from . import plots, style
from .page import CSS

Data = Mapping[str, Any]
RANKS = ("1", "2", "3", "10", "100")
PAPER = {  # Table 5 of arXiv 2410.05258: top-1, 2, 3, 10, 100, median
    "attention_logits": {
        "Transformer 3B, published": (318.0, 308.2, 304.9, 284.7, 251.5, 5.4),
        "DIFF 3B, published": (38.8, 38.8, 37.3, 32.0, 27.4, 3.3),
    },
    "hidden_states": {
        "Transformer 3B, published": (3608.6, 3607.4, 3603.6, 3552.1, 2448.2, 0.6),
        "DIFF 3B, published": (1688.2, 1672.5, 1672.1, 1624.3, 740.9, 1.2),
    },
}
MENU = {  # what is too long for the line of links
    "Activation outliers": "Outliers",
    "Accuracy against bit-width": "Accuracy",
    "Trained at low bits": "Training",
    "Error of each layer": "Layers",
    "How this was made": "Provenance",
}
PACKAGES = ("torch", "numpy", "onnx", "onnxruntime", "tokenizers", "matplotlib")


@dataclass(frozen=True)
class ReportData:
    """What a report shows; see the module's docstring. What is empty is left out."""

    title: str = "Low-bit comparison"
    comparison: Data | None = None
    outliers: Sequence[Data] = ()
    training: Mapping[str, Data] = field(default_factory=dict)
    quantization: Mapping[str, Data] = field(default_factory=dict)
    qat: Mapping[str, Data] = field(default_factory=dict)
    artifacts: Sequence[Data] = ()
    bench: Sequence[Data] = ()
    verification: Sequence[Data] = ()
    samples: Sequence[Data] = ()
    commands: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def versions() -> dict[str, str]:
    """Of Python, the system and the packages that the numbers depend on."""
    found = {"python": python_version(), "system": f"{system()} {machine()}"}
    for package in ("diffbit", *PACKAGES):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_report(data: ReportData, path: str | Path) -> Path:
    """Write the page; its path."""
    path = Path(path)
    text = render(data)
    with files.write_atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def render(data: ReportData) -> str:
    """The page as text."""
    builders = {
        "Findings": _findings,
        "Models": _models,
        "Activation outliers": _outliers,
        "Accuracy against bit-width": _accuracy,
        "Trained at low bits": _qat,
        "Error of each layer": _layers,
        "Artifacts": _artifacts,
        "Verification": _verification,
        "Samples": _samples,
        "How this was made": _provenance,
    }
    sections = {title: builder(data) for title, builder in track(list(builders.items()), "writing the report")}
    sections = {title: body for title, body in sections.items() if body}
    menu = "".join(f'<li><a href="#{_anchor(title)}">{escape(MENU.get(title, title))}</a></li>' for title in sections)
    body = "".join(
        f'<section id="{_anchor(title)}" aria-labelledby="{_anchor(title)}-h">'
        f'<h2 id="{_anchor(title)}-h">{escape(title)}</h2>{content}</section>'
        for title, content in sections.items()
    )
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    release = f" {escape(data.versions['diffbit'])}" if "diffbit" in data.versions else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="generator" content="diffbit"><meta name="color-scheme" content="light">'
        f"<title>{escape(data.title)}</title><style>{CSS}</style></head><body>"
        f'<a class="skip" href="#main">Skip to the content</a>'
        f'<header><div class="wrap"><p class="kicker">diffbit{release}</p><h1>{escape(data.title)}</h1>'
        f'<p class="sub">{_subtitle(data)}</p></div></header>'
        f'<nav aria-label="Sections"><div class="wrap"><ul>{menu}</ul></div></nav>'
        f'<main id="main" class="wrap">{body}</main>'
        f'<footer><div class="wrap">Made {made} by diffbit{release}. One file; nothing is loaded from elsewhere.'
        "</div></footer></body></html>\n"
    )


# -- sections -----------------------------------------------------------------------------------------------------


def _subtitle(data: ReportData) -> str:
    names = _names(data)
    parts = [", ".join(names)] if names else []
    if data.comparison:
        text = data.comparison["text"]
        parts.append(f"{text['scored_tokens']:,} tokens of {text['source'] or 'held-out text'}")
    return " · ".join(escape(part) for part in parts)


def _findings(data: ReportData) -> str:
    """The numbers one would tell a colleague: outliers, 4 bits, size, whether the artifacts hold."""
    cards = [*_outlier_cards(data), *_contrast_cards(data), *_size_cards(data), *_verified_cards(data)]
    return f'<ul class="cards">{"".join(cards)}</ul>' if cards else ""


def _outlier_cards(data: ReportData) -> list[str]:
    cards = []
    if len(data.outliers) == 2:
        first, second = data.outliers
        for site, what in (("hidden_states", "hidden state"), ("attention_logits", "attention logit")):
            a, b = first[site]["top"]["1"], second[site]["top"]["1"]
            (small, low), (large, high) = sorted(((first["model"], a), (second["model"], b)), key=lambda pair: pair[1])
            factor = f"{high / low:.2g}×" if low else "∞"
            text = f"Largest {what}: {_bold(large)} {_number(high)}, {_bold(small)} {_number(low)}."
            cards.append(_card(factor, text))
    return cards


def _contrast_cards(data: ReportData) -> list[str]:
    """At the width nearest to 4 bits, by the method that loses least there: who loses more, and can it be told?"""
    if not data.comparison:
        return []
    cards = []
    for what in plots.subjects(data.comparison):
        results = [r for r in data.comparison["results"] if r["what"] == what]
        width = min(results, key=lambda r: (abs(r["bits"] - 4), r["bits_per_weight"]))["format"]
        results = [r for r in results if r["format"] == width]
        methods = dict.fromkeys(r["method"] for r in results)
        losses = {m: sum(math.log(r["ratio"]["value"]) for r in results if r["method"] == m) for m in methods}
        best = min(losses, key=lambda method: losses[method])
        own = {r["model"]: r for r in results if r["method"] == best}
        label = f"{escape(width)} {plots.NOUNS[what]}"
        if len(methods) > 1:
            label += f" by {escape(best)}, the best of {len(methods)} methods,"
        for contrast in data.comparison["contrasts"]:
            if (contrast["what"], contrast["format"], contrast["method"]) != (what, width, best):
                continue
            pair = [own[contrast["against"]], own[contrast["model"]]]
            if contrast["difference"]["value"] < 0:
                pair.reverse()
            less, more = pair
            loss = " and ".join(f"{_bold(r['model'])} {_increase(r['ratio'])}" for r in (less, more))
            clear = contrast["difference"]["low"] * contrast["difference"]["high"] > 0
            verdict = (
                f"{_bold(less['model'])} loses less; the paired interval excludes zero."
                if clear
                else "The paired interval includes zero: this text does not tell them apart."
            )
            headline = f"{_increase(less['ratio'])} vs {_increase(more['ratio'])}"
            cards.append(_card(headline, f"Perplexity at {label}: {loss}. {verdict}"))
        if len(own) == 1:
            result = next(iter(own.values()))
            text = f"Perplexity of {_bold(result['model'])} at {label}, against 16 bits."
            cards.append(_card(_increase(result["ratio"]), text))
    return cards


def _size_cards(data: ReportData) -> list[str]:
    known = [entry for entry in data.artifacts if entry.get("source_bytes")]
    if not known:
        return []
    best = min(known, key=lambda entry: entry["bytes"] / entry["source_bytes"])
    text = f"{_bold(best['name'])} is {_bytes(best['bytes'])}; at 16 bits it would be {_bytes(best['source_bytes'])}."
    return [_card(f"{best['source_bytes'] / best['bytes']:.1f}× smaller", text)]


def _verified_cards(data: ReportData) -> list[str]:
    if not data.verification:
        return []
    passed = sum(bool(entry["passed"]) for entry in data.verification)
    text = "artifacts compute on this machine what was recorded when they were exported."
    return [_card(f"{passed} of {len(data.verification)}", text)]


def _models(data: ReportData) -> str:
    infos = {info["name"]: info for info in data.comparison["models"]} if data.comparison else {}
    for name in _names(data):
        infos.setdefault(name, {})
    extra = list(dict.fromkeys(key for entry in data.training.values() for key in entry))
    head = [
        "Model",
        "Attention",
        "Parameters",
        "Layers",
        "Width",
        *(key.replace("_", " ").capitalize() for key in extra),
        "SHA-256",
    ]
    body = []
    for name, info in infos.items():
        training = data.training.get(name, {})
        sha256 = str(info.get("sha256", ""))
        body.append(
            [
                _swatch(data, name),
                escape(str(info.get("attention", "–"))),
                _integer(info.get("parameters")),
                _integer(info.get("layers")),
                _integer(info.get("hidden_size")),
                *(_value(training.get(key)) for key in extra),
                f'<code title="{escape(sha256)}">{escape(sha256[:12])}</code>' if sha256 else "–",
            ]
        )
    html = _table("The models", head, body, left=(0, 1, len(head) - 1)) if body else ""
    if data.comparison:
        text = data.comparison["text"]
        html += _note(
            f"Evaluated on {text['windows']:,} windows of {text['length']:,} tokens from "
            f"<code>{escape(str(text['source']))}</code>; {text['scored_tokens']:,} tokens scored, the same for every "
            f'model and every width. SHA-256 of the text <code title="{escape(text["sha256"])}">'
            f"{escape(text['sha256'][:12])}</code>."
        )
    return html


def _outliers(data: ReportData) -> str:
    if not data.outliers:
        return ""
    html = _lead(
        "A scale that reaches the largest value leaves few steps for the typical one. Of |x| over all layers: the "
        "largest values and the median. Attention logits are scaled and before the softmax, where a token may look; "
        "hidden states are what each decoder layer returns."
    )
    head = ["Model", *(f"Top-{rank}" for rank in RANKS), "Median", "Max / median", "Kurtosis", "Largest at"]
    for site, title in plots.SITES.items():
        body = []
        for report in data.outliers:
            entry = report[site]
            place, unit = entry["place"], "channel" if site == "hidden_states" else "head"
            body.append(
                [
                    _swatch(data, report["model"]),
                    *(_number(entry["top"][rank]) for rank in RANKS),
                    _number(entry["median"]),
                    _number(entry["ratio"]),
                    _number(entry["kurtosis"]),
                    f'<span class="place">layer {_integer(entry["layer"])}, {unit} {place["unit"]}, '
                    f"token {place['position']}</span>",
                ]
            )
        for name, values in PAPER[site].items():
            cells = [f'<span class="quiet">{_number(value)}</span>' for value in (*values, values[0] / values[-1])]
            body.append([f'<span class="quiet">{escape(name)}</span>', *cells, "", ""])
        html += _table(title, head, body, left=(0, len(head) - 1))
    figures = []
    for site, title in plots.SITES.items():
        with style.panels() as (figure, axes):
            plots.layers(axes[0], data.outliers, site)
            figures.append(
                _figure(style.inline(figure, f"outliers-{site}"), f"{title} by layer", _layer_words(data, site))
            )
    html += f'<div class="figures">{"".join(figures)}</div>'
    rows = []
    for report in data.outliers:
        for index, hidden in enumerate(report["hidden_states"]["layers"]):
            logits = report["attention_logits"]["layers"][index]
            rows.append(
                [
                    _swatch(data, report["model"]),
                    str(index),
                    *(_number(hidden[key]) for key in ("median", "kurtosis")),
                    _number(hidden["top"]["1"]),
                    str(hidden["place"]["unit"]),
                    *(_number(logits[key]) for key in ("median", "kurtosis")),
                    _number(logits["top"]["1"]),
                    str(logits["place"]["unit"]),
                ]
            )
    kinds = ["median", "kurtosis", "max", "channel"], ["median", "kurtosis", "max", "head"]
    head = ["Model", "Layer", *(f"Hidden: {kind}" for kind in kinds[0]), *(f"Logits: {kind}" for kind in kinds[1])]
    html += _details("Every layer, in numbers", _table("Per layer", head, rows, left=(0,)))
    bound = max(report["median_relative_error"] for report in data.outliers)
    tokens = " or ".join(dict.fromkeys(f"{report['tokens']:,}" for report in data.outliers))
    html += _note(
        f"Measured on {tokens} tokens. Largest values are exact; medians are within {100 * bound:.2g}%; kurtosis is 3 "
        "for a normal distribution. A differential model has two sub-heads a head, 2i the signal and 2i + 1 the noise. "
        "Published: Table 5 of arXiv 2410.05258, models of 3 billion parameters; larger models have larger outliers."
    )
    return html


def _layer_words(data: ReportData, site: str) -> str:
    words = []
    for report in data.outliers:
        largest = [layer["top"]["1"] for layer in report[site]["layers"]]
        words.append(
            f"{report['model']}: largest value {_number(largest[0])} in the first layer, {_number(largest[-1])} in the "
            f"last, {_number(max(largest))} at most"
        )
    return "; ".join(words) + "."


def _accuracy(data: ReportData) -> str:
    if not data.comparison:
        return ""
    comparison = data.comparison
    percent = f"{comparison['confidence']:.0%}"
    html = _lead(
        "Each model is rounded from its float checkpoint and held against it on the same text, token by token: the "
        f"increase of perplexity, the KL divergence and how often the most likely token stays the same. In brackets "
        f"and as bands: {percent} confidence intervals of the paired difference."
    )
    for what in plots.subjects(comparison):
        html += f"<h3>{escape(plots.SUBJECTS[what])}</h3>"
        figures = []
        for number, chart in enumerate(plots.charts(comparison, what)):
            with style.panels() as (figure, axes):
                plots.draw(axes[0], chart)
                svg = style.inline(figure, f"curve-{what}-{number}")
                figures.append(_figure(svg, f"{chart.title} against bit-width", _chart_words(chart)))
        html += f'<div class="figures">{"".join(figures)}</div>{_result_table(data, what)}{_contrast_table(data, what)}'
        html += _cost_table(data, what)
    if comparison["needles"]:
        asked = comparison["needles"][0]
        html += _note(
            f"Needles: {asked['rows']:,} rows a setting, text from <code>{escape(str(asked['source']))}</code> "
            "with key-value pairs laid into it. Some are asked for at its end; a query is answered when every token of "
            "its value is the most likely one. Points: the paired change to the 16-bit model, over rows."
        )
    for refusal in comparison["refused"]:
        html += _note(
            f"Left out, {escape(refusal['model'])} by {_bold(refusal['method'])}: {escape(refusal['reason'])}."
        )
    html += _note(
        "Intervals are over windows of text (paired t-intervals of token-weighted means): they say what another sample "
        "of such text would change, not what another training run would. “16” is the checkpoint itself, computed in "
        "fp32 and counted as two bytes a weight. Bits a weight include the scales, over the layers that are rounded; "
        f"sizes are of whole models, with what is not rounded at two bytes. {_method_words(comparison)}"
    )
    return html


def _method_words(comparison: Data) -> str:
    methods = _methods(comparison, "weights")
    if not methods:
        return ""
    words = f"Weights rounded by {escape(', '.join(methods))}{' (rtn: to nearest)' if 'rtn' in methods else ''}."
    if len(methods) > 1:
        words += " Recovered: the share of rtn's loss (nats a token) that a method does not have, Fieller's interval."
    if text := comparison["calibration"]:
        words += (
            f" Methods that calibrate did so on {text['windows']:,} other windows of {text['length']:,} tokens from "
            f'<code>{escape(str(text["source"]))}</code>, SHA-256 <code title="{escape(text["sha256"])}">'
            f"{escape(text['sha256'][:12])}</code>."
        )
    return words


def _methods(comparison: Data, what: str) -> list[str]:
    return list(dict.fromkeys(r["method"] for r in comparison["results"] if r["what"] == what))


def _chart_words(chart: plots.Chart) -> str:
    words = []
    for label, results in chart.lines.items():
        values = [f"{r['format']} {_told(r, chart)}" for r in results]
        words.append(f"{label}: {', '.join(values)}")
    return "; ".join(words) + "."


def _told(result: Data, chart: plots.Chart) -> str:
    if chart.metric == "found":
        return _change(result["retrieval"][chart.setting]["change"]["value"])
    return _increase(result["ratio"]) if chart.metric == "increase" else _number(result["kl"]["value"])


def _change(share: float) -> str:
    """Of queries answered, in points."""
    return f"{100 * share:+z.1f}".replace("-", "−", 1)


def _result_table(data: ReportData, what: str) -> str:
    assert data.comparison
    results = data.comparison["results"]
    several = len(_methods(data.comparison, what)) > 1
    head = ["Format", "Model", *(["Method"] if several else []), "Perplexity", "Increase", "KL, nats", "Same top token"]
    left: tuple[int, ...] = (0, 1, 2) if several else (0, 1)
    if several:
        head.insert(5, "Recovered")
    if what == "weights":
        head += ["Bits a weight", "Size"]
    elif what != "logits":
        head += ["KV cache a token"]
    for asked in data.comparison["needles"]:
        head += [f"{asked['queries']} of {asked['needles']} needles in {asked['length']:,}", "Points"]
    rows = []
    for name in ["16", *plots.order([r for r in results if r["what"] == what])]:
        group = [r for r in results if r["format"] == name and r["what"] in (what, "none")]
        for index, r in enumerate(group):
            row = [
                f"<strong>{escape(name)}</strong>" if index == 0 else "",
                _swatch(data, r["model"]),
                *([escape("–" if r["method"] == "none" else r["method"])] if several else []),
                _interval(r["perplexity"], _number),
                "–" if name == "16" else _interval(r["ratio"], lambda x: _percent(x - 1, "+")),
                *(["–" if r["recovered"] is None else _interval(r["recovered"], _percent)] if several else []),
                "–" if name == "16" else _interval(r["kl"], _number),
                "–" if name == "16" else _interval(r["agreement"], _percent),
            ]
            if what == "weights":
                row += [f"{r['bits_per_weight']:.2f}", _bytes(r["nbytes"])]
            elif what != "logits":
                row += [_bytes(r["cache_bytes"])]
            for one in r["retrieval"]:
                row += [_percent(one["accuracy"]["value"]), "–" if name == "16" else _interval(one["change"], _change)]
            rows.append(row)
    return _table(f"{plots.SUBJECTS[what]}: every width", head, rows, left=left, grouped=True)


def _cost_table(data: ReportData, what: str) -> str:
    """What a decoded token moves and computes, by format; a method changes it only where it unties the head."""
    assert data.comparison
    if what == "logits":  # rounded and computed in float
        return ""
    results = [r for r in data.comparison["results"] if r["what"] in (what, "none")]
    whole = {r["model"]: r["cost"] for r in results if r["what"] == "none"}
    rows = []
    for name in ["16", *plots.order([r for r in results if r["what"] == what])]:
        costs = {r["model"]: r["cost"] for r in reversed(results) if r["format"] == name}  # by the first method
        for index, model in enumerate(m for m in whole if m in costs):
            cost, exact = costs[model], whole[model]
            row = [
                f"<strong>{escape(name)}</strong>" if index == 0 else "",
                _swatch(data, model),
                _bytes(cost["weight_bytes"]),
                _bytes(cost["cache_bytes"]),
                *(_millions(cost[kind]) for kind in ("ternary", "integer", "floating", "other")),
            ]
            for node in ("7nm", "45nm"):
                row.append(f"{_number(cost['arithmetic_pj'][node] / 1e6)} µJ")
            row.append(f"{_number(cost['memory_pj'] / 1e6)} µJ")
            energy, before = (c["arithmetic_pj"]["7nm"] + c["memory_pj"] for c in (cost, exact))
            rows.append([*row, _percent(energy / before)])
    head = ["Format", "Model", "Weights read", "Cache read, written", "Ternary additions", "Integer multiply-adds"]
    head += ["Float multiply-adds", "Element by element", "Arithmetic, 7 nm", "45 nm", "Memory", "Energy, of 16 bits"]
    title = f"{plots.SUBJECTS[what]}: what a decoded token costs"
    note = _note(
        f"One token at a context of {next(iter(whole.values()))['context']:,} tokens, counted from the model's shapes. "
        "Energy is an estimate: additions and multiplications as published for 45 nm (Horowitz, ISSCC 2014) and 7 nm "
        "(arXiv 2112.00133, the table behind BitNet b1.58), memory at 1.3 nJ for 64 bits of DRAM; the last column is "
        "arithmetic at 7 nm and memory. Activations stay in caches and are not counted."
    )
    table = _table(title, head, rows, left=(0, 1), grouped=True)
    return _details("What does a token cost? Bytes, operations, energy", table + note)


def _contrast_table(data: ReportData, what: str) -> str:
    assert data.comparison
    contrasts = [c for c in data.comparison["contrasts"] if c["what"] == what]
    several = len(_methods(data.comparison, what)) > 1
    if not contrasts:
        return ""
    rows = []
    for c in contrasts:
        difference = c["difference"]
        clear = difference["low"] * difference["high"] > 0
        less, more = (c["against"], c["model"]) if difference["value"] > 0 else (c["model"], c["against"])
        verdict = f"{_bold(less)} loses less than {_bold(more)}" if clear else "not told apart"
        pair = f"{escape(c['model'])} − {escape(c['against'])}"
        method = [escape(c["method"])] if several else []
        found = [_interval(estimate, _change) for estimate in c["retrieval"]]
        row = [f"<strong>{escape(c['format'])}</strong>", *method, pair, _interval(difference, _signed), verdict]
        rows.append([*row, *found])
    head = ["Format", *(["Method"] if several else []), "Models", "Difference of loss, nats a token"]
    left = (0, 1, 2, 4) if several else (0, 1, 3)
    title = f"{plots.SUBJECTS[what]}: which model loses more?"
    asked = [f"{one['queries']} of {one['needles']} in {one['length']:,}, points" for one in data.comparison["needles"]]
    table = _table(title, [*head, "With this confidence", *asked], rows, left=left)
    return _details("Does one model lose more than the other? Paired differences", table, opened=True)


def _qat(data: ReportData) -> str:
    if not data.qat:
        return ""
    html = _lead(
        "Models whose float weights were trained through their own rounding. A weight that lies near a threshold may "
        "still change its code; the share of codes that do, step by step, says whether training has settled."
    )
    figures, rows = [], []
    for index, (name, run) in enumerate(data.qat.items()):
        words = []
        for kind, found in run["kinds"].items():
            shares = [_percent(share) for share in found["shares"]] if len(run["values"]) == 3 else []
            words.append(f"{kind} {' / '.join(shares)}" if shares else kind)
            errors = [r["weight_error"] for r in run["weights"] if r["name"].split(".")[-2] == kind]
            error = _percent(sum(errors) / len(errors))
            zero = found["shares"][min(range(len(run["values"])), key=lambda code: abs(run["values"][code]))]
            rows.append([escape(name), f"<code>{escape(kind)}</code>", escape(run["format"]), _percent(zero), error])
        title = f"{name}: float weights over their scales"
        told = f"Shares of -1 / 0 / +1: {', '.join(words)}." if len(run["values"]) == 3 else f"{', '.join(words)}."
        with style.panels() as (figure, axes):
            plots.distribution(axes[0], run)
            axes[0].set_title(f"{name}: float weights behind {run['format']} codes")
            figures.append(_figure(style.inline(figure, f"weights-{index}"), title, told))
    for what, title in (("flips", "Codes that move in a step"), ("zeros", "Codes that are 0")):
        with style.panels() as (figure, axes):
            plots.movement(axes[0], data.qat, what)
            ends = [
                f"{name}: {_percent(run[what][0])} first, {_percent(run[what][-1])} last"
                for name, run in data.qat.items()
            ]
            figures.append(_figure(style.inline(figure, f"movement-{what}"), title, f"{'; '.join(ends)}."))
    head = ["Model", "Layers", "Format", "Codes that are 0", "Weight error, mean"]
    table = _table("Trained at low bits: kinds of layers", head, rows, left=(0, 1, 2))
    return f'{html}<div class="figures">{"".join(figures)}</div>{_details("Kinds of layers, in numbers", table)}'


def _layers(data: ReportData) -> str:
    figures, tables = [], []
    layers = {
        title: [entry for entry in report["weights"] if entry["name"].startswith("model.layers.")]
        for title, report in (*data.quantization.items(), *data.qat.items())
    }
    layers = {title: weights for title, weights in layers.items() if weights}
    measured = all(entry["output_error"] is not None for weights in layers.values() for entry in weights)
    value = "output_error" if measured else "weight_error"
    what = "relative error of outputs" if measured else "relative error of weights"
    largest = max((entry[value] for weights in layers.values() for entry in weights), default=0.0)
    for index, (title, weights) in enumerate(layers.items()):
        with style.panels() as (figure, axes):
            plots.errors(axes[0], weights, title, value, largest)
            worst = max(weights, key=lambda entry: entry[value])
            words = f"{title}, {what}: worst {worst['name']} at {_percent(worst[value])}."
            figures.append(_figure(style.inline(figure, f"errors-{index}"), f"{title}: {what}, percent", words))
        rows = [
            [
                f"<code>{escape(entry['name'])}</code>",
                escape(entry["format"]),
                _percent(entry["weight_error"]),
                "–" if entry["output_error"] is None else _percent(entry["output_error"]),
                f"{entry['bits_per_weight']:.2f}",
            ]
            for entry in sorted(weights, key=lambda entry: -entry[value])
        ]
        head = ["Layer", "Format", "Weight error", "Output error", "Bits a weight"]
        tables.append(_details(f"{title}: every layer, worst first", _table(title, head, rows, left=(0, 1))))
    if not figures:
        return ""
    for index, (title, report) in enumerate(data.quantization.items()):
        if "mixed" in report:
            figures += _plan_figures(report["mixed"], title, f"plan-{index}")
    lead = _lead(
        "Where the error arises: the norm of the difference over the norm of the original, of each layer's output on "
        "calibration text where that was measured, else of its weights. One scale of colour for all."
    )
    return f'{lead}<div class="figures">{"".join(figures)}</div>{"".join(tables)}'


def _plan_figures(plan: Data, title: str, prefix: str) -> list[str]:
    """Mixed precision: what each budget would lose, and the bits of each layer."""
    chosen = plan["rounds"][plan["chosen"]]
    most = max(plan["layers"], key=lambda layer: layer["losses"][layer["format"]])
    words = (
        f"{title}: {plan['bits_per_weight']:.2f} bits a weight lose {_number(chosen['measured'])} nats a token of "
        f"calibration text, {_number(chosen['predicted'])} predicted."
    )
    found = []
    with style.panels() as (figure, axes):
        plots.frontier(axes[0], plan)
        found.append(_figure(style.inline(figure, f"{prefix}-loss"), f"{title}: loss against size", words))
    with style.panels() as (figure, axes):
        plots.bits(axes[0], plan["layers"])
        words = f"{title}: bits of each layer. {most['name']} pays most, as {most['format']}."
        found.append(_figure(style.inline(figure, f"{prefix}-bits"), f"{title}: bits a weight", words))
    return found


def _artifacts(data: ReportData) -> str:
    html = ""
    if data.artifacts:
        most = max(max(entry["bytes"], entry.get("source_bytes") or 0) for entry in data.artifacts)
        rows = []
        for entry in data.artifacts:
            share = 100 * entry["bytes"] / most
            source = entry.get("source_bytes")
            rows.append(
                [
                    f"<strong>{escape(str(entry['name']))}</strong>",
                    escape(str(entry.get("format") or "–")),
                    f'<span class="bar" style="--share:{share:.1f}%"></span>{_bytes(entry["bytes"])}',
                    _bytes(source) if source else "–",
                    f"{source / entry['bytes']:.2f}×" if source else "–",
                ]
            )
        head = ["Artifact", "Format", "Size on disk", "At 16 bits", "Smaller by"]
        html += _table("Sizes on disk, tokenizer and graph included", head, rows, left=(0, 1))
        html += "".join(_parts(entry) for entry in data.artifacts if entry.get("parts"))
    if data.bench:
        head = ["Artifact", "Device", "Threads", "Prefill, tokens/s", "Decode, tokens/s", "First token", "Peak memory"]
        head.append("KV cache of 1000 tokens")
        rows = [
            [
                f"<strong>{escape(str(row['artifact']))}</strong>",
                escape(str(row["device"])),
                _value(row.get("threads")),
                _number(row.get("prefill_tokens_per_s")),
                _number(row.get("decode_tokens_per_s")),
                f"{1000 * row['time_to_first_token_s']:,.3g} ms",
                _bytes(row["peak_memory_bytes"]) if row.get("peak_memory_bytes") else "–",
                _bytes(row["kv_bytes_per_1k_tokens"]) if row.get("kv_bytes_per_1k_tokens") else "–",
            ]
            for row in data.bench
        ]
        html += _table("Speed on this machine", head, rows, left=(0, 1))
    return html


def _parts(entry: Data) -> str:
    rows = [
        [
            escape(str(part["name"])),
            f"{part['bytes']:,}",
            _percent(part["bytes"] / entry["bytes"]),
            _integer(part["weights"]),
            f"{8 * part['bytes'] / part['weights']:.2f}" if part["weights"] else "–",
        ]
        for part in entry["parts"]
    ]
    title = f"What {entry['name']} is made of"
    return _details(title, _table(title, ["Part", "Bytes", "Share", "Numbers", "Bits each"], rows))


def _verification(data: ReportData) -> str:
    html = ""
    for entry in data.verification:
        rows = [
            [
                escape(str(check["check"])),
                _mark(check["result"] == "ok"),
                f'<span class="break">{escape(str(check["detail"]))}</span>',
            ]
            for check in entry["checks"]
        ]
        against = entry.get("checkpoint")
        if against:
            details = ", ".join(
                f"{key.replace('_', ' ')} {_plain(value)}" for key, value in against.items() if key != "passed"
            )
            rows.append(["against the checkpoint", _mark(bool(against["passed"])), escape(details)])
        title = f"{Path(str(entry['artifact'])).name} on {entry.get('device', 'cpu')}"
        html += f"<h3>{_mark(bool(entry['passed']))} {escape(title)}</h3>"
        table = _table(title, ["Check", "Result", "Detail"], rows, left=(0, 1, 2))
        html += _details("Checks", table, opened=not entry["passed"])
    return html


def _samples(data: ReportData) -> str:
    blocks = []
    for sample in data.samples:
        settings = f'<span class="quiet">{escape(str(sample["settings"]))}</span>' if sample.get("settings") else ""
        blocks.append(
            f'<figure class="sample"><figcaption>{_swatch(data, str(sample["model"]))} {settings}</figcaption>'
            f"<pre><b>{escape(str(sample['prompt']))}</b>{escape(str(sample['text']))}</pre></figure>"
        )
    if not blocks:
        return ""
    return _lead("The prompt in bold; what follows was generated by the artifacts on ONNX Runtime.") + (
        f'<div class="samples">{"".join(blocks)}</div>'
    )


def _provenance(data: ReportData) -> str:
    html = ""
    if data.commands:
        commands = "\n".join(escape(command) for command in data.commands)
        html += f'<h3>Commands</h3><pre class="commands">{commands}</pre>'
    if data.versions:
        pairs = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(str(v))}</dd></div>" for k, v in data.versions.items())
        html += f'<h3>Versions</h3><dl class="versions">{pairs}</dl>'
    return html


# -- pieces -------------------------------------------------------------------------------------------------------


def _names(data: ReportData) -> list[str]:
    """The models in the order that gives them their colours."""
    names = [info["name"] for info in data.comparison["models"]] if data.comparison else []
    names += [report["model"] for report in data.outliers] + list(data.training)
    return list(dict.fromkeys(names))


def _swatch(data: ReportData, name: str) -> str:
    """A model's name, with its colour beside it where it has one."""
    names = _names(data)
    if name not in names:
        return escape(name)
    color = style.COLORS[names.index(name) % len(style.COLORS)]
    return f'<span class="model"><i style="background:{color}"></i>{escape(name)}</span>'


def _table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,), grouped: bool = False
) -> str:
    """A table of cells that are HTML already; columns in `left` are text, the others numbers."""
    kind = ['class="t"' if column in left else "" for column in range(len(head))]
    top = "".join(f'<th scope="col" {k}>{escape(name)}</th>' for k, name in zip(kind, head, strict=True))
    body = ""
    for row in rows:
        first = ' class="group"' if grouped and row[0] else ""
        body += f"<tr{first}>" + "".join(f"<td {k}>{cell}</td>" for k, cell in zip(kind, row, strict=True)) + "</tr>"
    # tabindex: a table wider than the screen can be scrolled by keyboard
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _figure(svg: str, title: str, words: str) -> str:
    return f'<figure role="img" aria-label="{escape(title)}. {escape(words)}">{svg}</figure>'


def _card(headline: str, text: str) -> str:
    return f"<li><strong>{headline}</strong><p>{text}</p></li>"


def _details(title: str, content: str, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>{content}</details>"


def _lead(text: str) -> str:
    return f'<p class="lead">{escape(text)}</p>'


def _note(html: str) -> str:
    return f'<p class="note">{html}</p>'


def _mark(passed: bool) -> str:
    return '<span class="ok">✓ ok</span>' if passed else '<span class="bad">✗ failed</span>'


def _bold(text: str) -> str:
    return f"<b>{escape(str(text))}</b>"


def _anchor(title: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in title.lower())


def _interval(estimate: Data, show: Any) -> str:
    value, low, high = (show(estimate[end]) for end in ("value", "low", "high"))
    if low == high:
        return str(value)
    return f'{value} <span class="ci">[{low.removesuffix("%")}, {high}]</span>'


def _increase(ratio: Data) -> str:
    return _percent(ratio["value"] - 1, "+")


def _percent(share: float, sign: str = "") -> str:
    """0.0212 -> 2.12%; the larger, the fewer decimals."""
    digits = 2 if abs(share) < 0.1 else 1 if abs(share) < 10 else 0
    return f"{100 * share:{sign}z,.{digits}f}%".replace("-", "−")  # z: no negative zero


def _signed(value: float) -> str:
    return f"{value:+.3g}".replace("-", "−", 1)


def _number(value: float | None) -> str:
    """Three to four digits that matter, thousands with commas."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if abs(value) < 100:
        return f"{value:#.3g}"
    return f"{value:,.1f}" if abs(value) < 10_000 else f"{value:,.0f}"


def _millions(count: int) -> str:
    return "–" if not count else f"{_number(count / 1e6)} M"


def _integer(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _value(value: Any) -> str:
    """A cell of unknown kind."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return escape(str(value))
    return _integer(value) if isinstance(value, int) else _number(value)


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    raise AssertionError
