"""Checks that an artifact computes on this device what it computed on the exporting machine.

    manifest     diffbit.json is readable and matches the hash in it
    file:NAME    a listed file has its size and SHA-256, and is one that a model has (io/model_files.py), not code. This
                 diffbit's own native library passes, which `diffbit export --library` puts there
    external     all tensors of the model lie in the listed files
    tokenizer    it encodes some texts, and decodes them and every token
    logits       of the golden prompt, recomputed here: max |here - golden| / spread <= the manifest's tolerance, where
                 spread is the standard deviation of the golden row of logits
    greedy       the most likely next token is that of the golden row

and on another device than the CPU

    nodes        where ONNX Runtime has placed the graph's nodes
    cpu          a longer prompt and steps after it, as on this machine's CPU: the golden prompt is short, and providers
                 have other kernels for long ones. For each row of logits, rms(here - CPU) / spread <= tolerance / 2;
                 the rms of rounding errors is a third of their maximum or less

A model whose files have changed, or are code, is not run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..io.errors import DiffbitError
from ..io.files import sha256_file
from ..settings import SessionOptions
from .artifact import TOKENIZER, Artifact, artifact_folder
from .child_process import python
from .external import check_external
from .native import library as native_library
from .providers import placement
from .session import Session
from .tokenizer import Tokenizer

TEXTS = ("Hello, world!", "naïve 日本語 🙂 \u0301", " \n\t\0", "a" * 2000, "")
SECONDS = 60  # for the tokenizer
PROMPT, STEPS = 100, 16  # tokens that are compared with the CPU's


@dataclass(frozen=True)
class Check:
    """The result of one check; `detail` says what was found."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Verification:
    """The checks of one artifact on one device."""

    path: Path
    device: str
    checks: tuple[Check, ...]
    logits_error: float | None = None  # relative to the spread; None if the model was not run
    tolerance: float | None = None
    native: bool = False  # whether it ran with the native library

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)


def verify(path: str | Path, options: SessionOptions | None = None, **changes: Any) -> Verification:
    """Check the artifact at `path`, as a session with these options runs it (SessionOptions, or its fields by name).

    Failed checks are part of the result. Raises DiffbitError only if the checks cannot run: no such folder, no such
    device, no ONNX Runtime.
    """
    options = SessionOptions.of(options, changes)
    device = options.device
    path = artifact_folder(path)
    if not path.is_dir():
        raise DiffbitError(f"{path}: no such artifact folder")
    try:
        artifact = Artifact.open(path)
    except DiffbitError as error:
        return Verification(path, device, (Check("manifest", False, str(error)),))
    problems = _strangers(artifact) | artifact.file_problems()
    checks = [Check("manifest", True, f"sha256 {artifact.sha256}")]
    for name, entry in artifact.files.items():
        checks.append(Check(f"file:{name}", name not in problems, problems.get(name, f"{entry.bytes} bytes")))
    if problems:
        return Verification(path, device, tuple(checks))
    try:
        check_external(artifact)
    except DiffbitError as error:
        return Verification(path, device, (*checks, Check("external", False, str(error))))
    checks.append(Check("external", True, "all tensors lie in these files"))
    if TOKENIZER in artifact.files:
        problem = _tokenizer_problem(artifact)
        checks.append(Check("tokenizer", problem is None, problem or "encodes and decodes"))
        if problem:
            return Verification(path, device, tuple(checks))

    golden = artifact.golden
    session = Session(artifact, options)
    *prompt, last = golden.input_ids  # the last token is run alone: its call reads the cache that the others wrote
    if prompt:
        session.prefill([prompt])
    logits = session.prefill([[last]])[0]
    device_logits = logits[list(golden.token_ids)].astype(np.float64)
    difference = float(np.max(np.abs(device_logits - golden.logits))) / golden.spread
    detail = f"max difference {difference:.3g} of the logits' spread, tolerance {golden.tolerance:.3g}"
    checks.append(Check("logits", difference <= golden.tolerance, detail))  # False for NaN too
    expected, likeliest = golden.token_ids[int(np.argmax(golden.logits))], int(logits.argmax())
    # Each of two logits may move by the tolerance, so tokens closer than twice the tolerance may change places
    behind = float(logits.max() - logits[expected]) / golden.spread
    agrees = behind <= 2 * golden.tolerance
    detail = (
        f"token {likeliest}" if agrees else f"token {likeliest} is most likely here, {expected} where it was exported"
    )
    checks.append(Check("greedy", agrees, detail))
    native = session.native
    if device != "cpu":
        checks.append(Check("nodes", True, placement(session.nodes)))
        ids, steps = _longer(session)
        session.reset()
        rows = [session.prefill([ids[:-steps]]), *(session.step([[token]]) for token in ids[-steps:])]
        del session  # two models need not fit into the memory
        checks.append(_as_on_cpu(artifact, options, ids, np.concatenate(rows)))
    return Verification(path, device, tuple(checks), difference, golden.tolerance, native)


def _strangers(artifact: Artifact) -> dict[str, str]:
    """Return {file name: why it may not be there} for the listed files that no model has."""
    library = native_library() if artifact.strangers else None
    known = None if library is None else sha256_file(library)
    return {
        name: f"{artifact.path / name}: no model has a file of this name, and it may be code; export the model again"
        for name in artifact.strangers
        if artifact.files[name].sha256 != known
    }


def _longer(session: Session) -> tuple[list[int], int]:
    """Return the golden prompt, repeated as far as the context allows, and how many of its tokens are steps."""
    count = min(PROMPT + STEPS, session.capacity)
    return np.resize(session.artifact.golden.input_ids, count).tolist(), min(STEPS, count - 1)


def _as_on_cpu(artifact: Artifact, options: SessionOptions, ids: list[int], rows: NDArray[np.float32]) -> Check:
    """Compare rows [R, V] of logits after the last R of the tokens with the CPU's."""
    golden = artifact.golden
    cpu = Session(artifact, replace(options, device="cpu"))
    cpu_logits = cpu.prefill([ids], all_positions=True)[0, -len(rows) :]
    difference = float(np.sqrt(np.mean((rows - cpu_logits.astype(np.float64)) ** 2, axis=1)).max()) / golden.spread
    detail = (
        f"rms difference {difference:.3g} of the spread over {len(ids)} tokens, tolerance {golden.tolerance / 2:.3g}"
    )
    return Check("cpu", difference <= golden.tolerance / 2, detail)


def _tokenizer_problem(artifact: Artifact) -> str | None:
    """Say what is wrong with the tokenizer, or return None. It runs in a separate process, which a malicious file
    may crash."""
    file = artifact.file(TOKENIZER)
    request = json.dumps([str(file), artifact.vocab_size])
    try:
        done = subprocess.run(
            python(__name__, "_try_tokenizer"), input=request, capture_output=True, text=True, timeout=SECONDS
        )
        return str(json.loads(done.stdout)["problem"] or "") or None
    except subprocess.TimeoutExpired:
        return f"{file}: took more than {SECONDS} seconds to encode a few texts"
    except ValueError:
        return f"{file}: crashed the process that tried it (exit status {done.returncode}); restore the file"


def _try_tokenizer() -> None:
    path, vocab_size = json.load(sys.stdin)
    problem = None
    try:
        tokenizer = Tokenizer(path)
        for text in TEXTS:
            tokenizer.decode(tokenizer.encode(text))
        tokenizer.decode(range(vocab_size))
    except DiffbitError as error:
        problem = str(error)
    print(json.dumps({"problem": problem}))
