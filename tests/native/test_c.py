"""libdiffbit through its C interface: tokens are those of a Session, of `diffbit run` and of the package tokenizers."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.external_data_helper import ExternalDataInfo
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from diffbit.apps.variants.attention import moh, moh_diff_v1, moh_diff_v2
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.models import Decoder, LayerSpec, ModelConfig, save
from diffbit.models.mlp import swiglu
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint
from diffbit.runtime import Chat, ChatTemplate, Sampler, Session
from diffbit.runtime.chat_form import chat_form, conversation

from ..export.helpers import write_tokenizer
from ..export.test_families import KINDS
from ..models import motif
from ..models.helpers import VOCABULARY, hf_model, saved
from ..models.test_mamba_artifact import CONFIG as MAMBA
from ..models.test_motif import CONFIGS as MOTIFS
from ..models.test_motif import write as write_motif
from ..models.test_phi4flash import WIDE
from ..models.test_phi4flash import write as write_phi
from ..runtime.test_chat_form import FORMS, random_content
from ..runtime.test_template import TOKENS as CHAT_TOKENS
from ..runtime.toy import seal
from .host import ROOT, build_in, skip

NANO = ROOT / "runtime" / "nano"
TOKENS = 24


def built(name: str, *options: str) -> Path:
    """Build libdiffbit and diffbit-c; return the folder where they are."""
    if not shutil.which("cmake") or not shutil.which("c++"):
        skip("needs CMake and a C++ compiler")
    return build_in(name, ["-DDIFFBIT_C=ON", "-DDIFFBIT_CUDA=OFF", *options], "diffbit-c") / "runtime"


@pytest.fixture(scope="module")
def folder() -> Path:
    # kernels of other instruction sets give the same bits (tests/ops), and would take most of the time
    return built("c", *(["-DDIFFBIT_INSTRUCTION_SETS=avx2"] if platform.machine() == "x86_64" else []))


class Message(ctypes.Structure):
    """diffbit_message."""

    _fields_ = [("role", ctypes.c_char_p), ("content", ctypes.c_char_p), ("bytes", ctypes.c_size_t)]


class Model:
    """The functions of diffbit.h that the tests need."""

    def __init__(self, folder: Path, artifact: Path, threads: int = 1) -> None:
        self.library = ctypes.CDLL(str(folder / "libdiffbit.so"))
        pointers = ("open", ctypes.c_void_p), ("error", ctypes.c_char_p), ("logits", ctypes.POINTER(ctypes.c_float))
        for name, kind in pointers:
            getattr(self.library, f"diffbit_{name}").restype = kind
        for name in ("encode", "decode", "chat"):
            getattr(self.library, f"diffbit_{name}").restype = ctypes.c_int64
        error = ctypes.create_string_buffer(512)
        handle = self.library.diffbit_open(str(artifact).encode(), threads, error, ctypes.c_size_t(512))
        assert handle, error.value.decode()
        self.handle = ctypes.c_void_p(handle)

    def close(self) -> None:
        self.library.diffbit_close(self.handle)

    def error(self) -> str:
        text: bytes = self.library.diffbit_error(self.handle)
        return text.decode()

    def encode(self, text: str, special: bool = True) -> list[int]:
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 64))()
        count = self.library.diffbit_encode(
            self.handle, data, ctypes.c_size_t(len(data)), int(special), ids, ctypes.c_size_t(len(ids))
        )
        assert count >= 0, self.error()
        return list(ids[:count])

    def chat(self, messages: list[dict[str, str]], room: int = 1 << 16) -> list[int]:
        """Return the tokens of a conversation. Raises ValueError with the sentence of a refusal."""
        pairs = [(message["role"].encode(), message["content"].encode()) for message in messages]
        array = (Message * max(1, len(pairs)))(*(Message(role, content, len(content)) for role, content in pairs))
        ids = (ctypes.c_int32 * room)()
        count = self.library.diffbit_chat(self.handle, array, ctypes.c_size_t(len(pairs)), ids, ctypes.c_size_t(room))
        if count < 0:
            raise ValueError(self.error())
        return list(ids[:count])

    def decode(self, ids: list[int]) -> str:
        array, text = (ctypes.c_int32 * max(1, len(ids)))(*ids), ctypes.create_string_buffer(1 << 16)
        size = self.library.diffbit_decode(
            self.handle, array, ctypes.c_size_t(len(ids)), text, ctypes.c_size_t(1 << 16)
        )
        return text.raw[:size].decode()

    def prompt(self, ids: list[int]) -> None:
        array = (ctypes.c_int32 * len(ids))(*ids)
        assert self.library.diffbit_prompt(self.handle, array, ctypes.c_size_t(len(ids))) == 0, self.error()

    def logits(self, size: int) -> np.ndarray:
        return np.ctypeslib.as_array(self.library.diffbit_logits(self.handle), (size,)).copy()


@pytest.fixture
def nano(folder: Path) -> Iterator[Model]:
    model = Model(folder, NANO)
    yield model
    model.close()


def run(folder: Path, artifact: Path, prompt: str, *options: object) -> subprocess.CompletedProcess[str]:
    command = [str(folder / "diffbit-c"), str(artifact), prompt, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True)


def greedy(folder: Path, artifact: Path, ids: list[int], count: int) -> list[int]:
    prompt = "@" + " ".join(map(str, ids))
    done = run(folder, artifact, prompt, "--print", "ids", "--temperature", 0, "--max-tokens", count, "--threads", 2)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


NORMS = {
    "SimplifiedLayerNormalization": 1,
    "LayerNormalization": 1,
    "SkipSimplifiedLayerNormalization": 2,
    "SkipLayerNormalization": 2,
}  # the input that is the weight


def with_other_last_bits(artifact: Path, folder: Path, seed: int) -> Path:
    """Return a copy of an artifact in which the weights of all norms are up to one unit in the last place larger or
    smaller: what another order of its sums changes, too."""
    shutil.copytree(artifact, folder)
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    names = {node.input[NORMS[node.op_type]] for node in graph.node if node.op_type in NORMS}
    draw = np.random.default_rng(seed)
    for tensor in graph.initializer:
        if tensor.name not in names or tensor.data_type != TensorProto.FLOAT:
            continue
        place = ExternalDataInfo(tensor)
        shape = (int(np.prod(tensor.dims)),)
        weight = np.memmap(folder / place.location, np.float32, "r+", int(place.offset or 0), shape)
        weight[:] = np.nextafter(weight, weight + draw.integers(-1, 2, shape).astype(np.float32))
        weight.flush()
    return folder


NEXT = (5, 9, 11)  # tokens after a prompt


def every_logit(artifact: Path, ids: list[int]) -> np.ndarray:
    """Return a Session's logits after each of the ids at once, and after the last ones by themselves."""
    session = Session(artifact)
    together = session.prefill([ids], all_positions=True)[0]
    session.reset()
    session.prefill([ids[: -len(NEXT)]])
    return np.concatenate([together, *(session.step([[token]]) for token in ids[-len(NEXT) :])])


