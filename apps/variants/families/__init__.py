"""Layouts of published checkpoints whose models have such parts, and of the official differential modules."""
