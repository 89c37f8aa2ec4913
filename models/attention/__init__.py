"""Attention variants: a file each, found by listing this folder. models/mixer.py says what a file has,
models/layers/attention.py has what they share (mixers/ has those that are no attention).

Canonical order of rows: sub-heads in adjacent pairs (2i signal, 2i+1 noise); a 2d-wide value of diff_v1 as two
neighbouring sub-heads. Files on disk may have another order: families/.
"""
