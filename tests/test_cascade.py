"""Several drafts for one text: who is asked, whose guess is taken, and what each is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from draft_cases import Alone
from warpsmith.backend.base import Want
from warpsmith.backend.rows import HostRows, Rows
from warpsmith.draft.base import Context, Draft, ScoredTree
from warpsmith.draft.budget import Budgeted
from warpsmith.draft.cascade import Cascade
from warpsmith.draft.costs import Costs

COSTS = Costs.between({1: 1.0, 64: 1.0 + 63 * 0.05})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Guess(Draft):
    """Chains of some confidence, when it has one to give; guesses are right as often as `rate` says."""

    def __init__(self, name: str, clock: Clock, seconds: float, wants: Want = Want("none")) -> None:  # noqa: B008
        self.name, self.wants, self.clock, self.seconds = name, wants, clock, seconds
        self.speaks, self.confidence, self.rate = True, 0.9, 0.9
        self.calls = 0
        self.rows: list[tuple[int, int | None, int | None]] = []

    def propose(self, memory: Any, context: Context) -> ScoredTree | None:
        self.calls += 1
        self.clock.now += self.seconds
        if not self.speaks:
            return None
        chain = np.arange(min(context.depth, 8) + 1)
        return ScoredTree(context.root + chain, chain - 1, chain * np.log(self.confidence))

    def observe(
        self,
        memory: Any,
        tokens: Sequence[int],
        position: int,
        features: Rows | None,
        hidden: Rows | None,
    ) -> None:
        shapes = [None if rows is None else rows.shape[1] for rows in (features, hidden)]
        self.rows.append((len(tokens), *shapes))  # type: ignore[arg-type]


class World:
    def __init__(self) -> None:
        self.clock, self.rng = Clock(), np.random.default_rng(0)
        self.text = Guess("text", self.clock, 0.01)
        self.network = Guess("network", self.clock, 1.5, Want("none", features=(3, 1)))
        self.cascade = Cascade([Budgeted(draft, COSTS) for draft in (self.text, self.network)], self.clock)
        self.held = Alone(self.cascade)
        self.ids = [0]

    def run(self, tokens: int) -> float:
        start, end = self.clock.now, len(self.ids) + tokens
        while len(self.ids) < end:
            before = self.clock.now
            if rest := self.held.rest:
                self.clock.now += rest
                count, forward = rest, None
                self.held.observe([0] * count, len(self.ids) - 1, None, None)
            else:
                calls = self.text.calls, self.network.calls
                tree = self.held.propose(Context(self.ids, None, 1000))  # type: ignore[arg-type]
                nodes = 1 if tree is None else len(tree)
                who = self.network if self.network.calls > calls[1] else self.text
                forward = COSTS.seconds[nodes - 1]
                self.clock.now += forward
                count = 1
                while tree is not None and count < nodes and self.rng.random() < who.rate:
                    count += 1
                committed = [self.ids[-1]] if tree is None else tree.tokens[:count].tolist()
                rows = HostRows(np.zeros((count, 2 * 5), np.float32))
                self.held.observe(committed, len(self.ids) - 1, rows, None)
            self.held.spent(count, self.clock.now - before, forward)
            self.ids += range(len(self.ids), len(self.ids) + count)
        return (self.clock.now - start) / (len(self.ids) - end + tokens)


def test_a_good_guess_from_the_text_spares_the_network() -> None:
    world = World()
    assert world.run(600) < 0.4
    assert world.text.calls > 20
    assert world.network.calls == 0


def test_where_the_text_says_nothing_the_network_speaks() -> None:
    world = World()
    world.text.speaks = False
    assert world.run(1000) < 0.8
    assert world.network.calls > 100
    assert world.text.calls < world.network.calls, "the silent one is asked less and less"


def test_the_better_one_is_heard() -> None:
    """The text has weak guesses at every place, which would pay by themselves; the network's are far better."""
    world = World()
    world.text.confidence = world.text.rate = 0.3
    world.network.seconds = 0.1
    world.text.speaks = False
    world.run(100)
    world.text.speaks = True
    calls = world.network.calls
    assert world.run(600) < 0.45
    assert world.network.calls - calls > 50


def test_when_neither_pays_both_rest_and_say_so() -> None:
    world = World()
    world.text.rate = world.network.rate = 0.0
    assert world.run(3000) < 1 / 0.98
    while not all(draft.off for draft in world.cascade.drafts):
        world.run(1)
    off = world.cascade.off
    assert off is not None
    assert "text drafts do not pay" in off
    assert "network drafts do not pay" in off
    world.cascade.drafts[0].account.open = True
    assert world.cascade.off is None


def test_each_gets_the_rows_it_asked_for() -> None:
    clock = Clock()
    drafts = [
        Guess("none", clock, 0.01),
        Guess("one", clock, 0.01, Want("none", features=(4, 2), hidden=True)),
        Guess("two", clock, 0.01, Want("none", features=(2, 7))),
    ]
    cascade = Cascade([Budgeted(draft, COSTS) for draft in drafts], clock)
    assert cascade.name == "none+one+two"
    assert cascade.wants == Want("none", features=(4, 2, 7), hidden=True)
    held = Alone(cascade)
    seen: dict[str, Rows | None] = {}
    for draft in drafts:
        draft.observe = lambda memory, tokens, at, features, hidden, name=draft.name: seen.update({name: features})  # type: ignore[method-assign,misc]
    features = HostRows(np.repeat([[4.0, 2.0, 7.0]], 3, axis=1).repeat(2, axis=0))
    held.observe([1, 2], 0, features, HostRows(np.zeros((2, 3))))
    assert seen["none"] is None
    assert np.array_equal(seen["one"].numpy(), [[4, 4, 4, 2, 2, 2]] * 2)  # type: ignore[arg-type]
    assert np.array_equal(seen["two"].numpy(), [[2, 2, 2, 7, 7, 7]] * 2)  # type: ignore[arg-type]
    held.observe([1, 2], 0, None, None)
    assert seen == {"none": None, "one": None, "two": None}


def test_snapshots_are_everybody_s() -> None:
    world = World()
    for i, draft in enumerate((world.text, world.network)):
        draft.snapshot = lambda memory, i=i: i  # type: ignore[method-assign]
    restored: list[tuple[str, int]] = []
    for draft in (world.text, world.network):
        draft.restore = lambda memory, saved, name=draft.name: restored.append((name, saved))  # type: ignore[method-assign,misc]
    world.held.restore(world.held.snapshot())
    assert restored == [("text", 0), ("network", 1)]


@pytest.mark.parametrize("seconds", [0.01, 0.2])
def test_the_time_of_asking_is_charged_to_the_one_who_was_asked(seconds: float) -> None:
    world = World()
    world.text.speaks, world.text.seconds = False, seconds
    world.network.seconds = 0.1
    world.run(2000)
    text, network = world.cascade.drafts
    assert network.account.open
    assert network.account.credit > 8
    assert seconds < 0.1 or not text.account.open or text.account.credit < 4
