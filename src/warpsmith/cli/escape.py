"""Text that came from a file, made safe to print."""

from __future__ import annotations


def printable(text: str) -> str:
    """On one line, with everything that a terminal could obey or that cannot be seen written as an escape.

    Names, keys and messages in a model file may hold anything: commands that move the cursor or set the title, line
    breaks that imitate other output, marks that reverse the direction of writing, halves of characters.

    >>> printable("a\\x1b[2J\\nb")
    'a\\\\x1b[2J\\\\nb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
