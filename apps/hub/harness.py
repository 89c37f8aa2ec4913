"""Runs artifacts in EleutherAI's lm-evaluation-harness, on any of its tasks:

    lm_eval --model diffbit --model_args artifact=FOLDER --tasks TASKS
    python -m diffbit.apps.hub.harness --model diffbit --model_args artifact=FOLDER --tasks TASKS

The first command needs a release of the harness after 0.4.13, which finds diffbit by the entry point `lm_eval.models`;
the second takes the same arguments and also works with older releases. `model_args` may also set threads=N, and
provider=cuda for a GPU; the harness's own --device is ignored, because it is cuda:0 even if the user asked for nothing.
`--batch_size` is the number of rows (default 8; fewer if their logits would take more than 512 MiB).

Texts begin with the special tokens that the model's tokenizer adds. If there is no context, and in rolling
loglikelihoods, the text follows the bos token, or the eos token if the model has no bos. Text that exceeds the
artifact's context is truncated at its beginning. Rows of a batch do not influence each other; an artifact whose cache
has a residual window, which rows of unequal length would share, runs one row at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...io.errors import DiffbitError, MissingDependency
from ...io.progress import track
from ...io.tokenizer_files import TOKENIZER
from ...runtime import Artifact, ChatTemplate, Sampler, Session, TextOutput, Tokenizer
from ...settings import Sampling

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    missing = MissingDependency("lm_eval", "tasks", "lm-evaluation-harness", error)
    if __name__ != "__main__":
        raise missing from None
    from ...cli import print_error

    print_error(str(missing))
    raise SystemExit(2) from None

SAMPLING = tuple(option.name for option in fields(Sampling))
BATCH_SIZE = 8
MAX_TOKENS = 256  # generated tokens if a task sets no limit, as in the harness's other models
MOST_LOGITS = 1 << 29  # bytes of a batch's logits

Pair = tuple[tuple[str, str], list[int], list[int]]  # (context, continuation) as texts, and as tokens


class DiffbitLM(TemplateLM):
    """An artifact with the interface of the harness's models."""

    def __init__(
        self,
        artifact: str,
        batch_size: int | str | None = None,
        device: str | None = None,
        threads: int | None = None,
        provider: str = "cpu",
        max_batch_size: int | None = None,
    ) -> None:
        opened = Artifact.open(artifact)
        opened.check_output()
        session = Session(opened, device=provider, threads=threads)
        if not isinstance(batch_size, int):
            batch_size = int(batch_size) if batch_size and batch_size.isdigit() else max_batch_size or BATCH_SIZE
        shared = any(buffer.multiple > 1 for buffer in opened.cache.buffers.values())
        self._open(
            session,
            Tokenizer(opened.file(TOKENIZER)),
            opened.bos_token_id,
            opened.eos_token_ids,
            opened.vocab_size,
            1 if shared else batch_size,
        )
        self.artifact = opened

    def _open(
        self,
        session: Session,
        tokenizer: Tokenizer,
        bos: int | None,
        eos: Sequence[int],
        vocab_size: int,
        batch_size: int,
    ) -> None:
        TemplateLM.__init__(self)
        if bos is None and not eos:
            raise DiffbitError("the model has neither a bos nor an eos token; the harness needs one of them")
        if batch_size < 1:
            raise DiffbitError(f"batch_size is {batch_size}, wanted 1 or more")
        self._session, self._tokenizer, self._eos = session, tokenizer, tuple(eos)
        self._bos = eos[0] if bos is None else bos
        self._vocab_size, self._batch_size, self._seeds = vocab_size, batch_size, itertools.count()

    # the methods that the harness calls

    @property
    def eot_token_id(self) -> int:
        return self._eos[0] if self._eos else self._bos

    @property
    def prefix_token_id(self) -> int:
        return self._bos

    @property
    def tokenizer_name(self) -> str:
        return self.artifact.sha256

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return "the artifact's" if chat_template else ""

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        return self._template.render(chat_history, add_generation_prompt=add_generation_prompt)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.read(self.artifact)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        tokens = self._tokenizer.encode(string, add_special_tokens=False)
        begun = add_special_tokens is None and tokens[:1] == [self._bos]  # by a chat template
        return tokens if begun or add_special_tokens is False else self._tokenizer.encode(string)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        pairs: list[Pair] = []
        owners = []
        for number, (text,) in enumerate(request.args for request in requests):
            tokens = self.tok_encode(text, add_special_tokens=False)
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self._session.capacity, 1):
                pairs.append((("", ""), *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (score, _) in zip(owners, self._loglikelihood_tokens(pairs, disable_tqdm), strict=True):
            totals[number] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """For each request: (sum of ln q over the continuation's tokens, whether each token was the most likely)."""
        rows = [(context + continuation)[-(self._session.capacity + 1) :] for _, context, continuation in requests]
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        for batch in self._batches([len(row) - 1 for row in rows], disable_tqdm):
            logits = self._run([rows[index][:-1] for index in batch], all_positions=True)
            for place, index in enumerate(batch):
                texts, _, continuation = requests[index]
                count = len(continuation)
                if count >= len(rows[index]):
                    raise DiffbitError(
                        f"a continuation of {count} tokens does not fit the context of {self._session.capacity}; "
                        "export the model with a longer context_length"
                    )
                end = len(rows[index]) - 1
                scores[index] = _scored(logits[place, end - count : end], continuation)
                if texts[1]:
                    self.cache_hook.add_partial("loglikelihood", texts, scores[index])
        return scores

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        options = [request.args[1] for request in requests]
        limits = [min(int(kwargs.get("max_gen_toks", MAX_TOKENS)), self._session.capacity - 1) for kwargs in options]
        prompts = [
            (self.tok_encode(request.args[0]) or [self.prefix_token_id])[-(self._session.capacity - count) :]
            for request, count in zip(requests, limits, strict=True)
        ]
        texts = [""] * len(prompts)
        # a batch holds prompts with the same limit of new tokens: a higher limit leaves less of the prompt
        for batch in self._batches([len(prompt) for prompt in prompts], disable_tqdm, of_equal=limits):
            batch_options = [options[index] for index in batch]
            for index, text in zip(
                batch, self._generate([prompts[i] for i in batch], batch_options, limits[batch[0]]), strict=True
            ):
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return texts

    # running the model

    def _batches(
        self, lengths: Sequence[int], quiet: bool, of_equal: Sequence[int] | None = None
    ) -> Iterator[list[int]]:
        """Return batches of row indices, longest rows first, with equal `of_equal` in a batch. Skips rows without
        tokens."""
        groups = [0] * len(lengths) if of_equal is None else list(of_equal)
        order = sorted((i for i in range(len(lengths)) if lengths[i] > 0), key=lambda i: (groups[i], -lengths[i]))
        batches: list[list[int]] = []
        for index in order:
            last = batches[-1] if batches else []
            fitting = MOST_LOGITS // (4 * self._vocab_size * lengths[last[0]]) if last else 0
            if last and len(last) < min(self._batch_size, fitting) and groups[last[0]] == groups[index]:
                last.append(index)
            else:
                batches.append([index])
        yield from batches if quiet else track(batches, "evaluating")

    def _run(self, rows: Sequence[Sequence[int]], all_positions: bool) -> NDArray[np.float32]:
        """Run rows of tokens on an empty cache -> logits [B, S, V], or [B, V] after each row's last token."""
        length = max(map(len, rows))
        ids, mask = np.zeros((len(rows), length), np.int64), np.zeros((len(rows), length), np.int64)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        self._session.reset()
        return self._session.prefill(ids, mask, all_positions=all_positions)

    def _generate(self, prompts: list[list[int]], options: Sequence[dict[str, Any]], limit: int) -> list[str]:
        """Continue each prompt by at most `limit` tokens."""
        seeds = self._seeds  # of their own: a request that is repeated gives other samples
        texts = [_Text(self._tokenizer, *row, next(seeds)) for row in zip(prompts, options, strict=True)]
        logits = self._run(prompts, all_positions=False)
        for left in range(limit - 1, -1, -1):
            for text, row in zip(texts, logits, strict=True):
                if not text.done:
                    text.push(row, self._eos)
            if not left or all(text.done for text in texts):
                break
            logits = self._session.step([[text.tokens[-1]] for text in texts])
        return [text.finished() for text in texts]


class _Text:
    """A text that grows token by token, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], kwargs: dict[str, Any], seed: int) -> None:
        until = kwargs.get("until") or []
        stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
        given = {name: kwargs[name] for name in SAMPLING if kwargs.get(name)}
        hot = kwargs.get("temperature")
        sampled = kwargs.get("do_sample", (hot or 0) > 0)
        temperature = 0.0 if not sampled else 1.0 if hot is None else hot
        self.choose = Sampler(Sampling(**given | {"temperature": float(temperature), "seed": seed}))
        self.stream, self.tokens = tokenizer.stream(prompt), list(prompt)
        self.output, self.done = TextOutput(stops, None), False

    def push(self, logits: NDArray[np.float32], eos: Sequence[int]) -> None:
        token = self.choose(logits, self.tokens)
        self.tokens.append(token)
        self.done = token in eos or self.output.push(self.stream.push(token))

    def finished(self) -> str:
        """Return the text before the first stop string."""
        self.output.push(self.stream.finish(), last=True)
        return self.output.text


def _scored(logits: NDArray[np.float32], tokens: Sequence[int]) -> tuple[float, bool]:
    """Logits [n, V] of n tokens -> (sum of their ln q, whether all are the most likely)."""
    largest = logits.max(-1, keepdims=True)
    total = largest[:, 0] + np.log(np.exp(logits - largest, dtype=np.float64).sum(-1))
    chosen = logits[np.arange(len(tokens)), tokens]
    return float((chosen - total).sum()), bool((chosen == largest[:, 0]).all())


def register() -> None:
    """Register `--model diffbit` with a harness that does not load plugins."""
    import lm_eval.models  # noqa: F401  # the harness registers its own models only into an empty registry
    from lm_eval.api.registry import model_registry, register_model

    if "diffbit" not in model_registry:
        register_model("diffbit")(DiffbitLM)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    from ...cli import print_error
    from .harness import register as register_once

    register_once()
    try:
        cli_evaluate()
    except DiffbitError as error:
        print_error(str(error))
        raise SystemExit(2) from None
