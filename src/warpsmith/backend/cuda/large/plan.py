"""What the activations-first pass takes on the device, part by part: known before anything is loaded."""

from __future__ import annotations

from warpsmith.backend.base import MemoryPart
from warpsmith.backend.cuda.large.layout import LargeLayout
from warpsmith.backend.cuda.memory.plan import memory_parts
from warpsmith.backend.cuda.prefill import buffer_bytes

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
    scratch = sum(layout.scratch_bytes(largest_tree).values()) + layout.table_bytes
    return memory_parts(layout, context, sequences, snapshots, scratch=scratch, prompts=prompt_bytes(layout))
