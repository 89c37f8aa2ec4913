"""Mamba-1, the gated memory units that read its output, retention, and attention with a memory of fixed size."""
