"""Rows that stay in device memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from warpsmith.backend.cuda.memory.driver import Buffer, check
from warpsmith.backend.rows import Rows
from warpsmith.errors import BadRequest


class CudaRows(Rows):
    """Each row is one or more pieces of `width` floats, beginning at `offsets` [rows, pieces] of a buffer, in floats.

    `valid` says whether the buffer still holds what it held when the rows were made; `owned`: nobody else writes it."""

    def __init__(
        self, buffer: Buffer, offsets: np.ndarray, width: int, valid: Callable[[], bool], owned: bool = False
    ) -> None:
        self._buffer, self.offsets, self.width, self._valid, self._owned = buffer, offsets, width, valid, owned

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.offsets), self.offsets.shape[1] * self.width

    @property
    def buffer(self) -> Buffer:
        """What the offsets count from: for kernels that take the rows where they are."""
        if not self._valid():
            raise BadRequest("These rows are gone: the device has computed others since.", "Take keep() in time.")
        return self._buffer

    def begins(self, others: CudaRows) -> bool:
        """Whether they are the first of some others."""
        same = self._buffer is others._buffer and len(self) <= len(others)
        return same and np.array_equal(self.offsets, others.offsets[: len(self)])

    def numpy(self) -> np.ndarray:
        """One copy, of everything between the first piece and the last."""
        if not len(self):
            return np.empty(self.shape, np.float32)
        first = int(self.offsets.min())
        span = self.buffer.read(np.float32, (int(self.offsets.max()) + self.width - first,), offset=4 * first)
        starts = self.offsets.reshape(-1) - first
        if np.array_equal(starts, np.arange(len(starts)) * self.width):
            return span.reshape(self.shape)
        return np.concatenate([span[start : start + self.width] for start in starts]).reshape(self.shape)

    def __getitem__(self, rows: slice | Sequence[int]) -> CudaRows:
        return CudaRows(self._buffer, self.offsets[rows], self.width, self._valid, self._owned)

    def groups(self, chosen: Sequence[int], of: int) -> CudaRows:
        assert of == self.offsets.shape[1]
        return CudaRows(self._buffer, self.offsets[:, list(chosen)], self.width, self._valid, self._owned)

    def keep(self) -> CudaRows:
        if self._owned:
            return self
        device, source = self.buffer.device, self.buffer.pointer
        kept = device.allocate(self.nbytes)
        offsets = np.arange(self.offsets.size, dtype=np.int64) * self.width
        for to, start in zip(offsets.tolist(), self.offsets.reshape(-1).tolist(), strict=True):
            check(device.cu.cuMemcpyDtoD(kept.pointer + 4 * to, source + 4 * start, 4 * self.width))
        return CudaRows(kept, offsets.reshape(self.offsets.shape), self.width, lambda: True, owned=True)