def largest_difference(artifact: Path, ids: list[int], folder: Path) -> float:
    """Return how far, at most, the logits after some tokens such as the ids may differ from a Session's.

    libdiffbit sums norms and float products in another order than ONNX Runtime; there are no other differences. In
    floats that changes a logit by 1e-5 of their spread. But an activation that is then rounded to the neighbouring
    integer changes all that follows, more in a deeper model. How much is measured: by the last bits of the norms'
    weights, in Sessions, after each of the ids."""
    logits = every_logit(artifact, ids)
    changed = (with_other_last_bits(artifact, folder / f"bits{seed}", seed) for seed in range(4))
    noise = max(float(np.abs(every_logit(other, ids) - logits).max()) for other in changed)
    rounds_to_half = Session(artifact).artifact.dtype == "fp16"
    return 2 * noise + (1e-2 if rounds_to_half else 1e-4) * float(logits.std())


def check_tokens(artifact: Path, ids: list[int], found: list[int], count: int, most: float) -> None:
    """Compare greedy tokens with a Session's, up to one that ends the text, or to where two are equally likely up to
    the `most` that their logits may differ."""
    session = Session(artifact)
    logits = session.prefill([ids])[0]
    for token in found:
        assert logits.max() - logits[token] <= 2 * most
        if logits.argmax() != token or token in session.artifact.eos_token_ids:
            return
        logits = session.step([[token]])[0]
    assert len(found) == count


