"""Many requests on one model: who computes when. One request alone is a batch of one, and the loop is the same.

Requests are admitted in the order in which they come, as many as there are states. A state has room for a whole context
from the start, so nobody who was admitted is ever turned out again. Each step runs one piece of a prompt, or several
short prompts, together where the backend can, and then one forward pass for everybody who is past theirs. Prompts take
turns. So an answer waits about as long as one piece takes, and no prompt waits for another's end.

The text of a request does not depend on who runs beside it: prompts may be cut where the pieces are cut
(`Backend.prefill_multiple`), a forward pass gives every sequence its own bits, and drafts never change a text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from math import inf
from time import perf_counter

import numpy as np

from warpsmith.backend.base import ARGMAX, LOGITS, Backend, Output, Want
from warpsmith.backend.block_draft import GrowingTree
from warpsmith.draft.base import Others, Proposer
from warpsmith.engine.capacity import plan
from warpsmith.engine.loop import Generation
from warpsmith.engine.prefix import PrefixCache
from warpsmith.errors import BadRequest

PIECE_SECONDS = 0.25  # a piece of a prompt may take: what others wait for it, and what it takes to be broken off
UNSEEN_SECONDS = 0.008  # of decoding without a look at who has come or gone: a reader is told no sooner than that
SHORTEST_PIECE, LONGEST_PIECE = 64, 2048  # tokens


class Scheduler:
    """Requests on a backend: `add` them, then `step` until they have ended; or `run` one."""

    def __init__(
        self,
        backend: Backend,
        context: int,
        proposer: Proposer | None = None,
        parallel: int | None = 1,
        cache_bytes: int | None = None,
    ) -> None:
        """How many run at a time and how many bytes of snapshots are kept is planned where it is left out (`plan`)."""
        parallel, cache_bytes = plan(backend, context, parallel, cache_bytes)
        if not 1 <= parallel <= backend.largest_tree:
            raise BadRequest(f"{parallel} sequences do not go into one pass.", f"Ask for 1 to {backend.largest_tree}.")
        self.backend, self.context, self.proposer, self.parallel = backend, context, proposer, parallel
        self._states = [backend.new_state(context) for _ in range(parallel)]  # that nobody uses
        self.prefixes = PrefixCache(backend, proposer, self._states[0], cache_bytes)
        self.waiting: deque[Generation] = deque()
        self.prefilling: deque[Generation] = deque()
        self.running: list[Generation] = []
        self._piece = SHORTEST_PIECE
        self._pass_seconds = deque([inf], 3)  # of the last passes without a draft for several

    def add(self, generation: Generation) -> None:
        self.waiting.append(generation)

    def cancel(self, generation: Generation) -> None:
        """Break a request off, between two steps. One that has ended is left alone."""
        if generation in self.waiting:
            self.waiting.remove(generation)
        elif generation in self.prefilling or generation in self.running:
            self._leave(generation)

    @property
    def crowded(self) -> bool:
        """Whether several are at work."""
        return len(self.prefilling) + len(self.running) > 1

    def run(self, generation: Generation) -> Generator[list[int]]:
        """The runs of one request as they are decided; leaving breaks it off."""
        self.add(generation)
        try:
            while generation.runs or (generation.finish_reason is None and generation.error is None):
                if generation.runs:
                    yield generation.runs.popleft()
                else:
                    self.step()
            if generation.error is not None:
                raise generation.error
        finally:
            self.cancel(generation)

    def step(self) -> None:
        """A piece of a prompt, and one forward pass for all who are past theirs."""
        while self.waiting and self._states:
            self.waiting[0].state = self._states.pop()
            self.prefilling.append(self.waiting.popleft())
        running = list(self.running)
        if self.prefilling:
            running = self._each(running, Generation.settle)
            began, tokens = perf_counter(), 0
            while self.prefilling and tokens < self._piece // 2:
                tokens += self._prefill()
            for generation in running:
                generation.stats.decode_seconds += perf_counter() - began  # it had to wait
        if running:
            self._decode(running)

    def _prefill(self) -> int:
        """A piece of the prompt whose turn it is, and of the next ones what goes into the same pass; returns how many
        tokens there were."""
        began, whole, pieces = perf_counter(), self._piece, dict[Generation, list[int]]()
        most, tokens = whole, 0

        def cut(generation: Generation) -> None:
            pieces[generation] = generation.piece(most)

        for generation in list(self.prefilling):
            self._each([generation], cut)
            tokens = sum(map(len, pieces.values()))
            most = self.backend.largest_tree - tokens if self.backend.prefills_together else 0
            if most <= 0:
                break
        if not pieces:
            return 0
        try:
            outputs = dict(zip(pieces, self._run(pieces), strict=True))
        except BaseException as error:
            self._fail(list(pieces), error)
            return 0
        seconds = perf_counter() - began
        if tokens >= SHORTEST_PIECE // 4:  # of a shorter one little can be told
            self._piece = max(SHORTEST_PIECE, min(int(tokens / seconds * PIECE_SECONDS), LONGEST_PIECE))
        turns = self._each(list(pieces), lambda each: each.prefill(pieces[each], outputs[each], seconds))
        for generation in turns:
            if generation.prefilled or len(pieces[generation]) >= whole:  # the others keep their places
                self.prefilling.remove(generation)
                (self.running if generation.prefilled else self.prefilling).append(generation)
        self._leave_if_done(turns)
        return tokens

    def _run(self, pieces: dict[Generation, list[int]]) -> list[Output]:
        """One pass for these pieces of prompts."""
        batch = [(each.sequence.state, piece) for each, piece in pieces.items()]
        tokens = {each.chooser.tokens for each, piece in pieces.items() if each.ends_with(piece)}
        want = next(iter(pieces)).want("logits" if "logits" in tokens else "argmax" if tokens else "none")
        return self.backend.prefill_together(batch, want) if len(batch) > 1 else [self.backend.prefill(*batch[0], want)]

    def _decode(self, running: list[Generation]) -> None:
        """Decide what comes next for each: one token, and one more for each that its draft guessed right.

        Sequences share the nodes of a pass evenly; how many of its share one uses is for its draft's budget to say."""
        if len(running) > 1:
            running = self._each(running, Generation.join)
        elif running[0].may_decode():
            return self._leave_if_done(self._each(running, Generation.decode))
        else:
            running[0].stay_alone()
        began = perf_counter()
        if len(running) > 1 and self.backend.advances and not any(each.asks for each in running):
            count = min(self._most(len(running)), *(each.ahead() for each in running))
            accept = self._decode_together(running, count) if count > 1 else self._advance(running)
            forward = perf_counter() - began
            self._pass_seconds.append(forward / count)
            return self._stepped(self._each(running, accept), began, forward)
        share, nodes = self.backend.largest_tree // max(1, len(running)), len(running)

        def propose(generation: Generation) -> None:
            nonlocal nodes  # of all trees, those to come with one each
            nodes += generation.propose(share, Others(len(running) - 1, nodes - 1)) - 1

        turns = self._each(running, propose)
        drafted, forward = perf_counter(), 0.0
        if turns and isinstance(turns[0].tree, GrowingTree):  # which is alone
            turns = self._each(turns, Generation.accept)
            forward = turns[0].unseen_seconds if turns else 0.0
        elif len(running) == 1 and turns and turns[0].bare and len(turns[0].seen) == 1:
            turns = self._each(turns, Generation.decode_one)
            forward = perf_counter() - drafted
        elif turns:
            accept = self._forward(turns)
            forward = perf_counter() - drafted
            turns = self._each(turns, accept)
        self._stepped(turns, began, forward)

    def _stepped(self, turns: list[Generation], began: float, forward: float) -> None:
        """Count the step for each."""
        seconds, own = perf_counter() - began, sum(each.own_seconds for each in turns)
        nodes = sum(1 + each.drafted for each in turns)
        for each in turns:
            each.stepped(seconds, forward, own - each.own_seconds, len(turns), nodes)
        self._leave_if_done(turns)

    def _forward(self, turns: list[Generation]) -> Callable[[Generation], None]:
        """The pass for all of them; returns what each has to do next."""
        if self.backend.advances and all(len(each.seen) == 1 for each in turns):
            return self._advance(turns)
        try:
            self.backend.forward([(each.sequence.state, each.seen) for each in turns], self._want(turns))
        except BaseException as error:
            self._fail(turns, error)
        return Generation.accept

    def _advance(self, turns: list[Generation]) -> Callable[[Generation], None]:
        """The same where nothing is guessed: a token more for each."""
        output = Output()
        try:
            batch = [(each.sequence.state, each.sequence.ids[-1]) for each in turns]
            output = self.backend.advance(batch, self._want(turns))
        except BaseException as error:
            self._fail(turns, error)
        rows = {each: row for row, each in enumerate(turns)}
        return lambda each: each.accept_root(output, rows[each])

    def _most(self, running: int) -> int:
        """Tokens that so many may decode in one call: no more than is soon done, and one while others wait to join."""
        waits = self.prefilling or len(self.running) > running
        return 1 if waits else max(1, int(UNSEEN_SECONDS / min(self._pass_seconds)))

    def _decode_together(self, turns: list[Generation], count: int) -> Callable[[Generation], None]:
        """So many tokens for each, or fewer where one of them ends."""
        rows = np.empty((0, len(turns)), np.int32)
        try:
            batch = [(each.sequence.state, each.sequence.ids[-1]) for each in turns]
            stop = frozenset[int]().union(*(each.stop_ids for each in turns))
            rows = self.backend.decode_together(batch, count, stop)
        except BaseException as error:
            self._fail(turns, error)
        runs = dict(zip(turns, rows.T.tolist(), strict=True))
        return lambda each: each.accept_run(runs[each])

    def _want(self, turns: list[Generation]) -> Want:
        """What all of them need of a forward pass."""
        tokens = LOGITS if any(generation.chooser.tokens == LOGITS.tokens for generation in turns) else ARGMAX
        asks = next((generation for generation in turns if generation.asks), None)
        return tokens if asks is None else asks.want(tokens.tokens)

    def _each(self, generations: list[Generation], work: Callable[[Generation], object]) -> list[Generation]:
        """Do it for each; returns those for whom nothing has gone wrong."""
        for generation in generations:
            if generation.error is None:
                try:
                    work(generation)
                except BaseException as error:
                    self._fail([generation], error)
        return [generation for generation in generations if generation.error is None]

    def _fail(self, generations: list[Generation], error: BaseException) -> None:
        """What goes wrong ends these requests, and no others; an interrupt is everybody's."""
        for generation in generations:
            generation.error = error
            self._leave(generation)
        if not isinstance(error, Exception):
            raise error

    def _leave_if_done(self, generations: list[Generation]) -> None:
        for generation in generations:
            if generation.finish_reason is not None and generation.error is None:
                self._leave(generation)

    def _leave(self, generation: Generation) -> None:
        """Give the state back; the answer is saved if the next request may go on from it."""
        for place in (self.prefilling, self.running):
            if generation in place:
                place.remove(generation)
        if generation.error is not None:
            generation.break_off()
        elif generation.prefilled:
            generation.settle()
            if generation.answer_kept and self.prefixes.keeps_answers:
                self.prefixes.save(generation.sequence)
        assert generation.state is not None
        self._states.append(generation.state)
        generation.state = None
