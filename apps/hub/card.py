"""The model card, the README.md of a repository on the Hugging Face Hub, written from the model's own files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...io.errors import DiffbitError
from ...io.files import read_json
from ...version import __version__

ATTENTION = {
    "diff_v1": "differential attention, version 1 (arXiv 2410.05258)",
    "diff_v2": "differential attention, version 2",
    "softmax": "softmax attention",
}
PARTS = ("weights", "embedding", "head", "activations")  # of a scheme, beside attention and overrides


@dataclass(frozen=True)
class Card:
    """The content of a card. model: ModelConfig.to_dict(); scheme: None for a float model; files: bytes by name; chat:
    whether the model has a chat template; results: the comparison.json of `diffbit compare -o`."""

    repo: str
    artifact: bool
    model: Mapping[str, Any]
    scheme: Mapping[str, Any] | None
    method: str | None
    calibration: Mapping[str, Any] | None
    files: Mapping[str, int]
    chat: bool
    base_model: str | None = None
    license: str | None = None
    results: Mapping[str, Any] | None = None

    def text(self) -> str:
        """Return the card in Markdown, with the front matter that the hub reads (a YAML object, written as JSON
        values)."""
        front = {
            "license": self.license,
            "base_model": self.base_model,
            "base_model_relation": "quantized" if self.base_model and self.scheme else None,
            "library_name": "diffbit",
            "pipeline_tag": "text-generation",
            "tags": ["diffbit", *(["onnx"] if self.artifact else []), *([] if self.scheme is None else ["quantized"])],
        }
        header = "\n".join(f"{key}: {json.dumps(value)}" for key, value in front.items() if value is not None)
        parts = [f"---\n{header}\n---", f"# {self.repo.rpartition('/')[2]}", self._about(), self._sizes()]
        if self.results is not None:
            parts.append(accuracy(self.results))
        return "\n\n".join([*parts, self._how_to_run()]) + "\n"

    def _about(self) -> str:
        names = list(dict.fromkeys(layer["mixer"]["name"] for layer in self.model["layers"]))
        what = "An ONNX model for ONNX Runtime" if self.artifact else "A checkpoint (safetensors)"
        source = f" of [{self.base_model}](https://huggingface.co/{self.base_model})" if self.base_model else ""
        attention = "; ".join(ATTENTION.get(name, name) for name in names)
        begin = f"{what}{source}, made by diffbit {__version__}: {len(self.model['layers'])} layers of {attention}."
        if self.scheme is None:
            return f"{begin} Its weights are float."
        formats = {name: self.scheme.get(name) or "float" for name in PARTS}
        formats |= {f"attention, {name}": value for name, value in (self.scheme.get("attention") or {}).items()}
        formats |= {f"`{glob}`": format for glob, format in (self.scheme.get("overrides") or {}).items()}
        sentence = f"Quantized by `{self.method}`" if self.method else "Quantized"
        if self.calibration is not None:
            sentence += f", calibrated on {self.calibration.get('source')} ({self.calibration.get('tokens')} tokens)"
        return f"{begin}\n\n{sentence}:\n\n{table(('part', 'format'), formats.items())}"

    def _sizes(self) -> str:
        rows = [(name, f"{size / 1e6:,.2f}") for name, size in (*self.files.items(), ("all", sum(self.files.values())))]
        return f"## Sizes\n\n{table(('file', 'MB'), rows)}"

    def _how_to_run(self) -> str:
        name = f"hf:{self.repo}"
        commands = [f'diffbit run {name} "Once upon a time"', *([f"diffbit chat {name}"] if self.chat else [])]
        commands += [f"diffbit serve {name}", *([f"diffbit verify {name}"] if self.artifact else [])]
        lines = ["## How to run", "```sh", *commands, "```"]
        if not self.artifact:
            lines += [
                "or in transformers, if it supports the model:",
                "```python",
                "import diffbit.apps.hub.transformers",
                "from transformers import AutoModelForCausalLM",
                f"model = AutoModelForCausalLM.from_pretrained({self.repo!r})",
                "```",
            ]
        return "\n".join(lines)


def accuracy(results: Mapping[str, Any]) -> str:
    """Return the accuracy section, from a comparison.json."""
    percent = f"{results['confidence']:.0%}"
    rows = []
    for row in results["results"]:
        compared = row["what"] != "none"
        perplexity, kl, agreement = row["perplexity"], row["kl"], row["agreement"]
        rows.append(
            (
                row.get("name", row["model"]),  # of a quantized model that was compared as it is, its folder's
                row["format"] if row["what"] in ("none", "weights") else f"{row['what']} {row['format']}",
                "-" if row["method"] == "none" else row["method"],
                _interval(perplexity, "{:.4g}"),
                _interval({end: value - 1 for end, value in row["ratio"].items()}, "{:+z.2%}") if compared else "-",
                _interval(kl, "{:.3g}") if compared else "-",
                _interval(agreement, "{:.2%}") if compared else "-",
            )
        )
    heading = ("model", "format", "method", "perplexity", "increase", "KL (nats/token)", "same top token")
    text = results["text"]
    return (
        f"## Accuracy\n\nOn {text['scored_tokens']:,} tokens of {text['source']} (windows of {text['length']}), with "
        f"{percent} intervals; increase, KL divergence and agreement are against the 16-bit model, paired.\n\n"
        f"{table(heading, rows)}"
    )


def read_results(path: Path) -> dict[str, Any]:
    """Read a comparison.json. Raises DiffbitError for a file from which no card's table can be made."""
    values = read_json(path)
    try:
        accuracy(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DiffbitError(f"{path}: is not a comparison.json written by `diffbit compare -o` ({error!r})") from None
    return values


def table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in line)} |" for line in lines)


def _interval(estimate: Mapping[str, float], format: str) -> str:
    value, low, high = (format.format(estimate[end]) for end in ("value", "low", "high"))
    return f"{value} ({low} to {high})"
