"""What tests of a device, real or emulated, ask of it."""

from __future__ import annotations

import numpy as np

from warpsmith.backend.base import LOGITS
from warpsmith.backend.tree import Tree
from warpsmith.model.config import Config


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def plain_run(backend, state, tokens) -> np.ndarray:
    """Logits of one token after the other, each committed."""
    rows = []
    for token in tokens:
        rows.append(backend.forward([(state, Tree.chain([token]))], LOGITS).logits.numpy())
        backend.commit(state, [0])
    return np.concatenate(rows)


def same_state(config: Config, a, b) -> bool:
    """To the bit: the recurrent states, and the keys and values of committed tokens."""

    def rows(state, buffer) -> np.ndarray:
        shape = (len(config.attention_layers) * config.kv_heads, state.context, config.head_dim // 2)
        return buffer.read(np.uint32, shape)[:, : state.length]

    def delta(state) -> np.ndarray:
        return state.delta.read(np.uint32, (state.delta.nbytes // 4,))

    return (
        a.length == b.length
        and np.array_equal(delta(a), delta(b))
        and np.array_equal(rows(a, a.keys), rows(b, b.keys))
        and np.array_equal(rows(a, a.values), rows(b, b.values))
    )
