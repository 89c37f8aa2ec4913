"""SmolLM2-135M-Instruct in headless Chromium: diffbit's npm package, on which its page is built, beside wllama
(llama.cpp in WebAssembly) and transformers.js. The table of research/web.

    bash examples/smollm2.sh DIR                     # the models; some of them will do
    python benchmarks/web.py --work DIR --markdown

Needs Linux, Chromium, Node.js and npm. All continue the same text greedily, on the CPU, each time in a new Chromium;
they take turns, and the table has medians over rounds. Models are loaded from a server on this machine, with nothing
in the browser's cache. Memory is the peak resident size of the page's process.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

from commands import once, run_diffbit
from machine import describe
from report import Row, add_outputs, command_line, table, write_outputs

from diffbit.runtime import Tokenizer

ROOT = Path(__file__).parents[1]
HERE, TESTS, PACKAGE = ROOT / "benchmarks", ROOT / "tests" / "apps" / "web", ROOT / "apps" / "web" / "js"
WLLAMA = "@wllama/wllama@3.8.1"
ROWS = {  # name: (function of web_peers.js, model in the work folder)
    "diffbit, differential, int4_g32": ("diffbit", "diff-onnx"),
    "diffbit, plain, int4_g32": ("diffbit", "plain-onnx"),
    "wllama, Q4_0": ("wllama", "Q4_0.gguf"),
    "wllama, the published Q4_1": ("wllama", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "transformers.js, plain, int4_g32": ("transformers", "plain-transformers"),
}
TEXT = (
    "The sea had been calm since the morning, and the men on the small boat spoke little. They had left the harbour "
    "before dawn, when the lamps along the quay were still burning, and nobody had seen them go. The oldest of them, "
    "who had sailed these waters for forty years, watched the clouds in the west and said nothing. He knew what they "
    "meant. Behind the island the wind would turn, and then"
)
IMPORTS = {
    "@huggingface/jinja": "@huggingface/jinja/dist/index.js",
    "@huggingface/tokenizers": "@huggingface/tokenizers/dist/tokenizers.mjs",
    "@huggingface/transformers": "@huggingface/transformers/dist/transformers.web.js",
    "onnxruntime-web/wasm": "onnxruntime-web/dist/ort.wasm.bundle.min.mjs",
    "onnxruntime-web/webgpu": "onnxruntime-web/dist/ort.webgpu.bundle.min.mjs",
    "onnxruntime-common": "onnxruntime-common/dist/esm/index.js",
}


class Isolated(http.server.SimpleHTTPRequestHandler):
    """With the headers that WebAssembly's threads need."""

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


def npm_packages(folder: Path) -> None:
    """A node_modules folder: the releases that the tests pin, and wllama."""
    folder.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(TESTS / name, folder / name)
    command = ["npm", "install", "--silent", "--ignore-scripts", "--no-audit", "--no-fund", WLLAMA]
    subprocess.run(command, cwd=folder, check=True)


def models_in(work: Path) -> dict[str, tuple[str, str]]:
    """The rows whose models are there; transformers.js's is exported in its layout."""
    if (work / "plain-int4").is_dir():
        layout = ("--layout", "transformers.js", "--context-length", "2048")
        once(work / "plain-transformers", lambda out: run_diffbit("export", work / "plain-int4", "-o", out, *layout))
    rows = {name: row for name, row in ROWS.items() if (work / row[1]).exists()}
    if not rows:
        models = ", ".join(model for _, model in ROWS.values())
        raise SystemExit(f"{work}: has none of {models}; make them with bash examples/smollm2.sh {work}")
    for name in ROWS.keys() - rows.keys():
        print(f"left out: {name} (no {work / ROWS[name][1]})", file=sys.stderr)
    return rows


def make_site(work: Path, models: Iterable[str]) -> Path:
    """The folder to serve."""
    packages, site = once(work / "npm", npm_packages) / "node_modules", work / "site"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir()
    imports = {"diffbit": "/diffbit/index.js"} | {name: f"/lib/{file}" for name, file in IMPORTS.items()}
    script = f'<script type="importmap">{json.dumps({"imports": imports})}</script>'
    (site / "index.html").write_text(f'<!doctype html><meta charset="utf-8">{script}')
    links = {"diffbit": PACKAGE, "lib": packages, "web_peers.js": HERE / "web_peers.js"}
    for name, target in (links | {model: work / model for model in models}).items():
        (site / name).symlink_to(target.resolve())
    return site


def measure(address: str, packages: Path, function: str, **request: object) -> Row:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("Chromium is not installed")
    command = ["node", str(HERE / "web.mjs"), str(packages / "x"), chromium, address, function, json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{function} {request['place']}: {done.stderr.strip()[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of examples/smollm2.sh")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="tokens to write")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="one round, one thread, a short text and few tokens")
    add_outputs(parser, "research/web/README.md")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.tokens, arguments.threads = 1, 4, [1]
    rows = models_in(arguments.work)
    site = make_site(arguments.work, [model for _, model in rows.values()])
    text = TEXT[:40] if arguments.quick else TEXT
    artifact = next((model for function, model in rows.values() if function != "wllama"), None)
    prompt = len(Tokenizer(arguments.work / artifact / "tokenizer.json").encode(text)) if artifact else None
    runs: dict[tuple[str, int], list[Row]] = {}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Isolated, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        for number in range(arguments.rounds):
            for name, (function, model) in rows.items():
                for threads in arguments.threads:
                    place = model if function == "transformers" else f"/{model}"
                    request = {"place": place, "text": text, "tokens": arguments.tokens, "threads": threads}
                    row = measure(address, (site / "lib").resolve(), function, **request)
                    print(f"round {number + 1}, {name}, {threads} threads: {row}", file=sys.stderr)
                    runs.setdefault((name, threads), []).append(row)
        server.shutdown()

    def middle(of: list[Row], value: Callable[[Row], float]) -> str:
        return f"{median(map(value, of)):.3g}"

    header = ("", "threads", "tokens/s", "prompt, tokens/s", "load, s", "memory, MB")
    lines = [
        (
            name, str(threads), middle(of, lambda row: (row["tokens"] - 1) / row["rest"]),
            middle(of, lambda row: prompt / row["first"]) if prompt else "", middle(of, lambda row: row["load"]),
            middle(of, lambda row: row["memory"] / 1e6),
        )
        for (name, threads), of in runs.items()
    ]  # fmt: skip
    text = (
        f"`{command_line(__file__, sys.argv[1:])}`; {describe()}; a text of {prompt} tokens.\n\n{table(header, lines)}"
    )
    print(text)
    numbers = [{"name": name, "threads": threads, "runs": of} for (name, threads), of in runs.items()]
    write_outputs(arguments, {"prompt": prompt, "rows": numbers}, {"web": text})


if __name__ == "__main__":
    main()
