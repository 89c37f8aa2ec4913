"""Mixers that are no attention, such as recurrences with a state of fixed size: a file each, found by listing this
folder. models/mixer.py says what a file has; docs/extending.md shows one."""
