"""`export_artifact` writes the artifact of a checkpoint, which ONNX Runtime, onnxruntime-genai and optimum read.

It reads the checkpoint once, a layer at a time. Each layer also computes a short golden prompt in torch; the resulting
logits go into the manifest, and `diffbit verify` compares those of a device with them.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..formats.base import LARGE
from ..io import files
from ..io.errors import DiffbitError
from ..io.fields import to_dict
from ..io.progress import track
from ..io.resources import require
from ..io.tokenizer_files import open_tokenizer, tokenizer_files
from ..models import Checkpoint, ModelConfig
from ..models.checkpoint.names import EMBEDDING, HEAD
from ..models.families import loader_config
from ..ops.cache import CacheSpec
from ..ops.kv_cache import BLOCK
from ..quantize import AttentionScheme, Plan, read_scheme, resolve, sizes
from ..quantize.device_cache import cache_spec
from ..quantize.forecast import SLACK, Demand
from ..quantize.sizes import TensorSize
from ..runtime.artifact import HIDDEN, MANIFEST, ONNX, POOLINGS, TARGETS, TOKENIZER, VERSION, manifest_sha256
from ..runtime.chat_form import chat_form
from ..runtime.native import library as native_library
from ..runtime.sampler import GENERATION
from ..runtime.template import ChatTemplate, NoTemplate
from ..settings import OF_MODEL
from ..version import __version__
from .decoder_graph import DecoderGraph
from .fixed_scales import calibration_ids
from .grouped import GroupedGraph, grouped_cache, has_fixed_scales
from .onnx_graph import DATA, FLOATS, MODEL, TRANSFORMERS_JS_DATA
from .parts import parts
from .reference import Stream, check_plan
from .webgpu import WebGPUGraph

GRAPHS: dict[str, type[DecoderGraph]] = {"webgpu": WebGPUGraph, "onnxruntime": GroupedGraph}  # of other targets
DTYPE_NAMES = {"fp32": "float32", "fp16": "float16"}
GOLDEN_LENGTH = 16
MOST_GOLDEN = 512  # it bounds the prompt's attention weights; with a larger residual window all its tokens are recent
GOLDEN_TOKENS = 64

# By (dtype, quantized), for the tolerance of the golden logits: relative noise on the hidden states of copies of the
# prompt, and the least tolerance, relative to the spread of the logits. Where activations are rounded to int8, one last
# bit changes some of their codes, and a deep model with random weights amplifies that to a third of the spread; the
# noise for quantized models is large enough to change some codes. The least tolerance allows TF32.
NOISE = {("fp32", False): 2.0**-20, ("fp32", True): 2.0**-12, ("fp16", False): 2.0**-9, ("fp16", True): 2.0**-9}
LEAST_TOLERANCE = {("fp32", False): 1e-3, ("fp32", True): 1e-2, ("fp16", False): 1e-2, ("fp16", True): 3e-2}
HALF = 65504
MARGIN = 3  # times the largest deviation of a copy


def export_artifact(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str = "fp32",
    kv: str | None = None,
    target: str = "cpu",
    context_length: int | None = None,
    tokenizer: str | Path | None = None,
    library: bool = False,
    layout: str = "plain",
    embeddings: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write the artifact of a float or quantized checkpoint to the folder `out`, and return it.

    dtype: "fp32" or "fp16", of what is not quantized, and of scales.
    kv: "fp16" or dtype, of keys and values that are not quantized; default: dtype, which transformers.js needs.
    target: "cpu", "cuda" or "webgpu", the device that the graph's operators are chosen for; it runs on others, too.
    "onnxruntime" is for CPUs in programs without diffbit's library; there an int8 cache is ONNX Runtime's own.
    context_length: tokens that the model can hold; default, and at most, the config's max_position.
    tokenizer: a tokenizer.json, or a folder or GGUF file with one, to use in place of the checkpoint's own.
    library: put this machine's native library into the folder, for onnxruntime-genai; diffbit loads none from there.
    layout: "plain", or "transformers.js": the graph and its data in a folder onnx/, where transformers.js looks.
    embeddings: return hidden states after the final norm in place of logits; the artifact has no head.

    Raises DiffbitError for a checkpoint, scheme, tokenizer or option that an artifact cannot have.
    """
    of_kv = dict.fromkeys(("fp16", dtype))
    for name, value, choices in (("dtype", dtype, FLOATS), ("target", target, TARGETS), ("kv", kv or dtype, of_kv)):
        if value not in choices:
            raise DiffbitError(f"{name} is {value!r}, wanted one of {', '.join(choices)}")
    source = Checkpoint(checkpoint)
    if embeddings and source.config.pooling not in (None, *POOLINGS):
        raise DiffbitError(
            f"{source.path}: pools hidden states by {source.config.pooling}, wanted {' or '.join(POOLINGS)}"
        )
    files.check_apart(out, source.path, *([] if tokenizer is None else [tokenizer]))
    plan = resolve(source.config, read_scheme(source))
    check_plan(source.path, plan, target)
    config, length = source.config, _context_length(source, context_length)
    _check_tokens(source)
    contents = _tokenizer_files(source, tokenizer)
    quantized = source.quantization is not None
    attention = _attention(plan, kv or dtype, dtype)
    if target in GRAPHS:
        cache = grouped_cache(config, attention, DTYPE_NAMES[dtype], target)
    else:
        cache = cache_spec(config, attention, DTYPE_NAMES[dtype])
    kernels = _library(cache, embeddings) if library else None
    js = _for_transformers_js(layout, cache, embeddings)
    fixed = has_fixed_scales(config, attention, target)
    text = calibration_ids(config, contents[TOKENIZER], source.path) if fixed else None
    prompt = golden_prompt(config, length, attention)
    kind = dtype, quantized and target != "webgpu"
    require(f"exporting {source.path}", *export_demand(source, plan, dtype), out)
    with files.new_folder(out := Path(out), overwrite=overwrite) as folder:
        where, data = (folder / ONNX, TRANSFORMERS_JS_DATA) if js else (folder, DATA)
        where.mkdir(exist_ok=True)
        graph = GRAPHS.get(target, DecoderGraph)(where, dtype, config, length, attention, cache, target, data)
        stream = Stream(source, prompt, NOISE[kind], target, text)
        logits = _write_graph(graph, stream, embeddings)
        _check_half(source.path, cache, stream.largest, dtype, plan)
        _check_logits(source.path, logits)
        loader = _loader(config, dtype, length, cache)
        _write_configs(folder, source, contents, loader, len(graph.files) * js)
        if _readable_by_others(cache) and not embeddings:
            files.write_json(folder / "genai_config.json", _genai(config, loader, cache, kernels, ONNX * js + MODEL))
            if kernels is not None:
                shutil.copyfile(kernels, folder / kernels.name)
        manifest: dict[str, Any] = {
            "artifact_version": VERSION,
            "diffbit_version": __version__,
            "name": files.folder_name(source.path),
            "model": config.to_dict(),
            "dtype": dtype,
            **({} if target == "cpu" else {"target": target}),
            "scheme": plan.scheme.to_dict() if quantized else None,
            "source": _source(source),
            **{name: (source.quantization or {}).get(name) for name in ("method", "calibration")},
            "cache": {"layers": [{"buffers": [to_dict(buffer) for buffer in layer]} for layer in cache.layers]},
            "context_length": length,
            **({"output": HIDDEN} if embeddings else {}),
            "optional_inputs": graph.optional_inputs,
            "eos_token_ids": list(config.eos_token_ids),
            **_chat(folder),
            "files": _hashed(folder),
            "golden": _golden(prompt, logits, LEAST_TOLERANCE[kind]),
        }
        manifest["parts"] = [asdict(part) for part in parts(folder, manifest["files"], plan)]
        manifest["sha256"] = manifest_sha256(manifest)
        files.write_json(folder / MANIFEST, manifest)
    return out


