"""Chat templates: the texts are those of transformers, and a hostile template costs little."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from diffbit.io.errors import DiffbitError
from diffbit.runtime import template as module
from diffbit.runtime.template import ChatTemplate, Message

from .. import forks

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, conversation roles must alternate") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] + eos_token}}
    {%- endif %}
{%- endfor %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}
{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim -}}
{{ '<end_of_turn>\\n' }}
{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
ODDS = """{% if tools is none %}{% endif %}{% for message in messages %}{% if loop.index > 3 %}{% break %}{% endif %}
  {{ message | tojson(indent=2) }}
  {% generation %}{{ message.content.split("</think>")[-1].lstrip("\\n") }}{% endgeneration %}
{% endfor %}{{ dict(a=1) }} {{ "%s" | format("x") }}
{{ unk_token }}{{ missing }}"""

TURNS: list[Message] = [
    {"role": "user", "content": "What is 2 < 3?"},
    {"role": "assistant", "content": "<think>\nhm</think>\n\nTrue, “naïvely” "},
    {"role": "user", "content": " And 日本語 🙂\n"},
]
SYSTEM: Message = {"role": "system", "content": "Be brief. "}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("source", [CHATML, SMOLLM2, LLAMA3, MISTRAL, GEMMA, ODDS])
def test_texts_are_those_of_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = ChatTemplate(source, "T", TOKENS)
    for messages in (TURNS[:1], TURNS, [SYSTEM, *TURNS], [*TURNS, TURNS[2]]):
        for prompt in (True, False):
            try:
                expected = render_jinja_template(
                    [messages], chat_template=source, add_generation_prompt=prompt, **TOKENS
                )
            except Exception as error:
                with pytest.raises(DiffbitError, match=str(error)):
                    template.render(messages, add_generation_prompt=prompt)
            else:
                assert template.render(messages, add_generation_prompt=prompt) == expected[0][0]


def test_where_a_template_is_found(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"

    def text(**changes: object) -> str:
        config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"} | changes))
        return ChatTemplate.read(tmp_path).render([])

    with pytest.raises(DiffbitError, match=r"has no chat template; .* --template FILE, .*`diffbit run`"):
        text()
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<b>", "unk_token": {"content": "<unk>"}}')
    assert text(chat_template="{{ bos_token + eos_token + unk_token }}") == "<s></s><unk>"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }} default"}]
    assert text(chat_template=named) == "<s> default"
    (tmp_path / "chat_template.jinja").write_text("a file {{ eos_token }}")
    assert text(chat_template=named) == "a file </s>"
    (tmp_path / "other").write_text("given")
    assert ChatTemplate.read(tmp_path, tmp_path / "other").render([]) == "given"
    for wrong, message in ((b"\xff", "cannot be read"), (b" " * (module.MOST_BYTES + 1), "too large")):
        (tmp_path / "chat_template.jinja").write_bytes(wrong)
        with pytest.raises(DiffbitError, match=rf"chat_template\.jinja: .*{message}"):
            ChatTemplate.read(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "line 1: Expected an expression"),
        ("{{ 'x' * 10 ** 10 }}", "more than 512 MiB"),
        ("{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "512 MiB"),
        ("{{ 'x' * 5000000 }}", "5000000 characters"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1 seconds"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "'__class__' .* is unsafe"),
        ("{{ messages.append(1) }}", "'append' .* is unsafe"),
        ("{{ range(1000000) | list }}", "Range too big"),
    ],
)
def test_hostile_templates(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "seconds" in message:  # the others may take longer on a busy machine
        monkeypatch.setattr(module, "SECONDS", 1)
    with pytest.raises(DiffbitError, match=rf"^T: cannot render this conversation \(.*{message}") as caught:
        ChatTemplate(source, "T").render(TURNS)
    assert "\n" not in str(caught.value)


def test_a_rendering_that_was_ended_does_not_spoil_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% if messages %}{% for i in range(99999) %}{{ 'x' * i }}{% endfor %}{% endif %}end", "T")
    assert template.render([]) == "end"
    monkeypatch.setattr(module, "SECONDS", 0.2)
    with pytest.raises(DiffbitError):
        template.render(TURNS)
    monkeypatch.undo()
    assert template.render([]) == "end"
    with monkeypatch.context() as patch:  # Ctrl-C before the answer has come
        patch.setattr(threading.Timer, "cancel", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            template.render([])
    assert template.render([]) == "end"


@pytest.mark.slow
def test_a_renderer_has_its_time_limit_for_each_text() -> None:
    """The limit of its processor's time is that of a rendering, not of all together."""
    program = (
        "import json, sys; from diffbit.runtime import render; render.CPU_SECONDS = 1; "
        "sys.argv[1:] = [json.dumps(sys.path)]; render.main()"
    )
    source = "{% for i in range(1500) %}{% for j in range(1500) %}{% endfor %}{% endfor %}end"
    first = json.dumps({"template": source, "variables": {}})
    done = subprocess.run(
        [sys.executable, "-c", program], input="\n".join([first, *["{}"] * 60]), capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ['{"text": "end"}'] * 60


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_fork_leaves_the_renderer_alone() -> None:
    """A child that drops its copy of the template kills nothing, and one that renders starts a process of its own."""
    template = ChatTemplate("{{ messages[0].content }}", "made up")
    hello: list[Message] = [{"role": "user", "content": "hello"}]
    assert template.render(hello) == "hello"
    process = template._process
    assert process is not None

    def renders() -> None:
        assert template.render([{"role": "user", "content": "child"}]) == "child"
        assert template._process is not process

    references = [template]

    def drops() -> None:
        nonlocal template
        references.clear()
        del template
        gc.collect()

    assert forks.run(renders, seconds=30).code == 0
    assert forks.run(drops, seconds=30).code == 0
    assert process.poll() is None and template._process is process
    assert template.render(hello) == "hello"


QWEN3 = """{%- for message in messages %}{{ message.role }}: {{ message.content.split('</think>')[-1] }}
{% endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant: ' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
CHANGED = "{% if not thinking is defined %}{% set thinking = true %}{% endif %}{{ thinking }}{{ messages | length }}"


def test_variables_of_a_template() -> None:
    template = ChatTemplate(QWEN3, "q")
    assert {"messages", "add_generation_prompt", "enable_thinking"} <= template.names
    assert "thinking" in ChatTemplate(CHANGED, "c").names and "thinking" not in template.names
    conversation: list[Message] = [{"role": "user", "content": "hi"}]
    assert template.render(conversation).endswith("assistant: ")
    assert template.render(conversation, variables={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    assert ChatTemplate(CHANGED, "c").render(conversation, variables={"thinking": 7}) == "71"
    for name in ("messages", "bos_token"):
        with pytest.raises(DiffbitError, match=f"template's variable {name};"):
            template.render(conversation, variables={name: "x"})
    with pytest.raises(DiffbitError, match=r"broken: cannot be read .line 1"):
        _ = ChatTemplate("{% if %}", "broken").names


def test_the_switch_for_thinking() -> None:
    assert ChatTemplate(QWEN3, "q").thinking(False) == {"enable_thinking": False}
    assert ChatTemplate(CHANGED, "c").thinking(True) == {"thinking": True}
    assert ChatTemplate(QWEN3, "q").thinking(None) == ChatTemplate(CHATML, "m").thinking(False) == {}
    always = "{{ messages[0].content }}<think>"
    for source, on, words in ((always, False, "always thinks"), (always, True, "always"), (CHATML, True, "not think")):
        with pytest.raises(DiffbitError, match=f"no switch for thinking .*{words}"):
            ChatTemplate(source, "t").thinking(on)
