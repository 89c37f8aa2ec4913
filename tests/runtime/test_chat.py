"""Conversations: each answer is that to the whole conversation, and only what is new is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffbit.io.errors import DiffbitError
from diffbit.runtime import Artifact, Chat, ChatTemplate, Sampler, Session, Tokenizer, generate
from diffbit.runtime.loops import PLAIN_TOKENS

from .toy import VOCAB, Toy, follows, random_toy, seal

SIMPLE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
COUNTING = "{{ messages | length }}" + SIMPLE  # changes the conversation's beginning from turn to turn
TRIMMING = SIMPLE.replace("m.content", "m.content | trim")


def write_chat_model(folder: Path, toy: Toy, template: str = SIMPLE, **options: Any) -> Path:
    """An artifact with a chat template and, as `generation`, settings of sampling; greedy by default."""
    generation = options.pop("generation", {"do_sample": False})
    toy.write(folder, **options)
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    (folder / "generation_config.json").write_text(json.dumps(generation))
    manifest = json.loads((folder / "diffbit.json").read_text())
    seal(folder, {key: value for key, value in manifest.items() if key != "files"})
    return folder


class Counted(Session):
    """A session that counts the tokens which it computes."""

    computed = 0

    def _append(self, ids: Any, *arguments: Any, **options: Any) -> Any:
        self.computed += ids.shape[1]
        return super()._append(ids, *arguments, **options)


def check_turns(chat: Chat, fresh: Session, messages: list[str]) -> list[int]:
    """Each answer equals that of a session that computes the whole conversation; the numbers of cached tokens."""
    cached = []
    for text in messages:
        before = chat.session.computed  # type: ignore[attr-defined]
        reply = chat.send(text)
        conversation = [*chat.messages[:-2], {"role": "user", "content": text}]
        prompt = chat.tokenizer.encode(chat.template.render(conversation), add_special_tokens=False)
        scratch = generate(
            fresh, prompt, max_tokens=chat.max_tokens, end_tokens=chat.end_tokens, temperature=0
        ).result()
        assert reply.token_ids == scratch.token_ids
        assert chat.turns[-1] == {"role": "assistant", "content": reply.text}
        assert reply.prompt_tokens == len(prompt)
        computed = chat.session.computed - before  # type: ignore[attr-defined]
        assert computed == len(prompt) - reply.cached_tokens + len(reply.token_ids) - 1
        cached.append(reply.cached_tokens)
    return cached


MESSAGES = ["hello", "and again?", " more\n", "x"]


@pytest.mark.parametrize("template", [SIMPLE, COUNTING, TRIMMING])
def test_answers_are_those_to_the_whole_conversation(template: str, in_place: bool, tmp_path: Path) -> None:
    """The random model writes bytes that are no text, so its answers' tokens are not those of their texts."""
    toy = random_toy(seed=3, vocab=VOCAB, places=256)
    folder = write_chat_model(tmp_path / "a", toy, template, in_place=in_place, context=200)
    chat = Chat(Counted(folder, threads=1), system="S", max_tokens=9)
    cached = check_turns(chat, Session(folder, threads=1), MESSAGES)
    assert cached[0] == 0
    chat.system = "T"
    chat.turns = chat.turns[2:]
    check_turns(chat, Session(folder, threads=1), ["after a change", "and on"])
    if in_place and template == SIMPLE:
        assert all(n > 4 for n in cached[1:])
    if template == COUNTING:
        assert cached[1:] == [0, 0, 0]


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_low_bit_caches_give_the_same_answers(kv: str, checkpoint: Path, tmp_path: Path) -> None:
    """int8 is cut where answers differ, int4 within its residual window; elsewhere it is computed again."""
    from diffbit.export import export_artifact
    from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint

    scheme = Scheme(attention=AttentionScheme(keys=kv, values=kv))
    quantize_checkpoint(checkpoint, tmp_path / "q", scheme)
    (tmp_path / "q" / "chat_template.jinja").write_text(SIMPLE)
    session = Counted(export_artifact(tmp_path / "q", tmp_path / "a"), threads=1)
    chat = Chat(session, max_tokens=6, sampler=Sampler())
    cached = check_turns(chat, Session(session.artifact, threads=1), [*MESSAGES, "now a longer text, beyond 64 tokens"])
    assert session.length > 64 and (any(cached) or not session.native)
    fresh, cuts = Session(session.artifact, threads=1), set()
    for length in (20, 63, 64, 65, 96, 110):
        for common in (1, 19, 32, 62, 63, 64, 80, 95, 100):
            session.reset()
            session.prefill([[3 + i % 7 for i in range(length)]])
            ids = [3 + i % 7 for i in range(common)] + [1, 2, 3] * 3
            start = session.reuse(ids)
            fresh.reset()
            assert np.allclose(session.prefill([ids[start:]]), fresh.prefill([ids]), atol=1e-4)
            cuts.add((length, common, start))
    if session.native:
        cut = {(length, common) for length, common, start in cuts if 0 < start < length}
        assert all(start in (0, min(length, common)) for length, common, start in cuts)
        assert (110, 1) in cut if kv == "int8" else (110, 1) not in cut and {(110, 100), (65, 64), (63, 62)} <= cut


