"""Weights from the file to the device: once through a staging buffer into the SMs' streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle

import numpy as np

from warpsmith.backend.cuda.driver import Buffer, Device, Event, Kernel, Pinned
from warpsmith.backend.cuda.layout import Layout, Pack
from warpsmith.checkpoint.blocks import TYPES, dequantize
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.quantize import quantize

STAGING_BYTES = 16 << 20

Progress = Callable[[int, int], object]  # hears of bytes done and bytes in all


def pack_stream(
    device: Device, pack: Kernel, layout: Layout, tensors: Mapping[str, Tensor], progress: Progress | None = None
) -> Buffer:
    """Every matrix, rearranged so that each SM reads its share of a token in one contiguous stream.

    The host copies rows out of the file into one pinned buffer while the device fetches them from the other. What the
    device does with them runs in the order it was queued, so one staging buffer is enough there.
    """
    stream = device.zeros(layout.stream_bytes)
    staging = device.allocate(STAGING_BYTES)
    starts = device.upload(layout.stage_start.astype(np.uint64))
    total = sum(tensors[p.tensor].elements * 2 for s in layout.stages for p in s.pieces)
    done = 0
    buffers = cycle([(Pinned(device, np.uint8, STAGING_BYTES), Event(device)) for _ in range(2)])
    for number, stage in enumerate(layout.stages):
        for piece in stage.pieces:
            tensor = tensors[piece.tensor]
            raw = tensor.raw()
            step = STAGING_BYTES // (stage.k * 2)
            for first in range(0, len(raw), step):
                rows = raw[first : first + step]
                if tensor.type.name != "BF16":
                    rows = quantize(TYPES["BF16"], dequantize(tensor.type, rows))
                buffer, fetched = next(buffers)
                fetched.wait()
                buffer.array[: rows.nbytes].reshape(rows.shape)[:] = rows
                staging.fill(buffer, rows.nbytes)
                fetched.record()
                pack.launch(
                    4 * layout.sms,
                    256,
                    Pack(
                        rows=staging.pointer,
                        stream=stream.pointer,
                        stage_start=starts.pointer + number * layout.sms * 8,
                        first_row=piece.first_row,
                        offset=first,
                        count=len(rows),
                        k=stage.k,
                        units=stage.units,
                        unit_rows=stage.unit_rows,
                        pattern=piece.pattern,
                    ),
                )
                done += rows.nbytes
                if progress:
                    progress(done, total)
    device.synchronize()  # before the buffers are given back
    return stream
