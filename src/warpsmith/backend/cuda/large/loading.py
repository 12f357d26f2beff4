"""Weights from the file into the streams of the activations-first pass, once through a staging buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from warpsmith.backend.cuda.large.formats import SLAB_BYTES, SLAB_WEIGHTS, SOURCES
from warpsmith.backend.cuda.large.layout import LargeLayout
from warpsmith.backend.cuda.large.stream import SlabStages
from warpsmith.backend.cuda.large.structures import LargePack
from warpsmith.backend.cuda.memory.driver import Buffer, Device, Kernel
from warpsmith.backend.cuda.weights.loading import (
    STAGING_BYTES,
    Progress,
    StagedRows,
    held_bytes,
    warn_of_changes,
)
from warpsmith.backend.cuda.weights.stream import EMBEDDING
from warpsmith.checkpoint.blocks import TYPES, BlockType, dequantize
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.quantize import quantize


@dataclass(frozen=True)
class Blocks:
    """Rows as blocks of a type: those of the file, or rounded to them."""

    type: BlockType

    def convert(self, stored: BlockType, rows: np.ndarray) -> np.ndarray:
        return rows if stored == self.type else quantize(self.type, dequantize(stored, rows))


def load_weights(
    device: Device, pack: Kernel, layout: LargeLayout, tensors: Mapping[str, Tensor], progress: Progress | None = None
) -> tuple[Buffer, Buffer]:
    """Every matrix as slabs, where its stream has them; and the embedding's rows as they are."""
    table = tensors[EMBEDDING], held_as(layout.embedding_type)
    copied = [*copies_of(layout, tensors), table]
    warn_of_changes(changes(layout, tensors))
    rows = StagedRows(device, sum(held_bytes(*each) for each in copied), progress)
    return load_slabs(device, pack, layout, tensors, rows), load_table(device, *table, rows)


def held_as(source: str) -> Blocks:
    return Blocks(TYPES[SOURCES[source].type if source in SOURCES else source])


def sources_of(stream: SlabStages, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, str]]:
    """The tensors of a stream, and by which of SOURCES each gets there."""
    pieces = [piece for stage in stream.stages for part in stage.parts for piece in part.pieces]
    return [(tensors[piece.tensor], piece.source) for piece in pieces]


def copies_of(stream: SlabStages, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Blocks]]:
    """The tensors of a stream, and what each is handed over as."""
    return [(tensor, held_as(source)) for tensor, source in sources_of(stream, tensors)]


def changes(layout: LargeLayout, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, str, bool, int]]:
    """What each tensor is held as, for `warn_of_changes`. In slabs of HALF a type's values are as in the file."""
    for tensor, source in sources_of(layout, tensors):
        slab, _, handed = SOURCES[source]
        held = handed if slab == "HALF" else slab
        yield tensor, held, tensor.type.name == handed, tensor.elements // SLAB_WEIGHTS * SLAB_BYTES[slab]
    table, held = tensors[EMBEDDING], layout.embedding_type
    yield table, held, table.type.name == held, held_bytes(table, held_as(held))


def load_slabs(
    device: Device, pack: Kernel, planned: SlabStages, tensors: Mapping[str, Tensor], rows: StagedRows
) -> Buffer:
    """Matrices as slabs, where their stream has them."""
    stream, staging = device.zeros(planned.stream_bytes), device.allocate(STAGING_BYTES)
    for number, stage in enumerate(planned.stages):
        offsets = device.upload(planned.offsets(number))
        for piece in (piece for part in stage.parts for piece in part.pieces):
            for first, count, buffer, nbytes in rows.of(tensors[piece.tensor], held_as(piece.source)):
                staging.fill(buffer, nbytes)
                request = LargePack(
                    rows=staging.pointer,
                    stream=stream.pointer,
                    offsets=offsets.pointer,
                    source=SOURCES[piece.source].number,
                    first_row=piece.first_row,
                    offset=first,
                    count=count,
                    blocks=stage.blocks,
                    row_bytes=nbytes // count,
                    pattern=piece.pattern,
                )
                pack.launch(2 * planned.sms, 256, request)
        device.synchronize()  # before the offsets are given back
    return stream


def load_table(device: Device, tensor: Tensor, held: Blocks, rows: StagedRows) -> Buffer:
    """A matrix's rows as they are."""
    table = device.allocate(held_bytes(tensor, held))
    for first, count, buffer, nbytes in rows.of(tensor, held):
        table.fill(buffer, nbytes, first * (nbytes // count))
    device.synchronize()
    return table
