"""The budget at work, in a world without a machine: a clock, costs and acceptances that the tests decide."""

from __future__ import annotations

from bisect import bisect
from typing import Any

import numpy as np
import pytest

from budget_cases import DEAR, FLAT, GENTLE
from draft_cases import Alone
from warpsmith.backend.base import Want
from warpsmith.draft.base import Context, Draft, ScoredTree
from warpsmith.draft.budget import LISTENS, Budgeted
from warpsmith.draft.costs import Costs
from warpsmith.draft.economy import BINS, MOST, Calibration


class World:
    """A clock, a cost for everything, and a text in which a drafted token is right as often as `rate` says."""

    def __init__(self, costs: Costs, draft_seconds: float, rate: float, seed: int = 0, host: float = 0.0) -> None:
        self.now, self.costs, self.draft_seconds, self.rate, self.host = 0.0, costs, draft_seconds, rate, host
        self.rng = np.random.default_rng(seed)
        self.draft = Oracle(self)
        self.budget = Budgeted(self.draft, costs)
        self.held = Alone(self.budget)
        self.ids = [0]
        self.sizes: list[int] = []

    def run(self, tokens: int) -> float:
        """Decode and return the seconds it took; plain decoding takes one a token."""
        start, end = self.now, len(self.ids) + tokens
        while len(self.ids) < end:
            before = self.now
            if rest := self.held.rest:
                rest = min(rest, end - len(self.ids))
                committed = [self.ids[-1], *range(len(self.ids), len(self.ids) + rest - 1)]
                self.now += rest * self.costs.plain
                self.held.observe(committed, len(self.ids) - 1, None, None)
                self.held.spent(rest, self.now - before, None)
                self.sizes += [0] * rest
            else:
                committed = self.step()
            self.ids += [*committed[1:], len(self.ids) + len(committed) - 1]
        return (self.now - start) * tokens / (len(self.ids) - end + tokens)

    def step(self) -> list[int]:
        before = self.now
        tree = self.held.propose(Context(self.ids, None, 1000))  # type: ignore[arg-type]
        nodes = 1 if tree is None else len(tree)
        self.sizes.append(nodes - 1)
        self.now += self.costs.seconds[nodes - 1] + self.host
        right = 0
        while tree is not None and right < nodes - 1 and self.rng.random() < self.rate:
            right += 1
        committed = [self.ids[-1], *([] if tree is None else tree.tokens[1 : right + 1].tolist())]
        self.held.observe(committed, len(self.ids) - 1, None, None)
        self.held.spent(len(committed), self.now - before, self.costs.seconds[nodes - 1])
        return committed


class Oracle(Draft):
    """Chains with a fixed confidence, cut where they cannot pay."""

    name = "oracle"
    confidence = 0.8

    def __init__(self, world: World) -> None:
        self.world, self.calls = world, 0

    def propose(self, memory: Any, context: Context) -> ScoredTree:
        self.calls += 1
        self.world.now += self.world.draft_seconds
        chain = np.arange(min(context.depth, 8) + 1)
        tokens = [context.root, *(len(context.ids) + chain[:-1]).tolist()]
        return ScoredTree(np.array(tokens), chain - 1, chain * np.log(self.confidence))


def test_a_good_draft_is_used_fully() -> None:
    world = World(GENTLE, draft_seconds=0.2, rate=0.8)
    assert world.run(2000) < 2000 / 2.2
    assert np.mean(world.sizes) > 4
    assert world.budget.off is None


@pytest.mark.parametrize(("costs", "draft_seconds"), [(GENTLE, 3.0), (DEAR, 0.1), (GENTLE, 0.1), (FLAT, 0.5)])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("host", [0.0, 0.5])
def test_no_draft_makes_decoding_slower(costs: Costs, draft_seconds: float, rate: float, host: float) -> None:
    """Whatever a step costs besides its forward: a draft, or a host that takes half a token's time to walk a tree."""
    world = World(costs, draft_seconds, rate, host=host)
    assert world.run(4000) <= 4000 / 0.99


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9])
def test_a_backend_that_decodes_faster_than_it_steps_is_not_slowed_down(rate: float) -> None:
    """As a GPU that makes 64 tokens in one launch, and takes three times as long when the host asks for each."""
    costs = Costs.between({1: 3.0, 64: 6.0}, plain=1.0)
    world = World(costs, 0.1, rate, host=0.3)
    assert world.run(6000) <= 6000 / 0.99


def test_a_hopeless_draft_is_switched_off_and_says_so() -> None:
    world = World(GENTLE, draft_seconds=3.0, rate=0.0)
    world.run(1000)
    assert world.draft.calls < 10
    assert world.budget.off is not None
    assert "oracle" in world.budget.off
    assert "do not pay" in world.budget.off


