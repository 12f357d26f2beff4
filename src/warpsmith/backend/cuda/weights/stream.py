"""Weights from the file to the device: once through a staging buffer into the SMs' streams."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import cycle

import numpy as np

from warpsmith.backend.cuda.memory.driver import Buffer, Device, Event, Kernel, Pinned
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.shape import STREAM_TYPES
from warpsmith.backend.cuda.structures import Pack
from warpsmith.checkpoint.blocks import TYPES, dequantize
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.quantize import quantize

STAGING_BYTES = 16 << 20
EMBEDDING = "token_embd.weight"

Progress = Callable[[int, int], object]  # hears of bytes done and bytes in all

log = logging.getLogger(__name__)


def load_weights(
    device: Device, pack: Kernel, layout: Layout, tensors: Mapping[str, Tensor], progress: Progress | None = None
) -> tuple[Buffer, Buffer]:
    """Every matrix, rearranged so that each SM reads its share of a token in one contiguous stream; and the embedding's
    rows as they are, where the LM head has weights of its own.

    What the device does with rows runs in the order it was queued, so one staging buffer is enough there.
    """
    copied = [(tensors[piece.tensor], part.type) for _, part in layout.parts for piece in part.pieces]
    if not layout.config.tied:
        copied.append((tensors[EMBEDDING], layout.embedding_type))
    warn_of_widened(copied)
    stream, embedding = device.zeros(layout.stream_bytes), device.allocate(layout.embedding_bytes)
    staging = device.allocate(STAGING_BYTES)
    starts = device.upload(layout.part_start.astype(np.uint64))
    rows = _Rows(device, sum(held_bytes(*each) for each in copied), progress)
    for number, (stage, part) in enumerate(layout.parts):
        for piece in part.pieces:
            for first, count, buffer, nbytes in rows.of(tensors[piece.tensor], part.type):
                staging.fill(buffer, nbytes)
                pack.launch(
                    4 * layout.sms,
                    256,
                    Pack(
                        rows=staging.pointer,
                        stream=stream.pointer,
                        part_start=starts.pointer + number * layout.sms * 8,
                        type=STREAM_TYPES.index(part.type),
                        part_unit=part.first_unit,
                        first_row=piece.first_row,
                        offset=first,
                        count=count,
                        k=stage.k,
                        units=stage.units,
                        unit_rows=stage.unit_rows,
                        pattern=piece.pattern,
                    ),
                )
    if not layout.config.tied:
        for first, count, buffer, nbytes in rows.of(tensors[EMBEDDING], layout.embedding_type):
            embedding.fill(buffer, nbytes, first * (nbytes // count))
    device.synchronize()  # before the buffers are given back
    return stream, embedding


class _Rows:
    """The host copies rows out of the file into one pinned buffer while the device fetches them from the other."""

    def __init__(self, device: Device, total: int, progress: Progress | None) -> None:
        self.buffers = cycle([(Pinned(device, np.uint8, STAGING_BYTES), Event(device)) for _ in range(2)])
        self.total, self.done, self.progress = total, 0, progress

    def of(self, tensor: Tensor, held: str) -> Iterator[tuple[int, int, Pinned, int]]:
        """(first row, rows, buffer they are in, bytes): some rows of a tensor at a time, as the type they are held in.
        Whoever takes them has queued their copy when he asks for more."""
        raw, target = tensor.raw(), TYPES[held]
        step = STAGING_BYTES // target.row_bytes(tensor.shape[-1])
        for first in range(0, len(raw), step):
            rows = raw[first : first + step]
            if tensor.type != target:
                rows = quantize(target, dequantize(tensor.type, rows))
            buffer, fetched = next(self.buffers)
            fetched.wait()
            buffer.array[: rows.nbytes].reshape(rows.shape)[:] = rows
            yield first, len(rows), buffer, rows.nbytes
            fetched.record()
            self.done += rows.nbytes
            if self.progress:
                self.progress(self.done, self.total)


def held_bytes(tensor: Tensor, held: str) -> int:
    return tensor.elements // TYPES[held].elems * TYPES[held].bytes


def warn_of_widened(copied: Iterable[tuple[Tensor, str]]) -> None:
    """Say which tensors grow: those whose type the kernel does not multiply, or that share units with another type."""
    kinds = Counter((t.type.name, held) for t, held in copied if held_bytes(t, held) > t.nbytes)
    for (kind, held), count in kinds.items():
        log.warning("%d tensors of type %s are held as %s, which takes more memory than their file.", count, kind, held)
