"""What a forward pass over n nodes costs here: measured once for a model on a device, and remembered on disk."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from warpsmith.backend.base import Backend, Want
from warpsmith.backend.tree import MAX_NODES, Tree
from warpsmith.errors import BadRequest, DoesNotFit

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # trees that are timed
PAST = 16  # tokens before them
ROUNDS = 6  # the first warms up
PATIENCE = 3.0  # seconds after which another round is not begun


@dataclass(frozen=True)
class Costs:
    """Seconds of a forward and a commit by the number of nodes, the root included."""

    seconds: tuple[float, ...]  # of 1, 2, ... MAX_NODES nodes

    @classmethod
    def between(cls, measured: Mapping[int, float]) -> Costs:
        """From some sizes all of them, by straight lines; more nodes never cost less."""
        sizes = sorted(measured)
        line = np.interp(np.arange(1, MAX_NODES + 1), sizes, [measured[n] for n in sizes])
        return cls(tuple(np.maximum.accumulate(line).tolist()))


def costs_of(backend: Backend, wants: Want, directory: Path | None = None) -> Costs:
    """From the cache, or measured now and kept there. Where there is no room for that, nodes are held to be dear."""
    path = (directory or cache_directory()) / f"{_fingerprint(backend, wants)}.json"
    try:
        kept = json.loads(path.read_text())
        return Costs.between({int(n): float(s) for n, s in kept["seconds"].items()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    try:
        measured = measure(backend, wants)
    except (BadRequest, DoesNotFit):
        return Costs.between({1: 1.0, MAX_NODES: float(MAX_NODES)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"device": backend.name, "seconds": measured}))
        part.replace(path)
    except OSError:
        pass  # a cache that cannot be written only costs time
    return Costs.between(measured)


def measure(backend: Backend, wants: Want, clock: Callable[[], float] = perf_counter) -> dict[int, float]:
    """Seconds of trees of some sizes. Tokens and shape hardly matter; what they read and write does.

    What else runs on the machine only ever adds to a time, so of several the shortest is nearest to the truth, and
    sizes take turns so that a busy moment does not fall on one alone.
    """
    random = np.random.default_rng(0)
    state = backend.new_state(PAST + MAX_NODES)
    backend.prefill(state, random.integers(0, backend.config.vocab, PAST).tolist(), replace(wants, tokens="none"))
    start, want = backend.snapshot(state), replace(wants, tokens="argmax")
    trees = [typical_tree(n, random, backend.config.vocab) for n in SIZES if n <= backend.largest_tree]
    samples: dict[int, list[float]] = {len(tree): [] for tree in trees}
    started = clock()
    for _ in range(ROUNDS):
        for tree in trees:
            before = clock()
            backend.forward(state, tree, want)
            backend.commit(state, [0])
            samples[len(tree)].append(clock() - before)
            backend.restore(state, start)
        if clock() - started > PATIENCE:
            break
    return {size: min(times[1:] or times) for size, times in samples.items()}


def typical_tree(size: int, random: np.random.Generator, vocab: int) -> Tree:
    """Random tokens on a chain with a second child at every third node."""
    parents = [i - 1 if i % 3 else i - 3 for i in range(size)]
    return Tree(random.integers(0, vocab, size), np.array([-1, *parents[1:]]))


def cache_directory() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "warpsmith" / "costs"


def _fingerprint(backend: Backend, wants: Want) -> str:
    """Whatever decides how long a forward takes: the model's shape and bytes, who computes, on what."""
    weights = backend.memory(1)[0].nbytes
    how = [getattr(backend, name, None) for name in ("threads", "kernels", "kv", "chip")]
    where = (platform.node(), platform.machine(), os.cpu_count())
    text = repr((backend.name, backend.config, weights, wants, [str(h) for h in how], where))
    return hashlib.sha256(text.encode()).hexdigest()[:24]
