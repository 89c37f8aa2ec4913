"""The price of `--reproducible`: a conversation in which each prompt has the earlier prompts and answers before it.

    python research/serve/reproducible.py out/smollm2/plain-onnx

A line for each turn: tokens of the prompt; then, without the option and with it, how many of them were cached, the
milliseconds of processor time that the others took (one thread), and whether all logits of the answer are, to the bit,
those after an empty cache. The conversation's text is random tokens.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from diffbit.runtime import Logits, Session


def answer(session: Session, prompt: list[int], tokens: int) -> tuple[int, int, list[Logits]]:
    """Cached tokens, milliseconds to the first token, and the logits of a greedy answer."""
    begin = time.process_time()
    cached = session.reuse(prompt)
    for start in range(cached, len(prompt), session.chunk):
        logits = session.prefill([prompt[start : start + session.chunk]])[0]
    milliseconds = round(1000 * (time.process_time() - begin))
    steps = [logits]
    while len(steps) < tokens:
        steps.append(session.step([[int(steps[-1].argmax())]])[0])
    return cached, milliseconds, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("artifact")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=100, help="of an answer")
    options = parser.parse_args()
    cached = Session(options.artifact, threads=1)
    reproducible, empty = Session(cached.artifact, threads=1, reproducible=True), Session(cached.artifact, threads=1)
    random = np.random.default_rng(0)
    text = lambda count: random.integers(3, cached.artifact.vocab_size, count).tolist()  # noqa: E731
    prompt = text(60)
    print("| prompt | cached | ms | same bits | `--reproducible`: cached | ms | same bits |")
    print("|---|---|---|---|---|---|---|")
    for _ in range(options.turns):
        empty.reset()
        *_, wanted = answer(empty, prompt, options.tokens)
        row = [str(len(prompt))]
        for session in (cached, reproducible):
            count, milliseconds, got = answer(session, prompt, options.tokens)
            row += [str(count), str(milliseconds), "yes" if np.array_equal(got, wanted) else "no"]
        print(f"| {' | '.join(row)} |", flush=True)
        prompt += [*(int(logits.argmax()) for logits in wanted), *text(30)]


if __name__ == "__main__":
    main()