def check_logits(folder: Path, artifact: Path, ids: list[int], most: float) -> None:
    """Compare logits with a Session's, after a prompt and after each of some tokens."""
    session, model = Session(artifact), Model(folder, artifact)
    wanted = session.prefill([ids])[0]
    for token in (*NEXT, None):
        model.prompt(ids)
        assert np.abs(model.logits(session.artifact.vocab_size) - wanted).max() <= most
        if token is not None:
            wanted = session.step([[token]])[0]
            ids = [*ids, token]
    model.close()


def test_the_text_is_that_of_diffbit_run(folder: Path) -> None:
    options = ("--temperature", "0", "--max-tokens", "40")
    command = [sys.executable, "-m", "diffbit", "run", str(NANO), "def main(", *options, "--allow-loops", "--quiet"]
    python = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert python.returncode == 0, python.stderr
    assert run(folder, NANO, "def main(", *options).stdout.rstrip("\n") == python.stdout.rstrip("\n")


def test_the_cache_is_reused_and_logits_stay(nano: Model, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(1, 1000, 60).tolist()
    wanted, limit = Session(NANO).prefill([ids])[0], largest_difference(NANO, ids, tmp_path)
    nano.prompt(ids)
    assert np.abs(nano.logits(1024) - wanted).max() <= limit
    nano.prompt([*ids[:40], 5, 6])
    nano.prompt(ids)
    assert np.abs(nano.logits(1024) - wanted).max() <= limit


def test_a_call_can_be_cancelled(nano: Model) -> None:
    nano.library.diffbit_cancel(nano.handle)
    assert nano.library.diffbit_prompt(nano.handle, (ctypes.c_int32 * 1)(5), ctypes.c_size_t(1)) == -1
    assert nano.error() == "the call was cancelled"
    nano.prompt([5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"artifact_version": 5}, "artifact_version is 5, this release reads 4; upgrade diffbit"),
        ({"context_length": 0}, "context_length is not a whole number from 1 to 16777216"),
        ({"files": {}}, "lists no model.onnx; export the model again"),
        ({"cache": {"layers": []}}, "no layer has a cache, so the model would keep nothing of the past"),
    ],
)
def test_a_wrong_manifest_is_one_sentence(
    folder: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    shutil.copytree(NANO, tmp_path / "artifact")
    manifest = json.loads((NANO / "diffbit.json").read_text())
    (tmp_path / "artifact" / "diffbit.json").write_text(json.dumps(manifest | change))
    done = run(folder, tmp_path / "artifact", "a")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"diffbit-c: {tmp_path}/artifact/diffbit.json: {message}\n"


def test_a_file_outside_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(NANO, tmp_path / "artifact")
    (tmp_path / "artifact" / "model.onnx.data").unlink()
    (tmp_path / "artifact" / "model.onnx.data").symlink_to(NANO / "model.onnx.data")
    done = run(folder, tmp_path / "artifact", "a")
    assert done.returncode == 2 and "is a link to a file outside of the folder" in done.stderr


def with_graph(folder: Path, *nodes: onnx.NodeProto, initializers: tuple[onnx.TensorProto, ...] = ()) -> Path:
    """Return a copy of nano whose graph begins with other nodes."""
    shutil.copytree(NANO, folder)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    kept = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *kept])
    model.graph.initializer.extend(initializers)
    return with_file(folder, "model.onnx", model.SerializeToString())


def zeros(name: str, *shape: int, kind: int = TensorProto.FLOAT) -> onnx.TensorProto:
    return (
        helper.make_tensor(name, kind, shape, b"", raw=True)
        if 0 in shape
        else onnx.numpy_helper.from_array(np.zeros(shape, helper.tensor_dtype_to_np_dtype(kind)), name)
    )


