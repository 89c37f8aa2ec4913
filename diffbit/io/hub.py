"""Models on the Hugging Face Hub: hf:ORG/NAME[@REVISION] names a repository, hf:ORG/NAME/FOLDER a folder in one, and
hf:ORG/NAME/FILE.gguf a file.

Cache, token and server are those of huggingface_hub: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. Only files that
diffbit reads, at the top level of a repository or folder, are downloaded: never code, never a pickle.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

from .errors import DiffbitError, needs
from .files import read_json
from .model_files import DEEPER, part_named
from .progress import is_quiet

PREFIX = "hf:"
READ = (
    "*.safetensors", "*.json", "tokenizer.model", "*.jinja", "*.onnx", "*.onnx.data*", "*.onnx_data*",
)  # fmt: skip
# Other deeper folders than those of DEEPER, and the second copy of the weights in Mistral's repositories
UNREAD = ("*/*", "consolidated*")
TRANSFORMERS_JS = "onnx/model.onnx"  # where an artifact may have its graph (runtime/artifact.py)
_NAME = re.compile(r"hf:(?P<repo>[^/@]+(?:/[^/@]+)?)(?:/(?P<path>[^@]*[^@/]))?(?:@(?P<revision>.+))?", re.IGNORECASE)


@dataclass(frozen=True)
class HubName:
    """A repository, or the folder or GGUF file `path` in it. revision: a branch, a tag or a commit; None: the main
    branch."""

    repo: str
    path: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName:
        match = _NAME.fullmatch(text)
        if match is None or {".", "..", ""} & set((match["path"] or "path").split("/")):
            raise DiffbitError(
                f"{text}: wanted hf:ORG/NAME, hf:ORG/NAME@REVISION, hf:ORG/NAME/FOLDER or hf:ORG/NAME/FILE.gguf"
            )
        return cls(match["repo"], match["path"], match["revision"])

    def __str__(self) -> str:
        return (
            f"{PREFIX}{self.repo}{f'/{self.path}' if self.path else ''}{f'@{self.revision}' if self.revision else ''}"
        )


def is_read(name: str) -> bool:
    """Whether diffbit reads a file with this name."""
    return any(fnmatchcase(name, pattern) for pattern in READ)


def is_hub_name(path: str | Path) -> bool:
    return Path(path).as_posix().startswith(PREFIX)


def download(path: str | Path) -> Path:
    """Download a model named hf:... and return its local folder or GGUF file. Other paths are returned as they are.

    Raises DiffbitError if the repository, revision or file does not exist or may not be read, if there is neither a
    network nor a copy in the cache, or if huggingface_hub is not installed.
    """
    if not is_hub_name(path):
        return Path(path)
    name = HubName.parse(Path(path).as_posix())
    with hub_of(name) as hub:
        if name.path is not None and name.path.lower().endswith(".gguf"):
            return _gguf(hub, name, name.path)
        within = f"{name.path}/" if name.path else ""
        read, unread = ([f"{within}{pattern}" for pattern in patterns] for patterns in (READ, UNREAD))
        downloaded = hub.snapshot_download(
            name.repo, revision=name.revision, allow_patterns=read, ignore_patterns=unread
        )
        folder = Path(downloaded, within)
        if within and not folder.is_dir():
            raise DiffbitError(f"{name}: has no folder {name.path} with a model; check its name")
        manifest = folder / "diffbit.json"
        files = read_json(manifest).get("files") if manifest.is_file() else None
        graph = [f"{TRANSFORMERS_JS}*"] if isinstance(files, dict) and TRANSFORMERS_JS in files else []
        deeper = [f"{within}{pattern}" for pattern in (*DEEPER, *graph)]
        hub.snapshot_download(name.repo, revision=Path(downloaded).name, allow_patterns=deeper)
        if any(folder.glob("*.safetensors")) or manifest.is_file():
            return folder
        return _gguf(hub, name, _only_gguf(hub, name, folder))


def _gguf(hub: ModuleType, name: HubName, file: str) -> Path:
    parts = part_named(file, "?????")  # all of them
    path = Path(hub.snapshot_download(name.repo, revision=name.revision, allow_patterns=[parts]), file)
    if not path.is_file():
        raise DiffbitError(f"{name}: has no file {file}; check its name")
    return path


def _only_gguf(hub: ModuleType, name: HubName, folder: Path) -> str:
    """Return the GGUF file of a repository, or of a folder in it, with neither safetensors nor an artifact."""
    within = f"{name.path}/" if name.path else ""
    if hub.constants.HF_HUB_OFFLINE:
        names = sorted(f"{within}{file.name}" for file in folder.glob("*.gguf"))
    else:
        listed = hub.HfApi().list_repo_files(name.repo, revision=name.revision)
        names = sorted(file for file in listed if file.lower().endswith(".gguf") and file.startswith(within))
    names = sorted({part_named(file, "00001") for file in names})
    if len(names) > 1:
        raise DiffbitError(f"{name}: has {len(names)} GGUF files; name one of them, such as hf:{name.repo}/{names[0]}")
    if not names:
        raise DiffbitError(
            f"{name}: has no model that diffbit can read, wanted safetensors, a GGUF file or an artifact (diffbit.json)"
        )
    return names[0]


@contextmanager
def hub_of(name: HubName) -> Iterator[ModuleType]:
    """huggingface_hub, with its errors as DiffbitErrors, and with progress bars only on a terminal."""
    with needs("huggingface_hub", "hub", str(name)):
        import huggingface_hub as hub
        from huggingface_hub import errors
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    silent = (is_quiet() or not sys.stderr.isatty()) and not are_progress_bars_disabled()
    if silent:
        disable_progress_bars()
    try:
        yield hub
    except DiffbitError:
        raise
    except errors.GatedRepoError:
        problem = "is gated; ask for access on its page, then set HF_TOKEN or run `hf auth login`"
    except errors.RepositoryNotFoundError:
        problem = "no such repository, or it is private; check the name, or set HF_TOKEN or run `hf auth login`"
    except errors.RevisionNotFoundError:
        problem = "no such revision; wanted a branch, a tag or a commit of the repository"
    except errors.LocalEntryNotFoundError:
        problem = f"is not in the cache, and cannot be reached ({_offline(hub)})"
    except errors.OfflineModeIsEnabled:
        problem = f"cannot be reached ({_offline(hub)})"
    except Exception as error:  # of httpx or requests (by huggingface_hub's version), and server errors
        problem = f"failed ({type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]})"
    else:
        return
    finally:
        if silent:
            enable_progress_bars()
    raise DiffbitError(f"{name}: {problem}")


def _offline(hub: ModuleType) -> str:
    return "HF_HUB_OFFLINE is set" if hub.constants.HF_HUB_OFFLINE else f"no connection to {hub.constants.ENDPOINT}"
