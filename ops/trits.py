"""`diffbit.ExpandTrits`: ternary weights, five to a byte, to TernaryMatMul's layout of four. A format of storage only.

    byte = d_4 + 3 (d_0 + 3 d_1 + 9 d_2 + 27 d_3)        digits w + 1 = 0, 1, 2: 3^5 = 243 of 256 values, 1.6 bits each

Inputs
    trits   uint8 [N, 4, R]
    rest    uint8 [N, 0 ... 4]
Output
    packed  uint8 [N, 5 R + the width of `rest`]        ops/ternary_matmul.py has its layout
Attributes: spec_version.

A row of `packed` is five runs of R bytes and the rest. Byte i of run r < 4 holds in its four fields d_0 ... d_3 of
trits[r, i], and byte i of the last run d_4 of trits[0, i], trits[1, i], trits[2, i] and trits[3, i]. So nothing is
moved by less than a byte, and with f_k = floor(byte / 3^k)

    d_0 + 4 d_1 + 16 d_2 + 64 d_3 = f_1 + f_2 + 4 f_3 + 16 f_4 = floor(4 f_1 / 3) + 4 f_3 + 16 f_4
    d_4 = f_0 - 3 f_1

A rounded quotient is what QLinearConv computes of bytes: floor(x / 3^k) = round((x - (3^k - 1) / 2) / 3^k). One makes
all f_k that are needed, a second one all bytes. They are made of constants only and ONNX Runtime folds them once, at
load; the op has a body and no kernel. Tables would do as well, but Gather wants four bytes an index, and what is folded
is held until all of the model is loaded: 1.6 bytes a weight as it is here, 2 with tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import schema

if TYPE_CHECKING:
    import onnx_ir
    import torch

OP = schema.Op(
    "ExpandTrits",
    version=1,
    inputs=(schema.Tensor("trits", schema.Type.UINT8), schema.Tensor("rest", schema.Type.UINT8)),
    outputs=(schema.Tensor("packed", schema.Type.UINT8),),
    attributes=(),
    call=schema.Call("", "", ()),
)
RUNS = 5

# (run, k): the f_k that the first convolution makes. The last stands twice, as int8 holds no -192
_FLOORS = [(run, k) for run in range(4) for k in (0, 1, 3, 4)] + [(3, 1)]


def _convolutions() -> tuple[tuple[list[list[int]], list[float], list[int]], ...]:
    """(weight [out, in], scale [out], bias [out]) of both: y = round((weight x + bias) * scale)."""
    floors = [[int(run == r) for r in range(4)] for run, _ in _FLOORS]
    first = floors, [3.0**-k for _, k in _FLOORS], [-(3**k - 1) // 2 for _, k in _FLOORS]
    of_run = [[{1: 4, 3: 12, 4: 48}.get(k, 0) * (r == run) for r, k in _FLOORS[:-1]] + [0] for run in range(4)]
    last = [{0: 4**run, 1: -3 * 4**run}.get(k, 0) for run, k in _FLOORS]
    last[_FLOORS.index((3, 1))] = last[-1] = -96
    return first, ([*of_run, last], [1 / 3] * 4 + [1.0], [-1] * 4 + [0])


def _constants() -> str:
    def text(kind: str, numbers: Sequence[float], shape: str) -> str:
        return f"Constant <value = {kind}[{shape}] {{{', '.join(map(str, numbers))}}}> ()"

    lines = []
    for name, (weight, scale, bias) in zip(("floors", "bytes"), _convolutions(), strict=True):
        count = str(len(weight))
        flat = [number for row in weight for number in row]
        lines.append(f"  {name}_weight = {text('int8', flat, f'{count}, {len(weight[0])}, 1')}")
        lines.append(f"  {name}_scale = {text('float', scale, count)}")
        lines.append(f"  {name}_bias = {text('int32', bias, count)}")
    return "\n".join(lines)


BODY = f"""
{{
  one = Constant <value = float {{1.0}}> ()
  zero = Constant <value = uint8 {{0}}> ()
  signed_zero = Constant <value = int8 {{0}}> ()
{_constants()}
  floors = QLinearConv (trits, one, zero, floors_weight, floors_scale, signed_zero, one, zero, floors_bias)
  runs = QLinearConv (floors, one, zero, bytes_weight, bytes_scale, signed_zero, one, zero, bytes_bias)
  rows = Constant <value_ints = [0, -1]> ()
  all_runs = Reshape (runs, rows)
  packed = Concat <axis = 1> (all_runs, rest)
}}
"""


def function() -> onnx_ir.Function:
    """The op's body as an ONNX model-local function."""
    return OP.function(BODY)


def pack(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """TernaryMatMul's bytes uint8 [N, bytes], at least five -> trits uint8 [N, 4, R], rest uint8 [N, bytes % 5]."""
    import torch

    width = packed.shape[1] // RUNS
    runs = packed[:, : RUNS * width].unflatten(1, (RUNS, width))
    trits = torch.zeros(len(packed), 4, width, dtype=torch.uint8, device=packed.device)
    for field in range(4):
        trits += (runs[:, :4] >> 2 * field & 3) * 3 ** (field + 1)
        trits[:, field] += runs[:, 4] >> 2 * field & 3
    return trits, packed[:, RUNS * width :]


def reference(trits: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """The op in torch; the inverse of `pack`."""
    import torch

    runs = sum((trits // 3 ** (field + 1) % 3) << 2 * field for field in range(4))
    last = sum((trits[:, run] % 3) << 2 * run for run in range(4))
    assert isinstance(runs, torch.Tensor) and isinstance(last, torch.Tensor)
    return torch.cat((runs.flatten(1), last, rest), 1)
