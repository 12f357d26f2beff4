"""Draws what became of a draft: which of its guesses were right and which were not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from warpsmith.engine.loop import Step

_RIGHT, _WRONG, _DIM, _END = "\x1b[32m", "\x1b[31m", "\x1b[2m", "\x1b[0m"


def tree_lines(step: Step, text: Callable[[int], str], colour: bool) -> Iterator[str]:
    """A line says how it went; each further line is a branch, indented by where it leaves the text.

    Guesses that became text are green, others red; without colour they carry a + or a -.
    """
    right, guesses = len(step.accepted) - 1, len(step.tree) - 1
    after, last = text(int(step.tree.tokens[0])), text(step.decided[-1])
    head = f"{right} of {guesses} after {after}, then {last}" if guesses else f"no guess after {after}, then {last}"
    yield f"{_DIM}{head}{_END}" if colour else head
    depths, accepted = step.tree.depths(), set(step.accepted)

    def shown(node: int) -> str:
        token, is_right = text(int(step.tree.tokens[node])), node in accepted
        if colour:
            return f"{_RIGHT if is_right else _WRONG}{token}{_END}"
        return f"{'+' if is_right else '-'}{token}"

    branches = np.flatnonzero(step.tree.parents == 0)[::-1].tolist()
    while branches:
        node = branches.pop()
        line = ["  " * int(depths[node]) + shown(node)]
        while len(children := np.flatnonzero(step.tree.parents == node).tolist()):
            branches += children[:0:-1]
            node = children[0]
            line.append(shown(node))
        yield " ".join(line)
