"""What is damaged, and what then must end in one sentence or in the right result.

`make(folder)` writes an example of every file that diffbit reads. A target names the folder of its example, the files
that are damaged and how, and what is done with the damaged copy: it raises DiffbitError (one sentence), or returns
after its own look at the result.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import torch
from sentencepiece import SentencePieceTrainer

from diffbit.apps.allocate.scheme_file import write_scheme
from diffbit.apps.train import trainer as trainer_module
from diffbit.apps.train.config import TrainConfig
from diffbit.apps.train.new_tokenizer import train_tokenizer
from diffbit.apps.train.trainer import train
from diffbit.calib_data import eval_windows, load_text, load_tokenizer
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.io.files import json_sha256, sha256_file
from diffbit.io.tokenizer_files import tokenizer_files
from diffbit.models import Checkpoint, Decoder, ModelConfig, save
from diffbit.quantize import Scheme, load, quantize_checkpoint
from diffbit.quantize import resume as resume_module
from diffbit.runtime import Sampler, Session, Tokenizer, generate, verify
from diffbit.runtime import verify as verify_function

from .mutations import (
    Mutation,
    damage_bytes,
    damage_gguf,
    damage_graph,
    damage_json,
    damage_jsonl,
    damage_safetensors,
    damage_sentencepiece,
    damage_text,
)

TEXT = Path(__file__).read_text()
SCHEME = Scheme(weights=parse_format("int4_g32"), head=parse_format("int8"), embedding=parse_format("int8"))
IDS = torch.randint(0, 250, (3, 12), generator=torch.Generator().manual_seed(0))
verify_module = sys.modules[verify_function.__module__]


@dataclass(frozen=True)
class Target:
    example: str  # a folder that `make` writes; "" is all of them
    files: Mapping[str, Mutation]
    act: Callable[[Path], object]  # given a damaged copy of the example
    share: int = 10  # of the cases, beside those of the others


def make(folder: Path) -> None:
    """Write the examples: small models, and runs that were interrupted."""
    model = folder / "model"
    tokenizer = train_tokenizer([TEXT], 270, folder / "tokenizer")
    torch.manual_seed(0)
    config = ModelConfig.uniform(
        vocab_size=270, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=32,
        max_position=32, attention="diff_v1", eos_token_ids=(tokenizer.eos_id,), bos_token_id=tokenizer.eos_id,
    )  # fmt: skip
    decoder = Decoder(config)
    save(decoder, model, tokenizer_from=folder / "tokenizer")
    (model / "generation_config.json").write_text('{"eos_token_id": [0], "temperature": 0.7, "top_k": 20}')
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    shutil.copytree(model, folder / "sharded")
    _shard(folder / "sharded")
    quantize_checkpoint(model, folder / "quantized", SCHEME)
    export_artifact(folder / "quantized", folder / "artifact")
    (folder / "gguf").mkdir()
    _gguf(folder / "gguf" / "model.gguf", json.loads((model / "tokenizer.json").read_text()))
    _sentencepiece(folder / "pieces")
    _texts(folder / "texts")
    (folder / "scheme").mkdir()
    write_scheme(SCHEME, folder / "scheme" / "scheme.toml")
    attention = {"attention": {"keys": "int8", "values": "int4", "window": 32, "qk": "int8"}}
    (folder / "scheme" / "scheme.json").write_text(
        json.dumps(SCHEME.to_dict() | attention | {"overrides": {"model.layers.0.*": "int8"}})
    )
    _unfinished(folder / "unfinished")
    _training(folder / "training")


def _shard(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors, index = load_file(folder / "model.safetensors"), {}
    (folder / "model.safetensors").unlink()
    for number in (1, 2):
        part = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % 2 == number - 1}
        name = f"model-0000{number}-of-00002.safetensors"
        save_file(part, folder / name)
        index |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _gguf(file: Path, tokenizer: dict[str, Any]) -> None:
    """A llama whose projections are Q8_0, and its tokenizer."""
    writer = gguf.GGUFWriter(file, "llama")
    sizes = {
        "block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64, "vocab_size": 270,
        "attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 8,
    }  # fmt: skip
    for key, value in sizes.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 500.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    )
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_eot_token_id, writer.add_pad_token_id):
        add(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages[0].content }}")
    writer.add_string("llama.rope.scaling.type", "linear")
    writer.add_float32("llama.rope.scaling.factor", 2.0)
    generator = np.random.default_rng(0)
    shapes = {
        "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32), "ffn_gate": (64, 32),
        "ffn_up": (64, 32), "ffn_down": (32, 64),
    }  # fmt: skip
    named = {f"blk.0.{name}": shape for name, shape in shapes.items()} | {"token_embd": (270, 32)}
    for name, shape in named.items():
        weight = gguf.quants.quantize(generator.standard_normal(shape, np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", weight, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _sentencepiece(folder: Path) -> None:
    folder.mkdir()
    for name, kind in (("bpe", "bpe"), ("unigram", "unigram")):
        (folder / name).mkdir()
        data = io.BytesIO()
        SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT.splitlines()), model_writer=data, vocab_size=400, model_type=kind,
            byte_fallback=kind == "bpe", minloglevel=3,
        )  # fmt: skip
        (folder / name / "tokenizer.model").write_bytes(data.getvalue())
        (folder / name / "tokenizer_config.json").write_text(
            json.dumps({
                "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False, "bos_token": "<s>",
                "eos_token": {"content": "</s>"}, "added_tokens_decoder": {"400": {"content": "<x>", "special": True}},
            })
        )  # fmt: skip


def _texts(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    lines = TEXT.splitlines()[:60]
    (folder / "a.txt").write_text("\n".join(lines))
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": line, "n": n}) + "\n" for n, line in enumerate(lines)))
    pyarrow.parquet.write_table(pyarrow.table({"text": lines, "n": list(range(60))}), folder / "a.parquet")


def _unfinished(folder: Path) -> None:
    """A run of GPTQ that stopped at its head; `whole` is what it gives."""
    folder.mkdir()
    shutil.copytree(folder.parent / "model", folder / "model")
    _quantize(folder, folder / "whole")
    add = resume_module.Unfinished.add

    def stops(self: Any, layer: Any) -> None:
        if self.count == 2:
            raise RuntimeError
        add(self, layer)

    resume_module.Unfinished.add = stops  # type: ignore[method-assign]
    try:
        _quantize(folder, folder / "out")
    except RuntimeError:
        assert (folder / "out.unfinished" / "run.json").is_file()
    finally:
        resume_module.Unfinished.add = add  # type: ignore[method-assign]


def _quantize(folder: Path, out: Path, **options: Any) -> None:
    quantize_checkpoint(folder / "model", out, SCHEME, method="gptq", calibration=IDS, **options)


def _training(folder: Path) -> None:
    """A run that stopped after its second step; `whole` is what it gives."""
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT)
    train(_options(folder), folder / "whole")
    step = trainer_module._Run.step

    def stops(self: Any, number: int) -> dict[str, Any]:
        if number == 3:
            raise RuntimeError
        return step(self, number)

    trainer_module._Run.step = stops  # type: ignore[method-assign]
    try:
        train(_options(folder), folder / "out")
    except RuntimeError:
        assert (folder / "out" / "checkpoints").is_dir()
    finally:
        trainer_module._Run.step = step  # type: ignore[method-assign]


def _options(folder: Path) -> TrainConfig:
    model = ModelConfig.uniform(
        vocab_size=270, hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, intermediate_size=16,
        max_position=16, attention="diff_v1", tie_embeddings=True,
    )  # fmt: skip
    return TrainConfig(
        model=model, steps=3, length=8, batch_size=1, warmup=1, source=str(folder / "text.txt"), device="cpu",
        eval_windows=1, checkpoint_every=2,
    )  # fmt: skip


# What is done with a damaged copy


def quantize(folder: Path) -> None:
    """A checkpoint, a GGUF file: rounded, and what was written is read back."""
    source = folder / "model.gguf" if (folder / "model.gguf").exists() else folder
    quantize_checkpoint(source, folder.parent / "case-out", SCHEME)
    load(folder.parent / "case-out")
    _tokenize(folder.parent / "case-out")
    shutil.rmtree(folder.parent / "case-out")


def read_quantized(folder: Path) -> None:
    decoder = load(folder)
    with torch.inference_mode():
        assert decoder(torch.tensor([[1, 2, 3]])).shape == (1, 3, decoder.config.vocab_size)


def export(folder: Path) -> None:
    export_artifact(folder, folder.parent / "case-out")
    assert (folder.parent / "case-out" / "diffbit.json").is_file()
    shutil.rmtree(folder.parent / "case-out")


def _tokenize(folder: Path) -> None:
    """As calibration does, and as a device does."""
    files = tokenizer_files(folder)
    if "tokenizer.json" not in files:
        return
    windows = eval_windows(str(folder.parent / "text.txt"), folder, 8, 2)
    assert windows.ids.shape == (2, 8)
    (folder / "tokenizer.json").write_bytes(files["tokenizer.json"])
    tokenizer = Tokenizer(folder / "tokenizer.json")
    ids = tokenizer.encode("naïve 日本語 def f(x):\n")
    stream = tokenizer.stream(ids)
    for token in (*ids, 0, 5, 10**6):
        stream.push(token)
    stream.finish()


def tokenize(folder: Path) -> None:
    load_tokenizer(folder)
    _tokenize(folder)


def template(folder: Path) -> None:
    """In this process, which has limits of its own; template.py starts another for it."""
    from diffbit.runtime import render
    from diffbit.runtime import template as module

    module.ChatTemplate._start = lambda self: None  # type: ignore[method-assign,assignment,return-value]
    read = module.ChatTemplate.read(folder)
    try:
        text = render.compiled(read.source).render(  # type: ignore[attr-defined]
            read.special_tokens, messages=[{"role": "user", "content": " Hello "}], add_generation_prompt=True
        )
        assert isinstance(text, str)
    except Exception:  # whatever a stranger's code may raise; `render.main` sends the words
        return


def run(folder: Path) -> None:
    """Verify an artifact and generate with it."""
    listed = set(json.loads((folder / "diffbit.json").read_bytes())["files"]) if _is_json(folder) else set()
    verification = verify(folder, threads=1)
    for check in verification.checks:
        assert check.detail and "\n" not in check.detail.strip() and "Traceback" not in check.detail
    if not verification.passed:
        raise DiffbitError("; ".join(check.detail for check in verification.failures))
    locations = _locations(onnx.load(folder / "model.onnx", load_external_data=False))
    assert locations <= listed, locations
    session = Session(folder, threads=1)
    generate(session, "def f", max_tokens=3, sampler=Sampler(1.0, seed=0)).result()


def _is_json(folder: Path) -> bool:
    try:
        return isinstance(json.loads((folder / "diffbit.json").read_bytes())["files"], dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _locations(message: Any) -> set[str]:
    """Of external tensors anywhere in a model, found by onnx's own classes."""
    locations = set()
    for field, value in message.ListFields():
        if field.name == "external_data":
            locations |= {entry.value for entry in value if entry.key == "location"}
        elif field.message_type is not None:
            for inner in value if hasattr(value, "add") else [value]:
                locations |= _locations(inner)
    return locations


