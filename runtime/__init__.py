"""Runs an artifact on a device, with numpy, onnxruntime and tokenizers but without torch.

    session = Session("out/model")
    tokenizer = Tokenizer(session.artifact.file("tokenizer.json"))
    generate(session, tokenizer, "def main(", max_tokens=64, sampler=Sampler(0.8, top_p=0.9, seed=1), on_text=print)

Importing this package needs only numpy: ONNX Runtime is loaded with the first session, tokenizers with a tokenizer.
"""

from __future__ import annotations

from .artifact import Artifact, CacheSpec, FileEntry, Golden
from .bench import bench
from .chat import Chat, Reply
from .generate import Generation, generate
from .sampler import Sampler
from .session import Session, slowdowns
from .template import ChatTemplate, Message
from .tokenizer import TextStream, Tokenizer
from .verify import Check, Verification, verify

__all__ = [
    "Artifact",
    "CacheSpec",
    "Chat",
    "ChatTemplate",
    "Check",
    "FileEntry",
    "Generation",
    "Golden",
    "Message",
    "Reply",
    "Sampler",
    "Session",
    "TextStream",
    "Tokenizer",
    "Verification",
    "bench",
    "generate",
    "slowdowns",
    "verify",
]
