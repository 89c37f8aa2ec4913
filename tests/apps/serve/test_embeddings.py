"""Embeddings against torch: a model's hidden states after the final norm, over HTTP and through OpenAI's client."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from starlette.requests import Request
from starlette.testclient import TestClient

from diffbit.apps.serve.embeddings import Embeddings, embed
from diffbit.apps.serve.openai_requests import Served
from diffbit.apps.serve.server import Server
from diffbit.apps.web.site import write_site
from diffbit.cli.app import main
from diffbit.export import export_artifact, reference_model
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import load, save
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint
from diffbit.runtime import Artifact, Session, SessionOptions, Tokenizer, generate, verify

from ...export.helpers import write_tokenizer
from ...models.helpers import hf_model, saved

TEXTS = "def parse(text):\n    return text.split()", "import é😀 ", "x = 1; " * 20


@pytest.fixture(scope="module", params=["float", "int4", "untied"])
def model(
    request: pytest.FixtureRequest, trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """(checkpoint, artifact): in float; in int4 with an int4 cache; and with a head of its own."""
    folder, checkpoint = tmp_path_factory.mktemp("embeddings"), trained("diff_v2")
    if request.param == "int4":
        attention = AttentionScheme(keys="int4", values="int4")
        quantize_checkpoint(checkpoint, folder / "low", Scheme(weights=parse_format("int4_g32"), attention=attention))
        checkpoint = folder / "low"
    elif request.param == "untied":
        tied = load(checkpoint)
        config = tied.config.__class__(**{**vars(tied.config), "tie_embeddings": False})
        other = tied.__class__(config)
        other.load_state_dict(
            tied.state_dict() | {"lm_head.weight": torch.randn(config.vocab_size, config.hidden_size)}
        )
        save(other, folder / "untied", tokenizer_from=checkpoint)
        checkpoint = folder / "untied"
    return checkpoint, export_artifact(checkpoint, folder / "model", embeddings=True)


@pytest.fixture(scope="module")
def client(model: tuple[Path, Path]) -> Iterator[TestClient]:
    served = Served(Artifact.open(model[1]), SessionOptions(threads=1), rows=4, queue=4)
    with TestClient(Server([served]).application(), base_url="http://localhost") as client:
        yield client
    served.engine.close()


@torch.inference_mode()
def by_torch(checkpoint: Path, ids: list[int], pooling: str) -> np.ndarray:
    decoder = reference_model(checkpoint)
    states = decoder.model.norm(decoder.hidden(torch.tensor([ids])))[0].double()
    pooled = states.mean(0) if pooling == "mean" else states[-1]
    return (pooled / pooled.norm()).numpy()


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_those_of_torch(model: tuple[Path, Path], pooling: str) -> None:
    checkpoint, artifact = model
    assert verify(artifact).passed
    tokenizer = Tokenizer(artifact / "tokenizer.json")
    for native in (False, True):
        session = Session(artifact, threads=1, native=native)
        for text in TEXTS:
            ids = tokenizer.encode(text)
            vector, right = embed(session, ids, pooling), by_torch(checkpoint, ids, pooling)
            assert vector.shape == right.shape and np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
            assert vector @ right > 1 - 2e-4, (text, native)


def test_the_artifact_has_no_head(model: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, artifact = model
    whole = Artifact.open(export_artifact(checkpoint, tmp_path / "whole"))
    small = Artifact.open(artifact)
    if not whole.model["tie_embeddings"]:
        assert small.nbytes < whole.nbytes - 2 * small.vocab_size * small.width
    assert (small.output, small.width, whole.output) == ("hidden_states", small.model["hidden_size"], "logits")
    assert not (artifact / "genai_config.json").exists()


FAMILIES: dict[str, dict[str, Any]] = {
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.5},
    "gemma3_text": {"query_pre_attn_scalar": 11, "sliding_window": 5},
    "qwen3": {},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantized", [False, True])
def test_hidden_states_are_those_of_transformers(family: str, quantized: bool, tmp_path: Path) -> None:
    """Of tied models whose head has factors, which fold into the final norm; and of tensors without the prefix
    "model.", as AutoModel saves them. sentence-transformers' folder says how they are pooled."""
    theirs = hf_model(family, tie_word_embeddings=True, hidden_size=32, intermediate_size=64).model
    theirs.save_pretrained(tmp_path / "m")
    write_tokenizer(tmp_path / "m", 61)
    (tmp_path / "m" / "1_Pooling").mkdir()
    modes = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (tmp_path / "m" / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    source = tmp_path / "m"
    if quantized:
        quantize_checkpoint(source, source := tmp_path / "q", Scheme(weights=parse_format("int8")))
    artifact = export_artifact(source, tmp_path / "a", embeddings=True)
    session, ids = Session(artifact, threads=1), [7 * i % 61 for i in range(12)]
    with torch.inference_mode():
        right = theirs(torch.tensor([ids])).last_hidden_state[0].numpy()
    session.reset()
    states = session.prefill([ids], all_positions=True)[0]
    np.testing.assert_allclose(states, right, atol=(0.5 if quantized else 1e-4) * right.std())
    assert session.artifact.pooling == "last"
    assert embed(session, ids) @ right[-1] / np.linalg.norm(right[-1]) > 0.99


@pytest.mark.parametrize(
    ("pooling", "modules", "words"),
    [
        ({"pooling_mode_cls_token": True}, None, "by pooling_mode_cls_token, wanted mean or last"),
        ({"pooling_mode": "max"}, None, "by max, wanted mean or last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, None, "by mean, last, wanted"),
        ({"pooling_mode": "mean"}, ["Transformer", "Pooling", "Dense"], "by mean, then Dense, wanted"),
    ],
)
def test_other_ways_of_pooling_are_refused(
    pooling: dict[str, Any], modules: list[str] | None, words: str, tmp_path: Path
) -> None:
    source = saved(hf_model("llama"), tmp_path / "m")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if modules is not None:
        kinds = [{"type": f"sentence_transformers.models.{module}"} for module in modules]
        (source / "modules.json").write_text(json.dumps(kinds))
    write_tokenizer(source, 61)
    with pytest.raises(DiffbitError, match=words):
        export_artifact(source, tmp_path / "a", embeddings=True)
    export_artifact(source, tmp_path / "a")  # logits are not pooled


def test_requests(client: TestClient, model: tuple[Path, Path]) -> None:
    tokenizer = Tokenizer(model[1] / "tokenizer.json")
    answer = client.post("/v1/embeddings", json={"model": "model", "input": list(TEXTS)}).json()
    count = sum(len(tokenizer.encode(text)) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count} and answer["model"] == "model"
    rows = [np.float32(row["embedding"]) for row in answer["data"]]
    assert [row["index"] for row in answer["data"]] == [0, 1, 2]
    ids = tokenizer.encode(TEXTS[0])
    for value in (TEXTS[0], ids, [TEXTS[0]], [ids]):
        one = client.post("/v1/embeddings", json={"input": value, "encoding_format": "base64"}).json()["data"]
        numbers = np.frombuffer(base64.b64decode(one[0]["embedding"]), np.float32)
        np.testing.assert_array_equal(numbers, rows[0])
    last = client.post("/v1/embeddings", json={"input": TEXTS[0], "pooling": "last"}).json()["data"][0]["embedding"]
    assert not np.allclose(last, rows[0], atol=1e-3)
    library = openai.OpenAI(api_key="x", base_url="http://localhost/v1", http_client=client)  # it asks for base64
    made = library.embeddings.create(model="model", input=list(TEXTS))
    np.testing.assert_array_equal(np.float32([row.embedding for row in made.data]), np.stack(rows))


def test_a_client_that_leaves_ends_its_request(
    client: TestClient, model: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No text is computed that nobody wants any more."""
    done, whole = list[int](), Embeddings.embed
    gone: list[Any] = []

    async def disconnected(self: Request) -> bool:
        gone.append(self)
        return self is gone[0] and len(gone) > 2

    monkeypatch.setattr(Request, "is_disconnected", disconnected)
    monkeypatch.setattr(Embeddings, "embed", lambda self, ids: [done.append(len(ids)), whole(self, ids)][1])
    answer = client.post("/v1/embeddings", json={"input": [[5] * 7] * 9})
    assert answer.status_code == 499, answer.text
    assert done == [7, 7]
    assert client.post("/v1/embeddings", json={"input": [[5] * 3] * 2}).status_code == 200 and done == [7, 7, 3, 3]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("embeddings", {}, "input"),
        ("embeddings", {"input": []}, "input has 0 texts"),
        ("embeddings", {"input": "x", "dimensions": 7}, "dimensions is 7, wanted 128"),
        ("embeddings", {"input": "x", "pooling": "max"}, "wanted one of mean, last"),
        ("embeddings", {"input": "x " * 2000}, "the context holds"),
        ("embeddings", {"input": [100_000]}, "outside the vocabulary"),
        ("completions", {"prompt": "x"}, "returns hidden_states, wanted logits"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "returns hidden_states"),
    ],
)
def test_bad_requests(client: TestClient, path: str, body: dict[str, object], said: str) -> None:
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.json()


def test_what_needs_logits_refuses(
    model: tuple[Path, Path], trained: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint, artifact = model
    session = Session(artifact)
    with pytest.raises(DiffbitError, match="export the model again without --embeddings"):
        generate(session, "x", max_tokens=1, temperature=0).result()
    with pytest.raises(DiffbitError, match="export the model again with --embeddings"):
        embed(Session(export_artifact(trained("diff_v1"), tmp_path / "logits")), [3])
    with pytest.raises(DiffbitError, match="without --embeddings"):
        write_site(artifact, tmp_path / "site")
    commands = (
        ["verify", artifact, "--checkpoint", checkpoint],
        ["run", artifact, "x"],
        ["compare", trained("diff_v2"), "--artifact", artifact, "--bits", "8", "--max-windows", "2"],
        ["export", trained("diff_v1"), "--embeddings", "--layout", "transformers.js", "-o", tmp_path / "js"],
    )
    for command in commands:
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in command])
        said = capfd.readouterr().err.splitlines()[-1]
        assert stopped.value.code == 2 and "--embeddings" in said, said
