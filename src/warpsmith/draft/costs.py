"""What a forward pass over n nodes costs here: measured once for a model on a device, and remembered on disk."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from warpsmith.backend.base import Backend, Want
from warpsmith.backend.tree import MAX_NODES, Tree
from warpsmith.checkpoint.atomic import whole_file
from warpsmith.draft.base import Context, Draft
from warpsmith.errors import BadRequest, DoesNotFit

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # trees that are timed
PAST = 16  # tokens before them
ROUNDS = 5
PATIENCE = 3.0  # seconds after which nothing more is timed
BURST = 8  # plain tokens timed together
SLOW = 0.05  # seconds of a token of which one at a time can be timed well enough
BUSY = 0.7  # of the seconds once measured: the machine had something else to do then
PREPARING = 5.0  # times as long as the next: the first was not a forward alone


@dataclass(frozen=True)
class Costs:
    """Seconds of a forward and a commit by the number of nodes, the root included, and of a token without them."""

    seconds: tuple[float, ...]  # of 1, 2, ... MAX_NODES nodes
    plain: float  # of a token as `Backend.decode` makes them

    @classmethod
    def between(cls, measured: Mapping[int, float], plain: float | None = None) -> Costs:
        """From some sizes all of them, by straight lines, the last of which goes on; more nodes never cost less."""
        sizes = sorted(measured)
        times = [measured[n] for n in sizes]
        nodes = np.arange(1, MAX_NODES + 1)
        line = np.interp(nodes, sizes, times)
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else times[0]
        line += np.maximum(nodes - sizes[-1], 0) * slope
        return cls(tuple(np.maximum.accumulate(line).tolist()), times[0] if plain is None else plain)


class Measured(NamedTuple):
    seconds: dict[int, float]  # by nodes
    plain: float
    settled: bool  # measuring again would tell no other sizes


def costs_of(backend: Backend, wants: Want, directory: Path | None = None) -> Costs:
    """From the cache, or measured now and kept there: anew where the machine turns out to have been busy at the time.
    Where there is no room for that, nodes are held to be dear."""
    path = (directory or cache_directory()) / f"{_fingerprint(backend, wants)}.json"
    try:
        costs = _read(path)
        if costs.plain > SLOW or plain_seconds(backend) > BUSY * costs.plain:
            return costs
    except (OSError, ValueError, BadRequest, DoesNotFit):
        pass
    try:
        measured = measure(backend, wants)
    except (BadRequest, DoesNotFit):
        return Costs.between({1: 1.0, MAX_NODES: float(MAX_NODES)})
    if measured.settled:
        with suppress(OSError):  # a cache that cannot be written only costs time
            path.parent.mkdir(parents=True, exist_ok=True)
            record = {"device": backend.name, "seconds": measured.seconds, "plain": measured.plain}
            with whole_file(path) as file:
                file.write(json.dumps(record).encode())
    return Costs.between(measured.seconds, measured.plain)


def _read(path: Path) -> Costs:
    """What was kept there; ValueError if it is not what we keep."""
    try:
        kept = json.loads(path.read_text())
        seconds, plain = {int(n): float(s) for n, s in kept["seconds"].items()}, float(kept["plain"])
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is damaged") from error
    if 1 not in seconds or not all(1 <= nodes <= MAX_NODES for nodes in seconds):
        raise ValueError(f"{path} is of other trees")
    if not all(0 < time < 3600 for time in (*seconds.values(), plain)):
        raise ValueError(f"{path} holds times that nothing takes")
    return Costs.between(seconds, plain)


def measure(backend: Backend, wants: Want, clock: Callable[[], float] = perf_counter) -> Measured:
    """Seconds of trees of some sizes and of a plain token.

    Tokens and shape hardly matter; what they read and write does. What else runs on the machine only ever adds to a
    time, so of several the shortest is nearest to the truth, and sizes take turns so that a busy moment does not fall
    on one alone. The first of a size is not counted: a device may have to be made ready for it, which can use up all
    the time there is, but not the next time.
    """
    random = np.random.default_rng(0)
    state = backend.new_state(PAST + MAX_NODES)
    backend.prefill(state, random.integers(0, backend.config.vocab, PAST).tolist(), replace(wants, tokens="none"))
    start, want = backend.snapshot(state), replace(wants, tokens="argmax")
    trees = [typical_tree(n, random, backend.config.vocab) for n in SIZES if n <= backend.largest_tree]

    def timed(run: Callable[[], object]) -> float:
        before = clock()
        run()
        seconds = clock() - before
        backend.restore(state, start)
        return seconds

    def plainly(count: int) -> None:
        for _ in backend.decode(state, 0, count):
            pass

    def forward(tree: Tree) -> None:
        backend.forward([(state, tree)], want)
        backend.commit(state, [0])

    started, prepared = clock(), False
    plain: list[float] = []
    samples: dict[int, list[float]] = {len(tree): [] for tree in trees}
    timed(partial(plainly, 1))
    single = timed(partial(plainly, 1))
    for _ in range(ROUNDS):
        burst = 1 if single > SLOW else BURST
        plain.append(timed(partial(plainly, burst)) / burst)
        for tree in trees:
            times = samples[len(tree)]
            if samples[1] and clock() - started > PATIENCE:
                break
            first = 0.0 if times else timed(partial(forward, tree))
            times.append(timed(partial(forward, tree)))
            prepared = prepared or first > PREPARING * times[-1]
        if clock() - started > PATIENCE:
            break
    known = {size: min(times) for size, times in samples.items() if times}
    return Measured(known, min(plain), settled=len(known) == len(trees) or not prepared)


def plain_seconds(backend: Backend, clock: Callable[[], float] = perf_counter) -> float:
    """A quick look at plain decoding: of a few tokens the least disturbed."""
    state, times = backend.new_state(PAST), []
    for _ in range(BURST):
        before = clock()
        for _token in backend.decode(state, 0, 1):
            pass
        times.append(clock() - before)
    return min(times)


def tokens_of_a_guess(draft: Draft, backend: Backend, clock: Callable[[], float] = perf_counter) -> float:
    """How many tokens could be decoded in the time of the draft's shortest guess, after a short text."""
    ids = np.random.default_rng(0).integers(0, backend.config.vocab, PAST).tolist()
    state = backend.new_state(PAST + MAX_NODES)
    output = backend.prefill(state, ids, replace(draft.wants, tokens="none"))
    memory = draft.new_memory()
    draft.observe(memory, ids, 0, output.features, output.hidden)
    draft.catch_up(memory, state)
    start = backend.snapshot(state)
    guesses, tokens = [], []
    for _ in range(ROUNDS):  # the first of each warms up
        before = clock()
        draft.propose(memory, Context([*ids, 0], state, depth=1))
        between = clock()
        for _token in backend.decode(state, 0, 1):
            pass
        guesses.append(between - before)
        tokens.append(clock() - between)
        backend.restore(state, start)
    return min(guesses[1:]) / min(tokens[1:])


def typical_tree(size: int, random: np.random.Generator, vocab: int) -> Tree:
    """Random tokens on a chain with a second child at every third node."""
    parents = [i - 1 if i % 3 else i - 3 for i in range(size)]
    return Tree(random.integers(0, vocab, size), np.array([-1, *parents[1:]]))


def cache_directory() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "warpsmith" / "costs"


def _fingerprint(backend: Backend, wants: Want) -> str:
    """Whatever decides how long a forward takes: the model's shape and bytes, how it is computed, on what machine."""
    weights = backend.memory(1)[0].nbytes
    where = (platform.node(), platform.machine(), os.cpu_count())
    text = repr((backend.config, weights, wants, sorted(backend.settings.items()), where))
    return hashlib.sha256(text.encode()).hexdigest()[:24]
