"""diffbit's own diff_llama_v2, differential attention version 2, and diff_llama_v2_bitnet, the same with sub-norms.

num_attention_heads counts query sub-heads, two per pair; rows have canonical order on disk.
"""

from __future__ import annotations

from ._huggingface import HuggingFace

FAMILIES = tuple(
    HuggingFace(model_type, "diff_v2", queries=2, sub_norms=sub_norms, writes=1)
    for model_type, sub_norms in (("diff_llama_v2", False), ("diff_llama_v2_bitnet", True))
)
