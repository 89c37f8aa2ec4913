"""Gated MLPs with other activations than the core's."""
