"""Runs an artifact on a device, with numpy, onnxruntime and tokenizers but without torch.

    for piece in generate("out/model", "def main(", max_tokens=64, temperature=0.8, top_p=0.9, seed=1):
        print(piece, end="", flush=True)

Importing this package needs only numpy: ONNX Runtime is loaded with the first session, tokenizers with a tokenizer.
"""

from __future__ import annotations

from ..settings import SessionOptions
from .artifact import FILE_BYTES, MANIFEST, POOLINGS, Artifact
from .bench import bench
from .chat import Chat
from .constraint import Constraint, Grammars
from .generate import MAX_TOKENS, FinishReason, Generation, Pieces, TextOutput, generate
from .loops import LoopGuard
from .sampler import Sampler
from .session import Logits, Session, slowdowns
from .template import RESERVED_VARIABLES, THINKING_SWITCHES, ChatTemplate, Message, NoTemplate
from .thinking import ThinkingReader, begins_thinking
from .tokenizer import TextStream, Tokenizer
from .verify import Verification, verify

__all__ = [
    "FILE_BYTES", "MANIFEST", "MAX_TOKENS", "POOLINGS", "RESERVED_VARIABLES", "THINKING_SWITCHES", "Artifact", "Chat",
    "ChatTemplate", "Constraint", "FinishReason", "Generation", "Grammars", "Logits", "LoopGuard", "Message",
    "NoTemplate", "Pieces", "Sampler", "Session", "SessionOptions", "TextOutput", "TextStream", "ThinkingReader",
    "Tokenizer", "Verification", "begins_thinking", "bench", "generate", "slowdowns", "verify",
]  # fmt: skip
