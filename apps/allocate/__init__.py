"""Mixed precision: a format for each linear layer, so that a model loses least within a budget of bits or bytes.

plan = allocate("model", nbytes=40_000_000, method="gptq", calibration=token_ids)
plan.scheme.to_file("scheme.toml")                   # `diffbit quantize --scheme` and quantize_checkpoint take it
"""
