"""The benchmarks' rows as Markdown tables, which are readable on a terminal too, and their place in a page.

A row is a flat dictionary. `us` is our time, `share_percent` the share of it that a bound is, `ratio` how many times
better we are than each peer, `targets` what of these was wanted and whether it was reached, `missing` the peers that
could not be measured and why, `wrong` why the row itself was not.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
WIDE = 26  # characters


def table(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Columns padded to the same width, at most WIDE; all but the first right-aligned."""
    cells = [list(header), *[["" if cell is None else str(cell) for cell in line] for line in lines]]
    widths = [min(WIDE, max(len(line[i]) for line in cells)) for i in range(len(header))]

    def joined(line: Sequence[str]) -> str:
        first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        return "| " + " | ".join([first.strip().ljust(widths[0]), *rest]) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([joined(cells[0]), rule, *map(joined, cells[1:])])


# ---- rows that are timed --------------------------------------------------------------------------------------------


def judged(row: Row, us: float, others: Mapping[str, float], bound: float, goals: Mapping[str, float]) -> Row:
    """`row` with our time, what share of it the bound is, the ratios to `others`, and which targets are reached."""
    row["us"] = round(us, 2)
    if math.isfinite(bound):
        row["bound_us"], row["share_percent"] = round(bound, 2), round(100 * bound / us, 1)
    row["peers_us"] = {name: round(other, 2) for name, other in others.items()}
    row["ratio"] = {name: round(other / us, 2) for name, other in others.items()}
    return row | {"targets": targets(row["ratio"] | {"share": row.get("share_percent", 0.0)}, goals)}


def targets(ratios: Mapping[str, float], goals: Mapping[str, float]) -> dict[str, Row]:
    return {
        name: {"wanted": least, "reached": ratios[name] >= least} for name, least in goals.items() if name in ratios
    }


def row_table(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """A line a row: of `columns`, key -> title, those that some row has; ratios; whether all targets are reached."""
    peers = list(dict.fromkeys(name for row in rows for name in row.get("ratio", ())))
    columns = {key: title for key, title in columns.items() if any(key in row for row in rows)}
    lines = []
    for row in rows:
        goals = row.get("targets", {})
        missed = {name: f" (wanted {goal['wanted']:g})" for name, goal in goals.items() if not goal["reached"]}
        cells = [row.get(key) for key in columns]
        if "share_percent" in row:
            cells[list(columns).index("share_percent")] = f"{row['share_percent']:.0f} %{missed.get('share', '')}"
        ratios = row.get("ratio", {})
        cells += [f"{ratios[name]:.2f}x{missed.get(name, '')}" if name in ratios else "" for name in peers]
        lines.append([*cells, ("no" if missed else "yes") if goals else ""])
    return table([*columns.values(), *(f"vs {name}" for name in peers), "reached"], lines)


def left_out(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """What was not measured, or is wrong, and why; empty where all is well."""

    def named(row: Row) -> str:
        words = [f"{title} {row[key]}" for key, title in columns.items() if key in row and key != "us"]
        return ", ".join(map(str, [row.get("part", row.get("op")), *words, *row.get("case", ())]))

    lines = [f"- {named(row)}: {row['wrong']}" for row in rows if "wrong" in row]
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        for name, why in row.get("missing", {}).items():
            reasons.setdefault(why, {})[name] = None
    lines += [f"- {'; '.join(names)}: {why}" for why, names in reasons.items()]
    return "Not measured, or wrong\n\n" + "\n".join(lines) if lines else ""


# ---- estimates ------------------------------------------------------------------------------------------------------


def percent(value: float, digits: int = 2) -> str:
    return f"{100 * value:z.{digits}f} %".replace("-", "−")


def nats(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def interval(estimate: Row | None, show: Callable[[float], str]) -> str:
    """value [low, high]; empty where there is none."""
    if estimate is None:
        return ""
    value, low, high = (show(estimate[end]) for end in ("value", "low", "high"))
    return f"{value} [{low.removesuffix(' %')}, {high.removesuffix(' %')}]"


def share(estimate: Row | None) -> str:
    """Of a loss, in percent, if its interval establishes it."""
    from diffbit.apps.evaluate.metrics import established  # with torch, which most tables do without

    if estimate is not None and not established(**estimate):
        return "not established"
    return interval(estimate, lambda value: percent(value, 0))


def increase(ratio: Row | None) -> str:
    """Of perplexity, by the ratio of two."""
    digits = 2 if ratio is not None and ratio["value"] < 1.1 else 1
    return interval(ratio, lambda value: percent(value - 1, digits))


def verdict(name: str, difference: Row) -> str:
    if difference["low"] <= 0 <= difference["high"]:
        return "no difference established"
    return f"{name} loses {'less' if difference['value'] < 0 else 'more'}"


# ---- files ----------------------------------------------------------------------------------------------------------


def command_line(script: str, arguments: Sequence[str]) -> str:
    """The command as another machine would give it: folders by their names in the help. script: its `__file__`."""
    names = {"--llama": "ENV", "--ik": "ENV", "--work": "DIR", "--out": "OUT", "--wikitext": "FILE", "--json": "FILE",
             "--library": "FILE"}  # fmt: skip
    pairs = list(zip(["", *arguments], arguments, strict=False))
    shown = [f"{part.split('=')[0]}=ENV" if before == "--peer" else names.get(before, part) for before, part in pairs]
    return shlex.join(["python", str(Path(script).resolve().relative_to(ROOT)), *shown])


def say(**message: Any) -> None:
    """A line of JSON on stdout, at once."""
    print(json.dumps(message), flush=True)


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def add_outputs(parser: argparse.ArgumentParser, page: str) -> None:
    """Options for `write_outputs`; page: the one that has the tables, from the root of the repository."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--markdown", type=Path, nargs="?", const=ROOT / page, metavar="FILE",
                        help=f"renew the tables of this page (default: {page})")  # fmt: skip


def write_outputs(arguments: argparse.Namespace, numbers: Any, tables: Mapping[str, str]) -> None:
    """Where they are wanted: the numbers as JSON, the tables in a page, each at its name. Nothing is written where the
    page has no place for one."""
    page: Path | None = arguments.markdown
    text = renewed(page, tables) if page else ""
    if arguments.json:
        write_json(arguments.json, numbers)
    if page:
        replace(page, text)


def renew(page: Path, name: str, text: str) -> None:
    """Put one table in a page, at its name."""
    replace(page, renewed(page, {name: text}))


def renewed(page: Path, tables: Mapping[str, str]) -> str:
    """The page with each table between its comments `<!-- name -->` and `<!-- /name -->`, not padded."""
    whole = page.read_text()
    for name, text in tables.items():
        text = re.sub(
            r"^\|.*", lambda row: re.sub("-{4,}", "---", re.sub(" {2,}", " ", row[0])), text, flags=re.MULTILINE
        )
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if whole.count(begin) != 1 or whole.count(end) != 1:
            raise SystemExit(f"{page}: wanted one {begin.strip()} and one {end} to put the tables between")
        before, rest = whole.split(begin)
        whole = before + begin + "\n" + text + "\n" + end + rest.split(end)[1]
    return whole


def replace(page: Path, text: str) -> None:
    fresh = page.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(page)
