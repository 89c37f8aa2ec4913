"""The switches for thinking that JavaScript finds in a chat template are those of runtime/template.py."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from diffbit.apps.web.site import PACKAGE
from diffbit.io.errors import DiffbitError
from diffbit.runtime import ChatTemplate

from .test_site import MODULES

TEMPLATES = (
    "{{ messages }}",
    "<think>{{ messages }}",
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}",
    "{% set enable_thinking = enable_thinking if enable_thinking is defined else true %}{{ enable_thinking }}",
    "{% set enable_thinking = true %}{{ enable_thinking }}",
    "{% for thinking in messages %}{{ thinking.enable_thinking }}{% endfor %}",
    "{{ messages[enable_thinking] }} {{ dict(thinking=1) }} {{ 'enable_thinking' }}",
    "{% macro m(thinking) %}{{ enable_thinking | default(true) }}{% endmacro %}{{ {'a': [m(1), enable_thinking]} }}",
)


@pytest.mark.skipif(not MODULES.is_dir() or shutil.which("node") is None, reason="needs Node.js and node_modules")
def test_switches_are_those_of_python() -> None:
    script = f"""
    import {{ Template }} from {json.dumps((MODULES / "@huggingface/jinja/dist/index.js").as_uri())};
    import {{ switchesOf, thinkingVariables }} from {json.dumps((PACKAGE / "thinking.js").as_uri())};
    const variables = (think, switches, source) => {{
      try {{ return thinkingVariables(think, switches, source); }} catch (error) {{ return error.message; }}
    }};
    console.log(JSON.stringify({json.dumps(TEMPLATES)}.map((source) => {{
      const switches = switchesOf(new Template(source));
      return [undefined, true, false].map((think) => variables(think, switches, source));
    }})));
    """
    done = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, text=True, check=True)
    for source, answers in zip(TEMPLATES, json.loads(done.stdout), strict=True):
        template = ChatTemplate(source, "a template")
        for think, answer in zip((None, True, False), answers, strict=True):
            try:
                assert answer == template.thinking(think), source
            except DiffbitError as error:
                assert "has no switch for thinking" in str(error) and "has no switch for thinking" in answer, source
