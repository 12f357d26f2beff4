"""Constraints and looking at logits: the tokens are the same with and without a draft, and so are the rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_cases import SAMPLED, VOCAB, Scripted, backend_of, prompt_of, run
from random_models import random_tree
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import Tree
from warpsmith.draft.base import Context
from warpsmith.engine.loop import Generation
from warpsmith.engine.scheduler import Scheduler


class Parity:
    """Even and odd tokens take turns; remembers what came."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def allow(self, logits: np.ndarray) -> np.ndarray:
        allowed = np.full_like(logits, -np.inf)
        start = len(self.taken) % 2
        allowed[start::2] = logits[start::2]
        return allowed

    def took(self, token: int) -> None:
        self.taken.append(token)


def guessing(tokens: list[int], seed: int) -> Scripted:
    """Right at first, wrong at the end, and something besides."""
    rng = np.random.default_rng(seed)

    def rule(context: Context) -> Tree:
        right = tokens[len(context.ids) :][: rng.integers(0, 4)]
        wild = random_tree(rng, int(rng.integers(1, 6)), VOCAB)
        chain = Tree.chain([context.root, *right])
        parents = np.where(wild.parents < 0, len(chain) - 1, wild.parents + len(chain))
        return Tree(np.concatenate([chain.tokens, wild.tokens]), np.concatenate([chain.parents, parents]))

    return Scripted(rule)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 99), st.sampled_from([Sampling(), SAMPLED]), st.sampled_from(["reference", "cpu"]))
def test_constrained_text_is_the_same_with_a_draft(seed: int, sampling: Sampling, on: str) -> None:
    prompt, constraint = prompt_of(20, seed), Parity()
    tokens = run(Scheduler(backend_of(on), 128), prompt, sampling, max_tokens=16, constraint=constraint)
    assert [token % 2 for token in tokens] == [0, 1] * 8
    drafted = Parity()
    scheduler = Scheduler(backend_of(on), 128, guessing(prompt + tokens, seed))
    assert run(scheduler, prompt, sampling, max_tokens=16, constraint=drafted) == tokens
    assert drafted.taken[:16] == constraint.taken[:16] == tokens


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
def test_every_token_is_shown_with_its_own_row_and_nothing_changes(sampling: Sampling) -> None:
    prompt = prompt_of(20)
    unwatched = run(Scheduler(backend_of("cpu"), 128), prompt, sampling, max_tokens=12)
    seen: list[list[tuple[bytes, int]]] = []
    for proposer in (None, guessing(prompt + unwatched, 3)):
        rows: list[tuple[bytes, int]] = []
        tokens = run(
            Scheduler(backend_of("cpu"), 128, proposer),
            prompt,
            sampling,
            max_tokens=12,
            on_logits=lambda row, token, rows=rows: rows.append((row.tobytes(), token)),
        )
        assert tokens == unwatched == [token for _, token in rows]
        seen.append(rows)
    assert seen[0] == seen[1]


def test_a_prefill_can_be_broken_off_and_the_next_request_is_right() -> None:
    prompt, scheduler = prompt_of(5000), Scheduler(backend_of("cpu"), 5200)
    whole = run(Scheduler(backend_of("cpu"), 5200), prompt, max_tokens=4)
    broken = Generation(scheduler, prompt, max_tokens=4)
    scheduler.add(broken)
    scheduler.step()
    assert 0 < broken.sequence.state.length < 5000
    scheduler.cancel(broken)
    assert run(scheduler, prompt, max_tokens=4) == whole
