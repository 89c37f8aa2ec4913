"""Mixtures of the heads of each variant of the core."""
