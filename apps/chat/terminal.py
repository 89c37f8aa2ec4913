"""A conversation at a terminal: messages of several lines come in, text goes out with its lines broken between words.

Terminals mark pasted text (bracketed paste), so a paste is a part of one message, whatever lines it has.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from rich.cells import cell_len

from ...cli import remark

MOST_HELD = 24  # characters of a word that are held back until it is complete
QUOTES = '"""'  # before and after a message of several lines
SECTIONS = {"<think>": ("</think>", "thinking"), "<tool_call>": ("</tool_call>", "calling a tool")}
MARKER = re.compile(r"\s*(?:(?:[-*+•>]|\d{1,3}[.)])\s+)?")  # of an item of a list; the item goes on under its text


def messages(commands: Collection[str] = ()) -> Iterator[str]:
    """Yield the lines of stdin; from a terminal, the messages typed there. commands: completed by the tab key."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.output import create_output

    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=Condition(lambda: _is_open(get_app().current_buffer.text)),
        prompt_continuation="  ",
        completer=WordCompleter(sorted(commands), sentence=True),
        complete_while_typing=False,
        output=None if sys.stdout.isatty() else create_output(sys.stderr),
    )
    while True:
        try:
            text = session.prompt()
        except EOFError:
            return
        except KeyboardInterrupt:
            remark("Ctrl-D ends")
            continue
        block = text.strip()
        yield block.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n") if block.startswith(QUOTES) else text


def _is_open(text: str) -> bool:
    """Whether the message begins with quotes and does not end with others, so that return begins a new line."""
    block = text.strip()
    return block.startswith(QUOTES) and not block.removeprefix(QUOTES).endswith(QUOTES)


@contextmanager
def hidden_keys() -> Iterator[None]:
    """Do not show what is typed while nothing is asked for; it begins the next message.

    Without lines (ICANON), too: Linux shows what it has of a line to no reader that asks for keys, until the next key.
    """
    try:
        import termios
    except ModuleNotFoundError:  # Windows
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    hidden = [*before[:3], before[3] & ~(termios.ECHO | termios.ICANON), *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSANOW, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def width() -> int:
    """Return columns of the terminal."""
    return max(shutil.get_terminal_size().columns, 8)


class Wrapped:
    """Passes text on to `write` as it comes, each word when it is complete, and breaks lines at the terminal's width.

    Markdown stays as the model wrote it: code and tables keep their lines, and a list's item goes on under its text.
    A word of more than MOST_HELD characters, such as an address, is passed on as it comes and has no break.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._line = ""  # of the text, without the breaks
        self._space, self._word = "", ""  # what comes next
        self._column = 0
        self._is_code = False
        self._is_long = False  # whether a part of the word is written

    def push(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self._place()
                self._end_line()
            elif character.isspace():
                self._place()
                self._is_long = False
                self._space += character if self._is_code else character.expandtabs(4)
            elif cell_len(character) == 2:  # Chinese and Japanese have no spaces between words
                self._place()
                self._is_long = False
                self._word = character
            else:
                self._word += character
                if self._is_long or len(self._word) > MOST_HELD:
                    self._place()
                    self._is_long = True

    def finish(self) -> None:
        """Write what is left, and end the line."""
        self._place()
        if self._line:
            self._end_line()

    def _place(self) -> None:
        if not self._word:
            return
        added = cell_len(self._space + self._word)
        verbatim = self._is_code or self._is_long or self._line.lstrip().startswith(("|", "```"))
        if verbatim or self._column + added <= width() or not self._line:
            self._write(self._space + self._word)
            self._column += added
            if self._is_long:
                self._column %= width()
        else:
            marker = MARKER.match(self._line)
            indent = min(cell_len(marker[0]) if marker else 0, width() // 2)
            self._write(f"\n{' ' * indent}{self._word}")
            self._column = indent + cell_len(self._word)
        self._line += self._space + self._word
        self._space = self._word = ""

    def _end_line(self) -> None:
        self._write("\n")
        if self._line.lstrip().startswith("```"):
            self._is_code = not self._is_code
        self._line = self._space = ""
        self._column, self._is_long = 0, False


class Folded:
    """Passes an answer on to `show`, but in place of its thinking and its calls of tools a line of `note`.

    tags: those of SECTIONS that the model's template knows. inside: the one that the prompt has opened.
    """

    def __init__(
        self, show: Callable[[str], object], note: Callable[[str], object], tags: Collection[str], inside: str | None
    ) -> None:
        self._show, self._note, self._tags = show, note, tags
        self._text = ""  # not yet shown
        self._section: str | None = None
        self._started = 0.0
        self._is_fresh = True  # whether nothing is shown since a section, after which the lines of its end are left out
        if inside is not None:
            self._open(inside)

    def push(self, text: str) -> None:
        self._text += text
        while self._section is None or SECTIONS[self._section][0] in self._text:
            if self._section is not None:
                self._text = self._text.partition(SECTIONS[self._section][0])[2]
                self._close()
            before, tag = min(
                ((self._text.partition(tag)[0], tag) for tag in self._tags if tag in self._text),
                key=lambda match: len(match[0]),
                default=(self._text[: len(self._text) - self._pending()], None),
            )
            self._pass_on(before)
            self._text = self._text[len(before) :]
            if tag is None:
                return
            self._text = self._text.removeprefix(tag)
            self._open(tag)

    def finish(self) -> None:
        if self._section is None:
            self._pass_on(self._text)
        else:
            self._close()

    def _pending(self) -> int:
        """Characters at the end that may begin a tag."""
        beginnings = [tag[:count] for tag in self._tags for count in range(1, len(tag))]
        return max((len(part) for part in beginnings if self._text.endswith(part)), default=0)

    def _pass_on(self, text: str) -> None:
        text = text.lstrip("\n") if self._is_fresh else text
        if text:
            self._is_fresh = False
            self._show(text)

    def _open(self, tag: str) -> None:
        self._section, self._started = tag, time.monotonic()
        self._note(f"({SECTIONS[tag][1]} ...")

    def _close(self) -> None:
        self._note(f" {time.monotonic() - self._started:.0f} s; /unfold shows it)\n")
        self._section, self._is_fresh = None, True
