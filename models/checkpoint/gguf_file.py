"""Reads the tensors of a GGUF file as floats, dequantized if necessary (github.com/ggml-org/llama.cpp, gguf-py).

F16 and BF16 are kept; every quantized type that the package `gguf` dequantizes becomes float32, and so do two that it
does not (`LEVELS`), and I2_S of BitNet's fork (`Ternary`). Rows are read and dequantized a few MB at a time, so reading
a tensor takes little more memory than the tensor itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...io.errors import DiffbitError, needs
from ...io.fields import located
from ...io.gguf import GGUF, read_gguf
from ...io.safetensors import Entry, stamp
from ..families._gguf import ARCHITECTURE, CONVOLUTION, FACTORS, fields, pooling

FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # ggml's type numbers
CHUNK = 8 << 20  # bytes of float32
# Q1_0 and Q2_0 (ggml-quants.c): a block is an F16 scale and the codes of its weights, the first in the lowest bits of a
# byte; a weight is scale * level. {type: (weights in a block, level of each code)}
LEVELS = {41: (128, (-1, 1)), 42: (64, (-1, 0, 1, 2))}
LARGE = 1 << 14
I2_S, OTHERS_OF_BITNET = 36, {38: "TL1", 39: "TL2"}  # types of github.com/microsoft/BitNet; 39 is MXFP4 elsewhere
I2_S_BLOCK, I2_S_TAIL = 128, 32  # weights; bytes after the codes, of which the first four are the scale
Q2_0, PRISM_BLOCK = 42, 128  # PrismML's llama.cpp wrote Q2_0 in blocks of 128 before llama.cpp had it in blocks of 64


@dataclass(frozen=True)
class GGUFEntry(Entry):
    type: int  # ggml's type number
    block: int  # weights in a block

    @property
    def stop(self) -> int:
        """Where the bytes of the tensor end."""
        return self.end

    def read(self) -> Tensor:
        if self.type in FLOATS:
            return super().read()
        columns = self.shape[-1]
        rows = math.prod(self.shape[:-1])
        stored = self.stored_bytes().view(rows, -1).numpy()
        out = torch.empty(rows, columns)
        step = max(1, CHUNK // (4 * columns))
        for i in range(0, rows, step):
            out[i : i + step] = torch.from_numpy(_dequantize(stored[i : i + step], self.type, self.block))
        return out.view(self.shape)


@dataclass(frozen=True)
class Ternary(GGUFEntry):
    """A tensor of I2_S: scale * (code - 1), codes 0, 1 and 2, and one float32 scale behind them.

    A block of 128 weights is 32 bytes; bits 7-6 of byte i hold the code of weight i, 5-4 of i + 32, 3-2 of i + 64 and
    1-0 of i + 96. That is what BitNet's converters write, and its quantizer where it was compiled for x86-64 as it is
    by default, which wrote the published files. Other builds of it write other orders of the same codes under the same
    number (on ARM blocks of 64; without ACT_PARALLEL four rows in a byte), and no file says which.
    """

    scale_at: int  # in bytes from the start of the file

    @property
    def stop(self) -> int:
        return self.scale_at + I2_S_TAIL

    def read(self) -> Tensor:
        packed = self.stored_bytes().view(-1, I2_S_BLOCK // 4)
        scale = replace(self, begin=self.scale_at, end=self.scale_at + 4).stored_bytes().view(torch.float32)
        codes = torch.stack([packed >> shift & 3 for shift in (6, 4, 2, 0)], 1)
        if (codes == 3).any():
            raise DiffbitError(f"{self.file}: an I2_S tensor holds a code of 3, wanted 0, 1 or 2; copy the file again")
        if not (scale.isfinite().all() and scale > 0):
            raise DiffbitError(
                f"{self.file}: an I2_S tensor has the scale {float(scale):g}, wanted a positive number; convert the "
                "model again, with llama-quantize on one thread"
            )
        return (codes.float() - 1).mul_(scale).view(self.shape)


def _dequantize(rows: np.ndarray, type: int, weights: int) -> np.ndarray:
    """Return the weights float32 [rows, columns] of blocks uint8 [rows, bytes]."""
    if type not in LEVELS:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        return dequantize(rows, GGMLQuantizationType(type))
    levels = LEVELS[type][1]
    bits = (len(levels) - 1).bit_length()
    blocks = rows.reshape(-1, 2 + weights * bits // 8)
    of_codes = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").reshape(-1, weights, bits)
    codes = of_codes @ (1 << np.arange(bits))
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    with np.errstate(invalid="ignore"):  # of a scale that is infinite: the reader of a checkpoint refuses the result
        return (scales * np.array(levels, np.float32)[codes]).reshape(len(rows), -1)


def open_gguf(file: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Return the fields of a config.json, and the tensors by their names in the file and the other parts of the model.

    Raises DiffbitError for an unsupported model, a type that cannot be dequantized, and data beyond the file's end.
    """
    headers = read_gguf(file).parts()
    header, entries = headers[0], dict[str, GGUFEntry]()
    with located(file):
        unread = OTHERS_OF_BITNET if header.get(ARCHITECTURE, str, "").startswith("bitnet") else {}
    for part in headers:
        for name, info in part.tensors.items():
            if info.type in unread:
                raise DiffbitError(
                    f"{part.file}: tensor {name} has BitNet's type {unread[info.type]}, which is not read; convert the "
                    "model to I2_S"
                )
        block = _block_of_q2(part)
        own = {name: _entry(part, name, block) for name in part.tensors}
        in_order = sorted(own.items(), key=lambda item: item[1].begin)
        for (name, entry), (other, following) in pairwise(in_order):
            if following.begin < entry.stop:
                raise DiffbitError(
                    f"{part.file}: the bytes of tensor {other} are also those of {name}; copy the file again"
                )
        if twice := entries.keys() & own.keys():
            raise DiffbitError(f"{part.file}: holds tensor {min(twice)}, which an earlier part of the model holds, too")
        entries |= own
    for name, entry in entries.items():
        if name.endswith(CONVOLUTION) and len(entry.shape) == 2:
            entries[name] = replace(entry, shape=(entry.shape[0], 1, entry.shape[1]))
    factors = {name: entries.pop(name).read().float().numpy() for name in FACTORS & entries.keys()}
    with located(file):
        return fields(header, factors), dict(entries)


