"""The report: whole, valid, self-contained, escaped; and its sentences say what the numbers say."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from diffbit.apps.evaluate.report import ReportData, render, versions, write_report

from ... import made_up as shared
from . import made_up

INLINE = "data:image/svg+xml;base64,"
VOID = {"meta", "br", "img", "link", "input", "hr"}
EVIL = "<script>alert('x')</script>"


class Page(HTMLParser):
    """Balanced tags, unique ids, no reference that leads outside; the text by tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.alternatives: list[str] = []
        self.cells: list[list[str]] = []
        self.heads: list[list[str]] = []  # those of `cells` that name the columns
        self.headings: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"a handler: {name}"
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src"):
                self.links.append(value or "")
            if name == "alt":
                self.alternatives.append(value or "")
        if tag == "tr":
            self.cells.append([])
            if self.open[-1] == "thead":
                self.heads.append(self.cells[-1])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        if tag == "h2":
            self.headings.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.cells[-1][-1] += data
        if self.open and self.open[-1] == "h2":
            self.headings[-1] += data


def rows_of(page: Page) -> list[dict[str, str]]:
    """Return the rows of all tables, by column."""
    rows, head = [], list[str]()
    for texts in page.cells:
        cells = [text.strip() for text in texts]
        if any(texts is other for other in page.heads):
            head = cells
        else:
            rows.append(dict(zip(head, cells, strict=True)))
    return rows


