"""Rows of the residual stream that a prompt leaves for a draft."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from warpsmith.backend.cuda.memory.driver import Device
from warpsmith.backend.cuda.rows import CudaRows

WriteRows = Callable[[int, int, int, int, bool], None]  # first token and count, address, floats between rows, normed


class Kept:
    """Rows of some layers, of every token of a prompt: [token][layer][width] on the device."""

    def __init__(self, device: Device, width: int, tokens: int, layers: int, write: WriteRows) -> None:
        self.width, self.tokens, self.layers, self._write = width, tokens, layers, write
        self.buffer = device.allocate(tokens * layers * width * 4) if layers else None
        self._written = [0] * layers

    def write(self, number: int, first: int, count: int, normed: bool = False) -> None:
        """The next tokens' of one layer: `count` of the piece from `first` on, as they are now."""
        assert self.buffer is not None
        place = self._written[number] * self.layers + number
        to, stride = self.buffer.pointer + place * self.width * 4, self.layers * self.width
        self._write(first, count, to, stride, normed)
        self._written[number] += count

    def rows(self) -> CudaRows | None:
        if self.buffer is None:
            return None
        offsets = np.arange(self.tokens * self.layers, dtype=np.int64).reshape(self.tokens, self.layers) * self.width
        return CudaRows(self.buffer, offsets, self.width, lambda: True, owned=True)
