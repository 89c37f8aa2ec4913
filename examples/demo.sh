#!/usr/bin/env bash
# The whole workflow on one page: train a matched pair, measure outliers, quantize, export, generate, compare.
#
#     bash examples/demo.sh [OUT]          # default out/demo; about 3 minutes on 2 CPU cores
#
# It prints each command as you could type it, behind a $. The time of each is kept in OUT/times.tsv.
set -euo pipefail

out=${1:-out/demo}
source "$(dirname "$0")/steps.sh"
rm -rf "$out"
mkdir -p "$out"
: >"$out/times.tsv"

# 1. A Differential Transformer and a plain Transformer: equal parameters, the same batches in the same order.
step "train" diffbit train --preset tiny --steps 400 --attention diff_v1 -o "$out/diff_v1"
step "train" diffbit train --preset tiny --steps 400 --attention softmax --tokenizer "$out/diff_v1" -o "$out/softmax"

# 2. Their largest activations, side by side.
step "outliers" diffbit outliers "$out/diff_v1" "$out/softmax" --data stdlib --plot "$out/outliers.svg"

# 3. Low-bit weights.
step "quantize" diffbit quantize "$out/diff_v1" --weights int4_g32 --calibrate stdlib -o "$out/diff_v1-int4"
step "quantize" diffbit quantize "$out/softmax" --weights int4_g32 --calibrate stdlib -o "$out/softmax-int4"

# 4. ONNX artifacts; the differential one has diffbit.DiffAttention nodes.
step "export" diffbit export "$out/diff_v1-int4" -o "$out/diff_v1-onnx"
step "export" diffbit export "$out/softmax-int4" -o "$out/softmax-onnx"

# 5. Verify that they compute the same results here, and generate text.
step "verify" diffbit verify "$out/diff_v1-onnx" --checkpoint "$out/diff_v1-int4"
step "verify" diffbit verify "$out/softmax-onnx" --checkpoint "$out/softmax-int4"
step "run" diffbit run "$out/diff_v1-onnx" "def __init__(self" --max-tokens 48 --temperature 0.7 --top-p 0.9 --seed 1
step "run" diffbit run "$out/softmax-onnx" "def __init__(self" --max-tokens 48 --temperature 0.7 --top-p 0.9 --seed 1

# 6. Accuracy against bit-width, and everything above on one page.
step "compare" diffbit compare "$out/diff_v1" "$out/softmax" --data stdlib -o "$out" \
    --quantized "$out/diff_v1-int4" --quantized "$out/softmax-int4" \
    --artifact "$out/diff_v1-onnx" --artifact "$out/softmax-onnx"

print_times
echo "The report: $out/report.html"
