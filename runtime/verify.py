"""Does this artifact, on this device, compute what the exporting machine computed?

Four checks, each with a name: `manifest` (readable, and its own hash), `file:NAME` for each listed file (size and
SHA-256), `logits` (the golden prompt's logits, recomputed here: max |here - golden| / spread against the manifest's
tolerance, where spread is the standard deviation of the golden row) and `greedy` (the most likely next token).
A model whose files are not the exported ones is not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import DiffbitError
from .artifact import Artifact
from .session import Session


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Verification:
    path: Path
    device: str
    checks: tuple[Check, ...]
    logits_error: float | None = None  # relative to the spread; None if the model was not run
    tolerance: float | None = None
    native: bool = False  # run with the native library

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)


def verify(path: str | Path, device: str = "cpu", threads: int | None = None, native: bool = True) -> Verification:
    """Check the artifact at `path` on `device`, with the native library or without. What is wrong is in the result.

    Raises DiffbitError only when the check itself cannot be made: no such folder, no such device, no ONNX Runtime.
    """
    path = Path(path)
    if not path.is_dir():
        raise DiffbitError(f"{path}: no such artifact folder")
    try:
        artifact = Artifact.open(path)
    except DiffbitError as error:
        return Verification(path, device, (Check("manifest", False, str(error)),))
    problems = artifact.file_problems()
    checks = [Check("manifest", True, f"sha256 {artifact.sha256}")]
    for name, entry in artifact.files.items():
        checks.append(Check(f"file:{name}", name not in problems, problems.get(name, f"{entry.bytes} bytes")))
    if problems:
        return Verification(path, device, tuple(checks))

    golden = artifact.golden
    session = Session(artifact, device, threads, native)
    *prompt, last = golden.input_ids  # the last token by a step, which reads the cache that the others left
    if prompt:
        session.prefill([prompt])
    logits = session.prefill([[last]])[0]
    here = logits[list(golden.token_ids)].astype(np.float64)
    off = float(np.max(np.abs(here - golden.logits))) / golden.spread
    checks.append(
        Check(
            "logits",
            off <= golden.tolerance,  # False for NaN too
            f"max difference {off:.3g} of the logits' spread, tolerance {golden.tolerance:.3g}",
        )
    )
    wanted, found = golden.token_ids[int(np.argmax(golden.logits))], int(logits.argmax())
    # Two tokens closer than what the tolerance lets each of them move may change places.
    behind = float(logits.max() - logits[wanted]) / golden.spread
    agrees = behind <= 2 * golden.tolerance
    detail = f"token {found}" if agrees else f"token {found} is most likely here, {wanted} where it was exported"
    checks.append(Check("greedy", agrees, detail))
    return Verification(path, device, tuple(checks), off, golden.tolerance, session.native)
