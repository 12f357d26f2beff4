"""A DFlash network in numpy, in float32: for backends that do not run one themselves, and what those are held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warpsmith.backend.base import Backend, Output, Want, output_from_logits
from warpsmith.backend.block_draft import BlockDraft, BlockMemory
from warpsmith.backend.reference.ops import rms_norm, rope, silu
from warpsmith.backend.rows import HostRows, Rows
from warpsmith.checkpoint.dflash import HEAD, DraftFile
from warpsmith.model.dflash import block_plan, context_plan
from warpsmith.model.plan import Stage


@dataclass
class NumpyMemory(BlockMemory):
    """Keys and values of the last tokens, for each layer."""

    caches: list[_RollingCache]


class NumpyDraft(BlockDraft):
    """Interprets the draft's plan; each layer's memory holds the last `capacity` tokens."""

    def __init__(self, file: DraftFile, backend: Backend, capacity: Sequence[int]) -> None:
        backend.embed([0])  # or say at once that this backend does not lend what a draft needs
        self.config, self.backend, self.capacity = file.config, backend, capacity
        self._context, self._block = context_plan(file.config), block_plan(file.config)
        self._weights = {name: np.ascontiguousarray(tensor.float32()) for name, tensor in file.tensors.items()}

    def new_memory(self) -> NumpyMemory:
        c = self.config
        return NumpyMemory([_RollingCache(capacity, c.kv_heads, c.head_dim) for capacity in self.capacity])

    def forget(self, memory: BlockMemory) -> None:
        assert isinstance(memory, NumpyMemory)
        for cache in memory.caches:
            cache.count = 0

    def snapshot(self, memory: BlockMemory) -> Any:
        assert isinstance(memory, NumpyMemory)
        return [cache.copy() for cache in memory.caches]

    def restore(self, memory: BlockMemory, saved: Any) -> None:
        assert isinstance(memory, NumpyMemory)
        memory.caches = [cache.copy() for cache in saved]

    def append(self, memory: BlockMemory, features: Rows, position: int) -> None:
        assert isinstance(memory, NumpyMemory)
        c, count = self.config, len(features)
        positions = position + np.arange(count)
        context = np.empty(0)
        for stage in self._context:
            w = self._roles(stage)
            if stage.op == "context_in":
                context = rms_norm(features.numpy() @ w["project"].T, w["norm"], c.eps)
            else:
                assert stage.layer is not None
                keys, values = ((context @ w[role].T).reshape(count, c.kv_heads, c.head_dim) for role in ("k", "v"))
                keys = rope(rms_norm(keys, w["k_norm"], c.eps), positions, c.head_dim, c.rope_theta)
                memory.caches[stage.layer].append(keys, values, positions)

    def fill(self, memory: BlockMemory, root: int, position: int, rows: int, want: Want) -> Output:
        assert isinstance(memory, NumpyMemory)
        hidden = self._hidden(memory, root, position)[: rows + 1]
        output = Output() if want.tokens == "none" else self._spoken(hidden[1:], want)
        if want.hidden:
            output.hidden = HostRows(hidden)
        return output

    def _spoken(self, hidden: np.ndarray, want: Want) -> Output:
        if self.config.own_head:
            return output_from_logits(hidden @ self._weights[HEAD].T, want)
        if self.config.speaks is None:
            return self.backend.head(hidden, want)
        logits = self.backend.head(hidden, Want(tokens="logits")).logits
        assert logits is not None
        return output_from_logits(logits.numpy()[:, : self.config.speaks], want)

    def _hidden(self, memory: NumpyMemory, root: int, position: int) -> np.ndarray:
        c, b = self.config, dict[str, np.ndarray]()
        positions = position + np.arange(c.block)
        for stage in self._block:
            w = self._roles(stage)
            match stage.op:
                case "embed":
                    b["x"] = self.backend.embed([root, *[c.mask_token] * (c.block - 1)])
                case "attention_in":
                    x = rms_norm(b["x"], w["norm"], c.eps)
                    for role in ("q", "k", "v"):
                        b[role] = (x @ w[role].T).reshape(c.block, -1, c.head_dim)
                case "block_mix":
                    assert stage.layer is not None
                    b["y"] = self._attention(memory.caches[stage.layer], stage.layer, b, w, positions)
                case "mix_out":
                    b["x"] = b["x"] + b["y"] @ w["project"].T
                case "mlp_in":
                    x = rms_norm(b["x"], w["norm"], c.eps)
                    b["h"] = silu(x @ w["gate"].T) * (x @ w["up"].T)
                case "mlp_out":
                    b["x"] = b["x"] + b["h"] @ w["project"].T
                case "final_norm":
                    b["hidden"] = rms_norm(b["x"], w["norm"], c.eps)
                case _:
                    raise NotImplementedError(stage.op)
        return b["hidden"]

    def _attention(
        self,
        cache: _RollingCache,
        layer: int,
        b: dict[str, np.ndarray],
        w: dict[str, np.ndarray],
        positions: np.ndarray,
    ) -> np.ndarray:
        c = self.config
        group, count = c.heads // c.kv_heads, len(positions)
        q = rope(rms_norm(b["q"], w["q_norm"], c.eps), positions, c.head_dim, c.rope_theta)
        k = rope(rms_norm(b["k"], w["k_norm"], c.eps), positions, c.head_dim, c.rope_theta)
        # [kv heads, group * rows, head_dim] against [kv heads, keys, head_dim]
        q = q.reshape(count, c.kv_heads, group, c.head_dim).transpose(1, 2, 0, 3).reshape(c.kv_heads, -1, c.head_dim)
        past_keys, past_values, past_positions = cache.rows()
        scores = np.concatenate([q @ past_keys.transpose(0, 2, 1), q @ k.transpose(1, 2, 0)], axis=2)
        scores *= np.float32(c.head_dim**-0.5)
        seen = _visible(positions, past_positions, c.windows[layer], c.causal[layer])
        if not seen.all():
            scores = np.where(np.tile(seen, (group, 1)), scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        past = past_keys.shape[1]
        mixed = weights[:, :, :past] @ past_values + weights[:, :, past:] @ b["v"].transpose(1, 0, 2)
        return mixed.reshape(c.kv_heads, group, count, c.head_dim).transpose(2, 0, 1, 3).reshape(count, -1)

    def _roles(self, stage: Stage) -> dict[str, np.ndarray]:
        return {role: self._weights[name] for role, name in stage.weights.items()}


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


class _RollingCache:
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

    def copy(self) -> _RollingCache:
        copied = _RollingCache(self.capacity, self.keys.shape[0], self.keys.shape[2])
        copied.count, n = self.count, min(self.count, self.capacity)
        copied.keys[:, :n], copied.values[:, :n], copied.positions[:n] = self.rows()
        return copied
