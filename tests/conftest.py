"""Small models that several rooms' tests share; made once per test process.

Rooms are imported inside the fixtures, so that the tests of one room run while another is broken.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and tables would be as narrow
os.environ["OMP_NUM_THREADS"] = "1"  # before torch: tests fork, and a child of several threads would wait for ever

import numpy as np
import pytest
import torch

os.fsync = lambda descriptor: None  # tests of what survives a crash put it back; the others need not wait for the disk
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # tests that import onnxruntime themselves

CHROMIUM = Path(
    "/usr/lib/chromium"
)  # Debian's brings Vulkan's loader, and SwiftShader: a driver that computes on the CPU
EXAMPLES = Path(__file__).parents[1] / "examples"
TEXT = """def add(a, b):
    return a + b


class Stack:
    def push(self, item):
        self.items.append(item)
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where there is no NVIDIA card, what needs one is left out, and counted as deselected."""
    from diffbit.io.errors import DiffbitError
    from diffbit.runtime.driver import Driver

    try:
        Driver()
    except (OSError, DiffbitError):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish() -> None:
    """What is imported by now stays: collecting garbage need not visit it each time, nor a fork copy its pages."""
    gc.collect()
    gc.freeze()


def seed(name: str) -> None:
    """What a test draws without a seed of its own is the same in every run, whichever tests ran before it."""
    number = zlib.crc32(name.encode())
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    seed(collector.nodeid)  # of a module, which is imported now


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    seed(f"{fixturedef.argname} {getattr(request, 'param_index', 0)}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    seed(item.nodeid)


@pytest.fixture(autouse=True)
def as_loud_as_before() -> Iterator[None]:
    """A command with --quiet silences its process, which here goes on with other tests."""
    from diffbit.io.progress import is_quiet, set_quiet

    before = is_quiet()
    yield
    set_quiet(before)


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Commands that run a model keep its artifact here, not in the user's cache folder."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def trained() -> Callable[[str], Path]:
    """trained("diff_v1"), also of "softmax", "diff_v2" and "softmax_ternary": the models of examples/pico.

    What holds of trained weights only (the margin of one method over another) is to be tested on them.
    """

    def find(name: str) -> Path:
        path = EXAMPLES / "pico" / name
        assert (path / "model.safetensors").is_file()
        return path

    return find


@pytest.fixture(scope="session")
def webgpu() -> None:
    """Device webgpu is there, in this process and its children. DIFFBIT_REQUIRE_WEBGPU=1 makes what is missing a
    failure."""
    loader, driver = CHROMIUM / "libvulkan.so.1", CHROMIUM / "vk_swiftshader_icd.json"
    if not (find_spec("onnxruntime_ep_webgpu") and loader.is_file() and driver.is_file()):
        why = "needs onnxruntime-ep-webgpu and Debian's chromium"
        pytest.fail(why) if "DIFFBIT_REQUIRE_WEBGPU" in os.environ else pytest.skip(why)
    os.environ |= {"ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1", "VK_ICD_FILENAMES": str(driver)}
    os.environ["LD_LIBRARY_PATH"] = f"{CHROMIUM}:{os.environ.get('LD_LIBRARY_PATH', '')}"  # for children
    ctypes.CDLL(str(loader))  # a library of this name is then found


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DIFF version 1 model with grouped queries, in Hugging Face's layout, with a tokenizer."""
    import torch

    from diffbit.apps.train.new_tokenizer import train_tokenizer
    from diffbit.models import Decoder, ModelConfig, save

    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer([TEXT] * 4, 300, folder / "tokenizer")
    torch.manual_seed(0)
    config = ModelConfig.uniform(
        vocab_size=tokenizer.vocab_size, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
        intermediate_size=128, max_position=128, attention="diff_v1", eos_token_ids=(tokenizer.eos_id,),
        bos_token_id=tokenizer.eos_id,
    )  # fmt: skip
    model = Decoder(config)
    with torch.no_grad():  # far enough from zero that logits differ between tokens
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    save(model, folder / "diff", tokenizer_from=folder / "tokenizer")
    return folder / "diff"


@pytest.fixture(scope="session")
def quantized(checkpoint: Path) -> Path:
    """The same model with int4_g32 weights."""
    from diffbit.formats import parse_format
    from diffbit.quantize import Scheme, quantize_checkpoint

    path = checkpoint.with_name("diff-int4")
    quantize_checkpoint(checkpoint, path, Scheme(weights=parse_format("int4_g32")))
    return path


@pytest.fixture(scope="session")
def artifact(quantized: Path) -> Path:
    """The quantized model's ONNX artifact."""
    from diffbit.export import export_artifact

    return export_artifact(quantized, quantized.with_name("diff-onnx"))
