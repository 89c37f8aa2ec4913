"""Writes a static site that runs an artifact in the browser: the page in page/, what it reads of the artifact, and npm
packages.

The page is built on the files of the npm package in js/. The site needs only a server of static files. The page loads
nothing from elsewhere; its content security policy forbids it. The npm packages are onnxruntime-web and Hugging Face's
tokenizers and Jinja in JavaScript, in the releases whose hashes are below. They come from npm (its cache or registry)
or from a node_modules folder.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ...io.errors import DiffbitError
from ...io.files import check_apart, new_folder, write_json
from ...io.tokenizer_files import TOKENIZER
from ...runtime import FILE_BYTES, MANIFEST, Artifact

PAGE = Path(__file__).parent / "page"
PACKAGE = Path(__file__).parent / "js"  # the npm package: `npm pack` makes it of this folder
KERNELS = PACKAGE / "wasm"  # the runtime for WebAssembly
ENTRY = "index.js"  # of the package, which imports by names that only node and bundlers resolve
# The model's files that the page reads, as isRead in files.js has them. A site has no other file of an artifact: a page
# or a script among them would run with all rights of the site's address
IS_READ = re.compile(
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|generation_config\.json|chat_template\.jinja"
    r"|model\.onnx|onnx/model\.onnx|(model\.onnx\.data|onnx/model\.onnx_data)(_\d+)?",
    re.ASCII,
)
MODEL_FOLDER, LIBRARIES, RUNNER = "model", "lib", "diffbit"


@dataclass(frozen=True)
class Package:
    """A release on npm, its hash, and {file in the package: file in the site}."""

    name: str
    version: str
    sha512: str  # of the archive, base64, as npm's integrity field has it
    files: Mapping[str, str]


PACKAGES = (
    Package(
        "onnxruntime-web",
        "1.30.0",
        "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
        {f"dist/{name}": name for name in (
            "ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm",
            "ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.mjs", "ort-wasm-simd-threaded.asyncify.wasm",
        )},
    ),
    Package(
        "@huggingface/tokenizers",
        "0.2.0",
        "LidMHe1FpcSYH4vcSjXooda34pC0M8m1gmDOv7SQi6Iv+ib1zX7J3sHBCC9/3FPCkn2k1b55FneVqMRxrr99pg==",
        {"dist/tokenizers.min.mjs": "tokenizers.min.mjs"},
    ),
    Package(
        "@huggingface/jinja",
        "0.5.11",
        "YzEzwM5oQf4r0vs7ifWQ+yuVR1YkAHrjERQ+a8WRsStHHp4NRBg+NesjiFc+X2AFUpRvvrIeHDS1xFy9jY/IjQ==",
        {"dist/index.js": "jinja.js"},
    ),
)  # fmt: skip


def write_site(
    artifact: str | Path,
    output: str | Path,
    *,
    packages: str | Path | None = None,
    license: str | None = None,
    slow: bool = False,
    overwrite: bool = False,
) -> dict[str, int]:
    """Write the site into a new folder -> {file: size in bytes}.

    packages: a node_modules folder with PACKAGES in these versions; None: `npm pack` gets them. license: the model's,
    for the page to show. The kernels for WebAssembly are those that build.py has compiled; without them a low-bit model
    takes seconds per token, and the page is written only if `slow` says so. Raises DiffbitError if they are missing,
    the artifact is damaged or too large for a browser, or a package is not available.
    """
    opened = Artifact.open(artifact)
    opened.check_output()
    opened.check_files()
    check_apart(output, opened.path)
    if TOKENIZER not in opened.files:
        raise DiffbitError(f"{opened.path}: has no {TOKENIZER}, but a page needs it; export the model with --tokenizer")
    names = [name for name in opened.files if IS_READ.fullmatch(name)]
    for name in names:
        if (size := opened.files[name].bytes) > FILE_BYTES:
            raise DiffbitError(
                f"{opened.file(name)}: has {size:,} bytes, but a browser loads at most {FILE_BYTES:,} per "
                "file; quantize the model to fewer bits"
            )
    if not slow and not any(KERNELS.glob("*.wasm")):
        raise DiffbitError(f"{KERNELS}: has no kernels for WebAssembly; `diffbit web` compiles them")
    with new_folder(output, overwrite=overwrite) as folder:
        for file in PAGE.iterdir():
            shutil.copyfile(file, folder / file.name)
        (folder / RUNNER).mkdir()
        for file in PACKAGE.glob("*.js"):
            if file.name != ENTRY:
                shutil.copyfile(file, folder / RUNNER / file.name)
        (folder / RUNNER / KERNELS.name).mkdir()
        for file in (*KERNELS.glob("*.js"), *KERNELS.glob("*.wasm")):
            shutil.copyfile(file, folder / RUNNER / KERNELS.name / file.name)
        (folder / MODEL_FOLDER).mkdir()
        for name in (MANIFEST, *names):
            (folder / MODEL_FOLDER / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(opened.path / name, folder / MODEL_FOLDER / name)
        (folder / LIBRARIES).mkdir()
        for package in PACKAGES:
            read = _from_npm(package) if packages is None else _from_folder(package, Path(packages))
            for name, data in read.items():
                (folder / LIBRARIES / name).write_bytes(data)
        versions = {package.name: {"version": package.version, "sha512": package.sha512} for package in PACKAGES}
        about = {"artifact": opened.name, "sha256": opened.sha256, "license": license, "packages": versions}
        write_json(folder / "site.json", about)
    return {
        str(path.relative_to(output)): path.stat().st_size for path in sorted(Path(output).rglob("*")) if path.is_file()
    }


def _from_folder(package: Package, folder: Path) -> dict[str, bytes]:
    where = folder / package.name
    try:
        version = json.loads((where / "package.json").read_text("utf-8")).get("version")
        if version != package.version:
            raise DiffbitError(
                f"{where}: has version {version}, wanted {package.version}: "
                f"npm install {package.name}@{package.version}"
            )
        return {name: (where / file).read_bytes() for file, name in package.files.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise DiffbitError(
            f"{where}: cannot be read ({error}); wanted a node_modules folder with {package.name}@{package.version}"
        ) from None


def _from_npm(package: Package) -> dict[str, bytes]:
    release = f"{package.name}@{package.version}"
    with TemporaryDirectory(prefix="diffbit-") as folder:
        command = ["npm", "pack", "--silent", "--pack-destination", folder, release]
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        except FileNotFoundError:
            raise DiffbitError(
                "npm is not installed, but it gets the page's libraries; install Node.js, or pass --packages with a "
                f"node_modules folder that has {', '.join(f'{p.name}@{p.version}' for p in PACKAGES)}"
            ) from None
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(archives) != 1:
            reason = (done.stderr.strip().splitlines() or ["no archive"])[0]
            raise DiffbitError(f"npm cannot get {release} ({reason}); check the network, or pass --packages")
        data = archives[0].read_bytes()
    if base64.b64encode(hashlib.sha512(data).digest()).decode() != package.sha512:
        raise DiffbitError(f"{release}: npm's archive does not have the hash that diffbit expects; try again")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {name: _member(archive, f"package/{file}") for file, name in package.files.items()}


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None
    return file.read()
