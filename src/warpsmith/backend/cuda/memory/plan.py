"""What a model takes on the device, part by part, and whether it fits: decided before anything is loaded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from math import ceil

from warpsmith.backend.base import MemoryPart
from warpsmith.backend.cuda.memory.layout import Layout, rope_bytes
from warpsmith.backend.cuda.memory.room import CONTEXT_BYTES, Room, gib
from warpsmith.backend.cuda.memory.sizes import Sizes
from warpsmith.backend.cuda.prefill.plan import buffer_bytes
from warpsmith.backend.cuda.prefill.streams import RowTiles
from warpsmith.backend.cuda.sampler import sampler_bytes
from warpsmith.backend.cuda.shape import LOGIT_ROWS, MAX_FEATURES
from warpsmith.backend.cuda.top import top_bytes
from warpsmith.backend.cuda.weights.loading import STAGING_BYTES
from warpsmith.backend.tree import MAX_NODES
from warpsmith.errors import DoesNotFit

DRIVER_BYTES = 128 << 20  # room left for the kernels' code and local memory, and for rounded-up allocations


def memory_parts(
    sizes: Sizes, context: int, sequences: int, snapshots: int, *, scratch: int, prompts: int
) -> list[MemoryPart]:
    """The weights, as many sequences of `context` tokens, bytes of snapshots, and what a forward pass or a prompt
    writes: `scratch` is the pass's own."""
    c = sizes.config
    states = 2 * (sizes.delta_bytes + sizes.history_bytes)  # and the copy that decoding can go back to
    outputs = 4 * (LOGIT_ROWS * c.vocab + MAX_NODES * c.hidden * (1 + MAX_FEATURES)) + sum(top_bytes().values())
    outputs += sum(sampler_bytes(sizes.sms, context).values())
    return [
        MemoryPart("weights", sizes.stream_bytes + sizes.embedding_bytes + sizes.vector_bytes),
        MemoryPart("keys and values", sequences * sum(sizes.cache_bytes(context))),
        MemoryPart("DeltaNet states", sequences * states),
        MemoryPart("rows of a tree", sequences * sum(sizes.pending_bytes().values())),
        MemoryPart("snapshots", snapshots),
        MemoryPart("scratch", scratch + outputs + rope_bytes(c, context) + STAGING_BYTES),
        MemoryPart("prompts", prompts),
        MemoryPart("driver", DRIVER_BYTES),
    ]


def weights_first_parts(layout: Layout, context: int, sequences: int = 1, snapshots: int = 0) -> list[MemoryPart]:
    """What the weights-first pass takes."""
    scratch = layout.exchange.bytes + layout.parts_bytes + layout.branch_bytes
    prompts = sum(buffer_bytes(layout.config).values()) if RowTiles(layout).suits() else 0
    return memory_parts(layout, context, sequences, snapshots, scratch=scratch, prompts=prompts)


def check_fit(layout: Layout, context: int, room: Room) -> None:
    def parts(tokens: int) -> list[MemoryPart]:
        return weights_first_parts(layout, tokens)

    refuse_what_does_not_fit(parts, context, room)


def refuse_what_does_not_fit(parts: Callable[[int], list[MemoryPart]], context: int, room: Room) -> None:
    """Refuse what there is no room for, with the numbers and with what would fit."""

    def needed(tokens: int) -> int:
        return sum(part.nbytes for part in parts(tokens))

    if needed(context) <= room.free:
        return
    listing = ", ".join(f"{p.what} {p.nbytes / 2**30:.2f}" for p in parts(context))
    fitting = bisect_right(range(context), room.free, key=needed) - 1
    if fitting > 1:
        fix = f"A context of {fitting} would fit (-c {fitting})."
    elif room.limited and needed(context) <= room.on_gpu:
        fix = f"Raise the limit: --memory-limit {ceil((needed(context) + CONTEXT_BYTES + room.held) / 2**20)}M."
    else:
        fix = "Use a smaller model, or --device cpu."
    raise DoesNotFit(f"A context of {context} tokens needs {gib(needed(context))} ({listing}), and {room}.", fix)