def run_resealed(folder: Path) -> None:
    """The same where every hash is right: what a hostile author can do."""
    manifest = json.loads((folder / "diffbit.json").read_text())
    manifest["files"] = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
        for name in manifest["files"]
    }
    (folder / "diffbit.json").write_text(json.dumps(manifest | {"sha256": json_sha256(manifest)}))
    run(folder)


def run_changed_manifest(folder: Path) -> None:
    """A manifest with another field, and the right hash."""
    try:
        manifest = json.loads((folder / "diffbit.json").read_bytes())
        sealed = json.dumps(manifest | {"sha256": json_sha256(manifest)})
    except (ValueError, TypeError, AttributeError, RecursionError):
        sealed = ""
    if sealed:
        (folder / "diffbit.json").write_text(sealed)
    run(folder)


def scheme(folder: Path) -> None:
    config = Checkpoint(folder.parent / "model").config
    for name in ("scheme.toml", "scheme.json"):
        read = Scheme.from_file(folder / name)
        read.formats(config)
        assert Scheme.from_dict(read.to_dict()) == read


def corpus(folder: Path) -> None:
    for name in ("a.txt", "a.jsonl", "a.parquet"):
        text = load_text(str(folder / name), "train")
        assert all(isinstance(document, str) and document for document in text.documents)
        eval_windows(str(folder / name), folder.parent / "tokenizer", 16, 2, split="calib")


