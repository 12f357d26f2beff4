"""The best tokens of every node and their log-sum-exp, found on the device (kernels/sample/top.cu)."""

from __future__ import annotations

import numpy as np

from warpsmith.backend.base import Output
from warpsmith.backend.cuda.memory.driver import Buffer, Device
from warpsmith.backend.cuda.structures import TopRequest
from warpsmith.backend.tree import MAX_NODES

MAX_TOP, SLICES, SLICE_THREADS = 256, 8, 512  # of top.cu


def top_bytes() -> dict[str, int]:
    """The kernel's buffers."""
    slices = MAX_NODES * SLICES
    return {
        "keys": slices * MAX_TOP * 8,
        "sums": slices * 8,
        "arrived": MAX_NODES * 4,
        "out": MAX_NODES * (2 * MAX_TOP + 1) * 4,
    }


class Top:
    """The kernel and its buffers."""

    def __init__(self, device: Device, image: bytes, logits: Buffer) -> None:
        self.kernel = device.load(image).kernel("top")
        self.logits = logits
        sizes = top_bytes()
        self._keys, self._sums, self._out = (device.allocate(sizes[name]) for name in ("keys", "sums", "out"))
        self._arrived = device.zeros(sizes["arrived"])

    @property
    def rows(self) -> int:
        """Where it leaves what it finds: of each node [2 * count + 1] ids, logits, log-sum-exp."""
        return self._out.pointer

    def of(self, nodes: int, count: int, offset: int = 0) -> Output:
        """From the logits of the forward pass that was queued before, `offset` floats from their beginning on."""
        self.queue(nodes, count, offset)
        rows = self._out.read(np.int32, (nodes, 2 * count + 1))
        ids = np.ascontiguousarray(rows[:, :count])
        values = np.ascontiguousarray(rows[:, count:]).view(np.float32)
        return Output(argmax=ids[:, 0].copy(), top_ids=ids, top_logits=values[:, :count], logsumexp=values[:, count])

    def queue(self, nodes: int, count: int, offset: int = 0) -> None:
        assert 1 <= nodes <= MAX_NODES
        assert 1 <= count <= MAX_TOP
        request = TopRequest(
            logits=self.logits.pointer + 4 * offset,
            keys=self._keys.pointer,
            sums=self._sums.pointer,
            arrived=self._arrived.pointer,
            out=self._out.pointer,
            count=count,
        )
        self.kernel.launch(nodes * SLICES, SLICE_THREADS, request)
