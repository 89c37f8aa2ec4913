"""KL divergence against bytes: SmolLM2-135M-Instruct quantized by diffbit, llama.cpp, ik_llama.cpp and others.

    python research/frontier/frontier.py --work DIR --wikitext wiki.test.raw --llama FOLDER --ik ENV [--markdown]
    python research/frontier/frontier.py --work DIR --quick                                     # a tiny model, a minute

    FOLDER    (cd FOLDER/.. && npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xf *.tgz)    the folder `package`
    ENV       python -m venv ENV && ENV/bin/pip install ik-llama-cpp-python==0.1.5 numpy
    --peer    gptqmodel=ENV, auto-round=ENV: see peers.py

A row is a file of one format. Each is made, scored and written to DIR/rows before the next, so that an interrupted run
goes on where it was; what is already there is not made again. The table shows whatever has been measured.

Model    the trained copy of smollm2.py, whose weights favour no format; --published: the published weights.
Sample   --calibration windows of WINDOW tokens of `mix`, evenly spaced. Importance matrices and our methods have the
         same ones. The --samples samples are disjoint; rows that need no text are made once.
Text     two texts that no side has seen, --windows windows of WINDOW tokens of each, evenly spaced: WikiText-2's raw
         test text (--wikitext) and English news.
Scores   against the float model. diffbit's artifacts run in ONNX Runtime; llama.cpp's and ik_llama.cpp's files in their
         own libraries, against their own F32 files; the others' weights in torch.
Bytes    of all files of an artifact without the tokenizer's; of a GGUF file without its metadata. GPTQModel and
         AutoRound leave the embedding in 16 bits: it counts as int8, and is scored as float.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import numpy as np
import torch
from commands import once
from frontier_gguf import contents, counted, write_gguf, write_matrix
from frontier_report import PLAIN, Result, draw, markdown
from peers import PEERS, by_peer
from report import add_outputs, write_json, write_outputs
from smollm2 import WINDOW, exact_logits, fetch, logits_of, scores, text_windows, trained_copy

import diffbit
from diffbit.apps.evaluate.metrics import Scores
from diffbit.calib_data import eval_windows
from diffbit.cli.options import read_windows
from diffbit.cli.scheme_options import SchemeOptions
from diffbit.io.files import parse_size
from diffbit.io.tokenizer_files import tokenizer_files
from diffbit.models import Checkpoint
from diffbit.quantize import Scheme
from diffbit.quantize.allocation import allocate
from diffbit.quantize.methods import parse_recipe

# name: options of `diffbit quantize`. With --size, which counts no tokenizer, `diffbit allocate` chooses the formats;
# --calibrate: the sample is also given to a method that needs no text
OURS = {
    "int8": "--weights int8",
    "int8_g32": "--weights int8_g32 --embedding int8_g32 --head int8_g32",
    "int4_g32": "--weights int4_g32",
    "int4_g32 gptq": "--weights int4_g32 --method gptq",
    "int4_g32 guided": "--weights int4_g32 --method guided",
    "nl4_g32_s8": "--weights nl4_g32_s8 --embedding int6_g32_s8 --head int6_g32_s8 --calibrate",
    "nl3_g32_s8 gptq": "--weights nl3_g32_s8 --embedding int6_g32_s8 --head int6_g32_s8 --method gptq",
    "nl3_g32_s8 guided": "--weights nl3_g32_s8 --embedding int6_g32_s8 --head int6_g32_s8 --method guided",
    "nl4_g32_s8 gptq": "--weights nl4_g32_s8 --embedding int6_g32_s8 --head int6_g32_s8 --method gptq",
    "int5_g32_s8 gptq": "--weights int5_g32_s8 --embedding int6_g32_s8 --head int6_g32_s8 --method gptq",
    "int6_g32_s8 gptq": "--weights int6_g32_s8 --embedding int6_g32_s8 --head int6_g32_s8 --method gptq",
    "allocate 52 MB, gptq": "--size 52MB --method gptq",
    "allocate 62 MB, gptq": "--size 62MB --method gptq",
    "allocate 72 MB, gptq": "--size 72MB --method gptq",
    "allocate 83.5 MB, gptq": "--size 83.5MB --method gptq",
    "allocate 89 MB, gptq": "--size 89MB --method gptq",
    "allocate 97 MB, gptq": "--size 97MB --method gptq",
    "allocate 103.6 MB, gptq": "--size 103.6MB --method gptq",
    "allocate 110 MB, gptq": "--size 110MB --method gptq",
}
LLAMA = (
    *("Q4_K_M", "IQ4_XS", "IQ4_NL", "Q3_K_M", "Q4_0", "Q2_K", "IQ2_M", "IQ3_M", "IQ3_XXS", "Q3_K_S", "Q3_K_L"),
    *("Q4_K_S", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_S"),
    *(f"{type}{PLAIN}" for type in ("Q4_K_M", "Q3_K_M")),
)
# no type that takes Q4_1 for some matrices: ik-llama-cpp-python 0.1.5 multiplies that wrong in batches of 64 tokens
IK = ("IQ4_K", "IQ4_KS", "IQ4_KSS", "IQ4_KT", "IQ3_K", "IQ3_KT", "IQ2_K", "IQ2_KT")
PEER_ROWS = {f"{bits} bits": (bits, 64) for bits in (4, 3, 2)}  # of GPTQModel and AutoRound: bits, group size
QUICK = {"diffbit": ("int8", "int4_g32 gptq"), "llama.cpp": ("Q4_0",), "ik_llama.cpp": ("Q4_0",)}
PICO = Path(__file__).parents[2] / "examples" / "pico" / "softmax"
COLUMNS = 1 << 13  # tokens of a context


@dataclass(frozen=True)
class Row:
    tool: str
    name: str
    calibrated: bool
    make: Callable[[int, Path], Path]  # of a sample, under a name
    score: Callable[[Path], Iterable[torch.Tensor]]  # logits of each window
    describe: Callable[[Path], tuple[int, str]]  # bytes, and types of the matrices

    def file(self, rows: Path, sample: int) -> Path:
        return rows / f"{self.tool} {self.name} {sample}.json".replace("/", "-")


class Bench:
    """A model, the windows that it is measured on, and the samples that are calibrated on."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        work, count = arguments.work, arguments.windows
        if arguments.quick:
            self.model, length = PICO, 64
            texts = [torch.from_numpy(eval_windows(name, PICO, length, count).ids) for name in ("mix", "stdlib")]
        else:
            published, news, wiki = fetch(work)
            self.model, length = published, WINDOW
            if not arguments.published:
                self.model = once(work / "copy", lambda out: trained_copy(published, wiki, out))
            texts = [text_windows(self.model, file, count, length) for file in (arguments.wikitext, news)]
        self.windows = torch.cat(texts)
        self.text = np.repeat(np.arange(len(texts)), [len(text) for text in texts])  # of each window
        whole = read_windows(self.model, "mix", "text", None, length, split="calib")
        ids = whole.ids[whole.mask.all(1)]
        size, samples = arguments.calibration, max(3, arguments.samples)
        if size * samples > len(ids):
            raise SystemExit(f"`mix` has {len(ids)} windows of {length} tokens, not {samples} samples of {size}")
        # the first is what `diffbit quantize --max-windows` takes
        starts = np.arange(size) * len(ids) // size
        self.samples = [ids[starts + sample * len(ids) // (samples * size)] for sample in range(samples)]
        parts = [self.windows.numpy(), np.stack(self.samples)]
        digest = hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:8]
        name = "quick" if arguments.quick else "published" if arguments.published else "copy"
        self.place = work / f"{name}-{digest}"
        (self.place / "rows").mkdir(parents=True, exist_ok=True)
        # of a tool, the float model's logits of each window
        self.floats: dict[str, Callable[[], Iterator[torch.Tensor]]] = {
            "torch": lambda: logits_of(diffbit.load(self.model).eval(), self.windows)
        }

    @functools.cache  # noqa: B019 (one for the whole run)
    def exact(self, tool: str) -> tuple[torch.Tensor, list[float]]:
        """The float model's logits [W, S, V] as a tool computes them, in a file; and their negative log likelihood."""
        name = tool if tool in self.floats else "torch"
        shape = (*self.windows.shape, Checkpoint(self.model).config.vocab_size)
        logits = exact_logits(self.place / f"float-{name}.npy", shape, self.floats[name])
        return logits, self.score(logits, logits).nll.tolist()

    def score(self, exact: Iterable[torch.Tensor], logits: Iterable[torch.Tensor]) -> Scores:
        return scores((self.windows, torch.ones_like(self.windows, dtype=torch.bool)), exact, logits)


# ---- diffbit --------------------------------------------------------------------------------------------------------


def our_rows(bench: Bench, names: Iterable[str]) -> Iterator[Row]:
    options = argparse.ArgumentParser()
    for option in ("weights", "embedding", "head", "method", "size", "candidates"):
        options.add_argument(f"--{option}", default="rtn" if option == "method" else None)
    options.add_argument("--override", action="append")
    options.add_argument("--calibrate", action="store_true")
    for name in names:
        chosen = options.parse_args(OURS[name].split())
        calibrated = chosen.calibrate or bool(chosen.size) or parse_recipe(chosen.method).calibrated
        yield Row(
            "diffbit", name, calibrated,
            lambda sample, out, chosen=chosen, text=calibrated: make_artifact(bench, chosen, text, sample, out),
            lambda artifact: artifact_logits(artifact, bench.windows), functools.partial(artifact_contents, bench),
        )  # fmt: skip


def make_artifact(bench: Bench, options: argparse.Namespace, calibrated: bool, sample: int, out: Path) -> Path:
    parts = {name: getattr(options, name) for name in ("weights", "embedding", "head", "override")}
    scheme_options = SchemeOptions(**parts)
    ids = bench.samples[sample]
    if options.size is None:
        scheme = scheme_options.scheme()
    else:
        tokenizer = sum(map(len, tokenizer_files(bench.model).values()))
        candidates = {} if options.candidates is None else {"candidates": options.candidates.split(",")}
        scheme = allocate(
            bench.model, nbytes=parse_size(options.size) + tokenizer, scheme=scheme_options.scheme(weights_later=True),
            method=options.method, calibration=ids, tables=not (options.embedding or options.head), **candidates,
        ).scheme  # fmt: skip
    text = {"calibration": ids, "calibration_text": {"source": f"mix, sample {sample}"}} if calibrated else {}
    folder = out.with_name(f"{out.name}-checkpoint")
    diffbit.quantize_checkpoint(bench.model, folder, scheme, method=options.method, overwrite=True, **text)
    context = min(COLUMNS, Checkpoint(bench.model).config.max_position)
    artifact = diffbit.export_artifact(folder, out, context_length=context, overwrite=True)
    shutil.rmtree(folder)
    return artifact


def artifact_logits(artifact: Path, windows: torch.Tensor) -> Iterator[torch.Tensor]:
    session = diffbit.Session(artifact, threads=1)
    for window in windows:
        session.reset()
        yield torch.from_numpy(session.prefill([window.tolist()], all_positions=True)[0])


def artifact_contents(bench: Bench, artifact: Path) -> tuple[int, str]:
    scheme = Scheme.from_dict(json.loads((artifact / "diffbit.json").read_text())["scheme"])
    names = [format.name for format in scheme.formats(Checkpoint(bench.model).config).values()]
    return sum(file.stat().st_size for file in artifact.iterdir() if "token" not in file.name), counted(names)


# ---- llama.cpp and ik_llama.cpp -------------------------------------------------------------------------------------


def their_rows(bench: Bench, tool: str, command: list[str], names: Iterable[str]) -> Iterator[Row]:
    """Rows of a GGUF library: command begins every call of frontier_peer.py."""
    place = bench.place

    def matrix(sample: int) -> Path:
        model = functools.partial(diffbit.load, bench.model)
        return once(
            place / f"matrix-{sample}.npz", lambda out: write_matrix(model().eval(), bench.samples[sample], out)
        )

    def floats() -> Path:
        return once(place / "F32.gguf", lambda out: write_gguf(bench.model, out))

    def logits(file: Path) -> Iterator[torch.Tensor]:
        ids = place / "windows.npy"
        np.save(ids, bench.windows.numpy().astype(np.int32))
        size = 4 * bench.windows.shape[1] * Checkpoint(bench.model).config.vocab_size
        call = [*command, "logits", file, ids]
        with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            for _ in bench.windows:
                values = torch.frombuffer(bytearray(process.stdout.read(size)), dtype=torch.float32)
                yield values.view(bench.windows.shape[1], -1)

    def make(type: str, sample: int, out: Path) -> Path:
        extra = [] if PLAIN in type else [matrix(sample)]
        call = [*command, "quantize", floats(), out, type.removesuffix(PLAIN), *extra]
        done = subprocess.run(call, capture_output=True, text=True, errors="replace")
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "rror" in line or "issing" in line or "fail" in line]
            raise Unmade((said or done.stderr.splitlines() or ["no reason given"])[-1])
        return out

    bench.floats[tool] = lambda: logits(floats())
    for type in names:
        yield Row(tool, type, PLAIN not in type, functools.partial(make, type), logits, contents)


