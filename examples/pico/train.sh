#!/usr/bin/env bash
# Trains the four models of this folder again: 20 minutes on 2 CPU cores that are also busy with other work.
#
#     bash examples/pico/train.sh [OUT]          # default out/pico; the fp16 models are in OUT/fp16
set -euo pipefail

out=${1:-out/pico}
train() { diffbit train --preset pico --eval-every 200 "$@"; }

# Equal parameters within 0.3 %, the same batches in the same order.
train --attention diff_v1 -o "$out/diff_v1"
train --attention softmax --tokenizer "$out/diff_v1" -o "$out/softmax"
train --attention diff_v2 --tokenizer "$out/diff_v1" -o "$out/diff_v2"
# The Transformer with weights trained in {-1, 0, 1}.
train --attention softmax --qat ternary --tokenizer "$out/diff_v1" -o "$out/softmax_ternary"

python "$(dirname "$0")/../shrink.py" "$out" "$out/fp16"
