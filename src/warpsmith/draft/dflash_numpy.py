"""A DFlash network in numpy, in float32: for backends that do not run one themselves, and what those are held to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from warpsmith.backend.base import Backend, BlockDraft, Output, Want
from warpsmith.backend.reference.ops import rms_norm, rope, silu
from warpsmith.backend.rows import HostRows, Rows
from warpsmith.draft.dflash_files import DraftFile


class NumpyDraft(BlockDraft):
    """Keeps keys and values of the last `capacity` tokens for each layer."""

    def __init__(self, file: DraftFile, backend: Backend, capacity: Sequence[int]) -> None:
        backend.embed([0])  # or say at once that this backend does not lend what a draft needs
        self.config, self.backend, self.capacity = file.config, backend, capacity
        self._load(file)
        self.forget()

    def forget(self) -> None:
        c = self.config
        self._rings = [_Ring(capacity, c.kv_heads, c.head_dim) for capacity in self.capacity]

    def snapshot(self) -> Any:
        return [ring.copy() for ring in self._rings]

    def restore(self, saved: Any) -> None:
        self._rings = [ring.copy() for ring in saved]

    def append(self, features: Rows, position: int) -> None:
        """Context rows pass through the feature projection and the layers' key and value projections only."""
        c, count = self.config, len(features)
        positions = position + np.arange(count)
        context = rms_norm(features.numpy() @ self._fc.T, self._hidden_norm, c.eps)
        projected = (context @ self._context_kv.T).reshape(count, c.layers, 2, c.kv_heads, c.head_dim)
        for i, (layer, ring) in enumerate(zip(self._layers, self._rings, strict=True)):
            keys = rms_norm(projected[:, i, 0], layer["k_norm"], c.eps)
            ring.append(rope(keys, positions, c.head_dim, c.rope_theta), projected[:, i, 1], positions)

    def fill(self, root: int, position: int, rows: int, want: Want) -> Output:
        hidden = self._hidden(root, position)[: rows + 1]
        output = Output() if want.tokens == "none" else self.backend.head(hidden[1:], want)
        if want.hidden:
            output.hidden = HostRows(hidden)
        return output

    def _hidden(self, root: int, position: int) -> np.ndarray:
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
            return np.ascontiguousarray(file.tensors[name].float32())

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
