"""What launches leave on the device for those who asked: written over by the next launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from warpsmith.backend.base import Output, Want, output_from_logits
from warpsmith.backend.cuda.decoding import BURST
from warpsmith.backend.cuda.memory.driver import Buffer, Device, Pinned
from warpsmith.backend.cuda.rows import CudaRows
from warpsmith.backend.cuda.shape import LOGIT_ROWS, MAX_FEATURES, MAX_STEPS
from warpsmith.backend.cuda.top import MAX_TOP, Top
from warpsmith.backend.tree import MAX_NODES
from warpsmith.model.config import Config


@lru_cache
def feature_places(sizes: tuple[int, ...], layers: int) -> np.ndarray:
    """Which rows of the features each node of some trees has: of each tree [layers][nodes]."""
    starts = np.cumsum([0, *sizes[:-1]]) * layers
    places = [s + np.arange(layers) * n + np.arange(n)[:, None] for s, n in zip(starts, sizes, strict=True)]
    return np.concatenate(places)


class Outputs:
    """The buffers, and how an `Output` is made of them."""

    def __init__(self, device: Device, config: Config, top_image: bytes) -> None:
        self._device, self._config = device, config
        self.logits = device.allocate(LOGIT_ROWS * config.vocab * 4)
        self.features = device.allocate(MAX_FEATURES * MAX_NODES * config.hidden * 4)
        self.hidden = device.allocate(MAX_NODES * config.hidden * 4)
        self.ring = Pinned(device, np.int32, 1 + max(BURST, MAX_NODES))  # how many tokens, and the tokens
        self.top = Top(device, top_image, self.logits, config.vocab)
        self.launches = 0  # so far

    def overwrite(self) -> Callable[[], bool]:
        """Count a launch. Tells later whether what is there is still its."""
        self.launches += 1
        return self._still(self.launches)

    def _still(self, launches: int) -> Callable[[], bool]:
        return lambda: self.launches == launches

    def of_trees(self, sizes: list[int], want: Want) -> Output:
        """Of trees of these sizes that were launched just now, one after another."""
        nodes, vocab, output = sum(sizes), self._config.vocab, self.rows_of(sizes, want)
        if want.tokens == "top" and 1 <= (count := min(want.top, vocab)) <= MAX_TOP:
            best = self.top.of(nodes, count)
            return replace(best, features=output.features, hidden=output.hidden)
        if want.tokens == "top":
            best = output_from_logits(self.logits.read(np.float32, (nodes, vocab)), want)
            return replace(best, features=output.features, hidden=output.hidden)
        if want.tokens != "none":
            self._device.synchronize()
            output.argmax = self.ring.array[1 : 1 + nodes].copy()
        return output

    def rows_of(self, sizes: list[int], want: Want, launches: int | None = None) -> Output:
        """What stays on the device of trees of these sizes that were launched one after another: just now, or when
        there were so many launches."""
        nodes, vocab, hidden = sum(sizes), self._config.vocab, self._config.hidden
        still = self._still(self.launches if launches is None else launches)

        def rows(buffer: Buffer, offsets: np.ndarray, width: int) -> CudaRows:
            return CudaRows(buffer, offsets, width, still)

        output = Output()
        if want.tokens == "logits":
            output.logits = rows(self.logits, np.arange(nodes)[:, None] * vocab, vocab)
        if want.features:
            output.features = rows(self.features, feature_places(tuple(sizes), len(want.features)) * hidden, hidden)
        if want.hidden:
            output.hidden = rows(self.hidden, np.arange(nodes)[:, None] * hidden, hidden)
        return output

    def decoded_rows(self, count: int, features: tuple[int, ...]) -> Output:
        """Features of the first tokens of a launch that decoded: [layers][MAX_STEPS][hidden]."""
        hidden = self._config.hidden
        places = np.arange(len(features)) * MAX_STEPS + np.arange(count)[:, None]
        return Output(features=CudaRows(self.features, places * hidden, hidden, self._still(self.launches)))
