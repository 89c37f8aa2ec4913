from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffbit.io.errors import DiffbitError
from diffbit.runtime import (
    Artifact,
    ChatTemplate,
    Generation,
    NoTemplate,
    Sampler,
    Session,
    TextOutput,
    Tokenizer,
    generate,
)

from .toy import BOS, EOS, VOCAB, Toy, follows, random_toy, seal


class Machine:
    """A session and its tokenizer, with what was streamed."""

    def __init__(self, toy: Toy, folder: Path, context: int = 60, in_place: bool = False) -> None:
        path = toy.write(folder, in_place=in_place, context=context)
        self.session = Session(path, threads=1)
        self.tokenizer = Tokenizer(self.session.artifact.file("tokenizer.json"))
        self.pieces: list[str] = []

    def __call__(self, prompt: object, max_tokens: int = 8, **options: object) -> Generation:
        greedy = {} if "sampler" in options else {"temperature": 0}
        pieces = generate(self.session, prompt, max_tokens=max_tokens, **greedy, **options)  # type: ignore[arg-type]
        self.pieces = list(pieces)
        return pieces.result()


def test_greedy_text_and_the_figures(tmp_path: Path, in_place: bool) -> None:
    run = Machine(follows("abcdefgh"), tmp_path / "a", in_place=in_place)
    result = run("fga")
    assert result.text == "".join(run.pieces) == "bcdefgha"
    assert len(run.pieces) == 8
    assert (result.finish_reason, result.prompt_tokens) == ("length", 3)
    assert run.tokenizer.decode(result.token_ids) == "bcdefgha"
    assert 0 < result.time_to_first_token_s <= result.total_s
    assert result.tokens_per_s is not None
    assert result.tokens_per_s > 7 / result.total_s
    assert run("a").text == "bcdefgha"  # the same session, a new prompt
    single = run("a", max_tokens=1)
    assert (single.text, single.tokens_per_s) == ("b", None)


def test_tokens_are_those_of_the_formula(tmp_path: Path, in_place: bool) -> None:
    toy = random_toy(seed=2)
    run = Machine(toy, tmp_path / "a", in_place=in_place)
    assert list(run([3, 1, 4, 1, 5], max_tokens=30).token_ids) == toy.greedy([3, 1, 4, 1, 5], 30)


def test_eos_ends_and_is_not_shown(tmp_path: Path) -> None:
    run = Machine(follows("abcd", end=EOS), tmp_path / "a")
    result = run("a", max_tokens=50)
    assert (result.text, result.finish_reason, result.token_ids[-1]) == ("bcd", "eos", EOS)


def test_an_empty_prompt_starts_from_bos(tmp_path: Path) -> None:
    run = Machine(follows("abcd"), tmp_path / "a")
    result = run("", max_tokens=3)
    assert (result.text, result.prompt_tokens) == ("abc", 1)
    assert run([BOS], max_tokens=3).text == "abc"
    bosless = Machine(follows("abcd", bos=False), tmp_path / "b")
    with pytest.raises(DiffbitError, match="the prompt is empty and the model has no bos token"):
        bosless("")


def test_a_full_context_ends_the_text(tmp_path: Path, in_place: bool) -> None:
    run = Machine(follows("abcdefgh"), tmp_path / "a", context=5, in_place=in_place)
    result = run("ab", max_tokens=50)
    # three more tokens fit, and the one after them still follows from a full context
    assert (result.text, result.finish_reason) == ("cdef", "context")
    assert run("abcde", max_tokens=50).text == "f"
    assert run("abcde", max_tokens=1).finish_reason == "length"
    with pytest.raises(DiffbitError, match="the prompt has 6 tokens, the model's context holds 5"):
        run("abcdef")


def test_stop_strings_span_tokens_and_are_not_shown(tmp_path: Path) -> None:
    run = Machine(follows("abcdefgh"), tmp_path / "a")
    result = run("a", max_tokens=20, stop=["ef"])
    assert (result.text, result.finish_reason) == ("bcd", "stop")
    assert len(result.token_ids) == 5  # the tokens of the stop string were generated
    assert run.pieces == ["b", "c", "d"]
    # the earliest occurrence wins, whatever the order of the list
    assert run("a", max_tokens=20, stop=["gh", "cd", "zz"]).text == "b"
    assert run("a", max_tokens=20, stop="cd").text == "b"


