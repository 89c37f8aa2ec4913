"""A model with all extensions, quantized, exported, verified and run; it writes to a folder of its own.

cp -r examples/extending/{formats,models,quantize} . && python examples/extending/check.py
"""

import os
import tempfile

import numpy as np
import torch

from diffbit.apps.train.new_tokenizer import train_tokenizer
from diffbit.export import export_artifact, reference_model
from diffbit.formats import parse_format
from diffbit.models import Decoder, LayerSpec, ModelConfig, save
from diffbit.models.attention import softmax
from diffbit.models.families import read_config, write_config
from diffbit.models.mixers import recurrence
from diffbit.models.mlp import reglu
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.quantize.methods import clipped
from diffbit.runtime import Session, verify

torch.manual_seed(0)
os.chdir(tempfile.mkdtemp())
memory = LayerSpec(recurrence.Options(num_heads=4, head_dim=32), reglu.Options(256), sub_norms=True)
attention = LayerSpec(softmax.Options(num_heads=4, num_kv_heads=2, head_dim=32), reglu.Options(256))
config = ModelConfig(vocab_size=300, hidden_size=128, layers=(memory, attention), max_position=64)
train_tokenizer(["a text to have a tokenizer"], 300, "tokenizer")
save(Decoder(config), "model", tokenizer_from="tokenizer")
quantize_checkpoint("model", "model-binary", Scheme(weights=parse_format("binary_g64")), method="rotate+clipped")
for checkpoint in ("model", "model-binary"):
    assert verify(export_artifact(checkpoint, f"{checkpoint}-onnx")).passed  # ONNX Runtime computes what torch computed

ids, session = torch.randint(300, (1, 12)), Session("model-onnx")
logits = [session.prefill(ids[:, :7].numpy()), *(session.step(ids[:, i : i + 1].numpy()) for i in range(7, 12))]
expected = reference_model("model")(ids)[0, 6:].detach()  # all tokens at once
torch.testing.assert_close(torch.tensor(np.concatenate(logits)), expected, rtol=0, atol=1e-4 * float(expected.std()))

plain = ModelConfig.uniform(
    vocab_size=300, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=256
)
assert write_config(plain, "float32")["model_type"] == "llama"
assert read_config(write_config(plain, "float32") | {"model_type": "internlm3"}) == plain

weight, format = torch.randn(64, 256), parse_format("int3_g64")
rounded = format.nearest(weight, *format.fit(weight)), clipped.quantize(weight, format)  # with the range's scale, first
errors = [float((quantized.dequantize() - weight).norm()) for quantized in rounded]
assert errors[1] < 0.95 * errors[0], errors
