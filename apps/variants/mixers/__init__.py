"""Mamba-1, the gated memory units that read its output, retention, Infini-attention, and TTT-Linear."""
