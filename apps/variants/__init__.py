"""Mixers, MLPs and families beyond those of the core, which finds them by entry points in pyproject.toml.

They are models that a differential model is compared with or made from, and parts of published hybrids; the core
neither imports nor names them.
"""
