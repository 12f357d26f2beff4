"""How fast a backend reads a prompt and generates: the tests of llama-bench, timed the way it times them. And what a
tree of drafted tokens takes, several sequences side by side, and how long a caller waits for a first token, which
llama-bench has no test for.

Tokenising and making room for the state are not counted. Tokens are generated greedily, unless a test says how to
sample them. A test at depth d starts on top of d tokens that are already there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np

from warpsmith.backend.base import Backend, Snapshot, State, wanted_for
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import Tree
from warpsmith.draft.costs import typical_tree

if TYPE_CHECKING:
    from warpsmith.llm import LLM

PASSES = 8  # of a tree, in one repetition: a single one is too short to time


@dataclass(frozen=True)
class Case:
    """Read `prompt` tokens, then generate `generate` more, on top of `depth` tokens; or run trees of `nodes` there."""

    prompt: int
    generate: int
    depth: int = 0
    nodes: int = 0
    sampling: Sampling | None = field(default=None, hash=False)
    sequences: int = 1  # that generate side by side, each as many tokens
    first: bool = False  # from the call of `LLM.stream` with the prompt to its first token

    @property
    def name(self) -> str:
        lengths = {"first" if self.first else "pp": self.prompt, "tg": self.generate, "tree": self.nodes}
        parts = [f"{kind}{length}" for kind, length in lengths.items() if length]
        beside = f" x {self.sequences}" * (self.sequences > 1)
        sampled, depth = " sampled" * (self.sampling is not None), f" @ d{self.depth}" * (self.depth > 0)
        return "+".join(parts) + beside + sampled + depth

    @property
    def tokens(self) -> int:
        return self.prompt + self.generate * self.sequences + self.nodes * PASSES

    @property
    def context(self) -> int:
        """Tokens there must be room for."""
        return self.depth + self.prompt + self.generate + self.nodes + self.first

    @property
    def passes(self) -> int:
        """Forward passes, where their number is ours to say: a prompt may be read in any pieces."""
        return 0 if self.prompt else self.generate or PASSES


@dataclass(frozen=True)
class Result:
    """The nanoseconds that each repetition of a test took."""

    test: Case
    samples_ns: list[int]

    @property
    def samples_ts(self) -> list[float]:
        """Tokens a second."""
        return [self.test.tokens * 1e9 / ns for ns in self.samples_ns]

    @property
    def avg_ns(self) -> float:
        return statistics.fmean(self.samples_ns)

    @property
    def stddev_ns(self) -> float:
        return _deviation(self.samples_ns)

    @property
    def avg_ts(self) -> float:
        return statistics.fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        return _deviation(self.samples_ts)

    @property
    def median_ts(self) -> float:
        return statistics.median(self.samples_ts)

    @property
    def median_ns(self) -> float:
        return statistics.median(self.samples_ns)

    @property
    def pass_seconds(self) -> float:
        """Of one forward pass, in the median."""
        return self.median_ns / 1e9 / self.test.passes


def reached(result: Result, backend: Backend, bandwidth: float) -> float | None:
    """The part of `bandwidth` at which passes read the bytes they cannot do without; None where that is not known."""
    needed = backend.bytes_a_token(result.test.depth + result.test.generate // 2)
    if not result.test.passes or result.test.sequences > 1 or needed is None:
        return None
    return needed / (result.pass_seconds * bandwidth)


def against_one_node(result: Result, others: Iterable[Result]) -> float | None:
    """How many times as long a tree takes as a single node at the same depth, if both were measured."""
    single = next((r for r in others if r.test.nodes == 1 and r.test.depth == result.test.depth), None)
    return result.pass_seconds / single.pass_seconds if single is not None and result.test.nodes else None


def measure(
    backend: Backend,
    test: Case,
    repetitions: int = 5,
    clock: Callable[[], int] = perf_counter_ns,
    pasts: dict[int, Snapshot] | None = None,
) -> Result:
    """Time a test, after one run that warms up. `pasts` keeps the last depth's tokens for the next test there."""
    random = np.random.default_rng(0)
    ids = random.integers(backend.config.vocab, size=test.depth + test.prompt + 1).tolist()
    past, prompt, first = ids[: test.depth], ids[test.depth : -1], ids[-1]
    states = [backend.new_state(test.context) for _ in range(test.sequences)]
    state = states[0]
    pasts = {} if pasts is None else pasts
    if test.depth in pasts:
        backend.restore(state, pasts[test.depth])
    else:
        pasts.clear()  # first give back the memory of the old one
        if past:
            backend.prefill(state, past)
        pasts[test.depth] = backend.snapshot(state)
    start = pasts[test.depth]
    trees = [typical_tree(test.nodes, random, backend.config.vocab)] * PASSES if test.nodes else []

    def run(generate: int, passes: int) -> None:
        if prompt:
            backend.prefill(state, prompt)
        if test.sequences > 1:
            _side_by_side(backend, states, ids, generate, test.sampling)
        elif generate:
            for _ in backend.decode(state, first, generate, frozenset(), test.sampling, ids):
                pass
        for tree in trees[:passes]:
            backend.forward([(state, tree)])

    for each in states[1:]:
        backend.restore(each, start)
    run(min(test.generate, 1), 1)
    samples = []
    for _ in range(repetitions):
        for each in states:
            backend.restore(each, start)
        before = clock()
        run(test.generate, PASSES)
        samples.append(max(1, clock() - before))
    return Result(test, samples)


def measure_first(llm: LLM, test: Case, repetitions: int = 5, clock: Callable[[], int] = perf_counter_ns) -> Result:
    """Time how long a caller waits for the first token of a prompt of random tokens, each time others."""
    random = np.random.default_rng(0)
    samples = []
    for _ in range(repetitions + 1):
        ids = random.integers(llm.config.vocab, size=test.prompt).tolist()
        before = clock()
        next(iter(llm.stream(ids, max_tokens=1, stop_ids=[], temperature=0)))
        samples.append(max(1, clock() - before))
    return Result(test, samples[1:])  # the first one warms up


def _side_by_side(backend: Backend, states: list[State], ids: list[int], count: int, sampling: Sampling | None) -> None:
    """As many tokens of each sequence, one of each in every forward pass."""
    tokens = [ids[-1]] * len(states)
    for _ in range(count):
        batch = [(state, Tree.chain([token])) for state, token in zip(states, tokens, strict=True)]
        backend.forward(batch, wanted_for(sampling))
        for i, (state, tree) in enumerate(batch):
            path, (tokens[i],) = backend.verify(state, tree, sampling, ids)
            backend.commit(state, path)


def _deviation(samples: list[int] | list[float]) -> float:
    return statistics.stdev(samples) if len(samples) > 1 else 0.0
