"""/v1/embeddings: unit vectors of texts, by artifacts of `diffbit export --embeddings`."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from ...io.errors import DiffbitError
from ...io.fields import get, one_of
from ...runtime import POOLINGS, Session
from .openai_requests import Prompts, Refused, Served, choose_model, known_fields, token_ids

FIELDS = "model", "input", "encoding_format", "dimensions", "pooling", "user"
HIDDEN = "hidden_states"
MOST_TEXTS = 2048  # as OpenAI


def embed(session: Session, ids: Sequence[int], pooling: str | None = None) -> NDArray[np.float32]:
    """Return a unit vector [E]: the mean of the tokens' hidden states after the final norm, or the last one; None: as
    the artifact says.

    Raises DiffbitError for an artifact that gives logits, no tokens, or more than the context holds.
    """
    session.artifact.check_output(HIDDEN)
    pooling = pooling or session.artifact.pooling
    if not len(ids):
        raise DiffbitError("a text without tokens has no embedding")
    session.reset()
    states = session.prefill([list(ids)], all_positions=pooling == "mean")[0].astype(np.float64)
    pooled = states.mean(0) if pooling == "mean" else states
    vector: NDArray[np.float32] = (pooled / max(float(np.linalg.norm(pooled)), 1e-30)).astype(np.float32)
    return vector


@dataclass(frozen=True)
class Embeddings:
    """A request: vectors of texts, with `pooling` one of POOLINGS."""

    model: Served
    texts: Sequence[Sequence[int]]
    pooling: str
    base64: bool

    @classmethod
    def read(cls, values: object, models: Mapping[str, Served]) -> Embeddings:
        """Texts come as "input": a text, token ids, or a list of either."""
        body = known_fields(values, FIELDS)
        model = choose_model(body, models)
        model.artifact.check_output(HIDDEN)
        texts = token_ids(get(body, "input", Prompts), model, "input", MOST_TEXTS)
        encoding = get(body, "encoding_format", Annotated[str, one_of("float", "base64")], "float")
        pooling = get(body, "pooling", Annotated[str, one_of(*POOLINGS)], model.artifact.pooling)
        width = model.artifact.width
        if (dimensions := get(body, "dimensions", int, width)) != width:
            raise Refused(400, f"dimensions is {dimensions}, wanted {width}: the model's width", param="dimensions")
        return cls(model, texts, pooling, encoding == "base64")

    def embed(self, ids: Sequence[int]) -> str | list[float]:
        vector = embed(self.model.engine.session, ids, self.pooling)
        return b64encode(vector.tobytes()).decode() if self.base64 else vector.tolist()

    def answer(self, vectors: Sequence[str | list[float]]) -> dict[str, Any]:
        rows = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(vectors)]
        count = sum(map(len, self.texts))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": rows, "model": self.model.name, "usage": usage}
