#!/usr/bin/env bash
# Trains the two models of this folder again: about half an hour on one idle CPU core (../README.md has the times).
#
#     bash examples/nano_1k/train.sh [OUT]          # default out/nano_1k; the fp16 models are in OUT/fp16
set -euo pipefail

out=${1:-out/nano_1k}
nano=$(dirname "$0")/../nano
train() { diffbit train --preset nano --learning-rate 0.001 --precision bf16 "$@"; }

# The same batches in the same order for both; the models learn needles in short rows first, then in long ones.
for name in diff_v1 softmax; do
    train --init "$nano/$name" --context 256 --needles 0.7 --steps 140 -o "$out/256/$name"
    train --init "$out/256/$name" --context 1024 --needles 0.5 --steps 300 --batch-size 8 --eval-every 50 -o "$out/$name"
done

python "$nano/../shrink.py" "$out" "$out/fp16" --preset nano
