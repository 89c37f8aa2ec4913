"""What the kernels of gpu.py are held against: attention out of torch's SDPA or flash-attn, and low-bit products.

Differential attention of a layer is (softmax(q1 k1^T) - lambda softmax(q2 k2^T)) v with v 2d wide. Kernels for one
softmax compute it in one of these ways, which only attend: RoPE, the cache's append, the difference and the head norm,
which DiffAttention includes, are not in their times, nor is what prepares their inputs.

    two calls            q1 k1 v and q2 k2 v, values 2d wide: 12 d bytes a token and pair in 16 bits
    two calls, batched   the same as one call with a batch of two; both read the same values, through a stride of 0
    two calls, padded    q and k filled up with zeros to 2d, for kernels that want equal widths: 16 d bytes
    four calls           each half of v by itself (FlashDiff's way, github.com/microsoft/unilm): 16 d bytes
    four calls, batched  the same as one call with a batch of four

Shapes: q [2, H, S, d] (signal, noise), k [2, H, T, d], v [H, T, 2d] for H pairs.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from clock import Contender
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

MOST_SCORES = 512  # tokens: beyond, SDPA's "math" holds all scores of a prompt, and copies of a long cache (35 GB)
Triple = tuple[Tensor, Tensor, Tensor]  # q, k, v of one call, [B, H, .., ..]
Attend = Callable[..., Tensor]  # (q, k, v, scale, causal) -> [B, H, S, width of v]
TWO, FOUR = "two calls", "four calls"
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


# ---- attention ------------------------------------------------------------------------------------------------------


def two_calls(q: Tensor, k: Tensor, v: Tensor) -> list[Triple]:
    return [(q[i : i + 1], k[i : i + 1], v[None]) for i in range(2)]


def two_batched(q: Tensor, k: Tensor, v: Tensor) -> list[Triple]:
    return [(q, k, v.expand(2, *v.shape))]


def two_padded(q: Tensor, k: Tensor, v: Tensor) -> list[Triple]:
    q, k = (F.pad(x, (0, x.shape[-1])) for x in (q, k))
    return two_calls(q, k, v)


def four_calls(q: Tensor, k: Tensor, v: Tensor) -> list[Triple]:
    halves = [half.contiguous()[None] for half in v.chunk(2, -1)]
    return [(q[i : i + 1], k[i : i + 1], half) for i in range(2) for half in halves]


def four_batched(q: Tensor, k: Tensor, v: Tensor) -> list[Triple]:
    halves = torch.stack(v.chunk(2, -1))
    return [(q.repeat_interleave(2, 0), k.repeat_interleave(2, 0), halves.repeat(2, 1, 1, 1))]


def joined(outs: Sequence[Tensor]) -> Tensor:
    """What a way's calls returned, as [2, H, S, 2d]."""
    out = torch.cat(list(outs))
    return out if len(out) == 2 else torch.cat((out[::2], out[1::2]), -1)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], list[Triple]]] = {
    TWO: two_calls,
    f"{TWO}, batched": two_batched,
    f"{TWO}, padded": two_padded,
    FOUR: four_calls,
    f"{FOUR}, batched": four_batched,
}


