"""Weights from the file to the device: once through a staging buffer into the SMs' streams."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import cycle
from typing import Protocol

import numpy as np

from warpsmith.backend.cuda.memory.driver import Buffer, Device, Event, Kernel, Pinned
from warpsmith.backend.cuda.structures import Pack
from warpsmith.backend.cuda.weights.stream import EMBEDDING, WeightStream
from warpsmith.checkpoint.blocks import BlockType
from warpsmith.checkpoint.canonical import Tensor

STAGING_BYTES = 16 << 20

Progress = Callable[[int, int], object]  # hears of bytes done and bytes in all

log = logging.getLogger(__name__)


class Held(Protocol):
    """How rows are handed to the device."""

    @property
    def type(self) -> BlockType: ...

    def convert(self, stored: BlockType, rows: np.ndarray) -> np.ndarray: ...


def load_weights(
    device: Device, pack: Kernel, planned: WeightStream, tensors: Mapping[str, Tensor], progress: Progress | None = None
) -> tuple[Buffer, Buffer]:
    """Every matrix, rearranged so that each SM reads its share of a token in one contiguous stream; and the embedding's
    rows as they are, where the LM head has weights of its own.

    What the device does with rows runs in the order it was queued, so one staging buffer is enough there.
    """
    copied = [(tensors[piece.tensor], held.format) for held in planned.parts for piece in held.part.pieces]
    if planned.embedding_bytes:
        copied.append((tensors[EMBEDDING], planned.embedding_format))
    warn_of_changes((t, f.type.name, t.type.name in f.exact, held_bytes(t, f)) for t, f in copied)
    sms, stream, embedding = planned.schedule.sms, device.zeros(planned.bytes), device.allocate(planned.embedding_bytes)
    staging = device.allocate(STAGING_BYTES)
    starts = device.upload(planned.part_start.astype(np.uint64))
    dealt = device.upload(np.array([planned.first_tiles[h.stage.names[-1]] for h in planned.parts], dtype=np.int32))
    rows = StagedRows(device, sum(held_bytes(*each) for each in copied), progress)
    for number, held in enumerate(planned.parts):
        for piece in held.part.pieces:
            for first, count, buffer, nbytes in rows.of(tensors[piece.tensor], held.format):
                staging.fill(buffer, nbytes)
                pack.launch(
                    4 * sms,
                    256,
                    Pack(
                        rows=staging.pointer,
                        stream=stream.pointer,
                        part_start=starts.pointer + number * sms * 8,
                        first_tiles=dealt.pointer + number * (sms + 1) * 4,
                        format=held.format.type.ggml_id,
                        part_tile=held.part.first_tile,
                        first_row=piece.first_row,
                        offset=first,
                        count=count,
                        k=held.stage.k,
                        tile_rows=held.stage.tile_rows,
                        weave=piece.weave,
                    ),
                )
    if planned.embedding_bytes:
        for first, count, buffer, nbytes in rows.of(tensors[EMBEDDING], planned.embedding_format):
            embedding.fill(buffer, nbytes, first * (nbytes // count))
    device.synchronize()  # before the buffers are given back
    return stream, embedding


class StagedRows:
    """The host copies rows out of the file into one pinned buffer while the device fetches them from the other."""

    def __init__(self, device: Device, total: int, progress: Progress | None) -> None:
        self.buffers = cycle([(Pinned(device, np.uint8, STAGING_BYTES), Event(device)) for _ in range(2)])
        self.total, self.done, self.progress = total, 0, progress

    def of(self, tensor: Tensor, held: Held) -> Iterator[tuple[int, int, Pinned, int]]:
        """(first row, rows, buffer they are in, bytes): some rows of a tensor at a time, in the blocks of the format
        they are held in. Whoever takes them has queued their copy when he asks for more."""
        raw = tensor.raw()
        step = STAGING_BYTES // held.type.row_bytes(tensor.shape[-1])
        for first in range(0, len(raw), step):
            rows = held.convert(tensor.type, raw[first : first + step])
            buffer, fetched = next(self.buffers)
            fetched.wait()
            buffer.array[: rows.nbytes].reshape(rows.shape)[:] = rows
            yield first, len(rows), buffer, rows.nbytes
            fetched.record()
            self.done += rows.nbytes
            if self.progress:
                self.progress(self.done, self.total)


def held_bytes(tensor: Tensor, held: Held) -> int:
    return tensor.elements // held.type.elems * held.type.bytes


def warn_of_changes(kept: Iterable[tuple[Tensor, str, bool, int]]) -> None:
    """Say which tensors are held as another type than their file's, given (tensor, the type it is held as, whether that
    has all its values, bytes): which are rounded, and what they cost more."""
    changed: dict[tuple[str, str, bool], list[int]] = {}
    for tensor, held, exact, nbytes in kept:
        if held != tensor.type.name:
            changed.setdefault((tensor.type.name, held, exact), []).append(nbytes - tensor.nbytes)
    for (stored, held, exact), costs in changed.items():
        count, more = len(costs), sum(costs)
        verb = "are held as" if exact else "are rounded to"
        cost = f", which takes {more / 2**20:.1f} MiB more than their file" if more > 0 else ""
        log.warning("%d tensors of type %s %s %s%s.", count, stored, verb, held, cost)
