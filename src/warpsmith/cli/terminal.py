"""What is written to the terminal, and how: text as it comes, asides in dim letters, complaints in two lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

from warpsmith.cli.escape import printable

WORTH_A_BAR = 256 << 20  # bytes that take long enough to load

# Control characters could move the cursor, change the title or worse. Tabs and newlines may pass.
_VISIBLE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def styled(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def aside(text: str) -> None:
    """A dim line on stderr."""
    text = printable(text)
    sys.stderr.write(f"\x1b[2m{text}\x1b[0m\n" if styled(sys.stderr) else f"{text}\n")
    sys.stderr.flush()


def complain(problem: str, fix: str = "") -> None:
    """An error: what is wrong, and what to do about it."""
    problem, fix = printable(problem), printable(fix)
    label = "\x1b[1;31merror:\x1b[0m" if styled(sys.stderr) else "error:"
    sys.stderr.write(f"{label} {problem}\n" + (f"  fix: {fix}\n" if fix else ""))
    sys.stderr.flush()


def emit(text: str) -> None:
    """A model's text on stdout, at once. A terminal gets no control characters: a model could do anything with them."""
    sys.stdout.write(text.translate(_VISIBLE) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def explain_invisible(text: str, tokens: int) -> None:
    """An answer that shows nothing looks like a failure, and is none."""
    if not any(c.isprintable() and not c.isspace() for c in text):
        aside(
            f"nothing to see: the {tokens} tokens are white space, control characters or special tokens, "
            "as a random model (`warpsmith synth`) often writes them"
        )


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that moves by as many bytes as it is told of; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


@contextmanager
def loading_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar for `warpsmith.load`, which tells it of bytes done and bytes in all. Small models are not worth one."""
    with ExitStack() as stack:
        advance: Callable[[int], None] | None = None
        before = 0

        def hear(done: int, total: int) -> None:
            nonlocal advance, before
            if total < WORTH_A_BAR:
                return
            if advance is None:
                advance = stack.enter_context(progress("loading", total))
            advance(done - before)
            before = done
            if done == total:
                stack.close()

        yield hear
