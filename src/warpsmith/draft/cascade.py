"""Several drafts for one text: what stands there already, and a network's opinion where nothing does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from warpsmith.backend.base import State, Want
from warpsmith.backend.block_draft import GrowingTree
from warpsmith.backend.rows import Rows
from warpsmith.backend.tree import Tree
from warpsmith.draft.base import ALONE, Context, Others, Proposer
from warpsmith.draft.budget import CHECK, Budgeted, BudgetMemory


@dataclass
class CascadeMemory:
    """Each draft's memory of a sequence, and who was asked last."""

    drafts: list[BudgetMemory]
    asked: dict[int, float] = field(default_factory=dict)  # seconds, by draft
    heard: int | None = None


class Cascade(Proposer[CascadeMemory]):
    """Asks cheap drafts before dear ones. A guess is taken if it promises more than the drafts after it have brought
    lately; each draft answers for its own time, and rests by itself."""

    def __init__(self, drafts: Sequence[Budgeted], clock: Callable[[], float] = perf_counter) -> None:
        self.drafts, self._clock = list(drafts), clock
        self.name = "+".join(draft.name for draft in drafts)
        features = {layer: None for draft in drafts for layer in draft.wants.features}
        self.wants = Want("none", features=tuple(features), hidden=any(draft.wants.hidden for draft in drafts))

    @property
    def off(self) -> str | None:
        reasons = [draft.off for draft in self.drafts]
        return "; ".join(filter(None, reasons)) if all(reasons) else None

    def rest(self, memory: CascadeMemory) -> int:
        if any(draft.doubts for draft in self.drafts):
            return CHECK
        return min(draft.rest(each) for draft, each in self._pairs(memory))

    def listens(self, memory: CascadeMemory) -> bool:
        return any(draft.listens(each) for draft, each in self._pairs(memory))

    def tree_seconds(self) -> float:
        return sum(draft.tree_seconds() for draft in self.drafts)

    def propose(self, memory: CascadeMemory, context: Context) -> Tree | GrowingTree | None:
        memory.asked, memory.heard, best = {}, None, None
        pairs = self._pairs(memory)
        ready = [i for i, (draft, each) in enumerate(pairs) if draft.account.open and not draft.rest(each)]
        promised = 0.0
        for i in ready:
            draft, each = pairs[i]
            before = self._clock()
            tree = draft.propose(each, context)
            memory.asked[i] = self._clock() - before
            if tree is not None and (best is None or each.promise > promised):
                best, promised = (i, tree), each.promise
            if best is not None and all(promised >= self.drafts[j].rate for j in ready if j > i):
                break
        if best is None:
            memory.heard = ready[-1] if ready else None
            return None
        memory.heard, tree = best
        return tree

    def observe(
        self,
        memory: CascadeMemory,
        tokens: Sequence[int],
        position: int,
        features: Rows | None,
        hidden: Rows | None,
    ) -> None:
        for i, (draft, each) in enumerate(self._pairs(memory)):
            if i != memory.heard:
                draft.withdraw(each)
            draft.observe(each, tokens, position, self._share(draft, features), hidden)

    def _share(self, draft: Budgeted, features: Rows | None) -> Rows | None:
        """Of rows of all drafts' features those of one."""
        if features is None or draft.wants.features == self.wants.features:
            return features
        mine = [self.wants.features.index(layer) for layer in draft.wants.features]
        return features.groups(mine, of=len(self.wants.features)) if mine else None

    def spent(
        self, memory: CascadeMemory, tokens: int, seconds: float, forward_seconds: float | None, others: Others = ALONE
    ) -> None:
        for i, (draft, each) in enumerate(self._pairs(memory)):
            if forward_seconds is None:
                draft.spent(each, tokens, seconds, None, others)
            elif i == memory.heard:
                elsewhere = sum(took for j, took in memory.asked.items() if j != i)
                draft.spent(each, tokens, seconds - elsewhere, forward_seconds, others)
            else:
                draft.missed(each, tokens, memory.asked.get(i, 0.0), others)
        memory.asked, memory.heard = {}, None

    def new_memory(self) -> CascadeMemory:
        return CascadeMemory([draft.new_memory() for draft in self.drafts])

    def catch_up(self, memory: CascadeMemory, state: State) -> None:
        for draft, each in self._pairs(memory):
            draft.catch_up(each, state)

    def snapshot(self, memory: CascadeMemory) -> Any:
        return [draft.snapshot(each) for draft, each in self._pairs(memory)]

    def restore(self, memory: CascadeMemory, saved: Any) -> None:
        for (draft, each), data in zip(self._pairs(memory), saved, strict=True):
            draft.restore(each, data)

    def _pairs(self, memory: CascadeMemory) -> list[tuple[Budgeted, BudgetMemory]]:
        return list(zip(self.drafts, memory.drafts, strict=True))
