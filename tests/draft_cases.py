"""What the tests of drafts share: a model of sixteen tokens on either backend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from random_models import random_tensors, small_config
from warpsmith.backend.base import Backend, Output, State, Want
from warpsmith.backend.block_draft import BlockDraft
from warpsmith.backend.cpu import CpuBackend
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.rows import Rows
from warpsmith.backend.sampling import Sampling
from warpsmith.draft.base import Context, Proposer, ScoredTree
from warpsmith.engine.loop import Generation
from warpsmith.engine.scheduler import Scheduler

# Sixteen tokens: even a draft that knows nothing is right now and then.
CONFIG = small_config(vocab=16, mtp_layers=1)


@cache
def backend(name: str, seed: int = 0) -> Backend:
    tensors = random_tensors(CONFIG, seed)
    return ReferenceBackend(CONFIG, tensors) if name == "reference" else CpuBackend(CONFIG, tensors, threads=1)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab, length).tolist()


class Alone:
    """A proposer with the memory of the one sequence that a test is about."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.reset()

    def reset(self) -> None:
        self.memory = self.proposer.new_memory()

    def propose(self, context: Context) -> Any:
        return self.proposer.propose(self.memory, context)

    def observe(self, tokens: Sequence[int], position: int, features: Rows | None, hidden: Rows | None) -> None:
        self.proposer.observe(self.memory, tokens, position, features, hidden)

    def spent(self, tokens: int, seconds: float, forward_seconds: float | None) -> None:
        self.proposer.spent(self.memory, tokens, seconds, forward_seconds)

    def catch_up(self, state: State) -> None:
        self.proposer.catch_up(self.memory, state)

    def snapshot(self) -> Any:
        return self.proposer.snapshot(self.memory)

    def restore(self, saved: Any) -> None:
        self.proposer.restore(self.memory, saved)

    @property
    def rest(self) -> int:
        return self.proposer.rest(self.memory)


class OneBlock:
    """A block draft with the memory of one sequence."""

    def __init__(self, network: BlockDraft) -> None:
        self.network, self.memory = network, network.new_memory()

    def append(self, features: Rows, position: int) -> None:
        self.network.append(self.memory, features, position)

    def fill(self, root: int, position: int, rows: int, want: Want) -> Output:
        return self.network.fill(self.memory, root, position, rows, want)

    def forget(self) -> None:
        self.network.forget(self.memory)

    def snapshot(self) -> Any:
        return self.network.snapshot(self.memory)

    def restore(self, saved: Any) -> None:
        self.network.restore(self.memory, saved)


def guess(draft: Alone, ids: Sequence[int], depth: int = 10) -> ScoredTree | None:
    return draft.propose(Context(list(ids), None, depth))  # type: ignore[arg-type]


def run(scheduler: Scheduler, prompt: Sequence[int], sampling: Sampling, **options: Any) -> list[int]:
    return [token for tokens in Generation(scheduler, prompt, sampling, **options) for token in tokens]
