"""The texts around messages make of any conversation what the template makes of it, as transformers renders it."""

from __future__ import annotations

import random

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from diffbit.runtime.chat_form import chat_form, conversation
from diffbit.runtime.template import ChatTemplate

from .test_template import CHATML, GEMMA, LLAMA3, MISTRAL, ODDS, SMOLLM2, TOKENS

LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
GEMMA3 = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}\
{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}\
{%- else -%}{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}\
{%- for message in loop_messages -%}{%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}\
{%- else -%}{%- set role = message['role'] -%}{%- endif -%}\
{{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else '') }}{{ message['content'] | trim }}\
{{ '<end_of_turn>\\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
DATED = LLAMA3.replace('strftime_now("%d %b %Y")', '"26 Jul 2024"').replace("strftime_now is", "messages is")
FORMS = {  # and whether there is a place for a system prompt
    "chatml": (CHATML, True),
    "smollm2": (SMOLLM2, True),
    "llama3": (DATED, True),
    "llama2": (LLAMA2, True),
    "mistral": (MISTRAL, False),  # it writes the system prompt before the last message
    "zephyr": (ZEPHYR, True),
    "gemma": (GEMMA, False),
    "gemma3": (GEMMA3, True),
}
PARTS = [
    "a", " ", "\n", "\t", "\u00a0", "\u2028", "\x1c", "\x85", "é漢🙂", "[INST]", "</s>", "<|im_end|>", "<s>", "{{ x }}",
    "<|user|>", "0",
]  # fmt: skip


def random_content(draw: random.Random, blank: bool = False) -> str:
    """Return a content, which is blank only if it may be."""
    content = "".join(draw.choices(PARTS, k=draw.randrange(6)))
    return content if blank or content.strip() else content + "a"


@pytest.mark.parametrize("name", FORMS)
def test_texts_are_those_of_transformers(name: str) -> None:
    source, has_system = FORMS[name]
    form = chat_form(ChatTemplate(source, "T", TOKENS))
    assert form is not None and (form.system is not None) == has_system and form.end == "</s>"
    draw = random.Random(1)
    for number in range(200):
        contents = [random_content(draw, bool(turn % 2)) for turn in range(draw.choice([1, 3, 5, 9]))]
        messages = conversation(*contents, system=random_content(draw) if has_system and number % 2 else None)
        wanted = render_jinja_template([messages], chat_template=source, add_generation_prompt=True, **TOKENS)[0][0]
        assert form.text(messages) == wanted


@pytest.mark.parametrize(
    "source",
    [
        ODDS,
        LLAMA3,  # it writes the day on which it is rendered
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content.split('</think>')[-1] }}{% endfor %}<|assistant|>",
        "{% for m in messages %}{{ '[' + m.role + (']' if not loop.last else '!]') + m.content }}{% endfor %}",
        "{% for m in messages %}{{ loop.index ~ m.role + m.content }}{% endfor %}",
        "{{ messages[-1].content }}",
        "{% for m in messages %}{{ m.role + m.content | upper }}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{% for m in messages %}",
    ],
)
def test_other_templates_have_no_such_form(source: str) -> None:
    assert chat_form(ChatTemplate(source, "T", TOKENS)) is None
