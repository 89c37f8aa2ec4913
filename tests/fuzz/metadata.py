"""Metadata of other programs: each is computed as they compute it, or refused, and never skipped.

`config_cases`: every field of every family's config in transformers, in every family: with other values, null, or
absent. A tiny random model of the changed config is saved; its logits are transformers', or the folder is refused.
`gguf_cases`: keys of a GGUF file by prefix and type: the file is refused by the key's name, or computes what the
formula of that key (llama.cpp's, written out here) says.

python -m tests.fuzz.metadata [CASES [FIRST]]     # all of config_cases without CASES; prints those that fail
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
import tempfile
import typing
import warnings
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from diffbit import DiffbitError, models

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "bitnet", "diffllama", "granite", "gemma3_text", "olmo2", "deepseek_v2",
    "deepseek_v3", "phi3", "smollm3", "lfm2",
)  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.15,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ABSENT = "absent"  # in place of a value: the field is left out
LATENT = {
    "head_dim": ABSENT,
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 4, "first_k_dense_replace": 3, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
BASE = {
    "gemma3_text": {"sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 11},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "mistral": {"sliding_window": 5},
    "smollm3": {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 5},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "phi3": {"sliding_window": 5, "original_max_position_embeddings": 48},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 300.0}
UNEVEN = YARN | {"beta_fast": 4, "beta_slow": 0.5, "original_max_position_embeddings": 32}  # bounds between pairs
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 300.0},
    {"rope_type": "default", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "linear", "type": "yarn", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0, "alpha": 1000.0},
    YARN,
    {**YARN, "attention_factor": 0.8},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
    {**YARN, "mscale": 0.7},
    {**YARN, "mscale_all_dim": 0.7},
    {**UNEVEN, "truncate": True},
    {**UNEVEN, "truncate": False},
    {**UNEVEN, "truncate": None},
    {**YARN, "beta_fast": 0, "beta_slow": None},
    {**YARN, "partial_rotary_factor": 0.5},
    {**YARN, "llama_4_scaling_beta": 0.1},
    {"rope_type": "linear", "factor": 3.0, "mscale_all_dim": 1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
     "original_max_position_embeddings": 16},
    {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0] * 4},
    {"type": "longrope", "short_factor": [1.5, 2.0], "long_factor": [2.0] * 2, "partial_rotary_factor": 0.5},
    {"rope_type": "yarn", "short_factor": [2.0] * 4, "long_factor": [2.0] * 4, "attention_factor": 0.7},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
    {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}},
    {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
)  # fmt: skip
GEMMA_ROPES: tuple[dict[str, Any], ...] = tuple(
    {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}} for rope in ROPES[:12]
)
KINDS = ["full_attention", "sliding_attention", "full_attention"]
VALUES: dict[str, tuple[Any, ...]] = {
    "rope_parameters": (*ROPES, *GEMMA_ROPES),
    "rope_scaling": ROPES,
    "rope_theta": (300.0,),
    "rope_local_base_freq": (300.0,),
    "partial_rotary_factor": (0.5, 1.0),
    "original_max_position_embeddings": (16,),
    "layer_types": (
        KINDS,
        ["sliding_attention"] * 3,
        ["full_attention"] * 3,
        ["attention"] * 3,
        KINDS[:2],
        ["full_attention", "conv", "conv"],
        ["conv"] * 3,
        ["conv", "sliding_attention", "conv"],
    ),
    "full_attn_idxs": ([1], [0, 2], []),
    "block_ff_dim": (60,),
    "block_multiple_of": (7, 256),
    "conv_L_cache": (1, 2, 5),
    "tie_embedding": (True, False),
    "no_rope_layers": ([1, 0, 1], [0, 0, 0], [2, 0, 1, 0, 0], [1, 0], [True, False, True]),
    "no_rope_layer_interval": (1, 2, 0),
    "per_layer_config": ({"1": {"intermediate_size": 40}}, {"0": {"sliding_window": 3}}),
    "is_causal": (False, True),
    "hidden_act": ("gelu", "relu", "relu2", "gelu_pytorch_tanh", "silu", "gelu_new", "swish"),
    "hidden_activation": ("gelu", "silu", "gelu_pytorch_tanh"),
    "sliding_window": (3, 64, 200),
    "sliding_window_pattern": (1, 3),
    "text_config": ({"is_causal": False}, {"hidden_size": 5}),
    "num_key_value_heads": (4, 1),
    "head_dim": (8, 4),
    "max_position_embeddings": (40, 128),
}
# Fields that give another model's sizes, what training, generation or other programs read, or transformers' own
SKIPPED = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "transformers_version", "architectures",
    "dtype", "id2label", "label2id", "problem_type", "return_dict", "output_hidden_states", "is_encoder_decoder",
    "model_type", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    family: str
    field: str
    value: Any

    def __str__(self) -> str:
        return f"{self.family}: {self.field} = {json.dumps(self.value)}"

    @property
    def is_their_fault(self) -> bool:
        """Gemma 3's rope_parameters have settings for each kind of layers, and transformers looks for yarn's `truncate`
        beside these."""
        rope = self.value if isinstance(self.value, dict) else {}
        truncates = (rope.get("full_attention") or rope).get("truncate", True)
        return self.family == "gemma3_text" and not truncates

    def config(self) -> dict[str, Any]:
        """The config.json."""
        values = {"model_type": self.family, **SIZES, **BASE.get(self.family, {})}
        values["sliding_window_pattern"] = values.get("sliding_window_pattern", ABSENT)
        values[self.field] = deepcopy(self.value)
        return {name: value for name, value in values.items() if value is not ABSENT and value != ABSENT}


def _classes() -> dict[str, Any]:
    return {name: type(AutoConfig.for_model(name)) for name in FAMILIES}


def config_fields() -> dict[str, set[Any]]:
    """Every field of every family's config, with the types that it may have."""
    fields: dict[str, set[Any]] = {name: set() for name in VALUES}
    for kind in _classes().values():
        for field in dataclasses.fields(kind):
            if field.name not in SKIPPED:
                hints = typing.get_args(field.type) or (field.type,)
                fields.setdefault(field.name, set()).update(hints)
    return fields


