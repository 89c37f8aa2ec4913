"""Attention variants: one file each, found by listing this folder. models/mixer.py defines the contents of a file,
models/layers/attention.py has their shared code, and mixers/ has mixers other than attention.

Canonical row order: sub-heads in adjacent pairs (2i signal, 2i+1 noise); a 2d-wide value of diff_v1 is two neighbouring
sub-heads. Files on disk may have another order, which families/ converts.
"""
