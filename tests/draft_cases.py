"""What the tests of drafts share: a model of sixteen tokens on either backend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from random_models import random_tensors, small_config
from warpsmith.backend.base import Backend
from warpsmith.backend.cpu import CpuBackend
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.sampling import Sampling
from warpsmith.draft.base import Context, Draft, ScoredTree
from warpsmith.engine.conversation import Conversation
from warpsmith.engine.loop import Generation

# Sixteen tokens: even a draft that knows nothing is right now and then.
CONFIG = small_config(vocab=16, mtp_layers=1)


@cache
def backend(name: str, seed: int = 0) -> Backend:
    tensors = random_tensors(CONFIG, seed)
    return ReferenceBackend(CONFIG, tensors) if name == "reference" else CpuBackend(CONFIG, tensors, threads=1)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab, length).tolist()


def guess(draft: Draft, ids: Sequence[int], depth: int = 10) -> ScoredTree | None:
    return draft.propose(Context(list(ids), None, depth))  # type: ignore[arg-type]


def run(conversation: Conversation, prompt: Sequence[int], sampling: Sampling, **options: Any) -> list[int]:
    return [token for tokens in Generation(conversation, prompt, sampling, **options) for token in tokens]
