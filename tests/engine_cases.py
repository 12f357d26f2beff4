"""What the tests of the decode loop share: a small model, requests on it, and proposers good and bad."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from random_models import SMALL, random_tensors, random_tree
from warpsmith.backend.base import Backend, State, Want
from warpsmith.backend.cpu import CpuBackend
from warpsmith.backend.reference import ReferenceBackend, ReferenceState
from warpsmith.backend.rows import Rows
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import Tree
from warpsmith.draft.base import ALONE, Context, Others, Proposer
from warpsmith.engine.loop import Generation
from warpsmith.engine.scheduler import Scheduler

VOCAB = SMALL.vocab
BACKEND = ReferenceBackend(SMALL, random_tensors(SMALL))
SAMPLED = Sampling(
    temperature=1.5, top_k=40, top_p=0.95, repeat_penalty=1.2, frequency_penalty=0.1, repeat_last_n=10, seed=5
)


@cache
def backend_of(name: str) -> Backend:
    return BACKEND if name == "reference" else CpuBackend(SMALL, BACKEND.tensors, threads=2)


atexit.register(backend_of.cache_clear)  # the extension complains of what outlives it


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def run(scheduler: Scheduler, prompt: Sequence[int], sampling: Sampling | None = None, **options: Any) -> list[int]:
    """All tokens of a request."""
    return tokens_of(Generation(scheduler, prompt, sampling, **options))


def plain(prompt: Sequence[int], sampling: Sampling | None = None, on: str = "reference", **options: Any) -> list[int]:
    return run(Scheduler(backend_of(on), options.pop("context", 256)), prompt, sampling, **options)


def states_equal(a: State, b: State) -> bool:
    """Every committed bit."""
    if not isinstance(a, ReferenceState):
        cpu = backend_of("cpu")
        return a.length == b.length and np.array_equal(cpu.snapshot(a).data, cpu.snapshot(b).data)
    assert isinstance(b, ReferenceState)
    return a.length == b.length and all(
        np.array_equal(x.keys[: a.length], y.keys[: a.length])
        and np.array_equal(x.values[: a.length], y.values[: a.length])
        and np.array_equal(x.conv, y.conv)
        and np.array_equal(x.delta, y.delta)
        for x, y in zip(a.layers.values(), b.layers.values(), strict=True)
    )


@dataclass
class Heard:
    """What a proposer was told of a sequence."""

    tokens: list[int] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)


class Scripted(Proposer[Heard]):
    """Draws trees by a rule, and keeps what it observes."""

    name = "scripted"
    wants = Want(tokens="none", features=(1, 3), hidden=True)

    def __init__(self, rule: Callable[[Context], Tree | None]) -> None:
        self.rule = rule

    def new_memory(self) -> Heard:
        return Heard()

    def propose(self, memory: Heard, context: Context) -> Tree | None:
        assert list(context.ids[:-1]) == memory.tokens, "every committed token is observed, in order, once"
        assert context.state.length == len(memory.tokens)
        return self.rule(context)

    def observe(
        self,
        memory: Heard,
        tokens: Sequence[int],
        position: int,
        features: Rows | None,
        hidden: Rows | None,
    ) -> None:
        assert position == len(memory.tokens)
        assert features is not None
        assert hidden is not None
        assert features.shape == (len(tokens), 2 * SMALL.hidden)
        assert hidden.shape == (len(tokens), SMALL.hidden)
        memory.tokens += tokens
        memory.rows += [*np.concatenate([features.numpy(), hidden.numpy()], axis=1)]

    def snapshot(self, memory: Heard) -> Any:
        return list(memory.tokens), list(memory.rows)

    def restore(self, memory: Heard, saved: Any) -> None:
        memory.tokens, memory.rows = list(saved[0]), list(saved[1])


class Resting(Scripted):
    """Wants to be left alone now and then, for a number of tokens that nobody foresees."""

    def __init__(self, rule: Callable[[Context], Tree | None], seed: int = 0) -> None:
        super().__init__(rule)
        self.rng = np.random.default_rng(seed)
        self.told: list[tuple[int, float, float | None]] = []

    def rest(self, memory: Heard) -> int:
        return int(self.rng.integers(1, 9)) if self.rng.random() < 0.3 else 0

    def spent(
        self, memory: Heard, tokens: int, seconds: float, forward_seconds: float | None, others: Others = ALONE
    ) -> None:
        self.told.append((tokens, seconds, forward_seconds))

    def observe(
        self,
        memory: Heard,
        tokens: Sequence[int],
        position: int,
        features: Rows | None,
        hidden: Rows | None,
    ) -> None:
        if features is not None:
            super().observe(memory, tokens, position, features, hidden)
        else:
            assert hidden is None
            assert position == len(memory.tokens)
            memory.tokens += tokens


def guessing(truth: Sequence[int], right: float, nodes: int, seed: int = 0) -> Callable[[Context], Tree]:
    """Random trees in which a node is the true next token with probability `right`, and siblings may be equal."""
    rng = np.random.default_rng(seed)

    def rule(context: Context) -> Tree:
        tree = random_tree(rng, nodes, VOCAB)
        tree.tokens[0] = context.root
        for node, depth in enumerate(tree.depths().tolist()):
            place = len(context.ids) - 1 + depth
            if node and rng.random() < right and place < len(truth):
                tree.tokens[node] = truth[place]
        return tree

    return rule


def chain(truth: Sequence[int], length: int, offset: int = 0) -> Callable[[Context], Tree]:
    """The true continuation as a chain, or (with an offset) one that is always wrong."""

    def rule(context: Context) -> Tree:
        coming = truth[len(context.ids) :][:length]
        return Tree.chain([context.root, *((t + offset) % VOCAB for t in coming)])

    return rule


def star(context: Context) -> Tree:
    """Depth 1, one token tried twice."""
    others = [context.root, *range(10, 70), 10]
    return Tree(np.array(others), np.array([-1] + [0] * (len(others) - 1)))


def twins(truth: Sequence[int]) -> Callable[[Context], Tree]:
    """Every level twice: the same right token under the same parent, and what follows it under both."""

    def rule(context: Context) -> Tree:
        tokens, parents, level = [context.root], [-1], [0]
        for token in truth[len(context.ids) :][:4]:
            parents += [parent for parent in level for _ in range(2)]
            level = list(range(len(tokens), len(tokens) + 2 * len(level)))
            tokens += [token] * len(level)
        return Tree(np.array(tokens), np.array(parents))

    return rule


def both_modes(
    prompt: list[int], sampling: Sampling | None = None, on: str = "reference", context: int = 256, **options: Any
) -> Iterator[Generation]:
    """The same request plainly and with a draft that is right ten tokens ahead."""
    truth = prompt + plain(prompt, sampling, on, max_tokens=40)
    for proposer in (None, Scripted(chain(truth, 10))):
        yield Generation(Scheduler(backend_of(on), context, proposer), prompt, sampling, **options)


def tokens_of(generation: Generation) -> list[int]:
    return [token for tokens in generation for token in tokens]


class RunsAhead(ReferenceBackend):
    """Decodes in bursts, as a device does that is not asked between tokens."""

    name = "ahead"

    def decode(self, state: State, token: int, *arguments: Any) -> Iterator[int]:
        before = self.snapshot(state)
        made = list(super().decode(state, token, *arguments))
        given = 0
        try:
            for next_token in made:
                given += 1
                yield next_token
        finally:
            if given < len(made):
                self.restore(state, before)
                for fed in [token, *made][:given]:
                    self.forward([(state, Tree.chain([fed]))])
                    self.commit(state, [0])