def config_cases() -> Iterator[Case]:
    """All of them, in order."""
    for field, kinds in sorted(config_fields().items()):
        names = {getattr(kind, "__name__", str(kind)) for kind in kinds}
        values: list[Any] = [*VALUES.get(field, ())]
        if field not in VALUES:
            values += [True, False] * any("bool" in name for name in names)
            values += [0.0, 0.5, 2.0] * any("float" in name for name in names)
            values += [0, 1, 5] * any(name.startswith("int") for name in names)
            values += ["greedy"] * any(name.startswith("str") for name in names)
        for family in FAMILIES:
            for value in (*values, None, ABSENT):
                yield Case(family, field, value)


def outcome(case: Case, folder: Path) -> str:
    """ "equal", "refused", "theirs" (transformers refuses it, or cannot compute it), or what is wrong."""
    values = case.config()
    folder.mkdir(exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    ids = torch.randint(0, SIZES["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(1))
    try:
        torch.manual_seed(0)
        with torch.no_grad():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                elif "lambda" in name or name.endswith("bias"):
                    parameter.normal_(0, 0.4)
            logits = model(ids).logits[0]
        model.save_pretrained(folder)
    except Exception:  # whatever a config that they do not support may raise
        return "theirs"
    if not logits.isfinite().all():
        return "theirs"
    file.write_text(json.dumps(values))  # as it was spelled
    try:
        with torch.no_grad():
            ours = models.load(folder)(ids)[0]
    except DiffbitError:
        return "refused"
    difference = float((ours - logits).abs().max() / logits.std())
    return "equal" if difference < 1e-3 else f"differs from transformers by {difference:.1e} of the logits' spread"


# {what: (metadata below the architecture's name, rope_parameters of transformers that compute the same)}, by the rules
# of llama.cpp: the factor is rope.scaling.factor or rope.scale_linear, 0 stands for 1, the type is linear unless it is
# said, and yarn multiplies cos and sin by (1 + 0.1 ln factor) * attn_factor
GGUF_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
HF_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GROWN = 1 + 0.1 * math.log(4)
GGUF_FORMULAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a factor without a type": ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "the old name": ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "both names": ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 2.0}),
    "a factor of 0": ({"rope.scaling.factor": 0.0}, {"rope_type": "default"}),
    "no scaling": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
    "linear by nothing": ({"rope.scaling.type": "linear"}, {"rope_type": "default"}),
    "yarn": (GGUF_YARN, HF_YARN),
    "yarn's attn_factor": (
        GGUF_YARN | {"rope.scaling.attn_factor": 0.5}, HF_YARN | {"attention_factor": 0.5 * GROWN},
    ),
    "yarn's betas": (
        GGUF_YARN | {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0},
        HF_YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    ),
    "yarn's usual factors": (
        GGUF_YARN | {"rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0,
                     "rope.scaling.yarn_log_multiplier": 0.0},
        HF_YARN,
    ),
    "keys that change nothing": (
        {"attention.causal": True, "attention.max_alibi_bias": 0.0, "attention.clamp_kqv": 0.0,
         "attention.scale": 32**-0.5,
         "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0, "logit_scale": 0.0, "residual_scale": 1.0,
         "embedding_scale": 1.0, "expert_count": 0, "expert_used_count": 0, "rope.scaling.finetuned": True,
         "rope.scaling.attn_factor": 1.0, "pooling_type": 3, "attention.sliding_window": 0},
        {"rope_type": "default"},
    ),
}  # fmt: skip
GGUF_CASES = 3000  # of `main`
GGUF_PREFIXES = ("rope.", "rope.scaling.", "attention.", "expert_", "attention.indexer.", "ssm.")
GGUF_ENDS = ("_scale", "_logit_softcapping", ".causal", "_clamp")
GGUF_VALUES = (0.5, 3, "text", [1, 0], True, -1, [0.5], 1e30)


def gguf_keys(count: int, seed: int = 0) -> Iterator[tuple[str, Any]]:
    """Keys below an architecture's name that no llama.cpp has, with values that are not neutral."""
    random = Random(seed)
    for _ in range(count):
        word = "".join(random.choices("abcdefghij_", k=random.randint(1, 12))) + "q"
        prefix = random.choice((*GGUF_PREFIXES, ""))
        yield prefix + word + ("" if prefix else random.choice(GGUF_ENDS[:3])), random.choice(GGUF_VALUES)


def check_gguf(count: int, seed: int, folder: Path) -> list[str]:
    """Return the unknown keys that a GGUF file may have without being refused by their names."""
    from ..models.test_gguf import write

    wrong = []
    for key, value in gguf_keys(count, seed):
        try:
            models.Checkpoint(write(folder / "m.gguf", others={f"llama.{key}": value}))
            wrong.append(f"llama.{key} = {value} was skipped")
        except DiffbitError as error:
            if f"llama.{key} is " not in str(error):
                wrong.append(f"llama.{key} = {value}: {error}")
    return wrong


def check(cases: list[Case]) -> tuple[Counter[str], list[str]]:
    """Return how many had which outcome, and those that are wrong."""
    counts: Counter[str] = Counter()
    wrong = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        for index, case in enumerate(cases):
            result = outcome(case, Path(place) / str(index))
            if case.is_their_fault and result.startswith("differs"):
                result = "theirs"
            counts[result if result in ("equal", "refused", "theirs") else "wrong"] += 1
            if result not in ("equal", "refused", "theirs"):
                wrong.append(f"{case}: {result}")
    return counts, wrong


def sample(count: int, seed: int = 0) -> list[Case]:
    return Random(seed).sample(list(config_cases()), count)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    cases = list(config_cases())
    if len(sys.argv) > 1:
        first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
        cases = Random(0).sample(cases, len(cases))[first : first + int(sys.argv[1])]
    counts, wrong = check(cases)
    with tempfile.TemporaryDirectory() as folder:
        wrong += check_gguf(GGUF_CASES, 0, Path(folder))
    print("\n".join(wrong))
    print(f"{len(cases)} configs: {dict(counts)}; {GGUF_CASES} keys of GGUF files; {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
