"""Drafts of several sequences in one forward pass: they guess where it helps all, and rest where it does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from budget_cases import DEAR, FLAT, GENTLE
from warpsmith.draft.base import Context, Draft, Others, ScoredTree
from warpsmith.draft.budget import Budgeted
from warpsmith.draft.costs import Costs

CROWD = 8


class Chains(Draft[None]):
    """Chains of a fixed confidence."""

    name = "chains"

    def propose(self, memory: None, context: Context) -> ScoredTree:
        depth = min(context.depth, 20)
        scores = np.log(0.8) * np.arange(depth + 1)
        return ScoredTree(np.array([context.root, *range(1, depth + 1)]), np.arange(-1, depth), scores)


def run(costs: Costs, rate: float, draft_seconds: float, passes: int) -> tuple[float, float]:
    """Seconds a token of a crowd that guesses, and the share of steps in which somebody did."""
    rng, held = np.random.default_rng(0), Budgeted(Chains(), costs)
    memories: list[Any] = [held.new_memory() for _ in range(CROWD)]
    lengths, rests = [1] * CROWD, [0] * CROWD
    seconds, guessed = 0.0, 0
    for _ in range(passes):
        trees: list[ScoredTree | None] = []
        asked = []
        for i, memory in enumerate(memories):
            rests[i] = rests[i] or held.rest(memory)
            asked.append(not rests[i])
            rests[i] = max(0, rests[i] - 1)
            taken = sum(1 if tree is None else len(tree) for tree in trees)
            others = Others(CROWD - 1, taken + CROWD - 1 - i)
            context = Context([0] * lengths[i], None, 100, nodes=8, others=others)  # type: ignore[arg-type]
            trees.append(held.propose(memory, context) if asked[i] else None)
        sizes = [1 if tree is None else len(tree) for tree in trees]
        assert max(sizes) <= 8
        whole = costs.seconds[sum(sizes) - 1]
        seconds += whole + sum(asked) * draft_seconds
        guessed += any(size > 1 for size in sizes)
        for i, memory in enumerate(memories):
            right = 0
            while right < sizes[i] - 1 and rng.random() < rate:
                right += 1
            held.observe(memory, [0, *range(1, right + 1)], lengths[i] - 1, None, None)
            lengths[i] += right + 1
            others = Others(CROWD - 1, sum(sizes) - sizes[i])
            own = whole + asked[i] * draft_seconds
            held.spent(memory, right + 1, own, whole if asked[i] else None, others)
    return seconds / (sum(lengths) - CROWD), guessed / passes


@pytest.mark.parametrize("costs", [FLAT, GENTLE, DEAR], ids=["flat", "gentle", "dear"])
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("draft_seconds", [0.0, 0.1, 2.0])
def test_a_crowd_is_never_slower_for_guessing(costs: Costs, rate: float, draft_seconds: float) -> None:
    plain = costs.seconds[CROWD - 1] / CROWD
    assert run(costs, rate, draft_seconds, 1000)[0] < 1.03 * plain


def test_a_crowd_guesses_where_nodes_are_free_and_not_where_they_are_dear() -> None:
    token, guessed = run(FLAT, 0.8, 0.0, 500)
    assert guessed > 0.9
    assert token < 0.4 * FLAT.seconds[CROWD - 1] / CROWD
    assert run(DEAR, 0.8, 0.0, 500)[1] == 0.0


def test_a_dear_draft_rests_in_a_crowd() -> None:
    """While one asks its draft, eight wait. A draft that takes a hundredth of a pass is asked, one that takes most of a
    pass is not."""
    costs = Costs.between({1: 1.0, 64: 1.64})
    assert run(costs, 0.8, 0.01, 500)[1] > 0.9
    assert run(costs, 0.8, 0.8, 500)[1] < 0.1
