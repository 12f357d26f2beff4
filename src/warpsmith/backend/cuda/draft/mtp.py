"""A model's MTP head on the device: its block as a model of one layer, whose tokens are the rows that enter it.

The entry is a projection of a token's embedding and the hidden row before it. What it gives is written where that
model's embeddings are, row by row; the pass then runs a chain of these rows. The head is the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from warpsmith.backend.base import Output, Want, join_outputs
from warpsmith.backend.cuda.build.compiler import build
from warpsmith.backend.cuda.draft.lent import HeadProgram
from warpsmith.backend.cuda.draft.structures import Enter
from warpsmith.backend.cuda.large.formats import ROUNDED
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
        image = build("draft/enter.cu", backend.architecture, {"HIDDEN": c.hidden})
        self._enter = device.load(image).kernel("enter")

    def run(self, state: CudaState, tokens: Sequence[int], hidden: np.ndarray, position: int, want: Want) -> Output:
        """`Backend.mtp`."""
        if state.mtp is None:
            state.mtp = self.block.new_state(state.context)
        c, most, own = self.backend.config, self.block.largest_launch, state.mtp
        parts: list[Output] = []
        for first in range(0, len(tokens), most):
            some = list(tokens[first : first + most])
            past = np.asarray(hidden[first : first + most], np.float32)
            token = rms_norm(self.backend.embed(some), self._token_norm, c.eps)
            rows = np.concatenate([token, rms_norm(past, self._hidden_norm, c.eps)], axis=1)
            self._rows.write(rows.astype(np.float32))
            request = Enter(
                weights=self._weights.pointer,
                rows=self._rows.pointer,
                out=self.block.embedding.pointer,
                count=len(some),
            )
            self._enter.launch(c.hidden // 8, 256, request)
            own.length = position + first
            output = self.block.forward([(own, Tree.chain(range(len(some))))], Want("none", hidden=True))
            self.block.commit(own, range(len(some)))
            assert output.hidden is not None
            last = first + len(some) == len(tokens)
            part = Output()
            if want.tokens != "none" and (want.every_row or last):
                part = self._head.of(output.hidden if want.every_row else output.hidden[-1:], want)
            if want.hidden:
                part.hidden = output.hidden
            parts.append(part if len(tokens) <= most else join_outputs([part]))
        return join_outputs(parts) if len(parts) > 1 else parts[0]
