"""`diffbit.Int8MatMul`: int8 activations times 8-bit weights; like int4_matmul.py except for:

Inputs
    A       T [..., K]                                    float32 or float16; computed in float32
    codes   uint8 [N/16, G, group_size/8, 2, 16, 4]       c, one per byte; all quotients here are rounded up
    scales  float16 [N/16, G or 1, 16]                    d; 1: one scale per row of the weight
    zeros   uint8, shaped as scales, or [1, 1, 1]         z, 0 to 255; a single 128 for symmetric formats
    factor  float [1]
Output
    Y       T [..., N]
Attributes: K, N, group_size (32, 64 or 128: of activations, and of weights unless they have one scale per row),
spec_version.

Layout: tiles of 16 rows, as in int4_matmul.py. A step of 8 weights is two runs of 64 bytes: the four even weights of
each of the 16 rows, then the four odd ones. Both ops read activations in the same order, GatherQuantized reads rows of
either layout, and kernels use the mapped file without copying.
"""

from __future__ import annotations

from functools import partial

from . import schema
from .int4_matmul import body
from .int4_matmul import pack as pack_tiles

OP = schema.INT8_MATMUL

function = partial(OP.function, partial(body, bits=8))
pack = partial(pack_tiles, bits=8)
