"""llama.cpp's side of generate.py, run by the interpreter that has llama-cpp-python and gguf installed.

    llama_peer.py write KIND SHAPE FILE                          a llama of random weights as GGUF; SHAPE is JSON
    llama_peer.py measure FILE PROMPT NEW REPEATS THREADS [LONG [FLASH]]
                                                                 one JSON row, as diffbit.runtime.bench's; LONG: decode
                                                                 behind so many tokens as well (see `lengthen`); FLASH:
                                                                 0 without flash attention, default as llama.cpp chooses
    llama_peer.py quantize FILE OUT TYPE                         TYPE is one of llama.cpp's, such as Q4_K_M

KIND is TQ2_0 or Q4_0, the type of the layers' weights; embedding and head are Q4_0 in both.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

CONTEXT = 2048
TILE = 128  # rows that are quantized; the rest of a weight repeats them


def write(kind: str, shape: dict[str, int], file: str) -> None:
    import gguf

    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(shape["layers"])
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape["hidden"])
    writer.add_feed_forward_length(shape["intermediate"])
    writer.add_head_count(shape["sub_heads"])
    writer.add_head_count_kv(shape["kv_sub_heads"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape["vocab"])
    writer.add_tokenizer_model("gpt2")  # OpenVINO loads no file without a tokenizer
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"{i:05}" for i in range(shape["vocab"])])
    writer.add_token_types([3] + [1] * (shape["vocab"] - 1))  # the first is the end of a text
    writer.add_token_merges(["0 0"])
    writer.add_eos_token_id(0)
    writer.add_file_type(2)  # Q4_0 for most of it

    def matrix(name: str, rows: int, columns: int, kind: str) -> None:
        type = gguf.GGMLQuantizationType[kind]
        tile = gguf.quants.quantize(random.standard_normal((TILE, columns), np.float32) * 0.02, type)
        writer.add_tensor(f"{name}.weight", np.tile(tile, (-(-rows // TILE), 1))[:rows], raw_dtype=type)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(shape["hidden"], np.float32))

    hidden, kv = shape["hidden"], shape["kv_sub_heads"] * shape["head_dim"]
    matrix("token_embd", shape["vocab"], hidden, "Q4_0")
    for i in range(shape["layers"]):
        norm(f"blk.{i}.attn_norm")
        matrix(f"blk.{i}.attn_q", shape["sub_heads"] * shape["head_dim"], hidden, kind)
        matrix(f"blk.{i}.attn_k", kv, hidden, kind)
        matrix(f"blk.{i}.attn_v", kv, hidden, kind)
        matrix(f"blk.{i}.attn_output", hidden, shape["sub_heads"] * shape["head_dim"], kind)
        norm(f"blk.{i}.ffn_norm")
        matrix(f"blk.{i}.ffn_gate", shape["intermediate"], hidden, kind)
        matrix(f"blk.{i}.ffn_up", shape["intermediate"], hidden, kind)
        matrix(f"blk.{i}.ffn_down", hidden, shape["intermediate"], kind)
    norm("output_norm")
    if not shape["tied"]:
        matrix("output", shape["vocab"], hidden, "Q4_0")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def silent_llama() -> Any:
    import llama_cpp as llama

    global silent  # llama.cpp keeps a pointer to it
    silent = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(silent, None)
    llama.llama_backend_init()
    return llama


def quantize(file: str, out: str, kind: str) -> None:
    llama = silent_llama()
    parameters = llama.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{kind}")
    parameters.nthread = 1
    if llama.llama_model_quantize(file.encode(), out.encode(), ctypes.byref(parameters)):
        raise SystemExit(f"{file}: llama.cpp could not quantize it to {kind}")


def lengthen(llama: Any, context: Any, length: int) -> None:
    """Make a context as long as `length` tokens: its keys and values are repeated, which costs no time to compute.

    What llama.cpp saves of a sequence: four 32-bit numbers, the last of them the cells; position, 1 and sequence of
    each; whether values are transposed, and the number of layers; then keys of all layers and values of all layers,
    each with its type, the bytes of a cell (64 bits), and the cells. Transposed values have their type, the bytes of a
    number and the channels (32 bits each), and the cells of each channel.
    """
    size = llama.llama_state_seq_get_size(context, 0)
    saved = np.empty(size, np.uint8)
    pointer = ctypes.POINTER(ctypes.c_uint8)
    llama.llama_state_seq_get_data(context, saved.ctypes.data_as(pointer), size, 0)
    head = saved[:16].view(np.uint32)
    cells = int(head[3])
    at = 16 + 12 * cells
    transposed, layers = saved[at : at + 8].view(np.uint32).tolist()
    at += 8
    meta = np.array([[place, 1, 0] for place in range(length)], np.uint32)
    parts = [head[:3], np.uint32([length]), meta, np.uint32([transposed, layers])]
    for layer in range(2 * layers):
        numbers = saved[at : at + 12].copy().view(np.uint32)
        rows, width = (int(numbers[2]), int(numbers[1])) if transposed and layer >= layers else (1, int(numbers[1]))
        values = saved[at + 12 : at + 12 + rows * cells * width].reshape(rows, cells * width)
        times = -(-length // cells)
        parts += [saved[at : at + 12], np.ascontiguousarray(np.tile(values, (1, times))[:, : length * width])]
        at += 12 + rows * cells * width
    if at != size:
        raise SystemExit(f"llama.cpp's saved state has {size} bytes, {at} are understood")
    grown = np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    if llama.llama_state_seq_set_data(context, grown.ctypes.data_as(pointer), len(grown), 0) != len(grown):
        raise SystemExit("llama.cpp refuses the state")


def measure(
    file: str, prompt: int, new: int, repeats: int, threads: int, long: int = 0, flash: int = -1
) -> dict[str, Any]:
    llama = silent_llama()
    started = time.perf_counter()
    model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
    parameters = llama.llama_context_default_params()
    # Room for these tokens only: llama.cpp writes to all of its cache when it is made
    parameters.n_ctx = -(-(max(prompt, long) + new) // 256) * 256
    parameters.n_batch = parameters.n_ubatch = max(prompt, 32)
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.flash_attn_type = flash
    context = llama.llama_init_from_model(model, parameters)
    load = time.perf_counter() - started
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def next_token(tokens: list[int]) -> int:
        array = (llama.llama_token * len(tokens))(*tokens)
        if status := llama.llama_decode(context, llama.llama_batch_get_one(array, len(tokens))):
            raise SystemExit(f"llama_decode returned {status}")
        logits = llama.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (vocabulary,)).argmax())

    ids = np.random.default_rng(0).integers(0, vocabulary, prompt).tolist()

    def decode(token: int) -> dict[str, float]:
        """Medians of a token, on the clock and of all cores together."""
        rows = []
        for _ in range(new - 1):
            wall, cpu = time.perf_counter(), time.process_time()
            token = next_token([token])
            rows.append((time.perf_counter() - wall, time.process_time() - cpu))
        wall, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
        return {"decode_s": wall, "decode_cpu_s": cpu}

    prefills, decodes = [], []
    for _ in range(repeats + 1):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        started = time.perf_counter()
        token = next_token(ids)
        first = time.perf_counter()
        speeds = decode(token)
        prefills.append(first - started)
        decodes.append(time.perf_counter() - first)
    if long:
        lengthen(llama, context, long)
        speeds |= {f"{name}_behind_long": value for name, value in decode(token).items()}
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return {
        "model_bytes": Path(file).stat().st_size,
        "load_s": load,
        "prefill_tokens_per_s": prompt / statistics.median(prefills[1:]),
        "decode_tokens_per_s": (new - 1) / statistics.median(decodes[1:]),
        "peak_host_memory_bytes": int(peak.split()[1]) * 1024,
        **speeds,
    }


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "write":
        write(rest[0], json.loads(rest[1]), rest[2])
    elif command == "quantize":
        quantize(*rest)
    else:
        print(json.dumps(measure(rest[0], *map(int, rest[1:]))))
