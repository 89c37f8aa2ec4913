"""The largest attention logits and hidden states of a model: `diffbit outliers`."""