class Unmade(Exception):
    """Why a tool could not make a file."""


# ---- GPTQModel and AutoRound ----------------------------------------------------------------------------------------


def peer_rows(bench: Bench, tool: str, python: Path, names: Iterable[str]) -> Iterator[Row]:
    def make(name: str, sample: int, out: Path) -> Path:
        bits, group = PEER_ROWS[name]
        model = diffbit.load(bench.model)
        rounded = by_peer(tool, python, model, bench.model, bench.samples[sample], bits, group)
        diffbit.models.save(rounded, out, tokenizer_from=bench.model)
        weights = [module.weight for module in rounded.model.layers.modules() if isinstance(module, torch.nn.Linear)]
        table = rounded.model.embed_tokens.weight
        # codes; a scale and a zero point for each group; the table in int8
        nbytes = sum(weight.numel() * (bits + (16 + bits) / group) / 8 for weight in weights)
        (out / "bytes.json").write_text(json.dumps(round(nbytes) + table.numel() + 4 * len(table)))
        return out

    for name in names:
        yield Row(
            PEERS[tool][0], name, True, functools.partial(make, name),
            lambda folder: logits_of(diffbit.load(folder).eval(), bench.windows),
            lambda folder: (json.loads((folder / "bytes.json").read_text()), "groups of 64"),
        )  # fmt: skip


