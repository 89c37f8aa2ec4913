"""Attention over a cache of latents, without and with a difference."""
