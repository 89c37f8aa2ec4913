#!/usr/bin/env bash
# The four models of this folder, made again: 20 minutes on 2 CPU cores that do other work, too.
#
#     bash examples/pico/train.sh [OUT]          # default out/pico; the fp16 models land in OUT/fp16
set -euo pipefail

out=${1:-out/pico}
train() { diffbit train --preset pico --eval-every 200 "$@"; }

# Equal parameters within 0.3 %, the same batches in the same order.
train --attention diff_v1 -o "$out/diff_v1"
train --attention softmax --tokenizer "$out/diff_v1" -o "$out/softmax"
train --attention diff_v2 --tokenizer "$out/diff_v1" -o "$out/diff_v2"
# The Transformer again, its weights trained in {-1, 0, 1}.
train --attention softmax --qat ternary --tokenizer "$out/diff_v1" -o "$out/softmax_ternary"

python "$(dirname "$0")/../shrink.py" "$out" "$out/fp16"
