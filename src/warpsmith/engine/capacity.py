"""How many sequences run at a time and how much is remembered of earlier ones, from the memory there is."""

from __future__ import annotations

from warpsmith.backend.base import Backend
from warpsmith.errors import DoesNotFit

PARALLEL = 8  # sequences at most, where nobody says how many
CACHE_BYTES = 8 << 30  # of snapshots at most, where nobody says how many


def plan(backend: Backend, context: int, parallel: int | None, cache_bytes: int | None) -> tuple[int, int]:
    """Sequences, and bytes of snapshots, on a backend that has its weights and no states yet.

    What is left out is chosen: as many states as fit into half of the free memory, at most eight and at least one; then
    a quarter of the rest for snapshots, at most 8 GiB. What is asked for and does not fit is refused. One state alone
    is for the backend to refuse, which knows what would fit.
    """
    free = backend.free_memory()
    one = _bytes(backend, context, 2) - _bytes(backend, context, 1)
    if parallel is None:
        most = min(PARALLEL, backend.largest_tree)
        parallel = most if free is None else max(1, min(most, free // 2 // one))
    states = parallel * one
    if cache_bytes is None:
        cache_bytes = CACHE_BYTES if free is None else min(CACHE_BYTES, max(0, free - states) // 4)
    if free is not None and states + cache_bytes > free and (parallel > 1 or cache_bytes):
        raise DoesNotFit(
            f"{parallel} sequences of {context} tokens take {states / 2**30:.2f} GiB and snapshots "
            f"{cache_bytes / 2**30:.2f} GiB; {free / 2**30:.2f} GiB are free.",
            "Lower --parallel, --cache-memory or the context length (-c).",
        )
    return parallel, cache_bytes


def _bytes(backend: Backend, context: int, sequences: int) -> int:
    return sum(part.nbytes for part in backend.memory(context, sequences))
