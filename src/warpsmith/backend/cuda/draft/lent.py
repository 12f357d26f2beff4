"""What a target lends a draft, and its LM head as a program of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from warpsmith.backend.base import Output, Want, join_outputs
from warpsmith.backend.cuda.build.compiler import build
from warpsmith.backend.cuda.draft.layout import COLUMNS, HeadStream
from warpsmith.backend.cuda.draft.plan import embedding_type
from warpsmith.backend.cuda.draft.structures import DraftParams, DraftRequest, Gather
from warpsmith.backend.cuda.large.deal import GROUP_BLOCKS, ROWS, Deal, kernel_tables, most_parts
from warpsmith.backend.cuda.large.formats import SLABS
from warpsmith.backend.cuda.large.loading import held_as, load_slabs, load_table
from warpsmith.backend.cuda.memory.driver import Buffer
from warpsmith.backend.cuda.rows import CudaRows
from warpsmith.backend.cuda.weights.loading import StagedRows
from warpsmith.backend.cuda.weights.stream import EMBEDDING
from warpsmith.backend.rows import Rows
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.model.config import Config

if TYPE_CHECKING:
    from warpsmith.backend.cuda.backend import CudaBackend

THREADS = 384


@dataclass(frozen=True)
class LentHead:
    """An LM head as slabs."""

    stream: Buffer
    deal: Deal
    parcels: Buffer  # where the stream has them
    first_parcel: Buffer  # of each SM's share of the head

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (self.stream, self.parcels, self.first_parcel))


@dataclass(frozen=True)
class LentEmbedding:
    """The rows of a model's embeddings."""

    rows: Buffer
    type: str


def lendable(config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a model's tensors those that drafts use: embeddings, LM head, the MTP block."""
    block = f"blk.{config.layers}."
    return {n: tensor for n, tensor in tensors.items() if n in (EMBEDDING, "output.weight") or n.startswith(block)}


def copied_embedding(backend: CudaBackend) -> LentEmbedding:
    """Of a target whose own pass has them in another layout."""
    tensor, kind = backend.lendable[EMBEDDING], embedding_type(backend.stored)
    return LentEmbedding(load_table(backend.device, tensor, held_as(kind), StagedRows(backend.device, 0, None)), kind)


def copied_head(backend: CudaBackend, head: HeadStream, tensors: Mapping[str, Tensor]) -> LentHead:
    """Of its first rows, as many as `head` has."""
    device, name = backend.device, f"{head.name}.weight"
    whole = tensors[name]
    rows = Tensor(name, whole.type, (head.vocab, head.hidden), lambda: whole.raw()[: head.vocab])
    pack = device.load(build("large/pack.cu", backend.architecture, {})).kernel("pack")
    stream = load_slabs(device, pack, head, {name: rows}, StagedRows(device, 0, None))
    first = device.upload(head.first_parcel[0].astype(np.uint32))
    return LentHead(stream, head.deals[0], device.upload(head.parcels), first)


class HeadProgram:
    """The LM head on rows that are normed already."""

    def __init__(self, backend: CudaBackend, lent: LentHead) -> None:
        self.backend, self.lent = backend, lent
        c, device, sms = backend.config, backend.device, backend.chip.sms
        kinds = {part.type for part in lent.deal.stage.parts}
        constants = {
            "HIDDEN": c.hidden, "FFN": c.hidden, "VOCAB": c.vocab, "LAYERS": 0, "HEADS": 1, "KV_HEADS": 1,
            "EPS": f"{c.eps!r}f", "FEATURES": 1, "ROUND_Q8_0": 1,
            "SLAB_TYPE_MASK": sum(1 << i for i, slab in enumerate(SLABS) if slab in kinds),
            "EMBEDDING_TYPE": 0, "GROUP_BLOCKS": GROUP_BLOCKS, "SMS": sms,
            "MOST_PARTS": most_parts([lent.deal]), "LAYER_RESULTS": 1, "FC_RESULTS": 1, "CONTEXT_RESULTS": 1,
            "TABLE_ENTRIES": 8, "IN_FLIGHT": 4, "BETWEEN": 4, "SHARED_MEMORY": backend.chip.shared_memory,
        } | backend.options  # fmt: skip
        image = build("draft/head.cu", backend.architecture, constants)
        self._kernel = device.load(image).kernel("head", backend.chip.shared_memory)
        sizes = {"HIDDEN": c.hidden, "FEATURES": 1, "NODES": COLUMNS}
        self._gather = device.load(build("draft/gather.cu", backend.architecture, sizes)).kernel("gather")
        self._tables = [device.upload(table) for table in kernel_tables([lent.deal])]
        self._sums = device.zeros(lent.deal.results * COLUMNS * ROWS * 4)
        self._waiting = device.allocate(COLUMNS * c.hidden * 2)
        self._from_host: Buffer | None = None
        stages, runs, tiles = (table.pointer for table in self._tables)
        self._params = DraftParams(
            stages=stages, runs=runs, tiles=tiles, head_stream=lent.stream.pointer,
            head_parcels=lent.parcels.pointer, first_head_parcel=lent.first_parcel.pointer,
            head_sums=self._sums.pointer, waiting=self._waiting.pointer,
            out_logits=backend.outputs.logits.pointer, profile=backend.profile.pointer,
        )  # fmt: skip

    def of(self, rows: Rows, want: Want) -> Output:
        """What is wanted of the logits of rows [n, hidden]."""
        parts = []
        for first in range(0, len(rows), COLUMNS):
            piece = rows[first : first + COLUMNS]
            self._make_logits(piece if isinstance(piece, CudaRows) else self._brought(piece))
            part = self.backend.outputs.top.tokens_of(len(piece), want)
            parts.append(part if len(rows) <= COLUMNS else join_outputs([part]))
        return join_outputs(parts) if len(parts) > 1 else parts[0]

    def _make_logits(self, rows: CudaRows) -> None:
        gathered = Gather(waiting=self._waiting.pointer, source=rows.buffer.pointer, groups=1, rows=COLUMNS)
        gathered.offsets[: len(rows)] = rows.offsets[:, 0].tolist()
        self.backend.overwrite_outputs()
        self._gather.launch(len(rows), 128, gathered)
        request = DraftRequest(nodes=len(rows), want_logits=1)
        self._kernel.launch(self.backend.chip.sms, THREADS, self._params, request)

    def _brought(self, rows: Rows) -> CudaRows:
        width = self.backend.config.hidden
        if self._from_host is None:
            self._from_host = self.backend.device.allocate(COLUMNS * width * 4)
        self._from_host.write(np.ascontiguousarray(rows.numpy(), np.float32))
        return CudaRows(self._from_host, np.arange(len(rows))[:, None] * width, width, lambda: True)
