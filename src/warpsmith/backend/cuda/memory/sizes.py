"""What a model and its sequences take on the device, whichever forward pass runs them: sizes in bytes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from warpsmith.backend.cuda.memory.caches import CACHE_ROWS
from warpsmith.backend.cuda.shape import COLUMNS, HISTORY, STATE_DIM
from warpsmith.backend.tree import MAX_NODES
from warpsmith.model.config import Config
from warpsmith.model.weights import expected_shapes


class Sizes(ABC):
    """Of one model on one number of SMs, with keys and values kept as named types."""

    def __init__(self, config: Config, sms: int, cache_types: tuple[str, str] = ("f16", "f16")) -> None:
        self.config, self.sms = config, sms
        self.key_rows, self.value_rows = (CACHE_ROWS[name] for name in cache_types)
        self.delta_layers, self.attention_layers = len(config.recurrent_layers), len(config.attention_layers)

    # -- the model ------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def stream_bytes(self) -> int: ...

    @property
    @abstractmethod
    def embedding_bytes(self) -> int:
        """Of a table apart from the stream."""

    @abstractmethod
    def vectors(self) -> list[str]:
        """The F32 vectors in the order the kernels expect them."""

    @property
    def vector_bytes(self) -> int:
        shapes = expected_shapes(self.config)
        return sum(math.prod(shapes[name]) for name in self.vectors()) * 4

    @property
    @abstractmethod
    def samples(self) -> bool:
        """Whether an SM has room for its logits while a token is sampled (see candidates.cuh)."""

    # -- a sequence -----------------------------------------------------------------------------------------------

    @property
    def delta_bytes(self) -> int:
        return self.delta_layers * self.config.value_dim * STATE_DIM * 4

    @property
    def history_bytes(self) -> int:
        return self.delta_layers * HISTORY * self.config.conv_channels * 4

    @property
    def caches(self) -> int:
        """Key heads of all layers, each with a contiguous cache of its own."""
        return self.attention_layers * self.config.kv_heads

    def cache_bytes(self, context: int) -> tuple[int, int]:
        """Keys, and values."""
        rows = self.caches * context
        return rows * self.key_rows.row_bytes, rows * self.value_rows.row_bytes

    def pending_bytes(self) -> dict[str, int]:
        """What a sequence keeps of its last tree until a path of that is committed."""
        c, nodes = self.config, self.delta_layers * MAX_NODES * 4
        keys, values = self.cache_bytes(MAX_NODES)
        return {
            "pending_raw": nodes * c.conv_channels,
            "pending_key": nodes * c.key_heads * STATE_DIM,
            "pending_write": nodes * c.value_dim,
            "pending_fade": nodes * c.value_dim // COLUMNS,
            "pending_keys": keys,
            "pending_values": values,
        }
