"""diffbit's version. pyproject.toml reads it here, and so do the rooms, which do not import the package above them."""

__version__ = "0.1.0"
