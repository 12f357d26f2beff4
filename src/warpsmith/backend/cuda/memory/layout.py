"""Where everything lies on the device: the host's view of `shape.cuh`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from warpsmith.backend.cuda.memory.exchange import Exchange
from warpsmith.backend.cuda.memory.sizes import Sizes
from warpsmith.backend.cuda.schedule import Schedule
from warpsmith.backend.cuda.shape import COLUMNS, HEAD_DIM, MAX_OWN_LOGITS, STATE_DIM, WIDE
from warpsmith.backend.cuda.weights.stream import WeightStream
from warpsmith.backend.tree import MAX_NODES
from warpsmith.model.config import Config
from warpsmith.model.weights import expected_shapes


class Layout(Sizes):
    """Sizes and offsets for one model on one number of SMs. `stored` has the types of its tensors in the file, BF16
    where nothing is said."""

    def __init__(self, config: Config, sms: int, stored: Mapping[str, str] | None = None) -> None:
        super().__init__(config, sms)
        self.schedule = Schedule(config, sms)
        self.stream = WeightStream(self.schedule, stored or {})
        self.blocks = config.value_dim // COLUMNS
        self.splits = 128 // config.kv_heads

    @property
    def stream_bytes(self) -> int:
        return self.stream.bytes

    @property
    def embedding_bytes(self) -> int:
        return self.stream.embedding_bytes

    def vectors(self) -> list[str]:
        return self.schedule.vectors()

    def vector_start(self, name: str) -> int:
        """Floats before a vector."""
        names, shapes = self.vectors(), expected_shapes(self.config)
        return sum(math.prod(shapes[n]) for n in names[: names.index(name)])

    def rope_table(self, context: int) -> np.ndarray:
        return rope_table(self.config, context)

    # -- exchanges ------------------------------------------------------------------------------------------------

    @property
    def exchange(self) -> Exchange:
        return self.schedule.exchange

    @property
    def parts_bytes(self) -> int:
        """Attention's means of every split, in fp16."""
        return MAX_NODES * self.config.heads * self.splits * HEAD_DIM * 2

    @property
    def branch_bytes(self) -> int:
        """States that a tree's nodes leave to their children."""
        return self.blocks * MAX_NODES * COLUMNS * STATE_DIM * 4

    @property
    def samples(self) -> bool:
        return -(-self.schedule.head.tiles // self.sms) * WIDE <= MAX_OWN_LOGITS

    # -- for the kernels ------------------------------------------------------------------------------------------

    def headers(self) -> dict[str, str]:
        """Generated ones, by the names they are included by."""
        return {"schedule.cuh": self.schedule.header(), "stream.cuh": self.stream.header()}


def rope_bytes(config: Config, context: int) -> int:
    return (64 + context // 64 + 1) * (config.rotary_dim // 2) * 8


def rope_table(config: Config, context: int) -> np.ndarray:
    return turns(config.rotary_dim // 2, config.rope_theta, context)


def turns(half: int, theta: float, context: int) -> np.ndarray:
    """cos and sin of a position's low six bits [64, half], then of the rest [context / 64 + 1, half]."""
    frequencies = theta ** (-np.arange(half, dtype=np.float64) / half)
    positions = np.concatenate([np.arange(64), np.arange(context // 64 + 1) * 64]).astype(np.float64)
    angles = positions[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
