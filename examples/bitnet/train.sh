#!/usr/bin/env bash
# Trains the models of this folder and similar ones from those in ../nano: hours on one CPU core (research/bitnet has times).
#
#     bash examples/bitnet/train.sh [OUT]          # default out/bitnet; the fp16 models are in OUT/fp16
set -euo pipefail

out=${1:-out/bitnet}
nano=$(dirname "$0")/../nano
train() { diffbit train --preset nano --precision bf16 --eval-every 250 "$@"; }

for variant in diff_v1 diff_v2 softmax; do
    # From scratch: as many tokens as the float models, the same batches in the same order.
    train --steps 2000 --attention $variant --qat ternary --tokenizer "$nano/diff_v1" -o "$out/${variant}_ternary"
    # The same, with the float model as a teacher.
    train --steps 2000 --attention $variant --qat ternary --tokenizer "$nano/diff_v1" --distill "$nano/$variant" \
        -o "$out/${variant}_distilled"
    # From the float model, which is also the teacher.
    train --steps 200 --init "$nano/$variant" --qat int4_g128 --distill "$nano/$variant" -o "$out/${variant}_int4"
    # As long as int4, without rounding: the effect of the 200 steps alone.
    train --steps 200 --init "$nano/$variant" --learning-rate 5e-5 -o "$out/${variant}_longer"
done

python "$nano/../shrink.py" "$out" "$out/fp16" --preset nano