def node(
    op: str, *inputs: str, domain: str = "", outputs: tuple[str, ...] = ("odd",), **attributes: Any
) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, domain=domain, **attributes)


HOSTILE = {
    "an axis twice": (
        [node("Transpose", "w", perm=[0, 0])], [zeros("w", 4, 1)], "Transpose takes axis 0 twice",
    ),
    "dimensions whose product overflows": ([], [zeros("w", 0, 1 << 40, 1 << 40)], "w is too large"),
    "an operator without outputs": (
        [node("SiluGate", "w", domain="diffbit", outputs=(), spec_version=1)], [zeros("w", 1, 8)],
        "diffbit.SiluGate has no kernel for inputs and outputs of these types",
    ),
    "an operator whose output is omitted": (
        [node("SiluGate", "w", domain="diffbit", outputs=("",), spec_version=1)], [zeros("w", 1, 8)],
        "diffbit.SiluGate has no kernel for inputs and outputs of these types",
    ),
    "a circle": (
        [node("Relu", "b", outputs=("a",)), node("Relu", "a", outputs=("b",))], [], "nothing computes b",
    ),
    "an output twice": (
        [node("Relu", "w"), node("Relu", "w")], [zeros("w", 4)], "odd is computed twice",
    ),
    "an unknown operator": ([node("Loop", "w")], [zeros("w", 4)], "this runtime has no operator Loop"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_graph_is_refused_in_one_sentence(folder: Path, tmp_path: Path, name: str) -> None:
    nodes, initializers, message = HOSTILE[name]
    artifact = with_graph(tmp_path / "artifact", *nodes, initializers=tuple(initializers))
    done = run(folder, artifact, "a")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and message in done.stderr


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("@x", ("--print", "ids"), 'the prompt is no list of token ids such as "@1 2 3"'),
        ("@1 99999999999", ("--print", "ids"), 'the prompt is no list of token ids such as "@1 2 3"'),
        ("a", ("--max-tokens", "1e30"), '--max-tokens needs a number from 1 to 1.07374e+09, found "1e30"'),
        ("a", ("--top-k", "nan"), '--top-k needs a number from 0 to 1.07374e+09, found "nan"'),
        ("a", ("--threads", "-1"), '--threads needs a number from 0 to 1024, found "-1"'),
        ("a", ("--seed",), '--seed needs a number from -1 to 9.0072e+15, found ""'),
        ("a", ("--print", "text"), '--print needs ids, found "text"'),
        ("a", ("--color", "1"), "there is no option --color; diffbit-c --help lists them"),
    ],
)
def test_a_wrong_option_is_one_sentence(folder: Path, prompt: str, options: tuple[str, ...], message: str) -> None:
    done = run(folder, NANO, prompt, *options)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"diffbit-c: {message}\n")


# ---- tokenizers ----

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
WORDS = [
    "the", "model's", "tokens", "don't", "ＦＵＬＬ", "１２３", "1234567", "3.14", "e\u0301te\u0301", "Größe", "中文",
    "한국어", "\u1100\u1161\u11a8", "👩\u200d👧", "'ſ", "'LL", "\u1e9b\u0323", "\u0345\u0301\u0327", "<|end|>",
    "<tool>", "<0x41>", "▁x", "word",
]  # fmt: skip
GAPS = ["", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", " \n "]


def byte_level(
    *before: pre_tokenizers.PreTokenizer, regex: bool, normalizer: normalizers.Normalizer | None = None
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    steps = [*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        WORDS * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=True), AddedToken("word", single_word=True, lstrip=True)])
    return tokenizer


def of_characters() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    special = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [f"▁{word}" for word in WORDS[:6]] * 3
    tokenizer.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False)
    )
    about = json.loads(tokenizer.to_str())
    about["added_tokens"] = about["added_tokens"][:2]
    tokenizer = Tokenizer.from_str(json.dumps(about))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: byte_level(regex=True),
    "smollm": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), regex=True),
    "llama3": lambda: byte_level(pre_tokenizers.Split(Regex(GPT4), "isolated"), regex=False),
    "qwen2": lambda: byte_level(
        pre_tokenizers.Split(Regex(GPT4.replace("{1,3}", "")), "isolated"), regex=False, normalizer=normalizers.NFC()
    ),
    "llama2": of_characters,
}


