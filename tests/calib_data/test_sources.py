from __future__ import annotations

import hashlib
import itertools
import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from diffbit.calib_data import load_text, shares_of
from diffbit.io.errors import DiffbitError

SPLITS = ("train", "calib", "eval")


def rows(count: int) -> list[dict[str, str]]:
    return [{"text": f"row {i}\n", "body": f"body {i}"} for i in range(count)]


def write_jsonl(path: Path, items: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def texts(source: str | Path, **kwargs: Any) -> dict[str, tuple[str, ...]]:
    return {split: load_text(str(source), split, **kwargs).documents for split in SPLITS}


def test_stdlib_is_split_by_file_and_leaves_tests_out() -> None:
    corpora = {split: load_text("stdlib", split) for split in SPLITS}
    root = Path(sysconfig.get_path("stdlib"))
    by_text = {path.read_text("utf-8-sig"): path.relative_to(root) for path in root.glob("*.py")}
    seen = [by_text[text] for corpus in corpora.values() for text in corpus.documents if text in by_text]
    assert len(seen) == len(set(seen)) > 100
    assert Path("dataclasses.py") in seen
    everything = "".join(text for corpus in corpora.values() for text in corpus.documents)
    assert "class TestBasic(" not in everything  # of test/
    assert corpora["train"].counts["bytes"] > 10 * corpora["eval"].counts["bytes"] > 1_000_000
    assert load_text("stdlib", "eval") == corpora["eval"]
    # The split is a function of the path alone, so it can be told from outside.
    part = int.from_bytes(hashlib.sha256(b"dataclasses.py").digest()[:8], "big") % 20
    expected = {0: "eval", 1: "calib"}.get(part, "train")
    assert (root / "dataclasses.py").read_text() in corpora[expected].documents


def test_the_hash_is_over_documents_and_their_lengths(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 18 + "é\n")
    corpus = load_text(str(tmp_path / "a.txt"), "train")
    data = corpus.documents[0].encode()
    assert corpus.sha256 == hashlib.sha256(len(data).to_bytes(8, "little") + data).hexdigest()
    assert corpus.counts["characters"] == len(corpus.documents[0])


def test_one_file_is_cut_by_position_at_line_ends(tmp_path: Path) -> None:
    lines = [f"line {i:04}\n" for i in range(1000)]
    (tmp_path / "a.md").write_text("".join(lines))
    parts = texts(tmp_path / "a.md")
    joined = [parts[split][0] for split in SPLITS]
    assert "".join(joined) == "".join(lines)
    assert [text.count("\n") for text in joined] == [900, 50, 50]
    (tmp_path / "b.txt").write_text("abcdefghij" * 20)  # a single line: cut where the fractions fall
    assert [len(text) for (text,) in texts(tmp_path / "b.txt").values()] == [180, 10, 10]


def test_many_rows_are_split_by_their_text(tmp_path: Path) -> None:
    items = rows(1000)
    parts = texts(write_jsonl(tmp_path / "a.jsonl", items))
    assert sorted(sum(parts.values(), ())) == sorted(item["text"] for item in items)
    assert 20 < len(parts["eval"]) < 80 and 20 < len(parts["calib"]) < 80
    doubled = texts(write_jsonl(tmp_path / "b.jsonl", items[::-1] + items))  # other order, every text twice
    assert {split: set(docs) for split, docs in doubled.items()} == {split: set(docs) for split, docs in parts.items()}
    assert texts(tmp_path / "a.jsonl", field="body")["eval"][0].startswith("body")


def test_folder_is_read_in_path_order_without_hidden_files(tmp_path: Path) -> None:
    for name, text in {"b.py": "B" * 20, "a/z.txt": "A" * 20, ".git/c.txt": "C" * 20, "d.bin": "D" * 20}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    write_jsonl(tmp_path / "e.jsonl", [{"text": "E" * 20}, {"text": ""}])
    corpus = load_text(str(tmp_path), "train")
    assert corpus.documents == ("A" * 18, "B" * 18, "E" * 18)
    assert corpus.counts == {"documents": 3, "characters": 54, "bytes": 54, "empty": 1}


@pytest.mark.parametrize("name", ["wiki.test.raw", "notes", "page.HTML", "table.csv", "one.json"])
def test_any_utf8_file_is_text(tmp_path: Path, name: str) -> None:
    text = '\ufeff{"é": 1}\n' if name == "one.json" else "\ufeffé line\n" * 40
    (tmp_path / name).write_text(text)
    assert load_text(str(tmp_path / name), "train").documents[0][:2] == text[1:3]


def test_a_folder_without_known_endings_gives_all_its_text(tmp_path: Path) -> None:
    """What is no text is left out, as everything else is where there are files with known endings."""
    for name, data in {
        "a.raw": b"A" * 20,
        "c.cpp": b"C" * 20,
        "d.png": b"\x89PNG",
        ".f": b"F",
    }.items():
        (tmp_path / name).write_bytes(data)
    assert load_text(str(tmp_path), "train").documents == ("A" * 18, "C" * 18)
    (tmp_path / "b.txt").write_text("B" * 20)
    assert load_text(str(tmp_path), "train").documents == ("B" * 18,)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    with pytest.raises(DiffbitError, match="is the folder of a model"):
        load_text(str(tmp_path / "model"), "train")


def test_json_with_a_list_equals_jsonl(tmp_path: Path) -> None:
    items = rows(300)
    write_jsonl(tmp_path / "a.jsonl", items)
    (tmp_path / "a.json").write_text(json.dumps(items))
    for field in ("text", "body"):
        assert texts(tmp_path / "a.json", field=field) == texts(tmp_path / "a.jsonl", field=field)


def test_parquet_equals_jsonl(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    items = rows(300)
    parquet.write_table(pyarrow.Table.from_pylist(items), tmp_path / "a.parquet", row_group_size=7)
    write_jsonl(tmp_path / "a.jsonl", items)
    for field in ("text", "body"):
        assert texts(tmp_path / "a.parquet", field=field) == texts(tmp_path / "a.jsonl", field=field)


@pytest.mark.parametrize("count", [3, 7, 60, 199])
def test_a_few_conversations_are_divided_but_not_cut(count: int, tmp_path: Path) -> None:
    """A model that never saw the end of an answer would not end its own."""
    rows = [{"conversations": [{"from": "human", "value": str(number)}, {"from": "gpt", "value": f"It is {number}."}]}
            for number in range(count)]  # fmt: skip

    def render(messages: Any) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)

    write_jsonl(tmp_path / "a.jsonl", rows)
    whole = [render([{"role": "user", "content": number}, {"role": "assistant", "content": f"It is {number}."}])
             for number in range(count)]  # fmt: skip
    splits = texts(tmp_path / "a.jsonl", field="conversations", render=render)
    assert sorted(itertools.chain(*splits.values())) == sorted(whole)
    assert len(splits["eval"]) == len(splits["calib"]) == max(1, count // 20)
    write_jsonl(tmp_path / "b.jsonl", rows[::-1])
    assert {
        name: set(part) for name, part in texts(tmp_path / "b.jsonl", field="conversations", render=render).items()
    } == {name: set(part) for name, part in splits.items()}


def test_conversations_become_text(tmp_path: Path) -> None:
    """As the model's template has them, or in plain text; beside rows of text, and the same from each kind of file."""
    talk = [{"role": "user", "content": "Hello " * 9}, {"role": "assistant", "content": "Bye " * 9}]
    items = [{"messages": [*talk, {"role": "user", "content": str(number)}]} for number in range(250)]
    write_jsonl(tmp_path / "a.jsonl", [*items, {"messages": "only text"}, {"messages": []}])
    plain = load_text(str(tmp_path / "a.jsonl"), "train", field="messages")
    assert plain.documents[0].startswith("User: Hello Hello") and "\n\nAssistant: Bye" in plain.documents[0]

    def render(messages: Any) -> str:
        return "".join(f"<{one['role']}>{one['content']}" for one in messages)

    documents = itertools.chain(*texts(tmp_path / "a.jsonl", field="messages", render=render).values())
    assert sorted(documents) == sorted([*(render(item["messages"]) for item in items), "only text"])
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(items), tmp_path / "a.parquet")
    write_jsonl(tmp_path / "b.jsonl", items)
    assert texts(tmp_path / "a.parquet", field="messages") == texts(tmp_path / "b.jsonl", field="messages")
    for wrong, said in (
        ([{"role": "user"}], r"line 1: messages\[0\].content is None, wanted text"),
        ([{"role": "user", "content": "x"}, 3], r"messages\[1\].role is 3, wanted text"),
        ({"role": "user", "content": "x"}, r"messages is .*, wanted"),
    ):
        write_jsonl(tmp_path / "wrong.jsonl", [{"messages": wrong}])
        with pytest.raises(DiffbitError, match=said):
            load_text(str(tmp_path / "wrong.jsonl"), "train", field="messages")


def test_limit_cuts_at_a_character(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "ab" * 10}, {"text": "é" * 20}])
    corpus = load_text(str(tmp_path / "a.jsonl"), "train", limit=18 + 5)
    assert corpus.documents == ("ab" * 9, "éé") and corpus.counts["bytes"] == 22
    assert load_text(str(tmp_path / "a.jsonl"), "train", limit=18).documents == ("ab" * 9,)


