"""The whole road, from a differential model to tokens: python examples/road.py [CHECKPOINT] [OUT]"""

import sys
from pathlib import Path

import diffbit
from diffbit.apps.outliers.activations import measure
from diffbit.calib_data import eval_windows
from diffbit.quantize import AttentionScheme

checkpoint = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "pico" / "diff_v1")
out = Path(sys.argv[2] if len(sys.argv) > 2 else "out/road")

# 1. A model: any of docs/models.md. `diffbit train` trains one, `diffbit.convert` makes a plain one differential.
decoder = diffbit.load(checkpoint)
config = decoder.config
print(f"{checkpoint}: {config.attention}, {len(config.layers)} layers, hidden size {config.hidden_size}")

# 2. Text similar to what the model will be used on: one part to calibrate on, another that nothing has seen.
length = min(256, config.max_position)
calibration = eval_windows("stdlib", checkpoint, length, max_windows=32, split="calib")
held_out = eval_windows("stdlib", checkpoint, length, max_windows=16)

# 3. Outliers: how far the largest attention logits and hidden states are from the median. They make low bits hard.
outliers = measure(decoder, held_out)
for what, numbers in (("attention logits", outliers.attention_logits), ("hidden states", outliers.hidden_states)):
    print(f"{what}: the largest is {numbers.max:.1f}, the median {numbers.median:.2f}")

# 4. Fewer bits: weights in int4, 32 to a scale, rounded by GPTQ; embedding and head in int8; an int8 KV cache.
int4, int8 = diffbit.parse_format("int4_g32"), diffbit.parse_format("int8")
attention = AttentionScheme(keys="int8", values="int8")
scheme = diffbit.Scheme(weights=int4, embedding=int8, head=int8, attention=attention)
report = diffbit.quantize_checkpoint(
    checkpoint, out / "int4", scheme, method="gptq",
    calibration=calibration.ids, calibration_mask=calibration.mask, overwrite=True,
)  # fmt: skip
print(f"{report.before.nbytes / 1e6:.2f} MB -> {report.after.nbytes / 1e6:.2f} MB of weights")

# 5. An artifact: one folder with an ONNX graph, the weights, the tokenizer, and logits that torch computed.
artifact = diffbit.export_artifact(out / "int4", out / "onnx", overwrite=True)

# 6. On the device, without torch from here on. Does ONNX Runtime compute what torch computed?
verification = diffbit.verify(artifact)
print(f"verified: {verification.passed}")

# 7. Tokens.
prompt = "def __init__(self"
print(prompt, end="")
for piece in diffbit.generate(artifact, prompt, max_tokens=48, temperature=0):
    print(piece, end="", flush=True)
print()

# 8. What the bits cost, measured on the artifact: KL from the float model in nats per token, with its 95 % interval.
for row in diffbit.compare([checkpoint, artifact], held_out).rows():
    print(f"{row['model']}: perplexity {row['perplexity']:.2f}, KL {row['KL']}")
