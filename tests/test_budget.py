"""The budget: how many nodes pay, from costs and chances that the tests decide."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from budget_cases import DEAR, FLAT, GENTLE
from warpsmith.backend.tree import MAX_NODES
from warpsmith.draft.base import ScoredTree
from warpsmith.draft.costs import Costs
from warpsmith.draft.economy import (
    CHANCE,
    MOST,
    REFILL,
    START,
    Account,
    Calibration,
    best_size,
    least_probabilities,
    path_probabilities,
)

probabilities = st.lists(st.floats(0, 1), max_size=63).map(lambda p: sorted(p, reverse=True))


@given(
    probabilities, st.floats(0, 20), st.lists(st.floats(0.01, 5), min_size=64, max_size=64), st.sampled_from([1, 1, 8])
)
def test_no_other_size_has_a_better_rate(
    chances: list[float], draft: float, steps: list[float], sequences: int
) -> None:
    seconds = np.cumsum(steps).tolist()
    size, rate = best_size(chances, seconds, draft, sequences)
    rates = [(sequences + sum(chances[:n])) / (draft + seconds[n]) for n in range(len(chances) + 1)]
    assert rates[size] == pytest.approx(rate) == pytest.approx(max(rates))
    assert size == 0 or rates[size] > max(rates[:size]) * (1 - 1e-12), "of equals the smaller"


def size(chances: list[float], seconds: Sequence[float], other: float = 0.0) -> int:
    return best_size(chances, seconds, other)[0]


def test_sizes_follow_costs_and_chances() -> None:
    assert size([0.9, 0.8, 0.7], FLAT.seconds, 0) == 3
    assert size([0.9, 0.8, 0.7], DEAR.seconds, 0) == 0
    assert size([0.9, 0.8, 0.01], GENTLE.seconds, 0) == 2
    fading = [0.5 * 0.8**i for i in range(20)]
    assert size(fading, GENTLE.seconds, 0) < size(fading, GENTLE.seconds, 30), "a dear draft wants a big tree"
    assert size([], GENTLE.seconds, 1) == 0
    assert size([0.0] * 5, FLAT.seconds, 0) == 0


def test_costs_between_sizes_are_lines_that_never_fall() -> None:
    costs = Costs.between({1: 1.0, 3: 2.0, 5: 1.5, 64: 4.0})
    assert len(costs.seconds) == MAX_NODES
    assert costs.seconds[:5] == (1.0, 1.5, 2.0, 2.0, 2.0)
    assert (np.diff(costs.seconds) >= 0).all()


def test_a_measured_line_goes_on() -> None:
    costs = Costs.between({1: 1.0, 2: 1.5}, plain=0.9)
    assert costs.seconds[:4] == (1.0, 1.5, 2.0, 2.5)
    assert costs.plain == 0.9
    assert Costs.between({1: 2.0}).seconds[:3] == (2.0, 4.0, 6.0), "nothing is known: every node as dear as the first"
    assert Costs.between({1: 2.0}).plain == 2.0


def test_least_probabilities_look_over_a_step_in_the_costs() -> None:
    """Costs that jump after eight nodes: the ninth must pay a share of the jump, not all of it."""
    stairs = Costs(tuple(1.0 if n <= 8 else 1.8 for n in range(1, 65)), 1.0)
    least = least_probabilities(stairs)
    assert least[:7] == [0.0] * 7, "up to the eighth they are free"
    assert least[7] == pytest.approx(0.8 / 56), "shared by all that then fit"
    assert least_probabilities(DEAR) == pytest.approx([1.0] * 63)
    assert least_probabilities(GENTLE) == pytest.approx([0.05] * 63)


@given(probabilities, st.lists(st.floats(0.01, 5), min_size=64, max_size=64))
def test_what_cannot_pay_is_never_part_of_the_best_size(chances: list[float], steps: list[float]) -> None:
    """Cutting a draft where nodes are too unlikely takes nothing away that the budget would have kept."""
    costs = Costs(tuple(np.cumsum(steps).tolist()), steps[0])
    least = least_probabilities(costs)
    size, _ = best_size(chances, costs.seconds, 0.0)
    assert all(chances[n] >= least[n] * (1 - 1e-9) for n in range(size)) or size == 0


# -- calibration ------------------------------------------------------------------------------------------------------


def test_calibration_trusts_the_draft_first_and_the_facts_later() -> None:
    calibration, confidence = Calibration(), 0.95
    assert calibration.corrected(confidence) == pytest.approx(confidence)
    for i in range(3000):
        calibration.learn(confidence, i % 10 < 3)
    assert calibration.corrected(confidence) == pytest.approx(0.3, abs=0.05)
    assert calibration.corrected(0.15) == pytest.approx(0.15), "other confidences are another matter"
    for _ in range(600):
        calibration.learn(confidence, True)
    assert calibration.corrected(confidence) > 0.75, "what was long ago is forgotten"


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
            account.drafted(tokens, worth, worth)
            lost += worth - tokens
            worst = max(worst, worth - tokens)
        else:
            account.plain(1)
            plain += 1
    assert lost <= START + REFILL * plain + worst + 1e-6


def test_an_empty_account_fills_up_slowly_and_tries_again() -> None:
    account = Account()
    while account.open:
        account.drafted(1, 3.0, 3.0)
    waits = account.waits
    assert waits > 100
    account.plain(waits - 2)
    assert not account.open
    account.plain(4)
    assert account.open
    assert account.credit >= 4, "enough for two steps that are all wrong"
    for _ in range(100):
        account.drafted(5, 2.0, 2.0)
    assert account.credit == MOST, "old gains do not pay for long losses"


def test_another_text_is_another_chance_but_not_for_ever() -> None:
    """A text in which the draft is always wrong, again and again, and then one in which it earned something."""
    account, lost = Account(), []
    for _ in range(12):
        lost.append(0.0)
        while account.open:
            account.drafted(1, 1.5, 1.5)
            lost[-1] += 0.5
        account.new_text()
    assert lost[0] > START
    assert lost[1:] == [0.0] * 11, "half of it is not enough for two steps that are all wrong"
    account.plain(1000)
    for _ in range(10):
        account.drafted(5, 2.0, 2.0)
    while account.open:
        account.drafted(1, 1.5, 1.5)
    account.new_text()
    assert account.open, "one that earned is trusted again"
    assert account.credit >= CHANCE - 0.5
    while account.open:
        account.drafted(1, 1.5, 1.5)
    account.plain(account.waits + 1)
    credit = account.credit
    account.new_text()
    assert account.credit == credit, "one that is asked anyway needs none"


@settings(max_examples=60)
@given(st.floats(1, 1.5), st.lists(st.tuples(st.floats(1, 12), st.integers(0, 30)), min_size=1, max_size=300))
@example(1.5, [(1.5, 6)] * 50)  # none that empties the account
@example(1.2, [(8.0, 30)] * 50)  # each with a large tree
def test_texts_in_vain_cost_little_however_many_they_are(least: float, texts: list[tuple[float, int]]) -> None:
    account, lost, plain, worst = Account(), 0.0, 0, 0.0
    for worth, tokens in texts:
        account.new_text()
        for _ in range(tokens):
            if account.open:
                account.drafted(1, worth, min(least, worth))
                lost += worth - 1
                worst = max(worst, worth - 1)
            else:
                account.plain(1)
                plain += 1
    assert lost <= START + CHANCE + REFILL * plain + worst + 1e-6


def test_what_costs_little_is_tried_often() -> None:
    """A look that finds nothing and takes a fiftieth of a token."""
    account, asked, plain = Account(), 0, 0
    while plain + asked < 20_000:
        if account.open:
            account.drafted(1, 1.02, 1.02)
            asked += 1
        else:
            account.plain(1)
            plain += 1
    assert asked * 0.02 <= START + REFILL * plain + 0.1
    assert account.waits < 200
