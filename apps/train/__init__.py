"""Training: presets, options, the training loop, quantization-aware training, distillation, checkpoints."""