def resume_quantization(folder: Path) -> None:
    _quantize(folder, folder / "out", resume=True)
    assert _content(folder / "out") == _content(folder / "whole"), "another model"
    assert not (folder / "out.unfinished").exists()


def resume_training(folder: Path) -> None:
    trainer_module.require_matplotlib = trainer_module.plot_losses = lambda *_: None  # type: ignore[assignment]  # matplotlib would take most of the time
    train(_options(folder), folder / "out", resume=True)
    mine, whole = _content(folder / "out"), _content(folder / "whole")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert mine[name] == whole[name], "another model"


def _content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@contextmanager
def in_process() -> Iterator[None]:
    """The tokenizer of an artifact is tried in a process of its own: here the case is one."""

    def tried(*_: Any, input: str, **__: Any) -> subprocess.CompletedProcess[str]:
        before = sys.stdin, sys.stdout
        sys.stdin, sys.stdout = io.StringIO(input), io.StringIO()
        try:
            verify_module._try_tokenizer()
            return subprocess.CompletedProcess([], 0, sys.stdout.getvalue())
        finally:
            sys.stdin, sys.stdout = before

    before = verify_module.subprocess
    verify_module.subprocess = type("subprocess", (), {"run": tried, "TimeoutExpired": subprocess.TimeoutExpired})
    try:
        yield
    finally:
        verify_module.subprocess = before