@pytest.mark.parametrize("limit", [None, 4000])
def test_several_texts_are_taken_in_shares_of_their_bytes(tmp_path: Path, limit: int | None) -> None:
    write_jsonl(tmp_path / "many.jsonl", [{"text": f"{i:09}\n"} for i in range(2000)])
    (tmp_path / "one.txt").write_text("é" * 4000)
    write_jsonl(
        tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": f"{i:09}"}]} for i in range(300)]
    )  # the shortest for its share
    parts = [str(tmp_path / name) for name in ("many.jsonl", "one.txt", "chats.jsonl:messages")]
    source = ",".join(f"{part}={weight}" for part, weight in zip(parts, ("1", "0.5", "2.5"), strict=True))
    for split in SPLITS:
        corpus = load_text(source, split, limit=limit)
        alone = [load_text(part, split) for part in parts]
        counts = [sum(len(text.encode()) for text in corpus.documents if text[0] == first) for first in "0éU"]
        unit = min(alone[2].counts["bytes"] / 2.5, (limit or 1e9) / 4)
        for count, weight in zip(counts, (1, 0.5, 2.5), strict=True):  # but for what would be a part of a character
            assert unit * weight - 2 <= count <= unit * weight
        assert sum(counts) == corpus.counts["bytes"] and corpus.source == source
        for one in alone:  # nothing is repeated, and nothing comes from another split
            kept = [text for text in corpus.documents if text[0] == one.documents[0][0]]
            assert [*kept[:-1], kept[-1]] == [
                *one.documents[: len(kept) - 1],
                one.documents[len(kept) - 1][: len(kept[-1])],
            ]