def open_pooling(file: Path) -> str | None:
    """Return how a file's embeddings are made; None: it does not say."""
    return pooling(read_gguf(file))


def _block_of_q2(header: GGUF) -> int:
    """Return the weights in a block of a file's Q2_0 tensors: PrismML's, if llama.cpp's need more bytes than there are
    before the next tensor."""
    infos = sorted(header.tensors.values(), key=lambda info: info.begin)
    ends = [*(info.begin for info in infos), header.status.st_size][1:]
    block, nbytes = LEVELS[Q2_0][0], _block(Q2_0, "")[1]
    overflows = []
    for info, end in zip(infos, ends, strict=True):
        weights = math.prod(info.shape)
        if info.type == Q2_0 and weights >= LARGE:  # in smaller ones, padding may be as long as the difference
            overflows.append(weights // block * nbytes > end - info.begin)
    return PRISM_BLOCK if overflows and all(overflows) else block


def _entry(header: GGUF, name: str, q2_block: int) -> GGUFEntry:
    info, file = header.tensors[name], header.file
    if info.type in FLOATS:
        dtype = FLOATS[info.type]
        block, nbytes = 1, dtype.itemsize
    else:
        dtype = torch.float32
        block, nbytes = _block(info.type, f"{file}: tensor {name}")
        if info.type == Q2_0:
            block, nbytes = q2_block, 2 + q2_block // 4
    if info.shape[-1] % block:
        raise DiffbitError(
            f"{file}: tensor {name} of shape {info.shape} has rows that are not a multiple of its blocks of {block}; "
            "copy the file again"
        )
    end = info.begin + math.prod(info.shape) // block * nbytes
    entry = GGUFEntry(file, dtype, info.shape, info.begin, end, stamp(header.status), info.type, block)
    if info.type == I2_S:
        entry = Ternary(**vars(entry), scale_at=end)
    if entry.stop > header.status.st_size:
        raise DiffbitError(
            f"{file}: is cut short: tensor {name} ends at byte {entry.stop}, the file at byte {header.status.st_size}; "
            "copy it again"
        )
    return entry


@cache
def _block(type: int, where: str) -> tuple[int, int]:
    """Return (weights, bytes) of a block."""
    if type == I2_S:
        return I2_S_BLOCK, I2_S_BLOCK // 4
    if type in LEVELS:
        weights, levels = LEVELS[type]
        return weights, 2 + weights * (len(levels) - 1).bit_length() // 8
    with needs("gguf", "lab", "reading a quantized GGUF file"):
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
    try:
        known = GGMLQuantizationType(type)
        dequantize(np.zeros((1, GGML_QUANT_SIZES[known][1]), np.uint8), known)
    except ValueError:
        raise DiffbitError(f"{where} has the unknown type {type}; wanted one that the package gguf knows") from None
    except NotImplementedError:
        raise DiffbitError(f"{where} has the type {known.name}, which the package gguf does not dequantize") from None
    return GGML_QUANT_SIZES[known]
