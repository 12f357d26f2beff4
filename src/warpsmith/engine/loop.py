"""One request's way through the decode loop: prefill, then propose, forward, verify, commit, again and again.

The scheduler runs the forward pass, for one request or for many at once; everything else is here. Plain decoding is
the same loop with a tree of one node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np

from warpsmith.backend.base import ARGMAX, Listener, Output, State, Want, WantedTokens, drafted
from warpsmith.backend.block_draft import GrowingTree
from warpsmith.backend.checks import check_tokens
from warpsmith.backend.finite import NOT_FINITE, not_finite
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import Tree
from warpsmith.draft.base import Context, Others
from warpsmith.engine.arguments import whole_number
from warpsmith.engine.choice import Chooser, Constraint
from warpsmith.engine.request import check_sampling
from warpsmith.engine.stats import PLAIN, Stats
from warpsmith.errors import BadRequest, ContextFull

if TYPE_CHECKING:
    from warpsmith.engine.scheduler import Scheduler
    from warpsmith.engine.sequence import Sequence as Text

FinishReason = Literal["stop", "length"]


@cache
def _wanting(want: Want, tokens: WantedTokens) -> Want:
    return replace(want, tokens=tokens)


@dataclass(frozen=True)
class Step:
    """What became of a draft: the tree, the nodes whose tokens became text, and the tokens that were decided."""

    tree: Tree
    accepted: list[int]  # the root among them
    decided: list[int]


@dataclass
class _Burst:
    """Tokens that the backend decodes by itself, one after another."""

    tokens: Generator[int]
    left: int
    taken: int = 0
    seconds: float = 0.0


class Generation:
    """One request. Iterate over it for runs of new tokens; then `finish_reason` says why it ended.

    The tokens are the same with and without a draft, alone or beside others: every one is chosen by the sampler from
    the model's own logits at its place, and a draft only decides how many places one forward pass covers. The last
    token of each run is decided but not committed, so a token that ends the text never reaches the state. The consumer
    may stop at any time, or be interrupted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        *,
        max_tokens: int | None = None,
        stop_ids: frozenset[int] = frozenset(),
        until: Callable[[int], bool] | None = None,
        on_step: Callable[[Step], None] | None = None,
        kept: int | None = None,
        answer_kept: bool = False,
        constraint: Constraint | None = None,
        on_logits: Callable[[np.ndarray, int], None] | None = None,
    ) -> None:
        """`until` sees every token once, in order, but for stop ids; when it returns True that token is the last.
        `on_step` sees every step once it is committed; without a draft, or while it rests, each is one token. `kept` is
        what `PrefixCache.begin` takes; with `answer_kept` the next prompt may go on from the answer, whatever `kept`
        says. `on_logits` sees every token with the row of logits it was chosen from."""
        self.scheduler, self.prompt, self.kept = scheduler, [int(token) for token in prompt], kept
        self.answer_kept = answer_kept or kept is None or kept >= len(self.prompt)
        self.backend, self.proposer = scheduler.backend, scheduler.proposer
        self.sampling = sampling or Sampling()
        room = self._check_room()
        check_sampling(self.sampling, self.backend.config.vocab)
        self.chooser = Chooser(self.sampling, constraint, on_logits)
        if max_tokens is not None and whole_number("max_tokens", max_tokens) < 1:
            raise BadRequest(f"max_tokens is {max_tokens}.", "Ask for at least one token, or leave it out.")
        self.limit = room if max_tokens is None else min(max_tokens, room)
        self.stop_ids, self.until, self.on_step = stop_ids, until, on_step
        self.runs: deque[list[int]] = deque()  # decided and not yet taken
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None  # why it was broken off
        self.state: State | None = None  # while it has one
        self._sequence: Text | None = None  # from the first piece of its prompt on
        self._save_at: list[int] = []
        self._burst: _Burst | None = None
        self._observed = 0  # tokens that the proposer has heard of, those of the burst included
        self._resting = 0  # tokens until the proposer is asked again
        # of the step under way
        self.tree: Tree | GrowingTree
        self.asks = False  # whether the proposer is asked
        self.drafted = 0  # tokens besides the root
        self._decided = 0
        self._passes = 1
        self._step: Step | None = None  # for who wants to see it
        self._draft_seconds = self._verify_seconds = self._commit_seconds = 0.0
        self.unseen_seconds = 0.0  # of the forward pass, where the host did not start it
        wants, host = Want() if self.proposer is None else self.proposer.wants, self.chooser.on_host
        # nobody wants more of a forward than the next token: the backend may decode in its own fastest way
        self.bare = not host and not wants.features and not wants.hidden
        # the next tokens follow from the argmax alone, and nobody looks at one before the next
        self.simple = not host and self.chooser.tokens == ARGMAX.tokens and until is None and on_step is None
        self.rests = not host  # while nothing is to be guessed the backend may decode in its own fastest way
        self.unseen = not host and self.backend.verifies_unseen(self.sampling, stop_ids)
        self.stats = Stats(
            device=self.backend.name,
            mode=self.proposer.name if self.proposer else PLAIN,
            speculation_off=None if self.proposer else "no draft",
            left_out=list(self.proposer.left_out) if self.proposer else [],
            seed=self.sampling.seed if self.sampling.temperature > 0 else None,
            prompt_tokens=len(self.prompt),
        )

    def __iter__(self) -> Generator[list[int]]:
        return self.scheduler.run(self)

    @property
    def sequence(self) -> Text:
        assert self._sequence is not None
        return self._sequence

    def _check_room(self) -> int:
        """Refuse a prompt that cannot be run; returns how many tokens may follow it."""
        prompt, context = self.prompt, self.scheduler.context
        if not prompt:
            raise BadRequest("The prompt is empty.", "Pass at least one token.")
        check_tokens(self.backend.config, np.asarray(prompt, dtype=np.int64))
        if len(prompt) >= context:
            raise ContextFull(
                f"A prompt of {len(prompt)} tokens leaves no room for an answer in a context of {context}.",
                "Raise the context length (-c) or shorten the prompt."
                if context < self.backend.config.context
                else "Shorten the prompt: the model has no longer context.",
            )
        return context - len(prompt)

    # -- the prompt ---------------------------------------------------------------------------------------------------

    def piece(self, most: int) -> list[int]:
        """The tokens of the prompt that are next, so many at most, and no more than up to where it is to be saved. The
        first piece begins after what is known of the prompt already."""
        assert self.state is not None
        if self._sequence is None:
            began = perf_counter()
            self._sequence, self._save_at = self.scheduler.prefixes.begin(self.prompt, self.state, self.kept)
            self.stats.cached_tokens = self.state.length
            self.stats.prefill_seconds += perf_counter() - began
        start, multiple = self.state.length, self.backend.prefill_multiple
        end = start + max(multiple, most - most % multiple)
        return self.prompt[start : min(end, *(place for place in self._save_at if place > start), len(self.prompt))]

    def ends_with(self, piece: list[int]) -> bool:
        """Whether it is the last one: with it the first token is decided."""
        return self.sequence.state.length + len(piece) == len(self.prompt)

    def prefill(self, piece: list[int], output: Output, seconds: float) -> None:
        """The piece was run and committed, in so many seconds."""
        began, state = perf_counter(), self.sequence.state
        start = state.length - len(piece)
        run = self._cut([self._chosen(output, -1)]) if state.length == len(self.prompt) else []
        self.chooser.show(output, [-1], run)
        self._observe(start, output, slice(None))
        if self.proposer is not None and not self.scheduler.crowded:  # a crowd waits, and may leave no room for guesses
            self.proposer.catch_up(self.sequence.draft, state)
        self._decide(run)
        if state.length in self._save_at:
            self.scheduler.prefixes.save(self.sequence)
        self.stats.prefill_seconds += seconds + perf_counter() - began

    @property
    def prefilled(self) -> bool:
        return self.stats.generated_tokens > 0

    # -- a step: propose, then the scheduler's forward pass, then verify and commit -----------------------------------

    def want(self, tokens: WantedTokens) -> Want:
        """These tokens, and what the proposer observes."""
        return _wanting(Want() if self.proposer is None else self.proposer.wants, tokens)

    def join(self) -> None:
        """Take part in a pass with others: no more decoding by itself, and the proposer may rest."""
        self.settle()
        self.asks = self.proposer is not None and not self._rest()

    def stay_alone(self) -> None:
        self.asks = self.proposer is not None

    def propose(self, nodes: int, others: Others) -> int:
        """The root and what may follow it, of so many nodes at most; returns how many there may be."""
        began, proposer, sequence = perf_counter(), self.proposer, self.sequence
        depth, tree = self.limit - self.stats.generated_tokens - 1, None
        unseen = self.unseen and not others.sequences
        if proposer is not None and self.asks and depth > 0:
            tree = proposer.propose(
                sequence.draft, Context(sequence.ids, sequence.state, depth, None, nodes, others, unseen)
            )
            if isinstance(tree, Tree) and tree.tokens[0] != sequence.ids[-1]:
                raise ValueError(f"{proposer} proposed a tree that does not start at the root")
        self._draft_seconds = perf_counter() - began
        if isinstance(tree, GrowingTree):
            self.tree = tree
            return tree.nodes
        self.tree = Tree.root(sequence.ids[-1]) if tree is None else tree.trimmed(depth, nodes)
        return len(self.tree)

    def _rest(self) -> bool:
        """Whether the proposer rests in a pass with others; what it asks for is counted down token by token."""
        assert self.proposer is not None
        if self._resting == 0:
            self._resting = self.proposer.rest(self.sequence.draft)
        if self._resting == 0:
            return False
        self._resting -= 1
        return True

    def accept(self) -> None:
        """Follow the sampler through the tree, and commit the nodes it went along: all tokens decided but the last."""
        began, tree, state = perf_counter(), self.tree, self.sequence.state
        past = self.chooser.recent(self.sequence.ids)
        start, committing, proposed, own = state.length, 0.0, began - self._draft_seconds, None
        if isinstance(tree, GrowingTree):
            seen = tree.verify(state, self.want(self.chooser.tokens), self.sampling, past, self.stop_ids)
            tree, output, path, run = seen.tree, seen.output, seen.path, seen.decided
            self.tree, self.unseen_seconds, committing = tree, seen.forward_seconds, seen.commit_seconds
            # the device was at it when the host began to wait: first at the commit before
            besides = perf_counter() - proposed - seen.forward_seconds - committing
            own = seen.draft_seconds
            self._draft_seconds = besides if own is None else own + seen.tree_seconds
            began = perf_counter()
        else:
            output = drafted(state, tree).output
            path, run = self.chooser.along(self.backend, state, tree, output, past)
        run = self._cut(run)  # before the state advances: what comes after the end never happened
        path = path[: len(run)]
        self.chooser.show(output, path, run)
        walked = perf_counter()
        self._decide(run)
        self.backend.commit(state, path)
        self._observe(start, output if self.asks else Output(), path)
        self._took(tree, path, run)
        self._verify_seconds, self._commit_seconds = walked - began, committing + perf_counter() - walked
        if own is not None:  # the device drafts meanwhile; what it had to wait for, the walk among it, is verifying
            device = self._draft_seconds + self.unseen_seconds + committing
            self._verify_seconds, self._commit_seconds = max(0.0, perf_counter() - proposed - device), committing

    def accept_root(self, output: Output, row: int) -> None:
        """`accept` for a root alone that is committed: the next token is chosen from this row."""
        began, root = perf_counter(), self.sequence.ids[-1]
        run = self._cut([self._chosen(output, row)])
        self.chooser.show(output, [row], run)
        self._decide(run)
        if self.proposer is not None:
            rows = output[row : row + 1] if self.asks else Output()
            self._observe(self.sequence.state.length - 1, rows, slice(None))
        self._took(root, [0], run)
        self._verify_seconds, self._commit_seconds = perf_counter() - began, 0.0

    def ahead(self) -> int:
        """After `join`: how many tokens may be decoded before it has to be asked again."""
        if not self.simple:
            return 1
        left = self.limit - self.stats.generated_tokens
        return left if self.proposer is None else min(left, 1 + self._resting)

    def accept_run(self, run: list[int]) -> None:
        """`accept_root` for each of so many tokens, all committed but the last."""
        began, length = perf_counter(), self.sequence.state.length
        finite = run[-1] != NOT_FINITE
        start, run = length - len(run), self._cut(run if finite else run[:-1])
        self._decide(run)
        if not finite:
            raise not_finite(length)
        self._resting -= min(self._resting, len(run) - 1)  # `join` has counted one
        self._observe(start, Output(), slice(None))
        self.drafted, self._decided, self._passes = 0, 1, len(run)
        self._verify_seconds, self._commit_seconds = perf_counter() - began, 0.0

    def _took(self, tree: Tree | int, path: list[int], run: list[int]) -> None:
        """What the step under way has come to; a root alone may be told by its token."""
        self.drafted, self._decided, self._passes = 0 if isinstance(tree, int) else len(tree) - 1, len(run), 1
        if self.on_step is not None:
            self._step = Step(Tree.root(tree) if isinstance(tree, int) else tree, path, run)

    @property
    def seen(self) -> Tree:
        """The tree of the step under way."""
        assert isinstance(self.tree, Tree)
        return self.tree

    @property
    def own_seconds(self) -> float:
        """Of the step under way: what it took besides the forward pass."""
        return self._draft_seconds + self._verify_seconds + self._commit_seconds

    def stepped(self, seconds: float, forward: float, elsewhere: float, sequences: int, nodes: int) -> None:
        """Count a step of so many seconds, of them those of the forward pass, and those that other sequences took; and
        how many sequences and nodes were in the pass."""
        stats = self.stats
        stats.count_step(self.drafted, self._decided, self._passes)
        stats.draft_seconds += self._draft_seconds
        stats.verify_seconds += forward + self._verify_seconds
        stats.forward_seconds += forward
        stats.commit_seconds += self._commit_seconds
        stats.decode_seconds += seconds
        if self.proposer is not None:
            told = forward + self._commit_seconds if self.asks else None
            others = Others(sequences - 1, nodes - 1 - self.drafted)
            decided = self._decided * self._passes
            self.proposer.spent(self.sequence.draft, decided, seconds - elsewhere, told, others)
        if self.on_step is not None:
            assert self._step is not None
            self.on_step(self._step)

    # -- alone: the backend may decode by itself ----------------------------------------------------------------------

    def may_decode(self) -> bool:
        """Whether the backend can decode the next token in its own fastest way: nothing is to be guessed before it."""
        if self._burst is None and self.rests:
            left = self.limit - self.stats.generated_tokens
            rest = left if self.proposer is None else min(self.proposer.rest(self.sequence.draft), left)
            if rest:
                self._burst = self._decoding(rest, self.stop_ids)
        return self._burst is not None

    def decode(self) -> None:
        """Take a token that the backend decodes by itself."""
        began, burst, root = perf_counter(), self._burst, self.sequence.ids[-1]
        assert burst is not None
        run = self._cut([next(burst.tokens)])
        self._decide(run)
        self.stats.count_step(drafted=0, decided=1)
        self.drafted = 0
        burst.left, burst.taken = burst.left - 1, burst.taken + 1
        took = perf_counter() - began
        burst.seconds += took
        self.stats.decode_seconds += took
        if self.on_step is not None:
            self.on_step(Step(Tree.root(root), [0], run))
        if self.finish_reason is not None or not burst.left:
            self.settle()

    def decode_one(self) -> None:
        """`accept` for a root alone, and the forward pass for it."""
        self._burst = self._decoding(1, frozenset())
        run = self._cut([next(self._burst.tokens)])
        self._decide(run)
        self.settle()
        self._took(self.seen, [0], run)
        self._verify_seconds = self._commit_seconds = 0.0

    def settle(self) -> None:
        """Break off decoding: a backend that has run ahead goes back to the last token it gave out."""
        burst, self._burst = self._burst, None
        if burst is None:
            return
        burst.tokens.close()
        if self.sequence.state.length > self._observed:
            self._observe(self._observed, Output(), slice(None))
        if self.proposer is not None and burst.taken:
            self.proposer.spent(self.sequence.draft, burst.taken, burst.seconds, None)

    def break_off(self) -> None:
        """Let go of a backend that decodes, after something went wrong: the state is not used any more."""
        burst, self._burst = self._burst, None
        if burst is not None:
            burst.tokens.close()

    def _decoding(self, count: int, stop_ids: frozenset[int]) -> _Burst:
        state, root = self.sequence.state, self.sequence.ids[-1]
        listener, self._observed = None, state.length
        if self.proposer is not None and self.proposer.wants.features and self.proposer.listens(self.sequence.draft):
            listener = Listener(self.proposer.wants.features, self._heard)
        past = self.chooser.recent(self.sequence.ids)
        tokens = self.backend.decode(state, root, count, stop_ids, self.sampling, past, listener)
        return _Burst(tokens, count)

    def _heard(self, start: int, output: Output) -> None:
        """Rows of tokens that the backend decoded by itself."""
        self._observe(start, output, slice(None))
        self._observed = self.sequence.state.length

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _decide(self, run: list[int]) -> None:
        self.sequence.ids.extend(run)
        if run:
            self.runs.append(run)

    def _chosen(self, output: Output, row: int) -> int:
        """What comes after the state, of which this row tells."""
        sequence = self.sequence
        return self.chooser.at(output, row, sequence.ids, sequence.state.length)

    def _observe(self, start: int, output: Output, rows: slice | list[int]) -> None:
        if self.proposer is not None:
            features = None if output.features is None else output.features[rows]
            hidden = None if output.hidden is None else output.hidden[rows]
            sequence = self.sequence
            tokens = sequence.ids[start : sequence.state.length]
            self.proposer.observe(sequence.draft, tokens, start, features, hidden)

    def _cut(self, run: list[int]) -> list[int]:
        """Count the run's tokens and end it where the text ends."""
        for count, token in enumerate(run, start=1):
            self.stats.generated_tokens += 1
            if token in self.stop_ids or (self.until is not None and self.until(token)):
                self.finish_reason = "stop"
            elif self.stats.generated_tokens == self.limit:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                if self.proposer is not None:
                    self.stats.speculation_off = self.proposer.off
                return run[:count]
        return run