def test_the_budget_shrinks_when_guesses_get_worse_and_grows_when_they_get_better() -> None:
    world = World(GENTLE, draft_seconds=0.02, rate=0.9)
    world.run(1000)
    large = np.mean(world.sizes[-50:])
    world.rate = 0.1
    world.run(3000)
    small = np.mean(world.sizes[-50:])
    assert small < large / 3
    world.rate = 0.9
    world.run(6000)
    assert np.mean(world.sizes[-50:]) > large / 1.5


def test_decisions_are_the_same_for_the_same_measurements() -> None:
    first, second = World(GENTLE, 0.3, 0.5, seed=3), World(GENTLE, 0.3, 0.5, seed=3)
    assert first.run(800) == second.run(800)
    assert first.sizes == second.sizes


def test_slower_forwards_than_measured_are_noticed() -> None:
    """Trees that cost four times what was measured, as with a sampler that wants all logits, are cut down."""
    world = World(GENTLE, 0.05, 0.5)
    world.run(300)
    before = np.mean(world.sizes[-50:])
    world.costs = Costs.between({1: 1.0, 2: 4.0, 64: 16.6})
    world.run(2000)
    assert np.mean(world.sizes[-200:]) < before / 2


@pytest.mark.parametrize("busy", [0.1, 10.0])
def test_a_machine_that_was_busy_when_it_was_measured_does_not_matter(busy: float) -> None:
    """All costs ten times too high, or too low: what counts is how they compare."""
    right, wrong = World(GENTLE, 0.1, 0.8), World(GENTLE, 0.1, 0.8)
    wrong.budget = Budgeted(wrong.draft, Costs(tuple(s * busy for s in GENTLE.seconds), GENTLE.plain * busy))
    assert wrong.run(3000) < right.run(3000) * 1.05


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_plain_decoding_that_was_measured_wrongly_is_found_out(rate: float) -> None:
    """It looked four times as slow as it is, so that any draft would seem to pay."""
    world = World(GENTLE, 1.0, rate)
    world.budget = Budgeted(world.draft, Costs(GENTLE.seconds, 4.0))
    assert world.run(4000) <= 4000 / 0.99


def test_a_machine_that_gets_busy_and_quiet_again_is_followed() -> None:
    world = World(GENTLE, 0.1, 0.8)
    quiet = world.run(2000)
    world.costs = Costs(tuple(s * 5 for s in GENTLE.seconds), GENTLE.plain * 5)
    world.draft_seconds *= 5
    world.run(3000)
    assert world.run(2000) < quiet * 5 * 1.1
    world.costs, world.draft_seconds = GENTLE, 0.1
    world.run(3000)
    assert world.run(2000) < quiet * 1.1


@pytest.mark.parametrize("tokens", [40, 150, 700])
@pytest.mark.parametrize("rate", [0.0, 0.8])
def test_a_machine_that_is_busy_now_and_then(tokens: int, rate: float) -> None:
    """A good draft goes on through it, and a bad one gains nothing by it."""
    world, plain, seconds = World(GENTLE, 0.1, rate), 0.0, 0.0
    busy = Costs(tuple(s * 5 for s in GENTLE.seconds), GENTLE.plain * 5)
    while len(world.ids) < 6000:
        world.costs, world.draft_seconds = (busy, 0.5) if world.costs is GENTLE else (GENTLE, 0.1)
        before = len(world.ids)
        seconds += world.run(tokens) * (len(world.ids) - before) / tokens
        plain += world.costs.plain * (len(world.ids) - before)
    assert seconds <= plain / (2.0 if rate else 0.98)


def test_a_size_that_was_measured_wrongly_is_corrected() -> None:
    """One size looked cheap, and is not: it is tried, found out, and left alone."""
    world = World(GENTLE, 0.1, 0.8)
    seconds = [1.0 if n < 5 else s for n, s in enumerate(GENTLE.seconds)]
    world.costs = Costs((1.0, 1.05, *(s + 6.0 for s in GENTLE.seconds[2:5]), *GENTLE.seconds[5:]), 1.0)
    world.budget = Budgeted(world.draft, Costs(tuple(seconds), 1.0))
    world.run(1000)
    assert not any(2 <= size <= 4 for size in world.sizes[-100:])


@pytest.mark.parametrize("tokens", [0, 500])
def test_a_hiccup_of_the_machine_does_not_end_a_good_draft(tokens: int) -> None:
    world = World(GENTLE, 0.1, 0.8)
    if tokens:
        world.run(tokens)
    seconds = world.draft_seconds
    world.draft_seconds = 500.0
    world.step()
    world.draft_seconds = seconds
    assert world.budget.account.open
    world.budget.missed(world.held.memory, 2, 500.0)
    assert world.budget.account.open, "nor when another was heard"


def test_how_deep_a_draft_is_asked_follows_how_deep_it_was_right() -> None:
    """So that the end of a text that was easy to guess costs one large tree, and not many."""
    asked: list[int] = []

    class Deep(Oracle):
        confidence = 0.99

        def propose(self, memory: Any, context: Context) -> ScoredTree:
            asked.append(context.depth)
            return super().propose(memory, context)

    world = World(FLAT, 0.0, 1.0)
    world.budget.draft = Deep(world)
    world.run(60)
    assert asked[:3] == [2, 6, 14]
    world.rate = 0.0
    for _ in range(4):
        world.ids += world.step()[1:]
    assert asked[-1] == 2


