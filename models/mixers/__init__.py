"""Mixers other than attention, such as recurrences with a state of fixed size: one file each, found by listing this
folder. models/mixer.py defines the contents of a file; docs/extending.md shows one."""
