"""What every backend refuses before it computes anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from warpsmith.backend.base import Backend, Batch, Snapshot, State
from warpsmith.errors import BadRequest
from warpsmith.model.config import Config


def check_batch(backend: Backend, batch: Batch) -> None:
    """Refuse what `forward` cannot run. What was drafted on its states before is gone, even if it is broken off."""
    _check_pass(backend, [(state, tree.tokens.tolist(), tree.height) for state, tree in batch])


def check_chains(backend: Backend, batch: Sequence[tuple[State, Sequence[int]]]) -> None:
    """The same for `prefill_together` and `advance`."""
    if any(len(ids) == 0 for _, ids in batch):
        raise BadRequest("There is nothing to prefill.", "Pass at least one token.")
    _check_pass(backend, [(state, ids, len(ids)) for state, ids in batch])


def _check_pass(backend: Backend, parts: Sequence[tuple[State, Sequence[int], int]]) -> None:
    """States, the tokens to be run on each, and how many of them follow one another at most."""
    ids = [token for _, tokens, _ in parts for token in tokens]
    nodes = len(ids)
    if not 1 <= nodes <= backend.largest_tree:
        raise BadRequest(f"A forward pass takes 1 to {backend.largest_tree} nodes on this device, not {nodes}.")
    if len({id(state) for state, _, _ in parts}) < len(parts):
        raise BadRequest("A forward pass takes one tree of a sequence.", "Run the other in the next pass.")
    check_ids(backend.config, ids)
    for state, _, height in parts:
        check_room(state, height)
    for state, _, _ in parts:
        state.drafted = None


def check_room(state: State, tokens: int) -> None:
    """Refuse to run past the end of the context."""
    if state.length + tokens > state.context:
        raise BadRequest(
            f"{state.length + tokens} tokens do not fit in a context of {state.context}.",
            "Raise the context length (-c) or shorten the prompt.",
        )


def check_snapshot(state: State, snapshot: Snapshot) -> None:
    if snapshot.length > state.context:
        raise BadRequest(
            f"A snapshot of {snapshot.length} tokens does not fit in a context of {state.context}.",
            "Restore it into a state at least as long.",
        )


def check_tokens(config: Config, ids: np.ndarray) -> None:
    """Refuse ids that are not of the vocabulary."""
    if len(ids):
        check_ids(config, (int(ids.min()), int(ids.max())))


def check_ids(config: Config, ids: Sequence[int]) -> None:
    """The same of a few numbers, for which an array takes longer than they do."""
    if min(ids) < 0 or max(ids) >= config.vocab:
        raise BadRequest(f"Token ids must be in [0, {config.vocab}).", "The prompt was made with another tokenizer.")
