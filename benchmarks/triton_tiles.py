"""What becomes of the Triton kernels of differential attention on a card: compiled here, with or without a GPU.

    python benchmarks/triton_tiles.py                                  # an A100's, an RTX 4090's, an H100's
    python benchmarks/triton_tiles.py --capability 90 --d 128 --json out/tiles.json
    python benchmarks/triton_tiles.py --forward 128,64,8,3             # other tiles: queries,keys,warps,stages

A row is a kernel, with values of 2d and one key for each branch (version 1) or of d (version 2), in bfloat16: its
registers a thread, the bytes a thread has on the stack (what registers did not hold), the bytes of shared memory of a
block and whether a block may have so many.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import table

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported: the kernels are to be compiled

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from diffbit.models import triton_attention
from diffbit.models.triton_attention import Tile, tiles

MOST_SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # bytes a block
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
KERNELS = {"forward": "_forward", "of_keys": "_keys_and_values", "of_queries": "_queries"}
INTEGERS, FLOATS, FLOAT32 = ("S", "H", "G"), ("scale", "factor", "eps"), ("lam", "lse", "root", "delta")


def compiled(name: str, d: int, version: int, tile: Tile, capability: int) -> dict[str, Any]:
    """A row."""
    kernel = getattr(triton_attention, KERNELS[name])
    wide = version == 1
    constants = {"D": d, "E": 2 * d if wide else d, "SHARED": not wide, "NORM": wide, "M": tile.queries, "N": tile.keys}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = dict.fromkeys(kernel.arg_names, "*bf16")
    types |= dict.fromkeys(constants, "constexpr") | dict.fromkeys(INTEGERS, "i32")
    types |= {key: "fp32" for key in FLOATS if key in types} | {key: "*fp32" for key in FLOAT32 if key in types}
    aligned = {  # as torch's tensors are, and heads
        (index,): [["tt.divisibility", 16]]
        for index, key in enumerate(kernel.arg_names)
        if types[key].startswith("*") or key in ("H", "G")
    }
    row: dict[str, Any] = {"kernel": name, "version": version, "d": d, "capability": capability, "tile": list(tile)}
    found = triton.compile(
        ASTSource(kernel, types, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(found.asm["cubin"])
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    shared = found.metadata.shared
    return row | {
        "registers": registers,
        "stack": stack,
        "shared": shared,
        "fits": shared <= MOST_SHARED[capability],
        "wgmma": "wgmma" in found.asm["ptx"],
    }


def tile_of(text: str) -> Tile:
    return Tile(*(int(number) for number in text.split(",")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", choices=MOST_SHARED, default=[80, 89, 90])
    parser.add_argument("--d", type=int, nargs="+", choices=triton_attention.WIDTHS, default=[64, 128])
    parser.add_argument("--version", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    for name in KERNELS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=tile_of, metavar="TILE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    others = {name: getattr(options, name) for name in KERNELS if getattr(options, name)}
    rows = []
    for capability in options.capability:
        for d in options.d:
            plan = tiles(d, 16, MOST_SHARED[capability])._asdict()
            for version in options.version:
                for name, tile in (others or plan).items():
                    rows.append(compiled(name, d, version, tile, capability))
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    header = list(rows[0])
    print(table(header, [[row[key] for key in header] for row in rows]))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"triton": triton.__version__, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["fits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
