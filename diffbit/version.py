"""diffbit's version, for pyproject.toml and for the packages, which do not import diffbit itself."""

__version__ = "0.1.0"
