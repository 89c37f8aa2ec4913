"""Mixed precision, a format for each linear layer, so that a model loses least within a budget of bits or bytes; and
forecasts of what quantizing and exporting take.

allocation = allocate("model", nbytes=40_000_000, method="gptq", calibration=token_ids)
write_scheme(allocation.scheme, "scheme.toml")        # `diffbit quantize --scheme` and quantize_checkpoint take it
"""