def with_file(folder: Path, name: str, content: str | bytes) -> Path:
    """Return a copy of nano with another file."""
    if not folder.exists():
        shutil.copytree(NANO, folder)
    content = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "diffbit.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": "0" * 64}
    (folder / "diffbit.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_are_those_of_the_package_tokenizers(folder: Path, tmp_path: Path, kind: str, count: int) -> None:
    tokenizer = TOKENIZERS[kind]()
    model = Model(folder, with_file(tmp_path / "artifact", "tokenizer.json", tokenizer.to_str()))
    draw = random.Random(1)
    for number in range(count):
        text = ""
        for _ in range(draw.randrange(1, 12)):
            code = draw.choice(
                [draw.randrange(0x20, 0x800), draw.randrange(0x800, 0xD800), draw.randrange(0xE000, 0x110000)]
            )
            text += draw.choice([draw.choice(WORDS), draw.choice(GAPS), chr(code)]) + draw.choice(GAPS)
        special = bool(number % 2)
        ids = tokenizer.encode(text, add_special_tokens=special).ids
        assert model.encode(text, special) == ids, ascii(text)
        some = draw.sample(ids, len(ids) // 2)
        for tokens in (ids, some):
            assert model.decode(tokens) == tokenizer.decode(tokens), (ascii(text), tokens)
    model.close()


def test_an_unknown_part_of_a_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    about = json.loads((NANO / "tokenizer.json").read_text()) | {"pre_tokenizer": {"type": "BertPreTokenizer"}}
    artifact = with_file(tmp_path / "artifact", "tokenizer.json", json.dumps(about))
    done = run(folder, artifact, "a")
    message = "has the pre-tokenizer BertPreTokenizer, which is not known here; pass token ids instead of text"
    assert (done.returncode, done.stderr) == (2, f"diffbit-c: {artifact}/tokenizer.json: {message}\n")


def split_by(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40}}, "a text becomes too long"),
        ({"pre_tokenizer": split_by("a*a*a*a*b")}, "the pattern of a pre-tokenizer takes too long for this text"),
    ],
)  # fmt: skip
def test_a_hostile_tokenizer_takes_little_time_and_memory(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    about = json.loads((NANO / "tokenizer.json").read_text()) | change
    artifact = with_file(tmp_path / "artifact", "tokenizer.json", json.dumps(about))
    done = run(folder, artifact, "a" * 150)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr


# ---- conversations ----


def with_template(folder: Path, name: str) -> tuple[Path, PreTrainedTokenizerFast]:
    """Return a copy of nano that talks in the form of a chat template, and transformers' tokenizer for it."""
    tokenizer = of_characters() if name == "llama2" else byte_level(regex=True)
    marks = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
             "<start_of_turn>", "<end_of_turn>"]  # fmt: skip
    tokenizer.add_special_tokens(marks)
    with_file(folder, "tokenizer.json", tokenizer.to_str())
    source = FORMS[name][0]
    form = chat_form(ChatTemplate(source, name, CHAT_TOKENS))
    assert form is not None
    manifest = json.loads((folder / "diffbit.json").read_text()) | {"chat": asdict(form)}
    (folder / "diffbit.json").write_text(json.dumps(manifest))
    return folder, PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=source, **CHAT_TOKENS)


@pytest.mark.parametrize("name", FORMS)
def test_conversations_are_those_of_transformers(folder: Path, tmp_path: Path, name: str) -> None:
    artifact, tokenizer = with_template(tmp_path / "artifact", name)
    model = Model(folder, artifact)
    draw = random.Random(2)
    for number in range(200):
        contents = [random_content(draw, bool(turn % 2)) for turn in range(draw.choice([1, 3, 5]))]
        system = random_content(draw) if FORMS[name][1] and number % 2 else None
        messages = conversation(*contents, system=system)
        wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert model.chat(messages) == wanted, messages
    assert model.library.diffbit_is_end(model.handle, tokenizer.eos_token_id)
    model.close()