def test_no_step_loses_more_than_the_account_holds() -> None:
    """A long text that is easy to guess ends: the tree that is all wrong is not one that cost thirty tokens."""

    class Long(Oracle):
        confidence = 0.99

        def propose(self, memory: Any, context: Context) -> ScoredTree:
            chain = np.arange(min(context.depth, 63) + 1)
            tokens = [context.root, *(len(context.ids) + chain[:-1]).tolist()]
            return ScoredTree(np.array(tokens), chain - 1, chain * np.log(self.confidence))

    world = World(Costs.between({1: 1.0, 64: 1.0 + 63 * 0.5}), 0.0, 1.0)
    world.budget.draft = Long(world)
    world.run(1000)
    assert world.budget.account.credit == MOST
    assert 20 < max(world.sizes) <= 2 * MOST
    world.rate = 0.0
    world.step()
    assert world.budget.account.open
    assert world.budget.account.credit >= 0
    world.budget.account.credit = 0.1
    sizes = len(world.sizes)
    world.step()
    assert 0 < world.sizes[sizes] <= 4, "and there is always enough for a small one"


@pytest.mark.parametrize("how", ["reset", "restore"])
def test_a_draft_that_rests_is_tried_on_another_text(how: str) -> None:
    world = World(GENTLE, draft_seconds=0.1, rate=0.9)
    world.run(500)
    world.rate = 0.0
    while world.budget.account.open:
        world.ids += world.step()[1:]
    assert world.held.rest > 20
    if how == "reset":
        world.held.reset()
    else:
        world.held.restore(world.held.snapshot())
    assert world.held.rest == 0
    assert world.budget.off is None


def test_a_draft_that_needs_rows_listens_before_it_is_tried_again() -> None:
    class Listening(Oracle):
        wants = Want(tokens="none", hidden=True)

    world = World(GENTLE, 3.0, 0.0)
    world.budget = Budgeted(Listening(world), GENTLE)
    world.held = Alone(world.budget)
    rows: list[int] = []
    while len(rows) < 5000:
        if world.held.rest:
            world.held.spent(world.held.rest, float(world.held.rest), None)
            rows.append(0)
            continue
        calls = world.budget.draft.calls  # type: ignore[attr-defined]
        world.step()
        rows.append(1 + (world.budget.draft.calls > calls))  # type: ignore[attr-defined]
    tries = [i for i in range(100, len(rows)) if rows[i] == 2 and rows[i - 1] != 2]
    assert tries
    assert all(rows[i - LISTENS : i] == [1] * LISTENS for i in tries)


def test_a_draft_that_keeps_up_hears_every_token_at_rest() -> None:
    class Hearing(Oracle):
        wants = Want(tokens="none", features=(0,))
        keeps_up = True

    world = World(GENTLE, 3.0, 0.0)
    world.budget = Budgeted(Hearing(world), GENTLE)
    world.held = Alone(world.budget)
    while world.budget.account.open:
        world.step()
    assert world.held.rest == world.budget.account.waits > 64
    assert world.budget.listens(world.budget.new_memory())


def test_guesses_are_judged_where_their_parent_was_right() -> None:
    class Branching(Oracle):
        def propose(self, memory: Any, context: Context) -> ScoredTree:
            scores = np.log([1.0, 0.65, 0.25, 0.65 * 0.93, 0.25 * 0.45])
            return ScoredTree(np.array([context.root, 11, 12, 13, 14]), np.array([-1, 0, 0, 1, 2]), scores)

    world = World(FLAT, 0.0, 0.5)
    world.run(5)
    world.budget.draft = Branching(world)
    world.budget.calibration = Calibration()
    world.held.propose(Context([1, 2, 3], None, 10))  # type: ignore[arg-type]
    world.held.observe([3, 11], 2, None, None)
    tried, right = world.budget.calibration._tried, world.budget.calibration._right
    kinds = [bisect(BINS, confidence) for confidence in (0.65, 0.25, 0.93)]
    assert [tried[kind] for kind in kinds] == [1, 1, 1]
    assert sum(tried) == 3, "not the one below a wrong one"
    assert [right[kind] for kind in kinds] == [1, 0, 0]
    assert sum(right) == 1


def test_a_step_that_was_not_finished_teaches_nothing() -> None:
    world = World(GENTLE, 0.1, 0.5)
    world.run(10)
    before = list(world.budget.calibration._tried)
    world.held.propose(Context([1, 2, 3], None, 10))  # type: ignore[arg-type]
    world.held.observe([5, 6, 7], 0, None, None)  # another prompt
    world.held.propose(Context([1, 2, 3], None, 10))  # type: ignore[arg-type]
    world.held.reset()
    world.held.observe([3], 2, None, None)
    assert world.budget.calibration._tried == before
