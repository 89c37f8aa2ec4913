"""Renders chat templates. `ChatTemplate` (template.py) runs this file in a separate process.

A template comes with a model, so it is untrusted code. Jinja's sandbox keeps it away from Python's internals and from
files, but does not limit time and memory ("x" * 10**10, nested loops). So this process limits its own memory, where the
system can, and its parent kills it after a while. It imports nothing from diffbit, so it starts fast and stays small.

Stdin has lines of JSON: first {"template": source, "variables": {...}}, then {"messages": [...], ...} for each
rendering. Each rendering writes a line {"text": ...} or {"error": ...} to stdout. The request "names" gets
{"names": [...]}, the variables that the template reads.

The Jinja environment is that of transformers (utils/chat_template_utils.py), for which published templates are written.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from functools import cache
from math import ceil
from time import process_time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import jinja2

MEMORY = 512 << 20  # bytes of address space
CPU_SECONDS = 60  # of a rendering; it ends this process even if the parent was killed
MOST_CHARACTERS = 4_000_000  # of a rendered conversation


def main() -> None:
    """Render until stdin ends."""
    sys.path[:] = json.loads(sys.argv[1])
    first = json.loads(sys.stdin.readline())
    if sys.platform != "darwin":  # macOS refuses a limit below what it maps into each process
        _limit("RLIMIT_AS", MEMORY)  # before compiling, which computes constants
    template: object = None
    for line in sys.stdin:
        _limit("RLIMIT_CPU", ceil(process_time()) + CPU_SECONDS)
        try:
            request = json.loads(line)
            if request == "names":
                print(json.dumps({"names": names(first["template"])}), flush=True)
                continue
            if template is None:
                template = compiled(first["template"])
            text = template.render(first["variables"] | request)  # type: ignore[attr-defined]
            answer = {"text": text}
            if len(text) > MOST_CHARACTERS:
                answer = {"error": f"it renders {len(text)} characters, wanted at most {MOST_CHARACTERS}"}
        except MemoryError:
            answer = {"error": f"it needs more than {MEMORY >> 20} MiB of memory"}
        except Exception as error:  # untrusted code may raise anything
            line_number = getattr(error, "lineno", None)
            where = f"line {line_number}: " if line_number else ""
            answer = {"error": where + (" ".join(str(error).split())[:300] or type(error).__name__)}
        print(json.dumps(answer), flush=True)


def names(source: str) -> list[str]:
    """Return the variables that a template reads and does not set."""
    from jinja2.meta import find_undeclared_variables

    return sorted(find_undeclared_variables(environment().parse(source)))


def compiled(source: str) -> jinja2.Template:
    """Return a template in the environment of transformers."""
    return environment().from_string(source)


@cache
def environment() -> jinja2.Environment:
    """Return Jinja's sandbox with what transformers adds to it."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """{% generation %} ... {% endgeneration %} marks an answer for training; here it only renders its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Return JSON, without the escapes of HTML characters that Jinja's own filter writes."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _limit(name: str, limit: int) -> None:
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return
    resource_id = getattr(resource, name)
    hard = resource.getrlimit(resource_id)[1]
    if hard == resource.RLIM_INFINITY or hard > limit:
        resource.setrlimit(resource_id, (limit, hard))


if __name__ == "__main__":
    main()