def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def flash_attn(module: str, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    function = importlib.import_module(module).flash_attn_func
    out = function(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale, causal=causal)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def attends(tokens: int) -> dict[str, Attend]:
    """Kernels for one softmax over `tokens` by their names."""
    functions: dict[str, Attend] = {f"SDPA {name}": partial(sdpa, backend) for name, backend in BACKENDS.items()}
    if tokens > MOST_SCORES:
        del functions["SDPA math"]
    for module, name in (("flash_attn", "flash-attn 2"), ("flash_attn_interface", "flash-attn 3")):
        if importlib.util.find_spec(module):
            functions[name] = partial(flash_attn, module)
    return functions


# ---- products -------------------------------------------------------------------------------------------------------


def torch_products(x: Tensor, weights: Sequence[Tensor]) -> Contender:
    """Float weights, in x's type."""
    return Contender([partial(F.linear, x, weight) for weight in weights])


class BitsAndBytes:
    """nf4 in blocks of 64, its default; ImportError where it is not installed."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._bnb: Any = importlib.import_module("bitsandbytes")
        quantize = self._bnb.functional.quantize_4bit
        self._weights = [quantize(weight, quant_type="nf4", blocksize=64) for weight in weights]

    def products(self, x: Tensor) -> Contender:
        multiply = self._bnb.matmul_4bit
        return Contender([partial(multiply, x, codes.t(), quant_state=state) for codes, state in self._weights])


BLOCKS = {2: 128, 4: 32}  # weights of MatMulNBits that share a scale, by its bits


class NBits:
    """Copies of ONNX Runtime's MatMulNBits side by side in one graph on its CUDA provider, random float16 weights.

    Everything is bound to memory of torch's, and runs on `stream`. ONNX Runtime captures a CUDA graph of its own where
    it can (`graph`); bits 2 in blocks of 128 (a ternary weight's size), bits 4 in blocks of 32.
    """

    def __init__(self, rows: int, columns: int, bits: int, count: int, stream: int, device: str) -> None:
        import onnxruntime
        from contenders import nbits_graph, repeat

        provider = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}[device]
        if provider not in onnxruntime.get_available_providers():
            raise ImportError(f"this onnxruntime {onnxruntime.__version__} has no {provider}")
        if device == "cuda":
            onnxruntime.preload_dlls()
        self.rows, self.count, self.device = rows, count, device
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)
        scale = torch.rand(rows, columns // BLOCKS[bits], generator=generator).add(0.5).mul(0.02)
        with tempfile.TemporaryDirectory() as name:
            nbits_graph(Path(name), codes, scale, bits, BLOCKS[bits], "fp16")
            path = repeat(Path(name), count, frozenset({"x"}))
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3
            if device == "cuda":  # a node that CUDA has no kernel for would run on the CPU without a word
                options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            self._make_options = onnxruntime.RunOptions
            for self.graph in (True, False) if device == "cuda" else (False,):
                settings = {"user_compute_stream": str(stream)} | ({"enable_cuda_graph": "1"} if self.graph else {})
                providers = [(provider, settings if device == "cuda" else {})]
                try:
                    # It falls back to other providers with a message only, and from one that did not start without one
                    self._session = onnxruntime.InferenceSession(
                        str(path), options, providers=providers, enable_fallback=0
                    )
                    if provider not in self._session.get_providers():
                        raise ImportError(f"onnxruntime {onnxruntime.__version__} could not start its {provider}")
                    (run,) = self.products(torch.ones(1, columns, dtype=torch.float16, device=device)).calls
                    for _ in range(3):  # the second or third makes the graph
                        run()
                    break
                except Exception:
                    if not self.graph:
                        raise

    def products(self, x: Tensor) -> Contender:
        """x float16 [M, K]."""
        binding = self._session.io_binding()
        out = torch.empty(self.count, x.shape[0], self.rows, dtype=x.dtype, device=x.device)
        binding.bind_input("x", self.device, 0, np.float16, tuple(x.shape), x.data_ptr())
        for i in range(self.count):
            name = f"y_{i}" if i else "y"
            binding.bind_output(name, self.device, 0, np.float16, tuple(out[i].shape), out[i].data_ptr())
        options = self._make_options()
        if self.device == "cuda":
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
            options.add_run_config_entry("gpu_graph_id", str(x.shape[0]) if self.graph else "-1")  # one for each shape

        def call() -> None:
            self._session.run_with_iobinding(binding, options)

        call.kept = x, out  # type: ignore[attr-defined]  # bound by their addresses
        return Contender([call], self.count, capture=False)


def best(us: dict[str, float], *ways: str) -> dict[str, float]:
    """The fastest of the contenders whose names begin with each way."""
    times_of = {way: [time for name, time in us.items() if name.startswith(way)] for way in ways}
    return {way: min(times) for way, times in times_of.items() if times}
