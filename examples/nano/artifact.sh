#!/usr/bin/env bash
# Makes the artifact that every wheel contains (`diffbit run nano "def "`): nano's DIFF version 1, int4_g32 by GPTQ, 1.7 MB.
#
#     make models                          # or train.sh
#     bash examples/nano/artifact.sh       # writes runtime/nano; run it again when export's format changes
set -euo pipefail
cd "$(dirname "$0")/../.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
diffbit() { "${PYTHON:-.venv/bin/python}" -m diffbit "$@" --quiet >/dev/null; }
diffbit quantize examples/nano/diff_v1 --weights int4_g32 --method gptq -o "$scratch/nano"
diffbit export "$scratch/nano" -o runtime/nano --overwrite
