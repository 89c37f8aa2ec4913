"""What frontier.py gives llama.cpp: a model as a GGUF file, and an importance matrix; and what is in its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import torch

from diffbit.io.gguf import read_gguf
from diffbit.models import Decoder, load

NAMES = {
    "embed_tokens": "token_embd", "input_layernorm": "attn_norm", "q_proj": "attn_q", "k_proj": "attn_k",
    "v_proj": "attn_v", "o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down", "norm": "output_norm", "lm_head": "output",
}  # fmt: skip
IK_TYPES = {
    133: "Q6_0", 137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K", 141: "IQ6_K", 144: "IQ4_KS", 145: "IQ2_KS",
    146: "IQ4_KSS", 152: "IQ5_KS", 153: "IQ2_KT", 154: "IQ3_KT", 155: "IQ4_KT",
}  # fmt: skip


def tensor_name(module: str) -> str:
    parts = module.split(".")
    return f"{f'blk.{parts[2]}.' if 'layers' in parts else ''}{NAMES[parts[-1]]}.weight"


def write_gguf(source: Path, out: Path) -> None:
    """A llama's weights as F32, without its tokenizer."""
    model = load(source)
    config, layer = model.config, model.config.layers[0]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(layer.mlp.intermediate_size)
    writer.add_head_count(layer.mixer.num_heads)
    writer.add_head_count_kv(layer.mixer.num_kv_heads)
    writer.add_rope_dimension_count(layer.mixer.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        values = parameter.detach().float().numpy()
        if module.endswith(("q_proj", "k_proj")):  # llama.cpp rotates neighbours
            values = values.reshape(-1, 2, layer.mixer.head_dim // 2, values.shape[1]).swapaxes(1, 2)
            values = np.ascontiguousarray(values).reshape(parameter.shape)
        writer.add_tensor(tensor_name(module), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_matrix(model: Decoder, ids: np.ndarray, out: Path) -> None:
    """The mean square of each input of each linear layer over windows of text, as llama-imatrix computes it."""
    sums: dict[str, torch.Tensor] = {}

    def add(name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        sums[name] = sums.get(name, torch.zeros(1)) + inputs[0].flatten(0, -2).double().square().sum(0)

    hooks = [
        module.register_forward_pre_hook(partial(add, tensor_name(name)))
        for name, module in model.model.layers.named_modules(prefix="model.layers")
        if isinstance(module, torch.nn.Linear)
    ]
    with torch.no_grad():
        for window in ids:
            model(torch.from_numpy(window)[None])
    for hook in hooks:
        hook.remove()
    with open(out, "wb") as file:
        np.savez(file, **{name: (total / ids.size).float().numpy() for name, total in sums.items()})  # type: ignore[arg-type]


def contents(file: Path) -> tuple[int, str]:
    """Bytes of the tensors, and how many matrices have each type."""
    header = read_gguf(file)
    types = [tensor.type for tensor in header.tensors.values() if len(tensor.shape) > 1]
    start = min(tensor.begin for tensor in header.tensors.values())
    names = (IK_TYPES.get(type) or gguf.GGMLQuantizationType(type).name for type in types)
    return file.stat().st_size - start, counted(names)


def counted(names: Iterable[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())
