from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diffbit.io.errors import DiffbitError
from diffbit.runtime import Generation, Sampler, Session, Tokenizer, generate
from diffbit.runtime.generate import TextOutput

from .toy import BOS, EOS, VOCAB, Toy, follows, random_toy


class Machine:
    """A session and its tokenizer, with what was streamed."""

    def __init__(self, toy: Toy, folder: Path, context: int = 60, in_place: bool = False) -> None:
        path = toy.write(folder, in_place=in_place, context=context)
        self.session = Session(path, threads=1)
        self.tokenizer = Tokenizer(self.session.artifact.file("tokenizer.json"))
        self.pieces: list[str] = []

    def __call__(self, prompt: object, max_tokens: int = 8, **options: object) -> Generation:
        self.pieces.clear()
        return generate(
            self.session,
            self.tokenizer,
            prompt,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            on_text=self.pieces.append,
            **options,  # type: ignore[arg-type]
        )


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


def test_what_only_looked_like_a_stop_string_is_given(tmp_path: Path) -> None:
    run = Machine(follows("abcdefgh"), tmp_path / "a")
    assert run("a", max_tokens=6, stop=["dez", "ha!"]).text == "bcdefg"
    assert run.pieces == ["b", "c", "def", "g"]
    assert run("a", max_tokens=4, stop=["defz"]).text == "bcde"  # held back when the tokens ran out
    eos = Machine(follows("abcd", end=EOS), tmp_path / "b")
    assert eos("a", stop=["cdx"]).text == "bcd"


def test_a_token_that_brings_two_stops_at_once() -> None:
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


def test_an_interrupted_generation_leaves_the_session_usable(tmp_path: Path, in_place: bool) -> None:
    run = Machine(follows("abcd"), tmp_path / "a", in_place=in_place)

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(run.session, run.tokenizer, "a", max_tokens=5, on_text=interrupt)
    assert run("b", max_tokens=2).text == "cd"
