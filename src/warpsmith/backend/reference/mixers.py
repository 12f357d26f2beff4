"""The two stages of a layer that look at other tokens: convolution + DeltaNet, and attention.

Everything else in a forward pass works row by row. A mixer either runs a chunk of consecutive tokens and writes the
state (prefill), or the nodes of trees, each on its own ancestors and none on the state (forward).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from warpsmith.backend.reference import ops
from warpsmith.backend.tree import Tree
from warpsmith.model.config import Config

Weights = dict[str, np.ndarray]
Buffers = dict[str, np.ndarray]


@dataclass
class LayerState:
    """What one layer remembers: keys and values, or convolution inputs and DeltaNet states."""

    keys: np.ndarray = field(default_factory=lambda: np.empty(0))  # [context, kv_heads, head_dim], after norm and RoPE
    values: np.ndarray = field(default_factory=lambda: np.empty(0))
    conv: np.ndarray = field(default_factory=lambda: np.empty(0))  # [taps - 1, channels], before the convolution
    delta: np.ndarray = field(default_factory=lambda: np.empty(0))  # [value_heads, dk, dv]


@dataclass
class DeltaInputs:
    """The DeltaNet's inputs after convolution and gates, one row a token."""

    q: np.ndarray  # [T, nv, dk], normalised and scaled
    k: np.ndarray  # [T, nv, dk], normalised
    v: np.ndarray  # [T, nv, dv]
    decay: np.ndarray  # [T, nv]
    beta: np.ndarray  # [T, nv]

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.q[i], self.k[i], self.v[i], self.decay[i], self.beta[i]


def delta_inputs(config: Config, mixed: np.ndarray, buffers: Buffers, weights: Weights) -> DeltaInputs:
    """Split the convolved channels into heads, normalise, and turn the gates into decay and beta."""
    count = len(mixed)
    q, k, v = np.split(mixed, [config.key_dim, 2 * config.key_dim], axis=1)
    repeat = config.value_heads // config.key_heads
    q, k = (ops.l2_norm(x.reshape(count, config.key_heads, config.key_head_dim)) for x in (q, k))
    q = q * q.dtype.type(config.key_head_dim**-0.5)
    return DeltaInputs(
        q=np.tile(q, (1, repeat, 1)),  # tiled: value head h reads key head h mod key_heads
        k=np.tile(k, (1, repeat, 1)),
        v=v.reshape(count, config.value_heads, config.value_head_dim),
        decay=weights["a"] * ops.softplus(buffers["alpha"] + weights["dt"]),
        beta=ops.sigmoid(buffers["beta"]),
    )


def delta_output(config: Config, outputs: np.ndarray, buffers: Buffers, weights: Weights) -> np.ndarray:
    """Norm each head's output, then gate it."""
    gate = ops.silu(buffers["z"]).reshape(outputs.shape)
    return (ops.rms_norm(outputs, weights["norm"], config.eps) * gate).reshape(len(outputs), -1)


