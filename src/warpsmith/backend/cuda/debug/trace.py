"""What SMs have exchanged by some stage of a forward pass, read back to compare with the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from warpsmith.backend.cuda.schedule import Schedule
from warpsmith.backend.cuda.shape import STATE_DIM
from warpsmith.backend.tree import MAX_NODES
from warpsmith.errors import BadRequest

if TYPE_CHECKING:
    from warpsmith.backend.cuda.state import CudaState
    from warpsmith.backend.cuda.weights_first import WeightsFirstBackend


def stage_number(schedule: Schedule, stage: str) -> int:
    """The kernel's number of a stage of the plan (`delta_mix.3`)."""
    number = schedule.number(stage)
    if number is None:
        first, *_, last, _ = schedule.stages
        raise BadRequest(f"There is no stage {stage!r}.", f"Stages run from {first.names[0]} to {last.names[-1]}.")
    return number


def read_stage(backend: WeightsFirstBackend, state: CudaState, stage: str, nodes: int) -> dict[str, np.ndarray]:
    """The plan's buffers of a pass over so many nodes that stopped after `stage`."""
    c, exchange = backend.config, backend.layout.exchange
    op, kind, layer = _parse(stage)
    before = sum(c.recurrent[:layer])
    mixer, mixer_turn = ("delta", before) if op.startswith("delta") else ("attention", layer - before)
    if op == "delta_in":  # what is exchanged is convolved and gated already
        shape = (backend.layout.delta_layers, MAX_NODES, c.conv_channels)
        return {"qkv": state.pending["pending_raw"].read(np.float32, shape)[before, :nodes]}
    if op == "attention_in":
        rows = exchange.row(read_exchange(backend, mixer_turn), op, nodes).view(np.float32)
        kv = c.kv_heads * c.head_dim
        sizes = {"q": 2 * c.heads * c.head_dim, "k": kv, "v": kv}
        ends = np.cumsum(list(sizes.values()))
        return {name: rows[:, e - s : e] for (name, s), e in zip(sizes.items(), ends, strict=True)}
    if kind == "mix":
        words = read_exchange(backend, mixer_turn)
        y = exchange.values(words, mixer, nodes)
        if op == "delta_mix":
            squares = exchange.squares(words, mixer, nodes).view(np.float32)
            squares = squares.reshape(nodes, c.value_heads, -1).sum(axis=2)
            y = y.reshape(nodes, c.value_heads, STATE_DIM) / np.sqrt(squares / STATE_DIM + c.eps)[:, :, None]
        return {"y": y.reshape(nodes, -1)}
    if kind == "mlp_in":
        return {"h": exchange.values(read_exchange(backend, layer), "h", nodes)}
    # x travels times the weight of the norm that reads it
    if op == "mix_out":
        norm = _read_norm(backend, f"blk.{layer}.post_attention_norm.weight")
        return {"x": exchange.values(read_exchange(backend, layer), "mid", nodes) / norm}
    following = 0 if op == "embed" else layer + 1
    name = f"blk.{following}.attn_norm.weight" if following < c.layers else "output_norm.weight"
    return {"x": exchange.values(read_exchange(backend, following), "x", nodes) / _read_norm(backend, name)}


def read_exchange(backend: WeightsFirstBackend, turn: int) -> np.ndarray:
    """The words of the copy of all exchanges that use number `turn` has: they take turns."""
    return backend.exchange.read(np.uint32, (2, backend.layout.exchange.bytes // 8))[turn % 2]


def _read_norm(backend: WeightsFirstBackend, name: str) -> np.ndarray:
    start = backend.layout.vector_start(name) * 4
    return backend.vectors.read(np.float32, (backend.config.hidden,), offset=start)


def _parse(stage: str) -> tuple[str, str, int]:
    """A stage's operation, the same whatever the mixer, and its layer."""
    op, _, layer = stage.partition(".")
    return op, op.removeprefix("delta_").removeprefix("attention_"), 0 if op == "embed" else int(layer)
