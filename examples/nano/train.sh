#!/usr/bin/env bash
# Trains the three models of this folder again: more than an hour on 2 CPU cores (../README.md has the times).
#
#     bash examples/nano/train.sh [OUT]          # default out/nano; the fp16 models are in OUT/fp16
set -euo pipefail

out=${1:-out/nano}
train() { diffbit train --preset nano --steps 2000 --precision bf16 --eval-every 250 "$@"; }

# Equal parameters within 0.3 %, the same batches in the same order, each by the best recipe in research/training.
train --attention diff_v1 --head-norm fixed -o "$out/diff_v1"
train --attention softmax --tokenizer "$out/diff_v1" -o "$out/softmax"
train --attention diff_v2 --learning-rate 0.004 --tokenizer "$out/diff_v1" -o "$out/diff_v2"

python "$(dirname "$0")/../shrink.py" "$out" "$out/fp16" --preset nano
