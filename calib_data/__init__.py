"""Text for calibration, training and evaluation: sources with disjoint splits, tokenizers, windows, needles."""

from .needles import VALUE, Needles, NeedleWindows, needle_windows
from .sources import Conversation, Corpus, Split, load_text, shares_of
from .text_tokenizer import END_OF_TEXT, TextTokenizer, load_tokenizer
from .window import Windows, eval_windows, samples, stream, windows

__all__ = [
    "END_OF_TEXT", "VALUE", "Conversation", "Corpus", "NeedleWindows", "Needles", "Split", "TextTokenizer", "Windows",
    "eval_windows", "load_text", "load_tokenizer", "needle_windows", "samples", "shares_of", "stream", "windows",
]  # fmt: skip
