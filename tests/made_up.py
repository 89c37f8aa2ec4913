"""Results as `diffbit outliers` and `diffbit quantize` give them, made up, for plots and reports."""

from __future__ import annotations

from typing import Any


def outliers(name: str, factor: float = 1.0) -> dict[str, Any]:
    def summary(largest: float, layer: int | None = None) -> dict[str, Any]:
        return {
            "count": 50,
            "top": {"1": largest, "2": 0.9 * largest, "3": 0.8 * largest, "10": 0.5 * largest, "100": None},
            "median": 0.25, "ratio": largest / 0.25, "mean": 0.0, "std": 1.0, "kurtosis": 7.5, "layer": layer,
            "place": {"window": 1, "position": 0, "unit": 42, "key": None},
        }  # fmt: skip

    layers = [summary(factor * (index + 1), index) for index in range(3)]
    site = {**summary(factor * 3, 2), "layers": layers}
    return {
        "model": name, "attention": "diff_v1", "windows": 16, "tokens": 2048, "median_relative_error": 2**-10,
        "attention_logits": site, "hidden_states": site,
    }  # fmt: skip


def weights(measured: bool = True) -> dict[str, Any]:
    return {
        "weights": [
            {
                "name": f"model.layers.{layer}.{module}.weight", "format": "int4_g32", "shape": (64, 64),
                "weight_error": 0.05 + 0.01 * layer, "output_error": 0.02 * (layer + 1) if measured else None,
                "bits_per_weight": 4.5, "nbytes": 2304,
            }
            for layer in range(3)
            for module in ("self_attn.q_proj", "mlp.down_proj")
        ]
    }  # fmt: skip