MODEL = {"config.json": damage_json, "model.safetensors": damage_safetensors, "generation_config.json": damage_json}
QUANTIZED = {"config.json": damage_json, "model.safetensors": damage_safetensors}
INDEXED = {
    "model.safetensors.index.json": damage_json, "model-00001-of-00002.safetensors": damage_safetensors,
}  # fmt: skip
TOKENIZER = {"tokenizer.json": damage_json, "tokenizer_config.json": damage_json, "config.json": damage_json}
PIECES = {"tokenizer.model": damage_sentencepiece, "tokenizer_config.json": damage_json}
TEMPLATE = {"chat_template.jinja": damage_text, "tokenizer_config.json": damage_json}
DATA = {"model.onnx.data": damage_bytes, "tokenizer.json": damage_json}
ARTIFACT = DATA | {"model.onnx": damage_bytes, "diffbit.json": damage_json}
SCHEMES = {"scheme.toml": damage_text, "scheme.json": damage_json}
TEXTS = {"a.txt": damage_text, "a.jsonl": damage_jsonl, "a.parquet": damage_bytes}
UNFINISHED = {
    "out.unfinished/run.json": damage_json,
    "out.unfinished/states-00001.safetensors": damage_safetensors,
    **{f"out.unfinished/layer-0000{index}.json": damage_json for index in (0, 1)},
    **{f"out.unfinished/layer-0000{index}.safetensors": damage_safetensors for index in (0, 1)},
}
STEP = "out/checkpoints/step-00000002"
TRAINING = {
    f"{STEP}/training.json": damage_json,
    f"{STEP}/config.json": damage_json,
    f"{STEP}/model.safetensors": damage_safetensors,
    f"{STEP}/optimizer.safetensors": damage_safetensors,
    "out/log.jsonl": damage_jsonl,
    f"{STEP}/tokenizer.json": damage_json,
}
TARGETS = {
    "checkpoint": Target("model", MODEL, quantize, 20),
    "shards": Target("sharded", INDEXED, quantize),
    "quantized": Target("quantized", QUANTIZED, read_quantized, 20),
    "export": Target("quantized", QUANTIZED, export),
    "tokenizer": Target("model", TOKENIZER, tokenize, 30),
    "bpe": Target("pieces/bpe", PIECES, tokenize, 15),
    "unigram": Target("pieces/unigram", PIECES, tokenize),
    "gguf": Target("gguf", {"model.gguf": damage_gguf}, quantize, 15),
    "template": Target("model", TEMPLATE, template),
    "manifest": Target("artifact", {"diffbit.json": damage_json}, run_changed_manifest, 20),
    "artifact": Target("artifact", ARTIFACT, run),
    "graph": Target("artifact", {"model.onnx": damage_graph}, run_resealed, 30),
    "data": Target("artifact", DATA, run_resealed),
    "scheme": Target("scheme", SCHEMES, scheme, 15),
    "corpus": Target("texts", TEXTS, corpus, 15),
    "unfinished": Target("unfinished", UNFINISHED, resume_quantization, 15),
    "training": Target("training", TRAINING, resume_training, 3),
}
