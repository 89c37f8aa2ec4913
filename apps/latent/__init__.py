"""Attention over a cache of latents: variants, and families of checkpoints that have it."""
