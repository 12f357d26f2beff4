"""DFlash: a few layers that fill a block of masked positions at once, from features of the target's layers.

The features of every committed token are projected once into each layer's keys and values and kept in rings, so a
guess costs the same at any length of text, and so does the memory. The block itself leaves nothing behind. The draft
has no embeddings and no head of its own: the target lends both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from warpsmith.backend.base import Backend, State, Want
from warpsmith.backend.reference.ops import rms_norm, rope, silu
from warpsmith.backend.tree import MAX_NODES
from warpsmith.draft.base import Context, Draft, ScoredTree
from warpsmith.draft.ddtree import best_tree, marginals
from warpsmith.draft.dflash_files import DraftFile, check_fits

CONTEXT_ROWS = 4096  # tokens that layers without a window look back on: drafts are trained on no more
WIDTH = 16  # tokens considered at each depth
WAITING_BYTES = 64 << 20  # of features kept before they are projected
PIECE = 256  # rows projected at a time


class DFlash(Draft):
    """A DFlash network in numpy, in float32."""

    name = "dflash"

    def __init__(
        self, file: DraftFile, backend: Backend, nodes: int = MAX_NODES - 1, context_rows: int = CONTEXT_ROWS
    ) -> None:
        check_fits(file.config, backend.config)
        backend.embed([0])  # or say at once that this backend does not lend what a draft needs
        self.config, self.backend, self.nodes = file.config, backend, nodes
        self.wants = Want(tokens="none", features=file.config.target_layers)
        self._context_rows = context_rows
        self._load(file)
        self.reset()

    # -- what was committed -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        c = self.config
        self._rings = [
            _Ring(self._context_rows if w is None else min(w, self._context_rows), c.kv_heads, c.head_dim)
            for w in c.windows
        ]
        self._waiting: list[tuple[int, np.ndarray]] = []  # (position, features) yet to be projected
        self._position = 0  # of the next token

    def snapshot(self) -> Any:
        return [ring.copy() for ring in self._rings], list(self._waiting), self._position

    def restore(self, saved: Any) -> None:
        rings, waiting, self._position = saved
        self._rings, self._waiting = [ring.copy() for ring in rings], list(waiting)

    def observe(
        self, tokens: Sequence[int], position: int, features: np.ndarray | None, hidden: np.ndarray | None
    ) -> None:
        assert features is not None
        if position != self._position:
            self.reset()
        longest = max(ring.capacity for ring in self._rings)
        self._position = position + len(tokens)
        kept = features[-longest:]  # what no layer could see any more is not worth projecting
        self._waiting.append((self._position - len(kept), kept))
        while sum(len(rows) for _, rows in self._waiting[1:]) >= longest:
            del self._waiting[0]
        if sum(rows.nbytes for _, rows in self._waiting) > WAITING_BYTES:
            self._project_waiting()

    def catch_up(self, state: State) -> None:
        self._project_waiting()

    def _project_waiting(self) -> None:
        for start, features in self._waiting:
            for i in range(0, len(features), PIECE):
                rows = features[i : i + PIECE]
                self._append(rows, start + i + np.arange(len(rows)))
        self._waiting = []

    def _append(self, features: np.ndarray, positions: np.ndarray) -> None:
        """Context rows pass through the feature projection and the layers' key and value projections only."""
        c, count = self.config, len(features)
        context = rms_norm(features @ self._fc.T, self._hidden_norm, c.eps)
        projected = (context @ self._context_kv.T).reshape(count, c.layers, 2, c.kv_heads, c.head_dim)
        for i, (layer, ring) in enumerate(zip(self._layers, self._rings, strict=True)):
            keys = rms_norm(projected[:, i, 0], layer["k_norm"], c.eps)
            ring.append(rope(keys, positions, c.head_dim, c.rope_theta), projected[:, i, 1], positions)

    # -- what comes next ----------------------------------------------------------------------------------------------

    def propose(self, context: Context) -> ScoredTree | None:
        self._project_waiting()
        rows = min(self.config.block - 1, context.depth)
        hidden = self.hidden(context.root, len(context.ids) - 1)[1 : rows + 1]
        width = min(WIDTH, self.nodes, self.backend.config.vocab)
        ids, log_probs = marginals(self.backend.head(hidden, Want(tokens="top", top=width)))
        return best_tree(context.root, ids, log_probs, self.nodes)

    def hidden(self, root: int, position: int) -> np.ndarray:
        """The block's rows after the last norm, float32 [block, hidden]; row j is about the token at position + j."""
        c = self.config
        x = self.backend.embed([root, *[c.mask_token] * (c.block - 1)])
        positions = position + np.arange(c.block)
        for i, layer in enumerate(self._layers):
            x = x + self._attention(i, rms_norm(x, layer["input_norm"], c.eps), positions) @ layer["o"].T
            inner = rms_norm(x, layer["post_norm"], c.eps) @ layer["gate_up"].T
            x = x + (silu(inner[:, : c.ffn]) * inner[:, c.ffn :]) @ layer["down"].T
        return rms_norm(x, self._norm, c.eps)

    def _attention(self, index: int, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        c, layer, ring = self.config, self._layers[index], self._rings[index]
        group, count = c.heads // c.kv_heads, len(x)
        q, k, v = np.split((x @ layer["qkv"].T).reshape(count, -1, c.head_dim), [c.heads, c.heads + c.kv_heads], axis=1)
        q = rope(rms_norm(q, layer["q_norm"], c.eps), positions, c.head_dim, c.rope_theta)
        k = rope(rms_norm(k, layer["k_norm"], c.eps), positions, c.head_dim, c.rope_theta)
        # [kv heads, group * rows, head_dim] against [kv heads, keys, head_dim]
        q = q.reshape(count, c.kv_heads, group, c.head_dim).transpose(1, 2, 0, 3).reshape(c.kv_heads, -1, c.head_dim)
        past_keys, past_values, past_positions = ring.rows()
        scores = np.concatenate([q @ past_keys.transpose(0, 2, 1), q @ k.transpose(1, 2, 0)], axis=2)
        scores *= np.float32(c.head_dim**-0.5)
        seen = _visible(positions, past_positions, c.windows[index], c.causal[index])
        if not seen.all():
            scores = np.where(np.tile(seen, (group, 1)), scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        past = past_keys.shape[1]
        mixed = weights[:, :, :past] @ past_values + weights[:, :, past:] @ v.transpose(1, 0, 2)
        return mixed.reshape(c.kv_heads, group, count, c.head_dim).transpose(2, 0, 1, 3).reshape(count, -1)

    def _load(self, file: DraftFile) -> None:
        def weight(name: str) -> np.ndarray:
            return np.ascontiguousarray(file.weights[name](), dtype=np.float32)

        def stacked(layer: str, *names: str) -> np.ndarray:
            return np.concatenate([weight(f"{layer}{name}.weight") for name in names])

        self._fc, self._hidden_norm, self._norm = (
            weight("fc.weight"),
            weight("hidden_norm.weight"),
            weight("norm.weight"),
        )
        self._layers: list[dict[str, np.ndarray]] = []
        for i in range(file.config.layers):
            layer = f"layers.{i}."
            self._layers.append(
                {
                    "input_norm": weight(layer + "input_layernorm.weight"),
                    "post_norm": weight(layer + "post_attention_layernorm.weight"),
                    "q_norm": weight(layer + "self_attn.q_norm.weight"),
                    "k_norm": weight(layer + "self_attn.k_norm.weight"),
                    "qkv": stacked(layer, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                    "o": weight(layer + "self_attn.o_proj.weight"),
                    "gate_up": stacked(layer, "mlp.gate_proj", "mlp.up_proj"),
                    "down": weight(layer + "mlp.down_proj.weight"),
                }
            )
        queries = file.config.heads * file.config.head_dim
        self._context_kv = np.concatenate([layer["qkv"][queries:] for layer in self._layers])


def _visible(rows: np.ndarray, past: np.ndarray, window: int | None, causal: bool) -> np.ndarray:
    """bool [rows, past + rows]: a window ends at the row itself; a causal row does not see the block's later rows."""
    keys = np.concatenate([past, rows])
    ahead = keys[None, :] - rows[:, None]
    seen = np.ones(ahead.shape, dtype=bool)
    if window is not None:
        seen &= np.abs(ahead) < window
    if causal:
        seen &= ahead <= 0
    return seen


class _Ring:
    """The last `capacity` keys and values of a layer, and their positions."""

    def __init__(self, capacity: int, kv_heads: int, head_dim: int) -> None:
        self.capacity, self.count = capacity, 0
        self.keys = np.empty((kv_heads, capacity, head_dim), dtype=np.float32)
        self.values = np.empty_like(self.keys)
        self.positions = np.empty(capacity, dtype=np.int64)

    def append(self, keys: np.ndarray, values: np.ndarray, positions: np.ndarray) -> None:
        """Rows [n, kv heads, head_dim]; of more than fit, the last."""
        self.count += len(keys)
        keys, values, positions = (a[-self.capacity :] for a in (keys, values, positions))
        slots = np.arange(self.count - len(keys), self.count) % self.capacity
        self.keys[:, slots], self.values[:, slots] = keys.transpose(1, 0, 2), values.transpose(1, 0, 2)
        self.positions[slots] = positions

    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys and values [kv heads, n, head_dim] and positions [n], in no order."""
        n = min(self.count, self.capacity)
        return self.keys[:, :n], self.values[:, :n], self.positions[:n]

    def copy(self) -> _Ring:
        copied = _Ring(self.capacity, self.keys.shape[0], self.keys.shape[2])
        copied.count, n = self.count, min(self.count, self.capacity)
        copied.keys[:, :n], copied.values[:, :n], copied.positions[:n] = self.rows()
        return copied
