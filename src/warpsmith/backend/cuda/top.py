"""The best tokens of every node and their log-sum-exp, found on the device (kernels/sample/top.cu)."""

from __future__ import annotations

import numpy as np

from warpsmith.backend.base import Output, Want, output_from_logits
from warpsmith.backend.cuda.build.compiler import build
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


def top_image(architecture: str, vocab: int) -> bytes:
    """The kernel for rows of so many logits: it has no schedule, but is told as if it had one."""
    told = {"schedule.cuh": f"#pragma once\nconstexpr int VOCAB = {vocab};\n"}
    return build("sample/top.cu", architecture, told)


class Top:
    """The kernel and its buffers."""

    def __init__(self, device: Device, image: bytes, logits: Buffer, vocab: int) -> None:
        self.kernel = device.load(image).kernel("top")
        self.logits, self.vocab = logits, vocab
        sizes = top_bytes()
        self._keys, self._sums, self._out = (device.allocate(sizes[name]) for name in ("keys", "sums", "out"))
        self._arrived = device.zeros(sizes["arrived"])

    @property
    def rows(self) -> int:
        """Where it leaves what it finds: of each node [2 * count + 1] ids, logits, log-sum-exp."""
        return self._out.pointer

    def tokens_of(self, rows: int, want: Want, offset: int = 0) -> Output:
        """What is wanted of some rows of logits, `offset` floats from their beginning on."""
        if want.tokens == "argmax":
            return Output(argmax=self.of(rows, 1, offset).argmax)
        if want.tokens == "top" and 1 <= (count := min(want.top, self.vocab)) <= MAX_TOP:
            return self.of(rows, count, offset)
        return output_from_logits(self.logits.read(np.float32, (rows, self.vocab), 4 * offset), want)

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
