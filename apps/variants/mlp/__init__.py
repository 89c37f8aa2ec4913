"""Gated MLPs with other activations than the core's, and MLPs of other kinds."""
