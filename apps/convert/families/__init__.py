"""Families of plain models beyond the core's, read only: entry points of pyproject.toml name this folder."""
