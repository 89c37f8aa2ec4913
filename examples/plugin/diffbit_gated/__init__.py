"""Attention variants for diffbit."""