class HalfOverflow(DiffbitError):
    """Keys or values are too large for a cache in float16."""


def _check_half(path: Path, cache: CacheSpec, largest: float, dtype: str, plan: Plan) -> None:
    """Raise HalfOverflow for keys or values of a test prompt that the cache cannot hold: they would become infinite,
    and all logits NaN."""
    halves = [name for name, buffer in cache.buffers.items() if buffer.dtype == "float16" and "scale" not in name]
    if not halves or largest <= HALF:
        return
    low = plan.scheme.attention.has_window
    advice = "quantize with --kv int8" if low else "export with " + ("--kv fp32" if dtype == "fp32" else "--dtype fp32")
    raise HalfOverflow(
        f"{path}: keys or values reach {largest:.3g} in a test prompt, more than {HALF}, the largest number that a "
        f"cache in float16 holds; {advice}"
    )


def export_demand(checkpoint: Checkpoint, plan: Plan, dtype: str = "fp32") -> Demand:
    """Return what `export_artifact` takes at most, from shapes alone. The largest table or layer determines the memory:
    a float matrix in fp32, twice, and transposed for MatMul; a quantized one as codes, and packed. The golden prompt
    multiplies the head some rows at a time."""

    def nbytes(tensor: TensorSize) -> int:
        if tensor.format is not None:
            is_head = tensor.is_multiplied and tensor.name in (EMBEDDING, HEAD)
            return 2 * tensor.weights + (4 * min(tensor.weights, LARGE) if is_head else 0)
        if tensor.name == EMBEDDING:
            return tensor.checkpoint_bytes + (tensor.device_bytes if tensor.device_width > 2 else 0)
        return 12 * tensor.weights

    table = sizes(plan, dtype, getattr(torch, checkpoint.dtype))
    memory = max(sum(map(nbytes, tensors)) for tensors in table.layers())
    return Demand(memory + min(SLACK, memory), table.nbytes)


