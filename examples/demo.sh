#!/usr/bin/env bash
# The whole road on one page: train a matched pair, look at outliers, quantize, export, generate, compare.
#
#     bash examples/demo.sh [OUT]          # default out/demo; about 3 minutes on 2 CPU cores
#
# Each line that starts with "step" is a command that you could type; its time is printed and kept in OUT/times.tsv.
set -euo pipefail

out=${1:-out/demo}
if [ -e "$out" ] && [ ! -f "$out/times.tsv" ]; then
    echo "error: $out exists and was not made by this script; choose another folder" >&2
    exit 2
fi
rm -rf "$out"
mkdir -p "$out"
: >"$out/times.tsv"

step() { # step NAME COMMAND...
    local name=$1 start=$SECONDS
    shift
    printf '\n\033[1m$ %s\033[0m\n' "$*"
    "$@"
    printf '%s\t%d\n' "$name" $((SECONDS - start)) >>"$out/times.tsv"
}

# 1. A Differential Transformer and a plain Transformer: equal parameters, the same batches in the same order.
step "train" diffbit train --preset tiny --steps 400 --attention diff_v1 -o "$out/diff_v1"
step "train" diffbit train --preset tiny --steps 400 --attention softmax --tokenizer "$out/diff_v1" -o "$out/softmax"

# 2. Their largest activations, side by side.
step "outliers" diffbit outliers "$out/diff_v1" "$out/softmax" --plot "$out/outliers.svg"

# 3. Low-bit weights.
step "quantize" diffbit quantize "$out/diff_v1" --weights int4_g32 --calibrate stdlib -o "$out/diff_v1-int4"
step "quantize" diffbit quantize "$out/softmax" --weights int4_g32 --calibrate stdlib -o "$out/softmax-int4"

# 4. ONNX artifacts; the differential one holds diffbit.DiffAttention nodes.
step "export" diffbit export "$out/diff_v1-int4" -o "$out/diff_v1-onnx"
step "export" diffbit export "$out/softmax-int4" -o "$out/softmax-onnx"

# 5. Do they compute here what they computed there? Then let them write.
step "verify" diffbit verify "$out/diff_v1-onnx" --checkpoint "$out/diff_v1-int4"
step "verify" diffbit verify "$out/softmax-onnx" --checkpoint "$out/softmax-int4"
step "run" diffbit run "$out/diff_v1-onnx" "def __init__(self" --max-tokens 48 --temperature 0.7 --top-p 0.9 --seed 1
step "run" diffbit run "$out/softmax-onnx" "def __init__(self" --max-tokens 48 --temperature 0.7 --top-p 0.9 --seed 1

# 6. Accuracy against bit-width, and everything above on one page.
step "compare" diffbit compare "$out/diff_v1" "$out/softmax" -o "$out" \
    --quantized "$out/diff_v1-int4" --quantized "$out/softmax-int4" \
    --artifact "$out/diff_v1-onnx" --artifact "$out/softmax-onnx"

printf '\nSeconds per stage:\n'
awk -F'\t' '{ seconds[$1] += $2; total += $2; if (!($1 in seen)) { seen[$1]; order[n++] = $1 } }
    END { for (i = 0; i < n; i++) printf "  %-16s %4d\n", order[i], seconds[order[i]]; printf "  %-16s %4d\n", "total", total }' \
    "$out/times.tsv"
printf 'The report: %s/report.html\n' "$out"