def test_existing_path_is_not_read_as_weighted_sources(tmp_path: Path) -> None:
    for name in ("a=1,b=2", "a=1", "a:b=3,c=4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.txt").write_text("text")
        assert shares_of(str(tmp_path / name)) == {str(tmp_path / name): 1.0}
        assert "".join(load_text(str(tmp_path / name), "train").documents) in "text"
    assert shares_of("stdlib") == {"stdlib": 1.0} and shares_of("a=1,b=3") == {"a": 0.25, "b": 0.75}
    assert shares_of("x=y=1,b=3") == {"x=y": 0.25, "b": 0.75} and shares_of("a=.5,b=1.5") == {"a": 0.25, "b": 0.75}
    assert shares_of("hf:name:of=3") == {"hf:name:of=3": 1.0} and shares_of("a=1,b=-3") == {"a=1,b=-3": 1.0}
    for wrong in ("a=0,b=1", "a=1,a=2", f"a={'9' * 400},b=1", "a=0.0,b=.5"):
        with pytest.raises(DiffbitError, match="with a weight above 0"):
            shares_of(wrong)
    with pytest.raises(DiffbitError, match="train on another source"):
        load_text("stdlib=1,mix=1", "train")
    with pytest.raises(DiffbitError, match="absent: no such file"):
        load_text("stdlib=1,absent=1", "eval")


