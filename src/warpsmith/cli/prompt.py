"""Where a chat's messages come from: a person at a terminal, or a pipe.

A message ends with its line, unless the line ends in a backslash, or the message began with three quotes that are still
open. At a terminal Alt-Enter also begins a new line, and what is pasted is inserted as it is, whatever its lines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from warpsmith.errors import BadRequest

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent

QUOTES = '"""'


def messages(interactive: bool) -> Iterator[str]:
    """One message after the other. At a terminal, Ctrl-C raises KeyboardInterrupt and asking can go on after it."""
    if sys.stdin is None:
        raise BadRequest("Standard input is closed.", "Leave it open, or pipe messages into it.")
    return Typed() if interactive else piped(decoded(line, "Standard input") for line in sys.stdin.buffer)


def decoded(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"{source} is not UTF-8 text (byte {error.start}).", "Convert it to UTF-8.") from None


def is_open(text: str) -> bool:
    """Whether a message goes on after this line because of its quotes."""
    return text.startswith(QUOTES) and text.count(QUOTES) == 1


def unquoted(text: str) -> str:
    """A message without the quotes around it."""
    if text.startswith(QUOTES) and text.endswith(QUOTES) and text.count(QUOTES) == 2:
        return text[3:-3].removeprefix("\n").removesuffix("\n")
    return text


def piped(lines: Iterable[str]) -> Iterator[str]:
    """The messages in a pipe's lines.

    >>> list(piped(["one\\n", "two \\\\\\n", "  lines\\n", '\"\"\"\\n', "quoted\\n", '\"\"\"\\n']))
    ['one', 'two \\n  lines', 'quoted']
    """
    text = ""
    for line in lines:
        text += line.removesuffix("\n").removesuffix("\r")
        if text.endswith("\\"):
            text = text[:-1] + "\n"
        elif is_open(text):
            text += "\n"
        else:
            yield unquoted(text)
            text = ""
    if text:
        yield unquoted(text.removesuffix("\n"))


class Typed(Iterator[str]):
    """What a person types, with line editing, and a history that outlives the program."""

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,  # Enter is ours to interpret
            prompt_continuation=". ",
            key_bindings=_keys(),
            history=_history(),
            # the prompt is no part of what is written to a file; None lets it look at the terminal
            output=None if sys.stdout.isatty() else create_output(always_prefer_tty=True),
        )

    def __next__(self) -> str:
        try:
            return unquoted(self._session.prompt(handle_sigint=False))  # Ctrl-C is a key here, and not a signal
        except EOFError:
            raise StopIteration from None


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        before = buffer.document.text_before_cursor
        if before.endswith("\\") and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def history_path() -> Path:
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return base / "warpsmith" / "chat_history"


def _history() -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def load_history_strings(self) -> Iterable[str]:
            try:
                return list(super().load_history_strings())
            except OSError:
                return []

        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a disk that is full by now is no reason to lose the message
                super().store_string(string)

    with suppress(OSError):  # where nothing can be kept, this run still has a history
        path = history_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))  # nobody else's business
        return Kept(path)
    return InMemoryHistory()
