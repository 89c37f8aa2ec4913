"""Attention beyond the core's variants: other positions, patterns, and compositions of heads."""
