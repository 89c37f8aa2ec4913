"""The null test: a converted model and its original agree through every path that there is, to the bit (float16
artifacts apart).

A pair of a converted model has the same query twice, so its rows of q_proj, its softmax and its product with the
values are computed twice, partly by other operators than the original's, and subtracted: 2 (a - a/2) = a. Every
rounding on the way, of weights, activations, queries or the cache, sees the same numbers, or the same times a power of
two. So any difference is a bug in one of the two models.

DIFFBIT_NULL_MODEL=MODEL takes another model than the small ones here (`make null-test`: SmolLM2), and lists what was
found (conftest.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diffbit
from diffbit import models
from diffbit.apps.web.site import write_site
from diffbit.calib_data import load_text, load_tokenizer, windows
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint, Decoder, ModelConfig
from diffbit.models.attention import AttentionOptions
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint, read_weight
from diffbit.quantize.methods import parse_recipe
from diffbit.runtime import Session
from diffbit.runtime.native import instruction_sets

from ...export.helpers import write_tokenizer
from ..serve.test_serve import client, served
from ..web.modules import module
from ..web.test_site import MODULES, READY, drive, evaluate
from ..web.test_transformers_js import PAGE, RUN

Logits = np.ndarray[Any, np.dtype[np.float32]]
Record = Callable[[str, object], None]

GIVEN = os.environ.get("DIFFBIT_NULL_MODEL")
MODELS = ("given",) if GIVEN else ("trained", "odd")
FORMATS = ("int8", "int6_g64", "int4_g32", "int4_g32_asym", "int3_g64", "int2_g64", "nf4", "mxfp4", "ternary")
RECIPES = ("gptq", "rotate+gptq", "hqq", "awq", "learned:3")
# awq and learned count the two queries of a pair twice where they weigh projections that share an input; hqq's penalty
# beta has the unit of a weight, so that a doubled o_proj is rounded otherwise
INEXACT = ("awq", "learned:3", "hqq")
CACHES = {
    "int8": AttentionScheme(keys="int8", values="int8"),
    "int4": AttentionScheme(keys="int4", values="int4"),
    "int4, no window": AttentionScheme(keys="int4", values="int4", window=0),
    "int3": AttentionScheme(keys="int3", values="int3"),
    "int3 keys, int2 values": AttentionScheme(keys="int3", values="int2"),
    "int4, no first tokens": AttentionScheme(keys="int4", values="int4", first=0),
    "int2": AttentionScheme(keys="int2", values="int2"),
    "int2, no window": AttentionScheme(keys="int2", values="int2", window=0),
    "fp16": AttentionScheme(keys="fp16", values="fp16"),
    "int8, int8 queries": AttentionScheme(qk="int8", keys="int8", values="int8"),
    "int4, int4 queries": AttentionScheme(qk="int4", keys="int4", values="int4", window=0),
}
PROMPT, STEPS = 40, 12


def few(names: Iterable[str], quick: str) -> list[Any]:
    """Parameters of a test, all of which but one are left out of the quick tests."""
    return [pytest.param(name, marks=[] if name == quick else pytest.mark.slow) for name in names]


def odd(folder: Path) -> Path:
    """What pico's plain model lacks: biases, norms of queries and keys, a window, a head of its own, three queries to a
    key, an outlier among the values."""
    config = ModelConfig.uniform(
        vocab_size=331, hidden_size=192, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=32, intermediate_size=320,
        max_position=96, qkv_bias=True, o_bias=True, qk_norm_eps=1e-5,
    )  # fmt: skip
    first, second, third = config.layers
    window = replace(second, mixer=replace(second.mixer, sliding_window=17))
    torch.manual_seed(3)
    decoder = Decoder(replace(config, layers=(first, window, third)))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(5) if parameter.dim() == 2 else parameter.add_(0.3 * torch.randn_like(parameter))
        decoder.model.layers[0].self_attn.v_proj.weight[5] *= 20
    models.save(decoder, folder)
    write_tokenizer(folder, config.vocab_size)
    return folder


class Pair:
    """A plain model, its conversion, and what is made of both."""

    def __init__(self, plain: Path, work: Path) -> None:
        self.work, self.paths = work, {"plain": plain, "diff": diffbit.convert(plain, work / "diff")}
        self.config = Checkpoint(plain).config
        self.ids = np.random.default_rng(0).integers(3, self.config.vocab_size, (3, PROMPT + STEPS))
        self._artifacts: dict[str, dict[str, Path]] = {}

    def quantized(self, scheme: Scheme, method: str = "rtn") -> dict[str, Path]:
        """Both, quantized."""
        folders = {}
        tokens = np.random.default_rng(1).integers(3, self.config.vocab_size, (8, 64))
        text = {"calibration": tokens} if parse_recipe(method).calibrated else {}
        for name, path in self.paths.items():
            folders[name] = self.work / f"{name}-quantized"
            quantize_checkpoint(path, folders[name], scheme, method=method, **text, overwrite=True)
        return folders

    def artifacts(self, scheme: Scheme | None = None, method: str = "rtn", **options: Any) -> dict[str, Path]:
        key = f"{scheme} {method} {options}"
        if key not in self._artifacts:
            checkpoints = self.paths if scheme is None else self.quantized(scheme, method)
            folder = self.work / str(len(self._artifacts))
            self._artifacts[key] = {
                name: export_artifact(path, folder / name, context_length=64, **options)
                for name, path in checkpoints.items()
            }
        return self._artifacts[key]


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    work = tmp_path_factory.mktemp("null")
    if request.param == "odd":
        return Pair(odd(work / "plain"), work)
    return Pair(Path(GIVEN) if GIVEN else trained("softmax"), work)


with_text = pytest.mark.parametrize("pair", MODELS[:1], indirect=True)  # for what needs a tokenizer


def one_row(session: Session, ids: np.ndarray) -> Logits:
    """Logits of a prompt in two pieces, then of single tokens."""
    logits = [session.prefill(ids[:1, : PROMPT // 2]), session.prefill(ids[:1, PROMPT // 2 : PROMPT])]
    logits += [session.step(ids[:1, at : at + 1]) for at in range(PROMPT, PROMPT + STEPS)]
    return np.concatenate(logits)


def padded_rows(session: Session, ids: np.ndarray) -> Logits:
    """Logits of rows of three lengths; [] where the cache does not allow them."""
    mask = np.ones((len(ids), PROMPT), np.int64)
    mask[1, -7:] = mask[2, :19] = 0
    try:
        logits = [session.prefill(ids[:, :PROMPT], attention_mask=mask)]
        logits += [session.step(ids[:, at : at + 1]) for at in range(PROMPT, PROMPT + STEPS)]
    except DiffbitError as error:
        assert "rows of unequal length" in str(error)
        return np.zeros((0, 1), np.float32)
    return np.concatenate(logits)


def check(plain: Logits, diff: Logits, record: Record) -> None:
    assert plain.shape == diff.shape and plain.std() > 0.1  # a model whose logits are alike would prove nothing
    record("difference", f"{np.abs(plain - diff).max() / plain.std():.3g}")
    np.testing.assert_array_equal(plain, diff)


def check_artifacts(artifacts: dict[str, Path], ids: np.ndarray, record: Record) -> None:
    for native in (True, False):
        logits = {}
        for name, path in artifacts.items():
            session = Session(path, threads=1, native=native)
            rows = one_row(session, ids)
            session.reset()
            logits[name] = np.concatenate([rows, padded_rows(session, ids).reshape(-1, rows.shape[1])])
        check(logits["plain"], logits["diff"], record)


def test_torch_gives_the_same(pair: Pair, record_property: Record) -> None:
    ids, mask = torch.from_numpy(pair.ids[:, :PROMPT]), torch.ones(3, PROMPT, dtype=torch.int64)
    mask[1, :7] = 0
    with torch.inference_mode():
        logits = {name: models.load(path)(ids, attention_mask=mask).numpy() for name, path in pair.paths.items()}
    check(logits["plain"], logits["diff"], record_property)


@with_text
def test_rotated_start_is_near(pair: Pair, tmp_path: Path, record_property: Record) -> None:
    """Not a null test: how far the other start is from the plain model on text, in nats per token."""
    tokenizer = load_tokenizer(pair.paths["diff"])
    tokens = tokenizer.encode(load_text("mix", "eval").documents)
    ids = torch.as_tensor(windows(tokens, 128, eos_id=tokenizer.eos_id, max_windows=16).ids)
    rotated = diffbit.convert(pair.paths["plain"], tmp_path / "rotated", start="rotated")
    with torch.inference_mode():
        exact, near = (models.load(path)(ids).log_softmax(-1) for path in (pair.paths["plain"], rotated))
    divergence = float((exact.exp() * (exact - near)).sum(-1)[:, :-1].mean())
    record_property("difference", f"{divergence:.2g} nats")
    assert 0 < divergence < 0.01


def test_float_artifacts_give_the_same(pair: Pair, record_property: Record) -> None:
    check_artifacts(pair.artifacts(), pair.ids, record_property)


def test_float16_artifacts_give_the_same(pair: Pair, record_property: Record) -> None:
    """ONNX Runtime computes float16 in float32, and where it rounds depends on the graph: the two differ by no more
    than rounding to float16 changes the plain one."""
    exact, logits = one_row(Session(pair.artifacts()["plain"], threads=1), pair.ids), {}
    for native in (True, False):
        for name, path in pair.artifacts(dtype="fp16").items():
            logits[name] = one_row(Session(path, threads=1, native=native), pair.ids)
        difference = np.abs(logits["plain"] - logits["diff"])
        record_property("difference", f"{difference.max() / exact.std():.3g}")
        assert difference.max() <= 2 * np.abs(logits["plain"] - exact).max()


@pytest.mark.parametrize("format", few(FORMATS, "int4_g32"))
def test_quantized_weights_give_the_same(pair: Pair, format: str, record_property: Record) -> None:
    """Both rows of a pair get the same codes, o_proj the same with a doubled scale; logits are equal."""
    scheme = Scheme(weights=parse_format(format))
    pairs = {name: Checkpoint(path) for name, path in pair.quantized(scheme).items()}
    for index, layer in enumerate(pair.config.layers):
        assert isinstance(layer.mixer, AttentionOptions)
        prefix, width = f"model.layers.{index}.self_attn", layer.mixer.head_dim
        query = {name: read_weight(one, f"{prefix}.q_proj.weight").dequantize() for name, one in pairs.items()}
        both = query["diff"].unflatten(0, (-1, 2, width))
        assert torch.equal(both[:, 0], both[:, 1]) and torch.equal(both[:, 0].flatten(0, 1), query["plain"])
        output = {name: read_weight(one, f"{prefix}.o_proj.weight").dequantize() for name, one in pairs.items()}
        assert torch.equal(output["diff"], 2 * output["plain"])
    check_artifacts(pair.artifacts(scheme), pair.ids, record_property)


@pytest.mark.parametrize("recipe", few(RECIPES, "gptq"))
def test_methods_give_the_same(pair: Pair, recipe: str, record_property: Record) -> None:
    artifacts = pair.artifacts(Scheme(weights=parse_format("int4_g32")), recipe)
    if recipe not in INEXACT:
        return check_artifacts(artifacts, pair.ids, record_property)
    float_logits = one_row(Session(pair.artifacts()["plain"], threads=1), pair.ids)
    logits_of = {name: one_row(Session(path, threads=1), pair.ids) for name, path in artifacts.items()}
    errors = {name: float(np.square(logits - float_logits).mean()) for name, logits in logits_of.items()}
    record_property("difference", f"{np.abs(logits_of['plain'] - logits_of['diff']).max() / float_logits.std():.3g}")
    assert 0.5 < errors["diff"] / errors["plain"] < 2, errors  # the noise of a method, not of a bug


@pytest.mark.parametrize("cache", few(CACHES, "int4"))
def test_low_bit_caches_give_the_same(pair: Pair, cache: str, record_property: Record) -> None:
    check_artifacts(pair.artifacts(Scheme(attention=CACHES[cache])), pair.ids, record_property)


SCRIPT = """
import sys, numpy as np
from pathlib import Path
sys.path[:0] = {path!r}
from tests.apps.convert.test_null import Session, one_row
ids = np.load(sys.argv[1])
np.savez(sys.argv[2], **{{str(i): one_row(Session(path, threads=2), ids) for i, path in enumerate(sys.argv[3:])}})
"""


SOME = [("int4_g32", "int8"), ("ternary", "int4"), ("int8", "int8, int8 queries")]


@pytest.mark.slow
@pytest.mark.parametrize("isa", instruction_sets())
def test_instruction_sets_give_the_same(pair: Pair, isa: str, tmp_path: Path, record_property: Record) -> None:
    """int4 weights with low-bit caches, on two threads; ARM's are in tests/native/test_arm64.py."""
    schemes = [Scheme(parse_format(weights), attention=CACHES[cache]) for weights, cache in SOME]
    artifacts = [pair.artifacts(scheme)[name] for scheme in schemes for name in ("plain", "diff")]
    np.save(tmp_path / "ids.npy", pair.ids)
    code = SCRIPT.format(path=[entry or os.getcwd() for entry in sys.path])
    command = [
        sys.executable,
        "-c",
        code,
        str(tmp_path / "ids.npy"),
        str(tmp_path / "logits.npz"),
        *map(str, artifacts),
    ]
    done = subprocess.run(command, env=os.environ | {"DIFFBIT_ISA": isa}, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    logits = np.load(tmp_path / "logits.npz")
    for i in range(0, len(artifacts), 2):
        check(logits[str(i)], logits[str(i + 1)], record_property)


@with_text
@pytest.mark.slow
def test_the_server_writes_the_same(pair: Pair, record_property: Record) -> None:
    """Texts that begin while others are written, of different lengths."""
    scheme = Scheme(parse_format("int4_g32"), attention=CACHES["int8"])
    prompts = ["def add(", "class Stack:\n    def", "import os\nimport", "x", "for i in range(10):\n    print(i"]

    def texts(path: Path) -> list[str]:
        with served(path, rows=3) as address, ThreadPoolExecutor(5) as pool:

            def ask(prompt: str) -> str:
                options: Any = {"max_tokens": 12 + len(prompt), "temperature": 0}
                return str(
                    client(address).completions.create(model=path.name, prompt=prompt, **options).choices[0].text
                )

            return list(pool.map(ask, prompts))

    answers = {name: texts(path) for name, path in pair.artifacts(scheme).items()}
    record_property("difference", "same texts" if answers["plain"] == answers["diff"] else "other texts")
    assert answers["plain"] == answers["diff"] and any(answers["plain"])


@with_text
@pytest.mark.slow
def test_genai_writes_the_same(pair: Pair, record_property: Record) -> None:
    og = pytest.importorskip("onnxruntime_genai")

    def generated(path: Path) -> list[int]:
        model = og.Model(str(path))
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=32, min_length=32, do_sample=False)
        generator = og.Generator(model, params)
        generator.append_tokens(pair.ids[:1, :9].astype(np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [int(token) for token in generator.get_sequence(0)]

    for library in (False, True):
        tokens = {
            name: generated(path)
            for name, path in pair.artifacts(Scheme(parse_format("int4_g32")), library=library).items()
        }
        record_property("difference", "same tokens" if tokens["plain"] == tokens["diff"] else "other tokens")
        assert tokens["plain"] == tokens["diff"]


@with_text
@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
def test_the_page_writes_the_same(pair: Pair, tmp_path: Path, record_property: Record) -> None:
    module()
    tokens = {}
    for name, path in pair.artifacts(Scheme(parse_format("int4_g32"))).items():
        write_site(path, tmp_path / name, packages=MODULES)
        tokens[name] = drive(tmp_path / name, ("ask", "def __init__(self"), ("ask", "import é😀 "))["answers"]
    record_property("difference", "same tokens" if tokens["plain"] == tokens["diff"] else "other tokens")
    assert tokens["plain"] == tokens["diff"] and all(tokens["plain"])


@with_text
@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="needs Chromium, Node.js and tests/apps/web/node_modules")
def test_transformers_js_writes_the_same(pair: Pair, record_property: Record) -> None:
    tokens = {}
    for name, path in pair.artifacts(layout="transformers.js").items():
        site = pair.work / f"js-{name}"
        shutil.copytree(path, site / "model")
        (site / "index.html").write_text(PAGE)
        (site / "lib").symlink_to(MODULES)
        tokens[name] = evaluate(site, RUN, ["def f("], 24)
    record_property("difference", "same tokens" if tokens["plain"] == tokens["diff"] else "other tokens")
    assert tokens["plain"] == tokens["diff"]


def test_a_difference_is_seen(pair: Pair, tmp_path: Path) -> None:
    """One number of one noise query that is off by a thousandth shows."""
    decoder = models.load(pair.paths["diff"])
    with torch.no_grad():
        decoder.model.layers[0].self_attn.q_proj.weight[pair.config.layers[0].mixer.head_dim] *= 1.001
    models.save(decoder, tmp_path / "diff", tokenizer_from=pair.paths["diff"])
    artifacts = {"plain": pair.artifacts()["plain"], "diff": export_artifact(tmp_path / "diff", tmp_path / "onnx")}
    with pytest.raises(AssertionError):
        check_artifacts(artifacts, pair.ids, lambda name, value: None)
