"""How many drafted nodes pay, and whether any do.

Whether it was worth it is kept in an account, in tokens that plain decoding would have made in the time: a step that
decides four tokens in the time of two earns two. When the account is empty the draft rests, and the backend decodes by
itself; each of these tokens pays a little into the account, until there is enough for another try. Another text is
another chance, a smaller one each time that nothing comes of it. So what speculation can cost is bounded: half a
hundredth, and the small sums that an account is given.

Where several sequences share a forward pass, a node is worth what it brings to all of them: it must make the pass
longer by less than its share of the tokens that the pass decides anyway. A pass that is full of sequences has little
room for guesses, and a dear draft finds out that it does not pay there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic

from warpsmith.backend.base import State
from warpsmith.backend.block_draft import GrowingTree
from warpsmith.backend.rows import Rows
from warpsmith.draft.base import ALONE, Context, Draft, Memory, Others, Prices, Proposer, ScoredTree
from warpsmith.draft.costs import Costs
from warpsmith.draft.economy import Account, Calibration, Pace, best_size, least_probabilities, path_probabilities

STAKE = 2.0  # tokens that a forward may lose however little the account holds; beyond that it may lose what is there
LISTENS = 12  # tokens before another try of which a draft that needs their rows is told, unless it hears them all
CHECK = 8  # tokens decoded plainly now and then, to see how fast that is at present
CHECK_FIRST, CHECK_LAST = 32, 512  # drafted tokens after which that is done: soon at first, then more and more rarely
FURTHER, BEYOND = 2, 2  # how deep it is asked: so many times as deep as it was right lately, and so many levels more
SILENCE = 15  # tokens, at most, for which a draft is not asked that had nothing to say


@dataclass
class _Guess:
    position: int
    made: ScoredTree | GrowingTree | None  # what was left of the draft's

    @property
    def tree(self) -> ScoredTree | None:
        """Of one that grew unseen, once it is known."""
        if not isinstance(self.made, GrowingTree):
            return self.made
        seen = self.made.verified
        return None if seen is None else ScoredTree(seen.tree.tokens, seen.tree.parents, seen.scores[: len(seen.tree)])


@dataclass
class BudgetMemory(Generic[Memory]):
    """How a draft does on one sequence."""

    draft: Memory
    guess: _Guess | None = None  # the last, until it is known what became of it
    right: deque[int] = field(default_factory=lambda: deque(maxlen=2))  # levels of the last trees
    silent: int = 0  # times in a row that it had nothing to say
    pause: int = 0  # tokens until it is asked again
    promise: float = 0.0  # tokens a second expected of the last guess
    chances: list[float] = field(default_factory=list)  # of the nodes of the last tree, before it was cut


class Budgeted(Proposer[BudgetMemory]):
    """A draft held to what pays here. All sequences pay into one account: what they have in common is the machine, the
    draft, and a user who waits for all of them."""

    def __init__(self, draft: Draft, costs: Costs) -> None:
        self.draft, self.costs = draft, costs
        self.name, self.wants = draft.name, draft.wants
        self.calibration, self.account = Calibration(), Account()
        self._least = least_probabilities(costs)
        needed = draft.wants.features or draft.wants.hidden
        self._needs_rows = bool(needed)
        self._pace = Pace(costs)
        self._unchecked = self._check_after = CHECK_FIRST  # tokens since plain decoding was last seen
        self.rate = 0.0  # tokens a second that its guesses have brought lately

    @property
    def off(self) -> str | None:
        if self.account.open:
            return None
        return f"{self.name} drafts do not pay here; next try after {self.account.waits} tokens"

    def rest(self, memory: BudgetMemory) -> int:
        if self.account.open:
            return CHECK if self.doubts else memory.pause
        unheard = LISTENS if self._needs_rows and not self.draft.keeps_up else 0
        return max(0, self.account.waits - unheard)

    def listens(self, memory: BudgetMemory) -> bool:
        return self.draft.keeps_up

    @property
    def doubts(self) -> bool:
        """Whether plain decoding has to be seen again before anything can be said about it."""
        return self.account.open and self._unchecked >= self._check_after

    def tree_seconds(self) -> float:
        return self.draft.tree_seconds()

    def propose(self, memory: BudgetMemory, context: Context) -> ScoredTree | GrowingTree | None:
        memory.guess = None
        if not self.account.open:
            return None  # it only listens
        depth = FURTHER * max(memory.right, default=0) + BEYOND
        prices = Prices(self._pace.plain(), self._least)
        cheap = replace(context, depth=min(depth, context.depth), prices=prices, unseen=False)
        if context.unseen and (size := self._size(memory, context)):  # as of the last tree: this one is not seen
            cheap = replace(cheap, unseen=True, nodes=size + 1)
        tree = self.draft.propose(memory.draft, cheap)
        if isinstance(tree, ScoredTree):
            memory.chances = path_probabilities(tree, self.calibration)[1:]
            size = self._size(memory, context)
            tree = tree.first(size) if size else None
        if tree is not None:
            memory.silent = 0
        elif not self._needs_rows:  # one that needs them would miss some
            memory.silent += 1
            memory.pause = min(2**memory.silent - 1, SILENCE)
        memory.guess = _Guess(len(context.ids) - 1, tree)
        return tree

    def _size(self, memory: BudgetMemory, context: Context) -> int:
        """How many nodes pay, and with that what is to be expected of them."""
        most = min(self._most_nodes(context.others), context.nodes)
        seconds, certain = self._pace.seconds()[context.others.nodes :], 1 + context.others.sequences
        size, memory.promise = best_size(memory.chances[: most - 1], seconds, self._pace.other(), certain)
        return size

    def _most_nodes(self, others: Others) -> int:
        """Of a tree that could be all wrong without losing more than there is to lose."""
        seconds = self._pace.seconds()[others.nodes :]
        token = self._pace.plain(others)
        stake = (seconds[0] if others.sequences else token) + max(self.account.credit, STAKE) * token
        return next((nodes for nodes, each in enumerate(seconds) if each > stake), len(seconds))

    def observe(
        self,
        memory: BudgetMemory,
        tokens: Sequence[int],
        position: int,
        features: Rows | None,
        hidden: Rows | None,
    ) -> None:
        if not self.account.open and self.rest(memory) and not self.listens(memory):
            features = hidden = None  # it would have to work through them when it is tried again
        self.draft.observe(memory.draft, tokens, position, features, hidden)
        guess = memory.guess
        if guess is not None and guess.position == position and (tree := guess.tree) is not None:
            memory.right.append(self._learn(tree, tokens))
            if isinstance(guess.made, GrowingTree) and (seen := guess.made.verified) is not None:
                whole = ScoredTree(seen.tokens, seen.parents, seen.scores)
                memory.chances = path_probabilities(whole, self.calibration)[1:]

    def _learn(self, tree: ScoredTree, tokens: Sequence[int]) -> int:
        """Judge the guesses whose parents were right; returns how many levels were."""
        path, followed = [0], tree.child
        for token in tokens[1:]:
            path.append(followed[path[-1], token])
        for node, (parent, belief) in enumerate(zip(tree.parents.tolist(), tree.conditionals().tolist(), strict=True)):
            if parent in path:
                self.calibration.learn(belief, node in path)
        return len(path) - 1

    def spent(
        self, memory: BudgetMemory, tokens: int, seconds: float, forward_seconds: float | None, others: Others = ALONE
    ) -> None:
        pace, account, guess = self._pace, self.account, memory.guess
        memory.guess = None
        if forward_seconds is None:
            if not others.sequences:
                pace.decoded(tokens, seconds)
            if self.doubts:
                self._check_after = min(2 * self._check_after, CHECK_LAST)
            self._unchecked = 0
            memory.pause = max(0, memory.pause - tokens)
        if not account.open:
            account.plain(tokens)
        elif forward_seconds is not None:
            tree = None if guess is None else guess.tree
            nodes = 1 if tree is None else len(tree)
            if others.sequences:
                worth = pace.stepped_beside(others, nodes, seconds, forward_seconds)
            else:
                worth = pace.stepped(nodes, seconds, forward_seconds)
            small = pace.other() + pace.seconds()[BEYOND]
            account.drafted(tokens, worth, small / pace.plain())
            self.rate += 0.1 * ((others.sequences + tokens) / seconds - self.rate)
            if not others.sequences:
                self._unchecked += tokens

    def withdraw(self, memory: BudgetMemory) -> None:
        """Its guess is not taken."""
        memory.guess = None

    def missed(self, memory: BudgetMemory, tokens: int, seconds: float, others: Others = ALONE) -> None:
        """Another draft's guess decided `tokens`; this one had taken so many `seconds` to be asked."""
        self._unchecked += tokens
        memory.pause = max(0, memory.pause - tokens)
        if not self.account.open:
            self.account.plain(tokens)
        else:
            self.account.drafted(0, self._pace.calm(seconds) / self._pace.plain(others), 1.0)

    # -- the draft's own business -------------------------------------------------------------------------------------

    def new_memory(self) -> BudgetMemory:
        self.account.new_text()
        return BudgetMemory(self.draft.new_memory())

    def catch_up(self, memory: BudgetMemory, state: State) -> None:
        if self.account.open:
            self.draft.catch_up(memory.draft, state)

    def snapshot(self, memory: BudgetMemory) -> Any:
        return self.draft.snapshot(memory.draft)

    def restore(self, memory: BudgetMemory, saved: Any) -> None:
        memory.guess = None
        self.account.new_text()
        self.draft.restore(memory.draft, saved)
