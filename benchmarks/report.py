"""The benchmarks' rows as Markdown tables, which are readable on a terminal too, and their place in a page of docs/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FORMATS = ("ternary", "int4_g32", "int4_g64", "int4_g128")


def table(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Columns padded to the same width; all but the first right-aligned."""
    cells = [list(header), *[["" if cell is None else str(cell) for cell in line] for line in lines]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]

    def joined(line: Sequence[str]) -> str:
        first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        return "| " + " | ".join([first.strip().ljust(widths[0]), *rest]) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([joined(cells[0]), rule, *map(joined, cells[1:])])


def against(row: Row, name: str) -> str:
    """A ratio with its target: "2.1x" reached or without one, "1.2x (wanted 1.5)" missed."""
    if name not in row["ratio"]:
        return ""
    target = row["targets"].get(name)
    missed = f" (wanted {target['wanted']:g})" if target and not target["reached"] else ""
    return f"{row['ratio'][name]:.2f}x{missed}"


def share(row: Row) -> str:
    if "bandwidth_percent" not in row:
        return ""
    target = row["targets"].get("bandwidth")
    missed = f" (wanted {target['wanted']:g})" if target and not target["reached"] else ""
    return f"{row['bandwidth_percent']:.0f} %{missed}"


def reached(row: Row) -> str:
    return ("yes" if all(target["reached"] for target in row["targets"].values()) else "no") if row["targets"] else ""


def kernel_tables(about: Row, rows: Sequence[Row]) -> str:
    """All that kernels.py measured."""
    parts = [
        f"{about['machine']}; ONNX Runtime {about['onnxruntime']}, llama-cpp-python {about['llama_cpp_python']}, "
        f"bitnet.cpp {about['bitnet_cpp']}. Instruction sets: {', '.join(about['instruction_sets'])}. "
        f"`{about['command']}`"
    ]
    if noise := sorted(row["noise"] for row in rows if "noise" in row):
        parts.append(
            f"How quiet the machine was: a contender's median time was at most {noise[len(noise) // 2]:g} times its "
            f"shortest in half of the rows, {noise[-1]:g} times in the worst."
        )
    reads = [row for row in rows if row["op"] == "read"]
    lines = [(r["threads"], r["gb_per_s"], r["one_stream_gb_per_s"], r["streams"], r["prefetch_bytes"]) for r in reads]
    header = ("threads", "read GB/s", "one stream", "streams", "bytes ahead")
    parts.append("Read bandwidth\n\n" + table(header, lines))
    peaks = [row for row in rows if row["op"] == "peak"]
    lines = [(r["isa"], r["threads"], r["int8_gops"], r["fp32_gflops"]) for r in peaks]
    if lines:
        parts.append("Peak rates, in registers\n\n" + table(("set", "threads", "int8 GOPS", "fp32 GFLOPS"), lines))

    for op in FORMATS:
        for title, many in (("one token", False), ("many tokens", True)):
            chosen = [row for row in rows if row["op"] == op and (row["tokens"] > 1) == many]
            if not chosen:
                continue
            peers = list(dict.fromkeys(name for row in chosen for name in row["ratio"]))
            start = ["N x K", "M", "threads", "us", "GOPS"] if many else ["N x K", "threads", "us", "GB/s", "of read"]
            lines = []
            for r in chosen:
                shape = f"{r['n']} x {r['k']}"
                if many:
                    lines.append([shape, r["tokens"], r["threads"], r["us"], r["gops"]])
                else:
                    lines.append([shape, r["threads"], r["us"], r["gb_per_s"], share(r)])
                lines[-1] += [*(against(r, name) for name in peers), reached(r)]
            header = [*start, *(f"vs {name}" for name in peers), "reached"]
            parts.append(f"{op}, {title}\n\n" + table(header, lines))
    for title, one in (("DiffAttention, one token", True), ("DiffAttention, a prompt", False)):
        chosen = [row for row in rows if row["op"].startswith("attention") and (row["tokens"] == 1) == one]
        if not chosen:
            continue
        peers = list(dict.fromkeys(name for row in chosen for name in row["ratio"]))
        lines = []
        for r in chosen:
            what = [r["op"].split()[1], r["kv_pairs"], r["context"], r["threads"], r["us"]]
            what += [r["gb_per_s"], share(r)] if one else [r["gops"]]
            lines.append([*what, *(against(r, name) for name in peers), reached(r)])
        end = ["GB/s", "of read"] if one else ["GFLOPS"]
        header = ["cache", "kv pairs", "context", "threads", "us", *end, *(f"vs {name}" for name in peers), "reached"]
        parts.append(f"{title}\n\n" + table(header, lines))
    if chosen := [row for row in rows if row["op"] == "caches"]:
        lines = []
        for r in chosen:
            what = [r["kv"], r["context"], r["threads"], r["us"], r["mb"], r["gb_per_s"], share(r)]
            lines.append([*what, *(against(r, name) for name in ("fp32", "fp16")), reached(r)])
        header = ["cache", "context", "threads", "us", "MB", "GB/s", "of read", "vs fp32", "vs fp16", "reached"]
        parts.append("DiffAttention, one token, kinds of cache in turn\n\n" + table(header, lines))
    return "\n\n".join(parts) + "\n"


def generate_table(about: Row, rows: Sequence[Row]) -> str:
    """All that generate.py measured."""
    lines = []
    for r in sorted(rows, key=lambda row: row["threads"]):
        r = {"ratio": {}, "targets": {}} | r
        speeds = (f"{r[f'{what}_tokens_per_s']:.1f}" for what in ("decode", "prefill"))
        beside = (against(r, name) for name in ("decode", "prefill", "memory"))
        lines.append([r["model"], r["threads"], *speeds, r["peak_memory_mib"], r["model_mib"], *beside, reached(r)])
    header = ("model", "threads", "decode tok/s", "prefill tok/s", "peak MiB", "on disk MiB", "decode", "prefill",
              "memory", "reached")  # fmt: skip
    return (
        f"{about['machine']}; {about['instruction_set']}, ONNX Runtime {about['onnxruntime']}, llama-cpp-python "
        f"{about['llama_cpp_python']}; {about['new_tokens']} tokens after {about['prompt_tokens']}. "
        f"`{about['command']}`\n\n" + table(header, lines) + "\n"
    )


def command_line(script: str, arguments: Sequence[str]) -> str:
    """The command as another machine would give it: folders by their names in the help."""
    names = {"--llama": "ENV", "--peers": "ENV", "--bitnet": "CHECKOUT", "--work": "DIR"}
    shown = [names.get(before, part) for before, part in zip(["", *arguments], arguments, strict=False)]
    return " ".join(["python", f"benchmarks/{script}", *shown])


def renew(page: Path, name: str, text: str) -> None:
    """Put `text` between the page's comments `<!-- name -->` and `<!-- /name -->`."""
    old = page.read_text()
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if old.count(begin) != 1 or old.count(end) != 1:
        raise SystemExit(f"{page}: wanted one {begin.strip()} and one {end} to put the tables between")
    before, rest = old.split(begin)
    new = before + begin + "\n" + text + "\n" + end + rest.split(end)[1]
    fresh = page.with_suffix(".new")
    fresh.write_text(new)
    fresh.replace(page)