def test_bad_files_are_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "bytes.txt").write_bytes(b"abc\xff")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "number.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "surrogate.jsonl").write_text('{"text": "aaaaaaaaaaaaaaaaaaaaaaaaaa\\ud800"}\n')
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "wide.txt").write_text("text", encoding="utf-16")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(range(256)))
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "weights.bin").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\x80\x3f")
    (tmp_path / "list.json").write_text('[{"text": "a"}, {"content": "b"}]')
    (tmp_path / "folder").mkdir()
    cases = {
        "bytes.txt": r"not UTF-8 text \(byte 3 is 0xFF\).*iconv -f LATIN1",
        "wide.txt": r"not UTF-8 text \(byte 0 is 0xFF\).*iconv -f UTF-16",
        "model.gguf": r"weights of a model \(GGUF\)",
        "weights.bin": r"weights of a model \(safetensors\)",
        "bad.jsonl": "line 2: is not valid JSON",
        "list.jsonl": "line 1: contains a JSON list, wanted an object",
        "number.jsonl": "line 1: text is .*, wanted text or none",
        "surrogate.jsonl": "no character",
        "empty.txt": "no text in the train split",
        "bad.parquet": "not a readable parquet",
        "image.png": r"not UTF-8 text \(byte 0 is 0x89\)",
        "list.json": "row 1: has no field 'text'; the fields are content",
        "folder": "holds no file that can be read",
        "absent": "no such file or folder",
    }
    for name, sentence in cases.items():
        with pytest.raises(DiffbitError, match=sentence):
            texts(tmp_path / name)
    write_jsonl(tmp_path / "a.jsonl", rows(3))
    with pytest.raises(DiffbitError, match=r"line 1: has no field 'content'; the fields are body, text"):
        load_text(str(tmp_path / "a.jsonl"), "train", field="content")
    with pytest.raises(DiffbitError, match="limit of 0"):
        load_text("stdlib", "train", limit=0)
    with pytest.raises(DiffbitError, match="choose one of train, calib, eval"):
        load_text("stdlib", "test")  # type: ignore[arg-type]


def test_hugging_face_dataset_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    items = rows(400)
    write_jsonl(tmp_path / "a.jsonl", items)
    plain = texts(tmp_path / "a.jsonl")

    datasets.Dataset.from_list(items).save_to_disk(str(tmp_path / "one"))
    assert texts(f"hf:{tmp_path / 'one'}") == plain
    assert texts(f"hf:{tmp_path / 'one'}:::body") == texts(tmp_path / "a.jsonl", field="body")

    held_out = [{"text": f"held out {i}", "body": "b"} for i in range(5)]
    both = datasets.DatasetDict(train=datasets.Dataset.from_list(items), test=datasets.Dataset.from_list(held_out))
    both.save_to_disk(str(tmp_path / "both"))
    parts = texts(f"hf:{tmp_path / 'both'}")
    assert parts["eval"] == tuple(item["text"] for item in held_out)  # the dataset's own, whole
    assert sorted(parts["train"] + parts["calib"]) == sorted(item["text"] for item in items)
    assert texts(f"hf:{tmp_path / 'both'}::train") == plain  # named: parted like any other source

    (tmp_path / "files").mkdir()
    write_jsonl(tmp_path / "files" / "train.jsonl", items)
    assert texts(f"hf:{tmp_path / 'files'}") == plain
    streamed = load_text(f"hf:{tmp_path / 'files'}", "train", limit=20).documents
    assert "".join(streamed) == "".join(plain["train"])[:20]

    for source, sentence in {
        f"hf:{tmp_path / 'both'}::dev": "has no split 'dev'; choose one of train, test",
        f"hf:{tmp_path / 'both'}:::content": "has no field 'content'; the fields are body, text",
        "hf:": "wanted hf:NAME",
        "hf:a:b:c:d:e": "wanted hf:NAME",
    }.items():
        with pytest.raises(DiffbitError, match=sentence):
            load_text(source, "train")


def test_hugging_face_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DiffbitError) as caught:
        load_text("hf:nobody/no-such-dataset", "train")
    assert "hf:nobody/no-such-dataset: the dataset cannot be loaded" in str(caught.value)
    assert "\n" not in str(caught.value)
