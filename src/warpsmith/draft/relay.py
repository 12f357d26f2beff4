"""Several drafts for one text: what stands there already, and a network's opinion where nothing does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from warpsmith.backend.base import State, Want
from warpsmith.backend.rows import Rows
from warpsmith.backend.tree import Tree
from warpsmith.draft.base import Context, Proposer
from warpsmith.draft.budget import CHECK, Budgeted


class Relay(Proposer):
    """Asks cheap drafts before dear ones. A guess is taken if it promises more than the drafts after it have brought
    lately; each draft answers for its own time, and rests by itself."""

    def __init__(self, drafts: Sequence[Budgeted], clock: Callable[[], float] = perf_counter) -> None:
        self.drafts, self._clock = list(drafts), clock
        self.name = "+".join(draft.name for draft in drafts)
        features = {layer: None for draft in drafts for layer in draft.wants.features}
        self.wants = Want("none", features=tuple(features), hidden=any(draft.wants.hidden for draft in drafts))
        self._asked: dict[int, float] = {}  # seconds, by draft
        self._heard: int | None = None

    @property
    def off(self) -> str | None:
        reasons = [draft.off for draft in self.drafts]
        return "; ".join(filter(None, reasons)) if all(reasons) else None

    @property
    def rest(self) -> int:
        if any(draft.doubts for draft in self.drafts):
            return CHECK
        return min(draft.rest for draft in self.drafts)

    def propose(self, context: Context) -> Tree | None:
        self._asked, self._heard, best = {}, None, None
        ready = [i for i, draft in enumerate(self.drafts) if draft.account.open and not draft.rest]
        for i in ready:
            draft, before = self.drafts[i], self._clock()
            tree = draft.propose(context)
            self._asked[i] = self._clock() - before
            if tree is not None and (best is None or draft.promise > self.drafts[best[0]].promise):
                best = i, tree
            if best is not None and all(self.drafts[best[0]].promise >= self.drafts[j].rate for j in ready if j > i):
                break
        if best is None:
            self._heard = ready[-1] if ready else None
            return None
        self._heard, tree = best
        return tree

    def observe(self, tokens: Sequence[int], position: int, features: Rows | None, hidden: Rows | None) -> None:
        for i, draft in enumerate(self.drafts):
            if i != self._heard:
                draft.withdraw()
            draft.observe(tokens, position, self._share(draft, features), hidden)

    def _share(self, draft: Budgeted, features: Rows | None) -> Rows | None:
        """Of rows of all drafts' features those of one."""
        if features is None or draft.wants.features == self.wants.features:
            return features
        mine = [self.wants.features.index(layer) for layer in draft.wants.features]
        return features.groups(mine, of=len(self.wants.features)) if mine else None

    def spent(self, tokens: int, seconds: float, forward_seconds: float | None) -> None:
        for i, draft in enumerate(self.drafts):
            if forward_seconds is None:
                draft.spent(tokens, seconds, None)
            elif i == self._heard:
                others = sum(took for j, took in self._asked.items() if j != i)
                draft.spent(tokens, seconds - others, forward_seconds)
            else:
                draft.missed(tokens, self._asked.get(i, 0.0))
        self._asked, self._heard = {}, None

    def catch_up(self, state: State) -> None:
        for draft in self.drafts:
            draft.catch_up(state)

    def reset(self) -> None:
        for draft in self.drafts:
            draft.reset()

    def snapshot(self) -> Any:
        return [draft.snapshot() for draft in self.drafts]

    def restore(self, saved: Any) -> None:
        for draft, each in zip(self.drafts, saved, strict=True):
            draft.restore(each)