def test_text_that_only_resembles_a_stop_string_is_shown(tmp_path: Path) -> None:
    run = Machine(follows("abcdefgh"), tmp_path / "a")
    assert run("a", max_tokens=6, stop=["dez", "ha!"]).text == "bcdefg"
    assert run.pieces == ["b", "c", "def", "g"]
    assert run("a", max_tokens=4, stop=["defz"]).text == "bcde"  # held back when the tokens ran out
    eos = Machine(follows("abcd", end=EOS), tmp_path / "b")
    assert eos("a", stop=["cdx"]).text == "bcd"


def test_the_first_of_two_stops_in_a_token_counts() -> None:
    pieces: list[str] = []
    output = TextOutput(["gh", "cd"], pieces.append)
    assert output.push("abcdefgh") and output.push("ab") and output.push("", last=True)
    assert (output.text, pieces) == ("ab", ["ab"])


@pytest.mark.parametrize("stop", ["aab", "aaab", "abab", "ba"])
def test_overlapping_stops_against_plain_search(stop: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = "".join(rng.choice(["a", "b"], 12))
        pieces: list[str] = []
        output = TextOutput([stop, "bbbb"], pieces.append)
        for character in text:
            output.push(character)
            assert not any(s in "".join(pieces) for s in (stop, "bbbb"))
        output.push("", last=True)
        out = "".join(pieces)
        assert output.text == out
        ends = [text.find(s) for s in (stop, "bbbb") if s in text]
        # the first stop to be complete closes the gate; among those, the earliest start counts
        done = [text.find(s) + len(s) for s in (stop, "bbbb") if s in text]
        first = text[: min(done)] if done else text
        want = first[: min(first.find(s) for s in (stop, "bbbb") if s in first)] if ends else text
        assert out == want


def test_characters_of_several_bytes_come_whole(tmp_path: Path) -> None:
    run = Machine(follows("é☃"), tmp_path / "a")  # C3 A9 E2 98 83: five distinct bytes
    result = run("é", max_tokens=8)
    assert result.text == "☃é☃"
    assert run.pieces == ["☃", "é", "☃"]
    cut = run("é", max_tokens=4)
    assert cut.text == "☃\ufffd"  # the model stopped in the middle of a character
    assert run("é", max_tokens=8, stop=["é"]).text == "☃"


def test_sampling_is_reproducible(tmp_path: Path) -> None:
    run = Machine(random_toy(seed=3), tmp_path / "a")
    options = {"max_tokens": 20}
    draw = lambda seed: run([1, 2], sampler=Sampler(3.0, top_k=30, seed=seed), **options).token_ids  # noqa: E731
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    seen: list[list[int]] = []

    def always_seven(logits: np.ndarray, token_ids: list[int]) -> int:  # any function of logits and ids is a sampler
        seen.append(list(token_ids))
        return 7

    assert run([1, 2], max_tokens=3, sampler=always_seven).token_ids == (7, 7, 7)
    assert seen == [[1, 2], [1, 2, 7], [1, 2, 7, 7]]


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    run = Machine(follows("abcd"), tmp_path / "a")
    for prompt, options, message in (
        ([VOCAB], {}, f"token id {VOCAB} is outside the vocabulary of {VOCAB} tokens"),
        ([], {"max_tokens": 0}, "max_tokens is 0"),
        ("a", {"stop": ["x", ""]}, "a stop string is empty"),
    ):
        with pytest.raises(DiffbitError, match=message):
            run(prompt, **options)
    assert run("a", max_tokens=2).text == "bc"  # and the session still works


def test_a_text_may_be_left_before_its_end(tmp_path: Path, in_place: bool) -> None:
    """The model computes no more of it, and the session is free for the next."""
    run = Machine(follows("abcdefgh"), tmp_path / "a", in_place=in_place)
    computed: list[int] = []

    def counting() -> bool:
        computed.append(1)
        return False

    for piece in generate(run.session, "a", max_tokens=50, interrupted=counting, temperature=0):
        if piece == "d":
            break
    assert len(computed) == 3  # the prompt, and a run for each piece but the first
    assert run("b", max_tokens=2).text == "cd"
    pieces = generate(run.session, "a", max_tokens=3, temperature=0)
    assert next(pieces) == "b"
    assert pieces.result().text == "bcd"  # also what was taken before
    assert list(pieces) == [] and pieces.result() is pieces.result()


def test_two_texts_at_a_time_on_one_session(tmp_path: Path, in_place: bool) -> None:
    """The first would continue the second's cache: it gets a sentence, and the second its text."""
    run = Machine(follows("abcdefgh"), tmp_path / "a", in_place=in_place)
    first = generate(run.session, "a", max_tokens=5, temperature=0)
    assert next(first) == "b"
    assert run("e", max_tokens=3).text == "fgh"
    with pytest.raises(DiffbitError, match="finish a text before the next one"):
        next(first)
    with pytest.raises(DiffbitError, match="ended in an error"):
        first.result()


def add_file(artifact: Path, name: str, content: dict[str, Any]) -> None:
    (artifact / name).write_text(json.dumps(content))
    manifest = json.loads((artifact / "diffbit.json").read_text())
    del manifest["files"]
    seal(artifact, manifest)


def test_generate_takes_a_path_and_sampling_fields(tmp_path: Path) -> None:
    """What is left out is the model's own."""
    toy = random_toy(seed=3)
    path = toy.write(tmp_path / "a")
    assert list(generate(path, [3, 1, 4], max_tokens=9, temperature=0).result().token_ids) == toy.greedy([3, 1, 4], 9)
    assert generate(Artifact.open(path), [3, 1], max_tokens=2).result().prompt_tokens == 2

    def draw(seed: int, **options: Any) -> tuple[int, ...]:
        return generate(path, [1, 2], max_tokens=20, seed=seed, **options).result().token_ids

    add_file(path, "generation_config.json", {"do_sample": True, "temperature": 3.0, "top_k": 30})
    session = Session(path, threads=1)
    expected = generate(session, [1, 2], max_tokens=20, sampler=Sampler(3.0, top_k=30, seed=1)).result().token_ids
    assert draw(1) == expected != draw(2)
    assert draw(1, temperature=0) == draw(2, temperature=0) == tuple(toy.greedy([1, 2], 20))
    for options, message in (
        ({"temprature": 1.0}, "no option 'temprature'.*temperature, top_k"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"sampler": Sampler(), "top_p": 0.5}, "a sampler and the options seed, top_p"),
    ):
        with pytest.raises(DiffbitError, match=message):
            draw(1, **options)


