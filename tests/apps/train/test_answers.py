"""What of a conversation is learned: the assistant's messages and the tokens that end them, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from diffbit.apps.train.answers import answer_spans, learned_tokens
from diffbit.apps.train.data import TrainingRows
from diffbit.calib_data import Conversation, TextTokenizer, stream
from diffbit.calib_data.sources import load_text

TURNS = [
    {"role": "system", "content": "Be brief. Say brief."},
    {"role": "user", "content": "Be brief?"},
    {"role": "assistant", "content": "Say brief."},
    {"role": "user", "content": "Say brief."},
    {"role": "assistant", "content": "Be brief. Be brief?"},
]


def chat(messages: Any) -> str:
    return "".join(f"<{message['role']}>{message['content']}<end>" for message in messages)


def forgetful(messages: Any) -> str:
    """A template that drops earlier answers, as those of thinking models drop thoughts."""
    return chat([message for message in messages[:-1] if message["role"] != "assistant"] + messages[-1:])


def characters() -> TextTokenizer:
    tokenizer = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return TextTokenizer(tokenizer, 0, "", Path("tokenizer.json"))


def test_answers_are_learned_and_questions_are_not() -> None:
    documents = ["plain text", Conversation(chat(TURNS), TURNS), Conversation(chat(TURNS[:2]), TURNS[:2])]
    tokenizer = characters()
    tokens, _ = stream(tokenizer.encode(documents), tokenizer.eos_id)
    learned = learned_tokens(documents, tokenizer, chat)
    assert len(learned) == len(tokens)
    kept = "".join(chr(token) for token in tokens[learned])
    answers = "<assistant>Say brief.<end><assistant>Be brief. Be brief?<end>"
    # a conversation without an answer is a text like any other
    assert kept == f"\0plain text\0{answers}{chat(TURNS[:2])}\0"


def test_all_tokens_count_if_the_template_changes_earlier_messages() -> None:
    conversation = Conversation(forgetful(TURNS), TURNS)
    assert answer_spans(conversation, forgetful) is None
    assert learned_tokens([conversation], characters(), forgetful).all()


def test_conversations_of_a_file_keep_their_messages(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    file.write_text("".join(json.dumps({"rows": row}) + "\n" for row in [TURNS, shared] * 20))
    for document in load_text(str(file), "train", field="rows", render=chat).documents:
        assert isinstance(document, Conversation) and answer_spans(document, chat)


def test_the_loss_counts_the_learned_tokens_of_each_row() -> None:
    tokens = np.arange(64) % 7
    learned = tokens % 3 == 1
    rows = TrainingRows(tokens, 8, seed=3, learned=learned)
    taken, _ = rows.take(0, 9)
    assert (rows.counted(0, 9) == (taken % 3 == 1)).all()
    assert TrainingRows(tokens, 8, seed=3).counted(4, 2).all()