def test_what_is_no_conversation_is_refused(folder: Path, tmp_path: Path) -> None:
    artifact, _ = with_template(tmp_path / "artifact", "gemma")
    model = Model(folder, artifact)
    for roles, message in (
        (["user", "user"], r"message 2 of the conversation has the role user; wanted are .* by turns"),
        (["assistant"], "message 1 of the conversation has the role assistant"),
        (["user", "tool"], "message 2 of the conversation has the role tool"),
        (["user", "assistant"], "the conversation ends with another message than the user's"),
        ([], "the conversation ends with another message than the user's"),
        (["system", "user"], "the model's chat template has no place for a system message"),
    ):
        with pytest.raises(ValueError, match=message):
            model.chat([{"role": role, "content": "a"} for role in roles])
    with pytest.raises(ValueError, match="message 1 of the conversation is empty"):
        model.chat([{"role": "user", "content": " \n"}])
    model.close()
    plain = Model(folder, NANO)
    with pytest.raises(ValueError, match="the model has no chat template, or one that is more than fixed texts"):
        plain.chat([{"role": "user", "content": "a"}])
    plain.close()


def test_a_chat_is_that_of_diffbit_chat(folder: Path, tmp_path: Path) -> None:
    """Also when it no longer fits into the context, and its oldest messages are dropped."""
    artifact, _ = with_template(tmp_path / "artifact", "smollm2")
    (artifact / "chat_template.jinja").write_text(FORMS["smollm2"][0])
    (artifact / "tokenizer_config.json").write_text(json.dumps(CHAT_TOKENS))
    manifest = json.loads((artifact / "diffbit.json").read_text())
    seal(artifact, {key: value for key, value in manifest.items() if key != "files"})
    chat = Chat(Session(artifact), system="S", sampler=Sampler(temperature=0), max_tokens=12, allow_loops=True)
    lines = ["def main(", "return x", "import os"]
    wanted = "".join(chat.send(line).text + "\n" for line in lines)
    command = [folder / "diffbit-c", artifact, "--chat", "--system", "S", "--temperature", "0", "--max-tokens", "12"]
    done = subprocess.run(command, input="\n".join([lines[0], "", *lines[1:]]), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, wanted)


# ---- every variant and format ----

