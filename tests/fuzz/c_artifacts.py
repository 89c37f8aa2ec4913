"""Damaged artifacts against libdiffbit: each is an error in words or runs; no signal, no sanitizer's report.

    LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)" \\
        ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \\
        python -m tests.fuzz.c_artifacts LIBRARY COUNT ARTIFACT...

LIBRARY: libdiffbit.so, compiled with -DDIFFBIT_SANITIZE=address,undefined. A crash ends this process, within 200 cases
of the number that was printed last."""

from __future__ import annotations

import ctypes
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

NUMBERS = [
    0,
    1,
    -1,
    2,
    7,
    255,
    1 << 31,
    -(1 << 31),
    (1 << 32) - 1,
    1 << 62,
    1e308,
    0.5,
    "",
    "tokens",
    None,
    [],
    {},
    True,
]
JSONS = ["diffbit.json", "tokenizer.json", "generation_config.json"]


def damaged_json(value: Any, draw: random.Random) -> None:
    """Change one place of a document."""
    while isinstance(value, dict | list) and value:
        key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        if not isinstance(value[key], dict | list) or not value[key] or draw.random() < 0.1:
            if draw.random() < 0.2:
                del value[key]
            else:
                value[key] = draw.choice(NUMBERS)
            return
        value = value[key]


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(changed) or 1)
        kind = draw.random()
        if kind < 0.5 and changed:
            changed[at] = draw.choice([0, 1, 127, 128, 255, changed[at] ^ 1 << draw.randrange(8), draw.randrange(256)])
        elif kind < 0.65:
            del changed[at : at + draw.randrange(1, 20)]
        elif kind < 0.8:
            changed[at:at] = draw.randbytes(draw.randrange(1, 12))
        elif kind < 0.95:
            begin = draw.randrange(len(changed) or 1)
            changed[at : at + 16] = changed[begin : begin + 16]
        else:
            del changed[at:]
    return bytes(changed)


def damage(folder: Path, draw: random.Random) -> None:
    """Damage one file, and let the manifest agree with its size, or not."""
    manifest = json.loads((folder / "diffbit.json").read_text())
    name = draw.choice([*JSONS, "diffbit.json", *["model.onnx"] * 5, "model.onnx.data", "tokenizer.json"])
    path = folder / name
    data = path.read_bytes() if path.exists() else b"{}"
    if name in JSONS and draw.random() < 0.7:
        value = json.loads(data)
        for _ in range(draw.choice([1, 1, 2])):
            damaged_json(value, draw)
        data = json.dumps(value).encode()
    else:
        data = damaged_bytes(data, draw)
    path.write_bytes(data)
    if name != "diffbit.json" and name in manifest["files"] and draw.random() < 0.95:
        manifest["files"][name]["bytes"] = len(data)
        (folder / "diffbit.json").write_text(json.dumps(manifest))


def main(library: str, count: int, artifacts: list[str]) -> None:
    c = ctypes.CDLL(library)
    c.diffbit_open.restype = ctypes.c_void_p
    c.diffbit_encode.restype = c.diffbit_decode.restype = ctypes.c_int64
    error, text = ctypes.create_string_buffer(512), ctypes.create_string_buffer(4096)
    ids = (ctypes.c_int32 * 256)()
    opened = ran = 0
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(count):
            if seed % 200 == 0:
                print(f"case {seed}: {opened} opened, {ran} ran", flush=True)
            draw, folder = random.Random(seed), Path(temporary) / "artifact"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(artifacts[seed % len(artifacts)], folder)
            damage(folder, draw)
            handle = ctypes.c_void_p(c.diffbit_open(str(folder).encode(), 1 + seed % 2, error, ctypes.c_size_t(512)))
            if not handle:
                assert error.value, seed
                continue
            opened += 1
            sentence = "def main(x): 12345 <|endoftext|> é\r\n\u3000".encode()
            size = c.diffbit_encode(handle, sentence, ctypes.c_size_t(len(sentence)), 1, ids, ctypes.c_size_t(256))
            tokens = list(ids[: max(0, min(size, 256))]) or [1, 2, 3]
            array = (ctypes.c_int32 * len(tokens))(*tokens)
            c.diffbit_decode(handle, array, ctypes.c_size_t(len(tokens)), text, ctypes.c_size_t(4096))
            small = (ctypes.c_int32 * 40)(*[1 + i % 9 for i in range(40)])
            if c.diffbit_prompt(handle, small, ctypes.c_size_t(draw.choice([1, 3, 40]))) == 0:
                ran += 1
                for _ in range(2):
                    c.diffbit_next(handle, None)
            c.diffbit_close(handle)
    print(f"{count} cases: {opened} opened, {ran} ran")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
