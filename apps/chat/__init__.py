"""A conversation with a model at a terminal."""