def test_only_new_tokens_are_computed(tmp_path: Path, in_place: bool) -> None:
    """A model that answers ":" with "bcd" and its end token, in the tokens of the text."""
    folder = write_chat_model(tmp_path / "a", follows(":bcd", end=257), in_place=in_place, context=60)
    chat = Chat(Counted(folder, threads=1))
    pieces: list[str] = []
    reply = chat.send("hello", pieces.append)
    assert (reply.text, pieces, reply.finish_reason) == ("bcd", ["b", "c", "d"], "eos")
    assert (reply.prompt_tokens, reply.cached_tokens) == (len("u:hello") + 1 + 2, 0)
    for _ in range(2):  # the end token, the message and "a:"
        before = chat.session.length
        assert (reply := chat.send("yes")).cached_tokens == before
        assert reply.prompt_tokens == before + 1 + len("u:yes") + 1 + 2
    chat.reset()
    assert chat.messages == [] and chat.send("hey").prompt_tokens == 8


def test_a_full_context_drops_the_oldest_turns(tmp_path: Path) -> None:
    """The oldest turns leave, the system prompt stays, and half of the context is free again."""
    folder = write_chat_model(tmp_path / "a", follows(":bcd", end=257), in_place=True, context=64)
    chat = Chat(Session(folder, threads=1), system="Be brief")  # 11 tokens; a turn with its answer has 12
    replies = [chat.send("hey") for _ in range(6)]
    assert [reply.dropped for reply in replies] == [0, 0, 0, 4, 0, 4]
    assert all(reply.text == "bcd" for reply in replies)
    assert chat.messages[0] == {"role": "system", "content": "Be brief"} and len(chat.turns) == 4
    before = chat.messages
    with pytest.raises(DiffbitError, match=r"the message takes 6[0-9] tokens, .* the context holds 64; shorten it"):
        chat.send("x" * 50)
    assert chat.messages == before
    assert chat.send("x" * 40).text == "bcd" and len(chat.turns) == 2
    endless = Chat(Session(write_chat_model(tmp_path / "b", follows(":bcd"), context=30), threads=1))
    reply = endless.send("hey")
    assert (reply.finish_reason, len(reply.token_ids)) == ("context", 30 - 8 + 1)
    assert endless.send("hey").dropped == 2


def test_an_answer_can_be_interrupted(tmp_path: Path, in_place: bool) -> None:
    folder = write_chat_model(tmp_path / "a", follows(":bcdefgh"), in_place=in_place, context=60)
    chat = Chat(Counted(folder, threads=1), max_tokens=6)
    reply = chat.send("hey", lambda text: chat.halt() if text == "d" else None)
    assert (reply.text, reply.finish_reason) == ("bcd", "interrupted")
    check_turns(chat, Session(folder, threads=1), ["on", "and on"])

    def fail(text: str) -> None:
        raise KeyboardInterrupt

    before = chat.messages
    with pytest.raises(KeyboardInterrupt):
        chat.send("no", fail)
    assert chat.messages == before
    sampler = chat.sampler
    chat.sampler = lambda *_: pytest.fail("the prompt was to be interrupted")
    encode = chat._encoded
    chat._encoded = lambda turns: (chat.halt(), encode(turns))[1]  # type: ignore[method-assign]
    reply = chat.send("no")
    assert (reply.token_ids, reply.time_to_first_token_s) == ((), None) and chat.messages == before
    del chat._encoded
    chat.sampler = sampler
    check_turns(chat, Session(folder, threads=1), ["yes"])


def test_a_run_that_is_interrupted_leaves_no_half_state(tmp_path: Path, in_place: bool) -> None:
    session = Session(random_toy().write(tmp_path / "a", in_place=in_place), threads=1)
    expected = session.prefill([[1, 2, 3]])
    real = session._session

    class Interrupted:
        def run_with_iobinding(self, binding: object) -> None:
            real.run_with_iobinding(binding)  # type: ignore[arg-type]
            raise KeyboardInterrupt

    session._session = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        session.step([[4]])
    session._session = real
    assert session.length == 0 and session.reuse([1, 2, 3]) == 0
    assert (session.prefill([[1, 2, 3]]) == expected).all()


