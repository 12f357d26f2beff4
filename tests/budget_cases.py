"""Costs of trees for tests of the budget."""

from __future__ import annotations

from warpsmith.draft.costs import Costs

FLAT = Costs.between({1: 1.0, 64: 1.0})  # every node for the price of one
DEAR = Costs.between({1: 1.0, 64: 64.0})  # no node for less than the first
GENTLE = Costs.between({1: 1.0, 64: 1.0 + 63 * 0.05})
