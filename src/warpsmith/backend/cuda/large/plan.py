"""What the activations-first pass takes on the device, part by part: known before anything is loaded."""

from __future__ import annotations

from warpsmith.backend.base import MemoryPart
from warpsmith.backend.cuda.large.layout import LargeLayout
from warpsmith.backend.cuda.memory.layout import rope_bytes
from warpsmith.backend.cuda.memory.plan import DRIVER_BYTES, pending_bytes
from warpsmith.backend.cuda.prefill import buffer_bytes
from warpsmith.backend.cuda.sampler import sampler_bytes
from warpsmith.backend.cuda.shape import LOGIT_ROWS, MAX_FEATURES
from warpsmith.backend.cuda.top import top_bytes
from warpsmith.backend.cuda.weights.loading import STAGING_BYTES
from warpsmith.backend.tree import MAX_NODES

VARIANTS = (1, 8, 16, 24)  # nodes that a build of the kernel takes
ROOMY = 160 << 10  # bytes of shared memory that an SM needs for all of them


def variants_for(shared_memory: int) -> tuple[int, ...]:
    """The builds that fit an SM: a tree's rows lie in its shared memory."""
    return VARIANTS if shared_memory >= ROOMY else tuple(n for n in VARIANTS if n <= 8)


def prompt_bytes(layout: LargeLayout) -> int:
    places = sum(stage.tiles * stage.blocks for stage in layout.stages)
    return sum(buffer_bytes(layout.config).values()) + 8 * places


def large_parts(
    layout: LargeLayout,
    context: int,
    sequences: int = 1,
    snapshots: int = 0,
    largest_tree: int = VARIANTS[-1],
) -> list[MemoryPart]:
    """The weights, as many sequences of `context` tokens, bytes of snapshots, and everything that forward passes of
    such trees write."""
    c = layout.config
    states = 2 * (layout.delta_bytes + layout.history_bytes)  # and the copy that decoding can go back to
    outputs = 4 * (LOGIT_ROWS * c.vocab + MAX_NODES * c.hidden * (1 + MAX_FEATURES)) + sum(top_bytes().values())
    outputs += sum(sampler_bytes(layout.sms, context).values())
    scratch = sum(layout.scratch_bytes(largest_tree).values())
    tables = rope_bytes(c, context) + layout.table_bytes + STAGING_BYTES
    return [
        MemoryPart("weights", layout.stream_bytes + layout.embedding_bytes + layout.vector_bytes),
        MemoryPart("keys and values", sequences * sum(layout.cache_bytes(context))),
        MemoryPart("DeltaNet states", sequences * states),
        MemoryPart("rows of a tree", sequences * sum(pending_bytes(layout).values())),
        MemoryPart("snapshots", snapshots),
        MemoryPart("scratch", scratch + outputs + tables),
        MemoryPart("prompts", prompt_bytes(layout)),
        MemoryPart("driver", DRIVER_BYTES),
    ]
