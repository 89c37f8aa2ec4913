"""What may change in an attention variant's weights while it computes the same: what methods use that run before
rounding (quantize/methods/). A variant says it in its own file: `symmetries(config)`, attention/__init__.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Symmetries:
    """The defaults are what holds for any variant: nothing.

    value_width   w: rows of v_proj in blocks of w, a block per kv head, and columns of o_proj in blocks of w, a block
                  per head, may be multiplied by any orthogonal [w, w] matrix, one per kv head, Q^T W_v and W_o Q; head
                  i reads the value of kv head i // (heads / kv heads). 0: they may not.
    value_scales  whether those matrices may also be diagonal: the value's channels scaled one by one
    key_of        the key sub-head that each query sub-head meets: rows j and j + d/2 of a key sub-head, which RoPE
                  turns as a pair, and of all query sub-heads that meet it may be turned by any one angle. (): they may
                  not.
    """

    value_width: int = 0
    value_scales: bool = False
    key_of: tuple[int, ...] = ()
