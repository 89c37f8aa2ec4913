"""Mamba-1, the gated memory units that read its output, and retention."""
