#!/usr/bin/env bash
# ONNX Runtime for Windows in a folder, for wine: the DLL of PyPI's wheel, unpacked and not installed.
#
#   tests/native/windows.sh FOLDER [PYTHON]        PYTHON: one that has pip, of any version
set -euo pipefail
folder=$(realpath -m "$1") python=${2:-python3}
packages=$(realpath "$(dirname "$0")/../../deploy/locks/windows.txt")
[ -e "$folder/.complete" ] && exit 0
rm -rf "$folder"
mkdir -p "$folder"
"$python" -m pip download --quiet --disable-pip-version-check --dest "$folder" --require-hashes --no-deps \
  --implementation cp --python-version 3.11 --only-binary=:all: --platform win_amd64 --requirement "$packages"
"$python" -m zipfile --extract "$folder"/onnxruntime-*.whl "$folder/site"
touch "$folder/.complete"