def attention_inputs(
    config: Config, positions: np.ndarray, buffers: Buffers, weights: Weights
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values [T, heads, head_dim] after norm and RoPE, and the output gate [T, heads * head_dim]."""
    count = len(positions)
    q, gate = np.split(buffers["q"].reshape(count, config.heads, 2 * config.head_dim), 2, axis=2)
    k, v = (buffers[name].reshape(count, config.kv_heads, config.head_dim) for name in ("k", "v"))
    q, k = (
        ops.rope(ops.rms_norm(x, w, config.eps), positions, config.rotary_dim, config.rope_theta)
        for x, w in ((q, weights["q_norm"]), (k, weights["k_norm"]))
    )
    return q, k, v, gate.reshape(count, -1)


class Mixer(Protocol):
    """Each returns what the layer's output projection reads, one row a token."""

    def delta(self, layer: int, buffers: Buffers, weights: Weights) -> np.ndarray: ...

    def attention(self, layer: int, buffers: Buffers, weights: Weights) -> np.ndarray: ...


class ChunkMixer:
    """Consecutive tokens at once, written straight into the state. Used by prefill and by the MTP block."""

    def __init__(self, config: Config, layers: dict[int, LayerState], position: int, count: int) -> None:
        self.config, self.layers, self.position = config, layers, position
        self.positions = position + np.arange(count)

    def delta(self, layer: int, buffers: Buffers, weights: Weights) -> np.ndarray:
        state = self.layers[layer]
        window = np.concatenate([state.conv, buffers["qkv"]])
        inputs = delta_inputs(self.config, ops.causal_conv(window, weights["conv"]), buffers, weights)
        state.conv = window[len(buffers["qkv"]) :]
        state.delta, outputs = ops.delta_chunk(state.delta, inputs.q, inputs.k, inputs.v, inputs.decay, inputs.beta)
        return delta_output(self.config, outputs, buffers, weights)

    def attention(self, layer: int, buffers: Buffers, weights: Weights) -> np.ndarray:
        q, k, v, gate = attention_inputs(self.config, self.positions, buffers, weights)
        state, end = self.layers[layer], self.position + len(q)
        state.keys[self.position : end], state.values[self.position : end] = k, v
        mixed = ops.attend(q, state.keys[:end], state.values[:end], self.position)
        return mixed.reshape(len(q), -1) * ops.sigmoid(gate)


class TreeMixer:
    """The nodes of a tree, each computed from the committed state and its own ancestors alone, one node at a time.

    What `commit` will need is kept per layer: rows of convolution inputs, DeltaNet inputs, keys and values.
    """

    def __init__(self, config: Config, layers: dict[int, LayerState], position: int, tree: Tree) -> None:
        self.config, self.layers, self.position, self.tree = config, layers, position, tree
        self.positions = position + tree.depths()
        self.paths = [tree.path(i) for i in range(len(tree))]
        self.rows: dict[int, Buffers] = {}
        self.inputs: dict[int, DeltaInputs] = {}

    def delta(self, layer: int, buffers: Buffers, weights: Weights) -> np.ndarray:
        state, taps = self.layers[layer], self.config.conv_kernel
        self.rows[layer] = {"qkv": buffers["qkv"]}
        windows = (np.concatenate([state.conv, buffers["qkv"][path]])[-taps:] for path in self.paths)
        mixed = np.concatenate([ops.causal_conv(window, weights["conv"]) for window in windows])
        inputs = self.inputs[layer] = delta_inputs(self.config, mixed, buffers, weights)
        states: list[np.ndarray] = []
        outputs: list[np.ndarray] = []
        for i, parent in enumerate(self.tree.parents):
            after, output = ops.delta_step(state.delta if parent < 0 else states[parent], *inputs.row(i))
            states.append(after)
            outputs.append(output)
        return delta_output(self.config, np.stack(outputs), buffers, weights)

    def attention(self, layer: int, buffers: Buffers, weights: Weights) -> np.ndarray:
        q, k, v, gate = attention_inputs(self.config, self.positions, buffers, weights)
        self.rows[layer] = {"keys": k, "values": v}
        state = self.layers[layer]
        past_keys, past_values = state.keys[: self.position], state.values[: self.position]
        mixed = [
            ops.attend(
                q[i : i + 1],
                np.concatenate([past_keys, k[path]]),
                np.concatenate([past_values, v[path]]),
                self.position + len(path) - 1,
            )
            for i, path in enumerate(self.paths)
        ]
        return np.concatenate(mixed).reshape(len(q), -1) * ops.sigmoid(gate)

    def commit(self, path: list[int]) -> None:
        """Write the path's rows into the state, by the same operations as decoding them one by one."""
        end = self.position + len(path)
        for layer, rows in self.rows.items():
            state = self.layers[layer]
            if "keys" in rows:
                state.keys[self.position : end] = rows["keys"][path]
                state.values[self.position : end] = rows["values"][path]
            else:
                state.conv = np.concatenate([state.conv, rows["qkv"][path]])[len(path) :]
                for node in path:
                    state.delta, _ = ops.delta_step(state.delta, *self.inputs[layer].row(node))


class BatchMixer:
    """Trees of several sequences, one after another: each sees its own rows alone."""

    def __init__(self, mixers: Sequence[TreeMixer]) -> None:
        self.mixers = mixers

    def delta(self, layer: int, buffers: Buffers, weights: Weights) -> np.ndarray:
        return np.concatenate([mixer.delta(layer, own, weights) for mixer, own in self._apart(buffers)])

    def attention(self, layer: int, buffers: Buffers, weights: Weights) -> np.ndarray:
        return np.concatenate([mixer.attention(layer, own, weights) for mixer, own in self._apart(buffers)])

    def _apart(self, buffers: Buffers) -> Iterator[tuple[TreeMixer, Buffers]]:
        start = 0
        for mixer in self.mixers:
            end = start + len(mixer.tree)
            yield mixer, {name: rows[start:end] for name, rows in buffers.items()}
            start = end
