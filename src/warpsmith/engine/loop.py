"""The decode loop: draft, forward, walk, commit. Plain decoding is the same loop with a tree of one node."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal, Protocol

import numpy as np

from warpsmith.backend.base import LOGITS, Output, next_token, walk, wanted_for
from warpsmith.backend.sampling import Sampling, choose
from warpsmith.backend.tree import Tree
from warpsmith.draft.base import Context
from warpsmith.engine.arguments import whole_number
from warpsmith.engine.conversation import Conversation
from warpsmith.engine.request import check_sampling
from warpsmith.engine.stats import PLAIN, Stats
from warpsmith.errors import BadRequest

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Step:
    """What became of a draft: the tree, the nodes whose tokens became text, and the tokens that were decided."""

    tree: Tree
    accepted: list[int]  # the root among them
    decided: list[int]


class Constraint(Protocol):
    """What may come next, as a grammar says. Every token is decided in order and once, drafted or not, so a
    constraint never has to go back."""

    def allow(self, logits: np.ndarray) -> np.ndarray:
        """A row of logits with -inf for what may not come next; the row itself is not changed."""

    def took(self, token: int) -> None:
        """This is what came."""


class Generation:
    """One request on its way. Iterate over it for runs of new tokens; then `finish_reason` says why it ended.

    The tokens are the same with and without a draft: every one is chosen by the sampler from the model's own logits
    at its place, and a draft only decides how many places one forward pass covers. The last token of each run is
    decided but not committed, so a token that ends the text never reaches the state. The consumer may stop at any
    time, or be interrupted; the conversation can go on with another request.
    """

    def __init__(
        self,
        conversation: Conversation,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        *,
        max_tokens: int | None = None,
        stop_ids: frozenset[int] = frozenset(),
        until: Callable[[int], bool] | None = None,
        on_step: Callable[[Step], None] | None = None,
        kept: int | None = None,
        constraint: Constraint | None = None,
        on_logits: Callable[[np.ndarray, int], None] | None = None,
        on_prefill: Callable[[int], None] | None = None,
    ) -> None:
        """`until` sees every token once, in order, but for stop ids; when it returns True that token is the last.
        `on_step` sees every step once it is committed; without a draft, or while it rests, each is one token. `kept` is
        what `begin` takes. `on_logits` sees every token with the row of logits it was chosen from. `on_prefill` sees
        how many tokens of the prompt are done before each piece of it; raising there breaks the request off."""
        self.conversation, self.prompt, self.kept = conversation, prompt, kept
        self.sampling = sampling or Sampling()
        conversation.check(prompt)
        check_sampling(self.sampling, conversation.backend.config.vocab)
        room = conversation.context - len(prompt)
        if max_tokens is not None and whole_number("max_tokens", max_tokens) < 1:
            raise BadRequest(f"max_tokens is {max_tokens}.", "Ask for at least one token, or leave it out.")
        self.limit = room if max_tokens is None else min(max_tokens, room)
        self.stop_ids, self.until, self.on_step = stop_ids, until, on_step
        self.constraint, self.on_logits, self.on_prefill = constraint, on_logits, on_prefill
        self.host = constraint is not None or on_logits is not None  # somebody here looks at every row
        self.finish_reason: FinishReason | None = None
        proposer = conversation.proposer
        tokens = LOGITS if self.host else wanted_for(self.sampling)
        self.want = replace(proposer.wants, tokens=tokens.tokens) if proposer else tokens
        # nobody wants more of a forward than the next token: the backend may decode in its own fastest way
        self.bare = self.want == tokens and not self.host
        self.stats = Stats(
            device=conversation.backend.name,
            mode=proposer.name if proposer else PLAIN,
            speculation_off=None if proposer else "no draft",
            left_out=list(proposer.left_out) if proposer else [],
            seed=self.sampling.seed if self.sampling.temperature > 0 else None,
            prompt_tokens=len(prompt),
        )

    def __iter__(self) -> Generator[list[int]]:
        yield self._first()
        while self.finish_reason is None:
            if rest := self._rest():
                yield from self._decode(rest)
            else:
                yield self.step()

    def step(self) -> list[int]:
        """Decide what follows the root: one token, and one more for each that the draft guessed right."""
        conversation, stats, start = self._current(), self.stats, perf_counter()
        tree, root = self._propose(), conversation.sequence.ids[-1]
        drafted = perf_counter()
        if tree is None and self.bare:
            path, run = [0], list(conversation.decode(1, frozenset(), self.sampling))
            verified = walked = perf_counter()
            conversation.settle()
            run = self._cut(run)
        else:
            tree, backend, state = tree or Tree.chain([root]), conversation.backend, conversation.sequence.state
            output = backend.forward([(state, tree)], self.want)
            verified = perf_counter()
            past = conversation.recent(self.sampling)
            if self.constraint is None:
                path, run = backend.verify(state, tree, self.sampling, past)
            else:
                path, run = walk(tree, self._constrained(output), past, state.length)
            run = self._cut(run)  # before the state advances: what comes after the end never happened
            self._show(output, path, run)
            walked = perf_counter()
            conversation.advance(path[: len(run)], run, output)
        committed = perf_counter()
        stats.count_step(drafted=0 if tree is None else len(tree) - 1, decided=len(run))
        stats.draft_seconds += drafted - start
        stats.verify_seconds += walked - drafted
        stats.commit_seconds += committed - walked
        stats.decode_seconds += committed - start
        if conversation.proposer is not None:
            forward = verified - drafted + committed - walked
            conversation.proposer.spent(conversation.sequence.draft, len(run), committed - start, forward)
        if self.on_step is not None:
            self.on_step(Step(tree or Tree.chain([root]), path[: len(run)], run))
        return run

    def _first(self) -> list[int]:
        """Prefill, and choose the first token from its last row."""
        start = perf_counter()
        output, self.stats.cached_tokens = self.conversation.begin(self.prompt, self.want, self.kept, self.on_prefill)
        self.turn = self.conversation.turn
        history, position = self.conversation.recent(self.sampling), len(self.prompt)
        if self.constraint is None:
            first = next_token(output, -1, self.sampling, history, position)
        else:
            first = self._constrained(output)(-1, history, position)
        run = self._cut([first])
        self._show(output, [-1], run)
        self.conversation.sequence.ids.extend(run)
        self.stats.prefill_seconds = perf_counter() - start
        return run

    def _rest(self) -> int:
        """How many tokens to decode before the draft is asked again: without one, all of them."""
        if self.host:
            return 0
        left, proposer = self.limit - self.stats.generated_tokens, self.conversation.proposer
        return left if proposer is None else min(proposer.rest(self.conversation.sequence.draft), left)

    def _propose(self) -> Tree | None:
        proposer, sequence = self.conversation.proposer, self.conversation.sequence
        depth = self.limit - self.stats.generated_tokens - 1
        if proposer is None or depth < 1:
            return None
        tree = proposer.propose(sequence.draft, Context(sequence.ids, sequence.state, depth))
        if tree is None:
            return None
        if tree.tokens[0] != sequence.ids[-1]:
            raise ValueError(f"{proposer} proposed a tree that does not start at the root")
        return _trim(tree, depth)

    def _constrained(self, output: Output) -> Callable[[int, list[int], int], int]:
        """The sampler's choice at a row, among what the constraint allows there."""
        constraint, logits = self.constraint, output.logits
        assert constraint is not None
        assert logits is not None

        def choose_at(row: int, text: list[int], position: int) -> int:
            token = choose(constraint.allow(logits.row(row)), self.sampling, text, position)
            constraint.took(token)
            return token

        return choose_at

    def _show(self, output: Output, rows: list[int], run: list[int]) -> None:
        if self.on_logits is not None:
            assert output.logits is not None
            for row, token in zip(rows, run, strict=False):
                self.on_logits(output.logits.row(row), token)

    def _cut(self, run: list[int]) -> list[int]:
        """Count the run's tokens and end it where the text ends."""
        for count, token in enumerate(run, start=1):
            self.stats.generated_tokens += 1
            if token in self.stop_ids or (self.until is not None and self.until(token)):
                self.finish_reason = "stop"
            elif self.stats.generated_tokens == self.limit:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                if self.conversation.proposer is not None:
                    self.stats.speculation_off = self.conversation.proposer.off
                return run[:count]
        return run

    def _decode(self, count: int) -> Iterator[list[int]]:
        """Without a draft, the backend can run on by itself from token to token."""
        conversation, start, seconds, tokens = self._current(), perf_counter(), 0.0, 0
        try:
            for token in conversation.decode(count, self.stop_ids, self.sampling):
                root, run = conversation.sequence.ids[-2], self._cut([token])
                self.stats.count_step(drafted=0, decided=1)
                took = perf_counter() - start
                self.stats.decode_seconds += took
                seconds, tokens = seconds + took, tokens + 1
                if self.on_step is not None:
                    self.on_step(Step(Tree.chain([root]), [0], run))
                yield run
                if self.finish_reason is not None:
                    return
                conversation, start = self._current(), perf_counter()
        finally:
            if self.turn == conversation.turn:
                conversation.settle()
                if conversation.proposer is not None and tokens:
                    conversation.proposer.spent(conversation.sequence.draft, tokens, seconds, None)

    def _current(self) -> Conversation:
        if self.turn != self.conversation.turn:
            raise BadRequest(
                "Another request has begun on this model, so this one cannot go on.", "Finish one before the next."
            )
        return self.conversation


def _trim(tree: Tree, depth: int) -> Tree:
    """The tree without the nodes below `depth`."""
    keep = np.flatnonzero(tree.depths() <= depth)
    if len(keep) == len(tree):
        return tree
    new_index = np.full(len(tree) + 1, -1)  # one more for the root's parent, -1
    new_index[keep] = np.arange(len(keep))
    return Tree(tree.tokens[keep], new_index[tree.parents[keep]])
