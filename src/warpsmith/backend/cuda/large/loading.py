"""Weights from the file into the streams of the activations-first pass, once through a staging buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from warpsmith.backend.cuda.large.formats import SOURCES
from warpsmith.backend.cuda.large.layout import LargeLayout
from warpsmith.backend.cuda.large.structures import LargePack
from warpsmith.backend.cuda.memory.driver import Buffer, Device, Kernel
from warpsmith.backend.cuda.weights.loading import (
    STAGING_BYTES,
    Progress,
    StagedRows,
    held_bytes,
    warn_of_widened,
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
    """Every matrix as slabs, each SM's in the order it reads them; and the embedding's rows as they are."""

    def held_as(kind: str) -> Blocks:
        return Blocks(TYPES[kind])

    pieces = [(stage, piece) for stage in layout.stages for part in stage.parts for piece in part.pieces]
    copied = [(tensors[piece.tensor], held_as(piece.source)) for _, piece in pieces]
    copied.append((tensors[EMBEDDING], held_as(layout.embedding_type)))
    warn_of_widened(copied)
    stream, embedding = device.zeros(layout.stream_bytes), device.allocate(layout.embedding_bytes)
    staging = device.allocate(STAGING_BYTES)
    rows = StagedRows(device, sum(held_bytes(*each) for each in copied), progress)
    for number, stage in enumerate(layout.stages):
        offsets = device.upload(layout.offsets(number))
        for piece in (piece for part in stage.parts for piece in part.pieces):
            for first, count, buffer, nbytes in rows.of(tensors[piece.tensor], held_as(piece.source)):
                staging.fill(buffer, nbytes)
                request = LargePack(
                    rows=staging.pointer,
                    stream=stream.pointer,
                    offsets=offsets.pointer,
                    source=SOURCES[piece.source][1],
                    first_row=piece.first_row,
                    offset=first,
                    count=count,
                    blocks=stage.blocks,
                    row_bytes=nbytes // count,
                    pattern=piece.pattern,
                )
                pack.launch(2 * layout.sms, 256, request)
        device.synchronize()  # before the offsets are given back
    for first, count, buffer, nbytes in rows.of(tensors[EMBEDDING], held_as(layout.embedding_type)):
        embedding.fill(buffer, nbytes, first * (nbytes // count))
    device.synchronize()
    return stream, embedding
