"""diffbit's version, read by pyproject.toml and by the packages, which do not import diffbit itself."""

__version__ = "0.1.0"
