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


def percent(row: Row, key: str = "bandwidth_percent", name: str = "bandwidth") -> str:
    """A share, with its target where that is missed."""
    if key not in row:
        return ""
    target = row["targets"].get(name)
    missed = f" (wanted {target['wanted']:g})" if target and not target["reached"] else ""
    return f"{row[key]:.0f} %{missed}"


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
                    lines.append([shape, r["threads"], r["us"], r["gb_per_s"], percent(r)])
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
            what += [r["gb_per_s"], percent(r)] if one else [r["gops"]]
            lines.append([*what, *(against(r, name) for name in peers), reached(r)])
        end = ["GB/s", "of read"] if one else ["GFLOPS"]
        header = ["cache", "kv pairs", "context", "threads", "us", *end, *(f"vs {name}" for name in peers), "reached"]
        parts.append(f"{title}\n\n" + table(header, lines))
    if chosen := [row for row in rows if row["op"] == "caches"]:
        lines = []
        for r in chosen:
            what = [r["kv"], r["context"], r["threads"], r["us"], r["mb"], r["gb_per_s"], percent(r)]
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


def gpu_tables(abouts: Sequence[Row], rows: Sequence[Row]) -> str:
    """All that gpu.py measured in some commands, and what it could not."""
    lines = []
    for about in {row["command"]: row for row in abouts}.values():
        software = [f"{name} {about[name]}" for name in about if name not in ("date", "card", "command")]
        lines.append(f"- `{about['command']}`, {about['date']}: {about['card']}; {', '.join(software)}")
    parts = ["\n".join(lines)]
    checks = [row for row in rows if "verdict" in row or row["part"] == "check"]
    lines = [f"- {row.get('what') or named(row)}: {row.get('verdict') or row['wrong']}" for row in checks]
    parts += ["\n".join(lines)] if lines else []
    good = [row for row in rows if "wrong" not in row]
    for part, title in GPU_PARTS.items():
        chosen = [row for row in good if row["part"] == part and row not in checks]
        peers = list(dict.fromkeys(name for row in chosen for name in row.get("ratio", ())))
        columns = {key: name for key, name in GPU_COLUMNS.items() if any(key in row for row in chosen)}
        lines = []
        for row in chosen:
            full = {"ratio": {}, "targets": {}} | row
            cells = [percent(full, key, "share") if key == "share_percent" else row.get(key) for key in columns]
            lines.append([*cells, *(against(full, name) for name in peers), reached(full)])
        if lines:
            header = [*columns.values(), *(f"vs {name}" for name in peers), "reached"]
            parts.append(f"{title}\n\n" + table(header, lines))
    wrong = [f"- {named(row)}: {row['wrong']}" for row in rows if "wrong" in row and row not in checks]
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        for name, why in row.get("missing", {}).items():
            reasons.setdefault(why, {})[name] = None
    missing = [f"- {'; '.join(names)}: {why}" for why, names in reasons.items()]
    parts += ["Not measured, or wrong\n\n" + "\n".join([*wrong, *missing])] if wrong or missing else []
    return "\n\n".join(parts) + "\n"


GPU_PARTS = {
    "rates": "What the card can do",
    "decode": "DiffAttention, one token",
    "products": "Low-bit weights",
    "prefill": "DiffAttention, a causal prompt in bf16",
    "training": "Differential attention in torch, forward and backward, bf16",
    "step": "A training step of four blocks, bf16, without the optimizer",
    "model": "1.1 billion parameters on ONNX Runtime",
}
GPU_COLUMNS = {
    "op": "op", "model": "model", "weights": "weights", "how": "how", "kv": "cache", "n": "N", "k": "K", "m": "M",
    "pairs": "pairs", "d": "d", "context": "context", "prompt": "prompt", "copy_gb_per_s": "copy GB/s", "us": "us",
    "gb_per_s": "GB/s", "tflops": "TFLOP/s", "share_percent": "of the bound",
    "decode_tokens_per_s": "decode tok/s", "prefill_tokens_per_s": "prefill tok/s", "model_mib": "MiB",
    "train_tokens_per_s": "tokens/s", "peak_mib": "MiB a step",
}  # fmt: skip


def named(row: Row) -> str:
    """Which row it is, in words."""
    words = [f"{name} {row[key]}" for key, name in GPU_COLUMNS.items() if key in row and key != "us"]
    return ", ".join(map(str, [row["part"], *words, *row.get("case", ())]))


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
