"""How fast a backend reads a prompt and generates: the tests of llama-bench, timed the way it times them.

Tokenising, sampling and making room for the state are not counted. A test at depth d starts on top of d tokens that
are already there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

from warpsmith.backend.base import Backend, State


@dataclass(frozen=True)
class Case:
    """Read `prompt` tokens, then generate `generate` more, on top of `depth` tokens."""

    prompt: int
    generate: int
    depth: int = 0

    @property
    def name(self) -> str:
        parts = [f"pp{self.prompt}"] * (self.prompt > 0) + [f"tg{self.generate}"] * (self.generate > 0)
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def tokens(self) -> int:
        return self.prompt + self.generate


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


def measure(backend: Backend, test: Case, repetitions: int = 5, clock: Callable[[], int] = perf_counter_ns) -> Result:
    """Time a test, after one run that warms up."""
    random = np.random.default_rng(0)
    ids = random.integers(backend.config.vocab, size=test.depth + test.prompt + 1).tolist()
    past, prompt, first = ids[: test.depth], ids[test.depth : -1], ids[-1]
    state = backend.new_state(test.depth + test.tokens)
    if past:
        backend.prefill(state, past)
    start = backend.snapshot(state)
    _run(backend, state, prompt, first, min(test.generate, 1))
    samples = []
    for _ in range(repetitions):
        backend.restore(state, start)
        before = clock()
        _run(backend, state, prompt, first, test.generate)
        samples.append(max(1, clock() - before))
    return Result(test, samples)


def _run(backend: Backend, state: State, prompt: list[int], first: int, generate: int) -> None:
    if prompt:
        backend.prefill(state, prompt)
    for _ in backend.decode(state, first, generate):
        pass


def _deviation(samples: list[int] | list[float]) -> float:
    return statistics.stdev(samples) if len(samples) > 1 else 0.0
