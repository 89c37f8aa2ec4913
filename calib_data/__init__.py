"""Text for calibration, training and evaluation: sources with disjoint splits, tokenizers, windows of tokens."""

from .sources import Corpus, Split, load_text
from .tokenizer import END_OF_TEXT, TextTokenizer, load_tokenizer, train_tokenizer
from .window import Windows, eval_windows, stream, windows

__all__ = [
    "END_OF_TEXT",
    "Corpus",
    "Split",
    "TextTokenizer",
    "Windows",
    "eval_windows",
    "load_text",
    "load_tokenizer",
    "stream",
    "train_tokenizer",
    "windows",
]
