"""Families of checkpoints with latent attention."""