def test_messages_are_rendered_by_the_template(tmp_path: Path) -> None:
    """The model's own, or a given one. The answer ends at the tokenizer's eos_token, too."""
    path = follows("Pabcd", end=EOS).write(tmp_path / "a")
    session = Session(path, threads=1)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    with pytest.raises(NoTemplate, match="has no chat template"):
        generate(session, messages)
    given = ChatTemplate("{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}P", "T")
    result = generate(session, messages, template=given, temperature=0).result()
    assert (result.text, result.prompt_tokens, result.finish_reason) == ("abcd", 5, "eos")
    add_file(path, "tokenizer_config.json", {"chat_template": "{{ messages[0].content }}P", "eos_token": "c"})
    assert "".join(generate(path, messages, temperature=0)) == "ab"


def test_a_checkpoint_is_told_to_be_exported(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model-Q4_0.gguf"):
        folder = tmp_path / name.partition(".")[2]
        folder.mkdir()
        (folder / name).write_bytes(b"GGUF")
        for open_it in (Session, Artifact.open, lambda path: generate(path, "a")):
            with pytest.raises(DiffbitError, match=r"is a checkpoint.*diffbit export.*export_artifact"):
                open_it(folder)
    with pytest.raises(DiffbitError, match="is a checkpoint"):
        Session(tmp_path / "gguf" / "model-Q4_0.gguf")
