"""Mamba-1, and the gated memory units that read its output."""
