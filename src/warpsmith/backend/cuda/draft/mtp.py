"""A model's MTP head on the device: its block as a model of one layer, whose tokens are the rows that enter it.

The entry is a projection of a token's embedding and the hidden row before it. What it gives is written where that
model's embeddings are, row by row; the pass then runs a chain of these rows. The head is the target's. Rows that follow
its own guesses are queued behind each other: the host waits once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from warpsmith.backend.base import Output, Want, join_outputs
from warpsmith.backend.cuda.build.compiler import build
from warpsmith.backend.cuda.draft.lent import HeadProgram
from warpsmith.backend.cuda.draft.structures import Enter, Follow
from warpsmith.backend.cuda.large.formats import EMBEDDINGS, ROUNDED
from warpsmith.backend.cuda.rows import CudaRows
from warpsmith.backend.reference.ops import rms_norm
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.quantize import quantize
from warpsmith.model.config import Config

if TYPE_CHECKING:
    from warpsmith.backend.cuda.backend import CudaBackend
    from warpsmith.backend.cuda.state import CudaState

ROWS = 64  # of the table that takes the place of embeddings


def block_config(config: Config) -> Config:
    """The MTP block as a model; its vocabulary are the rows that enter it."""
    return replace(config, layers=1, recurrent=(False,), vocab=ROWS, tied=False, mtp_layers=0)


def block_tensors(config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    block = f"blk.{config.layers}."
    own = {name.removeprefix(block): tensor for name, tensor in tensors.items() if name.startswith(block)}
    table = Tensor("", TYPES[ROUNDED], (ROWS, config.hidden), lambda: np.zeros((ROWS, 2 * config.hidden), np.uint8))
    found = {f"blk.0.{name}": tensor for name, tensor in own.items() if not name.startswith("nextn.")}
    norm = own["nextn.shared_head_norm.weight"]
    return found | {"token_embd.weight": table, "output.weight": table, "output_norm.weight": norm}


class MtpProgram:
    """`make` makes a backend of a model's configuration and tensors."""

    def __init__(
        self,
        backend: CudaBackend,
        tensors: Mapping[str, Tensor],
        head: HeadProgram,
        make: Callable[[Config, Mapping[str, Tensor]], CudaBackend],
    ) -> None:
        c, device = backend.config, backend.device
        self.backend, self._head = backend, head
        self.block = make(block_config(c), block_tensors(c, tensors))
        enters = {name: tensors[f"blk.{c.layers}.nextn.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")}
        self._token_norm, self._hidden_norm = enters["enorm"].float32(), enters["hnorm"].float32()
        projection = quantize(TYPES[ROUNDED], enters["eh_proj"].float32().reshape(c.hidden, 2 * c.hidden))
        self._weights = device.upload(projection)
        self._rows = device.allocate(self.block.largest_launch * 2 * c.hidden * 4)
        self._norms = device.upload(np.concatenate([self._token_norm, self._hidden_norm]).astype(np.float32))
        lent = backend.lend()
        self._embedding = lent.embedding
        image = build("draft/enter.cu", backend.architecture, {"HIDDEN": c.hidden})
        self._enter = device.load(image).kernel("enter")
        kind = EMBEDDINGS.index(lent.embedding_type)
        sizes = {"HIDDEN": c.hidden, "EPS": f"{c.eps!r}f", "EMBEDDING_TYPE": kind}
        self._follow = device.load(build("draft/follow.cu", backend.architecture, sizes)).kernel("follow")

    def run(self, state: CudaState, tokens: Sequence[int], hidden: np.ndarray, position: int, want: Want) -> Output:
        """`Backend.mtp`."""
        most = self.block.largest_launch
        parts: list[Output] = []
        for first in range(0, len(tokens), most):
            rows = self._queue(state, tokens[first : first + most], hidden[first : first + most], position + first)
            last = first + len(rows) == len(tokens)
            part = Output()
            if want.tokens != "none" and (want.every_row or last):
                part = self._head.of(rows if want.every_row else rows[-1:], want)
            if want.hidden:
                part.hidden = rows
            parts.append(part if len(tokens) <= most else join_outputs([part]))
        return join_outputs(parts) if len(parts) > 1 else parts[0]

    def ahead(
        self, state: CudaState, tokens: Sequence[int], hidden: np.ndarray, position: int, top: int, steps: int
    ) -> Output:
        """`Backend.mtp_ahead`, of so many best tokens."""
        most, best = self.block.largest_launch, self.backend.top
        for first in range(0, len(tokens), most):
            rows = self._queue(state, tokens[first : first + most], hidden[first : first + most], position + first)
        for step in range(steps):
            if step > 0:
                request = Follow(
                    embedding=self._embedding.pointer, token=best.row(step - 1, top), norms=self._norms.pointer,
                    hidden=rows.buffer.pointer + 4 * int(rows.offsets[-1, 0]), out=self._rows.pointer,
                )  # fmt: skip
                self._follow.launch(2, 256, request)
                rows = self._queue_entered(state, 1, position + len(tokens) + step - 1)
            self._head.queue(rows[-1:])
            best.queue(1, top, to=step)
        output = best.found(steps, top)
        output.hidden = rows[-1:]
        return output

    def _queue(self, state: CudaState, tokens: Sequence[int], hidden: np.ndarray, position: int) -> CudaRows:
        """A chain that a launch takes; returns its hidden rows."""
        eps = self.backend.config.eps
        token = rms_norm(self.backend.embed(tokens), self._token_norm, eps)
        rows = np.concatenate([token, rms_norm(np.asarray(hidden, np.float32), self._hidden_norm, eps)], axis=1)
        self._rows.write(rows.astype(np.float32))
        return self._queue_entered(state, len(tokens), position)

    def _queue_entered(self, state: CudaState, count: int, position: int) -> CudaRows:
        """The same of rows that wait before the entry."""
        if state.mtp is None:
            state.mtp = self.block.new_state(state.context)
        own, c = state.mtp, self.backend.config
        request = Enter(
            weights=self._weights.pointer, rows=self._rows.pointer, out=self.block.embedding.pointer, count=count
        )
        self._enter.launch(c.hidden // 8, 256, request)
        own.length = position
        output = self.block.forward([(own, Tree.chain(range(count)))], Want("none", hidden=True))
        self.block.commit(own, range(count))
        assert isinstance(output.hidden, CudaRows)
        return output.hidden
