"""The budget: how many nodes pay, from costs and acceptances that the tests decide."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from random_models import SMALL, random_tensors
from warpsmith.backend.base import ARGMAX, Output, State, Want
from warpsmith.backend.reference import ReferenceBackend, ReferenceState
from warpsmith.backend.tree import MAX_NODES, Tree
from warpsmith.draft import costs as costs_module
from warpsmith.draft.base import Context, Draft, ScoredTree
from warpsmith.draft.budget import MOST, REFILL, START, Account, Budgeted, Calibration, best_size, path_probabilities
from warpsmith.draft.costs import ROUNDS, SIZES, Costs, costs_of, measure
from warpsmith.errors import DoesNotFit

FLAT = Costs.between({1: 1.0, 64: 1.0})  # every node for the price of one
DEAR = Costs.between({1: 1.0, 64: 64.0})  # no node for less than the first
GENTLE = Costs.between({1: 1.0, 64: 1.0 + 63 * 0.05})

probabilities = st.lists(st.floats(0, 1), max_size=63).map(lambda p: sorted(p, reverse=True))


@given(probabilities, st.floats(0, 20), st.lists(st.floats(0.01, 5), min_size=64, max_size=64))
def test_no_other_size_has_a_better_rate(chances: list[float], draft: float, steps: list[float]) -> None:
    seconds = np.cumsum(steps).tolist()
    size = best_size(chances, seconds, draft)
    rates = [(1 + sum(chances[:n])) / (draft + seconds[n]) for n in range(len(chances) + 1)]
    assert rates[size] == pytest.approx(max(rates))
    assert size == 0 or rates[size] > max(rates[:size]) * (1 - 1e-12), "of equals the smaller"


def test_sizes_follow_costs_and_chances() -> None:
    assert best_size([0.9, 0.8, 0.7], FLAT.seconds, 0) == 3
    assert best_size([0.9, 0.8, 0.7], DEAR.seconds, 0) == 0
    assert best_size([0.9, 0.8, 0.01], GENTLE.seconds, 0) == 2
    fading = [0.5 * 0.8**i for i in range(20)]
    assert best_size(fading, GENTLE.seconds, 0) < best_size(fading, GENTLE.seconds, 30), "a dear draft wants a big tree"
    assert best_size([], GENTLE.seconds, 1) == 0
    assert best_size([0.0] * 5, FLAT.seconds, 0) == 0


def test_costs_between_sizes_are_lines_that_never_fall() -> None:
    costs = Costs.between({1: 1.0, 3: 2.0, 5: 1.5, 64: 4.0})
    assert len(costs.seconds) == MAX_NODES
    assert costs.seconds[:5] == (1.0, 1.5, 2.0, 2.0, 2.0)
    assert (np.diff(costs.seconds) >= 0).all()


# -- calibration ------------------------------------------------------------------------------------------------------


def test_calibration_trusts_the_draft_first_and_the_facts_later() -> None:
    calibration, confidence = Calibration(), np.array([0.95])
    assert calibration.corrected(confidence) == pytest.approx(confidence)
    for i in range(3000):
        calibration.learn(confidence, np.array([i % 10 < 3]))
    assert calibration.corrected(confidence)[0] == pytest.approx(0.3, abs=0.05)
    assert calibration.corrected(np.array([0.15])) == pytest.approx([0.15]), "other confidences are another matter"
    for _ in range(600):
        calibration.learn(confidence, np.array([True]))
    assert calibration.corrected(confidence)[0] > 0.75, "what was long ago is forgotten"


def test_paths_multiply_corrected_steps() -> None:
    scores = np.log([1.0, 0.5, 0.25, 0.4])
    tree = ScoredTree(np.array([1, 2, 3, 4]), np.array([-1, 0, 1, 0]), scores)
    assert path_probabilities(tree, Calibration()) == pytest.approx([1, 0.5, 0.25, 0.4])


# -- the account ------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 8), st.floats(1, 12)), min_size=1, max_size=2000), st.integers(0, 100))
def test_what_speculation_can_lose_is_bounded(outcomes: list[tuple[int, float]], seed: int) -> None:
    account, lost, plain, worst = Account(), 0.0, 0, 0.0
    for tokens, worth in outcomes:
        if account.open:
            account.drafted(tokens, worth)
            lost += worth - tokens
            worst = max(worst, worth - tokens)
        else:
            account.plain()
            plain += 1
    assert lost <= START + REFILL * plain + worst + 1e-6


def test_an_empty_account_fills_up_slowly_and_tries_again() -> None:
    account = Account()
    while account.open:
        account.drafted(1, 3.0)
    waits = account.waits
    assert waits > 100
    for _ in range(waits - 2):
        account.plain()
        assert not account.open
    for _ in range(4):
        account.plain()
    assert account.open
    assert account.credit >= 4, "enough for two steps that are all wrong"
    for _ in range(100):
        account.drafted(5, 2.0)
    assert account.credit == MOST, "old gains do not pay for long losses"


# -- a world without a machine ----------------------------------------------------------------------------------------


class World:
    """A clock, a cost for everything, and a text in which a drafted token is right as often as `rate` says."""

    def __init__(self, costs: Costs, draft_seconds: float, rate: float, seed: int = 0) -> None:
        self.now, self.costs, self.draft_seconds, self.rate = 0.0, costs, draft_seconds, rate
        self.rng = np.random.default_rng(seed)
        self.draft = Oracle(self)
        self.budget = Budgeted(self.draft, costs, clock=lambda: self.now)
        self.ids = [0]
        self.sizes: list[int] = []

    def run(self, tokens: int) -> float:
        """Decode and return the seconds it took; plain decoding takes one a token."""
        start, end = self.now, len(self.ids) + tokens
        while len(self.ids) < end:
            tree = self.budget.propose(Context(self.ids, None, 1000))  # type: ignore[arg-type]
            nodes = 1 if tree is None else len(tree)
            self.sizes.append(nodes - 1)
            self.now += self.costs.seconds[nodes - 1]
            right = 0
            while tree is not None and right < nodes - 1 and self.rng.random() < self.rate:
                right += 1
            committed = [self.ids[-1], *([] if tree is None else tree.tokens[1 : right + 1].tolist())]
            self.budget.observe(committed, len(self.ids) - 1, None, None)
            self.ids += [*committed[1:], len(self.ids)]
        return (self.now - start) * tokens / (len(self.ids) - end + tokens)


class Oracle(Draft):
    """Chains with a fixed confidence."""

    name = "oracle"
    confidence = 0.8

    def __init__(self, world: World) -> None:
        self.world, self.calls = world, 0

    def propose(self, context: Context) -> ScoredTree:
        self.calls += 1
        self.world.now += self.world.draft_seconds
        chain = np.arange(9)
        tokens = [context.root, *(len(context.ids) + chain[:-1]).tolist()]
        return ScoredTree(np.array(tokens), chain - 1, chain * np.log(self.confidence))


def test_a_good_draft_is_used_fully() -> None:
    world = World(GENTLE, draft_seconds=0.2, rate=0.8)
    assert world.run(2000) < 2000 / 2.2
    assert np.mean(world.sizes) > 4
    assert world.budget.off is None


@pytest.mark.parametrize(("costs", "draft_seconds"), [(GENTLE, 3.0), (DEAR, 0.1), (GENTLE, 0.1), (FLAT, 0.5)])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.6])
def test_no_draft_makes_decoding_slower(costs: Costs, draft_seconds: float, rate: float) -> None:
    world = World(costs, draft_seconds, rate)
    assert world.run(4000) <= 4000 / 0.98


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
    wrong.budget = Budgeted(wrong.draft, Costs(tuple(s * busy for s in GENTLE.seconds)), clock=lambda: wrong.now)
    assert wrong.run(3000) < right.run(3000) * 1.05


def test_a_machine_that_gets_busy_and_quiet_again_is_followed() -> None:
    world = World(GENTLE, 0.1, 0.8)
    quiet = world.run(2000)
    world.costs = Costs(tuple(s * 5 for s in GENTLE.seconds))
    world.draft_seconds *= 5
    world.run(3000)
    assert world.run(2000) < quiet * 5 * 1.1
    world.costs, world.draft_seconds = GENTLE, 0.1
    world.run(1000)
    assert world.run(2000) < quiet * 1.1


def test_a_size_that_was_measured_wrongly_is_corrected() -> None:
    """One size looked cheap, and is not: it is tried, found out, and left alone."""
    world = World(GENTLE, 0.1, 0.8)
    seconds = [1.0 if n < 5 else s for n, s in enumerate(GENTLE.seconds)]
    world.costs = Costs((1.0, 1.05, *(s + 6.0 for s in GENTLE.seconds[2:5]), *GENTLE.seconds[5:]))
    world.budget = Budgeted(world.draft, Costs(tuple(seconds)), clock=lambda: world.now)
    world.run(1000)
    assert not any(2 <= size <= 4 for size in world.sizes[-100:])


def test_guesses_are_judged_where_their_parent_was_right() -> None:
    class Branching(Oracle):
        def propose(self, context: Context) -> ScoredTree:
            scores = np.log([1.0, 0.65, 0.25, 0.65 * 0.95, 0.25 * 0.45])
            return ScoredTree(np.array([context.root, 11, 12, 13, 14]), np.array([-1, 0, 0, 1, 2]), scores)

    world = World(FLAT, 0.0, 0.5)
    world.run(5)
    world.budget.draft = Branching(world)
    world.budget.calibration = Calibration()
    world.budget.propose(Context([1, 2, 3], None, 10))  # type: ignore[arg-type]
    world.budget.observe([3, 11], 2, None, None)
    assert world.budget.calibration._tried.tolist() == [0, 0, 1, 0, 0, 0, 1, 0, 0, 1], "not the one below a wrong one"
    assert world.budget.calibration._right.tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0, 0]


def test_a_step_that_was_not_finished_is_not_counted() -> None:
    world = World(GENTLE, 0.1, 0.5)
    world.run(10)
    world.budget.propose(Context([1, 2, 3], None, 10))  # type: ignore[arg-type]
    credit = world.budget.account.credit
    world.now += 1000
    world.budget.observe([5, 6, 7], 0, None, None)  # another prompt
    assert world.budget.account.credit == credit
    world.budget.propose(Context([1, 2, 3], None, 10))  # type: ignore[arg-type]
    world.budget.reset()
    world.budget.observe([3], 2, None, None)
    assert world.budget.account.credit == credit


# -- measuring --------------------------------------------------------------------------------------------------------

BACKEND = ReferenceBackend(SMALL, random_tensors(SMALL))


class Clock:
    """Each forward of n nodes takes n milliseconds, the first round three times as long, and the third twice."""

    def __init__(self, slow: float = 1.0) -> None:
        self.now, self.rounds, self.slow = 0.0, [], slow

    def __call__(self) -> float:
        return self.now

    def backend(self) -> ReferenceBackend:
        clock = self

        class Timed(ReferenceBackend):
            def forward(self, state: State, tree: Tree, want: Want = ARGMAX) -> Output:
                clock.rounds += [len(tree)]
                factor = {0: 3.0, 2: 2.0}.get((len(clock.rounds) - 1) // len(SIZES), 1.0)
                clock.now += len(tree) * 0.001 * factor * clock.slow
                return super().forward(state, tree, want)

        return Timed(SMALL, BACKEND.tensors)


def test_sizes_take_turns_and_the_least_disturbed_counts() -> None:
    clock = Clock()
    measured = measure(clock.backend(), Want(tokens="none"), clock)
    assert measured == pytest.approx({size: 0.001 * size for size in SIZES})
    assert clock.rounds == list(SIZES) * ROUNDS


def test_a_slow_machine_is_not_asked_twice() -> None:
    clock = Clock(slow=100)
    measured = measure(clock.backend(), Want(tokens="none"), clock)
    assert clock.rounds == list(SIZES)
    assert measured == pytest.approx({size: 0.3 * size for size in SIZES})


def test_costs_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Want] = []

    def counted(backend: ReferenceBackend, wants: Want) -> dict[int, float]:
        calls.append(wants)
        return {1: 0.5, 64: 2.0}

    monkeypatch.setattr(costs_module, "measure", counted)
    plain, features = Want(tokens="none"), Want(tokens="none", features=(1,))
    first = costs_of(BACKEND, plain, tmp_path)
    assert costs_of(BACKEND, plain, tmp_path) == first == Costs.between({1: 0.5, 64: 2.0})
    assert len(calls) == 1
    costs_of(BACKEND, features, tmp_path)
    assert calls == [plain, features]
    for file in tmp_path.iterdir():
        assert json.loads(file.read_text())["device"] == "reference"
        file.write_text("{")
    assert costs_of(BACKEND, plain, tmp_path) == first
    assert len(calls) == 3


def test_without_room_to_measure_nothing_is_kept_and_nodes_are_dear(tmp_path: Path) -> None:
    class Cramped(ReferenceBackend):
        def new_state(self, context: int) -> ReferenceState:
            raise DoesNotFit("No room.")

    costs = costs_of(Cramped(SMALL, BACKEND.tensors), Want(tokens="none"), tmp_path)
    assert best_size([0.9] * 30, costs.seconds, 0) == 0
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs_module, "measure", lambda backend, wants: {1: 1.0, 64: 2.0})
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert costs_of(BACKEND, Want(tokens="none"), blocked / "below").seconds[0] == 1.0