# ---- all of it ------------------------------------------------------------------------------------------------------


def measure(bench: Bench, row: Row, sample: int, keep: bool) -> dict[str, Any]:
    about = {"tool": row.tool, "name": row.name, "sample": sample, "calibrated": row.calibrated}
    suffix = ".gguf" if row.tool in bench.floats else ""
    label = f"{row.tool} {row.name} {sample}".replace(",", "").replace(" ", "-")
    try:
        file = once(bench.place / f"{label}{suffix}", lambda out: row.make(sample, out))
    except Unmade as reason:
        return about | {"wrong": str(reason)}
    nbytes, types = row.describe(file)
    exact, float_nll = bench.exact(row.tool)
    of_model = bench.score(exact, row.score(file))
    if not keep:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    values = {name: values.tolist() for name, values in asdict(of_model).items() if values is not None}
    return about | {"bytes": nbytes, "types": types, **values, "float_nll": float_nll}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the models")
    parser.add_argument("--wikitext", type=Path, metavar="FILE", help="WikiText-2's wiki.test.raw")
    parser.add_argument("--llama", type=Path, metavar="FOLDER", help="llama.cpp's library (see above)")
    parser.add_argument("--ik", type=Path, metavar="ENV", help="an environment with ik-llama-cpp-python")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=ENV", help="gptqmodel, auto-round")
    parser.add_argument("--published", action="store_true", help="the published weights")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="measure these rows, or tools")
    parser.add_argument("--samples", type=int, default=3, help="calibration samples (default: %(default)s)")
    parser.add_argument("--calibration", type=int, default=24, help="windows of each (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=12, help="of each text (default: %(default)s)")
    parser.add_argument("--no-measuring", action="store_true", help="only the table of what has been measured")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few formats, for a test")
    add_outputs(parser, "research/frontier/README.md")
    arguments = parser.parse_args()
    if not arguments.quick and arguments.wikitext is None:
        parser.error("--wikitext is missing")
    bench = Bench(arguments)
    for row, sample in todo(bench, arguments):
        file = row.file(bench.place / "rows", sample)
        if not file.exists():
            once(file, lambda out, row=row, sample=sample: write_json(out, measure(bench, row, sample, sample == 0)))
    results = Result.read(bench.place / "rows", bench.text, arguments.samples)
    name = "frontier-published" if arguments.published else "frontier"  # of the place in the page, and the plot
    print(text := markdown(results, name, bench.windows.shape))
    write_outputs(arguments, {"rows": [result.to_dict() for result in results]}, {name: text})
    if arguments.markdown:
        draw(results, arguments.markdown.with_name(f"{name}.svg"))


def todo(bench: Bench, arguments: argparse.Namespace) -> Iterator[tuple[Row, int]]:
    """Rows to measure, all of a sample before the next sample."""

    def names(tool: str, of_tool: Iterable[str]) -> list[str]:
        of_tool = QUICK.get(tool, ()) if arguments.quick else of_tool
        return [name for name in of_tool if not arguments.only or {tool, name} & set(arguments.only)]

    peer = str(Path(__file__).with_name("frontier_peer.py"))
    rows = list(our_rows(bench, names("diffbit", OURS)))
    if arguments.llama:
        command = [sys.executable, peer, str(arguments.llama.resolve())]
        rows += their_rows(bench, "llama.cpp", command, names("llama.cpp", LLAMA))
    if arguments.ik:
        command = [str(arguments.ik.absolute() / "bin" / "python"), peer, "ik"]
        rows += their_rows(bench, "ik_llama.cpp", command, names("ik_llama.cpp", IK))
    for tool, environment in (one.split("=", 1) for one in arguments.peer):
        rows += peer_rows(bench, tool, Path(environment).absolute() / "bin" / "python", names(tool, PEER_ROWS))
    for sample in range(0 if arguments.no_measuring else arguments.samples):
        yield from ((row, sample) for row in rows if row.calibrated or not sample)


if __name__ == "__main__":
    main()
