"""Artifacts in lm-evaluation-harness, on tasks that lie in a folder: no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diffbit.apps.hub.harness import DiffbitLM, register
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.runtime import Session, Tokenizer, generate

PICO = Path(__file__).parents[3] / "examples" / "pico" / "diff_v1"
QUESTIONS = [
    {"text": "import", "right": " os", "wrong": " zebra"},
    {"text": "for index in", "right": " range(", "wrong": " yellow"},
    {"text": "def __init__(self", "right": "):", "wrong": " and the sea"},
]
TASKS = {
    "choice": """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{[right, wrong]}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
""",
    "writing": """
task: writing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{right}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
""",
    "reading": """
task: reading
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}{{{{right}}}}"
metric_list: [{{metric: byte_perplexity}}]
""",
}


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.format(file=folder / "questions.jsonl"))
    return folder


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    quantize_checkpoint(
        PICO, folder / "low", Scheme(parse_format("int4_g32"), parse_format("int8"), parse_format("int8"))
    )
    return export_artifact(folder / "low", folder / "artifact", context_length=64)


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


def slowly(session: Session, tokens: list[int], count: int) -> tuple[float, bool]:
    """log q of the last `count` tokens, a token at a time."""
    session.reset()
    logits, total, likeliest = session.prefill([tokens[:-count]])[0], 0.0, True
    for token in tokens[-count:]:
        row = logits.astype(np.float64)
        total += row[token] - np.log(np.exp(row).sum())
        likeliest &= int(row.argmax()) == token
        logits = session.step([[token]])[0]
    return total, likeliest


@pytest.mark.parametrize("batch_size", [1, 3])
def test_log_likelihoods_against_a_token_at_a_time(artifact: Path, batch_size: int) -> None:
    model, session = DiffbitLM(str(artifact), batch_size=batch_size), Session(artifact)
    tokenizer = Tokenizer(session.artifact.file("tokenizer.json"))
    texts = [("import", " os"), ("class A:\n    def f(self, x", "):\n        return x"), ("", "def"), ("x = ", "1")]
    texts.append(("a = b\n" * 60, "a = b\n" * 3))  # longer than the context: it loses its beginning
    texts.append(("import numpy ", "as np"))  # a space between them belongs to the continuation
    scores = model.loglikelihood(requests(*texts))
    for (context, continuation), (total, likeliest) in zip(texts, scores, strict=True):
        stripped = context.rstrip(" ")
        whole = tokenizer.encode(context + continuation)
        before = tokenizer.encode(stripped) if stripped else []
        tokens = whole if before else [model.prefix_token_id, *whole]
        tokens, count = tokens[-65:], len(whole) - len(before)
        expected, same = slowly(session, tokens[:-1] + tokens[-1:], count) if len(tokens) < 65 else (None, None)
        if expected is not None:
            assert total == pytest.approx(expected, abs=2e-3) and likeliest == same
    assert scores[4][0] < 0


def test_rolling_scores_every_token_once(artifact: Path) -> None:
    model, session = DiffbitLM(str(artifact)), Session(artifact)
    text = "def f(x):\n    return x\n" * 20
    tokens = model.tok_encode(text, add_special_tokens=False)
    assert len(tokens) > 2 * 64
    (total,) = model.loglikelihood_rolling(requests((text,)))
    expected, position = 0.0, 0
    while position < len(tokens):  # windows of 64 predictions; the last has context in the place of what is scored
        end = min(position + 64, len(tokens))
        row = [model.prefix_token_id, *tokens[:end]] if not position else tokens[max(0, end - 65) : end]
        session.reset()
        logits = session.prefill([row[:-1]], all_positions=True)[0].astype(np.float64)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        count = end - position
        expected += sum(logits[len(row) - 1 - count + i, tokens[position + i]] for i in range(count))
        position = end
    assert total == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_texts_are_those_of_generate(artifact: Path, batch_size: int) -> None:
    model, session = DiffbitLM(str(artifact), batch_size=batch_size), Session(artifact)
    prompts = ["import", "def __init__(self, x", "class", "for index in range("]
    options: list[dict[str, Any]] = [{"max_gen_toks": 12, "until": ["\n"]}, {"max_gen_toks": 12, "until": "):"}]
    options += [{"max_gen_toks": 12, "until": []}, {"max_gen_toks": 5}]
    generated = model.generate_until(requests(*zip(prompts, options, strict=True)))
    for prompt, kwargs, text in zip(prompts, options, generated, strict=True):
        stop = kwargs.get("until", [])
        answer = generate(session, prompt, max_tokens=kwargs["max_gen_toks"], stop=stop, temperature=0).result()
        assert text == answer.text
    assert any(generated)


def test_options_of_sampling(artifact: Path) -> None:
    """Repeated requests give other samples, the same in each run; min_p of 1 and a strong penalty do what they say."""
    hot = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 12}

    def written(*options: dict[str, Any]) -> list[str]:
        return list(DiffbitLM(str(artifact)).generate_until(requests(*(("import", one) for one in options))))

    samples = written(hot, hot, hot)
    assert len(set(samples)) == 3 and written(hot, hot, hot) == samples
    greedy, certain, plain = written({"max_gen_toks": 12}, hot | {"min_p": 1.0}, hot | {"temperature": None})
    assert certain == greedy and plain not in samples
    one = Tokenizer(artifact / "tokenizer.json").encode(written({"max_gen_toks": 12, "repetition_penalty": 1e6})[0])
    assert len(set(one)) == len(one)


def test_a_template_writes_bos_itself(tmp_path: Path) -> None:
    tokenizer = json.loads((PICO / "tokenizer.json").read_text())
    bos, piece = "<|endoftext|>", {"id": "B", "type_id": 0}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": piece}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [], "special_tokens": {"B": {"id": "B", "ids": [0], "tokens": [bos]}},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = DiffbitLM(str(export_artifact(PICO, tmp_path / "artifact", tokenizer=tmp_path / "tokenizer.json")))
    plain = model.tok_encode("def", add_special_tokens=False)
    assert model.tok_encode("def") == [0, *plain] == model.tok_encode(f"{bos}def")
    assert model.tok_encode(f"{bos}def", add_special_tokens=True) == [0, 0, *plain]


def test_a_residual_window_takes_one_row_at_a_time(tmp_path: Path) -> None:
    from diffbit.quantize import AttentionScheme

    quantize_checkpoint(
        PICO, tmp_path / "low", Scheme(attention=AttentionScheme(keys="int4", values="int4", window=32))
    )
    low = str(export_artifact(tmp_path / "low", tmp_path / "artifact"))
    long, short = ("import os\n" * 40, "import"), ("import os\n" * 12, "import")
    together = DiffbitLM(low).loglikelihood(requests(long, short))
    assert together[1] == DiffbitLM(low).loglikelihood(requests(short))[0]


@pytest.mark.slow
def test_the_harness_runs_its_tasks(
    artifact: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    register()
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    results = simple_evaluate(
        "diffbit", f"artifact={artifact}", list(TASKS), task_manager=manager, bootstrap_iters=0, batch_size=2
    )
    assert results is not None
    scores = results["results"]
    assert scores["choice"]["acc,none"] == 1.0  # a trained model knows that much
    assert 1 < scores["reading"]["byte_perplexity,none"] < 20
    assert 0 <= scores["writing"]["exact_match,none"] <= 1


COMMAND = """
import functools, runpy
from lm_eval.tasks import TaskManager
TaskManager.__init__ = functools.partialmethod(TaskManager.__init__, include_defaults=False)  # not its thousands
runpy.run_module("diffbit.apps.hub.harness", run_name="__main__")
"""


@pytest.mark.slow
def test_its_command_line(artifact: Path, tasks: Path, tmp_path: Path) -> None:
    options = ["--model", "diffbit", "--model_args", f"artifact={artifact}", "--tasks", "choice"]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *options, "--include_path", tasks],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|choice|" in done.stdout.replace(" ", "") and "acc" in done.stdout


def test_without_the_harness_a_sentence_says_how_to_install_it() -> None:
    script = (
        "import runpy, sys; sys.modules['lm_eval'] = None; "
        "runpy.run_module('diffbit.apps.hub.harness', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: lm-evaluation-harness needs lm_eval") and "[tasks]'" in done.stderr


@pytest.mark.slow
def test_a_wrong_artifact_costs_one_sentence(tasks: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diffbit.apps.hub.harness", "--model", "diffbit", "--tasks", "choice"]
    command += ["--include_path", str(tasks), "--model_args", f"artifact={tmp_path / 'none'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "error: " in done.stderr.splitlines()[-1] and str(tmp_path / "none") in done.stderr