def everything(name: str = "diff") -> ReportData:
    return ReportData(
        title="Two models",
        comparison=made_up.comparison((name, "plain")),
        outliers=[shared.outliers(name), shared.outliers("plain", 5.0)],
        training={name: {"tokens": 1228800, "eval_loss": 3.0517}},
        quantization={f"{name} at int4_g32": shared.weights(), "plain at int4_g32": shared.weights()},
        artifacts=[
            {
                "name": f"{name}-onnx", "format": "int4_g32", "bytes": 2_500_000, "source_bytes": 10_000_000,
                "parts": [
                    {"name": "integer codes", "bytes": 2_000_000, "weights": 4_000_000},
                    {"name": "graph", "bytes": 500_000, "weights": None},
                ],
            }
        ],
        commands=["diffbit compare a b -o out && echo <done>"],
        versions=versions(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def source() -> str:
    return render(everything())


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


def test_every_part_is_there(page: Page) -> None:
    assert page.headings == [
        "Findings", "Models", "Activation outliers", "Accuracy against bit-width", "Error of each layer", "Artifacts",
        "How this was made",
    ]  # fmt: skip
    assert page.tags.count("img") == 9
    assert "torch" in page.text and "diffbit compare a b -o out && echo <done>" in page.text


def test_nothing_is_loaded_and_every_link_leads_somewhere(source: str, page: Page) -> None:
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    inside, images = ([link for link in page.links if link.startswith(start)] for start in ("#", INLINE))
    assert len(inside) + len(images) == len(page.links)
    assert {link[1:] for link in inside} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    for image in images:
        ElementTree.fromstring(b64decode(image.removeprefix(INLINE), validate=True))
    assert "@import" not in source and "url(" not in source


def test_every_figure_tells_its_numbers(page: Page) -> None:
    assert len(page.alternatives) == 9
    told = " ".join(page.alternatives)
    assert "KL against size. diff-onnx 0.012 nats at 0.425 MB; plain-onnx 0.018 nats at 0.425 MB." in told
    assert "diff, largest: 1 at first, 3 at last, 3 at most" in told
    assert "Weights: increase of perplexity. diff: int8 -0.01%, int4_g64 3.05%, int2_g64 232%" in told
    assert "relative error of outputs in %: at most 6.00%, of model.layers.2.self_attn.q_proj.weight" in told


def test_the_tables_hold_the_numbers(page: Page) -> None:
    rows = [[cell.strip() for cell in row] for row in page.cells]
    assert ["diff", "diff_v1", "1,234,567", "3", "64", "1,228,800", "3.05", "abababababab"] in rows
    assert any(row[:2] == ["plain", "15.0"] and "layer 2, channel 42, token 0" in row[-1] for row in rows)
    tables = rows_of(page)
    four = next(row for row in tables if row.get("Format") == "int4_g64" and row["Model"] == "diff")
    assert four["Perplexity"] == "20.6 [19.6, 21.6]" and four["Increase"] == "+3.05% [+2.72, +3.38%]"
    assert four["Bits/weight"] == "4.25" and four["MB"] == "0.425" and four["What"] == "weights"
    verdicts = [row for row in tables if row.get("Format") == "int4_g64" and row.get("Models") == "plain − diff"]
    assert verdicts[0]["Which loses less?"] == "diff loses less than plain, 5 roundings of each"
    given = next(row for row in tables if row.get("Model") == "diff-onnx")
    assert (given["What"], given["Made of"], given["Format"], given["Method"]) == (
        "artifact",
        "diff",
        "int4_g64",
        "gptq",
    )
    assert ["diff-onnx", "int4_g32", "2.5 MB", "10 MB", "4.00×"] in rows
    assert ["integer codes", "2,000,000", "80.0%", "4,000,000", "4.00"] in rows
    assert ["graph", "500,000", "20.0%", "–", "–"] in rows


def test_what_a_token_costs(page: Page) -> None:
    rows = [[cell.strip() for cell in row] for row in page.cells]
    assert ["diff", "int4_g64", "4.25 MB", "100 kB", "–", "8.00", "1.50", "0.0200"] in rows


def test_findings_say_what_the_intervals_allow(page: Page) -> None:
    findings = page.text[page.text.index("Findings") : page.text.index("The models")]
    assert "+3.05% vs +4.60%" in findings and "diff loses less than plain, 5 roundings of each." in findings
    assert "12.0× vs 60.0×" in findings and "Largest hidden state over the median, diff vs plain" in findings
    assert "4.0× smaller" in findings
    unsure = ReportData(comparison=made_up.comparison(told_apart=False))
    text = Page(render(unsure)).text
    assert "Weights were rounded 5 times" in text and "Quantized layers take their inputs as" in text
    once = Page(render(ReportData(comparison=made_up.comparison(repeats=1, arithmetic="float")))).text
    assert once.count("diff loses less than plain, one rounding of each") > 1
    assert "Weights were rounded once" in once and "take their inputs in float" in once
    told = "not established whether plain or diff loses less, 5 roundings of each"
    assert f"perplexity of diff vs plain; {told}." in text and " loses less than " not in text
    rows = rows_of(Page(render(unsure)))
    verdicts = [row for row in rows if row.get("Format") == "int4_g64" and row.get("Models") == "plain − diff"]
    assert verdicts[0]["Which loses less?"] == told


def test_tiles_have_the_same_side_first() -> None:
    """Also where the second model, or the second artifact, loses less."""
    comparison = made_up.comparison(("large", "small"), folders={"a": 1.0, "b-onnx": 0.5})
    for result in comparison["results"]:
        if result["model"] == "small" and result["what"] == "weights":
            result["ratio"] = made_up.ratio(0.001)
    outliers = [shared.outliers("large", 5.0), shared.outliers("small")]
    page = Page(render(ReportData(comparison=comparison, outliers=outliers)))
    findings = page.text[page.text.index("Findings") : page.text.index("The models")]
    assert "+3.05% vs +0.10%" in findings and "perplexity of large vs small" in findings
    assert "60.0× vs 12.0×" in findings and "over the median, large vs small" in findings
    assert findings.index("KL of large-a") < findings.index("KL of large-b-onnx") < findings.index("KL of small-a")


def test_quantized_models_as_given() -> None:
    """A float model, and what was made of it: rows by folder, and a sentence that says which loses less."""
    comparison = made_up.comparison(("whole",), folders={"rtn": 1.0, "gptq": 0.5, "gptq-onnx": 0.5}, swept=False)
    comparison["results"][1]["format"] = "mix, 4.3 bits"
    page = Page(render(ReportData(comparison=comparison)))
    rows = {row.get("Model") or row.get("Models"): row for row in rows_of(page)}
    given = rows["whole-rtn"]
    assert (given["Format"], given["Method"], given["KL"]) == ("mix, 4.3 bits", "gptq", "0.0120 [0.0108, 0.0132]")
    assert rows["whole-gptq-onnx"]["What"] == "artifact" and rows["whole-rtn"]["What"] == "checkpoint"
    pair = rows["whole-gptq − whole-rtn"]
    assert pair["Difference of KL, nats per token"] == "−0.00600 [−0.00800, −0.00400]"
    assert pair["Which loses less?"] == "whole-gptq loses less than whole-rtn"
    pair = rows["whole-gptq-onnx − whole-gptq"]
    assert pair["Which loses less?"] == "no difference established between whole-gptq-onnx and whole-gptq"
    assert "is rounded from its float checkpoint" not in page.text
    page = Page(render(ReportData(comparison=made_up.comparison(("whole",), folders={"a": 1, "b": 0.5}, swept=False))))
    findings = page.text[page.text.index("Findings") : page.text.index("The models")]
    assert "KL of whole-a from whole" in findings and "whole-b loses 0.00600" in findings


def test_several_methods() -> None:
    comparison = made_up.comparison(methods=("rtn", "gptq", "awq"))
    comparison["skipped"] = [{"model": "diff", "format": "ternary", "method": "awq", "reason": "ternary has no groups"}]
    page = Page(render(ReportData(comparison=comparison)))
    recovered = "Of rtn's loss recovered"
    rows = {(row.get("Format"), row.get("Model"), row.get("Method")): row for row in rows_of(page)}
    gptq = rows["int4_g64", "diff", "gptq"]
    assert gptq["Increase"].startswith("+1.21%") and gptq[recovered] == "60% (55% to 65%)"
    assert rows["int4_g64", "diff", "rtn"][recovered] == "–"
    comparison["results"][2]["recovered"] = {"value": 0.4, "low": -9.57, "high": 0.95}
    again = rows_of(Page(render(ReportData(comparison=comparison))))
    assert [row[recovered] for row in again if row.get(recovered, "")[:3] == "not"] == ["not established"]
    assert rows["int4_g64", None, "gptq"]["Models"] == "plain − diff"
    assert "Weights at int4_g64 by gptq, the best of 3 methods" in page.text
    assert "Weights rounded by rtn, gptq, awq (rtn: to nearest)" in page.text and "128 other windows" in page.text
    assert "Left out, diff by awq: ternary has no groups." in page.text


def test_needles_beside_perplexity() -> None:
    page = Page(render(ReportData(comparison=made_up.comparison(needles=(128, 1024)))))
    names = ["Found, 6:2 of 128", "Found, 6:2 of 1024"]
    rows = [row for row in rows_of(page) if names[0] in row and "KV bytes/token" in row and row["Model"] == "diff"]
    four = next(row for row in rows if row["Format"] == "int4")
    assert four["KV bytes/token"] == "384.0" and {four[name] for name in names} == {"89.7%"}
    assert {four[f"{name}, points"] for name in names} == {"−0.3 [−1.3, +0.7]"}
    whole = next(row for row in rows if row["Format"] == "16")
    assert {whole[name] for name in names} == {"90.0%"} and {whole[f"{name}, points"] for name in names} == {"–"}
    pair = next(row for row in rows_of(page) if row.get("Format") == "int4" and row.get("Models") == "plain − diff")
    assert [pair[f"{name}, points"] for name in names] == ["−1.1 [−1.6, −0.6]"] * 2
    assert "32 rows a setting" in page.text and "KV cache at int4: perplexity of diff vs plain" in page.text
    # of weights, logits and cache: perplexity, KL and two sets; of the artifacts: KL and size
    assert page.tags.count("img") == 3 * (2 + 2) + 1


def test_layer_without_attention_has_no_logits() -> None:
    report = shared.outliers("hybrid")
    report["attention_logits"] = {**report["attention_logits"], "layers": report["attention_logits"]["layers"][1:]}
    rows = [[cell.strip() for cell in row] for row in Page(render(ReportData(outliers=[report]))).cells]
    assert ["hybrid", "0", "0.250", "7.50", "1.00", "42", "–", "–", "–", "–"] in rows
    assert ["hybrid", "1", "0.250", "7.50", "2.00", "42", "0.250", "7.50", "2.00", "42"] in rows


def test_everything_from_outside_is_escaped() -> None:
    data = replace(everything(EVIL), title=EVIL, commands=[EVIL], versions={EVIL: EVIL})
    source = render(data)
    page = Page(source)
    assert "<script" not in source and "<img src=//" not in source
    assert page.text.count(EVIL) > 10  # it is shown, as text


def test_parts_that_are_missing_are_left_out(tmp_path: Path) -> None:
    assert Page(render(ReportData())).headings == []
    one = ReportData(comparison=made_up.comparison(("alone",)))
    page = Page(render(one))
    assert page.headings == ["Findings", "Models", "Accuracy against bit-width"]
    assert "loses more" not in page.text
    unmeasured = ReportData(quantization={"w": shared.weights(measured=False)})
    assert "relative error of weights" in render(unmeasured)
    path = tmp_path / "deep" / "report.html"
    write_report(one, path)
    assert path.read_text().startswith("<!doctype html>")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