VARIANTS = ("diff_v1", "diff_v2", "softmax")
WEIGHTS = (
    "int4_g32", "int8", "ternary", "int3_g32_s8", "nl4_g32_s8", "int2_g32_s8", "int5_g32_s8", "int6_g32_s8", "int8_g32",
    "int6_g64", "int4_g32_asym", "int4", "int2", "nf4", "fp4", "mxfp4", "nvfp4", "int8_g64_asym", "int4_g16",
    "tcq2_g32_s8", "tcq3_g32_s8", "tcq4_g32_s8", "tcq5_g32_s8", "tcq6_g64_s8",
)  # fmt: skip
CACHES = {
    "int8": AttentionScheme(keys="int8", values="int8"),
    "int4": AttentionScheme(keys="int4", values="int4"),
    "int3": AttentionScheme(keys="int3", values="int3"),
    "int2": AttentionScheme(keys="int2", values="int2"),
    "int4,int2": AttentionScheme(keys="int4", values="int2"),
    "of each layer": AttentionScheme(keys="int3", values="int2", layers=((1, "int8", "fp16"),)),
    "int8 queries": AttentionScheme(qk="int8", keys="int8", values="int4"),
    "int4 queries": AttentionScheme(qk="int4", values="int8"),
}
CASES = {
    **{name: (VARIANTS[number % 3], name, AttentionScheme(), "fp32") for number, name in enumerate(WEIGHTS)},
    **{
        f"{variant} {name}": (variant, "int4_g32", cache, "fp32")
        for variant in VARIANTS
        for name, cache in CACHES.items()
    },
    **{f"{variant} fp16": (variant, None, AttentionScheme(), "fp16") for variant in VARIANTS},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_float_logits_are_those_of_a_session(
    folder: Path, trained: Callable[[str], Path], tmp_path: Path, variant: str
) -> None:
    artifact = export_artifact(trained(variant), tmp_path / "artifact")
    ids = np.random.default_rng(150).integers(1, 1000, 150).tolist()
    spread = float(Session(artifact).prefill([ids])[0].std())
    check_logits(folder, artifact, ids, 1e-4 * spread)
    found = greedy(folder, artifact, ids, TOKENS)
    check_tokens(artifact, ids, found, TOKENS, 1e-4 * spread)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_a_session(
    folder: Path, trained: Callable[[str], Path], tmp_path: Path, case: str
) -> None:
    variant, weights, attention, dtype = CASES[case]
    source = trained(variant)
    if weights is not None:
        table = parse_format("int8")
        scheme = Scheme(weights=parse_format(weights), embedding=table, head=table, attention=attention)
        quantize_checkpoint(source, tmp_path / "low", scheme)
        source = tmp_path / "low"
    artifact = export_artifact(source, tmp_path / "artifact", dtype=dtype)
    ids = np.random.default_rng(150).integers(1, 1000, 150).tolist()
    most = largest_difference(artifact, [*ids, *NEXT], tmp_path)
    check_logits(folder, artifact, ids, most)
    check_tokens(artifact, ids, greedy(folder, artifact, ids, TOKENS), TOKENS, most)


# ---- other families ----


def write_mamba(path: Path) -> Path:
    torch.manual_seed(0)
    decoder = Decoder(MAMBA)
    save(decoder, path)
    write_tokenizer(path, MAMBA.vocab_size)
    return path


def write_moh(path: Path) -> Path:
    """Mixtures of heads, over each variant of the core."""
    torch.manual_seed(0)
    mixers = (
        moh.Options(8, 4, 32, shared_heads=2, top_k=3),
        moh_diff_v1.Options(4, 2, 32, noise_ratio=2, shared_heads=1, top_k=1),
        moh_diff_v2.Options(4, 2, 32, shared_heads=1, top_k=2),
        moh.Options(8, 4, 32, shared_heads=2, top_k=3, router="norm", shared=(1, 6)),
        moh_diff_v1.Options(4, 2, 32, noise_ratio=2, shared_heads=1, top_k=1, router="norm"),
    )
    layers = tuple(LayerSpec(mixer, swiglu.Options(96)) for mixer in mixers)
    decoder = Decoder(ModelConfig(vocab_size=VOCABULARY, hidden_size=64, layers=layers, max_position=64))
    save(decoder, path)
    write_tokenizer(path, VOCABULARY)
    return path


def write_hf(path: Path) -> Path:
    """Write a random model of transformers' whose family is the folder's name."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    saved(hf_model(path.name, **KINDS[path.name], **sizes, **ids), path)
    write_tokenizer(path, VOCABULARY)
    return path


FAMILIES: dict[str, Callable[[Path], Path]] = {
    **{f"motif {name}": lambda path, config=config: write_motif(path, config, motif.weights(config))
       for name, config in MOTIFS.items()},
    "phi4flash": lambda path: write_phi(path, WIDE),
    "mamba": write_mamba,
    "moh": write_moh,
    **dict.fromkeys(KINDS, write_hf),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_other_families_are_those_of_a_session(
    folder: Path, tmp_path: Path, family: str, weights: str
) -> None:
    source = FAMILIES[family](tmp_path / family)
    if weights != "float":
        attention = AttentionScheme(
            keys="int8", values="int8", states="int8" if family in ("mamba", "phi4flash") else None
        )
        quantize_checkpoint(source, tmp_path / "low", Scheme(weights=parse_format(weights), attention=attention))
        source = tmp_path / "low"
    artifact = export_artifact(source, tmp_path / "artifact")
    ids = np.random.default_rng(1).integers(3, 60, 24).tolist()
    spread = float(Session(artifact).prefill([ids])[0].std())
    most = 1e-4 * spread if weights == "float" else largest_difference(artifact, [*ids, *NEXT], tmp_path)
    check_logits(folder, artifact, ids, most)
