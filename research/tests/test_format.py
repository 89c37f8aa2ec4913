"""What research/cache/format.py computes, beside the operator's reference and a loop over queries in float64."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from diffbit.apps.convert.write import convert
from diffbit.ops import kv_cache
from diffbit.ops.diff_attention_reference import cached, mixed, scores
from research.tests.scripts import run

ROOT = Path(__file__).parents[2]
PICO = str(ROOT / "examples/pico/softmax")
SCALE, LENGTH, WIDTH = 0.2, 160, 32


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in ("benchmarks", "research/cache"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module("format")


@pytest.fixture
def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys with large channels that stay, and values."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, heads, LENGTH, WIDTH, generator=generator) for heads in (4, 2, 2))
    return query, key + 3 * torch.randn(1, 2, 1, WIDTH, generator=generator), value


def in_float64(
    query: Tensor, key: Tensor, value: Tensor, read: Callable[[int], Tensor], low: tuple[Tensor, Tensor]
) -> Tensor:
    """Attention query by query; read: which tokens a query reads from the rounded rows `low`, bool [T]."""
    out = torch.empty(LENGTH, 4, WIDTH, dtype=torch.float64)
    for place in range(LENGTH):
        coded = read(place)[: place + 1, None]
        for head in range(4):
            keys, values = (
                torch.where(coded, rounded[0, head // 2, : place + 1], exact[0, head // 2, : place + 1]).double()
                for rounded, exact in zip(low, (key, value), strict=True)
            )
            weights = (keys @ query[0, head, place].double() * SCALE).softmax(-1)
            out[place, head] = weights @ values
    return out[None]


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_the_first_row_is_the_operators_cache(
    bits: int, study: ModuleType, rows: tuple[Tensor, Tensor, Tensor]
) -> None:
    query, key, value = rows
    format = study.replace(study.AS_IT_IS, keys=bits, values=bits)
    out = study.attention(format)(None, query, key, value, None, SCALE)[0]

    turned = [kv_cache.rotate(x).half().float() for x in (key, value)]
    offset = kv_cache.offset_of(turned[0].half()).float().unsqueeze(2)
    low = []
    for x, less in zip(turned, (offset, 0.0), strict=True):
        codes, scale = kv_cache.encode_rows(x - less, bits)
        low.append(kv_cache.levels_of(codes, bits) * scale.float()[..., None] + less)
    token = torch.arange(LENGTH)

    def read(place: int) -> Tensor:
        return (token >= 4) & (token < max(0, place + 1 - 32) // 32 * 32)

    slow = in_float64(kv_cache.rotate(query), *turned, read, (low[0], low[1]))
    torch.testing.assert_close(out.double(), kv_cache.rotate(slow), rtol=1e-4, atol=1e-5)

    keys, values = (cached(x, LENGTH, f"int{bits}", 32, 4, x is key) for x in (key, value))
    logits = scores((query * SCALE).unflatten(1, (2, 2)), keys, 0)
    logits = logits.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    operators = mixed(logits.softmax(-1), values.grouped(2, 1)).squeeze(-2).flatten(1, 2).transpose(1, 2)
    torch.testing.assert_close(out, operators, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "window", "first"), [("window 8", 8, 4), ("first 16", 32, 16), ("no offset", 32, 4)])
def test_other_rows(name: str, window: int, first: int, study: ModuleType, rows: tuple[Tensor, Tensor, Tensor]) -> None:
    (format,) = (row for row in study.ROWS if row.name == name)
    out = study.attention(format)(None, *rows, None, SCALE)[0]
    kinds = [cached(x, LENGTH, "int4", window, first, x is rows[1] and bool(format.offset)) for x in rows[1:]]
    logits = scores((rows[0] * SCALE).unflatten(1, (2, 2)), kinds[0], 0)
    logits = logits.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    expected = mixed(logits.softmax(-1), kinds[1].grouped(2, 1)).squeeze(-2).flatten(1, 2).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_int8_and_float_rows(study: ModuleType, rows: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value = rows
    low = []
    for x in (key, value):
        scale = (x.abs().amax(-1, keepdim=True) / 127).half().float()
        low.append((x / scale).round().clamp(-127, 127) * scale)
    for format, coded in ((study.ROWS[-1], True), (None, False)):
        out = study.attention(format)(None, query, key, value, None, SCALE)[0]
        slow = in_float64(query, key, value, lambda _, c=coded: torch.full((LENGTH,), c), (low[0], low[1]))  # type: ignore[misc]
        torch.testing.assert_close(out.double(), slow, rtol=1e-4, atol=1e-5)


def test_table(tmp_path: Path) -> None:
    page, numbers, text = tmp_path / "page.md", tmp_path / "rows.json", tmp_path / "text.txt"
    page.write_text("<!-- format -->\n<!-- /format -->\n")
    text.write_text("def add(a, b):\n    return a + b\n" * 40)
    arguments = (PICO, "--text", str(text), "--quick")
    done = run("format.py", *arguments, "--json", str(numbers), "--markdown", str(page))
    assert done.code == 0, done.error
    first, second = json.loads(numbers.read_text())["rows"]
    assert first["name"] == "as it is" and all(kl > 0 for kl in first["kl"] + second["kl"])
    assert "| window 0 |" in page.read_text()
    done = run("format.py", *arguments, "--heads")
    assert done.code == 0 and done.output.startswith("Of 8 heads "), done.error
    text.write_text("short")
    done = run("format.py", *arguments)
    assert done.code == 2 and "tokens, wanted at least 96, a window" in done.error
    done = run("format.py", PICO, "--text", str(tmp_path / "none.txt"))
    assert done.code == 2 and "none.txt does not exist" in done.error


def test_contexts(tmp_path: Path) -> None:
    """The plain model in Transformers and its conversion in diffbit have the same cache, and so the same KL."""
    page, numbers, text = tmp_path / "page.md", tmp_path / "rows.json", tmp_path / "text.txt"
    page.write_text("".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in ("contexts", "conversion")))
    text.write_text("def add(a, b):\n    return a + b\n" * 40)
    copy = convert(PICO, tmp_path / "copy")
    arguments = [PICO, "--work", str(tmp_path / "work"), "--texts", f"python={text}", "--quick"]
    outputs = ["--json", str(numbers), "--markdown", str(page)]
    done = run("contexts.py", *arguments, "--differential", str(copy), *outputs)
    assert done.code == 0, done.error
    parts = json.loads(numbers.read_text())
    plain, converted = parts["python-96-diffbit"], parts["python-96-converted"]
    for cache in ("int8", "int4"):
        assert converted[cache]["kl"] == pytest.approx(plain[cache]["kl"], rel=0.02)
    ratio = sum(converted["int4"]["kl"]) / sum(plain["int4"]["kl"])
    assert "| 96 | int4 | 4.25 |" in page.read_text() and f"| 96 | int4 | {ratio:.4f} |" in page.read_text()
    done = run("contexts.py", *arguments[:-1], "--contexts", "512", "--windows", "1", "2")
    assert done.code == 2 and "wanted a number of --windows" in done.error
