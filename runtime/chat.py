"""A conversation with a model: applies its chat template and keeps the KV cache between turns.

For each message, the whole conversation is rendered again and its tokens are compared with those in the session's
cache; only tokens after the common prefix are computed. So the model always answers the whole conversation, even if a
template changes earlier turns, or the model wrote its answer in other tokens than the tokenizer would.

If a conversation no longer fits, its oldest turns are dropped until half of the context is free. Half, because the
remaining turns must be computed again each time. The system prompt stays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ..io.errors import DiffbitError
from .artifact import TOKENIZER
from .generate import MAX_TOKENS, Choose, Generation, OnText, generate
from .sampler import Sampler
from .session import Session
from .template import ChatTemplate, Message
from .tokenizer import Tokenizer

ROOM = 4  # 1 / ROOM of the context, or max_tokens if that is less, stays free for an answer


@dataclass(frozen=True)
class Reply(Generation):
    """An answer, with its token counts and times."""

    dropped: int  # messages dropped from the conversation because the context was full


class Chat:
    """A conversation.

        chat = Chat(Session("out/model"), system="You answer in one sentence.")
        reply = chat.send("What is a KV cache?", on_text=partial(print, end="", flush=True))
        reply.text, reply.finish_reason, reply.prompt_tokens, reply.cached_tokens

    Tokenizer, template and sampler default to the model's own: `Sampler.of` reads generation_config.json.
    An answer ends after `max_tokens`, at one of the model's end tokens, the tokenizer's eos_token or a `stop` string,
    and, unless `allow_loops`, when it repeats the same tokens again and again (loops.py). think: whether a model that
    can do both thinks before it answers; None: as its template has it. `sampler`, `max_tokens`, `system`, `think` and
    `turns` can be changed between messages. Raises DiffbitError for a model without a chat template, or `think` for one
    whose template has no switch for it.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
        *,
        system: str | None = None,
        sampler: Choose | None = None,
        max_tokens: int = MAX_TOKENS,
        stop: str | Sequence[str] = (),
        think: bool | None = None,
        allow_loops: bool = False,
    ) -> None:
        artifact = session.artifact
        self.session = session
        self.tokenizer = Tokenizer(artifact.file(TOKENIZER)) if tokenizer is None else tokenizer
        self.template = ChatTemplate.read(artifact) if template is None else template
        self.system = system
        self.turns: list[Message] = []
        self.sampler = Sampler.of(artifact) if sampler is None else sampler
        self.max_tokens, self._stop, self._allow_loops = max_tokens, stop, allow_loops
        self.think = think
        self.end_tokens = self.template.end_tokens(artifact, self.tokenizer)
        self._halted = False

    @property
    def think(self) -> bool | None:
        """Whether the model thinks before it answers; None: as its template has it."""
        return self._think

    @think.setter
    def think(self, think: bool | None) -> None:
        self.variables = self.template.thinking(think)  # of the template
        self._think = think

    @property
    def messages(self) -> list[Message]:
        """Return the conversation, the system prompt included."""
        return self._with_system(self.turns)

    def reset(self) -> None:
        """Forget the turns; the system prompt stays."""
        self.turns = []

    def undo(self) -> None:
        """Forget the last message and its answer."""
        self.turns = self.turns[:-2]

    def halt(self) -> None:
        """End the answer that `send` is generating; for a signal handler, or another thread."""
        self._halted = True

    def send(self, text: str, on_text: OnText | None = None) -> Reply:
        """Answer a message. `on_text` receives the answer as it comes, whole characters only.

        If `halt` ends the answer, its text so far stays in the conversation. If it had no token yet, or an exception
        ended it, the conversation does not change. Raises DiffbitError for a message that is longer than the context,
        or one that the template refuses.
        """
        with self.session.exclusive():
            self._halted = False
            before = [*self.turns, Message(role="user", content=text)]
            turns, token_ids = self._fitting(before)
            pieces = generate(
                self.session, token_ids, max_tokens=self.max_tokens, stop=self._stop, sampler=self.sampler,
                tokenizer=self.tokenizer, end_tokens=self.end_tokens, allow_loops=self._allow_loops,
                reuse=True, interrupted=lambda: self._halted,
            )  # fmt: skip
            for piece in pieces:
                if on_text is not None:
                    on_text(piece)
            generation = pieces.result()
            if generation.token_ids:
                self.turns = [*turns, Message(role="assistant", content=generation.text)]
        return Reply(**vars(generation), dropped=len(before) - len(turns))

    def _fitting(self, turns: list[Message]) -> tuple[list[Message], list[int]]:
        """Return the turns and their tokens, without the oldest turns if they leave no room for an answer."""
        capacity = self.session.capacity
        token_ids = self._encoded(turns)
        if len(token_ids) + min(self.max_tokens, capacity // ROOM) > capacity:
            begins = [index for index, message in enumerate(turns) if message["role"] == "user"]
            last = len(begins) - 1
            fits = bisect_left(
                begins, True, min(1, last), last, key=lambda begin: 2 * len(self._encoded(turns[begin:])) <= capacity
            )
            turns = turns[begins[fits] :]
            token_ids = self._encoded(turns)
        if len(token_ids) > capacity:
            raise DiffbitError(
                f"the message takes {len(token_ids)} tokens, system prompt included, but the context holds {capacity}; "
                "shorten it"
            )
        return turns, token_ids

    def _encoded(self, turns: list[Message]) -> list[int]:
        # the template writes the special tokens itself, bos included
        text = self.template.render(self._with_system(turns), variables=self.variables)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _with_system(self, turns: list[Message]) -> list[Message]:
        return ([] if self.system is None else [Message(role="system", content=self.system)]) + turns
