"""Writes models of transformers as GGUF files, as llama.cpp's converters do: with the names and keys of the package
gguf.

    python -m tests.models.gguf_files FOLDER     each of CASES by ours, transformers and llama.cpp, whose library is in
                                                 FOLDER, the unpacked npm package @node-llama-cpp/linux-x64
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from .helpers import VOCABULARY, YARN, hf_model, tokens

TYPES = gguf.GGMLQuantizationType
NEIGHBOURS = ("llama", "granite", "smollm3")  # whose rotary embedding pairs neighbours
OLD_NAMES = {"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"}  # which the package knows
WIDE = {"max_position_embeddings": 512}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 300.0, "original_max_position_embeddings": 256,
    "short_factor": [1.0, 1.3, 2.1, 3.7], "long_factor": [1.0, 4.0, 9.0, 16.0],
}  # fmt: skip
GEMMA = {
    "num_hidden_layers": 7, "sliding_window": 5, "query_pre_attn_scalar": 8,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 31.0},
    },
}  # fmt: skip
FACTORS = {
    "embedding_multiplier": 3.7, "attention_multiplier": 0.21, "residual_multiplier": 0.6, "logits_scaling": 0.45,
    "head_dim": 4,
}  # fmt: skip
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
# {name: (architecture, model_type of helpers.HF, changes of the config)}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", "qwen2", {"rope_parameters": YARN, "head_dim": 4}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 16}),
    "gemma3": ("gemma3", "gemma3_text", GEMMA),
    "gemma3-pattern": ("gemma3", "gemma3_text", GEMMA | {"sliding_window_pattern": 2}),
    "gemma3-untied": ("gemma3", "gemma3_text", GEMMA | {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "granite": ("granite", "granite", FACTORS),
    "granite-tied": ("granite", "granite", FACTORS | {"tie_word_embeddings": True, "attention_bias": True}),
    "olmo2": ("olmo2", "olmo2", HEADS),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "phi3": ("phi3", "phi3", HEADS),
    "phi3-partial": (
        "phi3",
        "phi3",
        HEADS | {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5}},
    ),
    "phi3-longrope": (
        "phi3",
        "phi3",
        HEADS | WIDE | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256},
    ),
    "lfm2": ("lfm2", "lfm2", HEADS | {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4}),
    "bitnet": ("bitnet", "bitnet", {"hidden_act": "silu", "tie_word_embeddings": True}),
}
OF_FORK = ("bitnet-b1.58", "bitnet-25")  # of BitNet's fork of llama.cpp, as `bitnet` with a squared ReLU
CASES_OF_FORK = {name: (name, "bitnet", {"tie_word_embeddings": True}) for name in OF_FORK}  # fmt: skip


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter writes q_proj and k_proj (its `permute`)."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def float32(name: str, weight: np.ndarray) -> tuple[np.ndarray, TYPES]:
    return weight, TYPES.F32


def convert(
    model: Any,
    file: Path,
    architecture: str,
    store: Callable[[str, np.ndarray], tuple[np.ndarray, TYPES]] = float32,
    without: str = "",
    further: Mapping[str, np.ndarray] = MappingProxyType({}),
    **changes: Any,
) -> Path:
    """Write a model of transformers. One of an architecture that the package does not know has `bitnet`'s names.

    store: the data and the type of a matrix of this name. without: leaves out this tensor or key. further: tensors.
    changes: of the metadata behind the architecture's name.
    """
    config, kind = model.config, gguf.MODEL_ARCH.BITNET
    kind = next((arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), kind)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, architecture)
    metadata = {**described(config, architecture), **changes}
    for key, value in metadata.items():
        if key != without and value is not None:
            of = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            type = gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.get_type(value)
            type = gguf.GGUFValueType.UINT32 if type == gguf.GGUFValueType.INT32 else type
            writer.add_key_value(f"{architecture}.{key}", value, type, of)
    writer.add_tokenizer_model("none")
    for name, weight in {**tensors(model, architecture), **further}.items():
        there = name
        if not name.startswith("rope_factors"):
            module, _, parameter = name.rpartition(".")
            for new, old in OLD_NAMES.items():
                module = module.replace(new, old)
            there = f"{names.get_name(module)}.{parameter}"
        if there == without:
            continue
        data, type = (weight, TYPES.F32) if weight.ndim == 1 or "conv" in there else store(there, weight)
        writer.add_tensor(there, data, raw_dtype=None if type == TYPES.F32 else type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """The tensors by transformers' names, changed as the converter of the architecture changes them."""
    config, result = model.config, dict[str, np.ndarray]()
    rope = getattr(config, "rope_parameters", None) or {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = value.float().numpy()
        if architecture in NEIGHBOURS and ("q_proj" in name or "k_proj" in name):
            weight = permuted(weight, config.num_attention_heads if "q_" in name else config.num_key_value_heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            weight = weight + 1
        result[name] = weight.squeeze(1) if "conv.conv" in name else weight
    for length in ("long", "short"):
        if f"{length}_factor" in rope:
            result[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], np.float32)
    return result


def described(config: Any, architecture: str) -> dict[str, Any]:
    """The metadata behind the architecture's name, by the converters' rules. None: absent."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None)
    rope: Mapping[str, Any] = config.rope_parameters
    full = rope.get("full_attention", rope)
    kv_heads: Any = config.num_key_value_heads
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": hidden,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": heads,
        "attention.layer_norm_rms_epsilon": float(getattr(config, "rms_norm_eps", 0) or config.norm_eps),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(full["rope_theta"]),
        "rope.dimension_count": None if architecture == "lfm2" else head_dim or hidden // heads,
    }
    if full.get("rope_type") in ("linear", "yarn"):
        values["rope.scaling.type"], values["rope.scaling.factor"] = full["rope_type"], full["factor"]
        values["rope.scaling.original_context_length"] = full.get("original_max_position_embeddings")
    match architecture:
        case "gemma3":
            values["attention.sliding_window"] = config.sliding_window
            values["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
            kinds = [kind == "sliding_attention" for kind in config.layer_types]
            sixth = [(index + 1) % 6 != 0 for index in range(len(kinds))]
            values["attention.sliding_window_pattern"] = None if kinds == sixth else kinds
        case "granite":
            values["attention.key_length"] = values["attention.value_length"] = None
            scales = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
                      "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}  # fmt: skip
            values |= {key: float(getattr(config, field)) for key, field in scales.items()}
        case "phi3":
            original = getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
            values["rope.scaling.original_context_length"] = original
            values["attention.sliding_window"] = config.sliding_window or 0
            values["rope.dimension_count"] = int(full.get("partial_rotary_factor", 1.0) * hidden) // heads
            if full["rope_type"] == "longrope":
                scale = config.max_position_embeddings / original
                values["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(scale) / np.log(original)))
        case "lfm2":
            kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in config.layer_types]
            values["shortconv.l_cache"] = config.conv_L_cache
            size = int(2 * config.intermediate_size / 3)
            values["feed_forward_length"] = -(-size // config.block_multiple_of) * config.block_multiple_of
    return {**values, "attention.head_count_kv": kv_heads}


def case(name: str, **changes: Any) -> tuple[str, Any]:
    """(The architecture, a random model of transformers) of one of CASES or CASES_OF_FORK."""
    architecture, kind, own = (CASES | CASES_OF_FORK)[name]
    return architecture, hf_model(kind, **own | changes)


def main(folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import llama_cpp

    from diffbit import models

    library, ids = llama_cpp.open_library(folder), tokens(1, 40)
    for name in CASES:
        architecture, model = case(name)
        with tempfile.TemporaryDirectory() as place, torch.no_grad():
            file = convert(model, Path(place) / "m.gguf", architecture)
            logits: Tensor = model(ids).logits[0]
            ours = models.load(file)(ids)[0]
            theirs = computed(llama_cpp, library, file, ids[0])
            spread, apart = float(logits.std()), float((logits - ours).abs().max())
            if architecture == "gemma3":  # llama.cpp looks GELU up in a table of float16
                for layer in model.model.layers:
                    layer.mlp.act_fn = GeluOfTable()
                ours = model(ids).logits[0]
        print(f"{name:16} logits of a standard deviation of {spread:.3f}; largest difference in units of it:"
              f" transformers - ours {apart / spread:.1e},"
              f" llama.cpp - ours {float((theirs - ours).abs().max()) / spread:.1e}")  # fmt: skip


class GeluOfTable(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()


def computed(llama_cpp: Any, library: Any, file: Path, ids: Tensor) -> Tensor:
    """llama.cpp's logits of all tokens, with a cache of float32 and without flash attention."""
    import ctypes

    of, count = llama_cpp.ContextParams, len(ids)
    model = library.llama_model_load_from_file(str(file).encode(), library.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp could not load {file}")
    options = library.llama_context_default_params()
    fields = {of.N_CTX: 256, of.N_BATCH: 256, of.THREADS: 1, of.BATCH_THREADS: 1, of.FLASH: 0, of.KEYS: 0, of.VALUES: 0}
    for field, value in fields.items():
        options.set(field, value)
    context = library.llama_init_from_model(model, options)
    numbers, ones = (ctypes.c_int32 * count)(*ids.tolist()), np.ones(count, np.int8)
    batch = library.llama_batch_get_one(numbers, count)
    batch.logits = ones.ctypes.data
    if status := library.llama_decode(context, batch):
        sys.exit(f"llama_decode returned {status}")
    logits = np.ctypeslib.as_array(library.llama_get_logits_ith(context, 0), (count, VOCABULARY))
    return torch.from_numpy(logits.copy())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
