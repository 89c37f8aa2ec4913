"""Experimental attentions, mixers and MLPs of papers without a published model; the core finds them by entry points in
pyproject.toml, and neither imports nor names them.
"""