def _attention(plan: Plan, kv: str, dtype: str) -> AttentionScheme:
    """Return the scheme of attention, with `kv` for keys and values that it leaves in float."""
    return plan.scheme.attention if kv == dtype else plan.scheme.attention.with_float(kv)


def _for_transformers_js(layout: str, cache: CacheSpec, embeddings: bool) -> bool:
    if layout not in ("plain", "transformers.js"):
        raise DiffbitError(f"layout is {layout!r}, wanted plain or transformers.js")
    floats = all("float" in buffer.dtype for buffer in cache.buffers.values())
    if layout != "plain" and not (floats and _readable_by_others(cache)):
        raise DiffbitError(
            "transformers.js cannot run this model, whose cache is more than growing keys and values in float; "
            "leave out the layout"
        )
    if layout != "plain" and embeddings:
        raise DiffbitError("transformers.js reads logits, not embeddings; leave out --embeddings or the layout")
    return layout != "plain"


def _source(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the checkpoint's name and hash; in "float" those of the float checkpoint that it was quantized from, if
    known."""
    source: dict[str, Any] = {"name": files.folder_name(checkpoint.path), "sha256": checkpoint.sha256()}
    quantized_from = (checkpoint.quantization or {}).get("source")
    return source | ({"float": quantized_from} if isinstance(quantized_from, dict) else {})


def _hashed(folder: Path) -> dict[str, Any]:
    """Return the manifest's list of the files in the folder."""
    return {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": files.sha256_file(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def golden_prompt(config: ModelConfig, context_length: int, attention: AttentionScheme) -> list[int]:
    """Return token ids spread over the vocabulary: the text need not mean anything, because only the devices' agreement
    counts.

    With a residual window the prompt is longer, so that a part of it is quantized.
    """
    length = GOLDEN_LENGTH + (attention.window + 2 * BLOCK if attention.has_window else 0)
    return [(7919 * i + 1) % config.vocab_size for i in range(min(length, context_length, MOST_GOLDEN))]


def _golden(prompt: list[int], rows: Tensor, least_tolerance: float) -> dict[str, Any]:
    """Choose golden values from logits [1 + COPIES, V]: the largest, and as many evenly spaced over the vocabulary."""
    logits, copies = rows[0], rows[1:]
    half = GOLDEN_TOKENS // 2
    largest = logits.topk(min(half, len(logits))).indices.tolist()
    everywhere = torch.linspace(0, len(logits) - 1, half).long().tolist()
    ids = list(dict.fromkeys([*largest, *everywhere]))
    spread = float(logits.std())
    deviation = float((copies - logits).abs().max()) / spread
    return {
        "input_ids": prompt,
        "token_ids": ids,
        "logits": [float(logits[i]) for i in ids],
        "spread": spread,
        "tolerance": max(least_tolerance, MARGIN * deviation),
    }


def _chat(folder: Path) -> dict[str, Any]:
    """Return the manifest's texts around the messages of a conversation, if the model's template is of that form."""
    try:
        form = chat_form(ChatTemplate.read(folder))
    except NoTemplate:
        form = None
    return {} if form is None else {"chat": asdict(form)}


def _write_graph(graph: DecoderGraph, stream: Stream, embeddings: bool) -> Tensor:
    """Write model.onnx and its data; the golden logits [1 + COPIES, V], or hidden states."""
    graph.embed(stream.embedding())
    blocks = track(stream.blocks(), "exporting", total=stream.config.num_layers)
    for index, block in enumerate(blocks):
        graph.block(block, index)
    norm, head, logits = stream.head(embeddings)
    graph.head(norm, head)
    graph.save()
    return logits


def _check_logits(path: Path, logits: Tensor) -> None:
    if not logits.isfinite().all() or not logits[0].std() > 0:
        raise DiffbitError(
            f"{path}: a test prompt gives logits that are infinite or all the same; the weights are damaged"
        )


def _tokenizer_files(source: Checkpoint, tokenizer: str | Path | None) -> dict[str, bytes]:
    """Return tokenizer.json and the files beside it, but not generation_config.json, which an artifact writes anew."""
    if tokenizer is None:
        path, by_name = source.path, source.tokenizer_files
        if TOKENIZER not in by_name:
            raise DiffbitError(f"{path}: holds no {TOKENIZER}; pass one with `diffbit export --tokenizer`")
    else:
        path = Path(tokenizer)
        by_name = tokenizer_files(path)
        if TOKENIZER not in by_name:
            raise DiffbitError(f"{tokenizer}: is not a {TOKENIZER}, nor a folder or GGUF file that holds one")
    open_tokenizer(by_name[TOKENIZER], path)
    return {name: data for name, data in by_name.items() if name != GENERATION}


def _loader(config: ModelConfig, dtype: str, context_length: int, cache: CacheSpec) -> dict[str, Any]:
    """Return config.json, whose heads are those of the cache that others feed."""
    hf = loader_config(config, DTYPE_NAMES[dtype], context_length)
    if _readable_by_others(cache):
        hf["num_key_value_heads"], _, hf["head_dim"] = next(iter(cache.buffers.values())).shape
    return hf


def _write_configs(
    folder: Path, source: Checkpoint, contents: dict[str, bytes], hf: dict[str, Any], js_files: int
) -> None:
    """Write the tokenizer's files and what other loaders read. js_files: how many files of weights transformers.js
    loads; 0 in another layout."""
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    if js_files:  # its "fp32" is the name of the file without a suffix, whatever is in it
        hf["transformers.js_config"] = {"dtype": "fp32", "use_external_data_format": js_files}
    files.write_json(folder / "config.json", hf)
    tokens = {name: hf[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if hf[name] is not None}
    settings = files.parse_json(source.tokenizer_files.get(GENERATION, b"{}"), source.path / GENERATION)
    sampling = {name: settings[name] for name in OF_MODEL if settings.get(name) is not None}
    files.write_json(folder / GENERATION, tokens | sampling)
    if not (folder / "tokenizer_config.json").exists():
        files.write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def _readable_by_others(cache: CacheSpec) -> bool:
    """Whether loaders that know one key and one value a layer (onnxruntime-genai, optimum) can feed this cache, which
    grows with the tokens."""
    plain = all({buffer.name for buffer in layer} == {"key", "value"} for layer in cache.layers)
    return plain and all(buffer.grows for buffer in cache.buffers.values())


def _context_length(source: Checkpoint, requested: int | None) -> int:
    limit = source.config.max_position
    length = limit if requested is None else requested
    if not 1 <= length <= limit:
        raise DiffbitError(f"context_length is {length}, wanted 1 to {limit}, the positions that {source.path} has")
    return length


def _check_tokens(source: Checkpoint) -> None:
    config = source.config
    for name, ids in (("bos_token_id", (config.bos_token_id or 0,)), ("eos_token_id", config.eos_token_ids)):
        if not all(0 <= token < config.vocab_size for token in ids):
            raise DiffbitError(
                f"{source.path / 'config.json'}: {name} is {list(ids)}, wanted ids of the vocabulary of "
                f"{config.vocab_size} tokens"
            )


def _library(cache: CacheSpec, embeddings: bool) -> Path:
    """Return the path of the native library for onnxruntime-genai."""
    library = native_library()
    if library is None:
        raise DiffbitError("this installation has no native library to put into the artifact; it needs a C++ compiler")
    if embeddings or not _readable_by_others(cache):
        raise DiffbitError("onnxruntime-genai cannot run this model, so it needs no library; leave out --library")
    return library


def _genai(
    config: ModelConfig, loader: dict[str, Any], cache: CacheSpec, library: Path | None, graph: str
) -> dict[str, Any]:
    """Return genai_config.json for onnxruntime-genai, which needs token ids even where the model has none. Without
    the library it runs the portable bodies."""
    ways = ("always",) if library is None else ("always", "native")
    in_place = all(buffer.in_place in ways for buffer in cache.buffers.values())
    options: dict[str, Any] = {"log_id": "onnxruntime-genai", "provider_options": []}
    if library is not None:
        options["custom_ops_library"] = library.name
    context_length = loader["max_position_embeddings"]
    eos = list(config.eos_token_ids)
    pad = config.pad_token_id if config.pad_token_id is not None else eos[0] if eos else 0
    return {
        "model": {
            "type": "decoder",
            "vocab_size": config.vocab_size,
            "context_length": context_length,
            "bos_token_id": config.bos_token_id if config.bos_token_id is not None else pad,
            "eos_token_id": eos if len(eos) != 1 else eos[0],
            "pad_token_id": pad,
            "decoder": {
                "session_options": options,
                "filename": graph,
                "hidden_size": config.hidden_size,
                "head_size": loader["head_dim"],
                "num_hidden_layers": config.num_layers,
                "num_attention_heads": loader["num_attention_heads"],
                "num_key_value_heads": loader["num_key_value_heads"],
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": False,
            "max_length": context_length,
            "past_present_share_buffer": in_place,
        },
    }
