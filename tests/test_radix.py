"""The radix tree against a dictionary: the same answers, the same order of use, and nothing left behind."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from warpsmith.engine.prefix import RadixTree, common_prefix

BUDGET = 20
texts = st.lists(st.integers(0, 2), max_size=9).map(tuple)


class Against(RuleBasedStateMachine):
    """A dictionary of texts, the least recently used first, looks through all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: RadixTree[int] = RadixTree(BUDGET)
        self.model: dict[tuple[int, ...], tuple[int, int]] = {}
        self.count = 0

    def used(self, text: tuple[int, ...]) -> None:
        self.model[text] = self.model.pop(text)

    def shrink(self, room: int) -> None:
        while self.model and sum(size for _, size in self.model.values()) + room > BUDGET:
            del self.model[next(iter(self.model))]

    @rule(text=texts, nbytes=st.integers(1, 25))
    def add(self, text: tuple[int, ...], nbytes: int) -> None:
        self.count += 1
        self.tree.add(text, self.count, nbytes)
        self.model.pop(text, None)
        self.model[text] = self.count, nbytes
        self.shrink(0)

    @rule(prompt=texts)
    def find(self, prompt: tuple[int, ...]) -> None:
        begins = [text for text in self.model if len(text) < len(prompt) and prompt[: len(text)] == text]
        longest = max(begins, key=len, default=None)
        expected = None if longest is None else self.model[longest][0]
        shared = max((common_prefix(prompt, text) for text in self.model), default=0)
        assert self.tree.find(prompt) == (expected, shared)
        if longest is not None:
            self.used(longest)

    @rule(text=texts)
    def has(self, text: tuple[int, ...]) -> None:
        assert self.tree.has(text) == (text in self.model)
        if text in self.model:
            self.used(text)

    @rule(nbytes=st.integers(0, 25))
    def make_room(self, nbytes: int) -> None:
        self.tree.make_room(nbytes)
        self.shrink(nbytes)

    @invariant()
    def the_same(self) -> None:
        assert len(self.tree) == len(self.model)
        assert self.tree.nbytes == sum(size for _, size in self.model.values()) <= BUDGET
        found: dict[tuple[int, ...], int] = {}
        self.collect(self.tree._root, (), found)
        assert found == {text: value for text, (value, _) in self.model.items()}

    def collect(self, node: Any, text: tuple[int, ...], found: dict[tuple[int, ...], int]) -> None:
        """Every text in the tree, and no node without a reason to be there."""
        if node.parent is not None:
            assert len(node.edge)
            assert node.value is not None or len(node.children) > 1
        if node.value is not None:
            found[text] = node.value
        for first, child in node.children.items():
            assert child.parent is node
            assert child.edge[0] == first
            self.collect(child, text + tuple(child.edge.tolist()), found)


Against.TestCase.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)
TestRadixTree = Against.TestCase


@given(texts, texts)
def test_common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    length = common_prefix(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]
