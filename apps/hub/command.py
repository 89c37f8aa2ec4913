"""diffbit push: upload a model to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ...cli import Json, Quiet, print_json, print_table, remark
from ...io.errors import DiffbitError
from ...io.fields import shown
from ...io.files import check_within, size_text
from ...io.hub import TRANSFORMERS_JS, HubName, hub_of, is_read
from ...io.model_files import DEEPER, is_of_a_model
from ...runtime import MANIFEST, Artifact
from .card import Card, read_results

EXAMPLES = {"push": ("diffbit push out/demo/diff_v1-onnx hf:me/diff-int4 --license mit --dry-run",)}
README = "README.md"


def push(
    folder: Annotated[Path, typer.Argument(help="Artifact, or checkpoint (needs torch).")],
    target: Annotated[str, typer.Argument(help="Repository: hf:ORG/NAME, or hf:ORG/NAME@BRANCH.", metavar="HF:NAME")],
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public", help="Make a new repository private or public; default: the account's setting."
        ),
    ] = None,
    license: Annotated[str | None, typer.Option(help="License of the model, such as apache-2.0.")] = None,
    base_model: Annotated[str | None, typer.Option(help="The model that it was made from, as ORG/NAME.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="The comparison.json of `diffbit compare -o`, whose table goes into the card.")
    ] = None,
    message: Annotated[str, typer.Option(help="Message of the commit.")] = "Upload by diffbit",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files and the card; upload nothing.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Upload an artifact or a checkpoint to the Hugging Face Hub, with a model card made from its manifest.

    The model is verified first, and the table of the files that are sent is printed. They are those that a model has:
    never code, hidden files or logs. The repository is made if it is not there; files of an earlier model in it are
    removed, and other files stay. The token is that of `hf auth login`, or HF_TOKEN.
    """
    name = HubName.parse(target)
    if name.path is not None or "/" not in name.repo:
        raise DiffbitError(f"{target}: wanted a repository to upload to, hf:ORG/NAME")
    measurements = None if results is None else read_results(results)
    card = artifact_card(folder, name.repo) if (folder / MANIFEST).is_file() else checkpoint_card(folder, name.repo)
    text = replace(card, license=license, base_model=base_model, results=measurements).text()
    sizes = {**card.files, README: len(text.encode())}
    if not as_json:
        print_table({"file": file, "bytes": size} for file, size in sizes.items())
    elif not dry_run:
        remark(f"{target} gets {', '.join(f'{file} ({size_text(size)})' for file, size in sizes.items())}")
    address, removed = None, list[str]()
    if not dry_run:
        files: dict[str, Path | bytes] = {file: folder / file for file in card.files}
        address, removed = upload(name, files | {README: text.encode()}, private, message)
    if as_json:
        values = {"target": target, "files": dict(card.files), "card": text, "commit": address, "removed": removed}
        print_json(values)
        return
    if dry_run:
        print(text)
    else:
        if removed:
            remark(f"removed from the repository, as parts of an earlier model: {', '.join(removed)}")
        remark(f"{folder}: uploaded, {address}; run it with: diffbit run {target}")


def artifact_card(folder: Path, repo: str) -> Card:
    """Verify an artifact and return its card."""
    from ...runtime import verify

    artifact = Artifact.open(folder)
    if others := artifact.strangers:
        raise DiffbitError(
            f"{folder}: has {shown(others[0])}, which is not uploaded: no model has such a file, and it may be code; "
            "export without --library"
        )
    if failed := verify(artifact.path).failures:
        raise DiffbitError("; ".join(f"{check.name}: {check.detail}" for check in failed))
    return Card(
        repo,
        artifact=True,
        model=artifact.model,
        scheme=artifact.scheme,
        method=artifact.method,
        calibration=artifact.calibration,
        files={name: (folder / name).stat().st_size for name in (MANIFEST, *artifact.files)},
        chat=has_chat_template(folder),
    )


def checkpoint_card(folder: Path, repo: str) -> Card:
    """Read every weight of a checkpoint and return its card."""
    from ...models import Checkpoint
    from ...models.checkpoint import shapes
    from ...quantize import Weights

    if not folder.is_dir():
        raise DiffbitError(f"{folder}: is no folder, wanted an artifact or a checkpoint folder to upload")
    checkpoint = Checkpoint(folder)
    weights, entry = Weights(checkpoint), checkpoint.quantization or {}
    for name in shapes(checkpoint.config):
        weights.read(name)
    there = [*folder.iterdir(), *(folder / name for name in DEEPER)]
    files = sorted(file for file in there if file.is_file() and is_of_a_model(file.relative_to(folder).as_posix()))
    for file in files:
        check_within(folder, file)
    return Card(
        repo,
        artifact=False,
        model=checkpoint.config.to_dict(),
        scheme=None if weights.scheme is None else weights.scheme.to_dict(),
        method=entry.get("method"),
        calibration=entry.get("calibration"),
        files={file.relative_to(folder).as_posix(): file.stat().st_size for file in files},
        chat=has_chat_template(folder),
    )


def has_chat_template(folder: Path) -> bool:
    from ...runtime import ChatTemplate, NoTemplate

    try:
        ChatTemplate.read(folder)
    except NoTemplate:
        return False
    return True


def upload(
    target: HubName, files: Mapping[str, Path | bytes], private: bool | None, message: str
) -> tuple[str, list[str]]:
    """Make `files` the model of a repository, which is created if necessary. Returns the commit's URL and the names of
    the files that it removes: those of an earlier model, which would be read as parts of this one.

    private: whether a new repository is private; None: the account's default.
    """
    with hub_of(target) as hub:
        api = hub.HfApi()
        api.create_repo(target.repo, private=private, exist_ok=True)
        there = api.list_repo_files(target.repo, revision=target.revision)
        stale = sorted(name for name in there if name not in files and _is_of_a_model(name))
        operations = [hub.CommitOperationAdd(name, file) for name, file in files.items()]
        operations += [hub.CommitOperationDelete(name) for name in stale]
        done = api.create_commit(target.repo, operations, commit_message=message, revision=target.revision)
        return str(done.commit_url), stale


def _is_of_a_model(name: str) -> bool:
    """Whether `download` would take a file of a repository: not a README, a license, or what lies in other folders."""
    return name.startswith(TRANSFORMERS_JS) or name in DEEPER or ("/" not in name and is_read(name))