def test_the_models_settings_are_the_defaults(tmp_path: Path) -> None:
    def settings(generation: dict[str, object], **changes: Any) -> tuple[float, int, float, float]:
        folder = write_chat_model(tmp_path / str(len(list(tmp_path.iterdir()))), follows("ab"), generation=generation)
        sampling = Sampler.of(Artifact.open(folder), **changes).sampling
        return sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty

    of_model = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    assert settings(of_model) == (0.6, 50, 0.9, 1.1)  # top_k as in transformers
    assert settings(of_model, temperature=0.0, top_k=0) == (0.0, 0, 0.9, 1.1)
    assert settings(of_model | {"do_sample": False}) == (0.0, 50, 0.9, 1.1)
    unsaid = {"bos_token_id": 1, "eos_token_id": 2, "do_sample": None}
    assert settings({}) == settings(unsaid) == (0.7, 50, 0.9, 1.0)
    assert settings({"top_p": 0.8}) == (0.7, 50, 0.8, 1.0)
    assert settings(unsaid, temperature=0) == (0.0, 50, 0.9, 1.0)
    assert settings({"top_p": None}, temperature=1, top_p=0.5)[2] == 0.5
    with pytest.raises(DiffbitError, match=r"generation_config\.json: top_k is 'all', wanted 0 \(no limit\) or above"):
        settings({"top_k": "all"})
    for odd in ({"top_k": float("inf")}, {"do_sample": True, "temperature": 10**400}):
        with pytest.raises(DiffbitError, match="wanted 0 "):
            settings(odd)


def test_a_model_without_a_template(tmp_path: Path) -> None:
    session = Session(follows(":bcd", end=257).write(tmp_path / "a"), threads=1)
    with pytest.raises(DiffbitError, match="has no chat template"):
        Chat(session)
    tokenizer = Tokenizer(session.artifact.file("tokenizer.json"))
    assert (
        Chat(session, tokenizer, ChatTemplate("u:{{ messages[-1].content }}", "T"), sampler=Sampler()).send("a:").text
        == "bcd"
    )


@pytest.mark.parametrize("named", [True, False])
def test_end_tokens(named: bool, tmp_path: Path) -> None:
    """The model's end tokens, and the tokenizer's eos_token."""
    toy = follows(":bcd", end=257)
    folder = write_chat_model(tmp_path / "a", toy, eos_token_ids=[257] if named else [])
    if named:
        (folder / "tokenizer_config.json").unlink()
        manifest = json.loads((folder / "diffbit.json").read_text())
        seal(folder, {key: value for key, value in manifest.items() if key != "files"})
    assert Chat(Session(folder, threads=1)).send("x").finish_reason == "eos"


def test_an_answer_in_a_loop_ends(tmp_path: Path) -> None:
    """The toy repeats seven letters, which are fewer words than a loop of prose has."""
    folder = write_chat_model(tmp_path / "a", follows(":bcdefgh", places=900), context=900)
    session = Session(folder, threads=1)
    reply = Chat(session, max_tokens=600).send("x")
    assert (reply.finish_reason, len(reply.token_ids)) == ("loop", PLAIN_TOKENS)
    assert "stopped by loop" in reply.summary()
    assert Chat(session, max_tokens=600, allow_loops=True).send("x").finish_reason == "length"
    assert Chat(session, max_tokens=PLAIN_TOKENS - 1).send("x").finish_reason == "length"
    assert generate(session, "x", max_tokens=500, allow_loops=True, temperature=0).result().finish_reason == "length"
    assert generate(session, "x", max_tokens=500, temperature=0).result().finish_reason == "loop"


SWITCHED = (
    SIMPLE + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}"
)


def test_thinking_is_switched(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "a", follows(":>bcd", end=257), SWITCHED, context=60)
    session = Session(folder, threads=1)
    chat = Chat(session)
    lengths = []
    for think in (None, True, False):
        chat.think = think
        chat.reset()
        lengths.append(chat.send("x").prompt_tokens)
    assert lengths[0] == lengths[1] == lengths[2] - len("<think></think>")
    assert Chat(session, think=False).send("x").prompt_tokens == lengths[2]
    answer = generate(session, [{"role": "user", "content": "x"}], think=False).result()
    assert answer.prompt_tokens == lengths[2]
    plain = Session(write_chat_model(tmp_path / "b", follows(":bcd", end=257), context=60), threads=1)
    assert Chat(plain, think=False).send("x").text == "bcd"  # it does not think
    with pytest.raises(DiffbitError, match=r"no switch for thinking .* does not think"):
        Chat(plain, think=True)
